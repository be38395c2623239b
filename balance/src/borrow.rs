//! Balance inside a step: an overloaded PE's tiles are computed by others of its host, which fetch the expert's weights.

use aristos_formats::InputError;

/// The rules of [`borrow`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Borrowing<'a> {
    /// The host of each PE. Weights stay inside a host.
    pub host: &'a [usize],
    /// Tiles that a PE computes while an expert's weights arrive, at least 1.
    pub price: u64,
    /// Maximum experts that a PE borrows in a step.
    pub most: usize,
}

/// Tiles of an expert that a PE computes for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Borrowed {
    /// The expert.
    pub expert: usize,
    /// The PE that has the expert's weights.
    pub owner: usize,
    /// The PE that borrows them.
    pub borrower: usize,
    /// The tiles.
    pub tiles: u64,
    /// Number of this expert among the borrower's, or among those that the owner sends, from 1, whichever is larger: its weights arrive after this many prices.
    pub arrival: u64,
}

/// The tiles that move so that the largest load falls, counting that a borrowed expert's weights must arrive first. `tiles[pe]` lists the experts of each PE
/// with their tiles. The load is bisected between the mean and the largest; for each load, PEs above it lend tiles of their smallest sufficient expert to the
/// PE of their host with the most room. Equals are decided by the lower number, so all PEs compute the same result. The result is empty if borrowing does not lower the largest load.
///
/// # Errors
/// Returns an error if `host` has another length than `tiles`, or the price is 0.
pub fn borrow(tiles: &[Vec<(usize, u64)>], rules: &Borrowing) -> Result<Vec<Borrowed>, InputError> {
    if rules.host.len() != tiles.len() {
        let found = format!("has {} PEs", rules.host.len());
        return Err(InputError::value("host", found, format!("{}, as tiles", tiles.len())));
    }
    if rules.price == 0 {
        return Err(InputError::value("price", "is 0", "at least 1"));
    }
    let loads: Vec<u64> = tiles.iter().map(|held| held.iter().map(|(_, tiles)| tiles).sum()).collect();
    let (mut low, mut high) =
        (loads.iter().sum::<u64>() / loads.len().max(1) as u64, loads.iter().copied().max().unwrap_or(0));
    let mut best = Vec::new();
    while low < high {
        let most = low + (high - low) / 2;
        match fits(tiles, &loads, rules, most) {
            Some(notes) => (best, high) = (notes, most),
            None => low = most + 1,
        }
    }
    Ok(best)
}

/// The borrowed tiles by which no load exceeds `most`, if the greedy rule finds them.
fn fits(tiles: &[Vec<(usize, u64)>], loads: &[u64], rules: &Borrowing, most: u64) -> Option<Vec<Borrowed>> {
    let mut left = tiles.to_vec();
    let mut load = loads.to_vec();
    let n = load.len();
    let (mut extra, mut borrowed, mut lent) = (vec![0u64; n], vec![0u64; n], vec![0u64; n]);
    let mut notes: Vec<Borrowed> = Vec::new();
    loop {
        let from = (0..n).max_by_key(|&pe| (load[pe], std::cmp::Reverse(pe)))?;
        if load[from] <= most {
            return Some(notes);
        }
        let over = load[from] - most;
        let smallest = left[from].iter().enumerate().filter(|(_, (_, tiles))| *tiles >= over);
        let smallest = smallest.min_by_key(|(at, (_, tiles))| (*tiles, *at));
        let largest = || left[from].iter().enumerate().max_by_key(|(at, (_, tiles))| (*tiles, std::cmp::Reverse(*at)));
        let (at, &(expert, has)) = smallest.or_else(largest)?;
        let arrival = |to: usize| (borrowed[to] + 1).max(lent[from] + 1);
        let room = |to: usize| {
            most.saturating_sub(loads[to].max(rules.price.saturating_mul(arrival(to)))).saturating_sub(extra[to])
        };
        // A PE that lends has no room, as its own load is above `most`.
        let may = |to: &usize| {
            rules.host[*to] == rules.host[from] && loads[*to] <= most && (borrowed[*to] as usize) < rules.most
        };
        let to = (0..n).filter(may).max_by_key(|&to| (room(to), std::cmp::Reverse(to)))?;
        if room(to) < (rules.price / 4).max(1) {
            return None;
        }
        let given = over.min(has).min(room(to));
        if given == 0 {
            return None;
        }
        notes.push(Borrowed { expert, owner: from, borrower: to, tiles: given, arrival: arrival(to) });
        load[from] -= given;
        left[from][at].1 -= given;
        extra[to] += given;
        borrowed[to] += 1;
        lent[from] += 1;
    }
}
