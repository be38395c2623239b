//! One PE's part of a run on a device.

use anyhow::Result;

use super::PreparedRun;
use super::pe_results as pe;
use super::steps::{Progress, Steps};
use crate::gpu::Gpu;
use crate::job::device::with_device;
use crate::job::host::{Host, MemoryHost};
use crate::moe::LayerSpec;
use crate::moe::device::{DeviceLayer, DeviceOptions, RecordedLayer};
use crate::report::{PeReport, SymmetricMemory};

/// Runs this PE's part and does not return before all is reported.
pub(super) fn run(job: &mut PreparedRun, host: &mut impl MemoryHost) -> Result<()> {
    let open = job.open_device.take();
    let job: &PreparedRun = job;
    let spec = job.layer_spec(job.groups.place(host.my_pe()).0);
    with_device(open, (job.request.device, job.request.symmetric), &spec, &on_device(job), host, |gpu, host| {
        run_on(job, spec.clone(), host, gpu)
    })
}

fn on_device(job: &PreparedRun) -> DeviceOptions {
    DeviceOptions {
        path: job.request.gemm,
        tile: job.request.tile,
        lane_stores: job.request.lane_stores,
        groups: Some(job.groups.clone()),
        hosts: job.world_hosts(),
    }
}

fn run_on(job: &PreparedRun, spec: LayerSpec, context: &dyn Host, gpu: &dyn Gpu) -> Result<()> {
    let me = context.my_pe();
    let mut layer = DeviceLayer::new(gpu, spec, job, &on_device(job))?;
    let (weights, pass) = layer.device_bytes();
    let symmetric = layer.symmetric_bytes();
    tracing::debug!(pe = me, weights, pass, symmetric, "the layer is on the device");
    let mut report = PeReport {
        pe: me,
        device: gpu.name(),
        transport: job.request.symmetric.name().into(),
        gemm: Some(layer.path().name().to_string()),
        tile: Some(layer.tile().to_string()),
        symmetric: SymmetricMemory {
            used_bytes: symmetric,
            peak_bytes: symmetric,
            budget_bytes: gpu.limits()?.symmetric_total.max(symmetric),
        },
        ..PeReport::default()
    };
    let passes = Some([pe::DEVICE_FORWARD, pe::DEVICE_BACKWARD]);
    // A plan on a device is never made anew.
    let alone = |mine: &[u64]| Ok(mine.to_vec());
    let mut progress = Progress::default();
    let steps = Steps { job, host: context, passes, settle: &|| Ok(()), gather: &alone, progress: &mut progress };
    let results = match job.request.graph {
        true => steps.run(&mut RecordedLayer::new(&mut layer)?, &mut report)?,
        false => steps.run(&mut layer, &mut report)?,
    };
    // Before anything is written: PE 0 takes what others write when its own part is over, and the end of the memory waits for all.
    layer.free()?;
    pe::report_and_write(job, context, report, &results)
}
