//! A PE's interface to its job, which is the same whether a supervisor, a launcher or `mpirun` started the PE.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity};

use super::JobError;
use super::launch::{Continuation, PeContext, StatusPage};
use crate::shmem::tcp::TcpTransport;
use crate::shmem::{ShmTransport, Shmem, Throttle, Transport};

/// The CPUs on which this thread may run. Launchers set them.
pub fn allowed_cpus() -> Vec<usize> {
    sched_getaffinity(None).map(|set| (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()).unwrap_or_default()
}

/// Bytes written per call.
const PIECE_BYTES: usize = 4 << 20;

/// A PE's environment: its number, its peers, its files, and the process to which it reports.
pub trait Host {
    /// This PE's number.
    fn my_pe(&self) -> usize;

    /// Number of PEs.
    fn n_pes(&self) -> usize;

    /// Number of PEs on this host.
    fn pes_on_host(&self) -> usize;

    /// The host of each PE, as a number that PEs of one host share.
    fn hosts(&self) -> Vec<usize>;

    /// The name of the transport that carries rows and signals.
    fn transport(&self) -> &'static str;

    /// This PE's status page.
    fn status(&self) -> &StatusPage;

    /// Whether the job has a file of this name.
    fn has_file(&self, name: &str) -> bool;

    /// Writes `bytes` to the file `name` at offset `at`. Errors describe the content as `what`.
    ///
    /// # Errors
    /// Returns an error if the job has no such file, or if the system reports an error.
    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<(), JobError>;

    /// Sends a message in JSON to the process that reports the job.
    ///
    /// # Errors
    /// Returns an error if that process has ended.
    fn send(&self, body: &[u8]) -> Result<(), JobError>;

    /// The number of a lost PE, if the job can continue without that PE. This PE's communication then fails until it has called
    /// [`SymmetricRuntime::continuation`].
    fn lost(&self) -> Option<usize> {
        None
    }

    /// Reports that all steps are final. From now on the job fails if a PE is lost.
    ///
    /// # Errors
    /// Returns an error if the process to which this PE reports has ended.
    fn commit_steps(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// Two-sided messages, if the transport supports them in addition to one-sided operations.
    fn two_sided(&self) -> Option<&dyn TwoSided> {
        None
    }

    /// An all-to-all in one call, if the transport supports that.
    ///
    /// # Errors
    /// Returns an error if its setup fails.
    fn all_to_all(&self) -> Result<Option<Box<dyn AllToAll + '_>>, JobError> {
        Ok(None)
    }
}

/// Symmetric memory that devices use to exchange addresses, and emulated devices also for their data.
pub enum DeviceMemory {
    /// Shared memory of PEs on one host.
    Shared(Shmem<ShmTransport>),
    /// Memory of PEs on several hosts, connected over TCP.
    Tcp(Shmem<TcpTransport>),
}

/// A host that can give its PE symmetric memory.
pub trait SymmetricRuntime: Host {
    /// Runs a part over symmetric memory of all PEs. Collective.
    ///
    /// # Errors
    /// Returns an error of the memory or of the part.
    fn work<P: PeTask>(&mut self, part: P) -> Result<(), P::Error>;

    /// Whether all PEs are on one host, and so share memory.
    fn shares_memory(&self) -> bool;

    /// Allocates symmetric memory of `heap_bytes` per PE for devices. Collective.
    ///
    /// # Errors
    /// Returns an error if memory or file descriptors run out, a PE ends, or the transport does not support devices.
    fn device_memory(&mut self, heap_bytes: usize) -> Result<DeviceMemory, JobError>;

    /// Ends a part that used [`SymmetricRuntime::device_memory`]: sends the results. Collective.
    ///
    /// # Errors
    /// Returns an error if a PE is lost.
    fn end_part(&self) -> Result<(), JobError> {
        Ok(())
    }

    /// Agrees with the remaining PEs, after a loss, on the step to continue from. This PE has the results of `complete` steps, of which
    /// `settled` are final. Memory that is created later has only the remaining PEs. Collective.
    ///
    /// # Errors
    /// Returns an error if the PEs cannot continue.
    fn continuation(&mut self, settled: u64, complete: u64) -> Result<Continuation, JobError> {
        let _ = (settled, complete);
        Err(JobError::Peers("these PEs cannot go on without one".to_string()))
    }
}

/// A PE's part of a job, which runs over any transport.
pub trait PeTask {
    /// Its error.
    type Error: From<JobError>;

    /// Size of the symmetric heap, bytes; the same on every PE.
    ///
    /// # Errors
    /// Returns an error if the size does not fit into `usize`.
    fn heap_bytes<T: Transport>(&self) -> Result<usize, Self::Error>;

    /// The delays to inject into this PE's messages, if any. Only shared memory supports them.
    fn throttle(&self, my_pe: usize) -> Option<Throttle> {
        let _ = my_pe;
        None
    }

    /// Runs this part.
    ///
    /// # Errors
    /// Returns the error of the part.
    fn run<T: Transport>(self, shmem: &Shmem<T>, host: &dyn Host) -> Result<(), Self::Error>;
}

/// Two-sided messages between two PEs.
pub trait TwoSided {
    /// Sends `bytes` to `pe`. The caller may reuse the buffer after the call.
    ///
    /// # Errors
    /// The transport's.
    fn send(&self, bytes: &[u8], pe: usize) -> Result<(), JobError>;

    /// Receives `bytes.len()` bytes from `pe`.
    ///
    /// # Errors
    /// Returns an error of the transport, or if `deadline` passes.
    fn receive(&self, bytes: &mut [u8], pe: usize, deadline: Instant) -> Result<(), JobError>;
}

/// An all-to-all in one call.
pub trait AllToAll {
    /// Sends bytes `pe * bytes..(pe + 1) * bytes` of `out` to each PE `pe`, and stores that PE's bytes for this PE in the same range of
    /// `into`. Collective.
    ///
    /// # Errors
    /// The transport's.
    fn exchange(&self, out: &[u8], into: &mut [u8], bytes: usize) -> Result<(), JobError>;
}

/// A PE that a supervisor on the same host has started. The supervisor has passed the files to it.
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
        // A heartbeat after each piece, so that a PE on a slow file system is not reported as stalled.
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

    fn commit_steps(&self) -> Result<(), JobError> {
        Ok(self.commit_steps()?)
    }
}

impl SymmetricRuntime for PeContext {
    fn work<P: PeTask>(&mut self, part: P) -> Result<(), P::Error> {
        let transport = transport(self, part.heap_bytes::<ShmTransport>()?)?;
        let transport = match part.throttle(self.my_pe()) {
            Some(throttle) => transport.throttled(throttle),
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

    fn continuation(&mut self, settled: u64, complete: u64) -> Result<Continuation, JobError> {
        Ok(self.continuation(settled, complete)?)
    }
}

/// Maps shared memory of `heap_bytes` per PE. Collective.
fn transport(pe: &mut PeContext, heap_bytes: usize) -> Result<ShmTransport, JobError> {
    let segments = pe.exchange_segments(heap_bytes)?;
    let rank = pe.world().iter().position(|&one| one == pe.my_pe()).unwrap_or(segments.len());
    let transport = ShmTransport::new(rank, segments)?;
    Ok(transport.watched(pe.world().to_vec(), Arc::new(pe.status().clone())))
}
