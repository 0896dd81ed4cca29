//! A histogram of latencies, with buckets at most 1.6 % wide.

/// Buckets per power of two.
const STEPS: u64 = 64;
const STEP_BITS: u32 = STEPS.ilog2();
/// Enough for every u64.
const BUCKETS: usize = ((64 - STEP_BITS as usize) + 1) * STEPS as usize;

/// How often each number of nanoseconds occurred.
#[derive(Debug, Clone)]
pub(crate) struct Histogram {
    counts: Box<[u64]>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS].into(), total: 0 }
    }
}

/// Values below [`STEPS`] have a bucket each. For larger ones, the highest bits determine the bucket.
fn bucket(value: u64) -> usize {
    if value < STEPS {
        return value as usize;
    }
    let shift = value.ilog2() - STEP_BITS;
    ((u64::from(shift) + 1) * STEPS + (value >> shift) - STEPS) as usize
}

/// The middle of a bucket.
fn middle(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    ((bucket % STEPS + STEPS) << shift) + ((1 << shift) >> 1)
}

impl Histogram {
    /// Counts one value.
    pub(crate) fn record(&mut self, nanoseconds: u64) {
        self.counts[bucket(nanoseconds)] += 1;
        self.total += 1;
    }

    /// Adds all values of another histogram.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, its) in self.counts.iter_mut().zip(&other.counts) {
            *mine += its;
        }
        self.total += other.total;
    }

    /// Number of values.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The smallest value that a share (0 to 1) of all values does not exceed; `None` if there are none.
    pub(crate) fn quantile(&self, share: f64) -> Option<u64> {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Some(middle(bucket));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_ordered_and_narrow() {
        let mut previous = bucket(0);
        for value in 1..100_000 {
            let now = bucket(value);
            assert!(now == previous || now == previous + 1, "{value}");
            previous = now;
        }
        for value in [0, 63, 64, 1000, 123_456, 7_000_000_001, u64::MAX / 3, u64::MAX] {
            let error = middle(bucket(value)).abs_diff(value) as f64 / value.max(1) as f64;
            assert!(error <= 1.0 / STEPS as f64, "{value}: {error}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_computed_over_the_values_of_all_threads() {
        let (mut low, mut high) = (Histogram::default(), Histogram::default());
        (1..=500).for_each(|value| low.record(value * 1000));
        (501..=1000).for_each(|value| high.record(value * 1000));
        low.merge(&high);
        for (share, expected) in [(0.5, 500_000), (0.99, 990_000), (0.999, 999_000), (1.0, 1_000_000)] {
            let got = low.quantile(share).expect("there are values");
            assert!(got.abs_diff(expected) < expected / 50, "{share}: {got}");
        }
        assert_eq!(Histogram::default().quantile(0.5), None);
    }
}
