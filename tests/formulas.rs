//! Formulas of particular model families: the layer against the float64 reference, and a mistake in each formula, which
//! the comparison must detect.

#[macro_use]
mod common;

use aristos::check::{CHOICE_TOLERANCE, Problem, TOLERANCE_BF16, TOLERANCE_F32, judge, reference_with};
use aristos::moe::kernels::Element;
use aristos::moe::synthetic::{RouterKind, Synthetic};
use aristos::moe::{
    Activation, Dtype, Glu, GroupScore, LayerConfig, MlpConfig, Norm, Options, RouterConfig, Scoring, SharedConfig,
    SparseMixer, WeightSource,
};
use common::{Step, assert_close, even, heap_bytes, mixtral, reference, run, shm, synthetic};
use half::bf16;

const TOKENS: usize = 37;

type Change = fn(&mut LayerConfig);

/// A layer with a special formula, and mistakes in that formula, as changed configurations. Clamped layers are not run
/// in bf16, because a derivative jumps at the limit and rounding decides the side of values near it.
struct Formula {
    name: &'static str,
    layer: LayerConfig,
    bf16: bool,
    mistakes: Vec<(&'static str, Change)>,
}

fn formula(name: &'static str, layer: LayerConfig, mistakes: Vec<(&'static str, Change)>) -> Formula {
    Formula { name, bf16: layer.expert.glu == Glu::PRODUCT, layer, mistakes }
}

fn formulas() -> Vec<Formula> {
    let base = mixtral(24, 20, 7, 3);
    let sigmoid = with!(base.clone(); router = RouterConfig::sigmoid(3));
    let softplus = with!(sigmoid.clone(); router.scoring = Scoring::SqrtSoftplus);
    let grouped = with!(base.clone(); n_experts = 12, router = RouterKind::Sigmoid.config(12, 3));
    let glu = Glu { plus_one: true, ..Glu::clamped(0.75) };
    let gpt_oss = with!(
        base.clone();
        expert = with!(MlpConfig::gated(20, Activation::QuickGelu); glu = glu, bias = true), router.logit_bias = true
    );
    let clamped = with!(base.clone(); expert.glu = Glu::clamped(0.5));
    let after = with!(base.clone(); expert.glu = Glu { limit_after: true, ..Glu::clamped(0.5) });
    let mean = Some(with!(SharedConfig::new(MlpConfig::gated(9, Activation::Silu), true); scale = 0.5));
    vec![
        formula(
            "sqrt(softplus)",
            softplus.clone(),
            vec![
                ("sigmoid", |l| l.router.scoring = Scoring::Sigmoid),
                ("not renormalised", |l| l.router.renormalise = false),
            ],
        ),
        formula(
            "sqrt(softplus) with losses",
            with!(softplus; aux_loss_coef = 0.3, z_loss_coef = 0.1),
            vec![("no loss", |l| l.aux_loss_coef = 0.0)],
        ),
        formula(
            "epsilon",
            with!(sigmoid.clone(); router.norm = Norm::sum(0.25)),
            vec![("none", |l| l.router.norm.epsilon = 0.0)],
        ),
        formula(
            "floor",
            with!(base.clone(); router.norm.floor = 0.95),
            vec![("none", |l| l.router.norm.floor = 0.0), ("above all", |l| l.router.norm.floor = 1.0)],
        ),
        formula(
            "p-norm",
            with!(base.clone(); router.norm.order = 2.0),
            vec![("the sum", |l| l.router.norm.order = 1.0), ("p = 3", |l| l.router.norm.order = 3.0)],
        ),
        formula("half-norm", with!(base.clone(); router.norm.order = 0.5), vec![]),
        formula(
            "softcap",
            with!(sigmoid.clone(); router.softcap = 1.5, z_loss_coef = 0.1),
            vec![("none", |l| l.router.softcap = 0.0), ("another", |l| l.router.softcap = 1.6)],
        ),
        formula(
            "groups by their best",
            with!(grouped.clone(); router.group_score = GroupScore::Best),
            vec![("another scaling", |l| l.router.scaling *= 1.01)],
        ),
        formula(
            "selection by logits",
            with!(sigmoid; router.select_logits = true, router.correction_bias = true),
            vec![("weights by softmax", |l| l.router.scoring = Scoring::Softmax)],
        ),
        formula(
            "weights on inputs",
            with!(base.clone(); router.weigh_input = true, router.renormalise = false),
            vec![("on outputs", |l| l.router.weigh_input = false)],
        ),
        formula(
            "SparseMixer",
            with!(base.clone(); router.top_k = 2, router.sparse_mixer = Some(SparseMixer { jitter: 0.4 })),
            vec![("another jitter", |l| l.router.sparse_mixer = Some(SparseMixer { jitter: 0.1 }))],
        ),
        formula(
            "identity experts",
            with!(base.clone(); identity_experts = 5, router.correction_bias = true),
            vec![("another scaling", |l| l.router.scaling = 1.01)],
        ),
        formula(
            "gpt-oss",
            gpt_oss,
            vec![
                ("no + 1", |l| l.expert.glu.plus_one = false),
                ("no limit", |l| l.expert.glu.limit = 0.0),
                ("another limit", |l| l.expert.glu.limit = 0.8),
                ("SiLU", |l| l.expert.activation = Activation::Silu),
                ("limit after", |l| l.expert.glu.limit_after = true),
            ],
        ),
        formula(
            "clamped SwiGLU",
            clamped,
            vec![("no limit", |l| l.expert.glu.limit = 0.0), ("limit after", |l| l.expert.glu.limit_after = true)],
        ),
        formula("clamped after the activation", after, vec![("before", |l| l.expert.glu.limit_after = false)]),
        formula(
            "ReLU^2",
            with!(base.clone(); expert = MlpConfig::plain(20, Activation::Relu2)),
            vec![("ReLU", |l| l.expert.activation = Activation::Relu)],
        ),
        formula(
            "ReLU^2, gated, with biases",
            with!(base.clone(); expert = with!(MlpConfig::gated(20, Activation::Relu2); bias = true)),
            vec![],
        ),
        formula(
            "QuickGELU",
            with!(base.clone(); expert = MlpConfig::plain(20, Activation::QuickGelu)),
            vec![("GELU", |l| l.expert.activation = Activation::Gelu)],
        ),
        formula(
            "a scaled shared expert",
            with!(base; shared = mean),
            vec![("not scaled", |l| l.shared = l.shared.map(|s| with!(s; scale = 1.0)))],
        ),
    ]
}

fn steps<E: Element>(source: &Synthetic, pes: usize) -> Step {
    let options = with!(Options::default(); chunk_rows = Some(5), tile_rows = Some(8));
    let heap = heap_bytes::<E>(source.config(), pes, TOKENS.div_ceil(pes), &options);
    run::<_, E>(shm(pes, heap), source, &[even(TOKENS, pes)], &options, 1).unwrap().remove(0)
}

#[test]
fn every_formula_matches_the_reference_on_any_number_of_pes() {
    for Formula { name, layer, bf16: in_bf16, .. } in formulas() {
        let source = synthetic(layer, 4);
        for pes in [1, 2, 3] {
            let step = steps::<f32>(&source, pes);
            let want = reference::<f32>(&source, TOKENS, &step.chosen);
            assert_close(&step, &want, TOLERANCE_F32, &format!("{name}, {pes} PEs"));
        }
        if in_bf16 {
            let step = steps::<bf16>(&source, 3);
            let want = reference::<bf16>(&source, TOKENS, &step.chosen);
            assert_close(&step, &want, TOLERANCE_BF16, &format!("{name} in bf16"));
        }
    }
}

/// Whether the check passes for the layer's results if the reference uses `config`.
fn passes(source: &Synthetic, config: &LayerConfig, step: &Step) -> bool {
    let (x, dy) = (source.hidden_states(0..TOKENS), source.grad_output(0..TOKENS));
    let mut good = true;
    let problem = Problem {
        config,
        tokens: TOKENS,
        hidden_states: &x,
        grad_output: Some(&dy),
        weights: &|id| source.load(id),
        chosen: Some(&step.chosen),
        choice_tolerance: CHOICE_TOLERANCE,
        dtype: Dtype::F32,
        wire: None,
    };
    let want = reference_with(&problem, &mut |id, grad| -> Result<(), aristos::check::CheckError> {
        good &= judge("grad", &step.grads[&id], &grad.values, &grad.bounds, Dtype::F32).passed();
        Ok(())
    });
    let Ok(want) = want else { return false };
    good &= judge("output", &step.output, &want.output, &want.output_bounds, Dtype::F32).passed();
    let (dx, bounds) = (want.grad_hidden_states.unwrap_or_default(), &want.grad_hidden_states_bounds);
    good && judge("dx", &step.grad_hidden_states, &dx, bounds, Dtype::F32).passed()
}

#[test]
fn wrong_formula_fails_the_check() {
    let mut found = 0;
    for Formula { name, layer, mistakes, .. } in formulas() {
        let source = synthetic(layer.clone(), 4);
        let step = steps::<f32>(&source, 1);
        assert!(passes(&source, &layer, &step), "{name}: the check fails without a mistake");
        for (mistake, change) in mistakes {
            let mut wrong = layer.clone();
            change(&mut wrong);
            assert!(!passes(&source, &wrong, &step), "{name}: {mistake} passes the check");
            found += 1;
        }
    }
    println!("{found} mistakes, all found");
}

#[test]
fn identity_experts_are_chosen() {
    let formula = formulas().into_iter().find(|f| f.name == "identity experts").unwrap();
    let source = synthetic(formula.layer, 4);
    let step = steps::<f32>(&source, 2);
    assert!(step.chosen.iter().any(|&e| e >= 7) && step.chosen.iter().any(|&e| e < 7), "{:?}", step.chosen);
}
