//! NVSHMEM operations that the host enqueues on the stream.

use super::CudaGpu;
use super::symmetric::Symmetric;
use crate::gpu::GpuError;
use crate::gpu::nvshmem::{Nvshmem, Transfer};

impl CudaGpu {
    fn nvshmem(&self) -> Result<&Nvshmem, GpuError> {
        match &self.symmetric {
            Symmetric::Nvshmem(nvshmem) => Ok(nvshmem),
            _ => Err(GpuError::failed("move bytes on the stream", "one PE, or PEs with NCCL, have no NVSHMEM")),
        }
    }

    /// Whether the stream can wait for a signal. It cannot if PEs share the device without MPS, or with unequal MPS shares.
    pub fn can_wait_on_stream(&self) -> bool {
        self.nvshmem().is_ok_and(|nvshmem| !nvshmem.limited())
    }

    /// Enqueues a put, which is complete after [`CudaGpu::quiet_on_stream`]. Like the other functions of this module, it returns without
    /// waiting.
    ///
    /// # Safety
    /// The local address points to memory of this device, and the remote address to symmetric memory. Both stay allocated until the put
    /// completes.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] without NVSHMEM, as with a single PE.
    pub unsafe fn put_on_stream(&self, transfer: Transfer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the transfer, and the stream belongs to this PE's context.
        unsafe { self.nvshmem()?.put_on_stream(transfer, self.context.stream().cast()) };
        Ok(())
    }

    /// Enqueues a get; later operations of the stream see the bytes.
    ///
    /// # Safety
    /// The conditions are those of [`CudaGpu::put_on_stream`].
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] without NVSHMEM, as with a single PE.
    pub unsafe fn get_on_stream(&self, transfer: Transfer) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the transfer, and the stream belongs to this PE's context.
        unsafe { self.nvshmem()?.get_on_stream(transfer, self.context.stream().cast()) };
        Ok(())
    }

    /// Enqueues a put followed by setting the peer's symmetric word `signal`.
    ///
    /// # Safety
    /// The conditions are those of [`CudaGpu::put_on_stream`], and `signal` is an aligned word of symmetric memory.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] without NVSHMEM, as with a single PE.
    pub unsafe fn put_signal_on_stream(&self, transfer: Transfer, signal: u64, value: u64) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the transfer and the signal, and the stream belongs to this PE's context.
        unsafe { self.nvshmem()?.put_signal_on_stream(transfer, signal, value, self.context.stream().cast()) };
        Ok(())
    }

    /// Makes later operations of the stream wait until this PE's word at `signal` is at least `value`. NVSHMEM has no time limit for this
    /// wait. To limit it, wait with [`CudaGpu::synchronise_within`].
    ///
    /// # Safety
    /// `signal` is an aligned word of symmetric memory that stays allocated until the wait ends.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the stream cannot wait ([`CudaGpu::can_wait_on_stream`]).
    pub unsafe fn wait_signal_on_stream(&self, signal: u64, value: u64) -> Result<(), GpuError> {
        if !self.can_wait_on_stream() {
            return Err(GpuError::failed(
                "wait for a signal on the stream",
                "NVSHMEM cannot, without MPS on a shared GPU",
            ));
        }
        // SAFETY: the caller guarantees the signal, and the stream belongs to this PE's context.
        unsafe { self.nvshmem()?.wait_signal_on_stream(signal, value, self.context.stream().cast()) };
        Ok(())
    }

    /// Makes later operations of the stream wait until all puts of this PE are complete.
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] without NVSHMEM, as with a single PE.
    pub fn quiet_on_stream(&self) -> Result<(), GpuError> {
        // SAFETY: the stream belongs to this PE's context.
        unsafe { self.nvshmem()?.quiet_on_stream(self.context.stream().cast()) };
        Ok(())
    }
}
