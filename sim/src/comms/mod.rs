//! An all-to-all exchange over a full mesh, in rounds.
//!
//! Each pair of nodes has a number of half-duplex links. In a round a link is used only in the direction of its first packet, and its
//! capacity is what it transfers in one millisecond. A node's NIC limits the sum of the bytes that the node sends and receives in a round.
//! A round ends when no more packets fit. Its time is a base delay plus the time in which the slowest link prepares and transfers its
//! packets.
//!
//! [`Schedule::Compat`] is the published program's arithmetic; [`Schedule::Fair`], the default, corrects its faults. `docs/simulator.md`
//! describes both and their differences.

mod params;
mod rounds;
#[cfg(test)]
mod tests;

use aristos_formats::InputError;
use serde::Serialize;

use aristos_formats::Span;
pub use params::{Load, Params};
use rounds::{Pair, Round};

/// Maximum number of link visits ([`Round::work`]); this many take some seconds.
const WORK_MOST: u64 = 500_000_000;
/// Maximum number of rounds whose times are listed one by one.
const LISTED_MOST: u64 = 1_000_000;

/// The order in which packets are sent, and the links that are timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Pairs of nodes take turns, in ascending order in one round and in descending order in the next. The slowest of all links is timed.
    #[default]
    Fair,
    /// As published: a node sends all packets that fit before the next node sends any. Only the first of several links between two nodes is
    /// timed.
    Compat,
}

/// Consecutive rounds, and how often this sequence of rounds is repeated.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Run {
    /// The time of each round of the sequence, ms.
    pub times_ms: Vec<f64>,
    /// Number of repetitions.
    pub repeats: u64,
}

/// An exchange of one layer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LayerExchange {
    /// Time without the initial delay, ms.
    pub time_ms: f64,
    /// Number of rounds.
    pub rounds: u64,
}

/// The times of an exchange.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Exchange {
    /// Total time, ms.
    pub time_ms: f64,
    /// Total number of rounds.
    pub rounds: u64,
    /// The time of each round, ms; `None` above a million rounds.
    pub round_times_ms: Option<Vec<f64>>,
    /// The time by the closed form, ms, if it applies: even loads that fill whole rounds.
    pub closed_form_ms: Option<f64>,
    /// The exchanges of the layers.
    pub layers: Vec<LayerExchange>,
    /// The rounds as runs of repetitions.
    #[serde(skip)]
    pub runs: Vec<Run>,
}

/// Simulates the exchange of a load, layer by layer. Adds a span per link and round to `trace`; repeated rounds are traced only once.
///
/// # Errors
/// Returns an error if a packet exceeds the capacity of a link or a NIC, if the number of layers differs from the load's, or if the
/// exchange is too much work.
pub fn exchange(
    params: &Params,
    load: &Load,
    schedule: Schedule,
    mut trace: Option<&mut Vec<Span>>,
) -> Result<Exchange, InputError> {
    params.check_packets(load)?;
    let given = load.layers.len() as u64;
    if params.num_layers > 1 && given > 1 && params.num_layers != given {
        let expected = format!("{given}, the layers of the load, or none");
        return Err(InputError::value("num_layers", format!("is {}", params.num_layers), expected));
    }
    let mut simulation = Simulation {
        params,
        schedule,
        round: Round::new(params, load.nodes, WORK_MOST),
        nodes: load.nodes,
        runs: Vec::new(),
    };
    let mut exchange = Exchange {
        time_ms: params.initial_cpu_delay_ms,
        rounds: 0,
        round_times_ms: None,
        closed_form_ms: Some(params.initial_cpu_delay_ms),
        layers: Vec::new(),
        runs: Vec::new(),
    };
    for bytes in &load.layers {
        let closed = closed_form_ms(params, load.nodes, bytes);
        exchange.closed_form_ms = exchange.closed_form_ms.zip(closed).map(|(sum, layer)| sum + layer);
        let layer = simulation.layer(bytes, exchange.time_ms, trace.as_deref_mut())?;
        exchange.time_ms += layer.time_ms;
        exchange.rounds += layer.rounds;
        exchange.layers.push(layer);
    }
    exchange.runs = simulation.runs;
    if given == 1 && params.num_layers > 1 {
        repeat(&mut exchange, params);
    }
    exchange.round_times_ms = (exchange.rounds <= LISTED_MOST).then(|| {
        let each = |run: &Run| {
            let rounds = run.repeats as usize * run.times_ms.len();
            run.times_ms.iter().copied().cycle().take(rounds).collect::<Vec<_>>()
        };
        exchange.runs.iter().flat_map(each).collect()
    });
    Ok(exchange)
}

/// Turns an exchange of one layer into one of `num_layers` equal layers.
fn repeat(exchange: &mut Exchange, params: &Params) {
    let layers = params.num_layers;
    let further_ms = |ms: f64| ms + (ms - params.initial_cpu_delay_ms) * (layers - 1) as f64;
    exchange.closed_form_ms = exchange.closed_form_ms.map(further_ms);
    exchange.time_ms = further_ms(exchange.time_ms);
    exchange.rounds *= layers;
    exchange.layers = vec![exchange.layers[0].clone(); layers as usize];
    let runs = exchange.runs.clone();
    exchange.runs = (0..layers).flat_map(|_| runs.iter().cloned()).collect();
}

struct Simulation<'p> {
    params: &'p Params,
    schedule: Schedule,
    round: Round,
    nodes: usize,
    runs: Vec<Run>,
}

impl Simulation<'_> {
    fn layer(
        &mut self,
        bytes: &[u64],
        start_ms: f64,
        mut trace: Option<&mut Vec<Span>>,
    ) -> Result<LayerExchange, InputError> {
        let mut left = bytes.to_vec();
        let orders = match self.schedule {
            Schedule::Fair => vec![self.order(false), self.order(true)],
            Schedule::Compat => vec![self.order(false)],
        };
        let (mut time_ms, mut rounds) = (0.0, 0);
        while left.iter().any(|&bytes| bytes > 0) {
            let before = left.clone();
            let mut times_ms = Vec::with_capacity(orders.len());
            for order in &orders {
                if left.iter().all(|&bytes| bytes == 0) {
                    break;
                }
                self.one_round(order, &mut left);
                if let Some(trace) = trace.as_deref_mut() {
                    self.spans(start_ms + time_ms + times_ms.iter().sum::<f64>(), trace);
                }
                times_ms.push(self.params.base_delay_ms + self.slowest_link_ms());
            }
            if self.round.is_over() {
                let found = format!("is {}", self.params.num_links);
                let expected = format!("fewer links, or fewer than {} nodes: this would take too long", self.nodes);
                return Err(InputError::value("num_links", found, expected));
            }
            let repeats = 1 + self.repetitions(&before, &left);
            for (left, before) in left.iter_mut().zip(&before) {
                *left -= (repeats - 1) * (before - *left);
            }
            time_ms += repeats as f64 * times_ms.iter().sum::<f64>();
            rounds += repeats * times_ms.len() as u64;
            self.runs.push(Run { times_ms, repeats });
        }
        Ok(LayerExchange { time_ms, rounds })
    }

    /// All pairs of nodes in the order in which they send; `backward` reverses it.
    fn order(&self, backward: bool) -> Vec<Pair> {
        let n = self.nodes as u32;
        let pairs = (0..n).flat_map(|from| (0..n).filter(move |to| *to != from).map(move |to| (from, to)));
        if backward { pairs.rev().collect() } else { pairs.collect() }
    }

    fn one_round(&mut self, order: &[Pair], left: &mut [u64]) {
        self.round.clear();
        let nodes = self.nodes;
        let loaded = |(from, to): &Pair| left[*from as usize * nodes + *to as usize] > 0;
        let mut pairs: Vec<Pair> = order.iter().copied().filter(loaded).collect();
        match self.schedule {
            Schedule::Fair => self.round.sweep(left, &mut pairs),
            Schedule::Compat => {
                for of_source in pairs.chunk_by(|a, b| a.0 == b.0) {
                    self.round.sweep(left, &mut of_source.to_vec());
                }
            }
        }
    }

    /// How often the rounds that changed the loads from `before` to `after` repeat exactly: while each load that they reduced still has at
    /// least one full packet, the same packets fit as before.
    fn repetitions(&self, before: &[u64], after: &[u64]) -> u64 {
        let packet = self.params.packet_size_bytes;
        let of_pair = |(before, after): (&u64, &u64)| {
            let moved = before - after;
            (moved > 0).then(|| after.saturating_sub(packet) / moved)
        };
        before.iter().zip(after).filter_map(of_pair).min().unwrap_or(0)
    }

    /// The time of the slowest link in this round, ms.
    fn slowest_link_ms(&self) -> f64 {
        let params = self.params;
        let pairs = (1..self.nodes).flat_map(|j| (0..j).map(move |i| (i, j)));
        if self.schedule == Schedule::Compat {
            let (mut packets, mut bytes) = (1, 0);
            for (i, j) in pairs {
                let link = self.round.links(i, j)[0];
                (packets, bytes) = (packets.max(link.packets), bytes.max(link.bytes));
            }
            return packets as f64 * params.packet_prep_delay_ms + bytes as f64 / params.intra_bw_bytes_per_ms;
        }
        let links = pairs.flat_map(|(i, j)| self.round.links(i, j).iter().map(move |link| (i, j, link)));
        links.map(|(i, j, link)| self.link_ms(link, params.bandwidth_bytes_per_ms(i, j))).fold(0.0, f64::max)
    }

    /// The time of a link. Packets are prepared and transferred one after the other, or each packet is prepared while the previous one is
    /// transferred.
    fn link_ms(&self, link: &rounds::Link, bytes_per_ms: f64) -> f64 {
        if link.packets == 0 {
            return 0.0;
        }
        let (packets, prep_ms) = (link.packets as f64, self.params.packet_prep_delay_ms);
        let transfer_ms = link.bytes as f64 / bytes_per_ms;
        match self.params.parallelization_multiplier {
            None => packets * prep_ms + transfer_ms,
            // A two-stage pipeline (preparation, transfer) over equal packets and a shorter last one: the first packet's preparation,
            // then the slower stage for each packet, then the last packet's transfer.
            Some(multiplier) => {
                let each_ms = (self.params.packet_size_bytes as f64).min(link.bytes as f64) / bytes_per_ms;
                let last_ms = transfer_ms - (packets - 1.0) * each_ms;
                let overlapped = match prep_ms >= each_ms {
                    true => packets * prep_ms + last_ms,
                    false => prep_ms + transfer_ms,
                };
                multiplier * overlapped
            }
        }
    }

    /// Adds a span of the sender for each link that has packets in this round.
    fn spans(&self, start_ms: f64, trace: &mut Vec<Span>) {
        for j in 1..self.nodes {
            for i in 0..j {
                for link in self.round.links(i, j).iter().filter(|link| link.packets > 0) {
                    let (from, to) = if link.downward { (j, i) } else { (i, j) };
                    trace.push(Span {
                        pe: from as u32,
                        track: to as u32,
                        name: format!("to node {to}: {} B in {} packets", link.bytes, link.packets),
                        start_s: (start_ms + self.params.base_delay_ms) * 1e-3,
                        dur_s: self.link_ms(link, self.params.bandwidth_bytes_per_ms(i, j)) * 1e-3,
                    });
                }
            }
        }
    }
}

/// The time of one layer by the closed form, without the initial delay. `None` unless the form is exact: at least two
/// nodes, all in one cluster, send the same amount to each other, all packets and rounds are full, and neither a NIC nor a parallelization
/// multiplier changes the times.
///
/// The time of a round is base + floor(bw / packet) (prep + packet / bw). The number of rounds is (load of a node) * n / (links * n (n - 1)
/// / 2 * bw). Both are from the routing-simulation document that `docs/simulator.md` names, with its brackets corrected.
fn closed_form_ms(params: &Params, nodes: usize, bytes: &[u64]) -> Option<f64> {
    if params.nodes_per_cluster.is_some() || params.parallelization_multiplier.is_some() || nodes < 2 {
        return None;
    }
    let even = bytes[1];
    let all_even = (0..nodes * nodes).filter(|at| at / nodes != at % nodes).all(|at| bytes[at] == even);
    let (bandwidth, packet) = (params.intra_bw_bytes_per_ms, params.packet_size_bytes as f64);
    let whole = |x: f64| x.fract() == 0.0;
    let (links, n) = (params.num_links as f64, nodes as f64);
    let rounds = (n - 1.0) * even as f64 * n / (links * n * (n - 1.0) / 2.0 * bandwidth);
    let full = whole(bandwidth / packet) && whole(even as f64 / bandwidth) && whole(rounds);
    let free = (n - 1.0) * links * bandwidth <= params.nic_rate_bytes;
    let round =
        params.base_delay_ms + (bandwidth / packet).floor() * (params.packet_prep_delay_ms + packet / bandwidth);
    (all_even && full && free).then_some(round * rounds)
}
