//! One PE's part of a run on a device.

use anyhow::Result;

use super::PreparedRun;
use super::hooks::Progress;
use super::pe_results::{DEVICE_BACKWARD, DEVICE_FORWARD, report_and_write};
use super::steps::Steps;
#[cfg(feature = "cuda")]
use crate::gpu::DeviceLimits;
use crate::gpu::Gpu;
use crate::job::device::with_device;
#[cfg(feature = "cuda")]
use crate::job::heap;
use crate::job::host::{Host, SymmetricRuntime};
#[cfg(feature = "cuda")]
use crate::job::request::RowsPer;
use crate::moe::LayerSpec;
#[cfg(feature = "cuda")]
use crate::moe::device::symmetric_bytes;
use crate::moe::device::{DeviceLayer, DeviceOptions, RecordedLayer};
#[cfg(feature = "cuda")]
use crate::moe::{Groups, Hosts, Placement};
use crate::report::{PeReport, SymmetricMemory};

/// Runs this PE's part on a device. Returns after the PE has sent its report.
pub(super) fn run(job: &mut PreparedRun, host: &mut impl SymmetricRuntime) -> Result<()> {
    let open = job.open_device.take();
    let job: &PreparedRun = job;
    let spec = job.layer_spec(job.groups.position(host.my_pe()).0);
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
        spare_multiprocessors: 0,
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
    let passes = Some([DEVICE_FORWARD, DEVICE_BACKWARD]);
    // Jobs on devices do not replan.
    let alone = |mine: &[u64]| Ok(mine.to_vec());
    let mut progress = Progress::default();
    let steps = Steps { job, host: context, passes, settle: &|| Ok(()), gather: &alone, progress: &mut progress };
    let results = match job.request.graph {
        true => steps.run(&mut RecordedLayer::new(&mut layer)?, &mut report)?,
        false => steps.run(&mut layer, &mut report)?,
    };
    // Free the layer before writing files. Freeing symmetric memory waits for all PEs, while PE 0 receives the other PEs' files only after
    // it has written its own part.
    layer.free()?;
    report_and_write(job, context, report, &results)
}

#[cfg(feature = "cuda")]
impl PreparedRun {
    /// For a symmetric heap that cannot grow: the environment variable that sets the heap's size for this job's PEs. Before the plan is
    /// made, the size is enough for the probe and for any plan.
    ///
    /// # Errors
    /// Returns the errors of [`heap::variable`].
    pub fn heap_variable(&self) -> Result<Option<(String, String)>> {
        let probed = self.probe_request()?;
        let symmetric = |limits: &DeviceLimits, all_reachable| {
            let of = |groups: &Groups, hosts: Hosts| {
                let spec = LayerSpec { placement: groups.placement(0).clone(), ..self.layer_spec(0) };
                let on_device = DeviceOptions { groups: Some(groups.clone()), hosts, ..on_device(self) };
                symmetric_bytes(&spec, &on_device, limits, all_reachable)
            };
            let n = self.request.pes;
            // The hosts are unknown until the PEs have joined, so try every number of PEs per host.
            let unknown = self.request.rows_per == RowsPer::Host && self.hosts.is_empty();
            let all_hosts: Vec<Hosts> = match unknown {
                true => (1..=n).map(|here| Hosts::new((0..n).map(|pe| pe / here).collect())).collect(),
                false => vec![self.world_hosts()],
            };
            let mut most = match &probed {
                Some(probe) => probe.symmetric_bytes(limits, all_reachable)?,
                None => 0,
            };
            // Groups that are not planned yet may have any size. Experts are assumed to be distributed evenly.
            let all_groups = match &probed {
                Some(_) => (1..=n).filter_map(|size| even_groups(n, size, self.config.n_experts)).collect(),
                None => vec![self.groups.clone()],
            };
            for groups in &all_groups {
                for hosts in &all_hosts {
                    most = most.max(of(groups, hosts.clone())?);
                }
            }
            Ok(most)
        };
        Ok(heap::variable(self.request.pes, self.request.symmetric, symmetric)?)
    }
}

/// Groups of `size` PEs, and one group of the remaining PEs. The experts of each group are distributed evenly.
#[cfg(feature = "cuda")]
fn even_groups(n_pes: usize, size: usize, n_experts: usize) -> Option<Groups> {
    let all: Vec<usize> = (0..n_pes).collect();
    let group = |members: &[usize]| (members.to_vec(), Placement::even(n_experts, members.len()));
    Groups::new(n_pes, all.chunks(size).map(group).collect()).ok()
}
