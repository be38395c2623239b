//! Errors in input files and values.

use std::path::{Path, PathBuf};

/// An input that cannot be used, as one line: the file, the place inside it, what is there and what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// A file that cannot be read.
    #[error("cannot read {}: {reason}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A text that is not JSON, or not JSON of the form expected.
    #[error("{0}")]
    Json(String),
    /// A value that is not allowed.
    #[error("{field}{}expected {expected}", said(.found))]
    Value {
        /// Where it is, such as `devices[3].id`.
        field: String,
        /// What is there, such as `is -1`; empty where the field alone says it.
        found: String,
        /// What is right.
        expected: String,
    },
    /// Something wrong in a file.
    #[error("{}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: Box<InputError>,
    },
}

impl InputError {
    /// A value that is not allowed: where it is, what is there, what is right.
    pub fn value<F: Into<String>, V: Into<String>, E: Into<String>>(field: F, found: V, expected: E) -> InputError {
        InputError::Value { field: field.into(), found: found.into(), expected: expected.into() }
    }

    /// The same, of the text in this file.
    pub fn in_file(self, path: &Path) -> InputError {
        InputError::File { path: path.to_path_buf(), error: Box::new(self) }
    }
}

fn said(found: &str) -> String {
    if found.is_empty() { ": ".to_string() } else { format!(" {found}, ") }
}
