//! A PE's device: its memory, its symmetric memory, and the kernels of `kernels/` on it.
//!
//! [`Gpu`] is the interface of a device; `cuda` implements it on a GPU with NVSHMEM or NCCL, `emulated` runs the same kernels
//! on the CPU. A device is used by one thread at a time, and its operations take effect in call order, as on one stream: copies and
//! frees wait for earlier launches. A [`Buffer`] may therefore be dropped, written and read at any time.

#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "emulate")]
pub mod emulated;
#[cfg(feature = "cuda")]
pub mod nvshmem;
pub mod params;
pub mod smoke;

use std::marker::PhantomData;
use std::time::Duration;

use bytemuck::Pod;
use serde::{Deserialize, Serialize};

pub use params::Launch;

/// The library that allocates symmetric memory on the PEs' CUDA devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SymmetricBy {
    /// NVSHMEM, on one or several hosts. A single PE needs no library.
    #[default]
    Nvshmem,
    /// NCCL 2.29.2 or newer, for PEs of one host whose devices can load from and store to each other's memory.
    Nccl,
}

impl SymmetricBy {
    /// The name in configurations and reports.
    pub fn name(self) -> &'static str {
        match self {
            SymmetricBy::Nvshmem => "nvshmem",
            SymmetricBy::Nccl => "nccl",
        }
    }
}

/// Environment variable that restricts how kernels write to peers; an empty value counts as unset.
#[cfg(any(feature = "cuda", feature = "emulate"))]
const ENV_REACH: &str = "ARISTOS_REACH";

/// Whether kernels use the network path for every peer, even for peers that loads and stores reach. This runs the inter-node
/// code on one host. All PEs must agree.
///
/// # Errors
/// [`GpuError::Unavailable`] if `ARISTOS_REACH` has a value other than `network`.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn network_only() -> Result<bool, GpuError> {
    match std::env::var_os(ENV_REACH) {
        None => Ok(false),
        Some(value) if value.is_empty() => Ok(false),
        Some(value) if value == "network" => Ok(true),
        Some(value) => Err(GpuError::Unavailable(format!(
            "{ENV_REACH} is {value:?}: `network` has kernels write to every peer as over the network, without it they use loads and stores where these reach"
        ))),
    }
}

/// A device's resources.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceLimits {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors that every PE can fill with co-resident blocks; on a device that several PEs share, one PE's share. This
    /// is the minimum over all PEs, because the layout of symmetric memory depends on it.
    pub multiprocessors: u32,
    /// Maximum dynamic shared memory per block, bytes.
    pub shared_bytes_per_block: u32,
    /// Device memory, bytes.
    pub memory_total: u64,
    /// Free device memory, bytes.
    pub memory_free: u64,
    /// Maximum symmetric memory per PE, bytes; 0 if symmetric memory is allocated from `memory_free` on demand.
    pub symmetric_total: u64,
}

#[cfg(test)]
impl DeviceLimits {
    /// The limits of an A100 with 40 GiB.
    pub(crate) fn a100() -> Self {
        DeviceLimits {
            capability: (8, 0),
            multiprocessors: 108,
            shared_bytes_per_block: 163 << 10,
            memory_total: 40 << 30,
            memory_free: 40 << 30,
            symmetric_total: 0,
        }
    }
}

impl DeviceLimits {
    /// Whether the device has Hopper's `wgmma` and tensor memory accelerator (sm_90a; no later architecture runs that code).
    pub fn hopper(&self) -> bool {
        self.capability.0 == 9
    }
}

/// An error of a device. Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// An allocation failed.
    #[error("out of {kind} memory: {asked} bytes asked for, {free} of {total} bytes free")]
    OutOfMemory {
        /// "device" or "symmetric device".
        kind: &'static str,
        /// Requested bytes.
        asked: u64,
        /// Free bytes.
        free: u64,
        /// Total bytes.
        total: u64,
    },
    /// A device, driver or library is missing or unusable; the message names it and the remedy.
    #[error("{0}")]
    Unavailable(String),
    /// An operation that failed.
    #[error("cannot {what}: {message}")]
    Failed {
        /// The operation.
        what: String,
        /// The driver's message.
        message: String,
    },
    /// A PE did not reach a barrier in time.
    #[error("PE {pe} waited {:.1} s at a barrier of the devices for {}", waited.as_secs_f64(),
        peer.map_or("another PE".to_string(), |peer| format!("PE {peer}")))]
    Barrier {
        /// The waiting PE.
        pe: usize,
        /// The missing PE, if known.
        peer: Option<usize>,
        /// How long it waited.
        waited: Duration,
    },
    /// A wait inside a kernel timed out.
    #[error("PE {pe} waited {:.1} s for {}{what}", waited.as_secs_f64(),
        peer.map(|peer| format!("PE {peer}: ")).unwrap_or_default())]
    Wait {
        /// The waiting PE.
        pe: usize,
        /// The PE that the kernel waited for, if it waited for one.
        peer: Option<usize>,
        /// The missing data.
        what: &'static str,
        /// How long it waited.
        waited: Duration,
    },
}

impl GpuError {
    /// The PE that a wait timed out on, if the error is a timeout.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            GpuError::Barrier { peer, .. } | GpuError::Wait { peer, .. } => *peer,
            _ => None,
        }
    }

    /// Builds [`GpuError::Failed`].
    pub fn failed(what: impl Into<String>, message: impl ToString) -> Self {
        GpuError::Failed { what: what.into(), message: message.to_string() }
    }
}

/// One PE's device. Addresses are device addresses and valid on this PE only. Operations take effect in call order.
///
/// # Safety
/// Safe code relies on the following guarantees of an implementation:
/// - [`Gpu::alloc_raw`] and [`Gpu::alloc_symmetric_raw`] return memory of the requested size and documented alignment, which no
///   other allocation overlaps until it is freed;
/// - copies, zeroing, frees, launches and replays take effect in call order: freed memory is not reused before all earlier
///   launches have completed;
/// - [`Gpu::peer_raw`] returns 0 or an address at which this device's loads and stores access the peer's block of the same
///   allocation;
/// - [`Gpu::my_pe`] and [`Gpu::n_pes`] never change, and `my_pe < n_pes`;
/// - [`Gpu::resident_blocks`] and [`Gpu::limits`] do not exceed the device's resources;
/// - [`Gpu::tensor_map`] describes exactly the given matrix;
/// - the result of [`Gpu::record`] launches exactly the kernels and parameters that `work` launched.
pub unsafe trait Gpu {
    /// The device's name as reported by its vendor.
    fn name(&self) -> String;

    /// Identifies the device within its host: PEs of a host that share a device return the same string.
    fn device_id(&self) -> String;

    /// The device's resources.
    ///
    /// # Errors
    /// The driver's error.
    fn limits(&self) -> Result<DeviceLimits, GpuError>;

    /// This PE's number, `0..n_pes`.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Allocates uninitialised device memory, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] if the device has less memory free; the driver's error.
    fn alloc_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory of [`Gpu::alloc_raw`] after all earlier launches have completed.
    ///
    /// # Safety
    /// `address` was returned by [`Gpu::alloc_raw`], has not been freed, and is not used afterwards.
    unsafe fn free_raw(&self, address: u64);

    /// Allocates uninitialised symmetric memory, aligned to at least 64 bytes. Collective: all PEs request the same sizes in
    /// the same order.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] if a PE has too little memory; [`GpuError::Barrier`] if a peer is missing.
    fn alloc_symmetric_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory of [`Gpu::alloc_symmetric_raw`] (collective).
    ///
    /// # Safety
    /// `address` was returned by [`Gpu::alloc_symmetric_raw`] and has not been freed. No PE uses it afterwards, and no
    /// operation on it is in flight on any PE.
    unsafe fn free_symmetric_raw(&self, address: u64);

    /// The address on this PE of `pe`'s copy of the symmetric address `symmetric`; 0 if loads and stores do not reach it.
    fn peer_raw(&self, symmetric: u64, pe: usize) -> u64;

    /// Whether loads and stores of every PE reach every PE's symmetric memory. Collective: all PEs get the same answer.
    ///
    /// # Errors
    /// [`GpuError::Barrier`] if a peer is missing.
    fn all_reachable(&self) -> Result<bool, GpuError>;

    /// Copies to the device. Returns once `from` may be reused.
    ///
    /// # Safety
    /// `to` points to `from.len()` bytes of this device's memory.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    unsafe fn copy_in_raw(&self, to: u64, from: &[u8]) -> Result<(), GpuError>;

    /// Copies from the device and waits for completion.
    ///
    /// # Safety
    /// `from` points to `to.len()` bytes of this device's memory.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    unsafe fn copy_out_raw(&self, to: &mut [u8], from: u64) -> Result<(), GpuError>;

    /// Sets device memory to zero.
    ///
    /// # Safety
    /// `to` points to `bytes` bytes of this device's memory.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    unsafe fn zero_raw(&self, to: u64, bytes: u64) -> Result<(), GpuError>;

    /// Maximum number of co-resident blocks of `kernel` on this PE's share of the device, a multiple of the cluster size; the
    /// grid of `launch` is ignored.
    ///
    /// # Errors
    /// [`GpuError::Failed`] if the kernel does not exist.
    fn resident_blocks(&self, kernel: &str, launch: Launch) -> Result<u32, GpuError>;

    /// Loads a kernel that will be launched with at most `shared_bytes` of dynamic shared memory. Drivers may load lazily at
    /// the first launch, which is not allowed while launches are recorded.
    ///
    /// # Errors
    /// [`GpuError::Failed`] if the kernel does not exist or a block cannot have that much shared memory.
    fn prepare(&self, kernel: &str, shared_bytes: u32) -> Result<(), GpuError>;

    /// Launches a kernel and returns without waiting; cooperatively if `launch` requests it. `args` holds the bytes of each
    /// kernel parameter, in order.
    ///
    /// # Safety
    /// `args` match the kernel's parameters, and every address in them is valid for the kernel's accesses.
    ///
    /// # Errors
    /// [`GpuError::Failed`] if the kernel does not exist or cannot be launched with this configuration.
    unsafe fn launch(&self, kernel: &str, launch: Launch, args: &[&[u8]]) -> Result<(), GpuError>;

    /// Records the launches of `work` without running them (on CUDA devices as a graph). `work` must only launch, and its
    /// kernels must be [prepared](Gpu::prepare).
    ///
    /// # Errors
    /// The error of `work`; the driver's error if `work` called something that cannot be captured.
    fn record(&self, work: &mut dyn FnMut() -> Result<(), GpuError>) -> Result<Box<dyn Recording + '_>, GpuError>;

    /// Waits until all earlier launches have completed.
    ///
    /// # Errors
    /// The driver's error of any of them.
    fn synchronise(&self) -> Result<(), GpuError>;

    /// Waits for all earlier launches of this PE, then for all PEs to reach this barrier, for at most `limit` where the
    /// transport supports a limit.
    ///
    /// # Errors
    /// [`GpuError::Barrier`] if a PE is missing; the driver's error.
    fn barrier(&self, limit: Duration) -> Result<(), GpuError>;

    /// Records under `number` (below 64, reusable) the device time at which all earlier launches complete.
    ///
    /// # Errors
    /// The driver's error.
    fn mark(&self, number: usize) -> Result<(), GpuError>;

    /// Time between two marks, after [`Gpu::synchronise`].
    ///
    /// # Errors
    /// [`GpuError::Failed`] if one of the marks was not recorded.
    fn elapsed(&self, from: usize, to: usize) -> Result<Duration, GpuError>;

    /// Makes the device usable in the calling thread, and `stream`, a `CUstream` of the caller, the stream of later operations;
    /// `None`: the device's own stream. Operations on different streams take effect in any order.
    ///
    /// # Errors
    /// The driver's error.
    fn use_stream(&self, stream: Option<u64>) -> Result<(), GpuError>;

    /// Allocates zeroed memory of the host that the device reads and writes at the same address, aligned to 64 bytes.
    ///
    /// # Errors
    /// The driver's error.
    fn alloc_host_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory of [`Gpu::alloc_host_raw`].
    ///
    /// # Safety
    /// `address` was returned by [`Gpu::alloc_host_raw`], has not been freed, and no kernel uses it any more.
    unsafe fn free_host_raw(&self, address: u64);

    /// A tensor map for the row-major matrix at `base`: `rows` by `cols` elements of `element_bytes`, rows `row_stride_bytes`
    /// apart, copied in boxes of `box_rows` by `box_cols` with a 128-byte swizzle; elements out of bounds read as zero. If
    /// `items` is not 0, the map has a third dimension: `items` such matrices, `item_stride_bytes` apart.
    ///
    /// # Errors
    /// [`GpuError::Failed`] if the device has no tensor memory accelerator or the driver rejects the matrix.
    fn tensor_map(&self, matrix: TensorMap) -> Result<[u8; 128], GpuError>;
}

/// Recorded launches; see [`Gpu::record`].
pub trait Recording {
    /// Repeats all recorded launches with the same parameters; returns without waiting.
    ///
    /// # Safety
    /// Every address in the recorded parameters is still valid for the kernels' accesses.
    ///
    /// # Errors
    /// The driver's error.
    unsafe fn replay(&self) -> Result<(), GpuError>;
}

/// A matrix and the boxes in which it is copied; see [`Gpu::tensor_map`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TensorMap {
    pub base: u64,
    pub rows: u32,
    pub cols: u32,
    pub row_stride_bytes: u64,
    pub items: u32,
    pub item_stride_bytes: u64,
    pub box_rows: u32,
    pub box_cols: u32,
    pub element_bytes: u32,
}

/// Device memory, freed on drop.
pub struct Buffer<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    bytes: u64,
}

impl<'g> Buffer<'g> {
    /// Allocates uninitialised memory.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] if the device has less memory free.
    pub fn new(gpu: &'g dyn Gpu, bytes: u64) -> Result<Self, GpuError> {
        // A buffer of length 0 needs a valid address too.
        Ok(Buffer { gpu, address: gpu.alloc_raw(bytes.max(1))?, bytes })
    }

    /// Allocates memory and copies `values` to it.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] if the device has less memory free; the driver's error.
    pub fn from_slice<T: Pod>(gpu: &'g dyn Gpu, values: &[T]) -> Result<Self, GpuError> {
        let buffer = Self::new(gpu, size_of_val(values) as u64)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// The device address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the buffer was allocated on `gpu`.
    pub fn is_on(&self, gpu: &dyn Gpu) -> bool {
        std::ptr::addr_eq(self.gpu, gpu)
    }

    fn at(&self, offset: u64, bytes: usize) -> u64 {
        let end = offset.checked_add(bytes as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} are outside a buffer of {} bytes",
            self.bytes
        );
        self.address + offset
    }

    /// Copies `values` to byte `offset`.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn write<T: Pod>(&self, offset: u64, values: &[T]) -> Result<(), GpuError> {
        let to = self.at(offset, size_of_val(values));
        // SAFETY: `at` has checked that the range is inside the allocation.
        unsafe { self.gpu.copy_in_raw(to, bytemuck::cast_slice(values)) }
    }

    /// Copies from byte `offset` into `values`.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn read<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), GpuError> {
        let from = self.at(offset, size_of_val(values));
        // SAFETY: `at` has checked that the range is inside the allocation.
        unsafe { self.gpu.copy_out_raw(bytemuck::cast_slice_mut(values), from) }
    }

    /// The `len` values at byte `offset`.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn read_vec<T: Pod>(&self, offset: u64, len: usize) -> Result<Vec<T>, GpuError> {
        let mut values = vec![T::zeroed(); len];
        self.read(offset, &mut values)?;
        Ok(values)
    }

    /// Sets `bytes` bytes at byte `offset` to zero.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn zero(&self, offset: u64, bytes: u64) -> Result<(), GpuError> {
        let to = self.at(offset, bytes as usize);
        // SAFETY: `at` has checked that the range is inside the allocation.
        unsafe { self.gpu.zero_raw(to, bytes) }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed only here.
        unsafe { self.gpu.free_raw(self.address) }
    }
}

/// Symmetric memory of a device. If it is dropped without [`SymmetricBuffer::free`], it stays allocated until the PEs exit:
/// freeing is collective, and after an error the other PEs may not take part.
pub struct SymmetricBuffer<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    bytes: u64,
    /// Not `Send`: collective calls must come from the thread that allocated it.
    one_thread: PhantomData<*const ()>,
}

impl<'g> SymmetricBuffer<'g> {
    /// Allocates uninitialised memory (collective).
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`] if a PE has too little memory; [`GpuError::Barrier`] if a peer is missing.
    pub fn new(gpu: &'g dyn Gpu, bytes: u64) -> Result<Self, GpuError> {
        let address = gpu.alloc_symmetric_raw(bytes.max(1))?;
        Ok(SymmetricBuffer { gpu, address, bytes, one_thread: PhantomData })
    }

    /// The address on this PE's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The address on this PE of `pe`'s copy; 0 if loads and stores do not reach it.
    pub fn peer(&self, pe: usize) -> u64 {
        self.gpu.peer_raw(self.address, pe)
    }

    /// Sets `bytes` bytes at byte `offset` of this PE's copy to zero. A barrier must follow before a peer writes there.
    ///
    /// # Errors
    /// The driver's error, possibly of an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn zero(&self, offset: u64, bytes: u64) -> Result<(), GpuError> {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: the assertion above keeps the range inside the allocation.
        unsafe { self.gpu.zero_raw(self.address + offset, bytes) }
    }

    /// Waits for all PEs, then frees the memory (collective).
    ///
    /// # Errors
    /// [`GpuError::Barrier`] if a peer is missing after `limit`; the memory then stays allocated.
    pub fn free(self, limit: Duration) -> Result<(), GpuError> {
        self.gpu.barrier(limit)?;
        // SAFETY: allocated by `new`; after the barrier no PE has an operation on it in flight, and all PEs free it here.
        unsafe { self.gpu.free_symmetric_raw(self.address) };
        Ok(())
    }
}
