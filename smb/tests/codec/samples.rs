//! One message of every kind, as real clients and servers send them: the seeds of the corpora.

use std::net::{Ipv4Addr, Ipv6Addr};

use forebay_smb::auth::{ClientStep, NtHash, Step};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create_context::{
    DurableFlags, Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
    encode_request_chain, encode_response_chain,
};
use forebay_smb::wire::fscc::directory::{DirEncoder, DirEntry};
use forebay_smb::wire::fscc::{
    FileInformationClass, FsInformationClass, ea, file_info, fs_info, fsctl, name_info, notify, reparse,
    security,
};
use forebay_smb::wire::negotiate_context::{
    Cipher, CompressionAlgorithm, ContextType, HashAlgorithm, POSIX_CREATE_TAG, RdmaTransform,
    SigningAlgorithm, encode_list,
};
use forebay_smb::wire::transform::{CompressionHeader, TransformFlags, TransformHeader};
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, Dialect, FileAttributes, FileTime, Header, HeaderFlags, Ids,
    NegotiateContext, SecurityMode, ShareAccess, cancel, change_notify, close, compound, create, echo, error,
    flush, header, ioctl, lock, logoff, negotiate, oplock_break, query_directory, query_info, read,
    session_setup, set_info, smb1, tree_connect, tree_disconnect, utf16, write,
};

use crate::targets;

/// A seed of a fuzz target.
pub(crate) struct Sample {
    pub(crate) target: &'static str,
    pub(crate) name: String,
    pub(crate) bytes: Vec<u8>,
}

const FILE: FileId = FileId { persistent: 0x1122_3344_5566_7788, volatile: 0x99aa_bbcc_ddee_ff00 };
const KEY: [u8; 16] = *b"0123456789abcdef";
const TIME: FileTime = FileTime(133_500_000_000_000_000);

/// A request with its body.
pub(crate) fn request(command: Command, body: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    Header {
        credits: 31,
        ids: Ids::Sync { process_id: 0xfeff, tree_id: 5 },
        session_id: 0x4000_0000_0001,
        ..Header::request(command, 7)
    }
    .encode(&mut out);
    body(&mut out);
    out
}

/// A response with its body.
pub(crate) fn response(command: Command, status: NtStatus, body: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    Header { credits: 31, session_id: 0x4000_0000_0001, ..Header::request(command, 7).response(status) }
        .encode(&mut out);
    body(&mut out);
    out
}

fn negotiate_contexts() -> Vec<NegotiateContext<'static>> {
    vec![
        NegotiateContext::PreauthIntegrity {
            hash_algorithms: vec![HashAlgorithm::SHA_512],
            salt: &[0x5a; 32],
        },
        NegotiateContext::Encryption {
            ciphers: vec![Cipher::AES_128_GCM, Cipher::AES_256_GCM, Cipher::AES_128_CCM, Cipher::AES_256_CCM],
        },
        NegotiateContext::Compression {
            flags: 1,
            algorithms: vec![CompressionAlgorithm::LZ77, CompressionAlgorithm::PATTERN_V1],
        },
        NegotiateContext::Netname { name: b"s\0t\0o\0r\0e\0" },
        NegotiateContext::Transport { flags: 1 },
        NegotiateContext::RdmaTransform {
            transforms: vec![RdmaTransform::ENCRYPTION, RdmaTransform::SIGNING],
        },
        NegotiateContext::Signing {
            algorithms: vec![SigningAlgorithm::AES_GMAC, SigningAlgorithm::AES_CMAC],
        },
        NegotiateContext::Posix { data: &POSIX_CREATE_TAG },
        NegotiateContext::Unknown { context_type: ContextType(0x4711), data: b"later" },
    ]
}

fn lease(v2: bool) -> Lease {
    Lease {
        lease_key: KEY,
        lease_state: LeaseState::READ_CACHING | LeaseState::HANDLE_CACHING | LeaseState::WRITE_CACHING,
        lease_flags: if v2 { LeaseFlags::PARENT_LEASE_KEY_SET } else { LeaseFlags::empty() },
        v2: v2.then_some(LeaseV2 { parent_lease_key: [7; 16], epoch: 3 }),
    }
}

fn extended_attributes() -> Vec<u8> {
    let mut out = Vec::new();
    ea::FullEa::encode_list(
        &[
            ea::FullEa { flags: ea::EaFlags::empty(), name: b"user.checkpoint", value: b"epoch-12" },
            ea::FullEa { flags: ea::EaFlags::FILE_NEED_EA, name: b"$KERNEL", value: b"" },
        ],
        &mut out,
    );
    out
}

fn descriptor() -> Vec<u8> {
    let mut out = Vec::new();
    let everyone = security::Ace::allow(security::Sid::everyone(), AccessMask::FILE_GENERIC_READ);
    let other = security::Ace {
        ace_type: security::AceType::ACCESS_ALLOWED_OBJECT,
        ace_flags: security::AceFlags::INHERITED,
        body: security::AceBody::Other(vec![1; 24]),
    };
    security::SecurityDescriptor {
        control: security::Control::SELF_RELATIVE
            | security::Control::DACL_PRESENT
            | security::Control::SACL_PRESENT,
        owner: Some(security::Sid::unix_user(1000)),
        group: Some(security::Sid::unix_group(100)),
        sacl: Some(security::Acl { acl_revision: 2, aces: vec![] }),
        dacl: Some(security::Acl { acl_revision: 4, aces: vec![everyone, other] }),
    }
    .encode(&mut out);
    out
}

fn all_request_contexts<'a>(ea: &'a [u8], sd: &'a [u8]) -> Vec<RequestContext<'a>> {
    vec![
        RequestContext::EaBuffer(ea),
        RequestContext::SdBuffer(sd),
        RequestContext::DurableHandleRequest,
        RequestContext::DurableHandleReconnect(FILE),
        RequestContext::AllocationSize(1 << 30),
        RequestContext::QueryMaximalAccess(None),
        RequestContext::QueryMaximalAccess(Some(TIME)),
        RequestContext::TimewarpToken(TIME),
        RequestContext::QueryOnDiskId,
        RequestContext::Lease(lease(false)),
        RequestContext::Lease(lease(true)),
        RequestContext::DurableHandleRequestV2 {
            timeout_ms: 60_000,
            flags: DurableFlags::PERSISTENT,
            create_guid: KEY,
        },
        RequestContext::DurableHandleReconnectV2 {
            file_id: FILE,
            create_guid: KEY,
            flags: DurableFlags::PERSISTENT,
        },
        RequestContext::AppInstanceId(KEY),
        RequestContext::AppInstanceVersion { high: 1, low: 2 },
        RequestContext::Posix { mode: 0o100_644 },
        RequestContext::Unknown { name: b"Zzzz", data: b"whatever it says" },
    ]
}

fn all_response_contexts() -> Vec<ResponseContext<'static>> {
    vec![
        ResponseContext::DurableHandle,
        ResponseContext::MaximalAccess {
            query_status: NtStatus::SUCCESS,
            maximal_access: AccessMask::FILE_ALL_ACCESS,
        },
        ResponseContext::OnDiskId { disk_file_id: 128, volume_id: 0xfe01 },
        ResponseContext::Lease(lease(false)),
        ResponseContext::Lease(lease(true)),
        ResponseContext::DurableHandleV2 { timeout_ms: 60_000, flags: DurableFlags::PERSISTENT },
        ResponseContext::Posix { nlink: 1, reparse_tag: 0, mode: 0o644, sids: &[1, 0, 0, 0, 0, 0, 0, 1] },
        ResponseContext::Unknown { name: b"Zzzz", data: b"" },
    ]
}

fn entry(name: &str, id: u64) -> DirEntry<'_> {
    DirEntry {
        creation_time: TIME,
        last_access_time: TIME,
        last_write_time: TIME,
        change_time: TIME,
        end_of_file: 4096,
        allocation_size: 4096,
        file_attributes: FileAttributes::ARCHIVE,
        file_id: id.into(),
        name: name.into(),
        ..DirEntry::default()
    }
}

fn listing(class: FileInformationClass) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = DirEncoder::new(class, &mut out, 4096).expect("a class of directory entries");
    for (name, id) in [(".", 1), ("..", 2), ("rank-00.safetensors", 3), ("Prüfsumme", 4)] {
        assert!(encoder.push(&entry(name, id)));
    }
    out
}

fn encoded(encode: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    encode(&mut out);
    out
}

/// Every sample.
pub(crate) fn all() -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut add = |target, list: Vec<(&str, Vec<u8>)>| {
        for (name, bytes) in list {
            samples.push(Sample { target, name: name.to_owned(), bytes });
        }
    };
    add("frame", requests());
    add("frame", frames());
    add("responses", responses());
    add("create_contexts", contexts_of_creates());
    add("negotiate_contexts", lists_of_negotiate_contexts());
    add("authenticate", exchanges(Side::Client));
    add("initiate", exchanges(Side::Server));
    add("fscc", information());
    add("fscc", controls());
    for class in [
        FileInformationClass::FILE_DIRECTORY_INFORMATION,
        FileInformationClass::FILE_FULL_DIRECTORY_INFORMATION,
        FileInformationClass::FILE_BOTH_DIRECTORY_INFORMATION,
        FileInformationClass::FILE_NAMES_INFORMATION,
        FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION,
        FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION,
        FileInformationClass::FILE_ID_EXTD_DIRECTORY_INFORMATION,
        FileInformationClass::FILE_POSIX_INFORMATION,
    ] {
        samples.push(Sample {
            target: "fscc",
            name: format!("{class:?}").to_lowercase().replace('_', "-"),
            bytes: listing(class),
        });
    }
    samples
}

fn create_request(contexts: Vec<RequestContext<'_>>) -> create::Request<'_> {
    create::Request {
        requested_oplock_level: create::OplockLevel::LEASE,
        impersonation_level: create::ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: AccessMask::FILE_READ_DATA | AccessMask::FILE_READ_ATTRIBUTES,
        file_attributes: FileAttributes::NORMAL,
        share_access: ShareAccess::READ | ShareAccess::WRITE | ShareAccess::DELETE,
        create_disposition: create::CreateDisposition::OPEN_IF,
        create_options: create::CreateOptions::NON_DIRECTORY_FILE,
        name: "checkpoints\\epoch-12\\rank-00.safetensors".to_owned(),
        contexts,
    }
}

fn requests() -> Vec<(&'static str, Vec<u8>)> {
    let ea = extended_attributes();
    let sd = descriptor();
    let negotiate_3_1_1 = negotiate::Request {
        security_mode: SecurityMode::SIGNING_ENABLED,
        capabilities: Capabilities::LARGE_MTU | Capabilities::ENCRYPTION,
        client_guid: KEY,
        client_start_time: FileTime(0),
        dialects: vec![
            Dialect::SMB2_0_2,
            Dialect::SMB2_1,
            Dialect::SMB3_0,
            Dialect::SMB3_0_2,
            Dialect::SMB3_1_1,
        ],
        contexts: negotiate_contexts(),
    };
    let negotiate_2_1 = negotiate::Request {
        dialects: vec![Dialect::SMB2_1],
        contexts: vec![],
        client_start_time: TIME,
        ..negotiate_3_1_1.clone()
    };
    let write = write::Request {
        data_offset: write::REQUEST_DATA_OFFSET,
        length: 5,
        offset: 1 << 32,
        file_id: FILE,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        flags: write::Flags::WRITE_THROUGH,
        channel_info: &[],
    };
    vec![
        ("negotiate-3-1-1", request(Command::NEGOTIATE, |out| negotiate_3_1_1.encode(out))),
        ("negotiate-2-1", request(Command::NEGOTIATE, |out| negotiate_2_1.encode(out))),
        (
            "session-setup",
            request(Command::SESSION_SETUP, |out| {
                session_setup::Request {
                    flags: session_setup::Flags::empty(),
                    security_mode: SecurityMode::SIGNING_REQUIRED,
                    capabilities: Capabilities::DFS,
                    channel: 0,
                    previous_session_id: 9,
                    security_buffer: b"NTLMSSP\0\x01\0\0\0\x97\x82\x08\xe2",
                }
                .encode(out);
            }),
        ),
        ("logoff", request(Command::LOGOFF, |out| logoff::Request.encode(out))),
        (
            "tree-connect",
            request(Command::TREE_CONNECT, |out| {
                tree_connect::Request {
                    flags: tree_connect::Flags::CLUSTER_RECONNECT,
                    path: "\\\\10.0.0.1\\pvc-4711".to_owned(),
                }
                .encode(out);
            }),
        ),
        ("tree-disconnect", request(Command::TREE_DISCONNECT, |out| tree_disconnect::Request.encode(out))),
        ("create", request(Command::CREATE, |out| create_request(vec![]).encode(out))),
        (
            "create-root",
            request(Command::CREATE, |out| {
                create::Request {
                    name: String::new(),
                    ..create_request(vec![
                        RequestContext::QueryMaximalAccess(None),
                        RequestContext::QueryOnDiskId,
                    ])
                }
                .encode(out);
            }),
        ),
        (
            "create-contexts",
            request(Command::CREATE, |out| create_request(all_request_contexts(&ea, &sd)).encode(out)),
        ),
        (
            "close",
            request(Command::CLOSE, |out| {
                close::Request { flags: close::Flags::POSTQUERY_ATTRIB, file_id: FILE }.encode(out);
            }),
        ),
        ("flush", request(Command::FLUSH, |out| flush::Request { file_id: FILE }.encode(out))),
        ("read", request(Command::READ, |out| read_request(read::Channel::NONE, &[]).encode(out))),
        (
            "read-rdma",
            request(Command::READ, |out| read_request(read::Channel::RDMA_V1, &[0x11; 16]).encode(out)),
        ),
        (
            "write",
            request(Command::WRITE, |out| {
                write.encode(out);
                out.extend_from_slice(b"bytes");
            }),
        ),
        ("write-header-only", request(Command::WRITE, |out| write.encode(out))),
        (
            "write-rdma",
            request(Command::WRITE, |out| {
                write::Request {
                    data_offset: 0,
                    length: 0,
                    channel: read::Channel::RDMA_V1_INVALIDATE,
                    remaining_bytes: 1 << 20,
                    channel_info: &[0x22; 32],
                    ..write
                }
                .encode(out);
            }),
        ),
        (
            "lock",
            request(Command::LOCK, |out| {
                lock::Request {
                    lock_sequence: 0x21,
                    file_id: FILE,
                    locks: vec![
                        lock::LockElement {
                            offset: 0,
                            length: u64::MAX,
                            flags: lock::LockFlags::EXCLUSIVE_LOCK | lock::LockFlags::FAIL_IMMEDIATELY,
                        },
                        lock::LockElement { offset: 10, length: 20, flags: lock::LockFlags::UNLOCK },
                    ],
                }
                .encode(out);
            }),
        ),
        (
            "ioctl",
            request(Command::IOCTL, |out| {
                ioctl::Request {
                    ctl_code: fsctl::FsctlCode::QUERY_NETWORK_INTERFACE_INFO,
                    file_id: FileId::RELATED,
                    input: &[],
                    max_input_response: 0,
                    output: &[],
                    max_output_response: 65536,
                    flags: ioctl::Flags::IS_FSCTL,
                }
                .encode(out);
            }),
        ),
        (
            "ioctl-input",
            request(Command::IOCTL, |out| {
                ioctl::Request {
                    ctl_code: fsctl::FsctlCode::SET_ZERO_DATA,
                    file_id: FILE,
                    input: &[1; 16],
                    max_input_response: 0,
                    output: &[2; 3],
                    max_output_response: 0,
                    flags: ioctl::Flags::IS_FSCTL,
                }
                .encode(out);
            }),
        ),
        ("cancel", request(Command::CANCEL, |out| cancel::Request.encode(out))),
        ("echo", request(Command::ECHO, |out| echo::Request.encode(out))),
        (
            "query-directory",
            request(Command::QUERY_DIRECTORY, |out| {
                query_directory::Request {
                    file_information_class: FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION,
                    flags: query_directory::Flags::RESTART_SCANS,
                    file_index: 0,
                    file_id: FILE,
                    output_buffer_length: 1 << 20,
                    file_name: "*".to_owned(),
                }
                .encode(out);
            }),
        ),
        (
            "change-notify",
            request(Command::CHANGE_NOTIFY, |out| {
                change_notify::Request {
                    flags: change_notify::Flags::WATCH_TREE,
                    output_buffer_length: 4096,
                    file_id: FILE,
                    completion_filter: change_notify::CompletionFilter::FILE_NAME
                        | change_notify::CompletionFilter::LAST_WRITE,
                }
                .encode(out);
            }),
        ),
        (
            "query-info",
            request(Command::QUERY_INFO, |out| {
                query_info::Request {
                    info_type: query_info::InfoType::FILESYSTEM,
                    file_info_class: FsInformationClass::FILE_FS_FULL_SIZE_INFORMATION.0,
                    output_buffer_length: 32,
                    additional_information: 0,
                    flags: query_info::Flags::empty(),
                    file_id: FILE,
                    input_buffer: &[],
                }
                .encode(out);
            }),
        ),
        (
            "set-info",
            request(Command::SET_INFO, |out| {
                set_info::Request {
                    info_type: query_info::InfoType::FILE,
                    file_info_class: FileInformationClass::FILE_END_OF_FILE_INFORMATION.0,
                    additional_information: 0,
                    file_id: FILE,
                    buffer: &[0, 16, 0, 0, 0, 0, 0, 0],
                }
                .encode(out);
            }),
        ),
        ("oplock-break", request(Command::OPLOCK_BREAK, |out| oplock_acknowledgment().encode(out))),
        ("lease-break", request(Command::OPLOCK_BREAK, |out| lease_acknowledgment().encode(out))),
    ]
}

fn read_request(channel: read::Channel, channel_info: &[u8]) -> read::Request<'_> {
    read::Request {
        padding: 0x50,
        flags: read::Flags::empty(),
        length: 4 << 20,
        offset: 1 << 40,
        file_id: FILE,
        minimum_count: 1,
        channel,
        remaining_bytes: 0,
        channel_info,
    }
}

fn oplock_acknowledgment() -> oplock_break::Request {
    oplock_break::Request::Oplock(oplock_break::OplockBreak {
        oplock_level: create::OplockLevel::II,
        file_id: FILE,
    })
}

fn lease_acknowledgment() -> oplock_break::Request {
    oplock_break::Request::Lease(oplock_break::LeaseBreakAcknowledgment {
        lease_key: KEY,
        lease_state: LeaseState::READ_CACHING,
    })
}

fn frames() -> Vec<(&'static str, Vec<u8>)> {
    // The Linux client's stat().
    let mut stat = Vec::new();
    let parts: [(Command, Vec<u8>); 3] = [
        (Command::CREATE, encoded(|out| create_request(vec![]).encode(out))),
        (
            Command::QUERY_INFO,
            encoded(|out| {
                query_info::Request {
                    info_type: query_info::InfoType::FILE,
                    file_info_class: FileInformationClass::FILE_ALL_INFORMATION.0,
                    output_buffer_length: 4196,
                    additional_information: 0,
                    flags: query_info::Flags::empty(),
                    file_id: FileId::RELATED,
                    input_buffer: &[],
                }
                .encode(out);
            }),
        ),
        (
            Command::CLOSE,
            encoded(|out| {
                close::Request { flags: close::Flags::empty(), file_id: FileId::RELATED }.encode(out);
            }),
        ),
    ];
    for (index, (command, body)) in parts.into_iter().enumerate() {
        let start = stat.len();
        let flags = if index > 0 { HeaderFlags::RELATED_OPERATIONS } else { HeaderFlags::empty() };
        Header { flags, ..Header::request(command, 7 + index as u64) }.encode(&mut stat);
        stat.extend_from_slice(&body);
        if index < 2 {
            compound::chain(&mut stat, start);
        }
    }
    let mut encrypted = Vec::new();
    TransformHeader {
        signature: KEY,
        nonce: *b"nonce-of-12b\0\0\0\0",
        original_message_size: 72,
        flags: TransformFlags::ENCRYPTED,
        session_id: 4,
    }
    .encode(&mut encrypted);
    encrypted.extend_from_slice(&[0xcc; 72]);
    let compressed = encoded(|out| {
        CompressionHeader {
            original_compressed_segment_size: 4096,
            compression_algorithm: CompressionAlgorithm::LZ77,
            flags: 0,
            offset_or_length: 80,
        }
        .encode(out);
    });
    let smb1 = encoded(|out| {
        smb1::encode_negotiate(&[b"NT LM 0.12", smb1::DIALECT_2_002, smb1::DIALECT_2_WILDCARD], out);
    });
    vec![
        ("compound-stat", stat),
        ("encrypted", encrypted),
        ("compressed", compressed),
        ("smb1-negotiate", smb1),
    ]
}

fn responses() -> Vec<(&'static str, Vec<u8>)> {
    let ok = |command, body: &dyn Fn(&mut Vec<u8>)| response(command, NtStatus::SUCCESS, body);
    let negotiate = negotiate::Response {
        security_mode: SecurityMode::SIGNING_ENABLED,
        dialect_revision: Dialect::SMB3_1_1,
        server_guid: KEY,
        capabilities: Capabilities::LARGE_MTU | Capabilities::LEASING,
        max_transact_size: 8 << 20,
        max_read_size: 8 << 20,
        max_write_size: 8 << 20,
        system_time: TIME,
        server_start_time: FileTime(0),
        security_buffer: b"\x60\x1c\x06\x06\x2b\x06\x01\x05\x05\x02",
        contexts: negotiate_contexts(),
    };
    let negotiate_2_1 =
        negotiate::Response { dialect_revision: Dialect::SMB2_1, contexts: vec![], ..negotiate.clone() };
    let create = create::Response {
        oplock_level: create::OplockLevel::LEASE,
        flags: create::ResponseFlags::empty(),
        create_action: create::CreateAction::CREATED,
        creation_time: TIME,
        last_access_time: TIME,
        last_write_time: TIME,
        change_time: TIME,
        allocation_size: 4096,
        end_of_file: 1,
        file_attributes: FileAttributes::ARCHIVE,
        file_id: FILE,
        contexts: all_response_contexts(),
    };
    let interfaces = encoded(|out| fsctl::NetworkInterfaceInfo::encode_list(&interfaces(), out));
    let symlink = encoded(|out| symlink_error().encode(out));
    let error_contexts = encoded(|out| {
        error::ErrorContext::encode_list(
            &[
                error::ErrorContext { error_id: error::ErrorId::DEFAULT, error_context_data: &symlink },
                error::ErrorContext { error_id: error::ErrorId::SHARE_REDIRECT, error_context_data: b"abc" },
            ],
            out,
        );
    });
    let mut interim = Vec::new();
    Header {
        ids: Ids::Async { async_id: 99 },
        ..Header::request(Command::LOCK, 8).response(NtStatus::PENDING)
    }
    .encode(&mut interim);
    error::Response::default().encode(&mut interim);
    let notification = |notification: oplock_break::Notification| {
        encoded(|out| {
            Header::request(Command::OPLOCK_BREAK, header::UNSOLICITED_MESSAGE_ID)
                .response(NtStatus::SUCCESS)
                .encode(out);
            notification.encode(out);
        })
    };
    vec![
        ("negotiate-3-1-1", ok(Command::NEGOTIATE, &|out| negotiate.encode(out))),
        ("negotiate-2-1", ok(Command::NEGOTIATE, &|out| negotiate_2_1.encode(out))),
        (
            "session-setup",
            response(Command::SESSION_SETUP, NtStatus::MORE_PROCESSING_REQUIRED, |out| {
                session_setup::Response {
                    session_flags: session_setup::SessionFlags::empty(),
                    security_buffer: b"NTLMSSP\0\x02\0\0\0",
                }
                .encode(out);
            }),
        ),
        ("logoff", ok(Command::LOGOFF, &|out| logoff::Response.encode(out))),
        (
            "tree-connect",
            ok(Command::TREE_CONNECT, &|out| {
                tree_connect::Response {
                    share_type: tree_connect::ShareType::DISK,
                    share_flags: tree_connect::ShareFlags::NO_CACHING,
                    capabilities: tree_connect::ShareCapabilities::empty(),
                    maximal_access: AccessMask::FILE_ALL_ACCESS,
                }
                .encode(out);
            }),
        ),
        ("tree-disconnect", ok(Command::TREE_DISCONNECT, &|out| tree_disconnect::Response.encode(out))),
        ("create", ok(Command::CREATE, &|out| create.encode(out))),
        (
            "close",
            ok(Command::CLOSE, &|out| {
                close::Response {
                    flags: close::Flags::POSTQUERY_ATTRIB,
                    end_of_file: 77,
                    ..close::Response::default()
                }
                .encode(out);
            }),
        ),
        ("flush", ok(Command::FLUSH, &|out| flush::Response.encode(out))),
        (
            "read",
            ok(Command::READ, &|out| {
                read::Response::inline(5).encode(out);
                out.extend_from_slice(b"bytes");
            }),
        ),
        ("write", ok(Command::WRITE, &|out| write::Response { count: 4096, remaining: 0 }.encode(out))),
        ("lock", ok(Command::LOCK, &|out| lock::Response.encode(out))),
        (
            "ioctl",
            ok(Command::IOCTL, &|out| {
                ioctl::Response {
                    ctl_code: fsctl::FsctlCode::QUERY_NETWORK_INTERFACE_INFO,
                    file_id: FileId::RELATED,
                    input: &[],
                    output: &interfaces,
                    flags: 0,
                }
                .encode(out);
            }),
        ),
        ("echo", ok(Command::ECHO, &|out| echo::Response.encode(out))),
        (
            "query-directory",
            ok(Command::QUERY_DIRECTORY, &|out| {
                let output_buffer = &listing(FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION);
                query_directory::Response { output_buffer }.encode(out);
            }),
        ),
        (
            "change-notify",
            ok(Command::CHANGE_NOTIFY, &|out| {
                change_notify::Response { output_buffer: &changes() }.encode(out);
            }),
        ),
        (
            "query-info",
            ok(Command::QUERY_INFO, &|out| query_info::Response { output_buffer: &[0; 24] }.encode(out)),
        ),
        ("set-info", ok(Command::SET_INFO, &|out| set_info::Response.encode(out))),
        ("oplock-break", ok(Command::OPLOCK_BREAK, &|out| oplock_acknowledgment().encode(out))),
        ("lease-break", ok(Command::OPLOCK_BREAK, &|out| lease_acknowledgment().encode(out))),
        (
            "oplock-notification",
            notification(oplock_break::Notification::Oplock(oplock_break::OplockBreak {
                oplock_level: create::OplockLevel::NONE,
                file_id: FILE,
            })),
        ),
        (
            "lease-notification",
            notification(oplock_break::Notification::Lease(oplock_break::LeaseBreakNotification {
                new_epoch: 4,
                flags: oplock_break::LeaseBreakFlags::ACK_REQUIRED,
                lease_key: KEY,
                current_lease_state: LeaseState(7),
                new_lease_state: LeaseState::READ_CACHING,
                break_reason: 0,
                access_mask_hint: AccessMask::empty(),
                share_mask_hint: ShareAccess::empty(),
            })),
        ),
        ("interim", interim),
        (
            "error-symlink",
            response(Command::CREATE, NtStatus::STOPPED_ON_SYMLINK, |out| {
                error::Response { error_context_count: 0, error_data: &symlink }.encode(out);
            }),
        ),
        (
            "error-contexts",
            response(Command::CREATE, NtStatus::STOPPED_ON_SYMLINK, |out| {
                error::Response { error_context_count: 2, error_data: &error_contexts }.encode(out);
            }),
        ),
    ]
}

fn symlink_error() -> error::SymbolicLinkError {
    error::SymbolicLinkError {
        unparsed_path_length: 10,
        flags: error::SYMLINK_FLAG_RELATIVE,
        substitute_name: "latest\\rank-00".to_owned(),
        print_name: "latest".to_owned(),
    }
}

fn interfaces() -> Vec<fsctl::NetworkInterfaceInfo> {
    vec![
        fsctl::NetworkInterfaceInfo {
            if_index: 2,
            capability: fsctl::InterfaceCapability::RSS_CAPABLE,
            link_speed_bps: 100_000_000_000,
            sockaddr: fsctl::SocketAddress::V4 { port: 0, address: Ipv4Addr::new(10, 0, 0, 1) },
        },
        fsctl::NetworkInterfaceInfo {
            if_index: 3,
            capability: fsctl::InterfaceCapability::RDMA_CAPABLE,
            link_speed_bps: 0,
            sockaddr: fsctl::SocketAddress::V6 {
                port: 445,
                flow_info: 1,
                address: Ipv6Addr::LOCALHOST,
                scope_id: 2,
            },
        },
        fsctl::NetworkInterfaceInfo {
            if_index: 4,
            capability: fsctl::InterfaceCapability::empty(),
            link_speed_bps: 1,
            sockaddr: fsctl::SocketAddress::Other { family: 99 },
        },
    ]
}

fn changes() -> Vec<u8> {
    encoded(|out| {
        let change =
            |action, name: &str| notify::FileNotifyInformation { action, file_name: name.to_owned() };
        assert!(notify::FileNotifyInformation::encode_list(
            &[
                change(notify::NotifyAction::RENAMED_OLD_NAME, "a"),
                change(notify::NotifyAction::RENAMED_NEW_NAME, "dir\\b"),
            ],
            out,
            4096,
        ));
    })
}

fn contexts_of_creates() -> Vec<(&'static str, Vec<u8>)> {
    let ea = extended_attributes();
    let sd = descriptor();
    vec![
        ("request", encoded(|out| encode_request_chain(&all_request_contexts(&ea, &sd), out))),
        ("response", encoded(|out| encode_response_chain(&all_response_contexts(), out))),
        ("lease", encoded(|out| encode_request_chain(&[RequestContext::Lease(lease(true))], out))),
    ]
}

fn lists_of_negotiate_contexts() -> Vec<(&'static str, Vec<u8>)> {
    let list = |contexts: &[NegotiateContext<'_>]| {
        encoded(|out| {
            out.push(contexts.len() as u8);
            let mut list = Vec::new();
            encode_list(contexts, &mut list);
            out.extend_from_slice(&list);
        })
    };
    let all = negotiate_contexts();
    vec![("all", list(&all)), ("linux", list(&all[..2])), ("signing", list(&all[6..7]))]
}

fn information() -> Vec<(&'static str, Vec<u8>)> {
    let basic = file_info::FileBasicInformation {
        creation_time: TIME,
        last_access_time: FileTime::UNCHANGED,
        last_write_time: FileTime::FREEZE,
        change_time: FileTime::THAW,
        file_attributes: FileAttributes::DIRECTORY,
    };
    vec![
        ("basic", encoded(|out| basic.encode(out))),
        (
            "all",
            encoded(|out| {
                file_info::FileAllInformation {
                    basic,
                    name: "\\checkpoints\\rank-00".to_owned(),
                    ..file_info::FileAllInformation::default()
                }
                .encode(out);
            }),
        ),
        (
            "rename",
            encoded(|out| {
                name_info::FileRenameInformation {
                    replace_if_exists: true,
                    root_directory: 0,
                    file_name: "x".to_owned(),
                }
                .encode(out);
            }),
        ),
        (
            "rename-ex",
            encoded(|out| {
                name_info::FileRenameInformationEx {
                    flags: name_info::RenameFlags::POSIX_SEMANTICS,
                    root_directory: 0,
                    file_name: "dir\\new-name".to_owned(),
                }
                .encode(out);
            }),
        ),
        (
            "streams",
            encoded(|out| {
                let stream = |name: &str| name_info::FileStreamInformation {
                    stream_size: 1,
                    stream_allocation_size: 4096,
                    stream_name: name.to_owned(),
                };
                let streams = [stream("::$DATA"), stream(":tag:$DATA")];
                name_info::FileStreamInformation::encode_list(&streams, out);
            }),
        ),
        ("full-ea", extended_attributes()),
        (
            "get-ea",
            encoded(|out| {
                ea::GetEa::encode_list(
                    &[ea::GetEa { name: b"user.a" }, ea::GetEa { name: b"user.bcd" }],
                    out,
                );
            }),
        ),
        (
            "fs-volume",
            encoded(|out| {
                fs_info::FileFsVolumeInformation {
                    volume_creation_time: TIME,
                    volume_serial_number: 0xdead_beef,
                    supports_objects: false,
                    volume_label: "pvc-4711".to_owned(),
                }
                .encode(out);
            }),
        ),
        (
            "fs-attribute",
            encoded(|out| {
                fs_info::FileFsAttributeInformation {
                    file_system_attributes: fs_info::FileSystemAttributes::CASE_SENSITIVE_SEARCH
                        | fs_info::FileSystemAttributes::SUPPORTS_SPARSE_FILES,
                    maximum_component_name_length: 255,
                    file_system_name: "XFS".to_owned(),
                }
                .encode(out);
            }),
        ),
        ("changes", changes()),
        ("descriptor", descriptor()),
        ("name", utf16::to_vec("größer 𝄞")),
    ]
}

fn controls() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        (
            "validate-negotiate",
            encoded(|out| {
                fsctl::ValidateNegotiateInfoRequest {
                    capabilities: Capabilities::LARGE_MTU,
                    guid: KEY,
                    security_mode: SecurityMode::SIGNING_ENABLED,
                    dialects: vec![Dialect::SMB3_0, Dialect::SMB3_0_2],
                }
                .encode(out);
            }),
        ),
        ("interfaces", encoded(|out| fsctl::NetworkInterfaceInfo::encode_list(&interfaces(), out))),
        (
            "copychunk",
            encoded(|out| {
                fsctl::CopyChunkRequest {
                    source_key: [3; 24],
                    chunks: vec![
                        fsctl::CopyChunk { source_offset: 0, target_offset: 1 << 20, length: 1 << 20 },
                        fsctl::CopyChunk { source_offset: 1 << 20, target_offset: 0, length: 77 },
                    ],
                }
                .encode(out);
            }),
        ),
        (
            "snapshots",
            encoded(|out| {
                fsctl::SnapshotArray::complete(vec!["@GMT-2026.11.21-11.40.00".to_owned()]).encode(out);
            }),
        ),
        (
            "dfs-referral",
            encoded(|out| {
                fsctl::DfsReferralRequest {
                    max_referral_level: 4,
                    request_file_name: "\\store\\pvc".to_owned(),
                }
                .encode(out);
            }),
        ),
        (
            "pipe-wait",
            encoded(|out| {
                fsctl::PipeWait { timeout: 50, timeout_specified: true, name: "srvsvc".to_owned() }
                    .encode(out);
            }),
        ),
        (
            "reparse-symlink",
            encoded(|out| {
                let link = encoded(|out| {
                    reparse::SymbolicLink {
                        substitute_name: "..\\data".to_owned(),
                        print_name: "..\\data".to_owned(),
                        flags: 1,
                    }
                    .encode(out);
                });
                reparse::ReparseDataBuffer { reparse_tag: reparse::ReparseTag::SYMLINK, data: &link }
                    .encode(out);
            }),
        ),
    ]
}

/// The user of these tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

/// Successful logons, seen from one side.
fn exchanges(side: Side) -> Vec<(&'static str, Vec<u8>)> {
    [("bare", false), ("spnego", true)]
        .into_iter()
        .map(|(name, spnego)| {
            let (client, server) = exchange(spnego);
            let mut bytes = Vec::new();
            let tokens = match side {
                Side::Client => client,
                Side::Server => {
                    bytes.push(u8::from(spnego));
                    server
                }
            };
            for token in tokens {
                bytes.extend_from_slice(&(token.len() as u16).to_le_bytes());
                bytes.extend_from_slice(&token);
            }
            (name, bytes)
        })
        .collect()
}

/// The tokens of one logon: the client's and the server's.
fn exchange(spnego: bool) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (mut initiator, mut acceptor) = (targets::initiator(spnego), targets::acceptor());
    let lookup = |_: &str, _: &str| vec![NtHash::from_password(targets::PASSWORD)];
    let mut client = vec![initiator.first()];
    let mut server = Vec::new();
    loop {
        let token = client.last().expect("the client begins");
        match acceptor.step(token, &lookup).expect("the user may log on") {
            Step::Continue(token) => server.push(token),
            Step::Done(authenticated) => {
                server.push(authenticated.token);
                return (client, server);
            }
        }
        let token = server.last().expect("the server continues");
        match initiator.step(token, targets::NOW).expect("the server speaks NTLM") {
            ClientStep::Continue(token) | ClientStep::Last(token, _) => client.push(token),
        }
    }
}
