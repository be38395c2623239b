//! Checkpoints and input files, against files that the tests write themselves.

use std::fs;
use std::fs::File;
use std::path::Path;

use aristos::checkpoint::{Checkpoint, Family, InputTensor, read_input};
use aristos::moe::{Activation, GroupLimit, Proj, Scoring, WeightId, WeightSource};
use half::{bf16, f16};
use serde_json::{Value, json};

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
fn config(family: Family) -> Value {
    let mut c =
        json!({"model_type": family.model_type(), "num_hidden_layers": 2, "hidden_size": 6, "num_experts_per_tok": 2});
    let more = match family {
        Family::Mixtral => json!({"intermediate_size": 10, "num_local_experts": 5}),
        Family::Qwen2Moe => json!({
            "moe_intermediate_size": 10, "intermediate_size": 99, "num_experts": 5, "shared_expert_intermediate_size": 14,
        }),
        Family::Qwen3Moe => json!({"moe_intermediate_size": 10, "intermediate_size": 99, "num_experts": 5}),
        Family::Olmoe => json!({"intermediate_size": 10, "num_experts": 5}),
        Family::DeepseekV3 => json!({
            "moe_intermediate_size": 10, "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
        }),
        other => panic!("no config.json for {other:?}"),
    };
    c.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    c
}

/// The weights of layer 1 under the names and in the shapes of the published checkpoints.
fn weights(family: Family, dtype: &'static str) -> Vec<Tensor> {
    let block = if family == Family::Mixtral { "block_sparse_moe" } else { "mlp" };
    let n_experts = if family == Family::DeepseekV3 { 4 } else { 5 };
    let [gate, up, down] =
        if family == Family::Mixtral { ["w1", "w3", "w2"] } else { ["gate_proj", "up_proj", "down_proj"] };
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
        Family::Qwen2Moe => Some(("shared_expert", 14)),
        Family::DeepseekV3 => Some(("shared_experts", 20)),
        _ => None,
    };
    if let Some((shared, width)) = shared {
        add(&format!("{shared}.gate_proj.weight"), dtype, &[width, 6]);
        add(&format!("{shared}.up_proj.weight"), dtype, &[width, 6]);
        add(&format!("{shared}.down_proj.weight"), dtype, &[6, width]);
    }
    if family == Family::Qwen2Moe {
        add("shared_expert_gate.weight", dtype, &[1, 6]);
    }
    if family == Family::DeepseekV3 {
        add("gate.e_score_correction_bias", "F32", &[4]);
    }
    all
}

fn write_config(dir: &Path, config: &Value) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
}

/// A checkpoint in one file, after `edit` has changed its configuration.
fn checkpoint(family: Family, edit: impl FnOnce(&mut Value)) -> tempfile::TempDir {
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

const FAMILIES: [Family; 5] = [Family::Mixtral, Family::Qwen2Moe, Family::Qwen3Moe, Family::Olmoe, Family::DeepseekV3];

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
    assert_eq!(
        name(Family::Mixtral, WeightId::Expert(3, Proj::Up)),
        "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    );
    assert_eq!(
        name(Family::Qwen3Moe, WeightId::Expert(4, Proj::Down)),
        "model.layers.1.mlp.experts.4.down_proj.weight"
    );
    assert_eq!(
        name(Family::Qwen2Moe, WeightId::Shared(Proj::Gate)),
        "model.layers.1.mlp.shared_expert.gate_proj.weight"
    );
    assert_eq!(name(Family::DeepseekV3, WeightId::RouterBias), "model.layers.1.mlp.gate.e_score_correction_bias");
}

#[test]
fn a_large_tensor_in_bf16_is_read_whole() {
    // More than the reader converts at a time, and no multiple of it.
    let dir = checkpoint(Family::Mixtral, |c| c["hidden_size"] = json!(40_007));
    let mut written = weights(Family::Mixtral, "BF16");
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
    assert!(router(Family::Mixtral, |_| ()).renormalise);
    for family in [Family::Qwen2Moe, Family::Qwen3Moe, Family::Olmoe] {
        let plain = router(family, |_| ());
        assert_eq!((plain.scoring, plain.renormalise, plain.scaling), (Scoring::Softmax, false, 1.0));
        assert!(router(family, |c| c["norm_topk_prob"] = json!(true)).renormalise);
    }
    let deepseek = router(Family::DeepseekV3, |_| ());
    assert_eq!((deepseek.scoring, deepseek.renormalise, deepseek.scaling), (Scoring::Sigmoid, true, 2.5));
    assert_eq!(deepseek.groups, Some(GroupLimit { n_groups: 2, top_groups: 1 }));
    assert!(deepseek.correction_bias);
}

#[test]
fn activations_by_name() {
    let known = [
        ("silu", Activation::Silu),
        ("gelu", Activation::Gelu),
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("relu", Activation::Relu),
    ];
    for (name, activation) in known {
        let dir = checkpoint(Family::Olmoe, |c| c["hidden_act"] = json!(name));
        assert_eq!(Checkpoint::open(dir.path(), 1).unwrap().config().expert.activation, activation);
    }
    let dir = checkpoint(Family::Olmoe, |c| c["hidden_act"] = json!("relu2"));
    assert_refused(dir.path(), 1, &["config.json", "hidden_act is \"relu2\"", "expected silu"]);
}

#[test]
fn the_number_of_experts_has_two_names() {
    let rename = |c: &mut Value| {
        c["num_local_experts"] = c["num_experts"].take();
    };
    let dir = checkpoint(Family::Qwen3Moe, rename);
    assert_eq!(Checkpoint::open(dir.path(), 1).unwrap().config().n_experts, 5);
    let dir = checkpoint(Family::Qwen3Moe, |c| c["num_local_experts"] = json!(6));
    assert_refused(dir.path(), 1, &["num_local_experts is 6", "the same as num_experts"]);
}

#[test]
fn shards_are_found_through_the_index() {
    let dir = checkpoint(Family::DeepseekV3, |_| ());
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let all = weights(Family::DeepseekV3, "BF16");
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

#[test]
fn config_errors_name_the_field() {
    type Edit = fn(&mut Value);
    let cases: [(Family, Edit, &[&str]); 17] = [
        (Family::Mixtral, |c| c["model_type"] = json!("llama"), &["model_type is \"llama\"", "mixtral, qwen2_moe"]),
        (Family::Mixtral, |c| c["model_type"] = json!(3), &["model_type is 3", "a string"]),
        (Family::Mixtral, |c| c["hidden_size"] = json!(null), &["hidden_size is missing", "integer"]),
        (Family::Mixtral, |c| c["hidden_size"] = json!("6"), &["hidden_size is \"6\"", "integer"]),
        (Family::Mixtral, |c| c["hidden_size"] = json!(-6), &["hidden_size is -6", "integer"]),
        (Family::Mixtral, |c| c["num_local_experts"] = json!(0), &["experts is 0"]),
        (Family::Olmoe, |c| c["num_experts_per_tok"] = json!(6), &["top-k is 6", "1 to 5"]),
        (Family::Olmoe, |c| c["norm_topk_prob"] = json!(1), &["norm_topk_prob is 1", "true or false"]),
        (
            Family::Qwen2Moe,
            |c| c["shared_expert_intermediate_size"] = json!(null),
            &["shared_expert_intermediate_size"],
        ),
        (Family::Qwen3Moe, |c| c["mlp_only_layers"] = json!([1]), &["layer 1 is dense", "mlp_only_layers"]),
        (Family::Qwen3Moe, |c| c["mlp_only_layers"] = json!(["1"]), &["mlp_only_layers is [\"1\"]", "a list"]),
        (Family::Qwen2Moe, |c| c["decoder_sparse_step"] = json!(3), &["layer 1 is dense", "decoder_sparse_step is 3"]),
        (Family::Qwen2Moe, |c| c["decoder_sparse_step"] = json!(0), &["decoder_sparse_step is 0"]),
        (
            Family::DeepseekV3,
            |c| c["first_k_dense_replace"] = json!(2),
            &["layer 1 is dense", "first_k_dense_replace is 2"],
        ),
        (Family::DeepseekV3, |c| c["scoring_func"] = json!("softmax"), &["scoring_func is \"softmax\"", "sigmoid"]),
        (Family::DeepseekV3, |c| c["n_group"] = json!(3), &["n_group is 3", "a divisor of 4"]),
        (
            Family::DeepseekV3,
            |c| c["quantization_config"] = json!({"quant_method": "fp8"}),
            &["quantization_config", "fp8", "unquantised"],
        ),
    ];
    for (family, edit, parts) in cases {
        let dir = checkpoint(family, edit);
        assert_refused(dir.path(), 1, parts);
        assert_refused(dir.path(), 1, &["config.json"]);
    }
    let dir = checkpoint(Family::Mixtral, |_| ());
    assert_refused(dir.path(), 2, &["config.json", "layer 2 is out of range", "0 to 1"]);
    fs::write(dir.path().join("config.json"), "[1, 2").unwrap();
    assert_refused(dir.path(), 1, &["config.json", "JSON"]);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    assert_refused(dir.path(), 1, &["cannot read", "config.json", "No such file"]);
}

#[test]
fn the_sparse_step_counts_as_the_model_class_does() {
    // Layer i has experts where (i + 1) is a multiple of the step.
    let dir = checkpoint(Family::Qwen3Moe, |c| c["decoder_sparse_step"] = json!(2));
    Checkpoint::open(dir.path(), 1).unwrap();
    assert_refused(dir.path(), 0, &["layer 0 is dense", "decoder_sparse_step is 2"]);
}

#[test]
fn weights_of_another_shape_or_type_or_none_at_all_are_named() {
    let dir = checkpoint(Family::Mixtral, |_| ());
    let file = dir.path().join("model.safetensors");
    let name = "model.layers.1.block_sparse_moe.experts.4.w2.weight";
    let edited = |edit: &dyn Fn(&mut Vec<Tensor>, usize)| {
        let mut all = weights(Family::Mixtral, "F32");
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
    let dir = checkpoint(Family::Mixtral, |c| c["num_local_experts"] = json!(1u64 << 60));
    assert_refused(dir.path(), 1, &["config.json", "experts is 1152921504606846976"]);
    let dir = checkpoint(Family::Mixtral, |c| c["num_local_experts"] = json!(1u64 << 20));
    assert_refused(dir.path(), 1, &["gate.weight", "shape [5, 6]"]);
}

#[test]
fn malformed_safetensors_files_are_refused() {
    let dir = checkpoint(Family::Mixtral, |_| ());
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

#[test]
fn a_file_cut_short_after_it_was_opened_is_an_error_and_not_a_signal() {
    let dir = checkpoint(Family::Mixtral, |_| ());
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
