//! MPI jobs across hosts (network namespaces). Both MPIs use TCP between them; the hosts' interfaces count the bytes.

use std::env;
use std::ffi::OsStr;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use aristos::shmem::mpi::MpiTransport;
use aristos::shmem::{Cmp, Shmem, SignalOp, Wait};
use rustix::process::{Signal, kill_process};

use super::binary::{self, run};
use super::hosts::Hosts;
use super::sample::Sample;
use super::undisturbed::undisturbed;
use super::{
    Check, END_LIMIT, LONG, Mpi, SMALL, SUITE_PES, Sums, Test, all_checks, disturbed, is_open_mpi, launcher, refused,
    same, skip,
};

/// Folder of the MPICH for jobs across hosts (`tools/mpi-env`); its `debian` holds the library by the name that this program
/// loads, `libmpich.so.12`. Debian 12's MPICH 4.0.2 over UCX can hang in MPI_Finalize (`tests/hosts/mpich_finalize.c`).
const ENV_MPICH: &str = "ARISTOS_TEST_MPICH";

/// Whether jobs can run across hosts; prints why not.
fn ready() -> bool {
    let is_ready = is_open_mpi() || env::var_os(ENV_MPICH).is_some();
    if !is_ready {
        skip::skip(format!("MPICH before 4.2 does not always end across hosts; {ENV_MPICH} names no other one"));
    }
    is_ready
}

/// `program` as a job of `n` processes on these hosts. The network is set explicitly: by default, both MPIs treat namespaces
/// of one machine as one host, and use shared memory.
fn over_hosts(hosts: &Hosts, n: usize, program: impl AsRef<OsStr>, args: &str) -> Command {
    let on = Hosts::PROGRAM;
    let mut command;
    if is_open_mpi() {
        command = hosts.command(0, launcher(true).expect("mpirun in PATH"), [""; 0]);
        let slots = |host: &str| format!("{host}:{}", n.div_ceil(hosts.len()));
        let slots: Vec<String> = hosts.addresses().split(',').map(slots).collect();
        command.args(["--allow-run-as-root", "--oversubscribe", "--map-by", "node"]);
        command.args(["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "osc", "^rdma,ucx"]);
        // The hosts share their CPUs, unknown to MPI, which would bind a process of each host to the first one.
        command.args(["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]);
        command.args(["--mca", "plm_rsh_agent", &format!("{on} --on")]);
        command.args(["--host", &slots.join(",")]);
    } else {
        let mpich = env::var(ENV_MPICH).expect("who runs jobs across hosts is ready");
        command = hosts.command(0, format!("{mpich}/bin/mpirun"), [""; 0]);
        command.env("LD_LIBRARY_PATH", format!("{mpich}/debian:{mpich}/lib/mpich"));
        command.args(["-launcher", "ssh", "-launcher-exec", on, "-hosts", &hosts.addresses()]);
        command.args(["-genv", "UCX_TLS", "tcp", "-genv", "UCX_NET_DEVICES", "eth0"]);
    }
    command.args(["-n", &n.to_string()]).arg(program).args(args.split_whitespace());
    command
}

/// Standard output of a successful job on these hosts.
#[track_caller]
fn said_over(hosts: &Hosts, n: usize, args: &str) -> String {
    run(over_hosts(hosts, n, env!("CARGO_BIN_EXE_aristos"), args)).success().stdout
}

/// A sample of the suite on PEs spread over three hosts; the whole suite with `--deep`.
pub fn conforming(filter: &str, sums: &mut Sums) {
    let suite = "conformance_across_hosts";
    if !suite.contains(filter) && !filter.starts_with(suite) {
        return;
    }
    let made = if ready() { Hosts::make(3) } else { None };
    let Some(hosts) = made else { return sums.add(suite, Test::Skipped) };
    let all = all_checks().count() as u64;
    let part: Vec<u64> = Sample::new(10, all).numbers().collect();
    let sample = all_checks().enumerate().filter(|(i, _)| part.contains(&(*i as u64))).map(|(_, check)| check);
    let checks = sample.chain(CHECKS_ACROSS_HOSTS);
    let before = hosts.sent_bytes();
    super::conforming(suite, filter, checks, sums, || over_hosts(&hosts, SUITE_PES, env::current_exe().unwrap(), ""));
    let crossed = hosts.sent_bytes() - before;
    sums.add("conformance_across_hosts::it_crosses_the_network", Test::Ran(crossed > 100_000));
}

/// Checks of PEs on different hosts.
pub const CHECKS_ACROSS_HOSTS: &[Check] = &[
    ("messages_arrive_while_pes_compute", messages_arrive_while_pes_compute),
    ("fences_order_puts_of_any_size", fences_order_puts_of_any_size),
];

/// Puts of different sizes to one place, each after a fence: the last one is read.
fn fences_order_puts_of_any_size(world: &Mpi) {
    const BYTES: usize = 1 << 20;
    if let Some(first) = world.0.first(2).unwrap() {
        let heap_bytes = Shmem::<MpiTransport<'_>>::heap_bytes_for(2, BYTES + 128);
        let pe = Shmem::new(MpiTransport::new(Box::leak(Box::new(first)), heap_bytes).unwrap());
        let (data, word) = (pe.alloc::<u8>(BYTES).unwrap(), pe.alloc::<u64>(1).unwrap());
        let peer = 1 - pe.my_pe();
        for round in 1..=10u8 {
            pe.barrier_all(Instant::now() + END_LIMIT).unwrap();
            let mut expected = vec![0; BYTES];
            for (number, bytes) in [BYTES, 64, BYTES / 2, 5000, 4000, 1].into_iter().enumerate() {
                let value = 10 * round + number as u8;
                pe.put(data.slice(0..bytes), &vec![value; bytes], peer);
                pe.fence();
                expected[..bytes].fill(value);
            }
            pe.signal_op(word, u64::from(round), SignalOp::Set, peer);
            pe.wait_until(Wait { signal: word, cmp: Cmp::Ge, value: u64::from(round) }, Instant::now() + END_LIMIT)
                .unwrap();
            let mut got = vec![0; BYTES];
            pe.get(&mut got, data, pe.my_pe());
            assert!(got == expected, "PE {} reads puts in another order in round {round}", pe.my_pe());
        }
        pe.barrier_all(Instant::now() + END_LIMIT).unwrap();
    }
    world.0.barrier(Duration::from_secs(60)).unwrap();
}

/// Two PEs exchange data and signals without a call of MPI, as if they computed: they only look at their own memory.
fn messages_arrive_while_pes_compute(world: &Mpi) {
    // So large that MPI sends the data only after the receiver has asked for it.
    const BYTES: usize = 1 << 20;
    const ROUNDS: usize = 3;
    if let Some(first) = world.0.first(2).unwrap() {
        let heap_bytes = Shmem::<MpiTransport<'_>>::heap_bytes_for(2, ROUNDS * BYTES + 128);
        let pe = Shmem::new(MpiTransport::new(Box::leak(Box::new(first)), heap_bytes).unwrap());
        let (data, word) = (pe.alloc::<u8>(ROUNDS * BYTES).unwrap(), pe.alloc::<u64>(1).unwrap());
        pe.barrier_all(Instant::now() + END_LIMIT).unwrap();
        let (me, peer) = (pe.my_pe(), 1 - pe.my_pe());
        let until = Instant::now() + END_LIMIT;
        for round in 1..=ROUNDS {
            let data = data.slice((round - 1) * BYTES..round * BYTES);
            pe.put_signal(data, &vec![(round + me) as u8; BYTES], word, round as u64, SignalOp::Set, peer);
            let mut seen = [0u64];
            while seen[0] < round as u64 {
                assert!(Instant::now() < until, "PE {me} sees no message in round {round}");
                thread::sleep(Duration::from_millis(1));
                pe.get(&mut seen, word, me);
            }
            let mut got = vec![0; BYTES];
            pe.get(&mut got, data, me);
            assert_eq!(got, vec![(round + peer) as u8; BYTES]);
        }
        pe.barrier_all(Instant::now() + END_LIMIT).unwrap();
    }
    world.0.barrier(Duration::from_secs(60)).unwrap();
}

/// Runs a layer with one PE per host. Fails the test unless its check passes, its results equal those over shared memory, and
/// at least the reported bytes crossed the network.
#[track_caller]
fn rows_cross(hosts: &Hosts, steps: usize) {
    let n = hosts.len();
    let dir = tempfile::tempdir().unwrap();
    let (shm, mpi) = (dir.path().join("shm"), dir.path().join("mpi"));
    let layer = format!("--tokens 600 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --seed 7 --bias --pes {n}");
    run(binary::aristos_run(&format!("{layer} --output {}", shm.display()))).success();
    let before = hosts.sent_bytes();
    let over =
        format!("run --transport mpi {layer} --check --steps {steps} --timeout 30 --json --output {}", mpi.display());
    let said = said_over(hosts, n, &over);
    let crossed = hosts.sent_bytes() - before;
    same(&shm, &mpi);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["check"]["passed"], true, "{report}");
    let remote = steps as f64 * report["remote_bytes_per_step"].as_f64().unwrap();
    assert!(remote > 500_000.0 && crossed as f64 >= remote, "{crossed} bytes crossed of {remote} that were put");
}

pub const TESTS: &[(&str, fn())] = &[
    ("several_hosts_run_the_layer", || {
        if !ready() {
            return;
        }
        let Some(hosts) = Hosts::make(3) else { return };
        let outcome = run(over_hosts(&hosts, 4, "hostname", "")).success();
        let mut names: Vec<&str> = outcome.stdout.lines().collect();
        names.sort_unstable();
        assert_eq!(names, ["node0", "node0", "node1", "node2"], "{outcome:?}");
        let said = said_over(&hosts, 4, &format!("run --transport mpi {SMALL} --check --steps 2 --chunk-rows 8"));
        assert_eq!(said.matches("check passed").count(), 1, "{said}");
        assert!(said.contains("4 PEs"), "{said}");
        rows_cross(&hosts, 3);
    }),
    ("several_hosts_run_over_a_link", || {
        if !ready() {
            return;
        }
        const DELAYS: [&str; 3] = ["delay_ms=0.05", "delay_ms=1", "delay_ms=20"];
        const LOSSES: [&str; 2] = ["delay_ms=0.5 loss=0.001", "loss=0.01"];
        // One delay and one loss per run.
        let sample = Sample::new(1, 6);
        for number in sample.numbers() {
            let n = 2 + (number % 2) as usize;
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0") else { return };
            hosts.set(DELAYS[number as usize % 3]);
            rows_cross(&hosts, 3);
            let before = hosts.counted("Tcp", "RetransSegs");
            hosts.set(LOSSES[number as usize / 3]);
            rows_cross(&hosts, 20);
            assert!(hosts.counted("Tcp", "RetransSegs") > before, "nothing was lost");
            drop(hosts);
            let Some(hosts) = Hosts::with_link(n, "delay_ms=0.2 jitter_ms=2") else { return };
            rows_cross(&hosts, 10);
            let early = hosts.counted("TcpExt", "TCPOFOQueue");
            assert!(early > 100, "{early} segments came before others");
        }
    }),
    #[cfg(feature = "emulate")]
    ("devices_of_several_hosts_meet_over_mpi", || {
        if !ready() {
            return;
        }
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        let (shm, mpi) = (dir.path().join("shm"), dir.path().join("mpi"));
        let layer =
            "--device emulated --tokens 96 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --seed 7 --pes 3";
        run(binary::aristos_run(&format!("{layer} --output {}", shm.display()))).success();
        let before = hosts.sent_bytes();
        let over = format!("run --transport mpi {layer} --check --steps 2 --json --output {}", mpi.display());
        // Two of the PEs share a host.
        let said = said_over(&hosts, 3, &over);
        let crossed = hosts.sent_bytes() - before;
        same(&shm, &mpi);
        let report: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(report["check"]["passed"], true, "{report}");
        let remote = 2.0 * report["remote_bytes_per_step"].as_f64().unwrap();
        // One pair of PEs 0, 1 and 2 shares a host.
        assert!(
            remote > 10_000.0 && crossed as f64 >= 0.5 * remote,
            "{crossed} bytes crossed of {remote} that were put"
        );
        // An expert and its gradient are 0.111 MB: no PE has room for all.
        let planned = format!("run --transport mpi {layer} --plan auto --memory-mb 0.6 --check --json");
        let report: serde_json::Value = serde_json::from_str(&said_over(&hosts, 3, &planned)).unwrap();
        assert_eq!(report["check"]["passed"], true, "{report}");
        assert_eq!(
            (&report["plan"]["source"], report["plan"]["groups"].as_array().map(Vec::len)),
            (&"auto".into(), Some(1))
        );
    }),
    ("a_pe_that_is_killed_on_another_host_ends_the_job", || {
        if !ready() {
            return;
        }
        let Some(hosts) = Hosts::make(3) else { return };
        let job = over_hosts(&hosts, 3, env!("CARGO_BIN_EXE_aristos"), &format!("run --transport mpi {LONG}"));
        let outcome = disturbed("far-kill", 3, job, |pes| kill_process(pes[&1], Signal::KILL).unwrap());
        assert!(!outcome.status.success() && !outcome.stdout.contains("tokens/s"), "{outcome:?}");
        if !is_open_mpi() {
            // MPICH 5.0.2 leaves its segments if a process is killed.
            for host in 0..hosts.len() {
                let clear = hosts.command(host, "sh", ["-c", "rm -f /dev/shm/mpich_shm_*"]).status().unwrap();
                assert!(clear.success());
            }
        }
        hosts.assert_empty();
    }),
    ("several_hosts_are_measured", || {
        if !ready() {
            return;
        }
        let Some(hosts) = Hosts::make(3) else { return };
        let dir = tempfile::tempdir().unwrap();
        let cluster = dir.path().join("cluster.json");
        let probe = format!("probe --transport mpi --quick --hidden 64 --intermediate 96 --out {}", cluster.display());
        let p2p = "bench p2p --transport mpi --max 4KiB --iterations 5 --warmup 1 --json";
        said_over(&hosts, 3, &probe);
        let probed = aristos::cluster::Cluster::read(&cluster).unwrap();
        let names: Vec<&str> = probed.devices.iter().map(|device| &*device.host).collect();
        assert_eq!(names, ["node0", "node1", "node2"]);
        let said = said_over(&hosts, 2, p2p);
        assert!(said.contains("\"put-signal\""), "{said}");
        // Two PEs, because each waiting MPI process occupies a CPU.
        let straggler =
            "bench straggler --transport mpi --steps 40 --warmup 2 --compute-us 3000 --inject slow-pe=1:8 --json";
        let report = || serde_json::from_str(&said_over(&hosts, 2, straggler)).unwrap();
        for mode in undisturbed(report)["modes"].as_array().unwrap() {
            assert_eq!(mode["culprit"]["pe"], 1, "{mode}");
        }
    }),
    ("shared_memory_of_several_hosts_is_one_line", || {
        if !ready() {
            return;
        }
        let Some(hosts) = Hosts::make(3) else { return };
        let command = over_hosts(&hosts, 3, env!("CARGO_BIN_EXE_aristos"), "run --tokens 10");
        refused(command, &["several hosts", "--transport tcp"]);
    }),
];
