//! The physical experts of one node: the search for a placement, and for a change of one in use.

use crate::Random;

/// Annealing steps of a start: per physical expert, and the minimum and maximum.
const STEPS_EACH: u64 = 150;
const STEPS: (u64, u64) = (30_000, 60_000);
/// The target for loads is the largest load of the best placement, less this share.
const UNDER: f64 = 0.004;
/// Temperatures at first and at last, as shares of the mean load, squared.
const HOT: f64 = 0.3;
const COLD: f64 = 0.001;
/// A placement this close to the lower bound ends the search, unless a goal is closer.
const CLOSE: f64 = 1e-3;
/// Replicas are counted for largest loads of a replica of 1 - i / `LARGEST` times the lower bound of a rank's, i up to half of it, and for any largest load. The
/// best `ANNEALED` packings are annealed.
const LARGEST: usize = 40;
const ANNEALED: usize = 3;
/// Largest loads that a placement in use is brought to, and maximum exchanges considered.
const LEVELS: usize = 8;
const CONSIDERED: usize = 20_000_000;
/// Maximum exchanges of one step, and maximum ranks; larger nodes are only annealed, from one start.
const STEP: usize = 1 << 21;
const RANKS: usize = 1024;
/// Maximum exchanges considered after packing neighbouring counts, and the packing's own work in these units.
const PACKED: usize = 400_000;
const PACK: usize = 1000;

/// A lower bound on the largest load of a rank: the mean, and the least T for which replicas of load at most T fit into the slots while at most one
/// replica of more than T / 2 is on a rank.
/// With unequal `shares` a rank may have a part of each.
pub(super) fn least_load(weight: &[f64], ranks: usize, slots: usize, shares: bool) -> f64 {
    let mean = weight.iter().sum::<f64>() / ranks as f64;
    let mut halved = Vec::new();
    let mut fits = |most: f64| {
        halved.clear();
        let (mut needed, mut large) = (0.0, 0.0);
        for w in weight {
            let least = (w / most).ceil().max(1.0);
            needed += least;
            if w / least > most / 2.0 && !shares {
                large += least;
                halved.push(((2.0 * w / most).ceil() - least, least));
            }
        }
        // The experts that are cheapest to halve; the last one in part, which keeps this a bound.
        halved.sort_unstable_by(|a, b| (a.0 * b.1).total_cmp(&(b.0 * a.1)));
        for (more, least) in &halved {
            let part = ((large - ranks as f64) / least).clamp(0.0, 1.0);
            needed += more * part;
            large -= least * part;
        }
        needed <= slots as f64 * (1.0 + 1e-12)
    };
    if mean <= 0.0 || fits(mean) {
        return mean;
    }
    // Invariant: `low` is too small.
    let (mut low, mut high) = (mean, weight.iter().sum());
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if fits(middle) { high = middle } else { low = middle }
    }
    low
}

/// The replicas of each expert, at most one a rank: at first as many as loads of at most `most` need; then, as EPLB does, one for the expert with the most
/// load per replica, among those that need no rank of their own as long as there are any. `None` if the first ones do not fit.
fn counts(weight: &[f64], ranks: usize, slots: usize, most: f64) -> Option<Vec<usize>> {
    let mut counts: Vec<usize> = weight.iter().map(|w| ((w / most).ceil() as usize).clamp(1, ranks)).collect();
    for _ in counts.iter().sum::<usize>()..slots {
        let load = |e: usize| weight[e] / counts[e] as f64;
        let heaviest = |most: f64| {
            let open = (0..weight.len()).filter(|&e| counts[e] < ranks && load(e) <= most);
            open.max_by(|&a, &b| load(a).total_cmp(&load(b)).then(b.cmp(&a)))
        };
        let e = heaviest(most / 2.0).or_else(|| heaviest(f64::INFINITY))?;
        counts[e] += 1;
    }
    (counts.iter().sum::<usize>() == slots).then_some(counts)
}

/// The heaviest replicas first, each on the lightest rank that has room and does not hold its expert.
fn pack(weight: &[f64], counts: &[usize], ranks: usize, size: usize) -> Vec<usize> {
    let mut replicas: Vec<usize> = (0..weight.len()).flat_map(|e| std::iter::repeat_n(e, counts[e])).collect();
    let load = |e: usize| weight[e] / counts[e] as f64;
    replicas.sort_by(|&a, &b| load(b).total_cmp(&load(a)).then(a.cmp(&b)));
    let mut held: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::with_capacity(size)); ranks];
    for e in replicas {
        let lightest = |without: bool| {
            let free = |r: &usize| held[*r].1.len() < size && !(without && held[*r].1.contains(&e));
            (0..ranks).filter(free).min_by(|&a, &b| held[a].0.total_cmp(&held[b].0))
        };
        let (mut rank, mut placed) = (lightest(true), e);
        if rank.is_none() {
            // Ranks with room hold the expert. One without it has an expert that they do not hold, because it holds more.
            rank = lightest(false);
            let here = rank.unwrap_or(0);
            let others = (0..ranks).filter(|&other| !held[other].1.contains(&e));
            let given = others.flat_map(|other| (0..held[other].1.len()).map(move |i| (other, i)));
            let near = |&(other, i): &(usize, usize)| (load(held[other].1[i]) - load(e)).abs();
            let best = given
                .filter(|&(other, i)| !held[here].1.contains(&held[other].1[i]))
                .min_by(|a, b| near(a).total_cmp(&near(b)));
            if let Some((other, i)) = best {
                placed = std::mem::replace(&mut held[other].1[i], e);
                held[other].0 += load(e) - load(placed);
            }
        }
        if let Some(rank) = rank {
            held[rank].0 += load(placed);
            held[rank].1.push(placed);
        }
    }
    held.into_iter().flat_map(|(_, held)| held).collect()
}

/// The experts of each slot, rank by rank, of a new placement. No rank holds an expert twice while another one does not hold it. The search ends
/// close to the lower bound, and at a largest load of at most `goal` if the bound allows that.
pub(super) fn place(weight: &[f64], ranks: usize, size: usize, goal: f64) -> Vec<usize> {
    if weight.len() <= size {
        return (0..ranks * size).map(|slot| slot % size % weight.len()).collect();
    }
    let least = least_load(weight, ranks, ranks * size, false);
    let close = least * (1.0 + CLOSE);
    let close = if goal < least { close } else { close.min(goal) };
    let home = vec![true; ranks * weight.len()];
    let mut considered = 0;
    let packed = |counts: Vec<usize>| Node::new(weight, size, pack(weight, &counts, ranks, size), least);
    let parts = if ranks > RANKS { 0 } else { LARGEST / 2 };
    let largest = (0..parts).map(|i| least * (1.0 - i as f64 / LARGEST as f64)).chain([f64::INFINITY]);
    let mut counted: Vec<Vec<usize>> =
        largest.filter_map(|largest| counts(weight, ranks, ranks * size, largest)).collect();
    counted.dedup();
    let mut starts: Vec<Node> = counted.into_iter().map(packed).collect();
    starts.sort_by(|a, b| a.largest().total_cmp(&b.largest()));
    let mut best: Option<Node> = None;
    for start in starts.into_iter().take(ANNEALED) {
        if best.as_ref().is_none_or(|best| best.largest() > close) {
            let found = start.anneal(close).settle(&home, &mut considered);
            best = best.filter(|best| best.largest() <= found.largest()).or(Some(found));
        }
    }
    let mut best = best.unwrap_or_else(|| packed(vec![1; weight.len()]));
    let mut random = Random(1);
    considered = 0;
    while best.largest() > close && considered < PACKED {
        // Neighbouring counts, packed anew.
        let mut counts: Vec<usize> = best.places.iter().map(Vec::len).collect();
        for _ in 0..1 + random.below(3) {
            let (fewer, more) = (random.below(weight.len()), random.below(weight.len()));
            if counts[fewer] > 1 && counts[more] < ranks {
                counts[fewer] -= 1;
                counts[more] += 1;
            }
        }
        considered += PACK;
        let found = packed(counts).settle(&home, &mut considered);
        if found.largest() <= best.largest() {
            best = found;
        }
    }
    best.slots
}

/// The placements that `slots` may become by few moves, where each of them must lower the largest load by `cost`: as it is, with experts parted that are twice
/// on a rank, and the best change of that.
pub(super) fn improve(weight: &[f64], size: usize, slots: &[usize], cost: f64) -> [Vec<usize>; 2] {
    let ranks = slots.len() / size;
    let least = least_load(weight, ranks, slots.len(), false);
    let mut current = Node::new(weight, size, slots.to_vec(), least);
    let mut home = vec![false; ranks * weight.len()];
    slots.iter().enumerate().for_each(|(slot, &e)| home[slot / size * weight.len() + e] = true);
    current.part_twins();
    let score = |node: &Node| node.largest() + cost * node.moved(&home) as f64;
    let mut best = current.clone();
    let mut considered = 0;
    for level in 0..LEVELS {
        let mut node = current.clone();
        let goal = least + (node.largest() - least) * level as f64 / LEVELS as f64;
        while node.largest() > goal && considered < CONSIDERED && node.relieve(&home, goal, &mut considered) {
            if score(&node) < score(&best) {
                best = node.clone();
            }
        }
    }
    [current.slots, best.slots]
}

/// The slots of `fresh` in an order in which many keep the expert that they have in `slots`: ranks are renamed, and sorted inside.
pub(super) fn matched(slots: &[usize], fresh: &[usize], size: usize) -> Vec<usize> {
    let ranks = slots.len() / size;
    // The slots of a rank that hold the same expert are numbered. By expert and number, the ranks of `fresh`.
    let number = |held: &[usize], i: usize| held[..i].iter().filter(|e| **e == held[i]).count();
    let numbers = |all: &[usize]| -> Vec<usize> {
        all.chunks(size).flat_map(|held| (0..size).map(move |i| number(held, i))).collect()
    };
    let mut holders = vec![Vec::new(); fresh.iter().max().map_or(0, |e| e + 1)];
    for (slot, (&e, number)) in fresh.iter().zip(numbers(fresh)).enumerate() {
        let of: &mut Vec<Vec<usize>> = &mut holders[e];
        of.resize_with(of.len().max(number + 1), Vec::new);
        of[number].push(slot / size);
    }
    let numbered: Vec<(usize, usize)> = slots.iter().copied().zip(numbers(slots)).collect();
    let (mut of, mut used) = (vec![None; ranks], vec![false; ranks]);
    let mut common = vec![0; ranks];
    // The pairs of ranks with the most experts in common first. Each pair is counted again for each number, because a list of all pairs takes too much memory.
    for most in (0..=size).rev() {
        for (r, old) in numbered.chunks(size).enumerate() {
            if of[r].is_some() {
                continue;
            }
            common.fill(0);
            let ranks_of = |(e, number): &(usize, usize)| holders[*e].get(*number).into_iter().flatten();
            old.iter().flat_map(ranks_of).for_each(|&s| common[s] += 1);
            if let Some(s) = (0..ranks).find(|&s| !used[s] && common[s] == most) {
                (of[r], used[s]) = (Some(s), true);
            }
        }
    }
    let rank = |(old, s): (&[usize], usize)| {
        let mut left: Vec<usize> = (s * size..(s + 1) * size).collect();
        let mut take = |e: &usize| left.iter().position(|&slot| fresh[slot] == *e).map(|i| left.remove(i));
        let kept: Vec<Option<usize>> = old.iter().map(&mut take).collect();
        let mut left = left.into_iter();
        kept.into_iter().flat_map(|slot| slot.or_else(|| left.next())).collect::<Vec<usize>>()
    };
    slots.chunks(size).zip(of.into_iter().flatten()).flat_map(rank).collect()
}

/// Whether an exchange misses the goal, its moves if it does not, and the largest of the loads that it changes. The least is best.
type Worth = (bool, i32, f64);

/// The state of the searches.
#[derive(Clone)]
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
    fn new(weight: &'w [f64], size: usize, slots: Vec<usize>, least: f64) -> Self {
        let mut places = vec![Vec::new(); weight.len()];
        slots.iter().enumerate().for_each(|(slot, &e)| places[e].push(slot));
        let of = |held: &[usize]| held.iter().map(|&e| weight[e] / places[e].len() as f64).sum();
        let load = slots.chunks(size).map(of).collect();
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

    fn worst(&self) -> usize {
        (0..self.load.len()).fold(0, |worst, r| if self.load[r] > self.load[worst] { r } else { worst })
    }

    fn holds(&self, rank: usize, e: usize) -> bool {
        match self.places[e].len() < self.size {
            true => self.places[e].iter().any(|place| place / self.size == rank),
            false => self.slots[rank * self.size..(rank + 1) * self.size].contains(&e),
        }
    }

    /// Anneals until the largest load is at most `close`, and returns the best placement found.
    fn anneal(mut self, close: f64) -> Node<'w> {
        let mean = self.weight.iter().sum::<f64>() / self.load.len() as f64;
        let (n, ranks) = (self.slots.len(), self.load.len());
        let mut random = Random(n as u64);
        let mut best = (self.largest(), self.slots.clone());
        let steps = (STEPS_EACH * n as u64).clamp(STEPS.0, STEPS.1);
        let mut worst = 0;
        let mut temperature = 0.0;
        for step in 0..steps {
            if ranks == 1 || mean <= 0.0 || best.0 <= close {
                break;
            }
            if step.is_multiple_of(64) {
                self.target = self.least.max(best.0 * (1.0 - UNDER));
                let progress = step as f64 / steps as f64;
                temperature = (mean * HOT * (COLD / HOT).powf(progress)).powi(2);
                worst = self.worst();
            }
            let slot = match random.below(2) {
                0 => worst * self.size + random.below(self.size),
                _ => random.below(n),
            };
            let allowed = -temperature * (1.0 - random.real()).ln();
            let changed = match random.below(4) {
                0 => self.replace(slot, random.below(self.weight.len()), allowed),
                _ => self.swap(slot, random.below(n), allowed),
            };
            if changed && self.largest() < best.0 * (1.0 - 1e-12) {
                best = (self.largest(), self.slots.clone());
            }
        }
        Node::new(self.weight, self.size, best.1, self.least)
    }

    /// Lowers the largest load as long as one exchange does.
    fn settle(mut self, home: &[bool], considered: &mut usize) -> Node<'w> {
        while *considered < CONSIDERED && self.relieve(home, self.least, considered) {}
        self
    }

    /// The loads of the two ranks if two physical experts are swapped. `None` if both are on one rank or of one expert, or a rank would hold an expert twice.
    fn swapped(&self, a: usize, b: usize) -> Option<(f64, f64)> {
        let (r, s) = (a / self.size, b / self.size);
        let (e, f) = (self.slots[a], self.slots[b]);
        let moved = self.replica(e, self.places[e].len()) - self.replica(f, self.places[f].len());
        (r != s && e != f && !self.holds(r, f) && !self.holds(s, e))
            .then(|| (self.load[r] - moved, self.load[s] + moved))
    }

    /// Swaps two physical experts unless that is worse by more than `allowed`.
    fn swap(&mut self, a: usize, b: usize, allowed: f64) -> bool {
        let Some((here, there)) = self.swapped(a, b) else { return false };
        let (r, s) = (a / self.size, b / self.size);
        if self.over(here) + self.over(there) - self.over(self.load[r]) - self.over(self.load[s]) > allowed {
            return false;
        }
        (self.load[r], self.load[s]) = (here, there);
        for (from, to) in [(a, b), (b, a)] {
            let e = self.slots[from];
            self.places[e].iter_mut().filter(|place| **place == from).for_each(|place| *place = to);
        }
        self.slots.swap(a, b);
        true
    }

    /// The loads that change, by rank, if the replica in `slot` becomes one of `f`. `None` if it is the last of its expert, or its rank holds `f`.
    fn replaced(&self, slot: usize, f: usize) -> Option<Vec<(usize, f64)>> {
        let e = self.slots[slot];
        let (fewer, more) = (self.places[e].len(), self.places[f].len());
        let rank = slot / self.size;
        if fewer == 1 || self.holds(rank, f) {
            return None;
        }
        let mut loads = vec![(rank, self.replica(f, more + 1) - self.replica(e, fewer - 1))];
        let by = self.replica(e, fewer - 1) - self.replica(e, fewer);
        loads.extend(self.places[e].iter().map(|place| (place / self.size, by)));
        let by = self.replica(f, more + 1) - self.replica(f, more);
        loads.extend(self.places[f].iter().map(|place| (place / self.size, by)));
        loads.sort_by_key(|(rank, _)| *rank);
        loads.dedup_by(|next, sum| {
            next.0 == sum.0 && {
                sum.1 += next.1;
                true
            }
        });
        loads.iter_mut().for_each(|(rank, load)| *load += self.load[*rank]);
        Some(loads)
    }

    /// Replaces the replica in `slot` by one of `f`, unless the result is worse by more than `allowed`.
    fn replace(&mut self, slot: usize, f: usize, allowed: f64) -> bool {
        let Some(loads) = self.replaced(slot, f) else { return false };
        if loads.iter().map(|&(r, load)| self.over(load) - self.over(self.load[r])).sum::<f64>() > allowed {
            return false;
        }
        loads.into_iter().for_each(|(r, load)| self.load[r] = load);
        let e = std::mem::replace(&mut self.slots[slot], f);
        self.places[e].retain(|place| *place != slot);
        self.places[f].push(slot);
        true
    }

    /// Replaces each second replica of an expert on a rank by the expert that lowers the largest loads most.
    fn part_twins(&mut self) {
        for slot in 0..self.slots.len() {
            let rank = slot / self.size * self.size;
            if self.slots[rank..slot].contains(&self.slots[slot]) {
                let largest =
                    |f: &usize| self.replaced(slot, *f).map(|loads| loads.iter().map(|l| self.over(l.1)).sum::<f64>());
                let best = (0..self.weight.len()).filter_map(|f| Some((largest(&f)?, f)));
                if let Some((_, f)) = best.min_by(|a, b| a.0.total_cmp(&b.0)) {
                    self.replace(slot, f, f64::INFINITY);
                }
            }
        }
    }

    /// Slots whose expert was not on the rank before.
    fn moved(&self, home: &[bool]) -> usize {
        let new = |(slot, e): (usize, &usize)| !home[slot / self.size * self.weight.len() + e];
        self.slots.iter().enumerate().filter(|(slot, e)| new((*slot, *e))).count()
    }

    /// Lowers the largest load: to `goal` by the fewest moves, else as far as possible. Returns false if it cannot be lowered.
    fn relieve(&mut self, home: &[bool], goal: f64, considered: &mut usize) -> bool {
        *considered += self.size * self.slots.len();
        if self.size * self.slots.len() > STEP || self.load.len() > RANKS {
            return false;
        }
        let rank = self.worst();
        let new = |slot: usize, e: usize| i32::from(!home[slot / self.size * self.weight.len() + e]);
        let change = |slot: usize, to: usize| new(slot, to) - new(slot, self.slots[slot]);
        let own = rank * self.size..(rank + 1) * self.size;
        let mut best: Option<(Worth, usize, usize, bool)> = None;
        let mut consider = |largest: f64, moves: i32, slot: usize, other: usize, swap: bool| {
            let misses = largest > goal;
            let worth = (misses, if misses { 0 } else { moves }, largest);
            let better = best.is_none_or(|(best, ..)| worth.partial_cmp(&best).is_some_and(std::cmp::Ordering::is_lt));
            if largest < self.load[rank] * (1.0 - 1e-9) && better {
                best = Some((worth, slot, other, swap));
            }
        };
        for (a, b) in own.clone().flat_map(|a| (0..self.slots.len()).map(move |b| (a, b))) {
            if let Some((here, there)) = self.swapped(a, b) {
                consider(here.max(there), change(a, self.slots[b]) + change(b, self.slots[a]), a, b, true);
            }
        }
        let spare = (0..self.slots.len()).filter(|&slot| self.places[self.slots[slot]].len() > 1);
        let to_own = spare.clone().filter(|slot| own.contains(slot));
        let from_own = spare.flat_map(|slot| own.clone().map(move |a| (slot, a)));
        let all = from_own.map(|(slot, a)| (slot, self.slots[a]));
        for (slot, f) in all.chain(to_own.flat_map(|slot| (0..self.weight.len()).map(move |f| (slot, f)))) {
            if let Some(loads) = self.replaced(slot, f) {
                // The replicas that an expert keeps take more load, so their ranks may exceed the goal.
                let largest = loads.iter().map(|load| load.1).fold(0.0, f64::max);
                consider(largest, change(slot, f), slot, f, false);
            }
        }
        match best {
            Some((_, a, b, true)) => self.swap(a, b, f64::INFINITY),
            Some((_, slot, f, false)) => self.replace(slot, f, f64::INFINITY),
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranks of `fresh` in the order of a list of all pairs, with the most common slots first.
    fn pairs_in_order(slots: &[usize], fresh: &[usize], size: usize) -> usize {
        let mut pairs = Vec::new();
        for (r, old) in slots.chunks(size).enumerate() {
            for (s, new) in fresh.chunks(size).enumerate() {
                let mut left = old.to_vec();
                let kept =
                    new.iter().filter(|e| left.iter().position(|x| x == *e).map(|i| left.swap_remove(i)).is_some());
                pairs.push((std::cmp::Reverse(kept.count()), r, s));
            }
        }
        pairs.sort_unstable();
        let (mut olds, mut news, mut kept) = (vec![false; slots.len()], vec![false; slots.len()], 0);
        for (count, r, s) in pairs {
            if !olds[r] && !news[s] {
                (olds[r], news[s]) = (true, true);
                kept += count.0;
            }
        }
        kept
    }

    #[test]
    fn most_slots_keep_their_experts() {
        let mut random = Random(3);
        for _ in 0..200 {
            let (size, ranks) = (1 + random.below(5), 1 + random.below(9));
            let experts = 1 + random.below(size * ranks);
            let mut draw = || {
                let mut all: Vec<usize> = (0..size * ranks).map(|slot| slot % experts).collect();
                (0..all.len()).for_each(|slot| all.swap(slot, random.below(slot + 1)));
                all
            };
            let (slots, fresh) = (draw(), draw());
            let mut order = matched(&slots, &fresh, size);
            let kept = order.iter().zip(&slots).filter(|(slot, e)| fresh[**slot] == **e).count();
            assert_eq!(kept, pairs_in_order(&slots, &fresh, size), "{slots:?} {fresh:?}");
            order.sort_unstable();
            assert!(order.into_iter().eq(0..slots.len()));
        }
    }
}
