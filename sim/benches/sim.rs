//! Time to simulate.
//!
//! `cargo bench -p aristos-sim --bench sim -- [MODEL]`: medians and spread of wall time of the models whose names contain MODEL.

use std::hint::black_box;
use std::time::Instant;

use aristos_sim::comms::{Load, Params, Schedule, exchange};
use aristos_sim::sweep::{Cost, Degrees, Model, Strategy, grid};

fn main() {
    let only = std::env::args().skip(1).find(|arg| !arg.starts_with('-')).unwrap_or_default();
    println!("{:44} {:>30}", "", "wall ms (min to max)");
    for (name, bench) in [("comms", comms as fn(&str)), ("sweep", sweep)] {
        if name.contains(&only) {
            bench(name);
        }
    }
}

/// Prints the times of 21 repetitions.
fn measure(name: &str, mut work: impl FnMut()) -> f64 {
    work();
    let mut times_ms: Vec<f64> = (0..21)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times_ms.sort_by(f64::total_cmp);
    let text = format!("{:.3} ({:.3} to {:.3})", times_ms[10], times_ms[0], times_ms[20]);
    println!("{name:44} {text:>30}");
    times_ms[10]
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
    // The same of one device with many layers: nothing is alike there.
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
