//! The layer on a CPU: how it is made and freed; its passes are in `pass.rs`.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use super::engine::Saved;
use super::experts::{Batch, Mlp, Scratch};
use super::kernels::Element;
use super::memory::LayerMemory;
use super::replicas::{Exchange, OneGroup};
use super::weights::Weights;
use crate::moe::spec::metrics::{Observer, Phase, Recorder, Unobserved};
use crate::moe::spec::{ConfigError, Gradients, LayerSpec, Layout, MoeError, WeightSource};
use crate::shmem::{AsShmem, Shmem};

/// One PE's part of a MoE layer on the CPU, over the one-sided layer that `S` holds, with elements `E`.
///
/// Used through [`MoeLayer`](crate::moe::MoeLayer). `X` is the exchange with other EP groups, where there are any. A layer may be used from another
/// thread than the one that made it: it is `Send` where `S` is.
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
    /// One for each thread.
    pub(super) scratch: Vec<Scratch>,
    pub(super) recorder: Recorder,
    /// Which layer a [`Saved`] belongs to.
    pub(super) id: u64,
    pub(super) passes: u64,
    pub(super) forwards: u64,
    pub(super) credits_used: Vec<u64>,
    pub(super) stream_credits: Vec<u64>,
    pub(super) spare: Vec<Saved<E>>,
    /// By local expert, the memory that a batch needs during a pass only: all passes share it.
    pub(super) pass_memory: Vec<Batch<E>>,
    pub(super) exchange: Option<X>,
    /// What passes since the last outcome put to other PEs, the sums of gradients included.
    pub(super) pass_bytes: [u64; 2],
    /// The experts of the next passes' tokens, where the router is not to choose them.
    pub(super) choices: Option<Vec<u32>>,
    /// Pieces of experts that have moved, on all PEs alike.
    pub(super) pieces: u64,
}

/// No other layer of this process has it.
pub(super) fn new_id() -> u64 {
    static LAYERS: AtomicU64 = AtomicU64::new(1);
    LAYERS.fetch_add(1, Ordering::Relaxed)
}

/// What backward passes leave.
pub(super) struct LayerGradients {
    pub(super) all: Gradients,
    /// Where a backward computes while `accumulate` is on; made when it is first turned on.
    pub(super) last: Option<Gradients>,
    pub(super) accumulate: bool,
}

/// Makes a [`Layer`].
pub struct LayerBuilder<S, E, X = OneGroup> {
    spec: LayerSpec,
    observer: Box<dyn Observer>,
    exchange: Option<X>,
    types: PhantomData<fn() -> (S, E)>,
}

impl<S: AsShmem, E: Element> Layer<S, E> {
    /// Begins to make a layer by `spec`; [`LayerBuilder::build`] makes it.
    pub fn builder(spec: LayerSpec) -> LayerBuilder<S, E> {
        LayerBuilder { spec, observer: Box::new(Unobserved), exchange: None, types: PhantomData }
    }
}

impl<S: AsShmem, E: Element, X: Exchange> LayerBuilder<S, E, X> {
    /// Tells `observer` of each phase that the layer enters.
    pub fn observer(self, observer: impl Observer + 'static) -> Self {
        LayerBuilder { observer: Box::new(observer), ..self }
    }

    /// Makes it one with the layers of other EP groups, which hold the same experts, where `spec` is of one of several groups
    /// of a world: gradients of weights are then sums over all groups, losses and capacity over all groups' tokens. A placement with
    /// replicas needs it for training, if there is one group only.
    pub fn exchange<Y: Exchange>(self, exchange: Y) -> LayerBuilder<S, E, Y> {
        let LayerBuilder { spec, observer, types, .. } = self;
        LayerBuilder { spec, observer, exchange: Some(exchange), types }
    }

    /// Loads the weights that this PE owns or shares from `source` and allocates the symmetric memory in the heap of `shmem`
    /// (collective), which needs [`LayerSpec::heap_bytes`].
    ///
    /// # Errors
    /// A `spec` that is not consistent or not of as many PEs as there are, or of another element type than `E`; weights that
    /// cannot be loaded; a heap that is too small; a peer that does not come.
    pub fn build(self, shmem: S, source: &dyn WeightSource) -> Result<Layer<S, E, X>, MoeError> {
        self.build_with(shmem, |spec, me| Weights::load(source, spec, me))
    }

    /// As [`build`](Self::build), of a layer without weights of its own: the caller routes, brings the experts to each pass
    /// ([`Layer::experts_lent`]) and takes their gradients. One such layer may serve all of a model's that are alike.
    ///
    /// # Errors
    /// As for `build`; a `spec` with a router or a shared expert.
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
        // Nobody may signal before every PE's signal words are zero.
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
            credits_used: vec![0; n],
            stream_credits,
            spare: Vec::new(),
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

    /// The sizes of the symmetric memory.
    pub fn layout(&self) -> &Layout {
        &self.memory.layout
    }

    /// The local experts, in the order of [`Placement::experts`](crate::moe::Placement::experts).
    pub fn local_experts(&self) -> &[Mlp<E>] {
        &self.weights.experts
    }

    /// Frees the symmetric memory (collective), and gives the one-sided layer back. Dropped without it, the layer leaves its
    /// memory to the heap's owner.
    ///
    /// # Errors
    /// When a peer does not come.
    pub fn free(self) -> Result<S, MoeError> {
        self.meet("to free the layer")?;
        self.memory.free(self.pe());
        Ok(self.shmem)
    }

    /// A barrier of the group; `what` those who wait say that they wait for.
    pub(super) fn meet(&self, what: &'static str) -> Result<(), MoeError> {
        let shmem = self.pe();
        shmem
            .barrier_all(self.spec.options.deadline())
            .map_err(|timeout| MoeError::wait(shmem, timeout.index, what, self.recorder.phase(), timeout))
    }

    /// Bytes put to other PEs so far, the sums of gradients included.
    pub fn bytes_put(&self) -> u64 {
        self.all_bytes_put()[0]
    }

    /// The same, and those of them that a network took.
    pub(super) fn all_bytes_put(&self) -> [u64; 2] {
        let [all, network] = self.exchange.as_ref().map_or([0; 2], Exchange::bytes_put);
        [all + self.pe().bytes_put(), network + self.pe().network_bytes_put()]
    }

    /// Counts what was put since as a pass's.
    pub(super) fn count_bytes_since(&mut self, before: [u64; 2]) {
        let now = self.all_bytes_put();
        self.pass_bytes = [0, 1].map(|kind| self.pass_bytes[kind] + now[kind] - before[kind]);
    }
}
