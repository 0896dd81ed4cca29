//! How long is waited and how much is shown.

use std::time::Duration;

/// Everything that is read from the Kubernetes API together.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(60);

/// To connect to the API server.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Objects in one page of a list.
pub(crate) const PAGE_ENTRIES: u32 = 500;

/// Pages of one list: a longer table is of no use.
pub(crate) const PAGES_MAX: usize = 200;

/// For the metrics of one server.
pub(crate) const SCRAPE_DEADLINE: Duration = Duration::from_secs(10);

/// Volumes that the plain table shows.
pub(crate) const VOLUMES_SHOWN: usize = 20;

/// For a change of a StorageCluster.
pub(crate) const CHANGE_DEADLINE: Duration = Duration::from_secs(30);

/// For each part of an adoption.
pub(crate) const ADOPT_DEADLINE: Duration = Duration::from_secs(30);

/// For a list of a bundle.
pub(crate) const BUNDLE_LIST_DEADLINE: Duration = Duration::from_secs(60);

/// For a log or the metrics of a bundle.
pub(crate) const BUNDLE_LOG_DEADLINE: Duration = Duration::from_secs(60);

/// Lines of each log in a bundle.
pub(crate) const BUNDLE_LOG_LINES: i64 = 10_000;

/// Bytes of each log in a bundle.
pub(crate) const BUNDLE_LOG_BYTES_MAX: i64 = 16 << 20;

/// The last epoch: a reservation's key has 32 bits for it.
pub(crate) const EPOCH_MAX: u64 = u32::MAX as u64;
