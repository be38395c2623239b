//! Ordering that the conformance suite cannot test over a provider that preserves order anyway, as TCP's does.

use std::net::TcpListener;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use super::OfiTransport;
use super::ffi::Kind;
use crate::tcp::{JoinLimits, Joining, TcpWorld};
use crate::{Cmp, RawWait, SignalOp, Transport};

const LIMIT: Duration = Duration::from_secs(20);

/// Runs `f` on two PEs, threads of this process.
fn pair(f: impl Fn(OfiTransport) + Sync) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rendezvous = listener.local_addr().unwrap().to_string();
    let mut listener = Some(listener);
    thread::scope(|scope| {
        for pe in 0..2 {
            let (f, rendezvous, listener) = (&f, &rendezvous, listener.take());
            scope.spawn(move || {
                let limits = JoinLimits::default();
                let joining = Joining { pe, n_pes: 2, rendezvous, program: "test", token: b"token", limits };
                let world = match listener {
                    Some(listener) => TcpWorld::join_at(&joining, listener),
                    None => TcpWorld::join(&joining),
                };
                f(OfiTransport::new(&world.unwrap(), 4096, Some("tcp;ofi_rxm"), LIMIT).unwrap());
            });
        }
    });
}

#[test]
fn signal_is_posted_after_its_data_has_arrived() {
    let (frozen, seen) = (Barrier::new(2), Barrier::new(2));
    let wait = |pe: &OfiTransport, signal: usize| {
        let wait = RawWait { signal, cmp: Cmp::Eq, value: 1, from: None };
        assert_eq!(pe.wait_any(&[wait], Instant::now() + LIMIT), Some(0));
    };
    pair(|pe| {
        let other = 1 - pe.my_pe();
        // After this exchange the PEs are connected.
        pe.signal_op(0, 1, SignalOp::Set, other);
        wait(&pe, 0);
        pe.quiet();
        if pe.my_pe() == 1 {
            let guard = pe.engine().freeze();
            frozen.wait();
            seen.wait();
            drop(guard);
            wait(&pe, 8);
            let mut data = [0; 64];
            pe.get(&mut data, 64, 1);
            assert_eq!(data, [7; 64]);
        } else {
            frozen.wait();
            pe.put_signal(64, &[7; 64], 8, 1, SignalOp::Set, 1);
            // An operation after a fence must also wait for the signal.
            pe.fence();
            pe.signal_op(16, 1, SignalOp::Set, 1);
            let poll = |_| {
                pe.engine().advance(true);
                thread::sleep(Duration::from_millis(5));
                pe.engine().posted()
            };
            let posted: Vec<_> = (0..20).map(poll).collect();
            // Release PE 1 before an assertion can fail here, so that it does not hang.
            seen.wait();
            assert!(posted.iter().all(|posted| *posted == [Kind::Write]), "{posted:?}");
        }
    });
}
