//! Hosts emulated by network namespaces of this machine (`tests/hosts/hosts`), and the traffic between them.
#![allow(dead_code)]

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::skip;

/// A set of hosts, which are removed on drop.
pub struct Hosts {
    /// Keeps the hosts alive until its standard input is closed.
    owner: Child,
    /// Per host: its address, and a process that stays in its namespaces.
    hosts: Vec<(String, u32)>,
    /// The process of their link, if they have one.
    link: Option<u32>,
    environment: String,
}

impl Hosts {
    /// The program that creates hosts; with `--on ADDRESS`, inside them, it replaces ssh.
    pub const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hosts/hosts");

    /// Creates `n` hosts. Returns `None` and skips the test if that is impossible on this machine.
    pub fn make(n: usize) -> Option<Hosts> {
        Self::create(&[], n)
    }

    /// Like [`Hosts::make`], with a link that delays, reorders and drops packets according to `settings` (`tests/hosts/link`).
    pub fn with_link(n: usize, settings: &str) -> Option<Hosts> {
        Self::create(&["--link", settings], n)
    }

    fn create(flags: &[&str], n: usize) -> Option<Hosts> {
        if !rustix::process::geteuid().is_root() {
            skip::skip("network namespaces are root's to make");
            return None;
        }
        let mut owner = Command::new(Self::PROGRAM)
            .args(flags)
            .args([&n.to_string(), "sh", "-c", r#"echo "${HOSTS_LINK-} $HOSTS_PIDS"; exec cat"#])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(owner.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let hosts: Vec<(String, u32)> = line
            .split_whitespace()
            .filter_map(|pair| pair.split_once('='))
            .map(|(address, pid)| (address.to_string(), pid.parse().unwrap()))
            .collect();
        if hosts.len() != n {
            assert_eq!(owner.wait().unwrap().code(), Some(77), "{line}");
            skip::skip("no network namespaces here");
            return None;
        }
        let (link, environment) = line.split_once(' ').unwrap();
        Some(Hosts { owner, hosts, link: link.parse().ok(), environment: environment.trim().to_string() })
    }

    /// The number of hosts.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// The address of a host.
    pub fn address(&self, host: usize) -> &str {
        &self.hosts[host].0
    }

    /// The addresses of all hosts, separated by commas.
    pub fn addresses(&self) -> String {
        self.hosts.iter().map(|(address, _)| &**address).collect::<Vec<_>>().join(",")
    }

    /// A command for a program on a host, in the repository's root.
    pub fn command<S: AsRef<OsStr>>(
        &self,
        host: usize,
        program: impl AsRef<OsStr>,
        args: impl IntoIterator<Item = S>,
    ) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["-t", &self.hosts[host].1.to_string(), "-n", "-u", "-m", "--"]);
        command.args(["env", "-C", env!("CARGO_MANIFEST_DIR")]).arg(program).args(args);
        // Used by `hosts --on`.
        command.env("HOSTS", self.addresses()).env("HOSTS_PIDS", &self.environment);
        command
    }

    /// Total bytes that the hosts' network interfaces have sent since their creation, including headers and acknowledgements.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes_by("eth0")
    }

    /// Like [`Hosts::sent_bytes`] for another interface, such as `lo`, through which a host reaches itself.
    pub fn sent_bytes_by(&self, interface: &str) -> u64 {
        let prefix = format!("{interface}:");
        let sent = |(_, pid): &(String, u32)| {
            let table = fs::read_to_string(format!("/proc/{pid}/net/dev")).unwrap();
            let row = table.lines().find_map(|line| line.trim().strip_prefix(&*prefix)).unwrap();
            // Eight columns for receiving, then the bytes sent.
            row.split_whitespace().nth(8).unwrap().parse::<u64>().unwrap()
        };
        self.hosts.iter().map(sent).sum()
    }

    /// Sum of a TCP counter over all hosts, such as `Tcp`, `RetransSegs`, or `TcpExt`, `TCPOFOQueue`.
    pub fn counted(&self, table: &str, name: &str) -> u64 {
        let counted = |(_, pid): &(String, u32)| {
            let tables =
                ["snmp", "netstat"].map(|file| fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap()).concat();
            let mut rows = tables.lines().filter_map(|line| line.strip_prefix(table)?.strip_prefix(": "));
            let (names, values) = (rows.next().unwrap(), rows.next().unwrap());
            let mut columns = names.split(' ').zip(values.split(' '));
            columns.find(|(column, _)| *column == name).unwrap().1.parse::<u64>().unwrap()
        };
        self.hosts.iter().map(counted).sum()
    }

    /// Sets a host's interface up or down.
    pub fn switch(&self, host: usize, state: &str) {
        let status = self.command(host, "ip", ["link", "set", "eth0", state]).status().unwrap();
        assert!(status.success());
    }

    /// Changes the settings of the link.
    pub fn set(&self, settings: &str) {
        let link = self.link.expect("these hosts have a link");
        fs::write(format!("/proc/{link}/fd/0"), format!("{settings}\n")).unwrap();
    }

    /// The names of a host's shared memory segments.
    pub fn shared_memory(&self, host: usize) -> Vec<String> {
        let entries = fs::read_dir(format!("/proc/{}/root/dev/shm", self.hosts[host].1)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Fails the test if anything besides the hosts' own processes runs on a host, a socket listens, or named shared memory
    /// exists.
    #[track_caller]
    pub fn assert_empty(&self) {
        for (host, (_, pid)) in self.hosts.iter().enumerate() {
            let net = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
            let own = net(&pid.to_string());
            let all = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok());
            let mut left: Vec<String> = all
                .filter(|process| process.parse::<u32>().is_ok() && net(process) == own)
                .filter_map(|process| fs::read_to_string(format!("/proc/{process}/comm")).ok())
                .filter(|name| !["sleep", "link", "python3", "cat"].contains(&name.trim_end()))
                .collect();
            let sockets = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap();
            // The fourth column is the state; 0A is LISTEN.
            let listening = |line: &&str| line.split_whitespace().nth(3) == Some("0A");
            left.extend(sockets.lines().filter(listening).map(str::to_string));
            left.extend(self.shared_memory(host));
            assert!(left.is_empty(), "left on host {host}: {left:?}");
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        drop(self.owner.stdin.take());
        let _ = self.owner.wait();
    }
}
