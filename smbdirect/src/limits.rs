//! Every limit that a peer can push against, by name. Units last in names; relations are checked at compile time.

use std::time::Duration;

/// Least MaxReceiveSize that a peer may announce, in bytes ([MS-SMBD] 3.1.5.6).
pub const RECEIVE_SIZE_MIN_BYTES: u32 = 128;
/// Least MaxFragmentedSize that a peer may announce, in bytes ([MS-SMBD] 3.1.5.6).
pub const FRAGMENTED_SIZE_MIN_BYTES: u32 = 131_072;
/// Largest message of ours in either direction, header included, in bytes. Windows uses 8192, Linux 1364.
pub const MESSAGE_MAX_BYTES: u32 = 65_536;
/// Largest upper-layer message that is reassembled, in bytes: what Windows announces.
pub const FRAGMENTED_SIZE_MAX_BYTES: u32 = 1024 * 1024;
/// Most bytes of one READ or WRITE by RDMA: what Windows and `smb` allow.
pub const READ_WRITE_MAX_BYTES: u32 = 8 * 1024 * 1024;
/// Receives of one connection that may be announced to its peer.
pub const RECEIVE_CREDITS_MAX: u16 = 4096;
/// Receives of one connection beyond those: from here comes what is granted so that the last send credit can be spent.
pub const RECEIVE_RESERVE: u16 = 1;
/// Send credits held at once. A peer would need so many receives posted; granting more is misbehaviour.
pub const SEND_CREDITS_MAX: u32 = u16::MAX as u32;
/// Credits that a peer holds when a message of ours spends our last one: with two it can give one back and still speak.
pub const LAST_CREDIT_FLOOR: u32 = 2;
/// A peer with credits down to this part of what it asked for is granted more at once.
pub const REFILL_DIVISOR: u32 = 4;
/// How empty messages may be on average while they carry a fragmented one: announced is what fits this part of the buffers.
/// Peers cut at the boundaries of their own buffers.
pub const FRAGMENT_FILL_DIVISOR: u32 = 2;
/// The size in which an acceptor is taken to send when its answer is not known yet, in bytes: Windows and Linux do.
pub const ASSUMED_PEER_SEND_SIZE_BYTES: u32 = 1364;
/// Upper-layer messages waiting for send credits: every request that `smb` lets a client have, and as many again for
/// what the server sends by itself.
pub const SEND_QUEUE_MESSAGES_MAX: usize = 16_384;
/// Pieces of buffers in one upper-layer message to send.
pub const SEGMENTS_PER_MESSAGE_MAX: usize = 1024;
/// Elements of an array of buffer descriptors: one for each page of the largest READ.
pub const DESCRIPTORS_MAX: usize = (READ_WRITE_MAX_BYTES / 4096) as usize;

/// How long the connecting side waits for the connection and the answer ([MS-SMBD] 3.1.4.1).
pub const NEGOTIATION_TIMEOUT_ACTIVE: Duration = Duration::from_secs(120);
/// How long the accepting side waits for the request ([MS-SMBD] 3.1.7.2).
pub const NEGOTIATION_TIMEOUT_PASSIVE: Duration = Duration::from_secs(5);
/// Silence after which the peer is asked for a sign of life ([MS-SMBD] 3.1.2.2).
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(120);
/// How long it has for that ([MS-SMBD] 3.1.5.1).
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a peer may leave us without a send credit while there is something to send.
pub const CREDIT_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a peer may take for the rest of an upper-layer message that it has begun, while it has a credit to go on with.
pub const REST_TIMEOUT: Duration = Duration::from_secs(120);
/// How long what is queued has to go out after a shutdown.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

const _: () = assert!(ASSUMED_PEER_SEND_SIZE_BYTES <= MESSAGE_MAX_BYTES);
const _: () = assert!(FRAGMENTED_SIZE_MIN_BYTES <= FRAGMENTED_SIZE_MAX_BYTES);
const _: () = assert!(RECEIVE_RESERVE >= 1, "the last send credit needs something to grant");
const _: () =
    assert!((RECEIVE_CREDITS_MAX as u32) < SEND_CREDITS_MAX, "two of us never grant each other too much");
const _: () = assert!(KEEPALIVE_TIMEOUT.as_millis() < KEEPALIVE_INTERVAL.as_millis());
