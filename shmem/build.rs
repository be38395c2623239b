//! Compiles, for the feature `mpi`, constants that are macros in `mpi.h` and missing in the crate `mpi`, and for `ofi` wrappers
//! of libfabric's inline functions.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "mpi")]
    mpi_constants();
    #[cfg(feature = "ofi")]
    ofi_shim();
}

/// Uses the MPI that `mpi-sys` links: both find it through `build-probe-mpi`.
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

/// Needs libfabric's headers only; the library is loaded at run time.
#[cfg(feature = "ofi")]
fn ofi_shim() {
    const SOURCE: &str = "src/ofi/shim.c";
    println!("cargo::rerun-if-changed={SOURCE}");
    // Without a pkg-config file the headers may be on the compiler's path.
    let found = pkg_config::Config::new().cargo_metadata(false).probe("libfabric");
    let mut build = cc::Build::new();
    build.file(SOURCE).includes(found.map(|library| library.include_paths).unwrap_or_default());
    if let Err(reason) = build.warnings(true).extra_warnings(true).try_compile("aristos_ofi_shim") {
        panic!(
            "the feature `ofi` needs the headers of libfabric 1.15 or later (Debian: libfabric-dev; on a cluster its module, or CPATH and \
             PKG_CONFIG_PATH): {reason}"
        );
    }
}
