//! Symmetric memory of the PEs' devices, whoever gives it: NVSHMEM or NCCL.

use super::meeting::Agreed;
use super::nccl::windows::{Meeting, Windows};
use crate::gpu::GpuError;
use crate::gpu::nvshmem::{self, Nvshmem};

/// How a PE comes to it.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// By NVSHMEM where there are several PEs.
    Nvshmem,
    /// By a communicator of NCCL's that is started for it.
    Nccl,
    /// By the caller's, which `CudaGpu::attach_communicator` has promised to be one.
    Communicator(usize),
}

/// What gives it.
pub(super) enum Symmetric {
    /// Nothing: one PE's is memory of its device.
    Alone,
    Nvshmem(Nvshmem),
    Nccl(Windows),
}

impl Symmetric {
    /// Starts it (collective).
    pub(super) fn start(way: Way, agreed: &Agreed, pes: Meeting<'_>) -> Result<Symmetric, GpuError> {
        let (me, n) = (pes.bootstrap.my_pe(), pes.bootstrap.n_pes());
        if !matches!(way, Way::Nvshmem) && agreed.pes_here != n {
            return Err(several_hosts(n, agreed.pes_here));
        }
        match way {
            Way::Nvshmem if n == 1 => Ok(Symmetric::Alone),
            Way::Nvshmem => {
                let (place, library) = nvshmem::find_library()?;
                tracing::debug!(pe = me, library = %place.display(), version = ?library.version, "NVSHMEM");
                // SAFETY: the context is current in this thread, and is retained for as long as the device of which this is a part.
                let nvshmem = unsafe { Nvshmem::init(library, pes.bootstrap, pes.limit) };
                let nvshmem = nvshmem.map_err(|error| between(pes.bootstrap.over_network(), error))?;
                if nvshmem.limited() && me == 0 {
                    let sharing = agreed.sharing;
                    tracing::warn!(
                        "{sharing} PEs take turns on one GPU without MPS: results are right, times mean nothing"
                    );
                }
                Ok(Symmetric::Nvshmem(nvshmem))
            }
            Way::Nccl => Windows::start(pes, agreed.sharing).map(Symmetric::Nccl),
            // SAFETY: by the contract of `CudaGpu::attach_communicator`; the context is that of the communicator's device.
            Way::Communicator(communicator) => unsafe { Windows::share(communicator, pes) }.map(Symmetric::Nccl),
        }
    }
}

/// The refusal of PEs on several hosts.
pub(super) fn several_hosts(n_pes: usize, here: usize) -> GpuError {
    GpuError::Unavailable(format!(
        "`symmetric` nccl joins the GPUs of one host, and {here} of the {n_pes} PEs are on this one: use `symmetric` nvshmem"
    ))
}

/// The error of what goes between devices, with what it depends on where a network joins the PEs.
pub(super) fn between(over_network: bool, error: GpuError) -> GpuError {
    let (GpuError::Unavailable(_) | GpuError::Failed { .. }, true) = (&error, over_network) else { return error };
    let network = match std::env::var("NVSHMEM_REMOTE_TRANSPORT") {
        Ok(name) => format!("is {name}"),
        Err(_) => "is not set, so it looks for InfiniBand".to_string(),
    };
    GpuError::Unavailable(format!(
        "{error}. The PEs were started as on several hosts, and NVSHMEM_REMOTE_TRANSPORT {network}; on Slingshot: libfabric, with \
         NVSHMEM_LIBFABRIC_PROVIDER=cxi (aristos doctor says what is missing on a host)"
    ))
}
