//! Weights stored in FP8 and MXFP4.

use super::*;

/// DeepSeek-V3 with experts in FP8, in blocks of 4 x 4; `edit` changes the tensors.
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
fn fp8_matrices_are_multiplied_by_block_scales() {
    let dir = fp8(|_| ());
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    // 10 x 6: three rows of two blocks.
    let up = checkpoint.load(WeightId::Expert(2, Proj::Up)).unwrap();
    for (i, x) in up.iter().enumerate() {
        let (row, column) = (i / 6, i % 6);
        assert_eq!(*x, [1.0, 2.0, 4.0, 8.0][i % 4] * (1 + 2 * (row / 4) + column / 4) as f32);
    }
    assert_eq!(checkpoint.weight_slice(WeightId::Expert(2, Proj::Up)).shape, [10, 6]);
    // Unquantised weights are read as usual.
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
    // NaN as an element, or as a scale.
    for (name, dtype, shape, bytes, place) in [
        (UP, "F8_E4M3", [10, 6], [vec![0; 59], vec![0x7f]].concat(), "[9, 5]"),
        (SCALES, "F32", [3, 2], [vec![0; 20], f32::NAN.to_le_bytes().to_vec()].concat(), "[8, 4]"),
    ] {
        let dir = fp8(|all| set(all, name, dtype, &shape, bytes.clone()));
        let error = Checkpoint::open(dir.path(), 1).unwrap().load(WeightId::Expert(3, Proj::Up)).unwrap_err();
        assert_line(&error, &[UP, &format!("is NaN at {place}")]);
    }
    // FP8 in a checkpoint whose config does not declare it.
    let dir = fp8(|_| ());
    write_config(dir.path(), &config(DEEPSEEK));
    assert_refused(dir.path(), 1, &["F8_E4M3", "expected F32"]);
}

/// gpt-oss with 2 experts of 32 x 32 in MXFP4; `edit` changes the tensors.
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
        // All elements of a row are equal: 0.5, 1, 1.5, ... times its scale.
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
        // Gradients have the shape of the model class.
        let place = read.weight_slice(WeightId::Expert(1, proj));
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
    // A family without MXFP4 checkpoints.
    let dir = checkpoint(QWEN3, |c| c["quantization_config"] = json!({"quant_method": "mxfp4"}));
    assert_refused(dir.path(), 1, &["mxfp4", "qwen3_moe", "gpt_oss"]);
}
