//! `--rows-per host`: a row crosses to another host once, by the report and by the interfaces' counters.

use std::fs;
use std::process::Command;

use super::binary::plan_of_two_groups;
use super::hosts::Hosts;
use super::{commands, json, same, two_a_host, with_transport};
#[cfg(feature = "emulate")]
use super::{here, refused};

/// A job with three PEs on each of two hosts: 0, 2 and 4 on the first.
fn three_a_host(hosts: &Hosts, transport: &str, args: &str) -> Vec<Command> {
    commands(6, hosts.address(0), args, |rank, args| {
        hosts.command(rank % 2, env!("CARGO_BIN_EXE_aristos"), with_transport(transport, args))
    })
}

/// Runs a job, whose check must pass. Returns its configuration, the bytes that crossed between the hosts, and the reported network and
/// relay bytes.
#[track_caller]
fn counted(hosts: &Hosts, job: Vec<Command>) -> (serde_json::Value, f64, [f64; 2]) {
    let before = hosts.sent_bytes();
    let report = json(job);
    let crossed = (hosts.sent_bytes() - before) as f64;
    assert_eq!(report["check"]["passed"], true, "{report}");
    let counted = ["network_bytes", "relay_bytes"].map(|key| report["traffic"][key].as_f64().unwrap());
    (report["config"].clone(), crossed, counted)
}

pub const TESTS: &[(&str, fn())] = &[
    ("hosts::a_row_crosses_once_for_all_pes_of_a_host", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        // With top-8 of 32 experts, nearly every row has experts on every PE.
        let layer = "--tokens 400 --hidden 128 --intermediate 64 --experts 32 --top-k 8 --seed 7 --steps 6 --bias --aux-loss-coef 0.01";
        for transport in ["tcp", "hybrid"] {
            let cross = |rows_per: &str| {
                let output = dir.path().join(format!("{transport}-{rows_per}"));
                let to = format!("--rows-per {rows_per} --output {}", output.display());
                let job = two_a_host(&hosts, transport, &format!("run {layer} {to} --check --json"));
                let (config, crossed, counted) = counted(&hosts, job);
                assert_eq!((&config["transport"], &config["rows_per"]), (&transport.into(), &rows_per.into()));
                (output, crossed, counted)
            };
            let ((pe, each, of_each), (host, once, of_once)) = (cross("pe"), cross("host"));
            same(&pe, &host);
            // Reported network bytes are below the interfaces' counts, and relays reduce them.
            if transport == "hybrid" {
                assert!(
                    of_once[0] < once && of_once[0] < 0.8 * of_each[0] && of_each[0] < each,
                    "{of_once:?}, {of_each:?}"
                );
            }
            assert!(of_once[1] > 0.0 && of_each[1] == 0.0, "{of_once:?}, {of_each:?}");
            // Each token's row crosses once in each direction, in forward and backward of each step. Slots, headers and acknowledgements
            // come on top.
            let rows = 6.0 * 400.0 * 4.0 * (128.0 * 4.0);
            assert!(once > rows && once < 0.8 * each, "{once} bytes, {each} without, {rows} of rows");
        }
        hosts.assert_empty();
    }),
    #[cfg(feature = "emulate")]
    ("hosts::a_row_of_devices_crosses_once_for_all_pes_of_a_host", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        // With top-8 of 16 experts, nearly every row has experts on every PE.
        let layer =
            "--device emulated --tokens 160 --hidden 256 --intermediate 32 --experts 16 --top-k 8 --seed 7 --steps 3";
        let cross = |rows_per: &str| {
            let output = dir.path().join(rows_per);
            let to = format!("--rows-per {rows_per} --output {}", output.display());
            let job = two_a_host(&hosts, "hybrid", &format!("run {layer} {to} --check --json"));
            let (config, crossed, [network, relayed]) = counted(&hosts, job);
            assert_eq!(config["rows_per"], rows_per);
            // Half of the results are sent to PE 0, too. Headers and acknowledgements come on top.
            let results = fs::metadata(output).unwrap().len() as f64 / 2.0;
            assert!(
                network + results < crossed && crossed < 1.2 * (network + results),
                "{crossed}: {network}, {results}"
            );
            assert_eq!(relayed > 0.0, rows_per == "host");
            crossed
        };
        let (each, once) = (cross("pe"), cross("host"));
        // Each token's bf16 row crosses once in each direction, in forward and backward of each step. Slots, headers and acknowledgements
        // come on top.
        let rows = 3.0 * 160.0 * 4.0 * (256.0 * 2.0);
        assert!(once > rows && once < 0.8 * each, "{once} bytes, {each} without, {rows} of rows");
        let refused_on = format!("run {layer} --rows-per host");
        refused(
            here(2, &refused_on),
            &[0],
            &["--rows-per host with --transport tcp on emulated devices", "expected --transport hybrid"],
        );
        hosts.assert_empty();
    }),
    // Two groups, one of four PEs on both hosts and one of two PEs. In each, with and without barriers, rows cross once by report and
    // interfaces.
    ("hosts::rows_of_groups_cross_once", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        let plan = dir.path().join("plan.json");
        fs::write(&plan, plan_of_two_groups()).unwrap();
        let layer = format!(
            "--tokens 120 --hidden 256 --intermediate 16 --experts 8 --top-k 4 --seed 7 --steps 3 --aux-loss-coef 0.01 --plan {}",
            plan.display()
        );
        let engines: &[&str] =
            if cfg!(feature = "emulate") { &["--dtype bf16", "--device emulated"] } else { &["--dtype bf16"] };
        for engine in engines {
            let cross = |rows_per: &str| {
                let args = format!("run {layer} {engine} --rows-per {rows_per} --check --json");
                let (_, crossed, counted) = counted(&hosts, three_a_host(&hosts, "hybrid", &args));
                (crossed, counted)
            };
            let (each, [each_counted, none]) = cross("pe");
            for more in ["", " --mode bulk"] {
                let (once, [counted, relayed]) = cross(&format!("host{more}"));
                // Relays save about one of two crossing rows for each of the four PEs' 80 tokens, in each direction, in forward and
                // backward of three steps.
                let rows = 3.0 * 80.0 * 4.0 * (256.0 * 2.0);
                assert!(relayed > 0.0 && none == 0.0, "{engine}{more}: {relayed}, {none} by way of homes");
                assert!(
                    counted < once && once < 1.3 * counted,
                    "{engine}{more}: {once} bytes crossed, {counted} counted"
                );
                assert!(each - once > 0.5 * rows, "{engine}{more}: {once} bytes, {each} without, {rows} of rows");
                assert!(each_counted - counted > 0.5 * rows, "{engine}{more}: {counted} bytes, {each_counted} without");
            }
        }
        hosts.assert_empty();
    }),
];
