//! Errors of checkpoints, input files and result files.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use crate::moe::ConfigError;

/// A file that cannot be used. The one-line message names the file, the field or tensor, its value and the expected
/// value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A system call failed, or would fail.
    #[error("cannot {what}: {reason}")]
    System {
        /// The attempted operation, with the file.
        what: String,
        /// Why it cannot be.
        reason: String,
    },
    /// A file that is malformed as a whole.
    #[error("{} {what}", .file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The fault, such as `is truncated: ...`.
        what: String,
    },
    /// A malformed part of a file.
    #[error("{}: {what}", .file.display())]
    Part {
        /// The file.
        file: PathBuf,
        /// The part, and its fault.
        what: String,
    },
    /// A field of `config.json` with an unsupported value.
    #[error("{}: {field} {found}, expected {expected}", .file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// The field.
        field: String,
        /// The value found, such as `is "rope"`.
        found: String,
        /// The supported values.
        expected: String,
    },
    /// The fields of `config.json` do not describe a valid layer.
    #[error("{}: {error}", .file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// The fault.
        error: ConfigError,
    },
    /// A missing tensor.
    #[error("{}: no tensor {tensor}", .file.display())]
    NoTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A missing tensor of a weight, in a checkpoint whose layout was recognised.
    #[error("{}: no tensor {tensor}, expected in this layout ({layout}); {nearest}", .file.display())]
    NoWeight {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The recognised family, and the storage of its experts.
        layout: String,
        /// A phrase with the nearest existing name.
        nearest: String,
    },
    /// A tensor with an unsupported shape, type or value.
    #[error("{}: tensor {tensor} {found}, expected {expected}", .file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The fault, such as `has shape [2, 3]`.
        found: String,
        /// The expected shape, type or values.
        expected: String,
    },
    /// A shard that cannot be used.
    #[error("{error} (a shard in {index})")]
    Shard {
        /// The shard's error.
        error: Box<FileError>,
        /// The file that lists it.
        index: &'static str,
    },
    /// Tensors that cannot form a result file.
    #[error("result tensor {tensor}{what}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// The fault.
        what: String,
    },
}

impl FileError {
    pub(super) fn system(what: impl Into<String>, reason: impl Display) -> FileError {
        FileError::System { what: what.into(), reason: reason.to_string() }
    }

    pub(super) fn read(path: &Path, reason: impl Display) -> FileError {
        FileError::system(format!("read {}", path.display()), reason)
    }

    pub(super) fn write(path: &Path, reason: impl Display) -> FileError {
        FileError::system(format!("write {}", path.display()), reason)
    }

    pub(super) fn malformed(file: &Path, what: impl Into<String>) -> FileError {
        FileError::Malformed { file: file.to_path_buf(), what: what.into() }
    }

    pub(super) fn part(file: &Path, what: impl Into<String>) -> FileError {
        FileError::Part { file: file.to_path_buf(), what: what.into() }
    }

    pub(super) fn no_tensor(file: &Path, tensor: &str) -> FileError {
        FileError::NoTensor { file: file.to_path_buf(), tensor: tensor.to_string() }
    }
}
