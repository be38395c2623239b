//! What PEs send to the process that reports the job.

use serde::de::DeserializeOwned;

use super::JobError;
use super::launch::{Event, GoOn, LaunchError, Processes, StatusView};

/// The messages of a job's PEs, JSON each, as they come.
pub struct Messages<M> {
    read: Vec<(usize, M)>,
    unreadable: Option<JobError>,
}

impl<M: DeserializeOwned> Messages<M> {
    /// None yet.
    pub fn new() -> Self {
        Messages { read: Vec::new(), unreadable: None }
    }

    /// Takes one. A message that cannot be read is reported at the end, as the job goes on.
    pub fn take(&mut self, pe: usize, body: &[u8]) {
        match serde_json::from_slice(body) {
            Ok(message) => self.read.push((pe, message)),
            Err(source) => {
                self.unreadable.get_or_insert(JobError::Message { pe, source });
            }
        }
    }

    /// All of them with their PEs, those of one PE in its order.
    ///
    /// # Errors
    /// One that could not be read.
    pub fn finish(self) -> Result<Vec<(usize, M)>, JobError> {
        self.unreadable.map_or(Ok(self.read), Err)
    }
}

impl<M: DeserializeOwned> Default for Messages<M> {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs PEs that are processes to their end. `on_message` takes what they send, those of one PE in its order; `on_tick` sees what they are
/// doing, about ten times a second; `on_loss` hears how the job goes on without PEs, and why it must, where it can.
///
/// # Errors
/// As [`Processes::run`]; a message that cannot be read.
pub fn collect<M: DeserializeOwned>(
    processes: Processes<'_>,
    mut on_message: impl FnMut(usize, M),
    mut on_tick: impl FnMut(&StatusView<'_>),
    mut on_loss: impl FnMut(&GoOn, &LaunchError),
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
    fn what_cannot_be_read_names_its_pe() {
        let mut messages = Messages::<u32>::new();
        [(1, "7"), (0, "8"), (1, "9")].into_iter().for_each(|(pe, body)| messages.take(pe, body.as_bytes()));
        assert_eq!(messages.finish().unwrap(), [(1, 7), (0, 8), (1, 9)]);
        let mut messages = Messages::<u32>::default();
        [(1, "7"), (2, "x"), (0, "y")].into_iter().for_each(|(pe, body)| messages.take(pe, body.as_bytes()));
        let line = messages.finish().unwrap_err().to_string();
        assert!(line.starts_with("PE 2 sent an unreadable message: "), "{line}");
    }
}
