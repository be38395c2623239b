//! Helpers shared by the tests of the benchmark commands.
#![allow(dead_code)] // Each test uses a part.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Runs the command to its end.
pub fn aristos(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_aristos")).args(args).output().expect("the binary was built for this test")
}

/// Checks that the command is refused (exit code 1, empty standard output, one line of error); returns the line.
pub fn refusal(args: &[&str]) -> String {
    let output = aristos(args);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim_end().strip_prefix("aristos: ").unwrap_or_else(|| panic!("{text}")).to_string()
}

/// The header and the rows of a CSV file, by cell.
pub fn rows(path: &Path) -> (Vec<String>, Vec<Vec<String>>) {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').map(str::to_string).collect::<Vec<_>>());
    (lines.next().expect("a heading"), lines.collect())
}

/// Fails the test unless the file is a PNG with the feature `png`, and absent without it.
#[track_caller]
pub fn assert_png_if_built(path: &Path) {
    let is_png = fs::read(path).is_ok_and(|bytes| bytes.starts_with(b"\x89PNG\r\n\x1a\n") && bytes.len() > 1000);
    assert_eq!((path.exists(), is_png), (cfg!(feature = "png"), cfg!(feature = "png")), "{}", path.display());
}

/// Runs the command and kills one PE. Checks that the command fails and leaves no process; returns its standard error.
pub fn kill_a_pe(args: &[&str], pe: usize) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    let mut child = command.args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let name = format!("aristos-pe{pe}");
    let limit = Instant::now() + Duration::from_secs(120);
    let children = || -> Vec<i32> {
        let path = format!("/proc/{0}/task/{0}/children", child.id());
        let text = fs::read_to_string(path).unwrap_or_default();
        text.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
    };
    let victim = loop {
        let named = |pid: &i32| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
        if let Some(pid) = children().into_iter().find(named) {
            break pid;
        }
        assert!(Instant::now() < limit, "{name} does not come");
        std::thread::sleep(Duration::from_millis(2));
    };
    let pes = children();
    // The PE sets its name shortly before it measures.
    std::thread::sleep(Duration::from_millis(100));
    rustix::process::kill_process(rustix::process::Pid::from_raw(victim).unwrap(), rustix::process::Signal::KILL)
        .unwrap();
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{error}");
    for pid in pes {
        let gone = !Path::new(&format!("/proc/{pid}")).exists();
        assert!(gone, "process {pid} is left");
    }
    error
}
