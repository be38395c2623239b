//! The interface of weight matrices, and the conversions between f32 and bf16.

use half::bf16;

use super::vectorised;

/// Shape of a packed weight matrix `W [out, inp]`.
pub trait WeightShape {
    /// Rows of `W`: the output width of the projection.
    fn out(&self) -> usize;
    /// Columns of `W`: the input width of the projection.
    fn inp(&self) -> usize;
}

/// A row-major weight in the caller's memory, which must not change while this value exists.
pub type Borrowed<E> = Box<dyn AsRef<[E]> + Send + Sync>;

// `half`'s conversions test for CPU features on every call, which prevents vectorisation.
#[inline(always)]
pub(super) fn bf16_from_f32(x: f32) -> bf16 {
    // Rounding up a NaN could make it an infinity or a number.
    let bits = if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    // Adds just under half a unit plus the parity of the kept bit: to nearest, ties to even.
    bf16::from_bits((bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16)
}

#[inline(always)]
pub(super) fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

vectorised! {
    pub(super) fn narrow_bf16<>(src: &'a [f32], dst: &'a mut [bf16]) -> () {
        assert_eq!(src.len(), dst.len());
        for (d, &s) in dst.iter_mut().zip(src) {
            *d = bf16_from_f32(s);
        }
    }
}

vectorised! {
    pub(super) fn widen_bf16<>(src: &'a [bf16], dst: &'a mut [f32]) -> () {
        assert_eq!(src.len(), dst.len());
        for (d, &s) in dst.iter_mut().zip(src) {
            *d = bf16_to_f32(s);
        }
    }
}
