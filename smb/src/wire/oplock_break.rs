//! OPLOCK_BREAK ([MS-SMB2] 2.2.23 to 2.2.25): notification by the server, acknowledgment by the client, response by the
//! server; for oplocks and for leases. The structure size distinguishes them.

use super::create::OplockLevel;
use super::create_context::LeaseState;
use super::cursor::{Put, Reader, zeros};
use super::newtype::open_flags;
use super::{AccessMask, Fault, HEADER_LEN, Malformed, ShareAccess};
use crate::ids::FileId;

open_flags!(
    /// `Flags` of a lease break notification.
    LeaseBreakFlags(u32) { ACK_REQUIRED = 0x01 }
);

const OPLOCK_SIZE: u16 = 24;
const LEASE_NOTIFICATION_SIZE: u16 = 44;
const LEASE_ACKNOWLEDGMENT_SIZE: u16 = 36;

/// An oplock break, in all three messages ([MS-SMB2] 2.2.23.1, 2.2.24.1, 2.2.25.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct OplockBreak {
    pub oplock_level: OplockLevel,
    pub file_id: FileId,
}

/// A request to give up a part of a lease ([MS-SMB2] 2.2.23.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct LeaseBreakNotification {
    /// Zero for a lease of version 1.
    pub new_epoch: u16,
    pub flags: LeaseBreakFlags,
    pub lease_key: [u8; 16],
    pub current_lease_state: LeaseState,
    pub new_lease_state: LeaseState,
    /// Reserved, zero.
    pub break_reason: u32,
    /// Reserved, zero.
    pub access_mask_hint: AccessMask,
    /// Reserved, zero.
    pub share_mask_hint: ShareAccess,
}

/// The client's acknowledgment and the server's response to it ([MS-SMB2] 2.2.24.2, 2.2.25.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct LeaseBreakAcknowledgment {
    pub lease_key: [u8; 16],
    pub lease_state: LeaseState,
}

impl OplockBreak {
    fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, OPLOCK_SIZE, "oplock break")?;
        let oplock_level = r.get()?;
        r.skip(5)?;
        Ok(Self { oplock_level, file_id: r.get()? })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(OPLOCK_SIZE);
        out.put(self.oplock_level);
        zeros(out, 5);
        out.put(self.file_id);
    }
}

impl LeaseBreakNotification {
    fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, LEASE_NOTIFICATION_SIZE, "lease break notification")?;
        Ok(Self {
            new_epoch: r.get()?,
            flags: r.get()?,
            lease_key: r.get()?,
            current_lease_state: r.get()?,
            new_lease_state: r.get()?,
            break_reason: r.get()?,
            access_mask_hint: r.get()?,
            share_mask_hint: r.get()?,
        })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(LEASE_NOTIFICATION_SIZE);
        out.put(self.new_epoch);
        out.put(self.flags);
        out.put(self.lease_key);
        out.put(self.current_lease_state);
        out.put(self.new_lease_state);
        out.put(self.break_reason);
        out.put(self.access_mask_hint);
        out.put(self.share_mask_hint);
    }
}

impl LeaseBreakAcknowledgment {
    fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, LEASE_ACKNOWLEDGMENT_SIZE, "lease break acknowledgment")?;
        r.skip(6)?;
        let acknowledgment = Self { lease_key: r.get()?, lease_state: r.get()? };
        r.skip(8)?;
        Ok(acknowledgment)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u16(LEASE_ACKNOWLEDGMENT_SIZE);
        zeros(out, 6);
        out.put(self.lease_key);
        out.put(self.lease_state);
        zeros(out, 8);
    }
}

fn structure_size(msg: &[u8]) -> Result<u16, Malformed> {
    let mut r = Reader::new(msg, "oplock break");
    r.skip(HEADER_LEN)?;
    r.get()
}

const UNKNOWN_SIZE: Malformed =
    Malformed { fault: Fault::StructureSize, what: "oplock break", offset: HEADER_LEN as u32 };

/// An unsolicited message from the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification {
    /// For an oplock.
    Oplock(OplockBreak),
    /// For a lease.
    Lease(LeaseBreakNotification),
}

impl Notification {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        match structure_size(msg)? {
            OPLOCK_SIZE => OplockBreak::parse(msg).map(Self::Oplock),
            LEASE_NOTIFICATION_SIZE => LeaseBreakNotification::parse(msg).map(Self::Lease),
            _ => Err(UNKNOWN_SIZE),
        }
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Oplock(oplock) => oplock.encode(out),
            Self::Lease(lease) => lease.encode(out),
        }
    }
}

/// The client's acknowledgment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// For an oplock.
    Oplock(OplockBreak),
    /// For a lease.
    Lease(LeaseBreakAcknowledgment),
}

impl Request {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &[u8]) -> Result<Self, Malformed> {
        match structure_size(msg)? {
            OPLOCK_SIZE => OplockBreak::parse(msg).map(Self::Oplock),
            LEASE_ACKNOWLEDGMENT_SIZE => LeaseBreakAcknowledgment::parse(msg).map(Self::Lease),
            _ => Err(UNKNOWN_SIZE),
        }
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Oplock(oplock) => oplock.encode(out),
            Self::Lease(lease) => lease.encode(out),
        }
    }
}

/// The server's response to an acknowledgment: the same structures ([MS-SMB2] 2.2.25).
pub type Response = Request;
