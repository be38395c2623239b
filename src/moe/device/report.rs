//! Converts a device's statistics and error records to the layer's outcomes and errors.

use std::time::Duration;

use crate::gpu::params::{self, ErrorRecord, PassStats, SpanRecord};
use crate::moe::metrics::{PassOutcome, Phase, Span, Traffic};
use crate::moe::{MoeError, Options};

/// Times between the events of a pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct DevicePassTimes {
    /// Router and plan, and in backward the kernels after the persistent kernel.
    pub router: Duration,
    /// The persistent kernel.
    pub layer: Duration,
    /// The sums over PEs of gradients and losses.
    pub all_reduce: Duration,
}

/// Computes the outcome of a pass from its counters and times.
pub fn outcome(stats: &PassStats, times: DevicePassTimes, spans: &[SpanRecord]) -> PassOutcome {
    let mut phases_s = [0.0; Phase::ALL.len()];
    let idle = Phase::Idle.code();
    let block_ns = stats.phase_block_ns.iter().enumerate();
    let busy_ns: u64 = block_ns.clone().filter(|(i, _)| *i != idle).map(|(_, ns)| ns).sum();
    let layer_s = times.layer.as_secs_f64();
    if busy_ns == 0 {
        phases_s[Phase::Expert.code()] = layer_s;
    } else {
        for (i, &ns) in block_ns.filter(|(i, _)| *i != idle) {
            phases_s[i] = layer_s * (ns as f64 / busy_ns as f64);
        }
    }
    phases_s[Phase::Router.code()] += times.router.as_secs_f64();
    phases_s[Phase::AllReduce.code()] += times.all_reduce.as_secs_f64();
    PassOutcome {
        seconds: phases_s.iter().sum(),
        phases_s,
        expert_cpu_s: 0.0,
        rounds: stats.rounds,
        traffic: Traffic {
            header_bytes: stats.header_bytes,
            dispatch_row_bytes: stats.dispatch_row_bytes,
            dispatch_slot_bytes: stats.dispatch_slot_bytes,
            combine_row_bytes: stats.combine_row_bytes,
            combine_slot_bytes: stats.combine_slot_bytes,
            dispatch_rows: stats.dispatch_rows,
            combine_rows: stats.combine_rows,
            puts: stats.puts,
            signals: stats.signals,
            fences: stats.fences,
            network_bytes: stats.network_bytes,
            relay_bytes: stats.relay_bytes,
        },
        all_reduce_bytes: stats.all_reduce_bytes,
        spans: spans.iter().filter_map(block_span).collect(),
    }
}

fn block_span(record: &SpanRecord) -> Option<Span> {
    let phase = phase(record.phase)?;
    let (start_ns, dur_ns) = (record.start_ns, record.end_ns.saturating_sub(record.start_ns));
    (phase != Phase::Idle).then_some(Span { phase, start_ns, dur_ns, track: record.block })
}

fn phase(code: u32) -> Option<Phase> {
    Phase::ALL.get(code as usize).copied()
}

/// Converts an error record of a device; `None` if it has no error. `me` is this PE's number in the world, and `members` are the PEs of its
/// group.
pub fn error(record: &ErrorRecord, me: usize, members: &[usize], options: &Options) -> Option<MoeError> {
    let phase = phase(record.phase).unwrap_or(Phase::Idle);
    let what = match record.what {
        params::WHAT_COUNTS => "its counts",
        params::WHAT_ROWS => "its rows",
        params::WHAT_RESULTS => "its results",
        params::WHAT_CAPACITY => "its counts for the capacity",
        params::WHAT_BARRIER => "its arrival at a barrier",
        params::WHAT_ALL_REDUCE => "its gradients of weights that several PEs hold",
        params::WHAT_LOSSES => "its sums for the losses",
        params::WHAT_CREDIT => "its free place for rows",
        params::WHAT_LOCAL => "another block of this PE",
        _ => "what it does not say",
    };
    let ErrorRecord { kind, expected, seen, index, .. } = *record;
    let of_world = matches!(record.what, params::WHAT_CAPACITY | params::WHAT_ALL_REDUCE | params::WHAT_LOSSES);
    let pe = record.pe as usize;
    let pe = if of_world { pe } else { members.get(pe).copied().unwrap_or(pe) };
    match kind {
        params::ERROR_NONE => None,
        params::ERROR_ROUTING => {
            let id = seen as i64;
            let why = match record.what {
                params::WHAT_TWICE => format!("token {index} has expert {id} twice"),
                _ => format!("token {index} has expert {id}, expected 0 to {}, or -1 for none", expected - 1),
            };
            Some(MoeError::Usage { what: "route by the given ids", why })
        }
        params::ERROR_TIMEOUT => Some(MoeError::Wait {
            pe: me,
            peer: (record.what != params::WHAT_LOCAL).then_some(pe),
            what,
            phase,
            expected,
            seen,
            waited: options.wait_limit,
        }),
        params::ERROR_ABORTED => Some(MoeError::Aborted { pe: me, phase }),
        _ => Some(MoeError::Protocol {
            pe,
            what: format!("{what} number {index}, which is out of range: {seen}, expected at most {expected}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_report_names_the_pe_and_the_signal() {
        let record = |kind, what| ErrorRecord { kind, pe: 2, what, phase: 5, expected: 7, seen: 3, index: 1 };
        let options = Options { wait_limit: Duration::from_secs(2), ..Options::default() };
        let error = |record: ErrorRecord| error(&record, 1, &[1, 3, 2], &options);
        let text = |kind, what| error(record(kind, what)).unwrap().to_string();
        assert!(error(record(params::ERROR_NONE, 1)).is_none());
        assert_eq!(
            text(params::ERROR_TIMEOUT, params::WHAT_ROWS),
            "PE 1 waited 2.0 s in phase waiting for PE 2: its rows: expected at least 7, seen 3"
        );
        assert_eq!(error(record(params::ERROR_TIMEOUT, params::WHAT_ROWS)).unwrap().awaited_pe(), Some(2));
        // The record has the PE's index in the group, or for some waits its number in the world.
        let other = ErrorRecord { pe: 1, ..record(params::ERROR_TIMEOUT, params::WHAT_ROWS) };
        assert_eq!(error(other).unwrap().awaited_pe(), Some(3));
        let other = ErrorRecord { what: params::WHAT_ALL_REDUCE, ..other };
        assert_eq!(error(other).unwrap().awaited_pe(), Some(1));
        assert!(text(params::ERROR_TIMEOUT, params::WHAT_LOCAL).contains("for another block of this PE: expected"));
        assert_eq!(
            text(params::ERROR_PROTOCOL, params::WHAT_COUNTS),
            "PE 2 sent its counts number 1, which is out of range: 3, expected at most 7"
        );
    }

    #[test]
    fn phase_times_sum_to_the_pass() {
        let ms = Duration::from_millis;
        let stats = PassStats { phase_block_ns: [1000, 0, 10, 20, 10, 0, 0], ..PassStats::default() };
        let times = DevicePassTimes { router: ms(1), layer: ms(8), all_reduce: ms(2) };
        let outcome = outcome(&stats, times, &[]);
        assert!((outcome.seconds - 0.011).abs() < 1e-12);
        assert!((outcome.phases_s[Phase::Expert.code()] - 0.004).abs() < 1e-12);
        assert_eq!(outcome.phases_s[Phase::Idle.code()], 0.0);
    }
}
