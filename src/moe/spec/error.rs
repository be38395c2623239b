//! What can go wrong in a layer.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use super::metrics::Phase;
use crate::shmem::{LostPe, Shmem, ShmemError, Transport, WaitTimeout};

/// An error of the layer; each message is one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// A configuration that cannot be.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Symmetric memory.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// Weights that could not be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// More (token, expert) pairs than 32 bits number.
    #[error("{tokens} tokens of top-k {top_k} on one PE are too many; use more PEs or fewer tokens a step")]
    TooLarge {
        /// Tokens on one PE.
        tokens: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// An argument of the wrong length.
    #[error("{what} has {got} elements, expected {expected}")]
    Shape {
        /// Which argument.
        what: Cow<'static, str>,
        /// Its length.
        got: usize,
        /// What would be right.
        expected: String,
    },
    /// A peer that did not do its part in time.
    #[error(
        "PE {pe} waited {:.1} s in phase {} for {}{what}: expected at least {expected}, seen {seen}",
        waited.as_secs_f64(), phase.name(), peer.map(|p| format!("PE {p}: ")).unwrap_or_default()
    )]
    Wait {
        /// The PE that waited.
        pe: usize,
        /// The PE it waited for, where it is one.
        peer: Option<usize>,
        /// What it waited for.
        what: &'static str,
        /// What it had been doing.
        phase: Phase,
        /// The signal value that would have ended the wait.
        expected: u64,
        /// The signal value at its end.
        seen: u64,
        /// How long it waited.
        waited: Duration,
    },
    /// A PE was lost, whatever this one was waiting for.
    #[error("PE {pe} in phase {}: {lost}", phase.name())]
    Lost {
        /// The PE that noticed.
        pe: usize,
        /// What it had been doing.
        phase: Phase,
        /// The PE that was lost.
        lost: LostPe,
    },
    /// A call that this layer cannot take: what it is, and why not.
    #[error("cannot {what}: {why}")]
    Usage {
        /// The call.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// The host ended a pass.
    #[error("PE {pe} was asked to end in phase {}", phase.name())]
    Aborted {
        /// The PE.
        pe: usize,
        /// What it was doing.
        phase: Phase,
    },
    /// The device.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Device(#[from] crate::gpu::GpuError),
    /// A peer that said something impossible.
    #[error("PE {pe} sent {what}")]
    Protocol {
        /// The peer.
        pe: usize,
        /// What it sent.
        what: String,
    },
}

impl MoeError {
    /// The PE that was waited for in vain, where the error is that.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            MoeError::Wait { peer, .. } => *peer,
            MoeError::Lost { lost, .. } => Some(lost.pe),
            #[cfg(feature = "device")]
            MoeError::Device(error) => error.awaited_pe(),
            _ => None,
        }
    }

    /// Of this PE of `shmem`; `peer` by its number there.
    pub(crate) fn wait<T: Transport>(
        shmem: &Shmem<T>,
        peer: usize,
        what: &'static str,
        phase: Phase,
        timeout: WaitTimeout,
    ) -> Self {
        let WaitTimeout { expected, seen, waited, lost, .. } = timeout;
        let (pe, peer) = (shmem.world_pe(shmem.my_pe()), Some(shmem.world_pe(peer)));
        if let Some(lost) = lost {
            return MoeError::Lost { pe, phase, lost };
        }
        MoeError::Wait { pe, peer, what, phase, expected, seen, waited }
    }
}

/// A layer configuration that cannot be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigError {
    /// The field at fault.
    pub field: &'static str,
    /// What it was.
    pub value: String,
    /// What would be right.
    pub expected: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, expected {}", self.field, self.value, self.expected)
    }
}

impl std::error::Error for ConfigError {}

/// Why a [`WeightSource`](super::WeightSource) does not give a weight, in its own words: one line.
#[derive(Debug)]
pub struct WeightError(Box<dyn std::error::Error + Send + Sync>);

impl WeightError {
    /// An error, or what it says.
    pub fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> WeightError {
        WeightError(error.into())
    }

    /// The source's error.
    pub fn get(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
        &*self.0
    }
}

impl fmt::Display for WeightError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for WeightError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}
