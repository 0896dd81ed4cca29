//! Information about file systems ([MS-FSCC] 2.5).

use crate::wire::cursor::{Put, Reader, len_u32, patch_u32, zeros};
use crate::wire::newtype::{layout, open_enum, open_flags};
use crate::wire::{FileTime, Malformed, utf16};

/// [MS-FSCC] 2.5.9.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileFsVolumeInformation {
    pub volume_creation_time: FileTime,
    pub volume_serial_number: u32,
    pub supports_objects: bool,
    pub volume_label: String,
}

impl FileFsVolumeInformation {
    /// Bytes before the label.
    pub const FIXED_LEN: usize = 18;

    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileFsVolumeInformation");
        let volume_creation_time = r.get()?;
        let volume_serial_number = r.get()?;
        let len = r.get::<u32>()?;
        let supports_objects = r.get()?;
        r.skip(1)?;
        let volume_label = utf16::decode(r.take(len as usize)?)?;
        Ok(Self { volume_creation_time, volume_serial_number, supports_objects, volume_label })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.volume_creation_time);
        out.put(self.volume_serial_number);
        out.put(len_u32(utf16::encoded_len(&self.volume_label)));
        out.put(self.supports_objects);
        zeros(out, 1);
        utf16::encode(&self.volume_label, out);
    }
}

/// [MS-FSCC] 2.5.5, to set.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileFsLabelInformation {
    pub volume_label: String,
}

impl FileFsLabelInformation {
    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileFsLabelInformation");
        let len = r.get::<u32>()?;
        Ok(Self { volume_label: utf16::decode(r.take(len as usize)?)? })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(len_u32(utf16::encoded_len(&self.volume_label)));
        utf16::encode(&self.volume_label, out);
    }
}

layout!(
    /// [MS-FSCC] 2.5.8. A unit is `sectors_per_allocation_unit` times `bytes_per_sector` bytes.
    FileFsSizeInformation[24] {
        total_allocation_units: u64, available_allocation_units: u64, sectors_per_allocation_unit: u32,
        bytes_per_sector: u32,
    }
);
layout!(
    /// [MS-FSCC] 2.5.4.
    FileFsFullSizeInformation[32] {
        total_allocation_units: u64, caller_available_allocation_units: u64,
        actual_available_allocation_units: u64, sectors_per_allocation_unit: u32, bytes_per_sector: u32,
    }
);
open_enum!(
    /// `DeviceType` ([MS-FSCC] 2.5.10).
    DeviceType(u32) { CD_ROM = 0x02, DISK = 0x07, NAMED_PIPE = 0x11 }
);
open_flags!(
    /// `Characteristics` ([MS-FSCC] 2.5.10).
    DeviceCharacteristics(u32) {
        REMOVABLE_MEDIA = 0x0000_0001, READ_ONLY_DEVICE = 0x0000_0002, FLOPPY_DISKETTE = 0x0000_0004,
        WRITE_ONCE_MEDIA = 0x0000_0008, REMOTE_DEVICE = 0x0000_0010, DEVICE_IS_MOUNTED = 0x0000_0020,
        VIRTUAL_VOLUME = 0x0000_0040, DEVICE_SECURE_OPEN = 0x0000_0100,
    }
);
layout!(
    /// [MS-FSCC] 2.5.10.
    FileFsDeviceInformation[8] { device_type: DeviceType, characteristics: DeviceCharacteristics, }
);

open_flags!(
    /// `FileSystemAttributes` ([MS-FSCC] 2.5.1).
    FileSystemAttributes(u32) {
        CASE_SENSITIVE_SEARCH = 0x0000_0001, CASE_PRESERVED_NAMES = 0x0000_0002,
        UNICODE_ON_DISK = 0x0000_0004, PERSISTENT_ACLS = 0x0000_0008, FILE_COMPRESSION = 0x0000_0010,
        VOLUME_QUOTAS = 0x0000_0020, SUPPORTS_SPARSE_FILES = 0x0000_0040,
        SUPPORTS_REPARSE_POINTS = 0x0000_0080, SUPPORTS_REMOTE_STORAGE = 0x0000_0100,
        RETURNS_CLEANUP_RESULT_INFO = 0x0000_0200, SUPPORTS_POSIX_UNLINK_RENAME = 0x0000_0400,
        VOLUME_IS_COMPRESSED = 0x0000_8000, SUPPORTS_OBJECT_IDS = 0x0001_0000,
        SUPPORTS_ENCRYPTION = 0x0002_0000, NAMED_STREAMS = 0x0004_0000, READ_ONLY_VOLUME = 0x0008_0000,
        SEQUENTIAL_WRITE_ONCE = 0x0010_0000, SUPPORTS_TRANSACTIONS = 0x0020_0000,
        SUPPORTS_HARD_LINKS = 0x0040_0000, SUPPORTS_EXTENDED_ATTRIBUTES = 0x0080_0000,
        SUPPORTS_OPEN_BY_FILE_ID = 0x0100_0000, SUPPORTS_USN_JOURNAL = 0x0200_0000,
        SUPPORTS_INTEGRITY_STREAMS = 0x0400_0000, SUPPORTS_BLOCK_REFCOUNTING = 0x0800_0000,
        SUPPORTS_SPARSE_VDL = 0x1000_0000, SUPPORTS_GHOSTING = 0x4000_0000,
    }
);

/// [MS-FSCC] 2.5.1.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub struct FileFsAttributeInformation {
    pub file_system_attributes: FileSystemAttributes,
    /// In characters.
    pub maximum_component_name_length: u32,
    pub file_system_name: String,
}

impl FileFsAttributeInformation {
    /// Bytes before the name.
    pub const FIXED_LEN: usize = 12;

    /// Reads the structure.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes, "FileFsAttributeInformation");
        let file_system_attributes = r.get()?;
        let maximum_component_name_length = r.get()?;
        let len = r.get::<u32>()?;
        let file_system_name = utf16::decode(r.take(len as usize)?)?;
        Ok(Self { file_system_attributes, maximum_component_name_length, file_system_name })
    }

    /// Appends the structure.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(self.file_system_attributes);
        out.put(self.maximum_component_name_length);
        let len_at = out.len();
        zeros(out, 4);
        utf16::encode(&self.file_system_name, out);
        let len = out.len() - len_at - 4;
        patch_u32(out, len_at, len);
    }
}

layout!(
    /// [MS-FSCC] 2.5.2, to query and to set.
    FileFsControlInformation[48] {
        free_space_start_filtering: u64, free_space_threshold: u64, free_space_stop_filtering: u64,
        default_quota_threshold: u64, default_quota_limit: u64, file_system_control_flags: u32, _: 4,
    }
);
layout!(
    /// [MS-FSCC] 2.5.6.
    FileFsObjectIdInformation[64] { object_id: [u8; 16], extended_info: ExtendedInfo, }
);
layout!(
    /// `ExtendedInfo` of [`FileFsObjectIdInformation`], opaque.
    ExtendedInfo[48] { first: [u8; 16], second: [u8; 16], third: [u8; 16], }
);
open_flags!(
    /// `Flags` of [`FileFsSectorSizeInformation`].
    SectorSizeFlags(u32) {
        ALIGNED_DEVICE = 0x01, PARTITION_ALIGNED_ON_DEVICE = 0x02, NO_SEEK_PENALTY = 0x04, TRIM_ENABLED = 0x08,
    }
);
layout!(
    /// [MS-FSCC] 2.5.7. Offsets are `u32::MAX` if the alignment is unknown.
    FileFsSectorSizeInformation[28] {
        logical_bytes_per_sector: u32, physical_bytes_per_sector_for_atomicity: u32,
        physical_bytes_per_sector_for_performance: u32,
        file_system_effective_physical_bytes_per_sector_for_atomicity: u32, flags: SectorSizeFlags,
        byte_offset_for_sector_alignment: u32, byte_offset_for_partition_alignment: u32,
    }
);
