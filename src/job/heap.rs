//! The size of NVSHMEM's symmetric heap if it is fixed. Without CUDA's virtual memory management, as on Slingshot, the heap cannot grow:
//! NVSHMEM creates it at the start, and reads its size from an environment variable. The PEs' processes are started with the size that the
//! job needs, so that users need not guess the size.

#[cfg(feature = "cuda")]
use super::JobError;
#[cfg(feature = "cuda")]
use crate::gpu::{DeviceLimits, GpuError, SymmetricBy, smoke};
#[cfg(feature = "cuda")]
use crate::moe::MoeError;

/// The environment variable from which NVSHMEM reads the size of its heap.
pub const SIZE: &str = "NVSHMEM_SYMMETRIC_SIZE";
/// If this variable is true, the heap is plain device memory and cannot grow.
pub const NO_VMM: &str = "NVSHMEM_DISABLE_CUDA_VMM";

/// Maximum bytes that NVSHMEM uses for bookkeeping and alignment.
#[cfg(any(feature = "cuda", test))]
const BESIDE: u64 = 1 << 20;
/// Granularity of a heap's size, bytes: a device page.
#[cfg(any(feature = "cuda", test))]
const STEP: u64 = 2 << 20;

/// Parses a size such as "1536M" like NVSHMEM: K, M, G and T are powers of 1024.
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let power = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "kb" => 1,
        "m" | "mb" => 2,
        "g" | "gb" => 3,
        "t" | "tb" => 4,
        _ => return None,
    };
    let number = digits.parse::<f64>().ok().filter(|number| *number >= 0.0)?;
    Some((number * 1024f64.powi(power)) as u64)
}

/// The heap's size for a PE that has at most `needed` bytes allocated at a time.
#[cfg(any(feature = "cuda", test))]
fn size_for(needed: u64) -> u64 {
    needed.saturating_add(BESIDE).checked_next_multiple_of(STEP).unwrap_or(u64::MAX)
}

/// Whether the heap has a fixed size.
#[cfg(any(feature = "cuda", test))]
fn is_fixed(get: impl Fn(&str) -> Option<String>) -> bool {
    let no = |value: &str| value.is_empty() || value.starts_with(['0', 'n', 'N', 'f', 'F']) || value == "off";
    get(NO_VMM).is_some_and(|value| !no(value.trim()))
}

#[cfg(feature = "cuda")]
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Whether the heap has a fixed size and the user has not set it.
#[cfg(feature = "cuda")]
pub fn is_to_be_set() -> bool {
    is_fixed(environment) && environment(SIZE).is_none()
}

/// Whether the heap has a fixed size and the user has set it.
#[cfg(feature = "cuda")]
pub fn is_set() -> bool {
    is_fixed(environment) && environment(SIZE).is_some()
}

/// Returns an error if the user has set a fixed heap size that is smaller than the job needs.
///
/// # Errors
/// Returns an error of one line with the variable, its value, and the size needed.
#[cfg(feature = "cuda")]
pub fn check(needed: u64) -> Result<(), JobError> {
    match environment(SIZE) {
        Some(value) if is_fixed(environment) => check_value(&value, needed),
        _ => Ok(()),
    }
}

#[cfg(feature = "cuda")]
fn check_value(value: &str, needed: u64) -> Result<(), JobError> {
    // Values that are not a size are accepted here, because NVSHMEM reports them.
    if bytes(value).is_none_or(|has| has >= needed) {
        return Ok(());
    }
    Err(JobError::SmallHeap { value: value.to_string(), needed, enough: size_for(needed) })
}

/// The environment variable with which the processes of `n_pes` PEs must be started. Their heaps must hold `bytes`, which depends on the
/// device, and before that the buffers for testing puts. `None` if the heap can grow, or if the user has set its size.
///
/// # Errors
/// Returns the errors of [`check`], of the driver, and of `bytes`.
#[cfg(feature = "cuda")]
pub fn variable(
    n_pes: usize,
    by: SymmetricBy,
    bytes: impl Fn(&DeviceLimits, bool) -> Result<u64, MoeError>,
) -> Result<Option<(String, String)>, JobError> {
    if n_pes < 2 || by != SymmetricBy::Nvshmem || !is_fixed(environment) {
        return Ok(None);
    }
    // The buffers for testing puts are freed before the second allocation, so the maximum of both is enough.
    let mut needed = smoke::symmetric_bytes(n_pes);
    for limits in crate::gpu::cuda::visible_limits().map_err(|error| JobError::Layer(error.into()))? {
        // Which of the two applies is known only after the heap has been created.
        for all_reachable in [false, true] {
            needed = needed.max(bytes(&limits, all_reachable)?);
        }
    }
    if environment(SIZE).is_some() {
        return check(needed).map(|()| None);
    }
    Ok(Some((SIZE.to_string(), size_for(needed).to_string())))
}

/// A line that tells the user about the variable.
#[cfg(feature = "cuda")]
pub fn words((name, value): &(String, String)) -> String {
    format!(
        "aristos: {name}={value} for this job's PEs: without CUDA's virtual memory ({NO_VMM}) the heap does not grow"
    )
}

/// Restarts this process with the variable set, because a process with threads cannot set its own variables safely. Returns only on
/// failure.
#[cfg(feature = "cuda")]
pub fn start_anew((name, value): &(String, String)) -> JobError {
    use std::os::unix::process::CommandExt;
    let mut args = std::env::args_os();
    let mut command = std::process::Command::new("/proc/self/exe");
    args.next().into_iter().for_each(|arg| _ = command.arg0(arg));
    let error = command.args(args).env(name, value).exec();
    JobError::Layer(GpuError::failed("start this process anew, with the heap's size", error).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_nvshmem_reads_them() {
        assert_eq!(
            ["1536M", "2g", "512 K", "7", "1T"].map(bytes),
            [Some(3 << 29), Some(2 << 30), None, Some(7), Some(1 << 40)]
        );
        assert_eq!(["", "x", "-1G", "1.5G"].map(bytes), [None, None, None, Some(3 << 29)]);
    }

    #[test]
    fn a_heap_holds_what_is_asked_of_it_and_a_little_more() {
        for needed in [0, 1, STEP - BESIDE, STEP - BESIDE + 1, 5 * STEP] {
            let size = size_for(needed);
            assert!(
                size >= needed + BESIDE && size < needed + BESIDE + STEP && size.is_multiple_of(STEP),
                "{needed}: {size}"
            );
        }
    }

    #[test]
    fn the_heap_is_fixed_where_its_variable_says_so() {
        for (value, expected) in
            [("1", true), ("true", true), ("yes", true), ("0", false), ("false", false), ("No", false), ("", false)]
        {
            assert_eq!(is_fixed(|name| (name == NO_VMM).then(|| value.to_string())), expected, "{value}");
        }
        assert!(!is_fixed(|_| None));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn a_small_heap_is_refused_with_what_is_needed() {
        assert!(check_value("4M", 4 << 20).is_ok() && check_value("much", 4 << 20).is_ok());
        let line = check_value("4M", (4 << 20) + 1).unwrap_err().to_string();
        for part in ["NVSHMEM_SYMMETRIC_SIZE is 4M", "4194305 bytes", "6291456", "NVSHMEM_DISABLE_CUDA_VMM"] {
            assert!(line.contains(part), "no {part} in: {line}");
        }
    }
}
