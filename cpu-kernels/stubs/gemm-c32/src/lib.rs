//! Stub, see ../README.md.
#![no_std]

include!("../../gemm.rs");

pub mod gemm {
    pub mod f32 {
        get_gemm_fn!(num_complex::Complex<f32>);
    }
}
