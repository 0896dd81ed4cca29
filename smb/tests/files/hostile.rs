//! Damaged requests, by accident or on purpose: the server answers or ends the connection, and continues to serve.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::fsctl::FsctlCode;
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{Command, close, flush, ioctl, query_directory, query_info, set_info};

use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, UNLOCK, directory, file, lock_body, read, write, write_body,
};
use crate::support::Client;

/// A small generator with a seed, so that failures are reproducible.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// A number that is probably a boundary value.
    fn edge(&mut self) -> u64 {
        const EDGES: [u64; 12] = [
            0,
            1,
            2,
            7,
            64,
            255,
            4096,
            u16::MAX as u64,
            u32::MAX as u64,
            i64::MAX as u64,
            u64::MAX - 1,
            u64::MAX,
        ];
        EDGES[self.below(EDGES.len())]
    }
}

/// Well-formed requests, from which damaged ones are made.
fn samples(f: FileId, d: FileId) -> Vec<(Command, Vec<u8>)> {
    let mut samples = vec![
        (Command::CREATE, file("f").context(RequestContext::QueryMaximalAccess(None)).body()),
        (Command::CREATE, file("new").context(RequestContext::AllocationSize(4096)).body()),
        (Command::CREATE, directory(r"d\sub").body()),
        (Command::WRITE, write_body(f, 10, b"some data that is written")),
        (
            Command::LOCK,
            lock_body(f, &[(0, 10, EXCLUSIVE | NOW_OR_NEVER), (20, 10, EXCLUSIVE | NOW_OR_NEVER)]),
        ),
        (Command::LOCK, lock_body(f, &[(0, 10, UNLOCK)])),
        (Command::LOCK, lock_body(f, &[(0, 10, EXCLUSIVE)])),
    ];
    let mut add = |command, encode: &dyn Fn(&mut Vec<u8>)| {
        let mut body = Vec::new();
        encode(&mut body);
        samples.push((command, body));
    };
    add(Command::CLOSE, &|b| close::Request { flags: close::Flags::POSTQUERY_ATTRIB, file_id: f }.encode(b));
    add(Command::FLUSH, &|b| flush::Request { file_id: f }.encode(b));
    for class in [1, 2, 3, 12, 37, 38, 60] {
        add(Command::QUERY_DIRECTORY, &|b| {
            query_directory::Request {
                file_information_class: FileInformationClass(class),
                flags: query_directory::Flags::RESTART_SCANS,
                file_index: 0,
                file_id: d,
                output_buffer_length: 1000,
                file_name: "*<>\"?".to_owned(),
            }
            .encode(b);
        });
    }
    for (info_type, class) in [(1, 18), (1, 22), (1, 34), (2, 1), (2, 5), (2, 7), (3, 0)] {
        add(Command::QUERY_INFO, &|b| {
            query_info::Request {
                info_type: InfoType(info_type),
                file_info_class: class,
                output_buffer_length: 4096,
                additional_information: 7,
                flags: query_info::Flags::empty(),
                file_id: f,
                input_buffer: &[],
            }
            .encode(b);
        });
    }
    for class in [4, 10, 11, 13, 14, 16, 19, 20, 64, 65] {
        add(Command::SET_INFO, &|b| {
            set_info::Request {
                info_type: InfoType::FILE,
                file_info_class: class,
                additional_information: 0,
                file_id: f,
                buffer: &[
                    1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, b'x', 0, b'y', 0, 0, 0, 0, 0,
                ],
            }
            .encode(b);
        });
    }
    for code in [
        FsctlCode::SRV_REQUEST_RESUME_KEY,
        FsctlCode::SRV_COPYCHUNK,
        FsctlCode::SET_SPARSE,
        FsctlCode::SET_ZERO_DATA,
        FsctlCode::QUERY_ALLOCATED_RANGES,
        FsctlCode::DUPLICATE_EXTENTS_TO_FILE,
        FsctlCode::CREATE_OR_GET_OBJECT_ID,
        FsctlCode::GET_COMPRESSION,
    ] {
        add(Command::IOCTL, &|b| {
            ioctl::Request {
                ctl_code: code,
                file_id: f,
                input: &[0; 56],
                max_input_response: 0,
                output: &[],
                max_output_response: 256,
                flags: ioctl::Flags::IS_FSCTL,
            }
            .encode(b);
        });
    }
    samples
}

fn damage(random: &mut Random, body: &mut Vec<u8>) {
    for _ in 0..=random.below(3) {
        if body.is_empty() {
            return;
        }
        let at = random.below(body.len());
        match random.below(4) {
            0 => body[at] = random.next() as u8,
            1 => body.truncate(at),
            2 => {
                let bytes = random.edge().to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)];
                for (to, from) in body.iter_mut().skip(at).zip(&bytes[..width]) {
                    *to = *from;
                }
            }
            _ => {
                let extra = random.below(40);
                body.extend((0..extra).map(|i| i as u8));
            }
        }
    }
}

fn open(c: &mut Client) -> (FileId, FileId) {
    let f = file("f").id(c);
    write(c, f, 0, &[7; 100]).unwrap();
    (f, directory("d").id(c))
}

#[test]
fn the_server_keeps_serving_after_damaged_requests() {
    let mut lab = Lab::new();
    let mut random = Random(0x5eed_f00d_1234_5678);
    let mut answered = 0_u32;
    for _ in 0..60 {
        let mut c =
            Client::mount(&lab.server, random.next() | 1 << 63, crate::calls::NEWEST, lab.memory.backend());
        // The effects of the previous session on the files, such as making them read-only, do not matter here.
        lab.memory.clear();
        let (f, d) = open(&mut c);
        let samples = samples(f, d);
        for _ in 0..200 {
            let (command, mut body) = samples[random.below(samples.len())].clone();
            if random.below(8) > 0 {
                damage(&mut random, &mut body);
            }
            if body.is_empty() {
                continue;
            }
            c.answers.clear();
            let header = c.header(command, 4);
            let message = c.message(header, &body);
            if c.send_raw(message).is_err() {
                break;
            }
            answered += u32::from(!c.answers.is_empty());
            // No other client exists to release locks: requests that wait keep waiting.
            let _ = lab.server.take_mail();
        }
        c.connection.close(c.now);
        c.run().unwrap();
        assert!(c.connection.is_finished());
        let _ = lab.server.take_mail();
        assert!(lab.server.open_infos(None).is_empty());
    }
    assert!(answered > 5000, "{answered} requests were answered");
    lab.memory.clear();
    let mut c = lab.client();
    let (f, _) = open(&mut c);
    assert_eq!(read(&mut c, f, 99, 10), Ok(vec![7]));
    assert_eq!(read(&mut c, f, 100, 10), Err(NtStatus::END_OF_FILE));
}
