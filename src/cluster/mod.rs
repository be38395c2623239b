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

use std::collections::BTreeMap;

pub use fit::{Fit, fit};
pub(crate) use json::Number;
pub use json::{Probe, Range, parse_json, read_text};
pub use links::{Edge, Link, LinkTable, Links, Matrix, Rank, Tier, Tiers};
pub use presets::{PRESETS, preset};
pub use probe::{Own, ProbeError, ProbeOptions, ProbedLinks, Stage, probe, probe_links};

/// One device.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its id, unique in the cluster.
    pub id: u64,
    /// The host it is in.
    pub host: String,
    /// Its rate in the experts' matrix products, FLOP per millisecond.
    pub flop_per_ms: f64,
    /// How many experts its memory holds.
    pub memory_experts: u64,
}

/// Devices and links.
#[derive(Clone, Debug, PartialEq)]
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
