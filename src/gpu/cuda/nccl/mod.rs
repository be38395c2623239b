//! NCCL: its library, and a communicator of the PEs. `messages` are what one-sided operations are compared with, `windows`
//! symmetric memory.
//!
//! The library is opened at run time, and where there is none, or it refuses, that is [`GpuError::Unavailable`]. The types
//! are those of the crate `cudarc`, called as the driver's are ([`super::driver`]), with codes that are numbers.
//!
//! NCCL waits without a limit, for its peers while it starts, while two of them first talk, and where memory is registered. So each is
//! done in a thread that this one waits for within a limit. Its own non-blocking mode makes a thread in each call, which would be measured.

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

/// The library's file name. Its number is that of NCCL's major version.
pub const LIBRARY: &str = "libnccl.so.2";
/// The oldest version with symmetric memory whose addresses the host can ask for (`ncclGetPeerDevicePointer`).
pub const OLDEST_WITH_WINDOWS: [u32; 3] = [2, 29, 2];
/// The oldest version that several PEs of one device can use, where the environment allows it.
pub const OLDEST_WITH_SHARED_DEVICES: [u32; 3] = [2, 30, 0];
/// What allows it, set to 1.
pub const SHARED_DEVICES: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// What makes PEs of one host find each other over the loopback interface: only what the user has not set.
const ONE_HOST: (&str, &str) = ("NCCL_SOCKET_IFNAME", "lo");
const SUCCESS: u32 = ncclResult_t::ncclSuccess as u32;
const ID_BYTES: usize = size_of::<ncclUniqueId>();
/// Of Linux's dlfcn.h: only what is open already.
const RTLD_NOLOAD: c_int = 4;

/// Defines a table of functions: each of `cudarc`'s type, but for the code that it returns.
macro_rules! functions {
    ($(#[$about:meta])* $table:ident { $($name:ident($($arg:ty),*) -> $code:ty = $raw:ty;)* }) => {
        $(#[$about])*
        #[allow(non_snake_case)]
        struct $table { $($name: unsafe extern "C" fn($($arg),*) -> $raw,)* }

        impl $table {
            /// Looks all of them up; the error is the dynamic loader's.
            ///
            /// # Safety
            /// The library is NCCL, and stays open.
            unsafe fn of(library: &libloading::os::unix::Library) -> Result<$table, libloading::Error> {
                // SAFETY: by this function's contract they have these types, which `cudarc` made from NCCL's header.
                unsafe { Ok($table { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }

        // A function of another type does not compile. Nothing calls `cudarc`'s: they panic without the library.
        $(const _: unsafe fn($($arg),*) -> $code = sys::$name;)*
    };
}

functions! {
    /// What every version has from 2.13 on.
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
    /// What symmetric memory needs besides.
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

/// `ncclGetPeerDevicePointer` of nccl_device/host.h, which `cudarc` leaves out: window, offset, rank, where the address goes; null where
/// loads and stores do not reach.
type GetPeerDevicePointer = unsafe extern "C" fn(ncclWindow_t, usize, c_int, *mut *mut c_void) -> u32;

/// The functions for symmetric memory, all of them.
struct ForWindows {
    functions: WindowFunctions,
    peer_pointer: GetPeerDevicePointer,
}

/// The library, opened once and never closed: it leaves threads behind.
pub struct Library {
    functions: Functions,
    /// Or what is missing.
    for_windows: Result<ForWindows, String>,
    /// Where it is; a bare name where the dynamic loader found it.
    pub path: PathBuf,
    /// Major, minor, patch.
    pub version: [u32; 3],
}

/// Where the library may be, in the order of looking: NCCL_HOME/lib, then where the dynamic loader looks.
pub fn places(nccl_home: Option<&OsStr>) -> Vec<PathBuf> {
    let home = nccl_home.filter(|home| !home.is_empty()).map(|home| Path::new(home).join("lib").join(LIBRARY));
    home.into_iter().filter(|place| place.exists()).chain([PathBuf::from(LIBRARY)]).collect()
}

/// Opens the first library that is there.
///
/// # Errors
/// [`GpuError::Unavailable`]: none is there, or it cannot be loaded.
pub fn find_library() -> Result<&'static Library, GpuError> {
    static FOUND: OnceLock<Result<Library, String>> = OnceLock::new();
    let find = || open(places(std::env::var_os("NCCL_HOME").as_deref()).swap_remove(0), RTLD_NOW | RTLD_LOCAL);
    FOUND.get_or_init(find).as_ref().map_err(|message| GpuError::Unavailable(message.clone()))
}

/// The library that this process has open already: the one that a communicator of the caller's is of.
///
/// # Errors
/// [`GpuError::Unavailable`]: none is open under its name, as where it is part of another library.
fn loaded_library() -> Result<&'static Library, GpuError> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    let find = || {
        open(PathBuf::from(LIBRARY), RTLD_NOW | RTLD_NOLOAD)
            .map_err(|error| format!("a communicator of the caller's, and no {LIBRARY} that is open: {error}"))
    };
    LOADED.get_or_init(find).as_ref().map_err(|message| GpuError::Unavailable(message.clone()))
}

fn open(place: PathBuf, flags: c_int) -> Result<Library, String> {
    let cause = |error: libloading::Error| error.source().map_or_else(|| error.to_string(), ToString::to_string);
    let error = |error| format!("no NCCL ({}): set NCCL_HOME (docs/cuda.md)", cause(error));
    // SAFETY: a file of the library's name, where it is to be; kept open for ever.
    let (functions, for_windows) = unsafe {
        let library = libloading::os::unix::Library::open(Some(&place), flags).map_err(error)?;
        let functions = Functions::of(&library).map_err(error)?;
        // Opened from nccl_device/host.h's declaration, the others from `cudarc`'s.
        let for_windows = WindowFunctions::of(&library).and_then(|functions| {
            let peer_pointer = *library.get::<GetPeerDevicePointer>(b"ncclGetPeerDevicePointer\0")?;
            Ok(ForWindows { functions, peer_pointer })
        });
        std::mem::forget(library);
        (functions, for_windows.map_err(cause))
    };
    let mut number = 0;
    // SAFETY: sets the number; needs nothing else.
    unsafe { (functions.ncclGetVersion)(&raw mut number) };
    Ok(Library { functions, for_windows, path: place, version: parse_version(number.unsigned_abs()) })
}

/// NCCL's number of a version: 1000 major + 100 minor + patch until 2.8, 10000 major from 2.9 on.
fn parse_version(number: u32) -> [u32; 3] {
    let per_major = if number < 10000 { 1000 } else { 10000 };
    [number / per_major, number % per_major / 100, number % 100]
}

fn dotted([major, minor, patch]: [u32; 3]) -> String {
    format!("{major}.{minor}.{patch}")
}

/// The environment variable that the processes of PEs on one host are to be started with, unless it is set.
pub fn one_host_environment() -> Option<(String, String)> {
    let (name, value) = ONE_HOST;
    std::env::var_os(name).is_none().then(|| (name.to_string(), value.to_string()))
}

impl Library {
    /// Its version, "2.29.2".
    pub fn version_text(&self) -> String {
        dotted(self.version)
    }

    /// That it has symmetric memory, with addresses that the host can ask for.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`], with the version that is needed.
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

    /// What NCCL says of an error: its last message, which names the cause, or else the code.
    fn failure(&self, code: u32, what: &str) -> GpuError {
        let last = self.last_error();
        let says = if last.is_empty() { String::new() } else { format!(" ({last})") };
        GpuError::failed(what, format!("NCCL {} answers {code}{says}", self.version_text()))
    }

    /// NCCL's last message, in one line; empty where there is none.
    fn last_error(&self) -> String {
        // SAFETY: takes no communicator, and returns a string of NCCL's or null.
        let last = unsafe {
            let text = (self.functions.ncclGetLastError)(ptr::null_mut());
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        last.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// NCCL's refusal to start: what does not need NCCL goes on without it.
fn refused(error: GpuError) -> GpuError {
    GpuError::Unavailable(error.to_string())
}

/// How long a start, or what follows it, may take.
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

/// A communicator, from one thread to another.
#[derive(Clone, Copy)]
struct Communicator(ncclComm_t);

// SAFETY: a communicator may be used by any thread, one at a time: those that make one here hand it over, or are waited for.
unsafe impl Send for Communicator {}

/// Does `work` in a thread of its own, with the device's context, and waits for it until the deadline. After an error of that nothing waits for
/// the device any more, and the process is to end.
fn within<T: Send + 'static>(
    context: &Context,
    what: &str,
    deadline: Deadline,
    work: impl FnOnce() -> Result<T, GpuError> + Send + 'static,
) -> Result<T, GpuError> {
    let (sender, receiver) = sync_channel(1);
    let enter = context.enter();
    let body = move || {
        // Nobody hears it where the limit is over: then the process ends.
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

/// Starts a communicator of all PEs, and does `first` with it in the thread that waits for NCCL (collective). `found` is this PE's library.
///
/// # Errors
/// [`GpuError::Unavailable`], on all PEs alike, where one has no NCCL, or NCCL refuses. All else is for the end of the process: something that
/// is not ready in time.
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
            // SAFETY: fills the id.
            let code = unsafe { (library.functions.ncclGetUniqueId)(&raw mut id) };
            library.check(code, "make a unique id for NCCL").map_err(refused)?;
        }
        Ok(library)
    });
    // What PE 0 made, and whether each PE has what it needs, so that nobody starts alone.
    let mut mine = vec![u8::from(found.is_ok())];
    mine.extend(id.internal.iter().map(|c| c.cast_unsigned()));
    let all = bootstrap.all_gather(&mine, deadline.left())?;
    let library = agreed(found, all.chunks(mine.len()).map(|of_pe| of_pe[0] == 1))?;
    id.internal.iter_mut().zip(&all[1..]).for_each(|(to, from)| *to = from.cast_signed());

    let run = move || {
        let mut communicator = ptr::null_mut();
        // SAFETY: sets the communicator; the id is PE 0's.
        let code = unsafe { (library.functions.ncclCommInitRank)(&raw mut communicator, n as c_int, id, me as c_int) };
        library.check(code, "start NCCL")?;
        let communicator = Communicator(communicator);
        first(library, communicator).map(|()| communicator)
    };
    let started = within(context, "start NCCL", deadline, run);
    if context.stuck.get() {
        return started.map(|communicator| (library, communicator));
    }
    let started = started.map_err(refused);
    let own = started.as_ref().ok().copied();
    let all = bootstrap.all_gather(&[started.is_ok().into()], deadline.left())?;
    let agreed = agreed(started, all.iter().map(|ready| *ready == 1));
    if let (Err(_), Some(Communicator(own))) = (&agreed, own) {
        // SAFETY: started just now, and used by nobody.
        unsafe { (library.functions.ncclCommAbort)(own) };
    }
    agreed.map(|communicator| (library, communicator))
}

/// What this PE has, where all PEs have it.
fn agreed<T>(mine: Result<T, GpuError>, all: impl Iterator<Item = bool>) -> Result<T, GpuError> {
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
    fn versions_read_as_nccl_has_them() {
        assert_eq!([2708, 21805, 22703, 23203].map(parse_version), [[2, 7, 8], [2, 18, 5], [2, 27, 3], [2, 32, 3]]);
    }

    #[test]
    fn the_user_s_home_comes_first_where_it_has_the_library() {
        let home = tempfile::tempdir().unwrap();
        let name = Path::new(LIBRARY);
        assert_eq!(places(Some(home.path().as_os_str())), [name]);
        std::fs::create_dir(home.path().join("lib")).unwrap();
        let library = home.path().join("lib").join(name);
        std::fs::write(&library, "").unwrap();
        assert_eq!(places(Some(home.path().as_os_str())), [library.as_path(), name]);
        assert_eq!(places(Some(OsStr::new(""))), [name]);
        assert_eq!(places(None), [name]);
    }
}
