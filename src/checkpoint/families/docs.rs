//! Generates `docs/families.md` from the table.

use std::fmt::Write;

use super::names::Packing;
use super::{ActivationRule, Entry, ExpertsIn, Family, GluRule, Router, Shared, Switch, table};
use crate::moe::{GroupScore, Scoring};

/// Families of `transformers` 5.23 with experts that are not supported, and why.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("deepseek_v4's `hash_moe` layers", "route by token id, which the layer is not given"),
    ("diffusion_gemma, gemma4", "the router reads another tensor than the experts do, through a norm of its own"),
    ("doge", "experts are rows of an embedding, chosen by product keys, inside a dense MLP"),
    ("ernie4_5_vl_moe", "two routers with experts of two widths, by the kind of token, which the layer is not given"),
    ("inkling", "the shared experts' weights are chosen together with the routed ones'"),
    ("inkling2", "gate and up go through softcaps (tanh), an activation that the layer does not have"),
    ("jetmoe", "the block adds a bias to its sum, and its attention has experts of its own"),
    ("muse_spark", "projections and norms around the experts, and a norm after each"),
    (
        "nllb_moe, switch_transformers",
        "encoder and decoder layers whose experts have a capacity that depends on the batch",
    ),
    ("vitpose_backbone", "experts by data set, not by token"),
    ("zaya", "the router is an MLP that carries a state from layer to layer"),
];

/// The text of `docs/families.md`.
pub fn families_page() -> String {
    let mut page = String::from(
        "# Families\n\n\
         The model families whose checkpoints are read, by the `model_type` in `config.json` (of the text model, and of the model\n\
         that has it as a part). Meanings and defaults are those of `transformers` 5.23; `tests/parity` compares output and\n\
         gradients of every family with it. This page is made from the table in `src/checkpoint/families/table.rs`, and a test\n\
         compares the two: to renew it, run `ARISTOS_WRITE_DOCS=1 cargo test families_page`.\n\n\
         On disk a name with `{e}` has a tensor per expert and projection. Any other name has all experts in one tensor, gate and\n\
         up one after the other, unless a remark follows it.\n\n\
         | `model_type` | on disk | router | experts | shared expert | layers with experts |\n|---|---|---|---|---|---|\n",
    );
    let frequent =
        table::FAMILIES.iter().find(|entry| entry.model_type == "deepseek_v3").map(|entry| entry.router.describe());
    for family in Family::all() {
        let entry = family.0;
        let names: Vec<String> = family.model_types().map(|name| format!("`{name}`")).collect();
        let mut layouts: Vec<String> = Vec::new();
        for layout in entry.layouts {
            let experts = &layout.experts;
            // The page's head describes the two most frequent packings.
            let text = match experts.packing {
                Packing::Separate => format!("`{}`", experts.up),
                Packing::Fused if experts.gate == experts.up => format!("`{}`", experts.up),
                _ => format!("`{}`: {}", experts.up, experts.describe()),
            };
            if !layouts.contains(&text) {
                layouts.push(text);
            }
        }
        let router = entry.router.describe();
        let cells = [
            names.join(", "),
            layouts.join("; "),
            if entry.model_type != "deepseek_v3" && Some(&router) == frequent.as_ref() {
                "as `deepseek_v3`".into()
            } else {
                router
            },
            entry.describe_experts(),
            entry.describe_shared(),
            entry.describe_layers(),
        ];
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
    page += "\n## Quantised on disk\n\n\
        Read into f32 or bf16 as a layer is loaded, and computed in that: FP8 (E4M3) with a scale for each block, as DeepSeek-V3 has it, in any\n\
        family (`quant_method` fp8, with a `weight_block_size`); MXFP4, as gpt-oss has it, in gpt_oss. Gradients have the names and shapes of the unquantised\n\
        model. Any other `quant_method` is refused by its name.\n";
    page += "\n## Notes\n\n";
    for entry in table::FAMILIES.iter().filter(|entry| !entry.note.is_empty()) {
        let _ = writeln!(page, "- `{}`: {}", entry.model_type, entry.note);
    }
    page += "\nA device computes the layers of the families whose routers are softmax or sigmoid, with or without a bias and groups\n\
             ranked by two experts, and whose experts are plain or gated MLPs; what else it is asked for it refuses in one line.\n\n\
             ## Left out\n\n";
    for (family, why) in UNSUPPORTED {
        let _ = writeln!(page, "- {family}: {why}.");
    }
    page
}

impl Router {
    fn describe(&self) -> String {
        let mut text = match self.scoring {
            Scoring::Softmax => "softmax",
            Scoring::Sigmoid => "sigmoid",
            Scoring::SqrtSoftplus => "sqrt(softplus)",
        }
        .to_owned();
        if self.mixer.is_some() {
            text = "SparseMixer".into();
        }
        if self.logit_bias {
            text += " of biased logits";
        }
        if let Some(cap) = self.softcap {
            let _ = write!(text, " of logits capped by `{}`", cap.name());
        }
        match self.bias {
            Switch::On => text += ", bias in selection",
            Switch::Field(field) => {
                let _ = write!(text, ", bias in selection by `{}`", field.name());
            }
            Switch::Off => {}
        }
        if self.select_logits {
            text += " by logits";
        }
        if self.groups.is_some() {
            text += match self.group_score {
                GroupScore::BestTwo => ", groups by their two best",
                GroupScore::Best => ", groups by their best",
            };
        }
        match self.renormalise {
            Switch::On if self.mixer.is_none() => text += ", renormalised",
            Switch::Field(field) => {
                let _ = write!(text, ", renormalised by `{}`", field.name());
            }
            Switch::On | Switch::Off => {}
        }
        if let Some(scaling) = self.scaling {
            let _ = write!(text, ", times `{}`", scaling.name());
        }
        if self.weigh_input {
            text += ", weight on the expert's input";
        }
        text
    }
}

impl Entry {
    fn describe_experts(&self) -> String {
        let activation = match self.activation {
            ActivationRule::Field(field) => format!("`{}`", field.name()),
            ActivationRule::Fixed(activation) => format!("{activation:?}"),
        };
        let mut text = if self.gated { format!("gated, {activation}") } else { format!("ungated, {activation}") };
        text += match self.glu {
            GluRule::Product => "",
            GluRule::Clamped(_) => ", clamped",
            GluRule::ScaledSigmoid { .. } => ", clamped, up + 1",
        };
        if self.bias {
            text += ", biases";
        }
        if let Some(field) = self.identity_experts {
            let _ = write!(text, "; identity experts: `{}`", field.name());
        }
        text
    }

    fn describe_shared(&self) -> String {
        let text = match self.shared {
            Shared::None => return "none".into(),
            Shared::One => "one, as wide as an expert".into(),
            Shared::Times(field) => format!("`{}`", field.name()),
            Shared::Width(field) => format!("width `{}`", field.name()),
            Shared::Product(a, b) => format!("width `{}` times `{}`", a.name(), b.name()),
        };
        if self.shared_gate { text + ", with a gate" } else { text }
    }

    fn describe_layers(&self) -> String {
        match self.experts_in {
            ExpertsIn::All => "all".into(),
            ExpertsIn::From(field) => format!("from `{}` on", field.name()),
            ExpertsIn::Types { dense, .. } if dense.name().is_empty() => "`mlp_layer_types`".into(),
            ExpertsIn::Types { dense, .. } => format!("`mlp_layer_types`, `{}`", dense.name()),
            ExpertsIn::Step(_) => "`decoder_sparse_step`, `mlp_only_layers`".into(),
            ExpertsIn::Period => "`expert_layer_period`, `expert_layer_offset`".into(),
            ExpertsIn::Range => "`moe_layer_start_index`, `moe_layer_end_index`, `moe_layer_interval`".into(),
            ExpertsIn::Listed => "`moe_layers`, `interleave_moe_layer_step`".into(),
            ExpertsIn::Blocks => "`layers_block_type`".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_page_is_up_to_date() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/families.md");
        if std::env::var_os("ARISTOS_WRITE_DOCS").is_some() {
            std::fs::write(&path, families_page()).unwrap();
        }
        let page = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(page == families_page(), "docs/families.md is old: run ARISTOS_WRITE_DOCS=1 cargo test families_page");
    }

    #[test]
    fn family_names_are_unique() {
        let mut names: Vec<&str> = Family::all().flat_map(Family::model_types).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(table::FAMILIES.iter().all(|entry| !entry.layouts.is_empty() && !entry.hidden.name().is_empty()));
    }
}
