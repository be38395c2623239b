//! Views of the caller's tensors. Shapes and types are checked here, before any memory is read or written.

use aristos::moe::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A contiguous tensor in host memory, given by its address, its shape, and its type with torch's name.
#[derive(FromPyObject)]
pub struct View(usize, Vec<usize>, String);

/// The views of up, down and their biases, or of their gradients.
pub type ExpertViews = [Option<View>; 4];

/// The sizes and the type of a layer's tensors.
#[derive(Clone, Copy)]
pub struct Shapes {
    pub hidden: usize,
    pub intermediate: usize,
    pub gated: bool,
    pub bias: bool,
    pub top_k: usize,
    /// Number of this process's experts.
    pub local: usize,
    pub dtype: Dtype,
}

/// The element type that a tensor must have.
#[derive(Clone, Copy)]
pub enum Of {
    /// The element type of the layer.
    Layer,
    F32,
    I32,
}

impl Shapes {
    /// Returns the number of tokens, which is the first dimension of x.
    pub fn tokens(&self, x: &View) -> PyResult<usize> {
        let View(_, shape, _) = x;
        shape.first().copied().ok_or_else(|| PyValueError::new_err("x has shape [], expected [tokens, hidden]"))
    }

    /// Checks a tensor `[tokens, hidden]` and returns its address.
    pub fn rows(&self, name: &str, view: &View, tokens: usize, of: Of) -> PyResult<usize> {
        self.address(name, view, &[tokens, self.hidden], of)
    }

    /// Checks a tensor `[tokens, top_k]` and returns its address.
    pub fn pairs(&self, name: &str, view: &View, tokens: usize, of: Of) -> PyResult<usize> {
        self.address(name, view, &[tokens, self.top_k], of)
    }

    /// Checks up, down and their biases, and returns their addresses, 0 for a missing bias. `suffix` is appended to the tensors' names in
    /// errors.
    pub fn experts(&self, views: &ExpertViews, suffix: &str) -> PyResult<[usize; 4]> {
        let wide = self.intermediate * if self.gated { 2 } else { 1 };
        let expected: [(&str, &[usize], Of); 4] = [
            ("up", &[self.local, wide, self.hidden], Of::Layer),
            ("down", &[self.local, self.hidden, self.intermediate], Of::Layer),
            ("up_bias", &[self.local, wide], Of::F32),
            ("down_bias", &[self.local, self.hidden], Of::F32),
        ];
        let mut addresses = [0; 4];
        for (at, (name, shape, of)) in expected.into_iter().enumerate() {
            let name = format!("{name}{suffix}");
            addresses[at] = match &views[at] {
                Some(view) if at < 2 || self.bias => self.address(&name, view, shape, of)?,
                None if at >= 2 && !self.bias => 0,
                Some(_) => return Err(PyValueError::new_err(format!("{name} is given, expected none: no biases"))),
                None => return Err(PyValueError::new_err(format!("{name} is missing, expected shape {shape:?}"))),
            };
        }
        Ok(addresses)
    }

    fn address(&self, name: &str, view: &View, shape: &[usize], of: Of) -> PyResult<usize> {
        let View(address, has, dtype) = view;
        if has != shape {
            return Err(PyValueError::new_err(format!("{name} has shape {has:?}, expected {shape:?}")));
        }
        let (expected, bytes) = match (of, self.dtype) {
            (Of::Layer, Dtype::Bf16) => ("bfloat16", 2),
            (Of::Layer | Of::F32, _) => ("float32", 4),
            (Of::I32, _) => ("int32", 4),
        };
        if dtype != expected {
            return Err(PyValueError::new_err(format!("{name} has type {dtype}, expected {expected}")));
        }
        let empty = shape.contains(&0);
        if !empty && (*address == 0 || !address.is_multiple_of(bytes)) {
            return Err(PyValueError::new_err(format!(
                "{name} is at address {address}, expected a multiple of {bytes}"
            )));
        }
        Ok(*address)
    }
}
