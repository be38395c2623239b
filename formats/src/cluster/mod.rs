//! Clusters: devices, links, and cluster files.
//!
//! Links have a latency alpha and an inverse bandwidth beta per ordered pair of devices. Both are given as two matrices ([`Matrix`]) or as
//! nested blocks of consecutive devices ([`Tiers`]). Tiers are never expanded to a matrix, so that clusters of thousands of devices stay
//! small.
//!
//! Times are ms, sizes MB of 10^6 bytes, rates FLOP per ms, as in the files.

mod json;
mod links;
mod presets;

use std::collections::{BTreeMap, HashMap};

pub use links::{Edge, Link, LinkTable, Links, Matrix, Slowness, Tier, Tiers, TiersError};
pub use presets::{PRESETS, preset};
use serde::{Deserialize, Serialize};

pub use crate::json::{Count, Number, Range, parse_json, read_text};

/// A device.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Device {
    /// Id, unique in the cluster.
    pub id: u64,
    /// Name of the host.
    pub host: String,
    /// Rate of the experts' GEMMs, FLOP per ms.
    pub flop_per_ms: f64,
    /// Experts of a layer that fit into its memory; overridden by `memory_mb` if the workload has the size of an expert.
    pub memory_experts: u64,
    /// Memory for experts and their training state, MB.
    pub memory_mb: Option<f64>,
}

impl Device {
    /// A device with an id, a host, a rate (FLOP per ms) and the number of experts that it holds.
    pub fn new(id: u64, host: impl Into<String>, flop_per_ms: f64, memory_experts: u64) -> Device {
        Device { id, host: host.into(), flop_per_ms, memory_experts, memory_mb: None }
    }

    /// Sets the memory for experts and their training state, MB.
    pub fn memory_mb(self, memory_mb: f64) -> Device {
        Device { memory_mb: Some(memory_mb), ..self }
    }
}

/// Details of a probe, which show how reliable its figures are. The planner does not use them.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Name of the transport.
    pub transport: String,
    /// Message sizes, bytes.
    pub sizes_bytes: Vec<usize>,
    /// Message size of the phases in which all PEs send at once, bytes.
    pub together_bytes: usize,
    /// By ordered pair, the fit's median of |time - fitted time| / time; 0 on the diagonal.
    pub residual: Vec<Vec<f64>>,
    /// By ordered pair, the time while each PE sends to one PE and receives from one, relative to the time alone; 1 on the diagonal.
    pub contention: Vec<Vec<f64>>,
    /// By PE, the time of an all-to-all relative to the sum of the PE's times alone.
    pub exchange_factor: Vec<f64>,
}

impl Probe {
    /// Maximum residual of a good fit.
    pub const FITS: f64 = 0.25;
    /// Maximum residual of links that a plan should be based on.
    pub const USABLE: f64 = 0.5;

    /// The links with a residual above `limit`, as ordered pairs of device indices, and their residuals.
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
    /// The devices. All other code refers to a device by its index here.
    pub devices: Vec<Device>,
    /// The links between them.
    pub links: Links,
    /// The sources of the figures, by name; may be empty.
    pub sources: BTreeMap<String, String>,
    /// Details of the probe, if the cluster was probed.
    pub probe: Option<Probe>,
}

impl Cluster {
    /// A cluster of devices and the links between them, in the same order.
    pub fn new(devices: Vec<Device>, links: Links) -> Cluster {
        Cluster { devices, links, sources: BTreeMap::new(), probe: None }
    }

    /// The device indices of each host, ascending; hosts in order of first appearance.
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
