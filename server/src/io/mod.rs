//! I/O of the event loops: one interface, two engines.
//!
//! [`uring`] executes everything on a ring, except for operations that wait for stable storage, which run in a separate lane.
//! [`readiness`] is for environments that forbid io_uring (the default seccomp profile of containers blocks it): epoll for
//! sockets, the lanes for files. The loop submits [`Operation`]s, which own all memory that the kernel accesses in the
//! meantime, and receives them back with their results.

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

/// Identifies the purpose of a submitted operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The connection's id.
    pub connection: u64,
    /// What the operation does for the connection.
    pub purpose: Purpose,
}

/// What an operation does for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The receive; there is at most one.
    Receive,
    /// The send; there is at most one.
    Send,
    /// A file system operation, and when it began.
    File(OpId, Instant),
    /// A descriptor that belongs to the loop.
    Readable,
}

/// An operation for an engine. It owns its buffers until it is done.
pub enum Operation {
    /// Receives into `buffer` from `start + filled` until at least `least` and at most `most` bytes are present. Ends with fewer
    /// bytes if the peer sends no more.
    Receive {
        /// The socket to receive from.
        socket: Arc<OwnedFd>,
        /// The buffer to fill.
        buffer: Buffer,
        /// Position of byte 0 (as [`Buffer::bytes`] counts).
        start: isize,
        /// Bytes present.
        filled: usize,
        /// Minimum number of bytes.
        least: usize,
        /// Maximum number of bytes.
        most: usize,
    },
    /// Sends a whole message.
    Send {
        /// The socket to send to.
        socket: Arc<OwnedFd>,
        /// The message to send.
        message: Message,
    },
    /// Reads `length` bytes at `offset` into the buffer's data, fewer only at the file's end.
    Read {
        /// The file to read.
        file: Arc<OpenFile>,
        /// The buffer to fill.
        buffer: Buffer,
        /// First byte.
        offset: u64,
        /// Bytes requested.
        length: usize,
        /// Bytes read.
        filled: usize,
        /// Whether the read starts by bypassing the page cache.
        past_cache: PastCache,
    },
    /// Writes `range` of the frame at `offset`.
    Write {
        /// The file to write, as a change of its volume.
        change: Passage<Arc<OpenFile>>,
        /// The frame that contains the data.
        frame: Arc<dyn Frame>,
        /// The part of the frame to write.
        range: Range<usize>,
        /// First byte.
        offset: u64,
        /// Bytes written.
        written: usize,
        /// Whether the data must be on stable storage before the operation is done.
        durable: bool,
    },
    /// Waits until a descriptor is readable.
    Readable {
        /// The descriptor.
        descriptor: Arc<OwnedFd>,
    },
}

/// Whether a read starts by bypassing the page cache: only once; the rest goes through the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PastCache {
    /// Bytes to request directly, as returned by [`OpenFile::direct_length`]; 0 for none. Can exceed the requested length.
    pub asked: usize,
    /// Requested bytes that were read directly.
    pub came: usize,
}

/// Returns the descriptor to read next, and the end position in the buffer.
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
    /// The token of the submission.
    pub token: Token,
    /// The operation, with its progress.
    pub operation: Operation,
    /// The result.
    pub result: Result<(), Errno>,
}

/// The I/O engine of an event loop.
pub trait Engine {
    /// "io_uring" or "readiness".
    fn name(&self) -> &'static str;

    /// Prepares a socket for operations.
    ///
    /// # Errors
    /// Errors from the system calls.
    fn adopt(&mut self, socket: &Arc<OwnedFd>) -> Result<(), Errno>;

    /// Undoes [`Engine::adopt`]. No operation may be in flight on the socket.
    fn forget(&mut self, socket: &Arc<OwnedFd>);

    /// Starts an operation.
    fn submit(&mut self, token: Token, operation: Operation);

    /// Waits for completions, for the waker or for the timeout, and appends the completed operations.
    ///
    /// # Errors
    /// Errors from the system calls: the engine is broken.
    fn wait(&mut self, time_max: Duration, done: &mut Vec<Completion>) -> Result<(), Errno>;
}

/// Wakes a waiting engine, from any thread.
#[derive(Clone, Debug)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Creates a waker for one engine.
    ///
    /// # Errors
    /// Errors from eventfd.
    pub fn new() -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    /// Makes the engine's current or next wait return.
    pub fn wake(&self) {
        // It can only fail if the counter is full, which wakes as well.
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
    /// Headers and bodies; long ones are charged as memory.
    Bytes(Vec<u8>, Option<Charge>),
    /// Read data.
    Payload(Box<dyn Payload>),
    /// Data in a mapping of a file, which the kernel copies while it sends them.
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

    /// The part from byte `skip`, for the kernel.
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

/// The data of one send: one frame or several.
pub struct Message {
    parts: Vec<Part>,
    /// Their share of limits, held until they are sent.
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
    /// Creates a message of `parts`.
    #[must_use]
    pub fn new(parts: Vec<Part>) -> Self {
        let length = parts.iter().map(Part::length).sum();
        Self { parts, held: Held::default(), length, sent: 0 }
    }

    /// Adds a share of limits that the message holds until it is sent.
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

    /// Appends the next message. Returns false, and does nothing, if the send would have too many parts or bytes.
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

    /// Bytes that are copied from the page cache when sent.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        let mapped = self.parts.iter().filter(|part| matches!(part, Part::Mapped(_)));
        mapped.map(Part::length).sum()
    }

    /// Copies a piece of the first unsent mapped data: a page has disappeared. Returns false if nothing was left to copy, or the
    /// data cannot be read.
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

    /// Returns what remains to be sent, at most [`SEND_PARTS_MAX`] pieces.
    fn rest(&self) -> impl Iterator<Item = IoSlice<'_>> {
        let (mut skip, mut is_whole) = (self.sent, true);
        self.parts
            .iter()
            .map_while(move |part| {
                let length = part.length();
                let rest = is_whole.then(|| (skip < length).then(|| part.slice(skip)))?;
                // Data after a copied piece are sent after it.
                is_whole = rest.as_ref().is_none_or(|rest| skip + rest.len() == length);
                skip = skip.saturating_sub(length);
                Some(rest)
            })
            .flatten()
            .take(SEND_PARTS_MAX)
    }
}

/// Part lists of sent messages, for reuse.
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

    /// Drops the parts of a message and keeps its list, unless the list is long or there are many.
    pub fn keep(&mut self, message: Message) {
        let mut parts = message.parts;
        parts.clear();
        if parts.capacity() <= SPARE_PARTS_MAX && self.0.len() < SPARE_LISTS_MAX {
            self.0.push(parts);
        }
    }
}

impl Operation {
    /// Whether it is done only when its data are on stable storage.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        matches!(self, Self::Write { durable: true, .. })
    }

    /// Whether it reads or writes a file in memory, which never waits.
    fn is_in_memory(&self) -> bool {
        match self {
            Self::Read { file, .. } => file.is_in_memory(),
            Self::Write { change, .. } => change.through().is_in_memory(),
            Self::Receive { .. } | Self::Send { .. } | Self::Readable { .. } => false,
        }
    }

    /// Records that `bytes` more were transferred. Returns true if the operation is done.
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
                    // The rest, if any, no longer needs to be aligned.
                    *past_cache = PastCache { asked: 0, came: *filled };
                }
                // A short read, most likely at the end of the file: querying its size is cheaper than reading again.
                *filled >= *length || (through_cache && bytes == 0) || file.ends_by(*offset + *filled as u64)
            }
            Self::Write { written, range, .. } => {
                *written += bytes;
                bytes == 0 || *written >= range.len()
            }
            Self::Readable { .. } => true,
        }
    }

    /// Handles a failure. Returns true if the operation continues in another way: a failed direct read continues through the page
    /// cache, which reports any real error; data that cannot be sent from a mapping are sent from a copy.
    fn turns_back(&mut self, errno: Errno) -> bool {
        let (file, past_cache) = match self {
            // The file was truncated in the meantime.
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
