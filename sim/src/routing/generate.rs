//! Synthetic routing of a given skew.

use aristos_formats::InputError;
use aristos_formats::routing::{CHOICES_MOST, EXPERTS_MOST, NODES_MOST, Record, Routing};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Maximum number of draws for one choice. If each gives an expert that the token has already, the choice is drawn from an enumeration of
/// the remaining experts.
const DRAWS_MOST: usize = 16;

/// Maximum number of records, layers times steps. More records would take longer than some seconds, even with few tokens.
const RECORDS_MOST: usize = 1 << 18;

/// The distribution of the experts' popularity.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Popularity {
    /// A fraction of the experts (rounded, at least one) are hot and share a fraction of the probability equally. The other experts share
    /// the rest equally.
    Hot {
        /// Fraction of the experts that are hot.
        ratio: f64,
        /// Fraction of the probability that the hot experts share.
        weight: f64,
    },
    /// The probability of expert e is proportional to (e + 1)^-s.
    Zipf {
        /// The exponent s, at least 0.
        exponent: f64,
    },
    /// Not random: the first node's experts, which are in blocks on the nodes, get this many times the mean of the nodes, to one token. All other nodes get
    /// equal parts of the rest, and all experts of a node equal parts of its choices. 1 is balanced routing.
    Imbalance {
        /// Choices of the first node's experts over the mean, at least 1.
        max_over_mean: f64,
    },
}

/// The routing to generate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Experts of a layer.
    pub experts: usize,
    /// Tokens of a step; token t starts at node t mod `nodes`.
    pub tokens: usize,
    /// Experts of a token.
    pub top_k: usize,
    /// Nodes.
    pub nodes: usize,
    /// The distribution of popularity; low-numbered experts are the popular ones.
    pub popularity: Popularity,
    /// Layers.
    pub layers: usize,
    /// Steps.
    pub steps: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Workload {
    /// Draws the routing: `top_k` experts for each token, one after the other by their probabilities, without replacement.
    ///
    /// # Errors
    /// Returns an error that names the field, its value and the values allowed.
    pub fn routing(&self) -> Result<Routing, InputError> {
        let mut cumulative = self.probabilities()?;
        let ends = match self.popularity {
            Popularity::Imbalance { max_over_mean } => Some(self.ends(max_over_mean)?),
            _ => None,
        };
        let mut sum = 0.0;
        for probability in &mut cumulative {
            sum += *probability;
            *probability = sum;
        }
        let tokens = |node: usize| self.tokens / self.nodes + usize::from(node < self.tokens % self.nodes);
        let tokens_per_node: Vec<usize> = (0..self.nodes).map(tokens).collect();
        let mut records = Vec::with_capacity(self.layers * self.steps);
        for step in 0..self.steps as u64 {
            for layer in 0..self.layers as u64 {
                let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
                rng.set_stream(step * self.layers as u64 + layer);
                let mut choices = Vec::with_capacity(self.tokens * self.top_k);
                match &ends {
                    Some(ends) => self.spread(ends, &mut choices),
                    None => (0..self.tokens).for_each(|_| draw(&mut rng, &cumulative, self.top_k, &mut choices)),
                }
                records.push(Record { layer, step, tokens_per_node: tokens_per_node.clone(), choices });
            }
        }
        Ok(Routing::new(self.experts, self.top_k, self.nodes, records))
    }

    /// With [`Popularity::Imbalance`]: the choices of each node's experts, added up.
    fn ends(&self, max_over_mean: f64) -> Result<Vec<usize>, InputError> {
        let (all, nodes) = (self.tokens * self.top_k, self.nodes);
        let wrong = |found: String, expected: String| Err(InputError::value("`imbalance`", found, expected));
        if !self.experts.is_multiple_of(nodes) {
            let expected = format!("a divisor of the {} experts, which are in blocks on them", self.experts);
            return Err(InputError::value("`nodes`", format!("is {nodes}"), expected));
        }
        // A token has each expert at most once.
        let most = (self.tokens * self.top_k.min(self.experts / nodes)) as f64 * nodes as f64 / all as f64;
        if !(1.0..=most).contains(&max_over_mean) {
            return wrong(
                format!("is {max_over_mean}"),
                format!("1 to {most}, all tokens to the first node's experts"),
            );
        }
        let first = ((max_over_mean * all as f64 / nodes as f64).round() as usize).max(all.div_ceil(nodes));
        let others = (nodes - 1).max(1);
        let end = |node: usize| first + (all - first) / others * node + node.min((all - first) % others);
        Ok((0..nodes).map(end).collect())
    }

    /// Spreads the tokens' choices evenly over the nodes: token t has `(end + t) / tokens`, rounded down, less the same of the node before. By Hermite's
    /// identity the sums over the tokens are exact. A node's experts are used in turn.
    fn spread(&self, ends: &[usize], choices: &mut Vec<u32>) {
        let of_node = self.experts / self.nodes;
        let mut next = vec![0; self.nodes];
        for token in 0..self.tokens {
            let mut before = token / self.tokens;
            for (node, end) in ends.iter().enumerate() {
                let until = (end + token) / self.tokens;
                for _ in before..until {
                    choices.push((node * of_node + next[node]) as u32);
                    next[node] = (next[node] + 1) % of_node;
                }
                before = until;
            }
        }
    }

    /// The probability of each expert, up to a factor.
    fn probabilities(&self) -> Result<Vec<f64>, InputError> {
        let wrong = |field: &str, found: String, expected: String| {
            Err(InputError::value(format!("`{field}`"), found, expected))
        };
        for (field, value, most) in [
            ("experts", self.experts, EXPERTS_MOST as usize),
            ("tokens", self.tokens, CHOICES_MOST),
            ("top_k", self.top_k, self.experts),
            ("nodes", self.nodes, NODES_MOST),
            ("layers", self.layers, CHOICES_MOST),
            ("steps", self.steps, CHOICES_MOST),
        ] {
            if !(1..=most).contains(&value) {
                return wrong(field, format!("is {value}"), format!("1 to {most}"));
            }
        }
        if self.layers.saturating_mul(self.steps) > RECORDS_MOST {
            let (field, value) = if self.layers > self.steps { ("layers", self.layers) } else { ("steps", self.steps) };
            return wrong(
                field,
                format!("is {value}"),
                format!("at most {RECORDS_MOST} records, one a layer and step"),
            );
        }
        let all = [self.top_k, self.layers, self.steps].iter().fold(self.tokens, |all, n| all.saturating_mul(*n));
        if all > CHOICES_MOST {
            let found = format!("is {}", self.tokens);
            let expected = format!("at most {CHOICES_MOST} choices over all tokens, layers and steps");
            return wrong("tokens", found, expected);
        }
        match self.popularity {
            Popularity::Hot { ratio, weight } => {
                for (field, value) in [("hot_ratio", ratio), ("hot_weight", weight)] {
                    if !(0.0..=1.0).contains(&value) {
                        return wrong(field, format!("is {value}"), "a number from 0 to 1".to_string());
                    }
                }
                let hot = ((self.experts as f64 * ratio).round() as usize).max(1);
                let others = self.experts - hot;
                // If hot experts have no probability or all of it, only the others or only the hot ones can be drawn.
                let possible = if weight == 0.0 {
                    others
                } else if weight == 1.0 {
                    hot
                } else {
                    self.experts
                };
                if others > 0 && possible < self.top_k {
                    let expected = format!("a share that leaves {} experts to draw from, not {possible}", self.top_k);
                    return wrong("hot_weight", format!("is {weight}"), expected);
                }
                let probability = |expert: usize| match expert < hot {
                    _ if others == 0 => 1.0,
                    true => weight / hot as f64,
                    false => (1.0 - weight) / others as f64,
                };
                Ok((0..self.experts).map(probability).collect())
            }
            Popularity::Zipf { exponent } => {
                if !(0.0..=20.0).contains(&exponent) {
                    return wrong("zipf", format!("is {exponent}"), "a number from 0 to 20".to_string());
                }
                Ok((1..=self.experts).map(|rank| (rank as f64).powf(-exponent)).collect())
            }
            Popularity::Imbalance { .. } => Ok(vec![1.0; self.experts]),
        }
    }
}

/// Draws the experts of one token.
pub(super) fn draw(rng: &mut ChaCha8Rng, cumulative: &[f64], top_k: usize, choices: &mut Vec<u32>) {
    let from = choices.len();
    let sum = cumulative[cumulative.len() - 1];
    let probability = |e: usize| cumulative[e] - if e == 0 { 0.0 } else { cumulative[e - 1] };
    for _ in 0..top_k {
        // Draws from the remaining experts by rejecting those that the token has already.
        let fresh = (0..DRAWS_MOST).find_map(|_| {
            let point = rng.random::<f64>() * sum;
            let expert = cumulative.partition_point(|&end| end <= point).min(cumulative.len() - 1);
            (probability(expert) > 0.0 && !choices[from..].contains(&(expert as u32))).then_some(expert)
        });
        let expert = fresh.unwrap_or_else(|| {
            let left = |expert: &usize| !choices[from..].contains(&(*expert as u32));
            let total: f64 = (0..cumulative.len()).filter(left).map(probability).sum();
            let mut point = rng.random::<f64>() * total;
            let mut last = 0;
            for expert in (0..cumulative.len()).filter(left).filter(|e| probability(*e) > 0.0 || total == 0.0) {
                last = expert;
                point -= probability(expert);
                if point < 0.0 {
                    break;
                }
            }
            last
        });
        choices.push(expert as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Workload {
        Workload {
            experts: 16,
            tokens: 4003,
            top_k: 2,
            nodes: 4,
            popularity: Popularity::Hot { ratio: 0.25, weight: 0.8 },
            layers: 2,
            steps: 2,
            seed: 5,
        }
    }

    /// For each expert, the probability that a token with two choices has it: the sum over all ordered pairs of draws.
    fn of_two(probabilities: &[f64]) -> Vec<f64> {
        let sum: f64 = probabilities.iter().sum();
        let mut of = vec![0.0; probabilities.len()];
        for (a, p) in probabilities.iter().map(|p| p / sum).enumerate() {
            for (b, q) in probabilities.iter().map(|q| q / sum).enumerate().filter(|(b, _)| *b != a) {
                let both = p * q / (1.0 - p);
                of[a] += both;
                of[b] += both;
            }
        }
        of
    }

    #[test]
    fn shares_match_draws_without_replacement() {
        for popularity in [
            Popularity::Hot { ratio: 0.25, weight: 0.8 },
            Popularity::Zipf { exponent: 0.0 },
            Popularity::Zipf { exponent: 1.2 },
            Popularity::Zipf { exponent: 6.0 },
        ] {
            let workload = Workload { popularity, tokens: 40_000, ..workload() };
            let routing = workload.routing().unwrap();
            let want = of_two(&workload.probabilities().unwrap());
            let draws = (workload.tokens * workload.layers * workload.steps) as f64;
            for (expert, (tokens, want)) in routing.tokens_per_expert().iter().zip(&want).enumerate() {
                // Five standard deviations.
                let bound = 5.0 * (draws * want * (1.0 - want)).sqrt() + 1.0;
                assert!((tokens - draws * want).abs() < bound, "{popularity:?} {expert}: {tokens}, {}", draws * want);
            }
        }
    }

    #[test]
    fn imbalance_of_nodes_is_exact() {
        for (experts, nodes, tokens, top_k, max_over_mean) in [
            (256, 16, 8, 8, 1.0),
            (256, 16, 4096, 8, 1.0),
            (16, 4, 4003, 2, 1.7),
            (16, 4, 37, 3, 4.0),
            (64, 8, 1000, 6, 2.35),
        ] {
            let popularity = Popularity::Imbalance { max_over_mean };
            let workload = Workload { experts, nodes, tokens, top_k, popularity, layers: 1, steps: 1, seed: 0 };
            let routing = workload.routing().unwrap();
            // The reader refuses a token that has an expert twice.
            assert_eq!(Routing::from_json(&routing.to_json()).unwrap(), routing);
            let by_expert = routing.tokens_per_expert();
            let even = |counts: &[f64]| {
                let (least, most) = counts.iter().fold((f64::MAX, 0.0), |(l, m), c| (c.min(l), c.max(m)));
                most - least <= 1.0
            };
            let by_node: Vec<f64> = by_expert.chunks(experts / nodes).map(|held| held.iter().sum()).collect();
            assert!((by_node[0] - max_over_mean * (tokens * top_k) as f64 / nodes as f64).abs() <= 1.0, "{by_node:?}");
            assert!(even(&by_node[1..]) && by_expert.chunks(experts / nodes).all(even), "{by_node:?} {by_expert:?}");
        }
        let popularity = Popularity::Imbalance { max_over_mean: 4.5 };
        let error = |workload: Workload| workload.routing().unwrap_err().to_string();
        let most = error(Workload { popularity, ..workload() });
        assert_eq!(most, "`imbalance` is 4.5, expected 1 to 4, all tokens to the first node's experts");
        let nodes = error(Workload { popularity, nodes: 3, ..workload() });
        assert_eq!(nodes, "`nodes` is 3, expected a divisor of the 16 experts, which are in blocks on them");
    }

    #[test]
    fn tokens_alternate_between_nodes_and_seeds_repeat() {
        let routing = workload().routing().unwrap();
        assert_eq!(routing.records.len(), 4);
        assert_eq!(routing.records[1].tokens_per_node, [1001, 1001, 1001, 1000]);
        assert_eq!((routing.records[1].layer, routing.records[1].step), (1, 0));
        assert_eq!(workload().routing().unwrap(), routing);
        assert_ne!(Workload { seed: 6, ..workload() }.routing().unwrap().records[0], routing.records[0]);
        assert_ne!(routing.records[0].choices, routing.records[1].choices);
        // The JSON text is read back, and passes the reader's checks.
        assert_eq!(Routing::from_json(&routing.to_json()).unwrap(), routing);
        // Each token has all experts; then only hot experts, as the others have no probability.
        let all = Workload { top_k: 16, popularity: Popularity::Zipf { exponent: 20.0 }, ..workload() };
        assert_eq!(all.routing().unwrap().tokens_per_expert(), [4.0 * 4003.0; 16]);
        let hot = Workload { top_k: 4, popularity: Popularity::Hot { ratio: 0.25, weight: 1.0 }, ..workload() };
        assert_eq!(hot.routing().unwrap().tokens_per_expert()[..5], [16_012.0, 16_012.0, 16_012.0, 16_012.0, 0.0]);
    }

    #[test]
    fn bad_input_is_reported_in_one_line() {
        let error = |workload: Workload| workload.routing().unwrap_err().to_string();
        let hot = |ratio, weight| Popularity::Hot { ratio, weight };
        assert_eq!(error(Workload { experts: 0, ..workload() }), "`experts` is 0, expected 1 to 65536");
        assert_eq!(error(Workload { top_k: 17, ..workload() }), "`top_k` is 17, expected 1 to 16");
        assert_eq!(error(Workload { nodes: 0, ..workload() }), "`nodes` is 0, expected 1 to 65536");
        let most = error(Workload { tokens: 1 << 28, ..workload() });
        assert!(most.starts_with("`tokens` is 268435456, expected at most"), "{most}");
        let nan = error(Workload { popularity: hot(f64::NAN, 0.5), ..workload() });
        assert_eq!(nan, "`hot_ratio` is NaN, expected a number from 0 to 1");
        let weight = error(Workload { popularity: hot(0.25, 1.0), top_k: 5, ..workload() });
        assert!(weight.starts_with("`hot_weight` is 1, expected"), "{weight}");
        let zipf = error(Workload { popularity: Popularity::Zipf { exponent: -1.0 }, ..workload() });
        assert_eq!(zipf, "`zipf` is -1, expected a number from 0 to 20");
    }
}
