//! Loom's exploration of all interleavings of signals and the doorbell: `doorbell.rs` itself, over loom's atomics.
//!
//! Each of these changes to it, made by hand, fails at least one model:
//! - `Relaxed` instead of Release for the store or the add in `signal`: the data is not visible;
//! - no `full_fence` in `ring` or in `sleep_until`: the wake-up is lost (loom reports a deadlock);
//! - `Relaxed` for W0: the waiter takes the new bell for the old one and sleeps although it was signalled;
//! - W0 after W2: the same.

#[macro_use]
#[path = "../src/doorbell.rs"]
mod doorbell;

use std::sync::atomic::Ordering;
use std::time::Duration;

use aristos_shmem::SignalOp;
use doorbell::{Doorbell, Word, signal, sleep_until};
use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

word!(AtomicU32, u32);
word!(AtomicU64, u64);

/// A peer's segment: a doorbell whose futex is a mutex and a condition variable, signal words, and data.
struct Peer {
    waiters: AtomicU32,
    bell: AtomicU32,
    asleep: Mutex<()>,
    wake: Condvar,
    words: [AtomicU64; 2],
    data: [AtomicU64; 2],
}

impl Doorbell for Peer {
    type U32 = AtomicU32;
    fn waiters(&self) -> &AtomicU32 {
        &self.waiters
    }
    fn bell(&self) -> &AtomicU32 {
        &self.bell
    }
    // The kernel compares and falls asleep atomically, under the lock that a wake takes.
    fn futex_wait(&self, seen: u32, _at_most: Duration) {
        let guard = self.asleep.lock().unwrap();
        if self.bell.load(Ordering::Relaxed) == seen {
            drop(self.wake.wait(guard).unwrap());
        }
    }
    fn futex_wake(&self) {
        drop(self.asleep.lock().unwrap());
        self.wake.notify_all();
    }
    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}

fn peer() -> Arc<Peer> {
    Arc::new(Peer {
        waiters: AtomicU32::new(0),
        bell: AtomicU32::new(0),
        asleep: Mutex::new(()),
        wake: Condvar::new(),
        words: [AtomicU64::new(0), AtomicU64::new(0)],
        data: [AtomicU64::new(0), AtomicU64::new(0)],
    })
}

/// Sleeps without a deadline until `word` of `peer` is at least `value`.
fn sleep(peer: &Peer, word: usize, value: u64) {
    let check = || (peer.words[word].load(Ordering::Acquire) >= value).then_some(());
    sleep_until(peer, check, || Some(Duration::MAX)).expect("it has no deadline");
}

fn put(peer: &Peer, index: usize, value: u64) {
    peer.data[index].store(value, Ordering::Relaxed);
}

fn data(peer: &Peer, index: usize) -> u64 {
    peer.data[index].load(Ordering::Relaxed)
}

#[test]
fn set_signal_announces_data() {
    loom::model(|| {
        let peer = peer();
        let remote = peer.clone();
        let sender = thread::spawn(move || {
            put(&remote, 0, 7);
            signal(&remote.words[0], 1, SignalOp::Set, &*remote);
        });
        sleep(&peer, 0, 1);
        assert_eq!(data(&peer, 0), 7);
        sender.join().unwrap();
    });
}

/// Explores all runs with at most `preemptions` preemptions; without a bound these models take hours.
fn bounded_model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(f);
}

#[test]
fn adds_of_two_senders_announce_both_data() {
    bounded_model(3, || {
        let peer = peer();
        let senders: Vec<_> = (0..2)
            .map(|i| {
                let remote = peer.clone();
                thread::spawn(move || {
                    put(&remote, i, 7);
                    signal(&remote.words[0], 1, SignalOp::Add, &*remote);
                })
            })
            .collect();
        sleep(&peer, 0, 2);
        assert_eq!((data(&peer, 0), data(&peer, 1)), (7, 7));
        senders.into_iter().for_each(|sender| sender.join().unwrap());
    });
}

#[test]
fn second_signal_ends_second_sleep() {
    bounded_model(4, || {
        let peer = peer();
        let remote = peer.clone();
        let sender = thread::spawn(move || {
            signal(&remote.words[0], 1, SignalOp::Set, &*remote);
            put(&remote, 1, 7);
            signal(&remote.words[1], 1, SignalOp::Set, &*remote);
        });
        sleep(&peer, 0, 1);
        sleep(&peer, 1, 1);
        assert_eq!(data(&peer, 1), 7);
        sender.join().unwrap();
    });
}
