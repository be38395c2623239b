//! Specification of a layer, common to both engines: configuration, placement, groups, options, gradients, metrics.

mod config;
mod division;
mod error;
mod gradients;
mod groups;
mod hosts;
mod layer;
mod layout;
mod load;
pub mod metrics;
mod options;
mod place;
pub mod placement;

pub use aristos_cpu_kernels::{Activation, Glu};
pub use config::{
    GroupLimit, GroupScore, LayerConfig, MAX_WIDTH, MlpConfig, Norm, Proj, RouterConfig, Scoring, SharedConfig,
    SparseMixer, WeightId, WeightSource, gemm_flop,
};
pub(crate) use division::Division;
pub use error::{ConfigError, MoeError, WeightError};
pub use gradients::{GradientSink, Gradients, MatrixGradientMut, MlpGradients, MlpGradientsMut, MlpId, proj_index};
pub use groups::Groups;
pub use hosts::Hosts;
pub use layer::{ExpertState, LayerSpec, MoeLayer, NO_EXPERT, Routed};
pub use layout::Layout;
#[cfg(feature = "command")]
pub(crate) use layout::header_words;
pub(in crate::moe) use layout::{HEADER_WORDS, ROUND_BITS};
pub use load::Load;
pub use options::{Balance, Dtype, Mode, Options};
pub use place::WeightSlice;
pub use placement::Placement;
