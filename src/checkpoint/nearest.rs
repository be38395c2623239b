//! The nearest name, for the error of one that is not there.

/// The name of `names` that the fewest insertions, deletions and replacements of characters make of `wanted`; of several such, the first in
/// the alphabet. Numbers count little: the same name of another expert or layer is not what is missing.
pub(super) fn nearest<'n>(wanted: &str, names: Vec<&'n str>) -> Option<&'n str> {
    let bare = |name: &str| -> Vec<u8> { name.bytes().map(|b| if b.is_ascii_digit() { b'0' } else { b }).collect() };
    let target = bare(wanted);
    names
        .into_iter()
        .min_by_key(|name| (distance(&target, &bare(name)), distance(wanted.as_bytes(), name.as_bytes()), *name))
}

/// Levenshtein's distance, a row of the table at a time.
fn distance(a: &[u8], b: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (diagonal + usize::from(x != y)).min(above + 1).min(row[j] + 1);
            diagonal = above;
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_of_the_same_kind() {
        let names = vec!["model.layers.1.mlp.gate.bias", "model.layers.0.mlp.gate.wight", "lm_head.weight"];
        assert_eq!(nearest("model.layers.1.mlp.gate.weight", names), Some("model.layers.0.mlp.gate.wight"));
        assert_eq!(nearest("x", Vec::new()), None);
        assert_eq!(distance(b"kitten", b"sitting"), 3);
    }
}
