//! QUERY_INFO and SET_INFO.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::fscc::file_info::{
    FileAllInformation, FileAllocationInformation, FileBasicInformation, FileEndOfFileInformation,
    FileModeInformation, FileStandardInformation,
};
use forebay_smb::wire::fscc::fs_info::{
    FileFsAttributeInformation, FileFsFullSizeInformation, FileSystemAttributes,
};
use forebay_smb::wire::fscc::name_info::FileStreamInformation;
use forebay_smb::wire::fscc::security::{Ace, AceBody, Acl, SecurityDescriptor, Sid};
use forebay_smb::wire::fscc::{FileInformationClass as C, FsInformationClass as F};
use forebay_smb::wire::{AccessMask, Dialect, FileAttributes, FileTime};

use crate::calls::{
    Lab, basic, directory, file, query_file, query_fs, query_security, set_file, set_security, write,
};
use crate::support::NOW;

#[test]
fn every_class_respects_the_output_buffer_length() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("bufsize.txt").id(&mut c);
    write(&mut c, f, 0, &[0; 10]).unwrap();
    // The C size of each structure; smaller buffers fail.
    for (class, fixed) in [
        (C::FILE_BASIC_INFORMATION, 40),
        (C::FILE_STANDARD_INFORMATION, 24),
        (C::FILE_INTERNAL_INFORMATION, 8),
        (C::FILE_EA_INFORMATION, 4),
        (C::FILE_ACCESS_INFORMATION, 4),
        (C::FILE_MODE_INFORMATION, 4),
        (C::FILE_ALIGNMENT_INFORMATION, 4),
        (C::FILE_ALL_INFORMATION, 104),
        (C::FILE_STREAM_INFORMATION, 32),
        (C::FILE_COMPRESSION_INFORMATION, 16),
        (C::FILE_NETWORK_OPEN_INFORMATION, 56),
        (C::FILE_ATTRIBUTE_TAG_INFORMATION, 8),
        (C::FILE_NORMALIZED_NAME_INFORMATION, 8),
        (C::FILE_ID_INFORMATION, 24),
        (C::FILE_STANDARD_LINK_INFORMATION, 12),
    ] {
        let full = query_file(&mut c, f, class, 65535).unwrap();
        assert!(full.len() >= fixed, "{class:?}");
        for room in 0..=full.len() {
            let result = query_file(&mut c, f, class, room as u32);
            match result {
                Err(status) => {
                    assert_eq!(status, NtStatus::INFO_LENGTH_MISMATCH, "{class:?} {room}");
                    assert!(room < fixed, "{class:?} {room}");
                }
                Ok(bytes) => {
                    assert!(room >= fixed, "{class:?} {room}");
                    assert_eq!(bytes, full[..room], "{class:?} {room}");
                }
            }
        }
    }
    assert_eq!(query_file(&mut c, f, C(200), 65535), Err(NtStatus::INVALID_INFO_CLASS));
    assert_eq!(query_file(&mut c, f, C::FILE_NAME_INFORMATION, 65535), Err(NtStatus::NOT_SUPPORTED));
    assert_eq!(query_file(&mut c, f, C::FILE_FULL_EA_INFORMATION, 65535), Err(NtStatus::NO_EAS_ON_FILE));
    let mut old = lab.dialect(Dialect::SMB3_0_2);
    let f = file("bufsize.txt").id(&mut old);
    let normalized = query_file(&mut old, f, C::FILE_NORMALIZED_NAME_INFORMATION, 65535);
    assert_eq!(normalized, Err(NtStatus::NOT_SUPPORTED), "before 3.1.1");
}

#[test]
fn information_classes_are_answered() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let d = directory("d").id(&mut c);
    let f = file(r"d\f.bin").option(CreateOptions::SEQUENTIAL_ONLY).id(&mut c);
    write(&mut c, f, 0, &[0; 5000]).unwrap();
    let all =
        FileAllInformation::parse(&query_file(&mut c, f, C::FILE_ALL_INFORMATION, 4096).unwrap()).unwrap();
    assert_eq!(all.name, r"\d\f.bin");
    assert_eq!(all.standard.end_of_file, 5000);
    assert_eq!(all.standard.allocation_size, 8192);
    assert_eq!(all.standard.number_of_links, 1);
    assert_eq!(all.access.access_flags, AccessMask::FILE_ALL_ACCESS);
    assert_eq!(all.basic.creation_time, FileTime(NOW));
    assert_eq!(all.mode.mode, CreateOptions::SEQUENTIAL_ONLY);
    let streams = query_file(&mut c, f, C::FILE_STREAM_INFORMATION, 4096).unwrap();
    let streams = FileStreamInformation::parse_list(&streams).unwrap();
    assert_eq!(
        (streams.len(), streams[0].stream_name.as_str(), streams[0].stream_size),
        (1, "::$DATA", 5000)
    );
    assert!(query_file(&mut c, d, C::FILE_STREAM_INFORMATION, 4096).unwrap().is_empty());
    let standard = query_file(&mut c, d, C::FILE_STANDARD_INFORMATION, 24).unwrap();
    assert!(FileStandardInformation::parse(&standard).unwrap().directory);
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut c);
    let all = query_file(&mut c, root, C::FILE_ALL_INFORMATION, 4096).unwrap();
    assert_eq!(FileAllInformation::parse(&all).unwrap().name, r"\");
}

#[test]
fn attribute_queries_need_read_attributes_access() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").access(AccessMask::SYNCHRONIZE).id(&mut c);
    for class in [
        C::FILE_BASIC_INFORMATION,
        C::FILE_ALL_INFORMATION,
        C::FILE_NETWORK_OPEN_INFORMATION,
        C::FILE_ATTRIBUTE_TAG_INFORMATION,
        C::FILE_FULL_EA_INFORMATION,
    ] {
        assert_eq!(query_file(&mut c, f, class, 4096), Err(NtStatus::ACCESS_DENIED), "{class:?}");
    }
    assert!(query_file(&mut c, f, C::FILE_STANDARD_INFORMATION, 4096).is_ok());
    assert_eq!(query_security(&mut c, f, 7, 4096), Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn file_system_information_classes_are_answered() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let root = directory("").disposition(CreateDisposition::OPEN).id(&mut c);
    for (class, fixed) in [
        (F::FILE_FS_VOLUME_INFORMATION, 24),
        (F::FILE_FS_SIZE_INFORMATION, 24),
        (F::FILE_FS_DEVICE_INFORMATION, 8),
        (F::FILE_FS_ATTRIBUTE_INFORMATION, 16),
        (F::FILE_FS_CONTROL_INFORMATION, 48),
        (F::FILE_FS_FULL_SIZE_INFORMATION, 32),
        (F::FILE_FS_OBJECT_ID_INFORMATION, 64),
        (F::FILE_FS_SECTOR_SIZE_INFORMATION, 28),
    ] {
        let full = query_fs(&mut c, root, class, 65535).unwrap();
        assert!(full.len() >= fixed, "{class:?}");
        let short = query_fs(&mut c, root, class, fixed as u32 - 1);
        assert_eq!(short, Err(NtStatus::INFO_LENGTH_MISMATCH), "{class:?}");
        assert_eq!(query_fs(&mut c, root, class, fixed as u32).as_deref(), Ok(&full[..fixed]), "{class:?}");
    }
    let size = query_fs(&mut c, root, F::FILE_FS_FULL_SIZE_INFORMATION, 32).unwrap();
    let size = FileFsFullSizeInformation::parse(&size).unwrap();
    let unit = u64::from(size.sectors_per_allocation_unit * size.bytes_per_sector);
    assert_eq!(size.total_allocation_units * unit, 1 << 30);
    assert_eq!(size.caller_available_allocation_units * unit, 1 << 29);
    let attributes = query_fs(&mut c, root, F::FILE_FS_ATTRIBUTE_INFORMATION, 4096).unwrap();
    let attributes = FileFsAttributeInformation::parse(&attributes).unwrap();
    assert_eq!(attributes.file_system_name, "NTFS");
    assert!(attributes.file_system_attributes.contains(FileSystemAttributes::CASE_SENSITIVE_SEARCH));
    assert_eq!(query_fs(&mut c, root, F(99), 4096), Err(NtStatus::INVALID_INFO_CLASS));
}

#[test]
fn block_refcounting_is_announced_with_shared_extents() {
    for shared in [false, true] {
        let mut lab = Lab::with(|volume| volume.shared_extents = shared);
        let mut c = lab.client();
        let root = directory("").id(&mut c);
        let answer = query_fs(&mut c, root, F::FILE_FS_ATTRIBUTE_INFORMATION, 4096).unwrap();
        let attributes = FileFsAttributeInformation::parse(&answer).unwrap().file_system_attributes;
        assert_eq!(attributes.contains(FileSystemAttributes::SUPPORTS_BLOCK_REFCOUNTING), shared);
    }
}

#[test]
fn times_and_attributes_are_set_or_left_unchanged() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let set =
        |c: &mut _, info: FileBasicInformation| set_file(c, f, C::FILE_BASIC_INFORMATION, |b| info.encode(b));
    let then = FileTime(NOW - 10_000_000);
    set(&mut c, basic(then, FileAttributes::READONLY)).unwrap();
    let get = |c: &mut _| {
        FileBasicInformation::parse(&query_file(c, f, C::FILE_BASIC_INFORMATION, 40).unwrap()).unwrap()
    };
    assert_eq!(get(&mut c), basic(then, FileAttributes::READONLY));
    for same in [FileTime::UNCHANGED, FileTime::FREEZE, FileTime::THAW] {
        set(&mut c, basic(same, FileAttributes::empty())).unwrap();
        assert_eq!(get(&mut c), basic(then, FileAttributes::READONLY));
    }
    set(&mut c, basic(FileTime::UNCHANGED, FileAttributes::NORMAL)).unwrap();
    assert_eq!(get(&mut c).file_attributes, FileAttributes::NORMAL);
    let invalid = Err(NtStatus::INVALID_PARAMETER);
    assert_eq!(set(&mut c, basic(FileTime(u64::MAX - 2), FileAttributes::empty())), invalid);
    assert_eq!(set(&mut c, basic(FileTime::UNCHANGED, FileAttributes::DIRECTORY)), invalid);
    let short = set_file(&mut c, f, C::FILE_BASIC_INFORMATION, |b| b.extend_from_slice(&[0; 20]));
    assert_eq!(short, Err(NtStatus::INFO_LENGTH_MISMATCH));
}

#[test]
fn sizes_are_set() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let end = |c: &mut _, f, end_of_file| {
        set_file(c, f, C::FILE_END_OF_FILE_INFORMATION, |b| {
            FileEndOfFileInformation { end_of_file }.encode(b)
        })
    };
    let reserve = |c: &mut _, f, allocation_size| {
        set_file(c, f, C::FILE_ALLOCATION_INFORMATION, |b| {
            FileAllocationInformation { allocation_size }.encode(b)
        })
    };
    end(&mut c, f, 37).unwrap();
    assert_eq!(lab.memory.contents("f").unwrap().len(), 37);
    reserve(&mut c, f, 10).unwrap();
    assert_eq!(lab.memory.contents("f").unwrap().len(), 10);
    assert_eq!(end(&mut c, f, 1 << 63), Err(NtStatus::INVALID_PARAMETER));
    let d = directory("d").id(&mut c);
    assert_eq!(end(&mut c, d, 0), Err(NtStatus::INVALID_PARAMETER));
    let reader = file("f").access(AccessMask::FILE_READ_DATA).id(&mut c);
    assert_eq!(end(&mut c, reader, 0), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(reserve(&mut c, reader, 0), Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn modes_are_validated_and_stored() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let mut set = |mode| {
        set_file(&mut c, f, C::FILE_MODE_INFORMATION, |b| {
            FileModeInformation { mode: CreateOptions(mode) }.encode(b)
        })
    };
    set(2).unwrap();
    assert_eq!(set(1), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(query_file(&mut c, f, C::FILE_MODE_INFORMATION, 4).unwrap(), [2, 0, 0, 0]);
}

#[test]
fn a_descriptor_contains_owner_and_permission_bits() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let bytes = query_security(&mut c, f, 7, 4096).unwrap();
    let descriptor = SecurityDescriptor::parse(&bytes).unwrap();
    assert_eq!((descriptor.owner, descriptor.group), (Some(Sid::unix_user(0)), Some(Sid::unix_group(0))));
    let dacl_only = SecurityDescriptor::parse(&query_security(&mut c, f, 4, 4096).unwrap()).unwrap();
    assert!(dacl_only.owner.is_none() && dacl_only.dacl == descriptor.dacl && dacl_only.dacl.is_some());
    assert_eq!(query_security(&mut c, f, 7, 0), Err(NtStatus::BUFFER_TOO_SMALL));
    set_security(&mut c, f, 7, &bytes).expect("setting the current value is allowed");
    let set = |c: &mut _, descriptor: &SecurityDescriptor, parts| {
        let mut bytes = Vec::new();
        descriptor.encode(&mut bytes);
        set_security(c, f, parts, &bytes)
    };
    assert_eq!(set_security(&mut c, f, 4, b"garbage"), Err(NtStatus::INVALID_PARAMETER));
    let changed = SecurityDescriptor {
        owner: Some(Sid::unix_user(1000)),
        group: Some(Sid::unix_group(100)),
        dacl: Some(Acl {
            acl_revision: 2,
            aces: vec![Ace::allow(Sid::unix_mode(0o600), AccessMask::empty())],
        }),
        ..SecurityDescriptor::default()
    };
    set(&mut c, &changed, 7).unwrap();
    let now = SecurityDescriptor::parse(&query_security(&mut c, f, 7, 4096).unwrap()).unwrap();
    assert_eq!((now.owner, now.group), (changed.owner.clone(), changed.group.clone()));
    let mode = now.dacl.unwrap().aces.iter().find_map(|ace| match &ace.body {
        AceBody::Basic { sid, .. } => sid.as_unix_mode(),
        AceBody::Other(_) => None,
    });
    assert_eq!(mode, Some(0o600));
    // Without the necessary rights.
    let reader = file("f").access(AccessMask::READ_CONTROL).id(&mut c);
    for parts in [1, 2, 4] {
        let mut bytes = Vec::new();
        changed.encode(&mut bytes);
        assert_eq!(set_security(&mut c, reader, parts, &bytes), Err(NtStatus::ACCESS_DENIED));
    }
}

#[test]
fn a_change_time_that_was_set_is_reported_until_the_next_change() {
    let mut lab = Lab::new();
    let (mut a, mut b) = (lab.client(), lab.client());
    let (fa, fb) = (file("f").id(&mut a), file("f").id(&mut b));
    let then = FileTime(NOW - 10_000_000);
    set_file(&mut a, fa, C::FILE_BASIC_INFORMATION, |b| basic(then, FileAttributes::empty()).encode(b))
        .unwrap();
    let change_time = |c: &mut _, f| {
        FileBasicInformation::parse(&query_file(c, f, C::FILE_BASIC_INFORMATION, 40).unwrap())
            .unwrap()
            .change_time
    };
    assert_eq!(change_time(&mut b, fb), then);
    set_file(&mut b, fb, C::FILE_END_OF_FILE_INFORMATION, |b| {
        FileEndOfFileInformation { end_of_file: 1 }.encode(b)
    })
    .unwrap();
    assert_ne!(change_time(&mut a, fa), then);
}
