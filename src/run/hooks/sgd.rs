//! `--sgd`: stochastic gradient descent.

use anyhow::Result;

use super::{StepContext, StepHook};
use crate::job::request::OnFailure;
use crate::moe::{MoeLayer, WeightId};
use crate::run::non_finite::{Largest, Place};

/// Updates the weights from their gradients after each step. [`Progress::weights`](super::Progress) stores the weights in f32, whatever the
/// layer's element type, so that small updates accumulate.
pub(super) struct Sgd {
    rate: f32,
}

impl Sgd {
    /// Starts from the layer's weights. If the layer was rebuilt after a loss, the trained weights are copied to the layer instead.
    pub(super) fn new<L: MoeLayer>(run: &mut StepContext<'_, L>, rate: f32) -> Result<Sgd> {
        let weights = &mut run.progress.weights;
        if weights.is_empty() {
            *weights = read_weights(run.layer)?;
        } else {
            weights.iter().try_for_each(|(id, weight)| run.layer.set_weights(*id, weight))?;
        }
        Ok(Sgd { rate })
    }
}

impl<L: MoeLayer> StepHook<L> for Sgd {
    fn after(&mut self, run: &mut StepContext<'_, L>) -> Result<()> {
        if run.stopped {
            return Ok(());
        }
        let progress = &mut *run.progress;
        if run.job.request.on_failure == OnFailure::Continue {
            progress.weights_before.clone_from(&progress.weights);
        }
        let finite = descend(run.layer, self.rate * run.job.gradient_scale(), &mut progress.weights)?;
        if !finite && progress.non_finite.is_empty() {
            let place = Place { job: run.job, pe: run.pe, step: run.step };
            progress.non_finite.extend(place.of_weights(&progress.weights));
        }
        Ok(())
    }
}

/// Reads the weights that this PE holds from the layer, rounded to its element type.
pub(in crate::run) fn read_weights<L: MoeLayer>(layer: &L) -> Result<Vec<(WeightId, Vec<f32>)>> {
    let held = layer.spec().held(layer.my_pe());
    let mut weights = Vec::with_capacity(held.len());
    for id in held {
        let mut values = vec![0.0; layer.spec().config.shape(id).iter().product()];
        layer.weights(id, &mut values)?;
        weights.push((id, values));
    }
    Ok(weights)
}

/// Takes one descent step. Returns whether the new weights are finite.
fn descend<L: MoeLayer>(layer: &mut L, rate: f32, weights: &mut [(WeightId, Vec<f32>)]) -> Result<bool> {
    let (placement, me) = (layer.spec().placement.clone(), layer.my_pe());
    let gradients = layer.gradients()?;
    let mut largest = Largest::default();
    for (id, weight) in weights.iter_mut() {
        let gradient = gradients.get(*id, &placement, me).unwrap_or_default();
        for (weight, gradient) in weight.iter_mut().zip(gradient) {
            *weight -= rate * gradient;
            largest.add(*weight);
        }
    }
    for (id, weight) in weights.iter().filter(|(id, _)| id.has_gradient()) {
        layer.set_weights(*id, weight)?;
    }
    Ok(largest.is_finite())
}
