//! Jobs of real processes: how they start, communicate, and above all end.
//!
//! A supervisor starts its own executable again, so this program is its own PE and has its own `main`: as a PE it plays
//! the scenario that its request names, as `supervise` it runs one job, and otherwise it runs the tests.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use aristos::job::launch::{Event, LaunchError, MAX_PES, PE_COMMAND, PeContext, Processes};
use aristos::shmem::{ShmTransport, Shmem};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Pid, Signal, kill_process};

const PHASES: &[&str] = &["start", "dispatch", "expert GEMM", "waiting"];
const SEGMENT_BYTES: usize = 1 << 16;
const BIG_BYTES: usize = 8 << 20;
/// Set in the PEs of a job in which one PE never joins.
const ENV_DEAF: &str = "ARISTOS_TEST_DEAF";
/// Set in the PEs of a supervisor that is a separate process: identifies the test.
const ENV_TOKEN: &str = "ARISTOS_TEST_TOKEN";
/// Time within which a job must end after the cause.
const END_LIMIT: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let argument = |index: usize| args.get(index).map_or("", String::as_str);
    match argument(0) {
        PE_COMMAND => {
            if env::var_os(ENV_DEAF).is_some() && env::var("ARISTOS_PE").is_ok_and(|pe| pe == "1") {
                thread::sleep(Duration::from_secs(60)); // never takes its place
            }
            return match PeContext::take() {
                Ok(pe) => play(pe),
                Err(error) => {
                    eprintln!("{error}");
                    ExitCode::from(7)
                }
            };
        }
        "supervise" => return supervise(argument(1), argument(2)),
        _ => {}
    }
    let filter = args.iter().find(|argument| !argument.starts_with('-')).map_or("", String::as_str);
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in TESTS {
        if !format!("launch::{name}").contains(filter) {
            continue;
        }
        let before = (open_files(), shared_memory());
        let mut result = catch_unwind(test);
        let left_nothing = catch_unwind(AssertUnwindSafe(|| {
            assert_eq!(children(), BTreeSet::new(), "processes left by {name}");
            assert_eq!((open_files(), shared_memory()), before, "files left by {name}");
        }));
        result = result.and(left_nothing);
        println!("test launch::{name} ... {}", if result.is_ok() { "ok" } else { "FAILED" });
        if result.is_ok() { passed += 1 } else { failed += 1 }
    }
    println!("{passed} passed, {failed} failed, 0 skipped");
    ExitCode::from(u8::from(failed > 0))
}

const TESTS: &[(&str, fn())] = &[
    ("clean_jobs_of_1_2_4_and_8_pes", clean_jobs),
    ("impossible_numbers_of_pes_are_refused", impossible_numbers),
    ("files_are_passed_by_name", files_are_passed),
    ("messages_of_8_mb_arrive_whole", big_messages),
    ("progress_is_seen_and_outlives_the_pe", progress_is_seen),
    ("a_pe_killed_at_a_random_moment_is_named", killed_at_random),
    ("a_stopped_pe_is_named_by_who_waits_for_it", stopped),
    ("a_death_is_named_before_the_reports_it_causes", collateral),
    ("an_exit_before_done_is_named", exits),
    ("an_exit_with_an_error_after_done_is_named", exits_after_done),
    ("a_panic_is_reported", panics),
    ("a_failure_is_one_line", fails),
    ("a_pe_that_never_connects_is_named", deaf),
    ("unequal_segments_are_refused", unequal_segments),
    ("a_missing_segment_is_named", missing_segment),
    ("the_time_limit_ends_a_job", time_limit),
    ("sigterm_ends_a_job", sigterm),
    ("an_ignored_sighup_stays_ignored", ignored_sighup),
    ("signals_act_as_before_after_a_job", after_a_job),
    ("pes_die_with_their_supervisor", supervisor_killed),
    ("a_false_environment_is_refused", false_environment),
];

// ---- What PEs do ----

fn play(mut pe: PeContext) -> ExitCode {
    let me = pe.my_pe();
    let scenario = String::from_utf8(pe.request().to_vec()).unwrap();
    match &*scenario {
        "clean" => {
            let segments = pe.exchange_segments(SEGMENT_BYTES).unwrap();
            let shmem = Shmem::new(ShmTransport::new(me, segments).unwrap());
            let words = shmem.alloc::<u64>(pe.n_pes()).unwrap();
            for peer in 0..pe.n_pes() {
                shmem.put(words.at(me), &[me as u64 + 1], peer);
            }
            shmem.barrier_all(Instant::now() + Duration::from_secs(30)).unwrap();
            let mut seen = vec![0; pe.n_pes()];
            shmem.get(&mut seen, words, me);
            assert_eq!(seen, (1..=pe.n_pes() as u64).collect::<Vec<_>>());
            pe.send(format!("{me} of {}", pe.n_pes()).as_bytes()).unwrap();
        }
        "files" => {
            use std::os::unix::fs::FileExt;
            assert!(pe.file("no such name").is_none());
            let file = fs::File::from(pe.file("beta").unwrap().try_clone_to_owned().unwrap());
            let mut content = [0; 4];
            file.read_exact_at(&mut content, 0).unwrap();
            let mut stdin = String::new();
            std::io::stdin().read_to_string(&mut stdin).unwrap();
            assert_eq!(stdin, "");
            pe.send(&content).unwrap();
        }
        "big" => {
            for seed in 0..2 {
                pe.send(&big_message(me, seed)).unwrap();
            }
        }
        "progress" => {
            pe.status().set_phase(2);
            pe.status().set_progress(3 + me as u64, 10);
            thread::sleep(Duration::from_millis(400));
            if me == 1 {
                kill_process(rustix::process::getpid(), Signal::TERM).unwrap();
            }
        }
        "work" => work(pe),
        "collateral" => {
            let segments = pe.exchange_segments(SEGMENT_BYTES).unwrap();
            let word = segments[0].atomic_u64(0);
            pe.status().set_phase(3);
            if me == 1 {
                word.store(1, Ordering::Release);
                thread::sleep(Duration::from_millis(20));
                kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
            }
            while word.load(Ordering::Acquire) == 0 {
                thread::yield_now();
            }
            pe.fail("waited 0 s on PE 1");
        }
        "exit" => {
            pe.status().set_phase(1);
            process::exit(if me == 1 { 3 } else { sleep() });
        }
        "exit after done" => {
            pe.done().unwrap();
            return ExitCode::from(if me == 1 { 4 } else { 0 });
        }
        "panic" => {
            pe.status().set_phase(1);
            if me == 1 {
                panic!("a bug\nin two lines");
            }
            sleep();
        }
        "fail" => {
            pe.status().set_phase(1);
            if me == 1 {
                pe.fail("NaN at token 3\nsecond line");
            }
            sleep();
        }
        "unequal" => {
            pe.exchange_segments(SEGMENT_BYTES * (1 + me / 2)).unwrap();
        }
        "missing" => {
            if me != 1 {
                pe.exchange_segments(SEGMENT_BYTES).unwrap();
            }
            sleep();
        }
        "deaf" => {
            sleep();
        }
        other => pe.fail(&format!("no scenario {other}")),
    }
    pe.done().unwrap();
    ExitCode::SUCCESS
}

fn sleep() -> ! {
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}

/// Runs collective steps for ever; a PE that waits half a second for another fails.
fn work(mut pe: PeContext) -> ! {
    let segments = pe.exchange_segments(SEGMENT_BYTES).unwrap();
    pe.send(b"ready").unwrap();
    for step in 1.. {
        pe.status().set_phase(2);
        pe.status().set_progress(step, 0);
        thread::sleep(Duration::from_millis(1));
        segments[pe.my_pe()].atomic_u64(0).store(step, Ordering::Release);
        pe.status().set_phase(3);
        let deadline = Instant::now() + Duration::from_millis(500);
        for (other, segment) in segments.iter().enumerate() {
            while segment.atomic_u64(0).load(Ordering::Acquire) < step {
                if Instant::now() > deadline {
                    pe.fail(&format!("waited 0.5 s on PE {other} for step {step}"));
                }
                thread::sleep(Duration::from_micros(200));
            }
        }
    }
    unreachable!()
}

fn big_message(pe: usize, seed: u64) -> Vec<u8> {
    let mut message = vec![0; BIG_BYTES];
    ChaCha8Rng::seed_from_u64(seed * 100 + pe as u64).fill(&mut message[..]);
    message
}

// ---- What supervisors do ----

fn job(pes: usize, scenario: &str) -> Processes<'static> {
    let mut job = Processes::new(pes, scenario.into(), PHASES);
    job.time_limit = Some(Duration::from_secs(60)); // a bug here ends as a failed test
    job
}

/// Runs a job whose failure is expected, and returns its line.
fn failure(job: Processes<'_>) -> String {
    let line = job.run(|_| ()).unwrap_err().to_string();
    assert!(!line.contains('\n'), "{line:?}");
    line
}

/// One job in a separate process: reports on stdout when all PEs work, and on stderr how it ended.
fn supervise(scenario: &str, token: &str) -> ExitCode {
    let mut job = job(3, scenario);
    job.env.push((ENV_TOKEN.into(), token.into()));
    let mut ready = 0;
    let result = job.run(|event| {
        if let Event::Message { .. } = event {
            ready += 1;
            if ready == 3 {
                println!("ready");
            }
        }
    });
    match result {
        Ok(()) => {
            println!("over");
            if token.starts_with("linger") {
                sleep();
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Starts [`supervise`]; `wrapper` is a shell command that gets it as `"$@"`.
fn start_supervisor(scenario: &str, token: &str, wrapper: &str) -> Child {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", wrapper, "sh"]).arg(env::current_exe().unwrap()).args(["supervise", scenario, token]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for a line of its standard output.
fn await_line(supervisor: &mut Child, wanted: &str) {
    let mut line = String::new();
    BufReader::new(supervisor.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), wanted);
}

fn signal(process: &Child, signal: Signal) {
    kill_process(Pid::from_child(process), signal).unwrap();
}

/// The processes with `token` among their arguments, and their PEs.
fn processes_with(token: &str) -> Vec<String> {
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| Some(entry.ok()?.path()));
    let variable = format!("{ENV_TOKEN}={token}");
    let has = |path: &Path, file: &str, part: &str| {
        fs::read(path.join(file)).is_ok_and(|parts| parts.split(|b| *b == 0).any(|one| one == part.as_bytes()))
    };
    processes
        .filter(|path| has(path, "cmdline", token) || has(path, "environ", &variable))
        .map(|path| path.display().to_string())
        .collect()
}

/// This process's children, zombies too.
fn children() -> BTreeSet<i32> {
    let me = process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes
        .filter(|pid: &i32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)) == Some(&me)
        })
        .collect()
}

/// Waits for the process of PE `pe` of this process's job.
fn find_pe(pe: usize) -> Pid {
    let wanted = format!("ARISTOS_PE={pe}");
    loop {
        for pid in children() {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            if environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes()) {
                return Pid::from_raw(pid).unwrap();
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn shared_memory() -> BTreeSet<OsString> {
    fs::read_dir("/dev/shm").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.file_name())).collect()
}

// ---- Tests ----

fn clean_jobs() {
    for pes in [1, 2, 4, 8] {
        let mut said = BTreeSet::new();
        job(pes, "clean")
            .run(|event| {
                if let Event::Message { pe, body } = event {
                    assert!(said.insert((pe, String::from_utf8(body.to_vec()).unwrap())));
                }
            })
            .unwrap();
        assert_eq!(said, (0..pes).map(|pe| (pe, format!("{pe} of {pes}"))).collect());
    }
}

fn impossible_numbers() {
    assert_eq!(failure(job(0, "clean")), format!("`pes` 0: the number of PEs must be 1 to {MAX_PES}"));
    assert!(failure(job(MAX_PES + 1, "clean")).starts_with("`pes` 1025: "));
    // Too many PEs: one cannot be started, and those before it end.
    let old = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let tight = rustix::process::Rlimit { current: Some(open_files() as u64 + 20), ..old };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, tight).unwrap();
    let line = failure(job(64, "work"));
    rustix::process::setrlimit(rustix::process::Resource::Nofile, old).unwrap();
    assert!(line.starts_with("cannot start PE ") && line.contains("(ulimit -n)"), "{line}");
}

fn files_are_passed() {
    let mut job = job(3, "files");
    for (name, content) in [("alpha", "AAAA"), ("beta", "BBBB")] {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&file, content.as_bytes()).unwrap();
        job.fds.push((name.to_string(), file));
    }
    let mut seen = Vec::new();
    job.run(|event| {
        if let Event::Message { body, .. } = event {
            seen.push(body.to_vec());
        }
    })
    .unwrap();
    assert_eq!(seen, vec![b"BBBB"; 3]);
}

fn big_messages() {
    let mut next = [0; 4];
    job(4, "big")
        .run(|event| {
            if let Event::Message { pe, body } = event {
                assert!(body == big_message(pe, next[pe]), "message {} of PE {pe}", next[pe]);
                next[pe] += 1;
            }
        })
        .unwrap();
    assert_eq!(next, [2; 4]);
}

fn progress_is_seen() {
    let mut seen = BTreeSet::new();
    let result = job(2, "progress").run(|event| {
        if let Event::Tick(view) = event {
            assert_eq!(view.n_pes(), 2);
            seen.extend((0..2).map(|pe| (pe, view.pe(pe).phase.to_string(), view.pe(pe).done, view.pe(pe).total)));
        }
    });
    for pe in 0..2 {
        assert!(seen.contains(&(pe, "expert GEMM".to_string(), 3 + pe as u64, 10)), "{seen:?}");
    }
    let line = result.unwrap_err().to_string();
    assert_eq!(line, "PE 1 was killed by signal 15 (SIGTERM) in phase expert GEMM");
}

fn killed_at_random() {
    let mut random = ChaCha8Rng::seed_from_u64(9);
    for round in 0..20 {
        let pes = random.random_range(1..=4);
        let (victim, delay) = (random.random_range(0..pes), Duration::from_micros(random.random_range(0..120_000)));
        let killer = thread::spawn(move || {
            let pid = find_pe(victim);
            thread::sleep(delay);
            kill_process(pid, Signal::KILL).unwrap();
            Instant::now()
        });
        let line = failure(job(pes, "work"));
        let took = killer.join().unwrap().elapsed();
        let start = format!("PE {victim} was killed by signal 9 (SIGKILL) in phase ");
        assert!(line.starts_with(&start), "round {round}: {line}");
        assert!(took < END_LIMIT, "round {round}: {took:?}");
        assert_eq!(children(), BTreeSet::new(), "round {round}");
    }
}

fn stopped() {
    let stopper = thread::spawn(|| {
        let pid = find_pe(1);
        thread::sleep(Duration::from_millis(100));
        kill_process(pid, Signal::STOP).unwrap();
    });
    let line = failure(job(3, "work"));
    stopper.join().unwrap();
    assert!(line.contains(" failed in phase waiting: waited 0.5 s on PE 1 for step "), "{line}");
}

fn collateral() {
    for _ in 0..5 {
        assert_eq!(failure(job(3, "collateral")), "PE 1 was killed by signal 9 (SIGKILL) in phase waiting");
    }
}

fn exits() {
    assert_eq!(failure(job(2, "exit")), "PE 1 exited with code 3 in phase dispatch");
}

fn exits_after_done() {
    assert_eq!(failure(job(2, "exit after done")), "PE 1 exited with code 4 in phase start");
}

fn panics() {
    let line = failure(job(2, "panic"));
    let (start, end) =
        ("PE 1 failed in phase dispatch: thread 'main' panicked at tests/launch.rs:", ": a bug in two lines");
    assert!(line.starts_with(start) && line.ends_with(end), "{line}");
}

fn fails() {
    assert_eq!(failure(job(2, "fail")), "PE 1 failed in phase dispatch: NaN at token 3 second line");
}

fn deaf() {
    let mut job = job(3, "deaf");
    job.start_limit = Duration::from_millis(700);
    job.env.push((ENV_DEAF.into(), "1".into()));
    assert_eq!(failure(job), "PE 1 has not connected within 0.7 s, in phase start");
}

fn unequal_segments() {
    let line = failure(job(3, "unequal"));
    assert_eq!(line, "PE 2 has a symmetric heap of 131072 bytes, PE 0 one of 65536: they must be equal");
}

fn missing_segment() {
    let mut job = job(3, "missing");
    job.start_limit = Duration::from_millis(700);
    assert_eq!(failure(job), "PE 1 has not given its segment within 0.7 s, in phase start");
}

fn time_limit() {
    let mut job = job(2, "fail");
    job.pes = 1;
    job.time_limit = Some(Duration::from_millis(500));
    assert_eq!(failure(job), "time limit of 0.5 s passed: PE 0 in phase dispatch");
}

/// Waits for a supervisor that was told to end; returns its exit code and its standard error. PEs inherit standard error, so
/// it closes only when they have ended.
fn ended(mut supervisor: Child, token: &str) -> (Option<i32>, String) {
    let cause = Instant::now();
    let mut errors = String::new();
    supervisor.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    let code = supervisor.wait().unwrap().code();
    assert!(cause.elapsed() < END_LIMIT, "{:?}", cause.elapsed());
    assert_eq!(processes_with(token), Vec::<String>::new());
    (code, errors)
}

fn sigterm() {
    let mut supervisor = start_supervisor("work", "sigterm-test", "exec \"$@\"");
    await_line(&mut supervisor, "ready");
    signal(&supervisor, Signal::TERM);
    let (code, errors) = ended(supervisor, "sigterm-test");
    assert_eq!((code, errors.as_str()), (Some(128 + 15), "interrupted by SIGTERM\n"));
}

fn ignored_sighup() {
    let mut supervisor = start_supervisor("work", "sighup-test", "trap '' HUP; exec \"$@\"");
    await_line(&mut supervisor, "ready");
    signal(&supervisor, Signal::HUP);
    thread::sleep(Duration::from_millis(200));
    assert!(supervisor.try_wait().unwrap().is_none());
    signal(&supervisor, Signal::TERM);
    assert_eq!(ended(supervisor, "sighup-test").1, "interrupted by SIGTERM\n");
}

fn after_a_job() {
    let mut supervisor = start_supervisor("clean", "linger-test", "exec \"$@\"");
    let mut output = BufReader::new(supervisor.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("over") {
        assert_ne!(output.read_line(&mut text).unwrap(), 0, "{text}");
    }
    signal(&supervisor, Signal::TERM);
    assert_eq!(supervisor.wait().unwrap().signal(), Some(15));
}

fn supervisor_killed() {
    let mut random = ChaCha8Rng::seed_from_u64(10);
    for round in 0..12 {
        let token = format!("orphan-test-{round}");
        let mut supervisor = start_supervisor("work", &token, "exec \"$@\"");
        if round < 2 {
            await_line(&mut supervisor, "ready");
        } else {
            thread::sleep(Duration::from_micros(random.random_range(500..30_000)));
        }
        signal(&supervisor, Signal::KILL);
        supervisor.wait().unwrap();
        let cause = Instant::now();
        while !processes_with(&token).is_empty() {
            assert!(cause.elapsed() < END_LIMIT, "round {round}: {:?}", processes_with(&token));
            thread::sleep(Duration::from_millis(5));
        }
    }
}

fn false_environment() {
    let run = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.arg(PE_COMMAND).env_remove("ARISTOS_PE").envs(variables.iter().copied());
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(7));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(run(&[]).starts_with("this command is for the PEs that a supervisor starts"));
    assert!(run(&[("ARISTOS_PE", "0")]).starts_with("ARISTOS_N_PES=: not a number"));
    assert!(run(&[("ARISTOS_PE", "x")]).starts_with("ARISTOS_PE=x: not a number"));
    let pair = [("ARISTOS_PE", "2"), ("ARISTOS_N_PES", "2"), ("ARISTOS_SUPERVISOR", "1")];
    assert!(run(&pair).starts_with("ARISTOS_PE=2 and ARISTOS_N_PES=2"));
    let me = process::id().to_string();
    let orphan = [("ARISTOS_PE", "0"), ("ARISTOS_N_PES", "2"), ("ARISTOS_SUPERVISOR", "1")];
    assert_eq!(run(&orphan), "PE 0: the supervisor has ended\n");
    let no_socket = [("ARISTOS_PE", "0"), ("ARISTOS_N_PES", "2"), ("ARISTOS_SUPERVISOR", me.as_str())];
    let line = run(&no_socket);
    assert!(line.starts_with("PE 0 cannot send to the supervisor: "), "{line}");
    let error = LaunchError::Interrupted { signal: 2 };
    assert_eq!((error.exit_code(), error.to_string().as_str()), (130, "interrupted by SIGINT"));
}
