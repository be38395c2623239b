//! Runs the real `aristos` binary as a user does, and reads its output.
#![allow(dead_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use half::bf16;
use rustix::process::{Pid, Signal, kill_process};
use safetensors::{Dtype, SafeTensors};

/// Limit for a run of these tests; a run that exceeds it hangs.
const HANG: Duration = Duration::from_secs(120);

/// `aristos` with these arguments, in the repository's root.
pub fn aristos<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aristos"));
    command.args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// `aristos run` with arguments separated by spaces.
pub fn aristos_run(args: &str) -> Command {
    aristos(["run"].into_iter().chain(args.split_whitespace()))
}

/// Arguments, except `--pes`, of a job that moves experts after the first step: 12.6 MB each, and as much optimizer state.
/// The job never ends by itself, so that any gain repays a move.
pub const MOVING: &str = "--tokens 256 --hidden 512 --intermediate 2048 --experts 8 --top-k 1 --hot-ratio 0.25 --hot-weight 0.7 \
    --plan auto --memory-mb 80 --replan-every 1 --steps 1000000 --sgd 0.0001";

/// A running job.
pub struct Running {
    child: Child,
    stdout: JoinHandle<String>,
    /// Lines of standard error, and those already read.
    stderr: Receiver<String>,
    said: String,
    shared_memory: BTreeSet<OsString>,
    what: String,
}

/// The end of a run.
pub struct Outcome {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    what: String,
}

/// Starts a command; its output is read in the background.
pub fn start(mut command: Command) -> Running {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let what = command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ");
    let shared_memory = shared_memory();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), BufReader::new(child.stderr.take().unwrap()));
    let stdout = thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).unwrap();
        text(bytes)
    });
    let (lines, said) = channel();
    thread::spawn(move || {
        let mut line = Vec::new();
        while stderr.read_until(b'\n', &mut line).unwrap() > 0 {
            let _ = lines.send(text(std::mem::take(&mut line)));
        }
    });
    Running { stdout, stderr: said, said: String::new(), shared_memory, what, child }
}

/// Runs a command to its end.
pub fn run(command: Command) -> Outcome {
    start(command).end()
}

impl Running {
    /// The supervisor's process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends the supervisor a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for the process of PE `pe`.
    pub fn pe(&mut self, pe: usize) -> Pid {
        let start = Instant::now();
        loop {
            if let Some(&(_, pid)) = pes_of(self.child.id()).iter().find(|(number, _)| *number == pe) {
                return pid;
            }
            assert!(start.elapsed() < HANG, "{}: PE {pe} never came", self.what);
            assert_eq!(self.child.try_wait().unwrap(), None, "{}: ended before PE {pe} came", self.what);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for a line of standard error that contains `part`.
    pub fn says(&mut self, part: &str) {
        loop {
            let line = self.stderr.recv_timeout(HANG).unwrap_or_else(|_| panic!("{}: never said {part}", self.what));
            self.said += &line;
            if line.contains(part) {
                return;
            }
        }
    }

    /// Waits for the job's end, and checks that it leaves no process and no shared memory.
    pub fn end(mut self) -> Outcome {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > HANG {
                let pes = pes_of(self.child.id());
                self.child.kill().unwrap();
                panic!("{}: hangs; PEs {pes:?}", self.what);
            }
            thread::sleep(Duration::from_millis(1));
        };
        // Only a supervisor killed by a signal cannot end its PEs first. (It catches SIGTERM.)
        let limit = Duration::from_secs(if status.signal().is_some() { 2 } else { 0 });
        let ended = Instant::now();
        let mut left = pes_of(self.child.id());
        while !left.is_empty() && ended.elapsed() < limit {
            thread::sleep(Duration::from_millis(1));
            left = pes_of(self.child.id());
        }
        assert!(left.is_empty(), "{}: left PEs {left:?}", self.what);
        let new: Vec<_> = shared_memory().difference(&self.shared_memory).cloned().collect();
        assert!(new.is_empty(), "{}: left shared memory {new:?}", self.what);
        let (stdout, stderr) = (self.stdout.join().unwrap(), self.said + &self.stderr.iter().collect::<String>());
        assert!(!stderr.contains("panicked"), "{}: {stderr}", self.what);
        Outcome { status, stdout, stderr, what: self.what }
    }
}

impl Outcome {
    /// Fails the test unless the exit code is 0 and standard error is empty. Lines about links that a probe could not measure
    /// are allowed, because they occur on a busy machine, and so is a warning of Open MPI's launcher about its own processes.
    #[track_caller]
    pub fn success(self) -> Outcome {
        let of_load = |line: &str| {
            line.starts_with("aristos: the link from PE ")
                || line.ends_with(" more links")
                || line.contains("plm:rsh: Warning: setpgid")
        };
        assert!(self.status.success() && self.stderr.lines().all(of_load), "{self:?}");
        self
    }

    /// Fails the test unless the job was refused: an exit code other than 0, empty standard output, and on standard error one
    /// `aristos:` line that contains all `parts`.
    #[track_caller]
    pub fn refused(self, parts: &[&str]) -> Outcome {
        assert!(matches!(self.status.code(), Some(1..)) && self.stdout.is_empty(), "{self:?}");
        self.says(parts)
    }

    /// Fails the test unless standard error is one `aristos:` line that contains all `parts`.
    #[track_caller]
    pub fn says(self, parts: &[&str]) -> Outcome {
        let line = self.stderr.strip_suffix('\n').unwrap_or("");
        assert!(line.starts_with("aristos: ") && !line.contains('\n'), "{self:?}");
        for part in parts {
            assert!(line.contains(part), "{self:?}\ndoes not say {part:?}");
        }
        self
    }

    /// Fails the test unless the argument parser rejected the command line with an error that contains all `parts`.
    #[track_caller]
    pub fn misused(self, parts: &[&str]) -> Outcome {
        assert!(self.status.code() == Some(2) && self.stdout.is_empty(), "{self:?}");
        assert!(self.stderr.starts_with("error: "), "{self:?}");
        for part in parts {
            assert!(self.stderr.contains(part), "{self:?}\ndoes not say {part:?}");
        }
        self
    }
}

impl std::fmt::Debug for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Outcome { status, stdout, stderr, what } = self;
        write!(f, "aristos {what}: {status}\n-- stdout\n{stdout}\n-- stderr\n{stderr}\n--")
    }
}

/// The PEs of a supervisor: number and process.
fn pes_of(supervisor: u32) -> Vec<(usize, Pid)> {
    let supervisor = format!("ARISTOS_SUPERVISOR={supervisor}");
    let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    processes
        .filter_map(|pid: i32| {
            // The process may have ended meanwhile.
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let mut variables = environment.split(|byte| *byte == 0).filter_map(|v| std::str::from_utf8(v).ok());
            variables.clone().find(|v| *v == supervisor)?;
            let pe = variables.find_map(|v| v.strip_prefix("ARISTOS_PE="))?.parse().ok()?;
            Some((pe, Pid::from_raw(pid)?))
        })
        .collect()
}

fn shared_memory() -> BTreeSet<OsString> {
    fs::read_dir("/dev/shm").into_iter().flatten().filter_map(|entry| Some(entry.ok()?.file_name())).collect()
}

/// The names of the files in a folder, sorted.
pub fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect::<BTreeSet<_>>().into_iter().collect()
}

/// A tensor: shape, and elements in row-major order.
pub type Tensor = (Vec<usize>, Vec<f32>);

/// The tensors of a safetensors file.
pub fn read_tensors(path: &Path) -> BTreeMap<String, Tensor> {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let values = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        let data = tensor.data();
        let values = match tensor.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::BF16 => data.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            other => panic!("{}: tensor {name} is {other}", path.display()),
        };
        (tensor.shape().to_vec(), values)
    };
    file.names().into_iter().map(|name| (name.to_string(), values(name))).collect()
}

/// Writes f32 tensors to a safetensors file.
pub fn write_tensors(path: &Path, tensors: &[(&str, &[usize], &[f32])]) {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|t| t.2.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        (name.to_string(), safetensors::tensor::TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Norm of the difference divided by the norm of `want`; infinite if a value is not finite, or if only `want` is zero.
pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut got.iter().zip(want).map(|(g, w)| f64::from(*g) - f64::from(*w)));
    match difference / norm(&mut want.iter().map(|w| f64::from(*w))) {
        _ if difference == 0.0 => 0.0,
        error if error.is_nan() => f64::INFINITY,
        error => error,
    }
}

/// A plan file of eight experts for four PEs, in one or two groups, with replicas of hot experts.
#[allow(dead_code)] // not every test uses a plan
pub fn plan_with_replicas(groups: usize) -> String {
    let group = |devices: &str, experts: &str, replicas: &str| {
        format!(
            r#"{{"devices": {devices}, "objective_ms": 1.0, "experts": {experts}, "makespan_ms": 0.5, "replicas": {replicas}}}"#
        )
    };
    let one = group(
        "[0, 1, 2, 3]",
        r#"{"0": [0, 1, 2], "1": [0, 3, 4], "2": [0, 1, 5, 6], "3": [7]}"#,
        r#"[{"expert": 0, "devices": [0, 1, 2], "split": [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.25, 0.5, 0.25]]},
            {"expert": 1, "devices": [2, 0], "split": [[0.25, 0.75], [0, 1], [1, 0], [0.5, 0.5]]}]"#,
    );
    let two = [
        group(
            "[3, 0]",
            r#"{"0": [0, 1, 2, 3], "3": [4, 5, 6, 7, 1]}"#,
            r#"[{"expert": 1, "devices": [3, 0], "split": [[1, 0], [0.25, 0.75]]}]"#,
        ),
        group("[1, 2]", r#"{"1": [0, 2, 4, 6], "2": [1, 3, 5, 7]}"#, "[]"),
    ];
    plan_of(&if groups == 1 { one } else { two.join(", ") })
}

/// A plan without replicas for six PEs in two groups: PEs 5, 0, 3 and 2; and 1 and 4.
#[allow(dead_code)]
pub fn plan_of_two_groups() -> String {
    let group = |devices: &str, experts: &str| {
        format!(
            r#"{{"devices": {devices}, "objective_ms": 1.0, "experts": {experts}, "makespan_ms": 0.5, "replicas": []}}"#
        )
    };
    let four = group("[5, 0, 3, 2]", r#"{"5": [0, 1], "0": [2, 3], "3": [4, 5], "2": [6, 7]}"#);
    plan_of(&[four, group("[1, 4]", r#"{"1": [0, 2, 4, 6], "4": [1, 3, 5, 7]}"#)].join(", "))
}

fn plan_of(groups: &str) -> String {
    format!(
        r#"{{"feasible": true, "objective": "placed", "algorithm": "search", "optimal": false, "gap_bound": 0.1, "objective_ms": 1.0,
            "terms": {{"gamma": 2.0, "compute_ms": 0.3, "communication_ms": 0.1, "all_reduce_ms": 0.2}},
            "groups": [{groups}], "idle_devices": [], "elapsed_ms": 0.0}}"#
    )
}
