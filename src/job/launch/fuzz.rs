//! Mutated frames on the sockets of a job must not cause a panic, nor an allocation for bytes that have not arrived.

#[path = "../../../tests/mutate/mod.rs"]
mod mutate;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::net::RecvFlags;

use crate::job::messages::Messages;
use crate::job::request::{DeviceKind, ProbeRequest, ProbedExpert, Request};
use crate::moe::Dtype;
use crate::probe::ProbeOptions;
use crate::shmem::control::frame::{self, Inbox, Kind};
use crate::shmem::control::{Hello, Nonce};

const ROUNDS: u64 = 4000;

/// The bytes of three frames that a PE may send.
fn frames() -> Vec<u8> {
    let (sender, mut receiver) = UnixStream::pair().unwrap();
    for (kind, body) in [(Kind::Running, &7_u32.to_le_bytes()[..]), (Kind::Message, b"[1, 2.5]"), (Kind::Done, b"")] {
        frame::send(sender.as_fd(), kind, body, &[]).unwrap();
    }
    drop(sender);
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut receiver, &mut bytes).unwrap();
    bytes
}

#[test]
fn frames_that_are_a_little_wrong_are_taken_or_refused() {
    let seed = frames();
    let (mut taken, mut refused) = (0, 0);
    for number in 0..ROUNDS {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let bytes = mutate::mutate(&seed, &mut random);
        let (mut sender, receiver) = UnixStream::pair().unwrap();
        sender.write_all(&bytes).unwrap();
        drop(sender);
        let (mut inbox, mut scratch) = (Inbox::default(), vec![0; random.random_range(1..64)]);
        let mut messages = Messages::<Vec<f64>>::new();
        'stream: while let Ok(1..) = inbox.fill(receiver.as_fd(), &mut scratch, RecvFlags::empty()) {
            loop {
                match inbox.next() {
                    Ok(Some(frame)) => messages.take(0, &frame.body),
                    Ok(None) => break,
                    Err(line) => {
                        assert!(!line.contains('\n'), "{line:?}");
                        refused += 1;
                        break 'stream;
                    }
                }
            }
        }
        taken += usize::from(messages.finish().is_ok());
    }
    assert!(refused > 100, "{taken} {refused}");
}

#[test]
fn hellos_and_requests_that_are_a_little_wrong_are_taken_or_refused() {
    let (program, payload) = (b"aristos".to_vec(), b"node1".to_vec());
    let version = crate::shmem::control::VERSION;
    let hello = Hello { version, pe: 2, n_pes: 3, nonce: Nonce([7; 32]), program, payload }.to_bytes();
    let expert = ProbedExpert { hidden: 8, intermediate: 8, gated: true, dtype: Dtype::F32, training: true };
    let request = Request::Probe(ProbeRequest {
        pes: 2,
        device: DeviceKind::Cpu,
        #[cfg(feature = "device")]
        gemm: None,
        expert,
        options: ProbeOptions::quick(),
        memory_mb: vec![1.5],
        memory_source: "a test".into(),
    });
    let request = request.to_bytes().unwrap();
    let fixed_bytes = hello.len() - b"aristosnode1".len();
    let (mut admitted, mut read) = (0, 0);
    for number in 0..ROUNDS {
        let mut random = ChaCha8Rng::seed_from_u64(number);
        let changed = mutate::mutate(&hello, &mut random);
        match Hello::from_bytes(&changed) {
            Ok(read) => {
                admitted += 1;
                assert_eq!(read.program.len() + read.payload.len(), changed.len() - fixed_bytes);
            }
            Err(why) => assert!(!why.is_empty()),
        }
        read += usize::from(Request::from_bytes(&mutate::mutate(&request, &mut random)).is_ok());
    }
    assert!(read < ROUNDS as usize / 2, "{admitted} {read}");
}
