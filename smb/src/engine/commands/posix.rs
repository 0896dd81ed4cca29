//! File information of the POSIX extensions ([SMB2-POSIX] 2.2.14, 2.3).

use crate::engine::open::Open;
use crate::fs::{FileKind, Space, Stat};
use crate::wire::create_context::ResponseContext;
use crate::wire::fscc::directory::PosixFields;
use crate::wire::fscc::posix::{FileFsPosixInformation, FilePosixFixed, FilePosixInformation, PosixFileType};
use crate::wire::fscc::reparse::ReparseTag;
use crate::wire::fscc::security::Sid;
use crate::wire::{FileAttributes, FileTime};

/// File type and permission bits. The bits of a symbolic link have no meaning; Linux shows all of them as set.
fn mode(stat: &Stat) -> u32 {
    match stat.kind() {
        FileKind::Regular => PosixFileType::REGULAR.mode(stat.mode),
        FileKind::Directory => PosixFileType::DIRECTORY.mode(stat.mode),
        FileKind::SymbolicLink => PosixFileType::SYMLINK.mode(0o777),
        FileKind::CharacterDevice => PosixFileType::CHARACTER_DEVICE.mode(stat.mode),
        FileKind::BlockDevice => PosixFileType::BLOCK_DEVICE.mode(stat.mode),
        FileKind::Fifo => PosixFileType::FIFO.mode(stat.mode),
        FileKind::Socket => PosixFileType::SOCKET.mode(stat.mode),
    }
}

/// ReparseTag; zero if the file is not a reparse point.
pub(super) fn reparse_tag(stat: &Stat) -> ReparseTag {
    stat.reparse.map_or(ReparseTag::RESERVED_ZERO, |point| ReparseTag(point.tag))
}

/// The number of names of the file. A link that is stored as a directory has no entries that count.
fn links(stat: &Stat) -> u32 {
    if stat.kind() == FileKind::SymbolicLink && stat.directory { 1 } else { stat.links }
}

/// The context of a CREATE response. `sids` holds the data that it refers to.
pub(super) fn create_context<'s>(stat: &Stat, sids: &'s mut Vec<u8>) -> ResponseContext<'s> {
    Sid::encode_owner(stat.uid, stat.gid, sids);
    ResponseContext::Posix { nlink: links(stat), reparse_tag: reparse_tag(stat).0, mode: mode(stat), sids }
}

/// The fields that an entry of a directory has in addition to other classes.
pub(super) fn fields(stat: &Stat) -> PosixFields {
    PosixFields {
        device_id: stat.key.dev as u32,
        hard_links: links(stat),
        mode: mode(stat),
        uid: stat.uid,
        gid: stat.gid,
    }
}

/// FilePosixInformation of an open file.
pub(super) fn information(open: &Open, stat: &Stat) -> FilePosixInformation {
    let PosixFields { device_id, hard_links, mode, uid, gid } = fields(stat);
    FilePosixInformation {
        fixed: FilePosixFixed {
            creation_time: FileTime(stat.times.creation),
            last_access_time: FileTime(stat.times.last_access),
            last_write_time: FileTime(stat.times.last_write),
            change_time: FileTime(stat.times.change),
            end_of_file: stat.end_of_file,
            allocation_size: stat.allocation_size,
            file_attributes: FileAttributes(stat.attributes),
            inode: stat.key.ino,
            device_id,
            // As in FileStandardInformation, a name with a pending removal does not count.
            hard_links: hard_links.saturating_sub(open.file.delete_pending(open.id).into()),
            reparse_tag: reparse_tag(stat),
            mode,
        },
        uid,
        gid,
    }
}

/// FileFsPosixInformation of a volume, in blocks of `block_bytes`.
pub(super) fn file_system(space: Space, block_bytes: u32, serial: u32) -> FileFsPosixInformation {
    let blocks = |bytes: u64| bytes / u64::from(block_bytes);
    FileFsPosixInformation {
        optimal_transfer_size: block_bytes,
        block_size: block_bytes,
        total_blocks: blocks(space.total),
        blocks_available: blocks(space.free),
        user_blocks_available: blocks(space.free),
        total_file_nodes: space.file_nodes,
        free_file_nodes: space.free_file_nodes,
        file_system_identifier: serial.into(),
    }
}
