//! A probed cluster as text.

use super::table::{count, plain, right_aligned};
use crate::cluster::{Cluster, LinkTable};

/// Devices and links listed; the rest is counted.
const LISTED: usize = 16;

/// Devices, then links: alpha, beta, residual of the fit, and slowdown while all send.
pub(crate) fn cluster_text(cluster: &Cluster) -> String {
    let n = cluster.devices.len();
    let mut table = plain();
    table.set_header(["device", "host", "GFLOP/s", "experts", "exchange factor"]);
    for (i, device) in cluster.devices.iter().take(LISTED).enumerate() {
        table.add_row([
            device.id.to_string(),
            device.host.clone(),
            format!("{:.2}", device.flop_per_ms * 1e-6),
            device.memory_experts.to_string(),
            cluster.probe.as_ref().map_or(String::new(), |probe| format!("{:.2}", probe.exchange_factor[i])),
        ]);
    }
    let mut text = right_aligned(table, 2) + "\n";
    if n > LISTED {
        text += &format!("({} more)\n", n - LISTED);
    }
    let mut table = plain();
    table.set_header(["link", "alpha, us", "GB/s", "residual", "contention"]);
    let pairs = (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).filter(|(i, j)| i != j);
    for (i, j) in pairs.take(LISTED) {
        let link = cluster.links.link(i, j);
        let of = |rows: fn(&crate::cluster::Probe) -> &Vec<Vec<f64>>| cluster.probe.as_ref().map(|p| rows(p)[i][j]);
        table.add_row([
            format!("{} to {}", cluster.devices[i].id, cluster.devices[j].id),
            format!("{:.2}", link.alpha_ms * 1e3),
            format!("{:.2}", 1.0 / link.beta_ms_per_mb),
            of(|probe| &probe.residual).map_or(String::new(), |share| format!("{:.1}%", 100.0 * share)),
            of(|probe| &probe.contention).map_or(String::new(), |factor| format!("{factor:.2}")),
        ]);
    }
    if n > 1 {
        text += &format!("\n{}\n", right_aligned(table, 1));
    }
    if (n * n - n) > LISTED {
        text += &format!("({} more)\n", count((n * n - n - LISTED) as u64, "link"));
    }
    text
}
