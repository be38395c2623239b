//! `aristos compare`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::shared::show;
use crate::cluster::{parse_json, read_text};
use crate::simulate::{compare, comparison_text};

/// The flags of `aristos compare`.
#[derive(clap::Args)]
pub struct Args {
    /// Report of `aristos run --json`
    #[arg(value_name = "REPORT.json")]
    report: PathBuf,
    /// Result of `aristos simulate --json` for the same layer, tokens and PEs
    #[arg(value_name = "SIMULATED.json")]
    simulated: PathBuf,
    /// Print JSON: rows, with what, predicted_s, measured_s and error
    #[arg(long)]
    json: bool,
}

/// Compares, and prints.
pub fn command(args: &Args) -> Result<bool> {
    let report = read(&args.report)?;
    let comparison = compare(&report, &read(&args.simulated)?).map_err(|error| error.in_file(&args.report))?;
    show(args.json, &comparison, || comparison_text(&comparison))?;
    Ok(true)
}

/// Reads a report.
pub(super) fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    parse_json(&read_text(path)?).with_context(|| path.display().to_string())
}
