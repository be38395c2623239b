//! The CUDA driver, `libcuda.so.1`: the functions that this crate calls.
//!
//! The types of these functions come from the crate `cudarc`, which generates them from CUDA's header. This module loads and calls the
//! functions itself, because `cudarc` panics if the library or a function is missing, and returns error codes as a Rust `enum`, which may
//! lack the codes of a newer driver. `call!` returns codes as integers, and a missing function causes an error
//! (docs/decisions/2026-11-21-driver-loading.md).

use std::error::Error;
use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::gpu::GpuError;

/// The code of a call that succeeded.
pub const SUCCESS: u32 = CUresult::CUDA_SUCCESS as u32;
/// There is too little memory.
pub const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
/// The module has neither machine code nor PTX for the device.
pub const NO_BINARY_FOR_GPU: u32 = CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU as u32;
/// The PTX was compiled by a compiler newer than the driver.
pub const UNSUPPORTED_PTX: u32 = CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as u32;
/// A name is unknown.
pub const NOT_FOUND: u32 = CUresult::CUDA_ERROR_NOT_FOUND as u32;
/// The operation has not completed yet.
pub const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;
/// A cooperative launch has more blocks than can be co-resident.
pub const COOPERATIVE_TOO_LARGE: u32 = CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE as u32;

/// The CUDA version of the oldest driver that has all functions.
pub const OLDEST: Version = Version(12000);

/// A CUDA version as the driver reports it, which is 1000 times the major number plus 10 times the minor number.
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
        /// A driver function. Each variant has the name of the function's symbol.
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        pub(super) enum Symbol { $($name,)* }

        /// Symbol names, indexed by [`Symbol`].
        const NAMES: &[&str] = &[$(stringify!($name),)*];
    };
}

// All functions are looked up when the driver is opened, so that a missing function is reported then.
symbols! {
    cuInit cuGetErrorName cuGetErrorString
    cuDeviceGetCount cuDeviceGet cuDeviceGetName cuDeviceGetPCIBusId cuDeviceGetAttribute cuDeviceTotalMem_v2
    cuDeviceCanAccessPeer
    cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxSetCurrent
    cuMemGetInfo_v2 cuMemAlloc_v2 cuMemFree_v2 cuMemHostAlloc cuMemFreeHost cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemsetD8Async
    cuStreamCreate cuStreamDestroy_v2 cuStreamQuery cuStreamSynchronize cuStreamBeginCapture_v2 cuStreamEndCapture
    cuGraphInstantiateWithFlags cuGraphLaunch cuGraphDestroy cuGraphExecDestroy
    cuModuleLoadData cuModuleUnload cuModuleGetFunction
    cuFuncSetAttribute cuOccupancyMaxActiveBlocksPerMultiprocessor cuLaunchKernel cuLaunchCooperativeKernel
    cuOccupancyMaxActiveClusters cuLaunchKernelEx
    cuEventCreate cuEventRecord cuEventElapsedTime cuEventDestroy_v2
    cuTensorMapEncodeTiled
}

/// The type of a `cudarc` function.
pub(super) trait Signature {
    /// The type of the driver function. It returns its code as an integer, since C represents the enum as `unsigned`.
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

/// `call!(driver, cuCtxSetCurrent(context))` returns the driver's code as `u32`. The call is unsafe, because the driver's functions are.
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

/// Expands to a type that the compiler infers, for each argument.
macro_rules! any {
    ($arg:expr) => {
        _
    };
}

pub(super) use {any, call};

/// The address of a function, whatever its type.
type Entry = unsafe extern "C" fn();

/// The addresses of the driver's functions, indexed by `Symbol`.
pub struct Driver(Vec<Entry>);

/// The places where the driver is searched for, in this order: the loader's path, the path of WSL, and that of Slurm images whose loader
/// cache lacks the driver.
const CANDIDATES: [&str; 3] = ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "/usr/local/nvidia/lib64/libcuda.so.1"];

/// Opens the library at the first call. It is never closed, because the driver's threads go on running in it.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let open = || {
        let mut first = None;
        for path in CANDIDATES.map(Path::new) {
            // SAFETY: the path is that of NVIDIA's driver library, whose constructors may run in any program.
            match unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) } {
                Ok(library) => return Ok(library),
                Err(error) => first = first.or(Some(error.source().map_or(error.to_string(), |e| e.to_string()))),
            }
        }
        Err(first.unwrap_or_default())
    };
    LIBRARY.get_or_init(open).as_ref().map_err(String::as_str)
}

/// Returns the driver's CUDA version even if [`driver`] rejects it, and `None` if there is no driver.
pub fn version() -> Option<Version> {
    let mut version = 0;
    // SAFETY: the function has this type and may be called before cuInit.
    unsafe {
        let get = library().ok()?.get::<unsafe extern "C" fn(*mut c_int) -> u32>(b"cuDriverGetVersion\0").ok()?;
        (get(&raw mut version) == SUCCESS).then_some(Version(version))
    }
}

/// Opens and initialises the driver at the first call in the process.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if there is no driver, if it is too old, or if cuInit fails. The message names the cause and the
/// remedy.
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
        // SAFETY: the symbol is a function, which is called only with its own type, and the library stays open.
        unsafe { library.get::<Entry>(name.as_bytes()) }
            .map(|symbol| *symbol)
            .map_err(|_| format!("the driver, of CUDA {version}, has no {name}: install a newer NVIDIA driver"))
    };
    let driver = Driver(NAMES.iter().map(entry).collect::<Result<_, _>>()?);
    // SAFETY: the function takes only an integer.
    match unsafe { call!(driver, cuInit(0)) } {
        SUCCESS => Ok(driver),
        code => Err(format!("the CUDA driver does not start: {}", driver.error_text(code))),
    }
}

impl Driver {
    /// Returns the driver function with the type that `cudarc` declares for it.
    ///
    /// # Safety
    /// `S` is the type of the function `symbol`. `call!` ensures this, because it derives both from one name.
    pub(super) unsafe fn function<S: Signature>(&self, _of_type: impl FnOnce() -> S, symbol: Symbol) -> S::Raw {
        // SAFETY: both types are function pointers, and the caller guarantees that `S::Raw` is the function's type. `CUresult` is
        // `repr(u32)`, so it is returned like a `u32`, for which every value is valid.
        unsafe { std::mem::transmute_copy::<Entry, S::Raw>(&self.0[symbol as usize]) }
    }

    /// Returns a text for a code, such as "CUDA_ERROR_NO_DEVICE (100, no CUDA-capable device is detected)".
    pub fn error_text(&self, code: u32) -> String {
        // `call!` cannot be used here, because `cudarc`'s functions take a code of its enum, and `code` may be any integer.
        type Get = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
        let text = |symbol: Symbol| {
            let mut text = std::ptr::null();
            // SAFETY: both functions have this type and set `text` to a static string, or to null for an unknown code.
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

    /// Converts a code to a result. `what` completes the message "cannot ...".
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] for every code except [`SUCCESS`].
    pub fn check(&self, code: u32, what: impl FnOnce() -> String) -> Result<(), GpuError> {
        if code == SUCCESS { Ok(()) } else { Err(GpuError::failed(what(), self.error_text(code))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded() {
        assert_eq!([12000, 12090, 13000, 11080].map(|v| Version(v).to_string()), ["12.0", "12.9", "13.0", "11.8"]);
        assert!(Version(11080) < OLDEST && Version(12000) >= OLDEST);
    }
}
