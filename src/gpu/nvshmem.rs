//! NVSHMEM's host library: found, opened, initialised among the PEs, and the operations on symmetric memory.
//!
//! The order is NVSHMEM's: a CUDA context is current, [`Nvshmem::init`] on all PEs at once, then memory, modules
//! ([`Nvshmem::add_module`]) and launches, and at the end [`Nvshmem::finish`] on all PEs at once. The library exits the
//! process where there is no driver, and returns 0 from an initialisation that failed: so the driver is checked first, and
//! the library's status afterwards.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshmem_sys as sys;
use nvshmem_sys::NvshmemHost;

use super::GpuError;

/// The version of the headers that the kernels are built with.
pub const HEADER_VERSION: &str = env!("ARISTOS_NVSHMEM_VERSION");
/// Where the toolchain that this was built with has the library: the last place but the loader's own that is looked at.
const BUILT_WITH: &str = env!("ARISTOS_NVSHMEM_LIB");

/// What confines NVSHMEM to one host: no network transport, no libraries that need one, the loopback interface for the bootstrap.
/// Only what the user has not set.
const ONE_HOST: [(&str, &str); 6] = [
    ("NVSHMEM_REMOTE_TRANSPORT", "none"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NVSHMEM_DISABLE_NCCL", "1"),
    ("NVSHMEM_DISABLE_MNNVL", "1"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "AF_INET"),
];

/// The environment variables that the processes of PEs on one host are to be started with, besides those that are set.
pub fn one_host_environment() -> Vec<(String, String)> {
    let missing = missing_of(&ONE_HOST, |name| std::env::var_os(name));
    missing.into_iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn missing_of<'a>(wanted: &[(&'a str, &'a str)], get: impl Fn(&str) -> Option<OsString>) -> Vec<(&'a str, &'a str)> {
    wanted.iter().filter(|(name, _)| get(name).is_none()).copied().collect()
}

/// How the PEs find each other before there is symmetric memory.
pub trait Bootstrap {
    /// This PE's number.
    fn my_pe(&self) -> usize;
    /// Number of PEs.
    fn n_pes(&self) -> usize;
    /// Whether a network joins the PEs, as on several hosts.
    fn over_network(&self) -> bool {
        false
    }
    /// Every PE's bytes, as many of each, in the order of PEs (collective).
    ///
    /// # Errors
    /// [`GpuError::Barrier`] when a PE does not come within `limit`.
    fn all_gather(&self, mine: &[u8], limit: Duration) -> Result<Vec<u8>, GpuError>;
    /// Waits for all PEs.
    ///
    /// # Errors
    /// [`GpuError::Barrier`] when a PE does not come within `limit`.
    fn barrier(&self, limit: Duration) -> Result<(), GpuError>;
}

impl<T: crate::shmem::Transport> Bootstrap for crate::shmem::Shmem<T> {
    fn over_network(&self) -> bool {
        !(0..self.n_pes()).all(|pe| self.is_reachable(pe))
    }

    fn my_pe(&self) -> usize {
        self.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.n_pes()
    }

    fn all_gather(&self, mine: &[u8], limit: Duration) -> Result<Vec<u8>, GpuError> {
        let mut all = vec![0; mine.len() * self.n_pes()];
        let deadline = std::time::Instant::now() + limit;
        self.all_gather(self.world(), mine, &mut all, deadline).map_err(|timeout| GpuError::Barrier {
            pe: self.my_pe(),
            peer: Some(timeout.index),
            waited: timeout.waited,
        })?;
        Ok(all)
    }

    fn barrier(&self, limit: Duration) -> Result<(), GpuError> {
        // An all-gather of nothing but a byte: unlike a barrier, it says who did not come.
        Bootstrap::all_gather(self, &[0], limit).map(|_| ())
    }
}

/// The host library, opened.
#[derive(Clone, Copy)]
pub struct HostLibrary {
    host: &'static NvshmemHost,
    /// Major, minor, patch.
    pub version: [u32; 3],
}

/// Where the library may be, in the order of the search.
pub fn places(nvshmem_home: Option<&OsStr>) -> Vec<PathBuf> {
    let home = nvshmem_home.filter(|home| !home.is_empty()).map(|home| Path::new(home).join("lib"));
    let in_home = home.into_iter().map(|lib| lib.join(sys::LIBRARY));
    in_home.chain([Path::new(BUILT_WITH).join(sys::LIBRARY), PathBuf::from(sys::LIBRARY)]).collect()
}

/// Opens the first library that is there: in NVSHMEM_HOME/lib, where the build had it, or where the dynamic loader looks;
/// also says where.
///
/// # Errors
/// [`GpuError::Unavailable`]: none is there, one cannot be loaded, or its version does not fit the kernels' device code.
pub fn find_library() -> Result<(PathBuf, HostLibrary), GpuError> {
    let places = places(std::env::var_os("NVSHMEM_HOME").as_deref());
    for place in &places {
        // The last is a name for the loader to find.
        if place.is_absolute() && !place.exists() {
            continue;
        }
        return open_library(place).map(|library| (place.clone(), library));
    }
    Err(GpuError::Unavailable(format!("{} was not found", sys::LIBRARY)))
}

fn open_library(path: &Path) -> Result<HostLibrary, GpuError> {
    // SAFETY: a file of the library's name, where it is to be.
    let host = unsafe { sys::load(path) }.map_err(|error| {
        GpuError::Unavailable(format!("{error}: several PEs need NVSHMEM; set NVSHMEM_HOME (docs/cuda.md)"))
    })?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: writes three numbers, and needs no initialisation.
    unsafe { host.nvshmemx_vendor_get_version_info(&raw mut major, &raw mut minor, &raw mut patch) };
    let version = [major, minor, patch].map(|n: c_int| n.unsigned_abs());
    let wanted = parse_version(HEADER_VERSION);
    if !takes(version, wanted) {
        let [a, b, c] = version;
        return Err(GpuError::Unavailable(format!(
            "{} is NVSHMEM {a}.{b}.{c}, and the kernels are built with {HEADER_VERSION}: a host library of {}.{} is needed, \
             not older than that; set NVSHMEM_HOME to one",
            path.display(),
            wanted[0],
            wanted[1]
        )));
    }
    Ok(HostLibrary { host, version })
}

/// Whether a host library carries out what device code of a version asks for: the same major and minor version, and not older. NVSHMEM
/// itself also takes older device code of the same major version, but the requests to its proxy change with the minor one: 3.5's, for
/// one, reads from a FENCE over how many queue pairs it goes, which in a request of 3.4 is 0, and then orders nothing.
fn takes(host: [u32; 3], device: [u32; 3]) -> bool {
    host[..2] == device[..2] && host >= device
}

fn parse_version(text: &str) -> [u32; 3] {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    std::array::from_fn(|_| parts.next().unwrap_or(0))
}

/// Bytes that move between this PE's device and another's.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Where to: of a put, this PE's address of the symmetric place.
    pub to: u64,
    /// Where from: of a get, this PE's address of the symmetric place.
    pub from: u64,
    /// How many bytes.
    pub bytes: u64,
    /// The other PE.
    pub pe: usize,
}

impl Transfer {
    fn raw(self) -> (*mut c_void, *const c_void, usize, c_int) {
        (self.to as *mut c_void, self.from as *const c_void, self.bytes as usize, self.pe as c_int)
    }
}

/// NVSHMEM, initialised, with this PE as one of its PEs.
pub struct Nvshmem {
    host: &'static NvshmemHost,
    status: c_int,
    modules: RefCell<Vec<sys::CUmodule>>,
    /// The library keeps a pointer to it.
    _id: Box<sys::nvshmemx_uniqueid_v1>,
}

impl Nvshmem {
    /// Initialises it, on all PEs at once: PE 0's unique id goes to all, over `bootstrap`.
    ///
    /// # Safety
    /// This PE's primary context is current in this thread, and stays retained until the end.
    ///
    /// # Errors
    /// A PE that does not come within `limit`; what NVSHMEM answers. Where it cannot start it may also end the process,
    /// with lines of its own.
    pub unsafe fn init(library: HostLibrary, bootstrap: &dyn Bootstrap, limit: Duration) -> Result<Self, GpuError> {
        let host = library.host;
        let (my_pe, n_pes) = (bootstrap.my_pe(), bootstrap.n_pes());
        let mut id = Box::new(sys::unique_id());
        let mut made = 0;
        if my_pe == 0 {
            // SAFETY: fills the id; needs no initialisation.
            made = unsafe { host.nvshmemx_get_uniqueid(&raw mut *id) };
        }
        // What PE 0 made, with its answer, so that nobody waits for an id that does not come.
        let mut mine = Vec::with_capacity(132);
        mine.extend_from_slice(&made.to_ne_bytes());
        mine.extend(id.internal.iter().map(|c| c.cast_unsigned()));
        let all = bootstrap.all_gather(&mine, limit)?;
        check(i32::from_ne_bytes([all[0], all[1], all[2], all[3]]), "make a unique id for NVSHMEM (on PE 0)")?;
        id.internal.iter_mut().zip(&all[4..]).for_each(|(to, from)| *to = from.cast_signed());

        let mut attributes = sys::init_attributes();
        // SAFETY: both outlive the calls; the id, of which a pointer is kept, lives as long as the library is used.
        unsafe {
            check(
                host.nvshmemx_set_attr_uniqueid_args(
                    my_pe as c_int,
                    n_pes as c_int,
                    &raw const *id,
                    &raw mut attributes,
                ),
                "set NVSHMEM's unique id",
            )?;
            check(
                host.nvshmemx_hostlib_init_attr(sys::NVSHMEMX_INIT_WITH_UNIQUEID.unsigned_abs(), &raw mut attributes),
                "initialise NVSHMEM",
            )?;
        }
        // SAFETY: may be called at any time.
        let status = unsafe { host.nvshmemx_init_status() };
        if status < sys::NVSHMEM_STATUS_IS_INITIALIZED as c_int {
            return Err(GpuError::failed("initialise NVSHMEM", format!("it is in status {status}, and 2 is needed")));
        }
        // SAFETY: it is initialised.
        let seen = unsafe { (host.nvshmem_my_pe(), host.nvshmem_n_pes()) };
        if seen != (my_pe as c_int, n_pes as c_int) {
            let message = format!("it takes PE {my_pe} of {n_pes} for PE {} of {}", seen.0, seen.1);
            return Err(GpuError::failed("initialise NVSHMEM", message));
        }
        Ok(Nvshmem { host, status, modules: RefCell::default(), _id: id })
    }

    /// Whether several PEs share a GPU and MPS is not on, or not with equal shares: then only puts, signals, atomics,
    /// allocation and barriers of all PEs work.
    pub fn limited(&self) -> bool {
        self.status == sys::NVSHMEM_STATUS_LIMITED_MPG as c_int
    }

    /// Allocates symmetric memory (collective); 0 when there is none left.
    pub fn malloc(&self, bytes: usize) -> u64 {
        // SAFETY: initialised; an own allocation.
        unsafe { self.host.nvshmem_malloc(bytes) as u64 }
    }

    /// Gives symmetric memory back (collective).
    ///
    /// # Safety
    /// `address` is what [`Nvshmem::malloc`] returned and not freed; nobody uses it any more.
    pub unsafe fn free(&self, address: u64) {
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmem_free(address as *mut c_void) }
    }

    /// This PE's address of what lies at `pe` where `address` is here; 0 where loads and stores do not reach it.
    pub fn ptr(&self, address: u64, pe: usize) -> u64 {
        // SAFETY: initialised; an address outside the heap gives null.
        unsafe { self.host.nvshmem_ptr(address as *const c_void, pe as c_int) as u64 }
    }

    /// Gives a module's device code its state: which PE this is, where the symmetric heaps are.
    ///
    /// # Safety
    /// A module that is loaded in the current context, until [`Nvshmem::finish`].
    ///
    /// # Errors
    /// What NVSHMEM answers: its symbols are not in the module, or are of a version that it does not take.
    pub unsafe fn add_module(&self, module: sys::CUmodule, name: &str) -> Result<(), GpuError> {
        // SAFETY: by this function's contract.
        let code = unsafe { self.host.nvshmemx_cumodule_init(module) };
        check(code, &format!("initialise NVSHMEM in the module {name}"))?;
        self.modules.borrow_mut().push(module);
        Ok(())
    }

    /// Completes, in the stream's order, what this PE's kernels have put.
    ///
    /// # Safety
    /// A stream of the current context.
    pub unsafe fn quiet_on_stream(&self, stream: sys::cudaStream_t) {
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_quiet_on_stream(stream) }
    }

    /// Puts, in the stream's order: complete there after a quiet on it.
    ///
    /// # Safety
    /// A stream of the current context, and a valid transfer until it is done.
    pub unsafe fn put_on_stream(&self, t: Transfer, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_putmem_on_stream(to, from, bytes, pe, stream) }
    }

    /// Gets, in the stream's order: what follows on it sees the bytes.
    ///
    /// # Safety
    /// As of [`Nvshmem::put_on_stream`].
    pub unsafe fn get_on_stream(&self, t: Transfer, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_getmem_on_stream(to, from, bytes, pe, stream) }
    }

    /// Puts, and sets the word at the symmetric `signal` to `value` when the bytes are there, in the stream's order.
    ///
    /// # Safety
    /// As of [`Nvshmem::put_on_stream`]; `signal` is an aligned word of symmetric memory.
    pub unsafe fn put_signal_on_stream(&self, t: Transfer, signal: u64, value: u64, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        let (signal, set) = (signal as *mut u64, sys::NVSHMEM_SIGNAL_SET as c_int);
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_putmem_signal_on_stream(to, from, bytes, signal, value, set, pe, stream) }
    }

    /// Makes the stream wait until this PE's word at `signal` is `value` or more. Not where [`Nvshmem::limited`]: there it ends
    /// the process.
    ///
    /// # Safety
    /// A stream of the current context; an aligned word of symmetric memory, which stays until then.
    pub unsafe fn wait_signal_on_stream(&self, signal: u64, value: u64, stream: sys::cudaStream_t) {
        let at_least = sys::NVSHMEM_CMP_GE as c_int;
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_signal_wait_until_on_stream(signal as *mut u64, at_least, value, stream) }
    }

    /// Ends it (collective): to be called when all PEs have come to the end. Without it the process may end, but
    /// nothing more is freed.
    pub fn finish(self) {
        for module in self.modules.borrow_mut().drain(..) {
            // SAFETY: initialised, and not unloaded. A refusal changes nothing any more.
            let _ = unsafe { self.host.nvshmemx_cumodule_finalize(module) };
        }
        // SAFETY: initialised, and not used after this.
        unsafe { self.host.nvshmemx_hostlib_finalize() }
    }
}

fn check(code: c_int, what: &str) -> Result<(), GpuError> {
    if code == 0 {
        return Ok(());
    }
    let message = format!("NVSHMEM answers {code}; NVSHMEM_DEBUG=INFO shows more");
    Err(GpuError::failed(what, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_library_takes_device_code_of_its_own_minor_version() {
        let hosts = [
            ([3, 4, 5], true),
            ([3, 4, 6], true),
            ([3, 5, 1], false),
            ([3, 8, 0], false),
            ([3, 4, 4], false),
            ([3, 0, 9], false),
            ([4, 4, 5], false),
        ];
        for (host, takes_it) in hosts {
            assert_eq!(takes(host, [3, 4, 5]), takes_it, "{host:?}");
        }
        assert_eq!(parse_version("3.4.5"), [3, 4, 5]);
    }

    #[test]
    fn the_user_s_home_comes_first_and_the_loader_s_path_last() {
        let found = places(Some(OsStr::new("/opt/nvshmem")));
        assert_eq!(found.first().map(PathBuf::as_path), Some(Path::new("/opt/nvshmem/lib/libnvshmem_host.so.3")));
        assert_eq!(found.last().map(PathBuf::as_path), Some(Path::new("libnvshmem_host.so.3")));
        assert_eq!(places(None).len(), found.len() - 1);
        assert_eq!(places(Some(OsStr::new(""))), places(None));
    }

    #[test]
    fn what_the_user_set_stays() {
        let missing = missing_of(&ONE_HOST, |name| (name == "NVSHMEM_REMOTE_TRANSPORT").then(|| "ibrc".into()));
        assert!(missing.iter().all(|(name, _)| *name != "NVSHMEM_REMOTE_TRANSPORT"));
        assert_eq!(missing.len(), ONE_HOST.len() - 1);
        assert!(missing.contains(&("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")));
    }
}
