//! The layer: weights and symmetric memory of one PE, and its forward and backward.

use std::borrow::Cow;

use super::engine::{Direction, Engine, Progress, Saved};
use super::experts::{Mlp, Scratch};
use super::kernels::{self, Element};
use super::memory::Memory;
use super::replicas::{Exchange, Replicas};
use super::router::{self, Routing};
use crate::moe::spec::metrics::{Observer, Phase, Recorder};
use crate::moe::spec::{
    Gradients, LayerConfig, Layout, Load, MlpConfig, MlpGradients, MlpId, Mode, MoeError, Options, Placement, Proj,
    WeightId, WeightSource, proj_index,
};
use crate::shmem::{Cmp, Shmem, SignalOp, Transport, Wait};

/// One PE's part of a MoE layer whose experts are spread over all PEs.
///
/// Every PE makes the layer with the same configuration, placement, `max_tokens` and options, and calls
/// [`Layer::forward`] and [`Layer::backward`] in the same order; how many tokens it brings (0 included) is its own affair.
pub struct Layer<'s, 'o, T: Transport, E: Element> {
    shmem: &'s Shmem<T>,
    config: LayerConfig,
    placement: Placement,
    options: Options,
    memory: Memory,
    /// `[n_experts, hidden]`.
    router: <f32 as Element>::Weight,
    router_bias: Option<Vec<f32>>,
    experts: Vec<Mlp<E>>,
    shared: Option<Mlp<E>>,
    shared_gate: Option<Vec<f32>>,
    scratch: Scratch,
    /// Where the time goes and what goes over the wire.
    pub recorder: Recorder<'o>,
    passes: u64,
    forwards: u64,
    credits_used: Vec<u64>,
    spare: Vec<Saved<E>>,
    exchange: Option<Box<dyn Exchange + 's>>,
}

impl<'s, 'o, T: Transport, E: Element> Layer<'s, 'o, T, E> {
    /// Loads the weights that this PE owns or shares and allocates the symmetric memory (collective). Tells
    /// `observer` of each phase it enters.
    ///
    /// # Errors
    /// A configuration or options that cannot be, a placement of other PEs or experts than there are, weights that
    /// cannot be loaded, a heap that is too small, or a peer that does not
    /// come.
    pub fn new(
        shmem: &'s Shmem<T>,
        source: &dyn WeightSource,
        placement: Placement,
        max_tokens: usize,
        options: Options,
        observer: &'o dyn Observer,
    ) -> Result<Self, MoeError> {
        let config = source.config().clone();
        config.validate()?;
        options.validate()?;
        for (what, got, expected) in [
            ("the placement's list of PEs", placement.n_pes(), shmem.n_pes()),
            ("the placement's list of experts", placement.n_experts(), config.n_experts),
        ] {
            expect_len(what, got, expected)?;
        }
        let me = shmem.my_pe();
        let load = |id| source.load(id).map_err(MoeError::Weights);
        let router = f32::prepare(&load(WeightId::Router)?, config.n_experts, config.hidden);
        let router_bias = config.router.correction_bias.then(|| load(WeightId::RouterBias)).transpose()?;
        let gated = config.shared.is_some_and(|s| s.sigmoid_gate);
        let shared_gate = gated.then(|| load(WeightId::SharedGate)).transpose()?;
        let mlp = |which| Mlp::load(source, which).map_err(MoeError::Weights);
        let experts = placement.experts(me).iter().map(|&e| mlp(MlpId::Routed(e))).collect::<Result<_, _>>()?;
        let shared = config.shared.is_some().then(|| mlp(MlpId::Shared)).transpose()?;

        let layout = Layout::new(&config, &placement, size_of::<E>(), max_tokens, &options)?;
        let memory = Memory::new(shmem, layout)?;
        let layer = Layer {
            shmem,
            config,
            placement,
            options,
            memory,
            router,
            router_bias,
            experts,
            shared,
            shared_gate,
            scratch: Scratch::default(),
            recorder: Recorder::new(observer),
            passes: 0,
            forwards: 0,
            credits_used: vec![0; shmem.n_pes()],
            spare: Vec::new(),
            exchange: None,
        };
        // Nobody may signal before every PE's signal words are zero.
        layer.memory.clear_signals(shmem);
        shmem
            .barrier_all(layer.options.deadline())
            .map_err(|timeout| MoeError::wait(shmem, timeout.index, "to make the layer", Phase::Idle, timeout))?;
        Ok(layer)
    }

    /// The layer's configuration.
    pub fn config(&self) -> &LayerConfig {
        &self.config
    }

    /// Where the experts live.
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// The sizes of the symmetric memory.
    pub fn layout(&self) -> &Layout {
        &self.memory.layout
    }

    /// The local experts' weights.
    pub fn experts(&self) -> &[Mlp<E>] {
        &self.experts
    }

    /// Makes it one with the layers of other EP groups, which hold the same experts, where this layer is over one of several
    /// groups of a world: gradients of weights are then sums over all groups, losses and capacity over all groups' tokens. To
    /// be called before the first pass, on every PE of the world.
    pub fn join<W: Transport>(&mut self, replicas: Replicas<'s, W>) {
        self.exchange = Some(Box::new(replicas));
    }

    /// Changes the mode of the passes from now on (on every PE alike).
    pub fn set_mode(&mut self, mode: Mode) {
        self.options.mode = mode;
    }

    /// `output = sum over chosen experts of weight * expert(x), plus the shared expert`, for this PE's tokens; `x` and
    /// `output` are `[tokens, hidden]`. Returns what [`Layer::backward`] needs; give it to [`Layer::recycle`] if there is
    /// to be no backward.
    ///
    /// # Errors
    /// Arguments of the wrong length; a peer that does not do its part within the wait limit, or sends what cannot be.
    /// After an error the layer is not usable: the PEs may be at different places of the protocol.
    pub fn forward(&mut self, x: &[E], output: &mut [f32]) -> Result<Saved<E>, MoeError> {
        let saved = self.forward_pass(x, output)?;
        self.recorder.enter(Phase::Idle);
        Ok(saved)
    }

    fn forward_pass(&mut self, x: &[E], output: &mut [f32]) -> Result<Saved<E>, MoeError> {
        let (h, e, me) = (self.config.hidden, self.config.n_experts, self.shmem.my_pe());
        let max = self.memory.layout.max_tokens * h;
        if !x.len().is_multiple_of(h) || x.len() > max {
            let expected = format!("a multiple of {h}, the hidden size, up to {max}");
            return Err(MoeError::Shape { what: "hidden_states", got: x.len(), expected });
        }
        expect_len("output", output.len(), x.len())?;
        self.recorder.enter(Phase::Router);
        self.passes += 1;
        self.forwards += 1;
        let tokens = x.len() / h;
        let mut saved = self.spare.pop().unwrap_or_default();
        saved.batches.resize_with(self.experts.len(), Default::default);
        saved.shared.rows = tokens;
        saved.shared.x.clear();
        saved.shared.x.extend_from_slice(x);

        let x32 = as_f32(x);
        let mut logits = vec![0.0f32; tokens * e];
        f32::gemm_nt(&mut self.scratch.workspace, tokens, &x32, &self.router, &mut logits, false);
        saved.routing = router::route(&self.config, self.router_bias.as_deref(), logits);
        self.apply_capacity(&mut saved.routing)?;
        saved.loads.clear();
        saved.loads.resize(self.shmem.n_pes(), Load::default());
        if self.config.has_losses() {
            saved.loads[me] = saved.routing.load(&self.config);
        }
        saved.routes = router::routes(&saved.routing, &self.placement, self.config.router.top_k);
        saved.shared.weight.clear();
        match &self.shared_gate {
            Some(gate) => {
                let sigmoid = |row| kernels::sigmoid(kernels::dot(row, gate));
                saved.shared.weight.extend(x32.chunks_exact(h).map(sigmoid));
            }
            None => saved.shared.weight.resize(tokens, 1.0),
        }

        output.fill(0.0);
        self.run_pass(Direction::Forward, &mut saved, x, output, &mut [], &mut Gradients::default())?;
        if let (Some(exchange), true) = (&self.exchange, self.config.has_losses()) {
            self.recorder.enter(Phase::AllReduce);
            saved.loads = exchange.loads(&saved.loads[me], self.options.deadline())?;
        }
        self.recorder.enter(Phase::Combine);
        if self.shared.is_some() {
            let rows = output.chunks_exact_mut(h).zip(saved.shared.out.chunks_exact(h));
            for ((out, shared), &weight) in rows.zip(&saved.shared.weight) {
                kernels::axpy(out, weight, shared);
            }
        }
        Ok(saved)
    }

    /// From the gradient of the output, the gradient of the input (both `[tokens, hidden]`) and of the weights, by the
    /// routing of the forward pass that returned `saved`. The losses count with their coefficients.
    ///
    /// # Errors
    /// As for [`Layer::forward`]; `grads` in other shapes than [`Gradients::zeros`] gives.
    pub fn backward(
        &mut self,
        mut saved: Saved<E>,
        grad_output: &[E],
        grad_input: &mut [f32],
        grads: &mut Gradients,
    ) -> Result<(), MoeError> {
        self.backward_pass(&mut saved, grad_output, grad_input, grads)?;
        self.recorder.enter(Phase::Idle);
        self.recycle(saved);
        Ok(())
    }

    fn backward_pass(
        &mut self,
        saved: &mut Saved<E>,
        grad_output: &[E],
        grad_input: &mut [f32],
        grads: &mut Gradients,
    ) -> Result<(), MoeError> {
        let (h, tokens) = (self.config.hidden, saved.routing.tokens);
        for (what, got) in [("grad_output", grad_output.len()), ("grad_hidden_states", grad_input.len())] {
            expect_len(what, got, tokens * h)?;
        }
        self.check_gradients(grads)?;
        self.recorder.enter(Phase::Router);
        self.passes += 1;
        if self.shared.is_some() {
            saved.shared.g.clear();
            saved.shared.g.extend_from_slice(grad_output);
        }
        let mut d_weights = vec![0.0f32; saved.routing.chosen.len()];
        grad_input.fill(0.0);
        self.run_pass(Direction::Backward, saved, grad_output, grad_input, &mut d_weights, grads)?;

        self.recorder.enter(Phase::Router);
        let mut load = Load::default();
        saved.loads.iter().for_each(|l| load.add(l));
        let d_logits = saved.routing.backward(&self.config, &load, &d_weights);
        let x32 = as_f32(&saved.shared.x);
        let ws = &mut self.scratch.workspace;
        f32::gemm_nn(ws, tokens, &d_logits, &self.router, grad_input, true);
        f32::gemm_tn(ws, tokens, self.config.n_experts, h, &d_logits, &x32, &mut grads.router, false);
        if self.shared.is_some() {
            kernels::axpy(grad_input, 1.0, &saved.shared.out[..tokens * h]);
        }
        if let Some(gate) = &self.shared_gate {
            grads.shared_gate.fill(0.0);
            for t in 0..tokens {
                let s = saved.shared.weight[t];
                let d = saved.shared.d_weight[t] * s * (1.0 - s);
                kernels::axpy(&mut grads.shared_gate, d, &x32[t * h..(t + 1) * h]);
                kernels::axpy(&mut grad_input[t * h..(t + 1) * h], d, gate);
            }
        }
        self.reduce(grads)
    }

    /// Checks that `grads` has the shapes of [`Gradients::zeros`].
    fn check_gradients(&self, grads: &Gradients) -> Result<(), MoeError> {
        let h = self.config.hidden;
        expect_len("the router's gradient", grads.router.len(), self.config.n_experts * h)?;
        expect_len("the gradients' list of experts", grads.experts.len(), self.experts.len())?;
        for expert in &grads.experts {
            check_mlp_gradients(
                ["an expert's gradient", "an expert's bias gradient"],
                expert,
                Some(&self.config.expert),
                h,
            )?;
        }
        let shared = self.config.shared.map(|s| s.mlp);
        let what = ["the shared expert's gradient", "the shared expert's bias gradient"];
        check_mlp_gradients(what, &grads.shared, shared.as_ref(), h)?;
        let gate = self.shared_gate.as_ref().map_or(0, Vec::len);
        expect_len("the gradient of the shared expert's gate", grads.shared_gate.len(), gate)
    }

    /// Keeps the memory of a forward pass for the next one.
    pub fn recycle(&mut self, saved: Saved<E>) {
        self.spare.push(saved);
    }

    /// Frees the symmetric memory (collective). The heap's owner frees it otherwise.
    ///
    /// # Errors
    /// When a peer does not come.
    pub fn free(self) -> Result<(), MoeError> {
        self.shmem
            .barrier_all(self.options.deadline())
            .map_err(|timeout| MoeError::wait(self.shmem, timeout.index, "to free the layer", Phase::Idle, timeout))?;
        self.memory.free(self.shmem);
        Ok(())
    }

    fn run_pass(
        &mut self,
        direction: Direction,
        saved: &mut Saved<E>,
        input: &[E],
        output: &mut [f32],
        d_weights: &mut [f32],
        grads: &mut Gradients,
    ) -> Result<(), MoeError> {
        let mut exchange = self.exchange.as_deref_mut().filter(|_| direction == Direction::Backward);
        if let Some(exchange) = &mut exchange {
            exchange.begin();
        }
        Engine {
            shmem: self.shmem,
            memory: &self.memory,
            config: &self.config,
            placement: &self.placement,
            options: &self.options,
            experts: &self.experts,
            shared: self.shared.as_ref(),
            scratch: &mut self.scratch,
            rec: &mut self.recorder,
            credits_used: &mut self.credits_used,
            saved,
            direction,
            pass: self.passes,
            forward: self.forwards,
            input,
            output,
            d_weights,
            expert_grads: &mut grads.experts,
            shared_grads: &mut grads.shared,
            exchange: exchange.map(|exchange| exchange as _),
            progress: Progress::default(),
        }
        .run()?;
        if direction == Direction::Backward
            && let Some(exchange) = &mut self.exchange
        {
            self.recorder.enter(Phase::AllReduce);
            exchange.finish(&mut grads.experts, self.options.deadline())?;
        }
        Ok(())
    }

    /// Under a capacity factor, drops the pairs beyond each expert's capacity, by global token index. Costs an exchange of
    /// counts before dispatch, because a PE must know what the PEs before it send.
    fn apply_capacity(&mut self, routing: &mut Routing) -> Result<(), MoeError> {
        let Some(factor) = self.config.capacity_factor else { return Ok(()) };
        let (top_k, e) = (self.config.router.top_k, self.config.n_experts);
        let own = routing.counts(e);
        let (all, me) = match &self.exchange {
            Some(exchange) => exchange.counts(&own, self.options.deadline())?,
            None => (self.exchange_counts(own)?, self.shmem.my_pe()),
        };
        let pairs: u64 = all.iter().flatten().map(|&c| u64::from(c)).sum();
        let mut before = vec![0u64; e];
        for counts in &all[..me] {
            before.iter_mut().zip(counts).for_each(|(b, &c)| *b += u64::from(c));
        }
        let tokens = pairs / top_k as u64;
        let capacity = (factor * top_k as f64 * tokens as f64 / e as f64).ceil() as u64;
        routing.apply_capacity(before.into_iter().map(|b| capacity.saturating_sub(b)).collect());
        Ok(())
    }

    /// Every PE's counts, in the order of PEs.
    fn exchange_counts(&mut self, own: Vec<u32>) -> Result<Vec<Vec<u32>>, MoeError> {
        let (me, n, e) = (self.shmem.my_pe(), self.shmem.n_pes(), own.len());
        for pe in (0..n).filter(|&pe| pe != me) {
            let at = self.memory.capacity_counts(me, pe);
            let signal = self.memory.capacity_signal(me, pe);
            self.shmem.put_signal(at, &own, signal, self.forwards, SignalOp::Set, pe);
            let traffic = &mut self.recorder.traffic;
            traffic.header_bytes += 4 * e as u64;
            traffic.puts += 1;
            traffic.signals += 1;
        }
        let mut all = vec![vec![0u32; e]; n];
        for (pe, counts) in all.iter_mut().enumerate().filter(|(pe, _)| *pe != me) {
            let signal = self.memory.capacity_signal(pe, me);
            let phase = self.recorder.enter(Phase::Waiting);
            self.shmem
                .wait_until(Wait { signal, cmp: Cmp::Ge, value: self.forwards }, self.options.deadline())
                .map_err(|timeout| MoeError::wait(self.shmem, pe, "its counts for the capacity", phase, timeout))?;
            self.recorder.enter(phase);
            self.shmem.get(counts, self.memory.capacity_counts(pe, me), me);
        }
        all[me] = own;
        Ok(all)
    }

    /// Sums the gradients of replicated weights over all PEs.
    fn reduce(&mut self, grads: &mut Gradients) -> Result<(), MoeError> {
        if self.shmem.n_pes() == 1 && self.exchange.is_none() {
            return Ok(());
        }
        self.recorder.enter(Phase::AllReduce);
        let mut all: Vec<f32> = grads.replicated().flat_map(|g| g.iter().copied()).collect();
        let deadline = self.options.deadline();
        match &self.exchange {
            Some(exchange) => exchange.sum(&mut all, deadline)?,
            None => self.shmem.all_reduce_sum(self.shmem.world(), &mut all, deadline).map_err(|timeout| {
                let what = "its gradients of replicated weights";
                MoeError::wait(self.shmem, timeout.index, what, Phase::AllReduce, timeout)
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

fn expect_len(what: &'static str, got: usize, expected: usize) -> Result<(), MoeError> {
    if got == expected { Ok(()) } else { Err(MoeError::Shape { what, got, expected: expected.to_string() }) }
}

/// Checks the gradients of one MLP, empty where it does not have the projection or there is no MLP; `what` is what to
/// call those of matrices and of biases.
fn check_mlp_gradients(
    what: [&'static str; 2],
    grads: &MlpGradients,
    mlp: Option<&MlpConfig>,
    hidden: usize,
) -> Result<(), MoeError> {
    for proj in [Proj::Gate, Proj::Up, Proj::Down] {
        let [out, inp] = match mlp {
            Some(mlp) if mlp.projections().contains(&proj) => mlp.shape(proj, hidden),
            _ => [0, 0],
        };
        let bias = if mlp.is_some_and(|mlp| mlp.bias) { out } else { 0 };
        let i = proj_index(proj);
        expect_len(what[0], grads.matrix[i].len(), out * inp)?;
        expect_len(what[1], grads.bias[i].len(), bias)?;
    }
    Ok(())
}

/// The values as f32, without a copy where they are f32.
fn as_f32<E: Element>(x: &[E]) -> Cow<'_, [f32]> {
    if E::NAME == <f32 as Element>::NAME {
        return Cow::Borrowed(bytemuck::cast_slice(x));
    }
    let mut wide = vec![0.0; x.len()];
    E::widen(x, &mut wide);
    Cow::Owned(wide)
}
