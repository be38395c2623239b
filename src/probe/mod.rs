//! Measures a cluster: the links between PEs, and how fast each computes.
//!
//! Everything here is collective: all PEs of a [`Shmem`] call it, over whatever transport, with the same options. Where something else than a
//! transport carries the messages, such as devices, it is a [`LinkProber`].
//!
//! **A link alone.** PE i puts a message with a signal to PE j; j sees the signal, takes the data out of its heap, and signals back. The
//! time from i to j is that round trip, less half the round trip of an empty message: two clocks need not agree. All other PEs
//! wait meanwhile.
//!
//! **All at once.** In n - 1 shifts, in shift s from every PE i to PE i + s, all send and take at the same time; a pair's
//! contention is its round trip then over its round trip alone, at one size. And everyone sends to everyone, all messages under way
//! together; a PE's exchange factor is its time over the sum of its times alone, which is what the planner's C_i says.

mod fit;
mod links;
mod shmem;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

pub use fit::{Fit, fit};
pub use links::{LinkProber, ProbedLinks, probe_links_by};
pub use shmem::probe_links;
use shmem::{Gathering, barrier};

use crate::cluster::{Cluster, Device};
use crate::shmem::{Shmem, ShmemError, Transport, WaitTimeout};

/// A host's name is cut at this many bytes.
const HOST_BYTES: usize = 64;

/// How to probe. The same on every PE. Begin with [`ProbeOptions::thorough`] or [`ProbeOptions::quick`] and set what differs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProbeOptions {
    /// Sizes of messages, bytes, ascending, at least two and at most 255.
    pub sizes: Vec<usize>,
    /// Which of them is sent by all at once, by its place.
    pub together: usize,
    /// Messages of each size that count, at most.
    pub repetitions: usize,
    /// Messages before them.
    pub warmup: usize,
    /// Rounds of all at once.
    pub rounds: usize,
    /// What the pairs alone may take in all. No size has fewer than [`ProbeOptions::LEAST`] messages all the same.
    pub alone_limit: Duration,
    /// How often a pair whose times do not fit a line is measured again, at most.
    pub retries: usize,
    /// How long each PE computes.
    pub compute: Duration,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
}

impl ProbeOptions {
    /// The fewest messages of each size that count.
    pub const LEAST: usize = 5;

    /// From 16 bytes to 4 MiB in steps of four.
    pub fn thorough() -> ProbeOptions {
        ProbeOptions {
            sizes: (0..10).map(|step| 16 << (2 * step)).collect(),
            together: 8,
            repetitions: 200,
            warmup: 5,
            rounds: 21,
            alone_limit: Duration::from_secs(10),
            retries: 5,
            compute: Duration::from_millis(600),
            wait_limit: Duration::from_secs(60),
        }
    }

    /// For a start-up that nobody waits for: from 64 bytes to 1 MiB in steps of eight or four.
    pub fn quick() -> ProbeOptions {
        ProbeOptions {
            sizes: vec![64, 4 << 10, 32 << 10, 256 << 10, 1 << 20],
            together: 3,
            repetitions: 25,
            warmup: 2,
            rounds: 5,
            alone_limit: Duration::from_millis(120),
            retries: 3,
            compute: Duration::from_millis(100),
            ..ProbeOptions::thorough()
        }
    }

    /// The largest size, bytes.
    pub fn largest(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Symmetric memory that [`probe`] takes from a heap of `n_pes` PEs, bytes.
    pub fn symmetric_bytes(&self, n_pes: usize) -> usize {
        // Places for one message of the largest size, and one of the size sent at once from everyone; two words per PE.
        self.place_bytes(n_pes) + 2 * n_pes * size_of::<u64>() + 256
    }

    /// The part of it that takes messages: one of the largest size, or one from every PE of the size that all send at once, each in
    /// a multiple of 64 bytes.
    pub fn place_bytes(&self, n_pes: usize) -> usize {
        self.largest().max(n_pes * self.place())
    }

    /// Room for a message sent at once.
    fn place(&self) -> usize {
        self.sizes.get(self.together).map_or(0, |bytes| bytes.next_multiple_of(64))
    }

    fn check(&self) -> Result<(), ProbeError> {
        let sizes = &self.sizes;
        let fits =
            sizes.len() >= 2 && sizes.len() < shmem::LAST as usize && sizes.is_sorted_by(|a, b| a < b) && sizes[0] > 0;
        if !fits || self.together >= sizes.len() {
            return Err(ProbeError::Options);
        }
        Ok(())
    }
}

/// What a PE's own device is, for [`probe`].
#[non_exhaustive]
pub struct OwnDevice<'w> {
    /// The name of its host.
    pub host: String,
    /// How many experts its memory holds.
    pub memory_experts: u64,
    /// Does some of the work that its rate is measured by.
    pub work: &'w mut dyn FnMut(),
    /// FLOP of one call of `work`.
    pub work_flop: f64,
}

impl<'w> OwnDevice<'w> {
    /// A device on `host` that holds `memory_experts` experts; one call of `work` is `work_flop` FLOP.
    pub fn new(host: String, memory_experts: u64, work: &'w mut dyn FnMut(), work_flop: f64) -> OwnDevice<'w> {
        OwnDevice { host, memory_experts, work, work_flop }
    }
}

/// What a PE is doing, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeStage {
    /// Pairs alone.
    Alone,
    /// All pairs at once.
    Together,
    /// Computing.
    Compute,
}

/// Why a probe ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A peer that did not do its part in time.
    #[error("PE {pe} waited for PE {peer} ({what}): {timeout}")]
    Wait {
        /// The PE that waited.
        pe: usize,
        /// The PE it waited for.
        peer: usize,
        /// What it waited for.
        what: &'static str,
        /// The wait.
        timeout: WaitTimeout,
    },
    /// A peer that said something impossible.
    #[error("PE {pe} announced a message of no size that is probed")]
    Protocol {
        /// The peer.
        pe: usize,
    },
    /// The symmetric heap is too small.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// Options that make no probe.
    #[error("the sizes of a probe must be 2 to 254 ascending numbers of bytes, and one of them be sent by all at once")]
    Options,
}

impl ProbeError {
    /// The PE that was waited for in vain, where the error is that.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            ProbeError::Wait { peer, timeout, .. } => Some(timeout.lost.as_ref().map_or(*peer, |lost| lost.pe)),
            _ => None,
        }
    }
}

/// Probes links, rates and memories; every PE gets the same cluster, with [`Cluster::probe`], its devices in the order of PEs. Collective.
///
/// `transport` is what the report calls the transport. `progress` hears what is done: the stage, how much of how much.
///
/// # Errors
/// A PE that does not do its part, or a heap with less than [`ProbeOptions::symmetric_bytes`] free.
pub fn probe<T: Transport>(
    shmem: &Shmem<T>,
    options: &ProbeOptions,
    transport: &str,
    own: OwnDevice<'_>,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<Cluster, ProbeError> {
    let n = shmem.n_pes();
    let links = probe_links(shmem, options, progress)?;
    progress(ProbeStage::Compute, 0, 1);
    let rate = probe_rate(shmem, options, own.work, own.work_flop)?;
    let gathering = Gathering { shmem, limit: options.wait_limit };
    let rates = gathering.all(&[rate])?;
    let memories = gathering.all(&[own.memory_experts])?;
    let mut name = [0u8; HOST_BYTES];
    let cut = own.host.floor_char_boundary(HOST_BYTES);
    name[..cut].copy_from_slice(&own.host.as_bytes()[..cut]);
    let names = gathering.all(&name)?;
    progress(ProbeStage::Compute, 1, 1);

    let host = |pe: usize| {
        let name = &names[pe * HOST_BYTES..(pe + 1) * HOST_BYTES];
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(HOST_BYTES);
        String::from_utf8_lossy(&name[..end]).into_owned()
    };
    let devices = (0..n)
        // A PE that did no work in its time is slow, but still a device.
        .map(|pe| Device::new(pe as u64, host(pe), rates[pe].max(1.0), memories[pe]))
        .collect();
    Ok(links.cluster(devices, options, transport))
}

/// This PE's rate, FLOP per ms, while all PEs compute: the work done in a fixed time, so that PEs that share a processor each get
/// their share of it. Collective.
fn probe_rate<T: Transport>(
    shmem: &Shmem<T>,
    options: &ProbeOptions,
    work: &mut dyn FnMut(),
    flop: f64,
) -> Result<f64, ProbeError> {
    const PARTS: u32 = 5;
    // Memory and clocks warm up.
    work();
    let mut rates = Vec::new();
    for _ in 0..PARTS {
        barrier(shmem, options.wait_limit)?;
        let start = Instant::now();
        let mut times = 0;
        while times == 0 || start.elapsed() < options.compute / PARTS {
            work();
            times += 1;
        }
        rates.push(f64::from(times) * flop / ms(start.elapsed()));
    }
    Ok(median(rates))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
