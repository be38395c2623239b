//! The time of an assigned microbatch.

use super::assign::{Assigned, Microbatch};
use super::machine::Machine;

/// The times of a microbatch.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    /// Forward and backward, s.
    pub pass_s: [f64; 2],
    /// Both passes if work and rows were spread evenly, s.
    pub ideal_s: f64,
    pub imbalance: f64,
    pub borrowed: f64,
}

impl Machine {
    pub fn times(&self, batch: &Microbatch, assigned: &Assigned) -> Times {
        let pes = self.host.len();
        let passes = [1.0, 2.0].map(|factor| self.pass(assigned, factor));
        let mut rows = vec![0; pes];
        let (mut tiles, mut borrowed) = (0, 0);
        for batch in assigned.batches.iter().flatten() {
            rows[batch.pe] += batch.rows;
            tiles += batch.rows.div_ceil(self.experts.tile_rows);
            borrowed += if batch.borrowed.is_some() { batch.rows.div_ceil(self.experts.tile_rows) } else { 0 };
        }
        let all: u64 = batch.rows.iter().sum();
        // All rows at the rate of all PEs, and the mean of the ports' times.
        let rate: f64 = self.row_s.iter().map(|row_s| 1.0 / row_s).sum();
        let links = (0..pes).map(|pe| self.link_s(assigned, pe));
        let (inside, between) = links.fold((0.0, 0.0), |sum, link| (sum.0 + link.0, sum.1 + link.1));
        let link_s = f64::max(inside, between) / pes as f64;
        let ideal_s = [1.0, 2.0].map(|factor| f64::max(factor * all as f64 / rate, link_s)).iter().sum();
        let most = rows.iter().copied().max().unwrap_or(0) as f64;
        Times {
            pass_s: passes,
            ideal_s,
            imbalance: if all > 0 { most * pes as f64 / all as f64 } else { 1.0 },
            borrowed: borrowed as f64 / tiles.max(1) as f64,
        }
    }

    /// Time of a PE's ports for rows in dispatch and combine of a pass, inside its host and to others, s. Rows of the dispatch return in the combine, so both directions of a port carry the same.
    fn link_s(&self, assigned: &Assigned, pe: usize) -> (f64, f64) {
        let bytes = |rows: u64| rows as f64 * self.experts.row_bytes;
        (bytes(assigned.inside[pe]) * self.inside_s[pe], bytes(assigned.between[pe]) * self.between_s[pe])
    }

    /// A pass, in which a row takes `factor` times that of a forward.
    fn pass(&self, assigned: &Assigned, factor: f64) -> f64 {
        let pes = self.host.len();
        let (experts, backward) = (&self.experts, factor > 1.0);
        let read_s = |bytes: f64| bytes / self.rules.memory_bytes_per_s;
        let (mut own_s, mut extra_s, mut arrival_s) = (vec![0.0; pes], vec![0.0; pes], vec![0.0f64; pes]);
        // Bytes of borrowed weights and their gradients, out and in.
        let mut moved = vec![(0.0, 0.0); pes];
        for batch in assigned.batches.iter().flatten().filter(|batch| batch.rows > 0) {
            let pe = batch.pe;
            let rows = (batch.rows.div_ceil(experts.tile_rows) * experts.tile_rows) as f64;
            let time_s = f64::max(factor * rows * self.row_s[pe], read_s(experts.weights_bytes));
            let Some((owner, arrival)) = batch.borrowed else {
                own_s[pe] += time_s;
                continue;
            };
            extra_s[pe] += time_s;
            arrival_s[pe] = arrival_s[pe].max(arrival as f64 * experts.weights_bytes * self.inside_s[pe]);
            moved[owner].0 += experts.weights_bytes;
            moved[pe].1 += experts.weights_bytes;
            if backward {
                moved[pe].0 += experts.gradients_bytes;
                moved[owner].1 += experts.gradients_bytes;
                // The owner reads both gradients and writes their sum.
                own_s[owner] += 3.0 * read_s(experts.gradients_bytes);
            }
        }
        let of_pe = |pe: usize| {
            let compute_s = f64::max(own_s[pe], arrival_s[pe]) + extra_s[pe];
            let (inside_s, between_s) = self.link_s(assigned, pe);
            let moved_s = f64::max(moved[pe].0, moved[pe].1) * self.inside_s[pe];
            compute_s.max(inside_s + moved_s).max(between_s)
        };
        (0..pes).map(of_pe).fold(0.0, f64::max)
    }

    /// Time of a byte from one PE to another, s.
    fn byte_s(&self, from: usize, to: usize) -> f64 {
        if self.host[from] == self.host[to] { self.inside_s[from] } else { self.between_s[from] }
    }

    /// Moves of experts, as (from, to): a PE sends, and receives, one after the other, s.
    pub fn move_s(&self, moves: &[(usize, usize)]) -> f64 {
        let mut ports = vec![[0.0; 2]; self.host.len()];
        for &(from, to) in moves {
            let time_s = self.experts.weights_bytes * self.byte_s(from, to);
            ports[from][0] += time_s;
            ports[to][1] += time_s;
        }
        ports.into_iter().flatten().fold(0.0, f64::max)
    }

    /// Sums of the gradients of replicas: 2 (K - 1) / K of the bytes of an expert with K holders, over the slowest link between them, s.
    pub fn gradients_s(&self, holders: &[Vec<usize>]) -> f64 {
        let mut ports = vec![0.0; self.host.len()];
        for holders in holders.iter().filter(|holders| holders.len() > 1) {
            let k = holders.len() as f64;
            for &pe in holders {
                let slowest = holders.iter().filter(|to| **to != pe).map(|&to| self.byte_s(pe, to)).fold(0.0, f64::max);
                ports[pe] += 2.0 * (k - 1.0) / k * self.experts.gradients_bytes * slowest;
            }
        }
        ports.into_iter().fold(0.0, f64::max)
    }
}
