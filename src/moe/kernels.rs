//! CPU kernels: GEMM and activations.
