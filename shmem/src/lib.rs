//! The one-sided layer: symmetric memory, put, get, signals, fence, quiet, teams.
//!
//! The semantics are OpenSHMEM 1.5's (sections 9.3 to 9.11), and no stronger, whatever the transport:
//!
//! - **Symmetric objects.** A [`Sym`] is the same location in every PE's heap. Allocation is collective: every PE allocates the
//!   same sizes in the same order.
//! - **put** returns when its source may be reused, possibly before the data arrives. **put_nbi** and **get_nbi** copy between
//!   symmetric objects and return at once: until [`Shmem::quiet`] the source must not change and the destination must not be
//!   read. Without a fence, puts to one PE are unordered.
//! - **put_signal**: a PE that sees the signal also sees the data of the same operation; other puts are not ordered.
//! - **fence** orders deliveries to each PE: puts, signal operations and atomics before it are delivered before those after it.
//!   It completes nothing and does not order gets. **quiet** completes all operations of this PE.
//! - **Signals** are symmetric u64 words, atomic with respect to signal operations and waits. Concurrent [`SignalOp::Set`] of
//!   several PEs race; use [`SignalOp::Add`], or one word per sender.
//! - **A lost PE**, if the transport detects it ([`Transport::lost`]), ends every wait of the PEs that detect it, with an error
//!   that names the lost PE.
//! - A wait or test that sees a signal value also sees everything ordered before the operation that produced it: the data of
//!   the same put_signal and, through a fence, every earlier delivery of the same PE.
//!
//! Accessing bytes while a peer accesses them violates this contract if either writes, and yields unspecified bytes. Memory
//! holds plain bytes ([`Pod`]), of which every pattern is a valid value, so a protocol error produces wrong values, never
//! invalid ones. A [`Sym`] is bounds-checked when it is created, and accesses are checked against its bounds.
//!
//! # Threads
//! [`Shmem`] is `Send` and `Sync` if its transport is. This holds for [`ShmTransport`], [`tcp::TcpTransport`] and
//! [`reorder::ReorderTransport`]; MPI's transport stays in the thread that initialised MPI.
//!
//! # Example
//! Two PEs, threads of this process, exchange a message.
//! ```
//! use std::time::{Duration, Instant};
//! use aristos_shmem::{Cmp, SignalOp, Wait};
//!
//! let pes = aristos_shmem::threads(2, 1 << 20)?;
//! std::thread::scope(|scope| {
//!     for pe in pes {
//!         scope.spawn(move || {
//!             let (data, signal) = (pe.alloc::<f32>(3).unwrap(), pe.alloc::<u64>(1).unwrap());
//!             let other = 1 - pe.my_pe();
//!             pe.put_signal(data, &[pe.my_pe() as f32; 3], signal, 1, SignalOp::Set, other);
//!             let soon = Instant::now() + Duration::from_secs(10);
//!             pe.wait_until(Wait { signal, cmp: Cmp::Eq, value: 1 }, soon).unwrap();
//!             let mut seen = [f32::NAN; 3];
//!             pe.get(&mut seen, data, pe.my_pe());
//!             assert_eq!(seen, [other as f32; 3]);
//!         });
//!     }
//! });
//! # Ok::<(), aristos_shmem::ShmemError>(())
//! ```

mod boxed;
mod channels;
mod collective;
pub mod control;
mod doorbell;
mod error;
pub mod fds;
mod group;
mod handle;
pub mod heap;
mod host;
mod meet;
mod memory;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "ofi")]
pub mod ofi;
pub mod reorder;
mod segment;
mod shm;
mod sync;
pub mod tcp;
mod team;
mod threads;
mod throttle;
mod typed;
mod wait;

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Instant;

pub use bytemuck::Pod;

pub use error::{ShmemError, WaitTimeout};
pub use group::GroupTransport;
pub use handle::AsShmem;
pub use host::host_id;
pub use meet::meet;
pub use memory::available_bytes;
pub use segment::Segment;
pub use shm::{ShmTransport, Watch};
pub use team::Team;
pub(crate) use threads::check_heap;
pub use threads::threads;
pub use throttle::{Delay, Throttle};
pub use typed::Shmem;

/// How a signal operation combines its value with the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalOp {
    /// Replaces the word.
    Set,
    /// Adds to the word, wrapping.
    Add,
}

/// How a wait compares the signal word (left) with its value (right).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cmp {
    /// Equal.
    Eq,
    /// Not equal.
    Ne,
    /// Greater.
    Gt,
    /// Greater or equal.
    Ge,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
}

impl Cmp {
    /// Whether `seen` satisfies the comparison with `value`.
    #[inline]
    pub fn holds(self, seen: u64, value: u64) -> bool {
        match self {
            Cmp::Eq => seen == value,
            Cmp::Ne => seen != value,
            Cmp::Gt => seen > value,
            Cmp::Ge => seen >= value,
            Cmp::Lt => seen < value,
            Cmp::Le => seen <= value,
        }
    }

    /// The operator, such as "==".
    pub fn symbol(self) -> &'static str {
        match self {
            Cmp::Eq => "==",
            Cmp::Ne => "!=",
            Cmp::Gt => ">",
            Cmp::Ge => ">=",
            Cmp::Lt => "<",
            Cmp::Le => "<=",
        }
    }
}

/// One condition on one signal word of this PE, by byte offset in the heap.
#[derive(Clone, Copy, Debug)]
pub struct RawWait {
    /// Byte offset of the word, a multiple of 8.
    pub signal: usize,
    /// The comparison.
    pub cmp: Cmp,
    /// The right side of the comparison.
    pub value: u64,
    /// The PE whose operation is to fulfil the condition, if the caller knows it.
    pub from: Option<usize>,
}

/// A PE that no longer takes part: its process has exited or is unreachable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PE {pe} is lost: {why}")]
#[non_exhaustive]
pub struct LostPe {
    /// The PE's number in messages ([`Transport::world_pe`]).
    pub pe: usize,
    /// The observed cause, as a phrase.
    pub why: String,
}

impl LostPe {
    /// The loss of `pe`, with the observed cause as a phrase.
    pub fn new(pe: usize, why: impl Into<String>) -> Self {
        LostPe { pe, why: why.into() }
    }
}

/// Byte-level one-sided operations on a symmetric heap of fixed size.
///
/// Offsets are bytes from the heap's start, the same on every PE. The typed layer, [`Shmem`], has checked them, but an
/// implementation must still panic rather than access memory outside the heap. The crate documentation defines the semantics.
/// The heap is zero when the transport is created.
pub trait Transport {
    /// This PE's number, `0..n_pes`.
    fn my_pe(&self) -> usize;
    /// Number of PEs.
    fn n_pes(&self) -> usize;
    /// The number by which messages refer to PE `pe`; it differs from `pe` if this world is a group of a larger one.
    fn world_pe(&self, pe: usize) -> usize {
        pe
    }
    /// Size of each PE's heap, bytes.
    fn heap_bytes(&self) -> usize;
    /// Copies `src` to offset `dest` of `pe`.
    fn put(&self, dest: usize, src: &[u8], pe: usize);
    /// Starts copying `bytes` bytes from own offset `src` to offset `dest` of `pe`.
    fn put_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize);
    /// Copies from offset `src` of `pe` into `dest`.
    fn get(&self, dest: &mut [u8], src: usize, pe: usize);
    /// Starts copying `bytes` bytes from offset `src` of `pe` to own offset `dest`.
    fn get_nbi(&self, dest: usize, src: usize, bytes: usize, pe: usize);
    /// Copies `src` to offset `dest` of `pe`, then updates the signal word at offset `signal` there.
    fn put_signal(&self, dest: usize, src: &[u8], signal: usize, value: u64, op: SignalOp, pe: usize);
    /// Updates the signal word at offset `signal` of `pe`.
    fn signal_op(&self, signal: usize, value: u64, op: SignalOp, pe: usize);
    /// Reads the own signal word at offset `signal` (acquire).
    fn signal_fetch(&self, signal: usize) -> u64;
    /// Atomically adds to the u64 at offset `target` of `pe`; returns the previous value.
    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64;
    /// Waits until one of `waits` holds and returns its index; returns `None` if `deadline` passes, a PE is lost, or the PE of a wait has
    /// ended first.
    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize>;
    /// Orders deliveries to each PE.
    fn fence(&self);
    /// Completes every operation this PE has issued.
    fn quiet(&self);
    /// The first PE known to be lost, permanently. From then on, waits that do not hold end at once; puts and signals to a lost
    /// PE are dropped, gets and atomics on it return 0, and quiet does not wait for it.
    fn lost(&self) -> Option<LostPe> {
        None
    }
    /// Whether the process of `pe` is known to have ended. All that it sent before has then arrived.
    fn has_ended(&self, _pe: usize) -> bool {
        false
    }
    /// Whether the PE of one of `waits` has ended.
    fn waits_for_ended(&self, waits: &[RawWait]) -> bool {
        waits.iter().any(|wait| wait.from.is_some_and(|pe| self.has_ended(pe)))
    }
    /// The address of offset `offset` of `pe`, if this PE can load and store it directly.
    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>>;
    /// Whether loads and stores reach `pe`'s heap (same host or NVLink), so that [`Transport::ptr`] is `Some`, rather than a
    /// network. Chunk sizes depend on it.
    fn is_reachable(&self, pe: usize) -> bool;
}

/// A symmetric object: `len` elements of `T` at the same offset of every PE's heap.
#[derive(Debug)]
pub struct Sym<T> {
    offset: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Sym<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Sym<T> {}

impl<T: Pod> Sym<T> {
    /// Number of elements.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Byte offset in the heap.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The elements `range` of this object.
    ///
    /// # Panics
    /// If the range is not inside the object.
    pub fn slice(&self, range: Range<usize>) -> Sym<T> {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "range {range:?} outside a symmetric object of {} elements",
            self.len
        );
        Sym { offset: self.offset + range.start * size_of::<T>(), len: range.len(), element: PhantomData }
    }

    /// Element `index`, as an object of one element.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    pub fn at(&self, index: usize) -> Sym<T> {
        self.slice(index..index + 1)
    }
}

/// A condition on one signal word of this PE.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// The word: the first element of the object.
    pub signal: Sym<u64>,
    /// The comparison.
    pub cmp: Cmp,
    /// The right side of the comparison.
    pub value: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pes_are_send_and_sync() {
        fn is_send<T: Send>() {}
        fn is_shared<T: Send + Sync>() {}
        is_shared::<Shmem<ShmTransport>>();
        is_shared::<Shmem<tcp::TcpTransport>>();
        #[cfg(feature = "ofi")]
        is_shared::<Shmem<ofi::OfiTransport>>();
        is_shared::<Shmem<reorder::ReorderTransport>>();
        is_shared::<Shmem<Box<dyn Transport + Send + Sync>>>();
        is_send::<Shmem<GroupTransport<'_, ShmTransport>>>();
        is_send::<Sym<f32>>();
        is_send::<Team>();
    }

    #[cfg(not(miri))] // Miri has no memfd.
    #[test]
    fn threads_creates_a_world() {
        let need = Shmem::<ShmTransport>::heap_bytes_for(3, 0);
        let pes = threads(3, need).unwrap();
        let seen: Vec<_> = pes.iter().map(|pe| (pe.my_pe(), pe.n_pes(), pe.heap_bytes())).collect();
        assert_eq!(seen, [(0, 3, need), (1, 3, need), (2, 3, need)]);
        assert!(threads(0, need).unwrap().is_empty());
        assert_eq!(
            threads(3, 100).unwrap_err().to_string(),
            "unusable segment: a symmetric heap for 3 PEs has at least 512 bytes, this one 100"
        );
        assert!(matches!(threads(2, usize::MAX), Err(ShmemError::System { .. })));
    }

    #[test]
    fn slice_offsets_count_elements() {
        let sym = Sym::<u32>::new(128, 10);
        assert_eq!((sym.slice(3..7).offset(), sym.slice(3..7).len()), (140, 4));
        assert_eq!((sym.slice(3..7).at(3).offset(), sym.at(9).len()), (152, 1));
        assert_eq!((sym.slice(10..10).offset(), sym.slice(10..10).len()), (168, 0));
    }

    #[test]
    #[should_panic(expected = "range 2..5 outside a symmetric object of 4 elements")]
    fn slice_of_a_slice_is_bounds_checked() {
        let _ = Sym::<u32>::new(0, 10).slice(2..6).slice(2..5);
    }

    #[test]
    fn comparisons_and_symbols_agree() {
        let holds = |cmp: Cmp| [4, 5, 6].map(|seen| cmp.holds(seen, 5));
        let table = [
            (Cmp::Eq, "==", [false, true, false]),
            (Cmp::Ne, "!=", [true, false, true]),
            (Cmp::Gt, ">", [false, false, true]),
            (Cmp::Ge, ">=", [false, true, true]),
            (Cmp::Lt, "<", [true, false, false]),
            (Cmp::Le, "<=", [true, true, false]),
        ];
        for (cmp, symbol, expected) in table {
            assert_eq!((cmp.symbol(), holds(cmp)), (symbol, expected));
        }
    }
}
