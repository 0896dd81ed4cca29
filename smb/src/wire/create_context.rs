//! Create contexts ([MS-SMB2] 2.2.13.2, 2.2.14.2). The same name has different meanings in a request and in a response, so
//! there are two enumerations.

use super::cursor::{Put, Reader, align, patch_u16, patch_u32, zeros};
use super::newtype::open_flags;
use super::{AccessMask, Fault, FileTime, Malformed, limits};
use crate::ids::FileId;
use crate::status::NtStatus;

/// Names of contexts, in wire format.
pub mod name {
    #![allow(missing_docs, reason = "the names are the specification's")]
    pub const EA_BUFFER: &[u8] = b"ExtA";
    pub const SD_BUFFER: &[u8] = b"SecD";
    pub const DURABLE_HANDLE_REQUEST: &[u8] = b"DHnQ";
    pub const DURABLE_HANDLE_RECONNECT: &[u8] = b"DHnC";
    pub const ALLOCATION_SIZE: &[u8] = b"AlSi";
    pub const QUERY_MAXIMAL_ACCESS_REQUEST: &[u8] = b"MxAc";
    pub const TIMEWARP_TOKEN: &[u8] = b"TWrp";
    pub const QUERY_ON_DISK_ID: &[u8] = b"QFid";
    pub const REQUEST_LEASE: &[u8] = b"RqLs";
    pub const DURABLE_HANDLE_REQUEST_V2: &[u8] = b"DH2Q";
    pub const DURABLE_HANDLE_RECONNECT_V2: &[u8] = b"DH2C";
    pub const APP_INSTANCE_ID: &[u8] = b"\x45\xbc\xa6\x6a\xef\xa7\xf7\x4a\x90\x08\xfa\x46\x2e\x14\x4d\x74";
    pub const APP_INSTANCE_VERSION: &[u8] =
        b"\xb9\x82\xd0\xb7\x3b\x56\x07\x4f\xa0\x7b\x52\x4a\x81\x16\xa0\x10";
    pub const POSIX: &[u8] = b"\x93\xad\x25\x50\x9c\xb4\x11\xe7\xb4\x23\x83\xde\x96\x8b\xcd\x7c";
}

open_flags!(
    /// What a lease allows a client to cache ([MS-SMB2] 2.2.13.2.8).
    LeaseState(u32) { READ_CACHING = 0x01, HANDLE_CACHING = 0x02, WRITE_CACHING = 0x04 }
);
open_flags!(
    /// `LeaseFlags` ([MS-SMB2] 2.2.13.2.8, 2.2.13.2.10, 2.2.14.2.10).
    LeaseFlags(u32) { BREAK_IN_PROGRESS = 0x02, PARENT_LEASE_KEY_SET = 0x04 }
);
open_flags!(
    /// `Flags` of a durable handle, version 2 ([MS-SMB2] 2.2.13.2.11).
    DurableFlags(u32) { PERSISTENT = 0x02 }
);

/// The fields that version 2 of a lease adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct LeaseV2 {
    pub parent_lease_key: [u8; 16],
    pub epoch: u16,
}

/// A lease, requested or granted, in either version ([MS-SMB2] 2.2.13.2.8, 2.2.13.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Lease {
    pub lease_key: [u8; 16],
    pub lease_state: LeaseState,
    pub lease_flags: LeaseFlags,
    /// Present in version 2.
    pub v2: Option<LeaseV2>,
}

impl Lease {
    fn parse(data: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, "lease context");
        // [MS-SMB2] 3.3.5.9.8, 3.3.5.9.11: the length determines the version; any other is an error.
        if data.len() != 32 && data.len() != 52 {
            return Err(r.fault(Fault::StructureSize));
        }
        let lease_key = r.get()?;
        let lease_state = r.get()?;
        let lease_flags = r.get()?;
        r.skip(8)?;
        let v2 = if data.len() == 52 {
            let v2 = LeaseV2 { parent_lease_key: r.get()?, epoch: r.get()? };
            r.skip(2)?;
            Some(v2)
        } else {
            None
        };
        Ok(Self { lease_key, lease_state, lease_flags, v2 })
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.lease_key);
        out.put(self.lease_state);
        out.put(self.lease_flags);
        zeros(out, 8);
        if let Some(v2) = self.v2 {
            out.put(v2.parent_lease_key);
            out.put(v2.epoch);
            zeros(out, 2);
        }
    }
}

/// A context of a CREATE request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestContext<'a> {
    /// `ExtA`: a list of [`super::fscc::ea::FullEa`].
    EaBuffer(&'a [u8]),
    /// `SecD`: a security descriptor for the new file.
    SdBuffer(&'a [u8]),
    /// `DHnQ`: keep the open across a disconnect.
    DurableHandleRequest,
    /// `DHnC`: reconnect to an open.
    DurableHandleReconnect(FileId),
    /// `AlSi`: `AllocationSize`.
    AllocationSize(u64),
    /// `MxAc`: query the maximal access. With a time, only if the file has changed since.
    QueryMaximalAccess(Option<FileTime>),
    /// `TWrp`: open the file as of this snapshot.
    TimewarpToken(FileTime),
    /// `QFid`: query the file's id on disk.
    QueryOnDiskId,
    /// `RqLs`: both versions.
    Lease(Lease),
    /// `DH2Q`.
    DurableHandleRequestV2 {
        /// Milliseconds; zero leaves the choice to the server.
        timeout_ms: u32,
        /// Durable or persistent.
        flags: DurableFlags,
        /// Identifies the create, so that a replay is recognised.
        create_guid: [u8; 16],
    },
    /// `DH2C`.
    DurableHandleReconnectV2 {
        /// The previous open; only its persistent half counts.
        file_id: FileId,
        /// As in the request that created it.
        create_guid: [u8; 16],
        /// Durable or persistent.
        flags: DurableFlags,
    },
    /// The instance of an application that owns the open ([MS-SMB2] 2.2.13.2.13).
    AppInstanceId([u8; 16]),
    /// Its version ([MS-SMB2] 2.2.13.2.15).
    AppInstanceVersion {
        /// `AppInstanceVersionHigh`.
        high: u64,
        /// `AppInstanceVersionLow`.
        low: u64,
    },
    /// POSIX permissions for the new file ([SMB2-POSIX] 2.2.13.2.16).
    Posix {
        /// The mode bits.
        mode: u32,
    },
    /// Any other context; ignored ([MS-SMB2] 3.3.5.9).
    Unknown {
        /// `Name`.
        name: &'a [u8],
        /// `Data`.
        data: &'a [u8],
    },
}

impl<'a> RequestContext<'a> {
    fn parse(name: &'a [u8], data: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, "create context");
        Ok(match name {
            name::EA_BUFFER => Self::EaBuffer(data),
            name::SD_BUFFER => Self::SdBuffer(data),
            name::DURABLE_HANDLE_REQUEST => {
                r.skip(16)?;
                Self::DurableHandleRequest
            }
            name::DURABLE_HANDLE_RECONNECT => Self::DurableHandleReconnect(r.get()?),
            name::ALLOCATION_SIZE => Self::AllocationSize(r.get()?),
            name::QUERY_MAXIMAL_ACCESS_REQUEST if data.is_empty() => Self::QueryMaximalAccess(None),
            name::QUERY_MAXIMAL_ACCESS_REQUEST => Self::QueryMaximalAccess(Some(r.get()?)),
            name::TIMEWARP_TOKEN => Self::TimewarpToken(r.get()?),
            name::QUERY_ON_DISK_ID => Self::QueryOnDiskId,
            name::REQUEST_LEASE => Self::Lease(Lease::parse(data)?),
            name::DURABLE_HANDLE_REQUEST_V2 => {
                let timeout_ms = r.get()?;
                let flags = r.get()?;
                r.skip(8)?;
                Self::DurableHandleRequestV2 { timeout_ms, flags, create_guid: r.get()? }
            }
            name::DURABLE_HANDLE_RECONNECT_V2 => {
                Self::DurableHandleReconnectV2 { file_id: r.get()?, create_guid: r.get()?, flags: r.get()? }
            }
            name::APP_INSTANCE_ID => {
                expect_size(&mut r, 20)?;
                r.skip(2)?;
                Self::AppInstanceId(r.get()?)
            }
            name::APP_INSTANCE_VERSION => {
                expect_size(&mut r, 24)?;
                r.skip(6)?;
                Self::AppInstanceVersion { high: r.get()?, low: r.get()? }
            }
            name::POSIX => Self::Posix { mode: r.get()? },
            _ => Self::Unknown { name, data },
        })
    }

    /// `Name`.
    #[must_use]
    pub const fn name(&self) -> &'a [u8] {
        match self {
            Self::EaBuffer(_) => name::EA_BUFFER,
            Self::SdBuffer(_) => name::SD_BUFFER,
            Self::DurableHandleRequest => name::DURABLE_HANDLE_REQUEST,
            Self::DurableHandleReconnect(_) => name::DURABLE_HANDLE_RECONNECT,
            Self::AllocationSize(_) => name::ALLOCATION_SIZE,
            Self::QueryMaximalAccess(_) => name::QUERY_MAXIMAL_ACCESS_REQUEST,
            Self::TimewarpToken(_) => name::TIMEWARP_TOKEN,
            Self::QueryOnDiskId => name::QUERY_ON_DISK_ID,
            Self::Lease(_) => name::REQUEST_LEASE,
            Self::DurableHandleRequestV2 { .. } => name::DURABLE_HANDLE_REQUEST_V2,
            Self::DurableHandleReconnectV2 { .. } => name::DURABLE_HANDLE_RECONNECT_V2,
            Self::AppInstanceId(_) => name::APP_INSTANCE_ID,
            Self::AppInstanceVersion { .. } => name::APP_INSTANCE_VERSION,
            Self::Posix { .. } => name::POSIX,
            Self::Unknown { name, .. } => name,
        }
    }

    fn encode_data(&self, out: &mut Vec<u8>) {
        match self {
            Self::EaBuffer(data) | Self::SdBuffer(data) | Self::Unknown { data, .. } => {
                out.extend_from_slice(data);
            }
            Self::DurableHandleRequest => zeros(out, 16),
            Self::DurableHandleReconnect(file_id) => out.put(*file_id),
            Self::AllocationSize(size) => out.put(*size),
            Self::QueryMaximalAccess(Some(time)) | Self::TimewarpToken(time) => out.put(*time),
            Self::QueryMaximalAccess(None) | Self::QueryOnDiskId => {}
            Self::Lease(lease) => lease.encode(out),
            Self::DurableHandleRequestV2 { timeout_ms, flags, create_guid } => {
                out.put(*timeout_ms);
                out.put(*flags);
                zeros(out, 8);
                out.put(*create_guid);
            }
            Self::DurableHandleReconnectV2 { file_id, create_guid, flags } => {
                out.put(*file_id);
                out.put(*create_guid);
                out.put(*flags);
            }
            Self::AppInstanceId(id) => {
                out.put_u16(20);
                zeros(out, 2);
                out.put(*id);
            }
            Self::AppInstanceVersion { high, low } => {
                out.put_u16(24);
                zeros(out, 6);
                out.put(*high);
                out.put(*low);
            }
            Self::Posix { mode } => out.put(*mode),
        }
    }
}

fn expect_size(r: &mut Reader<'_>, size: u16) -> Result<(), Malformed> {
    if r.get::<u16>()? != size { Err(r.fault(Fault::StructureSize)) } else { Ok(()) }
}

/// A context of a CREATE response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseContext<'a> {
    /// `DHnQ`: granted.
    DurableHandle,
    /// `MxAc`.
    MaximalAccess {
        /// `QueryStatus`.
        query_status: NtStatus,
        /// `MaximalAccess`.
        maximal_access: AccessMask,
    },
    /// `QFid` ([MS-SMB2] 2.2.14.2.9); sixteen reserved bytes follow on the wire.
    OnDiskId {
        /// `DiskFileId`.
        disk_file_id: u64,
        /// `VolumeId`.
        volume_id: u64,
    },
    /// `RqLs`: both versions.
    Lease(Lease),
    /// `DH2Q`: granted.
    DurableHandleV2 {
        /// Milliseconds.
        timeout_ms: u32,
        /// Durable or persistent.
        flags: DurableFlags,
    },
    /// [SMB2-POSIX] 2.2.14.2.16.
    Posix {
        /// Hard links.
        nlink: u32,
        /// Reparse tag, or zero.
        reparse_tag: u32,
        /// The mode bits.
        mode: u32,
        /// SIDs of the owner and the group, one after the other.
        sids: &'a [u8],
    },
    /// Any other context.
    Unknown {
        /// `Name`.
        name: &'a [u8],
        /// `Data`.
        data: &'a [u8],
    },
}

impl<'a> ResponseContext<'a> {
    fn parse(name: &'a [u8], data: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(data, "create context");
        Ok(match name {
            name::DURABLE_HANDLE_REQUEST => {
                r.skip(8)?;
                Self::DurableHandle
            }
            name::QUERY_MAXIMAL_ACCESS_REQUEST => {
                Self::MaximalAccess { query_status: r.get()?, maximal_access: r.get()? }
            }
            name::QUERY_ON_DISK_ID => {
                let context = Self::OnDiskId { disk_file_id: r.get()?, volume_id: r.get()? };
                r.skip(16)?;
                context
            }
            name::REQUEST_LEASE => Self::Lease(Lease::parse(data)?),
            name::DURABLE_HANDLE_REQUEST_V2 => {
                Self::DurableHandleV2 { timeout_ms: r.get()?, flags: r.get()? }
            }
            name::POSIX => {
                Self::Posix { nlink: r.get()?, reparse_tag: r.get()?, mode: r.get()?, sids: r.rest() }
            }
            _ => Self::Unknown { name, data },
        })
    }

    /// `Name`.
    #[must_use]
    pub const fn name(&self) -> &'a [u8] {
        match self {
            Self::DurableHandle => name::DURABLE_HANDLE_REQUEST,
            Self::MaximalAccess { .. } => name::QUERY_MAXIMAL_ACCESS_REQUEST,
            Self::OnDiskId { .. } => name::QUERY_ON_DISK_ID,
            Self::Lease(_) => name::REQUEST_LEASE,
            Self::DurableHandleV2 { .. } => name::DURABLE_HANDLE_REQUEST_V2,
            Self::Posix { .. } => name::POSIX,
            Self::Unknown { name, .. } => name,
        }
    }

    fn encode_data(&self, out: &mut Vec<u8>) {
        match self {
            Self::DurableHandle => zeros(out, 8),
            Self::MaximalAccess { query_status, maximal_access } => {
                out.put(*query_status);
                out.put(*maximal_access);
            }
            Self::OnDiskId { disk_file_id, volume_id } => {
                out.put(*disk_file_id);
                out.put(*volume_id);
                zeros(out, 16);
            }
            Self::Lease(lease) => lease.encode(out),
            Self::DurableHandleV2 { timeout_ms, flags } => {
                out.put(*timeout_ms);
                out.put(*flags);
            }
            Self::Posix { nlink, reparse_tag, mode, sids } => {
                out.put(*nlink);
                out.put(*reparse_tag);
                out.put(*mode);
                out.extend_from_slice(sids);
            }
            Self::Unknown { data, .. } => out.extend_from_slice(data),
        }
    }
}

/// Bytes before the name and data of each context.
const FIXED_LEN: usize = 16;

fn parse_chain<'a, T>(
    chain: &'a [u8],
    parse: impl Fn(&'a [u8], &'a [u8]) -> Result<T, Malformed>,
) -> Result<Vec<T>, Malformed> {
    let mut contexts = Vec::new();
    let mut rest = chain;
    while !rest.is_empty() {
        let mut r = Reader::new(rest, "create context");
        if contexts.len() == limits::CREATE_CONTEXTS_MAX {
            return Err(r.fault(Fault::TooMany));
        }
        let next = r.get::<u32>()? as usize;
        let name_offset = r.get::<u16>()?;
        let name_len = r.get::<u16>()?;
        r.skip(2)?;
        let data_offset = r.get::<u16>()?;
        let data_len = r.get::<u32>()?;
        // [MS-SMB2] 2.2.13.2: the next context begins aligned, after this one; name and data are before it.
        if next != 0 && (next < FIXED_LEN || !next.is_multiple_of(8) || next > rest.len()) {
            return Err(r.fault(Fault::Offset));
        }
        let end = if next == 0 { rest.len() } else { next };
        let mut element = Reader::new(&rest[..end], "create context");
        element.skip(FIXED_LEN)?;
        let name = element.variable(name_offset.into(), name_len.into())?;
        let data = element.variable(data_offset.into(), data_len as usize)?;
        contexts.push(parse(name, data)?);
        if next == 0 {
            break;
        }
        rest = &rest[next..];
    }
    Ok(contexts)
}

fn encode_chain<'c, 'a: 'c>(
    contexts: impl Iterator<Item = (&'a [u8], impl FnOnce(&mut Vec<u8>))>,
    out: &mut Vec<u8>,
) {
    let mut previous = None;
    for (name, encode_data) in contexts {
        if let Some(previous) = previous {
            align(out, previous, 8);
            let next = out.len() - previous;
            patch_u32(out, previous, next);
        }
        let start = out.len();
        previous = Some(start);
        zeros(out, 4);
        out.put_u16(FIXED_LEN as u16);
        out.put_u16(name.len() as u16);
        zeros(out, 8);
        out.extend_from_slice(name);
        let name_end = out.len();
        align(out, start, 8);
        let data = out.len();
        encode_data(out);
        let len = out.len() - data;
        if len == 0 {
            // Windows sets the offset of an absent part to zero, without padding.
            out.truncate(name_end);
        } else {
            patch_u16(out, start + 10, data - start);
            patch_u32(out, start + 12, len);
        }
    }
}

/// Reads the chain of contexts of a request.
pub fn parse_request_chain(chain: &[u8]) -> Result<Vec<RequestContext<'_>>, Malformed> {
    parse_chain(chain, RequestContext::parse)
}

/// Reads the chain of contexts of a response.
pub fn parse_response_chain(chain: &[u8]) -> Result<Vec<ResponseContext<'_>>, Malformed> {
    parse_chain(chain, ResponseContext::parse)
}

/// Appends the chain of contexts of a request; the caller has aligned `out`.
pub fn encode_request_chain(contexts: &[RequestContext<'_>], out: &mut Vec<u8>) {
    encode_chain(contexts.iter().map(|c| (c.name(), |out: &mut Vec<u8>| c.encode_data(out))), out);
}

/// Appends the chain of contexts of a response; the caller has aligned `out`.
pub fn encode_response_chain(contexts: &[ResponseContext<'_>], out: &mut Vec<u8>) {
    encode_chain(contexts.iter().map(|c| (c.name(), |out: &mut Vec<u8>| c.encode_data(out))), out);
}
