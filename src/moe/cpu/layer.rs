//! Construction and teardown of the CPU layer; its passes are in `pass.rs`.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use super::engine::Saved;
use super::experts::{Batch, Mlp, Scratch};
use super::kernels::Element;
use super::memory::LayerMemory;
use super::replicas::{Exchange, OneGroup};
use super::weights::Weights;
use crate::moe::spec::metrics::{NoObserver, Observer, Phase, Recorder, Traffic};
use crate::moe::spec::{ConfigError, Gradients, LayerSpec, Layout, MoeError, WeightSource};
use crate::shmem::{AsShmem, Shmem};

/// One PE's part of an MoE layer on the CPU, with elements of type `E`. `S` contains the PE's shmem handle.
///
/// Used through [`MoeLayer`](crate::moe::MoeLayer). `X` is the exchange with other EP groups. A layer is `Send` if `S` is, so it may be
/// moved to another thread.
///
/// ```
/// use aristos::moe::synthetic::{Synthetic, SyntheticSpec};
/// use aristos::moe::{Activation, Layer, LayerConfig, LayerSpec, MlpConfig, MoeLayer, RouterConfig};
///
/// let layer = LayerConfig::new(16, 4, RouterConfig::softmax(2), MlpConfig::gated(24, Activation::Silu));
/// let source = Synthetic::new(SyntheticSpec::new(layer.clone(), 1))?;
/// let (pes, tokens) = (1, 8);
/// let spec = LayerSpec::new(layer, pes, tokens);
/// let pe = aristos::shmem::threads(pes, spec.heap_bytes()?)?.remove(0);
/// let mut layer = Layer::<_, f32>::builder(spec).build(pe, &source)?;
///
/// let (x, grad_output) = (source.hidden_states(0..tokens), source.grad_output(0..tokens));
/// let (mut output, mut grad_input) = (vec![0.0; x.len()], vec![0.0; x.len()]);
/// let mut saved = layer.forward(&x, &mut output)?;
/// layer.backward(&mut saved, &x, &grad_output, &mut grad_input)?;
/// layer.recycle(saved);
/// assert!(layer.gradients()?.router.iter().any(|&g| g != 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Layer<S: AsShmem, E: Element, X: Exchange = OneGroup> {
    pub(super) shmem: S,
    pub(super) spec: LayerSpec,
    pub(super) memory: LayerMemory,
    pub(super) weights: Weights<E>,
    pub(super) gradients: Option<LayerGradients>,
    /// One element per thread.
    pub(super) scratch: Vec<Scratch>,
    pub(super) recorder: Recorder,
    /// Unique in this process. A [`Saved`] stores the id of its layer.
    pub(super) id: u64,
    pub(super) passes: u64,
    pub(super) forwards: u64,
    pub(super) most_tokens: usize,
    pub(super) credits_used: Vec<u64>,
    pub(super) stream_credits: Vec<u64>,
    pub(super) pool: Vec<Saved<E>>,
    /// By local expert: buffers that a batch needs only during a pass. All passes use the same buffers.
    pub(super) pass_memory: Vec<Batch<E>>,
    pub(super) exchange: Option<X>,
    /// Bytes put since the last [`PassOutcome`](crate::moe::metrics::PassOutcome), including gradient sums: all bytes, and those over a
    /// network.
    pub(super) pass_bytes: [u64; 2],
    /// Experts of the next passes' tokens that replace the router's choices, `[tokens, top_k]`.
    pub(super) choices: Option<Vec<u32>>,
    /// Number of pieces of moved experts sent since the start, equal on all PEs.
    pub(super) pieces: u64,
}

/// An id that no other layer of this process has.
pub(super) fn new_id() -> u64 {
    static LAYERS: AtomicU64 = AtomicU64::new(1);
    LAYERS.fetch_add(1, Ordering::Relaxed)
}

/// Gradients that backward passes compute.
pub(super) struct LayerGradients {
    pub(super) all: Gradients,
    /// With `accumulate`: the gradients of one backward, which are then added to `all`.
    pub(super) last: Option<Gradients>,
    pub(super) accumulate: bool,
}

/// Builder of a [`Layer`].
pub struct LayerBuilder<S, E, X = OneGroup> {
    spec: LayerSpec,
    observer: Box<dyn Observer>,
    exchange: Option<X>,
    types: PhantomData<fn() -> (S, E)>,
}

impl<S: AsShmem, E: Element> Layer<S, E> {
    /// Starts a layer of `spec`; [`LayerBuilder::build`] completes it.
    pub fn builder(spec: LayerSpec) -> LayerBuilder<S, E> {
        LayerBuilder { spec, observer: Box::new(NoObserver), exchange: None, types: PhantomData }
    }
}

impl<S: AsShmem, E: Element, X: Exchange> LayerBuilder<S, E, X> {
    /// Reports each phase that the layer enters to `observer`.
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        LayerBuilder { observer: Box::new(observer), ..self }
    }

    /// Connects the layer to the layers of other EP groups that hold the same experts. `spec` is then the spec of one group. Weight
    /// gradients are summed over all groups, and losses and capacity cover the tokens of all groups. Training with replicas needs an
    /// exchange even in a single group.
    pub fn exchange<Y: Exchange>(self, exchange: Y) -> LayerBuilder<S, E, Y> {
        let LayerBuilder { spec, observer, types, .. } = self;
        LayerBuilder { spec, observer, exchange: Some(exchange), types }
    }

    /// Loads the weights that this PE holds from `source`, and allocates [`LayerSpec::heap_bytes`] of symmetric memory in the heap of
    /// `shmem` (collective).
    ///
    /// # Errors
    ///
    /// Returns an error if `spec` is inconsistent, does not match the number of PEs or `E`, if weights cannot be
    /// loaded, if the heap is too small, or if a peer does not join.
    pub fn build(self, shmem: S, source: &dyn WeightSource) -> Result<Layer<S, E, X>, MoeError> {
        self.build_with(shmem, |spec, me| Weights::load(source, spec, me))
    }

    /// Like [`build`](Self::build), for a layer without weights of its own. The caller routes tokens, passes the experts to each pass
    /// ([`Layer::experts_borrowed`]), and receives the experts' gradients. One such layer can serve all layers of a model that have the
    /// same configuration.
    ///
    /// # Errors
    ///
    /// Returns the errors of `build`, and an error if `spec` has a router or a shared expert.
    pub fn build_without_weights(self, shmem: S) -> Result<Layer<S, E, X>, MoeError> {
        let config = &self.spec.config;
        if !config.replicated_weights().is_empty() || !config.router.external {
            let (value, expected) = ("given".into(), "none where each pass brings its experts".into());
            return Err(ConfigError { field: "a router or shared expert", value, expected }.into());
        }
        let mut layer = self.build_with(shmem, |_, _| Ok(Weights::none()))?;
        if let Some(gradients) = &mut layer.gradients {
            gradients.all.experts.clear();
        }
        Ok(layer)
    }

    fn build_with(
        self,
        shmem: S,
        weights: impl FnOnce(&LayerSpec, usize) -> Result<Weights<E>, MoeError>,
    ) -> Result<Layer<S, E, X>, MoeError> {
        let LayerBuilder { spec, observer, exchange, .. } = self;
        let pe = shmem.as_shmem();
        let (me, n) = (pe.my_pe(), pe.n_pes());
        spec.validate(n)?;
        let scratch = (0..spec.options.threads).map(|_| Scratch::default()).collect();
        if spec.dtype.name() != E::NAME {
            let (value, expected) = (spec.dtype.name().into(), E::NAME.into());
            return Err(ConfigError { field: "dtype", value, expected }.into());
        }
        if spec.training && spec.placement.has_replicas() && exchange.is_none() {
            let (field, value) = ("the placement", "with replicas, and the layer without an exchange".into());
            let expected = "an exchange that sums the replicas' gradients (`Replicas`)".into();
            return Err(ConfigError { field, value, expected }.into());
        }
        let weights = weights(&spec, me)?;
        let gradients = spec.training.then(|| LayerGradients {
            all: Gradients::zeros(&spec.config, &spec.placement, me),
            last: None,
            accumulate: false,
        });
        let memory = LayerMemory::new(pe, spec.layout()?)?;
        let stream_credits = vec![0; memory.layout.served * memory.layout.siblings];
        // No PE may signal before the signal words of all PEs are zero.
        memory.clear_signals(pe);
        pe.barrier_all(spec.options.deadline())
            .map_err(|timeout| MoeError::wait(pe, timeout.index, "to make the layer", Phase::Idle, timeout))?;
        Ok(Layer {
            shmem,
            spec,
            memory,
            weights,
            gradients,
            scratch,
            recorder: Recorder::new(observer),
            id: new_id(),
            passes: 0,
            forwards: 0,
            most_tokens: 0,
            credits_used: vec![0; n],
            stream_credits,
            pool: Vec::new(),
            pass_memory: Vec::new(),
            exchange,
            pass_bytes: [0; 2],
            choices: None,
            pieces: 0,
        })
    }
}

impl<S: AsShmem, E: Element, X: Exchange> Layer<S, E, X> {
    pub(super) fn pe(&self) -> &Shmem<S::Transport> {
        self.shmem.as_shmem()
    }

    /// Sizes of the symmetric memory.
    pub fn layout(&self) -> &Layout {
        &self.memory.layout
    }

    /// Maximum tokens of a PE in the largest batch that the layer has run, the same on every PE of the group that shares the experts. If it exceeds [`LayerSpec::max_tokens`], such batches took several
    /// passes, and a layer with a larger maximum is faster.
    pub fn most_tokens(&self) -> usize {
        self.most_tokens
    }

    /// The local experts, in the order of [`Placement::experts`](crate::moe::Placement::experts).
    pub fn local_experts(&self) -> &[Mlp<E>] {
        &self.weights.experts
    }

    /// Frees the symmetric memory (collective), and returns the shmem handle. A layer that is dropped instead leaves
    /// its memory allocated until the heap is freed.
    ///
    /// # Errors
    ///
    /// Returns an error if a peer does not join.
    pub fn free(self) -> Result<S, MoeError> {
        self.group_barrier("to free the layer")?;
        self.memory.free(self.pe());
        Ok(self.shmem)
    }

    /// Waits for all PEs of the group. `what` completes the error message of a timeout.
    pub(super) fn group_barrier(&self, what: &'static str) -> Result<(), MoeError> {
        let shmem = self.pe();
        shmem
            .barrier_all(self.spec.options.deadline())
            .map_err(|timeout| MoeError::wait(shmem, timeout.index, what, self.recorder.phase(), timeout))
    }

    /// Bytes put to other PEs since the start, including gradient sums.
    pub fn bytes_put(&self) -> u64 {
        self.all_bytes_put()[0]
    }

    /// Like [`bytes_put`](Self::bytes_put); also returns how many of these bytes were sent over a network.
    pub(super) fn all_bytes_put(&self) -> [u64; 2] {
        let [all, network] = self.exchange.as_ref().map_or([0; 2], Exchange::bytes_put);
        [all + self.pe().bytes_put(), network + self.pe().network_bytes_put()]
    }

    /// Returns and resets the time by [`Phase::code`], nanoseconds, and the traffic of the passes since the last call. For a caller that does
    /// not finish passes by [`MoeLayer::finish`](super::super::MoeLayer::finish), which takes both.
    pub fn take_measured(&mut self) -> ([u64; Phase::ALL.len()], Traffic) {
        self.recorder.take()
    }

    /// Adds the bytes put since `before` to `pass_bytes`.
    pub(super) fn count_bytes_since(&mut self, before: [u64; 2]) {
        let now = self.all_bytes_put();
        self.pass_bytes = [0, 1].map(|kind| self.pass_bytes[kind] + now[kind] - before[kind]);
    }
}
