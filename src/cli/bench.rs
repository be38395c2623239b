//! `aristos bench`.

use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::launch::PeContext;

/// What `aristos bench` takes.
#[derive(clap::Args)]
pub struct Args {}

/// The supervisor's part.
pub fn supervise(_: &Args, _: Vec<OsString>) -> Result<bool> {
    bail!("nothing to measure yet")
}

/// A PE's part.
pub fn pe(_: &Args, _: &mut PeContext) -> Result<()> {
    bail!("nothing to measure yet")
}
