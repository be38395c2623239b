//! Events and their order.

use std::cmp::Ordering;

/// The content of a message: rows (dispatch) or results (combine), of one chunk or of a crossing, which serves all PEs of a host.
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

/// A message of a pass: the rows or results of chunk `chunk` of PE `at`, or of crossing `chunk`, for which `at` is the relay.
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
    /// The PE may send chunk or crossing `chunk` of receiver `to`: its slot there is free.
    Leave { to: u32, chunk: u32, kind: Kind },
    /// The head of a message has arrived. `at` and `chunk` are those of [`Message`].
    Head { at: u32, chunk: u32, kind: Kind },
    /// The whole message has arrived.
    Arrived { at: u32, chunk: u32, kind: Kind },
    /// A PE has finished a piece of work. The event is ignored if PEs share cores and `HostWork::turn` is no longer `turn`.
    Computed { turn: u64 },
    /// All PEs of a group have finished a bulk phase.
    Phase,
}

pub struct Event {
    pub time_s: f64,
    /// Orders events with the same time.
    pub number: u64,
    /// The PE that handles the event, or the group for [`What::Phase`].
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
