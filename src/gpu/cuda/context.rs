//! A PE's CUDA context, its stream, and the caller's stream.

use std::cell::Cell;
use std::ptr;

use cudarc::driver::sys::{CUcontext, CUdevice, CUstream, CUstream_flags};

use super::device::DeviceInfo;
use super::driver::{Driver, call};
use crate::gpu::GpuError;

/// A retained primary context, current in the thread that created it.
pub(super) struct Context {
    driver: &'static Driver,
    device: CUdevice,
    handle: CUcontext,
    own: CUstream,
    /// The stream in use, which is `own` or a stream of the caller.
    stream: Cell<CUstream>,
    /// True once work on the stream has timed out. Destructors then neither wait for the stream nor free memory, so that the PE reports the
    /// error instead of hanging.
    pub(super) stuck: Cell<bool>,
}

impl Context {
    /// Retains the device's primary context and makes it current in this thread. NVSHMEM uses the same context.
    pub(super) fn new(driver: &'static Driver, device: CUdevice, info: &DeviceInfo) -> Result<Self, GpuError> {
        let what = || format!("take GPU {} ({})", info.number, info.name);
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the function only writes the context.
        driver.check(unsafe { call!(driver, cuDevicePrimaryCtxRetain(&raw mut context, device)) }, what)?;
        // SAFETY: the context is retained. It is released here on an error, and otherwise when `Context` is dropped.
        unsafe {
            let made = driver.check(call!(driver, cuCtxSetCurrent(context)), what).and_then(|()| {
                driver.check(
                    call!(driver, cuStreamCreate(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING as u32)),
                    what,
                )
            });
            if let Err(error) = made {
                call!(driver, cuDevicePrimaryCtxRelease_v2(device));
                return Err(error);
            }
        }
        Ok(Context { driver, device, handle: context, own: stream, stream: Cell::new(stream), stuck: Cell::new(false) })
    }

    /// The stream on which all operations are enqueued.
    pub(super) fn stream(&self) -> CUstream {
        self.stream.get()
    }

    /// Makes the context current in this thread, and selects the stream of later operations: `stream`, or the context's own stream if it is
    /// `None`.
    pub(super) fn use_stream(&self, stream: Option<u64>) -> Result<(), GpuError> {
        // SAFETY: the context is retained while `self` lives.
        let code = unsafe { call!(self.driver, cuCtxSetCurrent(self.handle)) };
        self.driver.check(code, || "use the GPU in this thread".into())?;
        // `stream` may be 0, which is CUDA's default stream.
        self.stream.set(stream.map_or(self.own, |stream| stream as usize as CUstream));
        Ok(())
    }

    /// Free and total device memory, bytes.
    pub(super) fn memory(&self) -> Result<(u64, u64), GpuError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the function only writes both numbers.
        let code = unsafe { call!(self.driver, cuMemGetInfo_v2(&raw mut free, &raw mut total)) };
        self.driver.check(code, || "ask for the free memory".into())?;
        Ok((free as u64, total as u64))
    }

    /// Returns a function that makes the context current in another thread. `self` must live until that thread no longer uses the context.
    pub(super) fn enter(&self) -> impl FnOnce() -> Result<(), GpuError> + Send + 'static {
        let (driver, handle) = (self.driver, self.handle as usize);
        move || {
            // SAFETY: the context stays retained while the process uses the device.
            let code = unsafe { call!(driver, cuCtxSetCurrent(handle as CUcontext)) };
            driver.check(code, || "use the GPU from a second thread".into())
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.stuck.get() {
            return;
        }
        // SAFETY: `new` created the stream and retained the context, and neither is used afterwards.
        unsafe {
            call!(self.driver, cuStreamSynchronize(self.own));
            call!(self.driver, cuStreamDestroy_v2(self.own));
            call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}
