//! Conversion of weights to the element types of devices.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::shape::MAX_ROUTER_PARTS;
use crate::moe::parallel::par_chunks;
use crate::moe::spec::{Dtype, MoeError, WeightError};

/// Rounds values to the layer's element type.
///
/// # Errors
///
/// Returns an error with `name` and the index if a finite value overflows the element type.
pub fn to_elements(values: &[f32], dtype: Dtype, name: &str) -> Result<Vec<u16>, MoeError> {
    let mut elements = Vec::new();
    put_elements(values, dtype, name, &mut elements)?;
    Ok(elements)
}

/// Like [`to_elements`], with a reused vector.
pub(super) fn put_elements(values: &[f32], dtype: Dtype, name: &str, elements: &mut Vec<u16>) -> Result<(), MoeError> {
    let round = |x: f32| match dtype {
        Dtype::F16 => f16::from_f32(x).to_bits(),
        _ => bf16::from_f32(x).to_bits(),
    };
    elements.resize(values.len(), 0);
    let first_too_large = AtomicUsize::new(usize::MAX);
    par_chunks(elements, |first, part| {
        for (at, (e, &x)) in (first..).zip(part.iter_mut().zip(&values[first..])) {
            *e = round(x);
            if x.is_finite() && !to_f32(*e, dtype).is_finite() {
                first_too_large.fetch_min(at, Ordering::Relaxed);
                return;
            }
        }
    });
    match first_too_large.into_inner() {
        usize::MAX => Ok(()),
        at => Err(MoeError::Weights(WeightError::new(format!(
            "{name}: element {at} is {}, too large for {}",
            values[at],
            dtype.name()
        )))),
    }
}

pub(super) fn to_f32(bits: u16, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
}

/// A router's weights as a sum of planes of the element type. The vectors are reused by the next split.
#[derive(Default)]
pub(super) struct Planes {
    /// [`MAX_ROUTER_PARTS`] planes. Planes that are not needed are zeros.
    pub(super) planes: Vec<u16>,
    /// Number of planes needed.
    pub(super) parts: u32,
    rest: Vec<f32>,
    plane: Vec<u16>,
}

impl Planes {
    /// Splits `values` into at most three planes, whose sum has 24 significant bits of a value. With f16, bits below 2^-24, the smallest
    /// f16, are lost.
    pub(super) fn split(&mut self, values: &[f32], dtype: Dtype, name: &str) -> Result<(), MoeError> {
        self.planes.clear();
        self.parts = 0;
        self.rest.clear();
        self.rest.extend_from_slice(values);
        while self.parts < MAX_ROUTER_PARTS {
            put_elements(&self.rest, dtype, name, &mut self.plane)?;
            // The difference of a number and its rounding is exact.
            self.rest.iter_mut().zip(&self.plane).for_each(|(r, &p)| *r -= to_f32(p, dtype));
            self.planes.extend_from_slice(&self.plane);
            self.parts += 1;
            if self.rest.iter().all(|&r| r == 0.0) {
                break;
            }
        }
        self.planes.resize(MAX_ROUTER_PARTS as usize * values.len(), 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_split_into_the_fewest_planes_for_24_bits() {
        // All cases use the same `Planes`, because a split must not see data of an earlier one.
        let mut split = Planes::default();
        for (values, dtype, parts) in [
            (vec![1.0f32, -0.5, 3.0], Dtype::Bf16, 1),
            (vec![1.0 + f32::EPSILON * 32768.0, 0.0], Dtype::Bf16, 2),
            (vec![1.0 / 3.0, 0.1, -1e-3], Dtype::Bf16, 3),
            (vec![1.0 + 1.0 / 1024.0, 2.0], Dtype::F16, 1),
            (vec![1.0], Dtype::Bf16, 1),
        ] {
            split.split(&values, dtype, "w").unwrap();
            assert_eq!(split.parts, parts, "{values:?}");
            assert_eq!(split.planes.len(), 3 * values.len());
            for (i, &v) in values.iter().enumerate() {
                let sum: f64 = split.planes.chunks(values.len()).map(|p| f64::from(to_f32(p[i], dtype))).sum();
                assert!((sum - f64::from(v)).abs() <= f64::from(v).abs() * 2f64.powi(-23));
            }
        }
    }

    #[test]
    fn too_large_value_is_reported() {
        assert_eq!(to_elements(&[1.0, 65504.0], Dtype::F16, "w").unwrap()[1], f16::MAX.to_bits());
        let error = to_elements(&[1.0, 70000.0], Dtype::F16, "experts.0.up").unwrap_err();
        assert_eq!(error.to_string(), "experts.0.up: element 1 is 70000, too large for f16");
        assert!(to_elements(&[f32::INFINITY], Dtype::F16, "w").is_ok());
    }
}
