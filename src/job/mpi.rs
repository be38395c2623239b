//! PEs that `mpirun` started, as a [`World`].

use std::net::IpAddr;
use std::time::{Duration, Instant};

use mpi::datatype::{Partition, PartitionMut};
use mpi::request::Request;
use mpi::traits::*;
use serde::{Deserialize, Serialize};

use super::host::{AllToAll, DeviceMemory, TwoSided};
use super::launch::{LaunchError, mpirun};
use super::peers::{PeerHost, Peers, World};
use super::{JobError, PeFailure, addresses};
use crate::shmem::Shmem;
use crate::shmem::mpi::{MpiTransport, MpiWorld, Watchdog, library};
use crate::shmem::tcp::{JoinLimits, Joining, TcpTransport, TcpWorld};

/// Delay after which a PE whose wait timed out ends the job, so that the awaited PE can report the cause first. The delay of each next PE
/// is longer by `GRACE_STEP`.
const GRACE: Duration = Duration::from_millis(250);
const GRACE_STEP: Duration = Duration::from_millis(20);

/// Joins the other processes of `mpirun`, for a job with these phases. `None` if joining failed and another process reports that. `show`
/// converts the line of an error for the user.
///
/// # Errors
/// Returns an error if MPI could not be initialised, or if `mpirun` belongs to another MPI.
pub fn join(phase_names: &[&'static str], show: fn(&str) -> String) -> Result<Option<Peers<MpiWorld>>, JobError> {
    match start(phase_names, show) {
        // All processes have this error, and rank 0 prints it.
        Err(_) if mpirun::first_speaks() => Ok(None),
        joined => joined.map(Some),
    }
}

fn start(phase_names: &[&'static str], show: fn(&str) -> String) -> Result<Peers<MpiWorld>, JobError> {
    let world = MpiWorld::init()?;
    let n = world.n_pes();
    if let Some(started) = mpirun::size().filter(|&started| started != n) {
        return Err(JobError::Peers(format!(
            "mpirun started {started} processes, but {}, which this binary is built with, sees {n}: start it with that MPI's \
             mpirun",
            library()
        )));
    }
    Peers::new(world, phase_names, show)
}

impl World for MpiWorld {
    type Transport<'w> = MpiTransport<'w>;

    fn transport(&self) -> &'static str {
        "mpi"
    }

    fn my_pe(&self) -> usize {
        self.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.n_pes()
    }

    fn pes_on_host(&self) -> usize {
        self.pes_on_host()
    }

    fn min(&self, value: u64, limit: Duration) -> Result<u64, JobError> {
        Ok(self.min(value, limit)?)
    }

    fn send(&self, to: usize, message: Vec<u8>, limit: Duration) -> Result<(), JobError> {
        Ok(self.send(to, message, limit)?)
    }

    fn receive(&self, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, JobError> {
        Ok(self.receive(limit)?)
    }

    fn memory(&self, heap_bytes: usize, limit: Duration) -> Result<MpiTransport<'_>, JobError> {
        Ok(MpiTransport::new(self, heap_bytes)?.with_flush_limit(limit)?)
    }

    fn device_memory(&self, heap_bytes: usize, limit: Duration) -> Result<DeviceMemory, JobError> {
        let world = sockets(self, limit)?;
        Ok(DeviceMemory::Tcp(Shmem::new(TcpTransport::new(&world, heap_bytes, limit)?)))
    }

    fn end(&self, failure: &PeFailure, say: impl FnOnce()) -> ! {
        if failure.awaited.is_some() {
            std::thread::sleep(GRACE + GRACE_STEP * self.my_pe().min(50) as u32);
        }
        say();
        self.abort(1)
    }

    fn two_sided<'h>(host: &'h PeerHost<'_, Self>) -> Option<&'h dyn TwoSided> {
        Some(host)
    }

    fn all_to_all<'h>(host: &'h PeerHost<'_, Self>) -> Result<Option<Box<dyn AllToAll + 'h>>, JobError> {
        let world = host.pes().world();
        let watchdog = Watchdog::start(world.my_pe(), host.limit(), |_| "the other PEs (MPI_Alltoallv)".into());
        let setup = |source| LaunchError::Setup { what: "start the watchdog's thread", source };
        Ok(Some(Box::new(MpiAllToAll { world, watchdog: watchdog.map_err(setup)? })))
    }
}

/// Opens TCP connections between the same PEs, for data that is not sent over MPI. PE 0 sends the rendezvous address and the token over
/// MPI. Collective.
fn sockets(world: &MpiWorld, limit: Duration) -> Result<TcpWorld, JobError> {
    let (pe, n_pes) = (world.my_pe(), world.n_pes());
    let limits = JoinLimits { join: limit, ..JoinLimits::default() };
    let program = format!("aristos {}", env!("CARGO_PKG_VERSION"));
    if pe > 0 {
        let message = world.receive(Some(limit))?;
        let (_, message) = message.ok_or_else(|| {
            JobError::Peers(format!("waited {} s for PE 0 to say where the PEs meet", limit.as_secs_f64()))
        })?;
        let place: Meeting = serde_json::from_slice(&message).map_err(|source| JobError::Message { pe: 0, source })?;
        let rendezvous = addresses::reachable(&place.addresses, place.port)?;
        let (rendezvous, token) = (&*rendezvous, &place.token[..]);
        return Ok(TcpWorld::join(&Joining { pe, n_pes, rendezvous, program: &program, token, limits })?);
    }
    let listen = |error| JobError::Peers(format!("cannot listen for the other PEs: {error}"));
    let listener = addresses::listen(world.pes_on_host() == n_pes).map_err(listen)?;
    let port = listener.local_addr().map_err(listen)?.port();
    let place = Meeting { addresses: addresses::own().map_err(listen)?, port, token: rand::random() };
    let message = serde_json::to_vec(&place).map_err(|source| JobError::Message { pe: 0, source })?;
    (1..n_pes).try_for_each(|pe| world.send(pe, message.clone(), limit))?;
    let joining = Joining { pe, n_pes, rendezvous: "", program: &program, token: &place.token, limits };
    Ok(TcpWorld::join_at(&joining, listener)?)
}

/// The address and the token with which the PEs join over TCP.
#[derive(Serialize, Deserialize)]
struct Meeting {
    /// The addresses of PE 0's host.
    addresses: Vec<IpAddr>,
    port: u16,
    token: [u8; 32],
}

/// Two-sided messages of MPI, the baseline for the one-sided operations.
impl TwoSided for PeerHost<'_, MpiWorld> {
    fn send(&self, bytes: &[u8], pe: usize) -> Result<(), JobError> {
        let deadline = Instant::now() + self.limit();
        mpi::request::scope(|scope| {
            let request = self.pes().world().comm().process_at_rank(pe as i32).immediate_send(scope, bytes);
            complete(self, request, deadline, "send to", pe);
        });
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8], pe: usize, deadline: Instant) -> Result<(), JobError> {
        mpi::request::scope(|scope| {
            let request = self.pes().world().comm().process_at_rank(pe as i32).immediate_receive_into(scope, bytes);
            complete(self, request, deadline, "receive from", pe);
        });
        Ok(())
    }
}

/// Waits for the request. After the deadline ends the job, because a pending request of MPI cannot be abandoned.
fn complete<'a, D: ?Sized, S: mpi::request::Scope<'a>>(
    host: &PeerHost<'_, MpiWorld>,
    mut request: Request<'a, D, S>,
    deadline: Instant,
    what: &str,
    pe: usize,
) {
    let mut looks = 0u32;
    loop {
        let turn = host.pes().world().comm();
        request = match request.test() {
            Ok(_) => return,
            Err(request) => request,
        };
        drop(turn);
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(1024) {
            if Instant::now() > deadline {
                let line = format!("waited {} s to {what} PE {pe}", host.limit().as_secs_f64());
                host.pes().fail(&PeFailure { line, awaited: Some(pe) });
            }
            std::thread::yield_now();
        }
    }
}

/// `MPI_Alltoallv`, the baseline for all-to-all steps.
struct MpiAllToAll<'w> {
    world: &'w MpiWorld,
    watchdog: Watchdog,
}

impl AllToAll for MpiAllToAll<'_> {
    fn exchange(&self, out: &[u8], into: &mut [u8], bytes: usize) -> Result<(), JobError> {
        let n = self.world.n_pes();
        if i32::try_from(n * bytes).is_err() {
            let line = format!("`bytes` is {bytes}, expected less than 2 GiB for all {n} PEs with `mode` alltoallv");
            return Err(JobError::Peers(line));
        }
        let counts = vec![bytes as i32; n];
        let starts: Vec<i32> = (0..n).map(|pe| (pe * bytes) as i32).collect();
        let out = Partition::new(out, &counts[..], &starts[..]);
        let mut into = PartitionMut::new(into, &counts[..], &starts[..]);
        self.watchdog.during(0, || self.world.comm().all_to_all_varcount_into(&out, &mut into));
        Ok(())
    }
}
