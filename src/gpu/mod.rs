//! A PE's device, which has memory and symmetric memory and runs the kernels of `kernels/`.
//!
//! [`Gpu`] is the interface of a device. The module `cuda` implements it for a GPU with NVSHMEM or NCCL, and `emulated` runs the same
//! kernels on the CPU. One thread at a time uses a device, and the device's operations take effect in call order, because copies and frees
//! wait for earlier launches. A [`Buffer`] may therefore be dropped, written and read at any time.

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
    /// NCCL 2.29.2 or newer, for PEs on one host whose devices can load from and store to each other's memory.
    Nccl,
}

impl SymmetricBy {
    /// Returns the name that configurations and reports use.
    pub fn name(self) -> &'static str {
        match self {
            SymmetricBy::Nvshmem => "nvshmem",
            SymmetricBy::Nccl => "nccl",
        }
    }
}

/// The environment variable that restricts how kernels write to peers. An empty value has no effect.
#[cfg(any(feature = "cuda", feature = "emulate"))]
const ENV_REACH: &str = "ARISTOS_REACH";

/// Whether kernels use the network path for every peer, even for peers that loads and stores reach. This makes it possible to run the code
/// for several hosts on one host. The value must be the same on all PEs.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if `ARISTOS_REACH` has a value other than `network`.
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

/// The resources of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceLimits {
    /// Major and minor number of the compute capability.
    pub capability: (u32, u32),
    /// Number of multiprocessors that a PE can fill with co-resident blocks. If several PEs share a device, this is one PE's share of its
    /// multiprocessors. The value is the minimum over all PEs, because the layout of symmetric memory depends on it.
    pub multiprocessors: u32,
    /// Maximum dynamic shared memory per block, bytes.
    pub shared_bytes_per_block: u32,
    /// Size of the device memory, bytes.
    pub memory_total: u64,
    /// Free device memory, bytes.
    pub memory_free: u64,
    /// Maximum symmetric memory per PE, bytes. It is 0 if symmetric memory is allocated from `memory_free` when it is needed.
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
    /// Whether the device has Hopper's `wgmma` and tensor memory accelerator. The kernels for them are compiled for sm_90a, which no later
    /// architecture runs.
    pub fn hopper(&self) -> bool {
        self.capability.0 == 9
    }
}

/// An error of a device, with a message of one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// An allocation failed.
    #[error("out of {kind} memory: {asked} bytes asked for, {free} of {total} bytes free")]
    OutOfMemory {
        /// The kind of memory, "device" or "symmetric device".
        kind: &'static str,
        /// Number of requested bytes.
        asked: u64,
        /// Number of free bytes.
        free: u64,
        /// Number of bytes that the device has.
        total: u64,
    },
    /// A device, a driver or a library is missing or unusable. The message names it and the remedy.
    #[error("{0}")]
    Unavailable(String),
    /// An operation failed.
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
        /// The missing PE, or `None` if it is unknown.
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
        /// The PE that the kernel waited for, or `None` if it did not wait for a PE.
        peer: Option<usize>,
        /// The missing data.
        what: &'static str,
        /// How long it waited.
        waited: Duration,
    },
}

impl GpuError {
    /// If the error is a time-out, returns the PE that was waited for.
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

/// One PE's device. All addresses are device addresses, which are valid only on this PE. Operations take effect in call order.
///
/// # Safety
/// Safe code relies on the following guarantees of an implementation:
/// - [`Gpu::alloc_raw`] and [`Gpu::alloc_symmetric_raw`] return memory of the requested size and the documented alignment, which does not
///   overlap other allocated memory;
/// - copies, zeroing, frees, launches and replays take effect in call order; in particular, freed memory is not reused before all earlier
///   launches have completed;
/// - [`Gpu::peer_raw`] returns either 0, or an address at which this device's loads and stores access the peer's copy of the same
///   allocation;
/// - [`Gpu::my_pe`] and [`Gpu::n_pes`] never change, and `my_pe < n_pes`;
/// - [`Gpu::resident_blocks`] and [`Gpu::limits`] do not exceed the device's resources;
/// - [`Gpu::tensor_map`] describes exactly the given matrix;
/// - the result of [`Gpu::record`] launches exactly the kernels and parameters that `work` launched.
pub unsafe trait Gpu {
    /// The device's name as its vendor reports it.
    fn name(&self) -> String;

    /// A string that identifies the device within its host. PEs of a host that share a device return the same string.
    fn device_id(&self) -> String;

    /// Returns the device's resources.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn limits(&self) -> Result<DeviceLimits, GpuError>;

    /// This PE's number, `0..n_pes`.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Allocates uninitialised device memory, aligned to at least 256 bytes.
    ///
    /// # Errors
    /// Returns [`GpuError::OutOfMemory`] if the device has less memory free, and the driver's error if the driver fails.
    fn alloc_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory that [`Gpu::alloc_raw`] returned, after all earlier launches have completed.
    ///
    /// # Safety
    /// `address` was returned by [`Gpu::alloc_raw`], has not been freed, and is not used afterwards.
    unsafe fn free_raw(&self, address: u64);

    /// Allocates uninitialised symmetric memory, aligned to at least 64 bytes. Collective: all PEs request the same sizes in
    /// the same order.
    ///
    /// # Errors
    /// Returns [`GpuError::OutOfMemory`] if a PE has too little memory; [`GpuError::Barrier`] if a peer is missing.
    fn alloc_symmetric_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory that [`Gpu::alloc_symmetric_raw`] returned (collective).
    ///
    /// # Safety
    /// `address` was returned by [`Gpu::alloc_symmetric_raw`] and has not been freed. No PE uses it afterwards, and no
    /// operation on it is in flight on any PE.
    unsafe fn free_symmetric_raw(&self, address: u64);

    /// Returns the address at which this PE accesses `pe`'s copy of the symmetric address `symmetric`, or 0 if loads and stores do not
    /// reach it.
    fn peer_raw(&self, symmetric: u64, pe: usize) -> u64;

    /// Whether loads and stores of every PE reach every PE's symmetric memory. Collective: all PEs get the same answer.
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a peer is missing.
    fn all_reachable(&self) -> Result<bool, GpuError>;

    /// Copies to the device. Returns once `from` may be reused.
    ///
    /// # Safety
    /// `to` points to `from.len()` bytes of this device's memory.
    ///
    /// # Errors
    /// Returns the driver's error, which may come from an earlier launch.
    unsafe fn copy_in_raw(&self, to: u64, from: &[u8]) -> Result<(), GpuError>;

    /// Copies from the device and waits for completion.
    ///
    /// # Safety
    /// `from` points to `to.len()` bytes of this device's memory.
    ///
    /// # Errors
    /// Returns the driver's error, which may come from an earlier launch.
    unsafe fn copy_out_raw(&self, to: &mut [u8], from: u64) -> Result<(), GpuError>;

    /// Sets device memory to zero.
    ///
    /// # Safety
    /// `to` points to `bytes` bytes of this device's memory.
    ///
    /// # Errors
    /// Returns the driver's error, which may come from an earlier launch.
    unsafe fn zero_raw(&self, to: u64, bytes: u64) -> Result<(), GpuError>;

    /// Returns the maximum number of blocks of `kernel` that are co-resident on this PE's share of the device. The number is a multiple of
    /// the cluster size. The grid of `launch` is ignored.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the kernel does not exist.
    fn resident_blocks(&self, kernel: &str, launch: Launch) -> Result<u32, GpuError>;

    /// Loads a kernel that will be launched with at most `shared_bytes` of dynamic shared memory. Without this call a driver may load the
    /// kernel at its first launch, and that is not allowed while launches are recorded.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the kernel does not exist or a block cannot have that much shared memory.
    fn prepare(&self, kernel: &str, shared_bytes: u32) -> Result<(), GpuError>;

    /// Launches a kernel, cooperatively if `launch` requests it, and returns without waiting. `args` holds the bytes of each parameter of
    /// the kernel, in order.
    ///
    /// # Safety
    /// `args` match the kernel's parameters, and every address in them is valid for the kernel's accesses.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the kernel does not exist or cannot be launched with this configuration.
    unsafe fn launch(&self, kernel: &str, launch: Launch, args: &[&[u8]]) -> Result<(), GpuError>;

    /// Records the launches of `work` without running them. On CUDA devices they are recorded as a graph. `work` may only launch kernels,
    /// and these must be [prepared](Gpu::prepare).
    ///
    /// # Errors
    /// Returns the error of `work`, or the driver's error if `work` called something that cannot be captured.
    fn record(&self, work: &mut dyn FnMut() -> Result<(), GpuError>) -> Result<Box<dyn Recording + '_>, GpuError>;

    /// Waits until all earlier launches have completed.
    ///
    /// # Errors
    /// Returns the driver's error if a launch failed.
    fn synchronise(&self) -> Result<(), GpuError>;

    /// Waits until all earlier launches of this PE have completed, and then until all PEs have reached this barrier. The wait takes at most
    /// `limit` if the transport supports a limit.
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a PE is missing, and the driver's error if the driver fails.
    fn barrier(&self, limit: Duration) -> Result<(), GpuError>;

    /// Records under `number` the device time at which all earlier launches complete. `number` is below 64 and may be used again.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn mark(&self, number: usize) -> Result<(), GpuError>;

    /// Returns the time between two marks. [`Gpu::synchronise`] must have been called after the second mark.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if one of the marks was not recorded.
    fn elapsed(&self, from: usize, to: usize) -> Result<Duration, GpuError>;

    /// Makes the device usable in the calling thread, and selects the stream of later operations. `stream` is a `CUstream` of the caller,
    /// or `None` for the device's own stream. Operations on different streams may take effect in any order.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn use_stream(&self, stream: Option<u64>) -> Result<(), GpuError>;

    /// Allocates zeroed memory of the host, aligned to 64 bytes. The device reads and writes it at the same address.
    ///
    /// # Errors
    /// Returns the driver's error.
    fn alloc_host_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Frees memory that [`Gpu::alloc_host_raw`] returned.
    ///
    /// # Safety
    /// `address` was returned by [`Gpu::alloc_host_raw`], has not been freed, and no kernel uses it any more.
    unsafe fn free_host_raw(&self, address: u64);

    /// Returns a tensor map for the row-major matrix at `base`. The matrix has `rows` by `cols` elements of `element_bytes` bytes, and its
    /// rows begin `row_stride_bytes` apart. It is copied in boxes of `box_rows` by `box_cols` elements with a 128-byte swizzle, and
    /// elements out of bounds are read as zero. If `items` is not 0, the map has a third dimension, for `items` such matrices that begin
    /// `item_stride_bytes` apart.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the device has no tensor memory accelerator or the driver rejects the matrix.
    fn tensor_map(&self, matrix: TensorMap) -> Result<[u8; 128], GpuError>;
}

/// Launches that [`Gpu::record`] has recorded.
pub trait Recording {
    /// Repeats all recorded launches with the same parameters, and returns without waiting.
    ///
    /// # Safety
    /// Every address in the recorded parameters is still valid for the kernels' accesses.
    ///
    /// # Errors
    /// Returns the driver's error.
    unsafe fn replay(&self) -> Result<(), GpuError>;
}

/// A matrix and the boxes in which it is copied. [`Gpu::tensor_map`] describes the fields.
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

/// Device memory, which is freed when the value is dropped.
pub struct Buffer<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    bytes: u64,
}

impl<'g> Buffer<'g> {
    /// Allocates uninitialised memory.
    ///
    /// # Errors
    /// Returns [`GpuError::OutOfMemory`] if the device has less memory free.
    pub fn new(gpu: &'g dyn Gpu, bytes: u64) -> Result<Self, GpuError> {
        // At least one byte is allocated, because a buffer of length 0 needs a valid address too.
        Ok(Buffer { gpu, address: gpu.alloc_raw(bytes.max(1))?, bytes })
    }

    /// Allocates memory and copies `values` to it.
    ///
    /// # Errors
    /// Returns [`GpuError::OutOfMemory`] if the device has less memory free, and the driver's error if the driver fails.
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
    /// Returns the driver's error, which may come from an earlier launch.
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
    /// Returns the driver's error, which may come from an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn read<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), GpuError> {
        let from = self.at(offset, size_of_val(values));
        // SAFETY: `at` has checked that the range is inside the allocation.
        unsafe { self.gpu.copy_out_raw(bytemuck::cast_slice_mut(values), from) }
    }

    /// Returns the `len` values at byte `offset`.
    ///
    /// # Errors
    /// Returns the driver's error, which may come from an earlier launch.
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
    /// Returns the driver's error, which may come from an earlier launch.
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
        // SAFETY: `new` allocated the memory, and it is freed only here.
        unsafe { self.gpu.free_raw(self.address) }
    }
}

/// Symmetric memory of a device. Dropping it does not free the memory, because freeing is collective and after an error the other PEs may
/// not take part. Without [`SymmetricBuffer::free`] it stays allocated until the PEs exit.
pub struct SymmetricBuffer<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    bytes: u64,
    /// Makes the type not `Send`, because the thread that allocated the memory must make the collective calls.
    one_thread: PhantomData<*const ()>,
}

impl<'g> SymmetricBuffer<'g> {
    /// Allocates uninitialised memory (collective).
    ///
    /// # Errors
    /// Returns [`GpuError::OutOfMemory`] if a PE has too little memory; [`GpuError::Barrier`] if a peer is missing.
    pub fn new(gpu: &'g dyn Gpu, bytes: u64) -> Result<Self, GpuError> {
        let address = gpu.alloc_symmetric_raw(bytes.max(1))?;
        Ok(SymmetricBuffer { gpu, address, bytes, one_thread: PhantomData })
    }

    /// The address of this PE's copy.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the address at which this PE accesses `pe`'s copy, or 0 if loads and stores do not reach it.
    pub fn peer(&self, pe: usize) -> u64 {
        self.gpu.peer_raw(self.address, pe)
    }

    /// Sets `bytes` bytes at byte `offset` of this PE's copy to zero. A barrier must follow before a peer writes there.
    ///
    /// # Errors
    /// Returns the driver's error, which may come from an earlier launch.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub fn zero(&self, offset: u64, bytes: u64) -> Result<(), GpuError> {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: the assertion above has checked that the range is inside the allocation.
        unsafe { self.gpu.zero_raw(self.address + offset, bytes) }
    }

    /// Waits for all PEs, then frees the memory (collective).
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a peer is missing after `limit`; the memory then stays allocated.
    pub fn free(self, limit: Duration) -> Result<(), GpuError> {
        self.gpu.barrier(limit)?;
        // SAFETY: `new` allocated the memory. After the barrier no PE has an operation on it in flight, and all PEs free it here.
        unsafe { self.gpu.free_symmetric_raw(self.address) };
        Ok(())
    }
}
