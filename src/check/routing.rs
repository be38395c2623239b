//! The router: scores, the choice of experts and its verification, weights, losses, gradients.

use super::CheckError;
use super::bound::{Bounded, SUM};
use super::matrix::Matrix;
use super::special::{sigmoid, softplus};
use crate::moe::{GroupScore, LayerConfig, RouterConfig, Scoring};

/// Minimum error of a score: f32 scores below the smallest normal number become 0.
const SCORE_FLOOR: f64 = 2.0 * f32::MIN_POSITIVE as f64;

/// The scores, choice and weights of every token.
pub struct Routing<'a> {
    config: &'a LayerConfig,
    logits: Matrix,
    scores: Matrix,
    /// Maximum error of each token's logits, `[tokens]`.
    logit_bounds: Vec<f64>,
    /// `[tokens, top_k]`.
    pub chosen: Vec<usize>,
    /// Factors on the chosen experts' outputs, `[tokens, top_k]`, including those of dropped pairs.
    pub weights: Vec<Bounded>,
    /// Whether the pair is within its expert's capacity, `[tokens, top_k]`.
    pub kept: Vec<bool>,
    /// Pairs routed to each expert before any drop, `[n_experts]`.
    pub tokens_per_expert: Vec<u64>,
}

/// The selection scores of one token, each with its maximum f32 rounding error.
struct Selection {
    score: Vec<f64>,
    slack: Vec<f64>,
}

impl<'a> Routing<'a> {
    /// Routes the rows of `x`. If `given`, `[tokens, top_k]`, is set, that choice is verified within `tolerance` and used; otherwise the
    /// reference chooses.
    pub fn new(
        config: &'a LayerConfig,
        x: &Matrix,
        router: &Matrix,
        logit_bias: Option<&[f32]>,
        bias: Option<&[f32]>,
        given: Option<&[u32]>,
        tolerance: f64,
    ) -> Result<Self, CheckError> {
        let (tokens, n_experts, k) = (x.rows, config.choices(), config.router.top_k);
        let mut logits = x.times_transpose(router);
        // The rounding error of a logit is relative to the sum of its terms' magnitudes.
        let mut magnitudes = x.map(f64::abs).times_transpose(&router.map(f64::abs));
        if let Some(bias) = logit_bias {
            for t in 0..tokens {
                logits.row_mut(t).iter_mut().zip(bias).for_each(|(l, &b)| *l += f64::from(b));
                magnitudes.row_mut(t).iter_mut().zip(bias).for_each(|(m, &b)| *m += f64::from(b.abs()));
            }
        }
        let cap = f64::from(config.router.softcap);
        if cap > 0.0 {
            // The slope of the softcap is at most 1, so the error bound remains valid.
            logits = logits.map(|l| cap * (l / cap).tanh());
        }
        if let Some(i) = logits.data.iter().position(|l| !l.is_finite()) {
            let (t, e) = (i / n_experts, i % n_experts);
            return Err(CheckError::Input(format!("router logit of token {t}, expert {e} is not finite")));
        }
        let mut scores = Matrix::zeros(tokens, n_experts);
        for t in 0..tokens {
            match config.router.scoring {
                Scoring::Softmax => softmax(logits.row(t), scores.row_mut(t)),
                Scoring::Sigmoid => {
                    for (s, &l) in scores.row_mut(t).iter_mut().zip(logits.row(t)) {
                        *s = sigmoid(l);
                    }
                }
                Scoring::SqrtSoftplus => {
                    for (s, &l) in scores.row_mut(t).iter_mut().zip(logits.row(t)) {
                        *s = softplus(l).sqrt();
                    }
                }
            }
        }
        let largest = |t: usize| magnitudes.row(t).iter().copied().fold(0.0, f64::max);
        let logit_bounds: Vec<f64> = (0..tokens).map(|t| SUM * largest(t)).collect();
        let mut chosen = Vec::with_capacity(tokens * k);
        for t in 0..tokens {
            let with_bias = |e: usize, s: f64| s + bias.map_or(0.0, |b| f64::from(b[e]));
            let by = if config.router.select_logits { logits.row(t) } else { scores.row(t) };
            let score: Vec<f64> = by.iter().enumerate().map(|(e, &s)| with_bias(e, s)).collect();
            if config.router.sparse_mixer.is_some() {
                let given = given.map(|given| &given[t * k..(t + 1) * k]);
                chosen.extend(mixed_choice(t, logits.row(t), given, tolerance * largest(t))?);
                continue;
            }
            let Some(given) = given else {
                chosen.extend(select(&config.router, &score));
                continue;
            };
            let logit_slack = tolerance * largest(t);
            let slack = (0..n_experts)
                .map(|e| {
                    let s = scores.row(t)[e];
                    if config.router.select_logits {
                        return logit_slack + tolerance * score[e].abs() + SCORE_FLOOR;
                    }
                    if config.router.scoring == Scoring::SqrtSoftplus {
                        // The slope is sigmoid / (2 s) < 1/2.
                        return 0.5 * logit_slack + tolerance * (s + score[e].abs()) + SCORE_FLOOR;
                    }
                    // |d softmax_e| <= 2 s (1 - s) max |d logit|, |d sigmoid| = s (1 - s) |d logit|;
                    // then the rounding of the score and of its sum with the bias.
                    2.0 * s * (1.0 - s) * logit_slack + tolerance * (s + score[e].abs()) + SCORE_FLOOR
                })
                .collect();
            let own = given[t * k..(t + 1) * k].iter().map(|&e| e as usize).collect::<Vec<_>>();
            verify(&config.router, t, &own, &Selection { score, slack })?;
            chosen.extend(own);
        }

        let mut weights = Vec::with_capacity(tokens * k);
        for t in 0..tokens {
            let own = &chosen[t * k..(t + 1) * k];
            let shares = match config.router.sparse_mixer {
                Some(mixer) => {
                    let shares = mixed_shares(f64::from(mixer.jitter), logits.row(t), own);
                    let share = |(shares, &e): (&Vec<f64>, &usize)| Bounded {
                        value: shares[e],
                        bound: score_bound(shares[e], logit_bounds[t]),
                    };
                    shares.iter().zip(own).map(share).collect()
                }
                None => {
                    let score = |&e: &usize| scored(&config.router, scores.row(t)[e], logit_bounds[t]);
                    shares(&config.router, &own.iter().map(score).collect::<Vec<_>>())
                }
            };
            let scaling = f64::from(config.router.scaling);
            let scaled = |share: &Bounded| Bounded { value: scaling * share.value, bound: scaling.abs() * share.bound };
            weights.extend(shares.iter().map(scaled));
        }

        let mut tokens_per_expert = vec![0; n_experts];
        let capacity = capacity(config, tokens);
        let mut kept = Vec::with_capacity(tokens * k);
        for &e in &chosen {
            kept.push(capacity.is_none_or(|c| tokens_per_expert[e] < c));
            tokens_per_expert[e] += 1;
        }
        Ok(Routing { config, logits, scores, logit_bounds, chosen, weights, kept, tokens_per_expert })
    }

    /// `f_e`: the pairs routed to each expert, before any drop, over the tokens.
    fn fractions(&self) -> Vec<f64> {
        self.tokens_per_expert.iter().map(|&n| n as f64 / self.logits.rows as f64).collect()
    }

    /// The load-balancing loss `E sum_e f_e P_e` (Fedus et al., section 2.2, equation 4, over all
    /// top-k choices), where `P_e` is the mean over tokens of the softmax probability, or of the
    /// sigmoid score over the token's sum of scores (DeepSeek-V3, equations 18 to 20). 0 without tokens.
    pub fn aux_loss(&self) -> f64 {
        let tokens = self.logits.rows;
        if tokens == 0 {
            return 0.0;
        }
        let fractions = self.fractions();
        let mut sum = 0.0;
        for t in 0..tokens {
            let scores = self.scores.row(t);
            let total = self.score_total(scores);
            sum += scores.iter().zip(&fractions).map(|(s, f)| s / total * f).sum::<f64>();
        }
        self.config.n_experts as f64 * sum / tokens as f64
    }

    /// The divisor that turns a token's scores into probabilities.
    fn score_total(&self, scores: &[f64]) -> f64 {
        match self.config.router.scoring {
            Scoring::Softmax => 1.0,
            Scoring::Sigmoid | Scoring::SqrtSoftplus => scores.iter().sum(),
        }
    }

    /// The mean over tokens of `logsumexp(logits)^2` (Zoph et al., equation 5). 0 without tokens.
    pub fn z_loss(&self) -> f64 {
        let tokens = self.logits.rows;
        if tokens == 0 {
            return 0.0;
        }
        (0..tokens).map(|t| logsumexp(self.logits.row(t)).powi(2)).sum::<f64>() / tokens as f64
    }

    /// The gradient of the logits, `[tokens, n_experts]`, from that of the weights, `[tokens, top_k]`, and from both losses; and bounds
    /// on its errors.
    pub fn backward(&self, d_weights: &[Bounded]) -> (Matrix, Matrix) {
        let router = &self.config.router;
        let (tokens, n_experts, k) = (self.logits.rows, self.config.choices(), router.top_k);
        let fractions = self.fractions();
        let aux = f64::from(self.config.aux_loss_coef) * n_experts as f64 / tokens as f64;
        let z = f64::from(self.config.z_loss_coef) / tokens as f64;
        let scaling = f64::from(router.scaling);
        let mut d_logits = Matrix::zeros(tokens, n_experts);
        let mut errors = Matrix::zeros(tokens, n_experts);
        for t in 0..tokens {
            let logit_bound = self.logit_bounds[t];
            let scores: Vec<Bounded> =
                self.scores.row(t).iter().map(|&value| scored(router, value, logit_bound)).collect();
            let chosen = &self.chosen[t * k..(t + 1) * k];
            let d_weights = &d_weights[t * k..(t + 1) * k];
            if let Some(mixer) = router.sparse_mixer {
                let shares = mixed_shares(f64::from(mixer.jitter), self.logits.row(t), chosen);
                for ((&e, shares), d) in chosen.iter().zip(&shares).zip(d_weights) {
                    let bounded = |value: f64| Bounded { value, bound: score_bound(value, logit_bound) };
                    let through = d.times(bounded(shares[e]));
                    for (other, &share) in shares.iter().enumerate() {
                        let kept = if other == e { 1.0 - share } else { -share };
                        let d = through.times(Bounded { value: kept, bound: score_bound(share, logit_bound) });
                        d_logits.row_mut(t)[other] += scaling * d.value;
                        errors.row_mut(t)[other] += scaling.abs() * (d.bound + SUM * d.value.abs());
                    }
                }
                continue;
            }

            let mut d_scores = vec![Bounded::ZERO; n_experts];
            // weight_i = scaling s_i / sum_j s_j. Written so that top-1 renormalised, where the
            // weight does not depend on the score, gives exactly 0.
            let raw: Vec<Bounded> = chosen.iter().map(|&e| scores[e]).collect();
            let sum = normaliser(router, &raw);
            let through_sum = if router.renormalise {
                let products = shares(router, &raw).into_iter().zip(d_weights).map(|(share, &d)| d.times(share));
                products.fold(Bounded::ZERO, Bounded::plus)
            } else {
                Bounded::ZERO
            };
            let slopes = norm_slopes(router, &raw);
            for ((&e, d), slope) in chosen.iter().zip(d_weights).zip(slopes) {
                let factor = scaling / sum.value;
                let through_sum = through_sum.times(slope);
                let value = factor * (d.value - through_sum.value);
                let magnitude = factor.abs() * (d.value.abs() + through_sum.value.abs());
                let relative = SUM + sum.bound / sum.value;
                d_scores[e].value += value;
                d_scores[e].bound += factor.abs() * (d.bound + through_sum.bound) + magnitude * relative;
            }
            // The auxiliary loss: P_e is s_e / total; total is constant under softmax.
            let total = self.score_total(self.scores.row(t));
            let mut through_total = Bounded::ZERO;
            let mut total_bound = 0.0;
            if router.scoring != Scoring::Softmax {
                total_bound = scores.iter().map(|s| s.bound).sum();
                for (f, s) in fractions.iter().zip(&scores) {
                    through_total.value += f * s.value / total;
                    through_total.bound += f * (s.bound + s.value * (SUM + total_bound / total)) / total;
                }
            }
            for (d, f) in d_scores.iter_mut().zip(&fractions) {
                d.value += aux * (f - through_total.value) / total;
                let magnitude = f + through_total.value;
                d.bound += aux.abs() * (through_total.bound + magnitude * (SUM + total_bound / total)) / total;
            }

            let through_softmax = d_scores.iter().zip(&scores).map(|(&d, &s)| d.times(s));
            let through_softmax = through_softmax.fold(Bounded::ZERO, Bounded::plus);
            let lse = logsumexp(self.logits.row(t));
            let of_token = d_logits.row_mut(t).iter_mut().zip(errors.row_mut(t)).enumerate();
            for (e, (d, error)) in of_token {
                let (s, d_score) = (scores[e], d_scores[e]);
                match router.scoring {
                    Scoring::Softmax => {
                        *d = s.value * (d_score.value - through_softmax.value);
                        *error = (s.value + s.bound) * (d_score.bound + through_softmax.bound)
                            + (s.bound + SUM * s.value) * (d_score.value.abs() + through_softmax.value.abs());
                    }
                    Scoring::Sigmoid => {
                        let slope = s.value * (1.0 - s.value);
                        *d = slope * d_score.value;
                        *error = (slope + s.bound) * d_score.bound + (s.bound + SUM * s.value) * d_score.value.abs();
                    }
                    Scoring::SqrtSoftplus => {
                        let l = self.logits.row(t)[e];
                        let slope = if s.value > 0.0 { sigmoid(l) / (2.0 * s.value) } else { 0.0 };
                        // The relative change per unit of the logit is at most 1/2.
                        let slope = Bounded { value: slope, bound: slope * (logit_bound + SUM) };
                        let product = slope.times(d_score);
                        (*d, *error) = (product.value, product.bound);
                    }
                };
                let p = (self.logits.row(t)[e] - lse).exp();
                *d += 2.0 * z * lse * p;
                *error += 2.0
                    * z.abs()
                    * ((logit_bound + SUM * lse.abs()) * p + lse.abs() * (score_bound(p, logit_bound) + SUM * p));
            }
        }
        let cap = f64::from(router.softcap);
        if cap > 0.0 {
            let all = d_logits.data.iter_mut().zip(&mut errors.data).zip(&self.logits.data).enumerate();
            for (i, ((d, error), l)) in all {
                let slope = 1.0 - (l / cap) * (l / cap);
                let off = 2.0 * self.logit_bounds[i / n_experts] / cap + SUM;
                *error = *error * (slope + off) + d.abs() * off;
                *d *= slope;
            }
        }
        (d_logits, errors)
    }
}

/// Maximum error of a score (a softmax probability or a sigmoid) if logits have errors of up to `logit_bound`. Its slope is `s (1 - s)`,
/// for softmax twice that over all logits together; the slope itself may change by as much again.
pub fn score_bound(score: f64, logit_bound: f64) -> f64 {
    let moved = score * (1.0 - score) * (2.0 * logit_bound).exp_m1();
    moved.min(1.0) + SUM * score + SCORE_FLOOR
}

/// A score with its bound.
fn scored(router: &RouterConfig, value: f64, logit_bound: f64) -> Bounded {
    let bound = match router.scoring {
        Scoring::Softmax | Scoring::Sigmoid => score_bound(value, logit_bound),
        // The slope is below 1/2.
        Scoring::SqrtSoftplus => 0.5 * logit_bound + SUM * value + SCORE_FLOOR,
    };
    Bounded { value, bound }
}

/// The chosen scores, divided by their norm if the router normalises.
fn shares(router: &RouterConfig, chosen: &[Bounded]) -> Vec<Bounded> {
    let sum = normaliser(router, chosen);
    let share = |s: &Bounded| {
        let value = s.value / sum.value;
        Bounded { value, bound: (s.bound + value * sum.bound) / sum.value + SUM * value }
    };
    chosen.iter().map(share).collect()
}

/// The divisor of the chosen scores.
fn normaliser(router: &RouterConfig, chosen: &[Bounded]) -> Bounded {
    if !router.renormalise {
        return Bounded::ONE;
    }
    let norm = p_norm(router, chosen);
    let value = norm.value + f64::from(router.norm.epsilon);
    Bounded { value: value.max(f64::from(router.norm.floor)), ..norm }
}

/// The norm of the chosen scores. For an order of at least 1, a change of a score changes the norm by at most as much.
fn p_norm(router: &RouterConfig, chosen: &[Bounded]) -> Bounded {
    let sum = chosen.iter().copied().fold(Bounded::ZERO, Bounded::plus);
    let order = f64::from(router.norm.order);
    if order == 1.0 {
        return sum;
    }
    let value = chosen.iter().map(|s| s.value.powf(order)).sum::<f64>().powf(1.0 / order);
    // For an order p below 1 the slope is larger: (norm / score)^(1 - p).
    let steepness = |s: &Bounded| if order < 1.0 { (value / s.value).powf(1.0 - order) } else { 1.0 };
    Bounded { value, bound: chosen.iter().map(|s| s.bound * steepness(s)).sum::<f64>() + SUM * value }
}

/// The derivatives of [`normaliser`] with respect to the chosen scores.
fn norm_slopes(router: &RouterConfig, chosen: &[Bounded]) -> Vec<Bounded> {
    let norm = p_norm(router, chosen);
    let order = f64::from(router.norm.order);
    if norm.value + f64::from(router.norm.epsilon) < f64::from(router.norm.floor) {
        return vec![Bounded::ZERO; chosen.len()];
    }
    if order == 1.0 {
        return vec![Bounded::ONE; chosen.len()];
    }
    let slope = |s: &Bounded| {
        let value = (s.value / norm.value).powf(order - 1.0);
        let relative = (order - 1.0).abs() * (s.bound / s.value + norm.bound / norm.value);
        Bounded { value, bound: value * (relative + SUM) }
    };
    chosen.iter().map(slope).collect()
}

/// SparseMixer's choice: the best logit, then the best of the others. If `given` is the same choice within `slack`, returns `given`.
fn mixed_choice(token: usize, logits: &[f64], given: Option<&[u32]>, slack: f64) -> Result<Vec<usize>, CheckError> {
    let own = largest(logits, 0..logits.len(), 2);
    let Some(given) = given else { return Ok(own) };
    let given: Vec<usize> = given.iter().map(|&e| e as usize).collect();
    let least = own.iter().map(|&e| logits[e]).fold(f64::INFINITY, f64::min);
    let fits = |&e: &usize| e < logits.len() && logits[e] + 2.0 * slack >= least;
    if given.len() != 2 || given[0] == given[1] || !given.iter().all(fits) {
        return Err(CheckError::Choice(format!("token {token} goes to experts {given:?}, expected {own:?}")));
    }
    Ok(given)
}

/// For each of the two chosen experts: the shares of all experts in the softmax from which its weight is taken. `chosen` may have either
/// order; the expert with the better logit counts as first and is excluded from the softmax of the second.
fn mixed_shares(jitter: f64, logits: &[f64], chosen: &[usize]) -> Vec<Vec<f64>> {
    let first = if (logits[chosen[1]], chosen[0]) > (logits[chosen[0]], chosen[1]) { chosen[1] } else { chosen[0] };
    let shares = |&e: &usize| {
        let best = logits[e];
        let out = |i: usize, l: f64| (e != first && i == first) || (best - l) / l.abs().max(best) > 2.0 * jitter;
        let terms: Vec<f64> =
            logits.iter().enumerate().map(|(i, &l)| if out(i, l) { 0.0 } else { (l - best).exp() }).collect();
        let sum: f64 = terms.iter().sum();
        terms.into_iter().map(|term| term / sum).collect()
    };
    chosen.iter().map(shares).collect()
}

/// The maximum number of pairs of an expert, if there is a limit. Multiplies in the layer's order, because another order may round a
/// whole number up to the next one.
fn capacity(config: &LayerConfig, tokens: usize) -> Option<u64> {
    let top_k = config.router.top_k as f64;
    config.capacity_factor.map(|c| (c * top_k * tokens as f64 / config.n_experts as f64).ceil() as u64)
}

fn softmax(logits: &[f64], out: &mut [f64]) {
    let lse = logsumexp(logits);
    for (p, &l) in out.iter_mut().zip(logits) {
        *p = (l - lse).exp();
    }
}

fn logsumexp(logits: &[f64]) -> f64 {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + logits.iter().map(|l| (l - max).exp()).sum::<f64>().ln()
}

/// The indices of the `n` largest `values` with indices in `among`; ties go to the smaller index.
fn largest(values: &[f64], among: impl Iterator<Item = usize>, n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = among.collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(n);
    order
}

/// The score of each group: the sum of its two best scores (the only score in groups of one expert), or the best score.
fn group_scores(router: &RouterConfig, score: &[f64], n_groups: usize) -> Vec<f64> {
    let size = score.len() / n_groups;
    let best = if router.group_score == GroupScore::Best { 1 } else { 2 };
    score.chunks(size).map(|group| largest(group, 0..size, best).iter().map(|&e| group[e]).sum()).collect()
}

/// The chosen experts of one token, best first.
fn select(router: &RouterConfig, score: &[f64]) -> Vec<usize> {
    let all = 0..score.len();
    let Some(groups) = router.groups else {
        return largest(score, all, router.top_k);
    };
    let size = score.len() / groups.n_groups;
    let eligible = largest(&group_scores(router, score, groups.n_groups), 0..groups.n_groups, groups.top_groups);
    largest(score, all.filter(|e| eligible.contains(&(e / size))), router.top_k)
}

/// Checks that the rules allow the choice `own` if every selection score may have an error of its slack: no excluded expert is better
/// than a chosen one by more than both slacks.
fn verify(router: &RouterConfig, token: usize, own: &[usize], sel: &Selection) -> Result<(), CheckError> {
    let n_experts = sel.score.len();
    for (i, &e) in own.iter().enumerate() {
        if e >= n_experts {
            let text = format!("token {token} goes to expert {e}, but there are {n_experts} experts");
            return Err(CheckError::Choice(text));
        }
        if own[..i].contains(&e) {
            return Err(CheckError::Choice(format!("token {token} goes to expert {e} twice")));
        }
    }
    let eligible = eligible_experts(router, token, own, sel)?;
    let above = |e: &usize| sel.score[*e] + sel.slack[*e];
    let below = |e: &usize| sel.score[*e] - sel.slack[*e];
    let worst = own.iter().copied().min_by(|a, b| above(a).total_cmp(&above(b)));
    let best_left_out = eligible.into_iter().filter(|e| !own.contains(e)).max_by(|a, b| below(a).total_cmp(&below(b)));
    if let (Some(worst), Some(left_out)) = (worst, best_left_out)
        && below(&left_out) > above(&worst)
    {
        return Err(CheckError::Choice(format!(
            "token {token} goes to expert {worst} with selection score {}, expected expert {left_out} with {}",
            sel.score[worst], sel.score[left_out]
        )));
    }
    Ok(())
}

/// The experts from which `own` may have been chosen: all, or those of the eligible groups. Near ties between groups are resolved in
/// favour of `own`.
fn eligible_experts(
    router: &RouterConfig,
    token: usize,
    own: &[usize],
    sel: &Selection,
) -> Result<Vec<usize>, CheckError> {
    let n_experts = sel.score.len();
    let Some(groups) = router.groups else {
        return Ok((0..n_experts).collect());
    };
    let size = n_experts / groups.n_groups;
    let score = group_scores(router, &sel.score, groups.n_groups);
    let slack: Vec<f64> = sel.slack.chunks(size).map(|group| 2.0 * group.iter().copied().fold(0.0, f64::max)).collect();
    let others = |g: usize| (0..groups.n_groups).filter(move |&o| o != g);
    // `surely`: eligible with any rounding. `perhaps`: eligible with some rounding.
    let surely =
        |&g: &usize| others(g).filter(|&o| score[o] + slack[o] >= score[g] - slack[g]).count() < groups.top_groups;
    let perhaps =
        |&g: &usize| others(g).filter(|&o| score[o] - slack[o] > score[g] + slack[g]).count() < groups.top_groups;
    for &e in own {
        let g = e / size;
        if !perhaps(&g) {
            return Err(CheckError::Choice(format!(
                "token {token} goes to expert {e} of group {g} with group score {}, expected one of the groups {:?}, \
                 the best {} of the group scores {score:?}",
                score[g],
                largest(&score, 0..groups.n_groups, groups.top_groups),
                groups.top_groups
            )));
        }
    }
    let mut eligible: Vec<usize> =
        (0..groups.n_groups).filter(|g| surely(g) || own.iter().any(|&e| e / size == *g)).collect();
    if eligible.len() > groups.top_groups {
        return Err(CheckError::Choice(format!(
            "token {token} goes to experts {own:?} of too many groups: with the groups that are surely among the best \
             {} they make {eligible:?}; group scores {score:?}",
            groups.top_groups
        )));
    }
    // Fills the remaining places with those nearly tied groups whose best expert is the worst.
    let best = |g: usize| sel.score[g * size..(g + 1) * size].iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut tied: Vec<usize> = (0..groups.n_groups).filter(|g| perhaps(g) && !eligible.contains(g)).collect();
    tied.sort_by(|&a, &b| best(a).total_cmp(&best(b)));
    tied.truncate(groups.top_groups - eligible.len());
    eligible.extend(tied);
    Ok((0..n_experts).filter(|e| eligible.contains(&(e / size))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::GroupLimit;

    fn router(top_k: usize, groups: Option<(usize, usize)>) -> RouterConfig {
        let groups = groups.map(|(n_groups, top_groups)| GroupLimit { n_groups, top_groups });
        RouterConfig { groups, ..RouterConfig::sigmoid(top_k) }
    }

    fn check(router: &RouterConfig, score: &[f64], own: &[usize]) -> Result<(), CheckError> {
        verify(router, 7, own, &Selection { score: score.to_vec(), slack: vec![1e-3; score.len()] })
    }

    fn error(router: &RouterConfig, score: &[f64], own: &[usize]) -> String {
        check(router, score, own).unwrap_err().to_string()
    }

    #[test]
    fn selection_breaks_ties_to_the_smaller_index() {
        assert_eq!(select(&router(3, None), &[0.5, 0.7, 0.5, 0.7, 0.5]), [1, 3, 0]);
        // Groups {0,1} {2,3} {4,5} score 0.9, 1.0, 0.9: the second group and the first of the tied groups are eligible.
        assert_eq!(select(&router(2, Some((3, 2))), &[0.8, 0.1, 0.5, 0.5, 0.6, 0.3]), [0, 2]);
        // The score of a group of one expert is that expert's score.
        assert_eq!(select(&router(2, Some((3, 2))), &[0.1, 0.3, 0.2]), [1, 2]);
    }

    #[test]
    fn near_tie_is_accepted_and_a_wrong_choice_is_an_error() {
        let r = router(2, None);
        let score = [0.9, 0.5, 0.5005, 0.1];
        check(&r, &score, &[2, 0]).unwrap();
        check(&r, &score, &[0, 1]).unwrap();
        let text = error(&r, &score, &[0, 3]);
        assert!(text.contains("token 7") && text.contains("expert 3 with selection score 0.1"), "{text}");
        assert!(text.contains("expert 2 with 0.5005"), "{text}");
        // Both chosen experts are near the second best, but the best is missing.
        assert!(error(&r, &score, &[1, 2]).contains("expected expert 0"));
        assert!(error(&r, &score, &[0, 0]).contains("expert 0 twice"));
        assert!(error(&r, &score, &[0, 4]).contains("expert 4, but there are 4"));
    }

    #[test]
    fn groups_are_ranked_by_their_best_or_their_best_two() {
        // By the sum of two the groups score 0.8 and 1.0, by the best expert 0.7 and 0.5.
        let score = [0.7, 0.1, 0.5, 0.5];
        let two = router(1, Some((2, 1)));
        let best = RouterConfig { group_score: GroupScore::Best, ..two.clone() };
        assert_eq!((select(&two, &score), select(&best, &score)), (vec![2], vec![0]));
        check(&best, &score, &[0]).unwrap();
        assert!(error(&best, &score, &[2]).contains("expert 2 of group 1"));
        assert!(error(&two, &score, &[0]).contains("expert 0 of group 0"));
    }

    #[test]
    fn sparse_mixer_chooses_the_best_two_in_turn() {
        let logits = [0.3, 2.0, 1.9, -1.0];
        assert_eq!(mixed_choice(7, &logits, None, 1e-6).unwrap(), [1, 2]);
        assert_eq!(mixed_choice(7, &logits, Some(&[2, 1]), 1e-6).unwrap(), [2, 1]);
        assert!(mixed_choice(7, &logits, Some(&[1, 0]), 1e-6).unwrap_err().to_string().contains("expected [1, 2]"));
        // No other logit is within 2 * 0.01 of the best. The softmax of the second excludes the first.
        let shares = mixed_shares(0.01, &logits, &[1, 2]);
        assert_eq!((shares[0][1], shares[1][2]), (1.0, 1.0));
        let shares = mixed_shares(0.03, &logits, &[2, 1]);
        assert!((shares[1][1] - 1.0 / (1.0 + (-0.1f64).exp())).abs() < 1e-12 && shares[0][2] == 1.0);
    }

    #[test]
    fn near_tie_between_groups_is_accepted_and_a_wrong_group_is_an_error() {
        // Groups of two with scores 1.2, 0.8, 0.8005, 0.3.
        let score = [0.7, 0.5, 0.6, 0.2, 0.45, 0.3505, 0.2, 0.1];
        let two = router(2, Some((4, 2)));
        // Group 1 eligible: experts 0 and 2. Group 2 eligible instead: experts 0 and 1.
        check(&two, &score, &[0, 2]).unwrap();
        check(&two, &score, &[0, 1]).unwrap();
        assert!(error(&two, &score, &[0, 6]).contains("expert 6 of group 3"));
        assert!(error(&two, &score, &[0, 4]).contains("expected expert 1"));
        let three = router(3, Some((4, 2)));
        check(&three, &score, &[0, 1, 2]).unwrap();
        check(&three, &score, &[0, 1, 4]).unwrap();
        // Only one of the tied groups may be eligible.
        assert!(error(&three, &score, &[0, 2, 4]).contains("too many groups"));
    }
}
