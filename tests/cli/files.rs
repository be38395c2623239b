//! A checkpoint and an input that tests can run and damage.

use std::fs;
use std::path::{Path, PathBuf};

use aristos::checkpoint::{InputTensor, read_input};
use serde_json::{Value, json};

use crate::binary::{Outcome, aristos, run, write_tensors};

/// The hidden width and the layer of the bundled example.
pub const HIDDEN: usize = 80;
pub const LAYER: usize = 1;
const TOKENS: usize = 24;

/// A folder with `model/`, a copy of the bundled checkpoint; `in.safetensors`, some of its tokens; and `out/`, empty.
pub struct Files {
    dir: tempfile::TempDir,
    pub hidden_states: Vec<f32>,
    pub grad_output: Vec<f32>,
}

impl Files {
    pub fn new() -> Files {
        let dir = tempfile::tempdir().unwrap();
        let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tiny-moe");
        for folder in ["model", "out"] {
            fs::create_dir(dir.path().join(folder)).unwrap();
        }
        for name in ["config.json", "model.safetensors"] {
            fs::copy(example.join(name), dir.path().join("model").join(name)).unwrap();
        }
        let input = read_input(&example.join("hidden_states.safetensors")).unwrap();
        let rows = |tensor| input.rows(tensor, 0..TOKENS).unwrap();
        let (hidden_states, grad_output) = (rows(InputTensor::HiddenStates), rows(InputTensor::GradOutput));
        let files = Files { dir, hidden_states, grad_output };
        files.write_input(TOKENS);
        files
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Rewrites the input with its first `tokens` tokens.
    pub fn write_input(&self, tokens: usize) {
        let (shape, len) = ([tokens, HIDDEN], tokens * HIDDEN);
        let tensors: [(&str, &[usize], &[f32]); 2] =
            [("hidden_states", &shape, &self.hidden_states[..len]), ("grad_output", &shape, &self.grad_output[..len])];
        write_tensors(&self.path("in.safetensors"), &tensors);
    }

    /// Changes a field of `config.json`.
    pub fn set(&self, field: &str, value: Value) {
        let path = self.path("model/config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config[field] = value;
        fs::write(path, config.to_string()).unwrap();
    }

    /// Converts the model to a sharded checkpoint with one shard and an index; returns the index.
    pub fn shard(&self) -> PathBuf {
        let (whole, shard) =
            (self.path("model/model.safetensors"), self.path("model/model-00001-of-00001.safetensors"));
        fs::rename(whole, &shard).unwrap();
        let bytes = fs::read(&shard).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let map: serde_json::Map<String, Value> = file
            .names()
            .into_iter()
            .map(|name| (name.to_string(), json!("model-00001-of-00001.safetensors")))
            .collect();
        let index = json!({"metadata": {}, "weight_map": map});
        fs::write(self.path("model/model.safetensors.index.json"), index.to_string()).unwrap();
        shard
    }

    /// Runs the layer on 2 PEs, with `more` arguments; results go to `out/out.safetensors`.
    pub fn run(&self, more: &[&str]) -> Outcome {
        self.run_to(&self.path("out/out.safetensors"), more)
    }

    /// The job with another output file.
    pub fn run_to(&self, output: &Path, more: &[&str]) -> Outcome {
        let mut command = aristos(["run", "--pes", "2"]);
        command.arg("--model").arg(self.path("model")).arg("--input").arg(self.path("in.safetensors"));
        command.arg("--output").arg(output);
        if !more.contains(&"--layer") {
            command.args(["--layer", &LAYER.to_string()]);
        }
        command.args(more);
        run(command)
    }
}
