//! The element type of rows that are sent.

use half::bf16;

use crate::moe::cpu::kernels::Element;
use crate::moe::spec::Dtype;

/// Rows to send or received rows, in the layer's element type or rounded to bf16 ([`Options::wire`](crate::moe::Options::wire)).
pub(super) enum WireRows<E> {
    Own(Vec<E>),
    Bf16(Vec<bf16>),
}

impl<E: Element> WireRows<E> {
    pub fn zeros(wire: Option<Dtype>, len: usize) -> Self {
        match wire {
            None => WireRows::Own(vec![E::default(); len]),
            Some(_) => WireRows::Bf16(vec![bf16::ZERO; len]),
        }
    }

    /// Stores `row`, rounded, from element `at` on.
    pub fn set(&mut self, at: usize, row: &[f32]) {
        match self {
            WireRows::Own(rows) => E::convert(row, &mut rows[at..at + row.len()]),
            WireRows::Bf16(rows) => bf16::convert(row, &mut rows[at..at + row.len()]),
        }
    }

    /// Converts all elements to f32; `row` has the same length.
    pub fn widen(&self, row: &mut [f32]) {
        match self {
            WireRows::Own(rows) => E::widen(rows, row),
            WireRows::Bf16(rows) => bf16::widen(rows, row),
        }
    }

    pub fn as_bytes(&self) -> &[u8] {
        match self {
            WireRows::Own(rows) => bytemuck::cast_slice(rows),
            WireRows::Bf16(rows) => bytemuck::cast_slice(rows),
        }
    }

    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match self {
            WireRows::Own(rows) => bytemuck::cast_slice_mut(rows),
            WireRows::Bf16(rows) => bytemuck::cast_slice_mut(rows),
        }
    }
}
