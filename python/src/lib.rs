//! The layer for Python: what `aristos/` in this folder wraps. Memory is the caller's, by address; the wrapper checks types, shapes and
//! strides before it calls.

use std::slice;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use aristos::moe::kernels::{Activation, Element};
use aristos::moe::{
    self, Dtype, LayerConfig, LayerSpec, MlpConfig, MoeError, MoeLayer, Options, Proj, RouterConfig, WeightError,
    WeightId, WeightSource, proj_index,
};
use aristos::shmem::{ShmTransport, Shmem, ShmemError};
use half::bf16;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(_aristos, AristosError, PyRuntimeError, "What the runtime reports: one line.");

type Over<E> = moe::Layer<Shmem<ShmTransport>, E>;
type SavedOf<E> = <Over<E> as MoeLayer>::Saved;

/// The layer in one of its element types.
enum Engine {
    F32(Over<f32>),
    Bf16(Over<bf16>),
}

/// What a forward pass left for its backward.
enum Left {
    F32(SavedOf<f32>),
    Bf16(SavedOf<bf16>),
}

fn error(e: impl std::fmt::Display) -> PyErr {
    AristosError::new_err(e.to_string())
}

/// Wrong arguments are Python's `ValueError`.
fn moe_error(e: MoeError) -> PyErr {
    match e {
        MoeError::Config(_) | MoeError::Shape { .. } => PyValueError::new_err(e.to_string()),
        e => error(e),
    }
}

/// Weights that are all zero: the caller sets them.
struct Zeros(LayerConfig);

impl WeightSource for Zeros {
    fn config(&self) -> &LayerConfig {
        &self.0
    }

    fn name(&self, id: WeightId) -> String {
        format!("{id:?}")
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        Ok(vec![0.0; self.0.shape(id).iter().product()])
    }
}

/// Memory of the caller.
///
/// # Safety
/// `address` is that of `len` initialised elements, aligned, which nobody writes during `'a`.
unsafe fn read<'a, T>(address: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: as the function's.
    unsafe { slice::from_raw_parts(address as *const T, len) }
}

/// Memory of the caller, to be written.
///
/// # Safety
/// As [`read`], and nobody else reads it during `'a`.
unsafe fn write<'a, T>(address: usize, len: usize) -> &'a mut [T] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: as the function's.
    unsafe { slice::from_raw_parts_mut(address as *mut T, len) }
}

/// This process's part of a layer of experts that the caller routes to.
#[pyclass(frozen, module = "aristos._aristos")]
struct Layer {
    engine: Mutex<Engine>,
    rank: usize,
    config: LayerConfig,
    elements: Dtype,
}

/// What a forward pass left for its backward.
#[pyclass(frozen, module = "aristos._aristos")]
struct Saved {
    left: Mutex<Option<Left>>,
    tokens: usize,
}

impl Layer {
    fn lock(&self) -> PyResult<std::sync::MutexGuard<'_, Engine>> {
        self.engine.lock().map_err(|_| error("the layer failed before"))
    }

    /// Elements of one matrix of an expert.
    fn matrix_len(&self) -> usize {
        self.config.hidden * self.config.expert.intermediate
    }
}

fn proj(name: &str) -> PyResult<Proj> {
    match name {
        "gate" => Ok(Proj::Gate),
        "up" => Ok(Proj::Up),
        "down" => Ok(Proj::Down),
        _ => Err(PyValueError::new_err(format!("projection {name:?}: expected gate, up or down"))),
    }
}

/// Runs a closure over the layer of either element type.
macro_rules! with {
    ($engine:expr, $layer:ident => $body:expr) => {
        match $engine {
            Engine::F32($layer) => $body,
            Engine::Bf16($layer) => $body,
        }
    };
}

#[pymethods]
impl Layer {
    /// Makes the layer with the other processes that know `key`. Collective.
    #[new]
    #[pyo3(signature = (key, rank, size, *, hidden, intermediate, experts, top_k, activation, gated, dtype, max_tokens, wait_limit_s))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        key: &str,
        rank: usize,
        size: usize,
        hidden: usize,
        intermediate: usize,
        experts: usize,
        top_k: usize,
        activation: &str,
        gated: bool,
        dtype: &str,
        max_tokens: usize,
        wait_limit_s: f64,
    ) -> PyResult<Layer> {
        let activation = match activation {
            "silu" => Activation::Silu,
            "gelu" => Activation::Gelu,
            "gelu-tanh" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            _ => {
                let text = format!("activation {activation:?}: expected silu, gelu, gelu-tanh or relu");
                return Err(PyValueError::new_err(text));
            }
        };
        let elements = match dtype {
            "f32" => Dtype::F32,
            "bf16" => Dtype::Bf16,
            _ => return Err(PyValueError::new_err(format!("dtype {dtype:?}: expected f32 or bf16"))),
        };
        let limit = Duration::try_from_secs_f64(wait_limit_s)
            .map_err(|_| PyValueError::new_err(format!("wait limit {wait_limit_s} s: expected a time")))?;
        let mlp =
            if gated { MlpConfig::gated(intermediate, activation) } else { MlpConfig::plain(intermediate, activation) };
        let config = LayerConfig::new(hidden, experts, RouterConfig::external(top_k), mlp);
        let mut options = Options::default();
        options.wait_limit = limit;
        let spec = LayerSpec::new(config.clone(), size, max_tokens).dtype(elements).options(options);
        let engine = py.detach(|| {
            let heap_bytes = spec.heap_bytes().map_err(moe_error)?;
            let met: Result<_, ShmemError> = aristos::shmem::meet(key, rank, size, heap_bytes, Instant::now() + limit);
            let (pe, source) = (met.map_err(error)?, Zeros(config.clone()));
            Ok::<_, PyErr>(match elements {
                Dtype::F32 => Engine::F32(moe::Layer::builder(spec).build(pe, &source).map_err(moe_error)?),
                _ => Engine::Bf16(moe::Layer::builder(spec).build(pe, &source).map_err(moe_error)?),
            })
        })?;
        Ok(Layer { engine: Mutex::new(engine), rank, config, elements })
    }

    /// The global numbers of the experts that are this process's.
    fn local_experts(&self) -> PyResult<Vec<usize>> {
        let engine = self.lock()?;
        Ok(with!(&*engine, layer => layer.spec().placement.experts(self.rank).to_vec()))
    }

    /// Replaces a matrix of an expert, `[out, in]`, given at `address` in the layer's element type.
    fn set_weight(&self, py: Python<'_>, expert: usize, projection: &str, address: usize) -> PyResult<()> {
        let (id, len) = (WeightId::Expert(expert, proj(projection)?), self.matrix_len());
        py.detach(|| match &mut *self.lock()? {
            // SAFETY: the wrapper holds the tensor, and has checked its type and size.
            Engine::F32(layer) => layer.set_weights(id, unsafe { read(address, len) }).map_err(moe_error),
            Engine::Bf16(layer) => {
                // SAFETY: as above.
                let narrow: &[bf16] = unsafe { read(address, len) };
                let mut wide = vec![0.0; len];
                <bf16 as Element>::widen(narrow, &mut wide);
                layer.set_weights(id, &wide).map_err(moe_error)
            }
        })
    }

    /// Adds the gradient that the last backward left of a matrix of an expert to the f32 values at `address`, or writes it.
    fn gradient(&self, py: Python<'_>, expert: usize, projection: &str, address: usize) -> PyResult<()> {
        let (which, len) = (proj_index(proj(projection)?), self.matrix_len());
        py.detach(|| {
            // SAFETY: the wrapper holds the tensor, and has checked its type and size.
            let into: &mut [f32] = unsafe { write(address, len) };
            let mut engine = self.lock()?;
            let local = with!(&*engine, layer => layer.spec().placement.local_on(expert, self.rank));
            let local = local.ok_or_else(|| error(format!("expert {expert} is not this process's")))?;
            let gradients = with!(&mut *engine, layer => layer.gradients().map_err(moe_error)?);
            into.copy_from_slice(&gradients.experts[local].matrix[which]);
            Ok(())
        })
    }

    /// `output = sum of weight * expert(x)`: x `[tokens, hidden]` in the layer's element type, ids i32 and weights f32 `[tokens,
    /// top_k]`, output f32 `[tokens, hidden]`, all contiguous. Collective.
    fn forward(
        &self,
        py: Python<'_>,
        tokens: usize,
        x: usize,
        ids: usize,
        weights: usize,
        output: usize,
    ) -> PyResult<Saved> {
        let (elements, pairs) = (tokens * self.config.hidden, tokens * self.config.router.top_k);
        let left = py.detach(|| {
            // SAFETY: the wrapper holds the tensors, and has checked their types and sizes.
            let (ids, weights, output): (&[i32], &[f32], &mut [f32]) =
                unsafe { (read(ids, pairs), read(weights, pairs), write(output, elements)) };
            match &mut *self.lock()? {
                Engine::F32(layer) => {
                    // SAFETY: as above.
                    let x = unsafe { read(x, elements) };
                    layer.experts(x, ids, weights, output).map(Left::F32).map_err(moe_error)
                }
                Engine::Bf16(layer) => {
                    // SAFETY: as above.
                    let x = unsafe { read(x, elements) };
                    layer.experts(x, ids, weights, output).map(Left::Bf16).map_err(moe_error)
                }
            }
        })?;
        Ok(Saved { left: Mutex::new(Some(left)), tokens })
    }

    /// The backward of the pass that left `saved`: x as forward had it, grad_output in the layer's element type; grad_x f32 `[tokens,
    /// hidden]` and grad_weights f32 `[tokens, top_k]` are written. Collective.
    fn backward(
        &self,
        py: Python<'_>,
        saved: &Saved,
        x: usize,
        grad_output: usize,
        grad_x: usize,
        grad_weights: usize,
    ) -> PyResult<()> {
        let elements = saved.tokens * self.config.hidden;
        let pairs = saved.tokens * self.config.router.top_k;
        py.detach(|| {
            let mut left = saved.left.lock().map_err(|_| error("the pass failed before"))?;
            let left = left.take().ok_or_else(|| error("the forward pass has had its backward"))?;
            // SAFETY: the wrapper holds the tensors, and has checked their types and sizes.
            let (grad_x, grad_weights): (&mut [f32], &mut [f32]) =
                unsafe { (write(grad_x, elements), write(grad_weights, pairs)) };
            match (&mut *self.lock()?, left) {
                (Engine::F32(layer), Left::F32(mut saved)) => {
                    // SAFETY: as above.
                    let (x, grad_output) = unsafe { (read(x, elements), read(grad_output, elements)) };
                    layer.experts_backward(&mut saved, x, grad_output, grad_x, grad_weights).map_err(moe_error)?;
                    layer.recycle(saved);
                }
                (Engine::Bf16(layer), Left::Bf16(mut saved)) => {
                    // SAFETY: as above.
                    let (x, grad_output) = unsafe { (read(x, elements), read(grad_output, elements)) };
                    layer.experts_backward(&mut saved, x, grad_output, grad_x, grad_weights).map_err(moe_error)?;
                    layer.recycle(saved);
                }
                _ => return Err(error("the forward pass was another layer's")),
            }
            Ok(())
        })
    }

    /// The layer's element type: `f32` or `bf16`.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.elements.name()
    }
}

/// The native part of the package `aristos`.
#[pymodule]
fn _aristos(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("AristosError", module.py().get_type::<AristosError>())?;
    module.add_class::<Layer>()?;
    module.add_class::<Saved>()
}
