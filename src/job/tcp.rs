//! PEs on any number of hosts that meet over TCP, as a [`World`]; those of one host may share memory.

use std::time::Duration;

use super::host::DeviceMemory;
use super::launch::{LaunchedPlace, MAX_PES, VERSION, job_token, join_limit, launched_place};
use super::peers::{Peers, World};
use super::{JobError, PeFailure};
use crate::shmem::Shmem;
use crate::shmem::tcp::{JoinLimits, Joining, TcpTransport, TcpWorld};
use crate::stdio::{one_line, say};

/// Which PE this process is, and where they meet, as far as the command line says; the rest is the launcher's to say.
#[derive(Clone, Debug, Default)]
pub struct TcpPlace {
    /// This PE, and the number of PEs.
    pub rank: Option<(usize, usize)>,
    /// Where PE 0 listens, as HOST:PORT.
    pub rendezvous: Option<String>,
    /// Whether PEs of one host talk through shared memory.
    pub is_hybrid: bool,
}

/// The processes of a job that have met.
#[derive(Debug)]
pub struct TcpPes {
    world: TcpWorld,
    is_hybrid: bool,
}

/// Joins the others, for a job with these phases. `show` makes of an error's line what the user sees.
///
/// # Errors
/// One line: a place that is not known, or makes no sense; who does not come.
pub fn join(
    place: &TcpPlace,
    phase_names: &[&'static str],
    show: fn(&str) -> String,
) -> Result<Peers<TcpPes>, JobError> {
    let launched = match place.rank {
        // By hand, whatever has started the shell.
        Some((rank, size)) => Some(LaunchedPlace { rank, size, address: None, job: String::new() }),
        None => launched_place()?,
    };
    let wrong = |line: String| Err(JobError::Peers(line));
    let Some(LaunchedPlace { rank, size, address, job }) = launched else {
        return wrong(
            "`transport` tcp: it is not known which PE this is, and where the others are: give `rank`, `ranks` and \
             `rendezvous`, or start with srun, torchrun or mpirun"
                .to_string(),
        );
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
                "`transport` tcp: nothing says where the {size} PEs meet: give `rendezvous` HOST:PORT, a host that PE 0 runs on"
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
    Peers::new(TcpPes { world, is_hybrid: place.is_hybrid }, phase_names, show)
}

impl World for TcpPes {
    type Transport<'w> = TcpTransport;

    fn transport(&self) -> &'static str {
        if self.is_hybrid { "hybrid" } else { "tcp" }
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

    fn min(&self, value: u64, limit: Duration) -> Result<u64, JobError> {
        Ok(self.world.min(value, limit)?)
    }

    fn send(&self, to: usize, message: Vec<u8>, limit: Duration) -> Result<(), JobError> {
        Ok(self.world.send(to, &message, limit)?)
    }

    fn receive(&self, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, JobError> {
        Ok(self.world.receive(None, limit)?)
    }

    fn memory(&self, heap_bytes: usize, limit: Duration) -> Result<TcpTransport, JobError> {
        if !self.is_hybrid {
            return Ok(TcpTransport::new(&self.world, heap_bytes, limit)?);
        }
        let transport = TcpTransport::hybrid(&self.world, heap_bytes, limit)?;
        if let Some(why) = transport.not_near() {
            let line = format!("PE {} cannot map {why}; TCP carries all, within hosts too", self.world.my_pe());
            say(&format!("aristos: {}", one_line(&line)));
        }
        Ok(transport)
    }

    fn device_memory(&self, heap_bytes: usize, limit: Duration) -> Result<DeviceMemory, JobError> {
        Ok(DeviceMemory::Tcp(Shmem::new(TcpTransport::new(&self.world, heap_bytes, limit)?)))
    }

    fn end(&self, failure: &PeFailure, say: impl FnOnce()) -> ! {
        // Where several see a loss, all name the one that was lost first, not one that ended for it.
        match self.world.lost() {
            Some(lost) => self.world.farewell(lost.pe, &lost.why),
            None => self.world.farewell(self.world.my_pe(), &format!("it failed: {}", failure.line)),
        }
        say();
        std::process::exit(1)
    }
}
