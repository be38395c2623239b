//! Replicas in the planner: invariants on random inputs, balance if memory suffices, and few moves.

// Each test uses a part of it.
#[allow(dead_code)]
mod plan_brute;
use aristos_plan::cluster::Cluster;
use aristos_plan::{Algorithm, Objective, Options, Outcome, Plan, Replication, Workload, plan, plan_from, replan};
use plan_brute::{Case, Random, near, random_case};

fn inputs(case: &Case) -> (Cluster, Workload) {
    (Cluster::from_json(&case.cluster_json()).unwrap(), Workload::from_json(&case.workload_json()).unwrap())
}

fn planned(cluster: &Cluster, workload: &Workload, options: Options) -> Option<Plan> {
    match plan(cluster, workload, options).unwrap() {
        Outcome::Plan(plan) => Some(plan),
        Outcome::Infeasible(_) => None,
    }
}

/// FLOP of each source device's tokens that each device computes, from the plan alone: `[source][device]`.
fn flow(case: &Case, group: &aristos_plan::PlannedGroup) -> Vec<Vec<f64>> {
    let (costs, m) = (case.costs(), group.devices.len());
    let mut flow = vec![vec![0.0; m]; m];
    for (j, id) in group.devices.iter().enumerate() {
        for &e in &group.experts[id] {
            let replicas = group.replicas.iter().find(|replicas| replicas.expert == e);
            for (i, row) in flow.iter_mut().enumerate() {
                let share = replicas.map_or(1.0, |replicas| {
                    replicas.split[i][replicas.devices.iter().position(|device| device == id).unwrap()]
                });
                row[j] += costs[e as usize] * share;
            }
        }
    }
    flow
}

/// Checks the invariants of every plan.
#[track_caller]
fn check(case: &Case, plan: &Plan) {
    let total: f64 = case.costs().iter().sum();
    for group in &plan.groups {
        let mut holders = vec![0usize; case.expert_flop.len()];
        for id in &group.devices {
            let held = &group.experts[id];
            assert!(held.is_sorted_by(|a, b| a < b) && held.len() as u64 <= case.memory[*id as usize], "{held:?}");
            held.iter().for_each(|&e| holders[e as usize] += 1);
        }
        assert!(holders.iter().all(|&n| n > 0));
        let replicated = holders.iter().filter(|&&n| n > 1).count();
        assert_eq!(replicated, group.replicas.len());
        for replicas in &group.replicas {
            assert_eq!(replicas.devices.len(), holders[replicas.expert as usize]);
            assert_eq!(replicas.split.len(), group.devices.len());
            for row in &replicas.split {
                assert!(row.iter().all(|share| (0.0..=1.0 + 1e-9).contains(share)));
                near(row.iter().sum(), 1.0);
            }
        }
        let flow = flow(case, group);
        let (mut compute, mut exchange) = (0.0f64, 0.0f64);
        for (j, id) in group.devices.iter().enumerate() {
            let to = |i: usize, j: usize| match i == j || group.experts[&group.devices[j]].is_empty() {
                true => 0.0,
                false => {
                    let (a, b) = (group.devices[i] as usize, group.devices[j] as usize);
                    case.alpha[a][b]
                        + case.beta[a][b] * case.p2p_mb * if total > 0.0 { flow[i][j] / total } else { 0.0 }
                }
            };
            compute = compute.max(flow.iter().map(|row| row[j]).sum::<f64>() / case.flops[*id as usize]);
            let (send, receive): (f64, f64) =
                ((0..flow.len()).map(|other| to(j, other)).sum(), (0..flow.len()).map(|other| to(other, j)).sum());
            exchange = exchange.max(send.max(receive));
        }
        near(plan.terms.gamma * (compute + case.eta * exchange) + plan.terms.all_reduce_ms, group.objective_ms);
        if let Some(least) = group.least_makespan_ms {
            near(compute, group.makespan_ms);
            assert!(least <= group.makespan_ms * (1.0 + 1e-9), "{least} {}", group.makespan_ms);
        }
    }
    let worst = plan.groups.iter().map(|group| group.objective_ms).fold(0.0, f64::max);
    near(worst, plan.objective_ms);
    assert!(plan.gap_bound >= 0.0 && plan.gap_bound.is_finite());
}

#[test]
fn whatever_is_asked_for_the_plan_is_one_and_no_worse_than_without() {
    let mut random = Random::new(11);
    let (mut replicated, mut limited) = (0, 0);
    for round in 0..50 {
        let n = 2 + random.below(5);
        let case = random_case(&mut random, n);
        let (cluster, workload) = inputs(&case);
        let Some(without) = planned(&cluster, &workload, Options::default()) else { continue };
        for replication in [Replication::AtMost(0), Replication::AtMost(1), Replication::Auto] {
            let plan = planned(&cluster, &workload, Options::default().replicas(replication)).unwrap();
            check(&case, &plan);
            assert!(plan.objective_ms <= without.objective_ms * (1.0 + 1e-9), "round {round}");
            let count = usize::from(plan.groups.iter().any(|group| !group.replicas.is_empty()));
            assert!(count == 0 || replication != Replication::AtMost(0), "round {round}");
            *(if replication == Replication::Auto { &mut replicated } else { &mut limited }) += count;
        }
    }
    assert!(replicated > 7 && limited > 5, "{replicated} and {limited} plans with replicas");
}

/// Devices of equal rate with ideal links, and a quarter of eight experts with 70% of the tokens.
fn hot(devices: usize, memory: u64) -> (Cluster, Workload) {
    let devices: Vec<String> = (0..devices)
        .map(|i| format!(r#"{{"id": {i}, "host": "h", "flop_per_ms": 1e9, "memory_experts": {memory}}}"#))
        .collect();
    let text = format!(
        r#"{{"version": 1, "devices": [{}], "links": {{"tiers": [{{"size": {}, "alpha_ms": 0.001, "beta_ms_per_mb": 0.001}}]}}}}"#,
        devices.join(", "),
        devices.len()
    );
    let mut workload = Workload::new(vec![1e9; 8]);
    let load = [350.0, 350.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0];
    workload.set_load(load.to_vec(), "loads").unwrap();
    (Cluster::from_json(&text).unwrap(), workload)
}

#[test]
fn with_room_no_device_has_more_than_its_part() {
    // Memory for one group only.
    for (devices, memory) in [(2, 7), (3, 7), (4, 3), (5, 3)] {
        let (cluster, workload) = hot(devices, memory);
        let without = planned(&cluster, &workload, Options::default()).unwrap();
        let plan = planned(&cluster, &workload, Options::default().replicas(Replication::Auto)).unwrap();
        let [group] = &plan.groups[..] else { panic!("{} groups", plan.groups.len()) };
        let most = 8.0 * (0.35f64 * devices as f64).max(1.0);
        assert!(without.groups[0].makespan_ms >= most * (1.0 - 1e-9));
        near(group.makespan_ms, 8.0);
        if devices > 2 {
            near(group.least_makespan_ms.unwrap(), 8.0);
        }
        let copies: usize = group.replicas.iter().map(|replicas| replicas.devices.len() - 1).sum();
        assert!(copies < devices, "{copies} replicas on {devices} devices");
    }
}

#[test]
fn memory_and_the_number_asked_for_are_kept() {
    let (cluster, workload) = hot(4, 3);
    for n in 0..3 {
        let plan = planned(&cluster, &workload, Options::default().replicas(Replication::AtMost(n))).unwrap();
        let held: Vec<usize> = plan.groups[0].experts.values().map(Vec::len).collect();
        assert!(held.iter().all(|&held| held <= 3), "{held:?}");
        assert_eq!(n > 0, !plan.groups[0].replicas.is_empty());
    }
}

#[test]
fn from_a_plan_in_use_little_is_moved() {
    let (cluster, workload) = hot(4, 3);
    let mut even = Workload::new(vec![1e9; 8]);
    even.set_load(vec![1.0; 8], "loads").unwrap();
    let current = planned(&cluster, &even, Options::default()).unwrap();
    let options = Options::default().replicas(Replication::Auto);
    let Outcome::Plan(next) = plan_from(&cluster, &workload, options, Some(&current)).unwrap() else { panic!() };
    near(next.groups[0].makespan_ms, next.groups[0].least_makespan_ms.unwrap());
    let change = replan(&cluster, &workload, &current, &next, 1.0).unwrap();
    assert!(change.moved_experts <= 3 && change.gain_ms > 0.0, "{change:?}");
    near(change.planned_ms, next.objective_ms);
    // A second replan moves no expert.
    let Outcome::Plan(again) = plan_from(&cluster, &workload, options, Some(&next)).unwrap() else { panic!() };
    let change = replan(&cluster, &workload, &next, &again, 1.0).unwrap();
    assert_eq!(change.moved_experts, 0);
    assert!(again.objective_ms <= next.objective_ms * (1.0 + 1e-9));
}

#[test]
fn what_cannot_be_is_one_line() {
    let (cluster, workload) = hot(4, 3);
    let options = Options::default().replicas(Replication::Auto);
    let published = options.objective(Objective::Published).algorithm(Algorithm::Search);
    let line = plan(&cluster, &workload, published).unwrap_err().to_string();
    assert!(line.starts_with("replicas are asked for under the published objective"), "{line}");
    let good = planned(&cluster, &workload, options).unwrap();
    let refused = |change: &dyn Fn(&mut Plan), part: &str| {
        let mut plan = good.clone();
        change(&mut plan);
        let line = plan_from(&cluster, &workload, options, Some(&plan)).unwrap_err().to_string();
        assert!(line.contains(part), "{line:?} does not say {part:?}");
    };
    refused(&|plan| plan.groups[0].replicas[0].devices = vec![0], "groups[0].replicas[0].devices is [0]");
    refused(&|plan| plan.groups[0].replicas[0].split[1][0] = f64::NAN, "groups[0].replicas[0].split");
    refused(&|plan| plan.groups[0].replicas.clear(), "once in the group");
}
