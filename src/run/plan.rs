//! Runs with a plan, which gives the expert-parallel groups and the placement of experts. The plan is made for the job's PEs or read from a
//! file.

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::PreparedRun;
use super::probe::PROBE_PHASES;
use crate::cluster::{Cluster, Probe, parse_json, read_text};
use crate::job::launch::Processes;
use crate::job::messages::collect;
#[cfg(feature = "cuda")]
use crate::job::request::DeviceKind;
use crate::job::request::{PlanSource, ProbeRequest, ProbedExpert, Request};
use crate::moe::placement::Split;
use crate::moe::{Groups, Placement};
use crate::plan::{self, Batch, Infeasible, Objective, Outcome, Plan, PlannedGroup, PlannedReplicas, Workload};
use crate::probe::ProbeOptions;
use crate::report::{PlanReport, PlanTimes, PlannedPes, RunReport};

impl PreparedRun {
    /// The planner's workload: a model with this layer only, and the same number of tokens on every PE.
    pub fn workload(&self) -> Workload {
        let pes = self.request.pes;
        let mut batch = Batch::new(self.tokens as f64 / pes as f64, self.request.dtype.bytes());
        batch.devices = Some(pes);
        batch.backward = self.backward;
        self.config.model((1, 1)).workload(&batch)
    }

    /// Makes or reads the requested plan and adopts its groups. For `--plan auto`, `probe` measures the job's PEs.
    ///
    /// # Errors
    /// Returns an error if the probe fails, the memory does not suffice for the experts, or the file has no plan for this run.
    pub(super) fn make_plan(&mut self, probe: impl FnOnce(&PreparedRun) -> Result<Cluster>) -> Result<()> {
        let (plan, source) = match self.request.plan.clone() {
            None | Some(PlanSource::Made(_)) => return Ok(()),
            Some(PlanSource::File(path)) => {
                let read = || parse_plan(&read_text(&path)?);
                let plan = read().with_context(|| path.display().to_string())?;
                self.groups = self.groups_of(&plan).with_context(|| path.display().to_string())?;
                (plan, path.display().to_string())
            }
            Some(PlanSource::Auto { replicas, .. }) => {
                let cluster = probe(self)?;
                for (from, to, residual) in cluster.probe.iter().flat_map(|probe| probe.wild_links(Probe::USABLE)) {
                    let percent = 100.0 * residual;
                    tracing::info!(
                        "`plan` auto: the times of the link from PE {from} to PE {to} are {percent:.0}% off a latency and a rate"
                    );
                }
                let options = replicas.map_or_else(plan::Options::default, |of| plan::Options::default().replicas(of));
                let plan = match plan::plan(&cluster, &self.workload(), options)? {
                    Outcome::Plan(plan) => plan,
                    Outcome::Infeasible(Infeasible { shortage, .. }) => bail!("`plan` auto: no plan: {shortage}"),
                };
                self.groups = self.groups_of(&plan).context("`plan` auto")?;
                if let Some(replan) = &mut self.request.replan {
                    replan.cluster = cluster.to_json();
                }
                (plan, "auto".to_string())
            }
        };
        for (g, group) in plan.groups.iter().enumerate() {
            tracing::info!(group = g, pes = ?group.devices, experts = ?group.experts, "planned");
        }
        if let Some(why) = self.not_predicted(&plan) {
            tracing::info!("plan {source}: {why}; its prediction is not compared");
        }
        self.plan_source = Some(source);
        // The PEs receive the plan itself, so that they neither probe nor read the file.
        self.request.plan = Some(PlanSource::Made(Box::new(plan)));
        Ok(())
    }

    /// Adopts the plan of a file. Does nothing if the request has no plan file, as with `--plan auto`.
    ///
    /// # Errors
    /// Returns an error if the file has no plan for this run.
    #[cfg(feature = "cuda")]
    pub fn read_plan(&mut self) -> Result<()> {
        match &self.request.plan {
            Some(PlanSource::File(_)) => self.make_plan(|_| bail!("nothing is to be probed")),
            _ => Ok(()),
        }
    }

    /// The request of the probe that `--plan auto` needs; `None` for other plans.
    ///
    /// # Errors
    /// Returns an error if the layer's experts cannot be probed.
    pub(super) fn probe_request(&self) -> Result<Option<ProbeRequest>> {
        let Some(PlanSource::Auto { memory_mb, .. }) = &self.request.plan else { return Ok(None) };
        let expert = ProbedExpert {
            hidden: self.config.hidden,
            intermediate: self.config.expert.intermediate,
            gated: self.config.expert.gated,
            dtype: self.request.dtype,
            training: self.backward,
        };
        expert.check(self.request.device)?;
        let mut options = ProbeOptions::quick();
        options.wait_limit = self.wait_limit();
        let (pes, memory_mb, memory_source) = (self.request.pes, memory_mb.clone(), "given".to_string());
        Ok(Some(ProbeRequest {
            pes,
            device: self.request.device,
            #[cfg(feature = "device")]
            gemm: self.request.gemm,
            expert,
            options,
            memory_mb,
            memory_source,
        }))
    }

    /// Starts processes for a probe with as many PEs as the job, and returns the measured cluster.
    pub(super) fn probe(&self) -> Result<Cluster> {
        let request = self.probe_request()?.context("nothing is to be probed")?;
        tracing::info!(pes = request.pes, "probing");
        #[cfg(feature = "cuda")]
        let environment = match request.device {
            DeviceKind::Cuda => {
                crate::gpu::cuda::check_times(request.pes).context("`plan` auto")?;
                let mut all = crate::gpu::cuda::pe_environment(request.pes, crate::gpu::SymmetricBy::Nvshmem)?;
                all.extend(request.heap_variable()?);
                all
            }
            _ => Vec::new(),
        };
        let mut processes = Processes::new(request.pes, Request::Probe(request).to_bytes()?, &PROBE_PHASES);
        #[cfg(feature = "cuda")]
        processes.env.extend(environment);
        processes.set_wait_limit(self.wait_limit());
        let mut sent = None;
        collect::<String>(processes, |_, text| sent = Some(text), |_| (), |_, _| ())
            .context("`plan` auto: the probe failed")?;
        let text = &sent.context("`plan` auto: no PE sent its measurements")?;
        Ok(Cluster::from_json(text)?)
    }

    /// The groups of a plan, device `i` being PE `i`.
    pub(super) fn groups_of(&self, plan: &Plan) -> Result<Groups> {
        let pe = |id: u64| usize::try_from(id).ok().filter(|&pe| pe < self.request.pes);
        groups_of(plan, self.request.pes, self.config.n_experts, pe)
    }

    /// Compares the plan's prediction with the measurement; `None` without a plan.
    pub(super) fn plan_report(&self, report: &RunReport) -> Option<PlanReport> {
        let (Some(PlanSource::Made(plan)), Some(source)) = (&self.request.plan, &self.plan_source) else { return None };
        let terms = plan.terms;
        let predicted = PlanTimes {
            step_s: plan.objective_ms * 1e-3,
            compute_s: terms.gamma * terms.compute_ms * 1e-3,
            communication_s: terms.gamma * terms.communication_ms * 1e-3,
            all_reduce_s: terms.all_reduce_ms * 1e-3,
        };
        let not_predicted = self.not_predicted(plan);
        let passes: Vec<_> = std::iter::once(&report.forward).chain(&report.backward).collect();
        let of = |phases: &[&str]| -> f64 {
            let phase =
                |key: &&str| passes.iter().filter_map(|pass| pass.phases.get(*key)).map(|s| s.max_s).sum::<f64>();
            phases.iter().map(phase).sum()
        };
        Some(PlanReport {
            source: source.clone(),
            algorithm: plan.algorithm.clone(),
            objective_s: plan.objective_ms * 1e-3,
            groups: (0..self.groups.len())
                .map(|g| PlannedPes {
                    pes: self.groups.members(g).to_vec(),
                    experts: self.groups.members(g).iter().map(|&pe| self.groups.experts(pe).to_vec()).collect(),
                })
                .collect(),
            predicted: not_predicted.is_none().then_some(predicted),
            not_predicted,
            replanned: Vec::new(),
            measured: PlanTimes {
                step_s: report.step_s,
                compute_s: of(&["expert_gemm"]),
                communication_s: of(&["dispatch", "combine", "waiting"]),
                all_reduce_s: of(&["other"]),
            },
        })
    }
}

impl PreparedRun {
    /// The reason why the plan's objective is no prediction of this run's time; `None` if it is a prediction.
    fn not_predicted(&self, plan: &Plan) -> Option<String> {
        if plan.objective != Objective::Placed {
            return Some("the plan minimises the published objective, which is no time of a step".into());
        }
        let Some(workload) = &plan.workload else {
            return Some("the plan does not say what workload it was made for".into());
        };
        let difference = workload.difference(&self.workload(), self.request.pes)?;
        Some(format!("the plan was made for another workload than this run: its {difference}"))
    }
}

/// The groups of a plan for `experts` experts on PEs `0..pes`. `pe_of` maps device ids to PEs.
///
/// # Errors
/// Returns an error that names the entry if the plan has idle devices or another number of devices, or if an expert is missing or placed
/// twice.
pub(crate) fn groups_of(
    plan: &Plan,
    pes: usize,
    experts: usize,
    pe_of: impl Fn(u64) -> Option<usize>,
) -> Result<Groups> {
    let planned: usize = plan.groups.iter().map(|group| group.devices.len()).sum();
    if let Some(id) = plan.idle_devices.first() {
        bail!("idle_devices has device {id}, expected none: every PE takes part");
    }
    ensure!(planned == pes, "the groups have {planned} devices, expected {pes}, one for each PE (`pes`)");
    let mut groups = Vec::new();
    for (g, group) in plan.groups.iter().enumerate() {
        let mut members = Vec::new();
        for (i, &id) in group.devices.iter().enumerate() {
            members.push(pe_of(id).with_context(|| {
                format!("groups[{g}].devices[{i}] is {id}, expected a number below {pes}: device ids are PEs")
            })?);
        }
        members.sort_unstable();
        groups.push((members.clone(), placement_of(g, group, &members, experts, &pe_of)?));
    }
    let groups = Groups::new(pes, groups).map_err(|wrong| anyhow!("groups: {wrong}"))?;
    debug_assert!((0..groups.len()).all(|g| groups.placement(g).n_experts() == experts));
    Ok(groups)
}

fn placement_of(
    g: usize,
    group: &PlannedGroup,
    members: &[usize],
    n: usize,
    pe_of: impl Fn(u64) -> Option<usize>,
) -> Result<Placement> {
    let index_of = |id: u64| pe_of(id).and_then(|pe| members.binary_search(&pe).ok());
    let mut holders = vec![Vec::new(); n];
    for (id, list) in &group.experts {
        let index =
            index_of(*id).with_context(|| format!("groups[{g}].experts has device {id}, which is not in the group"))?;
        for &e in list {
            let holders = holders
                .get_mut(e as usize)
                .with_context(|| format!("groups[{g}].experts.{id} has expert {e}, the layer has {n}"))?;
            ensure!(!holders.contains(&index), "groups[{g}].experts.{id} has expert {e} twice, expected once");
            let split = holders.is_empty() || group.replicas.iter().any(|replicas| replicas.expert == e);
            ensure!(
                split,
                "groups[{g}].experts.{id} has expert {e}, which another device has too, expected an entry of it in replicas"
            );
            holders.push(index);
        }
    }
    if let Some(e) = holders.iter().position(Vec::is_empty) {
        bail!("groups[{g}].experts lacks expert {e}, expected all {n} of the layer");
    }
    holders.iter_mut().for_each(|holders| holders.sort_unstable());
    let owners = holders.iter().map(|holders| holders[0] as u32).collect();
    let split = |(r, replicas): (usize, &PlannedReplicas)| -> Result<Split> {
        let PlannedReplicas { expert, devices, split, .. } = replicas;
        let path = format!("groups[{g}].replicas[{r}]");
        let mut columns: Vec<(usize, usize)> =
            devices.iter().enumerate().filter_map(|(column, id)| Some((index_of(*id)?, column))).collect();
        columns.sort_unstable();
        let on: Vec<usize> = columns.iter().map(|(index, _)| *index).collect();
        ensure!(
            columns.len() == devices.len() && holders.get(*expert as usize) == Some(&on),
            "{path}.devices is {devices:?}, expected the devices that hold expert {expert}"
        );
        let fits = split.len() == members.len() && split.iter().all(|shares| shares.len() == devices.len());
        ensure!(
            fits,
            "{path}.split has another size than {} x {}, a row for each device of the group with a share for each that holds the expert",
            members.len(),
            devices.len()
        );
        let mut shares = vec![Vec::new(); members.len()];
        for (id, row) in group.devices.iter().zip(split) {
            if let Some(index) = index_of(*id) {
                shares[index] = columns.iter().map(|(_, column)| row[*column]).collect();
            }
        }
        Ok(Split { expert: *expert as usize, holders: on, shares })
    };
    let splits = group.replicas.iter().enumerate().map(split).collect::<Result<Vec<_>>>()?;
    let placement = Placement::from_owners(owners, members.len()).with_replicas(&splits);
    placement.map_err(|wrong| anyhow!("groups[{g}].replicas: {wrong}"))
}

/// Parses the JSON output of `aristos plan`.
pub(crate) fn parse_plan(text: &str) -> Result<Plan> {
    #[derive(serde::Deserialize)]
    struct Feasible {
        feasible: bool,
        #[serde(default)]
        shortage: String,
    }
    let Feasible { feasible, shortage } = parse_json(text)?;
    ensure!(feasible, "feasible is false, expected a plan ({shortage})");
    Ok(parse_json(text)?)
}
