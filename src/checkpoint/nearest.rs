//! The most similar tensor name, for the error about a missing tensor.

use strsim::levenshtein;

/// Returns the name with the smallest edit distance to `wanted`, the first in the alphabet if there are several. A difference in digits counts
/// less than any other: the same weight of another layer or expert is a likelier match than another weight.
pub(super) fn nearest<'n>(wanted: &str, names: Vec<&'n str>) -> Option<&'n str> {
    let without_numbers = |name: &str| name.replace(|c: char| c.is_ascii_digit(), "0");
    let target = without_numbers(wanted);
    let distances = |name: &str| (levenshtein(&target, &without_numbers(name)), levenshtein(wanted, name));
    names.into_iter().min_by_key(|name| (distances(name), *name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_weight_of_another_layer_is_nearer_than_another_weight() {
        let names = vec!["model.layers.1.mlp.gate.bias", "model.layers.0.mlp.gate.wight", "lm_head.weight"];
        assert_eq!(nearest("model.layers.1.mlp.gate.weight", names), Some("model.layers.0.mlp.gate.wight"));
        assert_eq!(nearest("x", Vec::new()), None);
    }
}
