//! An alpha-beta network with contention: a message has the latency alpha, and occupies one port of its sender and one of its receiver for
//! its bytes times beta.
//!
//! A PE has a port to the other PEs of its host, and a port to the network, which is its own or that of its host. A port sends one message
//! at a time and receives one at a time, in order of arrival. Therefore a PE's messages to several PEs are sent one after the other, and
//! messages from several PEs to one (incast) are received one after the other.

use aristos_formats::cluster::{Cluster, LinkTable, Links};

/// Whether PEs share a port to the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Nics {
    /// Each PE has its own.
    #[default]
    PerPe,
    /// The PEs of a host share one.
    PerHost,
}

/// The ports, and the times until which they are busy.
pub struct Network<'c> {
    links: &'c Links,
    host: Vec<u32>,
    /// By PE, the index of its port to the network. Ports 0 to n - 1 are those of the n PEs inside their hosts.
    nic: Vec<u32>,
    sending_until_s: Vec<f64>,
    receiving_until_s: Vec<f64>,
    /// Busy time of each port, sending and receiving, s.
    busy_s: [Vec<f64>; 2],
    /// Speed of the network ports relative to the cluster file.
    nic_speed: f64,
}

impl<'c> Network<'c> {
    /// The network of a cluster, with network ports `nic_speed` times as fast as in the cluster file.
    pub fn new(cluster: &'c Cluster, nics: Nics, nic_speed: f64) -> Network<'c> {
        let n = cluster.devices.len();
        let (mut host, mut nic) = (vec![0; n], vec![0; n]);
        for (h, devices) in cluster.hosts().iter().enumerate() {
            for &device in devices {
                host[device as usize] = h as u32;
                let port = match nics {
                    Nics::PerPe => device as usize,
                    Nics::PerHost => h,
                };
                nic[device as usize] = (n + port) as u32;
            }
        }
        let zeros = || vec![0.0; 2 * n];
        Network {
            links: &cluster.links,
            host,
            nic,
            sending_until_s: zeros(),
            receiving_until_s: zeros(),
            busy_s: [zeros(), zeros()],
            nic_speed,
        }
    }

    /// Whether two PEs are on one host.
    pub fn is_local(&self, a: usize, b: usize) -> bool {
        self.host[a] == self.host[b]
    }

    /// The number of a PE's host.
    pub fn host(&self, pe: usize) -> usize {
        self.host[pe] as usize
    }

    /// Latency from one PE to another, s.
    pub fn alpha_s(&self, from: usize, to: usize) -> f64 {
        self.links.link(from, to).alpha_ms * 1e-3
    }

    /// Time that a message of `bytes` bytes occupies each port, s.
    pub fn wire_s(&self, from: usize, to: usize, bytes: f64) -> f64 {
        let speed = if self.is_local(from, to) { 1.0 } else { self.nic_speed };
        self.links.link(from, to).beta_ms_per_mb * 1e-9 * bytes / speed
    }

    fn port(&self, pe: usize, other: usize) -> usize {
        if self.is_local(pe, other) { pe } else { self.nic[pe] as usize }
    }

    /// Time at which the port through which `pe` sends to `to` has sent all queued messages, s.
    pub fn sending_until_s(&self, pe: usize, to: usize) -> f64 {
        self.sending_until_s[self.port(pe, to)]
    }

    /// Queues a message; returns the time at which its head leaves, s.
    pub fn send(&mut self, from: usize, to: usize, bytes: f64, now_s: f64) -> f64 {
        let (port, wire_s) = (self.port(from, to), self.wire_s(from, to, bytes));
        let start_s = self.sending_until_s[port].max(now_s);
        self.sending_until_s[port] = start_s + wire_s;
        self.busy_s[0][port] += wire_s;
        start_s
    }

    /// Receives a message whose head has arrived; returns the time at which the whole message has arrived, s.
    pub fn receive(&mut self, from: usize, to: usize, bytes: f64, now_s: f64) -> f64 {
        let (port, wire_s) = (self.port(to, from), self.wire_s(from, to, bytes));
        let end_s = self.receiving_until_s[port].max(now_s) + wire_s;
        self.receiving_until_s[port] = end_s;
        self.busy_s[1][port] += wire_s;
        end_s
    }

    /// Busy time of the busiest port of a PE, s.
    pub fn busy_s(&self, pe: usize) -> f64 {
        let ports = [pe, self.nic[pe] as usize];
        self.busy_s.iter().flat_map(|busy| ports.map(|port| busy[port])).fold(0.0, f64::max)
    }

    /// Time of a message without contention, s.
    pub fn alone_s(&self, from: usize, to: usize, bytes: f64) -> f64 {
        self.alpha_s(from, to) + self.wire_s(from, to, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aristos_formats::cluster::{Device, Link, Tier, Tiers};

    /// Hosts of two PEs; alpha is 1 ms and beta 1 ms/MB inside a host, and 10 ms and 4 ms/MB between hosts.
    fn cluster(n: usize) -> Cluster {
        let link = |alpha_ms, beta_ms_per_mb| Link { alpha_ms, beta_ms_per_mb };
        let tiers = vec![Tier { size: 2, link: link(1.0, 1.0) }, Tier { size: n, link: link(10.0, 4.0) }];
        let devices = (0..n).map(|i| Device::new(i as u64, format!("h{}", i / 2), 1e9, 1)).collect();
        Cluster::new(devices, Links::Tiers(Tiers::new(n, tiers).unwrap()))
    }

    fn pass(network: &mut Network, from: usize, to: usize, mb: f64) -> f64 {
        let head_s = network.send(from, to, mb * 1e6, 0.0) + network.alpha_s(from, to);
        network.receive(from, to, mb * 1e6, head_s) * 1e3
    }

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-9, "{got}, expected {want}");
    }

    #[test]
    fn ports_serve_one_message_at_a_time() {
        let cluster = cluster(8);
        let mut network = Network::new(&cluster, Nics::PerPe, 1.0);
        near(pass(&mut network, 0, 1, 2.0), 3.0);
        near(pass(&mut network, 0, 2, 2.0), 18.0);
        // A second message to another host waits for the network port; a second message inside the host waits for the port inside.
        near(pass(&mut network, 0, 4, 2.0), 26.0);
        near(pass(&mut network, 0, 1, 2.0), 5.0);
        near(network.busy_s(0), 16e-3);
        // Incast: PE 7 receives all messages, one after the other.
        let mut network = Network::new(&cluster, Nics::PerPe, 1.0);
        for k in 0..5 {
            near(pass(&mut network, k, 7, 1.0), 10.0 + 4.0 * (k + 1) as f64);
        }
        // Twice the NIC speed halves beta between hosts, but not inside them.
        let mut network = Network::new(&cluster, Nics::PerPe, 2.0);
        near(pass(&mut network, 0, 2, 2.0), 14.0);
        near(pass(&mut network, 0, 1, 2.0), 3.0);
    }

    #[test]
    fn pes_of_a_host_may_share_its_nic() {
        let cluster = cluster(4);
        for (nics, second) in [(Nics::PerPe, 14.0), (Nics::PerHost, 18.0)] {
            let mut network = Network::new(&cluster, nics, 1.0);
            near(pass(&mut network, 0, 2, 1.0), 14.0);
            near(pass(&mut network, 1, 3, 1.0), second);
        }
    }
}
