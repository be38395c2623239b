//! MPI's two-sided calls on the same processes: the baselines of the one-sided transport.
//!
//! All functions are collective over the world and return the samples on PE 0, and an empty list elsewhere. A sample is the mean over a batch, because
//! a single call is too short for the clock. An error of MPI ends the job.

use std::time::Instant;

use mpi::request::WaitGuard;
use mpi::traits::*;

use crate::shmem::mpi::MpiWorld;

/// The number of samples.
#[derive(Clone, Copy, Debug)]
pub struct Samples {
    /// Measured samples.
    pub samples: usize,
    /// Warm-up samples.
    pub warmup: usize,
    /// Operations per sample.
    pub batch: usize,
}

impl Samples {
    /// Runs `once` for each sample, and returns the measured ones.
    pub fn take(&self, mut once: impl FnMut() -> f64) -> Vec<f64> {
        (0..self.warmup).for_each(|_| _ = once());
        (0..self.samples).map(|_| once()).collect()
    }
}

/// `MPI_Send` from PE 0 to PE 1 and back: half the round trip, microseconds.
///
/// # Panics
/// If there is one PE only.
pub fn send_recv_latency_us(world: &MpiWorld, bytes: usize, samples: Samples) -> Vec<f64> {
    let (me, comm) = (pair(world), world.comm());
    // Two buffers, as in OSU's osu_latency: a single one would move between the caches of both PEs every time.
    let (source, mut target) = (vec![me as u8; bytes], vec![0u8; bytes]);
    let times = samples.take(|| {
        comm.barrier();
        if me > 1 {
            return 0.0;
        }
        let peer = comm.process_at_rank(1 - me as i32);
        let start = Instant::now();
        for _ in 0..samples.batch {
            if me == 0 {
                peer.send(&source[..]);
                peer.receive_into(&mut target[..]);
            } else {
                peer.receive_into(&mut target[..]);
                peer.send(&source[..]);
            }
        }
        start.elapsed().as_secs_f64() * 1e6 / (2 * samples.batch) as f64
    });
    of_pe_0(me, times)
}

/// A batch of `MPI_Isend` from PE 0 to preposted `MPI_Irecv`, and an answer: 10^9 bytes per second.
///
/// # Panics
/// If there is one PE only.
pub fn send_recv_bandwidth_gb_s(world: &MpiWorld, bytes: usize, samples: Samples) -> Vec<f64> {
    let (me, comm) = (pair(world), world.comm());
    let mut data = vec![vec![me as u8; bytes]; samples.batch];
    let rates = samples.take(|| {
        let mut answer = [0u8];
        if me > 1 {
            comm.barrier();
            return 0.0;
        }
        let peer = comm.process_at_rank(1 - me as i32);
        mpi::request::scope(|scope| {
            if me == 1 {
                let posted: Vec<_> = data
                    .iter_mut()
                    .map(|buffer| WaitGuard::from(peer.immediate_receive_into(scope, &mut buffer[..])))
                    .collect();
                comm.barrier();
                drop(posted);
                peer.send(&answer[..]);
                return 0.0;
            }
            comm.barrier();
            let start = Instant::now();
            let sent: Vec<_> =
                data.iter().map(|buffer| WaitGuard::from(peer.immediate_send(scope, &buffer[..]))).collect();
            drop(sent);
            peer.receive_into(&mut answer[..]);
            (bytes * samples.batch) as f64 / start.elapsed().as_secs_f64() * 1e-9
        })
    });
    of_pe_0(me, rates)
}

/// `MPI_Alltoallv` with `send_bytes[s][d]` bytes from PE `s` to PE `d`: microseconds until the last PE has returned.
///
/// # Panics
/// If `send_bytes` does not have a row and a column for each PE, or a PE sends or receives 2 GiB or more.
pub fn all_to_all_v_us(world: &MpiWorld, send_bytes: &[Vec<usize>], samples: Samples) -> Vec<f64> {
    use mpi::datatype::{Partition, PartitionMut};
    let (me, n, comm) = (world.my_pe(), world.n_pes(), world.comm());
    assert!(send_bytes.len() == n && send_bytes.iter().all(|row| row.len() == n), "send_bytes is not {n} by {n}");
    let count = |bytes: usize| i32::try_from(bytes).expect("less than 2 GiB a PE");
    let starts = |counts: &[i32]| -> Vec<i32> {
        counts
            .iter()
            .scan(0i32, |at, &c| Some(std::mem::replace(at, at.checked_add(c).expect("less than 2 GiB"))))
            .collect()
    };
    let out: Vec<i32> = send_bytes[me].iter().map(|&bytes| count(bytes)).collect();
    let back: Vec<i32> = send_bytes.iter().map(|row| count(row[me])).collect();
    let (out_at, back_at) = (starts(&out), starts(&back));
    let total = |counts: &[i32]| counts.iter().map(|&c| c as usize).sum::<usize>();
    let source = vec![me as u8; total(&out)];
    let mut target = vec![0u8; total(&back)];
    let times = samples.take(|| {
        comm.barrier();
        let start = Instant::now();
        for _ in 0..samples.batch {
            let send = Partition::new(&source[..], &out[..], &out_at[..]);
            let mut receive = PartitionMut::new(&mut target[..], &back[..], &back_at[..]);
            comm.all_to_all_varcount_into(&send, &mut receive);
        }
        let mine = start.elapsed().as_secs_f64() * 1e6 / samples.batch as f64;
        let mut slowest = 0.0;
        comm.all_reduce_into(&mine, &mut slowest, mpi::collective::SystemOperation::max());
        slowest
    });
    of_pe_0(me, times)
}

fn pair(world: &MpiWorld) -> usize {
    assert!(world.n_pes() >= 2, "there is 1 PE, expected at least 2");
    world.my_pe()
}

fn of_pe_0(me: usize, samples: Vec<f64>) -> Vec<f64> {
    if me == 0 { samples } else { Vec::new() }
}
