//! PEs on any number of hosts, connected over TCP, as a [`World`]. Rows and signals use these connections, shared memory within a host, or
//! libfabric: see [`Carrier`].

use std::time::Duration;

use super::host::DeviceMemory;
#[cfg(feature = "ofi")]
use super::launch::ofi_provider;
use super::launch::{LaunchedPlace, MAX_PES, VERSION, job_token, join_limit, launched_place};
use super::peers::{Peers, World};
use super::{JobError, PeFailure};
#[cfg(feature = "ofi")]
use crate::shmem::ofi::OfiTransport;
use crate::shmem::tcp::{JoinLimits, Joining, TcpTransport, TcpWorld};
use crate::shmem::{Shmem, Transport};
use crate::stdio::{one_line, say};

/// This process's rank and the rendezvous, as given on the command line. The launcher provides missing values.
#[derive(Clone, Debug, Default)]
pub struct TcpPlace {
    /// This PE's number, and the number of PEs.
    pub rank: Option<(usize, usize)>,
    /// The address at which PE 0 listens, as HOST:PORT.
    pub rendezvous: Option<String>,
}

/// Creates the transport of rows and signals between PEs that are connected over TCP.
pub trait Carrier: 'static {
    /// The type of the transport.
    type Transport: Transport;

    /// The name of the transport.
    fn name(&self) -> &'static str;

    /// See [`World::memory`].
    ///
    /// # Errors
    /// As [`World::memory`].
    fn memory(&self, world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<Self::Transport, JobError>;

    /// See [`World::device_memory`]. Devices use their own network, independent of the transport of layers on CPUs.
    ///
    /// # Errors
    /// As [`World::device_memory`].
    fn device_memory(&self, world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<TcpTransport, JobError> {
        Ok(TcpTransport::new(world, heap_bytes, limit)?)
    }
}

/// Transports that use the TCP connections themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sockets {
    /// TCP carries all data.
    Tcp,
    /// TCP carries data between hosts. Within a host, shared memory is used.
    Hybrid,
}

impl Carrier for Sockets {
    type Transport = TcpTransport;

    fn name(&self) -> &'static str {
        match self {
            Sockets::Tcp => "tcp",
            Sockets::Hybrid => "hybrid",
        }
    }

    fn memory(&self, world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<TcpTransport, JobError> {
        if *self == Sockets::Tcp {
            return Ok(TcpTransport::new(world, heap_bytes, limit)?);
        }
        let transport = TcpTransport::hybrid(world, heap_bytes, limit)?;
        if let Some(why) = transport.unmapped() {
            let line = format!("PE {} cannot map {why}; TCP carries all, within hosts too", world.my_pe());
            say(&format!("aristos: {}", one_line(&line)));
        }
        Ok(transport)
    }

    /// If the PEs of a host map each other's memory, their emulated devices use loads and stores, as GPUs do.
    fn device_memory(&self, world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<TcpTransport, JobError> {
        self.memory(world, heap_bytes, limit)
    }
}

/// The transport over libfabric.
#[cfg(feature = "ofi")]
#[derive(Clone, Copy, Debug)]
pub struct Ofi;

#[cfg(feature = "ofi")]
impl Carrier for Ofi {
    type Transport = OfiTransport;

    fn name(&self) -> &'static str {
        "ofi"
    }

    fn memory(&self, world: &TcpWorld, heap_bytes: usize, limit: Duration) -> Result<OfiTransport, JobError> {
        let provider = ofi_provider()?;
        Ok(OfiTransport::new(world, heap_bytes, provider.as_deref(), limit)?)
    }
}

/// The connected processes of a job, and the transport of their rows.
#[derive(Debug)]
pub struct TcpPes<C> {
    world: TcpWorld,
    carrier: C,
}

/// Joins the other PEs, for a job with these phases. `show` converts the line of an error for the user.
///
/// # Errors
/// Returns an error of one line if the rank or the rendezvous is missing or invalid, or if a PE has not joined.
pub fn join<C: Carrier>(
    place: &TcpPlace,
    carrier: C,
    phase_names: &[&'static str],
    show: fn(&str) -> String,
) -> Result<Peers<TcpPes<C>>, JobError> {
    let transport = carrier.name();
    let launched = match place.rank {
        // A rank given by the user overrides a launcher's variables.
        Some((rank, size)) => Some(LaunchedPlace { rank, size, address: None, job: String::new() }),
        None => launched_place()?,
    };
    let wrong = |line: String| Err(JobError::Peers(line));
    let Some(LaunchedPlace { rank, size, address, job }) = launched else {
        return wrong(format!(
            "`transport` {transport}: it is not known which PE this is, and where the others are: give `rank`, `ranks` and \
             `rendezvous`, or start with srun, torchrun or mpirun"
        ));
    };
    if !(1..=MAX_PES).contains(&size) {
        return wrong(format!("`ranks` is {size}, expected 1 to {MAX_PES}"));
    }
    if rank >= size {
        return wrong(format!("`rank` is {rank}, expected a number below `ranks`, which is {size}"));
    }
    let rendezvous = match place.rendezvous.clone().or(address) {
        Some(rendezvous) => rendezvous,
        None if size == 1 => String::new(),
        None => {
            return wrong(format!(
                "`transport` {transport}: nothing says where the {size} PEs meet: give `rendezvous` HOST:PORT, a host that PE 0 runs on"
            ));
        }
    };
    let port = rendezvous.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    if size > 1 && port.is_none_or(|(host, port)| host.is_empty() || port == 0) {
        return wrong(format!("`rendezvous` is {rendezvous}, expected HOST:PORT with a port of 1 to 65535"));
    }
    let program = format!("aristos {} (protocol {VERSION})", env!("CARGO_PKG_VERSION"));
    let token = format!("{}\0{job}", job_token());
    let limits = JoinLimits { join: join_limit()?, ..JoinLimits::default() };
    let joining =
        Joining { pe: rank, n_pes: size, rendezvous: &rendezvous, program: &program, token: token.as_bytes(), limits };
    let world = TcpWorld::join(&joining)?;
    for line in world.refusals() {
        say(&format!("aristos: {}", one_line(line)));
    }
    Peers::new(TcpPes { world, carrier }, phase_names, show)
}

impl<C: Carrier> World for TcpPes<C> {
    type Transport<'w> = C::Transport;

    fn transport(&self) -> &'static str {
        self.carrier.name()
    }

    fn my_pe(&self) -> usize {
        self.world.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.world.n_pes()
    }

    fn pes_on_host(&self) -> usize {
        self.world.pes_on_host()
    }

    fn hosts(&self) -> Option<Vec<usize>> {
        let names = self.world.hosts();
        Some(names.iter().map(|name| names.iter().position(|other| other == name).unwrap_or(0)).collect())
    }

    fn set_wait_limit(&self, limit: Duration) {
        self.world.set_wait_limit(limit);
    }

    fn min(&self, value: u64, limit: Duration) -> Result<u64, JobError> {
        Ok(self.world.min(value, limit)?)
    }

    fn send(&self, to: usize, message: Vec<u8>, limit: Duration) -> Result<(), JobError> {
        Ok(self.world.send(to, &message, limit)?)
    }

    fn receive(&self, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, JobError> {
        Ok(self.world.receive(None, limit)?)
    }

    fn memory(&self, heap_bytes: usize, limit: Duration) -> Result<C::Transport, JobError> {
        self.carrier.memory(&self.world, heap_bytes, limit)
    }

    fn device_memory(&self, heap_bytes: usize, limit: Duration) -> Result<DeviceMemory, JobError> {
        Ok(DeviceMemory::Tcp(Shmem::new(self.carrier.device_memory(&self.world, heap_bytes, limit)?)))
    }

    fn end(&self, failure: &PeFailure, say: impl FnOnce()) -> ! {
        // If several PEs detect losses, all report the PE that was lost first, rather than one that ended as a consequence.
        match self.world.lost() {
            Some(lost) => self.world.farewell(lost.pe, &lost.why),
            None => self.world.farewell(self.world.my_pe(), &format!("it failed: {}", failure.line)),
        }
        say();
        std::process::exit(1)
    }
}
