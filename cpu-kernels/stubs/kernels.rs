/// Defines modules of micro-kernels with the interface that the crate `nano-gemm` uses.
macro_rules! kernels {
    ($element:ty: $($module:ident [$mr:literal, $nr:literal, $n:literal])*) => { $(
        pub mod $module {
            use nano_gemm_core::{MicroKernel, MicroKernelData};
            pub const MR_DIV_N: usize = $mr;
            pub const NR: usize = $nr;
            pub const N: usize = $n;
            pub static MASKS: [(); N] = [(); N];
            pub static MICROKERNELS: [[[MicroKernel<$element>; NR]; MR_DIV_N]; 17] = [[[stub; NR]; MR_DIV_N]; 17];
            unsafe fn stub(_: &MicroKernelData<$element>, _: *mut $element, _: *const $element, _: *const $element) {
                unreachable!("only f32 is multiplied (cpu-kernels/stubs)")
            }
        }
    )* };
}
