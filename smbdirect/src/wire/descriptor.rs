//! Buffer Descriptor V1 ([MS-SMBD] 2.2.3.1): a peer's memory that is accessible by RDMA.

use super::{Fault, Malformed, fixed, get_u32, put_u32};
use crate::limits;

/// A steering tag of a peer (the remote key of verbs).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u32);

/// One registered buffer of a peer ([MS-SMBD] 2.2.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferDescriptor {
    /// The peer's address of the first byte.
    pub offset: u64,
    /// The token that grants access.
    pub token: Token,
    /// Length in bytes.
    pub length: u32,
}

impl BufferDescriptor {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Reads a descriptor; bytes after it are ignored.
    ///
    /// # Errors
    /// [`Malformed`] if it is too short.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        Ok(Self::from_array(fixed(bytes, "buffer descriptor")?))
    }

    fn from_array(b: &[u8; Self::LEN]) -> Self {
        Self {
            offset: u64::from(get_u32(b, 0)) | u64::from(get_u32(b, 4)) << 32,
            token: Token(get_u32(b, 8)),
            length: get_u32(b, 12),
        }
    }

    /// Encodes the descriptor.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put_u32(&mut b, 0, self.offset as u32);
        put_u32(&mut b, 4, (self.offset >> 32) as u32);
        put_u32(&mut b, 8, self.token.0);
        put_u32(&mut b, 12, self.length);
        b
    }
}

/// An array of descriptors that together form one buffer: the channel information of READ and WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors<'a> {
    elements: &'a [[u8; BufferDescriptor::LEN]],
}

impl<'a> Descriptors<'a> {
    /// Reads an array that fills `bytes`.
    ///
    /// # Errors
    /// [`Malformed`] if there are none or too many, if the last is incomplete, or if one wraps around the peer's address
    /// space.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let fault =
            |fault, offset: usize| Malformed { fault, what: "buffer descriptors", offset: offset as u32 };
        let (elements, rest) = bytes.as_chunks();
        if elements.is_empty() || !rest.is_empty() {
            return Err(fault(Fault::Truncated, bytes.len() - rest.len()));
        }
        if elements.len() > limits::DESCRIPTORS_MAX {
            return Err(fault(Fault::TooMany, limits::DESCRIPTORS_MAX * BufferDescriptor::LEN));
        }
        let parsed = Self { elements };
        match parsed.iter().position(|d| d.offset.checked_add(u64::from(d.length)).is_none()) {
            Some(index) => Err(fault(Fault::Value, index * BufferDescriptor::LEN)),
            None => Ok(parsed),
        }
    }

    /// The elements.
    pub fn iter(&self) -> impl Iterator<Item = BufferDescriptor> + 'a {
        self.elements.iter().map(BufferDescriptor::from_array)
    }

    /// Number of elements; never zero.
    #[must_use]
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Bytes of all elements.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.iter().map(|d| u64::from(d.length)).sum()
    }

    /// The token that the answer to a request with SMB2_CHANNEL_RDMA_V1_INVALIDATE invalidates: the first element's.
    #[must_use]
    pub fn first_token(&self) -> Token {
        BufferDescriptor::from_array(&self.elements[0]).token
    }

    /// The pieces of `length` bytes from `offset` of the whole buffer, in order; `None` if the buffer ends before ([MS-SMBD]
    /// 3.1.4.5, 3.1.4.6).
    #[must_use]
    pub fn slice(&self, offset: u64, length: u64) -> Option<impl Iterator<Item = BufferDescriptor> + 'a> {
        if offset.checked_add(length)? > self.total_bytes() {
            return None;
        }
        let (mut skip, mut left) = (offset, length);
        Some(self.iter().filter_map(move |d| {
            let skipped = skip.min(u64::from(d.length));
            skip -= skipped;
            let taken = left.min(u64::from(d.length) - skipped);
            left -= taken;
            let taken = u32::try_from(taken).expect("no more than the descriptor's own length");
            (taken > 0).then_some(BufferDescriptor {
                offset: d.offset + skipped,
                token: d.token,
                length: taken,
            })
        }))
    }
}
