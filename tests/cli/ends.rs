//! How a run ends after a process is killed, stopped or interrupted.

use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Signal, kill_process};

use crate::binary::{Running, aristos_run, names_in, start};

/// Maximum time from the cause of a job's end until all its processes have ended.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Starts a run of several hours that writes its results to `out`.
fn long_run(pes: usize, more: &str, out: &std::path::Path) -> Running {
    let mut command = aristos_run(&format!("--pes {pes} --tokens 64 --hidden 32 --intermediate 32 --steps 100000000"));
    command.args(more.split_whitespace()).arg("--output").arg(out.join("out.safetensors"));
    start(command)
}

#[test]
fn pe_killed_at_a_random_moment_is_reported() {
    let mut random = ChaCha8Rng::seed_from_u64(50);
    let out = tempfile::tempdir().unwrap();
    for round in 0..50 {
        let pes = random.random_range(2..=4);
        let victim = random.random_range(0..pes);
        let mode = ["", "--mode bulk"][round % 2];
        // Half of them while the PEs start, half while they work.
        let delay = Duration::from_micros(random.random_range(0..if round % 4 < 2 { 20_000 } else { 300_000 }));
        let mut running = long_run(pes, mode, out.path());
        let pid = running.pe(victim);
        std::thread::sleep(delay);
        kill_process(pid, Signal::KILL).unwrap();
        let killed = Instant::now();
        let outcome = running.end();
        assert!(killed.elapsed() < END_LIMIT, "round {round}: {:?}", killed.elapsed());
        outcome.refused(&[&format!("aristos: PE {victim} was killed by signal 9 (SIGKILL) in phase ")]);
        assert_eq!(names_in(out.path()), [""; 0], "round {round}");
    }
}

#[test]
fn pes_end_when_the_supervisor_is_killed() {
    let mut random = ChaCha8Rng::seed_from_u64(51);
    let out = tempfile::tempdir().unwrap();
    for round in 0..10 {
        let mut running = long_run(3, "", out.path());
        if round > 0 {
            running.pe(random.random_range(0..3));
            std::thread::sleep(Duration::from_micros(random.random_range(0..200_000)));
        }
        running.signal(Signal::KILL);
        // Also checks that the PEs are gone within 2 s.
        running.end();
        assert_eq!(names_in(out.path()), [""; 0], "round {round}");
    }
}

#[test]
fn stopped_pe_is_reported_by_its_waiters() {
    let out = tempfile::tempdir().unwrap();
    // With more than two PEs, some wait for PEs that wait for the stopped one; the error must name the stopped one.
    for (pes, victim, mode) in [(2, 0, "pipelined"), (2, 1, "bulk"), (4, 1, "pipelined"), (4, 3, "bulk")] {
        let mut running = long_run(pes, &format!("--timeout 2 --mode {mode}"), out.path());
        let pid = running.pe(victim);
        std::thread::sleep(Duration::from_millis(300));
        kill_process(pid, Signal::STOP).unwrap();
        let stopped = Instant::now();
        let outcome = running.end();
        assert!(stopped.elapsed() < Duration::from_secs(2) + END_LIMIT, "{:?}", stopped.elapsed());
        let named = format!(" for PE {victim}: ");
        outcome.refused(&[&named, " waited 2"]);
        assert_eq!(names_in(out.path()), [""; 0]);
    }
}

/// With `--timeout 1`: the supervisor's limit for a PE without a heartbeat, plus time to end the job.
const STALL_LIMIT: Duration = Duration::from_secs(3 + 2);

#[test]
fn pe_stalled_in_a_write_is_reported_without_a_waiter() {
    let out = tempfile::tempdir().unwrap();
    let mut command =
        aristos_run("--pes 2 --tokens 32768 --hidden 2048 --intermediate 16 --experts 2 --top-k 1 --timeout 1");
    command.args(["--forward-only", "--output"]).arg(out.path().join("out.safetensors"));
    let mut running = start(command);
    let pid = running.pe(0);
    // The results have 128 MB; the PE writes only a few messages before them.
    let written = || -> u64 {
        let io = std::fs::read_to_string(format!("/proc/{}/io", pid.as_raw_pid())).unwrap();
        io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap().parse().unwrap()
    };
    while written() < 1 << 20 {}
    kill_process(pid, Signal::STOP).unwrap();
    let stopped = Instant::now();
    let outcome = running.end();
    assert!(stopped.elapsed() < STALL_LIMIT, "{:?}", stopped.elapsed());
    outcome.refused(&["PE 0 stalled in phase writing results: for 3 s it used no processor time"]);
    assert_eq!(names_in(out.path()), [""; 0]);
}

#[test]
fn pe_stopped_at_its_start_is_reported_within_the_limit() {
    let out = tempfile::tempdir().unwrap();
    // Includes the PEs of the probe that precedes the layer.
    for (victim, more) in [(0, ""), (1, ""), (2, ""), (0, "--plan auto"), (1, "--plan auto")] {
        let mut running = long_run(3, &format!("--timeout 1 {more}"), out.path());
        kill_process(running.pe(victim), Signal::STOP).unwrap();
        let stopped = Instant::now();
        let outcome = running.end();
        // A busy machine takes some seconds more; a wait without the time limit takes a minute.
        assert!(stopped.elapsed() < 4 * STALL_LIMIT, "{:?}", stopped.elapsed());
        outcome.refused(&[&format!("PE {victim}")]);
        assert_eq!(names_in(out.path()), [""; 0]);
    }
}

/// If a terminal or a scheduler stops the whole job, no PE counts as stalled.
#[test]
fn job_stopped_as_a_whole_continues() {
    let out = tempfile::tempdir().unwrap();
    // A single PE never waits, so it has no time-out of its own.
    let mut running = long_run(1, "--timeout 1", out.path());
    let pe = running.pe(0);
    std::thread::sleep(Duration::from_millis(300));
    let all = |signal| {
        running.signal(signal);
        kill_process(pe, signal).unwrap();
    };
    all(Signal::STOP);
    std::thread::sleep(Duration::from_secs(4));
    all(Signal::CONT);
    std::thread::sleep(Duration::from_secs(1));
    running.signal(Signal::TERM);
    running.end().refused(&["interrupted by SIGTERM"]);
}

#[test]
fn signal_determines_the_exit_code() {
    let out = tempfile::tempdir().unwrap();
    for (signal, name, code) in
        [(Signal::INT, "SIGINT", 130), (Signal::TERM, "SIGTERM", 143), (Signal::HUP, "SIGHUP", 129)]
    {
        // Under nohup, or in the background of a script, some signals are ignored in this process and in the command.
        if ignored_here(signal) {
            println!("{name} is ignored in this process: not tested");
            continue;
        }
        let mut running = long_run(2, "", out.path());
        running.pe(1);
        std::thread::sleep(Duration::from_millis(100));
        running.signal(signal);
        let sent = Instant::now();
        let outcome = running.end();
        assert!(sent.elapsed() < END_LIMIT, "{:?}", sent.elapsed());
        assert_eq!(outcome.status.code(), Some(code), "{outcome:?}");
        outcome.refused(&[&format!("aristos: interrupted by {name}")]);
        assert_eq!(names_in(out.path()), [""; 0]);
    }
}

fn ignored_here(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    u64::from_str_radix(mask, 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}
