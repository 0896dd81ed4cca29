//! How an event loop gets its I/O done: one interface, two engines.
//!
//! [`uring`] has the kernel do everything on a ring but what waits for stable storage: that goes to a lane of its own.
//! [`readiness`] is for where io_uring is forbidden (the default seccomp profile of containers blocks it): sockets by epoll,
//! files by the lanes. The loop submits [`Operation`]s, which own all that the kernel touches meanwhile, and gets them back
//! with their results.

mod on_lanes;
pub mod readiness;
#[cfg(test)]
mod tests;
pub mod uring;

use std::fmt;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_smb::engine::Held;
use forebay_smb::fs::{Frame, OpId, Payload};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::backend::directory::{MappedRead, OpenFile};
use crate::buffers::{Buffer, Charge};
use crate::gate::Passage;
use crate::limits::{SEND_PARTS_MAX, SPARE_LISTS_MAX, SPARE_PARTS_MAX};

/// What an operation was submitted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The connection's id.
    pub connection: u64,
    /// What of it.
    pub purpose: Purpose,
}

/// What of a connection an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its one receive.
    Receive,
    /// Its one send.
    Send,
    /// An operation with the file system, and when it was begun.
    File(OpId, Instant),
    /// A descriptor of the loop's own.
    Readable,
}

/// Something for an engine to do. It owns its buffers until it is done.
pub enum Operation {
    /// Receives into `buffer` from `start + filled` until at least `least` and at most `most` bytes are there. Ends with
    /// fewer where the peer sends no more.
    Receive {
        /// From where.
        socket: Arc<OwnedFd>,
        /// To where.
        buffer: Buffer,
        /// Where byte 0 goes (as [`Buffer::bytes`] counts).
        start: isize,
        /// Bytes there.
        filled: usize,
        /// Enough.
        least: usize,
        /// All there is place for.
        most: usize,
    },
    /// Sends all of a message.
    Send {
        /// To where.
        socket: Arc<OwnedFd>,
        /// What.
        message: Message,
    },
    /// Reads `length` bytes at `offset` into the buffer's data, fewer only at the file's end.
    Read {
        /// From where.
        file: Arc<OpenFile>,
        /// To where.
        buffer: Buffer,
        /// First byte.
        offset: u64,
        /// Bytes wanted.
        length: usize,
        /// Bytes read.
        filled: usize,
        /// How it begins.
        past_cache: PastCache,
    },
    /// Writes `range` of the frame at `offset`.
    Write {
        /// To where: a change of the file's volume.
        change: Passage<Arc<OpenFile>>,
        /// The data are in it.
        frame: Arc<dyn Frame>,
        /// Which of it.
        range: Range<usize>,
        /// First byte.
        offset: u64,
        /// Bytes written.
        written: usize,
        /// On stable storage before it is done.
        durable: bool,
    },
    /// Waits until a descriptor is readable.
    Readable {
        /// Which.
        descriptor: Arc<OwnedFd>,
    },
}

/// Whether a read begins past the page cache: once, and what is left after that goes through it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PastCache {
    /// Bytes to ask for so, which [`OpenFile::direct_length`] tells; 0: none. May be more than are wanted.
    pub asked: usize,
    /// Bytes wanted that came so.
    pub came: usize,
}

/// By which descriptor to read next, and up to which byte of the buffer.
fn next_read(file: &OpenFile, length: usize, past_cache: PastCache) -> (BorrowedFd<'_>, usize) {
    match file.direct_fd() {
        Some(descriptor) if past_cache.asked > 0 => (descriptor, past_cache.asked),
        _ => (file.as_fd(), length),
    }
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Receive { .. } => "Receive",
            Self::Send { .. } => "Send",
            Self::Read { .. } => "Read",
            Self::Write { .. } => "Write",
            Self::Readable { .. } => "Readable",
        })
    }
}

/// An operation that is done.
#[derive(Debug)]
pub struct Completion {
    /// As submitted.
    pub token: Token,
    /// With what it got done.
    pub operation: Operation,
    /// How it ended.
    pub result: Result<(), Errno>,
}

/// An event loop's I/O.
pub trait Engine {
    /// "io_uring" or "readiness".
    fn name(&self) -> &'static str;

    /// Prepares a socket that operations will be submitted for.
    ///
    /// # Errors
    /// Those of the system calls.
    fn adopt(&mut self, socket: &Arc<OwnedFd>) -> Result<(), Errno>;

    /// Ends what [`Engine::adopt`] began; nothing is in flight on the socket.
    fn forget(&mut self, socket: &Arc<OwnedFd>);

    /// Begins an operation.
    fn submit(&mut self, token: Token, operation: Operation);

    /// Waits for completions, for the waker or for the time to pass, and appends what is done.
    ///
    /// # Errors
    /// Those of the system calls: the engine is broken.
    fn wait(&mut self, time_max: Duration, done: &mut Vec<Completion>) -> Result<(), Errno>;
}

/// Wakes an engine that waits, from any thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// A waker for one engine.
    ///
    /// # Errors
    /// Those of eventfd.
    pub fn new() -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    /// Has the engine's present or next wait return.
    pub fn wake(&self) {
        // It can only fail by being full, which wakes as well.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&*self.0, &mut count);
    }
}

/// A part of a message.
pub enum Part {
    /// The length prefix of a frame ([MS-SMB2] 2.1).
    Prefix([u8; 4]),
    /// Headers and bodies; long ones are counted as memory.
    Bytes(Vec<u8>, Option<Charge>),
    /// Data that were read.
    Payload(Box<dyn Payload>),
    /// Data of a file's mapping, which the kernel copies as it sends them.
    Mapped(MappedRead),
    /// Prefix, headers and data in one piece.
    Whole(Buffer, Range<isize>),
}

impl Part {
    fn length(&self) -> usize {
        match self {
            Self::Prefix(bytes) => bytes.len(),
            Self::Bytes(bytes, _) => bytes.len(),
            Self::Payload(payload) => payload.length(),
            Self::Mapped(read) => read.length(),
            Self::Whole(_, range) => range.len(),
        }
    }

    /// From byte `skip` on, for the kernel.
    fn slice(&self, skip: usize) -> IoSlice<'_> {
        let all: &[u8] = match self {
            Self::Prefix(bytes) => bytes,
            Self::Bytes(bytes, _) => bytes,
            Self::Payload(payload) => payload.bytes(),
            Self::Mapped(read) => return read.slice(skip),
            Self::Whole(buffer, range) => buffer.bytes(range.clone()),
        };
        IoSlice::new(all.get(skip..).unwrap_or_default())
    }
}

/// What one send carries: one frame or several.
pub struct Message {
    parts: Vec<Part>,
    /// What they take of limits until they are sent.
    held: Held,
    length: usize,
    sent: usize,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Message({} of {} bytes sent)", self.sent, self.length)
    }
}

impl Message {
    /// A message of `parts`.
    #[must_use]
    pub fn new(parts: Vec<Part>) -> Self {
        let length = parts.iter().map(Part::length).sum();
        Self { parts, held: Held::default(), length, sent: 0 }
    }

    /// The same, which takes this of limits until it is sent.
    #[must_use]
    pub fn holding(self, held: Held) -> Self {
        Self { held, ..self }
    }

    /// Bytes of all parts.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes sent.
    #[must_use]
    pub fn sent(&self) -> usize {
        self.sent
    }

    /// Takes in the message that follows. False, and nothing done, where the send would have too many parts or bytes.
    pub fn gather(&mut self, next: &mut Message, bytes_max: usize) -> bool {
        let fits =
            self.parts.len() + next.parts.len() <= SEND_PARTS_MAX && self.length + next.length <= bytes_max;
        if fits {
            self.parts.append(&mut next.parts);
            self.held.join(std::mem::take(&mut next.held));
            self.length += next.length;
        }
        fits
    }

    /// Bytes that sending copies from the page cache.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        let mapped = self.parts.iter().filter(|part| matches!(part, Part::Mapped(_)));
        mapped.map(Part::length).sum()
    }

    /// Copies a piece of the first data that lie in a mapping: a page is not there any more. False where nothing was left to
    /// copy, or it cannot be read.
    fn copy_mapped(&mut self) -> bool {
        let mut skip = self.sent;
        for part in &mut self.parts {
            let length = part.length();
            if let Part::Mapped(read) = part {
                if skip >= length {
                    read.drop_piece();
                } else {
                    match read.copy_piece(skip) {
                        Ok(true) => return true,
                        Ok(false) => {}
                        Err(_) => return false,
                    }
                }
            }
            skip = skip.saturating_sub(length);
        }
        false
    }

    /// What is left to send, at most [`SEND_PARTS_MAX`] pieces of it.
    fn rest(&self) -> impl Iterator<Item = IoSlice<'_>> {
        let (mut skip, mut is_whole) = (self.sent, true);
        self.parts
            .iter()
            .map_while(move |part| {
                let length = part.length();
                let rest = is_whole.then(|| (skip < length).then(|| part.slice(skip)))?;
                // What follows a copied piece is sent after it.
                is_whole = rest.as_ref().is_none_or(|rest| skip + rest.len() == length);
                skip = skip.saturating_sub(length);
                Some(rest)
            })
            .flatten()
            .take(SEND_PARTS_MAX)
    }
}

/// Lists of parts of messages that were sent, to be used again.
#[derive(Default)]
pub struct SpareParts(Vec<Vec<Part>>);

impl fmt::Debug for SpareParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpareParts({})", self.0.len())
    }
}

impl SpareParts {
    /// An empty list.
    #[must_use]
    pub fn take(&mut self) -> Vec<Part> {
        self.0.pop().unwrap_or_default()
    }

    /// Drops the parts of a message and keeps their list, unless it is long or there are many.
    pub fn keep(&mut self, message: Message) {
        let mut parts = message.parts;
        parts.clear();
        if parts.capacity() <= SPARE_PARTS_MAX && self.0.len() < SPARE_LISTS_MAX {
            self.0.push(parts);
        }
    }
}

impl Operation {
    /// Whether it is done only when something is on stable storage.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        matches!(self, Self::Write { durable: true, .. })
    }

    /// Whether it reads or writes a file in memory, which waits for nothing.
    fn is_in_memory(&self) -> bool {
        match self {
            Self::Read { file, .. } => file.is_in_memory(),
            Self::Write { change, .. } => change.through().is_in_memory(),
            Self::Receive { .. } | Self::Send { .. } | Self::Readable { .. } => false,
        }
    }

    /// Takes note of `bytes` more having been moved. True where the operation is done.
    fn advance(&mut self, bytes: usize) -> bool {
        match self {
            Self::Receive { filled, least, .. } => {
                *filled += bytes;
                bytes == 0 || *filled >= *least
            }
            Self::Send { message, .. } => {
                message.sent += bytes;
                message.sent >= message.length
            }
            Self::Read { file, offset, filled, length, past_cache, .. } => {
                *filled = (*filled + bytes).min(*length);
                let through_cache = past_cache.asked == 0;
                if !through_cache {
                    // What follows, if anything does, need not be aligned any more.
                    *past_cache = PastCache { asked: 0, came: *filled };
                }
                // Too few, most likely because the file ends there: to ask for its size costs less than to read again.
                *filled >= *length || (through_cache && bytes == 0) || file.ends_by(*offset + *filled as u64)
            }
            Self::Write { written, range, .. } => {
                *written += bytes;
                bytes == 0 || *written >= range.len()
            }
            Self::Readable { .. } => true,
        }
    }

    /// Takes note of a failure. True where the operation goes on in another way: what cannot be read past the page cache is
    /// read through it, and that says what is wrong, if anything is; what cannot be sent from a mapping is sent from a copy.
    fn turns_back(&mut self, errno: Errno) -> bool {
        let (file, past_cache) = match self {
            // The file was cut off meanwhile.
            Self::Send { message, .. } => return errno == Errno::FAULT && message.copy_mapped(),
            Self::Read { file, past_cache, .. } => (file, past_cache),
            _ => return false,
        };
        if past_cache.asked == 0 {
            return false;
        }
        past_cache.asked = 0;
        if matches!(errno, Errno::INVAL | Errno::OPNOTSUPP) {
            file.refuse_direct();
        }
        true
    }
}
