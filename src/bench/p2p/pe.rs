//! A PE's part: the measurement on the host or on the device.

use anyhow::Result;
#[cfg(not(feature = "cuda"))]
use anyhow::bail;

use super::P2pBench;
use super::host::OnHost;
use crate::job::host::SymmetricRuntime;

/// Measures, and sends a [`PeRows`](super::report::PeRows).
///
/// # Errors
/// A PE that does not answer in time, wrong bytes, a missing NVSHMEM, or an error of the host.
pub fn run(bench: &P2pBench, host: &mut impl SymmetricRuntime) -> Result<()> {
    if bench.on_device {
        #[cfg(feature = "cuda")]
        return crate::job::device::with_cuda(host, crate::gpu::SymmetricBy::Nvshmem, bench.wait_limit, |gpu, host| {
            super::device::run_pe(bench, gpu, host)
        });
        #[cfg(not(feature = "cuda"))]
        bail!("this build has no CUDA");
    }
    host.work(OnHost { bench })
}
