//! The host's part of `aristos bench p2p --transport nvshmem`, with two PE processes. The fake driver advances time by a
//! millisecond per event.

use std::process::{Command, Output};

use crate::{Fakes, assert_says};

/// A few samples of two sizes.
const FEW: [&str; 12] =
    ["bench", "p2p", "--transport", "nvshmem", "--iterations", "3", "--warmup", "1", "--min", "16", "--max", "64"];

fn bench(fakes: &Fakes, args: &[&str], env: &[(&str, &str)]) -> Output {
    // The time-out turns a hang into a failure.
    let mut command = fakes.add_to(Command::new("timeout"));
    command.arg("60").arg(env!("CARGO_BIN_EXE_aristos")).args(FEW).args(args);
    command.env("FAKE_PUTS", "job").env("FAKE_TICK", "1").env_remove("NCCL_SOCKET_IFNAME");
    command.envs(env.iter().copied()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the benchmark; returns the rows, each as "measure op scope bytes batch p50_us round_trip_us", and standard error.
fn rows(fakes: &Fakes, args: &[&str], env: &[(&str, &str)]) -> (Vec<String>, String) {
    let csv = fakes.log().with_extension("csv");
    let output = bench(fakes, &[args, &["--csv", csv.to_str().unwrap()]].concat(), env);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = std::fs::read_to_string(csv).unwrap();
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(',').collect();
        [2, 3, 4, 5, 7, 8, 12].map(|cell| cells[cell]).join(" ").trim_end().to_string()
    };
    (text.lines().skip(1).map(row).collect(), stderr(&output))
}

/// Runs the benchmark, which must fail with one line and no other output; returns the line.
#[track_caller]
fn refusal(fakes: &Fakes, args: &[&str], env: &[(&str, &str)]) -> String {
    let output = bench(fakes, args, env);
    // Except the warning about times without MPS.
    let text: String = stderr(&output).split_inclusive('\n').filter(|line| !line.contains(" WARN ")).collect();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0), "{text}");
    assert!(text.starts_with("aristos: ") && text.lines().count() == 1, "{text}");
    text
}

/// The log lines of one PE, without its number.
fn log_of(fakes: &Fakes, pe: usize) -> Vec<String> {
    let text = std::fs::read_to_string(fakes.log()).unwrap();
    assert!(!text.contains("wrong"), "{text}");
    let start = format!("PE {pe} ");
    text.lines().filter_map(|line| line.strip_prefix(&start)).map(str::to_string).collect()
}

#[test]
fn stream_operations_are_enqueued_in_order_and_timed() {
    let fakes = Fakes::new(&[], &[]);
    let ops = ["--scope", "stream", "--op", "put", "--op", "get", "--op", "put-signal"];
    let (rows, warnings) = rows(&fakes, &ops, &[]);
    assert_eq!(warnings, "");
    // Batches of 16, and of 64 for bandwidth, take a millisecond each.
    let want = [
        "latency put stream 16 16 62.5000",
        "latency put stream 64 16 62.5000",
        "latency get stream 16 16 62.5000",
        "latency get stream 64 16 62.5000",
        "latency put-signal stream 16 16 31.2500 62.5000",
        "latency put-signal stream 64 16 31.2500 62.5000",
        "bandwidth put stream 16 64 15.6250",
        "bandwidth put stream 64 64 15.6250",
        "bandwidth get stream 16 64 15.6250",
        "bandwidth get stream 64 64 15.6250",
    ];
    assert_eq!(rows, want);
    // Four samples, plus one batch whenever the host has waited; the three bandwidth samples are enqueued together.
    let (first, second) = (log_of(&fakes, 0), log_of(&fakes, 1));
    let count = |of: &[String], what: &str| of.iter().filter(|line| line.starts_with(what)).count();
    for what in ["puts 16 bytes, PE 1", "puts 64 bytes, PE 1", "gets 16 bytes, PE 1", "gets 64 bytes, PE 1"] {
        assert_eq!(count(&first, what), 5 * 16 + 6 * 64, "{what}");
    }
    let turns: Vec<_> =
        first.iter().filter(|line| line.starts_with("signals 16") || line.starts_with("waits")).collect();
    assert_eq!(turns[..3], ["signals 16 bytes, PE 1", "waits for 8 bytes, PE 1", "signals 16 bytes, PE 1"]);
    assert_eq!(second[..2], ["waits for 8 bytes, PE 0", "signals 16 bytes, PE 0"], "{:?}", &second[..4]);
    for (of, what) in [(&first, "waits"), (&first, "signals"), (&second, "waits"), (&second, "signals")] {
        assert_eq!(count(of, what), 2 * 5 * 16, "{what}");
    }
    assert_eq!(count(&second, "puts") + count(&second, "gets"), 0, "one PE alone puts and gets");
}

/// Two processes connected by TCP, as on two hosts: the unique id is sent over TCP, and NVSHMEM is not confined to one host.
#[test]
fn pes_of_several_hosts_bootstrap_over_tcp() {
    let fakes = Fakes::new(&[], &[]);
    let port = std::net::TcpListener::bind("localhost:0").unwrap().local_addr().unwrap().port().to_string();
    let place = |rank: &str| ["--ranks", "2", "--rank", rank, "--rendezvous"].map(str::to_string);
    let ops = ["--scope", "stream", "--op", "put", "--json"];
    let pe = |rank: &str| {
        let mut command = fakes.add_to(Command::new("timeout"));
        command.arg("60").arg(env!("CARGO_BIN_EXE_aristos")).args(FEW).args(ops).args(place(rank));
        command.arg(format!("localhost:{port}")).env("FAKE_PUTS", format!("{rank} 2 -1 -1")).env("FAKE_TICK", "1");
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
    };
    let outputs = [pe("0"), pe("1")].map(|pe| pe.wait_with_output().unwrap());
    assert!(outputs.iter().all(|output| output.status.success()), "{outputs:?}");
    assert!(outputs[1].stdout.is_empty() && outputs[1].stderr.is_empty(), "{outputs:?}");
    let report: serde_json::Value = serde_json::from_slice(&outputs[0].stdout).unwrap();
    assert_eq!(report["rows"].as_array().unwrap().len(), 4, "{report}");
    assert_eq!(log_of(&fakes, 0).iter().filter(|line| line.starts_with("puts")).count(), 2 * (5 * 16 + 6 * 64));
}

#[test]
fn nccl_sends_match_receives() {
    let fakes = Fakes::new(&[], &[]);
    let (rows, warnings) = rows(&fakes, &["--op", "send-recv"], &[]);
    assert_eq!(warnings, "");
    let want = [
        "latency send-recv stream 16 16 31.2500 62.5000",
        "latency send-recv stream 64 16 31.2500 62.5000",
        "bandwidth send-recv stream 16 64 15.6250",
        "bandwidth send-recv stream 64 64 15.6250",
    ];
    assert_eq!(rows, want);
    let (first, second) = (log_of(&fakes, 0), log_of(&fakes, 1));
    let of = |log: &[String], what: &str| -> Vec<String> {
        log.iter()
            .filter_map(|line| line.strip_prefix(what))
            .map(|line| line[..line.rfind("PE").unwrap()].to_string())
            .collect()
    };
    for (sender, receiver) in [(&first, &second), (&second, &first)] {
        let sent = of(sender, "sends");
        assert_eq!(sent, of(receiver, "receives"), "in the order that they are sent in");
        assert!(sent.len() > 2 * 5 * 16);
    }
    assert_eq!(first.last().map(String::as_str), Some("leaves 0 bytes, PE 1"));
    assert_eq!(second.last().map(String::as_str), Some("leaves 0 bytes, PE 0"));
    // The initial byte, and the first PE's batches.
    let grouped = first.iter().filter(|line| line.ends_with("in a group")).count();
    assert_eq!(grouped, 2 + 2 * 5 * 64, "{first:?}");
}

#[test]
fn unavailable_operations_are_left_out() {
    let fakes = Fakes::new(&[], &[]);
    let (all, warnings) = rows(&fakes, &[], &[]);
    assert_eq!(warnings, "");
    // put, get: 4 scopes, two measures; put-nbi: 3, and its issue; put-signal: 4; send-recv: two measures.
    assert_eq!(all.len(), 2 * (2 * 4 * 2 + 3 * 3 + 4 + 2), "{all:?}");
    assert!(all.contains(&"issue put-nbi warp 16 1 1.0000".to_string()), "{all:?}");
    assert!(all.contains(&"latency put-signal block 64 1 1.0000 2.0000".to_string()), "{all:?}");
    let (some, warnings) = rows(&fakes, &[], &[("FAKE_NCCL", "duplicate")]);
    assert_eq!(some, all.iter().filter(|row| !row.contains("send-recv")).cloned().collect::<Vec<_>>());
    assert_eq!(warnings.lines().count(), 1, "{warnings}");
    assert_says(
        &warnings,
        &["aristos: send-recv on scope stream is left out: ", "NCCL 2.27.3 answers 5", "Duplicate GPU detected"],
    );
    // PEs that share a device without MPS.
    let (some, warnings) = rows(&fakes, &["--op", "put-signal"], &[("FAKE_STATUS", "3")]);
    assert_eq!(some.len(), 2 * 3);
    assert_says(&warnings, &["aristos: put-signal on scope stream is left out: ", "without MPS"]);
}

#[test]
fn unavailable_requested_operation_is_an_error() {
    let fakes = Fakes::new(&[], &[]);
    let text = refusal(&fakes, &["--op", "send-recv"], &[("FAKE_NCCL", "duplicate")]);
    assert_says(&text, &["--op send-recv on --scope stream: cannot start NCCL: ", "Duplicate GPU detected"]);
    // A refusal on one PE is reported by all.
    let (rows, warnings) = rows(&fakes, &["--scope", "stream"], &[("FAKE_NCCL", "pe1")]);
    assert_eq!((rows.len(), warnings.lines().count()), (2 * 5, 1), "{warnings}");
    assert_says(&warnings, &["left out: no NCCL on PE 1"]);
    let text = refusal(&fakes, &["--op", "put-signal", "--scope", "stream"], &[("FAKE_STATUS", "3")]);
    assert_says(&text, &["--op put-signal on --scope stream: ", "without MPS"]);
    // A library that cannot be loaded is reported before any PE starts.
    std::fs::write(fakes.0.path().join("nccl/lib/libnccl.so.2"), "").unwrap();
    let text = refusal(&fakes, &["--op", "send-recv"], &[]);
    assert_says(&text, &["aristos: --op send-recv: no NCCL (", "nccl/lib/libnccl.so.2", "NCCL_HOME"]);
    assert!(!text.contains("PE "), "{text}");
}

#[test]
fn waits_time_out() {
    let fakes = Fakes::new(&[], &[]);
    let args = ["--op", "send-recv", "--timeout", "1"];
    let text = refusal(&fakes, &args, &[("FAKE_NCCL", "hang")]);
    assert_says(&text, &["cannot start NCCL: it is not ready after 1.0 s", "NCCL_DEBUG=INFO"]);
    for op in ["send-recv", "put"] {
        let args = ["--op", op, "--scope", "stream", "--timeout", "1"];
        let text = refusal(&fakes, &args, &[("FAKE_STUCK", "1")]);
        assert_says(&text, &["cannot wait for the kernels", "have not ended within 1.0 s"]);
    }
}
