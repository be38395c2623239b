//! Checkpoints in Hugging Face layouts and tensor files in; result files out.
//!
//! A checkpoint is a folder with `config.json` and either `model.safetensors`, or shards listed by
//! `model.safetensors.index.json`. [`Checkpoint`] reads one MoE layer of Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and
//! DeepSeek-V3 checkpoints, [`Input`] the tokens, and [`OutputFile`] takes the results.
//!
//! Tensors are read with positional reads (`pread`), only the bytes asked for, and not through a memory map: when a
//! file is cut short while it is mapped, the next access is a SIGBUS that ends the process without a word, where
//! `pread` returns an error that can name the file and the tensor. A PE thus reads only the experts it owns.

mod error;
mod family;
mod file;
mod input;
mod result;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use crate::moe::{LayerConfig, WeightError, WeightId, WeightSource};
use crate::plan::Model;
pub use error::FileError;
pub use family::Family;
use file::{TensorFile, read_regular};
pub use input::{Input, InputTensor, read_input};
pub use result::{OutputFile, ResultLayout, memory_file};

/// What the planner wants to know of the model whose `config.json` is in folder `dir`; weights are not looked at.
///
/// # Errors
/// One line that names the file, the field, its value and what is expected; a model without experts.
pub fn read_model(dir: &Path) -> Result<Model, FileError> {
    family::read_model(dir)
}

/// One MoE layer of a checkpoint on disk.
///
/// Opening reads `config.json` and the headers of the files that hold the layer, and checks that every weight is
/// there in its shape; [`WeightSource::load`] then reads one weight.
///
/// ```
/// use std::path::Path;
///
/// use aristos::checkpoint::{Checkpoint, Family};
/// use aristos::moe::{Proj, WeightId, WeightSource};
///
/// let checkpoint = Checkpoint::open(Path::new("examples/tiny-moe"), 0)?;
/// assert_eq!(checkpoint.family(), Family::Qwen3Moe);
/// let layer = checkpoint.config();
/// let up = checkpoint.load(WeightId::Expert(3, Proj::Up))?;
/// assert_eq!(up.len(), layer.expert.intermediate * layer.hidden);
///
/// let error = Checkpoint::open(Path::new("examples/tiny-moe"), 99).unwrap_err();
/// assert!(error.to_string().starts_with("examples/tiny-moe/config.json: layer 99 is out of range, expected 0 to "));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    family: Family,
    layer: usize,
    config: LayerConfig,
    /// The files that hold the layer's weights, by file name.
    files: BTreeMap<String, TensorFile>,
    /// From a weight's name to its file's name, for sharded checkpoints; `None` for a single file.
    shard_of: Option<HashMap<String, String>>,
}

impl Checkpoint {
    /// Opens layer `layer` of the checkpoint in folder `dir`.
    ///
    /// The auxiliary losses are off (`aux_loss_coef` and `z_loss_coef` are 0): in these families they belong to the
    /// training loss of the whole model and not to the layer's output.
    ///
    /// # Errors
    /// One line that names the file and the field or tensor: a missing or unreadable file, an unknown model type, a
    /// missing or ill-typed field, a layer out of range or dense, a quantised checkpoint, a truncated or malformed
    /// safetensors file, a missing weight, a weight of another shape or of an unsupported type.
    pub fn open(dir: &Path, layer: usize) -> Result<Self, FileError> {
        let (family, config) = family::read_config(dir, layer)?;
        let mut checkpoint = Checkpoint { family, layer, config, files: BTreeMap::new(), shard_of: None };
        let single = dir.join(SINGLE);
        if single.try_exists().map_err(|e| FileError::read(&single, e))? {
            checkpoint.files.insert(SINGLE.into(), TensorFile::open(&single)?);
        } else {
            checkpoint.shard_of = Some(read_index(dir)?);
        }
        // Replicated weights first: the router's shape bounds the number of experts that config.json claims, before
        // anything of that size is built.
        for id in checkpoint.config.replicated_weights() {
            checkpoint.open_and_check(dir, id)?;
        }
        for expert in 0..checkpoint.config.n_experts {
            for id in checkpoint.config.expert_weights(expert) {
                checkpoint.open_and_check(dir, id)?;
            }
        }
        Ok(checkpoint)
    }

    /// The model family, from `model_type`.
    pub fn family(&self) -> Family {
        self.family
    }

    /// The layer's number in the model.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Opens the shard that holds `id`, unless it is open already, and checks the weight's shape and type.
    fn open_and_check(&mut self, dir: &Path, id: WeightId) -> Result<(), FileError> {
        let name = self.name(id);
        if let Some(shard_of) = &self.shard_of {
            let shard = shard_of.get(&name).ok_or_else(|| FileError::no_tensor(&dir.join(INDEX), &name))?;
            if !self.files.contains_key(shard) {
                let file = TensorFile::open(&dir.join(shard))
                    .map_err(|error| FileError::Shard { error: Box::new(error), index: INDEX })?;
                self.files.insert(shard.clone(), file);
            }
        }
        self.file_of(&name)?.expect(&name, &self.config.shape(id))
    }

    /// The open file that holds tensor `name`.
    fn file_of(&self, name: &str) -> Result<&TensorFile, FileError> {
        let file_name = match &self.shard_of {
            None => SINGLE,
            Some(map) => map.get(name).ok_or_else(|| FileError::no_tensor(Path::new(INDEX), name))?,
        };
        self.files.get(file_name).ok_or_else(|| FileError::malformed(Path::new(file_name), "is not open"))
    }
}

impl WeightSource for Checkpoint {
    fn config(&self) -> &LayerConfig {
        &self.config
    }

    fn name(&self, id: WeightId) -> String {
        self.family.weight_name(self.layer, id)
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        let (name, shape) = (self.name(id), self.config.shape(id));
        let read = || -> Result<Vec<f32>, FileError> {
            let file = self.file_of(&name)?;
            file.expect(&name, &shape)?;
            file.read_f32(&name, 0, shape.iter().product())
        };
        read().map_err(WeightError::new)
    }
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Reads the index of a sharded checkpoint: from tensor name to file name.
fn read_index(dir: &Path) -> Result<HashMap<String, String>, FileError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let path = dir.join(INDEX);
    let text = match read_regular(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(FileError::part(dir, format!("neither {SINGLE} nor {INDEX} is there")));
        }
        other => other.map_err(|e| FileError::read(&path, e))?,
    };
    let index: Index = serde_json::from_slice(&text).map_err(|e| FileError::part(&path, e.to_string()))?;
    for (name, file) in &index.weight_map {
        // A shard lies in the checkpoint's own folder; anything else is a mistake, or an attack.
        if Path::new(file).file_name() != Some(file.as_ref()) {
            let what = format!("{name} is in {file:?}, expected the name of a file in the same folder");
            return Err(FileError::part(&path, what));
        }
    }
    Ok(index.weight_map)
}
