//! Raw bindings of NVSHMEM's host library, loaded at run time; see the README. `generate` creates `bindings`.

#[allow(missing_docs, non_camel_case_types, non_snake_case)]
#[allow(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc, clippy::too_many_arguments)]
#[rustfmt::skip]
mod bindings;
mod handles;

use std::path::{Path, PathBuf};

pub use bindings::*;
pub use handles::{CUmodule, cudaStream_t};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// The library's file name, with NVSHMEM's major version.
pub const LIBRARY: &str = "libnvshmem_host.so.3";

/// Version of the headers from which these bindings are generated, and with which the pinned toolchain compiles device code.
pub const HEADER_VERSION: [u32; 3] =
    [NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION];

/// Why the library cannot be loaded. Displays as one line.
#[derive(Debug)]
pub struct LoadError {
    /// The path that was opened.
    pub path: PathBuf,
    /// The dynamic loader's message, which names the missing file or symbol.
    pub message: String,
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot load NVSHMEM's host library {}: {}", self.path.display(), self.message)
    }
}

impl std::error::Error for LoadError {}

/// Loads the library at `path` (a name without a slash is resolved by the dynamic loader) and resolves every function. The
/// library is never closed: it starts threads and registers exit handlers.
///
/// # Safety
/// The file is NVSHMEM's host library: its constructors run, and its functions are assumed to have the types of the bindings.
///
/// # Errors
/// [`LoadError`] if the library, one of its dependencies, or a function is missing.
pub unsafe fn load(path: &Path) -> Result<&'static NvshmemHost, LoadError> {
    let error = |e: libloading::Error| LoadError { path: path.to_path_buf(), message: cause(&e) };
    // SAFETY: guaranteed by the caller.
    unsafe {
        let library = Library::open(Some(path), RTLD_NOW | RTLD_LOCAL).map_err(error)?;
        let host = NvshmemHost::from_library(library).map_err(error)?;
        Ok(Box::leak(Box::new(host)))
    }
}

/// The dynamic loader's message: the error's source, or the error itself.
fn cause(error: &libloading::Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => source.to_string(),
        None => error.to_string(),
    }
}

/// An empty unique id, to be filled by `nvshmemx_get_uniqueid` or with the bytes of another PE's id.
pub fn unique_id() -> nvshmemx_uniqueid_v1 {
    nvshmemx_uniqueid_v1 { version: version_of::<nvshmemx_uniqueid_v1>(), ..Default::default() }
}

/// Attributes for `nvshmemx_hostlib_init_attr`, as initialised by the headers' `NVSHMEMX_INIT_ATTR_INITIALIZER`.
pub fn init_attributes() -> nvshmemx_init_attr_v1 {
    let mut attributes = nvshmemx_init_attr_v1 { version: version_of::<nvshmemx_init_attr_v1>(), ..Default::default() };
    attributes.args.version = version_of::<nvshmemx_init_args_v1>();
    attributes.args.uid_args.version = version_of::<nvshmemx_uniqueid_args_v1>();
    attributes.args.uid_args.myrank = -1;
    attributes.args.uid_args.nranks = -1;
    attributes
}

/// The version field of a structure: version 1, and the structure's size.
const fn version_of<T>() -> i32 {
    (1 << 16) + size_of::<T>() as i32
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::process::Command;

    use super::*;

    #[test]
    fn structures_have_the_layout_of_version_1() {
        assert_eq!(size_of::<nvshmemx_uniqueid_v1>(), 128);
        assert_eq!(size_of::<nvshmemx_uniqueid_args_v1>(), 24);
        assert_eq!(size_of::<nvshmemx_init_args_v1>(), 128);
        assert_eq!(size_of::<nvshmemx_init_attr_v1>(), 144);
        assert_eq!(offset_of!(nvshmemx_init_attr_v1, mpi_comm), 8);
        assert_eq!(offset_of!(nvshmemx_init_attr_v1, args), 16);
        assert_eq!(offset_of!(nvshmemx_init_args_v1, uid_args), 8);
        assert_eq!(offset_of!(nvshmemx_uniqueid_args_v1, id), 8);
        assert_eq!(offset_of!(nvshmemx_uniqueid_args_v1, myrank), 16);
        assert_eq!(offset_of!(nvshmemx_uniqueid_args_v1, nranks), 20);
    }

    #[test]
    fn structures_say_which_version_they_are() {
        let attributes = init_attributes();
        assert_eq!(attributes.version, 65680);
        assert_eq!(attributes.args.version, 65664);
        assert_eq!(attributes.args.uid_args.version, 65560);
        assert_eq!((attributes.args.uid_args.myrank, attributes.args.uid_args.nranks), (-1, -1));
        assert_eq!(unique_id().version, 65664);
        assert_eq!(NVSHMEMX_INIT_WITH_UNIQUEID, 8);
        assert_eq!(
            [NVSHMEM_STATUS_IS_BOOTSTRAPPED, NVSHMEM_STATUS_IS_INITIALIZED, NVSHMEM_STATUS_LIMITED_MPG],
            [1, 2, 3]
        );
    }

    #[test]
    fn a_library_that_is_not_there_is_named() {
        // SAFETY: the file does not exist.
        let error = unsafe { load(Path::new("/nowhere/libnvshmem_host.so.3")) }.map(|_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/nowhere/libnvshmem_host.so.3") && text.contains("No such file"), "{text}");
        assert!(!text.contains('\n'), "{text}");
    }

    #[test]
    fn a_missing_function_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let (source, library) = (dir.path().join("stub.c"), dir.path().join(LIBRARY));
        // All functions except the last one.
        let bindings = include_str!("bindings.rs");
        let mut functions: Vec<&str> =
            bindings.split("get(b\"").skip(1).map(|rest| rest.split('\\').next().unwrap()).collect();
        assert!(functions.len() > 10, "{functions:?}");
        let make = |functions: &[&str]| {
            let text: String = functions.iter().map(|f| format!("int {f}(void) {{ return 0; }}\n")).collect();
            std::fs::write(&source, text).unwrap();
            let done = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
            assert!(done.success());
        };
        let last = functions.pop().unwrap();
        make(&functions);
        // SAFETY: a library of empty functions, none of which is called.
        let error = unsafe { load(&library) }.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(last) && error.contains("undefined symbol"), "{error}");
        functions.push(last);
        std::fs::remove_file(&library).unwrap();
        make(&functions);
        // SAFETY: a library of empty functions, none of which is called.
        assert!(unsafe { load(&library) }.is_ok());
    }
}
