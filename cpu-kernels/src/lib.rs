//! CPU kernels of the layer: GEMMs, activations, and conversions between f32 and bf16.
//!
//! Each function runs on the calling thread; parallelism is up to the caller. All matrices are row-major and
//! contiguous. Elements are stored as [`Element`] (f32 or bf16) and all sums are accumulated in f32. The same inputs
//! and shapes give the same bits on the same machine.
//!
//! - f32 GEMMs use faer;
//! - bf16 GEMMs use kernels of this crate on AMX and AVX512-BF16; elsewhere they widen to f32 and use faer;
//! - activations and vector helpers are plain loops, compiled for the best instruction set that [`pulp`] finds at run
//!   time.

mod activation;
#[cfg(test)]
mod activation_tests;
mod cpu;
mod element;
mod gemm_bf16;
mod gemm_f32;
#[cfg(test)]
#[path = "../../tests/skip/mod.rs"]
mod skip;
#[cfg(test)]
mod tests;
mod weight;

pub use activation::{
    Activation, Glu, add_bias, axpy, backward_gated, backward_plain, column_sum, dot, forward_gated, forward_plain,
    sigmoid,
};
pub use cpu::InstructionSet;
pub use element::Element;
pub use gemm_bf16::Bf16Weight;
pub use gemm_f32::F32Weight;
pub use weight::{Borrowed, WeightShape};

use bytemuck::{Pod, Zeroable};

/// One cache line; aligns the packing buffers.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u32; 16]);

/// Scratch memory in which GEMMs pack operands. It grows to the size of the largest product and is then reused, so that
/// a steady state does not allocate.
#[derive(Default)]
pub struct Workspace {
    a: Vec<Line>,
    b: Vec<Line>,
    /// The f32 sums of a rounded result.
    sums: Vec<Line>,
}

/// The first `len` elements of a buffer, grown if needed. Contents are stale.
fn scratch<T: Pod>(buffer: &mut Vec<Line>, len: usize) -> &mut [T] {
    let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
    if buffer.len() < lines {
        buffer.resize(lines, Line::zeroed());
    }
    &mut bytemuck::cast_slice_mut(&mut buffer[..lines])[..len]
}

/// Defines a function whose body is compiled once per instruction set and dispatched at run time.
///
/// The body is an inlined function, so that its `&mut` arguments keep their no-alias guarantee and the loops vectorise.
/// The caller writes the lifetime `'a` on every reference.
macro_rules! vectorised {
    ($(#[$attr:meta])* $vis:vis fn $name:ident<$($g:ident: $bound:ident),*>($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty $body:block) => {
        $(#[$attr])*
        $vis fn $name<'a, $($g: $bound),*>($($arg: $ty),*) -> $ret {
            struct Call<'a, $($g: $bound),*> {
                $($arg: $ty,)*
                types: std::marker::PhantomData<(&'a (), $($g,)*)>,
            }
            impl<'a, $($g: $bound),*> pulp::NullaryFnOnce for Call<'a, $($g),*> {
                type Output = $ret;
                #[inline(always)]
                fn call(self) -> $ret {
                    #[inline(always)]
                    #[allow(clippy::too_many_arguments)]
                    fn body<'a, $($g: $bound),*>($($arg: $ty),*) -> $ret $body
                    body::<$($g),*>($(self.$arg),*)
                }
            }
            crate::cpu::vectors().dispatch(Call { $($arg,)* types: std::marker::PhantomData::<(&'a (), $($g,)*)> })
        }
    };
}
use vectorised;
