//! `aristos bench straggler`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "mpi")]
use anyhow::Context;
use anyhow::{Result, anyhow, bail, ensure};
use clap::ValueEnum;

use super::bench::{Csv, create, write};
use super::bench_p2p::size;
use super::run::NO_MPI;
use crate::bench::straggler::pe::{self, PeSteps};
use crate::bench::straggler::report::StragglerReport;
use crate::bench::straggler::{Inject, Mode, StragglerBench};
use crate::bench::supervised;
use crate::launch::{Event, Job, LaunchError, MAX_PES, PeContext, mpirun, settled_pes};
use crate::plot;
use crate::shmem::{ShmTransport, Shmem};

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
    transport: TransportArg,
    /// How the PEs of a step wait for each other, may be given several times [default: all that the transport has]
    #[arg(long, value_enum)]
    mode: Vec<ModeArg>,
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
enum TransportArg {
    /// Shared memory of this host
    Shm,
    /// MPI, between hosts too (feature `mpi`)
    Mpi,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum ModeArg {
    /// A barrier before and after each exchange
    Bulk,
    /// Signals alone
    OneSided,
    /// MPI_Alltoallv, the baseline, over MPI
    Alltoallv,
}

impl Args {
    fn bench(&self) -> Result<StragglerBench> {
        ensure!(self.timeout > 0, "--timeout is 0, expected a number of seconds above 0");
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let started = mpirun::size().filter(|_| self.transport == TransportArg::Mpi);
        let pes = self.pes.or(started).or_else(settled_pes).unwrap_or(cpus.clamp(2, MAX_PES));
        ensure!(self.transport == TransportArg::Shm || cfg!(feature = "mpi"), NO_MPI);
        if !(1..=MAX_PES).contains(&pes) {
            return Err(LaunchError::Pes { pes }.into());
        }
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
        };
        ensure!(bench.warmup <= 1 << 20, "--warmup is {}, expected at most {}", bench.warmup, 1 << 20);
        bench.validate()?;
        Ok(bench)
    }

    /// The modes that were asked for, or all there are.
    fn modes(&self, inject: &[Inject]) -> Result<Vec<Mode>> {
        // What comes by one call comes all at once: no message of it can be held back.
        let slow_link = inject.iter().any(|noise| matches!(noise, Inject::SlowLink { .. }));
        let alltoallv = self.transport == TransportArg::Mpi && !slow_link;
        if self.mode.contains(&ModeArg::Alltoallv) {
            let transport = if self.transport == TransportArg::Mpi { "mpi" } else { "shm" };
            ensure!(self.transport == TransportArg::Mpi, "--mode alltoallv on --transport {transport}, expected mpi");
            ensure!(alltoallv, "--mode alltoallv with --inject slow-link, expected --mode bulk or one-sided");
        }
        // Always in this order: the other two count their messages on.
        let all = [ModeArg::Bulk, ModeArg::OneSided, ModeArg::Alltoallv];
        let wanted = |mode: &ModeArg| match self.mode.is_empty() {
            true => *mode != ModeArg::Alltoallv || alltoallv,
            false => self.mode.contains(mode),
        };
        let modes = all.into_iter().filter(wanted).map(|mode| match mode {
            ModeArg::Bulk => Mode::Bulk,
            ModeArg::OneSided => Mode::OneSided,
            ModeArg::Alltoallv => Mode::Alltoallv,
        });
        Ok(modes.collect())
    }

    /// The supervisor's part.
    pub fn supervise(&self, argv: Vec<OsString>) -> Result<bool> {
        #[cfg(feature = "mpi")]
        if self.transport == TransportArg::Mpi {
            return self.run_over_mpi();
        }
        let bench = self.bench()?;
        let csv = create(self.csv.as_ref())?;
        self.plot.as_deref().map(plot::create_folder).transpose()?;
        let mut parts: Vec<PeSteps> = Vec::new();
        let mut unreadable = None;
        Job::new(bench.pes, argv, &pe::PHASE_NAMES).run(|event| {
            if let Event::Message { pe, body } = event {
                match serde_json::from_slice(body) {
                    Ok(part) => parts.push(part),
                    Err(error) => unreadable = Some(anyhow!("PE {pe} sent what is no measurement: {error}")),
                }
            }
        })?;
        if let Some(error) = unreadable {
            return Err(error);
        }
        self.print(&bench, csv, parts)
    }

    /// Prints, writes and plots what all PEs measured.
    fn print(&self, bench: &StragglerBench, csv: Csv<'_>, parts: Vec<PeSteps>) -> Result<bool> {
        let transport = if self.transport == TransportArg::Mpi { "mpi" } else { "shm" };
        let report = StragglerReport::new(bench, transport, &self.inject, parts);
        write(csv, &report.to_csv())?;
        if self.json {
            println!("{}", report.to_json());
        } else {
            print!("{}", report.render_table());
        }
        if let Some(folder) = &self.plot {
            for file in report.plot(folder)? {
                eprintln!("{}", file.display());
            }
        }
        Ok(true)
    }

    /// A PE's part.
    pub fn pe(&self, context: &mut PeContext) -> Result<()> {
        let bench = self.bench()?;
        let segments = context.exchange_segments(pe::heap_bytes::<ShmTransport>(&bench))?;
        let shmem = Shmem::new(ShmTransport::new(context.my_pe(), segments)?);
        let context: &PeContext = context;
        supervised(context, |pe| pe::run_pe(&bench, &shmem, None, pe, Duration::from_secs(self.timeout.into())))
    }

    /// Whether the PEs are those of MPI.
    pub fn over_mpi(&self) -> bool {
        self.transport == TransportArg::Mpi
    }

    /// Any PE's part, where `mpirun` started them.
    #[cfg(feature = "mpi")]
    fn run_over_mpi(&self) -> Result<bool> {
        use crate::bench::mpi::MpiAllToAll;
        use crate::shmem::mpi::MpiTransport;
        let first = mpirun::rank().unwrap_or(0) == 0;
        let bench = match self.bench() {
            Err(_) if mpirun::first_speaks() => return Ok(false),
            bench => bench?,
        };
        let csv = if first { create(self.csv.as_ref())? } else { None };
        if first {
            self.plot.as_deref().map(plot::create_folder).transpose()?;
        }
        let limit = Duration::from_secs(self.timeout.into());
        let heap = |_| Ok(pe::heap_bytes::<MpiTransport<'_>>(&bench));
        let messages = crate::bench::mpi::run(bench.pes, heap, limit, |shmem, world, host| {
            let all_to_all = MpiAllToAll::new(world, limit)?;
            pe::run_pe(&bench, shmem, Some(&all_to_all), host, limit)
        })?;
        let Some(messages) = messages else { return Ok(true) };
        let parts = messages.iter().map(|body| serde_json::from_str(body)).collect::<Result<Vec<PeSteps>, _>>();
        self.print(&bench, csv, parts.context("a PE sent what is no measurement")?)
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
