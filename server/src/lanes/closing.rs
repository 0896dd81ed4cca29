//! Closes descriptors and removes mappings for threads that must not wait.
//!
//! The last close(2) of an unlinked file frees its extents, and that of a written file frees its preallocated blocks: for a
//! large file on a busy device that takes seconds. munmap(2) visits every mapped page.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{Lane, Origin, Queues};

thread_local! {
    static ELSEWHERE: RefCell<Option<Queues>> = const { RefCell::new(None) };
}

/// While this value exists, file descriptors that its thread drops are closed by [`Lane::Close`].
#[derive(Debug)]
pub struct ClosesElsewhere(PhantomData<*const ()>);

impl ClosesElsewhere {
    /// Enables this for the calling thread.
    #[must_use]
    pub fn on_this_thread(queues: &Queues) -> Self {
        ELSEWHERE.set(Some(queues.clone()));
        Self(PhantomData)
    }
}

impl Drop for ClosesElsewhere {
    fn drop(&mut self) {
        ELSEWHERE.set(None);
    }
}

/// A descriptor of a backend's file or directory.
#[derive(Debug)]
pub struct Descriptor {
    /// `None` while it is being dropped.
    fd: Option<OwnedFd>,
    closes_at_once: bool,
}

impl Descriptor {
    /// Wraps a descriptor of a file, or of something that may be a file.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), closes_at_once: false }
    }

    /// Marks the descriptor as that of a directory, which can be closed without delay.
    pub fn set_directory(&mut self) {
        self.closes_at_once = true;
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("until it is dropped").as_fd()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        if self.closes_at_once {
            return;
        }
        drop_elsewhere(fd);
    }
}

/// Drops a value that takes time to drop: in [`Lane::Close`] if this thread must not wait, otherwise here.
pub fn drop_elsewhere<T: Send + 'static>(value: T) {
    // If the thread is exiting, it no longer runs a loop.
    let elsewhere = ELSEWHERE.try_with(|queues| queues.borrow().clone()).ok().flatten();
    if let Some(queues) = elsewhere {
        queues.submit(Lane::Close, Origin::Server, move || drop(value));
    }
}
