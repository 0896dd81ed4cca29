//! QUERY_INFO ([MS-SMB2] 3.3.5.20, [MS-FSA] 2.1.5.12, 2.1.5.13, 2.1.5.14).

mod eas;
mod streams;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::commands::info::{answer, encoded};
use crate::engine::commands::{posix, security};
use crate::engine::open::Open;
use crate::engine::request::step::{Ctx, Step};
use crate::engine::volume::Volume;
use crate::fs::{FsOpKind, FsReply, Space, Stat};
use crate::short_name;
use crate::status::NtStatus;
use crate::wire::create::CreateOptions;
use crate::wire::fscc::file_info::{
    FileAccessInformation, FileAlignmentInformation, FileAllInformation, FileAttributeTagInformation,
    FileBasicInformation, FileCompressionInformation, FileEaInformation, FileIdInformation,
    FileInternalInformation, FileModeInformation, FileNetworkOpenInformation, FilePositionInformation,
    FileStandardInformation, FileStandardLinkInformation,
};
use crate::wire::fscc::fs_info::{
    DeviceCharacteristics, DeviceType, FileFsAttributeInformation, FileFsControlInformation,
    FileFsDeviceInformation, FileFsFullSizeInformation, FileFsObjectIdInformation,
    FileFsSectorSizeInformation, FileFsSizeInformation, FileFsVolumeInformation, FileSystemAttributes,
    SectorSizeFlags,
};
use crate::wire::fscc::name_info::FileNameInformation;
use crate::wire::fscc::posix::{FileFsPosixInformation, FilePosixInformation};
use crate::wire::fscc::security::SecurityInformation;
use crate::wire::fscc::{FileInformationClass as Class, FsInformationClass as FsClass};
use crate::wire::query_info::{InfoType, Request};
use crate::wire::{AccessMask, Dialect, FileAttributes, FileTime};

/// Sizes that every file system here reports ([MS-FSCC] 2.5.8): only clients compute with them.
const SECTOR_BYTES: u32 = 512;
const SECTORS_PER_UNIT: u32 = 8;
const UNIT_BYTES: u64 = (SECTOR_BYTES * SECTORS_PER_UNIT) as u64;

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    let Request { info_type, file_info_class, output_buffer_length, additional_information, .. } = request;
    let file_id = request.file_id;
    let open = match ctx.open(file_id) {
        Ok(o) => o,
        // cifs.ko queries a file with any handle it has. If the answer is to retry, it checks its handles again; it returns
        // any other error to the program.
        Err(NtStatus::FILE_CLOSED) if ctx.is_worth_a_retry(file_id) => {
            return Step::Fail(NtStatus::RETRY);
        }
        Err(status) => return status.into(),
    };
    if output_buffer_length > ctx.core.io_bytes_max() {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    match info_type {
        InfoType::FILE => file(ctx, open, Class(file_info_class), output_buffer_length),
        InfoType::FILESYSTEM => file_system(ctx, &open, FsClass(file_info_class), output_buffer_length),
        InfoType::SECURITY => {
            security::query(&open, SecurityInformation(additional_information), output_buffer_length)
        }
        // [MS-SMB2] 3.3.5.20.4: quotas are per user; a volume's capacity is not a quota.
        InfoType::QUOTA => Step::Fail(NtStatus::NOT_SUPPORTED),
        _ => Step::Fail(NtStatus::INVALID_PARAMETER),
    }
}

/// Sizes of the structures in C layout; buffer lengths are checked against them.
mod fixed_len {
    pub(super) const FILE_ALL: usize = 104;
    pub(super) const NAME: usize = 8;
    pub(super) const FS_VOLUME: usize = 24;
    pub(super) const FS_ATTRIBUTE: usize = 16;
}

fn file(ctx: &mut Ctx<'_>, open: Arc<Open>, class: Class, limit: u32) -> Step {
    let access = AccessMask(open.access);
    let needs_attributes = matches!(
        class,
        Class::FILE_BASIC_INFORMATION
            | Class::FILE_ALL_INFORMATION
            | Class::FILE_NETWORK_OPEN_INFORMATION
            | Class::FILE_ATTRIBUTE_TAG_INFORMATION
            | Class::FILE_POSIX_INFORMATION
    );
    // [MS-FSA] 2.1.5.12
    if needs_attributes && !access.contains(AccessMask::FILE_READ_ATTRIBUTES) {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    match class {
        Class::FILE_POSIX_INFORMATION if !ctx.core.has_posix() => Step::Fail(NtStatus::INVALID_INFO_CLASS),
        Class::FILE_ACCESS_INFORMATION => {
            exact(limit, FileAccessInformation::LEN, |out| open_access(&open).encode(out))
        }
        Class::FILE_POSITION_INFORMATION => {
            exact(limit, FilePositionInformation::LEN, |out| position(&open).encode(out))
        }
        Class::FILE_MODE_INFORMATION => exact(limit, FileModeInformation::LEN, |out| mode(&open).encode(out)),
        Class::FILE_ALIGNMENT_INFORMATION => exact(limit, FileAlignmentInformation::LEN, |out| {
            FileAlignmentInformation::default().encode(out);
        }),
        Class::FILE_EA_INFORMATION => {
            eas::size(open, move |_, size| exact(limit, FileEaInformation::LEN, |out| size.encode(out)))
        }
        Class::FILE_FULL_EA_INFORMATION => eas::query(ctx, open, limit),
        Class::FILE_ALTERNATE_NAME_INFORMATION => match alternate_name(&open) {
            Some(file_name) => {
                answer(encoded(|out| FileNameInformation { file_name }.encode(out)), fixed_len::NAME, limit)
            }
            None => Step::Fail(NtStatus::OBJECT_NAME_NOT_FOUND),
        },
        // [MS-FSCC] 2.4.36: only in SMB 3.1.1.
        Class::FILE_NORMALIZED_NAME_INFORMATION if ctx.core.dialect() == Dialect::SMB3_1_1 => {
            let file_name = open.state().full_name().replace('/', "\\");
            answer(encoded(|out| FileNameInformation { file_name }.encode(out)), fixed_len::NAME, limit)
        }
        Class::FILE_STANDARD_INFORMATION
        | Class::FILE_STANDARD_LINK_INFORMATION
        | Class::FILE_INTERNAL_INFORMATION
        | Class::FILE_BASIC_INFORMATION
        | Class::FILE_NETWORK_OPEN_INFORMATION
        | Class::FILE_ATTRIBUTE_TAG_INFORMATION
        | Class::FILE_COMPRESSION_INFORMATION
        | Class::FILE_ID_INFORMATION
        | Class::FILE_POSIX_INFORMATION => with_stat(open, class, FileEaInformation::default(), limit),
        Class::FILE_STREAM_INFORMATION => streams::query(open, limit),
        Class::FILE_ALL_INFORMATION => eas::size(open, move |open, size| with_stat(open, class, size, limit)),
        // [MS-SMB2] 3.3.5.20.1
        Class::FILE_NAME_INFORMATION
        | Class::FILE_NORMALIZED_NAME_INFORMATION
        | Class::FILE_OBJECT_ID_INFORMATION
        | Class::FILE_QUOTA_INFORMATION
        | Class::FILE_REPARSE_POINT_INFORMATION
        | Class::FILE_PIPE_INFORMATION
        | Class::FILE_PIPE_LOCAL_INFORMATION
        | Class::FILE_PIPE_REMOTE_INFORMATION => Step::Fail(NtStatus::NOT_SUPPORTED),
        _ => Step::Fail(NtStatus::INVALID_INFO_CLASS),
    }
}

/// Answers a class from the file's attributes in the backend.
fn with_stat(open: Arc<Open>, class: Class, ea: FileEaInformation, limit: u32) -> Step {
    Step::Fs(
        FsOpKind::Stat { handle: open.handle.clone() },
        Box::new(move |_, result| match result {
            Ok(FsReply::Stat(stat)) => {
                of_stat(&open, class, &open.volume.change_times.apply(stat), ea, limit)
            }
            Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
            Err(status) => Step::Fail(status),
        }),
    )
}

fn exact(limit: u32, fixed: usize, encode: impl FnOnce(&mut Vec<u8>)) -> Step {
    answer(encoded(encode), fixed, limit)
}

fn open_access(open: &Open) -> FileAccessInformation {
    FileAccessInformation { access_flags: AccessMask(open.access) }
}

fn position(open: &Open) -> FilePositionInformation {
    FilePositionInformation { current_byte_offset: open.position.load(Ordering::Relaxed) }
}

fn mode(open: &Open) -> FileModeInformation {
    FileModeInformation { mode: CreateOptions(open.state().mode) }
}

fn of_stat(open: &Open, class: Class, stat: &Stat, ea: FileEaInformation, limit: u32) -> Step {
    match class {
        Class::FILE_BASIC_INFORMATION => {
            exact(limit, FileBasicInformation::LEN, |out| basic(stat).encode(out))
        }
        Class::FILE_STANDARD_INFORMATION => {
            exact(limit, FileStandardInformation::LEN, |out| standard(open, stat).encode(out))
        }
        Class::FILE_STANDARD_LINK_INFORMATION => exact(limit, FileStandardLinkInformation::LEN, |out| {
            let standard = standard(open, stat);
            FileStandardLinkInformation {
                number_of_accessible_links: standard.number_of_links,
                total_number_of_links: stat.links,
                delete_pending: standard.delete_pending,
                directory: standard.directory,
            }
            .encode(out);
        }),
        Class::FILE_INTERNAL_INFORMATION => {
            exact(limit, FileInternalInformation::LEN, |out| internal(stat).encode(out))
        }
        Class::FILE_ALL_INFORMATION => {
            let all = FileAllInformation {
                basic: basic(stat),
                standard: standard(open, stat),
                internal: internal(stat),
                ea,
                access: open_access(open),
                position: position(open),
                mode: mode(open),
                alignment: FileAlignmentInformation::default(),
                name: format!("\\{}", open.state().full_name().replace('/', "\\")),
            };
            answer(encoded(|out| all.encode(out)), fixed_len::FILE_ALL, limit)
        }
        Class::FILE_NETWORK_OPEN_INFORMATION => exact(limit, FileNetworkOpenInformation::LEN, |out| {
            let FileBasicInformation {
                creation_time,
                last_access_time,
                last_write_time,
                change_time,
                file_attributes,
            } = basic(stat);
            FileNetworkOpenInformation {
                creation_time,
                last_access_time,
                last_write_time,
                change_time,
                allocation_size: stat.allocation_size,
                end_of_file: stat.end_of_file,
                file_attributes,
            }
            .encode(out);
        }),
        Class::FILE_ATTRIBUTE_TAG_INFORMATION => exact(limit, FileAttributeTagInformation::LEN, |out| {
            FileAttributeTagInformation {
                file_attributes: FileAttributes(stat.attributes),
                reparse_tag: posix::reparse_tag(stat),
            }
            .encode(out);
        }),
        Class::FILE_POSIX_INFORMATION => {
            exact(limit, FilePosixInformation::LEN, |out| posix::information(open, stat).encode(out))
        }
        Class::FILE_COMPRESSION_INFORMATION => exact(limit, FileCompressionInformation::LEN, |out| {
            FileCompressionInformation {
                compressed_file_size: stat.end_of_file,
                ..FileCompressionInformation::default()
            }
            .encode(out);
        }),
        Class::FILE_ID_INFORMATION => exact(limit, FileIdInformation::LEN, |out| {
            let mut file_id = [0; 16];
            file_id[..8].copy_from_slice(&stat.key.ino.to_le_bytes());
            FileIdInformation { volume_serial_number: open.volume.serial.into(), file_id }.encode(out);
        }),
        _ => Step::Fail(NtStatus::INVALID_INFO_CLASS),
    }
}

/// The 8.3 name. The root has none, and clients with the POSIX extensions get none that they could not use.
fn alternate_name(open: &Open) -> Option<String> {
    let state = open.state();
    let name = state.path.name();
    let has_one = !name.is_empty() && (!open.posix || short_name::is_short(name));
    has_one.then(|| short_name::of(name).into_owned())
}

fn basic(stat: &Stat) -> FileBasicInformation {
    FileBasicInformation {
        creation_time: FileTime(stat.times.creation),
        last_access_time: FileTime(stat.times.last_access),
        last_write_time: FileTime(stat.times.last_write),
        change_time: FileTime(stat.times.change),
        file_attributes: FileAttributes(stat.attributes),
    }
}

fn standard(open: &Open, stat: &Stat) -> FileStandardInformation {
    let delete_pending = open.file.delete_pending(open.id);
    FileStandardInformation {
        allocation_size: stat.allocation_size,
        end_of_file: stat.end_of_file,
        // A name with a pending removal does not count.
        number_of_links: stat.links.saturating_sub(delete_pending.into()),
        delete_pending,
        directory: stat.directory,
    }
}

fn internal(stat: &Stat) -> FileInternalInformation {
    FileInternalInformation { index_number: stat.key.ino }
}

fn file_system(ctx: &Ctx<'_>, open: &Arc<Open>, class: FsClass, limit: u32) -> Step {
    let volume = &open.volume;
    match class {
        FsClass::FILE_FS_POSIX_INFORMATION if !ctx.core.has_posix() => {
            Step::Fail(NtStatus::INVALID_INFO_CLASS)
        }
        FsClass::FILE_FS_VOLUME_INFORMATION => {
            let info = FileFsVolumeInformation {
                volume_creation_time: FileTime(volume.created),
                volume_serial_number: volume.serial,
                supports_objects: false,
                volume_label: volume.id.clone(),
            };
            answer(encoded(|out| info.encode(out)), fixed_len::FS_VOLUME, limit)
        }
        FsClass::FILE_FS_SIZE_INFORMATION
        | FsClass::FILE_FS_FULL_SIZE_INFORMATION
        | FsClass::FILE_FS_POSIX_INFORMATION => {
            let serial = volume.serial;
            Step::Fs(
                FsOpKind::Space { handle: open.handle.clone() },
                Box::new(move |_, result| match result {
                    Ok(FsReply::Space(space)) if class == FsClass::FILE_FS_POSIX_INFORMATION => {
                        exact(limit, FileFsPosixInformation::LEN, |out| {
                            posix::file_system(space, UNIT_BYTES as u32, serial).encode(out);
                        })
                    }
                    Ok(FsReply::Space(space)) => size(class, space, limit),
                    Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
                    Err(status) => Step::Fail(status),
                }),
            )
        }
        FsClass::FILE_FS_DEVICE_INFORMATION => exact(limit, FileFsDeviceInformation::LEN, |out| {
            let mut characteristics = DeviceCharacteristics::DEVICE_IS_MOUNTED;
            if volume.read_only {
                characteristics.insert(DeviceCharacteristics::READ_ONLY_DEVICE);
            }
            FileFsDeviceInformation { device_type: DeviceType::DISK, characteristics }.encode(out);
        }),
        FsClass::FILE_FS_ATTRIBUTE_INFORMATION => {
            let info = FileFsAttributeInformation {
                file_system_attributes: attributes(volume),
                maximum_component_name_length: 255,
                // Clients check for this before they use anything beyond FAT.
                file_system_name: "NTFS".to_owned(),
            };
            answer(encoded(|out| info.encode(out)), fixed_len::FS_ATTRIBUTE, limit)
        }
        FsClass::FILE_FS_CONTROL_INFORMATION => exact(limit, FileFsControlInformation::LEN, |out| {
            FileFsControlInformation::default().encode(out);
        }),
        FsClass::FILE_FS_OBJECT_ID_INFORMATION => exact(limit, FileFsObjectIdInformation::LEN, |out| {
            let mut object_id = [0; 16];
            object_id[..4].copy_from_slice(&volume.serial.to_le_bytes());
            object_id[4..12].copy_from_slice(&volume.created.to_le_bytes());
            FileFsObjectIdInformation { object_id, ..FileFsObjectIdInformation::default() }.encode(out);
        }),
        FsClass::FILE_FS_SECTOR_SIZE_INFORMATION => exact(limit, FileFsSectorSizeInformation::LEN, |out| {
            let physical = UNIT_BYTES as u32;
            FileFsSectorSizeInformation {
                logical_bytes_per_sector: SECTOR_BYTES,
                physical_bytes_per_sector_for_atomicity: physical,
                physical_bytes_per_sector_for_performance: physical,
                file_system_effective_physical_bytes_per_sector_for_atomicity: physical,
                flags: SectorSizeFlags::ALIGNED_DEVICE | SectorSizeFlags::PARTITION_ALIGNED_ON_DEVICE,
                byte_offset_for_sector_alignment: 0,
                byte_offset_for_partition_alignment: 0,
            }
            .encode(out);
        }),
        FsClass::FILE_FS_LABEL_INFORMATION
        | FsClass::FILE_FS_DRIVER_PATH_INFORMATION
        | FsClass::FILE_FS_VOLUME_FLAGS_INFORMATION => Step::Fail(NtStatus::NOT_SUPPORTED),
        _ => Step::Fail(NtStatus::INVALID_INFO_CLASS),
    }
}

fn size(class: FsClass, space: Space, limit: u32) -> Step {
    let (total, free) = (space.total / UNIT_BYTES, space.free / UNIT_BYTES);
    if class == FsClass::FILE_FS_SIZE_INFORMATION {
        return exact(limit, FileFsSizeInformation::LEN, |out| {
            FileFsSizeInformation {
                total_allocation_units: total,
                available_allocation_units: free,
                sectors_per_allocation_unit: SECTORS_PER_UNIT,
                bytes_per_sector: SECTOR_BYTES,
            }
            .encode(out);
        });
    }
    exact(limit, FileFsFullSizeInformation::LEN, |out| {
        FileFsFullSizeInformation {
            total_allocation_units: total,
            caller_available_allocation_units: free,
            actual_available_allocation_units: free,
            sectors_per_allocation_unit: SECTORS_PER_UNIT,
            bytes_per_sector: SECTOR_BYTES,
        }
        .encode(out);
    })
}

fn attributes(volume: &Volume) -> FileSystemAttributes {
    let mut attributes = FileSystemAttributes::CASE_SENSITIVE_SEARCH
        | FileSystemAttributes::CASE_PRESERVED_NAMES
        | FileSystemAttributes::UNICODE_ON_DISK
        | FileSystemAttributes::SUPPORTS_SPARSE_FILES
        | FileSystemAttributes::SUPPORTS_REPARSE_POINTS
        | FileSystemAttributes::SUPPORTS_POSIX_UNLINK_RENAME
        | FileSystemAttributes::SUPPORTS_HARD_LINKS;
    if volume.read_only {
        attributes.insert(FileSystemAttributes::READ_ONLY_VOLUME);
    }
    if volume.extended_attributes {
        attributes.insert(FileSystemAttributes::SUPPORTS_EXTENDED_ATTRIBUTES);
        attributes.insert(FileSystemAttributes::NAMED_STREAMS | FileSystemAttributes::PERSISTENT_ACLS);
    }
    if volume.shared_extents {
        attributes.insert(FileSystemAttributes::SUPPORTS_BLOCK_REFCOUNTING);
    }
    attributes
}
