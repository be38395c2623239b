//! Runs steps, passes and events.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::event::{Event, What};
use super::types::{Copying, HostWork, Relaying, Work};
use super::{Engine, GroupState, Pe, Phase};
use crate::network::{Network, Nics};
use crate::step::{Affine, Schedule, Step, StepTimes};

/// Simulates the steps. Each step starts when all PEs have ended the last one.
pub fn simulate(step: &Step) -> StepTimes {
    let mut engine = Engine::new(step);
    let mut times = StepTimes {
        step_s: Vec::new(),
        pes: Vec::new(),
        straggler_s: Vec::new(),
        spans: Vec::new(),
        sent_bytes: 0.0,
        network_bytes: 0.0,
        events: 0,
    };
    let mut rng = step.jitter.map(|jitter| (ChaCha8Rng::seed_from_u64(jitter.seed), jitter.sigma));
    let apart = engine.apart();
    for _ in 0..step.steps {
        let start_s = engine.now_s;
        engine.draw_slowness(&mut rng);
        // Groups that share no port or core are simulated one after the other, which keeps the event queue short.
        for groups in &apart {
            engine.now_s = start_s;
            engine.run(groups);
        }
        engine.stragglers(&mut times.straggler_s);
        engine.now_s = engine.all_reduce();
        times.step_s.push(engine.now_s - start_s);
    }
    for (p, pe) in engine.pes.iter_mut().enumerate() {
        pe.time.port_s = engine.network.busy_s(p);
    }
    times.straggler_s.sort_by(f64::total_cmp);
    times.pes = engine.pes.iter().map(|pe| pe.time).collect();
    (times.spans, times.events) = (engine.spans, engine.events);
    (times.sent_bytes, times.network_bytes) = (engine.sent_bytes, engine.network_bytes);
    times
}

impl<'a> Engine<'a> {
    fn new(step: &'a Step<'a>) -> Engine<'a> {
        let n = step.cluster.devices.len();
        let network = Network::new(step.cluster, step.nics, step.speed.0);
        let mut pes: Vec<Pe> = (0..n).map(|_| Pe { slowness: 1.0, ..Pe::default() }).collect();
        let mut groups = Vec::with_capacity(step.groups.len());
        for (g, group) in step.groups.iter().enumerate() {
            for (index, &pe) in group.members.iter().enumerate() {
                (pes[pe].group, pes[pe].index) = (g as u32, index as u32);
                let crossings = &step.plans[group.plan].pes[index].crossings;
                pes[pe].relaying = crossings.iter().map(Relaying::new).collect();
            }
            // A dissemination barrier takes ceil(log2(n)) messages one after the other.
            let members = &group.members;
            let alpha_s =
                members.iter().map(|&pe| if pe == members[0] { 0.0 } else { network.alpha_s(members[0], pe) });
            let rounds = members.len().next_power_of_two().trailing_zeros();
            let barrier_s = f64::from(rounds) * alpha_s.fold(0.0, f64::max);
            groups.push(GroupState { phase: Phase::Counts, pending: 0, barrier_s, counts_s: 0.0 });
        }
        let hosts = if step.cores.is_some() { step.cluster.hosts() } else { Vec::new() };
        for (on_host, &pe) in hosts.iter().flat_map(|pes| pes.iter().enumerate()) {
            pes[pe as usize].core = on_host % step.cores.map_or(1, |cores| cores.count);
        }
        Engine {
            step,
            network,
            pes,
            groups,
            hosts: hosts.iter().map(|_| HostWork::default()).collect(),
            queue: BinaryHeap::new(),
            number: 0,
            events: 0,
            sent_bytes: 0.0,
            network_bytes: 0.0,
            now_s: 0.0,
            running: 0,
            spans: Vec::new(),
        }
    }

    /// Sets of groups that are simulated together: all groups if some share a port or cores, otherwise each group alone.
    fn apart(&self) -> Vec<Vec<usize>> {
        let groups = 0..self.step.groups.len();
        let (devices, cluster) = (&self.pes, self.step.cluster);
        let group = |device: &u32| devices[*device as usize].group;
        let is_shared = |devices: &Vec<u32>| devices.iter().any(|device| group(device) != group(&devices[0]));
        match (self.step.nics == Nics::PerHost || self.step.cores.is_some()) && cluster.hosts().iter().any(is_shared) {
            true => vec![groups.collect()],
            false => groups.map(|group| vec![group]).collect(),
        }
    }

    fn draw_slowness(&mut self, rng: &mut Option<(ChaCha8Rng, f64)>) {
        let Some((rng, sigma)) = rng else { return };
        for pe in &mut self.pes {
            // Normal random number by the method of Box and Muller (1958).
            let (a, b): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
            pe.slowness = (*sigma * (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()).exp();
        }
    }

    /// Simulates a step of these groups, until all their PEs have ended.
    fn run(&mut self, groups: &[usize]) {
        for &group in groups {
            self.begin_bulk(group);
            self.running += self.step.groups[group].members.len();
        }
        for &group in groups {
            self.step.groups[group].members.iter().for_each(|&pe| self.begin_pass(pe));
        }
        while let Some(Reverse(event)) = self.queue.pop() {
            self.events += 1;
            self.now_s = event.time_s;
            self.handle(event);
        }
        debug_assert_eq!(self.running, 0, "every PE ends its passes");
    }

    fn begin_pass(&mut self, p: usize) {
        let cost = self.step.cost;
        let now_s = self.now_s;
        self.pes[p].pass += 1;
        let (plan, tiling, backward) = (self.plan(p), self.tiling(p), self.is_backward(p));
        let tokens = f64::from(plan.tokens);
        let shared = cost.shared_flop[usize::from(backward)].of(tokens);
        let router = cost.router_flop[usize::from(backward)].of(tokens);
        let me = self.pes[p].index as usize;
        let sent: u32 = self.step.plans[self.step.groups[self.pes[p].group as usize].plan]
            .pes
            .iter()
            .map(|to| (to.direct_from(me).len() + to.crossings_from(me).len()) as u32)
            .sum();
        let pe = &mut self.pes[p];
        pe.start_s = now_s;
        pe.placed = false;
        pe.missing.clear();
        pe.missing.extend(tiling.tiles.iter().map(|tile| tile.rows));
        pe.undone.clear();
        pe.undone.extend(plan.chunks.iter().map(|chunk| chunk.result_slots));
        pe.ready.clear();
        pe.tiles_left.clone_from(&tiling.tiles_of_expert);
        pe.all_tiles_left = tiling.tiles.len() as u32;
        pe.results_left = sent;
        pe.fillers.clear();
        pe.fillers.extend((shared > 0.0).then_some([shared, 0.0]));
        pe.router_last = backward.then_some(router);
        let experts = plan.expert_rows.len() as f64;
        let idle = |cost: &[Affine; 2]| Some(cost[usize::from(backward)].of(experts)).filter(|flop| *flop > 0.0);
        (pe.start, pe.tail) = (idle(&cost.start_flop), idle(&cost.tail_flop));
        if backward {
            self.routed(p);
        } else {
            self.begin_work(p, Work::Route, router);
        }
    }

    fn handle(&mut self, event: Event) {
        let who = event.who as usize;
        match event.what {
            What::Headers => {
                if self.step.schedule == Schedule::Pipelined {
                    self.place(who);
                }
            }
            What::Leave { to, chunk, kind } => {
                self.copy(who, Copying::Send { to, chunk, kind });
                self.compute(who);
            }
            What::Head { at, chunk, kind } => self.head(at as usize, chunk, kind, event.pass),
            What::Arrived { at, chunk, kind } => {
                self.take_in(who, self.size(at as usize, chunk, kind).0);
                self.arrived(who, at, chunk, kind, event.pass);
            }
            What::Computed { turn } => self.computed(who, turn),
            What::Phase => self.next_phase(who),
        }
    }

    /// A PE has routed its tokens, or starts a backward pass, in which the routes are known.
    pub(super) fn routed(&mut self, p: usize) {
        let group = self.pes[p].group as usize;
        let members = &self.step.groups[group].members;
        let (backward, now_s) = (self.is_backward(p), self.now_s);
        if self.step.schedule == Schedule::Bulk {
            let header_s = members
                .iter()
                .filter(|&&to| to != p && !backward)
                .map(|&to| self.network.alone_s(p, to, self.step.cost.header_bytes));
            let there_s = now_s + header_s.fold(0.0, f64::max);
            let state = &mut self.groups[group];
            state.counts_s = state.counts_s.max(there_s);
            self.gather_own(p);
            self.compute(p);
            return self.one_less(group);
        }
        if backward {
            self.send_chunks(p, 0);
            return self.place(p);
        }
        // Headers are small, so they are assumed not to occupy a port.
        for &to in members {
            let there_s = match to == p {
                true => now_s,
                false => now_s + self.network.alone_s(p, to, self.step.cost.header_bytes),
            };
            let other = &mut self.pes[to];
            other.headers += 1;
            other.headers_s = other.headers_s.max(there_s);
            if other.headers == members.len() as u32 {
                let (pass, there_s) = (other.pass, other.headers_s);
                (other.headers, other.headers_s) = (0, 0.0);
                self.at(there_s, to, pass, What::Headers);
            }
        }
        self.send_chunks(p, 0);
        self.gather_own(p);
        self.compute(p);
    }

    /// All counts have arrived: forms the remaining tiles, and gathers rows that arrived before.
    fn place(&mut self, p: usize) {
        let backward = self.is_backward(p);
        if backward {
            self.pes[p].placed = true;
            self.gather_own(p);
        } else {
            let tiling = self.tiling(p);
            let pe = &mut self.pes[p];
            pe.placed = true;
            let whole = tiling.tiles.iter().zip(&pe.missing).enumerate();
            let whole = whole.filter(|(_, (tile, missing))| **missing == 0 && !tile.early);
            pe.ready.extend(whole.map(|(at, (tile, _))| Reverse((tile.own, at as u32))));
        }
        let pass = self.pes[p].pass;
        let early = std::mem::take(&mut self.pes[p].early);
        let (now, later): (Vec<_>, Vec<_>) = early.into_iter().partition(|(of_pass, _)| *of_pass == pass);
        self.pes[p].early = later;
        now.into_iter().for_each(|(_, chunk)| self.copy(p, Copying::Gather { chunk }));
        self.compute(p);
    }

    pub(super) fn end_if_done(&mut self, p: usize) {
        let pe = &mut self.pes[p];
        let group = pe.group as usize;
        if self.step.schedule == Schedule::Bulk {
            if self.groups[group].phase == Phase::Experts && pe.all_tiles_left == 0 {
                pe.experts_until_s = self.now_s;
                self.one_less(group);
            }
            return;
        }
        let nothing_left = pe.start.is_none() && pe.router_last.is_none() && pe.tail.is_none();
        if pe.all_tiles_left == 0 && pe.results_left == 0 && nothing_left && pe.placed {
            self.end_pass(p);
        }
    }

    pub(super) fn end_pass(&mut self, p: usize) {
        let (backward, now_s) = (self.is_backward(p), self.now_s);
        let pe = &mut self.pes[p];
        pe.time.pass_s[usize::from(backward)] += now_s - pe.start_s;
        pe.end_s = now_s;
        if self.step.backward && !backward {
            self.begin_pass(p);
        } else {
            self.running -= 1;
        }
    }
}
