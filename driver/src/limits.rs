//! What a caller can push against, and where it stops.

use std::time::Duration;

/// CSI: "string fields have a limit of 128 bytes" unless the field says otherwise.
pub(crate) const NAME_BYTES_MAX: usize = 128;

/// Longest volume id: that of the admin API, which is also a share's name.
pub(crate) const VOLUME_ID_BYTES_MAX: usize = 63;

/// CSI: maps hold at most 4 KiB, keys and values together.
pub(crate) const MAP_BYTES_MAX: usize = 4096;

/// CSI: all mount flags of a capability together.
pub(crate) const MOUNT_FLAGS_BYTES_MAX: usize = 4096;

/// Linux PATH_MAX, with the terminating zero.
pub(crate) const PATH_BYTES_MAX: usize = 4096;

/// User names, as the admin API has them.
pub(crate) const USERNAME_BYTES_MAX: usize = 64;

/// Shortest password that the admin API takes.
pub(crate) const PASSWORD_CHARS_MIN: usize = 8;

/// fsconfig(2) copies a string of at most 256 bytes with its terminating zero: a longer password could be
/// set on the server but never mounted.
pub(crate) const PASSWORD_BYTES_MAX: usize = 255;

/// Longest value that fsconfig(2) takes for any string option.
pub(crate) const MOUNT_VALUE_BYTES_MAX: usize = 255;

/// Addresses in one volume context.
pub(crate) const ADDRESSES_MAX: usize = 16;

/// All of them as text: a label's value on the server.
pub(crate) const ADDRESSES_BYTES_MAX: usize = 1024;

/// Volumes are sized in whole units of this many bytes.
pub(crate) const CAPACITY_UNIT_BYTES: u64 = 1 << 20;

/// What a volume gets when the caller does not say.
pub(crate) const CAPACITY_DEFAULT_BYTES: u64 = 1 << 30;

/// Volumes or target paths with a call under way, and paths that are measured; one thread at most belongs to each.
pub(crate) const IN_FLIGHT_MAX: usize = 1024;

/// Calls in work on one connection; the others wait in the transport.
pub(crate) const CONCURRENT_CALLS_MAX: usize = 256;

/// A call to the admin API that copies a volume: clients wait for 30 s of it at most, and stable storage takes its time.
pub(crate) const COPY_DEADLINE: Duration = Duration::from_secs(120);
/// One call to the admin API.
pub(crate) const ADMIN_DEADLINE: Duration = Duration::from_secs(30);

/// One call to the admin API where only reachability is asked.
pub(crate) const PROBE_DEADLINE: Duration = Duration::from_secs(5);

/// How often is looked whether the CSI socket is still this process's.
pub(crate) const SOCKET_WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// How long the server of a socket that is there already may say nothing until its process is taken for dead, and the pause
/// between two tries to connect to it.
pub(crate) const SOCKET_PATIENCE: Duration = Duration::from_secs(2);
pub(crate) const SOCKET_PAUSE: Duration = Duration::from_millis(50);

/// Connecting to the driver's own socket.
pub(crate) const HEALTH_DEADLINE: Duration = Duration::from_secs(2);

/// One call to the Kubernetes API.
pub(crate) const KUBERNETES_DEADLINE: Duration = Duration::from_secs(10);

/// Objects in one page of a list from the Kubernetes API.
pub(crate) const KUBERNETES_PAGE_MAX: u32 = 100;

/// A client certificate is read again when it is older than this.
pub(crate) const CERTIFICATE_FRESH: Duration = Duration::from_secs(30);

/// Channels to instances that are kept; past it all are opened again.
pub(crate) const CHANNELS_MAX: usize = 256;

/// An idle channel asks whether its server is there so often, and waits so long for the answer: a node that vanished
/// sends no RST.
pub(crate) const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
pub(crate) const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Placements that are remembered beside the instances' own numbers.
pub(crate) const LEDGER_ENTRIES_MAX: usize = 2048;

/// A placement without quota is remembered so long: until the StorageCluster's status counts it.
pub(crate) const PLACEMENT_REMEMBERED: Duration = Duration::from_secs(60);

/// Longest name of an instance, which is `<cluster>-<ordinal>`: that of a DNS label.
pub(crate) const INSTANCE_BYTES_MAX: usize = 63;

/// Random bytes in a password that the driver makes.
pub(crate) const PASSWORD_RANDOM_BYTES: usize = 32;

/// Volumes in one page of a list over all instances where the caller sets no limit.
pub(crate) const LIST_ENTRIES_MAX: usize = 1000;

/// Messages read from one file system context after a failed mount.
pub(crate) const MOUNT_MESSAGES_MAX: usize = 16;

/// Times in a row that the kubelet refuses to register the driver, until the driver ends.
pub(crate) const REFUSALS_MAX: u32 = 3;

/// Largest HTTP/2 frame of the kubelet that is looked at: what a server takes that announces nothing else (RFC 9113 6.5.2).
pub(crate) const FRAME_BYTES_MAX: usize = 16_384;

/// Containers of a node that can have its RDMA devices at once. All share the same devices; the kubelet counts.
pub(crate) const RDMA_SHARES_MAX: usize = 64;

/// RDMA devices of a node that a container is let at.
pub(crate) const RDMA_NODES_MAX: usize = 64;

/// One call to the kubelet.
pub(crate) const KUBELET_DEADLINE: Duration = Duration::from_secs(5);

/// Reading a node's sysfs before a mount that may go by RDMA; after it the mount goes by TCP or fails.
pub(crate) const CLIENT_DEADLINE: Duration = Duration::from_secs(5);

/// Volumes of a node of which is remembered what the table of mounts does not show.
pub(crate) const MOUNT_NOTES_MAX: usize = 4096;

/// Reading a node's sysfs; after it a driver is said to hang.
pub(crate) const INVENTORY_DEADLINE: Duration = Duration::from_secs(30);

/// Entries in each list of a StorageNode's status, which must stay far below etcd's 1.5 MiB.
pub(crate) const STATUS_ENTRIES_MAX: usize = 64;

/// The least limit of a volume in bytes per second that the server takes (admin.proto, Qos).
pub(crate) const BYTES_PER_SECOND_MIN: u64 = 1 << 20;
/// The same in operations per second.
pub(crate) const OPERATIONS_PER_SECOND_MIN: u64 = 10;

const _: () = assert!(VOLUME_ID_BYTES_MAX <= NAME_BYTES_MAX);
const _: () = assert!(INSTANCE_BYTES_MAX + 1 + VOLUME_ID_BYTES_MAX <= NAME_BYTES_MAX);
const _: () = assert!(PASSWORD_RANDOM_BYTES * 2 <= PASSWORD_BYTES_MAX);
const _: () = assert!(IN_FLIGHT_MAX <= LEDGER_ENTRIES_MAX);
const _: () = assert!(CAPACITY_DEFAULT_BYTES.is_multiple_of(CAPACITY_UNIT_BYTES));
