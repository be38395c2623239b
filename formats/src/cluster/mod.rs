//! A cluster: its devices, the links between them, and the files that describe one.
//!
//! Links have a latency alpha and an inverse bandwidth beta per ordered pair of devices, either written out as two
//! matrices ([`Matrix`]) or as nested blocks of consecutive devices ([`Tiers`]), which never become a matrix: a cluster of
//! many thousand devices is a few numbers then.
//!
//! Times are milliseconds, sizes megabytes of 10^6 bytes, rates FLOP per millisecond, as in the files.

mod json;
mod links;
mod presets;

use std::collections::{BTreeMap, HashMap};

pub use links::{Edge, Link, LinkTable, Links, Matrix, Slowness, Tier, Tiers, TiersError};
pub use presets::{PRESETS, preset};
use serde::{Deserialize, Serialize};

pub use crate::json::{Count, Number, Range, parse_json, read_text};

/// One device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Device {
    /// Its id, unique in the cluster.
    pub id: u64,
    /// The host it is in.
    pub host: String,
    /// Its rate in the experts' matrix products, FLOP per millisecond.
    pub flop_per_ms: f64,
    /// How many experts of a layer its memory holds; where `memory_mb` is there and the workload says how large an expert is, those decide.
    pub memory_experts: u64,
    /// What it has for experts and their state, MB (10^6 bytes).
    pub memory_mb: Option<f64>,
}

impl Device {
    /// A device: its id, its host, its rate (FLOP per millisecond), and how many experts it holds.
    pub fn new(id: u64, host: impl Into<String>, flop_per_ms: f64, memory_experts: u64) -> Device {
        Device { id, host: host.into(), flop_per_ms, memory_experts, memory_mb: None }
    }

    /// The device with so many MB (10^6 bytes) for experts and their state.
    pub fn memory_mb(self, memory_mb: f64) -> Device {
        Device { memory_mb: Some(memory_mb), ..self }
    }
}

/// How a cluster was probed, beside what came of it: what says how far the figures can be trusted. The planner does not look at it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// What the PEs talked over.
    pub transport: String,
    /// Sizes of the messages, bytes.
    pub sizes_bytes: Vec<usize>,
    /// The size that all sent at once, bytes.
    pub together_bytes: usize,
    /// By ordered pair, of the fit: median of |time - fitted time| / time; 0 on the diagonal.
    pub residual: Vec<Vec<f64>>,
    /// By ordered pair: time while every PE sends to one other and takes from one, over the time alone; 1 on the diagonal.
    pub contention: Vec<Vec<f64>>,
    /// By PE: time of everyone sending to everyone, over the sum of the PE's times alone.
    pub exchange_factor: Vec<f64>,
}

impl Probe {
    /// Times with no larger residual are a line's.
    pub const FITS: f64 = 0.25;
    /// The largest residual that a plan should be made on.
    pub const USABLE: f64 = 0.5;

    /// The links whose times fit a line worse than `limit`, as ordered pairs of devices by their places, with their residuals.
    pub fn wild_links(&self, limit: f64) -> Vec<(usize, usize, f64)> {
        let all = self.residual.iter().enumerate();
        let all = all.flat_map(|(i, row)| row.iter().enumerate().map(move |(j, residual)| (i, j, *residual)));
        all.filter(|(i, j, residual)| i != j && *residual > limit).collect()
    }
}

/// Devices and links.
///
/// ```
/// use aristos_formats::cluster::{Cluster, LinkTable};
///
/// let cluster = Cluster::from_json(
///     r#"{"version": 1,
///         "devices": [{"id": 7, "host": "a", "flop_per_ms": 1e9, "memory_experts": 4},
///                     {"id": 9, "host": "b", "flop_per_ms": 2e9, "memory_experts": 8}],
///         "links": {"alpha_ms": [[0, 0.01], [0.01, 0]], "beta_ms_per_mb": [[0, 0.05], [0.1, 0]]}}"#,
/// )?;
/// // 2 MB from device 9 to device 7.
/// assert!((cluster.links.link(1, 0).time_ms(2.0) - 0.21).abs() < 1e-12);
/// assert_eq!(Cluster::from_json(&cluster.to_json())?, cluster);
///
/// let error = Cluster::from_json(r#"{"version": 2, "devices": [], "links": {}}"#).unwrap_err();
/// assert_eq!(error.to_string(), "version is 2, expected 1");
/// # Ok::<(), aristos_formats::InputError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Cluster {
    /// The devices; everywhere else a device is its index here.
    pub devices: Vec<Device>,
    /// The links between them.
    pub links: Links,
    /// Where the figures come from, by what they are; empty when nobody said.
    pub sources: BTreeMap<String, String>,
    /// How it was probed, where it was.
    pub probe: Option<Probe>,
}

impl Cluster {
    /// Devices and the links between as many, in the same order.
    pub fn new(devices: Vec<Device>, links: Links) -> Cluster {
        Cluster { devices, links, sources: BTreeMap::new(), probe: None }
    }

    /// The devices of each host, ascending; the hosts in the order of first appearance.
    pub fn hosts(&self) -> Vec<Vec<u32>> {
        let mut place: HashMap<&str, usize> = HashMap::new();
        let mut hosts: Vec<Vec<u32>> = Vec::new();
        for (i, device) in self.devices.iter().enumerate() {
            let host = *place.entry(&device.host).or_insert(hosts.len());
            if host == hosts.len() {
                hosts.push(Vec::new());
            }
            hosts[host].push(i as u32);
        }
        hosts
    }
}
