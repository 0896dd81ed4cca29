//! Reservation keys that identify their owner: an instance and its epoch.

use std::fmt;

use uuid::Uuid;

/// UUID namespace of the hashes.
const INSTANCES: Uuid = Uuid::from_u128(0x2d9c_41f6_5b3e_4f7d_9a02_c1d8_63e4_7f15);

/// The number of an instance's start, from 1: each start on another host increments it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u32);

impl Epoch {
    /// Returns an epoch, or `None` for 0, which is no epoch.
    #[must_use]
    pub fn new(number: u32) -> Option<Self> {
        (number > 0).then_some(Self(number))
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

/// Stands for an instance's name in a key: 32 bits of a hash. Two instances see each other's keys only if they share a
/// namespace, which they must not. In that case, equal hashes, or hashes that differ only in the first bit, would make one
/// mistake the other for another epoch of itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct InstanceHash(u32);

impl InstanceHash {
    /// The hash of an instance's name.
    #[must_use]
    pub fn of(instance: &str) -> Self {
        Self::of_text(instance)
    }

    /// The hash of an instance of a cluster: another cluster may have instances of the same names. An empty name means no
    /// cluster.
    #[must_use]
    pub fn in_cluster(cluster: &str, instance: &str) -> Self {
        // No name contains a zero byte, so no pair yields the same text as another pair or an instance alone.
        if cluster.is_empty() { Self::of(instance) } else { Self::of_text(&format!("{cluster}\0{instance}")) }
    }

    fn of_text(text: &str) -> Self {
        let hash = Uuid::new_v5(&INSTANCES, text.as_bytes()).into_bytes();
        Self(u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]]))
    }
}

/// Distinguishes the pending key from the own key of the same start: the first bit of the hash, inverted. Versions without
/// pending keys treat it as a stranger's key and leave it alone. The epoch is at the same place as in every key.
const PENDING: u64 = 1 << 63;

/// A key of 64 bits: the instance's hash in the high half, its epoch in the low half. Never 0, which means no key.
///
/// Each start has two keys: its own, and the pending one, with which it takes a reservation from another host until that host's
/// commands have ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReservationKey(u64);

impl ReservationKey {
    /// The key of an instance in an epoch.
    #[must_use]
    pub fn new(instance: InstanceHash, epoch: Epoch) -> Self {
        Self(u64::from(instance.0) << 32 | u64::from(epoch.0))
    }

    /// The pending key of an instance in an epoch.
    #[must_use]
    pub fn pending(instance: InstanceHash, epoch: Epoch) -> Self {
        Self::new(instance, epoch).other()
    }

    /// The other key of the same start.
    fn other(self) -> Self {
        Self(self.0 ^ PENDING)
    }

    /// A key that a target reports, from any host.
    #[must_use]
    pub fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// The number of the key.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }

    /// Parses a key in its displayed form: `0x` and 16 hexadecimal digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let digits = text.strip_prefix("0x").filter(|digits| digits.len() == 16)?;
        let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        u64::from_str_radix(digits, 16).ok().filter(|number| plain && *number != 0).map(Self)
    }

    /// The epoch if the key belongs to this instance, pending or not.
    #[must_use]
    pub fn epoch_of(self, instance: InstanceHash) -> Option<Epoch> {
        self.settled_epoch_of(instance).or_else(|| self.other().settled_epoch_of(instance))
    }

    /// The epoch if the key belongs to this instance and is not pending.
    #[must_use]
    pub fn settled_epoch_of(self, instance: InstanceHash) -> Option<Epoch> {
        if self.0 >> 32 == u64::from(instance.0) { Epoch::new(self.0 as u32) } else { None }
    }

    /// Whether both keys belong to the same start of any instance. Only the owner can tell which one is the pending key.
    #[must_use]
    pub fn is_same_start(self, other: Self) -> bool {
        self == other || self == other.other()
    }
}

impl fmt::Display for ReservationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.0)
    }
}

impl fmt::Debug for ReservationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for InstanceHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservation_key_identifies_instance_and_epoch() {
        let (one, other) = (InstanceHash::of("fast-0"), InstanceHash::of("fast-1"));
        let epoch = Epoch::new(7).expect("not 0");
        let key = ReservationKey::new(one, epoch);
        assert_eq!(key.epoch_of(one), Some(epoch));
        assert_eq!(key.epoch_of(other), None);
        assert_eq!(ReservationKey::from_number(key.number()), key);
        assert_eq!(ReservationKey::from_number(0).epoch_of(one), None);
        assert_eq!(Epoch::new(0), None);
    }

    #[test]
    fn pending_key_has_the_instance_and_epoch_of_the_settled_key() {
        for (nth, instance) in (0..64).map(|nth| (nth, InstanceHash::of(&format!("fast-{nth}")))) {
            let epoch = Epoch::new(u32::MAX - nth).expect("not 0");
            let (settled, pending) =
                (ReservationKey::new(instance, epoch), ReservationKey::pending(instance, epoch));
            assert_ne!(settled, pending);
            assert_eq!((settled.epoch_of(instance), pending.epoch_of(instance)), (Some(epoch), Some(epoch)));
            assert_eq!(settled.settled_epoch_of(instance), Some(epoch));
            assert_eq!(pending.settled_epoch_of(instance), None);
            // The number is at the same place as in earlier versions.
            assert_eq!(pending.number() as u32, epoch.number());
            assert!(settled.is_same_start(pending) && pending.is_same_start(settled));
            let earlier = ReservationKey::new(instance, Epoch::new(epoch.number() - 1).expect("not 0"));
            assert!(!pending.is_same_start(earlier) && !settled.is_same_start(earlier));
        }
    }

    #[test]
    fn same_instance_name_in_two_clusters_has_different_hashes() {
        let of = |cluster| InstanceHash::in_cluster(cluster, "fast-0");
        assert_eq!(of(""), InstanceHash::of("fast-0"));
        assert!(of("c1") != of("c2") && of("c1") != of(""));
    }

    #[test]
    fn key_encoding_is_stable_and_parsing_is_strict() {
        let key = ReservationKey::new(InstanceHash::of("fast-0"), Epoch::new(1).expect("not 0"));
        assert_eq!(key.to_string(), "0x035e884900000001");
        assert_eq!(key.other().to_string(), "0x835e884900000001");
        assert_eq!(ReservationKey::parse(&key.to_string()), Some(key));
        for text in ["", "035e884900000001", "0x35e884900000001", "0x+35e884900000001", "0x0000000000000000"]
        {
            assert_eq!(ReservationKey::parse(text), None, "{text}");
        }
    }
}
