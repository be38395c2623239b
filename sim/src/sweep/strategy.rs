//! One strategy, simulated op by op, with one clock per device.
//!
//! Replicas and shards work in lockstep, so one simulated device represents all `dp * hp` devices of a stage. The root, which sends inputs
//! and weights to all replicas, has a clock of its own. An operation on several devices first advances their clocks to the latest.

use super::cost::{Cost, ELEMENT_BYTES};
use super::pipeline::{Direction, Slot, timesteps};
use super::{Model, Outcome, Strategy};
use aristos_formats::InputError;

impl Model {
    /// The time on a single device, s.
    pub fn sequential_s(&self, cost: Cost) -> f64 {
        Simulation::new(self, Strategy::SEQUENTIAL, cost, true).run().latency_s
    }

    /// Simulates one strategy.
    ///
    /// # Errors
    /// Returns an error if a degree does not divide the dimension that it splits, or if the model has experts and the cost is
    /// [`Cost::Compat`].
    pub fn simulate(&self, strategy: Strategy, cost: Cost, steady_state: bool) -> Result<Outcome, InputError> {
        self.check(strategy, cost)?;
        Ok(Simulation::new(self, strategy, cost, steady_state).run())
    }
}

/// State of the simulation of one strategy.
pub struct Simulation<'a> {
    model: &'a Model,
    strategy: Strategy,
    cost: Cost,
    steady_state: bool,
    devices: Vec<Device>,
    /// Clock of the root, s.
    root_s: f64,
    /// Sums for the root, and for the receivers of its sends.
    root: Sums,
    sums: Sums,
    /// Whether stage s has received a microbatch from stage s - 1 (forward) or s + 1 (backward).
    arrived: [Vec<bool>; 2],
    /// Whether the forward of the microbatch fetched its input before the previous stage sent the input.
    fetched: Vec<bool>,
    widths: Widths,
}

/// One device of a stage.
#[derive(Clone, Default)]
struct Device {
    clock_s: f64,
    live_bytes: f64,
    peak_bytes: f64,
}

/// Sums over the simulated devices: time, its part in communication, and the number of operations.
#[derive(Clone, Copy, Default)]
struct Sums {
    total_s: f64,
    communication_s: f64,
    ops: u64,
}

/// Numbers of elements and rows.
#[derive(Clone, Copy)]
struct Widths {
    /// Rows of a microbatch: tokens, and tokens times experts per token.
    tokens: f64,
    rows: f64,
    /// Width of a layer, and of a shard of it.
    whole: f64,
    shard: f64,
    /// Experts of a device; 1 without experts.
    experts: f64,
    /// Weights of a layer on a device.
    weights: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Compute,
    Communication,
}

impl<'a> Simulation<'a> {
    pub fn new(model: &'a Model, strategy: Strategy, cost: Cost, steady_state: bool) -> Simulation<'a> {
        let Strategy { dp, hp, pp, ep, microbatches } = strategy;
        let tokens = (model.batch / dp / microbatches) as f64;
        let (whole, shard) = (model.width as f64, (model.width / hp) as f64);
        let experts = model.experts.map_or(1.0, |experts| (experts.count / ep) as f64);
        let top_k = model.experts.map_or(1.0, |experts| experts.top_k as f64);
        Simulation {
            model,
            strategy,
            cost,
            steady_state,
            devices: vec![Device::default(); pp],
            root_s: 0.0,
            root: Sums::default(),
            sums: Sums::default(),
            arrived: [vec![false; pp * microbatches], vec![false; pp * microbatches]],
            fetched: vec![false; pp * microbatches],
            widths: Widths { tokens, rows: tokens * top_k, whole, shard, experts, weights: experts * whole * shard },
        }
    }

    pub fn run(mut self) -> Outcome {
        self.keep_resident();
        if !self.steady_state {
            self.distribute();
        }
        let at_once = self.cost == Cost::Compat;
        for step in timesteps(self.strategy.pp, self.strategy.microbatches, at_once) {
            for &slot in &step {
                match slot.way {
                    Direction::Forward => self.forward(slot),
                    Direction::Backward => self.backward(slot),
                }
            }
            for &slot in &step {
                self.hand_on(slot);
            }
        }
        self.reduce();
        self.outcome()
    }

    /// Runs an operation of a stage, which takes `time_s`, allocates `takes` elements and then frees `gives_back`.
    fn op(&mut self, stage: usize, kind: Kind, time_s: f64, takes: f64, gives_back: f64) {
        self.devices[stage].clock_s += time_s;
        self.count(kind, time_s);
        self.memory(stage, takes, gives_back);
    }

    fn count(&mut self, kind: Kind, time_s: f64) {
        self.sums.total_s += time_s;
        self.sums.ops += 1;
        if kind == Kind::Communication {
            self.sums.communication_s += time_s;
        }
    }

    fn memory(&mut self, stage: usize, takes: f64, gives_back: f64) {
        let device = &mut self.devices[stage];
        device.live_bytes += ELEMENT_BYTES * takes;
        device.peak_bytes = device.peak_bytes.max(device.live_bytes);
        device.live_bytes -= ELEMENT_BYTES * gives_back;
    }

    /// Sends elements from one stage to another, which occupies both. The sender then frees `gives_back`.
    fn send(&mut self, from: usize, to: usize, elements: f64, gives_back: f64) {
        let time_s = self.cost.send_s(elements);
        let clock_s = self.devices[from].clock_s.max(self.devices[to].clock_s) + time_s;
        for stage in [from, to] {
            self.devices[stage].clock_s = clock_s;
            self.count(Kind::Communication, time_s);
        }
        self.memory(to, elements, 0.0);
        self.memory(from, 0.0, gives_back);
    }

    /// Allocates the weights and their gradients. The published program omits them.
    fn keep_resident(&mut self) {
        if self.cost == Cost::Compat {
            return;
        }
        let layers = self.layers_per_stage() as f64;
        for stage in 0..self.strategy.pp {
            self.memory(stage, 2.0 * layers * self.widths.weights, 0.0);
        }
    }

    /// Sends inputs, labels and weights from the root to the first stage of every replica, and then to the shards of that stage.
    fn distribute(&mut self) {
        let Strategy { dp, hp, pp, .. } = self.strategy;
        let batch = (self.model.batch / dp) as f64 * self.widths.whole;
        let all_weights = self.widths.whole * self.widths.whole * self.widths.experts;
        let counted = self.cost == Cost::Compat;
        let kept = |elements: f64| if counted { elements } else { 0.0 };
        let inputs = [batch, batch];
        let weights = std::iter::repeat_n(all_weights, self.model.layers);
        for (elements, is_weight) in inputs.into_iter().map(|x| (x, false)).chain(weights.clone().map(|w| (w, true))) {
            let time_s = match (dp, is_weight) {
                (1, _) => self.cost.send_s(elements),
                (_, true) => self.cost.distribute_s(elements),
                (_, false) => self.cost.distribute_s(elements * dp as f64),
            };
            let clock_s = self.devices[0].clock_s.max(self.root_s) + time_s;
            (self.devices[0].clock_s, self.root_s) = (clock_s, clock_s);
            let receivers = if dp == 1 { 1 } else { dp as u64 };
            let kind_s = (1 + receivers) as f64 * time_s;
            self.root.total_s += kind_s;
            self.root.communication_s += kind_s;
            self.root.ops += 1 + receivers;
            self.memory(0, kept(elements), 0.0);
        }
        if hp > 1 {
            for (elements, is_weight) in
                inputs.into_iter().map(|x| (x, false)).chain(weights.clone().map(|w| (w, true)))
            {
                let part = if is_weight { elements / hp as f64 } else { elements };
                self.op(0, Kind::Communication, self.cost.distribute_s(elements), kept(part), kept(elements));
            }
        }
        if pp > 1 {
            for elements in inputs {
                self.op(0, Kind::Compute, self.cost.split_s(), kept(elements), kept(elements));
            }
        }
        if !counted {
            // The first stage stores the inputs and labels of all microbatches. Weights are allocated already (`keep_resident`).
            self.memory(0, 2.0 * batch, 0.0);
        }
    }

    fn layers_per_stage(&self) -> usize {
        self.model.layers / self.strategy.pp
    }

    /// The layers of a stage.
    fn layers(&self, stage: usize) -> std::ops::Range<usize> {
        let n = self.layers_per_stage();
        stage * n..(stage + 1) * n
    }

    fn slot_at(&self, stage: usize, microbatch: usize) -> usize {
        stage * self.strategy.microbatches + microbatch
    }

    /// Elements of a layer's input and of its output on a device. Even layers are split by columns, odd ones by rows. With experts, a pair
    /// of layers is an expert: inside a pair there is a row for each token and expert, and between pairs one row per token.
    fn in_out(&self, layer: usize) -> (f64, f64) {
        let Widths { tokens, rows, whole, shard, .. } = self.widths;
        if is_even(layer) { (tokens * whole, rows * shard) } else { (rows * shard, tokens * whole) }
    }

    /// The dimensions of a layer's product: rows, inputs and outputs.
    fn product(&self, layer: usize) -> (f64, f64, f64) {
        let Widths { rows, whole, shard, .. } = self.widths;
        if is_even(layer) { (rows, whole, shard) } else { (rows, shard, whole) }
    }

    fn forward(&mut self, slot: Slot) {
        let Slot { stage, microbatch, .. } = slot;
        let (first_batch, at) = (microbatch == 0, self.slot_at(stage, microbatch));
        let hp = self.strategy.hp as f64;
        for layer in self.layers(stage) {
            let (input, output) = self.in_out(layer);
            let is_first = layer == self.layers(stage).start;
            let mut last_use = 0.0;
            if is_first && stage > 0 && !self.arrived[0][at] {
                // The sender keeps its copy, which `hand_on` sends again.
                self.send(stage - 1, stage, input, 0.0);
                self.fetched[at] = true;
                last_use = input;
            }
            if first_batch && stage > 0 && !self.steady_state {
                self.fetch_weights(stage);
            }
            if is_even(layer) {
                self.route(stage, Direction::Forward);
                self.all_to_all(stage, 0.0, self.widths.rows * self.widths.whole, 0.0);
            }
            let (rows, inputs, outputs) = self.product(layer);
            let time_s = self.cost.matmul_s(rows, inputs, outputs, self.widths.experts);
            let of_rows = rows * outputs;
            self.op(stage, Kind::Compute, time_s, of_rows, last_use);
            if !is_even(layer) {
                if hp > 1.0 {
                    let time_s = self.cost.all_reduce_s(of_rows, hp);
                    self.op(stage, Kind::Communication, time_s, of_rows, of_rows);
                }
                self.all_to_all(stage, 0.0, output, of_rows);
            }
            self.op(stage, Kind::Compute, self.cost.elementwise_s(output, 1.0), output, 0.0);
        }
        if stage + 1 == self.strategy.pp {
            self.loss(stage, microbatch);
        }
    }

    /// Sends the weights of a stage's next layer from the first stage's device.
    fn fetch_weights(&mut self, stage: usize) {
        let weights = self.widths.weights;
        let counted = if self.cost == Cost::Compat { weights } else { 0.0 };
        self.send(0, stage, weights, counted);
        if counted == 0.0 {
            self.memory(stage, 0.0, weights);
        }
    }

    fn loss(&mut self, stage: usize, microbatch: usize) {
        let elements = self.widths.tokens * self.widths.whole;
        let counted = self.cost == Cost::Compat;
        if !self.steady_state && stage > 0 {
            self.send(0, stage, elements, if counted { elements } else { 0.0 });
        }
        let labels = if !self.steady_state && (counted || stage > 0) { elements } else { 0.0 };
        let (loss, outputs) = if counted { (elements, elements) } else { (0.0, elements) };
        self.op(stage, Kind::Compute, self.cost.elementwise_s(elements, 2.0), loss, 0.0);
        if counted {
            self.aggregate(stage, microbatch, elements, true);
        }
        self.op(stage, Kind::Compute, self.cost.elementwise_s(elements, 2.0), elements, outputs + labels);
    }

    /// Concatenates or sums the outputs of all microbatches, one microbatch at a time.
    fn aggregate(&mut self, stage: usize, microbatch: usize, elements: f64, concatenate: bool) {
        let before = if concatenate { microbatch as f64 * elements } else { elements };
        match (self.strategy.microbatches, microbatch) {
            (1, _) => {}
            (_, 0) => self.op(stage, Kind::Compute, 0.0, elements, elements),
            _ if concatenate => self.op(stage, Kind::Compute, 0.0, before + elements, before + elements),
            _ => self.op(stage, Kind::Compute, self.cost.elementwise_s(elements, 2.0), elements, 2.0 * elements),
        }
    }

    fn backward(&mut self, slot: Slot) {
        let Slot { stage, microbatch, .. } = slot;
        let at = self.slot_at(stage, microbatch);
        let (hp, layers) = (self.strategy.hp as f64, self.layers(stage));
        let compat = self.cost == Cost::Compat;
        let weights = self.widths.weights;
        let last_microbatch = microbatch + 1 == self.strategy.microbatches;
        debug_assert!(stage + 1 == self.strategy.pp || self.arrived[1][at], "a gradient is there when it is needed");
        for layer in layers.clone().rev() {
            let (input, output) = self.in_out(layer);
            self.op(stage, Kind::Compute, self.cost.elementwise_s(output, 2.0), output, 2.0 * output);
            let (rows, inputs, outputs) = self.product(layer);
            if !is_even(layer) {
                self.all_to_all(stage, 0.0, rows * outputs, output);
            }
            // The input of layer 0 is not freed here in steady state or with the default cost (which frees it below).
            let batch = if layer == 0 && (self.steady_state || !compat) { input } else { 0.0 };
            let moe = self.model.experts.is_some();
            let mut frees = rows * outputs + if moe { rows * inputs } else { input - batch };
            if compat && !self.steady_state && last_microbatch {
                frees += weights;
            }
            let time_s = self.cost.matmul_grad_s(rows, inputs, outputs, self.widths.experts);
            let gradient = if compat || microbatch > 0 { weights } else { 0.0 };
            self.op(stage, Kind::Compute, time_s, rows * inputs + gradient, frees);
            if is_even(layer) {
                if hp > 1.0 {
                    let of_rows = rows * inputs;
                    self.op(stage, Kind::Communication, self.cost.all_reduce_s(of_rows, hp), of_rows, of_rows);
                }
                self.all_to_all(stage, input - batch, input, rows * inputs);
                self.route(stage, Direction::Backward);
            }
            if compat {
                if layer == 0 {
                    self.aggregate(stage, microbatch, input, true);
                }
                self.aggregate(stage, microbatch, weights, false);
            } else {
                if layer == 0 {
                    self.memory(stage, 0.0, input);
                }
                if microbatch > 0 {
                    self.op(stage, Kind::Compute, self.cost.elementwise_s(weights, 2.0), 0.0, weights);
                }
            }
        }
    }

    /// The router's product, or its gradients.
    fn route(&mut self, stage: usize, way: Direction) {
        let Some(experts) = self.model.experts else { return };
        let (tokens, whole, count) = (self.widths.tokens, self.widths.whole, experts.count as f64);
        let time_s = match way {
            Direction::Forward => self.cost.matmul_s(tokens, whole, count, 1.0),
            Direction::Backward => self.cost.matmul_grad_s(tokens, whole, count, 1.0),
        };
        self.op(stage, Kind::Compute, time_s, 0.0, 0.0);
    }

    /// Exchanges rows between the devices of an expert-parallel group, to experts or back. Allocates `takes` elements, then frees
    /// `gives_back` and `kept`.
    fn all_to_all(&mut self, stage: usize, kept: f64, takes: f64, gives_back: f64) {
        if self.model.experts.is_none() {
            return;
        }
        let rows = self.widths.rows * self.widths.whole;
        match self.strategy.ep {
            1 => self.memory(stage, takes, gives_back + kept),
            ep => {
                let time_s = self.cost.all_to_all_s(rows, ep as f64);
                self.op(stage, Kind::Communication, time_s, takes, gives_back + kept);
            }
        }
    }

    /// Sends a stage's result of a microbatch to the next stage.
    fn hand_on(&mut self, slot: Slot) {
        let Slot { stage, way, microbatch } = slot;
        let layers = self.layers(stage);
        let (next, elements) = match way {
            Direction::Forward if stage + 1 < self.strategy.pp => (stage + 1, self.in_out(layers.end - 1).1),
            Direction::Backward if stage > 0 => (stage - 1, self.in_out(layers.start).0),
            _ => return,
        };
        self.send(stage, next, elements, elements);
        let at = self.slot_at(next, microbatch);
        self.arrived[way as usize][at] = true;
    }

    /// All-reduces gradients between replicas, and runs the optimizer.
    fn reduce(&mut self) {
        let Strategy { dp, hp, ep, .. } = self.strategy;
        let compat = self.cost == Cost::Compat;
        let (weights, batch) = (self.widths.weights, self.widths.tokens * self.widths.whole);
        // As published: if replicas have shards, gradients are reduced over the shards rather than over the replicas.
        let devices = if compat && hp > 1 { hp } else { dp / ep };
        for stage in 0..self.strategy.pp {
            for layer in self.layers(stage).rev() {
                if compat && dp > 1 {
                    let outputs = self.strategy.microbatches as f64 * batch;
                    let gathered = outputs * if hp > 1 { hp } else { dp } as f64;
                    if layer + 1 == self.model.layers {
                        self.op(stage, Kind::Communication, 0.0, gathered, outputs);
                    }
                    if layer == 0 {
                        self.op(stage, Kind::Communication, 0.0, gathered, outputs);
                    }
                }
                if dp > 1 && devices > 1 {
                    let time_s = self.cost.all_reduce_s(weights, devices as f64);
                    let memory = if compat { weights } else { 0.0 };
                    self.op(stage, Kind::Communication, time_s, memory, memory);
                }
                if !compat {
                    self.op(stage, Kind::Compute, self.cost.optimizer_s(weights), 0.0, 0.0);
                }
            }
        }
    }

    fn outcome(self) -> Outcome {
        let Strategy { dp, hp, .. } = self.strategy;
        let alike = (dp * hp) as f64;
        let latency_s = self.devices.iter().map(|device| device.clock_s).fold(self.root_s, f64::max);
        let total_s = alike * self.sums.total_s + self.root.total_s;
        let communication_s = alike * self.sums.communication_s + self.root.communication_s;
        Outcome {
            latency_s,
            throughput: self.model.batch as f64 / latency_s,
            peak_memory_bytes: self.devices.iter().map(|device| device.peak_bytes).fold(0.0, f64::max),
            communication_fraction: if total_s > 0.0 { communication_s / total_s } else { 0.0 },
            ops: (dp * hp) as u64 * self.sums.ops + self.root.ops,
        }
    }
}

/// Even layers are split by columns, odd ones by rows.
fn is_even(layer: usize) -> bool {
    layer.is_multiple_of(2)
}
