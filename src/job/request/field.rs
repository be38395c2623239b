//! The error of an invalid field of a request.

use std::fmt;

/// An invalid field of a request. Displays as one line. Field names are in backticks, also in `expected`, so that the command line can
/// replace them by its flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The field.
    pub field: &'static str,
    /// The field's value. If the field has several parts, the value starts with the name of the part: "is 0", "slow-pe: PE 4".
    pub value: String,
    /// The valid values.
    pub expected: String,
}

impl FieldError {
    /// The error of a field that has one value.
    pub fn new(field: &'static str, value: impl fmt::Display, expected: impl Into<String>) -> FieldError {
        FieldError { field, value: format!("is {value}"), expected: expected.into() }
    }
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}, expected {}", self.field, self.value, self.expected)
    }
}

impl std::error::Error for FieldError {}
