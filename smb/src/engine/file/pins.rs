//! The holds of requests on [`crate::engine::file::paths`] while backends work for them.

use std::sync::Arc;

use crate::engine::file::paths::{Moving, PinnedPath};
use crate::engine::file::table::Files;
use crate::engine::mail::Waiter;
use crate::fs::{FsHandle, FsOpKind, RelPath};

/// While it lives, no rename changes the name at its path or the name of a directory above it.
pub(crate) struct PathPin {
    files: Arc<Files>,
    pinned: PinnedPath,
}

impl PathPin {
    /// Returns `None` if it must wait. `waiter` is woken later.
    pub(crate) fn new(files: &Arc<Files>, path: &RelPath, waiter: Waiter) -> Option<Self> {
        let pinned = files.lock().paths().pin(path, waiter)?;
        Some(Self { files: Arc::clone(files), pinned })
    }

    pub(crate) fn pinned(&self) -> &PinnedPath {
        &self.pinned
    }
}

impl Drop for PathPin {
    fn drop(&mut self) {
        let waiters = {
            let mut files = self.files.lock();
            files.paths().unpin(&self.pinned);
            files.paths().take_waiters()
        };
        self.files.wake(waiters);
    }
}

/// A rename, or a new link, in progress. While it lives, nothing is opened by either name or below them, and no other
/// rename begins that touches them.
pub(crate) struct Move {
    files: Arc<Files>,
    from: RelPath,
    to: RelPath,
    id: u64,
}

impl Move {
    /// Begins a rename to `to`. Returns `None` if it must wait; `waiter` is woken later. `from` reads the old name under
    /// the lock: a rename that has just changed it held a move until then.
    pub(crate) fn rename(
        files: &Arc<Files>,
        from: impl FnOnce() -> RelPath,
        to: &RelPath,
        waiter: Waiter,
    ) -> Option<Self> {
        let mut table = files.lock();
        let from = from();
        let id = table.paths().begin_move(Moving { from: from.clone(), to: to.clone() }, waiter)?;
        Some(Self { files: Arc::clone(files), from, to: to.clone(), id })
    }

    /// Like [`Self::rename`], but adds the name `to` to a file.
    pub(crate) fn link(files: &Arc<Files>, to: &RelPath, waiter: Waiter) -> Option<Self> {
        Self::rename(files, || to.clone(), to, waiter)
    }

    /// Whether nothing is being opened or removed by its names or below them. If something is, `waiter` is woken when that
    /// may have changed.
    pub(crate) fn is_clear(&self, waiter: Waiter) -> bool {
        let mut files = self.files.lock();
        let paths = files.paths();
        let clear = !paths.is_blocked(self.id);
        if !clear {
            paths.wait(waiter);
        }
        clear
    }

    pub(crate) fn from(&self) -> &RelPath {
        &self.from
    }

    pub(crate) fn to(&self) -> &RelPath {
        &self.to
    }

    /// Returns the backend operation for the rename.
    pub(crate) fn operation(&self, handle: &FsHandle, replace: bool) -> FsOpKind {
        FsOpKind::Rename { handle: handle.clone(), to: self.to.clone(), replace }
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        let waiters = {
            let mut files = self.files.lock();
            files.paths().end_move(self.id);
            files.paths().take_waiters()
        };
        self.files.wake(waiters);
    }
}
