//! Message signatures ([MS-SMB2] 3.1.4.1, 3.1.5.1).

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::{cmac, constant_time, hmac};

use super::gmac::GmacKey;
use super::{KeyDerivation, SessionKey};

const HEADER_LEN: usize = 64;
// Offsets in the SMB2 header, [MS-SMB2] 2.2.1.2.
const COMMAND: std::ops::Range<usize> = 12..14;
const FLAGS: usize = 16;
const MESSAGE_ID: std::ops::Range<usize> = 24..32;
const SIGNATURE: std::ops::Range<usize> = 48..64;

const FLAG_SERVER_TO_REDIR: u8 = 0x01;
const FLAG_SIGNED: u8 = 0x08;
const COMMAND_CANCEL: u16 = 0x000C;

/// A signing algorithm, numbered as in SMB2_SIGNING_CAPABILITIES ([MS-SMB2] 2.2.3.1.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum SigningAlgorithm {
    /// HMAC-SHA256: dialects 2.0.2 and 2.1.
    HmacSha256 = 0,
    /// AES-128-CMAC: what the 3.x dialects use unless they negotiate.
    AesCmac = 1,
    /// AES-128-GMAC: 3.1.1, by negotiation.
    AesGmac = 2,
}

impl SigningAlgorithm {
    /// The algorithm of a SigningAlgorithmId; `None` if it is unknown.
    pub fn from_id(id: u16) -> Option<Self> {
        Some(match id {
            0 => SigningAlgorithm::HmacSha256,
            1 => SigningAlgorithm::AesCmac,
            2 => SigningAlgorithm::AesGmac,
            _ => return None,
        })
    }

    /// The SigningAlgorithmId.
    pub fn id(self) -> u16 {
        self as u16
    }
}

enum Mac {
    HmacSha256(hmac::Key),
    AesCmac(cmac::Key),
    AesGmac(GmacKey),
}

/// Signs and verifies the messages of one session or channel. Cheap to clone.
///
/// A message is given as slices in order; the first one holds at least the whole SMB2 header. The signature field
/// counts as zero whatever it holds. In a compound each message is signed by itself, with the padding that follows it.
#[derive(Clone)]
pub struct SigningKey {
    mac: Arc<Mac>,
    algorithm: SigningAlgorithm,
}

impl SigningKey {
    /// A key that signs with `key` itself: what dialects 2.0.2 and 2.1 do with the session key, and what the 3.x
    /// dialects do with a key derived by [`super::signing_key`].
    pub fn new(algorithm: SigningAlgorithm, key: &SessionKey) -> Self {
        const LEN: &str = "a SessionKey has 16 bytes, as AES-128 needs";
        let mac = match algorithm {
            SigningAlgorithm::HmacSha256 => {
                Mac::HmacSha256(hmac::Key::new(hmac::HMAC_SHA256, key.as_bytes()))
            }
            SigningAlgorithm::AesCmac => {
                Mac::AesCmac(cmac::Key::new(cmac::AES_128, key.as_bytes()).expect(LEN))
            }
            SigningAlgorithm::AesGmac => Mac::AesGmac(GmacKey::new(key.as_bytes())),
        };
        SigningKey { mac: Arc::new(mac), algorithm }
    }

    /// Derives the 3.x signing key of a session or channel and takes it into use.
    pub fn derive(
        algorithm: SigningAlgorithm,
        derivation: KeyDerivation<'_>,
        session_key: &SessionKey,
    ) -> Self {
        Self::new(algorithm, &super::signing_key(derivation, session_key))
    }

    /// The algorithm in use.
    pub fn algorithm(&self) -> SigningAlgorithm {
        self.algorithm
    }

    /// The signature of a message whose header is complete, SMB2_FLAGS_SIGNED included.
    ///
    /// # Panics
    /// If the first part is shorter than an SMB2 header.
    pub fn sign(&self, parts: &[&[u8]]) -> [u8; 16] {
        let (first, rest) = parts.split_first().expect("a message to sign has a header");
        self.sign_split(first, rest)
    }

    /// Sets SMB2_FLAGS_SIGNED, signs, and puts the signature into the header.
    ///
    /// # Panics
    /// If `first` is shorter than an SMB2 header.
    pub fn sign_in_place(&self, first: &mut [u8], rest: &[&[u8]]) {
        first[FLAGS] |= FLAG_SIGNED;
        let signature = self.sign_split(first, rest);
        first[SIGNATURE].copy_from_slice(&signature);
    }

    /// Whether the signature in the header is right. Takes the same time wherever it differs.
    /// A first part shorter than an SMB2 header is never right.
    pub fn verify(&self, parts: &[&[u8]]) -> bool {
        match parts.split_first() {
            Some((first, rest)) if first.len() >= HEADER_LEN => {
                let signature = self.sign_split(first, rest);
                constant_time::verify_slices_are_equal(&signature, &first[SIGNATURE]).is_ok()
            }
            _ => false,
        }
    }

    fn sign_split(&self, first: &[u8], rest: &[&[u8]]) -> [u8; 16] {
        let (header, body) =
            first.split_first_chunk::<HEADER_LEN>().expect("the first part of a message holds its header");
        let mut cleared = *header;
        cleared[SIGNATURE].fill(0);
        let mut signature = [0; 16];
        match &*self.mac {
            Mac::HmacSha256(key) => {
                let mut ctx = hmac::Context::with_key(key);
                ctx.update(&cleared);
                ctx.update(body);
                rest.iter().for_each(|part| ctx.update(part));
                // [MS-SMB2] 3.1.4.1: the first 16 bytes of the hash.
                signature.copy_from_slice(&ctx.sign().as_ref()[..16]);
            }
            Mac::AesCmac(key) => {
                const INFALLIBLE: &str = "AES-CMAC over readable memory does not fail";
                let mut ctx = cmac::Context::with_key(key);
                ctx.update(&cleared).expect(INFALLIBLE);
                ctx.update(body).expect(INFALLIBLE);
                rest.iter().for_each(|part| ctx.update(part).expect(INFALLIBLE));
                signature.copy_from_slice(ctx.sign().expect(INFALLIBLE).as_ref());
            }
            Mac::AesGmac(key) => signature = key.tag(gmac_nonce(header), &cleared, body, rest),
        }
        signature
    }
}

/// [MS-SMB2] 3.1.4.1: MessageId, then a bit for the sender's role (1 = server), then a bit for CANCEL, the rest zero.
fn gmac_nonce(header: &[u8; HEADER_LEN]) -> [u8; 12] {
    let mut nonce = [0; 12];
    nonce[..8].copy_from_slice(&header[MESSAGE_ID]);
    let from_server = header[FLAGS] & FLAG_SERVER_TO_REDIR;
    let cancel = u8::from(header[COMMAND] == COMMAND_CANCEL.to_le_bytes());
    nonce[8] = from_server | cancel << 1;
    nonce
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SigningKey({:?}, ..)", self.algorithm)
    }
}
