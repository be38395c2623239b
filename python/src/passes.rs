//! Passes over the caller's tensors, which stay in the caller's memory.

use std::marker::PhantomData;
use std::slice;

use aristos::moe::cpu::BorrowedGradients;
use aristos::moe::cpu::experts::Mlp;
use aristos::moe::kernels::{Borrowed, Element};
use aristos::moe::{Layer, LayerConfig, MatrixGradientMut, MlpGradientsMut, MoeLayer, Proj, proj_index};
use aristos::shmem::{Shmem, Transport};
use pyo3::prelude::*;

use crate::spec::moe_error;

pub(crate) type Pes = Box<dyn Transport + Send + Sync>;
pub(crate) type CpuLayer<E> = Layer<Shmem<Pes>, E>;
pub(crate) type SavedOf<E> = <CpuLayer<E> as MoeLayer>::Saved;

/// Returns a slice of the caller's memory.
///
/// # Safety
/// `address` is aligned and points to `len` initialised elements, which are not written during `'a`.
unsafe fn read<'a, T>(address: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(address as *const T, len) }
}

/// Returns a mutable slice of the caller's memory.
///
/// # Safety
/// The conditions are those of [`read`], and the slice is the only access to the elements during `'a`.
unsafe fn write<'a, T>(address: usize, len: usize) -> &'a mut [T] {
    if len == 0 {
        return &mut [];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts_mut(address as *mut T, len) }
}

/// A slice of the caller's memory that is valid during a call.
struct CallerSlice<E> {
    address: usize,
    len: usize,
    element: PhantomData<fn() -> E>,
}

impl<E> AsRef<[E]> for CallerSlice<E> {
    fn as_ref(&self) -> &[E] {
        // SAFETY: [`Weights::borrow`] creates the value and requires that the memory is valid during the call. The value is dropped at the
        // end of the call.
        unsafe { read(self.address, self.len) }
    }
}

/// The addresses of the weights of this process's experts, or of their gradients. All are contiguous. up and down have the layer's element
/// type. up is `[experts, 2 * intermediate, hidden]`, with the gate's rows before those of up, or `[experts, intermediate, hidden]` without
/// a gate. down is `[experts, hidden, intermediate]`. The biases are f32 `[experts, out]`, and the address of a missing bias is 0.
#[derive(Clone, Copy)]
pub(crate) struct Weights {
    up: usize,
    down: usize,
    up_bias: usize,
    down_bias: usize,
}

impl From<[usize; 4]> for Weights {
    fn from([up, down, up_bias, down_bias]: [usize; 4]) -> Weights {
        Weights { up, down, up_bias, down_bias }
    }
}

impl Weights {
    /// Returns the address and the length of expert `local`'s matrix (elements of `bytes` bytes), and those of its bias.
    fn matrix_and_bias(&self, config: &LayerConfig, local: usize, proj: Proj, bytes: usize) -> [(usize, usize); 2] {
        let (h, i) = (config.hidden, config.expert.intermediate);
        let parts = if config.expert.gated { 2 } else { 1 };
        let first = if config.expert.gated && proj == Proj::Up { i } else { 0 };
        match proj {
            Proj::Gate | Proj::Up => {
                let row = local * parts * i + first;
                [(self.up + row * h * bytes, i * h), (self.up_bias + row * size_of::<f32>(), i)]
            }
            Proj::Down => {
                let bias = self.down_bias + local * h * size_of::<f32>();
                [(self.down + local * h * i * bytes, h * i), (bias, h)]
            }
        }
    }

    /// Returns experts over the caller's memory, without a copy of their weights.
    ///
    /// # Safety
    /// The addresses are those of tensors with these shapes and types, and the tensors do not change while the experts live.
    unsafe fn borrow<E: Element>(&self, config: &LayerConfig, experts: usize) -> PyResult<Vec<Mlp<E>>> {
        let expert = |local| {
            let (mut borrowed, mut biases) = ([const { None }; 3], [const { Vec::new() }; 3]);
            for &proj in config.expert.projections() {
                let [(address, len), (bias, out)] = self.matrix_and_bias(config, local, proj, size_of::<E>());
                let matrix: Borrowed<E> = Box::new(CallerSlice { address, len, element: PhantomData });
                borrowed[proj_index(proj)] = Some(matrix);
                if config.expert.bias {
                    // SAFETY: guaranteed by the caller.
                    biases[proj_index(proj)] = unsafe { read::<f32>(bias, out) }.to_vec();
                }
            }
            Mlp::borrowed(config.expert, config.hidden, borrowed, biases).map_err(moe_error)
        };
        (0..experts).map(expert).collect()
    }

    /// Calls `compute` with buffers for expert `local`'s gradients.
    ///
    /// # Safety
    /// The conditions are those of [`Weights::borrow`], and this is the only access to the gradients during the call.
    unsafe fn compute_into<E: Element>(
        &self,
        config: &LayerConfig,
        local: usize,
        compute: &mut dyn FnMut(MlpGradientsMut<'_>),
    ) {
        let mut matrix = [(); 3].map(|()| MatrixGradientMut::F32(&mut []));
        let mut biases: [&mut [f32]; 3] = [&mut [], &mut [], &mut []];
        for &proj in config.expert.projections() {
            let [(address, len), (bias, out)] = self.matrix_and_bias(config, local, proj, size_of::<E>());
            // SAFETY: the caller guarantees the memory. The elements have this type, and the projections do not overlap.
            unsafe {
                matrix[proj_index(proj)] = match E::NAME == f32::NAME {
                    true => MatrixGradientMut::F32(write(address, len)),
                    false => MatrixGradientMut::Bf16(write(address, len)),
                };
                if config.expert.bias {
                    biases[proj_index(proj)] = write(bias, out);
                }
            }
        }
        compute(MlpGradientsMut { matrix, bias: biases });
    }
}

/// The addresses of the tensors of a forward pass, which are contiguous. x is `[tokens, hidden]` in the layer's element type, ids are i32
/// `[tokens, top_k]`, weights are f32 `[tokens, top_k]`, and output is f32 `[tokens, hidden]`.
pub(crate) struct Forward {
    pub(crate) tokens: usize,
    pub(crate) tensors: [usize; 4],
    pub(crate) experts: Weights,
}

/// The addresses of the tensors of a backward pass, which are contiguous. x and grad_output are `[tokens, hidden]` in the layer's element
/// type, and x is that of the forward pass. grad_x is f32 `[tokens, hidden]`, and grad_weights is f32 `[tokens, top_k]`.
pub(crate) struct Backward {
    pub(crate) tokens: usize,
    pub(crate) tensors: [usize; 4],
    pub(crate) experts: Weights,
    /// The gradients of the experts, or `None` if they are not computed.
    pub(crate) gradients: Option<Weights>,
}

impl Forward {
    /// # Safety
    /// The addresses are those of the caller's tensors with these shapes and types, and this is the only access to the tensors during the call.
    pub(crate) unsafe fn run<E: Element>(&self, layer: &mut CpuLayer<E>) -> PyResult<SavedOf<E>> {
        let (elements, pairs, local) = sizes(layer, self.tokens);
        let [x, ids, weights, output] = self.tensors;
        // SAFETY: guaranteed by the caller; the borrowed experts are dropped at the end of this function.
        let (x, ids, weights, output, experts) = unsafe {
            let experts = self.experts.borrow::<E>(&layer.spec().config, local)?;
            (read(x, elements), read(ids, pairs), read(weights, pairs), write(output, elements), experts)
        };
        layer.experts_borrowed(&experts, x, ids, weights, output).map_err(moe_error)
    }
}

impl Backward {
    /// # Safety
    /// The conditions are those of [`Forward::run`].
    pub(crate) unsafe fn run<E: Element>(&self, layer: &mut CpuLayer<E>, saved: &mut SavedOf<E>) -> PyResult<()> {
        let (elements, pairs, local) = sizes(layer, self.tokens);
        let [x, grad_output, grad_x, grad_weights] = self.tensors;
        // SAFETY: guaranteed by the caller; the borrowed experts are dropped at the end of this function.
        let (x, grad_output, grad_x, grad_weights, experts) = unsafe {
            let experts = self.experts.borrow::<E>(&layer.spec().config, local)?;
            (
                read(x, elements),
                read(grad_output, elements),
                write(grad_x, elements),
                write(grad_weights, pairs),
                experts,
            )
        };
        let config = layer.spec().config.clone();
        let mut write_gradients = |local: usize, compute: &mut dyn FnMut(MlpGradientsMut<'_>)| {
            if let Some(gradients) = &self.gradients {
                // SAFETY: guaranteed by the caller.
                unsafe { gradients.compute_into::<E>(&config, local, compute) };
            }
        };
        let gradients = BorrowedGradients { input: grad_x, weights: grad_weights, experts: &mut write_gradients };
        layer.experts_borrowed_backward(&experts, saved, x, grad_output, gradients).map_err(moe_error)
    }
}

/// Returns the number of elements of a pass's tokens, the number of (token, expert) pairs, and the number of this process's experts.
fn sizes<E: Element>(layer: &CpuLayer<E>, tokens: usize) -> (usize, usize, usize) {
    let config = &layer.spec().config;
    let local = layer.spec().placement.experts(layer.my_pe()).len();
    (tokens * config.hidden, tokens * config.router.top_k, local)
}
