//! Identifies what a target has created without separate state: by marks in configfs, which exist exactly as long as the
//! objects that they mark.
//!
//! * A subsystem's model names the target. It cannot be changed once a host has read it.
//! * A port has a referral with the target's name, which is never enabled, so no host discovers it, and a number from a small
//!   range that belongs to the target.
//!
//! A crash between creating and marking an object, or between removing the mark and the object, leaves an unmarked object. It
//! is then empty, and is identified by its number or its name.

use uuid::Uuid;

use crate::limits::PORT_SLOTS;
use crate::observed::{Observed, Port, Subsystem};

/// UUID namespace for values that are derived from names.
const TARGETS: Uuid = Uuid::from_u128(0x6f3a_0d5e_2f8b_4c57_9d0a_71c4_5b7e_12f9);
/// Prefix of models and referrals.
const MARK: &str = "forebay-target";
/// Prefix of subsystem names that only Forebay assigns.
const NAMES: &str = "nqn.2026-01.io.forebay:";
/// The first port number that is assigned, and the number of blocks of port numbers for targets.
const PORTS_FROM: u16 = 0x4000;
const PORT_BLOCKS: u16 = 512;

const _: () = assert!(PORTS_FROM as u32 + PORT_BLOCKS as u32 * PORT_SLOTS as u32 <= u16::MAX as u32);

/// A target, as identified by the marks on its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    digits: String,
    first_port: u16,
}

impl Owner {
    /// The target with this name.
    pub(crate) fn of(name: &str) -> Self {
        let id = Uuid::new_v5(&TARGETS, name.as_bytes());
        let [high, low, ..] = *id.as_bytes();
        let block = u16::from_be_bytes([high, low]) % PORT_BLOCKS;
        Self { digits: id.simple().to_string()[..16].to_owned(), first_port: PORTS_FROM + block * PORT_SLOTS }
    }

    /// The model of its subsystems; at most 40 characters (NVMe Base, Identify Controller, MN).
    pub(crate) fn model(&self) -> String {
        format!("{MARK} {}", self.digits)
    }

    /// The referral of its ports.
    pub(crate) fn referral(&self) -> String {
        format!("{MARK}-{}", self.digits)
    }

    /// The port numbers that belong to it.
    pub(crate) fn ports(&self) -> impl Iterator<Item = u16> + use<> {
        self.first_port..self.first_port + PORT_SLOTS
    }

    pub(crate) fn owns_subsystem(&self, subsystem: &Subsystem) -> bool {
        subsystem.model == self.model()
    }

    pub(crate) fn owns_port(&self, id: u16, port: &Port) -> bool {
        let half_made = port.subsystems.is_empty() && port.referrals.is_empty();
        port.referrals.contains(&self.referral()) || (half_made && self.ports().any(|own| own == id))
    }
}

/// Whether no host loses anything if the subsystem is removed: it is new, or is being removed.
pub(crate) fn is_empty(nqn: &str, subsystem: &Subsystem, observed: &Observed) -> bool {
    subsystem.namespaces.is_empty()
        && subsystem.hosts.is_empty()
        && !subsystem.any_host
        && !subsystem.passthrough
        && !subsystem.model.starts_with(MARK)
        && observed.carriers(nqn).next().is_none()
}

/// Whether only a Forebay target assigns such a name.
pub(crate) fn is_our_name(nqn: &str) -> bool {
    nqn.starts_with(NAMES)
}

/// The serial number of a subsystem, which is the same on every start; at most 20 characters (NVMe Base, Identify
/// Controller, SN).
pub(crate) fn serial(nqn: &str) -> String {
    Uuid::new_v5(&TARGETS, nqn.as_bytes()).simple().to_string()[..20].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_marks_fit_their_fields_and_differ_between_targets() {
        let (one, other) = (Owner::of("default"), Owner::of("fast"));
        assert!(one.model().len() <= 40 && serial("nqn.a").len() <= 20);
        assert!(one.model() != other.model() && one.referral() != other.referral());
        assert!(one.ports().all(|id| (0x4000..0x6000).contains(&id)));
    }
}
