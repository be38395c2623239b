//! The main job on PEs that `mpirun` started: no supervisor, every process a PE.
//!
//! All PEs work out the same [`Job`] from the same command line, and agree that they could before they begin. What a
//! supervisor would do before and after (input, files, check, report), PE 0 does: the others send it their part of the
//! results and their measurements by two-sided messages, so that only PE 0's host needs to see `--output`.
//!
//! # How a job ends
//! - All PEs did their part: PE 0 tells the others how it went, and all exit with that code.
//! - A PE could not begin: the first one that could not prints its line, and all exit with code 1.
//! - A PE fails on the way: it prints a line with its number and phase, and aborts the job (`MPI_Abort`, code 1). One that
//!   fails for want of another waits a moment first, since that one may have more to say.
//! - A PE dies: `mpirun` ends the others, and says which.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::pe::{self, CHOSEN, Host, Message, PHASE_NAMES, RESULTS};
use super::probe::{heap_bytes, probe_pes};
use super::supervisor::{self, Outputs};
use super::{Job, Request};
use crate::cluster::Cluster;
use crate::launch::{LaunchError, MAX_PES, StatusPage, mpirun, one_line};
use crate::moe::MoeError;
use crate::shmem::Shmem;
use crate::shmem::mpi::{self, MpiTransport, MpiWorld};

/// How long PEs may take, one after the other, to open the job's files.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long a PE that could not hear from another waits before it ends the job, and by how much longer the next PE.
const GRACE: Duration = Duration::from_millis(250);
const GRACE_STEP: Duration = Duration::from_millis(20);
/// The most bytes of a file in one message.
const PART_BYTES: usize = 4 << 20;

/// Runs this process's part as a PE, and at PE 0 prints the report; says whether the check, if asked for, passed. `request`
/// gets the number of PEs. Ends the process where a PE fails.
///
/// # Errors
/// One line: MPI, or this PE, could not start. Later errors are printed by the one PE that should, and `false` everywhere.
pub fn run(request: impl FnOnce(usize) -> Result<Request>) -> Result<bool> {
    let world = match start() {
        Ok(world) => world,
        // The others found the same.
        Err(_) if mpirun::first_speaks() => return Ok(false),
        Err(error) => return Err(error),
    };
    let status = StatusPage::private().context("cannot make a status page")?;
    let Some(mut job) = agreed(&world, &status, START_LIMIT, open(&world, request)) else { return Ok(false) };
    let limit = job.wait_limit().max(START_LIMIT);
    // Here every PE is at hand to be probed; all get the same cluster, and make the same plan of it.
    let cluster = probe(&world, &job).unwrap_or_else(|error| fail(&world, &status, &error));
    let prepared = prepare(&world, &mut job, cluster);
    let Some(outputs) = agreed(&world, &status, limit, prepared) else { return Ok(false) };
    let job = job;
    let host = MpiHost { world: &world, status, request: &job.request, outputs, messages: RefCell::default() };
    if let Err(error) = compute(&job, &host) {
        drop(host.outputs);
        fail(&world, &host.status, &error);
    }
    let MpiHost { status, outputs, messages, .. } = host;
    let Some(outputs) = outputs else {
        // PE 0 may check for as long as it takes.
        return match world.receive(None) {
            Ok(verdict) => Ok(verdict.is_some_and(|(_, passed)| passed == [1])),
            Err(error) => fail(&world, &status, &error.into()),
        };
    };
    let finished = outputs.finish(&job, messages.into_inner()).and_then(|report| supervisor::print(&job, &report));
    let passed = vec![u8::from(matches!(finished, Ok(true)))];
    if let Err(error) = &finished {
        say(error);
    }
    for pe in 1..world.n_pes() {
        if let Err(error) = world.send(pe, passed.clone(), limit) {
            fail(&world, &status, &error.into());
        }
    }
    Ok(passed == [1])
}

/// Prints the line of an error, before any PE's end: at the first exit code `mpirun` ends the others.
fn say(error: &anyhow::Error) {
    eprintln!("aristos: {}", one_line(&format!("{error:#}")));
}

fn start() -> Result<MpiWorld> {
    let world = MpiWorld::init()?;
    let n = world.n_pes();
    match mpirun::size() {
        Some(started) if started != n => bail!(
            "mpirun started {started} processes, but {}, which this binary is built with, sees {n}: start it with that MPI's \
             mpirun",
            mpi::library()
        ),
        _ => Ok(world),
    }
}

/// What all PEs could do; `None`, and the line of the first that could not, where one could not.
fn agreed<R>(world: &MpiWorld, status: &StatusPage, limit: Duration, mine: Result<R>) -> Option<R> {
    let (me, nobody) = (world.my_pe() as u64, world.n_pes() as u64);
    let failed = if mine.is_ok() { nobody } else { me };
    let first = world.min(failed, limit).unwrap_or_else(|error| fail(world, status, &error.into()));
    match mine {
        Err(error) if first == me => say(&if me == 0 { error } else { error.context(format!("PE {me}")) }),
        Ok(mine) if first == nobody => return Some(mine),
        _ => {}
    }
    None
}

fn open(world: &MpiWorld, request: impl FnOnce(usize) -> Result<Request>) -> Result<Job> {
    let pes = world.n_pes();
    ensure!(pes <= MAX_PES, LaunchError::Pes { pes });
    let job = Job::open(request(pes)?)?;
    job.probe_request()?;
    Ok(job)
}

/// The PEs as a cluster, where the plan is to be made for them. Collective.
fn probe(world: &MpiWorld, job: &Job) -> Result<Option<Cluster>> {
    let Some(request) = job.probe_request()? else { return Ok(None) };
    let heap_bytes = heap_bytes::<MpiTransport<'_>>(&request.options, world.n_pes());
    // As in `compute`.
    let transport = MpiTransport::new(world, heap_bytes)?.with_flush_limit(request.options.wait_limit)?;
    let shmem = ManuallyDrop::new(Shmem::new(transport));
    let cluster = probe_pes(&shmem, &request, "mpi", world.pes_on_host(), &mut |_, _, _| {});
    let cluster = cluster.context("--plan auto: the probe failed")?;
    drop(ManuallyDrop::into_inner(shmem));
    Ok(Some(cluster))
}

/// What must be right before anything is computed; at PE 0 the files.
fn prepare(world: &MpiWorld, job: &mut Job, cluster: Option<Cluster>) -> Result<Option<Outputs>> {
    let pes = world.n_pes();
    job.make_plan(|_, _| cluster.context("--plan auto: nothing was probed"))?;
    supervisor::check_trace(&job.request)?;
    job.check_memory(world.pes_on_host())?;
    if world.my_pe() > 0 {
        return Ok(None);
    }
    supervisor::check_input(job)?;
    tracing::info!(pes, tokens = job.tokens, mode = job.mode(), mpi = mpi::library(), "starting");
    Ok(Some(Outputs::create(job)?))
}

fn compute(job: &Job, host: &MpiHost<'_>) -> Result<()> {
    pe::loading(host);
    // The end of a window waits for all PEs, which after an error would be for ever.
    let transport = MpiTransport::new(host.world, pe::heap_bytes(job)?)?.with_flush_limit(host.limit())?;
    let shmem = ManuallyDrop::new(Shmem::new(transport));
    pe::run_over(job, host, &shmem)?;
    drop(ManuallyDrop::into_inner(shmem));
    Ok(())
}

/// Prints the line and ends the job.
fn fail(world: &MpiWorld, status: &StatusPage, error: &anyhow::Error) -> ! {
    let me = world.my_pe();
    if error.downcast_ref::<MoeError>().and_then(MoeError::awaited_pe).is_some() {
        std::thread::sleep(GRACE + GRACE_STEP * me.min(50) as u32);
    }
    let phase = PHASE_NAMES.get(status.phase()).copied().unwrap_or("(unnamed)");
    eprintln!("aristos: PE {me} failed in phase {phase}: {}", one_line(&format!("{error:#}")));
    world.abort(1)
}

/// PE 0 has the files and the messages; the others send it theirs.
///
/// A message has its kind and, for a part of a file, the place in the file, u64 little endian each, then the bytes.
struct MpiHost<'j> {
    world: &'j MpiWorld,
    status: StatusPage,
    request: &'j Request,
    /// At PE 0.
    outputs: Option<Outputs>,
    messages: RefCell<Vec<Message>>,
}

const KIND_MESSAGE: u64 = 0;
/// The files by kind, less 1.
const FILES: [&str; 2] = [RESULTS, CHOSEN];

impl MpiHost<'_> {
    fn limit(&self) -> Duration {
        self.request.options.wait_limit
    }

    fn tell(&self, kind: u64, at: u64, bytes: &[u8]) -> Result<()> {
        let message = [&kind.to_le_bytes()[..], &at.to_le_bytes(), bytes].concat();
        Ok(self.world.send(0, message, self.limit())?)
    }

    /// At PE 0: takes all that the others send until each has sent its message.
    fn collect(&self, outputs: &Outputs) -> Result<()> {
        let mut missing: Vec<usize> = (1..self.world.n_pes()).collect();
        while let Some(&first) = missing.first() {
            let Some((from, message)) = self.world.receive(Some(self.limit()))? else {
                bail!("waited {} s for the results of PE {first}", self.limit().as_secs_f64());
            };
            let head = message.split_at_checked(16).map(|(head, bytes)| {
                let (kind, at) = head.split_at(8);
                let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, &byte| n << 8 | u64::from(byte));
                (number(kind), number(at), bytes)
            });
            match head {
                Some((KIND_MESSAGE, _, body)) => {
                    let parsed = serde_json::from_slice(body);
                    let message = parsed.map_err(|e| anyhow!("PE {from} reported what cannot be read: {e}"))?;
                    self.messages.borrow_mut().push(message);
                    missing.retain(|&pe| pe != from);
                }
                Some((kind, at, bytes)) if kind as usize <= FILES.len() => {
                    let what = format!("the results of PE {from}");
                    write(outputs, FILES[kind as usize - 1], at, bytes, &what)?;
                }
                _ => bail!("PE {from} sent what is no message"),
            }
        }
        Ok(())
    }
}

fn write(outputs: &Outputs, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<()> {
    let file = outputs.file(name).with_context(|| format!("there is no file for {what}"))?;
    file.write_all_at(bytes, at).with_context(|| format!("cannot write {what}"))
}

impl Host for MpiHost<'_> {
    fn my_pe(&self) -> usize {
        self.world.my_pe()
    }

    fn status(&self) -> &StatusPage {
        &self.status
    }

    fn has_file(&self, name: &str) -> bool {
        self.request.check || name == RESULTS && self.request.output.is_some()
    }

    fn write(&self, name: &str, at: u64, bytes: &[u8], what: &str) -> Result<()> {
        if let Some(outputs) = &self.outputs {
            return write(outputs, name, at, bytes, what);
        }
        let file =
            FILES.iter().position(|file| *file == name).with_context(|| format!("there is no file for {what}"))?;
        for (part, bytes) in bytes.chunks(PART_BYTES).enumerate() {
            self.tell(file as u64 + 1, at + (part * PART_BYTES) as u64, bytes)?;
        }
        Ok(())
    }

    fn send(&self, body: &[u8]) -> Result<()> {
        match &self.outputs {
            Some(outputs) => {
                self.messages.borrow_mut().push(serde_json::from_slice(body)?);
                self.collect(outputs)
            }
            None => self.tell(KIND_MESSAGE, 0, body),
        }
    }
}
