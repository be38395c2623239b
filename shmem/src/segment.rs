//! A PE's symmetric heap as shared memory: an anonymous in-memory file (memfd), mapped by every PE of the host.
//!
//! The file has no name in a file system: the kernel frees the memory when the last process that maps it ends, even by a crash.

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

/// Bytes before the heap's offset 0: one page, so that the heap is page-aligned.
const HEADER_BYTES: usize = 4096;

/// Identifies this layout of the header.
const MAGIC: u64 = u64::from_le_bytes(*b"aristos1");

/// The header is not symmetric memory: no operation can access it.
#[repr(C)]
struct Header {
    magic: AtomicU64,
    bell: Bell,
}

/// The doorbell of the segment's PE, on separate cache lines, because every signaller reads it.
#[repr(C, align(128))]
pub(super) struct Bell {
    waiters: AtomicU32,
    bell: AtomicU32,
}

/// One PE's heap, mapped into this process.
///
/// Only the transport copies, with plain loads and stores. If another PE (process or thread) accesses the same bytes
/// concurrently and one of them writes, the bytes read are unspecified. No type can prevent this, because the other side is
/// usually another process; the protocol's signals order the copies and prevent it (see [`super::ShmTransport`]). The rules
/// of [the crate](crate) are therefore a contract of callers. Memory safety does not depend on it: objects are
/// [`Pod`](super::Pod), of which every byte pattern is valid; every access is bounds-checked; and the file's size is sealed, so
/// that no access faults.
#[derive(Debug)]
pub struct Segment {
    /// Start of the mapping, where the header is.
    base: NonNull<u8>,
    heap_bytes: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the process and lives as long as the value. It is accessed by atomics, and by copies of bytes
// that the protocol orders against those of other PEs, whether threads or processes; see the type.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a segment with a zeroed, fully reserved heap of `heap_bytes` bytes; `name` appears in `/proc`.
    ///
    /// # Errors
    /// [`ShmemError::Segment`] if `heap_bytes` is 0; [`ShmemError::System`] if it exceeds the host's available memory or a
    /// system call fails.
    pub fn create(name: &str, heap_bytes: usize) -> Result<Self, ShmemError> {
        let refuse = |source: io::Error| ShmemError::System {
            what: format!("create a symmetric heap of {heap_bytes} bytes"),
            source,
        };
        if heap_bytes == 0 {
            return Err(ShmemError::Segment("a symmetric heap has at least 1 byte".into()));
        }
        // The limit of any allocation; it also keeps the file's size representable.
        if heap_bytes > isize::MAX as usize - HEADER_BYTES {
            return Err(refuse(io::ErrorKind::OutOfMemory.into()));
        }
        // An excessive reservation does not fail; the kernel would kill a process, possibly this one.
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
    /// [`ShmemError::Segment`] if `fd` is not a segment; [`ShmemError::System`] if a system call fails.
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
        // Without the seals the file's owner could shrink it under the mapping.
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

    /// Maps `fd`, which has the sealed size `HEADER_BYTES + heap_bytes`.
    fn map(fd: OwnedFd, heap_bytes: usize) -> Result<Self, ShmemError> {
        // SAFETY: a new mapping at an address that the kernel chooses, so it aliases no Rust object.
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

    /// The file descriptor, to be passed to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The descriptor's number in this process.
    pub(super) fn fd_number(&self) -> u32 {
        self.fd.as_raw_fd().unsigned_abs()
    }

    /// The file's device and inode, unique on this host.
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
    /// If the range is out of bounds.
    #[inline]
    pub(super) fn copy_in(&self, offset: usize, src: &[u8]) {
        let dest = self.address(offset, src.len());
        // SAFETY: `address` has checked the range; `src` is not in the mapping, which is never borrowed as a slice. The
        // protocol must keep other PEs from accessing these bytes concurrently, which cannot be checked here. If it fails, the
        // bytes are unspecified, but they are only copied and read as Pod types, of which every byte pattern is valid.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dest.as_ptr(), src.len()) }
    }

    /// Copies `dest.len()` bytes at `offset` of the heap.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[inline]
    pub(super) fn copy_out(&self, offset: usize, dest: &mut [u8]) {
        let src = self.address(offset, dest.len());
        // SAFETY: as in `copy_in`, with source and destination exchanged.
        unsafe { ptr::copy_nonoverlapping(src.as_ptr(), dest.as_mut_ptr(), dest.len()) }
    }

    /// Copies `bytes` bytes at `offset` of this heap to `dest_offset` of `dest`'s, which may be the same heap.
    ///
    /// # Panics
    /// If a range is out of bounds.
    #[inline]
    pub(super) fn copy_to(&self, offset: usize, dest: &Segment, dest_offset: usize, bytes: usize) {
        let (from, to) = (self.address(offset, bytes), dest.address(dest_offset, bytes));
        // SAFETY: `address` has checked both ranges, which may overlap; otherwise as in `copy_in`.
        unsafe { ptr::copy(from.as_ptr(), to.as_ptr(), bytes) }
    }

    /// The u64 at `offset` of the heap, for atomic access.
    ///
    /// # Panics
    /// If the word is out of bounds or `offset` is not a multiple of 8.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "offset {offset} of a signal word is not a multiple of 8");
        // SAFETY: `address` has checked the bounds. The mapping is page-aligned, so the address is a multiple of 8; it stays
        // mapped while `self` lives, and every byte pattern is a valid AtomicU64.
        unsafe { self.address(offset, 8).cast().as_ref() }
    }

    /// The address of `offset` of the heap, after a check that `bytes` bytes at it are in bounds.
    #[inline]
    pub(super) fn address(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.heap_bytes),
            "{bytes} bytes at offset {offset} are outside the symmetric heap of {} bytes",
            self.heap_bytes
        );
        // SAFETY: the assertion keeps the address inside the mapping.
        unsafe { self.base.add(HEADER_BYTES + offset) }
    }

    /// The doorbell of the heap's PE.
    #[inline]
    pub(super) fn bell(&self) -> &Bell {
        &self.header().bell
    }

    #[inline]
    fn header(&self) -> &Header {
        const { assert!(size_of::<Header>() <= HEADER_BYTES) };
        // SAFETY: the mapping starts with HEADER_BYTES reserved for the header, is page-aligned and lives as long as `self`; a
        // header consists of atomics, of which every byte pattern is valid.
        unsafe { self.base.cast().as_ref() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `map` mapped. References into it borrow `self`; pointers from `ptr` are documented to be
        // valid no longer than the transport.
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
        // A changed value, a wake-up and a time-out all lead to another check by the caller. Not PRIVATE: the other side is
        // another process.
        let _ = futex::wait(&self.bell, futex::Flags::empty(), seen, Some(&at_most));
    }

    fn futex_wake(&self) {
        // Fails only for an invalid address.
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
    fn mappings_share_memory() {
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
    fn copy_out_of_bounds_panics() {
        Segment::create("test", 64).unwrap().copy_in(63, &[0; 2]);
    }

    #[test]
    #[should_panic(expected = "outside the symmetric heap")]
    fn overflowing_offset_panics() {
        Segment::create("test", 64).unwrap().copy_out(usize::MAX, &mut [0; 2]);
    }

    #[test]
    fn invalid_files_are_refused() {
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
    fn impossible_sizes_are_refused() {
        let message = Segment::create("test", 1 << 60).unwrap_err().to_string();
        assert!(message.starts_with("cannot create a symmetric heap of 1152921504606846976 bytes: "), "{message}");
        assert!(Segment::create("test", usize::MAX).is_err());
        assert!(Segment::create("test", 0).is_err());
        assert!(Segment::create("a\0b", 64).is_err());
    }

    #[test]
    fn size_is_sealed() {
        let segment = Segment::create("test", 64).unwrap();
        assert!(rustix::fs::ftruncate(segment.fd(), 0).is_err());
        assert!(rustix::fs::ftruncate(segment.fd(), 1 << 20).is_err());
    }
}
