//! Time to plan, by number of devices.
//!
//! `cargo bench --bench plan -- [--csv] [--quick]`: medians and spread of wall time and of processor time. (Only processor time is
//! meaningful on a busy machine.) Full matrices have 10% of noise on three tiers, so that no two links are equal; tiers have no noise.
//!
//! Both modes use the placed objective, or with `--published` the published one.
//!
//! `cargo bench --bench plan -- --quality [EFFORT] [--cases N] [--best FILE] [--tight]`: how far the answers are above the best known
//! ones, on N (default 120) random clusters. These have 17 to 64 devices; with the placed objective 8 to 64, and 0.25 to 4 experts per
//! device. The best known answer comes from a search with EFFORT times the usual effort (default 16; 1 for none) and from FILE, which
//! keeps the best answers ever found. A third of the clusters have two or three tiers with noise and asymmetry, a third unstructured
//! links, and a third are drawn as in the tests. `--tight` uses other clusters, with a FILE of their own, whose groups have hardly more
//! room for experts than they need.

#[path = "../plan/tests/plan_brute/mod.rs"]
#[allow(dead_code)]
mod plan_brute;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use aristos::cluster::{Cluster, Device, Link, LinkTable, Links, Matrix, Tier, Tiers};
use aristos::plan::{Objective, Options, Outcome, Workload, plan};
use rustix::time::{ClockId, clock_gettime};

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let csv = args.iter().any(|a| a == "--csv");
    let quick = args.iter().any(|a| a == "--quick");
    let objective = match args.iter().any(|a| a == "--published") {
        true => Objective::Published,
        false => Objective::Placed,
    };
    if let Some(place) = args.iter().position(|a| a == "--quality") {
        let value = |flag: &str| args.iter().position(|a| a == flag).and_then(|place| args.get(place + 1));
        let effort = args.get(place + 1).and_then(|effort| effort.parse().ok()).unwrap_or(16);
        let cases = value("--cases").and_then(|cases| cases.parse().ok()).unwrap_or(120);
        let tight = args.iter().any(|a| a == "--tight");
        return quality(objective, effort, (cases, tight), value("--best").map(Path::new));
    }
    if csv {
        println!("links,devices,mixed,groups,gap_bound,repetition,wall_ms,cpu_ms");
    } else {
        println!(
            "{:7} {:>7} {:>6} {:>7} {:>9} {:>23} {:>23}",
            "links", "devices", "", "groups", "gap", "wall ms (min to max)", "cpu ms (min to max)"
        );
    }
    for matrix in [true, false] {
        let sizes = if matrix { &[16, 64, 128, 256, 512, 1024][..] } else { &[64, 256, 1024, 4096, 16384] };
        for &n in sizes {
            for mixed in [false, true] {
                let repetitions = if quick {
                    1
                } else if n <= 1024 {
                    11
                } else {
                    3
                };
                measure(objective, &cluster(n, matrix, mixed), mixed, repetitions, csv);
            }
        }
    }
}

/// Prints the answers that exceed the best known ones by over 0.1%, and summaries. `best` is a file of the best answers of earlier runs,
/// which this updates.
fn quality(objective: Objective, effort: u32, (cases, tight): (usize, bool), best: Option<&Path>) {
    let mut random = plan_brute::Random::new(if tight { 21 } else { 7 });
    let cpu_s = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
    };
    let mut known: BTreeMap<usize, f64> =
        best.and_then(|path| serde_json::from_slice(&std::fs::read(path).ok()?).ok()).unwrap_or_default();
    let mut kinds = [("structureless", Vec::new()), ("tiers", Vec::new()), ("as tested", Vec::new())];
    let (mut done, mut slowest) = (0, (0.0f64, 0.0f64));
    println!(
        "{:>7} {:>7} {:>6} {:>14} {:>14} {:>9} {:>8} {:>8}",
        "case", "devices", "groups", "usual, ms", "best, ms", "above", "gap", "cpu s"
    );
    while done < cases {
        let placed = objective == Objective::Placed;
        let n = if placed { 8 + random.below(57) } else { 17 + random.below(48) };
        let mut case = plan_brute::random_case(&mut random, n);
        if placed {
            case.experts_per_device(&mut random);
        }
        match done % kinds.len() {
            0 => case.structureless(&mut random),
            1 => case.layered(&mut random),
            _ => {}
        }
        if tight {
            case.tight(&mut random);
        }
        let cluster = Cluster::from_json(&case.cluster_json()).expect("a cluster");
        let workload = Workload::from_json(&case.workload_json()).expect("a workload");
        let found = |effort| match plan(&cluster, &workload, Options::default().objective(objective).effort(effort)) {
            Ok(Outcome::Plan(plan)) => Some(plan),
            _ => None,
        };
        let start = (cpu_s(), Instant::now());
        let Some(usual) = found(1) else { continue };
        let seconds = (cpu_s() - start.0, start.1.elapsed().as_secs_f64());
        let best = known.entry(done).or_insert(f64::INFINITY);
        *best = best.min(usual.objective_ms);
        if effort > 1
            && let Some(longer) = found(effort)
        {
            *best = best.min(longer.objective_ms);
        }
        let share = usual.objective_ms / *best - 1.0;
        if share > 1e-3 {
            println!(
                "{done:7} {n:7} {:6} {:14.6} {best:14.6} {:8.3}% {:7.1}% {:8.3}",
                usual.groups.len(),
                usual.objective_ms,
                100.0 * share,
                100.0 * usual.gap_bound,
                seconds.0
            );
        }
        slowest = (slowest.0.max(seconds.0), slowest.1.max(seconds.1));
        let kind = done % kinds.len();
        kinds[kind].1.push(share);
        done += 1;
    }
    for (kind, above) in &kinds {
        let over = |limit: f64| above.iter().filter(|share| **share > limit).count();
        println!(
            "{kind}: {} clusters: mean {:.3}%, largest {:.3}%, {} over 0.1%, {} over 1%",
            above.len(),
            100.0 * above.iter().sum::<f64>() / above.len() as f64,
            100.0 * above.iter().fold(0.0f64, |a, b| a.max(*b)),
            over(1e-3),
            over(1e-2),
        );
    }
    println!("slowest: {:.3} s of processor time, {:.3} s", slowest.0, slowest.1);
    if let Some(path) = best {
        let text = serde_json::to_string_pretty(&known).expect("numbers");
        std::fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    }
}

fn measure(objective: Objective, cluster: &Cluster, mixed: bool, repetitions: usize, csv: bool) {
    let workload = workload();
    let n = cluster.devices.len();
    let links = if matches!(cluster.links, Links::Matrix(_)) { "matrix" } else { "tiers" };
    let cpu_ms = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 * 1e3 + time.tv_nsec as f64 * 1e-6
    };
    let (mut wall, mut cpu) = (Vec::new(), Vec::new());
    let mut answer = (0, 0.0);
    for repetition in 0..repetitions {
        let (start, start_cpu) = (Instant::now(), cpu_ms());
        let outcome = plan(cluster, &workload, Options::default().objective(objective));
        wall.push(start.elapsed().as_secs_f64() * 1e3);
        cpu.push(cpu_ms() - start_cpu);
        let Ok(Outcome::Plan(plan)) = outcome else { panic!("there is a plan") };
        answer = (plan.groups.len(), plan.gap_bound);
        if csv {
            let (wall, cpu) = (wall[repetition], cpu[repetition]);
            println!("{links},{n},{mixed},{},{:.6},{repetition},{wall:.4},{cpu:.4}", answer.0, answer.1);
        }
    }
    if !csv {
        let text = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            format!("{:.2} ({:.2} to {:.2})", times[times.len() / 2], times[0], times[times.len() - 1])
        };
        let mixed = if mixed { "mixed" } else { "" };
        let (wall, cpu) = (text(&mut wall), text(&mut cpu));
        println!("{links:7} {n:7} {mixed:>6} {:7} {:9.5} {wall:>23} {cpu:>23}", answer.0, answer.1);
    }
}

/// Nodes of 8, racks of 64; mixed: three speeds and memories.
fn cluster(n: usize, matrix: bool, mixed: bool) -> Cluster {
    let mut random = 88_172_645_463_325_252u64;
    let mut unit = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as f64 / (1u64 << 53) as f64
    };
    let speeds = [1.0, 0.5, 0.7];
    let device = |i: usize| {
        let flop_per_ms = 134_160_000_000.0 * if mixed { speeds[(i / 8 * 7 + i % 3) % 3] } else { 1.0 };
        let memory_experts = if mixed { [32, 16, 0, 8][(i * 5 + i / 8) % 4] } else { 32 };
        Device::new(i as u64, format!("n{}", i / 8), flop_per_ms, memory_experts)
    };
    let link = |alpha_ms, beta_ms_per_mb| Link { alpha_ms, beta_ms_per_mb };
    let kinds = [(8, link(0.009, 0.004)), (64, link(0.02, 0.03)), (n.max(128), link(0.03, 0.054))];
    let tiers = Tiers::new(n, kinds.map(|(size, link)| Tier { size, link }).to_vec()).expect("they nest");
    let links = if matrix {
        let (mut alpha, mut beta) = (vec![0.0; n * n], vec![0.0; n * n]);
        for i in 0..n {
            for j in (0..n).filter(|&j| j != i) {
                let link = tiers.link(i, j);
                let noise = 1.0 + 0.1 * unit();
                (alpha[i * n + j], beta[i * n + j]) = (link.alpha_ms * noise, link.beta_ms_per_mb * noise);
            }
        }
        Links::Matrix(Matrix::new(n, alpha, beta))
    } else {
        Links::Tiers(tiers)
    };
    Cluster::new((0..n).map(device).collect(), links)
}

/// The workload of the notebook, with a smaller all-reduce, so that the choice of groups matters.
fn workload() -> Workload {
    let mut workload = Workload::new(vec![137_438_953_472.0; 64]);
    workload.p2p_buffer_mb = 16.0;
    workload.p2p_frequency = 4.0;
    workload.all_reduce_buffer_mb = 64.0;
    workload.num_layers = 24.0;
    workload.moe_frequency = 2.0;
    workload.global_batch_size = Some(256.0);
    workload.mini_batch_size = 4.0;
    workload.recomputation_amount = 1.0;
    workload
}
