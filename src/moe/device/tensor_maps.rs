//! Tensor maps of the weights of experts.

use crate::gpu::params::WEIGHT_MAPS;
use crate::gpu::{Gpu, GpuError, TensorMap};
use crate::moe::spec::{Dtype, MlpConfig, proj_index};

/// Number of rows and of columns of a weight that one load of the tensor memory accelerator copies.
pub(super) const TENSOR_MAP_BOX: u32 = 64;

/// Tensor maps of the gate, up and down matrices of `experts` MLPs at these addresses and strides; zeros for a missing matrix.
pub(super) fn tensor_maps(
    gpu: &dyn Gpu,
    mlp: &MlpConfig,
    hidden: usize,
    dtype: Dtype,
    (addresses, strides): ([u64; 6], [u64; 6]),
    experts: usize,
) -> Result<[[u8; 128]; WEIGHT_MAPS], GpuError> {
    let mut maps = [[0u8; 128]; WEIGHT_MAPS];
    for &proj in mlp.projections().iter().filter(|_| experts > 0) {
        let ([rows, cols], index) = (mlp.shape(proj, hidden), proj_index(proj));
        maps[index] = gpu.tensor_map(TensorMap {
            base: addresses[index],
            rows: rows as u32,
            cols: cols as u32,
            row_stride_bytes: (cols * dtype.bytes()) as u64,
            items: experts as u32,
            item_stride_bytes: strides[index],
            box_rows: TENSOR_MAP_BOX,
            box_cols: TENSOR_MAP_BOX,
            element_bytes: dtype.bytes() as u32,
        })?;
    }
    Ok(maps)
}
