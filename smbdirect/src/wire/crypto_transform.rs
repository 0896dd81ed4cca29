//! SMB2_RDMA_CRYPTO_TRANSFORM ([MS-SMB2] 2.2.43.1): how payload is sealed or signed for its transfer by RDMA.

use super::{Fault, Malformed, fixed, get_u16, put_u16};

/// The structure that follows [`super::RdmaTransform`]. Lengths are not validated here, because they depend on the cipher or
/// the signing algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CryptoTransform<'a> {
    /// `TransformType`.
    pub transform_type: u16,
    /// `Signature`.
    pub signature: &'a [u8],
    /// `Nonce`.
    pub nonce: &'a [u8],
}

const FIXED_LEN: usize = 8;
/// Channel information after a transform begins at a multiple of this.
const ALIGNMENT: usize = 8;

impl<'a> CryptoTransform<'a> {
    /// SMB2_RDMA_TRANSFORM_TYPE_ENCRYPTION.
    pub const ENCRYPTION: u16 = 1;
    /// SMB2_RDMA_TRANSFORM_TYPE_SIGNING.
    pub const SIGNING: u16 = 2;
    /// Bytes of the longest structure that we send: a tag, and the longest nonce of any algorithm.
    pub const LEN_MAX: usize = FIXED_LEN + 16 + 12;

    /// Reads the structure; bytes after it are ignored.
    ///
    /// # Errors
    /// [`Malformed`] if it is truncated.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let b: &[u8; FIXED_LEN] = fixed(bytes, "RDMA crypto transform")?;
        let (signature_len, nonce_len) = (usize::from(get_u16(b, 2)), usize::from(get_u16(b, 4)));
        let truncated =
            Malformed { fault: Fault::Truncated, what: "RDMA crypto transform", offset: bytes.len() as u32 };
        let (signature, rest) = bytes[FIXED_LEN..].split_at_checked(signature_len).ok_or(truncated)?;
        let nonce = rest.get(..nonce_len).ok_or(truncated)?;
        Ok(Self { transform_type: get_u16(b, 0), signature, nonce })
    }

    /// Encodes the structure, without padding.
    pub fn encode(&self, out: &mut impl Extend<u8>) {
        let mut b = [0; FIXED_LEN];
        put_u16(&mut b, 0, self.transform_type);
        put_u16(&mut b, 2, self.signature.len() as u16);
        put_u16(&mut b, 4, self.nonce.len() as u16);
        out.extend(b);
        out.extend(self.signature.iter().copied());
        out.extend(self.nonce.iter().copied());
    }

    /// Bytes on the wire, without padding.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        FIXED_LEN + self.signature.len() + self.nonce.len()
    }

    /// Bytes on the wire, including the padding before the next structure.
    #[must_use]
    pub fn padded_len(&self) -> usize {
        // The length of the preceding frame is a multiple of the alignment.
        self.len().next_multiple_of(ALIGNMENT)
    }
}
