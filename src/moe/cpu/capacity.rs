//! Drops (token, expert) pairs beyond the experts' capacity. For this the PEs exchange their counts before dispatch.

use super::kernels::Element;
use super::layer::Layer;
use super::replicas::Exchange;
use super::router::Routing;
use crate::moe::spec::MoeError;
use crate::moe::spec::metrics::Phase;
use crate::shmem::{AsShmem, Cmp, SignalOp, Wait};

impl<S: AsShmem, E: Element, X: Exchange> Layer<S, E, X> {
    /// With a capacity factor: drops the pairs beyond each expert's capacity, in the order of global token indices. PEs exchange counts
    /// before dispatch, because each PE needs the counts of the PEs before it.
    pub(super) fn apply_capacity(&mut self, routing: &mut Routing) -> Result<(), MoeError> {
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
            let at = self.memory.capacity_counts(me, pe);
            let signal = self.memory.capacity_signal(me, pe);
            self.pe().put_signal(at, &own, signal, forward, SignalOp::Set, pe);
            let traffic = &mut self.recorder.traffic;
            traffic.header_bytes += 4 * e as u64;
            traffic.puts += 1;
            traffic.signals += 1;
        }
        let mut all = vec![vec![0u32; e]; n];
        for (pe, counts) in all.iter_mut().enumerate().filter(|(pe, _)| *pe != me) {
            let signal = self.memory.capacity_signal(pe, me);
            let phase = self.recorder.enter(Phase::Waiting);
            self.pe()
                .wait_until(Wait { signal, cmp: Cmp::Ge, value: forward }, self.spec.options.deadline())
                .map_err(|timeout| MoeError::wait(self.pe(), pe, "its counts for the capacity", phase, timeout))?;
            self.recorder.enter(phase);
            self.pe().get(counts, self.memory.capacity_counts(pe, me), me);
        }
        all[me] = own;
        Ok(all)
    }
}
