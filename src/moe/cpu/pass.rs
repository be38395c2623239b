//! [`MoeLayer`] on a CPU: runs the engine's passes, and the router, losses, shared expert and gradients around them.

use std::borrow::Cow;

use super::engine::{Direction, Saved, SavedStage};
use super::experts::Mlp;
use super::kernels::{self, Element};
use super::layer::{Layer, LayerGradients};
use super::replicas::Exchange;
use super::router::{self, Routing};
use crate::moe::spec::metrics::{PassOutcome, Phase};
use crate::moe::spec::{
    ExpertState, GradientSink, Gradients, Groups, LayerConfig, LayerSpec, Layout, Load, Mode, MoeError, MoeLayer,
    Options, Routed, WeightId,
};
use crate::shmem::AsShmem;

/// Name of the backward call for a [`Saved`], for errors: if the layer routed the tokens, and if the caller did.
const OWN_ROUTER: &str = "run backward";
const EXTERNAL: &str = "run the backward of experts";

impl<S: AsShmem, E: Element, X: Exchange> MoeLayer for Layer<S, E, X> {
    type Rows = [E];
    type Values = [f32];
    type Ids = [i32];
    type RowsBuf = Vec<E>;
    type ValuesBuf = Vec<f32>;
    type IdsBuf = Vec<i32>;
    type Saved = Saved<E>;

    fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    fn my_pe(&self) -> usize {
        self.pe().my_pe()
    }

    fn rows(&self, values: &[f32], _: &str) -> Result<Vec<E>, MoeError> {
        let mut rows = vec![E::default(); values.len()];
        E::convert(values, &mut rows);
        Ok(rows)
    }

    fn values(&self, values: &[f32]) -> Result<Vec<f32>, MoeError> {
        Ok(values.to_vec())
    }

    fn ids(&self, ids: &[i32]) -> Result<Vec<i32>, MoeError> {
        Ok(ids.to_vec())
    }

    fn read(&self, values: &[f32], into: &mut [f32]) -> Result<(), MoeError> {
        expect_len("the copy of values", into.len(), values.len())?;
        into.copy_from_slice(values);
        Ok(())
    }

    fn forward(&mut self, x: &[E], output: &mut [f32]) -> Result<Saved<E>, MoeError> {
        if self.spec.config.router.external {
            let why = "the layer has no router: the caller routes, by experts".into();
            return Err(MoeError::Usage { what: "run forward", why });
        }
        let pairs = self.tokens(x, output)? * self.spec.config.router.top_k;
        if let Some(choices) = &self.choices {
            expect_len("choices", choices.len(), pairs)?;
        }
        self.with_own_experts(|layer, experts| layer.forward_pass(experts, x, None, output))
    }

    fn backward(
        &mut self,
        saved: &mut Saved<E>,
        x: &[E],
        grad_output: &[E],
        grad_input: &mut [f32],
    ) -> Result<(), MoeError> {
        self.with_own_experts(|layer, experts| {
            layer.backward_pass(experts, saved, x, grad_output, grad_input, None, None)
        })
    }

    fn experts(&mut self, x: &[E], ids: &[i32], weights: &[f32], output: &mut [f32]) -> Result<Saved<E>, MoeError> {
        self.with_own_experts(|layer, experts| layer.experts_borrowed(experts, x, ids, weights, output))
    }

    fn experts_backward(
        &mut self,
        saved: &mut Saved<E>,
        x: &[E],
        grad_output: &[E],
        grad_input: &mut [f32],
        grad_weights: &mut [f32],
    ) -> Result<(), MoeError> {
        self.with_own_experts(|layer, experts| {
            layer.check_borrowed(experts)?;
            layer.backward_pass(experts, saved, x, grad_output, grad_input, Some(grad_weights), None)
        })
    }

    fn finish(&mut self, saved: &Saved<E>) -> Result<PassOutcome, MoeError> {
        let (times_ns, mut traffic) = self.recorder.take();
        let mut phases_s = times_ns.map(|ns| ns as f64 * 1e-9);
        // Time between passes is not counted.
        phases_s[Phase::Idle.code()] = 0.0;
        phases_s[Phase::Move.code()] = 0.0;
        // Bytes put outside of the layer protocol are gradient sums.
        let [all, network] = std::mem::take(&mut self.pass_bytes);
        let all_reduce_bytes = all.saturating_sub(traffic.total_bytes());
        traffic.network_bytes = network;
        Ok(PassOutcome {
            seconds: phases_s.iter().sum(),
            phases_s,
            expert_cpu_s: self.recorder.take_expert_cpu_ns() as f64 * 1e-9,
            rounds: saved.blocks.iter().map(|block| block.rounds as u64).sum(),
            traffic,
            all_reduce_bytes,
            spans: self.recorder.take_spans(),
        })
    }

    fn routed(&mut self, saved: &Saved<E>) -> Result<Routed, MoeError> {
        let expert_rows = self.expert_rows(saved)?;
        let mut load = Load::default();
        saved.loads.iter().for_each(|l| load.add(l));
        Ok(Routed { chosen: saved.routing.chosen.clone(), weights: saved.routing.weights.clone(), expert_rows, load })
    }

    fn expert_rows(&mut self, saved: &Saved<E>) -> Result<Vec<u64>, MoeError> {
        if saved.layer != self.id {
            let why = "the forward pass was another layer's".into();
            return Err(MoeError::Usage { what: "say where rows went", why });
        }
        Ok(saved.batches.iter().map(|batch| batch.rows as u64).collect())
    }

    fn recycle(&mut self, saved: Saved<E>) {
        if saved.layer == self.id {
            self.pool.push(saved);
        }
    }

    fn gradients(&mut self) -> Result<&Gradients, MoeError> {
        self.gradients.as_ref().map(|gradients| &gradients.all).ok_or_else(|| not_training("read gradients"))
    }

    fn set_accumulate(&mut self, accumulate: bool) -> Result<(), MoeError> {
        let me = self.pe().my_pe();
        let gradients = self.gradients.as_mut().ok_or_else(|| not_training("accumulate gradients"))?;
        gradients.accumulate = accumulate;
        if accumulate {
            let LayerSpec { config, placement, .. } = &self.spec;
            gradients.last.get_or_insert_with(|| Gradients::zeros(config, placement, me));
        }
        Ok(())
    }

    fn weights(&self, id: WeightId, into: &mut [f32]) -> Result<(), MoeError> {
        self.weights.get(id, &self.spec.placement, self.pe().my_pe(), into)
    }

    fn set_weights(&mut self, id: WeightId, values: &[f32]) -> Result<(), MoeError> {
        let me = self.pe().my_pe();
        self.weights.set(&mut self.scratch[0].workspace, id, &self.spec.placement, me, values)
    }

    fn move_experts(&mut self, groups: &Groups, state: &mut dyn ExpertState) -> Result<usize, MoeError> {
        self.move_to(groups, state)
    }

    fn set_mode(&mut self, mode: Mode) -> Result<(), MoeError> {
        let options = Options { mode, ..self.spec.options.clone() };
        options.validate(self.spec.dtype)?;
        self.spec.options = options;
        Ok(())
    }

    fn set_choices(&mut self, choices: Option<&[u32]>) -> Result<(), MoeError> {
        let config = &self.spec.config;
        let refuse = |why: String| Err(MoeError::Usage { what: "take experts in place of the router's", why });
        if choices.is_some() && (config.router.external || config.router.sparse_mixer.is_some()) {
            return refuse("the router weighs no experts but those that it chooses".into());
        }
        for (token, experts) in choices.unwrap_or_default().chunks(config.router.top_k).enumerate() {
            for (column, expert) in experts.iter().enumerate() {
                if *expert as usize >= config.choices() || experts[..column].contains(expert) {
                    let last = config.choices() - 1;
                    return refuse(format!(
                        "token {token} has experts {experts:?}, expected different ones from 0 to {last}"
                    ));
                }
            }
        }
        self.choices = choices.map(<[u32]>::to_vec);
        Ok(())
    }

    fn record_spans(&mut self) {
        self.recorder.record_spans();
    }

    fn barrier(&mut self) -> Result<(), MoeError> {
        self.group_barrier("at a barrier")
    }
}

/// Destination of the gradients that [`Layer::experts_borrowed_backward`] computes.
pub struct BorrowedGradients<'a> {
    /// Gradients of the tokens, `[T, hidden]`.
    pub input: &'a mut [f32],
    /// Gradients of the routing weights, `[T, K]`.
    pub weights: &'a mut [f32],
    /// Receives the gradients of each expert.
    pub experts: &'a mut GradientSink<'a>,
}

impl<S: AsShmem, E: Element, X: Exchange> Layer<S, E, X> {
    /// Like [`MoeLayer::experts`], with the caller's weights `experts` for the experts of this PE, in the order of its placement. The layer
    /// keeps no reference to them.
    ///
    /// # Errors
    ///
    /// Returns the errors of `experts`, and an error if the number or the shape of `experts` differs from the layer's.
    pub fn experts_borrowed(
        &mut self,
        experts: &[Mlp<E>],
        x: &[E],
        ids: &[i32],
        weights: &[f32],
        output: &mut [f32],
    ) -> Result<Saved<E>, MoeError> {
        self.check_borrowed(experts)?;
        let pairs = self.tokens(x, output)? * self.spec.config.router.top_k;
        expect_len("ids", ids.len(), pairs)?;
        expect_len("weights", weights.len(), pairs)?;
        let routing = Routing::from_caller(&self.spec.config, ids, weights)?;
        self.forward_pass(experts, x, Some(routing), output)
    }

    /// Backward of [`Layer::experts_borrowed`], with the same experts. `gradients.experts` is called once per expert, as soon as all rows
    /// of the expert have been computed. The layer stores no gradients.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`MoeLayer::experts_backward`], and an error if the number or the shape of `experts` differs from the layer's.
    pub fn experts_borrowed_backward(
        &mut self,
        experts: &[Mlp<E>],
        saved: &mut Saved<E>,
        x: &[E],
        grad_output: &[E],
        gradients: BorrowedGradients<'_>,
    ) -> Result<(), MoeError> {
        self.check_borrowed(experts)?;
        let BorrowedGradients { input, weights, experts: sink } = gradients;
        self.backward_pass(experts, saved, x, grad_output, input, Some(weights), Some(sink))
    }

    fn check_borrowed(&self, experts: &[Mlp<E>]) -> Result<(), MoeError> {
        expect_len("the local experts", experts.len(), self.spec.placement.experts(self.pe().my_pe()).len())?;
        let LayerConfig { hidden, expert, .. } = &self.spec.config;
        if experts.iter().any(|mlp| mlp.config() != expert || mlp.hidden() != *hidden) {
            let why = format!("an expert is not of the layer's shape, {expert:?} at width {hidden}");
            return Err(MoeError::Usage { what: "run these experts", why });
        }
        Ok(())
    }

    fn with_own_experts<T>(
        &mut self,
        pass: impl FnOnce(&mut Self, &[Mlp<E>]) -> Result<T, MoeError>,
    ) -> Result<T, MoeError> {
        let experts = std::mem::take(&mut self.weights.experts);
        let done = pass(self, &experts);
        self.weights.experts = experts;
        done
    }

    /// Checks the lengths of `x` and `output`, and returns the number of tokens.
    fn tokens(&self, x: &[E], output: &[f32]) -> Result<usize, MoeError> {
        let (h, top_k) = (self.spec.config.hidden, self.spec.config.router.top_k);
        if !x.len().is_multiple_of(h) {
            let expected = format!("a multiple of {h}, the hidden size");
            return Err(MoeError::Shape { what: "hidden_states".into(), got: x.len(), expected });
        }
        if !Layout::can_number(x.len() / h, top_k) {
            return Err(MoeError::TooLarge { tokens: x.len() / h, top_k });
        }
        expect_len("output", output.len(), x.len())?;
        Ok(x.len() / h)
    }

    /// A forward pass with the caller's routing `external`, or with the layer's own router and shared expert.
    fn forward_pass(
        &mut self,
        experts: &[Mlp<E>],
        x: &[E],
        external: Option<Routing>,
        output: &mut [f32],
    ) -> Result<Saved<E>, MoeError> {
        let (h, me) = (self.spec.config.hidden, self.pe().my_pe());
        let tokens = x.len() / h;
        self.recorder.enter(Phase::Router);
        let bytes_before = self.all_bytes_put();
        let mut saved = self.pool.pop().unwrap_or_default();
        saved.layer = self.id;
        saved.stage = SavedStage::Forward;
        saved.external = external.is_some();
        saved.batches.resize_with(experts.len(), Default::default);
        saved.routing = match external {
            Some(routing) => routing,
            None => self.route(x, &mut saved),
        };
        let (top_k, block_tokens) = (self.spec.config.router.top_k, self.memory.layout.block_tokens());
        let division = self.divide(&mut saved.routing)?;
        let routes = router::block_routes(&saved.routing, division, top_k, block_tokens);
        saved.loads.clear();
        saved.loads.resize(self.pe().n_pes(), Load::default());
        let config = &self.spec.config;
        if config.has_losses() {
            saved.loads[me] = match saved.external {
                false => saved.routing.load(config),
                // The header always has words for losses, even though only the layer's own router has losses.
                true => Load { tokens: tokens as u64, ..Load::zeros(config.n_experts) },
            };
        }
        saved.blocks = routes.into_iter().enumerate().map(|(number, routes)| self.block(number, routes)).collect();
        saved.most_tokens = tokens;

        output.fill(0.0);
        self.run_passes(Direction::Forward, experts, &mut saved, x, output, &mut [], &mut Gradients::default(), None)?;
        if let (Some(exchange), true) = (&self.exchange, self.spec.config.has_losses() && !saved.external) {
            self.recorder.enter(Phase::AllReduce);
            saved.loads = exchange.loads(&saved.loads[me], self.spec.options.deadline())?;
        }
        self.recorder.enter(Phase::Combine);
        if self.spec.config.identity_experts > 0 {
            let x32 = as_f32(x);
            for (token, weight, _) in identities(&saved.routing, &self.spec.config) {
                kernels::axpy(&mut output[token * h..(token + 1) * h], weight, &x32[token * h..(token + 1) * h]);
            }
        }
        if self.weights.shared.is_some() && !saved.external {
            let rows = output.chunks_exact_mut(h).zip(saved.shared.out.chunks_exact(h));
            for ((out, shared), &weight) in rows.zip(&saved.shared.weight) {
                kernels::axpy(out, weight, shared);
            }
        }
        self.count_bytes_since(bytes_before);
        self.recorder.enter(Phase::Idle);
        Ok(saved)
    }

    /// Routes with the layer's own router, and prepares the shared expert's input.
    fn route(&mut self, x: &[E], saved: &mut Saved<E>) -> Routing {
        let (h, e) = (self.spec.config.hidden, self.spec.config.choices());
        let tokens = x.len() / h;
        let x32 = as_f32(x);
        let mut logits = vec![0.0f32; tokens * e];
        if let Some(router) = &self.weights.router {
            f32::gemm_nt(&mut self.scratch[0].workspace, tokens, &x32, router, &mut logits, false);
        }
        if let Some(bias) = &self.weights.logit_bias {
            kernels::add_bias(tokens, e, &mut logits, bias);
        }
        if self.weights.shared.is_some() {
            let shared = &mut saved.shared;
            let scale = self.spec.config.shared.map_or(1.0, |s| s.scale);
            shared.rows = tokens;
            shared.x.clear();
            shared.x.extend_from_slice(x);
            shared.weight.clear();
            match &self.weights.shared_gate {
                Some(gate) => {
                    let sigmoid = |row| scale * kernels::sigmoid(kernels::dot(row, gate));
                    shared.weight.extend(x32.chunks_exact(h).map(sigmoid));
                }
                None => shared.weight.resize(tokens, scale),
            }
        }
        router::route(&self.spec.config, self.weights.router_bias.as_deref(), logits, self.choices.as_deref())
    }

    /// Returns an error if `saved` cannot be used for a backward pass. `what` is the name of the call. `external` is whether the call is
    /// for forward passes that the caller routed.
    fn check_saved(&self, saved: &Saved<E>, what: &'static str, external: bool) -> Result<(), MoeError> {
        let why = if saved.layer != self.id {
            "the forward pass was another layer's"
        } else if saved.stage == SavedStage::Backward {
            "the forward pass has had its backward"
        } else if saved.external != external {
            if external {
                "the layer's own router routed the forward pass"
            } else {
                "the caller routed the forward pass"
            }
        } else if self.gradients.is_none() {
            "the layer was not made for training"
        } else {
            return Ok(());
        };
        Err(MoeError::Usage { what, why: why.into() })
    }

    #[allow(clippy::too_many_arguments)]
    fn backward_pass(
        &mut self,
        experts: &[Mlp<E>],
        saved: &mut Saved<E>,
        x: &[E],
        grad_output: &[E],
        grad_input: &mut [f32],
        grad_weights: Option<&mut [f32]>,
        sink: Option<&mut GradientSink<'_>>,
    ) -> Result<(), MoeError> {
        let what = if grad_weights.is_some() { EXTERNAL } else { OWN_ROUTER };
        self.check_saved(saved, what, grad_weights.is_some())?;
        let elements = saved.routing.tokens * self.spec.config.hidden;
        for (what, got) in
            [("hidden_states", x.len()), ("grad_output", grad_output.len()), ("grad_hidden_states", grad_input.len())]
        {
            expect_len(what, got, elements)?;
        }
        if let Some(weights) = &grad_weights {
            expect_len("grad_weights", weights.len(), saved.routing.chosen.len())?;
        }
        saved.stage = SavedStage::Backward;
        let Some(mut gradients) = self.gradients.take() else { return Ok(()) };
        let LayerGradients { all, last, accumulate } = &mut gradients;
        let (into, add) = match last {
            Some(last) if *accumulate => (last, true),
            _ => (&mut *all, false),
        };
        let bytes_before = self.all_bytes_put();
        let done = self.backward_into(experts, saved, x, grad_output, grad_input, grad_weights, into, sink);
        if let (Some(last), true) = (last, add && done.is_ok()) {
            all.add(last);
        }
        self.gradients = Some(gradients);
        self.count_bytes_since(bytes_before);
        self.recorder.enter(if done.is_ok() { Phase::Idle } else { self.recorder.phase() });
        done
    }

    #[allow(clippy::too_many_arguments)]
    fn backward_into(
        &mut self,
        experts: &[Mlp<E>],
        saved: &mut Saved<E>,
        x: &[E],
        grad_output: &[E],
        grad_input: &mut [f32],
        grad_weights: Option<&mut [f32]>,
        grads: &mut Gradients,
        sink: Option<&mut GradientSink<'_>>,
    ) -> Result<(), MoeError> {
        self.recorder.enter(Phase::Router);
        grad_input.fill(0.0);
        if let Some(grad_weights) = grad_weights {
            grad_weights.fill(0.0);
            grads.replicated().for_each(|grad| grad.fill(0.0));
            let direction = Direction::Backward;
            return self.run_passes(direction, experts, saved, grad_output, grad_input, grad_weights, grads, sink);
        }
        if self.weights.shared.is_some() {
            saved.shared.g.clear();
            saved.shared.g.extend_from_slice(grad_output);
        }
        let mut d_weights = vec![0.0f32; saved.routing.chosen.len()];
        self.run_passes(Direction::Backward, experts, saved, grad_output, grad_input, &mut d_weights, grads, None)?;

        self.recorder.enter(Phase::Router);
        if self.spec.config.identity_experts > 0 {
            let (x32, g32, h) = (as_f32(x), as_f32(grad_output), self.spec.config.hidden);
            for (token, weight, choice) in identities(&saved.routing, &self.spec.config) {
                let row = token * h..(token + 1) * h;
                d_weights[choice] = kernels::dot(&g32[row.clone()], &x32[row.clone()]);
                kernels::axpy(&mut grad_input[row.clone()], weight, &g32[row]);
            }
        }
        let (config, tokens) = (&self.spec.config, saved.routing.tokens);
        let h = config.hidden;
        let mut load = Load::default();
        saved.loads.iter().for_each(|l| load.add(l));
        let d_logits = saved.routing.backward(config, &load, &d_weights);
        let x32 = as_f32(x);
        if let Some(router) = &self.weights.router {
            let ws = &mut self.scratch[0].workspace;
            f32::gemm_nn(ws, tokens, &d_logits, router, grad_input, true);
            f32::gemm_tn(ws, tokens, config.choices(), h, &d_logits, &x32, &mut grads.router, false);
        }
        if !grads.logit_bias.is_empty() {
            grads.logit_bias.fill(0.0);
            kernels::column_sum(tokens, config.choices(), &d_logits, None, &mut grads.logit_bias);
        }
        if self.weights.shared.is_some() {
            kernels::axpy(grad_input, 1.0, &saved.shared.out[..tokens * h]);
        }
        if let Some(gate) = &self.weights.shared_gate {
            grads.shared_gate.fill(0.0);
            for t in 0..tokens {
                // The row's weight is scale * gate; the scale must enter the gradient only once.
                let scale = config.shared.map_or(1.0, |s| s.scale);
                let s = saved.shared.weight[t];
                let d = saved.shared.d_weight[t] * s * (1.0 - s / scale);
                kernels::axpy(&mut grads.shared_gate, d, &x32[t * h..(t + 1) * h]);
                kernels::axpy(&mut grad_input[t * h..(t + 1) * h], d, gate);
            }
        }
        self.reduce(grads)
    }

    fn reduce(&mut self, grads: &mut Gradients) -> Result<(), MoeError> {
        if self.pe().n_pes() == 1 && self.exchange.is_none() {
            return Ok(());
        }
        self.recorder.enter(Phase::AllReduce);
        let mut all: Vec<f32> = grads.replicated().flat_map(|g| g.iter().copied()).collect();
        let deadline = self.spec.options.deadline();
        match &self.exchange {
            Some(exchange) => exchange.sum(&mut all, deadline)?,
            None => self.pe().all_reduce_sum(self.pe().world(), &mut all, deadline).map_err(|timeout| {
                let what = "its gradients of replicated weights";
                MoeError::wait(self.pe(), timeout.index, what, Phase::AllReduce, timeout)
            })?,
        }
        let mut rest = &all[..];
        for grad in grads.replicated() {
            let (head, tail) = rest.split_at(grad.len());
            grad.copy_from_slice(head);
            rest = tail;
        }
        Ok(())
    }
}

/// The choices of identity experts, as (token, weight, index in [`Routing::chosen`]).
fn identities<'r>(routing: &'r Routing, config: &LayerConfig) -> impl Iterator<Item = (usize, f32, usize)> + 'r {
    let (first, end, top_k) = (config.n_experts, config.choices(), config.router.top_k);
    let choices = routing.chosen.iter().enumerate().filter(move |(_, c)| (first..end).contains(&(**c as usize)));
    choices.map(move |(choice, _)| (choice / top_k, routing.weights[choice], choice))
}

fn not_training(what: &'static str) -> MoeError {
    MoeError::Usage { what, why: "the layer was not made for training".into() }
}

fn expect_len(what: &'static str, got: usize, expected: usize) -> Result<(), MoeError> {
    if got == expected {
        Ok(())
    } else {
        Err(MoeError::Shape { what: what.into(), got, expected: expected.to_string() })
    }
}

/// The values as f32; borrows them if they are f32 already.
fn as_f32<E: Element>(x: &[E]) -> Cow<'_, [f32]> {
    if E::NAME == <f32 as Element>::NAME {
        return Cow::Borrowed(bytemuck::cast_slice(x));
    }
    let mut wide = vec![0.0; x.len()];
    E::widen(x, &mut wide);
    Cow::Owned(wide)
}
