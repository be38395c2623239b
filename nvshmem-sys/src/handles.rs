//! CUDA's handles in the bindings.

use std::ffi::c_void;

/// A module loaded by the driver (`CUmodule`).
#[allow(non_camel_case_types)]
pub type CUmodule = *mut c_void;
/// A stream (`CUstream`, the same type as the runtime's `cudaStream_t`).
#[allow(non_camel_case_types)]
pub type cudaStream_t = *mut c_void;
