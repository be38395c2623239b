//! Standard output and standard error. All writes go through this module: an error on standard output is reported, and a full or closed stream
//! never causes a panic.

use std::error::Error;
use std::io::{self, ErrorKind, Write};

/// The exit code when the reader has closed the pipe (`| head`): the shell's code for SIGPIPE.
pub const READER_GONE: u8 = 128 + signal_hook::consts::SIGPIPE as u8;

/// An error of standard output.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// The reader has closed the pipe. The command ends without a message.
    #[error("standard output is closed")]
    ReaderGone,
    /// The write failed, for example on a full disk.
    #[error("cannot write to standard output: {0}")]
    Refused(io::Error),
}

/// Writes `text`, including its newline, to standard output and flushes it.
///
/// # Errors
/// A closed pipe or a failed write.
pub fn print(text: &str) -> Result<(), OutputError> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => OutputError::ReaderGone,
        _ => OutputError::Refused(error),
    })
}

/// `println!` for functions that return a `Result`: a failed write is returned.
#[cfg(feature = "command")]
macro_rules! out_line {
    ($($what:tt)*) => {
        $crate::stdio::print_line(&format!($($what)*))?
    };
}
#[cfg(feature = "command")]
pub(crate) use out_line;

/// Writes `text` and a newline to standard output.
///
/// # Errors
/// As [`print()`].
pub fn print_line(text: &str) -> Result<(), OutputError> {
    print(&format!("{}\n", text.trim_end()))
}

/// Maximum characters of a line. A longer line loses its middle.
const LINE_CHARS: usize = 1000;

/// Writes a line to standard error. Write errors are ignored.
pub fn say(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// An error with its causes, except those that its text contains.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    line
}

/// A message, perhaps with file names or a PE's text in it, as one line of bounded length without control characters.
pub fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split(|c: char| c.is_control()).filter(|part| !part.is_empty()).collect();
    let line = words.join(" ");
    let chars = line.chars().count();
    if chars <= LINE_CHARS {
        return line;
    }
    // Either end may state the problem.
    const CUT: &str = " ... ";
    let half = (LINE_CHARS - CUT.len()) / 2;
    let (head, tail) = (line.chars().take(half), line.chars().skip(chars - half));
    head.chain(CUT.chars()).chain(tail).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_is_printed_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot {what}: {source}")]
        struct Says {
            what: &'static str,
            source: io::Error,
        }
        #[derive(Debug, thiserror::Error)]
        #[error("cannot go on")]
        struct SaysNothing(#[source] Says);
        let error = Says { what: "look", source: io::Error::from_raw_os_error(24) };
        assert_eq!(with_causes(&error), "cannot look: Too many open files (os error 24)");
        assert_eq!(with_causes(&SaysNothing(error)), "cannot go on: cannot look: Too many open files (os error 24)");
    }

    #[test]
    fn long_line_keeps_both_ends() {
        assert_eq!(one_line("a\nb\t\x1b[1mc"), "a b [1mc");
        let line = one_line(&format!("begin {} end", "x".repeat(5000)));
        assert!(line.starts_with("begin x") && line.contains("x ... x") && line.ends_with("x end"), "{line}");
        assert_eq!(line.chars().count(), 2 * ((LINE_CHARS - 5) / 2) + 5);
    }
}
