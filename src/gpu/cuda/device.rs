//! Device enumeration, selection and requirements.

use std::ffi::{CStr, c_int};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute};

use super::driver::{Driver, call};
use crate::gpu::GpuError;
use crate::gpu::params::AMPERE_SHARED_BYTES;

/// A device's properties as reported by the driver.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceInfo {
    /// Index among the visible devices.
    pub number: usize,
    /// The device's name, such as "NVIDIA A100-SXM4-40GB".
    pub name: String,
    /// Major and minor number of the compute capability.
    pub capability: (u32, u32),
    /// Size of the device memory, bytes.
    pub memory_total: u64,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Maximum dynamic shared memory per block, bytes.
    pub shared_bytes_per_block: u32,
    /// Whether the device supports cooperative launches.
    pub cooperative: bool,
    /// The PCI address in the format that /sys uses, such as "0000:07:00.0".
    pub pci: String,
}

impl DeviceInfo {
    /// Whether the device has Hopper's `wgmma` and tensor memory accelerator.
    pub fn hopper(&self) -> bool {
        self.capability.0 == 9
    }

    /// Checks that the kernels can run on the device.
    ///
    /// # Errors
    /// Returns [`GpuError::Unavailable`] with the reason.
    pub fn usable(&self) -> Result<(), GpuError> {
        let (DeviceInfo { number, name, .. }, (major, minor)) = (self, self.capability);
        if major < 8 {
            return Err(GpuError::Unavailable(format!(
                "GPU {number} ({name}) has compute capability {major}.{minor}, and 8.0 or higher is needed (A100, H100 \
                 and newer): run on the CPU (`device` cpu)"
            )));
        }
        let (has, wanted) = (self.shared_bytes_per_block >> 10, AMPERE_SHARED_BYTES >> 10);
        if has < wanted {
            return Err(GpuError::Unavailable(format!(
                "GPU {number} ({name}) gives a block {has} KiB of shared memory, and the kernels take {wanted} KiB (A100, H100, B200 \
                 have it): run on the CPU (`device` cpu)"
            )));
        }
        if !self.cooperative {
            return Err(GpuError::Unavailable(format!("GPU {number} ({name}) cannot launch kernels cooperatively")));
        }
        Ok(())
    }
}

/// Lists the visible devices.
///
/// # Errors
/// Returns the driver's error.
pub fn devices(driver: &Driver) -> Result<Vec<DeviceInfo>, GpuError> {
    let mut count = 0;
    // SAFETY: the function only writes the number.
    driver.check(unsafe { call!(driver, cuDeviceGetCount(&raw mut count)) }, || "count the CUDA devices".into())?;
    (0..count).map(|number| info(driver, number).map(|(_, info)| info)).collect()
}

fn info(driver: &Driver, number: c_int) -> Result<(CUdevice, DeviceInfo), GpuError> {
    let what = || format!("ask CUDA device {number} what it is");
    let mut device = 0;
    let (mut name, mut pci, mut memory) = ([0; 128], [0; 32], 0);
    // SAFETY: each call writes only through its first argument, and writes strings with their NUL within the given length.
    unsafe {
        driver.check(call!(driver, cuDeviceGet(&raw mut device, number)), what)?;
        driver.check(call!(driver, cuDeviceGetName(name.as_mut_ptr(), name.len() as c_int - 1, device)), what)?;
        driver.check(call!(driver, cuDeviceGetPCIBusId(pci.as_mut_ptr(), pci.len() as c_int - 1, device)), what)?;
        driver.check(call!(driver, cuDeviceTotalMem_v2(&raw mut memory, device)), what)?;
    }
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the function only writes the value.
        driver.check(unsafe { call!(driver, cuDeviceGetAttribute(&raw mut value, attribute, device)) }, what)?;
        Ok(u32::try_from(value).unwrap_or(0))
    };
    // SAFETY: the arrays are NUL-terminated, because they were zeroed and the driver was given a length that is one byte shorter.
    let text = |text: &[_]| unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    let info = DeviceInfo {
        number: number as usize,
        name: text(&name),
        capability: (
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        memory_total: memory as u64,
        multiprocessors: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_bytes_per_block: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        cooperative: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)? != 0,
        pci: text(&pci).to_lowercase(),
    };
    Ok((device, info))
}

/// Returns a PE's rank on its host, which is the number of PEs with lower numbers on the same host. `hosts` is indexed by PE.
pub fn rank_on_host<H: PartialEq>(hosts: &[H], pe: usize) -> usize {
    hosts[..pe].iter().filter(|host| **host == hosts[pe]).count()
}

/// Returns the device of the PE with rank `local` on its host. The ranks are assigned to the visible devices round-robin.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if no device is visible or the device cannot run the kernels, and the driver's error if the driver
/// fails.
pub fn choose(driver: &Driver, local: usize) -> Result<(CUdevice, DeviceInfo), GpuError> {
    let mut count = 0;
    // SAFETY: the function only writes the number.
    driver.check(unsafe { call!(driver, cuDeviceGetCount(&raw mut count)) }, || "count the CUDA devices".into())?;
    if count <= 0 {
        return Err(no_device());
    }
    let (device, info) = info(driver, (local % count as usize) as c_int)?;
    info.usable()?;
    Ok((device, info))
}

/// Returns the device with the given index.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if it cannot run the kernels, and the driver's error if the driver fails.
pub fn numbered(driver: &Driver, number: usize) -> Result<(CUdevice, DeviceInfo), GpuError> {
    let (device, info) = info(driver, c_int::try_from(number).unwrap_or(c_int::MAX))?;
    info.usable()?;
    Ok((device, info))
}

/// Checks that the devices can access each other's memory.
///
/// # Errors
/// Returns [`GpuError::Unavailable`], which names two devices that cannot, and the driver's error if the driver fails.
pub fn check_reach(driver: &Driver, devices: &[DeviceInfo]) -> Result<(), GpuError> {
    let handle = |of: &DeviceInfo| info(driver, of.number as c_int).map(|(device, _)| device);
    for (from, to) in devices.iter().flat_map(|from| devices.iter().map(move |to| (from, to))) {
        if from.number == to.number {
            continue;
        }
        let what = || format!("ask whether GPU {} reaches GPU {}", from.number, to.number);
        let (mut reaches, a, b) = (0, handle(from)?, handle(to)?);
        // SAFETY: the function only writes the answer.
        driver.check(unsafe { call!(driver, cuDeviceCanAccessPeer(&raw mut reaches, a, b)) }, what)?;
        if reaches == 0 {
            return Err(GpuError::Unavailable(format!(
                "GPU {} ({}) does not reach the memory of GPU {} ({}) by loads and stores, which `symmetric` nccl needs: use `symmetric` nvshmem",
                from.number, from.pci, to.number, to.pci
            )));
        }
    }
    Ok(())
}

/// The error for a host without a visible device.
pub fn no_device() -> GpuError {
    GpuError::Unavailable(
        "the CUDA driver sees no device: look at CUDA_VISIBLE_DEVICES, or run on the CPU (`device` cpu)".into(),
    )
}

/// The environment variable that sets the percentage of a device's multiprocessors that MPS gives to a process.
pub const MPS_SHARE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Whether NVIDIA's multi-process service (MPS) is running, so that processes that share a device run concurrently.
pub fn mps_is_on() -> bool {
    let pipes = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    std::path::Path::new(&pipes).join("control").exists()
}

/// Returns the number of multiprocessors that one PE's blocks may fill while other PEs use the device. Under MPS `percentage` gives this
/// share; it is the value of `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`. Without it, a PE may fill all multiprocessors, because the PEs use the
/// device in turn.
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
    fn invalid_mps_percentage_means_all_multiprocessors() {
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
    fn ranks_are_counted_per_host() {
        // The cases are the block and the cyclic numbering of `srun`, and hosts with different numbers of PEs.
        for (hosts, ranks) in [
            (vec!["a", "a", "b", "b"], vec![0, 1, 0, 1]),
            (vec!["a", "b", "a", "b", "a"], vec![0, 0, 1, 1, 2]),
            (vec!["b", "a", "a", "c", "a"], vec![0, 0, 1, 0, 2]),
            (vec!["a"], vec![0]),
        ] {
            let got: Vec<usize> = (0..hosts.len()).map(|pe| rank_on_host(&hosts, pe)).collect();
            assert_eq!(got, ranks, "{hosts:?}");
        }
    }

    #[test]
    fn unsuitable_devices_are_refused() {
        let device = |capability, cooperative| DeviceInfo {
            number: 1,
            name: "X".into(),
            capability,
            memory_total: 1 << 30,
            multiprocessors: 80,
            shared_bytes_per_block: 163 << 10,
            cooperative,
            pci: "0000:07:00.0".into(),
        };
        let ada =
            DeviceInfo { shared_bytes_per_block: 99 << 10, ..device((8, 9), true) }.usable().unwrap_err().to_string();
        assert!(ada.contains("99 KiB") && ada.contains("150 KiB"), "{ada}");
        let volta = device((7, 0), true).usable().unwrap_err().to_string();
        assert!(volta.contains("GPU 1 (X) has compute capability 7.0") && volta.contains("8.0"), "{volta}");
        let alone = device((9, 0), false).usable().unwrap_err().to_string();
        assert!(alone.contains("cooperatively"), "{alone}");
        for capability in [(8, 0), (9, 0), (10, 0)] {
            assert!(device(capability, true).usable().is_ok());
            assert_eq!(device(capability, true).hopper(), capability.0 == 9);
        }
    }
}
