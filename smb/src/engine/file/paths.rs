//! Paths that requests rely on while backends work for them, so that no name changes during a request.
//!
//! A CREATE holds a `PathPin` from before a backend looks for the file until its open is registered. A rename holds a
//! `Move` of both of its names from before it looks for opens until it is done ([`crate::engine::file::pins`]). A pin is
//! not granted while its path, or a directory above it, is being moved. A move is not granted while another move touches
//! its paths, and continues when the pins that block it are gone. A move holds nothing while it waits for other moves, and
//! a pin waits only for breaks, which have a time limit, so there is no cycle of waits. A pin is not granted either while a
//! backend removes its name, which waits for nothing.

use std::collections::{BTreeMap, HashMap};

use crate::engine::file::links::LinkId;
use crate::engine::mail::Waiter;
use crate::fs::{FileKey, RelPath};
use crate::limits;

/// The pinned and moved paths of a volume: as many as there are requests in progress.
#[derive(Default)]
pub(in crate::engine) struct PathsInUse {
    pins: HashMap<u64, Pinned>,
    moves: HashMap<u64, Moving>,
    /// Names that backends are removing. Few, unlike the open files of a volume.
    unlinking: BTreeMap<(FileKey, LinkId), RelPath>,
    /// Woken when a pin or a move has ended.
    waiters: Vec<Waiter>,
    last_id: u64,
}

/// A path that is pinned as long as its [`PathPin`](crate::engine::file::pins::PathPin) lives.
pub(crate) struct PinnedPath {
    id: u64,
    path: RelPath,
}

impl PinnedPath {
    pub(crate) fn path(&self) -> &RelPath {
        &self.path
    }
}

struct Pinned {
    path: RelPath,
    /// Files that have lost this name since it was pinned. A backend may have found one of them before.
    gone: Vec<FileKey>,
}

pub(in crate::engine) struct Moving {
    pub(in crate::engine) from: RelPath,
    pub(in crate::engine) to: RelPath,
}

/// Whether `path` is `name` or below it.
fn is_at(path: &RelPath, name: &RelPath) -> bool {
    path == name || path.is_below(name)
}

impl Moving {
    /// Whether the name of `path`, or of a directory above it, is about to change.
    fn covers(&self, path: &RelPath) -> bool {
        is_at(path, &self.from) || is_at(path, &self.to)
    }

    fn touches(&self, other: &Self) -> bool {
        self.covers(&other.from)
            || self.covers(&other.to)
            || other.covers(&self.from)
            || other.covers(&self.to)
    }
}

impl PathsInUse {
    pub(in crate::engine) fn wait(&mut self, waiter: Waiter) {
        if !self.waiters.contains(&waiter) {
            self.waiters.push(waiter);
        }
    }

    /// Takes the waiters, to wake them after a change that they may wait for.
    pub(in crate::engine) fn take_waiters(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.waiters)
    }

    pub(in crate::engine) fn stop_waiting(&mut self, token: u64) {
        self.waiters.retain(|w| w.token != token);
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(in crate::engine) fn pin(&mut self, path: &RelPath, waiter: Waiter) -> Option<PinnedPath> {
        let moves = self.moves.values().any(|moving| moving.covers(path));
        if moves || self.unlinking.values().any(|name| name == path) {
            self.wait(waiter);
            return None;
        }
        let id = self.next_id();
        self.pins.insert(id, Pinned { path: path.clone(), gone: Vec::new() });
        Some(PinnedPath { id, path: path.clone() })
    }

    pub(in crate::engine) fn unpin(&mut self, pin: &PinnedPath) {
        self.pins.remove(&pin.id);
    }

    pub(in crate::engine) fn end_move(&mut self, id: u64) {
        self.moves.remove(&id);
    }

    /// Whether a file has lost the pinned name since it was pinned.
    pub(in crate::engine) fn has_lost(&self, pin: &PinnedPath, key: FileKey) -> bool {
        self.pins.get(&pin.id).is_some_and(|pinned| pinned.gone.contains(&key))
    }

    /// Records that a file has lost the name at `path`.
    pub(in crate::engine) fn removed(&mut self, path: &RelPath, key: FileKey) {
        for pin in self.pins.values_mut().filter(|pin| pin.path == *path) {
            if pin.gone.len() < limits::REMOVALS_PER_CREATE_MAX && !pin.gone.contains(&key) {
                pin.gone.push(key);
            }
        }
    }

    /// Records that a backend is about to remove the name at `path`.
    pub(in crate::engine) fn begin_unlink(&mut self, key: FileKey, link: LinkId, path: RelPath) {
        self.unlinking.insert((key, link), path);
    }

    /// Ends the removal of a name, whether it succeeded or not.
    pub(in crate::engine) fn end_unlink(&mut self, key: FileKey, link: LinkId) {
        self.unlinking.remove(&(key, link));
    }

    pub(in crate::engine) fn begin_move(&mut self, moving: Moving, waiter: Waiter) -> Option<u64> {
        if self.moves.values().any(|other| other.touches(&moving)) {
            self.wait(waiter);
            return None;
        }
        let id = self.next_id();
        self.moves.insert(id, moving);
        Some(id)
    }

    /// Whether anything is being opened or removed by the names of this move or below them.
    pub(in crate::engine) fn is_blocked(&self, id: u64) -> bool {
        let Some(moving) = self.moves.get(&id) else { return false };
        self.pins.values().map(|pin| &pin.path).chain(self.unlinking.values()).any(|path| moving.covers(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::ConnectionId;
    use crate::engine::file::links::Links;

    const WAITER: Waiter = Waiter { connection: ConnectionId(1), token: 1 };

    fn path(name: &str) -> RelPath {
        RelPath::new(name).expect("a path")
    }

    fn moving(from: &str, to: &str) -> Moving {
        Moving { from: path(from), to: path(to) }
    }

    #[test]
    fn a_pin_waits_for_moves_of_its_path_and_its_ancestors() {
        let mut paths = PathsInUse::default();
        let id = paths.begin_move(moving("d/e", "x"), WAITER).expect("nothing blocks it");
        for blocked in ["d/e", "d/e/f", "d/e/f/g", "x", "x/y"] {
            assert!(paths.pin(&path(blocked), WAITER).is_none(), "{blocked}");
        }
        for free in ["", "d", "d/ef", "d/f", "xy"] {
            assert!(paths.pin(&path(free), WAITER).is_some(), "{free}");
        }
        assert!(!paths.is_blocked(id));
        assert_eq!(paths.take_waiters(), [WAITER], "once");
    }

    #[test]
    fn a_pin_waits_for_the_removal_of_its_name() {
        let mut paths = PathsInUse::default();
        let key = FileKey { dev: 1, ino: 7, stream: 0 };
        let link = Links::default().enter(&path("d/e"));
        paths.begin_unlink(key, link, path("d/e"));
        assert!(paths.pin(&path("d/e"), WAITER).is_none());
        for other in ["d", "d/e/f", "d/f"] {
            assert!(paths.pin(&path(other), WAITER).is_some(), "{other}");
        }
        assert_eq!(paths.take_waiters(), [WAITER]);
        paths.end_unlink(key, link);
        assert!(paths.pin(&path("d/e"), WAITER).is_some());
    }

    #[test]
    fn a_move_is_blocked_while_a_path_below_it_is_pinned() {
        let mut paths = PathsInUse::default();
        let pin = paths.pin(&path("d/e/f"), WAITER).expect("no move");
        let id = paths.begin_move(moving("d", "x"), WAITER).expect("pins do not prevent the start");
        assert!(paths.is_blocked(id));
        paths.unpin(&pin);
        assert!(!paths.is_blocked(id));
    }

    #[test]
    fn a_move_waits_for_unlinks_in_progress_below_it() {
        let mut paths = PathsInUse::default();
        let key = FileKey { dev: 1, ino: 7, stream: 0 };
        let link = Links::default().enter(&path("d/e/f"));
        let id = paths.begin_move(moving("d", "x"), WAITER).expect("nothing blocks it");
        paths.begin_unlink(key, link, path("y"));
        assert!(!paths.is_blocked(id), "another name");
        paths.begin_unlink(key, link, path("d/e/f"));
        assert!(paths.is_blocked(id));
        paths.end_unlink(key, link);
        assert!(!paths.is_blocked(id));
    }

    #[test]
    fn overlapping_moves_exclude_each_other() {
        let mut paths = PathsInUse::default();
        paths.begin_move(moving("d", "e/d"), WAITER).expect("the first");
        for blocked in [("e", "d/e"), ("x", "d/x"), ("d/x", "y"), ("e", "z"), ("x", "e/d")] {
            assert!(paths.begin_move(moving(blocked.0, blocked.1), WAITER).is_none(), "{blocked:?}");
        }
        paths.begin_move(moving("x", "e/y"), WAITER).expect("not the same names");
    }
}
