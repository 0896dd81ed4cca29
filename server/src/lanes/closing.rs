//! Descriptors that are not closed, and mappings that are not removed, on a thread that must not wait.
//!
//! The last close(2) of an unlinked file frees its extents, and that of a file that was written gives back what was
//! allocated ahead: for a large file on a busy device that takes seconds. munmap(2) visits every page that was mapped.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{Lane, Origin, Queues};

thread_local! {
    static ELSEWHERE: RefCell<Option<Queues>> = const { RefCell::new(None) };
}

/// As long as it lives, descriptors of files that are dropped on its thread are closed by [`Lane::Close`].
#[derive(Debug)]
pub struct ClosesElsewhere(PhantomData<*const ()>);

impl ClosesElsewhere {
    /// From now on, for the calling thread.
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
    /// None while it is dropped.
    fd: Option<OwnedFd>,
    closes_at_once: bool,
}

impl Descriptor {
    /// Of a file, or of what may be one.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: Some(fd), closes_at_once: false }
    }

    /// It is a directory's: the end of such a descriptor takes no time.
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

/// Drops what takes time to drop: in [`Lane::Close`] where this thread must not wait, else here.
pub fn drop_elsewhere<T: Send + 'static>(value: T) {
    // Where the thread ends, there is no loop on it any more.
    let elsewhere = ELSEWHERE.try_with(|queues| queues.borrow().clone()).ok().flatten();
    if let Some(queues) = elsewhere {
        queues.submit(Lane::Close, Origin::Server, move || drop(value));
    }
}
