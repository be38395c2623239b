//! Symmetric memory: allocation, addresses, and the test that runs when a job starts.

use std::time::Duration;

use super::CudaGpu;
use super::driver::call;
use super::nccl::windows::CollectiveContext;
use super::symmetric::{Symmetric, with_network_hint};
use crate::gpu::{Gpu, GpuError, SymmetricBuffer, smoke};

/// Size of each copy that [`CudaGpu::try_put`] checks, bytes.
const TEST_BYTES: usize = 64 << 10;

impl CudaGpu {
    fn collective_context(&self) -> CollectiveContext<'_> {
        CollectiveContext { context: &self.context, bootstrap: &*self.bootstrap, limit: self.wait_limit }
    }

    /// Implements [`Gpu::alloc_symmetric_raw`].
    pub(super) fn alloc_symmetric(&self, bytes: u64) -> Result<u64, GpuError> {
        if let Symmetric::Alone = self.symmetric {
            return self.alloc_raw(bytes);
        }
        // NVSHMEM and NCCL wait for all PEs without a limit. Therefore the PEs first synchronise with a limit.
        self.synchronise_within(self.wait_limit)?;
        self.bootstrap.barrier(self.wait_limit)?;
        match &self.symmetric {
            Symmetric::Nccl(windows) => windows.alloc(self.collective_context(), bytes),
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
    /// The conditions are those of [`Gpu::free_symmetric_raw`].
    pub(super) unsafe fn free_symmetric(&self, address: u64) {
        match &self.symmetric {
            // SAFETY: guaranteed by the caller.
            Symmetric::Nvshmem(nvshmem) => unsafe { nvshmem.free(address) },
            Symmetric::Nccl(_) if self.context.stuck.get() => {}
            // SAFETY: guaranteed by the caller. This PE's launches may still use the memory, so they complete first.
            Symmetric::Nccl(windows) => unsafe {
                call!(self.driver, cuStreamSynchronize(self.context.stream()));
                windows.free(address);
            },
            // SAFETY: the caller guarantees the address, and `alloc_raw` allocated the memory.
            Symmetric::Alone => unsafe { self.free_raw(address) },
        }
    }

    /// Implements [`Gpu::peer_raw`].
    pub(super) fn peer(&self, symmetric: u64, pe: usize) -> u64 {
        match &self.symmetric {
            _ if pe == self.my_pe() => symmetric,
            _ if self.network_only => 0,
            Symmetric::Nvshmem(nvshmem) => nvshmem.ptr(symmetric, pe),
            Symmetric::Nccl(windows) => windows.peer(symmetric, pe),
            Symmetric::Alone => 0,
        }
    }

    /// Implements [`Gpu::all_reachable`].
    pub(super) fn query_all_reachable(&self) -> Result<bool, GpuError> {
        // With NCCL, starting would have failed if a peer were unreachable.
        let Symmetric::Nvshmem(_) = self.symmetric else { return Ok(true) };
        // A PE's heap is mapped either completely or not at all, so asking for one address is enough.
        let address = self.alloc_symmetric(64)?;
        let mine = (0..self.n_pes()).all(|pe| self.peer(address, pe) != 0);
        let all = self.bootstrap.all_gather(&[mine.into()], self.wait_limit)?;
        // SAFETY: the memory was allocated above and no kernel uses it. All PEs have asked for its address, because the all-gather has
        // completed.
        unsafe { self.free_symmetric(address) };
        Ok(all.iter().all(|reaches| *reaches == 1))
    }

    /// Checks that bytes of every PE arrive at every other PE (collective). With NVSHMEM a kernel sends them ([`smoke::try_put`]), and with
    /// NCCL they are copied to the peers' addresses.
    ///
    /// # Errors
    /// Returns [`GpuError::Unavailable`] if bytes are missing or wrong, and the driver's error if the driver fails.
    pub fn try_put(&self) -> Result<(), GpuError> {
        let limit = self.wait_limit;
        if let Symmetric::Nccl(_) = self.symmetric {
            return self.check_copies(limit);
        }
        smoke::try_put(self, limit, || self.synchronise_within(limit.saturating_add(Duration::from_secs(1))))
            .map_err(|error| with_network_hint(self.bootstrap.over_network(), error))
    }

    fn check_copies(&self, limit: Duration) -> Result<(), GpuError> {
        let (me, n) = (self.my_pe(), self.n_pes());
        // The bytes are chosen so that neighbouring bytes differ and different pairs of PEs have different bytes.
        let sent = |from: usize, to: usize| -> Vec<u8> {
            (0..TEST_BYTES).map(|i| (i + i / 251 + 7 * from + 13 * to) as u8).collect()
        };
        let memory = SymmetricBuffer::new(self, (n * TEST_BYTES) as u64)?;
        memory.zero(0, memory.bytes())?;
        self.barrier(limit)?;
        for to in (0..n).filter(|&to| to != me) {
            let address = memory.peer(to) + (me * TEST_BYTES) as u64;
            // SAFETY: the address is that of this PE's block in the peer's memory. It is mapped, because NCCL has mapped all windows.
            unsafe { self.copy_in_raw(address, &sent(me, to)) }?;
        }
        self.barrier(limit)?;
        for from in (0..n).filter(|&from| from != me) {
            let mut received = vec![0; TEST_BYTES];
            let address = memory.address() + (from * TEST_BYTES) as u64;
            // SAFETY: the address is that of the sender's block in this PE's memory.
            unsafe { self.copy_out_raw(&mut received, address) }?;
            let wanted = sent(from, me);
            if let Some(at) = (0..TEST_BYTES).find(|&i| received[i] != wanted[i]) {
                return Err(GpuError::Unavailable(format!(
                    "PE {from} wrote {TEST_BYTES} bytes to PE {me}'s memory by NCCL's addresses, and byte {at} is {}, not {}: use `symmetric` \
                     nvshmem",
                    received[at], wanted[at]
                )));
            }
        }
        memory.free(limit)
    }
}
