//! Information of the SMB 3.1.1 POSIX extensions ([SMB2-POSIX] 2.3).

use super::reparse::ReparseTag;
use super::security::Sid;
use crate::wire::cursor::{Put, Reader};
use crate::wire::newtype::{layout, open_enum};
use crate::wire::{Fault, FileAttributes, FileTime, Malformed};

open_enum!(
    /// File type, in the four bits of a mode above the permission bits.
    PosixFileType(u32) {
        REGULAR = 0, DIRECTORY = 1, SYMLINK = 2, CHARACTER_DEVICE = 3, BLOCK_DEVICE = 4, FIFO = 5, SOCKET = 6,
    }
);

/// Permission bits of a mode, including set-uid, set-gid and sticky.
pub const PERMISSIONS: u32 = 0o7777;
/// Where the file type begins in a mode.
const FILE_TYPE_SHIFT: u32 = 12;

impl PosixFileType {
    /// A mode in the format of the extensions: file type and permission bits.
    #[must_use]
    pub const fn mode(self, permissions: u32) -> u32 {
        self.0 << FILE_TYPE_SHIFT | permissions & PERMISSIONS
    }

    /// The permission bits requested by the context of a CREATE. Linux's client sends a native mode, in which the type is 8
    /// for a file and 4 for a directory. `None` for any other type.
    #[must_use]
    pub const fn permissions_of_new(mode: u32) -> Option<u32> {
        match mode >> FILE_TYPE_SHIFT {
            0 | 4 | 8 => Some(mode & PERMISSIONS),
            _ => None,
        }
    }

    /// The file type of such a mode.
    #[must_use]
    pub const fn of_mode(mode: u32) -> Self {
        Self(mode >> FILE_TYPE_SHIFT & 0xf)
    }
}

layout!(
    /// The fixed-size part of FilePosixInformation; the SIDs of owner and group follow.
    FilePosixFixed[80] {
        creation_time: FileTime, last_access_time: FileTime, last_write_time: FileTime, change_time: FileTime,
        end_of_file: u64, allocation_size: u64, file_attributes: FileAttributes, inode: u64, device_id: u32, _: 4,
        hard_links: u32, reparse_tag: ReparseTag, mode: u32,
    }
);

/// FilePosixInformation of a file; directory entries have a name in addition ([SMB2-POSIX] 2.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FilePosixInformation {
    pub fixed: FilePosixFixed,
    pub uid: u32,
    pub gid: u32,
}

impl FilePosixInformation {
    /// Bytes in our encoding: each SID has three sub-authorities.
    pub const LEN: usize = FilePosixFixed::LEN + 2 * SID_LEN;

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let fixed = r.get()?;
        let (uid, gid) = read_owner(r)?;
        Ok(Self { fixed, uid, gid })
    }

    /// Reads the structure; bytes after it are ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        Self::read(&mut Reader::new(bytes, "FilePosixInformation"))
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.fixed);
        Sid::encode_owner(self.uid, self.gid, out);
    }
}

/// Bytes of S-1-5-88-1-uid.
const SID_LEN: usize = 20;

/// Reads the SIDs of owner and group.
fn read_owner(r: &mut Reader<'_>) -> Result<(u32, u32), Malformed> {
    let owner = Sid::read(r)?.as_unix_user().ok_or(r.fault(Fault::Value))?;
    let group = Sid::read(r)?.as_unix_group().ok_or(r.fault(Fault::Value))?;
    Ok((owner, group))
}

layout!(
    /// FileFsPosixInformation ([SMB2-POSIX] 2.3.2): the fields of statvfs(3).
    FileFsPosixInformation[56] {
        optimal_transfer_size: u32, block_size: u32, total_blocks: u64, blocks_available: u64,
        user_blocks_available: u64, total_file_nodes: u64, free_file_nodes: u64, file_system_identifier: u64,
    }
);
