//! `meet` with threads instead of processes: complete, missing and mismatched PEs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aristos_shmem::{Cmp, ShmTransport, Shmem, ShmemError, SignalOp, Wait, meet};

const HEAP_BYTES: usize = 1 << 18;

/// A key that only this test uses.
fn key() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

type Met = Result<Shmem<ShmTransport>, ShmemError>;

/// Starts a thread for each (PE, number of PEs, heap bytes, time limit); returns the results.
fn all(asked: &[(usize, usize, usize, Duration)]) -> Vec<Met> {
    let key = key();
    thread::scope(|scope| {
        let start = |&(pe, n_pes, heap_bytes, limit): &(usize, usize, usize, Duration)| {
            let key = &key;
            scope.spawn(move || meet(key, pe, n_pes, heap_bytes, Instant::now() + limit).map(Shmem::new))
        };
        let threads: Vec<_> = asked.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn lines(met: Vec<Met>) -> Vec<String> {
    met.into_iter().map(|one| one.map_or_else(|error| error.to_string(), |_| "met".into())).collect()
}

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

#[test]
fn pes_share_memory_after_meeting() {
    for n in [1, 2, 5] {
        let asked: Vec<_> = (0..n).map(|pe| (pe, n, HEAP_BYTES, LONG)).collect();
        let pes: Vec<_> = all(&asked).into_iter().map(Result::unwrap).collect();
        thread::scope(|scope| {
            for pe in pes {
                scope.spawn(move || {
                    let (me, n) = (pe.my_pe(), pe.n_pes());
                    let (data, signal) = (pe.alloc::<u32>(n).unwrap(), pe.alloc::<u64>(1).unwrap());
                    let soon = Instant::now() + LONG;
                    pe.barrier_all(soon).unwrap();
                    for to in 0..n {
                        pe.put_signal(data.at(me), &[me as u32 + 7], signal, 1, SignalOp::Add, to);
                    }
                    pe.wait_until(Wait { signal, cmp: Cmp::Eq, value: n as u64 }, soon).unwrap();
                    let mut seen = vec![0; n];
                    pe.get(&mut seen, data, me);
                    assert_eq!(seen, (7..7 + n as u32).collect::<Vec<_>>());
                });
            }
        });
    }
}

/// More segments than one packet carries.
#[test]
fn twenty_pes_meet() {
    let n = 20;
    let heap_bytes = Shmem::<ShmTransport>::heap_bytes_for(n, 64);
    let asked: Vec<_> = (0..n).map(|pe| (pe, n, heap_bytes, LONG)).collect();
    assert!(all(&asked).iter().all(|one| one.as_ref().is_ok_and(|pe| pe.n_pes() == n)));
}

#[test]
fn missing_pe_is_named() {
    let said = lines(all(&[(0, 4, HEAP_BYTES, SHORT), (2, 4, HEAP_BYTES, SHORT)]));
    assert_eq!(said, ["cannot meet the other PEs: PE 1, 3 has not come in time"; 2]);
    assert_eq!(lines(all(&[(1, 2, HEAP_BYTES, SHORT)])), ["cannot meet the other PEs: PE 0 has not come in time"]);
}

#[test]
fn mismatch_is_reported_to_all() {
    let said = lines(all(&[(0, 2, HEAP_BYTES, LONG), (1, 2, 2 * HEAP_BYTES, LONG)]));
    let want =
        "cannot meet the other PEs: PE 1 has a symmetric heap of 524288 bytes, PE 0 one of 262144: they must be equal";
    assert_eq!(said, [want; 2]);
    let said = lines(all(&[(0, 2, HEAP_BYTES, LONG), (1, 3, HEAP_BYTES, LONG)]));
    assert_eq!(said, ["cannot meet the other PEs: PE 1 of 3, of 2 expected"; 2]);
    let said = lines(all(&[(0, 3, HEAP_BYTES, LONG), (1, 3, HEAP_BYTES, LONG), (1, 3, HEAP_BYTES, LONG)]));
    assert_eq!(said, ["cannot meet the other PEs: PE 1 has come already"; 3]);
}

#[test]
fn key_is_exclusive_and_reusable() {
    let key = key();
    thread::scope(|scope| {
        let first = scope.spawn(|| meet(&key, 0, 2, HEAP_BYTES, Instant::now() + Duration::from_secs(5)));
        thread::sleep(Duration::from_millis(300));
        let second = meet(&key, 0, 2, HEAP_BYTES, Instant::now() + SHORT).unwrap_err().to_string();
        assert_eq!(second, "cannot meet the other PEs: another process listens with the same key");
        meet(&key, 1, 2, HEAP_BYTES, Instant::now() + LONG).unwrap();
        first.join().unwrap().unwrap();
    });
    meet(&key, 0, 1, HEAP_BYTES, Instant::now() + SHORT).unwrap();
}

#[test]
fn impossible_worlds_are_refused() {
    let refused = |pe, n, heap| meet(&key(), pe, n, heap, Instant::now() + SHORT).unwrap_err().to_string();
    assert_eq!(refused(2, 2, HEAP_BYTES), "cannot meet the other PEs: PE 2 of 2: expected a number below that of PEs");
    assert!(refused(0, 2, 8).starts_with("unusable segment: a symmetric heap for 2 PEs has at least"));
    let long = "k".repeat(200);
    let error = meet(&long, 0, 2, HEAP_BYTES, Instant::now() + SHORT).unwrap_err().to_string();
    assert!(error.ends_with("is too long for a socket's name"), "{error}");
}
