//! Allocation, addresses and the start-up test of symmetric memory.

use std::time::Duration;

use super::CudaGpu;
use super::driver::call;
use super::nccl::windows::Meeting;
use super::symmetric::{Symmetric, between};
use crate::gpu::{Gpu, GpuError, SymmetricBuffer, smoke};

/// Bytes that a PE writes to each other's memory to see whether they come.
const TRIED_BYTES: usize = 64 << 10;

impl CudaGpu {
    fn meeting(&self) -> Meeting<'_> {
        Meeting { context: &self.context, bootstrap: &*self.bootstrap, limit: self.wait_limit }
    }

    /// [`Gpu::alloc_symmetric_raw`].
    pub(super) fn alloc_symmetric(&self, bytes: u64) -> Result<u64, GpuError> {
        if let Symmetric::Alone = self.symmetric {
            return self.alloc_raw(bytes);
        }
        // Who gives it waits for all PEs without a limit, and frees of this PE may have gone before.
        self.synchronise_within(self.wait_limit)?;
        self.bootstrap.barrier(self.wait_limit)?;
        match &self.symmetric {
            Symmetric::Nccl(windows) => windows.alloc(self.meeting(), bytes),
            Symmetric::Nvshmem(nvshmem) => match nvshmem.malloc(bytes as usize) {
                0 => Err(self.out_of_memory("symmetric device", bytes)),
                address => Ok(address),
            },
            Symmetric::Alone => self.alloc_raw(bytes),
        }
    }

    /// [`Gpu::free_symmetric_raw`].
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn free_symmetric(&self, address: u64) {
        match &self.symmetric {
            // SAFETY: by this function's contract.
            Symmetric::Nvshmem(nvshmem) => unsafe { nvshmem.free(address) },
            Symmetric::Nccl(_) if self.context.stuck.get() => {}
            // SAFETY: by this function's contract. What this PE launched that is no operation of it ends first all the same, since the memory may
            // be given out again.
            Symmetric::Nccl(windows) => unsafe {
                call!(self.driver, cuStreamSynchronize(self.context.stream));
                windows.free(address);
            },
            // SAFETY: as above; allocated by `alloc_raw`.
            Symmetric::Alone => unsafe { self.free_raw(address) },
        }
    }

    /// [`Gpu::peer_raw`].
    pub(super) fn peer(&self, symmetric: u64, pe: usize) -> u64 {
        match &self.symmetric {
            _ if pe == self.my_pe() => symmetric,
            _ if self.network_alone => 0,
            Symmetric::Nvshmem(nvshmem) => nvshmem.ptr(symmetric, pe),
            Symmetric::Nccl(windows) => windows.peer(symmetric, pe),
            Symmetric::Alone => 0,
        }
    }

    /// [`Gpu::all_reachable`].
    pub(super) fn reach_all(&self) -> Result<bool, GpuError> {
        // With NCCL those that do not reach each other were refused at the start.
        let Symmetric::Nvshmem(_) = self.symmetric else { return Ok(true) };
        // Whether a heap is mapped is the same for every place in it.
        let place = self.alloc_symmetric(64)?;
        let mine = (0..self.n_pes()).all(|pe| self.peer(place, pe) != 0);
        let all = self.bootstrap.all_gather(&[mine.into()], self.wait_limit)?;
        // SAFETY: allocated just now, and used by nobody; all PEs have looked.
        unsafe { self.free_symmetric(place) };
        Ok(all.iter().all(|reaches| *reaches == 1))
    }

    /// Sees whether bytes from every PE reach every other (collective): by NVSHMEM from a kernel ([`smoke::try_put`]), by NCCL's windows as
    /// copies to the peers' addresses.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`] when they do not come, or come wrong; the driver's.
    pub fn try_put(&self) -> Result<(), GpuError> {
        let limit = self.wait_limit;
        if let Symmetric::Nccl(_) = self.symmetric {
            return self.try_copies(limit);
        }
        smoke::try_put(self, limit, || self.synchronise_within(limit.saturating_add(Duration::from_secs(1))))
            .map_err(|error| between(self.bootstrap.over_network(), error))
    }

    fn try_copies(&self, limit: Duration) -> Result<(), GpuError> {
        let (me, n) = (self.my_pe(), self.n_pes());
        // No two bytes that follow each other are alike, nor those of two pairs at a place.
        let sent = |from: usize, to: usize| -> Vec<u8> {
            (0..TRIED_BYTES).map(|i| (i + i / 251 + 7 * from + 13 * to) as u8).collect()
        };
        let memory = SymmetricBuffer::new(self, (n * TRIED_BYTES) as u64)?;
        memory.zero(0, memory.bytes())?;
        self.barrier(limit)?;
        for to in (0..n).filter(|&to| to != me) {
            let place = memory.peer(to) + (me * TRIED_BYTES) as u64;
            // SAFETY: this PE's place in the peer's memory, of as many bytes, which is mapped here: no address of it is 0.
            unsafe { self.copy_in_raw(place, &sent(me, to)) }?;
        }
        self.barrier(limit)?;
        for from in (0..n).filter(|&from| from != me) {
            let mut came = vec![0; TRIED_BYTES];
            let place = memory.address() + (from * TRIED_BYTES) as u64;
            // SAFETY: that PE's place in the own memory, of as many bytes.
            unsafe { self.copy_out_raw(&mut came, place) }?;
            let wanted = sent(from, me);
            if let Some(at) = (0..TRIED_BYTES).find(|&i| came[i] != wanted[i]) {
                return Err(GpuError::Unavailable(format!(
                    "PE {from} wrote {TRIED_BYTES} bytes to PE {me}'s memory by NCCL's addresses, and byte {at} is {}, not {}: use `symmetric` \
                     nvshmem",
                    came[at], wanted[at]
                )));
            }
        }
        memory.free(limit)
    }
}
