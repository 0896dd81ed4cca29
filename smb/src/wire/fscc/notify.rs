//! Changes in a directory ([MS-FSCC] 2.7.1).

use crate::wire::cursor::{Put, Reader, align, len_u32, patch_u32, zeros};
use crate::wire::newtype::open_enum;
use crate::wire::{Fault, Malformed, limits, utf16};

open_enum!(
    /// `Action`.
    NotifyAction(u32) {
        ADDED = 0x1, REMOVED = 0x2, MODIFIED = 0x3, RENAMED_OLD_NAME = 0x4, RENAMED_NEW_NAME = 0x5,
        ADDED_STREAM = 0x6, REMOVED_STREAM = 0x7, MODIFIED_STREAM = 0x8, REMOVED_BY_DELETE = 0x9,
        ID_NOT_TUNNELLED = 0xa, TUNNELLED_ID_COLLISION = 0xb,
    }
);

/// `FILE_NOTIFY_INFORMATION`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileNotifyInformation {
    pub action: NotifyAction,
    /// Relative to the watched directory.
    pub file_name: String,
}

impl FileNotifyInformation {
    /// Reads a list.
    pub fn parse_list(bytes: &[u8]) -> Result<Vec<Self>, Malformed> {
        let mut changes = Vec::new();
        let mut rest = bytes;
        while !rest.is_empty() {
            let mut r = Reader::new(rest, "FileNotifyInformation");
            if changes.len() == limits::LIST_MAX {
                return Err(r.fault(Fault::TooMany));
            }
            let next = r.get::<u32>()? as usize;
            let action = r.get()?;
            let len = r.get::<u32>()?;
            changes.push(Self { action, file_name: utf16::decode(r.take(len as usize)?)? });
            if next == 0 {
                break;
            }
            if next < r.position() || !next.is_multiple_of(4) || next > rest.len() {
                return Err(r.fault(Fault::Offset));
            }
            rest = &rest[next..];
        }
        Ok(changes)
    }

    /// Appends a list of at most `limit` bytes. If it is longer, appends nothing and returns false: the client is then
    /// answered STATUS_NOTIFY_ENUM_DIR ([MS-SMB2] 3.3.5.19).
    pub fn encode_list(changes: &[Self], out: &mut Vec<u8>, limit: usize) -> bool {
        let list = out.len();
        for (index, change) in changes.iter().enumerate() {
            let start = out.len();
            zeros(out, 4);
            out.put(change.action);
            out.put(len_u32(utf16::encoded_len(&change.file_name)));
            utf16::encode(&change.file_name, out);
            if index + 1 < changes.len() {
                align(out, start, 4);
                let next = out.len() - start;
                patch_u32(out, start, next);
            }
            if out.len() - list > limit {
                out.truncate(list);
                return false;
            }
        }
        true
    }
}
