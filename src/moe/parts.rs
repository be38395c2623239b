//! Fills large arrays on all processors.

use std::thread;

/// Minimum number of elements per thread.
const ELEMENTS_EACH: usize = 1 << 18;

/// Calls `each(offset, part)` for consecutive parts of `out`, one per processor, but with at least 2^18 elements each.
pub fn in_parts<T: Send>(out: &mut [T], each: impl Fn(usize, &mut [T]) + Sync) {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let threads = processors.min(out.len() / ELEMENTS_EACH).max(1);
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
    fn every_element_is_in_one_part_at_its_place() {
        for length in [0, 1, ELEMENTS_EACH, 2 * ELEMENTS_EACH + 1, 7 * ELEMENTS_EACH + 5] {
            let mut out = vec![0; length];
            in_parts(&mut out, |first, part| part.iter_mut().enumerate().for_each(|(i, x)| *x += first + i + 1));
            assert!(out.iter().enumerate().all(|(i, &x)| x == i + 1), "{length}");
        }
    }
}
