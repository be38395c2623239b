//! Balance inside a step: divides the rows of a microbatch among resident replicas by the microbatch's own counts.
//!
//! Integers only, and every loop has a fixed order, so PEs with the same counts compute the same assignment without further messages.

use std::collections::VecDeque;

use aristos_formats::InputError;

/// Maximum rows of a microbatch. Sums below it cannot overflow.
const MOST_ROWS: u64 = 1 << 48;

/// Rows of one expert that one of its holders computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// The holder.
    pub pe: usize,
    /// Its rows.
    pub rows: u64,
}

/// Divides the rows of each expert among its holders, so that the largest load of a PE is the least possible in whole rows: the fractional optimum, rounded
/// up. `rows[expert]` are the rows of all PEs, `holders[expert]` the PEs with the expert's weights. Returns the quotas of each expert in the order of
/// `holders`, with quotas of 0.
///
/// The largest load is bisected; a load is feasible if a maximum flow from experts to holders carries all rows (Ford and Fulkerson 1956, with shortest
/// augmenting paths: Edmonds and Karp 1972). Capacities are integers, so the flow is too. An expert fills its holders in their order.
///
/// # Errors
/// Returns an error if the lists differ in length, the rows exceed 2^48, or an expert with rows has no holder, a holder twice, or one that is not a PE.
pub fn split_rows(rows: &[u64], holders: &[Vec<usize>], pes: usize) -> Result<Vec<Vec<Quota>>, InputError> {
    check(rows, holders, pes)?;
    let mut fixed = vec![0; pes];
    for (rows, holders) in rows.iter().zip(holders) {
        if let [only] = holders[..] {
            fixed[only] += rows;
        }
    }
    let total: u64 = rows.iter().sum();
    // A load below the mean, or below that of experts without replicas, is never feasible; all rows on one PE always are.
    let floor = total.div_ceil(pes.max(1) as u64).max(fixed.iter().copied().max().unwrap_or(0));
    let (mut low, mut high) = (floor, total.max(floor));
    let mut best = Flow::new(holders, pes);
    // First the answer of most microbatches: the lower bound itself.
    let mut most = low;
    loop {
        let mut flow = Flow::new(holders, pes);
        match flow.carry(rows, &fixed, most) {
            true => (best, high) = (flow, most),
            false => low = most + 1,
        }
        if low >= high && best.full {
            break;
        }
        most = low + (high - low) / 2;
    }
    let quotas = |(e, holders): (usize, &Vec<usize>)| match holders[..] {
        [pe] => vec![Quota { pe, rows: rows[e] }],
        _ => holders.iter().zip(&best.rows[e]).map(|(&pe, &rows)| Quota { pe, rows }).collect(),
    };
    Ok(holders.iter().enumerate().map(quotas).collect())
}

fn check(rows: &[u64], holders: &[Vec<usize>], pes: usize) -> Result<(), InputError> {
    if rows.len() != holders.len() {
        let found = format!("has {} experts", holders.len());
        return Err(InputError::value("holders", found, format!("{}, as rows", rows.len())));
    }
    let total = rows.iter().fold(0u64, |sum, &rows| sum.saturating_add(rows));
    if total > MOST_ROWS {
        return Err(InputError::value("rows", format!("are {total}"), format!("at most {MOST_ROWS}")));
    }
    for (e, (&rows, holders)) in rows.iter().zip(holders).enumerate() {
        let valid = |at: usize| holders[at] < pes && !holders[..at].contains(&holders[at]);
        if (rows > 0 && holders.is_empty()) || !(0..holders.len()).all(valid) {
            let expected = format!("different PEs below {pes}, at least one if the expert has rows");
            return Err(InputError::value(format!("holders[{e}]"), format!("is {holders:?}"), expected));
        }
    }
    Ok(())
}

/// A flow of rows from experts to holders.
struct Flow<'h> {
    holders: &'h [Vec<usize>],
    /// By PE, its experts with replicas, as (expert, index among the expert's holders).
    held: Vec<Vec<(usize, usize)>>,
    /// `[expert][holder]`
    rows: Vec<Vec<u64>>,
    /// Whether it carries all rows.
    full: bool,
}

impl<'h> Flow<'h> {
    fn new(holders: &'h [Vec<usize>], pes: usize) -> Flow<'h> {
        let mut held = vec![Vec::new(); pes];
        for (e, holders) in holders.iter().enumerate().filter(|(_, holders)| holders.len() > 1) {
            holders.iter().enumerate().for_each(|(at, &pe)| held[pe].push((e, at)));
        }
        let rows = holders.iter().map(|holders| vec![0; holders.len()]).collect();
        Flow { holders, held, rows, full: false }
    }

    /// Sends all rows of the experts with replicas to holders with loads of at most `most`. Returns false if that is impossible.
    fn carry(&mut self, rows: &[u64], fixed: &[u64], most: u64) -> bool {
        let mut room: Vec<u64> = fixed.iter().map(|fixed| most - fixed).collect();
        for (e, &rows) in rows.iter().enumerate().filter(|(e, _)| self.holders[*e].len() > 1) {
            let mut left = rows;
            while left > 0 {
                let Some(path) = self.path(e, &room) else { return false };
                let last = self.holders[path[0].0][path[0].1];
                // A step along the path replaces rows of its expert on the previous PE by rows on the next one.
                let carried = path.windows(2).map(|step| self.rows[step[0].0][self.at(step[0].0, step[1])]);
                let amount = carried.fold(left.min(room[last]), u64::min);
                for (step, &(expert, at)) in path.iter().enumerate() {
                    self.rows[expert][at] += amount;
                    if let Some(&before) = path.get(step + 1) {
                        let from = self.at(expert, before);
                        self.rows[expert][from] -= amount;
                    }
                }
                room[last] -= amount;
                left -= amount;
            }
        }
        self.full = true;
        true
    }

    /// The index among `expert`'s holders of the PE that `(other, at)` names.
    fn at(&self, expert: usize, (other, at): (usize, usize)) -> usize {
        let pe = self.holders[other][at];
        self.holders[expert].iter().position(|&holder| holder == pe).unwrap_or(0)
    }

    /// The shortest path from an expert to a PE with room, from its end to its start: pairs (expert, index of the holder that gets more of its rows).
    fn path(&self, expert: usize, room: &[u64]) -> Option<Vec<(usize, usize)>> {
        // By PE, the expert and holder by which the search reached it.
        let mut reached: Vec<Option<(usize, usize)>> = vec![None; room.len()];
        let mut from: Vec<Option<usize>> = vec![None; room.len()];
        let mut queue = VecDeque::new();
        for (at, &pe) in self.holders[expert].iter().enumerate() {
            reached[pe] = Some((expert, at));
            queue.push_back(pe);
        }
        while let Some(pe) = queue.pop_front() {
            if room[pe] > 0 {
                let mut path = Vec::new();
                let mut next = Some(pe);
                while let Some(pe) = next {
                    path.extend(reached[pe]);
                    next = from[pe];
                }
                return Some(path);
            }
            let carried = self.held[pe].iter().filter(|(e, at)| self.rows[*e][*at] > 0);
            for &(e, _) in carried {
                for (to, &other) in self.holders[e].iter().enumerate() {
                    if reached[other].is_none() {
                        (reached[other], from[other]) = (Some((e, to)), Some(pe));
                        queue.push_back(other);
                    }
                }
            }
        }
        None
    }
}

/// Divides an expert's quotas among the sources of its rows: `sources[pe]` are the rows of each PE's tokens, `host[pe]` its host. A holder first gets its own
/// tokens' rows, then those of its host, then others, each in ascending order of the sources. Returns `[source][quota]`; sums over sources are the quotas, and
/// sums over quotas the sources' rows.
///
/// # Errors
/// Returns an error if the quotas and the sources have different sums.
pub fn divide_sources(sources: &[u64], quotas: &[Quota], host: &[usize]) -> Result<Vec<Vec<u64>>, InputError> {
    let sums = [sources.iter().sum::<u64>(), quotas.iter().map(|quota| quota.rows).sum()];
    if sums[0] != sums[1] {
        return Err(InputError::value("quotas", format!("add up to {}", sums[1]), format!("{}, the rows", sums[0])));
    }
    let mut left = sources.to_vec();
    let mut wanted: Vec<u64> = quotas.iter().map(|quota| quota.rows).collect();
    let mut all = vec![vec![0; quotas.len()]; sources.len()];
    let nearness: [&dyn Fn(usize, usize) -> bool; 3] = [&|a, b| a == b, &|a, b| host[a] == host[b], &|_, _| true];
    for near in nearness {
        for (at, quota) in quotas.iter().enumerate() {
            for source in (0..sources.len()).filter(|&source| near(source, quota.pe)) {
                let rows = left[source].min(wanted[at]);
                all[source][at] += rows;
                left[source] -= rows;
                wanted[at] -= rows;
            }
        }
    }
    Ok(all)
}
