//! Jobs over TCP across a link that delays, reorders and drops packets (`tests/hosts/link`), with hosts that disconnect and reconnect.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::binary::Running;
use super::hosts::Hosts;
use super::{LONG, SILENT_LIMIT, conform, json, over, rows_cross, start_all, start_at_work};

/// Runs a job of several seconds over a link with this delay. Fails the test if `act`, which disturbs its hosts meanwhile, changes the
/// results.
#[track_caller]
pub fn undisturbed(hosts: &Hosts, transport: &str, act: impl FnOnce(&[Running])) {
    hosts.set("delay_ms=5");
    let mut acted = Duration::MAX;
    let begun = Instant::now();
    rows_cross(hosts, transport, 120, |commands| {
        let running = start_at_work(commands);
        act(&running);
        acted = begun.elapsed();
        running
    });
    assert!(begun.elapsed() > acted + Duration::from_millis(200), "the job ended meanwhile");
    hosts.assert_empty();
}

/// Starts a job that must fail after `act`, which disconnects PE 1's host. Every PE must name a lost PE in time, and all except PE 1 must
/// name PE 1.
#[track_caller]
pub fn lost(hosts: &Hosts, transport: &str, act: impl FnOnce()) {
    let running = start_at_work(over(hosts, hosts.len(), transport, &format!("run {LONG}")));
    act();
    let cut = Instant::now();
    for (pe, running) in running.into_iter().enumerate() {
        let outcome = running.end();
        assert!(cut.elapsed() < SILENT_LIMIT, "PE {pe} took {:?}", cut.elapsed());
        let outcome = outcome.says(&[&format!("PE {pe} failed"), "is lost: "]);
        assert!(pe == 1 || outcome.stderr.contains("PE 1 is lost: "), "{outcome:?}");
    }
    hosts.assert_empty();
}

pub const TESTS: &[(&str, fn())] = &[
    ("link::rows_come_later", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0") else { return };
            for delay in ["0.05", "1", "20"] {
                hosts.set(&format!("delay_ms={delay}"));
                rows_cross(&hosts, "tcp", 3, start_all);
            }
            hosts.assert_empty();
        }
    }),
    ("link::segments_are_lost", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0.5") else { return };
            for loss in ["0.001", "0.01"] {
                let before = hosts.counted("Tcp", "RetransSegs");
                hosts.set(&format!("loss={loss}"));
                rows_cross(&hosts, "tcp", 40, start_all);
                assert!(hosts.counted("Tcp", "RetransSegs") > before, "nothing was lost");
            }
        }
    }),
    ("link::segments_overtake_each_other", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0.2 jitter_ms=2") else { return };
            rows_cross(&hosts, "tcp", 10, start_all);
            let early = hosts.counted("TcpExt", "TCPOFOQueue");
            assert!(early > 100, "{early} segments came before others");
        }
    }),
    ("link::the_suite", || {
        let Some(hosts) = Hosts::with_link(3, "delay_ms=0.1 jitter_ms=1 loss=0.005") else { return };
        conform(&hosts, "tcp");
        hosts.assert_empty();
    }),
    ("link::every_operation_is_measured", || {
        const DELAY_MS: f64 = 2.0;
        let Some(hosts) = Hosts::with_link(2, &format!("delay_ms={DELAY_MS} loss=0.001")) else { return };
        let report = json(over(&hosts, 2, "tcp", "bench p2p --max 256KiB --iterations 5 --warmup 1 --json"));
        for op in ["put", "put-nbi", "get", "put-signal", "atomic"] {
            let is_latency = |row: &&serde_json::Value| row["op"] == op && row["measure"] == "latency";
            let rows = report["rows"].as_array().unwrap().iter().filter(is_latency);
            let times: Vec<f64> = rows.map(|row| row["min_us"].as_f64().unwrap()).collect();
            // The latency of a ping-pong is half of its round trip.
            let least = if op == "put-signal" { DELAY_MS } else { 2.0 * DELAY_MS };
            assert!(!times.is_empty() && times.iter().all(|&us| us >= 1e3 * least), "{op}: {times:?} us");
        }
    }),
    ("link::one_percent_is_lost_for_a_while", || {
        let Some(hosts) = Hosts::with_link(3, "delay_ms=0") else { return };
        undisturbed(&hosts, "tcp", |_| {
            hosts.set("loss=0.01");
            thread::sleep(Duration::from_secs(3));
            hosts.set("loss=0");
        });
        assert!(hosts.counted("Tcp", "RetransSegs") > 0, "nothing was lost");
    }),
    ("link::a_partition_heals", || {
        let Some(hosts) = Hosts::with_link(3, "delay_ms=0") else { return };
        undisturbed(&hosts, "tcp", |_| {
            hosts.set("cut=1");
            thread::sleep(Duration::from_secs(4));
            hosts.set("cut=none");
        });
    }),
    ("link::an_interface_comes_back", || {
        let Some(hosts) = Hosts::with_link(2, "delay_ms=0") else { return };
        undisturbed(&hosts, "tcp", |_| {
            hosts.switch(1, "down");
            thread::sleep(Duration::from_secs(2));
            hosts.switch(1, "up");
        });
    }),
    ("link::a_host_thaws", || {
        let Some(hosts) = Hosts::with_link(2, "delay_ms=0") else { return };
        undisturbed(&hosts, "tcp", |pes| {
            pes[1].signal(Signal::STOP);
            thread::sleep(Duration::from_secs(3));
            pes[1].signal(Signal::CONT);
        });
    }),
    ("link::a_partition_that_stays_is_named", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::with_link(n, "delay_ms=1") else { return };
            lost(&hosts, "tcp", || hosts.set("cut=1"));
        }
    }),
    ("link::an_interface_that_stays_down_is_named", || {
        for hosts in [Hosts::make(3), Hosts::with_link(2, "delay_ms=1")] {
            let Some(hosts) = hosts else { return };
            lost(&hosts, "tcp", || hosts.switch(1, "down"));
        }
    }),
];
