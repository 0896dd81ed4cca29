//! AES-128-GMAC over scattered slices (SP800-38D) without copying them together.

use aws_lc_rs::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};

/// Key of AES-128-GMAC.
pub(super) struct GmacKey {
    gcm: LessSafeKey,
}

impl GmacKey {
    pub(super) fn new(key: &[u8; 16]) -> Self {
        let key = UnboundKey::new(&aead::AES_128_GCM, key).expect("AES-128 keys have 16 bytes");
        GmacKey { gcm: LessSafeKey::new(key) }
    }

    /// The tag over `header`, `body` and `rest`, in this order.
    pub(super) fn tag(&self, nonce: [u8; 12], header: &[u8], body: &[u8], rest: &[&[u8]]) -> [u8; 16] {
        let mut message =
            Vec::with_capacity(header.len() + body.len() + rest.iter().map(|p| p.len()).sum::<usize>());
        message.extend_from_slice(header);
        message.extend_from_slice(body);
        rest.iter().for_each(|part| message.extend_from_slice(part));
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self
            .gcm
            .seal_in_place_separate_tag(nonce, Aad::from(&message), &mut [])
            .expect("messages are far shorter than what GCM authenticates");
        tag.as_ref().try_into().expect("a GCM tag has 16 bytes")
    }
}
