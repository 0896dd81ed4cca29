//! Access masks and sharing ([MS-SMB2] 2.2.13.1, 2.2.13).

use super::newtype::open_flags;

open_flags!(
    /// Rights to a file, pipe or directory ([MS-SMB2] 2.2.13.1). The names for directories are aliases of the same bits.
    AccessMask(u32) {
        FILE_READ_DATA = 0x0000_0001, FILE_WRITE_DATA = 0x0000_0002, FILE_APPEND_DATA = 0x0000_0004,
        FILE_READ_EA = 0x0000_0008, FILE_WRITE_EA = 0x0000_0010, FILE_EXECUTE = 0x0000_0020,
        FILE_DELETE_CHILD = 0x0000_0040, FILE_READ_ATTRIBUTES = 0x0000_0080,
        FILE_WRITE_ATTRIBUTES = 0x0000_0100, DELETE = 0x0001_0000, READ_CONTROL = 0x0002_0000,
        WRITE_DAC = 0x0004_0000, WRITE_OWNER = 0x0008_0000, SYNCHRONIZE = 0x0010_0000,
        ACCESS_SYSTEM_SECURITY = 0x0100_0000, MAXIMUM_ALLOWED = 0x0200_0000, GENERIC_ALL = 0x1000_0000,
        GENERIC_EXECUTE = 0x2000_0000, GENERIC_WRITE = 0x4000_0000, GENERIC_READ = 0x8000_0000,
    }
);

impl AccessMask {
    /// For a directory: list its entries.
    pub const FILE_LIST_DIRECTORY: Self = Self::FILE_READ_DATA;
    /// For a directory: create files.
    pub const FILE_ADD_FILE: Self = Self::FILE_WRITE_DATA;
    /// For a directory: create directories.
    pub const FILE_ADD_SUBDIRECTORY: Self = Self::FILE_APPEND_DATA;
    /// For a directory: traverse it.
    pub const FILE_TRAVERSE: Self = Self::FILE_EXECUTE;
    /// Every right to a file ([MS-SMB2] 2.2.13.1.1; GENERIC_ALL maps to it).
    pub const FILE_ALL_ACCESS: Self = Self(0x001f_01ff);
    /// GENERIC_READ maps to it.
    pub const FILE_GENERIC_READ: Self = Self(0x0012_0089);
    /// GENERIC_WRITE maps to it.
    pub const FILE_GENERIC_WRITE: Self = Self(0x0012_0116);
    /// GENERIC_EXECUTE maps to it.
    pub const FILE_GENERIC_EXECUTE: Self = Self(0x0012_00a0);
    /// Bits without a meaning, which Windows refuses with STATUS_ACCESS_DENIED.
    pub const RESERVED: Self = Self(0x0ce0_fe00);

    /// Replaces the generic rights by the rights that they map to; MAXIMUM_ALLOWED is kept.
    #[must_use]
    pub const fn map_generic(self) -> Self {
        let mut mask = self.0 & 0x0fff_ffff;
        if self.contains(Self::GENERIC_ALL) {
            mask |= Self::FILE_ALL_ACCESS.0;
        }
        if self.contains(Self::GENERIC_READ) {
            mask |= Self::FILE_GENERIC_READ.0;
        }
        if self.contains(Self::GENERIC_WRITE) {
            mask |= Self::FILE_GENERIC_WRITE.0;
        }
        if self.contains(Self::GENERIC_EXECUTE) {
            mask |= Self::FILE_GENERIC_EXECUTE.0;
        }
        Self(mask)
    }
}

open_flags!(
    /// `ShareAccess` of a CREATE ([MS-SMB2] 2.2.13).
    ShareAccess(u32) { READ = 0x1, WRITE = 0x2, DELETE = 0x4 }
);
