//! Processes that a launcher started become a job: `aristos` in the environments of Slurm, Open MPI, MPICH and torchrun, as
//! simulated by this test.

#[path = "binary/mod.rs"]
mod binary;
mod skip;

use std::fs;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aristos::job::launch::VERSION;
use aristos::shmem::control::{Attempt, CallError, Introduction, Key, call};
use binary::{Outcome, Running, aristos, names_in, start};
use rustix::process::{Pid, Signal, Uid, geteuid, getpid, kill_process};

/// How soon a job must end after its cause.
const END_LIMIT: Duration = Duration::from_secs(2);
/// A layer with a short run time.
const SMALL: &str = "run --tokens 64 --hidden 32 --intermediate 32";

/// A stand-in for a launcher.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Launcher {
    Slurm,
    OpenMpi,
    Mpich,
    Torchrun,
}

const ALL: [Launcher; 4] = [Launcher::Slurm, Launcher::OpenMpi, Launcher::Mpich, Launcher::Torchrun];

/// A job number that is unique among this machine's tests.
fn new_job() -> usize {
    static JOBS: AtomicUsize = AtomicUsize::new(0);
    getpid().as_raw_pid() as usize * 100 + JOBS.fetch_add(1, Ordering::Relaxed)
}

impl Launcher {
    /// The variables that it sets for a process, if `here` processes are on this host.
    fn variables(self, job: usize, rank: usize, size: usize, here: usize) -> Vec<(&'static str, String)> {
        let number = |n: usize| n.to_string();
        match self {
            Launcher::Slurm => vec![
                ("SLURM_JOB_ID", number(job)),
                ("SLURM_STEP_ID", number(0)),
                ("SLURM_PROCID", number(rank)),
                ("SLURM_LOCALID", number(rank)),
                ("SLURM_NTASKS", number(size)),
                ("SLURM_STEP_NUM_TASKS", number(size)),
                ("SLURM_NNODES", number(size / here)),
                ("SLURM_STEP_NUM_NODES", number(size / here)),
            ],
            Launcher::OpenMpi => vec![
                ("OMPI_COMM_WORLD_RANK", number(rank)),
                ("OMPI_COMM_WORLD_SIZE", number(size)),
                ("OMPI_COMM_WORLD_LOCAL_RANK", number(rank)),
                ("OMPI_COMM_WORLD_LOCAL_SIZE", number(here)),
                ("PMIX_NAMESPACE", number(job)),
                ("PMIX_RANK", number(rank)),
            ],
            // All processes of MPICH jobs share their parent, this test, so only one such job can run at a time.
            Launcher::Mpich => vec![
                ("PMI_RANK", number(rank)),
                ("PMI_SIZE", number(size)),
                ("MPI_LOCALNRANKS", number(here)),
                ("MPI_LOCALRANKID", number(rank)),
            ],
            Launcher::Torchrun => vec![
                ("RANK", number(rank)),
                ("WORLD_SIZE", number(size)),
                ("LOCAL_RANK", number(rank)),
                ("LOCAL_WORLD_SIZE", number(here)),
                ("MASTER_ADDR", "127.0.0.1".to_string()),
                ("MASTER_PORT", number(1024 + job % 64000)),
                ("TORCHELASTIC_RUN_ID", number(job)),
            ],
        }
    }

    /// `aristos` with these arguments, as a process that it starts.
    fn command(self, job: usize, rank: usize, size: usize, args: &str) -> Command {
        let mut command = aristos(args.split_whitespace());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if ["SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "ARISTOS_"].iter().any(|prefix| name.starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        for name in ["RANK", "WORLD_SIZE", "MASTER_PORT"] {
            command.env_remove(name);
        }
        command.envs(self.variables(job, rank, size, size));
        command
    }

    /// All processes of a job.
    fn job(self, job: usize, size: usize, args: &str) -> Vec<Command> {
        (0..size).map(|rank| self.command(job, rank, size, args)).collect()
    }
}

/// Starts the processes in reverse order, so that the others wait for rank 0.
fn start_all(commands: Vec<Command>) -> Vec<Running> {
    let mut running: Vec<Running> = commands.into_iter().rev().map(start).collect();
    running.reverse();
    running
}

fn end_all(running: Vec<Running>) -> Vec<Outcome> {
    running.into_iter().map(Running::end).collect()
}

/// Fails the test unless these processes ended with this code and without output.
#[track_caller]
fn quiet(others: &[Outcome], code: i32) {
    for outcome in others {
        assert_eq!(outcome.status.code(), Some(code), "{outcome:?}");
        assert!(outcome.stdout.is_empty() && outcome.stderr.is_empty(), "{outcome:?}");
    }
}

/// Fails the test unless all succeeded and only rank 0 has output; returns that.
#[track_caller]
fn succeeded(mut outcomes: Vec<Outcome>) -> String {
    let others = outcomes.split_off(1);
    quiet(&others, 0);
    outcomes.remove(0).success().stdout
}

/// Fails the test unless rank 0 refused, in one line with all of `parts`, and the others ended with its code, without output.
#[track_caller]
fn refused(mut outcomes: Vec<Outcome>, parts: &[&str]) {
    let others = outcomes.split_off(1);
    let first = outcomes.remove(0).refused(parts);
    quiet(&others, first.status.code().unwrap());
}

/// The rendezvous socket's name in /proc/net/unix, once it exists.
fn meeting_place(of: &str) -> Vec<u8> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        let sockets = fs::read_to_string("/proc/net/unix").unwrap();
        let names = sockets.lines().filter_map(|line| line.split('@').nth(1));
        if let Some(name) = names.filter(|name| name.starts_with("aristos-")).find(|name| name.ends_with(of)) {
            return name.as_bytes().to_vec();
        }
        thread::sleep(Duration::from_millis(2));
    }
    panic!("no meeting place of {of}");
}

/// Connects to a rendezvous socket.
fn connect(name: &[u8]) -> UnixStream {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
}

/// Sends this as a hello; returns the kind of the answer, and the text of a refusal.
fn answer_to(name: &[u8], hello: &[u8]) -> (u32, String) {
    let mut stream = connect(name);
    const JOIN: u32 = 1;
    const HEADER_AND_PROOF: usize = 16 + 32;
    let frame = [&JOIN.to_le_bytes()[..], &[0; 4], &(hello.len() as u64).to_le_bytes(), hello].concat();
    // Another user's process is refused unheard: the socket may be closed before this is written.
    let _ = stream.write_all(&frame);
    let mut answer = Vec::new();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.len() >= HEADER_AND_PROOF, "no answer to {hello:?}");
    let text = String::from_utf8_lossy(&answer[HEADER_AND_PROOF..]).into_owned();
    (u32::from_le_bytes(answer[..4].try_into().unwrap()), text)
}

const REFUSED: u32 = 5;

/// Introduces itself to rank 0 as a process of the job would; returns why it is refused.
fn refusal(name: &[u8], token: &str, job: usize, who: Introduction<'_>) -> String {
    let key = Key::new(format!("{token}\0slurm-{job}.0").as_bytes());
    let once = |attempt, _| match attempt {
        0 => Ok((connect(name).into(), Vec::new())),
        _ => Err(Attempt::Fatal("it is not rank 0 of this job")),
    };
    match call(who, &key, Instant::now() + Duration::from_secs(20), once) {
        Err(CallError::Refused(why)) => why,
        Err(CallError::Connect(why)) => why.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn processes_of_every_launcher_run_a_job() {
    for launcher in ALL {
        let table = succeeded(end_all(start_all(launcher.job(new_job(), 4, "run --check"))));
        assert!(table.contains("4 PEs") && table.contains("check passed"), "{launcher:?}: {table}");
    }
    // Two jobs in one command: the probe's and the layer's.
    let args = format!("{SMALL} --check --plan auto --pes 3");
    let table = succeeded(end_all(start_all(Launcher::Slurm.job(new_job(), 3, &args))));
    assert!(table.contains("3 PEs") && table.contains("check passed"), "{table}");
    // Commands without PEs, and one that prints help.
    for args in ["--version", "doctor --json"] {
        assert!(!succeeded(end_all(start_all(Launcher::OpenMpi.job(new_job(), 2, args)))).is_empty());
    }
}

#[test]
fn shell_in_an_allocation_starts_its_own_pes() {
    for more in [None, Some(("SLURM_PROCID", "0")), Some(("SLURM_STEP_ID", "4294967291"))] {
        let mut command = aristos(format!("{SMALL} --pes 2 --check").split_whitespace());
        command
            .env_remove("SLURM_STEP_ID")
            .env_remove("SLURM_PROCID")
            .env("SLURM_JOB_ID", "7")
            .env("SLURM_NTASKS", "4");
        command.envs(more);
        assert!(binary::run(command).success().stdout.contains("2 PEs"), "{more:?}");
    }
}

#[test]
fn invalid_command_ends_all_processes_with_its_code() {
    let outcomes = end_all(start_all(Launcher::Slurm.job(new_job(), 3, "run --steps no")));
    assert!(outcomes[0].stderr.starts_with("error: "), "{:?}", outcomes[0]);
    assert_eq!(outcomes[0].status.code(), Some(2));
    quiet(&outcomes[1..], 2);
    refused(end_all(start_all(Launcher::Torchrun.job(new_job(), 2, "run --model /no --input /no"))), &["/no"]);
    let wrong = end_all(start_all(Launcher::OpenMpi.job(new_job(), 3, &format!("{SMALL} --pes 2"))));
    refused(wrong, &["a job of 2 PEs, but Open MPI started 3 processes"]);
}

#[test]
fn missing_rank_is_named() {
    let mut commands = Launcher::Slurm.job(new_job(), 4, SMALL);
    commands.remove(2);
    for command in &mut commands {
        command.env("ARISTOS_JOIN_LIMIT", "5");
    }
    refused(end_all(start_all(commands)), &["rank 2 of 4 has not come within 5 s, as Slurm started them"]);
    // If rank 0 is missing, the others report it themselves.
    let mut command = Launcher::Slurm.command(new_job(), 1, 2, SMALL);
    command.env("ARISTOS_JOIN_LIMIT", "0.5");
    binary::run(command).refused(&["rank 1: rank 0 has not come within 0.5 s, as Slurm started it"]);
}

#[test]
fn strangers_are_refused_and_named() {
    let job = new_job();
    let mut commands = Launcher::Slurm.job(job, 3, &format!("{SMALL} --check"));
    for command in &mut commands {
        command.env("ARISTOS_JOB_TOKEN", "of this job");
    }
    // Rank 2 joins after the strangers.
    let late = commands.pop().unwrap();
    let mut running = start_all(commands);
    let name = meeting_place(&format!("slurm-{job}.0"));
    let program = |version: &str| format!("aristos {version} (protocol {VERSION})");
    let ours = program(env!("CARGO_PKG_VERSION"));
    for (token, program, pe, why) in [
        ("of another", &ours, 2, "it is not rank 0 of this job"),
        ("of this job", &program("0.0.7"), 2, &format!("it is aristos 0.0.7 (protocol {VERSION}), this is aristos")),
        ("of this job", &ours, 3, "PE 3 of 3, of 3 expected"),
    ] {
        let said = refusal(&name, token, job, Introduction { pe, n_pes: 3, program });
        assert!(said.contains(why), "{said}");
    }
    let (kind, answer) = answer_to(&name, b"GET / HTTP/1.1");
    assert!(kind == REFUSED && answer.contains("of version 542393671 of the rendezvous"), "{kind} {answer}");
    let mut browser = connect(&name);
    browser.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = browser.read_to_end(&mut answer);
    assert!(String::from_utf8_lossy(&answer).contains("it sent no valid hello"), "{answer:?}");
    // A silent connection, one that sends too much, and one that closes at once.
    let (silent, mut loud) = (connect(&name), connect(&name));
    let _ = loud.write_all(&[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0].repeat(1 << 12));
    drop(connect(&name));
    // A process with the wrong token reports it, too.
    let mut wrong = Launcher::Slurm.command(job, 2, 3, SMALL);
    wrong.env("ARISTOS_JOB_TOKEN", "of another");
    binary::run(wrong).refused(&["rank 2: ", "is not rank 0 of this job: it does not know the job's token"]);
    running.push(start(late));
    let mut outcomes = end_all(running);
    drop(silent);
    let others = outcomes.split_off(1);
    quiet(&others, 0);
    let first = &outcomes[0];
    assert!(first.status.success() && first.stdout.contains("check passed"), "{first:?}");
    for why in ["token", "aristos 0.0.7", "PE 3 of 3", "of version", "no valid hello"] {
        let named = |line: &str| line.starts_with("aristos: refused process ") && line.contains(why);
        assert!(first.stderr.lines().any(named), "{first:?}: {why}");
    }
}

#[test]
fn concurrent_jobs_stay_apart() {
    for launcher in [Launcher::Slurm, Launcher::OpenMpi, Launcher::Torchrun] {
        let args = [format!("{SMALL} --check --json --seed 1"), format!("{SMALL} --check --json --seed 2")];
        let jobs = args.map(|args| start_all(launcher.job(new_job(), 3, &args)));
        for outcomes in jobs.map(end_all) {
            assert!(succeeded(outcomes).contains(r#""pes": 3"#));
        }
    }
    // With the same id, the second is refused.
    let job = new_job();
    let first = start_all(vec![Launcher::Torchrun.command(job, 0, 2, SMALL)]);
    meeting_place(&format!("torchrun-{}--{job}", 1024 + job % 64000));
    let second = binary::run(Launcher::Torchrun.command(job, 0, 2, SMALL));
    second.refused(&["rendezvous socket", "is taken", "--master-port"]);
    let rest = start(Launcher::Torchrun.command(job, 1, 2, SMALL));
    succeeded(end_all(first.into_iter().chain([rest]).collect()));
}

#[test]
fn several_hosts_without_a_transport_are_refused() {
    for launcher in [Launcher::Slurm, Launcher::OpenMpi, Launcher::Torchrun] {
        let job = new_job();
        let commands = (0..2).map(|rank| {
            let mut command = launcher.command(job, rank, 4, SMALL);
            command.envs(launcher.variables(job, rank, 4, 2)).env("ARISTOS_JOIN_LIMIT", "3");
            command
        });
        refused(
            end_all(start_all(commands.collect())),
            &["4 processes on several hosts", "ranks 2, 3", "--transport mpi"],
        );
    }
    // Several Slurm nodes on one host are one host.
    let job = new_job();
    let commands = (0..2).map(|rank| {
        let mut command = Launcher::Slurm.command(job, rank, 2, &format!("{SMALL} --check"));
        command.envs(Launcher::Slurm.variables(job, rank, 2, 1));
        command
    });
    succeeded(end_all(start_all(commands.collect())));
}

#[test]
fn invalid_environment_is_one_line() {
    let mut commands = Launcher::Torchrun.job(new_job(), 2, SMALL);
    for command in &mut commands {
        command.env("MASTER_PORT", "seven");
    }
    refused(end_all(start_all(commands)), &["MASTER_PORT=seven: not a port"]);
    let mut commands = Launcher::Slurm.job(new_job(), 2, SMALL);
    for command in &mut commands {
        command.env("ARISTOS_JOIN_LIMIT", "soon");
    }
    refused(end_all(start_all(commands)), &["ARISTOS_JOIN_LIMIT=soon", "seconds"]);
}

/// Runs `work` as another user, if this process may.
fn as_nobody<R: Send>(work: impl FnOnce() -> R + Send) -> Option<R> {
    if !geteuid().is_root() {
        return None;
    }
    let nobody = Uid::from_raw(65534);
    // For this thread alone.
    let become_nobody = move || rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
    Some(thread::scope(|scope| {
        let thread = scope.spawn(|| {
            become_nobody();
            work()
        });
        thread.join().unwrap()
    }))
}

#[test]
fn other_users_can_neither_join_nor_listen() {
    let job = new_job();
    let commands = Launcher::Slurm.job(job, 2, &format!("{SMALL} --check"));
    let mut commands = commands.into_iter();
    let first = start(commands.next().unwrap());
    let name = meeting_place(&format!("slurm-{job}.0"));
    let answer = as_nobody(|| answer_to(&name, b"a hello"));
    if let Some((kind, why)) = &answer {
        assert!(*kind == REFUSED && why.contains("user 65534"), "{why}");
    }
    let second = start(commands.next().unwrap());
    let outcome = first.end();
    assert!(outcome.status.success(), "{outcome:?}");
    assert_eq!(outcome.stderr.contains("it belongs to user 65534"), answer.is_some(), "{outcome:?}");
    quiet(&[second.end()], 0);

    // Another user binds the name first.
    let job = new_job();
    let name = format!("aristos-{}-slurm-{job}.0", geteuid().as_raw());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    if let Some(_taken) = as_nobody(|| UnixListener::bind_addr(&address).unwrap()) {
        binary::run(Launcher::Slurm.command(job, 0, 2, SMALL)).refused(&["rendezvous socket", "is taken"]);
        binary::run(Launcher::Slurm.command(job, 1, 2, SMALL)).refused(&["user 65534 has taken"]);
    } else {
        skip::skip("not root: there is no second user to refuse");
    }
}

/// Processes of another user that connect and close in a loop until this value is dropped.
struct Storm(Vec<std::process::Child>);

impl Storm {
    /// Returns `None` if this process may not become another user.
    fn of(processes: usize, name: &[u8]) -> Option<Storm> {
        if !geteuid().is_root() {
            return None;
        }
        // The script changes the user itself, because the other user may lack access to the interpreter (below a directory of
        // mode 700).
        let script = "import os, socket, sys\nname = bytes.fromhex(sys.argv[1])\nos.setgroups([])\n\
            os.setgid(65534)\nos.setuid(65534)\nwhile True:\n    \
            one = socket.socket(socket.AF_UNIX)\n    one.setblocking(False)\n    \
            one.connect_ex(b'\\0' + name)\n    one.close()\n";
        let hex: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        let one = |_| Command::new("python3").args(["-c", script, &hex]).spawn().unwrap();
        Some(Storm((0..processes).map(one).collect()))
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        let ended: Vec<_> = self.0.iter_mut().filter_map(|child| child.try_wait().transpose()).collect();
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
        // Every process must have run until now.
        assert!(ended.is_empty() || thread::panicking(), "{ended:?}");
    }
}

#[test]
fn another_user_with_many_processes_neither_delays_a_job_nor_ends_it() {
    const PROCESSES: usize = 12;
    // A job whose last process joins while strangers storm the socket: the time from there to its end.
    let time = |storm: bool| -> Option<Duration> {
        let job = new_job();
        let mut commands = Launcher::Slurm.job(job, 3, &format!("{SMALL} --check"));
        let late = commands.pop().unwrap();
        let mut running = start_all(commands);
        let name = meeting_place(&format!("slurm-{job}.0"));
        let storm = if storm { Some(Storm::of(PROCESSES, &name)?) } else { None };
        thread::sleep(Duration::from_secs(1));
        let began = Instant::now();
        running.push(start(late));
        let outcomes = end_all(running);
        let took = began.elapsed();
        drop(storm);
        assert!(outcomes[0].status.success(), "{:?}", outcomes[0]);
        assert!(outcomes[0].stderr.lines().count() <= 8, "{:?}", outcomes[0]);
        quiet(&outcomes[1..], 0);
        Some(took)
    };
    let Some(stormed) = time(true) else { return skip::skip("not root: there is no second user") };
    // Twelve busy processes also slow the job by their use of the processors.
    println!("{stormed:?}, without {:?}", time(false));
    assert!(stormed < Duration::from_secs(10), "{stormed:?}");

    // Rank 0 still handles its signals and its limits.
    let job = new_job();
    let mut command = Launcher::Slurm.command(job, 0, 2, SMALL);
    command.env("ARISTOS_JOIN_LIMIT", "2");
    let began = Instant::now();
    let running = start(command);
    let _storm = Storm::of(PROCESSES, &meeting_place(&format!("slurm-{job}.0")));
    let outcome = running.end();
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    assert!(outcome.stderr.contains("rank 1 of 2 has not come within 2 s"), "{outcome:?}");
    let job = new_job();
    let running = start(Launcher::Slurm.command(job, 0, 2, SMALL));
    let _storm = Storm::of(PROCESSES, &meeting_place(&format!("slurm-{job}.0")));
    thread::sleep(Duration::from_millis(500));
    running.signal(Signal::TERM);
    let began = Instant::now();
    assert_eq!(running.end().status.code(), Some(143));
    assert!(began.elapsed() < END_LIMIT, "{:?}", began.elapsed());
}

/// Some launchers ignore SIGCHLD, and their children inherit that.
#[test]
fn ignored_sigchld_has_no_effect() {
    let ignoring = |mut commands: Vec<Command>| {
        for command in &mut commands {
            let mut shell = Command::new("sh");
            shell.args(["-c", "trap '' CHLD; exec \"$0\" \"$@\""]).arg(command.get_program());
            shell.args(command.get_args()).current_dir(env!("CARGO_MANIFEST_DIR"));
            for (name, value) in command.get_envs() {
                match value {
                    Some(value) => shell.env(name, value),
                    None => shell.env_remove(name),
                };
            }
            *command = shell;
        }
        commands
    };
    let check = format!("{SMALL} --check");
    assert!(
        succeeded(end_all(start_all(ignoring(Launcher::Slurm.job(new_job(), 3, &check))))).contains("check passed")
    );
    let job = ignoring(Launcher::Slurm.job(new_job(), 3, &format!("{SMALL} --steps 100000000")));
    let mut running = start_all(job);
    let pes: Vec<Pid> = running.iter_mut().enumerate().map(|(pe, one)| one.pe(pe)).collect();
    thread::sleep(Duration::from_millis(100));
    kill_process(pes[1], Signal::KILL).unwrap();
    let killed = Instant::now();
    let outcomes = end_all(running);
    assert!(killed.elapsed() < END_LIMIT, "{:?}", killed.elapsed());
    refused(outcomes, &["PE 1 was killed by signal 9 (SIGKILL) in phase "]);
}

#[test]
fn process_that_ends_before_all_have_joined_is_named() {
    let job = new_job();
    let mut running = start_all((0..2).map(|rank| Launcher::Slurm.command(job, rank, 3, SMALL)).collect());
    meeting_place(&format!("slurm-{job}.0"));
    thread::sleep(Duration::from_millis(500));
    let second = running.pop().unwrap();
    second.signal(Signal::KILL);
    second.end();
    running.pop().unwrap().end().refused(&["rank 1 of 3 has ended before all had come"]);
}

/// A job of several hours, with its results in `out`; returns once all PEs run.
fn long_job(launcher: Launcher, out: &std::path::Path) -> (Vec<Running>, Vec<Pid>) {
    let args = format!("{SMALL} --steps 100000000 --output {}", out.join("out.safetensors").display());
    let mut running = start_all(launcher.job(new_job(), 3, &args));
    let pes = running.iter_mut().enumerate().map(|(pe, one)| one.pe(pe)).collect();
    (running, pes)
}

#[test]
fn killed_pe_ends_all_and_is_named() {
    let out = tempfile::tempdir().unwrap();
    for (round, victim) in [0, 1, 2, 1].into_iter().enumerate() {
        // Without MPICH, which allows one job at a time.
        let launcher = [Launcher::Slurm, Launcher::OpenMpi, Launcher::Torchrun, Launcher::Slurm][round];
        let (running, pes) = long_job(launcher, out.path());
        thread::sleep(Duration::from_millis([0, 10, 100, 300][round]));
        kill_process(pes[victim], Signal::KILL).unwrap();
        let killed = Instant::now();
        let outcomes = end_all(running);
        assert!(killed.elapsed() < END_LIMIT, "{:?}", killed.elapsed());
        refused(outcomes, &[&format!("PE {victim} was killed by signal 9 (SIGKILL) in phase ")]);
        assert_eq!(names_in(out.path()), [""; 0]);
    }
}

#[test]
fn killed_process_of_the_launcher_ends_all() {
    let out = tempfile::tempdir().unwrap();
    for victim in [0, 2] {
        let (running, _) = long_job(Launcher::Slurm, out.path());
        thread::sleep(Duration::from_millis(100));
        running[victim].signal(Signal::KILL);
        let killed = Instant::now();
        let mut outcomes = end_all(running);
        assert!(killed.elapsed() < END_LIMIT, "{:?}", killed.elapsed());
        outcomes.remove(victim);
        if victim == 0 {
            quiet(&outcomes, 1);
        } else {
            refused(outcomes, &["PE 2 was lost in phase ", "its launcher started"]);
        }
        assert_eq!(names_in(out.path()), [""; 0]);
    }
}

#[test]
fn signal_to_all_processes_interrupts_the_job() {
    let (running, _) = long_job(Launcher::OpenMpi, tempfile::tempdir().unwrap().path());
    running.iter().rev().for_each(|one| one.signal(Signal::TERM));
    let outcomes = end_all(running);
    assert_eq!(outcomes[0].status.code(), Some(143), "{:?}", outcomes[0]);
    outcomes.into_iter().next().unwrap().refused(&["interrupted by SIGTERM"]);
}
