//! Time to plan, by number of devices.
//!
//! `cargo bench --bench plan -- [--csv] [--quick]`: medians and spread of wall time and of processor time. (Only processor time is
//! meaningful on a busy machine.) Full matrices have 10% of noise on three tiers, so that no two links are equal; tiers have no noise.
//!
//! The objective is the placed one, or with `--published` the published one.

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
