//! Errors of PEs that are connected over TCP.

use std::io;
use std::time::Duration;

use crate::{LostPe, ShmemError};

/// Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The PEs did not connect.
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
    /// A PE did not take part in a collective operation in time.
    #[error("waited {} s for {what} of PE {pe}", .limit.as_secs_f64())]
    Late {
        /// The PE.
        pe: usize,
        /// Its missing part.
        what: &'static str,
        /// The limit of the wait.
        limit: Duration,
    },
}

impl TcpError {
    /// The PE that caused it, if one did.
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
