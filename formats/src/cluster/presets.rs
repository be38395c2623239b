//! Presets: clusters from published figures, each with its source.

use std::collections::BTreeMap;

use super::links::{Link, Links, Tier, Tiers};
use super::{Cluster, Device};
use crate::InputError;

/// A kind of node.
struct Node {
    name: &'static str,
    what: &'static str,
    devices: usize,
    flop_per_ms: f64,
    memory_experts: u64,
    memory_mb: f64,
    inside: Link,
    between: Link,
    sources: [(&'static str, &'static str); 5],
}

/// Assumed fraction of device memory for experts; the rest is for dense layers, activations and buffers.
const FOR_EXPERTS: f64 = 0.75;
const MEMORY: &str =
    "three quarters of the device's memory, an assumption: dense layers, activations and buffers take the rest";

const A100_FLOP: &str = "312 TFLOP/s dense BF16 (NVIDIA A100 whitepaper, table 1) times 0.43, the share that expert \
                         matrix products reached in the Lysi notebook's measurements";
const PERLMUTTER_INSIDE: &str = "measured with nccl-tests on a Perlmutter GPU node, NVLink 3 (Lysi notebook)";
const PERLMUTTER_BETWEEN: &str =
    "measured with nccl-tests between Perlmutter GPU nodes, a Slingshot 11 NIC per GPU (Lysi notebook)";

const SHARE: f64 = 0.43;
const OF_80_GB: &str =
    "the Lysi notebook's figure for 80 GB, for a GPT-3 350M MoE; a workload with expert_mb does not use it";
const NVLINK_4: &str = "beta: NVLink 4 at its peak, 450 GB/s each way (NVIDIA DGX H200 data sheet: 900 GB/s both ways); alpha: the \
                        Lysi notebook's for NVLink 3; neither measured";
const NVLINK_5: &str = "beta: NVLink 5 at its peak, 900 GB/s each way (14.4 TB/s both ways of 8 GPUs, NVIDIA DGX B200 user guide; 1.8 TB/s a \
                        GPU); alpha: the Lysi notebook's for NVLink 3; neither measured";
const NDR_400: &str = "beta: a 400 Gb/s ConnectX-7 port per GPU at its peak (NVIDIA DGX data sheets); alpha: the Lysi notebook's between \
                       nodes; neither measured";

const NODES: [Node; 8] = [
    Node {
        name: "perlmutter-a100-40gb",
        what: "Perlmutter GPU nodes, 4 A100 of 40 GB",
        devices: 4,
        flop_per_ms: 134_160_000_000.0,
        memory_experts: 16,
        memory_mb: 40_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 0.014 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 0.054 },
        sources: [
            ("flop_per_ms", A100_FLOP),
            ("memory_experts", "half of what the Lysi notebook gives the 80 GB device, for a GPT-3 350M MoE"),
            ("memory_mb", MEMORY),
            ("links, tier 0", PERLMUTTER_INSIDE),
            ("links, tier 1", PERLMUTTER_BETWEEN),
        ],
    },
    Node {
        name: "perlmutter-a100-80gb",
        what: "Perlmutter GPU nodes, 4 A100 of 80 GB",
        devices: 4,
        flop_per_ms: 134_160_000_000.0,
        memory_experts: 32,
        memory_mb: 80_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 0.014 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 0.054 },
        sources: [
            ("flop_per_ms", A100_FLOP),
            ("memory_experts", "the Lysi notebook's figure, for a GPT-3 350M MoE"),
            ("memory_mb", MEMORY),
            ("links, tier 0", PERLMUTTER_INSIDE),
            ("links, tier 1", PERLMUTTER_BETWEEN),
        ],
    },
    Node {
        name: "dgx-h100",
        what: "NVIDIA DGX H100, 8 H100 SXM of 80 GB",
        devices: 8,
        // 989.4 * 0.43, in 10^9 FLOP per ms.
        flop_per_ms: 425_442_000_000.0,
        memory_experts: 32,
        memory_mb: 80_000.0,
        // 1 / 450 and 1 / 50 ms per MB.
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 0.002_222_222_222_222_222 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 0.02 },
        sources: [
            (
                "flop_per_ms",
                "989.4 TFLOP/s dense BF16 (NVIDIA H100 whitepaper, table 2, SXM5) times 0.43, the share that the Lysi \
                 notebook measured on A100; not measured on H100",
            ),
            ("memory_experts", "the Lysi notebook's figure for 80 GB, for a GPT-3 350M MoE"),
            ("memory_mb", MEMORY),
            (
                "links, tier 0",
                "beta: NVLink 4 at its peak, 450 GB/s each way (NVIDIA DGX H100 data sheet: 900 GB/s both ways); alpha: the \
                 Lysi notebook's for NVLink 3; neither measured",
            ),
            (
                "links, tier 1",
                "beta: a 400 Gb/s ConnectX-7 port per GPU at its peak (NVIDIA DGX H100 data sheet); alpha: the Lysi notebook's \
                 between nodes; neither measured",
            ),
        ],
    },
    Node {
        name: "dgx-h200",
        what: "NVIDIA DGX H200, 8 H200 SXM of 141 GB",
        devices: 8,
        flop_per_ms: 989.4e9 * SHARE,
        memory_experts: 32,
        memory_mb: 141_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 1.0 / 450.0 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 1.0 / 50.0 },
        sources: [
            (
                "flop_per_ms",
                "989.4 TFLOP/s dense BF16, that of an H100 SXM5 (NVIDIA H200 data sheet: 1,979 with sparsity), times 0.43, the share \
                 that the Lysi notebook measured on A100; not measured",
            ),
            ("memory_experts", OF_80_GB),
            ("memory_mb", MEMORY),
            ("links, tier 0", NVLINK_4),
            ("links, tier 1", NDR_400),
        ],
    },
    Node {
        name: "dgx-b200",
        what: "NVIDIA DGX B200, 8 B200 of 180 GB",
        devices: 8,
        flop_per_ms: 2250e9 * SHARE,
        memory_experts: 32,
        memory_mb: 180_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 1.0 / 900.0 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 1.0 / 50.0 },
        sources: [
            (
                "flop_per_ms",
                "2,250 TFLOP/s dense BF16 (NVIDIA Blackwell, HGX B200 at 1,000 W) times 0.43, the share that the Lysi notebook measured on \
                 A100; not measured",
            ),
            ("memory_experts", OF_80_GB),
            (
                "memory_mb",
                "1,440 GB of 8 GPUs (NVIDIA DGX B200 user guide); three quarters of it, an assumption, for experts",
            ),
            ("links, tier 0", NVLINK_5),
            ("links, tier 1", NDR_400),
        ],
    },
    Node {
        name: "gb200-nvl72",
        what: "NVIDIA GB200 NVL72, a rack of 72 GPUs of 186 GB in one NVLink domain",
        devices: 72,
        flop_per_ms: 2500e9 * SHARE,
        memory_experts: 32,
        memory_mb: 186_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 1.0 / 900.0 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 1.0 / 50.0 },
        sources: [
            (
                "flop_per_ms",
                "2,500 TFLOP/s dense BF16 (NVIDIA GB200 NVL72: 180 PFLOP/s dense in 72 GPUs) times 0.43, the share that the Lysi \
                 notebook measured on A100; not measured",
            ),
            ("memory_experts", OF_80_GB),
            (
                "memory_mb",
                "13.4 TB of 72 GPUs (NVIDIA GB200 NVL72 data sheet); three quarters of it, an assumption, for experts",
            ),
            ("links, tier 0", NVLINK_5),
            (
                "links, tier 1",
                "beta: a 400 Gb/s port per GPU at its peak (NVIDIA DGX GB200 data sheet); alpha: the Lysi notebook's between nodes; neither measured",
            ),
        ],
    },
    Node {
        name: "alps-gh200",
        what: "Alps GPU nodes, 4 GH200 of 96 GB",
        devices: 4,
        flop_per_ms: 989.4e9 * SHARE,
        memory_experts: 32,
        memory_mb: 96_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 1.0 / 450.0 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 0.054 },
        sources: [
            (
                "flop_per_ms",
                "989.4 TFLOP/s dense BF16, that of an H100 SXM5 (NVIDIA H100 whitepaper, table 2), times 0.43, the share that the Lysi \
                 notebook measured on A100; not measured",
            ),
            ("memory_experts", OF_80_GB),
            (
                "memory_mb",
                "96 GB HBM3 of a GH200 (JUPITER's hardware overview, fz-juelich.de); three quarters of it, an assumption, for experts",
            ),
            (
                "links, tier 0",
                "beta: NVLink 4 at its peak, 150 GB/s each way to each of three peers (JUPITER's hardware overview, the same node \
                 design), 450 GB/s in an exchange with all; alpha: the Lysi notebook's for NVLink 3; neither measured",
            ),
            (
                "links, tier 1",
                "Perlmutter's, a Slingshot 11 NIC per GPU too (Lysi notebook); not measured on Alps (docs.cscs.ch: 4 GH200 a node)",
            ),
        ],
    },
    Node {
        name: "mi300x",
        what: "nodes of 8 AMD Instinct MI300X of 192 GB",
        devices: 8,
        flop_per_ms: 1307.4e9 * SHARE,
        memory_experts: 32,
        memory_mb: 192_000.0,
        inside: Link { alpha_ms: 0.009, beta_ms_per_mb: 1.0 / 448.0 },
        between: Link { alpha_ms: 0.03, beta_ms_per_mb: 1.0 / 50.0 },
        sources: [
            (
                "flop_per_ms",
                "1,307.4 TFLOP/s dense BF16 (AMD Instinct MI300X data sheet) times 0.43, the share that the Lysi notebook measured on \
                 A100; not measured",
            ),
            ("memory_experts", OF_80_GB),
            ("memory_mb", MEMORY),
            (
                "links, tier 0",
                "beta: Infinity Fabric at its peak, 64 GB/s each way to each of seven peers (AMD Instinct MI300X data sheet: 128 GB/s \
                 both ways), 448 GB/s in an exchange with all; alpha: the Lysi notebook's for NVLink 3; neither measured",
            ),
            (
                "links, tier 1",
                "beta: a 400 Gb/s port per GPU at its peak, an assumption; alpha: the Lysi notebook's between nodes; neither measured",
            ),
        ],
    },
];

/// Names and descriptions of the presets.
pub const PRESETS: [(&str, &str); NODES.len()] = {
    let mut all = [("", ""); NODES.len()];
    let mut i = 0;
    while i < NODES.len() {
        all[i] = (NODES[i].name, NODES[i].what);
        i += 1;
    }
    all
};

/// Maximum number of nodes of a preset.
const NODES_MOST: usize = 1 << 16;

/// A cluster from `NAME` or `NAME:NODES` (default: one node).
///
/// # Errors
/// Returns an error for an unknown name or an invalid number of nodes.
pub fn preset(text: &str) -> Result<Cluster, InputError> {
    let (name, nodes) = text.split_once(':').unwrap_or((text, "1"));
    let Some(node) = NODES.iter().find(|node| node.name == name) else {
        let expected = format!("one of {}", NODES.map(|node| node.name).join(", "));
        return Err(InputError::value(format!("preset {name}"), "is unknown", expected));
    };
    let expected = |what: String| InputError::value(format!("preset {text}"), "", what);
    let nodes: usize = nodes.parse().map_err(|_| expected("a number of nodes".into()))?;
    if !(1..=NODES_MOST).contains(&nodes) {
        return Err(expected(format!("1 to {NODES_MOST} nodes")));
    }
    let n = nodes * node.devices;
    let device = |i: usize| Device {
        id: i as u64,
        host: format!("n{}", i / node.devices),
        flop_per_ms: node.flop_per_ms,
        memory_experts: node.memory_experts,
        memory_mb: Some(node.memory_mb * FOR_EXPERTS),
    };
    let mut tiers = vec![Tier { size: node.devices, link: node.inside }];
    if nodes > 1 {
        tiers.push(Tier { size: n, link: node.between });
    }
    Ok(Cluster {
        devices: (0..n).map(device).collect(),
        links: Links::Tiers(Tiers::new(n, tiers).expect("blocks of whole nodes")),
        sources: node
            .sources
            .iter()
            .map(|(what, source)| (what.to_string(), source.to_string()))
            .collect::<BTreeMap<_, _>>(),
        probe: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_clusters_that_read_back() {
        for (name, _) in PRESETS {
            for nodes in [1, 2, 5] {
                let cluster = preset(&format!("{name}:{nodes}")).unwrap();
                assert_eq!(Cluster::from_json(&cluster.to_json()).unwrap(), cluster);
            }
        }
        assert!(preset("dgx").unwrap_err().to_string().contains("expected one of"));
        assert!(preset("dgx-h100:0").unwrap_err().to_string().contains("expected 1 to"));
        assert!(preset("dgx-h100:x").unwrap_err().to_string().contains("number of nodes"));
    }
}
