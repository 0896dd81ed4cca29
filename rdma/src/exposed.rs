//! Memory that a peer can access by a token: a client exposes it to a server.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rdma_sys::{ibv_access_flags, ibv_alloc_mw, ibv_dealloc_mw, ibv_inc_rkey, ibv_mw, ibv_mw_type};
use rustix::io::Errno;

use crate::device::{Device, Region};
use crate::{check, last_errno};

/// Memory that a peer can read and write at any time while this value lives.
pub struct Exposed {
    /// Declared before the bytes: it must be dropped before they are freed.
    region: Region,
    /// Atomic, because the device can write them at any time on behalf of the peer.
    bytes: Box<[AtomicU8]>,
}

impl fmt::Debug for Exposed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exposed({} bytes by {:?})", self.bytes.len(), self.region)
    }
}

impl Exposed {
    /// Allocates `length` zero bytes.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn new(device: &Arc<Device>, length: usize) -> Result<Self, Errno> {
        let zeros = Box::into_raw(vec![0_u8; length].into_boxed_slice());
        // SAFETY: an atomic byte has the size, alignment and values of a byte.
        let mut bytes = unsafe { Box::from_raw(zeros as *mut [AtomicU8]) };
        let mut access = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | ibv_access_flags::IBV_ACCESS_REMOTE_READ
            | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        if device.has_windows() {
            access |= ibv_access_flags::IBV_ACCESS_MW_BIND;
        }
        // SAFETY: the bytes are atomic and so may be written by the device at any time; they are freed after the region.
        let region = unsafe { device.register_raw(bytes.as_mut_ptr().cast(), length, access) }?;
        Ok(Self { region, bytes })
    }

    /// The peer's address of the first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.bytes.as_ptr() as u64
    }

    /// The token that gives the peer access to all bytes.
    #[must_use]
    pub fn token(&self) -> u32 {
        self.region.token()
    }

    /// Length in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.bytes.len()
    }

    /// Writes bytes.
    pub fn put(&self, at: usize, from: &[u8]) {
        for (to, from) in self.bytes[at..at + from.len()].iter().zip(from) {
            to.store(*from, Ordering::Relaxed);
        }
    }

    /// Reads bytes.
    #[must_use]
    pub fn get(&self, at: usize, length: usize) -> Vec<u8> {
        self.bytes[at..at + length].iter().map(|byte| byte.load(Ordering::Relaxed)).collect()
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }
}

/// A token for exposed memory that its peer can invalidate (a memory window of type 2). The kernel's software device does not
/// release a queue pair while a window is bound through it: drop the window first.
pub struct Window {
    window: NonNull<ibv_mw>,
    memory: Arc<Exposed>,
}

// SAFETY: verbs are thread-safe.
unsafe impl Send for Window {}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window on {:?}", self.memory)
    }
}

impl Window {
    /// Allocates a window without access: [`crate::Endpoint::bind`] grants it.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device does not support such windows; other errors of the device.
    pub fn new(memory: &Arc<Exposed>) -> Result<Self, Errno> {
        let device = memory.region.device();
        if !device.has_windows() {
            return Err(Errno::OPNOTSUPP);
        }
        // SAFETY: the domain lives as long as the device, which the memory holds.
        let window = unsafe { ibv_alloc_mw(device.domain(), ibv_mw_type::IBV_MW_TYPE_2) };
        let window = window.and_then(NonNull::new).ok_or_else(last_errno)?;
        Ok(Self { window, memory: Arc::clone(memory) })
    }

    pub(crate) fn raw(&self) -> *mut ibv_mw {
        self.window.as_ptr()
    }

    pub(crate) fn memory(&self) -> &Exposed {
        &self.memory
    }

    /// The token of the next binding: never the previous one.
    pub(crate) fn next_token(&mut self) -> u32 {
        // SAFETY: the window lives, and nothing else changes it.
        unsafe { ibv_inc_rkey(self.window.as_ref().rkey) }
    }

    pub(crate) fn set_token(&mut self, token: u32) {
        // SAFETY: as above.
        unsafe { self.window.as_mut().rkey = token }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: made by this window and released only here.
        if let Err(error) = check(unsafe { ibv_dealloc_mw(self.window.as_ptr()) }) {
            tracing::debug!(%error, "a memory window was not released");
        }
    }
}
