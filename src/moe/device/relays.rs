//! The relays of rows that are sent to another host once (`kernels/relay.h`), and the kernels' tables of relays and of physical experts.
//!
//! A physical expert is a pair of expert and PE. Each PE numbers the physical experts to which it sends rows. The experts of all PEs of
//! another host are numbered at the relay.

use crate::gpu::params;
use crate::moe::spec::{Hosts, Placement};

/// Entry of a table by PE, for a PE without a value.
const NONE: u32 = u32::MAX;

/// The PEs of a group on their hosts. Without relays every PE receives its rows directly.
pub(super) struct Relays<'a> {
    placement: &'a Placement,
    relays: bool,
    /// The PEs of each host, ascending.
    hosts: Vec<Vec<usize>>,
    /// By PE: the index of its host in `hosts`, and its index on the host.
    host_index: Vec<(usize, usize)>,
}

impl<'a> Relays<'a> {
    pub fn new(placement: &'a Placement, of: &Hosts) -> Relays<'a> {
        let (mut hosts, mut host_index) = (Vec::<Vec<usize>>::new(), vec![(0, 0); placement.n_pes()]);
        let relays = of.relays() && of.n_pes() == placement.n_pes();
        for pe in (0..placement.n_pes()).filter(|_| relays) {
            let members: Vec<usize> = of.members(pe).collect();
            if members.first() == Some(&pe) {
                for (rank, &member) in members.iter().enumerate() {
                    host_index[member] = (hosts.len(), rank);
                }
                hosts.push(members);
            }
        }
        Relays { placement, relays, hosts, host_index }
    }

    fn n_pes(&self) -> usize {
        self.placement.n_pes()
    }

    fn same_host(&self, a: usize, b: usize) -> bool {
        self.host_index[a].0 == self.host_index[b].0
    }

    /// The PEs on the host of `pe`; empty without relays.
    pub fn members(&self, pe: usize) -> &[usize] {
        self.hosts.get(self.host_index[pe].0).map_or(&[], Vec::as_slice)
    }

    /// The PE to which `source` sends rows for `target`; see [`Hosts::relay`].
    fn relay_for(&self, source: usize, target: usize) -> usize {
        if self.same_host(source, target) {
            return target;
        }
        let members = self.members(target);
        members[self.host_index[source].1 % members.len()]
    }

    fn serves(&self, pe: usize, source: usize) -> bool {
        !self.same_host(pe, source) && self.relay_for(source, pe) == pe
    }

    /// The PEs that put rows into the windows of `pe`, ascending.
    fn senders(&self, pe: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_pes()).filter(move |&source| source != pe && self.relay_for(source, pe) == pe)
    }

    fn served(&self, pe: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.n_pes()).filter(move |&source| self.serves(pe, source))
    }

    /// Number of physical experts at `dest` in the tables of `me`. On the host of `me`: the number of experts of `dest`. For a relay of
    /// `me`: the maximum number of experts per PE of its host, times the number of PEs of that host. 0 for other PEs.
    fn physical_count(&self, me: usize, dest: usize) -> usize {
        if self.same_host(me, dest) {
            return self.placement.experts(dest).len();
        }
        if self.relay_for(me, dest) != dest {
            return 0;
        }
        let members = self.members(dest);
        members.iter().map(|&pe| self.placement.experts(pe).len()).max().unwrap_or(0) * members.len()
    }

    /// Sets the fields of a shape that depend on hosts.
    pub fn shape(&self, me: usize, shape: &mut params::LayerShape) {
        let pes = || 0..self.n_pes();
        let most = |of: &dyn Fn(usize) -> usize| pes().map(of).max().unwrap_or(0) as u32;
        shape.held = pes().map(|dest| self.physical_count(me, dest)).sum::<usize>() as u32;
        (shape.member, shape.members, shape.most_members) = (0, 1, 1);
        if !self.relays {
            return;
        }
        shape.relays = 1;
        shape.max_local = most(&|pe| pes().map(|dest| self.physical_count(pe, dest)).max().unwrap_or(0));
        shape.hosts = most(&|pe| pes().filter(|&dest| self.physical_count(pe, dest) > 0).count());
        shape.member = self.host_index[me].1 as u32;
        shape.members = self.members(me).len() as u32;
        shape.most_members = self.hosts.iter().map(Vec::len).max().unwrap_or(1) as u32;
        shape.served = most(&|pe| self.served(pe).count());
        shape.windows = most(&|pe| self.senders(pe).count());
    }

    /// `Tables::first_physical` and `Tables::physical_pe`.
    pub fn physical_tables(&self, me: usize) -> (Vec<u32>, Vec<u32>) {
        let (mut first_physical, mut physical_pe) = (vec![0u32], Vec::new());
        for dest in 0..self.n_pes() {
            physical_pe.resize(physical_pe.len() + self.physical_count(me, dest), dest as u32);
            first_physical.push(physical_pe.len() as u32);
        }
        (first_physical, physical_pe)
    }

    /// The physical expert with local number `local` at `pe`.
    pub fn physical(&self, me: usize, first_physical: &[u32], pe: usize, local: usize) -> u32 {
        let number =
            if self.same_host(me, pe) { local } else { local * self.members(pe).len() + self.host_index[pe].1 };
        first_physical[self.relay_for(me, pe)] + number as u32
    }

    /// Whether `me` puts rows to `pe`, and whether it puts results to `pe`.
    pub fn links(&self, me: usize, pe: usize) -> (bool, bool) {
        (self.relay_for(me, pe) == pe, self.same_host(me, pe) || self.serves(me, pe))
    }

    /// `Tables::relay`; `None` without relays.
    pub fn table(&self, me: usize) -> Option<Vec<u32>> {
        if !self.relays {
            return None;
        }
        let number = |mut of: Box<dyn Iterator<Item = usize> + '_>, pe: usize| {
            of.position(|one| one == pe).map_or(NONE, |n| n as u32)
        };
        let relay_for = |pe| if self.same_host(me, pe) { me } else { self.relay_for(pe, me) };
        let pes = || 0..self.n_pes();
        let mut table: Vec<u32> =
            pes().map(|pe| if self.same_host(me, pe) { NONE } else { relay_for(pe) as u32 }).collect();
        table.extend(pes().map(|pe| number(Box::new(self.senders(pe)), me)));
        table.extend(pes().map(|pe| number(Box::new(self.senders(relay_for(pe))), pe)));
        table.extend(pes().map(|pe| number(Box::new(self.served(relay_for(pe))), pe)));
        table.extend(pes().map(|pe| if self.same_host(me, pe) { 1 } else { self.members(pe).len() as u32 }));
        table.extend(self.members(me).iter().map(|&pe| pe as u32));
        let served: Vec<u32> = self.served(me).map(|pe| pe as u32).collect();
        table.push(served.len() as u32);
        table.extend(served);
        Some(table)
    }
}
