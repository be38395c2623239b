//! `aristos probe`.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::run::{DtypeArg, MlpArg, NO_MPI};
use crate::bench::supervised;
use crate::checkpoint::OutputFile;
use crate::cluster::{Cluster, ProbeOptions};
use crate::launch::{Event, Job, LaunchError, MAX_PES, PeContext, StatusView, mpirun, settled_pes};
use crate::run::probe::{PROBE_PHASES, ProbeRequest, ProbedExpert, heap_bytes, run_pe};
use crate::shmem::{ShmTransport, Shmem, available_bytes};

/// PEs at least, when not said: one alone has no links.
const PES_LEAST: usize = 2;

/// What `aristos probe` takes.
#[derive(clap::Args)]
pub struct Args {
    /// Number of PEs [default: as many processes as srun, mpirun or torchrun started; otherwise one per CPU, at least 2]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// Where to write the cluster (docs/planner.md), for `aristos plan --cluster`
    #[arg(long, value_name = "CLUSTER.json", required_unless_present = "json")]
    out: Option<PathBuf>,
    /// Print the cluster as JSON
    #[arg(long)]
    json: bool,
    /// Fewer and smaller messages: below half a second for a few PEs
    #[arg(long)]
    quick: bool,
    /// Hidden width
    #[arg(long, default_value_t = 256)]
    hidden: usize,
    /// Width inside an expert
    #[arg(long, default_value_t = 1024)]
    intermediate: usize,
    /// Gated experts, or plain two-matrix ones
    #[arg(long, value_enum, default_value = "gated")]
    mlp: MlpArg,
    /// Element type of activations and expert weights
    #[arg(long, value_enum, default_value = "f32")]
    dtype: DtypeArg,
    /// Memory for experts, MB (10^6 bytes): one number for every PE, or one for each [default: three quarters of what
    /// is available, in equal parts]
    #[arg(long, value_name = "MB[,MB...]", value_delimiter = ',')]
    memory_mb: Vec<f64>,
    /// What the PEs talk over
    #[arg(long, value_enum, default_value = "shm")]
    transport: TransportArg,
    /// How long a PE waits for another before the probe fails, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u32,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum TransportArg {
    /// Shared memory of this host
    Shm,
    /// MPI, between hosts too (feature `mpi`)
    Mpi,
}

impl Args {
    /// Whether the PEs are those of MPI.
    pub(super) fn over_mpi(&self) -> bool {
        self.transport == TransportArg::Mpi
    }

    fn pes(&self) -> usize {
        self.pes
            .or(mpirun::size().filter(|_| self.over_mpi()))
            .or_else(settled_pes)
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from).max(PES_LEAST))
    }

    fn request(&self) -> Result<ProbeRequest> {
        let pes = self.pes();
        ensure!(!self.over_mpi() || cfg!(feature = "mpi"), NO_MPI);
        if !(1..=MAX_PES).contains(&pes) {
            return Err(LaunchError::Pes { pes }.into());
        }
        ensure!(self.timeout > 0, "--timeout is 0, expected a number of seconds above 0");
        check_memory_mb(&self.memory_mb, pes)?;
        let expert = ProbedExpert {
            hidden: self.hidden,
            intermediate: self.intermediate,
            gated: self.mlp == MlpArg::Gated,
            dtype: self.dtype.into(),
        };
        expert.check()?;
        let options = if self.quick { ProbeOptions::quick() } else { ProbeOptions::thorough() };
        let wait_limit = std::time::Duration::from_secs(self.timeout.into());
        Ok(ProbeRequest { expert, options: ProbeOptions { wait_limit, ..options }, memory_mb: self.memory_mb.clone() })
    }
}

/// Checks `--memory-mb`.
pub fn check_memory_mb(memory_mb: &[f64], pes: usize) -> Result<()> {
    let numbers = memory_mb.len();
    ensure!(
        numbers <= 1 || numbers == pes,
        "--memory-mb has {numbers} numbers, expected one, or {pes}, one for each PE"
    );
    for mb in memory_mb {
        ensure!((0.0..=1e15).contains(mb), "--memory-mb is {mb}, expected a number of MB from 0 to 1e15");
    }
    Ok(())
}

/// The supervisor's part, or over MPI that of any PE.
pub fn supervise(args: &Args, argv: Vec<OsString>) -> Result<bool> {
    #[cfg(feature = "mpi")]
    if args.over_mpi() {
        return args.run_over_mpi();
    }
    let (request, pes) = (args.request()?, args.pes());
    check_available(&request, heap_bytes::<ShmTransport>(&request.options, pes), pes)?;
    let out = args.create_out()?;
    let mut job = Job::new(pes, argv, &PROBE_PHASES);
    job.start_limit = job.start_limit.max(request.options.wait_limit);
    let progress = Progress::new();
    let mut text = None;
    let ended = job.run(|event| match event {
        Event::Message { body, .. } => text = Some(String::from_utf8_lossy(body).into_owned()),
        Event::Tick(status) => progress.show(status),
    });
    progress.0.finish_and_clear();
    ended?;
    args.finish(out, text)
}

/// A PE's part.
pub fn pe(args: &Args, context: &mut PeContext) -> Result<()> {
    let (request, n) = (args.request()?, context.n_pes());
    let segments = context.exchange_segments(heap_bytes::<ShmTransport>(&request.options, n))?;
    let shmem = Shmem::new(ShmTransport::new(context.my_pe(), segments)?);
    supervised(context, |host| run_pe(&shmem, &request, "shm", n, host))
}

/// Checks that `here` PEs fit on this host: a probe that it cannot hold would be killed half way.
fn check_available(request: &ProbeRequest, heap_bytes: usize, here: usize) -> Result<()> {
    let need = here as f64 * (heap_bytes as f64 + request.expert.working_bytes());
    if let Some(available) = available_bytes() {
        ensure!(
            need <= available as f64,
            "the probe needs about {:.1} GB of memory, this machine has {:.1} GB available: use fewer --pes, a smaller \
             expert, or --quick",
            need * 1e-9,
            available as f64 * 1e-9
        );
    }
    Ok(())
}

impl Args {
    fn create_out(&self) -> Result<Option<OutputFile>> {
        Ok(self.out.as_deref().map(OutputFile::create_empty).transpose()?)
    }

    /// Writes and prints the cluster that PE 0 sent.
    fn finish(&self, out: Option<OutputFile>, text: Option<String>) -> Result<bool> {
        let text = text.context("no PE sent its measurements")?;
        let cluster = Cluster::from_json(&text).context("PE 0 sent what is no cluster")?;
        if let (Some(out), Some(path)) = (out, &self.out) {
            let written = out.file().write_all(text.as_bytes());
            written.with_context(|| format!("cannot write {}", path.display()))?;
            out.publish()?;
        }
        let shown = if self.json { text } else { crate::report::cluster_text(&cluster) };
        match write!(std::io::stdout().lock(), "{shown}") {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e).context("cannot write the cluster"),
            _ => Ok(true),
        }
    }

    /// Any PE's part, where `mpirun` started them.
    #[cfg(feature = "mpi")]
    fn run_over_mpi(&self) -> Result<bool> {
        use crate::shmem::mpi::MpiTransport;
        let limit = std::time::Duration::from_secs(self.timeout.into());
        let request = match self.request() {
            Err(_) if mpirun::first_speaks() => return Ok(false),
            request => request?,
        };
        let first = mpirun::rank().unwrap_or(0) == 0;
        let out = if first { self.create_out()? } else { None };
        let heap = |pes| Ok(heap_bytes::<MpiTransport<'_>>(&request.options, pes));
        let messages = crate::bench::mpi::run(self.pes(), heap, limit, |shmem, world, host| {
            let here = world.pes_on_host();
            check_available(&request, heap_bytes::<MpiTransport<'_>>(&request.options, world.n_pes()), here)?;
            run_pe(shmem, &request, "mpi", here, host)
        })?;
        match messages {
            Some(messages) => self.finish(out, messages.into_iter().next()),
            None => Ok(true),
        }
    }
}

/// A bar on a terminal, nothing elsewhere.
struct Progress(ProgressBar);

impl Progress {
    fn new() -> Self {
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}, {elapsed}, {msg}");
        let bar = ProgressBar::with_draw_target(None, target);
        Progress(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    fn show(&self, status: &StatusView<'_>) {
        let first = status.pe(0);
        self.0.set_length(first.total);
        self.0.set_position(first.done);
        self.0.set_message(first.phase.to_string());
    }
}
