//! Heaps of the other PEs of this host, mapped into this process, for loads and stores instead of frames.
//!
//! Each PE sends the location of its heap to the PEs whose host has the same name: process, file descriptor, and device and inode, which are
//! unique during a boot. These PEs open the heap below `/proc`, which the kernel permits to processes of the same user.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use super::TcpError;
use super::world::Running;
use crate::{Segment, host_id};

/// The channel of these messages.
const HEAPS: u64 = 3;

/// The location of a heap on its host.
#[derive(Debug, PartialEq, Eq)]
struct HeapLocation {
    process: u32,
    fd: u32,
    /// Device and inode.
    file: (u64, u64),
    /// The host, and its boot.
    host: String,
}

impl HeapLocation {
    fn to_bytes(&self) -> Vec<u8> {
        let (device, inode) = self.file;
        let mut bytes = [self.process.to_le_bytes(), self.fd.to_le_bytes()].concat();
        bytes.extend([device.to_le_bytes(), inode.to_le_bytes()].concat());
        bytes.extend(self.host.as_bytes());
        bytes
    }

    /// `None` if the bytes are not a location.
    fn from_bytes(bytes: &[u8]) -> Option<HeapLocation> {
        let (process, rest) = bytes.split_first_chunk()?;
        let (fd, rest) = rest.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (inode, host) = rest.split_first_chunk()?;
        Some(HeapLocation {
            process: u32::from_le_bytes(*process),
            fd: u32::from_le_bytes(*fd),
            file: (u64::from_le_bytes(*device), u64::from_le_bytes(*inode)),
            host: String::from_utf8(host.to_vec()).ok()?,
        })
    }

    /// Maps the heap, which has `heap_bytes`.
    fn map(&self, heap_bytes: usize) -> io::Result<Segment> {
        let file = File::options().read(true).write(true).open(format!("/proc/{}/fd/{}", self.process, self.fd))?;
        let segment = Segment::from_fd(OwnedFd::from(file)).map_err(io::Error::other)?;
        if segment.file()? != self.file || segment.heap_bytes() != heap_bytes {
            // The process id belongs to another container.
            return Err(io::Error::new(io::ErrorKind::NotFound, "its process has another number here"));
        }
        Ok(segment)
    }
}

/// The heaps of this host's other PEs, by PE, if every PE of the world could map those of its host; otherwise an empty list, and the reason if
/// this PE could not. `hosts` has the hosts' names, by PE. Collective.
pub(super) fn map(
    running: &Running,
    hosts: &[String],
    heap: &Segment,
    limit: Duration,
) -> Result<(Vec<Option<Segment>>, Option<String>), TcpError> {
    let me = running.mesh.me;
    let file = heap.file().map_err(|error| TcpError::system("inspect the symmetric heap", error))?;
    let mine = HeapLocation { process: std::process::id(), fd: heap.fd_number(), file, host: host_id() };
    let others = || (0..hosts.len()).filter(|&pe| pe != me && hosts[pe] == hosts[me]);
    others().for_each(|pe| running.tell(pe, HEAPS, &mine.to_bytes()));
    let mut segments: Vec<Option<Segment>> = hosts.iter().map(|_| None).collect();
    let mut refusal = None;
    let deadline = Instant::now() + limit;
    for pe in others() {
        let told = running.receive(deadline, Some(pe), HEAPS)?;
        let (_, told) = told.ok_or(TcpError::Late { pe, what: "the symmetric heap", limit })?;
        match HeapLocation::from_bytes(&told) {
            // Another host with the same name.
            Some(place) if place.host != mine.host => {}
            Some(place) => match place.map(heap.heap_bytes()) {
                Ok(segment) => segments[pe] = Some(segment),
                Err(error) => refusal = refusal.or(Some(format!("the memory of PE {pe}: {error}"))),
            },
            None => refusal = refusal.or(Some(format!("the memory of PE {pe}: it has not said where it is"))),
        }
    }
    // Also keeps each heap open until every PE has mapped it.
    if running.min(u64::from(refusal.is_none()), limit)? == 0 {
        segments.clear();
    }
    Ok((segments, refusal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn location_survives_its_encoding() {
        let place = HeapLocation { process: 7, fd: 12, file: (1 << 40, 3), host: "boot".to_string() };
        assert_eq!(HeapLocation::from_bytes(&place.to_bytes()).as_ref(), Some(&place));
        assert_eq!(HeapLocation::from_bytes(&place.to_bytes()[..23]), None);
        assert_eq!(HeapLocation::from_bytes(&[0xFF; 30]), None);
    }

    #[cfg(not(miri))] // Miri has no memfd.
    #[test]
    fn other_heap_is_not_mapped() {
        let (heap, other) = (Segment::create("test", 64).unwrap(), Segment::create("test", 64).unwrap());
        let (process, file) = (std::process::id(), heap.file().unwrap());
        let location =
            |heap: &Segment, process| HeapLocation { process, fd: heap.fd_number(), file, host: String::new() };
        let mapped = location(&heap, process).map(64).unwrap();
        mapped.copy_in(3, &[5]);
        let mut seen = [0];
        heap.copy_out(3, &mut seen);
        assert_eq!(seen, [5]);
        let refusal = |place: HeapLocation, bytes| place.map(bytes).unwrap_err().to_string();
        assert_eq!(refusal(location(&other, process), 64), "its process has another number here");
        assert_eq!(refusal(location(&heap, process), 65), "its process has another number here");
        assert!(refusal(location(&heap, u32::MAX), 64).contains("No such file"));
    }
}
