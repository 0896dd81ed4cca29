//! The names by which a file is open, and what happens to each ([MS-FSA] 2.1.1.5). A file with several hard links loses
//! only the name that was deleted.

use crate::engine::file::leases::LeaseKey;
use crate::fs::{FsHandle, RelPath};
use crate::ids::FileId;

/// One name of one file, while it is open or being removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::engine) struct LinkId(u64);

/// [MS-FSA] Link.IsDeleted, and its consequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Stays,
    /// It is removed with its last open.
    GoesWithLastOpen,
    /// It is removed with this open, even if there are others (POSIX semantics).
    GoesWithOpen(FileId),
    /// Its last open has ended, and the backend removes it.
    Unlinking,
}

/// The disposition of a name that a client requests ([MS-FSCC] 2.4.11, 2.4.12).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposition {
    Keep,
    Delete,
    /// With POSIX semantics: deleted when this open ends, not when all opens have ended.
    DeleteWith(FileId),
}

/// The effect of the end of an open on its name.
#[derive(Debug)]
pub(in crate::engine) enum Closed {
    Stays,
    DeletePending,
    /// The name is removed, by the handle that gave the file this name, if there is one.
    Unlinked(Option<FsHandle>),
}

struct Link {
    id: LinkId,
    path: RelPath,
    fate: Fate,
    /// The lease on its directory, as named by the open that deleted it.
    deleted_by: Option<LeaseKey>,
    /// The handle that gave the file this name, if any. Only this handle is certain to denote this name and not an earlier
    /// one.
    named_by: Option<FsHandle>,
}

/// The names of one file.
#[derive(Default)]
pub(in crate::engine) struct Links {
    links: Vec<Link>,
    last_id: u64,
}

impl Links {
    fn add(&mut self, path: &RelPath, fate: Fate) -> LinkId {
        self.last_id += 1;
        let id = LinkId(self.last_id);
        self.links.push(Link { id, path: path.clone(), fate, deleted_by: None, named_by: None });
        id
    }

    /// The name at `path`, unless it is being removed.
    fn at(&self, path: &RelPath) -> Option<&Link> {
        self.links.iter().find(|link| link.path == *path && link.fate != Fate::Unlinking)
    }

    fn get(&self, id: LinkId) -> Option<&Link> {
        self.links.iter().find(|link| link.id == id)
    }

    fn get_mut(&mut self, id: LinkId) -> Option<&mut Link> {
        self.links.iter_mut().find(|link| link.id == id)
    }

    /// Returns the name at `path` for one more open, and adds the name if necessary.
    pub(in crate::engine) fn enter(&mut self, path: &RelPath) -> LinkId {
        match self.at(path) {
            Some(link) => link.id,
            None => self.add(path, Fate::Stays),
        }
    }

    /// Adds a name that was created and is removed again before it is opened.
    pub(in crate::engine) fn undo(&mut self, path: &RelPath) -> LinkId {
        self.add(path, Fate::Unlinking)
    }

    pub(in crate::engine) fn path(&self, id: LinkId) -> Option<&RelPath> {
        self.get(id).map(|link| &link.path)
    }

    /// Whether the name at `path` may no longer be opened, because it is being removed or will be.
    pub(in crate::engine) fn is_delete_pending_at(&self, path: &RelPath) -> bool {
        self.links.iter().any(|link| link.path == *path && link.fate != Fate::Stays)
    }

    /// Whether the name at `path` is being removed.
    pub(in crate::engine) fn is_unlinking_at(&self, path: &RelPath) -> bool {
        self.links.iter().any(|link| link.path == *path && link.fate == Fate::Unlinking)
    }

    /// Whether the name at `path` will be removed when an open ends.
    pub(in crate::engine) fn awaits_close_at(&self, path: &RelPath) -> bool {
        self.at(path).is_some_and(|link| link.fate != Fate::Stays)
    }

    pub(in crate::engine) fn is_delete_pending(&self, id: LinkId) -> bool {
        self.get(id).is_some_and(|link| link.fate != Fate::Stays)
    }

    /// Applies FileDispositionInformation of an open of this name, which names `parent` as its client's lease on the
    /// directory. A name that is being removed is not restored.
    pub(in crate::engine) fn set_delete_pending(
        &mut self,
        id: LinkId,
        disposition: Disposition,
        parent: Option<LeaseKey>,
    ) {
        if let Some(link) = self.get_mut(id).filter(|link| link.fate != Fate::Unlinking) {
            link.fate = match (disposition, link.fate) {
                (Disposition::Keep, _) => Fate::Stays,
                // The open ends sooner.
                (Disposition::Delete, Fate::GoesWithOpen(open)) => Fate::GoesWithOpen(open),
                (Disposition::Delete, _) => Fate::GoesWithLastOpen,
                (Disposition::DeleteWith(open), _) => Fate::GoesWithOpen(open),
            };
            link.deleted_by = parent;
        }
    }

    /// Returns the lease on the directory, as named by the open that deleted this name.
    pub(in crate::engine) fn deleted_by(&self, id: LinkId) -> Option<LeaseKey> {
        self.get(id)?.deleted_by
    }

    /// Handles the end of an open of this name, which is the `last` one or not.
    pub(in crate::engine) fn closed(&mut self, id: LinkId, open: FileId, last: bool) -> Closed {
        let Some(link) = self.get_mut(id) else { return Closed::Stays };
        match link.fate {
            // The end of another open has removed the name.
            Fate::Unlinking => Closed::Stays,
            Fate::Stays => {
                if last {
                    self.forget(id);
                }
                Closed::Stays
            }
            Fate::GoesWithLastOpen if !last => Closed::DeletePending,
            Fate::GoesWithOpen(with) if !last && with != open => Closed::DeletePending,
            Fate::GoesWithLastOpen | Fate::GoesWithOpen(_) => {
                link.fate = Fate::Unlinking;
                Closed::Unlinked(link.named_by.take())
            }
        }
    }

    /// Drops a name that was removed, could not be removed, or is not open any more.
    pub(in crate::engine) fn forget(&mut self, id: LinkId) -> Option<RelPath> {
        let at = self.links.iter().position(|link| link.id == id)?;
        Some(self.links.swap_remove(at).path)
    }

    /// Whether there are no opens and no removals in progress.
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Records that the backend renamed `from` to `to` by the handle `by`. Returns the name, and the name that it replaced,
    /// if any: opens of the replaced name are opens of this one from now on.
    pub(in crate::engine) fn renamed(
        &mut self,
        from: &RelPath,
        to: &RelPath,
        by: &FsHandle,
    ) -> Option<(LinkId, Option<LinkId>)> {
        let id = self.at(from)?.id;
        let replaced = self.at(to).map(|link| link.id);
        if let Some(replaced) = replaced {
            self.forget(replaced);
        }
        let link = self.get_mut(id)?;
        link.path = to.clone();
        link.named_by = Some(by.clone());
        Some((id, replaced))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const OPEN: FileId = FileId { persistent: 1, volatile: 1 };

    fn path(name: &str) -> RelPath {
        RelPath::new(name).expect("a path")
    }

    #[test]
    fn delete_pending_applies_to_one_link_of_a_file() {
        let mut links = Links::default();
        let (a, b) = (links.enter(&path("a")), links.enter(&path("b")));
        assert_eq!(links.enter(&path("a")), a, "another open of the link");
        links.set_delete_pending(a, Disposition::Delete, None);
        assert!(links.is_delete_pending_at(&path("a")) && links.is_delete_pending(a));
        assert!(!links.is_delete_pending_at(&path("b")) && !links.is_delete_pending(b));
        assert!(matches!(links.closed(b, OPEN, true), Closed::Stays));
        assert!(matches!(links.closed(a, OPEN, false), Closed::DeletePending));
        assert!(matches!(links.closed(a, OPEN, true), Closed::Unlinked(None)));
        links.set_delete_pending(a, Disposition::Keep, None);
        assert!(links.is_delete_pending_at(&path("a")), "it is being unlinked");
        links.forget(a);
        assert!(links.is_empty());
    }

    #[test]
    fn delete_pending_can_be_cleared_until_the_last_close() {
        let mut links = Links::default();
        let a = links.enter(&path("a"));
        links.set_delete_pending(a, Disposition::Delete, None);
        links.set_delete_pending(a, Disposition::Keep, None);
        assert!(matches!(links.closed(a, OPEN, true), Closed::Stays));
        assert!(links.is_empty());
    }

    #[test]
    fn posix_delete_unlinks_the_name_while_other_opens_remain() {
        let mut links = Links::default();
        let a = links.enter(&path("a"));
        let other = FileId { persistent: 2, volatile: 2 };
        links.set_delete_pending(a, Disposition::DeleteWith(OPEN), None);
        links.set_delete_pending(a, Disposition::Delete, None);
        assert!(matches!(links.closed(a, other, false), Closed::DeletePending));
        assert!(matches!(links.closed(a, OPEN, false), Closed::Unlinked(None)));
        assert!(links.is_delete_pending_at(&path("a")), "until it is unlinked");
        assert!(links.is_unlinking_at(&path("a")) && !links.awaits_close_at(&path("a")));
        assert!(matches!(links.closed(a, other, true), Closed::Stays));
        links.forget(a);
        let again = links.enter(&path("a"));
        assert!(again != a && !links.is_delete_pending(a));
        assert!(matches!(links.closed(a, other, true), Closed::Stays));
        assert!(!links.is_empty(), "a new link at the same path");
    }

    #[test]
    fn a_renamed_link_is_unlinked_by_the_handle_that_renamed_it() {
        let mut links = Links::default();
        let (a, b) = (links.enter(&path("a")), links.enter(&path("b")));
        let handle = FsHandle(Arc::new(()));
        assert!(links.renamed(&path("no such name"), &path("c"), &handle).is_none());
        assert_eq!(links.renamed(&path("b"), &path("a"), &handle), Some((b, Some(a))));
        assert_eq!(links.enter(&path("a")), b);
        links.set_delete_pending(b, Disposition::Delete, None);
        let Closed::Unlinked(Some(by)) = links.closed(b, OPEN, true) else { panic!("that handle") };
        assert!(Arc::ptr_eq(&by.0, &handle.0));
    }
}
