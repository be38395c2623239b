//! Stub, see ../README.md.
#![no_std]

include!("../../gemm.rs");

pub mod gemm {
    pub mod f64 {
        get_gemm_fn!(f64);
    }
}
