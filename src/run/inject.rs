//! A run on PEs and links that are made as slow as those of a cluster file, device `i` being PE `i`: what the planner says of clusters that are
//! not there can be held against what the layer does. What is slower anyway stays as it is.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::cluster::Cluster;
use crate::job::request::{DeviceKind, RunRequest};
use crate::shmem::Hold;

/// The cluster of a request's `inject`.
///
/// # Errors
/// One line: not a cluster of as many devices as the run has PEs; a run on a device.
pub(super) fn read(path: &Path, request: &RunRequest) -> Result<Cluster> {
    ensure!(request.device == DeviceKind::Cpu, "`inject` on a device, expected `device` cpu");
    let cluster = Cluster::read(path)?;
    let (devices, pes) = (cluster.devices.len(), request.pes);
    if devices != pes {
        bail!("{}: devices has {devices}, expected {pes}, one for each PE (`pes`)", path.display());
    }
    Ok(cluster)
}

/// The rate at which a PE computes its experts at most.
pub(super) struct Rate {
    flop_per_s: f64,
    since: Cell<Instant>,
    hold: Hold,
}

impl Rate {
    /// Never sleeps longer than `most` for one product.
    pub(super) fn new(flop_per_s: f64, most: Duration) -> Rate {
        Rate { flop_per_s, since: Cell::new(Instant::now()), hold: Hold::new(most) }
    }

    /// Something begins that may be a matrix product.
    pub(super) fn begin(&self) {
        self.since.set(Instant::now());
    }

    /// Products of `flop` FLOP have been computed since the last call of either.
    pub(super) fn end(&self, flop: f64) {
        self.hold.owe(flop / self.flop_per_s - self.since.get().elapsed().as_secs_f64());
        self.hold.pay();
        self.begin();
    }
}
