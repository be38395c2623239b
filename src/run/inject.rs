//! `--emulate-cluster`: slows PEs and links down to the speeds in a cluster file, where device `i` is PE `i`. The planner can thus be
//! checked for clusters that are not available. PEs and links that are slower than in the file are not changed.

use std::cell::Cell;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use crate::cluster::Cluster;
use crate::job::request::{DeviceKind, RunRequest};
use crate::shmem::Delay;

/// Reads the cluster of `--emulate-cluster`.
///
/// # Errors
/// Returns an error if the file is not a cluster, if the number of its devices is not that of the PEs, or if the run is on a device.
pub(super) fn read(path: &Path, request: &RunRequest) -> Result<Cluster> {
    ensure!(request.device == DeviceKind::Cpu, "`emulate_cluster` on a device, expected `device` cpu");
    let cluster = Cluster::read(path)?;
    let (devices, pes) = (cluster.devices.len(), request.pes);
    if devices != pes {
        bail!("{}: devices has {devices}, expected {pes}, one for each PE (`pes`)", path.display());
    }
    Ok(cluster)
}

/// Limits the compute rate of a PE: the PE sleeps after a GEMM that was faster.
pub(super) struct Rate {
    flop_per_s: f64,
    since: Cell<Instant>,
    delay: Delay,
}

impl Rate {
    /// `most` limits the sleep after one GEMM.
    pub(super) fn new(flop_per_s: f64, most: Duration) -> Rate {
        Rate { flop_per_s, since: Cell::new(Instant::now()), delay: Delay::new(most) }
    }

    /// Marks the start of a phase that may contain GEMMs.
    pub(super) fn begin(&self) {
        self.since.set(Instant::now());
    }

    /// Accounts for GEMMs of `flop` FLOP since the last call of `begin` or `end`.
    pub(super) fn end(&self, flop: f64) {
        self.delay.owe(flop / self.flop_per_s - self.since.get().elapsed().as_secs_f64());
        self.delay.pay();
        self.begin();
    }
}
