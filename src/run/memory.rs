//! Checks before any allocation that a job fits into the memory of this machine.

use anyhow::{Result, ensure};

use super::PreparedRun;
use crate::job::request::{DeviceKind, MoeBench};
use crate::moe::synthetic::Synthetic;
use crate::moe::{Dtype, LayerConfig, MlpConfig, Proj};
use crate::shmem::available_bytes;

/// The numbers that determine the memory of a layer.
struct LayerSize<'c> {
    config: &'c LayerConfig,
    dtype: Dtype,
    pes: usize,
    /// Experts over all PEs, replicas included.
    held: usize,
    /// Tokens over all PEs.
    tokens: usize,
    backward: bool,
}

impl LayerSize<'_> {
    /// Estimates the memory of all PEs and of the supervisor without symmetric heaps, bytes: packed weights, gradients, the batches of
    /// routed and shared experts, and results.
    fn private_bytes(&self) -> f64 {
        let LayerSize { config, dtype, .. } = *self;
        let size = |shape: [usize; 2]| shape[0] as f64 * shape[1] as f64;
        let mlp = |mlp: &MlpConfig| -> f64 {
            mlp.projections().iter().map(|&p: &Proj| size(mlp.shape(p, config.hidden))).sum()
        };
        let (pes, tokens) = (self.pes as f64, self.tokens as f64);
        let (hidden, experts) = (config.hidden as f64, config.n_experts as f64);
        let shared = config.shared.map_or(0.0, |s| mlp(&s.mlp) * pes);
        let weights = mlp(&config.expert) * self.held as f64 + shared;
        let element = dtype.bytes() as f64;
        // bf16 weights are packed twice, once for each product.
        let per_weight = if dtype == Dtype::Bf16 { 2.0 * element } else { element };
        let pairs = tokens * config.router.top_k as f64;
        let inner = config.expert.intermediate as f64 + config.shared.map_or(0.0, |s| s.mlp.intermediate as f64);
        let passes = if self.backward { 2.0 } else { 1.0 };
        let batches = pairs * (hidden * (4.0 + 2.0 * element) + inner * 3.0 * element * passes);
        let gradients = if self.backward { 4.0 } else { 0.0 };
        // Every PE has the router in f32, its gradient, and the gradient's sum over the PEs.
        let router = experts * hidden * pes * (4.0 + 2.0 * gradients);
        weights * (per_weight + gradients) + router + batches + tokens * experts * 8.0 + tokens * hidden * 16.0 * passes
    }
}

/// Returns an error if `need` bytes exceed the available memory. The kernel would otherwise kill the job later.
fn check_fits(need: f64, cure: &str) -> Result<()> {
    let Some(available) = available_bytes() else { return Ok(()) };
    let available = available as f64;
    ensure!(
        need <= available,
        "the layer needs about {:.1} GB of memory, this machine has {:.1} GB available: use {cure}",
        need / 1e9,
        available / 1e9
    );
    Ok(())
}

impl PreparedRun {
    /// Returns an error if the memory of this machine does not suffice for `pes_here` PEs.
    pub(super) fn check_memory(&self, pes_here: usize) -> Result<()> {
        if self.request.device != DeviceKind::Cpu {
            // The PEs check the memory of their devices.
            return Ok(());
        }
        let size = LayerSize {
            config: &self.config,
            dtype: self.request.dtype,
            pes: self.request.pes,
            held: (0..self.request.pes).map(|pe| self.groups.experts(pe).len()).sum(),
            tokens: self.tokens,
            backward: self.backward,
        };
        let cure = "fewer tokens, a smaller layer, a smaller `budget_factor`, or `dtype` bf16";
        // Checked first, because computing the size of the heap may overflow for a layer that does not fit.
        let private = size.private_bytes() * pes_here as f64 / self.request.pes as f64;
        check_fits(private, cure)?;
        check_fits(private + super::pe::heap_bytes(self)? as f64 * pes_here as f64, cure)
    }
}

/// Checks that a benchmark fits into memory: its layers, and the matrices of the GEMMs that it runs without a layer.
///
/// # Errors
/// Returns an error with the needed and the available GB if the memory does not suffice.
pub fn check_bench_memory(bench: &MoeBench) -> Result<()> {
    if bench.device != DeviceKind::Cpu {
        return Ok(());
    }
    let source = Synthetic::new(bench.layer.clone())?;
    let cure = "fewer tokens, a smaller layer, or fewer PEs";
    for &dtype in &bench.dtypes {
        let size = LayerSize {
            config: &bench.layer.layer,
            dtype,
            pes: bench.pes,
            held: bench.layer.layer.n_experts,
            tokens: bench.tokens,
            backward: true,
        };
        let private = 2.0 * size.private_bytes();
        check_fits(private, cure)?;
        check_fits(private + bench.spec(&source, dtype).heap_bytes()? as f64 * bench.pes as f64, cure)?;
    }
    Ok(())
}
