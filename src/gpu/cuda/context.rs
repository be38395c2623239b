//! The context of a PE's device, and its one stream.

use std::cell::Cell;
use std::ptr;

use cudarc::driver::sys::{CUcontext, CUdevice, CUstream, CUstream_flags};

use super::device::DeviceInfo;
use super::driver::{Driver, call};
use crate::gpu::GpuError;

/// A context that is current in the thread that made it, and retained.
pub(super) struct Context {
    driver: &'static Driver,
    device: CUdevice,
    handle: CUcontext,
    pub(super) stream: CUstream,
    /// Whether something on the stream did not end in time. Then nothing waits for the stream any more, and what would have
    /// to stays until the process ends: the PE is to say what was wrong, and not to wait for ever in a `drop`.
    pub(super) stuck: Cell<bool>,
}

impl Context {
    /// Makes the device's primary context current in this thread: the one that NVSHMEM works in.
    pub(super) fn new(driver: &'static Driver, device: CUdevice, info: &DeviceInfo) -> Result<Self, GpuError> {
        let what = || format!("take GPU {} ({})", info.number, info.name);
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: sets the context.
        driver.check(unsafe { call!(driver, cuDevicePrimaryCtxRetain(&raw mut context, device)) }, what)?;
        // SAFETY: the context is retained; given back where no `Context` comes of it that would.
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
        Ok(Context { driver, device, handle: context, stream, stuck: Cell::new(false) })
    }

    /// Memory of the device that is free, and all of it, bytes.
    pub(super) fn memory(&self) -> Result<(u64, u64), GpuError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: sets both.
        let code = unsafe { call!(self.driver, cuMemGetInfo_v2(&raw mut free, &raw mut total)) };
        self.driver.check(code, || "ask for the free memory".into())?;
        Ok((free as u64, total as u64))
    }

    /// What makes it current in another thread, while this one waits for that.
    pub(super) fn enter(&self) -> impl FnOnce() -> Result<(), GpuError> + Send + 'static {
        let (driver, handle) = (self.driver, self.handle as usize);
        move || {
            // SAFETY: a context that is retained for as long as the process uses the device.
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
        // SAFETY: made in `new`; nothing of it is used any more.
        unsafe {
            call!(self.driver, cuStreamSynchronize(self.stream));
            call!(self.driver, cuStreamDestroy_v2(self.stream));
            call!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device));
        }
    }
}
