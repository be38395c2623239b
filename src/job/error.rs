//! Errors of a job, and of a PE's part in it.

use std::io;

use super::launch::LaunchError;
use super::request::{DeviceKind, RequestError};
use crate::moe::MoeError;
use crate::shmem::ShmemError;
#[cfg(feature = "mpi")]
use crate::shmem::mpi::MpiError;
#[cfg(feature = "ofi")]
use crate::shmem::ofi::OfiError;
use crate::shmem::tcp::TcpError;

/// Why a job failed. Each displays as one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// Its processes.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The request.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// A PE sent an invalid message.
    #[error("PE {pe} sent an unreadable message: {source}")]
    Message {
        /// The PE.
        pe: usize,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A PE writes to a file that the job does not have.
    #[error("there is no file for {what}")]
    NoFile {
        /// The content.
        what: String,
    },
    /// The system refused a write.
    #[error("cannot write {what}: {source}")]
    Write {
        /// The content.
        what: String,
        /// The refusal.
        source: io::Error,
    },
    /// Symmetric memory.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// The layer, or the device under it.
    #[error(transparent)]
    Layer(#[from] MoeError),
    /// This build does not support what the layer should run on.
    #[error("this build cannot run a layer on a device of kind {device:?}")]
    NoDevice {
        /// The device.
        device: DeviceKind,
    },
    /// A fixed heap of NVSHMEM that is smaller than the job needs.
    #[error(
        "NVSHMEM_SYMMETRIC_SIZE is {value}, and each of this job's PEs needs {needed} bytes of a heap that does not grow \
         (NVSHMEM_DISABLE_CUDA_VMM is set): set it to {enough} or more, or leave it unset, and it is made as large as needed"
    )]
    SmallHeap {
        /// What the variable says.
        value: String,
        /// Maximum bytes that a PE allocates in the heap at a time.
        needed: u64,
        /// A heap size that is large enough, bytes.
        enough: u64,
    },
    /// MPI.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] MpiError),
    /// TCP.
    #[error(transparent)]
    Tcp(#[from] TcpError),
    /// libfabric.
    #[cfg(feature = "ofi")]
    #[error(transparent)]
    Ofi(#[from] OfiError),
    /// The PEs are not those of the job, or one does not do its part.
    #[error("{0}")]
    Peers(String),
}

impl JobError {
    /// The PE that a failed wait was for.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            JobError::Layer(error) => error.awaited_pe(),
            JobError::Tcp(error) => error.awaited_pe(),
            #[cfg(feature = "ofi")]
            JobError::Ofi(error) => error.awaited_pe(),
            _ => None,
        }
    }

    /// The exit code for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            JobError::Launch(error) => error.exit_code(),
            _ => 1,
        }
    }
}

/// How a PE's part failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeFailure {
    /// One line.
    pub line: String,
    /// The PE that a failed wait was for. If several PEs report one, the supervisor prints the first report whose awaited PE has not reported one.
    pub awaited: Option<usize>,
}

impl From<JobError> for PeFailure {
    fn from(error: JobError) -> Self {
        PeFailure { line: error.to_string(), awaited: error.awaited_pe() }
    }
}
