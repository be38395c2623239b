//! The kernels. build.rs embeds one fat binary per translation unit.

/// The CUDA version of the nvcc that compiled the kernels, such as "13.0". Drivers of older versions cannot load the kernels.
pub const MADE_BY: &str = env!("ARISTOS_CUDA_VERSION");

/// A fat binary.
pub struct Module {
    /// The name of the translation unit, whose file is `kernels/<name>.cu`.
    pub name: &'static str,
    /// The architectures for which it has machine code, such as "sm_80 sm_90".
    pub architectures: &'static str,
    /// Whether it runs only on Hopper.
    pub hopper: bool,
    /// Whether its device code calls NVSHMEM.
    pub nvshmem: bool,
    /// The fat binary.
    pub image: &'static Image<[u8]>,
}

/// Bytes with the alignment that the driver requires.
#[repr(C, align(64))]
pub struct Image<B: ?Sized>(pub B);

/// All modules of this build.
pub static MODULES: &[Module] = include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// Returns the modules that a device loads. A Hopper device loads all modules, and another device those that are not specific to Hopper.
pub fn modules_for(hopper: bool) -> impl Iterator<Item = &'static Module> {
    MODULES.iter().filter(move |module| hopper || !module.hopper)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of every fat binary.
    const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();

    #[test]
    fn modules_are_aligned_fat_binaries() {
        assert!(MODULES.iter().any(|module| module.name == "smoke" && module.nvshmem));
        for module in MODULES {
            assert_eq!(module.image.0[..4], MAGIC, "{}", module.name);
            assert_eq!(module.image.0.as_ptr() as usize % 64, 0, "{}", module.name);
        }
    }

    #[test]
    fn hopper_modules_are_loaded_on_hopper_only() {
        assert_eq!(modules_for(true).count(), MODULES.len());
        assert!(modules_for(false).all(|module| !module.hopper && module.architectures.contains("sm_80")));
    }
}
