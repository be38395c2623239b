//! Symmetric memory of the devices, provided by NVSHMEM or NCCL.

use super::exchange::Agreed;
use super::nccl::windows::{CollectiveContext, Windows};
use crate::gpu::GpuError;
use crate::gpu::nvshmem::{self, Nvshmem};

/// The provider of symmetric memory that was requested.
#[derive(Clone, Copy)]
pub(super) enum SymmetricSource {
    /// NVSHMEM if there are several PEs, and otherwise none.
    Nvshmem,
    /// A new NCCL communicator.
    Nccl,
    /// The caller's NCCL communicator, valid by the contract of `CudaGpu::attach_communicator`.
    Communicator(usize),
}

/// The provider in use.
pub(super) enum Symmetric {
    /// No provider is needed, because there is a single PE. Its symmetric memory is device memory.
    Alone,
    Nvshmem(Nvshmem),
    Nccl(Windows),
}

impl Symmetric {
    /// Starts the provider (collective).
    pub(super) fn start(
        source: SymmetricSource,
        agreed: &Agreed,
        pes: CollectiveContext<'_>,
    ) -> Result<Symmetric, GpuError> {
        let (me, n) = (pes.bootstrap.my_pe(), pes.bootstrap.n_pes());
        if !matches!(source, SymmetricSource::Nvshmem) && agreed.pes_here != n {
            return Err(several_hosts(n, agreed.pes_here));
        }
        match source {
            SymmetricSource::Nvshmem if n == 1 => Ok(Symmetric::Alone),
            SymmetricSource::Nvshmem => {
                let (path, library) = nvshmem::find_library()?;
                tracing::debug!(pe = me, library = %path.display(), version = ?library.version, "NVSHMEM");
                // SAFETY: the context is current in this thread, and stays retained because `CudaGpu` owns it as well as NVSHMEM.
                let nvshmem = unsafe { Nvshmem::init(library, pes.bootstrap, pes.limit) };
                let nvshmem = nvshmem.map_err(|error| with_network_hint(pes.bootstrap.over_network(), error))?;
                if nvshmem.limited() && me == 0 {
                    let sharing = agreed.sharing;
                    tracing::warn!(
                        "{sharing} PEs take turns on one GPU without MPS: results are right, times mean nothing"
                    );
                }
                Ok(Symmetric::Nvshmem(nvshmem))
            }
            SymmetricSource::Nccl => Windows::start(pes, agreed.sharing).map(Symmetric::Nccl),
            SymmetricSource::Communicator(communicator) => {
                // SAFETY: the caller of `CudaGpu::attach_communicator` guarantees the communicator, and the context is that of the
                // communicator's device.
                unsafe { Windows::share(communicator, pes) }.map(Symmetric::Nccl)
            }
        }
    }
}

/// Returns the error that is reported if NCCL is requested and the PEs are on several hosts.
pub(super) fn several_hosts(n_pes: usize, here: usize) -> GpuError {
    GpuError::Unavailable(format!(
        "`symmetric` nccl joins the GPUs of one host, and {here} of the {n_pes} PEs are on this one: use `symmetric` nvshmem"
    ))
}

/// If a network connects the PEs, adds the settings of NVSHMEM's network to an error.
pub(super) fn with_network_hint(over_network: bool, error: GpuError) -> GpuError {
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
