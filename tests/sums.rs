//! A test that cannot run counts as skipped, not as passed: `tests/skip` and `tools/sums`.

mod skip;

use std::env;
use std::io::Write;
use std::process::{Command, Stdio};

fn sums(text: &[u8]) -> String {
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tools/sums"));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("tools/sums can be started");
    child.stdin.take().unwrap().write_all(text).unwrap();
    String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap()
}

/// Runs this program with these harness arguments and returns both streams merged, as in `tools/test`.
fn harness(args: &[&str]) -> Vec<u8> {
    let mut command = Command::new("sh");
    command.args(["-c", "exec \"$0\" \"$@\" 2>&1"]).arg(env::current_exe().unwrap()).args(args);
    command.output().unwrap().stdout
}

#[test]
#[ignore = "run by the others here"]
fn inner_passes() {}

#[test]
#[ignore = "run by the others here"]
fn inner_cannot_run() {
    skip::skip("for the sake of the sums");
}

#[test]
#[ignore = "run by the others here"]
fn inner_fails() {
    panic!("as it should");
}

#[test]
fn skipped_test_does_not_count_as_passed() {
    for threads in ["--test-threads=1", "--test-threads=3"] {
        let text = harness(&["inner_", "--ignored", threads]);
        let shown = String::from_utf8_lossy(&text);
        assert!(
            shown.contains("skipped: tests/sums.rs: ") && shown.contains(": for the sake of the sums\n"),
            "{shown}"
        );
        assert_eq!(sums(&text), "1 passed, 1 failed, 1 skipped\n", "{shown}");
    }
}

#[test]
fn sums_cover_all_programs() {
    let ours = b"skipped: tests/mpi.rs: main: why\n5 passed, 0 failed, 1 skipped\n";
    assert_eq!(sums(ours), "5 passed, 0 failed, 1 skipped\n", "its line has counted it already");
    let all = [&harness(&["inner_", "--ignored"])[..], ours, &harness(&["inner_passes", "--ignored"])].concat();
    assert_eq!(sums(&all), "7 passed, 1 failed, 2 skipped\n");
    // A program that ended before its summary.
    assert_eq!(sums(b"skipped: tests/x.rs: x: why\n"), "0 passed, 0 failed, 1 skipped\n");
    assert_eq!(sums(b""), "0 passed, 0 failed, 0 skipped\n");
}
