//! Simulated annealing (Kirkpatrick, Gelatt and Vecchi 1983), for either objective.
//!
//! Most changes leave the maximum over groups unchanged. A chain therefore sets a target below the best objective so far and minimises the excess over it, summed
//! over the devices (as graphs are coloured with a given number of colours by annealing the conflicts: Johnson, Aragon, McGeoch and Schevon 1991).
//!
//! Effort is counted in links examined, not in time, and seeds are fixed: the same input gives the same plan on every machine.

use std::sync::{Mutex, PoisonError};

use aristos_balance::Random;

/// Number of steps between updates of temperature and target.
const SET_EVERY: u64 = 64;
/// A forgetful chain records no answer before this share of its budget.
const FORGOTTEN: u64 = 10;
/// Relative improvement below which two objectives count as equal.
const EQUAL: f64 = 1e-12;

/// A grouping that a chain changes step by step.
pub(crate) trait Annealed {
    /// A copy of the grouping.
    type Answer: Send;

    /// Number of links examined.
    fn ops(&self) -> u64;

    /// Sets the target for a spent share of the budget and a best objective. Returns the temperature, ms.
    fn set_target(&mut self, progress: f64, best_ms: f64) -> f64;

    /// Excess over the target, summed over all devices, ms.
    fn excess_ms(&self) -> f64;

    /// Proposes a random change and makes it unless the excess would be above `most_ms`. Returns whether it did.
    fn change(&mut self, random: &mut Random, most_ms: f64) -> bool;

    /// Counts the cost of a proposal, accepted or not.
    fn count_proposal(&mut self);

    /// Returns the objective, ms, if the grouping is valid and below `limit_ms`.
    fn objective_below(&mut self, limit_ms: f64) -> Option<f64>;

    /// Copies the grouping as the best one.
    fn answer(&mut self) -> Self::Answer;
}

/// A chain of annealing that can be stopped and continued.
pub(crate) struct Chain<S: Annealed> {
    state: S,
    budget: u64,
    /// Whether the start is excluded as an answer.
    forgetful: bool,
    best_ms: f64,
    answer: Option<S::Answer>,
    temperature: f64,
    steps: u64,
    random: Random,
}

impl<S: Annealed> Chain<S> {
    /// A chain that examines `budget` links, from a start whose objective is `start_ms`, infinite where the start is invalid.
    pub fn new(state: S, start_ms: f64, forgetful: bool, budget: u64, random: Random) -> Self {
        Chain { state, budget, forgetful, best_ms: start_ms, answer: None, temperature: 0.0, steps: 0, random }
    }

    /// The best objective, ms; the start's until a grouping is found.
    pub fn best_ms(&self) -> f64 {
        self.best_ms
    }

    /// The best grouping; `None` where no valid one was better than the start, or, of a forgetful chain, none was recorded.
    pub fn into_answer(self) -> Option<S::Answer> {
        self.answer
    }

    /// Continues until this share of the budget is spent.
    pub fn advance(&mut self, exponential: &[f64], share: f64) {
        let end = (self.budget as f64 * share) as u64;
        while self.state.ops() < end {
            if self.steps.is_multiple_of(SET_EVERY) {
                let progress = self.state.ops() as f64 / self.budget as f64;
                self.temperature = self.state.set_target(progress, self.best_ms);
            }
            self.steps += 1;
            self.state.count_proposal();
            // Drawn first, so that the evaluation of a proposal can stop early.
            let most_ms = self.state.excess_ms() + self.temperature * exponential[self.random.below(exponential.len())];
            if !self.state.change(&mut self.random, most_ms) {
                continue;
            }
            let limit_ms = match self.forgetful && self.answer.is_none() {
                true if self.state.ops() < self.budget / FORGOTTEN => continue,
                true => f64::INFINITY,
                false => self.best_ms * (1.0 - EQUAL),
            };
            if let Some(ms) = self.state.objective_below(limit_ms) {
                self.best_ms = ms;
                self.answer = Some(self.state.answer());
            }
        }
    }
}

/// Returns a table of the exponential distribution, the quantiles at interval midpoints. A logarithm costs more than most proposals.
pub(crate) fn exponential() -> Vec<f64> {
    const VALUES: usize = 1024;
    (0..VALUES).map(|at| -((at as f64 + 0.5) / VALUES as f64).ln()).collect()
}

/// Interpolates geometrically from `first` to `last`.
pub(crate) fn between((first, last): (f64, f64), progress: f64) -> f64 {
    first * (last / first).powf(progress)
}

/// Maximum number of threads.
const MOST_THREADS: usize = 8;

/// Maps in order, in several threads if `worth_it`.
pub(crate) fn in_threads<T: Send, R: Send>(all: Vec<T>, worth_it: bool, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    if !worth_it || all.len() < 2 {
        return all.into_iter().map(work).collect();
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS).min(all.len());
    let mut results: Vec<Option<R>> = all.iter().map(|_| None).collect();
    let queue = Mutex::new(all.into_iter().zip(&mut results));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let take_all = || {
        while let Some((one, result)) = next() {
            *result = Some(work(one));
        }
    };
    std::thread::scope(|scope| {
        // If no thread can be started, this one does all the work.
        (1..threads).for_each(|_| drop(std::thread::Builder::new().spawn_scoped(scope, take_all)));
        take_all();
    });
    results.into_iter().flatten().collect()
}
