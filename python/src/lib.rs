//! The native layer behind the Python package `aristos/`. The layer receives views of the caller's tensors and checks their shapes and
//! types (`views.rs`). The Python code has checked that the tensors are contiguous and in host memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use aristos::checkpoint::{ACTIVATIONS, Family};
use aristos::moe::kernels::InstructionSet;
use aristos::moe::metrics::Phase;
use aristos::moe::placement::block;
use aristos::moe::{self, Dtype, LayerConfig, LayerSpec, MoeLayer};
use aristos::plan::{Rebalance, rebalance_auto, rebalance_with};
use aristos::shmem::Shmem;
use aristos::shmem::tcp::TcpWorld;
use half::bf16;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

#[cfg(any(feature = "cuda", feature = "emulate"))]
mod device;
mod hosts;
mod passes;
mod signals;
mod spec;
mod views;

use hosts::Rendezvous;
use passes::{Backward, CpuLayer, Forward, Pes, SavedOf, Weights};
use signals::Signals;
use spec::{AristosError, Form, SizesOf, check_rank, error, how_to_restart, moe_error, set_saved_folder, spec_of};
use views::{ExpertViews, Of, Shapes, View};

/// A layer that grows has room for this fraction of the largest batch more, so that slowly growing batches seldom need a new one.
const SPARE_PART: usize = 32;

/// A layer whose element type is either f32 or bf16.
enum Engine {
    F32(CpuLayer<f32>),
    Bf16(CpuLayer<bf16>),
}

/// The state that a forward pass saves for its backward pass.
enum PassState {
    F32(SavedOf<f32>),
    Bf16(SavedOf<bf16>),
}

const SECOND_BACKWARD: &str = "a pass allows one backward, which frees what the forward pass saved, also with retain_graph=True: \
    run the forward pass again";

/// A layer. If it is no longer usable, `failed` holds the reason.
struct State {
    engine: Engine,
    /// The connections between hosts, if there are several. Dropped after the engine, which uses them.
    world: Option<TcpWorld>,
    /// Whether the layer keeps the memory of a finished pass for reuse. It keeps that of one pass, because passes rarely overlap.
    has_spare: bool,
    failed: Option<String>,
    signals: Arc<Signals>,
    sent: Sent,
}

/// The bytes that a layer and the smaller layers that it replaced have put to other processes: their sum, and this layer's part of it.
struct Sent {
    all: Arc<AtomicU64>,
    counted: u64,
}

/// This process's part of a layer whose experts and routing come from the caller. All identical layers of a model share the same value.
#[pyclass(frozen, module = "aristos._aristos")]
struct Layer {
    state: Arc<Mutex<State>>,
    shapes: Shapes,
    sent: Arc<AtomicU64>,
    rendezvous: Option<Rendezvous>,
    /// What the user should know about the connections between hosts, a line each.
    #[pyo3(get)]
    notes: Vec<String>,
}

impl Layer {
    /// Creates process `rank`'s part of a layer (collective). Without a rendezvous all processes are on this host.
    fn make(
        py: Python<'_>,
        key: &str,
        rank: usize,
        spec: LayerSpec,
        sent: Arc<AtomicU64>,
        rendezvous: Option<Rendezvous>,
    ) -> PyResult<Layer> {
        let (size, local) = (spec.placement.n_pes(), spec.placement.experts(rank).len());
        let LayerConfig { hidden, expert, router, .. } = &spec.config;
        let shapes = Shapes {
            hidden: *hidden,
            intermediate: expert.intermediate,
            gated: expert.gated,
            bias: expert.bias,
            top_k: router.top_k,
            local,
            dtype: spec.dtype,
        };
        let signals = Arc::new(Signals::new(rank));
        let watch = signals.clone();
        let (engine, world, notes) = py.detach(|| {
            spec.validate(size).map_err(moe_error)?;
            let heap_bytes = spec.heap_bytes().map_err(moe_error)?;
            let limit = spec.options.wait_limit;
            let (transport, world, notes): (Pes, _, _) = match &rendezvous {
                None => {
                    let met = aristos::shmem::meet(key, rank, size, heap_bytes, Instant::now() + limit);
                    (Box::new(met.map_err(error)?.watched((0..size).collect(), watch)), None, Vec::new())
                }
                Some(rendezvous) => {
                    let (world, transport) = rendezvous.join(key, (rank, size), heap_bytes, limit, watch)?;
                    let unmapped = transport.unmapped().map(|why| {
                        format!("rank {rank} cannot map {why}; TCP carries all rows, within hosts too, which is slower")
                    });
                    let notes = world.refusals().iter().cloned().chain(unmapped).collect();
                    (Box::new(transport), Some(world), notes)
                }
            };
            let pe = Shmem::new(transport);
            let engine = match spec.dtype {
                Dtype::F32 => Engine::F32(moe::Layer::builder(spec).build_without_weights(pe).map_err(moe_error)?),
                _ => Engine::Bf16(moe::Layer::builder(spec).build_without_weights(pe).map_err(moe_error)?),
            };
            Ok::<_, PyErr>((engine, world, notes))
        })?;
        let sent_here = Sent { all: sent.clone(), counted: 0 };
        let state = State { engine, world, has_spare: false, failed: None, signals, sent: sent_here };
        Ok(Layer { state: Arc::new(Mutex::new(state)), shapes, sent, rendezvous, notes })
    }
}

/// The saved state of a forward pass. If it is dropped without a backward pass, a later pass may reuse its memory.
#[pyclass(frozen, module = "aristos._aristos")]
struct Saved {
    pass: Mutex<Option<PassState>>,
    tokens: usize,
    layer: Arc<Mutex<State>>,
    shapes: Shapes,
}

impl Drop for Saved {
    fn drop(&mut self) {
        let Ok(Some(pass)) = self.pass.get_mut().map(Option::take) else { return };
        // If another thread is using the layer, the memory is not kept for reuse but freed.
        let Ok(mut state) = self.layer.try_lock() else { return };
        state.recycle(pass);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.leave();
    }
}

impl State {
    /// Ends this process's part of a layer over several hosts, without waiting for the end of the others'.
    fn leave(&self) {
        self.world.iter().for_each(|world| world.leave(self.failed.as_deref()));
    }

    fn recycle(&mut self, pass: PassState) {
        if std::mem::replace(&mut self.has_spare, true) {
            return;
        }
        match (&mut self.engine, pass) {
            (Engine::F32(layer), PassState::F32(pass)) => layer.recycle(pass),
            (Engine::Bf16(layer), PassState::Bf16(pass)) => layer.recycle(pass),
            _ => {}
        }
    }

    /// Runs a pass, unless an earlier one has failed. After an error other than invalid arguments the layer is unusable, because the
    /// processes may be in different states. Invalid arguments are detected before a pass begins.
    fn pass<T>(&mut self, run: impl FnOnce(&mut Engine) -> PyResult<T>) -> PyResult<T> {
        if let Some(why) = &self.failed {
            return Err(error(format!("the layer failed before, and needs a new group (aristos.init()): {why}")));
        }
        let ended = run(&mut self.engine).map_err(|error| self.signals.raised().unwrap_or(error));
        let put = match &self.engine {
            Engine::F32(layer) => layer.bytes_put(),
            Engine::Bf16(layer) => layer.bytes_put(),
        };
        self.sent.all.fetch_add(put - self.sent.counted, Ordering::Relaxed);
        self.sent.counted = put;
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

#[pymethods]
impl Layer {
    /// Creates the layer together with the other processes that pass the same `key` (collective). `limit`, `limit_after` and `plus_one`
    /// describe the `Glu` of a gated expert. Processes of several hosts have a `rendezvous`.
    #[new]
    #[pyo3(signature = (key, rank, size, rendezvous=None, *, hidden, intermediate, experts, top_k, activation, gated, bias, limit,
        limit_after, plus_one, dtype, max_tokens, wait_limit_s))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        key: &str,
        rank: usize,
        size: usize,
        rendezvous: Option<&Rendezvous>,
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
        check_rank(rank, size)?;
        let form = Form { activation, gated, bias, limit, limit_after, plus_one };
        let sizes = SizesOf { hidden, intermediate, experts, top_k, max_tokens };
        let spec = spec_of(sizes, &form, dtype, size, wait_limit_s)?;
        if spec.dtype == Dtype::F16 {
            return Err(PyValueError::new_err(format!("dtype is {dtype:?}, expected float32 or bfloat16 on the CPU")));
        }
        Layer::make(py, key, rank, spec, Arc::default(), rendezvous.cloned())
    }

    /// Returns a layer that runs the largest batch of this layer in one pass, or None if this layer does (collective). All processes decide
    /// alike, because all of them know the size of that batch.
    fn grown(&self, py: Python<'_>, key: &str) -> PyResult<Option<Layer>> {
        let grown = py.detach(|| {
            let state = lock(&self.state)?;
            let (rank, spec, most) = match &state.engine {
                Engine::F32(layer) => (layer.my_pe(), layer.spec(), layer.most_tokens()),
                Engine::Bf16(layer) => (layer.my_pe(), layer.spec(), layer.most_tokens()),
            };
            let is_large = most <= spec.max_tokens || spec.placement.n_pes() == 1;
            Ok::<_, PyErr>((!is_large && state.failed.is_none()).then(|| (rank, spec.clone(), most)))
        })?;
        let Some((rank, mut spec, most)) = grown else { return Ok(None) };
        spec.max_tokens = most + most / SPARE_PART;
        Layer::make(py, key, rank, spec, self.sent.clone(), self.rendezvous.clone()).map(Some)
    }

    /// Computes `output = sum of weight * expert(x)` (collective). `tensors` holds x, ids, weights and output as in `Forward`, and
    /// `experts` holds up, down and their biases as in `Weights`.
    fn forward(&self, py: Python<'_>, tensors: [View; 4], experts: ExpertViews) -> PyResult<Saved> {
        let (shapes, [x, ids, weights, output]) = (self.shapes, &tensors);
        let tokens = shapes.tokens(x)?;
        let tensors = [
            shapes.rows("x", x, tokens, Of::Layer)?,
            shapes.pairs("ids", ids, tokens, Of::I32)?,
            shapes.pairs("weights", weights, tokens, Of::F32)?,
            shapes.rows("output", output, tokens, Of::F32)?,
        ];
        let forward = Forward { tokens, tensors, experts: shapes.experts(&experts, "")?.into() };
        let pass = py.detach(|| {
            let mut state = lock(&self.state)?;
            let pass = state.pass(|engine| match engine {
                // SAFETY: the wrapper keeps the tensors alive; their shapes and types were checked above.
                Engine::F32(layer) => unsafe { forward.run(layer) }.map(PassState::F32),
                // SAFETY: as for f32.
                Engine::Bf16(layer) => unsafe { forward.run(layer) }.map(PassState::Bf16),
            })?;
            state.has_spare = false;
            Ok::<_, PyErr>(pass)
        })?;
        Ok(Saved { pass: Mutex::new(Some(pass)), tokens, layer: self.state.clone(), shapes })
    }

    /// Ends this process's part of a layer over several hosts, unless a pass runs. Needed before the process ends: otherwise it is lost to
    /// processes that still compute a pass.
    fn leave(&self, py: Python<'_>) {
        py.detach(|| self.state.try_lock().iter().for_each(|state| state.leave()));
    }

    /// Total bytes that this layer and the smaller layers that it replaced have put to other processes.
    fn sent_bytes(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Returns what the passes since the last call have sent to other processes, and the seconds of each phase.
    fn measured<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (ns, traffic) = py.detach(|| {
            Ok::<_, PyErr>(match &mut lock(&self.state)?.engine {
                Engine::F32(layer) => layer.take_measured(),
                Engine::Bf16(layer) => layer.take_measured(),
            })
        })?;
        let seconds = |phases: &[Phase]| phases.iter().map(|phase| ns[phase.code()] as f64 * 1e-9).sum::<f64>();
        let dict = PyDict::new(py);
        dict.set_item("rows_sent", traffic.dispatch_rows + traffic.combine_rows)?;
        dict.set_item("bytes_sent", traffic.total_bytes())?;
        dict.set_item("dispatch_s", seconds(&[Phase::Router, Phase::Dispatch]))?;
        dict.set_item("expert_s", seconds(&[Phase::Expert]))?;
        dict.set_item("combine_s", seconds(&[Phase::Scale, Phase::Combine]))?;
        dict.set_item("waiting_s", seconds(&[Phase::Waiting]))?;
        Ok(dict)
    }
}

#[pymethods]
impl Saved {
    /// Runs the backward pass (collective). `tensors` holds x, grad_output, grad_x and grad_weights as in `Backward`, `experts` the weights
    /// of the experts, and `gradients` their gradients, which are not computed if it is `None`.
    fn backward(
        &self,
        py: Python<'_>,
        tensors: [View; 4],
        experts: ExpertViews,
        gradients: Option<ExpertViews>,
    ) -> PyResult<()> {
        let (shapes, tokens, [x, grad_output, grad_x, grad_weights]) = (self.shapes, self.tokens, &tensors);
        let tensors = [
            shapes.rows("x", x, tokens, Of::Layer)?,
            shapes.rows("grad_output", grad_output, tokens, Of::Layer)?,
            shapes.rows("grad_x", grad_x, tokens, Of::F32)?,
            shapes.pairs("grad_weights", grad_weights, tokens, Of::F32)?,
        ];
        let experts = shapes.experts(&experts, "")?.into();
        let gradients = gradients.map(|views| shapes.experts(&views, "'s gradient").map(Weights::from)).transpose()?;
        let backward = Backward { tokens, tensors, experts, gradients };
        py.detach(|| {
            let taken = self.pass.lock().map_err(|_| error("the pass failed before"))?.take();
            let gone = || PyValueError::new_err(SECOND_BACKWARD);
            let mut pass = taken.ok_or_else(gone)?;
            let mut state = lock(&self.layer)?;
            state.pass(|engine| match (engine, &mut pass) {
                // SAFETY: the wrapper keeps the tensors alive; their shapes and types were checked above.
                (Engine::F32(layer), PassState::F32(saved)) => unsafe { backward.run(layer, saved) },
                // SAFETY: as for f32.
                (Engine::Bf16(layer), PassState::Bf16(saved)) => unsafe { backward.run(layer, saved) },
                _ => Err(gone()),
            })?;
            state.recycle(pass);
            Ok(())
        })
    }
}

fn family_layer(config: &str) -> PyResult<LayerConfig> {
    let wrong = |e: String| PyValueError::new_err(e);
    let map =
        serde_json::from_str(config).map_err(|e| wrong(format!("the configuration is not a JSON object: {e}")))?;
    Family::first_layer("the configuration", map).map_err(|e| wrong(e.to_string()))
}

/// Returns what a model's configuration, given as JSON, says about the routed experts: activation, gated, bias, limit, limit_after and
/// plus_one.
#[pyfunction]
fn family_expert<'py>(py: Python<'py>, config: &str) -> PyResult<Bound<'py, PyDict>> {
    let mlp = family_layer(config)?.expert;
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

/// Returns what a model's configuration, given as JSON, says about a layer's sizes: hidden, experts and top_k.
#[pyfunction]
fn family_sizes(config: &str) -> PyResult<(usize, usize, usize)> {
    let layer = family_layer(config)?;
    Ok((layer.hidden, layer.n_experts, layer.router.top_k))
}

/// Returns the number of bytes that a layer allocates on each of `size` processes for messages between them.
#[pyfunction]
fn window_bytes(
    hidden: usize,
    experts: usize,
    top_k: usize,
    dtype: &str,
    max_tokens: usize,
    size: usize,
) -> PyResult<usize> {
    let form = Form { activation: "silu", gated: true, bias: false, limit: 0.0, limit_after: false, plus_one: false };
    let sizes = SizesOf { hidden, intermediate: 1, experts, top_k, max_tokens };
    let spec = spec_of(sizes, &form, dtype, size, 1.0)?;
    spec.validate(size).map_err(moe_error)?;
    spec.heap_bytes().map_err(moe_error)
}

/// Returns the supported model families. Each is named by the `model_type` of its text model.
#[pyfunction]
fn families() -> Vec<&'static str> {
    Family::all().map(Family::model_type).collect()
}

/// `phy2log`, `log2phy`, `logcnt` and, with `shares`, the parts of the physical experts, by layer.
type Rebalanced = (Vec<Vec<usize>>, Vec<Vec<Vec<i64>>>, Vec<Vec<usize>>, Vec<Vec<f64>>);

/// Replicates and places experts, see `aristos.rebalance_experts`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn rebalance_experts(
    py: Python<'_>,
    weight: Vec<Vec<f64>>,
    num_replicas: Option<usize>,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
    imbalance: Option<f64>,
    current: Option<Vec<Vec<usize>>>,
    move_cost: f64,
    shares: bool,
) -> PyResult<Rebalanced> {
    let how = Rebalance { shares, current: current.as_deref(), move_cost };
    let all = py.detach(|| match num_replicas {
        Some(replicas) => rebalance_with(how, &weight, replicas, num_groups, num_nodes, num_ranks),
        None => rebalance_auto(how, &weight, imbalance, num_groups, num_nodes, num_ranks),
    });
    let all = all.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok((all.phy2log, all.log2phy, all.logcnt, all.shares))
}

/// Returns the instruction set that the kernels use on this CPU, which `ARISTOS_CPU` can limit: scalar, avx2, avx512, avx512bf16 or amx.
#[pyfunction]
fn instruction_set() -> &'static str {
    InstructionSet::in_use().name()
}

/// Returns the indices of the experts of process `rank`, if `experts` experts are distributed over `size` processes.
#[pyfunction]
fn local_experts(experts: usize, rank: usize, size: usize) -> Vec<usize> {
    block(experts, size, rank).collect()
}

/// The native part of the package `aristos`.
#[pymodule]
fn _aristos(module: &Bound<'_, PyModule>) -> PyResult<()> {
    InstructionSet::limit().map_err(PyValueError::new_err)?;
    module.add("AristosError", module.py().get_type::<AristosError>())?;
    module.add_function(wrap_pyfunction!(local_experts, module)?)?;
    module.add_function(wrap_pyfunction!(family_expert, module)?)?;
    module.add_function(wrap_pyfunction!(family_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(families, module)?)?;
    module.add_function(wrap_pyfunction!(window_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(rebalance_experts, module)?)?;
    module.add_function(wrap_pyfunction!(instruction_set, module)?)?;
    module.add_function(wrap_pyfunction!(set_saved_folder, module)?)?;
    module.add_function(wrap_pyfunction!(how_to_restart, module)?)?;
    module.add_class::<Layer>()?;
    module.add_class::<Saved>()?;
    module.add_class::<Rendezvous>()?;
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    module.add_class::<device::DeviceLayer>()?;
    #[cfg(any(feature = "cuda", feature = "emulate"))]
    let devices = device::DEVICES;
    #[cfg(not(any(feature = "cuda", feature = "emulate")))]
    let devices: &[&str] = &[];
    module.add("DEVICES", devices)
}
