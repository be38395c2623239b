//! [`Hello`]: how a caller introduces itself.

use super::frame::Kind;
use super::key::{Key, Nonce, PROOF_BYTES, Side};

/// Increased with every change to the rendezvous, its frames, or the frames between PEs over TCP.
pub const VERSION: u32 = 2;
/// Maximum length of a hello's texts, bytes.
pub const MAX_TEXT_BYTES: usize = 512;
const NONCE_BYTES: usize = size_of::<Nonce>();
/// Length of a hello without its texts, bytes.
const FIXED_BYTES: usize = 5 * 4 + NONCE_BYTES;
/// Maximum length of a hello, bytes.
pub const MAX_HELLO_BYTES: usize = FIXED_BYTES + 2 * MAX_TEXT_BYTES;

/// A caller's introduction. It contains no secret, because the caller sends it before the acceptor has proved itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// [`VERSION`].
    pub version: u32,
    /// The caller's rank.
    pub pe: usize,
    /// Number of ranks that it expects.
    pub n_pes: usize,
    /// Drawn for each connection.
    pub nonce: Nonce,
    /// The program and its version, which must be the same on all ranks.
    pub program: Vec<u8>,
    /// Data for the layer above, at most [`MAX_TEXT_BYTES`].
    pub payload: Vec<u8>,
}

impl Hello {
    /// As bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let words =
            [self.version, self.pe as u32, self.n_pes as u32, self.program.len() as u32, self.payload.len() as u32];
        let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        [&words, &self.nonce.0[..], &self.program, &self.payload].concat()
    }

    /// Reads the body of a `Join` frame.
    ///
    /// # Errors
    /// Half a line: it is no hello, or one of another version.
    pub fn from_bytes(bytes: &[u8]) -> Result<Hello, String> {
        let invalid = || "it sent no valid hello".to_string();
        let word = |i: usize| Some(u32::from_le_bytes(*bytes.get(4 * i..)?.first_chunk()?));
        let version = word(0).ok_or_else(invalid)?;
        if version != VERSION {
            return Err(format!("it is of version {version} of the rendezvous, this rank of version {VERSION}"));
        }
        let (fixed, texts) = bytes.split_at_checked(FIXED_BYTES).ok_or_else(invalid)?;
        let [pe, n_pes, program, payload] = [1, 2, 3, 4].map(|i| word(i).map_or(usize::MAX, |word| word as usize));
        if program > MAX_TEXT_BYTES || payload > MAX_TEXT_BYTES || texts.len() != program + payload {
            return Err(invalid());
        }
        let nonce = Nonce::from_bytes(&fixed[FIXED_BYTES - NONCE_BYTES..]).ok_or_else(invalid)?;
        let (program, payload) = texts.split_at(program);
        Ok(Hello { version, pe, n_pes, nonce, program: program.to_vec(), payload: payload.to_vec() })
    }
}

/// One connection's handshake: ties every proof to the caller's hello and to both nonces.
#[derive(Clone, Debug)]
pub struct Session {
    key: Key,
    hello: Vec<u8>,
    /// The acceptor's nonce; zero until it has sent its challenge.
    nonce: Nonce,
}

impl Session {
    pub(super) fn new(key: Key, hello: &Hello) -> Session {
        Session { key, hello: hello.to_bytes(), nonce: Nonce::default() }
    }

    /// Includes the acceptor's nonce in all later proofs.
    pub(super) fn challenge(&mut self, nonce: Nonce) {
        self.nonce = nonce;
    }

    /// The body of an acceptor's frame: its proof, then `data`.
    pub fn seal(&self, kind: Kind, data: &[u8]) -> Vec<u8> {
        let code = (kind as u32).to_le_bytes();
        let proof = self.key.prove(Side::Acceptor, &[&code, &self.hello, &self.nonce.0, data]);
        [&proof, data].concat()
    }

    /// The data of an acceptor's frame; `None` if the sender does not know the key.
    pub fn open<'b>(&self, kind: Kind, body: &'b [u8]) -> Option<&'b [u8]> {
        let code = (kind as u32).to_le_bytes();
        let (proof, data) = body.split_at_checked(PROOF_BYTES)?;
        self.key.verify(Side::Acceptor, &[&code, &self.hello, &self.nonce.0, data], proof).then_some(data)
    }

    /// The caller's proof.
    pub(super) fn prove(&self) -> [u8; PROOF_BYTES] {
        self.key.prove(Side::Caller, &[&self.hello, &self.nonce.0])
    }

    /// Whether this is the caller's proof.
    pub(super) fn is_proof(&self, proof: &[u8]) -> bool {
        self.key.verify(Side::Caller, &[&self.hello, &self.nonce.0], proof)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        let (program, payload) = (b"aristos 0.1.0".to_vec(), b"node1".to_vec());
        Hello { version: VERSION, pe: 2, n_pes: 3, nonce: Nonce([7; 32]), program, payload }
    }

    #[test]
    fn hello_survives_its_encoding() {
        let bytes = hello().to_bytes();
        assert_eq!(Hello::from_bytes(&bytes), Ok(hello()));
        for len in 0..bytes.len() {
            assert!(Hello::from_bytes(&bytes[..len]).is_err(), "{len}");
        }
        assert!(Hello::from_bytes(&[&bytes[..], b"x"].concat()).is_err());
        let mut other = bytes.clone();
        other[0] = 99;
        assert!(Hello::from_bytes(&other).unwrap_err().contains("version 99"));
        let mut long = bytes;
        long[13] = 0xff;
        assert!(Hello::from_bytes(&long).is_err());
    }

    #[test]
    fn sealed_frames_open_with_the_same_session_only() {
        let session = |token: &[u8], hello: &Hello, nonce| {
            let mut session = Session::new(Key::new(token), hello);
            session.challenge(Nonce([nonce; 32]));
            session
        };
        let mine = session(b"token", &hello(), 1);
        let body = mine.seal(Kind::World, b"data");
        assert_eq!(mine.open(Kind::World, &body), Some(&b"data"[..]));
        assert_eq!(mine.open(Kind::Accepted, &body), None);
        assert_eq!(mine.open(Kind::World, &body[..20]), None);
        let replayed = Hello { nonce: Nonce([8; 32]), ..hello() };
        for other in [session(b"guess", &hello(), 1), session(b"token", &replayed, 1), session(b"token", &hello(), 2)] {
            assert_eq!(other.open(Kind::World, &body), None);
            assert!(!other.is_proof(&mine.prove()));
        }
        // An acceptor does not accept its own proof.
        assert!(mine.is_proof(&mine.prove()) && !mine.is_proof(&mine.seal(Kind::Challenge, b"")[..32]));
    }
}
