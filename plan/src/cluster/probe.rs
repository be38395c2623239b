//! Measures a cluster: the links between PEs, and how fast each computes.
//!
//! Everything here is collective: all PEs of a [`Shmem`] call it, over whatever transport, with the same options.
//!
//! **A link alone.** PE i puts a message with a signal to PE j; j sees the signal, takes the data out of its heap, and signals back. The
//! time from i to j is that round trip, less half the round trip of an empty message: two clocks need not agree. All other PEs
//! wait meanwhile.
//!
//! **All at once.** In n - 1 shifts, in shift s from every PE i to PE i + s, all send and take at the same time; a pair's
//! contention is its round trip then over its round trip alone, at one size. And everyone sends to everyone, all messages under way
//! together; a PE's exchange factor is its time over the sum of its times alone, which is what the planner's C_i says.

use std::time::{Duration, Instant};

use aristos_shmem::{Cmp, Pod, Shmem, ShmemError, SignalOp, Sym, Transport, Wait, WaitTimeout};
use serde::{Deserialize, Serialize};

use super::fit::{Fit, fit};
use super::json::Probe;
use super::{Cluster, Device, Links, Matrix};

/// In the low bits of a message's number: which size it has, or that it was the last.
const SIZE_BITS: u32 = 8;
const LAST: u64 = (1 << SIZE_BITS) - 1;
/// A host's name is cut at this many bytes.
const HOST_BYTES: usize = 64;

/// How to probe. The same on every PE. Begin with [`ProbeOptions::thorough`] or [`ProbeOptions::quick`] and set what differs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProbeOptions {
    /// Sizes of messages, bytes, ascending, at least two and at most 255.
    pub sizes: Vec<usize>,
    /// Which of them is sent by all at once, by its place.
    pub together: usize,
    /// Messages of each size that count, at most.
    pub repetitions: usize,
    /// Messages before them.
    pub warmup: usize,
    /// Rounds of all at once.
    pub rounds: usize,
    /// What the pairs alone may take in all. No size has fewer than [`ProbeOptions::LEAST`] messages all the same.
    pub alone_limit: Duration,
    /// How often a pair whose times do not fit a line is measured again, at most.
    pub retries: usize,
    /// How long each PE computes.
    pub compute: Duration,
    /// How long a PE waits for another.
    pub wait_limit: Duration,
}

impl ProbeOptions {
    /// The fewest messages of each size that count.
    pub const LEAST: usize = 5;

    /// From 16 bytes to 4 MiB in steps of four.
    pub fn thorough() -> ProbeOptions {
        ProbeOptions {
            sizes: (0..10).map(|step| 16 << (2 * step)).collect(),
            together: 8,
            repetitions: 200,
            warmup: 5,
            rounds: 21,
            alone_limit: Duration::from_secs(10),
            retries: 5,
            compute: Duration::from_millis(600),
            wait_limit: Duration::from_secs(60),
        }
    }

    /// For a start-up that nobody waits for: from 64 bytes to 1 MiB in steps of eight or four.
    pub fn quick() -> ProbeOptions {
        ProbeOptions {
            sizes: vec![64, 4 << 10, 32 << 10, 256 << 10, 1 << 20],
            together: 3,
            repetitions: 25,
            warmup: 2,
            rounds: 5,
            alone_limit: Duration::from_millis(120),
            retries: 3,
            compute: Duration::from_millis(100),
            ..ProbeOptions::thorough()
        }
    }

    fn largest(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Symmetric memory that [`probe`] takes from a heap of `n_pes` PEs, bytes.
    pub fn symmetric_bytes(&self, n_pes: usize) -> usize {
        // Places for one message of the largest size, and one of the size sent at once from everyone; two words per PE.
        self.place_bytes(n_pes) + 2 * n_pes * size_of::<u64>() + 256
    }

    /// The part of it that takes messages.
    fn place_bytes(&self, n_pes: usize) -> usize {
        self.largest().max(n_pes * self.place())
    }

    /// Room for a message sent at once.
    fn place(&self) -> usize {
        self.sizes.get(self.together).map_or(0, |bytes| bytes.next_multiple_of(64))
    }

    fn check(&self) -> Result<(), ProbeError> {
        let sizes = &self.sizes;
        let fits = sizes.len() >= 2 && sizes.len() < LAST as usize && sizes.is_sorted_by(|a, b| a < b) && sizes[0] > 0;
        if !fits || self.together >= sizes.len() {
            return Err(ProbeError::Options);
        }
        Ok(())
    }
}

/// What a PE's own device is, for [`probe`].
#[non_exhaustive]
pub struct OwnDevice<'w> {
    /// The name of its host.
    pub host: String,
    /// How many experts its memory holds.
    pub memory_experts: u64,
    /// Does some of the work that its rate is measured by.
    pub work: &'w mut dyn FnMut(),
    /// FLOP of one call of `work`.
    pub work_flop: f64,
}

impl<'w> OwnDevice<'w> {
    /// A device on `host` that holds `memory_experts` experts; one call of `work` is `work_flop` FLOP.
    pub fn new(host: String, memory_experts: u64, work: &'w mut dyn FnMut(), work_flop: f64) -> OwnDevice<'w> {
        OwnDevice { host, memory_experts, work, work_flop }
    }
}

/// What a PE is doing, for whoever shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeStage {
    /// Pairs alone.
    Alone,
    /// All pairs at once.
    Together,
    /// Computing.
    Compute,
}

/// Why a probe ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A peer that did not do its part in time.
    #[error("PE {pe} waited for PE {peer} ({what}): {timeout}")]
    Wait {
        /// The PE that waited.
        pe: usize,
        /// The PE it waited for.
        peer: usize,
        /// What it waited for.
        what: &'static str,
        /// The wait.
        timeout: WaitTimeout,
    },
    /// A peer that said something impossible.
    #[error("PE {pe} announced a message of no size that is probed")]
    Protocol {
        /// The peer.
        pe: usize,
    },
    /// The symmetric heap is too small.
    #[error(transparent)]
    Shmem(#[from] ShmemError),
    /// Options that make no probe.
    #[error("the sizes of a probe must be 2 to 254 ascending numbers of bytes, and one of them be sent by all at once")]
    Options,
}

impl ProbeError {
    /// The PE that was waited for in vain, where the error is that.
    pub fn awaited_pe(&self) -> Option<usize> {
        match self {
            ProbeError::Wait { peer, timeout, .. } => Some(timeout.lost.as_ref().map_or(*peer, |lost| lost.pe)),
            _ => None,
        }
    }
}

/// Probes links, rates and memories; every PE gets the same cluster, with [`Cluster::probe`], its devices in the order of PEs. Collective.
///
/// `transport` is what the report calls the transport. `progress` hears what is done: the stage, how much of how much.
///
/// # Errors
/// A PE that does not do its part, or a heap with less than [`ProbeOptions::symmetric_bytes`] free.
pub fn probe<T: Transport>(
    shmem: &Shmem<T>,
    options: &ProbeOptions,
    transport: &str,
    own: OwnDevice<'_>,
    progress: &mut dyn FnMut(ProbeStage, usize, usize),
) -> Result<Cluster, ProbeError> {
    let n = shmem.n_pes();
    let links = probe_links(shmem, options, progress)?;
    progress(ProbeStage::Compute, 0, 1);
    let rate = probe_rate(shmem, options, own.work, own.work_flop)?;
    let gathering = Gathering { shmem, limit: options.wait_limit };
    let rates = gathering.all(&[rate])?;
    let memories = gathering.all(&[own.memory_experts])?;
    let mut name = [0u8; HOST_BYTES];
    let cut = own.host.floor_char_boundary(HOST_BYTES);
    name[..cut].copy_from_slice(&own.host.as_bytes()[..cut]);
    let names = gathering.all(&name)?;
    progress(ProbeStage::Compute, 1, 1);

    let host = |pe: usize| {
        let name = &names[pe * HOST_BYTES..(pe + 1) * HOST_BYTES];
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(HOST_BYTES);
        String::from_utf8_lossy(&name[..end]).into_owned()
    };
    let devices = (0..n)
        .map(|pe| Device {
            id: pe as u64,
            host: host(pe),
            // A PE that came to nothing in its time is slow, and a device nonetheless.
            flop_per_ms: rates[pe].max(1.0),
            memory_experts: memories[pe],
            memory_mb: None,
        })
        .collect();
    let of = |value: &dyn Fn(&Fit) -> f64| -> Vec<f64> {
        links.fits.iter().map(|fit| fit.as_ref().map_or(0.0, value)).collect()
    };
    let matrix = Matrix::new(n, of(&|fit| fit.link.alpha_ms), of(&|fit| fit.link.beta_ms_per_mb));
    let rows = |flat: Vec<f64>| flat.chunks(n).map(<[f64]>::to_vec).collect();
    let probe = Probe {
        transport: transport.to_string(),
        sizes_bytes: options.sizes.clone(),
        together_bytes: options.sizes[options.together],
        residual: rows(of(&|fit| fit.residual)),
        contention: rows(links.contention),
        exchange_factor: links.exchange_factor,
    };
    Ok(Cluster { devices, links: Links::Matrix(matrix), sources: Default::default(), probe: Some(probe) })
}

/// The links between all PEs, by ordered pair, row by row; the diagonal means nothing.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ProbedLinks {
    /// Alone.
    pub fits: Vec<Option<Fit>>,
    /// Round trip with all PEs sending over round trip alone.
    pub contention: Vec<f64>,
    /// By PE: everyone sending to everyone, its time over the sum of its times alone.
    pub exchange_factor: Vec<f64>,
}

/// Probes the links; every PE gets the same. Collective.
///
/// # Errors
/// As [`probe`].
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
    prober.barrier()?;
    let gathering = Gathering { shmem, limit: options.wait_limit };

    // Row `me`: for each peer the round trips of an empty message and of each size, ms.
    let each = options.sizes.len() + 1;
    let mut own = vec![0.0; n * each];
    let pairs = n * (n - 1);
    let per_size = options.alone_limit.div_f64((pairs * each).max(1) as f64);
    let others = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j);
    for (done, (i, j)) in others.enumerate() {
        progress(ProbeStage::Alone, done, pairs);
        if me == i {
            let times = prober.send(j, per_size)?;
            own[j * each..(j + 1) * each].copy_from_slice(&times);
        } else if me == j {
            prober.answer(i)?;
        }
        prober.barrier()?;
    }
    let times = Times { n, sizes: &options.sizes };
    let mut alone = gathering.all(&own)?;
    for _ in 0..options.retries {
        // All PEs see the same times, and so the same pairs.
        let wild = times.wild(&alone);
        if wild.is_empty() {
            break;
        }
        for &(i, j) in &wild {
            if me == i {
                let again = prober.send(j, per_size)?;
                // What disturbs a message makes it slower.
                own[j * each..].iter_mut().zip(again).for_each(|(time, again)| *time = time.min(again));
            } else if me == j {
                prober.answer(i)?;
            }
            prober.barrier()?;
        }
        alone = gathering.all(&own)?;
    }

    let mut contention = vec![1.0; n];
    for shift in 1..n {
        progress(ProbeStage::Together, shift - 1, n);
        let to = (me + shift) % n;
        let time = prober.shift(to, (me + n - shift) % n)?;
        contention[to] = time / own[to * each + 1 + options.together].max(f64::MIN_POSITIVE);
    }
    progress(ProbeStage::Together, n.saturating_sub(1), n);
    let together = prober.exchange()?;
    let sum: f64 = (0..n).filter(|to| *to != me).map(|to| own[to * each + 1 + options.together]).sum();
    let factor = if n > 1 { together / sum.max(f64::MIN_POSITIVE) } else { 1.0 };
    let contention = gathering.all(&contention)?;
    let exchange_factor = gathering.all(&[factor])?;
    // Nobody may still be in the middle of anything that is freed.
    prober.barrier()?;
    shmem.free(words);
    shmem.free(places);

    let fits = (0..n * n).map(|at| if at / n == at % n { None } else { times.fit(&alone, at / n, at % n) }).collect();
    Ok(ProbedLinks { fits, contention, exchange_factor })
}

/// The round trips between all pairs alone, ms: for each ordered pair that of an empty message, then of each size.
struct Times<'s> {
    n: usize,
    sizes: &'s [usize],
}

impl Times<'_> {
    /// The line through the times from `i` to `j`.
    fn fit(&self, all: &[f64], i: usize, j: usize) -> Option<Fit> {
        let each = self.sizes.len() + 1;
        let times = &all[(i * self.n + j) * each..(i * self.n + j + 1) * each];
        // At least a tenth, so that noise cannot make a time of nothing.
        let one_way = |round_trip: f64| (round_trip - times[0] / 2.0).max(round_trip / 10.0);
        let points: Vec<(f64, f64)> =
            self.sizes.iter().zip(&times[1..]).map(|(bytes, ms)| (*bytes as f64 * 1e-6, one_way(*ms))).collect();
        let mut fit = fit(&points)?;
        // No message is sent in no time, whatever the other ones say.
        let least = points.iter().map(|(_, ms)| *ms).fold(f64::INFINITY, f64::min);
        fit.link.alpha_ms = fit.link.alpha_ms.max(least / 10.0);
        Some(fit)
    }

    /// The pairs whose times fit no line, to be measured again.
    fn wild(&self, all: &[f64]) -> Vec<(usize, usize)> {
        let pairs = (0..self.n).flat_map(|i| (0..self.n).map(move |j| (i, j))).filter(|(i, j)| i != j);
        pairs.filter(|&(i, j)| self.fit(all, i, j).is_none_or(|fit| fit.residual > Probe::FITS)).collect()
    }
}

/// This PE's rate, FLOP per ms, while all PEs compute: the work done in a fixed time, so that PEs that share a processor each get
/// their share of it. Collective.
fn probe_rate<T: Transport>(
    shmem: &Shmem<T>,
    options: &ProbeOptions,
    work: &mut dyn FnMut(),
    flop: f64,
) -> Result<f64, ProbeError> {
    const PARTS: u32 = 5;
    // Memory and clocks warm up.
    work();
    let mut rates = Vec::new();
    for _ in 0..PARTS {
        barrier(shmem, options.wait_limit)?;
        let start = Instant::now();
        let mut times = 0;
        while times == 0 || start.elapsed() < options.compute / PARTS {
            work();
            times += 1;
        }
        rates.push(f64::from(times) * flop / ms(start.elapsed()));
    }
    Ok(median(rates))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn barrier<T: Transport>(shmem: &Shmem<T>, limit: Duration) -> Result<(), ProbeError> {
    shmem.barrier_all(Instant::now() + limit).map_err(|timeout| waited(shmem, timeout.index, "barrier", timeout))
}

fn waited<T: Transport>(shmem: &Shmem<T>, peer: usize, what: &'static str, timeout: WaitTimeout) -> ProbeError {
    ProbeError::Wait { pe: shmem.my_pe(), peer, what, timeout }
}

/// All-gather with a limit.
struct Gathering<'s, T: Transport> {
    shmem: &'s Shmem<T>,
    limit: Duration,
}

impl<T: Transport> Gathering<'_, T> {
    fn all<V: Pod>(&self, mine: &[V]) -> Result<Vec<V>, ProbeError> {
        let mut all = vec![V::zeroed(); mine.len() * self.shmem.n_pes()];
        let deadline = Instant::now() + self.limit;
        let gathered = self.shmem.all_gather(self.shmem.world(), mine, &mut all, deadline);
        gathered.map_err(|timeout| waited(self.shmem, timeout.index, "all-gather", timeout))?;
        Ok(all)
    }
}

/// One PE's end of the measurements.
struct Prober<'s, T: Transport> {
    shmem: &'s Shmem<T>,
    options: &'s ProbeOptions,
    /// Where messages go.
    places: Sym<u8>,
    /// By sender: the number of its last message here, with its size in the low bits; then by peer: the number of the last message that it took.
    words: Sym<u64>,
    message: Vec<u8>,
    taken: Vec<u8>,
    /// Messages sent, by peer.
    sent: Vec<u64>,
    /// Messages taken, by peer.
    seen: Vec<u64>,
}

impl<T: Transport> Prober<'_, T> {
    fn barrier(&self) -> Result<(), ProbeError> {
        barrier(self.shmem, self.options.wait_limit)
    }

    /// Starts a message of `bytes` to `to`, at `place` there; `size` says which it is.
    fn put(&mut self, to: usize, place: usize, bytes: usize, size: u64) {
        self.sent[to] += 1;
        let word = self.words.at(self.shmem.my_pe());
        let value = self.sent[to] << SIZE_BITS | size;
        let place = self.places.slice(place..place + bytes);
        self.shmem.put_signal(place, &self.message[..bytes], word, value, SignalOp::Set, to);
    }

    /// Waits for the next message of `from`, and says which size it has.
    fn next(&mut self, from: usize) -> Result<u64, ProbeError> {
        let value = (self.seen[from] + 1) << SIZE_BITS;
        let seen = self.wait(self.words.at(from), value, from, "a message")?;
        self.seen[from] += 1;
        Ok(seen & LAST)
    }

    /// Takes `bytes` out of the own heap, and tells `from`.
    fn take(&mut self, from: usize, place: usize, bytes: usize) {
        let me = self.shmem.my_pe();
        if bytes > 0 {
            self.shmem.get(&mut self.taken[..bytes], self.places.slice(place..place + bytes), me);
        }
        let word = self.words.at(self.shmem.n_pes() + me);
        self.shmem.signal_op(word, self.seen[from], SignalOp::Set, from);
    }

    /// Waits until `from` has taken all that was sent to it.
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

    /// Round trips to `to`, ms: of an empty message, and of each size.
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

    /// The other end of [`Prober::send`].
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

    /// All send at once, this PE to `to` and `from` to it: the median round trip to `to`, ms.
    fn shift(&mut self, to: usize, from: usize) -> Result<f64, ProbeError> {
        let (bytes, place) = (self.options.sizes[self.options.together], self.options.place());
        let mut times = Vec::with_capacity(self.options.rounds);
        // The first is to warm up.
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

    /// Everyone sends to everyone: the median time until all have taken what this PE sent, ms.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Round trips over links of 2 us and 10 GB/s, of 3 PEs, each multiplied by what `noise` says.
    fn round_trips(sizes: &[usize], noise: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
        let time = |bytes: usize| 0.002 + 0.1e-6 * bytes as f64;
        let of_pair = |i: usize, j: usize| -> Vec<f64> {
            let all = [0].into_iter().chain(sizes.iter().copied()).enumerate();
            all.map(|(at, bytes)| (time(bytes) + time(0)) * noise(i, j, at)).collect()
        };
        (0..9).flat_map(|at| of_pair(at / 3, at % 3)).collect()
    }

    #[test]
    fn times_that_fit_no_line_are_found_and_no_link_takes_no_time() {
        let sizes = ProbeOptions::thorough().sizes;
        let times = Times { n: 3, sizes: &sizes };
        let quiet = round_trips(&sizes, |_, _, _| 1.0);
        assert!(times.wild(&quiet).is_empty());
        let fit = times.fit(&quiet, 0, 2).unwrap();
        assert!((fit.link.alpha_ms - 0.002).abs() < 1e-6 && (fit.link.beta_ms_per_mb - 0.1).abs() < 1e-6, "{fit:?}");
        // Every second size from 1 to 2 is 20 times as slow.
        let busy = round_trips(&sizes, |i, j, at| if (i, j) == (1, 2) && at % 2 == 0 { 20.0 } else { 1.0 });
        assert_eq!(times.wild(&busy), [(1, 2)]);
        // The quicker of two measurements of each.
        let again = round_trips(&sizes, |_, _, at| if at % 2 == 1 { 20.0 } else { 1.0 });
        let best: Vec<f64> = busy.iter().zip(&again).map(|(a, b)| a.min(*b)).collect();
        assert!(times.wild(&best).is_empty());
        // However wild: a link has a latency and a rate.
        for seed in 1..500_u64 {
            let noise = |i: usize, j: usize, at: usize| {
                let mixed = (seed * 31 + (i * 77 + j * 13 + at) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
                10f64.powf(mixed as f64 / f64::from(1 << 24) * 6.0 - 3.0)
            };
            let wild = round_trips(&sizes, noise);
            for (i, j) in [(0, 1), (2, 0)] {
                let Fit { link, residual } = times.fit(&wild, i, j).unwrap();
                let usual = |x: f64| x.is_finite() && x > 0.0;
                assert!(usual(link.alpha_ms) && usual(link.beta_ms_per_mb) && residual.is_finite(), "{link:?}");
            }
        }
    }
}
