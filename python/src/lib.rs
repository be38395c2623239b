//! The layer for Python: what `aristos/` in this folder wraps. Memory is the caller's, by address; the wrapper checks types, shapes and
//! strides before it calls.

use std::marker::PhantomData;
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use aristos::checkpoint::{ACTIVATIONS, Family};
use aristos::moe::cpu::LentGradients;
use aristos::moe::cpu::experts::Mlp;
use aristos::moe::kernels::{Element, Lent};
use aristos::moe::placement::block;
use aristos::moe::{
    self, Activation, Dtype, Glu, LayerConfig, LayerSpec, MlpConfig, MlpGradients, MlpGradientsMut, MoeError, MoeLayer,
    Options, Proj, RouterConfig, proj_index,
};
use aristos::shmem::{ShmTransport, Shmem};
use half::bf16;
use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

mod signals;

use signals::Signals;

create_exception!(_aristos, AristosError, PyRuntimeError, "What the runtime reports: one line.");

type Over<E> = moe::Layer<Shmem<ShmTransport>, E>;
type SavedOf<E> = <Over<E> as MoeLayer>::Saved;

/// The layer in one of its element types.
enum Engine {
    F32(Over<f32>),
    /// With the gradients of one expert before they are rounded.
    Bf16(Over<bf16>, Box<MlpGradients>),
}

/// What a forward pass left for its backward.
enum PassState {
    F32(SavedOf<f32>),
    Bf16(SavedOf<bf16>),
}

fn error(e: impl std::fmt::Display) -> PyErr {
    AristosError::new_err(e.to_string())
}

/// Wrong arguments are Python's `ValueError`.
fn moe_error(e: MoeError) -> PyErr {
    match e {
        MoeError::Config(_) | MoeError::Shape { .. } | MoeError::Usage { .. } => PyValueError::new_err(e.to_string()),
        e => error(e),
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

/// Elements of the caller's, for the time of a call.
struct Caller<E> {
    address: usize,
    len: usize,
    element: PhantomData<fn() -> E>,
}

impl<E> AsRef<[E]> for Caller<E> {
    fn as_ref(&self) -> &[E] {
        // SAFETY: who makes one ([`Weights::lend`]) says that the memory is there for the call, and drops it at the call's end.
        unsafe { read(self.address, self.len) }
    }
}

/// Addresses of this process's experts' weights, or of their gradients, contiguous, 0 for a bias that is not there: up `[experts, 2
/// intermediate, hidden]`, gate then up, without gate `[experts, intermediate, hidden]`, and down `[experts, hidden, intermediate]` in the layer's
/// element type; the biases of the same in f32, `[experts, out]`.
#[derive(Clone, Copy)]
struct Weights {
    up: usize,
    down: usize,
    up_bias: usize,
    down_bias: usize,
}

impl From<[usize; 4]> for Weights {
    fn from([up, down, up_bias, down_bias]: [usize; 4]) -> Weights {
        Weights { up, down, up_bias, down_bias }
    }
}

impl Weights {
    /// Where expert `local`'s matrix is: its address and length, of elements of `bytes` bytes. The same for its bias.
    fn place(&self, config: &LayerConfig, local: usize, proj: Proj, bytes: usize) -> [(usize, usize); 2] {
        let (h, i) = (config.hidden, config.expert.intermediate);
        let parts = if config.expert.gated { 2 } else { 1 };
        let first = if config.expert.gated && proj == Proj::Up { i } else { 0 };
        match proj {
            Proj::Gate | Proj::Up => {
                let row = local * parts * i + first;
                [(self.up + row * h * bytes, i * h), (self.up_bias + row * size_of::<f32>(), i)]
            }
            Proj::Down => {
                let bias = self.down_bias + local * h * size_of::<f32>();
                [(self.down + local * h * i * bytes, h * i), (bias, h)]
            }
        }
    }

    /// The experts, read where they are.
    ///
    /// # Safety
    /// The addresses are those of the caller's tensors, of these shapes and types, which nobody writes while the experts live.
    unsafe fn lend<E: Element>(&self, config: &LayerConfig, experts: usize) -> PyResult<Vec<Mlp<E>>> {
        let expert = |local| {
            let (mut lent, mut biases) = ([const { None }; 3], [const { Vec::new() }; 3]);
            for &proj in config.expert.projections() {
                let [(address, len), (bias, out)] = self.place(config, local, proj, size_of::<E>());
                let matrix: Lent<E> = Box::new(Caller { address, len, element: PhantomData });
                lent[proj_index(proj)] = Some(matrix);
                if config.expert.bias {
                    // SAFETY: as the function's.
                    biases[proj_index(proj)] = unsafe { read::<f32>(bias, out) }.to_vec();
                }
            }
            Mlp::lent(config.expert, config.hidden, lent, biases).map_err(moe_error)
        };
        (0..experts).map(expert).collect()
    }

    /// Has expert `local`'s gradients computed into these places; those of another type than f32 in `rounded` first.
    ///
    /// # Safety
    /// As for [`Weights::lend`], and nobody else reads there.
    unsafe fn take<E: Element>(
        &self,
        config: &LayerConfig,
        local: usize,
        rounded: &mut MlpGradients,
        compute: &mut dyn FnMut(MlpGradientsMut<'_>),
    ) {
        let place = |proj| self.place(config, local, proj, size_of::<E>());
        if E::NAME == f32::NAME {
            let none = || -> [&mut [f32]; 3] { [&mut [], &mut [], &mut []] };
            let (mut matrix, mut bias) = (none(), none());
            for &proj in config.expert.projections() {
                let [(address, len), (bias_address, out)] = place(proj);
                // SAFETY: as the function's; the elements are f32, and no two projections' places overlap.
                matrix[proj_index(proj)] = unsafe { write::<f32>(address, len) };
                if config.expert.bias {
                    // SAFETY: as above.
                    bias[proj_index(proj)] = unsafe { write::<f32>(bias_address, out) };
                }
            }
            return compute(MlpGradientsMut { matrix, bias });
        }
        compute(rounded.places());
        for &proj in config.expert.projections() {
            let [(address, len), (bias, out)] = place(proj);
            // SAFETY: as the function's.
            E::convert(&rounded.matrix[proj_index(proj)], unsafe { write(address, len) });
            if config.expert.bias {
                // SAFETY: as the function's.
                unsafe { write::<f32>(bias, out) }.copy_from_slice(&rounded.bias[proj_index(proj)]);
            }
        }
    }
}

/// Addresses of a forward pass's tensors, all contiguous: x `[tokens, hidden]` in the layer's element type; ids i32 and weights f32 `[tokens,
/// top_k]`; output f32 `[tokens, hidden]`.
struct Forward {
    tokens: usize,
    tensors: [usize; 4],
    experts: Weights,
}

/// Of a backward pass: x as forward had it, grad_output in the layer's element type; grad_x f32 `[tokens, hidden]` and grad_weights f32
/// `[tokens, top_k]`.
struct Backward {
    tokens: usize,
    tensors: [usize; 4],
    experts: Weights,
    gradients: Weights,
}

impl Forward {
    /// # Safety
    /// The addresses are those of the caller's tensors, of these shapes and types, which nobody else touches meanwhile.
    unsafe fn run<E: Element>(&self, layer: &mut Over<E>) -> PyResult<SavedOf<E>> {
        let (elements, pairs, local) = sizes(layer, self.tokens);
        let [x, ids, weights, output] = self.tensors;
        // SAFETY: as the function's; the experts end with it.
        let (x, ids, weights, output, experts) = unsafe {
            let experts = self.experts.lend::<E>(&layer.spec().config, local)?;
            (read(x, elements), read(ids, pairs), read(weights, pairs), write(output, elements), experts)
        };
        layer.experts_lent(&experts, x, ids, weights, output).map_err(moe_error)
    }
}

impl Backward {
    /// # Safety
    /// As [`Forward::run`].
    unsafe fn run<E: Element>(
        &self,
        layer: &mut Over<E>,
        saved: &mut SavedOf<E>,
        rounded: &mut MlpGradients,
    ) -> PyResult<()> {
        let (elements, pairs, local) = sizes(layer, self.tokens);
        let [x, grad_output, grad_x, grad_weights] = self.tensors;
        // SAFETY: as the function's; the experts end with it.
        let (x, grad_output, grad_x, grad_weights, experts) = unsafe {
            let experts = self.experts.lend::<E>(&layer.spec().config, local)?;
            (
                read(x, elements),
                read(grad_output, elements),
                write(grad_x, elements),
                write(grad_weights, pairs),
                experts,
            )
        };
        let config = layer.spec().config.clone();
        let mut take = |local: usize, compute: &mut dyn FnMut(MlpGradientsMut<'_>)| {
            // SAFETY: as the function's.
            unsafe { self.gradients.take::<E>(&config, local, rounded, compute) };
        };
        let gradients = LentGradients { input: grad_x, weights: grad_weights, experts: &mut take };
        layer.experts_lent_backward(&experts, saved, x, grad_output, gradients).map_err(moe_error)
    }
}

/// Elements of a pass's tokens, their pairs with experts, and this process's experts.
fn sizes<E: Element>(layer: &Over<E>, tokens: usize) -> (usize, usize, usize) {
    let config = &layer.spec().config;
    let local = layer.spec().placement.experts(layer.my_pe()).len();
    (tokens * config.hidden, tokens * config.router.top_k, local)
}

/// A layer, and why it cannot be used any more.
struct State {
    engine: Engine,
    /// Whether the layer has the memory of a finished pass. One: each has what a backward needs, which no two need at a time.
    has_spare: bool,
    failed: Option<String>,
    signals: Arc<Signals>,
}

/// This process's part of a layer of experts that the caller brings and routes to. One serves all layers of a model that are alike.
#[pyclass(frozen, module = "aristos._aristos")]
struct Layer {
    state: Arc<Mutex<State>>,
}

/// What a forward pass left for its backward. Without one, its memory serves a later pass.
#[pyclass(frozen, module = "aristos._aristos")]
struct Saved {
    pass: Mutex<Option<PassState>>,
    tokens: usize,
    layer: Arc<Mutex<State>>,
}

impl Drop for Saved {
    fn drop(&mut self) {
        let Ok(Some(pass)) = self.pass.get_mut().map(Option::take) else { return };
        // A layer in a pass is another thread's; the memory is then freed.
        let Ok(mut state) = self.layer.try_lock() else { return };
        state.recycle(pass);
    }
}

impl State {
    fn recycle(&mut self, pass: PassState) {
        if std::mem::replace(&mut self.has_spare, true) {
            return;
        }
        match (&mut self.engine, pass) {
            (Engine::F32(layer), PassState::F32(pass)) => layer.recycle(pass),
            (Engine::Bf16(layer, _), PassState::Bf16(pass)) => layer.recycle(pass),
            _ => {}
        }
    }

    /// Runs a pass, unless one has failed. Wrong arguments end it before it begins; any other error leaves the processes at different places.
    fn pass<T>(&mut self, run: impl FnOnce(&mut Engine) -> PyResult<T>) -> PyResult<T> {
        if let Some(why) = &self.failed {
            return Err(error(format!("the layer failed before, and needs a new group (aristos.init()): {why}")));
        }
        let ended = run(&mut self.engine).map_err(|error| self.signals.raised().unwrap_or(error));
        ended.inspect_err(|error| {
            if Python::attach(|py| !error.is_instance_of::<PyValueError>(py)) {
                self.failed = Some(error.to_string());
            }
        })
    }
}

fn lock(state: &Mutex<State>) -> PyResult<MutexGuard<'_, State>> {
    state.lock().map_err(|_| error("the layer failed before"))
}

/// An activation by its name in configurations.
fn activation_named(name: &str) -> PyResult<Activation> {
    let known = ACTIVATIONS.iter().find(|(known, _)| *known == name);
    known.map(|&(_, activation)| activation).ok_or_else(|| {
        let names: Vec<&str> = ACTIVATIONS.iter().map(|(known, _)| *known).collect();
        PyValueError::new_err(format!("activation is {name:?}, expected one of {}", names.join(", ")))
    })
}

#[pymethods]
impl Layer {
    /// Makes the layer with the other processes that know `key`. Collective. `limit`, `limit_after` and `plus_one` are a gated expert's
    /// `Glu`.
    #[new]
    #[pyo3(signature = (key, rank, size, *, hidden, intermediate, experts, top_k, activation, gated, bias, limit, limit_after,
        plus_one, dtype, max_tokens, wait_limit_s))]
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
        bias: bool,
        limit: f32,
        limit_after: bool,
        plus_one: bool,
        dtype: &str,
        max_tokens: usize,
        wait_limit_s: f64,
    ) -> PyResult<Layer> {
        let elements = match dtype {
            "float32" => Dtype::F32,
            "bfloat16" => Dtype::Bf16,
            _ => return Err(PyValueError::new_err(format!("dtype is {dtype:?}, expected float32 or bfloat16"))),
        };
        let wait_limit = Duration::try_from_secs_f64(wait_limit_s)
            .map_err(|_| PyValueError::new_err(format!("the wait limit is {wait_limit_s} s, expected a time")))?;
        let mut mlp = MlpConfig::gated(intermediate, activation_named(activation)?);
        (mlp.gated, mlp.bias, mlp.glu) = (gated, bias, Glu { limit, limit_after, plus_one });
        let config = LayerConfig::new(hidden, experts, RouterConfig::external(top_k), mlp);
        let mut options = Options::default();
        options.wait_limit = wait_limit;
        let spec = LayerSpec::new(config, size, max_tokens).dtype(elements).options(options);
        let signals = Arc::new(Signals::new(rank));
        let watch = signals.clone();
        let engine = py.detach(|| {
            spec.validate(size).map_err(moe_error)?;
            let heap_bytes = spec.heap_bytes().map_err(moe_error)?;
            let met = aristos::shmem::meet(key, rank, size, heap_bytes, Instant::now() + wait_limit);
            let pe = Shmem::new(met.map_err(error)?.watched((0..size).collect(), watch));
            Ok::<_, PyErr>(match elements {
                Dtype::F32 => Engine::F32(moe::Layer::builder(spec).build_without_weights(pe).map_err(moe_error)?),
                _ => {
                    let rounded = Box::new(MlpGradients::zeros(&spec.config.expert, spec.config.hidden));
                    Engine::Bf16(moe::Layer::builder(spec).build_without_weights(pe).map_err(moe_error)?, rounded)
                }
            })
        })?;
        Ok(Layer { state: Arc::new(Mutex::new(State { engine, has_spare: false, failed: None, signals })) })
    }

    /// `output = sum of weight * expert(x)`: the addresses of x, ids, weights and output (`Forward`), and of the experts' up, down and their
    /// biases (`Weights`). Collective.
    fn forward(&self, py: Python<'_>, tokens: usize, tensors: [usize; 4], experts: [usize; 4]) -> PyResult<Saved> {
        let forward = Forward { tokens, tensors, experts: experts.into() };
        let pass = py.detach(|| {
            let mut state = lock(&self.state)?;
            let pass = state.pass(|engine| match engine {
                // SAFETY: the wrapper holds the tensors, and has checked their types and sizes.
                Engine::F32(layer) => unsafe { forward.run(layer) }.map(PassState::F32),
                // SAFETY: as above.
                Engine::Bf16(layer, _) => unsafe { forward.run(layer) }.map(PassState::Bf16),
            })?;
            state.has_spare = false;
            Ok::<_, PyErr>(pass)
        })?;
        Ok(Saved { pass: Mutex::new(Some(pass)), tokens, layer: self.state.clone() })
    }

    /// Bytes put to other processes so far.
    fn sent_bytes(&self) -> PyResult<u64> {
        Ok(match &lock(&self.state)?.engine {
            Engine::F32(layer) => layer.bytes_put(),
            Engine::Bf16(layer, _) => layer.bytes_put(),
        })
    }
}

#[pymethods]
impl Saved {
    /// The backward of this pass: the addresses of x, grad_output, grad_x and grad_weights (`Backward`), of the experts, and of where their
    /// gradients go. Collective.
    fn backward(
        &self,
        py: Python<'_>,
        tensors: [usize; 4],
        experts: [usize; 4],
        gradients: [usize; 4],
    ) -> PyResult<()> {
        let (experts, gradients) = (experts.into(), gradients.into());
        let backward = Backward { tokens: self.tokens, tensors, experts, gradients };
        py.detach(|| {
            let taken = self.pass.lock().map_err(|_| error("the pass failed before"))?.take();
            let gone = || PyValueError::new_err("the forward pass has had its backward, and is gone");
            let mut pass = taken.ok_or_else(gone)?;
            let mut state = lock(&self.layer)?;
            state.pass(|engine| match (engine, &mut pass) {
                // SAFETY: the wrapper holds the tensors, and has checked their types and sizes.
                (Engine::F32(layer), PassState::F32(saved)) => unsafe {
                    backward.run(layer, saved, &mut MlpGradients::default())
                },
                // SAFETY: as above.
                (Engine::Bf16(layer, rounded), PassState::Bf16(saved)) => unsafe {
                    backward.run(layer, saved, rounded)
                },
                _ => Err(gone()),
            })?;
            state.recycle(pass);
            Ok(())
        })
    }
}

/// What a model's configuration (JSON) says of its routed experts: activation, gated, bias, limit, limit_after, plus_one.
#[pyfunction]
fn family_expert<'py>(py: Python<'py>, config: &str) -> PyResult<Bound<'py, PyDict>> {
    let wrong = |e: String| PyValueError::new_err(e);
    let map =
        serde_json::from_str(config).map_err(|e| wrong(format!("the configuration is not a JSON object: {e}")))?;
    let mlp = Family::expert("the configuration", map).map_err(|e| wrong(e.to_string()))?;
    let name = ACTIVATIONS.iter().find(|(_, activation)| *activation == mlp.activation).map_or("", |(name, _)| name);
    let dict = PyDict::new(py);
    dict.set_item("activation", name)?;
    dict.set_item("gated", mlp.gated)?;
    dict.set_item("bias", mlp.bias)?;
    dict.set_item("limit", mlp.glu.limit)?;
    dict.set_item("limit_after", mlp.glu.limit_after)?;
    dict.set_item("plus_one", mlp.glu.plus_one)?;
    Ok(dict)
}

/// The model families whose experts are known, by the `model_type` of the text model.
#[pyfunction]
fn families() -> Vec<&'static str> {
    Family::all().map(Family::model_type).collect()
}

/// The numbers of the experts that are process `rank`'s, of `experts` over `size` processes.
#[pyfunction]
fn local_experts(experts: usize, rank: usize, size: usize) -> Vec<usize> {
    block(experts, size, rank).collect()
}

/// The native part of the package `aristos`.
#[pymodule]
fn _aristos(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("AristosError", module.py().get_type::<AristosError>())?;
    module.add_function(wrap_pyfunction!(local_experts, module)?)?;
    module.add_function(wrap_pyfunction!(family_expert, module)?)?;
    module.add_function(wrap_pyfunction!(families, module)?)?;
    module.add_class::<Layer>()?;
    module.add_class::<Saved>()
}
