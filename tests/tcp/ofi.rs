//! Jobs over libfabric with its TCP provider: on this host, and across hosts that count the bytes sent.

use aristos::shmem::Shmem;
use aristos::shmem::ofi::OfiTransport;
use aristos::shmem::tcp::JoinLimits;
use rustix::process::Signal;

use super::*;

/// A new world for each check.
pub struct Ofi {
    pub(super) place: Place,
}

impl World for Ofi {
    type T = OfiTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<OfiTransport>) + Sync) {
        if let Some(world) = self.place.join(n_pes) {
            f(&Shmem::new(OfiTransport::new(&world, HEAP_BYTES, None, JoinLimits::default().join).unwrap()));
        }
    }
}

conformance_table!(CHECKS, Ofi);

/// A job on this host.
fn here(n: usize, args: &str) -> Vec<Command> {
    commands(n, "localhost", args, |_, args| aristos(with_transport("ofi", args)))
}

pub const TESTS: &[(&str, fn())] = &[
    ("ofi::results_are_those_of_shared_memory", || {
        let dir = tempfile::tempdir().unwrap();
        let losses = "--seed 7 --shared-intermediate 48 --bias --aux-loss-coef 0.01 --z-loss-coef 0.001";
        for n in [1, 2, 4] {
            let out = |transport: &str| dir.path().join(format!("{n}-{transport}"));
            let (shm, ofi) = (out("shm"), out("ofi"));
            run(binary::aristos_run(&format!("{SMALL} {losses} --pes {n} --output {}", shm.display()))).success();
            let args = format!(
                "run {SMALL} {losses} --chunk-rows 8 --budget-factor 0.5 --check --json --output {}",
                ofi.display()
            );
            let report = json(here(n, &args));
            assert_eq!((&report["check"]["passed"], &report["config"]["transport"]), (&true.into(), &"ofi".into()));
            same(&shm, &ofi);
        }
    }),
    ("ofi::the_benchmarks", || {
        let said = report(here(2, "bench p2p --max 4MiB --iterations 5 --warmup 1 --json"));
        for op in ["put", "put-nbi", "get", "put-signal", "atomic"] {
            assert!(said.contains(&format!("\"{op}\"")), "{op}: {said}");
        }
        let moe = "bench moe --tokens 64 --hidden 64 --intermediate 64 --iterations 2 --warmup 1";
        assert!(report(here(2, moe)).contains("pipelined / bulk"));
    }),
    ("ofi::who_is_killed_stopped_or_ended_is_named", || {
        let job = |args: &str| here(3, &format!("run {LONG} {args}"));
        let outcomes = disturbed(job(""), NAMED_LIMIT, 2, &[2], |pes| pes[2].signal(Signal::KILL));
        assert_eq!(outcomes.len(), 2);
        disturbed(job(""), NAMED_LIMIT, 0, &[0], |pes| pes[0].signal(Signal::TERM));
        let stop = |pes: &[Running]| {
            pes[1].signal(Signal::STOP);
            thread::sleep(Duration::from_secs(4));
        };
        disturbed(job("--timeout 1"), SILENT_LIMIT, 1, &[1], stop);
    }),
    ("ofi::a_provider_that_is_none_is_one_line", || {
        let with = |providers: &[&str]| -> Vec<Command> {
            let mut commands = here(providers.len(), &format!("run {SMALL}"));
            let pairs = commands.iter_mut().zip(providers);
            pairs.for_each(|(command, provider)| _ = command.env("ARISTOS_OFI_PROVIDER", provider));
            commands
        };
        let lines = |commands: Vec<Command>| -> Vec<String> {
            let outcomes = run_all(commands).into_iter();
            let one_line = |outcome: Outcome| {
                assert!(outcome.status.code() == Some(1) && outcome.stderr.lines().count() == 1, "{outcome:?}");
                outcome.stderr
            };
            outcomes.map(one_line).collect()
        };
        let said = lines(with(&["nowhere", "nowhere"]));
        assert!(said.iter().any(|line| line.contains("libfabric has no provider nowhere")), "{said:?}");
        let said = lines(with(&["sockets", "tcp;ofi_rxm"]));
        let parts = ["libfabric's provider sockets", "tcp;ofi_rxm", "expected the same on all"];
        assert!(said.iter().any(|line| parts.iter().all(|part| line.contains(part))), "{said:?}");
    }),
    ("ofi::the_suite_across_hosts", || {
        let Some(hosts) = Hosts::make(3) else { return };
        conform(&hosts, "ofi");
    }),
    ("ofi::rows_cross_the_network", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::make(n) else { return };
            rows_cross(&hosts, "ofi", 3, start_all);
            if n == 2 {
                let said = report(over(&hosts, 2, "ofi", "bench p2p --max 1MiB --iterations 5 --warmup 1 --json"));
                assert!(said.contains("\"atomic\""), "{said}");
            }
            hosts.assert_empty();
        }
    }),
    ("ofi::a_link_delays_loses_and_reorders", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0") else { return };
            for link in ["delay_ms=0.05", "delay_ms=1", "delay_ms=20", "delay_ms=0.5 loss=0.001", "loss=0.01"] {
                hosts.set(link);
                rows_cross(&hosts, "ofi", 3, start_all);
            }
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0.2 jitter_ms=2") else { return };
            rows_cross(&hosts, "ofi", 10, start_all);
            let early = hosts.counted("TcpExt", "TCPOFOQueue");
            assert!(early > 100, "{early} segments came before others");
        }
    }),
    ("ofi::a_partition_heals", || {
        let Some(hosts) = Hosts::with_link(3, "delay_ms=0") else { return };
        link::undisturbed(&hosts, "ofi", |_| {
            hosts.set("cut=1");
            thread::sleep(Duration::from_secs(4));
            hosts.set("cut=none");
        });
    }),
    ("ofi::a_partition_and_an_interface_that_stay_are_named", || {
        let Some(hosts) = Hosts::with_link(3, "delay_ms=1") else { return };
        link::lost(&hosts, "ofi", || hosts.set("cut=1"));
        let Some(hosts) = Hosts::make(3) else { return };
        link::lost(&hosts, "ofi", || hosts.switch(1, "down"));
    }),
];
