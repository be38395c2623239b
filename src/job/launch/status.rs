//! The status page: every PE's phase and progress, in shared memory, so that the supervisor can read them after the PE has ended.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::shmem::{LostPe, Segment, Watch};

/// One cache line per PE avoids false sharing.
const SLOT_BYTES: usize = 64;
const PHASE: usize = 0;
const DONE: usize = 8;
const TOTAL: usize = 16;
const BEAT: usize = 24;
/// Written by the supervisor: 1 + the number of a lost PE, or 0.
const LOST: usize = 32;

/// A PE's own slot in the page; cheap to clone. All accesses are relaxed, so they order no other memory access.
#[derive(Clone)]
pub struct StatusPage {
    segment: Arc<Segment>,
    pe: usize,
}

impl StatusPage {
    /// Maps the page, which must contain this PE's slot.
    pub(super) fn from_fd(file: OwnedFd, pe: usize) -> io::Result<StatusPage> {
        let segment = Segment::from_fd(file).map_err(io::Error::other)?;
        if segment.heap_bytes() < (pe + 1) * SLOT_BYTES {
            return Err(io::Error::other(format!("it has {} bytes, too few for PE {pe}", segment.heap_bytes())));
        }
        Ok(StatusPage { segment: Arc::new(segment), pe })
    }

    /// A private page, for a PE without a supervisor.
    pub(crate) fn private() -> io::Result<StatusPage> {
        let segment = Segment::create("aristos-status", SLOT_BYTES).map_err(io::Error::other)?;
        Ok(StatusPage { segment: Arc::new(segment), pe: 0 })
    }

    /// The phase that this PE set last.
    pub(crate) fn phase(&self) -> usize {
        word(&self.segment, self.pe, PHASE).load(Ordering::Relaxed) as usize
    }

    /// Sets the phase that this PE is in, as an index in the job's `phase_names`.
    pub fn set_phase(&self, code: u32) {
        word(&self.segment, self.pe, PHASE).store(u64::from(code), Ordering::Relaxed);
    }

    /// Counts a heartbeat. Call it during work that changes neither the phase nor the progress.
    pub fn beat(&self) {
        word(&self.segment, self.pe, BEAT).fetch_add(1, Ordering::Relaxed);
    }

    /// The PE that was lost since the PEs last created a world, if the supervisor has reported one.
    pub fn lost(&self) -> Option<usize> {
        (word(&self.segment, self.pe, LOST).load(Ordering::Relaxed) as usize).checked_sub(1)
    }

    /// Sets the progress: `done` of `total`, in the unit of the progress bar.
    pub fn set_progress(&self, done: u64, total: u64) {
        word(&self.segment, self.pe, TOTAL).store(total, Ordering::Relaxed);
        word(&self.segment, self.pe, DONE).store(done, Ordering::Relaxed);
    }
}

impl Watch for StatusPage {
    fn lost(&self) -> Option<LostPe> {
        self.lost().map(|pe| LostPe::new(pe, "its process has ended"))
    }
}

/// The last phase and progress of a PE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeStatus<'a> {
    /// The phase's name.
    pub phase: &'a str,
    /// The part that is done.
    pub done: u64,
    /// The total; 0 if it was not set.
    pub total: u64,
}

/// The supervisor's view of every PE's status. A PE's words are read one by one, so `done` may be newer than `total`.
pub struct StatusView<'a> {
    segment: Segment,
    n_pes: usize,
    phase_names: &'a [&'a str],
}

impl<'a> StatusView<'a> {
    pub(super) fn create(n_pes: usize, phase_names: &'a [&'a str]) -> io::Result<StatusView<'a>> {
        let segment = Segment::create("aristos-status", n_pes * SLOT_BYTES).map_err(io::Error::other)?;
        Ok(StatusView { segment, n_pes, phase_names })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.segment.fd()
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.n_pes
    }

    /// The status of `pe`; initially the first phase, without progress.
    ///
    /// # Panics
    /// If there is no such PE.
    pub fn pe(&self, pe: usize) -> PeStatus<'a> {
        assert!(pe < self.n_pes, "PE {pe} of {}", self.n_pes);
        let load = |field| word(&self.segment, pe, field).load(Ordering::Relaxed);
        let phase = usize::try_from(load(PHASE)).ok().and_then(|code| self.phase_names.get(code).copied());
        PeStatus { phase: phase.unwrap_or("(unnamed)"), done: load(DONE), total: load(TOTAL) }
    }
}

impl StatusView<'_> {
    /// Reports to `pe` that PE `lost` is lost. `None` clears the report.
    pub(super) fn tell_lost(&self, pe: usize, lost: Option<usize>) {
        word(&self.segment, pe, LOST).store(lost.map_or(0, |lost| lost as u64 + 1), Ordering::Relaxed);
    }

    /// All words of `pe`. They change with every heartbeat.
    pub(super) fn words(&self, pe: usize) -> [u64; 4] {
        [PHASE, DONE, TOTAL, BEAT].map(|field| word(&self.segment, pe, field).load(Ordering::Relaxed))
    }
}

fn word(segment: &Segment, pe: usize, field: usize) -> &AtomicU64 {
    segment.atomic_u64(pe * SLOT_BYTES + field)
}
