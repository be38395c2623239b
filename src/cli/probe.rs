//! `aristos probe`.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::run::{DtypeArg, MlpArg};
use crate::checkpoint::OutputFile;
use crate::cluster::{Cluster, ProbeOptions};
use crate::launch::{Event, Job, LaunchError, MAX_PES, PeContext, StatusView, settled_pes};
use crate::run::probe::{PROBE_PHASES, ProbeRequest, ProbedExpert, heap_bytes, run_pe};
use crate::shmem::available_bytes;

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
    /// How long a PE waits for another before the probe fails, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u32,
}

impl Args {
    fn pes(&self) -> usize {
        self.pes
            .or_else(settled_pes)
            .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from).max(PES_LEAST))
    }

    fn request(&self) -> Result<ProbeRequest> {
        let pes = self.pes();
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

/// The supervisor's part.
pub fn supervise(args: &Args, argv: Vec<OsString>) -> Result<bool> {
    let (request, pes) = (args.request()?, args.pes());
    // A probe that this machine cannot hold would be killed half way.
    let need = pes as f64 * (heap_bytes(&request.options, pes) as f64 + request.expert.working_bytes());
    if let Some(available) = available_bytes() {
        ensure!(
            need <= available as f64,
            "the probe needs about {:.1} GB of memory, this machine has {:.1} GB available: use fewer --pes, a smaller \
             expert, or --quick",
            need * 1e-9,
            available as f64 * 1e-9
        );
    }
    let out = args.out.as_deref().map(OutputFile::create_empty).transpose()?;
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
    let text = text.context("no PE sent its measurements")?;
    let cluster = Cluster::from_json(&text).context("PE 0 sent what is no cluster")?;
    if let (Some(out), Some(path)) = (out, &args.out) {
        let written = out.file().write_all(text.as_bytes());
        written.with_context(|| format!("cannot write {}", path.display()))?;
        out.publish()?;
    }
    let shown = if args.json { text } else { crate::report::cluster_text(&cluster) };
    match write!(std::io::stdout().lock(), "{shown}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e).context("cannot write the cluster"),
        _ => Ok(true),
    }
}

/// A PE's part.
pub fn pe(args: &Args, context: &mut PeContext) -> Result<()> {
    run_pe(&args.request()?, context)
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
