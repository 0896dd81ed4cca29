//! One function per target.
//!
//! They assert more than the absence of panics: a parsed message is encoded and parsed again, and must be equal. A codec that
//! drops or invents a field would answer a request that was not sent.

use std::sync::Arc;

use forebay_smb::auth::{
    Acceptor, AcceptorConfig, ClientStep, Initiator, InitiatorConfig, Kerberos, Keytab, NtHash, Step,
};
use forebay_smb::crypto::SessionKey;
use forebay_smb::limits::RPC_ANSWER_BYTES_MAX;
use forebay_smb::rpc::{Association, Exposed, Interface, Share, ShareKind};
use forebay_smb::wire::create_context::{
    encode_request_chain, encode_response_chain, parse_request_chain, parse_response_chain,
};
use forebay_smb::wire::fscc::{
    FileInformationClass, directory, ea, file_info, fs_info, fsctl, name_info, notify, reparse, security,
};
use forebay_smb::wire::header::{self, Command, Header};
use forebay_smb::wire::transform::{CompressionHeader, FrameKind, TransformHeader};
use forebay_smb::wire::{
    FileTime, HEADER_LEN, cancel, change_notify, close, compound, create, echo, error, flush, ioctl, lock,
    logoff, negotiate, negotiate_context, oplock_break, query_directory, query_info, read, session_setup,
    set_info, smb1, tree_connect, tree_disconnect, utf16, write,
};

/// Parses `$bytes` as `$message`; the result must survive a round trip through encoding and parsing.
macro_rules! message {
    ($bytes:expr, $message:ty) => {
        if let Ok(first) = <$message>::parse($bytes) {
            // Offsets count from the header, which precedes the body.
            let mut again = vec![0; HEADER_LEN];
            first.encode(&mut again);
            assert_eq!(<$message>::parse(&again).as_ref(), Ok(&first), "written as {again:02x?}");
        }
    };
}

/// Same for a standalone structure.
macro_rules! structure {
    ($bytes:expr, $($structure:ty),+ $(,)?) => {$(
        if let Ok(first) = <$structure>::parse($bytes) {
            let mut again = Vec::new();
            first.encode(&mut again);
            assert_eq!(<$structure>::parse(&again).as_ref(), Ok(&first), "written as {again:02x?}");
        }
    )+};
}

/// Same for a list of structures.
macro_rules! list {
    ($bytes:expr, $($structure:ty),+ $(,)?) => {$(
        if let Ok(first) = <$structure>::parse_list($bytes) {
            let mut again = Vec::new();
            <$structure>::encode_list(&first, &mut again);
            assert_eq!(<$structure>::parse_list(&again).as_ref(), Ok(&first), "written as {again:02x?}");
        }
    )+};
}

/// A frame from a client: its kind, its messages, their headers and the requests in them.
pub fn frame(data: &[u8]) {
    match FrameKind::of(data) {
        Ok(FrameKind::Smb2) => {
            let mut end = 0;
            for range in compound::split(data).map_while(Result::ok) {
                assert_eq!(range.start, end, "messages lie one behind the other");
                end = range.end;
                request(&data[range]);
            }
        }
        Ok(FrameKind::Encrypted) => {
            structure!(data, TransformHeader);
            if let Ok(header) = TransformHeader::parse(data) {
                let _ = header.payload(data);
            }
        }
        Ok(FrameKind::Compressed) => structure!(data, CompressionHeader),
        Ok(FrameKind::Smb1) => {
            if let Ok(dialects) = smb1::parse_negotiate(data) {
                let mut again = Vec::new();
                smb1::encode_negotiate(&dialects, &mut again);
                assert_eq!(smb1::parse_negotiate(&again), Ok(dialects));
            }
        }
        Err(_) => {}
    }
}

fn request(msg: &[u8]) {
    structure!(msg, Header);
    let Ok(header) = Header::parse(msg) else { return };
    match header.command {
        Command::NEGOTIATE => message!(msg, negotiate::Request<'_>),
        Command::SESSION_SETUP => message!(msg, session_setup::Request<'_>),
        Command::LOGOFF => message!(msg, logoff::Request),
        Command::TREE_CONNECT => message!(msg, tree_connect::Request),
        Command::TREE_DISCONNECT => message!(msg, tree_disconnect::Request),
        Command::CREATE => message!(msg, create::Request<'_>),
        Command::CLOSE => message!(msg, close::Request),
        Command::FLUSH => message!(msg, flush::Request),
        Command::READ => message!(msg, read::Request<'_>),
        Command::WRITE => {
            message!(msg, write::Request<'_>);
            if let Ok(request) = write::Request::parse(msg) {
                let _ = request.data(msg);
            }
        }
        Command::LOCK => message!(msg, lock::Request),
        Command::IOCTL => message!(msg, ioctl::Request<'_>),
        Command::CANCEL => message!(msg, cancel::Request),
        Command::ECHO => message!(msg, echo::Request),
        Command::QUERY_DIRECTORY => message!(msg, query_directory::Request),
        Command::CHANGE_NOTIFY => message!(msg, change_notify::Request),
        Command::QUERY_INFO => message!(msg, query_info::Request<'_>),
        Command::SET_INFO => message!(msg, set_info::Request<'_>),
        Command::OPLOCK_BREAK => message!(msg, oplock_break::Request),
        _ => {}
    }
}

/// A response from a server: ours in tests, a hostile one in our own client role.
pub fn responses(data: &[u8]) {
    let Ok(header) = Header::parse(data) else { return };
    message!(data, error::Response<'_>);
    if let Ok(response) = error::Response::parse(data) {
        let _ = error::ErrorContext::parse_list(&response);
        structure!(response.error_data, error::SymbolicLinkError);
    }
    match header.command {
        Command::NEGOTIATE => message!(data, negotiate::Response<'_>),
        Command::SESSION_SETUP => message!(data, session_setup::Response<'_>),
        Command::LOGOFF => message!(data, logoff::Response),
        Command::TREE_CONNECT => message!(data, tree_connect::Response),
        Command::TREE_DISCONNECT => message!(data, tree_disconnect::Response),
        Command::CREATE => message!(data, create::Response<'_>),
        Command::CLOSE => message!(data, close::Response),
        Command::FLUSH => message!(data, flush::Response),
        Command::READ => {
            message!(data, read::Response);
            if let Ok(response) = read::Response::parse(data) {
                let _ = response.data(data);
            }
        }
        Command::WRITE => message!(data, write::Response),
        Command::LOCK => message!(data, lock::Response),
        Command::IOCTL => message!(data, ioctl::Response<'_>),
        Command::ECHO => message!(data, echo::Response),
        Command::QUERY_DIRECTORY => message!(data, query_directory::Response<'_>),
        Command::CHANGE_NOTIFY => message!(data, change_notify::Response<'_>),
        Command::QUERY_INFO => message!(data, query_info::Response<'_>),
        Command::SET_INFO => message!(data, set_info::Response),
        Command::OPLOCK_BREAK if header.message_id == header::UNSOLICITED_MESSAGE_ID => {
            message!(data, oplock_break::Notification);
        }
        Command::OPLOCK_BREAK => message!(data, oplock_break::Response),
        _ => {}
    }
}

/// A chain of create contexts, in the format of a request and of a response.
pub fn create_contexts(data: &[u8]) {
    if let Ok(first) = parse_request_chain(data) {
        let mut again = Vec::new();
        encode_request_chain(&first, &mut again);
        assert_eq!(parse_request_chain(&again), Ok(first));
    }
    if let Ok(first) = parse_response_chain(data) {
        let mut again = Vec::new();
        encode_response_chain(&first, &mut again);
        assert_eq!(parse_response_chain(&again), Ok(first));
    }
}

/// A list of negotiate contexts; the first byte is the declared count.
pub fn negotiate_contexts(data: &[u8]) {
    let Some((count, list)) = data.split_first() else { return };
    if let Ok(first) = negotiate_context::parse_contexts(list, u16::from(*count)) {
        let mut again = Vec::new();
        negotiate_context::encode_list(&first, &mut again);
        assert_eq!(negotiate_context::parse_contexts(&again, u16::from(*count)), Ok(first));
    }
}

/// Information classes, control structures and security descriptors, all parsed from the same bytes.
pub fn fscc(data: &[u8]) {
    file_information(data);
    directory_entries(data);
    controls(data);
    structure!(data, security::SecurityDescriptor, security::Sid);
    if let Ok(name) = utf16::decode(data) {
        assert_eq!(utf16::to_vec(&name), data);
    }
}

fn file_information(data: &[u8]) {
    structure!(
        data,
        file_info::FileAllInformation,
        file_info::FileBasicInformation,
        file_info::FileStandardInformation,
        file_info::FileNetworkOpenInformation,
        file_info::FileAttributeTagInformation,
        file_info::FileCompressionInformation,
        file_info::FileDispositionInformation,
        file_info::FileDispositionInformationEx,
        file_info::FileIdInformation,
        file_info::FileStandardLinkInformation,
        file_info::FilePipeLocalInformation,
        name_info::FileNameInformation,
        name_info::FileRenameInformation,
        name_info::FileRenameInformationEx,
        fs_info::FileFsVolumeInformation,
        fs_info::FileFsLabelInformation,
        fs_info::FileFsSizeInformation,
        fs_info::FileFsFullSizeInformation,
        fs_info::FileFsDeviceInformation,
        fs_info::FileFsAttributeInformation,
        fs_info::FileFsControlInformation,
        fs_info::FileFsObjectIdInformation,
        fs_info::FileFsSectorSizeInformation,
    );
    list!(data, name_info::FileStreamInformation, ea::FullEa<'_>, ea::GetEa<'_>);
    if let Ok(first) = notify::FileNotifyInformation::parse_list(data) {
        let mut again = Vec::new();
        assert!(notify::FileNotifyInformation::encode_list(&first, &mut again, usize::MAX));
        assert_eq!(notify::FileNotifyInformation::parse_list(&again), Ok(first));
    }
}

fn directory_entries(data: &[u8]) {
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
        if let Ok(first) = directory::parse_entries(class, data) {
            let mut again = Vec::new();
            let mut encoder = directory::DirEncoder::new(class, &mut again, usize::MAX)
                .expect("a class of directory entries");
            assert!(first.iter().all(|entry| encoder.push(entry)));
            assert_eq!(directory::parse_entries(class, &again), Ok(first));
        }
    }
}

fn controls(data: &[u8]) {
    structure!(
        data,
        fsctl::ValidateNegotiateInfoRequest,
        fsctl::ValidateNegotiateInfoResponse,
        fsctl::ResumeKeyResponse,
        fsctl::CopyChunkRequest,
        fsctl::CopyChunkResponse,
        fsctl::ZeroData,
        fsctl::DuplicateExtents,
        fsctl::FileLevelTrim,
        fsctl::ObjectIdBuffer,
        fsctl::ResiliencyRequest,
        fsctl::IntegrityInformation,
        fsctl::SetIntegrityInformation,
        fsctl::DfsReferralRequest,
        fsctl::SnapshotArray,
        fsctl::PipeWait,
        reparse::ReparseDataBuffer<'_>,
        reparse::SymbolicLink,
    );
    list!(data, fsctl::NetworkInterfaceInfo);
    let _ = fsctl::FileRange::parse_list(data);
}

/// The user who can log on in [`authenticate`], and the password.
pub const USER: &str = "carol";
/// See [`USER`].
pub const PASSWORD: &str = "forebay";
/// The time of all exchanges.
pub const NOW: u64 = 134_397_348_001_234_560;

/// The server's Kerberos keys. `corpus/authenticate/kerberos` contains a ticket for them.
const KEYTAB: &[u8] = include_bytes!("../corpus/keytab/one-server");

/// The server that [`authenticate`] attacks.
pub fn acceptor() -> Acceptor {
    let config = AcceptorConfig {
        nb_domain: "WORKGROUP".to_owned(),
        nb_computer: "STORE".to_owned(),
        dns_domain: "example.org".to_owned(),
        dns_computer: "store.example.org".to_owned(),
        target_names: vec!["store.example.org".to_owned()],
        ntlm: true,
        kerberos: Some(Arc::new(Kerberos::new(Keytab::parse(KEYTAB).expect("a good keytab")))),
    };
    Acceptor::new(&config, *b"\x01\x23\x45\x67\x89\xab\xcd\xef-unused-", FileTime(NOW))
}

/// The client that [`initiate`] attacks.
pub fn initiator(spnego: bool) -> Initiator {
    Initiator::new(InitiatorConfig {
        user: USER.to_owned(),
        domain: "WORKGROUP".to_owned(),
        workstation: "NODE-1".to_owned(),
        nt_hash: NtHash::from_password(PASSWORD),
        spnego,
        challenge: [0x11; 8],
        target_name: None,
        random_session_key: Some(SessionKey::new(&[0x22; 16])),
    })
}

/// Tokens in one input: each begins with its length in two bytes; the last may be truncated.
pub fn tokens(mut data: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (len, rest) = data.split_first_chunk::<2>()?;
        let (token, rest) = rest.split_at(usize::from(u16::from_le_bytes(*len)).min(rest.len()));
        data = rest;
        Some(token)
    })
}

/// Security tokens of a client; only the configured user is authenticated.
pub fn authenticate(data: &[u8]) {
    let mut acceptor = acceptor();
    let lookup = |user: &str, _: &str| match user {
        USER => vec![NtHash::from_password(PASSWORD)],
        _ => vec![],
    };
    for token in tokens(data) {
        if let Ok(Step::Done(authenticated)) = acceptor.step(token, &lookup) {
            assert_eq!(authenticated.user, USER);
        }
    }
}

/// A keytab, as installed by an administrator.
pub fn keytab(data: &[u8]) {
    if let Ok(keytab) = Keytab::parse(data) {
        assert!(!keytab.principals().is_empty());
    }
}

/// Security tokens of a server; the first byte of the input selects SPNEGO.
pub fn initiate(data: &[u8]) {
    let Some((spnego, data)) = data.split_first() else { return };
    let mut initiator = initiator(spnego & 1 == 1);
    let _ = initiator.first();
    let mut last = false;
    for token in tokens(data) {
        if last {
            let _ = initiator.finish(token);
        } else {
            last = matches!(initiator.step(token, NOW), Ok(ClientStep::Last(..)));
        }
    }
}

/// A pipe: the first byte selects the interface, the second the size of each write and read. The client reads after every
/// second write.
pub fn rpc(data: &[u8]) {
    let [interface, size, stream @ ..] = data else { return };
    let interface = if interface & 1 == 0 { Interface::Srvsvc } else { Interface::Wkssvc };
    let size = usize::from(*size).max(1);
    let share = |name: &str, kind| Share { name: name.to_owned(), kind, remark: String::new() };
    let shares = vec![share("vol", ShareKind::Disk), share("IPC$", ShareKind::Pipes)];
    let exposed = Exposed { server_name: "NODE1".to_owned(), shares };
    let mut pipe = Association::new(interface);
    for (turn, piece) in stream.chunks(size).enumerate() {
        if pipe.write(piece, &exposed).is_err() {
            break;
        }
        if turn % 2 == 1
            && let Some(message) = pipe.read(size)
        {
            assert!(!message.bytes.is_empty() && message.bytes.len() <= size);
            assert!(!message.more || pipe.is_readable());
        }
    }
    let mut unread = 0;
    while let Some(message) = pipe.read(usize::MAX) {
        unread += message.bytes.len();
    }
    // The last response may exceed the limit.
    assert!(unread <= RPC_ANSWER_BYTES_MAX + 8192);
}
