//! Opens the device of a PE, with as much symmetric memory as its layers need.

#[cfg(feature = "emulate")]
use std::mem::ManuallyDrop;
use std::time::Duration;

use super::JobError;
use super::host::{DeviceMemory, Host, SymmetricRuntime};
use super::request::DeviceKind;
#[cfg(feature = "cuda")]
use crate::gpu::cuda::CudaGpu;
#[cfg(feature = "emulate")]
use crate::gpu::emulated::{Emulated, EmulatedDevice, attach, join};
#[cfg(feature = "emulate")]
use crate::gpu::network_only;
use crate::gpu::{DeviceLimits, Gpu, SymmetricBy};
use crate::moe::device::{DeviceOptions, GemmPath, symmetric_bytes};
use crate::moe::{LayerSpec, MoeError};
use crate::shmem::{ShmTransport, Shmem};

/// Runs `work` with this PE's device: `open`, or a new one. An emulated device is opened with the symmetric memory that the layer needs.
/// The symmetric memory of a CUDA device grows on demand. If it cannot grow ([`heap`](super::heap)) and is too small, an error is returned.
/// Collective.
///
/// # Errors
/// Returns an error if the device is missing or lacks a feature, or the error of `work`.
pub fn with_device<R, E: From<JobError>>(
    open: Option<OpenDevice>,
    (device, symmetric): (DeviceKind, SymmetricBy),
    spec: &LayerSpec,
    on_device: &DeviceOptions,
    host: &mut impl SymmetricRuntime,
    work: impl FnOnce(&dyn Gpu, &dyn Host) -> Result<R, E>,
) -> Result<R, E> {
    let wanted = WantedDevice { device, symmetric, path: on_device.path, wait_limit: spec.options.wait_limit };
    let bytes = |limits: &DeviceLimits, all_reachable| symmetric_bytes(spec, on_device, limits, all_reachable);
    match open {
        Some(open) => {
            open.check_heap(symmetric, bytes)?;
            in_part(open, host, work)
        }
        None => with_symmetric(wanted, bytes, host, work),
    }
}

/// The device that a PE needs.
#[derive(Clone, Copy, Debug)]
pub struct WantedDevice {
    /// Its kind.
    pub device: DeviceKind,
    /// The library that provides symmetric memory of CUDA devices.
    pub symmetric: SymmetricBy,
    /// The GEMM path of the layer; an emulated device is created with the features of this path.
    pub path: Option<GemmPath>,
    /// Maximum time for which a PE waits for another.
    pub wait_limit: Duration,
}

/// Like [`with_device`], with a new device. `bytes` computes the size of symmetric memory from the device's limits, and from whether every
/// PE can use loads and stores to every other PE's memory.
///
/// # Errors
/// As for [`with_device`].
pub fn with_symmetric<R, E: From<JobError>>(
    wanted: WantedDevice,
    bytes: impl FnOnce(&DeviceLimits, bool) -> Result<u64, MoeError>,
    host: &mut impl SymmetricRuntime,
    work: impl FnOnce(&dyn Gpu, &dyn Host) -> Result<R, E>,
) -> Result<R, E> {
    in_part(OpenDevice::open(wanted, bytes, host)?, host, work)
}

/// Like [`with_symmetric`], for work before a part of the job on the same device. Also returns the device if it stays open.
///
/// # Errors
/// As for [`with_device`].
pub fn before_part<R, E: From<JobError>>(
    wanted: WantedDevice,
    bytes: impl FnOnce(&DeviceLimits, bool) -> Result<u64, MoeError>,
    host: &mut impl SymmetricRuntime,
    work: impl FnOnce(&dyn Gpu) -> Result<R, E>,
) -> Result<(R, Option<OpenDevice>), E> {
    let open = OpenDevice::open(wanted, bytes, host)?;
    let result = work(open.gpu())?;
    Ok((result, open.stay()))
}

/// Runs `work`, sends the results, and closes the device. Closing waits for all PEs, so results are sent before.
fn in_part<R, E: From<JobError>>(
    open: OpenDevice,
    host: &mut impl SymmetricRuntime,
    work: impl FnOnce(&dyn Gpu, &dyn Host) -> Result<R, E>,
) -> Result<R, E> {
    let result = work(open.gpu(), host)?;
    host.end_part()?;
    open.end()?;
    Ok(result)
}

/// The open device of this PE.
pub enum OpenDevice {
    /// A CUDA device. NVSHMEM can be initialised only once in a process, so the device may stay open between parts.
    #[cfg(feature = "cuda")]
    Cuda(Box<CudaGpu>),
    /// An emulated device. Dropping its memory waits for all PEs, so it is not dropped after an error, when other PEs may not drop theirs.
    #[cfg(feature = "emulate")]
    Emulated(Box<ManuallyDrop<Emulated>>),
}

impl OpenDevice {
    #[cfg_attr(not(feature = "emulate"), allow(unused_variables))]
    fn open(
        wanted: WantedDevice,
        bytes: impl FnOnce(&DeviceLimits, bool) -> Result<u64, MoeError>,
        host: &mut impl SymmetricRuntime,
    ) -> Result<Self, JobError> {
        match wanted.device {
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => {
                let open = Self::Cuda(Box::new(cuda(host, wanted.symmetric, wanted.wait_limit)?));
                open.check_heap(wanted.symmetric, bytes)?;
                Ok(open)
            }
            #[cfg(feature = "emulate")]
            DeviceKind::Emulated => {
                Ok(Self::Emulated(Box::new(ManuallyDrop::new(emulated(wanted.path, bytes, host)?))))
            }
            other => Err(JobError::NoDevice { device: other }),
        }
    }

    /// Returns an error if NVSHMEM's heap has a fixed size that is smaller than `bytes`. Collective.
    #[cfg_attr(not(feature = "cuda"), allow(unused_variables, clippy::unnecessary_wraps))]
    fn check_heap(
        &self,
        symmetric: SymmetricBy,
        bytes: impl FnOnce(&DeviceLimits, bool) -> Result<u64, MoeError>,
    ) -> Result<(), JobError> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) if symmetric == SymmetricBy::Nvshmem && gpu.n_pes() > 1 && super::heap::is_set() => {
                let limits = gpu.limits().map_err(MoeError::Device)?;
                super::heap::check(bytes(&limits, gpu.all_reachable().map_err(MoeError::Device)?)?)
            }
            _ => Ok(()),
        }
    }

    fn gpu(&self) -> &dyn Gpu {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => &**gpu,
            #[cfg(feature = "emulate")]
            Self::Emulated(gpu) => &***gpu,
        }
    }

    fn end(self) -> Result<(), JobError> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => Ok(gpu.finish().map_err(MoeError::Device)?),
            #[cfg(feature = "emulate")]
            Self::Emulated(gpu) => {
                drop(ManuallyDrop::into_inner(*gpu));
                Ok(())
            }
        }
    }

    /// Returns the device for the next part. An emulated device is closed instead, because its memory has the size for this part.
    fn stay(self) -> Option<Self> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => Some(self),
            #[cfg(feature = "emulate")]
            Self::Emulated(gpu) => {
                drop(ManuallyDrop::into_inner(*gpu));
                None
            }
        }
    }
}

/// Runs `work` with the CUDA device of this PE. The PEs exchange the data for the setup over a small heap in shared memory, or over TCP.
/// Collective.
///
/// # Errors
/// Returns an error if the device, NVSHMEM or NCCL lacks a feature, or the error of `work`.
#[cfg(feature = "cuda")]
pub fn with_cuda<R, E: From<JobError>>(
    host: &mut impl SymmetricRuntime,
    symmetric: SymmetricBy,
    wait_limit: Duration,
    work: impl FnOnce(&CudaGpu, &dyn Host) -> Result<R, E>,
) -> Result<R, E> {
    let gpu = cuda(host, symmetric, wait_limit)?;
    let result = work(&gpu, host)?;
    host.end_part()?;
    gpu.finish().map_err(|error| JobError::Layer(MoeError::Device(error)))?;
    Ok(result)
}

#[cfg(feature = "cuda")]
fn cuda(host: &mut impl SymmetricRuntime, symmetric: SymmetricBy, wait_limit: Duration) -> Result<CudaGpu, JobError> {
    let gpu = match host.device_memory(Shmem::<ShmTransport>::heap_bytes_for(host.n_pes(), 0))? {
        DeviceMemory::Shared(shmem) => CudaGpu::attach_by(symmetric, shmem, wait_limit),
        DeviceMemory::Tcp(shmem) => CudaGpu::attach_by(symmetric, shmem, wait_limit),
    };
    let gpu = gpu.map_err(MoeError::Device)?;
    if gpu.n_pes() > 1 {
        gpu.try_put().map_err(MoeError::Device)?;
    }
    Ok(gpu)
}

#[cfg(feature = "emulate")]
fn emulated(
    path: Option<GemmPath>,
    bytes: impl FnOnce(&DeviceLimits, bool) -> Result<u64, MoeError>,
    host: &mut impl SymmetricRuntime,
) -> Result<Emulated, JobError> {
    let network_only = network_only().map_err(MoeError::Device)?;
    let hopper = path == Some(GemmPath::Hopper);
    let device = EmulatedDevice { hopper, network_only, ..EmulatedDevice::default() };
    let all_reachable = host.shares_memory() && !network_only || host.n_pes() == 1;
    let bytes = bytes(&device.limits(), all_reachable)?;
    let heap = Shmem::<ShmTransport>::heap_bytes_for(host.n_pes(), bytes as usize);
    let gpu = match host.device_memory(heap)? {
        DeviceMemory::Shared(shmem) => attach(shmem, &device),
        DeviceMemory::Tcp(shmem) => join(shmem, &device),
    };
    Ok(gpu.map_err(MoeError::Device)?)
}
