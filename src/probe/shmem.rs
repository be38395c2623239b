//! The probe's messages over a transport: a put with a signal, received and answered.

use std::time::{Duration, Instant};

use crate::shmem::{Cmp, Pod, Shmem, SignalOp, Sym, Transport, Wait, WaitTimeout};

use super::links::{LinkProber, ProbedLinks, probe_links_by};
use super::options::{ProbeError, ProbeOptions, ProbeStage, median, ms};

/// The low bits of a message number: the number of its size, or `LAST`.
const SIZE_BITS: u32 = 8;
pub(super) const LAST: u64 = (1 << SIZE_BITS) - 1;

/// Probes the links; every PE gets the same result. Collective.
///
/// # Errors
/// Those of [`probe`](super::probe).
pub fn probe_links<T: Transport>(
    shmem: &Shmem<T>,
    options: &ProbeOptions,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<ProbedLinks, ProbeError> {
    options.check()?;
    let (n, me) = (shmem.n_pes(), shmem.my_pe());
    let places: Sym<u8> = shmem.alloc(options.place_bytes(n))?;
    let words: Sym<u64> = shmem.alloc(2 * n)?;
    (0..2 * n).for_each(|word| shmem.put(words.at(word), &[0], me));
    let mut prober = Prober {
        shmem,
        options,
        places,
        words,
        message: vec![0x5a; options.largest()],
        taken: vec![0; options.largest()],
        sent: vec![0; n],
        seen: vec![0; n],
    };
    let probed = probe_links_by(&mut prober, options, progress)?;
    let Prober { places, words, .. } = prober;
    shmem.free(words);
    shmem.free(places);
    Ok(probed)
}

pub(super) fn barrier<T: Transport>(shmem: &Shmem<T>, limit: Duration) -> Result<(), ProbeError> {
    shmem.barrier_all(Instant::now() + limit).map_err(|timeout| waited(shmem, timeout.index, "barrier", timeout))
}

fn waited<T: Transport>(shmem: &Shmem<T>, peer: usize, what: &'static str, timeout: WaitTimeout) -> ProbeError {
    ProbeError::Wait { pe: shmem.my_pe(), peer, what, timeout }
}

/// An all-gather with a time limit.
pub(super) struct Gathering<'s, T: Transport> {
    pub(super) shmem: &'s Shmem<T>,
    pub(super) limit: Duration,
}

impl<T: Transport> Gathering<'_, T> {
    pub(super) fn all<V: Pod>(&self, mine: &[V]) -> Result<Vec<V>, ProbeError> {
        let mut all = vec![V::zeroed(); mine.len() * self.shmem.n_pes()];
        let deadline = Instant::now() + self.limit;
        let gathered = self.shmem.all_gather(self.shmem.world(), mine, &mut all, deadline);
        gathered.map_err(|timeout| waited(self.shmem, timeout.index, "all-gather", timeout))?;
        Ok(all)
    }
}

/// One PE's side of the measurements.
struct Prober<'s, T: Transport> {
    shmem: &'s Shmem<T>,
    options: &'s ProbeOptions,
    /// Space for received messages.
    places: Sym<u8>,
    /// By sender: the number of its last message here, with its size in the low bits; then by peer: the number of the last message that it
    /// received.
    words: Sym<u64>,
    message: Vec<u8>,
    taken: Vec<u8>,
    /// Messages sent, by peer.
    sent: Vec<u64>,
    /// Messages received, by peer.
    seen: Vec<u64>,
}

impl<T: Transport> Prober<'_, T> {
    /// Puts a message of `bytes` bytes to offset `place` at `to`; `size` is the number of its size.
    fn put(&mut self, to: usize, place: usize, bytes: usize, size: u64) {
        self.sent[to] += 1;
        let word = self.words.at(self.shmem.my_pe());
        let value = self.sent[to] << SIZE_BITS | size;
        let place = self.places.slice(place..place + bytes);
        self.shmem.put_signal(place, &self.message[..bytes], word, value, SignalOp::Set, to);
    }

    /// Waits for the next message of `from`; returns the number of its size.
    fn next(&mut self, from: usize) -> Result<u64, ProbeError> {
        let value = (self.seen[from] + 1) << SIZE_BITS;
        let seen = self.wait(self.words.at(from), value, from, "a message")?;
        self.seen[from] += 1;
        Ok(seen & LAST)
    }

    /// Copies `bytes` bytes out of the own heap, and signals `from`.
    fn take(&mut self, from: usize, place: usize, bytes: usize) {
        let me = self.shmem.my_pe();
        if bytes > 0 {
            self.shmem.get(&mut self.taken[..bytes], self.places.slice(place..place + bytes), me);
        }
        let word = self.words.at(self.shmem.n_pes() + me);
        self.shmem.signal_op(word, self.seen[from], SignalOp::Set, from);
    }

    /// Waits until `from` has received all messages sent to it.
    fn taken_by(&self, from: usize) -> Result<(), ProbeError> {
        let word = self.words.at(self.shmem.n_pes() + from);
        self.wait(word, self.sent[from], from, "an answer").map(drop)
    }

    fn wait(&self, signal: Sym<u64>, value: u64, from: usize, what: &'static str) -> Result<u64, ProbeError> {
        let deadline = Instant::now() + self.options.wait_limit;
        self.shmem
            .wait_until(Wait { signal, cmp: Cmp::Ge, value }, deadline)
            .map_err(|timeout| waited(self.shmem, from, what, timeout))
    }
}

impl<T: Transport> LinkProber for Prober<'_, T> {
    type Error = ProbeError;

    fn my_pe(&self) -> usize {
        self.shmem.my_pe()
    }

    fn n_pes(&self) -> usize {
        self.shmem.n_pes()
    }

    fn barrier(&mut self) -> Result<(), ProbeError> {
        barrier(self.shmem, self.options.wait_limit)
    }

    fn gather(&mut self, mine: &[f64]) -> Result<Vec<f64>, ProbeError> {
        Gathering { shmem: self.shmem, limit: self.options.wait_limit }.all(mine)
    }

    fn send(&mut self, to: usize, limit: Duration) -> Result<Vec<f64>, ProbeError> {
        let sizes: Vec<usize> = [0].into_iter().chain(self.options.sizes.iter().copied()).collect();
        let mut medians = Vec::with_capacity(sizes.len());
        for (size, &bytes) in sizes.iter().enumerate() {
            let mut times = Vec::with_capacity(self.options.repetitions);
            let begun = Instant::now();
            for repetition in 0..self.options.warmup + self.options.repetitions {
                if times.len() >= ProbeOptions::LEAST && begun.elapsed() > limit {
                    break;
                }
                let start = Instant::now();
                self.put(to, 0, bytes, size as u64);
                self.taken_by(to)?;
                if repetition >= self.options.warmup {
                    times.push(ms(start.elapsed()));
                }
            }
            medians.push(median(times));
        }
        self.put(to, 0, 0, LAST);
        self.taken_by(to)?;
        Ok(medians)
    }

    fn answer(&mut self, from: usize) -> Result<(), ProbeError> {
        loop {
            let size = self.next(from)?;
            let bytes = match size {
                0 | LAST => 0,
                size => *self.options.sizes.get(size as usize - 1).ok_or(ProbeError::Protocol { pe: from })?,
            };
            self.take(from, 0, bytes);
            if size == LAST {
                return Ok(());
            }
        }
    }

    fn shift(&mut self, to: usize, from: usize) -> Result<f64, ProbeError> {
        let (bytes, place) = (self.options.sizes[self.options.together], self.options.place());
        let mut times = Vec::with_capacity(self.options.rounds);
        // The first round is a warm-up.
        for round in 0..=self.options.rounds {
            self.barrier()?;
            let start = Instant::now();
            self.put(to, place * self.shmem.my_pe(), bytes, 1);
            self.next(from)?;
            self.take(from, place * from, bytes);
            self.taken_by(to)?;
            if round > 0 {
                times.push(ms(start.elapsed()));
            }
        }
        Ok(median(times))
    }

    fn exchange(&mut self) -> Result<f64, ProbeError> {
        let (bytes, place) = (self.options.sizes[self.options.together], self.options.place());
        let (n, me) = (self.shmem.n_pes(), self.shmem.my_pe());
        let mut times = Vec::with_capacity(self.options.rounds);
        for round in 0..=self.options.rounds {
            self.barrier()?;
            let start = Instant::now();
            for shift in 1..n {
                self.put((me + shift) % n, place * me, bytes, 1);
            }
            for shift in 1..n {
                let from = (me + n - shift) % n;
                self.next(from)?;
                self.take(from, place * from, bytes);
            }
            for shift in 1..n {
                self.taken_by((me + shift) % n)?;
            }
            if round > 0 {
                times.push(ms(start.elapsed()));
            }
        }
        Ok(median(times))
    }
}
