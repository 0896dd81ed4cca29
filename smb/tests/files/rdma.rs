//! READ and WRITE with payload over RDMA ([MS-SMB2] 3.3.5.12, 3.3.5.13; [MS-SMBD] 2.2.3.1).

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::read::{self, Channel};
use forebay_smb::wire::write;
use forebay_smb::wire::{Command, Dialect};
use forebay_smbdirect::wire::{BufferDescriptor, Token};

use crate::calls::{self, Lab, file, success};
use crate::support::{Client, MEMORY_AT};

const V1: Channel = Channel::RDMA_V1;
const INVALIDATE: Channel = Channel::RDMA_V1_INVALIDATE;

/// Pieces of the client's memory: the start and length of each.
pub fn descriptors(pieces: &[(usize, u32)]) -> Vec<u8> {
    let encode = |(index, (at, length)): (usize, &(usize, u32))| {
        let offset = MEMORY_AT + *at as u64;
        BufferDescriptor { offset, token: Token(100 + index as u32), length: *length }.encode()
    };
    pieces.iter().enumerate().flat_map(encode).collect()
}

pub fn charge(length: u32) -> u16 {
    length.div_ceil(65536).max(1) as u16
}

fn read_by(
    c: &mut Client,
    file_id: FileId,
    length: u32,
    channel: Channel,
    info: &[u8],
) -> Result<u32, NtStatus> {
    let mut body = Vec::new();
    read::Request {
        padding: 0,
        flags: read::Flags::empty(),
        length,
        offset: 0,
        file_id,
        minimum_count: 0,
        channel,
        remaining_bytes: 0,
        channel_info: info,
    }
    .encode(&mut body);
    let answer = c.call_charged(Command::READ, &body, charge(length)).expect("no reason to disconnect");
    success(&answer)?;
    let response = read::Response::parse(&answer.message).expect("well formed");
    assert_eq!(response.data(&answer.message).expect("well formed"), b"");
    Ok(response.data_remaining)
}

pub fn write_request(file_id: FileId, length: u32, channel: Channel, info: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    write::Request {
        data_offset: 0,
        length: 0,
        offset: 0,
        file_id,
        channel,
        remaining_bytes: length,
        flags: write::Flags::empty(),
        channel_info: info,
    }
    .encode(&mut body);
    body
}

fn write_by(
    c: &mut Client,
    file_id: FileId,
    length: u32,
    channel: Channel,
    info: &[u8],
) -> Result<u32, NtStatus> {
    let body = write_request(file_id, length, channel, info);
    let answer = c.call_charged(Command::WRITE, &body, charge(length)).expect("no reason to disconnect");
    success(&answer)?;
    Ok(write::Response::parse(&answer.message).expect("well formed").count)
}

/// A client over RDMA with 1 MiB of memory, and a file that it has open.
fn client(lab: &mut Lab, dialect: Dialect) -> (Client, FileId) {
    let mut c = lab.dialect(dialect);
    c.connection.set_over_rdma();
    c.memory = (0..1 << 20_u32).map(|i| ((i * 7) >> 3) as u8).collect();
    let f = file("f").id(&mut c);
    (c, f)
}

fn newest(lab: &mut Lab) -> (Client, FileId) {
    client(lab, Dialect::SMB3_1_1)
}

#[test]
fn payload_moves_between_the_file_and_client_memory() {
    let mut lab = Lab::new();
    let (mut c, f) = newest(&mut lab);
    // In pieces, out of order, longer than the requested length.
    let there = descriptors(&[(500_000, 100_000), (0, 200_001), (900_000, 100_000)]);
    assert_eq!(write_by(&mut c, f, 350_001, V1, &there), Ok(350_001));
    let expected = [&c.memory[500_000..600_000], &c.memory[..200_001], &c.memory[900_000..950_000]].concat();
    assert!(calls::read(&mut c, f, 0, 400_000).expect("the data") == expected);
    c.memory.fill(0);
    let back = descriptors(&[(1, 350_000), (700_000, 10)]);
    assert_eq!(read_by(&mut c, f, 350_010, V1, &back), Ok(350_001), "to the end of the file");
    assert!(c.memory[1..350_001] == expected[..350_000]);
    assert_eq!(c.memory[700_000..700_002], [expected[350_000], 0]);
    assert_eq!(c.memory[0], 0);
    assert!(c.invalidated.iter().all(Option::is_none), "no invalidation was requested");
}

#[test]
fn a_token_is_invalidated_on_request_even_after_a_failure() {
    let mut lab = Lab::new();
    let (mut c, f) = newest(&mut lab);
    let there = descriptors(&[(0, 4096), (8192, 4096)]);
    assert_eq!(read_by(&mut c, f, 8192, INVALIDATE, &there), Err(NtStatus::END_OF_FILE));
    assert_eq!(c.invalidated.pop(), Some(Some(Token(100))));
    assert_eq!(write_by(&mut c, f, 8192, INVALIDATE, &there), Ok(8192));
    assert_eq!(c.invalidated.pop(), Some(Some(Token(100))));
    assert_eq!(read_by(&mut c, f, 8192, INVALIDATE, &there), Ok(8192));
    assert_eq!(c.invalidated.pop(), Some(Some(Token(100))));
    assert_eq!(write_by(&mut c, f, 8193, INVALIDATE, &there), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(c.invalidated.pop(), Some(Some(Token(100))));
}

#[test]
fn unsupported_channels_are_refused() {
    let mut lab = Lab::new();
    let there = descriptors(&[(0, 4096)]);
    for (dialect, channel, status) in [
        (Dialect::SMB3_0, V1, None),
        (Dialect::SMB3_0, INVALIDATE, Some(NtStatus::INVALID_PARAMETER)),
        (Dialect::SMB3_0_2, INVALIDATE, None),
        (Dialect::SMB3_1_1, Channel::RDMA_TRANSFORM, Some(NtStatus::INVALID_PARAMETER)),
        (Dialect::SMB3_1_1, Channel(77), Some(NtStatus::INVALID_PARAMETER)),
    ] {
        let (mut c, f) = client(&mut lab, dialect);
        let expected = status.map_or(Ok(4096), Err);
        assert_eq!(write_by(&mut c, f, 4096, channel, &there), expected, "{dialect:?} {channel:?}");
        assert_eq!(read_by(&mut c, f, 4096, channel, &there), expected, "{dialect:?} {channel:?}");
    }
    let mut over_tcp = lab.client();
    let f = file("f").id(&mut over_tcp);
    lab.memory.take_log();
    assert_eq!(write_by(&mut over_tcp, f, 4096, V1, &there), Err(NtStatus::INVALID_PARAMETER));
    assert_eq!(read_by(&mut over_tcp, f, 4096, V1, &there), Err(NtStatus::INVALID_PARAMETER));
    assert!(lab.memory.take_log().is_empty(), "nothing reached the file system");
}

#[test]
fn invalid_buffer_descriptors_are_refused() {
    let mut lab = Lab::new();
    let (mut c, f) = newest(&mut lab);
    let wraps = BufferDescriptor { offset: u64::MAX, token: Token(1), length: 2 }.encode();
    let many = descriptors(&vec![(0, 1); 4000]);
    for (what, info) in [
        ("none", &[][..]),
        ("half of one", &descriptors(&[(0, 9000)])[..15]),
        ("one and a half", &[&descriptors(&[(0, 9000)])[..], &[0; 8]].concat()),
        ("too little memory", &descriptors(&[(0, 4000), (0, 95)])),
        ("around the end of the address space", &wraps),
        ("too many", &many),
    ] {
        lab.memory.take_log();
        assert_eq!(write_by(&mut c, f, 4096, V1, info), Err(NtStatus::INVALID_PARAMETER), "{what}");
        assert_eq!(read_by(&mut c, f, 4096, V1, info), Err(NtStatus::INVALID_PARAMETER), "{what}");
        assert!(lab.memory.take_log().is_empty(), "{what}");
    }
}

#[test]
fn an_rdma_write_carries_no_inline_payload_and_is_charged() {
    let mut lab = Lab::new();
    let (mut c, f) = newest(&mut lab);
    let there = descriptors(&[(0, 1 << 20)]);
    let mut with_length = write_request(f, 4096, V1, &there);
    with_length[4..8].copy_from_slice(&16_u32.to_le_bytes());
    let answer = c.call(Command::WRITE, &with_length).expect("no reason to disconnect");
    assert_eq!(answer.status(), NtStatus::INVALID_PARAMETER);
    // [MS-SMB2] 3.3.5.2.5: a megabyte costs 16 credits.
    let large = write_request(f, 1 << 20, V1, &there);
    let answer = c.call_charged(Command::WRITE, &large, 15).expect("no reason to disconnect");
    assert_eq!(answer.status(), NtStatus::INVALID_PARAMETER);
    assert_eq!(write_by(&mut c, f, 1 << 20, V1, &there), Ok(1 << 20));
    assert_eq!(write_by(&mut c, f, 0, V1, &there), Ok(0));
}

#[test]
fn protected_payload_is_refused_over_plain_rdma() {
    let mut lab = Lab::new();
    let there = descriptors(&[(0, 4096)]);
    let (mut c, f) = newest(&mut lab);
    c.seal = true;
    assert_eq!(write_by(&mut c, f, 4096, V1, &there), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(read_by(&mut c, f, 4096, V1, &there), Err(NtStatus::ACCESS_DENIED));
    let mut signed = Lab::with(|volume| volume.protection = forebay_smb::engine::Protection::Sign);
    let (mut c, f) = {
        let mut c = signed.client();
        c.connection.set_over_rdma();
        c.memory = vec![1; 4096];
        c.sign = true;
        let f = file("f").id(&mut c);
        (c, f)
    };
    assert_eq!(write_by(&mut c, f, 4096, V1, &there), Err(NtStatus::ACCESS_DENIED));
    assert_eq!(calls::write(&mut c, f, 0, &[2; 4096]), Ok(4096), "inline payload is allowed");
}
