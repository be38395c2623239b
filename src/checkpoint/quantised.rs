//! Dequantises weights to f32.

use half::f16;
use serde_json::Value;

/// Storage of a checkpoint's large matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Quantisation {
    /// Not quantised.
    None,
    /// FP8 (E4M3, without infinities) with one scale per block of rows and columns, in a tensor with the matrix's name
    /// plus `_scale_inv`; elements are multiplied by it. DeepSeek-V3's format (arXiv 2412.19437, section 3.3.2).
    Fp8 {
        /// Rows and columns of a block; blocks at the edges may be smaller.
        block: [usize; 2],
    },
    /// MXFP4: a tensor with the suffix `_blocks` has two FP4 (E2M1) elements per byte, the first in the low bits. Each
    /// 16 bytes have one scale, a power of two, in the tensor with the suffix `_scales` (OCP Microscaling Formats v1.0,
    /// sections 5.2 and 5.3.3).
    Mxfp4,
}

/// Elements per scale of MXFP4.
pub(super) const MXFP4_BLOCK: usize = 32;

impl Quantisation {
    /// Parses a `quantization_config`.
    ///
    /// # Errors
    ///
    /// Returns the actual and the expected value.
    pub(super) fn of(config: Option<&Value>) -> Result<Quantisation, (String, &'static str)> {
        let Some(config) = config.filter(|config| !config.is_null()) else { return Ok(Quantisation::None) };
        let method = config.get("quant_method").and_then(Value::as_str);
        match method {
            Some("mxfp4") => Ok(Quantisation::Mxfp4),
            Some("fp8") => {
                let block = config.get("weight_block_size").filter(|size| !size.is_null());
                let sizes: Option<Vec<u64>> = block.and_then(|block| serde_json::from_value(block.clone()).ok());
                let format = config.get("fmt").and_then(Value::as_str).unwrap_or("e4m3");
                match sizes.as_deref() {
                    Some(&[rows @ 1..=65_536, columns @ 1..=65_536]) if format == "e4m3" => {
                        Ok(Quantisation::Fp8 { block: [rows as usize, columns as usize] })
                    }
                    _ => {
                        let shown = block.map_or("null".to_string(), Value::to_string);
                        let found = format!("is fp8, fmt {format}, weight_block_size {shown}");
                        Err((found, "fmt e4m3 and weight_block_size [rows, columns], as of DeepSeek-V3"))
                    }
                }
            }
            other => {
                let found = format!("is there ({})", other.unwrap_or("of an unnamed method"));
                Err((found, "mxfp4, fp8, or an unquantised checkpoint"))
            }
        }
    }
}

/// FP4 E2M1 values by bit pattern.
const FP4: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Decodes FP8 E4M3: a sign, four bits of exponent with bias 7, three of mantissa; NaN if all bits except the sign are
/// ones.
pub(super) fn e4m3(byte: u8) -> f32 {
    if byte & 0x7f == 0x7f {
        return f32::NAN;
    }
    // f16 has the same order of fields, one more bit of exponent with bias 15, and seven more of mantissa. Shifted to
    // f16 and multiplied by 2^8, every E4M3 value is exact, including subnormals.
    let bits = u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7f) << 7;
    f16::from_bits(bits).to_f32() * 256.0
}

/// Decodes a scale of MXFP4, E8M0: a power of two; NaN if all bits are ones.
fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22), // 2^-127
        255 => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Decodes a row of MXFP4 into `row`; `blocks` has 16 bytes per scale.
pub(super) fn mxfp4_row(blocks: &[u8], scales: &[u8], row: &mut Vec<f32>) {
    for (block, &scale) in blocks.chunks_exact(MXFP4_BLOCK / 2).zip(scales) {
        let scale = e8m0(scale);
        row.extend(block.iter().flat_map(|byte| [byte & 0xf, byte >> 4]).map(|four| FP4[usize::from(four)] * scale));
    }
}

/// Maps the elements of a tensor with block scales to their scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockScales {
    rows: usize,
    columns: usize,
    block: [usize; 2],
}

impl BlockScales {
    /// The scales of a tensor of this shape, with matrices in its last two dimensions; `None` if it has fewer than two.
    pub(super) fn new(shape: &[usize], block: [usize; 2]) -> Option<BlockScales> {
        let [.., rows, columns] = *shape else { return None };
        Some(BlockScales { rows, columns, block })
    }

    /// Rows and columns of one matrix's scales.
    pub(super) fn size(&self) -> [usize; 2] {
        [self.rows.div_ceil(self.block[0]), self.columns.div_ceil(self.block[1])]
    }

    /// Multiplies `elements`, which start at element `first` of the tensor, by their scales; `scales` starts at matrix
    /// `from`.
    pub(super) fn apply(&self, elements: &mut [f32], first: usize, scales: &[f32], from: usize) {
        let [scale_rows, scale_columns] = self.size();
        for (i, element) in elements.iter_mut().enumerate() {
            let (row, column) = ((first + i) / self.columns, (first + i) % self.columns);
            let (matrix, row) = (row / self.rows - from, row % self.rows);
            *element *= scales[(matrix * scale_rows + row / self.block[0]) * scale_columns + column / self.block[1]];
        }
    }

    /// The matrices that contain elements `first..first + len`.
    pub(super) fn matrices(&self, first: usize, len: usize) -> std::ops::Range<usize> {
        let size = (self.rows * self.columns).max(1);
        first / size..(first + len).div_ceil(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_values_match_the_format() {
        // All values, by definition of the format.
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 0xf), f32::from(byte & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f32.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            let want = if byte & 0x80 == 0 { magnitude } else { -magnitude };
            match byte & 0x7f {
                0x7f => assert!(e4m3(byte).is_nan()),
                _ => assert_eq!(e4m3(byte).to_bits(), want.to_bits(), "{byte:#x}"),
            }
        }
        assert_eq!((e4m3(0x7e), e4m3(1)), (448.0, 2f32.powi(-9)));
    }

    #[test]
    fn scales_are_powers_of_two() {
        for exponent in 1..255u8 {
            assert_eq!(f64::from(e8m0(exponent)), 2f64.powi(i32::from(exponent) - 127));
        }
        assert_eq!(f64::from(e8m0(0)), 2f64.powi(-127));
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn mxfp4_stores_the_low_nibble_first() {
        let mut row = Vec::new();
        let mut blocks = [0u8; 32];
        (blocks[0], blocks[1], blocks[31]) = (0x21, 0xf0, 0x7a);
        mxfp4_row(&blocks, &[127, 129], &mut row);
        assert_eq!(row.len(), 64);
        assert_eq!(row[..4], [0.5, 1.0, 0.0, -6.0]);
        assert_eq!(row[62..], [-4.0, 24.0]);
    }

    #[test]
    fn edge_blocks_may_be_smaller() {
        // Two matrices of 3 x 5 in blocks of 2 x 2: 2 x 3 scales each.
        let scales = BlockScales::new(&[2, 3, 5], [2, 2]).unwrap();
        assert_eq!(scales.size(), [2, 3]);
        assert_eq!((scales.matrices(0, 15), scales.matrices(14, 2), scales.matrices(20, 10)), (0..1, 0..2, 1..2));
        let of_second: Vec<f32> = (0..6).map(|i| i as f32).collect();
        let mut elements = vec![1.0; 15];
        scales.apply(&mut elements, 15, &of_second, 1);
        assert_eq!(elements, [0.0, 0.0, 1.0, 1.0, 2.0, 0.0, 0.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0]);
        assert!(BlockScales::new(&[7], [2, 2]).is_none());
    }

    #[test]
    fn quantisation_config_is_read() {
        let of = |text: &str| Quantisation::of(Some(&serde_json::from_str(text).unwrap()));
        assert_eq!(Quantisation::of(None), Ok(Quantisation::None));
        assert_eq!(of("null"), Ok(Quantisation::None));
        assert_eq!(of(r#"{"quant_method": "mxfp4"}"#), Ok(Quantisation::Mxfp4));
        let fp8 = r#"{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}"#;
        assert_eq!(of(fp8), Ok(Quantisation::Fp8 { block: [128, 64] }));
        for (text, part) in [
            (r#"{"quant_method": "fp8"}"#, "weight_block_size null"),
            (r#"{"quant_method": "fp8", "weight_block_size": [0, 4]}"#, "weight_block_size [0,4]"),
            (r#"{"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}"#, "fmt e5m2"),
            (r#"{"quant_method": "awq"}"#, "(awq)"),
            (r#"{"bits": 4}"#, "an unnamed method"),
        ] {
            let (found, expected) = of(text).unwrap_err();
            assert!(found.contains(part) && !expected.is_empty(), "{text}: {found}");
        }
    }
}
