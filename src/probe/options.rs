//! The options, the stages and the errors of a probe.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::shmem::{ShmemError, WaitTimeout};

/// Maximum number of message sizes: a message carries the number of its size in a byte, and 0 and 255 have other meanings.
const MOST_SIZES: usize = 254;

/// Options of a probe, equal on all PEs. Start from [`ProbeOptions::thorough`] or [`ProbeOptions::quick`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProbeOptions {
    /// Message sizes, bytes, ascending; 2 to 254 of them.
    pub sizes: Vec<usize>,
    /// Index of the size that all PEs send at once.
    pub together: usize,
    /// Maximum number of measured messages of each size.
    pub repetitions: usize,
    /// Warm-up messages before them.
    pub warmup: usize,
    /// Measured rounds of all PEs at once.
    pub rounds: usize,
    /// Time limit for all pairs alone. Each size has at least [`ProbeOptions::LEAST`] messages in any case.
    pub alone_limit: Duration,
    /// Maximum number of repetitions for a pair with a bad fit.
    pub retries: usize,
    /// Duration of the compute measurement of each PE.
    pub compute: Duration,
    /// Maximum wait for another PE.
    pub wait_limit: Duration,
}

impl ProbeOptions {
    /// Minimum number of measured messages of each size.
    pub const LEAST: usize = 5;

    /// From 16 bytes to 4 MiB in steps of four.
    pub fn thorough() -> ProbeOptions {
        ProbeOptions {
            sizes: (0..10).map(|step| 16 << (2 * step)).collect(),
            together: 8,
            repetitions: 200,
            warmup: 5,
            rounds: 21,
            alone_limit: Duration::from_secs(10),
            retries: 5,
            compute: Duration::from_millis(600),
            wait_limit: Duration::from_secs(60),
        }
    }

    /// For a short start-up: from 64 bytes to 1 MiB in steps of eight or four.
    pub fn quick() -> ProbeOptions {
        ProbeOptions {
            sizes: vec![64, 4 << 10, 32 << 10, 256 << 10, 1 << 20],
            together: 3,
            repetitions: 25,
            warmup: 2,
            rounds: 5,
            alone_limit: Duration::from_millis(120),
            retries: 3,
            compute: Duration::from_millis(100),
            ..ProbeOptions::thorough()
        }
    }

    /// The largest size, bytes.
    pub fn largest(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Symmetric memory that [`probe`](super::probe()) allocates with `n_pes` PEs, bytes.
    pub fn symmetric_bytes(&self, n_pes: usize) -> usize {
        // Space for one message of the largest size, or one of the common size from each PE; two words per PE.
        self.place_bytes(n_pes) + 2 * n_pes * size_of::<u64>() + 256
    }

    /// The message space: one message of the largest size, or one of the common size from each PE, each rounded up to 64 bytes.
    pub fn place_bytes(&self, n_pes: usize) -> usize {
        self.largest().max(n_pes * self.place())
    }

    /// Space for a message of the common size.
    pub(super) fn place(&self) -> usize {
        self.sizes.get(self.together).map_or(0, |bytes| bytes.next_multiple_of(64))
    }

    pub(super) fn check(&self) -> Result<(), ProbeError> {
        let sizes = &self.sizes;
        let fits = sizes.len() >= 2 && sizes.len() <= MOST_SIZES && sizes.is_sorted_by(|a, b| a < b) && sizes[0] > 0;
        if !fits || self.together >= sizes.len() {
            return Err(ProbeError::Options);
        }
        Ok(())
    }
}

/// Stage of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeStage {
    /// Pairs alone.
    Alone,
    /// All pairs at once.
    Together,
    /// Compute.
    Compute,
}

/// The error of a failed probe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A peer did not respond in time.
    #[error("PE {pe} waited for PE {peer} ({what}): {timeout}")]
    Wait {
        /// The waiting PE.
        pe: usize,
        /// The PE that it waited for.
        peer: usize,
        /// The awaited message.
        what: &'static str,
        /// The timeout.
        timeout: WaitTimeout,
    },
    /// A peer sent an invalid message.
    #[error("PE {pe} announced a message of no size that is probed")]
    Protocol {
        /// The peer.
        pe: usize,
    },
    /// The symmetric heap is too small.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// Invalid options.
    #[error("the sizes of a probe must be 2 to 254 ascending numbers of bytes, and one of them be sent by all at once")]
    Options,
}

impl ProbeError {
    /// The PE that did not respond, for [`ProbeError::Wait`].
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            ProbeError::Wait { peer, timeout, .. } => Some(timeout.lost.as_ref().map_or(*peer, |lost| lost.pe)),
            _ => None,
        }
    }
}

pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
