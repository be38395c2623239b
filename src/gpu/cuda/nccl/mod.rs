//! NCCL: its library, and a communicator of the PEs. The module `messages` has two-sided messages for comparison, and `windows` provides
//! symmetric memory.
//!
//! The library is loaded at run time. If it is missing or fails to start, the error is [`GpuError::Unavailable`]. The types come from the
//! crate `cudarc`, but codes are integers, for the same reason as those of the driver ([`super::driver`]).
//!
//! NCCL waits for its peers without a limit when it starts, at the first message between two PEs, and when memory is registered. These
//! calls therefore run in a second thread, and the first thread waits for it with a limit. NCCL's own non-blocking mode is not used,
//! because it would create a thread in every call, which would distort measurements.

mod messages;
pub(super) mod windows;

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclUniqueId, ncclWindow_t};
use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};
pub use messages::Nccl;

use super::context::Context;
use crate::gpu::GpuError;
use crate::gpu::nvshmem::Bootstrap;

/// The library's file name, which ends with NCCL's major version.
pub const LIBRARY: &str = "libnccl.so.2";
/// The oldest version in which the host can ask for the addresses of symmetric memory (`ncclGetPeerDevicePointer`).
pub const OLDEST_WITH_WINDOWS: [u32; 3] = [2, 29, 2];
/// The oldest version in which several PEs may use one device. [`SHARED_DEVICES`] must allow it as well.
pub const OLDEST_WITH_SHARED_DEVICES: [u32; 3] = [2, 30, 0];
/// The environment variable that allows PEs to share a device if its value is 1.
pub const SHARED_DEVICES: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// The environment variable, and the value that makes the PEs of one host connect over the loopback interface. A value that the user has
/// set is kept.
const ONE_HOST: (&str, &str) = ("NCCL_SOCKET_IFNAME", "lo");
const SUCCESS: u32 = ncclResult_t::ncclSuccess as u32;
const ID_BYTES: usize = size_of::<ncclUniqueId>();
/// A flag of Linux's dlfcn.h with which opening a library succeeds only if it is already loaded.
const RTLD_NOLOAD: c_int = 4;

/// Defines a table of functions with `cudarc`'s types, except that codes are integers.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $($name:ident($($arg:ty),*) -> $code:ty = $raw:ty;)* }) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        struct $table { $($name: unsafe extern "C" fn($($arg),*) -> $raw,)* }

        impl $table {
            /// Looks up all functions. On failure returns the error of the dynamic loader.
            ///
            /// # Safety
            /// `library` is NCCL and stays loaded.
            unsafe fn of(library: &libloading::os::unix::Library) -> Result<$table, libloading::Error> {
                // SAFETY: the caller guarantees that the library is NCCL, and `cudarc` generated these types from NCCL's header.
                unsafe { Ok($table { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }

        // The compiler checks the types here. `cudarc`'s functions are never called, because they panic if the library is missing.
        $(const _: unsafe fn($($arg),*) -> $code = sys::$name;)*
    };
}

functions! {
    /// The functions that every version from 2.13 on has.
    Functions {
        ncclGetVersion(*mut c_int) -> ncclResult_t = u32;
        ncclGetLastError(ncclComm_t) -> *const c_char = *const c_char;
        ncclGetUniqueId(*mut ncclUniqueId) -> ncclResult_t = u32;
        ncclCommInitRank(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> ncclResult_t = u32;
        ncclCommAbort(ncclComm_t) -> ncclResult_t = u32;
        ncclGroupStart() -> ncclResult_t = u32;
        ncclGroupEnd() -> ncclResult_t = u32;
        ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t = u32;
        ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t) -> ncclResult_t = u32;
    }
}

functions! {
    /// The additional functions for symmetric memory.
    WindowFunctions {
        ncclMemAlloc(*mut *mut c_void, usize) -> ncclResult_t = u32;
        ncclMemFree(*mut c_void) -> ncclResult_t = u32;
        ncclCommWindowRegister(ncclComm_t, *mut c_void, usize, *mut ncclWindow_t, c_int) -> ncclResult_t = u32;
        ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) -> ncclResult_t = u32;
        ncclCommGetAsyncError(ncclComm_t, *mut ncclResult_t) -> ncclResult_t = u32;
        ncclCommCount(ncclComm_t, *mut c_int) -> ncclResult_t = u32;
        ncclCommUserRank(ncclComm_t, *mut c_int) -> ncclResult_t = u32;
        ncclCommCuDevice(ncclComm_t, *mut c_int) -> ncclResult_t = u32;
    }
}

/// The type of `ncclGetPeerDevicePointer` in nccl_device/host.h, which `cudarc` lacks. The arguments are the window, the offset, the rank
/// and the address of the result. The result is null if loads and stores do not reach the rank.
type GetPeerDevicePointer = unsafe extern "C" fn(ncclWindow_t, usize, c_int, *mut *mut c_void) -> u32;

/// All functions for symmetric memory.
struct ForWindows {
    functions: WindowFunctions,
    peer_pointer: GetPeerDevicePointer,
}

/// NCCL's library. It is never closed, because NCCL's threads go on running in it.
pub struct Library {
    functions: Functions,
    /// The functions for symmetric memory, or an error that names the missing function.
    for_windows: Result<ForWindows, String>,
    /// The library's path, or its name if the dynamic loader found it.
    pub path: PathBuf,
    /// The major, minor and patch numbers.
    pub version: [u32; 3],
}

/// Returns the paths at which the library is searched for: first NCCL_HOME/lib if it has the library, then the loader's path.
pub fn candidate_paths(nccl_home: Option<&OsStr>) -> Vec<PathBuf> {
    let home = nccl_home.filter(|home| !home.is_empty()).map(|home| Path::new(home).join("lib").join(LIBRARY));
    home.into_iter().filter(|path| path.exists()).chain([PathBuf::from(LIBRARY)]).collect()
}

/// Loads the first candidate at the first call in the process.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if the library is missing or cannot be loaded.
pub fn find_library() -> Result<&'static Library, GpuError> {
    static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
    let find = || open(candidate_paths(std::env::var_os("NCCL_HOME").as_deref()).swap_remove(0), RTLD_NOW | RTLD_LOCAL);
    FOUND.get_or_init(find).as_ref().map_err(|message| GpuError::Unavailable(message.clone()))
}

/// Returns the library that is already loaded in this process. A caller's communicator belongs to it.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if no library of this name is loaded, for example because NCCL is linked statically.
fn loaded_library() -> Result<&'static Library, GpuError> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    let find = || {
        open(PathBuf::from(LIBRARY), RTLD_NOW | RTLD_NOLOAD)
            .map_err(|error| format!("a communicator of the caller's, and no {LIBRARY} that is open: {error}"))
    };
    LOADED.get_or_init(find).as_ref().map_err(|message| GpuError::Unavailable(message.clone()))
}

fn open(path: PathBuf, flags: c_int) -> Result<Library, String> {
    let cause = |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let error = |error| format!("no NCCL ({}): set NCCL_HOME (docs/cuda.md)", cause(error));
    // SAFETY: `path` ends in NCCL's library name, and the library is never closed.
    let (functions, for_windows) = unsafe {
        let library = libloading::os::unix::Library::open(Some(&path), flags).map_err(error)?;
        let functions = Functions::of(&library).map_err(error)?;
        // The type of `peer_pointer` is that of nccl_device/host.h, and the types of the other functions are those of `cudarc`.
        let for_windows = WindowFunctions::of(&library).and_then(|functions| {
            let peer_pointer = *library.get::<GetPeerDevicePointer>(b"ncclGetPeerDevicePointer\0")?;
            Ok(ForWindows { functions, peer_pointer })
        });
        std::mem::forget(library);
        (functions, for_windows.map_err(cause))
    };
    let mut number = 0;
    // SAFETY: the function only writes the number, and may be called at any time.
    unsafe { (functions.ncclGetVersion)(&raw mut number) };
    Ok(Library { functions, for_windows, path, version: parse_version(number.unsigned_abs()) })
}

/// Splits NCCL's version number, which is the sum of 1000 times the major number, 100 times the minor number, and the patch number. From
/// 2.9 on the major number is multiplied by 10000 instead.
fn parse_version(number: u32) -> [u32; 3] {
    let per_major = if number < 10000 { 1000 } else { 10000 };
    [number / per_major, number % per_major / 100, number % 100]
}

fn dotted([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

/// Returns the environment variable that must be added when the PE processes of a single host are started, or `None` if it is set already.
pub fn one_host_environment() -> Option<(String, String)> {
    let (name, value) = ONE_HOST;
    std::env::var_os(name).is_none().then(|| (name.to_string(), value.to_string()))
}

impl Library {
    /// The version as a text, such as "2.29.2".
    pub fn version_text(&self) -> String {
        dotted(self.version)
    }

    /// Checks that the library provides symmetric memory and the host can ask for its addresses.
    ///
    /// # Errors
    /// Returns [`GpuError::Unavailable`], which names the required version.
    pub fn check_windows(&self) -> Result<(), GpuError> {
        self.for_windows().map(|_| ())
    }

    fn for_windows(&self) -> Result<&ForWindows, GpuError> {
        let (path, version) = (self.path.display(), self.version_text());
        if self.version < OLDEST_WITH_WINDOWS {
            return Err(GpuError::Unavailable(format!(
                "{path} is NCCL {version}, and symmetric memory needs {} or newer: set NCCL_HOME to one, or use `symmetric` nvshmem",
                dotted(OLDEST_WITH_WINDOWS)
            )));
        }
        let missing = |cause| {
            format!("{path}, NCCL {version}, lacks what symmetric memory needs ({cause}): set NCCL_HOME to another")
        };
        self.for_windows.as_ref().map_err(|cause| GpuError::Unavailable(missing(cause)))
    }

    fn check(&self, code: u32, what: &str) -> Result<(), GpuError> {
        if code == SUCCESS { Ok(()) } else { Err(self.failure(code, what)) }
    }

    /// Builds the error of a code. It contains NCCL's last message if there is one.
    fn failure(&self, code: u32, what: &str) -> GpuError {
        let last = self.last_error();
        let says = if last.is_empty() { String::new() } else { format!(" ({last})") };
        GpuError::failed(what, format!("NCCL {} answers {code}{says}", self.version_text()))
    }

    /// Returns NCCL's last message on one line, or an empty string if there is none.
    fn last_error(&self) -> String {
        // SAFETY: the function accepts a null communicator, and returns null or a NUL-terminated string, which is copied at once.
        let last = unsafe {
            let text = (self.functions.ncclGetLastError)(ptr::null_mut());
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        last.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// Converts an error of NCCL's start to [`GpuError::Unavailable`], so that callers can continue without NCCL.
fn unavailable(error: GpuError) -> GpuError {
    GpuError::Unavailable(error.to_string())
}

/// The time limit of NCCL's start and of the first operations after it.
#[derive(Clone, Copy)]
struct Deadline {
    start: Instant,
    limit: Duration,
}

impl Deadline {
    fn after(limit: Duration) -> Deadline {
        Deadline { start: Instant::now(), limit }
    }

    fn left(&self) -> Duration {
        self.limit.saturating_sub(self.start.elapsed())
    }
}

/// A communicator that may be moved to another thread.
#[derive(Clone, Copy)]
struct Communicator(ncclComm_t);

// SAFETY: any thread may use a communicator if only one does at a time. A thread that creates one here either hands it over, or another
// thread waits for it.
unsafe impl Send for Communicator {}

/// Runs `work` in a new thread with the device's context and waits for it until the deadline. After a time-out the context is
/// marked as stuck, and the process must exit.
fn within<T: Send + 'static>(
    context: &Context,
    what: &str,
    deadline: Deadline,
    work: impl FnOnce() -> Result<T, GpuError> + Send + 'static,
) -> Result<T, GpuError> {
    let (sender, receiver) = sync_channel(1);
    let enter = context.enter();
    let body = move || {
        // Sending fails if the deadline has passed. The process is exiting then, so the error is ignored.
        let _ = sender.send(enter().and_then(|()| work()));
    };
    std::thread::Builder::new().spawn(body).map_err(|error| GpuError::failed(what, error))?;
    let late = |how: &str| {
        context.stuck.set(true);
        let after = deadline.limit.as_secs_f64();
        GpuError::failed(what, format!("{how} after {after:.1} s; NCCL_DEBUG=INFO shows more"))
    };
    match receiver.recv_timeout(deadline.left()) {
        Ok(done) => done,
        Err(RecvTimeoutError::Timeout) => Err(late("it is not ready")),
        Err(RecvTimeoutError::Disconnected) => Err(late("its thread has ended")),
    }
}

/// Starts a communicator of all PEs and runs `first` with it in the second thread (collective). `found` is the library that this PE has
/// found.
///
/// # Errors
/// Returns [`GpuError::Unavailable`], on all PEs, if a PE has no NCCL or NCCL refuses. After any other error, such as a time-out, the
/// process must exit.
fn start(
    found: Result<&'static Library, GpuError>,
    (context, bootstrap): (&Context, &dyn Bootstrap),
    deadline: Deadline,
    first: impl FnOnce(&'static Library, Communicator) -> Result<(), GpuError> + Send + 'static,
) -> Result<(&'static Library, Communicator), GpuError> {
    let (me, n) = (bootstrap.my_pe(), bootstrap.n_pes());
    let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
    let found = found.and_then(|library| {
        if me == 0 {
            // SAFETY: the function only writes the id.
            let code = unsafe { (library.functions.ncclGetUniqueId)(&raw mut id) };
            library.check(code, "make a unique id for NCCL").map_err(unavailable)?;
        }
        Ok(library)
    });
    // The PEs exchange PE 0's id and whether each PE has a library, so that NCCL starts on all PEs or on none.
    let mut mine = vec![u8::from(found.is_ok())];
    mine.extend(id.internal.iter().map(|c| c.cast_unsigned()));
    let all = bootstrap.all_gather(&mine, deadline.left())?;
    let library = require_all(found, all.chunks(mine.len()).map(|of_pe| of_pe[0] == 1))?;
    id.internal.iter_mut().zip(&all[1..]).for_each(|(to, from)| *to = from.cast_signed());

    let run = move || {
        let mut communicator = ptr::null_mut();
        // SAFETY: the function only writes the communicator, and the id is that of PE 0.
        let code = unsafe { (library.functions.ncclCommInitRank)(&raw mut communicator, n as c_int, id, me as c_int) };
        library.check(code, "start NCCL")?;
        let communicator = Communicator(communicator);
        first(library, communicator).map(|()| communicator)
    };
    let started = within(context, "start NCCL", deadline, run);
    if context.stuck.get() {
        return started.map(|communicator| (library, communicator));
    }
    let started = started.map_err(unavailable);
    let own = started.as_ref().ok().copied();
    let all = bootstrap.all_gather(&[started.is_ok().into()], deadline.left())?;
    let agreed = require_all(started, all.iter().map(|ready| *ready == 1));
    if let (Err(_), Some(Communicator(own))) = (&agreed, own) {
        // SAFETY: the communicator was created above, and no other thread uses it.
        unsafe { (library.functions.ncclCommAbort)(own) };
    }
    agreed.map(|communicator| (library, communicator))
}

/// Returns this PE's result if all PEs succeeded, and otherwise an error.
fn require_all<T>(mine: Result<T, GpuError>, all: impl Iterator<Item = bool>) -> Result<T, GpuError> {
    let lacking = all.enumerate().find(|(_, has)| !has);
    match (mine, lacking) {
        (Ok(_), Some((pe, _))) => Err(GpuError::Unavailable(format!("no NCCL on PE {pe}"))),
        (mine, _) => mine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded() {
        assert_eq!([2708, 21805, 22703, 23203].map(parse_version), [[2, 7, 8], [2, 18, 5], [2, 27, 3], [2, 32, 3]]);
    }

    #[test]
    fn home_with_a_library_is_the_first_candidate() {
        let home = tempfile::tempdir().unwrap();
        let name = Path::new(LIBRARY);
        assert_eq!(candidate_paths(Some(home.path().as_os_str())), [name]);
        std::fs::create_dir(home.path().join("lib")).unwrap();
        let library = home.path().join("lib").join(name);
        std::fs::write(&library, "").unwrap();
        assert_eq!(candidate_paths(Some(home.path().as_os_str())), [library.as_path(), name]);
        assert_eq!(candidate_paths(Some(OsStr::new(""))), [name]);
        assert_eq!(candidate_paths(None), [name]);
    }
}
