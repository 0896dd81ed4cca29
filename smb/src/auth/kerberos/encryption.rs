//! Supported encryption types of Kerberos: AES with HMAC-SHA1 ([RFC 3961], [RFC 3962]) and with HMAC-SHA2 ([RFC 8009]). DES,
//! RC4 and Camellia are refused.

use std::fmt;

use aes::cipher::{BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256, Block};
use aws_lc_rs::{constant_time, hmac};
use zeroize::Zeroizing;

const BLOCK: usize = 16;

/// An encryption type, with its number in the registry of [RFC 3961] 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EncryptionType {
    Aes128Sha1 = 17,
    Aes256Sha1 = 18,
    Aes128Sha256 = 19,
    Aes256Sha384 = 20,
}

impl EncryptionType {
    pub(super) const ALL: [Self; 4] =
        [Self::Aes128Sha1, Self::Aes256Sha1, Self::Aes128Sha256, Self::Aes256Sha384];

    pub(super) fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|etype| *etype as i32 == number)
    }

    fn key_len(self) -> usize {
        match self {
            Self::Aes128Sha1 | Self::Aes128Sha256 => 16,
            Self::Aes256Sha1 | Self::Aes256Sha384 => 32,
        }
    }

    fn mac_len(self) -> usize {
        match self {
            Self::Aes128Sha1 | Self::Aes256Sha1 => 12,
            Self::Aes128Sha256 => 16,
            Self::Aes256Sha384 => 24,
        }
    }

    fn hmac(self) -> hmac::Algorithm {
        match self {
            Self::Aes128Sha1 | Self::Aes256Sha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
            Self::Aes128Sha256 => hmac::HMAC_SHA256,
            Self::Aes256Sha384 => hmac::HMAC_SHA384,
        }
    }

    /// Whether the MAC covers the ciphertext ([RFC 8009] 5), not the plaintext ([RFC 3961] 5.3).
    fn encrypts_then_macs(self) -> bool {
        matches!(self, Self::Aes128Sha256 | Self::Aes256Sha384)
    }
}

/// Purpose of a key: the key usage numbers of [RFC 4120] 7.5.1 and [RFC 4121] 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Usage {
    Ticket = 2,
    ApReqAuthenticator = 11,
    ApRepPart = 12,
    AcceptorSign = 23,
    InitiatorSign = 25,
}

/// The last byte of the constant from which a key is derived ([RFC 3961] 5.3).
#[derive(Clone, Copy)]
enum Purpose {
    Encryption = 0xAA,
    Integrity = 0x55,
    Checksum = 0x99,
}

/// The bytes do not match the key, or they were modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotAuthentic;

/// A protocol key. Wiped when dropped, never printed.
#[derive(Clone)]
pub(super) struct Key {
    etype: EncryptionType,
    bytes: Zeroizing<Vec<u8>>,
}

impl Key {
    /// `None` if `bytes` do not have the length that the encryption type requires.
    pub(super) fn new(etype: EncryptionType, bytes: &[u8]) -> Option<Self> {
        (bytes.len() == etype.key_len()).then(|| Self { etype, bytes: Zeroizing::new(bytes.to_vec()) })
    }

    pub(super) fn etype(&self) -> EncryptionType {
        self.etype
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Encrypts, with a MAC. The confounder must be random and fresh.
    pub(super) fn encrypt(&self, usage: Usage, confounder: [u8; BLOCK], plaintext: &[u8]) -> Vec<u8> {
        let mut text = [&confounder, plaintext].concat();
        let plain_mac = (!self.etype.encrypts_then_macs()).then(|| self.mac(usage, &[&text]));
        cts_encrypt(&*self.cipher(usage), &mut text);
        let mac = plain_mac.unwrap_or_else(|| self.mac(usage, &[&[0; BLOCK], &text]));
        text.extend_from_slice(&mac);
        text
    }

    /// Decrypts the output of [`Self::encrypt`] or of another implementation.
    pub(super) fn decrypt(
        &self,
        usage: Usage,
        ciphertext: &[u8],
    ) -> Result<Zeroizing<Vec<u8>>, NotAuthentic> {
        let text_len = ciphertext.len().checked_sub(self.etype.mac_len()).ok_or(NotAuthentic)?;
        let (text, mac) = ciphertext.split_at(text_len);
        if text.len() < BLOCK {
            return Err(NotAuthentic);
        }
        let is = |expected: &[u8]| constant_time::verify_slices_are_equal(expected, mac);
        if self.etype.encrypts_then_macs() {
            is(&self.mac(usage, &[&[0; BLOCK], text])).map_err(|_| NotAuthentic)?;
        }
        let mut plain = Zeroizing::new(text.to_vec());
        cts_decrypt(&*self.cipher(usage), &mut plain);
        if !self.etype.encrypts_then_macs() {
            is(&self.mac(usage, &[&plain])).map_err(|_| NotAuthentic)?;
        }
        Ok(Zeroizing::new(plain[BLOCK..].to_vec()))
    }

    /// The checksum of this encryption type ([RFC 3961] 5.4, [RFC 8009] 6).
    pub(super) fn checksum(&self, usage: Usage, parts: &[&[u8]]) -> Vec<u8> {
        self.keyed_hash(usage, Purpose::Checksum, parts)
    }

    fn mac(&self, usage: Usage, parts: &[&[u8]]) -> Vec<u8> {
        self.keyed_hash(usage, Purpose::Integrity, parts)
    }

    fn keyed_hash(&self, usage: Usage, purpose: Purpose, parts: &[&[u8]]) -> Vec<u8> {
        let key = self.derive(usage, purpose);
        let mut context = hmac::Context::with_key(&hmac::Key::new(self.etype.hmac(), &key));
        parts.iter().for_each(|part| context.update(part));
        context.sign().as_ref()[..self.etype.mac_len()].to_vec()
    }

    fn cipher(&self, usage: Usage) -> Box<dyn BlockCipher> {
        cipher_of(&self.derive(usage, Purpose::Encryption))
    }

    /// The key for one purpose ([RFC 3961] 5.1 and 5.3, [RFC 8009] 3 and 5).
    fn derive(&self, usage: Usage, purpose: Purpose) -> Zeroizing<Vec<u8>> {
        let [a, b, c, d] = (usage as u32).to_be_bytes();
        let constant = [a, b, c, d, purpose as u8];
        if self.etype.encrypts_then_macs() {
            let len = match purpose {
                Purpose::Encryption => self.etype.key_len(),
                Purpose::Integrity | Purpose::Checksum => self.etype.mac_len(),
            };
            return self.kdf_hmac_sha2(&constant, len);
        }
        let cipher = cipher_of(&self.bytes);
        let mut block = n_fold(&constant);
        let mut derived = Zeroizing::new(Vec::with_capacity(self.etype.key_len()));
        while derived.len() < self.etype.key_len() {
            cipher.encrypt(&mut block);
            derived.extend_from_slice(&block);
        }
        derived
    }

    /// KDF-HMAC-SHA2 ([RFC 8009] 3); one iteration is enough for each length.
    fn kdf_hmac_sha2(&self, label: &[u8], len: usize) -> Zeroizing<Vec<u8>> {
        let mut context = hmac::Context::with_key(&hmac::Key::new(self.etype.hmac(), &self.bytes));
        context.update(&1u32.to_be_bytes());
        context.update(label);
        context.update(&[0]);
        context.update(&(len as u32 * 8).to_be_bytes());
        Zeroizing::new(context.sign().as_ref()[..len].to_vec())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:?}, ..)", self.etype)
    }
}

/// AES on one block.
trait BlockCipher {
    fn encrypt(&self, block: &mut [u8; BLOCK]);
    fn decrypt(&self, block: &mut [u8; BLOCK]);
}

impl<C: BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16> + BlockCipherDecrypt> BlockCipher for C {
    fn encrypt(&self, block: &mut [u8; BLOCK]) {
        let mut it = Block::from(*block);
        self.encrypt_block(&mut it);
        *block = it.into();
    }

    fn decrypt(&self, block: &mut [u8; BLOCK]) {
        let mut it = Block::from(*block);
        self.decrypt_block(&mut it);
        *block = it.into();
    }
}

fn cipher_of(key: &[u8]) -> Box<dyn BlockCipher> {
    const CHECKED: &str = "protocol keys have one of the two lengths, and so have the keys derived from them";
    match key.len() {
        16 => Box::new(Aes128::new_from_slice(key).expect(CHECKED)),
        _ => Box::new(Aes256::new_from_slice(key).expect(CHECKED)),
    }
}

fn xor(into: &mut [u8], with: &[u8]) {
    into.iter_mut().zip(with).for_each(|(a, b)| *a ^= b);
}

fn block_at(text: &[u8], at: usize) -> [u8; BLOCK] {
    text[at..at + BLOCK].try_into().expect("the slice has the length of a block")
}

/// Where the last two blocks begin; the last one can be short. A text of a single block has only the last one.
fn last_two(len: usize) -> (usize, usize) {
    let last = (len - 1) / BLOCK * BLOCK;
    (last.saturating_sub(BLOCK), last)
}

/// CBC with ciphertext stealing, the last two blocks swapped, and an initial vector of zeros ([RFC 3962] 5). At least one block.
fn cts_encrypt(cipher: &dyn BlockCipher, text: &mut [u8]) {
    let (second_last, last) = last_two(text.len());
    let mut chained = [0; BLOCK];
    for at in (0..last.max(BLOCK)).step_by(BLOCK) {
        xor(&mut chained, &text[at..at + BLOCK]);
        cipher.encrypt(&mut chained);
        text[at..at + BLOCK].copy_from_slice(&chained);
    }
    if last == 0 {
        return;
    }
    let stolen = chained;
    xor(&mut chained, &text[last..]);
    cipher.encrypt(&mut chained);
    text[second_last..last].copy_from_slice(&chained);
    let len = text.len() - last;
    text[last..].copy_from_slice(&stolen[..len]);
}

fn cts_decrypt(cipher: &dyn BlockCipher, text: &mut [u8]) {
    let (second_last, last) = last_two(text.len());
    let mut previous = [0; BLOCK];
    let before = if last == 0 { BLOCK } else { second_last };
    for at in (0..before).step_by(BLOCK) {
        let encrypted = block_at(text, at);
        let mut block = encrypted;
        cipher.decrypt(&mut block);
        xor(&mut block, &previous);
        text[at..at + BLOCK].copy_from_slice(&block);
        previous = encrypted;
    }
    if last == 0 {
        return;
    }
    let len = text.len() - last;
    let mut end = block_at(text, second_last);
    cipher.decrypt(&mut end);
    let mut stolen = end;
    stolen[..len].copy_from_slice(&text[last..]);
    xor(&mut end[..len], &text[last..]);
    cipher.decrypt(&mut stolen);
    xor(&mut stolen, &previous);
    text[second_last..last].copy_from_slice(&stolen);
    text[last..].copy_from_slice(&end[..len]);
}

/// The n-fold of five bytes to a block ([RFC 3961] 5.1): copies, each rotated right by 13 bits more than the one before, are added
/// with end-around carry.
fn n_fold(constant: &[u8; 5]) -> [u8; BLOCK] {
    const BITS: usize = 5 * 8;
    // The least common multiple of both lengths.
    const LEN: usize = 5 * BLOCK;
    let rotated = |copy: usize, byte: usize| {
        (0..8).fold(0u8, |bits, bit| {
            let from = (byte * 8 + bit + BITS * 13 - copy * 13 % BITS) % BITS;
            bits << 1 | (constant[from / 8] >> (7 - from % 8) & 1)
        })
    };
    let copies: Vec<u8> = (0..LEN).map(|at| rotated(at / 5, at % 5)).collect();
    let mut sum = [0u8; BLOCK];
    for piece in copies.chunks(BLOCK) {
        let mut carry = 0u16;
        for at in (0..BLOCK).rev() {
            carry += u16::from(sum[at]) + u16::from(piece[at]);
            sum[at] = carry as u8;
            carry >>= 8;
        }
        for at in (0..BLOCK).rev() {
            carry += u16::from(sum[at]);
            sum[at] = carry as u8;
            carry >>= 8;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::vectors::hex;

    /// [RFC 3962] B: AES-128 in CBC-CTS with an initial vector of zeros.
    #[test]
    fn cbc_cts_matches_rfc_3962_vectors() {
        let key = cipher_of(b"chicken teriyaki");
        let text = b"I would like the General Gau's Chicken, please, and wonton soup.";
        for (len, expected) in [
            (17, "c6353568f2bf8cb4d8a580362da7ff7f97"),
            (31, "fc00783e0efdb2c1d445d4c8eff7ed2297687268d6ecccc0c07b25e25ecfe5"),
            (32, "39312523a78662d5be7fcbcc98ebf5a897687268d6ecccc0c07b25e25ecfe584"),
            (
                47,
                "97687268d6ecccc0c07b25e25ecfe584b3fffd940c16a18c1b5549d2f838029e39312523a78662d5be7fcbcc98ebf5",
            ),
            (
                64,
                "97687268d6ecccc0c07b25e25ecfe58439312523a78662d5be7fcbcc98ebf5a8\
                 4807efe836ee89a526730dbc2f7bc8409dad8bbb96c4cdc03bc103e1a194bbd8",
            ),
        ] {
            let mut bytes = text[..len].to_vec();
            cts_encrypt(&*key, &mut bytes);
            assert_eq!(bytes, hex(expected), "{len}");
            cts_decrypt(&*key, &mut bytes);
            assert_eq!(bytes, text[..len], "{len}");
        }
    }

    /// [RFC 8009] A: keys for usage 2, an encryption of 6 bytes, and a checksum.
    #[test]
    fn aes_sha2_types_match_rfc_8009_vectors() {
        let base = hex("3705d96080c17728a0e800eab6e0d23c");
        let key = Key::new(EncryptionType::Aes128Sha256, &base).expect("16 bytes");
        let derived = |key: &Key, purpose| key.derive(Usage::Ticket, purpose).to_vec();
        assert_eq!(derived(&key, Purpose::Checksum), hex("b31a018a48f54776f403e9a396325dc3"));
        assert_eq!(derived(&key, Purpose::Encryption), hex("9b197dd1e8c5609d6e67c3e37c62c72e"));
        assert_eq!(derived(&key, Purpose::Integrity), hex("9fda0e56ab2d85e1569a688696c26a6c"));
        let text: Vec<u8> = (0..21).collect();
        assert_eq!(key.checksum(Usage::Ticket, &[&text]), hex("d78367186643d67b411cba9139fc1dee"));
        let confounder = hex("7bca285e2fd4130fb55b1a5c83bc5b24").try_into().expect("16 bytes");
        let sealed = key.encrypt(Usage::Ticket, confounder, &text[..6]);
        assert_eq!(
            sealed,
            hex("84d7f30754ed987bab0bf3506beb09cfb55402cef7e6877ce99e247e52d16ed4421dfdf8976c")
        );
        assert_eq!(*key.decrypt(Usage::Ticket, &sealed).expect("authentic"), text[..6]);

        let base = hex("6d404d37faf79f9df0d33568d320669800eb4836472ea8a026d16b7182460c52");
        let key = Key::new(EncryptionType::Aes256Sha384, &base).expect("32 bytes");
        assert_eq!(derived(&key, Purpose::Checksum), hex("ef5718be86cc84963d8bbb5031e9f5c4ba41f28faf69e73d"));
        assert_eq!(
            derived(&key, Purpose::Encryption),
            hex("56ab22bee63d82d7bc5227f6773f8ea7a5eb1c825160c38312980c442e5c7e49")
        );
        assert_eq!(
            derived(&key, Purpose::Integrity),
            hex("69b16514e3cd8e56b82010d5c73012b622c4d00ffc23ed1f")
        );
        assert_eq!(
            key.checksum(Usage::Ticket, &[&text]),
            hex("45ee791567eefca37f4ac1e0222de80d43c3bfa06699672a")
        );
    }

    /// Expected values: impacket 0.12 (`impacket.krb5.crypto`).
    #[test]
    fn aes_sha1_types_match_impacket() {
        for (etype, sealed, checksum_key, checksum) in [
            (
                EncryptionType::Aes128Sha1,
                "3fdb9bdd62ecb441bc53b9103feb4dc12007b8828522f60c1bfc90affec5ba49\
                 008375c2d18ec7dcd554ee0dec7e80df5b93d764b029da89286f",
                "546563a54934786c13f3f92b87a8fe61",
                "8414aa1f2b672a772dc76c9a",
            ),
            (
                EncryptionType::Aes256Sha1,
                "6083bf042867ad8ec4557a7c5584c2ee052ae4c85d8e7f9ed39c231292e7f74b\
                 551f3063f5a28ba3e8e813593864a646ccdfcf35eed5f443ca8e",
                "cc994eaf43d1e8e57ae30fe3a4ffda023406cffc40a8d9c95c345ec37d4eb9f9",
                "45665cde8e7d72368782935e",
            ),
        ] {
            let bytes: Vec<u8> = (0..etype.key_len() as u8).collect();
            let key = Key::new(etype, &bytes).expect("its length");
            let text = b"30 bytes bytes bytes bytes byt";
            assert_eq!(
                key.encrypt(Usage::Ticket, std::array::from_fn(|at| 0x40 + at as u8), text),
                hex(sealed)
            );
            assert_eq!(*key.decrypt(Usage::Ticket, &hex(sealed)).expect("authentic"), text);
            assert_eq!(*key.derive(Usage::Ticket, Purpose::Checksum), hex(checksum_key));
            assert_eq!(key.checksum(Usage::Ticket, &[b"te", b"xt"]), hex(checksum));
        }
    }

    #[test]
    fn tampered_or_truncated_ciphertext_is_refused() {
        for etype in EncryptionType::ALL {
            let key = Key::new(etype, &vec![7; etype.key_len()]).expect("its length");
            for len in [0, 1, 15, 16, 17, 32, 100] {
                let text = vec![len as u8; len];
                let sealed = key.encrypt(Usage::ApRepPart, [9; BLOCK], &text);
                assert_eq!(key.decrypt(Usage::ApRepPart, &sealed).as_deref(), Ok(&text), "{etype:?} {len}");
                assert!(key.decrypt(Usage::Ticket, &sealed).is_err(), "another usage: {etype:?} {len}");
                for at in 0..sealed.len() {
                    let mut changed = sealed.clone();
                    changed[at] ^= 1;
                    assert!(key.decrypt(Usage::ApRepPart, &changed).is_err(), "{etype:?} {len} {at}");
                    assert!(
                        key.decrypt(Usage::ApRepPart, &sealed[..at]).is_err(),
                        "{etype:?} {len} cut {at}"
                    );
                }
            }
        }
    }
}
