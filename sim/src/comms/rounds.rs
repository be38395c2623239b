//! One round of an exchange: the packets of each link.
//!
//! Packets are counted rather than simulated one by one: all packets that a pair can send on a link in its turn are sent at once, and so
//! are those of several equal sweeps.

use std::ops::ControlFlow;

use super::Params;

/// A link between two nodes in a round.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// Bytes sent.
    pub bytes: u64,
    /// Packets sent.
    pub packets: u64,
    /// Whether its packets are sent from the larger node number to the smaller; meaningless without packets.
    pub downward: bool,
}

/// The state of all links and NICs in a round.
pub struct Round {
    nodes: usize,
    num_links: usize,
    /// The links between nodes i and j are the `num_links` elements from `pair(i, j) * num_links` on.
    links: Vec<Link>,
    /// By pair of nodes: capacity of each link in a round, bytes.
    capacity_bytes: Vec<u64>,
    nic_bytes: Vec<u64>,
    nic_limit_bytes: u64,
    packet_bytes: u64,
    turn_packets: u64,
    /// Link visits so far, over all rounds.
    pub work: u64,
    /// Maximum of `work`; sweeps stop above it.
    work_most: u64,
}

/// A source and a destination.
pub type Pair = (u32, u32);

impl Round {
    pub fn new(params: &Params, nodes: usize, work_most: u64) -> Round {
        let pairs = nodes * nodes.saturating_sub(1) / 2;
        let mut capacity_bytes = vec![0; pairs];
        for j in 1..nodes {
            for i in 0..j {
                // A round transfers whole bytes, so the fraction is dropped.
                capacity_bytes[pair(i, j)] = params.bandwidth_bytes_per_ms(i, j).min(1e18) as u64;
            }
        }
        Round {
            nodes,
            num_links: params.num_links,
            links: vec![Link::default(); pairs * params.num_links],
            capacity_bytes,
            nic_bytes: vec![0; nodes],
            nic_limit_bytes: params.nic_rate_bytes.min(1e18) as u64,
            packet_bytes: params.packet_size_bytes,
            turn_packets: params.round_robin_max_packets,
            work: 0,
            work_most,
        }
    }

    /// Whether sweeps have stopped because `work` exceeds its maximum.
    pub fn is_over(&self) -> bool {
        self.work > self.work_most
    }

    /// Starts a round.
    pub fn clear(&mut self) {
        self.work += self.links.len() as u64;
        self.links.fill(Link::default());
        self.nic_bytes.fill(0);
    }

    /// The links of a pair of nodes.
    pub fn links(&self, i: usize, j: usize) -> &[Link] {
        let at = pair(i, j) * self.num_links;
        &self.links[at..at + self.num_links]
    }

    /// Sweeps over the pairs, one turn for each, until no pair can send a packet. `load`, indexed by `source * nodes + destination`, is
    /// reduced by the bytes sent.
    pub fn sweep(&mut self, load: &mut [u64], pairs: &mut Vec<Pair>) {
        while !pairs.is_empty() && !self.is_over() {
            self.repeated_sweeps(load, pairs);
            pairs.retain(|&(from, to)| {
                let bytes = &mut load[from as usize * self.nodes + to as usize];
                self.turn(from as usize, to as usize, bytes)
            });
        }
    }

    /// Runs at once as many sweeps as possible in which every pair sends a full turn of full packets over one link, the same in all these
    /// sweeps.
    fn repeated_sweeps(&mut self, load: &mut [u64], pairs: &[Pair]) {
        let Some(turn_bytes) = self.turn_packets.checked_mul(self.packet_bytes) else { return };
        let mut at_node = vec![0u64; self.nodes];
        let mut sweeps = u64::MAX;
        for &(from, to) in pairs {
            let (from, to) = (from as usize, to as usize);
            at_node[from] += 1;
            at_node[to] += 1;
            let room = match self.first_fit(from, to, self.packet_bytes) {
                Some(at) => self.capacity_bytes[pair(from, to)] - self.links[at].bytes,
                None => 0,
            };
            sweeps = sweeps.min(load[from * self.nodes + to].min(room) / turn_bytes);
            if sweeps == 0 {
                return;
            }
        }
        for (used, turns) in self.nic_bytes.iter().zip(&at_node).filter(|(_, turns)| **turns > 0) {
            sweeps = sweeps.min((self.nic_limit_bytes - used) / turn_bytes / turns);
        }
        if sweeps == 0 {
            return;
        }
        for &(from, to) in pairs {
            let (from, to) = (from as usize, to as usize);
            if let Some(at) = self.first_fit(from, to, self.packet_bytes) {
                self.put(at, from, to, sweeps * self.turn_packets, self.packet_bytes);
                load[from * self.nodes + to] -= sweeps * turn_bytes;
            }
        }
    }

    /// One turn of a pair; returns whether it sent any packets.
    fn turn(&mut self, from: usize, to: usize, load: &mut u64) -> bool {
        let mut left = self.turn_packets;
        while left > 0 && *load > 0 {
            match self.send(from, to, load, left) {
                ControlFlow::Continue(sent) => left -= sent,
                ControlFlow::Break(()) => break,
            }
        }
        left < self.turn_packets
    }

    /// Sends at most `most` packets of one size on one link. Returns their number, or `Break` if no packet fits.
    fn send(&mut self, from: usize, to: usize, load: &mut u64, most: u64) -> ControlFlow<(), u64> {
        let packet = self.packet_bytes.min(*load);
        let nic = self.nic_limit_bytes - self.nic_bytes[from].max(self.nic_bytes[to]);
        let Some(at) = self.first_fit(from, to, packet).filter(|_| packet <= nic) else {
            return ControlFlow::Break(());
        };
        let room = self.capacity_bytes[pair(from, to)] - self.links[at].bytes;
        let packets = most.min(*load / packet).min(room / packet).min(nic / packet);
        self.put(at, from, to, packets, packet);
        *load -= packets * packet;
        ControlFlow::Continue(packets)
    }

    fn put(&mut self, at: usize, from: usize, to: usize, packets: u64, packet_bytes: u64) {
        let link = &mut self.links[at];
        link.bytes += packets * packet_bytes;
        link.packets += packets;
        link.downward = from > to;
        self.nic_bytes[from] += packets * packet_bytes;
        self.nic_bytes[to] += packets * packet_bytes;
    }

    /// The first link that has room for a packet, and has no packets yet or packets in this direction.
    fn first_fit(&mut self, from: usize, to: usize, packet_bytes: u64) -> Option<usize> {
        let pair = pair(from, to);
        let links = &self.links[pair * self.num_links..][..self.num_links];
        let fits = |link: &Link| {
            (link.packets == 0 || link.downward == (from > to))
                && link.bytes + packet_bytes <= self.capacity_bytes[pair]
        };
        let found = links.iter().position(fits);
        self.work += found.map_or(self.num_links, |link| link + 1) as u64;
        found.map(|link| pair * self.num_links + link)
    }
}

/// Index of an unordered pair of nodes.
fn pair(a: usize, b: usize) -> usize {
    let (i, j) = (a.min(b), a.max(b));
    j * (j - 1) / 2 + i
}
