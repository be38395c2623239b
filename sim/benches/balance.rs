//! Does balance inside the step pay?
//!
//! `cargo bench -p aristos-sim --bench balance -- [NAME [TOKENS]]`: a Markdown table of the share of the ideal time by model, cluster and balance, for the rows
//! whose names contain NAME, with TOKENS tokens a PE (4,096). The results do not depend on the machine.

use aristos_formats::cluster::{Cluster, Device, Link, Links, Tier, Tiers};
use aristos_sim::balance::{Balance, Experts, Rules, compare};
use aristos_sim::routing::Drift;

/// A device: name, sustained FLOP/s of expert products, bytes/s of its memory, of a link inside a host and of its NIC.
struct Machine(&'static str, f64, f64, f64, f64);
const H100: Machine = Machine("H100", 600e12, 3.35e12, 350e9, 50e9);
const A100: Machine = Machine("A100", 220e12, 2.04e12, 230e9, 25e9);

/// A model: name, hidden, intermediate, experts, top-k.
struct Model(&'static str, usize, usize, usize, usize);
const MIXTRAL: Model = Model("Mixtral", 4096, 14336, 8, 2);
const QWEN: Model = Model("Qwen3", 2048, 768, 128, 8);
const DEEPSEEK: Model = Model("DeepSeek-V3", 7168, 2048, 256, 8);

/// Model, device, hosts, devices of a host.
const ROWS: [(&Model, &Machine, usize, usize); 14] = [
    (&MIXTRAL, &H100, 1, 8),
    (&MIXTRAL, &A100, 1, 8),
    (&QWEN, &H100, 1, 8),
    (&QWEN, &A100, 1, 8),
    (&DEEPSEEK, &H100, 1, 8),
    (&DEEPSEEK, &A100, 1, 8),
    (&QWEN, &H100, 2, 8),
    (&QWEN, &A100, 4, 4),
    (&DEEPSEEK, &H100, 2, 8),
    (&DEEPSEEK, &A100, 4, 4),
    (&QWEN, &H100, 8, 8),
    (&QWEN, &A100, 16, 4),
    (&DEEPSEEK, &H100, 8, 8),
    (&DEEPSEEK, &A100, 16, 4),
];
const ZIPF: [f64; 3] = [0.3, 0.6, 0.9];
const MICROBATCHES: usize = 8;

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    let only = args.next().unwrap_or_default();
    let tokens = args.next().map_or(4096, |tokens| tokens.parse().expect("TOKENS is a number"));
    println!("Share of the ideal time, %, mean of Zipf 0.3, 0.6 and 0.9, {tokens} tokens a PE\n");
    println!("| model, PEs | largest / mean | none | replan | split | borrow 1 |\n|---|---|---|---|---|---|");
    for (Model(model, hidden, inner, count, top_k), Machine(device, flop, memory, link, nic), hosts, of_host) in ROWS {
        let name = if hosts == 1 { format!("{of_host} {device}") } else { format!("{hosts} x {of_host} {device}") };
        if !format!("{model}, {name}").contains(&only) {
            continue;
        }
        let pes = hosts * of_host;
        let devices = (0..pes).map(|pe| Device::new(pe as u64, format!("n{}", pe / of_host), flop * 1e-3, 1024));
        let tier =
            |size, bytes_per_s: &f64| Tier { size, link: Link { alpha_ms: 0.0, beta_ms_per_mb: 1e9 / bytes_per_s } };
        let mut tiers = vec![tier(of_host, link)];
        tiers.extend((hosts > 1).then(|| tier(pes, nic)));
        let links = Links::Tiers(Tiers::new(pes, tiers).expect("hosts nest"));
        let cluster = Cluster::new(devices.collect(), links);
        let weights = (3 * hidden * inner) as f64;
        let experts = Experts {
            count: *count,
            top_k: *top_k,
            row_flop: 2.0 * weights,
            row_bytes: 2.0 * *hidden as f64,
            weights_bytes: 2.0 * weights,
            gradients_bytes: 4.0 * weights,
            tile_rows: 128,
        };
        let rules = Rules {
            replan_every: 1,
            microbatches: MICROBATCHES,
            replicas: 1,
            borrowed: 1,
            replan_s: 0.0,
            assign_s: assign_s(pes),
            memory_bytes_per_s: *memory,
        };
        let steps = if pes > 16 { 3 } else { 9 };
        let mut imbalance = 0.0;
        let mut shares = [0.0; 4];
        for zipf in ZIPF {
            let drift = Drift {
                experts: *count,
                top_k: *top_k,
                pes,
                tokens_per_pe: tokens,
                zipf,
                sigma: 0.3,
                correlation: 0.9,
                microbatches: MICROBATCHES,
                seed: 1,
            };
            let mut records = drift.start().expect("the drift is valid").take(steps * MICROBATCHES);
            let found = compare(&cluster, &experts, &rules, &Balance::ALL, &mut || records.next());
            let found = found.expect("the rules are valid");
            imbalance += found.balances[0].imbalance / ZIPF.len() as f64;
            for (share, balanced) in shares.iter_mut().zip(&found.balances) {
                *share += 100.0 * found.ideal_s / balanced.time_s / ZIPF.len() as f64;
            }
            if std::env::var_os("PARTS").is_some() {
                eprintln!("{model}, {name}, Zipf {zipf}: {found:#?}");
            }
        }
        let [none, replan, split, borrow] = shares;
        println!("| {model}, {name} | {imbalance:.2} | {none:.0} | {replan:.0} | {split:.0} | {borrow:.0} |");
    }
}

/// Time of the exchange of counts and the assignment: an estimate.
fn assign_s(pes: usize) -> f64 {
    match pes {
        0..=8 => 40e-6,
        9..=16 => 70e-6,
        _ => 120e-6,
    }
}
