//! The conformance suite over the transports that work within one process, and tests that it detects faults.

#[macro_use]
mod suite;

use std::net::TcpListener;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

#[cfg(feature = "ofi")]
use aristos_shmem::ofi::OfiTransport;
use aristos_shmem::reorder::{ReorderTransport, ReorderWorld};
use aristos_shmem::tcp::{JoinLimits, Joining, TcpTransport, TcpWorld};
use aristos_shmem::{Cmp, Segment, ShmTransport, Shmem, SignalOp, Transport, Wait};
use suite::{HEAP_BYTES, World, soon};

/// One thread per transport, each a PE.
fn run_threads<T: Transport + Send>(transports: Vec<T>, f: impl Fn(&Shmem<T>) + Sync) {
    thread::scope(|scope| {
        for transport in transports {
            let f = &f;
            scope.spawn(move || f(&Shmem::new(transport)));
        }
    });
}

/// Shared memory: real segments, mapped separately by every PE; several runs, because threads race.
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

/// The reordering transport with a range of seeds.
struct Reorder(Range<u64>);

impl World for Reorder {
    type T = ReorderTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<ReorderTransport>) + Sync) {
        for seed in self.0.clone() {
            run_threads(ReorderWorld::new(n_pes, HEAP_BYTES, seed), &f);
        }
    }
}

/// Threads that join over the loopback interface as processes do, `rounds` times; `f` gets each one's world.
fn join_threads(n_pes: usize, rounds: usize, f: impl Fn(TcpWorld) + Sync) {
    for _ in 0..rounds {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let rendezvous = listener.local_addr().unwrap().to_string();
        let mut listener = Some(listener);
        let limits = JoinLimits::default();
        thread::scope(|scope| {
            for pe in 0..n_pes {
                let (f, rendezvous, listener) = (&f, &rendezvous, listener.take());
                scope.spawn(move || {
                    let joining = Joining { pe, n_pes, rendezvous, program: "suite", token: b"token", limits };
                    let world = match listener {
                        Some(listener) => TcpWorld::join_at(&joining, listener),
                        None => TcpWorld::join(&joining),
                    };
                    f(world.unwrap());
                });
            }
        });
    }
}

/// TCP over the loopback interface; each PE has a progress thread.
struct Tcp {
    is_hybrid: bool,
}

impl World for Tcp {
    type T = TcpTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<TcpTransport>) + Sync) {
        let make = if self.is_hybrid { TcpTransport::hybrid } else { TcpTransport::new };
        join_threads(n_pes, 2, |world| f(&Shmem::new(make(&world, HEAP_BYTES, JoinLimits::default().join).unwrap())));
    }
}

/// The provider in ARISTOS_OFI_PROVIDER, by default libfabric's TCP provider.
#[cfg(feature = "ofi")]
fn ofi_provider() -> String {
    std::env::var("ARISTOS_OFI_PROVIDER").unwrap_or_else(|_| "tcp;ofi_rxm".to_string())
}

/// libfabric over the loopback interface.
#[cfg(feature = "ofi")]
struct Ofi {
    /// Maximum bytes per operation.
    piece_bytes: Option<usize>,
}

#[cfg(feature = "ofi")]
impl World for Ofi {
    type T = OfiTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<OfiTransport>) + Sync) {
        let provider = ofi_provider();
        join_threads(n_pes, 1, |world| {
            let limit = JoinLimits::default().join;
            let transport = OfiTransport::new(&world, HEAP_BYTES, Some(&provider), limit).unwrap();
            f(&Shmem::new(match self.piece_bytes {
                Some(bytes) => transport.with_piece_bytes(bytes),
                None => transport,
            }));
        });
    }
}

#[cfg(feature = "ofi")]
mod ofi {
    conformance_tests!(super::Ofi { piece_bytes: None });
}

/// The checks that transfer more than a word, with several operations per put and get.
#[cfg(feature = "ofi")]
#[test]
fn ofi_in_pieces() {
    let world = Ofi { piece_bytes: Some(24) };
    suite::puts_are_complete_after_a_barrier(&world);
    suite::put_signal_brings_its_own_data(&world);
    suite::a_fence_orders_puts_before_a_signal(&world);
    suite::get_reads_a_peer(&world);
    suite::quiet_completes_nbi(&world);
}

/// Rounds with far more data than sockets buffer, in both directions: no signal may arrive before its data, neither its own nor
/// that before a fence.
#[cfg(feature = "ofi")]
#[test]
fn ofi_signals_follow_large_data() {
    let provider = ofi_provider();
    join_threads(2, 1, |world| {
        let (n, len) = (4, 128 << 10);
        let transport = OfiTransport::new(&world, 16 << 20, Some(&provider), JoinLimits::default().join);
        let pe = Shmem::new(transport.unwrap());
        let (data, words) = (pe.alloc::<u64>(n * len).unwrap(), pe.alloc::<u64>(n).unwrap());
        let part = |i: usize| data.slice(i * len..(i + 1) * len);
        let to = 1 - pe.my_pe();
        for round in 1..=12 {
            let values = vec![round; len];
            for i in 0..n {
                if round % 2 == 0 {
                    pe.put_signal(part(i), &values, words.at(i), round, SignalOp::Set, to);
                } else {
                    pe.put(part(i), &values, to);
                    pe.fence();
                    pe.signal_op(words.at(i), round, SignalOp::Set, to);
                }
            }
            for i in 0..n {
                suite::wait(&pe, words.at(i), Cmp::Ge, round);
                assert!(
                    suite::read(&pe, part(i)) == values,
                    "PE {to}'s signal {i} of round {round} came before its data"
                );
            }
            pe.barrier_all(soon()).unwrap();
        }
    });
}

mod tcp {
    conformance_tests!(super::Tcp { is_hybrid: false });
}

/// All PEs on one host.
mod hybrid {
    conformance_tests!(super::Tcp { is_hybrid: true });
}

mod shm {
    conformance_tests!(super::Shm);
}

mod reorder {
    conformance_tests!(super::Reorder(0..100));
}

/// Faults that the reordering transport must reveal in wrong protocols, and must not introduce into correct ones.
mod fault_detection {
    use super::*;

    /// Number of the 64 seeds that reveal a fault: `f` returns whether PE 1 has seen the expected data.
    fn detections(f: impl Fn(&Shmem<ReorderTransport>) -> bool + Sync) -> usize {
        let wrong = AtomicUsize::new(0);
        Reorder(0..64).run(2, |shmem| {
            if !f(shmem) {
                wrong.fetch_add(1, Ordering::Relaxed);
            }
        });
        wrong.into_inner()
    }

    /// PE 0 puts and signals, with or without a fence in between; PE 1 reads the data that the signal should announce.
    fn put_then_signal(fence: bool) -> usize {
        detections(|shmem| {
            let (data, word) = (shmem.alloc::<u64>(8).unwrap(), shmem.alloc::<u64>(1).unwrap());
            if shmem.my_pe() == 0 {
                shmem.put(data, &[5; 8], 1);
                if fence {
                    shmem.fence();
                }
                shmem.signal_op(word, 1, SignalOp::Set, 1);
                return true;
            }
            shmem.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap();
            suite::read(shmem, data) == [5; 8]
        })
    }

    #[test]
    fn missing_fence_is_detected() {
        assert_eq!(put_then_signal(true), 0);
        let detections = put_then_signal(false);
        assert!(detections >= 16, "{detections} of 64 seeds show it");
    }

    #[test]
    fn put_signal_without_fence_does_not_announce_earlier_put() {
        let run = |fence: bool| {
            detections(|shmem| {
                let (data, word) = (shmem.alloc::<u64>(2).unwrap(), shmem.alloc::<u64>(1).unwrap());
                if shmem.my_pe() == 0 {
                    shmem.put(data.at(0), &[5], 1);
                    if fence {
                        shmem.fence();
                    }
                    shmem.put_signal(data.at(1), &[5], word, 1, SignalOp::Add, 1);
                    return true;
                }
                shmem.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap();
                assert_eq!(suite::read(shmem, data.at(1)), [5], "its own data is there");
                suite::read(shmem, data.at(0)) == [5]
            })
        };
        assert_eq!(run(true), 0);
        assert!(run(false) >= 8);
    }

    #[test]
    fn get_nbi_read_before_quiet_is_detected() {
        let run = |quiet: bool| {
            detections(|shmem| {
                let (theirs, mine) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(1).unwrap());
                shmem.put(theirs, &[5], shmem.my_pe());
                shmem.barrier_all(soon()).unwrap();
                shmem.get_nbi(mine, theirs, 1 - shmem.my_pe());
                if quiet {
                    shmem.quiet();
                }
                shmem.my_pe() == 0 || suite::read(shmem, mine) == [5]
            })
        };
        assert_eq!(run(true), 0);
        assert!(run(false) >= 16);
    }

    #[test]
    fn source_overwritten_before_quiet_is_detected() {
        let run = |quiet: bool| {
            detections(|shmem| {
                let (source, data) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(1).unwrap());
                if shmem.my_pe() == 0 {
                    shmem.put(source, &[5], 0);
                    shmem.quiet();
                    shmem.put_nbi(data, source, 1);
                    if quiet {
                        shmem.quiet();
                    }
                    shmem.put(source, &[6], 0);
                }
                shmem.barrier_all(soon()).unwrap();
                shmem.my_pe() == 0 || suite::read(shmem, data) == [5]
            })
        };
        assert_eq!(run(true), 0);
        assert!(run(false) >= 8);
    }

    #[test]
    fn fence_instead_of_quiet_is_detected() {
        // The fence orders PE 0's put to PE 1 before its signals to PE 1 only, not before a signal through PE 2.
        let run = |quiet: bool| {
            let wrong = AtomicUsize::new(0);
            Reorder(0..64).run(3, |shmem| {
                let (data, word) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(1).unwrap());
                let wait = || shmem.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap();
                match shmem.my_pe() {
                    0 => {
                        shmem.put(data, &[5], 1);
                        if quiet {
                            shmem.quiet()
                        } else {
                            shmem.fence()
                        }
                        shmem.signal_op(word, 1, SignalOp::Set, 2);
                    }
                    2 => {
                        wait();
                        shmem.signal_op(word, 1, SignalOp::Set, 1);
                    }
                    _ => {
                        wait();
                        if suite::read(shmem, data) != [5] {
                            wrong.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
            wrong.into_inner()
        };
        assert_eq!(run(true), 0);
        assert!(run(false) >= 8);
    }

    #[test]
    fn racing_sets_are_reordered() {
        // Two SETs of one PE without a fence: the first may be delivered last.
        let run = |fence: bool| {
            detections(|shmem| {
                let word = shmem.alloc::<u64>(1).unwrap();
                if shmem.my_pe() == 0 {
                    shmem.signal_op(word, 1, SignalOp::Set, 1);
                    if fence {
                        shmem.fence();
                    }
                    shmem.signal_op(word, 2, SignalOp::Set, 1);
                }
                shmem.barrier_all(soon()).unwrap();
                shmem.my_pe() == 0 || shmem.signal_fetch(word) == 2
            })
        };
        assert_eq!(run(true), 0);
        assert!(run(false) >= 8);
    }

    #[test]
    fn missing_signal_ends_waits_before_the_deadline() {
        Reorder(0..50).run(3, |shmem| {
            let word = shmem.alloc::<u64>(1).unwrap();
            let deadline = soon();
            if shmem.my_pe() > 0 {
                shmem.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, deadline).unwrap_err();
                assert!(std::time::Instant::now() < deadline);
            }
        });
    }

    #[test]
    fn panicking_pe_ends_waits_of_other_pes() {
        for seed in 0..20 {
            let transports = ReorderWorld::new(3, HEAP_BYTES, seed);
            thread::scope(|scope| {
                for transport in transports {
                    scope.spawn(move || {
                        let run = || {
                            let shmem = Shmem::new(transport);
                            shmem.sync_all(soon()).unwrap();
                            if shmem.my_pe() == 1 {
                                std::panic::resume_unwind(Box::new("injected"));
                            }
                            shmem.sync_all(soon())
                        };
                        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
                            Ok(ended) => assert!(ended.is_err()),
                            Err(injected) => assert_eq!(*injected.downcast_ref::<&str>().unwrap(), "injected"),
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn runs_are_reproducible_by_seed() {
        // PE 0's view of a race between the other PEs: reproducible per seed, and different between seeds.
        let run = |seed: u64| {
            let log = std::sync::Mutex::new(Vec::new());
            Reorder(seed..seed + 1).run(4, |shmem| {
                let ticket = shmem.alloc::<u64>(1).unwrap();
                for _ in 0..20 {
                    let seen = shmem.fetch_add(ticket, 1, 0);
                    log.lock().unwrap().push((seen, shmem.my_pe()));
                    shmem.signal_op(ticket, 100, SignalOp::Add, shmem.my_pe());
                }
            });
            let mut log = log.into_inner().unwrap();
            log.sort_unstable();
            log
        };
        let runs: Vec<_> = (0..8).map(run).collect();
        assert_eq!(runs, (0..8).map(run).collect::<Vec<_>>());
        assert!(runs.iter().skip(1).all(|other| *other != runs[0]));
    }

    #[test]
    fn a_pe_can_run_far_ahead() {
        // Maximum rounds that PE 1 completes before PE 0's first operation.
        let ahead = AtomicUsize::new(0);
        Reorder(0..64).run(2, |shmem| {
            let word = shmem.alloc::<u64>(1).unwrap();
            if shmem.my_pe() == 1 {
                (0..50).for_each(|_| _ = shmem.fetch_add(word, 1, 0));
            } else {
                ahead.fetch_max(shmem.signal_fetch(word) as usize, Ordering::Relaxed);
            }
        });
        assert_eq!(ahead.into_inner(), 50);
    }

    #[test]
    fn is_reachable_is_configurable() {
        for reachable in [false, true] {
            let transports = ReorderWorld::with_reachable(2, HEAP_BYTES, 1, reachable);
            run_threads(transports, |shmem| {
                assert_eq!(shmem.is_reachable(1), reachable);
                assert!(shmem.ptr(shmem.alloc::<u64>(1).unwrap(), 1).is_none());
            });
        }
    }
}

#[test]
fn heap_bytes_for_leaves_the_requested_bytes() {
    for n_pes in [1, 2, 3, 8, 300] {
        for bytes in (0..200_000).step_by(61).chain([1 << 20, 1 << 30]) {
            let heap_bytes = Shmem::<ShmTransport>::heap_bytes_for(n_pes, bytes);
            assert!(heap_bytes - Shmem::<ShmTransport>::reserved_bytes(n_pes, heap_bytes) >= bytes, "{n_pes}, {bytes}");
        }
    }
}
