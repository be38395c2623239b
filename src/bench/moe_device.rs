//! `aristos bench moe` on a device: the layer, pipelined and bulk, forward and backward.
//!
//! As on the CPU, each iteration runs every measurement once after a barrier, in an order that rotates by one. The time is measured by the device,
//! from the start of the first kernel to the end of the last. Bulk runs the same work piece by piece with barriers between all PEs: the ratio of the
//! two is the gain of overlap.

use anyhow::Result;

use super::moe_steps::measure;
#[cfg(feature = "cuda")]
use crate::gpu::DeviceLimits;
use crate::job::device::with_device;
#[cfg(feature = "cuda")]
use crate::job::heap;
use crate::job::host::SymmetricRuntime;
use crate::job::request::MoeBench;
use crate::moe::Dtype;
#[cfg(feature = "cuda")]
use crate::moe::device::symmetric_bytes;
use crate::moe::device::{DeviceLayer, DeviceOptions};
use crate::moe::synthetic::Synthetic;

/// Runs a PE's part: measures, and sends a [`PeSamples`](super::moe_samples::PeSamples) for each element type.
///
/// # Errors
/// A missing device, a layer that it cannot run, or an error of the launcher or the protocol.
pub fn run(bench: &MoeBench, host: &mut impl SymmetricRuntime) -> Result<()> {
    let source = Synthetic::new(bench.layer.clone())?;
    let on_device = on_device(bench);
    let spec = bench.spec(&source, Dtype::Bf16);
    with_device(None, (bench.device, bench.symmetric), &spec, &on_device, host, |gpu, host| {
        for (part, &dtype) in bench.dtypes.iter().enumerate() {
            let mut layer = DeviceLayer::new(gpu, spec.clone().dtype(dtype), &source, &on_device)?;
            // A device has no measurement of bare GEMMs.
            let no_gemms = |_: &[u64]| |_: &DeviceLayer<'_>, _| ();
            let samples = measure(bench, &source, &mut layer, host, part, gpu.name(), no_gemms)?;
            layer.free()?;
            host.send(&serde_json::to_vec(&samples)?)?;
        }
        Ok(())
    })
}

fn on_device(bench: &MoeBench) -> DeviceOptions {
    DeviceOptions { path: bench.gemm, tile: bench.tile, lane_stores: bench.lane_stores, ..DeviceOptions::default() }
}

/// The environment variable with the size of a heap that does not grow, for this benchmark's PEs.
///
/// # Errors
/// As [`heap::variable`].
#[cfg(feature = "cuda")]
pub fn heap_variable(bench: &MoeBench) -> Result<Option<(String, String)>> {
    let spec = bench.spec(&Synthetic::new(bench.layer.clone())?, Dtype::Bf16);
    let bytes = |limits: &DeviceLimits, all_reachable| symmetric_bytes(&spec, &on_device(bench), limits, all_reachable);
    Ok(heap::variable(bench.pes, bench.symmetric, bytes)?)
}
