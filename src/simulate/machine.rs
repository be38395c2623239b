//! The constants of a simulated machine, from a file of `aristos calibrate`.

use std::path::Path;

use super::calibration::Calibration;
use super::device::DeviceCalibration;
use crate::cluster::{parse_json, read_text};
use crate::moe::LayerConfig;
use crate::plan::InputError;
use crate::sim::step::{Cores, LayerCost};

/// The constants of a simulated machine.
#[derive(Clone, Debug, PartialEq)]
pub enum Machine {
    /// PEs on a CPU.
    Cpu(Calibration),
    /// A device for each PE.
    Device(DeviceCalibration),
}

impl Machine {
    /// Reads a calibration.
    ///
    /// # Errors
    /// A file that cannot be read, or a field with a wrong value; the line names the file, the field and the expected value.
    pub fn read(path: &Path) -> Result<Machine, InputError> {
        Machine::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses the JSON text of a calibration: a device's has a key `device`.
    ///
    /// # Errors
    /// As [`Machine::read`], without the file.
    pub fn from_json(text: &str) -> Result<Machine, InputError> {
        let any: serde_json::Value = parse_json(text)?;
        if any.get("device").is_some() {
            let device: DeviceCalibration = parse_json(text)?;
            device.check()?;
            return Ok(Machine::Device(device));
        }
        let calibration: Calibration = parse_json(text)?;
        calibration.check()?;
        Ok(Machine::Cpu(calibration))
    }

    /// Element type of the measured layers.
    pub(super) fn dtype(&self) -> &str {
        match self {
            Machine::Cpu(calibration) => &calibration.dtype,
            Machine::Device(device) => &device.dtype,
        }
    }

    /// The cores of a host, shared by its PEs.
    pub(super) fn cores(&self) -> Option<Cores> {
        match self {
            Machine::Cpu(calibration) => Some(calibration.cores()),
            Machine::Device(_) => None,
        }
    }

    /// Slowdown of work with all cores busy, relative to one.
    pub fn busy_factor(&self) -> f64 {
        self.cores().map_or(1.0, |cores| cores.busy_factor)
    }

    /// Rows of a device's tiles.
    pub(super) fn tile_rows(&self) -> Option<usize> {
        match self {
            Machine::Cpu(_) => None,
            Machine::Device(device) => Some(device.tile[0]),
        }
    }

    /// The cost of a layer with tiles of about `tile_rows` rows, FLOP at [`RATE`](super::calibration::RATE).
    pub(super) fn cost(
        &self,
        config: &LayerConfig,
        element_bytes: usize,
        tile_rows: usize,
        rated: LayerCost,
    ) -> LayerCost {
        match self {
            Machine::Cpu(calibration) => calibration.cost(config, element_bytes, tile_rows, rated),
            Machine::Device(device) => device.cost(config, element_bytes, rated),
        }
    }
}
