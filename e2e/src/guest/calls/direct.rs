//! File transfers over RDMA with our own client, and the faults that no kernel client commits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use forebay_rdma::{Exposed, Window};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::read::Channel;
use forebay_smbdirect::wire::{DataTransfer, Flags};
use serde::{Deserialize, Serialize};

use super::data::Noise;
use crate::guest::direct::client::{Client, Direction, Lent, Target, Transfer, descriptors};
use crate::guest::direct::link::{Link, Manners};

/// Arguments of [`verify`].
#[derive(Serialize, Deserialize)]
pub struct Verify {
    /// Server and volume.
    pub target: Target,
    /// Name of the file.
    pub name: String,
    /// Size; at least a few pages.
    pub bytes: u32,
    /// Seed of its content.
    pub seed: u64,
}

/// The result of [`verify`].
#[derive(Debug, Serialize, Deserialize)]
pub struct Verified {
    /// Bytes transferred over RDMA, in both directions.
    pub bytes: u64,
    /// Number of tokens that the server invalidated: 0 if the device does not support that.
    pub invalidated: u32,
}

/// Writes and reads a file over RDMA, with descriptors of several segments out of order, and compares: with tokens that stay
/// valid (SMB2_CHANNEL_RDMA_V1), and with tokens that the server invalidates (SMB2_CHANNEL_RDMA_V1_INVALIDATE).
pub fn verify(Verify { target, name, bytes, seed }: Verify) -> Result<Verified> {
    let mut client = Client::mount(&target, Manners::default())?;
    let device = Arc::clone(client.link.device());
    let length = bytes as usize;
    let memory = Arc::new(Exposed::new(&device, 2 * length)?);
    let file = client.open(&name)?;
    let mut found = Verified { bytes: 0, invalidated: 0 };
    for (round, channel) in [Channel::RDMA_V1, Channel::RDMA_V1_INVALIDATE].into_iter().enumerate() {
        let invalidates = channel == Channel::RDMA_V1_INVALIDATE;
        if invalidates && !device.has_windows() {
            break;
        }
        let content = Noise::new(seed + round as u64).bytes(length);
        // From the second half of the memory to the file, and from the file to the first half.
        for (writes, half) in [(true, length), (false, 0)] {
            let mut pieces = shuffled(bytes, half, memory.token());
            let mut window = invalidates.then(|| Window::new(&memory)).transpose()?;
            if let Some(window) = &mut window {
                // [MS-SMB2] 2.2.19: the server invalidates the token of the first descriptor.
                pieces[0].token = client.link.bind(window, pieces[0].at, pieces[0].length as usize)?;
            }
            let info = descriptors(&memory, &pieces);
            let direction = if writes { Direction::Write } else { Direction::Read };
            if writes {
                let mut left = content.as_slice();
                for piece in &pieces {
                    let (now, rest) = left.split_at(piece.length as usize);
                    memory.put(piece.at, now);
                    left = rest;
                }
            } else {
                memory.put(half, &vec![0; length]);
            }
            let token = client.transfer(&Transfer {
                direction,
                file_id: file,
                offset: 0,
                length: bytes,
                channel,
                info: &info,
            })?;
            if let Some(window) = &mut window {
                // Not every device reports the invalidation, but none binds a window while its token is still valid.
                ensure!(
                    token.is_none_or(|token| token == pieces[0].token),
                    "{token:?} came back of {pieces:?}"
                );
                client.link.bind(window, 0, 1).context("the token was not invalidated")?;
                found.invalidated += 1;
            } else {
                ensure!(token.is_none(), "{token:?} was invalidated without a request");
            }
            found.bytes += u64::from(bytes);
            if !writes {
                let read: Vec<u8> =
                    pieces.iter().flat_map(|piece| memory.get(piece.at, piece.length as usize)).collect();
                ensure!(read == content, "{channel:?}: what was read differs from what was written");
            }
        }
    }
    client.close(file)?;
    Ok(found)
}

/// Same as [`verify`], with a session that seals, over memory that never contains the content in cleartext.
pub fn verify_sealed(Verify { target, name, bytes, seed }: Verify) -> Result<Verified> {
    let mut client = Client::mount_sealed(&target, Manners::default())?;
    let device = Arc::clone(client.link.device());
    let length = bytes as usize;
    let memory = Arc::new(Exposed::new(&device, 2 * length)?);
    let file_id = client.open(&name)?;
    let mut found = Verified { bytes: 0, invalidated: 0 };
    for (round, channel) in [Channel::RDMA_V1, Channel::RDMA_V1_INVALIDATE].into_iter().enumerate() {
        let invalidates = channel == Channel::RDMA_V1_INVALIDATE;
        if invalidates && !device.has_windows() {
            break;
        }
        let content = Noise::new(seed + round as u64).bytes(length);
        let mut window = invalidates.then(|| Window::new(&memory)).transpose()?;
        // From the second half of the memory to the file, at first with a byte changed in transit.
        let mut pieces = shuffled(bytes, length, memory.token());
        let mut sealed = content.clone();
        let tag = client.seal_payload(&mut sealed)?;
        ensure!(sealed != content, "sealed payload is in clear");
        for change in [1, 0] {
            sealed[length / 2] ^= change;
            let mut left = sealed.as_slice();
            for piece in &pieces {
                let (now, rest) = left.split_at(piece.length as usize);
                memory.put(piece.at, now);
                left = rest;
            }
            sealed[length / 2] ^= change;
            if let Some(window) = &mut window {
                pieces[0].token = client.link.bind(window, pieces[0].at, pieces[0].length as usize)?;
            }
            let info = tag.channel_info(channel.0, &descriptors(&memory, &pieces));
            let transfer = Transfer {
                direction: Direction::Write,
                file_id,
                offset: 0,
                length: bytes,
                channel: Channel::RDMA_TRANSFORM,
                info: &info,
            };
            client.send_transfer(&transfer)?;
            let answer = client.answer()?;
            let expected = if change == 1 { NtStatus::AUTH_TAG_MISMATCH } else { NtStatus::SUCCESS };
            ensure!(answer.header.status == expected, "WRITE: {}", answer.header.status);
        }
        // From the file to the first half.
        let mut pieces = shuffled(bytes, 0, memory.token());
        memory.put(0, &vec![0; length]);
        if let Some(window) = &mut window {
            // The token of the WRITE was invalidated; otherwise this would be refused.
            pieces[0].token = client.link.bind(window, pieces[0].at, pieces[0].length as usize)?;
            found.invalidated += 1;
        }
        let info = descriptors(&memory, &pieces);
        let transfer =
            Transfer { direction: Direction::Read, file_id, offset: 0, length: bytes, channel, info: &info };
        let (_, tag) = client.transfer_as(&transfer)?;
        let tag = tag.context("READ data that went in clear")?;
        let mut read: Vec<u8> =
            pieces.iter().flat_map(|piece| memory.get(piece.at, piece.length as usize)).collect();
        ensure!(read != content && read != sealed, "{channel:?}: what came by RDMA is not sealed");
        client.open_payload(&tag, &mut read).context("what came by RDMA")?;
        ensure!(read == content, "{channel:?}: what was read differs from what was written");
        found.bytes += 2 * u64::from(bytes);
    }
    client.close(file_id)?;
    Ok(found)
}

/// Three segments of the memory from `half` on, `bytes` in total, of odd sizes, in reverse order.
fn shuffled(bytes: u32, half: usize, token: u32) -> Vec<Lent> {
    let (one, two) = (bytes / 3 + 1, bytes / 5 + 2);
    let piece = |from: u32, to: u32| Lent { at: half + from as usize, length: to - from, token };
    vec![piece(one + two, bytes), piece(0, one), piece(one, one + two)]
}

/// A fault that a client can commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// Requests a connection and does not read the response.
    HalfOpen,
    /// Gets a connection and sends nothing.
    Silent,
    /// Sends garbage as its first message.
    GarbageFirst,
    /// Sends a message that is too short for anything.
    GarbageShort,
    /// Sends garbage after the negotiation.
    GarbageLater,
    /// Sends a valid SMB Direct message without an SMB message in it.
    GarbageWithin,
    /// Posts no receive.
    NoReceives,
    /// After logon, stops posting receives but still grants credits, and makes the server retry indefinitely.
    NoReceivesForEver,
    /// After logon, stops granting credits.
    NoCredits,
    /// Announces a longer message than the server accepts.
    OversizedFragment,
    /// Sends a longer message than was negotiated.
    LongerThanNegotiated,
    /// Sends a longer message than the server's receive buffers hold.
    LongerThanReceives,
    /// Declares a payload outside of the message.
    PayloadOutside,
    /// Makes the server READ its memory with a token that never existed.
    MadeUpTokenToRead,
    /// The same for the server's WRITE.
    MadeUpTokenToWrite,
    /// With a token that is no longer valid.
    StaleTokenToRead,
    /// The same for the server's WRITE.
    StaleTokenToWrite,
    /// With a token that covers less than the descriptor declares.
    ShortTokenToRead,
    /// The same for the server's WRITE.
    ShortTokenToWrite,
    /// Is killed while the server READs its memory.
    Killed,
}

/// Arguments of [`commit`].
#[derive(Serialize, Deserialize)]
pub struct Misdeed {
    /// The server to commit it against.
    pub target: Target,
    /// The fault.
    pub fault: Fault,
    /// How long to wait until the connection ends.
    pub patience: Duration,
}

/// How the connection ended.
#[derive(Debug, Serialize, Deserialize)]
pub struct Ended {
    /// The reason, as far as the client receives it.
    pub reason: String,
    /// Time since the fault.
    pub after: Duration,
}

/// WRITEs in flight when the client is killed, and the bytes of each: more than a software device transfers in one step.
const KILLED_WRITES: u32 = 4;
const KILLED_BYTES: u32 = 4 << 20;
/// Bytes of a READ or WRITE that fails.
const TRANSFER_BYTES: u32 = 64 << 10;
/// Receives of a client that stops posting them or granting credits: enough to log on.
const RECEIVES_FEW: u16 = 16;
/// Requests that need more responses than [`RECEIVES_FEW`], but fewer than the server's credits.
const ECHOES: u16 = 64;
/// Payload of a message that breaks a rule.
const PAYLOAD_BYTES: u32 = 8;

/// Commits one fault, and waits until the server has ended the connection.
pub fn commit(Misdeed { target, fault, patience }: Misdeed) -> Result<Ended> {
    let good = Manners::default();
    match fault {
        Fault::HalfOpen => {
            let _link = Link::connect(target.server, good)?;
            // This is the fault: a client that processed its events would complete the connection.
            std::thread::sleep(patience);
            Ok(Ended { reason: "not looked at".to_owned(), after: patience })
        }
        Fault::Silent => before_negotiation(&target, Manners { deaf: true, ..good }, None, patience),
        Fault::GarbageFirst => {
            before_negotiation(&target, Manners { deaf: true, ..good }, Some(&[0xa5; 64]), patience)
        }
        Fault::GarbageShort => {
            before_negotiation(&target, Manners { deaf: true, ..good }, Some(&[1; 7]), patience)
        }
        Fault::NoReceives => {
            let mut link = Link::connect(target.server, Manners { receives: 0, ..good })?;
            link.establish()?;
            let began = Instant::now();
            // [MS-SMBD] 2.2.1: the request of a correct client.
            let request = forebay_smbdirect::wire::NegotiateRequest {
                min_version: forebay_smbdirect::wire::VERSION,
                max_version: forebay_smbdirect::wire::VERSION,
                credits_requested: 10,
                preferred_send_size: 1364,
                max_receive_size: 1364,
                max_fragmented_size: 1 << 20,
            };
            link.send_raw(&request.encode())?;
            ended(&mut link, began, patience)
        }
        Fault::GarbageLater => after_negotiation(&target, good, &[0xa5; 200], patience),
        Fault::OversizedFragment => {
            let message = data(PAYLOAD_BYTES, 2 << 20, PAYLOAD_BYTES);
            after_negotiation(&target, good, &message, patience)
        }
        Fault::LongerThanNegotiated => {
            let manners = Manners { max_send_size: Some(1200), ..good };
            after_negotiation(&target, manners, &data(1250, 0, 1250), patience)
        }
        Fault::LongerThanReceives => after_negotiation(&target, good, &data(8000, 0, 8000), patience),
        Fault::PayloadOutside => after_negotiation(&target, good, &data(1000, 0, PAYLOAD_BYTES), patience),
        Fault::GarbageWithin => after_negotiation(&target, good, &data(100, 0, 100), patience),
        Fault::NoCredits => {
            // The server gets no more credits than that.
            let mut client = Client::mount(&target, Manners { receives: RECEIVES_FEW, ..good })?;
            client.link.manners.grants = Some(0);
            starve(&mut client, patience)
        }
        Fault::NoReceivesForEver => {
            let manners = Manners { receives: RECEIVES_FEW, receiver_not_ready_retries: 7, ..good };
            let mut client = Client::mount(&target, manners)?;
            client.link.manners.posts_again = false;
            client.link.manners.grants = Some(u16::from(u8::MAX));
            starve(&mut client, patience)
        }
        Fault::MadeUpTokenToRead
        | Fault::MadeUpTokenToWrite
        | Fault::StaleTokenToRead
        | Fault::StaleTokenToWrite
        | Fault::ShortTokenToRead
        | Fault::ShortTokenToWrite => with_bad_token(&target, fault, patience),
        Fault::Killed => killed(&target),
    }
}

fn ended(link: &mut Link, began: Instant, patience: Duration) -> Result<Ended> {
    let reason = link.until_ended(patience)?;
    Ok(Ended { reason, after: began.elapsed() })
}

fn before_negotiation(
    target: &Target,
    manners: Manners,
    said: Option<&[u8]>,
    patience: Duration,
) -> Result<Ended> {
    let mut link = Link::connect(target.server, manners)?;
    let began = Instant::now();
    link.establish()?;
    if let Some(said) = said {
        link.send_raw(said)?;
    }
    ended(&mut link, began, patience)
}

fn after_negotiation(target: &Target, manners: Manners, said: &[u8], patience: Duration) -> Result<Ended> {
    let mut link = Link::connect(target.server, manners)?;
    link.establish()?;
    link.negotiate()?;
    let began = Instant::now();
    link.send_raw(said)?;
    ended(&mut link, began, patience)
}

/// A Data Transfer message with `payload` bytes of payload that declares `length` bytes, and `remaining` bytes to follow.
fn data(length: u32, remaining: u32, payload: u32) -> Vec<u8> {
    let header = DataTransfer {
        credits_requested: 255,
        credits_granted: 10,
        flags: Flags::default(),
        remaining_data_length: remaining,
        data_offset: DataTransfer::DATA_OFFSET as u32,
        data_length: length,
    };
    [&header.encode()[..], &vec![0xa5; payload as usize]].concat()
}

/// Requests more responses than the server can send.
fn starve(client: &mut Client, patience: Duration) -> Result<Ended> {
    let began = Instant::now();
    for _ in 0..ECHOES {
        client.send_echo()?;
    }
    ended(&mut client.link, began, patience)
}

fn with_bad_token(target: &Target, fault: Fault, patience: Duration) -> Result<Ended> {
    let mut client = Client::mount(target, Manners::default())?;
    let device = Arc::clone(client.link.device());
    let memory = Exposed::new(&device, TRANSFER_BYTES as usize)?;
    let short = Exposed::new(&device, 4096)?;
    let file = client.open("bad-token")?;
    let good = [Lent { at: 0, length: TRANSFER_BYTES, token: memory.token() }];
    // The file needs content to read.
    let good = descriptors(&memory, &good);
    let transfer = |direction, info| Transfer {
        direction,
        file_id: file,
        offset: 0,
        length: TRANSFER_BYTES,
        channel: Channel::RDMA_V1,
        info,
    };
    client.transfer(&transfer(Direction::Write, &good))?;
    let (place, token) = match fault {
        Fault::MadeUpTokenToRead | Fault::MadeUpTokenToWrite => (&memory, !memory.token()),
        Fault::StaleTokenToRead | Fault::StaleTokenToWrite => {
            (&memory, Exposed::new(&device, TRANSFER_BYTES as usize)?.token())
        }
        _ => (&short, short.token()),
    };
    let bad = descriptors(place, &[Lent { at: 0, length: TRANSFER_BYTES, token }]);
    let began = Instant::now();
    let server_writes =
        matches!(fault, Fault::MadeUpTokenToWrite | Fault::StaleTokenToWrite | Fault::ShortTokenToWrite);
    let direction = if server_writes { Direction::Read } else { Direction::Write };
    client.send_transfer(&transfer(direction, &bad))?;
    ended(&mut client.link, began, patience)
}

/// Does not return.
fn killed(target: &Target) -> Result<Ended> {
    let mut client = Client::mount(target, Manners::default())?;
    let memory = Exposed::new(client.link.device(), KILLED_BYTES as usize)?;
    let file = client.open(KILLED_FILE)?;
    let whole = descriptors(&memory, &[Lent { at: 0, length: KILLED_BYTES, token: memory.token() }]);
    for number in 0..KILLED_WRITES {
        let offset = u64::from(number) * u64::from(KILLED_BYTES);
        client.send_transfer(&Transfer {
            direction: Direction::Write,
            file_id: file,
            offset,
            length: KILLED_BYTES,
            channel: Channel::RDMA_V1,
            info: &whole,
        })?;
    }
    // By then the server has the requests and has started.
    client.link.flush()?;
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    bail!("a killed process goes on")
}

/// The file that a client was writing when it was killed, and its intended size.
pub const KILLED_FILE: &str = "killed";
/// See [`KILLED_FILE`].
pub const KILLED_FILE_BYTES: u64 = KILLED_WRITES as u64 * KILLED_BYTES as u64;
