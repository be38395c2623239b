//! The device of a PE, opened with as much symmetric memory as its layers need.

#[cfg(feature = "emulate")]
use std::mem::ManuallyDrop;
#[cfg(feature = "cuda")]
use std::time::Duration;

use super::JobError;
use super::host::{DeviceMemory, Host, MemoryHost};
use super::request::DeviceKind;
use crate::gpu::Gpu;
#[cfg(feature = "cuda")]
use crate::gpu::cuda::CudaGpu;
#[cfg(feature = "emulate")]
use crate::gpu::emulated::{Emulated, EmulatedDevice, attach, join};
use crate::moe::device::DeviceOptions;
#[cfg(feature = "emulate")]
use crate::moe::device::{GemmPath, symmetric_bytes};
use crate::moe::{LayerSpec, MoeError};
use crate::shmem::{ShmTransport, Shmem};

/// Opens this PE's device, with as much symmetric memory as such a layer needs where that must be known at first, as on an
/// emulated device; CUDA's grows with what is asked for. Works with it. Collective.
///
/// # Errors
/// No such device, what it lacks, or the work's.
#[cfg_attr(not(feature = "emulate"), allow(unused_variables))]
pub fn with_device<R, E: From<JobError>>(
    device: DeviceKind,
    spec: &LayerSpec,
    on_device: &DeviceOptions,
    host: &mut impl MemoryHost,
    work: impl FnOnce(&dyn Gpu, &dyn Host) -> Result<R, E>,
) -> Result<R, E> {
    match device {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => with_cuda(host, spec.options.wait_limit, |gpu, host| work(gpu, host)),
        #[cfg(feature = "emulate")]
        DeviceKind::Emulated => {
            // The end of its memory waits for all PEs, which after an error would be in vain.
            let gpu = ManuallyDrop::new(emulated(spec, on_device, host)?);
            let result = work(&*gpu, host)?;
            host.end_part()?;
            drop(ManuallyDrop::into_inner(gpu));
            Ok(result)
        }
        other => Err(JobError::NoDevice { device: other }.into()),
    }
}

/// Works with the CUDA device of this PE. The PEs meet over shared memory or TCP, of which they need next to nothing. Collective.
///
/// # Errors
/// What the device or NVSHMEM lacks, or the work's.
#[cfg(feature = "cuda")]
pub fn with_cuda<R, E: From<JobError>>(
    host: &mut impl MemoryHost,
    wait_limit: Duration,
    work: impl FnOnce(&CudaGpu, &dyn Host) -> Result<R, E>,
) -> Result<R, E> {
    let failed = |error| E::from(JobError::Layer(MoeError::Device(error)));
    let gpu = match host.device_memory(Shmem::<ShmTransport>::heap_bytes_for(host.n_pes(), 0))? {
        DeviceMemory::Shared(shmem) => CudaGpu::attach(shmem, wait_limit),
        DeviceMemory::Tcp(shmem) => CudaGpu::attach(shmem, wait_limit),
    };
    let gpu = gpu.map_err(failed)?;
    if gpu.n_pes() > 1 {
        gpu.try_put().map_err(failed)?;
    }
    let result = work(&gpu, host)?;
    // As above: what PEs have to say is not to wait for the end of the devices, nor that for it.
    host.end_part()?;
    gpu.finish().map_err(failed)?;
    Ok(result)
}

#[cfg(feature = "emulate")]
fn emulated(spec: &LayerSpec, on_device: &DeviceOptions, host: &mut impl MemoryHost) -> Result<Emulated, JobError> {
    let device = EmulatedDevice { hopper: on_device.path == Some(GemmPath::Hopper), ..EmulatedDevice::default() };
    let all_reachable = host.shares_memory() || host.n_pes() == 1;
    let bytes = symmetric_bytes(spec, on_device, &device.limits(), all_reachable)?;
    let heap = Shmem::<ShmTransport>::heap_bytes_for(host.n_pes(), bytes as usize);
    let gpu = match host.device_memory(heap)? {
        DeviceMemory::Shared(shmem) => attach(shmem, &device),
        DeviceMemory::Tcp(shmem) => join(shmem, &device),
    };
    Ok(gpu.map_err(MoeError::Device)?)
}
