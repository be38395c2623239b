//! Finds values that are not finite, and where they are.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;

use super::{PreparedRun, gradient_name};
use crate::checkpoint::InputTensor;
use crate::moe::{Gradients, Groups, Load, Routed, WeightId, WeightSource};
use crate::report::{NonFinite, NonFiniteKind};

/// The exponent bits of an f32. All of them are set only in NaN and infinities.
const EXPONENT: u32 = 0x7f80_0000;

/// The largest magnitude of some values, compared as bits, because the compiler vectorises an integer maximum.
#[derive(Clone, Copy, Default)]
pub(super) struct Largest(u32);

impl Largest {
    pub(super) fn add(&mut self, value: f32) {
        self.0 = self.0.max(value.to_bits() & !(1 << 31));
    }

    /// Whether all values are finite.
    pub(super) fn is_finite(self) -> bool {
        self.0 < EXPONENT
    }
}

/// Whether all values are finite.
pub(super) fn is_finite(values: &[f32]) -> bool {
    let mut largest = Largest::default();
    values.iter().for_each(|&value| largest.add(value));
    largest.is_finite()
}

/// The weighted losses over all PEs' tokens.
pub(super) fn losses(job: &PreparedRun, load: &Load) -> BTreeMap<String, f64> {
    let (aux, z) = (job.config.aux_loss_coef, job.config.z_loss_coef);
    let all = [("load_balancing", aux, load.aux_loss()), ("z", z, load.z_loss())];
    let weighted = all.into_iter().filter(|(_, coef, _)| *coef != 0.0);
    weighted.map(|(name, coef, loss)| (name.to_string(), f64::from(coef) * loss)).collect()
}

/// A PE's values of one step.
pub(super) struct StepValues<'v> {
    pub(super) pe: usize,
    pub(super) step: usize,
    /// `[tokens, hidden]`.
    pub(super) output: &'v [f32],
    /// The gradient of the input, `[tokens, hidden]`, and those of the weights; `None` without a backward pass.
    pub(super) backward: Option<(&'v [f32], &'v Gradients)>,
    pub(super) routed: &'v Routed,
    /// The experts of every PE.
    pub(super) groups: &'v Groups,
}

impl StepValues<'_> {
    /// Whether all these values are finite.
    pub(super) fn are_finite(&self, job: &PreparedRun) -> bool {
        let gradients = |grads: &Gradients| self.gradients(job, grads).all(|(_, values)| is_finite(values));
        losses(job, &self.routed.load).values().all(|loss| loss.is_finite())
            && is_finite(self.output)
            && self.backward.is_none_or(|(grad_input, grads)| is_finite(grad_input) && gradients(grads))
    }

    fn gradients<'g>(
        &self,
        job: &PreparedRun,
        grads: &'g Gradients,
    ) -> impl Iterator<Item = (WeightId, &'g [f32])> + use<'_, 'g> {
        let (group, index) = self.groups.position(job.rank(self.pe));
        let placement = self.groups.placement(group);
        let all = job.config.weights().into_iter();
        all.filter_map(move |id| Some((id, grads.get(id, placement, index)?)))
    }

    /// Returns an entry for each tensor with values that are not finite. `weights` are the weights before the step.
    ///
    /// # Errors
    /// Returns an error if the input cannot be read again.
    pub(super) fn find(&self, job: &PreparedRun, weights: &[(WeightId, Vec<f32>)]) -> Result<Vec<NonFinite>> {
        let place = Place { job, pe: self.pe, step: self.step };
        let mut found = Vec::new();
        let tokens = job.tokens_of(self.pe);
        let inputs = if self.backward.is_some() {
            &[InputTensor::HiddenStates, InputTensor::GradOutput][..]
        } else {
            &[InputTensor::HiddenStates]
        };
        for &tensor in inputs {
            let rows = job.rows_in(tensor, tokens.clone(), self.step)?;
            found.extend(place.of_tokens(NonFiniteKind::Token, tensor.name(), &rows, &tokens));
        }
        found.extend(place.of_weights(weights));
        let routing = place.of_rows(
            (NonFiniteKind::Routing, "routing_weights"),
            (&self.routed.weights, job.config.router.top_k),
            &tokens,
        );
        found.extend(routing);
        let losses = losses(job, &self.routed.load).into_iter().filter(|(_, loss)| !loss.is_finite());
        found.extend(losses.map(|(name, loss)| NonFinite {
            kind: NonFiniteKind::Loss,
            name,
            value: loss.to_string(),
            count: 1,
            ..place.entry()
        }));
        let output = place.of_tokens(NonFiniteKind::Output, "output", self.output, &tokens);
        found.extend(output.map(|found| NonFinite { expert: self.common_expert(job), ..found }));
        if let Some((grad_input, grads)) = self.backward {
            found.extend(place.of_tokens(NonFiniteKind::Gradient, "grad_hidden_states", grad_input, &tokens));
            for (id, values) in self.gradients(job, grads) {
                let name = gradient_name(&job.weight_slice(id).tensor);
                let expert = id.expert();
                let entry = place.of_values(NonFiniteKind::Gradient, &name, values);
                found.extend(entry.map(|entry| NonFinite { expert, ..entry }));
            }
        }
        Ok(found)
    }

    /// If exactly one expert was chosen by all tokens whose output is not finite: that expert. `None` if routing weights are not finite.
    fn common_expert(&self, job: &PreparedRun) -> Option<usize> {
        if !is_finite(&self.routed.weights) {
            return None;
        }
        let rows = self.output.chunks(job.config.hidden).zip(self.routed.chosen.chunks(job.config.router.top_k));
        let mut bad = rows.filter(|(row, _)| !is_finite(row)).map(|(_, chosen)| chosen);
        let mut common = bad.next()?.to_vec();
        bad.for_each(|chosen| common.retain(|expert| chosen.contains(expert)));
        match common[..] {
            [expert] if (expert as usize) < job.config.n_experts => Some(expert as usize),
            _ => None,
        }
    }
}

/// The job, PE and step to which entries belong.
pub(super) struct Place<'j> {
    pub(super) job: &'j PreparedRun,
    pub(super) pe: usize,
    pub(super) step: usize,
}

impl Place<'_> {
    fn entry(&self) -> NonFinite {
        let layer = match &self.job.request.work {
            crate::job::request::Work::Checkpoint { layer, .. } => Some(*layer),
            crate::job::request::Work::Synthetic { .. } => None,
        };
        NonFinite { step: self.step as u64, pe: self.pe, layer, ..NonFinite::default() }
    }

    /// Entries for the weights that are not finite.
    pub(super) fn of_weights<'w>(
        &'w self,
        weights: &'w [(WeightId, Vec<f32>)],
    ) -> impl Iterator<Item = NonFinite> + 'w {
        weights.iter().filter_map(|(id, values)| {
            let entry = self.of_values(NonFiniteKind::Weight, &self.job.weight_slice(*id).tensor, values)?;
            Some(NonFinite { expert: id.expert(), ..entry })
        })
    }

    fn of_values(&self, kind: NonFiniteKind, name: &str, values: &[f32]) -> Option<NonFinite> {
        if is_finite(values) {
            return None;
        }
        let mut bad = values.iter().enumerate().filter(|(_, value)| !value.is_finite());
        let (index, value) = bad.next()?;
        let count = 1 + bad.count() as u64;
        Some(NonFinite { kind, name: name.to_string(), index, value: value.to_string(), count, ..self.entry() })
    }

    fn of_tokens(&self, kind: NonFiniteKind, name: &str, rows: &[f32], tokens: &Range<usize>) -> Option<NonFinite> {
        self.of_rows((kind, name), (rows, self.job.config.hidden), tokens)
    }

    fn of_rows(
        &self,
        (kind, name): (NonFiniteKind, &str),
        (rows, width): (&[f32], usize),
        tokens: &Range<usize>,
    ) -> Option<NonFinite> {
        let entry = self.of_values(kind, name, rows)?;
        Some(NonFinite { token: Some(tokens.start + entry.index / width), index: entry.index % width, ..entry })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_infinities_are_not_finite() {
        let mut values = [0.0, -0.0, 1.0, f32::MIN, f32::MAX, -f32::MIN_POSITIVE, 1e-45];
        assert!(is_finite(&values) && is_finite(&[]));
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[5] = bad;
            assert!(!is_finite(&values), "{bad}");
        }
    }
}
