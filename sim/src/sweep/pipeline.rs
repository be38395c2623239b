//! The schedule of a pipeline: 1F1B as in PipeDream.
//!
//! In a timestep each stage runs the forward or the backward of at most one microbatch. If both a forward and a backward are ready, it
//! alternates between them.

use std::collections::VecDeque;

/// Direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
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
    /// The direction.
    pub way: Direction,
    /// The microbatch.
    pub microbatch: usize,
}

/// The slots of each timestep, ascending by stage. With `at_once`, as in the published program, a later stage may run a microbatch in the
/// timestep in which the earlier stage ran it; otherwise only from the next timestep on.
pub fn timesteps(stages: usize, microbatches: usize, at_once: bool) -> Vec<Vec<Slot>> {
    let mut ready = vec![[VecDeque::new(), VecDeque::new()]; stages];
    let mut last = vec![Direction::Backward; stages];
    ready[0][0].extend(0..microbatches);
    // Number of stages that have received work. The published program skips a stage in the timestep in which it receives its first work.
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
                Direction::Forward => Direction::Backward,
                Direction::Backward => Direction::Forward,
            };
            let way = match (first, queues[0].is_empty(), queues[1].is_empty()) {
                (_, true, true) => continue,
                (Direction::Forward, false, _) | (Direction::Backward, _, true) => Direction::Forward,
                _ => Direction::Backward,
            };
            let Some(microbatch) = queues[way as usize].pop_front() else { continue };
            last[stage] = way;
            left -= 1;
            step.push(Slot { stage, way, microbatch });
            let next = match way {
                Direction::Forward if stage + 1 < stages => Some((stage + 1, Direction::Forward)),
                Direction::Forward => Some((stage, Direction::Backward)),
                Direction::Backward => stage.checked_sub(1).map(|stage| (stage, Direction::Backward)),
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

    /// For each stage the list of its timesteps, such as "F0" (forward of microbatch 0) or "B1"; "-" if the stage is idle.
    fn text(stages: usize, microbatches: usize, at_once: bool) -> Vec<String> {
        let cell = |step: &Vec<Slot>, stage: usize| {
            let slot = step.iter().find(|slot| slot.stage == stage);
            slot.map_or("-".to_string(), |slot| {
                format!("{}{}", if slot.way == Direction::Forward { "F" } else { "B" }, slot.microbatch)
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
    fn every_slot_runs_once_after_its_inputs() {
        for (stages, microbatches) in [(1, 1), (1, 4), (2, 1), (3, 5), (4, 8), (16, 32), (5, 2)] {
            for at_once in [false, true] {
                let mut done = std::collections::HashSet::new();
                for step in timesteps(stages, microbatches, at_once) {
                    let before = done.clone();
                    assert!(step.windows(2).all(|pair| pair[0].stage < pair[1].stage));
                    for Slot { stage, way, microbatch } in step {
                        let needs = match way {
                            Direction::Forward => stage.checked_sub(1).map(|stage| (stage, 0, microbatch)),
                            Direction::Backward if stage + 1 == stages => Some((stage, 0, microbatch)),
                            Direction::Backward => Some((stage + 1, 1, microbatch)),
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
