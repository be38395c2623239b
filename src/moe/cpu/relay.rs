//! Rows that are sent to another host once for all of its PEs; see `docs/protocol.md`, "A row once per host".

use std::ops::Range;

use super::router::{RouteSlot, Routes};
use crate::moe::spec::{Hosts, Placement};

/// Counts of this PE's rows for one target PE, which receives them directly or through a relay.
#[derive(Clone, Debug, Default)]
pub struct Announced {
    pub rows: usize,
    pub slots: usize,
    /// Slots for each of that PE's experts.
    pub counts: Vec<u32>,
}

/// The relays that one PE uses, and the sources for which this PE is a relay.
pub struct RelayMap {
    me: usize,
    /// By target: the PE to which this PE sends the rows for the target, either its relay or the target itself.
    pub relay: Vec<usize>,
    /// By source: set if another PE of this host relays the source's rows to this PE, as (relay, index of the source
    /// among the relay's sources, index of this PE among the relay's siblings).
    pub via: Vec<Option<(usize, usize, usize)>>,
    /// By source: if this PE is the source's relay, the index of the source among those for which this PE is the relay. `None` for all
    /// sources if this host has no other PE.
    pub served: Vec<Option<usize>>,
    pub members: Vec<usize>,
    /// The experts of this host are numbered consecutively. Member `i` has experts `first_experts[i]..first_experts[i + 1]`.
    pub first_experts: Vec<u32>,
}

impl RelayMap {
    /// The relay map of PE `me`.
    pub fn new(hosts: &Hosts, placement: &Placement, me: usize) -> RelayMap {
        let n = hosts.n_pes();
        let members: Vec<usize> = hosts.members(me).collect();
        let mut served = vec![None; n];
        if members.len() > 1 {
            hosts.served(me).into_iter().enumerate().for_each(|(number, source)| served[source] = Some(number));
        }
        let via = (0..n).map(|source| {
            let relay = Some(hosts.relay(source, me)).filter(|relay| *relay != me)?;
            let number = hosts.served(relay).iter().position(|served| *served == source)?;
            Some((relay, number, sibling(&members, relay, me)))
        });
        RelayMap {
            me,
            relay: (0..n).map(|target| hosts.relay(me, target)).collect(),
            via: via.collect(),
            served,
            first_experts: first_experts(&members, placement),
            members,
        }
    }

    /// This PE's index in `members`.
    pub fn own_member(&self) -> usize {
        self.members.iter().position(|member| *member == self.me).unwrap_or(0)
    }

    /// Numbers of a member's experts on this host.
    pub fn experts(&self, member: usize) -> Range<u32> {
        self.first_experts[member]..self.first_experts[member + 1]
    }

    /// Numbers of this PE's experts on this host.
    pub fn own_experts(&self) -> Range<u32> {
        self.experts(self.own_member())
    }

    /// Index of `pe` among the members of this host other than this PE.
    pub fn sibling(&self, pe: usize) -> usize {
        sibling(&self.members, self.me, pe)
    }

    /// Merges the routes to the PEs of each other host, at the index of their relay. Each row then occurs once, and experts have the
    /// numbers of that host. Returns the counts of the rows that each PE will receive.
    pub fn merge(&self, routes: &mut [Routes], placement: &Placement) -> Vec<Announced> {
        let announced = routes.iter().enumerate().map(|(pe, routes)| Announced {
            rows: routes.tokens.len(),
            slots: routes.slots.len(),
            counts: routes.counts(placement.experts(pe).len()),
        });
        let announced = announced.collect();
        for relay in 0..routes.len() {
            let targets: Vec<usize> = (0..routes.len()).filter(|target| self.relay[*target] == relay).collect();
            if targets.len() > 1 {
                let first_experts = first_experts(&targets, placement);
                let of: Vec<Routes> = targets.iter().map(|target| std::mem::take(&mut routes[*target])).collect();
                targets.iter().for_each(|target| routes[*target].slot_start.push(0));
                routes[relay] = merged(&of, &first_experts);
            }
        }
        announced
    }
}

/// Index of `pe` among the members other than `relay`.
fn sibling(members: &[usize], relay: usize, pe: usize) -> usize {
    members.iter().filter(|member| **member != relay).position(|member| *member == pe).unwrap_or(0)
}

/// Numbers the experts of `pes` consecutively: `pes[i]` has experts `first_experts[i]..first_experts[i + 1]`.
fn first_experts(pes: &[usize], placement: &Placement) -> Vec<u32> {
    let mut first = 0;
    let mut first_experts = vec![0];
    for &pe in pes {
        first += placement.experts(pe).len() as u32;
        first_experts.push(first);
    }
    first_experts
}

/// Merges the routes to several PEs, as if one PE had all their experts.
fn merged(of: &[Routes], first_experts: &[u32]) -> Routes {
    let mut rows: Vec<(u32, usize, usize)> = Vec::new();
    for (k, routes) in of.iter().enumerate() {
        rows.extend(routes.tokens.iter().enumerate().map(|(row, token)| (*token, k, row)));
    }
    rows.sort_unstable();
    let mut all = Routes { slot_start: vec![0], ..Routes::default() };
    for (token, k, row) in rows {
        if all.tokens.last() != Some(&token) {
            all.tokens.push(token);
            all.slot_start.push(all.slots.len() as u32);
        }
        let begin = all.slots.len();
        all.slots
            .extend(of[k].row(row).iter().map(|slot| RouteSlot { expert: first_experts[k] + slot.expert, ..*slot }));
        all.slots[begin..].sort_unstable_by_key(|slot| slot.expert);
        if let Some(end) = all.slot_start.last_mut() {
            *end = all.slots.len() as u32;
        }
    }
    all.sort();
    all
}

/// Slots of one source's rows on all PEs of this host, stored by the relay.
#[derive(Debug, Default)]
pub struct RelayedSlots {
    /// Row `j` has the slots `slots[slot_start[j]..slot_start[j + 1]]`, each as (the expert's number on this host, weight), in ascending
    /// order.
    pub slot_start: Vec<u32>,
    pub slots: Vec<(u32, f32)>,
}

impl RelayedSlots {
    pub fn row(&self, j: usize) -> &[(u32, f32)] {
        &self.slots[self.slot_start[j] as usize..self.slot_start[j + 1] as usize]
    }

    /// The slots of row `j` whose expert is one of `experts`.
    pub fn slots_of(&self, j: usize, experts: Range<u32>) -> &[(u32, f32)] {
        let row = self.row(j);
        let start = row.partition_point(|slot| slot.0 < experts.start);
        &row[start..start + row[start..].partition_point(|slot| slot.0 < experts.end)]
    }
}

/// Rows of one source that the relay forwards to one other PE of this host.
#[derive(Debug, Default)]
pub struct Stream {
    /// Number of rows according to the header.
    pub announced: usize,
    /// Rows in the order in which they are forwarded: by their first expert on that PE, then by number. Until all rows have arrived, only a
    /// prefix of this order.
    pub rows: Vec<u32>,
    /// `rows` covers the rows whose first expert is below this one.
    until: u32,
    /// Rows in the order in which their results return: by their last expert on that PE. Empty until all rows have arrived.
    pub returns: Vec<u32>,
    /// By row of the source: the row's index in `returns`, or `NONE` if the row has no slot on that PE. Empty until all rows have arrived.
    pub position: Vec<u32>,
    /// `slots_before[i]` is the number of slots of the first `i` rows in `returns`.
    pub slots_before: Vec<u32>,
}

/// Position of a row without a slot on the PE.
pub const NONE: u32 = u32::MAX;

impl Stream {
    pub fn new(announced: usize) -> Stream {
        Stream { announced, ..Stream::default() }
    }

    /// Call it when the first `arrived` rows of the source have arrived; later rows must have no expert below `until`. Appends the rows
    /// whose position is final. An `until` of `u32::MAX` means that all rows have arrived; `returns` and the fields after it are then
    /// filled too.
    pub fn extend(&mut self, relayed: &RelayedSlots, experts: Range<u32>, arrived: usize, until: u32) {
        if until == self.until {
            return;
        }
        let first = |row: u32| relayed.slots_of(row as usize, experts.clone()).first().map(|slot| slot.0);
        let mut new: Vec<(u32, u32)> = (0..arrived as u32).filter_map(|row| Some((first(row)?, row))).collect();
        new.retain(|(first, _)| (self.until..until).contains(first));
        new.sort_unstable();
        self.rows.extend(new.into_iter().map(|(_, row)| row));
        self.until = until;
        if until == u32::MAX {
            let last = |row: u32| relayed.slots_of(row as usize, experts.clone()).last().map_or(0, |slot| slot.0);
            self.returns = self.rows.clone();
            self.returns.sort_by_key(|row| last(*row));
            self.position = vec![NONE; arrived];
            self.slots_before = vec![0];
            let mut before = 0;
            for (position, &row) in self.returns.iter().enumerate() {
                self.position[row as usize] = position as u32;
                before += relayed.slots_of(row as usize, experts.clone()).len() as u32;
                self.slots_before.push(before);
            }
        }
    }
}
