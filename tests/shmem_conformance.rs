//! The conformance suite over the transports that need nothing but this process, and proof that it bites.

#[macro_use]
mod conformance;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use aristos::shmem::reorder::{ReorderTransport, ReorderWorld};
use aristos::shmem::{Cmp, Segment, ShmTransport, Shmem, SignalOp, Transport, Wait};
use conformance::{HEAP_BYTES, World, soon};

/// One thread per transport, each a PE.
fn run_threads<T: Transport + Send>(transports: Vec<T>, f: impl Fn(&Shmem<T>) + Sync) {
    thread::scope(|scope| {
        for transport in transports {
            let f = &f;
            scope.spawn(move || f(&Shmem::new(transport)));
        }
    });
}

/// Shared memory: real segments, mapped once for every PE, and a few runs because threads race as they like.
struct Shm;

impl World for Shm {
    type T = ShmTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<ShmTransport>) + Sync) {
        for _ in 0..5 {
            let own: Vec<_> = (0..n_pes).map(|_| Segment::create("test", HEAP_BYTES).unwrap()).collect();
            let map = |segment: &Segment| Segment::from_fd(segment.fd().try_clone_to_owned().unwrap()).unwrap();
            let transports =
                (0..n_pes).map(|pe| ShmTransport::new(pe, own.iter().map(map).collect()).unwrap()).collect();
            run_threads(transports, &f);
        }
    }
}

/// The reordering transport, over seeds.
struct Reorder(Range<u64>);

impl World for Reorder {
    type T = ReorderTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<ReorderTransport>) + Sync) {
        for seed in self.0.clone() {
            run_threads(ReorderWorld::new(n_pes, HEAP_BYTES, seed), &f);
        }
    }
}

mod shm {
    conformance_tests!(super::Shm);
}

mod reorder {
    conformance_tests!(super::Reorder(0..100));
}
