//! The input files of an exchange: network parameters, and bytes by source and destination.

use std::path::Path;

use aristos_formats::InputError;
use aristos_formats::cluster::{Count, Number, Range, parse_json, read_text};
use serde::Deserialize;

/// Maximum number of links; the state of this many takes some hundred MB.
const LINKS_MOST: u64 = 1 << 22;
const NODES_MOST: usize = 1024;
const LAYERS_MOST: u64 = 100_000;
/// Maximum number of byte counts in a load, over all layers.
const NUMBERS_MOST: usize = 1 << 27;
/// Maximum of a byte count, and of a layer's sum of byte counts; small enough that sums do not overflow.
const BYTES_MOST: u64 = 1_000_000_000_000_000;

/// A full mesh of nodes, and the costs of its packets.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Params {
    /// Half-duplex links between any two nodes, at least 1.
    pub num_links: usize,
    /// Delay of every round, ms.
    pub base_delay_ms: f64,
    /// Delay before the first round, ms.
    pub initial_cpu_delay_ms: f64,
    /// Bandwidth of a link, bytes/ms; a link carries this many bytes in a round.
    pub intra_bw_bytes_per_ms: f64,
    /// Size of a packet, bytes; the last packet of a load may be smaller.
    pub packet_size_bytes: u64,
    /// Time to prepare one packet, ms.
    pub packet_prep_delay_ms: f64,
    /// Maximum number of packets that a (source, destination) pair sends per turn.
    pub round_robin_max_packets: u64,
    /// Maximum sum of the bytes that a node sends and receives in a round.
    pub nic_rate_bytes: f64,
    /// Nodes per cluster (consecutive nodes), if there are several clusters.
    pub nodes_per_cluster: Option<usize>,
    /// Bandwidth of a link between clusters, bytes/ms; also its capacity per round, bytes.
    pub inter_bw_bytes_per_ms: f64,
    /// If set, packets are prepared while others are transferred. A link's time is then this factor times its time with perfect overlap.
    pub parallelization_multiplier: Option<f64>,
    /// Number of times that the load is exchanged, if the load has a single layer.
    pub num_layers: u64,
}

impl Default for Params {
    /// The values of the routing-simulation document that `docs/simulator.md` names.
    fn default() -> Params {
        Params {
            num_links: 1,
            base_delay_ms: 2.0,
            initial_cpu_delay_ms: 0.0,
            intra_bw_bytes_per_ms: 100.0,
            packet_size_bytes: 20,
            packet_prep_delay_ms: 1.0,
            round_robin_max_packets: 5,
            nic_rate_bytes: 10_000.0,
            nodes_per_cluster: None,
            inter_bw_bytes_per_ms: 100.0,
            parallelization_multiplier: None,
            num_layers: 1,
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawParams {
    num_links: Option<Count>,
    base_delay_ms: Option<Number>,
    initial_cpu_delay_ms: Option<Number>,
    intra_bw_bytes_per_ms: Option<Number>,
    packet_size_bytes: Option<Count>,
    packet_prep_delay_ms: Option<Number>,
    round_robin_max_packets: Option<Count>,
    nic_rate_bytes: Option<Number>,
    nodes_per_cluster: Option<Count>,
    inter_bw_bytes_per_ms: Option<Number>,
    parallelization_multiplier: Option<Number>,
    num_layers: Option<Count>,
}

impl Params {
    /// Reads a file of parameters; absent ones have the values of [`Params::default`].
    ///
    /// # Errors
    /// Returns an error that names the file, the field, its value and the values allowed.
    pub fn read(path: &Path) -> Result<Params, InputError> {
        Params::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses parameters from JSON text.
    ///
    /// # Errors
    /// Returns the errors of [`Params::read`], without the name of the file.
    pub fn from_json(text: &str) -> Result<Params, InputError> {
        let raw: RawParams = parse_json(text)?;
        let default = Params::default();
        let number = |number: Option<Number>, default: f64, range: Range, field: &str| {
            number.map_or(Ok(default), |number| range.check(number.0, || field.to_string()))
        };
        let count = |count: Option<Count>, default: u64, most: u64, field: &str| match count.map_or(default, |c| c.0) {
            count if (1..=most).contains(&count) => Ok(count),
            count => Err(InputError::value(field, format!("is {count}"), format!("1 to {most}"))),
        };
        use Range::{NonNegative, Positive};
        let intra =
            number(raw.intra_bw_bytes_per_ms, default.intra_bw_bytes_per_ms, Positive, "intra_bw_bytes_per_ms")?;
        let nodes = |nodes| count(Some(nodes), 1, NODES_MOST as u64, "nodes_per_cluster").map(|nodes| nodes as usize);
        if raw.inter_bw_bytes_per_ms.is_some() && raw.nodes_per_cluster.is_none() {
            let expected = "nodes_per_cluster beside inter_bw_bytes_per_ms";
            return Err(InputError::value("nodes_per_cluster", "is missing", expected));
        }
        let multiplier = raw.parallelization_multiplier.map(|number| match number.0 {
            number if (1.0..=1e6).contains(&number) => Ok(number),
            number => {
                Err(InputError::value("parallelization_multiplier", format!("is {number:?}"), "a number from 1 to 1e6"))
            }
        });
        Ok(Params {
            num_links: count(raw.num_links, default.num_links as u64, LINKS_MOST, "num_links")? as usize,
            base_delay_ms: number(raw.base_delay_ms, default.base_delay_ms, NonNegative, "base_delay_ms")?,
            initial_cpu_delay_ms: number(
                raw.initial_cpu_delay_ms,
                default.initial_cpu_delay_ms,
                NonNegative,
                "initial_cpu_delay_ms",
            )?,
            intra_bw_bytes_per_ms: intra,
            packet_size_bytes: count(
                raw.packet_size_bytes,
                default.packet_size_bytes,
                BYTES_MOST,
                "packet_size_bytes",
            )?,
            packet_prep_delay_ms: number(
                raw.packet_prep_delay_ms,
                default.packet_prep_delay_ms,
                NonNegative,
                "packet_prep_delay_ms",
            )?,
            round_robin_max_packets: count(
                raw.round_robin_max_packets,
                default.round_robin_max_packets,
                BYTES_MOST,
                "round_robin_max_packets",
            )?,
            nic_rate_bytes: number(raw.nic_rate_bytes, default.nic_rate_bytes, Positive, "nic_rate_bytes")?,
            nodes_per_cluster: raw.nodes_per_cluster.map(nodes).transpose()?,
            inter_bw_bytes_per_ms: number(raw.inter_bw_bytes_per_ms, intra, Positive, "inter_bw_bytes_per_ms")?,
            parallelization_multiplier: multiplier.transpose()?,
            num_layers: count(raw.num_layers, 1, LAYERS_MOST, "num_layers")?,
        })
    }

    /// Bandwidth of a link between two nodes, bytes/ms.
    pub fn bandwidth_bytes_per_ms(&self, a: usize, b: usize) -> f64 {
        match self.nodes_per_cluster {
            Some(nodes) if a / nodes != b / nodes => self.inter_bw_bytes_per_ms,
            _ => self.intra_bw_bytes_per_ms,
        }
    }

    /// Checks that the number of links is supported, and that every packet of these loads fits into a round of its link and of a NIC. A
    /// packet that never fits would be retried forever.
    pub(super) fn check_packets(&self, load: &Load) -> Result<(), InputError> {
        let nodes = load.nodes;
        if (nodes * nodes) as u64 / 2 * self.num_links as u64 > LINKS_MOST {
            let most = LINKS_MOST / ((nodes * nodes) as u64 / 2).max(1);
            let expected = format!("at most {most} between any two of {nodes} nodes");
            return Err(InputError::value("num_links", format!("is {}", self.num_links), expected));
        }
        for layer in &load.layers {
            for (at, &bytes) in layer.iter().enumerate().filter(|(at, bytes)| at / nodes != at % nodes && **bytes > 0) {
                let (from, to) = (at / nodes, at % nodes);
                let packet = bytes.min(self.packet_size_bytes);
                let bandwidth = self.bandwidth_bytes_per_ms(from, to);
                let key = match bandwidth == self.intra_bw_bytes_per_ms {
                    true => "intra_bw_bytes_per_ms",
                    false => "inter_bw_bytes_per_ms",
                };
                for (limit, key, what) in [
                    (bandwidth, key, "a link carries in a round"),
                    (self.nic_rate_bytes, "nic_rate_bytes", "a NIC takes in a round"),
                ] {
                    if packet as f64 > limit {
                        return Err(InputError::value(
                            "packet_size_bytes",
                            format!("is {}", self.packet_size_bytes),
                            format!(
                                "at most {limit} ({key}, the bytes that {what}): the {packet} bytes from node {from} to \
                                 node {to} would never fit"
                            ),
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Bytes by source and destination, for one layer or several.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Load {
    /// Number of nodes.
    pub nodes: usize,
    /// For each layer the bytes from node i to node j at `i * nodes + j`; the diagonal is not sent.
    pub layers: Vec<Vec<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLoad {
    load_bytes: Option<Vec<Vec<Count>>>,
    layers: Option<Vec<RawLayer>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLayer {
    load_bytes: Vec<Vec<Count>>,
}

impl Load {
    /// Creates a load from the `nodes` x `nodes` byte counts of each layer, by source, then destination.
    ///
    /// # Panics
    /// If the length of a layer is not `nodes * nodes`.
    pub fn new(nodes: usize, layers: Vec<Vec<u64>>) -> Load {
        assert!(layers.iter().all(|layer| layer.len() == nodes * nodes), "a number for each pair");
        Load { nodes, layers }
    }

    /// Reads a load file: `{"load_bytes": [[..], ..]}` with a list per source, or `{"layers": [{"load_bytes": ..}, ..]}`.
    ///
    /// # Errors
    /// Returns an error that names the file, the field, its value and the values allowed.
    pub fn read(path: &Path) -> Result<Load, InputError> {
        Load::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses a load from JSON text.
    ///
    /// # Errors
    /// Returns the errors of [`Load::read`], without the name of the file.
    pub fn from_json(text: &str) -> Result<Load, InputError> {
        let raw: RawLoad = parse_json(text)?;
        let layers = match (raw.load_bytes, raw.layers) {
            (Some(bytes), None) => vec![(String::new(), bytes)],
            (None, Some(layers)) => {
                let named = |(l, layer): (usize, RawLayer)| (format!("layers[{l}]."), layer.load_bytes);
                layers.into_iter().enumerate().map(named).collect()
            }
            (None, None) => return Err(InputError::value("load_bytes", "is missing", "it, or layers")),
            (Some(_), Some(_)) => {
                return Err(InputError::value("layers", "is there beside load_bytes", "one of them"));
            }
        };
        let Some((_, first)) = layers.first() else {
            return Err(InputError::value("layers", "is empty", "at least one layer"));
        };
        let nodes = first.len();
        let mut all = Vec::with_capacity(layers.len());
        for (layer, rows) in &layers {
            if rows.is_empty() || rows.len() > NODES_MOST {
                let found = if rows.is_empty() { "is empty".into() } else { format!("has {} rows", rows.len()) };
                let expected = format!("1 to {NODES_MOST} rows, one for each source");
                return Err(InputError::value(format!("{layer}load_bytes"), found, expected));
            }
            if rows.len() != nodes {
                let found = format!("has {} rows", rows.len());
                return Err(InputError::value(
                    format!("{layer}load_bytes"),
                    found,
                    format!("{nodes}, as layers[0] has"),
                ));
            }
            let mut flat = Vec::with_capacity(nodes * nodes);
            for (from, row) in rows.iter().enumerate() {
                if row.len() != nodes {
                    let found = format!("has {} numbers", row.len());
                    let expected = format!("{nodes}, one for each destination");
                    return Err(InputError::value(format!("{layer}load_bytes[{from}]"), found, expected));
                }
                flat.extend(row.iter().enumerate().map(|(to, bytes)| if from == to { 0 } else { bytes.0 }));
            }
            all.push(flat);
        }
        Load { nodes, layers: all }.checked()
    }

    /// Checks that a load of `layers` layers between `nodes` nodes can be stored and simulated.
    pub(crate) fn check_size(nodes: usize, layers: usize) -> Result<(), InputError> {
        if nodes > NODES_MOST {
            return Err(InputError::value("nodes", format!("is {nodes}"), format!("at most {NODES_MOST} in a load")));
        }
        let most = NUMBERS_MOST / (nodes * nodes).max(1);
        match layers <= most {
            true => Ok(()),
            false => {
                Err(InputError::value("layers", format!("are {layers}"), format!("at most {most} of {nodes} nodes")))
            }
        }
    }

    /// Returns the load, or an error if a layer's sum of bytes exceeds `BYTES_MOST`.
    pub(crate) fn checked(self) -> Result<Load, InputError> {
        for (l, layer) in self.layers.iter().enumerate() {
            let sum: u128 = layer.iter().map(|bytes| u128::from(*bytes)).sum();
            if sum > u128::from(BYTES_MOST) {
                let field =
                    if self.layers.len() == 1 { "load_bytes".into() } else { format!("layers[{l}].load_bytes") };
                let found = format!("has {sum} bytes in all");
                return Err(InputError::value(field, found, format!("at most {BYTES_MOST}")));
            }
        }
        Ok(self)
    }

    /// The load as JSON text.
    pub fn to_json(&self) -> String {
        let rows = |layer: &Vec<u64>| serde_json::json!({"load_bytes": layer.chunks(self.nodes).collect::<Vec<_>>()});
        match &self.layers[..] {
            [layer] => rows(layer).to_string(),
            layers => serde_json::json!({"layers": layers.iter().map(rows).collect::<Vec<_>>()}).to_string(),
        }
    }
}
