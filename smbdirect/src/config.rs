//! What one side supports and requests ([MS-SMBD] 3.1.1.1).

use std::time::Duration;

use crate::limits;
use crate::wire::DataTransfer;

/// Which side opens the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Connected and asks: the client.
    Active,
    /// Accepted and answers: the server.
    Passive,
}

/// Initial values of a connection, before its peer has a say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Which side this is.
    pub role: Role,
    /// Receives that may be announced to the peer in the ordinary way (ReceiveCreditMax).
    pub receive_credit_max: u16,
    /// Send credits asked of the peer (SendCreditTarget).
    pub send_credit_target: u16,
    /// Longest message sent, header included, in bytes (MaxSendSize).
    pub max_send_size: u32,
    /// Length of a receive buffer, in bytes (MaxReceiveSize).
    pub max_receive_size: u32,
    /// Longest upper-layer message reassembled, in bytes (MaxFragmentedRecvSize). Less is announced where the receive
    /// buffers cannot hold as much.
    pub max_fragmented_receive_size: u32,
    /// Most bytes of one READ or WRITE by RDMA (MaxReadWriteSize).
    pub max_read_write_size: u32,
    /// Segments in one message sent, besides its header: the device's `max_send_sge` less one.
    pub send_segments_max: usize,
    /// Messages sent and not yet completed: what the send queue has room for, besides RDMA READ and WRITE.
    pub send_depth: u16,
    /// From the start until the negotiation is done.
    pub negotiation_timeout: Duration,
    /// Silence until a sign of life is asked for (KeepaliveInterval).
    pub keepalive_interval: Duration,
    /// From there until it is too late.
    pub keepalive_timeout: Duration,
    /// Without send credits while there is something to send.
    pub credit_timeout: Duration,
    /// For the rest of an upper-layer message that the peer has begun. Time in which it has no credit of ours does not count.
    pub rest_timeout: Duration,
    /// From [`crate::Connection::shutdown`] until what is queued is given up.
    pub shutdown_timeout: Duration,
}

/// A configuration that cannot work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// A size or number that is out of bounds.
    #[error("{name} must be {min} to {max}, not {value}")]
    OutOfBounds {
        /// Which.
        name: &'static str,
        /// What it is.
        value: u64,
        /// Least.
        min: u64,
        /// Most.
        max: u64,
    },
    /// Receive buffers hold less than the least fragmented message that the specification asks for.
    #[error("{buffers} receive buffers of {size} bytes cannot hold {needed} bytes of one message")]
    ReceiveBuffers {
        /// How many.
        buffers: u16,
        /// How long.
        size: u32,
        /// [`limits::FRAGMENTED_SIZE_MIN_BYTES`].
        needed: u32,
    },
}

impl Config {
    /// A client: small receive buffers and as many credits as Linux and Windows have.
    #[must_use]
    pub const fn active() -> Self {
        Self {
            role: Role::Active,
            receive_credit_max: 255,
            send_credit_target: 255,
            max_send_size: 8192,
            max_receive_size: 1364,
            max_fragmented_receive_size: limits::FRAGMENTED_SIZE_MAX_BYTES,
            max_read_write_size: limits::READ_WRITE_MAX_BYTES,
            send_segments_max: 5,
            send_depth: 255,
            negotiation_timeout: limits::NEGOTIATION_TIMEOUT_ACTIVE,
            keepalive_interval: limits::KEEPALIVE_INTERVAL,
            keepalive_timeout: limits::KEEPALIVE_TIMEOUT,
            credit_timeout: limits::CREDIT_TIMEOUT,
            rest_timeout: limits::REST_TIMEOUT,
            shutdown_timeout: limits::SHUTDOWN_TIMEOUT,
        }
    }

    /// A server, otherwise as [`Config::active`].
    #[must_use]
    pub const fn passive() -> Self {
        Self {
            role: Role::Passive,
            negotiation_timeout: limits::NEGOTIATION_TIMEOUT_PASSIVE,
            ..Self::active()
        }
    }

    /// Receive buffers that the transport has to have for this connection, of `max_receive_size` bytes each.
    #[must_use]
    pub const fn receive_buffers(&self) -> u16 {
        self.receive_credit_max + limits::RECEIVE_RESERVE
    }

    /// Whether it can work.
    ///
    /// # Errors
    /// The first thing that cannot.
    pub fn validate(&self) -> Result<(), InvalidConfig> {
        let least_message = u64::from(limits::RECEIVE_SIZE_MIN_BYTES);
        let most_message = u64::from(limits::MESSAGE_MAX_BYTES);
        let bounds: [(&'static str, u64, u64, u64); 8] = [
            ("receive_credit_max", self.receive_credit_max.into(), 2, limits::RECEIVE_CREDITS_MAX.into()),
            ("send_credit_target", self.send_credit_target.into(), 1, u16::MAX.into()),
            ("max_send_size", self.max_send_size.into(), least_message, most_message),
            ("max_receive_size", self.max_receive_size.into(), least_message, most_message),
            (
                "max_fragmented_receive_size",
                self.max_fragmented_receive_size.into(),
                limits::FRAGMENTED_SIZE_MIN_BYTES.into(),
                limits::FRAGMENTED_SIZE_MAX_BYTES.into(),
            ),
            ("max_read_write_size", self.max_read_write_size.into(), 0, limits::READ_WRITE_MAX_BYTES.into()),
            ("send_segments_max", self.send_segments_max as u64, 1, limits::SEGMENTS_PER_MESSAGE_MAX as u64),
            ("send_depth", self.send_depth.into(), 1, u16::MAX.into()),
        ];
        for (name, value, min, max) in bounds {
            if value < min || value > max {
                return Err(InvalidConfig::OutOfBounds { name, value, min, max });
            }
        }
        if self.fragmented_size(self.max_receive_size).is_none() {
            return Err(InvalidConfig::ReceiveBuffers {
                buffers: self.receive_credit_max,
                size: self.max_receive_size,
                needed: limits::FRAGMENTED_SIZE_MIN_BYTES,
            });
        }
        Ok(())
    }

    /// The longest fragmented message that may be announced when the peer's messages are up to `message_size` bytes long:
    /// what the receive buffers hold although some are half empty. None where they hold less than the specification's least
    /// even if all are full.
    pub(crate) fn fragmented_size(&self, message_size: u32) -> Option<u32> {
        let least = u64::from(limits::FRAGMENTED_SIZE_MIN_BYTES);
        let full = self.fragment_capacity(message_size);
        let likely = (full / u64::from(limits::FRAGMENT_FILL_DIVISOR)).max(least);
        (full >= least).then(|| likely.min(self.max_fragmented_receive_size.into()) as u32)
    }

    /// Bytes that the receive buffers hold when all are filled by messages of `message_size` bytes.
    pub(crate) fn fragment_capacity(&self, message_size: u32) -> u64 {
        u64::from(self.receive_credit_max) * u64::from(payload_max(message_size))
    }
}

/// Payload of a message of `message_size` bytes.
pub(crate) const fn payload_max(message_size: u32) -> u32 {
    message_size - DataTransfer::DATA_OFFSET as u32
}
