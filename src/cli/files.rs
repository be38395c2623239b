//! Files that a command writes.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::checkpoint::{OutputFile, real_path};

/// The `--csv` file, if one is requested. An old file stays until the new one is complete.
pub type Csv = Option<OutputFile>;

/// Creates the file before anything is measured.
pub fn create(path: Option<&PathBuf>) -> Result<Csv> {
    Ok(path.map(|path| OutputFile::create_empty(path)).transpose()?)
}

/// Writes the file, if one is requested.
pub fn write(csv: Csv, content: impl AsRef<[u8]>) -> Result<()> {
    csv.map_or(Ok(()), |file| Ok(file.publish_with(content.as_ref())?))
}

/// Returns an error if a written file is also read by the same command, or written twice. Each file comes with its flag.
pub fn check_distinct(written: &[(&str, Option<&Path>)], read: &[(&str, Option<&Path>)]) -> Result<()> {
    for (at, (flag, path)) in written.iter().enumerate() {
        for (other, other_path) in read.iter().chain(&written[..at]) {
            let (Some(path), Some(other_path)) = (path, other_path) else { continue };
            let same = real_path(path) == real_path(other_path);
            ensure!(!same, "--{flag} {} is --{other} too, expected another file", path.display());
        }
    }
    Ok(())
}
