//! Spans of a timeline in virtual time.

/// A period of work.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The PE or node.
    pub pe: u32,
    /// The track; spans of one track do not overlap.
    pub track: u32,
    /// Name of the work.
    pub name: String,
    /// Start, s.
    pub start_s: f64,
    /// Duration, s.
    pub dur_s: f64,
}
