//! Records placements that the instances' numbers do not include yet, so that volumes that are created at the same time do not
//! all go to the instance that was emptiest a moment ago.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::limits::{LEDGER_ENTRIES_MAX, PLACEMENT_REMEMBERED};
use crate::placement::{Candidate, Place, Refusal, Wanted, choose};

/// All placements in progress, and for some time those without quota.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    place: Place,
    size_bytes: u64,
    /// Expiry: from then on, the instances' own numbers include it. `None` while its call is in progress.
    until: Option<Instant>,
}

/// A placement with a call in progress.
#[derive(Debug)]
pub(crate) struct Placement {
    pub(crate) place: Place,
    id: u64,
    of: Ledger,
}

impl Ledger {
    /// Chooses a place and records it, in one atomic step.
    pub(crate) fn place(
        &self,
        mut candidates: Vec<Candidate>,
        wanted: Wanted<'_>,
    ) -> Result<Placement, Refusal> {
        let now = Instant::now();
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.entries.retain(|entry| entry.until.is_none_or(|until| now < until));
        for entry in &book.entries {
            for candidate in candidates.iter_mut().filter(|c| c.name == entry.place.instance) {
                candidate.volumes = candidate.volumes.saturating_add(1);
                let pools = candidate.pools.iter_mut().flatten();
                for pool in pools.filter(|p| p.reported.has_quota() && p.reported.name == entry.place.pool) {
                    let provisioned = &mut pool.reported.provisioned_bytes;
                    *provisioned = provisioned.saturating_add(entry.size_bytes);
                }
            }
        }
        let place = choose(&candidates, wanted)?;
        // Beyond this limit, the choice is only as good as the instances' numbers.
        if book.entries.len() >= LEDGER_ENTRIES_MAX {
            book.entries.remove(0);
        }
        let id = book.next;
        book.next += 1;
        book.entries.push(Entry { id, place: place.clone(), size_bytes: wanted.size_bytes, until: None });
        Ok(Placement { place, id, of: self.clone() })
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        let mut book = self.of.0.lock().unwrap_or_else(PoisonError::into_inner);
        if self.place.has_quota {
            // The pool accounts for it now, or it was not created.
            book.entries.retain(|entry| entry.id != self.id);
        } else if let Some(entry) = book.entries.iter_mut().find(|entry| entry.id == self.id) {
            // The StorageCluster's status includes the number of volumes only later.
            entry.until = Some(Instant::now() + PLACEMENT_REMEMBERED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::tests::{pool, ready, unlimited, wanted};

    #[test]
    fn concurrently_created_volumes_are_spread() {
        let ledger = Ledger::default();
        let candidates = || vec![ready(0, 0, &[pool("a", 11, 0)]), ready(1, 0, &[pool("a", 10, 0)])];
        let placements: Vec<Placement> =
            (0..20).map(|_| ledger.place(candidates(), wanted(1)).expect("room")).collect();
        let on_first = placements.iter().filter(|p| p.place.instance == "c-0").count();
        assert_eq!(on_first, 11 - 1, "10 on each, and the last GiB is left on the first");
        let last = ledger.place(candidates(), wanted(1)).expect("room");
        assert_eq!(last.place.instance, "c-0");
        assert!(ledger.place(candidates(), wanted(1)).is_err(), "all room is reserved");
        drop(placements);
        assert!(ledger.place(candidates(), wanted(9)).is_ok(), "finished calls hold no reservation");
    }

    #[test]
    fn volumes_without_quota_alternate_between_instances() {
        let ledger = Ledger::default();
        let candidates = || vec![ready(0, 0, &[unlimited("a", 11)]), ready(1, 0, &[unlimited("a", 10)])];
        let instances: Vec<String> = (0..4)
            .map(|_| ledger.place(candidates(), wanted(1)).expect("room").place.instance.clone())
            .collect();
        assert_eq!(instances, ["c-0", "c-1", "c-0", "c-1"]);
    }

    #[test]
    fn ledger_is_bounded() {
        let ledger = Ledger::default();
        let unlimited = unlimited("a", 1);
        for _ in 0..=LEDGER_ENTRIES_MAX {
            drop(ledger.place(
                vec![ready(0, 0, std::slice::from_ref(&unlimited))],
                Wanted { size_bytes: 0, ..wanted(0) },
            ));
        }
        let length = ledger.0.lock().expect("no panic").entries.len();
        assert_eq!(length, LEDGER_ENTRIES_MAX);
    }
}
