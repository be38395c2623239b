//! The planner by the published objective against brute force, and on random and hostile inputs.

// Each test uses a part of it.
#[allow(dead_code)]
mod plan_brute;
#[path = "../../tests/sample/mod.rs"]
mod sample;

use aristos_plan::cluster::Cluster;
use aristos_plan::{Algorithm, Objective, Options, Outcome, PlacementKind, Plan, Workload, plan};
use plan_brute::{Case, ROUNDING, Random, cpu_s, near, random_case};
use sample::Sample;

fn run(case: &Case, options: Options) -> Outcome {
    let cluster = Cluster::from_json(&case.cluster_json()).unwrap();
    let workload = Workload::from_json(&case.workload_json()).unwrap();
    plan(&cluster, &workload, options).unwrap()
}

fn options(algorithm: Algorithm) -> Options {
    Options::default().algorithm(algorithm).objective(Objective::Published)
}

/// Checks the invariants of every outcome; returns the plan, if there is one.
#[track_caller]
fn check(case: &Case, options: Options, outcome: Outcome) -> Option<Plan> {
    let total: u128 = case.memory.iter().map(|m| u128::from(*m)).sum();
    let needed = case.expert_flop.len() as u128;
    let plan = match outcome {
        Outcome::Infeasible(infeasible) => {
            assert!(total < needed, "there is a plan: {case:?}");
            assert!(infeasible.shortage.contains(&format!("{} short", needed - total)), "{infeasible:?}");
            return None;
        }
        Outcome::Plan(plan) => plan,
    };
    assert!(total >= needed);
    let mut seen = vec![false; case.n()];
    let mut groups = Vec::new();
    for group in &plan.groups {
        assert!(!group.devices.is_empty() && group.devices.is_sorted());
        let members: Vec<usize> = group.devices.iter().map(|&id| id as usize).collect();
        members.iter().for_each(|&i| assert!(!std::mem::replace(&mut seen[i], true), "device {i} twice"));
        assert!(case.valid(&members));
        assert_eq!(group.experts.keys().copied().collect::<Vec<_>>(), group.devices);
        let held: Vec<(usize, Vec<usize>)> =
            group.experts.iter().map(|(i, e)| (*i as usize, e.iter().map(|e| *e as usize).collect())).collect();
        let mut experts: Vec<usize> = held.iter().flat_map(|(_, experts)| experts.clone()).collect();
        experts.sort_unstable();
        assert_eq!(experts, (0..case.expert_flop.len()).collect::<Vec<_>>(), "each expert once");
        held.iter().for_each(|(i, experts)| assert!(experts.len() as u64 <= case.memory[*i], "memory of {i}"));
        near(case.makespan(&held), group.makespan_ms);
        groups.push(members);
    }
    let idle: Vec<usize> = (0..case.n()).filter(|&i| !seen[i]).collect();
    assert_eq!(plan.idle_devices.iter().map(|&id| id as usize).collect::<Vec<_>>(), idle);
    assert!(options.allow_idle || idle.is_empty(), "dropped {idle:?}");
    near(case.objective(&groups), plan.objective_ms);
    assert_eq!(plan.groups.iter().map(|group| group.objective_ms).fold(0.0, f64::max), plan.objective_ms);
    let terms = &plan.terms;
    near(terms.gamma * (terms.compute_ms + terms.communication_ms) + terms.all_reduce_ms, plan.objective_ms);
    assert!(plan.gap_bound >= 0.0 && plan.gap_bound.is_finite());
    assert!(!plan.optimal || plan.gap_bound == 0.0);
    Some(plan)
}

fn without_time(mut plan: Plan) -> Plan {
    plan.elapsed_ms = 0.0;
    plan
}

fn solve(case: &Case, options: Options) -> Option<Plan> {
    check(case, options, run(case, options))
}

#[test]
fn small_clusters_are_planned_as_by_brute_force() {
    let mut random = Random::new(1);
    let (mut plans, mut by_search) = (0, 0);
    for round in 0..400 {
        let n = if round < 360 { 1 + round % 8 } else { 9 };
        let case = random_case(&mut random, n);
        let Some(optimum) = case.optimum(false) else {
            assert_eq!(solve(&case, options(Algorithm::Auto)), None);
            continue;
        };
        let found = solve(&case, options(Algorithm::Auto)).unwrap();
        near(found.objective_ms, optimum);
        assert!(found.optimal && found.algorithm == "exact", "{found:?}");
        near(solve(&case, options(Algorithm::Exact)).unwrap().objective_ms, optimum);
        let searched = solve(&case, options(Algorithm::Search)).unwrap();
        // The bound holds.
        assert!(
            searched.objective_ms <= optimum * (1.0 + searched.gap_bound) * (1.0 + ROUNDING),
            "{searched:?}, {optimum}"
        );
        by_search += usize::from(searched.objective_ms <= optimum * (1.0 + ROUNDING));
        let lysi = solve(&case, options(Algorithm::Lysi)).unwrap();
        assert!(lysi.objective_ms <= optimum * (1.0 + lysi.gap_bound) * (1.0 + ROUNDING), "{lysi:?}, {optimum}");
        plans += 1;
    }
    assert!(plans > 250, "{plans} feasible cases");
    assert!(by_search * 100 >= plans * 99, "search alone found {by_search} of {plans} optima");
}

#[test]
fn idle_devices_are_planned_as_by_brute_force() {
    let mut random = Random::new(2);
    let idle = |algorithm| options(algorithm).allow_idle(true);
    let (mut plans, mut with_idle) = (0, 0);
    for round in 0..300 {
        let case = random_case(&mut random, if round < 280 { 1 + round % 7 } else { 8 });
        let Some(optimum) = case.optimum(true) else { continue };
        let found = solve(&case, idle(Algorithm::Auto)).unwrap();
        near(found.objective_ms, optimum);
        assert!(found.optimal);
        with_idle += usize::from(!found.idle_devices.is_empty());
        let searched = solve(&case, idle(Algorithm::Search)).unwrap();
        assert!(searched.objective_ms <= optimum * (1.0 + searched.gap_bound) * (1.0 + ROUNDING));
        solve(&case, idle(Algorithm::Lysi)).unwrap();
        plans += 1;
    }
    assert!(plans > 150 && with_idle > 10, "{plans} plans, {with_idle} with idle devices");
}

#[test]
fn makespans_are_the_least_there_are() {
    let mut random = Random::new(3);
    let mut placed = 0;
    for round in 0..400 {
        let mut case = random_case(&mut random, 1 + round % 4);
        let experts = 1 + random.below(8);
        let uneven = random.below(3) != 0;
        case.expert_flop = (0..experts).map(|_| if uneven { random.scale(1e8, 1e10).round() } else { 1e9 }).collect();
        case.expert_load = None;
        case.memory = (0..case.n()).map(|_| random.below(experts + 2) as u64).collect();
        let Some(plan) = solve(&case, options(Algorithm::Auto)) else { continue };
        let lysi = solve(&case, options(Algorithm::Auto).placement(PlacementKind::Lysi)).unwrap();
        for (group, lysi) in plan.groups.iter().zip(&lysi.groups) {
            let members: Vec<usize> = group.devices.iter().map(|&id| id as usize).collect();
            near(group.makespan_ms, case.least_makespan(&members));
            assert!(group.makespan_ms <= lysi.makespan_ms * (1.0 + ROUNDING));
            placed += 1;
        }
    }
    assert!(placed > 250, "{placed}");
}

/// Spoils a case in one of many ways that are still well-formed.
fn hostile(random: &mut Random, case: &mut Case) {
    let (n, experts) = (case.n(), case.expert_flop.len());
    match random.below(12) {
        0 => case.memory = vec![0; n],
        1 => case.memory[random.below(n)] = 0,
        2 => {
            // Exactly enough, in one device.
            case.memory = vec![0; n];
            case.memory[random.below(n)] = experts as u64;
        }
        3 => case.memory = vec![1_000_000_000_000_000; n],
        4 => {
            (0..n).for_each(|i| case.flops[i] = case.flops[0]);
            case.alpha = vec![vec![0.0; n]; n];
            case.beta = vec![vec![0.0; n]; n];
            case.tiers = None;
        }
        5 => case.expert_flop = vec![0.0; experts],
        6 => case.flops[random.below(n)] = 1e-30,
        7 => case.flops[random.below(n)] = 1e30,
        8 => {
            case.expert_flop[random.below(experts)] = 1e30;
            case.p2p_mb = 1e30;
            case.all_reduce_mb = 1e30;
        }
        9 => {
            case.p2p_mb = 0.0;
            case.all_reduce_mb = 0.0;
            case.eta = 0.0;
        }
        10 => {
            let one = random.below(n);
            (0..n).for_each(|j| case.alpha[one][j] = 1e30);
            case.tiers = None;
        }
        _ => {
            let mut load = vec![0.0; experts];
            load[random.below(experts)] = 1e-30;
            case.expert_load = Some(load);
        }
    }
}

#[test]
fn random_inputs_have_valid_answers() {
    inputs_have_valid_answers(0);
}

/// The second half of the inputs is a test of its own, so that two CPUs share the work.
#[test]
fn more_random_inputs_have_valid_answers() {
    inputs_have_valid_answers(INPUTS / 2);
}

/// Ten thousand, or a part of them.
const INPUTS: u64 = 10_000;

fn inputs_have_valid_answers(first: u64) {
    // A generous limit that noise does not reach; `cargo bench --bench plan` measures times.
    let limit_s = if cfg!(debug_assertions) { 60.0 } else { 4.0 };
    let (mut plans, mut worse) = (0, 0);
    let sample = Sample::new(250, INPUTS / 2);
    for round in sample.numbers().map(|number| first + number) {
        // Any input can be made without the others.
        let mut random = Random::new(round);
        let n = match round {
            _ if round % 501 == 0 => 64,
            _ if round % 151 == 0 => 17 + random.below(48),
            _ if round % 75 == 0 => 12 + random.below(5),
            _ => 1 + random.below(11),
        };
        let mut case = random_case(&mut random, n);
        if round % 1503 == 0 {
            // The hardest to search.
            case.structureless(&mut random);
        } else if round % 7 == 0 {
            case.layered(&mut random);
        }
        if round % 2 == 0 {
            hostile(&mut random, &mut case);
        }
        let asked = options(Algorithm::Auto).allow_idle(round % 5 == 0);
        let start = cpu_s();
        let outcome = run(&case, asked);
        assert!(cpu_s() - start < limit_s, "over {limit_s} s for input {round}, {case:?}");
        let found = check(&case, asked, outcome);
        let lysi = solve(&case, asked.algorithm(Algorithm::Lysi));
        assert_eq!(found.is_some(), lysi.is_some());
        let (Some(found), Some(lysi)) = (found, lysi) else { continue };
        plans += 1;
        assert!(
            found.objective_ms <= lysi.objective_ms * (1.0 + ROUNDING),
            "{} {}",
            found.objective_ms,
            lysi.objective_ms
        );
        // The bound holds for the least objective, and so for the found one.
        for plan in [&found, &lysi] {
            let bound = plan.objective_ms / (1.0 + plan.gap_bound);
            assert!(bound <= found.objective_ms * (1.0 + ROUNDING) + 1e-200, "{plan:?} {found:?} {case:?}");
        }
        worse += usize::from(lysi.objective_ms > found.objective_ms * 1.01);
        if round % 20 == 0 {
            let again = solve(&case, asked).map(without_time);
            assert_eq!(again, Some(without_time(found)), "the same input, another plan");
        }
    }
    let all = sample.len() as usize;
    assert!(
        plans * 10 > all * 7 && worse * 10 > all,
        "{plans} plans of {all}, the published algorithm worse in {worse}"
    );
}
