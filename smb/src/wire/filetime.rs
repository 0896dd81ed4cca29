//! `FILETIME` ([MS-DTYP] 2.3.3).

use super::Malformed;
use super::cursor::{Field, Reader};

/// Seconds from 1601-01-01 to 1970-01-01.
const UNIX_EPOCH_S: i64 = 11_644_473_600;
const TICKS_PER_S: i128 = 10_000_000;

/// Units of 100 ns since 1601-01-01 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FileTime(pub u64);

impl FileTime {
    /// In SET_INFO: leave this time unchanged ([MS-FSCC] 2.4.7).
    pub const UNCHANGED: Self = Self(0);
    /// In SET_INFO: stop updating this time by further operations on this handle ([MS-FSCC] 2.4.7).
    pub const FREEZE: Self = Self(u64::MAX);
    /// In SET_INFO: resume updating this time ([MS-FSCC] 2.4.7).
    pub const THAW: Self = Self(u64::MAX - 1);

    /// Converts from Unix time, rounded down to 100 ns. Times before 1601 become zero, times beyond the range the last one.
    #[must_use]
    pub const fn from_unix(seconds: i64, nanoseconds: u32) -> Self {
        let ticks = (seconds as i128 + UNIX_EPOCH_S as i128) * TICKS_PER_S + (nanoseconds / 100) as i128;
        if ticks < 0 {
            Self(0)
        } else if ticks > i64::MAX as i128 {
            Self(i64::MAX as u64)
        } else {
            Self(ticks as u64)
        }
    }

    /// Converts to Unix time: seconds, and nanoseconds within the second.
    #[must_use]
    pub const fn to_unix(self) -> (i64, u32) {
        let seconds = (self.0 / TICKS_PER_S as u64) as i64 - UNIX_EPOCH_S;
        (seconds, (self.0 % TICKS_PER_S as u64) as u32 * 100)
    }
}

impl Field for FileTime {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.get().map(Self)
    }
    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
    }
}
