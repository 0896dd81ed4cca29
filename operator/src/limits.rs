//! All limits as named constants.

use std::time::Duration;

/// Maximum number of nodes in `status.nodes`; nodes that do not fit come first.
pub const NODE_VERDICTS_MAX: usize = 200;
/// Maximum length of a condition's message in bytes; the API server accepts 32 KiB.
pub const CONDITION_MESSAGE_MAX: usize = 4096;
/// Maximum length of an Event's note in bytes, as defined by the Events API.
pub const EVENT_NOTE_MAX: usize = 1000;
/// Maximum number of Events per reconciliation; the status still contains the rest.
pub const EVENTS_PER_RECONCILE_MAX: usize = 20;
/// Clusters reconciled at the same time.
pub const RECONCILES_AT_ONCE_MAX: u16 = 4;
/// Time limit for one whole reconciliation. If it is exceeded, the reconciliation is aborted and retried.
pub const RECONCILE_TIME_MAX: Duration = Duration::from_secs(60);
/// Everything is checked again after this time, regardless of the watches.
pub const RESYNC: Duration = Duration::from_secs(300);
/// As [`RESYNC`], while an instance does not serve.
pub const UNREADY_RESYNC: Duration = Duration::from_secs(60);
/// Changes within this time of one another are merged into one reconciliation.
pub const DEBOUNCE: Duration = Duration::from_millis(200);
/// First delay after an error; it doubles.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(500);
/// Longest delay after errors.
pub const BACKOFF_MAX: Duration = Duration::from_secs(120);
/// Interval between two queries of an instance's admin API.
pub const POLL_INTERVAL: Duration = Duration::from_secs(15);
/// Time limit for connecting to an instance's admin API.
pub const ADMIN_CONNECT_TIME_MAX: Duration = Duration::from_secs(3);
/// Time limit for one call to an instance's admin API.
pub const ADMIN_CALL_TIME_MAX: Duration = Duration::from_secs(5);
/// An instance that has not responded for this long counts as gone.
pub const REPORT_AGE_MAX: Duration = Duration::from_secs(60);
/// Number of instances queried at the same time.
pub const POLLS_AT_ONCE_MAX: usize = 16;
/// Page size for listing an instance's volumes.
pub const VOLUMES_PAGE: u32 = 500;
/// Number of volumes destroyed in one reconciliation; the next one continues.
pub const VOLUMES_DESTROYED_AT_ONCE_MAX: usize = 200;
/// Delay before the next reconciliation if that is certain to make progress.
pub const SOON: Duration = Duration::from_millis(200);
/// Interval at which the conditions for a deletion or a removal are checked again.
pub const WAIT: Duration = Duration::from_secs(10);
/// An instance counts as empty only after its phase has been `Removing` for this long: by then, a CreateVolume that read an
/// earlier phase has recorded its volume or failed. Until then the driver has 10 s for each of three calls to the API server
/// (`KUBERNETES_DEADLINE`), and 5 s to query the instances (`PROBE_DEADLINE`).
pub const ANNOUNCEMENT: Duration = Duration::from_secs(45);
/// Default validity of a Lease without renewal, in seconds. A node that is short of CPU needs ten seconds for its
/// connections if all watches are renewed at the same time; servers continue without an operator.
pub const LEASE_DURATION_S: u64 = 45;
/// Minimum and maximum of the same.
pub const LEASE_DURATION_S_RANGE: std::ops::RangeInclusive<u64> = 5..=3600;
/// How long work in progress can continue after SIGTERM.
pub const SHUTDOWN_TIME_MAX: Duration = Duration::from_secs(20);

const _: () = assert!(POLL_INTERVAL.as_secs() * 3 < REPORT_AGE_MAX.as_secs());

/// How long an unschedulable pod keeps requesting RDMA devices that it can do without: longer than a restart of the node
/// plugin. A pod with a container that lacks a device is left alone for as long.
pub const RDMA_WAIT: Duration = Duration::from_secs(60);
/// Interval between two reads of the Lease of a node that an instance could leave.
pub const LEASE_INTERVAL: Duration = Duration::from_secs(3);
/// Time limit for reading a Lease.
pub const LEASE_LOOK_TIME_MAX: Duration = Duration::from_secs(3);
/// If a node was not observed for longer than this, its silence counts from zero again.
pub const LEASE_GAP_MAX: Duration = Duration::from_secs(10);
/// Number of Leases read at the same time.
pub const LEASES_AT_ONCE_MAX: usize = 16;
/// A server that is not ready on a live node gets this multiple of the time that a silent node gets ...
pub const UNREADY_FACTOR: u32 = 3;
/// ... but at least this long, because a failing container is restarted after growing delays.
pub const UNREADY_MIN: Duration = Duration::from_secs(120);
/// A server that moved and does not start on its new node is not moved again for this long.
pub const MOVE_PAUSE: Duration = Duration::from_secs(600);

const _: () = assert!(LEASE_INTERVAL.as_secs() + LEASE_LOOK_TIME_MAX.as_secs() < LEASE_GAP_MAX.as_secs());

/// Longest interval between two renewals of a kubelet's Lease: a quarter of 40 s, plus up to 4 % of jitter.
pub const RENEWAL_MAX: Duration = Duration::from_millis(10_400);
/// A Lease without a change for this long has missed a renewal: a Lease that is renewed appears silent for at most three
/// reads, 9 s. When a node has been silent for the shortest `afterSeconds`, every node that fell silent together with it has
/// been silent for at least this long.
pub const LEASE_QUIET: Duration = Duration::from_secs(11);
/// Nodes that fell silent within this time of each other did so together.
pub const STORM_WINDOW: Duration = Duration::from_secs(60);
/// A node was off before if its Lease is this much older than the newest one when the operator begins to observe.
pub const LONG_OFF: Duration = Duration::from_secs(600);
/// Fewer silent nodes do not indicate trouble in the control plane.
pub const STORM_NODES_MIN: usize = 2;
/// How long takeovers pause after too many nodes were silent: kubelets that could not renew retry after up to 7 s, on
/// connections that take 10 s to fail, and pods become ready only after that.
pub const STORM_SETTLE: Duration = Duration::from_secs(60);
/// The same, after the API server was in trouble.
pub const API_SERVER_SETTLE: Duration = Duration::from_secs(30);
/// Maximum number of observed nodes that could take over a cluster's instances, in addition to those that have instances.
pub const SPARES_OBSERVED_MAX: usize = 16;
/// Maximum number of other observed nodes per cluster, as witnesses of whether the kubelets reach the control plane.
pub const WITNESSES_MAX: usize = 16;
/// How long a node is observed that was chosen without being observed.
pub const ATTENTION: Duration = Duration::from_secs(60);

/// Time within which nodes, StorageNodes and StorageClusters must be listed after the work has begun; otherwise the loop
/// counts as stalled.
pub const LISTS_TIME_MAX: Duration = Duration::from_secs(120);
/// How long a reconciliation waits for these lists before it fails, which is counted and retried.
pub const LISTS_WAIT: Duration = Duration::from_secs(20);
/// Interval at which a task that waits for a list checks whether it has arrived.
pub const LIST_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Errors of a watch that are further apart than this are unrelated: a failing watch is retried at least every 30 s.
pub const WATCH_ERRORS_GAP: Duration = Duration::from_secs(90);
/// The loop counts as stalled if a watch has failed repeatedly for this long.
pub const WATCH_ERRORS_MAX: Duration = Duration::from_secs(300);
/// The loop has lost a StorageCluster that it has not processed for this long.
pub const PASS_AGE_MAX: Duration = Duration::from_secs(720);
/// Interval between two checks of the loop.
pub const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// A StorageCluster that cannot be read is retried after this time, unless a watch reports a change first.
pub const UNREADABLE_RESYNC: Duration = Duration::from_secs(300);

const _: () = assert!(RESYNC.as_secs() * 2 + RECONCILE_TIME_MAX.as_secs() < PASS_AGE_MAX.as_secs());
const _: () = assert!(UNREADABLE_RESYNC.as_secs() * 2 < PASS_AGE_MAX.as_secs());
const _: () = assert!(BACKOFF_MAX.as_secs() * 2 < PASS_AGE_MAX.as_secs());

/// How long a pod without room waits on the chosen node before another one is tried, if the instance is not bound.
pub const UNSCHEDULABLE_MAX: Duration = Duration::from_secs(120);

/// Maximum number of Events read per object and reason, to find out why a pod does not start. They are not in chronological
/// order.
pub const EVENTS_READ_MAX: u32 = 50;
/// Maximum age of Events about a current mount failure: the kubelet retries at least every two minutes or so.
pub const MOUNT_FAILURE_AGE_MAX: Duration = Duration::from_secs(600);
/// As [`MOUNT_FAILURE_AGE_MAX`], but for a pod that cannot be created: the StatefulSet controller's retry delay grows to
/// 1000 s.
pub const CREATION_FAILURE_AGE_MAX: Duration = Duration::from_secs(1200);
