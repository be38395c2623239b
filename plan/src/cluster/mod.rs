//! A cluster: its devices, the links between them, and the files that describe one.
//!
//! Links have a latency alpha and an inverse bandwidth beta per ordered pair of devices, either written out as two
//! matrices ([`Matrix`]) or as nested blocks of consecutive devices ([`Tiers`]), which never become a matrix: a cluster of
//! many thousand devices is a few numbers then.
//!
//! Times are milliseconds, sizes megabytes of 10^6 bytes, rates FLOP per millisecond, as in the files.

mod fit;
mod json;
mod links;
mod presets;
mod probe;

use std::collections::{BTreeMap, HashMap};

pub use fit::{Fit, fit};
pub use json::{Count, Number, Probe, Range, parse_json, read_text};
pub use links::{Edge, Link, LinkTable, Links, Matrix, Slowness, Tier, Tiers, TiersError};
pub use presets::{PRESETS, preset};
pub use probe::{
    LinkProber, OwnDevice, ProbeError, ProbeOptions, ProbeStage, ProbedLinks, probe, probe_links, probe_links_by,
};

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

/// Devices and links.
///
/// ```
/// use aristos_plan::cluster::{Cluster, LinkTable};
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
/// # Ok::<(), aristos_plan::InputError>(())
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
