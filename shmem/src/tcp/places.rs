//! The addresses at which the PEs listen, which PE 0 sends to all of them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::control::Nonce;

/// The address at which a PE listens, and the name of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) address: SocketAddr,
    pub(super) host: String,
}

/// The data of a `World` frame: the number of the session, then the PEs' places.
pub(super) fn to_bytes(session: &Nonce, places: &[Place]) -> Vec<u8> {
    let mut bytes = session.0.to_vec();
    for Place { address, host } in places {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        bytes.extend(ip.octets());
        bytes.extend(address.port().to_le_bytes());
        bytes.extend((host.len() as u16).to_le_bytes());
        bytes.extend(host.as_bytes());
    }
    bytes
}

/// Reads the places of `n` PEs; `None` if any is missing or malformed.
pub(super) fn from_bytes(bytes: &[u8], n: usize) -> Option<(Nonce, Vec<Place>)> {
    let (session, mut bytes) = bytes.split_first_chunk()?;
    let mut places = Vec::with_capacity(n);
    for _ in 0..n {
        let (ip, rest) = bytes.split_first_chunk::<16>()?;
        let (port, rest) = rest.split_first_chunk::<2>()?;
        let (len, rest) = rest.split_first_chunk::<2>()?;
        let (host, rest) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
        let ip = IpAddr::V6(Ipv6Addr::from(*ip)).to_canonical();
        let address = SocketAddr::new(ip, u16::from_le_bytes(*port));
        places.push(Place { address, host: String::from_utf8_lossy(host).into_owned() });
        bytes = rest;
    }
    Some((Nonce(*session), places))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_survive_their_encoding() {
        let place = |address: &str, host: &str| Place { address: address.parse().unwrap(), host: host.to_string() };
        let places = [place("10.0.0.1:5", "a"), place("[fe80::1]:65535", ""), place("127.0.0.1:80", "node1")];
        let bytes = to_bytes(&Nonce([3; 32]), &places);
        assert_eq!(from_bytes(&bytes, 3), Some((Nonce([3; 32]), places.to_vec())));
        assert_eq!(from_bytes(&bytes[..bytes.len() - 1], 3), None);
        assert_eq!(from_bytes(&bytes, 4), None);
    }
}
