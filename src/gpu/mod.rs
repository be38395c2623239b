//! A PE's device: its memory, its symmetric memory, and the kernels of `kernels/` on it.
//!
//! [`Gpu`] is what the layer needs of a device; `cuda` is a GPU with NVSHMEM or NCCL, `emulated` the same kernels on the CPU.
//! A device is used from one thread, and everything happens in the order it was asked for, as on one stream: copies and
//! frees wait for what was launched before them. So a [`Buffer`] may be dropped, written and read at any time.

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

/// What gives the PEs of CUDA devices symmetric memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SymmetricBy {
    /// NVSHMEM, where there are several PEs, of one host or of many.
    #[default]
    Nvshmem,
    /// NCCL, 2.29.2 or newer: PEs of one host whose devices reach each other by loads and stores.
    Nccl,
}

impl SymmetricBy {
    /// Its name, in reports too.
    pub fn name(self) -> &'static str {
        match self {
            SymmetricBy::Nvshmem => "nvshmem",
            SymmetricBy::Nccl => "nccl",
        }
    }
}

/// How kernels write to peers; empty as if not set.
#[cfg(any(feature = "cuda", feature = "emulate"))]
const ENV_REACH: &str = "ARISTOS_REACH";

/// Whether kernels are to treat every peer as one that only the network reaches, though loads and stores may: so one host runs what runs between
/// several. The same on all PEs.
///
/// # Errors
/// [`GpuError::Unavailable`] where `ARISTOS_REACH` is something else than `network`.
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) fn reached_by_network_alone() -> Result<bool, GpuError> {
    match std::env::var_os(ENV_REACH) {
        None => Ok(false),
        Some(value) if value.is_empty() => Ok(false),
        Some(value) if value == "network" => Ok(true),
        Some(value) => Err(GpuError::Unavailable(format!(
            "{ENV_REACH} is {value:?}: `network` has kernels write to every peer as over the network, without it they use loads and stores where these reach"
        ))),
    }
}

/// What a device has.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceLimits {
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors that every PE may fill with blocks that wait for each other, of a device that several PEs share its share: the fewest of
    /// any PE's, since places in symmetric memory go by it.
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a block, bytes.
    pub shared_bytes_per_block: u32,
    /// Device memory, bytes.
    pub memory_total: u64,
    /// Of this what is free, bytes.
    pub memory_free: u64,
    /// Most symmetric memory of a PE, bytes; 0 where it grows with what is asked for, out of `memory_free`.
    pub symmetric_total: u64,
}

#[cfg(test)]
impl DeviceLimits {
    /// Those of an A100 of 40 GiB.
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
    /// Whether it has `wgmma` and the tensor memory accelerator as Hopper has them (sm_90a; no later device has).
    pub fn hopper(&self) -> bool {
        self.capability.0 == 9
    }
}

/// What can go wrong with a device. Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// Not that much memory.
    #[error("out of {kind} memory: {asked} bytes asked for, {free} of {total} bytes free")]
    OutOfMemory {
        /// "device" or "symmetric device".
        kind: &'static str,
        /// What was asked for, bytes.
        asked: u64,
        /// What is free, bytes.
        free: u64,
        /// What there is, bytes.
        total: u64,
    },
    /// No device, driver or library that could be used: what is missing, and what to do.
    #[error("{0}")]
    Unavailable(String),
    /// An operation that failed.
    #[error("cannot {what}: {message}")]
    Failed {
        /// The operation.
        what: String,
        /// What the driver says.
        message: String,
    },
    /// A PE did not come to a barrier in time.
    #[error("PE {pe} waited {:.1} s at a barrier of the devices for {}", waited.as_secs_f64(),
        peer.map_or("another PE".to_string(), |peer| format!("PE {peer}")))]
    Barrier {
        /// The PE that waited.
        pe: usize,
        /// The PE that did not come, where that is known.
        peer: Option<usize>,
        /// How long.
        waited: Duration,
    },
    /// A kernel that waited in vain.
    #[error("PE {pe} waited {:.1} s for {}{what}", waited.as_secs_f64(),
        peer.map(|peer| format!("PE {peer}: ")).unwrap_or_default())]
    Wait {
        /// The PE that waited.
        pe: usize,
        /// The PE that it waited for, where it is one.
        peer: Option<usize>,
        /// What it waited for.
        what: &'static str,
        /// How long.
        waited: Duration,
    },
}

impl GpuError {
    /// The PE that was waited for in vain, where the error is that.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            GpuError::Barrier { peer, .. } | GpuError::Wait { peer, .. } => *peer,
            _ => None,
        }
    }

    /// A failed operation.
    pub fn failed(what: impl Into<String>, message: impl ToString) -> Self {
        GpuError::Failed { what: what.into(), message: message.to_string() }
    }
}

/// One PE's device. Addresses are of the device, never of the host, and mean nothing to another PE.
///
/// Operations take effect in the order of the calls.
///
/// # Safety
/// Safe code relies on what an implementation returns, so it promises:
/// - [`Gpu::alloc_raw`] and [`Gpu::alloc_symmetric_raw`] return memory of that many bytes, aligned as they say, that nothing else
///   uses until it is given back;
/// - copies, zeroing, freeing, launches and replays take effect in the order of the calls: memory that is given back is not used
///   again before all that was launched until then is done;
/// - [`Gpu::peer_raw`] returns 0, or where this device's loads and stores reach the peer's block of the same allocation;
/// - [`Gpu::my_pe`] and [`Gpu::n_pes`] never change, and `my_pe < n_pes`;
/// - [`Gpu::resident_blocks`] and [`Gpu::limits`] do not promise more than the device has;
/// - [`Gpu::tensor_map`] describes the matrix that it was given, and nothing else;
/// - what [`Gpu::record`] returns launches the same kernels with the same parameters as `work` did, and nothing else.
pub unsafe trait Gpu {
    /// The device's name, as its vendor has it.
    fn name(&self) -> String;

    /// Which of its host's devices it is: PEs of a host that share a device say the same.
    fn place(&self) -> String;

    /// What it has.
    ///
    /// # Errors
    /// When the driver does not say.
    fn limits(&self) -> Result<DeviceLimits, GpuError>;

    /// This PE's number, `0..n_pes`.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Allocates device memory, aligned to 256 bytes at least, of any content.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    fn alloc_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Gives back what [`Gpu::alloc_raw`] returned, after all that was launched.
    ///
    /// # Safety
    /// `address` is such, and is not used again.
    unsafe fn free_raw(&self, address: u64);

    /// Allocates symmetric memory (collective: all PEs ask for the same sizes in the same order), aligned to 64 bytes at
    /// least, of any content.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`]; a peer that does not come.
    fn alloc_symmetric_raw(&self, bytes: u64) -> Result<u64, GpuError>;

    /// Gives back what [`Gpu::alloc_symmetric_raw`] returned (collective).
    ///
    /// # Safety
    /// `address` is such, no PE uses it again, and no operation of any PE on it is under way.
    unsafe fn free_symmetric_raw(&self, address: u64);

    /// This PE's address of `pe`'s symmetric memory at this PE's `symmetric`; 0 where loads and stores do not reach it.
    fn peer_raw(&self, symmetric: u64, pe: usize) -> u64;

    /// Whether loads and stores of every PE reach every PE's symmetric memory: the same answer on every PE (collective).
    ///
    /// # Errors
    /// A peer that does not come.
    fn all_reachable(&self) -> Result<bool, GpuError>;

    /// Copies to the device. Returns when `from` may be reused.
    ///
    /// # Safety
    /// `to` is `from.len()` bytes of this device's memory.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    unsafe fn copy_in_raw(&self, to: u64, from: &[u8]) -> Result<(), GpuError>;

    /// Copies from the device. Returns when it is done.
    ///
    /// # Safety
    /// `from` is `to.len()` bytes of this device's memory.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    unsafe fn copy_out_raw(&self, to: &mut [u8], from: u64) -> Result<(), GpuError>;

    /// Sets bytes to 0.
    ///
    /// # Safety
    /// `to` is `bytes` bytes of this device's memory.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    unsafe fn zero_raw(&self, to: u64, bytes: u64) -> Result<(), GpuError>;

    /// The most blocks of such a launch of this kernel, of whatever grid, that run at the same time on this PE's part of the device: whole
    /// clusters.
    ///
    /// # Errors
    /// When there is no such kernel.
    fn resident_blocks(&self, kernel: &str, launch: Launch) -> Result<u32, GpuError>;

    /// Loads a kernel that will be launched with at most `shared_bytes` of dynamic shared memory, which a driver may otherwise do at
    /// its first launch: launches that are recorded must find it loaded.
    ///
    /// # Errors
    /// When there is no such kernel, or no such block.
    fn prepare(&self, kernel: &str, shared_bytes: u32) -> Result<(), GpuError>;

    /// Launches a kernel, cooperatively where `launch` says so; returns without waiting for it. `args` are the bytes of the
    /// kernel's parameters, in order.
    ///
    /// # Safety
    /// The parameters are what the kernel takes, and all addresses in them are valid for what it does.
    ///
    /// # Errors
    /// When there is no such kernel, or it cannot be launched so.
    unsafe fn launch(&self, kernel: &str, launch: Launch, args: &[&[u8]]) -> Result<(), GpuError>;

    /// Records what `work` launches, and nothing else, without running it: on CUDA devices a graph, which one call launches. The
    /// kernels are [prepared](Gpu::prepare).
    ///
    /// # Errors
    /// `work`'s; the driver's, when it did something that cannot be captured.
    fn record(&self, work: &mut dyn FnMut() -> Result<(), GpuError>) -> Result<Box<dyn Recording + '_>, GpuError>;

    /// Waits until all that was launched is done.
    ///
    /// # Errors
    /// The driver's, of any of it.
    fn synchronise(&self) -> Result<(), GpuError>;

    /// Waits for all that was launched on this PE, then for all PEs to come here; bounded by `limit` where the transport can
    /// bound it.
    ///
    /// # Errors
    /// [`GpuError::Barrier`]; the driver's.
    fn barrier(&self, limit: Duration) -> Result<(), GpuError>;

    /// Notes the time, on the device, at which all launched before is done, under this number (any below 64; a
    /// number can be used again).
    ///
    /// # Errors
    /// The driver's.
    fn mark(&self, number: usize) -> Result<(), GpuError>;

    /// From one mark to another, after [`Gpu::synchronise`].
    ///
    /// # Errors
    /// When one was not made.
    fn elapsed(&self, from: usize, to: usize) -> Result<Duration, GpuError>;

    /// A description for the tensor memory accelerator of the row-major matrix at `base`: `rows` by `cols` elements of
    /// `element_bytes`, rows `row_stride_bytes` apart, copied in boxes of `box_rows` by `box_cols` with a 128-byte swizzle,
    /// zeros beyond the edges.
    ///
    /// # Errors
    /// When the device has none, or the driver refuses the numbers.
    fn tensor_map(&self, matrix: TensorMap) -> Result<[u8; 128], GpuError>;
}

/// Launches that were recorded; see [`Gpu::record`].
pub trait Recording {
    /// Launches all of it again, with the same parameters; returns without waiting.
    ///
    /// # Safety
    /// All addresses in the recorded parameters are valid still, for what the kernels do.
    ///
    /// # Errors
    /// The driver's.
    unsafe fn replay(&self) -> Result<(), GpuError>;
}

/// A matrix and how it is copied; see [`Gpu::tensor_map`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TensorMap {
    pub base: u64,
    pub rows: u32,
    pub cols: u32,
    pub row_stride_bytes: u64,
    pub box_rows: u32,
    pub box_cols: u32,
    pub element_bytes: u32,
}

/// Memory of a device, freed when dropped.
pub struct Buffer<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    bytes: u64,
}

impl<'g> Buffer<'g> {
    /// Allocates, of any content.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`].
    pub fn new(gpu: &'g dyn Gpu, bytes: u64) -> Result<Self, GpuError> {
        // An address is wanted even of nothing.
        Ok(Buffer { gpu, address: gpu.alloc_raw(bytes.max(1))?, bytes })
    }

    /// Allocates and fills.
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`]; the driver's.
    pub fn from_slice<T: Pod>(gpu: &'g dyn Gpu, values: &[T]) -> Result<Self, GpuError> {
        let buffer = Self::new(gpu, size_of_val(values) as u64)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Where it is, on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it is memory of this device.
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
    /// The driver's, which may be of something launched before.
    ///
    /// # Panics
    /// If they do not fit there.
    pub fn write<T: Pod>(&self, offset: u64, values: &[T]) -> Result<(), GpuError> {
        let to = self.at(offset, size_of_val(values));
        // SAFETY: inside the buffer, by the check.
        unsafe { self.gpu.copy_in_raw(to, bytemuck::cast_slice(values)) }
    }

    /// Copies from byte `offset`.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    ///
    /// # Panics
    /// If it is not all inside.
    pub fn read<T: Pod>(&self, offset: u64, values: &mut [T]) -> Result<(), GpuError> {
        let from = self.at(offset, size_of_val(values));
        // SAFETY: inside the buffer, by the check.
        unsafe { self.gpu.copy_out_raw(bytemuck::cast_slice_mut(values), from) }
    }

    /// The `len` values at byte `offset`.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn read_vec<T: Pod>(&self, offset: u64, len: usize) -> Result<Vec<T>, GpuError> {
        let mut values = vec![T::zeroed(); len];
        self.read(offset, &mut values)?;
        Ok(values)
    }

    /// Sets `bytes` bytes from byte `offset` to 0.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn zero(&self, offset: u64, bytes: u64) -> Result<(), GpuError> {
        let to = self.at(offset, bytes as usize);
        // SAFETY: inside the buffer, by the check.
        unsafe { self.gpu.zero_raw(to, bytes) }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, and this is the last use of it.
        unsafe { self.gpu.free_raw(self.address) }
    }
}

/// Symmetric memory of a device. Dropped without [`SymmetricBuffer::free`] it stays allocated until the PEs end: to free it
/// is collective, and after an error the others may not come.
pub struct SymmetricBuffer<'g> {
    gpu: &'g dyn Gpu,
    address: u64,
    bytes: u64,
    /// Freed by the thread that made it, as all that is collective.
    one_thread: PhantomData<*const ()>,
}

impl<'g> SymmetricBuffer<'g> {
    /// Allocates, of any content (collective).
    ///
    /// # Errors
    /// [`GpuError::OutOfMemory`]; a peer that does not come.
    pub fn new(gpu: &'g dyn Gpu, bytes: u64) -> Result<Self, GpuError> {
        let address = gpu.alloc_symmetric_raw(bytes.max(1))?;
        Ok(SymmetricBuffer { gpu, address, bytes, one_thread: PhantomData })
    }

    /// Where it is on this PE's device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// This PE's address of `pe`'s; 0 where loads and stores do not reach it.
    pub fn peer(&self, pe: usize) -> u64 {
        self.gpu.peer_raw(self.address, pe)
    }

    /// Sets `bytes` bytes from byte `offset` of this PE's to 0; a barrier must follow before a peer writes there.
    ///
    /// # Errors
    /// The driver's, which may be of something launched before.
    ///
    /// # Panics
    /// If they are not all inside.
    pub fn zero(&self, offset: u64, bytes: u64) -> Result<(), GpuError> {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: inside the allocation, by the check.
        unsafe { self.gpu.zero_raw(self.address + offset, bytes) }
    }

    /// Gives it back (collective), after a barrier.
    ///
    /// # Errors
    /// A peer that does not come within `limit`: then it stays allocated.
    pub fn free(self, limit: Duration) -> Result<(), GpuError> {
        self.gpu.barrier(limit)?;
        // SAFETY: allocated in `new`; all PEs are done with all they launched, and each frees it now.
        unsafe { self.gpu.free_symmetric_raw(self.address) };
        Ok(())
    }
}
