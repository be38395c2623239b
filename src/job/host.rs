//! A PE's view of its job, the same for PEs of a supervisor, of a launcher, and of `mpirun`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::JobError;
use super::launch::{GoOn, PeContext, StatusPage};
use crate::shmem::tcp::TcpTransport;
use crate::shmem::{Pace, ShmTransport, Shmem, Transport};

/// The CPUs that this thread may run on, as its launcher has set them.
pub fn allowed_cpus() -> Vec<usize> {
    sched_getaffinity(None).map(|set| (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()).unwrap_or_default()
}

/// Bytes written per call.
const PIECE_BYTES: usize = 4 << 20;

/// A PE's surroundings: its number, its peers, its files, and the process that it reports to.
pub trait Host {
    /// This PE's number.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Number of PEs on this host.
    fn pes_on_host(&self) -> usize;

    /// Each PE's host: PEs of one host have the same number.
    fn hosts(&self) -> Vec<usize>;

    /// The name of the transport of rows and signals.
    fn transport(&self) -> &'static str;

    /// Its status page.
    fn status(&self) -> &StatusPage;

    /// Whether the job has a file of this name.
    fn has_file(&self, name: &str) -> bool;

    /// Writes `bytes` into that file at offset `at`; `what` names the content in errors.
    ///
    /// # Errors
    /// The job has no such file, or the system refused the write.
    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError>;

    /// Sends a message, which is JSON, to the process that reports the job.
    ///
    /// # Errors
    /// That process has ended.
    fn send(&self, body: &[u8]) -> Result<(), JobError>;

    /// A lost PE, if the job can continue without it. Communication of this PE then fails until [`MemoryHost::go_on`].
    fn lost(&self) -> Option<usize> {
        None
    }

    /// Reports that all steps are final: from now on the loss of a PE is the job's failure.
    ///
    /// # Errors
    /// When the process that it reports to has ended.
    fn say_final(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// Two-sided messages, if the transport has them in addition to one-sided operations.
    fn two_sided(&self) -> Option<&dyn TwoSided> {
        None
    }

    /// An all-to-all in one call, if the transport has one.
    ///
    /// # Errors
    /// Its setup failed.
    fn all_to_all(&self) -> Result<Option<Box<dyn AllToAll + '_>>, JobError> {
        Ok(None)
    }
}

/// Symmetric memory in which devices exchange addresses, and emulated ones send.
pub enum DeviceMemory {
    /// Of PEs on one host.
    Shared(Shmem<ShmTransport>),
    /// Of PEs on several.
    Tcp(Shmem<TcpTransport>),
}

/// A host that can give its PE symmetric memory.
pub trait MemoryHost: Host {
    /// Runs a part over symmetric memory of all PEs. Collective.
    ///
    /// # Errors
    /// The memory's, or the part's.
    fn work<P: PePart>(&mut self, part: P) -> Result<(), P::Error>;

    /// Whether all PEs are on one host, and so share memory.
    fn shares_memory(&self) -> bool;

    /// Symmetric memory of this many bytes per PE for devices. Collective.
    ///
    /// # Errors
    /// When memory or files run out, a PE ends, or the transport does not support devices.
    fn device_memory(&mut self, heap_bytes: usize) -> Result<DeviceMemory, JobError>;

    /// Ends a part that used such memory: sends the results. Collective.
    ///
    /// # Errors
    /// A PE that is lost.
    fn end_part(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// Agrees with the remaining PEs, after a loss, on the step to continue from. This PE has the results of `complete` steps, of which `settled`
    /// are final. Later memory spans the remaining PEs only. Collective.
    ///
    /// # Errors
    /// The PEs cannot continue.
    fn go_on(&mut self, settled: u64, complete: u64) -> Result<GoOn, JobError> {
        let _ = (settled, complete);
        Err(JobError::Peers("these PEs cannot go on without one".to_string()))
    }
}

/// A PE's part of a job, over any transport.
pub trait PePart {
    /// Its error.
    type Error: From<JobError>;

    /// Size of the symmetric heap, bytes; the same on every PE.
    ///
    /// # Errors
    /// The size does not fit into `usize`.
    fn heap_bytes<T: Transport>(&self) -> Result<usize, Self::Error>;

    /// The delays injected into this PE's messages, if any; over shared memory only.
    fn pace(&self, my_pe: usize) -> Option<Pace> {
        let _ = my_pe;
        None
    }

    /// Runs this part.
    ///
    /// # Errors
    /// Its own.
    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<(), Self::Error>;
}

/// Two-sided messages between two PEs.
pub trait TwoSided {
    /// Sends to `pe`; the bytes may be reused when it returns.
    ///
    /// # Errors
    /// The transport's.
    fn send(&self, bytes: &[u8], pe: usize) -> Result<(), JobError>;

    /// Receives `bytes.len()` bytes from `pe`.
    ///
    /// # Errors
    /// The transport's; `deadline` passed.
    fn receive(&self, bytes: &mut [u8], pe: usize, deadline: Instant) -> Result<(), JobError>;
}

/// An all-to-all in one call.
pub trait AllToAll {
    /// Sends bytes `pe * bytes..(pe + 1) * bytes` of `out` to each PE `pe`, and receives that PE's at the same place of `into`. Collective.
    ///
    /// # Errors
    /// The transport's.
    fn exchange(&self, out: &[u8], into: &mut [u8], bytes: usize) -> Result<(), JobError>;
}

/// A PE started by a supervisor on the same host, which has passed the files.
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
        // Each piece counts as a heartbeat, so that a slow file system does not look like a stalled PE.
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

/// Maps shared memory of `heap_bytes` per PE. Collective.
fn transport(pe: &mut PeContext, heap_bytes: usize) -> Result<ShmTransport, JobError> {
    let segments = pe.exchange_segments(heap_bytes)?;
    let rank = pe.world().iter().position(|&one| one == pe.my_pe()).unwrap_or(segments.len());
    let transport = ShmTransport::new(rank, segments)?;
    Ok(transport.watched(pe.world().to_vec(), Arc::new(pe.status().clone())))
}
