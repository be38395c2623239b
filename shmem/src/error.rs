//! What the one-sided layer reports.

use std::io;
use std::time::Duration;

use super::{Cmp, LostPe};

/// What can go wrong outside of waits.
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
        /// What was asked for, bytes.
        asked_bytes: usize,
        /// What is free in all, bytes.
        free_bytes: usize,
        /// The largest free range, bytes.
        largest_bytes: usize,
    },
    /// A team that cannot be.
    #[error("cannot form the team {members:?}: {why}")]
    Team {
        /// The members asked for.
        members: Vec<usize>,
        /// What is wrong with them.
        why: String,
    },
    /// The system refused a shared segment.
    #[error("cannot {what}: {source}")]
    System {
        /// What was attempted, with its size.
        what: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Processes that were to become one world did not.
    #[error("cannot meet the other PEs: {0}")]
    Meeting(String),
    /// A file descriptor, or a set of segments, that a transport cannot use.
    #[error("unusable segment: {0}")]
    Segment(String),
}

/// A wait's deadline passed, or a PE was lost before it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("waited {waited:.3?} for a signal {} {expected}, saw {seen}{}", .cmp.symbol(), of_loss(.lost))]
#[non_exhaustive]
pub struct WaitTimeout {
    /// The right side of the comparison.
    pub expected: u64,
    /// The word's value when the wait gave up.
    pub seen: u64,
    /// The comparison that did not hold.
    pub cmp: Cmp,
    /// Which wait: its index in the list given; in a collective operation, the PE waited for. Of several waits
    /// that all failed, the first.
    pub index: usize,
    /// How long this wait took.
    pub waited: Duration,
    /// The PE whose loss ended it, where that did.
    pub lost: Option<LostPe>,
}

fn of_loss(lost: &Option<LostPe>) -> String {
    lost.as_ref().map_or_else(String::new, |lost| format!("; {lost}"))
}
