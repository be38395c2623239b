//! `--emulate-cluster`: slows PEs and links down to those of a cluster file, device `i` being PE `i`, so that the planner can be checked against
//! clusters that are not available. A PE or link that is slower anyway is not sped up.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::cluster::Cluster;
use crate::job::request::{DeviceKind, RunRequest};
use crate::shmem::Hold;

/// Reads the cluster of `--emulate-cluster`.
///
/// # Errors
/// A file that is not a cluster; a number of devices other than the number of PEs; a run on a device.
pub(super) fn read(path: &Path, request: &RunRequest) -> Result<Cluster> {
    ensure!(request.device == DeviceKind::Cpu, "`emulate_cluster` on a device, expected `device` cpu");
    let cluster = Cluster::read(path)?;
    let (devices, pes) = (cluster.devices.len(), request.pes);
    if devices != pes {
        bail!("{}: devices has {devices}, expected {pes}, one for each PE (`pes`)", path.display());
    }
    Ok(cluster)
}

/// The maximum rate of a PE's experts. The PE sleeps after a product that was faster.
pub(super) struct Rate {
    flop_per_s: f64,
    since: Cell<Instant>,
    hold: Hold,
}

impl Rate {
    /// `most` limits the sleep after one product.
    pub(super) fn new(flop_per_s: f64, most: Duration) -> Rate {
        Rate { flop_per_s, since: Cell::new(Instant::now()), hold: Hold::new(most) }
    }

    /// A phase begins that may contain matrix products.
    pub(super) fn begin(&self) {
        self.since.set(Instant::now());
    }

    /// Products of `flop` FLOP have been computed since the last call of `begin` or `end`.
    pub(super) fn end(&self, flop: f64) {
        self.hold.owe(flop / self.flop_per_s - self.since.get().elapsed().as_secs_f64());
        self.hold.pay();
        self.begin();
    }
}
