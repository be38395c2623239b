//! `aristos doctor`.

use anyhow::{Result, bail};

use crate::doctor::{Facts, cpu_runs, examine, render, to_json};
use crate::launch::PeContext;

/// What `aristos doctor` takes.
#[derive(clap::Args)]
pub struct Args {
    /// Print what was found as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the findings; `false` when something is missing that a run on the CPU needs.
pub fn supervise(args: &Args) -> Result<bool> {
    let findings = examine(&Facts::gather());
    if args.json {
        println!("{:#}", to_json(&findings));
    } else {
        print!("{}", render(&findings));
    }
    Ok(cpu_runs(&findings))
}

/// It starts no PEs.
pub fn pe(_: &Args, _: &mut PeContext) -> Result<()> {
    bail!("aristos doctor has no PEs")
}
