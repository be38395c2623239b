//! `aristos bench p2p`: latency and bandwidth of one-sided operations between two PEs.
//!
//! The method is that of NVSHMEM's perftest (`kernels/p2p.cu`): the loop runs on the device, put latency includes quiet, put
//! with signal is a ping-pong whose round trip counts. Unlike perftest's, every iteration is timed, so that a row has the
//! median and the tail, and not only the mean.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use crate::report::median;

/// PEs of a measurement.
pub const PES: usize = 2;

/// What is done in an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// A put and quiet.
    Put,
    /// A non-blocking put and quiet; the time until it is issued apart.
    PutNbi,
    /// A get.
    Get,
    /// A put with a signal there, and one back.
    PutSignal,
}

/// Which threads work on one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// One thread.
    Thread,
    /// The 32 threads of a warp.
    Warp,
    /// The threads of a block.
    Block,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// One block, one operation at a time.
    Latency,
    /// Several blocks, each with its part of the bytes.
    Bandwidth,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct P2pBench {
    /// Operations; put with signal has no bandwidth of its own.
    pub ops: Vec<Op>,
    /// Scopes.
    pub scopes: Vec<Scope>,
    /// Sizes, bytes, ascending.
    pub sizes: Vec<usize>,
    /// Iterations that count.
    pub iterations: usize,
    /// Iterations before them.
    pub warmup: usize,
}

/// One measurement, of PE 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What is measured.
    pub measure: Measure,
    /// The operation.
    pub op: Op,
    /// Which threads.
    pub scope: Scope,
    /// Of an operation; of all blocks together.
    pub bytes: usize,
    /// Iterations.
    pub iterations: usize,
    /// The shortest iteration, microseconds. For put with signal all times are of the round trip.
    pub min_us: f64,
    /// The median, microseconds.
    pub median_us: f64,
    /// The 99th percentile, microseconds.
    pub p99_us: f64,
    /// The loop's time over the number of iterations, microseconds.
    pub mean_us: f64,
    /// Until the call had returned, before quiet: the median, microseconds; 0 where there is no such part.
    pub issue_us: f64,
    /// Bytes over the median, 10^9 per second; those there and back for put with signal.
    pub gb_per_s: f64,
}

/// Times of one loop in cycles, and what a cycle is.
pub struct Loop {
    /// Of each iteration.
    pub cycles: Vec<u64>,
    /// Of it, until the call had returned.
    pub issue_cycles: Vec<u64>,
    /// Of the whole loop, nanoseconds and cycles.
    pub total: [u64; 2],
}

impl Row {
    /// From what the device noted.
    pub fn new(measure: Measure, op: Op, scope: Scope, bytes: usize, times: &Loop) -> Row {
        let us_per_cycle = times.total[0] as f64 / times.total[1].max(1) as f64 * 1e-3;
        let us = |cycles: &[u64]| -> Vec<f64> { cycles.iter().map(|&c| c as f64 * us_per_cycle).collect() };
        let mut sorted = us(&times.cycles);
        sorted.sort_by(f64::total_cmp);
        let iterations = sorted.len();
        let median_us = median(sorted.clone());
        let has_issue = measure == Measure::Latency && matches!(op, Op::Put | Op::PutNbi);
        let moved = bytes as f64 * if op == Op::PutSignal { 2.0 } else { 1.0 };
        Row {
            measure,
            op,
            scope,
            bytes,
            iterations,
            min_us: sorted.first().copied().unwrap_or(0.0),
            median_us,
            p99_us: percentile(&sorted, 0.99),
            mean_us: times.total[0] as f64 * 1e-3 / iterations.max(1) as f64,
            issue_us: if has_issue { median(us(&times.issue_cycles)) } else { 0.0 },
            gb_per_s: if median_us > 0.0 { moved / median_us * 1e-3 } else { 0.0 },
        }
    }
}

/// The value that this share of the sorted values does not exceed.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

fn name<T: Serialize>(value: T) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_string)).unwrap_or_default()
}

/// One line per row, with a heading.
pub fn to_csv(rows: &[Row]) -> String {
    let mut csv = String::from("measure,op,scope,bytes,iterations,min_us,median_us,p99_us,mean_us,issue_us,gb_per_s\n");
    for r in rows {
        let _ = writeln!(
            csv,
            "{},{},{},{},{},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4}",
            name(r.measure),
            name(r.op),
            name(r.scope),
            r.bytes,
            r.iterations,
            r.min_us,
            r.median_us,
            r.p99_us,
            r.mean_us,
            r.issue_us,
            r.gb_per_s
        );
    }
    csv
}

/// A table, ending with a newline.
pub fn render_table(rows: &[Row]) -> String {
    let mut table = crate::report::table::plain();
    table.set_header(["", "", "", "bytes", "median us", "p99", "min", "mean", "issue", "GB/s"]);
    for r in rows {
        let us = |v: f64| format!("{v:.2}");
        let issue = if r.issue_us > 0.0 { us(r.issue_us) } else { String::new() };
        table.add_row([
            name(r.measure),
            name(r.op),
            name(r.scope),
            r.bytes.to_string(),
            us(r.median_us),
            us(r.p99_us),
            us(r.min_us),
            us(r.mean_us),
            issue,
            format!("{:.3}", r.gb_per_s),
        ]);
    }
    format!("{}\n", crate::report::table::right_aligned(table, 3))
}

#[cfg(feature = "cuda")]
pub use on_device::run_pe;

#[cfg(feature = "cuda")]
mod on_device {
    use std::time::Duration;

    use anyhow::{Result, ensure};
    use bytemuck::{Pod, Zeroable};

    use super::{Loop, Measure, Op, P2pBench, PES, Row, Scope};
    use crate::gpu::{Buffer, Gpu, Launch, SymmetricBuffer};
    use crate::launch::PeContext;

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
        let mut rows = Vec::new();
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
                            (Measure::Latency, Op::PutSignal) => ("p2p_ping_pong", 1),
                            (Measure::Latency, _) => ("p2p_latency", 1),
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
                            let times = Loop {
                                cycles: read(0, bench.iterations)?,
                                issue_cycles: read(times, bench.iterations)?,
                                total: [total[0], total[1]],
                            };
                            rows.push(Row::new(measure, op, scope, bytes, &times));
                        }
                    }
                }
            }
        }
        if gpu.my_pe() == 0 {
            context.send(&serde_json::to_vec(&rows)?)?;
        }
        data.free(limit)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_what_the_cycles_were() {
        // 2 cycles a nanosecond; 100 iterations of 200, 400, ... cycles.
        let cycles: Vec<u64> = (1..=100).map(|i| 200 * i).collect();
        let total = cycles.iter().sum::<u64>();
        let times = Loop { issue_cycles: vec![100; 100], total: [total / 2, total], cycles };
        let row = Row::new(Measure::Latency, Op::PutNbi, Scope::Block, 4096, &times);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
        close(row.min_us, 0.1);
        close(row.median_us, 5.05);
        close(row.p99_us, 9.9);
        close(row.mean_us, 5.05);
        close(row.issue_us, 0.05);
        close(row.gb_per_s, 4096.0 / 5.05e3);
        let there_and_back = Row::new(Measure::Latency, Op::PutSignal, Scope::Block, 4096, &times);
        close(there_and_back.gb_per_s, 2.0 * row.gb_per_s);
        assert_eq!(there_and_back.issue_us, 0.0);
        let csv = to_csv(&[row.clone(), there_and_back.clone()]);
        assert!(csv.contains("\nlatency,put-nbi,block,4096,100,0.1000,5.0500,9.9000,5.0500,0.0500,"), "{csv}");
        let columns = |line: &str| line.split(',').count();
        assert!(csv.lines().all(|line| columns(line) == columns(csv.lines().next().unwrap())));
        let table = render_table(&[row, there_and_back]);
        assert!(table.contains("put-signal") && table.lines().all(|line| line.chars().count() <= 120), "{table}");
    }
}
