//! The CUDA driver, `libcuda.so.1`: the functions that this project calls, looked up by name at run time.
//!
//! A table of our own, and not a crate's bindings: those panic where the library or a function is missing, and take
//! return codes as a Rust `enum`, of which a driver newer than the bindings returns what is no value. Here a code is a
//! number, and what is missing is an error that says so.

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::gpu::GpuError;

/// A device's number for the driver.
pub type Device = c_int;
/// A context, stream, event, module, function, graph: pointers to what is the driver's.
pub type Handle = *mut c_void;
/// An address on the device.
pub type Address = u64;

/// `CUDA_SUCCESS`.
pub const SUCCESS: u32 = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NO_BINARY_FOR_GPU`.
pub const NO_BINARY_FOR_GPU: u32 = 209;
/// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`: made by a compiler newer than the driver.
pub const UNSUPPORTED_PTX: u32 = 222;
/// `CUDA_ERROR_NOT_FOUND`.
pub const NOT_FOUND: u32 = 500;
/// `CUDA_ERROR_NOT_READY`.
pub const NOT_READY: u32 = 600;
/// `CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE`.
pub const COOPERATIVE_TOO_LARGE: u32 = 720;

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
pub const MULTIPROCESSORS: u32 = 16;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub const CAPABILITY_MAJOR: u32 = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub const CAPABILITY_MINOR: u32 = 76;
/// `CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH`.
pub const COOPERATIVE: u32 = 95;
/// `CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN`.
pub const SHARED_PER_BLOCK: u32 = 97;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub const FUNCTION_DYNAMIC_SHARED: u32 = 8;
/// `CU_STREAM_NON_BLOCKING`.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads' calls, such as NVSHMEM's proxy's, are not forbidden meanwhile.
pub const CAPTURE_THREAD_LOCAL: u32 = 1;

/// The oldest driver that has all of the functions, by the version of CUDA it is of.
pub const OLDEST: Version = Version(12000);

/// A version of CUDA, as the driver tells it: 1000 major + 10 minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// Defines [`Driver`]: a field for each function, by its name in the library.
macro_rules! functions {
    ($($name:ident($($arg:ty),*);)*) => {
        /// The driver's functions. Each returns a code, [`SUCCESS`] or an error's.
        #[allow(non_snake_case, missing_docs)]
        pub struct Driver { $(pub $name: unsafe extern "C" fn($($arg),*) -> u32,)* }

        impl Driver {
            /// Looks up all functions; the name of the first one that is missing otherwise.
            ///
            /// # Safety
            /// The library is the driver's, and is never closed.
            unsafe fn from_library(library: &Library) -> Result<Self, String> {
                // SAFETY: the driver's functions have these types.
                unsafe {
                    Ok(Driver {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|_| stringify!($name).to_string())?,)*
                    })
                }
            }
        }
    };
}

functions! {
    cuInit(c_uint);
    cuGetErrorName(u32, *mut *const c_char);
    cuGetErrorString(u32, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut Device, c_int);
    cuDeviceGetName(*mut c_char, c_int, Device);
    cuDeviceGetPCIBusId(*mut c_char, c_int, Device);
    cuDeviceGetAttribute(*mut c_int, u32, Device);
    cuDeviceTotalMem_v2(*mut usize, Device);
    cuDevicePrimaryCtxRetain(*mut Handle, Device);
    cuDevicePrimaryCtxRelease_v2(Device);
    cuCtxSetCurrent(Handle);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemAlloc_v2(*mut Address, usize);
    cuMemFree_v2(Address);
    cuMemcpyHtoDAsync_v2(Address, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync_v2(*mut c_void, Address, usize, Handle);
    cuMemsetD8Async(Address, u8, usize, Handle);
    cuStreamCreate(*mut Handle, c_uint);
    cuStreamDestroy_v2(Handle);
    cuStreamQuery(Handle);
    cuStreamSynchronize(Handle);
    cuStreamBeginCapture_v2(Handle, u32);
    cuStreamEndCapture(Handle, *mut Handle);
    cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
    cuGraphLaunch(Handle, Handle);
    cuGraphDestroy(Handle);
    cuGraphExecDestroy(Handle);
    cuModuleLoadData(*mut Handle, *const c_void);
    cuModuleUnload(Handle);
    cuModuleGetFunction(*mut Handle, Handle, *const c_char);
    cuModuleGetGlobal_v2(*mut Address, *mut usize, Handle, *const c_char);
    cuFuncSetAttribute(Handle, u32, c_int);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, Handle, c_int, usize);
    cuLaunchKernel(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
        *mut *mut c_void);
    cuLaunchCooperativeKernel(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
        *mut *mut c_void);
    cuEventCreate(*mut Handle, c_uint);
    cuEventRecord(Handle, Handle);
    cuEventElapsedTime(*mut f32, Handle, Handle);
    cuEventDestroy_v2(Handle);
    cuTensorMapEncodeTiled(*mut c_void, u32, u32, Address, *const u64, *const u64, *const u32, *const u32, u32, u32,
        u32, u32);
}

/// Where the driver is looked for: a name that the loader finds, then where WSL and Slurm images without an entry in the
/// loader's cache have it.
const PLACES: [&str; 3] = ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"];

/// The library, opened once and never closed: the driver leaves threads behind.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let open = || {
        let mut first = None;
        for place in PLACES.map(Path::new) {
            // SAFETY: the driver's constructors may run in any program.
            match unsafe { Library::open(Some(place), RTLD_NOW | RTLD_LOCAL) } {
                Ok(library) => return Ok(library),
                Err(error) => first = first.or(Some(error.source().map_or(error.to_string(), |e| e.to_string()))),
            }
        }
        Err(first.unwrap_or_default())
    };
    LIBRARY.get_or_init(open).as_ref().map_err(String::as_str)
}

/// The version of CUDA that the driver is of, where there is a driver: also one that [`driver`] refuses.
pub fn version() -> Option<Version> {
    let mut version = 0;
    // SAFETY: the driver's function has this type, and may be called before cuInit.
    unsafe {
        let get = library().ok()?.get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"cuDriverGetVersion\0").ok()?;
        (get(&raw mut version) == SUCCESS).then_some(Version(version))
    }
}

/// Opens the driver and initialises it, once per process.
///
/// # Errors
/// [`GpuError::Unavailable`], which says what is missing and what to do about it: no driver, one that is too old,
/// or one that refuses.
pub fn driver() -> Result<&'static Driver, GpuError> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    DRIVER.get_or_init(open).as_ref().map_err(|message| GpuError::Unavailable(message.clone()))
}

fn open() -> Result<Driver, String> {
    let library = library().map_err(|cause| {
        format!("no CUDA driver here ({cause}): install NVIDIA's driver, or run on the CPU (--device cpu)")
    })?;
    let version = version().ok_or("libcuda.so.1 is no CUDA driver: it does not tell its version")?;
    if version < OLDEST {
        return Err(format!(
            "the driver is of CUDA {version}, and {OLDEST} or newer is needed: install a newer NVIDIA driver"
        ));
    }
    // SAFETY: the library is the driver's and stays open.
    let driver = unsafe { Driver::from_library(library) }
        .map_err(|name| format!("the driver, of CUDA {version}, has no {name}: install a newer NVIDIA driver"))?;
    // SAFETY: a version that has these functions.
    match unsafe { (driver.cuInit)(0) } {
        SUCCESS => Ok(driver),
        code => Err(format!("the CUDA driver does not start: {}", driver.error_text(code))),
    }
}

impl Driver {
    /// "CUDA_ERROR_NO_DEVICE (100, no CUDA-capable device is detected)".
    pub fn error_text(&self, code: u32) -> String {
        let text = |get: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut text = std::ptr::null();
            // SAFETY: the driver sets `text` to a string of its own, or to null for a code that it does not know.
            unsafe {
                let known = get(code, &raw mut text) == SUCCESS && !text.is_null();
                known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (text(self.cuGetErrorName), text(self.cuGetErrorString)) {
            (Some(name), Some(words)) => format!("{name} ({code}, {words})"),
            (Some(name), None) => format!("{name} ({code})"),
            _ => format!("CUDA error {code}"),
        }
    }

    /// Turns a code into a result; `what` follows "cannot".
    ///
    /// # Errors
    /// [`GpuError::Failed`] for any code but [`SUCCESS`].
    pub fn check(&self, code: u32, what: impl FnOnce() -> String) -> Result<(), GpuError> {
        if code == SUCCESS { Ok(()) } else { Err(GpuError::failed(what(), self.error_text(code))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_cuda_has_them() {
        assert_eq!([12000, 12090, 13000, 11080].map(|v| Version(v).to_string()), ["12.0", "12.9", "13.0", "11.8"]);
        assert!(Version(11080) < OLDEST && Version(12000) >= OLDEST);
    }
}
