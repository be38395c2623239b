//! Layers over several hosts: their processes connect over TCP, and those of one host share memory.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use aristos::job::launch::job_token;
use aristos::shmem::Watch;
use aristos::shmem::tcp::{JoinLimits, Joining, TcpTransport, TcpWorld, listen_anywhere};
use pyo3::prelude::*;

use crate::spec::{AristosError, error};

/// Where the processes of a group connect: an address at which rank 0 listens as long as its `Rendezvous` exists.
#[pyclass(frozen, module = "aristos._aristos")]
#[derive(Clone)]
pub(crate) struct Rendezvous {
    /// HOST:PORT.
    #[pyo3(get)]
    address: String,
    listener: Option<Arc<TcpListener>>,
}

#[pymethods]
impl Rendezvous {
    /// The rendezvous at which rank 0 listens.
    #[new]
    fn new(address: String) -> Rendezvous {
        Rendezvous { address, listener: None }
    }

    /// Listens at a free port on all interfaces. `host` is the name or address at which other hosts reach this one.
    #[staticmethod]
    fn listen(host: &str) -> PyResult<Rendezvous> {
        let listening = listen_anywhere().and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
        let (port, listener) = listening
            .map_err(|why| AristosError::new_err(format!("cannot listen for the processes of other hosts: {why}")))?;
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        Ok(Rendezvous { address, listener: Some(Arc::new(listener)) })
    }
}

impl Rendezvous {
    /// Connects all processes that have `key`, and allocates their heaps (collective).
    pub(crate) fn join(
        &self,
        key: &str,
        (rank, size): (usize, usize),
        heap_bytes: usize,
        limit: Duration,
        watch: Arc<dyn Watch>,
    ) -> PyResult<(TcpWorld, TcpTransport)> {
        let program = format!("aristos {} for Python", env!("CARGO_PKG_VERSION"));
        let token = format!("{}\0{key}", job_token());
        // A host is not silent for long unnoticed, also if the wait limit is short.
        let limits = JoinLimits { join: limit, silence: JoinLimits::default().silence.min(limit) };
        let joining = Joining {
            pe: rank,
            n_pes: size,
            rendezvous: &self.address,
            program: &program,
            token: token.as_bytes(),
            limits,
        };
        let world = match &self.listener {
            Some(listener) => TcpWorld::join_at(&joining, listener.try_clone().map_err(error)?),
            None => TcpWorld::join(&joining),
        };
        let world = world.map_err(error)?;
        match TcpTransport::hybrid(&world, heap_bytes, limit) {
            Ok(transport) => Ok((world, transport.watched(watch))),
            Err(why) => {
                world.leave(Some(&why.to_string()));
                Err(error(why))
            }
        }
    }
}
