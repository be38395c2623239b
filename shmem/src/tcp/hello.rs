//! What a process says when it connects to a PE, and what it is answered.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};

use subtle::ConstantTimeEq;

use super::frame::VERSION;

const MAGIC: [u8; 8] = *b"aristos\x01";
/// What precedes the texts of a hello, bytes.
const FIXED_BYTES: usize = 8 + 7 * 4 + NONCE_BYTES;
/// The longest text of a hello, bytes.
pub(super) const MAX_TEXT_BYTES: usize = 512;
/// No hello is longer, bytes.
pub(super) const MAX_HELLO_BYTES: usize = FIXED_BYTES + 3 * MAX_TEXT_BYTES;
/// No answer is longer, bytes.
const MAX_ANSWER_BYTES: usize = 4 << 20;
const NONCE_BYTES: usize = 16;

/// What PE 0 draws for a job, and those know that it has admitted.
pub(super) type Nonce = [u8; NONCE_BYTES];

/// Who connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) pe: u32,
    pub(super) n_pes: u32,
    /// Where it listens for the other PEs.
    pub(super) port: u16,
    /// Zero towards PE 0.
    pub(super) nonce: Nonce,
    /// The program, with its version.
    pub(super) program: Vec<u8>,
    pub(super) token: Vec<u8>,
    /// The name of its host.
    pub(super) host: Vec<u8>,
}

impl Hello {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let lens = [&self.program, &self.token, &self.host].map(|text| text.len() as u32);
        let words = [self.version, self.pe, self.n_pes, self.port.into(), lens[0], lens[1], lens[2]];
        let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        [&MAGIC[..], &words, &self.nonce, &self.program, &self.token, &self.host].concat()
    }

    /// What `bytes` begin with: `Ok(None)` while it is not all there.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Option<Hello>, String> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Err("it sent no valid hello".to_string());
        }
        let Some((fixed, texts)) = bytes.split_at_checked(FIXED_BYTES) else { return Ok(None) };
        let word = |i: usize| fixed[8 + 4 * i..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        if word(0) != VERSION {
            return Err(format!("it is of version {} of the connection, PE 0 of version {VERSION}", word(0)));
        }
        let lens = [4, 5, 6].map(|i| word(i) as usize);
        if lens.iter().any(|&len| len > MAX_TEXT_BYTES) || word(3) > u16::MAX.into() {
            return Err("it sent no valid hello".to_string());
        }
        if texts.len() < lens.iter().sum() {
            return Ok(None);
        }
        let (program, rest) = texts.split_at(lens[0]);
        let (token, rest) = rest.split_at(lens[1]);
        let mut nonce = [0; NONCE_BYTES];
        nonce.copy_from_slice(&fixed[FIXED_BYTES - NONCE_BYTES..]);
        Ok(Some(Hello {
            version: word(0),
            pe: word(1),
            n_pes: word(2),
            port: word(3) as u16,
            nonce,
            program: program.to_vec(),
            token: token.to_vec(),
            host: rest[..lens[2]].to_vec(),
        }))
    }

    /// Whether `said` is of a PE of the job of this one; otherwise why not.
    pub(super) fn admits(&self, said: &Hello) -> Result<(), String> {
        // Takes as long whatever is wrong with them.
        let knows = said.token.ct_eq(&self.token) & said.nonce.ct_eq(&self.nonce);
        if !bool::from(knows) {
            return Err("it does not know the job's token".to_string());
        }
        if said.program != self.program {
            let [theirs, ours] = [said, self].map(|hello| String::from_utf8_lossy(&hello.program).into_owned());
            return Err(format!("it is {theirs}, this is {ours}: all must be the same"));
        }
        if said.n_pes != self.n_pes || said.pe >= self.n_pes {
            return Err(format!("it is PE {} of {}, of {} expected", said.pe, said.n_pes, self.n_pes));
        }
        Ok(())
    }
}

/// Where a PE listens, and the name of its host, as PE 0 tells the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) address: SocketAddr,
    pub(super) host: String,
}

/// The body of PE 0's answer.
pub(super) fn places_to_bytes(nonce: &Nonce, places: &[Place]) -> Vec<u8> {
    let mut bytes = nonce.to_vec();
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

/// What PE 0 said of `n` PEs.
pub(super) fn places_from_bytes(bytes: &[u8], n: usize) -> Option<(Nonce, Vec<Place>)> {
    let (nonce, mut bytes) = bytes.split_first_chunk::<NONCE_BYTES>()?;
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
    Some((*nonce, places))
}

/// Answers a hello: admitted, with what the body says, or refused, for the reason that it is.
pub(super) fn answer(stream: &mut TcpStream, admitted: bool, body: &[u8]) -> io::Result<()> {
    let head = [u32::from(admitted).to_le_bytes(), (body.len() as u32).to_le_bytes()].concat();
    stream.write_all(&[&head, body].concat())
}

/// Reads an answer, within the stream's time limit: whether admitted, and the body.
pub(super) fn read_answer(stream: &mut TcpStream) -> io::Result<(bool, Vec<u8>)> {
    let mut head = [0; 8];
    stream.read_exact(&mut head)?;
    let [admitted, len] = [0, 4].map(|at| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]));
    if admitted > 1 || len as usize > MAX_ANSWER_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "what answers is no PE"));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body)?;
    Ok((admitted == 1, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(pe: u32) -> Hello {
        Hello {
            version: VERSION,
            pe,
            n_pes: 3,
            port: 4321,
            nonce: [7; 16],
            program: b"aristos 0.1.0".to_vec(),
            token: b"secret".to_vec(),
            host: b"node1".to_vec(),
        }
    }

    #[test]
    fn a_hello_is_read_as_it_comes() {
        let bytes = hello(2).to_bytes();
        for len in 0..bytes.len() {
            assert_eq!(Hello::from_bytes(&bytes[..len]), Ok(None), "{len}");
        }
        assert_eq!(Hello::from_bytes(&bytes), Ok(Some(hello(2))));
        assert!(Hello::from_bytes(b"GET / HTTP/1.1").is_err());
        let mut other = bytes.clone();
        other[8] = 99;
        assert!(Hello::from_bytes(&other).unwrap_err().contains("version 99"));
        let mut long = bytes;
        long[8 + 4 * 5 + 1] = 0xff;
        assert!(Hello::from_bytes(&long).is_err());
    }

    #[test]
    fn only_a_pe_of_the_job_is_admitted() {
        let zero = hello(0);
        assert_eq!(zero.admits(&hello(2)), Ok(()));
        let refused = |said: Hello, part: &str| {
            let why = zero.admits(&said).unwrap_err();
            assert!(why.contains(part), "{why}");
        };
        refused(Hello { token: b"Secret".to_vec(), ..hello(2) }, "token");
        refused(Hello { token: b"secre".to_vec(), ..hello(2) }, "token");
        refused(Hello { nonce: [8; 16], ..hello(2) }, "token");
        refused(Hello { program: b"aristos 0.0.9".to_vec(), ..hello(2) }, "it is aristos 0.0.9, this is aristos 0.1.0");
        refused(hello(3), "PE 3 of 3, of 3 expected");
        refused(Hello { n_pes: 4, ..hello(2) }, "PE 2 of 4");
    }

    #[test]
    fn places_survive_their_way() {
        let place = |address: &str, host: &str| Place { address: address.parse().unwrap(), host: host.to_string() };
        let places = [place("10.0.0.1:5", "a"), place("[fe80::1]:65535", ""), place("127.0.0.1:80", "node1")];
        let bytes = places_to_bytes(&[3; 16], &places);
        assert_eq!(places_from_bytes(&bytes, 3), Some(([3; 16], places.to_vec())));
        assert_eq!(places_from_bytes(&bytes[..bytes.len() - 1], 3), None);
        assert_eq!(places_from_bytes(&bytes, 4), None);
    }
}
