//! The shares with which a group takes least.
//!
//! With experts as if they could be cut this is a linear programme: the least sum of how long a group computes and how long it exchanges, such that each
//! member computes its share, receives and sends for no longer than that, and any members together have no more than the dearest experts that they have
//! room for. It is solved by the dual simplex method (Lemke 1954) on a dictionary (Chvátal 1983, chapters 3 and 10). There the objective only rises, so
//! most groups are known to take too long after a few steps. It begins where all compute equally long and exchange for no time. Where experts are equal,
//! a group may have to compute for as long as it does with whole ones.

use crate::placed::larger;
use crate::placed::regroup::{MOST_DEVICES, devices};

/// What no group takes that can hold all experts.
pub(super) const IMPOSSIBLE: f32 = 1e9;
/// Constraints are broken by more, and multiples are above it.
const LITTLE: f32 = 1e-5;
/// Shares that memory has no room for are above it.
const WITHOUT_ROOM: f32 = 3e-5;
/// Steps and constraints of memory at most; what it has come to by then counts as the least.
const STEPS: usize = 300;
/// So many values are taken together, so that vectors do it.
const LANES: usize = 8;

/// What groups are of, times in any unit.
pub(super) struct Devices {
    pub n: usize,
    /// How long each computes all experts for one device's tokens.
    pub compute: Vec<f32>,
    /// What x sends to c, at x n + c: alpha, and beta for all experts.
    pub alpha: Vec<f32>,
    pub beta: Vec<f32>,
    /// For how many experts each has room, and the share of so many of the dearest.
    pub room: Vec<usize>,
    pub dearest: Vec<f32>,
    /// Whether a group is to compute at least as long as with whole experts, which are all equal then.
    pub whole: bool,
}

impl Devices {
    pub fn experts(&self) -> usize {
        self.dearest.len() - 1
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Variable {
    /// How long the group exchanges.
    Exchange,
    /// What a holder has, by its place, and how much less that is than what it computes in the time that the group does.
    Share(usize),
    Less,
    /// By how much a constraint holds.
    Slack,
}

/// A dictionary: the basic variables are constants and multiples of the others, which are 0.
#[derive(Default)]
pub(super) struct Simplex {
    members: Vec<usize>,
    /// The members that may hold experts.
    holders: Vec<usize>,
    /// Row 0 is the objective, the others those of `basic`. Column 0 has constants, the next ones the multiples of `others`.
    rows: Vec<f32>,
    stride: usize,
    basic: Vec<Variable>,
    others: Vec<Variable>,
    pivot: Vec<f32>,
    /// By place: what a holder has of all, where all compute equally long.
    parts: Vec<f32>,
    /// The members and holders that it has the shares of.
    solved: Option<(u64, u64)>,
    /// By place: the row of what a holder has; 0 where that is not basic.
    row_of: Vec<usize>,
    /// By place: how many whole experts a holder has.
    counts: Vec<usize>,
    /// Links looked at so far, or what takes as long.
    pub ops: u64,
}

impl Simplex {
    /// The least that a group takes of whose devices `holders` may hold experts; where that is above `most`, any time from there up to it.
    pub fn least(&mut self, of: &Devices, set: u64, holders: u64, most: f32) -> f32 {
        self.solved = None;
        let rates = self.begin(of, set, holders);
        if self.holders.iter().map(|&i| of.room[i]).sum::<usize>() < of.experts() {
            return IMPOSSIBLE;
        }
        let whole = if of.whole { self.whole_experts_compute(of, rates) } else { 0.0 };
        if whole > most {
            return whole;
        }
        // No shares compute in less than those with which all compute equally long.
        let equally = 1.0 / rates;
        if equally > most {
            return equally;
        }
        self.fill(of, rates);
        self.compute_for(whole);
        for _ in 0..STEPS {
            let least = self.rows[0];
            if least > most || !least.is_finite() {
                return if least.is_finite() { least } else { IMPOSSIBLE };
            }
            let goes_on = match self.most_broken() {
                Some(row) => self.step(row),
                None if self.cut(of) => true,
                None => {
                    self.solved = Some((set, holders));
                    return least;
                }
            };
            if !goes_on {
                return IMPOSSIBLE;
            }
        }
        self.rows[0]
    }

    /// What these take, if it has just come to their shares.
    pub fn solved(&self, set: u64, holders: u64) -> Option<f32> {
        (self.solved == Some((set, holders))).then(|| self.rows[0])
    }

    /// The holders with the shares that it came to.
    pub fn shares(&self) -> impl Iterator<Item = (usize, f32)> {
        self.holders.iter().zip(&self.row_of).map(|(&i, &row)| (i, larger(self.share(row), 0.0)))
    }

    /// The share whose row this is.
    fn share(&self, row: usize) -> f32 {
        if row > 0 { self.rows[row * self.stride] } else { 0.0 }
    }

    /// Members, holders and their parts; how much of all these compute in a unit.
    fn begin(&mut self, of: &Devices, set: u64, may_hold: u64) -> f32 {
        let Simplex { members, holders, parts, row_of, ops, .. } = self;
        row_of.clear();
        members.clear();
        members.extend(devices(set));
        holders.clear();
        holders.extend(devices(set & may_hold));
        parts.clear();
        parts.extend(holders.iter().map(|&i| 1.0 / (members.len() as f32 * of.compute[i])));
        let rates = parts.iter().sum();
        parts.iter_mut().for_each(|part| *part /= rates);
        *ops += (members.len() * members.len()) as u64 / 2;
        rates
    }

    /// The dictionary where all holders compute equally long and exchange for no time. What one has less, all have more, by their rates.
    fn fill(&mut self, of: &Devices, rates: f32) {
        let Simplex { members, holders, parts, rows, row_of, stride, basic, others, .. } = self;
        let count = holders.len();
        *stride = (count + 2).next_multiple_of(LANES);
        rows.clear();
        rows.resize((1 + 2 * count + members.len()) * *stride, 0.0);
        others.clear();
        others.extend((0..count).map(|_| Variable::Less));
        others.push(Variable::Exchange);
        basic.clear();
        basic.extend((0..count).map(Variable::Share));
        row_of.extend(1..=count);
        basic.extend((0..count + members.len()).map(|_| Variable::Slack));
        let mut lines = rows.chunks_exact_mut(*stride);
        if let Some(objective) = lines.next() {
            objective[..=count].fill(1.0 / rates);
            objective[1 + count] = 1.0;
        }
        for ((place, &part), line) in parts.iter().enumerate().zip(&mut lines) {
            line[..=count].fill(part);
            line[1 + place] -= 1.0;
        }
        // By place of a holder: what all send to it.
        let mut sent = [(0.0f32, 0.0f32); MOST_DEVICES];
        let sent = &mut sent[..count];
        for (&x, line) in members.iter().zip(&mut lines) {
            let (alpha, beta) = (&of.alpha[x * of.n..][..of.n], &of.beta[x * of.n..][..of.n]);
            let (mut once, mut all) = (0.0, 0.0);
            for (((&c, part), less), sent) in holders.iter().zip(&*parts).zip(&mut line[1..]).zip(&mut *sent) {
                let (alpha, beta) = (alpha[c], beta[c]);
                once += alpha;
                all += beta * part;
                *less = beta;
                *sent = (sent.0 + alpha, sent.1 + beta);
            }
            line[1..=count].iter_mut().for_each(|less| *less -= all);
            (line[0], line[1 + count]) = (-once - all, 1.0);
        }
        for (((place, &(once, all)), part), line) in sent.iter().enumerate().zip(&*parts).zip(lines) {
            line[..=count].fill(-all * part);
            line[0] -= once;
            line[1 + place] += all;
            line[1 + count] = 1.0;
        }
    }

    /// How long a group computes at least with whole experts that are all equal: one by one, each goes to whom it makes compute least.
    fn whole_experts_compute(&mut self, of: &Devices, rates: f32) -> f32 {
        let Simplex { members, holders, counts, .. } = self;
        // So many each has time for in what they take with experts that can be cut, which is less.
        let mut left = of.experts();
        let mut longest: f32 = 0.0;
        let mut steps = [(f32::INFINITY, 0.0); MOST_DEVICES];
        let steps = &mut steps[..holders.len()];
        counts.clear();
        for (&i, (then, step)) in holders.iter().zip(&mut *steps) {
            *step = members.len() as f32 * of.compute[i] / of.experts() as f32;
            let count = ((1.0 / rates / *step + LITTLE) as usize).min(of.room[i]).min(left);
            left -= count;
            longest = larger(longest, count as f32 * *step);
            if count < of.room[i] {
                *then = (count + 1) as f32 * *step;
            }
            counts.push(count);
        }
        for _ in 0..left {
            let mut next = (f32::INFINITY, 0);
            for (place, &(then, _)) in steps.iter().enumerate() {
                if then < next.0 {
                    next = (then, place);
                }
            }
            let (count, (then, step)) = (&mut counts[next.1], &mut steps[next.1]);
            *count += 1;
            longest = larger(longest, next.0);
            *then = if *count < of.room[holders[next.1]] { (*count + 1) as f32 * *step } else { f32::INFINITY };
        }
        longest
    }

    /// Adds the constraint that the group computes for so long at least.
    fn compute_for(&mut self, least: f32) {
        if self.rows[0] >= least {
            return;
        }
        let exchange = 1 + self.holders.len();
        self.rows.extend_from_within(..self.stride);
        let end = self.rows.len() - self.stride;
        self.rows[end] -= least;
        self.rows[end + exchange] = 0.0;
        self.basic.push(Variable::Slack);
    }

    /// The row of the basic variable that is furthest below 0.
    fn most_broken(&self) -> Option<usize> {
        let constants = self.rows.iter().step_by(self.stride).enumerate().skip(1);
        let least =
            constants.fold((0, -LITTLE), |least, (row, &value)| if value < least.1 { (row, value) } else { least });
        (least.0 > 0).then_some(least.0)
    }

    /// The basic variable of a row becomes 0, and of the others the one basic for which the objective rises least; false if none can.
    fn step(&mut self, row: usize) -> bool {
        let (stride, mut enters) = (self.stride, (f32::INFINITY, 0, 0.0));
        let line = &self.rows[row * stride..][..stride];
        for (column, (&by, &cost)) in line.iter().zip(&self.rows).enumerate().take(1 + self.others.len()).skip(1) {
            if by > LITTLE {
                let ratio = larger(cost, 0.0) / by;
                if ratio < enters.0 || (ratio == enters.0 && by > enters.2) {
                    enters = (ratio, column, by);
                }
            }
        }
        let (_, column, by) = enters;
        if column == 0 {
            return false;
        }
        self.pivot.clear();
        self.pivot.extend(line.iter().map(|value| -value / by));
        self.pivot[column] = 1.0 / by;
        let (pivot, inverse) = (self.pivot.as_chunks::<LANES>().0, self.pivot[column]);
        for line in self.rows.chunks_exact_mut(stride) {
            let by = line[column];
            for (values, pivot) in line.as_chunks_mut::<LANES>().0.iter_mut().zip(pivot) {
                *values = std::array::from_fn(|k| values[k] + by * pivot[k]);
            }
            // Stored before, it would hold up the vector that is loaded over it.
            line[column] = by * inverse;
        }
        self.rows[row * stride..][..stride].copy_from_slice(&self.pivot);
        let (leaves, enters) = (&mut self.basic[row - 1], &mut self.others[column - 1]);
        for (variable, row) in [(&*leaves, 0), (&*enters, row)] {
            if let Variable::Share(place) = *variable {
                self.row_of[place] = row;
            }
        }
        std::mem::swap(leaves, enters);
        self.ops += self.rows.len() as u64 / LANES as u64;
        true
    }

    /// Adds the constraint of memory that is broken most, if any is.
    ///
    /// Any members together can have as many of the dearest experts as they have room for. With experts that could be cut that is all there is to it, as the
    /// dearest so many are concave in their number (these are the constraints of a polymatroid); and those that have most too much are of those with most
    /// for their room.
    fn cut(&mut self, of: &Devices) -> bool {
        let mut holders = [(0.0f32, 0usize); MOST_DEVICES];
        let holders = &mut holders[..self.holders.len()];
        for (place, holder) in holders.iter_mut().enumerate() {
            *holder = (self.share(self.row_of[place]) / of.room[self.holders[place]].max(1) as f32, place);
        }
        holders.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
        let (mut all, mut rooms, mut most) = (0.0, 0, (WITHOUT_ROOM, 0, 0.0));
        for (at, &(_, place)) in holders.iter().enumerate() {
            all += self.share(self.row_of[place]);
            rooms += of.room[self.holders[place]];
            if rooms >= of.experts() {
                break;
            }
            if all - of.dearest[rooms] > most.0 {
                most = (all - of.dearest[rooms], at + 1, of.dearest[rooms]);
            }
        }
        let (_, count, dearest) = most;
        if count == 0 {
            return false;
        }
        let end = self.rows.len();
        self.rows.resize(end + self.stride, 0.0);
        self.rows[end] = dearest;
        for &(_, place) in &holders[..count] {
            let row = self.row_of[place];
            if row > 0 {
                let (rows, cut) = self.rows.split_at_mut(end);
                cut.iter_mut().zip(&rows[row * self.stride..]).for_each(|(cut, share)| *cut -= share);
            } else if let Some(at) = self.others.iter().position(|other| *other == Variable::Share(place)) {
                self.rows[end + 1 + at] -= 1.0;
            }
        }
        self.basic.push(Variable::Slack);
        true
    }
}

#[cfg(test)]
mod tests {
    use microlp::{ComparisonOp, LinearExpr, OptimizationDirection, Problem, SolveOutcome};

    use super::*;
    use crate::random::Random;

    /// Of `n` devices, with experts of 1 to 3, and room for some or all.
    fn random_devices(n: usize, experts: usize, room: usize, random: &mut Random) -> Devices {
        let mut costs: Vec<f32> = (0..experts).map(|_| (1 + random.below(3)) as f32).collect();
        costs.sort_by(|a, b| b.total_cmp(a));
        let total: f32 = costs.iter().sum();
        let dearest = (0..=experts).map(|count| costs[..count].iter().sum::<f32>() / total).collect();
        let mut times = |count: usize, most: f32| -> Vec<f32> {
            (0..count).map(|_| most * 0.01 * (1 + random.below(100)) as f32).collect()
        };
        let (compute, mut alpha, mut beta) = (times(n, 1.0), times(n * n, 0.1), times(n * n, 2.0));
        for i in 0..n {
            (alpha[i * n + i], beta[i * n + i]) = (0.0, 0.0);
        }
        let room = (0..n).map(|_| 1 + random.below(room)).collect();
        Devices { n, compute, alpha, beta, room, dearest, whole: false }
    }

    /// Exchange and compute of a group with these shares, of devices that may hold experts or not.
    fn takes(of: &Devices, set: u64, holders: u64, share: &[f32]) -> f32 {
        let members: Vec<usize> = devices(set).collect();
        let (mut compute, mut exchange) = (0.0, 0.0);
        for &x in &members {
            compute = f32::max(compute, members.len() as f32 * of.compute[x] * share[x]);
            let sent = devices(holders).map(|c| of.alpha[x * of.n + c] + of.beta[x * of.n + c] * share[c]).sum();
            exchange = f32::max(exchange, sent);
            if holders >> x & 1 == 1 {
                let received = members.iter().map(|&y| of.alpha[y * of.n + x] + of.beta[y * of.n + x] * share[x]);
                exchange = exchange.max(received.sum());
            }
        }
        compute + exchange
    }

    /// The same programme with a constraint for every set of members, by a library; `None` where memory does not suffice. It computes at least for so long.
    fn by_library(of: &Devices, set: u64, holders: u64, computes: f32) -> Option<f32> {
        let (members, held): (Vec<usize>, Vec<usize>) = (devices(set).collect(), devices(holders).collect());
        let mut lp = Problem::new(OptimizationDirection::Minimize);
        let [compute, exchange] = [computes, 0.0].map(|least| lp.add_var(1.0, (f64::from(least), f64::INFINITY)));
        let share: Vec<_> = held.iter().map(|_| lp.add_var(0.0, (0.0, 1.0))).collect();
        lp.add_constraint(share.iter().map(|share| (*share, 1.0)).collect::<Vec<_>>(), ComparisonOp::Eq, 1.0);
        for (&c, &share) in held.iter().zip(&share) {
            let computes = f64::from(members.len() as f32 * of.compute[c]);
            lp.add_constraint([(share, computes), (compute, -1.0)], ComparisonOp::Le, 0.0);
            let [once, all] =
                [&of.alpha, &of.beta].map(|of_all| members.iter().map(|&y| f64::from(of_all[y * of.n + c])).sum());
            lp.add_constraint([(share, all), (exchange, -1.0)], ComparisonOp::Le, -once);
        }
        for &x in &members {
            let mut sent = LinearExpr::empty();
            sent.add(exchange, -1.0);
            held.iter().zip(&share).for_each(|(&c, &share)| sent.add(share, f64::from(of.beta[x * of.n + c])));
            let once: f64 = held.iter().map(|&c| f64::from(of.alpha[x * of.n + c])).sum();
            lp.add_constraint(sent, ComparisonOp::Le, -once);
        }
        for some in 1..1u64 << held.len() {
            let room: usize = devices(some).map(|place| of.room[held[place]]).sum();
            let most = f64::from(of.dearest[room.min(of.experts())]);
            let some: Vec<_> = devices(some).map(|place| (share[place], 1.0)).collect();
            lp.add_constraint(some, ComparisonOp::Le, most);
        }
        match lp.solve() {
            Ok(SolveOutcome::Solution(solution)) => Some(solution.objective() as f32),
            _ => None,
        }
    }

    #[test]
    fn shares_are_those_of_a_library() {
        let (mut random, mut simplex) = (Random(1), Simplex::default());
        let (mut solved, mut impossible, mut without) = (0, 0, 0);
        for case in 0..600 {
            let n = 1 + random.below(8);
            let experts = 1 + random.below(24);
            let room = if case % 2 == 0 { experts } else { 1 + 2 * experts / n };
            let of = random_devices(n, experts, room, &mut random);
            let set = (1 << n) - 1;
            let holders = if case % 3 == 0 { set } else { 1 + random.below(set as usize) as u64 };
            let least = simplex.least(&of, set, holders, IMPOSSIBLE);
            let Some(wanted) = by_library(&of, set, holders, 0.0) else {
                assert_eq!(least, IMPOSSIBLE, "case {case}");
                impossible += 1;
                continue;
            };
            assert!((least - wanted).abs() < 1e-3 * wanted, "case {case}: {least} {wanted}");
            let mut share = vec![0.0; n];
            simplex.shares().for_each(|(i, of)| share[i] = of);
            assert!((share.iter().sum::<f32>() - 1.0).abs() < 1e-3, "case {case}: {share:?}");
            let takes = takes(&of, set, holders, &share);
            assert!((least - takes).abs() < 1e-3 * takes, "case {case}: {least} {takes}");
            // The most that any have too much is that of members with most for their room, of which all sets are looked at here.
            for some in (1..=set).filter(|some| some & !holders == 0) {
                let rooms: usize = devices(some).map(|i| of.room[i]).sum();
                let too_much = devices(some).map(|i| share[i]).sum::<f32>() - of.dearest[rooms.min(experts)];
                assert!(too_much < 1e-3, "case {case}: {too_much} of {share:?}");
            }
            // What is more than that is known to be, and never said to be more than it is.
            let more = simplex.least(&of, set, holders, 0.9 * wanted);
            assert!(more > 0.9 * wanted && more < 1.001 * wanted, "case {case}: {more} {wanted}");
            let ample = Devices { room: vec![experts; n], ..of };
            without += u32::from(simplex.least(&ample, set, holders, IMPOSSIBLE) < 0.99 * wanted);
            solved += 1;
        }
        assert!(solved > 300 && impossible > 100 && without > 50, "{solved} {impossible} {without}");
    }

    /// The least that a group computes with `left` equal experts dealt out to these holders.
    fn dealt_out(of: &Devices, size: usize, holders: &[usize], left: usize) -> f32 {
        let Some((&c, others)) = holders.split_first() else { return if left == 0 { 0.0 } else { f32::INFINITY } };
        let computes = |count: usize| (size * count) as f32 * of.compute[c] / of.experts() as f32;
        let ways =
            (0..=left.min(of.room[c])).map(|count| computes(count).max(dealt_out(of, size, others, left - count)));
        ways.fold(f32::INFINITY, f32::min)
    }

    #[test]
    fn groups_compute_for_whole_experts() {
        let (mut random, mut simplex, mut longer) = (Random(2), Simplex::default(), 0);
        for case in 0..300 {
            let (n, experts) = (1 + random.below(5), 1 + random.below(9));
            let room = 1 + 2 * experts / n;
            let mut of = random_devices(n, experts, room, &mut random);
            of.dearest = (0..=experts).map(|count| count as f32 / experts as f32).collect();
            let holders: Vec<usize> = (0..n).filter(|i| *i == 0 || random.below(4) > 0).collect();
            let (set, may_hold) = ((1 << n) - 1, holders.iter().map(|i| 1 << i).sum());
            let cut = simplex.least(&of, set, may_hold, IMPOSSIBLE);
            of.whole = true;
            let least = simplex.least(&of, set, may_hold, IMPOSSIBLE);
            if cut == IMPOSSIBLE {
                assert_eq!(least, IMPOSSIBLE, "case {case}");
                continue;
            }
            let computes = dealt_out(&of, n, &holders, experts);
            let wanted = by_library(&of, set, may_hold, computes).unwrap();
            assert!((least - wanted).abs() < 1e-3 * wanted, "case {case}: {least} {wanted}");
            let mut share = vec![0.0; n];
            simplex.shares().for_each(|(i, of)| share[i] = of);
            assert!((share.iter().sum::<f32>() - 1.0).abs() < 1e-3, "case {case}: {share:?}");
            longer += u32::from(least > 1.01 * cut);
        }
        assert!(longer > 50, "{longer}");
    }
}
