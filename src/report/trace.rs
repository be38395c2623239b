//! The timeline, in the Chrome trace event format, which <https://ui.perfetto.dev> opens.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::pe::{PeReport, TraceSpan};
use crate::sim::timeline::Span;

/// The PEs' spans as a trace: a process per PE, a complete event per span; times in microseconds since the first span's
/// start, sorted.
pub fn trace_json(pes: &[PeReport]) -> String {
    let spans = pes.iter().flat_map(|report| report.spans.iter().map(|span| (report.pe, span))).collect();
    json_of("PE", &pes.iter().map(|report| report.pe).collect::<Vec<_>>(), spans)
}

/// The same of simulated spans; `kind` says what they are of, as in "node 3".
pub fn simulated_trace_json(kind: &str, spans: &[Span]) -> String {
    let ns = |seconds: f64| (seconds * 1e9).round() as u64;
    let one = |span: &Span| {
        let (start_ns, dur_ns) = (ns(span.start_s), ns(span.start_s + span.dur_s) - ns(span.start_s));
        (
            span.pe as usize,
            TraceSpan { name: span.name.clone(), start_ns, dur_ns, step: 0, track: u64::from(span.track) },
        )
    };
    let spans: Vec<(usize, TraceSpan)> = spans.iter().map(one).collect();
    let pes: BTreeSet<usize> = spans.iter().map(|(pe, _)| *pe).collect();
    json_of(kind, &pes.into_iter().collect::<Vec<_>>(), spans.iter().map(|(pe, span)| (*pe, span)).collect())
}

fn json_of(kind: &str, pes: &[usize], mut spans: Vec<(usize, &TraceSpan)>) -> String {
    let mut events: Vec<Value> = Vec::new();
    for pe in pes {
        events.push(
            json!({"name": "process_name", "ph": "M", "pid": pe, "tid": 0, "args": {"name": format!("{kind} {pe}")}}),
        );
        events.push(json!({"name": "process_sort_index", "ph": "M", "pid": pe, "tid": 0, "args": {"sort_index": pe}}));
    }
    // Of spans that start together the outer one comes first: the viewer nests in this order.
    spans.sort_by_key(|(pe, span)| (span.start_ns, Reverse(span.dur_ns), *pe));
    let origin_ns = spans.first().map_or(0, |(_, span)| span.start_ns);
    events.extend(spans.into_iter().map(|(pe, span)| {
        json!({
            "name": span.name, "cat": "phase", "ph": "X", "pid": pe, "tid": span.track,
            "ts": (span.start_ns - origin_ns) as f64 / 1e3, "dur": span.dur_ns as f64 / 1e3,
            "args": {"step": span.step},
        })
    }));
    json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(name: &str, start_ns: u64, dur_ns: u64) -> TraceSpan {
        TraceSpan { name: name.into(), start_ns, dur_ns, step: 4, track: 0 }
    }

    #[test]
    fn a_trace_has_a_process_per_pe_and_sorted_events() {
        let start = 7_000_000_000_000; // a host that has been up for two hours
        let pes = [
            PeReport {
                pe: 0,
                spans: vec![
                    span("expert \"GEMM\"", start + 2_500, 1_001),
                    span("inner", start, 10),
                    span("outer", start, 20),
                ],
                ..PeReport::default()
            },
            PeReport { pe: 1, spans: vec![span("router", start + 1, 2)], ..PeReport::default() },
        ];
        let trace: Value = serde_json::from_str(&trace_json(&pes)).unwrap();
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
            ("router", 1, 0.001, 0.002),
            ("expert \"GEMM\"", 0, 2.5, 1.001),
        ];
        assert_eq!(complete, want);
    }

    #[test]
    fn no_spans_is_a_valid_trace() {
        let trace: Value = serde_json::from_str(&trace_json(&[PeReport::default()])).unwrap();
        assert_eq!(trace["traceEvents"].as_array().unwrap().len(), 2);
    }
}
