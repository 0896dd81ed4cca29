//! The trees and opens that a channel has found in its session before, so that a request takes no lock that requests on
//! other channels take.

use std::sync::{Arc, Weak};

use crate::engine::open::Open;
use crate::engine::session::{Session, TreeConnect};
use crate::ids::{FileId, IdMap};

/// Ended entries are not swept below this count.
const SWEEP_MIN: usize = 64;

/// An object of a session that can end on any of its channels.
pub(crate) trait Ends {
    /// Becomes true before the session stops returning the object.
    fn has_ended(&self) -> bool;
}

impl Ends for Open {
    fn has_ended(&self) -> bool {
        self.is_closing()
    }
}

impl Ends for TreeConnect {
    fn has_ended(&self) -> bool {
        self.is_disconnected()
    }
}

/// Cached entries by id. Keeps none of them alive, and holds at most twice as many as were alive at the last sweep.
struct Found<T> {
    by_id: IdMap<u64, Weak<T>>,
    sweep_at: usize,
}

impl<T: Ends> Found<T> {
    fn new() -> Self {
        Self { by_id: IdMap::default(), sweep_at: SWEEP_MIN }
    }

    fn get(&self, id: u64) -> Option<Arc<T>> {
        self.by_id.get(&id)?.upgrade().filter(|t| !t.has_ended())
    }

    fn remember(&mut self, id: u64, found: &Arc<T>) {
        if self.by_id.len() >= self.sweep_at {
            self.by_id.retain(|_, t| t.upgrade().is_some_and(|t| !t.has_ended()));
            self.sweep_at = (2 * self.by_id.len()).max(SWEEP_MIN);
        }
        self.by_id.insert(id, Arc::downgrade(found));
    }
}

/// The cache of one channel.
pub(crate) struct Lookup {
    trees: Found<TreeConnect>,
    opens: Found<Open>,
}

impl Lookup {
    pub(crate) fn new() -> Self {
        Self { trees: Found::new(), opens: Found::new() }
    }

    pub(crate) fn tree(&mut self, session: &Session, id: u32) -> Option<Arc<TreeConnect>> {
        self.trees.get(id.into()).or_else(|| {
            let tree = session.tree(id)?;
            self.trees.remember(id.into(), &tree);
            Some(tree)
        })
    }

    pub(crate) fn open(&mut self, session: &Session, id: FileId) -> Option<Arc<Open>> {
        let found = self.opens.get(id.volatile).or_else(|| {
            let open = session.open(id)?;
            self.opens.remember(id.volatile, &open);
            Some(open)
        });
        found.filter(|o| o.id == id)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[derive(Default)]
    struct Thing(AtomicBool);

    impl Ends for Thing {
        fn has_ended(&self) -> bool {
            self.0.load(Ordering::Acquire)
        }
    }

    #[test]
    fn ended_objects_are_neither_found_nor_kept_alive() {
        let mut found = Found::new();
        let thing = Arc::new(Thing::default());
        found.remember(1, &thing);
        assert!(found.get(1).is_some() && found.get(2).is_none());
        thing.0.store(true, Ordering::Release);
        assert!(found.get(1).is_none());
        let dropped = Arc::new(Thing::default());
        found.remember(2, &dropped);
        let weak = Arc::downgrade(&dropped);
        drop(dropped);
        assert!(weak.upgrade().is_none() && found.get(2).is_none(), "only a weak reference");
    }

    #[test]
    fn cache_size_is_bounded_by_the_number_of_live_objects() {
        let mut found = Found::new();
        let alive: Vec<_> = (0..100).map(|_| Arc::new(Thing::default())).collect();
        for (id, thing) in (0..).zip(&alive) {
            found.remember(id, thing);
        }
        for id in 1000..20_000 {
            found.remember(id, &Arc::new(Thing::default()));
            assert!(found.by_id.len() <= 2 * (alive.len() + 1).max(SWEEP_MIN));
        }
        assert!((0..100).all(|id| found.get(id).is_some()));
    }
}
