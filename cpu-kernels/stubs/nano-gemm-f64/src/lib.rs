//! Stub, see ../README.md.
#![no_std]

include!("../../kernels.rs");

pub mod x86 {
    pub mod f64 {
        kernels! { f64: f64x1[1, 4, 1] f64x2[1, 4, 2] avx[2, 4, 4] avx512[2, 4, 8] }
    }
}

pub mod aarch64 {
    pub mod f64 {
        kernels! { f64: neon[4, 4, 1] }
    }
}
