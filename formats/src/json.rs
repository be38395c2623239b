//! Reads JSON files. Each error is one line that names the file, the path inside it, the value there, and the values allowed.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};

use crate::error::InputError;

/// Bounds such that sums and products do not overflow; values in the files' units are far inside.
const LARGEST: f64 = 1e30;
const SMALLEST: f64 = 1e-30;
/// Maximum count that is exact as a floating-point number.
const LARGEST_COUNT: u64 = 1_000_000_000_000_000;

/// Maximum size of a file that is read as text. Parsed numbers take a few times as much memory.
const LARGEST_FILE_BYTES: u64 = 32 << 20;

/// The numbers that a field allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// Above 0.
    Positive,
    /// 0 or above.
    NonNegative,
}

impl Range {
    /// Checks a number.
    ///
    /// # Errors
    /// Returns `PATH is VALUE, expected ...` with the path that `path` returns.
    pub fn check(self, value: f64, path: impl FnOnce() -> String) -> Result<f64, InputError> {
        let zero = value == 0.0 && self == Range::NonNegative;
        if zero || (SMALLEST..=LARGEST).contains(&value) {
            return Ok(value);
        }
        let expected = match self {
            Range::Positive => format!("a number from {SMALLEST:e} to {LARGEST:e}"),
            Range::NonNegative => format!("0 or a number from {SMALLEST:e} to {LARGEST:e}"),
        };
        Err(InputError::value(path(), format!("is {value:?}"), expected))
    }
}

/// Reads a regular file as text. (Opening a named pipe would block.)
///
/// # Errors
/// Returns an error that names the file.
pub fn read_text(path: &Path) -> Result<String, InputError> {
    let unreadable = |reason: String| InputError::Unreadable { path: path.to_path_buf(), reason };
    let meta = std::fs::metadata(path).map_err(|error| unreadable(error.to_string()))?;
    if !meta.is_file() {
        return Err(unreadable("it is not a regular file".into()));
    }
    if meta.len() > LARGEST_FILE_BYTES {
        return Err(unreadable(format!("it has {} bytes, at most {LARGEST_FILE_BYTES} are read", meta.len())));
    }
    // Reads at most the length in the metadata: some system files have length 0 and never end.
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(meta.len()).read_to_end(&mut bytes));
    read.map_err(|error| unreadable(error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| unreadable("it is not UTF-8 text".into()))
}

/// Parses JSON.
///
/// # Errors
/// Returns an error with the path in the file, the value, the expected form, and line and column.
pub fn parse_json<T: DeserializeOwned>(text: &str) -> Result<T, InputError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = match error.path().to_string() {
            path if path == "." => String::new(),
            path => format!("{path}: "),
        };
        let inner = error.inner();
        let message = match token_at(text, inner) {
            Some(token) => format!("{path}`{token}` is not JSON: {inner}"),
            None => format!("{path}{inner}"),
        };
        // A name in a file may contain any character, but an error must be one line.
        let shown = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
        InputError::Json(message.chars().map(shown).collect())
    })?;
    json.end().map_err(|error| InputError::Json(format!("expected nothing more: {error}")))?;
    Ok(value)
}

/// The word at a syntax error, such as `NaN` or `Infinity`.
fn token_at(text: &str, error: &serde_json::Error) -> Option<String> {
    if !error.is_syntax() {
        return None;
    }
    let line = text.lines().nth(error.line().checked_sub(1)?)?.as_bytes();
    let word = |b: u8| b.is_ascii_alphanumeric() || b"+-._".contains(&b);
    let at = error.column().checked_sub(1)?.min(line.len().checked_sub(1)?);
    let start = (0..=at).rev().take_while(|&i| word(line[i])).last()?;
    let end = (at..line.len()).take_while(|&i| word(line[i])).last()? + 1;
    let token: String = line[start..end].iter().take(40).map(|&b| b as char).collect();
    Some(token)
}

/// A number in a file, whole or not; [`Range`] restricts it.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Number(pub f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        struct AnyNumber;
        impl Visitor<'_> for AnyNumber {
            type Value = Number;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number")
            }
            fn visit_f64<E: Error>(self, x: f64) -> Result<Number, E> {
                Ok(Number(x))
            }
            fn visit_u64<E: Error>(self, x: u64) -> Result<Number, E> {
                Ok(Number(x as f64))
            }
            fn visit_i64<E: Error>(self, x: i64) -> Result<Number, E> {
                Ok(Number(x as f64))
            }
        }
        deserializer.deserialize_any(AnyNumber)
    }
}

/// A whole number in a file, from 0 to 10^15; `32.0` is allowed.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Count(pub u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Count, D::Error> {
        struct WholeNumber;
        impl Visitor<'_> for WholeNumber {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a whole number from 0 to {LARGEST_COUNT}")
            }
            fn visit_u64<E: Error>(self, x: u64) -> Result<Count, E> {
                if x > LARGEST_COUNT {
                    return Err(E::invalid_value(Unexpected::Unsigned(x), &self));
                }
                Ok(Count(x))
            }
            fn visit_i64<E: Error>(self, x: i64) -> Result<Count, E> {
                u64::try_from(x).map(Count).map_err(|_| E::invalid_value(Unexpected::Signed(x), &self))
            }
            fn visit_f64<E: Error>(self, x: f64) -> Result<Count, E> {
                if x.fract() == 0.0 && (0.0..=LARGEST_COUNT as f64).contains(&x) {
                    return Ok(Count(x as u64));
                }
                Err(E::invalid_value(Unexpected::Float(x), &self))
            }
        }
        deserializer.deserialize_any(WholeNumber)
    }
}
