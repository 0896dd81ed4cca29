//! CREATE ([MS-SMB2] 2.2.13, 2.2.14).

use super::create_context::{self, RequestContext, ResponseContext};
use super::cursor::{Put, Reader, align, len_u16, offset_from_header, patch_u32, zeros};
use super::newtype::{open_enum, open_flags};
use super::{AccessMask, Fault, FileAttributes, FileTime, Malformed, ShareAccess, utf16};
use crate::ids::FileId;

open_enum!(
    /// `RequestedOplockLevel`, `OplockLevel`.
    OplockLevel(u8) { NONE = 0x00, II = 0x01, EXCLUSIVE = 0x08, BATCH = 0x09, LEASE = 0xff }
);
open_enum!(
    /// `ImpersonationLevel`.
    ImpersonationLevel(u32) { ANONYMOUS = 0, IDENTIFICATION = 1, IMPERSONATION = 2, DELEGATE = 3 }
);
open_enum!(
    /// `CreateDisposition`.
    CreateDisposition(u32) { SUPERSEDE = 0, OPEN = 1, CREATE = 2, OPEN_IF = 3, OVERWRITE = 4, OVERWRITE_IF = 5 }
);
open_enum!(
    /// `CreateAction`.
    CreateAction(u32) { SUPERSEDED = 0, OPENED = 1, CREATED = 2, OVERWRITTEN = 3 }
);
open_flags!(
    /// `CreateOptions`.
    CreateOptions(u32) {
        DIRECTORY_FILE = 0x0000_0001, WRITE_THROUGH = 0x0000_0002, SEQUENTIAL_ONLY = 0x0000_0004,
        NO_INTERMEDIATE_BUFFERING = 0x0000_0008, SYNCHRONOUS_IO_ALERT = 0x0000_0010,
        SYNCHRONOUS_IO_NONALERT = 0x0000_0020, NON_DIRECTORY_FILE = 0x0000_0040,
        CREATE_TREE_CONNECTION = 0x0000_0080, COMPLETE_IF_OPLOCKED = 0x0000_0100,
        NO_EA_KNOWLEDGE = 0x0000_0200, OPEN_REMOTE_INSTANCE = 0x0000_0400, RANDOM_ACCESS = 0x0000_0800,
        DELETE_ON_CLOSE = 0x0000_1000, OPEN_BY_FILE_ID = 0x0000_2000, OPEN_FOR_BACKUP_INTENT = 0x0000_4000,
        NO_COMPRESSION = 0x0000_8000, OPEN_REQUIRING_OPLOCK = 0x0001_0000,
        DISALLOW_EXCLUSIVE = 0x0002_0000, RESERVE_OPFILTER = 0x0010_0000,
        OPEN_REPARSE_POINT = 0x0020_0000, OPEN_NO_RECALL = 0x0040_0000,
        OPEN_FOR_FREE_SPACE_QUERY = 0x0080_0000,
    }
);
open_flags!(
    /// `Flags` of the response.
    ResponseFlags(u8) { REPARSEPOINT = 0x01 }
);

/// A file to open or create ([MS-SMB2] 2.2.13).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Request<'a> {
    pub requested_oplock_level: OplockLevel,
    pub impersonation_level: ImpersonationLevel,
    /// `SmbCreateFlags`, reserved.
    pub smb_create_flags: u64,
    pub desired_access: AccessMask,
    pub file_attributes: FileAttributes,
    pub share_access: ShareAccess,
    pub create_disposition: CreateDisposition,
    pub create_options: CreateOptions,
    /// Relative to the share, components separated by `\`, without a leading one; empty for the root of the share.
    pub name: String,
    pub contexts: Vec<RequestContext<'a>>,
}

impl<'a> Request<'a> {
    /// Reads a message from its SMB2 header on. [`Fault::Surrogate`] and [`Fault::OddString`] refer to the name.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 57, "create request")?;
        r.skip(1)?;
        let requested_oplock_level = r.get()?;
        let impersonation_level = r.get()?;
        let smb_create_flags = r.get()?;
        r.skip(8)?;
        let desired_access = r.get()?;
        let file_attributes = r.get()?;
        let share_access = r.get()?;
        let create_disposition = r.get()?;
        let create_options = r.get()?;
        let name_offset = r.get::<u16>()?;
        let name_len = r.get::<u16>()?;
        let contexts_offset = r.get::<u32>()?;
        let contexts_len = r.get::<u32>()?;
        let name = utf16::decode(r.variable(name_offset.into(), name_len.into())?)?;
        // [MS-SMB2] 2.2.13: the first context is aligned to eight bytes.
        if contexts_len > 0 && !contexts_offset.is_multiple_of(8) {
            return Err(Malformed { fault: Fault::Offset, what: "create request", offset: contexts_offset });
        }
        let contexts = r.variable(contexts_offset as usize, contexts_len as usize)?;
        Ok(Self {
            requested_oplock_level,
            impersonation_level,
            smb_create_flags,
            desired_access,
            file_attributes,
            share_access,
            create_disposition,
            create_options,
            name,
            contexts: create_context::parse_request_chain(contexts)?,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(57);
        zeros(out, 1);
        out.put(self.requested_oplock_level);
        out.put(self.impersonation_level);
        out.put(self.smb_create_flags);
        zeros(out, 8);
        out.put(self.desired_access);
        out.put(self.file_attributes);
        out.put(self.share_access);
        out.put(self.create_disposition);
        out.put(self.create_options);
        out.put(len_u16(offset_from_header(out, start) + 12));
        out.put(len_u16(utf16::encoded_len(&self.name)));
        let contexts_at = out.len();
        zeros(out, 8);
        utf16::encode(&self.name, out);
        if self.name.is_empty() {
            // [MS-SMB2] 2.2.13: the buffer contains at least one byte.
            zeros(out, 1);
        }
        if !self.contexts.is_empty() {
            align(out, start, 8);
            let contexts = out.len();
            let offset = offset_from_header(out, start);
            create_context::encode_request_chain(&self.contexts, out);
            let len = out.len() - contexts;
            patch_u32(out, contexts_at, offset);
            patch_u32(out, contexts_at + 4, len);
        }
    }
}

/// The opened file ([MS-SMB2] 2.2.14).
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct Response<'a> {
    pub oplock_level: OplockLevel,
    pub flags: ResponseFlags,
    pub create_action: CreateAction,
    pub creation_time: FileTime,
    pub last_access_time: FileTime,
    pub last_write_time: FileTime,
    pub change_time: FileTime,
    pub allocation_size: u64,
    pub end_of_file: u64,
    pub file_attributes: FileAttributes,
    pub file_id: FileId,
    pub contexts: Vec<ResponseContext<'a>>,
}

impl<'a> Response<'a> {
    /// Reads a message from its SMB2 header on.
    pub fn parse(msg: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader::body(msg, 89, "create response")?;
        let oplock_level = r.get()?;
        let flags = r.get()?;
        let create_action = r.get()?;
        let creation_time = r.get()?;
        let last_access_time = r.get()?;
        let last_write_time = r.get()?;
        let change_time = r.get()?;
        let allocation_size = r.get()?;
        let end_of_file = r.get()?;
        let file_attributes = r.get()?;
        r.skip(4)?;
        let file_id = r.get()?;
        let contexts_offset = r.get::<u32>()?;
        let contexts_len = r.get::<u32>()?;
        let contexts = r.variable(contexts_offset as usize, contexts_len as usize)?;
        Ok(Self {
            oplock_level,
            flags,
            create_action,
            creation_time,
            last_access_time,
            last_write_time,
            change_time,
            allocation_size,
            end_of_file,
            file_attributes,
            file_id,
            contexts: create_context::parse_response_chain(contexts)?,
        })
    }

    /// Appends the body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.put_u16(89);
        out.put(self.oplock_level);
        out.put(self.flags);
        out.put(self.create_action);
        out.put(self.creation_time);
        out.put(self.last_access_time);
        out.put(self.last_write_time);
        out.put(self.change_time);
        out.put(self.allocation_size);
        out.put(self.end_of_file);
        out.put(self.file_attributes);
        zeros(out, 4);
        out.put(self.file_id);
        let contexts_at = out.len();
        zeros(out, 8);
        if !self.contexts.is_empty() {
            // The fixed part is 88 bytes and therefore already aligned.
            let contexts = out.len();
            let offset = offset_from_header(out, start);
            create_context::encode_response_chain(&self.contexts, out);
            let len = out.len() - contexts;
            patch_u32(out, contexts_at, offset);
            patch_u32(out, contexts_at + 4, len);
        }
    }
}
