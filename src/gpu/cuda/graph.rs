//! Recording of launches as a CUDA graph.

use std::ptr;

use cudarc::driver::sys::{CUgraphExec, CUstreamCaptureMode};

use super::CudaGpu;
use super::driver::call;
use crate::gpu::{GpuError, Recording};

/// Launches recorded by [`CudaGpu::capture`].
pub struct Graph<'g> {
    gpu: &'g CudaGpu,
    executable: CUgraphExec,
}

impl CudaGpu {
    /// Records the launches and memsets of `work` without running them. `work` must not wait, copy, allocate or free.
    ///
    /// # Errors
    /// Returns the error of `work`, or the driver's error if `work` called something that cannot be captured.
    pub fn capture<E: From<GpuError>>(&self, work: impl FnOnce() -> Result<(), E>) -> Result<Graph<'_>, E> {
        let driver = self.driver;
        let check = |code, what: &str| driver.check(code, || what.to_string());
        let stream = self.context.stream();
        // In the thread-local mode other threads, such as NVSHMEM's proxy, may still call the driver.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the context owns the stream, which is not being captured.
        check(unsafe { call!(driver, cuStreamBeginCapture_v2(stream, mode)) }, "start recording")?;
        let done = work();
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the call ends the capture that was begun above, even if `work` failed, and writes the graph.
        let ended = check(unsafe { call!(driver, cuStreamEndCapture(stream, &raw mut graph)) }, "record the launches");
        let made = done.and_then(|()| {
            ended?;
            // SAFETY: the graph was just captured, and the function only writes the executable.
            let code = unsafe { call!(driver, cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)) };
            Ok(check(code, "make the recorded launches ready")?)
        });
        if !graph.is_null() {
            // SAFETY: the graph is not used afterwards.
            unsafe { call!(driver, cuGraphDestroy(graph)) };
        }
        made.map(|()| Graph { gpu: self, executable })
    }
}

impl Recording for Graph<'_> {
    unsafe fn replay(&self) -> Result<(), GpuError> {
        let driver = self.gpu.driver;
        // SAFETY: guaranteed by the caller.
        let code = unsafe { call!(driver, cuGraphLaunch(self.executable, self.gpu.context.stream())) };
        driver.check(code, || "launch the recorded kernels".into())
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if self.gpu.context.stuck.get() {
            return;
        }
        // SAFETY: `capture` created the executable, and its launches have completed when it is destroyed.
        unsafe {
            call!(self.gpu.driver, cuStreamSynchronize(self.gpu.context.stream()));
            call!(self.gpu.driver, cuGraphExecDestroy(self.executable));
        }
    }
}
