//! The input file: the tokens to run, and optionally the gradient of a loss with respect to the layer's output.

use std::ops::Range;
use std::path::Path;

use super::FileError;
use super::file::TensorFile;

/// Rows per scan for non-finite values.
const SCAN_ROWS: usize = 1024;

/// A tensor of the input file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputTensor {
    /// `hidden_states`, `[tokens, hidden]`.
    HiddenStates,
    /// `grad_output`, `[tokens, hidden]`; optional, enables backward.
    GradOutput,
}

impl InputTensor {
    /// Name in the file.
    pub fn name(self) -> &'static str {
        match self {
            InputTensor::HiddenStates => "hidden_states",
            InputTensor::GradOutput => "grad_output",
        }
    }
}

/// An open input file, from which each PE reads its block of rows.
#[derive(Debug)]
pub struct Input {
    file: TensorFile,
    tokens: usize,
    hidden: usize,
    grad_output: bool,
}

/// Opens an input file and checks names, shapes and types, without reading data.
///
/// # Errors
///
/// Returns an error that names the file and the tensor: the file is missing, truncated or not a safetensors file,
/// `hidden_states` is missing or not two-dimensional, `grad_output` has another shape, or a type is unsupported.
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

    /// Whether the file has `grad_output`.
    pub fn has_grad_output(&self) -> bool {
        self.grad_output
    }

    /// Checks that the input has the layer's hidden size.
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and both sizes.
    pub fn expect_hidden(&self, hidden: usize) -> Result<(), FileError> {
        if self.hidden != hidden {
            let found = format!("has shape [{}, {}]", self.tokens, self.hidden);
            return Err(self.file.wrong("hidden_states", found, format!("[tokens, {hidden}] for this layer")));
        }
        Ok(())
    }

    /// Reads rows `rows` of a tensor, row-major, as f32 (F64 is rounded to nearest).
    ///
    /// # Errors
    ///
    /// Returns an error that names the file and the tensor if the tensor does not exist, or was truncated since the
    /// file was opened.
    ///
    /// # Panics
    ///
    /// If `rows` is not within `0..tokens`.
    pub fn rows(&self, tensor: InputTensor, rows: Range<usize>) -> Result<Vec<f32>, FileError> {
        self.file.read_rows(tensor.name(), rows)
    }

    /// Checks that all values of rows `rows` of each tensor are finite.
    ///
    /// # Errors
    ///
    /// Returns an error that names the first non-finite value, such as `IN: hidden_states[17, 3] is NaN`, or an error
    /// of [`Input::rows`].
    ///
    /// # Panics
    ///
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
