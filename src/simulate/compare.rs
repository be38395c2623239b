//! Comparison of a simulation with a run.

use serde::Serialize;

use super::SimulatedReport;
use crate::plan::InputError;
use crate::report::{PassTimes, RunReport};

/// Phases of a run that correspond to one phase of a simulation: time in which a PE does not compute.
const COMMUNICATION: [&str; 4] = ["dispatch", "combine", "scale", "waiting"];

/// A simulation compared with a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The step, its passes, and their phases.
    pub rows: Vec<Compared>,
}

/// One time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Name, such as "forward, expert_gemm".
    pub what: String,
    /// Simulated, seconds.
    pub predicted_s: f64,
    /// Measured, seconds.
    pub measured_s: f64,
    /// predicted / measured - 1; null if the measured time is 0.
    pub error: Option<f64>,
}

/// Compares the step, and the maximum over the PEs of each pass and phase. A run's dispatch, combine, scale and waiting together correspond to
/// the simulation's waiting; they are named `communication`.
///
/// # Errors
/// Different layers, tokens or PEs; the line names the run's field.
pub fn compare(run: &RunReport, simulated: &SimulatedReport) -> Result<Comparison, InputError> {
    let (ran, config) = (&run.config, &simulated.config);
    for (field, here, there) in [
        ("pes", ran.pes, config.pes),
        ("tokens", ran.tokens as usize, config.tokens as usize),
        ("hidden", ran.hidden as usize, config.hidden),
        ("intermediate", ran.intermediate as usize, config.intermediate),
        ("experts", ran.experts, config.experts),
        ("top_k", ran.top_k as usize, config.top_k),
    ] {
        if here != there {
            let expected = format!("{there}, the simulation's");
            return Err(InputError::value(format!("config.{field}"), format!("is {here}"), expected));
        }
    }
    let words = [("mode", &ran.mode, &config.mode), ("dtype", &ran.dtype, &config.dtype)];
    if let Some((field, here, there)) = words.into_iter().find(|(_, here, there)| here != there) {
        let expected = format!("{there}, the simulation's");
        return Err(InputError::value(format!("config.{field}"), format!("is {here}"), expected));
    }
    if ran.backward != config.backward {
        let expected = format!("{}, the simulation's", config.backward);
        return Err(InputError::value("config.backward", format!("is {}", ran.backward), expected));
    }
    let mut rows = vec![compared("step", simulated.step_s, run.step_s)];
    let passes = [
        ("forward", Some(&simulated.forward), Some(&run.forward)),
        ("backward", simulated.backward.as_ref(), run.backward.as_ref()),
    ];
    for (name, predicted, measured) in passes {
        let Some((predicted, measured)) = predicted.zip(measured) else { continue };
        rows.push(compared(name, predicted.total.max_s, measured.total.max_s));
        for (phase, predicted_as, measured_as) in [
            ("router", &["router"][..], &["router"][..]),
            ("expert_gemm", &["expert_gemm", "epilogue"], &["expert_gemm"]),
            ("dispatch", &["dispatch"], &["dispatch"]),
            ("combine", &["combine"], &["combine", "scale"]),
            ("waiting", &["waiting", "start", "tail"], &["waiting"]),
            ("communication", &["dispatch", "combine", "waiting", "start", "tail"], &COMMUNICATION),
            ("other", &["sums_wait", "expert_sums", "replicated_sums"], &["other"]),
        ] {
            let what = format!("{name}, {phase}");
            rows.push(compared(&what, of(predicted, predicted_as), of(measured, measured_as)));
        }
    }
    Ok(Comparison { rows })
}

fn of(times: &PassTimes, phases: &[&str]) -> f64 {
    phases.iter().filter_map(|phase| times.phases.get(*phase)).map(|spread| spread.max_s).fold(0.0, |sum, s| sum + s)
}

fn compared(what: &str, predicted_s: f64, measured_s: f64) -> Compared {
    let error = (measured_s > 0.0).then(|| predicted_s / measured_s - 1.0);
    Compared { what: what.to_string(), predicted_s, measured_s, error }
}
