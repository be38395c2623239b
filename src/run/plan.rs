//! A run by a plan: expert-parallel groups and placement from the planner, made for its PEs or read from a file.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::PreparedRun;
use super::probe::PROBE_PHASES;
use crate::cluster::{Cluster, Probe, ProbeOptions, parse_json, read_text};
use crate::job::launch::Processes;
use crate::job::messages::collect;
use crate::job::request::{DeviceKind, PlanSource, ProbeRequest, ProbedExpert, Request};
use crate::moe::{Groups, Placement};
use crate::plan::{self, Batch, Infeasible, Objective, Outcome, Plan, Workload};
use crate::report::{PlanReport, PlanTimes, PlannedPes, RunReport};

impl PreparedRun {
    /// The layer as what the planner plans for: a model of this one layer, of which every PE has an equal part of the tokens.
    pub fn workload(&self) -> Workload {
        let pes = self.request.pes;
        let mut batch = Batch::new(self.tokens as f64 / pes as f64, self.request.dtype.bytes());
        batch.devices = Some(pes);
        batch.backward = self.backward;
        self.config.model((1, 1)).workload(&batch)
    }

    /// Makes or reads the plan that was asked for, and runs by it. `probe` gives the cluster of the PEs that are to run, where it is
    /// asked for.
    ///
    /// # Errors
    /// One line: a probe that failed, memory that does not suffice, a file that is no plan for this run.
    pub(super) fn make_plan(&mut self, probe: impl FnOnce(&PreparedRun) -> Result<Cluster>) -> Result<()> {
        let (plan, source) = match self.request.plan.clone() {
            None | Some(PlanSource::Made(_)) => return Ok(()),
            Some(PlanSource::File(path)) => {
                let read = || parse_plan(&read_text(&path)?);
                let plan = read().with_context(|| path.display().to_string())?;
                self.groups = self.groups_of(&plan).with_context(|| path.display().to_string())?;
                (plan, path.display().to_string())
            }
            Some(PlanSource::Auto { .. }) => {
                let cluster = probe(self)?;
                let plan = match plan::plan(&cluster, &self.workload(), plan::Options::default())? {
                    Outcome::Plan(plan) => plan,
                    Outcome::Infeasible(Infeasible { shortage, .. }) => bail!("`plan` auto: no plan: {shortage}"),
                };
                self.groups = self.groups_of(&plan).context("`plan` auto")?;
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
        // What the PEs get is the plan, wherever it is from.
        self.request.plan = Some(PlanSource::Made(Box::new(plan)));
        Ok(())
    }

    /// What a plan that is to be made asks of a probe, in PEs that are the run's own; `None` where there is nothing to probe.
    ///
    /// # Errors
    /// What cannot be probed.
    pub(super) fn probe_request(&self) -> Result<Option<ProbeRequest>> {
        let Some(PlanSource::Auto { memory_mb }) = &self.request.plan else { return Ok(None) };
        ensure!(
            self.request.device == DeviceKind::Cpu,
            "`plan` auto probes PEs on the CPU, expected `device` cpu, or a plan in a file"
        );
        let expert = ProbedExpert {
            hidden: self.config.hidden,
            intermediate: self.config.expert.intermediate,
            gated: self.config.expert.gated,
            dtype: self.request.dtype,
        };
        expert.check()?;
        let mut options = ProbeOptions::quick();
        options.wait_limit = self.wait_limit();
        let (pes, memory_mb, memory_source) = (self.request.pes, memory_mb.clone(), "given".to_string());
        Ok(Some(ProbeRequest { pes, expert, options, memory_mb, memory_source }))
    }

    /// Probes the PEs that are to run, by processes of their own.
    pub(super) fn probe(&self) -> Result<Cluster> {
        let request = self.probe_request()?.context("nothing is to be probed")?;
        tracing::info!(pes = request.pes, "probing");
        let mut processes = Processes::new(request.pes, Request::Probe(request).to_bytes()?, &PROBE_PHASES);
        processes.set_wait_limit(self.wait_limit());
        let mut sent = None;
        collect::<String>(processes, |_, text| sent = Some(text), |_| (), |_, _| ())
            .context("`plan` auto: the probe failed")?;
        let text = &sent.context("`plan` auto: no PE sent its measurements")?;
        let cluster = Cluster::from_json(text)?;
        for (from, to, residual) in cluster.probe.iter().flat_map(|probe| probe.wild_links(Probe::USABLE)) {
            tracing::info!(
                "`plan` auto: the times of the link from PE {from} to PE {to} are {:.0}% off a latency and a rate",
                100.0 * residual
            );
        }
        Ok(cluster)
    }

    /// The groups of a plan, device `i` being PE `i`.
    pub(super) fn groups_of(&self, plan: &Plan) -> Result<Groups> {
        let pe = |id: u64| usize::try_from(id).ok().filter(|&pe| pe < self.request.pes);
        let groups = groups_of(plan, self.request.pes, self.config.n_experts, pe)?;
        ensure!(
            groups.len() == 1 || self.request.device == DeviceKind::Cpu,
            "the plan has {} expert-parallel groups, expected one on a device; several run on the CPU",
            groups.len()
        );
        Ok(groups)
    }

    /// What was planned beside what was measured; `None` without a plan.
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
    /// Why a plan's objective says nothing about this run, where it does not.
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

/// The groups of a plan of `experts` experts for PEs `0..pes`; `pe_of` says which PE a device is.
///
/// # Errors
/// One line that says where the plan is not one for these.
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
        groups.push((members.clone(), placement_of(g, &group.experts, &members, experts, &pe_of)?));
    }
    let groups = Groups::new(pes, groups).map_err(|wrong| anyhow::anyhow!("groups: {wrong}"))?;
    debug_assert!((0..groups.len()).all(|g| groups.placement(g).n_experts() == experts));
    Ok(groups)
}

fn placement_of(
    g: usize,
    experts: &BTreeMap<u64, Vec<u32>>,
    members: &[usize],
    n: usize,
    pe_of: impl Fn(u64) -> Option<usize>,
) -> Result<Placement> {
    let mut owners = vec![None; n];
    for (id, list) in experts {
        let index = pe_of(*id).and_then(|id| members.binary_search(&id).ok());
        let index = index.with_context(|| format!("groups[{g}].experts has device {id}, which is not in the group"))?;
        for &e in list {
            let owner = owners
                .get_mut(e as usize)
                .with_context(|| format!("groups[{g}].experts.{id} has expert {e}, the layer has {n}"))?;
            ensure!(owner.is_none(), "groups[{g}].experts.{id} has expert {e}, which another device has too");
            *owner = Some(index as u32);
        }
    }
    if let Some(e) = owners.iter().position(Option::is_none) {
        bail!("groups[{g}].experts lacks expert {e}, expected all {n} of the layer");
    }
    Ok(Placement::from_owners(owners.into_iter().flatten().collect(), members.len()))
}

/// Reads what `aristos plan` wrote.
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
