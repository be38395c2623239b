//! Jobs over TCP as users start them, one process at a time: on this host, and across hosts (network namespaces, which count the bytes
//! sent). Also runs the conformance suite across hosts.
//!
//! A PE of the suite is this program again, so it has its own `main`.

#[path = "binary/mod.rs"]
mod binary;
#[cfg(feature = "emulate")]
#[path = "tcp/devices.rs"]
mod devices;
mod hosts;
#[path = "tcp/link.rs"]
mod link;
#[path = "tcp/once.rs"]
mod once;
mod sample;
mod skip;
#[path = "tcp/strangers.rs"]
mod strangers;
#[macro_use]
#[path = "../shmem/tests/conformance/suite/mod.rs"]
mod suite;
mod undisturbed;
// Declared after the suite, because it uses its macros.
#[cfg(feature = "ofi")]
#[path = "tcp/ofi.rs"]
mod ofi;

use std::cell::Cell;
use std::env;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::panic::catch_unwind;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use aristos::shmem::Shmem;
use aristos::shmem::tcp::{JoinLimits, Joining, TcpTransport, TcpWorld};
use binary::{MOVING, Outcome, Running, aristos, names_in, read_tensors, relative_error, run, start};
use hosts::Hosts;
use rustix::process::Signal;
use sample::Sample;
use suite::{HEAP_BYTES, World};
use undisturbed::undisturbed;

/// Environment variables of a PE of the suite: its number, the transport, and the address of PE 0's host.
const ENV_PE: &str = "ARISTOS_TCP_PE";
const ENV_TRANSPORT: &str = "ARISTOS_TCP_TRANSPORT";
const ENV_ZERO: &str = "ARISTOS_TCP_ZERO";
/// Maximum PEs of a check.
const SUITE_PES: usize = 5;
/// Maximum time from the end of one process to the end of its job.
const NAMED_LIMIT: Duration = Duration::from_secs(2);
/// Maximum time from a host becoming unreachable, or a process being stopped, to the end of the job.
const SILENT_LIMIT: Duration = Duration::from_secs(20);

const SMALL: &str =
    "--tokens 100 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --hot-ratio 0.25 --hot-weight 0.7";
/// A job that does not end by itself during a test.
const LONG: &str = "--tokens 256 --hidden 128 --intermediate 256 --experts 8 --steps 1000000";

fn main() -> ExitCode {
    if let Ok(pe) = env::var(ENV_PE) {
        return play(pe.parse().unwrap());
    }
    let args: Vec<String> = env::args().skip(1).collect();
    let filter = args.iter().find(|argument| !argument.starts_with('-')).map_or("", String::as_str);
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    // Without a filter, only a sample of the long tests and of those over libfabric.
    let links = some_of(link::TESTS, filter);
    #[cfg(feature = "emulate")]
    let devices = devices::TESTS;
    #[cfg(not(feature = "emulate"))]
    let devices: &[Test] = &[];
    #[cfg(feature = "ofi")]
    let ofi = some_of(ofi::TESTS, filter);
    #[cfg(not(feature = "ofi"))]
    let ofi: Vec<&Test> = Vec::new();
    for (name, test) in TESTS
        .iter()
        .chain(once::TESTS)
        .chain(strangers::TESTS)
        .chain(devices)
        .chain(ofi)
        .chain(links)
        .filter(|(name, _)| name.contains(filter))
    {
        let before = skip::count();
        let (sum, word) = match catch_unwind(test) {
            Err(_) => (&mut failed, "FAILED"),
            Ok(()) if skip::count() > before => (&mut skipped, "skipped"),
            Ok(()) => (&mut passed, "ok"),
        };
        *sum += 1;
        println!("test {name} ... {word}");
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    ExitCode::from(u8::from(failed > 0))
}

/// A test, with its name.
type Test = (&'static str, fn());

/// A sample of two tests, chosen by the seed; all tests if there is a filter.
fn some_of(tests: &'static [Test], filter: &str) -> Vec<&'static Test> {
    let all = tests.len() as u64;
    let some = Sample::new(if filter.is_empty() { 2 } else { all }, all);
    some.numbers().map(|number| &tests[number as usize]).collect()
}

/// One process of the suite.
struct Place {
    pe: usize,
    zero: String,
    worlds: Cell<u16>,
}

impl Place {
    /// This process, described by its environment.
    fn of(pe: usize) -> Place {
        Place { pe, zero: env::var(ENV_ZERO).unwrap(), worlds: Cell::new(0) }
    }

    /// A new world of `n_pes`; `None` if this process is not one of its PEs.
    fn join(&self, n_pes: usize) -> Option<TcpWorld> {
        // Processes that are not in this world may already join the next one, so each world has its own port.
        self.worlds.set(self.worlds.get() + 1);
        let rendezvous = format!("{}:{}", self.zero, 20_000 + self.worlds.get());
        let (program, token, limits) = ("suite", b"token", JoinLimits::default());
        let joining = Joining { pe: self.pe, n_pes, rendezvous: &rendezvous, program, token, limits };
        (self.pe < n_pes).then(|| TcpWorld::join(&joining).unwrap())
    }
}

/// A new world for each check.
struct Tcp {
    place: Place,
    is_hybrid: bool,
}

impl World for Tcp {
    type T = TcpTransport;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<TcpTransport>) + Sync) {
        if let Some(world) = self.place.join(n_pes) {
            let make = if self.is_hybrid { TcpTransport::hybrid } else { TcpTransport::new };
            f(&Shmem::new(make(&world, HEAP_BYTES, JoinLimits::default().join).unwrap()));
        }
    }
}

conformance_table!(CHECKS, Tcp);

/// Runs all checks as one PE. A panic ends it, and with it the other PEs.
fn play(pe: usize) -> ExitCode {
    // Prints every panic, including those that a check catches, because one that ends the program needs a message.
    std::panic::set_hook(Box::new(move |info| {
        println!("PE {pe}: {} at {:?}", info.payload_as_str().unwrap_or("(no message)"), info.location());
    }));
    let place = Place::of(pe);
    match &*env::var(ENV_TRANSPORT).unwrap() {
        #[cfg(feature = "ofi")]
        "ofi" => check_all(pe, ofi::CHECKS, &ofi::Ofi { place }),
        transport => check_all(pe, CHECKS, &Tcp { place, is_hybrid: transport == "hybrid" }),
    }
    ExitCode::SUCCESS
}

/// A check of the suite, with its name.
type Check<W> = (&'static str, fn(&W));

fn check_all<W>(pe: usize, checks: &[Check<W>], world: &W) {
    for (check, function) in checks {
        function(world);
        println!("PE {pe} conforms: {check}");
    }
}

/// A port of this host that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The processes of a job of `n` PEs; `pe` makes each command from its arguments.
fn commands(n: usize, zero: &str, args: &str, pe: impl Fn(usize, Vec<String>) -> Command) -> Vec<Command> {
    let rendezvous = format!("{zero}:{}", free_port());
    let place = |rank: usize| {
        let place = format!("--transport tcp --rank {rank} --ranks {n} --rendezvous {rendezvous}");
        args.split_whitespace().chain(place.split_whitespace()).map(str::to_string).collect()
    };
    (0..n).map(|rank| pe(rank, place(rank))).collect()
}

/// A job on this host.
fn here(n: usize, args: &str) -> Vec<Command> {
    commands(n, "localhost", args, |_, args| aristos(args))
}

/// The arguments with another transport than TCP.
fn with_transport(transport: &str, args: Vec<String>) -> Vec<String> {
    args.into_iter().map(|arg| if arg == "tcp" { transport.to_string() } else { arg }).collect()
}

/// A job with one PE per host.
fn over(hosts: &Hosts, n: usize, transport: &str, args: &str) -> Vec<Command> {
    let program = env!("CARGO_BIN_EXE_aristos");
    commands(n, hosts.address(0), args, |rank, args| hosts.command(rank, program, with_transport(transport, args)))
}

/// A job with two PEs on each of two hosts: 0 and 2 on the first, 1 and 3 on the second.
fn two_a_host(hosts: &Hosts, transport: &str, args: &str) -> Vec<Command> {
    commands(4, hosts.address(0), args, |rank, args| {
        hosts.command(rank % 2, env!("CARGO_BIN_EXE_aristos"), with_transport(transport, args))
    })
}

/// Starts all commands, PE 0 last: PEs may start in any order.
fn start_all(commands: Vec<Command>) -> Vec<Running> {
    let mut running: Vec<Running> = commands.into_iter().rev().map(start).collect();
    running.reverse();
    running
}

/// Waits until the PE is connected to all others; returns how long that took.
fn wait_until_joined(pe: &Running) -> Duration {
    let begun = Instant::now();
    // A connected PE has its progress thread.
    let has_joined = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", pe.pid().as_raw_pid())).into_iter().flatten().flatten();
        tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).any(|name| name == "aristos-tcp\n")
    };
    while !has_joined() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the PEs have not met");
        thread::sleep(Duration::from_millis(10));
    }
    begun.elapsed()
}

/// Starts all commands, and waits until the PEs run steps.
fn start_at_work(commands: Vec<Command>) -> Vec<Running> {
    let running = start_all(commands);
    running.iter().for_each(|pe| _ = wait_until_joined(pe));
    // The start of the steps is not visible from outside, so this waits a fixed time.
    thread::sleep(Duration::from_secs(1));
    running
}

fn run_all(commands: Vec<Command>) -> Vec<Outcome> {
    start_all(commands).into_iter().map(Running::end).collect()
}

/// Runs a job that must succeed; returns PE 0's output. The other PEs must print no output.
#[track_caller]
fn report(commands: Vec<Command>) -> String {
    let mut outcomes = run_all(commands).into_iter();
    let zero = outcomes.next().unwrap().success();
    outcomes.for_each(|outcome| assert!(outcome.success().stdout.is_empty()));
    zero.stdout
}

#[track_caller]
fn json(commands: Vec<Command>) -> serde_json::Value {
    serde_json::from_str(&report(commands)).unwrap()
}

/// Starts a job that does not end by itself, lets `act` disturb it, and returns the outcomes of its PEs. Every PE except those in `gone`
/// must end within `limit` and name `culprit` in one line.
#[track_caller]
fn disturbed(
    commands: Vec<Command>,
    limit: Duration,
    culprit: usize,
    gone: &[usize],
    act: impl FnOnce(&[Running]),
) -> Vec<Outcome> {
    let running = start_at_work(commands);
    let acted = Instant::now();
    act(&running);
    let mut outcomes = Vec::new();
    for (pe, running) in running.into_iter().enumerate() {
        if gone.contains(&pe) {
            // A stopped process cannot end by itself; any other may have ended already.
            running.signal(Signal::KILL);
        }
        let outcome = running.end();
        if !gone.contains(&pe) {
            assert!(acted.elapsed() < limit, "PE {pe} took {:?}", acted.elapsed());
            assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
            outcomes.push(outcome.says(&[&format!("PE {pe} failed"), &format!("PE {culprit} is lost: ")]));
        }
    }
    outcomes
}

/// Fails the test unless all processes are refused, and only the `speakers` print a line, with all of `parts`.
#[track_caller]
fn refused(commands: Vec<Command>, speakers: &[usize], parts: &[&str]) {
    for (pe, outcome) in run_all(commands).into_iter().enumerate() {
        match speakers.contains(&pe) {
            true => _ = outcome.refused(parts),
            false => assert!(outcome.status.code() == Some(1) && outcome.stderr.is_empty(), "PE {pe}: {outcome:?}"),
        }
    }
}

/// Fails the test unless both files have the same tensors within 1e-6, norm-wise.
#[track_caller]
fn same(one: &Path, other: &Path) {
    let (one, other) = (read_tensors(one), read_tensors(other));
    assert_eq!(one.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    assert!(one.len() > 20);
    for (name, (shape, want)) in &one {
        let (got_shape, got) = &other[name];
        assert_eq!(shape, got_shape, "{name}");
        let error = relative_error(got, want);
        assert!(error <= 1e-6, "{name}: {error:e}");
    }
}

/// Fails the test unless the suite passes with PEs spread over the hosts.
#[track_caller]
fn conform(hosts: &Hosts, transport: &str) {
    let before = hosts.sent_bytes();
    let pe = |pe: usize| {
        let mut command = hosts.command(pe % hosts.len(), env::current_exe().unwrap(), [""; 0]);
        command.env(ENV_PE, pe.to_string()).env(ENV_TRANSPORT, transport).env(ENV_ZERO, hosts.address(0));
        command
    };
    for (pe, outcome) in run_all((0..SUITE_PES).map(pe).collect()).into_iter().enumerate() {
        let said: Vec<&str> = outcome.stdout.lines().filter(|line| line.contains("conforms")).collect();
        let expected: Vec<String> = CHECKS.iter().map(|(check, _)| format!("PE {pe} conforms: {check}")).collect();
        assert!(outcome.status.success() && said == expected, "{outcome:?}");
    }
    let crossed = hosts.sent_bytes() - before;
    assert!(crossed > 200_000, "{crossed} bytes crossed the network");
}

/// Runs a layer with one PE per host; `start` starts the job. Fails the test unless its check passes, its results equal those over shared
/// memory, and at least the reported bytes crossed the network.
#[track_caller]
fn rows_cross(hosts: &Hosts, transport: &str, steps: usize, start: impl FnOnce(Vec<Command>) -> Vec<Running>) {
    let n = hosts.len();
    let dir = tempfile::tempdir().unwrap();
    let (shm, tcp) = (dir.path().join("shm"), dir.path().join("tcp"));
    let layer = "--tokens 600 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --seed 7 --bias --aux-loss-coef 0.01";
    run(binary::aristos_run(&format!("{layer} --pes {n} --output {}", shm.display()))).success();
    let before = hosts.sent_bytes();
    let args = format!("run {layer} --check --steps {steps} --timeout 30 --json --output {}", tcp.display());
    let outcomes: Vec<Outcome> = start(over(hosts, n, transport, &args)).into_iter().map(Running::end).collect();
    assert!(outcomes.iter().all(|outcome| outcome.status.success()), "{outcomes:?}");
    let report: serde_json::Value = serde_json::from_str(&outcomes[0].stdout).unwrap();
    assert!(outcomes[1..].iter().all(|outcome| outcome.stdout.is_empty()), "{outcomes:?}");
    let crossed = hosts.sent_bytes() - before;
    same(&shm, &tcp);
    assert_eq!((report["check"]["passed"].as_bool(), report["config"]["pes"].as_u64()), (Some(true), Some(n as u64)));
    let remote = steps as f64 * report["remote_bytes_per_step"].as_f64().unwrap();
    assert!(remote > 500_000.0, "{report}");
    assert!(crossed as f64 >= remote, "{crossed} bytes crossed of {remote} that were put");
}

const TESTS: &[(&str, fn())] = &[
    ("here::every_number_of_pes_is_checked", || {
        for n in [1, 2, 3, 5, 8] {
            let args = format!("run {SMALL} --check --steps 2 --chunk-rows 8 --budget-factor 0.5");
            let said = report(here(n, &args));
            assert_eq!(said.matches("check passed").count(), 1, "{said}");
            assert!(said.contains(&format!("{n} PE")), "{said}");
        }
    }),
    ("here::results_are_those_of_shared_memory", || {
        let dir = tempfile::tempdir().unwrap();
        let example = "--model examples/tiny-moe --layer 1 --input examples/tiny-moe/hidden_states.safetensors";
        let losses = "--seed 7 --shared-intermediate 48 --bias --aux-loss-coef 0.01 --z-loss-coef 0.001";
        for (name, layer) in [("example", example.to_string()), ("losses", format!("{SMALL} {losses}"))] {
            for n in [2, 4] {
                let out = |transport: &str| dir.path().join(format!("{name}-{n}-{transport}"));
                let (shm, tcp) = (out("shm"), out("tcp"));
                run(binary::aristos_run(&format!("{layer} --pes {n} --output {}", shm.display()))).success();
                report(here(n, &format!("run {layer} --pes {n} --output {}", tcp.display())));
                same(&shm, &tcp);
            }
        }
        assert_eq!(names_in(dir.path()).len(), 8, "nothing else is left");
    }),
    ("here::groups_by_a_plan_of_the_pes_probed", || {
        // Eight experts of 64 x 96 take 0.147 MB each with gradients: PEs 0 and 3 have room for all, PEs 1 and 2 must share them.
        let report = json(here(4, &format!("run {SMALL} --plan auto --memory-mb 10,0.6,0.7,10 --check --json")));
        assert_eq!(report["plan"]["source"], "auto", "{report}");
        assert_eq!(report["check"]["passed"], true, "{report}");
    }),
    ("here::replicas_by_a_plan", || {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("plan.json");
        for groups in [1, 2] {
            fs::write(&file, binary::plan_with_replicas(groups)).unwrap();
            let report = json(here(4, &format!("run {SMALL} --plan {} --check --json", file.display())));
            assert_eq!(report["check"]["passed"], true, "{report}");
        }
    }),
    ("here::the_benchmarks_and_the_probe", || {
        let dir = tempfile::tempdir().unwrap();
        let cluster = dir.path().join("cluster.json");
        let probe = format!("probe --quick --hidden 64 --intermediate 96 --out {}", cluster.display());
        let said = report(here(3, &probe));
        assert!(said.contains("0 to 1") && said.contains("2 to 1"), "{said}");
        let probed = aristos::cluster::Cluster::read(&cluster).unwrap();
        assert_eq!((probed.devices.len(), &*probed.probe.unwrap().transport), (3, "tcp"));
        let p2p = "bench p2p --max 4KiB --iterations 5 --warmup 1 --json";
        let said = report(here(2, p2p));
        for op in ["put", "put-nbi", "get", "put-signal", "atomic"] {
            assert!(said.contains(&format!("\"{op}\"")), "{op}: {said}");
        }
        let straggler = json(here(3, "bench straggler --steps 20 --warmup 2 --compute-us 10 --json"));
        assert_eq!(
            (straggler["transport"].as_str(), straggler["modes"].as_array().map(Vec::len)),
            (Some("tcp"), Some(2))
        );
        let moe = "bench moe --tokens 64 --hidden 64 --intermediate 64 --iterations 2 --warmup 1";
        let said = report(here(2, moe));
        assert!(said.contains("2 PEs") && said.contains("pipelined / bulk"), "{said}");
        refused(here(3, p2p), &[0], &["3 PEs", "expected 2"]);
    }),
    ("here::ranks_are_read_from_launchers", || {
        let by = |variables: &dyn Fn(usize, u16) -> String, device: &str| -> Vec<Command> {
            let port = free_port();
            let command = |rank: usize| {
                let mut command = binary::aristos_run(&format!("--transport tcp --device {device} {SMALL} --check"));
                command
                    .env_remove("SLURM_JOB_ID")
                    .envs(variables(rank, port).split_whitespace().map(|pair| pair.split_once('=').unwrap()));
                command
            };
            (0..2).map(command).collect()
        };
        let torchrun = |rank: usize, port: u16| {
            let run = format!("TORCHELASTIC_RUN_ID={port} MASTER_ADDR=localhost MASTER_PORT={}", port - 1);
            format!("RANK={rank} WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 {run}")
        };
        let slurm = |rank: usize, port: u16| {
            let step = format!("SLURM_JOB_ID={port} SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_STEP_NUM_TASKS=2");
            format!("{step} SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=localhost,elsewhere")
        };
        let mpirun = |rank: usize, port: u16| {
            format!(
                "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE={port}"
            )
        };
        for device in ["cpu", "emulated"].into_iter().take(1 + usize::from(cfg!(feature = "emulate"))) {
            for commands in [by(&torchrun, device), by(&slurm, device), by(&mpirun, device)] {
                let said = report(commands);
                assert!(said.contains("2 PEs") && said.contains("check passed"), "{device}: {said}");
            }
        }
    }),
    ("here::invalid_jobs_are_one_line", || {
        refused(here(3, "run --model nowhere --input nowhere"), &[0], &["nowhere/config.json", "No such file"]);
        refused(here(2, &format!("run {SMALL} --steps 0")), &[0], &["--steps is 0"]);
        refused(here(2, &format!("run {SMALL} --pes 3")), &[0], &["--pes 3", "2 processes", "expected 2"]);
        refused(here(2, &format!("run {SMALL} --output /nowhere/out")), &[0], &["/nowhere"]);
        #[cfg(not(feature = "cuda"))]
        refused(here(2, &format!("run {SMALL} --device cuda")), &[0], &["--device"]);
        let mut different = here(3, &format!("run {SMALL}"));
        different[1].args(["--steps", "2"]);
        refused(different, &[1], &["PE 1: its arguments are not those of PE 0"]);
        let alone = |args: &str, parts: &[&str]| _ = run(aristos(args.split_whitespace())).refused(parts);
        alone("run --transport tcp", &["--rank, --ranks and --rendezvous", "torchrun"]);
        alone("run --rank 0 --ranks 2", &["--rank with --transport shm"]);
        alone("bench p2p --rendezvous a:1", &["--rendezvous", "expected --transport tcp, hybrid or ofi"]);
        #[cfg(not(feature = "cuda"))]
        alone("bench p2p --transport nvshmem --rank 0 --ranks 2 --rendezvous a:1", &["--transport nvshmem", "no CUDA"]);
        let tcp = "run --transport tcp --ranks 2";
        alone(&format!("{tcp} --rank 2 --rendezvous a:1"), &["--rank is 2", "below --ranks, which is 2"]);
        alone(&format!("{tcp} --rank 1"), &["nothing says where", "--rendezvous HOST:PORT"]);
        alone(&format!("{tcp} --rank 1 --rendezvous here"), &["--rendezvous is here, expected HOST:PORT"]);
        alone("run --transport tcp --ranks 9999 --rank 0 --rendezvous a:1", &["--ranks is 9999, expected 1 to 1024"]);
        run(aristos("run --transport tcp --rank 0".split_whitespace())).misused(&["--ranks"]);
    }),
    ("here::missing_pe_is_named", || {
        let mut commands = here(3, &format!("run {SMALL}"));
        commands.iter_mut().for_each(|command| _ = command.env("ARISTOS_JOIN_LIMIT", "1"));
        commands.truncate(2);
        let mut outcomes = run_all(commands).into_iter();
        outcomes.next().unwrap().refused(&["PE 2 has not come within 1 s"]);
        outcomes.next().unwrap().refused(&["PE 0 has ended"]);
    }),
    ("here::other_jobs_and_strangers_are_refused", || {
        let mut commands = here(3, &format!("run {SMALL} --check"));
        let args: Vec<String> = commands[0].get_args().map(|arg| arg.to_str().unwrap().to_string()).collect();
        let rendezvous = args.last().unwrap().clone();
        commands.iter_mut().for_each(|command| _ = command.env("ARISTOS_JOB_TOKEN", "right"));
        let mut wrong = aristos(args.iter().map(|arg| if arg == "0" { "2" } else { arg }));
        wrong.env("ARISTOS_JOB_TOKEN", "wrong");
        let late = commands.pop().unwrap();
        let running = start_all(commands);
        run(wrong).refused(&["is not PE 0 of this job: it does not know the job's token"]);
        let mut strangers: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(&rendezvous).unwrap()).collect();
        strangers[7].write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        run(late).success();
        let mut outcomes = running.into_iter().map(Running::end);
        let zero = outcomes.next().unwrap();
        assert!(zero.status.success() && zero.stdout.contains("check passed"), "{zero:?}");
        let lines: Vec<&str> = zero.stderr.lines().collect();
        assert!(
            lines.len() <= 8 && lines[0].contains("refused 127.0.0.1: it does not know the job's token"),
            "{zero:?}"
        );
        outcomes.for_each(|outcome| _ = outcome.success());
    }),
    ("here::killed_pe_is_named", || {
        for (n, victim) in [(2, 1), (3, 0), (4, 2)] {
            let kill = |pes: &[Running]| pes[victim].signal(Signal::KILL);
            let outcomes = disturbed(here(n, &format!("run {LONG}")), NAMED_LIMIT, victim, &[victim], kill);
            assert_eq!(outcomes.len(), n - 1);
        }
    }),
    ("here::pe_killed_while_experts_move_is_named", || {
        let mut commands = here(3, &format!("run {MOVING}"));
        commands.iter_mut().for_each(|command| _ = command.env("RUST_LOG", "aristos::run=info"));
        let mut running = start_all(commands);
        running.iter_mut().for_each(|running| running.says("experts move"));
        running[2].signal(Signal::KILL);
        let killed = Instant::now();
        for (pe, outcome) in running.into_iter().map(Running::end).enumerate().take(2) {
            assert!(killed.elapsed() < NAMED_LIMIT && outcome.status.code() == Some(1), "{outcome:?}");
            let said = outcome.stderr.lines().last().unwrap_or_default();
            let named = said.starts_with(&format!("aristos: PE {pe} failed in phase move: "));
            assert!(named && said.contains("PE 2 is lost: "), "{outcome:?}");
        }
    }),
    ("here::sigterm_to_pe_0_ends_all", || {
        let end = |pes: &[Running]| pes[0].signal(Signal::TERM);
        disturbed(here(3, &format!("run {LONG}")), NAMED_LIMIT, 0, &[0], end);
    }),
    ("here::stopped_pe_is_named", || {
        let stop = |pes: &[Running]| {
            pes[1].signal(Signal::STOP);
            // The stopped PE is killed once `act` returns. The others must end before that.
            thread::sleep(Duration::from_secs(4));
        };
        let outcomes = disturbed(here(3, &format!("run {LONG} --timeout 1")), SILENT_LIMIT, 1, &[1], stop);
        for outcome in outcomes {
            assert!(outcome.stderr.contains("its process does not answer"), "{outcome:?}");
        }
    }),
    ("here::pe_stopped_during_the_start_is_named", || {
        // As soon as the PEs are connected, while they probe or prepare.
        for (transport, more, victim) in [("tcp", "", 1), ("hybrid", "--plan auto", 0), ("tcp", "--plan auto", 2)] {
            let job = commands(3, "localhost", &format!("run {LONG} --timeout 1 {more}"), |_, args| {
                aristos(with_transport(transport, args))
            });
            let running = start_all(job);
            running.iter().for_each(|pe| _ = wait_until_joined(pe));
            running[victim].signal(Signal::STOP);
            let stopped = Instant::now();
            let mut ended = Vec::new();
            let mut gone = None;
            for (pe, running) in running.into_iter().enumerate() {
                if pe == victim {
                    gone = Some(running);
                    continue;
                }
                ended.push((pe, running.end(), stopped.elapsed()));
            }
            gone.iter().for_each(|running| running.signal(Signal::KILL));
            for (pe, outcome, took) in ended {
                assert!(took < SILENT_LIMIT, "{transport} {more}: PE {pe} took {took:?}");
                assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
                outcome
                    .says(&[&format!("PE {pe} failed"), &format!("PE {victim} is lost: its process does not answer")]);
            }
        }
    }),
    ("hosts::the_suite", || {
        let Some(hosts) = Hosts::make(3) else { return };
        conform(&hosts, "tcp");
        conform(&hosts, "hybrid");
    }),
    ("hosts::hybrid_uses_shared_memory_within_a_host", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let dir = tempfile::tempdir().unwrap();
        let layer = "--tokens 600 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --seed 7 --steps 12";
        let mut loopback = Vec::new();
        for transport in ["tcp", "hybrid"] {
            let output = dir.path().join(transport);
            let args = format!("run {layer} --check --json --output {}", output.display());
            let before = ["eth0", "lo"].map(|interface| hosts.sent_bytes_by(interface));
            let report = json(two_a_host(&hosts, transport, &args));
            let after = ["eth0", "lo"].map(|interface| hosts.sent_bytes_by(interface));
            assert_eq!((&report["check"]["passed"], &report["config"]["transport"]), (&true.into(), &transport.into()));
            let remote = 12.0 * report["remote_bytes_per_step"].as_f64().unwrap();
            // Two of a PE's three peers are on the other host.
            let crossed = (after[0] - before[0]) as f64;
            assert!(crossed >= 0.6 * remote && remote > 500_000.0, "{transport}: {crossed} bytes of {remote}");
            // Over `tcp` all bytes count as network bytes; with `hybrid` only those that crossed, which excludes frame headers and
            // acknowledgements.
            let network = report["traffic"]["network_bytes"].as_f64().unwrap();
            let is_what_crossed = network < crossed && crossed < 1.5 * network;
            assert!(
                if transport == "tcp" { network == remote } else { is_what_crossed },
                "{transport}: {crossed} of {network}"
            );
            loopback.push((after[1] - before[1]) as f64 / remote);
        }
        assert!(loopback[0] > 0.25 && loopback[1] < 0.05, "over loopback, of all bytes put: {loopback:?}");
        same(&dir.path().join("tcp"), &dir.path().join("hybrid"));
    }),
    ("hosts::killed_or_stopped_hybrid_pe_is_named", || {
        let Some(hosts) = Hosts::make(2) else { return };
        let start = |args: &str| two_a_host(&hosts, "hybrid", args);
        // PE 3 is also the relay of rows from the other host.
        let once = start(&format!("run {LONG} --rows-per host"));
        disturbed(once, NAMED_LIMIT, 3, &[3], |pes| pes[3].signal(Signal::KILL));
        // PEs of the same host and of the other host must name it.
        let kill = |pes: &[Running]| pes[2].signal(Signal::KILL);
        disturbed(start(&format!("run {LONG}")), NAMED_LIMIT, 2, &[2], kill);
        let stop = |pes: &[Running]| {
            pes[1].signal(Signal::STOP);
            thread::sleep(Duration::from_secs(4));
        };
        disturbed(start(&format!("run {LONG} --timeout 1")), SILENT_LIMIT, 1, &[1], stop);
        hosts.assert_empty();
    }),
    ("hosts::rows_cross_the_network", || {
        for n in [2, 3] {
            let Some(hosts) = Hosts::make(n) else { return };
            rows_cross(&hosts, "tcp", 3, start_all);
        }
    }),
    ("hosts::the_hosts_are_measured", || {
        let Some(hosts) = Hosts::make(3) else { return };
        let dir = tempfile::tempdir().unwrap();
        let cluster = dir.path().join("cluster.json");
        let probe = format!("probe --quick --hidden 64 --intermediate 96 --out {}", cluster.display());
        report(over(&hosts, 3, "tcp", &probe));
        let probed = aristos::cluster::Cluster::read(&cluster).unwrap();
        let names: Vec<&str> = probed.devices.iter().map(|device| &*device.host).collect();
        assert_eq!(names, ["node0", "node1", "node2"]);
        let straggler = "bench straggler --steps 40 --warmup 2 --compute-us 3000 --inject slow-pe=2:8 --json";
        let report = || json(over(&hosts, 3, "tcp", straggler));
        for mode in undisturbed(report)["modes"].as_array().unwrap() {
            assert_eq!(mode["culprit"]["pe"], 2, "{mode}");
        }
    }),
    ("hosts::killed_pe_is_named", || {
        let Some(hosts) = Hosts::make(3) else { return };
        for victim in [0, 2] {
            let kill = |pes: &[Running]| pes[victim].signal(Signal::KILL);
            disturbed(over(&hosts, 3, "tcp", &format!("run {LONG}")), NAMED_LIMIT, victim, &[victim], kill);
        }
    }),
    ("hosts::frozen_host_is_named", || {
        let Some(hosts) = Hosts::make(3) else { return };
        let stop = |pes: &[Running]| {
            pes[1].signal(Signal::STOP);
            thread::sleep(Duration::from_secs(4));
        };
        disturbed(over(&hosts, 3, "tcp", &format!("run {LONG} --timeout 1")), SILENT_LIMIT, 1, &[1], stop);
    }),
];
