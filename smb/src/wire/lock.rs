//! LOCK ([MS-SMB2] 2.2.26, 2.2.27).

use super::cursor::{Field, Put, Reader, len_u16};
use super::newtype::{layout, open_flags};
use super::{Fault, Malformed, limits};
use crate::ids::FileId;

open_flags!(
    /// `Flags` of one range.
    LockFlags(u32) { SHARED_LOCK = 0x01, EXCLUSIVE_LOCK = 0x02, UNLOCK = 0x04, FAIL_IMMEDIATELY = 0x10 }
);
layout!(
    /// `SMB2_LOCK_ELEMENT` ([MS-SMB2] 2.2.26.1): a range of bytes.
    LockElement[24] { offset: u64, length: u64, flags: LockFlags, _: 4, }
);

/// Ranges to lock or unlock ([MS-SMB2] 2.2.26).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request {
    /// `LockSequenceNumber`, four bits, below `LockSequenceIndex`; reserved in dialect 2.0.2.
    pub lock_sequence: u32,
    pub file_id: FileId,
    pub locks: Vec<LockElement>,
}

impl Request {
    /// Reads a message from its SMB2 header on. A message without ranges is well formed; the engine refuses it ([MS-SMB2]
    /// 3.3.5.14).
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 48, "lock request")?;
        let count = r.get::<u16>()?;
        let lock_sequence = r.get()?;
        let file_id = r.get()?;
        if usize::from(count) > limits::LOCKS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let locks = (0..count).map(|_| LockElement::read(&mut r)).collect::<Result<_, _>>()?;
        Ok(Self { lock_sequence, file_id, locks })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(48);
        out.put(len_u16(self.locks.len()));
        out.put(self.lock_sequence);
        out.put(self.file_id);
        for lock in &self.locks {
            lock.encode(out);
        }
    }

    /// `LockSequenceNumber` ([MS-SMB2] 2.2.26).
    #[must_use]
    pub const fn lock_sequence_number(&self) -> u8 {
        (self.lock_sequence & 0xf) as u8
    }

    /// `LockSequenceIndex` ([MS-SMB2] 2.2.26).
    #[must_use]
    pub const fn lock_sequence_index(&self) -> u32 {
        self.lock_sequence >> 4
    }
}

/// Success ([MS-SMB2] 2.2.27).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Response;

impl Response {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        Reader::body(msg, 4, "lock response")?.skip(2)?;
        Ok(Self)
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(4);
        out.put_u16(0);
    }
}
