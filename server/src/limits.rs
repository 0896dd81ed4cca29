//! Named limits of the daemon that a peer or an administrator can reach. Units come last in names.

use std::time::Duration;

pub use forebay_rdma::limits::ACCOUNT_RESERVE_BYTES;

/// Smallest memory for payload that a configuration can set, in bytes.
pub const MEMORY_BYTES_MIN: u64 = 64 << 20;
/// Largest default memory for payload, in bytes.
pub const MEMORY_DEFAULT_BYTES_MAX: u64 = 16 << 30;
/// The default memory for payload is the machine's memory divided by this.
pub const MEMORY_DEFAULT_SHARE: u64 = 4;
/// All connections of one user, and so of one volume, share the memory for payload divided by this.
pub const TENANT_MEMORY_SHARE: usize = 4;
/// Minimum of that share in bytes: several of the largest frames.
pub const TENANT_MEMORY_BYTES_MIN: usize = 32 << 20;
/// Memory of one connection's buffers: received frames that are being served, data that was read, answers that are not sent
/// yet.
pub const CONNECTION_MEMORY_BYTES_MAX: usize = 64 << 20;
/// Smallest answer outside of buffers, in bytes, that is counted like an answer in a buffer.
pub const COUNTED_ANSWER_BYTES_MIN: usize = 4 << 10;
/// Bytes of READs and WRITEs that one turn of an event loop begins for volumes of normal priority (`qos::Priority`). The
/// rest waits for the next turn, so that completed work is sent before more is copied.
pub const TURN_BYTES_MAX: u64 = 4 << 20;
/// How often a change checks again whether the gate of its volume is open.
pub const GATE_POLL: Duration = Duration::from_millis(10);
/// Shards in which a gate counts active changes.
pub const GATE_SHARDS: usize = 16;
/// How far a volume may exceed its limits in advance: the burst that it may use after a pause.
pub const QOS_BURST: Duration = Duration::from_millis(100);
/// The lowest limit of a volume's bytes per second: the largest READ is answered before clients time out.
pub const QOS_BYTES_PER_SECOND_MIN: u64 = 1 << 20;
/// The lowest limit of a volume's operations per second.
pub const QOS_OPERATIONS_PER_SECOND_MIN: u64 = 10;
/// How often unused buffers are returned to the kernel.
pub const TRIM_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes that one event loop returns at a time.
pub const TRIM_BYTES_MAX: usize = 256 << 20;

/// Simultaneous connections over all event loops; the next one is closed at accept.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Connections that wait to be accepted.
pub const LISTEN_BACKLOG: i32 = 4096;
/// Connections without a session, divided among the event loops; beyond that, the oldest is closed.
pub const CONNECTIONS_UNAUTHENTICATED_MAX: usize = 1024;
/// Time within which a connection must establish its first session.
pub const AUTHENTICATION_TIME_MAX: Duration = Duration::from_secs(30);
/// Default time within which a peer must accept data that is being sent, and send the rest of a frame that it has begun.
pub const STALL_TIME_DEFAULT_MAX: Duration = Duration::from_secs(120);
/// The largest such time that a configuration can set, in seconds.
pub const STALL_SECONDS_MAX: u64 = 3600;
/// Time that a peer's machine may leave data that TCP has sent to it unacknowledged.
pub const UNACKNOWLEDGED_TIME_MAX: Duration = STALL_TIME_DEFAULT_MAX;
/// The same if that data contains a break for which others may wait, and the client has other channels. It is long enough
/// for a route or a bond to fail over, and short enough that a client with many channels gets the break on all of them in
/// time.
pub const BREAK_UNACKNOWLEDGED_TIME_MAX: Duration = Duration::from_secs(6);
/// The same if the client has no other channel: the server does not hear from it before its time for the break is over, and
/// data that it has cached by then must not replace what others write.
pub const SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX: Duration = Duration::from_secs(30);
/// Time within which a peer must end its stream after the server has ended its own.
pub const FAREWELL_TIME_MAX: Duration = Duration::from_secs(3);
/// Bytes of responses queued or being read for one connection before further READs of it wait.
pub const READ_AHEAD_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Bytes of responses queued for one connection before nothing more is received from it.
pub const SEND_QUEUE_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Bytes of WRITE frames of one connection that are being written before nothing more is received from it.
pub const WRITE_BYTES_IN_FLIGHT_MAX: u64 = 32 * 1024 * 1024;
/// Simultaneous file system operations of one connection; more wait in its queue, and nothing more is received.
pub const FS_OPS_IN_FLIGHT_MAX: usize = 1024;
/// Simultaneous RDMA READs and WRITEs of one connection.
pub const RDMA_TRANSFERS_MAX: u16 = 128;
/// Ended RDMA connections of one event loop with queue pairs that the kernel has not released yet; beyond that, no new
/// connection is accepted.
pub const RDMA_CLOSING_MAX: usize = 256;
/// Requests received and not yet taken on one RDMA connection before no more are received.
pub const RDMA_FRAMES_WAITING_MAX: usize = 64;
/// Bytes of the smallest READ over RDMA that bypasses the page cache, if that is enabled: for smaller ones the copy costs
/// less than the device's answer.
pub const DIRECT_READ_BYTES_MIN: usize = 64 * 1024;
/// Coarsest alignment, in bytes, that a file may require for reads that bypass the page cache.
pub const DIRECT_READ_ALIGN_MAX: u32 = 64 * 1024;
/// A READ bypasses the page cache if at most one byte in this many is cached.
pub const DIRECT_READ_CACHED_SHARE: u64 = 16;
/// Bytes of the smallest READ that is sent from a mapping of its file (`backend::directory::mapped`).
pub const MAPPED_READ_BYTES_MIN: u32 = 16 * 1024;
/// Bytes of the smallest file that is mapped at its first READ. A smaller file is mapped after this many bytes were read
/// through the same handle: copying them once costs less than mapping them.
pub const MAPPED_FILE_BYTES_MIN: usize = 1024 * 1024;
/// Simultaneous mappings; files opened beyond that are copied from.
pub const MAPPINGS_MAX: usize = 32_768;
/// Bytes of all mappings: a client can make files of any length, and the page tables of the mappings take up to 512 MiB.
pub const MAPPED_BYTES_MAX: usize = 256 << 30;
/// Bytes per copy of data that can no longer be sent from a mapping.
pub const MAPPED_PIECE_BYTES: usize = 64 * 1024;
/// Bytes per receive while the next frame is unknown: whole small frames, or the head of a large one.
pub const STAGING_BYTES: usize = 16 * 1024;
/// As [`STAGING_BYTES`], after a large frame: just the next header, so that payload is received directly into its buffer.
pub const STAGING_AFTER_LARGE_BYTES: usize = 256;
/// Frames up to this size are copied out of the staging buffer.
pub const SMALL_FRAME_BYTES_MAX: usize = 8 * 1024;
/// Parts of one vectored send.
pub const SEND_PARTS_MAX: usize = 64;
/// Lists of parts that an event loop keeps for reuse, and the parts that each can hold: 200 KiB in total.
pub const SPARE_LISTS_MAX: usize = 256;
/// See [`SPARE_LISTS_MAX`].
pub const SPARE_PARTS_MAX: usize = 8;
/// Bytes gathered from several responses into one send: more data would not stay in a core's cache until it is sent.
pub const SEND_GATHER_BYTES_MAX: usize = 256 * 1024;
/// The same for data that is sent from mappings, and copied only then.
pub const SEND_GATHER_MAPPED_BYTES_MAX: usize = 1024 * 1024;
/// Entries of an io_uring submission queue; the completion queue has four times as many.
pub const RING_ENTRIES: u32 = 1024;
/// Default number of threads of each of the lanes for look-ups, changes and data (`lanes::Lane::threads`).
pub const WORKERS_DEFAULT: usize = 16;
/// The largest number of these that a configuration can set; and threads of the lane for stable storage.
pub const WORKERS_MAX: usize = 512;
/// Threads of the lane for stable storage per thread of the other lanes.
pub const SYNC_THREADS_PER_WORKER: usize = 2;
/// Threads that query targets about whether data that they reported as stable still is.
pub const VOUCH_THREADS: usize = 2;
/// Threads that close descriptors.
pub const CLOSE_THREADS: usize = 4;
/// Jobs of one connection in one lane that are accepted regardless of the other jobs.
pub const LANE_JOBS_GUARANTEED: usize = 16;
/// Jobs of one connection in one lane, if the lane has space. Further jobs wait with the connection, and nothing more is
/// received from it until then. READs and WRITEs count against [`FS_OPS_IN_FLIGHT_MAX`] instead.
pub const LANE_JOBS_PER_CONNECTION_MAX: usize = 256;
/// Jobs waiting in one lane before each connection is limited to [`LANE_JOBS_GUARANTEED`] there.
pub const LANE_JOBS_MAX: usize = 16_384;
/// How long descriptors wait to be closed, so that one thread closes several.
pub const CLOSE_PAUSE: Duration = Duration::from_millis(1);
/// Descriptors waiting to be closed before the answer to a CLOSE waits for them.
pub const CLOSES_WAITING_MAX: usize = 4096;
/// Lists of jobs that a lane keeps for future connections.
pub const LANE_LINES_SPARE_MAX: usize = 64;
/// Event loops that a configuration can set.
pub const EVENT_LOOPS_MAX: usize = 256;

/// Volumes of one server.
pub const VOLUMES_MAX: usize = 10_000;
/// Snapshots of one server.
pub const SNAPSHOTS_MAX: usize = 10_000;
/// Snapshots of one group: changes of all its volumes wait while they are made.
pub const SNAPSHOT_GROUP_MAX: usize = 64;
/// The newest snapshots of one volume that its clients can browse. Each has a descriptor.
pub const SNAPSHOTS_SHOWN_MAX: usize = 64;
/// Longest time that changes of a volume wait for a snapshot or clone of it.
pub const COPY_PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long a snapshot or clone waits for active changes.
pub const COPY_PATIENCE: Duration = Duration::from_secs(10);
/// Depth of directories in a volume that can be copied: each is open while those below it are copied.
pub const COPY_DEPTH_MAX: usize = 256;
/// Bytes of the paths of files with several names that are kept while a volume is copied.
pub const COPY_LINK_BYTES_MAX: usize = 64 << 20;
/// The kernel's limit for the value of an extended attribute and for all names (`XATTR_SIZE_MAX` and `XATTR_LIST_MAX` of
/// linux/limits.h).
pub const XATTR_VALUE_BYTES_MAX: usize = 64 << 10;
/// Characters of a volume's id.
pub const VOLUME_ID_CHARS_MAX: usize = 63;
/// Smallest capacity of a volume with a quota, in bytes.
pub const VOLUME_BYTES_MIN: u64 = 1024 * 1024;
/// Largest capacity of a volume, in bytes (the largest file of XFS).
pub const VOLUME_BYTES_MAX: u64 = 1 << 63;
/// Labels of one volume.
pub const LABELS_MAX: usize = 64;
/// Bytes of a label's key and of its value.
pub const LABEL_BYTES_MAX: usize = 1024;
/// Characters of a user name.
pub const USERNAME_CHARS_MAX: usize = 64;
/// Minimum number of characters in a password.
pub const PASSWORD_CHARS_MIN: usize = 8;
/// Maximum number of bytes in a password: the limit of fsconfig(2), so that every password can be used for a mount.
pub const PASSWORD_BYTES_MAX: usize = 255;
/// Volumes on one page of a listing.
pub const LIST_PAGE_MAX: usize = 1000;
/// Bytes of a volume's record that are read at start.
pub const RECORD_BYTES_MAX: u64 = 1024 * 1024;
/// Starts of the server that are recorded for clients that still use their handles.
pub const PREDECESSORS_MAX: usize = 64;
/// Bytes of one of the two slots of a pool's list of starts.
pub const STARTS_SLOT_BYTES: usize = 4096;
/// Bytes of one of the two slots of the record of its epoch: both slots fit into one block.
pub const EPOCH_SLOT_BYTES: usize = 2048;
/// Space that a pool reserves for its records, to delete a volume when the pool is full.
pub const RESERVE_BYTES: u64 = 1 << 20;
/// First project id that a pool assigns: lower ids may belong to the administrator.
pub const PROJECT_ID_FIRST: u32 = 0x0F0B_0000;
/// Bytes of a file with a key for a pool's target.
pub const KEY_FILE_BYTES_MAX: u64 = 4096;
/// Smallest namespace on which a pool is made: mkfs.xfs refuses less than 300 MiB.
pub const NAMESPACE_BYTES_MIN: u64 = 512 << 20;
/// How often a pool's reservation and paths are checked.
pub const NAMESPACE_LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often the server checks whether these checks still complete.
pub const NAMESPACE_GUARD_INTERVAL: Duration = Duration::from_millis(250);
/// An operation that took less time has not waited for a connection to a target to be re-established: the kernel waits for
/// `reconnect_delay` (`forebay_nvmeof::Timing`, 2 s) before it tries.
pub const RECONNECT_TIME_MIN: Duration = Duration::from_secs(1);
/// How long a check of a reservation vouches for data that is made durable after it: less than the kernel's delay before a
/// reconnect, more than the interval of two checks.
pub const VOUCHED_TIME: Duration = Duration::from_millis(1500);
/// How long a reservation may go unconfirmed before health reports it.
pub const NAMESPACE_UNCONFIRMED_TOLD: Duration = Duration::from_secs(5);
/// A namespace that exceeds its file system by less than this is left so: XFS does not use the rest of its last group.
pub const GROWTH_BYTES_MIN: u64 = 16 << 20;
/// Time within which a pool's file system must shut down before the server ends without it.
pub const FENCE_TIME_MAX: Duration = Duration::from_secs(1);
/// Bytes of the name of an instance's cluster, and of the name of a machine.
pub const CLUSTER_UID_BYTES_MAX: usize = 253;
/// Addresses of one instance.
pub const INSTANCE_ADDRESSES_MAX: usize = 8;
/// Bytes of an interface's name (IFNAMSIZ less the zero).
pub const INTERFACE_NAME_BYTES_MAX: usize = 15;
/// How long the kernel keeps an address of the instance that is not renewed.
pub const ADDRESS_STAY: Duration = Duration::from_secs(10);
/// How often it is renewed.
pub const ADDRESS_KEEP_INTERVAL: Duration = Duration::from_secs(1);
/// How often the server probes for a host that has an address before it takes the address.
pub const ADDRESS_PROBES: usize = 3;
/// How long the server waits for an answer to each probe.
pub const ADDRESS_PROBE_PAUSE: Duration = Duration::from_millis(200);
/// How long the server waits for a host that has an address, beyond the time by which a server of ours has released it.
pub const ADDRESS_WAIT_SPARE: Duration = Duration::from_secs(5);
/// When a new address is announced again, because switches and clients may have missed it.
pub const ADDRESS_ANNOUNCEMENTS: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];
/// Time within which an earlier server must release a pool's file system.
pub const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes of one request to the admin API.
pub const ADMIN_REQUEST_BYTES_MAX: usize = 256 * 1024;
/// Connections to the admin API over TLS with known clients; further ones are closed.
pub const ADMIN_CONNECTIONS_MAX: usize = 256;
/// Connections to the admin API over TLS with clients that are not authenticated yet; beyond that, the oldest is closed.
pub const ADMIN_HANDSHAKES_MAX: usize = 64;
/// How long after a start with volumes the server expects clients with handles of the previous start.
pub const RETURN_TIME: Duration = Duration::from_secs(60);
/// How long their first answer is delayed. Linux decides for each request whether its handle must be reopened, and only then
/// waits for the connection: a thread that wakes up after another one has set up the session and tree sends the old handle,
/// and its read fails.
pub const RETURN_PAUSE: Duration = Duration::from_millis(250);
/// Connections that are delayed at the same time; further ones are not delayed.
pub const RETURNING_MAX: usize = 1024;
/// Time for a TLS handshake.
pub const ADMIN_HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// Simultaneous requests of one connection to the admin API.
pub const ADMIN_STREAMS_MAX: u32 = 64;
/// Idle time of a connection to the admin API after which it is pinged, and time to answer that.
pub const ADMIN_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time for requests to the admin API to finish when the server ends.
pub const ADMIN_FINISH_TIME_MAX: Duration = Duration::from_secs(1);
/// Time that /readyz and /metrics wait for file systems; kubelet waits 5 s for them.
pub const HTTP_LOOK_TIME_MAX: Duration = Duration::from_secs(4);
/// How often the certificate files of the admin API are checked.
pub const CERTIFICATES_REFRESH: Duration = Duration::from_secs(3);
/// How often the keytab is checked.
pub const KEYTAB_REFRESH: Duration = Duration::from_secs(3);
/// Bytes of a keytab.
pub const KEYTAB_BYTES_MAX: u64 = 1024 * 1024;
/// Bytes of a file of certificates.
pub const CERTIFICATE_BYTES_MAX: u64 = 1024 * 1024;
/// Attempts at an operation that keeps conflicting with another one.
pub const RACE_ATTEMPTS_MAX: usize = 16;
/// Locks of one volume for names that are looked up and then changed; several directories share a lock.
pub const NAME_LOCKS: usize = 64;
/// Files known to have no DOS attributes: 5 MiB of memory.
pub const PLAIN_FILES_MAX: usize = 128 * 1024;
/// Bytes fetched by one getdents call.
pub const GETDENTS_BYTES: usize = 32 * 1024;
/// Bytes per step of a copy or of zeroing, so that one request does not occupy a thread for long.
pub const COPY_STEP_BYTES: u64 = 16 * 1024 * 1024;

const _: () = assert!(
    BREAK_UNACKNOWLEDGED_TIME_MAX.as_secs() < SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX.as_secs()
        && SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX.as_secs() < forebay_smb::limits::OPLOCK_BREAK_SECONDS_MAX
);
const _: () = assert!(
    forebay_smb::limits::CONNECTIONS_PER_VOLUME_MAX as usize + CONNECTIONS_UNAUTHENTICATED_MAX
        < CONNECTIONS_MAX,
    "one volume leaves room for others"
);
const _: () = assert!(STAGING_AFTER_LARGE_BYTES <= STAGING_BYTES);
const _: () = assert!(SMALL_FRAME_BYTES_MAX < STAGING_BYTES);
const _: () = assert!(SEND_PARTS_MAX <= 1024, "IOV_MAX");
const _: () = assert!(0 < LANE_JOBS_GUARANTEED && LANE_JOBS_GUARANTEED < LANE_JOBS_PER_CONNECTION_MAX);
const _: () = assert!(LANE_JOBS_PER_CONNECTION_MAX <= FS_OPS_IN_FLIGHT_MAX);
const _: () = assert!(forebay_smb::limits::IO_BYTES_MAX as u64 <= SEND_QUEUE_BYTES_MAX);
const _: () = assert!(forebay_smb::limits::FRAME_BYTES_MAX as u64 <= WRITE_BYTES_IN_FLIGHT_MAX);
const _: () = assert!(forebay_rdma::BUFFER_MEMORY_BYTES + ACCOUNT_RESERVE_BYTES <= TENANT_MEMORY_BYTES_MIN);
const _: () = assert!(TENANT_MEMORY_BYTES_MIN <= CONNECTION_MEMORY_BYTES_MAX);
const _: () = assert!(TENANT_MEMORY_BYTES_MIN as u64 * 2 <= MEMORY_BYTES_MIN);
const _: () = assert!(2 * (STAGING_BYTES + 2 * crate::buffers::PAGE) <= ACCOUNT_RESERVE_BYTES);
