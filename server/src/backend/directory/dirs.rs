//! Lists directories.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::PoisonError;

use forebay_smb::fs::DirEntry;
use forebay_smb::short_name;
use forebay_smb::status::NtStatus;
use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

use super::{OpenFile, attrs};
use crate::backend::errno::status;
use crate::limits::GETDENTS_BYTES;

/// The position of a handle in the listing of its directory.
#[derive(Debug, Default)]
pub(super) struct Position {
    /// Fetched from the kernel and not yet returned.
    names: VecDeque<String>,
    end: bool,
}

pub(super) fn read(file: &OpenFile, restart: bool, limit: usize) -> Result<Vec<DirEntry>, NtStatus> {
    if !file.directory {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let mut position = file.position.lock().unwrap_or_else(PoisonError::into_inner);
    if restart {
        rustix::fs::seek(&file.fd, SeekFrom::Start(0)).map_err(status)?;
        *position = Position::default();
    }
    let mut entries = Vec::new();
    while entries.len() < limit {
        let Some(name) = position.names.pop_front() else {
            if position.end {
                break;
            }
            fetch(file.fd.as_fd(), &mut position)?;
            continue;
        };
        match attrs::stat_entry(&file.volume, file.fd.as_fd(), &name) {
            Ok(Some(stat)) => entries.push(DirEntry { name, stat }),
            // Neither a file nor a directory, or deleted since.
            Ok(None) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(status(errno)),
        }
    }
    Ok(entries)
}

/// Fetches more names from the kernel.
fn fetch(fd: BorrowedFd<'_>, position: &mut Position) -> Result<(), NtStatus> {
    let mut buffer = [MaybeUninit::<u8>::uninit(); GETDENTS_BYTES];
    let mut dir = RawDir::new(fd, &mut buffer);
    loop {
        let Some(entry) = dir.next() else {
            position.end = true;
            return Ok(());
        };
        let entry = match entry {
            Ok(entry) => entry,
            // The directory itself was removed.
            Err(Errno::NOENT) => {
                position.end = true;
                return Ok(());
            }
            Err(errno) => return Err(status(errno)),
        };
        if let Some(name) = servable(entry.file_name().to_bytes()) {
            position.names.push_back(name.to_owned());
        }
        if dir.is_buffer_empty() && !position.names.is_empty() {
            return Ok(());
        }
    }
}

/// Returns the name if clients can use it: it must be UTF-8.
fn servable(name: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(name).ok()?;
    (name != "." && name != "..").then_some(name)
}

/// Returns the one name with this short name; `None` if there is none or more than one.
pub(super) fn name_of_short(directory: BorrowedFd<'_>, short: &str) -> Result<Option<String>, NtStatus> {
    let mut position = Position::default();
    let mut found = None;
    while !position.end {
        fetch(directory, &mut position)?;
        for name in position.names.drain(..).filter(|name| short_name::is_of(short, name)) {
            if found.replace(name).is_some() {
                return Ok(None);
            }
        }
    }
    Ok(found)
}

pub(super) fn lookup(file: &OpenFile, name: &str) -> Result<Vec<DirEntry>, NtStatus> {
    if !file.directory {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if name.is_empty() || name.contains(['/', '\0']) || name == "." || name == ".." {
        return Ok(Vec::new());
    }
    match attrs::stat_entry(&file.volume, file.fd.as_fd(), name) {
        Ok(stat) => Ok(stat.into_iter().map(|stat| DirEntry { name: name.to_owned(), stat }).collect()),
        Err(Errno::NOENT | Errno::NAMETOOLONG) => Ok(Vec::new()),
        Err(errno) => Err(status(errno)),
    }
}

pub(super) fn check_empty(file: &OpenFile) -> Result<(), NtStatus> {
    if !file.directory {
        return Err(NtStatus::NOT_A_DIRECTORY);
    }
    // Use a separate descriptor with a separate position.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = match rustix::fs::openat(&file.fd, c".", flags, Mode::empty()) {
        Ok(fd) => fd,
        // Removed already.
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(status(errno)),
    };
    let mut buffer = [MaybeUninit::<u8>::uninit(); 1024];
    let mut dir = RawDir::new(fd, &mut buffer);
    while let Some(entry) = dir.next() {
        // Entries that listings omit count here: rmdir fails because of them, too.
        let entry = entry.map_err(status)?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return Err(NtStatus::DIRECTORY_NOT_EMPTY);
        }
    }
    Ok(())
}
