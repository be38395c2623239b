//! `--trace`: sends the spans of every pass to the process that writes the timeline.

use anyhow::Result;

use super::{Pass, StepContext, StepHook};
use crate::moe::MoeLayer;
use crate::moe::metrics::PassOutcome;
use crate::report::{PeReport, TraceSpan};
use crate::run::pe_results::Message;

/// Number of collected spans from which a PE sends them, so that its memory is bounded.
const SPANS_PER_MESSAGE: usize = 512;

pub(super) struct Trace;

impl Trace {
    pub(super) fn new<L: MoeLayer>(layer: &mut L) -> Trace {
        layer.record_spans();
        Trace
    }
}

impl<L: MoeLayer> StepHook<L> for Trace {
    fn after_pass(&mut self, run: &mut StepContext<'_, L>, _: Pass, outcome: &PassOutcome) -> Result<()> {
        let step = run.step as u64;
        run.progress.spans.extend(outcome.spans.iter().map(|span| TraceSpan {
            name: span.phase.name().to_string(),
            start_ns: span.start_ns,
            dur_ns: span.dur_ns,
            step,
            track: span.track.into(),
        }));
        Ok(())
    }

    fn after(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        if run.progress.spans.len() < SPANS_PER_MESSAGE { Ok(()) } else { send(run) }
    }

    fn finish(&mut self, run: &mut StepContext<'_, L>, _: &mut PeReport) -> Result<()> {
        if run.progress.spans.is_empty() { Ok(()) } else { send(run) }
    }
}

fn send<L: MoeLayer>(run: &mut StepContext<'_, L>) -> Result<()> {
    let spans = std::mem::take(&mut run.progress.spans);
    Ok(run.host.send(&serde_json::to_vec(&Message::Spans(spans))?)?)
}
