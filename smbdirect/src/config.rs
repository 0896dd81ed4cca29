//! Capabilities and requests of one side ([MS-SMBD] 3.1.1.1).

use std::time::Duration;

use crate::limits;
use crate::wire::DataTransfer;

/// Which side begins the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Connected and sends the request: the client.
    Active,
    /// Accepted and sends the response: the server.
    Passive,
}

/// Initial values of a connection, before the negotiation with its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Which side this is.
    pub role: Role,
    /// Receives that may be announced to the peer in ordinary operation (ReceiveCreditMax).
    pub receive_credit_max: u16,
    /// Send credits requested from the peer (SendCreditTarget).
    pub send_credit_target: u16,
    /// Longest message to send, header included, in bytes (MaxSendSize).
    pub max_send_size: u32,
    /// Length of a receive buffer, in bytes (MaxReceiveSize).
    pub max_receive_size: u32,
    /// Longest upper-layer message to reassemble, in bytes (MaxFragmentedRecvSize). A smaller value is announced if the
    /// receive buffers cannot hold this many.
    pub max_fragmented_receive_size: u32,
    /// Maximum of one READ or WRITE by RDMA, in bytes (MaxReadWriteSize).
    pub max_read_write_size: u32,
    /// Segments of one message to send, besides its header: the device's `max_send_sge` less one.
    pub send_segments_max: usize,
    /// Messages sent and not yet completed: the capacity of the send queue, besides RDMA READ and WRITE.
    pub send_depth: u16,
    /// Time from the start until the negotiation must be done.
    pub negotiation_timeout: Duration,
    /// Idle time until a keep-alive request (KeepaliveInterval).
    pub keepalive_interval: Duration,
    /// Time for the answer to it.
    pub keepalive_timeout: Duration,
    /// Time without send credits while there are data to send.
    pub credit_timeout: Duration,
    /// Time for the rest of an upper-layer message that the peer has begun. Time in which it has no credit of ours does not
    /// count.
    pub rest_timeout: Duration,
    /// Time from [`crate::Connection::shutdown`] until queued messages are discarded.
    pub shutdown_timeout: Duration,
}

/// A configuration that cannot work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidConfig {
    /// A size or number is out of bounds.
    #[error("{name} must be {min} to {max}, not {value}")]
    OutOfBounds {
        /// Name of the parameter.
        name: &'static str,
        /// Its value.
        value: u64,
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// The receive buffers hold less than the smallest fragmented message that the specification requires.
    #[error("{buffers} receive buffers of {size} bytes cannot hold {needed} bytes of one message")]
    ReceiveBuffers {
        /// Number of buffers.
        buffers: u16,
        /// Length of each.
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

    /// Receive buffers that the transport must provide for this connection, of `max_receive_size` bytes each.
    #[must_use]
    pub const fn receive_buffers(&self) -> u16 {
        self.receive_credit_max + limits::RECEIVE_RESERVE
    }

    /// Checks whether it can work.
    ///
    /// # Errors
    /// The first parameter that is invalid.
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

    /// The longest fragmented message to announce if the peer's messages are up to `message_size` bytes long: the length that
    /// the receive buffers can hold although some are half empty. `None` if they hold less than the specification's minimum
    /// even if all are full.
    pub(crate) fn fragmented_size(&self, message_size: u32) -> Option<u32> {
        let least = u64::from(limits::FRAGMENTED_SIZE_MIN_BYTES);
        let full = self.fragment_capacity(message_size);
        let likely = (full / u64::from(limits::FRAGMENT_FILL_DIVISOR)).max(least);
        (full >= least).then(|| likely.min(self.max_fragmented_receive_size.into()) as u32)
    }

    /// Bytes that the receive buffers hold if all are filled by messages of `message_size` bytes.
    pub(crate) fn fragment_capacity(&self, message_size: u32) -> u64 {
        u64::from(self.receive_credit_max) * u64::from(payload_max(message_size))
    }
}

/// Payload of a message of `message_size` bytes.
pub(crate) const fn payload_max(message_size: u32) -> u32 {
    message_size - DataTransfer::DATA_OFFSET as u32
}
