//! The time of a step by a shape.

use std::collections::HashMap;

use aristos_formats::cluster::{Cluster, Device, Link, LinkTable, Links, Matrix, Tier, Tiers};
use aristos_formats::{Batch, InputError, Workload};
use aristos_plan::{Objective, objective_ms};
use aristos_sim::roofline;
use serde::Serialize;

use crate::memory::parameters;
use crate::training::{Shape, Training};

/// The part of a step that takes longest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// Attention, dense MLPs, embedding and head.
    Dense,
    /// The experts' products.
    Experts,
    /// Dispatch and combine.
    Exchange,
    /// Stages that wait for the first or the last microbatch.
    Bubble,
    /// Sums of gradients.
    Gradients,
}

/// The parts of a step, ms. They are added up: communication is not overlapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Time {
    /// Dense parts of all microbatches.
    pub dense_ms: f64,
    /// Experts' products of all microbatches.
    pub experts_ms: f64,
    /// Dispatch and combine of all microbatches.
    pub exchange_ms: f64,
    /// Waits at the ends of the pipeline, and sends between its stages.
    pub bubble_ms: f64,
    /// Sums of gradients.
    pub gradients_ms: f64,
}

impl Time {
    /// The step.
    pub fn step_ms(&self) -> f64 {
        self.dense_ms + self.experts_ms + self.exchange_ms + self.bubble_ms + self.gradients_ms
    }

    /// The largest part.
    pub fn bottleneck(&self) -> Bottleneck {
        let parts = [
            (self.dense_ms, Bottleneck::Dense),
            (self.experts_ms, Bottleneck::Experts),
            (self.exchange_ms, Bottleneck::Exchange),
            (self.bubble_ms, Bottleneck::Bubble),
            (self.gradients_ms, Bottleneck::Gradients),
        ];
        parts.into_iter().fold(parts[0], |most, part| if part.0 > most.0 { part } else { most }).1
    }
}

/// Times of parts that several strategies share.
#[derive(Default)]
pub(crate) struct Times {
    /// By group size and place, the time of one layer's pass for `tokens_per_device` tokens: the experts' products, the exchange, and an exchange's part that
    /// does not depend on the number of tokens.
    layers: HashMap<(usize, usize), (f64, f64, f64)>,
}

impl Times {
    pub(crate) fn of(&mut self, training: &Training, shape: &Shape) -> Result<Time, InputError> {
        let Shape { stages, ep, replicas, microbatches, microbatch_tokens: tokens, .. } = *shape;
        let (bytes, width) = (training.element_bytes, ep * replicas);
        let stage = training.stage(stages);
        let dense = roofline::time(&stage, &training.device, tokens, training.sequence, bytes)?;
        let again = if shape.recompute { 2.0 } else { 1.0 };
        let sum = |[forward, backward]: [f64; 2]| again * forward + backward;
        let dense_ms = 1e3 * (sum(dense.attention_s) + sum(dense.rest_s));
        // The slowest group of all stages.
        let (mut experts_ms, mut exchange_ms) = (0.0, 0.0);
        for start in (0..stages * width).step_by(ep) {
            let (experts, exchange) = self.layer(training, start, ep, tokens);
            if experts + exchange > experts_ms + exchange_ms {
                (experts_ms, exchange_ms) = (experts, exchange);
            }
        }
        // A backward has two products for each one of forward, and one exchange.
        let moe_layers = stage.layers.1 as f64;
        let (experts_ms, exchange_ms) =
            (experts_ms * moe_layers * (again + 2.0), exchange_ms * moe_layers * (again + 1.0));
        let links = &training.cluster.links;
        let send_ms = match stages {
            1 => 0.0,
            _ => 2.0 * links.link(0, width).time_ms(tokens as f64 * (training.model.hidden * bytes) as f64 * 1e-6),
        };
        let ramp = (stages - 1) as f64;
        let (experts, rest) = parameters(training, shape);
        // Rings: sums of f32 gradients, and copies of them, or with a sharded optimizer of the weights.
        let ring = |size: usize, stride: usize, parameters: f64| {
            if size == 1 {
                return 0.0;
            }
            let back = if shape.sharded { bytes as f64 } else { 4.0 };
            let slowest = (1..size).map(|i| links.link((i - 1) * stride, i * stride));
            let slower = |a: Link, b: Link| if b.time_ms(1.0) > a.time_ms(1.0) { b } else { a };
            let link = slowest.reduce(slower).unwrap_or(links.link(0, stride));
            let step = |bytes: f64| link.time_ms(parameters * bytes * 1e-6 / size as f64);
            (size - 1) as f64 * (step(4.0) + step(back))
        };
        let microbatches = microbatches as f64;
        Ok(Time {
            dense_ms: microbatches * dense_ms,
            experts_ms: microbatches * experts_ms,
            exchange_ms: microbatches * exchange_ms,
            bubble_ms: ramp * (dense_ms + experts_ms + exchange_ms + send_ms),
            gradients_ms: ring(replicas, ep, experts) + ring(width, 1, rest),
        })
    }

    /// The time of one forward pass of a layer's experts in the group of `ep` devices from `start` on, by the placed objective: products and exchange, ms.
    fn layer(&mut self, training: &Training, start: usize, ep: usize, tokens: usize) -> (f64, f64) {
        let cluster = training.cluster;
        // Blocks at the same place of a tier are alike if the devices are.
        let alike = cluster.devices.iter().all(|device| device.flop_per_ms == cluster.devices[0].flop_per_ms);
        let place = match &cluster.links {
            Links::Tiers(tiers) if alike => {
                let inner = tiers.tiers().iter().map(|tier| tier.size).filter(|size| *size < cluster.devices.len());
                start % inner.max().unwrap_or(1)
            }
            _ => start,
        };
        let part = tokens as f64 / training.tokens_per_device as f64;
        let (experts_ms, exchange_ms, fixed_ms) =
            *self.layers.entry((ep, place)).or_insert_with(|| measure(training, place, ep));
        (experts_ms * part, fixed_ms + (exchange_ms - fixed_ms) * part)
    }
}

/// The entry of [`Times::layers`].
fn measure(training: &Training, start: usize, ep: usize) -> (f64, f64, f64) {
    let group = block(training.cluster, start, ep, training.model.experts);
    let mut model = training.model.clone();
    (model.layers, model.moe_layers) = (1, 1);
    let mut batch = Batch::new(training.tokens_per_device as f64, training.element_bytes);
    (batch.devices, batch.backward) = (Some(ep), false);
    let mut workload = model.workload(&batch);
    let members = [(0..ep as u32).collect()];
    let objective =
        |workload: &Workload| objective_ms(&group, workload, &members, Objective::Placed).unwrap_or(f64::INFINITY);
    let all_ms = objective(&workload);
    let buffer_mb = std::mem::replace(&mut workload.p2p_buffer_mb, 0.0);
    // Rows that take no time: the experts' products and the latencies.
    let without_rows_ms = if ep == 1 || buffer_mb == 0.0 { all_ms } else { objective(&workload) };
    workload.p2p_frequency = 0.0;
    let experts_ms = if ep == 1 { all_ms } else { objective(&workload) };
    (experts_ms, (all_ms - experts_ms).max(0.0), (without_rows_ms - experts_ms).max(0.0))
}

/// The devices of a block, each with room for all experts, and the links between them.
fn block(cluster: &Cluster, start: usize, size: usize, experts: usize) -> Cluster {
    let devices = cluster.devices[start..start + size].iter().zip(0..);
    let devices = devices.map(|(device, id)| Device::new(id, device.host.clone(), device.flop_per_ms, experts as u64));
    let inside = match &cluster.links {
        Links::Tiers(tiers) => {
            let nested =
                |tier: &Tier| tier.size < size && size.is_multiple_of(tier.size) && start.is_multiple_of(tier.size);
            let mut inner: Vec<Tier> = tiers.tiers().iter().copied().filter(nested).collect();
            let whole = tiers.tiers().iter().find(|tier| start / tier.size == (start + size - 1) / tier.size);
            inner.extend(whole.map(|tier| Tier { size, link: tier.link }));
            let all = tiers.tiers().iter().filter(|tier| tier.size < size).count() + 1;
            Tiers::new(size, inner.clone()).ok().filter(|_| inner.len() == all)
        }
        Links::Matrix(_) => None,
    };
    let links = inside.map(Links::Tiers).unwrap_or_else(|| {
        let link = |i: usize| cluster.links.link(start + i / size, start + i % size);
        let alpha = (0..size * size).map(|i| if i / size == i % size { 0.0 } else { link(i).alpha_ms }).collect();
        let beta = (0..size * size).map(|i| if i / size == i % size { 0.0 } else { link(i).beta_ms_per_mb }).collect();
        Links::Matrix(Matrix::new(size, alpha, beta))
    });
    Cluster::new(devices.collect(), links)
}
