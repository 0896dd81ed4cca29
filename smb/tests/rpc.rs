//! Remote procedure calls over named pipes.
#![allow(clippy::unwrap_used, reason = "tests")]

use forebay_smb::limits::{
    RPC_ANSWER_BYTES_MAX, RPC_CONTEXTS_MAX, RPC_REQUEST_BYTES_MAX, RPC_WRITE_BYTES_MAX,
};
use forebay_smb::rpc::{Association, Broken, Exposed, Interface, Share, ShareKind};

const SRVSVC: &str = "c84f324b7016d30112785a47bf6ee18803000000";
const WKSSVC: &str = "98d0ff6b12a11036983346c3f87e345a01000000";
const NDR: &str = "045d888aeb1cc9119fe808002b10486002000000";
const NDR64: &str = "33057171babe37498319b5dbef9ccc3601000000";

const REQUEST: u8 = 0;
const BIND: u8 = 11;
const ALTER_CONTEXT: u8 = 14;
const WHOLE: u8 = 3;

fn exposed() -> Exposed {
    let share = |name: &str, kind, remark: &str| Share { name: name.into(), kind, remark: remark.into() };
    Exposed {
        server_name: "NODE1".into(),
        shares: vec![share("vol", ShareKind::Disk, ""), share("IPC$", ShareKind::Pipes, "Named pipes")],
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn pdu(packet_type: u8, flags: u8, body: &[u8]) -> Vec<u8> {
    let mut pdu = vec![5, 0, packet_type, flags, 0x10, 0, 0, 0];
    pdu.extend((16 + body.len() as u16).to_le_bytes());
    pdu.extend([0, 0, 7, 0, 0, 0]);
    pdu.extend(body);
    pdu
}

fn bind_body(contexts: &[(u16, &str, &[&str])]) -> Vec<u8> {
    let mut body = hex("b810 b810 00000000");
    body.extend([contexts.len() as u8, 0, 0, 0]);
    for (id, interface, encodings) in contexts {
        body.extend(id.to_le_bytes());
        body.extend([encodings.len() as u8, 0]);
        body.extend(hex(interface));
        for encoding in *encodings {
            body.extend(hex(encoding));
        }
    }
    body
}

fn request(opnum: u16, stub: &[u8]) -> Vec<u8> {
    part(WHOLE, opnum, stub)
}

fn part(flags: u8, opnum: u16, stub: &[u8]) -> Vec<u8> {
    let mut body = (stub.len() as u32).to_le_bytes().to_vec();
    body.extend([0, 0]);
    body.extend(opnum.to_le_bytes());
    body.extend(stub);
    pdu(REQUEST, flags, &body)
}

fn bound() -> Association {
    let mut pipe = Association::new(Interface::Srvsvc);
    pipe.write(&pdu(BIND, WHOLE, &bind_body(&[(0, SRVSVC, &[NDR])])), &exposed()).unwrap();
    pipe.read(usize::MAX).unwrap();
    pipe
}

/// The answer to one PDU.
fn answer(pipe: &mut Association, pdu: &[u8]) -> Vec<u8> {
    pipe.write(pdu, &exposed()).unwrap();
    let message = pipe.read(usize::MAX).unwrap();
    assert!(!message.more && !pipe.is_readable());
    message.bytes
}

/// NetrShareEnum without a server name, at a level.
fn share_enum(level: u32) -> Vec<u8> {
    let words = [0, level, level, 0x20004, 0, 0, u32::MAX, 0];
    request(15, &words.map(u32::to_le_bytes).concat())
}

/// The stub data of a response.
fn stub(answer: &[u8]) -> &[u8] {
    assert_eq!(answer[2], 2, "a RESPONSE");
    &answer[24..]
}

fn fault(answer: &[u8]) -> u32 {
    assert_eq!(answer[2], 3, "a FAULT");
    u32::from_le_bytes(answer[24..28].try_into().unwrap())
}

fn return_value(answer: &[u8]) -> u32 {
    u32::from_le_bytes(*stub(answer).last_chunk().unwrap())
}

#[test]
fn interfaces_are_found_by_pipe_name() {
    assert_eq!(Interface::of_pipe("SrvSvc"), Some(Interface::Srvsvc));
    assert_eq!(Interface::of_pipe("wkssvc"), Some(Interface::Wkssvc));
    for name in ["", "lsarpc", r"\srvsvc", "srvsvc\0", r"PIPE\srvsvc"] {
        assert_eq!(Interface::of_pipe(name), None, "{name}");
    }
}

#[test]
fn bind_accepts_only_contexts_of_its_interface_with_ndr() {
    let mut pipe = Association::new(Interface::Srvsvc);
    let contexts = bind_body(&[(0, SRVSVC, &[NDR64]), (1, SRVSVC, &[NDR64, NDR]), (2, WKSSVC, &[NDR])]);
    let found = answer(&mut pipe, &pdu(BIND, WHOLE, &contexts));
    let expected = hex(&format!(
        "05000c03 10000000 7400 0000 07000000 b810 b810 f0530000 0d00 5c504950455c73727673766300 00 03000000
         0200 0200 {none} 0000 0000 {NDR} 0200 0100 {none}",
        none = "00".repeat(20)
    ));
    assert_eq!(found, expected);
    // Only the second context is usable.
    let mut other = share_enum(1);
    assert_eq!(fault(&answer(&mut pipe, &other)), 0x1c01_0003);
    other[20] = 1;
    assert_eq!(return_value(&answer(&mut pipe, &other)), 0);
    // An additional context.
    let altered = answer(&mut pipe, &pdu(ALTER_CONTEXT, WHOLE, &bind_body(&[(9, SRVSVC, &[NDR])])));
    assert_eq!(altered[2], 15);
    other[20] = 9;
    assert_eq!(return_value(&answer(&mut pipe, &other)), 0);
}

#[test]
fn netr_share_enum_lists_the_shares() {
    let found = answer(&mut bound(), &share_enum(1));
    let string = |text: &str| {
        let units: Vec<u8> = text.encode_utf16().chain([0]).flat_map(u16::to_le_bytes).collect();
        let count = (units.len() as u32 / 2).to_le_bytes();
        let mut string = [count, [0; 4], count].concat();
        string.extend(units);
        string.resize(string.len().next_multiple_of(4), 0);
        string
    };
    let mut expected = hex("01000000 01000000 00000200 02000000 04000200 02000000
         08000200 00000000 0c000200 10000200 03000080 14000200");
    for text in ["vol", "", "IPC$", "Named pipes"] {
        expected.extend(string(text));
    }
    // TotalEntries, no ResumeHandle, and success.
    expected.extend(hex("02000000 00000000 00000000"));
    assert_eq!(stub(&found), expected);
}

#[test]
fn administrator_and_unknown_info_levels_are_refused() {
    let mut pipe = bound();
    for (level, value) in [(0, 0), (1, 0), (501, 0), (2, 5), (502, 5), (7, 124)] {
        assert_eq!(return_value(&answer(&mut pipe, &share_enum(level))), value, "shares of level {level}");
    }
    // NetrServerGetInfo.
    for (level, value) in [(100, 0), (101, 0), (102, 5), (7, 124)] {
        let stub = [0, level].map(u32::to_le_bytes).concat();
        assert_eq!(return_value(&answer(&mut pipe, &request(21, &stub))), value, "a server of level {level}");
    }
}

#[test]
fn malformed_calls_get_a_fault_and_leave_the_pipe_open() {
    let mut pipe = bound();
    assert_eq!(fault(&answer(&mut pipe, &request(99, &[]))), 0x1c01_0002);
    for len in 0..32 {
        let whole = share_enum(1);
        assert_eq!(fault(&answer(&mut pipe, &request(15, &whole[24..24 + len]))), 0x6f7, "{len} bytes");
    }
    // A name longer than the message.
    let stub = [0x20000, 9, 0, u32::MAX, 0].map(u32::to_le_bytes).concat();
    assert_eq!(fault(&answer(&mut pipe, &request(21, &stub))), 0x6f7);
    assert_eq!(return_value(&answer(&mut pipe, &share_enum(1))), 0);
}

#[test]
fn pdus_are_written_and_read_in_pieces() {
    let bind = pdu(BIND, WHOLE, &bind_body(&[(0, SRVSVC, &[NDR])]));
    let stream = [bind.clone(), share_enum(1)].concat();
    let mut whole = Association::new(Interface::Srvsvc);
    whole.write(&stream, &exposed()).unwrap();
    let expected = [whole.read(usize::MAX).unwrap(), whole.read(usize::MAX).unwrap()];
    for size in [1, 7, 16, 17, 100] {
        let mut pipe = Association::new(Interface::Srvsvc);
        for piece in stream.chunks(size) {
            pipe.write(piece, &exposed()).unwrap();
        }
        for expected in &expected {
            let mut found = Vec::new();
            loop {
                let message = pipe.read(size).unwrap();
                found.extend(message.bytes);
                if !message.more {
                    break;
                }
            }
            assert_eq!(found, expected.bytes, "pieces of {size}");
        }
        assert_eq!(pipe.read(size), None);
    }
    // A request in fragments.
    let mut pipe = bound();
    let call = share_enum(1);
    let (first, rest) = call[24..].split_at(9);
    let (second, third) = rest.split_at(3);
    for pdu in [part(1, 15, first), part(0, 15, second)] {
        pipe.write(&pdu, &exposed()).unwrap();
        assert!(!pipe.is_readable());
    }
    assert_eq!(answer(&mut pipe, &part(2, 15, third)), expected[1].bytes);
}

#[test]
fn long_responses_are_fragmented() {
    let mut pipe = bound();
    let share = |i| Share { name: format!("volume-{i:020}"), kind: ShareKind::Disk, remark: String::new() };
    let exposed = Exposed { server_name: "S".into(), shares: (0..120).map(share).collect() };
    pipe.write(&share_enum(0), &exposed).unwrap();
    let mut parts = Vec::new();
    while let Some(message) = pipe.read(usize::MAX) {
        parts.push(message.bytes);
    }
    assert!(parts.len() > 1);
    let flags: Vec<u8> = parts.iter().map(|part| part[3]).collect();
    assert_eq!((flags[0], *flags.last().unwrap()), (1, 2));
    assert!(flags[1..flags.len() - 1].iter().all(|flags| *flags == 0));
    let whole: Vec<u8> = parts.iter().flat_map(|part| stub(part).to_vec()).collect();
    assert_eq!(u32::from_le_bytes(*whole.last_chunk().unwrap()), 0);
    for part in &parts {
        assert!(part.len() <= 4280 && part.len() == usize::from(u16::from_le_bytes([part[8], part[9]])));
    }
}

#[test]
fn malformed_pdus_break_the_pipe() {
    let bind = pdu(BIND, WHOLE, &bind_body(&[(0, SRVSVC, &[NDR])]));
    let broken = |pipe: &mut Association, bytes: &[u8]| {
        assert_eq!(pipe.write(bytes, &exposed()), Err(Broken), "{bytes:02x?}");
    };
    let changed = |at: usize, value: u8| {
        let mut pdu = bind.clone();
        pdu[at] = value;
        pdu
    };
    let new = || Association::new(Interface::Srvsvc);
    // Version, number representation, a length below that of the header, a length above the negotiated maximum.
    for (at, value) in [(0, 4), (1, 2), (4, 0), (8, 15), (9, 0x11)] {
        broken(&mut new(), &changed(at, value));
    }
    broken(&mut new(), &share_enum(1));
    broken(&mut new(), &pdu(ALTER_CONTEXT, WHOLE, &bind_body(&[])));
    broken(&mut new(), &pdu(BIND, WHOLE, &bind_body(&[(0, SRVSVC, &[NDR])])[..30]));
    broken(&mut bound(), &bind);
    broken(&mut bound(), &part(0, 15, &[]));
    let mut first = bound();
    first.write(&part(1, 15, &[]), &exposed()).unwrap();
    broken(&mut first, &part(1, 15, &[]));
    // Authentication is refused before the client can call.
    let mut with_authentication = new();
    assert_eq!(answer(&mut with_authentication, &changed(10, 8))[2], 13, "a BIND_NAK");
    broken(&mut with_authentication, &share_enum(1));
}

#[test]
fn unread_answers_and_unfinished_requests_are_limited() {
    let mut pipe = bound();
    let unread = (0..1000).find(|_| pipe.write(&share_enum(1), &exposed()).is_err()).unwrap();
    assert!((50..=RPC_ANSWER_BYTES_MAX / 100).contains(&unread), "{unread} answers");
    let mut pipe = bound();
    pipe.write(&part(1, 15, &[0; 4000]), &exposed()).unwrap();
    assert_eq!(bound().write(&vec![0; RPC_WRITE_BYTES_MAX + 1], &exposed()), Err(Broken));
    let too_many = bind_body(&vec![(0, WKSSVC, &[NDR][..]); RPC_CONTEXTS_MAX + 1]);
    let mut unbound = Association::new(Interface::Srvsvc);
    assert_eq!(unbound.write(&pdu(BIND, WHOLE, &too_many), &exposed()), Err(Broken));
    let parts = (1..1000).find(|_| pipe.write(&part(0, 15, &[0; 4000]), &exposed()).is_err()).unwrap();
    assert_eq!(parts, RPC_REQUEST_BYTES_MAX / 4000);
}

#[test]
fn netr_wksta_get_info_returns_the_server_name() {
    let mut pipe = Association::new(Interface::Wkssvc);
    answer(&mut pipe, &pdu(BIND, WHOLE, &bind_body(&[(0, WKSSVC, &[NDR])])));
    let found = answer(&mut pipe, &request(0, &[0, 100].map(u32::to_le_bytes).concat()));
    assert_eq!(return_value(&found), 0);
    let name: Vec<u8> = "NODE1".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(stub(&found).windows(name.len()).filter(|window| *window == name).count(), 2);
    for (level, value) in [(101, 5), (7, 124)] {
        let stub = [0, level].map(u32::to_le_bytes).concat();
        assert_eq!(return_value(&answer(&mut pipe, &request(0, &stub))), value);
    }
    assert_eq!(fault(&answer(&mut pipe, &request(5, &[]))), 0x1c01_0002);
}
