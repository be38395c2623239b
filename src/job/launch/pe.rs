//! The PE's side of a supervised job: its rank, files, segments and messages.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::panic::PanicHookInfo;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, panic, process, thread};

use rustix::io::Errno;
use rustix::net::RecvFlags;
use rustix::process::{Pid, Signal};

use super::heartbeat::process_name;
use super::status::StatusPage;
use super::survivors::{Continuation, Stopped};
use super::{ENV_N_PES, ENV_PE, ENV_SUPERVISOR, LaunchError, MAX_PES};
use crate::shmem::control::frame::{self, Frame, Inbox, Kind};
use crate::shmem::{Segment, ShmemError};

/// A process that a supervisor started as a PE.
pub struct PeContext {
    n_pes: usize,
    /// The remaining PEs, ascending.
    world: Vec<usize>,
    control: Arc<Control>,
    inbox: Inbox,
    status: StatusPage,
    request: Vec<u8>,
    files: Vec<(String, OwnedFd)>,
}

/// The control socket, shared with the panic hook.
struct Control {
    pe: usize,
    socket: OwnedFd,
    /// Locked while a frame is sent, so that frames of different threads do not interleave.
    sending: Mutex<()>,
}

impl Control {
    fn send(&self, kind: Kind, body: &[u8], files: &[BorrowedFd<'_>]) -> Result<(), LaunchError> {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        frame::send(self.socket.as_fd(), kind, body, files).map_err(|error| self.error("send to the supervisor", error))
    }

    fn error(&self, what: &'static str, error: Errno) -> LaunchError {
        match error {
            Errno::PIPE | Errno::CONNRESET => LaunchError::SupervisorEnded { pe: self.pe },
            _ => LaunchError::Pe { pe: self.pe, what, source: error.into() },
        }
    }
}

impl PeContext {
    /// Connects this process, started as [`PE_COMMAND`](super::PE_COMMAND), to its supervisor.
    ///
    /// Call it once, before standard input is read; standard input is then `/dev/null`. From then on a panic in any thread is printed, and
    /// also reported to the supervisor as by [`PeContext::fail`].
    ///
    /// # Errors
    /// Returns an error if no supervisor has set the environment variables, or if the supervisor has ended.
    pub fn take() -> Result<PeContext, LaunchError> {
        if env::var_os(ENV_PE).is_none() {
            let line = "this command is for the PEs that a supervisor starts; run a job, and it starts them";
            return Err(LaunchError::Environment(line.to_string()));
        }
        static TAKEN: AtomicBool = AtomicBool::new(false);
        if TAKEN.swap(true, Ordering::Relaxed) {
            return Err(LaunchError::Environment("this process is a PE already".to_string()));
        }
        let pe: usize = variable(ENV_PE)?;
        let n_pes: usize = variable(ENV_N_PES)?;
        if n_pes > MAX_PES || pe >= n_pes {
            return Err(LaunchError::Environment(format!(
                "{ENV_PE}={pe} and {ENV_N_PES}={n_pes}: a supervisor sets the first below the second, and that to \
                 at most {MAX_PES}"
            )));
        }
        let supervisor: i32 = variable(ENV_SUPERVISOR)?;

        // From here on the kernel kills this process when its parent ends. If the parent has ended before, the process id of the current
        // parent differs.
        let setup = |what, error: Errno| LaunchError::Pe { pe, what, source: error.into() };
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|error| setup("tie itself to its supervisor", error))?;
        if rustix::process::getppid().map(Pid::as_raw_pid) != Some(supervisor) {
            return Err(LaunchError::SupervisorEnded { pe });
        }

        let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)
            .map_err(|error| setup("take its control socket", error))?;
        let null = File::options().read(true).write(true).open("/dev/null");
        null.and_then(|null| Ok(rustix::stdio::dup2_stdin(null)?)).map_err(|source| LaunchError::Pe {
            pe,
            what: "open /dev/null",
            source,
        })?;
        let control = Arc::new(Control { pe, socket, sending: Mutex::new(()) });
        control.send(Kind::Running, &process::id().to_le_bytes(), &[])?;
        let mut inbox = Inbox::default();
        let frame = receive(&control, &mut inbox, Kind::Files)?;
        let mut files = frame.files.into_iter();
        let page = files.next().ok_or_else(|| protocol(&control, "no status page".to_string()))?;
        let status = StatusPage::from_fd(page, pe).map_err(|source| LaunchError::Pe {
            pe,
            what: "map the status page",
            source,
        })?;
        let request = files.next().ok_or_else(|| protocol(&control, "no request".to_string()))?;
        let request = read(request).map_err(|source| LaunchError::Pe { pe, what: "read its request", source })?;
        let names = frame.body.split(|byte| *byte == 0).map(|name| String::from_utf8_lossy(name).into_owned());
        let files = names.zip(files).collect();

        report_panics(control.clone());
        // `ps` and `top` would otherwise show the name `exe`.
        if let Ok(name) = std::ffi::CString::new(process_name(pe)) {
            let _ = rustix::thread::set_name(&name);
        }
        Ok(PeContext { n_pes, world: (0..n_pes).collect(), control, inbox, status, request, files })
    }

    /// This PE's number, `0..n_pes`.
    pub fn my_pe(&self) -> usize {
        self.control.pe
    }

    /// Number of PEs.
    pub fn n_pes(&self) -> usize {
        self.n_pes
    }

    /// The remaining PEs, ascending: all PEs until [`PeContext::continuation`].
    pub fn world(&self) -> &[usize] {
        &self.world
    }

    /// The supervisor's request.
    pub fn request(&self) -> &[u8] {
        &self.request
    }

    /// The file that the job passed under this name.
    ///
    /// All PEs and the supervisor share the file position, so read and write at explicit offsets ([`std::os::unix::fs::FileExt`]).
    pub fn file(&self, name: &str) -> Option<BorrowedFd<'_>> {
        self.files.iter().find(|(known, _)| known == name).map(|(_, file)| file.as_fd())
    }

    /// Creates this PE's segment of `bytes` bytes, and maps the segments of all PEs, in the order of [`PeContext::world`]. Collective.
    ///
    /// # Errors
    /// Returns an error if memory or file descriptors run out, or if the supervisor ends. The supervisor ends the job if a PE sends another
    /// size, or no segment within [`Processes::start_limit`](super::Processes::start_limit).
    pub fn exchange_segments(&mut self, bytes: usize) -> Result<Vec<Segment>, LaunchError> {
        let pe = self.my_pe();
        let refused = |error: ShmemError| LaunchError::Segment { pe, message: error.to_string() };
        let own = Segment::create(&format!("aristos-pe{pe}"), bytes).map_err(refused)?;
        self.control.send(Kind::Segment, &(bytes as u64).to_le_bytes(), &[own.fd()])?;
        let mut own = Some(own);
        let mut segments = Vec::with_capacity(self.world.len());
        while segments.len() < self.world.len() {
            let frame = receive(&self.control, &mut self.inbox, Kind::Segments)?;
            for file in frame.files {
                let of = self.world.get(segments.len()).copied();
                let segment = match own.take_if(|_| of == Some(pe)) {
                    Some(own) => own,
                    None => Segment::from_fd(file).map_err(refused)?,
                };
                if segment.heap_bytes() != bytes {
                    let of = of.unwrap_or(self.n_pes);
                    let message = format!("PE {of} has a segment of {} bytes", segment.heap_bytes());
                    return Err(protocol(&self.control, message));
                }
                segments.push(segment);
            }
        }
        Ok(segments)
    }

    /// Stops after the loss of a PE ([`StatusPage::lost`]). This PE has the results of `complete` steps, of which `settled` are final.
    /// Waits until all remaining PEs have stopped, which then are the job's [`PeContext::world`]. Returns the lost PEs, and the step from
    /// which to continue.
    ///
    /// # Errors
    /// Returns an error if the supervisor ends.
    pub fn continuation(&mut self, settled: u64, complete: u64) -> Result<Continuation, LaunchError> {
        self.control.send(Kind::Stopped, &Stopped { settled, complete }.to_bytes(), &[])?;
        let frame = receive(&self.control, &mut self.inbox, Kind::Continuation)?;
        let how: Continuation =
            serde_json::from_slice(&frame.body).map_err(|error| protocol(&self.control, error.to_string()))?;
        self.world.retain(|pe| !how.lost.contains(pe));
        Ok(how)
    }

    /// Reports that all steps are final. From now on the job fails if a PE is lost.
    ///
    /// # Errors
    /// Returns an error if the supervisor has ended.
    pub fn commit_steps(&self) -> Result<(), LaunchError> {
        self.control.send(Kind::Final, b"", &[])
    }

    /// This PE's status page.
    pub fn status(&self) -> &StatusPage {
        &self.status
    }

    /// Sends a message to the caller of [`Processes::run`](super::Processes::run). Returns when the kernel has accepted the message.
    ///
    /// # Errors
    /// When the supervisor has ended.
    pub fn send(&self, body: &[u8]) -> Result<(), LaunchError> {
        self.control.send(Kind::Message, body, &[])
    }

    /// Reports that this PE's part is done. The process must then exit with code 0 within 20 s; otherwise the job fails.
    ///
    /// # Errors
    /// When the supervisor has ended.
    pub fn done(self) -> Result<(), LaunchError> {
        self.control.send(Kind::Done, b"", &[])
    }

    /// Reports a failure, as one line, and exits with code 1. The supervisor ends the other PEs.
    pub fn fail(self, error: &str) -> ! {
        // An error means that the supervisor has ended.
        let _ = self.control.send(Kind::Fail, error.as_bytes(), &[]);
        process::exit(1)
    }

    /// Like [`PeContext::fail`], for a wait for PE `peer` that timed out. If several PEs report time-outs, the supervisor prints
    /// the first report whose awaited PE has not reported one (`first_cause`).
    pub fn fail_on(self, error: &str, peer: usize) -> ! {
        let _ = self.control.send(Kind::FailOn, &[&peer.to_le_bytes()[..], error.as_bytes()].concat(), &[]);
        process::exit(1)
    }
}

/// Reads a whole file at explicit offsets, because all PEs share its file position.
fn read(file: OwnedFd) -> io::Result<Vec<u8>> {
    let file = File::from(file);
    let mut content = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

/// Parses a number from an environment variable.
fn variable<T: FromStr>(name: &str) -> Result<T, LaunchError> {
    let value = env::var_os(name).unwrap_or_default();
    value.to_str().and_then(|value| value.parse().ok()).ok_or_else(|| {
        LaunchError::Environment(format!(
            "{name}={}: not a number; {ENV_PE}, {ENV_N_PES} and {ENV_SUPERVISOR} are set by a supervisor, all three \
             or none",
            value.display()
        ))
    })
}

/// Waits for the next frame, which must be of this kind. The wait needs no limit, because the supervisor ends a job whose start takes too
/// long.
fn receive(control: &Control, inbox: &mut Inbox, kind: Kind) -> Result<Frame, LaunchError> {
    let mut scratch = [0; 4096];
    loop {
        match inbox.next().map_err(|message| protocol(control, message))? {
            Some(frame) if frame.kind == kind => return Ok(frame),
            Some(frame) => return Err(protocol(control, format!("{:?} came instead of {kind:?}", frame.kind))),
            None => {}
        }
        match inbox.fill(control.socket.as_fd(), &mut scratch, RecvFlags::empty()) {
            Ok(0) => return Err(LaunchError::SupervisorEnded { pe: control.pe }),
            Ok(_) => {}
            Err(error) => return Err(control.error("receive from the supervisor", error)),
        }
    }
}

fn protocol(control: &Control, message: String) -> LaunchError {
    LaunchError::Protocol { pe: control.pe, message }
}

/// Reports panics to the supervisor from now on.
fn report_panics(control: Arc<Control>) {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
        print(info);
        let place = info.location().map_or_else(String::new, |at| format!(" at {at}"));
        let what = info.payload_as_str().unwrap_or("(no message)");
        let thread = thread::current();
        let line = format!("thread '{}' panicked{place}: {what}", thread.name().unwrap_or("(unnamed)"));
        let _ = control.send(Kind::Fail, line.as_bytes(), &[]);
    }));
}
