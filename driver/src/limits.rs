//! Limits on input, resources and time.

use std::time::Duration;

/// CSI: "string fields have a limit of 128 bytes" unless the field says otherwise.
pub(crate) const NAME_BYTES_MAX: usize = 128;

/// Longest volume ID: the limit of the admin API, which also applies to a share's name.
pub(crate) const VOLUME_ID_BYTES_MAX: usize = 63;

/// CSI: maps hold at most 4 KiB, keys and values together.
pub(crate) const MAP_BYTES_MAX: usize = 4096;

/// CSI: all mount flags of a capability together.
pub(crate) const MOUNT_FLAGS_BYTES_MAX: usize = 4096;

/// Linux PATH_MAX, with the terminating zero.
pub(crate) const PATH_BYTES_MAX: usize = 4096;

/// Longest user name, as in the admin API.
pub(crate) const USERNAME_BYTES_MAX: usize = 64;

/// Shortest password that the admin API accepts.
pub(crate) const PASSWORD_CHARS_MIN: usize = 8;

/// Longest password. fsconfig(2) copies a string of at most 256 bytes including the terminating zero: a longer password could
/// be set on the server but never mounted.
pub(crate) const PASSWORD_BYTES_MAX: usize = 255;

/// Longest value that fsconfig(2) accepts for any string option.
pub(crate) const MOUNT_VALUE_BYTES_MAX: usize = 255;

/// Addresses in one volume context.
pub(crate) const ADDRESSES_MAX: usize = 16;

/// All addresses as text: a label's value on the server.
pub(crate) const ADDRESSES_BYTES_MAX: usize = 1024;

/// Volumes are sized in whole units of this many bytes.
pub(crate) const CAPACITY_UNIT_BYTES: u64 = 1 << 20;

/// Default size of a volume.
pub(crate) const CAPACITY_DEFAULT_BYTES: u64 = 1 << 30;

/// Volumes or target paths with a call in progress, and paths that are being measured; at most one thread belongs to each.
pub(crate) const IN_FLIGHT_MAX: usize = 1024;

/// Concurrent calls on one connection; further calls wait in the transport.
pub(crate) const CONCURRENT_CALLS_MAX: usize = 256;

/// Deadline of an admin API call that copies a volume: clients wait for at most 30 s of this time, and writes to stable
/// storage take additional time.
pub(crate) const COPY_DEADLINE: Duration = Duration::from_secs(120);
/// Deadline of an admin API call.
pub(crate) const ADMIN_DEADLINE: Duration = Duration::from_secs(30);

/// Deadline of an admin API call that only checks reachability.
pub(crate) const PROBE_DEADLINE: Duration = Duration::from_secs(5);

/// Interval of the check that the CSI socket still belongs to this process.
pub(crate) const SOCKET_WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// How long the server of an existing socket may stay silent before its process is considered dead, and the pause between two
/// attempts to connect to it.
pub(crate) const SOCKET_PATIENCE: Duration = Duration::from_secs(2);
pub(crate) const SOCKET_PAUSE: Duration = Duration::from_millis(50);

/// Deadline for connecting to the driver's own socket.
pub(crate) const HEALTH_DEADLINE: Duration = Duration::from_secs(2);

/// Deadline of a Kubernetes API call.
pub(crate) const KUBERNETES_DEADLINE: Duration = Duration::from_secs(10);

/// Objects in one page of a list from the Kubernetes API.
pub(crate) const KUBERNETES_PAGE_MAX: u32 = 100;

/// Age at which a client certificate is read again.
pub(crate) const CERTIFICATE_FRESH: Duration = Duration::from_secs(30);

/// Cached channels to instances; beyond this limit, the cache is cleared.
pub(crate) const CHANNELS_MAX: usize = 256;

/// Interval of keep-alives on an idle channel, and timeout of the response: a node that vanished sends no RST.
pub(crate) const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
pub(crate) const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Placements that are recorded in addition to the instances' own numbers.
pub(crate) const LEDGER_ENTRIES_MAX: usize = 2048;

/// How long a placement without quota is recorded: until the StorageCluster's status counts it.
pub(crate) const PLACEMENT_REMEMBERED: Duration = Duration::from_secs(60);

/// Longest name of an instance, `<cluster>-<ordinal>`: the limit of a DNS label.
pub(crate) const INSTANCE_BYTES_MAX: usize = 63;

/// Random bytes in a generated password.
pub(crate) const PASSWORD_RANDOM_BYTES: usize = 32;

/// Volumes in one page of a list over all instances if the caller sets no limit.
pub(crate) const LIST_ENTRIES_MAX: usize = 1000;

/// Messages read from one file system context after a failed mount.
pub(crate) const MOUNT_MESSAGES_MAX: usize = 16;

/// Consecutive refusals by the kubelet to register the driver, after which the driver exits.
pub(crate) const REFUSALS_MAX: u32 = 3;

/// Largest HTTP/2 frame from the kubelet that is parsed: the default limit of a server (RFC 9113 6.5.2).
pub(crate) const FRAME_BYTES_MAX: usize = 16_384;

/// Containers of a node that can use its RDMA devices at the same time. All share the same devices; the kubelet counts the
/// shares.
pub(crate) const RDMA_SHARES_MAX: usize = 64;

/// RDMA device nodes that a container can access.
pub(crate) const RDMA_NODES_MAX: usize = 64;

/// Deadline of a call to the kubelet.
pub(crate) const KUBELET_DEADLINE: Duration = Duration::from_secs(5);

/// Deadline for reading a node's sysfs before a mount that may use RDMA; afterwards the mount uses TCP or fails.
pub(crate) const CLIENT_DEADLINE: Duration = Duration::from_secs(5);

/// Volumes of a node with recorded mount details that the mount table does not show.
pub(crate) const MOUNT_NOTES_MAX: usize = 4096;

/// Deadline for reading a node's sysfs; afterwards a driver is reported as hung.
pub(crate) const INVENTORY_DEADLINE: Duration = Duration::from_secs(30);

/// Entries in each list of a StorageNode's status, which must stay far below etcd's 1.5 MiB.
pub(crate) const STATUS_ENTRIES_MAX: usize = 64;

/// Minimum bandwidth limit of a volume in bytes per second that the server accepts (admin.proto, Qos).
pub(crate) const BYTES_PER_SECOND_MIN: u64 = 1 << 20;
/// Minimum limit in operations per second.
pub(crate) const OPERATIONS_PER_SECOND_MIN: u64 = 10;

const _: () = assert!(VOLUME_ID_BYTES_MAX <= NAME_BYTES_MAX);
const _: () = assert!(INSTANCE_BYTES_MAX + 1 + VOLUME_ID_BYTES_MAX <= NAME_BYTES_MAX);
const _: () = assert!(PASSWORD_RANDOM_BYTES * 2 <= PASSWORD_BYTES_MAX);
const _: () = assert!(IN_FLIGHT_MAX <= LEDGER_ENTRIES_MAX);
const _: () = assert!(CAPACITY_DEFAULT_BYTES.is_multiple_of(CAPACITY_UNIT_BYTES));
