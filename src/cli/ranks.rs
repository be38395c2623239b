//! The rank of this process among those of its job, for `--transport tcp`, `hybrid` and `ofi`.

use anyhow::{Result, ensure};

use super::values::{NO_MPI, NO_OFI, TransportArg};
use crate::job::tcp::{Sockets, TcpPlace};

/// The rank of a process, and the rendezvous.
#[derive(clap::Args)]
#[command(next_help_heading = "With --transport tcp, hybrid or ofi")]
pub struct RanksArgs {
    /// Which PE this process is, from 0 [default: as srun, torchrun or mpirun says]
    #[arg(long, value_name = "R", requires = "ranks")]
    rank: Option<usize>,
    /// How many PEs there are
    #[arg(long, value_name = "N", requires = "rank")]
    ranks: Option<usize>,
    /// Where PE 0 listens for the others [default: as srun or torchrun says]
    #[arg(long, value_name = "HOST:PORT")]
    rendezvous: Option<String>,
}

/// The way in which a job's PEs start and connect.
pub enum Over {
    /// This process starts them, or a launcher has started it as one of several on this host.
    Processes,
    /// MPI.
    Mpi,
    /// TCP, alone or between hosts.
    Tcp(TcpPlace, Sockets),
    /// TCP, and libfabric for the layer's data.
    Ofi(
        #[cfg_attr(not(any(feature = "ofi", feature = "cuda")), expect(dead_code, reason = "refused before"))] TcpPlace,
    ),
}

impl RanksArgs {
    /// Whether a flag is given.
    pub fn given(&self) -> bool {
        self.rank.is_some() || self.rendezvous.is_some()
    }

    /// The way in which this transport connects PEs.
    ///
    /// # Errors
    /// This build lacks the transport, or the transport has no ranks.
    pub fn over(&self, transport: TransportArg) -> Result<Over> {
        let place = TcpPlace { rank: self.rank.zip(self.ranks), rendezvous: self.rendezvous.clone() };
        let given = [("rank", place.rank.is_some()), ("rendezvous", place.rendezvous.is_some())];
        for (flag, _) in given.into_iter().filter(|(_, given)| *given) {
            let name = transport.name();
            let has_places = matches!(transport, TransportArg::Tcp | TransportArg::Hybrid | TransportArg::Ofi);
            ensure!(has_places, "--{flag} with --transport {name}, expected --transport tcp, hybrid or ofi");
        }
        Ok(match transport {
            TransportArg::Shm => Over::Processes,
            TransportArg::Tcp => Over::Tcp(place, Sockets::Tcp),
            TransportArg::Hybrid => Over::Tcp(place, Sockets::Hybrid),
            TransportArg::Ofi => {
                ensure!(cfg!(feature = "ofi"), NO_OFI);
                Over::Ofi(place)
            }
            TransportArg::Mpi => {
                ensure!(cfg!(feature = "mpi"), NO_MPI);
                Over::Mpi
            }
        })
    }
}

impl Over {
    /// Before the PEs of another launcher connect: restarts this process if NVSHMEM's heap has a fixed size that is not set, with the size that
    /// `variable` returns for the number of PEs.
    ///
    /// # Errors
    /// When it cannot be started.
    #[cfg(feature = "cuda")]
    pub fn set_heap(&self, variable: impl FnOnce(usize) -> Result<Option<(String, String)>>) -> Result<()> {
        use crate::job::heap;
        let given = match self {
            Over::Processes => return Ok(()),
            Over::Tcp(place, _) | Over::Ofi(place) => place.rank,
            Over::Mpi => None,
        };
        if !heap::is_to_be_set() {
            return Ok(());
        }
        let launched = || crate::job::launch::launched_place().ok().flatten().map(|place| (place.rank, place.size));
        let Some((rank, size)) = given.or_else(launched) else { return Ok(()) };
        // One PE reports errors of the job, once all are connected.
        let Ok(Some(variable)) = variable(size) else { return Ok(()) };
        if rank == 0 {
            crate::stdio::say(&heap::words(&variable));
        }
        Err(heap::start_anew(&variable).into())
    }
}
