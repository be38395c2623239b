//! The passes of a batch: one per block of tokens, as many as the PE with the most tokens needs.

use super::engine::{Block, Direction, Engine, ExpertGradients, PassProgress, Saved};
use super::experts::{Batch, Mlp};
use super::kernels::Element;
use super::layer::Layer;
use super::relay::RelayMap;
use super::replicas::Exchange;
use super::router::{self, Routes};
use crate::moe::spec::metrics::Phase;
use crate::moe::spec::{GradientSink, Gradients, LayerConfig, LayerSpec, MoeError};
use crate::shmem::AsShmem;

impl<S: AsShmem, E: Element, X: Exchange> Layer<S, E, X> {
    /// The rows of this PE's block `number`, to be sent as in `routes`.
    pub(super) fn block(&self, number: usize, mut routes: Vec<Routes>) -> Block {
        let merge = |relays: RelayMap| relays.merge(&mut routes, &self.spec.placement);
        let announced = self.relay_map().map_or(Vec::new(), merge);
        Block { number, routes, announced, ..Block::default() }
    }

    /// Runs one pass per block of tokens. All PEs run the same number of passes: that of the PE with the most tokens, which is known once
    /// all headers of the first pass have been read.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_passes(
        &mut self,
        direction: Direction,
        experts: &[Mlp<E>],
        saved: &mut Saved<E>,
        input: &[E],
        output: &mut [f32],
        d_weights: &mut [f32],
        grads: &mut Gradients,
        mut sink: Option<&mut GradientSink<'_>>,
    ) -> Result<(), MoeError> {
        self.pass_memory.resize_with(experts.len(), Batch::default);
        let batches = saved.batches.iter_mut().zip(&mut self.pass_memory);
        batches.for_each(|(batch, memory)| batch.swap_pass_memory(memory));
        if let (Some(exchange), Direction::Backward) = (&mut self.exchange, direction) {
            exchange.begin();
        }
        let (mut number, mut done) = (0, Ok(()));
        while done.is_ok() && number < self.memory.layout.blocks(saved.most_tokens) {
            if number == saved.blocks.len() {
                saved.blocks.push(self.block(number, router::no_routes(self.pe().n_pes())));
            }
            let mut block = std::mem::take(&mut saved.blocks[number]);
            done = self.run_pass(direction, experts, saved, &mut block, input, output, d_weights, grads, &mut sink);
            saved.blocks[number] = block;
            number += 1;
        }
        let batches = saved.batches.iter_mut().zip(&mut self.pass_memory);
        batches.for_each(|(batch, memory)| batch.swap_pass_memory(memory));
        done?;
        if let (Some(exchange), Direction::Backward) = (&mut self.exchange, direction) {
            self.recorder.enter(Phase::AllReduce);
            exchange.finish(&mut grads.experts, self.spec.options.deadline())?;
        }
        self.most_tokens = self.most_tokens.max(saved.most_tokens);
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn run_pass(
        &mut self,
        direction: Direction,
        experts: &[Mlp<E>],
        saved: &mut Saved<E>,
        block: &mut Block,
        input: &[E],
        output: &mut [f32],
        d_weights: &mut [f32],
        grads: &mut Gradients,
        sink: &mut Option<&mut GradientSink<'_>>,
    ) -> Result<(), MoeError> {
        let (layout, is_forward) = (&self.memory.layout, direction == Direction::Forward);
        let LayerConfig { hidden, router, .. } = &self.spec.config;
        let tokens = layout.block(saved.routing.tokens, block.number);
        let rows = tokens.start * hidden..tokens.end * hidden;
        let pairs = if is_forward { 0..0 } else { tokens.start * router.top_k..tokens.end * router.top_k };
        let is_last = block.number + 1 == layout.blocks(saved.most_tokens);
        self.passes += 1;
        self.forwards += u64::from(is_forward);
        let relay_map = self.relay_map();
        Engine {
            relay_map,
            stream_credits: &mut self.stream_credits,
            shmem: self.shmem.as_shmem(),
            memory: &self.memory,
            config: &self.spec.config,
            placement: &self.spec.placement,
            options: &self.spec.options,
            experts,
            // The first pass computes the shared expert for all tokens.
            shared: self.weights.shared.as_ref().filter(|_| !saved.external && block.number == 0),
            scratch: &mut self.scratch,
            rec: &mut self.recorder,
            credits_used: &mut self.credits_used,
            saved,
            block,
            is_last,
            direction,
            pass: self.passes,
            forward: self.forwards,
            input: &input[rows.clone()],
            output: &mut output[rows],
            d_weights: &mut d_weights[pairs],
            expert_grads: match sink {
                Some(sink) => ExpertGradients::Sink(sink),
                None => ExpertGradients::Own(&mut grads.experts),
            },
            shared_grads: &mut grads.shared,
            exchange: self.exchange.as_mut().filter(|_| !is_forward).map(|exchange| exchange as _),
            progress: PassProgress::default(),
        }
        .run()
    }

    /// The relays, if rows are sent to another host only once.
    fn relay_map(&self) -> Option<RelayMap> {
        let LayerSpec { options, placement, .. } = &self.spec;
        options.hosts.relays().then(|| RelayMap::new(&options.hosts, placement, self.pe().my_pe()))
    }
}
