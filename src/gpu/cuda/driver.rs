//! The CUDA driver, `libcuda.so.1`: the functions that this project calls.
//!
//! Their types, and all that they take, are those of the crate `cudarc`, generated from CUDA's own header. Loading and calling them
//! is done here instead, as `cudarc`'s functions panic where the library or a function is missing, and return codes
//! as a Rust `enum`, of which a newer driver's code may be no value. The macro `call!` calls the same
//! functions with codes that are numbers, and what is missing is an error that says so (docs/decisions/2026-11-21-driver-loading.md).

use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::gpu::GpuError;

/// Went well.
pub const SUCCESS: u32 = CUresult::CUDA_SUCCESS as u32;
/// No memory is left.
pub const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
/// No machine code for the device, and no PTX.
pub const NO_BINARY_FOR_GPU: u32 = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32;
/// PTX made by a compiler newer than the driver.
pub const UNSUPPORTED_PTX: u32 = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32;
/// No such name.
pub const NOT_FOUND: u32 = CUresult::CUDA_ERROR_NOT_FOUND as u32;
/// What was asked about still runs.
pub const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;
/// More blocks than run at the same time.
pub const COOPERATIVE_TOO_LARGE: u32 = CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE as u32;

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

/// Defines [`Symbol`].
macro_rules! symbols {
    ($($name:ident)*) => {
        /// A function of the driver's, by its name in the library.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        pub(super) enum Symbol { $($name,)* }

        /// The names, in the order of [`Symbol`].
        const NAMES: &[&str] = &[$(stringify!($name),)*];
    };
}

// All that are called: looked up at the start, so that no call finds its function missing.
symbols! {
    cuInit cuGetErrorName cuGetErrorString
    cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetPCIBusId cuDeviceGetAttribute cuDeviceTotalMem_v2
    cuDeviceCanAccessPeer
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxSetCurrent
    cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemsetD8Async
    cuStreamCreate cuStreamDestroy_v2 cuStreamQuery cuStreamSynchronize cuStreamBeginCapture_v2 cuStreamEndCapture
    cuGraphInstantiateWithFlags cuGraphLaunch cuGraphDestroy cuGraphExecDestroy
    cuModuleLoadData cuModuleUnload cuModuleGetFunction
    cuFuncSetAttribute cuOccupancyMaxActiveBlocksPerMultiprocessor cuLaunchKernel cuLaunchCooperativeKernel
    cuOccupancyMaxActiveClusters cuLaunchKernelEx
    cuEventCreate cuEventRecord cuEventElapsedTime cuEventDestroy_v2
    cuTensorMapEncodeTiled
}

/// The type of one of `cudarc`'s functions.
pub(super) trait Signature {
    /// The type of the driver's function behind it, its code a number: C's enum is an `unsigned`.
    type Raw: Copy;
}

macro_rules! signatures {
    ($first:ident $($rest:ident)*) => {
        impl<$first, $($rest),*> Signature for unsafe fn($first, $($rest),*) -> CUresult {
            type Raw = unsafe extern "C" fn($first, $($rest),*) -> u32;
        }
        signatures! { $($rest)* }
    };
    () => {};
}

signatures! { A B C D E F G H I J K L }

/// `call!(driver, cuCtxSetCurrent(context))`: the driver's code, a `u32`. Unsafe, as the driver's functions are.
macro_rules! call {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $driver.function(
            || {
                let of_type: unsafe fn($($crate::gpu::cuda::driver::any!($arg)),*) -> _ = ::cudarc::driver::sys::$name;
                of_type
            },
            $crate::gpu::cuda::driver::Symbol::$name,
        )($($arg),*)
    };
}

/// The type that is inferred, one for each argument.
macro_rules! any {
    ($arg:expr) => {
        _
    };
}

pub(super) use {any, call};

/// An address in the library, of a function of any type.
type Entry = unsafe extern "C" fn();

/// The driver's functions, looked up.
pub struct Driver(Vec<Entry>);

/// Where the driver is sought: a name that the loader finds, then where WSL and Slurm images without an entry in the
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
        format!("no CUDA driver here ({cause}): install NVIDIA's driver, or run on the CPU (`device` cpu)")
    })?;
    let version = version().ok_or("libcuda.so.1 is not a CUDA driver: it does not report its version")?;
    if version < OLDEST {
        return Err(format!(
            "the driver is of CUDA {version}, and {OLDEST} or newer is needed: install a newer NVIDIA driver"
        ));
    }
    let entry = |name: &&str| {
        // SAFETY: a function, and called by its own type alone. The library stays open.
        unsafe { library.get::<Entry>(name.as_bytes()) }
            .map(|symbol| *symbol)
            .map_err(|_| format!("the driver, of CUDA {version}, has no {name}: install a newer NVIDIA driver"))
    };
    let driver = Driver(NAMES.iter().map(entry).collect::<Result<_, _>>()?);
    // SAFETY: takes a number.
    match unsafe { call!(driver, cuInit(0)) } {
        SUCCESS => Ok(driver),
        code => Err(format!("the CUDA driver does not start: {}", driver.error_text(code))),
    }
}

impl Driver {
    /// The driver's function, of the type that `cudarc` has for it.
    ///
    /// # Safety
    /// The type is that of `symbol`; see `call!`, which takes both by one name.
    pub(super) unsafe fn function<S: Signature>(&self, _of_type: impl FnOnce() -> S, symbol: Symbol) -> S::Raw {
        // SAFETY: both are addresses of functions, and the type is the right one by this function's contract. A code's
        // type `CUresult` is `repr(u32)`, and passed as a u32 is; every value of that is allowed.
        unsafe { std::mem::transmute_copy::<Entry, S::Raw>(&self.0[symbol as usize]) }
    }

    /// "CUDA_ERROR_NO_DEVICE (100, no CUDA-capable device is detected)".
    pub fn error_text(&self, code: u32) -> String {
        // Not by `call!`: `cudarc`'s take a code of its enum, and this is any.
        type Get = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
        let text = |symbol: Symbol| {
            let mut text = std::ptr::null();
            // SAFETY: both functions have this type, and set `text` to a string of the driver's, or to null for a code
            // that it does not know.
            unsafe {
                let get = std::mem::transmute::<Entry, Get>(self.0[symbol as usize]);
                let known = get(code, &raw mut text) == SUCCESS && !text.is_null();
                known.then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
            }
        };
        match (text(Symbol::cuGetErrorName), text(Symbol::cuGetErrorString)) {
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
