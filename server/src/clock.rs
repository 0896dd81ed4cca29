//! The two clocks: a monotonic clock for timeouts, and the wall clock in SMB's format: FILETIME, 100 ns since 1601
//! ([MS-DTYP] 2.3.3).

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use forebay_smb::time::Now;
use forebay_smb::wire::FileTime;

/// 100 ns intervals from 1601-01-01 to 1970-01-01.
const UNIX_EPOCH_FILETIME: i128 = 116_444_736_000_000_000;

/// The current time of both clocks.
#[must_use]
pub fn now() -> Now {
    Now { instant: Instant::now(), wall: wall() }
}

/// The current time of the wall clock, which may step at any moment: for peers and administrators, never for a timeout.
#[must_use]
pub fn wall() -> FileTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    FileTime(from_unix(since.as_secs().cast_signed(), since.subsec_nanos()))
}

/// FILETIME of a Unix time, clamped to the range of FILETIME.
#[must_use]
pub fn from_unix(seconds: i64, nanos: u32) -> u64 {
    let ticks = i128::from(seconds) * 10_000_000 + i128::from(nanos / 100) + UNIX_EPOCH_FILETIME;
    u64::try_from(ticks.max(0)).unwrap_or(u64::MAX)
}

/// Unix seconds and nanoseconds of a FILETIME.
#[must_use]
pub fn to_unix(filetime: u64) -> (i64, u32) {
    let ticks = i128::from(filetime) - UNIX_EPOCH_FILETIME;
    let seconds = ticks.div_euclid(10_000_000);
    let nanos = ticks.rem_euclid(10_000_000) * 100;
    (i64::try_from(seconds).expect("a u64 of 100 ns fits i64 seconds"), nanos as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unix_times_round_trip_to_100_ns() {
        for (seconds, nanos) in
            [(0, 0), (1_700_000_000, 123_456_700), (-1, 999_999_900), (-11_644_473_600, 0)]
        {
            assert_eq!(to_unix(from_unix(seconds, nanos)), (seconds, nanos));
        }
        assert_eq!(from_unix(0, 0), 116_444_736_000_000_000);
    }

    #[test]
    fn times_before_1601_are_clamped_to_zero() {
        assert_eq!(from_unix(-20_000_000_000, 5), 0);
    }
}
