//! The choice of groups: search and proof by the published objective, whose result the placed search starts from.

use std::collections::{HashMap, HashSet};
use std::thread::Builder;

use super::anneal::in_threads;
use super::bound::{Bounds, LeastExchange, bounds};
use super::chosen::{Chosen, EQUAL, PROVED_FAST, THOROUGH_DEVICES};
use super::evaluate::evaluate;
use super::objective::Problem;
use super::options::placement_kind;
use super::placed;
use super::placement::{self, DeviceExperts, GroupDevices};
use super::search::{Effort, Found, Search, THREAD_LEAST, Views};
use super::{Algorithm, Objective, Options, PlacementKind, PlanError, Workload, exact, lysi};
use crate::cluster::{Cluster, LinkTable, Links, Matrix};

/// Maximum number of devices whose tiers are expanded to a matrix, which is faster to search, and of a matrix in which blocks are detected.
const MATRIX_MOST: usize = 128;
/// Maximum number of devices for which Lysi, quadratic in memory or time, also runs.
pub(crate) const LYSI_MOST: usize = 1024;
/// Minimum number of devices for which Lysi runs in a thread of its own, while the bounds are computed.
const BESIDE_LEAST: usize = 96;
/// Links that a search of [`THOROUGH_DEVICES`] examines.
const THOROUGH_OPS: f64 = 1.3e8;
/// Links that a search examines on large clusters in tiers.
const TIERS_OPS: u64 = 60_000_000;
/// Blocks of fast links are detected in a matrix: at most this many sizes, at jumps of the times by this factor.
const LEVELS: usize = 3;
const JUMP_LEAST: f64 = 1.1;
/// Maximum steps of the proof of optimality: by default, and with [`Algorithm::Exact`].
const PROOF_AUTO: u64 = 60_000_000;
const PROOF_ASKED: u64 = 4_000_000_000;
pub(crate) fn choose(cluster: &Cluster, workload: &Workload, options: Options) -> Result<Chosen, PlanError> {
    match &cluster.links {
        Links::Matrix(matrix) => choose_by(cluster, matrix, workload, options, Some(matrix)),
        Links::Tiers(tiers) if tiers.len() <= MATRIX_MOST => {
            let matrix = Matrix::from_table(tiers);
            let mut chosen = choose_by(cluster, &matrix, workload, options, Some(&matrix))?;
            // Tiers and matrix differ in the order of sums. All other code uses the tiers.
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
    placed::choose::choose(cluster, &problem, &views, options, matrix, (found, placements))
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
        // With few devices a thread costs more than it saves.
        let published = || if n <= LYSI_MOST { Some(lysi::groups(problem)) } else { None };
        let beside = (BESIDE_LEAST..=LYSI_MOST).contains(&n).then(|| Builder::new().spawn_scoped(scope, published));
        let bounds = bounds(problem, options.allow_idle);
        let mut search = Search::new(problem, problem, bounds, options.allow_idle);
        search.construct(views, effort.construct);
        // Also runs if the thread could not start.
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
    let (mut others, bounds, _) = search.into_found();
    if others.is_empty() {
        // All devices together are a valid group, or there would be a shortage.
        return Err(PlanError::NoGrouping);
    }
    let found = others.remove(0);
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
    Chosen { groups, placements: None, evaluation, algorithm, optimal, bound_ms, others, published: None }
}

/// Lysi's groups; the devices that it drops join the group that stays fastest with them, unless devices may be idle.
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

/// Search effort. Up to [`THOROUGH_DEVICES`] it is proportional to the devices, a fraction of a second. Above, it falls with the sixth power for a matrix,
/// so that 256 devices are planned in milliseconds. It is constant for tiers, whose cost is not quadratic.
fn effort(n: usize, matrix: bool, times: u32) -> Effort {
    let sixth = (THOROUGH_DEVICES / n as f64).powi(6).min(1.0);
    let usual = match matrix {
        // The proof covers all groupings.
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
        Links::Matrix(_) if n <= MATRIX_MOST => blocks.extend(blocks_by_links(&near)),
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

/// Blocks whose internal links are much faster than those between blocks, of up to [`LEVELS`] sizes. `near` is the cluster's `near_order`.
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

/// The placement and makespan of each group; groups of equal devices share one.
pub(crate) fn place(
    cluster: &Cluster,
    costs: &[f64],
    groups: &[Vec<u32>],
    kind: PlacementKind,
) -> Vec<(DeviceExperts, f64)> {
    let n = cluster.devices.len();
    // Rates as bits, and memories: groups with equal ones get the same placement.
    type Alike = (Vec<u64>, Vec<u64>);
    let devices_of = |members: &[u32]| -> Alike {
        let device = |i: &u32| &cluster.devices[*i as usize];
        members.iter().map(|i| (device(i).flop_per_ms.to_bits(), device(i).memory_experts)).unzip()
    };
    let all: Vec<Alike> = groups.iter().map(|members| devices_of(members)).collect();
    let mut seen = HashSet::new();
    let distinct: Vec<&Alike> = all.iter().filter(|alike| seen.insert(*alike)).collect();
    let steps = if n as f64 <= THOROUGH_DEVICES { 20_000_000 } else { 200_000 };
    let each = steps / distinct.len().max(1) as u64;
    let place = |alike| {
        let (rates, memory): &Alike = alike;
        let flops: Vec<f64> = rates.iter().map(|bits| f64::from_bits(*bits)).collect();
        let group = GroupDevices { flops: &flops, memory, costs };
        let placement = match kind {
            PlacementKind::Auto => placement::auto(&group, each),
            PlacementKind::Lysi => placement::lysi(&group),
        };
        let makespan_ms = group.makespan(&placement);
        (alike, (placement, makespan_ms))
    };
    let known: HashMap<&Alike, _> = in_threads(distinct, each >= THREAD_LEAST, place).into_iter().collect();
    all.iter().map(|alike| known[alike].clone()).collect()
}
