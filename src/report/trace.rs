//! The timeline, in the Chrome trace event format, which <https://ui.perfetto.dev> opens.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::json;

use super::pe::TraceSpan;
use crate::formats::Span;

/// Writes a trace incrementally, in constant memory: a process per PE, a complete event per span, times in microseconds since the start of
/// the job.
pub struct TraceWriter<W> {
    out: W,
    origin_ns: u64,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace with a process named "`kind` N" for each N of `pes`. `origin_ns` is at or before the start of every span.
    ///
    /// # Errors
    /// The writer's.
    pub fn new(
        mut out: W,
        kind: &str,
        pes: impl IntoIterator<Item = usize>,
        origin_ns: u64,
    ) -> io::Result<TraceWriter<W>> {
        out.write_all(br#"{"displayTimeUnit":"ms","traceEvents":["#)?;
        let mut between = "";
        for pe in pes {
            let name = format!("{kind} {pe}");
            let name = json!({"name": "process_name", "ph": "M", "pid": pe, "tid": 0, "args": {"name": name}});
            let index =
                json!({"name": "process_sort_index", "ph": "M", "pid": pe, "tid": 0, "args": {"sort_index": pe}});
            write!(out, "{between}{name},{index}")?;
            between = ",";
        }
        Ok(TraceWriter { out, origin_ns })
    }

    /// Appends the spans of a PE in one or several consecutive steps.
    ///
    /// # Errors
    /// The writer's.
    pub fn add(&mut self, pe: usize, mut spans: Vec<TraceSpan>) -> io::Result<()> {
        // The viewer expects the outer one of spans that start together first.
        spans.sort_by_key(|span| (span.start_ns, Reverse(span.dur_ns)));
        for span in spans {
            let event = json!({
                "name": span.name, "cat": "phase", "ph": "X", "pid": pe, "tid": span.track,
                "ts": span.start_ns.saturating_sub(self.origin_ns) as f64 / 1e3, "dur": span.dur_ns as f64 / 1e3,
                "args": {"step": span.step},
            });
            write!(self.out, ",{event}")?;
        }
        Ok(())
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// The writer's.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(b"]}")?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// The trace of simulated spans, with processes named "`kind` N".
///
/// # Errors
/// None: a vector takes every byte.
pub fn simulated_trace_json(kind: &str, spans: &[Span]) -> io::Result<Vec<u8>> {
    let ns = |seconds: f64| (seconds * 1e9).round() as u64;
    let mut by_pe: BTreeMap<usize, Vec<TraceSpan>> = BTreeMap::new();
    for span in spans {
        let (start_ns, dur_ns) = (ns(span.start_s), ns(span.start_s + span.dur_s) - ns(span.start_s));
        let one = TraceSpan { name: span.name.clone(), start_ns, dur_ns, step: 0, track: u64::from(span.track) };
        by_pe.entry(span.pe as usize).or_default().push(one);
    }
    let mut trace = TraceWriter::new(Vec::new(), kind, by_pe.keys().copied(), 0)?;
    by_pe.into_iter().try_for_each(|(pe, spans)| trace.add(pe, spans))?;
    trace.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn span(name: &str, start_ns: u64, dur_ns: u64) -> TraceSpan {
        TraceSpan { name: name.into(), start_ns, dur_ns, step: 4, track: 0 }
    }

    #[test]
    fn a_trace_has_a_process_per_pe_and_sorted_events() {
        let start = 7_000_000_000_000; // a host that has been up for two hours
        let mut trace = TraceWriter::new(Vec::new(), "PE", 0..2, start).unwrap();
        let unsorted = [("expert \"GEMM\"", 2_500, 1_001), ("inner", 0, 10), ("outer", 0, 20)];
        trace.add(0, unsorted.map(|(name, at, dur)| span(name, start + at, dur)).to_vec()).unwrap();
        trace.add(1, vec![span("router", start + 1, 2)]).unwrap();
        let trace: Value = serde_json::from_slice(&trace.finish().unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let names: Vec<&Value> =
            events.iter().filter(|event| event["name"] == "process_name").map(|event| &event["args"]["name"]).collect();
        assert_eq!(names, ["PE 0", "PE 1"]);
        let complete: Vec<_> = events
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                assert_eq!(event["args"]["step"], 4);
                let name = event["name"].as_str().unwrap();
                (name, event["pid"].as_u64().unwrap(), event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap())
            })
            .collect();
        let want = [
            ("outer", 0, 0.0, 0.02),
            ("inner", 0, 0.0, 0.01),
            ("expert \"GEMM\"", 0, 2.5, 1.001),
            ("router", 1, 0.001, 0.002),
        ];
        assert_eq!(complete, want);
    }

    #[test]
    fn no_spans_is_a_valid_trace() {
        let trace = TraceWriter::new(Vec::new(), "PE", [0], 0).unwrap().finish().unwrap();
        let trace: Value = serde_json::from_slice(&trace).unwrap();
        assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 2);
    }
}
