//! Placements, and the assignment of a microbatch's rows to PEs.

use aristos_balance::{Borrowing, Quota, Rebalance, borrow, divide_sources, rebalance_with, split_rows};
use aristos_formats::InputError;
use aristos_formats::routing::{NO_EXPERT, Record};

use super::machine::{Balance, Experts, Machine};

/// The part of the mean load by which a move must lower the largest load: the default of `aristos rebalance`.
const MOVE_COST: f64 = 0.001;

/// The PEs that hold each expert.
pub(super) struct Placement {
    /// By expert, ascending, and the share of each.
    pub holders: Vec<Vec<usize>>,
    pub shares: Vec<Vec<f64>>,
    /// The experts of the physical slots, as `rebalance_with` takes them.
    pub slots: Vec<usize>,
    /// Experts that moved to this placement: the expert's PE to send it, and the PE that receives it.
    pub moves: Vec<(usize, usize)>,
}

impl Placement {
    /// Experts in blocks.
    pub fn blocks(experts: usize, pes: usize) -> Placement {
        let (base, extra) = (experts / pes, experts % pes);
        let of = |pe: usize| std::iter::repeat_n(vec![pe], base + usize::from(pe < extra));
        let holders: Vec<Vec<usize>> = (0..pes).flat_map(of).collect();
        Placement { shares: vec![vec![1.0]; experts], holders, slots: Vec::new(), moves: Vec::new() }
    }

    /// A placement with replicas for these loads, from the one in use.
    pub fn plan(
        loads: &[f64],
        pes: usize,
        replicas: usize,
        current: Option<&Placement>,
    ) -> Result<Placement, InputError> {
        let size = loads.len().div_ceil(pes) + replicas;
        let in_use = current.map(|current| vec![current.slots.clone()]);
        let how = Rebalance { shares: true, current: in_use.as_deref(), move_cost: MOVE_COST };
        let mut found = rebalance_with(how, &[loads.to_vec()], size * pes, 1, 1, pes)?;
        let (slots, of_slots) = (found.phy2log.remove(0), found.shares.remove(0));
        let mut holders: Vec<Vec<usize>> = vec![Vec::new(); loads.len()];
        let mut shares: Vec<Vec<f64>> = vec![Vec::new(); loads.len()];
        for (slot, (&e, share)) in slots.iter().zip(of_slots).enumerate() {
            let pe = slot / size;
            match holders[e].last() == Some(&pe) {
                // An expert is twice on a PE if all PEs hold it.
                true => shares[e].last_mut().into_iter().for_each(|sum| *sum += share),
                false => {
                    holders[e].push(pe);
                    shares[e].push(share);
                }
            }
        }
        let mut moves = Vec::new();
        for (e, holders) in holders.iter().enumerate() {
            let Some(before) = current.map(|current| &current.holders[e]) else { continue };
            for &pe in holders.iter().filter(|pe| !before.contains(pe)) {
                // The nearest number is on the same host if any holder is.
                moves.extend(before.iter().min_by_key(|old| old.abs_diff(pe)).map(|&from| (from, pe)));
            }
        }
        Ok(Placement { holders, shares, slots, moves })
    }
}

/// The tokens of a microbatch.
pub(super) struct Microbatch<'r> {
    /// Choices of each PE's tokens.
    choices: Vec<&'r [u32]>,
    top_k: usize,
    /// `[expert][source]`
    sources: Vec<Vec<u64>>,
    /// `[expert]`
    pub rows: Vec<u64>,
}

/// Rows of an expert on a PE.
pub(super) struct Batch {
    pub pe: usize,
    pub rows: u64,
    /// With borrowed weights: the owner, and the arrival in multiples of an expert's time on the link.
    pub borrowed: Option<(usize, u64)>,
}

/// Where each row is computed.
pub(super) struct Assigned {
    /// By expert.
    pub batches: Vec<Vec<Batch>>,
    /// Rows that each PE sends and receives in a dispatch, inside its host and to other hosts.
    pub inside: Vec<u64>,
    pub between: Vec<u64>,
}

impl<'r> Microbatch<'r> {
    pub fn new(record: &'r Record, experts: &Experts, pes: usize) -> Result<Microbatch<'r>, InputError> {
        let by_node: Vec<&[u32]> = record.choices_by_node(experts.top_k).map(|(_, choices)| choices).collect();
        if by_node.is_empty() {
            return Err(InputError::value("tokens_per_node", "is empty", "at least one node"));
        }
        let choices: Vec<&[u32]> = (0..pes).map(|pe| by_node[pe % by_node.len()]).collect();
        let mut sources = vec![vec![0; pes]; experts.count];
        for (source, choices) in choices.iter().enumerate() {
            for &e in choices.iter().filter(|e| **e != NO_EXPERT) {
                let Some(of_expert) = sources.get_mut(e as usize) else {
                    let expected = format!("an expert below {}", experts.count);
                    return Err(InputError::value("choices", format!("have {e}"), expected));
                };
                of_expert[source] += 1;
            }
        }
        let rows = sources.iter().map(|sources| sources.iter().sum()).collect();
        Ok(Microbatch { choices, top_k: experts.top_k, sources, rows })
    }

    /// Assigns the rows by a placement.
    pub fn assign(&self, placement: &Placement, balance: Balance, machine: &Machine) -> Result<Assigned, InputError> {
        let pes = self.choices.len();
        let quotas = match balance {
            Balance::None | Balance::Replan => self.by_shares(placement),
            Balance::Split | Balance::Borrow => split_rows(&self.rows, &placement.holders, pes)?,
        };
        let batch = |quota: Quota| Batch { pe: quota.pe, rows: quota.rows, borrowed: None };
        let mut batches: Vec<Vec<Batch>> =
            quotas.into_iter().map(|quotas| quotas.into_iter().map(batch).collect()).collect();
        if balance == Balance::Borrow {
            lend(&mut batches, machine)?;
        }
        let (inside, between) = self.traffic(&batches, &machine.host)?;
        Ok(Assigned { batches, inside, between })
    }

    fn by_shares(&self, placement: &Placement) -> Vec<Vec<Quota>> {
        let of = |(e, (holders, shares)): (usize, (&Vec<usize>, &Vec<f64>))| {
            let (mut sum, mut before) = (0.0, 0);
            let quotas = holders.iter().zip(shares).enumerate().map(|(at, (&pe, share))| {
                sum += share;
                let end = match at + 1 == holders.len() {
                    true => self.rows[e],
                    false => ((self.rows[e] as f64 * sum).round() as u64).clamp(before, self.rows[e]),
                };
                let rows = end - before;
                before = end;
                Quota { pe, rows }
            });
            quotas.collect()
        };
        placement.holders.iter().zip(&placement.shares).enumerate().map(of).collect()
    }

    /// The rows that each PE sends or receives in a dispatch: once to a PE, and once to another host, where the PE with the sender's number forwards them.
    fn traffic(&self, batches: &[Vec<Batch>], host: &[usize]) -> Result<(Vec<u64>, Vec<u64>), InputError> {
        let pes = self.choices.len();
        let mut left = Vec::with_capacity(batches.len());
        for (batches, sources) in batches.iter().zip(&self.sources) {
            let quotas: Vec<Quota> = batches.iter().map(|batch| Quota { pe: batch.pe, rows: batch.rows }).collect();
            left.push(divide_sources(sources, &quotas, host)?);
        }
        let hosts: Vec<Vec<usize>> = {
            let n = host.iter().max().map_or(0, |most| most + 1);
            (0..n).map(|h| (0..pes).filter(|&pe| host[pe] == h).collect()).collect()
        };
        let (mut inside, mut between) = (vec![0; pes], vec![0; pes]);
        let (mut to, mut to_hosts) = (Vec::new(), Vec::new());
        for (source, choices) in self.choices.iter().enumerate() {
            let index = hosts[host[source]].iter().position(|&pe| pe == source).unwrap_or(0);
            let mut at = vec![0usize; batches.len()];
            for token in choices.chunks(self.top_k) {
                to.clear();
                to_hosts.clear();
                for &e in token.iter().filter(|e| **e != NO_EXPERT) {
                    let e = e as usize;
                    let left = &mut left[e][source];
                    while left.get(at[e]) == Some(&0) {
                        at[e] += 1;
                    }
                    left[at[e]] -= 1;
                    let pe = batches[e][at[e]].pe;
                    if !to.contains(&pe) {
                        to.push(pe);
                    }
                }
                for &pe in &to {
                    let sender = match host[pe] == host[source] {
                        true => source,
                        false => {
                            let relay = hosts[host[pe]][index % hosts[host[pe]].len()];
                            if !to_hosts.contains(&relay) {
                                to_hosts.push(relay);
                                between[source] += 1;
                                between[relay] += 1;
                            }
                            relay
                        }
                    };
                    if pe != sender {
                        inside[sender] += 1;
                        inside[pe] += 1;
                    }
                }
            }
        }
        Ok((inside, between))
    }
}

/// Moves tiles to PEs that borrow their expert.
fn lend(batches: &mut [Vec<Batch>], machine: &Machine) -> Result<(), InputError> {
    let tile = machine.experts.tile_rows;
    let mut tiles = vec![Vec::new(); machine.host.len()];
    for (e, batches) in batches.iter().enumerate() {
        batches.iter().for_each(|batch| tiles[batch.pe].push((e, batch.rows.div_ceil(tile))));
    }
    let tile_s = machine.row_s[0] * tile as f64;
    let price = (machine.experts.weights_bytes * machine.inside_s[0] / tile_s).ceil().max(1.0) as u64;
    let rules = Borrowing { host: &machine.host, price, most: machine.rules.borrowed };
    for note in borrow(&tiles, &rules)? {
        let Some(own) = batches[note.expert].iter_mut().find(|batch| batch.pe == note.owner) else { continue };
        // The last tile may have fewer rows.
        let rows = (note.tiles * tile).min(own.rows);
        own.rows -= rows;
        let borrowed = Some((note.owner, note.arrival));
        batches[note.expert].push(Batch { pe: note.borrower, rows, borrowed });
    }
    Ok(())
}
