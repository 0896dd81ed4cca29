//! Every limit that a peer can run into, by name. Names end with the unit; relations are checked at compile time.

/// Largest READ, WRITE and transaction, in bytes: the interoperable maximum (24-bit frame length).
pub const IO_BYTES_MAX: u32 = 8 * 1024 * 1024;
/// Largest frame without the 4-byte transport prefix, in bytes: one largest I/O and its headers.
pub const FRAME_BYTES_MAX: u32 = IO_BYTES_MAX + 64 * 1024;
/// Largest frame before a session is established, in bytes.
pub const FRAME_BYTES_UNAUTHENTICATED_MAX: u32 = 64 * 1024;
/// Credits a connection may hold.
pub const CREDITS_MAX: u16 = 8192;
/// Bytes covered by one credit ([MS-SMB2] 3.1.5.2).
pub const CREDIT_BYTES: u32 = 64 * 1024;
/// Messages in one compound.
pub const COMPOUND_MESSAGES_MAX: usize = 64;
/// Sessions on one connection.
pub const SESSIONS_PER_CONNECTION_MAX: usize = 1024;
/// Authentications that have not finished, on one connection.
pub const SESSIONS_PENDING_PER_CONNECTION_MAX: usize = 16;
/// Channels of one session: connections that carry it. Linux clients open at most 16, Windows servers allow 32.
pub const CHANNELS_PER_SESSION_MAX: usize = 32;
/// Tree connects of one session.
pub const TREES_PER_SESSION_MAX: usize = 256;
/// Open files and directories of one session.
pub const OPENS_PER_SESSION_MAX: usize = 65_536;
/// Open files and directories of one volume, including those kept for clients without a session.
pub const OPENS_PER_VOLUME_MAX: u64 = 262_144;
/// Sessions of one volume.
pub const SESSIONS_PER_VOLUME_MAX: u64 = 16_384;
/// Connections on which a user of one volume was the first to log on. A connection counts until it ends.
pub const CONNECTIONS_PER_VOLUME_MAX: u64 = 8192;
/// Open named pipes of one session.
pub const PIPES_PER_SESSION_MAX: usize = 16;
/// Open named pipes of all sessions of one volume.
pub const PIPES_PER_VOLUME_MAX: u64 = 1024;
/// Parameters of one remote procedure call, in bytes: a few names.
pub const RPC_REQUEST_BYTES_MAX: usize = 8 * 1024;
/// Answers on one pipe that its client has not read yet, in bytes.
pub const RPC_ANSWER_BYTES_MAX: usize = 16 * 1024;
/// Bytes of one write to a pipe: clients write a message of at most 4280 bytes at a time.
pub const RPC_WRITE_BYTES_MAX: usize = 64 * 1024;
/// Presentation contexts of one pipe, and of one message.
pub const RPC_CONTEXTS_MAX: usize = 16;
/// Byte-range locks held on one open.
pub const LOCKS_PER_OPEN_MAX: usize = 16_384;
/// Byte-range locks held on one file, by all its opens.
pub const LOCKS_PER_FILE_MAX: usize = 65_536;
/// Byte-range locks held in one volume.
pub const LOCKS_PER_VOLUME_MAX: u64 = 1_048_576;
/// LOCK requests that wait for ranges of one file.
pub const LOCK_WAITERS_PER_FILE_MAX: usize = 4096;
/// Elements of one LOCK request.
pub const LOCKS_PER_REQUEST_MAX: usize = 1024;
/// Opens of one volume that ended with their session and are remembered, so that a client still using one has to reconnect.
/// The same limit applies to handles of earlier starts.
pub const LOST_OPENS_MAX: usize = 16_384;
/// How often a connection is closed because of one of them.
pub const RETURNS_PER_OPEN_MAX: u8 = 4;
/// How often a client is asked to retry a request about one of them.
pub const RETRIES_PER_OPEN_MAX: u8 = 32;
/// Opens kept for clients that have lost their last channel.
pub const KEPT_OPENS_MAX: usize = 65_536;
/// Opens of one volume kept for such clients.
pub const KEPT_OPENS_PER_VOLUME_MAX: u64 = 8192;
/// How long such an open is kept if the client does not request a time, in milliseconds.
pub const DURABLE_TIMEOUT_DEFAULT_MS: u32 = 60_000;
/// Maximum time that such an open is kept, regardless of the client's request, in milliseconds.
pub const DURABLE_TIMEOUT_MS_MAX: u32 = 300_000;
/// How long a client that reconnects to an open waits for the end of the session that still has it, in milliseconds.
pub const RECONNECT_WAIT_MS: u32 = 1000;
/// CREATEs that are remembered because their connection was lost while they waited for other clients.
pub const ABANDONED_CREATES_MAX: usize = 4096;
/// Requests waiting asynchronously (locks, watched directories), on one connection. Windows has the same limit.
pub const ASYNC_PER_CONNECTION_MAX: usize = 511;
/// Requests waiting asynchronously in one volume, over all connections.
pub const ASYNC_PER_VOLUME_MAX: u64 = 65_536;
/// Bytes of the frames of such requests, on one connection. The requests that clients usually have waiting (locks, breaks,
/// watches) take a hundredth of it.
pub const PARKED_BYTES_PER_CONNECTION_MAX: u64 = 16 * 1024 * 1024;
/// Bytes of the frames of such requests in one volume, over all connections.
pub const PARKED_BYTES_PER_VOLUME_MAX: u64 = 256 * 1024 * 1024;
/// Memory of the requests of one connection (their frames and the answers being built), in bytes. Beyond it the transport
/// stops receiving.
pub const PINNED_BYTES_PER_CONNECTION_MAX: u64 = 64 * 1024 * 1024;
/// Longest answer to IOCTL and QUERY_INFO, in bytes, even if the client's buffer is larger.
pub const INFO_ANSWER_BYTES_MAX: u32 = 64 * 1024;
/// Extended attributes of one file, in bytes as [`crate::fs::Ea::size`] counts them ([MS-FSA] 2.1.5.15.5). A query allocates no more.
pub const EA_BYTES_MAX: usize = 64 * 1024 - 5;
/// Extended attributes of one file.
pub const EAS_PER_FILE_MAX: usize = 1024;
/// ChangeTimes of one volume that clients have set and that are remembered.
pub const CHANGE_TIMES_PER_VOLUME_MAX: usize = 4096;
/// Bytes of a stored security descriptor, so that it fits an extended attribute with room for one more entry.
pub const DESCRIPTOR_BYTES_MAX: usize = 32 * 1024;
/// Directories of one volume that are watched at the same time.
pub const WATCHES_PER_VOLUME_MAX: usize = 16_384;
/// Changes buffered for one watched directory until its client asks for them, in bytes as they are sent.
pub const NOTIFY_BUFFER_BYTES_MAX: usize = 64 * 1024;
/// Changes buffered for all watched directories of a volume, in bytes.
pub const NOTIFY_VOLUME_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How long a client has to acknowledge a break, in seconds; after that it loses the state that was to be broken.
pub const OPLOCK_BREAK_SECONDS_MAX: u64 = 35;
/// Delay after which leases on a directory are broken because a client with WRITE caching has written to a file in it, if the
/// client neither flushes nor closes the file before, in seconds. Windows waits for the flush or close only.
pub const WRITES_UNREPORTED_SECONDS_MAX: u64 = 6;
/// Maximum delay until a break that was not acknowledged is also sent on another channel, in seconds. Less if the client has
/// so many channels that not every one would get its turn.
pub const OPLOCK_BREAK_RESEND_SECONDS: u64 = 5;
/// Minimum delay between two channels that are asked about one break, in milliseconds.
pub const OPLOCK_BREAK_PACE_MS: u64 = 200;
/// Removals of its name that one CREATE remembers while a backend executes it. Beyond that, a CREATE that found the file
/// before its removal opens a file without a name.
pub const REMOVALS_PER_CREATE_MAX: usize = 16;
/// Data of a reparse point ([MS-FSCC] 2.1.2.2, MAXIMUM_REPARSE_DATA_BUFFER_SIZE), including the header of its buffer.
pub const REPARSE_DATA_BYTES_MAX: usize = 16 << 10;
/// Path below a volume's root, in UTF-8 bytes.
pub const PATH_BYTES_MAX: usize = 4095;
/// Directory entries fetched from a backend at a time.
pub const DIR_BATCH_ENTRIES: usize = 512;
/// Directory entries fetched at a time once the clients of the volume have left [`DIR_PENDING_PER_VOLUME_MAX`] entries
/// unread.
pub const DIR_BATCH_SHORT_ENTRIES: usize = 8;
/// Directory entries of one volume that were fetched but do not fit in the answer yet, over all opens. About 400 bytes each
/// at most.
pub const DIR_PENDING_PER_VOLUME_MAX: u64 = 262_144;
/// Bytes of answers to QUERY_DIRECTORY in one volume, from their creation until they are sent, over all connections. Beyond
/// it answers are short.
pub const DIR_ANSWER_BYTES_PER_VOLUME_MAX: u64 = 16 * 1024 * 1024;
/// Bytes by which such an answer grows.
pub const DIR_ANSWER_STEP_BYTES: usize = 64 * 1024;
/// Bytes of a short answer, which are not counted. Several of the longest names fit.
pub const DIR_ANSWER_SHORT_BYTES: usize = 4096;
/// Ranges in one answer to FSCTL_QUERY_ALLOCATED_RANGES.
pub const ALLOCATED_RANGES_MAX: usize = 4096;
/// Chunks of one SRV_COPYCHUNK ([MS-SMB2] 3.3.3 ServerSideCopyMaxNumberofChunks).
pub const COPYCHUNK_COUNT_MAX: u32 = 256;
/// Bytes of one chunk.
pub const COPYCHUNK_CHUNK_BYTES_MAX: u32 = 1024 * 1024;
/// Bytes of one SRV_COPYCHUNK request.
pub const COPYCHUNK_TOTAL_BYTES_MAX: u32 = 16 * 1024 * 1024;
/// Security blob of one SESSION_SETUP, in bytes.
pub const SECURITY_BLOB_BYTES_MAX: usize = 16 * 1024;
/// SESSION_SETUP round trips before the authentication is abandoned.
pub const AUTH_ROUNDS_MAX: u8 = 4;
/// Keys of the keytab: principals times versions times encryption types.
pub const KEYTAB_KEYS_MAX: usize = 256;
/// Kerberos authenticators that are remembered, so that none is used twice: logons within ten minutes at most. 40 bytes each.
pub const KERBEROS_REPLAYS_MAX: usize = 262_144;

const _: () = assert!(FRAME_BYTES_MAX < 1 << 24, "the transport prefix has 24 bits of length");
const _: () = assert!(IO_BYTES_MAX.div_ceil(CREDIT_BYTES) <= CREDITS_MAX as u32, "one I/O fits the credits");
const _: () = assert!(DURABLE_TIMEOUT_DEFAULT_MS <= DURABLE_TIMEOUT_MS_MAX);
const _: () = assert!(NOTIFY_BUFFER_BYTES_MAX <= NOTIFY_VOLUME_BYTES_MAX);
const _: () = assert!(OPLOCK_BREAK_RESEND_SECONDS < OPLOCK_BREAK_SECONDS_MAX);
const _: () = assert!(KEPT_OPENS_PER_VOLUME_MAX < KEPT_OPENS_MAX as u64, "one volume leaves room for others");
const _: () =
    assert!(FRAME_BYTES_MAX as u64 <= PARKED_BYTES_PER_CONNECTION_MAX, "a single request may always wait");
const _: () = assert!(PARKED_BYTES_PER_CONNECTION_MAX <= PARKED_BYTES_PER_VOLUME_MAX);
const _: () = assert!(
    2 * PARKED_BYTES_PER_CONNECTION_MAX < PINNED_BYTES_PER_CONNECTION_MAX,
    "what waits does not stop the connection over which the end of the wait may come"
);
const _: () = assert!(IO_BYTES_MAX as u64 <= DIR_ANSWER_BYTES_PER_VOLUME_MAX, "the longest answer fits");
const _: () =
    assert!(EA_BYTES_MAX + 4 <= INFO_ANSWER_BYTES_MAX as usize, "the largest attribute fits an answer");
const _: () = assert!(EAS_PER_FILE_MAX <= crate::wire::limits::EXTENDED_ATTRIBUTES_MAX);
const _: () = assert!(ALLOCATED_RANGES_MAX * 16 <= INFO_ANSWER_BYTES_MAX as usize);
const _: () =
    assert!(LOCKS_PER_REQUEST_MAX <= LOCKS_PER_OPEN_MAX && LOCKS_PER_OPEN_MAX <= LOCKS_PER_FILE_MAX);
const _: () = assert!(LOCKS_PER_FILE_MAX as u64 <= LOCKS_PER_VOLUME_MAX);
const _: () = assert!(COPYCHUNK_CHUNK_BYTES_MAX <= COPYCHUNK_TOTAL_BYTES_MAX);
