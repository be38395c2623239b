//! The events of a step.

mod bulk;
mod event;
mod reduce;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use event::{Event, Kind, What};

use super::plan::{PePlan, Tiling};
use super::{PeTime, Schedule, Step, StepTimes};
use crate::network::{Network, Nics};
use crate::timeline::Span;

/// A piece of a PE's work.
#[derive(Clone, Copy)]
enum Work {
    Tile(u32),
    /// Work that nobody waits for: the shared expert, gradients of weights.
    Filler(f64),
    Router(f64),
}

/// A PE in a pass.
#[derive(Default)]
struct Pe {
    group: u32,
    index: u32,
    /// Passes so far, this one included.
    pass: u32,
    start_s: f64,
    /// Whether tiles are cut.
    placed: bool,
    working: Option<(Work, f64)>,
    missing: Vec<u32>,
    undone: Vec<u32>,
    ready: VecDeque<u32>,
    /// Times of work that nobody waits for, s.
    fillers: Vec<f64>,
    /// Time of the router's gradients, which need those of all choices' weights, s.
    router_last_s: Option<f64>,
    tiles_left: Vec<u32>,
    all_tiles_left: u32,
    /// Chunks that this PE has not had results of, its own included.
    results_left: u32,
    /// Chunks that came before they could be gathered.
    early: Vec<(u32, u32)>,
    headers: u32,
    headers_s: f64,
    /// How many times as long as usual its work takes in this step.
    slowness: f64,
    end_s: f64,
    /// When it had done its experts' work, in the bulk schedule.
    worked_until_s: f64,
    time: PeTime,
}

/// The phase of a group in the bulk schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Counts,
    Rows(u32),
    Experts,
    Results,
}

struct GroupState {
    phase: Phase,
    pending: u32,
    /// Waiting for all PEs of the group at once.
    barrier_s: f64,
    counts_s: f64,
}

struct Engine<'a> {
    step: &'a Step<'a>,
    network: Network<'a>,
    pes: Vec<Pe>,
    groups: Vec<GroupState>,
    queue: BinaryHeap<Reverse<Event>>,
    number: u64,
    events: u64,
    sent_bytes: f64,
    now_s: f64,
    running: usize,
    spans: Vec<Span>,
}

/// Simulates the steps, each of which begins when all PEs have ended the last one.
pub fn simulate(step: &Step) -> StepTimes {
    let mut engine = Engine::new(step);
    let mut times = StepTimes {
        step_s: Vec::new(),
        pes: Vec::new(),
        straggler_s: Vec::new(),
        spans: Vec::new(),
        sent_bytes: 0.0,
        events: 0,
    };
    let mut rng = step.jitter.map(|jitter| (ChaCha8Rng::seed_from_u64(jitter.seed), jitter.sigma));
    let apart = engine.apart();
    for _ in 0..step.steps {
        let start_s = engine.now_s;
        engine.draw_slowness(&mut rng);
        // Groups that share nothing are simulated one after the other: few events are in the queue at a time.
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
    (times.spans, times.sent_bytes, times.events) = (engine.spans, engine.sent_bytes, engine.events);
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
            }
            // A dissemination barrier: as many messages one after the other as the number of PEs has bits.
            let members = &group.members;
            let alpha_s =
                members.iter().map(|&pe| if pe == members[0] { 0.0 } else { network.alpha_s(members[0], pe) });
            let rounds = members.len().next_power_of_two().trailing_zeros();
            let barrier_s = f64::from(rounds) * alpha_s.fold(0.0, f64::max);
            groups.push(GroupState { phase: Phase::Counts, pending: 0, barrier_s, counts_s: 0.0 });
        }
        Engine {
            step,
            network,
            pes,
            groups,
            queue: BinaryHeap::new(),
            number: 0,
            events: 0,
            sent_bytes: 0.0,
            now_s: 0.0,
            running: 0,
            spans: Vec::new(),
        }
    }

    fn plan(&self, pe: usize) -> &'a PePlan {
        let (group, index) = (self.pes[pe].group as usize, self.pes[pe].index as usize);
        &self.step.plans[self.step.groups[group].plan].pes[index]
    }

    fn member(&self, pe: usize, index: u32) -> usize {
        self.step.groups[self.pes[pe].group as usize].members[index as usize]
    }

    fn is_backward(&self, pe: usize) -> bool {
        self.step.backward && self.pes[pe].pass.is_multiple_of(2)
    }

    fn tiling(&self, pe: usize) -> &'a Tiling {
        self.plan(pe).tiling(self.is_backward(pe))
    }

    fn at(&mut self, time_s: f64, who: usize, pass: u32, what: What) {
        self.number += 1;
        self.queue.push(Reverse(Event { time_s, number: self.number, who: who as u32, pass, what }));
    }

    /// Time of so many FLOP on a PE.
    fn compute_s(&self, pe: usize, flop: f64) -> f64 {
        let per_s = self.step.cluster.devices[pe].flop_per_ms * 1e3 * self.step.speed.1;
        flop / per_s * self.pes[pe].slowness
    }

    /// The groups, those together that share a port.
    fn apart(&self) -> Vec<Vec<usize>> {
        let groups = 0..self.step.groups.len();
        let (devices, cluster) = (&self.pes, self.step.cluster);
        let group = |device: &u32| devices[*device as usize].group;
        let is_shared = |devices: &Vec<u32>| devices.iter().any(|device| group(device) != group(&devices[0]));
        match self.step.nics == Nics::PerHost && cluster.hosts().iter().any(is_shared) {
            true => vec![groups.collect()],
            false => groups.map(|group| vec![group]).collect(),
        }
    }

    fn draw_slowness(&mut self, rng: &mut Option<(ChaCha8Rng, f64)>) {
        let Some((rng, sigma)) = rng else { return };
        for pe in &mut self.pes {
            // Box and Muller (1958).
            let (a, b): (f64, f64) = (1.0 - rng.random::<f64>(), rng.random());
            pe.slowness = (*sigma * (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()).exp();
        }
    }

    /// A step of these groups, up to their PEs' ends of it.
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
        let factor = if backward { 2.0 } else { 1.0 };
        let shared_s = self.compute_s(p, factor * cost.shared_flop * tokens);
        let router_s = self.compute_s(p, factor * cost.router_flop * tokens);
        let me = self.pes[p].index as usize;
        let sent: u32 = self.step.plans[self.step.groups[self.pes[p].group as usize].plan]
            .pes
            .iter()
            .map(|to| to.first_chunk[me + 1] - to.first_chunk[me])
            .sum();
        let pe = &mut self.pes[p];
        pe.start_s = now_s;
        pe.placed = false;
        pe.missing.clear();
        pe.missing.extend(tiling.tiles.iter().map(|tile| tile.rows));
        pe.undone.clear();
        pe.undone.extend(plan.chunks.iter().map(|chunk| chunk.slots));
        pe.ready.clear();
        pe.tiles_left.clone_from(&tiling.tiles_of_expert);
        pe.all_tiles_left = tiling.tiles.len() as u32;
        pe.results_left = sent;
        pe.fillers.clear();
        pe.fillers.extend((shared_s > 0.0).then_some(shared_s));
        pe.router_last_s = backward.then_some(router_s);
        if backward {
            self.routed(p);
        } else {
            self.pes[p].working = Some((Work::Router(router_s), now_s));
            let pass = self.pes[p].pass;
            self.at(now_s + router_s, p, pass, What::Routed);
        }
    }

    fn handle(&mut self, event: Event) {
        let who = event.who as usize;
        match event.what {
            What::Routed => {
                self.worked(who);
                self.routed(who);
            }
            What::Headers => {
                if self.step.schedule == Schedule::Pipelined {
                    self.place(who);
                }
            }
            What::Leave { to, chunk } => self.leave(who, to as usize, chunk),
            What::Head { at, chunk, kind } => self.head(who, at as usize, chunk, kind, event.pass),
            What::Arrived { at, chunk, kind: Kind::Rows } => self.rows_arrived(at as usize, chunk, event.pass),
            What::Arrived { kind: Kind::Results, .. } => self.result_arrived(who),
            What::Computed => self.computed(who),
            What::Phase => self.next_phase(who),
        }
    }

    /// A PE knows where its rows go.
    fn routed(&mut self, p: usize) {
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
            return self.one_less(group);
        }
        if backward {
            self.send_first(p);
            return self.place(p);
        }
        // Headers are small, and wait for no port.
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
        self.send_first(p);
        self.gather_own(p);
        self.compute(p);
    }

    /// Sends the chunks that have a place in their receivers' windows, the next PE's first.
    fn send_first(&mut self, p: usize) {
        self.send_chunks(p, 0);
    }

    /// Sends the chunks of one filling of the windows; says how many.
    fn send_chunks(&mut self, p: usize, round: u32) -> u32 {
        let n = self.step.groups[self.pes[p].group as usize].members.len() as u32;
        let me = self.pes[p].index;
        let window = self.step.window_chunks as u32;
        let mut sent = 0;
        for k in 1..n {
            let to = self.member(p, (me + k) % n);
            let chunks = self.plan(to).from(me as usize);
            let first = chunks.start.saturating_add(round * window).min(chunks.end);
            for chunk in first..chunks.end.min(first + window) {
                self.leave(p, to, chunk);
                sent += 1;
            }
        }
        sent
    }

    fn leave(&mut self, p: usize, to: usize, chunk: u32) {
        let pass = self.pes[p].pass;
        self.message(p, to, to, chunk, Kind::Rows, pass);
    }

    /// Puts a message on its way: of the rows that `at` receives as chunk `chunk`.
    fn message(&mut self, from: usize, to: usize, at: usize, chunk: u32, kind: Kind, pass: u32) {
        let bytes = self.bytes(at, chunk, kind, pass);
        self.sent_bytes += bytes;
        let head_s = self.network.send(from, to, bytes, self.now_s);
        self.at(head_s, from, pass, What::Head { at: at as u32, chunk, kind });
    }

    fn bytes(&self, at: usize, chunk: u32, kind: Kind, pass: u32) -> f64 {
        let (cost, chunk) = (self.step.cost, self.plan(at).chunks[chunk as usize]);
        let backward = self.step.backward && pass.is_multiple_of(2);
        let (rows, slots) = (f64::from(chunk.rows), f64::from(chunk.slots));
        let beside = match (kind, backward) {
            (Kind::Rows, false) => rows * cost.out_bytes.0 + slots * cost.out_bytes.1,
            (Kind::Results, true) => slots * cost.back_bytes,
            _ => 0.0,
        };
        rows * cost.row_bytes + beside
    }

    fn head(&mut self, from: usize, at: usize, chunk: u32, kind: Kind, pass: u32) {
        let source = self.member(at, self.plan(at).chunks[chunk as usize].from);
        let to = if kind == Kind::Rows { at } else { source };
        let bytes = self.bytes(at, chunk, kind, pass);
        let end_s = self.network.receive(from, to, bytes, self.now_s);
        if to < self.step.traced {
            let dur_s = self.network.wire_s(from, to, bytes);
            let what = if kind == Kind::Rows { "rows" } else { "results" };
            let track = if self.network.is_local(from, to) { 1 } else { 2 };
            let name = format!("{what} from PE {from}");
            self.spans.push(Span { pe: to as u32, track, name, start_s: end_s - dur_s, dur_s });
        }
        self.at(end_s, to, pass, What::Arrived { at: at as u32, chunk, kind });
    }

    fn rows_arrived(&mut self, p: usize, chunk: u32, pass: u32) {
        if self.step.schedule == Schedule::Bulk {
            self.gather(p, chunk);
            return self.one_less(self.pes[p].group as usize);
        }
        match self.pes[p].pass == pass && self.pes[p].placed {
            true => {
                self.gather(p, chunk);
                self.compute(p);
            }
            false => self.pes[p].early.push((pass, chunk)),
        }
    }

    fn gather_own(&mut self, p: usize) {
        for chunk in self.plan(p).from(self.pes[p].index as usize) {
            self.gather(p, chunk);
        }
    }

    /// Takes a chunk's rows into their tiles, and gives its place back.
    fn gather(&mut self, p: usize, chunk: u32) {
        let (tiling, plan) = (self.tiling(p), self.plan(p));
        let pe = &mut self.pes[p];
        for piece in tiling.of_chunk(chunk) {
            pe.missing[piece.tile as usize] -= piece.slots;
            if pe.missing[piece.tile as usize] == 0 && (pe.placed || tiling.tiles[piece.tile as usize].early) {
                pe.ready.push_back(piece.tile);
            }
        }
        let from = plan.chunks[chunk as usize].from;
        let next = chunk.saturating_add(self.step.window_chunks as u32);
        if self.step.schedule == Schedule::Pipelined && from != pe.index && next < plan.from(from as usize).end {
            let (source, pass) = (self.member(p, from), self.pes[p].pass);
            let credit_s = self.now_s + self.network.alpha_s(p, source);
            self.at(credit_s, source, pass, What::Leave { to: p as u32, chunk: next });
        }
    }

    /// All counts are known: tiles are cut, and what is there already is taken.
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
            pe.ready.extend(whole.map(|(tile, _)| tile as u32));
        }
        let pass = self.pes[p].pass;
        let early = std::mem::take(&mut self.pes[p].early);
        let (now, later): (Vec<_>, Vec<_>) = early.into_iter().partition(|(of_pass, _)| *of_pass == pass);
        self.pes[p].early = later;
        now.into_iter().for_each(|(_, chunk)| self.gather(p, chunk));
        self.compute(p);
    }

    /// Begins the next piece of work, where the PE has none; or ends the pass.
    fn compute(&mut self, p: usize) {
        if self.pes[p].working.is_some() {
            return;
        }
        let slot_flop = self.step.cost.slot_flop;
        let tiling = self.tiling(p);
        let pe = &mut self.pes[p];
        let work = match pe.ready.pop_front() {
            Some(tile) => Some(Work::Tile(tile)),
            None => match pe.fillers.pop() {
                Some(time_s) => Some(Work::Filler(time_s)),
                None if pe.all_tiles_left == 0 && pe.results_left == 0 => pe.router_last_s.take().map(Work::Router),
                None => None,
            },
        };
        let Some(work) = work else { return self.end_if_done(p) };
        let time_s = match work {
            Work::Tile(tile) => self.compute_s(p, f64::from(tiling.tiles[tile as usize].rows) * slot_flop),
            Work::Filler(time_s) | Work::Router(time_s) => time_s,
        };
        self.pes[p].working = Some((work, self.now_s));
        let pass = self.pes[p].pass;
        self.at(self.now_s + time_s, p, pass, What::Computed);
    }

    /// Accounts for the work that a PE has done; gives it.
    fn worked(&mut self, p: usize) -> Option<Work> {
        let backward = usize::from(self.is_backward(p));
        let tiling = self.tiling(p);
        let (work, start_s) = self.pes[p].working.take()?;
        let dur_s = self.now_s - start_s;
        let time = &mut self.pes[p].time;
        match work {
            Work::Router(_) => time.router_s[backward] += dur_s,
            _ => time.expert_s[backward] += dur_s,
        }
        if p < self.step.traced {
            let name = match work {
                Work::Tile(tile) => format!("expert {}", tiling.tiles[tile as usize].expert),
                Work::Filler(_) => "filler".to_string(),
                Work::Router(_) => "router".to_string(),
            };
            self.spans.push(Span { pe: p as u32, track: 0, name, start_s, dur_s });
        }
        Some(work)
    }

    fn computed(&mut self, p: usize) {
        if let Some(Work::Tile(tile)) = self.worked(p) {
            self.tile_done(p, tile);
        }
        self.compute(p);
    }

    fn tile_done(&mut self, p: usize, tile: u32) {
        let (tiling, plan) = (self.tiling(p), self.plan(p));
        let expert = tiling.tiles[tile as usize].expert as usize;
        let pe = &mut self.pes[p];
        pe.all_tiles_left -= 1;
        pe.tiles_left[expert] -= 1;
        if pe.tiles_left[expert] == 0 && self.is_backward(p) {
            let time_s = self.compute_s(p, f64::from(plan.expert_rows[expert]) * self.step.cost.slot_flop);
            self.pes[p].fillers.push(time_s);
        }
        for piece in tiling.of_tile(tile) {
            let pe = &mut self.pes[p];
            pe.undone[piece.chunk as usize] -= piece.slots;
            if pe.undone[piece.chunk as usize] > 0 {
                continue;
            }
            let from = plan.chunks[piece.chunk as usize].from;
            if from == pe.index {
                pe.results_left -= 1;
            } else if self.step.schedule == Schedule::Pipelined {
                self.return_chunk(p, piece.chunk);
            }
        }
    }

    fn return_chunk(&mut self, p: usize, chunk: u32) {
        let source = self.member(p, self.plan(p).chunks[chunk as usize].from);
        let pass = self.pes[p].pass;
        self.message(p, source, p, chunk, Kind::Results, pass);
    }

    fn result_arrived(&mut self, p: usize) {
        self.pes[p].results_left -= 1;
        match self.step.schedule {
            Schedule::Pipelined => self.compute(p),
            Schedule::Bulk => self.one_less(self.pes[p].group as usize),
        }
    }

    fn end_if_done(&mut self, p: usize) {
        let pe = &mut self.pes[p];
        let group = pe.group as usize;
        if self.step.schedule == Schedule::Bulk {
            if self.groups[group].phase == Phase::Experts && pe.all_tiles_left == 0 {
                pe.worked_until_s = self.now_s;
                self.one_less(group);
            }
            return;
        }
        if pe.all_tiles_left == 0 && pe.results_left == 0 && pe.router_last_s.is_none() && pe.placed {
            self.end_pass(p);
        }
    }

    fn end_pass(&mut self, p: usize) {
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
