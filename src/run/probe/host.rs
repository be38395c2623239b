//! Functions for the probes of both CPUs and devices.

use crate::job::request::ProbeRequest;

/// The share of the available memory for experts. The rest is for tokens, symmetric heaps and other processes.
pub(super) const MEMORY_SHARE: f64 = 0.75;

/// How the number of experts was obtained; `memory` is how the memory was obtained.
pub(super) fn probe_sources(request: &ProbeRequest, memory: &str) -> impl Iterator<Item = (&'static str, String)> {
    let expert = request.expert;
    let gradient = if expert.training { " with its gradient in f32" } else { "" };
    let mb = expert.bytes(request.device) * 1e-6;
    std::iter::once(("memory_experts", format!("{memory}, over {mb:.3} MB of {}{gradient}", expert.text())))
}

/// The host name, as set in the kernel.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "localhost".to_string(),
        name => name.to_string(),
    }
}
