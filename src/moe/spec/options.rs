//! Options of a layer: element type, mode, and trade-offs between memory and time.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::error::ConfigError;
use super::hosts::Hosts;

/// Element type of activations and expert weights, as a run-time value; [`Element`](crate::moe::cpu::kernels::Element) is the corresponding
/// trait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// 32-bit floats.
    F32,
    /// bfloat16, accumulated in f32.
    Bf16,
    /// IEEE half precision, accumulated in f32. Supported only on devices.
    F16,
}

impl Dtype {
    /// Name in reports.
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
    /// Rows, tiles and results are processed as they arrive; a PE waits only when it has no work.
    Pipelined,
    /// The bulk-synchronous baseline: all PEs finish each phase (counts, rows, experts, results) before any starts the next.
    Bulk,
}

/// How the rows of an expert are divided among its replicas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Balance {
    /// By the shares of the placement, which need no communication.
    #[default]
    Shares,
    /// By the batch's own choices: the most loaded PE gets the least possible number of rows. PEs exchange the choices' counts before dispatch.
    /// Supported only on CPUs.
    Split,
}

impl Balance {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Balance::Shares => "shares",
            Balance::Split => "split",
        }
    }
}

/// How a layer runs. Options change results only by rounding, and must be the same on every PE.
///
/// Start from [`Options::default`] and set the fields that differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Options {
    /// Pipelined or bulk.
    pub mode: Mode,
    /// Size of the receive windows as a multiple of the even share of the rows. A window has at least one row.
    pub budget_factor: f64,
    /// Maximum number of rows under one signal; `None`: derived from the window, see [`Options::chunk_rows`].
    pub chunk_rows: Option<usize>,
    /// Approximate rows per GEMM tile; `None`: the engine's default. Not supported on a device, which has fixed tiles.
    pub tile_rows: Option<usize>,
    /// CPU engine: element type of rows that are sent between PEs. [`Dtype::Bf16`] in an f32 layer rounds the rows that are sent, and
    /// halves their bytes. `None`: the layer's type.
    pub wire: Option<Dtype>,
    /// CPU engine: number of threads per PE that compute tiles. The number does not change a bit of the results.
    pub threads: usize,
    /// CPU engine: how the rows of an expert are divided among its replicas.
    #[serde(default)]
    pub balance: Balance,
    /// The host of each PE. If set, a row is sent to another host once: a relay on that host forwards it to the other PEs that have experts
    /// of the row, and returns one sum of their results. Empty by default: every row is sent to each PE directly.
    pub hosts: Hosts,
    /// Maximum time for which a PE waits for a peer.
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
            balance: Balance::Shares,
            hosts: Hosts::default(),
            wait_limit: Duration::from_secs(60),
        }
    }
}

impl Options {
    /// Default of [`Options::tile_rows`] in the CPU engine.
    pub const DEFAULT_TILE_ROWS: usize = 512;

    /// Rows per tile of the CPU engine.
    pub fn tile_rows(&self) -> usize {
        self.tile_rows.unwrap_or(Self::DEFAULT_TILE_ROWS)
    }

    /// Number of rows of a receive window: `budget_factor` times the even share of a source's rows, if the source has `tokens` tokens, and
    /// sends each token to `targets` of the `pes` PEs.
    pub(crate) fn window_rows(&self, tokens: usize, targets: usize, pes: usize) -> usize {
        let even_share = (tokens * targets).div_ceil(pes);
        ((even_share as f64 * self.budget_factor).ceil() as usize).clamp(1, tokens.max(1))
    }

    /// Maximum number of rows under one signal in a window of `window_rows` rows; by default 1/16 of the window, but at least 128 and at
    /// most 256. With few chunks per window, tiles wait for rows that have already arrived (`docs/decisions/2026-11-26-send-groups.md`).
    pub fn chunk_rows(&self, window_rows: usize) -> usize {
        self.chunk_rows.unwrap_or((window_rows / 16).clamp(128, 256)).clamp(1, window_rows.max(1))
    }

    /// Element type of rows that are sent between PEs, for a layer of `dtype`.
    pub fn wire(&self, dtype: Dtype) -> Dtype {
        self.wire.unwrap_or(dtype)
    }

    /// Checks the options for a layer of `dtype`.
    ///
    /// # Errors
    ///
    /// Returns a `ConfigError` that names the first wrong option, its value, and the expected values.
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

    /// Deadline of a wait that starts now.
    pub(crate) fn deadline(&self) -> Instant {
        /// Replaces a limit that is too large for an [`Instant`].
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        let now = Instant::now();
        now.checked_add(self.wait_limit).unwrap_or_else(|| now + CENTURY)
    }
}
