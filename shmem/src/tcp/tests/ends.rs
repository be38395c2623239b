//! How a PE ends, and what the others see of it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::*;
use crate::{LostPe, Transport, Watch};

/// All PEs pass a barrier; `last` then calls the returned function to wait until the others have passed it.
fn all_but_one_pass_a_barrier(pe: &Shmem<TcpTransport>, last: usize) -> impl FnOnce() {
    let passed = pe.alloc::<u64>(1).unwrap();
    pe.barrier_all(soon()).unwrap();
    if pe.my_pe() != last {
        pe.signal_op(passed, 1, SignalOp::Add, last);
    }
    move || _ = pe.wait_until(Wait { signal: passed, cmp: Cmp::Eq, value: pe.n_pes() as u64 - 1 }, soon()).unwrap()
}

#[test]
fn panicking_pe_is_named_by_the_others() {
    let lines = worlds(3, |world| {
        let run = move || {
            let pe = shmem(&world, 1 << 16);
            let word = pe.alloc::<u64>(1).unwrap();
            let others_are_here = all_but_one_pass_a_barrier(&pe, 2);
            if pe.my_pe() == 2 {
                others_are_here();
                std::panic::resume_unwind(Box::new("planted"));
            }
            drop(others_are_here);
            let begun = Instant::now();
            let ended = pe.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap_err();
            assert!(begun.elapsed() < LIMIT / 2);
            // Operations on the lost PE, and all waits, end at once.
            pe.put(word, &[1], 2);
            assert_eq!(pe.fetch_add(word, 1, 2), 0);
            let mut got = [7];
            pe.get(&mut got, word, 2);
            pe.quiet();
            pe.barrier_all(soon()).unwrap_err();
            assert!(begun.elapsed() < LIMIT / 2);
            assert_eq!((got, ended.lost.as_ref().map(|lost| lost.pe)), ([0], Some(2)));
            // Kept until both have seen the loss: a PE that ends without a farewell is lost to the other.
            (ended.to_string(), pe, world)
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).ok()
    });
    assert_eq!(lines.len(), 3);
    for line in &lines[..2] {
        let (line, ..) = line.as_ref().unwrap();
        assert!(line.ends_with("saw 0; PE 2 is lost: its connection has ended"), "{line}");
    }
    assert!(lines[2].is_none());
}

#[test]
fn pe_that_ends_for_another_names_it() {
    let lost = worlds(3, |world| {
        let pe = shmem(&world, 1 << 16);
        let others_are_here = all_but_one_pass_a_barrier(&pe, 1);
        if pe.my_pe() == 1 {
            others_are_here();
            world.farewell(0, "it has not come");
            std::mem::forget((pe, world));
            return None;
        }
        drop(others_are_here);
        let word = pe.alloc::<u64>(1).unwrap();
        let ended = pe.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap_err();
        // Kept until both have seen the loss.
        Some((ended.lost.unwrap().to_string(), pe, world))
    });
    let lost: Vec<Option<&str>> = lost.iter().map(|kept| kept.as_ref().map(|(line, ..)| line.as_str())).collect();
    let line = Some("PE 0 is lost: it has not come");
    assert_eq!(lost, [line, None, line]);
}

#[test]
fn pe_that_leaves_is_no_loss_and_has_sent_all() {
    worlds(3, |world| {
        // More than the socket buffers hold.
        const BYTES: usize = 8 << 20;
        let pe = shmem(&world, 4 * BYTES);
        let (me, words, data) = (pe.my_pe(), pe.alloc::<u64>(3).unwrap(), pe.alloc::<u8>(BYTES).unwrap());
        let wait = |from| pe.wait_until(Wait { signal: words.at(from), cmp: Cmp::Eq, value: 1 }, soon()).unwrap();
        if me == 2 {
            (0..2).for_each(|to| pe.put_signal(data, &vec![7; BYTES], words.at(2), 1, SignalOp::Set, to));
            return world.leave(None);
        }
        let gone = || world.running().mesh.peer(2).ended.load(Ordering::SeqCst);
        let until = soon();
        while !gone() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        let mut seen = vec![0; BYTES];
        pe.get(&mut seen, data, me);
        assert!(gone() && seen == vec![7; BYTES]);
        // Frames to a PE that has left are dropped, and the others continue.
        pe.put(data, &vec![8; BYTES], 2);
        pe.signal_op(words.at(me), 1, SignalOp::Set, 1 - me);
        wait(2);
        wait(1 - me);
        pe.quiet();
        assert_eq!(pe.lost(), None);
        // A wait for that PE ends at once.
        let more = Wait { signal: words.at(2), cmp: Cmp::Eq, value: 2 };
        let ended = pe.wait_until_any_of(&[more], &[2], Instant::now() + 100 * LIMIT).unwrap_err();
        assert_eq!(ended.lost, Some(LostPe::new(2, "its process has ended")));
        world.leave(None);
    });
}

#[test]
fn pe_that_leaves_after_a_failure_is_named_with_its_reason() {
    let lost = worlds(3, |world| {
        let pe = shmem(&world, 1 << 16);
        let others_are_here = all_but_one_pass_a_barrier(&pe, 1);
        if pe.my_pe() == 1 {
            others_are_here();
            world.leave(Some("out of memory"));
            return None;
        }
        drop(others_are_here);
        let word = pe.alloc::<u64>(1).unwrap();
        let ended = pe.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap_err();
        world.leave(None);
        Some(ended.lost.unwrap().to_string())
    });
    let line = Some("PE 1 is lost: it failed: out of memory".to_string());
    assert_eq!(lost, [line.clone(), None, line]);
}

#[test]
fn watch_ends_a_wait_over_tcp() {
    struct Interrupted;
    impl Watch for Interrupted {
        fn lost(&self) -> Option<LostPe> {
            Some(LostPe::new(0, "it was interrupted"))
        }
    }
    worlds(2, |world| {
        let transport = TcpTransport::new(&world, 1 << 16, LIMIT).unwrap().watched(Arc::new(Interrupted));
        let pe: Shmem<Box<dyn Transport + Send + Sync>> = Shmem::new(Box::new(transport));
        let wait = Wait { signal: pe.alloc(1).unwrap(), cmp: Cmp::Eq, value: 1 };
        let ended = pe.wait_until(wait, soon()).unwrap_err();
        assert_eq!(ended.lost, Some(LostPe::new(0, "it was interrupted")));
        world.leave(None);
    });
}
