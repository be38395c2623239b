//! Checks, before a job starts, that puts and signals between the PEs' devices work in the way that the layer's kernels need.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};

use super::{Buffer, Gpu, GpuError, Launch, SymmetricBuffer};

/// `SmokeArea` of kernels/smoke.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Area {
    signals: u64,
    sent: u64,
    received: u64,
    words: u64,
}

/// `SmokeResult` of kernels/smoke.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Outcome {
    my_pe: u64,
    n_pes: u64,
    missing_pe: u64,
    wrong_pe: u64,
    wrong_word: u64,
    seen: u64,
}

/// Maximum size of a put, bytes. It is large enough that a put takes many network packets.
const MAX_PUT_BYTES: u64 = 1 << 20;
/// Maximum number of bytes that a PE receives in total.
const MAX_RECEIVED_BYTES: u64 = 64 << 20;

/// Returns the number of bytes that each of `n` PEs puts to every other PE.
fn block_bytes(n: u64) -> u64 {
    (MAX_RECEIVED_BYTES / n).min(MAX_PUT_BYTES) / 4096 * 4096
}

fn signals_bytes(n: u64) -> u64 {
    (8 * n).next_multiple_of(256)
}

/// Returns the amount of symmetric memory that [`try_put`] uses with `n_pes` PEs, bytes.
pub fn symmetric_bytes(n_pes: usize) -> u64 {
    let n = n_pes as u64;
    signals_bytes(n) + (n + 1) * block_bytes(n)
}

/// Runs a kernel with which every PE puts a block to every other PE and verifies the received blocks (collective). A PE waits at most
/// `limit` for a block. The kernel uses the operations that the layer's kernels depend on, so that a broken transport is reported before
/// large memory is allocated. `finished` waits for the kernel.
///
/// # Errors
/// Returns [`GpuError::Unavailable`] if a block is missing or corrupt, or if the kernel and the host disagree about the PE numbers, and the
/// driver's error if the driver fails.
pub fn try_put(gpu: &dyn Gpu, limit: Duration, finished: impl Fn() -> Result<(), GpuError>) -> Result<(), GpuError> {
    /// The value of the signals, which is unlikely to be in memory by chance.
    const VALUE: u64 = 0x4172_6973_746f_7321;
    let (me, n) = (gpu.my_pe(), gpu.n_pes() as u64);
    let (bytes, signals_bytes) = (block_bytes(n), signals_bytes(n));
    let memory = SymmetricBuffer::new(gpu, symmetric_bytes(gpu.n_pes()))?;
    memory.zero(0, signals_bytes)?;
    let sent = memory.address() + signals_bytes;
    let area = Area { signals: memory.address(), sent, received: sent + bytes, words: bytes / 8 };
    let result = Buffer::from_slice(gpu, &[Outcome::zeroed()])?;
    gpu.barrier(limit)?;
    let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
    let numbers = [result.address(), VALUE, limit_ns].map(u64::to_ne_bytes);
    let args = [bytemuck::bytes_of(&area), &numbers[0], &numbers[1], &numbers[2]];
    let launch = Launch { grid: 1, block: 128, shared_bytes: 0, cooperative: 0, cluster: 1 };
    // SAFETY: the arguments are the four parameters of `aristos_smoke`, `area` lies within `memory`, and `result` holds one `Outcome`.
    unsafe { gpu.launch("aristos_smoke", launch, &args) }?;
    finished()?;
    let Some(&seen) = result.read_vec::<Outcome>(0, 1)?.first() else { return Ok(()) };
    check(&seen, (me, n), bytes, limit)?;
    memory.free(limit)
}

fn check(seen: &Outcome, (me, n): (usize, u64), bytes: u64, limit: Duration) -> Result<(), GpuError> {
    let Outcome { my_pe, n_pes, missing_pe, wrong_pe, wrong_word, seen } = *seen;
    let what = if (my_pe, n_pes) != (me as u64, n) {
        format!(
            "NVSHMEM tells the kernels that they are PE {my_pe} of {n_pes}, and this is PE {me} of {n}: its host library does \
             not fit the kernels (aristos doctor names both versions)"
        )
    } else if missing_pe != u64::MAX {
        format!(
            "PE {me} waited {:.1} s for {bytes} bytes that PE {missing_pe} puts to it by NVSHMEM, and they did not come: try \
             NVSHMEM_DEBUG=INFO, and aristos doctor",
            limit.as_secs_f64()
        )
    } else if wrong_pe != u64::MAX {
        format!(
            "PE {wrong_pe} put {bytes} bytes to PE {me} by NVSHMEM, and when their signal had come byte {} began the word {seen:#x}, \
             which PE {wrong_pe} did not send: signals overtake data (aristos doctor names the versions)",
            8 * wrong_word
        )
    } else {
        return Ok(());
    };
    Err(GpuError::Unavailable(what))
}
