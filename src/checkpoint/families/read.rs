//! Reads `config.json`: the model, and one of its layers.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::fields::{Field, Fields, flag, size};
use super::{
    ActivationRule, Entry, ExpertsIn, Family, GluRule, INTERLEAVE, Only, PERIOD, RANGE, Router, STEP, Shared, Switch,
    Wrapper,
};
use crate::checkpoint::FileError;
use crate::checkpoint::file::read_regular;
use crate::checkpoint::quantised::Quantisation;
use crate::formats::{Latent, Model, Transformer};
use crate::moe::{Activation, Glu, GroupLimit, LayerConfig, MlpConfig, Norm, RouterConfig, SharedConfig, SparseMixer};

/// Maximum size of a configuration, bytes.
const MAX_CONFIG_BYTES: u64 = 4 << 20;

impl Family {
    /// The first layer with experts according to a configuration in the form of `config.json`.
    ///
    /// # Errors
    ///
    /// Returns an error if the `model_type` is not supported or a field is invalid. `source` is the configuration's
    /// name in errors.
    pub fn first_layer(source: &str, config: Map<String, Value>) -> Result<LayerConfig, FileError> {
        let (family, mut fields, layers, _) = open_fields(source.into(), config)?;
        for layer in 0..layers {
            fields.layer = layer;
            if family.0.why_dense(&fields, layers)?.is_none() {
                return family.0.layer(&fields);
            }
        }
        Err(fields.unexpected(family.0.layers.name(), "a layer with experts among them"))
    }
}

/// A layer's configuration, and the storage of its weights.
pub(in crate::checkpoint) struct ReadConfig {
    pub(in crate::checkpoint) family: Family,
    pub(in crate::checkpoint) config: LayerConfig,
    /// Settings that the layer does not implement, a line each.
    pub(in crate::checkpoint) notes: Vec<String>,
    pub(in crate::checkpoint) quantisation: Quantisation,
}

/// Reads `config.json` in folder `dir` for layer `layer`.
///
/// # Errors
///
/// Returns an error that names the file, the field, its value and the expected value.
pub(in crate::checkpoint) fn read_config(dir: &Path, layer: usize) -> Result<ReadConfig, FileError> {
    let (family, mut fields, layers, quantisation) = open_config(dir)?;
    let quantisation = Quantisation::of(quantisation.as_ref()).map_err(|(found, expected)| {
        let (file, field) = (fields.path.clone(), "quantization_config".to_string());
        FileError::Field { file, field, found, expected: expected.to_string() }
    })?;
    if layer >= layers {
        let expected = format!("0 to {}", layers.saturating_sub(1));
        return Err(fields.wrong(&format!("layer {layer}"), "is out of range", &expected));
    }
    fields.layer = layer;
    if let Some(why) = family.0.why_dense(&fields, layers)? {
        return Err(fields.wrong(&format!("layer {layer}"), format!("is dense ({why})"), "a layer with experts"));
    }
    let config = family.0.layer(&fields)?;
    let notes = family.0.notes(&fields)?;
    config.validate().map_err(|error| FileError::Config { file: fields.path, error })?;
    Ok(ReadConfig { family, config, notes, quantisation })
}

/// Reads `config.json` in folder `dir` as the planner's description of the model, whatever the storage of its weights.
///
/// # Errors
///
/// Those of [`read_config`], and an error if the model has no experts.
pub(in crate::checkpoint) fn read_model(dir: &Path) -> Result<Model, FileError> {
    let (_, layers, config) = open_model(dir)?;
    Ok(config.model(layers))
}

/// A configuration positioned at its first layer with experts, its (layers, layers with experts), and that layer's
/// configuration.
fn open_model(dir: &Path) -> Result<(Fields, (usize, usize), LayerConfig), FileError> {
    let (family, mut fields, layers, _) = open_config(dir)?;
    let mut with_experts = Vec::new();
    for layer in 0..layers {
        fields.layer = layer;
        if family.0.why_dense(&fields, layers)?.is_none() {
            with_experts.push(layer);
        }
    }
    let Some(&first) = with_experts.first() else {
        return Err(fields.unexpected(family.0.layers.name(), "a layer with experts among them"));
    };
    fields.layer = first;
    let config = family.0.layer(&fields)?;
    if let Err(error) = config.validate() {
        return Err(FileError::Config { file: fields.path, error });
    }
    Ok((fields, (layers, with_experts.len()), config))
}

/// Reads the model's size apart from its routed experts, from field names that the families share.
///
/// # Errors
///
/// Those of [`read_model`], and an error if some layers have no attention.
pub(in crate::checkpoint) fn read_transformer(dir: &Path) -> Result<Transformer, FileError> {
    let (fields, (layers, moe_layers), config) = open_model(dir)?;
    let required = |name| fields.size(&size(name, 0).required());
    let optional = |name| fields.size_or_none(&size(name, 0).optional());
    const ATTENTION: &str = "a model with attention in all layers";
    for name in ["attn_layer_period", "hybrid_override_pattern", "layers_block_type", "linear_attn_config"] {
        if fields.get(name).is_some_and(|value| !value.is_null()) {
            return Err(fields.unexpected(name, ATTENTION));
        }
    }
    let window = match fields.flag(&flag("use_sliding_window", true))? {
        true => optional("sliding_window")?.unwrap_or(0),
        false => 0,
    };
    let windowed = match fields.list("layer_types", "a list of strings")? {
        Some(types) => {
            let known = |of: &&Value| **of != "sliding_attention" && **of != "full_attention";
            if let Some(other) = types.iter().find(known) {
                return Err(fields.wrong("layer_types", format!("has {other}"), ATTENTION));
            }
            types.iter().filter(|of| **of == "sliding_attention").count()
        }
        None => layers,
    };
    let heads = fields.size(&size("num_attention_heads", 0).or("n_heads").required())?;
    if heads == 0 {
        return Err(fields.unexpected("num_attention_heads", "at least 1"));
    }
    let kv_heads = fields.size_or_none(&size("num_key_value_heads", 0).or("attn_config.kv_n_heads").optional())?;
    let (head_dim, latent, kv_heads) = match optional("kv_lora_rank")? {
        None => {
            let width = optional("head_dim")?.unwrap_or(config.hidden / heads);
            ((width, width), None, kv_heads.unwrap_or(heads))
        }
        Some(rank) => {
            let (query_rank, shared_key) = (optional("q_lora_rank")?.unwrap_or(0), required("qk_rope_head_dim")?);
            let head_dim = (required("qk_nope_head_dim")? + shared_key, required("v_head_dim")?);
            (head_dim, Some(Latent { query_rank, rank, shared_key }), heads)
        }
    };
    let dense_intermediate = match (layers > moe_layers, optional("intermediate_size_mlp")?) {
        (false, _) => 0,
        (true, Some(width)) => width,
        (true, None) => required("intermediate_size")?,
    };
    Ok(Transformer {
        hidden: config.hidden,
        layers: (layers, moe_layers),
        heads: (heads, kv_heads),
        head_dim,
        latent,
        windowed: if window > 0 { (windowed, window) } else { (0, 0) },
        dense_intermediate,
        shared_intermediate: config.shared.map_or(0, |shared| shared.mlp.intermediate),
        vocabulary: required("vocab_size")?,
    })
}

/// Far above any model.
const MAX_LAYERS: usize = 1 << 16;

/// The family, its fields (for layer 0), the number of layers, and the `quantization_config`.
fn open_config(dir: &Path) -> Result<(Family, Fields, usize, Option<Value>), FileError> {
    let path = dir.join("config.json");
    let text = read_regular(&path, MAX_CONFIG_BYTES).map_err(|e| FileError::read(&path, e))?;
    let map: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| FileError::malformed(&path, format!("is not a JSON object: {e}")))?;
    open_fields(path, map)
}

/// Like [`open_config`], for the contents of the file.
fn open_fields(path: PathBuf, map: Map<String, Value>) -> Result<(Family, Fields, usize, Option<Value>), FileError> {
    let mut fields = Fields { path, prefix: String::new(), map, layer: 0 };
    let model_type = match fields.get("model_type") {
        Some(Value::String(model_type)) => model_type.clone(),
        Some(Value::Null) | None => return Err(fields.wrong("model_type", "is missing", "a string")),
        Some(_) => return Err(fields.unexpected("model_type", "a string")),
    };
    let Some(family) = Family::named(&model_type) else {
        let known: Vec<&str> = Family::all().map(Family::model_type).collect();
        let expected = format!("one of {}", known.join(", "));
        return Err(fields.wrong("model_type", format!("is {model_type:?}"), &expected));
    };
    let quantisation = fields.get("quantization_config").cloned();
    if let Some(wrapper) = family.0.wrapper.filter(|w| w.model_type == model_type) {
        descend(&mut fields, wrapper, family.0)?;
    }
    let entry = family.0;
    let layers = match entry.experts_in {
        ExpertsIn::Blocks => blocks(&fields)?.len(),
        _ => fields.size(&entry.layers)?,
    };
    if layers > MAX_LAYERS {
        return Err(fields.unexpected(entry.layers.name(), &format!("at most {MAX_LAYERS}")));
    }
    Ok((family, fields, layers, quantisation))
}

/// Descends from a wrapper's configuration to the text model's.
fn descend(fields: &mut Fields, wrapper: Wrapper, entry: &Entry) -> Result<(), FileError> {
    for name in wrapper.path {
        let inner = match fields.map.remove(*name) {
            Some(Value::Object(inner)) => inner,
            // The wrapper's class then uses the defaults of all fields.
            Some(Value::Null) | None => Map::new(),
            Some(other) => return Err(fields.wrong(name, format!("is {other}"), "an object")),
        };
        fields.map = inner;
        fields.prefix += &format!("{name}.");
    }
    match fields.get("model_type").and_then(Value::as_str) {
        Some(other) if other != entry.model_type && !entry.aliases.contains(&other) => {
            Err(fields.unexpected("model_type", &format!("{:?}", entry.model_type)))
        }
        _ => Ok(()),
    }
}

/// The kinds of the layers, for a family that lists them; `moe` is one of them.
fn blocks(fields: &Fields) -> Result<Vec<String>, FileError> {
    const LIST: &str = "layers_block_type";
    const PATTERN: &str = "hybrid_override_pattern";
    if let Some(list) = fields.list(LIST, "a list of strings")? {
        let kinds: Option<Vec<String>> = list.iter().map(|kind| kind.as_str().map(str::to_owned)).collect();
        return kinds.ok_or_else(|| fields.unexpected(LIST, "a list of strings"));
    }
    match fields.get(PATTERN).and_then(Value::as_str) {
        Some(pattern) => {
            Ok(pattern.chars().map(|kind| if kind == 'E' { "moe".into() } else { kind.to_string() }).collect())
        }
        None => Err(fields.unexpected(LIST, "a list of strings")),
    }
}

impl Entry {
    /// The reason why the layer has no experts; `None` if it has.
    fn why_dense(&self, fields: &Fields, layers: usize) -> Result<Option<String>, FileError> {
        let layer = fields.layer;
        let below = |first: usize, field: &Field| (layer < first).then(|| format!("{} is {first}", field.name()));
        Ok(match self.experts_in {
            ExpertsIn::All => None,
            ExpertsIn::From(field) => below(fields.size(&field)?, &field),
            ExpertsIn::Types { dense, freq } => match fields.list("mlp_layer_types", "a list of strings")? {
                Some(types) => {
                    let kind = types.get(layer).and_then(Value::as_str);
                    let kind = kind.ok_or_else(|| fields.unexpected("mlp_layer_types", "a string for each layer"))?;
                    (!["sparse", "moe"].contains(&kind)).then(|| format!("mlp_layer_types has {kind:?} there"))
                }
                None => {
                    let every = if freq { fields.size(&size("moe_layer_freq", 1))? } else { 1 };
                    if every == 0 {
                        return Err(fields.unexpected("moe_layer_freq", "1 or more"));
                    }
                    let first = fields.size(&dense)?;
                    let first = if dense.name().is_empty() && layer < first {
                        Some(format!("without mlp_layer_types the first {first} are"))
                    } else {
                        below(first, &dense)
                    };
                    first.or_else(|| (!layer.is_multiple_of(every)).then(|| format!("moe_layer_freq is {every}")))
                }
            },
            ExpertsIn::Step(dense) => {
                if fields.sizes("mlp_only_layers")?.unwrap_or_else(|| dense.to_vec()).contains(&layer) {
                    return Ok(Some("it is one of mlp_only_layers".into()));
                }
                let step = fields.size(&STEP)?;
                if step == 0 {
                    return Err(fields.unexpected(STEP.name(), "1 or more"));
                }
                (!(layer + 1).is_multiple_of(step)).then(|| format!("decoder_sparse_step is {step}"))
            }
            ExpertsIn::Period => {
                let [period, offset] = [fields.size(&PERIOD[0])?, fields.size(&PERIOD[1])?];
                if period == 0 {
                    return Err(fields.unexpected(PERIOD[0].name(), "1 or more"));
                }
                (layer % period != offset).then(|| format!("of every {period} layers number {offset} has experts"))
            }
            ExpertsIn::Range => {
                let (first, every) = (fields.size(&RANGE[0])?, fields.size(&RANGE[2])?);
                let last = match fields.number(&RANGE[1])? {
                    -1.0 => layers - 1,
                    last => last as usize,
                };
                if every == 0 {
                    return Err(fields.unexpected(RANGE[2].name(), "1 or more"));
                }
                let has = (layer + 1).is_multiple_of(every) && (first..=last).contains(&layer);
                (!has).then(|| format!("every {every}th of layers {first} to {last} has experts"))
            }
            ExpertsIn::Listed => match fields.sizes("moe_layers")? {
                Some(list) => (!list.contains(&layer)).then(|| "it is not one of moe_layers".into()),
                None => {
                    let step = fields.size(&INTERLEAVE)?;
                    if step == 0 {
                        return Err(fields.unexpected(INTERLEAVE.name(), "1 or more"));
                    }
                    (!(layer + 1).is_multiple_of(step)).then(|| format!("{} is {step}", INTERLEAVE.name()))
                }
            },
            ExpertsIn::Blocks => {
                let kind = &blocks(fields)?[layer];
                (kind != "moe").then(|| format!("layers_block_type has {kind:?} there"))
            }
        })
    }

    /// Settings that the layer does not implement, a line each.
    fn notes(&self, fields: &Fields) -> Result<Vec<String>, FileError> {
        let mut notes = Vec::new();
        for noise in self.noise {
            if fields.number(noise)? > 0.0 {
                let (path, name) = (fields.path.display(), noise.name());
                notes.push(format!("{path}: {name}, random noise on the input in training, is not applied"));
            }
        }
        Ok(notes)
    }

    /// The configuration of the layer.
    fn layer(&self, fields: &Fields) -> Result<LayerConfig, FileError> {
        for (name, only) in self.only {
            let is = fields.get(name).filter(|value| !value.is_null());
            let (fits, expected) = match *only {
                Only::Text(s) => (is.is_none_or(|v| v == s), format!("{s:?}")),
                Only::Flag(b) => (is.is_none_or(|v| v == b), b.to_string()),
                Only::Size(n) => (is.is_none_or(|v| v == n), n.to_string()),
                Only::Null => (is.is_none(), "null".into()),
            };
            if !fits {
                return Err(fields.unexpected(name, &expected));
            }
        }
        let activation = match self.activation {
            ActivationRule::Fixed(activation) => activation,
            ActivationRule::Field(field) => activation(fields, &field)?,
        };
        let mut expert = MlpConfig::gated(fields.size(&self.intermediate)?, activation);
        expert.gated = self.gated;
        expert.bias = self.bias;
        match self.glu {
            GluRule::Product => {}
            GluRule::Clamped(limit) => expert.glu = Glu::clamped(positive(fields, &limit)?),
            GluRule::ScaledSigmoid { limit, alpha } => {
                if fields.number(&alpha)? != 1.702 {
                    return Err(fields.unexpected(alpha.name(), "1.702"));
                }
                expert.activation = Activation::QuickGelu;
                expert.glu = Glu { plus_one: true, ..Glu::clamped(positive(fields, &limit)?) };
            }
        }
        let shared = self.shared_expert(fields, &expert)?;
        let (hidden, experts) = (fields.size(&self.hidden)?, fields.size(&self.experts)?);
        let mut config = LayerConfig { shared, ..LayerConfig::new(hidden, experts, self.router(fields)?, expert) };
        if let Some(field) = &self.identity_experts {
            config.identity_experts = fields.size_or_none(field)?.unwrap_or(0);
        }
        if let Some(adjust) = self.adjust {
            adjust(fields, &mut config)?;
        }
        Ok(config)
    }

    fn shared_expert(&self, fields: &Fields, expert: &MlpConfig) -> Result<Option<SharedConfig>, FileError> {
        let product = |a: usize, b: usize, field: &Field| {
            a.checked_mul(b).ok_or_else(|| fields.unexpected(field.name(), "a small number"))
        };
        let width = match self.shared {
            Shared::None => 0,
            Shared::One => expert.intermediate,
            Shared::Times(field) => product(fields.size(&field)?, expert.intermediate, &field)?,
            Shared::Width(field) => fields.size(&field)?,
            Shared::Product(a, b) => product(fields.size(&a)?, fields.size(&b)?, &b)?,
        };
        if width == 0 {
            return Ok(None);
        }
        let mut mlp = MlpConfig { intermediate: width, bias: false, ..*expert };
        if let Some(field) = &self.shared_bias {
            mlp.bias = fields.flag(field)?;
        }
        if !self.shared_glu && self.gated {
            mlp.glu = Glu::PRODUCT;
        }
        Ok(Some(SharedConfig::new(mlp, self.shared_gate)))
    }

    fn router(&self, fields: &Fields) -> Result<RouterConfig, FileError> {
        let Router { scoring, norm, group_score, logit_bias, select_logits, weigh_input, .. } = self.router;
        let switch = |switch| match switch {
            Switch::On => Ok(true),
            Switch::Off => Ok(false),
            Switch::Field(field) => fields.flag(&field),
        };
        let number = |field: &Option<Field>| field.as_ref().map(|field| fields.number(field)).transpose();
        let groups = match self.router.groups {
            None => None,
            Some([n, top]) => match (fields.size_or_none(&n)?, fields.size_or_none(&top)?) {
                (Some(n_groups), Some(top_groups)) => Some(GroupLimit { n_groups, top_groups }),
                (None, None) => None,
                (None, Some(_)) => {
                    return Err(fields.unexpected(n.name(), "a number of groups, as topk_group is given"));
                }
                (Some(_), None) => return Err(fields.unexpected(top.name(), "a number of groups, as n_group is given")),
            },
        };
        let mut router = RouterConfig::softmax(fields.size(&self.router.top_k)?);
        router.scoring = scoring;
        router.renormalise = switch(self.router.renormalise)?;
        router.norm = Norm { floor: number(&self.router.floor)?.unwrap_or(0.0) as f32, ..norm };
        router.scaling = number(&self.router.scaling)?.unwrap_or(1.0) as f32;
        router.groups = groups;
        router.group_score = group_score;
        router.correction_bias = switch(self.router.bias)?;
        router.logit_bias = logit_bias;
        router.softcap = number(&self.router.softcap)?.unwrap_or(0.0) as f32;
        router.select_logits = select_logits;
        router.weigh_input = weigh_input;
        router.sparse_mixer = number(&self.router.mixer)?.map(|jitter| SparseMixer { jitter: jitter as f32 });
        Ok(router)
    }
}

/// Names of activations in configurations; the first name of each is the usual one.
pub const ACTIVATIONS: &[(&str, Activation)] = &[
    ("silu", Activation::Silu),
    ("swish", Activation::Silu),
    ("gelu", Activation::Gelu),
    ("gelu_python", Activation::Gelu),
    ("gelu_pytorch_tanh", Activation::GeluTanh),
    ("gelu_new", Activation::GeluTanh),
    ("gelu_python_tanh", Activation::GeluTanh),
    ("relu", Activation::Relu),
    ("relu2", Activation::Relu2),
    ("quick_gelu", Activation::QuickGelu),
];

fn activation(fields: &Fields, field: &Field) -> Result<Activation, FileError> {
    const KNOWN: &str = "silu, gelu, gelu_new, gelu_pytorch_tanh, relu, relu2 or quick_gelu";
    let text = fields.text(field)?;
    let known = ACTIVATIONS.iter().find(|(name, _)| *name == text);
    known.map(|&(_, activation)| activation).ok_or_else(|| fields.unexpected(field.name(), KNOWN))
}

/// A number above 0.
fn positive(fields: &Fields, field: &Field) -> Result<f32, FileError> {
    let value = fields.number(field)?;
    if value > 0.0 { Ok(value as f32) } else { Err(fields.unexpected(field.name(), "a number above 0")) }
}
