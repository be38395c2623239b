//! After the passes: stragglers, and the sums of gradients.

use super::Engine;
use crate::step::Schedule;

impl Engine<'_> {
    /// Appends each PE's delay to `all`: how much later it ends its passes than the first PE of its group. In the bulk schedule barriers
    /// align the ends of passes, so the end of its experts' work is compared instead.
    pub(super) fn stragglers(&self, all: &mut Vec<f64>) {
        for group in self.step.groups {
            let end_s = |&pe: &usize| match self.step.schedule {
                Schedule::Pipelined => self.pes[pe].end_s,
                Schedule::Bulk => self.pes[pe].experts_until_s,
            };
            let first_s = group.members.iter().map(end_s).fold(f64::INFINITY, f64::min);
            all.extend(group.members.iter().map(|pe| end_s(pe) - first_s));
        }
    }

    /// Sums the gradients of experts that several PEs hold, in one group or several, and those of the replicated weights. Returns the time
    /// at which the last PE has all sums, s.
    pub(super) fn all_reduce(&mut self) -> f64 {
        let (step, n) = (self.step, self.pes.len());
        let (expert_bytes, replicated_bytes) = step.cost.gradient_bytes;
        for pe in &mut self.pes {
            pe.time.waiting_s = [0, 1].map(|pass| (pe.time.pass_s[pass] - pe.time.work_s(pass)).max(0.0));
        }
        let last_s = self.pes.iter().map(|pe| pe.end_s).fold(0.0, f64::max);
        if !step.backward {
            return last_s;
        }
        let k = step.groups.len();
        // By PE: when all holders of its experts have ended, and when their sums have arrived.
        let mut ready_s = vec![(0.0f64, 0.0f64); n];
        let held = || step.groups.iter().flat_map(|group| group.members.iter().zip(&group.experts));
        let experts = held().flat_map(|(_, experts)| experts).max().map_or(0, |expert| expert + 1);
        let mut holders: Vec<Vec<usize>> = vec![Vec::new(); experts];
        held().for_each(|(&pe, experts)| experts.iter().for_each(|&e| holders[e].push(pe)));
        for (g, group) in step.groups.iter().enumerate() {
            for (index, (&pe, experts)) in group.members.iter().zip(&group.experts).enumerate() {
                let summed = || experts.iter().map(|&e| &holders[e]).filter(|holders| holders.len() > 1);
                let all_s = summed().flatten().map(|&holder| self.pes[holder].end_s).reduce(f64::max);
                let Some((all_s, first)) = all_s.zip(summed().next()) else { continue };
                // Each of K holders sends the others their parts at once, and then the sums of its own part: two latencies, and 2 (K - 1) /
                // K of the bytes.
                let other = &step.groups[(g + 1) % k];
                let to = match k {
                    1 => first.iter().copied().find(|&holder| holder != pe).unwrap_or(pe),
                    _ => other.members[index % other.members.len()],
                };
                let share: f64 = summed().map(|holders| 2.0 * (holders.len() - 1) as f64 / holders.len() as f64).sum();
                let bytes = share * expert_bytes;
                let sums_s = 2.0 * self.network.alpha_s(pe, to) + self.network.wire_s(pe, to, bytes);
                ready_s[pe] = (all_s, all_s + sums_s);
            }
        }
        // Replicated weights: a reduce-scatter by recursive halving, then an all-gather by recursive doubling.
        let rounds = f64::from(n.next_power_of_two().trailing_zeros());
        let replicated_s = match n {
            1 => 0.0,
            _ if replicated_bytes == 0.0 => 0.0,
            _ => {
                let bytes = 2.0 * replicated_bytes * (n - 1) as f64 / n as f64;
                2.0 * rounds * self.network.alpha_s(0, n - 1) + self.network.wire_s(0, n - 1, bytes)
            }
        };
        let mut end_s = last_s;
        for (pe, (all_s, ready_s)) in self.pes.iter_mut().zip(ready_s) {
            let replicated_until_s = if replicated_s > 0.0 { last_s + replicated_s } else { pe.end_s };
            let time = &mut pe.time;
            if ready_s > replicated_until_s {
                time.expert_sums_s += ready_s - all_s;
                time.sums_wait_s += all_s - pe.end_s;
            } else if replicated_s > 0.0 {
                time.replicated_sums_s += replicated_s;
                time.sums_wait_s += last_s - pe.end_s;
            }
            end_s = end_s.max(ready_s).max(replicated_until_s);
        }
        end_s
    }
}
