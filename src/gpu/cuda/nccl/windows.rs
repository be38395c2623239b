//! Symmetric memory that NCCL provides. Each PE registers device memory as a window of a communicator, and NCCL maps it on every PE that
//! can access it by loads and stores (NCCL's LSA team). All PEs must be on one host, and their devices must reach each other. NCCL runs no
//! device code for this, and the layer's kernels only use addresses.
//!
//! All functions except [`Windows::peer`] are collective. Before NCCL is called, the PEs synchronise, because NCCL waits for a missing PE
//! without naming it. Afterwards they exchange their results, so that all PEs return the same outcome.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::time::Duration;

use cudarc::nccl::sys::{ncclResult_t, ncclWindow_t};

use super::super::context::Context;
use super::{
    Communicator, Deadline, ForWindows, Library, OLDEST_WITH_SHARED_DEVICES, SHARED_DEVICES, SUCCESS, dotted,
    find_library, loaded_library, require_all, start, unavailable, within,
};
use crate::gpu::GpuError;
use crate::gpu::nvshmem::Bootstrap;

/// `NCCL_WIN_COLL_SYMMETRIC` of nccl.h, with which all ranks register the same number of bytes.
const SYMMETRIC: c_int = 1;
const IN_PROGRESS: u32 = ncclResult_t::ncclInProgress as u32;
/// The interval at which a non-blocking communicator is queried.
const POLL: Duration = Duration::from_micros(200);
/// Size of the allocation that tests the windows.
const TEST_BYTES: u64 = 4096;

/// What a collective operation needs: the context, the bootstrap and a time limit.
#[derive(Clone, Copy)]
pub(in crate::gpu::cuda) struct CollectiveContext<'a> {
    pub context: &'a Context,
    pub bootstrap: &'a dyn Bootstrap,
    pub limit: Duration,
}

/// A communicator and its registered memory.
pub(in crate::gpu::cuda) struct Windows {
    library: &'static Library,
    functions: &'static ForWindows,
    communicator: Communicator,
    /// Whether this value owns the communicator, and therefore ends it.
    own: bool,
    /// The key is the address of the memory on this PE.
    allocations: RefCell<BTreeMap<u64, Allocation>>,
}

struct Allocation {
    bytes: u64,
    window: Window,
    /// For each PE: the address at which this PE accesses that PE's memory.
    peers: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Window(ncclWindow_t);

// SAFETY: the value is an opaque handle, which NCCL accepts from any thread.
unsafe impl Send for Window {}

/// The result of a registration on one PE, which is sent to all PEs: a state and a PE, which for [`UNREACHABLE`] is the unreachable PE.
type Outcome = [u8; 5];
const REGISTERED: u8 = 0;
const FAILED: u8 = 1;
const NO_WINDOW: u8 = 2;
const UNREACHABLE: u8 = 3;

fn outcome(state: u8, pe: usize) -> Outcome {
    let [a, b, c, d] = u32::try_from(pe).unwrap_or(u32::MAX).to_le_bytes();
    [state, a, b, c, d]
}

impl Windows {
    /// Starts a communicator of all PEs and checks that every PE reaches every other. `sharing` is the number of PEs on this
    /// PE's device.
    ///
    /// # Errors
    /// Returns [`GpuError::Unavailable`], on all PEs, if NCCL is missing or too old, PEs share a device without permission, or devices do
    /// not reach each other.
    pub fn start(pes: CollectiveContext<'_>, sharing: usize) -> Result<Self, GpuError> {
        let found = find_library().and_then(|library| {
            library.check_windows()?;
            check_sharing(library.version, sharing, std::env::var(SHARED_DEVICES).ok().as_deref())?;
            Ok(library)
        });
        let (library, communicator) =
            start(found, (pes.context, pes.bootstrap), Deadline::after(pes.limit), |_, _| Ok(()))?;
        tracing::debug!(pe = pes.bootstrap.my_pe(), library = %library.path.display(), version = ?library.version, "NCCL");
        let functions = library.for_windows()?;
        let windows = Windows { library, functions, communicator, own: true, allocations: RefCell::default() };
        windows.test_allocation(pes)?;
        Ok(windows)
    }

    /// Uses a communicator of the caller and checks that every PE reaches every other. The communicator's ranks must be the PEs.
    ///
    /// # Safety
    /// `communicator` belongs to the NCCL that is loaded in this process and to the context's device, and outlives this value. Nothing else
    /// uses it during a call of a function of this type.
    ///
    /// # Errors
    /// Returns the same errors as [`Windows::start`], and [`GpuError::Unavailable`] if the ranks differ from the PEs.
    pub unsafe fn share(communicator: usize, pes: CollectiveContext<'_>) -> Result<Self, GpuError> {
        let communicator = Communicator(communicator as *mut _);
        // SAFETY: the caller meets this function's conditions.
        let found = unsafe { ranks(communicator) }.and_then(|(library, rank, of)| {
            let (me, n) = (pes.bootstrap.my_pe(), pes.bootstrap.n_pes());
            if (rank, of) != (me, n) {
                let message = format!(
                    "the communicator's rank is {rank} of {of}, and this is PE {me} of {n}: both must be the same"
                );
                return Err(GpuError::Unavailable(message));
            }
            Ok((library, library.for_windows()?))
        });
        let all = pes.bootstrap.all_gather(&[found.is_ok().into()], pes.limit)?;
        let (library, functions) = require_all(found, all.iter().map(|has| *has == 1))?;
        let windows = Windows { library, functions, communicator, own: false, allocations: RefCell::default() };
        windows.test_allocation(pes)?;
        Ok(windows)
    }

    fn test_allocation(&self, pes: CollectiveContext<'_>) -> Result<(), GpuError> {
        let address = self.alloc(pes, TEST_BYTES).map_err(unavailable)?;
        // SAFETY: the memory was allocated above and is not used, and all PEs have registered it.
        unsafe { self.free(address) };
        Ok(())
    }

    /// Allocates and registers memory, and returns its address on this PE.
    ///
    /// # Errors
    /// Returns [`GpuError::OutOfMemory`], on every PE, if one has too little memory, [`GpuError::Failed`] if the PEs request different
    /// sizes, and [`GpuError::Barrier`] if a PE is missing.
    pub fn alloc(&self, pes: CollectiveContext<'_>, bytes: u64) -> Result<u64, GpuError> {
        let functions = &self.functions.functions;
        let mut address = ptr::null_mut();
        // SAFETY: the function only writes the address, and the device's context is current in this thread.
        let code = unsafe { (functions.ncclMemAlloc)(&raw mut address, bytes as usize) };
        let made = self.library.check(code, &format!("allocate {bytes} bytes of symmetric memory"));
        // NCCL returns the same code for all driver errors, so NCCL's message is searched.
        let (free, total) = pes.context.memory().unwrap_or((0, 0));
        let full = made.is_err() && (bytes > free || self.library.last_error().contains("out of memory"));
        let mine = AllocResult { state: if full { FULL } else { u64::from(made.is_err()) }, bytes, free, total };
        let all = pes.bootstrap.all_gather(&mine.to_bytes(), pes.limit)?;
        if let Err(error) = agree_on_size(made, bytes, &all) {
            if code == SUCCESS {
                // SAFETY: the memory was allocated above, is not registered, and is not used afterwards.
                self.log_error("free symmetric memory", unsafe { (functions.ncclMemFree)(address) });
            }
            return Err(error);
        }
        self.register(pes, address as u64, bytes).inspect_err(|_| {
            if !pes.context.stuck.get() {
                // SAFETY: the memory was allocated above, is no longer registered, and is not used afterwards.
                self.log_error("free symmetric memory", unsafe { (functions.ncclMemFree)(address) });
            }
        })
    }

    /// Registers memory that every PE has allocated.
    fn register(&self, pes: CollectiveContext<'_>, address: u64, bytes: u64) -> Result<u64, GpuError> {
        let (me, n) = (pes.bootstrap.my_pe(), pes.bootstrap.n_pes());
        let (library, functions, communicator) = (self.library, self.functions, self.communicator);
        let what = "register symmetric memory with NCCL";
        let work = move || {
            let handle = communicator;
            let mut window = ptr::null_mut();
            // SAFETY: `address` points to `bytes` bytes of this device's memory. `window` is valid until NCCL has written it, which happens
            // before the communicator has settled.
            let code = unsafe {
                let register = functions.functions.ncclCommWindowRegister;
                let code = register(handle.0, address as *mut c_void, bytes as usize, &raw mut window, SYMMETRIC);
                wait_until_settled(functions, handle, code)
            };
            library.check(code, what)?;
            // SAFETY: the window was just registered, or is null.
            let peers = unsafe { peers_of(functions, window, n) }.map_err(|code| {
                let error = library.failure(code, "ask NCCL where a peer's memory is");
                // SAFETY: the window was just registered, and is not used afterwards.
                unsafe { (functions.functions.ncclCommWindowDeregister)(handle.0, window) };
                error
            })?;
            Ok((Window(window), peers))
        };
        let done = within(pes.context, what, Deadline::after(pes.limit), work);
        if done.is_err() && pes.context.stuck.get() {
            return done.map(|_| address);
        }
        let mine = match &done {
            Err(_) => outcome(FAILED, me),
            Ok((window, _)) if window.0.is_null() => outcome(NO_WINDOW, me),
            Ok((_, peers)) => match peers.iter().enumerate().find(|(pe, address)| **address == 0 && *pe != me) {
                Some((pe, _)) => outcome(UNREACHABLE, pe),
                None => outcome(REGISTERED, me),
            },
        };
        let gathered = pes.bootstrap.all_gather(&mine, pes.limit);
        let agreed = gathered.and_then(|all| self.agree_on_windows(&all));
        let (window, peers) = done?;
        if let Err(error) = agreed {
            self.deregister(window);
            return Err(error);
        }
        self.allocations.borrow_mut().insert(address, Allocation { bytes, window, peers });
        Ok(address)
    }

    /// Checks that every PE has a window and reaches every other PE's.
    fn agree_on_windows(&self, all: &[u8]) -> Result<(), GpuError> {
        let outcomes = all.chunks_exact(size_of::<Outcome>());
        let Some((pe, &[state, a, b, c, d])) = outcomes
            .enumerate()
            .filter_map(|(pe, of_pe)| Some((pe, of_pe.first_chunk::<5>()?)))
            .find(|(_, of_pe)| of_pe[0] != REGISTERED)
        else {
            return Ok(());
        };
        Err(match state {
            UNREACHABLE => GpuError::Unavailable(format!(
                "PE {pe}'s GPU does not reach the memory of PE {}'s by loads and stores, which `symmetric` nccl needs: use `symmetric` nvshmem",
                u32::from_le_bytes([a, b, c, d])
            )),
            NO_WINDOW => GpuError::Unavailable(format!(
                "NCCL {} has no symmetric memory for these GPUs: not all reach each other by loads and stores (nvidia-smi topo -p2p w), or \
                 NCCL_CUMEM_ENABLE or NCCL_WIN_ENABLE is 0; use `symmetric` nvshmem",
                self.library.version_text()
            )),
            _ => GpuError::failed("register symmetric memory with NCCL", format!("PE {pe} has failed to")),
        })
    }

    /// Frees memory. NCCL does not wait for other PEs here.
    ///
    /// # Safety
    /// `address` was returned by [`Windows::alloc`] and has not been freed, and no operation in flight or later uses it.
    pub unsafe fn free(&self, address: u64) {
        let Some(allocation) = self.allocations.borrow_mut().remove(&address) else { return };
        self.deregister(allocation.window);
        // SAFETY: `alloc` allocated the memory, and it is deregistered. If a peer still maps the memory, it stays valid until the peer
        // unmaps it.
        self.log_error("free symmetric memory", unsafe {
            (self.functions.functions.ncclMemFree)(address as *mut c_void)
        });
    }

    fn deregister(&self, window: Window) {
        if !window.0.is_null() {
            // SAFETY: the window is registered with this communicator, and is not used afterwards.
            let code = unsafe { (self.functions.functions.ncclCommWindowDeregister)(self.communicator.0, window.0) };
            self.log_error("deregister symmetric memory", code);
        }
    }

    /// Logs the error of a call that frees something, so that the caller can continue.
    fn log_error(&self, what: &str, code: u32) {
        if let Err(error) = self.library.check(code, what) {
            tracing::warn!("{error}");
        }
    }

    /// Returns the address at which this PE accesses `pe`'s copy of `address`, or 0 if `address` is not in registered memory.
    pub fn peer(&self, address: u64, pe: usize) -> u64 {
        let allocations = self.allocations.borrow();
        let Some((first, allocation)) = allocations.range(..=address).next_back() else { return 0 };
        let offset = address - first;
        let peer = allocation.peers.get(pe).copied().filter(|_| offset < allocation.bytes.max(1));
        peer.map_or(0, |peer| peer + offset)
    }

    /// Frees the remaining memory and ends the communicator. All PEs must have finished their work.
    pub fn finish(self) {
        let left: Vec<u64> = self.allocations.borrow().keys().copied().collect();
        for address in left {
            // SAFETY: `alloc` returned the address, and all PEs have finished their work.
            unsafe { self.free(address) };
        }
        if self.own {
            // SAFETY: `start` created the communicator, and it is not used afterwards. ncclCommDestroy is not called because it may wait
            // for other PEs.
            let code = unsafe { (self.library.functions.ncclCommAbort)(self.communicator.0) };
            self.log_error("end NCCL", code);
        }
    }
}

/// Returns a communicator's library, this process's rank in it, and the number of ranks.
///
/// # Safety
/// The conditions are those of [`Windows::share`].
unsafe fn ranks(communicator: Communicator) -> Result<(&'static Library, usize, usize), GpuError> {
    let (mut rank, mut of) = (0, 0);
    // SAFETY: the caller guarantees the communicator, and the results are written to local variables.
    let library =
        unsafe { query(communicator, |f| [(f.ncclCommUserRank, &raw mut rank), (f.ncclCommCount, &raw mut of)]) }?;
    Ok((library, usize::try_from(rank).unwrap_or(usize::MAX), usize::try_from(of).unwrap_or(0)))
}

/// Returns the index of a communicator's device.
///
/// # Safety
/// The conditions are those of [`Windows::share`].
pub(in crate::gpu::cuda) unsafe fn device_of(communicator: usize) -> Result<usize, GpuError> {
    let mut device = 0;
    // SAFETY: the caller guarantees the communicator, and the result is written to a local variable.
    unsafe { query(Communicator(communicator as *mut _), |f| [(f.ncclCommCuDevice, &raw mut device)]) }?;
    usize::try_from(device).map_err(|error| GpuError::failed("ask the communicator for its device", error))
}

type Query = (unsafe extern "C" fn(cudarc::nccl::sys::ncclComm_t, *mut c_int) -> u32, *mut c_int);

/// Calls functions that return integers of a caller's communicator.
///
/// # Safety
/// The conditions are those of [`Windows::share`], and the pointers to the results are valid.
unsafe fn query<const N: usize>(
    communicator: Communicator,
    queries: impl FnOnce(&super::WindowFunctions) -> [Query; N],
) -> Result<&'static Library, GpuError> {
    if communicator.0.is_null() {
        return Err(GpuError::Unavailable("the communicator is null, expected an ncclComm_t".into()));
    }
    let library = loaded_library()?;
    for (get, answer) in queries(&library.for_windows()?.functions) {
        // SAFETY: guaranteed by the caller.
        library.check(unsafe { get(communicator.0, answer) }, "ask the communicator what it is")?;
    }
    Ok(library)
}

/// Returns the addresses of the `n` ranks' parts of a window. An address is 0 if loads and stores do not reach the rank, and all are 0 if
/// the window is null. On failure returns NCCL's code.
///
/// # Safety
/// The window is either registered or null.
unsafe fn peers_of(functions: &ForWindows, window: ncclWindow_t, n: usize) -> Result<Vec<u64>, u32> {
    let mut peers = vec![0; n];
    for (pe, peer) in peers.iter_mut().enumerate().filter(|_| !window.is_null()) {
        let mut address = ptr::null_mut();
        // SAFETY: the caller guarantees the window, and the function only writes an address or null.
        match unsafe { (functions.peer_pointer)(window, 0, pe as c_int, &raw mut address) } {
            SUCCESS => *peer = address as u64,
            code => return Err(code),
        }
    }
    Ok(peers)
}

/// Waits until an operation of a non-blocking communicator has completed, and returns its code. `code` is what the call returned.
///
/// # Safety
/// The communicator is valid.
unsafe fn wait_until_settled(functions: &ForWindows, communicator: Communicator, mut code: u32) -> u32 {
    while code == IN_PROGRESS {
        std::thread::sleep(POLL);
        let mut state = SUCCESS;
        // SAFETY: the caller guarantees the communicator, and NCCL's enum has the size of `state`.
        let asked = unsafe { (functions.functions.ncclCommGetAsyncError)(communicator.0, (&raw mut state).cast()) };
        code = if asked == SUCCESS { state } else { asked };
    }
    code
}

/// Checks that NCCL supports the number of PEs per device.
pub(in crate::gpu::cuda) fn check_sharing(
    version: [u32; 3],
    sharing: usize,
    allowed: Option<&str>,
) -> Result<(), GpuError> {
    if sharing <= 1 || (version >= OLDEST_WITH_SHARED_DEVICES && allowed.is_some_and(|value| value.trim() == "1")) {
        return Ok(());
    }
    let cure = match version >= OLDEST_WITH_SHARED_DEVICES {
        true => format!("set {SHARED_DEVICES}=1"),
        false => format!("{} or newer does", dotted(OLDEST_WITH_SHARED_DEVICES)),
    };
    Err(GpuError::Unavailable(format!(
        "{sharing} PEs share a GPU, which NCCL {} does not take: {cure}, have a GPU for each PE, or use `symmetric` nvshmem",
        dotted(version)
    )))
}

/// The result of an allocation on one PE, which is sent to all PEs.
#[derive(Clone, Copy)]
struct AllocResult {
    /// 0 if the PE has allocated the memory, [`FULL`] if it has too little, and 1 after another error.
    state: u64,
    bytes: u64,
    free: u64,
    total: u64,
}

const FULL: u64 = 2;

impl AllocResult {
    fn to_bytes(self) -> Vec<u8> {
        [self.state, self.bytes, self.free, self.total].into_iter().flat_map(u64::to_le_bytes).collect()
    }

    fn read(bytes: &[u8]) -> AllocResult {
        let mut words =
            bytes.chunks_exact(8).map(|word| word.first_chunk::<8>().map_or(0, |word| u64::from_le_bytes(*word)));
        let mut next = || words.next().unwrap_or(0);
        AllocResult { state: next(), bytes: next(), free: next(), total: next() }
    }
}

/// Derives the outcome of an allocation from the [`AllocResult`]s of all PEs. It is the same on all PEs.
fn agree_on_size(mine: Result<(), GpuError>, bytes: u64, all: &[u8]) -> Result<(), GpuError> {
    let all: Vec<AllocResult> = all.chunks_exact(size_of::<AllocResult>()).map(AllocResult::read).collect();
    let first = all.first().map_or(bytes, |first| first.bytes);
    if let Some((pe, other)) = all.iter().enumerate().find(|(_, other)| other.bytes != first) {
        let message = format!("PE 0 asks for {first} bytes and PE {pe} for {}: all ask for the same", other.bytes);
        return Err(GpuError::failed("allocate symmetric memory", message));
    }
    if let Some(full) = all.iter().find(|of_pe| of_pe.state == FULL) {
        let (free, total) = (full.free, full.total);
        return Err(GpuError::OutOfMemory { kind: "symmetric device", asked: bytes, free, total });
    }
    mine?;
    match all.iter().position(|of_pe| of_pe.state != 0) {
        Some(pe) => Err(GpuError::failed(
            format!("allocate {bytes} bytes of symmetric memory"),
            format!("PE {pe} has failed to"),
        )),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gathered(all: &[AllocResult]) -> Vec<u8> {
        all.iter().flat_map(|one| one.to_bytes()).collect()
    }

    #[test]
    fn out_of_memory_on_one_pe_is_reported_by_all() {
        let has = AllocResult { state: 0, bytes: 4096, free: 1 << 30, total: 2 << 30 };
        let full = AllocResult { state: FULL, free: 100, ..has };
        assert!(agree_on_size(Ok(()), 4096, &gathered(&[has, has])).is_ok());
        let error = agree_on_size(Ok(()), 4096, &gathered(&[has, full])).unwrap_err();
        assert!(matches!(error, GpuError::OutOfMemory { asked: 4096, free: 100, .. }), "{error}");
        let failed = AllocResult { state: 1, ..has };
        let error = agree_on_size(Ok(()), 4096, &gathered(&[has, failed])).unwrap_err().to_string();
        assert!(error.contains("PE 1 has failed"), "{error}");
        let own = agree_on_size(Err(GpuError::failed("do it", "no")), 4096, &gathered(&[failed, has])).unwrap_err();
        assert_eq!(own.to_string(), "cannot do it: no");
    }

    #[test]
    fn different_sizes_name_the_pe() {
        let of = |bytes| AllocResult { state: 0, bytes, free: 1, total: 1 };
        let error = agree_on_size(Ok(()), 64, &gathered(&[of(64), of(64), of(128)])).unwrap_err().to_string();
        assert!(error.contains("PE 0 asks for 64 bytes and PE 2 for 128"), "{error}");
    }

    #[test]
    fn sharing_a_device_needs_a_newer_nccl_and_permission() {
        let (old, new) = ([2, 29, 7], [2, 30, 3]);
        assert!(check_sharing(old, 1, None).is_ok() && check_sharing(new, 2, Some("1")).is_ok());
        let text = |version, allowed| check_sharing(version, 2, allowed).unwrap_err().to_string();
        assert!(
            text(old, Some("1")).contains("2 PEs share a GPU, which NCCL 2.29.7 does not take: 2.30.0 or newer does")
        );
        assert!(text(new, None).contains("set NCCL_MULTI_RANK_GPU_ENABLE=1"));
        assert!(text(new, Some("0")).contains("`symmetric` nvshmem"));
    }
}
