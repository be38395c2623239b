//! The supervisor's part of a run.

use std::fs::File;
use std::io::{self, BufWriter};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::PreparedRun;
use super::check::check;
use super::pe_results::{CHOSEN, Done, Message, PHASE_NAMES, RESULTS, ROUTING, WEIGHTS};
use super::routing::{Captured, SavedRouting};
use crate::checkpoint::{OutputFile, ResultLayout, memory_file, real_path};
#[cfg(feature = "cuda")]
use crate::job::heap;
use crate::job::launch::{Continuation, FailureDomains, LaunchError, Processes, StatusView};
use crate::job::messages::collect;
#[cfg(feature = "cuda")]
use crate::job::request::DeviceKind;
use crate::job::request::{NonFinitePolicy, OnFailure, PlanSource, Request, RunRequest, Work};
use crate::moe::gemm_flop;
use crate::moe::metrics::now_ns;
use crate::report::{LostGroups, PeReport, Report, RunConfig, RunReport, TraceSpan, TraceWriter};
use crate::stdio::print_line;
#[cfg(feature = "cuda")]
use crate::stdio::say;

/// Prints the report. Returns whether the check, if requested, passed.
///
/// # Errors
/// Returns an error if standard output cannot be written, or if the results have a value that is not finite and the request does not allow
/// that.
pub fn print(job: &PreparedRun, report: &RunReport) -> Result<bool> {
    let text = if job.request.json { report.to_json() } else { report.render_table() };
    print_line(&text)?;
    if let Some(first) = report.non_finite.first() {
        match job.request.non_finite {
            NonFinitePolicy::Stop => bail!("{first}"),
            NonFinitePolicy::Warn => tracing::warn!("{first}"),
        }
    }
    Ok(report.check.as_ref().is_none_or(|c| c.passed))
}

/// Runs the job on PEs of this host, and writes its files. `on_tick` is called with the PEs' status about ten times a second.
///
/// # Errors
/// Returns an error of one line if two outputs have the same path, the input is not finite, an output cannot be written, or a PE fails.
pub fn measure(job: &mut PreparedRun, on_tick: impl FnMut(&StatusView<'_>)) -> Result<RunReport> {
    check_outputs(&job.request)?;
    job.make_plan(PreparedRun::probe)?;
    let job: &PreparedRun = job;
    job.check_memory(job.request.pes)?;
    check_input(job)?;
    #[cfg(feature = "cuda")]
    let environment = match job.request.device {
        DeviceKind::Cuda => {
            let mut all = crate::gpu::cuda::pe_environment(job.request.pes, job.request.symmetric)?;
            all.extend(job.heap_variable()?.inspect(|variable| say(&heap::words(variable))));
            all
        }
        _ => Vec::new(),
    };
    let mut outputs = Outputs::create(job)?;

    tracing::info!(pes = job.request.pes, tokens = job.tokens, mode = job.mode(), "starting the PEs");
    let request = Request::Run(Box::new(job.request.clone())).to_bytes()?;
    let mut processes = Processes::new(job.request.pes, request, &PHASE_NAMES);
    processes.set_wait_limit(job.wait_limit());
    #[cfg(feature = "cuda")]
    processes.env.extend(environment);
    for (name, file) in outputs.files() {
        processes.fds.push((name.to_string(), file.try_clone().context("cannot hand files to the PEs")?.into()));
    }
    if job.request.on_failure == OnFailure::Continue {
        ensure!(job.groups.len() > 1, "`on_failure` continue with one EP group, expected a plan of several");
        let groups = (0..job.groups.len()).map(|group| job.groups.members(group).to_vec()).collect();
        processes.failure_domains = FailureDomains { groups, steps: job.request.steps as u64 };
    }
    let mut lost = Vec::new();
    let on_loss = |how: &Continuation, cause: &LaunchError| {
        let known: Vec<usize> = lost.iter().flat_map(|groups: &LostGroups| &groups.pes).copied().collect();
        let pes: Vec<usize> = how.lost.iter().copied().filter(|pe| !known.contains(pe)).collect();
        tracing::warn!("{cause}; from step {} on the others go on without PEs {pes:?}", how.from);
        lost.push(LostGroups { pes, from_step: how.from, why: cause.to_string() });
    };
    collect(processes, |pe, message| outputs.take(pe, message), on_tick, on_loss)?;
    tracing::info!("all PEs are done");
    outputs.lost = lost;
    outputs.finish(job)
}

/// Returns an error if the input is not finite. Logs the parts of the model that are skipped.
pub(super) fn check_input(job: &PreparedRun) -> Result<()> {
    match &job.source {
        super::Source::Checkpoint(checkpoint, input) => {
            checkpoint.notes().iter().for_each(|note| tracing::warn!("{note}"));
            Ok(input.check_finite(0..job.tokens)?)
        }
        super::Source::Synthetic(_) => Ok(()),
    }
}

/// The output files of a job.
pub(super) struct Outputs {
    layout: ResultLayout,
    results: Option<OutputFile>,
    chosen: Option<File>,
    weights: Option<OutputFile>,
    routing: Option<SavedRouting>,
    trace: Option<Trace>,
    done: Vec<Done>,
    lost: Vec<LostGroups>,
}

/// The trace file, written during the run.
struct Trace {
    file: OutputFile,
    /// The writer of the file, or the error of the first write that failed.
    writer: io::Result<TraceWriter<BufWriter<File>>>,
}

impl Trace {
    fn create(path: &Path, pes: usize) -> Result<Trace> {
        let file = OutputFile::create_empty(path)?;
        let writer =
            file.file().try_clone().and_then(|out| TraceWriter::new(BufWriter::new(out), "PE", 0..pes, now_ns()));
        Ok(Trace { file, writer })
    }

    fn add(&mut self, pe: usize, spans: Vec<TraceSpan>) {
        if let Ok(writer) = &mut self.writer
            && let Err(error) = writer.add(pe, spans)
        {
            self.writer = Err(error);
        }
    }
}

impl Outputs {
    /// Creates the files that the request asks for.
    pub(super) fn create(job: &PreparedRun) -> Result<Outputs> {
        let layout = job.results()?;
        let results = match &job.request.output {
            Some(path) => Some(OutputFile::create(path, &layout)?),
            None if job.request.check => Some(OutputFile::in_memory(&layout)?),
            None => None,
        };
        let trace = job.request.trace.as_deref().map(|path| Trace::create(path, job.request.pes)).transpose()?;
        let chosen_bytes = (job.tokens * job.config.router.top_k * size_of::<u32>()) as u64;
        let chosen = job.request.check.then(|| memory_file("aristos-chosen", chosen_bytes)).transpose()?;
        let weights = match &job.request.save_weights {
            Some(path) => Some(OutputFile::create(path, &job.saved_weights()?)?),
            None => None,
        };
        let routing = job.request.save_routing.as_deref();
        let routing = routing.map(|path| SavedRouting::create(path, job.captured())).transpose()?;
        Ok(Outputs { layout, results, chosen, weights, routing, trace, done: Vec::new(), lost: Vec::new() })
    }

    /// Handles a PE's message.
    pub(super) fn take(&mut self, pe: usize, message: Message) {
        match (message, &mut self.trace) {
            (Message::Spans(spans), Some(trace)) => trace.add(pe, spans),
            (Message::Spans(_), None) => {}
            (Message::Done(done), _) => self.done.push(*done),
        }
    }

    /// The files that PEs write to, by name.
    pub(super) fn files(&self) -> impl Iterator<Item = (&'static str, &File)> {
        let results = self.results.as_ref().map(|file| (RESULTS, file.file()));
        let weights = self.weights.as_ref().map(|file| (WEIGHTS, file.file()));
        let routing = self.routing.as_ref().map(|routing| (ROUTING, &routing.chosen));
        results.into_iter().chain(self.chosen.as_ref().map(|file| (CHOSEN, file))).chain(weights).chain(routing)
    }

    /// Checks and publishes the results, after all PEs are done.
    pub(super) fn finish(self, job: &PreparedRun) -> Result<RunReport> {
        let Outputs { layout, results: output, chosen, weights, routing, trace, done, lost } = self;
        let losses = done.iter().min_by_key(|done| done.report.pe).map(|done| done.losses.clone()).unwrap_or_default();
        let reports: Vec<PeReport> = done.into_iter().map(|done| done.report).collect();
        let mut report = RunReport::merge(run_config(job, &reports), &reports);
        report.aux_losses = losses;
        report.plan = job.plan_report(&report);
        report.lost = lost;
        if let Some(output) = &output {
            leave_out(job, &layout, output.file(), &report.lost)?;
        }
        let mut checked = None;
        let first = reports.iter().min_by_key(|report| report.pe);
        if let (Some(plan), Some(first)) = (&mut report.plan, first) {
            plan.replanned = first.replanned.clone();
        }
        if let (Some(output), Some(chosen)) = (&output, &chosen) {
            ensure!(
                report.lost.is_empty(),
                "`check`: a part of the tokens was lost with its EP group, nothing is compared"
            );
            // An error of the check is returned only after the files have been published.
            checked = Some(check(job, &layout, output.file(), chosen));
        }
        let mut files = Vec::new();
        if let (Some(trace), Some(path)) = (trace, &job.request.trace) {
            let written = trace.writer.and_then(TraceWriter::finish);
            written.with_context(|| format!("{}: cannot write the trace", path.display()))?;
            files.push(trace.file);
        }
        if let Some(routing) = routing {
            let captured = Captured { steps: report.config.steps as usize, ..job.captured() };
            let tokens: Vec<usize> = job.pe_tokens.iter().map(|tokens| tokens.len()).collect();
            files.push(routing.complete(captured, job.request.work.layer(), &job.config, &tokens)?);
        }
        files.extend(weights);
        // A file in memory is not published.
        files.extend(output);
        OutputFile::publish_all(files)?;
        report.check = checked.transpose()?;
        Ok(report)
    }
}

/// Writes NaN for the rows of lost PEs.
fn leave_out(job: &PreparedRun, layout: &ResultLayout, file: &File, lost: &[LostGroups]) -> Result<()> {
    let row = vec![f32::NAN; job.config.hidden];
    let tensors = if job.backward { &["output", "grad_hidden_states"][..] } else { &["output"] };
    for pe in lost.iter().flat_map(|groups| &groups.pes) {
        for (tensor, token) in tensors.iter().flat_map(|tensor| job.tokens_of(*pe).map(move |token| (tensor, token))) {
            let at = layout.rows_at(tensor, token, row.len())?;
            file.write_all_at(bytemuck::cast_slice(&row), at)
                .with_context(|| format!("cannot write tensor {tensor}"))?;
        }
    }
    Ok(())
}

/// Returns an error if an output file is also another output or an input.
pub(super) fn check_outputs(request: &RunRequest) -> Result<()> {
    let written = [
        ("output", &request.output),
        ("save_weights", &request.save_weights),
        ("save_routing", &request.save_routing),
        ("trace", &request.trace),
    ];
    let same = |a: Option<&Path>, b: &Path| a.is_some_and(|a| real_path(a) == real_path(b));
    for (at, (field, path)) in written.iter().enumerate() {
        let Some(path) = path.as_deref() else { continue };
        let refuse = |what: &str| anyhow!("`{field}` {} is {what}, expected another file", path.display());
        for (other, others) in &written[..at] {
            ensure!(!same(others.as_deref(), path), refuse(&format!("`{other}` too")));
        }
        if let Some(PlanSource::File(plan)) = &request.plan {
            ensure!(!same(Some(path), plan), refuse("the plan"));
        }
        if let Some(routing) = &request.routing {
            ensure!(!same(Some(path), routing), refuse("the routing that is read"));
        }
        if let Work::Checkpoint { model, input, .. } = &request.work {
            ensure!(!same(Some(path), input), refuse("the input"));
            let files = std::fs::read_dir(model).with_context(|| format!("cannot read {}", model.display()))?;
            ensure!(!files.flatten().any(|file| same(Some(path), &file.path())), refuse("a file of the model"));
        }
    }
    Ok(())
}

fn run_config(job: &PreparedRun, reports: &[PeReport]) -> RunConfig {
    let config = &job.config;
    let (model, layer) = match &job.request.work {
        Work::Checkpoint { model, layer, .. } => (model.display().to_string(), Some(*layer)),
        Work::Synthetic { .. } => ("synthetic".to_string(), None),
    };
    let tokens = reports.iter().map(|report| report.tokens).sum();
    let rows = reports.iter().flat_map(|r| &r.expert_rows).map(|e| e.rows).sum();
    RunConfig {
        model,
        layer,
        tokens,
        hidden: config.hidden as u64,
        intermediate: config.expert.intermediate as u64,
        experts: config.n_experts,
        shared_intermediate: config.shared.map_or(0, |s| s.mlp.intermediate as u64),
        top_k: config.router.top_k as u64,
        dtype: job.request.dtype.name().to_string(),
        wire: job.request.options.wire.map(|wire| wire.name().to_string()),
        balance: job.request.options.balance.name().to_string(),
        rows_per: job.request.rows_per.name().to_string(),
        device: reports.first().map(|r| r.device.clone()).unwrap_or_default(),
        transport: reports.first().map(|r| r.transport.clone()).unwrap_or_default(),
        gemm: reports.first().and_then(|r| r.gemm.clone()),
        tile: reports.first().and_then(|r| r.tile.clone()),
        mode: job.mode().to_string(),
        pes: job.request.pes,
        steps: reports.iter().map(|report| report.n_steps).min().unwrap_or(0),
        backward: job.backward,
        threads: job.request.options.threads,
        flop_per_step: gemm_flop(config, rows, tokens, job.backward),
    }
}
