//! The measurements of `aristos bench moe`, and their samples.

use serde::{Deserialize, Serialize};

use crate::job::request::{DeviceKind, MoeBench};
use crate::moe::metrics::{PassOutcome, Phase};
use crate::moe::placement::block;
use crate::moe::synthetic::Synthetic;
use crate::moe::{Dtype, LayerSpec, Mode, WeightSource};

/// The measured work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The experts' GEMMs alone.
    Gemms,
    /// The layer in this mode.
    Layer(Mode),
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// The measured work.
    pub what: Subject,
    /// Whether the backward pass runs too.
    pub backward: bool,
}

/// All measurements of an iteration on the CPU.
pub const MEASUREMENTS: [Measurement; 6] = [
    Measurement { what: Subject::Gemms, backward: false },
    Measurement { what: Subject::Layer(Mode::Bulk), backward: false },
    Measurement { what: Subject::Layer(Mode::Pipelined), backward: false },
    Measurement { what: Subject::Gemms, backward: true },
    Measurement { what: Subject::Layer(Mode::Bulk), backward: true },
    Measurement { what: Subject::Layer(Mode::Pipelined), backward: true },
];

/// All measurements of an iteration on a device.
pub const DEVICE_MEASUREMENTS: [Measurement; 4] = [
    Measurement { what: Subject::Layer(Mode::Bulk), backward: false },
    Measurement { what: Subject::Layer(Mode::Pipelined), backward: false },
    Measurement { what: Subject::Layer(Mode::Bulk), backward: true },
    Measurement { what: Subject::Layer(Mode::Pipelined), backward: true },
];

impl MoeBench {
    /// The layer.
    pub(crate) fn spec(&self, source: &Synthetic, dtype: Dtype) -> LayerSpec {
        LayerSpec::new(source.config().clone(), self.pes, block(self.tokens, self.pes, 0).len())
            .dtype(dtype)
            .options(self.options.clone())
    }

    /// The measurements of an iteration.
    pub fn measurements(&self) -> &'static [Measurement] {
        if self.device != DeviceKind::Cpu {
            return &DEVICE_MEASUREMENTS;
        }
        &MEASUREMENTS
    }
}

impl Measurement {
    /// Names of the work and the passes in tables and files.
    pub fn name(self) -> (&'static str, &'static str) {
        let what = match self.what {
            Subject::Gemms => "gemms",
            Subject::Layer(Mode::Bulk) => "bulk",
            Subject::Layer(Mode::Pipelined) => "pipelined",
        };
        (what, if self.backward { "forward+backward" } else { "forward" })
    }
}

/// The samples of one PE with one element type.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeSamples {
    /// The element type's name.
    pub dtype: String,
    /// The device's name; empty for the CPU.
    pub device: String,
    /// Rows of each of the PE's experts, including rows of its own tokens.
    pub expert_rows: Vec<u64>,
    /// For each iteration, a sample of each of [`MoeBench::measurements`].
    pub iterations: Vec<Vec<Sample>>,
}

/// One measurement of one iteration on one PE.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sample {
    /// Time of the passes or the GEMMs, seconds; on a device measured by the device.
    pub seconds: f64,
    /// Time by phase (in the order of [`Phase::ALL`]), seconds; zeros for bare GEMMs.
    pub phases_s: [f64; Phase::ALL.len()],
    /// The CPU at the end.
    pub cpu: usize,
}

/// The names of the job's phases, for the supervisor.
pub fn phase_names() -> Vec<&'static str> {
    Phase::ALL.iter().map(|phase| phase.name()).collect()
}

impl Sample {
    /// Adds a pass.
    pub(super) fn add(&mut self, outcome: &PassOutcome) {
        self.seconds += outcome.seconds;
        self.phases_s.iter_mut().zip(outcome.phases_s).for_each(|(sum, s)| *sum += s);
    }
}
