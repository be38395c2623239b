//! `aristos bench straggler`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use super::files::{Csv, create, write};
use super::job::{self, JobProcesses, JobSpec};
use super::progress::Progress;
use super::ranks::RanksArgs;
use super::values::{TransportArg, check_pes, size};
use crate::bench::straggler::pe::{self, PeSteps};
use crate::bench::straggler::report::StragglerReport;
use crate::job::launch::{MAX_PES, settled_pes};
use crate::job::request::{Inject, Request, StragglerBench, StragglerMode};
use crate::plot;
use crate::stdio::{print, print_line, say};

/// What `aristos bench straggler` takes.
#[derive(clap::Args)]
pub struct Args {
    /// Steps that count
    #[arg(long, default_value_t = 1800)]
    steps: usize,
    /// Steps before them
    #[arg(long, default_value_t = 50)]
    warmup: usize,
    /// Number of PEs [default: as many as CPUs, 2 at least]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// Compute of the most loaded PE of a step over the mean; which PE it is changes from step to step
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    imbalance: f64,
    /// Mean time a PE computes before it sends, microseconds
    #[arg(long, value_name = "U", default_value_t = 200.0)]
    compute_us: f64,
    /// Size of each message, as 64KiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB")]
    bytes: String,
    /// What the PEs talk over
    #[arg(long, value_enum, default_value = "shm")]
    pub(super) transport: TransportArg,
    #[command(flatten)]
    ranks: RanksArgs,
    /// How the PEs of a step wait for each other, may be given several times [default: all that the transport has]
    #[arg(long, value_enum)]
    mode: Vec<StragglerModeArg>,
    /// Noise to make: slow-pe=P:FACTOR, slow-link=A-B:US or jitter=US; may be given several times
    #[arg(long, value_name = "NOISE")]
    inject: Vec<String>,
    /// Seed of imbalance and jitter
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How long a PE waits for another before the job fails, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u32,
    /// Print the result as JSON (keys: docs/measurements/README.md)
    #[arg(long)]
    json: bool,
    /// Write a line per mode, step and PE
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write plots of the delay over the steps and of its distribution: SVG, and with the feature `png` PNG too
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum StragglerModeArg {
    /// A barrier before and after each exchange
    Bulk,
    /// Signals alone
    OneSided,
    /// MPI_Alltoallv, the baseline, over MPI
    Alltoallv,
}

impl Args {
    fn bench(&self, started: Option<usize>) -> Result<StragglerBench> {
        ensure!(self.timeout > 0, "--timeout is 0, expected a number of seconds above 0");
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
            wait_limit: Duration::from_secs(self.timeout.into()),
        };
        bench.validate()?;
        Ok(bench)
    }

    /// The modes that were asked for, or all there are.
    fn modes(&self, inject: &[Inject]) -> Result<Vec<StragglerMode>> {
        // What comes by one call comes all at once: no message of it can be held back.
        let slow_link = inject.iter().any(|noise| matches!(noise, Inject::SlowLink { .. }));
        let alltoallv = self.transport == TransportArg::Mpi && !slow_link;
        if self.mode.contains(&StragglerModeArg::Alltoallv) {
            let transport = self.transport.name();
            ensure!(self.transport == TransportArg::Mpi, "--mode alltoallv on --transport {transport}, expected mpi");
            ensure!(alltoallv, "--mode alltoallv with --inject slow-link, expected --mode bulk or one-sided");
        }
        // Always in this order: the other two count their messages on.
        let all = [StragglerModeArg::Bulk, StragglerModeArg::OneSided, StragglerModeArg::Alltoallv];
        let wanted = |mode: &StragglerModeArg| match self.mode.is_empty() {
            true => *mode != StragglerModeArg::Alltoallv || alltoallv,
            false => self.mode.contains(mode),
        };
        let modes = all.into_iter().filter(wanted).map(|mode| match mode {
            StragglerModeArg::Bulk => StragglerMode::Bulk,
            StragglerModeArg::OneSided => StragglerMode::OneSided,
            StragglerModeArg::Alltoallv => StragglerMode::Alltoallv,
        });
        Ok(modes.collect())
    }

    /// Runs the benchmark.
    ///
    /// # Errors
    /// One line.
    pub fn command(&self) -> Result<bool> {
        let ask = |found: JobProcesses| {
            let bench = self.bench(found.started)?;
            let csv = if found.reports { create(self.csv.as_ref())? } else { None };
            if let Some(folder) = self.plot.as_deref().filter(|_| found.reports) {
                plot::create_folder(folder)?;
            }
            let (pes, wait_limit) = (bench.pes, bench.wait_limit);
            let kept = (bench.clone(), csv);
            Ok(JobSpec { request: Request::BenchStraggler(bench), pes, wait_limit, env: Vec::new(), kept })
        };
        let report = |(bench, csv), sent: Vec<(usize, PeSteps)>| {
            self.print(&bench, csv, sent.into_iter().map(|(_, steps)| steps).collect())
        };
        job::run(self.ranks.over(self.transport)?, &pe::PHASE_NAMES, Progress::none(), ask, report)
    }

    /// Prints, writes and plots what all PEs measured.
    fn print(&self, bench: &StragglerBench, csv: Csv, parts: Vec<PeSteps>) -> Result<bool> {
        let report = StragglerReport::new(bench, self.transport.name(), &self.inject, parts);
        write(csv, report.to_csv())?;
        if self.json {
            print_line(&report.to_json())?;
        } else {
            print(&report.render_table())?;
        }
        if let Some(folder) = &self.plot {
            for file in report.plot(folder)? {
                say(&file.display().to_string());
            }
        }
        Ok(true)
    }
}

/// One `--inject`.
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
