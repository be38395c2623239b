//! Information that the PEs exchange before they open their devices.

use std::time::Duration;

use super::device::{self, DeviceInfo};
use crate::gpu::GpuError;
use crate::gpu::nvshmem::Bootstrap;

/// Number of bytes that a host id takes in an exchange.
const HOST_BYTES: usize = 36;

/// Returns this PE's rank on its host (collective).
pub(super) fn rank_on_host(bootstrap: &dyn Bootstrap, limit: Duration) -> Result<usize, GpuError> {
    let mut mine = [0; HOST_BYTES];
    mine.iter_mut().zip(crate::shmem::host_id().bytes()).for_each(|(to, from)| *to = from);
    let all = bootstrap.all_gather(&mine, limit)?;
    Ok(device::rank_on_host(&all.chunks(mine.len()).collect::<Vec<_>>(), bootstrap.my_pe()))
}

/// What a PE learns about the devices of all PEs.
pub(super) struct Agreed {
    /// Number of PEs that share this PE's device.
    pub sharing: usize,
    /// Number of PEs on this PE's host.
    pub pes_here: usize,
    pub fewest_multiprocessors: u32,
}

/// Exchanges the properties of the devices and checks that all devices run the same kernels, because the PEs of a layer must (collective).
/// `multiprocessors` is this PE's share of its device.
pub(super) fn agree(
    bootstrap: &dyn Bootstrap,
    info: &DeviceInfo,
    multiprocessors: u32,
    limit: Duration,
) -> Result<Agreed, GpuError> {
    const PLACE: std::ops::Range<usize> = 1..33 + HOST_BYTES;
    const HOST: std::ops::Range<usize> = 33..33 + HOST_BYTES;
    const BYTES: usize = PLACE.end + 4;
    let mut mine = [0; BYTES];
    mine[0] = info.hopper().into();
    mine[1..33].iter_mut().zip(info.pci.bytes()).for_each(|(to, from)| *to = from);
    // The host id is sent too, because a PCI address is unique only within its host.
    mine[HOST].iter_mut().zip(crate::shmem::host_id().bytes()).for_each(|(to, from)| *to = from);
    mine[PLACE.end..].copy_from_slice(&multiprocessors.to_le_bytes());
    let all = bootstrap.all_gather(&mine, limit)?;
    let kind = |of_pe: &[u8]| if of_pe[0] == 1 { "a Hopper" } else { "none" };
    let first = &all[..BYTES];
    if let Some((pe, other)) = all.chunks(BYTES).enumerate().find(|(_, of_pe)| of_pe[0] != first[0]) {
        return Err(GpuError::Unavailable(format!(
            "the PEs' GPUs must all be Hoppers or none, and PE 0's is {}, PE {pe}'s {}: choose with CUDA_VISIBLE_DEVICES",
            kind(first),
            kind(other)
        )));
    }
    let shares = all.chunks(BYTES).map(|of_pe| u32::from_le_bytes(std::array::from_fn(|i| of_pe[PLACE.end + i])));
    Ok(Agreed {
        sharing: all.chunks(BYTES).filter(|of_pe| of_pe[PLACE] == mine[PLACE]).count(),
        pes_here: all.chunks(BYTES).filter(|of_pe| of_pe[HOST] == mine[HOST]).count(),
        fewest_multiprocessors: shares.min().unwrap_or(multiprocessors),
    })
}
