//! Occupancy and launch of cooperative kernels with thread block clusters.

use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::driver::sys::{
    CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};

use super::driver::{Driver, call};
use crate::gpu::Launch;

fn attribute(id: CUlaunchAttributeID, set: impl FnOnce(&mut CUlaunchAttributeValue)) -> CUlaunchAttribute {
    let mut value = CUlaunchAttributeValue { pad: [0; 64] };
    set(&mut value);
    CUlaunchAttribute { id, pad: [0; 4], value }
}

/// The launch attributes. They set the cluster size that the kernel was compiled with, and request a cooperative launch.
fn attributes(cluster: u32) -> [CUlaunchAttribute; 2] {
    [
        attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, |value| {
            value.clusterDim.x = cluster;
            value.clusterDim.y = 1;
            value.clusterDim.z = 1;
        }),
        attribute(CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, |value| value.cooperative = 1),
    ]
}

/// Builds a launch configuration, which holds a pointer to `attributes`.
fn config(launch: Launch, stream: CUstream, attributes: &mut [CUlaunchAttribute]) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: launch.grid,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: launch.block,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.shared_bytes,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

/// Returns the maximum number of clusters that are co-resident on the whole device. The grid of `launch` is ignored.
///
/// # Errors
/// Returns the driver's code.
///
/// # Safety
/// `function` belongs to a loaded module.
pub unsafe fn resident(driver: &Driver, function: CUfunction, launch: Launch, stream: CUstream) -> Result<u32, u32> {
    let mut attributes = attributes(launch.cluster);
    let config = config(Launch { grid: launch.cluster, ..launch }, stream, &mut attributes[..1]);
    let mut clusters: c_int = 0;
    // SAFETY: the function only writes the number, and the configuration and the attributes live until it returns.
    let code = unsafe { call!(driver, cuOccupancyMaxActiveClusters(&raw mut clusters, function, &raw const config)) };
    if code == super::driver::SUCCESS { Ok(u32::try_from(clusters).unwrap_or(0)) } else { Err(code) }
}

/// Launches a kernel cooperatively and returns the driver's code.
///
/// # Safety
/// The conditions are those of [`super::Gpu::launch`]. `function` belongs to a loaded module, and `parameters` points to the addresses of
/// its parameters.
pub unsafe fn launch(
    driver: &Driver,
    function: CUfunction,
    launch: Launch,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> u32 {
    let mut attributes = attributes(launch.cluster);
    let config = config(launch, stream, &mut attributes);
    // SAFETY: the driver reads the configuration, the attributes and the parameters before it returns. The first two live until then, and
    // the caller guarantees the parameters.
    unsafe { call!(driver, cuLaunchKernelEx(&raw const config, function, parameters, ptr::null_mut())) }
}
