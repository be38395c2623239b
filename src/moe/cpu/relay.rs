//! Rows that cross to another host once, for all of its PEs: `docs/protocol.md`, "A row once per host".

use std::ops::Range;

use super::router::{RouteSlot, Routes};
use crate::moe::spec::{Hosts, Placement};

/// What this PE sends one PE, or has its home send it.
#[derive(Clone, Debug, Default)]
pub struct Announced {
    pub rows: usize,
    pub slots: usize,
    /// Pairs of each of that PE's experts.
    pub counts: Vec<u32>,
}

/// Who passes rows on to whom, as one PE sees it.
pub struct Relay {
    me: usize,
    /// By target: where this PE's rows for it go first.
    pub home: Vec<usize>,
    /// By source: its home on this host where that is another PE, the source's number among those whose home that is, and this PE's there.
    pub via: Vec<Option<(usize, usize, usize)>>,
    /// By source: its number among those whose home this PE is, where others here get rows from it.
    pub served: Vec<Option<usize>>,
    /// The PEs of this host, ascending.
    pub members: Vec<usize>,
    /// By member, and then the end of the last's: the number of its first expert, where the experts of this host are numbered by PE.
    pub firsts: Vec<u32>,
}

impl Relay {
    /// As PE `me` sees it.
    pub fn new(hosts: &Hosts, placement: &Placement, me: usize) -> Relay {
        let n = hosts.n_pes();
        let members: Vec<usize> = hosts.members(me).collect();
        let mut served = vec![None; n];
        if members.len() > 1 {
            hosts.served(me).into_iter().enumerate().for_each(|(number, source)| served[source] = Some(number));
        }
        let via = (0..n).map(|source| {
            let home = Some(hosts.home(source, me)).filter(|home| *home != me)?;
            let number = hosts.served(home).iter().position(|served| *served == source)?;
            Some((home, number, sibling(&members, home, me)))
        });
        Relay {
            me,
            home: (0..n).map(|target| hosts.home(me, target)).collect(),
            via: via.collect(),
            served,
            firsts: firsts(&members, placement),
            members,
        }
    }

    /// This PE's number among the members.
    pub fn own_member(&self) -> usize {
        self.members.iter().position(|member| *member == self.me).unwrap_or(0)
    }

    /// The numbers of a member's experts.
    pub fn experts(&self, member: usize) -> Range<u32> {
        self.firsts[member]..self.firsts[member + 1]
    }

    /// Those of this PE's.
    pub fn own_experts(&self) -> Range<u32> {
        self.experts(self.own_member())
    }

    /// The number of another PE of this host among those that are not this one.
    pub fn sibling(&self, pe: usize) -> usize {
        sibling(&self.members, self.me, pe)
    }

    /// Takes the routes to each PE, and leaves those of other hosts' PEs at their homes, as one: with every row once, and experts numbered as on
    /// that host. Returns what each PE gets in the end.
    pub fn merge(&self, routes: &mut [Routes], placement: &Placement) -> Vec<Announced> {
        let announced = routes.iter().enumerate().map(|(pe, routes)| Announced {
            rows: routes.tokens.len(),
            slots: routes.slots.len(),
            counts: routes.counts(placement.experts(pe).len()),
        });
        let announced = announced.collect();
        for home in 0..routes.len() {
            let targets: Vec<usize> = (0..routes.len()).filter(|target| self.home[*target] == home).collect();
            if targets.len() > 1 {
                let firsts = firsts(&targets, placement);
                let of: Vec<Routes> = targets.iter().map(|target| std::mem::take(&mut routes[*target])).collect();
                targets.iter().for_each(|target| routes[*target].slot_start.push(0));
                routes[home] = merged(&of, &firsts);
            }
        }
        announced
    }
}

/// The number of `pe` among the members of a host that are not `home`.
fn sibling(members: &[usize], home: usize, pe: usize) -> usize {
    members.iter().filter(|member| **member != home).position(|member| *member == pe).unwrap_or(0)
}

/// By PE, and then the end of the last's: the number of its first expert, where theirs are numbered by PE.
fn firsts(pes: &[usize], placement: &Placement) -> Vec<u32> {
    let mut first = 0;
    let mut firsts = vec![0];
    for &pe in pes {
        first += placement.experts(pe).len() as u32;
        firsts.push(first);
    }
    firsts
}

/// The routes to several PEs as those to one that has all their experts.
fn merged(of: &[Routes], firsts: &[u32]) -> Routes {
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
        all.slots.extend(of[k].row(row).iter().map(|slot| RouteSlot { expert: firsts[k] + slot.expert, ..*slot }));
        all.slots[begin..].sort_unstable_by_key(|slot| slot.expert);
        if let Some(end) = all.slot_start.last_mut() {
            *end = all.slots.len() as u32;
        }
    }
    all.sort();
    all
}

/// The slots of one source's rows for all PEs of this host, of which its home knows.
#[derive(Debug, Default)]
pub struct Passed {
    /// Row `j`'s are `slots[slot_start[j]..slot_start[j + 1]]`: (expert by its number on this host, weight), ascending.
    pub slot_start: Vec<u32>,
    pub slots: Vec<(u32, f32)>,
}

impl Passed {
    /// The slots of a row.
    pub fn row(&self, j: usize) -> &[(u32, f32)] {
        &self.slots[self.slot_start[j] as usize..self.slot_start[j + 1] as usize]
    }

    /// The slots of a row whose experts one PE has.
    pub fn slots_of(&self, j: usize, experts: Range<u32>) -> &[(u32, f32)] {
        let row = self.row(j);
        let start = row.partition_point(|slot| slot.0 < experts.start);
        &row[start..start + row[start..].partition_point(|slot| slot.0 < experts.end)]
    }
}

/// The rows of one source for another PE of this host.
#[derive(Debug, Default)]
pub struct Stream {
    /// How many there are to be.
    pub announced: usize,
    /// Which of the source's rows, in the order in which they are passed on: of the PE's first expert, then of rows; as far as it is known.
    pub rows: Vec<u32>,
    /// Whose first expert there is below this one.
    until: u32,
    /// The same in the order of results, that of the PE's last expert. Empty until all rows have come.
    pub returns: Vec<u32>,
    /// By row of the source: its place among the results; `NONE` where the PE has no part of it. Empty until all rows have come.
    pub place: Vec<u32>,
    /// Slots of the results before each, and of all.
    pub slots_before: Vec<u32>,
}

/// No place.
pub const NONE: u32 = u32::MAX;

impl Stream {
    /// Of so many rows.
    pub fn new(announced: usize) -> Stream {
        Stream { announced, ..Stream::default() }
    }

    /// After `come` rows of the source have come, the next of which can have no expert below `until`: adds those whose place is known by it, at
    /// the end (`u32::MAX`) all of them, and then their order as results.
    pub fn extend(&mut self, passed: &Passed, experts: Range<u32>, come: usize, until: u32) {
        if until == self.until {
            return;
        }
        let first = |row: u32| passed.slots_of(row as usize, experts.clone()).first().map(|slot| slot.0);
        let mut new: Vec<(u32, u32)> = (0..come as u32).filter_map(|row| Some((first(row)?, row))).collect();
        new.retain(|(first, _)| (self.until..until).contains(first));
        new.sort_unstable();
        self.rows.extend(new.into_iter().map(|(_, row)| row));
        self.until = until;
        if until == u32::MAX {
            let last = |row: u32| passed.slots_of(row as usize, experts.clone()).last().map_or(0, |slot| slot.0);
            self.returns = self.rows.clone();
            self.returns.sort_by_key(|row| last(*row));
            self.place = vec![NONE; come];
            self.slots_before = vec![0];
            let mut before = 0;
            for (place, &row) in self.returns.iter().enumerate() {
                self.place[row as usize] = place as u32;
                before += passed.slots_of(row as usize, experts.clone()).len() as u32;
                self.slots_before.push(before);
            }
        }
    }
}
