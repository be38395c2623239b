//! `aristos probe`: its measurements on each transport, plans made from them, and how a probe ends.

mod binary;

use std::time::{Duration, Instant};

use aristos::cluster::{Cluster, LinkTable};
use aristos::probe::{ProbeOptions, ProbeStage, ProbedLinks, probe_links};
use aristos::shmem::reorder::ReorderWorld;
use aristos::shmem::{Segment, ShmTransport, Shmem, Transport};
use binary::{aristos, names_in, run, start};
use rustix::process::{Signal, kill_process};

fn probe(args: &str) -> std::process::Command {
    aristos(["probe"].into_iter().chain(args.split_whitespace()))
}

/// Checks the invariants of a probed cluster.
#[track_caller]
fn check(cluster: &Cluster, pes: usize) {
    assert_eq!(cluster.devices.len(), pes);
    let probe = cluster.probe.as_ref().unwrap();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for (i, device) in cluster.devices.iter().enumerate() {
        assert_eq!((device.id, &*device.host), (i as u64, host.trim()));
        assert!(device.flop_per_ms > 1e3 && device.flop_per_ms < 1e12, "{device:?}");
        assert!(probe.exchange_factor[i] > 0.0 && probe.exchange_factor[i].is_finite());
    }
    for (i, j) in (0..pes).flat_map(|i| (0..pes).map(move |j| (i, j))).filter(|(i, j)| i != j) {
        let link = cluster.links.link(i, j);
        assert!(link.alpha_ms >= 0.0 && link.alpha_ms < 1e3, "{i} to {j}: {link:?}");
        // Between 1 MB/s and 10 TB/s.
        assert!(link.beta_ms_per_mb > 1e-4 && link.beta_ms_per_mb < 1e3, "{i} to {j}: {link:?}");
        assert!(probe.residual[i][j] >= 0.0 && probe.residual[i][j].is_finite());
        assert!(probe.contention[i][j] > 0.0 && probe.contention[i][j].is_finite());
    }
}

#[test]
fn what_is_probed_can_be_planned() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.json");
    let out = path.display();
    // 64 x 128, gated, f32 and its gradient: 0.196608 MB.
    let args = format!("--pes 4 --quick --hidden 64 --intermediate 128 --memory-mb 10,5,0.1,2 --json --out {out}");
    let outcome = run(probe(&args)).success();
    let cluster = Cluster::read(&path).unwrap();
    assert_eq!(outcome.stdout, std::fs::read_to_string(&path).unwrap());
    check(&cluster, 4);
    assert_eq!(cluster.devices.iter().map(|device| device.memory_experts).collect::<Vec<_>>(), [50, 25, 0, 10]);
    assert_eq!(Cluster::from_json(&cluster.to_json()).unwrap(), cluster);
    assert!(cluster.sources["memory_experts"].contains("--memory-mb"), "{:?}", cluster.sources);
    assert_eq!(cluster.probe.unwrap().transport, "shm");

    let workload = format!("{}/examples/plan/workload.json", env!("CARGO_MANIFEST_DIR"));
    let plan =
        aristos(["plan", "--cluster", &out.to_string(), "--workload", &workload, "--json", "--max-residual", "9"]);
    let plan: serde_json::Value = serde_json::from_str(&run(plan).success().stdout).unwrap();
    assert_eq!(plan["feasible"], serde_json::json!(true));
    assert_eq!(names_in(folder.path()), ["cluster.json"]);
}

#[test]
fn pes_that_share_processors_are_probed_too() {
    for args in ["--pes 8 --quick", "--pes 1 --quick --mlp plain --dtype bf16", "--pes 3 --hidden 64"] {
        let outcome = run(probe(&format!("{args} --json"))).success();
        let pes = args.split_whitespace().nth(1).unwrap().parse().unwrap();
        check(&Cluster::from_json(&outcome.stdout).unwrap(), pes);
    }
    let outcome = run(probe("--pes 5 --quick --out /dev/null"));
    outcome.refused(&["cannot write /dev/null"]);
}

/// Probes with one thread per transport; all results must be equal.
fn probe_in_threads<T: Transport + Send>(transports: Vec<T>, options: &ProbeOptions) -> ProbedLinks {
    let mut all: Vec<ProbedLinks> = std::thread::scope(|scope| {
        let pe = |transport: T| {
            scope.spawn(move || {
                let shmem = Shmem::new(transport);
                let mut stages = Vec::new();
                let probed = probe_links(&shmem, options, &mut |stage, done, of| {
                    assert!(done <= of);
                    stages.push(stage);
                });
                assert_eq!(stages.first(), Some(&ProbeStage::Alone));
                // A second probe must work: the first may leave no state.
                probe_links(&shmem, options, &mut |_, _, _| {}).unwrap();
                probed.unwrap()
            })
        };
        let threads: Vec<_> = transports.into_iter().map(pe).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let first = all.swap_remove(0);
    for other in all {
        assert_eq!((&other.fits, &other.contention), (&first.fits, &first.contention));
        assert_eq!(other.exchange_factor, first.exchange_factor);
    }
    first
}

#[test]
fn links_are_probed_over_any_transport() {
    let mut options = ProbeOptions::quick();
    options.sizes = vec![8, 100, 1000];
    options.together = 1;
    options.repetitions = 6;
    options.rounds = 2;
    options.alone_limit = Duration::ZERO;
    for n in [2, 3, 5] {
        let heap = Shmem::<ShmTransport>::heap_bytes_for(n, options.symmetric_bytes(n));
        let segments: Vec<Segment> = (0..n).map(|_| Segment::create("test", heap).unwrap()).collect();
        let mapped =
            || segments.iter().map(|s| Segment::from_fd(s.fd().try_clone_to_owned().unwrap()).unwrap()).collect();
        let shm: Vec<ShmTransport> = (0..n).map(|pe| ShmTransport::new(pe, mapped()).unwrap()).collect();
        let mut probed = vec![probe_in_threads(shm, &options)];
        // With puts delayed and reordered, as OpenSHMEM allows.
        probed.extend((0..10).map(|seed| probe_in_threads(ReorderWorld::new(n, heap, seed), &options)));
        for links in probed {
            for (at, fit) in links.fits.iter().enumerate() {
                assert_eq!(fit.is_none(), at / n == at % n);
                assert!(fit.is_none_or(|fit| fit.link.alpha_ms >= 0.0 && fit.link.beta_ms_per_mb > 0.0), "{fit:?}");
            }
        }
    }
}

/// Kills PEs at these fractions of the probe's duration; each must be named.
fn killed_pes_are_named(arguments: &str, kills: &[(usize, f64)]) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("cluster.json");
    let probe = || start(probe(&format!("{arguments} --out {}", out.display())));
    let started = Instant::now();
    probe().end().success();
    let whole = started.elapsed();
    std::fs::remove_file(&out).unwrap();
    for (victim, share) in kills {
        let mut running = probe();
        let pid = running.pe(*victim);
        std::thread::sleep(whole.mul_f64(*share));
        kill_process(pid, Signal::KILL).unwrap();
        let killed = Instant::now();
        let outcome = running.end();
        assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
        outcome.refused(&[&format!("aristos: PE {victim} was killed by signal 9 (SIGKILL) in phase ")]);
        assert_eq!(names_in(folder.path()), [""; 0]);
    }
}

#[test]
fn a_killed_pe_is_named_and_nothing_is_left() {
    killed_pes_are_named("--pes 3 --hidden 2048", &[(0, 0.0), (1, 0.02), (2, 0.25), (1, 0.5)]);
}

#[test]
fn a_stopped_pe_is_named_by_who_waits_for_it() {
    let mut running = start(probe("--pes 3 --timeout 1 --json"));
    let pid = running.pe(1);
    std::thread::sleep(Duration::from_millis(300));
    kill_process(pid, Signal::STOP).unwrap();
    running.end().refused(&[" waited for PE 1 ("]);
}

/// Emulated devices: the probe measures them instead of the CPUs.
#[cfg(feature = "emulate")]
mod devices {
    use aristos::gpu::emulated::{Emulated, EmulatedDevice, Fault, world};
    use aristos::job::request::{DeviceKind, ProbeRequest, ProbedExpert};
    use aristos::moe::Dtype;
    use aristos::run::probe::device::probe_devices;

    use super::*;

    const PES: usize = 3;

    /// A small expert, few messages.
    fn request(wait_limit: Duration) -> ProbeRequest {
        let mut options = ProbeOptions::quick();
        options.sizes = vec![64, 4096, 64 << 10];
        options.together = 1;
        options.repetitions = 6;
        options.rounds = 2;
        options.retries = 1;
        options.alone_limit = Duration::ZERO;
        options.compute = Duration::ZERO;
        options.wait_limit = wait_limit;
        let expert = ProbedExpert { hidden: 32, intermediate: 32, gated: true, dtype: Dtype::Bf16, training: true };
        let (memory_mb, memory_source) = (Vec::new(), String::new());
        ProbeRequest { pes: PES, device: DeviceKind::Emulated, gemm: None, expert, options, memory_mb, memory_source }
    }

    /// The result of each PE, and the number of kernels that its device ran.
    fn probed(wait_limit: Duration, prepare: impl Fn(&[Emulated])) -> Vec<(Result<Cluster, String>, u64)> {
        let pes = world(PES, 32 << 20, &EmulatedDevice::default(), None).unwrap();
        prepare(&pes);
        let request = &request(wait_limit);
        std::thread::scope(|scope| {
            let pe = |pe: Emulated| {
                scope.spawn(move || {
                    let probed = probe_devices(&pe, request, &mut |_, done, of| assert!(done <= of));
                    (probed.map_err(|error| format!("{error:#}")), pe.launches())
                })
            };
            let threads: Vec<_> = pes.into_iter().map(pe).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// Probes three devices, of which device 1 takes `launch` longer for a kernel and `put` longer for a put. Returns whether its links and its
    /// rate come out as the slowest.
    fn slow_device_is_slowest(launch: Duration, put: Duration) -> bool {
        let all = probed(Duration::from_secs(60), |pes| pes[1].set_delays(launch, put));
        let clusters: Vec<&Cluster> = all.iter().map(|(cluster, _)| cluster.as_ref().unwrap()).collect();
        let cluster = clusters[0];
        let figures = |cluster: &Cluster| (cluster.devices.clone(), cluster.links.clone());
        assert!(clusters.iter().all(|other| figures(other) == figures(cluster)), "{clusters:#?}");
        check(cluster, PES);
        // A kernel at each end of a pair for each size and the empty message.
        assert!(all.iter().all(|(_, launches)| *launches > 2 * 2 * 4), "{all:?}");
        // A pass has at most 256 rows and takes at least the delay.
        let flop = request(launch).expert.flop_per_row() * 256.0;
        let rates: Vec<f64> = cluster.devices.iter().map(|device| device.flop_per_ms).collect();
        assert!(rates[1] <= flop / (launch.as_secs_f64() * 1e3), "{rates:?}");

        let alpha_ms = |i: usize, j: usize| cluster.links.link(i, j).alpha_ms;
        let half_ms = put.as_secs_f64() * 1e3 / 2.0;
        let links = [(0, 2), (2, 0)].iter().all(|&(other, to)| alpha_ms(1, to) > half_ms.max(alpha_ms(other, to)));
        links && rates[1] < rates[0] && rates[1] < rates[2]
    }

    #[test]
    fn a_slow_device_and_its_slow_links_are_seen() {
        // Other load on the machine slows the other devices too, so the delays grow until they exceed that.
        let (launch, put) = (Duration::from_millis(100), Duration::from_millis(20));
        assert!([1, 2, 4, 8, 16].iter().any(|&factor| slow_device_is_slowest(launch * factor, put * factor)));
    }

    #[test]
    fn a_device_whose_signals_are_lost_is_named() {
        let all = probed(Duration::from_millis(500), |pes| pes[1].set_fault(Fault::SignalLost));
        let lines: Vec<&String> = all.iter().filter_map(|(probed, _)| probed.as_ref().err()).collect();
        assert_eq!(lines.len(), PES, "{all:?}");
        assert!(lines.iter().any(|line| *line == "PE 0 waited 0.5 s for PE 1: its device's answer"), "{lines:?}");
    }

    #[test]
    fn the_command_probes_them_and_a_plan_can_be_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cluster.json");
        let layer = "--hidden 64 --intermediate 128 --dtype bf16 --quick --json --pes";
        for gemm in ["ampere", "hopper"] {
            let out = format!("--device emulated --gemm {gemm} --out {}", path.display());
            let outcome = run(probe(&format!("{layer} 3 {out}"))).success();
            let cluster = Cluster::read(&path).unwrap();
            assert_eq!(outcome.stdout, std::fs::read_to_string(&path).unwrap());
            check(&cluster, 3);
            for device in &cluster.devices {
                let mb = device.memory_mb.unwrap();
                assert!(mb > 0.0 && mb.is_finite(), "{device:?}");
                // 6 bytes per weight: bf16, and an f32 gradient.
                assert_eq!(device.memory_experts, (mb * 1e6 / (3.0 * 64.0 * 128.0 * 6.0)) as u64, "{device:?}");
            }
            let name = if gemm == "hopper" { "probed on emulated Hopper: " } else { "probed on emulated Ampere: " };
            for figure in ["links", "flop_per_ms"] {
                assert!(cluster.sources[figure].starts_with(name), "{:?}", cluster.sources);
            }
            assert!(cluster.sources["memory_mb"].contains("the device's free memory"), "{:?}", cluster.sources);
            assert_eq!(cluster.probe.as_ref().unwrap().transport, "emulated");
        }
        let (cluster, workload) =
            (path.display().to_string(), concat!(env!("CARGO_MANIFEST_DIR"), "/examples/plan/workload.json"));
        let plan = ["plan", "--cluster", &cluster, "--workload", workload, "--json", "--max-residual", "9"];
        let plan: serde_json::Value = serde_json::from_str(&run(aristos(plan)).success().stdout).unwrap();
        assert_eq!(plan["feasible"], serde_json::json!(true));
        assert_eq!(names_in(folder.path()), ["cluster.json"]);

        // A single device has no links; --memory-mb sets its memory.
        let alone = run(probe(&format!("{layer} 1 --device emulated --memory-mb 10"))).success();
        let alone = Cluster::from_json(&alone.stdout).unwrap();
        check(&alone, 1);
        assert_eq!((alone.devices[0].memory_mb, alone.devices[0].memory_experts), (Some(10.0), 67));
    }

    #[test]
    fn a_killed_pe_is_named_and_nothing_is_left() {
        killed_pes_are_named("--device emulated --pes 3", &[(0, 0.0), (1, 0.1), (2, 0.5)]);
    }

    #[test]
    fn a_stopped_pe_is_named_by_who_waits_for_it() {
        let mut running = start(probe("--device emulated --pes 3 --timeout 3 --json"));
        let pid = running.pe(1);
        std::thread::sleep(Duration::from_millis(500));
        kill_process(pid, Signal::STOP).unwrap();
        running.end().refused(&[" for PE 1"]);
    }

    #[test]
    fn what_no_device_runs_is_one_line() {
        for (args, said) in [
            ("--hidden 36", "--hidden is 36, expected a multiple of 8 on a device"),
            ("--intermediate 1001", "--intermediate is 1001, expected a multiple of 8 on a device"),
            ("--dtype f32", "--dtype f32 on a device, expected bf16 or f16"),
            ("--hidden 1048576 --intermediate 1048576", "GB of memory"),
            ("--pes 3 --memory-mb 1,2", "--memory-mb has 2 numbers, expected one, or 3"),
        ] {
            run(probe(&format!("--json --device emulated {args}"))).refused(&[said]);
        }
        run(probe("--json --gemm ampere")).refused(&["--gemm on the CPU, expected --device too"]);
        if cfg!(not(feature = "cuda")) {
            run(probe("--json --device cuda")).refused(&["--device cuda", "--features cuda"]);
        }
    }
}

#[test]
fn bad_input_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("none").join("c.json");
    // This probe would take over ten seconds until it writes the file.
    let early = format!("--pes 24 --out {}", missing.display());
    run(probe(&early)).refused(&["cannot write", "none"]);
    for (args, said) in [
        ("--json --pes 0", "--pes 0: the number of PEs must be 1 to 1024"),
        ("--json --pes 4000", "--pes 4000"),
        ("--json --pes 3 --memory-mb 1,2", "--memory-mb has 2 numbers, expected one, or 3"),
        ("--json --memory-mb NaN", "--memory-mb is NaN, expected a number of MB from 0 to 1e15"),
        ("--json --memory-mb=-1", "--memory-mb is -1, expected"),
        ("--json --hidden 0", "--hidden is 0, expected 1 to 1048576"),
        ("--json --intermediate 2000000", "--intermediate is 2000000, expected 1 to"),
        ("--json --dtype f16", "--dtype f16 on the CPU"),
        ("--json --timeout 0", "--timeout is 0"),
        ("--json --hidden 1048576 --intermediate 1048576", "GB of memory"),
    ] {
        run(probe(args)).refused(&[said]);
    }
    run(probe("")).misused(&["--out"]);
}
