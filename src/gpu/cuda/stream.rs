//! NVSHMEM's operations that the host asks for and the stream does, in the order of the calls.

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

    /// Whether the stream can wait for a signal: not where PEs share the device and NVSHMEM offers only a part.
    pub fn can_wait_on_stream(&self) -> bool {
        self.nvshmem().is_ok_and(|nvshmem| !nvshmem.limited())
    }

    /// Puts, complete at the other PE after [`CudaGpu::quiet_on_stream`]. Returns without waiting, as the others do.
    ///
    /// # Safety
    /// The transfer's own place is memory of this device, and the other symmetric; both stay until it is done.
    ///
    /// # Errors
    /// Where there is no NVSHMEM, as with one PE alone.
    pub unsafe fn put_on_stream(&self, transfer: Transfer) -> Result<(), GpuError> {
        // SAFETY: by this function's contract; this PE's stream.
        unsafe { self.nvshmem()?.put_on_stream(transfer, self.context.stream.cast()) };
        Ok(())
    }

    /// Gets; what follows sees the bytes.
    ///
    /// # Safety
    /// As of [`CudaGpu::put_on_stream`].
    ///
    /// # Errors
    /// Where there is no NVSHMEM, as with one PE alone.
    pub unsafe fn get_on_stream(&self, transfer: Transfer) -> Result<(), GpuError> {
        // SAFETY: by this function's contract; this PE's stream.
        unsafe { self.nvshmem()?.get_on_stream(transfer, self.context.stream.cast()) };
        Ok(())
    }

    /// Puts, and sets the other PE's word at the symmetric `signal` when the bytes are there.
    ///
    /// # Safety
    /// As of [`CudaGpu::put_on_stream`]; `signal` is an aligned word of symmetric memory.
    ///
    /// # Errors
    /// Where there is no NVSHMEM, as with one PE alone.
    pub unsafe fn put_signal_on_stream(&self, transfer: Transfer, signal: u64, value: u64) -> Result<(), GpuError> {
        // SAFETY: by this function's contract; this PE's stream.
        unsafe { self.nvshmem()?.put_signal_on_stream(transfer, signal, value, self.context.stream.cast()) };
        Ok(())
    }

    /// Lets what follows wait until the own word at `signal` is `value` or more. NVSHMEM has no limit for that:
    /// [`CudaGpu::synchronise_within`] has.
    ///
    /// # Safety
    /// An aligned word of symmetric memory, which stays until then.
    ///
    /// # Errors
    /// Where the stream cannot ([`CudaGpu::can_wait_on_stream`]).
    pub unsafe fn wait_signal_on_stream(&self, signal: u64, value: u64) -> Result<(), GpuError> {
        if !self.can_wait_on_stream() {
            return Err(GpuError::failed(
                "wait for a signal on the stream",
                "NVSHMEM cannot, without MPS on a shared GPU",
            ));
        }
        // SAFETY: by this function's contract; this PE's stream.
        unsafe { self.nvshmem()?.wait_signal_on_stream(signal, value, self.context.stream.cast()) };
        Ok(())
    }

    /// Lets what follows wait until all that this PE has put is complete.
    ///
    /// # Errors
    /// Where there is no NVSHMEM, as with one PE alone.
    pub fn quiet_on_stream(&self) -> Result<(), GpuError> {
        // SAFETY: this PE's stream.
        unsafe { self.nvshmem()?.quiet_on_stream(self.context.stream.cast()) };
        Ok(())
    }
}
