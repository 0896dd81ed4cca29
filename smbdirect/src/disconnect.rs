//! Why a connection ends. Their bytes, their conduct, what both cannot agree on, and time are different things.

use crate::wire::{Malformed, Status};

/// Why a connection must be ended, or has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disconnect {
    /// The peer sent bytes that are no message.
    #[error("malformed message: {0}")]
    Malformed(#[from] Malformed),
    /// The peer sent a message that it must not have sent.
    #[error("peer broke the protocol: {0}")]
    Misbehaved(#[from] Misbehaviour),
    /// Both sides cannot work with each other.
    #[error("incompatible peer: {0}")]
    Incompatible(#[from] Incompatibility),
    /// Nothing happened for too long.
    #[error("timed out: {0}")]
    TimedOut(#[from] Timeout),
    /// [`crate::Connection::shutdown`] was asked for and is done.
    #[error("shut down")]
    Shutdown,
    /// The transport said so: the peer went away, a device failed.
    #[error("connection lost")]
    Lost,
}

/// The rules that a peer can break.
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
    /// PreferredSendSize of a Negotiate Response is more than we receive ([MS-SMBD] 3.1.5.7).
    #[error("it announces to send {0} bytes at a time, more than it was offered")]
    PreferredSendSize(u32),
    /// A message came to the connecting side before it had asked.
    #[error("it spoke before it was asked")]
    BeforeRequest,
    /// A message came for which no receive had been announced.
    #[error("it sent without a credit")]
    WithoutCredit,
    /// It granted more credits than there can be receives.
    #[error("it granted {held} credits")]
    TooManyCredits {
        /// What we would have.
        held: u32,
    },
    /// A message is longer than the negotiated MaxReceiveSize.
    #[error("a message of {length} bytes where {max} were negotiated")]
    MessageTooLong {
        /// Its bytes.
        length: u32,
        /// The most.
        max: u32,
    },
    /// DataLength and RemainingDataLength exceed the announced MaxFragmentedSize.
    #[error("an upper-layer message of {length} bytes where {max} were announced")]
    FragmentedTooLong {
        /// Its bytes.
        length: u64,
        /// The most.
        max: u32,
    },
    /// A fragment does not continue the message that was begun.
    #[error("a fragment of {length} bytes with {remaining} to follow where {expected} were left")]
    Remaining {
        /// DataLength.
        length: u32,
        /// RemainingDataLength.
        remaining: u32,
        /// What was left before.
        expected: u32,
    },
    /// RemainingDataLength in a message without payload ([MS-SMBD] 3.1.5.4).
    #[error("an empty message announces a remainder")]
    RemainingWithoutData,
    /// A message in so many pieces that it would take all receive buffers and never be whole.
    #[error("an upper-layer message in more than {max} fragments")]
    TooManyFragments {
        /// The most.
        max: u32,
    },
}

/// What both sides cannot agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Incompatibility {
    /// The peer speaks no version of ours.
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
    /// The peer sends so little at a time that the receive buffers cannot hold a fragmented message.
    #[error("it sends only {0} bytes at a time")]
    SendSize(u32),
}

/// What took too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Timeout {
    /// The negotiation ([MS-SMBD] 3.1.6.1).
    #[error("the negotiation")]
    Negotiation,
    /// An answer to a keep-alive ([MS-SMBD] 3.1.6.2).
    #[error("a sign of life")]
    KeepAlive,
    /// A send credit, while there was something to send.
    #[error("a send credit")]
    Credits,
    /// The rest of an upper-layer message.
    #[error("the rest of a message")]
    Rest,
    /// The end of what was queued at a shutdown.
    #[error("the shutdown")]
    Shutdown,
}
