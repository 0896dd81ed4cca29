//! Deadlines, and limits for the output.

use std::time::Duration;

/// Deadline for reading everything from the Kubernetes API.
pub(crate) const READ_DEADLINE: Duration = Duration::from_secs(60);

/// Deadline for connecting to the API server.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Objects in one page of a list.
pub(crate) const PAGE_ENTRIES: u32 = 500;

/// Maximum number of pages of a list: a longer table is useless.
pub(crate) const PAGES_MAX: usize = 200;

/// Deadline for the metrics of one server.
pub(crate) const SCRAPE_DEADLINE: Duration = Duration::from_secs(10);

/// Maximum number of volumes in the plain table.
pub(crate) const VOLUMES_SHOWN: usize = 20;

/// Deadline for changing a StorageCluster.
pub(crate) const CHANGE_DEADLINE: Duration = Duration::from_secs(30);

/// Deadline for each part of an adoption.
pub(crate) const ADOPT_DEADLINE: Duration = Duration::from_secs(30);

/// Deadline for a list in a bundle.
pub(crate) const BUNDLE_LIST_DEADLINE: Duration = Duration::from_secs(60);

/// Deadline for a log or the metrics in a bundle.
pub(crate) const BUNDLE_LOG_DEADLINE: Duration = Duration::from_secs(60);

/// Maximum number of lines of each log in a bundle.
pub(crate) const BUNDLE_LOG_LINES: i64 = 10_000;

/// Maximum size of each log in a bundle, in bytes.
pub(crate) const BUNDLE_LOG_BYTES_MAX: i64 = 16 << 20;

/// The last epoch: a reservation's key has 32 bits for it.
pub(crate) const EPOCH_MAX: u64 = u32::MAX as u64;

/// How often the state of a load is read.
pub(crate) const JOB_POLL: Duration = Duration::from_secs(2);

/// Deadline for the start of all pods of a load: the volume, the scheduler, the image.
pub(crate) const JOB_START_DEADLINE: Duration = Duration::from_secs(600);

/// Failed readings in a row after which a load is given up.
pub(crate) const JOB_UNREACHABLE_MAX: u32 = 30;

/// Deadline for a single request during a rehearsal.
pub(crate) const REHEARSE_DEADLINE: Duration = Duration::from_secs(30);

/// How often the state of a server is read in a rehearsal: the precision of its timeline.
pub(crate) const REHEARSE_POLL: Duration = Duration::from_millis(250);
