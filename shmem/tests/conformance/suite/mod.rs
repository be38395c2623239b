//! The conformance suite: requirements of every transport, run on each through its [`World`].
//!
//! [`conformance_tests!`] turns every function here into a test for one world.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use aristos_shmem::{Cmp, Shmem, ShmemError, SignalOp, Sym, Team, Transport, Wait};

mod collectives;
pub use collectives::*;

/// The size of every PE's heap, bytes.
pub const HEAP_BYTES: usize = 256 << 10;

/// Creates PEs over one transport.
pub trait World {
    /// The transport.
    type T: Transport;
    /// Runs `f` on each of `n_pes` new PEs, possibly several times; panics if one of them panics.
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<Self::T>) + Sync);
}

/// A deadline that a working transport never reaches.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Waits for `signal cmp value`.
pub fn wait<T: Transport>(shmem: &Shmem<T>, signal: Sym<u64>, cmp: Cmp, value: u64) -> u64 {
    shmem.wait_until(Wait { signal, cmp, value }, soon()).unwrap()
}

/// Reads all of `sym` on this PE.
pub fn read<T: Transport>(shmem: &Shmem<T>, sym: Sym<u64>) -> Vec<u64> {
    let mut values = vec![0; sym.len()];
    shmem.get(&mut values, sym, shmem.my_pe());
    values
}

fn next<T: Transport>(shmem: &Shmem<T>) -> usize {
    (shmem.my_pe() + 1) % shmem.n_pes()
}

/// Every PE writes its row of each PE's table; after a barrier all rows have arrived.
pub fn puts_are_complete_after_a_barrier(world: &impl World) {
    for n_pes in [1, 2, 3, 5] {
        world.run(n_pes, |shmem| {
            let (me, n) = (shmem.my_pe(), shmem.n_pes());
            assert_eq!((n, shmem.heap_bytes()), (n_pes, HEAP_BYTES));
            let table = shmem.alloc::<u64>(n * 9).unwrap();
            for round in 0..4 {
                let row: Vec<u64> = (0..9).map(|i| (me * 100 + i + round * 1000) as u64).collect();
                (0..n).for_each(|pe| shmem.put(table.slice(me * 9..me * 9 + 9), &row, pe));
                shmem.barrier_all(soon()).unwrap();
                let expected: Vec<u64> = (0..n * 9).map(|i| (i / 9 * 100 + i % 9 + round * 1000) as u64).collect();
                assert_eq!(read(shmem, table), expected);
                // No PE may overwrite rows that another one still reads.
                shmem.sync_all(soon()).unwrap();
            }
        });
    }
}

/// A PE that sees put_signal's signal sees its data; one word per message, no fence.
pub fn put_signal_brings_its_own_data(world: &impl World) {
    world.run(3, |shmem| {
        let (rounds, len) = (8, 33);
        let data = shmem.alloc::<u64>(rounds * len).unwrap();
        let signal = shmem.alloc::<u64>(rounds).unwrap();
        for round in 0..rounds {
            let values: Vec<u64> = (0..len).map(|i| (round * 1000 + i + 1) as u64).collect();
            let op = if round % 2 == 0 { SignalOp::Set } else { SignalOp::Add };
            let to = next(shmem);
            shmem.put_signal(data.slice(round * len..(round + 1) * len), &values, signal.at(round), 7, op, to);
        }
        for round in (0..rounds).rev() {
            assert_eq!(wait(shmem, signal.at(round), Cmp::Eq, 7), 7);
            let seen = read(shmem, data.slice(round * len..(round + 1) * len));
            assert!(seen.iter().enumerate().all(|(i, &v)| v == (round * 1000 + i + 1) as u64), "{seen:?}");
        }
    });
}

/// A signal after a fence announces all earlier puts: put, put_nbi, put_signal.
pub fn a_fence_orders_puts_before_a_signal(world: &impl World) {
    world.run(2, |shmem| {
        let data = shmem.alloc::<u64>(30).unwrap();
        let source = shmem.alloc::<u64>(10).unwrap();
        let (done, other) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(1).unwrap());
        let to = next(shmem);
        shmem.put(source, &[4; 10], shmem.my_pe());
        shmem.quiet();
        shmem.put(data.slice(0..10), &[4; 10], to);
        shmem.put_nbi(data.slice(10..20), source, to);
        shmem.put_signal(data.slice(20..30), &[4; 10], other, 1, SignalOp::Set, to);
        shmem.fence();
        shmem.signal_op(done, 1, SignalOp::Set, to);
        wait(shmem, done, Cmp::Eq, 1);
        assert_eq!(read(shmem, data), [4; 30]);
        assert_eq!(shmem.signal_fetch(other), 1);
        shmem.quiet();
    });
}

/// Between fences the last write wins, and the last signal announces all of them.
pub fn fences_order_writes_of_one_place(world: &impl World) {
    world.run(2, |shmem| {
        let (word, place) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(4).unwrap());
        let to = next(shmem);
        for value in 1..=10 {
            shmem.put(place, &[value; 4], to);
            shmem.fence();
            shmem.signal_op(word, value, SignalOp::Set, to);
            shmem.fence();
        }
        let mut last = 0;
        while last < 10 {
            let seen = wait(shmem, word, Cmp::Gt, last);
            assert!(seen > last, "a SET after a fence was overtaken");
            last = seen;
            let data = read(shmem, place);
            assert!(data.iter().all(|&value| value >= last), "signal {last} came before its data {data:?}");
        }
        assert_eq!(read(shmem, place), [10; 4]);
    });
}

/// After quiet, the source of put_nbi may change and the destination of get_nbi is filled.
pub fn quiet_completes_nbi(world: &impl World) {
    world.run(3, |shmem| {
        let (me, to) = (shmem.my_pe() as u64, next(shmem));
        let source = shmem.alloc::<u64>(20).unwrap();
        let (put, got) = (shmem.alloc::<u64>(20).unwrap(), shmem.alloc::<u64>(20).unwrap());
        shmem.put(source, &[me + 10; 20], shmem.my_pe());
        shmem.barrier_all(soon()).unwrap();
        shmem.put_nbi(put, source, to);
        shmem.get_nbi(got, source, to);
        shmem.quiet();
        assert_eq!(read(shmem, got), [to as u64 + 10; 20]);
        shmem.sync_all(soon()).unwrap();
        shmem.put(source, &[99; 20], shmem.my_pe());
        let from = (shmem.my_pe() + 2) % 3;
        assert_eq!(read(shmem, put), [from as u64 + 10; 20]);
        shmem.barrier_all(soon()).unwrap();
        assert_eq!(read(shmem, source), [99; 20]);
    });
}

/// get reads a peer's memory, and a part of it.
pub fn get_reads_a_peer(world: &impl World) {
    world.run(3, |shmem| {
        let mine = shmem.alloc::<u32>(50).unwrap();
        let values: Vec<u32> = (0..50).map(|i| i + 1000 * shmem.my_pe() as u32).collect();
        shmem.put(mine, &values, shmem.my_pe());
        shmem.barrier_all(soon()).unwrap();
        for pe in 0..3 {
            let mut got = [0; 7];
            shmem.get(&mut got, mine.slice(40..50), pe);
            assert_eq!(got, std::array::from_fn(|i| 40 + i as u32 + 1000 * pe as u32));
        }
        shmem.sync_all(soon()).unwrap();
    });
}

/// fetch_add returns a different number to every caller.
pub fn fetch_add_hands_out_tickets(world: &impl World) {
    world.run(4, |shmem| {
        let (counter, taken) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(40).unwrap());
        for _ in 0..10 {
            let ticket = shmem.fetch_add(counter, 1, 0);
            shmem.put(taken.at(ticket as usize), &[shmem.my_pe() as u64 + 1], 0);
        }
        shmem.barrier_all(soon()).unwrap();
        if shmem.my_pe() == 0 {
            let taken = read(shmem, taken);
            (1..=4).for_each(|pe| assert_eq!(taken.iter().filter(|&&by| by == pe).count(), 10, "{taken:?}"));
            assert_eq!(shmem.signal_fetch(counter), 40);
            assert_eq!(shmem.fetch_add(counter, u64::MAX, 0), 40);
            assert_eq!(shmem.signal_fetch(counter), 39, "it wraps");
        }
    });
}

/// A fetch_add after a fence is delivered after the puts before it, and wakes a waiter on its word.
pub fn fetch_add_after_a_fence_announces(world: &impl World) {
    world.run(2, |shmem| {
        let (word, data) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(9).unwrap());
        shmem.put(data, &[3; 9], next(shmem));
        shmem.fence();
        assert_eq!(shmem.fetch_add(word, 5, next(shmem)), 0);
        assert_eq!(wait(shmem, word, Cmp::Ne, 0), 5);
        assert_eq!(read(shmem, data), [3; 9]);
    });
}

/// ADDs of all PEs accumulate; SET replaces.
pub fn signals_set_and_add(world: &impl World) {
    world.run(4, |shmem| {
        let (sum, set) = (shmem.alloc::<u64>(1).unwrap(), shmem.alloc::<u64>(1).unwrap());
        for pe in 0..4 {
            for _ in 0..5 {
                shmem.signal_op(sum, 1 << (8 * shmem.my_pe()), SignalOp::Add, pe);
            }
        }
        assert_eq!(wait(shmem, sum, Cmp::Ge, 0x0505_0505), 0x0505_0505);
        shmem.signal_op(set, u64::MAX, SignalOp::Set, next(shmem));
        shmem.fence();
        shmem.signal_op(set, 3, SignalOp::Add, next(shmem));
        assert_eq!(wait(shmem, set, Cmp::Eq, 2), 2, "an ADD wraps");
    });
}

/// A wait with any comparison ends when it holds, and test agrees.
pub fn waits_compare(world: &impl World) {
    // (comparison, right side, values in the order in which they are set): only the last value satisfies it.
    let cases = [
        (Cmp::Eq, 5, [4, 6, 5]),
        (Cmp::Ne, 0, [0, 0, 1]),
        (Cmp::Gt, 5, [4, 5, 6]),
        (Cmp::Ge, 5, [3, 4, 5]),
        (Cmp::Lt, 5, [6, 5, 4]),
        (Cmp::Le, 5, [7, 6, 5]),
    ];
    world.run(2, |shmem| {
        let (words, turns) = (shmem.alloc::<u64>(6).unwrap(), shmem.alloc::<u64>(6).unwrap());
        for (i, (cmp, value, sets)) in cases.into_iter().enumerate() {
            let wanted = Wait { signal: words.at(i), cmp, value };
            if shmem.my_pe() == 0 {
                for (step, set) in sets.into_iter().enumerate() {
                    shmem.signal_op(words.at(i), set, SignalOp::Set, 1);
                    shmem.fence();
                    shmem.signal_op(turns.at(i), step as u64 + 1, SignalOp::Set, 1);
                    wait(shmem, turns.at(i), Cmp::Eq, step as u64 + 1);
                }
            } else {
                for step in 1..=2 {
                    wait(shmem, turns.at(i), Cmp::Eq, step);
                    assert!(!shmem.test(wanted), "{cmp:?} step {step}");
                    shmem.signal_op(turns.at(i), step, SignalOp::Set, 0);
                }
                assert_eq!(shmem.wait_until(wanted, soon()), Ok(sets[2]));
                assert!(shmem.test(wanted));
                shmem.signal_op(turns.at(i), 3, SignalOp::Set, 0);
            }
        }
    });
}

/// wait_until_any finds each word once it has changed.
pub fn wait_any_finds_all(world: &impl World) {
    world.run(3, |shmem| {
        let words = shmem.alloc::<u64>(3).unwrap();
        (0..3).for_each(|pe| shmem.signal_op(words.at(shmem.my_pe()), 1, SignalOp::Add, pe));
        let mut left = vec![0, 1, 2];
        while !left.is_empty() {
            let waits: Vec<_> = left.iter().map(|&i| Wait { signal: words.at(i), cmp: Cmp::Ne, value: 0 }).collect();
            let found = shmem.wait_until_any(&waits, soon()).unwrap();
            assert!(shmem.test(waits[found]));
            left.remove(found);
        }
    });
}

/// PE 0 polls with test until the signal arrives.
pub fn polling_gets_there(world: &impl World) {
    world.run(2, |shmem| {
        let word = shmem.alloc::<u64>(1).unwrap();
        shmem.signal_op(word, 1, SignalOp::Set, next(shmem));
        let end = soon();
        while !shmem.test(Wait { signal: word, cmp: Cmp::Eq, value: 1 }) {
            assert!(Instant::now() < end);
            std::thread::yield_now();
        }
    });
}

/// A wait past its deadline reports the expected and the seen value; a condition that already holds succeeds.
pub fn a_deadline_ends_a_wait(world: &impl World) {
    world.run(2, |shmem| {
        let word = shmem.alloc::<u64>(2).unwrap();
        shmem.signal_op(word, 3, SignalOp::Set, shmem.my_pe());
        wait(shmem, word, Cmp::Eq, 3);
        let wanted = Wait { signal: word, cmp: Cmp::Ge, value: 4 };
        for deadline in [Instant::now(), Instant::now() + Duration::from_millis(3)] {
            let timeout = shmem.wait_until(wanted, deadline).unwrap_err();
            assert_eq!((timeout.expected, timeout.seen, timeout.cmp, timeout.index), (4, 3, Cmp::Ge, 0));
            assert!(timeout.to_string().contains("for a signal >= 4, saw 3"), "{timeout}");
            let any = [Wait { signal: word.at(1), ..wanted }, wanted];
            let timeout = shmem.wait_until_any(&any, deadline).unwrap_err();
            assert_eq!((timeout.expected, timeout.seen, timeout.index), (4, 0, 0));
        }
        let past = Instant::now();
        assert_eq!(shmem.wait_until(Wait { value: 3, ..wanted }, past), Ok(3));
        assert_eq!(shmem.wait_until_any(&[wanted, Wait { value: 1, ..wanted }], past), Ok(1));
    });
}

/// A collective operation names a PE that does not take part.
pub fn a_missing_pe_is_named(world: &impl World) {
    world.run(2, |shmem| {
        if shmem.my_pe() == 0 {
            let timeout = shmem.sync_all(Instant::now() + Duration::from_millis(2)).unwrap_err();
            assert_eq!((timeout.index, timeout.seen, timeout.expected), (1, 0, 1));
            let world = Team::clone(shmem.world());
            let timeout = shmem.all_reduce_sum(&world, &mut [1.0; 3], Instant::now()).unwrap_err();
            assert_eq!(timeout.index, 1);
        }
    });
}

/// Objects without elements, and transfers without bytes.
pub fn nothing_is_an_ordinary_size(world: &impl World) {
    world.run(2, |shmem| {
        let (none, word) = (shmem.alloc::<f32>(0).unwrap(), shmem.alloc::<u64>(1).unwrap());
        shmem.put(none, &[], next(shmem));
        shmem.put_nbi(none, none, next(shmem));
        shmem.get(&mut [], none, next(shmem));
        shmem.get_nbi(none, none, next(shmem));
        shmem.put_signal(none, &[], word, 2, SignalOp::Add, next(shmem));
        wait(shmem, word, Cmp::Eq, 2);
        shmem.free(none);
    });
}

/// The allocator: symmetric offsets, alignment, reuse, usage counters, errors.
pub fn allocation(world: &impl World) {
    world.run(2, |shmem| {
        let reserved = shmem.used_bytes();
        assert_eq!(reserved, shmem.peak_bytes());
        assert!(reserved <= HEAP_BYTES / 12, "{reserved} bytes are too many to keep for itself");
        let a = shmem.alloc::<u16>(33).unwrap();
        let b = shmem.alloc::<u64>(10).unwrap();
        assert_eq!((a.offset() % 64, b.offset() % 64, b.offset() - a.offset()), (0, 0, 128));
        assert_eq!((shmem.used_bytes(), shmem.peak_bytes()), (reserved + 256, reserved + 256));
        shmem.free(a);
        assert_eq!((shmem.used_bytes(), shmem.peak_bytes()), (reserved + 128, reserved + 256));
        assert_eq!(shmem.alloc::<u8>(1).unwrap().offset(), a.offset());
        let error = shmem.alloc::<u64>(HEAP_BYTES / 8).unwrap_err();
        let ShmemError::OutOfMemory { asked_bytes, free_bytes, .. } = &error else { panic!("{error}") };
        assert_eq!((*asked_bytes, *free_bytes), (HEAP_BYTES, HEAP_BYTES - reserved - 192));
        assert!(error.to_string().contains("262144 bytes asked"), "{error}");
        assert!(shmem.alloc::<u64>(usize::MAX).is_err());
    });
}

/// Out-of-bounds operations panic with the numbers and leave memory unchanged.
pub fn misuse_panics(world: &impl World) {
    world.run(1, |shmem| {
        let sym = shmem.alloc::<u64>(4).unwrap();
        let panics = |f: &dyn Fn()| {
            let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("it must panic");
            payload.downcast_ref::<String>().cloned().or(payload.downcast_ref::<&str>().map(|s| s.to_string())).unwrap()
        };
        assert_eq!(panics(&|| shmem.put(sym, &[1; 5], 0)), "5 elements from or to a symmetric object of 4");
        assert_eq!(panics(&|| shmem.put(sym, &[1; 4], 1)), "PE 1 of 1");
        assert_eq!(panics(&|| shmem.get(&mut [0; 2], sym.at(3), 0)), "2 elements from or to a symmetric object of 1");
        assert_eq!(panics(&|| shmem.signal_op(sym, 1, SignalOp::Set, 7)), "PE 7 of 1");
        assert_eq!(panics(&|| _ = shmem.signal_fetch(sym.slice(2..2))), "a signal is at least one word");
        assert!(panics(&|| _ = sym.slice(3..5)).contains("3..5 outside"));
        assert!(panics(&|| shmem.free(sym.at(1))).contains("are not an allocation"));
        assert_eq!(read(shmem, sym), [0; 4]);
    });
}

/// Calls the macro `$then` with `$given` and the names of all checks.
#[macro_export]
macro_rules! conformance_checks {
    ($then:ident $given:tt) => {
        $crate::$then!(@ $given;
            puts_are_complete_after_a_barrier put_signal_brings_its_own_data a_fence_orders_puts_before_a_signal
            fences_order_writes_of_one_place quiet_completes_nbi get_reads_a_peer fetch_add_hands_out_tickets
            fetch_add_after_a_fence_announces signals_set_and_add waits_compare wait_any_finds_all polling_gets_there
            a_deadline_ends_a_wait a_missing_pe_is_named nothing_is_an_ordinary_size allocation misuse_panics
            teams_synchronise_one_pe_ahead nested_teams all_reduce_adds_in_team_order all_reduce_back_to_back
            all_gather_collects);
    };
}

/// Makes a `#[test]` of every check for the world that the expression `$world` creates.
#[macro_export]
macro_rules! conformance_tests {
    ($world:expr) => {
        $crate::conformance_checks!(conformance_tests ($world));
    };
    (@ ($world:expr); $($check:ident)*) => {
        $(
            #[test]
            fn $check() {
                $crate::suite::$check(&$world);
            }
        )*
    };
}

/// Makes a table `$table` of all checks by name, for worlds of the type `$world`.
#[macro_export]
macro_rules! conformance_table {
    ($table:ident, $world:ident) => {
        $crate::conformance_checks!(conformance_table ($table $world));
    };
    (@ ($table:ident $world:ident); $($check:ident)*) => {
        pub(crate) const $table: &[(&str, fn(&$world))] = &[$((stringify!($check), |world| $crate::suite::$check(world))),*];
    };
}
