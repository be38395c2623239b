//! Fills large arrays on all processors.

use std::thread;

/// Minimum number of elements per thread.
const MIN_ELEMENTS_PER_THREAD: usize = 1 << 18;

/// Calls `each(offset, part)` for consecutive parts of `out`, one per processor, but with at least 2^18 elements each.
pub fn par_chunks<T: Send>(out: &mut [T], each: impl Fn(usize, &mut [T]) + Sync) {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = processors.min(out.len() / MIN_ELEMENTS_PER_THREAD).max(1);
    if threads == 1 {
        return each(0, out);
    }
    let length = out.len().div_ceil(threads);
    thread::scope(|scope| {
        for (number, part) in out.chunks_mut(length).enumerate() {
            let each = &each;
            scope.spawn(move || each(number * length, part));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_every_element_once() {
        for length in [0, 1, MIN_ELEMENTS_PER_THREAD, 2 * MIN_ELEMENTS_PER_THREAD + 1, 7 * MIN_ELEMENTS_PER_THREAD + 5]
        {
            let mut out = vec![0; length];
            par_chunks(&mut out, |first, part| part.iter_mut().enumerate().for_each(|(i, x)| *x += first + i + 1));
            assert!(out.iter().enumerate().all(|(i, &x)| x == i + 1), "{length}");
        }
    }
}
