//! The record of nodes: which of its keys hold the node and the epoch of instances that can move.
//!
//! Node and epoch of such an instance change together, in one write that fails if another client has written since
//! (`resourceVersion`). So an operator that dies at any moment leaves either the old pair or the new one, never a node
//! without its epoch, and an epoch never goes down. The operator's other changes to the record do not touch these keys.

use std::collections::{BTreeMap, BTreeSet};

use forebay_api::names::epoch_key;
use k8s_openapi::jiff::Timestamp;

use super::fabric::Place;

const EPOCH: &str = ".epoch";
const MOVED: &str = ".moved";
const PLACE: &str = ".target.";
/// See [`forebay_api::names::adopted_key`].
const ADOPTED: &str = ".adopt.";
const OWNER: &str = ".owner";
const NONE: &str = "-";

/// The record of instances that can move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The record's version; `None` if there is no record.
    pub version: Option<String>,
    /// Epochs, by instance.
    pub epochs: BTreeMap<String, u64>,
    /// Locations of the instances' namespaces on the bundled target, by instance and backend.
    pub places: BTreeMap<(String, String), Place>,
    /// The last move of an instance, if it has moved.
    pub moved: BTreeMap<String, Moved>,
    /// What identifies an instance to its target, if that is more than its name and its node's name.
    pub owners: BTreeMap<String, Owner>,
    /// Keys of former owners that an instance may take a pool from, by instance and pool.
    pub adopted: BTreeMap<(String, String), String>,
}

/// Distinguishes an instance from one of the same name in another Kubernetes cluster, and its node from another machine of
/// the same name. It is part of the instance's host identity at the target, so it changes only with the epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// UID of the Kubernetes cluster, which is the UID of its namespace kube-system.
    pub cluster_uid: String,
    /// The node's system UUID; empty if the kubelet reports none.
    pub machine_id: String,
}

impl Owner {
    fn write(&self) -> String {
        let machine = if self.machine_id.is_empty() { NONE } else { &self.machine_id };
        format!("{} {machine}", self.cluster_uid)
    }

    fn read(text: &str) -> Option<Self> {
        let (cluster_uid, machine) = text.split_once(' ')?;
        let machine_id = if machine == NONE { "" } else { machine }.to_owned();
        (!cluster_uid.is_empty()).then(|| Self { cluster_uid: cluster_uid.to_owned(), machine_id })
    }
}

/// A move as it was decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// In CamelCase, as [`crate::takeover::Why::as_str`].
    pub why: String,
    /// The node that it left.
    pub from: String,
    /// When the reason arose.
    pub since: Timestamp,
    /// When it was decided.
    pub decided: Timestamp,
}

impl Moved {
    fn write(&self) -> String {
        format!("{} {} {} {}", self.why, self.from, self.since.as_second(), self.decided.as_second())
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let (why, from) = (words.next()?.to_owned(), words.next()?.to_owned());
        let mut time = || Timestamp::from_second(words.next()?.parse().ok()?).ok();
        Some(Self { why, from, since: time()?, decided: time()? })
    }
}

/// A place of an instance that must be recorded before anything else is done for the instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The instance.
    pub instance: String,
    /// Its node from now on.
    pub node: String,
    /// Its epoch from now on. 0 if it cannot move, and only its places are recorded.
    pub epoch: u64,
    /// Locations of its namespaces on the bundled target, by backend.
    pub places: BTreeMap<String, Place>,
    /// Why it moved; `None` if it is placed for the first time.
    pub moved: Option<Moved>,
    /// What identifies it to its target in this epoch; `None` if its name and its node's name suffice, or the identity does
    /// not change.
    pub owner: Option<Owner>,
}

impl Move {
    /// Returns the keys and values to be written.
    #[must_use]
    pub fn data(&self) -> BTreeMap<String, String> {
        let instance = &self.instance;
        let mut data = BTreeMap::new();
        if self.epoch > 0 {
            data.insert(instance.clone(), self.node.clone());
            data.insert(epoch_key(instance), self.epoch.to_string());
        }
        data.extend(
            self.places.iter().map(|(b, place)| (format!("{instance}{PLACE}{b}"), place.to_string())),
        );
        data.extend(self.owner.iter().map(|owner| (format!("{instance}{OWNER}"), owner.write())));
        data.extend(self.moved.iter().map(|moved| (format!("{instance}{MOVED}"), moved.write())));
        data
    }
}

/// Parses a record and its version.
#[must_use]
pub fn read(version: Option<String>, data: &BTreeMap<String, String>) -> Record {
    let mut record = Record { version, ..Record::default() };
    for (key, text) in data {
        if let Some((instance, backend)) = key.split_once(PLACE) {
            let place = text.parse().ok();
            record.places.extend(place.map(|p| ((instance.to_owned(), backend.to_owned()), p)));
        } else if let Some((instance, pool)) = key.split_once(ADOPTED) {
            record.adopted.insert((instance.to_owned(), pool.to_owned()), text.clone());
        } else if let Some(instance) = key.strip_suffix(OWNER) {
            record.owners.extend(Owner::read(text).map(|owner| (instance.to_owned(), owner)));
        } else if let Some(instance) = key.strip_suffix(EPOCH) {
            record.epochs.extend(text.parse().ok().map(|epoch| (instance.to_owned(), epoch)));
        } else if let Some(instance) = key.strip_suffix(MOVED) {
            record.moved.extend(Moved::read(text).map(|moved| (instance.to_owned(), moved)));
        }
    }
    record
}

/// Whether a key outlives the instance, so that an instance of that name finds its pools again and an epoch never goes down.
#[must_use]
pub fn is_kept(key: &str) -> bool {
    key.ends_with(EPOCH) || key.contains(PLACE) || key.contains(ADOPTED) || key.ends_with(OWNER)
}

/// Whether only moves write a key.
#[must_use]
pub fn is_of_moves(key: &str, movable: &BTreeSet<String>) -> bool {
    is_kept(key) || key.strip_suffix(MOVED).is_some_and(|i| movable.contains(i)) || movable.contains(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a moment")
    }

    #[test]
    fn record_round_trips_through_config_map_data() {
        let place: Place = "n3 /dev/disk/by-id/nvme-x".parse().expect("a place");
        let moved =
            Moved { why: "NodeLost".to_owned(), from: "n1".to_owned(), since: at(5), decided: at(25) };
        let done = Move {
            instance: "a-0".to_owned(),
            node: "n2".to_owned(),
            epoch: 7,
            places: BTreeMap::from([("main".to_owned(), place.clone())]),
            moved: Some(moved.clone()),
            owner: Some(Owner { cluster_uid: "u".to_owned(), machine_id: String::new() }),
        };
        let data = done.data();
        assert_eq!(data["a-0"], "n2");
        let record = read(Some("1".to_owned()), &data);
        assert_eq!(record.epochs["a-0"], 7);
        assert_eq!(record.moved["a-0"], moved);
        assert_eq!(Some(&record.owners["a-0"]), done.owner.as_ref());
        assert_eq!(record.places[&("a-0".to_owned(), "main".to_owned())], place);
    }

    #[test]
    fn malformed_record_entries_are_ignored() {
        let data = [("a-0.epoch", "x"), ("a-0.moved", "NodeLost n1 soon now"), ("a-0.target.main", "")];
        let data = data.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        assert_eq!(read(None, &data), Record::default());
    }

    #[test]
    fn epochs_and_targets_outlive_their_instance() {
        assert!(is_kept("a-0.epoch") && is_kept("a-0.target.main"));
        assert!(!is_kept("a-0") && !is_kept("a-0.pools") && !is_kept("a-0.moved"));
        let movable = BTreeSet::from(["a-0".to_owned()]);
        assert!(is_of_moves("a-0", &movable) && is_of_moves("a-0.moved", &movable));
        assert!(!is_of_moves("a-0.pools", &movable) && !is_of_moves("a-1", &movable));
    }
}
