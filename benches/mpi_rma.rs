//! Measures the MPI transport's operations, in the format of `benches/mpi_rma.c`, which makes the same calls in C; and
//! MPI's two-sided calls.
//!
//! Usage: `mpirun -n 2 mpi_rma NAME SAMPLES BATCH BYTES...`; `tools/bench-mpi` runs the Rust and C programs
//! alternately.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use aristos::bench::mpi_baseline::{Samples, all_to_all_v_us, send_recv_bandwidth_gb_s, send_recv_latency_us};
use aristos::shmem::mpi::{MpiTransport, MpiWorld};
use aristos::shmem::{Cmp, Shmem, SignalOp, Sym, Transport, Wait};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let numbers: Option<Vec<usize>> = args.iter().skip(1).map(|arg| arg.parse().ok()).collect();
    let Some([samples, batch, sizes @ ..]) = numbers.as_deref() else {
        eprintln!("usage: mpi_rma NAME SAMPLES BATCH BYTES...");
        return ExitCode::from(2);
    };
    let world = match MpiWorld::init() {
        Ok(world) if world.n_pes() >= 2 => world,
        Ok(_) => {
            eprintln!("mpi_rma: there is 1 PE, expected at least 2: start it with mpirun -n 2");
            return ExitCode::FAILURE;
        }
        Err(error) => {
            eprintln!("mpi_rma: {error}");
            return ExitCode::FAILURE;
        }
    };
    let samples = Samples { samples: *samples, warmup: 3, batch: (*batch).max(1) };
    let print = |op: &str, bytes: usize, values: Vec<f64>| {
        for (i, value) in values.into_iter().enumerate() {
            println!("{},{op},{bytes},{i},{value:.4}", args[0]);
        }
    };
    // Measured before a window exists, because MPI then polls it in every call.
    for &bytes in sizes {
        print("send_recv", bytes, send_recv_latency_us(&world, bytes, samples));
        print("send_recv_window", bytes, send_recv_bandwidth_gb_s(&world, bytes, Samples { batch: 16, ..samples }));
        let rows = vec![vec![bytes; world.n_pes()]; world.n_pes()];
        print("all_to_all_v", bytes, all_to_all_v_us(&world, &rows, samples));
    }
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let heap = Shmem::<MpiTransport<'_>>::heap_bytes_for(world.n_pes(), largest + 128);
    let shmem = match MpiTransport::new(&world, heap) {
        Ok(transport) => Shmem::new(transport),
        Err(error) => {
            eprintln!("mpi_rma: {error}");
            world.abort(1);
        }
    };
    // The same offsets as in the C program: the signal follows the largest data.
    let (data, signal) = (shmem.alloc::<u8>(largest.max(1)).unwrap(), shmem.alloc::<u64>(1).unwrap());
    for &bytes in sizes {
        print("put_signal", bytes, put_signal_us(&shmem, data.slice(0..bytes), signal, samples));
        print("put", bytes, put_gb_s(&shmem, data.slice(0..bytes), samples));
    }
    ExitCode::SUCCESS
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Ping-pong of a put with signal: half the round trip, microseconds.
fn put_signal_us<T: Transport>(shmem: &Shmem<T>, data: Sym<u8>, signal: Sym<u64>, samples: Samples) -> Vec<f64> {
    let (me, source) = (shmem.my_pe(), vec![1u8; data.len()]);
    let mut count = shmem.signal_fetch(signal);
    let times = samples.take(|| {
        shmem.barrier_all(deadline()).unwrap();
        let (until, start) = (deadline(), Instant::now());
        for _ in 0..samples.batch {
            count += 1;
            let wait = || shmem.wait_until(Wait { signal, cmp: Cmp::Ge, value: count }, until).unwrap();
            match me {
                0 => {
                    shmem.put_signal(data, &source, signal, count, SignalOp::Set, 1);
                    wait();
                }
                1 => {
                    wait();
                    shmem.put_signal(data, &source, signal, count, SignalOp::Set, 0);
                }
                _ => {}
            }
        }
        start.elapsed().as_secs_f64() * 1e6 / (2 * samples.batch) as f64
    });
    if me == 0 { times } else { Vec::new() }
}

/// A batch of puts from PE 0 and a quiet: 10^9 bytes per second.
fn put_gb_s<T: Transport>(shmem: &Shmem<T>, data: Sym<u8>, samples: Samples) -> Vec<f64> {
    let (me, source) = (shmem.my_pe(), vec![1u8; data.len()]);
    let rates = samples.take(|| {
        shmem.barrier_all(deadline()).unwrap();
        let start = Instant::now();
        if me == 0 {
            (0..samples.batch).for_each(|_| shmem.put(data, &source, 1));
            shmem.quiet();
        }
        (data.len() * samples.batch) as f64 / start.elapsed().as_secs_f64() * 1e-9
    });
    shmem.barrier_all(deadline()).unwrap();
    if me == 0 { rates } else { Vec::new() }
}
