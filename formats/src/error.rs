//! Errors in input files and values.

use std::path::{Path, PathBuf};

/// An invalid input, as one line: the file, the place in it, the value, and the values allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// A file that cannot be read.
    #[error("cannot read {}: {reason}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// Text that is not JSON, or does not have the expected form.
    #[error("{0}")]
    Json(String),
    /// An invalid value.
    #[error("{field}{}expected {expected}", said(.found))]
    Value {
        /// Path of the value, such as `devices[3].id`.
        field: String,
        /// The value, such as `is -1`; empty if the path suffices.
        found: String,
        /// The values allowed.
        expected: String,
    },
    /// An error in a file.
    #[error("{}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error.
        error: Box<InputError>,
    },
}

impl InputError {
    /// An invalid value: its path, the value, and the values allowed.
    pub fn value<F: Into<String>, V: Into<String>, E: Into<String>>(field: F, found: V, expected: E) -> InputError {
        InputError::Value { field: field.into(), found: found.into(), expected: expected.into() }
    }

    /// Adds the file that the text was read from.
    pub fn in_file(self, path: &Path) -> InputError {
        InputError::File { path: path.to_path_buf(), error: Box::new(self) }
    }
}

fn said(found: &str) -> String {
    if found.is_empty() { ": ".to_string() } else { format!(" {found}, ") }
}
