//! Stub, see ../README.md.
#![no_std]

include!("../../kernels.rs");

pub mod x86 {
    pub mod c64 {
        kernels! { num_complex::Complex<f64>: c64x1[1, 2, 1] avx[2, 2, 2] avx512[2, 2, 4] }
    }
}

pub mod aarch64 {
    pub mod c64 {
        kernels! { num_complex::Complex<f64>: neon[2, 4, 1] }
    }
}
