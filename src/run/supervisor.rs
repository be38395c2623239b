//! The supervisor's part of the main job.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::check::check;
use super::pe::{CHOSEN, Message, PHASE_NAMES, RESULTS};
use super::plan::PLAN;
use super::{Job, Request, Work};
use crate::checkpoint::{OutputFile, ResultLayout, memory_file};
use crate::launch::{self, Event, StatusView};
use crate::moe::gemm_flop;
use crate::report::{PeReport, RunConfig, RunReport, trace_json};

/// Runs the job on PEs started with `args`, prints the report, and says whether the check, if asked for, passed.
///
/// # Errors
/// As [`measure`].
pub fn run(job: &mut Job, args: Vec<OsString>) -> Result<bool> {
    let report = measure(job, args)?;
    print(job, &report)
}

/// Prints the report, and says whether the check, if asked for, passed.
///
/// # Errors
/// When it cannot be written.
pub(super) fn print(job: &Job, report: &RunReport) -> Result<bool> {
    let text = if job.request.json { report.to_json() } else { report.render_table() };
    let mut stdout = std::io::stdout().lock();
    // A reader that has seen enough (`| head`) is no failure of the job.
    match writeln!(stdout, "{}", text.trim_end()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => return Err(e).context("cannot write the report"),
        _ => {}
    }
    Ok(report.check.as_ref().is_none_or(|c| c.passed))
}

/// Runs the job on PEs started with `args`, and writes the files that it asks for.
///
/// # Errors
/// One line: a trace in the place of another file of the job, an input that is not finite, an output that cannot be written, a PE that failed.
pub fn measure(job: &mut Job, args: Vec<OsString>) -> Result<RunReport> {
    job.make_plan(Job::probe)?;
    let job: &Job = job;
    check_trace(&job.request)?;
    job.check_memory(job.request.pes)?;
    check_input(job)?;
    #[cfg(feature = "cuda")]
    let environment = match job.request.device {
        super::Device::Cuda => crate::gpu::cuda::pe_environment(job.request.pes)?,
        _ => Vec::new(),
    };
    let outputs = Outputs::create(job)?;

    tracing::info!(pes = job.request.pes, tokens = job.tokens, mode = job.mode(), "starting the PEs");
    let mut pes = launch::Job::new(job.request.pes, args, &PHASE_NAMES);
    pes.start_limit = pes.start_limit.max(job.wait_limit());
    #[cfg(feature = "cuda")]
    pes.env.extend(environment);
    for name in [RESULTS, CHOSEN] {
        if let Some(file) = outputs.file(name) {
            pes.fds.push((name.to_string(), file.try_clone().context("cannot hand files to the PEs")?.into()));
        }
    }
    if let Some(plan) = &job.plan {
        let text = serde_json::to_vec(&plan.plan)?;
        let file = memory_file("aristos-plan", 0)?;
        (&file).write_all(&text).context("cannot hand the plan to the PEs")?;
        pes.fds.push((PLAN.to_string(), file.into()));
    }
    let progress = Progress::new(job.request.steps);
    let mut messages: Vec<Message> = Vec::new();
    let mut bad_message = None;
    let ended = pes.run(|event| match event {
        Event::Message { pe, body } => match serde_json::from_slice(body) {
            Ok(message) => messages.push(message),
            Err(e) => bad_message = Some(anyhow::anyhow!("PE {pe} reported what cannot be read: {e}")),
        },
        Event::Tick(status) => progress.show(status),
    });
    progress.clear();
    ended?;
    tracing::info!("all PEs are done");
    if let Some(error) = bad_message {
        return Err(error);
    }
    outputs.finish(job, messages)
}

/// Refuses an input that is not finite.
pub(super) fn check_input(job: &Job) -> Result<()> {
    match &job.source {
        super::Source::Checkpoint(_, input) => Ok(input.check_finite(0..job.tokens)?),
        super::Source::Synthetic(_) => Ok(()),
    }
}

/// The files of a job that PEs write to, or that are written at its end.
pub(super) struct Outputs {
    layout: ResultLayout,
    results: Option<OutputFile>,
    chosen: Option<File>,
    trace: Option<OutputFile>,
}

impl Outputs {
    /// Makes what the request asks for, before anything is computed.
    pub(super) fn create(job: &Job) -> Result<Outputs> {
        let layout = job.results()?;
        let results = match &job.request.output {
            Some(path) => Some(OutputFile::create(path, &layout)?),
            None if job.request.check => Some(OutputFile::in_memory(&layout)?),
            None => None,
        };
        let trace = job.request.trace.as_deref().map(OutputFile::create_empty).transpose()?;
        let chosen_bytes = (job.tokens * job.config.router.top_k * size_of::<u32>()) as u64;
        let chosen = job.request.check.then(|| memory_file("aristos-chosen", chosen_bytes)).transpose()?;
        Ok(Outputs { layout, results, chosen, trace })
    }

    /// What PEs write to by this name, [`RESULTS`] or [`CHOSEN`].
    pub(super) fn file(&self, name: &str) -> Option<&File> {
        match name {
            RESULTS => self.results.as_ref().map(OutputFile::file),
            CHOSEN => self.chosen.as_ref(),
            _ => None,
        }
    }

    /// All PEs have written and said what they had to: checks and publishes.
    pub(super) fn finish(self, job: &Job, messages: Vec<Message>) -> Result<RunReport> {
        let Outputs { layout, results: output, chosen, trace } = self;
        let losses = messages.iter().find(|m| m.report.pe == 0).map(|m| m.losses.clone()).unwrap_or_default();
        let reports: Vec<PeReport> = messages.into_iter().map(|m| m.report).collect();
        let mut report = RunReport::merge(run_config(job, &reports), &reports);
        report.aux_losses = losses;
        report.plan = job.plan_report(&report);
        if let (Some(output), Some(chosen)) = (&output, &chosen) {
            report.check = Some(check(job, &layout, output.file(), chosen)?);
        }
        if let (Some(trace), Some(path)) = (trace, &job.request.trace) {
            let written = trace.file().write_all(trace_json(&reports).as_bytes());
            written.with_context(|| format!("{}: cannot write the trace", path.display()))?;
            trace.publish()?;
        }
        if let (Some(output), true) = (output, job.request.output.is_some()) {
            output.publish()?;
        }
        Ok(report)
    }
}

/// Refuses a trace that would take the place of the results, or of a file that is there to be read.
pub(super) fn check_trace(request: &Request) -> Result<()> {
    let Some(trace) = &request.trace else { return Ok(()) };
    let (place, shown) = (real_path(trace), trace.display());
    let is_place = |path: &Path| real_path(path) == place;
    ensure!(!request.output.as_deref().is_some_and(is_place), "--trace {shown} is --output too, expected another file");
    if let Work::Checkpoint { model, input, .. } = &request.work {
        ensure!(!is_place(input), "--trace {shown} is the input, expected another file");
        let files = std::fs::read_dir(model).with_context(|| format!("cannot read {}", model.display()))?;
        let of_model = files.flatten().any(|file| is_place(&file.path()));
        ensure!(!of_model, "--trace {shown} is a file of the model, expected another file");
    }
    Ok(())
}

/// The one path of a file, there or not, by which it can be compared.
fn real_path(path: &Path) -> PathBuf {
    let of_new_file = || {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Some(folder.canonicalize().ok()?.join(path.file_name()?))
    };
    path.canonicalize().ok().or_else(of_new_file).unwrap_or_else(|| path.to_owned())
}

fn run_config(job: &Job, reports: &[PeReport]) -> RunConfig {
    let config = &job.config;
    let (model, layer) = match &job.request.work {
        Work::Checkpoint { model, layer, .. } => (model.display().to_string(), Some(*layer)),
        Work::Synthetic { .. } => ("synthetic".to_string(), None),
    };
    let rows = reports.iter().flat_map(|r| &r.expert_rows).map(|e| e.rows).sum();
    RunConfig {
        model,
        layer,
        tokens: job.tokens as u64,
        hidden: config.hidden as u64,
        intermediate: config.expert.intermediate as u64,
        experts: config.n_experts,
        shared_intermediate: config.shared.map_or(0, |s| s.mlp.intermediate as u64),
        top_k: config.router.top_k as u64,
        dtype: job.request.dtype.name().to_string(),
        device: reports.first().map(|r| r.device.clone()).unwrap_or_default(),
        gemm: reports.first().and_then(|r| r.gemm.clone()),
        mode: job.mode().to_string(),
        pes: job.request.pes,
        steps: job.request.steps as u64,
        backward: job.backward,
        flop_per_step: gemm_flop(config, rows, job.tokens as u64, job.backward),
    }
}

/// A bar on a terminal, nothing elsewhere.
struct Progress(ProgressBar);

impl Progress {
    fn new(steps: usize) -> Self {
        let target =
            if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
        let style = ProgressStyle::with_template("{bar:30} step {pos}/{len}, {elapsed}, {msg}");
        Progress(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    fn show(&self, status: &StatusView<'_>) {
        let slowest = (0..status.n_pes()).map(|pe| status.pe(pe)).min_by_key(|s| s.done);
        if let Some(slowest) = slowest {
            self.0.set_position(slowest.done);
            self.0.set_message(format!("slowest PE: {}", slowest.phase));
        }
    }

    fn clear(&self) {
        self.0.finish_and_clear();
    }
}
