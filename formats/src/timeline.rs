//! What happened when, in virtual time.

/// Something that took a while.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The PE or node that it happened on.
    pub pe: u32,
    /// Which of its tracks: spans of one do not overlap.
    pub track: u32,
    /// What it was.
    pub name: String,
    /// When it began, seconds of virtual time.
    pub start_s: f64,
    /// How long it took, seconds.
    pub dur_s: f64,
}
