//! Why a connection ends. Malformed bytes, protocol violations, incompatibility and timeouts are distinguished.

use crate::wire::{Malformed, Status};

/// Why a connection must end, or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disconnect {
    /// The peer sent bytes that are not a valid message.
    #[error("malformed message: {0}")]
    Malformed(#[from] Malformed),
    /// The peer sent a message that it must not send.
    #[error("peer broke the protocol: {0}")]
    Misbehaved(#[from] Misbehaviour),
    /// The two sides are incompatible.
    #[error("incompatible peer: {0}")]
    Incompatible(#[from] Incompatibility),
    /// A timeout expired.
    #[error("timed out: {0}")]
    TimedOut(#[from] Timeout),
    /// [`crate::Connection::shutdown`] was requested and is complete.
    #[error("shut down")]
    Shutdown,
    /// Reported by the transport: the peer disconnected, or a device failed.
    #[error("connection lost")]
    Lost,
}

/// Rules that a peer can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misbehaviour {
    /// CreditsRequested is zero ([MS-SMBD] 3.1.5.6 to 3.1.5.8).
    #[error("it requests no credits")]
    NoCreditsRequested,
    /// CreditsGranted of a Negotiate Response is zero ([MS-SMBD] 3.1.5.7).
    #[error("its answer grants no credits")]
    NoCreditsGranted,
    /// MaxReceiveSize is below [`crate::limits::RECEIVE_SIZE_MIN_BYTES`].
    #[error("it receives only {0} bytes at a time")]
    ReceiveSize(u32),
    /// MaxFragmentedSize is below [`crate::limits::FRAGMENTED_SIZE_MIN_BYTES`].
    #[error("it reassembles only {0} bytes")]
    FragmentedSize(u32),
    /// PreferredSendSize of a Negotiate Response is larger than our receive size ([MS-SMBD] 3.1.5.7).
    #[error("it announces to send {0} bytes at a time, more than it was offered")]
    PreferredSendSize(u32),
    /// The connecting side received a message before it had sent its request.
    #[error("it spoke before it was asked")]
    BeforeRequest,
    /// A message was received without an announced receive.
    #[error("it sent without a credit")]
    WithoutCredit,
    /// It granted more credits than there can be receives.
    #[error("it granted {held} credits")]
    TooManyCredits {
        /// Credits that we would hold.
        held: u32,
    },
    /// A message is longer than the negotiated MaxReceiveSize.
    #[error("a message of {length} bytes where {max} were negotiated")]
    MessageTooLong {
        /// Its length in bytes.
        length: u32,
        /// The maximum.
        max: u32,
    },
    /// DataLength and RemainingDataLength exceed the announced MaxFragmentedSize.
    #[error("an upper-layer message of {length} bytes where {max} were announced")]
    FragmentedTooLong {
        /// Its length in bytes.
        length: u64,
        /// The maximum.
        max: u32,
    },
    /// A fragment does not continue the current message.
    #[error("a fragment of {length} bytes with {remaining} to follow where {expected} were left")]
    Remaining {
        /// DataLength.
        length: u32,
        /// RemainingDataLength.
        remaining: u32,
        /// Bytes that remained before.
        expected: u32,
    },
    /// RemainingDataLength in a message without payload ([MS-SMBD] 3.1.5.4).
    #[error("an empty message announces a remainder")]
    RemainingWithoutData,
    /// A message has so many fragments that it would take all receive buffers and never be complete.
    #[error("an upper-layer message in more than {max} fragments")]
    TooManyFragments {
        /// The maximum.
        max: u32,
    },
}

/// Why the two sides are incompatible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatibility {
    /// The peer supports none of our versions.
    #[error("it speaks versions {min:#06x} to {max:#06x}")]
    Version {
        /// MinVersion.
        min: u16,
        /// MaxVersion.
        max: u16,
    },
    /// The peer refused.
    #[error("it refused with status {0:?}")]
    Refused(Status),
    /// The peer's messages are so small that the receive buffers cannot hold a fragmented message.
    #[error("it sends only {0} bytes at a time")]
    SendSize(u32),
}

/// The event that did not happen in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Timeout {
    /// The negotiation ([MS-SMBD] 3.1.6.1).
    #[error("the negotiation")]
    Negotiation,
    /// An answer to a keep-alive ([MS-SMBD] 3.1.6.2).
    #[error("a sign of life")]
    KeepAlive,
    /// A send credit, while there were data to send.
    #[error("a send credit")]
    Credits,
    /// The rest of an upper-layer message.
    #[error("the rest of a message")]
    Rest,
    /// Sending the messages that were queued at a shutdown.
    #[error("the shutdown")]
    Shutdown,
}
