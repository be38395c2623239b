//! Selects the inputs of a long random test: all of them with `ARISTOS_TEST_DEEP`, otherwise a part that depends on
//! `ARISTOS_TEST_SEED`, so that each change is tested with different inputs (`.ci/run`).

use std::env;
use std::thread;

/// A part of `0..all`. If the test that holds it panics, it prints the command that repeats the test.
pub struct Sample {
    all: u64,
    part: u64,
    seed: u64,
}

impl Sample {
    /// `part` consecutive numbers of `0..all`, or all of them.
    pub fn new(part: u64, all: u64) -> Sample {
        let seed = env::var("ARISTOS_TEST_SEED").map_or(0, |text| {
            text.parse().unwrap_or_else(|_| panic!("ARISTOS_TEST_SEED is {text:?}, expected a number below 2^64"))
        });
        let deep = env::var_os("ARISTOS_TEST_DEEP").is_some_and(|value| !value.is_empty());
        Sample { all, part: if deep { all } else { part.min(all) }, seed }
    }

    /// The number of inputs.
    #[allow(dead_code)] // Not all tests use it.
    pub fn len(&self) -> u64 {
        self.part
    }

    /// The numbers; consecutive seeds have consecutive parts.
    pub fn numbers(&self) -> impl Iterator<Item = u64> + use<> {
        let (all, first) = (self.all, (u128::from(self.seed) * u128::from(self.part) % u128::from(self.all)) as u64);
        (0..self.part).map(move |i| (first + i) % all)
    }
}

impl Drop for Sample {
    fn drop(&mut self) {
        if thread::panicking() {
            let deep = if self.part == self.all { "ARISTOS_TEST_DEEP=1 " } else { "" };
            let program = env::current_exe().unwrap_or_default();
            let name = program.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let target = name.rsplit_once('-').map_or(&*name, |(target, _)| target);
            let (seed, thread) = (self.seed, thread::current());
            let test = thread.name().filter(|name| *name != "main").unwrap_or_default();
            eprintln!("repeat it: {deep}ARISTOS_TEST_SEED={seed} cargo test --release --test {target} {test}");
        }
    }
}
