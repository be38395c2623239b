//! Checkpoints and input files, with files that the tests write themselves.

mod files;
mod quantised;

use std::fs;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use aristos::checkpoint::{Checkpoint, InputTensor, read_input};
use aristos::moe::{Activation, GroupLimit, Proj, Scoring, WeightId, WeightSource};
use half::{bf16, f16};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const MIXTRAL: &str = "mixtral";
const QWEN2: &str = "qwen2_moe";
const QWEN3: &str = "qwen3_moe";
const OLMOE: &str = "olmoe";
const DEEPSEEK: &str = "deepseek_v3";

/// A tensor to write: name, type, shape, bytes.
type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

/// Writes a safetensors file without the library under test.
fn write_tensors(path: &Path, tensors: &[Tensor]) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    for (name, dtype, shape, bytes) in tensors {
        let end = data.len() + bytes.len();
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [data.len(), end]}));
        data.extend_from_slice(bytes);
    }
    write_raw(path, &Value::Object(header).to_string(), &data);
}

fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    fs::write(path, bytes).unwrap();
}

/// Numbers that every supported type represents exactly, different in every tensor.
fn values(name: &str, len: usize) -> Vec<f32> {
    let start = name.bytes().fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    (0..len).map(|i| ((start.wrapping_add(i as u32 * 37) % 255) as f32 - 127.0) / 64.0).collect()
}

fn tensor(name: &str, dtype: &'static str, shape: &[usize]) -> Tensor {
    let x = values(name, shape.iter().product());
    let bytes = match dtype {
        "F32" => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        "F64" => x.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect(),
        "BF16" => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        "F16" => x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        "I32" => x.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        other => panic!("no such type in these tests: {other}"),
    };
    (name.into(), dtype, shape.to_vec(), bytes)
}

/// `config.json` of a family with hidden 6, intermediate 10, 5 experts (4 for DeepSeek-V3), 2 layers, top 2.
fn config(family: &str) -> Value {
    let mut c = json!({"model_type": family, "num_hidden_layers": 2, "hidden_size": 6, "num_experts_per_tok": 2});
    let more = match family {
        MIXTRAL => json!({"intermediate_size": 10, "num_local_experts": 5}),
        QWEN2 => json!({
            "moe_intermediate_size": 10, "intermediate_size": 99, "num_experts": 5, "shared_expert_intermediate_size": 14,
        }),
        QWEN3 => json!({"moe_intermediate_size": 10, "intermediate_size": 99, "num_experts": 5}),
        OLMOE => json!({"intermediate_size": 10, "num_experts": 5}),
        DEEPSEEK => json!({
            "moe_intermediate_size": 10, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        }),
        other => panic!("no config.json for {other}"),
    };
    c.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    c
}

/// The weights of layer 1 with the names and shapes of the published checkpoints.
fn weights(family: &str, dtype: &'static str) -> Vec<Tensor> {
    let block = if family == MIXTRAL { "block_sparse_moe" } else { "mlp" };
    let n_experts = if family == DEEPSEEK { 4 } else { 5 };
    let [gate, up, down] = if family == MIXTRAL { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
    let mut all = Vec::new();
    let mut add = |name: &str, dtype, shape: &[usize]| {
        all.push(tensor(&format!("model.layers.1.{block}.{name}"), dtype, shape));
    };
    add("gate.weight", dtype, &[n_experts, 6]);
    for e in 0..n_experts {
        add(&format!("experts.{e}.{gate}.weight"), dtype, &[10, 6]);
        add(&format!("experts.{e}.{up}.weight"), dtype, &[10, 6]);
        add(&format!("experts.{e}.{down}.weight"), dtype, &[6, 10]);
    }
    let shared = match family {
        QWEN2 => Some(("shared_expert", 14)),
        DEEPSEEK => Some(("shared_experts", 20)),
        _ => None,
    };
    if let Some((shared, width)) = shared {
        add(&format!("{shared}.gate_proj.weight"), dtype, &[width, 6]);
        add(&format!("{shared}.up_proj.weight"), dtype, &[width, 6]);
        add(&format!("{shared}.down_proj.weight"), dtype, &[6, width]);
    }
    if family == QWEN2 {
        add("shared_expert_gate.weight", dtype, &[1, 6]);
    }
    if family == DEEPSEEK {
        add("gate.e_score_correction_bias", "F32", &[4]);
    }
    all
}

fn write_config(dir: &Path, config: &Value) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// A checkpoint in one file; `edit` changes its configuration.
fn checkpoint(family: &str, edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(family);
    edit(&mut c);
    write_config(dir.path(), &c);
    write_tensors(&dir.path().join("model.safetensors"), &weights(family, "F32"));
    dir
}

/// Asserts that opening layer `layer` fails with a one-line error that contains all `parts`.
fn assert_refused(dir: &Path, layer: usize, parts: &[&str]) {
    let error = Checkpoint::open(dir, layer).expect_err("opened");
    assert_line(&error, parts);
    // `{:#}` would show causes after the first line.
    assert_eq!(format!("{error:#}"), error.to_string());
}

fn assert_line(error: &impl std::fmt::Display, parts: &[&str]) {
    let line = format!("{error:#}");
    assert!(!line.contains('\n'), "more than a line: {line}");
    for part in parts {
        assert!(line.contains(part), "{line:?} does not say {part:?}");
    }
}

const FAMILIES: [&str; 5] = [MIXTRAL, QWEN2, QWEN3, OLMOE, DEEPSEEK];

#[test]
fn every_weight_of_every_family_is_read_by_name() {
    for family in FAMILIES {
        for dtype in ["F32", "F64", "BF16", "F16"] {
            let dir = checkpoint(family, |_| ());
            let written = weights(family, dtype);
            write_tensors(&dir.path().join("model.safetensors"), &written);
            let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
            let ids = checkpoint.config().weights();
            assert_eq!(ids.len(), written.len(), "{family:?}");
            for id in ids {
                let name = checkpoint.name(id);
                let (_, _, shape, _) = written.iter().find(|t| t.0 == name).expect(&name);
                assert_eq!(&checkpoint.config().shape(id), shape, "{name}");
                assert_eq!(checkpoint.load(id).unwrap(), values(&name, shape.iter().product()), "{name} {dtype}");
            }
        }
    }
}

#[test]
fn tensor_names_equal_the_published_ones() {
    let name = |family, id| {
        let dir = checkpoint(family, |_| ());
        Checkpoint::open(dir.path(), 1).unwrap().name(id)
    };
    assert_eq!(name(MIXTRAL, WeightId::Expert(3, Proj::Up)), "model.layers.1.block_sparse_moe.experts.3.w3.weight");
    assert_eq!(name(QWEN3, WeightId::Expert(4, Proj::Down)), "model.layers.1.mlp.experts.4.down_proj.weight");
    assert_eq!(name(QWEN2, WeightId::Shared(Proj::Gate)), "model.layers.1.mlp.shared_expert.gate_proj.weight");
    assert_eq!(name(DEEPSEEK, WeightId::RouterBias), "model.layers.1.mlp.gate.e_score_correction_bias");
}

#[test]
fn large_bf16_tensor_is_read_completely() {
    // More than the reader converts at a time, and not a multiple of it.
    let dir = checkpoint(MIXTRAL, |c| c["hidden_size"] = json!(40_007));
    let mut written = weights(MIXTRAL, "BF16");
    for t in &mut written {
        let shape: Vec<usize> = t.2.iter().map(|&d| if d == 6 { 40_007 } else { d }).collect();
        *t = tensor(&t.0, "BF16", &shape);
    }
    write_tensors(&dir.path().join("model.safetensors"), &written);
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    let id = WeightId::Expert(2, Proj::Down);
    assert_eq!(checkpoint.load(id).unwrap(), values(&checkpoint.name(id), 40_007 * 10));
}

#[test]
fn defaults_equal_the_model_classes() {
    let router = |family, edit: fn(&mut Value)| {
        let dir = checkpoint(family, edit);
        Checkpoint::open(dir.path(), 1).unwrap().config().router.clone()
    };
    assert!(router(MIXTRAL, |_| ()).renormalise);
    for family in [QWEN2, QWEN3, OLMOE] {
        let plain = router(family, |_| ());
        assert_eq!((plain.scoring, plain.renormalise, plain.scaling), (Scoring::Softmax, false, 1.0));
        assert!(router(family, |c| c["norm_topk_prob"] = json!(true)).renormalise);
    }
    let deepseek = router(DEEPSEEK, |_| ());
    assert_eq!((deepseek.scoring, deepseek.renormalise, deepseek.scaling), (Scoring::Sigmoid, true, 2.5));
    assert_eq!(deepseek.groups, Some(GroupLimit { n_groups: 2, top_groups: 1 }));
    assert!(deepseek.correction_bias);
}

#[test]
fn null_is_read_as_by_the_model_classes() {
    let open =
        |family, edit: fn(&mut Value)| Checkpoint::open(checkpoint(family, edit).path(), 1).map(|c| c.config().clone());
    // `bool | None` in the class: null is read as false.
    assert!(!open(DEEPSEEK, |c| c["norm_topk_prob"] = json!(null)).unwrap().router.renormalise);
    // Fields that the model class needs.
    for field in ["n_group", "topk_group", "num_experts_per_tok", "routed_scaling_factor", "n_shared_experts"] {
        let dir = checkpoint(DEEPSEEK, |c| c[field] = json!(null));
        assert_refused(dir.path(), 1, &["config.json", field, "null"]);
    }
    let dir = checkpoint(QWEN3, |c| c["norm_topk_prob"] = json!(null));
    assert_refused(dir.path(), 1, &["config.json", "norm_topk_prob is null", "true or false"]);
    open(QWEN3, |c| c["mlp_only_layers"] = json!(null)).unwrap();
    // Absent: the class's default, which does not match the file here.
    let dir = checkpoint(DEEPSEEK, |c| drop(c.as_object_mut().unwrap().remove("num_experts_per_tok")));
    assert_refused(dir.path(), 1, &["config.json", "top-k is 8"]);
}

/// A checkpoint of one layer with these fields of config.json, and F32 tensors with names that start with `prefix`.
fn layer_of(fields: Value, prefix: &str, tensors: &[(&str, &[usize])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_config(dir.path(), &fields);
    let tensors: Vec<Tensor> =
        tensors.iter().map(|(name, shape)| tensor(&format!("{prefix}layers.1.{name}"), "F32", shape)).collect();
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

const GRANITE: &[(&str, &[usize])] = &[
    ("block_sparse_moe.router.layer.weight", &[5, 6]),
    ("block_sparse_moe.input_linear.weight", &[5, 20, 6]),
    ("block_sparse_moe.output_linear.weight", &[5, 6, 10]),
];

fn granite() -> Value {
    json!({"model_type": "granitemoe", "num_hidden_layers": 2, "hidden_size": 6, "intermediate_size": 10, "num_local_experts": 5})
}

#[test]
fn fused_experts_are_read_one_by_one() {
    let dir = layer_of(granite(), "model.", GRANITE);
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    let all = values("model.layers.1.block_sparse_moe.input_linear.weight", 5 * 20 * 6);
    assert_eq!(checkpoint.load(WeightId::Expert(3, Proj::Gate)).unwrap(), all[3 * 120..3 * 120 + 60]);
    assert_eq!(checkpoint.load(WeightId::Expert(3, Proj::Up)).unwrap(), all[3 * 120 + 60..4 * 120]);
    let place = checkpoint.weight_slice(WeightId::Expert(3, Proj::Up));
    assert_eq!((place.shape, place.part), (vec![5, 20, 6], 360..480));

    // gpt-oss: transposed, gate and up interleaved, with biases.
    let dir = layer_of(
        json!({"model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 6, "intermediate_size": 10, "num_local_experts": 5,
               "num_experts_per_tok": 2}),
        "model.",
        &[
            ("mlp.router.weight", &[5, 6]),
            ("mlp.router.bias", &[5]),
            ("mlp.experts.gate_up_proj", &[5, 6, 20]),
            ("mlp.experts.gate_up_proj_bias", &[5, 20]),
            ("mlp.experts.down_proj", &[5, 10, 6]),
            ("mlp.experts.down_proj_bias", &[5, 6]),
        ],
    );
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    let all = values("model.layers.1.mlp.experts.gate_up_proj", 5 * 6 * 20);
    let up = checkpoint.load(WeightId::Expert(2, Proj::Up)).unwrap();
    for (out, column) in (0..10).flat_map(|out| (0..6).map(move |column| (out, column))) {
        assert_eq!(up[out * 6 + column], all[2 * 120 + column * 20 + 2 * out + 1], "{out} {column}");
    }
    let bias = values("model.layers.1.mlp.experts.gate_up_proj_bias", 100);
    let gate = checkpoint.load(WeightId::ExpertBias(4, Proj::Gate)).unwrap();
    assert_eq!(gate, (0..10).map(|out| bias[80 + 2 * out]).collect::<Vec<_>>());
}

#[test]
fn any_prefix_is_found() {
    for prefix in ["", "model.", "model.language_model.", "language_model.model.", "some.other."] {
        let checkpoint = Checkpoint::open(layer_of(granite(), prefix, GRANITE).path(), 1).unwrap();
        assert!(checkpoint.name(WeightId::Router).starts_with(&format!("{prefix}layers.1.block")));
    }
    // A prefix ends at a dot.
    let dir = layer_of(granite(), "modellayers.1.", GRANITE);
    Checkpoint::open(dir.path(), 1).unwrap();
    let dir = layer_of(granite(), "nomodel", GRANITE);
    assert_refused(
        dir.path(),
        1,
        &["no tensor model.layers.1.block_sparse_moe.router.layer.weight", "the nearest name"],
    );
}

#[test]
fn nested_text_model_is_found() {
    let text = json!({"model_type": "qwen3_vl_moe_text", "num_hidden_layers": 2, "hidden_size": 6, "moe_intermediate_size": 10,
                      "num_experts": 5, "num_experts_per_tok": 2});
    let tensors: &[(&str, &[usize])] = &[
        ("mlp.gate.weight", &[5, 6]),
        ("mlp.experts.gate_up_proj", &[5, 6, 20]),
        ("mlp.experts.down_proj", &[5, 10, 6]),
    ];
    let whole = |text: Value| json!({"model_type": "qwen3_vl_moe", "vision_config": {}, "text_config": text});
    let dir = layer_of(whole(text.clone()), "model.language_model.", tensors);
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    assert_eq!(checkpoint.name(WeightId::Router), "model.language_model.layers.1.mlp.gate.weight");
    assert_eq!(checkpoint.config().router.top_k, 2);
    // Published transposed, and saved untransposed by the model class: the shape decides.
    let all = values("model.language_model.layers.1.mlp.experts.down_proj", 300);
    let down = checkpoint.load(WeightId::Expert(1, Proj::Down)).unwrap();
    assert_eq!((down[0], down[1]), (all[60], all[66]));
    let other: &[(&str, &[usize])] = &[
        ("mlp.gate.weight", &[5, 6]),
        ("mlp.experts.gate_up_proj", &[5, 20, 6]),
        ("mlp.experts.down_proj", &[5, 6, 10]),
    ];
    let dir = layer_of(whole(text.clone()), "model.language_model.", other);
    let down = Checkpoint::open(dir.path(), 1).unwrap().load(WeightId::Expert(1, Proj::Down)).unwrap();
    assert_eq!((down[0], down[1]), (all[60], all[61]));

    let mut wrong = text.clone();
    wrong["num_experts_per_tok"] = json!("2");
    let dir = layer_of(whole(wrong), "model.language_model.", tensors);
    assert_refused(dir.path(), 1, &["config.json: text_config.num_experts_per_tok is \"2\"", "integer"]);
    let mut wrong = text;
    wrong["model_type"] = json!("qwen3_moe");
    let dir = layer_of(whole(wrong), "model.language_model.", tensors);
    assert_refused(dir.path(), 1, &["text_config.model_type is \"qwen3_moe\"", "qwen3_vl_moe_text"]);
    let dir = layer_of(json!({"model_type": "qwen3_vl_moe", "text_config": 3}), "", tensors);
    assert_refused(dir.path(), 1, &["text_config is 3", "an object"]);
}

#[test]
fn missing_tensor_is_reported_with_layout_and_nearest_name() {
    let mut tensors = GRANITE.to_vec();
    tensors[2].0 = "block_sparse_moe.output_linaer.weight";
    let dir = layer_of(granite(), "model.", &tensors);
    let parts = [
        "model.safetensors: no tensor model.layers.1.block_sparse_moe.output_linear.weight",
        "granitemoe, experts in one tensor, gate and up one after the other",
        "the nearest name there is model.layers.1.block_sparse_moe.output_linaer.weight",
    ];
    assert_refused(dir.path(), 1, &parts);
    // The config of one family with the tensors of another.
    let dir = checkpoint(QWEN3, |_| ());
    let mut fields = granite();
    fields["num_local_experts"] = json!(5);
    write_config(dir.path(), &fields);
    assert_refused(
        dir.path(),
        1,
        &["no tensor", "block_sparse_moe", "granitemoe", "the nearest name there is model.layers.1."],
    );
}

#[test]
fn non_finite_weight_is_reported_when_read() {
    let dir = layer_of(granite(), "model.", GRANITE);
    let path = dir.path().join("model.safetensors");
    let mut tensors: Vec<Tensor> =
        GRANITE.iter().map(|(name, shape)| tensor(&format!("model.layers.1.{name}"), "F32", shape)).collect();
    let at = ((2 * 20 + 13) * 6 + 4) * 4;
    tensors[1].3[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    write_tensors(&path, &tensors);
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    checkpoint.load(WeightId::Expert(2, Proj::Gate)).unwrap();
    let error = checkpoint.load(WeightId::Expert(2, Proj::Up)).unwrap_err();
    assert_line(
        &error,
        &["model.safetensors: tensor", "input_linear.weight is NaN at [2, 13, 4]", "expected finite numbers"],
    );
}

#[test]
fn layers_with_experts_equal_the_model_classes() {
    let dense = |edit: fn(&mut Value), layer: usize| {
        let mut fields = granite();
        edit(&mut fields);
        let dir = layer_of(fields, "model.", &[]);
        let error = Checkpoint::open(dir.path(), layer).unwrap_err().to_string();
        error.contains("is dense").then_some(error)
    };
    fn set(c: &mut Value, more: Value) {
        c.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    }
    let jamba = |c: &mut Value| set(c, json!({"model_type": "jamba", "num_hidden_layers": 6}));
    assert!(dense(jamba, 0).is_some() && dense(jamba, 3).is_none());
    let types = |c: &mut Value| set(c, json!({"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense"]}));
    assert!(dense(types, 0).is_none());
    assert!(dense(types, 1).unwrap().contains("mlp_layer_types has \"dense\" there"));
    let usual = |c: &mut Value| set(c, json!({"model_type": "glm4_moe_lite"}));
    assert!(dense(usual, 0).is_some() && dense(usual, 1).is_none());
    let freq = |c: &mut Value| set(c, json!({"model_type": "axk1", "num_hidden_layers": 9, "moe_layer_freq": 3}));
    assert!([3, 6].into_iter().all(|layer| dense(freq, layer).is_none()) && dense(freq, 4).is_some());
    let range = |c: &mut Value| {
        set(
            c,
            json!({"model_type": "ernie4_5_moe", "num_hidden_layers": 9, "moe_layer_interval": 2, "moe_layer_end_index": 6}),
        );
    };
    assert!([1, 3, 5].into_iter().all(|layer| dense(range, layer).is_none()));
    assert!([0, 2, 7, 8].into_iter().all(|layer| dense(range, layer).is_some()));
    let listed = |c: &mut Value| set(c, json!({"model_type": "llama4_text", "moe_layers": [1]}));
    assert!(dense(listed, 0).unwrap().contains("moe_layers") && dense(listed, 1).is_none());
    let stepped = |c: &mut Value| set(c, json!({"model_type": "llama4_text", "interleave_moe_layer_step": 2}));
    assert!(dense(stepped, 0).is_some() && dense(stepped, 1).is_none());
    let blocks = |c: &mut Value| set(c, json!({"model_type": "nemotron_h", "hybrid_override_pattern": "M*E-"}));
    assert!(dense(blocks, 2).is_none() && dense(blocks, 3).unwrap().contains("layers_block_type has \"-\""));
    let hash = |c: &mut Value| set(c, json!({"model_type": "deepseek_v4", "mlp_layer_types": ["hash_moe", "moe"]}));
    assert!(dense(hash, 0).unwrap().contains("hash_moe") && dense(hash, 1).is_none());
}

#[test]
fn activations_are_read_by_name() {
    let known = [
        ("silu", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("relu", Activation::Relu),
        ("relu2", Activation::Relu2),
        ("quick_gelu", Activation::QuickGelu),
    ];
    for (name, activation) in known {
        let dir = checkpoint(OLMOE, |c| c["hidden_act"] = json!(name));
        assert_eq!(Checkpoint::open(dir.path(), 1).unwrap().config().expert.activation, activation);
    }
    let dir = checkpoint(OLMOE, |c| c["hidden_act"] = json!("mish"));
    assert_refused(dir.path(), 1, &["config.json", "hidden_act is \"mish\"", "expected silu"]);
}

#[test]
fn number_of_experts_has_two_names() {
    let rename = |c: &mut Value| {
        c["num_local_experts"] = c["num_experts"].take();
    };
    let dir = checkpoint(QWEN3, rename);
    assert_eq!(Checkpoint::open(dir.path(), 1).unwrap().config().n_experts, 5);
    let dir = checkpoint(QWEN3, |c| c["num_local_experts"] = json!(6));
    assert_refused(dir.path(), 1, &["num_local_experts is 6", "the same as num_experts"]);
}

#[test]
fn shards_are_found_through_the_index() {
    let dir = checkpoint(DEEPSEEK, |_| ());
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let all = weights(DEEPSEEK, "BF16");
    let mut map = serde_json::Map::new();
    for (i, part) in all.chunks(5).enumerate() {
        let file = format!("model-{i:05}.safetensors");
        write_tensors(&dir.path().join(&file), part);
        map.extend(part.iter().map(|t| (t.0.clone(), json!(file))));
    }
    // A shard that this layer does not need is not opened.
    map.insert("model.embed_tokens.weight".into(), json!("elsewhere.safetensors"));
    let index = dir.path().join("model.safetensors.index.json");
    let write_index = |map: &serde_json::Map<String, Value>| {
        fs::write(&index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    };
    write_index(&map);
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    for id in checkpoint.config().weights() {
        let name = checkpoint.name(id);
        let len = checkpoint.config().shape(id).iter().product();
        assert_eq!(checkpoint.load(id).unwrap(), values(&name, len), "{name}");
    }

    let name = "model.layers.1.mlp.experts.3.up_proj.weight";
    map.remove(name).unwrap();
    write_index(&map);
    assert_refused(dir.path(), 1, &["index.json", "no tensor", name]);
    map.insert(name.into(), json!("model-00009.safetensors"));
    write_index(&map);
    assert_refused(dir.path(), 1, &["cannot open", "model-00009.safetensors", "index.json"]);
    map.insert(name.into(), json!("../outside.safetensors"));
    write_index(&map);
    assert_refused(dir.path(), 1, &["../outside.safetensors", "in the same folder"]);
    map.insert(name.into(), json!("model-00000.safetensors"));
    write_index(&map);
    assert_refused(dir.path(), 1, &["model-00000.safetensors", "no tensor", name]);
    fs::write(&index, "{\"weight_map\": 3}").unwrap();
    assert_refused(dir.path(), 1, &["index.json", "invalid type"]);
}

#[test]
fn config_errors_name_the_field() {
    type Edit = fn(&mut Value);
    let cases: [(&str, Edit, &[&str]); 17] = [
        (MIXTRAL, |c| c["model_type"] = json!("llama"), &["model_type is \"llama\"", "mixtral, qwen2_moe"]),
        (MIXTRAL, |c| c["model_type"] = json!(3), &["model_type is 3", "a string"]),
        (MIXTRAL, |c| c["hidden_size"] = json!(null), &["hidden_size is null", "integer"]),
        (MIXTRAL, |c| c["hidden_size"] = json!("6"), &["hidden_size is \"6\"", "integer"]),
        (MIXTRAL, |c| c["hidden_size"] = json!(-6), &["hidden_size is -6", "integer"]),
        (MIXTRAL, |c| c["num_local_experts"] = json!(0), &["experts is 0"]),
        (OLMOE, |c| c["num_experts_per_tok"] = json!(6), &["top-k is 6", "1 to 5"]),
        (OLMOE, |c| c["norm_topk_prob"] = json!(1), &["norm_topk_prob is 1", "true or false"]),
        (QWEN2, |c| c["shared_expert_intermediate_size"] = json!(null), &["shared_expert_intermediate_size"]),
        (QWEN3, |c| c["mlp_only_layers"] = json!([1]), &["layer 1 is dense", "mlp_only_layers"]),
        (QWEN3, |c| c["mlp_only_layers"] = json!(["1"]), &["mlp_only_layers is [\"1\"]", "a list"]),
        (QWEN2, |c| c["decoder_sparse_step"] = json!(3), &["layer 1 is dense", "decoder_sparse_step is 3"]),
        (QWEN2, |c| c["decoder_sparse_step"] = json!(0), &["decoder_sparse_step is 0"]),
        (DEEPSEEK, |c| c["first_k_dense_replace"] = json!(2), &["layer 1 is dense", "first_k_dense_replace is 2"]),
        (DEEPSEEK, |c| c["scoring_func"] = json!("softmax"), &["scoring_func is \"softmax\"", "sigmoid"]),
        (DEEPSEEK, |c| c["n_group"] = json!(3), &["n_group is 3", "a divisor of 4"]),
        (
            DEEPSEEK,
            |c| c["quantization_config"] = json!({"quant_method": "fp8"}),
            &["quantization_config", "fp8", "weight_block_size null", "of DeepSeek-V3"],
        ),
    ];
    for (family, edit, parts) in cases {
        let dir = checkpoint(family, edit);
        assert_refused(dir.path(), 1, parts);
        assert_refused(dir.path(), 1, &["config.json"]);
    }
    let dir = checkpoint(MIXTRAL, |_| ());
    assert_refused(dir.path(), 2, &["config.json", "layer 2 is out of range", "0 to 1"]);
    fs::write(dir.path().join("config.json"), "[1, 2").unwrap();
    assert_refused(dir.path(), 1, &["config.json", "JSON"]);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_refused(dir.path(), 1, &["cannot read", "config.json", "No such file"]);
}

#[test]
fn sparse_step_counts_as_in_the_model_class() {
    // Layer i has experts if i + 1 is a multiple of the step.
    let dir = checkpoint(QWEN3, |c| c["decoder_sparse_step"] = json!(2));
    Checkpoint::open(dir.path(), 1).unwrap();
    assert_refused(dir.path(), 0, &["layer 0 is dense", "decoder_sparse_step is 2"]);
}

#[test]
fn wrong_or_missing_weights_are_reported() {
    let dir = checkpoint(MIXTRAL, |_| ());
    let file = dir.path().join("model.safetensors");
    let name = "model.layers.1.block_sparse_moe.experts.4.w2.weight";
    let edited = |edit: &dyn Fn(&mut Vec<Tensor>, usize)| {
        let mut all = weights(MIXTRAL, "F32");
        let at = all.iter().position(|t| t.0 == name).unwrap();
        edit(&mut all, at);
        write_tensors(&file, &all);
    };
    edited(&|all, at| all[at].2 = vec![10, 6]);
    assert_refused(dir.path(), 1, &["model.safetensors", name, "shape [10, 6]", "expected [6, 10]"]);
    edited(&|all, at| all[at] = tensor(name, "I32", &[6, 10]));
    assert_refused(dir.path(), 1, &["model.safetensors", name, "is I32", "expected F32"]);
    edited(&|all, at| drop(all.remove(at)));
    assert_refused(dir.path(), 1, &["model.safetensors", "no tensor", name]);
    fs::remove_file(file).unwrap();
    assert_refused(dir.path(), 1, &["neither model.safetensors nor model.safetensors.index.json"]);
}
