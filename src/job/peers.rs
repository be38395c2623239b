//! PEs without a supervisor, on one host or many: every process is a PE.
//!
//! Every process makes the same request from the same command line. Before the PEs begin, they agree that all requests are valid and equal.
//! (If PE 0 sent the request instead, an invalid flag could be rejected only after the processes are connected.) PE 0 does the supervisor's
//! work before and after the PEs' parts (input, files, report). The other PEs send their output to PE 0 as messages, so that only PE 0's
//! host needs access to the files.
//!
//! A [`World`] connects the PEs and carries their rows, over MPI (`mpi.rs`) or over TCP (`tcp.rs`).
//!
//! # How a job ends
//!
//! - All PEs did their part: PE 0 sends the outcome to the others, and all exit with the same code.
//! - A PE could not begin: the first such PE prints its error, and all exit with code 1.
//! - A PE fails later: it prints its error with its number and phase, and ends the others ([`World::end`]).
//! - A PE dies: `mpirun` ends the others, and reports the PE. Over TCP each of the others detects the loss, and reports the PE.

use std::cell::RefCell;
use std::error::Error;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem::ManuallyDrop;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::host::{AllToAll, DeviceMemory, Host, PeTask, SymmetricRuntime, TwoSided};
use super::launch::{LaunchError, MAX_PES, StatusPage};
use super::messages::Messages;
use super::request::Request;
use super::{JobError, PeFailure};
use crate::shmem::{Shmem, Transport};
use crate::stdio::{OutputError, one_line, say, with_causes};

/// Any error, with its causes.
type AnyError = Box<dyn Error + Send + Sync>;

/// Maximum time for the PEs to open the job's files.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// Maximum bytes of a file in one message.
const PART_BYTES: usize = 4 << 20;

/// The connected processes of a job.
pub trait World: Sized {
    /// The transport that carries rows and signals.
    type Transport<'w>: Transport
    where
        Self: 'w;

    /// The name of the transport.
    fn transport(&self) -> &'static str;

    /// This PE's number.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Number of PEs on this host.
    fn pes_on_host(&self) -> usize;

    /// The host of each PE, as a number that PEs of one host share; `None` if the hosts of other PEs are unknown.
    fn hosts(&self) -> Option<Vec<usize>> {
        None
    }

    /// Sets the time for which a PE waits for another before it checks that the other PE's process responds. This time is independent of
    /// the wait's own limit. No effect in a world without such a check.
    fn set_wait_limit(&self, limit: Duration) {
        let _ = limit;
    }

    /// The minimum of all PEs' values, which must be below 2^63. Collective.
    ///
    /// # Errors
    /// Returns an error if a PE is lost, or has not taken part within `limit`.
    fn min(&self, value: u64, limit: Duration) -> Result<u64, JobError>;

    /// Sends a message. Messages to one PE arrive in order.
    ///
    /// # Errors
    /// Returns an error if a PE is lost, or has not received the message within `limit`.
    fn send(&self, to: usize, message: Vec<u8>, limit: Duration) -> Result<(), JobError>;

    /// Receives the next message of any PE. `None` if no message arrives within `limit`. Without a limit it waits until a message arrives
    /// or a PE is lost.
    ///
    /// # Errors
    /// Returns an error if a PE is lost.
    fn receive(&self, limit: Option<Duration>) -> Result<Option<(usize, Vec<u8>)>, JobError>;

    /// Allocates a symmetric heap of `heap_bytes` per PE. Operations without a deadline wait at most for `limit`. Collective.
    ///
    /// # Errors
    /// Returns an error if memory runs out, or if a PE is lost.
    fn memory(&self, heap_bytes: usize, limit: Duration) -> Result<Self::Transport<'_>, JobError>;

    /// Allocates a symmetric heap that devices use to exchange addresses, and emulated devices also for their data. Collective.
    ///
    /// # Errors
    /// Returns the errors of [`World::memory`].
    fn device_memory(&self, heap_bytes: usize, limit: Duration) -> Result<DeviceMemory, JobError>;

    /// Ends this process and all others after a failure. `say` prints the error; it is called when the other PEs have been notified, or
    /// have had time to report the cause.
    fn end(&self, failure: &PeFailure, say: impl FnOnce()) -> !;

    /// See [`Host::two_sided`].
    fn two_sided<'h>(_: &'h PeerHost<'_, Self>) -> Option<&'h dyn TwoSided> {
        None
    }

    /// See [`Host::all_to_all`].
    ///
    /// # Errors
    /// Its setup failed.
    fn all_to_all<'h>(_: &'h PeerHost<'_, Self>) -> Result<Option<Box<dyn AllToAll + 'h>>, JobError> {
        Ok(None)
    }
}

/// This process as a PE of a world.
pub struct Peers<W> {
    world: W,
    status: StatusPage,
    phase_names: Vec<&'static str>,
    show: fn(&str) -> String,
}

impl<W: World> Peers<W> {
    /// Creates the PEs of a job with these phases. `show` converts the line of an error for the user.
    ///
    /// # Errors
    /// Returns an error if the status page cannot be allocated.
    pub fn new(world: W, phase_names: &[&'static str], show: fn(&str) -> String) -> Result<Self, JobError> {
        let setup = |source| LaunchError::Setup { what: "make a status page", source };
        let status = StatusPage::private().map_err(setup)?;
        Ok(Peers { world, status, phase_names: phase_names.to_vec(), show })
    }

    /// The PEs.
    pub fn world(&self) -> &W {
        &self.world
    }

    /// Whether this PE reports the job.
    pub fn reports(&self) -> bool {
        self.world.my_pe() == 0
    }

    /// Agrees on whether a step that every PE does alone has succeeded. Returns this PE's result, or `None` if the step failed on a PE. The
    /// PE with the lowest number that failed prints its error. PEs wait for each other at most for `limit`. Collective.
    pub fn agree<R, E: Into<AnyError>>(&self, mine: Result<R, E>, limit: Duration) -> Option<R> {
        let (me, nobody) = (self.world.my_pe() as u64, self.world.n_pes() as u64);
        let too_many = self.world.n_pes() > MAX_PES;
        let failed = if mine.is_ok() && !too_many { nobody } else { me };
        let first = self.world.min(failed, limit).unwrap_or_else(|error| self.fail(&error.into()));
        match mine {
            Err(error) if first == me && me == 0 => self.say(error),
            Err(error) if first == me => self.say(format!("PE {me}: {}", with_causes(&*error.into()))),
            Ok(_) if first == me => self.say(LaunchError::Pes { pes: self.world.n_pes() }),
            Ok(mine) if first == nobody => return Some(mine),
            _ => {}
        }
        None
    }

    /// Checks that all PEs make the same request, because users may start PEs by hand. Collective.
    ///
    /// # Errors
    /// Returns an error if this PE's request differs from that of PE 0.
    pub fn check_same(&self, request: &Request, limit: Duration) -> Result<(), JobError> {
        let mut hasher = DefaultHasher::new();
        request.to_bytes()?.hash(&mut hasher);
        let mine = hasher.finish() >> 2;
        let of_zero = if self.reports() { mine } else { u64::MAX >> 1 };
        if self.world.min(of_zero, limit)? == mine {
            return Ok(());
        }
        Err(JobError::Peers("its arguments are not those of PE 0, expected the same on all".to_string()))
    }

    /// Runs `work` over a symmetric heap of `heap_bytes` per PE. Operations without a deadline wait at most for `limit`. Collective.
    ///
    /// # Errors
    /// Returns an error of the memory or of `work`.
    pub fn over_memory<R, E: From<JobError>>(
        &self,
        heap_bytes: usize,
        limit: Duration,
        work: impl FnOnce(&Shmem<W::Transport<'_>>) -> Result<R, E>,
    ) -> Result<R, E> {
        let transport = self.world.memory(heap_bytes, limit).map_err(E::from)?;
        // Dropping the memory waits for all PEs, so it is not dropped after an error, when other PEs may not drop theirs.
        let shmem = ManuallyDrop::new(Shmem::new(transport));
        let result = work(&shmem)?;
        drop(ManuallyDrop::into_inner(shmem));
        Ok(result)
    }

    /// This PE's environment for work before a part of the job. Its messages are discarded. A PE waits for another at most for `limit`.
    pub fn before_part(&self, limit: Duration) -> PeerHost<'_, W> {
        PeerHost { pes: self, file_names: &[], files: Vec::new(), limit, sent: RefCell::default() }
    }

    /// Runs this PE's part of a job. `file_names` are the job's files. Only PE 0 has opened them, and passes them as `files`. Returns all
    /// PEs' messages at PE 0, and `None` at the others. A PE waits for another at most for `limit`.
    ///
    /// # Errors
    /// Returns the failure of this PE's part. Pass it to [`Peers::fail`] after dropping the job's outputs, because that function exits
    /// without dropping values.
    pub fn run<M: DeserializeOwned>(
        &self,
        file_names: &[&'static str],
        files: Vec<File>,
        limit: Duration,
        part: impl FnOnce(&mut PeerHost<'_, W>) -> Result<(), PeFailure>,
    ) -> Result<Option<Vec<(usize, M)>>, PeFailure> {
        let sent = RefCell::default();
        let mut host = PeerHost { pes: self, file_names, files, limit, sent };
        part(&mut host)?;
        let sent = host.sent.into_inner();
        if !self.reports() {
            return Ok(None);
        }
        let mut messages = Messages::new();
        sent.iter().for_each(|(pe, body)| messages.take(*pe, body));
        Ok(Some(messages.finish()?))
    }

    /// Ends the job: PE 0 sends the others whether the job succeeded, and every PE returns that.
    pub fn conclude(&self, report: Option<bool>, limit: Duration) -> bool {
        let Some(well) = report else {
            // Waits without a limit, because PE 0 may take any time to make its report.
            return match self.world.receive(None) {
                Ok(verdict) => verdict.is_some_and(|(_, well)| well == [1]),
                Err(error) => self.fail(&error.into()),
            };
        };
        for pe in 1..self.world.n_pes() {
            if let Err(error) = self.world.send(pe, vec![u8::from(well)], limit) {
                self.fail(&error.into());
            }
        }
        well
    }

    /// Prints an error. Call it before any PE exits, because a launcher may kill the other processes when one exits.
    pub fn say(&self, error: impl Into<AnyError>) {
        let error = error.into();
        if !matches!(error.downcast_ref(), Some(OutputError::ReaderGone)) {
            say(&format!("aristos: {}", one_line(&(self.show)(&with_causes(&*error)))));
        }
    }

    /// Prints the failure, and ends the job.
    pub fn fail(&self, failure: &PeFailure) -> ! {
        let me = self.world.my_pe();
        let phase = self.phase_names.get(self.status.phase()).copied().unwrap_or("(unnamed)");
        let line = one_line(&(self.show)(&failure.line));
        self.world.end(failure, || say(&format!("aristos: PE {me} failed in phase {phase}: {line}")))
    }
}

/// A PE's environment. PE 0 has the files, and collects the messages of all PEs.
///
/// Each message is its kind and an offset, both u64 little-endian, and then the bytes. The offset is that in a file, or 0. PE 0 receives
/// messages only when its own part ends, so PEs send their messages when their parts end.
pub struct PeerHost<'p, W> {
    pes: &'p Peers<W>,
    file_names: &'p [&'static str],
    /// The job's files, at PE 0.
    files: Vec<File>,
    /// Maximum time for which a PE waits for another.
    limit: Duration,
    /// This PE's messages. At PE 0, after its part has ended, those of all PEs.
    sent: RefCell<Vec<(usize, Vec<u8>)>>,
}

/// The kinds of messages. `KIND_FILES + i` is a part of the file with index i in the names.
const KIND_END: u64 = 0;
const KIND_MESSAGE: u64 = 1;
const KIND_FILES: u64 = 2;

impl<W: World> PeerHost<'_, W> {
    /// The PEs.
    pub fn pes(&self) -> &Peers<W> {
        self.pes
    }

    /// Maximum time for which a PE waits for another.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    fn tell(&self, kind: u64, at: u64, bytes: &[u8]) -> Result<(), JobError> {
        let message = [&kind.to_le_bytes()[..], &at.to_le_bytes(), bytes].concat();
        self.pes.world.send(0, message, self.limit)
    }

    /// Ends this PE's part: sends its messages, or at PE 0 receives those of all others.
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

    /// Writes to a file of the job, at PE 0.
    fn write_here(&self, file: usize, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError> {
        let file = self.files.get(file).ok_or_else(|| JobError::NoFile { what: what.to_string() })?;
        file.write_all_at(bytes, at).map_err(|source| JobError::Write { what: what.to_string(), source })
    }
}

impl<W: World> Host for PeerHost<'_, W> {
    fn my_pe(&self) -> usize {
        self.pes.world.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.pes.world.n_pes()
    }

    fn pes_on_host(&self) -> usize {
        self.pes.world.pes_on_host()
    }

    fn hosts(&self) -> Vec<usize> {
        let apart = || (0..self.n_pes()).collect();
        self.pes.world.hosts().unwrap_or_else(apart)
    }

    fn transport(&self) -> &'static str {
        self.pes.world.transport()
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
        W::two_sided(self)
    }

    fn all_to_all(&self) -> Result<Option<Box<dyn AllToAll + '_>>, JobError> {
        W::all_to_all(self)
    }
}

impl<W: World> SymmetricRuntime for PeerHost<'_, W> {
    fn work<P: PeTask>(&mut self, part: P) -> Result<(), P::Error> {
        let heap_bytes = part.heap_bytes::<W::Transport<'_>>()?;
        let host: &PeerHost<'_, W> = self;
        host.pes.over_memory(heap_bytes, host.limit, |shmem| {
            part.run(shmem, host)?;
            Ok(host.finish()?)
        })
    }

    fn shares_memory(&self) -> bool {
        false
    }

    fn device_memory(&mut self, heap_bytes: usize) -> Result<DeviceMemory, JobError> {
        self.pes.world.device_memory(heap_bytes, self.limit)
    }

    fn end_part(&self) -> Result<(), JobError> {
        self.finish()
    }
}
