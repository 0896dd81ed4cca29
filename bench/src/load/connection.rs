//! One connection of the client: sends requests and receives responses.

use std::io::{IoSlice, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_smb::crypto::{NonceSequence, OpeningKey, SealingKey, SigningKey};
use forebay_smb::ids::FileId;
use forebay_smb::limits::FRAME_BYTES_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::{Command, HEADER_LEN, Header, HeaderFlags, create, logoff, read};

use super::credits::Credits;
use super::intake::Intake;
use super::request::{Identity, Opening, Request};

/// Time limit for a response.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// Payload up to this size is received and sent in batches, together with the adjacent bytes: copying it costs less than a
/// system call.
pub(crate) const BATCH_BYTES: usize = 16 * 1024;

/// Bytes that one call reads ahead, with small payload and with large.
pub(crate) const AHEAD_BYTES_SMALL: usize = 256 * 1024;
const AHEAD_BYTES_LARGE: usize = 256;

/// Bytes of the transport's prefix, [MS-SMB2] 2.1.
const PREFIX_LEN: usize = 4;

/// Bytes of a READ response before its payload.
const READ_HEAD: usize = HEADER_LEN + read::RESPONSE_FIXED_LEN;

/// Protection of the messages of an established session.
pub(crate) enum Protection {
    /// Nothing.
    Plain,
    /// Requests are signed. Signatures of responses are not checked, so that the client need not read their payload.
    Signed(SigningKey),
    /// Everything is sealed.
    Sealed {
        /// For requests.
        sealing: SealingKey,
        /// For responses.
        opening: OpeningKey,
        /// For requests.
        nonces: NonceSequence,
    },
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer<'a> {
    pub(crate) header: Header,
    /// From the header on, without the payload of a READ if that is dropped.
    pub(crate) message: &'a [u8],
    /// Bytes of a READ's payload.
    pub(crate) read_bytes: usize,
}

impl Answer<'_> {
    /// Fails unless the request succeeded.
    pub(crate) fn check(&self, what: &str) -> Result<()> {
        let status = self.header.status;
        ensure!(status == NtStatus::SUCCESS, "{what} was answered with {status:?}");
        Ok(())
    }

    /// The file that a CREATE opened.
    pub(crate) fn opened(&self, name: &str) -> Result<FileId> {
        self.check(&format!("CREATE of {name}"))?;
        Ok(create::Response::parse(self.message)?.file_id)
    }
}

/// A connection; with a session and a tree after [`super::handshake::connect`].
pub(crate) struct Connection {
    socket: TcpStream,
    intake: Intake,
    /// A frame that was received completely, and the offset of its message.
    received: Vec<u8>,
    message_at: usize,
    outbox: Vec<u8>,
    pub(crate) credits: Credits,
    pub(crate) identity: Identity,
    pub(crate) protection: Protection,
    is_raw: bool,
}

impl Connection {
    /// Connects. `io_bytes` is the usual payload.
    pub(crate) fn open(address: SocketAddr, credits: Credits, io_bytes: usize) -> Result<Self> {
        let socket = TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(ANSWER_DEADLINE))?;
        let ahead = if io_bytes <= BATCH_BYTES { AHEAD_BYTES_SMALL } else { AHEAD_BYTES_LARGE };
        Ok(Self {
            socket,
            intake: Intake::new(ahead),
            received: Vec::new(),
            message_at: 0,
            outbox: Vec::new(),
            credits,
            identity: Identity::default(),
            protection: Protection::Plain,
            is_raw: false,
        })
    }

    /// Connects to a floor: no handshake, no names, no credits.
    pub(crate) fn open_raw(address: SocketAddr, io_bytes: usize) -> Result<Self> {
        let connection = Self::open(address, Credits::unlimited(), io_bytes)?;
        Ok(Self { is_raw: true, ..connection })
    }

    /// Queues a request and returns its message id. Returns `None` and queues nothing if there are too few credits.
    pub(crate) fn send(&mut self, request: &mut Request) -> Result<Option<u64>> {
        let charge = request.charge();
        let Some(id) = self.credits.take(charge) else { return Ok(None) };
        request.address(id, self.credits.ask(charge), self.identity);
        let payload = request.payload().cloned();
        self.queue(request.message(), payload.as_deref().unwrap_or_default())?;
        Ok(Some(id))
    }

    fn queue(&mut self, message: &mut [u8], payload: &[u8]) -> Result<()> {
        let len = message.len() + payload.len();
        match &mut self.protection {
            Protection::Sealed { sealing, nonces, .. } => {
                let mut whole = Vec::with_capacity(len);
                whole.extend_from_slice(message);
                whole.extend_from_slice(payload);
                let header =
                    sealing.seal_in_place(nonces.next_nonce()?, self.identity.session_id, &mut whole)?;
                self.outbox.extend_from_slice(&prefix(header.len() + len)?);
                self.outbox.extend_from_slice(&header);
                self.outbox.append(&mut whole);
                return Ok(());
            }
            Protection::Signed(key) => key.sign_in_place(message, &[payload]),
            Protection::Plain => {}
        }
        self.outbox.extend_from_slice(&prefix(len)?);
        self.outbox.extend_from_slice(message);
        if payload.len() <= BATCH_BYTES {
            self.outbox.extend_from_slice(payload);
            return Ok(());
        }
        let sent = write_both(&mut self.socket, &self.outbox, payload).context("send");
        self.outbox.clear();
        sent
    }

    /// Sends the queued requests.
    pub(crate) fn flush(&mut self) -> Result<()> {
        if !self.outbox.is_empty() {
            self.socket.write_all(&self.outbox).context("send")?;
            self.outbox.clear();
        }
        Ok(())
    }

    /// The next final response; credits of interim responses are collected. The payload of a READ is dropped unless `keep`.
    pub(crate) fn receive(&mut self, keep: bool) -> Result<Answer<'_>> {
        loop {
            let (header, read_bytes) = self.receive_any(keep)?;
            self.credits.grant(header.credits);
            ensure!(header.is_response(), "the server sent a request");
            let is_interim =
                header.status == NtStatus::PENDING && header.flags.contains(HeaderFlags::ASYNC_COMMAND);
            if !is_interim {
                return Ok(Answer { header, message: &self.received[self.message_at..], read_bytes });
            }
        }
    }

    fn receive_any(&mut self, keep: bool) -> Result<(Header, usize)> {
        let word = self.intake.need(&self.socket, PREFIX_LEN)?;
        let len = u32::from_be_bytes([word[0], word[1], word[2], word[3]]) as usize;
        ensure!((HEADER_LEN..=FRAME_BYTES_MAX as usize).contains(&len), "the server sent a frame of {len} B");
        self.intake.pass(PREFIX_LEN);
        if let Protection::Sealed { opening, .. } = &self.protection {
            self.received.resize(len, 0);
            self.intake.take(&self.socket, &mut self.received)?;
            let plain = opening.open_in_place(&mut self.received).context("open a sealed answer")?.len();
            self.message_at = len - plain;
            return self.parsed();
        }
        self.message_at = 0;
        let head = len.min(READ_HEAD);
        let bytes = self.intake.need(&self.socket, head)?;
        let header = Header::parse(bytes)?;
        if !keep && header.command == Command::READ && header.status == NtStatus::SUCCESS {
            self.received.clear();
            self.received.extend_from_slice(bytes);
            let read = read::Response::parse(&self.received)?;
            let (offset, count) = (usize::from(read.data_offset), read.data_length as usize);
            ensure!(offset >= READ_HEAD && offset + count <= len, "a READ's answer is shorter than it says");
            self.intake.discard(&self.socket, len)?;
            return Ok((header, count));
        }
        self.received.resize(len, 0);
        self.intake.take(&self.socket, &mut self.received)?;
        self.parsed()
    }

    fn parsed(&self) -> Result<(Header, usize)> {
        let message = &self.received[self.message_at..];
        let header = Header::parse(message)?;
        let is_data = header.command == Command::READ && header.status == NtStatus::SUCCESS;
        let read_bytes = if is_data { read::Response::parse(message)?.data(message)?.len() } else { 0 };
        Ok((header, read_bytes))
    }

    /// Whether the next message has already arrived.
    pub(crate) fn has_answer(&self) -> bool {
        let buffered = self.intake.buffered();
        buffered.first_chunk().is_some_and(|word: &[u8; PREFIX_LEN]| {
            buffered.len() - PREFIX_LEN >= u32::from_be_bytes(*word) as usize
        })
    }

    /// Sends one request and waits for its response; no other request may be in flight.
    pub(crate) fn call(&mut self, request: &mut Request) -> Result<Answer<'_>> {
        let id = self.send(request)?.context("the server grants too few credits")?;
        self.flush()?;
        let answer = self.receive(true)?;
        ensure!(answer.header.message_id == id, "the answer is to another request");
        Ok(answer)
    }

    /// Opens a file. On a floor, the file's number is its handle.
    pub(crate) fn create(&mut self, name: &str, number: u64, how: Opening) -> Result<FileId> {
        if self.is_raw {
            return Ok(FileId { persistent: number, volatile: number });
        }
        let mut request = Request::default();
        request.set_create(name, how);
        self.call(&mut request)?.opened(name)
    }

    /// Reads from a file and keeps the payload of the response.
    pub(crate) fn read(&mut self, file_id: FileId, offset: u64, length: u32) -> Result<usize> {
        let mut request = Request::default();
        request.set_read(file_id, offset, length);
        let answer = self.call(&mut request)?;
        answer.check("READ")?;
        Ok(answer.read_bytes)
    }

    /// Ends the session and closes everything that is open.
    pub(crate) fn log_off(&mut self) -> Result<()> {
        let mut request = Request::default();
        request.set(Command::LOGOFF, |body| logoff::Request.encode(body));
        self.call(&mut request)?.check("LOGOFF")
    }

    /// Closes a file.
    pub(crate) fn close(&mut self, file_id: FileId) -> Result<()> {
        if self.is_raw {
            return Ok(());
        }
        let mut request = Request::default();
        request.set_close(file_id);
        self.call(&mut request)?.check("CLOSE")
    }
}

fn prefix(len: usize) -> Result<[u8; PREFIX_LEN]> {
    if len > FRAME_BYTES_MAX as usize {
        bail!("a message of {len} B does not fit in a frame");
    }
    Ok(u32::try_from(len)?.to_be_bytes())
}

/// Writes both in one call, as far as the socket accepts them.
fn write_both(socket: &mut TcpStream, head: &[u8], payload: &[u8]) -> std::io::Result<()> {
    let mut done = 0;
    while done < head.len() {
        match socket.write_vectored(&[IoSlice::new(&head[done..]), IoSlice::new(payload)]) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    socket.write_all(&payload[done - head.len()..])
}

/// Payload for a load: the same bytes for each WRITE, because generating new ones would add to the client's work.
pub(crate) fn payload(bytes: usize) -> Arc<[u8]> {
    super::content::bytes(PAYLOAD_FILE, 0, bytes).into()
}

/// A file number that no measured file has.
const PAYLOAD_FILE: u64 = 0xff_ffff;
