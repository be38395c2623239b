//! The measurement on a stream: NVSHMEM operations enqueued by the host, and NCCL's as the two-sided baseline. Times are those between events around
//! batches.
//!
//! The host enqueues while the stream executes, so a batch takes the longer of the stream's and the calls' time. The number of queued operations is
//! limited, because a call on a full stream would block without a time-out.

use std::time::Duration;

use anyhow::{Result, bail};

use super::{Measure, Op, P2pBench};
use crate::gpu::cuda::{CudaGpu, MARKS, nccl::Nccl};
use crate::gpu::nvshmem::Transfer;
use crate::gpu::{Gpu, GpuError, SymmetricBuffer};

/// Approximate maximum of queued operations. A stream holds around a thousand.
const QUEUED: usize = 256;

/// The figures on a stream. The symmetric memory is that of `device`: a receive and a send buffer of `largest` bytes each, and a signal.
pub(super) struct OnStream<'a> {
    pub gpu: &'a CudaGpu,
    pub nccl: Option<&'a Nccl<'a>>,
    pub data: &'a SymmetricBuffer<'a>,
    pub largest: u64,
    pub limit: Duration,
}

/// The sampling of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
struct StreamSampling {
    /// Operations or round trips per sample.
    batch: usize,
    /// Samples between two synchronisations with the stream.
    together: usize,
}

impl StreamSampling {
    fn new(measure: Measure, op: Op, bytes: usize) -> StreamSampling {
        let (budget, most) = match measure {
            Measure::Bandwidth => (16 << 20, 64),
            _ => (1 << 20, 16),
        };
        let batch = (budget / bytes.max(1)).clamp(1, most);
        let on_stream = match (measure, op) {
            // A group is one operation, and the answer another.
            (Measure::Bandwidth, Op::SendRecv) => 2,
            (Measure::Bandwidth, _) => batch + 1,
            _ => 2 * batch,
        };
        // An event after each sample, and one before the first.
        StreamSampling { batch, together: (QUEUED / on_stream).clamp(1, MARKS - 1) }
    }
}

impl OnStream<'_> {
    /// The samples of a figure, microseconds of one operation or round trip, and the number of operations per sample. Collective; the result of PE 0
    /// counts.
    pub fn figure(&self, bench: &P2pBench, measure: Measure, op: Op, bytes: usize) -> Result<(Vec<f64>, usize)> {
        let gpu = self.gpu;
        let plan = StreamSampling::new(measure, op, bytes);
        let all = bench.warmup + bench.iterations;
        let mut samples = Vec::with_capacity(all);
        let mut turn = 0;
        // One-sided: PE 1 takes no part.
        if gpu.my_pe() != 0 && !matches!(op, Op::PutSignal | Op::SendRecv) {
            return Ok((samples, plan.batch));
        }
        while samples.len() < all {
            let n = plan.together.min(all - samples.len());
            // Not measured: the stream was idle before.
            self.batch(measure, op, bytes as u64, plan.batch, &mut turn)?;
            gpu.mark(0)?;
            for sample in 1..=n {
                self.batch(measure, op, bytes as u64, plan.batch, &mut turn)?;
                gpu.mark(sample)?;
            }
            gpu.synchronise_within(self.limit)?;
            for sample in 1..=n {
                samples.push(gpu.elapsed(sample - 1, sample)?.as_secs_f64() * 1e6 / plan.batch as f64);
            }
        }
        samples.drain(..bench.warmup);
        Ok((samples, plan.batch))
    }

    /// Enqueues a batch. `turn` is the value of the last signal.
    fn batch(&self, measure: Measure, op: Op, bytes: u64, batch: usize, turn: &mut u64) -> Result<()> {
        let (gpu, first) = (self.gpu, self.gpu.my_pe() == 0);
        match (measure, op) {
            (Measure::Latency, Op::Put | Op::Get) => {
                for _ in 0..batch {
                    self.one_sided(op, bytes)?;
                    gpu.quiet_on_stream()?;
                }
            }
            (Measure::Bandwidth, Op::Put | Op::Get) => {
                for _ in 0..batch {
                    self.one_sided(op, bytes)?;
                }
                gpu.quiet_on_stream()?;
            }
            (Measure::Latency, Op::PutSignal) => {
                for _ in 0..batch {
                    *turn += 1;
                    self.hand_over(bytes, *turn, first)?;
                }
            }
            (Measure::Latency, Op::SendRecv) => {
                for _ in 0..batch {
                    self.matched(bytes, first)?;
                    self.matched(bytes, !first)?;
                }
            }
            // A window of messages and an answer: a send completes before its bytes arrive.
            (Measure::Bandwidth, Op::SendRecv) => {
                self.nccl()?.group(|| (0..batch).try_for_each(|_| self.matched(bytes, first)))?;
                self.matched(1, !first)?;
            }
            _ => bail!("{} of {} is not measured on a stream", measure.name(), op.name()),
        }
        Ok(())
    }

    /// A transfer to or from the other PE.
    fn transfer(&self, to: u64, from: u64, bytes: u64) -> Transfer {
        Transfer { to, from, bytes, pe: 1 - self.gpu.my_pe() }
    }

    fn arrive(&self) -> u64 {
        self.data.address()
    }

    fn source(&self) -> u64 {
        self.data.address() + self.largest
    }

    fn one_sided(&self, op: Op, bytes: u64) -> Result<(), GpuError> {
        // SAFETY: both addresses are in the symmetric memory, which outlives the figure.
        unsafe {
            match op {
                Op::Get => self.gpu.get_on_stream(self.transfer(self.source(), self.arrive(), bytes)),
                _ => self.gpu.put_on_stream(self.transfer(self.arrive(), self.source(), bytes)),
            }
        }
    }

    /// One round trip of a ping-pong. The `first` PE puts, then waits for the answer.
    fn hand_over(&self, bytes: u64, turn: u64, first: bool) -> Result<(), GpuError> {
        let (gpu, signal) = (self.gpu, self.data.address() + 2 * self.largest);
        let put = self.transfer(self.arrive(), self.source(), bytes);
        // SAFETY: as above; the signal is in the symmetric memory too.
        unsafe {
            if !first {
                gpu.wait_signal_on_stream(signal, turn)?;
            }
            gpu.put_signal_on_stream(put, signal, turn)?;
            if first {
                gpu.wait_signal_on_stream(signal, turn)?;
            }
        }
        Ok(())
    }

    fn nccl(&self) -> Result<&Nccl<'_>, GpuError> {
        self.nccl.ok_or_else(|| GpuError::Unavailable("NCCL has not been started".into()))
    }

    /// A message in one direction, sent or received by this PE.
    fn matched(&self, bytes: u64, sends: bool) -> Result<(), GpuError> {
        let (nccl, pe) = (self.nccl()?, 1 - self.gpu.my_pe());
        // SAFETY: both buffers are in this PE's symmetric memory, which outlives the figure.
        unsafe {
            match sends {
                true => nccl.send(self.source(), bytes, pe),
                false => nccl.receive(self.arrive(), bytes, pe),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_operations_fit_into_the_stream() {
        for measure in [Measure::Latency, Measure::Bandwidth] {
            for op in [Op::Put, Op::Get, Op::PutSignal, Op::SendRecv] {
                for bytes in [1, 4096, 1 << 20, 1 << 30] {
                    let plan = StreamSampling::new(measure, op, bytes);
                    assert!(plan.batch >= 1 && (1..MARKS).contains(&plan.together), "{plan:?}");
                    // `together + 1` includes the warm-up batch, `each + 1` the event after each batch.
                    let each = if op == Op::SendRecv && measure == Measure::Bandwidth { 2 } else { 2 * plan.batch };
                    assert!((plan.together + 1) * (each + 1) <= 1000, "{measure:?} {op:?} {bytes} {plan:?}");
                }
            }
        }
        assert_eq!(StreamSampling::new(Measure::Latency, Op::Put, 16), StreamSampling { batch: 16, together: 8 });
        assert_eq!(
            StreamSampling::new(Measure::Bandwidth, Op::Put, 4 << 20),
            StreamSampling { batch: 4, together: 51 }
        );
    }
}
