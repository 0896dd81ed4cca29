//! Messages of [MS-SMBD], and the structures of [MS-SMB2] that describe a peer's memory.
//!
//! Everything is little-endian, without the length prefix of TCP. Nothing here allocates; reserved fields are ignored on read
//! and zero on write.

pub mod crypto_transform;
pub mod data_transfer;
pub mod descriptor;
pub mod negotiate;
pub mod rdma_transform;

pub use crypto_transform::CryptoTransform;
pub use data_transfer::{DataTransfer, Flags};
pub use descriptor::{BufferDescriptor, Descriptors, Token};
pub use negotiate::{NegotiateRequest, NegotiateResponse, Status};
pub use rdma_transform::RdmaTransform;

/// The only version ([MS-SMBD] 1.7).
pub const VERSION: u16 = 0x0100;

/// Bytes that violate the rules of their structure: location, structure and fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault} in {what} at offset {offset}")]
pub struct Malformed {
    /// What is wrong.
    pub fault: Fault,
    /// The structure being read.
    pub what: &'static str,
    /// Bytes from the start of the structure.
    pub offset: u32,
}

/// Kinds of malformed input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Fewer bytes than the structure or its lengths need.
    #[error("truncated")]
    Truncated,
    /// An offset points outside the valid range of its target, or is not aligned.
    #[error("bad offset")]
    Offset,
    /// A field has a value that the specification excludes.
    #[error("bad value")]
    Value,
    /// More elements than [`crate::limits`] allows.
    #[error("too many elements")]
    TooMany,
}

/// The fixed part of a structure.
fn fixed<'a, const N: usize>(bytes: &'a [u8], what: &'static str) -> Result<&'a [u8; N], Malformed> {
    let len = bytes.len().min(N) as u32;
    bytes.first_chunk().ok_or(Malformed { fault: Fault::Truncated, what, offset: len })
}

fn get_u16<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn get_u32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn put_u16<const N: usize>(bytes: &mut [u8; N], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put_u32<const N: usize>(bytes: &mut [u8; N], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}
