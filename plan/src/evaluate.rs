//! Plans and groups in terms of device indices, and their objective.

use std::collections::HashMap;

use crate::cluster::{Cluster, Links};
use crate::objective::{Evaluation, Problem};
use crate::placed;
use crate::placement::DeviceExperts;
use crate::spread::Spread;
use crate::workload::Workload;
use crate::{Plan, PlannedGroup, Terms};

/// A plan's groups as ascending indices of the cluster's devices, and the experts of each device; devices that the cluster does not have are
/// left out.
pub(crate) fn indices(cluster: &Cluster, plan: &Plan) -> (Vec<Vec<u32>>, Vec<Spread>) {
    let index: HashMap<u64, u32> = cluster.devices.iter().map(|d| d.id).zip(0..).collect();
    let group = |group: &PlannedGroup| {
        let mut devices: Vec<(u32, u64)> = group.devices.iter().filter_map(|id| Some((*index.get(id)?, *id))).collect();
        devices.sort_unstable();
        let (members, ids): (Vec<u32>, Vec<u64>) = devices.into_iter().unzip();
        let held = ids.iter().map(|id| group.experts.get(id).cloned().unwrap_or_default()).collect();
        (members, Spread::of(group, held, &ids))
    };
    plan.groups.iter().map(group).unzip()
}

/// The objective of groups on this cluster, computed fresh: with placements the placed one, else the published one.
pub(crate) fn evaluate(
    cluster: &Cluster,
    workload: &Workload,
    groups: &[Vec<u32>],
    placements: Option<&[DeviceExperts]>,
) -> Evaluation {
    if let Some(placements) = placements {
        return placed::evaluate(cluster, workload, groups, placements);
    }
    match &cluster.links {
        Links::Matrix(matrix) => Problem::new(&cluster.devices, matrix, workload, false).evaluate_exactly(groups),
        Links::Tiers(tiers) => Problem::new(&cluster.devices, tiers, workload, false).evaluate_exactly(groups),
    }
}

/// The parts of an evaluation's worst group.
pub(crate) fn terms(evaluation: &Evaluation) -> Terms {
    let worst = evaluation.worst();
    Terms {
        gamma: evaluation.gamma,
        compute_ms: evaluation.compute_ms[worst],
        communication_ms: evaluation.communication_ms[worst],
        all_reduce_ms: evaluation.all_reduce_ms,
    }
}
