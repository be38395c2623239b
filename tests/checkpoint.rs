//! Checkpoints and input files, against files that the tests write themselves.

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

/// Writes a safetensors file, by hand: the reader under test is not trusted to check itself.
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

/// Numbers that every supported type holds exactly, different in every tensor.
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

/// The weights of layer 1 under the names and in the shapes of the published checkpoints.
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

/// A checkpoint in one file, after `edit` has changed its configuration.
fn checkpoint(family: &str, edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut c = config(family);
    edit(&mut c);
    write_config(dir.path(), &c);
    write_tensors(&dir.path().join("model.safetensors"), &weights(family, "F32"));
    dir
}

/// The error of opening layer `layer`: one line, with every one of `parts`.
fn assert_refused(dir: &Path, layer: usize, parts: &[&str]) {
    let error = Checkpoint::open(dir, layer).expect_err("opened");
    assert_line(&error, parts);
    // Nothing hides behind the first line: `{:#}` shows the causes too.
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
fn every_weight_of_every_family_is_read_under_its_own_name() {
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
fn the_names_on_disk_are_the_published_ones() {
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
fn a_large_tensor_in_bf16_is_read_whole() {
    // More than the reader converts at a time, and no multiple of it.
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
fn defaults_are_those_of_the_model_classes() {
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
fn null_is_what_the_model_classes_make_of_it() {
    let open =
        |family, edit: fn(&mut Value)| Checkpoint::open(checkpoint(family, edit).path(), 1).map(|c| c.config().clone());
    // `bool | None` there: false where it is read.
    assert!(!open(DEEPSEEK, |c| c["norm_topk_prob"] = json!(null)).unwrap().router.renormalise);
    // Fields that the model class cannot do without.
    for field in ["n_group", "topk_group", "num_experts_per_tok", "routed_scaling_factor", "n_shared_experts"] {
        let dir = checkpoint(DEEPSEEK, |c| c[field] = json!(null));
        assert_refused(dir.path(), 1, &["config.json", field, "null"]);
    }
    let dir = checkpoint(QWEN3, |c| c["norm_topk_prob"] = json!(null));
    assert_refused(dir.path(), 1, &["config.json", "norm_topk_prob is null", "true or false"]);
    open(QWEN3, |c| c["mlp_only_layers"] = json!(null)).unwrap();
    // Absent: the class's own number, which here is not what the file has.
    let dir = checkpoint(DEEPSEEK, |c| drop(c.as_object_mut().unwrap().remove("num_experts_per_tok")));
    assert_refused(dir.path(), 1, &["config.json", "top-k is 8"]);
}

/// One layer of `family` with these fields and tensors, F32, before which `prefix` stands.
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
fn experts_in_one_tensor_are_read_one_by_one() {
    let dir = layer_of(granite(), "model.", GRANITE);
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    let all = values("model.layers.1.block_sparse_moe.input_linear.weight", 5 * 20 * 6);
    assert_eq!(checkpoint.load(WeightId::Expert(3, Proj::Gate)).unwrap(), all[3 * 120..3 * 120 + 60]);
    assert_eq!(checkpoint.load(WeightId::Expert(3, Proj::Up)).unwrap(), all[3 * 120 + 60..4 * 120]);
    let place = checkpoint.weight_place(WeightId::Expert(3, Proj::Up));
    assert_eq!((place.shape, place.part), (vec![5, 20, 6], 360..480));

    // gpt-oss: transposed, gate and up in turns, biases too.
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
    // Not a part of a longer word.
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
fn a_text_model_inside_another() {
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
    // Published transposed, and the other way as the model class has it: told apart by the shape.
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
fn a_missing_tensor_is_named_with_the_layout_and_the_nearest_name() {
    let mut tensors = GRANITE.to_vec();
    tensors[2].0 = "block_sparse_moe.output_linaer.weight";
    let dir = layer_of(granite(), "model.", &tensors);
    let parts = [
        "model.safetensors: no tensor model.layers.1.block_sparse_moe.output_linear.weight",
        "granitemoe, experts in one tensor, gate and up one after the other",
        "the nearest name there is model.layers.1.block_sparse_moe.output_linaer.weight",
    ];
    assert_refused(dir.path(), 1, &parts);
    // A config of another family with this one's name.
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
fn a_weight_that_is_not_finite_is_named_when_it_is_read() {
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
fn layers_with_experts_are_those_of_the_model_classes() {
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
fn activations_by_name() {
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
fn the_number_of_experts_has_two_names() {
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
    // A shard that this layer does not need is not even opened.
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

/// DeepSeek-V3 with its experts in FP8, in blocks of 4 x 4; `edit` changes what is written.
fn fp8(edit: impl Fn(&mut Vec<Tensor>)) -> tempfile::TempDir {
    let dir = checkpoint(DEEPSEEK, |c| {
        c["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [4, 4]});
    });
    let mut tensors = Vec::new();
    for tensor in weights(DEEPSEEK, "F32") {
        let (name, _, shape, _) = &tensor;
        if !name.contains("expert") {
            tensors.push(tensor);
            continue;
        }
        // Elements 1, 2, 4, ..., and scales 1, 2, 3, ...
        let elements = (0..shape[0] * shape[1]).map(|i| 0x38 + 8 * (i % 4) as u8).collect();
        let grid = [shape[0].div_ceil(4), shape[1].div_ceil(4)];
        let scales = (0..grid[0] * grid[1]).flat_map(|i| (1.0 + i as f32).to_le_bytes()).collect();
        tensors.push((format!("{name}_scale_inv"), "F32", grid.to_vec(), scales));
        tensors.push((name.clone(), "F8_E4M3", shape.clone(), elements));
    }
    edit(&mut tensors);
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

#[test]
fn matrices_in_fp8_are_multiplied_by_the_scales_of_their_blocks() {
    let dir = fp8(|_| ());
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    // 10 x 6: three rows of two blocks.
    let up = checkpoint.load(WeightId::Expert(2, Proj::Up)).unwrap();
    for (i, x) in up.iter().enumerate() {
        let (row, column) = (i / 6, i % 6);
        assert_eq!(*x, [1.0, 2.0, 4.0, 8.0][i % 4] * (1 + 2 * (row / 4) + column / 4) as f32);
    }
    assert_eq!(checkpoint.weight_place(WeightId::Expert(2, Proj::Up)).shape, [10, 6]);
    // What is not quantised is read as ever.
    assert_eq!(checkpoint.load(WeightId::Router).unwrap(), values("model.layers.1.mlp.gate.weight", 24));

    const UP: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
    const SCALES: &str = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv";
    let refused = |edit: &dyn Fn(&mut Vec<Tensor>), parts: &[&str]| assert_refused(fp8(edit).path(), 1, parts);
    refused(&|all| all.retain(|tensor| tensor.0 != SCALES), &["model.safetensors", SCALES]);
    let set = |all: &mut Vec<Tensor>, name: &str, dtype, shape: &[usize], bytes: Vec<u8>| {
        *all.iter_mut().find(|tensor| tensor.0 == name).unwrap() = (name.to_string(), dtype, shape.to_vec(), bytes);
    };
    refused(&|all| set(all, SCALES, "F32", &[2, 3], vec![0; 24]), &[SCALES, "[2, 3]", "[3, 2]"]);
    refused(&|all| set(all, SCALES, "I32", &[3, 2], vec![0; 24]), &[SCALES, "I32"]);
    refused(&|all| set(all, UP, "F8_E4M3", &[10, 5], vec![0; 50]), &[UP, "[10, 5]", "[10, 6]"]);
    refused(&|all| set(all, UP, "F8_E5M2", &[10, 6], vec![0; 60]), &[UP, "F8_E5M2"]);
    // No number, of an element or of a scale.
    for (name, dtype, shape, bytes, place) in [
        (UP, "F8_E4M3", [10, 6], [vec![0; 59], vec![0x7f]].concat(), "[9, 5]"),
        (SCALES, "F32", [3, 2], [vec![0; 20], f32::NAN.to_le_bytes().to_vec()].concat(), "[8, 4]"),
    ] {
        let dir = fp8(|all| set(all, name, dtype, &shape, bytes.clone()));
        let error = Checkpoint::open(dir.path(), 1).unwrap().load(WeightId::Expert(3, Proj::Up)).unwrap_err();
        assert_line(&error, &[UP, &format!("is NaN at {place}")]);
    }
    // FP8 in a checkpoint that does not say so.
    let dir = fp8(|_| ());
    write_config(dir.path(), &config(DEEPSEEK));
    assert_refused(dir.path(), 1, &["F8_E4M3", "expected F32"]);
}

/// gpt-oss with 2 experts of 32 to 32 in MXFP4; `edit` changes what is written.
fn mxfp4(edit: impl Fn(&mut Vec<Tensor>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({
        "model_type": "gpt_oss", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "num_local_experts": 2,
        "num_experts_per_tok": 1, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"},
    });
    write_config(dir.path(), &config);
    let mlp = |name: &str| format!("model.layers.1.mlp.{name}");
    let mut tensors: Vec<Tensor> = [
        ("router.weight", &[2, 32][..]),
        ("router.bias", &[2]),
        ("experts.gate_up_proj_bias", &[2, 64]),
        ("experts.down_proj_bias", &[2, 32]),
    ]
    .map(|(name, shape)| tensor(&mlp(name), "F32", shape))
    .into();
    for (name, rows) in [("experts.gate_up_proj", 64), ("experts.down_proj", 32)] {
        // Each row of one element: a half, 1, 1.5, ... of its scale.
        let blocks = (0..2 * rows * 16).map(|i| (1 + (i / 16) % 7) as u8 * 0x11).collect();
        let scales = (0..2 * rows).map(|row| 127 + (row / rows) as u8).collect();
        tensors.push((mlp(name) + "_blocks", "U8", vec![2, rows, 1, 16], blocks));
        tensors.push((mlp(name) + "_scales", "U8", vec![2, rows, 1], scales));
    }
    edit(&mut tensors);
    write_tensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

#[test]
fn experts_in_mxfp4_are_read_by_rows() {
    const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let dir = mxfp4(|_| ());
    let read = Checkpoint::open(dir.path(), 1).unwrap();
    for (proj, step, offset, rows) in [(Proj::Gate, 2, 0, 64), (Proj::Up, 2, 1, 64), (Proj::Down, 1, 0, 32)] {
        let weight = read.load(WeightId::Expert(1, proj)).unwrap();
        assert_eq!(weight.len(), 32 * 32);
        for (i, x) in weight.iter().enumerate() {
            let row = rows + offset + step * (i / 32);
            assert_eq!(*x, 2.0 * FP4[1 + row % 7], "{proj:?} {i}");
        }
        // Gradients are in the shape of the model class.
        let place = read.weight_place(WeightId::Expert(1, proj));
        assert!(!place.tensor.contains("_blocks") && place.shape == [2, 32, rows], "{place:?}");
    }
    const BLOCKS: &str = "model.layers.1.mlp.experts.gate_up_proj_blocks";
    const SCALES: &str = "model.layers.1.mlp.experts.gate_up_proj_scales";
    let refused = |edit: &dyn Fn(&mut Vec<Tensor>), parts: &[&str]| assert_refused(mxfp4(edit).path(), 1, parts);
    refused(&|all| all.retain(|tensor| tensor.0 != SCALES), &["model.safetensors", SCALES]);
    refused(&|all| all.retain(|tensor| tensor.0 != BLOCKS), &["model.safetensors", BLOCKS]);
    let set = |all: &mut Vec<Tensor>, name: &str, shape: &[usize]| {
        let bytes = vec![255; shape.iter().product()];
        *all.iter_mut().find(|tensor| tensor.0 == name).unwrap() = (name.to_string(), "U8", shape.to_vec(), bytes);
    };
    refused(&|all| set(all, SCALES, &[2, 64, 2]), &[SCALES, "[2, 64, 2]", "U8 of shape [2, 64, 1]"]);
    refused(&|all| set(all, BLOCKS, &[2, 64, 16]), &[BLOCKS, "[2, 64, 16]", "U8 of shape [2, 64, 1, 16]"]);
    let dir = mxfp4(|all| set(all, SCALES, &[2, 64, 1]));
    let error = Checkpoint::open(dir.path(), 1).unwrap().load(WeightId::Expert(0, Proj::Up)).unwrap_err();
    assert_line(&error, &[SCALES, "row 0, column 0 of expert 0 NaN"]);
    // Another family's.
    let dir = checkpoint(QWEN3, |c| c["quantization_config"] = json!({"quant_method": "mxfp4"}));
    assert_refused(dir.path(), 1, &["mxfp4", "qwen3_moe", "gpt_oss"]);
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
fn the_sparse_step_counts_as_the_model_class_does() {
    // Layer i has experts where (i + 1) is a multiple of the step.
    let dir = checkpoint(QWEN3, |c| c["decoder_sparse_step"] = json!(2));
    Checkpoint::open(dir.path(), 1).unwrap();
    assert_refused(dir.path(), 0, &["layer 0 is dense", "decoder_sparse_step is 2"]);
}

#[test]
fn weights_of_another_shape_or_type_or_none_at_all_are_named() {
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

#[test]
fn a_claim_of_very_many_experts_is_refused_at_once() {
    let dir = checkpoint(MIXTRAL, |c| c["num_local_experts"] = json!(1u64 << 60));
    assert_refused(dir.path(), 1, &["config.json", "experts is 1152921504606846976"]);
    let dir = checkpoint(MIXTRAL, |c| c["num_local_experts"] = json!(1u64 << 20));
    assert_refused(dir.path(), 1, &["gate.weight", "shape [5, 6]"]);
}

#[test]
fn malformed_safetensors_files_are_refused() {
    let dir = checkpoint(MIXTRAL, |_| ());
    let file = dir.path().join("model.safetensors");
    let whole = fs::read(&file).unwrap();

    fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    assert_refused(dir.path(), 1, &["model.safetensors", "tensor model.layers.1", "truncated"]);
    fs::write(&file, &whole[..100]).unwrap();
    assert_refused(dir.path(), 1, &["model.safetensors is truncated", "header"]);
    fs::write(&file, &whole[..5]).unwrap();
    assert_refused(dir.path(), 1, &["model.safetensors is not a safetensors file", "5 bytes"]);
    fs::write(&file, [0xff; 64]).unwrap();
    assert_refused(dir.path(), 1, &["model.safetensors is not a safetensors file", "header of"]);

    let one = |entry: Value| json!({ "t": entry }).to_string();
    let cases = [
        ("not json".to_owned(), "not a JSON object"),
        ("[]".to_owned(), "not a JSON object"),
        (one(json!({"dtype": "F32", "shape": [4], "data_offsets": [0, 20]})), "20 bytes of data for shape [4] of F32"),
        (one(json!({"dtype": "F32", "shape": [4], "data_offsets": [16, 0]})), "begin at 16 and end at 0"),
        (one(json!({"dtype": "F32", "shape": [4], "data_offsets": [8, 24]})), "truncated"),
        (one(json!({"dtype": "F32", "shape": [1u64 << 62, 4], "data_offsets": [0, 16]})), "overflows"),
        (one(json!({"dtype": "F31", "shape": [4], "data_offsets": [0, 16]})), "F31"),
        (one(json!({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]})), "-4"),
        (one(json!({"dtype": "F32", "shape": [4]})), "data_offsets"),
    ];
    for (header, part) in cases {
        write_raw(&file, &header, &[0; 16]);
        assert_refused(dir.path(), 1, &["model.safetensors", part]);
        if header.starts_with('{') {
            assert_refused(dir.path(), 1, &["tensor t"]);
        }
    }
}

/// Headers that are valid, and that are not quite: read here as by the `safetensors` library.
#[test]
fn headers_are_accepted_where_the_library_accepts_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let mut random = ChaCha8Rng::seed_from_u64(10);
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..4000 {
        // Tensors that follow each other, in any order of names; `hidden_states` is among them.
        let n = random.random_range(1..5);
        let (mut at, mut entries) = (0_usize, Vec::new());
        for i in 0..n {
            let (rows, cols) = (random.random_range(0..4), random.random_range(1..4));
            let (dtype, size) = [("F32", 4), ("BF16", 2), ("F64", 8), ("U8", 1)][random.random_range(0..4)];
            let name = if i == 0 { "hidden_states".to_string() } else { format!("t{}", random.random_range(0..9)) };
            let dtype = if i == 0 && dtype == "U8" { ("F32", 4) } else { (dtype, size) };
            let end = at + rows * cols * dtype.1;
            entries.push((name, dtype.0, [rows, cols], [at, end]));
            at = end;
        }
        // One thing is wrong, in most.
        let which = random.random_range(0..entries.len());
        let mut data = at;
        match round % 10 {
            0 => entries[which].3[0] += 1,
            1 => entries[which].3 = entries[which].3.map(|at| at + 4),
            2 => data += 1,
            3 => data = data.saturating_sub(1),
            4 => entries[which].2[0] += 1,
            5 => entries.push(entries[which].clone()),
            6 => entries.iter_mut().skip(1).for_each(|entry| entry.3 = entry.3.map(|at| at + 8)),
            _ => {}
        }
        entries.shuffle(&mut random);
        let mut names: Vec<String> = entries
            .iter()
            .map(|(name, dtype, shape, offsets)| {
                format!(r#"{name:?}:{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":{offsets:?}}}"#)
            })
            .collect();
        match random.random_range(0..6) {
            0 => names.push(r#""__metadata__":{"format":"pt"}"#.into()),
            1 => names.push(r#""__metadata__":{"format":1}"#.into()),
            _ => {}
        }
        let header = format!("{{{}}}", names.join(","));
        write_raw(&path, &header, &vec![0; data]);
        let bytes = fs::read(&path).unwrap();
        // The library takes the last of several entries of one name. Whoever reads such a file by another library would read another tensor.
        let mut by_name: Vec<&String> = entries.iter().map(|entry| &entry.0).collect();
        by_name.sort();
        let twice = by_name.windows(2).any(|pair| pair[0] == pair[1]);
        let library = safetensors::SafeTensors::deserialize(&bytes).is_ok() && !twice;
        let ours = read_input(&path);
        assert_eq!(ours.is_ok(), library, "{header}, {data} bytes: {ours:?}");
        if library { accepted += 1 } else { refused += 1 }
    }
    assert!(accepted > 300 && refused > 300, "{accepted} {refused}");
}

#[test]
fn what_a_header_says_of_overlaps_gaps_and_duplicates_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let entry = |name: &str, from: usize, to: usize| {
        format!(r#""{name}":{{"dtype":"F32","shape":[1,{}],"data_offsets":[{from},{to}]}}"#, (to - from) / 4)
    };
    let refused = |entries: &[String], data: usize, parts: &[&str]| {
        write_raw(&path, &format!("{{{}}}", entries.join(",")), &vec![0; data]);
        assert_line(&read_input(&path).unwrap_err(), parts);
    };
    let first = entry("hidden_states", 0, 16);
    refused(&[first.clone(), entry("b", 8, 24)], 24, &["tensor b", "from 8 on, overlap those of tensor hidden_states"]);
    refused(
        &[first.clone(), entry("b", 20, 24)],
        24,
        &["tensor b", "from 20 on, leave a gap after tensor hidden_states"],
    );
    refused(&[entry("hidden_states", 4, 8)], 8, &["tensor hidden_states", "leave a gap after the header"]);
    refused(&[first.clone(), first.clone()], 16, &["tensor hidden_states", "comes twice"]);
    refused(&[first], 20, &["in.safetensors", "its tensors end at byte 16 of the data, the file has 20"]);
}

/// A header takes little more memory than its bytes, or is refused.
#[test]
fn a_large_header_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let entries: Vec<String> =
        (0..250_001).map(|i| format!(r#""{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#)).collect();
    write_raw(&path, &format!("{{{}}}", entries.join(",")), &[]);
    assert_line(&read_input(&path).unwrap_err(), &["in.safetensors", "more than 250000 tensors"]);
    let file = fs::File::create(&path).unwrap();
    file.write_all_at(&(40_u64 << 20).to_le_bytes(), 0).unwrap();
    file.set_len(41 << 20).unwrap();
    assert_line(&read_input(&path).unwrap_err(), &["a header of 41943040 bytes, at most 33554432 fit"]);
}

#[test]
fn a_file_cut_short_after_it_was_opened_is_an_error_and_not_a_signal() {
    let dir = checkpoint(MIXTRAL, |_| ());
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    let file = File::options().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_len(200).unwrap();
    let error = checkpoint.load(WeightId::Router).unwrap_err();
    assert_line(&error, &["model.safetensors", "gate.weight", "cut short"]);
}

/// An input file of 20 tokens of width 3; `None` leaves a tensor out.
fn write_input(path: &Path, hidden_states: Option<Tensor>, grad_output: Option<Tensor>) {
    let tensors: Vec<Tensor> = [hidden_states, grad_output].into_iter().flatten().collect();
    write_tensors(path, &tensors);
}

#[test]
fn input_rows() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    write_input(&path, Some(tensor("hidden_states", "BF16", &[20, 3])), Some(tensor("grad_output", "F32", &[20, 3])));
    let input = read_input(&path).unwrap();
    assert_eq!((input.tokens(), input.hidden(), input.has_grad_output()), (20, 3, true));
    assert_eq!(input.rows(InputTensor::HiddenStates, 5..7).unwrap(), values("hidden_states", 60)[15..21]);
    assert_eq!(input.rows(InputTensor::GradOutput, 0..20).unwrap(), values("grad_output", 60));
    assert_eq!(input.rows(InputTensor::GradOutput, 20..20).unwrap(), [0f32; 0]);
    input.expect_hidden(3).unwrap();
    assert_line(&input.expect_hidden(4).unwrap_err(), &["in.safetensors", "[20, 3]", "[tokens, 4]"]);

    write_input(&path, Some(tensor("hidden_states", "F32", &[0, 3])), None);
    let empty = read_input(&path).unwrap();
    assert_eq!((empty.tokens(), empty.has_grad_output()), (0, false));
    empty.check_finite(0..0).unwrap();
}

#[test]
fn bad_inputs_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let refused = |parts: &[&str]| assert_line(&read_input(&path).unwrap_err(), parts);
    refused(&["cannot open", "in.safetensors", "No such file"]);
    fs::write(&path, "hidden states, honestly").unwrap();
    refused(&["in.safetensors is not a safetensors file"]);
    let x = |dtype, shape: &[usize]| Some(tensor("hidden_states", dtype, shape));
    let g = |dtype, shape: &[usize]| Some(tensor("grad_output", dtype, shape));
    write_input(&path, None, g("F32", &[20, 3]));
    refused(&["in.safetensors", "no tensor hidden_states"]);
    write_input(&path, x("F32", &[1, 20, 3]), None);
    refused(&["in.safetensors", "hidden_states has shape [1, 20, 3]", "[tokens, hidden]"]);
    write_input(&path, x("I32", &[20, 3]), None);
    refused(&["in.safetensors", "hidden_states is I32"]);
    write_input(&path, x("F32", &[20, 3]), g("F32", &[3, 20]));
    refused(&["in.safetensors", "grad_output has shape [3, 20]", "expected [20, 3]"]);
    write_input(&path, x("F32", &[20, 3]), g("F32", &[20, 3]));
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 4]).unwrap();
    refused(&["in.safetensors", "truncated"]);
    assert_line(&read_input(dir.path()).unwrap_err(), &["is not a regular file"]);
}

#[test]
fn a_number_that_is_not_finite_is_named_by_position() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let with = |name, row: usize, column: usize, x: f32| {
        let mut t = tensor(name, "F32", &[1500, 4]);
        let at = (row * 4 + column) * 4;
        t.3[at..at + 4].copy_from_slice(&x.to_le_bytes());
        Some(t)
    };
    write_input(&path, with("hidden_states", 17, 3, f32::NAN), None);
    let input = read_input(&path).unwrap();
    let error = input.check_finite(0..1500).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: hidden_states[17, 3] is NaN", path.display()));
    input.check_finite(18..1500).unwrap();
    write_input(&path, with("hidden_states", 0, 0, 0.0), with("grad_output", 1499, 1, f32::NEG_INFINITY));
    let error = read_input(&path).unwrap().check_finite(0..1500).unwrap_err();
    assert_line(&error, &["in.safetensors: grad_output[1499, 1] is -inf"]);
}
