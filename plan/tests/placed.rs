//! The planner by the placed objective: against brute force, against the published objective's plans, and on random and hostile inputs.

// Each test uses a part of it.
#[allow(dead_code)]
mod plan_brute;
#[path = "../../tests/sample/mod.rs"]
mod sample;

use aristos_plan::cluster::Cluster;
use aristos_plan::{Algorithm, Objective, Options, Outcome, Plan, Workload, explain, plan};
use plan_brute::{Case, ROUNDING, Random, cpu_s, near, random_case};
use sample::Sample;

fn run(case: &Case, options: Options) -> Outcome {
    let cluster = Cluster::from_json(&case.cluster_json()).unwrap();
    let workload = Workload::from_json(&case.workload_json()).unwrap();
    plan(&cluster, &workload, options).unwrap()
}

/// Groups and, of each member, the experts.
fn held(plan: &Plan) -> (Vec<Vec<usize>>, Vec<Vec<Vec<usize>>>) {
    let experts = |experts: &Vec<u32>| experts.iter().map(|e| *e as usize).collect();
    let of = |group: &aristos_plan::PlannedGroup| {
        let devices = group.devices.iter().map(|id| *id as usize).collect();
        (devices, group.devices.iter().map(|id| experts(&group.experts[id])).collect())
    };
    plan.groups.iter().map(of).unzip()
}

/// Checks the invariants of every outcome; returns the plan, if there is one.
#[track_caller]
fn check(case: &Case, options: Options, outcome: Outcome) -> Option<Plan> {
    let total: u128 = case.memory.iter().map(|m| u128::from(*m)).sum();
    let needed = case.expert_flop.len();
    let Outcome::Plan(plan) = outcome else {
        assert!(total < needed as u128, "there is a plan: {case:?}");
        return None;
    };
    assert_eq!(plan.objective, Objective::Placed);
    let (groups, held) = held(&plan);
    let mut seen = vec![false; case.n()];
    for (members, held) in groups.iter().zip(&held) {
        assert!(!members.is_empty() && members.is_sorted());
        members.iter().for_each(|&i| assert!(!std::mem::replace(&mut seen[i], true), "device {i} twice"));
        let mut experts = held.concat();
        experts.sort_unstable();
        assert_eq!(experts, (0..needed).collect::<Vec<_>>(), "each expert once");
        members.iter().zip(held).for_each(|(&i, held)| assert!(held.len() as u64 <= case.memory[i], "memory of {i}"));
    }
    let idle: Vec<u64> = (0..case.n()).filter(|&i| !seen[i]).map(|i| i as u64).collect();
    assert_eq!(plan.idle_devices, idle);
    assert!(options.allow_idle || idle.is_empty(), "dropped {idle:?}");
    near(case.placed_objective(&groups, &held), plan.objective_ms);
    assert_eq!(plan.groups.iter().map(|group| group.objective_ms).fold(0.0, f64::max), plan.objective_ms);
    let terms = &plan.terms;
    near(terms.gamma * (terms.compute_ms + terms.communication_ms) + terms.all_reduce_ms, plan.objective_ms);
    assert!(plan.gap_bound >= 0.0 && plan.gap_bound.is_finite());
    assert!(!plan.optimal || plan.gap_bound == 0.0);
    Some(plan)
}

fn solve(case: &Case, options: Options) -> Option<Plan> {
    check(case, options, run(case, options))
}

/// A case of few experts.
fn small_case(random: &mut Random, n: usize) -> Case {
    let mut case = random_case(random, n);
    let experts = 1 + random.below(6);
    let uneven = random.below(2) == 0;
    case.expert_flop = (0..experts).map(|_| if uneven { random.scale(1e8, 1e10).round() } else { 1e9 }).collect();
    case.expert_load = (random.below(4) == 0).then(|| (0..experts).map(|_| random.real(0.0, 3.0) + 0.01).collect());
    case.memory = match random.below(3) {
        0 => vec![experts as u64; n],
        1 => vec![experts.div_ceil(n) as u64; n],
        _ => (0..n).map(|_| random.below(experts + 2) as u64).collect(),
    };
    case
}

fn planned_as_by_brute_force(seed: u64, allow_idle: bool, rounds: usize) {
    let mut random = Random::new(seed);
    let (mut plans, mut by_search, mut idle) = (0, 0, 0);
    for round in 0..rounds {
        let case = small_case(&mut random, 1 + round % 7);
        let options = Options::default().allow_idle(allow_idle);
        let Some(optimum) = case.placed_optimum(allow_idle) else {
            assert_eq!(solve(&case, options), None);
            continue;
        };
        let found = solve(&case, options).unwrap();
        near(found.objective_ms, optimum);
        assert!(found.optimal && found.algorithm == "exact", "{found:?}");
        idle += usize::from(!found.idle_devices.is_empty());
        let searched = solve(&case, options.algorithm(Algorithm::Search)).unwrap();
        // The bound holds.
        let most = optimum * (1.0 + searched.gap_bound) * (1.0 + ROUNDING);
        assert!(searched.objective_ms <= most, "{searched:?}, {optimum}");
        by_search += usize::from(searched.objective_ms <= optimum * (1.0 + ROUNDING));
        plans += 1;
    }
    assert!(plans * 2 > rounds, "{plans} feasible cases");
    assert!(by_search * 100 >= plans * 95, "search alone found {by_search} of {plans} optima");
    assert!(!allow_idle || idle > 0, "no idle device in any plan");
}

#[test]
fn small_clusters_are_planned_as_by_brute_force() {
    planned_as_by_brute_force(11, false, 210);
}

#[test]
fn idle_devices_are_planned_as_by_brute_force() {
    planned_as_by_brute_force(12, true, 140);
}

/// The smallest case in which the published objective misleads: it counts devices without experts as workers.
#[test]
fn experts_are_not_cut() {
    let mut case = random_case(&mut Random::new(1), 4);
    (case.flops, case.memory) = (vec![1e9; 4], vec![2; 4]);
    (case.alpha, case.beta, case.tiers) = (vec![vec![0.0; 4]; 4], vec![vec![0.0; 4]; 4], None);
    (case.expert_flop, case.expert_load) = (vec![1e9; 2], None);
    case.schedule = [1.0, 1.0, 4.0, 1.0, 0.0];
    let found = solve(&case, Options::default()).unwrap();
    // Two passes of an expert's work for two devices' tokens.
    assert_eq!((found.objective_ms, found.optimal), (4.0, true), "{found:?}");
    assert!(
        found.groups.len() > 1 && found.groups.iter().flat_map(|group| group.experts.values()).all(|e| !e.is_empty())
    );
    let cluster = Cluster::from_json(&case.cluster_json()).unwrap();
    let workload = Workload::from_json(&case.workload_json()).unwrap();
    let all = aristos_plan::objective_ms(&cluster, &workload, &[vec![0, 1, 2, 3]], Objective::Placed).unwrap();
    assert_eq!(all, 8.0, "half of them have nothing to do");
    let published = run(&case, Options::default().objective(Objective::Published));
    let Outcome::Plan(published) = published else { panic!("{published:?}") };
    assert_eq!((published.objective_ms, published.optimal), (1.0, true), "{published:?}");
}

/// A device 10^40 times slower than the others makes their times vanish in rounding.
#[test]
fn a_device_that_takes_for_ever_is_planned() {
    let start = cpu_s();
    for round in 0..40 {
        let mut random = Random::new(round);
        let n = 2 + random.below(5);
        let mut case = random_case(&mut random, n);
        let (experts, slow) = (case.expert_flop.len() as u64, random.below(n));
        case.memory.fill(experts.div_ceil(2 * (n as u64 - 1)));
        (case.flops[slow], case.memory[slow]) = (1e-30, experts);
        solve(&case, Options::default()).unwrap();
    }
    assert!(cpu_s() - start < 60.0);
}

#[test]
fn random_inputs_have_valid_answers_no_worse_than_the_published_plan() {
    // A generous limit that noise does not reach; `cargo bench --bench plan` measures times.
    let limit_s = if cfg!(debug_assertions) { 60.0 } else { 4.0 };
    let (mut plans, mut worse) = (0, 0);
    let sample = Sample::new(30, 3_000);
    for round in sample.numbers() {
        let mut random = Random::new(round + 77);
        let n = match round {
            _ if round % 151 == 0 => 64,
            _ if round % 31 == 0 => 17 + random.below(48),
            _ => 1 + random.below(16),
        };
        let mut case = random_case(&mut random, n);
        match random.below(8) {
            0 => case.structureless(&mut random),
            1 => case.layered(&mut random),
            2 => case.expert_flop.fill(0.0),
            3 => (case.p2p_mb, case.all_reduce_mb, case.eta) = (0.0, 0.0, 0.0),
            4 => case.flops[random.below(n)] = random.pick(&[1e-30, 1e30]),
            5 => {
                let one = random.below(n);
                (0..n).for_each(|j| case.alpha[one][j] = 1e30);
                case.tiers = None;
            }
            _ => {}
        }
        let asked = Options::default().allow_idle(round % 5 == 0);
        let start = cpu_s();
        let outcome = run(&case, asked);
        assert!(cpu_s() - start < limit_s, "over {limit_s} s for input {round}, {case:?}");
        let Some(found) = check(&case, asked, outcome) else { continue };
        plans += 1;
        let Outcome::Plan(published) = run(&case, asked.objective(Objective::Published)) else { panic!("{case:?}") };
        let (groups, experts) = held(&published);
        let published_ms = case.placed_objective(&groups, &experts);
        assert!(found.objective_ms <= published_ms * (1.0 + ROUNDING), "{} {published_ms}", found.objective_ms);
        worse += usize::from(published_ms > found.objective_ms * 1.01);
        if round % 10 == 0 {
            let mut again = solve(&case, asked).unwrap();
            again.elapsed_ms = found.elapsed_ms;
            assert_eq!(again, found, "the same input, another plan");
            let cluster = Cluster::from_json(&case.cluster_json()).unwrap();
            let workload = Workload::from_json(&case.workload_json()).unwrap();
            let explanation = explain(&cluster, &workload, asked, &found).unwrap();
            near(explanation.alternatives[0].objective_ms, found.objective_ms);
        }
    }
    let all = sample.len() as usize;
    assert!(plans * 10 > all * 7 && worse * 10 > all, "{plans} plans of {all}, the published one worse in {worse}");
}
