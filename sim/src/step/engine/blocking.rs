//! Puts that take until their target has taken them, over messages that a PE sends and takes only while it is in a call: while it puts or waits.
//!
//! A put is announced, granted by its target, sent, asked for, and acknowledged: five ways, which share the link's latency. Grants and acknowledgements go the
//! way of the target's own rows, behind those that are leaving: of two PEs that put to each other, the one that comes later waits until the other's rows have
//! left, and the first one until those of the later one have.

use super::Engine;
use super::event::{Kind, Message, What};
use super::types::Work;

/// Of the link's latency what each way takes.
const WAY: f64 = 0.2;

impl Engine<'_> {
    /// Whether a PE's messages move.
    fn is_in_call(&self, p: usize) -> bool {
        matches!(self.pes[p].working, None | Some((Work::Put(_), _)))
    }

    /// A PE is in a call now: what was announced to it is granted, and what has come is taken. Says whether anything was.
    pub(super) fn in_call(&mut self, p: usize) -> bool {
        std::mem::take(&mut self.pes[p].announced).into_iter().for_each(|message| self.grant(message));
        let untaken = std::mem::take(&mut self.pes[p].untaken);
        let some = !untaken.is_empty();
        self.pes[p].taking = true;
        untaken.into_iter().for_each(|message| self.take(message));
        self.pes[p].taking = false;
        some
    }

    pub(super) fn message_of(&self, at: u32, chunk: u32, kind: Kind, pass: u32) -> Message {
        let (from, to) = self.ends(at as usize, chunk, kind);
        Message { from, to, at: at as usize, chunk, kind, pass }
    }

    /// A PE announces a message.
    pub(super) fn ask(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        let there_s = self.now_s + WAY * self.network.alpha_s(from, to);
        self.at(there_s, to, pass, What::Announced { at: at as u32, chunk, kind });
    }

    /// The target grants it in its next call, or at once in one.
    pub(super) fn announced(&mut self, message: Message) {
        match self.is_in_call(message.to) {
            true => self.grant(message),
            false => self.pes[message.to].announced.push(message),
        }
    }

    fn grant(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        let there_s = self.answer_s(to, from);
        self.at(there_s, from, pass, What::Granted { at: at as u32, chunk, kind });
    }

    pub(super) fn granted(&mut self, message: Message) {
        self.leave(message, WAY);
    }

    /// A message is there; whose it is takes it in its next call, or at once in one.
    pub(super) fn arrived_at_call(&mut self, message: Message) {
        match self.is_in_call(message.to) {
            true => self.take(message),
            false => self.pes[message.to].untaken.push(message),
        }
    }

    /// The target has the message.
    fn take(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        let asked_s = self.now_s + WAY * self.network.alpha_s(from, to);
        self.at(asked_s, to, pass, What::Asked { from: from as u32 });
        self.arrived(to, at as u32, chunk, kind, pass);
    }

    /// A PE that has taken a message is asked whether it has.
    pub(super) fn asked(&mut self, to: usize, from: usize, pass: u32) {
        let there_s = self.answer_s(to, from);
        self.at(there_s, from, pass, What::Taken);
    }

    /// Who put a message goes on.
    pub(super) fn taken(&mut self, from: usize) {
        self.worked(from);
        self.compute(from);
    }

    /// When what `from` says now is at `to`: it goes behind the rows that are leaving.
    fn answer_s(&self, from: usize, to: usize) -> f64 {
        self.network.sending_until_s(from, to).max(self.now_s) + WAY * self.network.alpha_s(from, to)
    }
}
