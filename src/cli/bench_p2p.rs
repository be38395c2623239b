//! `aristos bench p2p`.

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use super::files::Csv;
use super::job::{self, JobProcesses, JobSpec};
use super::progress::Progress;
use super::ranks::RanksArgs;
use super::shared::{BenchOutputArgs, WaitArgs};
use super::values::{TransportArg, size};
use crate::bench::p2p::report::{P2pReport, PeRows};
use crate::bench::p2p::{self, P2pBench, host};
use crate::job::launch::{MAX_PES, on_several_hosts, settled_pes};
use crate::job::request::Request;
use crate::stdio::say;

/// Default samples of a figure, and on a device, where a sample is of many threads and costs more.
const ITERATIONS: (usize, usize) = (1000, 200);

/// The flags of `aristos bench p2p`.
#[derive(clap::Args)]
pub struct Args {
    /// Transport between the PEs
    #[arg(long, value_enum, default_value = "shm")]
    transport: P2pTransportArg,
    #[command(flatten)]
    ranks: RanksArgs,
    /// Operations [default: all that the transport has]
    #[arg(long, value_enum)]
    op: Vec<OpArg>,
    /// Threads that execute one operation on a device, or its stream, for nvshmem [default: all]
    #[arg(long, value_enum)]
    scope: Vec<ScopeArg>,
    /// Smallest size, such as 16, 4KiB or 1MiB; each next size is four times as large
    #[arg(long, value_name = "SIZE", default_value = "16")]
    min: String,
    /// Largest size
    #[arg(long, value_name = "SIZE", default_value = "4MiB")]
    max: String,
    /// The two PEs, the initiator first; or all pairs, one after the other
    #[arg(long, value_name = "A,B|all", default_value = "0,1")]
    pair: String,
    /// Number of PEs [default: as many as the pair needs]
    #[arg(long, value_name = "N")]
    pes: Option<usize>,
    /// Measured samples; large sizes have fewer [default: 1000, on a device 200]
    #[arg(long)]
    iterations: Option<usize>,
    /// Warm-up samples
    #[arg(long, default_value_t = 20)]
    warmup: usize,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    output: BenchOutputArgs,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum P2pTransportArg {
    /// Shared memory of this host
    Shm,
    /// TCP, between hosts too: PEs that srun, torchrun or mpirun started, or one by one
    Tcp,
    /// libfabric, between hosts too: PEs as with tcp (feature `ofi`)
    Ofi,
    /// MPI, between hosts too (feature `mpi`)
    Mpi,
    /// NVSHMEM, from the device and on its stream, and NCCL for comparison (feature `cuda`)
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
    /// None: the host enqueues the operation on the stream
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

impl P2pTransportArg {
    fn name(self) -> &'static str {
        match self {
            P2pTransportArg::Shm => "shm",
            P2pTransportArg::Tcp => "tcp",
            P2pTransportArg::Ofi => "ofi",
            P2pTransportArg::Mpi => "mpi",
            P2pTransportArg::Nvshmem => "nvshmem",
        }
    }

    /// The operations of the transport.
    fn ops(self) -> &'static [p2p::Op] {
        use p2p::Op::*;
        match self {
            P2pTransportArg::Shm | P2pTransportArg::Tcp | P2pTransportArg::Ofi => {
                &[Put, PutNbi, Get, PutSignal, Atomic]
            }
            P2pTransportArg::Mpi => &[Put, PutNbi, Get, PutSignal, Atomic, SendRecv],
            P2pTransportArg::Nvshmem => &[Put, PutNbi, Get, PutSignal, SendRecv],
        }
    }
}

impl Args {
    fn bench(&self) -> Result<P2pBench> {
        let (min, max) = (size("min", &self.min)?, size("max", &self.max)?);
        ensure!(min <= max, "--min is {}, expected at most --max, which is {}", self.min, self.max);
        let on_device = self.transport == P2pTransportArg::Nvshmem;
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
                _ => {
                    bail!("--op {} on --transport {}, expected shm, tcp, ofi or mpi", op.name(), self.transport.name())
                }
            }
        }
        let asked = (!ops.is_empty(), !self.scope.is_empty());
        if ops.is_empty() {
            ops = self.transport.ops().to_vec();
        }
        ops.dedup();
        let mut scopes: Vec<p2p::Scope> = self.scope.iter().map(|&scope| scope.into()).collect();
        if on_device {
            // Every combination of the given operations and scopes that exists is measured.
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
        self.built()?;
        let iterations = self.iterations.unwrap_or(if on_device { ITERATIONS.1 } else { ITERATIONS.0 });
        ensure!(iterations > 0, "--iterations is 0, expected at least 1");
        let wait_limit = self.wait.limit()?;
        for (flag, value) in [("iterations", iterations), ("warmup", self.warmup)] {
            ensure!(value <= 1 << 20, "--{flag} is {value}, expected at most {}", 1 << 20);
        }
        let (pairs, pes) = self.pairs()?;
        ensure!(!on_device || pes == 2, "--pair and --pes on --transport nvshmem: it is measured between PEs 0 and 1");
        let sizes = std::iter::successors(Some(min), |bytes| bytes.checked_mul(4));
        let sizes = sizes.take_while(|&bytes| bytes <= max).collect();
        let warmup = self.warmup;
        Ok(P2pBench { ops, scopes, asked, sizes, pairs, pes, iterations, warmup, on_device, wait_limit })
    }

    /// The pairs and the number of PEs.
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

    /// Runs the benchmark.
    pub fn command(&self) -> Result<bool> {
        let ask = |found: JobProcesses| {
            let bench = self.bench()?;
            let csv = self.output.create(found.reports)?;
            let (pes, wait_limit, env) = (bench.pes, bench.wait_limit, environment(&bench)?);
            let request = Request::BenchP2p(bench);
            Ok(JobSpec { request, pes, wait_limit, env, kept: (pes, csv) })
        };
        let report = |(pes, csv), sent: Vec<(usize, PeRows)>| {
            let parts: Vec<PeRows> = sent.into_iter().map(|(_, rows)| rows).collect();
            for line in parts.iter().flat_map(|part| &part.left_out) {
                say(&format!("aristos: {line}"));
            }
            self.print(pes, csv, &parts)
        };
        let meet = self.host_transport();
        if meet.has_own_world() {
            // Before the PEs join, which may take as long as the wait limit.
            self.built()?;
        }
        let well = job::run(self.ranks.over(meet)?, &host::PHASE_NAMES, Progress::none(), ask, report);
        match meet.name() == self.transport.name() || !meet.has_own_world() {
            true => well,
            false => well.with_context(|| format!("--transport {}, whose PEs meet over TCP", self.transport.name())),
        }
    }

    /// Writes, prints and plots the measurements of all PEs.
    fn print(&self, pes: usize, csv: Csv, parts: &[PeRows]) -> Result<bool> {
        let mut report = P2pReport::merge(self.transport.name(), parts);
        report.pes = pes;
        self.output.report(&report, csv, || report.to_csv())?;
        Ok(true)
    }

    /// Checks that this build has the transport.
    fn built(&self) -> Result<()> {
        ensure!(
            cfg!(feature = "cuda") || !matches!(self.transport, P2pTransportArg::Nvshmem),
            "--transport nvshmem: this build has no CUDA; build it with `cargo build --release --features cuda`"
        );
        Ok(())
    }

    /// The transport over which the PEs join.
    pub fn host_transport(&self) -> TransportArg {
        match self.transport {
            // Devices use it to join only.
            P2pTransportArg::Nvshmem if self.ranks.given() || on_several_hosts() => TransportArg::Tcp,
            P2pTransportArg::Shm | P2pTransportArg::Nvshmem => TransportArg::Shm,
            P2pTransportArg::Tcp => TransportArg::Tcp,
            P2pTransportArg::Ofi => TransportArg::Ofi,
            P2pTransportArg::Mpi => TransportArg::Mpi,
        }
    }
}

/// The environment variables of the PEs' processes for NVSHMEM and NCCL.
#[cfg(feature = "cuda")]
fn environment(bench: &P2pBench) -> Result<Vec<(String, String)>> {
    use crate::gpu::cuda::{nccl, pe_environment};
    if !bench.on_device {
        return Ok(Vec::new());
    }
    let mut env = pe_environment(bench.pes, crate::gpu::SymmetricBy::Nvshmem)?;
    let matched = bench.ops.contains(&p2p::Op::SendRecv) && bench.scopes.contains(&p2p::Scope::Stream);
    if matched && bench.asked.0 {
        nccl::find_library().context("--op send-recv")?;
    }
    env.extend(matched.then(nccl::one_host_environment).flatten());
    Ok(env)
}

#[cfg(not(feature = "cuda"))]
fn environment(_: &P2pBench) -> Result<Vec<(String, String)>> {
    Ok(Vec::new())
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
