//! The layer for Python: what `aristos/` in this folder wraps. Memory is the caller's, by address; the wrapper checks types, shapes and
//! strides before it calls.

use std::slice;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use aristos::moe::kernels::{Activation, Element};
use aristos::moe::placement::block;
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

/// Addresses of a pass's tensors, all contiguous: x, grad_output `[tokens, hidden]` in the layer's element type; ids i32, the others f32.
struct Forward {
    tokens: usize,
    x: usize,
    ids: usize,
    weights: usize,
    output: usize,
}

struct Backward {
    tokens: usize,
    x: usize,
    grad_output: usize,
    grad_x: usize,
    grad_weights: usize,
}

impl Forward {
    /// # Safety
    /// The addresses are those of the caller's tensors, of these shapes and types, which nobody else touches meanwhile.
    unsafe fn run<E: Element>(&self, layer: &mut Over<E>) -> PyResult<SavedOf<E>> {
        let (elements, pairs) = sizes(layer, self.tokens);
        // SAFETY: as the function's.
        let (x, ids, weights, output) = unsafe {
            (read(self.x, elements), read(self.ids, pairs), read(self.weights, pairs), write(self.output, elements))
        };
        layer.experts(x, ids, weights, output).map_err(moe_error)
    }
}

impl Backward {
    /// # Safety
    /// As [`Forward::run`].
    unsafe fn run<E: Element>(&self, layer: &mut Over<E>, mut saved: SavedOf<E>) -> PyResult<()> {
        let (elements, pairs) = sizes(layer, self.tokens);
        // SAFETY: as the function's.
        let (x, grad_output, grad_x, grad_weights) = unsafe {
            (
                read(self.x, elements),
                read(self.grad_output, elements),
                write(self.grad_x, elements),
                write(self.grad_weights, pairs),
            )
        };
        layer.experts_backward(&mut saved, x, grad_output, grad_x, grad_weights).map_err(moe_error)?;
        layer.recycle(saved);
        Ok(())
    }
}

/// Elements of a pass's tokens, and their pairs with experts.
fn sizes<E: Element>(layer: &Over<E>, tokens: usize) -> (usize, usize) {
    let config = &layer.spec().config;
    (tokens * config.hidden, tokens * config.router.top_k)
}

/// This process's part of a layer of experts that the caller routes to.
#[pyclass(frozen, module = "aristos._aristos")]
struct Layer {
    engine: Mutex<Engine>,
    /// Elements of one matrix of an expert.
    matrix_len: usize,
}

/// What a forward pass left for its backward.
#[pyclass(frozen, module = "aristos._aristos")]
struct Saved {
    state: Mutex<Option<PassState>>,
    tokens: usize,
}

impl Layer {
    fn lock(&self) -> PyResult<std::sync::MutexGuard<'_, Engine>> {
        self.engine.lock().map_err(|_| error("the layer failed before"))
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
        Ok(Layer { engine: Mutex::new(engine), matrix_len: hidden * intermediate })
    }

    /// Replaces a matrix of an expert, `[out, in]`, given at `address` in the layer's element type.
    fn set_weight(&self, py: Python<'_>, expert: usize, projection: &str, address: usize) -> PyResult<()> {
        let (id, len) = (WeightId::Expert(expert, proj(projection)?), self.matrix_len);
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

    /// Copies the gradient that the last backward left of a matrix of an expert to the f32 values at `address`.
    fn gradient(&self, py: Python<'_>, expert: usize, projection: &str, address: usize) -> PyResult<()> {
        let (which, len) = (proj_index(proj(projection)?), self.matrix_len);
        py.detach(|| {
            // SAFETY: the wrapper holds the tensor, and has checked its type and size.
            let into: &mut [f32] = unsafe { write(address, len) };
            let mut engine = self.lock()?;
            with!(&mut *engine, layer => {
                let local = layer.spec().placement.local_on(expert, layer.my_pe());
                let local = local.ok_or_else(|| error(format!("expert {expert} is not this process's")))?;
                into.copy_from_slice(&layer.gradients().map_err(moe_error)?.experts[local].matrix[which]);
            });
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
        let pass = Forward { tokens, x, ids, weights, output };
        let state = py.detach(|| match &mut *self.lock()? {
            // SAFETY: the wrapper holds the tensors, and has checked their types and sizes.
            Engine::F32(layer) => unsafe { pass.run(layer) }.map(PassState::F32),
            // SAFETY: as above.
            Engine::Bf16(layer) => unsafe { pass.run(layer) }.map(PassState::Bf16),
        })?;
        Ok(Saved { state: Mutex::new(Some(state)), tokens })
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
        let pass = Backward { tokens: saved.tokens, x, grad_output, grad_x, grad_weights };
        py.detach(|| {
            let state = saved.state.lock().map_err(|_| error("the pass failed before"))?.take();
            match (&mut *self.lock()?, state) {
                // SAFETY: the wrapper holds the tensors, and has checked their types and sizes.
                (Engine::F32(layer), Some(PassState::F32(saved))) => unsafe { pass.run(layer, saved) },
                // SAFETY: as above.
                (Engine::Bf16(layer), Some(PassState::Bf16(saved))) => unsafe { pass.run(layer, saved) },
                (_, None) => Err(error("the forward pass has had its backward")),
                _ => Err(error("the forward pass was another layer's")),
            }
        })
    }
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
    module.add_class::<Layer>()?;
    module.add_class::<Saved>()
}
