//! The one-sided layer: symmetric memory, put, get, signals, fence, quiet, teams.
//!
//! The semantics are OpenSHMEM 1.5's (sections 9.3 to 9.11), and no stronger, whatever the transport:
//!
//! - **Symmetric objects.** A [`Sym`] names the same place in every PE's heap. Allocation is collective: every PE
//!   allocates the same sizes in the same order.
//! - **put** returns when its source may be reused, not when the data has arrived. **put_nbi** and **get_nbi** move
//!   data between symmetric objects, and return at once: until [`Shmem::quiet`] the source must not change and the
//!   destination must not be read. Puts to one PE are unordered among each other without a fence.
//! - **put_signal**: its own data is visible to whoever sees its signal; it orders no other put.
//! - **fence** orders deliveries to each PE (puts, signal operations, atomics before it are delivered before those
//!   after it); it completes nothing and orders no get. **quiet** completes everything this PE issued, everywhere.
//! - **Signals** are symmetric u64 words, atomic with signal operations and waits. Concurrent
//!   [`SignalOp::Set`] by several PEs race; use [`SignalOp::Add`], or one word per sender.
//! - **A lost PE**, where a transport notices ([`Transport::lost`]), ends every wait of the PEs that noticed, with an error that names it.
//! - A wait or test that sees a signal value also sees everything ordered before the operation that
//!   produced it: the put_signal's own data, and, through a fence, every earlier delivery of the same PE.
//!
//! To read or write bytes that a peer accesses meanwhile, one of the two writing, is against this contract, and yields
//! unspecified bytes. Memory holds plain bytes ([`Pod`]), for which any bytes are a value, so that a protocol in error gets
//! wrong values, never invalid ones; every access is checked against the object's bounds when its [`Sym`] is made.
//!
//! # Threads
//! [`Shmem`] is `Send` and `Sync` where its transport is: over [`ShmTransport`], [`tcp::TcpTransport`] and
//! [`reorder::ReorderTransport`] it is made in one thread and used in another. MPI's transport stays in the thread that
//! initialised MPI.
//!
//! # Example
//! Two PEs, threads of this process, that give each other a message.
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
mod pace;
pub mod reorder;
mod segment;
mod shm;
pub mod tcp;
mod team;
mod typed;
mod wait;

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Instant;

pub use bytemuck::Pod;

pub use error::{LostPe, ShmemError, WaitTimeout};
pub use group::GroupTransport;
pub use handle::AsShmem;
pub use host::host_id;
pub use meet::meet;
pub use memory::available_bytes;
pub use pace::{Hold, Pace};
pub use segment::Segment;
pub use shm::{ShmTransport, Watch};
pub use team::Team;
pub use typed::Shmem;

/// A world of `n_pes` PEs over shared memory in this process, by number: one for each of as many threads.
///
/// `heap_bytes` is the size of each PE's heap, what [`Shmem::new`] takes of it included: [`Shmem::heap_bytes_for`] says how
/// large it is for what a caller needs.
///
/// # Errors
/// When the heap is too small for [`Shmem::new`], or more than the host has.
pub fn threads(n_pes: usize, heap_bytes: usize) -> Result<Vec<Shmem<ShmTransport>>, ShmemError> {
    if n_pes == 0 {
        return Ok(Vec::new());
    }
    check_heap(n_pes, heap_bytes)?;
    Ok(ShmTransport::threads(n_pes, heap_bytes)?.into_iter().map(Shmem::new).collect())
}

/// Whether a heap has room for what [`Shmem::new`] takes of it.
fn check_heap(n_pes: usize, heap_bytes: usize) -> Result<(), ShmemError> {
    let reserved = Shmem::<ShmTransport>::reserved_bytes(n_pes, heap_bytes);
    if heap_bytes < reserved {
        let why = format!("a symmetric heap for {n_pes} PEs has at least {reserved} bytes, this one {heap_bytes}");
        return Err(ShmemError::Segment(why));
    }
    Ok(())
}

/// What a signal operation does with its value.
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

    /// As it is written between its sides.
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
    /// Its right side.
    pub value: u64,
}

/// What a transport provides: byte-level one-sided operations on a symmetric heap of fixed size.
///
/// Offsets are bytes from the heap's start, the same on every PE; the typed layer, [`Shmem`], has checked them.
/// An implementation must still never touch memory outside the heap: it panics instead. The semantics of each
/// operation are the module's. The heap is zero when the transport is made.
pub trait Transport {
    /// This PE's number, `0..n_pes`.
    fn my_pe(&self) -> usize;
    /// Number of PEs.
    fn n_pes(&self) -> usize;
    /// What messages call PE `pe`: another number where this world is a part of one.
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
    /// Atomically adds to the u64 at offset `target` of `pe`; returns what it was.
    fn fetch_add(&self, target: usize, value: u64, pe: usize) -> u64;
    /// Waits until one of `waits` holds, and says which; `None` when `deadline` passes first, or a PE is lost.
    fn wait_any(&self, waits: &[RawWait], deadline: Instant) -> Option<usize>;
    /// Orders deliveries to each PE.
    fn fence(&self);
    /// Completes every operation this PE has issued.
    fn quiet(&self);
    /// The first PE that is known to be lost, for good: from then on waits that do not hold end at once, puts and signals to a lost PE
    /// go nowhere, gets and atomics bring 0, and quiet waits for no lost PE.
    fn lost(&self) -> Option<LostPe> {
        None
    }
    /// The address of offset `offset` of `pe`, where this PE can load and store it directly.
    fn ptr(&self, offset: usize, pe: usize) -> Option<NonNull<u8>>;
    /// Whether `pe`'s heap is within reach of loads and stores (the same host, or NVLink) rather than of a network:
    /// what [`Transport::ptr`] is `Some` for, and what chunk sizes are chosen by.
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

    /// Element `index` of this object, as an object of one element.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn at(&self, index: usize) -> Sym<T> {
        self.slice(index..index + 1)
    }
}

/// A condition on one signal word of this PE.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// The word (the first of the object).
    pub signal: Sym<u64>,
    /// The comparison.
    pub cmp: Cmp,
    /// Its right side.
    pub value: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pes_move_between_threads() {
        fn moves<T: Send>() {}
        fn is_shared<T: Send + Sync>() {}
        is_shared::<Shmem<ShmTransport>>();
        is_shared::<Shmem<tcp::TcpTransport>>();
        #[cfg(feature = "ofi")]
        is_shared::<Shmem<ofi::OfiTransport>>();
        is_shared::<Shmem<reorder::ReorderTransport>>();
        moves::<Shmem<GroupTransport<'_, ShmTransport>>>();
        moves::<Sym<f32>>();
        moves::<Team>();
    }

    #[cfg(not(miri))] // Miri has no memfd.
    #[test]
    fn a_world_of_threads() {
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
    fn a_slice_counts_elements() {
        let sym = Sym::<u32>::new(128, 10);
        assert_eq!((sym.slice(3..7).offset(), sym.slice(3..7).len()), (140, 4));
        assert_eq!((sym.slice(3..7).at(3).offset(), sym.at(9).len()), (152, 1));
        assert_eq!((sym.slice(10..10).offset(), sym.slice(10..10).len()), (168, 0));
    }

    #[test]
    #[should_panic(expected = "range 2..5 outside a symmetric object of 4 elements")]
    fn a_slice_of_a_slice_stays_inside() {
        let _ = Sym::<u32>::new(0, 10).slice(2..6).slice(2..5);
    }

    #[test]
    fn a_comparison_reads_as_it_is_written() {
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
