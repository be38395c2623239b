//! The time of a linear layer from its FLOP and its data movement.
//!
//! The FLOP, the global-memory traffic and the tensor-parallel all-reduces of a forward and backward are assumed to overlap perfectly, so
//! its time is the longest of the three times. The formulae are those of the data-movement notebook that `docs/simulator.md` names.

use std::path::Path;

use aristos_formats::InputError;
use aristos_formats::cluster::{Count, Number, Range, parse_json, read_text};
use serde::{Deserialize, Serialize};

/// The figures of a device that the model uses.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Device {
    /// Name.
    pub name: String,
    /// Dense FLOP/s with elements of 8 bits. With elements of w bytes the rate is 1/w of this.
    pub flop_per_s_8bit: f64,
    /// Bandwidth of global memory, B/s.
    pub global_bytes_per_s: f64,
    /// Bandwidth of the network between the devices, B/s.
    pub net_bytes_per_s: f64,
    /// Fraction of the FLOP/s and of the global-memory bandwidth that is reached, above 0 and at most 1. The network's bandwidth is reached
    /// fully.
    pub base_util: f64,
}

/// Published figures of a device, and their source.
struct Preset {
    name: &'static str,
    flop_per_s_8bit: f64,
    global_bytes_per_s: f64,
    net_bytes_per_s: f64,
    source: &'static str,
}

const PRESETS: [Preset; 6] = [
    Preset {
        name: "V100",
        flop_per_s_8bit: 250e12,
        global_bytes_per_s: 900e9,
        net_bytes_per_s: 300e9,
        source: "NVIDIA V100 data sheet, SXM2: 125 TFLOP/s of FP16 tensor cores, which do not know 8 bits, so twice that stands for them; \
                 900 GB/s; NVLink 300 GB/s",
    },
    Preset {
        name: "A100-40GB",
        flop_per_s_8bit: 624e12,
        global_bytes_per_s: 1555e9,
        net_bytes_per_s: 600e9,
        source: "NVIDIA A100 data sheet, 40 GB SXM: 624 TOP/s INT8, dense; 1,555 GB/s; NVLink 600 GB/s",
    },
    Preset {
        name: "A100-80GB",
        flop_per_s_8bit: 624e12,
        global_bytes_per_s: 2039e9,
        net_bytes_per_s: 600e9,
        source: "NVIDIA A100 data sheet, 80 GB SXM: 624 TOP/s INT8, dense; 2,039 GB/s; NVLink 600 GB/s",
    },
    Preset {
        name: "H100",
        flop_per_s_8bit: 1979e12,
        global_bytes_per_s: 3352e9,
        net_bytes_per_s: 900e9,
        source: "NVIDIA H100 data sheet, SXM5: 1,979 TFLOP/s FP8, dense (half of what it gives with sparsity); 3.35 TB/s, to four digits as \
                 in the data-movement notebook; NVLink 900 GB/s",
    },
    Preset {
        name: "H200",
        flop_per_s_8bit: 1979e12,
        global_bytes_per_s: 4800e9,
        net_bytes_per_s: 900e9,
        source: "NVIDIA H200 data sheet, SXM: 1,979 TFLOP/s FP8, dense (half of what it gives with sparsity); 4.8 TB/s; NVLink 900 GB/s",
    },
    Preset {
        name: "B200",
        flop_per_s_8bit: 4500e12,
        global_bytes_per_s: 8000e9,
        net_bytes_per_s: 1800e9,
        source: "NVIDIA DGX B200 data sheet, an eighth of the machine: 4.5 PFLOP/s FP8, dense (half of what it gives with sparsity); 8 TB/s; \
                 NVLink 1.8 TB/s",
    },
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDevice {
    name: String,
    flop_per_sec_8bit: Number,
    #[serde(rename = "global_Bps")]
    global_bps: Number,
    #[serde(rename = "net_Bps")]
    net_bps: Number,
    base_util: Option<Number>,
}

/// Default of `base_util`.
const BASE_UTIL: f64 = 0.8;

impl Device {
    /// Returns the preset device of this name, one of [`Device::presets`]. Only letters and digits are compared, without case, and a final
    /// "GB" may be omitted.
    ///
    /// # Errors
    /// Returns an error that lists the names if there is no such preset.
    pub fn preset(name: &str) -> Result<Device, InputError> {
        let plain = |name: &str| {
            let word: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
            word.to_ascii_lowercase().trim_end_matches("gb").to_string()
        };
        let Some(preset) = PRESETS.iter().find(|preset| plain(preset.name) == plain(name)) else {
            let names = PRESETS.each_ref().map(|preset| preset.name).join(", ");
            let expected = format!("a file, or one of {names}");
            return Err(InputError::value("`device`", format!("is {name}"), expected));
        };
        Ok(Device {
            name: preset.name.to_string(),
            flop_per_s_8bit: preset.flop_per_s_8bit,
            global_bytes_per_s: preset.global_bytes_per_s,
            net_bytes_per_s: preset.net_bytes_per_s,
            base_util: BASE_UTIL,
        })
    }

    /// The names of the presets, each with the source of its figures.
    pub fn presets() -> impl Iterator<Item = (&'static str, &'static str)> {
        PRESETS.iter().map(|preset| (preset.name, preset.source))
    }

    /// Reads a device file: `name`, `flop_per_sec_8bit`, `global_Bps`, `net_Bps`, and `base_util` (default 0.8).
    ///
    /// # Errors
    /// Returns an error that names the file, the field, its value and the values allowed.
    pub fn read(path: &Path) -> Result<Device, InputError> {
        Device::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses a device from JSON text.
    ///
    /// # Errors
    /// Returns the errors of [`Device::read`], without the name of the file.
    pub fn from_json(text: &str) -> Result<Device, InputError> {
        let raw: RawDevice = parse_json(text)?;
        let positive = |number: Number, field: &str| Range::Positive.check(number.0, || field.to_string());
        let base_util = raw.base_util.map_or(BASE_UTIL, |number| number.0);
        if !(base_util > 0.0 && base_util <= 1.0) {
            return Err(InputError::value("base_util", format!("is {base_util:?}"), "a number above 0, at most 1"));
        }
        Ok(Device {
            name: raw.name,
            flop_per_s_8bit: positive(raw.flop_per_sec_8bit, "flop_per_sec_8bit")?,
            global_bytes_per_s: positive(raw.global_bps, "global_Bps")?,
            net_bytes_per_s: positive(raw.net_bps, "net_Bps")?,
            base_util: Range::Positive.check(base_util, || "base_util".to_string())?,
        })
    }
}

/// A linear layer that is split over devices. The degrees need not divide the dimensions.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LinearLayer {
    /// Input dimension, elements.
    pub d_in: f64,
    /// Output dimension, elements.
    pub d_out: f64,
    /// Tensor-parallel degree of the input dimension.
    pub tp_in: f64,
    /// Tensor-parallel degree of the output dimension.
    pub tp_out: f64,
    /// Data-parallel degree.
    pub dp: f64,
    /// Bytes of an element.
    pub bytewidth: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLayer {
    d_in: Count,
    d_out: Count,
    tp_in: Count,
    tp_out: Count,
    dp: Count,
    bytewidth: Number,
}

/// The time of a layer and its parts, s.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LinearTime {
    /// Forward and backward of the tokens: the largest of the three parts below.
    pub fwd_bwd_s: f64,
    /// All-reduce of the weight gradients at the end of a batch.
    pub end_of_batch_s: f64,
    /// Time of the FLOP alone.
    pub flop_s: f64,
    /// Time of the global-memory traffic alone.
    pub global_io_s: f64,
    /// Time of the tensor-parallel all-reduces alone.
    pub net_io_s: f64,
    /// The largest of the three parts.
    pub bottleneck: Bottleneck,
}

/// The resource that bounds a layer's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// FLOP.
    Flop,
    /// Global-memory traffic.
    GlobalIo,
    /// The network.
    NetIo,
}

impl LinearLayer {
    /// Reads a layer file: `d_in`, `d_out`, `tp_in`, `tp_out`, `dp` and `bytewidth`.
    ///
    /// # Errors
    /// Returns an error that names the file, the field, its value and the values allowed.
    pub fn read(path: &Path) -> Result<LinearLayer, InputError> {
        LinearLayer::from_json(&read_text(path)?).map_err(|error| error.in_file(path))
    }

    /// Parses a layer from JSON text.
    ///
    /// # Errors
    /// Returns the errors of [`LinearLayer::read`], without the name of the file.
    pub fn from_json(text: &str) -> Result<LinearLayer, InputError> {
        let raw: RawLayer = parse_json(text)?;
        let count = |count: Count, field: &str| match count.0 {
            0 => Err(InputError::value(field, "is 0", "at least 1")),
            count => Ok(count as f64),
        };
        Ok(LinearLayer {
            d_in: count(raw.d_in, "d_in")?,
            d_out: count(raw.d_out, "d_out")?,
            tp_in: count(raw.tp_in, "tp_in")?,
            tp_out: count(raw.tp_out, "tp_out")?,
            dp: count(raw.dp, "dp")?,
            bytewidth: Range::Positive.check(raw.bytewidth.0, || "bytewidth".to_string())?,
        })
    }

    /// The time on `device` for `tokens` tokens (above 0), summed over all data-parallel replicas.
    ///
    /// # Errors
    /// Returns an error if `tokens` is not a number above 0.
    pub fn time(&self, device: &Device, tokens: f64) -> Result<LinearTime, InputError> {
        let tokens = Range::Positive.check(tokens, || "`tokens`".to_string())?;
        let (d_in_local, d_out_local) = (self.d_in / self.tp_in, self.d_out / self.tp_out);
        let parameters = d_in_local * d_out_local;
        let tokens_local = tokens / self.dp;
        let forward = all_reduce_words(d_out_local * tokens_local, self.tp_in);
        let backward = all_reduce_words(d_in_local * tokens_local, self.tp_out);
        // Three products: the output, the gradient of the weights, and the gradient of the input.
        let flop = 3.0 * (2.0 * parameters * tokens_local);
        // Weights are read in forward and in backward, and their gradients are read and written. Backward reads the input again.
        let global_words = 4.0 * parameters + d_in_local * tokens_local + forward + backward;
        let net_words = forward + backward;
        let (flop_s, global_io_s, net_io_s) = (
            (flop * self.bytewidth) / (device.base_util * device.flop_per_s_8bit),
            self.global_s(device, global_words),
            self.net_s(device, net_words),
        );
        let gradients = all_reduce_words(parameters, self.dp);
        Ok(LinearTime {
            fwd_bwd_s: flop_s.max(global_io_s).max(net_io_s),
            end_of_batch_s: self.global_s(device, gradients).max(self.net_s(device, gradients)),
            flop_s,
            global_io_s,
            net_io_s,
            bottleneck: if flop_s >= global_io_s && flop_s >= net_io_s {
                Bottleneck::Flop
            } else if global_io_s >= net_io_s {
                Bottleneck::GlobalIo
            } else {
                Bottleneck::NetIo
            },
        })
    }

    fn global_s(&self, device: &Device, words: f64) -> f64 {
        (words * self.bytewidth) / (device.base_util * device.global_bytes_per_s)
    }

    fn net_s(&self, device: &Device, words: f64) -> f64 {
        (words * self.bytewidth) / device.net_bytes_per_s
    }
}

/// Words that a device sends and receives in an all-reduce of `n` words over `p` devices, each of which sums a part of n/p words. The
/// device sends p - 1 parts to the devices that sum them, receives p - 1 copies of its own part, and receives p - 1 sums. Multicasting its
/// own sum is free.
fn all_reduce_words(n: f64, p: f64) -> f64 {
    3.0 * (p - 1.0) * n / p
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(text: &str) -> LinearLayer {
        LinearLayer::from_json(text).unwrap()
    }

    #[test]
    fn notebook_value_is_reproduced() {
        let layer = layer(r#"{"d_in": 16384, "d_out": 81920, "tp_in": 8, "tp_out": 40, "dp": 32, "bytewidth": 2}"#);
        let time = layer.time(&Device::preset("h100").unwrap(), 32768.0).unwrap();
        assert_eq!(time.fwd_bwd_s, 3.2554072481051035e-05);
        assert_eq!(time.bottleneck, Bottleneck::Flop);
    }

    #[test]
    fn small_layer_by_hand() {
        // A device has 4 x 2 weights of 2 bytes and 3 tokens. Half of 1 FLOP/s and of 1 B/s is reached.
        let device = r#"{"name": "d", "flop_per_sec_8bit": 1, "global_Bps": 1, "net_Bps": 1, "base_util": 0.5}"#;
        let device = Device::from_json(device).unwrap();
        let layer = layer(r#"{"d_in": 8, "d_out": 6, "tp_in": 2, "tp_out": 3, "dp": 5, "bytewidth": 2}"#);
        let time = layer.time(&device, 15.0).unwrap();
        // Three products of 2 * 8 * 3 FLOP, times 2 for elements of 2 bytes, times 2 for half the rate.
        assert_eq!(time.flop_s, 144.0 * 4.0);
        // All-reduces: 3 * (2 - 1) * (2 * 3) / 2 = 9 words in forward, and 3 * (3 - 1) * (4 * 3) / 3 = 24 words in backward.
        assert_eq!(time.net_io_s, 33.0 * 2.0);
        // 4 * 8 words of weights and their gradients, 4 * 3 of activations, and those of the all-reduces.
        assert_eq!(time.global_io_s, (32.0 + 12.0 + 33.0) * 4.0);
        assert_eq!((time.fwd_bwd_s, time.bottleneck), (576.0, Bottleneck::Flop));
        // The all-reduce of the gradients has 3 * (5 - 1) * 8 / 5 words; memory at half its rate is the limit.
        assert!((time.end_of_batch_s - 19.2 * 4.0).abs() < 1e-12);
    }

    #[test]
    fn slowest_resource_binds() {
        let layer = layer(r#"{"d_in": 8, "d_out": 6, "tp_in": 2, "tp_out": 3, "dp": 1, "bytewidth": 1}"#);
        for (flop, global, net, bound) in [
            (1.0, 1e9, 1e9, Bottleneck::Flop),
            (1e9, 1.0, 1e9, Bottleneck::GlobalIo),
            (1e9, 1e9, 1.0, Bottleneck::NetIo),
        ] {
            let device = Device {
                name: "d".into(),
                flop_per_s_8bit: flop,
                global_bytes_per_s: global,
                net_bytes_per_s: net,
                base_util: 1.0,
            };
            let time = layer.time(&device, 3.0).unwrap();
            assert_eq!(time.bottleneck, bound);
            assert_eq!(time.fwd_bwd_s, time.flop_s.max(time.global_io_s).max(time.net_io_s));
        }
    }

    #[test]
    fn bad_input_is_reported_in_one_line() {
        let device = |text: &str| Device::from_json(text).unwrap_err().to_string();
        let error = device(r#"{"name": "d", "flop_per_sec_8bit": -1, "global_Bps": 1, "net_Bps": 1}"#);
        assert_eq!(error, "flop_per_sec_8bit is -1.0, expected a number from 1e-30 to 1e30");
        let error = device(r#"{"name": "d", "flop_per_sec_8bit": 1, "global_Bps": 1, "net_Bps": 1, "base_util": 1.5}"#);
        assert_eq!(error, "base_util is 1.5, expected a number above 0, at most 1");
        let error = device(r#"{"name": "d", "flop_per_sec_8bit": NaN}"#);
        assert!(error.contains("flop_per_sec_8bit") && error.contains("`NaN` is not JSON"), "{error}");
        let layer = |text: &str| LinearLayer::from_json(text).unwrap_err().to_string();
        let error = layer(r#"{"d_in": 8, "d_out": 6, "tp_in": 0, "tp_out": 3, "dp": 1, "bytewidth": 1}"#);
        assert_eq!(error, "tp_in is 0, expected at least 1");
        let error = layer(r#"{"d_in": 8.5, "d_out": 6, "tp_in": 1, "tp_out": 3, "dp": 1, "bytewidth": 1}"#);
        assert!(error.starts_with("d_in: ") && error.contains("8.5"), "{error}");
        assert!(layer(r#"{"d_in": 8}"#).contains("d_out"));
        let good = super::LinearLayer::from_json(
            r#"{"d_in": 8, "d_out": 6, "tp_in": 1, "tp_out": 3, "dp": 1, "bytewidth": 1}"#,
        )
        .unwrap();
        let device = Device::preset("V100").unwrap();
        for tokens in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = good.time(&device, tokens).unwrap_err().to_string();
            assert!(error.starts_with("`tokens` is "), "{error}");
        }
        for name in ["A100-40GB", "a100-40", "A100 40 GB"] {
            assert_eq!(Device::preset(name).unwrap().name, "A100-40GB");
        }
        assert!(Device::preset("A100").is_err());
        assert!(Device::preset("H300").unwrap_err().to_string().contains("A100-80GB"));
    }
}
