//! Errors of the transport over libfabric.

use crate::ShmemError;
use crate::tcp::TcpError;

/// An error. Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfiError {
    /// A call failed.
    #[error("libfabric, provider {provider}: {call}: {why}")]
    Fabric {
        /// The provider.
        provider: String,
        /// The call.
        call: String,
        /// libfabric's text for the error number.
        why: String,
    },
    /// No suitable provider.
    #[error("{0}")]
    Unsuitable(String),
    /// An error of the PEs' TCP connections or heaps.
    #[error(transparent)]
    Tcp(#[from] TcpError),
}

impl From<ShmemError> for OfiError {
    fn from(error: ShmemError) -> Self {
        OfiError::Tcp(error.into())
    }
}

impl OfiError {
    /// The PE that the error concerns, if any.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            OfiError::Tcp(error) => error.awaited_pe(),
            _ => None,
        }
    }
}
