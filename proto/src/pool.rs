//! What a pool can promise, by one rule for all clients of a server: the driver, which places volumes, and the operator,
//! which says how much is left.

use crate::admin::Pool;

impl Pool {
    /// Whether it keeps its volumes to their capacities.
    #[must_use]
    pub fn has_quota(&self) -> bool {
        self.quota != "none"
    }

    /// Bytes that can still be given to volumes, where so many percent of the pool may be. Promises that are not used yet
    /// count as used; where nothing is promised what is free counts.
    #[must_use]
    pub fn available_bytes(&self, overcommit_percent: u32) -> u64 {
        if !self.has_quota() {
            return self.free_bytes;
        }
        let limit = u128::from(self.total_bytes) * u128::from(overcommit_percent) / 100;
        let promised = u64::try_from(limit).unwrap_or(u64::MAX).saturating_sub(self.provisioned_bytes);
        // Space that other files take up in the file system cannot be promised. An administrator who overcommits has said
        // that it may be, as long as any space is free.
        match overcommit_percent {
            ..=100 => promised.min(self.free_bytes),
            _ if self.free_bytes == 0 => 0,
            _ => promised,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_bytes_respects_quota_free_space_and_overcommit() {
        let pool = |quota: &str, free_bytes, provisioned_bytes| Pool {
            total_bytes: 1000,
            free_bytes,
            provisioned_bytes,
            quota: quota.to_owned(),
            ..Pool::default()
        };
        for (pool, percent, bytes) in [
            (pool("project", 900, 300), 100, 700),
            (pool("project", 600, 300), 100, 600),
            (pool("project", 900, 3000), 100, 0),
            (pool("project", 900, 600), 50, 0),
            (pool("project", 300, 600), 10_000, 99_400),
            (pool("project", 0, 600), 10_000, 0),
            (pool("none", 300, 600), 100, 300),
        ] {
            assert_eq!(pool.available_bytes(percent), bytes, "{pool:?} {percent}");
        }
        let vast = Pool { total_bytes: u64::MAX, ..pool("project", u64::MAX, 0) };
        assert_eq!(vast.available_bytes(u32::MAX), u64::MAX);
    }
}
