//! Which inputs a long random test tries: with `ARISTOS_TEST_DEEP` all, otherwise a part that `ARISTOS_TEST_SEED` chooses, so that
//! each change is tried with others (`.ci/run`).

use std::env;
use std::thread;

/// A part of `0..all`. Where the test that holds it panics, it says how to repeat that.
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

    /// How many there are.
    #[allow(dead_code)] // Not everyone asks.
    pub fn len(&self) -> u64 {
        self.part
    }

    /// The numbers; those of the next seed follow on these.
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
