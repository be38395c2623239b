//! The timeline, in the Chrome trace event format, which <https://ui.perfetto.dev> opens.

use std::cmp::Reverse;
use std::io::{self, Write};

use serde_json::json;

use super::pe::TraceSpan;

/// Writes a trace as it comes: a process per PE, a complete event per span; times in microseconds since the job's start. A trace takes
/// no memory, however many steps it has.
pub struct TraceWriter<W> {
    out: W,
    origin_ns: u64,
}

impl<W: Write> TraceWriter<W> {
    /// Begins the trace of so many PEs; `origin_ns`, of the spans' clock, is not after any of them.
    ///
    /// # Errors
    /// The writer's.
    pub fn new(mut out: W, pes: usize, origin_ns: u64) -> io::Result<TraceWriter<W>> {
        out.write_all(br#"{"displayTimeUnit":"ms","traceEvents":["#)?;
        for pe in 0..pes {
            let name =
                json!({"name": "process_name", "ph": "M", "pid": pe, "tid": 0, "args": {"name": format!("PE {pe}")}});
            let index =
                json!({"name": "process_sort_index", "ph": "M", "pid": pe, "tid": 0, "args": {"sort_index": pe}});
            write!(out, "{}{name},{index}", if pe == 0 { "" } else { "," })?;
        }
        Ok(TraceWriter { out, origin_ns })
    }

    /// Adds a PE's spans of a step, or of several that follow each other.
    ///
    /// # Errors
    /// The writer's.
    pub fn add(&mut self, pe: usize, mut spans: Vec<TraceSpan>) -> io::Result<()> {
        // Of spans that start together the outer one comes first: the viewer nests in this order.
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

    /// Ends it.
    ///
    /// # Errors
    /// The writer's.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(b"]}")?;
        self.out.flush()?;
        Ok(self.out)
    }
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
        let mut trace = TraceWriter::new(Vec::new(), 2, start).unwrap();
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
        let trace = TraceWriter::new(Vec::new(), 1, 0).unwrap().finish().unwrap();
        let trace: Value = serde_json::from_slice(&trace).unwrap();
        assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 2);
    }
}
