//! Benchmarks on PEs that `mpirun` started: every process measures, PE 0 collects.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use mpi::datatype::{Partition, PartitionMut};
use mpi::request::Request;
use mpi::traits::*;

use super::BenchHost;
use super::p2p::host::TwoSided;
use super::straggler::pe::AllToAll;
use crate::launch::{StatusPage, mpirun, one_line};
use crate::shmem::Shmem;
use crate::shmem::mpi::Watchdog;
use crate::shmem::mpi::{MpiTransport, MpiWorld};

/// Runs `part` on this PE, over a window of `heap_bytes`; PE 0 gets all PEs' messages, in any order, the others `None`. Where a PE
/// fails, it says so and ends the job.
///
/// # Errors
/// One line: MPI could not start, or there are not `pes` PEs.
pub fn run(
    pes: usize,
    heap_bytes: impl FnOnce(usize) -> Result<usize>,
    limit: Duration,
    part: impl FnOnce(&Shmem<MpiTransport<'_>>, &MpiWorld, &BenchHost<'_>) -> Result<()>,
) -> Result<Option<Vec<String>>> {
    let world = MpiWorld::init()?;
    let n = world.n_pes();
    if n != pes {
        if mpirun::first_speaks() {
            return Ok(None);
        }
        bail!("--transport mpi with {n} PEs, expected {pes}: mpirun -n {pes}");
    }
    let status = StatusPage::private().context("cannot make a status page")?;
    let mine = RefCell::new(Vec::new());
    let send = |body: &[u8]| -> Result<()> {
        mine.borrow_mut().push(String::from_utf8(body.to_vec())?);
        Ok(())
    };
    let measure = || -> Result<()> {
        // The end of a window waits for all PEs, which after an error would be for ever.
        let transport = MpiTransport::new(&world, heap_bytes(n)?)?.with_flush_limit(limit)?;
        let shmem = ManuallyDrop::new(Shmem::new(transport));
        part(&shmem, &world, &BenchHost { status: &status, send: &send })?;
        drop(ManuallyDrop::into_inner(shmem));
        Ok(())
    };
    let gathered = measure().and_then(|()| gather(&world, mine.take(), limit));
    match gathered {
        Ok(messages) => Ok(messages),
        Err(error) => {
            eprintln!("aristos: PE {} failed: {}", world.my_pe(), one_line(&format!("{error:#}")));
            world.abort(1)
        }
    }
}

/// All PEs' messages at PE 0.
fn gather(world: &MpiWorld, mine: Vec<String>, limit: Duration) -> Result<Option<Vec<String>>> {
    if world.my_pe() > 0 {
        world.send(0, serde_json::to_vec(&mine)?, limit)?;
        return Ok(None);
    }
    let mut messages = mine;
    for _ in 1..world.n_pes() {
        let Some((pe, body)) = world.receive(Some(limit))? else {
            bail!("waited {} s for the measurements of another PE", limit.as_secs_f64());
        };
        let theirs: Vec<String> =
            serde_json::from_slice(&body).with_context(|| format!("PE {pe} sent what is no measurement"))?;
        messages.extend(theirs);
    }
    Ok(Some(messages))
}

/// Matched messages of MPI, the baseline of the one-sided operations.
pub struct MpiMessages<'w> {
    /// The PEs.
    pub world: &'w MpiWorld,
    /// How long a message may take.
    pub limit: Duration,
}

impl MpiMessages<'_> {
    /// Waits for the request; past the deadline the job ends, as MPI's requests cannot be left.
    fn finish<'a, D: ?Sized, S: mpi::request::Scope<'a>>(
        &self,
        mut request: Request<'a, D, S>,
        deadline: Instant,
        what: &str,
        pe: usize,
    ) {
        let mut looks = 0u32;
        loop {
            request = match request.test() {
                Ok(_) => return,
                Err(request) => request,
            };
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1024) {
                if Instant::now() > deadline {
                    let me = self.world.my_pe();
                    eprintln!("aristos: PE {me} failed: waited {} s to {what} PE {pe}", self.limit.as_secs_f64());
                    self.world.abort(1);
                }
                std::thread::yield_now();
            }
        }
    }
}

impl TwoSided for MpiMessages<'_> {
    fn send(&self, bytes: &[u8], pe: usize) -> Result<()> {
        let deadline = Instant::now() + self.limit;
        mpi::request::scope(|scope| {
            let request = self.world.comm().process_at_rank(pe as i32).immediate_send(scope, bytes);
            self.finish(request, deadline, "send to", pe);
        });
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8], pe: usize, deadline: Instant) -> Result<()> {
        mpi::request::scope(|scope| {
            let request = self.world.comm().process_at_rank(pe as i32).immediate_receive_into(scope, bytes);
            self.finish(request, deadline, "receive from", pe);
        });
        Ok(())
    }
}

/// `MPI_Alltoallv`, the baseline of all-to-all steps.
pub struct MpiAllToAll<'w> {
    world: &'w MpiWorld,
    watchdog: Watchdog,
}

impl<'w> MpiAllToAll<'w> {
    /// Over all PEs; a call that takes longer than `limit` ends the job, with a line that says so.
    ///
    /// # Errors
    /// When there can be no thread to watch.
    pub fn new(world: &'w MpiWorld, limit: Duration) -> Result<Self> {
        let watchdog = Watchdog::start(world.my_pe(), limit, |_| "the other PEs (MPI_Alltoallv)".into());
        Ok(MpiAllToAll { world, watchdog: watchdog.context("cannot start the watchdog's thread")? })
    }
}

impl AllToAll for MpiAllToAll<'_> {
    fn exchange(&self, out: &[u8], into: &mut [u8], bytes: usize) -> Result<()> {
        let n = self.world.n_pes();
        let fits = i32::try_from(n * bytes).is_ok();
        ensure!(fits, "--bytes is {bytes}, expected less than 2 GiB for all {n} PEs with --mode alltoallv");
        let counts = vec![bytes as i32; n];
        let starts: Vec<i32> = (0..n).map(|pe| (pe * bytes) as i32).collect();
        let out = Partition::new(out, &counts[..], &starts[..]);
        let mut into = PartitionMut::new(into, &counts[..], &starts[..]);
        self.watchdog.during(0, || self.world.comm().all_to_all_varcount_into(&out, &mut into));
        Ok(())
    }
}
