//! Names of the tensors of a checkpoint, and packing of several weights in one tensor.
//!
//! Names are given without the prefix up to `layers.N.`; `{e}` stands for an expert's number.

use crate::moe::{LayerConfig, MlpConfig, Proj, WeightId, WeightSlice, proj_index};

/// The names of a layer's weights in one layout of a family's checkpoints. A name is empty if the layout has no such
/// weight.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) struct Layout {
    /// The name before the layer's number, mostly `layers`.
    pub layers: &'static str,
    pub router: &'static str,
    pub logit_bias: &'static str,
    /// The bias in selection.
    pub router_bias: &'static str,
    /// Whether that bias has shape `[1, experts]`.
    pub bias_row: bool,
    pub experts: Mlps,
    pub shared: Mlps,
    pub shared_gate: &'static str,
}

/// The tensors of an MLP, or of all experts' MLPs.
#[derive(Clone, Copy, Debug)]
pub(in crate::checkpoint) struct Mlps {
    /// Name of gate's tensor; equal to `up` if one tensor contains both.
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    /// Biases of gate, up and down; empty if there are none.
    pub biases: [&'static str; 3],
    pub packing: Packing,
}

/// Packing of projections in tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Packing {
    /// One tensor `[out, in]` per expert and projection.
    Separate,
    /// Gate and up in one tensor, gate's rows first; all experts in one tensor, `[experts, 2 intermediate, hidden]` and
    /// `[experts, hidden, intermediate]`.
    Fused,
    /// Like `Fused`, transposed: `[experts, hidden, 2 intermediate]` and `[experts, intermediate, hidden]`.
    FusedTransposed,
    /// Like `FusedTransposed`, with the columns of gate and up interleaved.
    InterleavedTransposed,
    /// Like `Fused`, with the rows of gate and up interleaved.
    Interleaved,
    /// The rows of all experts in one two-dimensional tensor per projection, `[experts * intermediate, hidden]`; down
    /// is transposed.
    Stacked,
}

impl Packing {
    /// A description for documents and errors.
    fn describe(self) -> &'static str {
        match self {
            Packing::Separate => "a tensor per expert and projection",
            Packing::Fused => "experts in one tensor, gate and up one after the other",
            Packing::FusedTransposed => "experts in one tensor, transposed, gate and up one after the other",
            Packing::InterleavedTransposed => "experts in one tensor, transposed, gate and up in turns",
            Packing::Interleaved => "experts in one tensor, gate and up in turns",
            Packing::Stacked => "experts' rows stacked in a tensor per projection",
        }
    }

    fn transposed(self) -> bool {
        matches!(self, Packing::FusedTransposed | Packing::InterleavedTransposed)
    }

    fn interleaved(self) -> bool {
        matches!(self, Packing::InterleavedTransposed | Packing::Interleaved)
    }
}

impl Layout {
    /// The name of a weight's tensor, after `layers.N.`.
    pub fn name(&self, id: WeightId) -> String {
        let (mlps, expert, name) = match id {
            WeightId::Router => return self.router.into(),
            WeightId::LogitBias => return self.logit_bias.into(),
            WeightId::RouterBias => return self.router_bias.into(),
            WeightId::SharedGate => return self.shared_gate.into(),
            WeightId::Expert(e, p) => (&self.experts, e, self.experts.matrix(p)),
            WeightId::ExpertBias(e, p) => (&self.experts, e, self.experts.biases[proj_index(p)]),
            WeightId::Shared(p) => (&self.shared, 0, self.shared.matrix(p)),
            WeightId::SharedBias(p) => (&self.shared, 0, self.shared.biases[proj_index(p)]),
        };
        if mlps.packing == Packing::Separate { name.replace("{e}", &expert.to_string()) } else { name.into() }
    }

    /// Position of an expert's matrix in a tensor of MXFP4 blocks, which have whole rows: as in `tensor`, but
    /// transposed. `None` if no such checkpoints exist in this layout.
    pub fn block_slice(&self, config: &LayerConfig, e: usize, proj: Proj, tensor: String) -> Option<WeightSlice> {
        if self.experts.packing != Packing::InterleavedTransposed {
            return None;
        }
        let mlps = Mlps { packing: Packing::Interleaved, ..self.experts };
        Some(mlps.place(&config.expert, config.hidden, proj, false, Some((e, config.n_experts)), tensor))
    }

    /// Position of a weight of `config`; `tensor` is the full name of its tensor.
    pub fn place(&self, config: &LayerConfig, id: WeightId, tensor: String) -> WeightSlice {
        let expert = |e: usize| (&self.experts, config.expert, Some((e, config.n_experts)));
        let shared = || (&self.shared, config.shared.map_or(config.expert, |s| s.mlp), None);
        let ((mlps, mlp, expert), proj, is_bias) = match id {
            WeightId::Expert(e, p) => (expert(e), p, false),
            WeightId::ExpertBias(e, p) => (expert(e), p, true),
            WeightId::Shared(p) => (shared(), p, false),
            WeightId::SharedBias(p) => (shared(), p, true),
            WeightId::RouterBias if self.bias_row => {
                let n = config.choices();
                return WeightSlice { shape: vec![1, n], ..WeightSlice::whole(tensor, vec![n]) };
            }
            _ => return WeightSlice::whole(tensor, config.shape(id)),
        };
        mlps.place(&mlp, config.hidden, proj, is_bias, expert, tensor)
    }
}

impl Mlps {
    /// No tensors.
    pub const NONE: Mlps = Mlps { gate: "", up: "", down: "", biases: [""; 3], packing: Packing::Separate };

    /// A description of the packing.
    pub fn describe(&self) -> &'static str {
        if self.packing == Packing::Fused && self.gate != self.up {
            return "experts in one tensor for each projection";
        }
        self.packing.describe()
    }

    fn matrix(&self, proj: Proj) -> &'static str {
        match proj {
            Proj::Gate => self.gate,
            Proj::Up => self.up,
            Proj::Down => self.down,
        }
    }

    /// Position of a projection's matrix or bias. `expert` is (number, number of experts), or `None` for a single MLP.
    fn place(
        &self,
        mlp: &MlpConfig,
        hidden: usize,
        proj: Proj,
        is_bias: bool,
        expert: Option<(usize, usize)>,
        tensor: String,
    ) -> WeightSlice {
        let [rows, width] = mlp.shape(proj, hidden);
        let columns = if is_bias { 1 } else { width };
        let (number, experts) = expert.unwrap_or((0, 1));
        if self.packing == Packing::Separate {
            return WeightSlice::whole(tensor, if is_bias { vec![rows] } else { vec![rows, columns] });
        }
        let size = [rows, columns];
        if self.packing == Packing::Stacked {
            // The layer's down is [hidden, intermediate]; it is transposed here.
            let len = rows * columns;
            let first = number * len;
            let strides = if proj == Proj::Down { [1, rows] } else { [columns, 1] };
            let shape = vec![experts * mlp.intermediate, hidden];
            return WeightSlice { tensor, shape, size, first, strides, part: first..first + len };
        }
        let two = self.gate == self.up && proj != Proj::Down;
        let all_rows = if two { 2 * rows } else { rows };
        let interleaved = self.packing.interleaved() && two;
        let (offset, step) = match (two && proj == Proj::Up, interleaved) {
            (true, true) => (1, 2),
            (false, true) => (0, 2),
            (true, false) => (rows, 1),
            (false, false) => (0, 1),
        };
        let len = all_rows * columns;
        let start = number * len;
        let mut shape = if expert.is_some() { vec![experts] } else { Vec::new() };
        let (first, strides) = if is_bias {
            shape.push(all_rows);
            (start + offset, [step, 1])
        } else if self.packing.transposed() {
            shape.extend([columns, all_rows]);
            (start + offset, [step, all_rows])
        } else {
            shape.extend([all_rows, columns]);
            (start + offset * columns, [step * columns, 1])
        };
        WeightSlice { tensor, shape, size, first, strides, part: start..start + len }
    }
}

/// Names of MLPs with one tensor per expert and projection.
macro_rules! separate {
    ($at:literal, $gate:literal, $up:literal, $down:literal) => {
        Mlps {
            gate: concat!($at, ".", $gate, ".weight"),
            up: concat!($at, ".", $up, ".weight"),
            down: concat!($at, ".", $down, ".weight"),
            biases: [
                concat!($at, ".", $gate, ".bias"),
                concat!($at, ".", $up, ".bias"),
                concat!($at, ".", $down, ".bias"),
            ],
            packing: Packing::Separate,
        }
    };
    ($at:literal) => {
        separate!($at, "gate_proj", "up_proj", "down_proj")
    };
}

/// Names of MLPs with gate and up in one tensor, for all experts together.
macro_rules! fused {
    ($gate_up:literal, $down:literal, $packing:ident) => {
        Mlps {
            gate: $gate_up,
            up: $gate_up,
            down: $down,
            biases: [concat!($gate_up, "_bias"), concat!($gate_up, "_bias"), concat!($down, "_bias")],
            packing: Packing::$packing,
        }
    };
    ($gate_up:literal, $down:literal) => {
        fused!($gate_up, $down, Fused)
    };
}

/// Names of most families, with one tensor per expert and projection.
pub(super) const SEPARATE: Layout = Layout {
    layers: "layers",
    router: "mlp.gate.weight",
    logit_bias: "mlp.router.bias",
    router_bias: "mlp.gate.e_score_correction_bias",
    bias_row: false,
    experts: separate!("mlp.experts.{e}"),
    shared: separate!("mlp.shared_experts"),
    shared_gate: "mlp.shared_expert_gate.weight",
};

/// Names of the model classes (`save_original_format=False`), which some families' checkpoints have.
pub(super) const FUSED: Layout =
    Layout { experts: fused!("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), ..SEPARATE };

/// With a single shared expert, as in Qwen.
pub(super) const SEPARATE_SHARED_EXPERT: Layout = Layout { shared: separate!("mlp.shared_expert"), ..SEPARATE };
pub(super) const FUSED_SHARED_EXPERT: Layout = Layout { shared: separate!("mlp.shared_expert"), ..FUSED };

/// Mixtral's names.
pub(super) const BLOCK_SPARSE: Layout = Layout {
    router: "block_sparse_moe.gate.weight",
    experts: separate!("block_sparse_moe.experts.{e}", "w1", "w3", "w2"),
    router_bias: "block_sparse_moe.e_score_correction_bias",
    ..SEPARATE
};
pub(super) const KIMI: Layout = Layout {
    router_bias: "block_sparse_moe.gate.e_score_correction_bias",
    shared: separate!("block_sparse_moe.shared_experts"),
    ..BLOCK_SPARSE
};
/// MiniMax-M2 as saved by the model class: the bias belongs to the block.
pub(super) const FUSED_BLOCK_BIAS: Layout = Layout { router_bias: "mlp.e_score_correction_bias", ..FUSED };
pub(super) const PHI_FUSED: Layout = Layout { router: "mlp.router.weight", ..FUSED };

pub(super) const AFMOE: Layout =
    Layout { router: "mlp.router.gate.weight", router_bias: "mlp.expert_bias", ..SEPARATE };
pub(super) const AFMOE_FUSED: Layout = Layout { experts: FUSED.experts, ..AFMOE };
pub(super) const HY_V3: Layout = Layout { shared: separate!("mlp.shared_mlp"), ..AFMOE };
pub(super) const HY_V4: Layout =
    Layout { shared: separate!("mlp.shared_experts", "linear_gate", "up_proj", "down_proj"), ..FUSED };
pub(super) const ARIA: Layout = Layout {
    router: "mlp.router.weight",
    experts: fused!("mlp.experts.fc1.weight", "mlp.experts.fc2.weight", FusedTransposed),
    ..SEPARATE
};
pub(super) const ARIA_FUSED: Layout =
    Layout { experts: fused!("mlp.experts.gate_up_proj", "mlp.experts.down_proj", FusedTransposed), ..ARIA };
pub(super) const BAILING: Layout = Layout { router_bias: "mlp.gate.expert_bias", ..SEPARATE };
pub(super) const EXAONE: Layout = Layout { router_bias: "mlp.e_score_correction_bias", ..SEPARATE };
pub(super) const KOLIBRI: Layout = Layout { router_bias: "moe.router.expert_bias", ..SEPARATE };
pub(super) const LAGUNA: Layout =
    Layout { router_bias: "mlp.experts.e_score_correction_bias", ..SEPARATE_SHARED_EXPERT };
pub(super) const ERNIE: Layout =
    Layout { router_bias: "mlp.moe_statics.e_score_correction_bias", bias_row: true, ..SEPARATE };
pub(super) const ERNIE_FUSED: Layout =
    Layout { router_bias: "mlp.gate.moe_statics.e_score_correction_bias", experts: FUSED.experts, ..ERNIE };
pub(super) const HUNYUAN: Layout =
    Layout { router: "mlp.gate.wg.weight", shared: separate!("mlp.shared_mlp"), ..SEPARATE };
pub(super) const HUNYUAN_FUSED: Layout = Layout { experts: FUSED.experts, ..HUNYUAN };
pub(super) const LONGCAT: Layout =
    Layout { router: "mlp.router.classifier.weight", router_bias: "mlp.router.e_score_correction_bias", ..SEPARATE };
pub(super) const DEEPSEEK_V4: Layout = Layout {
    router: "ffn.gate.weight",
    router_bias: "ffn.gate.bias",
    experts: separate!("ffn.experts.{e}", "w1", "w3", "w2"),
    shared: separate!("ffn.shared_experts", "w1", "w3", "w2"),
    ..SEPARATE
};
pub(super) const MISTRAL_LARGE_4: Layout = Layout {
    router: "gate.weight",
    experts: separate!("experts.{e}", "w1", "w3", "w2"),
    shared: separate!("shared_experts", "w1", "w3", "w2"),
    ..SEPARATE
};
/// As saved by the text model alone.
pub(super) const MISTRAL_LARGE_4_TEXT: Layout = Layout { shared: separate!("shared_experts"), ..MISTRAL_LARGE_4 };

pub(super) const JAMBA: Layout =
    Layout { router: "feed_forward.router.weight", experts: separate!("feed_forward.experts.{e}"), ..SEPARATE };
pub(super) const JAMBA_FUSED: Layout =
    Layout { experts: fused!("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"), ..JAMBA };
pub(super) const LLAMA4: Layout = Layout {
    experts: fused!("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj", FusedTransposed),
    shared: separate!("feed_forward.shared_expert"),
    ..JAMBA
};
pub(super) const LFM2: Layout = Layout {
    router: "feed_forward.gate.weight",
    router_bias: "feed_forward.expert_bias",
    experts: separate!("feed_forward.experts.{e}", "w1", "w3", "w2"),
    ..SEPARATE
};
pub(super) const LFM2_FUSED: Layout = Layout { experts: JAMBA_FUSED.experts, ..LFM2 };

/// IBM Granite's names. The shared expert is outside the block.
pub(super) const GRANITE: Layout = Layout {
    router: "block_sparse_moe.router.layer.weight",
    experts: fused!("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared: fused!("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"),
    ..SEPARATE
};
pub(super) const GRANITE_FUSED: Layout = Layout {
    router: "block_sparse_moe.router.weight",
    experts: fused!("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
    ..GRANITE
};

pub(super) const GPT_OSS: Layout = Layout {
    router: "mlp.router.weight",
    experts: fused!("mlp.experts.gate_up_proj", "mlp.experts.down_proj", InterleavedTransposed),
    ..SEPARATE
};
pub(super) const PRIVACY_FILTER: Layout = Layout { experts: ARIA_FUSED.experts, ..GPT_OSS };
pub(super) const MINIMAX_M3: Layout =
    Layout { shared: fused!("mlp.shared_experts.gate_up_proj.weight", "mlp.shared_experts.down_proj.weight"), ..FUSED };
/// As published.
pub(super) const MINIMAX_M3_SEPARATE: Layout =
    Layout { shared: separate!("block_sparse_moe.shared_experts"), ..BLOCK_SPARSE };
/// Qwen3-VL's published checkpoints.
pub(super) const QWEN3_VL: Layout = Layout { experts: ARIA_FUSED.experts, ..SEPARATE };

/// Step 3.7 as published: all experts in one tensor for each projection.
pub(super) const STEP3: Layout = Layout {
    router: "moe.gate.weight",
    router_bias: "moe.router_bias",
    experts: Mlps {
        gate: "moe.gate_proj.weight",
        up: "moe.up_proj.weight",
        ..fused!("moe.gate_up_proj.weight", "moe.down_proj.weight")
    },
    shared: separate!("share_expert"),
    ..SEPARATE
};

pub(super) const NEMOTRON: Layout = Layout {
    router: "mixer.gate.weight",
    router_bias: "mixer.gate.e_score_correction_bias",
    experts: Mlps { gate: "", ..separate!("mixer.experts.{e}") },
    shared: Mlps { gate: "", ..separate!("mixer.shared_experts") },
    ..SEPARATE
};
pub(super) const NEMOTRON_FUSED: Layout = Layout {
    experts: Mlps { gate: "", up: "mixer.experts.up_proj", ..fused!("", "mixer.experts.down_proj") },
    ..NEMOTRON
};

pub(super) const DBRX: Layout = Layout {
    layers: "blocks",
    router: "ffn.router.layer.weight",
    experts: Mlps {
        gate: "ffn.experts.mlp.w1",
        up: "ffn.experts.mlp.v1",
        down: "ffn.experts.mlp.w2",
        packing: Packing::Stacked,
        ..Mlps::NONE
    },
    ..SEPARATE
};
