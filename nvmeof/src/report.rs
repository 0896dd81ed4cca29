//! A namespace's reservation and its registrants: the Reservation Report (NVMe Base 7.6, extended structure).

use crate::host::HostId;
use crate::key::ReservationKey;
use crate::limits::REGISTRANTS_MAX;

/// Length of the extended structure's header and of one of its registrants.
const HEADER_BYTES: usize = 64;
const REGISTRANT_BYTES: usize = 64;

/// Length of a report with the maximum number of registrants.
pub(crate) const REPORT_BYTES: usize = HEADER_BYTES + REGISTRANTS_MAX * REGISTRANT_BYTES;

/// Type of a reservation (NVMe Base 8.19).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationType {
    /// Only the holder writes; all read.
    WriteExclusive,
    /// Only the holder reads and writes: the type that we use.
    ExclusiveAccess,
    /// Any other: registrants other than the holder may write.
    Other(u8),
}

impl ReservationType {
    fn from_byte(byte: u8) -> Self {
        match byte {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            other => Self::Other(other),
        }
    }
}

/// A registered host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registrant {
    /// The host.
    pub host: HostId,
    /// Its key.
    pub key: ReservationKey,
    /// Whether it holds the reservation.
    pub holds: bool,
}

/// A namespace's reservation and its registrants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Incremented on each change.
    pub generation: u32,
    /// Type of the reservation; `None` if there is none.
    pub reservation: Option<ReservationType>,
    /// All registrants, once for each controller that the target lists.
    pub registrants: Vec<Registrant>,
}

/// A malformed report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedReport {
    /// It is shorter than its counts require.
    #[error("the target's reservation report is cut off")]
    Cut,
    /// More registrants than are read.
    #[error("{0} hosts are registered; at most {REGISTRANTS_MAX} are read")]
    TooMany(usize),
}

impl Report {
    /// Parses the extended structure.
    ///
    /// # Errors
    /// If it is shorter than its counts require.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, MalformedReport> {
        let header: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(MalformedReport::Cut)?;
        let count = usize::from(u16::from_le_bytes([header[5], header[6]]));
        if count > REGISTRANTS_MAX {
            return Err(MalformedReport::TooMany(count));
        }
        let (registrants, _) = bytes[HEADER_BYTES..].as_chunks::<REGISTRANT_BYTES>();
        let registrants = registrants.get(..count).ok_or(MalformedReport::Cut)?;
        let reservation = (header[4] != 0).then(|| ReservationType::from_byte(header[4]));
        Ok(Self {
            generation: u32::from_le_bytes([header[0], header[1], header[2], header[3]]),
            reservation,
            registrants: registrants.iter().map(registrant).collect(),
        })
    }

    /// The registrant that holds the reservation. For a type with which all registrants hold it, the first one.
    #[must_use]
    pub fn holder(&self) -> Option<&Registrant> {
        self.reservation?;
        self.registrants.iter().find(|registrant| registrant.holds)
    }
}

fn registrant(bytes: &[u8; REGISTRANT_BYTES]) -> Registrant {
    let part = |at: usize| -> [u8; 8] { std::array::from_fn(|i| bytes[at + i]) };
    Registrant {
        holds: bytes[2] & 1 == 1,
        key: ReservationKey::from_number(u64::from_le_bytes(part(8))),
        host: HostId(std::array::from_fn(|i| bytes[16 + i])),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn report(kind: u8, registrants: &[(u8, u64, u8)]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&9u32.to_le_bytes());
        bytes[4] = kind;
        bytes[5..7].copy_from_slice(&(registrants.len() as u16).to_le_bytes());
        for (status, key, host) in registrants {
            let mut one = [0; REGISTRANT_BYTES];
            one[..2].copy_from_slice(&0xffffu16.to_le_bytes());
            one[2] = *status;
            one[8..16].copy_from_slice(&key.to_le_bytes());
            one[16..32].fill(*host);
            bytes.extend(one);
        }
        bytes
    }

    #[test]
    fn report_lists_registrants_and_the_holder() {
        let mut bytes = report(2, &[(0, 0x11, 1), (1, 0x22, 2)]);
        bytes.resize(REPORT_BYTES, 0);
        let parsed = Report::parse(&bytes).expect("a report");
        assert_eq!(parsed.generation, 9);
        assert_eq!(parsed.reservation, Some(ReservationType::ExclusiveAccess));
        let holder =
            Registrant { host: HostId([2; 16]), key: ReservationKey::from_number(0x22), holds: true };
        assert_eq!(parsed.holder(), Some(&holder));
        assert_eq!(parsed.registrants.len(), 2);
    }

    #[test]
    fn report_without_reservation_has_no_holder() {
        let parsed = Report::parse(&report(0, &[(1, 0x11, 1)])).expect("a report");
        assert_eq!((parsed.reservation, parsed.holder()), (None, None));
    }

    #[test]
    fn truncated_or_oversized_report_is_rejected() {
        let bytes = report(2, &[(1, 1, 1), (0, 2, 2)]);
        assert_eq!(Report::parse(&bytes[..bytes.len() - 1]), Err(MalformedReport::Cut));
        assert_eq!(Report::parse(&bytes[..10]), Err(MalformedReport::Cut));
        let mut many = bytes;
        many[5..7].copy_from_slice(&4000u16.to_le_bytes());
        assert_eq!(Report::parse(&many), Err(MalformedReport::TooMany(4000)));
    }

    proptest! {
        #[test]
        fn report_parser_does_not_panic_on_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let _ = Report::parse(&bytes);
        }
    }
}
