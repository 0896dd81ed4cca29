//! Every limit by name.

use std::time::Duration;

/// Nodes that `status.nodes` lists at most; those that do not fit come first.
pub const NODE_VERDICTS_MAX: usize = 200;
/// Bytes of a condition's message at most; the API server takes 32 KiB.
pub const CONDITION_MESSAGE_MAX: usize = 4096;
/// Bytes of an Event's note at most, by the Events API.
pub const EVENT_NOTE_MAX: usize = 1000;
/// Events of one reconciliation at most; what is beyond is still in the status.
pub const EVENTS_PER_RECONCILE_MAX: usize = 20;
/// Clusters reconciled at the same time.
pub const RECONCILES_AT_ONCE_MAX: u16 = 4;
/// One reconciliation, everything included. What takes longer is given up and tried again.
pub const RECONCILE_TIME_MAX: Duration = Duration::from_secs(60);
/// Everything is looked at again after so long, whatever the watches said.
pub const RESYNC: Duration = Duration::from_secs(300);
/// As [`RESYNC`], while an instance does not serve.
pub const UNREADY_RESYNC: Duration = Duration::from_secs(60);
/// Changes that come within so long of one another make one reconciliation.
pub const DEBOUNCE: Duration = Duration::from_millis(200);
/// First delay after an error; it doubles.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(500);
/// Longest delay after errors.
pub const BACKOFF_MAX: Duration = Duration::from_secs(120);
/// Between two visits to an instance's admin API.
pub const POLL_INTERVAL: Duration = Duration::from_secs(15);
/// Connecting to an instance's admin API.
pub const ADMIN_CONNECT_TIME_MAX: Duration = Duration::from_secs(3);
/// One call of an instance's admin API.
pub const ADMIN_CALL_TIME_MAX: Duration = Duration::from_secs(5);
/// An instance that has not answered for so long counts as gone.
pub const REPORT_AGE_MAX: Duration = Duration::from_secs(60);
/// Instances visited at the same time.
pub const POLLS_AT_ONCE_MAX: usize = 16;
/// Volumes read from an instance in one page.
pub const VOLUMES_PAGE: u32 = 500;
/// Volumes destroyed in one reconciliation; the next goes on.
pub const VOLUMES_DESTROYED_AT_ONCE_MAX: usize = 200;
/// What is sure to go on at the next look waits for so long.
pub const SOON: Duration = Duration::from_millis(200);
/// What a deletion or a removal waits for is looked at again after so long.
pub const WAIT: Duration = Duration::from_secs(10);
/// An instance counts as without volumes only when its phase has been `Removing` for so long: a CreateVolume that saw an
/// earlier one has recorded its volume by then, or failed. The driver has 10 s for each of three calls of the API server
/// until that (`KUBERNETES_DEADLINE`), and 5 s to ask the instances (`PROBE_DEADLINE`).
pub const ANNOUNCEMENT: Duration = Duration::from_secs(45);
/// Seconds that a Lease is good for without being renewed, unless the command line says otherwise. A node that is short of
/// CPU needs ten seconds for its connections when all watches are renewed at once; servers go on without an operator.
pub const LEASE_DURATION_S: u64 = 45;
/// The same, at least and at most.
pub const LEASE_DURATION_S_RANGE: std::ops::RangeInclusive<u64> = 5..=3600;
/// How long the work in hand may go on after SIGTERM.
pub const SHUTDOWN_TIME_MAX: Duration = Duration::from_secs(20);

const _: () = assert!(POLL_INTERVAL.as_secs() * 3 < REPORT_AGE_MAX.as_secs());

/// A pod that no node takes asks for RDMA devices so long, where it can do without: as long as a restart of the node plugin
/// takes, and more. One with a container that lacks a device is left alone so long, too.
pub const RDMA_WAIT: Duration = Duration::from_secs(60);
/// Between two looks at the Lease of a node that an instance could leave.
pub const LEASE_INTERVAL: Duration = Duration::from_secs(3);
/// One look at a Lease.
pub const LEASE_LOOK_TIME_MAX: Duration = Duration::from_secs(3);
/// A node that was not looked at for longer is given all its time again.
pub const LEASE_GAP_MAX: Duration = Duration::from_secs(10);
/// Leases looked at at the same time.
pub const LEASES_AT_ONCE_MAX: usize = 16;
/// A server that is not ready on a node that lives is given so many times what a silent node is given ...
pub const UNREADY_FACTOR: u32 = 3;
/// ... and so long at least: a container that fails is started again after delays that grow.
pub const UNREADY_MIN: Duration = Duration::from_secs(120);
/// A server that came from another node and does not come up is not moved again for so long.
pub const MOVE_PAUSE: Duration = Duration::from_secs(600);

const _: () = assert!(LEASE_INTERVAL.as_secs() + LEASE_LOOK_TIME_MAX.as_secs() < LEASE_GAP_MAX.as_secs());

/// A kubelet renews its Lease after so long at most: a quarter of 40 s, and 4 % more by chance.
pub const RENEWAL_MAX: Duration = Duration::from_millis(10_400);
/// A Lease that was not seen to change for so long has missed a renewal: one that is renewed is seen silent for three looks, 9 s, at
/// most. Whatever fell silent together with a node that has been silent for the shortest `afterSeconds` has been so for this long.
pub const LEASE_QUIET: Duration = Duration::from_secs(11);
/// Nodes that fell silent within so long of each other did so together.
pub const STORM_WINDOW: Duration = Duration::from_secs(60);
/// A node with a Lease older than the newest one by so much when the operator begins to look was off before.
pub const LONG_OFF: Duration = Duration::from_secs(600);
/// Fewer silent nodes are no sign of trouble in the control plane.
pub const STORM_NODES_MIN: usize = 2;
/// Takeovers pause for so long after too many nodes were silent: kubelets that could not renew try again after up to 7 s, with
/// connections that take 10 s to fail, and pods become ready again after that only.
pub const STORM_SETTLE: Duration = Duration::from_secs(60);
/// The same, after the API server was in trouble.
pub const API_SERVER_SETTLE: Duration = Duration::from_secs(30);
/// Nodes of a cluster that could take its instances over and have Leases that are looked at, beside those that have instances.
pub const SPARES_OBSERVED_MAX: usize = 16;
/// Other nodes with Leases that are looked at, for a cluster: witnesses of whether the control plane is heard.
pub const WITNESSES_MAX: usize = 16;
/// A node that was chosen and had not been looked at is looked at for so long.
pub const ATTENTION: Duration = Duration::from_secs(60);

/// Nodes, StorageNodes and StorageClusters are listed within so long after the work has begun, or the loop stalls.
pub const LISTS_TIME_MAX: Duration = Duration::from_secs(120);
/// A reconciliation waits for these lists for so long; then it fails, and is counted and tried again.
pub const LISTS_WAIT: Duration = Duration::from_secs(20);
/// Errors of a watch that are further apart are not the same trouble: a watch that fails is tried again every 30 s at least.
pub const WATCH_ERRORS_GAP: Duration = Duration::from_secs(90);
/// A watch that has failed again and again for so long stalls the loop.
pub const WATCH_ERRORS_MAX: Duration = Duration::from_secs(300);
/// A StorageCluster that was not looked at for so long has been forgotten by the loop.
pub const PASS_AGE_MAX: Duration = Duration::from_secs(720);
/// Between two looks at how the loop is.
pub const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// A StorageCluster that cannot be read is tried again after so long, should no watch tell of a change.
pub const UNREADABLE_RESYNC: Duration = Duration::from_secs(300);

const _: () = assert!(RESYNC.as_secs() * 2 + RECONCILE_TIME_MAX.as_secs() < PASS_AGE_MAX.as_secs());
const _: () = assert!(UNREADABLE_RESYNC.as_secs() * 2 < PASS_AGE_MAX.as_secs());
const _: () = assert!(BACKOFF_MAX.as_secs() * 2 < PASS_AGE_MAX.as_secs());

/// A pod that the scheduler finds no room for waits for so long on the node that was chosen; then another one is tried, where the
/// instance is bound to none.
pub const UNSCHEDULABLE_MAX: Duration = Duration::from_secs(120);

/// Events of one object and reason that are read at most, to tell why a pod does not come up. They come in no order of time.
pub const EVENTS_READ_MAX: u32 = 50;
/// Events of longer ago than this say nothing of a mount that fails now: the kubelet tries at least every two minutes or so.
pub const MOUNT_FAILURE_AGE_MAX: Duration = Duration::from_secs(600);
/// As [`MOUNT_FAILURE_AGE_MAX`], of a pod that cannot be made: the StatefulSet controller's delay between two tries grows to 1000 s.
pub const CREATION_FAILURE_AGE_MAX: Duration = Duration::from_secs(1200);
