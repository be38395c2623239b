//! The number of window slots that a PE has for a source, which is also the number of messages per fence on a network
//! (`kernels/dispatch.h`, "Waves").

use crate::moe::spec::{LayerSpec, Layout};

/// A window has slots for the mean of even routing plus this many standard deviations.
const DEVIATIONS: f64 = 3.0;

/// Number of slots of a source's window, for layers that copy rows out of the window. The source may send `round_chunks` chunks per refill.
/// The window has 7/16 of these, which is 7/8 of the even share with the default budget, but at least as many as even routing needs. So
/// with even routing slots are not reused, and a phase has at most one fence per inter-node peer. With relays, a window receives the rows
/// for a whole host, but has slots only for one PE's share of them. The number of fences then has the same bound, but slots are reused.
pub(super) fn window_chunks(spec: &LayerSpec, layout: &Layout, round_chunks: usize) -> usize {
    let hosts = &spec.options.hosts;
    let members = if hosts.relays() { (0..hosts.n_pes()).map(|pe| hosts.members(pe).count()).min() } else { None };
    let even = even_rows(spec).div_ceil(layout.chunk_rows).div_ceil(members.unwrap_or(1));
    (round_chunks * 7).div_ceil(16).max(even).min(round_chunks)
}

/// Number of rows that a source sends to the PE or host that gets most of them, if every set of experts is equally likely for each token. A
/// token is one row per destination, regardless of its number of experts there.
fn even_rows(spec: &LayerSpec) -> usize {
    let LayerSpec { config, placement, options, max_tokens, .. } = spec;
    let relays = options.hosts.relays();
    let n = placement.n_pes();
    let to = |pe: usize| if relays { options.hosts.members(pe).next().unwrap_or(pe) } else { pe };
    let first: Vec<usize> = (0..n).map(to).collect();
    let experts = placement.n_experts();
    // Maximum number of experts at one destination, as the sum of the source's shares. Without replicas it is the same for all sources.
    let mut most = 0.0f64;
    for source in 0..if placement.has_replicas() { n } else { 1 } {
        let mut held = vec![0.0; n];
        for e in 0..experts {
            let mut before = 0;
            for (pe, _, until) in placement.shares(e, source) {
                held[first[pe]] += (until - before) as f64 / (1u64 << 32) as f64;
                before = until;
            }
        }
        if placement.has_replicas() {
            held[first[source]] = 0.0;
        }
        most = held.into_iter().fold(most, f64::max);
    }
    // Probability that a token has no expert at the destination.
    let none: f64 =
        (0..config.router.top_k.min(experts)).map(|i| (1.0 - most / (experts - i) as f64).max(0.0)).product();
    let (tokens, present) = (*max_tokens as f64, 1.0 - none);
    let rows = tokens * present + DEVIATIONS * (tokens * present * none).sqrt();
    (rows.ceil() as usize).min(*max_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::DeviceLimits;
    use crate::gpu::params::{LayerShape, Tables};
    use crate::moe::device::DeviceOptions;
    use crate::moe::device::shape::{ShapeOf, lay_out};
    use crate::moe::spec::{Activation, Dtype, Groups, Hosts, LayerConfig, MlpConfig, RouterConfig};

    /// Mixtral 8x7B, Qwen3-30B-A3B and DeepSeek-V3: hidden and intermediate sizes, experts, top-k.
    const MODELS: [(usize, usize, usize, usize); 3] = [(4096, 14336, 8, 2), (2048, 768, 128, 8), (7168, 2048, 256, 8)];
    const TOKENS: usize = 4096;

    fn spec_of((hidden, intermediate, experts, top_k): (usize, usize, usize, usize), n: usize) -> LayerSpec {
        let expert = MlpConfig::gated(intermediate, Activation::Silu);
        let config = LayerConfig::new(hidden, experts, RouterConfig::softmax(top_k), expert);
        LayerSpec::new(config, n, TOKENS).dtype(Dtype::Bf16).training(true)
    }

    /// The shape of a layer whose PEs use a network, and its symmetric memory in bytes.
    fn shape_of(spec: &LayerSpec) -> (LayerShape, u64) {
        let (device, groups) = (DeviceOptions::default(), Groups::one(spec.placement.clone()));
        let (device, groups) = (&device, &groups);
        let shape_of = ShapeOf { spec, device, groups, my_pe: 0, all_reachable: false, router_parts: 3 };
        let shape = shape_of.shape(&DeviceLimits::a100(), 108).unwrap();
        (shape, lay_out(&shape, &Tables::default(), 0, 0).unwrap().0.symmetric_bytes)
    }

    /// A random number below `n`, from the upper half of a linear congruential generator.
    fn random_below(state: &mut u64, n: usize) -> usize {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*state >> 33) as usize * n) >> 31
    }

    /// Number of chunks of one source for each destination. Expert `e` is at destination `to(e)`, and each token chooses `k` different
    /// experts.
    fn chunks(state: &mut u64, experts: usize, k: usize, chunk_rows: usize, to: &dyn Fn(usize) -> usize) -> Vec<usize> {
        let mut rows = vec![0usize; experts];
        for _ in 0..TOKENS {
            let mut chosen: Vec<usize> = Vec::new();
            while chosen.len() < k {
                let expert = random_below(state, experts);
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            let mut dests: Vec<usize> = chosen.into_iter().map(to).collect();
            dests.sort_unstable();
            dests.dedup();
            dests.into_iter().for_each(|dest| rows[dest] += 1);
        }
        rows.into_iter().map(|rows| rows.div_ceil(chunk_rows)).collect()
    }

    /// Number of fences of a phase: one per `window` messages. The messages are chunk 0 for all inter-node peers, then chunk 1, and so on.
    fn fences(remote: &[usize], window: usize) -> usize {
        let most = remote.iter().copied().max().unwrap_or(0);
        let sent = |number: &usize| number / remote.len() < remote[number % remote.len()];
        let mut waves: Vec<usize> = (0..most * remote.len()).filter(sent).map(|number| number / window).collect();
        waves.dedup();
        waves.len()
    }

    #[test]
    fn even_routing_has_at_most_one_fence_per_inter_node_peer() {
        let mut random = 1;
        let mut checked = 0;
        for model in MODELS {
            let (.., experts, k) = model;
            for n in [2usize, 4, 8, 16, 32, 64] {
                if n > experts {
                    continue;
                }
                let (shape, bytes) = shape_of(&spec_of(model, n));
                assert!(n > 16 || bytes <= 1 << 30, "{model:?} on {n}: {bytes} bytes");
                let window = shape.window_chunks as usize;
                for _ in 0..4 {
                    let all = chunks(&mut random, experts, k, shape.chunk_rows as usize, &|e| e * n / experts);
                    for of_host in [1, 4] {
                        let remote = &all[of_host.min(n)..n];
                        let (got, peers) = (fences(remote, window), remote.len());
                        assert!(got <= peers, "{model:?} on {n}, {of_host} a host: {got} fences to {peers} peers");
                        assert!(
                            remote.iter().all(|chunks| *chunks <= window),
                            "{model:?} on {n}: a slot is used again"
                        );
                        checked += usize::from(peers > 0);
                    }
                }
            }
        }
        assert!(checked > 80);
    }

    #[test]
    fn relayed_rows_have_at_most_one_fence_per_inter_node_pe() {
        let mut random = 1;
        for model in MODELS {
            let (.., experts, k) = model;
            for (n, of_host) in [(4, 2), (8, 2), (8, 4), (16, 4), (32, 4), (64, 4)] {
                if n > experts {
                    continue;
                }
                let mut spec = spec_of(model, n);
                spec.options.hosts = Hosts::new((0..n).map(|pe| pe / of_host).collect());
                let (shape, _) = shape_of(&spec);
                let to = |e: usize| e * n / experts / of_host;
                let all = chunks(&mut random, experts, k, shape.chunk_rows as usize, &to);
                let got = fences(&all[1..n / of_host], shape.window_chunks as usize);
                assert!(got <= n - of_host, "{model:?} on {n}, {of_host} a host: {got} fences");
            }
        }
    }

    /// With these budgets even routing needs fewer slots than 7/16 of the budget, so the window depends on the budget.
    #[test]
    fn window_grows_with_the_budget() {
        let spec_of = |model, n| {
            let mut spec = spec_of(model, n);
            spec.options.chunk_rows = Some(256);
            spec
        };
        let mut spec = spec_of(MODELS[2], 16);
        assert_eq!(shape_of(&spec).0.window_chunks, 7);
        spec.options.budget_factor = 1.0;
        assert_eq!((shape_of(&spec).0.round_chunks, shape_of(&spec).0.window_chunks), (8, 7));
        let mut spec = spec_of(MODELS[2], 64);
        spec.options.budget_factor = 4.0;
        assert_eq!((shape_of(&spec).0.round_chunks, shape_of(&spec).0.window_chunks), (8, 4));
    }
}
