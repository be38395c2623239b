//! Unequal shares of an expert's tokens for its replicas.

/// A largest load this close to the mean ends the search.
const CLOSE: f64 = 1e-3;
const SWEEPS: usize = 200;

/// The expert of each slot, rank by rank, and the load that it gets, so that all ranks have the mean load, or, with smoother shares, almost the mean and
/// at most `goal`. `None` with fewer than `ranks - 1` spare slots.
pub(super) fn level(weight: &[f64], ranks: usize, size: usize, goal: f64) -> Option<(Vec<usize>, Vec<f64>)> {
    let (mean, items) = (weight.iter().sum::<f64>() / ranks as f64, ranks * (size - 1) + 1);
    if weight.len() <= size || weight.len() > items {
        return None;
    }
    // Ascending loads, with items of no expert and no load that make their number `ranks * (size - 1) + 1`.
    let mut left: Vec<(f64, Option<usize>)> = weight.iter().copied().zip((0..weight.len()).map(Some)).collect();
    left.resize(items, (0.0, None));
    left.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut slots = Vec::with_capacity(ranks * size);
    for rank in (1..=ranks).rev() {
        // The rank gets the last `size - 1` neighbours of at most the mean, and a part of the next item, which lacks no more than that item has. If they
        // are the largest, the item before is large enough, because the rest has the mean of the other ranks.
        let sum = |first: usize| left[first..first + size - 1].iter().map(|item| item.0).sum::<f64>();
        let (mut low, mut high) = (0, left.len() - size + 1);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if sum(middle) <= mean { low = middle } else { high = middle - 1 }
        }
        let next = if low + size <= left.len() { low + size - 1 } else { low - 1 };
        let (mut load, expert) = left[next];
        let part = if rank == 1 { load } else { (mean - sum(low)).clamp(0.0, load) };
        slots.push((part, expert.filter(|_| part > 0.0 || rank == 1)));
        slots.extend_from_slice(&left[low..low + size - 1]);
        left[next].0 -= part;
        load -= part;
        let rest = (load, expert);
        left.drain(low.min(next)..low.min(next) + size);
        if rank > 1 {
            left.insert(left.partition_point(|item| item.0 < load), rest);
        }
    }
    // Slots without an expert get a replica of the one with the most load per replica.
    let mut count = vec![0; weight.len()];
    slots.iter().filter_map(|slot| slot.1).for_each(|e| count[e] += 1);
    for slot in 0..slots.len() {
        if slots[slot].1.is_none() {
            let held = &slots[slot / size * size..(slot / size + 1) * size];
            let open = (0..weight.len()).filter(|e| held.iter().all(|(_, other)| *other != Some(*e)));
            let e = open.max_by(|&a, &b| (weight[a] / count[a] as f64).total_cmp(&(weight[b] / count[b] as f64)));
            e.iter().for_each(|&e| count[e] += 1);
            slots[slot].1 = e;
        }
    }
    let experts: Vec<usize> = slots.iter().filter_map(|slot| slot.1).collect();
    let smooth = fill(weight, &experts, size, goal);
    let close = largest(&smooth, size) <= goal.min(mean * (1.0 + CLOSE));
    let loads = if close { smooth } else { slots.into_iter().map(|slot| slot.0).collect() };
    Some((experts, loads))
}

/// The largest load of a rank.
pub(super) fn largest(loads: &[f64], size: usize) -> f64 {
    loads.chunks(size).map(|rank| rank.iter().sum::<f64>()).fold(0.0, f64::max)
}

/// The load of each slot that makes the ranks' loads as equal as the placement allows: from even shares on, expert by expert, the holders with the least load
/// are raised to one level. Ends close to the mean, at a largest load of at most `goal` if that is possible.
pub(super) fn fill(weight: &[f64], slots: &[usize], size: usize, goal: f64) -> Vec<f64> {
    let mut places = vec![Vec::new(); weight.len()];
    slots.iter().enumerate().for_each(|(slot, &e)| places[e].push(slot));
    let mut loads: Vec<f64> = slots.iter().map(|&e| weight[e] / places[e].len() as f64).collect();
    let mut sums: Vec<f64> = loads.chunks(size).map(|rank| rank.iter().sum()).collect();
    let mean = weight.iter().sum::<f64>() / sums.len() as f64;
    for _ in 0..SWEEPS {
        if largest(&loads, size) <= goal.min(mean * (1.0 + CLOSE / 10.0)) {
            break;
        }
        for (places, weight) in places.iter_mut().zip(weight).filter(|(places, _)| places.len() > 1) {
            places.iter().for_each(|&slot| sums[slot / size] -= loads[slot]);
            places.sort_by(|&a, &b| sums[a / size].total_cmp(&sums[b / size]).then(a.cmp(&b)));
            let (mut sum, mut level) = (*weight, f64::INFINITY);
            for (holders, &slot) in (1..).zip(places.iter()) {
                if level <= sums[slot / size] {
                    break;
                }
                sum += sums[slot / size];
                level = sum / f64::from(holders);
            }
            for &slot in places.iter() {
                loads[slot] = (level - sums[slot / size]).max(0.0);
                sums[slot / size] += loads[slot];
            }
        }
    }
    loads
}
