//! Lists the addresses of this host's network interfaces, and chooses among another host's addresses.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};

use if_addrs::{IfAddr, get_if_addrs};

use super::JobError;

/// Listens at a free port: on the loopback interface if all PEs are on this host (`one_host`), otherwise on all interfaces.
///
/// # Errors
/// The system's.
pub fn listen(one_host: bool) -> io::Result<TcpListener> {
    if one_host {
        return TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    }
    // An IPv6 listener accepts IPv4 connections too. Hosts without IPv6 need an IPv4 listener.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
}

/// This host's addresses without link-local ones; loopback addresses are last.
///
/// # Errors
/// The system's.
pub fn own() -> io::Result<Vec<IpAddr>> {
    let mut addresses: Vec<IpAddr> =
        get_if_addrs()?.iter().filter(|interface| !interface.is_link_local()).map(|interface| interface.ip()).collect();
    addresses.sort_by_key(IpAddr::is_loopback);
    Ok(addresses)
}

/// Returns the `HOST:PORT` at which this host reaches the host with the addresses `theirs`. If the addresses are this host's own, that is
/// loopback. Otherwise it is an address in a network that both hosts share, or else the first address, to which a route may exist.
///
/// # Errors
/// Returns an error of one line if this host's addresses cannot be read, or if `theirs` has no address.
pub fn reachable(theirs: &[IpAddr], port: u16) -> Result<String, JobError> {
    let mine =
        get_if_addrs().map_err(|error| JobError::Peers(format!("cannot read this host's addresses: {error}")))?;
    let mine: Vec<IfAddr> = mine.into_iter().map(|interface| interface.addr).collect();
    let address = choose(theirs, &mine).ok_or_else(|| JobError::Peers("PE 0's host has no address".to_string()))?;
    Ok(std::net::SocketAddr::new(address, port).to_string())
}

fn choose(theirs: &[IpAddr], mine: &[IfAddr]) -> Option<IpAddr> {
    let outside = || theirs.iter().copied().filter(|address| !address.is_loopback());
    // Container bridges have the same address on many hosts. So one equal address does not prove that the hosts are the same; all must be
    // equal.
    let same_host = outside().all(|address| mine.iter().any(|own| own.ip() == address));
    if same_host {
        return Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let shared = |address: &IpAddr| mine.iter().any(|own| own.ip() != *address && in_network(own, *address));
    outside().find(shared).or_else(|| outside().next())
}

/// Whether an address is in the network of an interface.
fn in_network(interface: &IfAddr, address: IpAddr) -> bool {
    let bits = |bytes: &[u8]| bytes.iter().fold(0u128, |bits, byte| bits << 8 | u128::from(*byte));
    let (own, other, mask) = match (interface, address) {
        (IfAddr::V4(own), IpAddr::V4(other)) => {
            (bits(&own.ip.octets()), bits(&other.octets()), bits(&own.netmask.octets()))
        }
        (IfAddr::V6(own), IpAddr::V6(other)) => {
            (bits(&own.ip.octets()), bits(&other.octets()), bits(&own.netmask.octets()))
        }
        _ => return false,
    };
    own & mask == other & mask
}

#[cfg(test)]
mod tests {
    use if_addrs::{Ifv4Addr, Ifv6Addr};

    use super::*;

    fn interface(address: &str, prefix: u32) -> IfAddr {
        match address.parse().unwrap() {
            IpAddr::V4(ip) => {
                let netmask = Ipv4Addr::from(u32::MAX << (32 - prefix));
                IfAddr::V4(Ifv4Addr { ip, netmask, prefixlen: prefix as u8, broadcast: None })
            }
            IpAddr::V6(ip) => {
                let netmask = Ipv6Addr::from(u128::MAX << (128 - prefix));
                IfAddr::V6(Ifv6Addr { ip, netmask, prefixlen: prefix as u8, broadcast: None })
            }
        }
    }

    #[test]
    fn reachable_address_is_chosen() {
        let mine = [
            interface("127.0.0.1", 8),
            interface("172.17.0.1", 16), // A container bridge, with the same address on every host.
            interface("10.1.2.7", 24),
            interface("fd00:1::7", 64),
        ];
        for (theirs, expected) in [
            (&["172.17.0.1", "192.168.5.1", "10.1.2.3", "127.0.0.1"][..], Some("10.1.2.3")),
            (&["172.17.0.1", "10.1.2.7", "fd00:1::7", "127.0.0.1"], Some("127.0.0.1")),
            (&["192.168.5.1", "fd00:1::3"], Some("fd00:1::3")),
            (&["192.168.5.1", "192.168.6.1"], Some("192.168.5.1")),
            (&["127.0.0.1"], Some("127.0.0.1")),
        ] {
            let theirs: Vec<IpAddr> = theirs.iter().map(|address| address.parse().unwrap()).collect();
            assert_eq!(choose(&theirs, &mine), expected.map(|address| address.parse().unwrap()), "{theirs:?}");
        }
    }

    #[test]
    fn host_reaches_itself() {
        let listener = listen(true).unwrap();
        let place = reachable(&own().unwrap(), listener.local_addr().unwrap().port()).unwrap();
        assert!(std::net::TcpStream::connect(place).is_ok());
    }
}
