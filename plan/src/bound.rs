//! Lower bounds on the published objective, by number of groups.
//!
//! There are n devices. F(s) is the sum of the s largest rates, s0 the least s whose s largest memories hold all experts. Each bound of K is gamma(W)
//! times the largest work bound plus the all-reduce's, with idle devices the least over W; the bound of all is the least over K. Bounds are
//! scaled down by 4 (n + 8) units of rounding (placed: n + E + 8); an objective within 1e-10 counts as optimal.
//!
//! c_i(s) is the sum of the s - 1 smallest alphas of row i plus d / s times that of the betas, c(s) the s-th smallest of c_1(s)..c_n(s), x(s) =
//! cost / F(s) + eta c(s).
//!
//! 1. A group of s devices has F_g <= F(s), s >= s0, and at most s - 1 members with c_i(s) < c(s), so its work is at least x(s).
//! 2. Sizes are from s0 to W - (K - 1) s0; some group has at most floor(W / K) devices, some at least ceil(W / K). The worst group's work is
//!    thus at least the min of x(s) over s <= floor(W / K), and over s >= ceil(W / K).
//! 3. Some group has F_g <= F(W) / K: at least the min over s of max(cost K / F(W), cost / F(s)) + eta c(s).
//! 4. Without idle devices, each device i is in some group: at least the min over s of cost / (F_i + the s - 1 largest other rates) + eta
//!    c_i(s). The largest over i counts (omitted beyond 128 unlike devices).
//! 5. K groups leave at most n - K tree edges inside, so AR is at least the least AR(K, e) over e1..e(n-K+1). With idle devices: that of the
//!    least alpha and least beta.
//! 6. K s0 <= n, and K times the number of experts is at most the sum of min(memory, experts).

use super::objective::Problem;
use crate::cluster::{Link, LinkTable, Matrix, Tiers};

/// Least exchange times for every size of a group.
pub(crate) trait LeastExchange: LinkTable {
    /// Returns, for each size s = 1..=n (index s - 1), a lower bound on the worst member's exchange in a group of s devices, ms, with buffers of
    /// `mb` / s. Calls `each(i, s, ms)` with the lower bound for each device i.
    fn least_exchange(&self, mb: f64, each: impl FnMut(usize, usize, f64)) -> Vec<f64>;

    /// Returns, for each size s = 1..=n (index s - 1), the least time in which any device receives `mb(s)` from each of s - 1 others, ms.
    fn least_received(&self, mb: impl Fn(usize) -> f64) -> Vec<f64>;

    /// The least alpha and the least beta of all links.
    fn fastest(&self) -> Link;

    /// Whether every device has the same links to the others, in some order. `each` is then called for one device only.
    fn devices_alike(&self) -> bool;
}

impl LeastExchange for Matrix {
    fn least_exchange(&self, mb: f64, mut each: impl FnMut(usize, usize, f64)) -> Vec<f64> {
        let n = self.len();
        let row = |i: usize, k: usize| Link { alpha_ms: self.alpha_row(i)[k], beta_ms_per_mb: self.beta_row(i)[k] };
        let mut by_size = smallest_sums(n, row, |s| mb / s as f64);
        let mut least = Vec::with_capacity(n);
        for s in 1..=n {
            let of_size = &mut by_size[(s - 1) * n..s * n];
            of_size.iter().enumerate().for_each(|(i, &ms)| each(i, s, ms));
            // A group of s devices has a member that is not among the s - 1 lowest.
            let (_, ms, _) = of_size.select_nth_unstable_by(s - 1, f64::total_cmp);
            least.push(*ms);
        }
        least
    }

    fn least_received(&self, mb: impl Fn(usize) -> f64) -> Vec<f64> {
        let n = self.len();
        let by_size = smallest_sums(n, |i, k| self.column(i)[k], mb);
        by_size.chunks(n).map(|of_size| of_size.iter().copied().fold(f64::INFINITY, f64::min)).collect()
    }

    fn fastest(&self) -> Link {
        let n = self.len();
        let least = |rows: &dyn Fn(usize) -> f64| (0..n).map(rows).fold(f64::INFINITY, f64::min);
        let of_row = |i: usize, row: &[f64]| {
            let others = row[..i].iter().chain(&row[i + 1..]);
            others.copied().fold(f64::INFINITY, f64::min)
        };
        Link {
            alpha_ms: least(&|i| of_row(i, self.alpha_row(i))),
            beta_ms_per_mb: least(&|i| of_row(i, self.beta_row(i))),
        }
    }

    fn devices_alike(&self) -> bool {
        false
    }
}

/// Returns, for each size s = 1..=n and device i (index (s - 1) n + i), the s - 1 smallest alphas of its links `link(i, k)` plus `mb(s)` times the s - 1
/// smallest betas. Alphas and betas may be of different links.
fn smallest_sums(n: usize, link: impl Fn(usize, usize) -> Link, mb: impl Fn(usize) -> f64) -> Vec<f64> {
    let mut by_size = vec![0.0; n * n];
    // Numbers that are not negative sort like their bits, and faster.
    let mut sorted: Vec<u64> = Vec::with_capacity(n);
    for i in 0..n {
        for of_alpha in [true, false] {
            let value = |link: Link| if of_alpha { link.alpha_ms } else { link.beta_ms_per_mb };
            sorted.clear();
            sorted.extend((0..i).chain(i + 1..n).map(|k| value(link(i, k)).to_bits()));
            sorted.sort_unstable();
            let mut sum = 0.0;
            for (s, bits) in (2..=n).zip(&sorted) {
                sum += f64::from_bits(*bits);
                by_size[(s - 1) * n + i] += sum * if of_alpha { 1.0 } else { mb(s) };
            }
        }
    }
    by_size
}

/// Returns, for each size s = 1..=n (index s - 1), the least time in which a device exchanges `mb(s)` with each of s - 1 others, ms.
fn least_by_size(tiers: &Tiers, mb: impl Fn(usize) -> f64) -> Vec<f64> {
    let n = tiers.len();
    let peers = tiers.peers();
    let mut order: Vec<usize> = (0..peers.len()).collect();
    let mut least = Vec::with_capacity(n);
    for s in 1..=n {
        let mb = mb(s);
        let time = |tier: usize| tiers.tiers()[tier].link.time_ms(mb);
        order.sort_by(|&a, &b| time(a).total_cmp(&time(b)));
        let mut missing = s - 1;
        let mut ms = 0.0;
        for &tier in &order {
            let taken = missing.min(peers[tier]);
            ms += taken as f64 * time(tier);
            missing -= taken;
        }
        least.push(ms);
    }
    least
}

impl LeastExchange for Tiers {
    fn least_exchange(&self, mb: f64, mut each: impl FnMut(usize, usize, f64)) -> Vec<f64> {
        let least = least_by_size(self, |s| mb / s as f64);
        // Every device has the same tiers.
        least.iter().zip(1..).for_each(|(&ms, s)| each(0, s, ms));
        least
    }

    fn least_received(&self, mb: impl Fn(usize) -> f64) -> Vec<f64> {
        least_by_size(self, mb)
    }

    fn fastest(&self) -> Link {
        let links = self.tiers().iter().map(|tier| tier.link);
        links.fold(Link { alpha_ms: f64::INFINITY, beta_ms_per_mb: f64::INFINITY }, |least, link| Link {
            alpha_ms: least.alpha_ms.min(link.alpha_ms),
            beta_ms_per_mb: least.beta_ms_per_mb.min(link.beta_ms_per_mb),
        })
    }

    fn devices_alike(&self) -> bool {
        // Sizes divide, but the outermost block may be cut off; it holds all devices then.
        true
    }
}

/// Lower bounds by the number of groups.
pub(crate) struct Bounds {
    /// For K = 1.. (index K - 1), the lower bound of groupings into K groups, ms; infinite if there is none.
    pub by_groups: Vec<f64>,
}

impl Bounds {
    /// The lower bound of all groupings, ms.
    pub fn least(&self) -> f64 {
        self.by_groups.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// A factor slightly below 1 that outweighs the rounding of the bounds' sums.
pub(crate) fn slack(n: usize) -> f64 {
    1.0 - 4.0 * (n as f64 + 8.0) * f64::EPSILON
}

/// Maximum number of devices for which every number of idle devices is tried.
const IDLE_COUNTED: usize = 1024;

/// Maximum number of unlike devices for which the bound of each device is computed. That bound is rarely the largest and costs as much as all others.
const OWN_MOST: usize = 128;

/// Values that the bounds of all numbers of groups share.
struct Sizes<'p, 'a, L> {
    problem: &'p Problem<'a, L>,
    /// F(s), the sum of the s largest rates, at index s.
    rate: Vec<f64>,
    /// c(s), at index s - 1; monotonic.
    exchange: Vec<f64>,
    /// The smallest size that memory allows.
    smallest: usize,
    /// x(s) = cost / F(s) + eta c(s), at index s - 1: the lower bound for a valid group of s devices.
    least: RangeMin,
    /// A lower bound on the time of the slowest device in any group, if all devices are in groups.
    own: f64,
}

impl<L: LinkTable> Sizes<'_, '_, L> {
    /// The worst group's compute and communication, with `w` devices in `k` groups.
    fn work(&self, k: usize, w: usize) -> f64 {
        let eta = self.problem.workload.p2p_frequency;
        let largest = w - (k - 1) * self.smallest;
        // Some group has at most w / k members, some has at least that.
        let small = self.least.of(1, w / k);
        let large = self.least.of(w.div_ceil(k), largest);
        // Some group has at most a k-th of the rate. A group too small to reach that share is bounded by its size; for the others c is least at the
        // smallest such size.
        let share = self.rate[w] / k as f64;
        let enough = self.rate.partition_point(|&rate| rate < share).max(self.smallest);
        let mut slow = self.least.of(self.smallest, (enough - 1).min(largest));
        if enough <= largest {
            slow = slow.min(self.problem.compute(share) + eta * self.exchange[enough - 1]);
        }
        small.max(large).max(slow).max(self.own)
    }
}

/// Bounds for every number of groups; `allow_idle` says whether devices may be left out.
pub(crate) fn bounds<L: LeastExchange>(problem: &Problem<L>, allow_idle: bool) -> Bounds {
    let n = problem.n();
    let (smallest, _) = by_memory(&problem.memory, problem.n_experts);
    let sizes = sizes(problem, smallest, allow_idle);
    // gamma is least with all devices, and so are both terms.
    let idle = |k: usize| sizes.least.of(1, n / k).max(problem.compute(sizes.rate[n] / k as f64));
    bounds_by(problem, allow_idle, slack(n), |k, w| sizes.work(k, w), idle)
}

/// Bounds from lower bounds on the slowest group's time, ms: `work(k, w)` for `k` groups of `w` devices, and `idle(k)` for `k` groups of any number of
/// devices. `idle(k)` is combined with the gamma of all devices. Results are scaled by `slack`.
pub(crate) fn bounds_by<L: LeastExchange>(
    problem: &Problem<L>,
    allow_idle: bool,
    slack: f64,
    work: impl Fn(usize, usize) -> f64,
    idle: impl Fn(usize) -> f64,
) -> Bounds {
    let n = problem.n();
    let (smallest, most_groups) = by_memory(&problem.memory, problem.n_experts);
    let reduce = ReduceBound::new(problem, allow_idle);
    let bound = |k: usize| {
        if k > most_groups || k.saturating_mul(smallest) > n {
            return f64::INFINITY;
        }
        let work = match allow_idle {
            false => problem.gamma(n) * work(k, n),
            true if n <= IDLE_COUNTED => {
                (k * smallest..=n).map(|w| problem.gamma(w) * work(k, w)).fold(f64::INFINITY, f64::min)
            }
            true => problem.gamma(n) * idle(k),
        };
        (work + reduce.least(problem, k)) * slack
    };
    Bounds { by_groups: (1..=n).map(bound).collect() }
}

fn sizes<'p, 'a, L: LeastExchange>(problem: &'p Problem<'a, L>, smallest: usize, allow_idle: bool) -> Sizes<'p, 'a, L> {
    let n = problem.n();
    let eta = problem.workload.p2p_frequency;
    let mut flops = problem.flops.clone();
    flops.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut rate = vec![0.0; n + 1];
    (0..n).for_each(|s| rate[s + 1] = rate[s] + flops[s]);
    let slowest = (0..n).fold(0, |slowest, i| if problem.flops[i] < problem.flops[slowest] { i } else { slowest });
    let alike = problem.links.devices_alike();

    // For each device, the minimum over the sizes of its group.
    let mut own = vec![if alike { 0.0 } else { f64::INFINITY }; n];
    own[slowest] = f64::INFINITY;
    let each = alike || n <= OWN_MOST;
    if !each {
        own.fill(0.0);
    }
    let exchange = problem.links.least_exchange(problem.workload.p2p_buffer_mb, |i, s, ms| {
        if s >= smallest && each {
            let i = if alike { slowest } else { i };
            let compute = problem.compute(with(problem.flops[i], &flops, &rate, s));
            own[i] = own[i].min(compute + eta * ms);
        }
    });
    let own = if allow_idle { 0.0 } else { own.into_iter().fold(0.0, f64::max) };
    let x = |s: usize| if s < smallest { f64::INFINITY } else { problem.compute(rate[s]) + eta * exchange[s - 1] };
    let least = RangeMin::new((1..=n).map(x).collect());
    Sizes { problem, rate, exchange, smallest, least, own }
}

/// Minima of ranges of a list.
pub(crate) struct RangeMin {
    /// Entry l: minima of the 2^l numbers from each index.
    levels: Vec<Vec<f64>>,
}

impl RangeMin {
    pub fn new(values: Vec<f64>) -> RangeMin {
        let mut levels = vec![values];
        let mut width = 1;
        while let Some(last) = levels.last()
            && last.len() > width
        {
            let next = last.iter().zip(&last[width..]).map(|(a, b)| a.min(*b)).collect();
            levels.push(next);
            width *= 2;
        }
        RangeMin { levels }
    }

    /// The least of the numbers `first..=last`, counted from 1; infinite if there are none.
    pub fn of(&self, first: usize, last: usize) -> f64 {
        if first > last {
            return f64::INFINITY;
        }
        let level = (last - first + 1).ilog2() as usize;
        self.levels[level][first - 1].min(self.levels[level][last - (1 << level)])
    }
}

/// The rate of a device and the `s` - 1 fastest others. `flops` is descending, `fastest` its prefix sums.
fn with(own: f64, flops: &[f64], fastest: &[f64], s: usize) -> f64 {
    // The s fastest include it.
    if own >= flops[s - 1] { fastest[s] } else { own + fastest[s - 1] }
}

/// The smallest size of a group whose memory can hold all experts, and the maximum number of groups by memory.
pub(crate) fn by_memory(memory: &[u64], n_experts: u64) -> (usize, usize) {
    let mut memory = memory.to_vec();
    memory.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0u64;
    let mut smallest = memory.len() + 1;
    for (place, m) in memory.iter().enumerate() {
        sum = sum.saturating_add(*m);
        if sum >= n_experts {
            smallest = place + 1;
            break;
        }
    }
    // A device contributes at most one copy of all experts.
    let useful = memory.iter().fold(0u128, |sum, m| sum + u128::from(*m.min(&n_experts)));
    (smallest, usize::try_from(useful / u128::from(n_experts)).unwrap_or(usize::MAX))
}

/// Lower bound on the all-reduce between k groups.
struct ReduceBound {
    /// Links that can be the slowest between groups, one of each kind, and the maximum number of groups for each.
    kinds: Vec<(Link, usize)>,
}

impl ReduceBound {
    fn new<L: LeastExchange>(problem: &Problem<L>, allow_idle: bool) -> ReduceBound {
        let n = problem.n();
        if n < 2 {
            return ReduceBound { kinds: Vec::new() };
        }
        if allow_idle {
            return ReduceBound { kinds: vec![(problem.links.fastest(), n)] };
        }
        // If edge t (from 0) is the slowest between groups, the t slower ones are inside groups: at most n - t groups.
        let mut kinds: Vec<(Link, usize)> = Vec::new();
        for (t, edge) in problem.edges.iter().enumerate() {
            if kinds.last().is_none_or(|(link, _)| *link != edge.link) {
                kinds.push((edge.link, n - t));
            }
        }
        ReduceBound { kinds }
    }

    fn least<L: LinkTable>(&self, problem: &Problem<L>, k: usize) -> f64 {
        let kinds = self.kinds.iter().take_while(|(_, most)| k <= *most);
        kinds.map(|(link, _)| problem.all_reduce(k, *link)).fold(f64::INFINITY, f64::min)
    }
}
