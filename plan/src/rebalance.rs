//! Balances experts over ranks by replicas of hot experts.
//!
//! The meaning of the arguments and of the result is that of EPLB (DeepSeek-AI 2025): the tokens of an expert are split evenly among its replicas, and all
//! ranks hold the same number of physical experts. The algorithm is not EPLB's: simulated annealing (Kirkpatrick, Gelatt and Vecchi
//! 1983) of counts and ranks together, starting from EPLB's greedy counts and a packing by LPT (Graham 1969).

use crate::InputError;
use crate::cluster::{Number, parse_json};
use crate::random::Random;

/// Annealing steps of a layer or one of its nodes: per physical expert, and the minimum and maximum.
const STEPS_EACH: u64 = 150;
const STEPS: (u64, u64) = (30_000, 60_000);
/// Layers of at most `FEW` physical experts get `ROUNDS_FEW` rounds, larger ones one.
const FEW: usize = 64;
const ROUNDS_FEW: u64 = 6;
/// The target for loads is the largest load of the best placement, less this share.
const UNDER: f64 = 0.004;
/// Temperatures at first and at last, as shares of the mean load, squared.
const HOT: f64 = 0.3;
const COLD: f64 = 0.001;

/// Maximum physical experts of a layer, of all layers together, and numbers in `log2phy`: they bound the time to seconds a layer and the result to 512 MiB.
const MOST: usize = 16_384;
const MOST_IN_ALL: usize = 262_144;
const MOST_LISTED: usize = 1 << 26;

/// The placement of the physical experts of some layers.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Rebalanced {
    /// `[layers][replicas]`: the logical expert of each physical one; rank r has the physical experts from `r * replicas / ranks` on.
    pub phy2log: Vec<Vec<usize>>,
    /// `[layers][experts][most replicas of an expert]`: the physical experts of each logical one, -1 where it has fewer.
    pub log2phy: Vec<Vec<Vec<i64>>>,
    /// `[layers][experts]`: how many physical experts each logical one has.
    pub logcnt: Vec<Vec<usize>>,
    /// `[layers]`: the largest load of a rank over the mean.
    pub imbalance: Vec<f64>,
    /// `[layers]`: a lower bound for any placement of as many physical experts.
    pub imbalance_least: Vec<f64>,
}

/// Replicates and places the experts of each layer: `weight[layer][expert]` is an expert's load in any unit, `num_replicas` the physical experts of a layer,
/// `num_groups` the groups that experts are routed in, each kept on one node if `num_nodes` divides them, and `num_ranks` the devices.
///
/// # Errors
/// Returns an error if layers differ in length, a load is negative or not a number, a count does not divide as required, or `num_replicas` exceeds 16,384, or
/// 262,144 in all layers, or `log2phy` would exceed 2^26 numbers.
pub fn rebalance_experts(
    weight: &[Vec<f64>],
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
) -> Result<Rebalanced, InputError> {
    let experts = weight.first().map_or(0, Vec::len);
    check(weight, experts, num_replicas, num_groups, num_nodes, num_ranks)?;
    // As in EPLB, groups stay on one node only if every node gets the same number.
    let nodes = if num_groups.is_multiple_of(num_nodes) { num_nodes } else { 1 };
    let groups = if nodes > 1 { num_groups } else { 1 };
    let mut all = Rebalanced {
        phy2log: Vec::new(),
        log2phy: Vec::new(),
        logcnt: Vec::new(),
        imbalance: Vec::new(),
        imbalance_least: Vec::new(),
    };
    let mut listed = 0;
    for weight in weight {
        let mut phy2log = Vec::with_capacity(num_replicas);
        for node in spread_groups(weight, groups, nodes) {
            let own: Vec<f64> = node.iter().map(|&e| weight[e]).collect();
            let placed = Node::new(&own, num_ranks / nodes, num_replicas / num_ranks).anneal();
            phy2log.extend(placed.into_iter().map(|e| node[e]));
        }
        let mut logcnt = vec![0; experts];
        phy2log.iter().for_each(|&e| logcnt[e] += 1);
        let most = logcnt.iter().copied().max().unwrap_or(0);
        listed += most * experts;
        if listed > MOST_LISTED {
            let found = format!("is {num_replicas}, which makes a log2phy of more than {MOST_LISTED} numbers");
            return Err(InputError::value("num_replicas", found, "fewer"));
        }
        let mut log2phy = vec![vec![-1; most]; experts];
        let mut seen = vec![0; experts];
        for (physical, &e) in phy2log.iter().enumerate() {
            log2phy[e][seen[e]] = physical as i64;
            seen[e] += 1;
        }
        let mean = weight.iter().sum::<f64>() / num_ranks as f64;
        let load = |slots: &[usize]| slots.iter().map(|&e| weight[e] / logcnt[e] as f64).sum::<f64>();
        let largest = phy2log.chunks(num_replicas / num_ranks).map(load).fold(0.0, f64::max);
        let over = |load: f64| if mean > 0.0 { load / mean } else { 1.0 };
        all.imbalance.push(over(largest));
        all.imbalance_least.push(over(least_load(weight, num_ranks, num_replicas)));
        all.phy2log.push(phy2log);
        all.log2phy.push(log2phy);
        all.logcnt.push(logcnt);
    }
    Ok(all)
}

/// Reads loads from a JSON text: `weight`, a list per layer, or `tokens_per_expert`, one list, as in a report of `aristos run --json`.
///
/// # Errors
/// Returns an error that names the path inside the text, the value found and the expected one.
pub fn expert_weights(text: &str) -> Result<Vec<Vec<f64>>, InputError> {
    #[derive(serde::Deserialize)]
    struct Loads {
        weight: Option<Vec<Vec<Number>>>,
        tokens_per_expert: Option<Vec<Number>>,
    }
    let loads: Loads = parse_json(text)?;
    match (loads.weight, loads.tokens_per_expert) {
        (Some(layers), _) => {
            Ok(layers.into_iter().map(|layer| layer.into_iter().map(|number| number.0).collect()).collect())
        }
        (None, Some(layer)) => Ok(vec![layer.into_iter().map(|number| number.0).collect()]),
        (None, None) => {
            Err(InputError::value("weight", "is missing", "a list of loads for each layer, or tokens_per_expert"))
        }
    }
}

fn check(
    weight: &[Vec<f64>],
    experts: usize,
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
) -> Result<(), InputError> {
    let wrong =
        |field: &str, found: usize, expected: String| Err(InputError::value(field, format!("is {found}"), expected));
    if experts == 0 {
        return Err(InputError::value("weight", "is empty", "a layer with at least one expert"));
    }
    for (layer, loads) in weight.iter().enumerate() {
        if loads.len() != experts {
            let found = format!("has {} numbers", loads.len());
            return Err(InputError::value(format!("weight[{layer}]"), found, format!("{experts}, as weight[0]")));
        }
        if let Some((e, load)) = loads.iter().enumerate().find(|(_, load)| !(0.0..=1e30).contains(*load)) {
            let expected = "a number from 0 to 1e30";
            return Err(InputError::value(format!("weight[{layer}][{e}]"), format!("is {load:?}"), expected));
        }
    }
    for (field, number) in [("num_groups", num_groups), ("num_nodes", num_nodes), ("num_ranks", num_ranks)] {
        if number == 0 {
            return wrong(field, number, "at least 1".into());
        }
    }
    if num_replicas < experts || !num_replicas.is_multiple_of(num_ranks) {
        let expected = format!("at least {experts}, one for each expert, and a multiple of num_ranks, {num_ranks}");
        return wrong("num_replicas", num_replicas, expected);
    }
    if num_replicas > MOST.min(MOST_IN_ALL / weight.len()) {
        let expected = match MOST * weight.len() > MOST_IN_ALL {
            false => format!("at most {MOST}"),
            true => format!("at most {}, {MOST_IN_ALL} in {} layers", MOST_IN_ALL / weight.len(), weight.len()),
        };
        return wrong("num_replicas", num_replicas, expected);
    }
    if !num_ranks.is_multiple_of(num_nodes) {
        return wrong("num_nodes", num_nodes, format!("a divisor of num_ranks, {num_ranks}"));
    }
    if !experts.is_multiple_of(num_groups) {
        return wrong("num_groups", num_groups, format!("a divisor of the number of experts, {experts}"));
    }
    Ok(())
}

/// The experts of each node: the same number of groups on each, assigned the heaviest first, each to the lightest node with room.
fn spread_groups(weight: &[f64], groups: usize, nodes: usize) -> Vec<Vec<usize>> {
    let size = weight.len() / groups;
    let load = |g: usize| weight[g * size..(g + 1) * size].iter().sum::<f64>();
    let mut order: Vec<usize> = (0..groups).collect();
    order.sort_by(|&a, &b| load(b).total_cmp(&load(a)).then(a.cmp(&b)));
    let mut held: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new()); nodes];
    for g in order {
        let free = held.iter_mut().filter(|(_, held)| held.len() < groups / nodes);
        if let Some((sum, held)) = free.min_by(|a, b| a.0.total_cmp(&b.0)) {
            *sum += load(g);
            held.push(g);
        }
    }
    let experts = |groups: Vec<usize>| groups.into_iter().flat_map(|g| g * size..(g + 1) * size).collect();
    held.into_iter().map(|(_, groups)| experts(groups)).collect()
}

/// A lower bound on the largest load of a rank: the mean, and the least T for which replicas of load at most T, sum of ceil(w / T), fit into the slots.
fn least_load(weight: &[f64], ranks: usize, slots: usize) -> f64 {
    let mean = weight.iter().sum::<f64>() / ranks as f64;
    let needed = |most: f64| weight.iter().map(|w| (w / most).ceil().max(1.0)).sum::<f64>();
    if mean <= 0.0 || needed(mean) <= slots as f64 {
        return mean;
    }
    // Invariant: `low` is too small.
    let (mut low, mut high) = (mean, weight.iter().copied().fold(mean, f64::max));
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if needed(middle) <= slots as f64 { high = middle } else { low = middle }
    }
    low
}

/// The annealing state: the physical experts of one node.
struct Node<'w> {
    weight: &'w [f64],
    /// Physical experts of a rank.
    size: usize,
    /// The expert of each physical expert, rank by rank.
    slots: Vec<usize>,
    /// By expert, its slots.
    places: Vec<Vec<usize>>,
    load: Vec<f64>,
    /// The target for loads: a little below the largest load of the best placement.
    target: f64,
    /// The lower bound on the largest load.
    least: f64,
}

impl<'w> Node<'w> {
    fn new(weight: &'w [f64], ranks: usize, size: usize) -> Self {
        let counts = greedy_counts(weight, ranks * size);
        // The heaviest first, each to the lightest rank with room.
        let mut replicas: Vec<usize> = (0..weight.len()).flat_map(|e| std::iter::repeat_n(e, counts[e])).collect();
        let of = |e: usize| weight[e] / counts[e] as f64;
        replicas.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
        let mut ranks: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::with_capacity(size)); ranks];
        for e in replicas {
            let free = ranks.iter_mut().filter(|(_, held)| held.len() < size);
            if let Some((sum, held)) = free.min_by(|a, b| a.0.total_cmp(&b.0)) {
                *sum += of(e);
                held.push(e);
            }
        }
        let slots: Vec<usize> = ranks.iter().flat_map(|(_, held)| held.clone()).collect();
        let mut places = vec![Vec::new(); weight.len()];
        slots.iter().enumerate().for_each(|(slot, &e)| places[e].push(slot));
        let least = least_load(weight, ranks.len(), slots.len());
        let load = ranks.into_iter().map(|(sum, _)| sum).collect();
        Node { weight, size, slots, places, load, target: least, least }
    }

    fn over(&self, load: f64) -> f64 {
        let over = (load - self.target).max(0.0);
        over * over
    }

    fn replica(&self, e: usize, count: usize) -> f64 {
        self.weight[e] / count as f64
    }

    fn largest(&self) -> f64 {
        self.load.iter().copied().fold(0.0, f64::max)
    }

    /// Anneals, and returns the best slots found, sorted within each rank.
    fn anneal(mut self) -> Vec<usize> {
        let mean = self.weight.iter().sum::<f64>() / self.load.len() as f64;
        let mut random = Random(self.slots.len() as u64);
        let (n, ranks) = (self.slots.len(), self.load.len());
        let mut best = (self.largest(), self.slots.clone());
        let steps = (STEPS_EACH * n as u64).clamp(STEPS.0, STEPS.1);
        let rounds = if n <= FEW { ROUNDS_FEW } else { 1 };
        let mut worst = 0;
        let mut temperature = 0.0;
        for step in 0..rounds * steps {
            if ranks == 1 || mean <= 0.0 || best.0 <= self.least * (1.0 + 1e-9) {
                break;
            }
            let step = step % steps;
            if step.is_multiple_of(64) {
                self.target = self.least.max(best.0 * (1.0 - UNDER));
                let progress = step as f64 / steps as f64;
                temperature = (mean * HOT * (COLD / HOT).powf(progress)).powi(2);
                worst = (0..ranks).fold(0, |worst, r| if self.load[r] > self.load[worst] { r } else { worst });
            }
            let slot = match random.below(2) {
                0 => worst * self.size + random.below(self.size),
                _ => random.below(n),
            };
            let allowed = -temperature * (1.0 - random.real()).ln();
            let changed = match random.below(8) {
                0 => self.replace(slot, random.below(self.weight.len()), allowed),
                _ => self.swap(slot, random.below(n), allowed),
            };
            if changed && self.largest() < best.0 * (1.0 - 1e-12) {
                best = (self.largest(), self.slots.clone());
            }
        }
        best.1.chunks_mut(self.size).for_each(|held| held.sort_unstable());
        best.1
    }

    /// Swaps two physical experts unless that is worse by more than `allowed`.
    fn swap(&mut self, a: usize, b: usize, allowed: f64) -> bool {
        let (r, s) = (a / self.size, b / self.size);
        let (e, f) = (self.slots[a], self.slots[b]);
        if r == s || e == f {
            return false;
        }
        let moved = self.replica(e, self.places[e].len()) - self.replica(f, self.places[f].len());
        let (here, there) = (self.load[r] - moved, self.load[s] + moved);
        let gain = self.over(here) + self.over(there) - self.over(self.load[r]) - self.over(self.load[s]);
        if gain > allowed {
            return false;
        }
        (self.load[r], self.load[s]) = (here, there);
        self.slots.swap(a, b);
        for (e, from, to) in [(e, a, b), (f, b, a)] {
            self.places[e].iter_mut().filter(|place| **place == from).for_each(|place| *place = to);
        }
        true
    }

    /// Replaces the replica in `slot` by one of `f`, unless it is the last of its expert or the result is worse by more than `allowed`.
    fn replace(&mut self, slot: usize, f: usize, allowed: f64) -> bool {
        let e = self.slots[slot];
        let (fewer, more) = (self.places[e].len(), self.places[f].len());
        if e == f || fewer == 1 {
            return false;
        }
        let touched: Vec<usize> = self.places[e].iter().chain(&self.places[f]).map(|place| place / self.size).collect();
        let before: Vec<(usize, f64)> = touched.iter().map(|&r| (r, self.load[r])).collect();
        let sum = |node: &Node| {
            let mut ranks = touched.clone();
            ranks.sort_unstable();
            ranks.dedup();
            ranks.into_iter().map(|r| node.over(node.load[r])).sum::<f64>()
        };
        let was = sum(self);
        let change = |node: &mut Node, e: usize, by: f64| {
            node.places[e].iter().for_each(|place| node.load[place / node.size] += by);
        };
        change(self, e, self.replica(e, fewer - 1) - self.replica(e, fewer));
        change(self, f, self.replica(f, more + 1) - self.replica(f, more));
        let r = slot / self.size;
        self.load[r] += self.replica(f, more + 1) - self.replica(e, fewer - 1);
        if sum(self) - was > allowed {
            before.into_iter().for_each(|(r, load)| self.load[r] = load);
            return false;
        }
        self.slots[slot] = f;
        self.places[e].retain(|place| *place != slot);
        self.places[f].push(slot);
        true
    }
}

/// EPLB's rule: each further replica goes to the expert with the most load per replica.
fn greedy_counts(weight: &[f64], slots: usize) -> Vec<usize> {
    let mut counts = vec![1; weight.len()];
    for _ in weight.len()..slots {
        let load = |e: usize| weight[e] / counts[e] as f64;
        let heaviest = (1..weight.len()).fold(0, |best, e| if load(e) > load(best) { e } else { best });
        counts[heaviest] += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the invariants of every result.
    fn check(weight: &[Vec<f64>], replicas: usize, ranks: usize, all: &Rebalanced) {
        for (layer, weight) in weight.iter().enumerate() {
            let (phy2log, logcnt) = (&all.phy2log[layer], &all.logcnt[layer]);
            assert_eq!(phy2log.len(), replicas);
            for (e, count) in logcnt.iter().enumerate() {
                let places: Vec<i64> = (0..replicas).filter(|&p| phy2log[p] == e).map(|p| p as i64).collect();
                assert!(!places.is_empty() && places.len() == *count, "expert {e}");
                assert_eq!(all.log2phy[layer][e][..places.len()], places);
                assert!(all.log2phy[layer][e][places.len()..].iter().all(|p| *p == -1));
            }
            let load = |held: &[usize]| held.iter().map(|&e| weight[e] / logcnt[e] as f64).sum::<f64>();
            let largest = phy2log.chunks(replicas / ranks).map(load).fold(0.0, f64::max);
            let mean = weight.iter().sum::<f64>() / ranks as f64;
            let imbalance = if mean > 0.0 { largest / mean } else { 1.0 };
            assert!((all.imbalance[layer] - imbalance).abs() < 1e-12);
            assert!(all.imbalance_least[layer] <= imbalance * (1.0 + 1e-9));
        }
    }

    #[test]
    fn hot_experts_are_replicated_as_well_as_can_be() {
        // The optimum by brute force: 560 / 3 + 10 on a rank.
        let weight = vec![vec![600.0, 560.0, 120.0, 120.0, 20.0, 10.0, 10.0, 10.0]];
        let all = rebalance_experts(&weight, 16, 1, 1, 8).unwrap();
        check(&weight, 16, 8, &all);
        assert!(all.imbalance[0] < 1.0852, "{:?}", all.imbalance);
        // EPLB's README: two layers of 12 experts in 4 groups, 16 replicas, 2 nodes of 4 GPUs.
        let weight = [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ];
        let weight: Vec<Vec<f64>> = weight.iter().map(|layer| layer.iter().map(|w| f64::from(*w)).collect()).collect();
        let all = rebalance_experts(&weight, 16, 1, 1, 8).unwrap();
        check(&weight, 16, 8, &all);
        assert!(all.imbalance[0] < 1.054 && all.imbalance[1] < 1.191, "{:?}", all.imbalance);
        // With whole groups the first layer cannot be better than in that README.
        let all = rebalance_experts(&weight, 16, 4, 2, 8).unwrap();
        check(&weight, 16, 8, &all);
        assert!(all.imbalance[0] < 1.209 && all.imbalance[1] < 1.243, "{:?}", all.imbalance);
        // Groups stay on one node.
        for phy2log in &all.phy2log {
            let nodes: Vec<Vec<usize>> = phy2log.chunks(8).map(|held| held.iter().map(|e| e / 3).collect()).collect();
            assert!(nodes[0].iter().all(|group| !nodes[1].contains(group)), "{nodes:?}");
        }
    }

    #[test]
    fn many_layers_are_balanced() {
        let mut random = Random(5);
        let mut layer = || (0..256).map(|_| (2.0 * random.real()).exp() * 100.0).collect::<Vec<f64>>();
        let weight: Vec<Vec<f64>> = (0..8).map(|_| layer()).collect();
        let all = rebalance_experts(&weight, 288, 8, 4, 32).unwrap();
        check(&weight, 288, 32, &all);
        let flat = rebalance_experts(&weight, 288, 1, 1, 32).unwrap();
        check(&weight, 288, 32, &flat);
        let mean = flat.imbalance.iter().sum::<f64>() / 8.0;
        assert!(mean < 1.005, "{:?}", flat.imbalance);
    }

    #[test]
    fn odd_loads_have_an_answer_and_wrong_ones_a_line() {
        for (weight, replicas, ranks) in [(vec![0.0; 4], 8, 2), (vec![5.0], 3, 3), (vec![1.0, 0.0, 7.0], 3, 1)] {
            let weight = vec![weight];
            check(&weight, replicas, ranks, &rebalance_experts(&weight, replicas, 1, 1, ranks).unwrap());
        }
        let four = vec![vec![1.0; 4]];
        for (error, part) in [
            (rebalance_experts(&[], 4, 1, 1, 2), "weight is empty"),
            (rebalance_experts(&[vec![1.0], vec![1.0, 2.0]], 4, 1, 1, 2), "weight[1] has 2 numbers, expected 1"),
            (rebalance_experts(&[vec![f64::NAN]], 4, 1, 1, 2), "weight[0][0] is NaN"),
            (rebalance_experts(&four, 3, 1, 1, 1), "num_replicas is 3, expected at least 4"),
            (rebalance_experts(&four, 5, 1, 1, 2), "num_replicas is 5"),
            (rebalance_experts(&four, 4, 1, 1, 0), "num_ranks is 0"),
            (rebalance_experts(&four, 4, 3, 1, 2), "num_groups is 3"),
            (rebalance_experts(&four, 4, 2, 3, 2), "num_nodes is 3"),
        ] {
            let line = error.unwrap_err().to_string();
            assert!(line.contains(part), "{line:?} does not say {part:?}");
        }
    }
}
