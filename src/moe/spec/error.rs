//! Errors of a layer.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use super::metrics::Phase;
use crate::shmem::{LostPe, Shmem, ShmemError, Transport, WaitTimeout};

/// An error of the layer, with a one-line message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoeError {
    /// Invalid configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An error of symmetric memory, such as a heap that is too small.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// Weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The (token, expert) pairs of a PE cannot be numbered in 32 bits.
    #[error("{tokens} tokens of top-k {top_k} on one PE are too many; use more PEs or fewer tokens a step")]
    TooLarge {
        /// Tokens on one PE.
        tokens: usize,
        /// Experts per token.
        top_k: usize,
    },
    /// An argument has the wrong length.
    #[error("{what} has {got} elements, expected {expected}")]
    Shape {
        /// The argument.
        what: Cow<'static, str>,
        /// Its length.
        got: usize,
        /// The expected length.
        expected: String,
    },
    /// A peer did not do its part before the deadline.
    #[error(
        "PE {pe} waited {:.1} s in phase {} for {}{what}: expected at least {expected}, seen {seen}",
        waited.as_secs_f64(), phase.name(), peer.map(|p| format!("PE {p}: ")).unwrap_or_default()
    )]
    Wait {
        /// The PE that waited.
        pe: usize,
        /// The PE for which it waited, if it waited for a single PE.
        peer: Option<usize>,
        /// The event for which it waited.
        what: &'static str,
        /// The phase before the wait.
        phase: Phase,
        /// The signal value that would have ended the wait.
        expected: u64,
        /// The signal value at the timeout.
        seen: u64,
        /// Duration of the wait.
        waited: Duration,
    },
    /// A PE was lost while this PE waited for a peer.
    #[error("PE {pe} in phase {}: {lost}", phase.name())]
    Lost {
        /// The PE that detected the loss.
        pe: usize,
        /// The phase before the wait.
        phase: Phase,
        /// The PE that was lost.
        lost: LostPe,
    },
    /// An unsupported call or invalid arguments.
    #[error("cannot {what}: {why}")]
    Usage {
        /// The call.
        what: &'static str,
        /// The reason.
        why: String,
    },
    /// The host aborted a pass.
    #[error("PE {pe} was asked to end in phase {}", phase.name())]
    Aborted {
        /// The PE.
        pe: usize,
        /// Its phase.
        phase: Phase,
    },
    /// An error of the device.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Device(#[from] crate::gpu::GpuError),
    /// A peer sent invalid data.
    #[error("PE {pe} sent {what}")]
    Protocol {
        /// The peer.
        pe: usize,
        /// The data.
        what: String,
    },
}

impl MoeError {
    /// The PE for which this PE waited, if a wait failed, or the lost PE.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            MoeError::Wait { peer, .. } => *peer,
            MoeError::Lost { lost, .. } => Some(lost.pe),
            #[cfg(feature = "device")]
            MoeError::Device(error) => error.awaited_pe(),
            _ => None,
        }
    }

    /// The error of a failed wait of this PE. `peer` is a PE number in `shmem`; the error has PE numbers of the world.
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

/// A layer configuration with an invalid field.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigError {
    /// The invalid field.
    pub field: &'static str,
    /// The field's value.
    pub value: String,
    /// The expected values.
    pub expected: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, expected {}", self.field, self.value, self.expected)
    }
}

impl std::error::Error for ConfigError {}

/// The reason why a [`WeightSource`](super::WeightSource) cannot load a weight, as one line.
#[derive(Debug)]
pub struct WeightError(Box<dyn std::error::Error + Send + Sync>);

impl WeightError {
    /// Wraps an error or a message.
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
