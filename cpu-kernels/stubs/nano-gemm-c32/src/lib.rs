//! Stub, see ../README.md.
#![no_std]

include!("../../kernels.rs");

pub mod x86 {
    pub mod c32 {
        kernels! { num_complex::Complex<f32>: c32x1[1, 2, 1] c32x2[1, 2, 2] avx[2, 2, 4] avx512[2, 2, 8] }
    }
}

pub mod aarch64 {
    pub mod c32 {
        kernels! { num_complex::Complex<f32>: neon[4, 4, 1] }
    }
}
