//! PEs that `mpirun` started: no supervisor, every process a PE.
//!
//! Every process makes the same request of the same command line, as `mpirun` gives all of them one, and they agree that they could
//! before they begin: to send the request from one of them would need MPI started before the first wrong flag is
//! refused, and would save nothing. What a supervisor does before and after (input, files, report), PE 0 does: the others send it what they
//! write and say by two-sided messages, so that only PE 0's host needs to see the files.
//!
//! # How a job ends
//! - All PEs did their part: PE 0 tells the others how it went, and all exit with that code.
//! - A PE could not begin: the first one that could not prints its line, and all exit with code 1.
//! - A PE fails later: it prints a line with its number and phase, and aborts the job (`MPI_Abort`, code 1). One that
//!   fails because another did not answer waits a moment first, since that one may have the cause to report.
//! - A PE dies: `mpirun` ends the others, and says which.

use std::cell::RefCell;
use std::fmt::Display;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use mpi::datatype::{Partition, PartitionMut};
use mpi::request::Request;
use mpi::traits::*;
use serde::de::DeserializeOwned;

use super::host::{AllToAll, Host, MemoryHost, PePart, TwoSided};
use super::launch::{LaunchError, MAX_PES, StatusPage, mpirun};
use super::messages::Messages;
use super::{JobError, PeFailure};
use crate::shmem::mpi::{MpiTransport, MpiWorld, Watchdog, library};
use crate::shmem::{ShmTransport, Shmem};
use crate::stdio::{one_line, say};

/// How long PEs may take, one after the other, to open the job's files.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a PE that did not hear from another waits before it ends the job, and how much longer the next PE waits.
const GRACE: Duration = Duration::from_millis(250);
const GRACE_STEP: Duration = Duration::from_millis(20);
/// The most bytes of a file in one message.
const PART_BYTES: usize = 4 << 20;

/// The PEs that `mpirun` started, of which this process is one.
pub struct MpiPes {
    world: MpiWorld,
    status: StatusPage,
    phase_names: Vec<&'static str>,
    show: fn(&str) -> String,
}

impl MpiPes {
    /// Joins the others, for a job with these phases; `None` where another process says that it cannot. `show` makes of an error's line
    /// what the user sees.
    ///
    /// # Errors
    /// MPI could not start, or `mpirun` is another MPI's.
    pub fn join(phase_names: &[&'static str], show: fn(&str) -> String) -> Result<Option<MpiPes>, JobError> {
        match Self::start(phase_names, show) {
            // The others found the same.
            Err(_) if mpirun::first_speaks() => Ok(None),
            joined => joined.map(Some),
        }
    }

    fn start(phase_names: &[&'static str], show: fn(&str) -> String) -> Result<MpiPes, JobError> {
        let world = MpiWorld::init()?;
        let n = world.n_pes();
        if let Some(started) = mpirun::size().filter(|&started| started != n) {
            return Err(JobError::Peers(format!(
                "mpirun started {started} processes, but {}, which this binary is built with, sees {n}: start it with that MPI's \
                 mpirun",
                library()
            )));
        }
        let setup = |source| LaunchError::Setup { what: "make a status page", source };
        let status = StatusPage::private().map_err(setup)?;
        Ok(MpiPes { world, status, phase_names: phase_names.to_vec(), show })
    }

    /// The PEs.
    pub fn world(&self) -> &MpiWorld {
        &self.world
    }

    /// Whether this PE reports the job.
    pub fn reports(&self) -> bool {
        self.world.my_pe() == 0
    }

    /// What every PE does alone before they work together; `None`, and the line of the first that could not, where one could not.
    /// They wait for each other as long as `limit`. Collective.
    pub fn agree<R, E: Display>(&self, mine: Result<R, E>, limit: Duration) -> Option<R> {
        let (me, nobody) = (self.world.my_pe() as u64, self.world.n_pes() as u64);
        let too_many = self.world.n_pes() > MAX_PES;
        let failed = if mine.is_ok() && !too_many { nobody } else { me };
        let first = self.world.min(failed, limit).unwrap_or_else(|error| self.fail(&JobError::from(error).into()));
        match mine {
            Err(error) if first == me && me == 0 => self.say(&error),
            Err(error) if first == me => self.say(&format_args!("PE {me}: {error:#}")),
            Ok(_) if first == me => self.say(&LaunchError::Pes { pes: self.world.n_pes() }),
            Ok(mine) if first == nobody => return Some(mine),
            _ => {}
        }
        None
    }

    /// Works over a window of `heap_bytes` a PE, in which a PE waits for `limit` for what it has put. Collective.
    ///
    /// # Errors
    /// MPI's, or the work's.
    pub fn over_window<R, E: From<JobError>>(
        &self,
        heap_bytes: usize,
        limit: Duration,
        work: impl FnOnce(&Shmem<MpiTransport<'_>>) -> Result<R, E>,
    ) -> Result<R, E> {
        let transport = MpiTransport::new(&self.world, heap_bytes).and_then(|window| window.with_flush_limit(limit));
        // The end of a window waits for all PEs, which after an error would be for ever.
        let shmem = ManuallyDrop::new(Shmem::new(transport.map_err(|error| E::from(error.into()))?));
        let result = work(&shmem)?;
        drop(ManuallyDrop::into_inner(shmem));
        Ok(result)
    }

    /// Runs this PE's part of a job that has files of these names, which PE 0 has open: `files`. PE 0 gets what all PEs sent, the
    /// others `None`. A PE waits for another no longer than `limit`.
    ///
    /// # Errors
    /// How this PE's part failed, for [`MpiPes::fail`] once what the job has made is taken back: nothing is dropped there.
    pub fn run<M: DeserializeOwned>(
        &self,
        file_names: &[&'static str],
        files: Vec<File>,
        limit: Duration,
        part: impl FnOnce(&mut MpiHost<'_>) -> Result<(), PeFailure>,
    ) -> Result<Option<Vec<(usize, M)>>, PeFailure> {
        let sent = RefCell::default();
        let mut host = MpiHost { pes: self, file_names, files, limit, sent };
        part(&mut host)?;
        let sent = host.sent.into_inner();
        if !self.reports() {
            return Ok(None);
        }
        let mut messages = Messages::new();
        sent.iter().for_each(|(pe, body)| messages.take(*pe, body));
        Ok(Some(messages.finish()?))
    }

    /// Ends the job: PE 0 tells the others whether all went well, which they return too.
    pub fn conclude(&self, report: Option<bool>, limit: Duration) -> bool {
        let Some(well) = report else {
            // PE 0 may take any time for its report.
            return match self.world.receive(None) {
                Ok(verdict) => verdict.is_some_and(|(_, well)| well == [1]),
                Err(error) => self.fail(&JobError::from(error).into()),
            };
        };
        for pe in 1..self.world.n_pes() {
            if let Err(error) = self.world.send(pe, vec![u8::from(well)], limit) {
                self.fail(&JobError::from(error).into());
            }
        }
        well
    }

    /// Prints the line of an error, before any PE's end: at the first exit code `mpirun` ends the others.
    pub fn say(&self, error: &dyn Display) {
        say(&format!("aristos: {}", one_line(&(self.show)(&format!("{error:#}")))));
    }

    /// Prints the line and ends the job.
    pub fn fail(&self, failure: &PeFailure) -> ! {
        let me = self.world.my_pe();
        if failure.awaited.is_some() {
            std::thread::sleep(GRACE + GRACE_STEP * me.min(50) as u32);
        }
        let phase = self.phase_names.get(self.status.phase()).copied().unwrap_or("(unnamed)");
        say(&format!("aristos: PE {me} failed in phase {phase}: {}", one_line(&(self.show)(&failure.line))));
        self.world.abort(1)
    }
}

/// PE 0 has the files and the messages; the others send it theirs.
///
/// What they send has its kind and, for a part of a file, the place in the file, u64 little endian each, then the bytes. Messages wait
/// until a PE's part is at its end: before that PE 0 has its own to do, and takes nothing.
pub struct MpiHost<'p> {
    pes: &'p MpiPes,
    file_names: &'p [&'static str],
    /// At PE 0.
    files: Vec<File>,
    /// How long a PE waits for another.
    limit: Duration,
    /// This PE's messages; at PE 0, in the end, all PEs'.
    sent: RefCell<Vec<(usize, Vec<u8>)>>,
}

/// The kinds of what is sent; above them the files, by their place among the names.
const KIND_END: u64 = 0;
const KIND_MESSAGE: u64 = 1;
const KIND_FILES: u64 = 2;

impl MpiHost<'_> {
    fn tell(&self, kind: u64, at: u64, bytes: &[u8]) -> Result<(), JobError> {
        let message = [&kind.to_le_bytes()[..], &at.to_le_bytes(), bytes].concat();
        Ok(self.pes.world.send(0, message, self.limit)?)
    }

    /// This PE's part is done: sends what it has to say or, at PE 0, takes what all others send.
    fn finish(&self) -> Result<(), JobError> {
        if !self.pes.reports() {
            for (_, body) in self.sent.take() {
                self.tell(KIND_MESSAGE, 0, &body)?;
            }
            return self.tell(KIND_END, 0, b"");
        }
        let mut missing: Vec<usize> = (1..self.n_pes()).collect();
        while let Some(&first) = missing.first() {
            let Some((from, message)) = self.pes.world.receive(Some(self.limit))? else {
                let seconds = self.limit.as_secs_f64();
                return Err(JobError::Peers(format!("waited {seconds} s for the results of PE {first}")));
            };
            let head = message.split_at_checked(16).map(|(head, bytes)| {
                let (kind, at) = head.split_at(8);
                let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte));
                (number(kind), number(at), bytes)
            });
            match head {
                Some((KIND_END, ..)) => missing.retain(|&pe| pe != from),
                Some((KIND_MESSAGE, _, body)) => self.sent.borrow_mut().push((from, body.to_vec())),
                Some((kind, at, bytes)) => {
                    self.write_here((kind - KIND_FILES) as usize, at, bytes, &format!("the results of PE {from}"))?;
                }
                None => return Err(JobError::Peers(format!("PE {from} sent an invalid message"))),
            }
        }
        Ok(())
    }

    /// At PE 0.
    fn write_here(&self, file: usize, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError> {
        let file = self.files.get(file).ok_or_else(|| JobError::NoFile { what: what.to_string() })?;
        file.write_all_at(bytes, at).map_err(|source| JobError::Write { what: what.to_string(), source })
    }
}

impl Host for MpiHost<'_> {
    fn my_pe(&self) -> usize {
        self.pes.world.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.pes.world.n_pes()
    }

    fn pes_on_host(&self) -> usize {
        self.pes.world.pes_on_host()
    }

    fn transport(&self) -> &'static str {
        "mpi"
    }

    fn status(&self) -> &StatusPage {
        &self.pes.status
    }

    fn has_file(&self, name: &str) -> bool {
        self.file_names.contains(&name)
    }

    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError> {
        let file = self.file_names.iter().position(|file| *file == name);
        let file = file.ok_or_else(|| JobError::NoFile { what: what.to_string() })?;
        if self.pes.reports() {
            return self.write_here(file, at, bytes, what);
        }
        for (part, bytes) in bytes.chunks(PART_BYTES).enumerate() {
            self.tell(file as u64 + KIND_FILES, at + (part * PART_BYTES) as u64, bytes)?;
        }
        Ok(())
    }

    fn send(&self, body: &[u8]) -> Result<(), JobError> {
        self.sent.borrow_mut().push((self.my_pe(), body.to_vec()));
        Ok(())
    }

    fn two_sided(&self) -> Option<&dyn TwoSided> {
        Some(self)
    }

    fn all_to_all(&self) -> Result<Option<Box<dyn AllToAll + '_>>, JobError> {
        let watchdog = Watchdog::start(self.my_pe(), self.limit, |_| "the other PEs (MPI_Alltoallv)".into());
        let setup = |source| LaunchError::Setup { what: "start the watchdog's thread", source };
        Ok(Some(Box::new(MpiAllToAll { world: &self.pes.world, watchdog: watchdog.map_err(setup)? })))
    }
}

impl MemoryHost for MpiHost<'_> {
    fn work<P: PePart>(&mut self, part: P) -> Result<(), P::Error> {
        let heap_bytes = part.heap_bytes::<MpiTransport<'_>>()?;
        let host: &MpiHost<'_> = self;
        host.pes.over_window(heap_bytes, host.limit, |shmem| {
            part.run(shmem, host)?;
            Ok(host.finish()?)
        })
    }

    fn shared_memory(&mut self, _: usize) -> Result<Shmem<ShmTransport>, JobError> {
        Err(JobError::Peers("PEs over MPI share no memory, which devices need".to_string()))
    }
}

/// Matched messages of MPI, the baseline of the one-sided operations.
impl TwoSided for MpiHost<'_> {
    fn send(&self, bytes: &[u8], pe: usize) -> Result<(), JobError> {
        let deadline = Instant::now() + self.limit;
        mpi::request::scope(|scope| {
            let request = self.pes.world.comm().process_at_rank(pe as i32).immediate_send(scope, bytes);
            self.complete(request, deadline, "send to", pe);
        });
        Ok(())
    }

    fn receive(&self, bytes: &mut [u8], pe: usize, deadline: Instant) -> Result<(), JobError> {
        mpi::request::scope(|scope| {
            let request = self.pes.world.comm().process_at_rank(pe as i32).immediate_receive_into(scope, bytes);
            self.complete(request, deadline, "receive from", pe);
        });
        Ok(())
    }
}

impl MpiHost<'_> {
    /// Waits for the request; past the deadline the job ends, as MPI's requests cannot be left.
    fn complete<'a, D: ?Sized, S: mpi::request::Scope<'a>>(
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
                    let line = format!("waited {} s to {what} PE {pe}", self.limit.as_secs_f64());
                    self.pes.fail(&PeFailure { line, awaited: Some(pe) });
                }
                std::thread::yield_now();
            }
        }
    }
}

/// `MPI_Alltoallv`, the baseline of all-to-all steps.
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
