//! The planner against brute force, on random and hostile inputs, and the published case.

mod plan_brute;

use std::time::{Duration, Instant};

use aristos::cluster::Cluster;
use aristos::plan::{Algorithm, Options, Outcome, PlacementKind, Plan, Workload, plan};
use plan_brute::{Case, Random, random_case};

/// Sums in another order differ by this much.
const ROUNDING: f64 = 1e-9;

fn run(case: &Case, options: Options) -> Outcome {
    let cluster = Cluster::from_json(&case.cluster_json()).unwrap();
    let workload = Workload::from_json(&case.workload_json()).unwrap();
    plan(&cluster, &workload, options).unwrap()
}

fn options(algorithm: Algorithm) -> Options {
    Options { algorithm, ..Options::default() }
}

/// Everything that holds of every answer; gives the plan, where there is one.
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

#[track_caller]
fn near(a: f64, b: f64) {
    assert!((a - b).abs() <= ROUNDING * a.abs().max(b.abs()), "{a} and {b}");
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
        // The bound is true.
        assert!(searched.objective_ms <= optimum * (1.0 + searched.gap_bound) * (1.0 + ROUNDING), "{searched:?}, {optimum}");
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
    let idle = |algorithm| Options { allow_idle: true, ..options(algorithm) };
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
        let lysi = solve(&case, Options { placement: Some(PlacementKind::Lysi), ..Options::default() }).unwrap();
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
fn ten_thousand_inputs_have_valid_answers() {
    let mut random = Random::new(4);
    let limit = Duration::from_secs(if cfg!(debug_assertions) { 20 } else { 1 });
    let (mut plans, mut worse) = (0, 0);
    for round in 0..10_000 {
        let n = match round {
            _ if round % 200 == 0 => 64,
            _ if round % 50 == 0 => 17 + random.below(48),
            _ => 1 + random.below(14),
        };
        let mut case = random_case(&mut random, n);
        if round % 2 == 0 {
            hostile(&mut random, &mut case);
        }
        let start = Instant::now();
        let asked = Options { allow_idle: round % 5 == 0, ..options(Algorithm::Auto) };
        let found = solve(&case, asked);
        assert!(start.elapsed() < limit, "{:?} for {case:?}", start.elapsed());
        let lysi = solve(&case, Options { algorithm: Algorithm::Lysi, ..asked });
        assert_eq!(found.is_some(), lysi.is_some());
        let (Some(found), Some(lysi)) = (found, lysi) else { continue };
        plans += 1;
        assert!(found.objective_ms <= lysi.objective_ms * (1.0 + ROUNDING), "{} {}", found.objective_ms, lysi.objective_ms);
        assert!(lysi.objective_ms <= found.objective_ms * (1.0 + lysi.gap_bound) * (1.0 + ROUNDING) || !found.optimal);
        worse += usize::from(lysi.objective_ms > found.objective_ms * 1.01);
        if round % 20 == 0 {
            let again = solve(&case, asked).map(without_time);
            assert_eq!(again, Some(without_time(found)), "the same input, another plan");
        }
    }
    assert!(plans > 7_000 && worse > 1_000, "{plans} plans, the published algorithm worse in {worse}");
}

/// The published case, as the command sees it.
mod command {
    use std::path::Path;
    use std::process::{Command, Output};

    use serde_json::{Value, json};

    const CLUSTER: &str = include_str!("../examples/plan/cluster.json");
    const WORKLOAD: &str = include_str!("../examples/plan/workload.json");
    const OBJECTIVE_MS: f64 = 1210.4297966597494;

    fn aristos(folder: &Path, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
        command.args(["plan", "--cluster", "c.json", "--workload", "w.json"]).args(args).current_dir(folder);
        command.output().unwrap()
    }

    fn folder(cluster: &str, workload: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("c.json"), cluster).unwrap();
        std::fs::write(folder.path().join("w.json"), workload).unwrap();
        folder
    }

    fn parsed(output: &Output) -> Value {
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The example with its tiers written out, the diagonal as in the notebook.
    fn written_out() -> String {
        let mut cluster: Value = serde_json::from_str(CLUSTER).unwrap();
        let rows = |inside: f64, between: f64| -> Vec<Vec<f64>> {
            let link = |i: usize, j: usize| if i != j && i / 4 == j / 4 { inside } else { between };
            (0..16).map(|i| (0..16).map(|j| link(i, j)).collect()).collect()
        };
        cluster["links"] = json!({"alpha_ms": rows(0.009, 0.03), "beta_ms_per_mb": rows(0.014, 0.054)});
        cluster.to_string()
    }

    #[test]
    fn the_notebook_is_planned_as_published() {
        for cluster in [CLUSTER.to_string(), written_out()] {
            let folder = folder(&cluster, WORKLOAD);
            for algorithm in ["lysi", "auto", "exact", "search"] {
                let args = ["--algorithm", algorithm, "--placement", "lysi", "--json", "--out", "plan.json"];
                let plan = parsed(&aristos(folder.path(), &args));
                assert_eq!(plan["objective_ms"], json!(OBJECTIVE_MS), "{algorithm}");
                assert_eq!(plan["optimal"], json!(true));
                assert_eq!(plan["terms"]["gamma"], json!(144.0));
                let groups = plan["groups"].as_array().unwrap();
                assert_eq!(groups.len(), 1);
                for device in 0..16u32 {
                    let mut held: Vec<u32> = (61 - 3 * device..64 - 3 * device).collect();
                    held.insert(0, device);
                    assert_eq!(groups[0]["experts"][device.to_string()], json!(held));
                }
                let written: Value =
                    serde_json::from_slice(&std::fs::read(folder.path().join("plan.json")).unwrap()).unwrap();
                assert_eq!(written, plan);
            }
        }
    }

    #[test]
    fn what_was_asked_for_is_shown_and_drawn() {
        let folder = folder(CLUSTER, WORKLOAD);
        let output = aristos(folder.path(), &["--explain", "--plot", "p.svg", "--plot-latency", "l.svg"]);
        let text = String::from_utf8(output.stdout).unwrap();
        for part in ["1 group of 16 devices, 64 experts", "1210.4298 ms", "optimal", "one per device", "not valid: a group holds 32"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        let json = parsed(&aristos(folder.path(), &["--explain", "--json"]));
        let names: Vec<&str> =
            json["explanation"]["alternatives"].as_array().unwrap().iter().map(|a| a["name"].as_str().unwrap()).collect();
        for name in ["chosen", "all together", "one per node", "one per device", "lysi"] {
            assert!(names.contains(&name), "{names:?}");
        }
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        assert!(read("p.svg").matches("<rect").count() >= 32, "a cell and a bar per device");
        let latency = read("l.svg");
        assert!(latency.contains("EP = 4") && latency.contains("EP = 16") && latency.contains("<circle"));
    }

    #[test]
    fn a_measured_load_is_replanned_with_the_cost_of_moving() {
        let folder = folder(CLUSTER, WORKLOAD);
        parsed(&aristos(folder.path(), &["--json", "--out", "old.json"]));
        let tokens: Vec<u32> = (0..64).map(|e| if e < 4 { 1000 } else { 100 }).collect();
        std::fs::write(folder.path().join("report.json"), json!({"tokens_per_expert": tokens, "step_s": 1.0}).to_string())
            .unwrap();
        let args = ["--expert-load-from", "report.json", "--current", "old.json", "--expert-mb", "100", "--json"];
        let replan = parsed(&aristos(folder.path(), &args))["replan"].clone();
        let number = |key: &str| replan[key].as_f64().unwrap();
        assert!(number("gain_ms") > 0.0 && number("moved_experts") > 0.0 && number("move_ms") > 0.0, "{replan}");
        assert_eq!(number("moved_mb"), 100.0 * number("moved_experts"));
        assert!((number("repaid_after_iterations") - number("move_ms") / number("gain_ms")).abs() < 1e-9);
        // Device 0 holds the four hot experts: it takes 4 of the 10 parts that all take.
        let kept = parsed(&aristos(folder.path(), &["--current", "old.json", "--json"]))["replan"].clone();
        assert_eq!((kept["moved_experts"].clone(), kept["repaid_after_iterations"].clone()), (json!(0), json!(null)));
    }

    #[test]
    fn no_plan_is_exit_code_2_and_the_shortage() {
        let folder = folder(&CLUSTER.replace("\"memory_experts\": 32", "\"memory_experts\": 3"), WORKLOAD);
        let output = aristos(folder.path(), &[]);
        let line = "aristos: no plan: memory: a group holds all 64 experts, all 16 devices together hold 48: 16 short\n";
        assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(2), line));
        let output = aristos(folder.path(), &["--json"]);
        assert_eq!(output.status.code(), Some(2));
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["feasible"], json!(false));
        assert!(json["shortage"].as_str().unwrap().contains("16 short"));
    }

    /// A change somewhere in the example must be refused with a line that says all of `parts`.
    #[track_caller]
    fn refused(cluster: &str, workload: &str, parts: &[&str]) {
        let folder = folder(cluster, workload);
        let output = aristos(folder.path(), &["--json"]);
        let line = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{parts:?} {line}");
        assert!(output.stdout.is_empty() && line.starts_with("aristos: ") && line.lines().count() == 1, "{line}");
        parts.iter().for_each(|part| assert!(line.contains(part), "{line:?} does not say {part:?}"));
    }

    fn changed(text: &str, path: &str, value: Value) -> String {
        let mut json: Value = serde_json::from_str(text).unwrap();
        *json.pointer_mut(path).unwrap() = value;
        json.to_string()
    }

    fn without(text: &str, path: &str, key: &str) -> String {
        let mut json: Value = serde_json::from_str(text).unwrap();
        json.pointer_mut(path).unwrap().as_object_mut().unwrap().remove(key).unwrap();
        json.to_string()
    }

    #[test]
    fn each_wrong_field_of_a_cluster_is_named() {
        let bad = |path: &str, value: Value, parts: &[&str]| {
            refused(&changed(CLUSTER, path, value), WORKLOAD, &[&["c.json"], parts].concat());
        };
        bad("/version", json!(2), &["version is 2", "expected 1"]);
        bad("/devices", json!([]), &["devices is empty"]);
        bad("/devices/3/id", json!(2), &["devices[3].id is 2", "devices[2] has it"]);
        bad("/devices/3/id", json!(-2), &["devices[3].id", "-2", "whole number"]);
        bad("/devices/3/host", json!(7), &["devices[3].host", "7", "string"]);
        for key in ["flop_per_ms", "memory_experts"] {
            let path = format!("devices[5].{key}");
            for value in [json!("fast"), json!(null), json!([1])] {
                bad(&format!("/devices/5/{key}"), value, &[&path, "number"]);
            }
            bad(&format!("/devices/5/{key}"), json!(-3), &[&path, "-3", "expected"]);
        }
        bad("/devices/5/flop_per_ms", json!(0), &["devices[5].flop_per_ms is 0", "expected"]);
        bad("/devices/5/flop_per_ms", json!(1e300), &["devices[5].flop_per_ms is 1e300", "expected"]);
        bad("/devices/5/memory_experts", json!(1.5), &["devices[5].memory_experts", "1.5", "whole number"]);
        bad("/devices/5/memory_experts", json!(u64::MAX), &["devices[5].memory_experts", "whole number"]);
        bad("/links/tiers/0/size", json!(3), &["links.tiers[0].size is 3", "divides 16"]);
        bad("/links/tiers/1/size", json!(8), &["links.tiers[1].size is 8", "all 16"]);
        bad("/links/tiers/0/size", json!(0), &["links.tiers[0].size is 0"]);
        bad("/links/tiers/1/alpha_ms", json!(-0.1), &["links.tiers[1].alpha_ms is -0.1", "expected"]);
        bad("/links/tiers", json!([]), &["links.tiers is empty"]);
        bad("/links", json!({}), &["links is empty"]);
        bad("/links", json!({"alpha_ms": [[0.0]]}), &["links", "beta_ms_per_mb"]);
        for (path, key) in [("", "version"), ("", "devices"), ("", "links"), ("/devices/2", "id"), ("/devices/2", "host")] {
            refused(&without(CLUSTER, path, key), WORKLOAD, &["c.json", "missing field", key]);
        }
        for (path, key) in [("/devices/2", "flop_per_ms"), ("/links/tiers/1", "size"), ("/links/tiers/1", "alpha_ms")] {
            refused(&without(CLUSTER, path, key), WORKLOAD, &["c.json", "missing field", key]);
        }
        refused(&CLUSTER.replacen("\"host\"", "\"node\"", 1), WORKLOAD, &["devices[0]", "unknown field `node`"]);
        refused(&CLUSTER.replacen("134160000000", "NaN", 1), WORKLOAD, &["devices[0].flop_per_ms", "`NaN`"]);
        refused(&CLUSTER.replacen("134160000000", "-Infinity", 1), WORKLOAD, &["devices[0].flop_per_ms", "Infinity"]);
        refused(&CLUSTER.replacen("134160000000", "1e999", 1), WORKLOAD, &["devices[0].flop_per_ms", "out of range"]);
        refused("", WORKLOAD, &["c.json"]);
        refused("[]", WORKLOAD, &["c.json"]);
        refused(&format!("{CLUSTER}x"), WORKLOAD, &["c.json", "expected nothing more"]);
        refused(&CLUSTER[..CLUSTER.len() / 2], WORKLOAD, &["c.json", "EOF"]);
    }

    #[test]
    fn each_wrong_place_of_a_matrix_is_named() {
        let written = written_out();
        let bad = |path: &str, value: Value, parts: &[&str]| {
            refused(&changed(&written, path, value), WORKLOAD, &[&["c.json"], parts].concat());
        };
        for key in ["alpha_ms", "beta_ms_per_mb"] {
            let at = |place: &str| format!("/links/{key}{place}");
            bad(&at("/3/4"), json!(-1.0), &[&format!("links.{key}[3][4] is -1"), "expected"]);
            bad(&at("/3/4"), json!("x"), &[&format!("links.{key}[3][4]"), "number"]);
            bad(&at("/3/4"), json!(null), &[&format!("links.{key}[3][4]"), "number"]);
            bad(&at("/3"), json!([1.0, 2.0]), &[&format!("links.{key}[3] has 2 numbers, expected 16")]);
            bad(&at(""), json!([[0.0]]), &[&format!("links.{key} has 1 rows, expected 16")]);
        }
        refused(&written.replacen("0.014", "NaN", 1), WORKLOAD, &["links.beta_ms_per_mb[0][1]", "`NaN`"]);
        bad("/links/tiers", json!([]), &["expected one or the other"]);
    }

    #[test]
    fn each_wrong_field_of_a_workload_is_named() {
        let keys = [
            "p2p_buffer_mb",
            "p2p_frequency",
            "all_reduce_buffer_mb",
            "num_layers",
            "moe_frequency",
            "global_batch_size",
            "mini_batch_size",
            "recomputation_amount",
        ];
        for key in keys {
            let path = format!("/{key}");
            refused(CLUSTER, &changed(WORKLOAD, &path, json!(-1)), &["w.json", &format!("{key} is -1"), "expected"]);
            refused(CLUSTER, &changed(WORKLOAD, &path, json!("4")), &["w.json", key, "number"]);
            refused(CLUSTER, &without(WORKLOAD, "", key), &["w.json", "missing field", key]);
            let nan = changed(WORKLOAD, &path, json!("NaN")).replace("\"NaN\"", "NaN");
            refused(CLUSTER, &nan, &["w.json", key, "`NaN`"]);
        }
        for key in ["num_layers", "moe_frequency", "global_batch_size", "mini_batch_size"] {
            refused(CLUSTER, &changed(WORKLOAD, &format!("/{key}"), json!(0)), &["w.json", &format!("{key} is 0")]);
        }
        refused(CLUSTER, &changed(WORKLOAD, "/expert_flop", json!([])), &["w.json", "expert_flop is empty"]);
        refused(CLUSTER, &changed(WORKLOAD, "/expert_flop/7", json!(-5)), &["w.json", "expert_flop[7] is -5"]);
        refused(CLUSTER, &without(WORKLOAD, "", "expert_flop"), &["w.json", "missing field `expert_flop`"]);
        let load = |load: Value| {
            let mut json: Value = serde_json::from_str(WORKLOAD).unwrap();
            json["expert_load"] = load;
            json.to_string()
        };
        refused(CLUSTER, &load(json!([1.0])), &["w.json", "expert_load has 1 numbers, expected 64"]);
        refused(CLUSTER, &load(json!(vec![0.0; 64])), &["w.json", "expert_load is all zeros"]);
        let mut one = vec![1.0; 64];
        one[9] = -1.0;
        refused(CLUSTER, &load(json!(one)), &["w.json", "expert_load[9] is -1"]);
        refused(CLUSTER, &load(json!(7)).replace("expert_load", "load"), &["w.json", "unknown field `load`"]);
    }
}
