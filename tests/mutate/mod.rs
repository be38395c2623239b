//! Mutations of valid inputs: random damage, and changes that respect the format.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Values that parsers commonly mishandle.
const NUMBERS: [&str; 16] = [
    "0",
    "-1",
    "1e999",
    "-0.0",
    "NaN",
    "1e-320",
    "18446744073709551615",
    "9223372036854775808",
    "4294967296",
    "1e30",
    "0.5",
    "99999999999999999999999",
    "null",
    "\"x\"",
    "[]",
    "{}",
];

/// Applies one or two random changes to `seed`.
pub fn mutate(seed: &[u8], random: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..random.random_range(1..=2) {
        if bytes.is_empty() {
            return bytes;
        }
        let at = random.random_range(0..bytes.len());
        let to = (at + random.random_range(1..=64)).min(bytes.len());
        match random.random_range(0..12) {
            0 => bytes[at] ^= 1 << random.random_range(0..8),
            1 => bytes[at] = random.random(),
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..to)),
            4 => {
                let piece = bytes[at..to].to_vec();
                let into = random.random_range(0..=bytes.len());
                bytes.splice(into..into, piece);
            }
            5 => {
                // Eight bytes as a length.
                let length = [0, 1, 7, 1 << 20, u64::MAX, 1 << 63, 100_000_000, 33_554_433][random.random_range(0..8)];
                let end = bytes.len().min(8);
                bytes[..end].copy_from_slice(&u64::to_le_bytes(length)[..end]);
            }
            // Replaces a number, a word or a name of the text.
            6..=8 => {
                let tokens = tokens(&bytes);
                if let Some(token) = tokens.get(random.random_range(0..tokens.len().max(1))) {
                    let number = NUMBERS[random.random_range(0..NUMBERS.len())].as_bytes().to_vec();
                    bytes.splice(token.clone(), number);
                }
            }
            _ => {
                let tokens = tokens(&bytes);
                if tokens.len() > 1 {
                    let [a, b] = [(); 2].map(|()| tokens[random.random_range(0..tokens.len())].clone());
                    let piece = bytes[b].to_vec();
                    bytes.splice(a, piece);
                }
            }
        }
    }
    bytes
}

/// Ranges of JSON's numbers and strings.
fn tokens(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        if bytes[at] == b'"' {
            at += 1;
            while at < bytes.len() && bytes[at] != b'"' {
                at += 1;
            }
            at = (at + 1).min(bytes.len());
            tokens.push(start..at);
        } else if bytes[at].is_ascii_alphanumeric() || bytes[at] == b'-' {
            while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || b"+-.".contains(&bytes[at])) {
                at += 1;
            }
            tokens.push(start..at);
        } else {
            at += 1;
        }
    }
    tokens
}
