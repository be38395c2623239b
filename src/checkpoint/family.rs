//! The model families: what `config.json` means, and what the weights are called.
//!
//! Meanings and defaults follow the configuration and model classes of `transformers` 5.23
//! (`MixtralSparseMoeBlock`, `Qwen2MoeSparseMoeBlock`, `Qwen3MoeSparseMoeBlock`, `OlmoeSparseMoeBlock`,
//! `DeepseekV3MoE`). Fields that give a shape must be there; the others default as their class does.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::FileError;
use super::file::read_regular;
use crate::moe::{Activation, GroupLimit, LayerConfig, MlpConfig, Proj, RouterConfig, SharedConfig, WeightId};
use crate::plan::Model;

/// A model family whose checkpoints can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// `mixtral`
    Mixtral,
    /// `qwen2_moe`
    Qwen2Moe,
    /// `qwen3_moe`
    Qwen3Moe,
    /// `olmoe`
    Olmoe,
    /// `deepseek_v3`
    DeepseekV3,
}

impl Family {
    const ALL: [Family; 5] = [Family::Mixtral, Family::Qwen2Moe, Family::Qwen3Moe, Family::Olmoe, Family::DeepseekV3];

    /// Its `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Mixtral => "mixtral",
            Family::Qwen2Moe => "qwen2_moe",
            Family::Qwen3Moe => "qwen3_moe",
            Family::Olmoe => "olmoe",
            Family::DeepseekV3 => "deepseek_v3",
        }
    }

    /// The name of a weight of layer `layer`.
    pub(super) fn weight_name(self, layer: usize, id: WeightId) -> String {
        let block = if self == Family::Mixtral { "block_sparse_moe" } else { "mlp" };
        let shared = if self == Family::DeepseekV3 { "shared_experts" } else { "shared_expert" };
        let proj = |p| match (self, p) {
            (Family::Mixtral, Proj::Gate) => "w1",
            (Family::Mixtral, Proj::Up) => "w3",
            (Family::Mixtral, Proj::Down) => "w2",
            (_, Proj::Gate) => "gate_proj",
            (_, Proj::Up) => "up_proj",
            (_, Proj::Down) => "down_proj",
        };
        let weight = match id {
            WeightId::Router => "gate.weight".to_owned(),
            WeightId::RouterBias => "gate.e_score_correction_bias".to_owned(),
            WeightId::Expert(e, p) => format!("experts.{e}.{}.weight", proj(p)),
            WeightId::ExpertBias(e, p) => format!("experts.{e}.{}.bias", proj(p)),
            WeightId::Shared(p) => format!("{shared}.{}.weight", proj(p)),
            WeightId::SharedBias(p) => format!("{shared}.{}.bias", proj(p)),
            WeightId::SharedGate => "shared_expert_gate.weight".to_owned(),
        };
        format!("model.layers.{layer}.{block}.{weight}")
    }
}

/// Reads `config.json` in folder `dir` and describes layer `layer`.
///
/// # Errors
/// One line that names the file, the field, its value and what is expected.
pub(super) fn read_config(dir: &Path, layer: usize) -> Result<(Family, LayerConfig), FileError> {
    let (family, fields, layers) = open_config(dir)?;
    if layer >= layers {
        let expected = format!("0 to {}", layers.saturating_sub(1));
        return Err(fields.wrong(&format!("layer {layer}"), "is out of range", &expected));
    }
    if let Some(why) = why_dense(family, &fields, layer)? {
        return Err(fields.wrong(&format!("layer {layer}"), format!("is dense ({why})"), "a layer with experts"));
    }
    let config = layer_config(family, &fields)?;
    config.validate().map_err(|error| FileError::Config { file: fields.path, error })?;
    Ok((family, config))
}

/// Reads `config.json` in folder `dir` as what the planner wants to know of a model.
///
/// # Errors
/// As [`read_config`]; and a model without experts.
pub(super) fn read_model(dir: &Path) -> Result<Model, FileError> {
    let (family, fields, layers) = open_config(dir)?;
    let mut moe_layers = 0;
    for layer in 0..layers {
        moe_layers += usize::from(why_dense(family, &fields, layer)?.is_none());
    }
    if moe_layers == 0 {
        return Err(fields.unexpected("num_hidden_layers", "a layer with experts among them"));
    }
    let config = layer_config(family, &fields)?;
    config.validate().map_err(|error| FileError::Config { file: fields.path, error })?;
    Ok(config.model((layers, moe_layers)))
}

fn open_config(dir: &Path) -> Result<(Family, Fields, usize), FileError> {
    let path = dir.join("config.json");
    let text = read_regular(&path).map_err(|e| FileError::read(&path, e))?;
    let map =
        serde_json::from_slice(&text).map_err(|e| FileError::malformed(&path, format!("is not a JSON object: {e}")))?;
    let fields = Fields { path, map };

    let model_type = fields.string("model_type", None)?;
    let Some(family) = Family::ALL.into_iter().find(|f| f.model_type() == model_type) else {
        let known = Family::ALL.map(Family::model_type).join(", ");
        return Err(fields.wrong("model_type", format!("is {model_type:?}"), &format!("one of {known}")));
    };
    if let Some(q) = fields.get("quantization_config") {
        let method = q.get("quant_method").and_then(Value::as_str).unwrap_or("of an unnamed method");
        let found = format!("is there ({method})");
        return Err(fields.wrong("quantization_config", found, "an unquantised checkpoint"));
    }
    let layers = fields.size(&["num_hidden_layers"])?;
    Ok((family, fields, layers))
}

/// Why layer `layer` has no experts, `None` where it has.
fn why_dense(family: Family, fields: &Fields, layer: usize) -> Result<Option<String>, FileError> {
    match family {
        Family::Mixtral | Family::Olmoe => {}
        Family::Qwen2Moe | Family::Qwen3Moe => {
            if fields.sizes_or_empty("mlp_only_layers")?.contains(&layer) {
                return Ok(Some("it is one of mlp_only_layers".into()));
            }
            let step = fields.size_or("decoder_sparse_step", 1)?;
            if step == 0 {
                return Err(fields.unexpected("decoder_sparse_step", "1 or more"));
            }
            if !(layer + 1).is_multiple_of(step) {
                return Ok(Some(format!("decoder_sparse_step is {step}")));
            }
        }
        Family::DeepseekV3 => {
            let dense = fields.size_or("first_k_dense_replace", 3)?;
            if layer < dense {
                return Ok(Some(format!("first_k_dense_replace is {dense}")));
            }
            // Published config.json files have it, always as 1; `transformers` does not read it.
            if fields.size_or("moe_layer_freq", 1)? != 1 {
                return Err(fields.unexpected("moe_layer_freq", "1"));
            }
        }
    }
    Ok(None)
}

fn layer_config(family: Family, fields: &Fields) -> Result<LayerConfig, FileError> {
    let activation = match fields.string("hidden_act", Some("silu"))? {
        "silu" | "swish" => Activation::Silu,
        "gelu" | "gelu_python" => Activation::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" => Activation::GeluTanh,
        "relu" => Activation::Relu,
        _ => return Err(fields.unexpected("hidden_act", "silu, gelu, gelu_new, gelu_pytorch_tanh or relu")),
    };
    let mlp = |intermediate| MlpConfig::gated(intermediate, activation);
    let softmax = |renormalise| -> Result<RouterConfig, FileError> {
        Ok(RouterConfig { renormalise, ..RouterConfig::softmax(fields.size(&["num_experts_per_tok"])?) })
    };
    // `transformers` renames some of these when it saves: the number of experts has two names in the wild.
    let experts = ["num_experts", "num_local_experts"];
    let moe_intermediate = ["moe_intermediate_size"];
    let (n_experts, intermediate, router, shared) = match family {
        Family::Mixtral => {
            if fields.number_or("router_jitter_noise", 0.0)? > 0.0 {
                tracing::warn!(
                    "{}: router_jitter_noise, random noise on the input in training, is not applied",
                    fields.path.display()
                );
            }
            (fields.size(&experts)?, fields.size(&["intermediate_size"])?, softmax(true)?, None)
        }
        Family::Olmoe => {
            let renormalise = fields.boolean_or("norm_topk_prob", false)?;
            (fields.size(&experts)?, fields.size(&["intermediate_size"])?, softmax(renormalise)?, None)
        }
        Family::Qwen2Moe => {
            let renormalise = fields.boolean_or("norm_topk_prob", false)?;
            let shared = mlp(fields.size(&["shared_expert_intermediate_size"])?);
            let shared = Some(SharedConfig::new(shared, true));
            (fields.size(&experts)?, fields.size(&moe_intermediate)?, softmax(renormalise)?, shared)
        }
        Family::Qwen3Moe => {
            let renormalise = fields.boolean_or("norm_topk_prob", false)?;
            (fields.size(&experts)?, fields.size(&moe_intermediate)?, softmax(renormalise)?, None)
        }
        Family::DeepseekV3 => {
            let intermediate = fields.size(&moe_intermediate)?;
            let n_shared = fields.size_or("n_shared_experts", 1)?;
            let Some(shared_intermediate) = intermediate.checked_mul(n_shared) else {
                return Err(fields.unexpected("n_shared_experts", "a small number"));
            };
            let shared = (n_shared > 0).then(|| SharedConfig::new(mlp(shared_intermediate), false));
            let router = deepseek_router(fields)?;
            (fields.size(&["n_routed_experts", "num_local_experts"])?, intermediate, router, shared)
        }
    };
    let hidden = fields.size(&["hidden_size"])?;
    Ok(LayerConfig { shared, ..LayerConfig::new(hidden, n_experts, router, mlp(intermediate)) })
}

fn deepseek_router(fields: &Fields) -> Result<RouterConfig, FileError> {
    // Published config.json files name these two; `transformers` knows one value of each and does not read them.
    if fields.string("scoring_func", Some("sigmoid"))? != "sigmoid" {
        return Err(fields.unexpected("scoring_func", "\"sigmoid\""));
    }
    if fields.string("topk_method", Some("noaux_tc"))? != "noaux_tc" {
        return Err(fields.unexpected("topk_method", "\"noaux_tc\""));
    }
    let groups = GroupLimit { n_groups: fields.size_or("n_group", 8)?, top_groups: fields.size_or("topk_group", 4)? };
    Ok(RouterConfig {
        renormalise: fields.boolean_or("norm_topk_prob", true)?,
        scaling: fields.number_or("routed_scaling_factor", 2.5)? as f32,
        groups: Some(groups),
        correction_bias: true,
        ..RouterConfig::sigmoid(fields.size(&["num_experts_per_tok"])?)
    })
}

/// The fields of a `config.json`, with errors that name file, field and value. A null counts as absent.
struct Fields {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Fields {
    fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn wrong(&self, name: &str, found: impl Into<String>, expected: &str) -> FileError {
        let (file, field) = (self.path.clone(), name.to_string());
        FileError::Field { file, field, found: found.into(), expected: expected.to_string() }
    }

    fn unexpected(&self, name: &str, expected: &str) -> FileError {
        match self.get(name) {
            Some(value) => self.wrong(name, format!("is {value}"), expected),
            None => self.wrong(name, "is missing", expected),
        }
    }

    /// A required non-negative integer with one or more names.
    fn size(&self, names: &[&str]) -> Result<usize, FileError> {
        let mut found: Option<usize> = None;
        for name in names.iter().filter(|name| self.get(name).is_some()) {
            let value = self.parse(name, "a non-negative integer", |v| v.as_u64().map(|v| v as usize))?;
            if found.is_some_and(|other| other != value) {
                return Err(self.unexpected(name, &format!("the same as {}", names[0])));
            }
            found = Some(value);
        }
        found.ok_or_else(|| self.unexpected(names[0], "a non-negative integer"))
    }

    fn size_or(&self, name: &str, default: usize) -> Result<usize, FileError> {
        if self.get(name).is_none() { Ok(default) } else { self.size(&[name]) }
    }

    fn number_or(&self, name: &str, default: f64) -> Result<f64, FileError> {
        if self.get(name).is_none() { Ok(default) } else { self.parse(name, "a number", Value::as_f64) }
    }

    fn boolean_or(&self, name: &str, default: bool) -> Result<bool, FileError> {
        if self.get(name).is_none() { Ok(default) } else { self.parse(name, "true or false", Value::as_bool) }
    }

    fn string<'a>(&'a self, name: &str, default: Option<&'a str>) -> Result<&'a str, FileError> {
        match (self.get(name), default) {
            (None, Some(default)) => Ok(default),
            _ => self.parse(name, "a string", Value::as_str),
        }
    }

    fn sizes_or_empty(&self, name: &str) -> Result<Vec<usize>, FileError> {
        if self.get(name).is_none() {
            return Ok(Vec::new());
        }
        self.parse(name, "a list of non-negative integers", |v| {
            v.as_array()?.iter().map(|v| v.as_u64().map(|v| v as usize)).collect()
        })
    }

    fn parse<'a, T>(
        &'a self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, FileError> {
        self.get(name).and_then(read).ok_or_else(|| self.unexpected(name, expected))
    }
}
