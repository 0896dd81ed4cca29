//! The floors: servers that answer the client's READs and WRITEs with the minimum of work in the kernel, and do nothing else.
//!
//! A floor reads id, range and file number from a request, and answers with a prepared header. There is no handshake: the
//! client skips it and uses the file's number as its handle.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use forebay_smb::limits::IO_BYTES_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::header::MESSAGE_ID_OFFSET;
use forebay_smb::wire::{Command as Smb, HEADER_LEN, Header, read, write};
use rustix::net::{SendFlags, send};

use super::connection::{AHEAD_BYTES_SMALL, BATCH_BYTES};
use super::intake::Intake;
use super::plan::Plan;
use crate::place::{Place, Server};

const PREFIX_LEN: usize = 4;
/// Prefix, header and body of a WRITE. A READ has one more byte, which is ignored.
const REQUEST_LEN: usize = PREFIX_LEN + HEADER_LEN + write::REQUEST_FIXED_LEN;
/// Prefix, header and body of a READ response.
const READ_HEAD: usize = PREFIX_LEN + HEADER_LEN + read::RESPONSE_FIXED_LEN;
/// Bytes of queued responses that trigger a send even if there are more requests.
const SEND_BYTES: usize = 64 * 1024;

/// What a floor is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Means {
    /// READs with sendfile(2).
    Sendfile,
    /// READs with pread(2) and send(2).
    Read,
    /// WRITEs with recv(2) and pwrite(2).
    Write,
}

/// Serves the files of a folder until its standard input ends.
pub(crate) fn serve(means: Means, io_bytes: usize, folder: &Path, files: usize) -> Result<()> {
    let mut open = Vec::new();
    for number in 0..files {
        let path = folder.join(number.to_string());
        open.push(File::options().read(true).write(true).create(true).truncate(false).open(path)?);
    }
    let files = Arc::new(open);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    println!("{}", listener.local_addr()?.port());
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let files = Arc::clone(&files);
            std::thread::spawn(move || {
                if let Err(error) = answer(means, io_bytes, &files, socket) {
                    eprintln!("a connection ended: {error:#}");
                }
            });
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The fields of a request that a floor reads.
#[derive(Debug, PartialEq, Eq)]
struct Wanted {
    frame: usize,
    command: u16,
    id: [u8; 8],
    length: usize,
    offset: u64,
    file: usize,
}

impl Wanted {
    fn parse(bytes: &[u8; REQUEST_LEN]) -> Self {
        // READ and WRITE have length, offset and file id at the same offsets ([MS-SMB2] 2.2.19, 2.2.21).
        let body = PREFIX_LEN + HEADER_LEN;
        let eight = |at: usize| -> [u8; 8] { std::array::from_fn(|byte| bytes[at + byte]) };
        let four = |at: usize| -> [u8; 4] { std::array::from_fn(|byte| bytes[at + byte]) };
        Self {
            frame: u32::from_be_bytes(four(0)) as usize,
            command: u16::from_le_bytes([bytes[PREFIX_LEN + 12], bytes[PREFIX_LEN + 13]]),
            id: eight(PREFIX_LEN + MESSAGE_ID_OFFSET),
            length: u32::from_le_bytes(four(body + 4)) as usize,
            offset: u64::from_le_bytes(eight(body + 8)),
            file: u64::from_le_bytes(eight(body + 16)) as usize,
        }
    }
}

/// Responses to send together.
#[derive(Default)]
struct Outbox {
    /// Grows, and is never cleared: clearing would cost as much as a copy.
    buffer: Vec<u8>,
    used: usize,
}

impl Outbox {
    /// Reserves space for the next response.
    fn add(&mut self, count: usize) -> &mut [u8] {
        let start = self.used;
        self.used += count;
        if self.buffer.len() < self.used {
            self.buffer.resize(self.used, 0);
        }
        &mut self.buffer[start..self.used]
    }

    fn send(&mut self, socket: &mut TcpStream) -> Result<()> {
        if self.used > 0 {
            socket.write_all(&self.buffer[..self.used])?;
            self.used = 0;
        }
        Ok(())
    }
}

fn answer(means: Means, io_bytes: usize, files: &[File], mut socket: TcpStream) -> Result<()> {
    socket.set_nodelay(true)?;
    let ahead = match means {
        // Large payload is received directly into its buffer.
        Means::Write if io_bytes > BATCH_BYTES => REQUEST_LEN,
        _ => AHEAD_BYTES_SMALL,
    };
    let mut intake = Intake::new(ahead);
    let mut read_head = prepared(Smb::READ, |body| read::Response::inline(0).encode(body));
    let mut write_answer =
        prepared(Smb::WRITE, |body| write::Response { count: 0, remaining: 0 }.encode(body));
    let mut payload = Vec::new();
    let mut out = Outbox::default();
    loop {
        if out.used >= SEND_BYTES || intake.buffered().len() < REQUEST_LEN {
            out.send(&mut socket)?;
        }
        let Some(request) = intake.need_or_end(&socket, REQUEST_LEN)? else { return Ok(()) };
        let wanted = Wanted::parse(request.first_chunk().context("a whole request")?);
        intake.pass(REQUEST_LEN);
        let file = files.get(wanted.file).with_context(|| format!("no file {}", wanted.file))?;
        ensure!(wanted.length <= IO_BYTES_MAX as usize, "a request of {} B", wanted.length);
        let count = u32::try_from(wanted.length)?.to_le_bytes();
        if wanted.command == Smb::WRITE.0 {
            payload.resize(wanted.length.max(payload.len()), 0);
            intake.take(&socket, &mut payload[..wanted.length])?;
            file.write_all_at(&payload[..wanted.length], wanted.offset)?;
            patch(&mut write_answer, &wanted.id, count);
            out.add(write_answer.len()).copy_from_slice(&write_answer);
            continue;
        }
        ensure!(wanted.command == Smb::READ.0, "a floor answers READ and WRITE only");
        intake.discard(&socket, (PREFIX_LEN + wanted.frame).saturating_sub(REQUEST_LEN))?;
        let frame = u32::try_from(READ_HEAD - PREFIX_LEN + wanted.length)?;
        read_head[..PREFIX_LEN].copy_from_slice(&frame.to_be_bytes());
        patch(&mut read_head, &wanted.id, count);
        if means == Means::Sendfile {
            out.send(&mut socket)?;
            send_file(&mut socket, &read_head, file, wanted.offset, wanted.length)?;
            continue;
        }
        let (head, data) = out.add(READ_HEAD + wanted.length).split_at_mut(READ_HEAD);
        head.copy_from_slice(&read_head);
        file.read_exact_at(data, wanted.offset)?;
    }
}

/// A frame with a prepared response.
fn prepared(command: Smb, encode: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut frame = vec![0; PREFIX_LEN];
    Header::request(command, 0).response(NtStatus::SUCCESS).encode(&mut frame);
    encode(&mut frame);
    let len = (frame.len() - PREFIX_LEN) as u32;
    frame[..PREFIX_LEN].copy_from_slice(&len.to_be_bytes());
    frame
}

/// The byte count has the same offset in both responses ([MS-SMB2] 2.2.20, 2.2.22).
fn patch(frame: &mut [u8], id: &[u8; 8], count: [u8; 4]) {
    frame[PREFIX_LEN + MESSAGE_ID_OFFSET..][..8].copy_from_slice(id);
    frame[PREFIX_LEN + HEADER_LEN + 4..][..4].copy_from_slice(&count);
}

fn send_file(socket: &mut TcpStream, head: &[u8], file: &File, offset: u64, length: usize) -> Result<()> {
    // The header is sent together with the data.
    let sent = send(&*socket, head, SendFlags::MORE)?;
    socket.write_all(&head[sent..])?;
    let mut at = offset;
    let end = offset + length as u64;
    while at < end {
        let rest = usize::try_from(end - at)?;
        if rustix::fs::sendfile(&*socket, file, Some(&mut at), rest)? == 0 {
            bail!("the file is shorter than the answer");
        }
    }
    Ok(())
}

/// Starts a floor in a separate process.
pub(crate) fn start(
    place: &Place,
    name: &'static str,
    means: Means,
    plan: &Plan,
) -> Result<(Server, SocketAddr)> {
    // All floors serve the same files.
    let folder = place.path().join("floor");
    std::fs::create_dir_all(&folder)?;
    let means = means.to_possible_value().context("no means is hidden")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["floor-server", "--means", means.get_name(), "--io-bytes", &plan.io_bytes.to_string()]);
    command.args(["--files", &plan.files.to_string(), "--folder"]).arg(folder);
    let mut server = Server::start(place, name, &command, true)?;
    let mut line = String::new();
    BufReader::new(server.stdout().context("its output is a pipe")?).read_line(&mut line)?;
    let port: u16 =
        line.trim().parse().with_context(|| format!("{name} did not start:\n{}", server.said()))?;
    Ok((server, (Ipv4Addr::LOCALHOST, port).into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::plan::{Workload, tests::plan};
    use crate::load::target::Target;
    use crate::load::{client, files};

    /// A floor in a thread. Dropping the folder removes its files.
    fn floor(means: Means, plan: &Plan) -> (tempfile::TempDir, Target) {
        let folder = tempfile::tempdir().expect("a folder");
        let open = |number: usize| {
            let path = folder.path().join(number.to_string());
            File::options().read(true).write(true).create(true).truncate(true).open(path).expect("a file")
        };
        let files: Arc<Vec<File>> = Arc::new((0..plan.files).map(open).collect());
        let io_bytes = plan.io_bytes;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = listener.local_addr().expect("its address");
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let files = Arc::clone(&files);
                std::thread::spawn(move || answer(means, io_bytes, &files, socket));
            }
        });
        (folder, Target::Floor { address })
    }

    #[test]
    fn written_data_is_read_back_with_every_means() {
        for means in [Means::Sendfile, Means::Read, Means::Write] {
            for io_bytes in [1000, 16_384, 100_000] {
                let plan = Plan { io_bytes, file_bytes: 250_001, ..plan(Workload::Read) };
                let (_folder, target) = floor(means, &plan);
                files::make(&target, &plan).unwrap_or_else(|error| panic!("{means:?}: {error:#}"));
            }
        }
    }

    #[test]
    fn check_detects_a_file_with_other_content() {
        let plan = Plan { file_bytes: 100_000, ..plan(Workload::Read) };
        let (folder, target) = floor(Means::Read, &plan);
        files::make(&target, &plan).expect("the files are created");
        let file = File::options().write(true).open(folder.path().join("1")).expect("a file");
        file.write_all_at(&[0; 8], 50_000).expect("written");
        let error = format!("{:#}", files::check(&target, &plan).expect_err("it differs"));
        assert!(error.contains("1000 B at 50000"), "{error}");
    }

    #[test]
    fn run_of_each_plain_io_workload_counts_operations_and_bytes() {
        for workload in [Workload::Read, Workload::RandRead, Workload::Write, Workload::RandWrite] {
            let plan = Plan { seconds: 0.05, io_bytes: 20_000, file_bytes: 100_000, ..plan(workload) };
            let means = if workload.writes() { Means::Write } else { Means::Sendfile };
            let (_folder, target) = floor(means, &plan);
            files::make(&target, &plan).expect("the files are created");
            let mut looks = 0;
            let (before, measured, after) = client::run(&target, &plan, 1, || {
                looks += 1;
                Ok(looks)
            })
            .unwrap_or_else(|error| panic!("{workload:?}: {error:#}"));
            assert_eq!((before, after), (1, 2));
            assert!(measured.tally.operations > 0 && measured.seconds >= 0.05, "{measured:?}");
            assert_eq!(measured.tally.bytes, measured.tally.operations * 20_000);
            files::check(&target, &plan).expect("the files have the written content");
        }
    }

    #[test]
    fn run_fails_if_a_file_is_too_short() {
        let plan = plan(Workload::Read);
        let (_folder, target) = floor(Means::Read, &plan);
        client::run(&target, &plan, 1, || Ok(())).expect_err("the files are empty");
    }
}
