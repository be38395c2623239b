//! The reference of the planner's tests: objective and makespan by their definitions, brute force over all groupings and placements, and random inputs.
//! Shares no code with the planner.

use rustix::time::{ClockId, clock_gettime};

/// Maximum relative difference of sums in another order.
pub const ROUNDING: f64 = 1e-9;

/// Equal up to the order of sums.
#[track_caller]
pub fn near(a: f64, b: f64) {
    assert!((a - b).abs() <= ROUNDING * a.abs().max(b.abs()), "{a} and {b}");
}

/// Processor time of this thread, which other load does not change. (Planning's second thread works no longer than the first.)
pub fn cpu_s() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// A cluster and a workload in plain numbers.
#[derive(Clone, Debug)]
pub struct Case {
    pub flops: Vec<f64>,
    pub memory: Vec<u64>,
    /// By ordered pair; the diagonal is junk.
    pub alpha: Vec<Vec<f64>>,
    pub beta: Vec<Vec<f64>>,
    /// Where the links are of tiers: size, alpha, beta.
    pub tiers: Option<Vec<(usize, f64, f64)>>,
    pub hosts: Vec<usize>,
    pub expert_flop: Vec<f64>,
    pub expert_load: Option<Vec<f64>>,
    pub p2p_mb: f64,
    pub eta: f64,
    pub all_reduce_mb: f64,
    /// Layers, MoE frequency, global batch, mini batch, recomputation.
    pub schedule: [f64; 5],
}

impl Case {
    pub fn n(&self) -> usize {
        self.flops.len()
    }

    pub fn costs(&self) -> Vec<f64> {
        let n = self.expert_flop.len() as f64;
        match &self.expert_load {
            None => self.expert_flop.clone(),
            Some(load) => {
                let sum: f64 = load.iter().sum();
                self.expert_flop.iter().zip(load).map(|(f, l)| f * l / (sum / n)).collect()
            }
        }
    }

    fn gamma(&self, workers: usize) -> f64 {
        let [layers, frequency, global, mini, recomputation] = self.schedule;
        (layers / frequency) * (global / (workers as f64 * mini)) * (2.0 + recomputation)
    }

    /// Whether the group's memory holds all experts.
    pub fn valid(&self, group: &[usize]) -> bool {
        group.iter().map(|&i| u128::from(self.memory[i])).sum::<u128>() >= self.expert_flop.len() as u128
    }

    /// The poster's equation (1).
    pub fn objective(&self, groups: &[Vec<usize>]) -> f64 {
        let cost: f64 = self.costs().iter().sum();
        let workers = groups.iter().map(Vec::len).sum();
        let mut worst = 0.0f64;
        for g in groups {
            let flops: f64 = g.iter().map(|&i| self.flops[i]).sum();
            let exchange = |i: usize| -> f64 {
                let to = g.iter().filter(|&&j| j != i);
                to.map(|&j| self.alpha[i][j] + self.beta[i][j] * self.p2p_mb / g.len() as f64).sum()
            };
            let slowest = g.iter().map(|&i| exchange(i)).fold(0.0, f64::max);
            worst = worst.max(cost / flops + self.eta * slowest);
        }
        self.gamma(workers) * worst + self.all_reduce(groups)
    }

    /// The all-reduce between groups.
    fn all_reduce(&self, groups: &[Vec<usize>]) -> f64 {
        let mut link = (f64::NEG_INFINITY, 0.0, 0.0);
        for (a, g) in groups.iter().enumerate() {
            for (b, h) in groups.iter().enumerate() {
                for (&i, &j) in g.iter().flat_map(|i| h.iter().map(move |j| (i, j))).filter(|_| a != b) {
                    let time = self.alpha[i][j] + self.beta[i][j] * self.all_reduce_mb / 2.0;
                    if time > link.0 || (time == link.0 && self.alpha[i][j] > link.1) {
                        link = (time, self.alpha[i][j], self.beta[i][j]);
                    }
                }
            }
        }
        let k = groups.len() as f64;
        if groups.len() < 2 { 0.0 } else { 2.0 * (k - 1.0) * (link.1 + link.2 * self.all_reduce_mb / k) }
    }

    /// Compute and communication of a group by the placed objective, ms: `held[i]` are the experts of `group[i]`.
    pub fn placed_group(&self, group: &[usize], held: &[Vec<usize>]) -> f64 {
        let costs = self.costs();
        let total: f64 = costs.iter().sum();
        let load = |i: usize| held[i].iter().map(|&e| costs[e]).sum::<f64>();
        let share = |i: usize| if total > 0.0 { load(i) / total } else { 0.0 };
        let size = group.len();
        let time = |from: usize, to: usize| match held[to].is_empty() || from == to {
            true => 0.0,
            false => self.alpha[group[from]][group[to]] + self.beta[group[from]][group[to]] * self.p2p_mb * share(to),
        };
        let mut worst = (0.0f64, 0.0f64);
        for (i, &device) in group.iter().enumerate() {
            let send: f64 = (0..size).map(|j| time(i, j)).sum();
            let receive: f64 = (0..size).map(|j| time(j, i)).sum();
            worst.0 = worst.0.max(size as f64 * load(i) / self.flops[device]);
            worst.1 = worst.1.max(send.max(receive));
        }
        worst.0 + self.eta * worst.1
    }

    /// The placed objective, of groups that take `work` each.
    fn placed_of(&self, groups: &[Vec<usize>], work: impl Fn(usize) -> f64) -> f64 {
        let workers = groups.iter().map(Vec::len).sum();
        let worst = (0..groups.len()).map(work).fold(0.0, f64::max);
        self.gamma(workers) * worst + self.all_reduce(groups)
    }

    /// The placed objective of groups and placements.
    pub fn placed_objective(&self, groups: &[Vec<usize>], held: &[Vec<Vec<usize>>]) -> f64 {
        self.placed_of(groups, |g| self.placed_group(&groups[g], &held[g]))
    }

    /// The least placed objective over all groupings and placements; `None` where no group can be valid. Only for a few experts and devices.
    pub fn placed_optimum(&self, allow_idle: bool) -> Option<f64> {
        let set = |group: &[usize]| group.iter().fold(0usize, |set, i| set | 1 << i);
        let mut works = vec![f64::INFINITY; 1 << self.n()];
        for (s, work) in works.iter_mut().enumerate().skip(1) {
            let group: Vec<usize> = (0..self.n()).filter(|i| s >> i & 1 == 1).collect();
            if self.valid(&group) {
                self.placements(&group, |held| *work = work.min(self.placed_group(&group, held)));
            }
        }
        let mut best: Option<f64> = None;
        self.partitions(0, &mut Vec::new(), allow_idle, &mut |groups| {
            if !groups.is_empty() && groups.iter().all(|g| self.valid(g)) {
                let objective = self.placed_of(groups, |g| works[set(&groups[g])]);
                best = Some(best.map_or(objective, |best| best.min(objective)));
            }
        });
        best
    }

    /// Every placement that memory allows.
    fn placements(&self, group: &[usize], mut visit: impl FnMut(&[Vec<usize>])) {
        let n = group.len();
        let mut owner = vec![0; self.expert_flop.len()];
        loop {
            let mut held = vec![Vec::new(); n];
            owner.iter().enumerate().for_each(|(e, &d): (usize, &usize)| held[d].push(e));
            if (0..n).all(|d| held[d].len() as u64 <= self.memory[group[d]]) {
                visit(&held);
            }
            let Some(e) = owner.iter().position(|&d| d + 1 < n) else { return };
            owner[..e].fill(0);
            owner[e] += 1;
        }
    }

    /// Gives every link its own alpha and beta, over two orders of magnitude.
    pub fn structureless(&mut self, random: &mut Random) {
        let n = self.n();
        for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j) {
            (self.alpha[i][j], self.beta[i][j]) = (random.scale(0.001, 0.3), random.scale(0.002, 0.4));
        }
        self.tiers = None;
    }

    /// Gives the links two or three tiers, each slower than the one inside it, with noise, and slower in one direction or from some devices.
    pub fn layered(&mut self, random: &mut Random) {
        let n = self.n();
        let host = 2 + random.below(15);
        let rack = host * (2 + random.below(4));
        let (alpha, beta) = (random.scale(0.002, 0.02), random.scale(0.003, 0.03));
        let (middle, outer) =
            ([random.scale(1.2, 4.0), random.scale(1.2, 8.0)], [random.scale(1.2, 6.0), random.scale(1.2, 10.0)]);
        let three = random.below(5) < 3 && rack < n;
        let noise = random.pick(&[0.0, 0.05, 0.2, 0.5]);
        let (lopsided, slower) = (random.below(3), random.scale(1.0, 4.0));
        let of_device: Vec<f64> =
            (0..n).map(|_| if random.below(10) < 3 { random.scale(1.0, 3.0) } else { 1.0 }).collect();
        for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j) {
            let mut factor = 1.0 + noise * random.real(-1.0, 1.0);
            match lopsided {
                0 if i > j => factor *= slower,
                1 => factor *= of_device[i],
                _ => {}
            }
            let mut link = (alpha, beta);
            if i / host != j / host && three {
                link = (link.0 * middle[0], link.1 * middle[1]);
            }
            if i / host != j / host && (!three || i / rack != j / rack) {
                link = (link.0 * outer[0], link.1 * outer[1]);
            }
            (self.alpha[i][j], self.beta[i][j]) = (link.0 * factor, link.1 * factor);
        }
        self.hosts = (0..n).map(|i| i / host).collect();
        self.tiers = None;
    }

    /// The best of all groupings; `None` where no group can be valid.
    pub fn optimum(&self, allow_idle: bool) -> Option<f64> {
        let mut best = None;
        self.partitions(0, &mut Vec::new(), allow_idle, &mut |groups| {
            if !groups.is_empty() && groups.iter().all(|g| self.valid(g)) {
                let objective = self.objective(groups);
                if best.is_none_or(|best| objective < best) {
                    best = Some(objective);
                }
            }
        });
        best
    }

    fn partitions(&self, i: usize, groups: &mut Vec<Vec<usize>>, idle: bool, visit: &mut impl FnMut(&[Vec<usize>])) {
        if i == self.n() {
            return visit(groups);
        }
        for g in 0..groups.len() {
            groups[g].push(i);
            self.partitions(i + 1, groups, idle, visit);
            groups[g].pop();
        }
        groups.push(vec![i]);
        self.partitions(i + 1, groups, idle, visit);
        groups.pop();
        if idle {
            self.partitions(i + 1, groups, idle, visit);
        }
    }

    /// The longest time of a device that holds these experts.
    pub fn makespan(&self, held: &[(usize, Vec<usize>)]) -> f64 {
        let costs = self.costs();
        let time = |(i, experts): &(usize, Vec<usize>)| experts.iter().map(|&e| costs[e]).sum::<f64>() / self.flops[*i];
        held.iter().map(time).fold(0.0, f64::max)
    }

    /// The least makespan of a group, over all placements; only for a few experts and devices.
    pub fn least_makespan(&self, group: &[usize]) -> f64 {
        let costs = self.costs();
        let mut best = f64::INFINITY;
        self.placements(group, |held| {
            let time =
                |(i, experts): (&usize, &Vec<usize>)| experts.iter().map(|&e| costs[e]).sum::<f64>() / self.flops[*i];
            best = group.iter().zip(held).map(time).fold(0.0, f64::max).min(best);
        });
        best
    }

    pub fn cluster_json(&self) -> String {
        let device = |i: usize| {
            serde_json::json!({
                "id": i, "host": format!("n{}", self.hosts[i]), "flop_per_ms": self.flops[i],
                "memory_experts": self.memory[i],
            })
        };
        let links = match &self.tiers {
            Some(tiers) => {
                let tier = |&(size, alpha, beta): &(usize, f64, f64)| serde_json::json!({"size": size, "alpha_ms": alpha, "beta_ms_per_mb": beta});
                serde_json::json!({"tiers": tiers.iter().map(tier).collect::<Vec<_>>()})
            }
            None => serde_json::json!({"alpha_ms": self.alpha, "beta_ms_per_mb": self.beta}),
        };
        let devices: Vec<_> = (0..self.n()).map(device).collect();
        serde_json::json!({"version": 1, "devices": devices, "links": links}).to_string()
    }

    pub fn workload_json(&self) -> String {
        let [layers, frequency, global, mini, recomputation] = self.schedule;
        let mut json = serde_json::json!({
            "expert_flop": self.expert_flop, "p2p_buffer_mb": self.p2p_mb, "p2p_frequency": self.eta,
            "all_reduce_buffer_mb": self.all_reduce_mb, "num_layers": layers, "moe_frequency": frequency,
            "global_batch_size": global, "mini_batch_size": mini, "recomputation_amount": recomputation,
        });
        if let Some(load) = &self.expert_load {
            json["expert_load"] = serde_json::json!(load);
        }
        json.to_string()
    }
}

/// Random numbers (xorshift64*).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x1234_5678_9abc_def1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }

    pub fn real(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.below(1 << 30) as f64 / (1u64 << 30) as f64
    }

    /// Even in its logarithm.
    pub fn scale(&mut self, low: f64, high: f64) -> f64 {
        self.real(low.ln(), high.ln()).exp()
    }

    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// A random case of `n` devices: tiers, with or without noise and asymmetry, or no structure at all; one speed, two or many;
/// memory ample, tight or mixed.
pub fn random_case(random: &mut Random, n: usize) -> Case {
    let divisors: Vec<usize> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
    let host = random.pick(&divisors);
    let rack = random.pick(&divisors.iter().copied().filter(|d| d % host == 0).collect::<Vec<_>>());
    let structured = random.below(5) != 0;
    let noise = random.pick(&[0.0, 0.0, 0.1, 0.5]);
    let lopsided = random.below(3) == 0;
    let slower = random.scale(1.0, 8.0);
    let tiers = [
        (host, random.scale(0.001, 0.02), random.scale(0.002, 0.03)),
        (rack, random.scale(0.005, 0.1), random.scale(0.01, 0.2)),
        (n, random.scale(0.01, 0.3), random.scale(0.02, 0.4)),
    ];
    let mut alpha = vec![vec![f64::NAN; n]; n];
    let mut beta = alpha.clone();
    for i in 0..n {
        for j in 0..n {
            let (a, b) = match structured {
                true => tiers.iter().find(|t| i / t.0 == j / t.0).map(|t| (t.1, t.2)).unwrap(),
                false => (random.scale(0.001, 0.3), random.scale(0.002, 0.4)),
            };
            let mut factor = 1.0 + noise * random.real(-1.0, 1.0);
            if lopsided && i > j {
                factor *= slower;
            }
            (alpha[i][j], beta[i][j]) = (a * factor, b * factor);
        }
    }
    // Junk, because the diagonal is ignored.
    for i in 0..n {
        (alpha[i][i], beta[i][i]) = (7.0e5, 9.0e5);
    }
    let mut sizes: Vec<(usize, f64, f64)> = tiers.to_vec();
    sizes.dedup_by(|b, a| a.0 == b.0);
    let exact_tiers = structured && noise == 0.0 && !lopsided && random.below(2) == 0;
    let n_experts = random.pick(&[1usize, 2, 4, 8, 16, 64, 7, 24]);
    let speed = random.scale(1e10, 1e12);
    let speeds = random.below(3);
    let flops = (0..n)
        .map(|_| match speeds {
            0 => speed,
            1 => speed * random.pick(&[1.0, 0.4]),
            _ => speed * random.real(0.3, 1.0),
        })
        .map(f64::round)
        .collect();
    let even = n_experts.div_ceil(n) as u64;
    let memories = random.below(5);
    let memory = (0..n)
        .map(|_| match memories {
            0 => n_experts as u64,
            1 => even,
            2 => even + random.below(3) as u64,
            3 => random.below(n_experts + 1) as u64,
            _ => random.pick(&[0, even, 2 * even, n_experts as u64]),
        })
        .collect();
    let uneven = random.below(2) == 0;
    let flop = speed * random.scale(0.02, 20.0) / n_experts as f64 * (n as f64).sqrt();
    let expert_flop =
        (0..n_experts).map(|_| (flop * if uneven { random.real(0.1, 2.0) } else { 1.0 }).round()).collect();
    let loaded = random.below(4) == 0;
    Case {
        flops,
        memory,
        alpha,
        beta,
        tiers: exact_tiers.then_some(sizes),
        hosts: (0..n).map(|i| i / host).collect(),
        expert_flop,
        expert_load: loaded.then(|| (0..n_experts).map(|_| random.real(0.1, 3.0)).collect()),
        p2p_mb: random.scale(0.5, 64.0),
        eta: random.pick(&[1.0, 2.0, 4.0]),
        all_reduce_mb: random.scale(1.0, 2000.0),
        schedule: [24.0, random.pick(&[1.0, 2.0]), random.pick(&[64.0, 256.0, 1000.0]), 4.0, random.pick(&[0.0, 1.0])],
    }
}
