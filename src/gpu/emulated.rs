//! Devices that run the kernels on the CPU. The kernels come from `libaristos_kernels.so`, which build.rs compiles from `kernels/` and
//! `kernels/host/`.
//!
//! A launch runs the kernel on threads of its own and returns when the kernel has ended. PEs are threads of one process ([`world`]),
//! processes that share segments ([`attach`]), or processes connected by a transport ([`join`]). New memory is filled with bytes that are a
//! NaN in every element type, so that code that relies on zeros fails.

mod multiprocessors;

use std::alloc::{self, Layout};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use libloading::Library;
pub use multiprocessors::{Multiprocessors, Resident};

use super::{DeviceLimits, Gpu, GpuError, Launch, Recording, TensorMap};
use crate::shmem::heap::Heap;
use crate::shmem::{ShmTransport, Shmem, SignalOp, Sym, Transport, available_bytes};

/// The environment variable with the path of another build of the library, such as one with ThreadSanitizer.
pub const ENV_LIBRARY: &str = "ARISTOS_EMULATOR";

/// Alignment of device memory, which is the same as that of CUDA's allocator.
const ALIGN_BYTES: usize = 256;
/// A byte which, repeated, is a NaN in every element type.
const FILL: u8 = 0xff;
const MARKS: usize = 64;

/// The properties of an emulated device. They are the same for every PE.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct EmulatedDevice {
    /// Whether it runs the Hopper kernels instead of the Ampere kernels.
    pub hopper: bool,
    /// Number of multiprocessors. A cooperative kernel has one block on each.
    pub multiprocessors: u32,
    /// Seed of the random order of concurrent operations.
    pub seed: u64,
    /// Whether kernels use the network path to all peers, even if their memory is mapped.
    pub network_only: bool,
}

impl Default for EmulatedDevice {
    fn default() -> Self {
        EmulatedDevice { hopper: false, multiprocessors: 3, seed: 0, network_only: false }
    }
}

/// A fault to inject into the operations of a PE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No fault.
    None = 0,
    /// Network signals arrive before any data.
    SignalFirst = 1,
    /// Network signals are lost.
    SignalLost = 2,
    /// Signals written by stores are lost.
    StoreLost = 3,
    /// Network fences do not order anything. NVSHMEM's fences fail in this way if a host library of version 3.5 serves device code of
    /// version 3.4.
    FenceLost = 4,
}

impl EmulatedDevice {
    /// The limits that the device reports.
    pub fn limits(&self) -> DeviceLimits {
        let free = available_bytes().unwrap_or(u64::MAX);
        DeviceLimits {
            capability: (if self.hopper { 9 } else { 8 }, 0),
            multiprocessors: self.multiprocessors,
            shared_bytes_per_block: if self.hopper { 227 << 10 } else { 163 << 10 },
            memory_total: free,
            memory_free: free,
            symmetric_total: 0,
        }
    }
}

type Launcher = unsafe extern "C" fn(*mut c_void, u32, *const c_char, u32, u32, u32, *mut *mut c_void) -> c_int;
type Joiner = unsafe extern "C" fn(u32, u32, *const *mut c_void, u64, u64, *const TransportFunctions) -> *mut c_void;
type TensorMapper = unsafe extern "C" fn(*mut c_void, u64, u32, u32, u64, u32, u64, u32, u32, u32) -> c_int;

/// The library's functions, and the handle that keeps it loaded.
struct Functions {
    world: unsafe extern "C" fn(u32, u64, u64, *const u8) -> *mut c_void,
    attach: unsafe extern "C" fn(u32, u32, *const *mut c_void, u64, u64, u32) -> *mut c_void,
    join: Joiner,
    heap: unsafe extern "C" fn(*mut c_void, u32, u32) -> u64,
    launch: Launcher,
    error: unsafe extern "C" fn() -> *const c_char,
    tensor_map: TensorMapper,
    fault: unsafe extern "C" fn(*mut c_void, u32, u32),
    slow_puts: unsafe extern "C" fn(*mut c_void, u32, u64),
    /// The names of the kernels in the library.
    kernels: Vec<String>,
    free: unsafe extern "C" fn(*mut c_void),
    _library: Library,
}

impl Functions {
    fn load() -> Result<Self, GpuError> {
        let path = std::env::var_os(ENV_LIBRARY).unwrap_or_else(|| OsString::from(env!("ARISTOS_EMULATOR_LIBRARY")));
        let refuse = |error: libloading::Error| {
            let path = path.display();
            GpuError::Unavailable(format!("cannot load the emulated kernels from {path}: {error}; build again"))
        };
        // SAFETY: the library is built from this repository. Loading it only fills its table of kernels, and kernels/host defines the
        // functions with these types.
        unsafe {
            let library = Library::new(&path).map_err(refuse)?;
            let kernels: unsafe extern "C" fn() -> *const c_char =
                *library.get(b"aristos_host_kernels\0").map_err(refuse)?;
            let kernels = CStr::from_ptr(kernels()).to_string_lossy().lines().map(str::to_string).collect();
            Ok(Functions {
                kernels,
                fault: *library.get(b"aristos_host_fault\0").map_err(refuse)?,
                slow_puts: *library.get(b"aristos_host_slow_puts\0").map_err(refuse)?,
                world: *library.get(b"aristos_host_world\0").map_err(refuse)?,
                attach: *library.get(b"aristos_host_attach\0").map_err(refuse)?,
                join: *library.get(b"aristos_host_join\0").map_err(refuse)?,
                heap: *library.get(b"aristos_host_heap\0").map_err(refuse)?,
                launch: *library.get(b"aristos_host_launch\0").map_err(refuse)?,
                error: *library.get(b"aristos_host_error\0").map_err(refuse)?,
                tensor_map: *library.get(b"aristos_host_tensor_map_3d\0").map_err(refuse)?,
                free: *library.get(b"aristos_host_free\0").map_err(refuse)?,
                _library: library,
            })
        }
    }

    /// Returns the library's message about the last failure.
    fn message(&self) -> String {
        // SAFETY: the function returns null or a NUL-terminated string of the library, which is copied at once.
        unsafe {
            let text = (self.error)();
            if text.is_null() { "no reason given".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        }
    }
}

/// A world created by the library, or one PE's view of it.
struct EmulatedWorld {
    functions: Functions,
    handle: *mut c_void,
}

// SAFETY: the library's functions may be called from any thread, and the handle is freed once.
unsafe impl Send for EmulatedWorld {}
// SAFETY: as for `Send`.
unsafe impl Sync for EmulatedWorld {}

impl Drop for EmulatedWorld {
    fn drop(&mut self) {
        // SAFETY: `handle` was created by the library and is freed only here.
        unsafe { (self.functions.free)(self.handle) }
    }
}

/// The group of all PEs, with its barrier and the allocator of its symmetric memory.
enum PeGroup {
    Threads { barrier: Arc<Barrier>, heap: RefCell<Heap> },
    Processes { shmem: Box<dyn SymmetricHeap>, syms: RefCell<HashMap<u64, Sym<u8>>> },
}

/// The parts of a [`Shmem`] that an emulated device uses, for any transport.
trait SymmetricHeap: Send {
    /// Returns `None` if the heap is full.
    fn alloc_bytes(&self, bytes: usize) -> Option<Sym<u8>>;
    fn free_bytes(&self, sym: Sym<u8>);
    /// Returns the number of bytes that are in use now, and the maximum until now.
    fn usage(&self) -> (usize, usize);
    /// Waits for all PEs. If one is missing at the deadline, the error is its number.
    fn barrier(&self, deadline: Instant) -> Result<(), usize>;
}

impl<T: Transport + Send> SymmetricHeap for Shmem<T> {
    fn alloc_bytes(&self, bytes: usize) -> Option<Sym<u8>> {
        self.alloc::<u8>(bytes).ok()
    }

    fn free_bytes(&self, sym: Sym<u8>) {
        self.free(sym);
    }

    fn usage(&self) -> (usize, usize) {
        (self.used_bytes(), self.peak_bytes())
    }

    fn barrier(&self, deadline: Instant) -> Result<(), usize> {
        self.barrier_all(deadline).map_err(|timeout| timeout.index)
    }
}

/// `AristosHostTransport` of `kernels/host/host.h`.
#[repr(C)]
struct TransportFunctions {
    context: *const c_void,
    put: unsafe extern "C" fn(*const c_void, u32, u64, *const c_void, u64),
    signal: unsafe extern "C" fn(*const c_void, u32, u64, u64),
    fence: unsafe extern "C" fn(*const c_void),
    quiet: unsafe extern "C" fn(*const c_void),
}

/// # Safety
/// `context` points to a live `T`, and `source` to `bytes` bytes.
unsafe extern "C" fn put<T: Transport>(context: *const c_void, pe: u32, to: u64, source: *const c_void, bytes: u64) {
    // SAFETY: guaranteed by the caller.
    let (transport, source) =
        unsafe { (&*context.cast::<T>(), std::slice::from_raw_parts(source.cast::<u8>(), bytes as usize)) };
    transport.put(to as usize, source, pe as usize);
}

/// # Safety
/// `context` points to a live `T`.
unsafe extern "C" fn signal<T: Transport>(context: *const c_void, pe: u32, word: u64, value: u64) {
    // SAFETY: guaranteed by the caller.
    unsafe { &*context.cast::<T>() }.signal_op(word as usize, value, SignalOp::Set, pe as usize);
}

/// # Safety
/// `context` points to a live `T`.
unsafe extern "C" fn fence<T: Transport>(context: *const c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { &*context.cast::<T>() }.fence();
}

/// # Safety
/// `context` points to a live `T`.
unsafe extern "C" fn quiet<T: Transport>(context: *const c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { &*context.cast::<T>() }.quiet();
}

/// One PE's emulated device.
pub struct Emulated {
    world: Arc<EmulatedWorld>,
    pe: usize,
    n_pes: usize,
    device: EmulatedDevice,
    multiprocessors: Arc<Multiprocessors>,
    group: PeGroup,
    heap_bytes: u64,
    all_reachable: bool,
    allocations: RefCell<HashMap<u64, Layout>>,
    marks: [Cell<Option<Instant>>; MARKS],
    launches: Cell<u64>,
    /// A delay that tests add to each launch.
    launch_delay: Cell<Duration>,
    allocated: Cell<u64>,
    /// The kernels that may be recorded.
    prepared: RefCell<HashSet<String>>,
    /// The launches recorded so far, while [`Gpu::record`] runs.
    recording: RefCell<Option<Vec<RecordedLaunch>>>,
}

/// Creates `n_pes` PEs in this process, each for a thread of its own and with `heap_bytes` bytes of symmetric memory. If `reachable[from *
/// n_pes + to]` is 0, PE `from` reaches PE `to` only over the network, and otherwise by loads and stores too. Without `reachable`, loads
/// and stores reach every PE.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if the library cannot be loaded or the mask has the wrong length; [`GpuError::Failed`] if the library
/// cannot create the world.
pub fn world(
    n_pes: usize,
    heap_bytes: usize,
    device: &EmulatedDevice,
    reachable: Option<&[u8]>,
) -> Result<Vec<Emulated>, GpuError> {
    let functions = Functions::load()?;
    if let Some(mask) = reachable.filter(|mask| mask.len() != n_pes * n_pes) {
        return Err(GpuError::Unavailable(format!("a mask of {} pairs for {n_pes} PEs", mask.len())));
    }
    let mask = reachable.map_or(ptr::null(), <[u8]>::as_ptr);
    // SAFETY: the mask either is null or has one byte per pair of PEs.
    let handle = unsafe { (functions.world)(n_pes as u32, heap_bytes as u64, device.seed, mask) };
    if handle.is_null() {
        return Err(GpuError::failed("make a world of emulated devices", functions.message()));
    }
    let (world, barrier) = (Arc::new(EmulatedWorld { functions, handle }), Arc::new(Barrier::new(n_pes)));
    let all = reachable.is_none_or(|mask| mask.iter().all(|&reaches| reaches != 0));
    let pes = (0..n_pes).map(|pe| {
        let group = PeGroup::Threads { barrier: barrier.clone(), heap: RefCell::new(Heap::new(heap_bytes)) };
        Emulated::new(world.clone(), (pe, n_pes), device, group, heap_bytes, all)
    });
    Ok(pes.collect())
}

/// Creates the device of this process's PE, whose symmetric memory comes from `shmem`.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if the library cannot be loaded; [`GpuError::Failed`] if it cannot attach.
pub fn attach(shmem: Shmem<ShmTransport>, device: &EmulatedDevice) -> Result<Emulated, GpuError> {
    let functions = Functions::load()?;
    let (pe, n_pes, bytes) = (shmem.my_pe(), shmem.n_pes(), shmem.heap_bytes());
    let heap = |pe| shmem.transport().ptr(0, pe).map_or(ptr::null_mut(), |p| p.as_ptr().cast::<c_void>());
    let heaps: Vec<*mut c_void> = (0..n_pes).map(heap).collect();
    // SAFETY: each PE's heap has `bytes` bytes and stays mapped while `shmem` lives; `Emulated` drops the world before `shmem`.
    let handle = unsafe {
        let reached = u32::from(!device.network_only);
        (functions.attach)(pe as u32, n_pes as u32, heaps.as_ptr(), bytes as u64, device.seed, reached)
    };
    if handle.is_null() {
        return Err(GpuError::failed("attach an emulated device", functions.message()));
    }
    let group = PeGroup::Processes { shmem: Box::new(shmem), syms: RefCell::default() };
    let all_reachable = !device.network_only || n_pes == 1;
    Ok(Emulated::new(Arc::new(EmulatedWorld { functions, handle }), (pe, n_pes), device, group, bytes, all_reachable))
}

/// Creates the device of this process's PE, which reaches its peers by the transport of `shmem`. The kernels' threads use that transport,
/// so it must allow any thread to.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if the library cannot be loaded or the transport's own memory has no address; [`GpuError::Failed`] if
/// the library cannot join.
pub fn join<T: Transport + Send + Sync + 'static>(
    shmem: Shmem<T>,
    device: &EmulatedDevice,
) -> Result<Emulated, GpuError> {
    let functions = Functions::load()?;
    let (pe, n_pes, bytes) = (shmem.my_pe(), shmem.n_pes(), shmem.heap_bytes());
    let shmem = Box::new(shmem);
    let heap_of = |of| match shmem.transport().ptr(0, of) {
        Some(heap) if of == pe || !device.network_only => heap.as_ptr().cast::<c_void>(),
        _ => ptr::null_mut(),
    };
    let heaps: Vec<*mut c_void> = (0..n_pes).map(heap_of).collect();
    if heaps[pe].is_null() {
        return Err(GpuError::Unavailable("this transport does not say where a PE's memory is".to_string()));
    }
    let transport = TransportFunctions {
        context: ptr::from_ref(shmem.transport()).cast(),
        put: put::<T>,
        signal: signal::<T>,
        fence: fence::<T>,
        quiet: quiet::<T>,
    };
    // SAFETY: each heap that is not null has `bytes` bytes. The heaps and the transport, which the box keeps at a fixed
    // address, outlive the world: `Emulated` drops the world first.
    let handle = unsafe {
        (functions.join)(pe as u32, n_pes as u32, heaps.as_ptr(), bytes as u64, device.seed, &raw const transport)
    };
    if handle.is_null() {
        return Err(GpuError::failed("join emulated devices", functions.message()));
    }
    let group = PeGroup::Processes { shmem, syms: RefCell::default() };
    Ok(Emulated::new(Arc::new(EmulatedWorld { functions, handle }), (pe, n_pes), device, group, bytes, n_pes == 1))
}

impl Emulated {
    fn new(
        world: Arc<EmulatedWorld>,
        (pe, n_pes): (usize, usize),
        device: &EmulatedDevice,
        group: PeGroup,
        heap_bytes: usize,
        all_reachable: bool,
    ) -> Self {
        Emulated {
            world,
            pe,
            n_pes,
            device: device.clone(),
            multiprocessors: Multiprocessors::new(device.multiprocessors),
            group,
            heap_bytes: heap_bytes as u64,
            all_reachable,
            allocations: RefCell::default(),
            marks: [const { Cell::new(None) }; MARKS],
            launches: Cell::new(0),
            launch_delay: Cell::new(Duration::ZERO),
            allocated: Cell::new(0),
            prepared: RefCell::default(),
            recording: RefCell::new(None),
        }
    }

    fn base(&self, pe: usize) -> u64 {
        // SAFETY: both arguments are PEs of this world.
        unsafe { (self.world.functions.heap)(self.world.handle, self.pe as u32, pe as u32) }
    }

    /// Injects a fault into all later operations of this PE, for tests. It must not be called while a kernel runs.
    pub fn set_fault(&self, fault: Fault) {
        // SAFETY: `pe` is a PE of this world.
        unsafe { (self.world.functions.fault)(self.world.handle, self.pe as u32, fault as u32) }
    }

    /// Delays each later launch of this PE, and each later put of its blocks, for tests. It must not be called while a kernel runs.
    pub fn set_delays(&self, launch: Duration, put: Duration) {
        self.launch_delay.set(launch);
        let put_ns = u64::try_from(put.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: `pe` is a PE of this world.
        unsafe { (self.world.functions.slow_puts)(self.world.handle, self.pe as u32, put_ns) }
    }

    /// The device's multiprocessors, which tests can occupy like another kernel.
    pub fn multiprocessors(&self) -> &Arc<Multiprocessors> {
        &self.multiprocessors
    }

    /// Returns the number of kernel launches until now.
    pub fn launches(&self) -> u64 {
        self.launches.get()
    }

    /// Returns the number of device allocations until now, including freed ones.
    pub fn allocations(&self) -> u64 {
        self.allocated.get()
    }

    /// Returns the number of symmetric bytes that are in use now, and the maximum until now.
    pub fn symmetric_bytes(&self) -> (usize, usize) {
        match &self.group {
            PeGroup::Threads { heap, .. } => (heap.borrow().used_bytes(), heap.borrow().peak_bytes()),
            PeGroup::Processes { shmem, .. } => shmem.usage(),
        }
    }
}

/// A kernel's name, its launch configuration, and the bytes of its parameters.
type RecordedLaunch = (String, Launch, Vec<Vec<u8>>);

struct RecordedLaunches<'g> {
    gpu: &'g Emulated,
    launches: Vec<RecordedLaunch>,
}

impl Recording for RecordedLaunches<'_> {
    unsafe fn replay(&self) -> Result<(), GpuError> {
        self.launches.iter().try_for_each(|(kernel, launch, args)| {
            let args: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
            // SAFETY: guaranteed by the caller.
            unsafe { self.gpu.launch(kernel, *launch, &args) }
        })
    }
}

// SAFETY: memory comes from Rust's allocator or from this PE's part of the world's heap. Operations take effect in call order, because
// kernels complete before `launch` returns.
unsafe impl Gpu for Emulated {
    fn name(&self) -> String {
        format!("emulated {}", if self.device.hopper { "Hopper" } else { "Ampere" })
    }

    fn device_id(&self) -> String {
        // All emulated devices of a host have the same identifier, because they share the host's memory.
        String::new()
    }

    fn limits(&self) -> Result<DeviceLimits, GpuError> {
        Ok(DeviceLimits { symmetric_total: self.heap_bytes, ..self.device.limits() })
    }

    fn my_pe(&self) -> usize {
        self.pe
    }

    fn n_pes(&self) -> usize {
        self.n_pes
    }

    fn alloc_raw(&self, bytes: u64) -> Result<u64, GpuError> {
        let free = available_bytes().unwrap_or(u64::MAX);
        let refuse = || GpuError::OutOfMemory { kind: "device", asked: bytes, free, total: free };
        let layout = usize::try_from(bytes).ok().and_then(|b| Layout::from_size_align(b.max(1), ALIGN_BYTES).ok());
        let layout = layout.filter(|_| bytes <= free).ok_or_else(refuse)?;
        // SAFETY: the size of the layout is not 0, and only the allocated bytes are written.
        let address = unsafe {
            let memory = alloc::alloc(layout);
            if memory.is_null() {
                return Err(refuse());
            }
            memory.write_bytes(FILL, layout.size());
            memory.expose_provenance() as u64
        };
        self.allocations.borrow_mut().insert(address, layout);
        self.allocated.set(self.allocated.get() + 1);
        Ok(address)
    }

    unsafe fn free_raw(&self, address: u64) {
        let layout = self.allocations.borrow_mut().remove(&address);
        debug_assert!(layout.is_some(), "{address:#x} is not an allocation");
        if let Some(layout) = layout {
            // SAFETY: `alloc_raw` allocated the memory with this layout, and the caller guarantees that it is not used afterwards.
            unsafe { alloc::dealloc(at(address), layout) }
        }
    }

    fn alloc_symmetric_raw(&self, bytes: u64) -> Result<u64, GpuError> {
        let refuse =
            |free: u64| GpuError::OutOfMemory { kind: "symmetric device", asked: bytes, free, total: self.heap_bytes };
        let wanted = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        let (offset, sym) = match &self.group {
            PeGroup::Threads { heap, .. } => {
                (heap.borrow_mut().alloc(wanted).map_err(|full| refuse(full.free_bytes as u64))?, None)
            }
            PeGroup::Processes { shmem, .. } => {
                let sym = shmem.alloc_bytes(wanted).ok_or_else(|| refuse(self.heap_bytes - shmem.usage().0 as u64))?;
                (sym.offset(), Some(sym))
            }
        };
        let address = self.base(self.pe) + offset as u64;
        if let (PeGroup::Processes { syms, .. }, Some(sym)) = (&self.group, sym) {
            syms.borrow_mut().insert(address, sym);
        } else {
            // The length is stored because `free_symmetric_raw` needs it.
            let layout = Layout::from_size_align(wanted, 1).map_err(|_| refuse(0))?;
            self.allocations.borrow_mut().insert(address, layout);
        }
        // SAFETY: the address points to `wanted` bytes of this PE's heap. Peers use them only after a barrier that follows this allocation.
        unsafe { at(address).write_bytes(FILL, wanted) };
        Ok(address)
    }

    unsafe fn free_symmetric_raw(&self, address: u64) {
        match &self.group {
            PeGroup::Threads { heap, .. } => {
                if let Some(layout) = self.allocations.borrow_mut().remove(&address) {
                    let freed = heap.borrow_mut().free((address - self.base(self.pe)) as usize, layout.size());
                    debug_assert!(freed);
                }
            }
            PeGroup::Processes { shmem, syms } => {
                if let Some(sym) = syms.borrow_mut().remove(&address) {
                    shmem.free_bytes(sym);
                }
            }
        }
    }

    fn peer_raw(&self, symmetric: u64, pe: usize) -> u64 {
        match self.base(pe) {
            0 => 0,
            base => base + (symmetric - self.base(self.pe)),
        }
    }

    fn all_reachable(&self) -> Result<bool, GpuError> {
        Ok(self.all_reachable)
    }

    unsafe fn copy_in_raw(&self, to: u64, from: &[u8]) -> Result<(), GpuError> {
        // SAFETY: the caller guarantees the range, and no kernel of this PE runs between launches.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), at(to), from.len()) };
        Ok(())
    }

    unsafe fn copy_out_raw(&self, to: &mut [u8], from: u64) -> Result<(), GpuError> {
        // SAFETY: as in `copy_in_raw`.
        unsafe { ptr::copy_nonoverlapping(at(from), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn zero_raw(&self, to: u64, bytes: u64) -> Result<(), GpuError> {
        // SAFETY: as in `copy_in_raw`.
        unsafe { at(to).write_bytes(0, bytes as usize) };
        Ok(())
    }

    fn resident_blocks(&self, kernel: &str, launch: Launch) -> Result<u32, GpuError> {
        self.prepare(kernel, launch.shared_bytes)?;
        Ok(self.device.multiprocessors / launch.cluster * launch.cluster)
    }

    fn prepare(&self, kernel: &str, _: u32) -> Result<(), GpuError> {
        if !self.world.functions.kernels.iter().any(|name| name == kernel) {
            return Err(GpuError::failed(format!("find {kernel}"), "the library has no such kernel"));
        }
        self.prepared.borrow_mut().insert(kernel.to_string());
        Ok(())
    }

    fn record(&self, work: &mut dyn FnMut() -> Result<(), GpuError>) -> Result<Box<dyn Recording + '_>, GpuError> {
        let before = self.recording.replace(Some(Vec::new()));
        let done = work();
        let launches = self.recording.replace(before).unwrap_or_default();
        done.map(|()| Box::new(RecordedLaunches { gpu: self, launches }) as Box<dyn Recording>)
    }

    unsafe fn launch(&self, kernel: &str, launch: Launch, args: &[&[u8]]) -> Result<(), GpuError> {
        if let Some(launches) = self.recording.borrow_mut().as_mut() {
            if !self.prepared.borrow().contains(kernel) {
                // A driver that loads kernels lazily fails in the same case.
                return Err(GpuError::failed(format!("record {kernel}"), "it would be loaded meanwhile"));
            }
            launches.push((kernel.to_string(), launch, args.iter().map(|arg| arg.to_vec()).collect()));
            return Ok(());
        }
        let failed = |message: String| GpuError::failed(format!("launch {kernel}"), message);
        let name = CString::new(kernel).map_err(|error| failed(error.to_string()))?;
        // The parameters are copied so that each is aligned sufficiently for any type.
        let mut copies: Vec<Vec<u128>> = Vec::new();
        for arg in args {
            let mut copy = vec![0u128; arg.len().div_ceil(16)];
            bytemuck::cast_slice_mut(&mut copy)[..arg.len()].copy_from_slice(arg);
            copies.push(copy);
        }
        let mut pointers: Vec<*mut c_void> = copies.iter_mut().map(|copy| copy.as_mut_ptr().cast()).collect();
        let Launch { grid, block, shared_bytes, cooperative, .. } = launch;
        self.launches.set(self.launches.get() + 1);
        if !self.launch_delay.get().is_zero() {
            std::thread::sleep(self.launch_delay.get());
        }
        let _resident = (cooperative != 0).then(|| self.multiprocessors.occupy(grid));
        // SAFETY: the library created the world, and the caller guarantees that the arguments match the kernel.
        let status = unsafe {
            (self.world.functions.launch)(
                self.world.handle,
                self.pe as u32,
                name.as_ptr(),
                grid,
                block,
                shared_bytes,
                pointers.as_mut_ptr(),
            )
        };
        if status == 0 { Ok(()) } else { Err(failed(self.world.functions.message())) }
    }

    fn synchronise(&self) -> Result<(), GpuError> {
        Ok(())
    }

    fn barrier(&self, limit: Duration) -> Result<(), GpuError> {
        let begin = Instant::now();
        let missing = |peer: Option<usize>| GpuError::Barrier { pe: self.pe, peer, waited: begin.elapsed() };
        match &self.group {
            PeGroup::Threads { barrier, .. } => barrier.wait(limit).map_err(|()| missing(None)),
            PeGroup::Processes { shmem, .. } => {
                let deadline = begin.checked_add(limit).unwrap_or(begin + Duration::from_secs(1 << 30));
                shmem.barrier(deadline).map_err(|pe| missing(Some(pe)))
            }
        }
    }

    fn mark(&self, number: usize) -> Result<(), GpuError> {
        self.marks[number % MARKS].set(Some(Instant::now()));
        Ok(())
    }

    fn elapsed(&self, from: usize, to: usize) -> Result<Duration, GpuError> {
        match (self.marks[from % MARKS].get(), self.marks[to % MARKS].get()) {
            (Some(from), Some(to)) => Ok(to.saturating_duration_since(from)),
            _ => Err(GpuError::failed("time a pass", "no such mark")),
        }
    }

    fn use_stream(&self, _: Option<u64>) -> Result<(), GpuError> {
        Ok(())
    }

    fn alloc_host_raw(&self, bytes: u64) -> Result<u64, GpuError> {
        let address = self.alloc_raw(bytes)?;
        // SAFETY: only the allocated bytes are written.
        unsafe { at(address).write_bytes(0, bytes as usize) };
        Ok(address)
    }

    unsafe fn free_host_raw(&self, address: u64) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.free_raw(address) }
    }

    fn tensor_map(&self, m: TensorMap) -> Result<[u8; 128], GpuError> {
        #[repr(align(64))]
        struct Aligned([u8; 128]);
        let mut map = Aligned([0; 128]);
        // SAFETY: the function writes 128 bytes, and the buffer has that size and is aligned to 64 bytes.
        let status = unsafe {
            (self.world.functions.tensor_map)(
                map.0.as_mut_ptr().cast(),
                m.base,
                m.rows,
                m.cols,
                m.row_stride_bytes,
                m.items,
                m.item_stride_bytes,
                m.box_rows,
                m.box_cols,
                m.element_bytes,
            )
        };
        let refused = || GpuError::failed("describe a matrix", self.world.functions.message());
        if status == 0 { Ok(map.0) } else { Err(refused()) }
    }
}

impl Drop for Emulated {
    fn drop(&mut self) {
        // This frees buffers that were leaked, for example after an error. Entries with an alignment of 1 are symmetric memory, which the
        // world frees.
        for (&address, &layout) in self.allocations.borrow().iter().filter(|(_, layout)| layout.align() == ALIGN_BYTES)
        {
            // SAFETY: `alloc_raw` allocated the memory with this layout. Nothing uses it any more: a live buffer would borrow this device,
            // so only leaked buffers remain.
            unsafe { alloc::dealloc(at(address), layout) }
        }
    }
}

/// Converts an emulated device address to a pointer.
fn at(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// A barrier of threads with a time limit.
struct Barrier {
    threads: usize,
    /// The number of waiting threads, and the number of completed barriers.
    state: Mutex<(usize, u64)>,
    complete: Condvar,
}

impl Barrier {
    fn new(threads: usize) -> Self {
        Barrier { threads, state: Mutex::new((0, 0)), complete: Condvar::new() }
    }

    fn wait(&self, limit: Duration) -> Result<(), ()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let turn = state.1;
        state.0 += 1;
        if state.0 == self.threads {
            *state = (0, turn + 1);
            self.complete.notify_all();
            return Ok(());
        }
        let waited = self.complete.wait_timeout_while(state, limit, |state| state.1 == turn);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.1 != turn {
            return Ok(());
        }
        state.0 -= 1;
        Err(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::smoke;

    /// Runs [`smoke::try_put`] on three PEs with `fault` injected at PE 1, and returns each PE's result.
    fn run_smoke_test(seed: u64, fault: Fault) -> Vec<Result<(), String>> {
        let device = EmulatedDevice { seed, ..EmulatedDevice::default() };
        // A PE waits at most this long for another: for PE 1 if its signals are lost, and at the end for PEs that have already reported an
        // error.
        let limit = Duration::from_millis(match fault {
            Fault::None => 20_000,
            _ => 2000,
        });
        let reachable: Vec<u8> = (0..9).map(|i| u8::from(i / 3 == i % 3)).collect();
        let pes = world(3, 8 << 20, &device, Some(&reachable)).unwrap();
        pes[1].set_fault(fault);
        std::thread::scope(|scope| {
            let work =
                |pe: Emulated| smoke::try_put(&pe, limit, || pe.synchronise()).map_err(|error| error.to_string());
            let threads: Vec<_> = pes.into_iter().map(|pe| scope.spawn(move || work(pe))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn lost_and_corrupt_puts_name_the_pe() {
        assert_eq!(run_smoke_test(1, Fault::None), [const { Ok(()) }; 3]);
        let lost = run_smoke_test(1, Fault::SignalLost);
        for pe in [0, 2] {
            let line = lost[pe].as_ref().unwrap_err();
            assert!(line.contains(&format!("PE {pe} waited 2.0 s for 1048576 bytes that PE 1 puts")), "{line}");
        }
        for fault in [Fault::SignalFirst, Fault::FenceLost] {
            // Several seeds are tried, because whether a fault is observed depends on timing. Two worlds run at a time, since they mostly
            // wait.
            let named = (0..40).step_by(2).any(|seed| {
                std::thread::scope(|scope| {
                    let worlds = [seed, seed + 1].map(|seed| scope.spawn(move || run_smoke_test(seed, fault)));
                    let mut lines = worlds.into_iter().flat_map(|world| world.join().unwrap()).filter_map(Result::err);
                    lines.any(|line| line.starts_with("PE 1 put 1048576 bytes to PE "))
                })
            });
            assert!(named, "{fault:?}");
        }
    }

    #[test]
    fn barrier_waits_for_all_threads_with_a_limit() {
        let barrier = Barrier::new(3);
        assert_eq!(barrier.wait(Duration::from_millis(10)), Err(()));
        let arrived = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for turn in 1..=50 {
                        arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        barrier.wait(Duration::from_secs(10)).unwrap();
                        assert!(arrived.load(std::sync::atomic::Ordering::SeqCst) >= 3 * turn);
                    }
                });
            }
        });
    }
}
