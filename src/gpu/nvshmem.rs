//! NVSHMEM's host library: search, loading, initialisation among the PEs, and host operations on symmetric memory.
//!
//! NVSHMEM prescribes this order: make a CUDA context current, call [`Nvshmem::init`] on all PEs, allocate memory, add modules
//! ([`Nvshmem::add_module`]), launch kernels, and finally call [`Nvshmem::finish`] on all PEs. If there is no driver, the library exits the
//! process, so the driver is checked before the initialisation. The library returns 0 even if the initialisation has failed, so its status
//! is checked afterwards.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshmem_sys as sys;
use nvshmem_sys::NvshmemHost;

use super::GpuError;

/// The version of the NVSHMEM headers that the kernels were compiled with.
pub const HEADER_VERSION: &str = env!("ARISTOS_NVSHMEM_VERSION");
/// The library folder of the toolchain that built this crate. It is searched before the loader's path.
const TOOLCHAIN_LIB: &str = env!("ARISTOS_NVSHMEM_LIB");

/// Environment variables that confine NVSHMEM to one host. They disable the network transport and the libraries that need one, and make the
/// PEs connect over the loopback interface. Variables that the user has set are kept.
const ONE_HOST: [(&str, &str); 6] = [
    ("NVSHMEM_REMOTE_TRANSPORT", "none"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NVSHMEM_DISABLE_NCCL", "1"),
    ("NVSHMEM_DISABLE_MNNVL", "1"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "AF_INET"),
];

/// Returns the environment variables that must be added when the PE processes of a single host are started.
pub fn one_host_environment() -> Vec<(String, String)> {
    let missing = unset_variables(&ONE_HOST, |name| std::env::var_os(name));
    missing.into_iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
}

fn unset_variables<'a>(
    wanted: &[(&'a str, &'a str)],
    get: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'a str, &'a str)> {
    wanted.iter().filter(|(name, _)| get(name).is_none()).copied().collect()
}

/// Communication among the PEs before symmetric memory exists.
pub trait Bootstrap {
    /// This PE's number.
    fn my_pe(&self) -> usize;
    /// Number of PEs.
    fn n_pes(&self) -> usize;
    /// Whether a network connects the PEs, which is so if they are on several hosts.
    fn over_network(&self) -> bool {
        false
    }
    /// Returns `mine` of all PEs in the order of the PEs (collective). The length of `mine` must be the same on all PEs.
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a PE is missing after `limit`.
    fn all_gather(&self, mine: &[u8], limit: Duration) -> Result<Vec<u8>, GpuError>;
    /// Waits for all PEs.
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a PE is missing after `limit`.
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
        // An all-gather of one byte is used because its error names the missing PE, which that of a barrier does not.
        Bootstrap::all_gather(self, &[0], limit).map(|_| ())
    }
}

/// The host library, loaded.
#[derive(Clone, Copy)]
pub struct HostLibrary {
    host: &'static NvshmemHost,
    /// The major, minor and patch numbers.
    pub version: [u32; 3],
}

/// Returns the paths at which the library is searched for, in this order.
pub fn candidate_paths(nvshmem_home: Option<&OsStr>) -> Vec<PathBuf> {
    let home = nvshmem_home.filter(|home| !home.is_empty()).map(|home| Path::new(home).join("lib"));
    let in_home = home.into_iter().map(|lib| lib.join(sys::LIBRARY));
    in_home.chain([Path::new(TOOLCHAIN_LIB).join(sys::LIBRARY), PathBuf::from(sys::LIBRARY)]).collect()
}

/// Loads the library, and returns its path too. NVSHMEM_HOME/lib, the toolchain of the build and the dynamic loader's path are searched in
/// this order.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if no library is found, if it cannot be loaded, or if its version does not match that of the kernels'
/// device code.
pub fn find_library() -> Result<(PathBuf, HostLibrary), GpuError> {
    let candidate_paths = candidate_paths(std::env::var_os("NVSHMEM_HOME").as_deref());
    for path in &candidate_paths {
        // The last candidate is a file name without a folder, which the loader searches for.
        if path.is_absolute() && !path.exists() {
            continue;
        }
        return open_library(path).map(|library| (path.clone(), library));
    }
    Err(GpuError::Unavailable(format!("{} was not found", sys::LIBRARY)))
}

fn open_library(path: &Path) -> Result<HostLibrary, GpuError> {
    // SAFETY: `path` ends with the name of NVSHMEM's library, so the constructors and symbols of the file are those of NVSHMEM.
    let host = unsafe { sys::load(path) }.map_err(|error| {
        GpuError::Unavailable(format!("{error}: several PEs need NVSHMEM; set NVSHMEM_HOME (docs/cuda.md)"))
    })?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the function only writes three integers, and may be called before initialisation.
    unsafe { host.nvshmemx_vendor_get_version_info(&raw mut major, &raw mut minor, &raw mut patch) };
    let version = [major, minor, patch].map(|n: c_int| n.unsigned_abs());
    let wanted = parse_version(HEADER_VERSION);
    if !is_compatible(version, wanted) {
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

/// Whether a host library of version `host` can serve device code of version `device`. The major and minor versions must be the same, and
/// the host library must not be older. NVSHMEM itself accepts older device code of the same major version, but the format of the requests
/// to its proxy differs between minor versions. For example, the proxy of 3.5 reads the number of queue pairs from a FENCE request. Device
/// code of 3.4 leaves 0 there, so that its fences order nothing.
fn is_compatible(host: [u32; 3], device: [u32; 3]) -> bool {
    host[..2] == device[..2] && host >= device
}

fn parse_version(text: &str) -> [u32; 3] {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or(0));
    std::array::from_fn(|_| parts.next().unwrap_or(0))
}

/// A copy between this PE's device and a peer's.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// The destination. For a put, it is the address on this PE of the symmetric memory.
    pub to: u64,
    /// The source. For a get, it is the address on this PE of the symmetric memory.
    pub from: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The other PE.
    pub pe: usize,
}

impl Transfer {
    fn raw(self) -> (*mut c_void, *const c_void, usize, c_int) {
        (self.to as *mut c_void, self.from as *const c_void, self.bytes as usize, self.pe as c_int)
    }
}

/// NVSHMEM, initialised.
pub struct Nvshmem {
    host: &'static NvshmemHost,
    status: c_int,
    modules: RefCell<Vec<sys::CUmodule>>,
    /// NVSHMEM keeps a pointer to the id.
    _id: Box<sys::nvshmemx_uniqueid_v1>,
}

impl Nvshmem {
    /// Initialises NVSHMEM on all PEs (collective). PE 0 makes a unique id, which `bootstrap` distributes.
    ///
    /// # Safety
    /// This PE's primary context is current in this thread and stays retained until the process ends.
    ///
    /// # Errors
    /// Returns [`GpuError::Barrier`] if a PE is missing after `limit`, and [`GpuError::Failed`] with NVSHMEM's code if NVSHMEM fails.
    /// NVSHMEM may also exit the process with its own message.
    pub unsafe fn init(library: HostLibrary, bootstrap: &dyn Bootstrap, limit: Duration) -> Result<Self, GpuError> {
        let host = library.host;
        let (my_pe, n_pes) = (bootstrap.my_pe(), bootstrap.n_pes());
        let mut id = Box::new(sys::unique_id());
        let mut made = 0;
        if my_pe == 0 {
            // SAFETY: the function only writes the id, and may be called before initialisation.
            made = unsafe { host.nvshmemx_get_uniqueid(&raw mut *id) };
        }
        // PE 0's return code is sent with the id, so that no PE waits for an id that PE 0 could not make.
        let mut mine = Vec::with_capacity(132);
        mine.extend_from_slice(&made.to_ne_bytes());
        mine.extend(id.internal.iter().map(|c| c.cast_unsigned()));
        let all = bootstrap.all_gather(&mine, limit)?;
        check(i32::from_ne_bytes([all[0], all[1], all[2], all[3]]), "make a unique id for NVSHMEM (on PE 0)")?;
        id.internal.iter_mut().zip(&all[4..]).for_each(|(to, from)| *to = from.cast_signed());

        let mut attributes = sys::init_attributes();
        // SAFETY: `id` and `attributes` outlive the calls. NVSHMEM keeps a pointer to `id`, which stays valid because the result owns `id`.
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
        // SAFETY: the function may be called in any state.
        let status = unsafe { host.nvshmemx_init_status() };
        if status < sys::NVSHMEM_STATUS_IS_INITIALIZED as c_int {
            return Err(GpuError::failed("initialise NVSHMEM", format!("it is in status {status}, and 2 is needed")));
        }
        // SAFETY: the status shows that NVSHMEM is initialised.
        let seen = unsafe { (host.nvshmem_my_pe(), host.nvshmem_n_pes()) };
        if seen != (my_pe as c_int, n_pes as c_int) {
            let message = format!("it is_compatible PE {my_pe} of {n_pes} for PE {} of {}", seen.0, seen.1);
            return Err(GpuError::failed("initialise NVSHMEM", message));
        }
        Ok(Nvshmem { host, status, modules: RefCell::default(), _id: id })
    }

    /// Whether PEs share a GPU without MPS, or with unequal MPS shares. NVSHMEM then supports only puts, signals, atomics,
    /// allocation and barriers of all PEs.
    pub fn limited(&self) -> bool {
        self.status == sys::NVSHMEM_STATUS_LIMITED_MPG as c_int
    }

    /// Allocates symmetric memory and returns its address, or 0 if the heap is full (collective).
    pub fn malloc(&self, bytes: usize) -> u64 {
        // SAFETY: NVSHMEM is initialised.
        unsafe { self.host.nvshmem_malloc(bytes) as u64 }
    }

    /// Frees symmetric memory (collective).
    ///
    /// # Safety
    /// `address` was returned by [`Nvshmem::malloc`], has not been freed, and is no longer used by any PE.
    pub unsafe fn free(&self, address: u64) {
        // SAFETY: the caller meets this function's conditions.
        unsafe { self.host.nvshmem_free(address as *mut c_void) }
    }

    /// Returns the address at which this PE accesses `pe`'s copy of `address`, or 0 if loads and stores do not reach it.
    pub fn ptr(&self, address: u64, pe: usize) -> u64 {
        // SAFETY: NVSHMEM is initialised, and it returns null for an address outside the heap.
        unsafe { self.host.nvshmem_ptr(address as *const c_void, pe as c_int) as u64 }
    }

    /// Initialises the state of NVSHMEM's device code in a module: the PE numbers and the heap addresses.
    ///
    /// # Safety
    /// `module` is loaded in the current context and stays loaded until [`Nvshmem::finish`].
    ///
    /// # Errors
    /// Returns [`GpuError::Failed`] if the module lacks NVSHMEM's symbols or has an incompatible version.
    pub unsafe fn add_module(&self, module: sys::CUmodule, name: &str) -> Result<(), GpuError> {
        // SAFETY: the caller meets this function's conditions.
        let code = unsafe { self.host.nvshmemx_cumodule_init(module) };
        check(code, &format!("initialise NVSHMEM in the module {name}"))?;
        self.modules.borrow_mut().push(module);
        Ok(())
    }

    /// Enqueues a wait on the stream until all puts of this PE are complete.
    ///
    /// # Safety
    /// `stream` belongs to the current context.
    pub unsafe fn quiet_on_stream(&self, stream: sys::cudaStream_t) {
        // SAFETY: the caller meets this function's conditions.
        unsafe { self.host.nvshmemx_quiet_on_stream(stream) }
    }

    /// Enqueues a put on the stream. The put is complete after [`Nvshmem::quiet_on_stream`].
    ///
    /// # Safety
    /// `stream` belongs to the current context, and the addresses of the transfer stay valid until it completes.
    pub unsafe fn put_on_stream(&self, t: Transfer, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        // SAFETY: the caller meets this function's conditions.
        unsafe { self.host.nvshmemx_putmem_on_stream(to, from, bytes, pe, stream) }
    }

    /// Enqueues a get on the stream. Later operations of the stream see the bytes.
    ///
    /// # Safety
    /// The conditions are those of [`Nvshmem::put_on_stream`].
    pub unsafe fn get_on_stream(&self, t: Transfer, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        // SAFETY: the caller meets this function's conditions.
        unsafe { self.host.nvshmemx_getmem_on_stream(to, from, bytes, pe, stream) }
    }

    /// Enqueues a put on the stream that also sets the peer's symmetric word `signal` to `value`. The signal arrives after the data.
    ///
    /// # Safety
    /// The conditions are those of [`Nvshmem::put_on_stream`], and `signal` is an aligned word of symmetric memory.
    pub unsafe fn put_signal_on_stream(&self, t: Transfer, signal: u64, value: u64, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        let (signal, set) = (signal as *mut u64, sys::NVSHMEM_SIGNAL_SET as c_int);
        // SAFETY: the caller meets this function's conditions.
        unsafe { self.host.nvshmemx_putmem_signal_on_stream(to, from, bytes, signal, value, set, pe, stream) }
    }

    /// Makes the stream wait until this PE's word at `signal` is at least `value`. This must not be called if [`Nvshmem::limited`] is true,
    /// because NVSHMEM would exit the process.
    ///
    /// # Safety
    /// `stream` belongs to the current context, and `signal` is an aligned word of symmetric memory that stays allocated until the wait
    /// ends.
    pub unsafe fn wait_signal_on_stream(&self, signal: u64, value: u64, stream: sys::cudaStream_t) {
        let at_least = sys::NVSHMEM_CMP_GE as c_int;
        // SAFETY: the caller meets this function's conditions.
        unsafe { self.host.nvshmemx_signal_wait_until_on_stream(signal as *mut u64, at_least, value, stream) }
    }

    /// Finalises NVSHMEM (collective). All PEs must have finished their work. A process may exit without this call, but its symmetric
    /// memory is then not freed.
    pub fn finish(self) {
        for module in self.modules.borrow_mut().drain(..) {
            // SAFETY: the module is initialised and still loaded. An error is ignored, because it has no effect at shutdown.
            let _ = unsafe { self.host.nvshmemx_cumodule_finalize(module) };
        }
        // SAFETY: NVSHMEM is initialised, and is not used afterwards because `self` is consumed.
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
    fn host_library_is_compatible_within_minor_version() {
        let hosts = [
            ([3, 4, 5], true),
            ([3, 4, 6], true),
            ([3, 5, 1], false),
            ([3, 8, 0], false),
            ([3, 4, 4], false),
            ([3, 0, 9], false),
            ([4, 4, 5], false),
        ];
        for (host, compatible) in hosts {
            assert_eq!(is_compatible(host, [3, 4, 5]), compatible, "{host:?}");
        }
        assert_eq!(parse_version("3.4.5"), [3, 4, 5]);
    }

    #[test]
    fn candidates_start_with_home_and_end_with_loader_path() {
        let found = candidate_paths(Some(OsStr::new("/opt/nvshmem")));
        assert_eq!(found.first().map(PathBuf::as_path), Some(Path::new("/opt/nvshmem/lib/libnvshmem_host.so.3")));
        assert_eq!(found.last().map(PathBuf::as_path), Some(Path::new("libnvshmem_host.so.3")));
        assert_eq!(candidate_paths(None).len(), found.len() - 1);
        assert_eq!(candidate_paths(Some(OsStr::new(""))), candidate_paths(None));
    }

    #[test]
    fn variables_of_the_user_are_kept() {
        let missing = unset_variables(&ONE_HOST, |name| (name == "NVSHMEM_REMOTE_TRANSPORT").then(|| "ibrc".into()));
        assert!(missing.iter().all(|(name, _)| *name != "NVSHMEM_REMOTE_TRANSPORT"));
        assert_eq!(missing.len(), ONE_HOST.len() - 1);
        assert!(missing.contains(&("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")));
    }
}
