//! Cluster files.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::links::{Link, Links, Matrix, Tier, Tiers, TiersError};
use super::{Cluster, Device, Probe};
use crate::error::InputError;
use crate::json::{Count, Number, Range, parse_json, read_text};

/// Version of the file format.
const VERSION: u64 = 1;

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawCluster {
    version: Count,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    sources: BTreeMap<String, String>,
    devices: Vec<RawDevice>,
    links: RawLinks,
    probe: Option<Probe>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawDevice {
    id: Count,
    host: String,
    flop_per_ms: Number,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_experts: Option<Count>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_mb: Option<Number>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawLinks {
    alpha_ms: Option<Vec<Vec<Number>>>,
    beta_ms_per_mb: Option<Vec<Vec<Number>>>,
    tiers: Option<Vec<RawTier>>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawTier {
    size: Count,
    alpha_ms: Number,
    beta_ms_per_mb: Number,
}

impl Cluster {
    /// Reads a cluster file.
    ///
    /// # Errors
    /// Returns an error that names the file, the path in it, the value, and the values allowed.
    pub fn read(path: &Path) -> Result<Cluster, InputError> {
        let text = read_text(path)?;
        Cluster::from_json(&text).map_err(|error| error.in_file(path))
    }

    /// Parses a cluster from JSON text.
    ///
    /// # Errors
    /// Those of [`Cluster::read`], without the file.
    pub fn from_json(text: &str) -> Result<Cluster, InputError> {
        let raw: RawCluster = parse_json(text)?;
        if raw.version.0 != VERSION {
            return Err(InputError::value("version", format!("is {}", raw.version.0), VERSION.to_string()));
        }
        if raw.devices.is_empty() {
            return Err(InputError::value("devices", "is empty", "at least one device"));
        }
        if raw.devices.len() > u32::MAX as usize {
            let found = format!("has {} entries", raw.devices.len());
            return Err(InputError::value("devices", found, format!("at most {}", u32::MAX)));
        }
        let mut places = HashMap::new();
        let mut devices = Vec::with_capacity(raw.devices.len());
        for (place, device) in raw.devices.into_iter().enumerate() {
            if let Some(first) = places.insert(device.id.0, place) {
                let (field, found) = (format!("devices[{place}].id"), format!("is {}", device.id.0));
                return Err(InputError::value(field, found, format!("another id: devices[{first}] has it")));
            }
            let flop_per_ms =
                Range::Positive.check(device.flop_per_ms.0, || format!("devices[{place}].flop_per_ms"))?;
            let check_mb = |mb: Number| Range::NonNegative.check(mb.0, || format!("devices[{place}].memory_mb"));
            let memory_mb = device.memory_mb.map(check_mb).transpose()?;
            let memory_experts = match (device.memory_experts, memory_mb) {
                (Some(count), _) => count.0,
                // The workload determines the number of experts.
                (None, Some(_)) => 0,
                (None, None) => {
                    let field = format!("devices[{place}].memory_experts");
                    return Err(InputError::value(field, "is missing", "a number of experts, or memory_mb"));
                }
            };
            devices.push(Device { id: device.id.0, host: device.host, flop_per_ms, memory_experts, memory_mb });
        }
        let n = devices.len();
        let links = links(n, raw.links)?;
        if let Some(probe) = &raw.probe {
            for (key, rows) in [("residual", &probe.residual), ("contention", &probe.contention)] {
                one_per_device(n, rows.len(), "rows", || format!("probe.{key}"))?;
                for (i, row) in rows.iter().enumerate() {
                    one_per_device(n, row.len(), "numbers", || format!("probe.{key}[{i}]"))?;
                }
            }
            one_per_device(n, probe.exchange_factor.len(), "numbers", || "probe.exchange_factor".into())?;
        }
        Ok(Cluster { devices, links, sources: raw.sources, probe: raw.probe })
    }

    /// The cluster as JSON text, one device or matrix row per line.
    pub fn to_json(&self) -> String {
        let device = |d: &Device| {
            line(&RawDevice {
                id: Count(d.id),
                host: d.host.clone(),
                flop_per_ms: Number(d.flop_per_ms),
                memory_experts: (d.memory_mb.is_none() || d.memory_experts > 0).then_some(Count(d.memory_experts)),
                memory_mb: d.memory_mb.map(Number),
            })
        };
        let devices = self.devices.iter().map(device).collect::<Vec<_>>().join(",\n    ");
        let links = match &self.links {
            Links::Matrix(matrix) => {
                let rows = |row: &dyn Fn(usize) -> String| {
                    (0..self.devices.len()).map(row).collect::<Vec<_>>().join(",\n      ")
                };
                let alpha = rows(&|i| line(&matrix.alpha_row(i)));
                let beta = rows(&|i| line(&matrix.beta_row(i)));
                format!("\"alpha_ms\": [\n      {alpha}],\n    \"beta_ms_per_mb\": [\n      {beta}]")
            }
            Links::Tiers(tiers) => {
                let tier = |t: &Tier| {
                    line(&RawTier {
                        size: Count(t.size as u64),
                        alpha_ms: Number(t.link.alpha_ms),
                        beta_ms_per_mb: Number(t.link.beta_ms_per_mb),
                    })
                };
                let tiers = tiers.tiers().iter().map(tier).collect::<Vec<_>>().join(",\n      ");
                format!("\"tiers\": [\n      {tiers}]")
            }
        };
        let sources = match self.sources.is_empty() {
            true => String::new(),
            false => format!(
                "  \"sources\": {},\n",
                serde_json::to_string_pretty(&self.sources).expect("a map of strings").replace('\n', "\n  ")
            ),
        };
        let probe = self.probe.as_ref().map_or(String::new(), |probe| {
            let rows = |rows: &[Vec<f64>]| rows.iter().map(line).collect::<Vec<_>>().join(",\n      ");
            format!(
                ",\n  \"probe\": {{\n    \"transport\": {},\n    \"sizes_bytes\": {},\n    \"together_bytes\": {},\n    \
                 \"residual\": [\n      {}],\n    \"contention\": [\n      {}],\n    \"exchange_factor\": {}}}",
                line(&probe.transport),
                line(&probe.sizes_bytes),
                line(&probe.together_bytes),
                rows(&probe.residual),
                rows(&probe.contention),
                line(&probe.exchange_factor)
            )
        });
        format!(
            "{{\n  \"version\": {VERSION},\n{sources}  \"devices\": [\n    {devices}],\n  \"links\": {{\n    {links}}}{probe}\n}}\n"
        )
    }
}

/// A value as one line of JSON.
fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers and strings only")
}

/// Checks that a list has `n` entries.
fn one_per_device(n: usize, found: usize, what: &str, field: impl FnOnce() -> String) -> Result<(), InputError> {
    match found == n {
        true => Ok(()),
        false => Err(InputError::value(field(), format!("has {found} {what}"), format!("{n}, one per device"))),
    }
}

fn links(n: usize, raw: RawLinks) -> Result<Links, InputError> {
    let wrong = InputError::value::<&str, &str, &str>;
    match (raw.alpha_ms, raw.beta_ms_per_mb, raw.tiers) {
        (Some(alpha), Some(beta), None) => {
            let alpha = matrix(n, &alpha, "alpha_ms")?;
            let beta = matrix(n, &beta, "beta_ms_per_mb")?;
            Ok(Links::Matrix(Matrix::new(n, alpha, beta)))
        }
        (None, None, Some(raw)) => {
            let mut tiers = Vec::with_capacity(raw.len());
            for (place, tier) in raw.iter().enumerate() {
                let check = |value: Number, key: &str| {
                    Range::NonNegative.check(value.0, || format!("links.tiers[{place}].{key}"))
                };
                tiers.push(Tier {
                    size: tier.size.0 as usize,
                    link: Link {
                        alpha_ms: check(tier.alpha_ms, "alpha_ms")?,
                        beta_ms_per_mb: check(tier.beta_ms_per_mb, "beta_ms_per_mb")?,
                    },
                });
            }
            let tiers = Tiers::new(n, tiers).map_err(|TiersError { index, expected }| match raw.get(index) {
                Some(tier) => {
                    InputError::value(format!("links.tiers[{index}].size"), format!("is {}", tier.size.0), expected)
                }
                None => InputError::value("links.tiers", "is empty", expected),
            })?;
            Ok(Links::Tiers(tiers))
        }
        (None, None, None) => Err(wrong("links", "is empty", "alpha_ms and beta_ms_per_mb, or tiers")),
        (Some(_), None, None) => Err(wrong("links:", "missing field `beta_ms_per_mb`", "it beside alpha_ms")),
        (None, Some(_), None) => Err(wrong("links:", "missing field `alpha_ms`", "it beside beta_ms_per_mb")),
        (_, _, Some(_)) => Err(wrong("links", "has tiers and matrices", "one or the other")),
    }
}

fn matrix(n: usize, rows: &[Vec<Number>], key: &str) -> Result<Vec<f64>, InputError> {
    one_per_device(n, rows.len(), "rows", || format!("links.{key}"))?;
    let mut flat = Vec::with_capacity(n * n);
    for (i, row) in rows.iter().enumerate() {
        one_per_device(n, row.len(), "numbers", || format!("links.{key}[{i}]"))?;
        for (j, number) in row.iter().enumerate() {
            // Values on the diagonal are ignored.
            let range = Range::NonNegative;
            flat.push(if i == j { 0.0 } else { range.check(number.0, || format!("links.{key}[{i}][{j}]"))? });
        }
    }
    Ok(flat)
}
