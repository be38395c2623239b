//! What can be wrong with a checkpoint, an input file or a result file.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use crate::moe::ConfigError;

/// A file that cannot be used, as one line: the file, the field or tensor, what is there and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system refused, or would.
    #[error("cannot {what}: {reason}")]
    System {
        /// What was attempted, with the file.
        what: String,
        /// Why it cannot be.
        reason: String,
    },
    /// A file that is not what it should be as a whole.
    #[error("{} {what}", .file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What it is, such as `is truncated: ...`.
        what: String,
    },
    /// A part of a file that is not what it should be.
    #[error("{}: {what}", .file.display())]
    Part {
        /// The file.
        file: PathBuf,
        /// Which part, and what it is.
        what: String,
    },
    /// A field of `config.json` with a value that is not allowed.
    #[error("{}: {field} {found}, expected {expected}", .file.display())]
    Field {
        /// The file.
        file: PathBuf,
        /// The field.
        field: String,
        /// What is there, such as `is "rope"`.
        found: String,
        /// What is right.
        expected: String,
    },
    /// Fields of `config.json` that make no layer.
    #[error("{}: {error}", .file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        error: ConfigError,
    },
    /// A tensor that is not there.
    #[error("{}: no tensor {tensor}", .file.display())]
    NoTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A weight's tensor that is not there, in a checkpoint of a known layout.
    #[error("{}: no tensor {tensor}, expected in this layout ({layout}); {nearest}", .file.display())]
    NoWeight {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The family and how its experts lie on disk, as recognised.
        layout: String,
        /// The nearest name that is there, in words.
        nearest: String,
    },
    /// A tensor of another shape or type, or with a number that is not allowed.
    #[error("{}: tensor {tensor} {found}, expected {expected}", .file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What it is, such as `has shape [2, 3]`.
        found: String,
        /// What is right.
        expected: String,
    },
    /// A file of a checkpoint in several that cannot be used.
    #[error("{error} (a shard in {index})")]
    Shard {
        /// What is wrong with it.
        error: Box<FileError>,
        /// The file that names it.
        index: &'static str,
    },
    /// Tensors that make no result file.
    #[error("result tensor {tensor}{what}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
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
