//! Negotiate Request and Response ([MS-SMBD] 2.2.1, 2.2.2). The connection validates the values.

use super::{Malformed, fixed, get_u16, get_u32, put_u16, put_u32};

/// Capabilities and requests of the connecting side ([MS-SMBD] 2.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct NegotiateRequest {
    pub min_version: u16,
    pub max_version: u16,
    pub credits_requested: u16,
    pub preferred_send_size: u32,
    pub max_receive_size: u32,
    pub max_fragmented_size: u32,
}

impl NegotiateRequest {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// Reads the message; bytes after it are ignored.
    ///
    /// # Errors
    /// [`Malformed`] if it is too short.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let b: &[u8; Self::LEN] = fixed(message, "negotiate request")?;
        Ok(Self {
            min_version: get_u16(b, 0),
            max_version: get_u16(b, 2),
            credits_requested: get_u16(b, 6),
            preferred_send_size: get_u32(b, 8),
            max_receive_size: get_u32(b, 12),
            max_fragmented_size: get_u32(b, 16),
        })
    }

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put_u16(&mut b, 0, self.min_version);
        put_u16(&mut b, 2, self.max_version);
        put_u16(&mut b, 6, self.credits_requested);
        put_u32(&mut b, 8, self.preferred_send_size);
        put_u32(&mut b, 12, self.max_receive_size);
        put_u32(&mut b, 16, self.max_fragmented_size);
        b
    }
}

/// `Status`: an NTSTATUS.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Status(pub u32);

impl Status {
    /// STATUS_SUCCESS.
    pub const SUCCESS: Self = Self(0);
    /// STATUS_NOT_SUPPORTED: no version in common.
    pub const NOT_SUPPORTED: Self = Self(0xc000_00bb);
    /// STATUS_INSUFFICIENT_RESOURCES: the buffers cannot hold the messages that the peer would send.
    pub const INSUFFICIENT_RESOURCES: Self = Self(0xc000_009a);
}

impl std::fmt::Debug for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// Negotiated version, and capabilities and requests of the accepting side ([MS-SMBD] 2.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct NegotiateResponse {
    pub min_version: u16,
    pub max_version: u16,
    pub negotiated_version: u16,
    pub credits_requested: u16,
    pub credits_granted: u16,
    pub status: Status,
    pub max_read_write_size: u32,
    pub preferred_send_size: u32,
    pub max_receive_size: u32,
    pub max_fragmented_size: u32,
}

impl NegotiateResponse {
    /// Bytes on the wire.
    pub const LEN: usize = 32;

    /// A refusal: all fields except versions and status are zero ([MS-SMBD] 3.1.5.3).
    #[must_use]
    pub const fn refusal(status: Status) -> Self {
        Self {
            min_version: super::VERSION,
            max_version: super::VERSION,
            negotiated_version: 0,
            credits_requested: 0,
            credits_granted: 0,
            status,
            max_read_write_size: 0,
            preferred_send_size: 0,
            max_receive_size: 0,
            max_fragmented_size: 0,
        }
    }

    /// Reads the message; bytes after it are ignored.
    ///
    /// # Errors
    /// [`Malformed`] if it is too short.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let b: &[u8; Self::LEN] = fixed(message, "negotiate response")?;
        Ok(Self {
            min_version: get_u16(b, 0),
            max_version: get_u16(b, 2),
            negotiated_version: get_u16(b, 4),
            credits_requested: get_u16(b, 8),
            credits_granted: get_u16(b, 10),
            status: Status(get_u32(b, 12)),
            max_read_write_size: get_u32(b, 16),
            preferred_send_size: get_u32(b, 20),
            max_receive_size: get_u32(b, 24),
            max_fragmented_size: get_u32(b, 28),
        })
    }

    /// Encodes the message.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        put_u16(&mut b, 0, self.min_version);
        put_u16(&mut b, 2, self.max_version);
        put_u16(&mut b, 4, self.negotiated_version);
        put_u16(&mut b, 8, self.credits_requested);
        put_u16(&mut b, 10, self.credits_granted);
        put_u32(&mut b, 12, self.status.0);
        put_u32(&mut b, 16, self.max_read_write_size);
        put_u32(&mut b, 20, self.preferred_send_size);
        put_u32(&mut b, 24, self.max_receive_size);
        put_u32(&mut b, 28, self.max_fragmented_size);
        b
    }
}
