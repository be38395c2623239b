//! The router: scores, selection, routing weights, auxiliary losses, and their backward.
//!
//! All computations are in f32, regardless of the layer's element type, because rounding here would change the choice of experts, and the
//! router is only a small share of the work.

use crate::moe::spec::{
    Division, GroupLimit, GroupScore, LayerConfig, Load, MoeError, NO_EXPERT, Norm, Placement, Scoring, SparseMixer,
};

/// Routing decisions for one PE's tokens.
#[derive(Clone, Debug, Default)]
pub struct Routing {
    /// Number of tokens.
    pub tokens: usize,
    /// The chosen experts, `[tokens, top_k]`. If the layer's router chose them, they ascend within a token. If the caller chose them, they
    /// are in the caller's order, and may be [`NO_EXPERT`].
    pub chosen: Vec<u32>,
    /// Routing weights, `[tokens, top_k]`.
    pub weights: Vec<f32>,
    /// Whether each choice is within capacity, `[tokens, top_k]`; empty without a capacity factor.
    pub kept: Vec<bool>,
    /// Logits after bias and softcap, `[tokens, choices]`.
    logits: Vec<f32>,
    /// Scores of the logits, `[tokens, choices]`.
    scores: Vec<f32>,
    /// logsumexp of each token's logits, `[tokens]`.
    lse: Vec<f32>,
}

/// Computes scores, choices and routing weights from logits `[tokens, choices]`. If `given`, `[tokens, top_k]`, is set, these experts are
/// chosen instead of the best ones. Their weights are still computed from the scores.
pub fn route(config: &LayerConfig, bias: Option<&[f32]>, mut logits: Vec<f32>, given: Option<&[u32]>) -> Routing {
    let (e, k) = (config.choices(), config.router.top_k);
    let cap = config.router.softcap;
    if cap > 0.0 {
        logits.iter_mut().for_each(|l| *l = cap * (*l / cap).tanh());
    }
    let tokens = logits.len() / e;
    let mut r = Routing {
        tokens,
        chosen: vec![0; tokens * k],
        weights: vec![0.0; tokens * k],
        kept: Vec::new(),
        scores: vec![0.0; tokens * e],
        lse: vec![0.0; tokens],
        logits,
    };
    let mut selection = vec![0.0f32; e];
    let mut groups = Vec::new();
    for t in 0..tokens {
        let logits = &r.logits[t * e..(t + 1) * e];
        let scores = &mut r.scores[t * e..(t + 1) * e];
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = logits.iter().map(|l| (l - max).exp()).sum();
        r.lse[t] = max + sum.ln();
        if let Some(mixer) = config.router.sparse_mixer {
            let pair = mix(mixer, logits);
            for (slot, Mixed { expert, weight, .. }) in pair.iter().enumerate() {
                r.chosen[t * k + slot] = *expert as u32;
                r.weights[t * k + slot] = weight * config.router.scaling;
            }
            if pair[0].expert > pair[1].expert {
                r.chosen.swap(t * k, t * k + 1);
                r.weights.swap(t * k, t * k + 1);
            }
            continue;
        }
        match config.router.scoring {
            Scoring::Softmax => scores.iter_mut().zip(logits).for_each(|(s, l)| *s = (l - max).exp() / sum),
            Scoring::Sigmoid => scores.iter_mut().zip(logits).for_each(|(s, l)| *s = 1.0 / (1.0 + (-l).exp())),
            Scoring::SqrtSoftplus => scores.iter_mut().zip(logits).for_each(|(s, &l)| *s = softplus(l).sqrt()),
        }
        selection.copy_from_slice(if config.router.select_logits { logits } else { scores });
        if let Some(bias) = bias {
            selection.iter_mut().zip(bias).for_each(|(s, b)| *s += b);
        }
        if let Some(limit) = config.router.groups {
            mask_groups(&mut selection, limit, config.router.group_score, &mut groups);
        }
        let chosen = &mut r.chosen[t * k..(t + 1) * k];
        match given {
            Some(given) => chosen.copy_from_slice(&given[t * k..(t + 1) * k]),
            None => {
                for slot in chosen.iter_mut() {
                    let best = argmax(&selection);
                    *slot = best as u32;
                    selection[best] = EXCLUDED;
                }
            }
        }
        chosen.sort_unstable();
        let weights = &mut r.weights[t * k..(t + 1) * k];
        weights.iter_mut().zip(chosen).for_each(|(w, &mut c)| *w = scores[c as usize]);
        let norm = if config.router.renormalise { normaliser(config.router.norm, weights) } else { 1.0 };
        weights.iter_mut().for_each(|w| *w = *w / norm * config.router.scaling);
    }
    r
}

/// Below every score in the total order of f32, so that a chosen or masked expert is not chosen again.
const EXCLUDED: f32 = f32::from_bits(u32::MAX);

/// Index of the largest element in the total order, which includes NaN. Of equal elements, the one with the smaller index.
fn argmax(x: &[f32]) -> usize {
    (1..x.len()).fold(0, |best, i| if x[i].total_cmp(&x[best]).is_gt() { i } else { best })
}

/// Masks all experts outside the best groups.
fn mask_groups(selection: &mut [f32], limit: GroupLimit, score: GroupScore, scores: &mut Vec<f32>) {
    let size = selection.len() / limit.n_groups;
    scores.clear();
    scores.extend(selection.chunks_exact(size).map(|group| {
        let first = argmax(group);
        if score == GroupScore::Best {
            return group[first];
        }
        let second = group.iter().enumerate().filter(|(i, _)| *i != first).map(|(_, &s)| s).max_by(f32::total_cmp);
        group[first] + second.unwrap_or(0.0)
    }));
    let mut eligible = vec![false; limit.n_groups];
    for _ in 0..limit.top_groups {
        let best = argmax(scores);
        scores[best] = EXCLUDED;
        eligible[best] = true;
    }
    for (group, _) in selection.chunks_exact_mut(size).zip(eligible).filter(|(_, eligible)| !eligible) {
        group.fill(EXCLUDED);
    }
}

/// The divisor of renormalised weights.
fn normaliser(norm: Norm, chosen_scores: &[f32]) -> f32 {
    let divisor = order_norm(norm, chosen_scores) + norm.epsilon;
    // `max` would discard a NaN.
    if divisor < norm.floor { norm.floor } else { divisor }
}

/// The norm without epsilon and floor.
fn order_norm(norm: Norm, chosen_scores: &[f32]) -> f32 {
    if norm.order == 1.0 {
        return chosen_scores.iter().sum();
    }
    chosen_scores.iter().map(|s| s.powf(norm.order)).sum::<f32>().powf(1.0 / norm.order)
}

/// Derivative of [`normaliser`] with respect to a chosen score.
fn norm_slope(norm: Norm, chosen_scores: &[f32], score: f32) -> f32 {
    let value = order_norm(norm, chosen_scores);
    if value + norm.epsilon < norm.floor {
        0.0
    } else if norm.order == 1.0 {
        1.0
    } else {
        (score / value).powf(norm.order - 1.0)
    }
}

/// `ln(1 + e^x)`.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// One of the two choices of [`SparseMixer`]: the expert, its weight, and the softmax over all experts from which the weight is taken.
struct Mixed {
    expert: usize,
    weight: f32,
    shares: Vec<f32>,
}

/// Both choices of a token, the better one first.
fn mix(mixer: SparseMixer, logits: &[f32]) -> [Mixed; 2] {
    let first = mix_one(mixer, logits, None);
    let second = mix_one(mixer, logits, Some(first.expert));
    [first, second]
}

fn mix_one(mixer: SparseMixer, logits: &[f32], excluded: Option<usize>) -> Mixed {
    let mut left = logits.to_vec();
    if let Some(excluded) = excluded {
        left[excluded] = EXCLUDED;
    }
    let expert = argmax(&left);
    let best = logits[expert];
    let is_outside = |l: f32| (best - l) / l.abs().max(best) > 2.0 * mixer.jitter;
    let is_inside = |e: usize, l: f32| Some(e) != excluded && !is_outside(l);
    let mut shares: Vec<f32> =
        logits.iter().enumerate().map(|(e, &l)| if is_inside(e, l) { (l - best).exp() } else { 0.0 }).collect();
    let sum: f32 = shares.iter().sum();
    shares.iter_mut().for_each(|s| *s /= sum);
    Mixed { expert, weight: shares[expert], shares }
}

impl Routing {
    /// Converts the caller's routing. `ids` and `weights` are `[tokens, top_k]`, in any order within a token. Id -1 means no expert.
    ///
    /// # Errors
    ///
    /// Returns `MoeError::Usage` if an id is out of range or occurs twice in a token.
    pub fn from_caller(config: &LayerConfig, ids: &[i32], weights: &[f32]) -> Result<Routing, MoeError> {
        let k = config.router.top_k;
        let mut chosen = Vec::with_capacity(ids.len());
        for (token, ids) in ids.chunks_exact(k).enumerate() {
            for (column, &id) in ids.iter().enumerate() {
                let refuse = |why: String| Err(MoeError::Usage { what: "route by the given ids", why });
                match u32::try_from(id) {
                    Ok(e) if (e as usize) < config.n_experts => {
                        if ids[..column].contains(&id) {
                            return refuse(format!("token {token} has expert {id} twice"));
                        }
                        chosen.push(e);
                    }
                    Err(_) if id == -1 => chosen.push(NO_EXPERT),
                    _ => {
                        let last = config.n_experts - 1;
                        return refuse(format!("token {token} has expert {id}, expected 0 to {last}, or -1 for none"));
                    }
                }
            }
        }
        Ok(Routing { tokens: ids.len() / k, chosen, weights: weights.to_vec(), ..Routing::default() })
    }

    /// Number of choices of each expert, including those beyond the capacity.
    pub fn counts(&self, n_experts: usize) -> Vec<u32> {
        self.count(n_experts, |_| true)
    }

    /// Number of choices of each expert, without those beyond the capacity.
    pub fn kept_counts(&self, n_experts: usize) -> Vec<u32> {
        self.count(n_experts, |choice| self.is_kept(choice))
    }

    fn count(&self, n_experts: usize, is_counted: impl Fn(usize) -> bool) -> Vec<u32> {
        let mut counts = vec![0; n_experts];
        for (choice, &c) in self.chosen.iter().enumerate() {
            // Skips `NO_EXPERT` and identity experts.
            if let (Some(count), true) = (counts.get_mut(c as usize), is_counted(choice)) {
                *count += 1;
            }
        }
        counts
    }

    /// Keeps the first `capacity[e]` choices of each expert `e`, in token order, and drops the rest.
    pub fn apply_capacity(&mut self, mut capacity: Vec<u64>) {
        self.kept = self
            .chosen
            .iter()
            .map(|&c| {
                let Some(left) = capacity.get_mut(c as usize) else { return false };
                let keep = *left > 0;
                *left -= u64::from(keep);
                keep
            })
            .collect();
    }

    /// Whether a choice (an index into `chosen`) is kept.
    fn is_kept(&self, choice: usize) -> bool {
        self.kept.is_empty() || self.kept[choice]
    }

    /// This PE's load sums for the losses.
    pub fn load(&self, config: &LayerConfig) -> Load {
        let e = config.n_experts;
        let mut prob_sums = vec![0.0f64; e];
        for scores in self.scores.chunks_exact(e) {
            let norm = prob_norm(config, scores);
            prob_sums.iter_mut().zip(scores).for_each(|(sum, &s)| *sum += f64::from(s) / norm);
        }
        Load {
            tokens: self.tokens as u64,
            routed: self.counts(e).into_iter().map(u64::from).collect(),
            prob_sums,
            z_sum: self.lse.iter().map(|&l| f64::from(l) * f64::from(l)).sum(),
        }
    }

    /// Gradient of the logits before the softcap, `[tokens, choices]`, from the gradient of the routing weights,
    /// `[tokens, top_k]`, and from the losses that have a coefficient. `load` covers the tokens of all PEs.
    pub fn backward(&self, config: &LayerConfig, load: &Load, d_weights: &[f32]) -> Vec<f32> {
        let (e, k, router) = (config.choices(), config.router.top_k, &config.router);
        let all_tokens = load.tokens.max(1) as f64;
        let aux: Vec<f32> = if config.aux_loss_coef == 0.0 {
            Vec::new()
        } else {
            let scale = f64::from(config.aux_loss_coef) * e as f64 / (all_tokens * all_tokens);
            load.routed.iter().map(|&r| (scale * r as f64) as f32).collect()
        };
        let z = (f64::from(config.z_loss_coef) * 2.0 / all_tokens) as f32;
        let mut d_logits = vec![0.0f32; self.tokens * e];
        let mut d_scores = vec![0.0f32; e];
        for t in 0..self.tokens {
            let scores = &self.scores[t * e..(t + 1) * e];
            let chosen = &self.chosen[t * k..(t + 1) * k];
            let dw = &d_weights[t * k..(t + 1) * k];
            let out = &mut d_logits[t * e..(t + 1) * e];
            if let Some(mixer) = router.sparse_mixer {
                for mixed in mix(mixer, &self.logits[t * e..(t + 1) * e]) {
                    let slot = chosen.iter().position(|&c| c as usize == mixed.expert).unwrap_or_default();
                    let d = router.scaling * dw[slot] * mixed.weight;
                    out.iter_mut().zip(&mixed.shares).for_each(|(o, share)| *o -= d * share);
                    out[mixed.expert] += d;
                }
                continue;
            }
            d_scores.fill(0.0);
            // w_j = scaling * s_j / norm, so ds_j = (scaling * dw_j - [renormalised] norm'_j sum_i dw_i w_i) / norm
            let chosen_scores: Vec<f32> = chosen.iter().map(|&c| scores[c as usize]).collect();
            let (norm, mean) = if router.renormalise {
                let weights = &self.weights[t * k..(t + 1) * k];
                (normaliser(router.norm, &chosen_scores), dw.iter().zip(weights).map(|(d, w)| d * w).sum())
            } else {
                (1.0, 0.0f32)
            };
            for ((&c, &score), d) in chosen.iter().zip(&chosen_scores).zip(dw) {
                let slope = if router.renormalise { norm_slope(router.norm, &chosen_scores, score) } else { 0.0 };
                d_scores[c as usize] = (router.scaling * d - mean * slope) / norm;
            }
            if !aux.is_empty() {
                // The probability is p = s / norm. For softmax, norm is 1, and the derivative of p is that of the softmax, below.
                let norm = prob_norm(config, scores) as f32;
                let mean = match router.scoring {
                    Scoring::Softmax => 0.0,
                    Scoring::Sigmoid | Scoring::SqrtSoftplus => aux.iter().zip(scores).map(|(a, s)| a * s / norm).sum(),
                };
                d_scores.iter_mut().zip(&aux).for_each(|(d, a)| *d += (a - mean) / norm);
            }
            match router.scoring {
                Scoring::Softmax => {
                    let mean: f32 = d_scores.iter().zip(scores).map(|(d, s)| d * s).sum();
                    out.iter_mut().zip(&d_scores).zip(scores).for_each(|((o, d), s)| *o = s * (d - mean));
                }
                Scoring::Sigmoid => {
                    out.iter_mut().zip(&d_scores).zip(scores).for_each(|((o, d), s)| *o = d * s * (1.0 - s));
                }
                Scoring::SqrtSoftplus => {
                    let logits = &self.logits[t * e..(t + 1) * e];
                    for (((o, d), &s), l) in out.iter_mut().zip(&d_scores).zip(scores).zip(logits) {
                        // A score that underflows to 0 has slope 0.
                        *o = if s > 0.0 { d / (1.0 + (-l).exp()) / (2.0 * s) } else { 0.0 };
                    }
                }
            }
            if z != 0.0 {
                let (lse, logits) = (self.lse[t], &self.logits[t * e..(t + 1) * e]);
                out.iter_mut().zip(logits).for_each(|(o, l)| *o += z * lse * (l - lse).exp());
            }
        }
        if router.softcap > 0.0 {
            for (d, l) in d_logits.iter_mut().zip(&self.logits) {
                let share = l / router.softcap;
                *d *= 1.0 - share * share;
            }
        }
        d_logits
    }
}

/// The divisor that turns a token's scores into probabilities.
fn prob_norm(config: &LayerConfig, scores: &[f32]) -> f64 {
    match config.router.scoring {
        Scoring::Softmax => 1.0,
        Scoring::Sigmoid | Scoring::SqrtSoftplus => {
            scores.iter().map(|&s| f64::from(s)).sum::<f64>().max(f64::MIN_POSITIVE)
        }
    }
}

/// One expert of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RouteSlot {
    /// The expert's number on its PE.
    pub expert: u32,
    /// Its routing weight.
    pub weight: f32,
    /// Index into [`Routing::chosen`].
    pub choice: u32,
}

/// The rows for one PE. A token has at most one row, with its experts on that PE in ascending order. Rows are ordered by first local
/// expert, then by token, so that all rows of the first experts arrive first.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Row `j` has the slots `slots[slot_start[j]..slot_start[j + 1]]`.
    pub slot_start: Vec<u32>,
    /// Slots of all rows.
    pub slots: Vec<RouteSlot>,
    /// The rows in the order in which results return: by last local expert, then by row, so that results of the first
    /// experts do not wait for the last.
    pub returns: Vec<u32>,
}

impl Routes {
    /// The slots of row `j`.
    pub fn row(&self, j: usize) -> &[RouteSlot] {
        &self.slots[self.slot_start[j] as usize..self.slot_start[j + 1] as usize]
    }

    /// Sorts the rows, which must be ordered by token, by first expert, and computes `returns`.
    pub(super) fn sort(&mut self) {
        let rows = 0..self.tokens.len();
        let mut order: Vec<usize> = rows.clone().collect();
        order.sort_by_key(|&j| self.row(j).iter().map(|slot| slot.expert).min());
        let mut sorted = Routes { slot_start: vec![0], ..Routes::default() };
        for j in order {
            sorted.tokens.push(self.tokens[j]);
            sorted.slots.extend_from_slice(self.row(j));
            sorted.slot_start.push(sorted.slots.len() as u32);
        }
        let mut returns: Vec<u32> = rows.map(|j| j as u32).collect();
        returns.sort_by_key(|&j| sorted.row(j as usize).iter().map(|slot| slot.expert).max());
        *self = Routes { returns, ..sorted };
    }

    /// Number of slots of each of the PE's `n_local` experts.
    pub fn counts(&self, n_local: usize) -> Vec<u32> {
        let mut counts = vec![0; n_local];
        self.slots.iter().for_each(|s| counts[s.expert as usize] += 1);
        counts
    }
}

/// The rows of PE `source` for each PE.
pub fn routes(routing: &Routing, placement: &Placement, source: usize, top_k: usize) -> Vec<Routes> {
    block_routes(routing, by_shares(routing, placement, source), top_k, usize::MAX).swap_remove(0)
}

/// Divides the pairs of PE `source` by the shares of the placement.
pub(super) fn by_shares<'p>(routing: &Routing, placement: &'p Placement, source: usize) -> Division<'p> {
    let pairs = match placement.has_replicas() {
        true => routing.kept_counts(placement.n_experts()),
        false => Vec::new(),
    };
    Division::by_shares(placement, source, |e| u64::from(pairs[e]))
}

/// No rows for any of `n_pes` PEs.
pub fn no_routes(n_pes: usize) -> Vec<Routes> {
    (0..n_pes).map(|_| Routes { slot_start: vec![0], ..Routes::default() }).collect()
}

/// Like [`routes`], for the PEs of `division`, by block of `block_tokens` tokens; there is at least one. Tokens and choices are numbered from the block's first token.
pub(super) fn block_routes(
    routing: &Routing,
    mut division: Division<'_>,
    top_k: usize,
    block_tokens: usize,
) -> Vec<Vec<Routes>> {
    let placement = division.placement();
    let blocks = routing.tokens.div_ceil(block_tokens).max(1);
    let mut all: Vec<Vec<Routes>> = (0..blocks).map(|_| no_routes(placement.n_pes())).collect();
    let mut columns: Vec<usize> = (0..top_k).collect();
    for (token, chosen) in routing.chosen.chunks_exact(top_k).enumerate() {
        let (block, of_block) = (token / block_tokens, token % block_tokens);
        // The slots of a row are in expert order, regardless of the caller's order, because results are summed in the order of slots.
        columns.sort_unstable_by_key(|&column| chosen[column]);
        for &column in &columns {
            let (expert, choice) = (chosen[column], token * top_k + column);
            // Neither `NO_EXPERT` nor identity experts are sent.
            if expert as usize >= placement.n_experts() || !routing.is_kept(choice) {
                continue;
            }
            let (pe, local) = division.next(expert as usize);
            let to = &mut all[block][pe];
            if to.tokens.last() != Some(&(of_block as u32)) {
                to.tokens.push(of_block as u32);
                to.slot_start.push(to.slots.len() as u32);
            }
            let (weight, choice) = (routing.weights[choice], of_block * top_k + column);
            to.slots.push(RouteSlot { expert: local as u32, weight, choice: choice as u32 });
            *to.slot_start.last_mut().expect("starts with one element") += 1;
        }
    }
    all.iter_mut().flatten().for_each(Routes::sort);
    all
}
