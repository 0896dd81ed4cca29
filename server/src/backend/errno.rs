//! Maps errors of the operating system to NT status codes.

use forebay_smb::status::NtStatus;
use rustix::io::Errno;

use crate::namespace;

/// Returns the status for an error of an operation on an open file or directory, or on a name with existing parents.
#[must_use]
pub fn status(errno: Errno) -> NtStatus {
    namespace::doubt(errno);
    match errno {
        Errno::NOENT => NtStatus::OBJECT_NAME_NOT_FOUND,
        Errno::NOTDIR => NtStatus::NOT_A_DIRECTORY,
        Errno::ISDIR => NtStatus::FILE_IS_A_DIRECTORY,
        Errno::EXIST => NtStatus::OBJECT_NAME_COLLISION,
        Errno::NOTEMPTY => NtStatus::DIRECTORY_NOT_EMPTY,
        Errno::NAMETOOLONG | Errno::ILSEQ => NtStatus::OBJECT_NAME_INVALID,
        // A symlink in the path, or a path that leaves the volume.
        Errno::LOOP | Errno::XDEV | Errno::ACCESS | Errno::PERM | Errno::NXIO | Errno::TXTBSY => {
            NtStatus::ACCESS_DENIED
        }
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => NtStatus::DISK_FULL,
        Errno::ROFS => NtStatus::MEDIA_WRITE_PROTECTED,
        Errno::MLINK => NtStatus::TOO_MANY_LINKS,
        Errno::MFILE | Errno::NFILE => NtStatus::TOO_MANY_OPENED_FILES,
        Errno::NOMEM | Errno::NOBUFS => NtStatus::INSUFFICIENT_RESOURCES,
        Errno::INVAL | Errno::OVERFLOW => NtStatus::INVALID_PARAMETER,
        Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY => NtStatus::NOT_SUPPORTED,
        Errno::BUSY | Errno::AGAIN => NtStatus::SHARING_VIOLATION,
        Errno::STALE => NtStatus::FILE_CLOSED,
        Errno::BADF => NtStatus::ACCESS_DENIED,
        _ => NtStatus::UNEXPECTED_IO_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_and_full_quota_both_map_to_disk_full() {
        assert_eq!(status(Errno::NOSPC), NtStatus::DISK_FULL);
        assert_eq!(status(Errno::DQUOT), NtStatus::DISK_FULL);
    }

    #[test]
    fn unknown_errors_map_to_unexpected_io_error() {
        assert_eq!(status(Errno::IO), NtStatus::UNEXPECTED_IO_ERROR);
        assert_eq!(status(Errno::from_raw_os_error(4000)), NtStatus::UNEXPECTED_IO_ERROR);
    }
}
