//! Encryption of whole frames: TRANSFORM_HEADER, AES-GCM and AES-CCM ([MS-SMB2] 2.2.41, 3.1.4.3).

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::aead;
use ccm::Ccm;
use ccm::aead::array::Array;
use ccm::aead::consts::{U11, U16};
use ccm::aead::inout::InOutBuf;
use ccm::aead::{AeadInOut, KeyInit};

use super::{CipherKey, Nonce};

/// Length of the TRANSFORM_HEADER that precedes the ciphertext.
pub const TRANSFORM_HEADER_LEN: usize = 52;

/// The protocol identifier of an encrypted frame.
const PROTOCOL_ID: [u8; 4] = [0xFD, b'S', b'M', b'B'];

// Offsets in the TRANSFORM_HEADER, [MS-SMB2] 2.2.41.
const SIGNATURE: std::ops::Range<usize> = 4..20;
const NONCE: std::ops::Range<usize> = 20..36;
const ORIGINAL_MESSAGE_SIZE: std::ops::Range<usize> = 36..40;
const FLAGS: std::ops::Range<usize> = 42..44;
const SESSION_ID: std::ops::Range<usize> = 44..52;
/// Authenticated in addition to the message: everything from the nonce on.
const ASSOCIATED: std::ops::Range<usize> = 20..52;

/// In 3.1.1 the flag `Encrypted`, in 3.0 and 3.0.2 the algorithm AES-128-CCM: the same number.
const FLAG_ENCRYPTED: u16 = 1;

/// A cipher of SMB2_ENCRYPTION_CAPABILITIES ([MS-SMB2] 2.2.3.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Cipher {
    /// AES-128-CCM: the only cipher of 3.0 and 3.0.2.
    Aes128Ccm = 1,
    /// AES-128-GCM.
    Aes128Gcm = 2,
    /// AES-256-CCM.
    Aes256Ccm = 3,
    /// AES-256-GCM.
    Aes256Gcm = 4,
}

impl Cipher {
    /// The cipher of a CipherId; `None` if it is unknown.
    pub fn from_id(id: u16) -> Option<Self> {
        Some(match id {
            1 => Cipher::Aes128Ccm,
            2 => Cipher::Aes128Gcm,
            3 => Cipher::Aes256Ccm,
            4 => Cipher::Aes256Gcm,
            _ => return None,
        })
    }

    /// The CipherId.
    pub fn id(self) -> u16 {
        self as u16
    }

    /// The usual notation: "AES-128-GCM".
    pub fn name(self) -> &'static str {
        match self {
            Cipher::Aes128Ccm => "AES-128-CCM",
            Cipher::Aes128Gcm => "AES-128-GCM",
            Cipher::Aes256Ccm => "AES-256-CCM",
            Cipher::Aes256Gcm => "AES-256-GCM",
        }
    }

    /// Length of its key in bytes: 16 or 32.
    pub fn key_len(self) -> usize {
        match self {
            Cipher::Aes128Ccm | Cipher::Aes128Gcm => 16,
            Cipher::Aes256Ccm | Cipher::Aes256Gcm => 32,
        }
    }
}

#[expect(clippy::large_enum_variant, reason = "one per session and direction, always behind an Arc")]
enum Aead {
    Gcm(aead::LessSafeKey),
    Ccm128(Ccm<aes::Aes128, U16, U11>),
    Ccm256(Ccm<aes::Aes256, U16, U11>),
}

/// GCM takes the first 12 bytes of the nonce field, CCM the first 11. [MS-SMB2] 2.2.41
const GCM_NONCE_LEN: usize = 12;
const CCM_NONCE_LEN: usize = 11;

impl Aead {
    fn new(key: &CipherKey) -> Arc<Self> {
        const LEN: &str = "a CipherKey has its cipher's length";
        let gcm =
            |algorithm| aead::LessSafeKey::new(aead::UnboundKey::new(algorithm, key.as_bytes()).expect(LEN));
        Arc::new(match key.cipher() {
            Cipher::Aes128Gcm => Aead::Gcm(gcm(&aead::AES_128_GCM)),
            Cipher::Aes256Gcm => Aead::Gcm(gcm(&aead::AES_256_GCM)),
            Cipher::Aes128Ccm => Aead::Ccm128(Ccm::new_from_slice(key.as_bytes()).expect(LEN)),
            Cipher::Aes256Ccm => Aead::Ccm256(Ccm::new_from_slice(key.as_bytes()).expect(LEN)),
        })
    }

    fn nonce_len(&self) -> usize {
        match self {
            Aead::Gcm(_) => GCM_NONCE_LEN,
            Aead::Ccm128(_) | Aead::Ccm256(_) => CCM_NONCE_LEN,
        }
    }

    fn seal(&self, nonce: &[u8; 16], associated: &[u8], message: &mut [u8]) -> Option<[u8; 16]> {
        let mut tag = [0; 16];
        match self {
            Aead::Gcm(key) => {
                let nonce = gcm_nonce(nonce);
                let sealed =
                    key.seal_in_place_separate_tag(nonce, aead::Aad::from(associated), message).ok()?;
                tag.copy_from_slice(sealed.as_ref());
            }
            Aead::Ccm128(key) => tag.copy_from_slice(
                &key.encrypt_inout_detached(&ccm_nonce(nonce), associated, InOutBuf::from(message)).ok()?,
            ),
            Aead::Ccm256(key) => tag.copy_from_slice(
                &key.encrypt_inout_detached(&ccm_nonce(nonce), associated, InOutBuf::from(message)).ok()?,
            ),
        }
        Some(tag)
    }

    fn open(&self, nonce: &[u8; 16], associated: &[u8], tag: &[u8; 16], message: &mut [u8]) -> Option<()> {
        match self {
            Aead::Gcm(key) => {
                let nonce = gcm_nonce(nonce);
                key.open_in_place_separate_tag(nonce, aead::Aad::from(associated), tag, message).ok()?;
            }
            Aead::Ccm128(key) => key
                .decrypt_inout_detached(&ccm_nonce(nonce), associated, InOutBuf::from(message), &Array(*tag))
                .ok()?,
            Aead::Ccm256(key) => key
                .decrypt_inout_detached(&ccm_nonce(nonce), associated, InOutBuf::from(message), &Array(*tag))
                .ok()?,
        }
        Some(())
    }
}

fn gcm_nonce(nonce: &[u8; 16]) -> aead::Nonce {
    let mut bytes = [0; GCM_NONCE_LEN];
    bytes.copy_from_slice(&nonce[..GCM_NONCE_LEN]);
    aead::Nonce::assume_unique_for_key(bytes)
}

fn ccm_nonce(nonce: &[u8; 16]) -> Array<u8, U11> {
    let mut bytes = [0; CCM_NONCE_LEN];
    bytes.copy_from_slice(&nonce[..CCM_NONCE_LEN]);
    Array(bytes)
}

/// Seals frames in one direction. Cheap to clone; clones share the key, so their nonces must come from disjoint sequences.
#[derive(Clone)]
pub struct SealingKey {
    aead: Arc<Aead>,
    cipher: Cipher,
}

/// Opens frames of one direction. Cheap to clone.
#[derive(Clone)]
pub struct OpeningKey {
    aead: Arc<Aead>,
    cipher: Cipher,
}

impl SealingKey {
    /// Creates a sealing key from derived key material.
    pub fn new(key: &CipherKey) -> Self {
        SealingKey { aead: Aead::new(key), cipher: key.cipher() }
    }

    /// The cipher in use.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// Length of a nonce of this cipher in bytes.
    pub fn nonce_len(&self) -> usize {
        self.aead.nonce_len()
    }

    /// Encrypts payload for a transfer by RDMA in place. Returns the nonce, of which the first [`Self::nonce_len`] bytes are
    /// used, and the tag, which authenticates only the payload. [MS-SMB2] 3.3.5.12
    pub fn seal_payload(
        &self,
        nonce: Nonce,
        payload: &mut [u8],
    ) -> Result<([u8; GCM_NONCE_LEN], [u8; 16]), SealError> {
        let tag = self.aead.seal(&nonce.0, &[], payload).ok_or(SealError::TooLong)?;
        let mut bytes = [0; GCM_NONCE_LEN];
        bytes[..self.nonce_len()].copy_from_slice(&nonce.0[..self.nonce_len()]);
        Ok((bytes, tag))
    }

    /// Encrypts `message` (one SMB2 message or compound, starting with its header) in place and returns the TRANSFORM_HEADER
    /// to send before it. [MS-SMB2] 3.1.4.3
    pub fn seal_in_place(
        &self,
        nonce: Nonce,
        session_id: u64,
        message: &mut [u8],
    ) -> Result<[u8; TRANSFORM_HEADER_LEN], SealError> {
        let size = u32::try_from(message.len()).map_err(|_| SealError::TooLong)?;
        let mut header = [0; TRANSFORM_HEADER_LEN];
        header[..4].copy_from_slice(&PROTOCOL_ID);
        // The rest of the field after the cipher's nonce stays zero: receivers may check it.
        let nonce_len = self.nonce_len();
        header[NONCE][..nonce_len].copy_from_slice(&nonce.0[..nonce_len]);
        header[ORIGINAL_MESSAGE_SIZE].copy_from_slice(&size.to_le_bytes());
        header[FLAGS].copy_from_slice(&FLAG_ENCRYPTED.to_le_bytes());
        header[SESSION_ID].copy_from_slice(&session_id.to_le_bytes());
        let tag = self.aead.seal(&nonce.0, &header[ASSOCIATED], message).ok_or(SealError::TooLong)?;
        header[SIGNATURE].copy_from_slice(&tag);
        Ok(header)
    }
}

impl OpeningKey {
    /// Creates an opening key from derived key material.
    pub fn new(key: &CipherKey) -> Self {
        OpeningKey { aead: Aead::new(key), cipher: key.cipher() }
    }

    /// The cipher in use.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// Length of a nonce of this cipher in bytes.
    pub fn nonce_len(&self) -> usize {
        self.aead.nonce_len()
    }

    /// Verifies and decrypts payload received by RDMA in place; after an error it must not be used. [MS-SMB2] 3.3.5.13
    pub fn open_payload(&self, nonce: &[u8], tag: &[u8; 16], payload: &mut [u8]) -> Result<(), OpenError> {
        if nonce.len() != self.nonce_len() {
            return Err(OpenError::Malformed("a nonce of another length"));
        }
        let mut whole = [0; 16];
        whole[..nonce.len()].copy_from_slice(nonce);
        self.aead.open(&whole, &[], tag, payload).ok_or(OpenError::NotAuthentic)
    }

    /// Verifies and decrypts `frame` (TRANSFORM_HEADER and ciphertext only) in place and returns the message. On an error the
    /// frame's contents are unspecified and must not be used. [MS-SMB2] 3.3.5.2.1.1
    pub fn open_in_place<'a>(&self, frame: &'a mut [u8]) -> Result<&'a mut [u8], OpenError> {
        let sealed = SealedFrame::parse(frame)?;
        let (header, message) = frame.split_at_mut(TRANSFORM_HEADER_LEN);
        self.aead
            .open(&sealed.nonce, &header[ASSOCIATED], &sealed.signature, message)
            .ok_or(OpenError::NotAuthentic)?;
        Ok(message)
    }
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealingKey({:?}, ..)", self.cipher)
    }
}

impl fmt::Debug for OpeningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpeningKey({:?}, ..)", self.cipher)
    }
}

/// The checked TRANSFORM_HEADER of a complete encrypted frame; identifies the session with the key that opens it.
#[derive(Clone, Copy, Debug)]
pub struct SealedFrame {
    signature: [u8; 16],
    nonce: [u8; 16],
    /// The session with the key that seals the frame.
    pub session_id: u64,
}

impl SealedFrame {
    /// Whether a frame claims to be encrypted, by its first four bytes.
    pub fn claims(frame: &[u8]) -> bool {
        frame.starts_with(&PROTOCOL_ID)
    }

    /// Performs all checks that are possible without a key.
    pub fn parse(frame: &[u8]) -> Result<Self, OpenError> {
        let header: &[u8; TRANSFORM_HEADER_LEN] =
            frame.first_chunk().ok_or(OpenError::Malformed("too short"))?;
        if header[..4] != PROTOCOL_ID {
            return Err(OpenError::Malformed("not an encrypted frame"));
        }
        if header[FLAGS] != FLAG_ENCRYPTED.to_le_bytes() {
            return Err(OpenError::Malformed("flags are not 1"));
        }
        if u32::from_le_bytes(array(&header[ORIGINAL_MESSAGE_SIZE])) as usize
            != frame.len() - TRANSFORM_HEADER_LEN
        {
            return Err(OpenError::Malformed("wrong original message size"));
        }
        Ok(SealedFrame {
            signature: array(&header[SIGNATURE]),
            nonce: array(&header[NONCE]),
            session_id: u64::from_le_bytes(array(&header[SESSION_ID])),
        })
    }
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the caller's range has the array's length")
}

/// A frame cannot be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Longer than the header's 32-bit size.
    #[error("message is too long to seal")]
    TooLong,
}

/// A frame cannot be opened. In either case the connection is unusable ([MS-SMB2] 3.3.5.2.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The header is invalid; the string describes how.
    #[error("malformed transform header: {0}")]
    Malformed(&'static str),
    /// Header, ciphertext, key and authentication tag do not match.
    #[error("encrypted frame is not authentic")]
    NotAuthentic,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::NonceSequence;
    use crate::crypto::vectors::{hex, pattern};
    use aws_lc_rs::digest;

    const SESSION_ID: u64 = 0x8877_6655_4433_2211;

    fn key(cipher: Cipher) -> CipherKey {
        let bytes: Vec<u8> = (0x40..).take(cipher.key_len()).collect();
        CipherKey::new(cipher, &bytes).expect("the length is the cipher's")
    }

    fn sealed(cipher: Cipher, message: &[u8]) -> Vec<u8> {
        let mut nonces = NonceSequence::new([0xC1, 0xC2, 0xC3], 0x0102_0304_0506_0708);
        let mut frame = vec![0; TRANSFORM_HEADER_LEN];
        frame.extend_from_slice(message);
        let (header, message) = frame.split_at_mut(TRANSFORM_HEADER_LEN);
        let nonce = nonces.next_nonce().expect("the first nonce");
        header.copy_from_slice(
            &SealingKey::new(&key(cipher)).seal_in_place(nonce, SESSION_ID, message).expect("short"),
        );
        frame
    }

    /// SP800-38C example 1 has nonces of 7 bytes; RFC 3610's have 13. There is no published example with 11 bytes, so the
    /// expected values are from pyca/cryptography 50 (OpenSSL), for CCM and GCM alike: tag, SHA-256 of the ciphertext.
    #[test]
    fn sealed_frames_match_pyca_cryptography() {
        for (cipher, tag, ciphertext) in [
            (
                Cipher::Aes128Ccm,
                "1380132b0f7b9b78d451e82f39e34198",
                "cc2613bdeb96013777909f3e2531571634709fffe01688aa81c49249ea1d5af1",
            ),
            (
                Cipher::Aes128Gcm,
                "0e570a55e23de4fb6eaa4e650729cbc2",
                "e813c4b5d6c95fa7945f79c3f177f584ba1dcee11727df80209ade51cd7b39b8",
            ),
            (
                Cipher::Aes256Ccm,
                "a2501e0bcb45c350b7e72a4498807c56",
                "4e20025a3235113c8340c36c416eacbbd287ae6d9af44337e2a5030841c3e3b8",
            ),
            (
                Cipher::Aes256Gcm,
                "0368e80c91d2f763fef84c067d6ecf19",
                "db4efb7d509b1712c1a04b60dcebd194d41cb5e966759c1aa4bad9f83e63562e",
            ),
        ] {
            let frame = sealed(cipher, &pattern(100));
            let (header, message) = frame.split_at(TRANSFORM_HEADER_LEN);
            assert_eq!(header[..4], *b"\xFDSMB");
            assert_eq!(header[SIGNATURE], hex(tag), "{cipher:?}");
            assert_eq!(header[NONCE], hex("0807060504030201c1c2c30000000000"));
            assert_eq!(header[36..44], hex("6400000000000100"));
            assert_eq!(header[44..], SESSION_ID.to_le_bytes());
            assert_eq!(digest::digest(&digest::SHA256, message).as_ref(), hex(ciphertext), "{cipher:?}");
        }
    }

    /// SP800-38D without plaintext is tested in `gmac`; here test case 4 of the GCM submission, with both.
    #[test]
    fn gcm_matches_test_case_4_of_the_submission() {
        let key =
            CipherKey::new(Cipher::Aes128Gcm, &hex("feffe9928665731c6d6a8f9467308308")).expect("16 bytes");
        let mut nonce = [0; 16];
        nonce[..12].copy_from_slice(&hex("cafebabefacedbaddecaf888"));
        let associated = hex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
        let mut message = hex("d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72\
                               1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39");
        let tag = Aead::new(&key).seal(&nonce, &associated, &mut message).expect("short");
        assert_eq!(tag[..], hex("5bc94fbc3221a5db94fae95ae7121a47"));
        assert_eq!(message[..8], hex("42831ec221777424"));
    }

    #[test]
    fn only_intact_sealed_frames_open() {
        for id in 1..=4 {
            let cipher = Cipher::from_id(id).expect("four ciphers");
            assert_eq!(cipher.id(), id);
            let opening = OpeningKey::new(&key(cipher));
            for len in [0, 1, 16, 5000] {
                let frame = sealed(cipher, &pattern(len));
                assert!(SealedFrame::claims(&frame));
                assert_eq!(SealedFrame::parse(&frame).expect("well formed").session_id, SESSION_ID);
                assert_eq!(*opening.open_in_place(&mut frame.clone()).expect("authentic"), pattern(len));
                for at in (0..frame.len()).step_by(if len == 5000 { 97 } else { 1 }) {
                    let mut frame = frame.clone();
                    frame[at] ^= 0x10;
                    let error = opening.open_in_place(&mut frame).expect_err("changed");
                    let outside = (4..36).contains(&at) || at >= 40 && !FLAGS.contains(&at);
                    let expected_not_authentic = outside;
                    assert_eq!(
                        error == OpenError::NotAuthentic,
                        expected_not_authentic,
                        "{cipher:?} byte {at}: {error}"
                    );
                }
                for cut in 0..frame.len().min(80) {
                    assert!(opening.open_in_place(&mut frame[..cut].to_vec()).is_err(), "cut to {cut}");
                }
            }
            let other =
                CipherKey::new(cipher, &[1; 32][..cipher.key_len()]).expect("the length is the cipher's");
            let error =
                OpeningKey::new(&other).open_in_place(&mut sealed(cipher, b"x")).expect_err("another key");
            assert_eq!(error, OpenError::NotAuthentic);
        }
    }

    #[test]
    fn nonces_never_repeat_and_can_be_exhausted() {
        let mut nonces = NonceSequence::new([1, 2, 3], u64::MAX - 1);
        let first = nonces.next_nonce().expect("two are left").0;
        let last = nonces.next_nonce().expect("one is left").0;
        assert_ne!(first, last);
        assert_eq!(last, *b"\xff\xff\xff\xff\xff\xff\xff\xff\x01\x02\x03\0\0\0\0\0");
        assert!(nonces.next_nonce().is_err());
        assert!(nonces.next_nonce().is_err());
    }

    /// Expected values: pyca/cryptography 48.
    #[test]
    fn sealed_payload_matches_pyca_cryptography() {
        for (cipher, tag, ciphertext) in [
            (
                Cipher::Aes128Ccm,
                "14e0e1648fcb1857d5b21a403ef49907",
                "2cb935c5c74b59326e51b879de805377f5cf1c894342ccc5a509182ddec24bd4",
            ),
            (
                Cipher::Aes128Gcm,
                "f961d63cdee6ddd7ced671545c66d548",
                "248ca455dafafe843370473070dffaf2cd606deb4bde1f7953b209eec7e6d449",
            ),
            (
                Cipher::Aes256Ccm,
                "ef385f57f73f3d269e67cd2d647aebf7",
                "f78afc92dfc2354b517f115daf0d8d25bf55393dd855a95112aabf7bd7e3cf6a",
            ),
            (
                Cipher::Aes256Gcm,
                "8899ffe06f2e8e7452f1f7518be5aceb",
                "722b680817a2b2c54279405c33af51a18620641e3187585e834fca3cddb26b4e",
            ),
        ] {
            let clear = pattern(70_000);
            let mut payload = clear.clone();
            let mut nonces = NonceSequence::new([0xC1, 0xC2, 0xC3], 0x0102_0304_0506_0708);
            let sealing = SealingKey::new(&key(cipher));
            let nonce = nonces.next_nonce().expect("the first nonce");
            let (nonce, found) = sealing.seal_payload(nonce, &mut payload).expect("short");
            assert_eq!(found[..], hex(tag), "{cipher:?}");
            assert_eq!(digest::digest(&digest::SHA256, &payload).as_ref(), hex(ciphertext), "{cipher:?}");
            let opening = OpeningKey::new(&key(cipher));
            let nonce = &nonce[..opening.nonce_len()];
            for (nonce, tag) in [(&nonce[1..], found), (&[7; 16], found), (nonce, [0; 16])] {
                assert!(opening.open_payload(nonce, &tag, &mut payload.clone()).is_err(), "{cipher:?}");
            }
            opening.open_payload(nonce, &found, &mut payload).expect("opens");
            assert!(payload == clear, "{cipher:?}");
        }
    }
}
