//! The codec's workloads: messages are encoded and parsed, in both directions, as client and server together do it.

use std::hint::black_box;

use anyhow::{Result, ensure};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{
    CreateAction, CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel,
};
use forebay_smb::wire::create_context::{DurableFlags, Lease, LeaseFlags, LeaseState, LeaseV2};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::directory::{DirEncoder, DirEntry, parse_entries};
use forebay_smb::wire::{
    AccessMask, Command, FileAttributes, FileTime, HEADER_LEN, Header, HeaderFlags, RequestContext,
    ResponseContext, ShareAccess, close, compound, create, query_directory, query_info, read, write,
};

const FILE: FileId = FileId { persistent: 0x1122_3344, volatile: 0x5566_7788 };
const TIME: FileTime = FileTime(134_082_432_000_000_000);
const LIST_CLASS: FileInformationClass = FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION;
/// Entries of a listing.
const ENTRIES: usize = 32;
const LIST_BYTES: u32 = 64 * 1024;

/// READ of 64 KiB and its response, without payload.
pub(super) fn read(count: u64) -> Result<()> {
    let (mut request, mut response) = (Vec::new(), Vec::new());
    for number in 0..count {
        begin(&mut request, &Header::request(Command::READ, number));
        read::Request {
            padding: read::RESPONSE_DATA_OFFSET,
            flags: read::Flags(0),
            length: 64 * 1024,
            offset: number << 16,
            file_id: FILE,
            minimum_count: 0,
            channel: read::Channel::NONE,
            remaining_bytes: 0,
            channel_info: &[],
        }
        .encode(&mut request);
        let header = Header::parse(black_box(&request))?;
        let parsed = read::Request::parse(black_box(&request))?;
        begin(&mut response, &header.response(NtStatus::SUCCESS));
        read::Response::inline(parsed.length).encode(&mut response);
        ensure!(Header::parse(black_box(&response))?.message_id == number, "another answer");
        ensure!(read::Response::parse(black_box(&response))?.data_length == 64 * 1024, "another length");
    }
    Ok(())
}

/// WRITE of 64 KiB and its response, without payload.
pub(super) fn write(count: u64) -> Result<()> {
    let (mut request, mut response) = (Vec::new(), Vec::new());
    for number in 0..count {
        begin(&mut request, &Header::request(Command::WRITE, number));
        write::Request {
            data_offset: write::REQUEST_DATA_OFFSET,
            length: 64 * 1024,
            offset: number << 16,
            file_id: FILE,
            channel: read::Channel::NONE,
            remaining_bytes: 0,
            flags: write::Flags(0),
            channel_info: &[],
        }
        .encode(&mut request);
        let header = Header::parse(black_box(&request))?;
        let parsed = write::Request::parse(black_box(&request))?;
        begin(&mut response, &header.response(NtStatus::SUCCESS));
        write::Response { count: parsed.length, remaining: 0 }.encode(&mut response);
        ensure!(Header::parse(black_box(&response))?.message_id == number, "another answer");
        ensure!(write::Response::parse(black_box(&response))?.count == 64 * 1024, "another length");
    }
    Ok(())
}

/// CREATE with the contexts of a caching client, QUERY_INFO and CLOSE in one frame, and the responses in one frame.
pub(super) fn create_compound(count: u64) -> Result<()> {
    let (mut request, mut response) = (Vec::new(), Vec::new());
    for number in 0..count {
        request.clear();
        encode_opening(&mut request, number * 3);
        response.clear();
        let mut messages = 0;
        for range in compound::split(black_box(&request)) {
            let message = &request[range?];
            answer_opening(message, &mut response)?;
            messages += 1;
        }
        ensure!(messages == 3, "the frame has {messages} messages");
        for range in compound::split(black_box(&response)) {
            let message = &response[range?];
            match Header::parse(message)?.command {
                Command::CREATE => ensure!(create::Response::parse(message)?.contexts.len() == 4, "contexts"),
                Command::QUERY_INFO => {
                    black_box(query_info::Response::parse(message)?);
                }
                _ => {
                    black_box(close::Response::parse(message)?);
                }
            }
        }
    }
    Ok(())
}

fn encode_opening(out: &mut Vec<u8>, first_id: u64) {
    Header::request(Command::CREATE, first_id).encode(out);
    create::Request {
        requested_oplock_level: OplockLevel::LEASE,
        impersonation_level: ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: AccessMask::FILE_GENERIC_READ,
        file_attributes: FileAttributes::NORMAL,
        share_access: ShareAccess::READ | ShareAccess::WRITE | ShareAccess::DELETE,
        create_disposition: CreateDisposition::OPEN,
        create_options: CreateOptions::NON_DIRECTORY_FILE,
        name: r"train\shard-00042\sample-001234.jpg".to_owned(),
        contexts: vec![
            RequestContext::Lease(lease()),
            RequestContext::DurableHandleRequestV2 {
                timeout_ms: 0,
                flags: DurableFlags::empty(),
                create_guid: [3; 16],
            },
            RequestContext::QueryMaximalAccess(None),
            RequestContext::QueryOnDiskId,
        ],
    }
    .encode(out);
    compound::chain(out, 0);
    let start = out.len();
    related(Command::QUERY_INFO, first_id + 1).encode(out);
    query_info::Request {
        info_type: query_info::InfoType::FILE,
        file_info_class: FileInformationClass::FILE_ALL_INFORMATION.0,
        output_buffer_length: 4096,
        additional_information: 0,
        flags: query_info::Flags(0),
        file_id: FileId { persistent: u64::MAX, volatile: u64::MAX },
        input_buffer: &[],
    }
    .encode(out);
    compound::chain(out, start);
    related(Command::CLOSE, first_id + 2).encode(out);
    let file_id = FileId { persistent: u64::MAX, volatile: u64::MAX };
    close::Request { flags: close::Flags(0), file_id }.encode(out);
}

fn lease() -> Lease {
    Lease {
        lease_key: [1; 16],
        lease_state: LeaseState::empty(),
        lease_flags: LeaseFlags::empty(),
        v2: Some(LeaseV2 { parent_lease_key: [2; 16], epoch: 1 }),
    }
}

fn related(command: Command, id: u64) -> Header {
    let mut header = Header::request(command, id);
    header.flags.insert(HeaderFlags::RELATED_OPERATIONS);
    header
}

/// Parses one request and appends its response.
fn answer_opening(message: &[u8], out: &mut Vec<u8>) -> Result<()> {
    let header = Header::parse(message)?;
    let start = out.len();
    header.response(NtStatus::SUCCESS).encode(out);
    match header.command {
        Command::CREATE => {
            let request = black_box(create::Request::parse(message)?);
            ensure!(request.contexts.len() == 4, "the CREATE has {} contexts", request.contexts.len());
            create::Response {
                oplock_level: OplockLevel::LEASE,
                flags: create::ResponseFlags::empty(),
                create_action: CreateAction::OPENED,
                creation_time: TIME,
                last_access_time: TIME,
                last_write_time: TIME,
                change_time: TIME,
                allocation_size: 1 << 20,
                end_of_file: 1 << 20,
                file_attributes: FileAttributes::NORMAL,
                file_id: FILE,
                contexts: vec![
                    ResponseContext::Lease(lease()),
                    ResponseContext::DurableHandleV2 { timeout_ms: 60_000, flags: DurableFlags::empty() },
                    ResponseContext::MaximalAccess {
                        query_status: NtStatus::SUCCESS,
                        maximal_access: AccessMask::FILE_GENERIC_READ,
                    },
                    ResponseContext::OnDiskId { disk_file_id: 7, volume_id: 9 },
                ],
            }
            .encode(out);
            compound::chain(out, start);
        }
        Command::QUERY_INFO => {
            black_box(query_info::Request::parse(message)?);
            query_info::Response { output_buffer: &[0; 104] }.encode(out);
            compound::chain(out, start);
        }
        _ => {
            black_box(close::Request::parse(message)?);
            close::Response::default().encode(out);
        }
    }
    Ok(())
}

/// QUERY_DIRECTORY, its response with [`ENTRIES`] entries, and the entries.
pub(super) fn query_directory(count: u64) -> Result<()> {
    let names: Vec<String> = (0..ENTRIES).map(|number| format!("sample-{number:06}.jpg")).collect();
    let (mut request, mut response, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..count {
        begin(&mut request, &Header::request(Command::QUERY_DIRECTORY, number));
        query_directory::Request {
            file_information_class: LIST_CLASS,
            flags: query_directory::Flags(0),
            file_index: 0,
            file_id: FILE,
            output_buffer_length: LIST_BYTES,
            file_name: "*".to_owned(),
        }
        .encode(&mut request);
        let header = Header::parse(black_box(&request))?;
        let parsed = query_directory::Request::parse(black_box(&request))?;
        entries.clear();
        let limit = parsed.output_buffer_length as usize;
        let encoder = DirEncoder::new(parsed.file_information_class, &mut entries, limit);
        let Some(mut encoder) = encoder else { anyhow::bail!("the class has no entries") };
        for name in &names {
            let entry = DirEntry {
                creation_time: TIME,
                last_access_time: TIME,
                last_write_time: TIME,
                change_time: TIME,
                end_of_file: 322_957,
                allocation_size: 323_584,
                file_attributes: FileAttributes::NORMAL,
                file_id: u128::from(number),
                name: name.as_str().into(),
                ..DirEntry::default()
            };
            ensure!(encoder.push(&entry), "the answer has no room for all entries");
        }
        begin(&mut response, &header.response(NtStatus::SUCCESS));
        query_directory::Response { output_buffer: &entries }.encode(&mut response);
        ensure!(Header::parse(black_box(&response))?.message_id == number, "another answer");
        let output = query_directory::Response::parse(black_box(&response))?.output_buffer;
        ensure!(parse_entries(LIST_CLASS, output)?.len() == ENTRIES, "an entry is missing");
    }
    Ok(())
}

fn begin(message: &mut Vec<u8>, header: &Header) {
    message.clear();
    header.encode(message);
    debug_assert_eq!(message.len(), HEADER_LEN);
}
