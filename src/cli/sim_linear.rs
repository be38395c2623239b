//! `aristos sim linear`.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::flags::of_flags;
use super::shared::show;
use crate::report::linear_text;
use crate::sim::linear::{Device, LinearLayer};

/// The flags of `aristos sim linear`.
#[derive(clap::Args)]
pub struct Args {
    /// The device: a JSON file (docs/simulator.md), or one of V100, A100-40GB, A100-80GB, H100, H200, B200
    #[arg(long, alias = "device", value_name = "D.json|NAME")]
    roofline: PathBuf,
    /// The layer, JSON: d_in, d_out, tp_in, tp_out, dp, bytewidth
    #[arg(long, alias = "layer", value_name = "L.json")]
    shape: PathBuf,
    /// Tokens of all data-parallel replicas together
    #[arg(long, value_name = "B")]
    tokens: f64,
    /// Print JSON: fwd_bwd_s, end_of_batch_s, flop_s, global_io_s, net_io_s, bottleneck
    #[arg(long)]
    json: bool,
}

/// A device by file or name.
pub(super) fn read_device(device: &Path) -> Result<Device> {
    match device.extension().is_some() || device.exists() {
        true => Ok(Device::read(device)?),
        false => Device::preset(&device.to_string_lossy()).map_err(of_flags),
    }
}

/// Computes the time and prints it.
pub fn command(args: &Args) -> Result<bool> {
    let device = read_device(&args.roofline)?;
    let layer = LinearLayer::read(&args.shape)?;
    let time = layer.time(&device, args.tokens).map_err(of_flags)?;
    show(args.json, &time, || linear_text(&device.name, args.tokens, &time))?;
    Ok(true)
}
