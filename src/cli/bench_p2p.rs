//! `aristos bench p2p`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

#[cfg(any(feature = "cuda", feature = "mpi"))]
use anyhow::Context;
use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use super::bench::{Csv, create, write};
use super::run::NO_MPI;
use crate::bench::p2p::report::{P2pReport, PeRows};
use crate::bench::p2p::{self, P2pBench, host};
use crate::bench::supervised;
#[cfg(feature = "mpi")]
use crate::launch::mpirun;
use crate::launch::{Event, Job, LaunchError, MAX_PES, PeContext, settled_pes};
use crate::plot;
use crate::shmem::{ShmTransport, Shmem};

/// Samples of a figure, where nothing else is asked for: a device's are of many threads, and cost more.
const ITERATIONS: (usize, usize) = (1000, 200);
const SIZE_MAX: usize = 1 << 30;

/// What `aristos bench p2p` takes.
#[derive(clap::Args)]
pub struct Args {
    /// What the PEs talk over
    #[arg(long, value_enum, default_value = "shm")]
    transport: TransportArg,
    /// Operations [default: all that the transport has]
    #[arg(long, value_enum)]
    op: Vec<OpArg>,
    /// Which threads of a device work on one operation, or the stream, for nvshmem [default: all]
    #[arg(long, value_enum)]
    scope: Vec<ScopeArg>,
    /// Smallest size, as 16, 4KiB or 1MiB; each further one is four times the last
    #[arg(long, value_name = "SIZE", default_value = "16")]
    min: String,
    /// Largest size
    #[arg(long, value_name = "SIZE", default_value = "4MiB")]
    max: String,
    /// The two PEs, the first of which begins; or all pairs, one after the other
    #[arg(long, value_name = "A,B|all", default_value = "0,1")]
    pair: String,
    /// Number of PEs [default: as many as the pair needs]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// Samples that count; large sizes have fewer [default: 1000, on a device 200]
    #[arg(long)]
    iterations: Option<usize>,
    /// Samples before them
    #[arg(long, default_value_t = 20)]
    warmup: usize,
    /// How long a PE waits for another before the job fails, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u32,
    /// Print the result as JSON (keys: docs/measurements/README.md)
    #[arg(long)]
    json: bool,
    /// Write the rows
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write plots of latency, bandwidth and non-blocking put: SVG, and with the feature `png` PNG too
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum TransportArg {
    /// Shared memory of this host
    Shm,
    /// MPI, between hosts too (feature `mpi`)
    Mpi,
    /// NVSHMEM, from the device and on its stream, and NCCL beside it (feature `cuda`)
    Nvshmem,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum OpArg {
    Put,
    PutNbi,
    Get,
    PutSignal,
    /// Fetch-and-add of 8 bytes
    Atomic,
    /// Matched messages, the two-sided baseline (mpi; nvshmem: NCCL's)
    SendRecv,
}

impl From<OpArg> for p2p::Op {
    fn from(op: OpArg) -> p2p::Op {
        match op {
            OpArg::Put => p2p::Op::Put,
            OpArg::PutNbi => p2p::Op::PutNbi,
            OpArg::Get => p2p::Op::Get,
            OpArg::PutSignal => p2p::Op::PutSignal,
            OpArg::Atomic => p2p::Op::Atomic,
            OpArg::SendRecv => p2p::Op::SendRecv,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum ScopeArg {
    Thread,
    Warp,
    Block,
    /// None: the host asks, and the stream does it
    Stream,
}

impl From<ScopeArg> for p2p::Scope {
    fn from(scope: ScopeArg) -> p2p::Scope {
        match scope {
            ScopeArg::Thread => p2p::Scope::Thread,
            ScopeArg::Warp => p2p::Scope::Warp,
            ScopeArg::Block => p2p::Scope::Block,
            ScopeArg::Stream => p2p::Scope::Stream,
        }
    }
}

impl TransportArg {
    fn name(self) -> &'static str {
        match self {
            TransportArg::Shm => "shm",
            TransportArg::Mpi => "mpi",
            TransportArg::Nvshmem => "nvshmem",
        }
    }

    /// The operations that it has.
    fn ops(self) -> &'static [p2p::Op] {
        use p2p::Op::*;
        match self {
            TransportArg::Shm => &[Put, PutNbi, Get, PutSignal, Atomic],
            TransportArg::Mpi => &[Put, PutNbi, Get, PutSignal, Atomic, SendRecv],
            TransportArg::Nvshmem => &[Put, PutNbi, Get, PutSignal, SendRecv],
        }
    }
}

impl Args {
    fn bench(&self) -> Result<P2pBench> {
        let (min, max) = (size("min", &self.min)?, size("max", &self.max)?);
        ensure!(min <= max, "--min is {}, expected at most --max, which is {}", self.min, self.max);
        let on_device = self.transport == TransportArg::Nvshmem;
        ensure!(
            on_device || self.scope.is_empty(),
            "--scope on --transport {}, expected --transport nvshmem: the threads are a device's",
            self.transport.name()
        );
        let mut ops: Vec<p2p::Op> = self.op.iter().map(|&op| op.into()).collect();
        for &op in &ops {
            match op {
                _ if self.transport.ops().contains(&op) => {}
                p2p::Op::SendRecv => {
                    bail!("--op send-recv on --transport {}, expected mpi or nvshmem", self.transport.name())
                }
                _ => bail!("--op {} on --transport {}, expected shm or mpi", op.name(), self.transport.name()),
            }
        }
        let asked = (!ops.is_empty(), !self.scope.is_empty());
        if ops.is_empty() {
            ops = self.transport.ops().to_vec();
        }
        ops.dedup();
        let mut scopes: Vec<p2p::Scope> = self.scope.iter().map(|&scope| scope.into()).collect();
        if on_device {
            // Of several, those that go together are measured.
            if let Some(op) = ops.iter().find(|op| asked.0 && !scopes.is_empty() && !shares(op.scopes(), &scopes)) {
                bail!("--op {} on --scope {}, expected {}", op.name(), list(&scopes), list(op.scopes()));
            }
            let of_some = |scope: &p2p::Scope| ops.iter().any(|op| op.scopes().contains(scope));
            if let Some(scope) = scopes.iter().find(|scope| !of_some(scope)) {
                let ops: Vec<_> = ops.iter().map(|op| op.name()).collect();
                bail!("--scope {} for --op {}: it has none such", scope.name(), ops.join(" and "));
            }
        }
        if scopes.is_empty() {
            scopes = p2p::Scope::ALL.to_vec();
        }
        scopes.dedup();
        match self.transport {
            TransportArg::Shm => {}
            TransportArg::Mpi => ensure!(cfg!(feature = "mpi"), NO_MPI),
            TransportArg::Nvshmem => ensure!(
                cfg!(feature = "cuda"),
                "--transport nvshmem: this build has no CUDA; build it with `cargo build --release --features cuda`"
            ),
        }
        let iterations = self.iterations.unwrap_or(if on_device { ITERATIONS.1 } else { ITERATIONS.0 });
        ensure!(iterations > 0, "--iterations is 0, expected at least 1");
        ensure!(self.timeout > 0, "--timeout is 0, expected a number of seconds above 0");
        for (flag, value) in [("iterations", iterations), ("warmup", self.warmup)] {
            ensure!(value <= 1 << 20, "--{flag} is {value}, expected at most {}", 1 << 20);
        }
        let (pairs, pes) = self.pairs()?;
        ensure!(!on_device || pes == 2, "--pair and --pes on --transport nvshmem: it is measured between PEs 0 and 1");
        let sizes = std::iter::successors(Some(min), |bytes| bytes.checked_mul(4));
        let sizes = sizes.take_while(|&bytes| bytes <= max).collect();
        Ok(P2pBench { ops, scopes, asked, sizes, pairs, pes, iterations, warmup: self.warmup })
    }

    /// The pairs, and the number of PEs.
    fn pairs(&self) -> Result<(Vec<[usize; 2]>, usize)> {
        let most = |pes: usize| -> Result<usize> {
            ensure!((2..=MAX_PES).contains(&pes), "--pes is {pes}, expected 2 to {MAX_PES}");
            Ok(pes)
        };
        if self.pair == "all" {
            let pes = most(self.pes.or_else(settled_pes).unwrap_or(2))?;
            return Ok(((0..pes).flat_map(|a| (a + 1..pes).map(move |b| [a, b])).collect(), pes));
        }
        let numbers =
            self.pair.split_once(',').and_then(|(a, b)| Some([a.trim().parse().ok()?, b.trim().parse().ok()?]));
        let Some([a, b]): Option<[usize; 2]> = numbers else {
            bail!("--pair is {}, expected two numbers of PEs, as 0,1, or all", self.pair)
        };
        ensure!(a != b, "--pair is {}, expected two different PEs", self.pair);
        let largest = a.max(b);
        ensure!(largest < MAX_PES, "--pair is {}, expected PEs below {MAX_PES}", self.pair);
        let pes = most(self.pes.or_else(settled_pes).unwrap_or(largest + 1))?;
        ensure!(largest < pes, "--pair is {}, expected PEs below --pes, which is {pes}", self.pair);
        Ok((vec![[a, b]], pes))
    }

    /// The supervisor's part.
    pub fn supervise(&self, argv: Vec<OsString>) -> Result<bool> {
        #[cfg(feature = "mpi")]
        if self.transport == TransportArg::Mpi {
            return self.run_over_mpi();
        }
        let bench = self.bench()?;
        let csv = create(self.csv.as_ref())?;
        self.plot.as_deref().map(plot::create_folder).transpose()?;
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
        let mut job = Job::new(bench.pes, argv, &host::PHASE_NAMES);
        #[cfg(feature = "cuda")]
        if self.transport == TransportArg::Nvshmem {
            use crate::gpu::cuda::{nccl, pe_environment};
            job.env.extend(pe_environment(bench.pes)?);
            let matched = bench.ops.contains(&p2p::Op::SendRecv) && bench.scopes.contains(&p2p::Scope::Stream);
            if matched && bench.asked.0 {
                nccl::find_library().context("--op send-recv")?;
            }
            job.env.extend(matched.then(nccl::one_host_environment).flatten());
        }
        let mut parts: Vec<PeRows> = Vec::new();
        let mut unreadable = None;
        let ended: Result<(), LaunchError> = job.run(|event| {
            if let Event::Message { pe, body } = event {
                match serde_json::from_slice(body) {
                    Ok(part) => parts.push(part),
                    Err(error) => unreadable = Some(anyhow::anyhow!("PE {pe} sent what is no measurement: {error}")),
                }
            }
        });
        ended?;
        if let Some(error) = unreadable {
            return Err(error);
        }
        for line in parts.iter().flat_map(|part| &part.left_out) {
            eprintln!("aristos: {line}");
        }
        self.print(&bench, csv, &parts)
    }

    /// Prints, writes and plots what all PEs measured.
    fn print(&self, bench: &P2pBench, csv: Csv<'_>, parts: &[PeRows]) -> Result<bool> {
        let mut report = P2pReport::merge(self.transport.name(), parts);
        report.pes = bench.pes;
        write(csv, &report.to_csv())?;
        if self.json {
            println!("{}", report.to_json());
        } else {
            print!("{}", report.render_table());
        }
        if let Some(folder) = &self.plot {
            for file in report.plot(folder)? {
                eprintln!("{}", file.display());
            }
        }
        Ok(true)
    }

    /// A PE's part.
    pub fn pe(&self, context: &mut PeContext) -> Result<()> {
        let bench = self.bench()?;
        let limit = Duration::from_secs(self.timeout.into());
        #[cfg(feature = "cuda")]
        if self.transport == TransportArg::Nvshmem {
            return crate::run::device::with_cuda(context, limit, |gpu, context| {
                p2p::device::run_pe(&bench, gpu, context, limit)
            });
        }
        let segments = context.exchange_segments(host::heap_bytes::<ShmTransport>(&bench))?;
        let shmem = Shmem::new(ShmTransport::new(context.my_pe(), segments)?);
        let context: &PeContext = context;
        supervised(context, |pe| host::run_pe(&bench, &shmem, None, pe, limit))
    }

    /// Whether the PEs are those of MPI.
    pub fn over_mpi(&self) -> bool {
        self.transport == TransportArg::Mpi
    }

    /// Any PE's part, where `mpirun` started them.
    #[cfg(feature = "mpi")]
    fn run_over_mpi(&self) -> Result<bool> {
        use crate::bench::mpi::{MpiMessages, run};
        use crate::shmem::mpi::MpiTransport;
        let first = mpirun::rank().unwrap_or(0) == 0;
        let bench = match self.bench() {
            Err(_) if mpirun::first_speaks() => return Ok(false),
            bench => bench?,
        };
        let limit = Duration::from_secs(self.timeout.into());
        let csv = if first { create(self.csv.as_ref())? } else { None };
        if first {
            self.plot.as_deref().map(plot::create_folder).transpose()?;
        }
        let heap = |_| Ok(host::heap_bytes::<MpiTransport<'_>>(&bench));
        let messages = run(bench.pes, heap, limit, |shmem, world, pe| {
            host::run_pe(&bench, shmem, Some(&MpiMessages { world, limit }), pe, limit)
        })?;
        let Some(messages) = messages else { return Ok(true) };
        let parts = messages.iter().map(|body| serde_json::from_str(body)).collect::<Result<Vec<PeRows>, _>>();
        self.print(&bench, csv, &parts.context("a PE sent what is no measurement")?)
    }
}

fn shares(some: &[p2p::Scope], others: &[p2p::Scope]) -> bool {
    some.iter().any(|scope| others.contains(scope))
}

/// "thread, warp or block".
fn list(scopes: &[p2p::Scope]) -> String {
    let names: Vec<_> = scopes.iter().map(|scope| scope.name()).collect();
    match &names[..] {
        [most @ .., last] if !most.is_empty() => format!("{} or {last}", most.join(", ")),
        _ => names.concat(),
    }
}

/// A number of bytes from the command line: 16, 4KiB, 1MiB; KB and MB are powers of ten.
pub(super) fn size(flag: &str, text: &str) -> Result<usize> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: Option<usize> = match unit.trim() {
        "" | "B" => Some(1),
        "KB" | "kB" => Some(1000),
        "MB" => Some(1_000_000),
        "KiB" => Some(1 << 10),
        "MiB" => Some(1 << 20),
        "GiB" => Some(1 << 30),
        _ => None,
    };
    let bytes = number.parse::<usize>().ok().zip(unit).and_then(|(number, unit)| number.checked_mul(unit));
    match bytes {
        Some(bytes) if (1..=SIZE_MAX).contains(&bytes) => Ok(bytes),
        _ => bail!("--{flag} is {text}, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_others_are_refused() {
        for (text, bytes) in
            [("16", 16), ("16B", 16), ("4KiB", 4096), ("4 KiB", 4096), ("1MiB", 1 << 20), ("64KB", 64000)]
        {
            assert_eq!(size("min", text).unwrap(), bytes, "{text}");
        }
        for text in ["", "x", "-1", "1.5KiB", "0", "4Kib", "2GiB", "99999999999999999999", "18446744073709551615KiB"] {
            let error = size("min", text).unwrap_err().to_string();
            assert_eq!(error, format!("--min is {text}, expected 1 byte to 1GiB, as 16, 4KiB or 1MiB"));
        }
    }
}
