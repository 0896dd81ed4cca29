//! File controls: server-side copy and other operations that move no data.

use forebay_smb::ids::FileId;
use forebay_smb::limits;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::FileBasicInformation;
use forebay_smb::wire::fscc::fsctl::{
    CopyChunk, CopyChunkRequest, CopyChunkResponse, DuplicateExtents, FileRange, FsctlCode,
    ResumeKeyResponse, ZeroData,
};

use forebay_smb::wire::{AccessMask, FileAttributes, FileTime};

use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, basic, directory, file, fsctl, lock, query_file, set_file, write,
};
use crate::support::Client;

pub fn key(c: &mut Client, id: FileId) -> [u8; 24] {
    let (status, output) = fsctl(c, id, FsctlCode::SRV_REQUEST_RESUME_KEY, &[], 32);
    assert_eq!(status, NtStatus::SUCCESS);
    ResumeKeyResponse::parse(&output).unwrap().resume_key
}

pub fn copy(
    c: &mut Client,
    code: FsctlCode,
    source_key: [u8; 24],
    target: FileId,
    chunks: &[(u64, u64, u32)],
) -> (NtStatus, Option<(u32, u32, u32)>) {
    let mut input = Vec::new();
    let chunks = chunks
        .iter()
        .map(|&(source_offset, target_offset, length)| CopyChunk { source_offset, target_offset, length })
        .collect();
    CopyChunkRequest { source_key, chunks }.encode(&mut input);
    let (status, output) = fsctl(c, target, code, &input, 12);
    let response = CopyChunkResponse::parse(&output).ok();
    (status, response.map(|r| (r.chunks_written, r.chunk_bytes_written, r.total_bytes_written)))
}

#[test]
fn chunks_are_copied_on_the_server() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let (from, to) = (file("from").id(&mut c), file("to").id(&mut c));
    write(&mut c, from, 0, b"0123456789").unwrap();
    let key = key(&mut c, from);
    let code = FsctlCode::SRV_COPYCHUNK;
    assert_eq!(copy(&mut c, code, key, to, &[(0, 2, 3), (7, 0, 2)]), (NtStatus::SUCCESS, Some((2, 0, 5))));
    assert_eq!(lab.memory.contents("to").as_deref(), Some(&b"78012"[..]));
    // A chunk that extends beyond the source is not copied; the chunks before it are.
    assert_eq!(
        copy(&mut c, code, key, to, &[(0, 0, 1), (8, 1, 5)]),
        (NtStatus::INVALID_VIEW_SIZE, Some((1, 0, 1)))
    );
    assert_eq!(copy(&mut c, code, key, to, &[]), (NtStatus::SUCCESS, Some((0, 0, 0))));
}

#[test]
fn a_copy_beyond_the_limits_is_answered_with_the_limits() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let (from, to) = (file("from").id(&mut c), file("to").id(&mut c));
    let key = key(&mut c, from);
    let limits_answered = (
        NtStatus::INVALID_PARAMETER,
        Some((
            limits::COPYCHUNK_COUNT_MAX,
            limits::COPYCHUNK_CHUNK_BYTES_MAX,
            limits::COPYCHUNK_TOTAL_BYTES_MAX,
        )),
    );
    let code = FsctlCode::SRV_COPYCHUNK;
    let many = vec![(0, 0, 1); limits::COPYCHUNK_COUNT_MAX as usize + 1];
    assert_eq!(copy(&mut c, code, key, to, &many), limits_answered);
    assert_eq!(
        copy(&mut c, code, key, to, &[(0, 0, limits::COPYCHUNK_CHUNK_BYTES_MAX + 1)]),
        limits_answered
    );
    let total = vec![(0, 0, limits::COPYCHUNK_CHUNK_BYTES_MAX); 17];
    assert_eq!(copy(&mut c, code, key, to, &total), limits_answered);
    assert_eq!(copy(&mut c, code, key, to, &[(0, 0, 0)]), limits_answered);
}

#[test]
fn copies_need_rights_and_respect_locks() {
    let mut lab = Lab::new();
    let (mut c, mut other) = (lab.client(), lab.client());
    let from = file("from").id(&mut c);
    write(&mut c, from, 0, b"0123456789").unwrap();
    let (key, foreign) = (key(&mut c, from), file("x").id(&mut other));
    let write_only = file("to").access(AccessMask::FILE_WRITE_DATA).id(&mut c);
    let denied = copy(&mut c, FsctlCode::SRV_COPYCHUNK, key, write_only, &[(0, 0, 1)]);
    assert_eq!(denied.0, NtStatus::ACCESS_DENIED);
    let allowed = copy(&mut c, FsctlCode::SRV_COPYCHUNK_WRITE, key, write_only, &[(0, 0, 1)]);
    assert_eq!(allowed, (NtStatus::SUCCESS, Some((1, 0, 1))));
    let stolen = copy(&mut other, FsctlCode::SRV_COPYCHUNK, key, foreign, &[(0, 0, 1)]);
    assert_eq!(stolen.0, NtStatus::OBJECT_NAME_NOT_FOUND, "another session's key");
    let held = file("from").id(&mut other);
    lock(&mut other, held, &[(5, 5, EXCLUSIVE | NOW_OR_NEVER)]).unwrap();
    let conflict = copy(&mut c, FsctlCode::SRV_COPYCHUNK_WRITE, key, write_only, &[(4, 0, 2)]);
    assert_eq!(conflict, (NtStatus::FILE_LOCK_CONFLICT, Some((0, 0, 0))));
}

#[test]
fn ranges_are_zeroed_and_allocated_ranges_are_reported() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    write(&mut c, f, 0, &[7; 10]).unwrap();
    let zero = |c: &mut _, file_offset, beyond_final_zero| {
        let mut input = Vec::new();
        ZeroData { file_offset, beyond_final_zero }.encode(&mut input);
        fsctl(c, f, FsctlCode::SET_ZERO_DATA, &input, 0).0
    };
    assert_eq!(zero(&mut c, 2, 4), NtStatus::SUCCESS);
    assert_eq!(lab.memory.contents("f").unwrap(), [7, 7, 0, 0, 7, 7, 7, 7, 7, 7]);
    assert_eq!(zero(&mut c, 4, 2), NtStatus::INVALID_PARAMETER);
    let mut input = Vec::new();
    FileRange { file_offset: 5, length: 100 }.encode(&mut input);
    let (status, output) = fsctl(&mut c, f, FsctlCode::QUERY_ALLOCATED_RANGES, &input, 1024);
    assert_eq!(status, NtStatus::SUCCESS);
    assert_eq!(FileRange::parse_list(&output).unwrap(), [FileRange { file_offset: 5, length: 5 }]);
    let (status, _) = fsctl(&mut c, f, FsctlCode::QUERY_ALLOCATED_RANGES, &input, 8);
    assert_eq!(status, NtStatus::BUFFER_TOO_SMALL);
}

#[test]
fn unsupported_fsctls_return_the_specified_status() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let (f, g) = (file("f").id(&mut c), file("g").id(&mut c));
    let mut status = |code, input: &[u8]| fsctl(&mut c, f, code, input, 1024).0;
    assert_eq!(status(FsctlCode::GET_REPARSE_POINT, &[]), NtStatus::NOT_A_REPARSE_POINT);
    assert_eq!(status(FsctlCode::SET_COMPRESSION, &[0, 0]), NtStatus::SUCCESS);
    assert_eq!(status(FsctlCode::SET_COMPRESSION, &[1, 0]), NtStatus::NOT_SUPPORTED);
    assert_eq!(status(FsctlCode::FILE_LEVEL_TRIM, &[0; 8]), NtStatus::INVALID_DEVICE_REQUEST);
    assert_eq!(status(FsctlCode(0x0009_ffff), &[]), NtStatus::INVALID_DEVICE_REQUEST);
    let mut input = Vec::new();
    DuplicateExtents { source_file_id: g, source_file_offset: 0, target_file_offset: 0, byte_count: 4096 }
        .encode(&mut input);
    assert_eq!(status(FsctlCode::DUPLICATE_EXTENTS_TO_FILE, &input), NtStatus::NOT_SUPPORTED);
    assert_eq!(status(FsctlCode::DUPLICATE_EXTENTS_TO_FILE, &input[..39]), NtStatus::INVALID_PARAMETER);
}

#[test]
fn a_file_stays_sparse_until_set_sparse_clears_it() {
    let mut lab = Lab::new();
    let mut c = lab.client();
    let f = file("f").id(&mut c);
    let sparse = |c: &mut Client| {
        let basic = query_file(c, f, FileInformationClass::FILE_BASIC_INFORMATION, 40).unwrap();
        FileBasicInformation::parse(&basic).unwrap().file_attributes.contains(FileAttributes::SPARSE_FILE)
    };
    assert!(!sparse(&mut c));
    assert_eq!(fsctl(&mut c, f, FsctlCode::SET_SPARSE, &[], 0).0, NtStatus::SUCCESS);
    assert!(sparse(&mut c));
    set_file(&mut c, f, FileInformationClass::FILE_BASIC_INFORMATION, |b| {
        basic(FileTime::UNCHANGED, FileAttributes::HIDDEN).encode(b);
    })
    .unwrap();
    assert!(sparse(&mut c), "other attributes come and go");
    assert_eq!(fsctl(&mut c, f, FsctlCode::SET_SPARSE, &[0], 0).0, NtStatus::SUCCESS);
    assert!(!sparse(&mut c));
    let reader = file("f").access(AccessMask::FILE_READ_DATA).id(&mut c);
    assert_eq!(fsctl(&mut c, reader, FsctlCode::SET_SPARSE, &[], 0).0, NtStatus::ACCESS_DENIED);
    let d = directory("d").id(&mut c);
    assert_eq!(fsctl(&mut c, d, FsctlCode::SET_SPARSE, &[], 0).0, NtStatus::INVALID_PARAMETER);
}
