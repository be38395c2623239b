//! The measurement on a device: NVSHMEM calls from the kernels of `kernels/p2p.cu`, and operations enqueued on a stream (`stream`). Times are
//! measured by the device.

use anyhow::{Result, bail, ensure};
use bytemuck::{Pod, Zeroable};

use super::report::PeRows;
use super::stream::OnStream;
use super::{Figure, Measure, Op, P2pBench, Row, Scope};
use crate::gpu::cuda::CudaGpu;
use crate::gpu::{Buffer, Gpu, GpuError, Launch, SymmetricBuffer};
use crate::job::host::Host;

/// PEs of a measurement.
const PES: usize = 2;

/// Threads of a block, as in perftest.
const THREADS: u32 = 1024;
/// Blocks of a bandwidth measurement.
const BLOCKS: u32 = 32;

/// The arguments of the kernels of `kernels/p2p.cu`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Arguments {
    remote: u64,
    local: u64,
    signal: u64,
    cycles: u64,
    issue_cycles: u64,
    total: u64,
    arrived: u64,
    bytes: u64,
    iterations: u32,
    warmup: u32,
    op: u32,
    scope: u32,
    peer: u32,
    me: u32,
}

/// Runs a PE's part. PE 0 sends the rows and the reasons for missing ones.
///
/// # Errors
/// A missing library or an unsupported operation that was requested explicitly; an error of the driver.
pub fn run_pe(bench: &P2pBench, gpu: &CudaGpu, context: &dyn Host) -> Result<()> {
    let limit = bench.wait_limit;
    ensure!(gpu.n_pes() == PES, "there are {} PEs, expected {PES}", gpu.n_pes());
    let largest = bench.sizes.iter().copied().max().unwrap_or(0).next_multiple_of(256) as u64;
    let data = SymmetricBuffer::new(gpu, 2 * largest + 256)?;
    let mut kinds: Vec<(Op, Scope)> = Vec::new();
    for &op in &bench.ops {
        kinds.extend(bench.scopes.iter().filter(|scope| op.scopes().contains(scope)).map(|&scope| (op, scope)));
    }
    let mut left_out = Vec::new();
    let mut leave_out = |kinds: &mut Vec<(Op, Scope)>, of: (Op, Scope), asked: bool, why: String| {
        ensure!(!asked, "`op` {} on `scope` {}: {why}", of.0.name(), of.1.name());
        left_out.push(format!("{} on scope {} is left out: {why}", of.0.name(), of.1.name()));
        kinds.retain(|kind| *kind != of);
        Ok(())
    };
    let waiting = (Op::PutSignal, Scope::Stream);
    if kinds.contains(&waiting) && !gpu.can_wait_on_stream() {
        let why = "a stream cannot wait for a signal where PEs share a GPU without MPS".to_string();
        leave_out(&mut kinds, waiting, bench.asked == (true, true), why)?;
    }
    let matched = (Op::SendRecv, Scope::Stream);
    let nccl = match kinds.contains(&matched).then(|| gpu.nccl(&data, limit)).transpose() {
        Err(GpuError::Unavailable(why)) => leave_out(&mut kinds, matched, bench.asked.0, why).map(|()| None)?,
        nccl => nccl?,
    };
    let measurement = DeviceMeasurement {
        bench,
        largest,
        local: Buffer::new(gpu, 2 * times(bench) + 256)?,
        streams: OnStream { gpu, nccl: nccl.as_ref(), data: &data, largest, limit },
    };

    let mut rows: Vec<Row> = Vec::new();
    let mut done = 0;
    let measures = [Measure::Latency, Measure::Bandwidth];
    let total = measures.len() * kinds.len() * bench.sizes.len();
    for measure in measures {
        for &(op, scope) in &kinds {
            for &bytes in &bench.sizes {
                context.status().set_progress(done as u64, total as u64);
                done += 1;
                if measure == Measure::Bandwidth && op == Op::PutSignal {
                    continue;
                }
                data.zero(2 * largest, 256)?;
                gpu.barrier(limit)?;
                let of = Figure { pair: [0, 1], measure, op, scope: Some(scope), bytes, batch: 1 };
                let measured = match scope {
                    Scope::Stream => {
                        let (samples, batch) = measurement.streams.figure(bench, measure, op, bytes)?;
                        gpu.barrier(limit)?;
                        vec![(Figure { batch, ..of }, samples)]
                    }
                    _ => measurement.by_kernel(of, scope)?,
                };
                if gpu.my_pe() == 0 {
                    rows.extend(measured.into_iter().map(|(of, samples)| of.row(&samples)));
                }
            }
        }
    }
    drop(measurement);
    if gpu.my_pe() == 0 {
        context.send(&serde_json::to_vec(&PeRows { left_out, ..PeRows::numbered(rows) })?)?;
    }
    drop(nccl);
    data.free(limit)?;
    Ok(())
}

/// Bytes of the samples of a figure.
fn times(bench: &P2pBench) -> u64 {
    (bench.iterations * size_of::<u64>()) as u64
}

struct DeviceMeasurement<'a> {
    bench: &'a P2pBench,
    largest: u64,
    /// The kernels' times.
    local: Buffer<'a>,
    streams: OnStream<'a>,
}

impl DeviceMeasurement<'_> {
    /// Measures a figure with a kernel, and returns its rows' samples, microseconds. Collective; only the samples of PE 0 count.
    fn by_kernel(&self, of: Figure, scope: Scope) -> Result<Vec<(Figure, Vec<f64>)>> {
        let DeviceMeasurement { bench, largest, local, streams: OnStream { gpu, data, limit, .. } } = self;
        let (bench, gpu, times) = (*bench, *gpu, times(self.bench));
        // All addresses are in the two buffers, which outlive the launch.
        let arguments = Arguments {
            remote: data.address(),
            local: data.address() + largest,
            signal: data.address() + 2 * largest,
            cycles: local.address(),
            issue_cycles: local.address() + times,
            total: local.address() + 2 * times,
            arrived: local.address() + 2 * times + 64,
            bytes: of.bytes as u64,
            iterations: bench.iterations as u32,
            warmup: bench.warmup as u32,
            op: match of.op {
                Op::Put | Op::PutSignal => 0,
                Op::PutNbi => 1,
                Op::Get => 2,
                Op::Atomic | Op::SendRecv => bail!("`op` {} is not measured by a kernel", of.op.name()),
            },
            scope: match scope {
                Scope::Thread => 0,
                Scope::Warp => 1,
                Scope::Block => 2,
                Scope::Stream => bail!("a stream has no kernel"),
            },
            peer: 1 - gpu.my_pe() as u32,
            me: gpu.my_pe() as u32,
        };
        let (kernel, grid) = match (of.measure, of.op) {
            (Measure::Bandwidth, _) => ("p2p_bandwidth", BLOCKS),
            (_, Op::PutSignal) => ("p2p_ping_pong", 1),
            _ => ("p2p_latency", 1),
        };
        local.zero(0, 2 * times + 256)?;
        if gpu.my_pe() == 0 || of.op == Op::PutSignal {
            let launch = Launch { grid, block: THREADS, shared_bytes: 0, cooperative: 1, cluster: 1 };
            // SAFETY: the kernel takes this structure, and accesses only the two buffers.
            unsafe { gpu.launch(kernel, launch, &[bytemuck::bytes_of(&arguments)])? };
        }
        gpu.barrier(*limit)?;
        if gpu.my_pe() != 0 {
            return Ok(Vec::new());
        }
        let total: Vec<u64> = local.read_vec(2 * times, 2)?;
        let us_per_cycle = total[0] as f64 / total[1].max(1) as f64 * 1e-3;
        let us = |at| -> Result<Vec<f64>> {
            let cycles: Vec<u64> = local.read_vec(at, bench.iterations)?;
            Ok(cycles.into_iter().map(|c| c as f64 * us_per_cycle).collect())
        };
        let mut measured = vec![(of, us(0)?)];
        if of.measure == Measure::Latency && of.op == Op::PutNbi {
            measured.push((Figure { measure: Measure::Issue, ..of }, us(times)?));
        }
        Ok(measured)
    }
}
