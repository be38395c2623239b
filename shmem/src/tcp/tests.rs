//! Behaviour outside of the conformance suite: large transfers, lost and invalid peers, strangers.

mod ends;

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use super::frame::{Header, Kind};
use super::{JoinLimits, Joining, TcpError, TcpTransport, TcpWorld, places};
use crate::control::{self, Attempt, CallError, Hello, Introduction, Key, Link, Nonce};
use crate::{Cmp, Shmem, SignalOp, Wait};

const LIMIT: Duration = Duration::from_secs(20);

fn soon() -> Instant {
    Instant::now() + LIMIT
}

fn joining<'a>(pe: usize, n_pes: usize, rendezvous: &'a str, join: Duration) -> Joining<'a> {
    let limits = JoinLimits { join, ..JoinLimits::default() };
    Joining { pe, n_pes, rendezvous, program: "test 1.0", token: b"token", limits }
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let rendezvous = listener.local_addr().unwrap().to_string();
    (listener, rendezvous)
}

/// A world of `n_pes` threads; returns the results of `f`, by PE.
fn worlds<R: Send>(n_pes: usize, f: impl Fn(TcpWorld) -> R + Sync) -> Vec<R> {
    let (listener, rendezvous) = listener();
    let mut listener = Some(listener);
    thread::scope(|scope| {
        let pes: Vec<_> = (0..n_pes)
            .map(|pe| {
                let (f, rendezvous, listener) = (&f, &rendezvous, listener.take());
                scope.spawn(move || {
                    let joining = joining(pe, n_pes, rendezvous, LIMIT);
                    f(match listener {
                        Some(listener) => TcpWorld::join_at(&joining, listener),
                        None => TcpWorld::join(&joining),
                    }
                    .unwrap())
                })
            })
            .collect();
        pes.into_iter().map(|pe| pe.join().unwrap()).collect()
    })
}

fn shmem(world: &TcpWorld, heap_bytes: usize) -> Shmem<TcpTransport> {
    Shmem::new(TcpTransport::new(world, heap_bytes, LIMIT).unwrap())
}

/// Runs PE 0 in a real world of two; `play` acts as the other PE, over its connection.
fn against(heap_bytes: usize, play: impl FnOnce(&mut TcpStream) + Send, f: impl FnOnce(&Shmem<TcpTransport>) + Send) {
    let (listener, rendezvous) = listener();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = connected(&rendezvous);
            // PE 1's part of the two barriers: after joining, and after creating the heap.
            for _ in 0..2 {
                say(&mut stream, Header { at: 1, bytes: 8, ..Header::of(Kind::Message) }, &[0; 8]);
                stream.read_exact(&mut [0; 48 + 8]).unwrap();
            }
            play(&mut stream);
        });
        let world = TcpWorld::join_at(&joining(0, 2, &rendezvous, LIMIT), listener).unwrap();
        f(&shmem(&world, heap_bytes));
    });
}

/// Connects to PE 0 as PE 1 of 2, which the test plays, and waits until PE 0 has admitted all PEs.
fn connected(rendezvous: &str) -> TcpStream {
    let mut link = joined(rendezvous, 1, 2).unwrap();
    let frame = control::frame::receive_by(link.socket.as_fd(), &mut link.inbox, 1 << 16, soon()).unwrap();
    let data = link.session.open(frame.kind, &frame.body).unwrap();
    assert!(places::from_bytes(data, 2).is_some());
    TcpStream::from(link.socket)
}

/// Connects to PE 0 as a PE that the test plays; returns after the handshake.
fn joined(rendezvous: &str, pe: usize, n_pes: usize) -> Result<Link, CallError<io::Error>> {
    join_as(rendezvous, b"token", Introduction { pe, n_pes, program: "test 1.0" })
}

fn join_as(rendezvous: &str, token: &[u8], who: Introduction<'_>) -> Result<Link, CallError<io::Error>> {
    control::call(who, &Key::new(token), soon(), |_, _| match TcpStream::connect(rendezvous) {
        Ok(stream) => Ok((stream.into(), b"\x01\0elsewhere".to_vec())),
        Err(error) => Err(Attempt::Retry(error)),
    })
}

/// A `Join` frame of PE 1 of 2.
fn join_frame() -> Vec<u8> {
    let (program, payload) = (b"test 1.0".to_vec(), b"\x01\0elsewhere".to_vec());
    let hello =
        Hello { version: control::VERSION, pe: 1, n_pes: 2, nonce: Nonce([7; 32]), program, payload }.to_bytes();
    let [kind, files] = [1u32, 0].map(u32::to_le_bytes);
    [&kind[..], &files, &(hello.len() as u64).to_le_bytes(), &hello].concat()
}

fn say(stream: &mut TcpStream, header: Header, body: &[u8]) {
    stream.write_all(&header.to_bytes()).unwrap();
    stream.write_all(body).unwrap();
}

#[test]
fn large_transfers_in_both_directions_arrive() {
    // More data than socket buffers hold, so that most of it is queued; in sizes that end inside buffers.
    worlds(3, |world| {
        let (parts, len) = (9, 300_001);
        let pe = shmem(&world, 64 << 20);
        let (me, n) = (pe.my_pe(), pe.n_pes());
        let value = |from: usize, to: usize, part: usize, i: usize| {
            (from * 1_000_003 + to * 70_001 + part * 911) as u32 ^ (i as u32).wrapping_mul(2_654_435_761)
        };
        let [put, nbi, got] = [0; 3].map(|_| pe.alloc::<u32>(n * parts * len / 3).unwrap());
        let source = pe.alloc::<u32>(n * parts * len / 3).unwrap();
        let word = pe.alloc::<u64>(n).unwrap();
        let each = parts / 3 * len;
        let data = |to: usize| -> Vec<u32> { (0..each).map(|i| value(me, to, i / len, i % len)).collect() };
        (0..n).for_each(|to| pe.put(source.slice(to * each..(to + 1) * each), &data(to), me));
        pe.barrier_all(soon()).unwrap();
        for to in (1..n).map(|k| (me + k) % n) {
            let mine = data(to);
            for part in 0..parts / 3 {
                let (from, here) = (part * len, me * each + part * len);
                pe.put(put.slice(here..here + len), &mine[from..from + len], to);
                pe.put_nbi(nbi.slice(here..here + len), source.slice(to * each + from..to * each + from + len), to);
            }
            pe.get_nbi(got.slice(to * each..(to + 1) * each), source.slice(me * each..(me + 1) * each), to);
            pe.fence();
            pe.signal_op(word.at(me), 1, SignalOp::Set, to);
        }
        for from in (1..n).map(|k| (me + k) % n) {
            pe.wait_until(Wait { signal: word.at(from), cmp: Cmp::Eq, value: 1 }, soon()).unwrap();
            let mut seen = vec![0; each];
            let expected: Vec<u32> = (0..each).map(|i| value(from, me, i / len, i % len)).collect();
            for place in [put, nbi] {
                pe.get(&mut seen, place.slice(from * each..(from + 1) * each), me);
                assert!(seen == expected, "PE {me} from {from}");
            }
            seen.fill(0);
            pe.get(&mut seen, source.slice(me * each..(me + 1) * each), from);
            assert!(seen == expected, "PE {me} got from {from}");
        }
        pe.quiet();
        for from in (1..n).map(|k| (me + k) % n) {
            let mut seen = vec![0; each];
            pe.get(&mut seen, got.slice(from * each..(from + 1) * each), me);
            assert!(seen == (0..each).map(|i| value(from, me, i / len, i % len)).collect::<Vec<_>>());
        }
    });
}

#[test]
fn put_returns_before_its_peer_reads() {
    // The peer does not read, and the PE sends more than the socket's buffers hold.
    let (free, is_free) = std::sync::mpsc::channel::<()>();
    against(
        1 << 20,
        move |_| _ = is_free.recv(),
        |pe| {
            let data = pe.alloc::<u8>(500_000).unwrap();
            let begun = Instant::now();
            (0..40).for_each(|_| pe.put(data, &vec![1; 500_000], 1));
            assert!(begun.elapsed() < LIMIT / 2 && pe.lost().is_none());
            free.send(()).unwrap();
        },
    );
}

#[test]
fn messages_arrive_in_order_and_min_agrees() {
    let least = worlds(3, |world| {
        let me = world.my_pe();
        assert_eq!((world.n_pes(), world.pes_on_host()), (3, 3));
        for round in 0..50u64 {
            assert_eq!(world.min(round * 3 + (me as u64 + round) % 3, LIMIT).unwrap(), round * 3);
        }
        if me > 0 {
            (0..4u8).for_each(|i| world.send(0, &[me as u8, i], LIMIT).unwrap());
        } else {
            let mut next = [0u8; 3];
            for _ in 0..8 {
                let (from, message) = world.receive(None, Some(LIMIT)).unwrap().unwrap();
                assert_eq!(message, [from as u8, next[from]]);
                next[from] += 1;
            }
            assert_eq!(world.receive(None, Some(Duration::from_millis(1))).unwrap(), None);
        }
        world.min(me as u64 + 5, LIMIT).unwrap()
    });
    assert_eq!(least, [5; 3]);
}

#[test]
fn world_can_have_one_heap_after_another() {
    worlds(2, |world| {
        for heap_bytes in [1 << 16, 1 << 20, 1 << 18] {
            let pe = shmem(&world, heap_bytes);
            assert!(matches!(TcpTransport::new(&world, 64, LIMIT), Err(TcpError::Meeting(_))));
            let word = pe.alloc::<u64>(1).unwrap();
            pe.signal_op(word, heap_bytes as u64, SignalOp::Add, 1 - pe.my_pe());
            pe.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: heap_bytes as u64 }, soon()).unwrap();
        }
    });
}

#[test]
fn silent_pe_is_found_after_a_wait() {
    let (free, is_free) = std::sync::mpsc::channel::<()>();
    against(
        1 << 16,
        move |_| _ = is_free.recv(),
        |pe| {
            let word = pe.alloc::<u64>(1).unwrap();
            let deadline = Instant::now() + Duration::from_millis(150);
            let ended = pe.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, deadline).unwrap_err();
            assert_eq!(ended.lost.unwrap().to_string(), "PE 1 is lost: its process does not answer");
            free.send(()).unwrap();
        },
    );
}

#[test]
fn invalid_frame_names_its_sender_and_changes_no_memory() {
    const HEAP: usize = 1 << 16;
    let header = |kind, at: usize, bytes: usize, signal: usize| {
        let [at, bytes, signal] = [at, bytes, signal].map(|n| n as u64);
        Header { at, bytes, signal, value: 5, ..Header::of(kind) }
    };
    let cases: [(Vec<u8>, &str); 8] = [
        (header(Kind::Put, HEAP - 8, 16, 0).to_bytes().to_vec(), "Put of 16 bytes at offset 65528"),
        (
            header(Kind::PutSignal, 0, 8, HEAP).to_bytes().to_vec(),
            "signal at offset 65536, outside of the heap of 65536",
        ),
        (header(Kind::Signal, 0, 0, 12).to_bytes().to_vec(), "signal at offset 12"),
        (header(Kind::Get, usize::MAX, 2, 0).to_bytes().to_vec(), "Get of 2 bytes"),
        (header(Kind::FetchAdd, 0, 0, usize::MAX - 7).to_bytes().to_vec(), "FetchAdd"),
        (header(Kind::GotBytes, 0, 8, 0).to_bytes().to_vec(), "an answer of 8 bytes that nobody waits for"),
        (header(Kind::Message, 0, 1 << 40, 0).to_bytes().to_vec(), "a message of 1099511627776 bytes"),
        (vec![0xee; 48], "which begins with no header"),
    ];
    for (frame, says) in cases {
        against(
            HEAP,
            |stream| {
                stream.write_all(&frame).unwrap();
                let _ = stream.read_to_end(&mut Vec::new());
            },
            |pe| {
                let word = pe.alloc::<u64>(1).unwrap();
                let ended = pe.wait_until(Wait { signal: word, cmp: Cmp::Eq, value: 1 }, soon()).unwrap_err();
                let line = ended.lost.unwrap().to_string();
                assert!(line.starts_with("PE 1 is lost: it sent an invalid frame, ") && line.contains(says), "{line}");
                let mut heap = vec![0u8; HEAP];
                crate::Transport::get(pe.transport(), &mut heap, 0, 0);
                assert!(heap.iter().all(|&byte| byte == 0), "{says}");
            },
        );
    }
}

#[test]
fn strangers_neither_delay_nor_end_the_job() {
    let (listener, rendezvous) = listener();
    let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&rendezvous).unwrap()).collect();
    let begun = Instant::now();
    thread::scope(|scope| {
        let zero = scope.spawn(|| TcpWorld::join_at(&joining(0, 2, &rendezvous, LIMIT), listener));
        for said in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &join_frame()[..70]] {
            let mut stream = TcpStream::connect(&rendezvous).unwrap();
            stream.write_all(said).unwrap();
        }
        let refused = |pe: usize, n_pes: usize, program: &str, part: &str| match join_as(
            &rendezvous,
            b"token",
            Introduction { pe, n_pes, program },
        ) {
            Err(CallError::Refused(why)) => assert!(why.contains(part), "{why}"),
            other => panic!("{other:?}"),
        };
        refused(1, 3, "test 1.0", "PE 1 of 3, of 2 expected");
        refused(0, 2, "test 1.0", "PE 0 does not connect here");
        refused(1, 2, "test 0.9", "it is test 0.9, this is test 1.0");
        // Valid hellos without a proof, more than may wait at once.
        let flood: Vec<TcpStream> = (0..1500)
            .map_while(|_| {
                let mut stream = TcpStream::connect(&rendezvous).ok()?;
                stream.write_all(&join_frame()).ok()?;
                Some(stream)
            })
            .collect();
        let one = scope.spawn(|| TcpWorld::join(&joining(1, 2, &rendezvous, LIMIT)).unwrap());
        let (zero, one) = (zero.join().unwrap().unwrap(), one.join().unwrap());
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
        assert!(zero.refusals().len() <= 8 && one.refusals().is_empty());
        assert!(zero.refusals()[0].starts_with("refused 127.0.0.1: it"), "{:?}", zero.refusals());
        drop((flood, silent));
        scope.spawn(move || drop(zero));
        drop(one);
    });
}

/// Serves one connection after the other in PE 0's place, until `until`; returns all bytes received.
fn impersonate(
    listener: &TcpListener,
    until: Instant,
    answer: impl Fn(&mut TcpStream, &[u8]) -> io::Result<()>,
) -> Vec<u8> {
    listener.set_nonblocking(true).unwrap();
    let mut received = Vec::new();
    while Instant::now() < until {
        let Ok((mut stream, _)) = listener.accept() else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut buffer = [0; 4096];
        let bytes = stream.read(&mut buffer).unwrap_or(0);
        received.extend_from_slice(&buffer[..bytes]);
        let _ = answer(&mut stream, &buffer[..bytes]);
        let bytes = stream.read(&mut buffer).unwrap_or(0);
        received.extend_from_slice(&buffer[..bytes]);
    }
    received
}

#[test]
fn process_in_place_of_pe_0_learns_no_token_and_is_not_followed() {
    let frame =
        |kind: u32, body: &[u8]| [&kind.to_le_bytes()[..], &[0; 4], &(body.len() as u64).to_le_bytes(), body].concat();
    // False answers: a challenge, an admission without a challenge, a refusal, bytes that are no frame, and the caller's own hello.
    type Answer<'a> = dyn Fn(&[u8]) -> Vec<u8> + Sync + 'a;
    let answers: [&Answer<'_>; 5] = [
        &|_| frame(2, &[9; 64]),
        &|_| frame(4, &[9; 32]),
        &|_| frame(5, &[&[0; 32][..], b"go away"].concat()),
        &|_| b"HTTP/1.1 200 OK\r\n\r\n".to_vec(),
        &<[u8]>::to_vec,
    ];
    let lines: Vec<(Vec<u8>, String)> = thread::scope(|scope| {
        let threads: Vec<_> = answers
            .iter()
            .map(|answer| {
                scope.spawn(move || {
                    let (listener, rendezvous) = listener();
                    thread::scope(|scope| {
                        let done = Instant::now() + control::UNPROVEN_LIMIT + Duration::from_secs(2);
                        let thief = scope.spawn(move || {
                            impersonate(&listener, done, |stream, said| stream.write_all(&answer(said)))
                        });
                        let error = TcpWorld::join(&joining(1, 2, &rendezvous, LIMIT)).unwrap_err();
                        (thief.join().unwrap(), error.to_string())
                    })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (received, line) in lines {
        assert!(line.contains("is not PE 0 of this job: "), "{line}");
        assert!(received.starts_with(&1u32.to_le_bytes()), "it sent no hello");
        // Neither the token nor a proof: only hellos.
        assert!(!received.windows(5).any(|bytes| bytes == b"token"), "the token was sent");
        let hello_bytes = 16 + u64::from_le_bytes(*received[8..].first_chunk().unwrap()) as usize;
        assert!(received.chunks(hello_bytes).all(|one| one[..4] == 1u32.to_le_bytes()), "more than hellos were sent");
    }
}

#[test]
fn pe_0_is_found_once_another_process_leaves_its_place() {
    let (squatted, rendezvous) = listener();
    thread::scope(|scope| {
        let one = scope.spawn(|| TcpWorld::join(&joining(1, 2, &rendezvous, LIMIT)).unwrap());
        impersonate(&squatted, Instant::now() + Duration::from_secs(1), |stream, _| stream.write_all(b"not a PE\n"));
        drop(squatted);
        let zero = scope.spawn(|| TcpWorld::join(&joining(0, 2, &rendezvous, LIMIT)).unwrap());
        let (zero, one) = (zero.join().unwrap(), one.join().unwrap());
        scope.spawn(move || drop(zero));
        drop(one);
    });
}

#[test]
fn slow_answer_is_given_up_at_the_deadline() {
    let limit = Duration::from_secs(1);
    for valid_header in [true, false] {
        let (listener, rendezvous) = listener();
        thread::scope(|scope| {
            scope.spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let header = [&2u32.to_le_bytes()[..], &[0; 4], &64u64.to_le_bytes()].concat();
                let answer = if valid_header { [header, vec![0; 64]].concat() } else { vec![0; 1000] };
                // A byte now and then, until the PE has closed the connection.
                for byte in answer {
                    if stream.write_all(&[byte]).is_err() {
                        break;
                    }
                    thread::sleep(limit / 4);
                }
            });
            let begun = Instant::now();
            TcpWorld::join(&joining(1, 2, &rendezvous, limit)).unwrap_err();
            assert!(begun.elapsed() < 10 * limit, "{:?}", begun.elapsed());
        });
    }
}

#[test]
fn recorded_handshake_is_refused() {
    let (listener, rendezvous) = listener();
    // A rank that joins through a recorder.
    let recorder = TcpListener::bind("127.0.0.1:0").unwrap();
    let by = recorder.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        let zero = scope.spawn(|| TcpWorld::join_at(&joining(0, 3, &rendezvous, Duration::from_secs(3)), listener));
        let recorded = scope.spawn(|| {
            let (mut caller, _) = recorder.accept().unwrap();
            let mut zero = TcpStream::connect(&rendezvous).unwrap();
            let mut recorded = Vec::new();
            let mut buffer = [0; 4096];
            // Hello, challenge, proof, admission.
            for (from, to, keep) in
                [(true, false, true), (false, true, false), (true, false, true), (false, true, false)]
            {
                let bytes = if from { caller.read(&mut buffer) } else { zero.read(&mut buffer) }.unwrap();
                if to { caller.write_all(&buffer[..bytes]) } else { zero.write_all(&buffer[..bytes]) }.unwrap();
                if keep {
                    recorded.push(buffer[..bytes].to_vec());
                }
            }
            (recorded, zero, caller)
        });
        let link = joined(&by, 1, 3).unwrap();
        let (recorded, kept, _caller) = recorded.join().unwrap();
        let mut replay = TcpStream::connect(&rendezvous).unwrap();
        recorded.iter().for_each(|part| {
            replay.write_all(part).unwrap();
            thread::sleep(Duration::from_millis(200));
        });
        let mut answer = Vec::new();
        replay.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let _ = replay.read_to_end(&mut answer);
        let said = String::from_utf8_lossy(&answer);
        assert!(said.contains("it does not know the job's token"), "{said}");
        drop((kept, link));
        zero.join().unwrap().unwrap_err();
    });
}

#[test]
fn silent_pe_is_lost_before_the_limit_of_a_long_wait() {
    let (free, is_free) = std::sync::mpsc::channel::<()>();
    let (listener, rendezvous) = listener();
    thread::scope(|scope| {
        // Dropped here in case of a failure, too, so that the other thread ends.
        let (free, rendezvous) = (free, &rendezvous);
        scope.spawn(move || {
            let mut stream = connected(rendezvous);
            say(&mut stream, Header { at: 1, bytes: 8, ..Header::of(Kind::Message) }, &[0; 8]);
            let _ = is_free.recv();
        });
        let world = TcpWorld::join_at(&joining(0, 2, rendezvous, LIMIT), listener).unwrap();
        world.set_wait_limit(Duration::from_millis(300));
        let begun = Instant::now();
        let line = world.min(1, Duration::from_secs(3600)).unwrap_err().to_string();
        assert_eq!(line, "PE 1 is lost: its process does not answer");
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
        free.send(()).unwrap();
    });
}

#[test]
fn missing_pe_is_named() {
    let (listener, rendezvous) = listener();
    let limit = Duration::from_millis(300);
    let line = TcpWorld::join_at(&joining(0, 3, &rendezvous, limit), listener).unwrap_err().to_string();
    assert_eq!(line, "cannot meet the other PEs: PE 1 and 1 more has not come within 0.3 s");
    // PE 0 does not listen any more.
    let line = TcpWorld::join(&joining(1, 3, &rendezvous, limit)).unwrap_err().to_string();
    assert!(line.contains(&format!("PE 0 has not listened at {rendezvous} within 0.3 s")), "{line}");
    for bad in ["nowhere.invalid:1", "localhost", "localhost:99999", ":::"] {
        let line = TcpWorld::join(&joining(1, 3, bad, limit)).unwrap_err().to_string();
        assert!(line.contains(bad) && !line.contains('\n'), "{line}");
        let line = TcpWorld::join(&joining(0, 3, bad, limit)).unwrap_err().to_string();
        assert!(line.contains(bad) && !line.contains('\n'), "{line}");
    }
    let line = TcpWorld::join(&joining(3, 3, &rendezvous, limit)).unwrap_err().to_string();
    assert!(line.contains("PE 3 of 3"), "{line}");
}

#[test]
fn pe_that_leaves_before_the_start_is_named() {
    let (listener, rendezvous) = listener();
    let place = rendezvous.clone();
    let gone = thread::spawn(move || {
        let link = joined(&place, 2, 3).unwrap();
        thread::sleep(Duration::from_millis(200));
        drop(link);
    });
    let begun = Instant::now();
    let line = TcpWorld::join_at(&joining(0, 3, &rendezvous, LIMIT), listener).unwrap_err().to_string();
    assert_eq!(line, "cannot meet the other PEs: PE 2 has ended before all had come");
    assert!(begun.elapsed() < LIMIT / 2);
    gone.join().unwrap();
}
