//! Pooled, page-aligned buffers for payload, which a device can reach where they were made for one.
//!
//! A buffer has one page of headroom before its aligned data, so that the transport can put a response's headers
//! (or a transform header) directly in front of READ data and send or seal both as one piece. Buffers come back most
//! recently freed first, so that a busy loop keeps working in the same, cache-warm memory. They are zeroed by the
//! allocator once and never again.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use crate::limits::{BUFFER_BYTES_MAX, BUFFER_POOLED_BYTES_MAX};
use crate::{Device, Region};

/// Alignment of a buffer's data, and the headroom before it.
pub const PAGE: usize = 4096;

/// Data bytes of the size classes.
const CLASSES: [usize; 8] =
    [8 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, (8 << 20) + (64 << 10)];

/// Data bytes of the largest buffer.
pub const BUFFER_BYTES: usize = CLASSES[CLASSES.len() - 1];

/// The buffers' memory is used up, or more is asked for than any buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no payload buffer of {0} bytes to be had")]
pub struct OutOfBuffers(pub usize);

/// A pool of buffers; clones share it.
#[derive(Clone, Debug)]
pub struct BufferPool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    free: [Mutex<Vec<Memory>>; CLASSES.len()],
    /// All bytes, in use and pooled, against `bytes_max`.
    bytes: AtomicUsize,
    bytes_pooled: AtomicUsize,
    bytes_max: usize,
    /// What can reach all of it.
    device: Option<Arc<Device>>,
}

struct Memory {
    /// Before the bytes: it must be gone when they are freed.
    region: Option<Region>,
    bytes: Box<[u8]>,
    /// Where the aligned data begin; at least [`PAGE`].
    data: usize,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.bytes.len())
    }
}

impl Memory {
    fn new(class: usize, device: Option<&Arc<Device>>) -> Result<Self, Errno> {
        let mut bytes = vec![0_u8; memory_bytes(class)].into_boxed_slice();
        let data = PAGE + bytes.as_ptr().align_offset(PAGE);
        if let Some(device) = device
            && let Some(node) = device.numa_node
            && let Err(error) = crate::numa::prefer(&mut bytes, node)
        {
            tracing::debug!(%error, node, device = device.name(), "payload buffers lie where the kernel puts them");
        }
        let region = device.map(|device| device.register(&mut bytes)).transpose()?;
        Ok(Self { region, bytes, data })
    }
}

const fn memory_bytes(class: usize) -> usize {
    CLASSES[class] + 2 * PAGE
}

impl Default for BufferPool {
    fn default() -> Self {
        Self::new(BUFFER_BYTES_MAX)
    }
}

impl BufferPool {
    /// A pool that never holds more than `bytes_max`.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self::made(bytes_max, None)
    }

    /// The same, of buffers that `device` can reach.
    #[must_use]
    pub fn registered(bytes_max: usize, device: Arc<Device>) -> Self {
        Self::made(bytes_max, Some(device))
    }

    fn made(bytes_max: usize, device: Option<Arc<Device>>) -> Self {
        Self(Arc::new(Pool {
            free: Default::default(),
            bytes: AtomicUsize::new(0),
            bytes_pooled: AtomicUsize::new(0),
            bytes_max,
            device,
        }))
    }

    /// A buffer of at least `length` data bytes, with whatever its last user left in it.
    ///
    /// # Errors
    /// [`OutOfBuffers`] beyond the pool's limit and beyond the largest size.
    pub fn take(&self, length: usize) -> Result<Buffer, OutOfBuffers> {
        let class = CLASSES.iter().position(|&size| size >= length).ok_or(OutOfBuffers(length))?;
        let pooled = self.0.free[class].lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match pooled {
            Some(memory) => {
                self.0.bytes_pooled.fetch_sub(memory_bytes(class), Ordering::Relaxed);
                memory
            }
            None => {
                let size = memory_bytes(class);
                let before = self.0.bytes.fetch_add(size, Ordering::Relaxed);
                if before + size > self.0.bytes_max {
                    self.0.bytes.fetch_sub(size, Ordering::Relaxed);
                    return Err(OutOfBuffers(length));
                }
                Memory::new(class, self.0.device.as_ref()).map_err(|error| {
                    self.0.bytes.fetch_sub(size, Ordering::Relaxed);
                    tracing::warn!(%error, bytes = size, "memory could not be registered with the RDMA device");
                    OutOfBuffers(length)
                })?
            }
        };
        Ok(Buffer { memory: Some(memory), class, pool: Arc::clone(&self.0) })
    }

    /// Bytes of buffers that somebody uses.
    #[must_use]
    pub fn bytes_in_use(&self) -> usize {
        self.0.bytes.load(Ordering::Relaxed).saturating_sub(self.0.bytes_pooled.load(Ordering::Relaxed))
    }
}

/// One buffer; goes back to its pool when dropped.
pub struct Buffer {
    memory: Option<Memory>,
    class: usize,
    pool: Arc<Pool>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", CLASSES[self.class])
    }
}

impl Buffer {
    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("a buffer has its memory until it is dropped")
    }

    /// Aligned data bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        CLASSES[self.class]
    }

    /// By what a device can reach it, where one can.
    #[must_use]
    pub fn region(&self) -> Option<&Region> {
        self.memory().region.as_ref()
    }

    /// `range` of the buffer, counted from the aligned data; negative positions down to `-PAGE` are the headroom.
    #[must_use]
    pub fn bytes(&self, range: Range<isize>) -> &[u8] {
        let memory = self.memory();
        &memory.bytes[place(memory, &range)]
    }

    /// As [`Buffer::bytes`], to be written.
    #[must_use]
    pub fn bytes_mut(&mut self, range: Range<isize>) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("a buffer has its memory until it is dropped");
        let place = place(memory, &range);
        &mut memory.bytes[place]
    }
}

fn place(memory: &Memory, range: &Range<isize>) -> Range<usize> {
    let at = |position: isize| memory.data.checked_add_signed(position).expect("inside of the buffer");
    at(range.start)..at(range.end)
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let size = memory_bytes(self.class);
        if self.pool.bytes_pooled.fetch_add(size, Ordering::Relaxed) + size > BUFFER_POOLED_BYTES_MAX {
            self.pool.bytes_pooled.fetch_sub(size, Ordering::Relaxed);
            self.pool.bytes.fetch_sub(size, Ordering::Relaxed);
            return;
        }
        self.pool.free[self.class].lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_aligned_and_have_headroom() {
        let pool = BufferPool::default();
        for length in [1, 8 << 10, 100_000, 1 << 20, 8 << 20] {
            let mut buffer = pool.take(length).expect("memory");
            assert!(buffer.capacity() >= length);
            assert_eq!(buffer.bytes(0..1).as_ptr().align_offset(PAGE), 0);
            buffer.bytes_mut(-(PAGE.cast_signed())..0).fill(1);
            let all = length.cast_signed();
            buffer.bytes_mut(0..all).fill(2);
        }
    }

    #[test]
    fn the_most_recently_freed_buffer_comes_first() {
        let pool = BufferPool::default();
        let (mut a, b) = (pool.take(10).expect("memory"), pool.take(10).expect("memory"));
        a.bytes_mut(0..1)[0] = 7;
        drop(b);
        drop(a);
        assert_eq!(pool.take(10).expect("memory").bytes(0..1), [7]);
    }

    #[test]
    fn the_limit_holds_and_dropping_makes_room() {
        let pool = BufferPool::new(memory_bytes(4));
        let buffer = pool.take(1 << 20).expect("one fits");
        assert_eq!(pool.take(1 << 20).err(), Some(OutOfBuffers(1 << 20)));
        assert_eq!(pool.bytes_in_use(), memory_bytes(4));
        drop(buffer);
        assert_eq!(pool.bytes_in_use(), 0);
        assert!(pool.take(1 << 20).is_ok());
        assert_eq!(pool.take(16 << 20).err(), Some(OutOfBuffers(16 << 20)));
    }
}
