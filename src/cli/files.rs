//! Files of measurements that a command writes.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// A file of measurements that was asked for, open.
pub type Csv<'p> = Option<(&'p PathBuf, File)>;

/// The file that raw samples go to, made before anything is measured.
pub fn create(path: Option<&PathBuf>) -> Result<Csv<'_>> {
    path.map(|path| {
        let named = || format!("cannot create {}", path.display());
        File::create(path).with_context(named).map(|file| (path, file))
    })
    .transpose()
}

/// Writes it, where it was asked for.
pub fn write(csv: Csv<'_>, text: &str) -> Result<()> {
    let Some((path, mut file)) = csv else { return Ok(()) };
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}
