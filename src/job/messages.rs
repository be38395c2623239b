//! Messages of PEs to the process that reports the job.

use serde::de::DeserializeOwned;

use super::JobError;
use super::launch::{Continuation, Event, LaunchError, Processes, StatusView};

/// Decoded JSON messages of a job's PEs, in order of arrival.
pub struct Messages<M> {
    read: Vec<(usize, M)>,
    unreadable: Option<JobError>,
}

impl<M: DeserializeOwned> Messages<M> {
    /// Creates an empty collection.
    pub fn new() -> Self {
        Messages { read: Vec::new(), unreadable: None }
    }

    /// Adds a message. If it is unreadable, the job continues, and [`Messages::finish`] reports the error.
    pub fn take(&mut self, pe: usize, body: &[u8]) {
        match serde_json::from_slice(body) {
            Ok(message) => self.read.push((pe, message)),
            Err(source) => {
                self.unreadable.get_or_insert(JobError::Message { pe, source });
            }
        }
    }

    /// Returns all messages with their PEs; those of one PE are in order.
    ///
    /// # Errors
    /// Returns the error of the first unreadable message.
    pub fn finish(self) -> Result<Vec<(usize, M)>, JobError> {
        self.unreadable.map_or(Ok(self.read), Err)
    }
}

impl<M: DeserializeOwned> Default for Messages<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs a job's PE processes until they end. `on_message` receives their messages, in order for each PE. `on_tick` receives their status
/// about ten times a second. `on_loss` receives the cause when the job continues without lost PEs.
///
/// # Errors
/// Returns the errors of [`Processes::run`], and the error of an unreadable message.
pub fn collect<M: DeserializeOwned>(
    processes: Processes<'_>,
    mut on_message: impl FnMut(usize, M),
    mut on_tick: impl FnMut(&StatusView<'_>),
    mut on_loss: impl FnMut(&Continuation, &LaunchError),
) -> Result<(), JobError> {
    let mut messages = Messages::new();
    processes.run(|event| match event {
        Event::Message { pe, body } => {
            messages.take(pe, body);
            messages.read.drain(..).for_each(|(pe, message)| on_message(pe, message));
        }
        Event::GoesOn { how, cause } => on_loss(how, cause),
        Event::Tick(status) => on_tick(status),
    })?;
    messages.finish().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_message_names_its_pe() {
        let mut messages = Messages::<u32>::new();
        [(1, "7"), (0, "8"), (1, "9")].into_iter().for_each(|(pe, body)| messages.take(pe, body.as_bytes()));
        assert_eq!(messages.finish().unwrap(), [(1, 7), (0, 8), (1, 9)]);
        let mut messages = Messages::<u32>::default();
        [(1, "7"), (2, "x"), (0, "y")].into_iter().for_each(|(pe, body)| messages.take(pe, body.as_bytes()));
        let line = messages.finish().unwrap_err().to_string();
        assert!(line.starts_with("PE 2 sent an unreadable message: "), "{line}");
    }
}
