//! Errors of a job, and of a PE's part in the job.

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
    /// An error of the job's processes.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The request cannot be encoded or decoded.
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
    /// A PE wrote to a file that the job does not have.
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
    /// An error of symmetric memory.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// An error of the layer or of its device.
    #[error(transparent)]
    Layer(#[from] MoeError),
    /// This build does not support the kind of device.
    #[error("this build cannot run a layer on a device of kind {device:?}")]
    NoDevice {
        /// The device.
        device: DeviceKind,
    },
    /// NVSHMEM's heap has a fixed size, which is smaller than the job needs.
    #[error(
        "NVSHMEM_SYMMETRIC_SIZE is {value}, and each of this job's PEs needs {needed} bytes of a heap that does not grow \
         (NVSHMEM_DISABLE_CUDA_VMM is set): set it to {enough} or more, or leave it unset, and it is made as large as needed"
    )]
    SmallHeap {
        /// The value of the variable.
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
    /// The PEs do not agree on the job, or one of them did not respond or failed.
    #[error("{0}")]
    Peers(String),
}

impl JobError {
    /// The PE for which this PE waited, if a wait failed.
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
    /// The error as one line.
    pub line: String,
    /// The PE that a failed wait was for. If several PEs report one, the supervisor prints the first report whose awaited PE has not reported one.
    pub awaited: Option<usize>,
}

impl From<JobError> for PeFailure {
    fn from(error: JobError) -> Self {
        PeFailure { line: error.to_string(), awaited: error.awaited_pe() }
    }
}
