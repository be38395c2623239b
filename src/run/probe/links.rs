//! Measures the links between devices by puts to symmetric memory: launches the kernels of `kernels/probe.cu` and reads their times.

use std::time::Duration;

use anyhow::Result;
use bytemuck::{Pod, Zeroable};

use crate::gpu::{Buffer, Gpu, GpuError, Launch, SymmetricBuffer};
use crate::probe::{LinkProber, ProbeOptions};
use crate::report::median;

/// Maximum number of blocks that share a message. More blocks do not increase the bandwidth of any current link.
const MAX_BLOCKS: u32 = 32;
/// A message has at most one block per this many bytes.
const PART_BYTES: usize = 16 << 10;
/// Alignment of each piece of memory, bytes.
const ALIGN_BYTES: u64 = 256;
/// Warm-up rounds of simultaneous messages.
const WARMUP_ROUNDS: u32 = 1;
/// Lower bound for measured times, ms.
const MIN_MS: f64 = 1e-6;
/// Maximum bytes per PE of [`DeviceProber::gather_bytes`].
pub const RECORD_BYTES: usize = 256;

/// `ProbeArea` of kernels/probe.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Area {
    messages: u64,
    answers: u64,
    meetings: u64,
    sent: u64,
    received: u64,
    taken: u64,
    numbers: u64,
    cycles: u64,
    control: u64,
    limit_ns: u64,
    budget_ns: u64,
    meeting: u64,
    me: u32,
    n_pes: u32,
    blocks: u32,
    warmup: u32,
    least: u32,
    repetitions: u32,
}

/// `ProbeControl` of kernels/probe.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Control {
    go: u64,
    done: u32,
    failed: u32,
    what: u32,
    pe: u32,
    expected: u64,
    seen: u64,
    count: u64,
    ns: u64,
    cycles: u64,
}

/// One PE's part of the measurements, on its device.
pub struct DeviceProber<'g> {
    gpu: &'g dyn Gpu,
    options: ProbeOptions,
    /// Threads of a block.
    threads: u32,
    symmetric: SymmetricBuffer<'g>,
    own: Buffer<'g>,
    area: Area,
    /// Number of barriers inside kernels for which numbers have been reserved.
    meetings: u64,
}

/// Assigns consecutive offsets in memory that is allocated later.
#[derive(Default)]
struct Bump(u64);

impl Bump {
    fn take(&mut self, bytes: u64) -> u64 {
        let at = self.0;
        self.0 += bytes.next_multiple_of(ALIGN_BYTES);
        at
    }
}

/// Offsets in the symmetric memory, and its size.
struct Places {
    messages: u64,
    answers: u64,
    meetings: u64,
    sent: u64,
    received: u64,
    bytes: u64,
}

/// Sizes of the send and the receive buffer, bytes. Both are used for messages and for the records of [`DeviceProber::gather_bytes`].
fn room(options: &ProbeOptions, n: usize) -> (u64, u64) {
    let record = (n * (options.sizes.len() + 1) * size_of::<f64>()).max(RECORD_BYTES);
    (options.largest().max(record) as u64, options.place_bytes(n).max(n * record) as u64)
}

fn places(options: &ProbeOptions, n: usize, blocks: u32) -> Places {
    let words = (n * blocks as usize * size_of::<u64>()) as u64;
    let (out, into) = room(options, n);
    let mut bump = Bump::default();
    let (messages, answers) = (bump.take(words), bump.take(words));
    let meetings = bump.take((n * size_of::<u64>()) as u64);
    let (sent, received) = (bump.take(out), bump.take(into));
    Places { messages, answers, meetings, sent, received, bytes: bump.0 }
}

/// Maximum number of blocks that share a message on a device with this many multiprocessors.
fn most_blocks(multiprocessors: u32) -> u32 {
    multiprocessors.clamp(1, MAX_BLOCKS)
}

/// Symmetric memory of a [`DeviceProber`] for `n` PEs with devices of this many multiprocessors, bytes.
pub fn symmetric_bytes(options: &ProbeOptions, n: usize, multiprocessors: u32) -> u64 {
    places(options, n, most_blocks(multiprocessors)).bytes
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl<'g> DeviceProber<'g> {
    /// Allocates the memory for `options` on this PE's device, with `threads` threads per block (collective).
    ///
    /// # Errors
    /// Returns an error if the memory does not suffice, or a peer does not respond.
    pub fn new(gpu: &'g dyn Gpu, options: &ProbeOptions, threads: u32) -> Result<Self, GpuError> {
        let (me, n) = (gpu.my_pe(), gpu.n_pes());
        let blocks = most_blocks(gpu.limits()?.multiprocessors);
        let Places { messages, answers, meetings, sent, received, bytes } = places(options, n, blocks);
        let symmetric = SymmetricBuffer::new(gpu, bytes)?;
        symmetric.zero(0, bytes)?;
        let mut bump = Bump::default();
        let taken = bump.take(room(options, n).1);
        let numbers = bump.take((2 * n * blocks as usize * size_of::<u64>()) as u64);
        let cycles = bump.take((options.repetitions.max(options.rounds) * size_of::<u64>()) as u64);
        let control = bump.take(size_of::<Control>() as u64);
        let own = Buffer::new(gpu, bump.0)?;
        own.zero(0, bump.0)?;
        let [messages, answers, meetings, sent, received] =
            [messages, answers, meetings, sent, received].map(|at| symmetric.address() + at);
        let [taken, numbers, cycles, control] = [taken, numbers, cycles, control].map(|at| own.address() + at);
        let area = Area {
            messages,
            answers,
            meetings,
            sent,
            received,
            taken,
            numbers,
            cycles,
            control,
            // The kernels double the limit, which must not overflow.
            limit_ns: nanoseconds(options.wait_limit).clamp(1, u64::MAX / 4),
            budget_ns: 0,
            meeting: 0,
            me: me as u32,
            n_pes: n as u32,
            blocks,
            warmup: options.warmup as u32,
            least: ProbeOptions::LEAST as u32,
            repetitions: options.repetitions as u32,
        };
        // All PEs' signal words must be zero before the first signal.
        gpu.barrier(options.wait_limit)?;
        Ok(DeviceProber { gpu, options: options.clone(), threads, symmetric, own, area, meetings: 0 })
    }

    /// Returns the bytes of all PEs, in the order of PEs. All pass the same number of bytes, at most [`RECORD_BYTES`] (collective).
    ///
    /// # Errors
    /// A peer that does not respond.
    pub fn gather_bytes(&mut self, mine: &[u8]) -> Result<Vec<u8>, GpuError> {
        let (n, bytes) = (self.gpu.n_pes(), mine.len() as u64);
        if n == 1 {
            return Ok(mine.to_vec());
        }
        // Records use the buffers of messages, so barriers separate them from the messages before and after.
        self.gpu.barrier(self.options.wait_limit)?;
        let taken = self.area.taken - self.own.address();
        self.own.write(taken + self.gpu.my_pe() as u64 * bytes, mine)?;
        let area = Area { meeting: self.meet(1), ..self.area };
        self.launch("aristos_probe_gather", 1, &area, &[&bytes.to_ne_bytes()])?;
        let all = self.own.read_vec(taken, n * mine.len())?;
        self.gpu.barrier(self.options.wait_limit)?;
        Ok(all)
    }

    /// Frees the symmetric memory (collective).
    ///
    /// # Errors
    /// A peer that does not respond.
    pub fn free(self) -> Result<(), GpuError> {
        self.symmetric.free(self.options.wait_limit)
    }

    /// Reserves the numbers of the next `times` barriers, and returns the first.
    fn meet(&mut self, times: u64) -> u64 {
        let next = self.meetings + 1;
        self.meetings += times;
        next
    }

    /// Runs a kernel and waits for it.
    fn launch(&self, kernel: &str, grid: u32, area: &Area, args: &[&[u8]]) -> Result<Control, GpuError> {
        let at = self.area.control - self.own.address();
        self.own.zero(at, size_of::<Control>() as u64)?;
        let launch =
            Launch { grid, block: self.threads, shared_bytes: 0, cooperative: u32::from(grid > 1), cluster: 1 };
        let all: Vec<&[u8]> = std::iter::once(bytemuck::bytes_of(area)).chain(args.iter().copied()).collect();
        // SAFETY: each kernel takes a `ProbeArea` and these numbers. The area points into the two buffers, which `places` and `new` make
        // large enough: a message or a record fits into `sent`, and one of each PE into `received` and into `taken`.
        unsafe { self.gpu.launch(kernel, launch, &all) }?;
        let mut control = [Control::zeroed()];
        self.own.read(at, &mut control)?;
        let [control] = control;
        if control.failed == 0 {
            return Ok(control);
        }
        let (peer, what) = match control.what {
            1 => (Some(control.pe as usize), "a message of its device"),
            2 => (Some(control.pe as usize), "its device's answer"),
            3 => (Some(control.pe as usize), "its device's signal to begin"),
            _ => (None, "another block of its own device"),
        };
        Err(GpuError::Wait { pe: self.gpu.my_pe(), peer, what, waited: self.options.wait_limit })
    }

    /// The median of a kernel's measured times, ms.
    fn median_ms(&self, control: &Control, most: usize) -> Result<f64, GpuError> {
        let count = usize::try_from(control.count).unwrap_or(most).min(most);
        let cycles: Vec<u64> = self.own.read_vec(self.area.cycles - self.own.address(), count)?;
        let ms_per_cycle = control.ns as f64 * 1e-6 / control.cycles.max(1) as f64;
        Ok(median(cycles.into_iter().map(|cycles| cycles as f64 * ms_per_cycle).collect()).max(MIN_MS))
    }

    /// Number of blocks that share a message of this size.
    fn blocks(&self, bytes: usize) -> u32 {
        bytes.div_ceil(PART_BYTES).clamp(1, self.area.blocks as usize) as u32
    }

    /// The sizes of the messages: 0, then the requested sizes.
    fn sizes(&self) -> Vec<usize> {
        std::iter::once(0).chain(self.options.sizes.iter().copied()).collect()
    }

    /// All PEs send at the same time, each to the PEs at distances `begin..end`. Returns the median time until all messages of this PE are
    /// answered, ms.
    fn together(&mut self, begin: usize, end: usize) -> Result<f64, GpuError> {
        if begin >= end {
            return Ok(MIN_MS);
        }
        let bytes = self.options.sizes.get(self.options.together).copied().unwrap_or(0);
        let rounds = self.options.rounds;
        let meeting = self.meet(u64::from(WARMUP_ROUNDS) + rounds as u64);
        let area = Area { meeting, warmup: WARMUP_ROUNDS, repetitions: rounds as u32, ..self.area };
        let (begin, end, size) =
            ((begin as u32).to_ne_bytes(), (end as u32).to_ne_bytes(), (bytes as u64).to_ne_bytes());
        let control = self.launch("aristos_probe_together", self.blocks(bytes), &area, &[&begin, &end, &size])?;
        self.median_ms(&control, rounds)
    }
}

impl LinkProber for DeviceProber<'_> {
    type Error = anyhow::Error;

    fn my_pe(&self) -> usize {
        self.gpu.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.gpu.n_pes()
    }

    fn barrier(&mut self) -> Result<()> {
        Ok(self.gpu.barrier(self.options.wait_limit)?)
    }

    fn gather(&mut self, mine: &[f64]) -> Result<Vec<f64>> {
        let all = self.gather_bytes(bytemuck::cast_slice(mine))?;
        Ok(all.chunks_exact(size_of::<f64>()).map(bytemuck::pod_read_unaligned).collect())
    }

    fn send(&mut self, to: usize, limit: Duration) -> Result<Vec<f64>> {
        let area = Area { budget_ns: nanoseconds(limit), ..self.area };
        let to = (to as u32).to_ne_bytes();
        let mut medians = Vec::new();
        for bytes in self.sizes() {
            let size = (bytes as u64).to_ne_bytes();
            let control = self.launch("aristos_probe_send", self.blocks(bytes), &area, &[&to, &size])?;
            medians.push(self.median_ms(&control, self.options.repetitions)?);
        }
        Ok(medians)
    }

    fn answer(&mut self, from: usize) -> Result<()> {
        let from = (from as u32).to_ne_bytes();
        for bytes in self.sizes() {
            let size = (bytes as u64).to_ne_bytes();
            self.launch("aristos_probe_answer", self.blocks(bytes), &self.area, &[&from, &size])?;
        }
        Ok(())
    }

    fn shift(&mut self, to: usize, _from: usize) -> Result<f64> {
        let (n, me) = (self.gpu.n_pes(), self.gpu.my_pe());
        let further = (to + n - me) % n;
        Ok(self.together(further, further + 1)?)
    }

    fn exchange(&mut self) -> Result<f64> {
        Ok(self.together(1, self.gpu.n_pes())?)
    }
}
