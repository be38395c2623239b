//! Two-sided sends and receives between the PEs' devices, enqueued on the stream. The benchmarks of one-sided communication compare with
//! them.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use cudarc::nccl::sys::{cudaStream_t, ncclDataType_t};

use super::super::CudaGpu;
use super::{Communicator, Deadline, Library, SUCCESS, find_library, start};
use crate::gpu::{GpuError, SymmetricBuffer};

/// A communicator of all PEs, whose operations run on this PE's stream. When it is dropped, the communicator is aborted without waiting for
/// the other PEs.
pub struct Nccl<'g> {
    gpu: &'g CudaGpu,
    library: &'static Library,
    communicator: Communicator,
}

impl CudaGpu {
    /// Starts NCCL among the PEs and makes every PE send a byte to the next one (collective). This overwrites the first 512 bytes of
    /// `buffer`.
    ///
    /// # Errors
    /// Returns [`GpuError::Unavailable`], on all PEs, if a PE has no NCCL or NCCL refuses, for example because PEs share a device. After
    /// any other error, such as a time-out after `limit`, the process must exit.
    ///
    /// # Panics
    /// If `buffer` is shorter than 512 bytes.
    pub fn nccl(&self, buffer: &SymmetricBuffer<'_>, limit: Duration) -> Result<Nccl<'_>, GpuError> {
        assert!(buffer.bytes() >= 512, "a buffer of {} bytes, expected at least 512", buffer.bytes());
        let deadline = Deadline::after(limit);
        let (me, n) = (self.bootstrap.my_pe(), self.bootstrap.n_pes());
        let (stream, address) = (self.context.stream() as usize, buffer.address());
        let first = move |library: &'static Library, Communicator(communicator)| {
            let (next, before) = (((me + 1) % n) as c_int, ((me + n - 1) % n) as c_int);
            let (stream, byte) = (stream as cudaStream_t, ncclDataType_t::ncclUint8);
            // SAFETY: `address` and `address + 256` lie in device memory of at least 512 bytes, and both PEs of each pair call this
            // function.
            let code = unsafe {
                let f = &library.functions;
                let codes = [
                    (f.ncclGroupStart)(),
                    (f.ncclSend)(address as *const c_void, 1, byte, next, communicator, stream),
                    (f.ncclRecv)((address + 256) as *mut c_void, 1, byte, before, communicator, stream),
                    (f.ncclGroupEnd)(),
                ];
                codes.into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
            };
            library.check(code, "send the first byte by NCCL")
        };
        let (library, communicator) = start(find_library(), (&self.context, &*self.bootstrap), deadline, first)?;
        let started = Nccl { gpu: self, library, communicator };
        self.synchronise_within(deadline.left())?;
        Ok(started)
    }
}

impl Nccl<'_> {
    fn stream(&self) -> cudaStream_t {
        self.gpu.context.stream().cast()
    }

    /// Enqueues a send of `bytes` bytes to `pe`, which must receive the same number of bytes. Returns without waiting.
    ///
    /// # Safety
    /// `from` points to `bytes` bytes of this device's memory, which stay allocated until the send completes.
    ///
    /// # Errors
    /// Returns NCCL's error.
    pub unsafe fn send(&self, from: u64, bytes: u64, pe: usize) -> Result<(), GpuError> {
        let (from, byte) = (from as *const c_void, ncclDataType_t::ncclUint8);
        // SAFETY: the caller guarantees the buffer; communicator and stream belong to this PE.
        let code = unsafe {
            let send = self.library.functions.ncclSend;
            send(from, bytes as usize, byte, pe as c_int, self.communicator.0, self.stream())
        };
        self.library.check(code, "send by NCCL")
    }

    /// Enqueues a receive of `bytes` bytes from `pe`, which must send the same number of bytes. Returns without waiting.
    ///
    /// # Safety
    /// `to` points to `bytes` bytes of this device's memory, which stay allocated until the receive completes.
    ///
    /// # Errors
    /// Returns NCCL's error.
    pub unsafe fn receive(&self, to: u64, bytes: u64, pe: usize) -> Result<(), GpuError> {
        let (to, byte) = (to as *mut c_void, ncclDataType_t::ncclUint8);
        // SAFETY: the caller guarantees the buffer; communicator and stream belong to this PE.
        let code = unsafe {
            let receive = self.library.functions.ncclRecv;
            receive(to, bytes as usize, byte, pe as c_int, self.communicator.0, self.stream())
        };
        self.library.check(code, "receive by NCCL")
    }

    /// Groups the sends and receives of `work` into one operation of the stream.
    ///
    /// # Errors
    /// Returns the error of `work`, or NCCL's error.
    pub fn group(&self, work: impl FnOnce() -> Result<(), GpuError>) -> Result<(), GpuError> {
        // SAFETY: the call starts a group of this thread, and the call below ends it.
        self.library.check(unsafe { (self.library.functions.ncclGroupStart)() }, "begin a group of NCCL's")?;
        let done = work();
        // SAFETY: the call ends the group that was started above.
        let ended = self.library.check(unsafe { (self.library.functions.ncclGroupEnd)() }, "end a group of NCCL's");
        done.and(ended)
    }
}

impl Drop for Nccl<'_> {
    fn drop(&mut self) {
        if self.gpu.context.stuck.get() {
            return;
        }
        // SAFETY: `CudaGpu::nccl` created the communicator, and it is not used afterwards. ncclCommDestroy is not called because it may
        // wait for other PEs.
        unsafe { (self.library.functions.ncclCommAbort)(self.communicator.0) };
    }
}
