//! Puts that take until their target has taken them, over messages that a PE sends and takes only while it is in a call: while it puts or waits.

use super::Engine;
use super::event::{Kind, Message};
use super::work::Work;

impl Engine<'_> {
    /// Whether a PE's messages move.
    pub(super) fn is_in_call(&self, p: usize) -> bool {
        matches!(self.pes[p].working, None | Some((Work::Put(_), _)))
    }

    /// A PE is in a call now: what is announced to it may leave, and what has come is taken. Says whether anything was.
    pub(super) fn in_call(&mut self, p: usize) -> bool {
        for message in std::mem::take(&mut self.pes[p].announced) {
            self.leave(message);
        }
        let untaken = std::mem::take(&mut self.pes[p].untaken);
        let some = !untaken.is_empty();
        self.pes[p].taking = true;
        untaken.into_iter().for_each(|message| self.take(message));
        self.pes[p].taking = false;
        some
    }

    /// A message is there; whose it is takes it in its next call, or at once in one.
    pub(super) fn arrived_at_call(&mut self, to: usize, at: usize, chunk: u32, kind: Kind, pass: u32) {
        let (from, _) = self.ends(at, chunk, kind);
        let message = Message { from, to, at, chunk, kind, pass };
        match self.is_in_call(to) {
            true => self.take(message),
            false => self.pes[to].untaken.push(message),
        }
    }

    /// The target has the message, and who put it goes on.
    fn take(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        self.arrived(to, at as u32, chunk, kind, pass);
        self.worked(from);
        self.compute(from);
    }
}
