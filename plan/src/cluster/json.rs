//! Cluster files, and what reading any of the planner's files needs: every error is one line that names the file, the
//! path inside it, the value there, and what is right.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer, Error, Unexpected, Visitor};
use serde::{Deserialize, Serialize};

use super::links::{Link, Links, Matrix, Tier, Tiers, TiersError};
use super::{Cluster, Device};
use crate::InputError;

/// The version of the files.
const VERSION: u64 = 1;

/// Numbers beyond these, or nearer to zero, would overflow in sums and products; no unit that the files use has them.
const LARGEST: f64 = 1e30;
const SMALLEST: f64 = 1e-30;
/// Counts beyond this are not exact as floating-point numbers.
const LARGEST_COUNT: u64 = 1_000_000_000_000_000;

/// What is read as text is no larger. Its numbers take a few times as much of memory.
const LARGEST_FILE_BYTES: u64 = 32 << 20;

/// Which numbers a field takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// Above zero.
    Positive,
    /// Zero or above.
    NonNegative,
}

impl Range {
    /// Checks a number.
    ///
    /// # Errors
    /// One line: `PATH is VALUE, expected ...`, where `path` says what PATH is.
    pub fn check(self, value: f64, path: impl FnOnce() -> String) -> Result<f64, InputError> {
        let zero = value == 0.0 && self == Range::NonNegative;
        if zero || (SMALLEST..=LARGEST).contains(&value) {
            return Ok(value);
        }
        let expected = match self {
            Range::Positive => format!("a number from {SMALLEST:e} to {LARGEST:e}"),
            Range::NonNegative => format!("0 or a number from {SMALLEST:e} to {LARGEST:e}"),
        };
        Err(InputError::value(path(), format!("is {value:?}"), expected))
    }
}

/// The text of a regular file. (To open a named pipe would be to wait for its writer.)
///
/// # Errors
/// One line that names the file.
pub fn read_text(path: &Path) -> Result<String, InputError> {
    let unreadable = |reason: String| InputError::Unreadable { path: path.to_path_buf(), reason };
    let meta = std::fs::metadata(path).map_err(|error| unreadable(error.to_string()))?;
    if !meta.is_file() {
        return Err(unreadable("it is not a regular file".into()));
    }
    if meta.len() > LARGEST_FILE_BYTES {
        return Err(unreadable(format!("it has {} bytes, at most {LARGEST_FILE_BYTES} are read", meta.len())));
    }
    // No more than it says it has: some files of the system have no size, and no end.
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(meta.len()).read_to_end(&mut bytes));
    read.map_err(|error| unreadable(error.to_string()))?;
    String::from_utf8(bytes).map_err(|_| unreadable("it is not UTF-8 text".into()))
}

/// Reads JSON.
///
/// # Errors
/// One line: the path inside the file, what is there and what was expected, and the line and column.
pub fn parse_json<T: DeserializeOwned>(text: &str) -> Result<T, InputError> {
    let mut json = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = match error.path().to_string() {
            path if path == "." => String::new(),
            path => format!("{path}: "),
        };
        let inner = error.inner();
        let message = match token_at(text, inner) {
            Some(token) => format!("{path}`{token}` is not JSON: {inner}"),
            None => format!("{path}{inner}"),
        };
        // A name in a file may have anything in it, and an error is one line.
        let shown = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() };
        InputError::Json(message.chars().map(shown).collect())
    })?;
    json.end().map_err(|error| InputError::Json(format!("expected nothing more: {error}")))?;
    Ok(value)
}

/// The word at a syntax error: `NaN`, `Infinity`.
fn token_at(text: &str, error: &serde_json::Error) -> Option<String> {
    if !error.is_syntax() {
        return None;
    }
    let line = text.lines().nth(error.line().checked_sub(1)?)?.as_bytes();
    let word = |b: u8| b.is_ascii_alphanumeric() || b"+-._".contains(&b);
    let at = error.column().checked_sub(1)?.min(line.len().checked_sub(1)?);
    let start = (0..=at).rev().take_while(|&i| word(line[i])).last()?;
    let end = (at..line.len()).take_while(|&i| word(line[i])).last()? + 1;
    let token: String = line[start..end].iter().take(40).map(|&b| b as char).collect();
    Some(token)
}

/// A number of a file, whole or not; [`Range`] says whether it will do.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Number(pub f64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        struct AnyNumber;
        impl Visitor<'_> for AnyNumber {
            type Value = Number;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number")
            }
            fn visit_f64<E: Error>(self, x: f64) -> Result<Number, E> {
                Ok(Number(x))
            }
            fn visit_u64<E: Error>(self, x: u64) -> Result<Number, E> {
                Ok(Number(x as f64))
            }
            fn visit_i64<E: Error>(self, x: i64) -> Result<Number, E> {
                Ok(Number(x as f64))
            }
        }
        deserializer.deserialize_any(AnyNumber)
    }
}

/// A whole number of a file, from 0 to 10^15; `32.0` is one too.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(transparent)]
pub struct Count(pub u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Count, D::Error> {
        struct WholeNumber;
        impl Visitor<'_> for WholeNumber {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a whole number from 0 to {LARGEST_COUNT}")
            }
            fn visit_u64<E: Error>(self, x: u64) -> Result<Count, E> {
                if x > LARGEST_COUNT {
                    return Err(E::invalid_value(Unexpected::Unsigned(x), &self));
                }
                Ok(Count(x))
            }
            fn visit_i64<E: Error>(self, x: i64) -> Result<Count, E> {
                u64::try_from(x).map(Count).map_err(|_| E::invalid_value(Unexpected::Signed(x), &self))
            }
            fn visit_f64<E: Error>(self, x: f64) -> Result<Count, E> {
                if x.fract() == 0.0 && (0.0..=LARGEST_COUNT as f64).contains(&x) {
                    return Ok(Count(x as u64));
                }
                Err(E::invalid_value(Unexpected::Float(x), &self))
            }
        }
        deserializer.deserialize_any(WholeNumber)
    }
}

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

/// How a cluster was probed, beside what came of it: what says how far the figures can be trusted. The planner does not look at it.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
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
    /// One line that names the file, the path inside it, what is there and what is right.
    pub fn read(path: &Path) -> Result<Cluster, InputError> {
        let text = read_text(path)?;
        Cluster::from_json(&text).map_err(|error| error.in_file(path))
    }

    /// A cluster from its JSON text.
    ///
    /// # Errors
    /// One line that names the path inside the text, what is there and what is right.
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
                // What it comes to in experts is for the workload to say.
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

    /// The cluster as JSON text, a device and a row of a matrix per line.
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

/// Anything as one line of JSON.
fn line(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("numbers and strings only")
}

/// Checks that there are `n`, where `found` are.
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
            // The diagonal is ignored, whatever it holds.
            let range = Range::NonNegative;
            flat.push(if i == j { 0.0 } else { range.check(number.0, || format!("links.{key}[{i}][{j}]"))? });
        }
    }
    Ok(flat)
}
