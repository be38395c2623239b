//! What happens, and in which order.

use std::cmp::Ordering;

/// What a message is: rows on their way out, or results on their way back; a chunk's, or those that cross the network for all PEs of a host.
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

/// A message of the rows that `at` receives as its chunk `chunk`, or hands on as its crossing of that number, in a pass.
#[derive(Clone, Copy)]
pub struct Message {
    pub from: usize,
    pub to: usize,
    pub at: usize,
    pub chunk: u32,
    pub kind: Kind,
    pub pass: u32,
}

/// What happens.
#[derive(Clone, Copy)]
pub enum What {
    /// A PE has the headers of all.
    Headers,
    /// A chunk may leave: its place at the receiver is free. Its own numbers are the receiver's.
    Leave {
        to: u32,
        chunk: u32,
        kind: Kind,
    },
    /// The head of a chunk's message has arrived; its own numbers are as in [`Message`].
    Head {
        at: u32,
        chunk: u32,
        kind: Kind,
    },
    /// All of it has.
    Arrived {
        at: u32,
        chunk: u32,
        kind: Kind,
    },
    /// Where puts block: a message is announced to the PE; it may leave the PE; the PE is asked whether it has it, and knows that it was taken.
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
    /// A PE's piece of work is done, where nothing has changed on its host since event `turn`.
    Computed {
        turn: u64,
    },
    /// A bulk phase of a group is over.
    Phase,
}

pub struct Event {
    pub time_s: f64,
    /// Order of events at the same time.
    pub number: u64,
    /// The PE, or of [`What::Phase`] the group.
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
