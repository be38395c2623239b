//! Runs a simulation: the costs, the plans, the steps, and the steps with one thing changed.

use std::thread;

use anyhow::{Context, Result, ensure};

use super::calibration::RATE;
use super::machine::Machine;
use super::plans::{Choices, Plans, balanced, plans};
use super::report::SimulatedReport;
use super::{Dense, GRADIENT_BYTES, RowsPer, Simulated, Tokens};
use crate::cluster::Cluster;
use crate::moe::{Layout, Mode};
use crate::sim::step::{Affine, Jitter, LayerCost, Schedule, Step, StepTimes, simulate};

/// Bytes in dispatch of a row's number of slots and of a slot (expert, weight), and in combine of the gradient of a slot's weight.
const OUT_BYTES: (f64, f64) = (4.0, 8.0);
const BACK_BYTES: f64 = 4.0;
/// Maximum pairs of PEs over all passes. More would take too long.
const MAX_PAIRS: usize = 1 << 25;
/// Maximum PEs of a group: memory is quadratic in it.
const MAX_GROUP: usize = 2048;
/// Maximum choices of experts in a step.
const MAX_CHOICES: usize = 1 << 26;
/// Maximum steps. More take longer than seconds, however small the layer.
const MAX_STEPS: usize = 1 << 17;
/// Maximum chunks over all passes. More would take too long.
const MAX_CHUNKS: usize = 1 << 26;

/// The changes under `would_help`: name, factors of the network ports and of FLOP, and whether experts are placed by their loads.
const CHANGES: [(&str, (f64, f64), bool); 3] = [
    ("2x NIC", (2.0, 1.0), false),
    ("2x FLOP/s", (1.0, 2.0), false),
    ("experts placed by their loads", (1.0, 1.0), true),
];

impl Simulated {
    /// The symmetric memory of the layer in the group that needs the most.
    pub(super) fn layout(&self) -> Result<Layout> {
        let of = |g: usize| {
            let placement = self.groups.placement(g);
            Layout::new(
                &self.config,
                placement,
                None,
                self.options.wire(self.dtype).bytes(),
                self.most_tokens(),
                &self.options,
            )
        };
        let all = (0..self.groups.len()).map(of).collect::<Result<Vec<_>, _>>()?;
        all.into_iter().max_by_key(Layout::total_bytes).context("there is no group")
    }

    fn cost(&self, layout: &Layout) -> LayerCost {
        let (config, hidden) = (&self.config, self.config.hidden as f64);
        let replicated = config.replicated_weights().into_iter().filter(|id| id.has_gradient());
        let replicated: usize = replicated.map(|id| config.shape(id).iter().product::<usize>()).sum();
        let replicated = replicated as f64 + self.dense.as_ref().map_or(0.0, Dense::parameters_per_layer);
        let tokens_flop = |flop: f64| [flop, 2.0 * flop].map(Affine::each);
        let slot_flop = Affine::each(config.expert.forward_flop_per_row(config.hidden));
        let rated = LayerCost {
            row_bytes: layout.row_bytes as f64,
            out_bytes: OUT_BYTES,
            back_bytes: BACK_BYTES,
            header_bytes: 4.0 * layout.header_words as f64,
            tile_flop: [slot_flop; 2],
            gradient_flop: [slot_flop, Affine::default()],
            router_flop: tokens_flop(2.0 * hidden * config.choices() as f64),
            shared_flop: tokens_flop(
                config.shared.map_or(0.0, |shared| shared.mlp.forward_flop_per_row(config.hidden)),
            ),
            gradient_bytes: (GRADIENT_BYTES * config.expert_elements() as f64, GRADIENT_BYTES * replicated),
            ..LayerCost::default()
        };
        match &self.calibration {
            None => rated,
            Some(machine) => machine.cost(config, self.dtype.bytes(), self.options.tile_rows(), rated),
        }
    }

    /// The cluster. With a calibration, all devices have the calibrated machine's rate. (A probe of PEs that share cores gives no rates.)
    fn calibrated_cluster(&self) -> Cluster {
        let mut cluster = self.cluster.clone();
        if self.calibration.is_some() {
            cluster.devices.iter_mut().for_each(|device| device.flop_per_ms = RATE * 1e-3);
        }
        cluster
    }

    fn choices(&self, record: usize) -> Result<Choices> {
        match &self.tokens {
            Tokens::File(routing) => Ok(Choices::Record(routing.records[record].clone())),
            Tokens::Drawn { tokens, popularity, seed } => Choices::drawn(self, *tokens, *popularity, *seed),
            Tokens::Synthetic(synthetic, tokens) => Ok(Choices::Synthetic(synthetic.clone(), *tokens)),
        }
    }

    /// Simulates the steps, and the steps with each of the changes.
    ///
    /// # Errors
    /// A layer, options or a routing file that contradict each other, or a simulation that is too large.
    pub fn run(&self) -> Result<(SimulatedReport, StepTimes)> {
        self.check()?;
        let layout = self.layout()?;
        let (cost, cluster) = (self.cost(&layout), self.calibrated_cluster());
        let cores = self.cores.or(self.calibration.as_ref().and_then(Machine::cores));
        let records = match &self.tokens {
            Tokens::File(routing) => routing.records.len().min(self.steps),
            _ => 1,
        };
        let mut all = Vec::with_capacity(records);
        for record in 0..records {
            let choices = self.choices(record)?;
            let plans = plans(self, &self.groups, &choices)?;
            let chunks: usize = plans.groups.iter().map(|group| plans.plans[group.plan].chunks()).sum();
            let all_chunks = chunks.saturating_mul(self.steps).saturating_mul(if self.backward { 2 } else { 1 });
            ensure!(
                all_chunks <= MAX_CHUNKS,
                "`chunk_rows` is {}: {all_chunks} chunks over all steps, expected at most {MAX_CHUNKS}",
                self.layout()?.chunk_rows
            );
            // The number of steps with this record.
            let steps = self.steps / records + usize::from(record < self.steps % records);
            all.push((choices, plans, steps));
        }
        let times = |plans: &[(&Plans, usize)], speed: (f64, f64)| {
            let each = plans.iter().enumerate().map(|(record, (plans, steps))| {
                simulate(&Step {
                    cluster: &cluster,
                    groups: &plans.groups,
                    plans: &plans.plans,
                    cost: &cost,
                    schedule: match self.options.mode {
                        Mode::Pipelined => Schedule::Pipelined,
                        Mode::Bulk => Schedule::Bulk,
                    },
                    backward: self.backward,
                    window_chunks: layout.window_chunks,
                    steps: *steps,
                    jitter: self
                        .jitter
                        .map(|jitter| Jitter { seed: jitter.seed.wrapping_add(record as u64), ..jitter }),
                    cores,
                    nics: self.nics,
                    speed,
                    traced: if record == 0 { self.traced } else { 0 },
                })
            });
            each.reduce(StepTimes::then)
        };
        let mut placed = Vec::with_capacity(all.len());
        for (choices, made, steps) in &all {
            placed.push((plans(self, &balanced(&self.groups, made)?, choices)?, *steps));
        }
        let given: Vec<(&Plans, usize)> = all.iter().map(|(_, plans, steps)| (plans, *steps)).collect();
        let placed: Vec<(&Plans, usize)> = placed.iter().map(|(plans, steps)| (plans, *steps)).collect();
        // In parallel: the simulations are independent.
        let (base, changed) = thread::scope(|scope| {
            let changes = CHANGES.map(|(change, speed, by_load)| {
                let (plans, times) = (if by_load { &placed } else { &given }, &times);
                let work = move || times(plans, speed);
                (change, work, thread::Builder::new().spawn_scoped(scope, work))
            });
            let base = times(&given, (1.0, 1.0));
            // If a thread cannot be started, this one does its work.
            let changed = changes.map(|(change, work, thread)| match thread {
                Ok(thread) => (change, thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
                Err(_) => (change, work()),
            });
            (base, changed)
        });
        let base = base.context("there is no step")?;
        let mut changes = Vec::new();
        for (change, times) in changed {
            changes.extend(times.map(|times| (change, times)));
        }
        let mut report = SimulatedReport::new(self, &layout, &cost, given[0].0, &base, &changes);
        report.model = self.dense.as_ref().map(|dense| dense.time(self, &base)).transpose()?;
        Ok((report, base))
    }

    fn check(&self) -> Result<()> {
        self.config.validate()?;
        self.options.validate(self.dtype)?;
        ensure!(self.steps > 0, "`steps` is 0, expected at least 1");
        ensure!(self.steps <= MAX_STEPS, "`steps` is {}, expected at most {MAX_STEPS}", self.steps);
        ensure!(self.dense.as_ref().is_none_or(|dense| dense.sequence > 0), "`sequence` is 0, expected at least 1");
        ensure!(
            self.calibration.is_none() || self.rows_per != RowsPer::Host,
            "`rows_per` is host, expected pe or expert with a calibration: the time of a relay has not been measured"
        );
        ensure!(
            self.cores.is_none() || self.calibration.as_ref().is_none_or(|machine| machine.cores().is_some()),
            "`cores` is set, expected none with a device's calibration: PEs on devices share no cores"
        );
        if let Some(calibration) = &self.calibration {
            let dtype = self.dtype.name();
            ensure!(
                calibration.dtype() == dtype,
                "`dtype` is {dtype}, expected {}, the calibration's",
                calibration.dtype()
            );
        }
        ensure!(self.tokens() > 0, "`tokens` is 0, expected at least 1");
        let choices = self.tokens().saturating_mul(self.config.router.top_k);
        ensure!(
            choices <= MAX_CHOICES || matches!(self.tokens, Tokens::Drawn { .. }),
            "`tokens` is {}, expected at most {}",
            self.tokens(),
            MAX_CHOICES / self.config.router.top_k
        );
        let members = || (0..self.groups.len()).map(|g| self.groups.members(g).len());
        let largest = members().max().unwrap_or(0);
        ensure!(
            largest <= MAX_GROUP,
            "`plan`: a group has {largest} PEs, expected at most {MAX_GROUP} (without a plan all PEs are one group)"
        );
        let pairs: usize = members().map(|pes| pes.saturating_mul(pes)).fold(0, usize::saturating_add);
        let work = pairs.saturating_mul(self.steps).saturating_mul(if self.backward { 2 } else { 1 });
        ensure!(
            work <= MAX_PAIRS,
            "`steps` is {}, with {pairs} pairs of PEs in groups, expected at most {MAX_PAIRS} pairs over all passes",
            self.steps
        );
        if let Tokens::File(routing) = &self.tokens {
            routing.check_model(self.config.n_experts, self.config.router.top_k)?;
        }
        Ok(())
    }
}
