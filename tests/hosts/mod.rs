//! Hosts that are network namespaces of this machine (`tests/hosts/hosts`), and what crosses the network between them.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::skip;

/// Some hosts, which are gone with this value.
pub struct Hosts {
    /// Keeps them, until its standard input ends.
    keeper: Child,
    /// By host: its address, and a process that stays in its namespaces.
    hosts: Vec<(String, u32)>,
    environment: String,
}

impl Hosts {
    /// What makes them; with `--on ADDRESS`, inside of them, what ssh would be.
    pub const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts/hosts");

    /// `n` hosts; `None`, and the test is skipped, where none can be made.
    pub fn make(n: usize) -> Option<Hosts> {
        if !rustix::process::geteuid().is_root() {
            skip::skip("network namespaces are root's to make");
            return None;
        }
        let mut keeper = Command::new(Self::PROGRAM)
            .args([&n.to_string(), "sh", "-c", r#"echo "$HOSTS_PIDS"; exec cat"#])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let hosts: Vec<(String, u32)> = line
            .split_whitespace()
            .map(|pair| pair.split_once('=').unwrap())
            .map(|(address, pid)| (address.to_string(), pid.parse().unwrap()))
            .collect();
        if hosts.len() != n {
            assert_eq!(keeper.wait().unwrap().code(), Some(77), "{line}");
            skip::skip("no network namespaces here");
            return None;
        }
        Some(Hosts { keeper, hosts, environment: line.trim().to_string() })
    }

    /// How many they are.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// The address of a host.
    pub fn address(&self, host: usize) -> &str {
        &self.hosts[host].0
    }

    /// All of them, with commas between.
    pub fn addresses(&self) -> String {
        self.hosts.iter().map(|(address, _)| &**address).collect::<Vec<_>>().join(",")
    }

    /// A program on a host, in the repository's root.
    pub fn command<S: AsRef<OsStr>>(
        &self,
        host: usize,
        program: impl AsRef<OsStr>,
        args: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.hosts[host].1.to_string(), "-n", "-u", "-m", "--"]);
        command.args(["env", "-C", env!("CARGO_MANIFEST_DIR")]).arg(program).args(args);
        // What `hosts --on` goes by.
        command.env("HOSTS", self.addresses()).env("HOSTS_PIDS", &self.environment);
        command
    }

    /// Bytes that all hosts have sent each other since they were made, as their network interfaces count: headers and
    /// acknowledgements included.
    pub fn sent_bytes(&self) -> u64 {
        let sent = |(_, pid): &(String, u32)| {
            let table = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
            let row = table.lines().find_map(|line| line.trim().strip_prefix("eth0:")).unwrap();
            // Eight columns of what was received, then bytes sent.
            row.split_whitespace().nth(8).unwrap().parse::<u64>().unwrap()
        };
        self.hosts.iter().map(sent).sum()
    }

    /// Takes a host off the network.
    pub fn cut(&self, host: usize) {
        let status = self.command(host, "ip", ["link", "set", "eth0", "down"]).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}
