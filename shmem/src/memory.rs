//! Available memory of the host.

use std::fs;
use std::path::Path;

/// Memory available without swapping, bytes: the minimum of the host's and of what this process's control groups still allow.
/// `None` if `/proc` does not report it.
pub fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let of_host = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_available_bytes(Path::new("/sys/fs/cgroup"), &groups).map_or(of_host, |of_group| of_host.min(of_group)))
}

/// Memory that the control groups listed in `groups` (format of `/proc/self/cgroup`) and their ancestors still allow, bytes;
/// `None` without a limit. `root` is the mount point.
fn group_available_bytes(root: &Path, groups: &str) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        // Version 2 has one hierarchy with an empty controller list; version 1 has a separate one for memory.
        let (mount, files) = match controllers {
            "" => (root.to_path_buf(), ["memory.max", "memory.current"]),
            list if list.split(',').any(|one| one == "memory") => {
                (root.join("memory"), ["memory.limit_in_bytes", "memory.usage_in_bytes"])
            }
            _ => continue,
        };
        let path = Path::new(path.trim_start_matches('/'));
        for group in path.ancestors() {
            let free = free_bytes(&mount.join(group), files);
            least = least.into_iter().chain(free).min();
        }
    }
    least
}

/// A group's limit minus its usage that cannot be reclaimed.
fn free_bytes(group: &Path, [limit, usage]: [&str; 2]) -> Option<u64> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    // An unlimited group has "max", which is not a number.
    let (limit, usage) = (number(limit)?, number(usage)?);
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let of = |name: &str| stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok());
    // File pages in memory can be read again, so they count as free.
    let cached = ["inactive_file", "active_file"].into_iter().filter_map(of).sum::<u64>();
    Some(limit.saturating_sub(usage.saturating_sub(cached)))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    fn group(root: &Path, path: &str, files: &[(&str, &str)]) {
        let folder = root.join(path);
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), text).unwrap();
        }
    }

    #[test]
    fn lowest_limit_of_all_ancestor_groups_applies() {
        let root = tempfile::tempdir().unwrap();
        group(root.path(), "job", &[("memory.max", "1000\n"), ("memory.current", "900\n")]);
        let step = [("memory.max", "max\n"), ("memory.current", "900\n")];
        group(root.path(), "job/step", &step);
        assert_eq!(group_available_bytes(root.path(), "0::/job/step\n"), Some(100));
        // Cached files can be reclaimed.
        group(root.path(), "job", &[("memory.stat", "anon 500\ninactive_file 250\nactive_file 50\n")]);
        assert_eq!(group_available_bytes(root.path(), "0::/job/step\n"), Some(400));
        assert_eq!(group_available_bytes(root.path(), "0::/other\n"), None);
        // Version 1.
        let limits = [("memory.limit_in_bytes", "5000\n"), ("memory.usage_in_bytes", "4990\n")];
        group(root.path(), "memory/x", &limits);
        assert_eq!(group_available_bytes(root.path(), "5:cpu,memory:/x\n3:pids:/x\n"), Some(10));
    }

    #[test]
    fn available_bytes_is_positive() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
