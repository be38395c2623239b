//! Why there is no transport over libfabric.

use crate::ShmemError;
use crate::tcp::TcpError;

/// What went wrong. Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OfiError {
    /// A call has failed.
    #[error("libfabric, provider {provider}: {call}: {why}")]
    Fabric {
        /// The provider.
        provider: String,
        /// The call.
        call: String,
        /// What libfabric says of its error number.
        why: String,
    },
    /// No provider does.
    #[error("{0}")]
    Unfit(String),
    /// The PEs, and their heaps.
    #[error(transparent)]
    Tcp(#[from] TcpError),
}

impl From<ShmemError> for OfiError {
    fn from(error: ShmemError) -> Self {
        OfiError::Tcp(error.into())
    }
}

impl OfiError {
    /// The PE that it is about, where there is one.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            OfiError::Tcp(error) => error.awaited_pe(),
            _ => None,
        }
    }
}
