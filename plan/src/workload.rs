//! What is to be planned for: the experts' costs and the training schedule.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::InputError;
use crate::cluster::{Number, Range, parse_json, read_text};

/// The experts and the schedule.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Workload {
    /// FLOP of each expert in one pass of one MoE layer, under an even share of the tokens.
    pub expert_flop: Vec<f64>,
    /// Each expert's share of the tokens, in any unit; it weighs the costs.
    pub expert_load: Option<Vec<f64>>,
    /// What a device exchanges in one dispatch or combine, over all its peers, MB.
    pub p2p_buffer_mb: f64,
    /// Exchanges per pass of a layer.
    pub p2p_frequency: f64,
    /// Gradients that groups all-reduce between them, MB.
    pub all_reduce_buffer_mb: f64,
    /// Layers of the model.
    pub num_layers: f64,
    /// One layer in this many has experts.
    pub moe_frequency: f64,
    /// Samples per iteration.
    pub global_batch_size: f64,
    /// Samples per device and step.
    pub mini_batch_size: f64,
    /// Further forward passes by recomputation.
    pub recomputation_amount: f64,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct RawWorkload {
    expert_flop: Vec<Number>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expert_load: Option<Vec<Number>>,
    p2p_buffer_mb: Number,
    p2p_frequency: Number,
    all_reduce_buffer_mb: Number,
    num_layers: Number,
    moe_frequency: Number,
    global_batch_size: Number,
    mini_batch_size: Number,
    recomputation_amount: Number,
}

impl Workload {
    /// One layer of experts of this many FLOP each, and one sample per iteration. Nothing is exchanged or all-reduced, as the
    /// buffers are empty; there are two exchanges per pass, dispatch and combine.
    pub fn new(expert_flop: Vec<f64>) -> Workload {
        Workload {
            expert_flop,
            expert_load: None,
            p2p_buffer_mb: 0.0,
            p2p_frequency: 2.0,
            all_reduce_buffer_mb: 0.0,
            num_layers: 1.0,
            moe_frequency: 1.0,
            global_batch_size: 1.0,
            mini_batch_size: 1.0,
            recomputation_amount: 0.0,
        }
    }

    /// Reads a workload file.
    ///
    /// # Errors
    /// One line that names the file, the path inside it, what is there and what is right.
    pub fn read(path: &Path) -> Result<Workload, InputError> {
        let text = read_text(path)?;
        Workload::from_json(&text).map_err(|error| error.in_file(path))
    }

    /// A workload from its JSON text.
    ///
    /// # Errors
    /// One line that names the path inside the text, what is there and what is right.
    pub fn from_json(text: &str) -> Result<Workload, InputError> {
        let raw: RawWorkload = parse_json(text)?;
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
            p2p_buffer_mb: number(raw.p2p_buffer_mb, NonNegative, "p2p_buffer_mb")?,
            p2p_frequency: number(raw.p2p_frequency, NonNegative, "p2p_frequency")?,
            all_reduce_buffer_mb: number(raw.all_reduce_buffer_mb, NonNegative, "all_reduce_buffer_mb")?,
            num_layers: number(raw.num_layers, Positive, "num_layers")?,
            moe_frequency: number(raw.moe_frequency, Positive, "moe_frequency")?,
            global_batch_size: number(raw.global_batch_size, Positive, "global_batch_size")?,
            mini_batch_size: number(raw.mini_batch_size, Positive, "mini_batch_size")?,
            recomputation_amount: number(raw.recomputation_amount, NonNegative, "recomputation_amount")?,
        })
    }

    /// The workload as JSON text.
    pub fn to_json(&self) -> String {
        let list = |numbers: &[f64]| numbers.iter().copied().map(Number).collect::<Vec<_>>();
        let raw = RawWorkload {
            expert_flop: list(&self.expert_flop),
            expert_load: self.expert_load.as_deref().map(list),
            p2p_buffer_mb: Number(self.p2p_buffer_mb),
            p2p_frequency: Number(self.p2p_frequency),
            all_reduce_buffer_mb: Number(self.all_reduce_buffer_mb),
            num_layers: Number(self.num_layers),
            moe_frequency: Number(self.moe_frequency),
            global_batch_size: Number(self.global_batch_size),
            mini_batch_size: Number(self.mini_batch_size),
            recomputation_amount: Number(self.recomputation_amount),
        };
        serde_json::to_string(&raw).expect("numbers only")
    }

    /// Number of experts.
    pub fn n_experts(&self) -> usize {
        self.expert_flop.len()
    }

    /// What each expert costs, FLOP: `expert_flop`, times its share of the tokens over the even share where loads are
    /// given.
    pub fn costs(&self) -> Vec<f64> {
        match &self.expert_load {
            None => self.expert_flop.clone(),
            Some(load) => {
                let (n, sum) = (load.len() as f64, load.iter().sum::<f64>());
                self.expert_flop.iter().zip(load).map(|(flop, load)| flop * (load * n / sum)).collect()
            }
        }
    }

    /// Sets the experts' loads, such as the tokens that each got.
    ///
    /// # Errors
    /// One line: not one per expert, or all zero. `what` names them.
    pub fn set_load(&mut self, load: Vec<f64>, what: &str) -> Result<(), InputError> {
        check_load(&load, self.n_experts(), what)?;
        self.expert_load = Some(load);
        Ok(())
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
