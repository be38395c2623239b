//! `aristos doctor`.

use anyhow::Result;

use super::flags::as_flags;
use crate::doctor::{Facts, cpu_runs, examine, render, to_json};
use crate::stdio::print;

/// The flags of `aristos doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the findings. Returns `false` if a requirement of runs on the CPU is missing.
pub fn command(args: &Args) -> Result<bool> {
    let findings = examine(&Facts::gather());
    let text = if args.json { format!("{:#}\n", to_json(&findings)) } else { render(&findings) };
    let text = as_flags(&text);
    print(&text)?;
    Ok(cpu_runs(&findings))
}
