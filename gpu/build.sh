#!/usr/bin/env bash
# Builds target/gpu/aristos, the stripped program with embedded CUDA kernels, to be copied to a machine with a GPU. Needs Rust and
# the packages of tools/cuda-toolchain, but no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/cuda-toolchain
cargo build --release --features cuda
mkdir -p target/gpu
strip -o target/gpu/aristos target/release/aristos
ls -l target/gpu/aristos
