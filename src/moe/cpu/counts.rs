//! What depends on the counts of all PEs' (token, expert) pairs, which the PEs exchange before dispatch: the experts' capacity, and the
//! division of pairs among replicas.

use super::kernels::Element;
use super::layer::Layer;
use super::replicas::Exchange;
use super::router::{self, Routing};
use crate::moe::spec::metrics::Phase;
use crate::moe::spec::{Balance, Division, LayerSpec, MoeError};
use crate::shmem::{AsShmem, Cmp, SignalOp, Wait};

impl<S: AsShmem, E: Element, X: Exchange> Layer<S, E, X> {
    /// Drops the pairs beyond the capacity, and divides the others among the replicas of their experts.
    pub(super) fn divide(&mut self, routing: &mut Routing) -> Result<Division<'_>, MoeError> {
        self.apply_capacity(routing)?;
        let (me, splits) = (self.pe().my_pe(), self.spec.options.balance == Balance::Split);
        if !splits || !self.spec.placement.has_replicas() {
            return Ok(router::by_shares(routing, &self.spec.placement, me));
        }
        // A layer with replicas has exchanged the counts for the capacity by `Exchange`, so the memory of these counts is free.
        let counts = self.exchange_counts(routing.kept_counts(self.spec.config.n_experts))?;
        let LayerSpec { placement, options, .. } = &self.spec;
        Division::by_counts(placement, me, &counts, &options.hosts)
            .map_err(|error| MoeError::Usage { what: "divide rows among replicas", why: error.to_string() })
    }

    /// With a capacity factor: drops the pairs beyond each expert's capacity, in the order of global token indices. Each PE needs the counts
    /// of the PEs before it.
    fn apply_capacity(&mut self, routing: &mut Routing) -> Result<(), MoeError> {
        if self.spec.config.capacity_factor.is_none() {
            return Ok(());
        }
        let e = self.spec.config.n_experts;
        let own = routing.counts(e);
        let (all, me) = match &self.exchange {
            Some(exchange) => exchange.counts(&own, self.spec.options.deadline())?,
            None => (self.exchange_counts(own)?, self.pe().my_pe()),
        };
        let pairs: u64 = all.iter().flatten().map(|&c| u64::from(c)).sum();
        let mut before = vec![0u64; e];
        for counts in &all[..me] {
            before.iter_mut().zip(counts).for_each(|(b, &c)| *b += u64::from(c));
        }
        let Some(capacity) = self.spec.config.expert_capacity(pairs) else { return Ok(()) };
        routing.apply_capacity(before.into_iter().map(|b| capacity.saturating_sub(b)).collect());
        Ok(())
    }

    /// Exchanges the counts of pairs per expert with the other PEs of the group. Returns the counts of all PEs, by PE.
    fn exchange_counts(&mut self, own: Vec<u32>) -> Result<Vec<Vec<u32>>, MoeError> {
        let (me, n, e) = (self.pe().my_pe(), self.pe().n_pes(), own.len());
        let forward = self.forwards + 1;
        for pe in (0..n).filter(|&pe| pe != me) {
            let at = self.memory.counts(me, pe);
            let signal = self.memory.counts_signal(me, pe);
            self.pe().put_signal(at, &own, signal, forward, SignalOp::Set, pe);
            let traffic = &mut self.recorder.traffic;
            traffic.header_bytes += 4 * e as u64;
            traffic.puts += 1;
            traffic.signals += 1;
        }
        let mut all = vec![vec![0u32; e]; n];
        for (pe, counts) in all.iter_mut().enumerate().filter(|(pe, _)| *pe != me) {
            let signal = self.memory.counts_signal(pe, me);
            let phase = self.recorder.enter(Phase::Waiting);
            let wait = Wait { signal, cmp: Cmp::Ge, value: forward };
            self.pe()
                .wait_until_any_of(&[wait], &[pe], self.spec.options.deadline())
                .map_err(|timeout| MoeError::wait(self.pe(), pe, "its counts of choices", phase, timeout))?;
            self.recorder.enter(phase);
            self.pe().get(counts, self.memory.counts(pe, me), me);
        }
        all[me] = own;
        Ok(all)
    }
}
