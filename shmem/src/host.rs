//! Which host this is.

/// An identifier of this host and its boot, the same in all of its containers.
pub fn host_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_string()).unwrap_or_default()
}
