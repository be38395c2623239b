//! Continuing without lost PEs: decides which PEs remain, and from which step they continue.
//!
//! PEs that depend on each other (an expert-parallel group) are lost together. The other PEs detect the loss at their next wait, stop, and
//! report their step. After all of them have stopped, the supervisor sends the step from which to continue, and the PEs create a new world.
//! A step is final once every PE has the step's results, so the stopped PEs are within one step of each other. If a step is final for one
//! PE, all other PEs have the results of all groups, so the step is final for them too. Otherwise no PE has used the results, and the step
//! is repeated without the lost PEs.

use serde::{Deserialize, Serialize};

use super::LaunchError;

/// The groups of PEs that fail together.
#[derive(Clone, Debug, Default)]
pub struct FailureDomains {
    /// PEs that are lost together. Without groups the job fails if a PE is lost.
    pub groups: Vec<Vec<usize>>,
    /// Number of steps of the job.
    pub steps: u64,
}

/// How the remaining PEs continue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continuation {
    /// All PEs lost so far.
    pub lost: Vec<usize>,
    /// The first step without the lost PEs.
    pub from: u64,
}

/// The step at which a PE has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped {
    /// Number of final steps.
    pub(super) settled: u64,
    /// Number of steps whose results the PE has: `settled` or one more.
    pub(super) complete: u64,
}

impl Stopped {
    pub(super) fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.settled.to_le_bytes());
        bytes[8..].copy_from_slice(&self.complete.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Stopped> {
        let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?));
        Some(Stopped { settled: word(0)?, complete: word(8)? })
    }
}

/// The supervisor's record of lost and stopped PEs.
pub(super) struct Survivors {
    job: FailureDomains,
    lost: Vec<bool>,
    stopped: Vec<Option<Stopped>>,
    /// Whether all steps are final for some PE. From then on the results of every PE are needed.
    finished: bool,
    /// Whether the PEs are still creating a world. Before that they cannot detect a loss.
    meeting: bool,
    /// The loss because of which the PEs stop, if any.
    cause: Option<LaunchError>,
}

impl Survivors {
    pub(super) fn new(pes: usize, job: FailureDomains) -> Survivors {
        let (lost, stopped) = (vec![false; pes], vec![None; pes]);
        Survivors { job, lost, stopped, finished: false, meeting: true, cause: None }
    }

    pub(super) fn is_lost(&self, pe: usize) -> bool {
        self.lost[pe]
    }

    /// Whether the PE has stopped and waits for `Continuation`.
    pub(super) fn has_stopped(&self, pe: usize) -> bool {
        self.stopped[pe].is_some()
    }

    pub(super) fn living(&self) -> impl Iterator<Item = usize> + use<> {
        let lost = self.lost.clone();
        (0..lost.len()).filter(move |&pe| !lost[pe])
    }

    /// Records that the PEs have created a world.
    pub(super) fn met(&mut self) {
        self.meeting = false;
    }

    /// Records the loss of a PE. Returns all PEs that are lost together with it.
    ///
    /// # Errors
    /// The cause, if the others cannot continue.
    pub(super) fn lose(&mut self, pe: usize, cause: LaunchError) -> Result<Vec<usize>, LaunchError> {
        let Some(group) = self.job.groups.iter().find(|group| group.contains(&pe)) else { return Err(cause) };
        if self.meeting || self.finished {
            return Err(cause);
        }
        for &pe in group {
            self.lost[pe] = true;
            self.stopped[pe] = None;
        }
        let first = self.cause.take().unwrap_or(cause);
        if self.lost.iter().all(|&lost| lost) {
            return Err(first);
        }
        self.cause = Some(first);
        Ok(group.clone())
    }

    /// Records the step at which a PE has stopped. The error explains why a message is invalid.
    pub(super) fn stop(&mut self, pe: usize, body: &[u8]) -> Result<(), String> {
        match Stopped::from_bytes(body) {
            Some(at) if self.cause.is_some() && at.complete.wrapping_sub(at.settled) <= 1 => {
                self.stopped[pe] = Some(at);
                Ok(())
            }
            _ => Err("a PE stopped for no reason, or between steps that are none".to_string()),
        }
    }

    /// Records that all steps are final for a PE.
    pub(super) fn finish(&mut self) {
        self.finished = true;
    }

    /// After all remaining PEs have stopped, returns how they continue, and the cause of the loss.
    ///
    /// # Errors
    /// Returns the cause if the PEs cannot continue.
    pub(super) fn decide(&mut self) -> Result<Option<(Continuation, LaunchError)>, LaunchError> {
        if self.cause.is_none() {
            return Ok(None);
        }
        let stopped: Vec<Option<Stopped>> = self.living().map(|pe| self.stopped[pe]).collect();
        let all: Option<Vec<Stopped>> = stopped.into_iter().collect();
        if !self.finished && all.is_none() {
            return Ok(None);
        }
        let Some(cause) = self.cause.take() else { return Ok(None) };
        let all = all.unwrap_or_default();
        let from = all.iter().map(|at| at.settled).max().unwrap_or(0);
        // If all steps are done, the job lacks only results of the lost PEs, which no other PE can provide.
        if self.finished || from >= self.job.steps || all.iter().any(|at| at.complete < from) {
            return Err(cause);
        }
        self.stopped.fill(None);
        self.meeting = true;
        let lost = (0..self.lost.len()).filter(|&pe| self.lost[pe]).collect();
        Ok(Some((Continuation { lost, from }, cause)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn died(pe: usize) -> LaunchError {
        LaunchError::Died { pe, how: "was killed".into(), phase: "dispatch".into() }
    }

    fn stopped(settled: u64, complete: u64) -> [u8; 16] {
        Stopped { settled, complete }.to_bytes()
    }

    /// Three groups of two PEs that have created a world, for ten steps.
    fn at_work() -> Survivors {
        let groups = vec![vec![0, 1], vec![2, 3], vec![4, 5]];
        let mut survivors = Survivors::new(6, FailureDomains { groups, steps: 10 });
        survivors.met();
        survivors
    }

    #[test]
    fn a_step_that_one_holds_final_is_final() {
        for (at, from) in [([(4, 4); 4], 4), ([(4, 5); 4], 4), ([(4, 5), (5, 5), (4, 5), (5, 6)], 5)] {
            let mut survivors = at_work();
            assert_eq!(survivors.lose(3, died(3)).unwrap(), [2, 3]);
            for (pe, (settled, complete)) in [0, 1, 4, 5].into_iter().zip(at) {
                assert!(survivors.decide().unwrap().is_none());
                survivors.stop(pe, &stopped(settled, complete)).unwrap();
            }
            let (continuation, cause) = survivors.decide().unwrap().unwrap();
            assert_eq!(continuation, Continuation { lost: vec![2, 3], from });
            assert!(cause.to_string().starts_with("PE 3 was killed"));
            assert!(survivors.decide().unwrap().is_none());
        }
    }

    #[test]
    fn another_loss_meanwhile_is_one_of_the_same() {
        let mut survivors = at_work();
        survivors.lose(0, died(0)).unwrap();
        survivors.stop(2, &stopped(7, 7)).unwrap();
        survivors.lose(2, died(2)).unwrap();
        survivors.stop(4, &stopped(6, 7)).unwrap();
        survivors.stop(5, &stopped(6, 7)).unwrap();
        assert_eq!(survivors.decide().unwrap().unwrap().0, Continuation { lost: vec![0, 1, 2, 3], from: 6 });
        // Losing the last group fails the job.
        survivors.met();
        assert!(survivors.lose(5, died(5)).unwrap_err().to_string().starts_with("PE 5"));
    }

    #[test]
    fn what_cannot_go_on_fails_with_its_cause() {
        let cause = |error: LaunchError| error.to_string();
        // The job fails in three cases: without groups, before the PEs have created a world, and after all steps are final.
        let mut survivors = Survivors::new(2, FailureDomains::default());
        survivors.met();
        assert!(cause(survivors.lose(1, died(1)).unwrap_err()).starts_with("PE 1"));
        let mut survivors = Survivors::new(2, FailureDomains { groups: vec![vec![0], vec![1]], steps: 3 });
        assert!(cause(survivors.lose(1, died(1)).unwrap_err()).starts_with("PE 1"));
        survivors.met();
        survivors.finish();
        assert!(cause(survivors.lose(1, died(1)).unwrap_err()).starts_with("PE 1"));
        // The job fails after a loss in two cases: a PE reports that all steps are final, or the stopped PEs have done all steps.
        let mut survivors = at_work();
        survivors.lose(1, died(1)).unwrap();
        survivors.finish();
        assert!(cause(survivors.decide().unwrap_err()).starts_with("PE 1"));
        let mut survivors = at_work();
        survivors.lose(1, died(1)).unwrap();
        for pe in 2..6 {
            survivors.stop(pe, &stopped(9 + u64::from(pe == 2), 10)).unwrap();
        }
        assert!(cause(survivors.decide().unwrap_err()).starts_with("PE 1"));
    }

    #[test]
    fn invalid_stops_are_refused() {
        let mut survivors = at_work();
        assert!(survivors.stop(1, &stopped(1, 1)).is_err());
        survivors.lose(3, died(3)).unwrap();
        for body in [&stopped(3, 5)[..], &stopped(4, 3), &[0; 15], b""] {
            assert!(survivors.stop(1, body).is_err());
        }
        assert!(survivors.stop(1, &stopped(1, 1)).is_ok() && survivors.has_stopped(1) && survivors.is_lost(2));
    }
}
