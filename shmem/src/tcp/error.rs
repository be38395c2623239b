//! Why PEs do not come together over TCP, or not to an end.

use std::io;
use std::time::Duration;

use crate::{LostPe, ShmemError};

/// What went wrong. Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The PEs did not meet.
    #[error("cannot meet the other PEs: {0}")]
    Meeting(String),
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System {
        /// What was attempted.
        what: String,
        /// The refusal.
        source: io::Error,
    },
    /// Symmetric memory.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// A PE is lost.
    #[error(transparent)]
    Lost(#[from] LostPe),
    /// A PE did not do in time what all do together.
    #[error("waited {} s for {what} of PE {pe}", .limit.as_secs_f64())]
    Late {
        /// The PE.
        pe: usize,
        /// What did not come.
        what: &'static str,
        /// How long it was waited for.
        limit: Duration,
    },
}

impl TcpError {
    /// The PE that it is about, where there is one.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            TcpError::Lost(lost) => Some(lost.pe),
            TcpError::Late { pe, .. } => Some(*pe),
            _ => None,
        }
    }

    pub(crate) fn system(what: impl Into<String>, source: impl Into<io::Error>) -> TcpError {
        TcpError::System { what: what.into(), source: source.into() }
    }
}
