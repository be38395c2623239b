//! Runs forward and backward steps of an MoE layer, from a checkpoint or synthetic, on N PEs.
//!
//! [`PreparedRun`] is a request with its files open. Every PE and the reporting process prepare the same one. [`supervisor`] starts the
//! PEs, collects their reports, and checks and publishes the results. [`pe`] is one PE's part, on the CPU or on a device. Without a
//! supervisor, PE 0 does the supervisor's work ([`peers`]).

pub mod check;
#[cfg(any(feature = "cuda", feature = "emulate"))]
pub(crate) mod device;
mod hooks;
mod inject;
pub mod memory;
mod messages;
mod non_finite;
pub mod pe;
mod pe_results;
pub mod peers;
pub mod plan;
pub mod probe;
pub(crate) mod routing;
mod steps;
pub mod supervisor;

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail, ensure};

use crate::checkpoint::{Checkpoint, Input, ResultLayout, read_input};
use crate::cluster::Cluster;
#[cfg(feature = "device")]
use crate::job::device::OpenDevice;
use crate::job::request::{DeviceKind, PlanSource, RowsPer, RunRequest, Work};
use crate::moe::placement::block;
use crate::moe::synthetic::Synthetic;
use crate::moe::{
    Balance, Groups, Hosts, LayerConfig, LayerSpec, Mode, Placement, WeightError, WeightId, WeightSlice, WeightSource,
};
use crate::plan::Replication;

use routing::{Captured, GivenRouting};

enum Source {
    Checkpoint(Box<Checkpoint>, Input),
    Synthetic(Synthetic),
}

/// A request with its files open and its numbers checked.
pub struct PreparedRun {
    request: RunRequest,
    source: Source,
    config: LayerConfig,
    tokens: usize,
    /// The tokens of each PE.
    pe_tokens: Vec<Range<usize>>,
    backward: bool,
    /// The remaining PEs of the job, ascending.
    world: Vec<usize>,
    /// The expert-parallel groups, by index in `world`.
    groups: Groups,
    /// The cluster to which PEs and links are slowed down.
    injected: Option<Cluster>,
    /// The experts of the tokens, if a file gives them instead of the router.
    routing: Option<GivenRouting>,
    /// Where the plan is from, for the report. Set in the process that made or read the plan.
    plan_source: Option<String>,
    /// The host of each PE. Empty without `--rows-per host`, and before the PEs have joined.
    hosts: Vec<usize>,
    /// This PE's device, if a probe in this process has opened the device already.
    #[cfg(feature = "device")]
    open_device: Option<OpenDevice>,
}

impl PreparedRun {
    /// Opens the files and checks the request.
    ///
    /// # Errors
    /// Returns an error that names the file or the field if a file cannot be read, or if a field is wrong or contradicts another field.
    pub fn open(request: RunRequest) -> Result<Self> {
        let (source, tokens, backward) = match &request.work {
            Work::Checkpoint { model, layer, input } => {
                let checkpoint = Checkpoint::open(model, *layer)?;
                let input = read_input(input)?;
                input.expect_hidden(checkpoint.config().hidden)?;
                let (tokens, backward) = (input.tokens(), input.has_grad_output());
                (Source::Checkpoint(Box::new(checkpoint), input), tokens, backward)
            }
            Work::Synthetic { spec, tokens, backward } => {
                (Source::Synthetic(Synthetic::new(spec.clone())?), *tokens, *backward)
            }
        };
        let mut config = match &source {
            Source::Checkpoint(checkpoint, _) => checkpoint.config().clone(),
            Source::Synthetic(synthetic) => synthetic.config().clone(),
        };
        (config.aux_loss_coef, config.z_loss_coef) = request.losses;
        config.capacity_factor = request.capacity_factor;
        config.validate()?;
        ensure!(backward || request.sgd.is_none(), "`sgd` without a backward pass: the input has no grad_output");
        #[cfg(feature = "device")]
        if request.device != DeviceKind::Cpu {
            crate::moe::device::check(&config, request.dtype, &request.options)?;
        }
        #[cfg(feature = "device")]
        if request.symmetric == crate::gpu::SymmetricBy::Nccl {
            let auto = matches!(request.plan, Some(PlanSource::Auto { .. }));
            ensure!(
                !auto,
                "`plan` auto with `symmetric` nccl, expected a plan in a file: the probe measures NVSHMEM's puts"
            );
        }
        let groups = Groups::one(Placement::even(config.n_experts, request.pes.max(1)));
        if let Some(every) = request.hot_shift_every {
            let synthetic = matches!(request.work, Work::Synthetic { .. });
            ensure!(synthetic, "`hot_shift_every` is {every} with a checkpoint, expected a synthetic layer");
            ensure!(every > 0, "`hot_shift_every` is 0, expected at least 1 step");
        }
        if let Some(replan) = &request.replan {
            let made = matches!(request.plan, Some(PlanSource::Auto { .. } | PlanSource::Made(_)));
            ensure!(
                made,
                "`replan_every` is {} without `plan` auto, which measures what is to be planned for",
                replan.every
            );
            ensure!(replan.every > 0, "`replan_every` is 0, expected at least 1 step");
            ensure!(
                request.device == DeviceKind::Cpu,
                "`replan_every` is {} on a device, expected `device` cpu: experts do not move between devices yet",
                replan.every
            );
        }
        ensure!(
            !request.check || request.replan.is_none() || request.options.wire.is_none(),
            "`check` with `wire` and `replan_every`, expected two of them: the check does not follow experts that move to the rows that are rounded"
        );
        let splits = request.options.balance == Balance::Split;
        ensure!(
            !splits || request.device == DeviceKind::Cpu,
            "`balance` split on a device, expected `device` cpu: devices divide rows by the plan's shares"
        );
        ensure!(
            !splits || !request.check || request.options.wire.is_none() || request.rows_per == RowsPer::Pe,
            "`check` with `wire`, `balance` split and `rows_per` host, expected three of them: the check does not know the hosts, on which the rounded rows depend"
        );
        let routing = match &request.routing {
            None => None,
            Some(_) if request.device != DeviceKind::Cpu => {
                bail!("`routing` on a device, expected `device` cpu: a device's router chooses for itself")
            }
            Some(path) => Some(GivenRouting::read(
                path,
                request.work.layer(),
                (config.n_experts, config.router.top_k),
                Some(tokens),
            )?),
        };
        let pe_tokens = match &routing {
            Some(routing) => routing.tokens_of_pes(request.pes)?,
            None => (0..request.pes).map(|pe| block(tokens, request.pes, pe)).collect(),
        };
        let injected = request.inject.as_deref().map(|path| inject::read(path, &request)).transpose()?;
        let world = (0..request.pes).collect();
        let mut run = PreparedRun {
            source,
            config,
            tokens,
            pe_tokens,
            backward,
            world,
            groups,
            injected,
            routing,
            plan_source: None,
            hosts: Vec::new(),
            #[cfg(feature = "device")]
            open_device: None,
            request,
        };
        if let Some(PlanSource::Made(plan)) = &run.request.plan {
            run.groups = run.groups_of(plan)?;
        }
        Ok(run)
    }

    /// The request, as it is sent to the PEs.
    pub fn request(&self) -> &RunRequest {
        &self.request
    }

    /// Removes the groups of lost PEs from the job. The layer and the tokens of the remaining PEs do not change.
    fn exclude_pes(&mut self, lost: &[usize]) -> Result<()> {
        let living: Vec<usize> = self.world.iter().copied().filter(|pe| !lost.contains(pe)).collect();
        let mut groups = Vec::new();
        for group in 0..self.groups.len() {
            let members = self.groups.members(group).iter().map(|&rank| self.world[rank]);
            let ranks: Vec<usize> =
                members.clone().filter_map(|pe| living.iter().position(|&living| living == pe)).collect();
            ensure!(ranks.is_empty() || ranks.len() == members.len(), "EP group {group} has lost some of its PEs only");
            if !ranks.is_empty() {
                groups.push((ranks, self.groups.placement(group).clone()));
            }
        }
        self.groups = Groups::new(living.len(), groups).map_err(anyhow::Error::msg)?;
        self.world = living;
        Ok(())
    }

    /// The factor for gradients after a loss of PEs: the number of all tokens over that of the remaining PEs' tokens, so that the length of
    /// an SGD step does not change.
    fn gradient_scale(&self) -> f32 {
        let left: usize = self.world.iter().map(|&pe| self.tokens_of(pe).len()).sum();
        if left == 0 { 1.0 } else { (self.tokens as f64 / left as f64) as f32 }
    }

    /// The index of a remaining PE in `world`.
    fn rank(&self, pe: usize) -> usize {
        self.world.iter().position(|&one| one == pe).expect("the PE is one of the remaining PEs")
    }

    /// The experts of `pe`, ascending.
    fn experts(&self, pe: usize) -> &[usize] {
        self.groups.experts(self.rank(pe))
    }

    /// The hosts of the remaining PEs, with `--rows-per host`.
    fn world_hosts(&self) -> Hosts {
        Hosts::new(self.hosts.clone()).of(&self.world)
    }

    /// The layer of a group.
    fn layer_spec(&self, group: usize) -> LayerSpec {
        let mut options = self.request.options.clone();
        options.hosts = self.world_hosts().of(self.groups.members(group));
        let spec = LayerSpec::new(self.config.clone(), self.world.len(), self.max_tokens())
            .placement(self.groups.placement(group).clone())
            .dtype(self.request.dtype)
            .training(self.backward)
            .options(options);
        match self.slots() {
            Some(slots) => spec.slots(slots),
            None => spec,
        }
    }

    /// The maximum number of experts of a PE, if the job replans.
    fn slots(&self) -> Option<usize> {
        let replan = self.request.replan.as_ref()?;
        let held = (0..self.world.len()).map(|pe| self.groups.experts(pe).len()).max().unwrap_or(0);
        Some(match replan.replicas {
            Replication::AtMost(n) => {
                held.saturating_add(usize::try_from(n).unwrap_or(usize::MAX)).min(self.config.n_experts)
            }
            _ => self.config.n_experts,
        })
    }

    /// The tokens of a PE.
    fn tokens_of(&self, pe: usize) -> Range<usize> {
        self.pe_tokens[pe].clone()
    }

    /// The shape of the captured routing.
    fn captured(&self) -> Captured {
        Captured { steps: self.request.steps, tokens: self.tokens, top_k: self.config.router.top_k }
    }

    /// The largest number of tokens of a PE.
    fn max_tokens(&self) -> usize {
        self.pe_tokens.iter().map(|tokens| tokens.len()).max().unwrap_or(0)
    }

    /// The layout of the result file.
    fn results(&self) -> Result<ResultLayout> {
        let rows = vec![self.tokens, self.config.hidden];
        let mut tensors = vec![("output".to_string(), rows.clone())];
        if self.backward {
            tensors.push(("grad_hidden_states".into(), rows));
            let gradients = self.tensors(|id| id.has_gradient()).into_iter();
            tensors.extend(gradients.map(|(tensor, shape)| (gradient_name(&tensor), shape)));
        }
        layout(tensors, self.request.output.as_deref())
    }

    /// The layout of the file of weights.
    fn saved_weights(&self) -> Result<ResultLayout> {
        layout(self.tensors(|_| true), self.request.save_weights.as_deref())
    }

    /// The names and shapes of the checkpoint's tensors that contain the weights selected by `of`. Several weights may share a tensor.
    fn tensors(&self, of: impl Fn(&WeightId) -> bool) -> Vec<(String, Vec<usize>)> {
        let mut seen = std::collections::HashSet::new();
        let places = self.config.weights().into_iter().filter(of).map(|id| self.weight_slice(id));
        places.filter(|place| seen.insert(place.tensor.clone())).map(|place| (place.tensor, place.shape)).collect()
    }

    fn weights(&self) -> &dyn WeightSource {
        match &self.source {
            Source::Checkpoint(checkpoint, _) => &**checkpoint,
            Source::Synthetic(synthetic) => synthetic,
        }
    }

    /// The mode's name in reports.
    fn mode(&self) -> &'static str {
        match self.request.options.mode {
            Mode::Pipelined => "pipelined",
            Mode::Bulk => "bulk",
        }
    }

    /// Maximum time for which a PE waits for another.
    fn wait_limit(&self) -> Duration {
        self.request.options.wait_limit
    }
}

/// The weights of the source, with the requested layer configuration: that of the source with the requested losses and capacity.
impl WeightSource for PreparedRun {
    fn config(&self) -> &LayerConfig {
        &self.config
    }

    fn name(&self, id: WeightId) -> String {
        self.weights().name(id)
    }

    fn weight_slice(&self, id: WeightId) -> WeightSlice {
        self.weights().weight_slice(id)
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        self.weights().load(id)
    }
}

/// The layout of a file with these tensors. The extension of `path` selects the format.
fn layout(tensors: Vec<(String, Vec<usize>)>, path: Option<&Path>) -> Result<ResultLayout> {
    let layout = ResultLayout::new(tensors)?;
    Ok(match path {
        Some(path) => layout.for_path(path),
        None => layout,
    })
}

/// The name of a tensor's gradient in the result file.
fn gradient_name(tensor: &str) -> String {
    format!("grad.{tensor}")
}
