//! Every message and structure, with arbitrary content, decodes to what was encoded.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create_context::{
    DurableFlags, Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::fscc::directory::{DirEncoder, DirEntry, PosixFields, parse_entries};
use forebay_smb::wire::fscc::{
    FileAttributes, FileInformationClass, ea, file_info, fs_info, fsctl, name_info, notify, reparse, security,
};
use forebay_smb::wire::negotiate_context::{
    Cipher, CompressionAlgorithm, ContextType, HashAlgorithm, RdmaTransform, SigningAlgorithm,
};
use forebay_smb::wire::transform::{CompressionHeader, TransformFlags, TransformHeader};
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, Dialect, Fault, FileTime, HEADER_LEN, Header, HeaderFlags, Ids,
    Malformed, NegotiateContext, SecurityMode, ShareAccess, cancel, change_notify, close, compound, create,
    echo, error, flush, ioctl, lock, logoff, negotiate, oplock_break, query_directory, query_info, read,
    session_setup, set_info, smb1, tree_connect, tree_disconnect, utf16, write,
};
use proptest::collection::vec;
use proptest::prelude::*;

/// Encodes `$value` behind a header and decodes it again. Any truncation is refused, except of padding.
macro_rules! assert_message {
    ($message:ty, $value:expr) => {{
        let value = $value;
        let mut bytes = vec![0; HEADER_LEN];
        value.encode(&mut bytes);
        let again = <$message>::parse(&bytes);
        prop_assert_eq!(again.as_ref(), Ok(&value));
        // Not even a structure size.
        prop_assert!(<$message>::parse(&bytes[..HEADER_LEN + 1]).is_err());
        // Another structure size: not this message.
        let mut bytes = bytes.clone();
        bytes[HEADER_LEN + 1] ^= 0x80;
        prop_assert_eq!(<$message>::parse(&bytes).map_err(|e| e.fault), Err(Fault::StructureSize));
    }};
}

/// Encodes `$value` and decodes it again.
macro_rules! assert_structure {
    ($structure:ty, $value:expr) => {{
        let value = $value;
        let mut bytes = Vec::new();
        value.encode(&mut bytes);
        let again = <$structure>::parse(&bytes);
        prop_assert_eq!(again.as_ref(), Ok(&value));
    }};
}

/// Encodes `$values` and decodes them again.
macro_rules! assert_list {
    ($structure:ty, $values:expr) => {{
        let values = $values;
        let mut bytes = Vec::new();
        <$structure>::encode_list(&values, &mut bytes);
        let again = <$structure>::parse_list(&bytes);
        prop_assert_eq!(again.as_ref(), Ok(&values));
    }};
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..100)
}

fn name() -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..40).prop_map(|chars| chars.into_iter().collect())
}

prop_compose! {
    fn file_id()(persistent: u64, volatile: u64) -> FileId {
        FileId { persistent, volatile }
    }
}

prop_compose! {
    fn header_of(ids: Ids)(
        credit_charge: u16, status: u32, command: u16, credits: u16, flags: u32, next_command: u32, message_id: u64,
        session_id: u64, signature: [u8; 16],
    ) -> Header {
        let flags = match ids {
            Ids::Sync { .. } => HeaderFlags(flags).without(HeaderFlags::ASYNC_COMMAND),
            Ids::Async { .. } => HeaderFlags(flags) | HeaderFlags::ASYNC_COMMAND,
        };
        Header {
            credit_charge, status: NtStatus(status), command: Command(command), credits, flags, next_command,
            message_id, ids, session_id, signature,
        }
    }
}

fn header() -> impl Strategy<Value = Header> {
    let sync = any::<(u32, u32)>().prop_map(|(process_id, tree_id)| Ids::Sync { process_id, tree_id });
    let asynchronous = any::<u64>().prop_map(|async_id| Ids::Async { async_id });
    prop_oneof![sync, asynchronous].prop_flat_map(header_of)
}

/// One negotiate context of each kind, with the given content.
fn negotiate_contexts<'a>(algorithms: &[u16], flags: u32, data: &'a [u8]) -> Vec<NegotiateContext<'a>> {
    vec![
        NegotiateContext::PreauthIntegrity {
            hash_algorithms: algorithms.iter().copied().map(HashAlgorithm).collect(),
            salt: data,
        },
        NegotiateContext::Encryption { ciphers: algorithms.iter().copied().map(Cipher).collect() },
        NegotiateContext::Compression {
            flags,
            algorithms: algorithms.iter().copied().map(CompressionAlgorithm).collect(),
        },
        NegotiateContext::Netname { name: data },
        NegotiateContext::Transport { flags },
        NegotiateContext::RdmaTransform {
            transforms: algorithms.iter().copied().map(RdmaTransform).collect(),
        },
        NegotiateContext::Signing { algorithms: algorithms.iter().copied().map(SigningAlgorithm).collect() },
        NegotiateContext::Posix { data },
        NegotiateContext::Unknown { context_type: ContextType(0x200), data },
    ]
}

prop_compose! {
    fn lease()(
        lease_key: [u8; 16], state: u32, flags: u32, v2: Option<([u8; 16], u16)>,
    ) -> Lease {
        Lease {
            lease_key,
            lease_state: LeaseState(state),
            lease_flags: LeaseFlags(flags),
            v2: v2.map(|(parent_lease_key, epoch)| LeaseV2 { parent_lease_key, epoch }),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn headers(header in header()) {
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), HEADER_LEN);
        prop_assert_eq!(Header::parse(&bytes), Ok(header));
        for len in 0..HEADER_LEN {
            prop_assert_eq!(Header::parse(&bytes[..len]).map_err(|e| e.fault), Err(Fault::Truncated));
        }
    }

    #[test]
    fn transform_headers(
        signature: [u8; 16], nonce: [u8; 16], size: u32, flags: u16, session_id: u64, algorithm: u16, offset: u32,
    ) {
        assert_structure!(TransformHeader, TransformHeader {
            signature, nonce, original_message_size: size, flags: TransformFlags(flags), session_id,
        });
        assert_structure!(CompressionHeader, CompressionHeader {
            original_compressed_segment_size: size, compression_algorithm: CompressionAlgorithm(algorithm), flags,
            offset_or_length: offset,
        });
    }

    #[test]
    fn negotiate_requests(
        mode: u16, capabilities: u32, client_guid: [u8; 16], time: u64, algorithms in vec(any::<u16>(), 0..20),
        dialects in vec(any::<u16>(), 0..20), salt in bytes(), flags: u32, wants_3_1_1: bool,
    ) {
        let mut dialects: Vec<_> = dialects.into_iter().map(Dialect).filter(|d| *d != Dialect::SMB3_1_1).collect();
        if wants_3_1_1 {
            dialects.push(Dialect::SMB3_1_1);
        }
        assert_message!(negotiate::Request<'_>, negotiate::Request {
            security_mode: SecurityMode(mode),
            capabilities: Capabilities(capabilities),
            client_guid,
            client_start_time: FileTime(if wants_3_1_1 { 0 } else { time }),
            dialects,
            contexts: if wants_3_1_1 { negotiate_contexts(&algorithms, flags, &salt) } else { vec![] },
        });
    }

    #[test]
    fn negotiate_responses(
        mode: u16, capabilities: u32, server_guid: [u8; 16], sizes: [u32; 3], times: [u64; 2],
        security_buffer in bytes(), algorithms in vec(any::<u16>(), 0..20), flags: u32, salt in bytes(),
        is_3_1_1: bool,
    ) {
        assert_message!(negotiate::Response<'_>, negotiate::Response {
            security_mode: SecurityMode(mode),
            dialect_revision: if is_3_1_1 { Dialect::SMB3_1_1 } else { Dialect::SMB2_WILDCARD },
            server_guid,
            capabilities: Capabilities(capabilities),
            max_transact_size: sizes[0],
            max_read_size: sizes[1],
            max_write_size: sizes[2],
            system_time: FileTime(times[0]),
            server_start_time: FileTime(times[1]),
            security_buffer: &security_buffer,
            contexts: if is_3_1_1 { negotiate_contexts(&algorithms, flags, &salt) } else { vec![] },
        });
    }

    #[test]
    fn smb1_negotiates(dialects in vec(vec(1..=u8::MAX, 0..20), 0..30)) {
        let dialects: Vec<&[u8]> = dialects.iter().map(Vec::as_slice).collect();
        let mut bytes = Vec::new();
        smb1::encode_negotiate(&dialects, &mut bytes);
        prop_assert_eq!(smb1::parse_negotiate(&bytes), Ok(dialects));
    }

    #[test]
    fn session_setups(
        flags: u8, mode: u8, capabilities: u32, channel: u32, previous_session_id: u64, blob in bytes(),
        session_flags: u16,
    ) {
        assert_message!(session_setup::Request<'_>, session_setup::Request {
            flags: session_setup::Flags(flags), security_mode: SecurityMode(mode.into()),
            capabilities: Capabilities(capabilities), channel, previous_session_id, security_buffer: &blob,
        });
        assert_message!(session_setup::Response<'_>, session_setup::Response {
            session_flags: session_setup::SessionFlags(session_flags), security_buffer: &blob,
        });
    }

    #[test]
    fn tree_connects(flags: u16, path in name(), share_type: u8, share_flags: u32, capabilities: u32, access: u32) {
        assert_message!(tree_connect::Request, tree_connect::Request { flags: tree_connect::Flags(flags), path });
        assert_message!(tree_connect::Response, tree_connect::Response {
            share_type: tree_connect::ShareType(share_type), share_flags: tree_connect::ShareFlags(share_flags),
            capabilities: tree_connect::ShareCapabilities(capabilities), maximal_access: AccessMask(access),
        });
    }

    #[test]
    fn create_requests(
        oplock: u8, impersonation: u32, smb_create_flags: u64, masks: [u32; 5], name in name(),
        data in bytes(), file_id in file_id(), guid: [u8; 16], numbers: [u64; 2], small: u32, lease in lease(),
        keep in vec(any::<bool>(), 16),
    ) {
        let contexts = [
            RequestContext::EaBuffer(&data),
            RequestContext::SdBuffer(&data),
            RequestContext::DurableHandleRequest,
            RequestContext::DurableHandleReconnect(file_id),
            RequestContext::AllocationSize(numbers[0]),
            RequestContext::QueryMaximalAccess(None),
            RequestContext::QueryMaximalAccess(Some(FileTime(numbers[1]))),
            RequestContext::TimewarpToken(FileTime(numbers[0])),
            RequestContext::QueryOnDiskId,
            RequestContext::Lease(lease),
            RequestContext::DurableHandleRequestV2 {
                timeout_ms: small, flags: DurableFlags(small), create_guid: guid,
            },
            RequestContext::DurableHandleReconnectV2 { file_id, create_guid: guid, flags: DurableFlags(small) },
            RequestContext::AppInstanceId(guid),
            RequestContext::AppInstanceVersion { high: numbers[0], low: numbers[1] },
            RequestContext::Posix { mode: small },
            RequestContext::Unknown { name: b"odd", data: &data },
        ];
        let contexts = contexts.into_iter().zip(keep).filter_map(|(c, keep)| keep.then_some(c)).collect();
        assert_message!(create::Request<'_>, create::Request {
            requested_oplock_level: create::OplockLevel(oplock),
            impersonation_level: create::ImpersonationLevel(impersonation),
            smb_create_flags,
            desired_access: AccessMask(masks[0]),
            file_attributes: FileAttributes(masks[1]),
            share_access: ShareAccess(masks[2]),
            create_disposition: create::CreateDisposition(masks[3]),
            create_options: create::CreateOptions(masks[4]),
            name,
            contexts,
        });
    }

    #[test]
    fn create_responses(
        oplock: u8, flags: u8, action: u32, times: [u64; 4], sizes: [u64; 2], attributes: u32, file_id in file_id(),
        data in bytes(), small: [u32; 3], lease in lease(), keep in vec(any::<bool>(), 7),
    ) {
        let contexts = [
            ResponseContext::DurableHandle,
            ResponseContext::MaximalAccess {
                query_status: NtStatus(small[0]), maximal_access: AccessMask(small[1]),
            },
            ResponseContext::OnDiskId { disk_file_id: sizes[0], volume_id: sizes[1] },
            ResponseContext::Lease(lease),
            ResponseContext::DurableHandleV2 { timeout_ms: small[0], flags: DurableFlags(small[1]) },
            ResponseContext::Posix { nlink: small[0], reparse_tag: small[1], mode: small[2], sids: &data },
            ResponseContext::Unknown { name: b"longer than most", data: &data },
        ];
        let contexts = contexts.into_iter().zip(keep).filter_map(|(c, keep)| keep.then_some(c)).collect();
        assert_message!(create::Response<'_>, create::Response {
            oplock_level: create::OplockLevel(oplock),
            flags: create::ResponseFlags(flags),
            create_action: create::CreateAction(action),
            creation_time: FileTime(times[0]),
            last_access_time: FileTime(times[1]),
            last_write_time: FileTime(times[2]),
            change_time: FileTime(times[3]),
            allocation_size: sizes[0],
            end_of_file: sizes[1],
            file_attributes: FileAttributes(attributes),
            file_id,
            contexts,
        });
    }

    #[test]
    fn closes_and_flushes(
        flags: u16, file_id in file_id(), times: [u64; 4], sizes: [u64; 2], attributes: u32,
    ) {
        assert_message!(close::Request, close::Request { flags: close::Flags(flags), file_id });
        assert_message!(close::Response, close::Response {
            flags: close::Flags(flags),
            creation_time: FileTime(times[0]),
            last_access_time: FileTime(times[1]),
            last_write_time: FileTime(times[2]),
            change_time: FileTime(times[3]),
            allocation_size: sizes[0],
            end_of_file: sizes[1],
            file_attributes: FileAttributes(attributes),
        });
        assert_message!(flush::Request, flush::Request { file_id });
        assert_message!(flush::Response, flush::Response);
    }

    #[test]
    fn reads(
        padding: u8, flags: u8, length: u32, offset: u64, file_id in file_id(), minimum_count: u32,
        remaining_bytes: u32, info in bytes(), payload in bytes(), response_flags: u32,
    ) {
        let channel = if info.is_empty() { read::Channel::NONE } else { read::Channel::RDMA_V1 };
        assert_message!(read::Request<'_>, read::Request {
            padding, flags: read::Flags(flags), length, offset, file_id, minimum_count, channel, remaining_bytes,
            channel_info: &info,
        });
        assert_message!(read::Response, read::Response {
            data_offset: padding, data_length: length, data_remaining: remaining_bytes,
            flags: read::ResponseFlags(response_flags),
        });
        let response = read::Response::inline(payload.len() as u32);
        let mut bytes = vec![0; HEADER_LEN];
        response.encode(&mut bytes);
        prop_assert_eq!(bytes.len(), HEADER_LEN + read::RESPONSE_FIXED_LEN);
        bytes.extend_from_slice(&payload);
        prop_assert_eq!(response.data(&bytes), Ok(payload.as_slice()));
    }

    #[test]
    fn writes(
        offset: u64, file_id in file_id(), remaining_bytes: u32, flags: u32, info in bytes(), payload in bytes(),
        count: u32,
    ) {
        let request = write::Request {
            data_offset: write::REQUEST_DATA_OFFSET + info.len() as u16,
            length: payload.len() as u32,
            offset,
            file_id,
            channel: if info.is_empty() { read::Channel::NONE } else { read::Channel::RDMA_V1_INVALIDATE },
            remaining_bytes,
            flags: write::Flags(flags),
            channel_info: &info,
        };
        assert_message!(write::Request<'_>, request);
        let mut bytes = vec![0; HEADER_LEN];
        request.encode(&mut bytes);
        if !payload.is_empty() {
            prop_assert_eq!(request.data(&bytes).map_err(|e| e.fault), Err(Fault::Truncated));
        }
        bytes.extend_from_slice(&payload);
        prop_assert_eq!(request.data(&bytes), Ok(payload.as_slice()));
        assert_message!(write::Response, write::Response { count, remaining: remaining_bytes });
    }

    #[test]
    fn locks(lock_sequence: u32, file_id in file_id(), locks in vec(any::<(u64, u64, u32)>(), 0..20)) {
        let locks = locks
            .into_iter()
            .map(|(offset, length, flags)| lock::LockElement { offset, length, flags: lock::LockFlags(flags) })
            .collect();
        assert_message!(lock::Request, lock::Request { lock_sequence, file_id, locks });
        assert_message!(lock::Response, lock::Response);
    }

    #[test]
    fn ioctls(
        code: u32, file_id in file_id(), input in bytes(), output in bytes(), most: [u32; 2], flags: u32,
    ) {
        assert_message!(ioctl::Request<'_>, ioctl::Request {
            ctl_code: fsctl::FsctlCode(code), file_id, input: &input, max_input_response: most[0], output: &output,
            max_output_response: most[1], flags: ioctl::Flags(flags),
        });
        assert_message!(ioctl::Response<'_>, ioctl::Response {
            ctl_code: fsctl::FsctlCode(code), file_id, input: &input, output: &output, flags,
        });
    }

    #[test]
    fn directory_and_information_messages(
        class: u8, flags: u8, index: u32, file_id in file_id(), length: u32, file_name in name(), data in bytes(),
        more: u32, info_type: u8,
    ) {
        assert_message!(query_directory::Request, query_directory::Request {
            file_information_class: FileInformationClass(class), flags: query_directory::Flags(flags),
            file_index: index, file_id, output_buffer_length: length, file_name,
        });
        assert_message!(query_directory::Response<'_>, query_directory::Response { output_buffer: &data });
        assert_message!(change_notify::Request, change_notify::Request {
            flags: change_notify::Flags(flags.into()), output_buffer_length: length, file_id,
            completion_filter: change_notify::CompletionFilter(more),
        });
        assert_message!(change_notify::Response<'_>, change_notify::Response { output_buffer: &data });
        assert_message!(query_info::Request<'_>, query_info::Request {
            info_type: query_info::InfoType(info_type), file_info_class: class, output_buffer_length: length,
            additional_information: more, flags: query_info::Flags(index), file_id, input_buffer: &data,
        });
        assert_message!(query_info::Response<'_>, query_info::Response { output_buffer: &data });
        assert_message!(set_info::Request<'_>, set_info::Request {
            info_type: query_info::InfoType(info_type), file_info_class: class, additional_information: more,
            file_id, buffer: &data,
        });
        assert_message!(set_info::Response, set_info::Response);
    }

    #[test]
    fn oplock_and_lease_breaks(level: u8, file_id in file_id(), key: [u8; 16], n: [u32; 6], new_epoch: u16) {
        let oplock = oplock_break::OplockBreak { oplock_level: create::OplockLevel(level), file_id };
        let acknowledgment = oplock_break::LeaseBreakAcknowledgment { lease_key: key, lease_state: LeaseState(n[0]) };
        let notification = oplock_break::LeaseBreakNotification {
            new_epoch,
            flags: oplock_break::LeaseBreakFlags(n[0]),
            lease_key: key,
            current_lease_state: LeaseState(n[1]),
            new_lease_state: LeaseState(n[2]),
            break_reason: n[3],
            access_mask_hint: AccessMask(n[4]),
            share_mask_hint: ShareAccess(n[5]),
        };
        assert_message!(oplock_break::Request, oplock_break::Request::Oplock(oplock));
        assert_message!(oplock_break::Request, oplock_break::Request::Lease(acknowledgment));
        assert_message!(oplock_break::Notification, oplock_break::Notification::Oplock(oplock));
        assert_message!(oplock_break::Notification, oplock_break::Notification::Lease(notification));
    }

    #[test]
    fn errors(contexts in vec((any::<u32>(), bytes()), 0..8), error_context_count: u8, data in bytes(), n: u32,
        names in (name(), name()), unparsed: u16) {
        assert_message!(error::Response<'_>, error::Response { error_context_count, error_data: &data });
        let contexts: Vec<_> = contexts
            .iter()
            .map(|(id, data)| error::ErrorContext { error_id: error::ErrorId(*id), error_context_data: data })
            .collect();
        let mut error_data = Vec::new();
        error::ErrorContext::encode_list(&contexts, &mut error_data);
        let response = error::Response { error_context_count: contexts.len() as u8, error_data: &error_data };
        prop_assert_eq!(error::ErrorContext::parse_list(&response), Ok(contexts));
        assert_structure!(error::SymbolicLinkError, error::SymbolicLinkError {
            unparsed_path_length: unparsed, flags: n, substitute_name: names.0, print_name: names.1,
        });
    }

    #[test]
    fn compounds(bodies in vec(bytes(), 1..10)) {
        let mut frame = Vec::new();
        let mut starts = Vec::new();
        for (index, body) in bodies.iter().enumerate() {
            let start = frame.len();
            starts.push(start);
            Header::request(Command::ECHO, index as u64).encode(&mut frame);
            frame.extend_from_slice(body);
            if index + 1 < bodies.len() {
                compound::chain(&mut frame, start);
            }
        }
        let ranges: Vec<_> = compound::split(&frame).collect::<Result<_, _>>().expect("written as the rules say");
        prop_assert_eq!(ranges.iter().map(|range| range.start).collect::<Vec<_>>(), starts);
        prop_assert_eq!(ranges.last().map(|range| range.end), Some(frame.len()));
        for (index, (range, body)) in ranges.into_iter().zip(&bodies).enumerate() {
            let message = &frame[range];
            prop_assert_eq!(Header::parse(message).map(|header| header.message_id), Ok(index as u64));
            prop_assert!(message[HEADER_LEN..].starts_with(body));
        }
    }

    #[test]
    fn structures_of_fixed_size(bytes in vec(any::<u8>(), 128)) {
        /// Decodes, encodes and decodes again. The encoded length is `LEN`.
        macro_rules! fixed {
            ($($structure:ty),+ $(,)?) => {$(
                let value = <$structure>::parse(&bytes).expect("any bytes are one of these");
                let mut again = Vec::new();
                value.encode(&mut again);
                prop_assert_eq!(again.len(), <$structure>::LEN);
                prop_assert_eq!(<$structure>::parse(&again), Ok(value));
                let short = &bytes[..<$structure>::LEN - 1];
                prop_assert_eq!(<$structure>::parse(short).map_err(|e| e.fault), Err(Fault::Truncated));
            )+};
        }
        fixed!(
            file_info::FileBasicInformation, file_info::FileStandardInformation, file_info::FileInternalInformation,
            file_info::FileEaInformation, file_info::FileAccessInformation, file_info::FilePositionInformation,
            file_info::FileModeInformation, file_info::FileAlignmentInformation,
            file_info::FileNetworkOpenInformation, file_info::FileAttributeTagInformation,
            file_info::FileCompressionInformation, file_info::FileAllocationInformation,
            file_info::FileEndOfFileInformation, file_info::FileValidDataLengthInformation,
            file_info::FileDispositionInformation, file_info::FileDispositionInformationEx,
            file_info::FileIdInformation, file_info::FileStandardLinkInformation, file_info::FilePipeInformation,
            file_info::FilePipeLocalInformation, fs_info::FileFsSizeInformation,
            fs_info::FileFsFullSizeInformation, fs_info::FileFsDeviceInformation,
            fs_info::FileFsControlInformation, fs_info::FileFsObjectIdInformation,
            fs_info::FileFsSectorSizeInformation, fsctl::ValidateNegotiateInfoResponse, fsctl::ResumeKeyResponse,
            fsctl::CopyChunk, fsctl::CopyChunkResponse, fsctl::FileRange, fsctl::ZeroData, fsctl::DuplicateExtents,
            fsctl::FileLevelTrim, fsctl::FileLevelTrimOutput, fsctl::ObjectIdBuffer, fsctl::ResiliencyRequest,
            fsctl::CompressionState, fsctl::IntegrityInformation, fsctl::SetIntegrityInformation, lock::LockElement,
        );
    }

    #[test]
    fn information_with_names(
        name in name(), other in name(), flag: bool, n: [u32; 3], big: [u64; 2], streams in vec((any::<(u64, u64)>(), name()), 0..6),
    ) {
        assert_structure!(name_info::FileNameInformation, name_info::FileNameInformation { file_name: name.clone() });
        assert_structure!(name_info::FileRenameInformation, name_info::FileRenameInformation {
            replace_if_exists: flag, root_directory: big[0], file_name: name.clone(),
        });
        assert_structure!(name_info::FileRenameInformationEx, name_info::FileRenameInformationEx {
            flags: name_info::RenameFlags(n[0]), root_directory: big[0], file_name: name.clone(),
        });
        assert_structure!(file_info::FileAllInformation, file_info::FileAllInformation {
            internal: file_info::FileInternalInformation { index_number: big[0] },
            access: file_info::FileAccessInformation { access_flags: AccessMask(n[0]) },
            alignment: file_info::FileAlignmentInformation { alignment_requirement: n[1] },
            name: name.clone(),
            ..file_info::FileAllInformation::default()
        });
        assert_structure!(fs_info::FileFsVolumeInformation, fs_info::FileFsVolumeInformation {
            volume_creation_time: FileTime(big[0]), volume_serial_number: n[0], supports_objects: flag,
            volume_label: name.clone(),
        });
        assert_structure!(fs_info::FileFsLabelInformation, fs_info::FileFsLabelInformation {
            volume_label: name.clone(),
        });
        assert_structure!(fs_info::FileFsAttributeInformation, fs_info::FileFsAttributeInformation {
            file_system_attributes: fs_info::FileSystemAttributes(n[0]), maximum_component_name_length: n[1],
            file_system_name: name.clone(),
        });
        assert_structure!(reparse::SymbolicLink, reparse::SymbolicLink {
            substitute_name: name.clone(), print_name: other, flags: n[2],
        });
        assert_structure!(fsctl::PipeWait, fsctl::PipeWait { timeout: big[1], timeout_specified: flag, name });
        let streams: Vec<_> = streams
            .into_iter()
            .map(|((stream_size, stream_allocation_size), stream_name)| name_info::FileStreamInformation {
                stream_size, stream_allocation_size, stream_name,
            })
            .collect();
        assert_list!(name_info::FileStreamInformation, streams);
    }

    #[test]
    fn extended_attributes(list in vec((any::<u8>(), bytes(), bytes()), 0..10)) {
        let full: Vec<_> = list
            .iter()
            .map(|(flags, name, value)| ea::FullEa { flags: ea::EaFlags(*flags), name, value })
            .collect();
        assert_list!(ea::FullEa<'_>, full);
        let names: Vec<_> = list.iter().map(|(_, name, _)| ea::GetEa { name }).collect();
        assert_list!(ea::GetEa<'_>, names);
    }

    #[test]
    fn changes(list in vec((any::<u32>(), name()), 0..10)) {
        let changes: Vec<_> = list
            .into_iter()
            .map(|(action, file_name)| notify::FileNotifyInformation { action: notify::NotifyAction(action), file_name })
            .collect();
        let mut bytes = Vec::new();
        prop_assert!(notify::FileNotifyInformation::encode_list(&changes, &mut bytes, usize::MAX));
        let len = bytes.len();
        let again = notify::FileNotifyInformation::parse_list(&bytes);
        prop_assert_eq!(again.as_ref(), Ok(&changes));
        // Room for exactly this much, and for one byte less.
        prop_assert!(notify::FileNotifyInformation::encode_list(&changes, &mut Vec::new(), len));
        if len > 0 {
            let mut out = vec![1];
            prop_assert!(!notify::FileNotifyInformation::encode_list(&changes, &mut out, len - 1));
            prop_assert_eq!(out, vec![1]);
        }
    }

    #[test]
    fn controls(
        n: [u32; 3], guid: [u8; 16], dialects in vec(any::<u16>(), 0..30), key in vec(any::<u8>(), 24),
        chunks in vec(any::<(u64, u64, u32)>(), 0..20), tokens in vec("[@A-Z0-9.-]{1,24}", 0..5), data in bytes(),
        addresses in vec(any::<(u32, u64, bool, u128, u16)>(), 0..6), path in "[a-z\\\\]{0,30}",
    ) {
        assert_structure!(fsctl::ValidateNegotiateInfoRequest, fsctl::ValidateNegotiateInfoRequest {
            capabilities: Capabilities(n[0]), guid, security_mode: SecurityMode(n[1] as u16),
            dialects: dialects.into_iter().map(Dialect).collect(),
        });
        assert_structure!(fsctl::CopyChunkRequest, fsctl::CopyChunkRequest {
            source_key: key.try_into().expect("24 bytes"),
            chunks: chunks
                .into_iter()
                .map(|(source_offset, target_offset, length)| {
                    fsctl::CopyChunk { source_offset, target_offset, length }
                })
                .collect(),
        });
        assert_structure!(fsctl::SnapshotArray, fsctl::SnapshotArray::complete(tokens));
        assert_structure!(fsctl::DfsReferralRequest, fsctl::DfsReferralRequest {
            max_referral_level: n[0] as u16, request_file_name: path,
        });
        assert_structure!(reparse::ReparseDataBuffer<'_>, reparse::ReparseDataBuffer {
            reparse_tag: reparse::ReparseTag(n[0]), data: &data,
        });
        let interfaces: Vec<_> = addresses
            .into_iter()
            .map(|(if_index, link_speed_bps, v6, address, port)| fsctl::NetworkInterfaceInfo {
                if_index,
                capability: fsctl::InterfaceCapability(n[2]),
                link_speed_bps,
                sockaddr: if v6 {
                    fsctl::SocketAddress::V6 {
                        port, flow_info: n[0], address: address.into(), scope_id: n[1],
                    }
                } else {
                    fsctl::SocketAddress::V4 { port, address: (address as u32).into() }
                },
            })
            .collect();
        assert_list!(fsctl::NetworkInterfaceInfo, interfaces);
    }

    #[test]
    fn security_descriptors(
        control: u16, owner: Option<(u32, Vec<u32>)>, group: Option<(u32, Vec<u32>)>,
        aces in vec((any::<u8>(), any::<u32>(), any::<u32>(), bytes()), 0..10), with_dacl: bool, with_sacl: bool,
    ) {
        let sid = |(authority, mut sub_authorities): (u32, Vec<u32>)| {
            sub_authorities.truncate(15);
            security::Sid { identifier_authority: u64::from(authority) << 8, sub_authorities }
        };
        let aces: Vec<_> = aces
            .into_iter()
            .map(|(flags, mask, sub, data)| security::Ace {
                ace_type: if flags & 1 == 0 {
                    security::AceType::ACCESS_DENIED
                } else {
                    security::AceType::SYSTEM_RESOURCE_ATTRIBUTE
                },
                ace_flags: security::AceFlags(flags),
                body: if flags & 1 == 0 {
                    security::AceBody::Basic { mask: AccessMask(mask), sid: security::Sid::unix_user(sub) }
                } else {
                    security::AceBody::Other(data)
                },
            })
            .collect();
        assert_structure!(security::SecurityDescriptor, security::SecurityDescriptor {
            control: security::Control(control) | security::Control::SELF_RELATIVE,
            owner: owner.map(sid),
            group: group.map(sid),
            sacl: with_sacl.then(|| security::Acl { acl_revision: 2, aces: vec![] }),
            dacl: with_dacl.then_some(security::Acl { acl_revision: 4, aces }),
        });
    }

    #[test]
    fn directory_listings(
        class in prop::sample::select(vec![1_u8, 2, 3, 12, 37, 38, 60, 100]), limit in 0_usize..4000,
        entries in vec((name(), any::<[u64; 6]>(), any::<[u32; 4]>(), any::<u128>(), "[A-Z0-9~.]{0,12}"), 0..20),
    ) {
        let class = FileInformationClass(class);
        let entries: Vec<_> = entries
            .into_iter()
            .map(|(name, big, n, file_id, short_name)| {
                expected_of(class, DirEntry {
                    file_index: n[0],
                    creation_time: FileTime(big[0]),
                    last_access_time: FileTime(big[1]),
                    last_write_time: FileTime(big[2]),
                    change_time: FileTime(big[3]),
                    end_of_file: big[4],
                    allocation_size: big[5],
                    file_attributes: FileAttributes(n[1]),
                    ea_size: n[2],
                    reparse_tag: reparse::ReparseTag(n[3]),
                    short_name: short_name.into(),
                    file_id,
                    posix: PosixFields { device_id: n[0], hard_links: n[1], mode: n[2], uid: n[3], gid: n[0] },
                    name: name.into(),
                })
            })
            .collect();
        // The bytes before it do not matter.
        let mut out = vec![0xee; 13];
        let mut encoder = DirEncoder::new(class, &mut out, limit).expect("a class of directory entries");
        let fitting: Vec<_> = entries.iter().take_while(|entry| encoder.push(entry)).cloned().collect();
        prop_assert_eq!(encoder.is_empty(), fitting.is_empty());
        let listing = &out[13..];
        prop_assert!(listing.len() <= limit);
        if let Some(refused) = entries.get(fitting.len()) {
            let fixed = DirEncoder::fixed_len(class).expect("a class of directory entries");
            let needs = listing.len().next_multiple_of(8) + fixed + utf16::encoded_len(&refused.name);
            prop_assert!(needs > limit, "an entry that fits is written");
        }
        prop_assert_eq!(parse_entries(class, listing), Ok(fitting));
    }

    #[test]
    fn names(name in any::<String>()) {
        let bytes = utf16::to_vec(&name);
        prop_assert_eq!(bytes.len(), utf16::encoded_len(&name));
        prop_assert_eq!(utf16::decode(&bytes), Ok(name));
    }

    #[test]
    fn invalid_utf16_is_refused_as_a_lone_surrogate(units in vec(any::<u16>(), 0..40)) {
        let bytes: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        match String::from_utf16(&units) {
            Ok(name) => prop_assert_eq!(utf16::decode(&bytes), Ok(name)),
            Err(_) => prop_assert_eq!(utf16::decode(&bytes).map_err(|e| e.fault), Err(Fault::Surrogate)),
        }
    }

    #[test]
    fn unix_times(seconds in -11_644_473_600_i64..900_000_000_000, hundreds in 0_u32..10_000_000) {
        let time = FileTime::from_unix(seconds, hundreds * 100 + 99);
        prop_assert_eq!(time.to_unix(), (seconds, hundreds * 100));
    }
}

/// `entry`, with default values in the fields that `class` does not have.
fn expected_of(class: FileInformationClass, entry: DirEntry<'_>) -> DirEntry<'_> {
    let name_only =
        DirEntry { file_index: entry.file_index, name: entry.name.clone(), ..DirEntry::default() };
    let id_64 = u128::from(entry.file_id as u64);
    let plain = DirEntry {
        ea_size: 0,
        reparse_tag: reparse::ReparseTag::default(),
        short_name: "".into(),
        file_id: 0,
        posix: PosixFields::default(),
        ..entry.clone()
    };
    match class {
        FileInformationClass::FILE_NAMES_INFORMATION => name_only,
        FileInformationClass::FILE_DIRECTORY_INFORMATION => plain,
        FileInformationClass::FILE_FULL_DIRECTORY_INFORMATION => DirEntry { ea_size: entry.ea_size, ..plain },
        FileInformationClass::FILE_ID_FULL_DIRECTORY_INFORMATION => {
            DirEntry { ea_size: entry.ea_size, file_id: id_64, ..plain }
        }
        FileInformationClass::FILE_BOTH_DIRECTORY_INFORMATION => {
            DirEntry { ea_size: entry.ea_size, short_name: entry.short_name, ..plain }
        }
        FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION => {
            DirEntry { ea_size: entry.ea_size, short_name: entry.short_name, file_id: id_64, ..plain }
        }
        FileInformationClass::FILE_POSIX_INFORMATION => {
            DirEntry { reparse_tag: entry.reparse_tag, file_id: id_64, posix: entry.posix, ..plain }
        }
        _ => DirEntry { short_name: "".into(), posix: PosixFields::default(), ..entry },
    }
}

/// Messages without content.
#[test]
fn empty_messages() {
    macro_rules! empty {
        ($($message:path),+) => {$(
            let mut bytes = vec![0; HEADER_LEN];
            $message.encode(&mut bytes);
            assert_eq!(<$message>::parse(&bytes), Ok($message));
            assert_eq!(bytes[HEADER_LEN..], [4, 0, 0, 0]);
            assert!(<$message>::parse(&bytes[..HEADER_LEN + 3]).is_err());
        )+};
    }
    empty!(
        logoff::Request,
        logoff::Response,
        tree_disconnect::Request,
        tree_disconnect::Response,
        cancel::Request,
        echo::Request,
        echo::Response
    );
}

#[test]
fn times_outside_the_filetime_range_are_clamped() {
    assert_eq!(FileTime::from_unix(i64::MIN, 0), FileTime(0));
    assert_eq!(FileTime::from_unix(i64::MAX, 999_999_999), FileTime(i64::MAX as u64));
    assert_eq!(FileTime::from_unix(0, 0), FileTime(116_444_736_000_000_000));
    assert_eq!(FileTime(0).to_unix(), (-11_644_473_600, 0));
}

#[test]
fn malformed_compounds_are_refused() {
    let two = |next: u32| {
        let mut frame = Vec::new();
        Header { next_command: next, ..Header::request(Command::ECHO, 0) }.encode(&mut frame);
        frame.extend_from_slice(&[0; 8]);
        Header::request(Command::ECHO, 1).encode(&mut frame);
        compound::split(&frame).map(|range| range.map_err(|e: Malformed| e.fault)).collect::<Vec<_>>()
    };
    assert_eq!(two(72), [Ok(0..72), Ok(72..136)]);
    assert_eq!(two(0), [Ok(0..136)]);
    assert_eq!(two(68), [Err(Fault::Offset)], "not aligned");
    assert_eq!(two(56), [Err(Fault::Offset)], "into the header itself");
    assert_eq!(two(80), [Err(Fault::Truncated)], "less than a header behind it");
    assert_eq!(two(u32::MAX - 7), [Err(Fault::Truncated)]);
    assert_eq!(compound::split(&[0; 63]).collect::<Vec<_>>().len(), 1);
}
