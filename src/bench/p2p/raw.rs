//! The baseline of two PEs that share pages: plain copies and flags without a library.
//!
//! The wait for a flag spins without PAUSE, and yields the CPU only after some microseconds: the fastest method on two CPUs.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};

use crate::shmem::{Shmem, Sym, Transport};

/// Polls of a flag before the CPU is yielded and the clock is read.
const POLLS_PER_YIELD: u32 = 1 << 13;

/// A mapped range of bytes of a symmetric heap, and flags.
///
/// The lifetime is that of the [`Shmem`]. The flags order the copies, as [`crate::shmem`] requires of every program.
#[derive(Clone, Copy)]
pub struct Pages<'s> {
    bytes: NonNull<u8>,
    len: usize,
    flags: NonNull<AtomicU64>,
    n_flags: usize,
    life: std::marker::PhantomData<&'s ()>,
}

impl<'s> Pages<'s> {
    /// The pages of `bytes` and `flags` on `pe`; `None` if this PE has not mapped them.
    pub fn of<T: Transport>(shmem: &'s Shmem<T>, bytes: Sym<u8>, flags: Sym<u64>, pe: usize) -> Option<Pages<'s>> {
        Some(Pages {
            bytes: shmem.ptr(bytes, pe)?,
            len: bytes.len(),
            flags: shmem.ptr(flags, pe)?.cast(),
            n_flags: flags.len(),
            life: std::marker::PhantomData,
        })
    }

    /// The flag with this index. Panics if the index is out of range.
    pub fn flag(&self, index: usize) -> &'s AtomicU64 {
        assert!(index < self.n_flags, "flag {index} of {}", self.n_flags);
        // SAFETY: a word of a symmetric object, which lives as long as 's, is aligned as a u64 and accessed by atomics only.
        unsafe { self.flags.add(index).as_ref() }
    }

    /// Copies `src` to an offset.
    pub fn copy_in(&self, offset: usize, src: &[u8]) {
        assert!(offset + src.len() <= self.len, "{} bytes at {offset} of {}", src.len(), self.len);
        // SAFETY: within the object, by the check; the peer accesses these bytes only after the flag that follows.
        unsafe { self.bytes.add(offset).copy_from_nonoverlapping(NonNull::from(src).cast(), src.len()) }
    }

    /// The sum of all bytes of a range, as little-endian words, wrapping.
    pub fn sum(&self, offset: usize, len: usize) -> u64 {
        assert!(offset + len <= self.len, "{len} bytes at {offset} of {}", self.len);
        // SAFETY: within the object, by the check; the writer has set the flag that was waited for, and writes again only after the
        // acknowledgement.
        sum(unsafe { std::slice::from_raw_parts(self.bytes.add(offset).as_ptr(), len) })
    }
}

/// The sum of all bytes, as little-endian words, wrapping; the last word is filled up with zeros.
pub fn sum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    // Four independent sums: a single one would be limited by the latency of an addition.
    let (fours, few) = words.as_chunks::<4>();
    let mut sums = [0u64; 4];
    for four in fours {
        for (sum, word) in sums.iter_mut().zip(four) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    let few = few.iter().map(|word| u64::from_le_bytes(*word));
    sums.into_iter().chain(few).fold(u64::from_le_bytes(last), u64::wrapping_add)
}

/// Spins until the flag is at least `value`.
///
/// # Errors
/// If `deadline` passes first.
pub fn spin_until(flag: &AtomicU64, value: u64, peer: usize, deadline: Instant) -> Result<()> {
    loop {
        for _ in 0..POLLS_PER_YIELD {
            if flag.load(Ordering::Acquire) >= value {
                return Ok(());
            }
        }
        ensure!(
            Instant::now() < deadline,
            "waited for PE {peer}: expected its flag at {value}, saw {}",
            flag.load(Ordering::Acquire)
        );
        rustix::thread::sched_yield();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sum_depends_on_every_byte() {
        for len in [0, 1, 7, 8, 9, 31, 32, 33, 100, 4096] {
            let mut bytes = vec![0u8; len];
            assert_eq!(sum(&bytes), 0);
            for i in 0..len {
                bytes[i] = 1;
                assert_eq!(sum(&bytes), 1 << (8 * (i % 8)), "byte {i} of {len}");
                bytes[i] = 0;
            }
        }
    }

    #[test]
    fn wait_for_a_flag_ends_at_the_deadline() {
        let flag = AtomicU64::new(3);
        let soon = || Instant::now() + std::time::Duration::from_millis(5);
        spin_until(&flag, 3, 1, soon()).unwrap();
        let error = spin_until(&flag, 4, 1, soon()).unwrap_err().to_string();
        assert_eq!(error, "waited for PE 1: expected its flag at 4, saw 3");
    }
}
