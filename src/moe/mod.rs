//! The MoE layer: router, dispatch, experts, combine; forward and backward.

pub mod config;
pub mod kernels;
pub mod synthetic;

pub use config::{
    Activation, ConfigError, GroupLimit, LayerConfig, MlpConfig, Proj, RouterConfig, Scoring, SharedConfig, WeightId,
    WeightSource,
};
