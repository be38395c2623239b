//! Launches that are recorded once and repeated with one call.

use std::ptr;

use cudarc::driver::sys::{CUgraphExec, CUstreamCaptureMode};

use super::CudaGpu;
use super::driver::call;
use crate::gpu::{GpuError, Recording};

/// Recorded launches; see [`CudaGpu::capture`].
pub struct Graph<'g> {
    gpu: &'g CudaGpu,
    executable: CUgraphExec,
}

impl CudaGpu {
    /// Records what `work` launches and sets to 0, without running it. `work` must not wait, copy, allocate or free.
    ///
    /// # Errors
    /// `work`'s; the driver's, when `work` did something that cannot be captured.
    pub fn capture<E: From<GpuError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph<'_>, E> {
        let driver = self.driver;
        let check = |code, what: &str| driver.check(code, || what.to_string());
        let stream = self.context.stream;
        // Per thread, so that other threads' calls, such as those of NVSHMEM's proxy, are not forbidden meanwhile.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as this, and is not being recorded.
        check(unsafe { call!(driver, cuStreamBeginCapture_v2(stream, mode)) }, "start recording")?;
        let done = work();
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: ends the recording begun above, however `work` went; sets the graph.
        let ended = check(unsafe { call!(driver, cuStreamEndCapture(stream, &raw mut graph)) }, "record the launches");
        let made = done.and_then(|()| {
            ended?;
            // SAFETY: a graph just recorded; sets the executable.
            let code = unsafe { call!(driver, cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)) };
            Ok(check(code, "make the recorded launches ready")?)
        });
        if !graph.is_null() {
            // SAFETY: not used any more.
            unsafe { call!(driver, cuGraphDestroy(graph)) };
        }
        made.map(|()| Graph { gpu: self, executable })
    }
}

impl Recording for Graph<'_> {
    unsafe fn replay(&self) -> Result<(), GpuError> {
        let driver = self.gpu.driver;
        // SAFETY: by this function's contract.
        let code = unsafe { call!(driver, cuGraphLaunch(self.executable, self.gpu.context.stream)) };
        driver.check(code, || "launch the recorded kernels".into())
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if self.gpu.context.stuck.get() {
            return;
        }
        // SAFETY: made by `capture`; the launches of it that run finish first.
        unsafe {
            call!(self.gpu.driver, cuStreamSynchronize(self.gpu.context.stream));
            call!(self.gpu.driver, cuGraphExecDestroy(self.executable));
        }
    }
}
