//! Time to simulate.
//!
//! `cargo bench -p aristos-sim --bench sim -- [MODEL]`: medians and spread of wall time of the models whose names contain MODEL.

use std::hint::black_box;
use std::time::Instant;

use aristos_formats::cluster::preset;
use aristos_formats::routing::Record;
use aristos_sim::comms::{Load, Params, Schedule, exchange};
use aristos_sim::network::Nics;
use aristos_sim::routing::{Popularity, Workload};
use aristos_sim::step::{Affine, Cutting, Group, GroupPlan, LayerCost, Rows, Schedule as StepSchedule, Step, simulate};
use aristos_sim::sweep::{Cost, Degrees, Model, Strategy, grid};

fn main() {
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    println!("{:44} {:>30}", "", "wall ms (min to max)");
    for (name, bench) in [("comms", comms as fn(&str)), ("sweep", sweep), ("step", step)] {
        if name.contains(&only) {
            bench(name);
        }
    }
}

/// Prints the times of 21 repetitions.
fn measure(name: &str, work: impl FnMut()) -> f64 {
    measure_times(name, 21, work)
}

fn measure_times(name: &str, repetitions: usize, mut work: impl FnMut()) -> f64 {
    work();
    let mut times_ms: Vec<f64> = (0..repetitions)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times_ms.sort_by(f64::total_cmp);
    let text = format!("{:.3} ({:.3} to {:.3})", times_ms[repetitions / 2], times_ms[0], times_ms[repetitions - 1]);
    println!("{name:44} {text:>30}");
    times_ms[repetitions / 2]
}

/// 159 MB between 8 nodes in packets of 128 bytes: even, and uneven so that loads end in different rounds.
fn comms(name: &str) {
    let even = |at: usize| if at.is_multiple_of(9) { 0 } else { 159_000_000 / 56 };
    let uneven = |at: usize| if at.is_multiple_of(9) { 0 } else { 2 * 159_000_000 / 56 * (at as u64 * 37 % 56) / 56 };
    for (kind, load) in [("even", (0..64).map(even).collect()), ("uneven", (0..64).map(uneven).collect())] {
        let load = Load::new(8, vec![load]);
        for (network, bytes, nic) in [("1 kB/ms", 1024.0, 1e9), ("100 kB/ms, NIC binds", 102_400.0, 300_000.0)] {
            let mut params = Params::default();
            (params.packet_size_bytes, params.intra_bw_bytes_per_ms, params.nic_rate_bytes) = (128, bytes, nic);
            for schedule in [Schedule::Fair, Schedule::Compat] {
                measure(&format!("{name}, {kind}, {network}, {schedule:?}"), || {
                    let _ = black_box(exchange(&params, &load, schedule, None).expect("packets fit"));
                });
            }
        }
    }
}

/// The published grid of 52 strategies, and the time of an operation.
fn sweep(name: &str) {
    let model = Model::new(64, 8192, 8192).expect("sizes above 0");
    for cost in [Cost::Compat, Cost::Default] {
        let all = || grid(&model, 16, &Degrees::default(), cost, true).expect("degrees that divide");
        let rows = all();
        let ops: u64 = rows.iter().map(|(_, outcome)| outcome.ops).sum();
        let time_ms = measure(&format!("{name}, {} strategies, {cost:?}", rows.len()), || {
            let _ = black_box(all());
        });
        println!("{:44} {:>30}", "", format!("{:.2} ns/op of {ops}", time_ms * 1e6 / ops as f64));
    }
    // A single device with many layers, without repetition.
    for layers in [4096, 65_536] {
        let model = Model::new(layers, 64, 64).expect("sizes above 0");
        let one = || model.simulate(Strategy::new(1, 1, 1, 1), Cost::Compat, true).expect("one device");
        let ops = one().ops;
        let time_ms = measure(&format!("{name}, {layers} layers on a device"), || {
            let _ = black_box(one());
        });
        println!("{:44} {:>30}", "", format!("{:.2} ns/op of {ops}", time_ms * 1e6 / ops as f64));
    }
}

/// A step, forward and backward, of 10,240 GPUs: DeepSeek-V3's 256 experts of 7168 x 2048, top-8, 4096 tokens per GPU, expert-parallel
/// groups of 64; also the plan of a group, and the process's peak memory.
fn step(name: &str) {
    const GROUP: usize = 64;
    let (experts, top_k, tokens, hidden) = (256, 8, 4096, 7168.0);
    for gpus in [64, 10_240] {
        let cluster = preset(&format!("dgx-h100:{}", gpus / 8)).expect("a preset");
        let group = |g: usize| Group {
            members: (g * GROUP..(g + 1) * GROUP).collect(),
            experts: (0..GROUP).map(|pe| (pe * 4..pe * 4 + 4).collect()).collect(),
            plan: 0,
        };
        let groups: Vec<Group> = (0..gpus / GROUP).map(group).collect();
        let slot_flop = 6.0 * hidden * 2048.0;
        let cost = LayerCost {
            row_bytes: 2.0 * hidden,
            out_bytes: (4.0, 8.0),
            back_bytes: 4.0,
            header_bytes: 40.0,
            tile_flop: [Affine::each(slot_flop); 2],
            gradient_flop: [Affine::each(slot_flop), Affine::default()],
            router_flop: [2.0, 4.0].map(|flop| Affine::each(flop * hidden * experts as f64)),
            shared_flop: [slot_flop, 2.0 * slot_flop].map(Affine::each),
            gradient_bytes: (4.0 * slot_flop / 2.0, 4.0 * hidden * experts as f64),
            ..LayerCost::default()
        };
        for schedule in [StepSchedule::Pipelined, StepSchedule::Bulk] {
            let mut events = 0;
            let time_ms = measure_times(&format!("{name}, {gpus} GPUs, {schedule:?}"), 3, || {
                let workload = Workload {
                    experts,
                    tokens: tokens * GROUP,
                    top_k,
                    nodes: GROUP,
                    popularity: Popularity::Zipf { exponent: 0.3 },
                    layers: 1,
                    steps: 1,
                    seed: 1,
                };
                let routing = workload.routing().expect("sizes above 0");
                let plan = [group_plan(&routing.records[0], top_k, experts / GROUP)];
                let step = Step {
                    cluster: &cluster,
                    groups: &groups,
                    plans: &plan,
                    cost: &cost,
                    schedule,
                    backward: true,
                    window_chunks: 4,
                    steps: 1,
                    jitter: None,
                    cores: None,
                    nics: Nics::PerPe,
                    speed: (1.0, 1.0),
                    traced: 0,
                };
                events = black_box(simulate(&step)).events;
            });
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("?").trim();
            let text = format!("{:.0} ns/event of {events}, {peak} at most", time_ms * 1e6 / events as f64);
            println!("{:24} {text:>50}", "");
        }
    }
}

/// Rows of each PE for each other PE: a token is sent once to each PE with any of its experts.
fn group_plan(record: &Record, top_k: usize, experts_per_pe: usize) -> GroupPlan {
    let n = record.tokens_per_node.len();
    let mut rows = vec![vec![Rows { starts: vec![0], ..Rows::default() }; n]; n];
    for (pe, choices) in record.choices_by_node(top_k) {
        for token in choices.chunks_exact(top_k) {
            let mut sorted = token.to_vec();
            sorted.sort_unstable();
            for of_pe in sorted.chunk_by(|a, b| *a as usize / experts_per_pe == *b as usize / experts_per_pe) {
                let to = &mut rows[pe][of_pe[0] as usize / experts_per_pe];
                to.experts.extend(of_pe.iter().map(|expert| expert % experts_per_pe as u32));
                to.returns.push(to.starts.len() as u32 - 1);
                to.starts.push(to.experts.len() as u32);
            }
        }
    }
    let tiles = |run: std::ops::Range<usize>| -> Vec<_> {
        run.clone().step_by(512).map(|start| start..run.end.min(start + 512)).collect()
    };
    let cutting = Cutting { chunk_rows: 256, early_rows: 256, tiles: &tiles };
    GroupPlan::new(&rows, &record.tokens_per_node, &vec![experts_per_pe; n], &cutting)
}
