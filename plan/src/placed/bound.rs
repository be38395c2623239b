//! Lower bounds on the placed objective, by number of groups. The notation, and bounds 5 and 6, are those of `crate::bound`.
//!
//! E experts, `total` the sum of their costs; r(s) is the least over devices j of the sum of the s - 1 smallest alphas to j plus d / min(s, E)
//! times that of the betas.
//!
//! 1. A group of s devices computes at least s times the largest of: `total` over the rate of the min(s, E) fastest, and for j up to s the cost
//!    of the j most expensive experts over the rate of the j fastest. One of at most min(s, E) holders has an even share or more and receives
//!    at least r(s). x(s) is the sum with eta r(s).
//! 2. As bound 2 of `crate::bound`, with minima of ranges because x is not monotonic.
//! 3. max compute * F_g >= |g| total in any group, so max compute >= W total / F(W) over all; plus the least eta r(s).

use super::Experts;
use crate::bound::{Bounds, LeastExchange, RangeMin, bounds_by, by_memory, slack};
use crate::objective::Problem;

/// Maximum number of unlike devices whose links are sorted, which takes as long as all other steps.
const SORTED_MOST: usize = 128;

/// Values that the bounds of all numbers of groups share.
struct Sizes {
    total: f64,
    /// Index s: the rates of the s fastest devices.
    rate: Vec<f64>,
    smallest: usize,
    /// eta times the least that the device with most experts receives, by size.
    exchange: RangeMin,
    /// Compute and exchange, by size.
    least: RangeMin,
}

impl Sizes {
    /// The worst group's compute and communication, with `w` devices in `k` groups.
    fn work(&self, k: usize, w: usize) -> f64 {
        let largest = w - (k - 1) * self.smallest;
        // Some group has at most w / k members, some has at least that; and some is no faster than the mean.
        let small = self.least.of(self.smallest, w / k);
        let large = self.least.of(w.div_ceil(k), largest);
        let mean = w as f64 * self.total / self.rate[w];
        small.max(large).max(mean + self.exchange.of(self.smallest, largest))
    }
}

/// Bounds for every number of groups; `allow_idle` says whether devices may be left out.
pub(crate) fn bounds<L: LeastExchange>(problem: &Problem<L>, experts: &Experts, allow_idle: bool) -> Bounds {
    let n = problem.n();
    let (smallest, _) = by_memory(&problem.memory, problem.n_experts);
    let sizes = sizes(problem, experts, smallest);
    let slack = slack(n + experts.costs.len());
    bounds_by(problem, allow_idle, slack, |k, w| sizes.work(k, w), |k| sizes.least.of(smallest, n / k))
}

fn sizes<L: LeastExchange>(problem: &Problem<L>, experts: &Experts, smallest: usize) -> Sizes {
    let n = problem.n();
    let (eta, d) = (problem.workload.p2p_frequency, problem.workload.p2p_buffer_mb);
    let mut flops = problem.flops.clone();
    flops.sort_unstable_by(|a, b| b.total_cmp(a));
    let mut rate = vec![0.0; n + 1];
    (0..n).for_each(|s| rate[s + 1] = rate[s] + flops[s]);
    // The j most expensive experts are on at most j devices, at best the fastest.
    let mut compute = vec![0.0; n + 1];
    let (mut cost, mut dense) = (0.0, 0.0f64);
    for s in 1..=n {
        if let Some(&e) = experts.order.get(s - 1) {
            cost += experts.costs[e as usize];
            dense = dense.max(cost / rate[s]);
        }
        let all = experts.total / rate[s.min(experts.order.len())];
        compute[s] = s as f64 * dense.max(all);
    }
    // At most min(s, experts) devices hold experts, so one of them has at least an even share of the tokens.
    let share = |s: usize| if experts.total > 0.0 { d / s.min(experts.order.len()) as f64 } else { 0.0 };
    // With many unlike devices every link counts as the fastest.
    let received = match n <= SORTED_MOST || problem.links.devices_alike() {
        true => problem.links.least_received(share),
        false => {
            let fastest = problem.links.fastest();
            (1..=n).map(|s| (s - 1) as f64 * fastest.time_ms(share(s))).collect()
        }
    };
    let valid = |s: usize, ms: f64| if s < smallest { f64::INFINITY } else { ms };
    let exchange: Vec<f64> = (1..=n).map(|s| valid(s, eta * received[s - 1])).collect();
    let least = exchange.iter().zip(1..).map(|(ms, s)| ms + compute[s]).collect();
    let (exchange, least) = (RangeMin::new(exchange), RangeMin::new(least));
    Sizes { total: experts.total, rate, smallest, exchange, least }
}
