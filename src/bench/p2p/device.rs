//! The measurement on a device: the loops of `kernels/p2p.cu`, which make NVSHMEM's calls there. Times are the device's.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use bytemuck::{Pod, Zeroable};

use super::report::PeRows;
use super::{Measure, Of, Op, P2pBench, Row, Scope};
use crate::gpu::{Buffer, Gpu, Launch, SymmetricBuffer};
use crate::launch::PeContext;

/// PEs of a measurement.
const PES: usize = 2;

/// Threads of a block, as in perftest.
const THREADS: u32 = 1024;
/// Blocks of a bandwidth measurement.
const BLOCKS: u32 = 32;

/// What the kernels of `kernels/p2p.cu` take.
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

/// A PE's part; PE 0 sends the rows.
///
/// # Errors
/// What is missing for NVSHMEM, or the driver's.
pub fn run_pe(bench: &P2pBench, gpu: &dyn Gpu, context: &PeContext, limit: Duration) -> Result<()> {
    ensure!(gpu.n_pes() == PES, "there are {} PEs, expected {PES}", gpu.n_pes());
    let largest = bench.sizes.iter().copied().max().unwrap_or(0).next_multiple_of(256) as u64;
    let data = SymmetricBuffer::new(gpu, 2 * largest + 256)?;
    let times = (bench.iterations * size_of::<u64>()) as u64;
    let local = Buffer::new(gpu, 2 * times + 256)?;
    let mut rows: Vec<Row> = Vec::new();
    let mut done = 0;
    let measures = [Measure::Latency, Measure::Bandwidth];
    let total = measures.len() * bench.ops.len() * bench.scopes.len() * bench.sizes.len();
    for measure in measures {
        for &op in &bench.ops {
            for &scope in &bench.scopes {
                for &bytes in &bench.sizes {
                    context.status().set_progress(done as u64, total as u64);
                    done += 1;
                    if measure == Measure::Bandwidth && op == Op::PutSignal {
                        continue;
                    }
                    // All of it in the two buffers, which outlive the launch.
                    let arguments = Arguments {
                        remote: data.address(),
                        local: data.address() + largest,
                        signal: data.address() + 2 * largest,
                        cycles: local.address(),
                        issue_cycles: local.address() + times,
                        total: local.address() + 2 * times,
                        arrived: local.address() + 2 * times + 64,
                        bytes: bytes as u64,
                        iterations: bench.iterations as u32,
                        warmup: bench.warmup as u32,
                        op: match op {
                            Op::Put | Op::PutSignal => 0,
                            Op::PutNbi => 1,
                            Op::Get => 2,
                            Op::Atomic | Op::SendRecv => bail!("--op {} is not measured on a device", op.name()),
                        },
                        scope: match scope {
                            Scope::Thread => 0,
                            Scope::Warp => 1,
                            Scope::Block => 2,
                        },
                        peer: 1 - gpu.my_pe() as u32,
                        me: gpu.my_pe() as u32,
                    };
                    let (kernel, grid) = match (measure, op) {
                        (Measure::Bandwidth, _) => ("p2p_bandwidth", BLOCKS),
                        (_, Op::PutSignal) => ("p2p_ping_pong", 1),
                        _ => ("p2p_latency", 1),
                    };
                    local.zero(0, 2 * times + 256)?;
                    data.zero(2 * largest, 256)?;
                    gpu.barrier(limit)?;
                    if gpu.my_pe() == 0 || op == Op::PutSignal {
                        let launch = Launch { grid, block: THREADS, shared_bytes: 0, cooperative: 1 };
                        // SAFETY: the kernel takes this structure, and works within the two buffers it names.
                        unsafe { gpu.launch(kernel, launch, &[bytemuck::bytes_of(&arguments)])? };
                        gpu.synchronise()?;
                    }
                    gpu.barrier(limit)?;
                    if gpu.my_pe() == 0 {
                        let read = |at, count| local.read_vec::<u64>(at, count);
                        let total = read(2 * times, 2)?;
                        let us_per_cycle = total[0] as f64 / total[1].max(1) as f64 * 1e-3;
                        let us = |at| -> Result<Vec<f64>> {
                            let cycles = read(at, bench.iterations)?;
                            Ok(cycles.into_iter().map(|c| c as f64 * us_per_cycle).collect())
                        };
                        let of = Of { pair: [0, 1], measure, op, scope: Some(scope), bytes, batch: 1 };
                        rows.push(of.row(&us(0)?));
                        if measure == Measure::Latency && op == Op::PutNbi {
                            rows.push(Of { measure: Measure::Issue, ..of }.row(&us(times)?));
                        }
                    }
                }
            }
        }
    }
    if gpu.my_pe() == 0 {
        context.send(&serde_json::to_vec(&PeRows::numbered(rows))?)?;
    }
    data.free(limit)?;
    Ok(())
}
