//! Measures a cluster: the links between PEs, and the PEs' compute rates.
//!
//! All functions are collective: all PEs of a [`Shmem`] call them with the same options, over any transport. Messages between devices use
//! their own [`LinkProber`].
//!
//! **A link alone.** PE i puts a message with a signal to PE j; j sees the signal, copies the data out of its heap, and signals back. The
//! time from i to j is this round trip less half the round trip of an empty message, so clocks need not agree. All other PEs wait
//! meanwhile.
//!
//! **All at once.** There are n - 1 shifts. In shift s all PEs send at once, PE i to PE i + s. The contention of a pair is its round trip
//! in the shift relative to its round trip alone, at one size. Finally all PEs send to all others at once. A PE's exchange factor, the
//! planner's C_i, is its time relative to the sum of its times alone.

mod fit;
mod links;
mod options;
mod shmem;

use std::time::Instant;

pub use fit::{Fit, fit};
pub use links::{LinkProber, ProbedLinks, probe_links_by};
pub use options::{ProbeError, ProbeOptions, ProbeStage};
use options::{median, ms};
pub use shmem::probe_links;
use shmem::{Gathering, barrier};

use crate::cluster::{Cluster, Device};
use crate::shmem::{Shmem, Transport};

/// Maximum length of a host's name, bytes; longer names are truncated.
const HOST_BYTES: usize = 64;

/// A PE's own device, for [`probe`].
#[non_exhaustive]
pub struct OwnDevice<'w> {
    /// Name of its host.
    pub host: String,
    /// Number of experts that fit into its memory.
    pub memory_experts: u64,
    /// Does one unit of the work that its rate is measured by.
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

/// Probes links, rates and memories. Every PE gets the same cluster, with [`Cluster::probe`] set and its devices in the order of PEs.
/// Collective.
///
/// `transport` is the transport's name in the cluster file. `progress` is called with the stage, the completed steps and their number.
///
/// # Errors
/// Returns an error if a PE does not respond, or if the heap has less than [`ProbeOptions::symmetric_bytes`] free.
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

/// This PE's rate, FLOP per ms, while all PEs compute: the work done in a fixed time, so that PEs that share a processor each get their
/// share of it. Collective.
fn probe_rate<T: Transport>(
    shmem: &Shmem<T>,
    options: &ProbeOptions,
    work: &mut dyn FnMut(),
    flop: f64,
) -> Result<f64, ProbeError> {
    const PARTS: u32 = 5;
    // Warms up memory and clocks.
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
