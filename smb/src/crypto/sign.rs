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
    /// AES-128-CMAC: the default of the 3.x dialects without negotiation.
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
/// A message is given as slices in order; the first contains at least the whole SMB2 header. The signature field counts as
/// zero regardless of its contents. In a compound each message is signed separately, with the padding that follows it.
#[derive(Clone)]
pub struct SigningKey {
    mac: Arc<Mac>,
    algorithm: SigningAlgorithm,
}

impl SigningKey {
    /// Creates a key that signs with `key` itself: dialects 2.0.2 and 2.1 use the session key, the 3.x dialects a key derived
    /// by [`super::signing_key`].
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

    /// Derives the 3.x signing key of a session or channel and creates a key from it.
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

    /// The signature of a message with a complete header, SMB2_FLAGS_SIGNED included.
    ///
    /// # Panics
    /// If the first part is shorter than an SMB2 header.
    pub fn sign(&self, parts: &[&[u8]]) -> [u8; 16] {
        let (first, rest) = parts.split_first().expect("a message to sign has a header");
        self.sign_split(first, rest)
    }

    /// Sets SMB2_FLAGS_SIGNED, signs, and stores the signature in the header.
    ///
    /// # Panics
    /// If `first` is shorter than an SMB2 header.
    pub fn sign_in_place(&self, first: &mut [u8], rest: &[&[u8]]) {
        first[FLAGS] |= FLAG_SIGNED;
        let signature = self.sign_split(first, rest);
        first[SIGNATURE].copy_from_slice(&signature);
    }

    /// Whether the signature in the header is correct. Takes constant time, regardless of where it differs. False if the
    /// first part is shorter than an SMB2 header.
    pub fn verify(&self, parts: &[&[u8]]) -> bool {
        match parts.split_first() {
            Some((first, rest)) if first.len() >= HEADER_LEN => {
                let signature = self.sign_split(first, rest);
                constant_time::verify_slices_are_equal(&signature, &first[SIGNATURE]).is_ok()
            }
            _ => false,
        }
    }

    /// Whether [`Self::sign_payload`] uses the nonce.
    pub fn takes_nonce(&self) -> bool {
        self.algorithm == SigningAlgorithm::AesGmac
    }

    /// The signature of payload transferred by RDMA: of the payload alone, without a header. With AES-GMAC no other signature
    /// under this key, of payload or message, may use this nonce. [MS-SMB2] 3.3.5.12
    pub fn sign_payload(&self, nonce: [u8; 12], payload: &[u8]) -> [u8; 16] {
        self.mac(nonce, &[], payload, &[])
    }

    /// Whether a signature matches the payload. Takes constant time, regardless of where it differs. [MS-SMB2] 3.3.5.13
    pub fn verify_payload(&self, nonce: [u8; 12], payload: &[u8], signature: &[u8; 16]) -> bool {
        constant_time::verify_slices_are_equal(&self.sign_payload(nonce, payload), signature).is_ok()
    }

    fn sign_split(&self, first: &[u8], rest: &[&[u8]]) -> [u8; 16] {
        let (header, body) =
            first.split_first_chunk::<HEADER_LEN>().expect("the first part of a message holds its header");
        let mut cleared = *header;
        cleared[SIGNATURE].fill(0);
        self.mac(gmac_nonce(header), &cleared, body, rest)
    }

    fn mac(&self, nonce: [u8; 12], header: &[u8], body: &[u8], rest: &[&[u8]]) -> [u8; 16] {
        let mut signature = [0; 16];
        match &*self.mac {
            Mac::HmacSha256(key) => {
                let mut ctx = hmac::Context::with_key(key);
                ctx.update(header);
                ctx.update(body);
                rest.iter().for_each(|part| ctx.update(part));
                // [MS-SMB2] 3.1.4.1: the first 16 bytes of the hash.
                signature.copy_from_slice(&ctx.sign().as_ref()[..16]);
            }
            Mac::AesCmac(key) => {
                const INFALLIBLE: &str = "AES-CMAC over readable memory does not fail";
                let mut ctx = cmac::Context::with_key(key);
                ctx.update(header).expect(INFALLIBLE);
                ctx.update(body).expect(INFALLIBLE);
                rest.iter().for_each(|part| ctx.update(part).expect(INFALLIBLE));
                signature.copy_from_slice(ctx.sign().expect(INFALLIBLE).as_ref());
            }
            Mac::AesGmac(key) => signature = key.tag(nonce, header, body, rest),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::vectors::{hex, pattern};

    const ALGORITHMS: [SigningAlgorithm; 3] =
        [SigningAlgorithm::HmacSha256, SigningAlgorithm::AesCmac, SigningAlgorithm::AesGmac];

    fn key(algorithm: SigningAlgorithm) -> SigningKey {
        SigningKey::new(algorithm, &SessionKey::new(&(0..16).collect::<Vec<u8>>()))
    }

    fn message(command: u8, flags: u8, payload: usize) -> Vec<u8> {
        let mut message = vec![0; HEADER_LEN];
        message[..4].copy_from_slice(b"\xFESMB");
        message[4] = 64;
        message[COMMAND.start] = command;
        message[FLAGS] = flags;
        message[MESSAGE_ID].copy_from_slice(&0x1122_3344_5566_7788_u64.to_le_bytes());
        message[40..48].copy_from_slice(&0xAABB_CCDD_u64.to_le_bytes());
        message.extend_from_slice(&pattern(payload));
        message
    }

    /// RFC 4493 section 4: the primitive that signing is built on.
    #[test]
    fn cmac_matches_rfc_4493_vectors() {
        let key = cmac::Key::new(cmac::AES_128, &hex("2b7e151628aed2a6abf7158809cf4f3c")).expect("16 bytes");
        let message = hex("6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51\
                           30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710");
        for (len, tag) in [
            (0, "bb1d6929e95937287fa37d129b756746"),
            (16, "070a16b46b4d4144f79bdd9dd04a287c"),
            (40, "dfa66747de9ae63030ca32611497c827"),
            (64, "51f0bebf7e3b9d92fc49741779363cfe"),
        ] {
            assert_eq!(cmac::sign(&key, &message[..len]).expect("no failure").as_ref(), hex(tag), "{len}");
        }
    }

    /// Expected values: pyca/cryptography 50. Columns: command, flags, payload; HMAC-SHA256, AES-CMAC, AES-GMAC.
    #[test]
    fn signatures_match_pyca_cryptography() {
        for (command, flags, payload, expected) in [
            (
                8,
                9,
                0,
                [
                    "86c1b86a074cd488c7a3572ef3e5834c",
                    "cc2b8c6e9e44941ec5d5dc3a5f1bbd1a",
                    "3bf9a58188c2f6784475b0f5ea7f394f",
                ],
            ),
            (
                8,
                9,
                1016,
                [
                    "319007f9117636acda48b433f3096eba",
                    "38565b3741369b2d695bfb09c6ed71b7",
                    "93400f76af39eb304062c6b8d2a6871e",
                ],
            ),
            (
                8,
                8,
                5,
                [
                    "ab9fe49e82a0a328577354b848d5c371",
                    "a7e302fe76842ffa8af72fa78bc7c07e",
                    "bbfbf99d518dcf1384290c76acbb180f",
                ],
            ),
            // CANCEL has its own bit in GMAC's nonce.
            (
                12,
                8,
                4,
                [
                    "01ffc5ef5fcc8429b992db66e4759388",
                    "cb9598129ab7d4dc87d948282574a8ce",
                    "080ad0ef435d191bac503262212aa2bb",
                ],
            ),
            (
                8,
                9,
                65_552,
                [
                    "c957e8ddc69a8e1bac08f9f7b911c4ce",
                    "1acfa504f4f73e8f138032df8b36a70e",
                    "650f3baf96c499afad679a433d380069",
                ],
            ),
            (
                9,
                8,
                100_051,
                [
                    "a735ba2ce6ddd26db7b9903e939917f9",
                    "ada5b748717cb08dde1bb3956b356fcf",
                    "1fcc53e11b6feaa19f6401cd27469660",
                ],
            ),
        ] {
            let message = message(command, flags, payload);
            for (algorithm, expected) in ALGORITHMS.into_iter().zip(expected) {
                let key = key(algorithm);
                assert_eq!(key.sign(&[&message])[..], hex(expected), "{algorithm:?} of {payload}");
                // As the server sends it: headers separate from the payload, padding at the end.
                let (first, rest) = message.split_at(message.len().min(80));
                let (payload, padding) = rest.split_at(rest.len().saturating_sub(3));
                assert_eq!(key.sign(&[first, payload, padding])[..], hex(expected), "{algorithm:?} in parts");
            }
        }
    }

    #[test]
    fn only_intact_signed_messages_verify() {
        for algorithm in ALGORITHMS {
            let key = key(algorithm);
            let mut message = message(9, 0, 20_000);
            let (first, rest) = message.split_at_mut(112);
            // The previous contents of the signature field must not matter.
            first[SIGNATURE].fill(0xEE);
            key.sign_in_place(first, &[rest]);
            assert_eq!(first[FLAGS] & FLAG_SIGNED, FLAG_SIGNED);
            assert!(key.verify(&[&message]), "{algorithm:?}");
            assert!(key.verify(&[&message[..64], &message[64..]]), "{algorithm:?}");
            for at in [0, 12, FLAGS, 24, 40, 48, 63, 64, 111, 112, 16_383, message.len() - 1] {
                message[at] ^= 1;
                assert!(!key.verify(&[&message]), "{algorithm:?}: byte {at} changed");
                message[at] ^= 1;
            }
            assert!(!key.verify(&[&message[..message.len() - 1]]), "{algorithm:?}: cut");
            message.push(0);
            assert!(!key.verify(&[&message]), "{algorithm:?}: grown");
            let other = SigningKey::new(algorithm, &SessionKey::new(&[9; 16]));
            message.pop();
            assert!(!other.verify(&[&message]), "{algorithm:?}: another key");
        }
    }

    #[test]
    fn messages_shorter_than_a_header_do_not_verify() {
        for algorithm in ALGORITHMS {
            assert!(!key(algorithm).verify(&[]));
            assert!(!key(algorithm).verify(&[&[0; 63], &[0; 64]]));
        }
    }

    #[test]
    fn keys_are_never_printed() {
        assert_eq!(format!("{:?}", key(SigningAlgorithm::AesCmac)), "SigningKey(AesCmac, ..)");
    }

    /// Expected values: pyca/cryptography 48.
    #[test]
    fn payload_signatures_match_pyca_cryptography() {
        let payload = pattern(70_000);
        let nonce = hex("0807060504030201c1c2c300").try_into().expect("12 bytes");
        for (algorithm, expected) in ALGORITHMS.into_iter().zip([
            "ee74b8fa92f8488c85c945cf1058de81",
            "2e881a4b2d380b200b5f89f3db5055d1",
            "987e4334e549e8468d7df90a8b10f5b4",
        ]) {
            let key = key(algorithm);
            let signature = key.sign_payload(nonce, &payload);
            assert_eq!(signature[..], hex(expected), "{algorithm:?}");
            assert!(key.verify_payload(nonce, &payload, &signature), "{algorithm:?}");
            assert!(!key.verify_payload(nonce, &payload[1..], &signature), "{algorithm:?}: cut");
            assert_eq!(
                key.verify_payload([0; 12], &payload, &signature),
                !key.takes_nonce(),
                "{algorithm:?}"
            );
        }
    }
}
