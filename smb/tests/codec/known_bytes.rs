//! Bytes from another implementation (the Python package smbprotocol 1.17), so that symmetric errors of the codec do not go
//! unnoticed. Every field has a distinct value.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create_context::{
    DurableFlags, Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::fscc::directory::{DirEncoder, DirEntry, parse_entries};
use forebay_smb::wire::fscc::{FileInformationClass, ea, file_info, fs_info, fsctl, name_info, security};
use forebay_smb::wire::negotiate_context::{Cipher, HashAlgorithm, SigningAlgorithm};
use forebay_smb::wire::transform::{TransformFlags, TransformHeader};
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, Dialect, FileAttributes, FileTime, HEADER_LEN, Header, HeaderFlags,
    Ids, NegotiateContext, SecurityMode, ShareAccess, change_notify, close, create, error, flush, ioctl,
    lock, negotiate, query_directory, query_info, read, session_setup, set_info, tree_connect, write,
};

const ID: [u8; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
/// What smbprotocol makes of `ID`, taken as a GUID in wire order.
const GUID: [u8; 16] = [4, 3, 2, 1, 6, 5, 8, 7, 9, 10, 11, 12, 13, 14, 15, 16];
const REVERSED: [u8; 16] = [16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1];
const FILE: FileId = FileId { persistent: 0x0807_0605_0403_0201, volatile: 0x100f_0e0d_0c0b_0a09 };
/// 2026-11-21 11:40:00.123456 UTC.
const TIME: FileTime = FileTime::from_unix(1_795_261_200, 123_456_000);

fn bytes(hex: &str) -> Vec<u8> {
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    assert!(rest.is_empty());
    let digit = |digit: u8| (digit as char).to_digit(16).expect("hexadecimal") as u8;
    pairs.iter().map(|[high, low]| digit(*high) << 4 | digit(*low)).collect()
}

fn behind_header(body: &[u8]) -> Vec<u8> {
    [&[0; HEADER_LEN], body].concat()
}

/// Parsing the foreign body of a message yields the value.
macro_rules! reads {
    ($name:ident, $parse:path, $hex:expr, $value:expr $(,)?) => {
        #[test]
        fn $name() {
            assert_eq!($parse(&behind_header(&bytes($hex))), Ok($value));
        }
    };
}

/// And encoding the value yields that body.
macro_rules! message {
    ($name:ident, $parse:path, $hex:expr, $value:expr $(,)?) => {
        #[test]
        fn $name() {
            let body = bytes($hex);
            assert_eq!($parse(&behind_header(&body)), Ok($value));
            let mut written = Vec::new();
            $value.encode(&mut written);
            assert_eq!(written, body);
        }
    };
}

/// The same for standalone structures.
macro_rules! structure {
    ($name:ident, $parse:path, $hex:expr, $value:expr $(,)?) => {
        #[test]
        fn $name() {
            let structure = bytes($hex);
            assert_eq!($parse(&structure), Ok($value));
            let mut written = Vec::new();
            $value.encode(&mut written);
            assert_eq!(written, structure);
        }
    };
}

structure!(
    header,
    Header::parse,
    concat!(
        "fe534d4240000200030000000800400030000000780000000500000000000000fffe0000060000000700000000",
        "0000000102030405060708090a0b0c0d0e0f10",
    ),
    Header {
        credit_charge: 2,
        status: NtStatus(3),
        command: Command::READ,
        credits: 64,
        flags: HeaderFlags(0x30),
        next_command: 120,
        message_id: 5,
        ids: Ids::Sync { process_id: 0xfeff, tree_id: 6 },
        session_id: 7,
        signature: ID,
    },
);

structure!(
    header_async,
    Header::parse,
    concat!(
        "fe534d4240000200030100000a0040000300000000000000050000000000000006000000000000000700000000",
        "0000000102030405060708090a0b0c0d0e0f10",
    ),
    Header {
        credit_charge: 2,
        status: NtStatus::PENDING,
        command: Command::LOCK,
        credits: 64,
        flags: HeaderFlags::SERVER_TO_REDIR | HeaderFlags::ASYNC_COMMAND,
        next_command: 0,
        message_id: 5,
        ids: Ids::Async { async_id: 6 },
        session_id: 7,
        signature: ID,
    },
);

structure!(
    transform_header,
    TransformHeader::parse,
    concat!(
        "fd534d420102030405060708090a0b0c0d0e0f10100f0e0d0c0b0a090807060504030201480000000000010099",
        "00000000000000",
    ),
    TransformHeader {
        signature: ID,
        nonce: REVERSED,
        original_message_size: 72,
        flags: TransformFlags::ENCRYPTED,
        session_id: 0x99,
    },
);

reads!(
    negotiate_request,
    negotiate::Request::parse,
    concat!(
        "24000500010000007f0000000403020106050807090a0b0c0d0e0f107000000003000000020210020003020311",
        "03000001002600000000000100200001005a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a",
        "5a5a5a5a00000200080000000000030002000100040008000600000000000200020001000000",
    ),
    negotiate::Request {
        security_mode: SecurityMode::SIGNING_ENABLED,
        capabilities: Capabilities(0x7f),
        client_guid: GUID,
        client_start_time: FileTime(0),
        dialects: vec![
            Dialect::SMB2_0_2,
            Dialect::SMB2_1,
            Dialect::SMB3_0,
            Dialect::SMB3_0_2,
            Dialect::SMB3_1_1
        ],
        contexts: vec![
            NegotiateContext::PreauthIntegrity {
                hash_algorithms: vec![HashAlgorithm::SHA_512],
                salt: &[0x5a; 32]
            },
            NegotiateContext::Encryption {
                ciphers: vec![Cipher::AES_128_GCM, Cipher::AES_128_CCM, Cipher::AES_256_GCM],
            },
            NegotiateContext::Signing {
                algorithms: vec![SigningAlgorithm::AES_GMAC, SigningAlgorithm::AES_CMAC]
            },
        ],
    },
);

message!(
    negotiate_response,
    negotiate::Response::parse,
    concat!(
        "41000300020300000403020106050807090a0b0c0d0e0f102f000000000010000000200000004000803e5e0aad",
        "79dd01803e5e0aad79dd0180000500000000006003616263",
    ),
    negotiate::Response {
        security_mode: SecurityMode(3),
        dialect_revision: Dialect::SMB3_0_2,
        server_guid: GUID,
        capabilities: Capabilities(0x2f),
        max_transact_size: 0x10_0000,
        max_read_size: 0x20_0000,
        max_write_size: 0x40_0000,
        system_time: TIME,
        server_start_time: TIME,
        security_buffer: b"\x60\x03abc",
        contexts: vec![],
    },
);

message!(
    session_setup_request,
    session_setup::Request::parse,
    "1900010201000000000000005800080088776655443322114e544c4d53535000",
    session_setup::Request {
        flags: session_setup::Flags::BINDING,
        security_mode: SecurityMode::SIGNING_REQUIRED,
        capabilities: Capabilities::DFS,
        channel: 0,
        previous_session_id: 0x1122_3344_5566_7788,
        security_buffer: b"NTLMSSP\0",
    },
);

message!(
    session_setup_response,
    session_setup::Response::parse,
    "0900040048000700a107746f6b656e",
    session_setup::Response {
        session_flags: session_setup::SessionFlags::ENCRYPT_DATA,
        security_buffer: b"\xa1\x07token",
    },
);

message!(
    tree_connect_request,
    tree_connect::Request::parse,
    "0900000048000e005c005c0073005c0076006f006c00",
    tree_connect::Request { flags: tree_connect::Flags::empty(), path: "\\\\s\\vol".to_owned() },
);

message!(
    tree_connect_response,
    tree_connect::Response::parse,
    "100001003080000010000000ff011f00",
    tree_connect::Response {
        share_type: tree_connect::ShareType::DISK,
        share_flags: tree_connect::ShareFlags::NO_CACHING | tree_connect::ShareFlags::ENCRYPT_DATA,
        capabilities: tree_connect::ShareCapabilities::CONTINUOUS_AVAILABILITY,
        maximal_access: AccessMask::FILE_ALL_ACCESS,
    },
);

reads!(
    create_request,
    create::Request::parse,
    concat!(
        "390000ff0200000000000000000000000000000000000000890012008000000007000000030000004000000078",
        "00120090000000b80000006400690072005c00e4002e00620069006e0000000000000050000000100004000000",
        "18003400000052714c73000000000102030405060708090a0b0c0d0e0f10070000000400000000000000000000",
        "00100f0e0d0c0b0a09080706050403020103000000000000003800000010000400000018002000000044483251",
        "0000000060ea00000200000000000000000000000403020106050807090a0b0c0d0e0f10180000001000040000",
        "000000000000005146696400000000000000001000040000000000000000004d78416300000000",
    ),
    create::Request {
        requested_oplock_level: create::OplockLevel::LEASE,
        impersonation_level: create::ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: AccessMask::FILE_GENERIC_READ,
        file_attributes: FileAttributes::NORMAL,
        share_access: ShareAccess(7),
        create_disposition: create::CreateDisposition::OPEN_IF,
        create_options: create::CreateOptions::NON_DIRECTORY_FILE,
        name: "dir\\ä.bin".to_owned(),
        contexts: vec![
            RequestContext::Lease(Lease {
                lease_key: ID,
                lease_state: LeaseState(7),
                lease_flags: LeaseFlags::PARENT_LEASE_KEY_SET,
                v2: Some(LeaseV2 { parent_lease_key: REVERSED, epoch: 3 }),
            }),
            RequestContext::DurableHandleRequestV2 {
                timeout_ms: 60_000,
                flags: DurableFlags::PERSISTENT,
                create_guid: GUID,
            },
            RequestContext::QueryOnDiskId,
            RequestContext::QueryMaximalAccess(None),
        ],
    },
);

message!(
    create_response,
    create::Response::parse,
    concat!(
        "5900090002000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010010000000",
        "000000e80300000000000020000000000000000102030405060708090a0b0c0d0e0f1098000000580000002000",
        "00001000040000001800080000004d7841630000000000000000ff011f00000000001000040000001800200000",
        "0051466964000000004d00000000000000580000000000000000000000000000000000000000000000",
    ),
    create::Response {
        oplock_level: create::OplockLevel::BATCH,
        flags: create::ResponseFlags::empty(),
        create_action: create::CreateAction::CREATED,
        creation_time: TIME,
        last_access_time: TIME,
        last_write_time: TIME,
        change_time: TIME,
        allocation_size: 4096,
        end_of_file: 1000,
        file_attributes: FileAttributes::ARCHIVE,
        file_id: FILE,
        contexts: vec![
            ResponseContext::MaximalAccess {
                query_status: NtStatus::SUCCESS,
                maximal_access: AccessMask::FILE_ALL_ACCESS,
            },
            ResponseContext::OnDiskId { disk_file_id: 77, volume_id: 88 },
        ],
    },
);

message!(
    close_request,
    close::Request::parse,
    "18000100000000000102030405060708090a0b0c0d0e0f10",
    close::Request { flags: close::Flags::POSTQUERY_ATTRIB, file_id: FILE },
);

message!(
    close_response,
    close::Response::parse,
    concat!(
        "3c00010000000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010010000000",
        "000000e80300000000000020000000",
    ),
    close::Response {
        flags: close::Flags::POSTQUERY_ATTRIB,
        creation_time: TIME,
        last_access_time: TIME,
        last_write_time: TIME,
        change_time: TIME,
        allocation_size: 4096,
        end_of_file: 1000,
        file_attributes: FileAttributes::ARCHIVE,
    },
);

message!(
    flush_request,
    flush::Request::parse,
    "18000000000000000102030405060708090a0b0c0d0e0f10",
    flush::Request { file_id: FILE },
);

message!(
    read_request,
    read::Request::parse,
    concat!(
        "310050010000010089674523010000000102030405060708090a0b0c0d0e0f1001000000000000000000000000",
        "00000000",
    ),
    read::Request {
        padding: 0x50,
        flags: read::Flags::READ_UNBUFFERED,
        length: 0x1_0000,
        offset: 0x1_2345_6789,
        file_id: FILE,
        minimum_count: 1,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        channel_info: &[],
    },
);

reads!(
    read_response,
    read::Response::parse,
    "110050000700000000000000000000007061796c6f6164",
    read::Response::inline(7),
);

reads!(
    write_request,
    write::Request::parse,
    concat!(
        "310070000700000089674523010000000102030405060708090a0b0c0d0e0f1000000000000000000000000001",
        "0000007061796c6f6164",
    ),
    write::Request {
        data_offset: write::REQUEST_DATA_OFFSET,
        length: 7,
        offset: 0x1_2345_6789,
        file_id: FILE,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        flags: write::Flags::WRITE_THROUGH,
        channel_info: &[],
    },
);

/// The payloads of the two previous messages.
#[test]
fn payloads() {
    let response = behind_header(&bytes("110050000700000000000000000000007061796c6f6164"));
    assert_eq!(read::Response::parse(&response).and_then(|read| read.data(&response)), Ok(&b"payload"[..]));
    let request = behind_header(&bytes(concat!(
        "310070000700000089674523010000000102030405060708090a0b0c0d0e0f1000000000000000000000000001",
        "0000007061796c6f6164",
    )));
    assert_eq!(write::Request::parse(&request).and_then(|write| write.data(&request)), Ok(&b"payload"[..]));
}

message!(
    write_response,
    write::Response::parse,
    "11000000070000000000000000000000",
    write::Response { count: 7, remaining: 0 },
);

message!(
    lock_request,
    lock::Request::parse,
    concat!(
        "30000100210000000102030405060708090a0b0c0d0e0f10050000000000000006000000000000001200000000",
        "000000",
    ),
    lock::Request {
        lock_sequence: 0x21,
        file_id: FILE,
        locks: vec![lock::LockElement {
            offset: 5,
            length: 6,
            flags: lock::LockFlags::EXCLUSIVE_LOCK | lock::LockFlags::FAIL_IMMEDIATELY,
        }],
    },
);

reads!(
    ioctl_request,
    ioctl::Request::parse,
    concat!(
        "3900000004021400ffffffffffffffffffffffffffffffff780000000300000000000000780000000000000018",
        "0000000100000000000000010203",
    ),
    ioctl::Request {
        ctl_code: fsctl::FsctlCode::VALIDATE_NEGOTIATE_INFO,
        file_id: FileId::RELATED,
        input: &[1, 2, 3],
        max_input_response: 0,
        output: &[],
        max_output_response: 24,
        flags: ioctl::Flags::IS_FSCTL,
    },
);

message!(
    ioctl_response,
    ioctl::Response::parse,
    concat!(
        "3100000004021400ffffffffffffffffffffffffffffffff700000000000000070000000040000000000000000",
        "00000001020304",
    ),
    ioctl::Response {
        ctl_code: fsctl::FsctlCode::VALIDATE_NEGOTIATE_INFO,
        file_id: FileId::RELATED,
        input: &[],
        output: &[1, 2, 3, 4],
        flags: 0,
    },
);

message!(
    query_directory_request,
    query_directory::Request::parse,
    "21002601000000000102030405060708090a0b0c0d0e0f1060000200000001002a00",
    query_directory::Request {
        file_information_class: FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION,
        flags: query_directory::Flags::RESTART_SCANS,
        file_index: 0,
        file_id: FILE,
        output_buffer_length: 65536,
        file_name: "*".to_owned(),
    },
);

message!(
    query_directory_response,
    query_directory::Response::parse,
    "0900480007000000656e7472696573",
    query_directory::Response { output_buffer: b"entries" },
);

message!(
    change_notify_request,
    change_notify::Request::parse,
    "20000100001000000102030405060708090a0b0c0d0e0f101700000000000000",
    change_notify::Request {
        flags: change_notify::Flags::WATCH_TREE,
        output_buffer_length: 4096,
        file_id: FILE,
        completion_filter: change_notify::CompletionFilter(0x17),
    },
);

message!(
    query_info_request,
    query_info::Request::parse,
    "2900011200040000680000000200000007000000010000000102030405060708090a0b0c0d0e0f10696e",
    query_info::Request {
        info_type: query_info::InfoType::FILE,
        file_info_class: FileInformationClass::FILE_ALL_INFORMATION.0,
        output_buffer_length: 1024,
        additional_information: 7,
        flags: query_info::Flags::RESTART_SCAN,
        file_id: FILE,
        input_buffer: b"in",
    },
);

message!(
    query_info_response,
    query_info::Response::parse,
    "090048000b000000696e666f726d6174696f6e",
    query_info::Response { output_buffer: b"information" },
);

message!(
    set_info_request,
    set_info::Request::parse,
    "210001140800000060000000000000000102030405060708090a0b0c0d0e0f100010000000000000",
    set_info::Request {
        info_type: query_info::InfoType::FILE,
        file_info_class: FileInformationClass::FILE_END_OF_FILE_INFORMATION.0,
        additional_information: 0,
        file_id: FILE,
        buffer: &4096_u64.to_le_bytes(),
    },
);

/// smbprotocol sends one error context and puts the print name before the substitute name.
#[test]
fn error_of_a_symbolic_link() {
    let message = behind_header(&bytes(concat!(
        "09000100320000002e00000053594d4c0c0000a022000a000a000c0000000a00010000007000720069006e0074",
        "00740061007200670065007400",
    )));
    let response = error::Response::parse(&message).expect("an error response");
    assert_eq!(response.error_data.len(), 50);
    assert_eq!(
        error::SymbolicLinkError::parse(response.error_data),
        Ok(error::SymbolicLinkError {
            unparsed_path_length: 10,
            flags: error::SYMLINK_FLAG_RELATIVE,
            substitute_name: "target".to_owned(),
            print_name: "print".to_owned(),
        })
    );
}

#[test]
fn directory_entries() {
    let entry = DirEntry {
        file_index: 1,
        creation_time: TIME,
        last_access_time: TIME,
        last_write_time: TIME,
        change_time: TIME,
        end_of_file: 10,
        allocation_size: 4096,
        file_attributes: FileAttributes::ARCHIVE,
        name: "a.bin".into(),
        ..DirEntry::default()
    };
    let full = DirEntry { ea_size: 3, ..entry.clone() };
    let both = DirEntry { short_name: "A~1".into(), ..full.clone() };
    let name = DirEntry { file_index: 1, name: "a.bin".into(), ..DirEntry::default() };
    for (class, expected, hex) in [
        (FileInformationClass::FILE_NAMES_INFORMATION, name, "00000000010000000a00000061002e00620069006e00"),
        (
            FileInformationClass::FILE_DIRECTORY_INFORMATION,
            entry,
            concat!(
                "0000000001000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010a00000000",
                "0000000010000000000000200000000a00000061002e00620069006e00",
            ),
        ),
        (
            FileInformationClass::FILE_FULL_DIRECTORY_INFORMATION,
            full.clone(),
            concat!(
                "0000000001000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010a00000000",
                "0000000010000000000000200000000a0000000300000061002e00620069006e00",
            ),
        ),
        (
            FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION,
            DirEntry { file_id: 99, ..full },
            concat!(
                "0000000001000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010a00000000",
                "0000000010000000000000200000000a0000000300000000000000630000000000000061002e00620069006e00",
            ),
        ),
        (
            FileInformationClass::FILE_BOTH_DIRECTORY_INFORMATION,
            both.clone(),
            concat!(
                "0000000001000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010a00000000",
                "0000000010000000000000200000000a00000003000000060041007e0031000000000000000000000000000000",
                "0000000061002e00620069006e00",
            ),
        ),
        (
            FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION,
            DirEntry { file_id: 99, ..both },
            concat!(
                "0000000001000000803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd01803e5e0aad79dd010a00000000",
                "0000000010000000000000200000000a00000003000000060041007e0031000000000000000000000000000000",
                "000000000000630000000000000061002e00620069006e00",
            ),
        ),
    ] {
        let listing = bytes(hex);
        assert_eq!(parse_entries(class, &listing).as_deref(), Ok(&[expected.clone()][..]));
        let mut out = Vec::new();
        let mut encoder =
            DirEncoder::new(class, &mut out, listing.len()).expect("a class of directory entries");
        assert!(encoder.push(&expected));
        assert_eq!(out, listing);
    }
}

structure!(
    rename_information,
    name_info::FileRenameInformation::parse,
    "01000000000000000000000000000000100000006e00650077005c006e0061006d006500",
    name_info::FileRenameInformation {
        replace_if_exists: true,
        root_directory: 0,
        file_name: "new\\name".to_owned(),
    },
);

structure!(
    standard_information,
    file_info::FileStandardInformation::parse,
    "00100000000000000a000000000000000200000001000000",
    file_info::FileStandardInformation {
        allocation_size: 4096,
        end_of_file: 10,
        number_of_links: 2,
        delete_pending: true,
        directory: false,
    },
);

structure!(
    volume_information,
    fs_info::FileFsVolumeInformation::parse,
    "803e5e0aad79dd01efbeadde060000000000700076006300",
    fs_info::FileFsVolumeInformation {
        volume_creation_time: TIME,
        volume_serial_number: 0xdead_beef,
        supports_objects: false,
        volume_label: "pvc".to_owned(),
    },
);

#[test]
fn lists() {
    let attribute = bytes("0000000080060500757365722e610076616c7565");
    let expected = [ea::FullEa { flags: ea::EaFlags::FILE_NEED_EA, name: b"user.a", value: b"value" }];
    assert_eq!(ea::FullEa::parse_list(&attribute).as_deref(), Ok(&expected[..]));

    let stream = bytes("000000000e000000050000000000000000100000000000003a003a0024004400410054004100");
    let expected = [name_info::FileStreamInformation {
        stream_size: 5,
        stream_allocation_size: 4096,
        stream_name: "::$DATA".to_owned(),
    }];
    assert_eq!(name_info::FileStreamInformation::parse_list(&stream).as_deref(), Ok(&expected[..]));

    let interface = bytes(concat!(
        "0000000002000000010000000000000000e40b5402000000020000000a00000100000000000000000000000000",
        "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
        "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000000000000000000000",
    ));
    let expected = [fsctl::NetworkInterfaceInfo {
        if_index: 2,
        capability: fsctl::InterfaceCapability::RSS_CAPABLE,
        link_speed_bps: 10_000_000_000,
        sockaddr: fsctl::SocketAddress::V4 { port: 0, address: [10, 0, 0, 1].into() },
    }];
    assert_eq!(fsctl::NetworkInterfaceInfo::parse_list(&interface).as_deref(), Ok(&expected[..]));
    let mut written = Vec::new();
    fsctl::NetworkInterfaceInfo::encode_list(&expected, &mut written);
    assert_eq!(written, interface);
}

structure!(
    copychunk,
    fsctl::CopyChunkRequest::parse,
    concat!(
        "000102030405060708090a0b0c0d0e0f1011121314151617010000000000000001000000000000000200000000",
        "0000000300000000000000",
    ),
    fsctl::CopyChunkRequest {
        source_key: std::array::from_fn(|index| index as u8),
        chunks: vec![fsctl::CopyChunk { source_offset: 1, target_offset: 2, length: 3 }],
    },
);

structure!(
    validate_negotiate_info,
    fsctl::ValidateNegotiateInfoRequest::parse,
    "7f0000000403020106050807090a0b0c0d0e0f100100020002030003",
    fsctl::ValidateNegotiateInfoRequest {
        capabilities: Capabilities(0x7f),
        guid: GUID,
        security_mode: SecurityMode::SIGNING_ENABLED,
        dialects: vec![Dialect::SMB3_0_2, Dialect::SMB3_0],
    },
);

/// Its parts are in a different order than ours.
#[test]
fn security_descriptor() {
    let user = security::Sid { identifier_authority: 22, sub_authorities: vec![1, 1000] };
    assert_eq!(user.as_unix_user(), Some(1000));
    let expected = security::SecurityDescriptor {
        control: security::Control::SELF_RELATIVE | security::Control::DACL_PRESENT,
        owner: Some(user.clone()),
        group: Some(user.clone()),
        sacl: None,
        dacl: Some(security::Acl {
            acl_revision: 2,
            aces: vec![security::Ace::allow(user, AccessMask::FILE_GENERIC_READ)],
        }),
    };
    assert_eq!(
        security::SecurityDescriptor::parse(&bytes(concat!(
            "010004803400000044000000000000001400000002002000010000000000180089001200010200000000001601",
            "000000e8030000010200000000001601000000e8030000010200000000001601000000e8030000",
        ))),
        Ok(expected)
    );
}
