//! The shape of a transformer without its routed experts.

use crate::model::Model;

/// The shape of a model, except for its routed experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Transformer {
    /// Width of a token's hidden state, elements.
    pub hidden: usize,
    /// Number of layers, and of layers with experts.
    pub layers: (usize, usize),
    /// Heads of queries, and of keys and values.
    pub heads: (usize, usize),
    /// Width of a head: of queries and keys, and of values.
    pub head_dim: (usize, usize),
    /// Multi-head latent attention (DeepSeek-V2, section 2.1), if the model has it.
    pub latent: Option<Latent>,
    /// Number of layers with sliding-window attention, and their window, the query's own key included.
    pub windowed: (usize, usize),
    /// Inner width of the gated MLP in a layer without experts; 0 without such layers.
    pub dense_intermediate: usize,
    /// Inner width of the gated shared expert in a layer with experts; 0 without a shared expert.
    pub shared_intermediate: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
}

/// Low-rank queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// Rank of the queries; 0 if they are computed from the hidden state.
    pub query_rank: usize,
    /// Rank of keys and values.
    pub rank: usize,
    /// Elements of a key that all heads share.
    pub shared_key: usize,
}

impl Transformer {
    /// A published model by name, one of [`MODELS`](crate::MODELS), from its published config.json.
    pub fn preset(name: &str) -> Option<Transformer> {
        let model = Model::preset(name).ok()?;
        let grouped = |heads, head_dim, vocabulary| Transformer {
            hidden: model.hidden,
            layers: (model.layers, model.moe_layers),
            heads,
            head_dim: (head_dim, head_dim),
            latent: None,
            windowed: (0, 0),
            dense_intermediate: 0,
            shared_intermediate: 0,
            vocabulary,
        };
        Some(match name {
            "mixtral-8x7b" => grouped((32, 8), 128, 32_000),
            "mixtral-8x22b" => grouped((48, 8), 128, 32_768),
            "qwen3-30b-a3b" => grouped((32, 4), 128, 151_936),
            "qwen3-235b-a22b" => grouped((64, 4), 128, 151_936),
            "deepseek-v3" => Transformer {
                head_dim: (192, 128),
                latent: Some(Latent { query_rank: 1536, rank: 512, shared_key: 64 }),
                dense_intermediate: 18_432,
                shared_intermediate: 2048,
                ..grouped((128, 128), 128, 129_280)
            },
            "kimi-k2" => Transformer {
                head_dim: (192, 128),
                latent: Some(Latent { query_rank: 1536, rank: 512, shared_key: 64 }),
                dense_intermediate: 18_432,
                shared_intermediate: 2048,
                ..grouped((64, 64), 128, 163_840)
            },
            "gpt-oss-20b" => Transformer { windowed: (12, 128), ..grouped((64, 8), 64, 201_088) },
            "gpt-oss-120b" => Transformer { windowed: (18, 128), ..grouped((64, 8), 64, 201_088) },
            _ => return None,
        })
    }
}
