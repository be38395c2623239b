//! Errors of the one-sided layer.

use std::io;
use std::time::Duration;

use super::{Cmp, LostPe};

/// An error outside of waits.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShmemError {
    /// An allocation did not fit.
    #[error(
        "the symmetric heap of {heap_bytes} bytes is too small: {asked_bytes} bytes asked, {free_bytes} free, \
         {largest_bytes} of them in one piece"
    )]
    OutOfMemory {
        /// Size of the heap, bytes.
        heap_bytes: usize,
        /// Requested bytes.
        asked_bytes: usize,
        /// Total free bytes.
        free_bytes: usize,
        /// The largest free range, bytes.
        largest_bytes: usize,
    },
    /// Invalid team members.
    #[error("cannot form the team {members:?}: {why}")]
    Team {
        /// The requested members.
        members: Vec<usize>,
        /// The reason.
        why: String,
    },
    /// A system call for a shared segment failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation, with its size.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// Processes could not form a world.
    #[error("cannot meet the other PEs: {0}")]
    Meeting(String),
    /// A file descriptor or a set of segments that a transport cannot use.
    #[error("unusable segment: {0}")]
    Segment(String),
}

/// A wait ended because its deadline passed or a PE was lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("waited {waited:.3?} for a signal {} {expected}, saw {seen}{}", .cmp.symbol(), of_loss(.lost))]
#[non_exhaustive]
pub struct WaitTimeout {
    /// The right side of the comparison.
    pub expected: u64,
    /// The word's value when the wait ended.
    pub seen: u64,
    /// The comparison that did not hold.
    pub cmp: Cmp,
    /// The index of the failed wait in the given list; 0 if any of them would have sufficed. In a collective operation, the missing PE.
    pub index: usize,
    /// Duration of the wait.
    pub waited: Duration,
    /// The lost PE, if a loss ended the wait.
    pub lost: Option<LostPe>,
}

fn of_loss(lost: &Option<LostPe>) -> String {
    lost.as_ref().map_or_else(String::new, |lost| format!("; {lost}"))
}
