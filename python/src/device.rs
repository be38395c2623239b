//! The layer on a device. It runs the same kernels as elsewhere, on tensors of a framework that are given by their addresses.

use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

#[cfg(feature = "cuda")]
use aristos::gpu::cuda::CudaGpu;
#[cfg(feature = "emulate")]
use aristos::gpu::emulated::{self, EmulatedDevice};
use aristos::gpu::{Gpu, GpuError};
#[cfg(feature = "emulate")]
use aristos::moe::device::symmetric_bytes;
use aristos::moe::device::{DeviceExperts, DeviceOptions, ExpertAddresses, ExpertsBackward, ExpertsForward};
use aristos::moe::{LayerSpec, MoeError};
use aristos::shmem::{ShmTransport, Shmem};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::spec::{Form, SizesOf, check_rank, error, moe_error, spec_of};

/// The devices that this wheel can use.
pub(crate) const DEVICES: &[&str] = &[
    #[cfg(feature = "emulate")]
    "emulated",
    #[cfg(feature = "emulate")]
    "emulated-hopper",
    #[cfg(feature = "cuda")]
    CUDA,
];
#[cfg(feature = "cuda")]
const CUDA: &str = "cuda";
/// Number of bytes that alignment and a barrier take in addition to the layer's.
const HEAP_MARGIN: usize = 64 << 10;

/// This process among the processes of a layer, and its device.
struct Place<'a> {
    key: &'a str,
    rank: usize,
    size: usize,
    device: &'a str,
    /// The CUDA device's index among the visible ones, and the address of the processes' NCCL communicator if there are several.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    cuda: (usize, Option<usize>),
}

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
    symmetric_bytes: u64,
    blocks: u32,
}

fn addresses([up, down, up_bias, down_bias]: [u64; 4]) -> ExpertAddresses {
    ExpertAddresses { up, down, up_bias, down_bias }
}

impl Place<'_> {
    /// Meets the other processes over shared memory (collective), of which `bytes` can be allocated.
    fn meet(&self, bytes: usize, spec: &LayerSpec) -> PyResult<Shmem<ShmTransport>> {
        let heap_bytes = Shmem::<ShmTransport>::heap_bytes_for(self.size, bytes + HEAP_MARGIN);
        let deadline = Instant::now() + spec.options.wait_limit;
        let met = aristos::shmem::meet(self.key, self.rank, self.size, heap_bytes, deadline);
        Ok(Shmem::new(met.map_err(error)?))
    }

    /// Opens the device, and keeps it open until the process ends, because any thread may drop the layer.
    fn open(&self, spec: &LayerSpec, options: &DeviceOptions) -> PyResult<&'static dyn Gpu> {
        #[cfg(feature = "cuda")]
        if self.device == CUDA {
            return self.open_cuda(spec);
        }
        #[cfg(feature = "emulate")]
        return self.open_emulated(spec, options);
        #[cfg(not(feature = "emulate"))]
        {
            let _ = options;
            Err(error("this wheel has no emulated devices"))
        }
    }

    #[cfg(feature = "cuda")]
    fn open_cuda(&self, spec: &LayerSpec) -> PyResult<&'static dyn Gpu> {
        let (shmem, limit) = (self.meet(0, spec)?, spec.options.wait_limit);
        let gpu = match self.cuda {
            (number, None) if self.size == 1 => CudaGpu::attach_device(number, shmem, limit),
            // SAFETY: the wrapper has taken the address from torch's process group, and torch keeps its communicator until the group is
            // destroyed. The processes create layers in the same order, and no other thread uses the group meanwhile.
            (_, Some(communicator)) => unsafe { CudaGpu::attach_communicator(communicator, shmem, limit) },
            (_, None) => return Err(PyValueError::new_err("several processes need a communicator")),
        };
        Ok(Box::leak(Box::new(gpu.map_err(error)?)))
    }

    #[cfg(feature = "emulate")]
    fn open_emulated(&self, spec: &LayerSpec, options: &DeviceOptions) -> PyResult<&'static dyn Gpu> {
        let mut emulated = EmulatedDevice::default();
        emulated.hopper = self.device == "emulated-hopper";
        let bytes = symmetric_bytes(spec, options, &emulated.limits(), true).map_err(moe_error)?;
        let shmem = self.meet(bytes as usize, spec)?;
        Ok(Box::leak(Box::new(emulated::attach(shmem, &emulated).map_err(error)?)))
    }
}

/// Converts an error of the layer's start. For a full device, the message has the use of the memory and ways to reduce it.
fn with_memory_hint(e: MoeError, max_tokens: usize) -> PyErr {
    match e {
        MoeError::Device(GpuError::OutOfMemory { asked, free, total, .. }) => error(format!(
            "the windows for {max_tokens} tokens per process take {asked} bytes of symmetric memory, and the device has {free} of {total} bytes \
             free: set a smaller aristos.init(max_tokens=...), or make the first pass before torch's allocator has taken the memory \
             (torch.cuda.empty_cache(), torch.cuda.set_per_process_memory_fraction)"
        )),
        e => moe_error(e),
    }
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
    /// are the same as for `Layer`. A CUDA device is given by its index among the visible ones, and several processes with CUDA devices by
    /// the address of their NCCL communicator.
    #[new]
    #[pyo3(signature = (key, rank, size, *, device, hidden, intermediate, experts, top_k, activation, gated, bias, limit,
        limit_after, plus_one, dtype, max_tokens, wait_limit_s, spare_multiprocessors, number = 0, communicator = None))]
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
        number: usize,
        communicator: Option<usize>,
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
            let place = Place { key, rank, size, device, cuda: (number, communicator) };
            let gpu = place.open(&spec, &options)?;
            let layer = DeviceExperts::new(gpu, spec, &options).map_err(|e| with_memory_hint(e, max_tokens))?;
            Ok::<_, PyErr>(State { layer, failed: None })
        })?;
        // Stored, because awaiting the mutex with the GIL held would block all threads during a pass.
        let (state_bytes, symmetric_bytes) = (state.layer.state_bytes(), state.layer.symmetric_bytes());
        let blocks = state.layer.blocks();
        Ok(DeviceLayer { state: Mutex::new(state), state_bytes, symmetric_bytes, blocks })
    }

    /// Bytes of a pass's state.
    fn state_bytes(&self) -> u64 {
        self.state_bytes
    }

    /// Bytes of this process's symmetric memory.
    fn symmetric_bytes(&self) -> u64 {
        self.symmetric_bytes
    }

    /// Number of blocks of a pass's persistent kernel, each of which fills a multiprocessor.
    fn blocks(&self) -> u32 {
        self.blocks
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
