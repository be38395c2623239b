//! The layer on a device. It runs the same kernels as elsewhere, on tensors of a framework that are given by their addresses.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use aristos::gpu::Gpu;
use aristos::gpu::emulated::{self, EmulatedDevice};
use aristos::moe::LayerSpec;
use aristos::moe::device::{
    DeviceExperts, DeviceOptions, ExpertAddresses, ExpertsBackward, ExpertsForward, symmetric_bytes,
};
use aristos::shmem::{ShmTransport, Shmem};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::spec::{Form, SizesOf, check_rank, error, moe_error, spec_of};

/// The devices that this wheel can use.
pub(crate) const DEVICES: &[&str] = &["emulated", "emulated-hopper"];
/// Number of bytes that alignment and a barrier take in addition to the layer's.
const HEAP_MARGIN: usize = 64 << 10;

/// A layer. If it is no longer usable, `failed` holds the reason.
struct State {
    layer: DeviceExperts<'static>,
    failed: Option<String>,
}

// SAFETY: the mutex of `DeviceLayer` ensures that one thread at a time uses the device, and every call makes the device usable in the
// thread that calls (`Gpu::use_stream`).
unsafe impl Send for State {}

/// This process's part of a layer whose tensors are on a device. All identical layers of a model share the same value.
#[pyclass(frozen, module = "aristos._aristos")]
pub(crate) struct DeviceLayer {
    state: Mutex<State>,
    state_bytes: u64,
}

fn addresses([up, down, up_bias, down_bias]: [u64; 4]) -> ExpertAddresses {
    ExpertAddresses { up, down, up_bias, down_bias }
}

/// Opens this process's device, with symmetric memory for a layer. The device is kept until the process ends, because any thread may drop
/// the layer.
fn open(
    device: &str,
    (key, rank, size): (&str, usize, usize),
    spec: &LayerSpec,
    options: &DeviceOptions,
) -> PyResult<&'static dyn Gpu> {
    let mut emulated = EmulatedDevice::default();
    emulated.hopper = device == "emulated-hopper";
    let bytes = symmetric_bytes(spec, options, &emulated.limits(), true).map_err(moe_error)?;
    let heap_bytes = Shmem::<ShmTransport>::heap_bytes_for(size, bytes as usize + HEAP_MARGIN);
    let deadline = Instant::now() + spec.options.wait_limit;
    let shmem = Shmem::new(aristos::shmem::meet(key, rank, size, heap_bytes, deadline).map_err(error)?);
    Ok(Box::leak(Box::new(emulated::attach(shmem, &emulated).map_err(error)?)))
}

impl DeviceLayer {
    fn lock(&self) -> PyResult<MutexGuard<'_, State>> {
        self.state.lock().map_err(|_| error("the layer failed before"))
    }

    /// Calls `run`, unless an earlier call has failed.
    fn call(&self, py: Python<'_>, run: impl FnOnce(&DeviceExperts<'static>) -> PyResult<()> + Send) -> PyResult<()> {
        py.detach(|| {
            let mut state = self.lock()?;
            if let Some(why) = &state.failed {
                return Err(error(format!("the layer failed before, and needs a new group (aristos.init()): {why}")));
            }
            run(&state.layer).inspect_err(|error| {
                if Python::attach(|py| !error.is_instance_of::<PyValueError>(py)) {
                    state.failed = Some(error.to_string());
                }
            })
        })
    }
}

#[pymethods]
impl DeviceLayer {
    /// Creates the layer together with the other processes that pass the same `key` (collective). The arguments that describe the experts
    /// are the same as for `Layer`.
    #[new]
    #[pyo3(signature = (key, rank, size, *, device, hidden, intermediate, experts, top_k, activation, gated, bias, limit,
        limit_after, plus_one, dtype, max_tokens, wait_limit_s, spare_multiprocessors))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        key: &str,
        rank: usize,
        size: usize,
        device: &str,
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
        spare_multiprocessors: u32,
    ) -> PyResult<DeviceLayer> {
        if !DEVICES.contains(&device) {
            let known = DEVICES.join(" or ");
            return Err(PyValueError::new_err(format!("device is {device:?}, expected {known}")));
        }
        check_rank(rank, size)?;
        let form = Form { activation, gated, bias, limit, limit_after, plus_one };
        let sizes = SizesOf { hidden, intermediate, experts, top_k, max_tokens };
        let spec = spec_of(sizes, &form, dtype, size, wait_limit_s)?.training(true);
        let mut options = DeviceOptions::default();
        options.spare_multiprocessors = spare_multiprocessors;
        let state = py.detach(|| {
            spec.validate(size).map_err(moe_error)?;
            let gpu = open(device, (key, rank, size), &spec, &options)?;
            let layer = DeviceExperts::new(gpu, spec, &options).map_err(moe_error)?;
            Ok::<_, PyErr>(State { layer, failed: None })
        })?;
        // Stored, because awaiting the mutex with the GIL held would block all threads during a pass.
        let state_bytes = state.layer.state_bytes();
        Ok(DeviceLayer { state: Mutex::new(state), state_bytes })
    }

    /// Bytes of a pass's state.
    fn state_bytes(&self) -> u64 {
        self.state_bytes
    }

    /// Launches `output = sum of weight * expert(x)` (collective). `tensors` holds the addresses of x, ids, weights and output, and
    /// `experts` those of up, down and their biases. The output has the type of x.
    #[pyo3(signature = (tokens, tensors, experts, state, *, wide_ids, stream))]
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        py: Python<'_>,
        tokens: usize,
        tensors: [u64; 4],
        experts: [u64; 4],
        state: u64,
        wide_ids: bool,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let [x, ids, weights, output] = tensors;
        let experts = addresses(experts);
        let forward =
            ExpertsForward { stream, tokens, x, ids, wide_ids, weights, output, narrow_output: true, experts, state };
        // SAFETY: the wrapper has checked the tensors' types and sizes. The tensors live during the call. Afterwards the framework's
        // allocator may reuse their memory, but only for later operations of the stream. Autograd keeps the state for the backward pass.
        self.call(py, |layer| unsafe { layer.forward(&forward) }.map_err(moe_error))
    }

    /// Launches the backward pass of a forward pass (collective). `tensors` holds the addresses of x, grad_output, grad_x and grad_weights.
    /// `gradients` are f32. If `accumulate`, the pass adds to them, and otherwise it overwrites them.
    #[pyo3(signature = (tokens, tensors, experts, gradients, state, *, accumulate, stream))]
    #[allow(clippy::too_many_arguments)]
    fn backward(
        &self,
        py: Python<'_>,
        tokens: usize,
        tensors: [u64; 4],
        experts: [u64; 4],
        gradients: [u64; 4],
        state: u64,
        accumulate: bool,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let [x, grad_output, grad_x, grad_weights] = tensors;
        let backward = ExpertsBackward {
            stream,
            tokens,
            x,
            grad_output,
            grad_x,
            narrow_output: true,
            grad_weights,
            experts: addresses(experts),
            gradients: addresses(gradients),
            accumulate,
            state,
        };
        // SAFETY: the reasons are those in `forward`.
        self.call(py, |layer| unsafe { layer.backward(&backward) }.map_err(moe_error))
    }

    /// Raises an error if a pass that has ended has failed. Does not wait for passes.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, |layer| layer.check_passes().map_err(moe_error))
    }
}
