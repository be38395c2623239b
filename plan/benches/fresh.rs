//! The quality of plans on clusters that are drawn anew at each run.
//!
//! cargo bench -p aristos-plan --bench fresh -- [--seed S] [--count N] [--effort E]
//!
//! "tiers" have NVLink in a host, NICs in and between racks, two generations of GPUs and a few slow links. "random links" have no structure
//! and are reported apart.

use aristos_plan::cluster::{Cluster, Device, Links, Matrix};
use aristos_plan::{Options, Outcome, Workload, plan};
use rustix::time::{ClockId, clock_gettime};

struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
    fn real(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    fn scale(&mut self, low: f64, high: f64) -> f64 {
        self.real(low.ln(), high.ln()).exp()
    }
    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

fn structured(random: &mut Random) -> (Cluster, Workload) {
    let per_host = random.pick(&[4usize, 8]);
    let hosts = 1 + random.below(64 / per_host);
    let n = (per_host * hosts).max(8);
    let hosts = n / per_host;
    let rack = random.pick(&[hosts, 2, 4]) * per_host;
    // Links: NVLink in a host, NICs in a rack, and between racks oversubscribed.
    let tiers = [
        (random.scale(0.002, 0.01), random.scale(0.002, 0.007)),
        (random.scale(0.008, 0.03), random.scale(0.02, 0.09)),
        (random.scale(0.01, 0.04), random.scale(0.03, 0.2)),
    ];
    let noise = random.pick(&[0.0, 0.02, 0.1]);
    // Hosts of the older generation: slower, with less memory and slower NVLink.
    let old = random.pick(&[0, hosts / 4, hosts / 2]);
    let slower = random.real(1.5, 4.0);
    let scattered = random.below(2) == 0;
    let is_old = |host: usize| if scattered { host * old / hosts != (host + 1) * old / hosts } else { host < old };
    let (mut alpha, mut beta) = (vec![0.0; n * n], vec![0.0; n * n]);
    for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j) {
        let tier = if i / per_host == j / per_host {
            0
        } else if i / rack == j / rack {
            1
        } else {
            2
        };
        let generation = if tier == 0 && is_old(i / per_host) { 2.0 } else { 1.0 };
        let factor = 1.0 + noise * random.real(-1.0, 1.0);
        alpha[i * n + j] = tiers[tier].0 * factor;
        beta[i * n + j] = tiers[tier].1 * factor * generation;
    }
    // A few slow links: single ones, or all of a device's NIC.
    for _ in 0..random.below(5) {
        let (i, j, factor) = (random.below(n), random.below(n), random.scale(2.0, 8.0));
        if random.below(2) == 0 {
            beta[i * n + j] *= factor;
        } else {
            for j in (0..n).filter(|j| i / per_host != j / per_host) {
                beta[i * n + j] *= factor;
                beta[j * n + i] *= factor;
            }
        }
    }
    finish(random, n, |i| i / per_host, |i| if is_old(i / per_host) { slower } else { 1.0 }, alpha, beta)
}

fn structureless(random: &mut Random) -> (Cluster, Workload) {
    let n = 8 + random.below(57);
    let mut links = |low: f64, high: f64| (0..n * n).map(|_| random.scale(low, high)).collect::<Vec<f64>>();
    let (alpha, beta) = (links(0.001, 0.3), links(0.002, 0.4));
    let speeds: Vec<f64> = (0..n).map(|_| random.pick(&[1.0, 1.0, 2.5])).collect();
    finish(random, n, |i| i / 8, |i| speeds[i], alpha, beta)
}

fn finish(
    random: &mut Random,
    n: usize,
    host: impl Fn(usize) -> usize,
    slower: impl Fn(usize) -> f64,
    alpha: Vec<f64>,
    beta: Vec<f64>,
) -> (Cluster, Workload) {
    let experts = random.pick(&[8usize, 16, 32, 64, 128, 256]);
    // Room for all experts in as many devices as a group is to have at least.
    let least = 1 + random.below(n.min(16));
    let room = experts.div_ceil(least) as u64;
    let room = room.max(experts.div_ceil(n) as u64 * 2).min(experts as u64);
    let devices = (0..n)
        .map(|i| {
            let slower = slower(i);
            let memory = if slower > 1.0 { room.div_ceil(2) } else { room };
            Device::new(i as u64, format!("n{}", host(i)), 4e11 / slower, memory)
        })
        .collect();
    let cluster = Cluster::new(devices, Links::Matrix(Matrix::new(n, alpha, beta)));
    // FLOP of a device's tokens in all experts: 0.5 to 20 ms of a device.
    let all = 4e11 * random.scale(0.5, 20.0);
    let uneven = random.below(2) == 0;
    let costs: Vec<f64> = (0..experts).map(|_| if uneven { random.scale(0.2, 3.0) } else { 1.0 }).collect();
    let sum: f64 = costs.iter().sum();
    let mut workload = Workload::new(costs.iter().map(|cost| (all * cost / sum).round()).collect());
    workload.p2p_buffer_mb = random.scale(4.0, 128.0);
    workload.p2p_frequency = 2.0;
    workload.all_reduce_buffer_mb = random.scale(10.0, 4000.0);
    workload.num_layers = 24.0;
    workload.moe_frequency = 1.0;
    workload.global_batch_size = Some(1024.0);
    workload.mini_batch_size = 4.0;
    workload.recomputation_amount = 1.0;
    (cluster, workload)
}

fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Objective of a plan, and the processor time of the search.
struct Found {
    objective_ms: f64,
    cpu_s: f64,
}

fn find(cluster: &Cluster, workload: &Workload, effort: u32) -> Option<Found> {
    let start = cpu_s();
    match plan(cluster, workload, Options::default().effort(effort)).expect("a valid cluster") {
        Outcome::Plan(plan) => Some(Found { objective_ms: plan.objective_ms, cpu_s: cpu_s() - start }),
        _ => None,
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |flag: &str| args.iter().position(|a| a == flag).and_then(|at| args.get(at + 1));
    let number = |flag: &str, default: u64| {
        value(flag)
            .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{flag} is {text}, expected a number")))
    };
    let now = clock_gettime(ClockId::Realtime);
    let seed = number("--seed", (now.tv_sec as u64) << 20 ^ now.tv_nsec as u64);
    let (count, more) = (number("--count", 200), number("--effort", 8) as u32);
    println!("seed {seed}; objective over that of the better of the usual search and one of {more} times the effort");
    type Draw = fn(&mut Random) -> (Cluster, Workload);
    let draws: [(&str, Draw); 2] = [("tiers", structured), ("random links", structureless)];
    for (name, draw) in draws {
        let (mut ratios, mut cpu, mut none) = (Vec::new(), Vec::new(), 0);
        for c in 0..count {
            let mut random = Random(seed.wrapping_mul(1_000_003).wrapping_add(c));
            let (cluster, workload) = draw(&mut random);
            let Some(usual) = find(&cluster, &workload, 1) else {
                none += 1;
                continue;
            };
            let best =
                find(&cluster, &workload, more).map_or(usual.objective_ms, |b| b.objective_ms.min(usual.objective_ms));
            ratios.push(usual.objective_ms / best);
            cpu.push(usual.cpu_s);
        }
        ratios.sort_by(f64::total_cmp);
        cpu.sort_by(f64::total_cmp);
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        println!(
            "{name}: {} clusters ({none} without a plan), mean {mean:.4}, median {:.4}, worst {:.4}; processor time median {:.2} s, most {:.2} s",
            ratios.len(),
            ratios.get(ratios.len() / 2).unwrap_or(&1.0),
            ratios.last().unwrap_or(&1.0),
            cpu.get(cpu.len() / 2).unwrap_or(&0.0),
            cpu.last().unwrap_or(&0.0)
        );
    }
}
