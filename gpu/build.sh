#!/usr/bin/env bash
# Builds target/gpu/aristos, the program with embedded CUDA kernels and without symbols, which can be copied to a machine with a GPU. The
# build needs Rust and the packages of tools/cuda-toolchain, but no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/cuda-toolchain
cargo build --release --features cuda
mkdir -p target/gpu
strip -o target/gpu/aristos target/release/aristos
ls -l target/gpu/aristos
