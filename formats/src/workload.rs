//! The planner's workload: the experts' costs and the training schedule.

use std::borrow::Cow;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::error::InputError;
use crate::json::{Number, Range, parse_json, read_text};

/// The experts' costs and the training schedule, as the planner uses them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RawWorkload", into = "RawWorkload")]
pub struct Workload {
    /// FLOP of each expert in one pass of one MoE layer, for an even share of the tokens of one device's mini-batch.
    pub expert_flop: Vec<f64>,
    /// Each expert's share of the tokens, in any unit; weights the costs.
    pub expert_load: Option<Vec<f64>>,
    /// Device memory of one expert of one layer including its training state, MB; see
    /// [`Device::memory_mb`](crate::cluster::Device::memory_mb).
    pub expert_mb: Option<f64>,
    /// Data that a device sends in one dispatch or combine, local data included, MB.
    pub p2p_buffer_mb: f64,
    /// Exchanges per pass of a layer.
    pub p2p_frequency: f64,
    /// Gradients all-reduced between groups in an iteration, over all layers, MB.
    pub all_reduce_buffer_mb: f64,
    /// Layers of the model.
    pub num_layers: f64,
    /// One of this many layers has experts.
    pub moe_frequency: f64,
    /// Samples per iteration; `None`: one mini-batch per device of the cluster.
    pub global_batch_size: Option<f64>,
    /// Samples per device and step.
    pub mini_batch_size: f64,
    /// Additional forward passes by recomputation.
    pub recomputation_amount: f64,
}

#[derive(Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawWorkload {
    expert_flop: Vec<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_load: Option<Vec<Number>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_mb: Option<Number>,
    p2p_buffer_mb: Number,
    p2p_frequency: Number,
    all_reduce_buffer_mb: Number,
    num_layers: Number,
    moe_frequency: Number,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    global_batch_size: Option<Number>,
    mini_batch_size: Number,
    recomputation_amount: Number,
}

impl Workload {
    /// One layer of experts with these FLOP, and one sample per iteration. The buffers are empty, so exchanges and all-reduces take no
    /// time; there are two exchanges per pass, dispatch and combine.
    pub fn new(expert_flop: Vec<f64>) -> Workload {
        Workload {
            expert_flop,
            expert_load: None,
            expert_mb: None,
            p2p_buffer_mb: 0.0,
            p2p_frequency: 2.0,
            all_reduce_buffer_mb: 0.0,
            num_layers: 1.0,
            moe_frequency: 1.0,
            global_batch_size: Some(1.0),
            mini_batch_size: 1.0,
            recomputation_amount: 0.0,
        }
    }

    /// Reads a workload file.
    ///
    /// # Errors
    /// Returns an error that names the file, the path in it, the value, and the values allowed.
    pub fn read(path: &Path) -> Result<Workload, InputError> {
        let text = read_text(path)?;
        Workload::from_json(&text).map_err(|error| error.in_file(path))
    }

    /// Parses a workload from JSON text.
    ///
    /// # Errors
    /// Those of [`Workload::read`], without the file.
    pub fn from_json(text: &str) -> Result<Workload, InputError> {
        parse_json::<RawWorkload>(text)?.try_into()
    }

    /// The workload as JSON text.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers only")
    }

    /// Number of experts.
    pub fn n_experts(&self) -> usize {
        self.expert_flop.len()
    }

    /// The cost of each expert, FLOP: `expert_flop`, times its load relative to an even share if loads are given.
    pub fn costs(&self) -> Vec<f64> {
        match &self.expert_load {
            None => self.expert_flop.clone(),
            Some(load) => {
                let (n, sum) = (load.len() as f64, load.iter().sum::<f64>());
                self.expert_flop.iter().zip(load).map(|(flop, load)| flop * (load * n / sum)).collect()
            }
        }
    }

    /// Number of layers with experts.
    pub fn moe_layers(&self) -> f64 {
        self.num_layers / self.moe_frequency
    }

    /// The cluster with `memory_experts` computed from `memory_mb` and `expert_mb`, where both are given.
    ///
    /// # Errors
    /// Returns an error if a device's memory is given only in MB and the workload has no `expert_mb`.
    pub fn on<'c>(&self, cluster: &'c Cluster) -> Result<Cow<'c, Cluster>, InputError> {
        let Some(expert_mb) = self.expert_mb else {
            let place = cluster.devices.iter().position(|d| d.memory_mb.is_some() && d.memory_experts == 0);
            return match place {
                None => Ok(Cow::Borrowed(cluster)),
                Some(place) => Err(InputError::value(
                    format!("devices[{place}].memory_mb"),
                    "is there without memory_experts",
                    "expert_mb in the workload, or memory_experts",
                )),
            };
        };
        if cluster.devices.iter().all(|device| device.memory_mb.is_none()) {
            return Ok(Cow::Borrowed(cluster));
        }
        let mut cluster = cluster.clone();
        for device in &mut cluster.devices {
            if let Some(memory_mb) = device.memory_mb {
                // Tolerates a quotient that rounding left just below a whole number.
                device.memory_experts = (memory_mb / (expert_mb * self.moe_layers()) * (1.0 + 1e-12)).floor() as u64;
            }
        }
        Ok(Cow::Owned(cluster))
    }

    /// The first difference beyond rounding between two workloads of `devices` devices, as one line; ignores memory and loads.
    pub fn difference(&self, other: &Workload, devices: usize) -> Option<String> {
        let number = |name: &str, here: f64, there: f64| {
            let same = (here - there).abs() <= 1e-9 * here.abs().max(there.abs());
            (!same).then(|| format!("{name} is {here}, not {there}"))
        };
        let batches = |workload: &Workload| {
            workload.global_batch_size.map_or(devices as f64, |size| size / workload.mini_batch_size)
        };
        let counts = (self.n_experts() as f64, other.n_experts() as f64);
        number("the number of experts", counts.0, counts.1)
            .or_else(|| {
                let both = self.expert_flop.iter().zip(&other.expert_flop).enumerate();
                both.into_iter().find_map(|(e, (here, there))| number(&format!("expert_flop[{e}]"), *here, *there))
            })
            .or_else(|| number("p2p_buffer_mb", self.p2p_buffer_mb, other.p2p_buffer_mb))
            .or_else(|| number("p2p_frequency", self.p2p_frequency, other.p2p_frequency))
            .or_else(|| number("all_reduce_buffer_mb", self.all_reduce_buffer_mb, other.all_reduce_buffer_mb))
            .or_else(|| number("num_layers / moe_frequency", self.moe_layers(), other.moe_layers()))
            .or_else(|| number("global_batch_size / mini_batch_size", batches(self), batches(other)))
            .or_else(|| number("recomputation_amount", self.recomputation_amount, other.recomputation_amount))
    }

    /// Sets the experts' loads, such as token counts.
    ///
    /// # Errors
    /// Returns an error, with `what` as the name, if there is not one load per expert or all are 0.
    pub fn set_load(&mut self, load: Vec<f64>, what: &str) -> Result<(), InputError> {
        check_load(&load, self.n_experts(), what)?;
        self.expert_load = Some(load);
        Ok(())
    }
}

impl TryFrom<RawWorkload> for Workload {
    type Error = InputError;

    fn try_from(raw: RawWorkload) -> Result<Workload, InputError> {
        if raw.expert_flop.is_empty() {
            return Err(InputError::value("expert_flop", "is empty", "at least one expert"));
        }
        let list = |numbers: &[Number], key: &str| -> Result<Vec<f64>, InputError> {
            let check = |(e, x): (usize, &Number)| Range::NonNegative.check(x.0, || format!("{key}[{e}]"));
            numbers.iter().enumerate().map(check).collect()
        };
        let number = |x: Number, range: Range, key: &str| range.check(x.0, || key.to_string());
        let expert_flop = list(&raw.expert_flop, "expert_flop")?;
        let expert_load = match &raw.expert_load {
            None => None,
            Some(load) => {
                let load = list(load, "expert_load")?;
                check_load(&load, expert_flop.len(), "expert_load")?;
                Some(load)
            }
        };
        use Range::{NonNegative, Positive};
        Ok(Workload {
            expert_flop,
            expert_load,
            expert_mb: raw.expert_mb.map(|mb| number(mb, Positive, "expert_mb")).transpose()?,
            p2p_buffer_mb: number(raw.p2p_buffer_mb, NonNegative, "p2p_buffer_mb")?,
            p2p_frequency: number(raw.p2p_frequency, NonNegative, "p2p_frequency")?,
            all_reduce_buffer_mb: number(raw.all_reduce_buffer_mb, NonNegative, "all_reduce_buffer_mb")?,
            num_layers: number(raw.num_layers, Positive, "num_layers")?,
            moe_frequency: number(raw.moe_frequency, Positive, "moe_frequency")?,
            global_batch_size: raw
                .global_batch_size
                .map(|size| number(size, Positive, "global_batch_size"))
                .transpose()?,
            mini_batch_size: number(raw.mini_batch_size, Positive, "mini_batch_size")?,
            recomputation_amount: number(raw.recomputation_amount, NonNegative, "recomputation_amount")?,
        })
    }
}

impl From<Workload> for RawWorkload {
    fn from(workload: Workload) -> RawWorkload {
        let list = |numbers: &[f64]| numbers.iter().copied().map(Number).collect::<Vec<_>>();
        RawWorkload {
            expert_flop: list(&workload.expert_flop),
            expert_load: workload.expert_load.as_deref().map(list),
            expert_mb: workload.expert_mb.map(Number),
            p2p_buffer_mb: Number(workload.p2p_buffer_mb),
            p2p_frequency: Number(workload.p2p_frequency),
            all_reduce_buffer_mb: Number(workload.all_reduce_buffer_mb),
            num_layers: Number(workload.num_layers),
            moe_frequency: Number(workload.moe_frequency),
            global_batch_size: workload.global_batch_size.map(Number),
            mini_batch_size: Number(workload.mini_batch_size),
            recomputation_amount: Number(workload.recomputation_amount),
        }
    }
}

fn check_load(load: &[f64], n_experts: usize, what: &str) -> Result<(), InputError> {
    if load.len() != n_experts {
        let found = format!("has {} numbers", load.len());
        return Err(InputError::value(what, found, format!("{n_experts}, one per expert")));
    }
    let sum: f64 = load.iter().sum();
    if sum <= 0.0 || sum.is_nan() {
        return Err(InputError::value(what, "is all zeros", "at least one expert with tokens"));
    }
    Ok(())
}
