//! Whether a job fits this machine, before anything of it is allocated.

use anyhow::{Result, ensure};

use super::PreparedRun;
use crate::job::request::DeviceKind;
use crate::moe::Dtype;
use crate::moe::Proj;
use crate::shmem::available_bytes;

impl PreparedRun {
    /// About what all PEs and the supervisor allocate besides symmetric heaps, bytes: weights prepared for both products,
    /// gradients, the batches of routed and shared experts, and results.
    fn memory_bytes(&self) -> f64 {
        let config = &self.config;
        let size = |shape: [usize; 2]| shape[0] as f64 * shape[1] as f64;
        let mlp = |mlp: &crate::moe::MlpConfig| -> f64 {
            mlp.projections().iter().map(|&p: &Proj| size(mlp.shape(p, config.hidden))).sum()
        };
        let (pes, tokens) = (self.request.pes as f64, self.tokens as f64);
        let (hidden, experts) = (config.hidden as f64, config.n_experts as f64);
        let shared = config.shared.map_or(0.0, |s| mlp(&s.mlp) * pes);
        let weights = mlp(&config.expert) * experts * self.groups.len() as f64 + shared;
        let element = self.request.dtype.bytes() as f64;
        // bf16 keeps a packing for each of the two products.
        let per_weight = if self.request.dtype == Dtype::Bf16 { 2.0 * element } else { element };
        let pairs = tokens * config.router.top_k as f64;
        let inner = config.expert.intermediate as f64 + config.shared.map_or(0.0, |s| s.mlp.intermediate as f64);
        let passes = if self.backward { 2.0 } else { 1.0 };
        let batches = pairs * (hidden * (4.0 + 2.0 * element) + inner * 3.0 * element * passes);
        let gradients = if self.backward { 4.0 } else { 0.0 };
        // Every PE has the router, in f32; its gradient too, and that once more in the sum over PEs.
        let router = experts * hidden * pes * (4.0 + 2.0 * gradients);
        weights * (per_weight + gradients) + router + batches + tokens * experts * 8.0 + tokens * hidden * 16.0 * passes
    }

    /// Refuses a job whose `pes_here` PEs this machine cannot hold, rather than have it killed half way.
    pub(super) fn check_memory(&self, pes_here: usize) -> Result<()> {
        if self.request.device == DeviceKind::Cuda {
            // Its memory is not this machine's; the PEs ask the devices.
            return Ok(());
        }
        let Some(available) = available_bytes() else { return Ok(()) };
        let available = available as f64;
        let fits = |need: f64| {
            ensure!(
                need <= available,
                "the layer needs about {:.1} GB of memory, this machine has {:.1} GB available: use fewer tokens, a smaller \
                 layer, a smaller `budget_factor`, or `dtype` bf16",
                need / 1e9,
                available / 1e9
            );
            Ok(())
        };
        if self.request.device == DeviceKind::Emulated {
            return Ok(());
        }
        // The heap's size can be computed without overflow only where the rest fits.
        let private = self.memory_bytes() * pes_here as f64 / self.request.pes as f64;
        fits(private)?;
        fits(private + super::pe::heap_bytes(self)? as f64 * pes_here as f64)
    }
}
