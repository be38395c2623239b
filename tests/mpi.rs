//! The MPI transport, under the `mpirun` of the MPI that this program was built with: the conformance suite, then the main
//! job as users start it.
//!
//! A PE of the suite is this program again, so it has its own `main`.

#[path = "binary/mod.rs"]
mod binary;
mod common;
mod hosts;
#[path = "mpi/network.rs"]
mod network;
mod sample;
mod skip;
#[macro_use]
#[path = "../shmem/tests/conformance/suite/mod.rs"]
mod suite;
mod undisturbed;

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::panic::{RefUnwindSafe, UnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use aristos::moe::placement::block;
use aristos::moe::{Layer, LayerSpec, MoeLayer, Options, RouterConfig};
use aristos::shmem::mpi::{MpiTransport, MpiWorld, library};
use aristos::shmem::{Shmem, Transport};
use binary::{Outcome, read_tensors, relative_error, run, start};
use common::{mixtral, on_pes, shm, synthetic};
use rustix::process::{Pid, Signal, kill_process};
use suite::{HEAP_BYTES, World};

/// Set in a PE of the suite: its checks, separated by commas.
const ENV_CHECKS: &str = "ARISTOS_MPI_CHECKS";
/// Maximum checks of one job, small so that a hanging check delays few others.
const CHECKS_PER_JOB: usize = 8;
/// Set in all processes of a job: identifies the test.
const ENV_JOB: &str = "ARISTOS_MPI_JOB";
/// Maximum PEs of a check.
const SUITE_PES: usize = 5;
/// Time within which a job must end, and its processes be gone, after a PE has died.
const END_LIMIT: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    if let Ok(checks) = env::var(ENV_CHECKS) {
        return play(&checks);
    }
    let args: Vec<String> = env::args().skip(1).collect();
    let filter = args.iter().find(|argument| !argument.starts_with('-')).map_or("", String::as_str);
    let mut sums = Sums::default();
    conforming("conformance", filter, all_checks(), &mut sums, suite_here);
    // Emulates a network without RDMA: each window operation is a message that its target handles only inside an MPI call.
    if is_open_mpi() {
        conforming("conformance_by_messages", filter, all_checks(), &mut sums, || {
            let mut command = suite_here();
            command.env("OMPI_MCA_osc", "pt2pt");
            command
        });
    }
    network::conforming(filter, &mut sums);
    for (name, test) in TESTS.iter().chain(network::TESTS) {
        let name = format!("run::{name}");
        if name.contains(filter) {
            let before = skip::count();
            let passed = catch_unwind(test).is_ok();
            sums.add(&name, if skip::count() > before { Test::Skipped } else { Test::Ran(passed) });
        }
    }
    println!("{} passed, {} failed, {} skipped", sums.passed, sums.failed, sums.skipped);
    ExitCode::from(u8::from(sums.failed > 0))
}

/// Counts of test outcomes.
#[derive(Default)]
struct Sums {
    passed: usize,
    failed: usize,
    skipped: usize,
}

enum Test {
    /// Whether it passed.
    Ran(bool),
    Skipped,
}

impl Sums {
    fn add(&mut self, name: &str, test: Test) {
        let (sum, word) = match test {
            Test::Ran(true) => (&mut self.passed, "ok"),
            Test::Ran(false) => (&mut self.failed, "FAILED"),
            Test::Skipped => (&mut self.skipped, "skipped"),
        };
        *sum += 1;
        println!("test {name} ... {word}");
    }
}

/// This program on the maximum number of PEs of a check.
fn suite_here() -> Command {
    mpirun(SUITE_PES, env::current_exe().unwrap(), [""; 0])
}

/// Runs the checks whose name contains `filter`, several per `job`, because starting a job takes longer than a check. A
/// failure in a PE ends its job; the checks after it run in a new job.
fn conforming<'a>(
    suite: &str,
    filter: &str,
    checks: impl Iterator<Item = &'a Check>,
    sums: &mut Sums,
    job: impl Fn() -> Command + UnwindSafe + RefUnwindSafe,
) {
    let name = |check: &str| format!("{suite}::{check}");
    let checks: Vec<&str> = checks.map(|(check, _)| *check).filter(|check| name(check).contains(filter)).collect();
    for mut left in checks.chunks(CHECKS_PER_JOB) {
        while !left.is_empty() {
            let outcome = catch_unwind(|| {
                let mut command = job();
                command.env(ENV_CHECKS, left.join(","));
                run(command)
            });
            let said = outcome.as_ref().map_or("", |outcome| &*outcome.stdout);
            let said_by_all =
                |check: &&&str| (0..SUITE_PES).all(|pe| said.lines().any(|line| line == conforms(pe, check)));
            let mut passed = left.iter().take_while(said_by_all).count();
            if passed == left.len() && !outcome.as_ref().is_ok_and(|outcome| outcome.status.success()) {
                passed -= 1; // The job did not end well.
            }
            left[..passed].iter().for_each(|check| sums.add(&name(check), Test::Ran(true)));
            left = &left[passed..];
            if let [failed, others @ ..] = left {
                if let Ok(outcome) = outcome {
                    println!("{outcome:?}");
                }
                sums.add(&name(failed), Test::Ran(false));
                left = others;
            }
        }
    }
}

/// The line that PE `pe` prints after a check.
fn conforms(pe: usize, check: &str) -> String {
    format!("PE {pe} conforms: {check}")
}

/// The world whose first PEs run each check.
struct Mpi(MpiWorld);

impl World for Mpi {
    type T = MpiTransport<'static>;
    fn run(&self, n_pes: usize, f: impl Fn(&Shmem<MpiTransport<'static>>) + Sync) {
        for piece_bytes in [None, Some(24), None] {
            // Leaked, because the transport's type `T` has no lifetime parameter.
            if let Some(world) = self.0.first(n_pes).unwrap() {
                let transport = MpiTransport::new(Box::leak(Box::new(world)), HEAP_BYTES).unwrap();
                f(&Shmem::new(match piece_bytes {
                    Some(bytes) => transport.with_piece_bytes(bytes),
                    None => transport,
                }));
            }
            self.0.barrier(Duration::from_secs(60)).unwrap();
        }
    }
}

conformance_table!(CHECKS, Mpi);

/// A check with its name.
type Check = (&'static str, fn(&Mpi));

/// The checks of the one-sided layer, and that of the MoE layer.
fn all_checks() -> impl Iterator<Item = &'static Check> {
    const LAYER: Check = ("experts_by_the_callers_routing", experts_by_the_callers_routing);
    CHECKS.iter().chain(&[LAYER])
}

/// With the caller's routing, results over MPI equal those over shared memory bit for bit.
fn experts_by_the_callers_routing(world: &Mpi) {
    let n = 4;
    let spec = |router: RouterConfig| {
        let mut config = mixtral(24, 20, 6, 2);
        config.router = router;
        common::spec::<f32>(&config, n, TOKENS.div_ceil(n), &Options::default())
    };
    let (own, external) = (spec(mixtral(24, 20, 6, 2).router), spec(RouterConfig::external(2)));
    let heap_bytes = own.heap_bytes().unwrap() + external.heap_bytes().unwrap();
    if let Some(first) = world.0.first(n).unwrap() {
        let pe = Shmem::new(MpiTransport::new(Box::leak(Box::new(first)), heap_bytes).unwrap());
        let over_mpi = by_the_callers_routing(&pe, &own, &external);
        let over_shm = on_pes(shm(n, heap_bytes), |pe| by_the_callers_routing(&pe, &own, &external));
        assert!(over_mpi.iter().flatten().all(|x| x.is_finite()));
        assert_eq!(over_mpi, over_shm[pe.my_pe()]);
    }
    world.0.barrier(Duration::from_secs(60)).unwrap();
}

/// Tokens of all PEs together, not a multiple of the number of PEs.
const TOKENS: usize = 37;

/// Routes by the router of one layer and passes its choice to a layer without router. Returns the latter's output and its
/// gradients of the input, of the routing weights and of the local experts.
fn by_the_callers_routing<T: Transport>(pe: &Shmem<T>, own: &LayerSpec, external: &LayerSpec) -> Vec<Vec<f32>> {
    let source = synthetic(own.config.clone(), 7);
    let tokens = block(TOKENS, pe.n_pes(), pe.my_pe());
    let (x, grad_output) = (source.hidden_states(tokens.clone()), source.grad_output(tokens));
    let zeros = || vec![0.0f32; x.len()];
    let (mut expected, mut output, mut grad_input) = (zeros(), zeros(), zeros());

    let mut layer = Layer::<_, f32>::builder(own.clone()).build(pe, &source).unwrap();
    let saved = layer.forward(&x, &mut expected).unwrap();
    let routed = layer.routed(&saved).unwrap();
    layer.free().unwrap();

    let mut layer = Layer::<_, f32>::builder(external.clone()).build(pe, &source).unwrap();
    let ids: Vec<i32> = routed.chosen.iter().map(|&e| e as i32).collect();
    let mut grad_weights = vec![0.0; ids.len()];
    let mut saved = layer.experts(&x, &ids, &routed.weights, &mut output).unwrap();
    assert_eq!(output, expected, "the caller's routing is the router's");
    layer.experts_backward(&mut saved, &x, &grad_output, &mut grad_input, &mut grad_weights).unwrap();
    let experts = layer.gradients().unwrap().experts.iter().flat_map(|e| e.matrix.clone()).collect::<Vec<_>>();
    layer.free().unwrap();
    [output, grad_input, grad_weights].into_iter().chain(experts).collect()
}

/// Runs checks as one PE. A panic ends the job, because unwinding drops the world, and that aborts MPI.
fn play(checks: &str) -> ExitCode {
    let world = Mpi(MpiWorld::init().unwrap());
    let pe = world.0.my_pe();
    // Some checks catch panics. Only a panic that ends the job matters, and mpirun reports it.
    std::panic::set_hook(Box::new(move |info| {
        eprintln!("PE {pe}: {} at {:?}", info.payload_as_str().unwrap_or("(no message)"), info.location());
    }));
    assert_eq!(world.0.n_pes(), SUITE_PES);
    for check in checks.split(',') {
        let mut checks = all_checks().chain(network::CHECKS_ACROSS_HOSTS);
        let (_, function) = checks.find(|(name, _)| *name == check).unwrap();
        function(&world);
        println!("{}", conforms(pe, check));
    }
    ExitCode::SUCCESS
}

/// Whether this program is built with Open MPI; MPICH otherwise.
fn is_open_mpi() -> bool {
    library().starts_with("Open MPI")
}

fn in_path(name: &str) -> Option<PathBuf> {
    let places = env::var_os("PATH")?;
    env::split_paths(&places).map(|place| place.join(name)).find(|path| path.is_file())
}

/// The launcher of Open MPI or of MPICH.
fn launcher(open_mpi: bool) -> Option<PathBuf> {
    let names = if open_mpi { ["mpirun.openmpi", "mpirun"] } else { ["mpirun.mpich", "mpirun"] };
    names.into_iter().find_map(in_path)
}

/// `program` as a job of `n` processes, in the repository's root.
fn mpirun<S: AsRef<OsStr>>(n: usize, program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(launcher(is_open_mpi()).expect("mpirun in PATH"));
    if is_open_mpi() {
        // Debian's launcher needs permission to run as root, and with more processes than CPUs.
        command.args(["--allow-run-as-root", "--oversubscribe"]);
    }
    command.args(["-n", &n.to_string()]).arg(program).args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// `aristos run --transport mpi` on `n` PEs, with arguments separated by spaces.
fn aristos_run(n: usize, args: &str) -> Command {
    let args = ["run", "--transport", "mpi"].into_iter().chain(args.split_whitespace());
    mpirun(n, env!("CARGO_BIN_EXE_aristos"), args)
}

/// The program's lines on standard error. Launchers add their own if a process has an exit code.
fn lines(outcome: &Outcome) -> Vec<&str> {
    outcome.stderr.lines().filter(|line| line.starts_with("aristos: ")).collect()
}

/// Fails the test unless one PE refused the job with exit code 1 and one line that contains all `parts`.
#[track_caller]
fn refused(command: Command, parts: &[&str]) {
    let outcome = run(command);
    assert_eq!((outcome.status.code(), lines(&outcome).len()), (Some(1), 1), "{outcome:?}");
    for part in parts {
        assert!(lines(&outcome)[0].contains(part), "{outcome:?}\ndoes not say {part:?}");
    }
}

/// The processes of a job by PE.
fn pes_of(job: &str) -> BTreeMap<usize, Pid> {
    let job = format!("{ENV_JOB}={job}");
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes
        .filter_map(|pid: i32| {
            // The process may have ended meanwhile.
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let variables: Vec<&str> =
                environment.split(|byte| *byte == 0).filter_map(|v| std::str::from_utf8(v).ok()).collect();
            variables.iter().find(|v| **v == job)?;
            let rank = ["OMPI_COMM_WORLD_RANK=", "PMI_RANK="];
            let pe = rank.iter().find_map(|name| variables.iter().find_map(|v| v.strip_prefix(name)?.parse().ok()))?;
            Some((pe, Pid::from_raw(pid)?))
        })
        .collect()
}

/// A layer with more steps than a job can run.
const LONG: &str = "--tokens 256 --hidden 128 --intermediate 256 --experts 8 --steps 1000000";

/// Starts a job of `n` PEs that is too long to end by itself, lets `act` disturb its working PEs, and returns how it ended.
fn disturbed(name: &str, n: usize, mut command: Command, act: impl Fn(&BTreeMap<usize, Pid>)) -> Outcome {
    let name = format!("{name}-{}", std::process::id());
    command.env(ENV_JOB, &name);
    let running = start(command);
    let begun = Instant::now();
    let pes = loop {
        let pes = pes_of(&name);
        // The start of the steps is not visible from outside, so this waits a fixed time.
        if pes.len() == n && begun.elapsed() > Duration::from_secs(3) {
            break pes;
        }
        assert!(begun.elapsed() < END_LIMIT, "PEs of {n}: {pes:?}");
        thread::sleep(Duration::from_millis(20));
    };
    let acted = Instant::now();
    act(&pes);
    let outcome = running.end();
    assert!(acted.elapsed() < END_LIMIT, "it took {:?}", acted.elapsed());
    while !pes_of(&name).is_empty() {
        assert!(acted.elapsed() < END_LIMIT, "left {:?}", pes_of(&name));
        thread::sleep(Duration::from_millis(20));
    }
    outcome
}

const SMALL: &str =
    "--tokens 100 --hidden 64 --intermediate 96 --experts 8 --top-k 2 --hot-ratio 0.25 --hot-weight 0.7";

const TESTS: &[(&str, fn())] = &[
    ("the_c_programs_of_the_benchmarks_compile", || {
        let compiler = if is_open_mpi() { "mpicc.openmpi" } else { "mpicc.mpich" };
        for program in ["benches/mpi_alltoallv.c", "benches/mpi_rma.c", "tests/hosts/mpich_finalize.c"] {
            let mut command = Command::new(if in_path(compiler).is_some() { compiler } else { "mpicc" });
            command.args(["-fsyntax-only", "-Wall", "-Werror", program]).current_dir(env!("CARGO_MANIFEST_DIR"));
            run(command).success();
        }
    }),
    ("every_number_of_pes_is_checked", || {
        for n in [1, 2, 3, 4, 8] {
            let outcome = run(aristos_run(n, &format!("{SMALL} --check --steps 2 --chunk-rows 8 --budget-factor 0.5")));
            let outcome = outcome.success();
            assert_eq!(outcome.stdout.matches("check passed").count(), 1, "{outcome:?}");
            assert!(outcome.stdout.contains(&format!("{n} PE")), "{outcome:?}");
        }
    }),
    ("results_are_those_of_shared_memory", || {
        let dir = tempfile::tempdir().unwrap();
        let example = "--model examples/tiny-moe --layer 1 --input examples/tiny-moe/hidden_states.safetensors";
        let losses = "--seed 7 --shared-intermediate 48 --bias --aux-loss-coef 0.01 --z-loss-coef 0.001";
        for (name, layer) in [("example", example.to_string()), ("losses", format!("{SMALL} {losses}"))] {
            for n in [2, 4] {
                let out = |transport: &str| dir.path().join(format!("{name}-{n}-{transport}"));
                let (shm, mpi) = (out("shm"), out("mpi"));
                run(binary::aristos_run(&format!("{layer} --pes {n} --output {}", shm.display()))).success();
                run(aristos_run(n, &format!("{layer} --pes {n} --output {}", mpi.display()))).success();
                same(&shm, &mpi);
            }
        }
        assert_eq!(binary::names_in(dir.path()).len(), 8, "nothing else is left");
    }),
    ("report_and_trace_are_of_all_pes", || {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace.json");
        let args = format!("{SMALL} --steps 3 --json --trace {}", trace.display());
        let outcome = run(aristos_run(3, &args)).success();
        let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert!(report.to_string().contains(r#""pes":3"#), "{report}");
        let trace: serde_json::Value = serde_json::from_slice(&fs::read(trace).unwrap()).unwrap();
        for pe in 0..3 {
            assert!(trace.to_string().contains(&format!(r#""pid":{pe}"#)), "PE {pe} has no spans");
        }
    }),
    ("pes_are_probed_and_run_by_the_plan", || {
        let dir = tempfile::tempdir().unwrap();
        let cluster = dir.path().join("cluster.json");
        let args = format!("probe --transport mpi --quick --hidden 64 --intermediate 96 --out {}", cluster.display());
        let outcome = run(mpirun(3, env!("CARGO_BIN_EXE_aristos"), args.split_whitespace())).success();
        assert!(outcome.stdout.contains("0 to 1") && outcome.stdout.contains("2 to 1"), "{outcome:?}");
        let probed = aristos::cluster::Cluster::read(&cluster).unwrap();
        assert_eq!((probed.devices.len(), &*probed.probe.unwrap().transport), (3, "mpi"));
        // Eight experts of 64 x 96 take 0.147 MB each with the gradient. Two PEs must share the experts, two can hold all.
        let args = format!("{SMALL} --plan auto --memory-mb 10,0.6,0.7,10 --check --json");
        let outcome = run(aristos_run(4, &args)).success();
        let report: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(report["plan"]["source"], "auto", "{report}");
        let groups = report["plan"]["groups"].as_array().unwrap();
        let experts = |group: &serde_json::Value| -> usize {
            group["experts"].as_array().unwrap().iter().map(|of_pe| of_pe.as_array().unwrap().len()).sum()
        };
        assert!(groups.iter().all(|group| experts(group) == 8), "{report}");
        assert_eq!(report["check"]["passed"], true, "{report}");
        let file = dir.path().join("plan.json");
        fs::write(&file, binary::plan_with_replicas(1)).unwrap();
        let outcome = run(aristos_run(4, &format!("{SMALL} --plan {} --check", file.display()))).success();
        assert!(outcome.stdout.contains("check passed"), "{outcome:?}");
        refused(aristos_run(2, &format!("{SMALL} --plan auto --memory-mb 0.1,0.1")), &["--plan auto", "short"]);
        refused(aristos_run(2, &format!("{SMALL} --plan auto --memory-mb 1,2,3")), &["--memory-mb has 3 numbers"]);
    }),
    ("without_mpirun_it_is_one_pe", || {
        let args = format!("--transport mpi --check {SMALL}");
        let outcome = run(binary::aristos_run(&args)).success();
        assert!(outcome.stdout.contains("1 PE") && outcome.stdout.contains("check passed"), "{outcome:?}");
    }),
    ("what_does_not_fit_is_one_line", || {
        refused(aristos_run(2, &format!("{SMALL} --pes 3")), &["--pes 3", "2 processes", "expected 2"]);
        refused(aristos_run(3, "--model nowhere --input nowhere"), &["nowhere/config.json", "No such file"]);
        refused(aristos_run(2, "--tokens 10 --steps 0"), &["--steps is 0"]);
        refused(aristos_run(2, &format!("{SMALL} --output /nowhere/out")), &["/nowhere"]);
        refused(aristos_run(2, &format!("{SMALL} --device cuda")), &["--device"]);
        // A build with CUDA accepts the device.
        if cfg!(not(feature = "cuda")) {
            refused(binary::aristos_run("--tokens 8 --device cuda"), &["--device cuda", "--features cuda"]);
        }
    }),
    ("without_the_flag_the_processes_share_memory", || {
        let args = format!("run {SMALL} --check");
        let outcome = run(mpirun(2, env!("CARGO_BIN_EXE_aristos"), args.split_whitespace()));
        assert!(outcome.status.success(), "{outcome:?}");
        assert!(outcome.stdout.contains("2 PEs") && outcome.stdout.contains("check passed"), "{outcome:?}");
    }),
    ("the_benchmarks_run_over_mpi", || {
        let bench = |n, args: &str| run(mpirun(n, env!("CARGO_BIN_EXE_aristos"), args.split_whitespace()));
        let p2p = "bench p2p --transport mpi --max 4KiB --iterations 5 --warmup 1 --json";
        let outcome = bench(2, p2p);
        assert!(outcome.status.success(), "{outcome:?}");
        for op in ["put-signal", "atomic", "send-recv"] {
            assert!(outcome.stdout.contains(&format!("\"{op}\"")), "{op}: {outcome:?}");
        }
        let outcome = bench(3, "bench straggler --transport mpi --steps 20 --warmup 2 --compute-us 10 --json");
        assert!(outcome.status.success() && outcome.stdout.contains("total_over_actual"), "{outcome:?}");
        assert!(outcome.stdout.contains(r#""mode": "alltoallv""#), "{outcome:?}");
        refused(mpirun(3, env!("CARGO_BIN_EXE_aristos"), p2p.split_whitespace()), &["3 PEs", "expected 2"]);
    }),
    ("an_unknown_transport_is_said_once", || {
        let args = ["run", "--transport", "bogus"];
        let outcome = run(mpirun(3, env!("CARGO_BIN_EXE_aristos"), args));
        assert_eq!(outcome.status.code(), Some(2), "{outcome:?}");
        assert_eq!(outcome.stderr.matches("invalid value 'bogus'").count(), 1, "{outcome:?}");
        assert!(outcome.stderr.contains("shm, tcp, hybrid, ofi, mpi"), "{outcome:?}");
    }),
    ("another_mpis_mpirun_is_noticed", || {
        let Some(other) = launcher(!is_open_mpi()).filter(|other| Some(other) != launcher(is_open_mpi()).as_ref())
        else {
            return skip::skip("there is only one MPI here");
        };
        let mut command = Command::new(other);
        if !is_open_mpi() {
            command.args(["--allow-run-as-root", "--oversubscribe"]);
        }
        command.args(["-n", "2", env!("CARGO_BIN_EXE_aristos"), "run", "--transport", "mpi"]);
        command.current_dir(env!("CARGO_MANIFEST_DIR"));
        refused(command, &["mpirun started 2 processes", "sees 1", library().split_whitespace().next().unwrap()]);
    }),
    ("a_pe_that_is_killed_ends_the_job", || {
        for (n, victim) in [(2, 1), (3, 0)] {
            let outcome =
                disturbed("kill", n, aristos_run(n, LONG), |pes| kill_process(pes[&victim], Signal::KILL).unwrap());
            assert!(!outcome.status.success() && outcome.stdout.matches("tokens/s").count() == 0, "{outcome:?}");
            let named =
                [format!("rank {victim} "), "KILLED BY SIGNAL: 9".into(), "Killed".into(), "EXIT CODE: 9".into()];
            let said = outcome.stderr.clone() + &outcome.stdout;
            assert!(named.iter().any(|name| said.contains(name)), "{outcome:?}");
        }
    }),
    ("a_pe_that_is_stopped_is_named", || {
        // MPICH's launcher asks the process to end, which it can only once it is continued; Open MPI's launcher has killed it by then.
        let stop = |pes: &BTreeMap<usize, Pid>| {
            kill_process(pes[&1], Signal::STOP).unwrap();
            thread::sleep(Duration::from_secs(6));
            let _ = kill_process(pes[&1], Signal::CONT);
        };
        let outcome = disturbed("stop", 2, aristos_run(2, &format!("{LONG} --timeout 1")), stop);
        // MPICH's launcher ends with the code of either process: PE 0's, or that of the kill which ends PE 1.
        let codes: &[i32] = if is_open_mpi() { &[1] } else { &[1, 9] };
        let code = outcome.status.code().unwrap_or(0);
        assert!(codes.contains(&code) && lines(&outcome).len() == 1, "{outcome:?}");
        let line = lines(&outcome)[0];
        assert!(line.contains("PE 0 failed") && line.contains("for PE 1"), "{outcome:?}");
    }),
    ("mpirun_that_is_ended_leaves_nothing", || {
        let name = format!("end-{}", std::process::id());
        let mut command = aristos_run(2, &format!("{SMALL} --steps 1000000"));
        command.env(ENV_JOB, &name);
        let running = start(command);
        let begun = Instant::now();
        while pes_of(&name).len() < 2 || begun.elapsed() < Duration::from_secs(2) {
            assert!(begun.elapsed() < END_LIMIT);
            thread::sleep(Duration::from_millis(20));
        }
        running.signal(Signal::TERM);
        // Open MPI's launcher has an exit code then, MPICH's none, and a line about it.
        let outcome = running.end();
        assert!(!outcome.stdout.contains("tokens/s"), "{outcome:?}");
        while !pes_of(&name).is_empty() {
            assert!(begun.elapsed() < 2 * END_LIMIT, "left {:?}", pes_of(&name));
            thread::sleep(Duration::from_millis(20));
        }
    }),
];

/// Fails the test unless both files have the same tensors within 1e-6, norm-wise.
fn same(shm: &Path, mpi: &Path) {
    let (shm, mpi) = (read_tensors(shm), read_tensors(mpi));
    assert_eq!(shm.keys().collect::<Vec<_>>(), mpi.keys().collect::<Vec<_>>());
    assert!(shm.len() > 20);
    for (name, (shape, want)) in &shm {
        let (got_shape, got) = &mpi[name];
        assert_eq!(shape, got_shape, "{name}");
        let error = relative_error(got, want);
        assert!(error <= 1e-6, "{name}: {error:e}");
    }
}
