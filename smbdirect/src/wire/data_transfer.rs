//! Data Transfer ([MS-SMBD] 2.2.3): credits, a keep-alive flag, and a fragment of an upper-layer message.

use super::{Fault, Malformed, fixed, get_u16, get_u32, put_u16, put_u32};

/// `Flags`; unknown bits are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Flags(pub u16);

impl Flags {
    /// SMB_DIRECT_RESPONSE_REQUESTED: the peer requests a prompt message.
    pub const RESPONSE_REQUESTED: Self = Self(0x0001);

    /// Whether all bits of `other` are set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A message without its payload ([MS-SMBD] 2.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct DataTransfer {
    /// Total credits that the sender requests, including those that it has.
    pub credits_requested: u16,
    /// Credits added to those of the receiver.
    pub credits_granted: u16,
    pub flags: Flags,
    /// Bytes of the upper-layer message that follow in further messages.
    pub remaining_data_length: u32,
    /// Offset from the start of this message.
    pub data_offset: u32,
    pub data_length: u32,
}

impl DataTransfer {
    /// Bytes of a message without payload.
    pub const LEN: usize = 20;
    /// Where the payload begins in all messages that we send, and in those of Linux and Windows.
    pub const DATA_OFFSET: usize = 24;

    /// Reads a message and checks that the payload is within it. [MS-SMBD] 3.1.5.8 does not distinguish between a payload
    /// inside the header and one after it; a payload that overlaps the header is refused here, since 2.2.3 leaves no room for
    /// one.
    ///
    /// # Errors
    /// [`Malformed`] if the message is too short or the payload's offset is invalid.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        const WHAT: &str = "data transfer";
        let b: &[u8; Self::LEN] = fixed(message, WHAT)?;
        let parsed = Self {
            credits_requested: get_u16(b, 0),
            credits_granted: get_u16(b, 2),
            flags: Flags(get_u16(b, 4)),
            remaining_data_length: get_u32(b, 8),
            data_offset: get_u32(b, 12),
            data_length: get_u32(b, 16),
        };
        let misplaced = parsed.data_length > 0 && (parsed.data_offset as usize) < Self::LEN;
        if !parsed.data_offset.is_multiple_of(8) || misplaced {
            return Err(Malformed { fault: Fault::Offset, what: WHAT, offset: 12 });
        }
        if u64::from(parsed.data_offset) + u64::from(parsed.data_length) > message.len() as u64 {
            return Err(Malformed { fault: Fault::Truncated, what: WHAT, offset: 16 });
        }
        Ok(parsed)
    }

    /// The bytes before a payload that begins at [`DataTransfer::DATA_OFFSET`]; without payload, the first
    /// [`DataTransfer::LEN`] bytes of them are the whole message.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::DATA_OFFSET] {
        let mut b = [0; Self::DATA_OFFSET];
        put_u16(&mut b, 0, self.credits_requested);
        put_u16(&mut b, 2, self.credits_granted);
        put_u16(&mut b, 4, self.flags.0);
        put_u32(&mut b, 8, self.remaining_data_length);
        put_u32(&mut b, 12, self.data_offset);
        put_u32(&mut b, 16, self.data_length);
        b
    }
}
