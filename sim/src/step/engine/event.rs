//! Events and their order.

use std::cmp::Ordering;

/// The content of a message: rows of a dispatch or results of a combine, of one chunk or of a crossing for all PEs of a host.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Rows,
    Results,
    CrossingRows,
    CrossingResults,
}

impl Kind {
    pub fn is_out(self) -> bool {
        matches!(self, Kind::Rows | Kind::CrossingRows)
    }
}

/// A message of a pass: rows or results of chunk `chunk` of PE `at`, or of the crossing of that number, which `at` forwards.
#[derive(Clone, Copy)]
pub struct Message {
    pub from: usize,
    pub to: usize,
    pub at: usize,
    pub chunk: u32,
    pub kind: Kind,
    pub pass: u32,
}

/// The kind of an event.
#[derive(Clone, Copy)]
pub enum What {
    /// The headers of all PEs have arrived at a PE.
    Headers,
    /// A chunk may leave: its slot at the receiver is free. Numbers are those of the receiver.
    Leave {
        to: u32,
        chunk: u32,
        kind: Kind,
    },
    /// The head of a chunk's message has arrived; numbers as in [`Message`].
    Head {
        at: u32,
        chunk: u32,
        kind: Kind,
    },
    /// The whole message has arrived.
    Arrived {
        at: u32,
        chunk: u32,
        kind: Kind,
    },
    /// Blocking puts: a message is announced to the PE; it may leave the PE; the PE is asked for its acknowledgement; the acknowledgement
    /// has arrived.
    Announced {
        at: u32,
        chunk: u32,
        kind: Kind,
    },
    Granted {
        at: u32,
        chunk: u32,
        kind: Kind,
    },
    Asked {
        from: u32,
    },
    Taken,
    /// A PE has finished a piece of work, unless its host has changed since event `turn`.
    Computed {
        turn: u64,
    },
    /// A bulk phase of a group is over.
    Phase,
}

pub struct Event {
    pub time_s: f64,
    /// Breaks ties between events at the same time.
    pub number: u64,
    /// The PE, or for [`What::Phase`] the group.
    pub who: u32,
    pub pass: u32,
    pub what: What,
}

impl Ord for Event {
    fn cmp(&self, other: &Event) -> Ordering {
        self.time_s.total_cmp(&other.time_s).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}
