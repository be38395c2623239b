//! Sums over tokens for the auxiliary losses.

/// Sums for the auxiliary losses, over the tokens of one PE or of all PEs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// Number of tokens.
    pub tokens: u64,
    /// Number of (token, expert) pairs of each expert, including those beyond the capacity.
    pub routed: Vec<u64>,
    /// Sum of each expert's probability over tokens. The probability is the softmax score, or another score divided by the token's sum of
    /// scores.
    pub prob_sums: Vec<f64>,
    /// Sum of squared logsumexp of the logits.
    pub z_sum: f64,
}

impl Load {
    /// The sums of zero tokens, for a layer of `n_experts` experts.
    pub(in crate::moe) fn zeros(n_experts: usize) -> Load {
        Load { routed: vec![0; n_experts], prob_sums: vec![0.0; n_experts], ..Load::default() }
    }

    /// Adds another PE's sums.
    pub fn add(&mut self, other: &Load) {
        self.tokens += other.tokens;
        self.z_sum += other.z_sum;
        self.routed.resize(other.routed.len(), 0);
        self.prob_sums.resize(other.prob_sums.len(), 0.0);
        self.routed.iter_mut().zip(&other.routed).for_each(|(a, b)| *a += b);
        self.prob_sums.iter_mut().zip(&other.prob_sums).for_each(|(a, b)| *a += b);
    }

    /// The load-balancing loss `n_experts * sum_e f_e P_e`, where `f_e` is the number of pairs of expert e per token, and `P_e` its mean
    /// probability (Switch Transformers, section 2.2, equation 4, summed over the top-k choices). Not multiplied by its coefficient; 0
    /// without tokens.
    pub fn aux_loss(&self) -> f64 {
        let t = self.tokens.max(1) as f64;
        let dot: f64 = self.routed.iter().zip(&self.prob_sums).map(|(&r, &p)| r as f64 / t * (p / t)).sum();
        dot * self.routed.len() as f64
    }

    /// The z-loss: the mean of squared logsumexp (ST-MoE, equation 5). Not multiplied by its coefficient; 0 without tokens.
    pub fn z_loss(&self) -> f64 {
        self.z_sum / self.tokens.max(1) as f64
    }
}
