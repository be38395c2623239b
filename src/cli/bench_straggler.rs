//! `aristos bench straggler`.

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use super::files::Csv;
use super::job::{self, JobProcesses, JobSpec};
use super::progress::Progress;
use super::shared::{BenchOutputArgs, TransportArgs, WaitArgs};
use super::values::{TransportArg, check_pes, size};
use crate::bench::straggler::pe::{self, PeSteps};
use crate::bench::straggler::report::StragglerReport;
use crate::job::launch::{MAX_PES, settled_pes};
use crate::job::request::{Inject, Request, StragglerBench, StragglerMode};

/// The flags of `aristos bench straggler`.
#[derive(clap::Args)]
pub struct Args {
    /// Measured steps
    #[arg(long, default_value_t = 1800)]
    steps: usize,
    /// Warm-up steps
    #[arg(long, default_value_t = 50)]
    warmup: usize,
    /// Number of PEs [default: as many as srun, mpirun or torchrun started; otherwise one per CPU, at least 2]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// Compute of the most loaded PE of a step over the mean; each step loads another PE
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    imbalance: f64,
    /// Mean time a PE computes before it sends, microseconds
    #[arg(long, value_name = "U", default_value_t = 200.0)]
    compute_us: f64,
    /// Size of each message, such as 64KiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB")]
    bytes: String,
    #[command(flatten)]
    pub(super) between: TransportArgs,
    /// Synchronisation of a step; may be given several times [default: all that the transport has]
    #[arg(long, alias = "mode", value_enum)]
    sync: Vec<SyncArg>,
    /// Noise to inject: slow-pe=P:FACTOR, slow-link=A-B:US or jitter=US; may be given several times
    #[arg(long, value_name = "NOISE")]
    inject: Vec<String>,
    /// Seed of imbalance and jitter
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    output: BenchOutputArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum SyncArg {
    /// A barrier before and after each exchange
    Bulk,
    /// Signals alone
    OneSided,
    /// MPI_Alltoallv, the baseline, over MPI
    Alltoallv,
}

impl Args {
    fn bench(&self, started: Option<usize>) -> Result<StragglerBench> {
        let wait_limit = self.wait.limit()?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let pes = self.pes.or(started).or_else(settled_pes).unwrap_or(cpus.clamp(2, MAX_PES));
        check_pes(pes)?;
        let inject = self.inject.iter().map(|text| parse_inject(text)).collect::<Result<Vec<_>>>()?;
        let bench = StragglerBench {
            pes,
            steps: self.steps,
            warmup: self.warmup,
            bytes: size("bytes", &self.bytes)?,
            compute_us: self.compute_us,
            imbalance: self.imbalance,
            modes: self.modes(&inject)?,
            inject,
            seed: self.seed,
            wait_limit,
        };
        bench.validate()?;
        Ok(bench)
    }

    /// The requested modes, or all that the transport has.
    fn modes(&self, inject: &[Inject]) -> Result<Vec<StragglerMode>> {
        // A single collective call delivers all messages at once: none of them can be delayed.
        let slow_link = inject.iter().any(|noise| matches!(noise, Inject::SlowLink { .. }));
        let transport = self.between.transport;
        let alltoallv = transport == TransportArg::Mpi && !slow_link;
        if self.sync.contains(&SyncArg::Alltoallv) {
            let name = transport.name();
            ensure!(transport == TransportArg::Mpi, "--sync alltoallv on --transport {name}, expected mpi");
            ensure!(alltoallv, "--sync alltoallv with --inject slow-link, expected --sync bulk or one-sided");
        }
        // Alltoallv last: bulk and one-sided number their messages consecutively, and alltoallv sends none of these.
        let all = [SyncArg::Bulk, SyncArg::OneSided, SyncArg::Alltoallv];
        let wanted = |mode: &SyncArg| match self.sync.is_empty() {
            true => *mode != SyncArg::Alltoallv || alltoallv,
            false => self.sync.contains(mode),
        };
        let modes = all.into_iter().filter(wanted).map(|mode| match mode {
            SyncArg::Bulk => StragglerMode::Bulk,
            SyncArg::OneSided => StragglerMode::OneSided,
            SyncArg::Alltoallv => StragglerMode::Alltoallv,
        });
        Ok(modes.collect())
    }

    /// Runs the benchmark.
    pub fn command(&self) -> Result<bool> {
        let ask = |found: JobProcesses| {
            let bench = self.bench(found.started)?;
            let csv = self.output.create(found.reports)?;
            let (pes, wait_limit) = (bench.pes, bench.wait_limit);
            let kept = (bench.clone(), csv);
            Ok(JobSpec { request: Request::BenchStraggler(bench), pes, wait_limit, env: Vec::new(), kept })
        };
        let report = |(bench, csv), sent: Vec<(usize, PeSteps)>| {
            self.print(&bench, csv, sent.into_iter().map(|(_, steps)| steps).collect())
        };
        job::run(self.between.over()?, &pe::PHASE_NAMES, Progress::none(), ask, report)
    }

    /// Writes, prints and plots the measurements of all PEs.
    fn print(&self, bench: &StragglerBench, csv: Csv, parts: Vec<PeSteps>) -> Result<bool> {
        let report = StragglerReport::new(bench, self.between.transport.name(), &self.inject, parts);
        self.output.report(&report, csv, || report.to_csv())?;
        Ok(true)
    }
}

/// Parses one `--inject`.
fn parse_inject(text: &str) -> Result<Inject> {
    let parse = || -> Option<Inject> {
        let (what, value) = text.split_once('=')?;
        match what {
            "slow-pe" => {
                let (pe, factor) = value.split_once(':')?;
                Some(Inject::SlowPe { pe: pe.parse().ok()?, factor: factor.parse().ok()? })
            }
            "slow-link" => {
                let (link, us) = value.split_once(':')?;
                let (from, to) = link.split_once('-')?;
                Some(Inject::SlowLink { from: from.parse().ok()?, to: to.parse().ok()?, us: us.parse().ok()? })
            }
            "jitter" => Some(Inject::Jitter { us: value.parse().ok()? }),
            _ => None,
        }
    };
    match parse() {
        Some(inject) => Ok(inject),
        None => bail!("--inject is {text}, expected slow-pe=P:FACTOR, slow-link=A-B:US or jitter=US"),
    }
}
