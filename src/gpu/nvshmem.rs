//! NVSHMEM's host library: search, loading, initialisation among the PEs, and host operations on symmetric memory.
//!
//! NVSHMEM prescribes the order: make a CUDA context current, call [`Nvshmem::init`] on all PEs, allocate, add modules
//! ([`Nvshmem::add_module`]) and launch, and finally call [`Nvshmem::finish`] on all PEs. Without a driver the library exits
//! the process, and it returns 0 from a failed initialisation; so the driver is checked before, and the library's status after.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshmem_sys as sys;
use nvshmem_sys::NvshmemHost;

use super::GpuError;

/// Version of the NVSHMEM headers that the kernels were compiled with.
pub const HEADER_VERSION: &str = env!("ARISTOS_NVSHMEM_VERSION");
/// Library folder of the toolchain that built this crate; searched before the loader's path.
const TOOLCHAIN_LIB: &str = env!("ARISTOS_NVSHMEM_LIB");

/// Confines NVSHMEM to one host: no network transport, none of the libraries that need one, bootstrap over loopback. Variables
/// that the user has set are kept.
const ONE_HOST: [(&str, &str); 6] = [
    ("NVSHMEM_REMOTE_TRANSPORT", "none"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
    ("NVSHMEM_DISABLE_NCCL", "1"),
    ("NVSHMEM_DISABLE_MNNVL", "1"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"),
    ("NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "AF_INET"),
];

/// The missing environment variables with which the PE processes of a single host must be started.
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
    /// Whether a network connects the PEs, as between several hosts.
    fn over_network(&self) -> bool {
        false
    }
    /// Gathers equally long `mine` of all PEs, in PE order (collective).
    ///
    /// # Errors
    /// [`GpuError::Barrier`] if a PE is missing after `limit`.
    fn all_gather(&self, mine: &[u8], limit: Duration) -> Result<Vec<u8>, GpuError>;
    /// Waits for all PEs.
    ///
    /// # Errors
    /// [`GpuError::Barrier`] if a PE is missing after `limit`.
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
        // A one-byte all-gather, because it names the missing PE; a barrier does not.
        Bootstrap::all_gather(self, &[0], limit).map(|_| ())
    }
}

/// The loaded host library.
#[derive(Clone, Copy)]
pub struct HostLibrary {
    host: &'static NvshmemHost,
    /// Major, minor, patch.
    pub version: [u32; 3],
}

/// Candidate paths of the library, in search order.
pub fn candidate_paths(nvshmem_home: Option<&OsStr>) -> Vec<PathBuf> {
    let home = nvshmem_home.filter(|home| !home.is_empty()).map(|home| Path::new(home).join("lib"));
    let in_home = home.into_iter().map(|lib| lib.join(sys::LIBRARY));
    in_home.chain([Path::new(TOOLCHAIN_LIB).join(sys::LIBRARY), PathBuf::from(sys::LIBRARY)]).collect()
}

/// Loads the first existing library of NVSHMEM_HOME/lib, the build's toolchain, and the dynamic loader's path. Also returns its
/// path.
///
/// # Errors
/// [`GpuError::Unavailable`] if no library is found, it cannot be loaded, or its version does not match the kernels' device
/// code.
pub fn find_library() -> Result<(PathBuf, HostLibrary), GpuError> {
    let candidate_paths = candidate_paths(std::env::var_os("NVSHMEM_HOME").as_deref());
    for path in &candidate_paths {
        // The last candidate is a bare name, resolved by the loader.
        if path.is_absolute() && !path.exists() {
            continue;
        }
        return open_library(path).map(|library| (path.clone(), library));
    }
    Err(GpuError::Unavailable(format!("{} was not found", sys::LIBRARY)))
}

fn open_library(path: &Path) -> Result<HostLibrary, GpuError> {
    // SAFETY: `path` ends in NVSHMEM's library name, so its constructors and symbols are NVSHMEM's.
    let host = unsafe { sys::load(path) }.map_err(|error| {
        GpuError::Unavailable(format!("{error}: several PEs need NVSHMEM; set NVSHMEM_HOME (docs/cuda.md)"))
    })?;
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: writes three integers; may be called before initialisation.
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

/// Whether a host library can serve device code of version `device`: same major and minor version, and not older. NVSHMEM
/// itself accepts older device code of the same major version, but its proxy's request format changes between minor versions:
/// 3.5 reads the number of queue pairs from a FENCE request, where 3.4 leaves 0, so such a fence orders nothing.
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
    /// Destination; for a put, this PE's address of the symmetric memory.
    pub to: u64,
    /// Source; for a get, this PE's address of the symmetric memory.
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
    /// Initialises NVSHMEM on all PEs (collective). PE 0's unique id is distributed over `bootstrap`.
    ///
    /// # Safety
    /// This PE's primary context is current in this thread and stays retained until the process ends.
    ///
    /// # Errors
    /// [`GpuError::Barrier`] if a PE is missing after `limit`; [`GpuError::Failed`] with NVSHMEM's code. NVSHMEM may also exit
    /// the process with its own message.
    pub unsafe fn init(library: HostLibrary, bootstrap: &dyn Bootstrap, limit: Duration) -> Result<Self, GpuError> {
        let host = library.host;
        let (my_pe, n_pes) = (bootstrap.my_pe(), bootstrap.n_pes());
        let mut id = Box::new(sys::unique_id());
        let mut made = 0;
        if my_pe == 0 {
            // SAFETY: fills the id; may be called before initialisation.
            made = unsafe { host.nvshmemx_get_uniqueid(&raw mut *id) };
        }
        // The id with PE 0's return code, so that no PE waits for an id that PE 0 could not create.
        let mut mine = Vec::with_capacity(132);
        mine.extend_from_slice(&made.to_ne_bytes());
        mine.extend(id.internal.iter().map(|c| c.cast_unsigned()));
        let all = bootstrap.all_gather(&mine, limit)?;
        check(i32::from_ne_bytes([all[0], all[1], all[2], all[3]]), "make a unique id for NVSHMEM (on PE 0)")?;
        id.internal.iter_mut().zip(&all[4..]).for_each(|(to, from)| *to = from.cast_signed());

        let mut attributes = sys::init_attributes();
        // SAFETY: `id` and `attributes` outlive the calls; `id`, to which NVSHMEM keeps a pointer, moves into the result.
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
        // SAFETY: may be called in any state.
        let status = unsafe { host.nvshmemx_init_status() };
        if status < sys::NVSHMEM_STATUS_IS_INITIALIZED as c_int {
            return Err(GpuError::failed("initialise NVSHMEM", format!("it is in status {status}, and 2 is needed")));
        }
        // SAFETY: NVSHMEM is initialised, as the status shows.
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

    /// Allocates symmetric memory (collective); returns 0 if the heap is full.
    pub fn malloc(&self, bytes: usize) -> u64 {
        // SAFETY: NVSHMEM is initialised.
        unsafe { self.host.nvshmem_malloc(bytes) as u64 }
    }

    /// Frees symmetric memory (collective).
    ///
    /// # Safety
    /// `address` was returned by [`Nvshmem::malloc`], has not been freed, and is no longer used by any PE.
    pub unsafe fn free(&self, address: u64) {
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmem_free(address as *mut c_void) }
    }

    /// The address on this PE of `pe`'s copy of `address`; 0 if loads and stores do not reach it.
    pub fn ptr(&self, address: u64, pe: usize) -> u64 {
        // SAFETY: NVSHMEM is initialised; it returns null for an address outside the heap.
        unsafe { self.host.nvshmem_ptr(address as *const c_void, pe as c_int) as u64 }
    }

    /// Initialises NVSHMEM's device state (PE numbers, heap addresses) in a module.
    ///
    /// # Safety
    /// `module` is loaded in the current context and stays loaded until [`Nvshmem::finish`].
    ///
    /// # Errors
    /// [`GpuError::Failed`] if the module lacks NVSHMEM's symbols or has an incompatible version.
    pub unsafe fn add_module(&self, module: sys::CUmodule, name: &str) -> Result<(), GpuError> {
        // SAFETY: by this function's contract.
        let code = unsafe { self.host.nvshmemx_cumodule_init(module) };
        check(code, &format!("initialise NVSHMEM in the module {name}"))?;
        self.modules.borrow_mut().push(module);
        Ok(())
    }

    /// Completes all puts of this PE's kernels, in stream order.
    ///
    /// # Safety
    /// `stream` belongs to the current context.
    pub unsafe fn quiet_on_stream(&self, stream: sys::cudaStream_t) {
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_quiet_on_stream(stream) }
    }

    /// Puts, in stream order. The put is complete after a quiet on the stream.
    ///
    /// # Safety
    /// `stream` belongs to the current context; the transfer's addresses stay valid until it completes.
    pub unsafe fn put_on_stream(&self, t: Transfer, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_putmem_on_stream(to, from, bytes, pe, stream) }
    }

    /// Gets, in stream order: later operations of the stream see the bytes.
    ///
    /// # Safety
    /// As for [`Nvshmem::put_on_stream`].
    pub unsafe fn get_on_stream(&self, t: Transfer, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_getmem_on_stream(to, from, bytes, pe, stream) }
    }

    /// Puts and then sets the symmetric word `signal` to `value`, in stream order. The signal arrives after the data.
    ///
    /// # Safety
    /// As for [`Nvshmem::put_on_stream`]; `signal` is an aligned word of symmetric memory.
    pub unsafe fn put_signal_on_stream(&self, t: Transfer, signal: u64, value: u64, stream: sys::cudaStream_t) {
        let (to, from, bytes, pe) = t.raw();
        let (signal, set) = (signal as *mut u64, sys::NVSHMEM_SIGNAL_SET as c_int);
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_putmem_signal_on_stream(to, from, bytes, signal, value, set, pe, stream) }
    }

    /// Makes the stream wait until this PE's word at `signal` is at least `value`. Must not be called if [`Nvshmem::limited`]:
    /// NVSHMEM would exit the process.
    ///
    /// # Safety
    /// `stream` belongs to the current context; `signal` is an aligned word of symmetric memory that stays allocated.
    pub unsafe fn wait_signal_on_stream(&self, signal: u64, value: u64, stream: sys::cudaStream_t) {
        let at_least = sys::NVSHMEM_CMP_GE as c_int;
        // SAFETY: by this function's contract.
        unsafe { self.host.nvshmemx_signal_wait_until_on_stream(signal as *mut u64, at_least, value, stream) }
    }

    /// Finalises NVSHMEM (collective), once all PEs have finished their work. A process may exit without it; its memory is then
    /// not freed.
    pub fn finish(self) {
        for module in self.modules.borrow_mut().drain(..) {
            // SAFETY: the module is initialised and still loaded. An error has no consequence at shutdown.
            let _ = unsafe { self.host.nvshmemx_cumodule_finalize(module) };
        }
        // SAFETY: initialised; `self` is consumed, so this is the last use.
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
