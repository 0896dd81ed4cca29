//! Hard capacity limit of a directory, by project quota of XFS and ext4.
//!
//! A project is a number on every inode below a directory; the file system counts and limits the usage of each project. All
//! calls use `quotactl_fd`, which needs no device name and therefore also works in a container.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;

const PRJQUOTA: u32 = 2;
const Q_GETQUOTA: u32 = 0x80_0007;
const Q_SETQUOTA: u32 = 0x80_0008;
const Q_XGETQSTATV: u32 = ((b'X' as u32) << 8) + 8;
const QIF_BLIMITS: u32 = 1;
const QIF_ILIMITS: u32 = 4;
/// `FS_QUOTA_PDQ_ENFD`: limits of projects are enforced.
const PROJECT_ENFORCED: u16 = 1 << 5;
/// Unit of a block limit.
const QUOTA_BLOCK_BYTES: u64 = 1024;

const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801c_581f;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401c_5820;
const FS_XFLAG_PROJINHERIT: u32 = 0x200;

/// `struct fsxattr` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct FsXattr {
    xflags: u32,
    extsize: u32,
    nextents: u32,
    projid: u32,
    cowextsize: u32,
    pad: [u8; 8],
}

/// `struct if_dqblk` of linux/quota.h.
#[repr(C)]
#[derive(Default)]
struct IfDqblk {
    bhardlimit: u64,
    bsoftlimit: u64,
    curspace: u64,
    ihardlimit: u64,
    isoftlimit: u64,
    curinodes: u64,
    btime: u64,
    itime: u64,
    valid: u32,
}

/// `struct fs_qfilestatv` of linux/dqblk_xfs.h.
#[repr(C)]
#[derive(Default)]
struct FsQfilestatv {
    ino: u64,
    nblks: u64,
    nextents: u32,
    pad: u32,
}

/// `struct fs_quota_statv` of linux/dqblk_xfs.h.
#[repr(C)]
#[derive(Default)]
struct FsQuotaStatv {
    version: i8,
    pad1: u8,
    flags: u16,
    incoredqs: u32,
    uquota: FsQfilestatv,
    gquota: FsQfilestatv,
    pquota: FsQfilestatv,
    btimelimit: i32,
    itimelimit: i32,
    rtbtimelimit: i32,
    bwarnlimit: u16,
    iwarnlimit: u16,
    rtbwarnlimit: u16,
    pad3: u16,
    pad4: u32,
    pad2: [u64; 7],
}

const _: () = assert!(size_of::<FsXattr>() == 28);
const _: () = assert!(size_of::<IfDqblk>() == 72);
const _: () = assert!(size_of::<FsQuotaStatv>() == 160);

/// The usage of a project.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes.
    pub bytes: u64,
    /// Inodes.
    pub inodes: u64,
    /// The hard limit in bytes; 0 for none.
    pub bytes_max: u64,
}

/// Whether the file system of `fd` enforces project quotas.
#[must_use]
pub fn enforced(fd: BorrowedFd<'_>) -> bool {
    let mut state = FsQuotaStatv { version: 1, ..FsQuotaStatv::default() };
    // SAFETY: Q_XGETQSTATV writes one fs_quota_statv; its layout is asserted above.
    let known = unsafe { quotactl(fd, Q_XGETQSTATV, 0, (&raw mut state).cast()) };
    known.is_ok() && state.flags & PROJECT_ENFORCED != 0
}

/// Assigns a directory, and everything created in it from now on, to `project`.
///
/// # Errors
/// Errors from the ioctl.
pub fn assign(directory: BorrowedFd<'_>, project: u32) -> Result<(), Errno> {
    let mut attributes = get_attributes(directory)?;
    attributes.projid = project;
    attributes.xflags |= FS_XFLAG_PROJINHERIT;
    // SAFETY: FS_IOC_FSSETXATTR reads one fsxattr; its layout is asserted above.
    let result = unsafe { libc::ioctl(directory.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

/// Returns the project that a directory belongs to and passes on to new entries; `None` if it does not pass it on.
///
/// # Errors
/// Errors from the ioctl.
pub fn assigned(directory: BorrowedFd<'_>) -> Result<Option<u32>, Errno> {
    let attributes = get_attributes(directory)?;
    Ok((attributes.xflags & FS_XFLAG_PROJINHERIT != 0).then_some(attributes.projid))
}

fn get_attributes(directory: BorrowedFd<'_>) -> Result<FsXattr, Errno> {
    let mut attributes = FsXattr::default();
    // SAFETY: FS_IOC_FSGETXATTR writes one fsxattr; its layout is asserted above.
    let result = unsafe { libc::ioctl(directory.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes) };
    if result == 0 { Ok(attributes) } else { Err(last_error()) }
}

/// Sets the hard limit of `project`, in bytes; 0 lifts it.
///
/// # Errors
/// Errors from quotactl.
pub fn set_limit(fd: BorrowedFd<'_>, project: u32, bytes_max: u64) -> Result<(), Errno> {
    let mut limits = IfDqblk {
        // Rounded down to whole blocks, so that the limit never exceeds the request, but at least one block.
        bhardlimit: if bytes_max == 0 { 0 } else { (bytes_max / QUOTA_BLOCK_BYTES).max(1) },
        valid: QIF_BLIMITS | QIF_ILIMITS,
        ..IfDqblk::default()
    };
    // SAFETY: Q_SETQUOTA reads one if_dqblk; its layout is asserted above.
    unsafe { quotactl(fd, Q_SETQUOTA, project, (&raw mut limits).cast()) }
}

/// Returns the usage of `project`.
///
/// # Errors
/// Errors from quotactl.
pub fn usage(fd: BorrowedFd<'_>, project: u32) -> Result<Usage, Errno> {
    let mut block = IfDqblk::default();
    // SAFETY: Q_GETQUOTA writes one if_dqblk; its layout is asserted above.
    match unsafe { quotactl(fd, Q_GETQUOTA, project, (&raw mut block).cast()) } {
        Ok(()) => Ok(Usage {
            bytes: block.curspace,
            inodes: block.curinodes,
            bytes_max: block.bhardlimit.saturating_mul(QUOTA_BLOCK_BYTES),
        }),
        // XFS has no record of a project that never owned anything.
        Err(Errno::NOENT | Errno::SRCH) if enforced(fd) => Ok(Usage::default()),
        Err(errno) => Err(errno),
    }
}

/// Makes the calling thread, and the threads it starts, obey limits: ext4 allows CAP_SYS_RESOURCE to exceed hard limits (and to
/// use reserved blocks), and the server writes for its clients as root. XFS makes no such exception.
///
/// # Errors
/// Errors from capset.
pub fn obey_limits() -> Result<(), Errno> {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let mut sets = capabilities(None)?;
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::SYS_RESOURCE);
    }
    set_capabilities(None, sets)
}

/// # Safety
/// `argument` must point to the structure that `command` reads or writes.
unsafe fn quotactl(
    fd: BorrowedFd<'_>,
    command: u32,
    id: u32,
    argument: *mut libc::c_void,
) -> Result<(), Errno> {
    let fd = fd.as_fd().as_raw_fd();
    let command = (command << 8) | PRJQUOTA;
    // SAFETY: the caller guarantees that `argument` is valid; the other arguments are plain numbers.
    let result = unsafe { libc::syscall(libc::SYS_quotactl_fd, fd, command, id, argument) };
    if result == 0 { Ok(()) } else { Err(last_error()) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_project_quota_is_detected() {
        // tmpfs has no project quota on any kernel; every Linux test machine has /dev/shm.
        let shm = std::fs::File::open("/dev/shm").expect("/dev/shm");
        assert!(!enforced(shm.as_fd()));
        assert!(set_limit(shm.as_fd(), 7, 1 << 20).is_err());
        assert!(usage(shm.as_fd(), 7).is_err());
    }
}
