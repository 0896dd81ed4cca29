//! AES-128-GMAC over scattered slices (SP800-38D) without copying the payload.
//!
//! The fast GCM implementation accepts associated data only in one piece, but the headers and the payload of a message are in
//! different places. Since GHASH is a polynomial in the hash key H, the pieces can be authenticated separately and combined:
//! with X the blocks of a piece, GHASH(X) = X1·H^n + … + Xn·H, and GHASH(A || B) = GHASH(A)·H^blocks(B) + GHASH(B). A piece's
//! tag is (GHASH + lengths)·H + E(J0). We can compute the last two terms, and therefore remove and add them. That costs a few
//! multiplications per large piece instead of a copy. The tags of the pieces are never exposed.

use aes::Aes128;
use aes::cipher::{BlockCipherEncrypt, KeyInit};
use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use ghash::GHash;
use ghash::universal_hash::UniversalHash;
use zeroize::Zeroize;

const BLOCK: usize = 16;

/// Messages up to this length are copied into one piece: that costs less than the multiplications (measured).
const COPIED_BYTES_MAX: usize = 16 * 1024;
/// Most messages are even shorter, and need not clear a large buffer on the stack.
const COPIED_SMALL_BYTES_MAX: usize = 1024;
/// In larger messages, adjacent pieces shorter than half of this are copied together.
const GATHERED_BYTES_MAX: usize = 4096;

/// H^(2^k) for k below this: for messages up to 16 MiB less one block, the maximum of a frame.
const POWERS: usize = 20;
const _: () = assert!(crate::limits::FRAME_BYTES_MAX as usize / BLOCK + GATHERED_BYTES_MAX < 1 << POWERS);

/// An element of GCM's GF(2^128), as its block of bytes.
type Element = [u8; BLOCK];

/// Key of AES-128-GMAC.
pub(super) struct GmacKey {
    gcm: LessSafeKey,
    block_cipher: Aes128,
    powers: [Element; POWERS],
}

impl GmacKey {
    pub(super) fn new(key: &[u8; 16]) -> Self {
        let unbound = UnboundKey::new(&aead::AES_128_GCM, key).expect("AES-128 keys have 16 bytes");
        let block_cipher = Aes128::new(key.into());
        let mut powers = [[0; BLOCK]; POWERS];
        block_cipher.encrypt_block((&mut powers[0]).into());
        for k in 1..POWERS {
            powers[k] = multiply(powers[k - 1], &powers[k - 1]);
        }
        GmacKey { gcm: LessSafeKey::new(unbound), block_cipher, powers }
    }

    /// The tag over `header`, `body` and `rest`, in this order.
    pub(super) fn tag(&self, nonce: [u8; 12], header: &[u8], body: &[u8], rest: &[&[u8]]) -> [u8; 16] {
        let pieces = || [header, body].into_iter().chain(rest.iter().copied());
        let total: usize = pieces().map(<[u8]>::len).sum();
        if total <= COPIED_SMALL_BYTES_MAX {
            return self.tag_of_copy::<COPIED_SMALL_BYTES_MAX>(nonce, pieces());
        }
        if total <= COPIED_BYTES_MAX {
            return self.tag_of_copy::<COPIED_BYTES_MAX>(nonce, pieces());
        }

        // J0 = nonce || 1, SP800-38D 7.1
        let mut mask = [0; BLOCK];
        mask[..12].copy_from_slice(&nonce);
        mask[15] = 1;
        self.block_cipher.encrypt_block((&mut mask).into());
        let mut copied = Copied::<GATHERED_BYTES_MAX>::new();
        let mut sum = Sum { key: self, nonce, mask, value: [0; BLOCK] };
        for mut piece in pieces() {
            if piece.len() >= GATHERED_BYTES_MAX / 2 {
                // The copied bytes must end with a complete block before a piece can be processed in place.
                let (missing, after) = piece.split_at(copied.len.next_multiple_of(BLOCK) - copied.len);
                copied.append(missing);
                sum.add(copied.filled());
                copied.len = 0;
                let (blocks, tail) = after.split_at(after.len() / BLOCK * BLOCK);
                sum.add(blocks);
                piece = tail;
            }
            while !piece.is_empty() {
                let (fits, after) = piece.split_at(piece.len().min(GATHERED_BYTES_MAX - copied.len));
                copied.append(fits);
                if copied.len == GATHERED_BYTES_MAX {
                    sum.add(copied.filled());
                    copied.len = 0;
                }
                piece = after;
            }
        }
        sum.add(copied.filled());
        xor(xor(sum.value, self.lengths(total)), mask)
    }

    fn tag_of_copy<'a, const N: usize>(
        &self,
        nonce: [u8; 12],
        pieces: impl Iterator<Item = &'a [u8]>,
    ) -> Element {
        let mut copied = Copied::<N>::new();
        pieces.for_each(|piece| copied.append(piece));
        self.tag_of_one(nonce, copied.filled())
    }

    fn tag_of_one(&self, nonce: [u8; 12], message: &[u8]) -> Element {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self.gcm.seal_in_place_separate_tag(nonce, Aad::from(message), &mut []);
        let tag = tag.expect("messages are far shorter than what GCM authenticates");
        tag.as_ref().try_into().expect("a GCM tag has 16 bytes")
    }

    /// The contribution of the block of lengths to a tag: the block times H.
    fn lengths(&self, message_bytes: usize) -> Element {
        let mut block = [0; BLOCK];
        block[..8].copy_from_slice(&(message_bytes as u64 * 8).to_be_bytes());
        multiply(block, &self.powers[0])
    }
}

/// GHASH of the pieces so far, times H.
struct Sum<'a> {
    key: &'a GmacKey,
    nonce: [u8; 12],
    mask: Element,
    value: Element,
}

impl Sum<'_> {
    /// Adds a piece of complete blocks; only the last piece can end within a block, which GCM pads with zeros.
    fn add(&mut self, piece: &[u8]) {
        if piece.is_empty() {
            return;
        }
        let blocks = piece.len().div_ceil(BLOCK);
        for (k, power) in self.key.powers.iter().enumerate() {
            if blocks >> k & 1 == 1 {
                self.value = multiply(self.value, power);
            }
        }
        let tag = self.key.tag_of_one(self.nonce, piece);
        self.value = xor(self.value, xor(xor(tag, self.mask), self.key.lengths(piece.len())));
    }
}

struct Copied<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Copied<N> {
    fn new() -> Self {
        Copied { bytes: [0; N], len: 0 }
    }

    fn append(&mut self, piece: &[u8]) {
        self.bytes[self.len..self.len + piece.len()].copy_from_slice(piece);
        self.len += piece.len();
    }

    fn filled(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn xor(a: Element, b: Element) -> Element {
    (u128::from_ne_bytes(a) ^ u128::from_ne_bytes(b)).to_ne_bytes()
}

/// The product, as GHASH of one block under a key.
fn multiply(a: Element, key: &Element) -> Element {
    let mut hash = GHash::new(key.into());
    hash.update(&[a.into()]);
    hash.finalize().into()
}

impl Drop for GmacKey {
    fn drop(&mut self) {
        self.powers.zeroize();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crypto::vectors::hex;
    use proptest::prelude::*;

    #[test]
    fn gmac_matches_nist_test_vectors() {
        // GCM Test Case 1 of the GCM submission: no data, key and nonce zero.
        let key = GmacKey::new(&[0; 16]);
        assert_eq!(key.tag([0; 12], &[], &[], &[])[..], hex("58e2fccefa7e3061367f1d57a4e7455a")[..]);
        // CAVS gcmEncryptExtIV128, PTlen 0, AADlen 128, count 0
        let key: [u8; 16] = hex("77be63708971c4e240d1cb79e8d77feb").try_into().expect("16 bytes");
        let nonce: [u8; 12] = hex("e0e00f19fed7ba0136a797f3").try_into().expect("12 bytes");
        let message = hex("7a43ec1d9c0a5a78a0b16533a6213cab");
        let tag = hex("209fcc8d3675ed938e9c7166709dd946");
        assert_eq!(GmacKey::new(&key).tag(nonce, &message, &[], &[])[..], tag[..]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn the_tag_does_not_depend_on_how_the_message_is_split(
            key: [u8; 16],
            nonce: [u8; 12],
            len in 0usize..100_000,
            mut cuts in prop::collection::vec(any::<prop::sample::Index>(), 2..8),
            near in 0usize..40,
        ) {
            let message: Vec<u8> = (0..len).map(|i| (i * 31 + (i >> 8)) as u8).collect();
            let key = GmacKey::new(&key);
            let expected = key.tag_of_one(nonce, &message);
            let mut at: Vec<usize> = cuts.drain(..).map(|cut| cut.index(len + 1)).collect();
            // Large pieces after a small one, at every alignment.
            at.push(near.min(len));
            at.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for to in at.into_iter().chain([len]) {
                pieces.push(&message[from..to]);
                from = to;
            }
            prop_assert_eq!(key.tag(nonce, pieces[0], pieces[1], &pieces[2..]), expected);
        }
    }
}
