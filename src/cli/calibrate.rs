//! `aristos calibrate`.

use std::path::PathBuf;

use anyhow::Result;

use super::compare::read;
use super::files;
use super::values::check_cores;
use crate::checkpoint::OutputFile;
use crate::simulate::{MAX_CORES, calibrate, calibration_text};
use crate::stdio::{print, print_line};

/// The flags of `aristos calibrate`.
#[derive(clap::Args)]
pub struct Args {
    /// Reports of `aristos run --json` with at least 3 steps on the CPU: some with 1 PE, and some with as many PEs as cores
    #[arg(value_name = "REPORT.json", required = true)]
    reports: Vec<PathBuf>,
    /// Output file of the constants, for `aristos simulate --calibration`
    #[arg(long, value_name = "CALIBRATION.json")]
    out: PathBuf,
    /// Cores of a host [default: this machine's]
    #[arg(long, value_name = "N")]
    cores: Option<usize>,
    /// Print the constants as JSON (keys: docs/simulator.md)
    #[arg(long)]
    json: bool,
}

/// Fits, writes and prints.
pub fn command(args: &Args) -> Result<bool> {
    for report in &args.reports {
        files::check_distinct(&[("out", Some(&args.out))], &[("a report", Some(report.as_path()))])?;
    }
    check_cores(args.cores)?;
    let here = || std::thread::available_parallelism().map_or(1, usize::from).min(MAX_CORES);
    let cores = args.cores.unwrap_or_else(here);
    let reports = args.reports.iter().map(|path| Ok((path.display().to_string(), read(path)?)));
    let calibration = calibrate(&reports.collect::<Result<Vec<_>>>()?, cores)?;
    let text = serde_json::to_string_pretty(&calibration)?;
    OutputFile::replace(&args.out, format!("{text}\n").as_bytes())?;
    match args.json {
        true => print_line(&text)?,
        false => print(&calibration_text(&args.out.display().to_string(), &calibration, cores))?,
    }
    Ok(true)
}
