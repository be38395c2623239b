//! Expert-parallel groups, uneven placements and replicas on devices: results match the CPU layer's.

use aristos::moe::cpu::replica_bytes;
use aristos::moe::placement::Split;
use aristos::moe::{Groups, Layer, Replicas, WeightId};
use aristos::shmem::{GroupTransport, ShmTransport, Shmem};

use super::contract::flat;
use super::groupings::{groupings, groups, replicated};
use super::*;

/// Merged results of all PEs in a step, the rows of each PE's experts, and the traffic.
#[derive(Debug, PartialEq)]
pub struct Done {
    step: Step,
    rows: Vec<Vec<u64>>,
    /// Rounds of the forward pass, the maximum over PEs.
    rounds: usize,
    pub traffic: Traffic,
}

/// The spec of the layer of PE `pe`'s group.
fn spec_in(source: &Synthetic, groups: &Groups, pe: usize, tokens: usize, options: &Options) -> LayerSpec {
    let group = groups.position(pe).0;
    let placement = groups.placement(group).clone();
    let options = with!(options.clone(); hosts = options.hosts.of(groups.members(group)));
    LayerSpec::new(source.config().clone(), placement.n_pes(), tokens)
        .placement(placement)
        .dtype(Dtype::Bf16)
        .options(options)
}

/// Options for all groups, with the hosts of the whole world.
fn device_options(of: &Groups, options: &Options) -> DeviceOptions {
    with!(DeviceOptions::default(); groups = Some(of.clone()), hosts = options.hosts.clone())
}

/// Runs the tokens of PE `pe` through a layer, `steps` times; results must be bitwise equal.
fn repeat<L: MoeLayer>(layer: &mut L, source: &Synthetic, range: Range<usize>, steps: usize) -> common::PeStep {
    let (x, dy) = (source.hidden_states(range.clone()), source.grad_output(range));
    let mut step = || common::one_step(layer, &x, &dy).unwrap_or_else(|error| panic!("{error}"));
    let first = step();
    for _ in 1..steps {
        let again = step();
        assert_eq!((&again.output, &again.grad_input), (&first.output, &first.grad_input));
        assert_eq!((flat(&again.grads), &again.routed), (flat(&first.grads), &first.routed));
    }
    first
}

/// Merges the results of all PEs. Holders of the same weight must have the same gradient bits.
fn gathered(by_pe: Vec<common::PeStep>, config: &LayerConfig, groups: &Groups) -> Done {
    let mut done = Done { step: Step::default(), rows: Vec::new(), rounds: 0, traffic: Traffic::default() };
    for (pe, one) in by_pe.into_iter().enumerate() {
        done.step.output.extend(&one.output);
        done.step.grad_hidden_states.extend(&one.grad_input);
        done.step.chosen.extend(&one.routed.chosen);
        done.rows.push(one.routed.expert_rows.clone());
        done.rounds = done.rounds.max(one.rounds);
        done.traffic.add(&one.traffic);
        let (group, index) = groups.position(pe);
        for id in config.weights() {
            let Some(grad) = one.grads.get(id, groups.placement(group), index) else { continue };
            let held = done.step.grads.entry(id).or_insert_with(|| grad.to_vec());
            assert_eq!(held, grad, "{id:?} on PE {pe}");
        }
    }
    done
}

pub fn on_devices(world: &World, source: &Synthetic, of: &Groups, tokens: usize, steps: usize) -> Done {
    let n = (0..of.len()).map(|g| of.members(g).len()).sum();
    let splits = even(tokens, n);
    let by_pe = on_pes(world.pes(n), |gpu| {
        let me = gpu.my_pe();
        let spec = spec_in(source, of, me, tokens.div_ceil(n), &world.options);
        let device = device_options(of, &world.options);
        let mut layer = DeviceLayer::new(gpu, spec, source, &device).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(layer.my_pe(), of.position(me).1);
        assert_eq!(gpu.symmetric_bytes().0 as u64, layer.symmetric_bytes().next_multiple_of(64));
        let done = repeat(&mut layer, source, splits[me].clone(), steps);
        layer.free().unwrap();
        done
    });
    gathered(by_pe, source.config(), of)
}

fn on_cpus(source: &Synthetic, of: &Groups, tokens: usize, options: &Options) -> Done {
    let (config, n) = (source.config(), (0..of.len()).map(|g| of.members(g).len()).sum());
    let splits = even(tokens, n);
    let spec = |pe| spec_in(source, of, pe, tokens.div_ceil(n), options);
    let heap = (0..n).map(|pe| spec(pe).heap_bytes().unwrap()).max().unwrap();
    let bytes = heap + replica_bytes(config, of, None) + 4096;
    let by_pe = common::on_pes(shm(n, Shmem::<ShmTransport>::heap_bytes_for(n, bytes)), |world| {
        let me = world.my_pe();
        let team = world.team_split(world.world(), of.members(of.position(me).0)).unwrap().unwrap();
        let shmem = Shmem::new(GroupTransport::new(&world, team, heap).unwrap());
        let exchange = Replicas::new(&world, config, of.clone()).unwrap();
        let mut layer = Layer::<_, bf16>::builder(spec(me)).exchange(exchange).build(&shmem, source).unwrap();
        let done = repeat(&mut layer, source, splits[me].clone(), 1);
        world.barrier_all(std::time::Instant::now() + options.wait_limit).unwrap();
        done
    });
    gathered(by_pe, config, of)
}

/// Devices choose the same experts as the CPU and send each holder the same rows. Results match the CPU's and float64's
/// up to rounding.
pub fn assert_same_as_on_cpus(world: &World, source: &Synthetic, of: &Groups, tokens: usize, what: &str) {
    let got = on_devices(world, source, of, tokens, 2);
    let want = on_cpus(source, of, tokens, &world.options);
    assert_eq!((&got.step.chosen, &got.rows), (&want.step.chosen, &want.rows), "{what}");
    if (got.rounds, want.rounds) == (1, 1) {
        assert_eq!(got.traffic.relay_bytes, want.traffic.relay_bytes, "{what}");
    }
    let near = |name: &str, got: &[f32], want: &[f32]| {
        let want: Vec<f64> = want.iter().map(|&x| x.into()).collect();
        let deviation = aristos::check::compare(name, got, &want);
        assert!(deviation.relative <= TOLERANCE_BF16, "{what}: {deviation:?}");
    };
    near("output", &got.step.output, &want.step.output);
    near("grad_hidden_states", &got.step.grad_hidden_states, &want.step.grad_hidden_states);
    for (id, grad) in &want.step.grads {
        near(&format!("{id:?}"), &got.step.grads[id], grad);
    }
    let reference = reference_rounded(source, tokens, &got.step.chosen, world.round());
    assert_close(&got.step, &reference, world.tolerance(), what);
}

/// Layers with sums or counts over the groups.
fn layers() -> Vec<(&'static str, LayerConfig)> {
    let base = mixtral(24, 24, 7, 2);
    let mlp = with!(base.expert; bias = true);
    let shared = Some(SharedConfig::new(with!(mlp; intermediate = 16), true));
    vec![
        ("mixtral", base.clone()),
        (
            "biases, a shared expert, losses",
            with!(base.clone(); expert = mlp, shared = shared, aux_loss_coef = 0.3, z_loss_coef = 0.1),
        ),
        ("capacity", with!(base.clone(); capacity_factor = Some(0.8), router.top_k = 3)),
        ("rounds", with!(base; router = RouterKind::Sigmoid.config(7, 3), aux_loss_coef = 0.3)),
    ]
}

#[test]
fn groups_and_replicas_match_the_cpu_layer() {
    let (layers, groupings) = (layers(), groupings(7));
    let all = (layers.len() * groupings.len() * 4) as u64;
    let sample = Sample::new(6, all);
    for number in sample.numbers() {
        // Another layer, grouping and world each time.
        let number = (number * 37 % all) as usize;
        let (name, config) = &layers[number % layers.len()];
        let (grouping, n, of) = &groupings[number / layers.len() % groupings.len()];
        let mut world = World::new().seed(number as u64);
        let kind = number / layers.len() / groupings.len();
        if kind % 2 == 1 {
            world = world.network(*n);
        }
        if kind / 2 == 1 {
            world = world.mode(Mode::Bulk);
        }
        if *name == "rounds" {
            world.options.budget_factor = 0.4;
        }
        let source = synthetic(config.clone(), 3 + number as u64);
        let tokens = [37, 64, 3][number % 3];
        assert_same_as_on_cpus(
            &world,
            &source,
            of,
            tokens,
            &format!("{number}: {name}, {grouping}, {tokens} tokens, kind {kind}"),
        );
    }
}

/// One PE has no expert, another many, and replicas share several segments of tokens.
#[test]
fn replicas_of_an_expert_with_many_tokens_match_the_cpu_layer() {
    let source = hot(&mixtral(16, 16, 6, 2), 0.2, 0.9);
    let uneven = groups(3, &[&[0, 1, 2]], 6, |_, e| usize::from(e > 1) * 2);
    let world = World::new();
    for of in [&uneven, &replicated(3, &uneven)] {
        let (got, want) = (on_devices(&world, &source, of, 700, 1), on_cpus(&source, of, 700, &world.options));
        assert_eq!((&got.step.chosen, &got.rows), (&want.step.chosen, &want.rows));
    }
}

/// With the caller's routing, gradients of experts are summed, and those of the router are zeros.
#[test]
fn callers_routing_with_replicas_and_groups() {
    let (config, n, k, h) = (mixtral(16, 16, 6, 2), 4, 2, 16);
    let source = synthetic(config.clone(), 8);
    let of = replicated(n, &groups(n, &[&[3, 0], &[1, 2]], 6, |_, e| e));
    let world = World::new();
    let by_pe = on_pes(world.pes(n), |gpu| {
        let me = gpu.my_pe();
        let spec = spec_in(&source, &of, me, 5, &world.options);
        let device = with!(DeviceOptions::default(); groups = Some(of.clone()));
        let mut layer = DeviceLayer::new(gpu, spec, &source, &device).unwrap();
        let tokens = 5 * me..5 * me + 5;
        let (x, dy) = (source.hidden_states(tokens.clone()), source.grad_output(tokens));
        // The layer's own choices in reverse order.
        let own = repeat(&mut layer, &source, 5 * me..5 * me + 5, 1);
        let swapped = |i: usize| i - i % k + (k - 1 - i % k);
        let ids: Vec<i32> = (0..5 * k).map(|i| own.routed.chosen[swapped(i)] as i32).collect();
        let weights: Vec<f32> = (0..5 * k).map(|i| own.routed.weights[swapped(i)]).collect();
        let (x, dy) = (layer.rows(&x, "x").unwrap(), layer.rows(&dy, "dy").unwrap());
        let (ids, weights) = (layer.ids(&ids).unwrap(), layer.values(&weights).unwrap());
        let mut out = layer.values(&vec![0.0; 5 * h]).unwrap();
        let (mut dx, mut dw) = (layer.values(&vec![0.0; 5 * h]).unwrap(), layer.values(&[0.0; 10]).unwrap());
        let mut saved = layer.experts(&x, &ids, &weights, &mut out).unwrap();
        layer.experts_backward(&mut saved, &x, &dy, &mut dx, &mut dw).unwrap();
        layer.finish(&saved).unwrap();
        let (grads, output) = (layer.gradients().unwrap().clone(), out.read_vec::<f32>(0, 5 * h).unwrap());
        assert_eq!(output, own.output);
        assert_eq!(flat(&grads)[1..], flat(&own.grads)[1..], "PE {me}");
        assert!(grads.router.iter().all(|&g| g == 0.0));
        layer.free().unwrap();
        grads.experts.len()
    });
    assert_eq!(by_pe, (0..n).map(|pe| of.experts(pe).len()).collect::<Vec<_>>());
}

/// Detects groups that do not sum their gradients: here each group is a world of its own with its part of the tokens.
#[test]
#[should_panic(expected = "Expert(")]
fn unsummed_gradients_are_detected() {
    let source = synthetic(mixtral(16, 16, 6, 2), 5);
    let (world, pair) = (World::new(), groups(2, &[&[0, 1]], 6, |_, e| e));
    let both = groups(4, &[&[0, 1], &[2, 3]], 6, |_, e| e);
    let (first, mut got) =
        (on_devices(&world, &source, &pair, 20, 1).step, on_devices(&world, &source, &both, 40, 1).step);
    assert_eq!(first.chosen, got.chosen[..40]);
    let mut want = reference_rounded(&source, 40, &got.chosen, world.round());
    let of_expert = |id: &WeightId| matches!(id, WeightId::Expert(..));
    got.grads = first.grads.into_iter().filter(|(id, _)| of_expert(id)).collect();
    want.grads.retain(|id, _| of_expert(id));
    assert_close(&got, &want, world.tolerance(), "not summed");
}

/// Rows sent to another replica than planned are detected, although they change results only by rounding.
#[test]
fn rows_sent_to_the_wrong_replica_are_detected() {
    let source = synthetic(mixtral(16, 16, 7, 2), 5);
    let plain = groups(3, &[&[0, 1, 2]], 7, |_, e| e);
    let (right, world) = (replicated(3, &plain), World::new());
    // PE 1 sends its tokens with expert 2 to PE 0 instead of keeping them.
    let shares = vec![vec![1.0, 0.0], vec![1.0, 0.0], vec![0.5, 0.5]];
    let split = Split { expert: 2, holders: vec![0, 1], shares };
    let wrong = plain.placement(0).clone().with_replicas(&[split]).unwrap();
    let wrong = Groups::new(3, vec![(vec![0, 1, 2], wrong)]).unwrap();
    let (got, want) = (on_devices(&world, &source, &wrong, 60, 1), on_cpus(&source, &right, 60, &world.options));
    let rows = |done: &Done, of: &Groups| {
        let at = |pe: usize| of.experts(pe).iter().position(|&e| e == 2).map(|local| done.rows[pe][local]);
        (at(0), at(1))
    };
    assert_eq!(got.step.chosen, want.step.chosen);
    assert_ne!(rows(&got, &wrong), rows(&want, &right));
}

/// The error names a PE that omits its backward, by its number in the world, whether it is in another group or the
/// same.
#[test]
fn silent_pe_of_any_group_is_reported() {
    let source = synthetic(mixtral(16, 16, 6, 2), 5);
    let of = groups(4, &[&[0, 2], &[3, 1]], 6, |_, e| e);
    let mut world = World::new();
    world.options.wait_limit = Duration::from_millis(1500);
    for (silent, names) in [(vec![3, 1], [(0, 3), (2, 1)]), (vec![0], [(2, 0), (2, 0)])] {
        let errors = on_pes(world.pes(4), |gpu| {
            let me = gpu.my_pe();
            let device = with!(DeviceOptions::default(); groups = Some(of.clone()));
            let spec = spec_in(&source, &of, me, 4, &world.options);
            let mut layer = DeviceLayer::new(gpu, spec, &source, &device).unwrap();
            let mut tokens = Tokens::new(gpu, &source, 4 * me..4 * me + 4, world.dtype);
            let mut saved = layer.forward(&tokens.x, &mut tokens.output).unwrap();
            layer.finish(&saved).unwrap();
            if silent.contains(&me) {
                return String::new();
            }
            layer.backward(&mut saved, &tokens.x, &tokens.grad_output, &mut tokens.grad_input).unwrap();
            layer.finish(&saved).err().map_or(String::new(), |error| error.to_string())
        });
        for (me, peer) in names {
            let text = &errors[me];
            assert!(text.starts_with(&format!("PE {me} waited 1.5 s in phase ")), "{text}");
            assert!(text.contains(&format!(" for PE {peer}: its ")), "{text}");
        }
    }
}

#[test]
fn groups_of_another_world_are_rejected() {
    let source = synthetic(mixtral(16, 16, 6, 2), 5);
    let world = World::new();
    let refused = |of: Groups, spec: LayerSpec| {
        let device = with!(DeviceOptions::default(); groups = Some(of));
        let gpu = world.pes(1).remove(0);
        DeviceLayer::new(&gpu, spec, &source, &device).err().unwrap().to_string()
    };
    let (one, two) = (groups(1, &[&[0]], 6, |_, _| 0), groups(2, &[&[0, 1]], 6, |_, e| e));
    let spec = |of: &Groups| spec_in(&source, of, 0, 4, &world.options);
    assert_eq!(refused(two.clone(), spec(&two)), "the groups' number of PEs is 2, expected 1");
    assert_eq!(refused(one, spec(&two)), "the placement's number of PEs is 2, expected 1");
}
