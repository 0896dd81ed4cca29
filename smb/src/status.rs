//! `NTSTATUS` ([MS-ERREF] 2.3.1): the values that a file server sends or receives.

use std::fmt;

use crate::wire::Malformed;
use crate::wire::cursor::{Field, Reader};

/// The result of a request. Unknown values are kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NtStatus(pub u32);

macro_rules! statuses {
    ($($name:ident = $value:literal),* $(,)?) => {
        #[allow(missing_docs, reason = "the names are the specification's")]
        impl NtStatus {
            $(pub const $name: Self = Self($value);)*

            /// The specification's name, without `STATUS_`.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }

        #[cfg(test)]
        const ALL: &[(&str, u32)] = &[$((stringify!($name), $value)),*];
    };
}

statuses! {
    SUCCESS = 0x0000_0000,
    PENDING = 0x0000_0103,
    OPLOCK_BREAK_IN_PROGRESS = 0x0000_0108,
    NOTIFY_CLEANUP = 0x0000_010b,
    NOTIFY_ENUM_DIR = 0x0000_010c,
    OBJECT_NAME_EXISTS = 0x4000_0000,
    BUFFER_OVERFLOW = 0x8000_0005,
    NO_MORE_FILES = 0x8000_0006,
    DEVICE_BUSY = 0x8000_0011,
    NO_MORE_EAS = 0x8000_0012,
    INVALID_EA_NAME = 0x8000_0013,
    EA_LIST_INCONSISTENT = 0x8000_0014,
    INVALID_EA_FLAG = 0x8000_0015,
    NO_MORE_ENTRIES = 0x8000_001a,
    STOPPED_ON_SYMLINK = 0x8000_002d,
    UNSUCCESSFUL = 0xc000_0001,
    NOT_IMPLEMENTED = 0xc000_0002,
    INVALID_INFO_CLASS = 0xc000_0003,
    INFO_LENGTH_MISMATCH = 0xc000_0004,
    INVALID_HANDLE = 0xc000_0008,
    INVALID_PARAMETER = 0xc000_000d,
    NO_SUCH_DEVICE = 0xc000_000e,
    NO_SUCH_FILE = 0xc000_000f,
    INVALID_DEVICE_REQUEST = 0xc000_0010,
    END_OF_FILE = 0xc000_0011,
    WRONG_VOLUME = 0xc000_0012,
    MORE_PROCESSING_REQUIRED = 0xc000_0016,
    NO_MEMORY = 0xc000_0017,
    INVALID_LOCK_SEQUENCE = 0xc000_001e,
    INVALID_VIEW_SIZE = 0xc000_001f,
    ACCESS_DENIED = 0xc000_0022,
    BUFFER_TOO_SMALL = 0xc000_0023,
    OBJECT_TYPE_MISMATCH = 0xc000_0024,
    NOT_LOCKED = 0xc000_002a,
    INVALID_PARAMETER_MIX = 0xc000_0030,
    DISK_CORRUPT_ERROR = 0xc000_0032,
    OBJECT_NAME_INVALID = 0xc000_0033,
    OBJECT_NAME_NOT_FOUND = 0xc000_0034,
    OBJECT_NAME_COLLISION = 0xc000_0035,
    PORT_DISCONNECTED = 0xc000_0037,
    OBJECT_PATH_INVALID = 0xc000_0039,
    OBJECT_PATH_NOT_FOUND = 0xc000_003a,
    OBJECT_PATH_SYNTAX_BAD = 0xc000_003b,
    DATA_ERROR = 0xc000_003e,
    CRC_ERROR = 0xc000_003f,
    SHARING_VIOLATION = 0xc000_0043,
    QUOTA_EXCEEDED = 0xc000_0044,
    EAS_NOT_SUPPORTED = 0xc000_004f,
    EA_TOO_LARGE = 0xc000_0050,
    NONEXISTENT_EA_ENTRY = 0xc000_0051,
    NO_EAS_ON_FILE = 0xc000_0052,
    EA_CORRUPT_ERROR = 0xc000_0053,
    FILE_LOCK_CONFLICT = 0xc000_0054,
    LOCK_NOT_GRANTED = 0xc000_0055,
    DELETE_PENDING = 0xc000_0056,
    REVISION_MISMATCH = 0xc000_0059,
    PRIVILEGE_NOT_HELD = 0xc000_0061,
    NO_SUCH_USER = 0xc000_0064,
    WRONG_PASSWORD = 0xc000_006a,
    LOGON_FAILURE = 0xc000_006d,
    ACCOUNT_RESTRICTION = 0xc000_006e,
    PASSWORD_EXPIRED = 0xc000_0071,
    ACCOUNT_DISABLED = 0xc000_0072,
    NONE_MAPPED = 0xc000_0073,
    INVALID_ACL = 0xc000_0077,
    INVALID_SID = 0xc000_0078,
    INVALID_SECURITY_DESCR = 0xc000_0079,
    RANGE_NOT_LOCKED = 0xc000_007e,
    DISK_FULL = 0xc000_007f,
    SERVER_DISABLED = 0xc000_0080,
    FILE_INVALID = 0xc000_0098,
    INSUFFICIENT_RESOURCES = 0xc000_009a,
    MEDIA_WRITE_PROTECTED = 0xc000_00a2,
    DEVICE_NOT_READY = 0xc000_00a3,
    BAD_IMPERSONATION_LEVEL = 0xc000_00a5,
    INSTANCE_NOT_AVAILABLE = 0xc000_00ab,
    PIPE_NOT_AVAILABLE = 0xc000_00ac,
    INVALID_PIPE_STATE = 0xc000_00ad,
    PIPE_BUSY = 0xc000_00ae,
    PIPE_DISCONNECTED = 0xc000_00b0,
    PIPE_CLOSING = 0xc000_00b1,
    IO_TIMEOUT = 0xc000_00b5,
    FILE_FORCED_CLOSED = 0xc000_00b6,
    FILE_IS_A_DIRECTORY = 0xc000_00ba,
    NOT_SUPPORTED = 0xc000_00bb,
    DUPLICATE_NAME = 0xc000_00bd,
    BAD_NETWORK_PATH = 0xc000_00be,
    NETWORK_BUSY = 0xc000_00bf,
    INVALID_NETWORK_RESPONSE = 0xc000_00c3,
    UNEXPECTED_NETWORK_ERROR = 0xc000_00c4,
    NETWORK_NAME_DELETED = 0xc000_00c9,
    NETWORK_ACCESS_DENIED = 0xc000_00ca,
    BAD_DEVICE_TYPE = 0xc000_00cb,
    BAD_NETWORK_NAME = 0xc000_00cc,
    REQUEST_NOT_ACCEPTED = 0xc000_00d0,
    NOT_SAME_DEVICE = 0xc000_00d4,
    FILE_RENAMED = 0xc000_00d5,
    PIPE_EMPTY = 0xc000_00d9,
    OPLOCK_NOT_GRANTED = 0xc000_00e2,
    INVALID_OPLOCK_PROTOCOL = 0xc000_00e3,
    INTERNAL_ERROR = 0xc000_00e5,
    UNEXPECTED_IO_ERROR = 0xc000_00e9,
    DIRECTORY_NOT_EMPTY = 0xc000_0101,
    FILE_CORRUPT_ERROR = 0xc000_0102,
    NOT_A_DIRECTORY = 0xc000_0103,
    NAME_TOO_LONG = 0xc000_0106,
    FILES_OPEN = 0xc000_0107,
    CANNOT_IMPERSONATE = 0xc000_010d,
    TOO_MANY_OPENED_FILES = 0xc000_011f,
    CANCELLED = 0xc000_0120,
    CANNOT_DELETE = 0xc000_0121,
    FILE_DELETED = 0xc000_0123,
    FILE_CLOSED = 0xc000_0128,
    INVALID_LEVEL = 0xc000_0148,
    PIPE_BROKEN = 0xc000_014b,
    INVALID_DEVICE_STATE = 0xc000_0184,
    IO_DEVICE_ERROR = 0xc000_0185,
    INVALID_LOCK_RANGE = 0xc000_01a1,
    INVALID_BUFFER_SIZE = 0xc000_0206,
    USER_SESSION_DELETED = 0xc000_0203,
    CONNECTION_DISCONNECTED = 0xc000_020c,
    CONNECTION_RESET = 0xc000_020d,
    NOT_FOUND = 0xc000_0225,
    RETRY = 0xc000_022d,
    CONNECTION_REFUSED = 0xc000_0236,
    PATH_NOT_COVERED = 0xc000_0257,
    FS_DRIVER_REQUIRED = 0xc000_019c,
    INSUFF_SERVER_RESOURCES = 0xc000_0205,
    CONNECTION_INVALID = 0xc000_023a,
    CONNECTION_ABORTED = 0xc000_0241,
    ACCOUNT_LOCKED_OUT = 0xc000_0234,
    NOT_A_REPARSE_POINT = 0xc000_0275,
    IO_REPARSE_TAG_INVALID = 0xc000_0276,
    IO_REPARSE_TAG_MISMATCH = 0xc000_0277,
    IO_REPARSE_DATA_INVALID = 0xc000_0278,
    IO_REPARSE_TAG_NOT_HANDLED = 0xc000_0279,
    REPARSE_POINT_NOT_RESOLVED = 0xc000_0280,
    VOLUME_DISMOUNTED = 0xc000_026e,
    DFS_UNAVAILABLE = 0xc000_026d,
    NETWORK_SESSION_EXPIRED = 0xc000_035c,
    SMB_NO_PREAUTH_INTEGRITY_HASH_OVERLAP = 0xc05d_0000,
    SMB_BAD_CLUSTER_DIALECT = 0xc05d_0001,
    DUPLICATE_OBJECTID = 0xc000_022a,
    FILE_NOT_AVAILABLE = 0xc000_0467,
    FILE_SYSTEM_LIMITATION = 0xc000_0427,
    REQUEST_OUT_OF_SEQUENCE = 0xc000_042a,
    FILE_TOO_LARGE = 0xc000_0904,
    INVALID_SIGNATURE = 0xc000_a000,
    AUTH_TAG_MISMATCH = 0xc000_a002,
    HASH_NOT_SUPPORTED = 0xc000_a100,
    HASH_NOT_PRESENT = 0xc000_a101,
    NOT_SUPPORTED_ON_SBS = 0xc000_0300,
    TOO_MANY_LINKS = 0xc000_0265,
    SERVER_UNAVAILABLE = 0xc000_0466,
    OFFLOAD_READ_FLT_NOT_SUPPORTED = 0xc000_a2a1,
}

impl NtStatus {
    /// Severity 3: the request failed ([MS-ERREF] 2.3). Warnings such as BUFFER_OVERFLOW are not errors, and neither is
    /// PENDING; MORE_PROCESSING_REQUIRED counts as an error by its number although every authentication uses it.
    #[must_use]
    pub const fn is_error(self) -> bool {
        self.0 >> 30 == 3
    }

    /// Severity 2.
    #[must_use]
    pub const fn is_warning(self) -> bool {
        self.0 >> 30 == 2
    }

    /// Severity 0.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 >> 30 == 0
    }
}

impl fmt::Display for NtStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "STATUS_{name}"),
            None => write!(f, "NTSTATUS {:#010x}", self.0),
        }
    }
}

impl fmt::Debug for NtStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Field for NtStatus {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.get().map(Self)
    }
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL, NtStatus};

    #[test]
    fn every_status_has_one_name() {
        for (name, value) in ALL {
            assert_eq!(NtStatus(*value).name(), Some(*name));
            assert_eq!(NtStatus(*value).to_string(), format!("STATUS_{name}"));
        }
    }

    #[test]
    fn unknown_statuses_print_their_number() {
        assert_eq!(NtStatus(0xc123_4567).to_string(), "NTSTATUS 0xc1234567");
    }

    #[test]
    fn severity_is_the_top_two_bits() {
        assert!(NtStatus::ACCESS_DENIED.is_error());
        assert!(NtStatus::BUFFER_OVERFLOW.is_warning() && !NtStatus::BUFFER_OVERFLOW.is_error());
        assert!(NtStatus::PENDING.is_success());
    }
}
