//! The kernels, embedded as build.rs made them: one fat binary per translation unit.

/// The version of CUDA whose nvcc made them, "13.0": the driver has to be of it or newer.
pub const MADE_BY: &str = env!("ARISTOS_CUDA_VERSION");

/// A fat binary.
pub struct Module {
    /// The translation unit: `kernels/<name>.cu`.
    pub name: &'static str,
    /// Architectures that it has machine code for, "sm_80 sm_90".
    pub architectures: &'static str,
    /// Whether it is for Hopper alone.
    pub hopper: bool,
    /// Whether its device code calls NVSHMEM.
    pub nvshmem: bool,
    /// What the driver takes.
    pub image: &'static Image<[u8]>,
}

/// Bytes aligned as the driver reads them.
#[repr(C, align(64))]
pub struct Image<B: ?Sized>(pub B);

/// All of them.
pub static MODULES: &[Module] = include!(concat!(env!("OUT_DIR"), "/modules.rs"));

/// What a device loads: all, but for Hopper's where it is none.
pub fn modules_for(hopper: bool) -> impl Iterator<Item = &'static Module> {
    MODULES.iter().filter(move |module| hopper || !module.hopper)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a fat binary's header.
    const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();

    #[test]
    fn every_module_is_a_fat_binary_and_aligned() {
        assert!(MODULES.iter().any(|module| module.name == "smoke" && module.nvshmem));
        for module in MODULES {
            assert_eq!(module.image.0[..4], MAGIC, "{}", module.name);
            assert_eq!(module.image.0.as_ptr() as usize % 64, 0, "{}", module.name);
        }
    }

    #[test]
    fn hopper_s_are_loaded_on_hopper_alone() {
        assert_eq!(modules_for(true).count(), MODULES.len());
        assert!(modules_for(false).all(|module| !module.hopper && module.architectures.contains("sm_80")));
    }
}
