//! Compiles the parts of `kernels/` that the features `cuda` and `emulate` need.

#[path = "build/nvcc.rs"]
mod nvcc;

use std::path::{Path, PathBuf};
use std::{env, process};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let has = |feature: &str| env::var_os(format!("CARGO_FEATURE_{feature}")).is_some();
    if has("DEVICE") {
        println!("cargo::rerun-if-changed=kernels");
        #[cfg(feature = "device")]
        layer_memory();
    }
    // In parallel: neither build uses all processors to its end.
    std::thread::scope(|scope| {
        let emulator = has("EMULATE").then(|| scope.spawn(emulator));
        if has("CUDA") {
            nvcc::kernels(&shared_folder("cuda-kernels"));
        }
        if let Some(Err(panic)) = emulator.map(|thread| thread.join()) {
            std::panic::resume_unwind(panic);
        }
    });
}

/// A folder that all builds share, whatever their features.
fn shared_folder(name: &str) -> PathBuf {
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    out.ancestors().find(|dir| dir.ends_with("build")).and_then(Path::parent).unwrap_or(&out).join(name)
}

/// Links the C++ code that computes the sizes of a layer's memory, shared by host and kernels.
#[cfg(feature = "device")]
fn layer_memory() {
    let mut build = cc::Build::new();
    build.cpp(true).std("c++17").warnings(true).extra_warnings(true).include("kernels");
    build.file("kernels/memory.cpp").file("kernels/params_layout.cpp").compile("aristos_layer_memory");
}

/// Builds the emulator's library and sets `ARISTOS_EMULATOR_LIBRARY` to its path.
fn emulator() {
    let out = shared_folder("emulator");
    let status = process::Command::new("make")
        .args(["-C", "kernels/host"])
        .arg(format!("OUT={}", out.display()))
        .status()
        .unwrap_or_else(|error| panic!("cannot run make, which the feature `emulate` needs: {error}"));
    assert!(status.success(), "make -C kernels/host failed: {status}");
    let library = out.join("libaristos_kernels.so");
    assert!(Path::new(&library).is_file(), "make -C kernels/host made no {}", library.display());
    println!("cargo::rustc-env=ARISTOS_EMULATOR_LIBRARY={}", library.display());
}
