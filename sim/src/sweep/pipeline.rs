//! Which stage of a pipeline does what in which timestep: 1F1B as PipeDream has it.
//!
//! In a timestep each device runs at most one stage, forward or backward, of one microbatch; it alternates between them where both are ready.

use std::collections::VecDeque;

/// Forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// A stage's work on one microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The stage.
    pub stage: usize,
    /// Its way.
    pub way: Way,
    /// The microbatch.
    pub microbatch: usize,
}

/// The slots of each timestep, by stage ascending. `at_once`: what a stage makes ready may be run in the same timestep by a stage after it, as in
/// the published program; otherwise from the next timestep on.
pub fn timesteps(stages: usize, microbatches: usize, at_once: bool) -> Vec<Vec<Slot>> {
    let mut ready = vec![[VecDeque::new(), VecDeque::new()]; stages];
    let mut last = vec![Way::Backward; stages];
    ready[0][0].extend(0..microbatches);
    // Stages that have been ready for anything: in the published program the others are not looked at in the timestep that first makes them so.
    let mut known = 1;
    let mut steps = Vec::new();
    let mut left = 2 * stages * microbatches;
    while left > 0 {
        let mut step = Vec::new();
        let mut made_ready = Vec::new();
        let mut seen = known;
        for stage in 0..known {
            let queues = &mut ready[stage];
            let first = match last[stage] {
                Way::Forward => Way::Backward,
                Way::Backward => Way::Forward,
            };
            let way = match (first, queues[0].is_empty(), queues[1].is_empty()) {
                (_, true, true) => continue,
                (Way::Forward, false, _) | (Way::Backward, _, true) => Way::Forward,
                _ => Way::Backward,
            };
            let Some(microbatch) = queues[way as usize].pop_front() else { continue };
            last[stage] = way;
            left -= 1;
            step.push(Slot { stage, way, microbatch });
            let next = match way {
                Way::Forward if stage + 1 < stages => Some((stage + 1, Way::Forward)),
                Way::Forward => Some((stage, Way::Backward)),
                Way::Backward => stage.checked_sub(1).map(|stage| (stage, Way::Backward)),
            };
            if let Some((next, way)) = next {
                seen = seen.max(next + 1);
                match at_once {
                    true => ready[next][way as usize].push_back(microbatch),
                    false => made_ready.push((next, way, microbatch)),
                }
            }
        }
        known = seen;
        for (stage, way, microbatch) in made_ready {
            ready[stage][way as usize].push_back(microbatch);
        }
        steps.push(step);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "F0" or "B1" of each stage in each timestep; "-" where it does nothing.
    fn text(stages: usize, microbatches: usize, at_once: bool) -> Vec<String> {
        let cell = |step: &Vec<Slot>, stage: usize| {
            let slot = step.iter().find(|slot| slot.stage == stage);
            slot.map_or("-".to_string(), |slot| {
                format!("{}{}", if slot.way == Way::Forward { "F" } else { "B" }, slot.microbatch)
            })
        };
        let steps = timesteps(stages, microbatches, at_once);
        (0..stages).map(|stage| steps.iter().map(|step| cell(step, stage)).collect::<Vec<_>>().join(" ")).collect()
    }

    #[test]
    fn two_stages_by_hand() {
        for at_once in [false, true] {
            assert_eq!(text(2, 2, at_once), ["F0 F1 - B0 - B1", "- F0 B0 F1 B1 -"]);
        }
        assert_eq!(text(1, 2, false), ["F0 B0 F1 B1"]);
    }

    #[test]
    fn every_slot_is_run_once_and_after_what_it_needs() {
        for (stages, microbatches) in [(1, 1), (1, 4), (2, 1), (3, 5), (4, 8), (16, 32), (5, 2)] {
            for at_once in [false, true] {
                let mut done = std::collections::HashSet::new();
                for step in timesteps(stages, microbatches, at_once) {
                    let before = done.clone();
                    assert!(step.windows(2).all(|pair| pair[0].stage < pair[1].stage));
                    for Slot { stage, way, microbatch } in step {
                        let needs = match way {
                            Way::Forward => stage.checked_sub(1).map(|stage| (stage, 0, microbatch)),
                            Way::Backward if stage + 1 == stages => Some((stage, 0, microbatch)),
                            Way::Backward => Some((stage + 1, 1, microbatch)),
                        };
                        let done_by_now = if at_once { &done } else { &before };
                        assert!(needs.is_none_or(|needs| done_by_now.contains(&needs)));
                        assert!(done.insert((stage, way as i32, microbatch)));
                    }
                }
                assert_eq!(done.len(), 2 * stages * microbatches);
            }
        }
    }
}
