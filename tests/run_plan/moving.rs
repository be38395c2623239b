//! A PE that ends, or stands still, while experts move.

use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::binary::{MOVING, Outcome, Running, aristos_run, names_in, start};

/// A job that is to leave nothing in `dir`, as its experts begin to move.
fn start_a_move(dir: &std::path::Path, more: &str) -> Running {
    let mut command = aristos_run(&format!("--pes 4 {MOVING} {more}"));
    for (flag, file) in [("--output", "o.safetensors"), ("--save-weights", "w.safetensors"), ("--trace", "t.json")] {
        command.arg(flag).arg(dir.join(file));
    }
    command.env("TMPDIR", dir).env("RUST_LOG", "aristos::run=info");
    let mut running = start(command);
    running.says("experts move");
    running
}

/// The last line of a job that failed and left nothing in `dir`.
fn failure(outcome: &Outcome, dir: &std::path::Path) -> String {
    assert!(outcome.status.code() == Some(1) && outcome.stdout.is_empty(), "{outcome:?}");
    assert_eq!(names_in(dir), [""; 0], "{outcome:?}");
    outcome.stderr.lines().last().unwrap_or_default().to_string()
}

#[test]
fn a_pe_that_is_killed_while_experts_move_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for victim in [2, 0] {
        let mut running = start_a_move(dir.path(), "");
        kill_process(running.pe(victim), Signal::KILL).unwrap();
        let killed = Instant::now();
        let outcome = running.end();
        assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
        let said = failure(&outcome, dir.path());
        assert_eq!(said, format!("aristos: PE {victim} was killed by signal 9 (SIGKILL) in phase move"), "{outcome:?}");
    }
}

#[test]
fn a_pe_that_is_stopped_while_experts_move_is_named_by_those_that_wait_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut running = start_a_move(dir.path(), "--timeout 2");
    kill_process(running.pe(1), Signal::STOP).unwrap();
    let stopped = Instant::now();
    let outcome = running.end();
    assert!(stopped.elapsed() < Duration::from_secs(10), "{:?}", stopped.elapsed());
    let said = failure(&outcome, dir.path());
    assert!(said.contains(" failed in phase move: ") && said.contains("s in phase move for PE 1: "), "{outcome:?}");
}
