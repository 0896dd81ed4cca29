//! Every limit that a peer can run into, by name. Names end with the unit; relations are checked at compile time.

use std::time::Duration;

/// Smallest MaxReceiveSize that a peer may announce, in bytes ([MS-SMBD] 3.1.5.6).
pub const RECEIVE_SIZE_MIN_BYTES: u32 = 128;
/// Smallest MaxFragmentedSize that a peer may announce, in bytes ([MS-SMBD] 3.1.5.6).
pub const FRAGMENTED_SIZE_MIN_BYTES: u32 = 131_072;
/// Largest message in either direction, header included, in bytes. Windows uses 8192, Linux 1364.
pub const MESSAGE_MAX_BYTES: u32 = 65_536;
/// Largest upper-layer message that is reassembled, in bytes, as announced by Windows.
pub const FRAGMENTED_SIZE_MAX_BYTES: u32 = 1024 * 1024;
/// Maximum of one READ or WRITE by RDMA, in bytes, as allowed by Windows and `smb`.
pub const READ_WRITE_MAX_BYTES: u32 = 8 * 1024 * 1024;
/// Receives of one connection that may be announced to its peer.
pub const RECEIVE_CREDITS_MAX: u16 = 4096;
/// Receives of one connection beyond those: used for the grant that allows spending the last send credit.
pub const RECEIVE_RESERVE: u16 = 1;
/// Send credits held at the same time. A peer would need that many receives posted; granting more is misbehaviour.
pub const SEND_CREDITS_MAX: u32 = u16::MAX as u32;
/// Credits that a peer holds when one of our messages spends our last one: with two it can return one and still send.
pub const LAST_CREDIT_FLOOR: u32 = 2;
/// A peer with credits down to this fraction of its request is granted more immediately.
pub const REFILL_DIVISOR: u32 = 4;
/// Assumed average fill of the messages that carry a fragmented one: the announced size is what fits this fraction of the
/// buffers. Peers cut at the boundaries of their own buffers.
pub const FRAGMENT_FILL_DIVISOR: u32 = 2;
/// Message size assumed for an acceptor before its answer arrives, in bytes: the one that Windows and Linux use.
pub const ASSUMED_PEER_SEND_SIZE_BYTES: u32 = 1364;
/// Upper-layer messages waiting for send credits: every request that `smb` allows a client to have, and the same number again
/// for messages that the server sends unprompted.
pub const SEND_QUEUE_MESSAGES_MAX: usize = 16_384;
/// Pieces of buffers in one upper-layer message to send.
pub const SEGMENTS_PER_MESSAGE_MAX: usize = 1024;
/// Elements of an array of buffer descriptors: one for each page of the largest READ.
pub const DESCRIPTORS_MAX: usize = (READ_WRITE_MAX_BYTES / 4096) as usize;

/// How long the connecting side waits for the connection and the response ([MS-SMBD] 3.1.4.1).
pub const NEGOTIATION_TIMEOUT_ACTIVE: Duration = Duration::from_secs(120);
/// How long the accepting side waits for the request ([MS-SMBD] 3.1.7.2).
pub const NEGOTIATION_TIMEOUT_PASSIVE: Duration = Duration::from_secs(5);
/// Idle time after which the peer is sent a keep-alive request ([MS-SMBD] 3.1.2.2).
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(120);
/// How long the peer has to answer it ([MS-SMBD] 3.1.5.1).
pub const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a peer may leave us without a send credit while there are data to send.
pub const CREDIT_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a peer may take for the rest of an upper-layer message that it has begun, while it has a credit to continue.
pub const REST_TIMEOUT: Duration = Duration::from_secs(120);
/// How long queued messages may take to be sent after a shutdown.
pub const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

const _: () = assert!(ASSUMED_PEER_SEND_SIZE_BYTES <= MESSAGE_MAX_BYTES);
const _: () = assert!(FRAGMENTED_SIZE_MIN_BYTES <= FRAGMENTED_SIZE_MAX_BYTES);
const _: () = assert!(RECEIVE_RESERVE >= 1, "the last send credit needs something to grant");
const _: () =
    assert!((RECEIVE_CREDITS_MAX as u32) < SEND_CREDITS_MAX, "two of us never grant each other too much");
const _: () = assert!(KEEPALIVE_TIMEOUT.as_millis() < KEEPALIVE_INTERVAL.as_millis());
