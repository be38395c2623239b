//! Time of a thread in the run queue: ready to run without a CPU.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Run-queue time of the thread that created it, from `/proc/thread-self/schedstat`, which needs a kernel with `CONFIG_SCHED_INFO`.
pub struct RunQueue(Option<File>);

impl RunQueue {
    /// Opens the counter of the calling thread.
    pub fn of_this_thread() -> RunQueue {
        RunQueue(File::open("/proc/thread-self/schedstat").ok())
    }

    /// Run-queue time since the start of the thread, nanoseconds; `None` if the system does not provide it.
    pub fn waited_ns(&self) -> Option<i64> {
        let mut line = [0; 96];
        let length = self.0.as_ref()?.read_at(&mut line, 0).ok()?;
        parse(std::str::from_utf8(&line[..length]).ok()?)
    }
}

/// The second of three numbers: time on CPUs, time in the run queue, number of timeslices.
fn parse(line: &str) -> Option<i64> {
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
#[path = "../../../tests/skip/mod.rs"]
mod skip;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_number_is_the_run_queue_time() {
        assert_eq!(parse("9276452 38212 17\n"), Some(38212));
        assert_eq!([parse(""), parse("12"), parse("a b c")], [None; 3]);
    }

    #[test]
    fn threads_that_share_a_cpu_wait_for_it() {
        use std::time::{Duration, Instant};
        if RunQueue::of_this_thread().waited_ns().is_none() {
            return super::skip::skip("this kernel has no /proc/thread-self/schedstat");
        }
        let cpu = crate::job::host::allowed_cpus()[0];
        let waited = || {
            let mut one = rustix::thread::CpuSet::new();
            one.set(cpu);
            rustix::thread::sched_setaffinity(None, &one).unwrap();
            let queue = RunQueue::of_this_thread();
            let (before, begin) = (queue.waited_ns().unwrap(), Instant::now());
            while begin.elapsed() < Duration::from_millis(100) {
                std::hint::spin_loop();
            }
            queue.waited_ns().unwrap() - before
        };
        let both = std::thread::scope(|scope| {
            let threads = [scope.spawn(waited), scope.spawn(waited)];
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<i64>()
        });
        // Two threads of 100 ms share one CPU: each waits half of the time.
        assert!(both > 50_000_000, "{both} ns");
    }
}
