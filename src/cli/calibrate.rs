//! `aristos calibrate`.

use std::path::PathBuf;

use anyhow::Result;

use super::compare::read;
use super::files;
use super::values::check_cores;
use crate::checkpoint::OutputFile;
use crate::simulate::{MAX_CORES, calibrate, calibrate_device, calibration_text, device_text};
use crate::stdio::{print, print_line};

/// The flags of `aristos calibrate`.
#[derive(clap::Args)]
pub struct Args {
    /// Reports of `aristos run --json` with at least 3 steps on the CPU: some with 1 PE, and some with as many PEs as cores
    #[arg(value_name = "REPORT.json", required_unless_present = "from", conflicts_with = "from")]
    reports: Vec<PathBuf>,
    /// Calibrate a device instead, by the logs that this file names (docs/simulator.md)
    #[arg(long, value_name = "LOGS.json", requires = "tile")]
    from: Option<PathBuf>,
    /// With --from: the tiles of the device's GEMMs
    #[arg(long, value_name = "ROWSxCOLUMNS", requires = "from")]
    tile: Option<String>,
    /// Output file of the constants, for `aristos simulate --calibration`
    #[arg(long, value_name = "CALIBRATION.json")]
    out: PathBuf,
    /// Cores of a host [default: this machine's]
    #[arg(long, value_name = "N", conflicts_with = "from")]
    cores: Option<usize>,
    /// Print the constants as JSON (keys: docs/simulator.md)
    #[arg(long)]
    json: bool,
}

/// Fits, writes and prints.
pub fn command(args: &Args) -> Result<bool> {
    for report in args.reports.iter().chain(&args.from) {
        files::check_distinct(&[("out", Some(&args.out))], &[("a report", Some(report.as_path()))])?;
    }
    if let (Some(from), Some(tile)) = (&args.from, &args.tile) {
        let calibration = calibrate_device(from, tile)?;
        let text = serde_json::to_string_pretty(&calibration)?;
        OutputFile::replace(&args.out, format!("{text}\n").as_bytes())?;
        match args.json {
            true => print_line(&text)?,
            false => print(&device_text(&calibration))?,
        }
        return Ok(true);
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
