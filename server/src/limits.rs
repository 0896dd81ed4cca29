//! Every limit of the daemon that a peer or an administrator can push against, by name. Units last in names.

use std::time::Duration;

pub use forebay_rdma::limits::ACCOUNT_RESERVE_BYTES;

/// Least memory for payload that a configuration may set, in bytes.
pub const MEMORY_BYTES_MIN: u64 = 64 << 20;
/// Most memory for payload where the configuration does not say, in bytes.
pub const MEMORY_DEFAULT_BYTES_MAX: u64 = 16 << 30;
/// The memory for payload where the configuration does not say: one part of so many of the machine's.
pub const MEMORY_DEFAULT_SHARE: u64 = 4;
/// All connections of one user, and so of one volume, have one part of so many of the memory for payload.
pub const TENANT_MEMORY_SHARE: usize = 4;
/// They have so many bytes at least: some of the largest frames.
pub const TENANT_MEMORY_BYTES_MIN: usize = 32 << 20;
/// Memory of one connection's buffers: frames that were received and are being served, data that were read, answers that
/// are not sent.
pub const CONNECTION_MEMORY_BYTES_MAX: usize = 64 << 20;
/// Answers from so many bytes on that lie in no buffer are counted as if they did.
pub const COUNTED_ANSWER_BYTES_MIN: usize = 4 << 10;
/// Bytes of READs and WRITEs that one turn of an event loop begins for volumes of normal priority (`qos::Priority`): the rest waits for the next, so that what is done by
/// then is sent before more is copied.
pub const TURN_BYTES_MAX: u64 = 4 << 20;
/// How often a change asks again whether the gate of its volume is open.
pub const GATE_POLL: Duration = Duration::from_millis(10);
/// Places in which a gate counts changes under way.
pub const GATE_SHARDS: usize = 16;
/// How far a volume with limits may be ahead of them: what it may use at once after a pause.
pub const QOS_BURST: Duration = Duration::from_millis(100);
/// The lowest limit of a volume's bytes per second: the largest READ is answered within the time that clients wait for.
pub const QOS_BYTES_PER_SECOND_MIN: u64 = 1 << 20;
/// The lowest limit of a volume's operations per second.
pub const QOS_OPERATIONS_PER_SECOND_MIN: u64 = 10;
/// How often buffers that were not needed since are given back to the kernel.
pub const TRIM_INTERVAL: Duration = Duration::from_secs(10);
/// Bytes that one event loop gives back at once.
pub const TRIM_BYTES_MAX: usize = 256 << 20;

/// Connections served at once over all event loops; the next one is closed at accept.
pub const CONNECTIONS_MAX: usize = 16_384;
/// Connections that wait to be accepted.
pub const LISTEN_BACKLOG: i32 = 4096;
/// Connections without a session, shared out between the event loops; beyond it the oldest is closed.
pub const CONNECTIONS_UNAUTHENTICATED_MAX: usize = 1024;
/// Time a connection has to establish its first session.
pub const AUTHENTICATION_TIME_MAX: Duration = Duration::from_secs(30);
/// Time a peer has to take what is being sent, and to send the rest of a frame that it has begun, where the configuration does
/// not say.
pub const STALL_TIME_DEFAULT_MAX: Duration = Duration::from_secs(120);
/// The same, as long as a configuration may say, in seconds.
pub const STALL_SECONDS_MAX: u64 = 3600;
/// Time a peer's machine may leave all that TCP has sent it without an acknowledgment.
pub const UNACKNOWLEDGED_TIME_MAX: Duration = STALL_TIME_DEFAULT_MAX;
/// The same where a break is among it, for which others may wait, and the client has other channels: long enough for a route or a bond to change over, short
/// enough that a client of many channels gets the break on all of them before its time is over.
pub const BREAK_UNACKNOWLEDGED_TIME_MAX: Duration = Duration::from_secs(6);
/// The same where the client has no other channel: it is not heard before its time for the break is over, and what it has cached by then
/// must not replace what others write.
pub const SOLE_BREAK_UNACKNOWLEDGED_TIME_MAX: Duration = Duration::from_secs(30);
/// Time a peer has, once the server has said that it sends no more, to say the same.
pub const FAREWELL_TIME_MAX: Duration = Duration::from_secs(3);
/// Bytes of responses queued or being read for one connection before further READs of it wait.
pub const READ_AHEAD_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Bytes of responses queued for one connection before nothing more is received from it.
pub const SEND_QUEUE_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Bytes of WRITE frames of one connection that are being written before nothing more is received from it.
pub const WRITE_BYTES_IN_FLIGHT_MAX: u64 = 32 * 1024 * 1024;
/// Operations of one connection with the file system at once; more wait in its queue, and nothing more is received.
pub const FS_OPS_IN_FLIGHT_MAX: usize = 1024;
/// RDMA READs and WRITEs of one connection under way at once.
pub const RDMA_TRANSFERS_MAX: u16 = 128;
/// Ended connections over RDMA of one event loop with queue pairs that the kernel has not released yet; beyond it no new
/// connection is accepted.
pub const RDMA_CLOSING_MAX: usize = 256;
/// Requests of one connection over RDMA that were received and not taken before no more are received.
pub const RDMA_FRAMES_WAITING_MAX: usize = 64;
/// Bytes of the smallest READ over RDMA that is read past the page cache, where that is switched on: of smaller ones the copy
/// costs less than the device's answer.
pub const DIRECT_READ_BYTES_MIN: usize = 64 * 1024;
/// Coarsest alignment, in bytes, that a file may demand of reads past the page cache.
pub const DIRECT_READ_ALIGN_MAX: u32 = 64 * 1024;
/// A READ goes past the page cache where at most one byte of so many is in it.
pub const DIRECT_READ_CACHED_SHARE: u64 = 16;
/// Bytes of the smallest READ that is sent from a mapping of its file (`backend::directory::mapped`).
pub const MAPPED_READ_BYTES_MIN: u32 = 16 * 1024;
/// Bytes of the smallest file that is mapped at its first READ. Of a smaller one so many bytes are read through the same handle
/// before it is mapped: to copy them once costs less than to map them.
pub const MAPPED_FILE_BYTES_MIN: usize = 1024 * 1024;
/// Mappings at once; files opened beyond it are copied from.
pub const MAPPINGS_MAX: usize = 32_768;
/// Bytes of all mappings: a client can make files of any length, and the page tables of these take 512 MiB at most.
pub const MAPPED_BYTES_MAX: usize = 256 << 30;
/// Bytes copied at once of data that can no longer be sent from a mapping.
pub const MAPPED_PIECE_BYTES: usize = 64 * 1024;
/// Bytes received at once while it is not known what comes: small frames whole, the head of large ones.
pub const STAGING_BYTES: usize = 16 * 1024;
/// As [`STAGING_BYTES`] after a large frame: just its header, so that payload goes straight to its buffer.
pub const STAGING_AFTER_LARGE_BYTES: usize = 256;
/// Frames up to this size are copied out of the staging buffer.
pub const SMALL_FRAME_BYTES_MAX: usize = 8 * 1024;
/// Parts of one vectored send.
pub const SEND_PARTS_MAX: usize = 64;
/// Lists of parts that an event loop keeps to use them again, and parts that such a list has room for: 200 KiB in all.
pub const SPARE_LISTS_MAX: usize = 256;
/// See [`SPARE_LISTS_MAX`].
pub const SPARE_PARTS_MAX: usize = 8;
/// Bytes gathered from several responses into one send: more data that were read would not stay in a core's cache until they
/// are sent.
pub const SEND_GATHER_BYTES_MAX: usize = 256 * 1024;
/// The same where data are sent from mappings, and copied only then.
pub const SEND_GATHER_MAPPED_BYTES_MAX: usize = 1024 * 1024;
/// Entries of an io_uring submission queue; the completion queue has four times as many.
pub const RING_ENTRIES: u32 = 1024;
/// Threads of each of the lanes for look-ups, changes and data (`lanes::Lane::threads`), where the configuration does not say.
pub const WORKERS_DEFAULT: usize = 16;
/// The same, which a configuration may ask for; and threads of the lane for stable storage.
pub const WORKERS_MAX: usize = 512;
/// Threads of the lane for stable storage, for each of the other lanes' threads.
pub const SYNC_THREADS_PER_WORKER: usize = 2;
/// Threads that ask targets whether they have kept what they said is on stable storage.
pub const VOUCH_THREADS: usize = 2;
/// Threads that close descriptors.
pub const CLOSE_THREADS: usize = 4;
/// Jobs of one connection in one lane that are taken in however many others there are.
pub const LANE_JOBS_GUARANTEED: usize = 16;
/// Jobs of one connection in one lane, where the lane has room. Beyond it they wait with the connection, from which nothing more
/// is received then. READs and WRITEs count against [`FS_OPS_IN_FLIGHT_MAX`] instead.
pub const LANE_JOBS_PER_CONNECTION_MAX: usize = 256;
/// Jobs that wait in one lane before each connection has only [`LANE_JOBS_GUARANTEED`] there.
pub const LANE_JOBS_MAX: usize = 16_384;
/// How long descriptors wait to be closed, so that one thread closes several.
pub const CLOSE_PAUSE: Duration = Duration::from_millis(1);
/// Descriptors that wait to be closed before a CLOSE is answered only after them.
pub const CLOSES_WAITING_MAX: usize = 4096;
/// Lists of jobs that a lane keeps for connections to come.
pub const LANE_LINES_SPARE_MAX: usize = 64;
/// Event loops that a configuration may ask for.
pub const EVENT_LOOPS_MAX: usize = 256;

/// Volumes of one server.
pub const VOLUMES_MAX: usize = 10_000;
/// Snapshots of one server.
pub const SNAPSHOTS_MAX: usize = 10_000;
/// Snapshots of one volume that its clients can look into, the newest. Each has a descriptor.
pub const SNAPSHOTS_SHOWN_MAX: usize = 64;
/// How long changes of a volume wait at most for a snapshot or clone of it.
pub const COPY_PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long a snapshot or clone waits for changes that are under way.
pub const COPY_PATIENCE: Duration = Duration::from_secs(10);
/// Directories below one another in a volume that can be copied: each is open while those below it are copied.
pub const COPY_DEPTH_MAX: usize = 256;
/// Bytes of the paths of files with several names that are remembered while a volume is copied.
pub const COPY_LINK_BYTES_MAX: usize = 64 << 20;
/// The kernel's limit of an extended attribute and of all names (`XATTR_SIZE_MAX` and `XATTR_LIST_MAX` of linux/limits.h).
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
/// Characters of a password, least.
pub const PASSWORD_CHARS_MIN: usize = 8;
/// Bytes of a password, most: what fsconfig(2) takes, so that every password can be mounted with.
pub const PASSWORD_BYTES_MAX: usize = 255;
/// Volumes on one page of a listing.
pub const LIST_PAGE_MAX: usize = 1000;
/// Bytes of a volume's record that are read at start.
pub const RECORD_BYTES_MAX: u64 = 1024 * 1024;
/// Starts of the server that are remembered for clients that still use their handles.
pub const PREDECESSORS_MAX: usize = 64;
/// Bytes of one of the two slots of a pool's list of starts, and of the record of its epoch.
pub const STARTS_SLOT_BYTES: usize = 4096;
/// The same of the record of its epoch: with both in one block.
pub const EPOCH_SLOT_BYTES: usize = 2048;
/// Space that a pool keeps for its records, for deleting a volume when it is full.
pub const RESERVE_BYTES: u64 = 1 << 20;
/// First project id that a pool gives out: below it, ids may belong to the administrator.
pub const PROJECT_ID_FIRST: u32 = 0x0F0B_0000;
/// Bytes of a file with a key for a pool's target.
pub const KEY_FILE_BYTES_MAX: u64 = 4096;
/// Smallest namespace that a pool is made on: mkfs.xfs refuses less than 300 MiB.
pub const NAMESPACE_BYTES_MIN: u64 = 512 << 20;
/// How often a pool's reservation and paths are looked at.
pub const NAMESPACE_LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often it is looked at whether the looks themselves come back.
pub const NAMESPACE_GUARD_INTERVAL: Duration = Duration::from_millis(250);
/// What takes less has not waited for a connection to a target to come again: the kernel waits for `reconnect_delay`
/// (`forebay_nvmeof::Timing`, 2 s) before it tries.
pub const RECONNECT_TIME_MIN: Duration = Duration::from_secs(1);
/// How long a look at a reservation vouches for what is made durable after it: less than the kernel waits before it makes a lost
/// connection again, more than two looks are apart.
pub const VOUCHED_TIME: Duration = Duration::from_millis(1500);
/// How long a reservation may go unconfirmed before health tells of it.
pub const NAMESPACE_UNCONFIRMED_TOLD: Duration = Duration::from_secs(5);
/// A namespace that is larger than its file system by less is left so: XFS does not use the rest of its last group.
pub const GROWTH_BYTES_MIN: u64 = 16 << 20;
/// Time that the end of a pool's file system may take before the server ends without it.
pub const FENCE_TIME_MAX: Duration = Duration::from_secs(1);
/// Bytes of the name of an instance's cluster, and of a machine's.
pub const CLUSTER_UID_BYTES_MAX: usize = 253;
/// Addresses of one instance.
pub const INSTANCE_ADDRESSES_MAX: usize = 8;
/// Bytes of an interface's name (IFNAMSIZ less the zero).
pub const INTERFACE_NAME_BYTES_MAX: usize = 15;
/// How long the kernel keeps an address of the instance that is no longer renewed.
pub const ADDRESS_STAY: Duration = Duration::from_secs(10);
/// How often that is done again.
pub const ADDRESS_KEEP_INTERVAL: Duration = Duration::from_secs(1);
/// How often the server asks which host has an address before it takes the address.
pub const ADDRESS_PROBES: usize = 3;
/// How long the server waits for an answer to each.
pub const ADDRESS_PROBE_PAUSE: Duration = Duration::from_millis(200);
/// How long the server waits for a host that has an address, beyond the time after which a server of ours has released it.
pub const ADDRESS_WAIT_SPARE: Duration = Duration::from_secs(5);
/// When a new address is announced again: switches and clients may have missed it.
pub const ADDRESS_ANNOUNCEMENTS: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(8)];
/// Time that a server before us has to let go of a pool's file system.
pub const UNMOUNT_TIME_MAX: Duration = Duration::from_secs(10);
/// Bytes of one request to the admin API.
pub const ADMIN_REQUEST_BYTES_MAX: usize = 256 * 1024;
/// Connections to the admin API over TLS with known clients; further ones are closed.
pub const ADMIN_CONNECTIONS_MAX: usize = 256;
/// Connections to the admin API over TLS with clients that are not known yet; beyond it the oldest is closed.
pub const ADMIN_HANDSHAKES_MAX: usize = 64;
/// How long after a start with volumes clients are taken to come back to handles of before.
pub const RETURN_TIME: Duration = Duration::from_secs(60);
/// How long those are made to wait for the first answer. Linux decides for each request whether its handle has to be
/// opened again, and then waits for the connection: a thread that wakes up when another has set up session and tree already
/// sends the handle of before, and its read fails.
pub const RETURN_PAUSE: Duration = Duration::from_millis(250);
/// Connections that wait so at once; further ones are not made to.
pub const RETURNING_MAX: usize = 1024;
/// Time for a TLS handshake.
pub const ADMIN_HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(10);
/// Requests of one connection to the admin API at once.
pub const ADMIN_STREAMS_MAX: u32 = 64;
/// Silence of a connection to the admin API after which it is asked whether it is alive, and time to answer that.
pub const ADMIN_KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time that requests to the admin API have to finish when the server ends.
pub const ADMIN_FINISH_TIME_MAX: Duration = Duration::from_secs(1);
/// Time that /readyz and /metrics wait for file systems; kubelet waits 5 s for them.
pub const HTTP_LOOK_TIME_MAX: Duration = Duration::from_secs(4);
/// How often the files of the admin API's certificates are looked at.
pub const CERTIFICATES_REFRESH: Duration = Duration::from_secs(3);
/// How often the keytab is looked at.
pub const KEYTAB_REFRESH: Duration = Duration::from_secs(3);
/// Bytes of a keytab.
pub const KEYTAB_BYTES_MAX: u64 = 1024 * 1024;
/// Bytes of a file of certificates.
pub const CERTIFICATE_BYTES_MAX: u64 = 1024 * 1024;
/// Attempts at an operation that another one keeps getting in the way of.
pub const RACE_ATTEMPTS_MAX: usize = 16;
/// Locks of one volume for names that are looked up and then changed; directories share them.
pub const NAME_LOCKS: usize = 64;
/// Files of which the server remembers that they have no attributes of DOS: 5 MiB of memory.
pub const PLAIN_FILES_MAX: usize = 128 * 1024;
/// Bytes fetched by one getdents call.
pub const GETDENTS_BYTES: usize = 32 * 1024;
/// Bytes moved by one step of a copy or of zeroing, so that one request does not keep a thread for long.
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
