//! Several expert-parallel groups, with any placement of experts, compute one layer.

#[macro_use]
mod common;
#[path = "common/groupings.rs"]
mod groupings;

use std::time::{Duration, Instant};

use aristos::check::TOLERANCE_F32;
use aristos::moe::cpu::{Exchange, replica_bytes};
use aristos::moe::placement::Split;
use aristos::moe::synthetic::{RouterKind, Synthetic};
use aristos::moe::{
    Balance, Groups, Layer, LayerConfig, LayerSpec, Load, MlpGradients, Mode, MoeError, Options, Placement, Replicas,
    SharedConfig, WeightSource,
};
use aristos::shmem::reorder::{ReorderTransport, ReorderWorld};
use aristos::shmem::{GroupTransport, ShmTransport, Shmem, Transport};
use common::{PeStep, Step, assert_close, even, forward, mixtral, on_pes, one_step, reference, run, shm, synthetic};
use groupings::{groupings, groups, replicated};

type Group<'s, T> = GroupTransport<'s, T>;

/// The spec of a group's layer.
fn spec(config: &LayerConfig, groups: &Groups, group: usize, max_tokens: usize, options: &Options) -> LayerSpec {
    let n = groups.members(group).len();
    common::spec::<f32>(config, n, max_tokens, options).placement(groups.placement(group).clone())
}

/// Heap bytes that a layer in any group needs.
fn group_heap(config: &LayerConfig, groups: &Groups, max_tokens: usize, options: &Options) -> usize {
    (0..groups.len()).map(|g| spec(config, groups, g, max_tokens, options).heap_bytes().unwrap()).max().unwrap()
}

fn world_heap(config: &LayerConfig, groups: &Groups, n: usize, max_tokens: usize, options: &Options) -> usize {
    let bytes = group_heap(config, groups, max_tokens, options) + replica_bytes(config, groups, None);
    Shmem::<ShmTransport>::heap_bytes_for(n, bytes + 4096)
}

/// Runs `steps` steps of all groups and merges each step. If `lost` is (PE, local expert), that expert's gradients on
/// that PE are missing from the sum over replicas.
#[allow(clippy::too_many_arguments)]
fn run_groups<T: Transport + Send>(
    transports: Vec<T>,
    source: &Synthetic,
    groups: &Groups,
    tokens: usize,
    max_tokens: usize,
    options: &Options,
    steps: usize,
    lost: Option<(usize, usize)>,
) -> Result<Vec<Step>, MoeError> {
    let (n, config) = (transports.len(), source.config());
    let splits = even(tokens, n);
    let heap = group_heap(config, groups, max_tokens, options);
    let by_pe = on_pes(transports, |world| {
        let me = world.my_pe();
        let group = groups.position(me).0;
        let team = world.team_split(world.world(), groups.members(group)).unwrap().unwrap();
        let shmem = Shmem::new(Group::new(&world, team, heap)?);
        let mut layer = Layer::<_, f32>::builder(spec(config, groups, group, max_tokens, options))
            .exchange(DropGradients {
                of: Replicas::new(&world, config, groups.clone())?,
                lost: lost.filter(|(pe, _)| *pe == me).map(|(_, local)| local),
            })
            .build(&shmem, source)?;
        let (x, g) = (source.hidden_states(splits[me].clone()), source.grad_output(splits[me].clone()));
        let all = (0..steps).map(|_| one_step(&mut layer, &x, &g)).collect::<Result<Vec<_>, _>>()?;
        // Other PEs may still read this PE's memory.
        world.barrier_all(options_deadline(options)).unwrap();
        Ok(all)
    });
    let by_pe = by_pe.into_iter().collect::<Result<Vec<_>, MoeError>>()?;
    Ok((0..steps)
        .map(|s| {
            let mut step = Step::default();
            for (pe, results) in by_pe.iter().enumerate() {
                let PeStep { output, grad_input, grads, routed, rounds, .. } = &results[s];
                step.output.extend(output);
                step.grad_hidden_states.extend(grad_input);
                step.chosen.extend(&routed.chosen);
                step.rounds.push(*rounds);
                step.expert_rows.push(routed.expert_rows.iter().sum());
                let (group, index) = groups.position(pe);
                for id in config.weights() {
                    let Some(grad) = grads.get(id, groups.placement(group), index) else { continue };
                    // The owners in all groups have the same bits.
                    let first = step.grads.entry(id).or_insert_with(|| grad.to_vec());
                    assert_eq!(first, grad, "{id:?} on PE {pe}");
                }
            }
            step
        })
        .collect())
}

/// An exchange that sends zeros instead of the gradients of a local expert.
struct DropGradients<X> {
    of: X,
    lost: Option<usize>,
}

impl<X: Exchange> Exchange for DropGradients<X> {
    fn begin(&mut self) {
        self.of.begin();
    }

    fn ready(&mut self, local: usize, grads: &MlpGradients) {
        if self.lost != Some(local) {
            return self.of.ready(local, grads);
        }
        let zeros = |values: &Vec<f32>| vec![0.0; values.len()];
        self.of.ready(
            local,
            &MlpGradients { matrix: grads.matrix.each_ref().map(zeros), bias: grads.bias.each_ref().map(zeros) },
        );
    }

    fn poll(&mut self, grads: &mut [MlpGradients]) -> bool {
        self.of.poll(grads)
    }

    fn finish(&mut self, grads: &mut [MlpGradients], deadline: Instant) -> Result<(), MoeError> {
        self.of.finish(grads, deadline)
    }

    fn sum(&self, data: &mut [f32], deadline: Instant) -> Result<(), MoeError> {
        self.of.sum(data, deadline)
    }

    fn loads(&self, mine: &Load, deadline: Instant) -> Result<Vec<Load>, MoeError> {
        self.of.loads(mine, deadline)
    }

    fn counts(&self, mine: &[u32], deadline: Instant) -> Result<(Vec<Vec<u32>>, usize), MoeError> {
        self.of.counts(mine, deadline)
    }

    fn regroup(&mut self, groups: &Groups, deadline: Instant) -> Result<(), MoeError> {
        self.of.regroup(groups, deadline)
    }

    fn bytes_put(&self) -> [u64; 2] {
        self.of.bytes_put()
    }
}

fn options_deadline(options: &Options) -> Instant {
    Instant::now() + options.wait_limit
}

fn small(mode: Mode) -> Options {
    with!(Options::default(); mode = mode, chunk_rows = Some(5), tile_rows = Some(8))
}

/// Modes and balances that differ in these groups.
fn cases(groups: &Groups) -> Vec<(Mode, Balance)> {
    let mut cases = vec![(Mode::Pipelined, Balance::Shares), (Mode::Bulk, Balance::Shares)];
    if groups.has_replicas() {
        cases.extend([(Mode::Pipelined, Balance::Split), (Mode::Bulk, Balance::Split)]);
    }
    cases
}

fn by_balance(groupings: Vec<(&str, usize, Groups)>) -> Vec<((&str, usize, Groups), Balance)> {
    let with_split = groupings.iter().filter(|(.., groups)| groups.has_replicas()).cloned();
    let with_split: Vec<_> = with_split.map(|grouping| (grouping, Balance::Split)).collect();
    groupings.into_iter().map(|grouping| (grouping, Balance::Shares)).chain(with_split).collect()
}

fn check(config: LayerConfig, what: &str) {
    let source = synthetic(config.clone(), 3);
    for (name, n, groups) in groupings(config.n_experts) {
        for (mode, balance) in cases(&groups) {
            for (tokens, max_tokens) in [(37, 37usize.div_ceil(n)), (37, 3), (2, 1)] {
                let what = format!("{what}, {name}, {tokens} tokens, {max_tokens} per pass, {mode:?}, {balance:?}");
                let options = with!(small(mode); balance = balance);
                let heap = world_heap(&config, &groups, n, max_tokens, &options);
                let steps = run_groups(shm(n, heap), &source, &groups, tokens, max_tokens, &options, 2, None).unwrap();
                assert_eq!((&steps[0].output, &steps[0].grads), (&steps[1].output, &steps[1].grads), "{what}");
                assert_close(&steps[0], &reference::<f32>(&source, tokens, &steps[0].chosen), TOLERANCE_F32, &what);
            }
        }
    }
}

#[test]
fn groups_compute_what_one_group_computes() {
    check(mixtral(24, 20, 7, 2), "mixtral");
}

#[test]
fn groups_with_biases_and_a_shared_expert() {
    let base = mixtral(24, 20, 7, 3);
    let mlp = with!(base.expert; bias = true);
    let shared = Some(SharedConfig::new(with!(mlp; intermediate = 12), true));
    check(with!(base; expert = mlp, shared = shared), "biases, shared expert");
}

#[test]
fn losses_and_capacity_count_over_all_groups() {
    let base = mixtral(24, 20, 7, 2);
    check(with!(base.clone(); aux_loss_coef = 0.3, z_loss_coef = 0.1), "losses");
    check(with!(base.clone(); capacity_factor = Some(0.8)), "capacity");
    let sigmoid = with!(base; n_experts = 12, router = RouterKind::Sigmoid.config(12, 4));
    check(with!(sigmoid; aux_loss_coef = 0.3), "sigmoid");
}

/// Results are bitwise the same for any order of delivery; a single group's choices are those of a layer without
/// groups.
#[test]
fn results_do_not_depend_on_delivery_order() {
    let source = synthetic(mixtral(16, 12, 6, 2), 5);
    let config = source.config();
    for ((name, n, groups), balance) in by_balance(groupings(config.n_experts)) {
        let (tokens, options) = (17usize, with!(small(Mode::Pipelined); balance = balance));
        let heap = world_heap(config, &groups, n, tokens.div_ceil(n), &options);
        let want = run_groups(shm(n, heap), &source, &groups, tokens, tokens.div_ceil(n), &options, 3, None).unwrap();
        for seed in 0..60 {
            let world: Vec<ReorderTransport> = ReorderWorld::new(n, heap, seed);
            let got = run_groups(world, &source, &groups, tokens, tokens.div_ceil(n), &options, 3, None).unwrap();
            assert_eq!(got, want, "{name}, seed {seed}");
        }
        if groups.len() == 1 {
            let even_heap = common::heap_bytes::<f32>(config, n, tokens, &options);
            let plain = run::<_, f32>(shm(n, even_heap), &source, &[even(tokens, n)], &options, 1).unwrap();
            assert_close(&want[0], &reference::<f32>(&source, tokens, &plain[0].chosen), TOLERANCE_F32, name);
        }
    }
}

/// Every expert is on two of four PEs. With 37 tokens or more the largest load can be the mean, rounded up; shares reach a larger load.
#[test]
fn split_rows_balance_each_batch() {
    let source = synthetic(mixtral(24, 20, 8, 2), 3);
    let config = source.config();
    let even_shares = vec![vec![0.5, 0.5]; 4];
    let split = |expert: usize| {
        let (a, b) = (expert % 4, (expert + 1) % 4);
        Split { expert, holders: vec![a.min(b), a.max(b)], shares: even_shares.clone() }
    };
    let splits: Vec<Split> = (0..8).map(split).collect();
    let groups = Groups::one(Placement::even(8, 4).with_replicas(&splits).unwrap());
    for tokens in [37usize, 90, 200] {
        let loads = |balance: Balance| {
            let options = with!(small(Mode::Pipelined); balance = balance);
            let max_tokens = tokens.div_ceil(4);
            let heap = world_heap(config, &groups, 4, max_tokens, &options);
            let steps = run_groups(shm(4, heap), &source, &groups, tokens, max_tokens, &options, 1, None).unwrap();
            assert_close(&steps[0], &reference::<f32>(&source, tokens, &steps[0].chosen), TOLERANCE_F32, "split");
            steps[0].expert_rows.clone()
        };
        let (shares, split) = (loads(Balance::Shares), loads(Balance::Split));
        assert_eq!(split.iter().sum::<u64>(), 2 * tokens as u64);
        assert_eq!(split.iter().max(), Some(&(2 * tokens as u64).div_ceil(4)), "{tokens} tokens: {split:?}");
        assert!(shares.iter().max() >= split.iter().max(), "{tokens} tokens: {shares:?}");
    }
}

/// Replicas change results only by rounding.
#[test]
fn replicas_compute_what_one_holder_computes() {
    let source = synthetic(with!(mixtral(24, 20, 7, 2); aux_loss_coef = 0.3), 3);
    let config = source.config();
    let (tokens, options) = (90usize, small(Mode::Pipelined));
    let run = |groups: &Groups| {
        let heap = world_heap(config, groups, 4, tokens.div_ceil(4), &options);
        run_groups(shm(4, heap), &source, groups, tokens, tokens.div_ceil(4), &options, 1, None).unwrap().remove(0)
    };
    let plain = groups(4, &[&[0, 1, 2, 3]], 7, |_, e| e);
    let (want, got) = (run(&plain), run(&replicated(4, &plain)));
    assert_eq!(got.chosen, want.chosen);
    let near = |what: &str, got: &[f32], want: &[f32]| {
        let most = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let off = got.iter().zip(want).map(|(got, want)| (got - want).abs()).fold(0.0, f32::max);
        assert!(got.len() == want.len() && off <= 1e-5 * most, "{what}: {off} of {most}");
    };
    near("output", &got.output, &want.output);
    near("grad_hidden_states", &got.grad_hidden_states, &want.grad_hidden_states);
    for (id, grad) in &want.grads {
        near(&format!("{id:?}"), &got.grads[id], grad);
    }
}

#[test]
#[should_panic(expected = "Expert(0")]
fn omitted_replica_is_detected() {
    let source = synthetic(mixtral(24, 20, 7, 2), 3);
    let config = source.config();
    let groups = replicated(4, &groups(4, &[&[0, 1, 2, 3]], 7, |_, e| e));
    let (tokens, options) = (90usize, small(Mode::Pipelined));
    let heap = world_heap(config, &groups, 4, tokens.div_ceil(4), &options);
    let step = run_groups(shm(4, heap), &source, &groups, tokens, tokens.div_ceil(4), &options, 1, Some((2, 0)));
    let step = match step {
        Ok(mut steps) => steps.remove(0),
        Err(error) => unreachable!("{error}"),
    };
    assert_close(&step, &reference::<f32>(&source, tokens, &step.chosen), TOLERANCE_F32, "left out");
}

#[test]
fn replicas_without_an_exchange_are_rejected() {
    let source = synthetic(mixtral(24, 20, 7, 2), 3);
    let groups = replicated(2, &groups(2, &[&[0, 1]], 7, |_, e| e));
    let spec = spec(source.config(), &groups, 0, 4, &Options::default());
    let errors = on_pes(shm(2, spec.heap_bytes().unwrap()), |shmem| {
        let layer = |spec: LayerSpec| Layer::<_, f32>::builder(spec).build(&shmem, &source).map(|_| ());
        layer(spec.clone()).unwrap_err().to_string()
    });
    assert_eq!(
        errors[1],
        "the placement is with replicas, and the layer without an exchange, expected an exchange that sums the replicas' gradients \
         (`Replicas`)"
    );
}

/// The error names a PE of another group that omits its backward, by its number in the world.
#[test]
fn silent_group_is_reported() {
    let source = synthetic(mixtral(16, 12, 6, 2), 5);
    let config = source.config();
    let groups = groups(4, &[&[0, 2], &[3, 1]], 6, |_, e| e);
    let options = with!(small(Mode::Pipelined); wait_limit = Duration::from_millis(300));
    let heap = group_heap(config, &groups, 4, &options);
    let errors = on_pes(shm(4, world_heap(config, &groups, 4, 4, &options)), |world| {
        let me = world.my_pe();
        let group = groups.position(me).0;
        let team = world.team_split(world.world(), groups.members(group)).unwrap().unwrap();
        let shmem = Shmem::new(Group::new(&world, team, heap).unwrap());
        let mut layer = Layer::<_, f32>::builder(spec(config, &groups, group, 4, &options))
            .exchange(Replicas::new(&world, config, groups.clone()).unwrap())
            .build(&shmem, &source)
            .unwrap();
        let x = source.hidden_states(4 * me..4 * me + 4);
        if group == 1 {
            forward(&mut layer, &x).unwrap();
            return String::new();
        }
        one_step(&mut layer, &x, &x).err().unwrap().to_string()
    });
    for (me, peer) in [(0, 3), (2, 1)] {
        let text = &errors[me];
        assert!(
            text.starts_with(&format!("PE {me} waited 0.3 s in phase all-reduce for PE {peer}: its gradients")),
            "{text}"
        );
    }
}
