//! The cause of each step's delay.
//!
//! The slowest PE of a step waits for its last message; in bulk mode, where every PE waits for all, for the last message of all PEs. The wait has two
//! parts. Before the message was sent, the sender is the cause: it *arrived late* (or the receiver, if others wait for it and it had not sent its own
//! message yet). After that, minus the usual time of a message (the lower quartile of all), the *link* is the cause. The larger part decides.
//!
//! A PE that was ready to run without a CPU resembles one that computed long, or a slow link to it. If this time explains more than half of the part,
//! the *scheduler* is the cause.
//!
//! A late sender has not necessarily computed long: without a barrier, its own last message of the step before may have delayed it. The cause of that
//! message is then found the same way, back to the step where the delay began. A barrier stops this search: a PE that leaves a barrier late has waited
//! for a CPU, or for another PE without one that had to forward the barrier.

use serde::{Deserialize, Serialize};

use super::{PeStep, StragglerMode};

/// Maximum steps to follow a cause back.
const BACK: usize = 32;

/// The cause of a step's delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "cause")]
pub enum Cause {
    /// This PE began to send late: it computed longer than the waiting PE.
    LatePe {
        /// The PE.
        pe: usize,
    },
    /// A message took long after it was sent.
    SlowLink {
        /// The sender.
        from: usize,
        /// The receiver.
        to: usize,
    },
    /// A PE was ready to run and had no CPU.
    Scheduler,
}

impl Cause {
    /// The text in tables: "PE 2 late", "link 0-1 slow", "scheduler".
    pub fn render(&self) -> String {
        match self {
            Cause::LatePe { pe } => format!("PE {pe} late"),
            Cause::SlowLink { from, to } => format!("link {from}-{to} slow"),
            Cause::Scheduler => "scheduler".to_string(),
        }
    }
}

/// One step of all PEs. Times in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Time of each PE from its first sent to its last received message.
    pub times: Vec<i64>,
    /// The fastest PE's time.
    pub actual: i64,
    /// Difference to the slowest PE's time.
    pub delay: i64,
    /// The cause; `None` for a single PE.
    pub cause: Option<Cause>,
}

/// The delay and the cause of every step. `steps` has all PEs' times on one clock, by step, then by PE.
pub fn attribute(steps: &[Vec<PeStep>], mode: StragglerMode) -> Vec<Step> {
    let usual = usual_flight(steps);
    (0..steps.len())
        .map(|k| {
            let times: Vec<i64> = steps[k].iter().map(PeStep::time_ns).collect();
            let actual = times.iter().copied().min().unwrap_or(0);
            let slowest = times.iter().copied().max().unwrap_or(0);
            Step { actual, delay: slowest - actual, cause: cause(steps, k, mode, usual), times }
        })
        .collect()
}

/// The usual time of a message: the lower quartile, so that a slow link of two does not determine it.
fn usual_flight(steps: &[Vec<PeStep>]) -> i64 {
    let mut flights: Vec<i64> = steps
        .iter()
        .flat_map(|pes| pes.iter().enumerate())
        .flat_map(|(me, pe)| (0..pe.sent.len()).filter(move |&s| s != me).map(move |s| flight(pe, s)))
        .collect();
    flights.sort_unstable();
    flights.get(flights.len() / 4).copied().unwrap_or(0)
}

/// Time of a message from its send, or from the start of the receiver's wait if that is later, to its arrival.
fn flight(pe: &PeStep, sender: usize) -> i64 {
    pe.arrived[sender] - pe.sent[sender].max(pe.send)
}

/// The sender of a PE's last message. Among messages that arrived at the same time, as in a collective call, the one sent last.
fn last_sender(me: usize, pe: &PeStep) -> Option<usize> {
    (0..pe.arrived.len()).filter(|&s| s != me).max_by_key(|&s| (pe.arrived[s], pe.sent[s]))
}

fn cause(steps: &[Vec<PeStep>], k: usize, mode: StragglerMode, usual: i64) -> Option<Cause> {
    let pes = &steps[k];
    let slowest = (0..pes.len()).max_by_key(|&pe| pes[pe].time_ns())?;
    // The receiver of the last message.
    let last = |pe: usize| last_sender(pe, &pes[pe]).map_or(i64::MIN, |s| pes[pe].arrived[s]);
    let receiver = match mode {
        StragglerMode::Bulk => (0..pes.len()).max_by_key(|&pe| last(pe))?,
        StragglerMode::OneSided | StragglerMode::Alltoallv => slowest,
    };
    follow((steps, mode), k, (receiver, slowest), usual, BACK)
}

/// The cause of the arrival time of `receiver`'s last message in step `k`. `waiting` is the PE that waited for it since it had sent its own messages.
fn follow(
    (steps, mode): (&[Vec<PeStep>], StragglerMode),
    k: usize,
    (receiver, waiting): (usize, usize),
    usual: i64,
    back: usize,
) -> Option<Cause> {
    let pes = &steps[k];
    let got = &pes[receiver];
    let sender = last_sender(receiver, got)?;
    // The late PE is the sender, or a receiver that still computed while others waited for it.
    let (ready, late_pe) = match got.sent[sender] {
        sent if receiver != waiting && got.send > sent => (got.send, receiver),
        sent => (sent, sender),
    };
    let late = ready - pes[waiting].send;
    let link = flight(got, sender) - usual;
    let most = |queued: i64, of: i64| 2 * queued > of;
    if link > late.max(0) {
        let slow = Cause::SlowLink { from: sender, to: receiver };
        let queued = pes[sender].queued_send + got.queued_send + got.queued_receive;
        return Some(if most(queued, link) { Cause::Scheduler } else { slow });
    }
    let (sent, waited) = (&pes[late_pe], &pes[waiting]);
    let computed = (sent.send - sent.begin) - (waited.send - waited.begin);
    let began = sent.begin - waited.begin;
    let mut queued_before = sent.queued_before;
    // The late PE began late, rather than computing long.
    if began > computed {
        if mode == StragglerMode::Bulk {
            queued_before = pes.iter().map(|pe| pe.queued_before).max().unwrap_or(0);
        } else if k > 0 && back > 0 {
            // If it did not wait in the step before, its own compute there is the cause.
            let before = &steps[k - 1][late_pe];
            let kept = last_sender(late_pe, before).is_some_and(|s| before.arrived[s] - before.send > usual);
            if kept {
                return follow((steps, mode), k - 1, (late_pe, late_pe), usual, back - 1);
            }
        }
    }
    let queued = queued_before + sent.queued_compute;
    Some(if most(queued, late) { Cause::Scheduler } else { Cause::LatePe { pe: late_pe } })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates steps in which a message takes 10, with the given compute times and additional link times.
    fn run(
        n: usize,
        steps: usize,
        mode: StragglerMode,
        compute: impl Fn(usize, usize) -> i64,
        extra: impl Fn(usize, usize, usize) -> i64,
    ) -> Vec<Vec<PeStep>> {
        let mut begins = vec![0; n];
        (0..steps)
            .map(|k| {
                let sends: Vec<i64> = (0..n).map(|pe| begins[pe] + compute(k, pe)).collect();
                let mut pes: Vec<PeStep> = (0..n)
                    .map(|me| {
                        let at = |s: usize| {
                            if s == me { sends[me] } else { (sends[s] + 10 + extra(k, s, me)).max(sends[me]) }
                        };
                        let arrived: Vec<i64> = (0..n).map(at).collect();
                        let end = *arrived.iter().max().unwrap();
                        PeStep {
                            begin: begins[me],
                            send: sends[me],
                            end,
                            sent: sends.clone(),
                            arrived,
                            ..PeStep::default()
                        }
                    })
                    .collect();
                if mode == StragglerMode::Bulk {
                    let end = pes.iter().map(|pe| pe.end).max().unwrap() + 1;
                    pes.iter_mut().for_each(|pe| pe.end = end);
                }
                begins = pes.iter().map(|pe| pe.end).collect();
                pes
            })
            .collect()
    }

    #[test]
    fn slow_pe_is_named_in_both_modes() {
        for n in [2, 3, 8] {
            for slow in 0..n {
                for mode in [StragglerMode::Bulk, StragglerMode::OneSided] {
                    let steps = run(n, 20, mode, |_, pe| if pe == slow { 300 } else { 100 }, |_, _, _| 0);
                    for (k, step) in attribute(&steps, mode).iter().enumerate() {
                        assert_eq!(step.cause, Some(Cause::LatePe { pe: slow }), "{n} PEs, {mode:?}, step {k}");
                        assert!(step.delay >= 190, "{step:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn slow_link_is_named_instead_of_the_delayed_pe() {
        for n in [2, 3, 8] {
            let (from, to) = (n - 1, n / 3);
            for mode in [StragglerMode::Bulk, StragglerMode::OneSided] {
                let extra = |_, a: usize, b: usize| if (a, b) == (from, to) { 200 } else { 0 };
                let steps = run(n, 20, mode, |_, _| 100, extra);
                let causes: Vec<_> = attribute(&steps, mode).into_iter().map(|step| step.cause).collect();
                let link = causes.iter().filter(|&&c| c == Some(Cause::SlowLink { from, to })).count();
                assert!(link >= 19, "{n} PEs, {mode:?}: {causes:?}");
            }
        }
    }

    #[test]
    fn cause_is_followed_back_to_an_earlier_step() {
        // The link is slow once in step 3. Its receiver begins step 4 late and delays the others.
        let extra = |k: usize, a: usize, b: usize| if (k, a, b) == (3, 0, 1) { 500 } else { 0 };
        let steps = run(3, 8, StragglerMode::OneSided, |_, _| 100, extra);
        let all = attribute(&steps, StragglerMode::OneSided);
        let link = Some(Cause::SlowLink { from: 0, to: 1 });
        assert_eq!((all[3].cause, all[4].cause), (link, link));
        assert!(all[3].delay > 400 && all[4].delay > 400, "{all:?}");
        assert!(all[6].delay < 20, "{:?}", all[6]);
    }

    #[test]
    fn late_pe_that_also_loses_its_cpu_is_named() {
        // PE 1 computes 600 longer, then reads its messages 80 late: they were sent long before.
        let mut steps = run(3, 4, StragglerMode::Bulk, |_, pe| if pe == 1 { 700 } else { 100 }, |_, _, _| 0);
        for pes in &mut steps {
            for sender in [0, 2] {
                pes[1].arrived[sender] = pes[1].send + 80;
            }
            pes.iter_mut().for_each(|pe| pe.end += 80);
        }
        let causes: Vec<_> = attribute(&steps, StragglerMode::Bulk).into_iter().map(|step| step.cause).collect();
        assert_eq!(causes, [Some(Cause::LatePe { pe: 1 }); 4]);
    }

    #[test]
    fn scheduler_is_distinguished_from_a_late_pe_and_a_slow_link() {
        for mode in [StragglerMode::Bulk, StragglerMode::OneSided] {
            let compute = |_, pe: usize| if pe == 1 { 300 } else { 100 };
            let late = run(3, 8, mode, compute, |_, _, _| 0);
            let link = run(3, 8, mode, |_, _| 100, |_, a, b| if (a, b) == (2, 0) { 200 } else { 0 });
            let of = |steps: &[Vec<PeStep>], queued: fn(&mut PeStep) -> &mut i64, pe: usize, ns: i64| {
                let mut steps = steps.to_vec();
                steps.iter_mut().for_each(|pes| *queued(&mut pes[pe]) = ns);
                attribute(&steps, mode).into_iter().skip(1).map(|step| step.cause.unwrap()).collect::<Vec<_>>()
            };
            // PE 1 computed 200 longer than the others, which waited for it.
            for (ns, cause) in [(90, Cause::LatePe { pe: 1 }), (110, Cause::Scheduler)] {
                assert_eq!(of(&late, |pe| &mut pe.queued_compute, 1, ns), [cause; 7], "{mode:?}");
                assert_eq!(of(&late, |pe| &mut pe.queued_before, 1, ns), [cause; 7], "{mode:?}");
            }
            // Time without a CPU of another PE does not explain it, and neither does its own after its messages had arrived.
            assert_eq!(of(&late, |pe| &mut pe.queued_compute, 0, 1000), [Cause::LatePe { pe: 1 }; 7]);
            assert_eq!(of(&late, |pe| &mut pe.queued_receive, 1, 1000), [Cause::LatePe { pe: 1 }; 7]);
            // The receiver read the message 200 late, or the sender was stopped for 200 after it had read the clock.
            for (ns, cause) in [(90, Cause::SlowLink { from: 2, to: 0 }), (110, Cause::Scheduler)] {
                assert_eq!(of(&link, |pe| &mut pe.queued_receive, 0, ns), [cause; 7], "{mode:?}");
                assert_eq!(of(&link, |pe| &mut pe.queued_send, 2, ns), [cause; 7], "{mode:?}");
            }
        }
    }

    #[test]
    fn pe_that_leaves_a_barrier_late_is_not_followed_back() {
        // PE 2 begins 200 late, after a step with a link that was slow by 15. PE 0, PE 2 or neither had no CPU in between.
        let extra = |k: usize, a: usize, b: usize| if (k, a, b) == (2, 0, 2) { 15 } else { 0 };
        let of = |queued: Option<usize>| {
            let mut steps = run(3, 4, StragglerMode::Bulk, |_, _| 100, extra);
            steps[3] = run(3, 1, StragglerMode::Bulk, |_, pe| if pe == 2 { 300 } else { 100 }, |_, _, _| 0).remove(0);
            steps[3][2].begin += 200;
            queued.into_iter().for_each(|pe| steps[3][pe].queued_before = 150);
            attribute(&steps, StragglerMode::Bulk)[3].cause.unwrap()
        };
        assert_eq!(of(None), Cause::LatePe { pe: 2 });
        assert_eq!([of(Some(0)), of(Some(2))], [Cause::Scheduler; 2]);
    }

    #[test]
    fn times_start_with_the_first_message() {
        let steps = run(2, 1, StragglerMode::OneSided, |_, pe| 100 + 50 * pe as i64, |_, _, _| 0);
        let step = &attribute(&steps, StragglerMode::OneSided)[0];
        // PE 0 waits for PE 1's message, which is sent at 150. PE 0's message has arrived at PE 1 before.
        assert_eq!((&step.times[..], step.actual, step.delay), (&[60, 0][..], 0, 60));
        let alone = run(1, 2, StragglerMode::Bulk, |_, _| 100, |_, _, _| 0);
        let alone = attribute(&alone, StragglerMode::Bulk);
        assert_eq!((alone[0].delay, alone[0].cause), (0, None));
        assert!(attribute(&[], StragglerMode::Bulk).is_empty());
    }
}
