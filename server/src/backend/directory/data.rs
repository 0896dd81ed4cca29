//! File contents: reading, writing, sizes, copies, holes.

use std::io::IoSlice;

use forebay_smb::fs::Payload;
use forebay_smb::limits::IO_BYTES_MAX;
use forebay_smb::status::NtStatus;
use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use super::OpenFile;
use crate::backend::errno::status;
use crate::buffers::{BufferPool, ReadBuffer};
use crate::limits::COPY_STEP_BYTES;

fn regular(file: &OpenFile) -> Result<(), NtStatus> {
    if file.directory { Err(NtStatus::INVALID_DEVICE_REQUEST) } else { Ok(()) }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// Whether the kernel can represent the range.
fn in_range(offset: u64, length: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| i64::try_from(end).is_ok())
}

/// Whether a READ only reads file data, so that the transport can execute it in its own way.
#[must_use]
pub fn reads_directly(file: &OpenFile, offset: u64, length: u32) -> bool {
    !file.directory && length <= IO_BYTES_MAX && in_range(offset, length.into())
}

/// Like [`reads_directly`], for a WRITE.
#[must_use]
pub fn writes_directly(file: &OpenFile, offset: u64, length: usize) -> bool {
    !file.directory && length <= IO_BYTES_MAX as usize && in_range(offset, length as u64)
}

pub(super) fn read(
    file: &OpenFile,
    offset: u64,
    length: u32,
    buffers: &BufferPool,
) -> Result<Box<dyn Payload>, NtStatus> {
    regular(file)?;
    if !reads_directly(file, offset, length) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let mut buffer = buffers.take(length as usize).map_err(|_| NtStatus::INSUFFICIENT_RESOURCES)?;
    let mut filled = 0_usize;
    while filled < length as usize {
        let slice = buffer.bytes_mut(filled.cast_signed()..(length as usize).cast_signed());
        match retry(|| rustix::io::pread(&file.fd, &mut *slice, offset + filled as u64)).map_err(status)? {
            0 => break,
            n => filled += n,
        }
    }
    if filled == 0 && length > 0 {
        return Err(NtStatus::END_OF_FILE);
    }
    Ok(Box::new(ReadBuffer::new(buffer, filled)))
}

pub(super) fn write(
    file: &OpenFile,
    offset: u64,
    bytes: &[u8],
    write_through: bool,
) -> Result<u32, NtStatus> {
    regular(file)?;
    let append = offset == u64::MAX;
    if bytes.len() > IO_BYTES_MAX as usize || (!append && !in_range(offset, bytes.len() as u64)) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let mut flags = ReadWriteFlags::empty();
    if write_through || file.write_through {
        flags |= ReadWriteFlags::DSYNC;
    }
    if append {
        flags |= ReadWriteFlags::APPEND;
    }
    let mut written = 0;
    while written < bytes.len() {
        let slices = &[IoSlice::new(&bytes[written..])];
        let at = if append { 0 } else { offset + written as u64 };
        match retry(|| rustix::io::pwritev2(&file.fd, slices, at, flags)).map_err(status)? {
            0 => return Err(NtStatus::DISK_FULL),
            n => written += n,
        }
    }
    Ok(written as u32)
}

pub(super) fn set_end(file: &OpenFile, size: u64) -> Result<(), NtStatus> {
    regular(file)?;
    if !in_range(size, 0) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    retry(|| rustix::fs::ftruncate(&file.fd, size)).map_err(status)
}

pub(super) fn set_allocation(file: &OpenFile, size: u64) -> Result<(), NtStatus> {
    regular(file)?;
    if !in_range(size, 0) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let end = length_of(file)?;
    if size < end {
        return set_end(file, size);
    }
    if size == 0 {
        return Ok(());
    }
    match retry(|| rustix::fs::fallocate(&file.fd, FallocateFlags::KEEP_SIZE, 0, size)) {
        // Clients do not depend on preallocation that the file system does not support.
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        Err(errno) => Err(status(errno)),
    }
}

fn length_of(file: &OpenFile) -> Result<u64, NtStatus> {
    rustix::fs::fstat(&file.fd).map(|stat| stat.st_size.cast_unsigned()).map_err(status)
}

pub(super) fn copy(
    source: &OpenFile,
    source_offset: u64,
    target: &OpenFile,
    target_offset: u64,
    length: u64,
) -> Result<u64, NtStatus> {
    regular(source)?;
    regular(target)?;
    if !in_range(source_offset, length) || !in_range(target_offset, length) {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let (mut from, mut to) = (source_offset, target_offset);
    let mut copied = 0;
    while copied < length {
        let step = (length - copied).min(COPY_STEP_BYTES) as usize;
        let moved = rustix::fs::copy_file_range(&source.fd, Some(&mut from), &target.fd, Some(&mut to), step);
        match moved {
            Ok(0) => break,
            Ok(n) => copied += n as u64,
            Err(Errno::INTR) => {}
            // Overlapping ranges of one file, or a file system without `copy_file_range`.
            Err(Errno::INVAL | Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS) => {
                copied += copy_by_hand(source, from, target, to, length - copied)?;
                break;
            }
            Err(errno) => return Err(status(errno)),
        }
    }
    Ok(copied)
}

fn copy_by_hand(
    source: &OpenFile,
    from: u64,
    target: &OpenFile,
    to: u64,
    length: u64,
) -> Result<u64, NtStatus> {
    let mut buffer = vec![0; length.min(1024 * 1024) as usize];
    let mut copied = 0;
    while copied < length {
        let step = (length - copied).min(buffer.len() as u64) as usize;
        let n =
            retry(|| rustix::io::pread(&source.fd, &mut buffer[..step], from + copied)).map_err(status)?;
        if n == 0 {
            break;
        }
        write(target, to + copied, &buffer[..n], false)?;
        copied += n as u64;
    }
    Ok(copied)
}

pub(super) fn zero(file: &OpenFile, offset: u64, length: u64) -> Result<(), NtStatus> {
    regular(file)?;
    let end = length_of(file)?;
    let stop = offset.saturating_add(length).min(end);
    if offset >= stop {
        return Ok(());
    }
    let length = stop - offset;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match retry(|| rustix::fs::fallocate(&file.fd, flags, offset, length)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let zeros = vec![0; length.min(1024 * 1024) as usize];
            let mut done = 0;
            while done < length {
                let step = (length - done).min(zeros.len() as u64) as usize;
                write(file, offset + done, &zeros[..step], false)?;
                done += step as u64;
            }
            Ok(())
        }
        result => result.map_err(status),
    }
}

/// Returns the data ranges that overlap `offset..offset + length`, and whether there are more than `limit`.
pub(super) fn ranges(
    file: &OpenFile,
    offset: u64,
    length: u64,
    limit: usize,
) -> Result<(Vec<(u64, u64)>, bool), NtStatus> {
    regular(file)?;
    let stop = offset.saturating_add(length).min(length_of(file)?);
    let mut found = Vec::new();
    let mut at = offset;
    while at < stop {
        // Nothing else uses the descriptor's position: reads and writes pass their own offset.
        let data = match rustix::fs::seek(&file.fd, SeekFrom::Data(at)) {
            Ok(data) if data < stop => data,
            Ok(_) | Err(Errno::NXIO) => break,
            // A file system without SEEK_DATA: treat everything as data.
            Err(Errno::INVAL) => at,
            Err(errno) => return Err(status(errno)),
        };
        let hole = match rustix::fs::seek(&file.fd, SeekFrom::Hole(data)) {
            Ok(hole) => hole.min(stop),
            Err(Errno::INVAL | Errno::NXIO) => stop,
            Err(errno) => return Err(status(errno)),
        };
        if found.len() == limit {
            return Ok((found, true));
        }
        found.push((data, hole - data));
        at = hole;
    }
    Ok((found, false))
}
