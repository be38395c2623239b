//! Emulated devices on several hosts: rows cross the network, and plans take the links between devices into account.

use super::binary::{self, read_tensors, relative_error, run};
use super::hosts::Hosts;
use super::{here, json, over, refused, same, two_a_host};

/// An expert with its gradient takes 0.111 MB, so a device has room for five of the eight, and no PE can be a group alone.
const PLANNED: &str = "run --device emulated --tokens 96 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --plan auto \
    --memory-mb 0.6 --check --json";

pub const TESTS: &[(&str, fn())] = &[
    ("hosts::devices_send_over_the_network", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        let (shm, tcp) = (dir.path().join("shm"), dir.path().join("tcp"));
        let layer = "--device emulated --tokens 96 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --seed 7";
        run(binary::aristos_run(&format!("{layer} --pes 2 --output {}", shm.display()))).success();
        let before = hosts.sent_bytes();
        let args = format!("run {layer} --check --steps 2 --json --output {}", tcp.display());
        let report = json(over(&hosts, 2, "tcp", &args));
        let crossed = hosts.sent_bytes() - before;
        same(&shm, &tcp);
        assert_eq!(report["check"]["passed"].as_bool(), Some(true), "{report}");
        let remote = 2.0 * report["remote_bytes_per_step"].as_f64().unwrap();
        assert!(remote > 10_000.0 && crossed as f64 >= remote, "{crossed} bytes crossed of {remote} that were put");
    }),
    ("hosts::a_checkpoint_on_devices_is_that_of_the_cpu_but_for_rounding", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        let out = |name: &str| dir.path().join(name);
        let layer =
            "--model examples/tiny-moe --layer 1 --input examples/tiny-moe/hidden_states.safetensors --dtype bf16";
        run(binary::aristos_run(&format!("{layer} --pes 2 --output {}", out("cpu").display()))).success();
        let want = read_tensors(&out("cpu"));
        assert!(want.keys().any(|name| name.contains("grad")), "{:?}", want.keys());
        let devices = |transport: &str| {
            format!("run {layer} --device emulated --check --json --output {}", out(transport).display())
        };
        for (transport, job) in [
            ("tcp", over(&hosts, 2, "tcp", &devices("tcp"))),
            // Loads and stores reach one of a PE's three peers.
            ("hybrid", two_a_host(&hosts, "hybrid", &devices("hybrid"))),
        ] {
            let before = hosts.sent_bytes();
            let report = json(job);
            assert_eq!(report["check"]["passed"], true, "{transport}: {report}");
            assert!(hosts.sent_bytes() - before > 10_000, "{transport}: next to nothing crossed");
            let got = read_tensors(&out(transport));
            assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>(), "{transport}");
            for (name, (shape, values)) in &want {
                assert_eq!(&got[name].0, shape, "{transport}, {name}");
                let error = relative_error(&got[name].1, values);
                assert!(error < 2e-2, "{transport}, {name}: {error}");
            }
        }
        hosts.assert_empty();
    }),
    ("hosts::devices_are_planned_for_by_what_joins_them", || {
        const DELAY_MS: f64 = 10.0;
        let Some(hosts) = Hosts::with_link(2, &format!("delay_ms={DELAY_MS}")) else { return };
        // Both PEs form one group. Rows between them cross the network twice in each pass, so the plan includes at least two delays.
        let report = json(over(&hosts, 2, "tcp", PLANNED));
        let plan = &report["plan"];
        assert_eq!((&report["check"]["passed"], &plan["source"]), (&true.into(), &"auto".into()), "{report}");
        assert_eq!(plan["groups"].as_array().unwrap().len(), 1, "{plan:#}");
        let communication_ms = 1e3 * plan["predicted"]["communication_s"].as_f64().unwrap();
        assert!(communication_ms > 2.0 * DELAY_MS, "{communication_ms} ms, {plan:#}");
        // The devices of a host reach each other by loads and stores, so each host is a group, and only gradients cross.
        let report = json(two_a_host(&hosts, "hybrid", PLANNED));
        assert_eq!(report["check"]["passed"], true, "{report}");
        let groups = report["plan"]["groups"].as_array().unwrap();
        let pes: Vec<String> = groups.iter().map(|group| group["pes"].to_string()).collect();
        assert_eq!(pes, ["[0,2]", "[1,3]"], "{:#}", report["plan"]);
        hosts.assert_empty();
    }),
    ("here::devices_that_no_plan_suits_are_refused_once", || {
        let little = PLANNED.replace("0.6", "0.2");
        refused(here(3, &little), &[0], &["--plan auto: no plan: memory"]);
    }),
];
