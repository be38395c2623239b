//! All strategies of a number of devices.

use std::collections::BTreeSet;

use aristos_formats::InputError;

use super::{Cost, Model, Outcome, Strategy};

/// Maximum of microbatches times layers, summed over all strategies.
const WORK_MOST: u64 = 1 << 31;
const DEVICES_MOST: usize = 1 << 20;

/// A single kind of parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolate {
    /// Data parallelism.
    Data,
    /// Horizontal parallelism.
    Horizontal,
    /// Pipeline parallelism.
    Pipeline,
}

/// The strategies to simulate. An empty list allows all values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Degrees {
    /// Data-parallel degrees.
    pub dp: Vec<usize>,
    /// Horizontal degrees.
    pub hp: Vec<usize>,
    /// Pipeline degrees.
    pub pp: Vec<usize>,
    /// Expert-parallel degrees.
    pub ep: Vec<usize>,
    /// Numbers of microbatches; ignored for strategies without a pipeline.
    pub microbatches: Vec<usize>,
    /// A single kind of parallelism.
    pub isolate: Option<Isolate>,
}

impl Degrees {
    fn any_given(&self) -> bool {
        [&self.dp, &self.hp, &self.pp, &self.ep, &self.microbatches].iter().any(|given| !given.is_empty())
    }
}

/// Simulates all strategies for `devices` devices whose degrees divide the dimensions that they split. Results are in ascending order of
/// dp, hp, pp, ep and microbatches.
///
/// The default numbers of microbatches are those of the published grid: powers of two from 2 to below the square root of a replica's batch.
///
/// # Errors
/// Returns an error if `devices` is 0 or too large, if the simulation would take too long, or if no strategy is possible.
pub fn grid(
    model: &Model,
    devices: usize,
    degrees: &Degrees,
    cost: Cost,
    steady_state: bool,
) -> Result<Vec<(Strategy, Outcome)>, InputError> {
    if !(1..=DEVICES_MOST).contains(&devices) {
        let found = format!("is {devices}");
        return Err(InputError::value("`devices`", found, format!("1 to {DEVICES_MOST}")));
    }
    let strategies = strategies(model, devices, degrees, cost);
    let work = strategies.iter().map(|strategy| (strategy.microbatches as u64).saturating_mul(model.layers as u64));
    if work.fold(0, u64::saturating_add) > WORK_MOST {
        let found = format!(
            "are {} numbers",
            strategies.iter().map(|strategy| strategy.microbatches).collect::<BTreeSet<_>>().len()
        );
        return Err(InputError::value("`microbatches`", found, "fewer, or smaller ones: this would take too long"));
    }
    let mut rows = Vec::with_capacity(strategies.len());
    let mut refused = None;
    for strategy in strategies {
        match model.simulate(strategy, cost, steady_state) {
            Ok(outcome) => rows.push((strategy, outcome)),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match (rows.is_empty(), refused) {
        (false, _) => Ok(rows),
        (true, Some(error)) if degrees.any_given() => Err(error),
        (true, Some(error)) => {
            // The user did not choose the degree that the error names.
            let expected = format!("a number that some strategy fits; of the first, {error}");
            Err(InputError::value("`devices`", format!("is {devices}"), expected))
        }
        (true, None) => {
            let expected = "degrees whose product it is";
            Err(InputError::value("`devices`", format!("is {devices}"), expected))
        }
    }
}

fn strategies(model: &Model, devices: usize, degrees: &Degrees, cost: Cost) -> Vec<Strategy> {
    let wanted = |given: &[usize], degree: usize| given.is_empty() || given.contains(&degree);
    let isolated = |dp: usize, hp: usize, pp: usize| match degrees.isolate {
        None => true,
        Some(Isolate::Data) => (hp, pp) == (1, 1),
        Some(Isolate::Horizontal) => (dp, pp) == (1, 1),
        Some(Isolate::Pipeline) => (dp, hp) == (1, 1),
    };
    let mut all = Vec::new();
    for dp in divisors(devices).filter(|dp| wanted(&degrees.dp, *dp)) {
        for hp in divisors(devices / dp).filter(|hp| wanted(&degrees.hp, *hp)) {
            let pp = devices / dp / hp;
            if !wanted(&degrees.pp, pp) || !isolated(dp, hp, pp) {
                continue;
            }
            let of_experts = model.experts.map_or(1, |experts| experts.count);
            let shared = |ep: &usize| dp.is_multiple_of(*ep) && wanted(&degrees.ep, *ep);
            for ep in divisors(of_experts).filter(shared) {
                let strategy = |microbatches| Strategy::new(dp, hp, pp, microbatches).ep(ep);
                all.extend(microbatches(model, dp, pp, &degrees.microbatches, cost).into_iter().map(strategy));
            }
        }
    }
    all
}

fn microbatches(model: &Model, dp: usize, pp: usize, given: &[usize], cost: Cost) -> Vec<usize> {
    if pp == 1 {
        return vec![1];
    }
    if !given.is_empty() {
        return given.to_vec();
    }
    let batch = model.batch / dp;
    // As published: 2^k for k from 1 to below log2(batch) / 2, rounded down.
    let end = if batch == 0 { 0 } else { ((batch as f64).log2() / 2.0).floor() as u32 };
    let powers: Vec<usize> = (1..end).map(|k| 1 << k).filter(|count| batch.is_multiple_of(*count)).collect();
    // A batch that is too small for any of these is one microbatch; the published grid omits such batches.
    if powers.is_empty() && cost == Cost::Default { vec![1] } else { powers }
}

fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}
