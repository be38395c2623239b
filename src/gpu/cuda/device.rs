//! Which device a PE takes, and what that one must be.

use std::ffi::{CStr, c_int};

use super::driver::{self, Device, Driver};
use super::modules::MODULES;
use crate::gpu::GpuError;

/// Which kernels' GEMMs a device runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmPath {
    /// `mma` and `cp.async`: every device from compute capability 8.0 on.
    Ampere,
    /// `wgmma` and the tensor memory accelerator: compute capability 9.0 alone.
    Hopper,
}

impl GemmPath {
    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            GemmPath::Ampere => "ampere",
            GemmPath::Hopper => "hopper",
        }
    }

    /// The path with this name.
    pub fn from_name(name: &str) -> Option<GemmPath> {
        [GemmPath::Ampere, GemmPath::Hopper].into_iter().find(|path| path.name() == name)
    }

    /// What a device of this capability runs: what is asked for, otherwise the best that there is.
    ///
    /// # Errors
    /// [`GpuError::Unavailable`], when it cannot run what is asked for, or nothing at all.
    pub fn choose(capability: (u32, u32), asked: Option<GemmPath>, device: &str) -> Result<GemmPath, GpuError> {
        let (major, minor) = capability;
        if major < 8 {
            return Err(GpuError::Unavailable(format!(
                "{device} has compute capability {major}.{minor}, and 8.0 or higher is needed (A100, H100 and newer): \
                 run on the CPU (--device cpu)"
            )));
        }
        let hopper = major == 9 && MODULES.iter().any(|module| module.name == "layer_hopper");
        match asked {
            Some(GemmPath::Hopper) if major != 9 => Err(GpuError::Unavailable(format!(
                "{device} has compute capability {major}.{minor}, and the Hopper GEMMs run on 9.0 alone: \
                 leave --gemm out, or say --gemm ampere"
            ))),
            Some(path) => Ok(path),
            None if hopper => Ok(GemmPath::Hopper),
            None => Ok(GemmPath::Ampere),
        }
    }
}

/// What the driver says of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Its number among the visible ones.
    pub number: usize,
    /// "NVIDIA A100-SXM4-40GB".
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Memory, bytes.
    pub memory_total: u64,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Most dynamic shared memory of a block, bytes.
    pub shared_bytes_per_block: u32,
    /// Whether cooperative launches work.
    pub cooperative: bool,
    /// "0000:07:00.0", as /sys has it.
    pub pci: String,
}

/// The visible devices.
///
/// # Errors
/// The driver's.
pub fn devices(driver: &Driver) -> Result<Vec<DeviceInfo>, GpuError> {
    let mut count = 0;
    // SAFETY: sets the number.
    driver.check(unsafe { (driver.cuDeviceGetCount)(&raw mut count) }, || "count the CUDA devices".into())?;
    (0..count).map(|number| info(driver, number).map(|(_, info)| info)).collect()
}

fn info(driver: &Driver, number: c_int) -> Result<(Device, DeviceInfo), GpuError> {
    let what = || format!("ask CUDA device {number} what it is");
    let mut device = 0;
    let (mut name, mut pci, mut memory) = ([0; 128], [0; 32], 0);
    // SAFETY: each sets what it is given the address of; texts end with a zero inside the lengths given.
    unsafe {
        driver.check((driver.cuDeviceGet)(&raw mut device, number), what)?;
        driver.check((driver.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, device), what)?;
        driver.check((driver.cuDeviceGetPCIBusId)(pci.as_mut_ptr(), pci.len() as c_int - 1, device), what)?;
        driver.check((driver.cuDeviceTotalMem_v2)(&raw mut memory, device), what)?;
    }
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: sets the value.
        driver.check(unsafe { (driver.cuDeviceGetAttribute)(&raw mut value, attribute, device) }, what)?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    // SAFETY: the arrays end with a zero.
    let text = |text: &[_]| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    let info = DeviceInfo {
        number: number as usize,
        name: text(&name),
        capability: (attribute(driver::CAPABILITY_MAJOR)?, attribute(driver::CAPABILITY_MINOR)?),
        memory_total: memory as u64,
        multiprocessors: attribute(driver::MULTIPROCESSORS)?,
        shared_bytes_per_block: attribute(driver::SHARED_PER_BLOCK)?,
        cooperative: attribute(driver::COOPERATIVE)? != 0,
        pci: text(&pci).to_lowercase(),
    };
    Ok((device, info))
}

/// The device of the PE that is number `local` on its host: they take them in turn. `CUDA_VISIBLE_DEVICES` is the driver's
/// matter.
///
/// # Errors
/// [`GpuError::Unavailable`] without a device; the driver's.
pub fn choose(driver: &Driver, local: usize) -> Result<(Device, DeviceInfo), GpuError> {
    let mut count = 0;
    // SAFETY: sets the number.
    driver.check(unsafe { (driver.cuDeviceGetCount)(&raw mut count) }, || "count the CUDA devices".into())?;
    if count <= 0 {
        return Err(GpuError::Unavailable(
            "the CUDA driver sees no device: look at CUDA_VISIBLE_DEVICES, or run on the CPU (--device cpu)".into(),
        ));
    }
    let (device, info) = info(driver, (local % count as usize) as c_int)?;
    if !info.cooperative {
        return Err(GpuError::Unavailable(format!("{} cannot launch kernels cooperatively", info.name)));
    }
    Ok((device, info))
}

/// The multiprocessors that one PE's blocks may fill at the same time as the other PEs' on the device: under MPS the share
/// that `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` gives it. Without MPS PEs take turns on a device, and each has all of it.
pub fn share(multiprocessors: u32, percentage: Option<&str>) -> u32 {
    let percentage = percentage.and_then(|text| text.trim().parse::<f64>().ok());
    match percentage.filter(|p| *p > 0.0 && *p < 100.0) {
        Some(p) => ((f64::from(multiprocessors) * p / 100.0) as u32).max(1),
        None => multiprocessors,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mps_gives_a_share_and_nonsense_gives_all() {
        assert_eq!(share(108, None), 108);
        assert_eq!(share(108, Some("50")), 54);
        assert_eq!(share(132, Some("33")), 43);
        assert_eq!(share(108, Some(" 12.5 ")), 13);
        assert_eq!(share(108, Some("0.1")), 1);
        for nonsense in ["", "all", "-3", "0", "100", "1000", "NaN"] {
            assert_eq!(share(108, Some(nonsense)), 108, "{nonsense}");
        }
    }

    #[test]
    fn an_old_device_is_refused_and_a_path_it_has_not_too() {
        let choose = |capability, asked| GemmPath::choose(capability, asked, "GPU 0 (X)").map_err(|e| e.to_string());
        let volta = choose((7, 0), None).unwrap_err();
        assert!(volta.contains("GPU 0 (X) has compute capability 7.0") && volta.contains("8.0"), "{volta}");
        assert_eq!(choose((8, 0), None), Ok(GemmPath::Ampere));
        assert_eq!(choose((8, 9), None), Ok(GemmPath::Ampere));
        assert_eq!(choose((9, 0), Some(GemmPath::Ampere)), Ok(GemmPath::Ampere));
        assert_eq!(choose((9, 0), Some(GemmPath::Hopper)), Ok(GemmPath::Hopper));
        assert_eq!(choose((10, 0), None), Ok(GemmPath::Ampere));
        for capability in [(8, 0), (10, 0), (12, 0)] {
            assert!(choose(capability, Some(GemmPath::Hopper)).unwrap_err().contains("9.0 alone"));
        }
    }

    #[test]
    fn paths_are_named_as_they_are_asked_for() {
        for path in [GemmPath::Ampere, GemmPath::Hopper] {
            assert_eq!(GemmPath::from_name(path.name()), Some(path));
        }
        assert_eq!(GemmPath::from_name("volta"), None);
    }
}
