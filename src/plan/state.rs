//! A grouping under change: what moving a device, or swapping two, does to the objective, without computing it anew.

use super::objective::{IDLE, Problem};
use crate::cluster::LinkTable;

/// One group.
#[derive(Clone, Debug)]
struct Group {
    members: Vec<u32>,
    flops: f64,
    memory: u64,
    /// Compute and communication, ms.
    work_ms: f64,
    /// Sum over devices of the 8th powers of their compute and communication over the unit.
    eighth: f64,
}

/// A change: device `i` goes to group `to` (or [`IDLE`]); and where there is a `j`, it takes `i`'s place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Move {
    pub i: u32,
    pub to: u32,
    pub j: Option<u32>,
}

/// What a grouping is worth.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Worth {
    /// The objective, ms; what it would be if groups that are short of memory were not.
    pub objective_ms: f64,
    /// Mean over groups of gamma times compute and communication, ms: tells groupings of one objective apart.
    pub mean_ms: f64,
    /// The devices' 8-norm mean of gamma times their group's compute and their own communication, ms: near the maximum, but every slow
    /// device counts.
    pub norm_ms: f64,
    /// Experts for which groups lack memory, over the number of experts.
    pub short: f64,
}

/// A grouping, and the sums that make its changes cheap.
pub(crate) struct State<'p, 'a, L> {
    problem: &'p Problem<'a, L>,
    groups: Vec<Group>,
    group_of: Vec<u32>,
    /// Where a device is in its group's list.
    place: Vec<u32>,
    /// Sums of alpha and beta to the other members of a device's group.
    sums: Vec<(f64, f64)>,
    workers: usize,
    /// The three groups with the most work, most first: which and how much. At most two groups change at a time, so the maximum
    /// over the others is among them.
    most: [(u32, f64); 3],
    /// Sum of the groups' work.
    sum_ms: f64,
    /// Sum of the groups' sums of 8th powers.
    sum_eighth: f64,
    unit_ms: f64,
    /// Experts for which groups lack memory, over all groups.
    short: u64,
    /// Of each device, the edges of the tree: where to, and their places.
    neighbours: Vec<Vec<(u32, u32)>>,
    /// gamma by number of workers.
    gamma: Vec<f64>,
    /// Links looked at so far: the measure of effort.
    pub ops: u64,
}

impl<'p, 'a, L: LinkTable> State<'p, 'a, L> {
    /// The state of a grouping; devices in none of the groups are idle.
    pub fn new(problem: &'p Problem<'a, L>, groups: &[Vec<u32>]) -> Self {
        let n = problem.n();
        let mut state = State {
            problem,
            groups: Vec::with_capacity(groups.len()),
            group_of: vec![IDLE; n],
            place: vec![0; n],
            sums: vec![(0.0, 0.0); n],
            workers: groups.iter().map(Vec::len).sum(),
            most: [(IDLE, 0.0); 3],
            sum_ms: 0.0,
            sum_eighth: 0.0,
            unit_ms: 1.0,
            short: 0,
            neighbours: Vec::new(),
            gamma: (0..=n).map(|workers| problem.gamma(workers)).collect(),
            ops: 0,
        };
        for (g, members) in groups.iter().enumerate() {
            let flops = members.iter().map(|&i| problem.flops[i as usize]).sum();
            for (place, (&i, sums)) in members.iter().zip(problem.links.sums(members)).enumerate() {
                state.group_of[i as usize] = g as u32;
                state.place[i as usize] = place as u32;
                state.sums[i as usize] = sums;
            }
            let memory = problem.holds(members);
            state.groups.push(Group { members: members.clone(), flops, memory, work_ms: 0.0, eighth: 0.0 });
            state.groups[g].work_ms = state.whole(g as u32).0;
        }
        let most = state.groups.iter().map(|group| group.work_ms).fold(0.0, f64::max);
        state.unit_ms = if most > 0.0 { most } else { 1.0 };
        for g in 0..state.groups.len() {
            state.groups[g].eighth = state.whole(g as u32).1;
        }
        state.sum_up();
        state
    }

    /// Brings up to date what is known of all groups together.
    fn sum_up(&mut self) {
        self.most = [(IDLE, 0.0); 3];
        (self.sum_ms, self.sum_eighth, self.short) = (0.0, 0.0, 0);
        for (g, group) in self.groups.iter().enumerate() {
            self.sum_ms += group.work_ms;
            self.sum_eighth += group.eighth;
            self.short += self.problem.n_experts.saturating_sub(group.memory);
            let mut here = (g as u32, group.work_ms);
            for most in &mut self.most {
                if here.1 > most.1 || most.0 == IDLE {
                    std::mem::swap(&mut here, most);
                }
            }
        }
        self.ops += self.groups.len() as u64 / 4;
    }

    /// Makes ready for [`State::joined`]; the problem's edges must be a tree.
    pub fn with_tree(mut self) -> Self {
        self.neighbours = vec![Vec::new(); self.problem.n()];
        for (place, edge) in self.problem.edges.iter().enumerate() {
            self.neighbours[edge.i as usize].push((edge.j, place as u32));
            self.neighbours[edge.j as usize].push((edge.i, place as u32));
        }
        self
    }

    /// The groups, each ascending.
    pub fn grouping(&self) -> Vec<Vec<u32>> {
        let sorted = |group: &Group| {
            let mut members = group.members.clone();
            members.sort_unstable();
            members
        };
        self.groups.iter().map(sorted).collect()
    }

    /// Number of groups.
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    /// The group of a device.
    pub fn group_of(&self, i: u32) -> u32 {
        self.group_of[i as usize]
    }

    /// A group's devices, in no order.
    pub fn members(&self, g: u32) -> &[u32] {
        &self.groups[g as usize].members
    }

    /// The group with the most compute and communication.
    pub fn worst(&self) -> u32 {
        self.most[0].0
    }

    /// In that group, the device that exchanges longest.
    pub fn worst_device(&self) -> Option<u32> {
        let members = &self.groups.get(self.most[0].0 as usize)?.members;
        let per_peer = self.problem.workload.p2p_buffer_mb / members.len() as f64;
        let time = |i: u32| self.sums[i as usize].0 + self.sums[i as usize].1 * per_peer;
        members.iter().copied().reduce(|worst, i| if time(i) > time(worst) { i } else { worst })
    }

    /// Compute and communication of group `g` as it is, and its sum of 8th powers.
    fn whole(&self, g: u32) -> (f64, f64) {
        self.work(g, None, None, f64::INFINITY).unwrap_or((f64::INFINITY, f64::INFINITY))
    }

    /// Compute and communication of group `g` without device `out` and with device `into`, and its sum of 8th powers; `None` as soon as it
    /// is seen to take longer than `limit_ms`.
    fn work(&self, g: u32, out: Option<u32>, into: Option<u32>, limit_ms: f64) -> Option<(f64, f64)> {
        match (out, into) {
            (None, None) => self.work_of::<false, false>(g, 0, 0, limit_ms),
            (Some(out), None) => self.work_of::<true, false>(g, out, 0, limit_ms),
            (None, Some(into)) => self.work_of::<false, true>(g, 0, into, limit_ms),
            (Some(out), Some(into)) => self.work_of::<true, true>(g, out, into, limit_ms),
        }
    }

    fn work_of<const OUT: bool, const IN: bool>(
        &self,
        g: u32,
        out: u32,
        into: u32,
        limit_ms: f64,
    ) -> Option<(f64, f64)> {
        let (problem, group) = (self.problem, &self.groups[g as usize]);
        let size = group.members.len() + usize::from(IN) - usize::from(OUT);
        let per_peer = problem.workload.p2p_buffer_mb / size as f64;
        let (mut worst, mut new, mut sum) = (0.0f64, (0.0, 0.0), 0.0);
        let mut flops = group.flops;
        if OUT {
            flops -= problem.flops[out as usize];
        }
        if IN {
            flops += problem.flops[into as usize];
        }
        let compute = problem.compute(flops);
        let limit = (limit_ms - compute) / problem.workload.p2p_frequency;
        let (scale, offset) = (problem.workload.p2p_frequency / self.unit_ms, compute / self.unit_ms);
        for &m in &group.members {
            if OUT && m == out {
                continue;
            }
            let (mut alpha, mut beta) = self.sums[m as usize];
            if OUT {
                let link = problem.links.link_to(out as usize, m as usize);
                alpha -= link.alpha_ms;
                beta -= link.beta_ms_per_mb;
            }
            if IN {
                let link = problem.links.link_to(into as usize, m as usize);
                alpha += link.alpha_ms;
                beta += link.beta_ms_per_mb;
                let link = problem.links.link(into as usize, m as usize);
                new.0 += link.alpha_ms;
                new.1 += link.beta_ms_per_mb;
            }
            let here = alpha + beta * per_peer;
            if here > limit {
                return None;
            }
            worst = worst.max(here);
            sum += eighth(here * scale + offset);
        }
        if IN {
            let here = new.0 + new.1 * per_peer;
            worst = worst.max(here);
            sum += eighth(here * scale + offset);
        }
        let work_ms = compute + problem.workload.p2p_frequency * worst;
        (work_ms <= limit_ms).then_some((work_ms, sum))
    }

    /// What the grouping is worth after a change, or as it is; `None` where the change would empty a group or
    /// changes nothing, or a changed group would take longer than `limit_ms`, before gamma.
    pub fn worth(&mut self, change: Option<Move>, limit_ms: f64) -> Option<Worth> {
        let problem = self.problem;
        let experts = problem.n_experts;
        let (mut worst, mut sum_ms, mut short, mut workers) = (0.0f64, self.sum_ms, self.short, self.workers);
        let mut sum_eighth = self.sum_eighth;
        let unit_ms = self.unit_ms;
        let mut changed = (IDLE, IDLE);
        if let Some(Move { i, to, j }) = change {
            let from = self.group_of[i as usize];
            if from == to || j.is_some_and(|j| self.group_of[j as usize] != to) {
                return None;
            }
            let memory = |i: u32| problem.memory[i as usize];
            if to != IDLE {
                let group = &self.groups[to as usize];
                let size = group.members.len() as u64;
                self.ops += 1 + size / 4;
                let then = group.memory + memory(i) - j.map_or(0, memory);
                let (work_ms, eighth) = self.work(to, j, Some(i), limit_ms)?;
                self.ops += size - size / 4;
                worst = worst.max(work_ms);
                sum_ms += work_ms - group.work_ms;
                sum_eighth += eighth - group.eighth;
                short = short - experts.saturating_sub(group.memory) + experts.saturating_sub(then);
            } else if j.is_none() {
                workers -= 1;
            }
            if from != IDLE {
                let group = &self.groups[from as usize];
                if group.members.len() == 1 && j.is_none() {
                    return None;
                }
                let size = group.members.len() as u64;
                self.ops += 1 + size / 4;
                let then = group.memory - memory(i) + j.map_or(0, memory);
                let (work_ms, eighth) = self.work(from, Some(i), j, limit_ms)?;
                self.ops += size - size / 4;
                worst = worst.max(work_ms);
                sum_ms += work_ms - group.work_ms;
                sum_eighth += eighth - group.eighth;
                short = short - experts.saturating_sub(group.memory) + experts.saturating_sub(then);
            } else if j.is_none() {
                workers += 1;
            }
            changed = (from, to);
        }
        let unchanged = self.most.iter().find(|(g, _)| *g != changed.0 && *g != changed.1);
        worst = worst.max(unchanged.map_or(0.0, |(_, work_ms)| *work_ms));
        self.ops += 8;
        let slowest = match change {
            _ if self.groups.len() < 2 => None,
            None => problem.slowest(|x| self.group_of[x as usize]),
            Some(Move { i, to, j }) => {
                let from = self.group_of[i as usize];
                problem.slowest(|x| match x {
                    x if x == i => to,
                    x if Some(x) == j => from,
                    x => self.group_of[x as usize],
                })
            }
        };
        // Edges inside groups are cheap to pass by, but may be many.
        self.ops += slowest.unwrap_or(0) as u64 / 2;
        let all_reduce = slowest.map_or(0.0, |place| problem.all_reduce(self.groups.len(), problem.edges[place].link));
        let gamma = self.gamma[workers];
        let norm_ms = gamma * unit_ms * (sum_eighth.max(0.0) / workers as f64).sqrt().sqrt().sqrt();
        Some(Worth {
            objective_ms: gamma * worst + all_reduce,
            // Beyond what an 8th power holds, the maximum is all that counts.
            norm_ms: if norm_ms.is_finite() { norm_ms } else { gamma * worst },
            mean_ms: gamma * sum_ms / self.groups.len() as f64,
            short: short as f64 / problem.n_experts as f64,
        })
    }

    /// The place in the problem's edges of the slowest link between groups.
    pub fn slowest(&self) -> Option<usize> {
        self.problem.slowest(|x| self.group_of[x as usize])
    }

    /// The devices that `i` is joined with by the slowest `edges` edges of the tree, itself first: they must move together, if no slower
    /// link than the next edge is to come between groups.
    pub fn joined(&mut self, i: u32, edges: usize, joined: &mut Vec<u32>) {
        joined.clear();
        joined.push(i);
        let mut next = 0;
        while let Some(&i) = joined.get(next) {
            next += 1;
            for &(j, place) in &self.neighbours[i as usize] {
                // A tree: only where one came from is seen again.
                if (place as usize) < edges && !joined.contains(&j) {
                    joined.push(j);
                }
            }
        }
        self.ops += joined.len() as u64;
    }

    /// Makes a change, for which [`State::worth`] had an answer.
    pub fn apply(&mut self, Move { i, to, j }: Move) {
        let from = self.group_of[i as usize];
        self.take(i);
        if let Some(j) = j {
            self.take(j);
        }
        self.put(i, to);
        if let Some(j) = j {
            self.put(j, from);
        }
        for g in [from, to] {
            if g != IDLE {
                // Not by differences: one very large rate would swallow the others for good.
                let group = &mut self.groups[g as usize];
                group.flops = group.members.iter().map(|&m| self.problem.flops[m as usize]).sum();
                let (work_ms, eighth) = self.whole(g);
                (self.groups[g as usize].work_ms, self.groups[g as usize].eighth) = (work_ms, eighth);
            }
        }
        self.sum_up();
    }

    fn take(&mut self, i: u32) {
        let g = self.group_of[i as usize];
        self.group_of[i as usize] = IDLE;
        if g == IDLE {
            return;
        }
        self.workers -= 1;
        let place = self.place[i as usize] as usize;
        let group = &mut self.groups[g as usize];
        group.members.swap_remove(place);
        if let Some(&moved) = group.members.get(place) {
            self.place[moved as usize] = place as u32;
        }
        group.memory -= self.problem.memory[i as usize];
        for &m in &group.members {
            let link = self.problem.links.link_to(i as usize, m as usize);
            self.sums[m as usize].0 -= link.alpha_ms;
            self.sums[m as usize].1 -= link.beta_ms_per_mb;
        }
        self.ops += group.members.len() as u64;
    }

    fn put(&mut self, i: u32, g: u32) {
        self.group_of[i as usize] = g;
        if g == IDLE {
            return;
        }
        self.workers += 1;
        let group = &mut self.groups[g as usize];
        let mut new = (0.0, 0.0);
        for &m in &group.members {
            let link = self.problem.links.link_to(i as usize, m as usize);
            self.sums[m as usize].0 += link.alpha_ms;
            self.sums[m as usize].1 += link.beta_ms_per_mb;
            let link = self.problem.links.link(i as usize, m as usize);
            new.0 += link.alpha_ms;
            new.1 += link.beta_ms_per_mb;
        }
        self.ops += group.members.len() as u64;
        self.sums[i as usize] = new;
        self.place[i as usize] = group.members.len() as u32;
        group.members.push(i);
        group.memory += self.problem.memory[i as usize];
    }
}

fn eighth(x: f64) -> f64 {
    let square = x * x;
    let fourth = square * square;
    fourth * fourth
}
