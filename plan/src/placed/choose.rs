//! The choice of groups and placements under the placed objective.

use super::bound::bounds;
use super::found::FoundPlaced;
use super::place::{Known, PROVED_MOST, place_thoroughly, prove};
use super::search::{Dealt, PlacedEffort, improve, near};
use super::{GroupTimes, Placed};
use crate::bound::LeastExchange;
use crate::chosen::{Chosen, EQUAL, PROVED_FAST, THOROUGH_DEVICES};
use crate::cluster::{Cluster, LinkTable, Matrix};
use crate::objective::{Evaluation, Problem};
use crate::options::placement_kind;
use crate::placement::DeviceExperts;
use crate::search::{Search, Views};
use crate::workload::Workload;
use crate::{Algorithm, Options, PlacementKind, PlanError};

/// Links that the rounds examine for [`THOROUGH_DEVICES`]; fewer devices get more, because earlier stages take less time.
const JOINT_OPS: f64 = 2.4e8;
const JOINT_MORE: f64 = 0.5;
/// Links examined and nodes of branch and bound for the placements of one grouping.
const PLACE: (u64, u64) = (4_000_000, 50_000);
/// Nodes and steps of a proof of optimality: by default, and with [`Algorithm::Exact`].
const PROOF_AUTO: (u64, u64) = (1_000_000, 60_000_000);
const PROOF_ASKED: (u64, u64) = (100_000_000, 4_000_000_000);

/// Search effort. It is about constant up to [`THOROUGH_DEVICES`], a fraction of a second. Above, it falls steeply, so that 256 devices are planned in
/// milliseconds.
fn effort(n: usize, matrix: bool, times: u32) -> PlacedEffort {
    let share = n as f64 / THOROUGH_DEVICES;
    let usual = match matrix {
        true if n <= PROVED_FAST => PlacedEffort { construct: 200_000, place: (100_000, PLACE.1), joint: 1_500_000 },
        true if share <= 1.0 => PlacedEffort {
            construct: 4_000_000,
            place: PLACE,
            joint: match n <= crate::exact::MOST_DEVICES {
                true => (JOINT_OPS * share) as u64,
                false => (JOINT_OPS * (1.0 + JOINT_MORE * (1.0 - share))) as u64,
            },
        },
        true => PlacedEffort {
            construct: (n * n) as u64,
            place: ((PLACE.0 as f64 * share.powi(-5)) as u64, 200),
            joint: (JOINT_OPS * share.powi(-8)) as u64,
        },
        false => PlacedEffort { construct: 3_000_000, place: (100_000, 1_000), joint: 0 },
    };
    let more = |ops: u64| ops.saturating_mul(u64::from(times.max(1)));
    PlacedEffort { place: (more(usual.place.0), usual.place.1), joint: more(usual.joint), ..usual }
}

/// Groups and placements of the least placed objective. `published` is the result under the published objective, with placements.
pub(crate) fn choose<L: LeastExchange>(
    cluster: &Cluster,
    problem: &Problem<L>,
    views: &Views,
    options: Options,
    matrix: Option<&Matrix>,
    published: (Chosen, Vec<DeviceExperts>),
) -> Result<Chosen, PlanError> {
    let placed = Placed::new(problem);
    let bounds = bounds(problem, &placed.experts, options.allow_idle);
    let n = problem.n();
    let effort = effort(n, matrix.is_some(), options.effort);
    let (published, placements) = published;
    let (least_published, bound_ms) = (published.groups.clone(), bounds.least());
    let finish = |found: FoundPlaced, algorithm: &'static str, proved: bool, others| {
        let mut order: Vec<usize> = (0..found.groups.len()).collect();
        order.sort_by(|&a, &b| found.groups[a].cmp(&found.groups[b]));
        let groups: Vec<Vec<u32>> = order.iter().map(|&g| found.groups[g].clone()).collect();
        let placements = order.iter().map(|&g| found.placements[g].clone()).collect();
        let times: Vec<GroupTimes> = order.iter().map(|&g| found.times[g]).collect();
        let evaluation = placed.evaluate(&groups, &times);
        let optimal = proved || evaluation.objective_ms * (1.0 - EQUAL) <= bound_ms;
        let (placements, published) = (Some(placements), Some(least_published.clone()));
        Ok(Chosen { groups, placements, evaluation, algorithm, optimal, bound_ms, others, published })
    };
    if options.algorithm == Algorithm::Lysi || placement_kind(options) == PlacementKind::Lysi {
        let found = FoundPlaced::new(&placed, published.groups, placements);
        return finish(found, published.algorithm, false, Vec::new());
    }
    let published_plan = FoundPlaced::new(&placed, published.groups.clone(), placements);
    let dealt = Dealt { placed: &placed, known: Known::new() };
    let mut search = Search::new(problem, dealt, bounds, options.allow_idle);
    search.offer(published.groups);
    published.others.into_iter().for_each(|other| search.offer(other.groups));
    search.construct(views, effort.construct);
    let (mut others, bounds, Dealt { mut known, .. }) = search.into_found();
    let found = match near(&bounds, published_plan.objective_ms) {
        true => None,
        false => improve(&placed, &bounds, &others, options.allow_idle, effort, &known),
    };
    let found = found.filter(|found| found.objective_ms < published_plan.objective_ms).unwrap_or(published_plan);
    others.retain(|other| other.groups.len() != found.groups.len());
    let proved = found.objective_ms * (1.0 - EQUAL) <= bound_ms;
    let asked = options.algorithm == Algorithm::Exact;
    if options.algorithm == Algorithm::Search || proved {
        let label = if options.algorithm == Algorithm::Search || n > PROVED_MOST { "search" } else { "exact" };
        return finish(found, label, proved, others);
    }
    let proof = match matrix.filter(|_| n <= PROVED_MOST) {
        Some(matrix) => {
            let problem = Problem::new(&cluster.devices, matrix, problem.workload, options.allow_idle);
            let budget = if asked { PROOF_ASKED } else { PROOF_AUTO };
            prove(&Placed::new(&problem), &bounds, found.objective_ms, options.allow_idle, budget, &mut known)
        }
        None => crate::exact::Improvement { better: None, complete: false },
    };
    if asked && !proof.complete {
        let found_ms = found.objective_ms;
        return Err(PlanError::Unproved { devices: n, found_ms, gap: found_ms / bound_ms - 1.0 });
    }
    let better = proof.better.and_then(|groups| place_thoroughly(&placed, &groups, effort.place, &known));
    let better = better.filter(|better| better.objective_ms < found.objective_ms);
    let label = if proof.complete { "exact" } else { "search" };
    finish(better.unwrap_or(found), label, proof.complete, others)
}

/// The placed objective of groups with the best placements found; `None` if a group lacks memory.
pub(crate) fn evaluate_groups(cluster: &Cluster, workload: &Workload, groups: &[Vec<u32>]) -> Option<Evaluation> {
    let problem = Problem::new(&cluster.devices, &cluster.links, workload, false);
    let placed = Placed::new(&problem);
    let found = place_thoroughly(&placed, groups, (PLACE.0 / 8, PLACE.1), &Known::new())?;
    Some(placed.evaluate(groups, &found.times))
}

/// The best placements found for groups; `None` where a group lacks memory.
pub(crate) fn place_groups<L: LinkTable>(placed: &Placed<L>, groups: &[Vec<u32>]) -> Option<Vec<DeviceExperts>> {
    let found = place_thoroughly(placed, groups, (PLACE.0 / 8, PLACE.1), &Known::new())?;
    Some(found.placements)
}
