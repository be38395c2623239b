//! The input file: the tokens to run, and optionally the gradient of a loss at the layer's output.

use std::ops::Range;
use std::path::Path;

use super::FileError;
use super::file::TensorFile;

/// Rows that are scanned at a time for numbers that are not finite.
const SCAN_ROWS: usize = 1024;

/// A tensor of the input file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputTensor {
    /// `hidden_states`, `[tokens, hidden]`.
    HiddenStates,
    /// `grad_output`, `[tokens, hidden]`; where it is there, backward runs too.
    GradOutput,
}

impl InputTensor {
    /// Its name in the file.
    pub fn name(self) -> &'static str {
        match self {
            InputTensor::HiddenStates => "hidden_states",
            InputTensor::GradOutput => "grad_output",
        }
    }
}

/// An open input file; a PE reads its block of rows from it.
#[derive(Debug)]
pub struct Input {
    file: TensorFile,
    tokens: usize,
    hidden: usize,
    grad_output: bool,
}

/// Opens an input file and checks names, shapes and types; reads no data.
///
/// # Errors
/// One line that names the file and the tensor: a missing file, not a safetensors file, truncated, no
/// `hidden_states`, not two-dimensional, a `grad_output` of another shape, an unsupported type.
pub fn read_input(path: &Path) -> Result<Input, FileError> {
    let file = TensorFile::open(path)?;
    let name = InputTensor::HiddenStates.name();
    file.expect_float(name)?;
    let (tokens, hidden) = match *file.shape(name).unwrap_or_default() {
        [tokens, hidden] if hidden > 0 => (tokens, hidden),
        ref shape => return Err(file.wrong(name, format!("has shape {shape:?}"), "[tokens, hidden]".into())),
    };
    let grad = InputTensor::GradOutput.name();
    let grad_output = file.shape(grad).is_some();
    if grad_output {
        file.expect(grad, &[tokens, hidden])?;
    }
    Ok(Input { file, tokens, hidden, grad_output })
}

impl Input {
    /// Rows of `hidden_states`.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Columns of `hidden_states`.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Whether `grad_output` is there.
    pub fn has_grad_output(&self) -> bool {
        self.grad_output
    }

    /// Checks that the input is as wide as the layer.
    ///
    /// # Errors
    /// One line that names the file, the width it has and the layer's.
    pub fn expect_hidden(&self, hidden: usize) -> Result<(), FileError> {
        if self.hidden != hidden {
            let found = format!("has shape [{}, {}]", self.tokens, self.hidden);
            return Err(self.file.wrong("hidden_states", found, format!("[tokens, {hidden}] for this layer")));
        }
        Ok(())
    }

    /// Reads rows `rows` of a tensor, row-major, as f32 (rounded to nearest where the file has F64).
    ///
    /// # Errors
    /// One line that names the file and the tensor: not there, or cut short since the file was opened.
    ///
    /// # Panics
    /// If `rows` is not within `0..tokens`.
    pub fn rows(&self, tensor: InputTensor, rows: Range<usize>) -> Result<Vec<f32>, FileError> {
        self.file.read_rows(tensor.name(), rows)
    }

    /// Checks that every number of rows `rows`, of each tensor there is, is finite.
    ///
    /// # Errors
    /// One line that names the first offender, as in `IN: hidden_states[17, 3] is NaN`; or as [`Input::rows`].
    ///
    /// # Panics
    /// If `rows` is not within `0..tokens`.
    pub fn check_finite(&self, rows: Range<usize>) -> Result<(), FileError> {
        let tensors = [InputTensor::HiddenStates, InputTensor::GradOutput];
        for tensor in &tensors[..1 + usize::from(self.grad_output)] {
            for first in rows.clone().step_by(SCAN_ROWS) {
                let block = self.rows(*tensor, first..rows.end.min(first + SCAN_ROWS))?;
                if let Some(i) = block.iter().position(|x| !x.is_finite()) {
                    let (row, column, x) = (first + i / self.hidden, i % self.hidden, block[i]);
                    let what = format!("{}[{row}, {column}] is {x}", tensor.name());
                    return Err(FileError::part(self.file.path(), what));
                }
            }
        }
        Ok(())
    }
}
