//! The planner: expert-parallel groups and the placement of experts in them. Lysi, the published algorithm, is one of its algorithms.
//!
//! [`plan`] takes a [`Cluster`] and a [`Workload`] and gives an [`Outcome`]: a [`Plan`], or why there is none. What it minimises is
//! in `placed/mod.rs`, and the published objective in `objective.rs`; `docs/planner.md` describes the algorithms and proves the bounds. A workload
//! comes from a file, or from a [`Model`] and a [`Batch`]. [`Options::replicas`] lets devices share hot experts; [`rebalance_experts`] replicates
//! them as EPLB does.
//!
//! Units are those of the files: ms, MB of 10^6 bytes, FLOP per ms.
//!
//! # Example
//! ```
//! use aristos_plan::cluster::preset;
//! use aristos_plan::{Options, Outcome, Workload, plan};
//!
//! let cluster = preset("dgx-h100:2")?;
//! let workload = Workload::from_json(
//!     r#"{"expert_flop": [2e10, 2e10, 2e10, 2e10, 2e10, 2e10, 2e10, 2e10], "p2p_buffer_mb": 16, "p2p_frequency": 4,
//!         "all_reduce_buffer_mb": 400, "num_layers": 24, "moe_frequency": 2, "global_batch_size": 256,
//!         "mini_batch_size": 4, "recomputation_amount": 1}"#,
//! )?;
//! let Outcome::Plan(plan) = plan(&cluster, &workload, Options::default())? else { panic!("8 experts fit anywhere") };
//! let devices: usize = plan.groups.iter().map(|group| group.devices.len()).sum();
//! assert_eq!(devices, 16);
//! // Every group holds every expert, once.
//! for group in &plan.groups {
//!     let mut experts: Vec<u32> = group.experts.values().flatten().copied().collect();
//!     experts.sort();
//!     assert_eq!(experts, [0, 1, 2, 3, 4, 5, 6, 7]);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bound;
pub mod cluster;
mod error;
mod exact;
mod explain;
mod lysi;
mod model;
mod objective;
mod placed;
mod placement;
mod random;
mod rebalance;
mod replan;
mod replicate;
mod search;
mod state;
mod workload;

use std::collections::{BTreeMap, HashMap};
use std::thread::Builder;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::cluster::{Cluster, LinkTable, Links, Matrix};
use bound::{Bounds, LeastExchange, bounds};
pub use error::{InputError, PlanError};
pub use explain::{Alternative, Explanation, explain};
pub use model::{Batch, MODELS, Model};
use objective::{Evaluation, Problem};
use placement::GroupDevices;
pub use rebalance::{Rebalanced, expert_weights, rebalance_experts};
pub use replan::{Replan, check, loads_of_report, replan};
pub use replicate::Replication;
use replicate::{Spread, evaluate_spreads};
use search::{Effort, Found, Search, TOGETHER_MOST, Views};
pub use workload::Workload;

/// How to choose the groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Search; and proof where the cluster is small.
    #[default]
    Auto,
    /// Search and proof, or an error.
    Exact,
    /// Search alone, with a bound on the gap.
    Search,
    /// Lysi, the published algorithm, for comparison.
    Lysi,
}

/// How to place the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlacementKind {
    /// The least time of the group; by the published objective, the least makespan.
    Auto,
    /// Lysi's placement, for comparison.
    Lysi,
}

/// What a plan is to minimise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Objective {
    /// The time of an iteration with experts whole and where they are, and every group's own tokens.
    #[default]
    Placed,
    /// Equation (1) of the Lysi poster, which spreads the experts' work over a group as if they could be cut, for comparison.
    Published,
}

/// What is asked of the planner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// How to choose the groups.
    pub algorithm: Algorithm,
    /// What to minimise; by default [`Objective::Placed`], and with [`Algorithm::Lysi`], which minimises that, [`Objective::Published`].
    pub objective: Option<Objective>,
    /// How to place the experts; by default Lysi's way with [`Algorithm::Lysi`], else the best.
    pub placement: Option<PlacementKind>,
    /// Whether devices may be left out.
    pub allow_idle: bool,
    /// How many times the usual effort the search may take; 0 counts as 1.
    pub effort: u32,
    /// Replicas of experts, where they lower the placed objective; by default none.
    pub replicas: Option<Replication>,
}

impl Options {
    /// The groups chosen so.
    pub fn algorithm(self, algorithm: Algorithm) -> Options {
        Options { algorithm, ..self }
    }

    /// What is minimised.
    pub fn minimised(self) -> Objective {
        self.objective.unwrap_or(match self.algorithm {
            Algorithm::Lysi => Objective::Published,
            _ => Objective::Placed,
        })
    }

    /// To minimise this.
    pub fn objective(self, objective: Objective) -> Options {
        Options { objective: Some(objective), ..self }
    }

    /// The experts placed so, whatever chooses the groups.
    pub fn placement(self, placement: PlacementKind) -> Options {
        Options { placement: Some(placement), ..self }
    }

    /// Whether devices may be left out.
    pub fn allow_idle(self, allow_idle: bool) -> Options {
        Options { allow_idle, ..self }
    }

    /// With replicas of experts.
    pub fn replicas(self, replication: Replication) -> Options {
        Options { replicas: Some(replication), ..self }
    }

    /// A search of this many times the usual effort.
    pub fn effort(self, effort: u32) -> Options {
        Options { effort, ..self }
    }
}

/// The objective's parts: `objective_ms = gamma * (compute_ms + communication_ms) + all_reduce_ms`, of the group that the
/// objective is the maximum of.
///
/// By the published objective, compute is the experts' costs over the group's rate, and communication the exchange in even shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Terms {
    /// Passes of an MoE layer per iteration.
    pub gamma: f64,
    /// The longest time of a device of the group for its experts.
    pub compute_ms: f64,
    /// Exchanges per pass times the longest exchange of a device of the group.
    pub communication_ms: f64,
    /// The all-reduce between groups.
    pub all_reduce_ms: f64,
}

/// One expert-parallel group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedGroup {
    /// Ids of its devices, in the cluster's order.
    pub devices: Vec<u64>,
    /// Its own objective; the plan's is the largest.
    pub objective_ms: f64,
    /// By device id, the experts that it holds, ascending.
    pub experts: BTreeMap<u64, Vec<u32>>,
    /// The longest time of a device for its experts in one pass: of the group's tokens, or by the published objective of one device's.
    pub makespan_ms: f64,
    /// Where replicas were asked for: no placement of the group with so many of them has a smaller makespan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_makespan_ms: Option<f64>,
    /// The experts that several of its devices hold, ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<PlannedReplicas>,
}

/// An expert with replicas in a group, and who sends its tokens to which of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlannedReplicas {
    /// The expert.
    pub expert: u32,
    /// Ids of the devices that hold it, in the cluster's order.
    pub devices: Vec<u64>,
    /// `[the group's devices, devices]`: of each device's tokens with this expert the share that goes to each that holds it.
    pub split: Vec<Vec<f64>>,
}

/// Groups and placement. As JSON it is what `aristos plan --json` prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Plan {
    /// True; see [`Outcome`].
    pub feasible: bool,
    /// What it was made for; unknown of older plans.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<Box<Workload>>,
    /// What was minimised. Plans that do not say so are of before there was a choice.
    #[serde(default = "before_objectives")]
    pub objective: Objective,
    /// What chose the groups: "exact", "search" or "lysi".
    pub algorithm: String,
    /// Whether there is no lower objective.
    pub optimal: bool,
    /// The objective is at most this share above the least possible one: objective / lower bound - 1.
    pub gap_bound: f64,
    /// The objective.
    pub objective_ms: f64,
    /// Its parts.
    pub terms: Terms,
    /// The groups, by their first device.
    pub groups: Vec<PlannedGroup>,
    /// Ids of the devices in no group.
    pub idle_devices: Vec<u64>,
    /// Time that planning took.
    pub elapsed_ms: f64,
}

fn before_objectives() -> Objective {
    Objective::Published
}

/// No plan: what is missing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Infeasible {
    /// False.
    pub feasible: bool,
    /// What is short, and by how much.
    pub shortage: String,
    /// Time that planning took.
    pub elapsed_ms: f64,
}

/// What planning comes to.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// A plan.
    Plan(Plan),
    /// There is none.
    Infeasible(Infeasible),
}

/// Tiers of up to so many devices are written out as a matrix, which is faster to search.
const MATRIX_MOST: usize = 128;
/// Beyond this many devices Lysi, O(n^2) in memory or time, does not run beside the search.
const LYSI_MOST: usize = 1024;
/// From so many devices on it runs in a thread beside the bounds.
const BESIDE_LEAST: usize = 96;
/// For so many devices nobody waits for a search of this many links, or for fewer in proportion.
const THOROUGH_DEVICES: f64 = 64.0;
const THOROUGH_OPS: f64 = 2.6e8;
/// The same of large clusters in tiers.
const TIERS_OPS: u64 = 60_000_000;
/// Blocks that are looked for in a matrix: of so many sizes at most, where times grow by so much.
const LEVELS: usize = 3;
const JUMP_LEAST: f64 = 1.1;
/// Up to so many devices the proof of optimality takes no longer than the search would.
const PROVED_FAST: usize = 11;
/// Steps of the proof of optimality: what nobody waits for, and what is asked for.
const PROOF_AUTO: u64 = 60_000_000;
const PROOF_ASKED: u64 = 4_000_000_000;
/// An objective this near to the bound is equal to it but for rounding.
const EQUAL: f64 = 1e-10;

/// Plans.
///
/// # Errors
/// [`PlanError::Unproved`], with [`Algorithm::Exact`] only; [`PlanError::Input`], where memory in MB has no `expert_mb` to go with it, or
/// replicas are asked for under the published objective.
pub fn plan(cluster: &Cluster, workload: &Workload, options: Options) -> Result<Outcome, PlanError> {
    plan_from(cluster, workload, options, None)
}

/// The same beside a plan in use: where replicas are asked for, its groups stay, and its experts where they are, as far as that does not cost
/// balance, so that little has to be moved.
///
/// # Errors
/// As [`plan`]; a plan in use that is not one of this cluster and these experts.
pub fn plan_from(
    cluster: &Cluster,
    workload: &Workload,
    options: Options,
    current: Option<&Plan>,
) -> Result<Outcome, PlanError> {
    let cluster = &*workload.on(cluster)?;
    let start = Instant::now();
    let elapsed_ms = || start.elapsed().as_secs_f64() * 1e3;
    if let Some(shortage) = shortage(cluster, workload) {
        return Ok(Outcome::Infeasible(Infeasible { feasible: false, shortage, elapsed_ms: elapsed_ms() }));
    }
    if let (Some(replication), Some(current), Objective::Placed) = (options.replicas, current, options.minimised()) {
        replan::check(cluster, workload, current)?;
        let mut plan = Plan { workload: Some(Box::new(workload.clone())), ..current.clone() };
        let replicated = replicate::from_current(cluster, workload, replication, indices(cluster, current));
        replicate::enter(&mut plan, cluster, workload, replicated);
        plan.elapsed_ms = elapsed_ms();
        return Ok(Outcome::Plan(plan));
    }
    let chosen = choose(cluster, workload, options)?;
    let mut plan = assemble(cluster, workload, &chosen, options);
    if let Some(replication) = options.replicas {
        if options.minimised() == Objective::Published {
            let expected = "the placed one, by which experts are whole";
            return Err(InputError::value("replicas", "are asked for under the published objective", expected).into());
        }
        if let Some(replicated) = replicate::replicate(cluster, workload, &chosen, replication) {
            replicate::enter(&mut plan, cluster, workload, replicated);
        }
    }
    plan.elapsed_ms = elapsed_ms();
    Ok(Outcome::Plan(plan))
}

pub(crate) fn placement_kind(options: Options) -> PlacementKind {
    options.placement.unwrap_or(match options.algorithm {
        Algorithm::Lysi => PlacementKind::Lysi,
        _ => PlacementKind::Auto,
    })
}

/// Why there is no plan: every group holds all experts, so all devices together must.
fn shortage(cluster: &Cluster, workload: &Workload) -> Option<String> {
    let held = cluster.devices.iter().fold(0u64, |sum, device| sum.saturating_add(device.memory_experts));
    let needed = workload.n_experts() as u64;
    let devices = match cluster.devices.len() {
        1 => "the one device holds".to_string(),
        n => format!("all {n} devices together hold"),
    };
    // What an expert takes, where that is known: often it is all its layers that are too much for one device.
    let size = workload.expert_mb.filter(|_| cluster.devices.iter().any(|device| device.memory_mb.is_some()));
    let size = size.map_or(String::new(), |mb| {
        let layers = workload.moe_layers();
        format!(" (an expert takes {} MB in its {layers} layers)", mb * layers)
    });
    (held < needed)
        .then(|| format!("memory: a group holds all {needed} experts, {devices} {held}: {} short{size}", needed - held))
}

/// The groups that were chosen.
pub(crate) struct Chosen {
    pub groups: Vec<Vec<u32>>,
    /// Of each group, where the objective depends on it.
    pub placements: Option<Vec<placement::DeviceExperts>>,
    pub evaluation: Evaluation,
    pub algorithm: &'static str,
    pub optimal: bool,
    /// No grouping has a lower objective, ms.
    pub bound_ms: f64,
    /// The best of other numbers of groups, by objective.
    pub others: Vec<Found>,
}

pub(crate) fn choose(cluster: &Cluster, workload: &Workload, options: Options) -> Result<Chosen, PlanError> {
    match &cluster.links {
        Links::Matrix(matrix) => choose_by(cluster, matrix, workload, options, Some(matrix)),
        Links::Tiers(tiers) if tiers.len() <= MATRIX_MOST => {
            let matrix = Matrix::from_table(tiers);
            let mut chosen = choose_by(cluster, &matrix, workload, options, Some(&matrix))?;
            // The same but for the order of sums; as it is computed from tiers everywhere else.
            chosen.evaluation = evaluate(cluster, workload, &chosen.groups, chosen.placements.as_deref());
            Ok(chosen)
        }
        Links::Tiers(tiers) => choose_by(cluster, tiers, workload, options, None),
    }
}

fn choose_by<L: LeastExchange>(
    cluster: &Cluster,
    links: &L,
    workload: &Workload,
    options: Options,
    matrix: Option<&Matrix>,
) -> Result<Chosen, PlanError> {
    let problem = Problem::new(&cluster.devices, links, workload, options.allow_idle);
    let views = views(cluster, &problem);
    if options.minimised() == Objective::Published {
        return choose_published(cluster, &problem, &views, options, matrix);
    }
    // Optimality under another objective need not be proved.
    let algorithm = match options.algorithm {
        Algorithm::Exact => Algorithm::Auto,
        other => other,
    };
    let found = choose_published(cluster, &problem, &views, options.algorithm(algorithm), matrix)?;
    let placements = place(cluster, &workload.costs(), &found.groups, placement_kind(options));
    let placements = placements.into_iter().map(|(placement, _)| placement).collect();
    placed::choose(cluster, &problem, &views, options, matrix, (found, placements))
}

fn choose_published<L: LeastExchange>(
    cluster: &Cluster,
    problem: &Problem<L>,
    views: &Views,
    options: Options,
    matrix: Option<&Matrix>,
) -> Result<Chosen, PlanError> {
    let n = problem.n();
    if options.algorithm == Algorithm::Lysi {
        let groups = complete(problem, lysi::groups(problem), options.allow_idle);
        return Ok(finish(problem, groups, "lysi", false, &bounds(problem, options.allow_idle), Vec::new()));
    }
    let effort = effort(n, matrix.is_some(), options.effort);
    let search = std::thread::scope(|scope| {
        // For few devices a thread would cost more than it saves.
        let published = || if n <= LYSI_MOST { Some(lysi::groups(problem)) } else { None };
        let beside = (BESIDE_LEAST..=LYSI_MOST).contains(&n).then(|| Builder::new().spawn_scoped(scope, published));
        let mut search = Search::new(problem, bounds(problem, options.allow_idle), views, options.allow_idle);
        search.construct(views, effort.construct);
        // Where a thread cannot start, too.
        let published = match beside.and_then(Result::ok).map(|thread| thread.join()) {
            Some(Ok(published)) => published,
            _ => published(),
        };
        if let Some(published) = published {
            if options.allow_idle {
                search.offer(published.0.clone());
            }
            search.offer(complete(problem, published, false));
        }
        search.improve(effort.improve);
        search
    });
    let (found, others, bounds) = search.into_found();
    let Some(found) = found else {
        // All devices together are a valid group, or there would be a shortage.
        return Err(PlanError::NoGrouping);
    };
    let proved = found.objective_ms * (1.0 - EQUAL) <= bounds.least();
    let label = |proved: bool| if proved && n <= exact::MOST_DEVICES { "exact" } else { "search" };
    if options.algorithm == Algorithm::Search || (proved && options.algorithm == Algorithm::Auto) {
        let label = if options.algorithm == Algorithm::Search { "search" } else { label(proved) };
        return Ok(finish(problem, found.groups, label, proved, &bounds, others));
    }
    let asked = options.algorithm == Algorithm::Exact;
    if proved {
        return Ok(finish(problem, found.groups, "exact", true, &bounds, others));
    }
    let outcome = match matrix.filter(|_| n <= exact::MOST_DEVICES) {
        Some(matrix) => {
            let problem = Problem::new(&cluster.devices, matrix, problem.workload, options.allow_idle);
            let budget = if asked { PROOF_ASKED } else { PROOF_AUTO };
            exact::improve(&problem, &bounds, found.objective_ms, options.allow_idle, budget)
        }
        None => exact::Improvement { better: None, complete: false },
    };
    if asked && !outcome.complete {
        let found_ms = found.objective_ms;
        return Err(PlanError::Unproved { devices: n, found_ms, gap: found_ms / bounds.least() - 1.0 });
    }
    let groups = outcome.better.unwrap_or(found.groups);
    Ok(finish(problem, groups, label(outcome.complete), outcome.complete, &bounds, others))
}

fn finish<L: LinkTable>(
    problem: &Problem<L>,
    mut groups: Vec<Vec<u32>>,
    algorithm: &'static str,
    proved: bool,
    bounds: &Bounds,
    others: Vec<Found>,
) -> Chosen {
    groups.sort();
    let evaluation = problem.evaluate_exactly(&groups);
    let bound_ms = bounds.least();
    let optimal = proved || evaluation.objective_ms * (1.0 - EQUAL) <= bound_ms;
    Chosen { groups, placements: None, evaluation, algorithm, optimal, bound_ms, others }
}

/// Lysi's groups, and the devices that it would drop: they join the group that suffers least, unless they
/// may be idle.
fn complete<L: LinkTable>(
    problem: &Problem<L>,
    (mut groups, dropped): (Vec<Vec<u32>>, Vec<u32>),
    allow_idle: bool,
) -> Vec<Vec<u32>> {
    if dropped.is_empty() || allow_idle {
        return groups;
    }
    let mut best = (f64::INFINITY, 0, Vec::new());
    for (g, group) in groups.iter().enumerate() {
        let mut members = [&group[..], &dropped].concat();
        members.sort_unstable();
        let (compute, communication) = problem.group(&members);
        if compute + communication < best.0 {
            best = (compute + communication, g, members);
        }
    }
    if let Some(group) = groups.get_mut(best.1) {
        *group = best.2;
    }
    groups
}

/// How hard to try. Up to [`THOROUGH_DEVICES`] an effort in proportion, a fraction of a second. Beyond, with a matrix, effort that falls with
/// the sixth power, so that 256 devices are planned in milliseconds; with tiers, where nothing is quadratic, a fixed one again.
fn effort(n: usize, matrix: bool, times: u32) -> Effort {
    let sixth = (THOROUGH_DEVICES / n as f64).powi(6).min(1.0);
    let usual = match matrix {
        // The proof will find what is missing.
        true if n <= PROVED_FAST => Effort { construct: 100_000, improve: 300_000 },
        true if n <= exact::MOST_DEVICES => Effort { construct: 100_000, improve: 5_000_000 },
        true if n as f64 <= THOROUGH_DEVICES => {
            Effort { construct: 2_000_000, improve: (THOROUGH_OPS * n as f64 / THOROUGH_DEVICES) as u64 }
        }
        true => Effort { construct: 3 * (n * n) as u64 + 50_000, improve: (THOROUGH_OPS * sixth) as u64 },
        false => Effort { construct: 100_000_000, improve: TIERS_OPS },
    };
    Effort { improve: usual.improve.saturating_mul(u64::from(times.max(1))), ..usual }
}

/// Orders and blocks of the cluster.
fn views<L: LinkTable>(cluster: &Cluster, problem: &Problem<L>) -> Views {
    let n = problem.n();
    let file: Vec<u32> = (0..n as u32).collect();
    let mut orders = vec![file.clone()];
    let near = problem.links.near_order(problem.workload.p2p_buffer_mb / (n as f64).sqrt());
    let order: Vec<u32> = near.iter().map(|(i, _)| *i).collect();
    if order != file {
        orders.push(order);
    }
    let mut blocks = vec![vec![file.clone()], cluster.hosts(), file.iter().map(|&i| vec![i]).collect()];
    match &cluster.links {
        Links::Tiers(tiers) => {
            let of = |size: usize| file.chunks(size).map(<[u32]>::to_vec).collect();
            blocks.extend(tiers.tiers().iter().map(|tier| of(tier.size)));
        }
        Links::Matrix(_) if n <= TOGETHER_MOST => blocks.extend(blocks_by_links(&near)),
        Links::Matrix(_) => {}
    }
    let mut distinct: Vec<Vec<Vec<u32>>> = Vec::new();
    for partition in blocks {
        if !distinct.contains(&partition) {
            distinct.push(partition);
        }
    }
    Views { orders, blocks: distinct }
}

/// Blocks within which links are much faster than between them, of up to [`LEVELS`] sizes. `near` is a cluster's `near_order`.
fn blocks_by_links(near: &[(u32, f64)]) -> Vec<Vec<Vec<u32>>> {
    let mut times: Vec<f64> = near.iter().skip(1).map(|(_, ms)| *ms).collect();
    times.sort_by(f64::total_cmp);
    let mut jumps: Vec<(f64, f64)> = times.windows(2).map(|pair| (pair[1] / pair[0], pair[0])).collect();
    jumps.retain(|(ratio, _)| *ratio > JUMP_LEAST);
    jumps.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.total_cmp(&b.1)));
    let within = |(_, most): &(f64, f64)| {
        let mut blocks: Vec<Vec<u32>> = Vec::new();
        for (i, ms) in near {
            match blocks.last_mut() {
                Some(block) if ms <= most => block.push(*i),
                _ => blocks.push(vec![*i]),
            }
        }
        blocks.iter_mut().for_each(|block| block.sort_unstable());
        blocks.sort();
        blocks
    };
    jumps.iter().take(LEVELS).map(within).collect()
}

/// The objective of groups of devices, each given by its index in the cluster, ms, with the best placement found where that counts; `None`
/// where a group's memory does not hold all experts. Devices may be left out; no group is empty, and no device in two.
pub fn objective_ms(cluster: &Cluster, workload: &Workload, groups: &[Vec<u32>], objective: Objective) -> Option<f64> {
    let cluster = &*workload.on(cluster).ok()?;
    let held = |members: &Vec<u32>| {
        members.iter().fold(0u64, |sum, &i| sum.saturating_add(cluster.devices[i as usize].memory_experts))
    };
    if groups.iter().any(|members| held(members) < workload.n_experts() as u64) {
        return None;
    }
    match objective {
        Objective::Placed => placed::evaluate_groups(cluster, workload, groups),
        Objective::Published => Some(evaluate(cluster, workload, groups, None)),
    }
    .map(|evaluation| evaluation.objective_ms)
}

/// The groups of a plan by the devices' indices in the cluster, ascending, and what they hold; devices that the cluster does not have are
/// left out.
pub(crate) fn indices(cluster: &Cluster, plan: &Plan) -> (Vec<Vec<u32>>, Vec<Spread>) {
    let index: HashMap<u64, u32> = cluster.devices.iter().map(|d| d.id).zip(0..).collect();
    let group = |group: &PlannedGroup| {
        let mut devices: Vec<(u32, u64)> = group.devices.iter().filter_map(|id| Some((*index.get(id)?, *id))).collect();
        devices.sort_unstable();
        let (members, ids): (Vec<u32>, Vec<u64>) = devices.into_iter().unzip();
        let held = ids.iter().map(|id| group.experts.get(id).cloned().unwrap_or_default()).collect();
        (members, Spread::of(group, held, &ids))
    };
    plan.groups.iter().map(group).unzip()
}

/// The objective of groups on this cluster, computed fresh: with placements the placed one, else the published one.
pub(crate) fn evaluate(
    cluster: &Cluster,
    workload: &Workload,
    groups: &[Vec<u32>],
    placements: Option<&[placement::DeviceExperts]>,
) -> Evaluation {
    if let Some(placements) = placements {
        return placed::evaluate(cluster, workload, groups, placements);
    }
    match &cluster.links {
        Links::Matrix(matrix) => Problem::new(&cluster.devices, matrix, workload, false).evaluate_exactly(groups),
        Links::Tiers(tiers) => Problem::new(&cluster.devices, tiers, workload, false).evaluate_exactly(groups),
    }
}

/// The parts of an evaluation's worst group.
pub(crate) fn terms(evaluation: &Evaluation) -> Terms {
    let worst = evaluation.worst();
    Terms {
        gamma: evaluation.gamma,
        compute_ms: evaluation.compute_ms[worst],
        communication_ms: evaluation.communication_ms[worst],
        all_reduce_ms: evaluation.all_reduce_ms,
    }
}

fn assemble(cluster: &Cluster, workload: &Workload, chosen: &Chosen, options: Options) -> Plan {
    let evaluation = &chosen.evaluation;
    let placements = match &chosen.placements {
        Some(placements) => placements.iter().cloned().zip(evaluation.compute_ms.iter().copied()).collect(),
        None => place(cluster, &workload.costs(), &chosen.groups, placement_kind(options)),
    };
    let id = |i: u32| cluster.devices[i as usize].id;
    let groups = chosen.groups.iter().zip(placements).enumerate().map(|(g, (members, (placement, makespan_ms)))| {
        let ids: Vec<u64> = members.iter().map(|&i| id(i)).collect();
        let experts = ids.iter().copied().zip(placement).collect();
        PlannedGroup {
            devices: ids,
            objective_ms: evaluation.group_ms(g),
            experts,
            makespan_ms,
            least_makespan_ms: None,
            replicas: Vec::new(),
        }
    });
    let mut idle = vec![true; cluster.devices.len()];
    chosen.groups.iter().flatten().for_each(|&i| idle[i as usize] = false);
    // Finite, as JSON has nothing else: a lower bound of 0 says nothing of a share above it.
    let gap = match chosen.optimal {
        true => 0.0,
        false => (evaluation.objective_ms / chosen.bound_ms - 1.0).clamp(0.0, f64::MAX),
    };
    Plan {
        feasible: true,
        workload: Some(Box::new(workload.clone())),
        objective: options.minimised(),
        algorithm: chosen.algorithm.to_string(),
        optimal: chosen.optimal,
        gap_bound: gap,
        objective_ms: evaluation.objective_ms,
        terms: terms(evaluation),
        groups: groups.collect(),
        idle_devices: cluster.devices.iter().zip(idle).filter(|(_, idle)| *idle).map(|(d, _)| d.id).collect(),
        elapsed_ms: 0.0,
    }
}

/// The placement and makespan of each group; groups of like devices share one.
fn place(
    cluster: &Cluster,
    costs: &[f64],
    groups: &[Vec<u32>],
    kind: PlacementKind,
) -> Vec<(placement::DeviceExperts, f64)> {
    let n = cluster.devices.len();
    // Rates as bits, and memories, of a group's devices: groups with the same ones get the same placement.
    type Alike = (Vec<u64>, Vec<u64>);
    let devices_of = |members: &[u32]| -> Alike {
        let device = |i: &u32| &cluster.devices[*i as usize];
        members.iter().map(|i| (device(i).flop_per_ms.to_bits(), device(i).memory_experts)).unzip()
    };
    let all: Vec<Alike> = groups.iter().map(|members| devices_of(members)).collect();
    let distinct = all.iter().collect::<std::collections::HashSet<_>>().len();
    let steps = if n as f64 <= THOROUGH_DEVICES { 20_000_000 } else { 200_000 };
    let mut known: HashMap<&Alike, (placement::DeviceExperts, f64)> = HashMap::new();
    let place = |alike: &Alike| {
        let flops: Vec<f64> = alike.0.iter().map(|bits| f64::from_bits(*bits)).collect();
        let group = GroupDevices { flops: &flops, memory: &alike.1, costs };
        let placement = match kind {
            PlacementKind::Auto => placement::auto(&group, steps / distinct as u64),
            PlacementKind::Lysi => placement::lysi(&group),
        };
        let makespan_ms = group.makespan(&placement);
        (placement, makespan_ms)
    };
    all.iter().map(|alike| known.entry(alike).or_insert_with(|| place(alike)).clone()).collect()
}

impl Outcome {
    /// As JSON, indented, with the keys of `docs/planner.md`.
    pub fn to_json(&self) -> String {
        let json = match self {
            Outcome::Plan(plan) => serde_json::to_string_pretty(plan),
            Outcome::Infeasible(infeasible) => serde_json::to_string_pretty(infeasible),
        };
        json.expect("maps have string keys, and numbers are finite")
    }
}
