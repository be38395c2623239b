//! Experts that move between passes: later results are bitwise those of a layer made with the new placement.

#[macro_use]
mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use aristos::moe::cpu::replica_bytes;
use aristos::moe::placement::Split;
use aristos::moe::synthetic::Synthetic;
use aristos::moe::{
    ExpertState, Groups, Layer, LayerConfig, LayerSpec, MoeError, MoeLayer, Options, Placement, Replicas, WeightError,
    WeightId, WeightSlice, WeightSource,
};
use aristos::shmem::reorder::{ReorderTransport, ReorderWorld};
use aristos::shmem::{GroupTransport, ShmTransport, Shmem, Transport};
use common::{PeStep, even, mixtral, on_pes, one_step, shm, synthetic};

const TOKENS: usize = 60;
const PES: usize = 4;
const SLOTS: usize = 5;

/// Sequences of placements: one group or two, with and without replicas.
fn placements() -> [Vec<Groups>; 2] {
    let even = Placement::even(7, 4);
    let uneven = Placement::from_owners(vec![3, 2, 1, 0, 0, 1, 3], 4);
    let hot = Split { expert: 1, holders: vec![0, 2, 3], shares: vec![vec![0.25, 0.5, 0.25]; 4] };
    let other = Split { expert: 5, holders: vec![1, 2], shares: vec![vec![0.5, 0.5]; 4] };
    let one = |placement: Placement| Groups::one(placement);
    let replicated = one(uneven.clone().with_replicas(&[hot, other]).unwrap());
    let two = |a: Vec<u32>, b: Vec<u32>| {
        let group = |members: [usize; 2], owners| (members.to_vec(), Placement::from_owners(owners, 2));
        Groups::new(4, vec![group([0, 2], a), group([3, 1], b)]).unwrap()
    };
    let first = two(vec![0, 0, 0, 1, 1, 1, 1], vec![0, 1, 0, 1, 0, 1, 0]);
    let second = two(vec![1, 0, 1, 0, 0, 1, 0], vec![0, 0, 0, 1, 1, 1, 1]);
    [vec![one(even), replicated, one(uneven)], vec![first.clone(), second, first]]
}

fn spec(config: &LayerConfig, groups: &Groups, group: usize, options: &Options) -> LayerSpec {
    let n = groups.members(group).len();
    common::spec::<f32>(config, n, TOKENS.div_ceil(PES), options)
        .placement(groups.placement(group).clone())
        .slots(SLOTS)
}

fn group_heap(config: &LayerConfig, groups: &Groups, options: &Options) -> usize {
    (0..groups.len()).map(|g| spec(config, groups, g, options).heap_bytes().unwrap()).max().unwrap()
}

fn heap(config: &LayerConfig, groups: &Groups, options: &Options) -> usize {
    let bytes = group_heap(config, groups, options) + replica_bytes(config, groups, Some(SLOTS));
    Shmem::<ShmTransport>::heap_bytes_for(PES, bytes + 4096)
}

/// An optimizer's state: momentum of each expert that a PE holds.
#[derive(Clone, Debug, Default, PartialEq)]
struct Momentum {
    of: BTreeMap<usize, Vec<f32>>,
    len: usize,
}

impl ExpertState for Momentum {
    fn len(&self) -> usize {
        self.len
    }

    fn export(&mut self, expert: usize, into: &mut [f32]) {
        into.copy_from_slice(&self.of[&expert]);
    }

    fn import(&mut self, expert: usize, values: &[f32]) {
        assert!(self.of.insert(expert, values.to_vec()).is_none());
    }

    fn remove(&mut self, expert: usize) {
        assert!(self.of.remove(&expert).is_some());
    }
}

/// A step of SGD with momentum on the experts.
fn step<L: MoeLayer>(layer: &mut L, momentum: &mut Momentum, x: &[f32], g: &[f32]) -> Result<PeStep, MoeError> {
    let done = one_step(layer, x, g)?;
    let (placement, me) = (layer.spec().placement.clone(), layer.my_pe());
    for &expert in placement.experts(me) {
        let all = momentum.of.get_mut(&expert).unwrap();
        let mut start = 0;
        for id in layer.spec().config.expert_weights(expert) {
            let grad = done.grads.get(id, &placement, me).unwrap();
            let kept = &mut all[start..start + grad.len()];
            start += grad.len();
            let mut weight = vec![0.0; grad.len()];
            layer.weights(id, &mut weight)?;
            for ((weight, kept), grad) in weight.iter_mut().zip(kept).zip(grad) {
                *kept = 0.9 * *kept + grad;
                *weight -= 0.05 * *kept;
            }
            layer.set_weights(id, &weight)?;
        }
        assert_eq!(start, all.len());
    }
    Ok(done)
}

/// Weights by id.
type Snapshot = BTreeMap<WeightId, Vec<f32>>;

/// A source with the weights of some step.
struct At<'s> {
    source: &'s Synthetic,
    weights: Snapshot,
}

impl WeightSource for At<'_> {
    fn config(&self) -> &LayerConfig {
        self.source.config()
    }

    fn name(&self, id: WeightId) -> String {
        self.source.name(id)
    }

    fn weight_slice(&self, id: WeightId) -> WeightSlice {
        self.source.weight_slice(id)
    }

    fn load(&self, id: WeightId) -> Result<Vec<f32>, WeightError> {
        self.weights.get(&id).cloned().map_or_else(|| self.source.load(id), Ok)
    }
}

/// A PE's last step, and its weights and momentum at the end of a run.
struct Ended {
    last: PeStep,
    weights: Snapshot,
    momentum: BTreeMap<usize, Vec<f32>>,
}

/// Two steps with each of `placements`, from these weights and this momentum.
fn run<T: Transport + Send>(
    transports: Vec<T>,
    source: &At,
    momentum: &BTreeMap<usize, Vec<f32>>,
    placements: &[Groups],
    options: &Options,
) -> Vec<Ended> {
    let config = source.config();
    let len = config.expert_weights(0).iter().map(|id| config.shape(*id).iter().product::<usize>()).sum();
    let bytes = group_heap(config, &placements[0], options);
    let splits = even(TOKENS, PES);
    on_pes(transports, |world| {
        let me = world.my_pe();
        let group = placements[0].position(me).0;
        let team = world.team_split(world.world(), placements[0].members(group)).unwrap().unwrap();
        let shmem = Shmem::new(GroupTransport::new(&world, team, bytes).unwrap());
        let exchange = Replicas::with_slots(&world, config, placements[0].clone(), Some(SLOTS)).unwrap();
        let spec = spec(config, &placements[0], group, options);
        let mut layer = Layer::<_, f32>::builder(spec).exchange(exchange).build(&shmem, source).unwrap();
        let held = placements[0].experts(me).iter();
        let of = held.map(|e| (*e, momentum.get(e).cloned().unwrap_or_else(|| vec![0.0; len]))).collect();
        let mut state = Momentum { of, len };
        let (x, g) = (source.source.hidden_states(splits[me].clone()), source.source.grad_output(splits[me].clone()));
        let mut last = None;
        for (k, groups) in placements.iter().enumerate() {
            if k > 0 {
                layer.move_experts(groups, &mut state).unwrap();
            }
            assert_eq!(state.of.keys().copied().collect::<Vec<_>>(), groups.experts(me));
            for _ in 0..2 {
                last = Some(step(&mut layer, &mut state, &x, &g).unwrap());
            }
        }
        let mut weights = Snapshot::new();
        for id in layer.spec().held(layer.my_pe()) {
            let mut values = vec![0.0; config.shape(id).iter().product()];
            layer.weights(id, &mut values).unwrap();
            weights.insert(id, values);
        }
        // Other PEs may still read this PE's memory.
        world.barrier_all(Instant::now() + options.wait_limit).unwrap();
        Ended { last: last.unwrap(), weights, momentum: state.of }
    })
}

/// Weights and momentum of all PEs; holders of the same expert must have the same bits.
fn merge(ended: &[Ended]) -> (Snapshot, BTreeMap<usize, Vec<f32>>) {
    let (mut weights, mut momentum) = (Snapshot::new(), BTreeMap::new());
    for pe in ended {
        for (id, values) in &pe.weights {
            assert_eq!(weights.entry(*id).or_insert_with(|| values.clone()), values, "{id:?}");
        }
        for (expert, values) in &pe.momentum {
            assert_eq!(momentum.entry(*expert).or_insert_with(|| values.clone()), values, "expert {expert}");
        }
    }
    (weights, momentum)
}

fn same(got: &[Ended], want: &[Ended], what: &str) {
    for (pe, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.last.output, want.last.output, "{what}, PE {pe}");
        assert_eq!(got.last.grad_input, want.last.grad_input, "{what}, PE {pe}");
        assert_eq!(got.weights, want.weights, "{what}, PE {pe}");
        assert_eq!(got.momentum, want.momentum, "{what}, PE {pe}");
    }
}

#[test]
fn moved_layer_equals_a_layer_made_with_the_new_placement() {
    let base = mixtral(16, 12, 7, 2);
    let source = synthetic(with!(base.clone(); expert = with!(base.expert; bias = true)), 5);
    let options = with!(Options::default(); chunk_rows = Some(5), tile_rows = Some(8));
    for (k, placements) in placements().iter().enumerate() {
        let bytes = heap(source.config(), &placements[0], &options);
        let at = |weights: Snapshot| At { source: &source, weights };
        let (mut weights, mut momentum) = (Snapshot::new(), BTreeMap::new());
        for end in 1..=placements.len() {
            // Compares a layer whose experts moved step by step with one made at the last placement from the state before it.
            let moved = run(shm(PES, bytes), &at(Snapshot::new()), &BTreeMap::new(), &placements[..end], &options);
            let fresh = run(shm(PES, bytes), &at(weights), &momentum, &placements[end - 1..end], &options);
            same(&moved, &fresh, &format!("placements {k}, {end} of them"));
            (weights, momentum) = merge(&moved);
        }
    }
}

#[test]
fn moves_do_not_depend_on_delivery_order() {
    let source = synthetic(mixtral(16, 12, 7, 2), 5);
    let options = with!(Options::default(); chunk_rows = Some(5), tile_rows = Some(8));
    for placements in placements() {
        let bytes = heap(source.config(), &placements[0], &options);
        let at = At { source: &source, weights: Snapshot::new() };
        let want = run(shm(PES, bytes), &at, &BTreeMap::new(), &placements, &options);
        for seed in 0..20 {
            let world: Vec<ReorderTransport> = ReorderWorld::new(PES, bytes, seed);
            same(&run(world, &at, &BTreeMap::new(), &placements, &options), &want, &format!("seed {seed}"));
        }
    }
}

/// The error names a PE that does not take part in a move or does not send its expert.
#[test]
fn pe_that_skips_a_move_is_reported() {
    let source = synthetic(mixtral(16, 12, 7, 2), 5);
    let config = source.config();
    let options = with!(Options::default(); wait_limit = Duration::from_millis(300));
    let (old, new) = (Placement::even(7, 2), Placement::from_owners(vec![0, 0, 0, 1, 1, 1, 0], 2));
    let spec = common::spec::<f32>(config, 2, 8, &options).placement(old).slots(SLOTS);
    let errors = on_pes(shm(2, spec.heap_bytes().unwrap()), |shmem| {
        let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
        if shmem.my_pe() == 1 {
            return String::new();
        }
        layer.move_experts(&Groups::one(new.clone()), &mut ()).unwrap_err().to_string()
    });
    assert!(
        errors[0].starts_with("PE 0 waited 0.3 s in phase move for PE 1: an expert that moves to it"),
        "{}",
        errors[0]
    );
}

#[test]
fn invalid_moves_are_rejected() {
    let source = synthetic(mixtral(16, 12, 7, 2), 5);
    let options = Options::default();
    let spec = || common::spec::<f32>(source.config(), 1, 8, &options);
    let slots = spec().slots(3).validate(1).unwrap_err().to_string();
    assert_eq!(slots, "slots is 3, expected at least 7, as many experts as a PE holds");
    for (spec, groups, part) in [
        (spec(), Groups::one(Placement::even(7, 1)), "without slots"),
        (spec().slots(7), Groups::one(Placement::even(8, 1)), "other PEs or experts"),
    ] {
        let errors = on_pes(shm(1, spec.heap_bytes().unwrap()), |shmem| {
            let mut layer = Layer::<_, f32>::builder(spec.clone()).build(&shmem, &source).unwrap();
            layer.move_experts(&groups, &mut ()).unwrap_err().to_string()
        });
        assert!(errors[0].starts_with("cannot move experts: ") && errors[0].contains(part), "{}", errors[0]);
    }
}
