/// Defines the function that the crate `gemm` calls.
macro_rules! get_gemm_fn {
    ($element:ty) => {
        type T = $element;
        type GemmFn = unsafe fn(
            usize, usize, usize, *mut T, isize, isize, bool, *const T, isize, isize, *const T, isize, isize, T, T, bool, bool,
            bool, gemm_common::Parallelism,
        );
        pub fn get_gemm_fn() -> GemmFn {
            unreachable!("only f32 is multiplied (cpu-kernels/stubs)")
        }
    };
}
