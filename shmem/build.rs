//! With the feature `mpi`, compiles what `mpi.h` has as macros only, and `mpi`'s own bindings lack.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mpi")]
    mpi_constants();
}

/// Against the MPI that `mpi-sys` finds too: both ask `build-probe-mpi`.
#[cfg(feature = "mpi")]
fn mpi_constants() {
    const SOURCE: &str = "src/mpi/constants.c";
    println!("cargo::rerun-if-changed={SOURCE}");
    for variable in ["MPICC", "MPI_PKG_CONFIG", "CRAY_MPICH_DIR"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let library = build_probe_mpi::probe().unwrap_or_else(|reasons| {
        let reasons: Vec<String> = reasons.iter().map(|reason| reason.to_string()).collect();
        panic!("the feature `mpi` needs an MPI, and none was found:\n{}", reasons.join("\n"))
    });
    let mut build = cc::Build::new();
    build.file(SOURCE).warnings(true).extra_warnings(true);
    match &library.mpicc {
        Some(mpicc) => _ = build.compiler(mpicc),
        None => _ = build.includes(&library.include_paths),
    }
    build.compile("aristos_mpi_constants");
}
