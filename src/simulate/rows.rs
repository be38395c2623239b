//! The rows between PEs: once per PE as in the layer, once per expert, or once per host.

use std::collections::BTreeMap;

use anyhow::Result;

use super::{RowOrder, RowsPer, Simulated};
use crate::moe::Placement;
use crate::moe::cpu::router::{self, Routing};
use crate::sim::step::{Relay, Rows};

/// The rows of PE `pe`'s tokens to each PE of its group. `hosts` has the group's hosts.
pub(super) fn rows(
    simulated: &Simulated,
    placement: &Placement,
    pe: usize,
    ids: &[i32],
    hosts: &[usize],
) -> Result<Vec<Rows>> {
    let routing = Routing::from_caller(&simulated.config, ids, &vec![1.0; ids.len()])?;
    let routes = router::routes(&routing, placement, pe, simulated.config.router.top_k);
    let of_pe = |(to, routes): (usize, router::Routes)| {
        let rows = Rows {
            starts: routes.slot_start,
            experts: routes.slots.iter().map(|slot| slot.expert).collect(),
            returns: routes.returns,
            relay: None,
        };
        let (rows, tokens) = match simulated.order {
            RowOrder::Expert => (rows, routes.tokens),
            RowOrder::Token => by_token(&rows, routes.tokens),
        };
        // Local rows are gathered in place, without a copy per expert.
        match simulated.rows_per == RowsPer::Expert && to != pe {
            true => (by_expert(&rows, &tokens, simulated.order), Vec::new()),
            false => (rows, tokens),
        }
    };
    let (mut rows, tokens): (Vec<_>, Vec<_>) = routes.into_iter().enumerate().map(of_pe).unzip();
    if simulated.rows_per == RowsPer::Host {
        by_host(&mut rows, &tokens, hosts, pe, simulated.order);
    }
    Ok(rows)
}

/// Rows in another order, with their results in the order of `returns`.
fn reordered(rows: &Rows, order: &[usize], returns: Vec<u32>) -> Rows {
    let mut sorted = Rows { starts: vec![0], returns, ..Rows::default() };
    for &row in order {
        sorted.experts.extend(of_row(rows, row));
        sorted.starts.push(sorted.experts.len() as u32);
    }
    sorted
}

fn of_row(rows: &Rows, row: usize) -> &[u32] {
    &rows.experts[rows.starts[row] as usize..rows.starts[row + 1] as usize]
}

/// The rows in the order of tokens in both directions.
fn by_token(rows: &Rows, mut tokens: Vec<u32>) -> (Rows, Vec<u32>) {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&row| tokens[row]);
    let sorted = reordered(rows, &order, (0..tokens.len() as u32).collect());
    tokens.sort_unstable();
    (sorted, tokens)
}

/// Duplicates each row for each of its experts, in the order (expert, token), or by token.
fn by_expert(rows: &Rows, tokens: &[u32], order: RowOrder) -> Rows {
    let slots = (0..tokens.len()).flat_map(|row| of_row(rows, row).iter().map(move |&expert| (expert, tokens[row])));
    let mut slots: Vec<(u32, u32)> = slots.collect();
    if order == RowOrder::Expert {
        slots.sort_unstable();
    }
    Rows {
        starts: (0..=slots.len() as u32).collect(),
        returns: (0..slots.len() as u32).collect(),
        experts: slots.into_iter().map(|(expert, _)| expert).collect(),
        relay: None,
    }
}

/// A token with experts on a host: its rows to the PEs there, and its first and last expert by their indices on their PEs.
struct Crossing {
    first: u32,
    last: u32,
    rows: Vec<(usize, usize)>,
}

/// Sends one row per token to each other host, in the order (first expert there, token), with the sums in the order (last expert, row); or by token. The
/// relay is the host's PE with the index of `me` on its own host, so that the PEs of a host use different relays.
fn by_host(rows: &mut [Rows], tokens: &[Vec<u32>], hosts: &[usize], me: usize, order: RowOrder) {
    let on_host = |host: usize| -> Vec<usize> { (0..hosts.len()).filter(|&pe| hosts[pe] == host).collect() };
    let index = on_host(hosts[me]).iter().position(|&pe| pe == me).unwrap_or(0);
    // Hosts are numbered by their first PE.
    for host in (0..hosts.len()).filter(|&pe| hosts[pe] == pe && pe != hosts[me]) {
        let pes = on_host(host);
        let mut crossing: BTreeMap<u32, Crossing> = BTreeMap::new();
        for &pe in &pes {
            for (row, &token) in tokens[pe].iter().enumerate() {
                let experts = of_row(&rows[pe], row);
                let (Some(&first), Some(&last)) = (experts.iter().min(), experts.iter().max()) else { continue };
                let of = crossing.entry(token).or_insert(Crossing { first, last, rows: Vec::new() });
                (of.first, of.last) = (of.first.min(first), of.last.max(last));
                of.rows.push((pe, row));
            }
        }
        // The sort is stable: equal keys stay in the order of tokens.
        let mut crossing: Vec<Crossing> = crossing.into_values().collect();
        let mut back: Vec<u32> = (0..crossing.len() as u32).collect();
        if order == RowOrder::Expert {
            crossing.sort_by_key(|of| of.first);
            back.sort_by_key(|&place| crossing[place as usize].last);
        }
        let relay = pes[index % pes.len()] as u32;
        for &pe in &pes {
            let row_at =
                |place: u32| crossing[place as usize].rows.iter().find(|(at, _)| *at == pe).map(|&(_, row)| row);
            let (places, out): (Vec<u32>, Vec<usize>) =
                (0..crossing.len() as u32).filter_map(|place| Some((place, row_at(place)?))).unzip();
            let (result_places, returns): (Vec<u32>, Vec<u32>) = back
                .iter()
                .enumerate()
                .filter_map(|(at, place)| Some((at as u32, places.binary_search(place).ok()? as u32)))
                .unzip();
            rows[pe] = reordered(&rows[pe], &out, returns);
            rows[pe].relay = Some(Relay { pe: relay, rows: crossing.len() as u32, places, result_places });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows_of(of: &[&[u32]]) -> Rows {
        let mut rows = Rows { starts: vec![0], returns: (0..of.len() as u32).collect(), ..Rows::default() };
        for experts in of {
            rows.experts.extend(*experts);
            rows.starts.push(rows.experts.len() as u32);
        }
        rows
    }

    #[test]
    fn rows_are_duplicated_per_expert() {
        // Token 5 has experts 0 and 2, token 3 has 2 alone.
        let rows = rows_of(&[&[0, 2], &[2]]);
        let by = |order| by_expert(&rows, &[5, 3], order);
        assert_eq!((by(RowOrder::Expert).experts, by(RowOrder::Expert).returns), (vec![0, 2, 2], vec![0, 1, 2]));
        let (sorted, tokens) = by_token(&rows, vec![5, 3]);
        assert_eq!(by_expert(&sorted, &tokens, RowOrder::Token).experts, [2, 0, 2]);
    }

    #[test]
    fn rows_cross_to_a_host_once() {
        // PEs 0 and 1 on a host, 2 and 3 on the other. PE 1's tokens: 0 for PE 2's expert 1, 1 for PE 2's expert 0 and PE 3's expert 1, 2 for PE 3's 0.
        let none = || rows_of(&[]);
        let mut rows = [none(), none(), rows_of(&[&[0], &[1]]), rows_of(&[&[0], &[1]])];
        let tokens = [vec![], vec![], vec![1, 0], vec![2, 1]];
        by_host(&mut rows, &tokens, &[0, 0, 2, 2], 1, RowOrder::Expert);
        // PE 3 relays the tokens in the order 1, 2, 0, and returns them in the order 2, 1, 0.
        let relay = |places: &[u32], result_places: &[u32]| {
            Some(Relay { pe: 3, rows: 3, places: places.to_vec(), result_places: result_places.to_vec() })
        };
        assert_eq!((&rows[2].experts[..], &rows[2].returns[..]), (&[0, 1][..], &[0, 1][..]));
        assert_eq!(rows[2].relay, relay(&[0, 2], &[1, 2]));
        assert_eq!((&rows[3].experts[..], &rows[3].returns[..]), (&[1, 0][..], &[1, 0][..]));
        assert_eq!(rows[3].relay, relay(&[0, 1], &[0, 1]));
        assert_eq!(rows[0], none());
    }
}
