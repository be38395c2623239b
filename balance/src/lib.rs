//! Balances experts over ranks by replicas of hot experts.
//!
//! The meaning of the arguments and of the result is that of EPLB (DeepSeek-AI 2025): the tokens of an expert are split evenly among its replicas, and all
//! ranks hold the same number of physical experts. The algorithm is not EPLB's: an expert has at most one replica on a rank. Replicas are counted for several
//! largest loads, packed by LPT (Graham 1969), and counts and ranks are annealed together (Kirkpatrick, Gelatt and Vecchi 1983). With unequal shares, which a
//! plan has too, all loads become equal: a rank gets whole experts and a part of another one, as in the alias method (Walker 1977).

mod borrow;
mod node;
mod random;
mod shares;
mod split;

use aristos_formats::InputError;
use aristos_formats::cluster::{Number, parse_json};
pub use borrow::{Borrowed, Borrowing, borrow};
pub use random::Random;
pub use split::{Quota, divide_sources, split_rows};

use node::{improve, least_load, matched, place};
use shares::{fill, largest, level};

/// Maximum physical experts of a layer, of all layers together, and numbers in `log2phy`: they bound the time to seconds a layer and the result to 512 MiB.
const MOST: usize = 16_384;
const MOST_IN_ALL: usize = 262_144;
const MOST_LISTED: usize = 1 << 26;
/// Tolerance of an imbalance that is to be reached.
const EQUAL: f64 = 1e-9;

/// The placement of the physical experts of some layers.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
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
    /// `[layers][replicas]`, with unequal shares: the part of its expert's tokens that each physical expert gets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Vec<f64>>,
    /// `[layers]`, with a placement in use: its imbalance.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub imbalance_current: Vec<f64>,
    /// `[layers]`, with a placement in use: the physical experts that are new on their rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<usize>,
}

/// What [`rebalance_with`] does beyond [`rebalance_experts`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Rebalance<'a> {
    /// Whether the tokens of an expert may be split unequally among its replicas.
    pub shares: bool,
    /// The placement in use, as [`Rebalanced::phy2log`].
    pub current: Option<&'a [Vec<usize>]>,
    /// The part of the mean load by which each move of a physical expert to another rank must lower the largest load.
    pub move_cost: f64,
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
    rebalance_with(Rebalance::default(), weight, num_replicas, num_groups, num_nodes, num_ranks)
}

/// As [`rebalance_with`], with the least number of physical experts that reaches an `imbalance`, or, without one, that holds all experts. The number is bisected:
/// one physical expert fewer per rank misses the imbalance, but the search may reach it with still fewer.
///
/// # Errors
/// As [`rebalance_with`], and if no allowed number reaches the imbalance.
pub fn rebalance_auto(
    how: Rebalance,
    weight: &[Vec<f64>],
    imbalance: Option<f64>,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
) -> Result<Rebalanced, InputError> {
    let experts = weight.first().map_or(0, Vec::len);
    let most = imbalance.unwrap_or(f64::INFINITY);
    if most.is_nan() || most < 1.0 {
        return Err(InputError::value("imbalance", format!("is {most}"), "at least 1"));
    }
    let fewest = experts.div_ceil(num_ranks.max(1)).saturating_mul(num_ranks.max(1));
    check(weight, experts, fewest, num_groups, num_nodes, num_ranks)?;
    // Once every rank of a node holds all its experts, more replicas change no load.
    let whole = experts / nodes_used(num_groups, num_nodes) * num_ranks;
    let last = whole.min(MOST).min(MOST_IN_ALL / weight.len()) / num_ranks;
    let wrong = |expected: String| Err(InputError::value("imbalance", format!("is {most}"), expected));
    // A lower bound above the imbalance rules a size out without a search.
    let bound = |size: usize| {
        let of =
            |weight: &Vec<f64>| over(weight, num_ranks, least_load(weight, num_ranks, size * num_ranks, how.shares));
        weight.iter().map(of).fold(1.0, f64::max)
    };
    let ruled_out = |size: usize| bound(size) > most * (1.0 + EQUAL);
    if ruled_out(last) {
        return wrong(format!("at least {}, the lower bound of {} physical experts", bound(last), last * num_ranks));
    }
    let (mut low, mut first) = (fewest / num_ranks - 1, last);
    while low + 1 < first {
        let middle = (low + first) / 2;
        if ruled_out(middle) { low = middle } else { first = middle }
    }
    // Sizes grow faster and faster until one reaches the imbalance; then bisection. A size that is an error is too large.
    let (mut size, mut step) = (first, 1);
    let mut found = None;
    while size > low {
        let all = balance(how, most, weight, size * num_ranks, num_groups, num_nodes, num_ranks);
        if all.as_ref().is_ok_and(|all| all.imbalance.iter().any(|reached| *reached > most * (1.0 + EQUAL))) {
            low = size;
        } else {
            found = Some((size, all));
        }
        size = match &found {
            Some((high, _)) => (low + high) / 2,
            None => last.min(low + step),
        };
        step *= 2;
    }
    if let Some((_, all)) = found {
        return all;
    }
    let all = rebalance_with(how, weight, last * num_ranks, num_groups, num_nodes, num_ranks)?;
    let reached = all.imbalance.iter().copied().fold(1.0, f64::max);
    wrong(format!("at least {reached}, which the search reaches with {} physical experts", last * num_ranks))
}

/// As [`rebalance_experts`], with a placement in use, from which experts move as far as it pays, and with unequal shares.
///
/// # Errors
/// As [`rebalance_experts`], and if the placement in use has not as many layers and physical experts, lacks an expert, or its cost is not a number from 0 on.
pub fn rebalance_with(
    how: Rebalance,
    weight: &[Vec<f64>],
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
) -> Result<Rebalanced, InputError> {
    balance(how, f64::INFINITY, weight, num_replicas, num_groups, num_nodes, num_ranks)
}

/// [`rebalance_with`], which searches until the imbalance is at most `most`, if that is possible, and ends after the first layer that misses it.
fn balance(
    how: Rebalance,
    most: f64,
    weight: &[Vec<f64>],
    num_replicas: usize,
    num_groups: usize,
    num_nodes: usize,
    num_ranks: usize,
) -> Result<Rebalanced, InputError> {
    let experts = weight.first().map_or(0, Vec::len);
    check(weight, experts, num_replicas, num_groups, num_nodes, num_ranks)?;
    check_current(how, weight.len(), experts, num_replicas)?;
    let nodes = nodes_used(num_groups, num_nodes);
    let groups = if nodes > 1 { num_groups } else { 1 };
    let (size, node_slots) = (num_replicas / num_ranks, num_replicas / nodes);
    let mut all = Rebalanced::default();
    let mut listed = 0;
    for (layer, weight) in weight.iter().enumerate() {
        let mean = weight.iter().sum::<f64>() / num_ranks as f64;
        let over = |load: f64| over(weight, num_ranks, load);
        // Half the tolerance is left for rounding.
        let goal = if mean > 0.0 { most * mean * (1.0 + EQUAL / 2.0) } else { f64::INFINITY };
        let old = how.current.map(|current| &current[layer][..]);
        // The groups of a placement in use stay on their nodes.
        let in_use = old.and_then(|old| nodes_of(old, experts, groups, nodes));
        let kept = old.filter(|_| in_use.is_some());
        let (mut phy2log, mut loads) = (Vec::new(), Vec::new());
        for (i, node) in in_use.unwrap_or_else(|| spread_groups(weight, groups, nodes)).into_iter().enumerate() {
            let own: Vec<f64> = node.iter().map(|&e| weight[e]).collect();
            let place = |e: &usize| node.iter().position(|own| own == e).unwrap_or(0);
            let old =
                kept.map(|old| old[i * node_slots..(i + 1) * node_slots].iter().map(place).collect::<Vec<usize>>());
            let (slots, of) =
                place_node(&own, size, node_slots, how.shares, old.as_deref(), how.move_cost * mean, goal);
            phy2log.extend(slots.into_iter().map(|e| node[e]));
            loads.extend(of);
        }
        let mut logcnt = vec![0; experts];
        phy2log.iter().for_each(|&e| logcnt[e] += 1);
        let largest_count = logcnt.iter().copied().max().unwrap_or(0);
        listed += largest_count * experts;
        if listed > MOST_LISTED {
            let found = format!("is {num_replicas}, which makes a log2phy of more than {MOST_LISTED} numbers");
            return Err(InputError::value("num_replicas", found, "fewer"));
        }
        let mut log2phy = vec![vec![-1; largest_count]; experts];
        let mut seen = vec![0; experts];
        for (physical, &e) in phy2log.iter().enumerate() {
            log2phy[e][seen[e]] = physical as i64;
            seen[e] += 1;
        }
        all.imbalance.push(over(largest(&loads, size)));
        all.imbalance_least.push(over(least_load(weight, num_ranks, num_replicas, how.shares)));
        if how.shares {
            let share =
                |(e, load): (&usize, f64)| if weight[*e] > 0.0 { load / weight[*e] } else { 1.0 / logcnt[*e] as f64 };
            all.shares.push(phy2log.iter().zip(loads).map(share).collect());
        }
        if let Some(old) = old {
            all.imbalance_current.push(over(largest(&loads_of(weight, old, size, how.shares, f64::INFINITY), size)));
            all.moved.push(old.iter().zip(&phy2log).filter(|(old, new)| old != new).count());
        }
        all.phy2log.push(phy2log);
        all.log2phy.push(log2phy);
        all.logcnt.push(logcnt);
        if all.imbalance[layer] > most * (1.0 + EQUAL) {
            break;
        }
    }
    Ok(all)
}

/// The nodes that groups are kept on: as in EPLB, only if every node gets the same number.
fn nodes_used(num_groups: usize, num_nodes: usize) -> usize {
    if num_groups.is_multiple_of(num_nodes) { num_nodes } else { 1 }
}

/// The load of a rank over the mean.
fn over(weight: &[f64], ranks: usize, load: f64) -> f64 {
    let mean = weight.iter().sum::<f64>() / ranks as f64;
    if mean > 0.0 { load / mean } else { 1.0 }
}

/// The load of each slot.
fn loads_of(weight: &[f64], slots: &[usize], size: usize, shares: bool, goal: f64) -> Vec<f64> {
    if shares {
        return fill(weight, slots, size, goal);
    }
    let mut counts = vec![0; weight.len()];
    slots.iter().for_each(|&e| counts[e] += 1);
    slots.iter().map(|&e| weight[e] / counts[e] as f64).collect()
}

/// The experts of a node's slots, and their loads: new ones, or from `old` those with the least sum of the largest load and the cost of the moves.
fn place_node(
    weight: &[f64],
    size: usize,
    slots: usize,
    shares: bool,
    old: Option<&[usize]>,
    cost: f64,
    goal: f64,
) -> (Vec<usize>, Vec<f64>) {
    let with_loads = |slots: Vec<usize>| {
        let loads = loads_of(weight, &slots, size, shares, goal);
        (slots, loads)
    };
    let ranks = slots / size;
    let level = if shares { level(weight, ranks, size, goal) } else { None };
    let fresh = level.unwrap_or_else(|| with_loads(place(weight, ranks, size, goal)));
    let ordered = |order: Vec<usize>, from: &(Vec<usize>, Vec<f64>)| {
        (order.iter().map(|&slot| from.0[slot]).collect(), order.iter().map(|&slot| from.1[slot]).collect())
    };
    let Some(old) = old else {
        let mut order: Vec<usize> = (0..slots).collect();
        order.chunks_mut(size).for_each(|rank| rank.sort_by_key(|&slot| fresh.0[slot]));
        return ordered(order, &fresh);
    };
    let mut found = vec![fresh];
    if weight.len() > size {
        found.extend(improve(weight, size, old, cost).map(with_loads));
    }
    let score = |(new, loads): &(Vec<usize>, Vec<f64>)| {
        let moved = old.iter().zip(new).filter(|(old, new)| old != new).count();
        largest(loads, size) + cost * moved as f64
    };
    let found = found.iter().map(|found| ordered(matched(old, &found.0, size), found));
    found.min_by(|a, b| score(a).total_cmp(&score(b))).unwrap_or_default()
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

/// Reads the `phy2log` of a placement, as `aristos rebalance --json` prints it.
///
/// # Errors
/// Returns an error that names the path inside the text, the value found and the expected one.
pub fn placement_in_use(text: &str) -> Result<Vec<Vec<usize>>, InputError> {
    #[derive(serde::Deserialize)]
    struct Placement {
        phy2log: Vec<Vec<usize>>,
    }
    Ok(parse_json::<Placement>(text)?.phy2log)
}

fn check_current(how: Rebalance, layers: usize, experts: usize, num_replicas: usize) -> Result<(), InputError> {
    let wrong = |field: String, found: String, expected: String| Err(InputError::value(field, found, expected));
    if !(0.0..=1e30).contains(&how.move_cost) {
        return wrong("move_cost".into(), format!("is {}", how.move_cost), "a number from 0 to 1e30".into());
    }
    let Some(current) = how.current else { return Ok(()) };
    if current.len() != layers {
        return wrong("phy2log".into(), format!("has {} layers", current.len()), format!("{layers}, as weight"));
    }
    for (layer, slots) in current.iter().enumerate() {
        let field = format!("phy2log[{layer}]");
        if slots.len() != num_replicas {
            return wrong(field, format!("has {} numbers", slots.len()), format!("num_replicas, {num_replicas}"));
        }
        if let Some((slot, e)) = slots.iter().enumerate().find(|(_, e)| **e >= experts) {
            return wrong(format!("{field}[{slot}]"), format!("is {e}"), format!("an expert, below {experts}"));
        }
        let mut seen = vec![false; experts];
        slots.iter().for_each(|&e| seen[e] = true);
        if let Some(e) = seen.iter().position(|seen| !seen) {
            return wrong(field, format!("lacks expert {e}"), "every expert".into());
        }
    }
    Ok(())
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
        let least = experts.max(num_replicas).div_ceil(num_ranks).saturating_mul(num_ranks);
        let expected =
            format!("at least {experts}, one for each expert, and a multiple of num_ranks, {num_ranks}: {least}");
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

/// The experts of each node of a placement in use. `None` if a node does not hold whole groups, equally many each.
fn nodes_of(slots: &[usize], experts: usize, groups: usize, nodes: usize) -> Option<Vec<Vec<usize>>> {
    let mut node_of = vec![None; experts];
    for (slot, &e) in slots.iter().enumerate() {
        let node = slot * nodes / slots.len();
        if node_of[e].replace(node).is_some_and(|other| other != node) {
            return None;
        }
    }
    let held: Vec<Vec<usize>> =
        (0..nodes).map(|node| (0..experts).filter(|&e| node_of[e] == Some(node)).collect()).collect();
    let whole = node_of.chunks(experts / groups).all(|group| group.iter().all(|node| *node == group[0]));
    (whole && held.iter().all(|held| held.len() * nodes == experts)).then_some(held)
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
