//! Strategies for a whole model as text.

use super::text::{TextTable, ms};
use crate::strategy::{Bottleneck, Strategy};

/// A name and a strategy.
pub(crate) type StrategyRow<'a> = (String, &'a Strategy);

/// A row per strategy.
pub(crate) fn strategies_text(rows: &[StrategyRow]) -> String {
    let header = [
        "",
        "stages",
        "EP",
        "replicas",
        "microbatches",
        "recompute",
        "optimizer",
        "memory, GB",
        "step, ms",
        "tokens/s",
        "exposed",
        "bottleneck",
    ];
    let mut table = TextTable::new(1, header);
    for (name, strategy) in rows {
        let (shape, time) = (&strategy.shape, &strategy.time);
        let exposed = (time.exchange_ms + time.gradients_ms + time.bubble_ms) / time.step_ms();
        table.row([
            name.clone(),
            shape.stages.to_string(),
            shape.ep.to_string(),
            shape.replicas.to_string(),
            format!("{} x {}", shape.microbatches, shape.microbatch_tokens),
            if shape.recompute { "yes" } else { "no" }.to_string(),
            if shape.sharded { "sharded" } else { "whole" }.to_string(),
            format!("{:.1}", strategy.memory.all_mb() * 1e-3),
            ms(time.step_ms() * 1e-3),
            format!("{:.0}", strategy.tokens_per_s),
            format!("{:.0}%", 100.0 * exposed),
            match time.bottleneck() {
                Bottleneck::Dense => "dense parts",
                Bottleneck::Experts => "experts",
                Bottleneck::Exchange => "exchange",
                Bottleneck::Bubble => "bubble",
                Bottleneck::Gradients => "gradients",
            }
            .to_string(),
        ]);
    }
    table.render()
}

/// The memory of a device by its parts.
pub(crate) fn memory_text(strategy: &Strategy, usable_mb: f64) -> String {
    let memory = &strategy.memory;
    let mut table = TextTable::new(1, ["memory of a device", "GB"]);
    for (name, mb) in [
        ("weights", memory.weights_mb),
        ("gradients", memory.gradients_mb),
        ("optimizer", memory.optimizer_mb),
        ("activations", memory.activations_mb),
        ("receive windows", memory.windows_mb),
        ("all", memory.all_mb()),
        ("usable", usable_mb),
    ] {
        table.row([name.to_string(), format!("{:.2}", mb * 1e-3)]);
    }
    table.render()
}

/// The flags of launchers and frameworks for a strategy.
pub(crate) fn launch_text(strategy: &Strategy, nodes: usize, devices: usize, sequence: usize) -> String {
    let shape = &strategy.shape;
    let width = shape.ep * shape.replicas;
    let batch = (shape.microbatch_tokens / sequence).max(1);
    let mut text = format!(
        "torchrun --nnodes {nodes} --nproc-per-node {}\n\
         torchtitan: --parallelism.pipeline_parallel_degree {} --parallelism.expert_parallel_degree {} \
         --parallelism.data_parallel_shard_degree {width} --parallelism.pipeline_parallel_microbatch_size {batch} \
         --training.local_batch_size {} --training.seq_len {sequence}\n\
         Megatron: --pipeline-model-parallel-size {} --expert-model-parallel-size {} --micro-batch-size {batch} \
         --global-batch-size {} --seq-length {sequence}",
        devices / nodes.max(1),
        shape.stages,
        shape.ep,
        batch * shape.microbatches,
        shape.stages,
        shape.ep,
        batch * shape.microbatches * width,
    );
    if shape.sharded {
        text += " --use-distributed-optimizer";
    }
    if shape.recompute {
        text += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1";
    }
    text + "\n"
}
