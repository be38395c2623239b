//! Checks the devices of a host before any PE starts.

use super::device::{self, DeviceInfo};
use super::{driver, nccl, symmetric};
use crate::gpu::nvshmem;
use crate::gpu::{DeviceLimits, GpuError, SymmetricBy};

/// Checks that this host has the driver, the devices and the libraries that its PEs need, which are `pes_here` of all `n_pes` PEs. Returns
/// the number of devices.
///
/// # Errors
/// Returns [`GpuError::Unavailable`], which names the missing requirement.
pub fn check_host(pes_here: usize, n_pes: usize, by: SymmetricBy) -> Result<usize, GpuError> {
    let driver = driver::driver()?;
    let devices = device::devices(driver)?;
    if devices.is_empty() {
        return Err(device::no_device());
    }
    devices.iter().take(pes_here).try_for_each(DeviceInfo::usable)?;
    match by {
        SymmetricBy::Nvshmem if n_pes > 1 => {
            nvshmem::find_library()?;
        }
        SymmetricBy::Nvshmem => {}
        SymmetricBy::Nccl => {
            if pes_here != n_pes {
                return Err(symmetric::several_hosts(n_pes, pes_here));
            }
            let library = nccl::find_library()?;
            library.check_windows()?;
            // The launcher sets this variable if it is unset. Under another launcher, each PE reports an error if the variable is missing.
            let allowed = std::env::var(nccl::SHARED_DEVICES).unwrap_or_else(|_| "1".into());
            nccl::windows::check_sharing(library.version, pes_here.div_ceil(devices.len()), Some(&allowed))?;
            device::check_reach(driver, &devices[..pes_here.min(devices.len())])?;
        }
    }
    Ok(devices.len())
}

/// Returns the environment variables that a launcher must add to those already set when it starts the processes of `pes` PEs on this host.
///
/// # Errors
/// Returns the same errors as [`check_host`].
pub fn pe_environment(pes: usize, by: SymmetricBy) -> Result<Vec<(String, String)>, GpuError> {
    let devices = check_host(pes, pes, by)?;
    let shared = pes > devices;
    let mut environment = match by {
        SymmetricBy::Nvshmem if pes == 1 => return Ok(Vec::new()),
        SymmetricBy::Nvshmem => nvshmem::one_host_environment(),
        SymmetricBy::Nccl => {
            let may_share = shared && std::env::var_os(nccl::SHARED_DEVICES).is_none();
            let sharing = may_share.then(|| (nccl::SHARED_DEVICES.to_string(), "1".to_string()));
            nccl::one_host_environment().into_iter().chain(sharing).collect()
        }
    };
    if device::mps_is_on() && std::env::var_os(device::MPS_SHARE).is_none() && shared {
        // NVSHMEM requires that the shares of a device's PEs add up to at most 100 %.
        let share = 100 / pes.div_ceil(devices);
        environment.push((device::MPS_SHARE.to_string(), share.max(1).to_string()));
    }
    Ok(environment)
}

/// Checks that the `pes_here` PEs of this host run concurrently, because the times of PEs that take turns on a device mean nothing.
///
/// # Errors
/// Returns [`GpuError::Unavailable`], which names the largest number of PEs that run concurrently.
pub fn check_times(pes_here: usize) -> Result<(), GpuError> {
    let devices = visible_devices()?;
    if pes_here <= devices || device::mps_is_on() {
        return Ok(());
    }
    Err(GpuError::Unavailable(format!(
        "`pes` is {pes_here} with {devices} CUDA {} and no MPS: PEs that take turns on a device have no times, expected at most \
         {devices}, or MPS (nvidia-cuda-mps-control -d)",
        if devices == 1 { "device" } else { "devices" }
    )))
}

/// Returns the number of visible devices.
///
/// # Errors
/// Returns the driver's error.
pub fn visible_devices() -> Result<usize, GpuError> {
    Ok(device::devices(driver::driver()?)?.len())
}

/// Returns the limits of the visible devices before any PE uses them. PEs that share a device have lower limits.
///
/// # Errors
/// Returns the driver's error.
pub fn visible_limits() -> Result<Vec<DeviceLimits>, GpuError> {
    let limits = |info: DeviceInfo| DeviceLimits {
        capability: info.capability,
        multiprocessors: info.multiprocessors,
        shared_bytes_per_block: info.shared_bytes_per_block,
        memory_total: info.memory_total,
        memory_free: info.memory_total,
        symmetric_total: 0,
    };
    Ok(device::devices(driver::driver()?)?.into_iter().map(limits).collect())
}
