//! Frames between connected PEs: a header of six words, little endian, and for some kinds a body.

use crate::SignalOp;

/// Length of a header, bytes.
pub(super) const HEADER_BYTES: usize = 48;
/// Maximum length of a message or farewell, bytes.
pub(super) const MAX_MESSAGE_BYTES: u64 = 256 << 20;

/// The operation that a frame asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Write the body at `at`.
    Put = 1,
    /// Write the body at `at`, then update the word at `signal`.
    PutSignal,
    /// Update the word at `signal`.
    Signal,
    /// Send `bytes` bytes from `at`, as the answer to question `value`.
    Get,
    /// The body is the answer to question `value`.
    GotBytes,
    /// Add `value` to the word at `signal`, and send its old value, as the answer to question `at`.
    FetchAdd,
    /// `value` is the answer to question `at`.
    GotWord,
    /// Report the number of frames carried out.
    Ask,
    /// Only carries `carried_out`, as every header does.
    Answer,
    /// A message, on channel `at`.
    Message,
    /// The sender ends because PE `at` is lost; the body says why.
    Lost,
    /// The last frame of the sender, which ends once every PE has sent one.
    Bye,
}

const KINDS: [Kind; 12] = [
    Kind::Put,
    Kind::PutSignal,
    Kind::Signal,
    Kind::Get,
    Kind::GotBytes,
    Kind::FetchAdd,
    Kind::GotWord,
    Kind::Ask,
    Kind::Answer,
    Kind::Message,
    Kind::Lost,
    Kind::Bye,
];

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) op: SignalOp,
    /// An offset in the receiver's heap, or as documented at the kind.
    pub(super) at: u64,
    /// A number of bytes.
    pub(super) bytes: u64,
    /// The offset of a word in the receiver's heap.
    pub(super) signal: u64,
    pub(super) value: u64,
    /// Number of the receiver's frames that the sender has carried out.
    pub(super) carried_out: u64,
}

impl Header {
    /// A header with only a kind.
    pub(super) fn of(kind: Kind) -> Header {
        Header { kind, op: SignalOp::Set, at: 0, bytes: 0, signal: 0, value: 0, carried_out: 0 }
    }

    /// Length of its body, bytes.
    pub(super) fn body_bytes(&self) -> u64 {
        match self.kind {
            Kind::Put | Kind::PutSignal | Kind::GotBytes | Kind::Message | Kind::Lost => self.bytes,
            _ => 0,
        }
    }

    /// As bytes.
    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let kind = self.kind as u64 | u64::from(self.op == SignalOp::Add) << 32;
        let words = [kind, self.at, self.bytes, self.signal, self.value, self.carried_out];
        let mut bytes = [0; HEADER_BYTES];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// Reads a header; `None` if the bytes are not a header.
    pub(super) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let (words, _) = bytes.as_chunks::<8>();
        let word = |i: usize| u64::from_le_bytes(words[i]);
        let kind = KINDS.into_iter().find(|kind| *kind as u64 == word(0) & 0xffff_ffff)?;
        let op = match word(0) >> 32 {
            0 => SignalOp::Set,
            1 => SignalOp::Add,
            _ => return None,
        };
        let [at, bytes, signal, value, carried_out] = [1, 2, 3, 4, 5].map(word);
        Some(Header { kind, op, at, bytes, signal, value, carried_out })
    }

    /// Whether all its offsets are inside the heap.
    pub(super) fn fits(&self, heap_bytes: usize) -> bool {
        let inside = |at: u64, bytes: u64| at.checked_add(bytes).is_some_and(|end| end <= heap_bytes as u64);
        let word = |at: u64| at.is_multiple_of(8) && inside(at, 8);
        match self.kind {
            Kind::Put | Kind::Get => inside(self.at, self.bytes),
            Kind::PutSignal => inside(self.at, self.bytes) && word(self.signal),
            Kind::Signal | Kind::FetchAdd => word(self.signal),
            _ => true,
        }
    }

    /// Whether it accesses the receiver's heap.
    pub(super) fn needs_heap(&self) -> bool {
        matches!(self.kind, Kind::Put | Kind::PutSignal | Kind::Signal | Kind::Get | Kind::FetchAdd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_survives_its_encoding() {
        for kind in KINDS {
            for op in [SignalOp::Set, SignalOp::Add] {
                let header =
                    Header { op, at: 1, bytes: u64::MAX, signal: 3, value: 4, carried_out: 5, ..Header::of(kind) };
                assert_eq!(Header::from_bytes(&header.to_bytes()), Some(header));
            }
        }
        for word in [0u64, 13, 1 | 2 << 32, u64::MAX] {
            let mut bytes = Header::of(Kind::Put).to_bytes();
            bytes[..8].copy_from_slice(&word.to_le_bytes());
            assert_eq!(Header::from_bytes(&bytes), None, "{word}");
        }
    }

    #[test]
    fn offsets_outside_the_heap_do_not_fit() {
        let header = |kind, at, bytes, signal| Header { at, bytes, signal, ..Header::of(kind) };
        for kind in [Kind::Put, Kind::PutSignal, Kind::Get] {
            assert!(header(kind, 60, 4, 56).fits(64) && header(kind, 64, 0, 0).fits(64));
            assert!(!header(kind, 61, 4, 0).fits(64) && !header(kind, u64::MAX, 4, 0).fits(64));
        }
        for kind in [Kind::PutSignal, Kind::Signal, Kind::FetchAdd] {
            assert!(header(kind, 0, 0, 56).fits(64));
            assert!(!header(kind, 0, 0, 57).fits(64) && !header(kind, 0, 0, 64).fits(64));
            assert!(!header(kind, 0, 0, u64::MAX - 7).fits(64));
        }
    }
}
