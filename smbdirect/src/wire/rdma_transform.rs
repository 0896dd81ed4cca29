//! The frame of SMB2_RDMA_TRANSFORM ([MS-SMB2] 2.2.43), as far as needed to locate the descriptors. The code that has the
//! keys handles the transforms themselves.

use super::crypto_transform::CryptoTransform;
use super::descriptor::Descriptors;
use super::{Fault, Malformed, fixed, get_u16, get_u32, put_u16, put_u32};

/// Channel information of READ and WRITE with payload that is sealed or signed for its transfer by RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaTransform<'a> {
    /// Format of the descriptors, as the Channel of READ and WRITE.
    pub channel: u32,
    /// Number of SMB2_RDMA_CRYPTO_TRANSFORM structures in `transforms`.
    pub transform_count: u16,
    /// Bytes after the fixed part, with padding, up to the descriptors if there are any.
    pub transforms: &'a [u8],
    /// The peer's buffer; `None` if the channel is SMB2_CHANNEL_NONE.
    pub descriptors: Option<Descriptors<'a>>,
}

const FIXED_LEN: usize = 16;

impl<'a> RdmaTransform<'a> {
    /// Bytes of the fixed part.
    pub const LEN: usize = FIXED_LEN;
    /// SMB2_CHANNEL_NONE.
    pub const CHANNEL_NONE: u32 = 0;
    /// SMB2_CHANNEL_RDMA_V1.
    pub const CHANNEL_RDMA_V1: u32 = 1;
    /// SMB2_CHANNEL_RDMA_V1_INVALIDATE.
    pub const CHANNEL_RDMA_V1_INVALIDATE: u32 = 2;

    /// Reads the structure and its descriptors.
    ///
    /// # Errors
    /// [`Malformed`] if it is truncated, has no transform or an invalid channel, or if its descriptors do not follow the
    /// fixed part.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let fault = |fault, offset| Malformed { fault, what: "RDMA transform", offset };
        let b: &[u8; FIXED_LEN] = fixed(bytes, "RDMA transform")?;
        let (offset, len) = (usize::from(get_u16(b, 0)), usize::from(get_u16(b, 2)));
        let (channel, transform_count) = (get_u32(b, 4), get_u16(b, 8));
        if transform_count == 0 {
            return Err(fault(Fault::Value, 8));
        }
        match channel {
            Self::CHANNEL_NONE => {
                Ok(Self { channel, transform_count, transforms: &bytes[Self::LEN..], descriptors: None })
            }
            Self::CHANNEL_RDMA_V1 | Self::CHANNEL_RDMA_V1_INVALIDATE => {
                let transforms = bytes.get(Self::LEN..offset).ok_or(fault(Fault::Offset, 0))?;
                let array = bytes.get(offset..offset + len).ok_or(fault(Fault::Truncated, 2))?;
                let descriptors = Some(Descriptors::parse(array)?);
                Ok(Self { channel, transform_count, transforms, descriptors })
            }
            _ => Err(fault(Fault::Value, 4)),
        }
    }

    /// Encodes the complete structure, for one transform and the bytes of descriptors.
    pub fn encode(channel: u32, crypto: &CryptoTransform<'_>, descriptors: &[u8], out: &mut impl Extend<u8>) {
        let offset = Self::LEN + crypto.padded_len();
        out.extend(Self::encode_fixed(channel, 1, offset as u16, descriptors.len() as u16));
        crypto.encode(out);
        let padding = crypto.padded_len() - crypto.len();
        out.extend(std::iter::repeat_n(0, padding));
        out.extend(descriptors.iter().copied());
    }

    /// Encodes the fixed part, for descriptors of `descriptors_len` bytes at `descriptors_offset` from its start.
    #[must_use]
    pub fn encode_fixed(
        channel: u32,
        transform_count: u16,
        descriptors_offset: u16,
        descriptors_len: u16,
    ) -> [u8; FIXED_LEN] {
        let mut b = [0; FIXED_LEN];
        put_u16(&mut b, 0, descriptors_offset);
        put_u16(&mut b, 2, descriptors_len);
        put_u32(&mut b, 4, channel);
        put_u16(&mut b, 8, transform_count);
        b
    }
}
