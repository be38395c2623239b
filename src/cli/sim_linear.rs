//! `aristos sim linear`.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::flags::of_flags;
use crate::sim::linear::{Device, LinearLayer};
use crate::stdio::out_line;

/// What `aristos sim linear` takes.
#[derive(clap::Args)]
pub struct Args {
    /// The device: a JSON file (docs/simulator.md), or one of V100, A100-40GB, A100-80GB, H100, H200, B200
    #[arg(long, value_name = "D.json|NAME")]
    device: PathBuf,
    /// The layer, JSON: d_in, d_out, tp_in, tp_out, dp, bytewidth
    #[arg(long, value_name = "L.json")]
    layer: PathBuf,
    /// Tokens of all data-parallel replicas together
    #[arg(long, value_name = "B")]
    tokens: f64,
    /// Print JSON: fwd_bwd_s, end_of_batch_s, flop_s, global_io_s, net_io_s, bottleneck
    #[arg(long)]
    json: bool,
}

/// A device by its file, or by its name.
pub(super) fn read_device(device: &Path) -> Result<Device> {
    match device.extension().is_some() || device.exists() {
        true => Ok(Device::read(device)?),
        false => Device::preset(&device.to_string_lossy()).map_err(of_flags),
    }
}

/// Computes, and prints.
pub fn command(args: &Args) -> Result<bool> {
    let device = read_device(&args.device)?;
    let layer = LinearLayer::read(&args.layer)?;
    let time = layer.time(&device, args.tokens).map_err(of_flags)?;
    if args.json {
        out_line!("{}", serde_json::to_string(&time)?);
        return Ok(true);
    }
    let bottleneck = serde_json::to_value(time.bottleneck)?;
    out_line!("{}, {} tokens: bound by {}", device.name, args.tokens, bottleneck.as_str().unwrap_or_default());
    for (what, seconds) in [
        ("forward and backward", time.fwd_bwd_s),
        ("  FLOP", time.flop_s),
        ("  global memory", time.global_io_s),
        ("  network", time.net_io_s),
        ("all-reduce at the end of a batch", time.end_of_batch_s),
    ] {
        out_line!("{what:34} {:12.3} us", seconds * 1e6);
    }
    Ok(true)
}
