//! Converts Python's arguments to the layer's configuration, and errors to those of Python.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use aristos::checkpoint::ACTIVATIONS;
use aristos::moe::{Activation, Dtype, Glu, LayerConfig, LayerSpec, MlpConfig, MoeError, Options, RouterConfig};
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(_aristos, AristosError, PyRuntimeError, "What the runtime reports: one line.");

/// The folder of the last checkpoint that `aristos.save` completed in this process.
static SAVED: Mutex<Option<String>> = Mutex::new(None);

/// Sets the folder that the error of a lost process names for a restart.
#[pyfunction]
pub(crate) fn set_saved_folder(folder: String) {
    *SAVED.lock().unwrap_or_else(PoisonError::into_inner) = Some(folder);
}

/// The end of the error of a lost process.
#[pyfunction]
pub(crate) fn how_to_restart() -> String {
    match &*SAVED.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(folder) => format!("; start the job again from its last checkpoint, {folder}"),
        None => String::new(),
    }
}

pub(crate) fn error(e: impl std::fmt::Display) -> PyErr {
    AristosError::new_err(e.to_string())
}

/// Converts an error to one of Python. Wrong arguments become a `ValueError`.
pub(crate) fn moe_error(e: MoeError) -> PyErr {
    match e {
        MoeError::Config(_) | MoeError::Shape { .. } | MoeError::Usage { .. } => PyValueError::new_err(e.to_string()),
        MoeError::Wait { .. } | MoeError::Lost { .. } => error(format!("{e}{}", how_to_restart())),
        e => error(e),
    }
}

pub(crate) fn check_rank(rank: usize, size: usize) -> PyResult<()> {
    match rank < size {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!("rank is {rank}, expected less than size, which is {size}"))),
    }
}

/// The form of the experts, as in `aristos.experts`.
pub(crate) struct Form<'a> {
    pub(crate) activation: &'a str,
    pub(crate) gated: bool,
    pub(crate) bias: bool,
    pub(crate) limit: f32,
    pub(crate) limit_after: bool,
    pub(crate) plus_one: bool,
}

/// The sizes of a layer. `experts` is the number of experts of all processes.
pub(crate) struct SizesOf {
    pub(crate) hidden: usize,
    pub(crate) intermediate: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) max_tokens: usize,
}

/// Returns the specification of a layer over `size` processes.
pub(crate) fn spec_of(
    sizes: SizesOf,
    form: &Form<'_>,
    dtype: &str,
    size: usize,
    wait_limit_s: f64,
) -> PyResult<LayerSpec> {
    let elements = match dtype {
        "float32" => Dtype::F32,
        "bfloat16" => Dtype::Bf16,
        "float16" => Dtype::F16,
        _ => return Err(PyValueError::new_err(format!("dtype is {dtype:?}, expected float32, bfloat16 or float16"))),
    };
    let wait_limit = Duration::try_from_secs_f64(wait_limit_s)
        .map_err(|_| PyValueError::new_err(format!("the wait limit is {wait_limit_s} s, expected a time")))?;
    let Form { activation, gated, bias, limit, limit_after, plus_one } = *form;
    let mut mlp = MlpConfig::gated(sizes.intermediate, activation_named(activation)?);
    (mlp.gated, mlp.bias, mlp.glu) = (gated, bias, Glu { limit, limit_after, plus_one });
    let config = LayerConfig::new(sizes.hidden, sizes.experts, RouterConfig::external(sizes.top_k), mlp);
    let mut options = Options::default();
    options.wait_limit = wait_limit;
    Ok(LayerSpec::new(config, size, sizes.max_tokens).dtype(elements).options(options))
}

/// Looks up an activation by its name in configurations.
fn activation_named(name: &str) -> PyResult<Activation> {
    let known = ACTIVATIONS.iter().find(|(known, _)| *known == name);
    known.map(|&(_, activation)| activation).ok_or_else(|| {
        let names: Vec<&str> = ACTIVATIONS.iter().map(|(known, _)| *known).collect();
        PyValueError::new_err(format!("activation is {name:?}, expected one of {}", names.join(", ")))
    })
}
