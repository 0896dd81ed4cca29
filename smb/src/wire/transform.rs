//! Transform headers ([MS-SMB2] 2.2.41, 2.2.42) and the kinds of frames.

use super::cursor::{Put, Reader};
use super::newtype::open_flags;
use super::{Fault, HEADER_LEN, Malformed, header, smb1};

/// Bytes of the encryption header.
pub const TRANSFORM_HEADER_LEN: usize = 52;
/// Its first four bytes.
pub const TRANSFORM_PROTOCOL_ID: [u8; 4] = *b"\xfdSMB";
/// The first four bytes of a compressed message.
pub const COMPRESSION_PROTOCOL_ID: [u8; 4] = *b"\xfcSMB";
/// Where the authenticated part of the encryption header begins: after the signature ([MS-SMB2] 3.1.4.3).
pub const TRANSFORM_AAD_OFFSET: usize = 20;

open_flags!(
    /// `Flags` (3.1.1) or `EncryptionAlgorithm` (3.0, 3.0.2): 1 either way.
    TransformFlags(u16) { ENCRYPTED = 0x0001 }
);

/// What a frame is, by its first four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// SMB2 messages in clear.
    Smb2,
    /// An encrypted message.
    Encrypted,
    /// A compressed message.
    Compressed,
    /// SMB1: acceptable only as the first negotiate.
    Smb1,
}

impl FrameKind {
    /// Looks at the first four bytes.
    pub fn of(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame, "frame");
        match r.array()? {
            header::PROTOCOL_ID => Ok(Self::Smb2),
            TRANSFORM_PROTOCOL_ID => Ok(Self::Encrypted),
            COMPRESSION_PROTOCOL_ID => Ok(Self::Compressed),
            smb1::PROTOCOL_ID => Ok(Self::Smb1),
            _ => Err(Malformed { fault: Fault::ProtocolId, what: "frame", offset: 0 }),
        }
    }
}

/// In front of an encrypted message ([MS-SMB2] 2.2.41).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct TransformHeader {
    pub signature: [u8; 16],
    /// CCM uses the first 11 bytes, GCM the first 12.
    pub nonce: [u8; 16],
    pub original_message_size: u32,
    pub flags: TransformFlags,
    pub session_id: u64,
}

impl TransformHeader {
    /// Reads the header at the start of `frame`.
    pub fn parse(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame, "transform header");
        if r.array()? != TRANSFORM_PROTOCOL_ID {
            return Err(Malformed { fault: Fault::ProtocolId, what: "transform header", offset: 0 });
        }
        let signature = r.get()?;
        let nonce = r.get()?;
        let original_message_size = r.get()?;
        r.skip(2)?;
        Ok(Self { signature, nonce, original_message_size, flags: r.get()?, session_id: r.get()? })
    }

    /// Appends the header, [`TRANSFORM_HEADER_LEN`] bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(TRANSFORM_PROTOCOL_ID);
        out.put(self.signature);
        out.put(self.nonce);
        out.put(self.original_message_size);
        out.put_u16(0);
        out.put(self.flags);
        out.put(self.session_id);
    }

    /// The encrypted message within `frame`, which starts with this header.
    pub fn payload<'a>(&self, frame: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let mut r = Reader::new(frame, "transform header");
        r.skip(TRANSFORM_HEADER_LEN)?;
        // [MS-SMB2] 3.3.5.2.1.1: shorter than one header cannot be a message.
        if (self.original_message_size as usize) < HEADER_LEN {
            return Err(r.fault(Fault::Value));
        }
        r.take(self.original_message_size as usize)
    }
}

/// In front of a compressed message ([MS-SMB2] 2.2.42). Recognised, so that it can be refused: we never negotiate it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct CompressionHeader {
    pub original_compressed_segment_size: u32,
    pub compression_algorithm: super::negotiate_context::CompressionAlgorithm,
    /// 1 if payloads are chained.
    pub flags: u16,
    /// `Offset`, or `Length` if chained.
    pub offset_or_length: u32,
}

impl CompressionHeader {
    /// Reads the header at the start of `frame`.
    pub fn parse(frame: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(frame, "compression header");
        if r.array()? != COMPRESSION_PROTOCOL_ID {
            return Err(Malformed { fault: Fault::ProtocolId, what: "compression header", offset: 0 });
        }
        Ok(Self {
            original_compressed_segment_size: r.get()?,
            compression_algorithm: r.get()?,
            flags: r.get()?,
            offset_or_length: r.get()?,
        })
    }

    /// Appends the header.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(COMPRESSION_PROTOCOL_ID);
        out.put(self.original_compressed_segment_size);
        out.put(self.compression_algorithm);
        out.put(self.flags);
        out.put(self.offset_or_length);
    }
}
