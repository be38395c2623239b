//! Roofline model of the parts of a transformer outside its routed experts: attention, norms, dense MLPs, embedding and head.
//!
//! Each operation takes the longer of two times: its FLOP at the device's rate, and its bytes at the global-memory bandwidth (Williams,
//! Waterman and Patterson 2009). Operations run one after the other. A weight costs two FLOP per token in forward and four in backward
//! (Kaplan et al. 2020, section 2.1). The two products of attention are computed over the visible keys of each query. Their inputs are
//! read, and their output is written, once. Their backward has five products, since one of the two is recomputed (Dao et al. 2022). Every
//! device stores all of these weights and processes its own tokens.

use aristos_formats::{InputError, Latent, Transformer};

use crate::linear::Device;

/// Bytes of a weight gradient, which is stored in f32.
const GRADIENT_BYTES: f64 = 4.0;

/// Forward and backward times by part, s.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DenseTime {
    /// Attention with its projections.
    pub attention_s: [f64; 2],
    /// MLPs, norms, additions, embedding and head.
    pub rest_s: [f64; 2],
}

/// The cost of one kernel: FLOP, elements moved, and bytes of gradients moved.
#[derive(Clone, Copy)]
struct Cost {
    flop: f64,
    elements: f64,
    gradient_bytes: f64,
}

/// The kernels of an operation, forward and backward.
struct Operation {
    forward: Cost,
    backward: Vec<Cost>,
    weights: f64,
}

fn cost(flop: f64, elements: f64) -> Cost {
    Cost { flop, elements, gradient_bytes: 0.0 }
}

/// The product of a `tokens` x `inputs` matrix and `inputs` x `outputs` weights. Its backward computes the gradients of the input and of
/// the weights.
fn product(tokens: f64, inputs: usize, outputs: usize) -> Operation {
    let (inputs, outputs) = (inputs as f64, outputs as f64);
    let (flop, rows, weights) = (2.0 * tokens * inputs * outputs, tokens * (inputs + outputs), inputs * outputs);
    let of_weights = Cost { gradient_bytes: GRADIENT_BYTES * weights, ..cost(flop, rows) };
    Operation { forward: cost(flop, rows + weights), backward: vec![cost(flop, rows + weights), of_weights], weights }
}

/// An operation without FLOP that reads and writes `forward` elements in forward and `backward` in backward.
fn moves(forward: f64, backward: f64) -> Operation {
    Operation { forward: cost(0.0, forward), backward: vec![cost(0.0, backward)], weights: 0.0 }
}

/// The three products of a gated MLP and `silu(gate) * up`, which reads or writes three values per element in forward and five in backward.
fn gated_mlp(tokens: f64, hidden: usize, intermediate: usize) -> Vec<Operation> {
    if intermediate == 0 {
        return Vec::new();
    }
    let inside = tokens * intermediate as f64;
    let up = || product(tokens, hidden, intermediate);
    vec![up(), up(), moves(3.0 * inside, 5.0 * inside), product(tokens, intermediate, hidden)]
}

/// The attention of a layer for `tokens` tokens in sequences of `sequence` tokens; a query sees at most `window` keys.
fn attention(model: &Transformer, tokens: f64, sequence: f64, window: f64) -> Vec<Operation> {
    let ((heads, kv_heads), (key, value), hidden) = (model.heads, model.head_dim, model.hidden);
    let mut all = match model.latent {
        None => vec![product(tokens, hidden, heads * key + kv_heads * (key + value))],
        Some(Latent { query_rank, rank, shared_key }) => {
            let queries = match query_rank {
                0 => vec![product(tokens, hidden, heads * key)],
                _ => vec![product(tokens, hidden, query_rank), product(tokens, query_rank, heads * key)],
            };
            let keys = heads * key.saturating_sub(shared_key);
            let latent = [product(tokens, hidden, rank + shared_key), product(tokens, rank, keys + heads * value)];
            queries.into_iter().chain(latent).collect()
        }
    };
    // A token sees itself and earlier tokens. Without a window that is on average half of a sequence. With one it is the whole window,
    // except at the start of a sequence.
    let window = window.min(sequence);
    let seen = window * (1.0 - 0.5 * window / sequence);
    let flop = 2.0 * tokens * seen * (heads * (key + value)) as f64;
    let (inputs, output) = ((heads * key + kv_heads * (key + value)) as f64, (heads * value) as f64);
    all.push(Operation {
        forward: cost(flop, tokens * (inputs + output)),
        // Reads the inputs, the output and its gradient; writes the inputs' gradients.
        backward: vec![cost(2.5 * flop, 2.0 * tokens * (inputs + output))],
        weights: 0.0,
    });
    all.push(product(tokens, heads * value, hidden));
    all
}

/// The parts of the model as (repetitions, is attention, operations): first those of layers, then those outside layers.
fn parts(model: &Transformer, tokens: f64, sequence: f64) -> Vec<(f64, bool, Vec<Operation>)> {
    let (layers, moe_layers) = model.layers;
    let (state, dense_layers) = (tokens * model.hidden as f64, layers - moe_layers);
    let (windowed, window) = (model.windowed.0.min(layers), model.windowed.1 as f64);
    // A norm reads and writes one state in forward, and reads two and writes one in backward. An addition reads two states and writes one;
    // backward is counted as three states too.
    let norm = || moves(2.0 * state, 3.0 * state);
    let logits = tokens * model.vocabulary as f64;
    let embedding = Operation {
        backward: vec![Cost { gradient_bytes: 2.0 * GRADIENT_BYTES * state, ..cost(0.0, state) }],
        weights: (model.vocabulary * model.hidden) as f64,
        ..moves(2.0 * state, 0.0)
    };
    vec![
        ((layers - windowed) as f64, true, attention(model, tokens, sequence, sequence)),
        (windowed as f64, true, attention(model, tokens, sequence, window)),
        (2.0 * layers as f64, false, vec![norm(), moves(3.0 * state, 3.0 * state)]),
        (dense_layers as f64, false, gated_mlp(tokens, model.hidden, model.dense_intermediate)),
        (moe_layers as f64, false, gated_mlp(tokens, model.hidden, model.shared_intermediate)),
        // The loss reads the logits, and writes their gradient.
        (
            1.0,
            false,
            vec![embedding, norm(), product(tokens, model.hidden, model.vocabulary), moves(logits, 2.0 * logits)],
        ),
    ]
}

/// Number of weights without those of norms; every device holds all of them.
pub fn parameters(model: &Transformer) -> f64 {
    let of =
        |(times, _, parts): (f64, bool, Vec<Operation>)| times * parts.iter().map(|part| part.weights).sum::<f64>();
    parts(model, 1.0, 1.0).into_iter().map(of).sum()
}

/// The time of a device for `tokens` tokens in sequences of `sequence` tokens, with elements of `element_bytes` bytes.
///
/// # Errors
/// Returns an error if `tokens` or `sequence` is 0.
pub fn time(
    model: &Transformer,
    device: &Device,
    tokens: usize,
    sequence: usize,
    element_bytes: usize,
) -> Result<DenseTime, InputError> {
    for (field, value) in [("`tokens`", tokens), ("`sequence`", sequence)] {
        if value == 0 {
            return Err(InputError::value(field, "is 0", "at least 1"));
        }
    }
    let bytes = element_bytes as f64;
    let flop_per_s = device.base_util * device.flop_per_s_8bit / bytes;
    let bytes_per_s = device.base_util * device.global_bytes_per_s;
    let of = |cost: &Cost| (cost.flop / flop_per_s).max((cost.elements * bytes + cost.gradient_bytes) / bytes_per_s);
    let mut time = DenseTime::default();
    for (times, is_attention, parts) in parts(model, tokens as f64, sequence as f64) {
        let sum = if is_attention { &mut time.attention_s } else { &mut time.rest_s };
        for part in &parts {
            sum[0] += times * of(&part.forward);
            sum[1] += times * part.backward.iter().map(of).sum::<f64>();
        }
    }
    Ok(time)
}

#[cfg(test)]
mod tests {
    use aristos_formats::Model;

    use super::*;

    fn device(flop_per_s: f64, bytes_per_s: f64) -> Device {
        Device {
            name: "d".into(),
            flop_per_s_8bit: flop_per_s,
            global_bytes_per_s: bytes_per_s,
            net_bytes_per_s: 1.0,
            base_util: 1.0,
        }
    }

    /// One layer of width 4 with 2 query heads of width 2, 1 head of keys and values, an MLP of width 8, and a vocabulary of 10.
    fn tiny() -> Transformer {
        Transformer {
            hidden: 4,
            layers: (1, 0),
            heads: (2, 1),
            head_dim: (2, 2),
            latent: None,
            windowed: (0, 0),
            dense_intermediate: 8,
            shared_intermediate: 0,
            vocabulary: 10,
        }
    }

    fn near(got: f64, want: f64) {
        assert!((got / want - 1.0).abs() < 1e-12, "{got}, expected {want}");
    }

    #[test]
    fn tiny_layer_by_hand() {
        // 6 tokens in sequences of 6, elements of one byte. If memory is free, only FLOP count. The projections are 4 x 8 and 4 x 4, with
        // twice the FLOP in backward. The core has 2 heads of (2 + 2) columns and 3 keys on average, with 2.5 times the FLOP in backward.
        let tiny = tiny();
        let flop = time(&tiny, &device(1.0, 1e30), 6, 6, 1).unwrap();
        let (projections, core) = (2.0 * 6.0 * (32.0 + 16.0), 2.0 * 6.0 * 3.0 * 8.0);
        near(flop.attention_s[0], projections + core);
        near(flop.attention_s[1], 2.0 * projections + 2.5 * core);
        // The MLP has 3 x 4 x 8 weights, and the head 4 x 10.
        near(flop.rest_s[0], 2.0 * 6.0 * (96.0 + 40.0));
        near(flop.rest_s[1], 4.0 * 6.0 * (96.0 + 40.0));
        // If FLOP are free, only bytes count. Queries, keys and values have 6 x (4 + 8) + 32, the two products 6 x (8 + 4), and the output
        // projection 6 x 8 + 16.
        let bytes = time(&tiny, &device(1e30, 1.0), 6, 6, 1).unwrap();
        near(bytes.attention_s[0], 104.0 + 72.0 + 64.0);
        near(bytes.attention_s[1], (104.0 + 72.0 + 128.0) + 144.0 + (64.0 + 48.0 + 64.0));
        // Two norms (48 each) and additions (72 each), MLP (72 + 32) x 2 + 3 x 48 + 104, embedding 48, last norm 48, head 84 + 40, logits
        // 60.
        near(bytes.rest_s[0], 2.0 * (48.0 + 72.0) + 312.0 + 144.0 + 48.0 + 48.0 + 124.0 + 60.0);
        // The time is four times as long, since half the bandwidth is reached and elements have two bytes.
        let half = Device { base_util: 0.5, ..device(1e30, 1.0) };
        near(time(&tiny, &half, 6, 6, 2).unwrap().attention_s[0], 4.0 * 240.0);
        near(parameters(&tiny), 48.0 + 96.0 + 2.0 * 40.0);
        let error = time(&tiny, &half, 6, 0, 2).unwrap_err().to_string();
        assert_eq!(error, "`sequence` is 0, expected at least 1");
    }

    #[test]
    fn windows_and_latent_attention() {
        // In one of two layers a query sees at most 2 keys. In sequences of 8 it sees 2 x (1 - 1/8) on average there, and 4 in the other
        // layer.
        let flop = |model: &Transformer| time(model, &device(1.0, 1e30), 8, 8, 1).unwrap().attention_s[0];
        let two = Transformer { layers: (2, 0), ..tiny() };
        let windowed = Transformer { windowed: (1, 2), ..two.clone() };
        near(flop(&two) - flop(&windowed), 2.0 * 8.0 * 8.0 * (4.0 - 1.75));
        // Queries have rank 3: 4 x 3 + 3 x 4 weights. Keys and values have rank 2, and one column of the keys is shared: 4 x 3 and 2 x (2 +
        // 4). The output has 4 x 4.
        let latent = Latent { query_rank: 3, rank: 2, shared_key: 1 };
        let latent = Transformer { latent: Some(latent), heads: (2, 2), ..tiny() };
        near(flop(&latent), 2.0 * 8.0 * (12.0 + 12.0 + 12.0 + 12.0 + 16.0) + 2.0 * 8.0 * 4.0 * 8.0);
    }

    #[test]
    fn published_models_have_their_published_sizes() {
        // Parameters, all experts included, in units of 10^9: within 1% of the published numbers, and of "1 trillion" within 3%.
        for (name, published) in [
            ("kimi-k2", 1000.0),
            ("gpt-oss-20b", 20.9),
            ("mixtral-8x7b", 46.7),
            ("mixtral-8x22b", 141.0),
            ("qwen3-30b-a3b", 30.5),
            ("qwen3-235b-a22b", 235.0),
            ("deepseek-v3", 671.0),
            ("gpt-oss-120b", 116.8),
        ] {
            let (model, dense) = (Model::preset(name).unwrap(), Transformer::preset(name).unwrap());
            let experts = (model.moe_layers * model.experts) as f64 * model.expert_parameters;
            let all = (experts + parameters(&dense)) * 1e-9;
            let within = if published == 1000.0 { 0.03 } else { 0.01 };
            assert!((all / published - 1.0).abs() < within, "{name}: {all}, published {published}");
        }
        assert_eq!(Transformer::preset("gpt-2"), None);
    }
}
