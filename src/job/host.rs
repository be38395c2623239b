//! What a PE of any job sees, whoever started it: a supervisor on this host, a launcher, or `mpirun`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::JobError;
use super::launch::{GoOn, PeContext, StatusPage};
use crate::shmem::tcp::TcpTransport;
use crate::shmem::{Pace, ShmTransport, Shmem, Transport};

/// The CPUs that this thread may run on: its launcher's choice.
pub fn allowed_cpus() -> Vec<usize> {
    sched_getaffinity(None).map(|set| (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()).unwrap_or_default()
}

/// How much is written at once.
const PIECE_BYTES: usize = 4 << 20;

/// A PE's surroundings: its number, its peers, its files, and whom it reports to.
pub trait Host {
    /// This PE's number.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// How many of them run on this host.
    fn pes_on_host(&self) -> usize;

    /// Each PE's host: PEs of one host have the same number.
    fn hosts(&self) -> Vec<usize>;

    /// The name of what carries rows and signals between them.
    fn transport(&self) -> &'static str;

    /// Where it shows what it is doing.
    fn status(&self) -> &StatusPage;

    /// Whether the job has a file of this name.
    fn has_file(&self, name: &str) -> bool;

    /// Writes into that file, from a byte on; errors name `what` it is.
    ///
    /// # Errors
    /// No such file, or what the system refused.
    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError>;

    /// Sends a message, which is JSON, to the process that reports the job.
    ///
    /// # Errors
    /// When that process has ended.
    fn send(&self, body: &[u8]) -> Result<(), JobError>;

    /// A PE that was lost, where the job may go on without it: what this PE does fails then, until [`MemoryHost::go_on`].
    fn lost(&self) -> Option<usize> {
        None
    }

    /// Says that all steps are done for good: from now on the job cannot go on without a PE.
    ///
    /// # Errors
    /// When nobody is left to hear it.
    fn say_final(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// Matched messages, where the PEs have them beside one-sided operations.
    fn two_sided(&self) -> Option<&dyn TwoSided> {
        None
    }

    /// An all-to-all that is one call, where the PEs have one.
    ///
    /// # Errors
    /// What it needs could not be made.
    fn all_to_all(&self) -> Result<Option<Box<dyn AllToAll + '_>>, JobError> {
        Ok(None)
    }
}

/// Symmetric memory through which devices meet, and emulated ones send.
pub enum DeviceMemory {
    /// Of PEs on one host.
    Shared(Shmem<ShmTransport>),
    /// Of PEs on several.
    Tcp(Shmem<TcpTransport>),
}

/// A host that can give its PE symmetric memory.
pub trait MemoryHost: Host {
    /// Does a part over symmetric memory that all PEs make together. Collective.
    ///
    /// # Errors
    /// The memory's, or the part's.
    fn work<P: PePart>(&mut self, part: P) -> Result<(), P::Error>;

    /// Whether all PEs are on one host, and so share memory.
    fn shares_memory(&self) -> bool;

    /// Symmetric memory of this many bytes per PE for devices. Collective.
    ///
    /// # Errors
    /// When memory or files run out, a PE ends, or what joins the PEs cannot carry what devices send.
    fn device_memory(&mut self, heap_bytes: usize) -> Result<DeviceMemory, JobError>;

    /// Ends a part that worked over such memory, once all is reported. Collective.
    ///
    /// # Errors
    /// A PE that is lost.
    fn end_part(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// How the PEs that are left after a loss go on, this one having the results of `complete` steps, of which `settled` are final; the next
    /// memory is theirs alone. Collective.
    ///
    /// # Errors
    /// When they cannot.
    fn go_on(&mut self, settled: u64, complete: u64) -> Result<GoOn, JobError> {
        let _ = (settled, complete);
        Err(JobError::Peers("these PEs cannot go on without one".to_string()))
    }
}

/// A PE's part of a job, over any transport.
pub trait PePart {
    /// Why it fails.
    type Error: From<JobError>;

    /// The symmetric heap that it needs, bytes: the same on every PE.
    ///
    /// # Errors
    /// When there can be none so large.
    fn heap_bytes<T: Transport>(&self) -> Result<usize, Self::Error>;

    /// How slow this PE's messages are to be made, where they are; over shared memory only.
    fn pace(&self, my_pe: usize) -> Option<Pace> {
        let _ = my_pe;
        None
    }

    /// Does it.
    ///
    /// # Errors
    /// Its own.
    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<(), Self::Error>;
}

/// Matched messages between two PEs.
pub trait TwoSided {
    /// Sends to `pe`; the bytes may be changed when it returns.
    ///
    /// # Errors
    /// The transport's.
    fn send(&self, bytes: &[u8], pe: usize) -> Result<(), JobError>;

    /// Receives from `pe` as many bytes as there is room for.
    ///
    /// # Errors
    /// The transport's; `deadline` passed.
    fn receive(&self, bytes: &mut [u8], pe: usize, deadline: Instant) -> Result<(), JobError>;
}

/// An all-to-all that is one call.
pub trait AllToAll {
    /// Sends to each PE the `bytes` bytes of `out` that begin at its number times `bytes`, and takes theirs to the like place of
    /// `into`. Collective.
    ///
    /// # Errors
    /// The transport's.
    fn exchange(&self, out: &[u8], into: &mut [u8], bytes: usize) -> Result<(), JobError>;
}

/// A supervisor, on the same host, has passed the files.
impl Host for PeContext {
    fn my_pe(&self) -> usize {
        self.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.n_pes()
    }

    fn pes_on_host(&self) -> usize {
        self.n_pes()
    }

    fn hosts(&self) -> Vec<usize> {
        vec![0; self.n_pes()]
    }

    fn transport(&self) -> &'static str {
        "shm"
    }

    fn status(&self) -> &StatusPage {
        self.status()
    }

    fn has_file(&self, name: &str) -> bool {
        self.file(name).is_some()
    }

    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError> {
        let file = self.file(name).ok_or_else(|| JobError::NoFile { what: what.to_string() })?;
        let failed = |source| JobError::Write { what: what.to_string(), source };
        let file = File::from(file.try_clone_to_owned().map_err(failed)?);
        // In pieces, each of which is a sign of life: a slow file system is no stalled one.
        let mut at = at;
        for piece in bytes.chunks(PIECE_BYTES) {
            file.write_all_at(piece, at).map_err(failed)?;
            self.status().beat();
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn send(&self, body: &[u8]) -> Result<(), JobError> {
        Ok(self.send(body)?)
    }

    fn lost(&self) -> Option<usize> {
        self.status().lost()
    }

    fn say_final(&self) -> Result<(), JobError> {
        Ok(self.say_final()?)
    }
}

impl MemoryHost for PeContext {
    fn work<P: PePart>(&mut self, part: P) -> Result<(), P::Error> {
        let transport = transport(self, part.heap_bytes::<ShmTransport>()?)?;
        let transport = match part.pace(self.my_pe()) {
            Some(pace) => transport.paced(pace),
            None => transport,
        };
        part.run(&Shmem::new(transport), self)
    }

    fn shares_memory(&self) -> bool {
        true
    }

    fn device_memory(&mut self, heap_bytes: usize) -> Result<DeviceMemory, JobError> {
        Ok(DeviceMemory::Shared(Shmem::new(transport(self, heap_bytes)?)))
    }

    fn go_on(&mut self, settled: u64, complete: u64) -> Result<GoOn, JobError> {
        Ok(self.go_on(settled, complete)?)
    }
}

/// Shared memory of this many bytes per PE, as this PE reaches it. Collective.
fn transport(pe: &mut PeContext, heap_bytes: usize) -> Result<ShmTransport, JobError> {
    let segments = pe.exchange_segments(heap_bytes)?;
    let rank = pe.world().iter().position(|&one| one == pe.my_pe()).unwrap_or(segments.len());
    let transport = ShmTransport::new(rank, segments)?;
    Ok(transport.watched(pe.world().to_vec(), Arc::new(pe.status().clone())))
}
