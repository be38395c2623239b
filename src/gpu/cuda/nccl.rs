//! NCCL's matched sends and receives between the PEs' devices, on the stream: what one-sided operations are compared with.
//!
//! The library is opened at run time, and where there is none, or it refuses, that is [`GpuError::Unavailable`]. The types
//! are those of the crate `cudarc`, called as the driver's are ([`super::driver`]), with codes that are numbers.
//!
//! NCCL waits without a limit, for its peers while it starts and while two of them first talk. So both are done in a thread
//! that this one waits for within a limit. Its own non-blocking mode makes a thread in each call, which would be measured.

use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use cudarc::nccl::sys;
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclResult_t, ncclUniqueId};
use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};

use super::CudaGpu;
use crate::gpu::{GpuError, SymmetricBuffer};

/// The library's file name. Its number is that of NCCL's major version.
pub const LIBRARY: &str = "libnccl.so.2";
/// What makes PEs of one host find each other over the loopback interface: only what the user has not set.
const ONE_HOST: (&str, &str) = ("NCCL_SOCKET_IFNAME", "lo");
const SUCCESS: u32 = ncclResult_t::ncclSuccess as u32;
const ID_BYTES: usize = size_of::<ncclUniqueId>();

/// Defines [`Functions`]: each of `cudarc`'s type, but for the code that it returns.
macro_rules! functions {
    ($($name:ident($($arg:ty),*) -> $code:ty = $raw:ty;)*) => {
        /// NCCL's functions, looked up.
        #[allow(non_snake_case)]
        struct Functions { $($name: unsafe extern "C" fn($($arg),*) -> $raw,)* }

        impl Functions {
            /// Looks all of them up; the error is the dynamic loader's.
            ///
            /// # Safety
            /// The library is NCCL, and stays open.
            unsafe fn of(library: &libloading::os::unix::Library) -> Result<Functions, libloading::Error> {
                // SAFETY: by this function's contract they have these types, which `cudarc` made from NCCL's header.
                unsafe { Ok(Functions { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* }) }
            }
        }

        // A function of another type does not compile. Nothing calls `cudarc`'s: they panic without the library.
        $(const _: unsafe fn($($arg),*) -> $code = sys::$name;)*
    };
}

functions! {
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

/// The library, opened once and never closed: it leaves threads behind.
pub struct Library {
    functions: Functions,
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
    FOUND.get_or_init(open).as_ref().map_err(|message| GpuError::Unavailable(message.clone()))
}

fn open() -> Result<Library, String> {
    let place = places(std::env::var_os("NCCL_HOME").as_deref()).swap_remove(0);
    let error = |error: libloading::Error| {
        let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        format!("no NCCL ({cause}): set NCCL_HOME (docs/cuda.md)")
    };
    // SAFETY: a file of the library's name, where it is to be; kept open for ever.
    let functions = unsafe {
        let library = libloading::os::unix::Library::open(Some(&place), RTLD_NOW | RTLD_LOCAL).map_err(error)?;
        let functions = Functions::of(&library).map_err(error)?;
        std::mem::forget(library);
        functions
    };
    let mut number = 0;
    // SAFETY: sets the number; needs nothing else.
    unsafe { (functions.ncclGetVersion)(&raw mut number) };
    Ok(Library { functions, version: parse_version(number.unsigned_abs()) })
}

/// NCCL's number of a version: 1000 major + 100 minor + patch until 2.8, 10000 major from 2.9 on.
fn parse_version(number: u32) -> [u32; 3] {
    let per_major = if number < 10000 { 1000 } else { 10000 };
    [number / per_major, number % per_major / 100, number % 100]
}

/// The environment variable that the processes of PEs on one host are to be started with, unless it is set.
pub fn one_host_environment() -> Option<(String, String)> {
    let (name, value) = ONE_HOST;
    std::env::var_os(name).is_none().then(|| (name.to_string(), value.to_string()))
}

impl Library {
    /// What NCCL says of an error: its last message, which names the cause, or else the code.
    fn check(&self, code: u32, what: &str) -> Result<(), GpuError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: takes no communicator, and returns a string of NCCL's or null.
        let last = unsafe {
            let text = (self.functions.ncclGetLastError)(ptr::null_mut());
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        let last = last.split_whitespace().collect::<Vec<_>>().join(" ");
        let [major, minor, patch] = self.version;
        let says = if last.is_empty() { String::new() } else { format!(" ({last})") };
        Err(GpuError::failed(what, format!("NCCL {major}.{minor}.{patch} answers {code}{says}")))
    }
}

/// NCCL's refusal to start: what does not need NCCL goes on without it.
fn refused(error: GpuError) -> GpuError {
    GpuError::Unavailable(error.to_string())
}

/// A communicator of all PEs, on this PE's stream. Ended when dropped, whatever the others do.
pub struct Nccl<'g> {
    gpu: &'g CudaGpu,
    library: &'static Library,
    communicator: ncclComm_t,
}

/// What the starting thread hands over.
struct Started(ncclComm_t);

// SAFETY: a communicator may be used by any thread, one at a time.
unsafe impl Send for Started {}

impl CudaGpu {
    /// Starts NCCL among the PEs, and has every PE send a byte to the next one (collective). `place` is used for that, its
    /// first 512 bytes.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`], on all PEs alike, where one has no NCCL, or NCCL refuses, as it does several PEs on one
    /// device. All else is for the end of the process: something that is not ready within `limit`.
    ///
    /// # Panics
    /// If the place is shorter.
    pub fn nccl(&self, place: &SymmetricBuffer<'_>, limit: Duration) -> Result<Nccl<'_>, GpuError> {
        assert!(place.bytes() >= 512, "a place of {} bytes", place.bytes());
        let start = Instant::now();
        let left = || limit.saturating_sub(start.elapsed());
        let (me, n) = (self.bootstrap.my_pe(), self.bootstrap.n_pes());
        let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
        let found = find_library().and_then(|library| {
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
        let all = self.bootstrap.all_gather(&mine, left())?;
        let library = self.agreed(found, all.chunks(mine.len()).map(|of_pe| of_pe[0] == 1))?;
        id.internal.iter_mut().zip(&all[1..]).for_each(|(to, from)| *to = from.cast_signed());

        let (sender, receiver) = sync_channel(1);
        let (enter, stream, address) = (self.context.enter(), self.context.stream as usize, place.address());
        let run = move || -> Result<Started, GpuError> {
            enter()?;
            let mut communicator = ptr::null_mut();
            // SAFETY: sets the communicator; the id is PE 0's.
            let code =
                unsafe { (library.functions.ncclCommInitRank)(&raw mut communicator, n as c_int, id, me as c_int) };
            library.check(code, "start NCCL")?;
            let (next, before) = (((me + 1) % n) as c_int, ((me + n - 1) % n) as c_int);
            let (stream, byte) = (stream as cudaStream_t, ncclDataType_t::ncclUint8);
            // SAFETY: two places of a byte in memory of this device; both PEs of a pair take part.
            let code = unsafe {
                let f = &library.functions;
                let codes = [
                    (f.ncclGroupStart)(),
                    (f.ncclSend)(address as *const c_void, 1, byte, next, communicator, stream),
                    (f.ncclRecv)((address + 256) as *mut c_void, 1, byte, before, communicator, stream),
                    (f.ncclGroupEnd)(),
                ];
                codes.into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
            };
            library.check(code, "send the first byte by NCCL")?;
            Ok(Started(communicator))
        };
        std::thread::spawn(move || {
            // Nobody hears it where the limit is over: then the process ends.
            let _ = sender.send(run());
        });
        let late = |what: &str| {
            self.context.stuck.set(true);
            GpuError::failed(
                "start NCCL",
                format!("{what} after {:.1} s; NCCL_DEBUG=INFO shows more", limit.as_secs_f64()),
            )
        };
        let started = match receiver.recv_timeout(left()) {
            Ok(started) => started,
            Err(RecvTimeoutError::Timeout) => return Err(late("it is not ready")),
            Err(RecvTimeoutError::Disconnected) => return Err(late("its thread has ended")),
        };
        let started = started.map(|Started(communicator)| Nccl { gpu: self, library, communicator }).map_err(refused);
        let all = self.bootstrap.all_gather(&[started.is_ok().into()], left())?;
        let started = self.agreed(started, all.iter().map(|ready| *ready == 1))?;
        self.synchronise_within(left())?;
        Ok(started)
    }

    /// What this PE has, where all PEs have it.
    fn agreed<T>(&self, mine: Result<T, GpuError>, all: impl Iterator<Item = bool>) -> Result<T, GpuError> {
        let lacking = all.enumerate().find(|(_, has)| !has);
        match (mine, lacking) {
            (Ok(_), Some((pe, _))) => Err(GpuError::Unavailable(format!("no NCCL on PE {pe}"))),
            (mine, _) => mine,
        }
    }
}

impl Nccl<'_> {
    fn stream(&self) -> cudaStream_t {
        self.gpu.context.stream.cast()
    }

    /// Sends to a PE, which receives as many bytes, in the stream's order. Returns without waiting.
    ///
    /// # Safety
    /// `bytes` bytes of this device's memory at `from`, which stay until it is done.
    ///
    /// # Errors
    /// NCCL's.
    pub unsafe fn send(&self, from: u64, bytes: u64, pe: usize) -> Result<(), GpuError> {
        let (from, byte) = (from as *const c_void, ncclDataType_t::ncclUint8);
        // SAFETY: by this function's contract; this PE's stream.
        let code = unsafe {
            let send = self.library.functions.ncclSend;
            send(from, bytes as usize, byte, pe as c_int, self.communicator, self.stream())
        };
        self.library.check(code, "send by NCCL")
    }

    /// Receives from a PE, which sends as many bytes, in the stream's order. Returns without waiting.
    ///
    /// # Safety
    /// `bytes` bytes of this device's memory at `to`, which stay until it is done.
    ///
    /// # Errors
    /// NCCL's.
    pub unsafe fn receive(&self, to: u64, bytes: u64, pe: usize) -> Result<(), GpuError> {
        let (to, byte) = (to as *mut c_void, ncclDataType_t::ncclUint8);
        // SAFETY: by this function's contract; this PE's stream.
        let code = unsafe {
            let receive = self.library.functions.ncclRecv;
            receive(to, bytes as usize, byte, pe as c_int, self.communicator, self.stream())
        };
        self.library.check(code, "receive by NCCL")
    }

    /// What `work` sends and receives, as one operation of the stream's.
    ///
    /// # Errors
    /// `work`'s; NCCL's.
    pub fn group(&self, work: impl FnOnce() -> Result<(), GpuError>) -> Result<(), GpuError> {
        // SAFETY: begins a group in this thread, ended below.
        self.library.check(unsafe { (self.library.functions.ncclGroupStart)() }, "begin a group of NCCL's")?;
        let done = work();
        // SAFETY: begun above.
        let ended = self.library.check(unsafe { (self.library.functions.ncclGroupEnd)() }, "end a group of NCCL's");
        done.and(ended)
    }
}

impl Drop for Nccl<'_> {
    fn drop(&mut self) {
        if self.gpu.context.stuck.get() {
            return;
        }
        // SAFETY: made by `CudaGpu::nccl`, and not used any more. Not ncclCommDestroy, which may wait for the other PEs.
        unsafe { (self.library.functions.ncclCommAbort)(self.communicator) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_nccl_has_them() {
        assert_eq!([2708, 21805, 22703].map(parse_version), [[2, 7, 8], [2, 18, 5], [2, 27, 3]]);
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
