//! The identity of this host towards a target: an instance on a node.
//!
//! A target distinguishes hosts by their host identifier: a reservation belongs to a host, not to a connection (NVMe Base 8.19).
//! If the identity were that of the instance alone, the node that takes over an instance would be the same host as the node that
//! lost it, and no reservation could keep the latter from writing. So the identity is that of an instance *on a node*.

use std::fmt;

use uuid::Uuid;

use crate::limits::NAME_BYTES_MAX;
use crate::nqn::{InvalidName, Nqn};

/// UUID namespace of the identities.
const HOSTS: Uuid = Uuid::from_u128(0x5b1f_7a3e_90c4_4d0a_8f57_2f0e_6d1c_b3a9);

/// Prefix of every UUID-based NQN (NVMe Base 4.7).
const UUID_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// A host identifier of 128 bits (NVMe Base 5.27.1.25).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostId(pub [u8; 16]);

/// Host NQN and host identifier. The kernel requires a one-to-one mapping between them, so the identifier is the UUID in the
/// NQN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostIdentity {
    nqn: Nqn,
    id: HostId,
}

impl HostIdentity {
    /// The identity of an instance on a node. The same names always yield the same identity.
    ///
    /// # Errors
    /// If a name is empty, longer than 253 bytes or contains control characters.
    pub fn of(instance: &str, node: &str) -> Result<Self, InvalidName> {
        Self::of_machine("", "", instance, node)
    }

    /// The identity of an instance of a cluster on a machine. Names are unique only within a cluster at one time: another
    /// cluster may use the same names, and a machine that replaces a lost one may have its name. Empty texts mean none.
    ///
    /// # Errors
    /// If a name is empty, or a text is longer than 253 bytes or contains control characters.
    pub fn of_machine(cluster: &str, machine: &str, instance: &str, node: &str) -> Result<Self, InvalidName> {
        for (text, may_be_empty) in [(cluster, true), (machine, true), (instance, false), (node, false)] {
            let empty = text.is_empty() && !may_be_empty;
            if empty || text.len() > NAME_BYTES_MAX || text.chars().any(char::is_control) {
                return Err(InvalidName::new(
                    text,
                    "the name of an instance, a node, a cluster or a machine",
                ));
            }
        }
        // No text contains a zero byte, so no two sets of names yield the same text.
        let text = match (cluster, machine) {
            ("", "") => format!("{instance}\0{node}"),
            (cluster, machine) => format!("{cluster}\0{machine}\0{instance}\0{node}"),
        };
        let uuid = Uuid::new_v5(&HOSTS, text.as_bytes());
        let nqn = format!("{UUID_NQN}{uuid}").parse().expect("this is an NQN");
        Ok(Self { nqn, id: HostId(uuid.into_bytes()) })
    }

    /// Host NQN, to which targets grant access.
    #[must_use]
    pub fn nqn(&self) -> &Nqn {
        &self.nqn
    }

    /// Host identifier, to which reservations belong.
    #[must_use]
    pub fn id(&self) -> HostId {
        self.id
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Uuid::from_bytes(self.0))
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_identity_is_stable_per_instance_and_node() {
        let one = HostIdentity::of("fast-0", "node-a").expect("names");
        assert_eq!(one, HostIdentity::of("fast-0", "node-a").expect("names"));
        assert_ne!(one.id(), HostIdentity::of("fast-0", "node-b").expect("names").id());
        assert_ne!(one.id(), HostIdentity::of("fast-1", "node-a").expect("names").id());
        assert_eq!(one.nqn().as_str(), format!("{UUID_NQN}{}", one.id()));
        // Targets list this identifier in their allowed hosts, so it must not change between versions.
        assert_eq!(one.id().to_string(), "3217c216-9228-581d-a80f-93c26bebe2af");
    }

    #[test]
    fn host_identity_differs_by_cluster_and_machine() {
        let of =
            |cluster, machine| HostIdentity::of_machine(cluster, machine, "fast-0", "node-a").expect("names");
        assert_eq!(of("", ""), HostIdentity::of("fast-0", "node-a").expect("names"));
        let all = [of("", ""), of("c1", ""), of("c2", ""), of("", "m1"), of("c1", "m1"), of("m1", "c1")];
        for (nth, one) in all.iter().enumerate() {
            assert!(all[..nth].iter().all(|other| other.id() != one.id()), "{nth}");
        }
        assert!(HostIdentity::of_machine("a\0b", "", "i", "n").is_err());
    }

    #[test]
    fn empty_overlong_and_nul_containing_names_are_rejected() {
        assert!(HostIdentity::of("", "node").is_err());
        assert!(HostIdentity::of("a\0b", "node").is_err());
        assert!(HostIdentity::of("a", &"b".repeat(254)).is_err());
    }
}
