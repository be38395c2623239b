//! Blocking puts: a put returns when its target has received the message. A PE sends and receives messages only in a call: while it puts or
//! waits.
//!
//! A put takes five messages: announcement, grant, data, request, acknowledgement. Each takes a fifth of the link's latency. Grants and
//! acknowledgements queue behind the target's own outgoing rows. So if two PEs put to each other, the later put waits until the rows of the
//! earlier put have left, and the acknowledgement of the earlier put then waits until the rows of the later put have left.

use super::Engine;
use super::event::{Kind, Message, What};
use super::types::Work;

/// Time of a control message as a fraction of the link's latency.
const WAY: f64 = 0.2;

impl Engine<'_> {
    /// Whether the PE is in a call, and thus sends and receives messages.
    fn is_in_call(&self, p: usize) -> bool {
        matches!(self.pes[p].working, None | Some((Work::Put(_), _)))
    }

    /// Called while a PE is in a call: grants announced messages and receives arrived ones. Returns whether it received any.
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

    /// Announces a message to its receiver.
    pub(super) fn ask(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        let there_s = self.now_s + WAY * self.network.alpha_s(from, to);
        self.at(there_s, to, pass, What::Announced { at: at as u32, chunk, kind });
    }

    /// Handles an announcement: the target grants the message in its next call, or at once if it is in one.
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

    /// Handles an arrived message: its target receives it in its next call, or at once if it is in one.
    pub(super) fn arrived_at_call(&mut self, message: Message) {
        match self.is_in_call(message.to) {
            true => self.take(message),
            false => self.pes[message.to].untaken.push(message),
        }
    }

    /// The target receives the message, and is then asked for an acknowledgement.
    fn take(&mut self, Message { from, to, at, chunk, kind, pass }: Message) {
        let asked_s = self.now_s + WAY * self.network.alpha_s(from, to);
        self.at(asked_s, to, pass, What::Asked { from: from as u32 });
        self.arrived(to, at as u32, chunk, kind, pass);
    }

    /// The target `to` sends the acknowledgement that `from` has requested.
    pub(super) fn asked(&mut self, to: usize, from: usize, pass: u32) {
        let there_s = self.answer_s(to, from);
        self.at(there_s, from, pass, What::Taken);
    }

    /// The acknowledgement has arrived, so the put of `from` returns.
    pub(super) fn taken(&mut self, from: usize) {
        self.worked(from);
        self.compute(from);
    }

    /// Arrival time at `to` of a control message that `from` sends now: the message queues behind the outgoing rows of `from`.
    fn answer_s(&self, from: usize, to: usize) -> f64 {
        self.network.sending_until_s(from, to).max(self.now_s) + WAY * self.network.alpha_s(from, to)
    }
}
