//! Limits the RDMA READs and WRITEs in flight on a connection.
//!
//! The two ends have negotiated a number of READs (the initiator depth). A device holds back any further READ together with
//! everything posted after it, responses included, so READs beyond that number must wait before they are posted.

/// Transfers in flight, and their limits.
#[derive(Debug)]
pub(crate) struct Transfers {
    max: u16,
    reads_max: u16,
    under_way: u16,
    reads: u16,
}

impl Transfers {
    /// Room for `max` transfers, at most `reads_max` of them READs.
    pub(crate) fn new(max: u16, reads_max: u8) -> Self {
        // If a peer serves no READs but requests one anyway, the device reports the result.
        Self { max, reads_max: u16::from(reads_max.max(1)), under_way: 0, reads: 0 }
    }

    /// WRITEs that can be started now.
    pub(crate) fn left(&self) -> u16 {
        self.max - self.under_way
    }

    /// READs that can be started now.
    pub(crate) fn reads_left(&self) -> u16 {
        self.left().min(self.reads_max - self.reads)
    }

    /// Starts a WRITE, or the binding of a window. False if there is no room.
    #[must_use]
    pub(crate) fn begin(&mut self) -> bool {
        let may = self.left() > 0;
        self.under_way += u16::from(may);
        may
    }

    /// Starts a READ. False if there is no room.
    #[must_use]
    pub(crate) fn begin_read(&mut self) -> bool {
        let may = self.reads_left() > 0;
        self.under_way += u16::from(may);
        self.reads += u16::from(may);
        may
    }

    /// Ends a transfer that [`Transfers::begin`] has started.
    pub(crate) fn end(&mut self) {
        self.under_way -= 1;
    }

    /// Ends a READ.
    pub(crate) fn end_read(&mut self) {
        self.reads -= 1;
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_are_limited_by_the_negotiated_depth_and_writes_are_not() {
        let mut transfers = Transfers::new(128, 16);
        let begun = (0..128).filter(|_| transfers.begin_read()).count();
        assert_eq!((begun, transfers.reads_left(), transfers.left()), (16, 0, 112));
        assert!(transfers.begin());
        transfers.end_read();
        assert_eq!((transfers.reads_left(), transfers.left()), (1, 112));
        assert!(transfers.begin_read() && !transfers.begin_read());
    }

    #[test]
    fn reads_and_writes_share_the_depth_of_the_send_queue() {
        let mut transfers = Transfers::new(4, 255);
        assert!(transfers.begin() && transfers.begin() && transfers.begin_read() && transfers.begin());
        assert_eq!((transfers.left(), transfers.reads_left()), (0, 0));
        assert!(!transfers.begin() && !transfers.begin_read());
        transfers.end();
        assert_eq!((transfers.left(), transfers.reads_left()), (1, 1));
    }

    #[test]
    fn a_read_depth_of_zero_allows_one_read_at_a_time() {
        let mut transfers = Transfers::new(4, 0);
        assert!(transfers.begin_read() && !transfers.begin_read() && transfers.begin());
    }
}
