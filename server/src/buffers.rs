//! Contents of payload buffers: received frames, and data that a READ returned.

use std::any::Any;
use std::ops::Range;

use forebay_smb::fs::{Frame, Payload};

pub use forebay_rdma::{Buffer, BufferPool, Charge, OutOfBuffers, PAGE, Shortage};

const _: () = assert!(forebay_rdma::BUFFER_BYTES >= forebay_smb::limits::FRAME_BYTES_MAX as usize);
const _: () = assert!(forebay_rdma::BUFFER_BYTES >= forebay_smb::limits::IO_BYTES_MAX as usize + PAGE);

/// A received frame in its buffer.
#[derive(Debug)]
pub struct FrameBuffer {
    buffer: Buffer,
    start: isize,
    length: usize,
}

impl FrameBuffer {
    /// The `length` bytes from `start` (counted as [`Buffer::bytes`] does).
    #[must_use]
    pub fn new(buffer: Buffer, start: isize, length: usize) -> Self {
        Self { buffer, start, length }
    }

    /// Reduces the frame to `range`: the payload of a transform header.
    #[must_use]
    pub fn narrow(mut self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.length, "a part of the frame");
        self.start += range.start.cast_signed();
        self.length = range.len();
        self
    }

    /// The frame, to be decrypted in place or filled.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let range = self.start..self.start + self.length.cast_signed();
        self.buffer.bytes_mut(range)
    }

    /// Bytes of the frame.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }
}

impl Frame for FrameBuffer {
    fn bytes(&self) -> &[u8] {
        self.buffer.bytes(self.start..self.start + self.length.cast_signed())
    }

    fn held_bytes(&self) -> usize {
        self.buffer.capacity().max(self.length)
    }
}

/// Data that a READ returned, in a buffer with headroom.
#[derive(Debug)]
pub struct ReadBuffer {
    buffer: Buffer,
    length: usize,
}

impl ReadBuffer {
    /// The first `length` bytes of the buffer's data.
    #[must_use]
    pub fn new(buffer: Buffer, length: usize) -> Self {
        assert!(length <= buffer.capacity(), "inside of the buffer");
        Self { buffer, length }
    }

    /// The buffer and the length of its data.
    #[must_use]
    pub fn into_parts(self) -> (Buffer, usize) {
        (self.buffer, self.length)
    }
}

impl Payload for ReadBuffer {
    fn length(&self) -> usize {
        self.length
    }

    fn bytes(&self) -> &[u8] {
        self.buffer.bytes(0..self.length.cast_signed())
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.bytes_mut(0..self.length.cast_signed())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}
