//! A probed cluster as text.

use super::text::{TextTable, or_blank};
use crate::cluster::{Cluster, LinkTable, Probe};

/// Devices and links that are listed; the others are counted.
const LISTED: usize = 16;

/// The devices, then the links: alpha, beta, residual of the fit, and slowdown while all PEs send.
pub(crate) fn cluster_text(cluster: &Cluster) -> String {
    let n = cluster.devices.len();
    let mut table = TextTable::new(2, ["device", "host", "GFLOP/s", "experts", "exchange factor"]).at_most(LISTED);
    for (i, device) in cluster.devices.iter().enumerate() {
        table.row([
            device.id.to_string(),
            device.host.clone(),
            format!("{:.2}", device.flop_per_ms * 1e-6),
            device.memory_experts.to_string(),
            or_blank(cluster.probe.as_ref().map(|probe| probe.exchange_factor[i]), 2),
        ]);
    }
    let mut text = table.render();
    if n > 1 {
        let mut table = TextTable::new(1, ["link", "alpha, us", "GB/s", "residual", "contention"]).at_most(LISTED);
        for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j) {
            let link = cluster.links.link(i, j);
            let probed = |rows: fn(&Probe) -> &Vec<Vec<f64>>| cluster.probe.as_ref().map(|probe| rows(probe)[i][j]);
            table.row([
                format!("{} to {}", cluster.devices[i].id, cluster.devices[j].id),
                format!("{:.2}", link.alpha_ms * 1e3),
                format!("{:.2}", 1.0 / link.beta_ms_per_mb),
                probed(|probe| &probe.residual).map_or(String::new(), |share| format!("{:.1}%", 100.0 * share)),
                or_blank(probed(|probe| &probe.contention), 2),
            ]);
        }
        text += &format!("\n{}", table.render());
    }
    text
}
