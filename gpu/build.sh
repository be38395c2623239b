#!/usr/bin/env bash
# Builds target/gpu/aristos, the program with its CUDA kernels inside, stripped, to be carried to a machine with a GPU. Needs
# Rust and what tools/cuda-toolchain brings; no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/cuda-toolchain
cargo build --release --features cuda
mkdir -p target/gpu
strip -o target/gpu/aristos target/release/aristos
ls -l target/gpu/aristos
