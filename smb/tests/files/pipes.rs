//! Named pipes on IPC$.

use forebay_smb::ids::FileId;
use forebay_smb::limits::PIPES_PER_SESSION_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::fsctl::FsctlCode;
use forebay_smb::wire::{Command, ioctl, read};

use crate::calls::{Lab, close, file, query_file, read as read_pipe, success, write};
use crate::support::Client;

/// A BIND to the server service, and the start of the answer.
const BIND: &[u8] =
    b"\x05\0\x0b\x03\x10\0\0\0\x48\0\0\0\x01\0\0\0\xb8\x10\xb8\x10\0\0\0\0\x01\0\0\0\0\0\x01\0\
    \xc8\x4f\x32\x4b\x70\x16\xd3\x01\x12\x78\x5a\x47\xbf\x6e\xe1\x88\x03\0\0\0\
    \x04\x5d\x88\x8a\xeb\x1c\xc9\x11\x9f\xe8\x08\0\x2b\x10\x48\x60\x02\0\0\0";
const ACKNOWLEDGED: &[u8] = b"\x05\0\x0c\x03";
/// NetrShareEnum of level 0.
const SHARE_ENUM: &[u8] = b"\x05\0\0\x03\x10\0\0\0\x38\0\0\0\x02\0\0\0\x20\0\0\0\0\0\x0f\0\
    \0\0\0\0\0\0\0\0\0\0\0\0\x04\0\x02\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\0\0\0\0";

/// Connects to IPC$ instead of the volume. Returns the volume's tree.
fn ipc(client: &mut Client) -> u32 {
    let volume = client.tree_id;
    success(&client.tree_connect("IPC$").unwrap()).unwrap();
    volume
}

fn open(client: &mut Client, name: &str) -> Result<FileId, NtStatus> {
    file(name).send(client).map(|opened| opened.id)
}

/// FSCTL_PIPE_TRANSCEIVE.
fn transceive(client: &mut Client, id: FileId, input: &[u8], most: u32) -> (NtStatus, Vec<u8>) {
    let mut body = Vec::new();
    ioctl::Request {
        ctl_code: FsctlCode::PIPE_TRANSCEIVE,
        file_id: id,
        input,
        max_input_response: 0,
        output: &[],
        max_output_response: most,
        flags: ioctl::Flags::IS_FSCTL,
    }
    .encode(&mut body);
    let answer = client.call(Command::IOCTL, &body).unwrap();
    match answer.status() {
        status @ (NtStatus::SUCCESS | NtStatus::BUFFER_OVERFLOW) => {
            (status, ioctl::Response::parse(&answer.message).unwrap().output.to_vec())
        }
        status => (status, Vec::new()),
    }
}

fn has(answer: &[u8], text: &str) -> bool {
    let text: Vec<u8> = text.encode_utf16().flat_map(u16::to_le_bytes).collect();
    answer.windows(text.len()).any(|window| window == text)
}

#[test]
fn a_client_lists_shares_over_srvsvc() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    ipc(&mut client);
    let pipe = open(&mut client, "srvsvc").unwrap();
    let standard =
        query_file(&mut client, pipe, FileInformationClass::FILE_STANDARD_INFORMATION, 24).unwrap();
    assert_eq!(standard.len(), 24);
    write(&mut client, pipe, 0, BIND).unwrap();
    assert!(read_pipe(&mut client, pipe, 0, 4280).unwrap().starts_with(ACKNOWLEDGED));
    assert_eq!(read_pipe(&mut client, pipe, 0, 4280), Err(NtStatus::PIPE_EMPTY));
    let (status, shares) = transceive(&mut client, pipe, SHARE_ENUM, 4280);
    assert_eq!(status, NtStatus::SUCCESS);
    assert!(has(&shares, "vol") && has(&shares, "IPC$"));
    // Piece by piece, like a client with a small buffer.
    let (status, first) = transceive(&mut client, pipe, SHARE_ENUM, 100);
    assert_eq!((status, first.len()), (NtStatus::BUFFER_OVERFLOW, 100));
    assert_eq!(transceive(&mut client, pipe, SHARE_ENUM, 100).0, NtStatus::PIPE_BUSY);
    let mut body = Vec::new();
    read::Request {
        padding: 0,
        flags: read::Flags::empty(),
        length: 4280,
        offset: 0,
        file_id: pipe,
        minimum_count: 0,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        channel_info: &[],
    }
    .encode(&mut body);
    let answer = client.call(Command::READ, &body).unwrap();
    let rest = read::Response::parse(&answer.message).unwrap().data(&answer.message).unwrap().to_vec();
    assert_eq!([first, rest].concat(), shares);
    close(&mut client, pipe).unwrap();
    assert_eq!(write(&mut client, pipe, 0, BIND), Err(NtStatus::FILE_CLOSED));
}

#[test]
fn only_known_pipes_exist_and_only_on_ipc() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    let volume = ipc(&mut client);
    for name in ["lsarpc", "", "vol"] {
        assert_eq!(open(&mut client, name), Err(NtStatus::OBJECT_NAME_NOT_FOUND), "{name:?}");
    }
    let pipe = open(&mut client, "WKSSVC").unwrap();
    let ipc = std::mem::replace(&mut client.tree_id, volume);
    for status in [
        write(&mut client, pipe, 0, BIND).unwrap_err(),
        close(&mut client, pipe).unwrap_err(),
        transceive(&mut client, pipe, BIND, 100).0,
    ] {
        assert!(matches!(status, NtStatus::FILE_CLOSED | NtStatus::NOT_SUPPORTED), "{status:?}");
    }
    let file = open(&mut client, "srvsvc").unwrap();
    write(&mut client, file, 0, b"a file").unwrap();
    client.tree_id = ipc;
    assert_eq!(read_pipe(&mut client, file, 0, 6), Err(NtStatus::FILE_CLOSED));
}

#[test]
fn a_malformed_pdu_closes_the_pipe() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    ipc(&mut client);
    let pipe = open(&mut client, "srvsvc").unwrap();
    assert_eq!(write(&mut client, pipe, 0, &[0xff; 100]), Err(NtStatus::PIPE_DISCONNECTED));
    assert_eq!(close(&mut client, pipe), Err(NtStatus::FILE_CLOSED));
    // An incomplete PDU waits for the rest.
    let pipe = open(&mut client, "srvsvc").unwrap();
    assert_eq!(transceive(&mut client, pipe, &BIND[..20], 100), (NtStatus::SUCCESS, Vec::new()));
    write(&mut client, pipe, 0, &BIND[20..]).unwrap();
    assert!(read_pipe(&mut client, pipe, 0, 100).unwrap().starts_with(ACKNOWLEDGED));
}

#[test]
fn pipes_are_limited_per_session_and_end_with_their_tree() {
    let mut lab = Lab::new();
    let mut client = lab.client();
    ipc(&mut client);
    for _ in 0..3 {
        for _ in 0..PIPES_PER_SESSION_MAX {
            open(&mut client, "srvsvc").unwrap();
        }
        assert_eq!(open(&mut client, "srvsvc"), Err(NtStatus::INSUFFICIENT_RESOURCES));
        success(&client.call(Command::TREE_DISCONNECT, &[4, 0, 0, 0]).unwrap()).unwrap();
        ipc(&mut client);
    }
}
