//! How a layer runs: element type, mode, and what trades memory for time.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::hosts::Hosts;

/// Element type of activations and expert weights; what [`Element`](crate::moe::cpu::kernels::Element) is at compile time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// IEEE half precision, accumulated in f32; on a device only.
    F16,
}

impl Dtype {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }
}

/// How the PEs exchange rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Mode {
    /// Rows, tiles and results flow as they come; a PE waits only when it has nothing to do.
    Pipelined,
    /// Bulk-synchronous: all PEs finish each step (counts, rows, experts, results) before any begins the next. The
    /// baseline.
    Bulk,
}

/// How a layer runs; nothing here changes its results, other than by rounding. Must be the same on every PE.
///
/// Begin with [`Options::default`] and set what differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Options {
    /// Pipelined or bulk.
    pub mode: Mode,
    /// Receive windows, as a multiple of the even share of the rows (at least one row is always there).
    pub budget_factor: f64,
    /// Most rows sent under one signal; `None`: by the window, [`Options::chunk_rows`].
    pub chunk_rows: Option<usize>,
    /// Rows that an expert's GEMMs are cut to, about; `None`: the engine's default. A device's tiles are its own, so it takes
    /// none.
    pub tile_rows: Option<usize>,
    /// Element type of rows between PEs, on a CPU: [`Dtype::Bf16`] in a layer of f32, which halves their bytes and rounds what crosses; `None`:
    /// the layer's.
    pub wire: Option<Dtype>,
    /// Threads of a PE that compute tiles, on a CPU; the bits of the results are the same for any number.
    pub threads: usize,
    /// The host of each PE, where a row is to cross to another host once: a PE there passes it on to the others that have experts of it,
    /// and adds their results before they return. Default: none, every row goes to each PE, and results come from each.
    pub hosts: Hosts,
    /// How long a PE waits for a peer before it gives up.
    pub wait_limit: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mode: Mode::Pipelined,
            budget_factor: 2.0,
            chunk_rows: None,
            tile_rows: None,
            wire: None,
            threads: 1,
            hosts: Hosts::default(),
            wait_limit: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// [`Options::tile_rows`] on a CPU where none are given.
    pub const DEFAULT_TILE_ROWS: usize = 512;

    /// Rows that the CPU engine cuts an expert's GEMMs to.
    pub fn tile_rows(&self) -> usize {
        self.tile_rows.unwrap_or(Self::DEFAULT_TILE_ROWS)
    }

    /// Rows of a receive window: so many times the even share of what a PE has for `targets` of `pes` PEs that each of its tokens goes to.
    pub(crate) fn window_rows(&self, tokens: usize, targets: usize, pes: usize) -> usize {
        let even_share = (tokens * targets).div_ceil(pes);
        ((even_share as f64 * self.budget_factor).ceil() as usize).clamp(1, tokens.max(1))
    }

    /// Most rows sent under one signal, of a window of `window_rows`: where none are given a 16th, between 128 and 256. In a window of few chunks tiles
    /// wait for rows that have come (`docs/decisions/2026-11-26-send-groups.md`).
    pub fn chunk_rows(&self, window_rows: usize) -> usize {
        self.chunk_rows.unwrap_or((window_rows / 16).clamp(128, 256)).clamp(1, window_rows.max(1))
    }

    /// Element type of rows between the PEs of a layer of `dtype`.
    pub fn wire(&self, dtype: Dtype) -> Dtype {
        self.wire.unwrap_or(dtype)
    }

    /// Checks that a layer of `dtype` can run with these.
    ///
    /// # Errors
    /// Names the first option that is out of range, its value, and what would be right.
    pub fn validate(&self, dtype: Dtype) -> Result<(), ConfigError> {
        for (field, value) in
            [("chunk rows", self.chunk_rows.unwrap_or(1)), ("tile rows", self.tile_rows()), ("threads", self.threads)]
        {
            if value == 0 {
                return Err(ConfigError { field, value: "0".into(), expected: "at least 1".into() });
            }
        }
        if let Some(wire) = self.wire.filter(|wire| (*wire, dtype) != (Dtype::Bf16, Dtype::F32)) {
            let value = format!("{} in a layer of {}", wire.name(), dtype.name());
            return Err(ConfigError { field: "wire", value, expected: "bf16 in a layer of f32, or none".into() });
        }
        let factor = self.budget_factor;
        if !(factor.is_finite() && factor > 0.0) {
            let expected = "a finite number above 0".into();
            return Err(ConfigError { field: "budget factor", value: factor.to_string(), expected });
        }
        Ok(())
    }

    /// When a wait that begins now is over.
    pub(crate) fn deadline(&self) -> Instant {
        /// For a limit beyond what an [`Instant`] can hold: a century.
        const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        let now = Instant::now();
        now.checked_add(self.wait_limit).unwrap_or_else(|| now + FAR)
    }
}
