//! A PE that is killed or stopped while experts move.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::binary::{MOVING, Outcome, Running, aristos_run, names_in, start};

/// Starts a job whose files all go to `dir`; returns once `pe` begins to move experts.
fn start_a_move(dir: &std::path::Path, pe: usize, more: &str) -> Running {
    let mut command = aristos_run(&format!("--pes 4 {MOVING} {more}"));
    for (flag, file) in [("--output", "o.safetensors"), ("--save-weights", "w.safetensors"), ("--trace", "t.json")] {
        command.arg(flag).arg(dir.join(file));
    }
    command.env("TMPDIR", dir).env("RUST_LOG", "aristos::run=info");
    let mut running = start(command);
    running.says(&format!("experts move pe={pe} "));
    running
}

/// Checks that the job failed and left `dir` empty; returns its last line.
fn failure(outcome: &Outcome, dir: &std::path::Path) -> String {
    assert!(outcome.status.code() == Some(1) && outcome.stdout.is_empty(), "{outcome:?}");
    assert_eq!(names_in(dir), [""; 0], "{outcome:?}");
    outcome.stderr.lines().last().unwrap_or_default().to_string()
}

#[test]
fn a_pe_that_is_killed_while_experts_move_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for victim in [2, 0] {
        let killed_in = || -> String {
            let mut running = start_a_move(dir.path(), victim, "");
            kill_process(running.pe(victim), Signal::KILL).unwrap();
            let killed = Instant::now();
            let outcome = running.end();
            assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
            let said = failure(&outcome, dir.path());
            let named = said.strip_prefix(&format!("aristos: PE {victim} was killed by signal 9 (SIGKILL) in phase "));
            named.unwrap_or_else(|| panic!("{outcome:?}")).to_string()
        };
        // On a busy machine the PE may be killed between its log line and the move; then try again.
        assert!((0..5).any(|_| killed_in() == "move"), "PE {victim} was killed, and never in a move");
    }
}

#[test]
fn a_pe_that_is_stopped_while_experts_move_is_named_by_those_that_wait_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut running = start_a_move(dir.path(), 1, "--timeout 2");
    kill_process(running.pe(1), Signal::STOP).unwrap();
    let stopped = Instant::now();
    let outcome = running.end();
    assert!(stopped.elapsed() < Duration::from_secs(10), "{:?}", stopped.elapsed());
    let said = failure(&outcome, dir.path());
    assert!(said.contains(" failed in phase move: ") && said.contains("s in phase move for PE 1: "), "{outcome:?}");
}
