//! Shared by the probes of CPUs and of devices.

use crate::job::request::ProbeRequest;

/// The share of the available memory for experts. The rest is for tokens, symmetric heaps and other processes.
pub(super) const MEMORY_SHARE: f64 = 0.75;

/// The source of the number of experts; `memory` is the source of the memory.
pub(super) fn probe_sources(request: &ProbeRequest, memory: &str) -> impl Iterator<Item = (&'static str, String)> {
    let expert = request.expert;
    let gradient = if expert.training { " with its gradient in f32" } else { "" };
    let mb = expert.bytes(request.device) * 1e-6;
    std::iter::once(("memory_experts", format!("{memory}, over {mb:.3} MB of {}{gradient}", expert.text())))
}

/// The host name from the kernel.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_string(),
        name => name.to_string(),
    }
}
