//! `aristos calibrate`.

use std::path::PathBuf;

use anyhow::Result;

use super::compare::read;
use super::files;
use super::values::check_cores;
use crate::checkpoint::OutputFile;
use crate::simulate::{CORES_MOST, calibrate};
use crate::stdio::{out_line, print_line};

/// What `aristos calibrate` takes.
#[derive(clap::Args)]
pub struct Args {
    /// What `aristos run --json` printed, of at least 3 steps on the CPU: some of 1 PE, and some of as many as there are cores
    #[arg(value_name = "REPORT.json", required = true)]
    reports: Vec<PathBuf>,
    /// Where to write the constants, for `aristos simulate --calibration`
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
    let here = || std::thread::available_parallelism().map_or(1, usize::from).min(CORES_MOST);
    let cores = args.cores.unwrap_or_else(here);
    let reports = args.reports.iter().map(|path| Ok((path.display().to_string(), read(path)?)));
    let calibration = calibrate(&reports.collect::<Result<Vec<_>>>()?, cores)?;
    let text = serde_json::to_string_pretty(&calibration)?;
    OutputFile::replace(&args.out, format!("{text}\n").as_bytes())?;
    if args.json {
        print_line(&text)?;
        return Ok(true);
    }
    out_line!(
        "{}: {} reports, {}, {cores} cores, {:.3} times as long with all of them busy",
        args.out.display(),
        calibration.fitted_to.len(),
        calibration.dtype,
        calibration.busy_factor
    );
    out_line!("{:20} {:>9} {:>9}", "off the runs, 1 PE", "median", "worst");
    for (phase, residual) in &calibration.residuals {
        out_line!("{phase:20} {:8.1}% {:8.1}%", residual.median * 100.0, residual.worst * 100.0);
    }
    Ok(true)
}
