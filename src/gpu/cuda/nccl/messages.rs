//! Matched sends and receives between the PEs' devices, on the stream: what one-sided operations are compared with.

use std::ffi::{c_int, c_void};
use std::time::Duration;

use cudarc::nccl::sys::{cudaStream_t, ncclDataType_t};

use super::super::CudaGpu;
use super::{Communicator, Deadline, Library, SUCCESS, find_library, start};
use crate::gpu::{GpuError, SymmetricBuffer};

/// A communicator of all PEs, on this PE's stream. Ended when dropped, whatever the others do.
pub struct Nccl<'g> {
    gpu: &'g CudaGpu,
    library: &'static Library,
    communicator: Communicator,
}

impl CudaGpu {
    /// Starts NCCL among the PEs, and has every PE send a byte to the next one (collective). `place` is used for that, its
    /// first 512 bytes.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`], on all PEs alike, where one has no NCCL, or NCCL refuses, as it does several PEs on one
    /// device. All else is for the end of the process: something that is not ready within `limit`.
    ///
    /// # Panics
    /// If the place is shorter.
    pub fn nccl(&self, place: &SymmetricBuffer<'_>, limit: Duration) -> Result<Nccl<'_>, GpuError> {
        assert!(place.bytes() >= 512, "a place of {} bytes", place.bytes());
        let deadline = Deadline::after(limit);
        let (me, n) = (self.bootstrap.my_pe(), self.bootstrap.n_pes());
        let (stream, address) = (self.context.stream as usize, place.address());
        let first = move |library: &'static Library, Communicator(communicator)| {
            let (next, before) = (((me + 1) % n) as c_int, ((me + n - 1) % n) as c_int);
            let (stream, byte) = (stream as cudaStream_t, ncclDataType_t::ncclUint8);
            // SAFETY: two places of a byte in memory of this device; both PEs of a pair take part.
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
        self.gpu.context.stream.cast()
    }

    /// Sends to a PE, which receives as many bytes, in the stream's order. Returns without waiting.
    ///
    /// # Safety
    /// `bytes` bytes of this device's memory at `from`, which stay until it is done.
    ///
    /// # Errors
    /// NCCL's.
    pub unsafe fn send(&self, from: u64, bytes: u64, pe: usize) -> Result<(), GpuError> {
        let (from, byte) = (from as *const c_void, ncclDataType_t::ncclUint8);
        // SAFETY: by this function's contract; this PE's stream.
        let code = unsafe {
            let send = self.library.functions.ncclSend;
            send(from, bytes as usize, byte, pe as c_int, self.communicator.0, self.stream())
        };
        self.library.check(code, "send by NCCL")
    }

    /// Receives from a PE, which sends as many bytes, in the stream's order. Returns without waiting.
    ///
    /// # Safety
    /// `bytes` bytes of this device's memory at `to`, which stay until it is done.
    ///
    /// # Errors
    /// NCCL's.
    pub unsafe fn receive(&self, to: u64, bytes: u64, pe: usize) -> Result<(), GpuError> {
        let (to, byte) = (to as *mut c_void, ncclDataType_t::ncclUint8);
        // SAFETY: by this function's contract; this PE's stream.
        let code = unsafe {
            let receive = self.library.functions.ncclRecv;
            receive(to, bytes as usize, byte, pe as c_int, self.communicator.0, self.stream())
        };
        self.library.check(code, "receive by NCCL")
    }

    /// What `work` sends and receives, as one operation of the stream's.
    ///
    /// # Errors
    /// `work`'s; NCCL's.
    pub fn group(&self, work: impl FnOnce() -> Result<(), GpuError>) -> Result<(), GpuError> {
        // SAFETY: begins a group in this thread, ended below.
        self.library.check(unsafe { (self.library.functions.ncclGroupStart)() }, "begin a group of NCCL's")?;
        let done = work();
        // SAFETY: begun above.
        let ended = self.library.check(unsafe { (self.library.functions.ncclGroupEnd)() }, "end a group of NCCL's");
        done.and(ended)
    }
}

impl Drop for Nccl<'_> {
    fn drop(&mut self) {
        if self.gpu.context.stuck.get() {
            return;
        }
        // SAFETY: started by `CudaGpu::nccl`, and not used any more. Not ncclCommDestroy, which may wait for the other PEs.
        unsafe { (self.library.functions.ncclCommAbort)(self.communicator.0) };
    }
}
