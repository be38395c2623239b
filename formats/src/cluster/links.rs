//! The links of a cluster, as matrices or as tiers.

/// Latency and inverse bandwidth of an ordered pair of devices.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// Latency, ms.
    pub alpha_ms: f64,
    /// Inverse bandwidth, ms per MB.
    pub beta_ms_per_mb: f64,
}

impl Link {
    /// Time to move `mb` megabytes, ms.
    pub fn time_ms(self, mb: f64) -> f64 {
        self.alpha_ms + self.beta_ms_per_mb * mb
    }
}

/// Queries on links, for both representations.
pub trait LinkTable: Sync {
    /// Number of devices.
    fn len(&self) -> usize;

    /// Whether there are no devices.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The link from device `i` to another device `j`.
    fn link(&self, i: usize, j: usize) -> Link;

    /// The link to device `i` from device `j`: equals `link(j, i)`, but is contiguous in memory for one `i` and many `j`.
    #[inline]
    fn link_to(&self, i: usize, j: usize) -> Link {
        self.link(j, i)
    }

    /// A spanning tree of the slowest links, slowest first, by their time to move `mb` megabytes; for a pair of devices the slower
    /// direction counts.
    ///
    /// For any grouping, the slowest link between two groups is in this tree: the tree's path between the ends of that link has no faster
    /// edge, and leaves the group of one end somewhere.
    fn slowest_tree(&self, mb: f64) -> Vec<Edge>;

    /// The slowest link between devices of different groups; devices in the group `none` are ignored.
    fn slowest_between(&self, group_of: &[u32], none: u32, mb: f64) -> Option<Edge> {
        let n = self.len();
        let mut slowest: Option<Edge> = None;
        for i in (0..n).filter(|&i| group_of[i] != none) {
            for j in (i + 1..n).filter(|&j| group_of[j] != none && group_of[j] != group_of[i]) {
                let edge = self.edge(i, j, mb);
                if slowest.is_none_or(|s| edge.slowness > s.slowness) {
                    slowest = Some(edge);
                }
            }
        }
        slowest
    }

    /// The slower of the two links between devices `i` and `j`.
    fn edge(&self, i: usize, j: usize, mb: f64) -> Edge {
        let (out, back) = (self.link(i, j), self.link(j, i));
        let (out, back) = ((Slowness::of(out, mb), out), (Slowness::of(back, mb), back));
        let (slowness, link) = if back.0 > out.0 { back } else { out };
        Edge { i: i as u32, j: j as u32, link, slowness }
    }

    /// The slower link of every pair, slowest first.
    fn pairs(&self, mb: f64) -> Vec<Edge> {
        let n = self.len();
        let mut pairs: Vec<Edge> =
            (0..n).flat_map(|i| (i + 1..n).map(move |j| (i, j))).map(|(i, j)| self.edge(i, j, mb)).collect();
        sort_slowest_first(&mut pairs);
        pairs
    }

    /// Approximate number of links that [`LinkTable::sums`] reads for a group of `size`.
    fn sums_cost(&self, size: usize) -> u64 {
        (size as u64) * (size as u64)
    }

    /// An order of the devices in which close devices are adjacent, by the time to move `mb` megabytes.
    ///
    /// Each with the round-trip time to the nearest earlier device: devices that are joined by links up to some time are consecutive, and
    /// the first of them has a larger time (Gower and Ross 1969, on single linkage by Prim's algorithm).
    fn near_order(&self, mb: f64) -> Vec<(u32, f64)>;

    /// For each member of a group (ascending), the sums of alpha and of beta to all other members.
    fn sums(&self, members: &[u32]) -> Vec<(f64, f64)>;

    /// The result is bitwise independent of the order of the members.
    fn exact_sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        self.sums(members)
    }

    /// For each member of a group (ascending), the sums of alpha and of beta from all other members.
    fn received_sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        let of = |&j: &u32| {
            let others = members.iter().filter(|&&i| i != j);
            others.fold((0.0, 0.0), |(alpha, beta), &i| {
                let link = self.link_to(j as usize, i as usize);
                (alpha + link.alpha_ms, beta + link.beta_ms_per_mb)
            })
        };
        members.iter().map(of).collect()
    }

    /// For each member of a group (ascending), the longer of sending and receiving, ms, if every other member sends `mb` to each member;
    /// members with `None` receive no data.
    fn exchanges(&self, members: &[u32], mb: &[Option<f64>]) -> Vec<f64> {
        let mut sent = vec![0.0; members.len()];
        let mut received = vec![0.0; members.len()];
        for ((&j, mb), received) in members.iter().zip(mb).zip(&mut received) {
            let Some(mb) = *mb else { continue };
            for (&i, sent) in members.iter().zip(&mut sent).filter(|(i, _)| **i != j) {
                let ms = self.link_to(j as usize, i as usize).time_ms(mb);
                *sent += ms;
                *received += ms;
            }
        }
        sent.into_iter().zip(received).map(|(sent, received)| f64::max(sent, received)).collect()
    }
}

/// Alpha and beta of every ordered pair; the diagonal is ignored. Stored by row and by column, as the planner reads both.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    n: usize,
    alpha: Vec<f64>,
    beta: Vec<f64>,
    by_column: Vec<Link>,
}

impl Matrix {
    /// Links from two matrices of `n` rows of `n` each.
    ///
    /// # Panics
    /// If their sizes differ.
    pub fn new(n: usize, mut alpha: Vec<f64>, mut beta: Vec<f64>) -> Matrix {
        assert!(alpha.len() == n * n && beta.len() == n * n, "matrices of {n} rows of {n}");
        for i in 0..n {
            alpha[i * n + i] = 0.0;
            beta[i * n + i] = 0.0;
        }
        let by_column = transposed(n, &alpha, &beta);
        Matrix { n, alpha, beta, by_column }
    }

    /// Expands the links to a matrix.
    pub fn from_table(table: &impl LinkTable) -> Matrix {
        let n = table.len();
        let (mut alpha, mut beta) = (vec![0.0; n * n], vec![0.0; n * n]);
        for i in 0..n {
            for j in (0..n).filter(|&j| j != i) {
                let link = table.link(i, j);
                alpha[i * n + j] = link.alpha_ms;
                beta[i * n + j] = link.beta_ms_per_mb;
            }
        }
        Matrix::new(n, alpha, beta)
    }

    /// Row `i` of alpha; its diagonal is 0.
    pub fn alpha_row(&self, i: usize) -> &[f64] {
        &self.alpha[i * self.n..(i + 1) * self.n]
    }

    /// Row `i` of beta; its diagonal is 0.
    pub fn beta_row(&self, i: usize) -> &[f64] {
        &self.beta[i * self.n..(i + 1) * self.n]
    }

    /// Column `i`: the links to device `i`; its diagonal is 0.
    pub fn column(&self, i: usize) -> &[Link] {
        &self.by_column[i * self.n..(i + 1) * self.n]
    }
}

/// Neumaier's compensated sum (1974).
fn exact_sum(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0);
    for x in values {
        let next = sum + x;
        lost += if sum >= x { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    sum + lost
}

/// Transposes an `n` x `n` matrix, in blocks, so that both sides stay in cache.
fn transposed(n: usize, alpha: &[f64], beta: &[f64]) -> Vec<Link> {
    const BLOCK: usize = 16;
    let mut columns = vec![Link::default(); n * n];
    for i0 in (0..n).step_by(BLOCK) {
        for j0 in (0..n).step_by(BLOCK) {
            for i in i0..n.min(i0 + BLOCK) {
                for j in j0..n.min(j0 + BLOCK) {
                    columns[j * n + i] = Link { alpha_ms: alpha[i * n + j], beta_ms_per_mb: beta[i * n + j] };
                }
            }
        }
    }
    columns
}

/// An edge of a spanning tree.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Edge {
    /// One end.
    pub i: u32,
    /// The other.
    pub j: u32,
    /// The slower of the two links.
    pub link: Link,
    /// Its slowness for the caller's size.
    pub slowness: Slowness,
}

/// Slowness of a link: time, then latency.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Slowness(pub f64, pub f64);

impl Slowness {
    /// For the time to move `mb` megabytes.
    pub fn of(link: Link, mb: f64) -> Slowness {
        Slowness(link.time_ms(mb), link.alpha_ms)
    }
}

impl LinkTable for Matrix {
    fn len(&self) -> usize {
        self.n
    }

    fn exact_sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        let sum = |row: &[f64]| exact_sum(members.iter().map(|&j| row[j as usize]));
        members.iter().map(|&i| (sum(self.alpha_row(i as usize)), sum(self.beta_row(i as usize)))).collect()
    }

    #[inline]
    fn link(&self, i: usize, j: usize) -> Link {
        Link { alpha_ms: self.alpha[i * self.n + j], beta_ms_per_mb: self.beta[i * self.n + j] }
    }

    #[inline]
    fn link_to(&self, i: usize, j: usize) -> Link {
        self.by_column[i * self.n + j]
    }

    fn slowest_tree(&self, mb: f64) -> Vec<Edge> {
        // Prim's algorithm, O(n^2).
        let n = self.n;
        let mut best = vec![(Slowness(f64::NEG_INFINITY, 0.0), 0u32); n];
        let mut left: Vec<u32> = (1..n as u32).collect();
        let mut last = 0;
        let mut tree = Vec::with_capacity(n.saturating_sub(1));
        while !left.is_empty() {
            let (to, to_beta, from) = (self.alpha_row(last), self.beta_row(last), self.column(last));
            let mut next = (Slowness(f64::NEG_INFINITY, 0.0), 0);
            for (place, &j) in left.iter().enumerate() {
                let j = j as usize;
                let out = Slowness(to[j] + to_beta[j] * mb, to[j]);
                let back = Slowness::of(from[j], mb);
                let here = if back > out { back } else { out };
                if here > best[j].0 {
                    best[j] = (here, last as u32);
                }
                if best[j].0 > next.0 {
                    next = (best[j].0, place);
                }
            }
            let j = left.swap_remove(next.1);
            tree.push(self.edge(best[j as usize].1 as usize, j as usize, mb));
            last = j as usize;
        }
        sort_slowest_first(&mut tree);
        tree
    }

    fn near_order(&self, mb: f64) -> Vec<(u32, f64)> {
        // The order in which Prim's algorithm reaches the devices over the fastest links.
        let n = self.n;
        let mut best = vec![f64::INFINITY; n];
        let mut left: Vec<u32> = (1..n as u32).collect();
        let mut order = Vec::with_capacity(n);
        let mut last = 0;
        order.extend((n > 0).then_some((0, 0.0)));
        while !left.is_empty() {
            let (to, to_beta, from) = (self.alpha_row(last), self.beta_row(last), self.column(last));
            let mut next = (f64::INFINITY, 0);
            for (place, &j) in left.iter().enumerate() {
                let j = j as usize;
                let both = to[j] + from[j].alpha_ms + (to_beta[j] + from[j].beta_ms_per_mb) * mb;
                best[j] = best[j].min(both);
                // Ties go to the lower index, which keeps blocks in order.
                if best[j] < next.0 || (best[j] == next.0 && j < left[next.1] as usize) {
                    next = (best[j], place);
                }
            }
            last = left.swap_remove(next.1) as usize;
            order.push((last as u32, next.0));
        }
        order
    }

    fn exchanges(&self, members: &[u32], mb: &[Option<f64>]) -> Vec<f64> {
        let mut sent = vec![0.0; members.len()];
        let mut received = vec![0.0; members.len()];
        let holders: Vec<(usize, &[Link], f64)> = members
            .iter()
            .zip(mb)
            .enumerate()
            .filter_map(|(place, (&j, mb))| mb.map(|mb| (place, self.column(j as usize), mb)))
            .collect();
        // Sums of several receivers are interleaved, as each sum is a dependency chain. The diagonal is 0.
        let (several, others) = holders.as_chunks::<4>();
        for receivers in several {
            let mut sums = [0.0; 4];
            for (&i, sent) in members.iter().zip(&mut sent) {
                for ((_, from, mb), sum) in receivers.iter().zip(&mut sums) {
                    let ms = from[i as usize].time_ms(*mb);
                    *sent += ms;
                    *sum += ms;
                }
            }
            receivers.iter().zip(sums).for_each(|((place, ..), sum)| received[*place] = sum);
        }
        for (place, from, mb) in others {
            for (&i, sent) in members.iter().zip(&mut sent) {
                let ms = from[i as usize].time_ms(*mb);
                *sent += ms;
                received[*place] += ms;
            }
        }
        sent.into_iter().zip(received).map(|(sent, received)| f64::max(sent, received)).collect()
    }

    fn sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        let whole = members.len() == self.n;
        let sum = |row: &[f64]| -> f64 {
            // The diagonal is 0, so the sum over all members equals the sum over the others.
            if whole { row.iter().sum() } else { members.iter().map(|&j| row[j as usize]).sum() }
        };
        members.iter().map(|&i| (sum(self.alpha_row(i as usize)), sum(self.beta_row(i as usize)))).collect()
    }
}

/// A tier: blocks of `size` consecutive devices, and the links between devices of a block that share no smaller block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tier {
    /// Devices in a block.
    pub size: usize,
    /// The links.
    pub link: Link,
}

/// An invalid tier size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("tier {index}: expected {expected}")]
pub struct TiersError {
    /// Index of the tier.
    pub index: usize,
    /// The values allowed.
    pub expected: String,
}

/// Nested blocks, inner first.
#[derive(Clone, Debug, PartialEq)]
pub struct Tiers {
    n: usize,
    tiers: Vec<Tier>,
}

impl Tiers {
    /// `n` devices in nested blocks.
    ///
    /// # Errors
    /// Returns the first tier with an invalid size: each size is a larger multiple of the one before, a size below `n` divides `n`, and the
    /// last is at least `n`.
    pub fn new(n: usize, tiers: Vec<Tier>) -> Result<Tiers, TiersError> {
        let wrong = |index: usize, expected: String| Err(TiersError { index, expected });
        let mut inner = 1;
        for (index, tier) in tiers.iter().enumerate() {
            let size = tier.size;
            if size == 0 || !size.is_multiple_of(inner) || (index > 0 && size == inner) {
                let larger = if index > 0 { "a larger multiple" } else { "a multiple" };
                return wrong(index, format!("{larger} of {inner}, the size of the tier inside"));
            }
            if size < n && !n.is_multiple_of(size) {
                return wrong(index, format!("a size that divides {n}, the number of devices"));
            }
            inner = size;
        }
        match tiers.last() {
            Some(last) if last.size < n => {
                wrong(tiers.len() - 1, format!("the outermost tier to hold all {n} devices"))
            }
            None if n > 1 => wrong(0, format!("a tier that holds all {n} devices")),
            _ => Ok(Tiers { n, tiers }),
        }
    }

    /// The tiers, inner first.
    pub fn tiers(&self) -> &[Tier] {
        &self.tiers
    }

    /// Number of peers of a device in each tier; the same for every device, as sizes divide each other.
    pub fn peers(&self) -> Vec<usize> {
        let mut inside = 1;
        let met = |tier: &Tier| {
            let size = tier.size.min(self.n).max(1);
            size - std::mem::replace(&mut inside, size)
        };
        self.tiers.iter().map(met).collect()
    }
}

impl LinkTable for Tiers {
    fn len(&self) -> usize {
        self.n
    }

    #[inline]
    fn link(&self, i: usize, j: usize) -> Link {
        let shared = self.tiers.iter().find(|tier| i / tier.size == j / tier.size);
        shared.map_or_else(Link::default, |tier| tier.link)
    }

    fn slowest_tree(&self, mb: f64) -> Vec<Edge> {
        // Kruskal's algorithm, a tier at a time. A block's links of its own tier connect all its devices, as soon as two
        // smaller blocks are in it: a star from the first device to all outside its smaller block, and one from the second
        // block's first device back to the first block.
        let n = self.n;
        let mut order: Vec<usize> = (0..self.tiers.len()).collect();
        let slowness = |tier: usize| Slowness::of(self.tiers[tier].link, mb);
        order.sort_by(|&a, &b| slowness(b).partial_cmp(&slowness(a)).expect("finite"));
        let mut parent: Vec<u32> = (0..n as u32).collect();
        let mut tree = Vec::with_capacity(n.saturating_sub(1));
        for tier in order {
            let size = self.tiers[tier].size;
            let inner = if tier == 0 { 1 } else { self.tiers[tier - 1].size };
            for start in (0..n).step_by(size) {
                let end = n.min(start.saturating_add(size));
                let second = start.saturating_add(inner);
                if second >= end {
                    continue;
                }
                let star = (second..end).map(|j| (start, j)).chain((start + 1..second).map(|j| (second, j)));
                for (i, j) in star {
                    let (a, b) = (find(&mut parent, i as u32), find(&mut parent, j as u32));
                    if a != b {
                        parent[a.max(b) as usize] = a.min(b);
                        let link = self.tiers[tier].link;
                        tree.push(Edge { i: i as u32, j: j as u32, link, slowness: slowness(tier) });
                    }
                }
            }
        }
        tree
    }

    fn slowest_between(&self, group_of: &[u32], none: u32, mb: f64) -> Option<Edge> {
        let n = self.n;
        let mut order: Vec<usize> = (0..self.tiers.len()).collect();
        let slowness = |tier: usize| Slowness::of(self.tiers[tier].link, mb);
        order.sort_by(|&a, &b| slowness(b).partial_cmp(&slowness(a)).expect("finite"));
        for tier in order {
            let inner = if tier == 0 { 1 } else { self.tiers[tier - 1].size };
            for start in (0..n).step_by(self.tiers[tier].size) {
                let block = start..n.min(start.saturating_add(self.tiers[tier].size));
                // Two groups and two smaller blocks in one block: some two devices differ in both.
                let mut some = block.filter(|&i| group_of[i] != none);
                let Some(first) = some.next() else { continue };
                let (mut group, mut place) = (None, None);
                for i in some {
                    group = group.or_else(|| (group_of[i] != group_of[first]).then_some(i));
                    place = place.or_else(|| (i / inner != first / inner).then_some(i));
                    let (Some(a), Some(b)) = (group, place) else { continue };
                    let apart = |i: usize, j: usize| group_of[i] != group_of[j] && i / inner != j / inner;
                    let pair = [(first, a), (first, b), (a, b)].into_iter().find(|&(i, j)| apart(i, j));
                    let (i, j) =
                        pair.expect("b is outside the block of first; one of first and a is in another group than b");
                    return Some(self.edge(i, j, mb));
                }
            }
        }
        None
    }

    fn sums_cost(&self, size: usize) -> u64 {
        (size * self.tiers.len()) as u64
    }

    fn near_order(&self, mb: f64) -> Vec<(u32, f64)> {
        // The distance of the first device of a block to earlier devices is that of the smallest block around both.
        (0..self.n as u32)
            .map(|i| (i, if i == 0 { 0.0 } else { 2.0 * self.link(i as usize, i as usize - 1).time_ms(mb) }))
            .collect()
    }

    fn sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        let mut sums = vec![(0.0, 0.0); members.len()];
        // Number of members, itself included, in a member's block of the inner tier.
        let mut inside = vec![1usize; members.len()];
        for tier in &self.tiers {
            let size = tier.size as u64;
            let mut start = 0;
            while start < members.len() {
                let block = u64::from(members[start]) / size;
                let end = start + members[start..].partition_point(|&m| u64::from(m) / size == block);
                for (sum, inner) in sums[start..end].iter_mut().zip(&mut inside[start..end]) {
                    let here = (end - start - *inner) as f64;
                    sum.0 += here * tier.link.alpha_ms;
                    sum.1 += here * tier.link.beta_ms_per_mb;
                    *inner = end - start;
                }
                start = end;
            }
        }
        sums
    }

    fn received_sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        // Links are symmetric.
        self.sums(members)
    }

    fn exchanges(&self, members: &[u32], mb: &[Option<f64>]) -> Vec<f64> {
        let sums = self.sums(members);
        let receive = |((alpha, beta), mb): (&(f64, f64), &Option<f64>)| mb.map_or(0.0, |mb| alpha + beta * mb);
        let received: Vec<f64> = sums.iter().zip(mb).map(receive).collect();
        let mut sent = vec![0.0; members.len()];
        // By member: number and MB of the receivers in its block of the inner tier, itself included.
        let own = |mb: &Option<f64>| (usize::from(mb.is_some()), mb.unwrap_or(0.0));
        let mut inside: Vec<(usize, f64)> = mb.iter().map(own).collect();
        for tier in &self.tiers {
            let size = tier.size as u64;
            let mut start = 0;
            while start < members.len() {
                let block = u64::from(members[start]) / size;
                let end = start + members[start..].partition_point(|&m| u64::from(m) / size == block);
                let count = mb[start..end].iter().flatten().count();
                let sum: f64 = mb[start..end].iter().flatten().sum();
                for (sent, inner) in sent[start..end].iter_mut().zip(&mut inside[start..end]) {
                    let (alpha, beta) = (tier.link.alpha_ms, tier.link.beta_ms_per_mb);
                    // No receivers in this tier: add exactly 0.
                    if count > inner.0 {
                        *sent += (count - inner.0) as f64 * alpha + (sum - inner.1).max(0.0) * beta;
                    }
                    *inner = (count, sum);
                }
                start = end;
            }
        }
        sent.into_iter().zip(received).map(|(sent, received)| f64::max(sent, received)).collect()
    }
}

fn sort_slowest_first(tree: &mut [Edge]) {
    tree.sort_by(|a, b| b.slowness.partial_cmp(&a.slowness).expect("finite"));
}

/// The root of `i`'s set; halves the path to it.
fn find(parent: &mut [u32], mut i: u32) -> u32 {
    while parent[i as usize] != i {
        parent[i as usize] = parent[parent[i as usize] as usize];
        i = parent[i as usize];
    }
    i
}

/// The links of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub enum Links {
    /// Matrices.
    Matrix(Matrix),
    /// Nested blocks.
    Tiers(Tiers),
}

/// Calls a method of either table.
macro_rules! delegate {
    ($links:expr, $method:ident($($argument:expr),*)) => {
        match $links {
            Links::Matrix(matrix) => matrix.$method($($argument),*),
            Links::Tiers(tiers) => tiers.$method($($argument),*),
        }
    };
}

impl LinkTable for Links {
    fn len(&self) -> usize {
        delegate!(self, len())
    }

    fn exact_sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        delegate!(self, exact_sums(members))
    }

    #[inline]
    fn link(&self, i: usize, j: usize) -> Link {
        delegate!(self, link(i, j))
    }

    fn slowest_tree(&self, mb: f64) -> Vec<Edge> {
        delegate!(self, slowest_tree(mb))
    }

    fn slowest_between(&self, group_of: &[u32], none: u32, mb: f64) -> Option<Edge> {
        delegate!(self, slowest_between(group_of, none, mb))
    }

    fn sums_cost(&self, size: usize) -> u64 {
        delegate!(self, sums_cost(size))
    }

    fn near_order(&self, mb: f64) -> Vec<(u32, f64)> {
        delegate!(self, near_order(mb))
    }

    fn sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        delegate!(self, sums(members))
    }

    fn received_sums(&self, members: &[u32]) -> Vec<(f64, f64)> {
        delegate!(self, received_sums(members))
    }

    fn exchanges(&self, members: &[u32], mb: &[Option<f64>]) -> Vec<f64> {
        delegate!(self, exchanges(members, mb))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tier(size: usize, alpha_ms: f64, beta_ms_per_mb: f64) -> Tier {
        Tier { size, link: Link { alpha_ms, beta_ms_per_mb } }
    }

    #[test]
    fn tiers_are_the_matrix_they_stand_for() {
        for (n, sizes) in [(12, &[2, 4, 12][..]), (8, &[4, 16]), (1, &[1]), (6, &[1, 3, 6]), (2, &[64])] {
            let tiers = sizes.iter().enumerate().map(|(l, &s)| tier(s, 0.25 * (l + 1) as f64, 2.0 - l as f64 * 0.5));
            let tiers = Tiers::new(n, tiers.collect()).unwrap();
            let matrix = Matrix::from_table(&tiers);
            for members in [(0..n as u32).collect::<Vec<_>>(), (0..n as u32).step_by(3).collect(), vec![n as u32 - 1]] {
                assert_eq!(tiers.sums(&members), matrix.sums(&members), "{n} {sizes:?} {members:?}");
                assert_eq!(tiers.received_sums(&members), matrix.received_sums(&members), "{n} {sizes:?} {members:?}");
                let mb: Vec<_> = members.iter().map(|m| (m % 3 != 1).then_some(f64::from(m % 5) * 0.25)).collect();
                assert_eq!(tiers.exchanges(&members, &mb), matrix.exchanges(&members, &mb), "{n} {sizes:?} {mb:?}");
            }
            for mb in [0.0, 0.1, 1.0, 100.0] {
                let slownesses = |tree: Vec<Edge>| tree.into_iter().map(|edge| edge.slowness).collect::<Vec<_>>();
                assert_eq!(
                    slownesses(tiers.slowest_tree(mb)),
                    slownesses(matrix.slowest_tree(mb)),
                    "{n} {sizes:?} {mb}"
                );
            }
            assert_eq!(tiers.peers().iter().sum::<usize>(), n - 1, "{n} {sizes:?}");
        }
    }

    #[test]
    fn tiers_that_do_not_nest_are_refused() {
        let refused = |n, sizes: &[usize], index, what: &str| {
            let error = Tiers::new(n, sizes.iter().map(|&s| tier(s, 1.0, 1.0)).collect()).unwrap_err();
            assert!(error.index == index && error.expected.contains(what), "{sizes:?}: {error:?}");
        };
        refused(16, &[3, 16], 0, "divides 16");
        refused(16, &[8, 12], 1, "multiple of 8");
        refused(16, &[4, 4, 16], 1, "larger multiple of 4");
        refused(16, &[0, 16], 0, "multiple");
        refused(16, &[4, 8], 1, "all 16");
        refused(10, &[4, 16], 0, "divides 10");
        refused(2, &[], 0, "all 2");
    }
}
