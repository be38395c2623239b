//! Cooperative kernels whose blocks come in clusters: how many run at the same time, and their launch.

use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::driver::sys::{
    CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig, CUstream,
};

use super::driver::{Driver, call};
use crate::gpu::Launch;

/// An attribute whose value `set` fills in.
fn attribute(id: CUlaunchAttributeID, set: impl FnOnce(&mut CUlaunchAttributeValue)) -> CUlaunchAttribute {
    let mut value = CUlaunchAttributeValue { pad: [0; 64] };
    set(&mut value);
    CUlaunchAttribute { id, pad: [0; 4], value }
}

/// The driver takes the size of a cluster, which the kernel has been compiled with, as an attribute, and cooperation as another.
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

/// `attributes` has to outlive what is returned.
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

/// How many clusters of such a launch, whose grid counts for nothing, run at the same time on the whole device.
///
/// # Errors
/// The driver's code.
///
/// # Safety
/// `function` is of a loaded module.
pub unsafe fn resident(driver: &Driver, function: CUfunction, launch: Launch, stream: CUstream) -> Result<u32, u32> {
    let mut attributes = attributes(launch.cluster);
    let config = config(Launch { grid: launch.cluster, ..launch }, stream, &mut attributes[..1]);
    let mut clusters: c_int = 0;
    // SAFETY: sets the number; reads the configuration and its attributes, which are here.
    let code = unsafe { call!(driver, cuOccupancyMaxActiveClusters(&raw mut clusters, function, &raw const config)) };
    if code == super::driver::SUCCESS { Ok(u32::try_from(clusters).unwrap_or(0)) } else { Err(code) }
}

/// Launches it cooperatively; the driver's code.
///
/// # Safety
/// As [`super::Gpu::launch`]; `function` is of a loaded module, and `parameters` are its parameters' addresses.
pub unsafe fn launch(
    driver: &Driver,
    function: CUfunction,
    launch: Launch,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> u32 {
    let mut attributes = attributes(launch.cluster);
    let config = config(launch, stream, &mut attributes);
    // SAFETY: the configuration and its attributes are here, and are read before this returns, as the parameters are.
    unsafe { call!(driver, cuLaunchKernelEx(&raw const config, function, parameters, ptr::null_mut())) }
}
