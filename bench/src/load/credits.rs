//! The client's message ids and credits on one connection ([MS-SMB2] 3.2.4.1.2, 3.2.4.1.5).

use forebay_smb::limits::{CREDIT_BYTES, CREDITS_MAX};

/// Credits of a request for this many bytes of payload or answer ([MS-SMB2] 3.1.5.2).
pub(crate) fn charge(bytes: usize) -> u16 {
    u16::try_from(bytes.div_ceil(CREDIT_BYTES as usize).max(1)).unwrap_or(u16::MAX)
}

/// The ids that were used, and how many may be used now.
#[derive(Debug, Clone)]
pub(crate) struct Credits {
    next: u64,
    available: u64,
    spare: u64,
}

impl Credits {
    /// One credit, the initial state of each connection. `wanted` is the number of spare credits while requests are in
    /// flight.
    pub(crate) fn new(wanted: u64) -> Self {
        Self { next: 0, available: 1, spare: wanted.min(u64::from(CREDITS_MAX)) }
    }

    /// Without a limit, for a peer that does not count credits.
    pub(crate) fn unlimited() -> Self {
        Self { next: 0, available: u64::MAX / 2, spare: 0 }
    }

    /// Returns the first id of a request that uses `charge` ids; `None` if too few credits are left.
    pub(crate) fn take(&mut self, charge: u16) -> Option<u64> {
        self.available = self.available.checked_sub(charge.into())?;
        let id = self.next;
        self.next += u64::from(charge);
        Some(id)
    }

    /// The credits to request: the charge of this request, plus the missing spare ones.
    pub(crate) fn ask(&self, charge: u16) -> u16 {
        let missing = self.spare.saturating_sub(self.available);
        u16::try_from(u64::from(charge) + missing).unwrap_or(u16::MAX).min(CREDITS_MAX)
    }

    /// Adds the credits that a response grants.
    pub(crate) fn grant(&mut self, credits: u16) {
        self.available += u64::from(credits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_credit_covers_64_kib() {
        assert_eq!([0, 1, 65_536, 65_537, 1 << 20, 8 << 20].map(charge), [1, 1, 1, 2, 16, 128]);
    }

    #[test]
    fn message_ids_are_taken_by_credit_charge_only_if_credits_suffice() {
        let mut credits = Credits::new(40);
        assert_eq!(credits.take(2), None, "only one credit");
        assert_eq!(credits.take(1), Some(0));
        assert_eq!(credits.take(1), None);
        credits.grant(credits.ask(1));
        assert_eq!(credits.take(16), Some(1));
        assert_eq!(credits.take(1), Some(17));
    }

    #[test]
    fn only_missing_credits_are_requested() {
        let mut credits = Credits::new(40);
        assert_eq!(credits.take(1), Some(0));
        assert_eq!(credits.ask(1), 41);
        credits.grant(50);
        assert_eq!(credits.ask(16), 16, "enough credits are available");
        assert_eq!(Credits::new(u64::MAX).ask(16), CREDITS_MAX);
    }
}
