//! A PE's symmetric heap as shared memory: an anonymous file in memory (memfd), mapped by every PE of the host.
//!
//! It has no name in any file system: when the last PE that maps it is gone, however it went, so is the memory.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;
use std::{io, ptr};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::futex;

use super::ShmemError;
use super::doorbell::Doorbell;
use crate::memory::available_bytes;

/// What lies before the heap's offset 0: a page, so that the heap is aligned to one.
const HEADER_BYTES: usize = 4096;

/// Marks a header of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"aristos1");

/// The private part of a segment: not symmetric memory, no operation's offset reaches it.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    bell: Bell,
}

/// The doorbell of the segment's PE, on cache lines of its own: every signaller reads it.
#[repr(C, align(128))]
pub(super) struct Bell {
    waiters: AtomicU32,
    bell: AtomicU32,
}

/// One PE's heap, mapped into this process.
///
/// Copies are plain, and only the transport makes them. Where another PE, be it a process or a thread, accesses the
/// same bytes meanwhile and one of the two writes, the bytes read are unspecified. No type can rule that out: the
/// other side is mostly another process. What rules it out is the protocol, whose signals order the copies
/// ([`super::ShmTransport`] says how); the rules in [the crate](crate) are thus a contract, which callers keep. Short of that,
/// objects are [`Pod`](super::Pod), for which any bytes are a value; every access is checked against the heap's
/// bounds; and the file's size is sealed, so that no access faults.
#[derive(Debug)]
pub struct Segment {
    /// The start of the mapping, and of the header.
    base: NonNull<u8>,
    heap_bytes: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the whole process and lives as long as the value. Everything it is accessed by is
// an atomic, or a copy of bytes by the transport, which the protocol keeps apart from other PEs' of the same bytes,
// whether they are threads or processes; see the type.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A new segment with a zeroed heap of `heap_bytes` bytes, all of them reserved; `name` shows in `/proc`.
    ///
    /// # Errors
    /// When `heap_bytes` is 0 or more than the host has available, or the system refuses.
    pub fn create(name: &str, heap_bytes: usize) -> Result<Self, ShmemError> {
        let refuse = |source: io::Error| ShmemError::System {
            what: format!("create a symmetric heap of {heap_bytes} bytes"),
            source,
        };
        if heap_bytes == 0 {
            return Err(ShmemError::Segment("a symmetric heap has at least 1 byte".into()));
        }
        // No object in memory is larger; and the file's size, with its header, is a number.
        if heap_bytes > isize::MAX as usize - HEADER_BYTES {
            return Err(refuse(io::ErrorKind::OutOfMemory.into()));
        }
        // A reservation too large would not fail: the kernel would end a process, perhaps this one.
        if let Some(available) = available_bytes().filter(|&available| available < heap_bytes as u64) {
            return Err(refuse(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("the host has {available} bytes of memory available"),
            )));
        }
        let file_bytes = heap_bytes as u64 + HEADER_BYTES as u64;
        let create = || -> rustix::io::Result<OwnedFd> {
            let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            rustix::fs::ftruncate(&fd, file_bytes)?;
            rustix::io::retry_on_intr(|| rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, file_bytes))?;
            rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            Ok(fd)
        };
        let segment = Self::map(create().map_err(|errno| refuse(errno.into()))?, heap_bytes)?;
        segment.header().magic.store(MAGIC, Ordering::Release);
        Ok(segment)
    }

    /// Maps a segment that another process created.
    ///
    /// # Errors
    /// When `fd` is not one, or cannot be mapped.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, ShmemError> {
        let system = |what: &str, errno: rustix::io::Errno| ShmemError::System {
            what: format!("{what} a peer's segment"),
            source: errno.into(),
        };
        let file_bytes = rustix::fs::fstat(&fd).map_err(|errno| system("inspect", errno))?.st_size;
        let heap_bytes = usize::try_from(file_bytes).ok().and_then(|bytes| bytes.checked_sub(HEADER_BYTES));
        let Some(heap_bytes) = heap_bytes.filter(|&bytes| bytes > 0) else {
            return Err(ShmemError::Segment(format!(
                "the file has {file_bytes} bytes, too few for a header and a heap"
            )));
        };
        // Without the seals its owner could shrink the file under the mapping.
        let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(ShmemError::Segment("the file's size is not sealed".into()));
        }
        let segment = Self::map(fd, heap_bytes)?;
        if segment.header().magic.load(Ordering::Acquire) != MAGIC {
            return Err(ShmemError::Segment("the file does not start with this version's header".into()));
        }
        Ok(segment)
    }

    /// Maps `fd`, whose size is sealed at `HEADER_BYTES + heap_bytes`.
    fn map(fd: OwnedFd, heap_bytes: usize) -> Result<Self, ShmemError> {
        // SAFETY: a new mapping, at an address the kernel chooses; it aliases nothing of Rust's.
        let mapped = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                HEADER_BYTES + heap_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        };
        let base = mapped.map_err(|errno| ShmemError::System {
            what: format!("map a symmetric heap of {heap_bytes} bytes"),
            source: errno.into(),
        })?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at address 0");
        Ok(Self { base, heap_bytes, fd })
    }

    /// The file, to pass to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The number of the file in this process.
    pub(super) fn fd_number(&self) -> u32 {
        self.fd.as_raw_fd().unsigned_abs()
    }

    /// Its device and inode, which no other file of this host has.
    pub(super) fn file(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.fd)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Size of the heap, bytes.
    #[inline]
    pub fn heap_bytes(&self) -> usize {
        self.heap_bytes
    }

    /// Copies `src` to `offset` of the heap.
    ///
    /// # Panics
    /// If it does not fit there.
    #[inline]
    pub(super) fn copy_in(&self, offset: usize, src: &[u8]) {
        let dest = self.address(offset, src.len());
        // SAFETY: `dest` is valid for `src.len()` bytes of the mapping; `src` is Rust's memory, not the mapping's.
        // That no other PE accesses these bytes meanwhile is the protocol's contract, which cannot be checked here. If
        // it is broken, the bytes that arrive are unspecified; they are read by copies only and as Pod types, for which
        // any bytes are a value.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dest.as_ptr(), src.len()) }
    }

    /// Copies `dest.len()` bytes from `offset` of the heap.
    ///
    /// # Panics
    /// If they are not all in the heap.
    #[inline]
    pub(super) fn copy_out(&self, offset: usize, dest: &mut [u8]) {
        let src = self.address(offset, dest.len());
        // SAFETY: as in `copy_in`, the other way.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dest.as_mut_ptr(), dest.len()) }
    }

    /// Copies `bytes` bytes from `offset` of this heap to `dest_offset` of `dest`'s, which may be this one.
    ///
    /// # Panics
    /// If they are not all in the heaps.
    #[inline]
    pub(super) fn copy_to(&self, offset: usize, dest: &Segment, dest_offset: usize, bytes: usize) {
        let (from, to) = (self.address(offset, bytes), dest.address(dest_offset, bytes));
        // SAFETY: both are valid for `bytes` bytes of their mappings, and may overlap; else as in `copy_in`.
        unsafe { ptr::copy(from.as_ptr(), to.as_ptr(), bytes) }
    }

    /// The u64 at `offset` of the heap, for atomic access.
    ///
    /// # Panics
    /// If it is not in the heap, or `offset` is not a multiple of 8.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "offset {offset} of a signal word is not a multiple of 8");
        // SAFETY: the address is 8 bytes inside the mapping, which is aligned to a page, at a multiple of 8; it
        // lives as long as `self`; any bytes are an AtomicU64.
        unsafe { self.address(offset, 8).cast().as_ref() }
    }

    /// The address of `offset` of the heap, the start of `bytes` bytes of it.
    #[inline]
    pub(super) fn address(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.heap_bytes),
            "{bytes} bytes at offset {offset} are outside the symmetric heap of {} bytes",
            self.heap_bytes
        );
        // SAFETY: inside the mapping, by the check.
        unsafe { self.base.add(HEADER_BYTES + offset) }
    }

    /// The doorbell of the PE whose heap this is.
    #[inline]
    pub(super) fn bell(&self) -> &Bell {
        &self.header().bell
    }

    #[inline]
    fn header(&self) -> &Header {
        const { assert!(size_of::<Header>() <= HEADER_BYTES) };
        // SAFETY: the mapping starts with HEADER_BYTES that only headers use, aligned to a page, and lives as long as
        // `self`; a header is atomics, for which any bytes are valid.
        unsafe { self.base.cast().as_ref() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped; every reference into it borrows `self`. A pointer that `ptr` handed out
        // says that it lives no longer than the transport.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), HEADER_BYTES + self.heap_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

impl Doorbell for Bell {
    type U32 = AtomicU32;

    #[inline]
    fn waiters(&self) -> &AtomicU32 {
        &self.waiters
    }

    #[inline]
    fn bell(&self) -> &AtomicU32 {
        &self.bell
    }

    fn futex_wait(&self, seen: u32, at_most: Duration) {
        let at_most = futex::Timespec {
            tv_sec: at_most.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: at_most.subsec_nanos().into(),
        };
        // The value has changed, a signal came, the time is over: all of them mean to look again. Not PRIVATE: the
        // other side is another process.
        let _ = futex::wait(&self.bell, futex::Flags::empty(), seen, Some(&at_most));
    }

    fn futex_wake(&self) {
        // Fails for a bad address only.
        let _ = futex::wake(&self.bell, futex::Flags::empty(), i32::MAX as u32);
    }

    #[inline]
    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}

#[cfg(all(test, not(miri)))] // Miri has no memfd.
mod tests {
    use super::*;

    #[test]
    fn two_mappings_are_one_memory() {
        let a = Segment::create("test", 100).unwrap();
        let b = Segment::from_fd(a.fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(b.heap_bytes(), 100);
        a.copy_in(90, &[1; 10]);
        let mut read = [9; 12];
        b.copy_out(88, &mut read);
        assert_eq!(read, [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        a.atomic_u64(8).store(5, Ordering::Relaxed);
        assert_eq!(b.atomic_u64(8).load(Ordering::Relaxed), 5);
        b.copy_to(90, &a, 0, 4);
        a.copy_out(0, &mut read[..5]);
        assert_eq!(read[..5], [1, 1, 1, 1, 0]);
    }

    #[test]
    #[should_panic(expected = "2 bytes at offset 63 are outside the symmetric heap of 64 bytes")]
    fn no_copy_leaves_the_heap() {
        Segment::create("test", 64).unwrap().copy_in(63, &[0; 2]);
    }

    #[test]
    #[should_panic(expected = "outside the symmetric heap")]
    fn no_offset_wraps_around() {
        Segment::create("test", 64).unwrap().copy_out(usize::MAX, &mut [0; 2]);
    }

    #[test]
    fn what_is_not_a_segment_is_refused() {
        let refusal = |fd: OwnedFd| Segment::from_fd(fd).unwrap_err().to_string();
        let memfd = |bytes| {
            let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::ftruncate(&fd, bytes).unwrap();
            fd
        };
        assert!(refusal(memfd(10)).contains("10 bytes, too few"));
        assert!(refusal(memfd(8192)).contains("not sealed"));
        let sealed = memfd(8192);
        rustix::fs::fcntl_add_seals(&sealed, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
        assert!(refusal(sealed).contains("header"));
    }

    #[test]
    fn a_size_nobody_has_is_an_error() {
        let message = Segment::create("test", 1 << 60).unwrap_err().to_string();
        assert!(message.starts_with("cannot create a symmetric heap of 1152921504606846976 bytes: "), "{message}");
        assert!(Segment::create("test", usize::MAX).is_err());
        assert!(Segment::create("test", 0).is_err());
        assert!(Segment::create("a\0b", 64).is_err());
    }

    #[test]
    fn the_size_is_sealed() {
        let segment = Segment::create("test", 64).unwrap();
        assert!(rustix::fs::ftruncate(segment.fd(), 0).is_err());
        assert!(rustix::fs::ftruncate(segment.fd(), 1 << 20).is_err());
    }
}
