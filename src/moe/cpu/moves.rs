//! Moves experts between PEs, between two passes: their weights and the caller's per-expert state, by one-sided puts.
//!
//! Every PE has the old and the new placement, and derives the transfers from them. A PE receives one piece at a time in a reserved buffer.
//! After each piece, a barrier of the group makes the buffer free again.

use std::collections::BTreeMap;

use super::experts::Mlp;
use super::kernels::Element;
use super::layer::{Layer, new_id};
use super::replicas::Exchange;
use crate::moe::spec::metrics::Phase;
use crate::moe::spec::{ConfigError, ExpertState, Gradients, Groups, LayerSpec, MlpId, MoeError, Placement, WeightId};
use crate::shmem::{AsShmem, Cmp, SignalOp, Wait};

/// Transfer of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transfer {
    expert: usize,
    from: usize,
    to: usize,
}

/// Schedules the transfers. In each round a PE receives at most one expert, from the holder that sends the fewest.
fn transfer_rounds(old: &Placement, new: &Placement) -> Vec<Vec<Transfer>> {
    let mut rounds: Vec<Vec<Transfer>> = Vec::new();
    let (mut sends, mut receives) = (vec![0usize; old.n_pes()], vec![0usize; old.n_pes()]);
    for expert in 0..old.n_experts() {
        for to in new.holders(expert).into_iter().filter(|&to| old.local_on(expert, to).is_none()) {
            let Some(from) = old.holders(expert).into_iter().min_by_key(|&from| (sends[from], from)) else { continue };
            let round = receives[to];
            sends[from] += 1;
            receives[to] += 1;
            if rounds.len() == round {
                rounds.push(Vec::new());
            }
            rounds[round].push(Transfer { expert, from, to });
        }
    }
    rounds
}

impl<S: AsShmem, E: Element, X: Exchange> Layer<S, E, X> {
    /// See [`MoeLayer::move_experts`](crate::moe::MoeLayer::move_experts).
    pub(super) fn move_to(&mut self, groups: &Groups, state: &mut dyn ExpertState) -> Result<usize, MoeError> {
        let (group, me) = groups.position(self.pe().world_pe(self.pe().my_pe()));
        let new = groups.placement(group).clone();
        self.check_move(&new, me)?;
        let rounds = transfer_rounds(&self.spec.placement, &new);
        let (weights, piece) = (self.spec.config.expert_elements(), self.memory.layout.move_len);
        let len = weights + state.len();
        let mut received: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
        self.recorder.enter(Phase::Move);
        for round in &rounds {
            let sends: Vec<(Transfer, Vec<f32>)> = round
                .iter()
                .filter(|transfer| transfer.from == me)
                .map(|&transfer| Ok((transfer, self.pack(transfer.expert, weights, state)?)))
                .collect::<Result<_, MoeError>>()?;
            let incoming = round.iter().find(|transfer| transfer.to == me);
            let mut received_values = vec![0.0; if incoming.is_some() { len } else { 0 }];
            for start in (0..len).step_by(piece) {
                let piece = start..len.min(start + piece);
                self.pieces += 1;
                for (transfer, values) in &sends {
                    let (slot, signal) = self.memory.moved(piece.len());
                    self.pe().put_signal(slot, &values[piece.clone()], signal, self.pieces, SignalOp::Set, transfer.to);
                }
                if let Some(transfer) = incoming {
                    let (slot, signal) = self.memory.moved(piece.len());
                    let wait = Wait { signal, cmp: Cmp::Ge, value: self.pieces };
                    let deadline = self.spec.options.deadline();
                    self.pe().wait_until(wait, deadline).map_err(|timeout| {
                        MoeError::wait(self.pe(), transfer.from, "an expert that moves to it", Phase::Move, timeout)
                    })?;
                    self.pe().get(&mut received_values[piece], slot, me);
                }
                self.group_barrier("that its experts have moved")?;
            }
            received.extend(incoming.map(|transfer| (transfer.expert, received_values)));
        }
        self.switch_placement(new, me, received, weights, state)?;
        if let Some(exchange) = &mut self.exchange {
            exchange.regroup(groups, self.spec.options.deadline())?;
        }
        self.recorder.enter(Phase::Idle);
        Ok(rounds.iter().map(Vec::len).sum())
    }

    /// Returns an error if this layer cannot change to placement `new`.
    fn check_move(&self, new: &Placement, me: usize) -> Result<(), MoeError> {
        let refuse = |why: String| Err(MoeError::Usage { what: "move experts", why });
        let old = &self.spec.placement;
        if (new.n_pes(), new.n_experts(), me) != (old.n_pes(), old.n_experts(), self.pe().my_pe()) {
            return refuse("the new placement is of other PEs or experts than the layer".into());
        }
        let Some(slots) = self.spec.slots else {
            return refuse("the layer was made without slots for experts that move (`LayerSpec::slots`)".into());
        };
        if new.max_local() > slots {
            return refuse(format!("a PE would hold {} experts, the layer has slots for {slots}", new.max_local()));
        }
        if new.has_replicas() && self.spec.training && self.exchange.is_none() {
            return refuse("replicas need an exchange that sums their gradients (`Replicas`)".into());
        }
        if self.gradients.as_ref().is_some_and(|gradients| gradients.accumulate) {
            return refuse("gradients are being accumulated, expected a move before the first backward".into());
        }
        Ok(())
    }

    /// An expert's weights, followed by the caller's state of this expert.
    fn pack(&self, expert: usize, weights: usize, state: &mut dyn ExpertState) -> Result<Vec<f32>, MoeError> {
        let mut values = vec![0.0; weights + state.len()];
        for (id, part) in self.spec.config.expert_parts(expert) {
            self.weights.get(id, &self.spec.placement, self.pe().my_pe(), &mut values[part])?;
        }
        state.export(expert, &mut values[weights..]);
        Ok(values)
    }

    /// Switches to the new placement. Experts that stay keep their weights.
    fn switch_placement(
        &mut self,
        new: Placement,
        me: usize,
        received: BTreeMap<usize, Vec<f32>>,
        weights: usize,
        state: &mut dyn ExpertState,
    ) -> Result<(), MoeError> {
        let LayerSpec { config, placement: old, .. } = &self.spec;
        let mut previous: BTreeMap<usize, Mlp<E>> =
            old.experts(me).iter().copied().zip(self.weights.experts.drain(..)).collect();
        for &expert in new.experts(me) {
            let mlp = match (received.get(&expert), previous.remove(&expert)) {
                (Some(values), _) => {
                    state.import(expert, &values[weights..]);
                    let parts: BTreeMap<_, _> = config.expert_parts(expert).into_iter().collect();
                    let load = |id: WeightId| -> Result<Vec<f32>, MoeError> { Ok(values[parts[&id].clone()].to_vec()) };
                    Mlp::load(config.expert, config.hidden, MlpId::Routed(expert), load)?
                        .weigh_input(config.router.weigh_input)
                }
                (None, Some(mlp)) => mlp,
                (None, None) => {
                    let (value, expected) = (format!("without expert {expert}"), "what was moved".to_string());
                    return Err(ConfigError { field: "the old placement", value, expected }.into());
                }
            };
            self.weights.experts.push(mlp);
        }
        previous.into_keys().for_each(|expert| state.remove(expert));
        self.spec.placement = new;
        let LayerSpec { config, placement, .. } = &self.spec;
        if let Some(gradients) = &mut self.gradients {
            gradients.all = Gradients::zeros(config, placement, me);
            gradients.last = None;
        }
        // A new id makes the results of forward passes before the move invalid.
        self.id = new_id();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::placement::Split;

    #[test]
    fn each_missing_expert_is_sent_once_by_a_holder() {
        let old = Placement::from_owners(vec![0, 0, 0, 0, 1, 2], 3);
        let even = |holders: usize| vec![vec![1.0 / holders as f64; holders]; 3];
        let split = Split { expert: 4, holders: vec![0, 1, 2], shares: even(3) };
        let new = Placement::from_owners(vec![0, 1, 1, 2, 1, 2], 3).with_replicas(&[split]).unwrap();
        let rounds = transfer_rounds(&old, &new);
        assert_eq!(rounds.iter().map(Vec::len).collect::<Vec<_>>(), [3, 2]);
        for round in &rounds {
            let to: std::collections::BTreeSet<usize> = round.iter().map(|transfer| transfer.to).collect();
            assert_eq!(to.len(), round.len(), "one for each PE");
            assert!(
                round
                    .iter()
                    .all(|t| old.local_on(t.expert, t.from).is_some() && new.local_on(t.expert, t.to).is_some())
            );
        }
        assert!(transfer_rounds(&new, &new).is_empty());
        // Sends are spread over the holders.
        let all = transfer_rounds(&new, &Placement::from_owners(vec![1, 0, 0, 0, 1, 0], 3));
        assert!(all.iter().flatten().all(|t| new.local_on(t.expert, t.from).is_some()));
    }
}
