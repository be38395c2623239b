//! The options, the stages and the errors of a probe.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::shmem::{ShmemError, WaitTimeout};

/// Maximum number of message sizes: a message carries the number of its size in a byte, and 0 and 255 have other meanings.
const MOST_SIZES: usize = 254;

/// How to probe. The same on every PE. Begin with [`ProbeOptions::thorough`] or [`ProbeOptions::quick`] and set what differs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProbeOptions {
    /// Sizes of messages, bytes, ascending, at least two and at most 255.
    pub sizes: Vec<usize>,
    /// Which of them is sent by all at once, by its place.
    pub together: usize,
    /// Messages of each size that count, at most.
    pub repetitions: usize,
    /// Messages before them.
    pub warmup: usize,
    /// Rounds of all at once.
    pub rounds: usize,
    /// What the pairs alone may take in all. No size has fewer than [`ProbeOptions::LEAST`] messages all the same.
    pub alone_limit: Duration,
    /// How often a pair whose times do not fit a line is measured again, at most.
    pub retries: usize,
    /// How long each PE computes.
    pub compute: Duration,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
}

impl ProbeOptions {
    /// The fewest messages of each size that count.
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

    /// For a start-up that nobody waits for: from 64 bytes to 1 MiB in steps of eight or four.
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

    /// Symmetric memory that [`probe`] takes from a heap of `n_pes` PEs, bytes.
    pub fn symmetric_bytes(&self, n_pes: usize) -> usize {
        // Places for one message of the largest size, and one of the size sent at once from everyone; two words per PE.
        self.place_bytes(n_pes) + 2 * n_pes * size_of::<u64>() + 256
    }

    /// The part of it that takes messages: one of the largest size, or one from every PE of the size that all send at once, each in
    /// a multiple of 64 bytes.
    pub fn place_bytes(&self, n_pes: usize) -> usize {
        self.largest().max(n_pes * self.place())
    }

    /// Room for a message sent at once.
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

/// What a PE is doing, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeStage {
    /// Pairs alone.
    Alone,
    /// All pairs at once.
    Together,
    /// Computing.
    Compute,
}

/// Why a probe ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A peer that did not do its part in time.
    #[error("PE {pe} waited for PE {peer} ({what}): {timeout}")]
    Wait {
        /// The PE that waited.
        pe: usize,
        /// The PE it waited for.
        peer: usize,
        /// What it waited for.
        what: &'static str,
        /// The wait.
        timeout: WaitTimeout,
    },
    /// A peer that said something impossible.
    #[error("PE {pe} announced a message of no size that is probed")]
    Protocol {
        /// The peer.
        pe: usize,
    },
    /// The symmetric heap is too small.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// Options that make no probe.
    #[error("the sizes of a probe must be 2 to 254 ascending numbers of bytes, and one of them be sent by all at once")]
    Options,
}

impl ProbeError {
    /// The PE that was waited for in vain, where the error is that.
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
