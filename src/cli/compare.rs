//! `aristos compare`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cluster::{parse_json, read_text};
use crate::simulate::compare;
use crate::stdio::out_line;

/// What `aristos compare` takes.
#[derive(clap::Args)]
pub struct Args {
    /// What `aristos run --json` printed
    #[arg(value_name = "REPORT.json")]
    report: PathBuf,
    /// What `aristos simulate --json` printed, of the same layer, tokens and PEs
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
    if args.json {
        out_line!("{}", serde_json::to_string(&comparison)?);
        return Ok(true);
    }
    out_line!("{:26} {:>14} {:>14} {:>9}", "time, ms", "simulated", "measured", "error");
    for row in &comparison.rows {
        let error = row.error.map_or(String::new(), |error| format!("{:+.1}%", error * 100.0));
        out_line!("{:26} {:14.3} {:14.3} {error:>9}", row.what, row.predicted_s * 1e3, row.measured_s * 1e3);
    }
    Ok(true)
}

/// Reads a report.
pub(super) fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    parse_json(&read_text(path)?).with_context(|| path.display().to_string())
}
