//! Rows that cross to another host once, on devices: results match the CPU layer's.

use aristos::moe::{Groups, Hosts};

use super::groupings::{groups, replicated};
use super::groups::{assert_same_as_on_cpus, on_devices};
use super::*;

/// PEs on these hosts; loads and stores reach only PEs of the same host.
fn world(hosts: &[usize]) -> World {
    let n = hosts.len();
    let mut world = World::new();
    world.reachable = Some((0..n * n).map(|i| u8::from(hosts[i / n] == hosts[i % n])).collect());
    world.options.hosts = Hosts::new(hosts.to_vec());
    world
}

/// A single group of all PEs.
fn group(n: usize, experts: usize, assign: impl Fn(usize, usize) -> usize) -> Groups {
    groups(n, &[&(0..n).collect::<Vec<_>>()], experts, assign)
}

/// A plain layer, one with all kinds of gradients, and one with a capacity.
fn layers() -> [LayerConfig; 3] {
    let base = mixtral(24, 24, 9, 3);
    let mlp = with!(base.expert; bias = true);
    let shared = Some(SharedConfig::new(with!(mlp; intermediate = 16), true));
    let everything = with!(base.clone(); expert = mlp, shared = shared, aux_loss_coef = 0.3, z_loss_coef = 0.1);
    let limited = with!(base.clone(); capacity_factor = Some(0.8));
    [base, everything, limited]
}

/// Compares with the CPU layer in each case (name, layer, hosts, groups), with `tokens` tokens; the source of the first
/// case has seed `seed`.
fn check_cases<const N: usize>(cases: [(&str, &LayerConfig, Vec<usize>, Groups); N], seed: u64, tokens: usize) {
    for (number, (name, config, hosts, of)) in cases.into_iter().enumerate() {
        for (budget_factor, mode) in [(2.0, Mode::Pipelined), (0.3, Mode::Pipelined), (0.3, Mode::Bulk)] {
            let mut world = world(&hosts).seed(number as u64).mode(mode);
            world.options.budget_factor = budget_factor;
            let source = synthetic(config.clone(), seed + number as u64);
            let what = format!("{name}, {budget_factor} of the even share, {mode:?}");
            assert_same_as_on_cpus(&world, &source, &of, tokens, &what);
        }
    }
}

#[test]
fn relayed_rows_match_the_cpu_layer() {
    let [base, everything, limited] = layers();
    let cases = [
        ("two of two", &base, vec![0, 0, 1, 1], group(4, 9, |_, e| e)),
        ("mixed numbers, everything that has gradients", &everything, vec![1, 0, 1, 0], group(4, 9, |_, e| e * e)),
        ("hosts of three, one and two", &limited, vec![4, 2, 4, 3, 4, 3], group(6, 9, |_, e| e)),
        ("a PE without experts", &everything, vec![0, 1, 1, 0, 1], group(5, 9, |_, e| 1 + e % 3)),
        ("replicas on both hosts", &base, vec![0, 1, 0, 1], replicated(4, &group(4, 9, |_, e| e))),
    ];
    check_cases(cases, 5, 61);
}

/// Several groups with relays among their own PEs: split over hosts equally and unequally, within a host, and a single
/// PE.
#[test]
fn relayed_rows_of_groups_match_the_cpu_layer() {
    let [base, everything, limited] = layers();
    let halves = groups(8, &[&[0, 2, 5, 7], &[6, 1, 4, 3]], 9, |_, e| e);
    let cases = [
        ("two and two, twice", &base, vec![0, 0, 0, 0, 1, 1, 1, 1], halves.clone()),
        ("replicas in both", &everything, vec![0, 0, 0, 0, 1, 1, 1, 1], replicated(8, &halves)),
        (
            "one and three, a host's own, one alone",
            &everything,
            vec![3, 1, 1, 1, 3, 1, 1],
            groups(7, &[&[3, 0, 1, 2], &[6, 5], &[4]], 9, |_, e| e),
        ),
        (
            "of different sizes, limited",
            &limited,
            vec![0, 1, 0, 1, 0],
            groups(5, &[&[4, 1, 2], &[0, 3]], 9, |g, e| e * (g + 1)),
        ),
    ];
    check_cases(cases, 7, 83);
}

/// Network traffic decreases by the rows that cross once; sums between groups are unchanged.
#[test]
fn relays_reduce_the_bytes_of_groups() {
    let source = synthetic(mixtral(128, 8, 16, 8), 3);
    let of = groups(8, &[&[0, 2, 5, 7], &[6, 1, 4, 3]], 16, |_, e| e);
    let (once, mut each) = (world(&[0, 0, 0, 0, 1, 1, 1, 1]), world(&[0, 0, 0, 0, 1, 1, 1, 1]));
    each.options.hosts = Hosts::default();
    let [once, each] = [once, each].map(|world| on_devices(&world, &source, &of, 320, 1).traffic);
    assert!(each.relay_bytes == 0 && once.relay_bytes > 0, "{once:?}, {each:?}");
    // One row replaces two for a host, since nearly every token has a row for every PE: dispatched and returned,
    // forward and backward.
    let row = 320 * 4 * 128 * 2;
    let less = each.network_bytes - once.network_bytes;
    assert!(less * 100 > row * 90 && less < row * 2, "{less} bytes less of {row}: {once:?}, {each:?}");
}

/// One row per host leaves a host instead of one per PE.
#[test]
fn relays_reduce_the_rows_between_hosts() {
    let source = synthetic(mixtral(24, 24, 16, 8), 3);
    let rows = |world: &World| -> u64 {
        let done = on_pes(world.pes(4), |gpu| {
            let mut layer = new_layer(gpu, world, &source, 40).unwrap();
            let range = 40 * gpu.my_pe()..40 * (gpu.my_pe() + 1);
            let (x, dy) = (source.hidden_states(range.clone()), source.grad_output(range));
            let (x, dy) = (layer.rows(&x, "x").unwrap(), layer.rows(&dy, "dy").unwrap());
            let mut out = layer.values(&vec![0.0; 40 * 24]).unwrap();
            let mut saved = layer.forward(&x, &mut out).unwrap();
            layer.backward(&mut saved, &x, &dy, &mut out).unwrap();
            let traffic = layer.finish(&saved).unwrap().traffic;
            layer.free().unwrap();
            (traffic.dispatch_rows, traffic.combine_rows)
        });
        assert_eq!(done.iter().map(|rows| rows.0).sum::<u64>(), done.iter().map(|rows| rows.1).sum::<u64>());
        done.iter().map(|rows| rows.0).sum()
    };
    let (once, mut each) = (world(&[0, 0, 1, 1]), world(&[0, 0, 1, 1]));
    each.options.hosts = Hosts::default();
    // With 8 of 16 experts on 4 PEs nearly every token has experts on every PE: two sent rows replace three.
    let (once, each) = (rows(&once), rows(&each));
    assert!(each > 450 && once * 100 < each * 70, "{once} rows instead of {each}");
}

#[test]
fn unsupported_relays_are_rejected() {
    let source = synthetic(mixtral(16, 16, 4, 2), 1);
    let mut apart = world(&[0, 0, 1, 1]);
    apart.reachable = Some((0..16).map(|i| u8::from(i % 5 == 0)).collect());
    apart.options.wait_limit = Duration::from_secs(2);
    for line in on_pes(apart.pes(4), |gpu| new_layer(gpu, &apart, &source, 8).map(drop).unwrap_err().to_string()) {
        assert!(line.contains("does not reach the memory of PE") && line.contains("on the same host"), "{line}");
    }
    // With several groups, the hosts of all PEs are required, and must match the layer's.
    let of = groups(4, &[&[0, 1, 2], &[3]], 4, |_, e| e);
    let mut options = small_options();
    options.hosts = Hosts::new(vec![0, 0, 1]);
    let spec = LayerSpec::new(source.config().clone(), 3, 8)
        .placement(of.placement(0).clone())
        .dtype(Dtype::Bf16)
        .options(options);
    let refused = |hosts: &[usize]| {
        let device = with!(DeviceOptions::default(); groups = Some(of.clone()), hosts = Hosts::new(hosts.to_vec()));
        let gpu = World::new().pes(4).remove(0);
        DeviceLayer::new(&gpu, spec.clone(), &source, &device).map(drop).unwrap_err().to_string()
    };
    assert_eq!(refused(&[]), "the hosts is one group's, expected those of all PEs, where there are several groups");
    assert_eq!(refused(&[0, 0, 1]), "the hosts' number of PEs is 3, expected 4");
    assert_eq!(refused(&[0, 1, 1, 1]), "the hosts is others than group 0 has, expected the group's");
}
