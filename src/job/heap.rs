//! NVSHMEM's symmetric heap where it does not grow, as without CUDA's virtual memory (on Slingshot): it is made at the start, of a size that a variable
//! says. So that nobody has to guess it, the PEs' processes are started with what the job is going to ask of it.

#[cfg(feature = "cuda")]
use super::JobError;
#[cfg(feature = "cuda")]
use crate::gpu::{DeviceLimits, GpuError, SymmetricBy, smoke};
#[cfg(feature = "cuda")]
use crate::moe::MoeError;

/// The size of NVSHMEM's heap, as NVSHMEM reads it.
pub const SIZE: &str = "NVSHMEM_SYMMETRIC_SIZE";
/// Set to anything true, the heap is plain device memory, and does not grow.
pub const NO_VMM: &str = "NVSHMEM_DISABLE_CUDA_VMM";

/// What NVSHMEM's own bookkeeping and alignment may take of a heap, bytes.
#[cfg(any(feature = "cuda", test))]
const BESIDE: u64 = 1 << 20;
/// What a heap's size is a multiple of, bytes: the pages of devices.
#[cfg(any(feature = "cuda", test))]
const STEP: u64 = 2 << 20;

/// "1536M" as NVSHMEM reads it: K, M, G, T are powers of 1024.
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

/// How to make a heap that PEs ask at most `needed` bytes of at a time.
#[cfg(any(feature = "cuda", test))]
fn size_for(needed: u64) -> u64 {
    needed.saturating_add(BESIDE).checked_next_multiple_of(STEP).unwrap_or(u64::MAX)
}

/// Whether the heap is as large at the start as it ever is.
#[cfg(any(feature = "cuda", test))]
fn is_fixed(get: impl Fn(&str) -> Option<String>) -> bool {
    let no = |value: &str| value.is_empty() || value.starts_with(['0', 'n', 'N', 'f', 'F']) || value == "off";
    get(NO_VMM).is_some_and(|value| !no(value.trim()))
}

#[cfg(feature = "cuda")]
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Whether the heap does not grow, and nothing says how large it is.
#[cfg(feature = "cuda")]
pub fn is_to_be_set() -> bool {
    is_fixed(environment) && environment(SIZE).is_none()
}

/// Whether the heap does not grow, and something says how large it is.
#[cfg(feature = "cuda")]
pub fn is_set() -> bool {
    is_fixed(environment) && environment(SIZE).is_some()
}

/// Refuses a heap of the user's that does not grow and is smaller than what a job needs.
///
/// # Errors
/// One line, with the variable, its value, and what is needed.
#[cfg(feature = "cuda")]
pub fn check(needed: u64) -> Result<(), JobError> {
    match environment(SIZE) {
        Some(value) if is_fixed(environment) => check_value(&value, needed),
        _ => Ok(()),
    }
}

#[cfg(feature = "cuda")]
fn check_value(value: &str, needed: u64) -> Result<(), JobError> {
    // What is no size is for NVSHMEM to refuse.
    if bytes(value).is_none_or(|has| has >= needed) {
        return Ok(());
    }
    Err(JobError::SmallHeap { value: value.to_string(), needed, enough: size_for(needed) })
}

/// What the processes of `n_pes` PEs are to be started with besides, so that their heap holds what `bytes` says that a PE takes on a device, and what they take to
/// see whether their puts arrive; nothing where the heap grows, or the user has said how large it is.
///
/// # Errors
/// As [`check`]; the driver's, and what no device runs.
#[cfg(feature = "cuda")]
pub fn variable(
    n_pes: usize,
    by: SymmetricBy,
    bytes: impl Fn(&DeviceLimits, bool) -> Result<u64, MoeError>,
) -> Result<Option<(String, String)>, JobError> {
    if n_pes < 2 || by != SymmetricBy::Nvshmem || !is_fixed(environment) {
        return Ok(None);
    }
    // One after the other: each gives back what it took.
    let mut needed = smoke::symmetric_bytes(n_pes);
    for limits in crate::gpu::cuda::visible_limits().map_err(|error| JobError::Layer(error.into()))? {
        // Which of the two is known only once there is a heap.
        for all_reachable in [false, true] {
            needed = needed.max(bytes(&limits, all_reachable)?);
        }
    }
    if environment(SIZE).is_some() {
        return check(needed).map(|()| None);
    }
    Ok(Some((SIZE.to_string(), size_for(needed).to_string())))
}

/// The line about it, for the user.
#[cfg(feature = "cuda")]
pub fn words((name, value): &(String, String)) -> String {
    format!(
        "aristos: {name}={value} for this job's PEs: without CUDA's virtual memory ({NO_VMM}) the heap does not grow"
    )
}

/// Starts this process anew, with that variable: while a process has threads or connections no variable of it can be set safely, and NVSHMEM is to find
/// it. Returns only where that fails.
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
