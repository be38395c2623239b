//! Compares how early tiles can start, by the order in which rows are sent: `cargo bench --bench order`. Does not
//! measure time.
//!
//! Prints, for each PE, the share of its incoming bytes that must arrive before a tile can start, if chunks of all
//! senders arrive at an equal rate; and the tiles with rows of other PEs that can start by 25, 50 and 75%. Rows, their
//! order, chunks and tiles are those of the layer; the alternative order is by token.

use aristos::moe::cpu::experts::tiles;
use aristos::moe::cpu::router::{Routing, routes};
use aristos::moe::{Activation, LayerConfig, MlpConfig, Options, Placement, RouterConfig};
use aristos::sim::routing::{Popularity, Workload};

const TOKENS_PER_PE: usize = 4096;

/// A row for PE 0: its token, and its experts there.
type Row = (u32, Vec<u32>);

/// For each of PE 0's tiles with rows of other PEs: the share of the incoming rows after which the tile is complete.
fn starts(from: &[Vec<Row>], experts: usize) -> Vec<f64> {
    let options = Options::default();
    let chunk_rows = options.chunk_rows(usize::MAX);
    // By expert: the arrival of each row of its batch, own rows first.
    let mut arrivals = vec![Vec::new(); experts];
    for (source, rows) in from.iter().enumerate() {
        for (j, (_, of)) in rows.iter().enumerate() {
            let chunk_end = (j / chunk_rows + 1) * chunk_rows;
            let share = if source == 0 { 0.0 } else { chunk_end.min(rows.len()) as f64 / rows.len() as f64 };
            of.iter().for_each(|&expert| arrivals[expert as usize].push(share));
        }
    }
    let last = |rows: &[f64]| rows.iter().copied().fold(0.0, f64::max);
    let of_expert = |rows: &Vec<f64>| -> Vec<f64> {
        // Own rows get separate tiles if there are enough of them.
        let own = rows.iter().filter(|&&share| share == 0.0).count();
        let from = if 2 * own >= options.tile_rows() { own } else { 0 };
        tiles(from..rows.len(), options.tile_rows()).map(|tile| last(&rows[tile])).collect()
    };
    arrivals.iter().flat_map(of_expert).filter(|&share| share > 0.0).collect()
}

fn main() {
    println!("model    experts  top-k  PEs  popularity  order      tiles  at 25%  at 50%  at 75%  median start");
    for (model, experts, top_k) in [("Mixtral", 8, 2), ("Qwen3", 128, 8)] {
        for pes in [2, 8] {
            for exponent in [0.0, 0.5] {
                let tokens = TOKENS_PER_PE * pes;
                let popularity = Popularity::Zipf { exponent };
                let workload =
                    Workload { experts, tokens, top_k, nodes: pes, popularity, layers: 1, steps: 1, seed: 1 };
                let record = workload.routing().expect("a valid workload").records.remove(0);
                let expert = MlpConfig::gated(64, Activation::Silu);
                let config = LayerConfig::new(64, experts, RouterConfig::softmax(top_k), expert);
                let placement = Placement::even(experts, pes);
                let of_pe = |(pe, chosen): (usize, &[u32])| -> Vec<Row> {
                    let choices: Vec<i32> = chosen.iter().map(|&expert| expert as i32).collect();
                    let routing =
                        Routing::from_caller(&config, &choices, &vec![1.0; choices.len()]).expect("valid choices");
                    let routes = routes(&routing, &placement, pe, top_k).remove(0);
                    let experts = |j| routes.row(j).iter().map(|slot| slot.expert).collect();
                    routes.tokens.iter().enumerate().map(|(j, &token)| (token, experts(j))).collect()
                };
                let mut from: Vec<Vec<Row>> = record.choices_by_node(top_k).map(of_pe).collect();
                for order in ["of experts", "of tokens"] {
                    let mut starts = starts(&from, experts / pes);
                    starts.sort_by(f64::total_cmp);
                    let by = |share: f64| {
                        100.0 * starts.iter().filter(|&&start| start <= share).count() as f64 / starts.len() as f64
                    };
                    let name = if exponent == 0.0 { "even" } else { "Zipf 0.5" };
                    println!(
                        "{model:7}  {experts:7}  {top_k:5}  {pes:3}  {name:10}  {order:9}  {:5}  {:5.0}%  {:5.0}%  {:5.0}%  {:11.0}%",
                        starts.len(),
                        by(0.25),
                        by(0.5),
                        by(0.75),
                        100.0 * starts[starts.len() / 2]
                    );
                    from.iter_mut().for_each(|rows| rows.sort_by_key(|row| row.0));
                }
            }
        }
    }
}
