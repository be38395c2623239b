//! Tensor maps for the tensor memory accelerator.

use std::ffi::c_void;

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use super::driver::{Driver, call};
use crate::gpu::{GpuError, TensorMap};

/// Encodes the tensor map that [`Gpu::tensor_map`](crate::gpu::Gpu::tensor_map) returns.
pub(super) fn encode(driver: &Driver, matrix: &TensorMap) -> Result<[u8; 128], GpuError> {
    let what = || format!("describe a matrix for the tensor memory accelerator: {matrix:?}");
    check(matrix).map_err(|wrong| GpuError::failed(what(), wrong))?;
    let mut map = CUtensorMap { opaque: [0; 16] };
    // Only the size of the element type matters, because elements are only copied.
    let element = match matrix.element_bytes {
        1 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
        _ => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
    };
    // The driver expects the innermost dimension first, so the order is columns, rows, matrices.
    let size = [matrix.cols, matrix.rows, matrix.items].map(u64::from);
    let strides = [matrix.row_stride_bytes, matrix.item_stride_bytes];
    let boxes = [matrix.box_cols, matrix.box_rows, 1];
    let dimensions = if matrix.items == 0 { 2 } else { 3 };
    // SAFETY: the function only writes the 128 bytes of `map`. The arrays have at least one element per dimension, except that the strides
    // may have one element less. The matrix itself is not accessed.
    let code = unsafe {
        call!(
            driver,
            cuTensorMapEncodeTiled(
                &raw mut map,
                element,
                dimensions,
                matrix.base as *mut c_void,
                size.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                [1u32, 1, 1].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
    };
    driver.check(code, what).map(|()| bytemuck::cast(map.opaque))
}

/// Checks the constraints of cuTensorMapEncodeTiled, whose own error is only a code.
fn check(matrix: &TensorMap) -> Result<(), String> {
    let TensorMap { base, rows, cols, row_stride_bytes, items, item_stride_bytes, box_rows, box_cols, element_bytes } =
        *matrix;
    if !matches!(element_bytes, 1 | 2 | 4) {
        return Err(format!("elements of {element_bytes} bytes"));
    }
    let box_bytes = u64::from(box_cols) * u64::from(element_bytes);
    let wrong = [
        (rows == 0 || cols == 0, "it is empty"),
        (base % 16 != 0, "its address is no multiple of 16"),
        (row_stride_bytes % 16 != 0, "its rows are no multiple of 16 bytes apart"),
        (row_stride_bytes < u64::from(cols) * u64::from(element_bytes), "its rows overlap"),
        (items > 0 && item_stride_bytes % 16 != 0, "its matrices are no multiple of 16 bytes apart"),
        (box_rows == 0 || box_rows > 256, "a box has 1 to 256 rows"),
        (box_bytes == 0 || box_bytes > 128 || box_bytes % 16 != 0, "a box's row has 16 to 128 bytes, in steps of 16"),
    ];
    wrong.iter().find(|(is, _)| *is).map_or(Ok(()), |(_, text)| Err((*text).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_matrices_are_refused_with_a_reason() {
        let good = TensorMap {
            base: 1 << 20,
            rows: 5,
            cols: 72,
            row_stride_bytes: 144,
            items: 0,
            item_stride_bytes: 0,
            box_rows: 128,
            box_cols: 64,
            element_bytes: 2,
        };
        assert_eq!(check(&good), Ok(()));
        for (bad, word) in [
            (TensorMap { rows: 0, ..good }, "empty"),
            (TensorMap { base: 8, ..good }, "multiple of 16"),
            (TensorMap { row_stride_bytes: 152, ..good }, "16 bytes apart"),
            (TensorMap { row_stride_bytes: 128, ..good }, "overlap"),
            (TensorMap { items: 2, item_stride_bytes: 728, ..good }, "matrices are no multiple"),
            (TensorMap { box_rows: 257, ..good }, "256 rows"),
            (TensorMap { box_cols: 65, ..good }, "steps of 16"),
            (TensorMap { element_bytes: 3, ..good }, "3 bytes"),
        ] {
            assert!(check(&bad).unwrap_err().contains(word), "{bad:?}");
        }
    }
}
