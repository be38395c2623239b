//! Routing from a file (`--routing`) and captured routing (`--save-routing`).

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::checkpoint::{OutputFile, memory_file};
use crate::formats::InputError;
use crate::formats::routing::{CHOICES_MOST, NO_EXPERT, Record, Routing};
use crate::moe::LayerConfig;
use crate::moe::placement::block;

/// Experts of a layer's tokens in each step, which replace the router's choice.
pub(crate) struct GivenRouting {
    file: PathBuf,
    top_k: usize,
    /// The experts of all PEs' tokens, `[tokens, top_k]`, for each record.
    steps: Vec<Vec<u32>>,
    /// Tokens of each node; equal in all records.
    by_node: Vec<usize>,
}

impl GivenRouting {
    /// Reads the records of layer `layer` from a routing file. `model` is the number of experts, and top-k. `tokens` is the required number
    /// of tokens of a step, if any.
    ///
    /// # Errors
    /// Returns an error if the file is for another model, has no record of that layer, or has a choice that is not an expert.
    pub fn read(path: &Path, layer: u64, model: (usize, usize), tokens: Option<usize>) -> Result<GivenRouting> {
        let routing = Routing::read(path)?;
        let (steps, by_node) = of_layer(routing, layer, model, tokens).map_err(|error| error.in_file(path))?;
        Ok(GivenRouting { file: path.to_owned(), top_k: model.1, steps, by_node })
    }

    /// The tokens of each of `pes` PEs. If the file has `pes` nodes, PE i has the tokens of node i. Otherwise all tokens are divided
    /// evenly.
    ///
    /// # Errors
    /// Returns an error if the number of PEs is not that of nodes, and the nodes' numbers of tokens differ by more than one.
    pub fn tokens_of_pes(&self, pes: usize) -> Result<Vec<Range<usize>>> {
        if self.by_node.len() == pes {
            let mut end = 0;
            let next = |tokens: &usize| {
                end += tokens;
                end - tokens..end
            };
            return Ok(self.by_node.iter().map(next).collect());
        }
        self.check_even(&format!("{} PEs, as the file has nodes, or the same number for all", self.by_node.len()))?;
        Ok((0..pes).map(|pe| block(self.tokens(), pes, pe)).collect())
    }

    /// # Errors
    /// Returns an error, which includes `expected`, if the numbers of tokens per node differ by more than one.
    pub fn check_even(&self, expected: &str) -> Result<()> {
        let (least, most) = (self.by_node.iter().min(), self.by_node.iter().max());
        ensure!(
            most.zip(least).is_none_or(|(most, least)| most - least <= 1),
            "{}: tokens_per_node is {:?}, expected {expected}",
            self.file.display(),
            self.by_node
        );
        Ok(())
    }

    /// Tokens of a step over all PEs.
    pub fn tokens(&self) -> usize {
        self.steps[0].len() / self.top_k
    }

    /// The experts of the given tokens in a step. Steps after the last record begin with the first record again.
    pub fn of_step(&self, step: usize, tokens: Range<usize>) -> &[u32] {
        &self.steps[step % self.steps.len()][tokens.start * self.top_k..tokens.end * self.top_k]
    }

    /// Checks that `chosen`, the experts of all tokens, are those that the file gives for a step.
    ///
    /// # Errors
    /// Returns an error that names the first token with other experts.
    pub fn check(&self, step: usize, chosen: &[u32]) -> Result<()> {
        let given = self.of_step(step, 0..self.tokens());
        let mut tokens = given.chunks(self.top_k).zip(chosen.chunks(self.top_k)).enumerate();
        let sorted = |experts: &[u32]| {
            let mut experts = experts.to_vec();
            experts.sort_unstable();
            experts
        };
        match tokens.find(|(_, (given, chosen))| sorted(given) != sorted(chosen)) {
            None => Ok(()),
            Some((token, (given, chosen))) => {
                bail!("token {token} went to experts {chosen:?}, expected {given:?}, those of {}", self.file.display())
            }
        }
    }
}

fn of_layer(
    routing: Routing,
    layer: u64,
    (experts, top_k): (usize, usize),
    tokens: Option<usize>,
) -> Result<(Vec<Vec<u32>>, Vec<usize>), InputError> {
    routing.check_model(experts, top_k)?;
    let layers: Vec<u64> = routing.records.iter().map(|record| record.layer).collect();
    let (mut steps, mut by_node) = (Vec::new(), Vec::new());
    let mut expected = tokens.map(|tokens| (tokens, "the run's"));
    for (r, record) in routing.records.into_iter().enumerate().filter(|(_, record)| record.layer == layer) {
        let tokens = record.choices.len() / top_k;
        let (all, whose) = *expected.get_or_insert((tokens, "the first record's"));
        if tokens != all || tokens == 0 {
            let expected = if all == 0 { "at least 1".to_string() } else { format!("{all}, {whose}") };
            return Err(InputError::value(format!("records[{r}]"), format!("has {tokens} tokens"), expected));
        }
        if let Some(at) = record.choices.iter().position(|&choice| choice == NO_EXPERT) {
            let expected = "an expert: a run cannot repeat what a capacity left out";
            return Err(InputError::value(format!("records[{r}].choices[{at}]"), "is -1", expected));
        }
        if steps.is_empty() {
            by_node = record.tokens_per_node;
        } else if by_node != record.tokens_per_node {
            let found = format!("is {:?}", record.tokens_per_node);
            let expected =
                format!("{by_node:?}, as in the layer's first record: a PE has the same tokens in each step");
            return Err(InputError::value(format!("records[{r}].tokens_per_node"), found, expected));
        }
        steps.push(record.choices);
    }
    if steps.is_empty() {
        let expected = format!("one of layer {layer}, the run's");
        return Err(InputError::value("records", format!("have layer {}", layers[0]), expected));
    }
    Ok((steps, by_node))
}

/// A routing file that a run creates. The PEs write their choices to `chosen` in each step.
pub(super) struct SavedRouting {
    pub(super) chosen: File,
    out: OutputFile,
}

/// The shape of captured routing: steps, tokens of a step over all PEs, experts of a token.
#[derive(Clone, Copy)]
pub(super) struct Captured {
    pub(super) steps: usize,
    pub(super) tokens: usize,
    pub(super) top_k: usize,
}

impl Captured {
    /// The byte offset of a PE's choices in a step.
    pub(super) fn offset_bytes(&self, step: usize, first_token: usize) -> u64 {
        ((step * self.tokens + first_token) * self.top_k * size_of::<u32>()) as u64
    }

    /// # Errors
    /// Returns an error if there are more choices than a routing file may have.
    pub(super) fn check(&self) -> Result<()> {
        let choices = [self.tokens, self.top_k].iter().fold(self.steps, |all, n| all.saturating_mul(*n));
        ensure!(
            choices <= CHOICES_MOST,
            "`save_routing` of {} steps has {choices} choices, expected at most {CHOICES_MOST}",
            self.steps
        );
        Ok(())
    }
}

impl SavedRouting {
    /// Creates the file, and a file in memory for the choices.
    pub(super) fn create(path: &Path, captured: Captured) -> Result<SavedRouting> {
        captured.check()?;
        let chosen = memory_file("aristos-routing", captured.offset_bytes(captured.steps, 0))?;
        Ok(SavedRouting { chosen, out: OutputFile::create_empty(path)? })
    }

    /// Writes the routing file of a layer on PEs with these numbers of tokens. The caller publishes the file.
    pub(super) fn complete(
        self,
        captured: Captured,
        layer: u64,
        config: &LayerConfig,
        tokens_per_node: &[usize],
    ) -> Result<OutputFile> {
        let mut records = Vec::with_capacity(captured.steps);
        for step in 0..captured.steps {
            let mut choices = vec![0u32; captured.tokens * captured.top_k];
            let read =
                self.chosen.read_exact_at(bytemuck::cast_slice_mut(&mut choices), captured.offset_bytes(step, 0));
            read.context("cannot read the routing back")?;
            leave_out(config, &mut choices);
            records.push(Record { layer, step: step as u64, tokens_per_node: tokens_per_node.to_vec(), choices });
        }
        let routing = Routing::new(config.n_experts, captured.top_k, tokens_per_node.len(), records);
        Ok(self.out.with_content(routing.to_json().as_bytes())?)
    }
}

/// Sets choices that have no row to [`NO_EXPERT`]: identity experts, and choices beyond an expert's capacity, which is filled in the order
/// of tokens.
pub(super) fn leave_out(config: &LayerConfig, choices: &mut [u32]) {
    let routed = |choice: &u32| (*choice as usize) < config.n_experts;
    let pairs = choices.iter().filter(|choice| routed(choice)).count() as u64;
    let mut left = vec![config.expert_capacity(pairs).unwrap_or(u64::MAX); config.n_experts];
    for choice in choices {
        match left.get_mut(*choice as usize).filter(|left| **left > 0) {
            Some(left) => *left -= 1,
            None => *choice = NO_EXPERT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::{Activation, MlpConfig, RouterConfig};

    #[test]
    fn choices_without_a_row_are_left_out() {
        let mut config = LayerConfig::new(8, 2, RouterConfig::softmax(1), MlpConfig::gated(8, Activation::Silu));
        let all = [0u32, 0, 1, 0, 0, 2];
        let mut choices = all;
        leave_out(&config, &mut choices);
        assert_eq!(choices, [0, 0, 1, 0, 0, NO_EXPERT]);
        // With 5 choices of an expert, the capacity of each of the two experts is ceil(0.9 * 5 / 2) = 3.
        config.capacity_factor = Some(0.9);
        choices = all;
        leave_out(&config, &mut choices);
        assert_eq!(choices, [0, 0, 1, 0, NO_EXPERT, NO_EXPERT]);
    }

    #[test]
    fn records_of_the_layer_repeat() {
        let record = |layer, step, choices: [u32; 4]| Record {
            layer,
            step,
            tokens_per_node: vec![1, 1],
            choices: choices.to_vec(),
        };
        let records = vec![record(3, 0, [0, 1, 2, 3]), record(4, 0, [9, 8, 7, 6]), record(3, 1, [3, 2, 1, 0])];
        let routing = || Routing::new(10, 2, 2, records.clone());
        let (steps, by_node) = of_layer(routing(), 3, (10, 2), None).unwrap();
        let given = GivenRouting { file: "r.json".into(), top_k: 2, steps, by_node };
        assert_eq!(given.tokens(), 2);
        assert_eq!(given.tokens_of_pes(2).unwrap(), [0..1, 1..2]);
        assert_eq!(given.tokens_of_pes(3).unwrap(), [0..1, 1..2, 2..2]);
        let ragged = GivenRouting { steps: vec![vec![0; 8]], by_node: vec![0, 3, 1], file: "r.json".into(), top_k: 2 };
        assert_eq!(ragged.tokens_of_pes(3).unwrap(), [0..0, 0..3, 3..4]);
        let error = ragged.tokens_of_pes(2).unwrap_err().to_string();
        let expected =
            "r.json: tokens_per_node is [0, 3, 1], expected 3 PEs, as the file has nodes, or the same number for all";
        assert_eq!(error, expected);
        assert_eq!(given.of_step(0, 1..2), [2, 3]);
        assert_eq!(given.of_step(3, 0..2), [3, 2, 1, 0]);
        given.check(1, &[2, 3, 0, 1]).unwrap();
        let wrong = given.check(1, &[2, 3, 0, 2]).unwrap_err().to_string();
        assert_eq!(wrong, "token 1 went to experts [0, 2], expected [1, 0], those of r.json");
        let error = |layer, tokens| of_layer(routing(), layer, (10, 2), tokens).unwrap_err().to_string();
        assert_eq!(error(5, None), "records have layer 3, expected one of layer 5, the run's");
        assert_eq!(error(3, Some(7)), "records[0] has 2 tokens, expected 7, the run's");
        let mut other = routing();
        other.records[2].tokens_per_node = vec![2, 0];
        let error = of_layer(other, 3, (10, 2), None).unwrap_err().to_string();
        assert!(error.starts_with("records[2].tokens_per_node is [2, 0], expected [1, 1], as in"), "{error}");
        let mut none = routing();
        none.records[2].choices[3] = NO_EXPERT;
        let error = of_layer(none, 3, (10, 2), None).unwrap_err().to_string();
        assert!(error.starts_with("records[2].choices[3] is -1, expected an expert"), "{error}");
    }
}
