//! Computes the size of a volume from a CSI capacity range.

use forebay_proto::csi::CapacityRange;

use crate::error::Error;
use crate::limits::{CAPACITY_DEFAULT_BYTES, CAPACITY_UNIT_BYTES};

/// A checked capacity range; `u64::MAX` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capacity {
    required_bytes: u64,
    limit_bytes: u64,
}

impl Capacity {
    pub(crate) fn parse(range: Option<&CapacityRange>) -> Result<Self, Error> {
        let Some(range) = range else {
            return Ok(Self { required_bytes: 0, limit_bytes: u64::MAX });
        };
        let required_bytes = u64::try_from(range.required_bytes)
            .map_err(|_| Error::Capacity("required_bytes is negative".into()))?;
        let limit_bytes = u64::try_from(range.limit_bytes)
            .map_err(|_| Error::Capacity("limit_bytes is negative".into()))?;
        let limit_bytes = if limit_bytes == 0 { u64::MAX } else { limit_bytes };
        if limit_bytes < required_bytes {
            return Err(Error::Capacity(format!(
                "limit_bytes {limit_bytes} is below required_bytes {required_bytes}"
            )));
        }
        Ok(Self { required_bytes, limit_bytes })
    }

    /// The same range for a volume that is created from a source of `bytes`: its size is at least that of the source.
    pub(crate) fn at_least(self, bytes: u64) -> Result<Self, Error> {
        if bytes > self.limit_bytes {
            return Err(Error::Capacity(format!(
                "its source has {bytes} bytes, and limit_bytes is {}",
                self.limit_bytes
            )));
        }
        match self.required_bytes {
            // No size was requested, so the volume is as large as its source.
            0 => Ok(Self { required_bytes: bytes, ..self }),
            required if required < bytes => Err(Error::Capacity(format!(
                "its source has {bytes} bytes, but required_bytes is {required}: request as many"
            ))),
            _ => Ok(self),
        }
    }

    /// The size of the new volume, in whole MiB.
    pub(crate) fn size_bytes(self) -> Result<u64, Error> {
        let wanted = match self.required_bytes {
            0 => CAPACITY_DEFAULT_BYTES.min(self.limit_bytes / CAPACITY_UNIT_BYTES * CAPACITY_UNIT_BYTES),
            required => required.next_multiple_of(CAPACITY_UNIT_BYTES),
        };
        if wanted == 0 || wanted > self.limit_bytes {
            return Err(Error::Capacity(format!(
                "no whole MiB lies between required_bytes {} and limit_bytes {}",
                self.required_bytes, self.limit_bytes
            )));
        }
        // CSI uses int64 for sizes.
        if i64::try_from(wanted).is_err() {
            return Err(Error::Capacity(format!("required_bytes {} is too large", self.required_bytes)));
        }
        Ok(wanted)
    }

    /// Whether a volume of this size satisfies the range.
    pub(crate) fn admits(self, bytes: u64) -> bool {
        (self.required_bytes..=self.limit_bytes).contains(&bytes)
    }

    pub(crate) fn limit_bytes(self) -> u64 {
        self.limit_bytes
    }
}

/// A size as CSI's int64.
pub(crate) fn to_csi(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: i64 = 1 << 20;

    fn size(required_bytes: i64, limit_bytes: i64) -> Result<u64, tonic::Code> {
        Capacity::parse(Some(&CapacityRange { required_bytes, limit_bytes }))
            .and_then(Capacity::size_bytes)
            .map_err(|e| tonic::Status::from(e).code())
    }

    #[test]
    fn size_is_derived_from_the_capacity_range() {
        assert_eq!(Capacity::parse(None).and_then(Capacity::size_bytes).ok(), Some(1 << 30));
        assert_eq!(size(0, 0), Ok(1 << 30));
        assert_eq!(size(1, 0), Ok(1 << 20));
        assert_eq!(size(MIB, MIB), Ok(1 << 20));
        assert_eq!(size(MIB + 1, 2 * MIB), Ok(2 << 20));
        assert_eq!(size(0, 10 * MIB + 5), Ok(10 << 20));
        assert_eq!(size(0, i64::MAX), Ok(1 << 30));
    }

    #[test]
    fn impossible_ranges_are_out_of_range() {
        for (required, limit) in [
            (2, 1),
            (-1, 0),
            (0, -1),
            (1, MIB - 1),
            (MIB + 1, MIB + 2),
            (0, 1),
            (i64::MAX, 0),
            (i64::MIN, i64::MIN),
        ] {
            assert_eq!(size(required, limit), Err(tonic::Code::OutOfRange), "{required}..{limit}");
        }
    }

    #[test]
    fn existing_size_is_checked_against_the_capacity_range() {
        let range = |required_bytes, limit_bytes| {
            Capacity::parse(Some(&CapacityRange { required_bytes, limit_bytes })).expect("a range")
        };
        assert!(range(0, 0).admits(5));
        assert!(range(5, 0).admits(5));
        assert!(range(4, 5).admits(5));
        assert!(!range(6, 0).admits(5));
        assert!(!range(1, 4).admits(5));
    }
}
