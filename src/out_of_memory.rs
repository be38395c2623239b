//! Failed allocations.
//!
//! Rust's own reaction is a line of its own, a backtrace and SIGABRT, from every thread that fails. [`EndingAllocator`] ends the process with one line.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Cursor, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code of a PE that is out of memory. Its supervisor prints the line.
pub const OUT_OF_MEMORY: u8 = libc::ENOMEM as u8;

static IS_PE: AtomicBool = AtomicBool::new(false);
static ENDS: AtomicBool = AtomicBool::new(false);

/// Lets this process end with code [`OUT_OF_MEMORY`], and without a line, if an allocation fails.
pub fn leave_to_supervisor() {
    IS_PE.store(true, Ordering::Relaxed);
}

/// The system's allocator. If an allocation fails, the process ends with one line and exit code 1.
pub struct EndingAllocator;

// SAFETY: each function forwards to the system's allocator, and returns what that returns.
unsafe impl GlobalAlloc for EndingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        or_end(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        or_end(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        or_end(unsafe { System.realloc(memory, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn or_end(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() {
        end(bytes);
    }
    memory
}

/// Allocates nothing.
#[cold]
fn end(bytes: usize) -> ! {
    if ENDS.swap(true, Ordering::Relaxed) {
        // Another thread ends the process.
        loop {
            std::thread::yield_now();
        }
    }
    let is_pe = IS_PE.load(Ordering::Relaxed);
    if !is_pe {
        let mut line = [0; 200];
        let mut to = Cursor::new(&mut line[..]);
        let why = "more than the machine, or the limit of ulimit -v, allows";
        let _ = writeln!(to, "aristos: out of memory: {bytes} bytes cannot be allocated, {why}");
        let end = to.position() as usize;
        // SAFETY: `line` is readable up to `end`. Not through `stderr()`, whose lock a thread that waits here may hold.
        unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), end) };
    }
    let code = if is_pe { OUT_OF_MEMORY } else { 1 };
    // SAFETY: ends the process at once, without handlers, which might allocate.
    unsafe { libc::_exit(code.into()) }
}
