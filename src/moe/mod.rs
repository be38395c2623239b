//! The Mixture-of-Experts layer: its specification ([`spec`]), and two engines, one for CPUs ([`cpu`]) and one for devices (`device`).

pub mod cpu;
#[cfg(feature = "device")]
pub mod device;
mod parallel;
pub mod spec;
pub mod synthetic;

pub use cpu::{Layer, Replicas, kernels};
pub use spec::{
    Activation, Balance, ConfigError, Dtype, ExpertState, Glu, GradientSink, Gradients, GroupLimit, GroupScore, Groups,
    Hosts, LayerConfig, LayerSpec, Layout, Load, MatrixGradientMut, MlpConfig, MlpGradients, MlpGradientsMut, MlpId,
    Mode, MoeError, MoeLayer, NO_EXPERT, Norm, Options, Placement, Proj, Routed, RouterConfig, Scoring, SharedConfig,
    SparseMixer, WeightError, WeightId, WeightSlice, WeightSource, gemm_flop, metrics, placement, proj_index,
};
#[cfg(feature = "command")]
pub(crate) use spec::{Division, header_words};
