//! Reads checkpoints in Hugging Face layouts and input files; writes result files.
//!
//! A checkpoint is a folder with `config.json` and either `model.safetensors`, or shards listed by
//! `model.safetensors.index.json`. [`Checkpoint`] reads one MoE layer of the families in `docs/families.md`, [`Input`]
//! reads the tokens, and [`OutputFile`] writes the results.
//!
//! Tensors are read with `pread` instead of a memory map: accessing a mapped file that was truncated raises SIGBUS,
//! which ends the process without a message, whereas `pread` returns an error that can name the file and the tensor. A
//! PE reads only the experts it owns.

mod error;
mod families;
mod file;
mod header;
mod input;
mod nearest;
mod quantised;
mod result;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::path::Path;

use serde::de::{Deserializer, Error, MapAccess, Visitor};

use crate::formats::{Model, Transformer};
use crate::moe::{LayerConfig, Proj, WeightError, WeightId, WeightSlice, WeightSource};
pub use error::FileError;
pub use families::{ACTIVATIONS, Family, families_page};
use families::{Layout, ReadConfig};
use file::{TensorFile, read_regular};
pub use input::{Input, InputTensor, read_input};
use quantised::{BlockScales, MXFP4_BLOCK, Quantisation, e4m3, mxfp4_row};
pub use result::{OutputFile, ResultLayout, memory_file, real_path};
use safetensors::Dtype;

/// The planner's description of the model in folder `dir`, from its `config.json`; weights are not read.
///
/// # Errors
///
/// Returns an error that names the file, the field, its value and the expected value, or an error if the model has no
/// experts.
pub fn read_model(dir: &Path) -> Result<Model, FileError> {
    families::read_model(dir)
}

/// The model's size apart from its routed experts.
///
/// # Errors
///
/// Those of [`read_model`], and an error if some layers have no attention.
pub fn read_transformer(dir: &Path) -> Result<Transformer, FileError> {
    families::read_transformer(dir)
}

/// One MoE layer of a checkpoint on disk.
///
/// Opening reads `config.json` and the headers of the files that hold the layer, and checks existence and shape of
/// every weight. [`WeightSource::load`] then reads one weight.
///
/// ```
/// use std::path::Path;
///
/// use aristos::checkpoint::Checkpoint;
/// use aristos::moe::{Proj, WeightId, WeightSource};
///
/// let checkpoint = Checkpoint::open(Path::new("examples/tiny-moe"), 0)?;
/// assert_eq!(checkpoint.family().model_type(), "qwen3_moe");
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
    /// Settings of the configuration that the layer does not implement, a line each.
    notes: Vec<String>,
    quantisation: Quantisation,
    /// The recognised layout.
    layout: &'static Layout,
    /// Prefix of the names of the layer's tensors, such as `model.layers.3.`.
    prefix: String,
    /// The files that hold the layer's weights, by file name.
    files: BTreeMap<String, TensorFile>,
    /// File name by tensor name, for sharded checkpoints; `None` for a single file.
    shard_of: Option<HashMap<String, String>>,
}

impl Checkpoint {
    /// Opens layer `layer` of the checkpoint in folder `dir`.
    ///
    /// The auxiliary losses are off (`aux_loss_coef` and `z_loss_coef` are 0), because in these families they belong to
    /// the training loss of the whole model instead of the layer's output.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the field or tensor: a file is missing, unreadable, truncated or
    /// malformed, the model type or the quantisation is not supported, a field is missing or has the wrong type, the
    /// layer is out of range or dense, a weight is missing (with the recognised layout and the nearest existing name)
    /// or has another shape or an unsupported type.
    pub fn open(dir: &Path, layer: usize) -> Result<Self, FileError> {
        let ReadConfig { family, config, notes, quantisation } = families::read_config(dir, layer)?;
        let layout = &family.layouts()[0];
        let (files, prefix) = (BTreeMap::new(), format!("model.{}.{layer}.", layout.layers));
        let mut checkpoint =
            Checkpoint { family, layer, config, notes, quantisation, layout, prefix, files, shard_of: None };
        let single = dir.join(SINGLE);
        if single.try_exists().map_err(|e| FileError::read(&single, e))? {
            checkpoint.files.insert(SINGLE.into(), TensorFile::open(&single)?);
        } else {
            checkpoint.shard_of = Some(read_index(dir)?);
        }
        checkpoint.recognise(dir)?;
        // Replicated weights first: the shape of the router bounds the number of experts that config.json claims,
        // before anything of that size is allocated.
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

    /// Settings of the model's configuration that this layer does not implement, a line each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The names of all tensors.
    fn names(&self) -> Vec<&str> {
        match &self.shard_of {
            Some(shard_of) => shard_of.keys().map(String::as_str).collect(),
            None => self.files.values().flat_map(TensorFile::names).collect(),
        }
    }

    /// Determines layout and name prefix: the first of the family's layouts that has an expert under its name; if
    /// several have, the expert's shape decides.
    fn recognise(&mut self, dir: &Path) -> Result<(), FileError> {
        const EXPERT: WeightId = WeightId::Expert(0, Proj::Up);
        let mut found: Vec<(&'static Layout, String)> = Vec::new();
        for layout in self.family.layouts() {
            let layer = format!("{}.{}.", layout.layers, self.layer);
            let blocks = if self.quantisation == Quantisation::Mxfp4 { BLOCKS } else { "" };
            let tail = layer.clone() + &layout.name(EXPERT) + blocks;
            let mut prefixes: Vec<&str> =
                self.names().into_iter().filter_map(|name| name.strip_suffix(&tail)).collect();
            prefixes.retain(|prefix| prefix.is_empty() || prefix.ends_with('.'));
            // If several parts of a model have such a layer, take the text model.
            prefixes.sort_by_key(|prefix| PREFIXES.iter().position(|known| known == prefix).unwrap_or(PREFIXES.len()));
            if let Some(prefix) = prefixes.first() {
                found.push((layout, format!("{prefix}{layer}")));
            }
        }
        // Among several candidates, prefer an expert of the right shape, then the largest number of matching names.
        let mut best = (0, 0);
        for i in (0..found.len()).rev().filter(|_| found.len() > 1) {
            let (layout, prefix) = &found[i];
            let name = prefix.clone() + &layout.name(EXPERT);
            self.open_file_of(dir, &name)?;
            let place = layout.place(&self.config, EXPERT, name);
            let fits = self.file_of(&place.tensor)?.shape(&place.tensor) == Some(&place.shape);
            let names: HashSet<&str> = self.names().into_iter().collect();
            let ids = self.config.replicated_weights().into_iter().chain(self.config.expert_weights(0));
            let found = ids.filter(|&id| names.contains((prefix.clone() + &layout.name(id)).as_str())).count();
            let score = found + if fits { names.len() } else { 0 };
            if score >= best.0 {
                best = (score, i);
            }
        }
        if !found.is_empty() {
            (self.layout, self.prefix) = found.swap_remove(best.1);
        }
        Ok(())
    }

    /// Opens the shard of tensor `name`, unless it is open.
    fn open_file_of(&mut self, dir: &Path, name: &str) -> Result<(), FileError> {
        if let Some(shard_of) = &self.shard_of {
            let shard = shard_of.get(name).ok_or_else(|| self.missing(&dir.join(INDEX), name))?;
            if !self.files.contains_key(shard) {
                let file = TensorFile::open(&dir.join(shard))
                    .map_err(|error| FileError::Shard { error: Box::new(error), index: INDEX })?;
                self.files.insert(shard.clone(), file);
            }
        }
        Ok(())
    }

    /// Opens the shard of weight `id`, and checks shape and type of its tensor.
    fn open_and_check(&mut self, dir: &Path, id: WeightId) -> Result<(), FileError> {
        let place = self.weight_slice(id);
        if let (Quantisation::Mxfp4, WeightId::Expert(e, proj)) = (self.quantisation, id) {
            let (blocks, [rows, columns]) = (self.block_slice(e, proj)?, place.size);
            let [.., all_rows, _] = blocks.shape[..] else { unreachable!("experts, rows and columns") };
            if !columns.is_multiple_of(MXFP4_BLOCK) {
                let what = format!("{}: {rows} rows of {columns}, expected a multiple of {MXFP4_BLOCK}", place.tensor);
                return Err(FileError::part(dir, what));
            }
            let scales = [self.config.n_experts, all_rows, columns / MXFP4_BLOCK];
            let blocks = [&scales[..], &[MXFP4_BLOCK / 2]].concat();
            for (end, shape) in [(BLOCKS, &blocks[..]), (SCALES, &scales[..])] {
                let name = place.tensor.clone() + end;
                self.open_tensor(dir, &name)?.expect_bytes(&name, Dtype::U8, shape)?;
            }
            return Ok(());
        }
        let quantisation = self.quantisation;
        let file = self.open_tensor(dir, &place.tensor)?;
        match (quantisation, file.dtype(&place.tensor)) {
            (Quantisation::Fp8 { block }, Some(Dtype::F8_E4M3)) => {
                file.expect_bytes(&place.tensor, Dtype::F8_E4M3, &place.shape)?;
                let name = place.tensor.clone() + SCALE_INV;
                let scales = self.block_scales(&place, block)?;
                let [leading @ .., _, _] = &place.shape[..] else { return Ok(()) };
                let shape = [leading, &scales.size()].concat();
                self.open_tensor(dir, &name)?.expect(&name, &shape)
            }
            _ => file.expect(&place.tensor, &place.shape),
        }
    }

    /// Opens the file of tensor `name`, which must exist.
    fn open_tensor(&mut self, dir: &Path, name: &str) -> Result<&TensorFile, FileError> {
        self.open_file_of(dir, name)?;
        let file = self.file_of(name)?;
        if file.shape(name).is_none() {
            return Err(self.missing(file.path(), name));
        }
        Ok(file)
    }

    /// Position of an expert's matrix in its tensor of blocks, in elements of `[experts, rows, columns]`.
    fn block_slice(&self, e: usize, proj: Proj) -> Result<WeightSlice, FileError> {
        let name = self.name(WeightId::Expert(e, proj));
        let place = self.layout.block_slice(&self.config, e, proj, name.clone());
        place.ok_or_else(|| {
            let what = format!("mxfp4 in a checkpoint of {}, expected gpt_oss", self.family.model_type());
            FileError::part(Path::new(&name), what)
        })
    }

    /// The block scales of an FP8 matrix.
    fn block_scales(&self, place: &WeightSlice, block: [usize; 2]) -> Result<BlockScales, FileError> {
        BlockScales::new(&place.shape, block).ok_or_else(|| {
            let what = format!("is F8_E4M3 of shape {:?}", place.shape);
            FileError::part(Path::new(&place.tensor), format!("{what}, expected rows and columns"))
        })
    }

    /// Reads the elements of an FP8 tensor, multiplied by their scales.
    fn read_fp8(&self, place: &WeightSlice, block: [usize; 2]) -> Result<Vec<f32>, FileError> {
        let (span, name) = (place.span(), place.tensor.clone() + SCALE_INV);
        let bytes = self.file_of(&place.tensor)?.read_bytes(&place.tensor, span.clone())?;
        let mut elements: Vec<f32> = bytes.into_iter().map(e4m3).collect();
        let scales = self.block_scales(place, block)?;
        let (matrices, each) = (scales.matrices(span.start, span.len()), scales.size().into_iter().product::<usize>());
        let values = self.file_of(&name)?.read_f32(&name, matrices.start * each, matrices.len() * each)?;
        scales.apply(&mut elements, span.start, &values, matrices.start);
        Ok(elements)
    }

    /// Reads an expert's MXFP4 matrix, row-major.
    fn read_mxfp4(&self, e: usize, proj: Proj) -> Result<Vec<f32>, FileError> {
        let place = self.block_slice(e, proj)?;
        let [rows, columns] = place.size;
        // Rows of gate and up alternate.
        let (first, step) = (place.first / columns, place.strides[0] / columns);
        let range = first..first + (rows - 1) * step + 1;
        let read = |end: &str, width: usize| {
            let name = place.tensor.clone() + end;
            self.file_of(&name)?.read_bytes(&name, range.start * width..range.end * width)
        };
        let (block_width, scale_width) = (columns / 2, columns / MXFP4_BLOCK);
        let (blocks, scales) = (read(BLOCKS, block_width)?, read(SCALES, scale_width)?);
        let mut weight = Vec::with_capacity(rows * columns);
        for row in (0..range.len()).step_by(step) {
            let (block, scale) = (row * block_width, row * scale_width);
            mxfp4_row(&blocks[block..block + block_width], &scales[scale..scale + scale_width], &mut weight);
        }
        Ok(weight)
    }

    /// The error for a missing tensor.
    fn missing(&self, file: &Path, tensor: &str) -> FileError {
        FileError::NoWeight {
            file: file.to_path_buf(),
            tensor: tensor.to_string(),
            layout: format!("{}, {}", self.family.model_type(), self.layout.experts.describe()),
            nearest: nearest::nearest(tensor, self.names())
                .map_or("there are no tensors".into(), |name| format!("the nearest name there is {name}")),
        }
    }

    /// The open file of tensor `name`.
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
        self.prefix.clone() + &self.layout.name(id)
    }

    fn weight_slice(&self, id: WeightId) -> WeightSlice {
        self.layout.place(&self.config, id, self.name(id))
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        let place = self.weight_slice(id);
        let read = || -> Result<Vec<f32>, FileError> {
            if let (Quantisation::Mxfp4, WeightId::Expert(e, proj)) = (self.quantisation, id) {
                let weight = self.read_mxfp4(e, proj)?;
                return match weight.iter().position(|x| !x.is_finite()) {
                    Some(i) => {
                        let name = place.tensor.clone() + SCALES;
                        let [row, column] = [i / place.size[1], i % place.size[1]];
                        let found = format!("makes row {row}, column {column} of expert {e} {}", weight[i]);
                        Err(self.file_of(&name)?.wrong(&name, found, "finite numbers".into()))
                    }
                    None => Ok(weight),
                };
            }
            let (file, span) = (self.file_of(&place.tensor)?, place.span());
            let elements = match (self.quantisation, file.dtype(&place.tensor)) {
                (Quantisation::Fp8 { block }, Some(Dtype::F8_E4M3)) => self.read_fp8(&place, block)?,
                _ => {
                    file.expect(&place.tensor, &place.shape)?;
                    file.read_f32(&place.tensor, span.start, span.len())?
                }
            };
            if let Some(i) = elements.iter().position(|x| !x.is_finite()) {
                let index = file::index_of(&place.shape, span.start + i);
                let found = format!("is {} at {index:?}", elements[i]);
                return Err(file.wrong(&place.tensor, found, "finite numbers".into()));
            }
            let in_order = place.strides == [place.size[1], 1];
            Ok(if in_order { elements } else { place.gather(&elements, span.start) })
        };
        read().map_err(WeightError::new)
    }
}

/// Prefixes of `layers.N` in multi-part models, text models first.
const PREFIXES: [&str; 8] = [
    "model.",
    "",
    "model.language_model.",
    "language_model.model.",
    "thinker.model.",
    "model.text_model.",
    "transformer.",
    "backbone.",
];

/// Name suffixes of the tensors of a quantised matrix.
const SCALE_INV: &str = "_scale_inv";
const BLOCKS: &str = "_blocks";
const SCALES: &str = "_scales";

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Maximum size of an index, bytes. (Models with some 140,000 tensors have half of it.)
const MAX_INDEX_BYTES: u64 = 32 << 20;
/// Maximum number of tensors in an index: with short names, the map would take many times the size of the file.
const MAX_INDEX_TENSORS: usize = 500_000;

/// Deserialises a map of at most [`MAX_INDEX_TENSORS`] entries.
fn bounded_map<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HashMap<String, String>, D::Error> {
    struct Bounded;
    impl<'de> Visitor<'de> for Bounded {
        type Value = HashMap<String, String>;

        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            write!(f, "a map of at most {MAX_INDEX_TENSORS} tensors")
        }

        fn visit_map<M: MapAccess<'de>>(self, mut entries: M) -> Result<Self::Value, M::Error> {
            let mut map = HashMap::new();
            while let Some((name, file)) = entries.next_entry()? {
                if map.len() == MAX_INDEX_TENSORS {
                    return Err(M::Error::invalid_length(map.len() + 1, &self));
                }
                map.insert(name, file);
            }
            Ok(map)
        }
    }
    deserializer.deserialize_map(Bounded)
}

/// Reads the index of a sharded checkpoint: file name by tensor name.
fn read_index(dir: &Path) -> Result<HashMap<String, String>, FileError> {
    #[derive(serde::Deserialize)]
    struct Index {
        #[serde(deserialize_with = "bounded_map")]
        weight_map: HashMap<String, String>,
    }
    let path = dir.join(INDEX);
    let text = match read_regular(&path, MAX_INDEX_BYTES) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(FileError::part(dir, format!("neither {SINGLE} nor {INDEX} is there")));
        }
        other => other.map_err(|e| FileError::read(&path, e))?,
    };
    let index: Index = serde_json::from_slice(&text).map_err(|e| FileError::part(&path, e.to_string()))?;
    for (name, file) in &index.weight_map {
        // A shard must be in the checkpoint's own folder; any other path is an error or an attack.
        if Path::new(file).file_name() != Some(file.as_ref()) {
            let what = format!("{name} is in {file:?}, expected the name of a file in the same folder");
            return Err(FileError::part(&path, what));
        }
    }
    Ok(index.weight_map)
}
