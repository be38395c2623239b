//! `aristos doctor`.

use anyhow::Result;

use super::flags::as_flags;
use crate::doctor::{Facts, cpu_runs, examine, render, to_json};
use crate::stdio::print;

/// What `aristos doctor` takes.
#[derive(clap::Args)]
pub struct Args {
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the findings; `false` when something is missing that a run on the CPU needs.
pub fn command(args: &Args) -> Result<bool> {
    let findings = examine(&Facts::gather());
    let text = if args.json { format!("{:#}\n", to_json(&findings)) } else { render(&findings) };
    let text = as_flags(&text);
    print(&text)?;
    Ok(cpu_runs(&findings))
}
