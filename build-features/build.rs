//! Cargo builds `[build-dependencies]` where there is one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
