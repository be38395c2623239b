//! Malformed, large, truncated and non-finite files; input files.

use super::*;

#[test]
fn too_many_experts_are_rejected_at_once() {
    let dir = checkpoint(MIXTRAL, |c| c["num_local_experts"] = json!(1u64 << 60));
    assert_refused(dir.path(), 1, &["config.json", "experts is 1152921504606846976"]);
    let dir = checkpoint(MIXTRAL, |c| c["num_local_experts"] = json!(1u64 << 20));
    assert_refused(dir.path(), 1, &["gate.weight", "shape [5, 6]"]);
}

#[test]
fn malformed_safetensors_files_are_rejected() {
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

/// Random headers, valid and slightly invalid, are accepted exactly if the `safetensors` library accepts them.
#[test]
fn header_checks_agree_with_the_safetensors_library() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("in.safetensors");
    let mut random = ChaCha8Rng::seed_from_u64(10);
    let (mut accepted, mut refused) = (0, 0);
    for round in 0..4000 {
        // Contiguous tensors in any order of names, one of them `hidden_states`.
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
        // Most headers get one fault.
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
        // The library uses the last of several entries with one name. Another library might use a different one, so
        // duplicates are rejected here.
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
fn overlaps_gaps_and_duplicates_in_a_header_are_reported() {
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

/// A header needs little more memory than its size, or is rejected.
#[test]
fn too_large_header_is_rejected() {
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
fn file_truncated_after_opening_is_an_error() {
    let dir = checkpoint(MIXTRAL, |_| ());
    let checkpoint = Checkpoint::open(dir.path(), 1).unwrap();
    let file = File::options().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_len(200).unwrap();
    let error = checkpoint.load(WeightId::Router).unwrap_err();
    assert_line(&error, &["model.safetensors", "gate.weight", "cut short"]);
}

/// An input file of 20 tokens of width 3; `None` omits a tensor.
fn write_input(path: &Path, hidden_states: Option<Tensor>, grad_output: Option<Tensor>) {
    let tensors: Vec<Tensor> = [hidden_states, grad_output].into_iter().flatten().collect();
    write_tensors(path, &tensors);
}

#[test]
fn input_rows_are_read() {
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
fn non_finite_input_is_reported_by_position() {
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
