//! Proofs that a rank knows its job's token: HMAC-SHA256, keyed by the token. The token itself never leaves the process.

use std::io;

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

const NONCE_BYTES: usize = 32;
/// Length of a proof, bytes.
pub const PROOF_BYTES: usize = 32;

/// A random number, drawn from the operating system and used once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Nonce(pub [u8; NONCE_BYTES]);

impl Nonce {
    /// Draws a nonce.
    ///
    /// # Errors
    /// The system's error.
    pub fn draw() -> io::Result<Nonce> {
        let mut nonce = Nonce::default();
        getrandom::fill(&mut nonce.0).map_err(io::Error::other)?;
        Ok(nonce)
    }

    /// `None` unless there are exactly as many bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Nonce> {
        bytes.try_into().ok().map(Nonce)
    }
}

/// A proof over some bytes.
pub type Proof = [u8; PROOF_BYTES];

/// Which side of a connection makes a proof. A side never accepts its own proof back.
#[derive(Clone, Copy, Debug)]
pub enum Side {
    /// The side that connects.
    Caller,
    /// The side that listens.
    Acceptor,
}

/// A job's secret, derived from its token.
#[derive(Clone)]
pub struct Key([u8; PROOF_BYTES]);

impl Key {
    /// The key of the job that has this token.
    pub fn new(token: &[u8]) -> Key {
        Key(mac(token, &[b"aristos job key"]))
    }

    /// The key of a job's connections after the rendezvous: it depends on a number that only admitted ranks have received.
    pub fn for_session(&self, session: &Nonce) -> Key {
        Key(mac(&self.0, &[b"session", &session.0]))
    }

    /// This side's proof over `parts`, including their lengths.
    pub fn prove(&self, side: Side, parts: &[&[u8]]) -> Proof {
        let role: &[u8] = match side {
            Side::Caller => b"caller",
            Side::Acceptor => b"acceptor",
        };
        mac(&self.0, &[&[role], parts].concat())
    }

    /// Whether `proof` is that side's over `parts`. Takes constant time.
    pub fn verify(&self, side: Side, parts: &[&[u8]], proof: &[u8]) -> bool {
        use subtle::ConstantTimeEq;
        self.prove(side, parts).ct_eq(proof).into()
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

fn mac(key: &[u8], parts: &[&[u8]]) -> Proof {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_depends_on_key_side_and_every_part() {
        let key = Key::new(b"token");
        let proof = key.prove(Side::Caller, &[b"ab", b"c"]);
        assert!(key.verify(Side::Caller, &[b"ab", b"c"], &proof));
        assert!(!key.verify(Side::Acceptor, &[b"ab", b"c"], &proof));
        assert!(!key.verify(Side::Caller, &[b"a", b"bc"], &proof));
        assert!(!key.verify(Side::Caller, &[b"ab", b"c"], &proof[..31]));
        assert!(!Key::new(b"Token").verify(Side::Caller, &[b"ab", b"c"], &proof));
        assert!(!key.for_session(&Nonce([1; 32])).verify(Side::Caller, &[b"ab", b"c"], &proof));
        let [one, other] = [1, 2].map(|n| key.for_session(&Nonce([n; 32])).prove(Side::Caller, &[]));
        assert_ne!(one, other);
        assert!(!format!("{key:?}").contains("token"));
    }
}
