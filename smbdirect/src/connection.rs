//! A connection of either role ([MS-SMBD] 3.1.1.1). Its inputs are completions and time, its outputs messages and reasons for
//! a disconnect.

use std::time::Instant;

use crate::config::{Config, InvalidConfig, Role, payload_max};
use crate::credits::{Credits, ReceiveCredits, SendCredits};
use crate::disconnect::{Disconnect, Incompatibility, Misbehaviour, Timeout};
use crate::limits;
use crate::outbound::{Header, MessageId, Outbound, SendError, Transmit};
use crate::reassembly::{Message, Reassembly};
use crate::timers::{KeepAlive, Rest, Timers, is_due};
use crate::wire::{DataTransfer, Flags, NegotiateRequest, NegotiateResponse, Status, Token, VERSION};
use crate::{BufferId, Segment};

/// Negotiated parameters ([MS-SMBD] 3.1.4.7). All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Longest message to send, header included.
    pub max_send_size: u32,
    /// Longest message to receive, header included. Receive buffers need not be longer after the negotiation.
    pub max_receive_size: u32,
    /// Longest upper-layer message that the peer accepts.
    pub max_fragmented_send_size: u32,
    /// Longest upper-layer message that the peer may send.
    pub max_fragmented_receive_size: u32,
    /// Maximum of one READ or WRITE by RDMA: announced by the accepting side, respected by the connecting side.
    pub max_read_write_size: u32,
}

/// What to do with a receive buffer, and the result of its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// The negotiation is done. The buffer is free.
    Negotiated(Parameters),
    /// The buffer is free.
    Free,
    /// The buffer holds a part of a message that is not complete yet.
    Held,
    /// A message is complete. It refers to this buffer and those held before; they are free once it has been processed.
    Message(Message<'a>),
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// Active: the Negotiate Request has to be sent.
    Asking,
    /// Waiting for the peer's message of the negotiation.
    Waiting,
    /// Passive: the Negotiate Response has to be sent.
    Answering,
    /// Passive: a Negotiate Response that refuses has to be sent.
    Refusing(Status, Incompatibility),
    /// The refusal was sent; the connection ends when it is completed.
    Refused(Incompatibility),
    Established,
    Closed(Disconnect),
}

/// The progress of [`Connection::handle_receive`] that borrows nothing.
enum Step {
    Negotiated(Parameters),
    Free,
    Held,
    Message,
}

/// One side of an SMB Direct connection.
///
/// If a method returns [`Disconnect`], end the RDMA connection now. The reason is kept: every later call returns it.
#[derive(Debug)]
pub struct Connection {
    config: Config,
    state: State,
    /// The RDMA connection is up: sends can be posted.
    linked: bool,
    parameters: Parameters,
    send_credits: SendCredits,
    receive_credits: ReceiveCredits,
    outbound: Outbound,
    reassembly: Reassembly,
    timers: Timers,
    rest: Rest,
    keep_alive: KeepAlive,
    /// Connection.SendImmediate: the peer requested a message.
    send_immediate: bool,
    shutting_down: bool,
    /// Sends posted and not completed.
    in_flight: u16,
    /// Segments of the message that was returned last.
    transmitted: Vec<Segment>,
}

impl Connection {
    /// Begins a connection; the negotiation timeout starts here.
    ///
    /// # Errors
    /// [`InvalidConfig`] if the configuration cannot work.
    pub fn new(config: Config, now: Instant) -> Result<Self, InvalidConfig> {
        config.validate()?;
        // The connecting side announces a size before it learns how long the peer's messages will be.
        let assumed = config.max_receive_size.min(limits::ASSUMED_PEER_SEND_SIZE_BYTES);
        Ok(Self {
            state: match config.role {
                Role::Active => State::Asking,
                Role::Passive => State::Waiting,
            },
            linked: false,
            parameters: Parameters {
                max_send_size: config.max_send_size,
                max_receive_size: config.max_receive_size,
                max_fragmented_send_size: 0,
                max_fragmented_receive_size: config
                    .fragmented_size(assumed)
                    .unwrap_or(limits::FRAGMENTED_SIZE_MIN_BYTES),
                max_read_write_size: config.max_read_write_size,
            },
            send_credits: SendCredits::default(),
            receive_credits: ReceiveCredits::new(config.receive_credit_max),
            outbound: Outbound::default(),
            reassembly: Reassembly::default(),
            timers: Timers { negotiation: Some(now + config.negotiation_timeout), ..Timers::default() },
            rest: Rest::default(),
            keep_alive: KeepAlive::None,
            send_immediate: false,
            shutting_down: false,
            in_flight: 0,
            transmitted: Vec::new(),
            config,
        })
    }

    /// The RDMA connection is up. Receives can be completed earlier; sends are returned only from now on.
    pub fn handle_established(&mut self) {
        self.linked = true;
    }

    /// Receives were posted, each of [`Config::max_receive_size`] bytes; they may be announced from now on. With a shared
    /// receive queue: the same number of its receives is reserved for this connection.
    pub fn receives_posted(&mut self, count: u16) {
        self.receive_credits.posted(count);
    }

    /// A receive was completed: `message` contains the received bytes, at the start of `buffer`, and `invalidated` the token
    /// that the device reports as invalidated with it.
    ///
    /// # Errors
    /// [`Disconnect`] if the peer broke a rule or is incompatible. The buffer is free then.
    pub fn handle_receive(
        &mut self,
        now: Instant,
        buffer: BufferId,
        message: &[u8],
        invalidated: Option<Token>,
    ) -> Result<Received<'_>, Disconnect> {
        self.alive()?;
        self.reassembly.begin();
        let step = match self.state {
            State::Asking => Err(Misbehaviour::BeforeRequest.into()),
            State::Waiting => match self.config.role {
                Role::Active => self.receive_response(now, message).map(Step::Negotiated),
                Role::Passive => self.receive_request(message),
            },
            State::Refusing(..) | State::Refused(_) => {
                self.receive_credits.consume_unannounced();
                Ok(Step::Free)
            }
            State::Answering | State::Established => self.receive_data(now, buffer, message, invalidated),
            State::Closed(reason) => Err(reason),
        };
        self.watch_rest(now);
        match step {
            Ok(Step::Negotiated(parameters)) => Ok(Received::Negotiated(parameters)),
            Ok(Step::Free) => Ok(Received::Free),
            Ok(Step::Held) => Ok(Received::Held),
            Ok(Step::Message) => Ok(Received::Message(self.reassembly.message())),
            Err(reason) => Err(self.close(reason)),
        }
    }

    /// Queues an upper-layer message. Its buffers must not change until the SEND that completes `id` is completed, or
    /// [`Connection::drain_unsent`] returns it. `invalidate` is a token that the peer asked to have invalidated.
    ///
    /// # Errors
    /// [`SendError`]; nothing is queued then.
    pub fn send(
        &mut self,
        id: MessageId,
        segments: &[Segment],
        invalidate: Option<Token>,
    ) -> Result<(), SendError> {
        if self.shutting_down || !matches!(self.state, State::Established | State::Answering) {
            return Err(SendError::NotConnected);
        }
        self.outbound.push(id, segments, invalidate, self.parameters.max_fragmented_send_size)
    }

    /// The next message to post. Call it after every other call until it returns `None`.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Transmit<'_>> {
        if !self.linked || self.in_flight >= self.config.send_depth {
            return None;
        }
        self.transmitted.clear();
        let (header, invalidate, completes) = match self.state {
            State::Asking => (self.request(), None, None),
            State::Answering => (self.response(now)?, None, None),
            State::Refusing(status, reason) => {
                self.state = State::Refused(reason);
                (Header::response(&NegotiateResponse::refusal(status)), None, None)
            }
            State::Established => {
                let message = self.data(now)?;
                self.watch_rest(now);
                message
            }
            State::Waiting | State::Refused(_) | State::Closed(_) => return None,
        };
        self.in_flight += 1;
        Some(Transmit { header, segments: &self.transmitted, invalidate, completes })
    }

    /// Sends were completed.
    ///
    /// # Errors
    /// [`Disconnect`] if the connection was only kept open for those sends.
    pub fn handle_sent(&mut self, count: u16) -> Result<(), Disconnect> {
        self.alive()?;
        self.in_flight = self.in_flight.saturating_sub(count);
        match self.state {
            State::Refused(reason) if self.in_flight == 0 => Err(self.close(reason.into())),
            _ => self.finish_shutdown(),
        }
    }

    /// When to call [`Connection::handle_timeout`]; changes with every other call.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Time passed.
    ///
    /// # Errors
    /// [`Disconnect`] if a timeout has expired.
    pub fn handle_timeout(&mut self, now: Instant) -> Result<(), Disconnect> {
        self.alive()?;
        let late = if is_due(self.timers.negotiation, now) {
            Some(Timeout::Negotiation)
        } else if is_due(self.timers.shutdown, now) {
            Some(Timeout::Shutdown)
        } else if is_due(self.timers.credits, now) {
            Some(Timeout::Credits)
        } else if is_due(self.timers.rest, now) {
            Some(Timeout::Rest)
        } else if is_due(self.timers.idle, now) {
            self.idle(now)
        } else {
            None
        };
        late.map_or(Ok(()), |timeout| Err(self.close(timeout.into())))
    }

    /// Accepts no more messages, sends the queued ones, and ends the connection.
    ///
    /// # Errors
    /// [`Disconnect::Shutdown`] if there is nothing left to wait for.
    pub fn shutdown(&mut self, now: Instant) -> Result<(), Disconnect> {
        self.alive()?;
        self.shutting_down = true;
        if !matches!(self.state, State::Established | State::Answering) {
            return Err(self.close(Disconnect::Shutdown));
        }
        self.timers.shutdown.get_or_insert(now + self.config.shutdown_timeout);
        self.finish_shutdown()
    }

    /// The RDMA connection is gone, or was never established.
    pub fn handle_lost(&mut self) -> Disconnect {
        self.close(Disconnect::Lost)
    }

    /// Why the connection ended, if it has.
    #[must_use]
    pub const fn closed(&self) -> Option<Disconnect> {
        match self.state {
            State::Closed(reason) => Some(reason),
            _ => None,
        }
    }

    /// Negotiated parameters, once available.
    #[must_use]
    pub const fn parameters(&self) -> Option<Parameters> {
        match self.state {
            State::Answering | State::Established => Some(self.parameters),
            _ => None,
        }
    }

    /// Current credits.
    #[must_use]
    pub fn credits(&self) -> Credits {
        self.receive_credits.snapshot(&self.send_credits)
    }

    /// Receive buffers of a message that will not be completed; for the end of a connection.
    pub fn drain_held(&mut self) -> impl Iterator<Item = BufferId> {
        self.reassembly.drain()
    }

    /// Queued messages of which the last fragment was not returned yet; for the end of a connection.
    pub fn drain_unsent(&mut self) -> impl Iterator<Item = MessageId> {
        self.outbound.drain()
    }

    /// Updates the timer for the rest of a message that the peer has begun. The timer runs only while the peer has a credit
    /// of ours: otherwise it cannot continue, and it is our turn.
    fn watch_rest(&mut self, now: Instant) {
        self.timers.rest = None;
        if !self.reassembly.has_begun() {
            self.rest = Rest::default();
        } else if self.receive_credits.any_announced() {
            self.timers.rest = Some(self.rest.wait(now, self.config.rest_timeout));
        } else {
            self.rest.pause(now);
        }
    }

    fn alive(&self) -> Result<(), Disconnect> {
        self.closed().map_or(Ok(()), Err)
    }

    /// Ends the connection; the first reason is kept.
    fn close(&mut self, reason: Disconnect) -> Disconnect {
        if let State::Closed(first) = self.state {
            return first;
        }
        self.state = State::Closed(reason);
        self.timers = Timers::default();
        reason
    }

    fn finish_shutdown(&mut self) -> Result<(), Disconnect> {
        let done = self.shutting_down
            && matches!(self.state, State::Established)
            && self.outbound.is_empty()
            && self.in_flight == 0;
        if done { Err(self.close(Disconnect::Shutdown)) } else { Ok(()) }
    }

    /// [MS-SMBD] 3.1.5.2.
    fn request(&mut self) -> Header {
        self.state = State::Waiting;
        Header::request(&NegotiateRequest {
            min_version: VERSION,
            max_version: VERSION,
            credits_requested: self.config.send_credit_target,
            preferred_send_size: self.parameters.max_send_size,
            max_receive_size: self.parameters.max_receive_size,
            max_fragmented_size: self.parameters.max_fragmented_receive_size,
        })
    }

    /// [MS-SMBD] 3.1.5.6.
    fn receive_request(&mut self, message: &[u8]) -> Result<Step, Disconnect> {
        let request = NegotiateRequest::parse(message)?;
        self.receive_credits.consume_unannounced();
        if !(request.min_version..=request.max_version).contains(&VERSION) {
            let reason = Incompatibility::Version { min: request.min_version, max: request.max_version };
            self.state = State::Refusing(Status::NOT_SUPPORTED, reason);
            return Ok(Step::Free);
        }
        check_sizes(request.credits_requested, request.max_receive_size, request.max_fragmented_size)?;
        let max_receive_size =
            self.config.max_receive_size.min(request.preferred_send_size).max(limits::RECEIVE_SIZE_MIN_BYTES);
        let Some(max_fragmented_receive_size) = self.config.fragmented_size(max_receive_size) else {
            let reason = Incompatibility::SendSize(request.preferred_send_size);
            self.state = State::Refusing(Status::INSUFFICIENT_RESOURCES, reason);
            return Ok(Step::Free);
        };
        self.receive_credits.requested(request.credits_requested);
        self.parameters = Parameters {
            max_send_size: self.config.max_send_size.min(request.max_receive_size),
            max_receive_size,
            max_fragmented_send_size: request.max_fragmented_size,
            max_fragmented_receive_size,
            max_read_write_size: self.config.max_read_write_size,
        };
        self.state = State::Answering;
        Ok(Step::Negotiated(self.parameters))
    }

    /// [MS-SMBD] 3.1.5.3. `None` while there is nothing to grant: the negotiation timeout continues to run.
    fn response(&mut self, now: Instant) -> Option<Header> {
        let credits_granted = self.receive_credits.grantable(false);
        if credits_granted == 0 {
            return None;
        }
        self.receive_credits.grant(credits_granted);
        self.establish(now);
        Some(Header::response(&NegotiateResponse {
            min_version: VERSION,
            max_version: VERSION,
            negotiated_version: VERSION,
            credits_requested: self.config.send_credit_target,
            credits_granted,
            status: Status::SUCCESS,
            max_read_write_size: self.parameters.max_read_write_size,
            preferred_send_size: self.parameters.max_send_size,
            max_receive_size: self.parameters.max_receive_size,
            max_fragmented_size: self.parameters.max_fragmented_receive_size,
        }))
    }

    /// [MS-SMBD] 3.1.5.7.
    fn receive_response(&mut self, now: Instant, message: &[u8]) -> Result<Parameters, Disconnect> {
        let response = NegotiateResponse::parse(message)?;
        self.receive_credits.consume_unannounced();
        // Checked first, because a refusal has zeros everywhere else.
        if response.status != Status::SUCCESS {
            return Err(Incompatibility::Refused(response.status).into());
        }
        if response.negotiated_version != VERSION {
            let version = response.negotiated_version;
            return Err(Incompatibility::Version { min: version, max: version }.into());
        }
        check_sizes(response.credits_requested, response.max_receive_size, response.max_fragmented_size)?;
        if response.credits_granted == 0 {
            return Err(Misbehaviour::NoCreditsGranted.into());
        }
        if response.preferred_send_size > self.config.max_receive_size {
            return Err(Misbehaviour::PreferredSendSize(response.preferred_send_size).into());
        }
        let max_receive_size = response.preferred_send_size.max(limits::RECEIVE_SIZE_MIN_BYTES);
        let announced = self.parameters.max_fragmented_receive_size;
        if self.config.fragment_capacity(max_receive_size) < u64::from(announced) {
            return Err(Incompatibility::SendSize(response.preferred_send_size).into());
        }
        self.receive_credits.requested(response.credits_requested);
        self.send_credits.granted(response.credits_granted)?;
        self.parameters = Parameters {
            max_send_size: self.config.max_send_size.min(response.max_receive_size),
            max_receive_size,
            max_fragmented_send_size: response.max_fragmented_size,
            max_fragmented_receive_size: announced,
            max_read_write_size: self.config.max_read_write_size.min(response.max_read_write_size),
        };
        self.establish(now);
        Ok(self.parameters)
    }

    fn establish(&mut self, now: Instant) {
        self.state = State::Established;
        self.timers.negotiation = None;
        self.timers.idle = Some(now + self.config.keepalive_interval);
    }

    /// [MS-SMBD] 3.1.5.5, 3.1.5.8.
    fn receive_data(
        &mut self,
        now: Instant,
        buffer: BufferId,
        message: &[u8],
        invalidated: Option<Token>,
    ) -> Result<Step, Disconnect> {
        let data = DataTransfer::parse(message)?;
        let max = self.parameters.max_receive_size;
        if message.len() > max as usize {
            return Err(Misbehaviour::MessageTooLong { length: message.len() as u32, max }.into());
        }
        if data.credits_requested == 0 {
            return Err(Misbehaviour::NoCreditsRequested.into());
        }
        let length = u64::from(data.data_length) + u64::from(data.remaining_data_length);
        let max = self.parameters.max_fragmented_receive_size;
        if length > u64::from(max) {
            return Err(Misbehaviour::FragmentedTooLong { length, max }.into());
        }
        self.receive_credits.consume()?;
        self.receive_credits.requested(data.credits_requested);
        self.send_credits.granted(data.credits_granted)?;
        if data.credits_granted > 0 {
            self.timers.credits = None;
        }
        self.timers.idle = Some(now + self.config.keepalive_interval);
        self.keep_alive = KeepAlive::None;
        if data.flags.contains(Flags::RESPONSE_REQUESTED) {
            // Without requesting a response in turn, although [MS-SMBD] 3.1.5.8 says so: two such peers would never stop.
            self.send_immediate = true;
        }
        if let Some(token) = invalidated {
            self.reassembly.invalidated(token);
        }
        if data.data_length == 0 {
            // Also between fragments: older Linux clients grant credits this way. [MS-SMBD] 3.1.5.8 would end the connection.
            return match data.remaining_data_length {
                0 => Ok(Step::Free),
                _ => Err(Misbehaviour::RemainingWithoutData.into()),
            };
        }
        let segment = Segment { buffer, start: data.data_offset, length: data.data_length };
        let fragments_max = self.config.receive_credit_max.into();
        let whole = self.reassembly.push(segment, data.remaining_data_length, fragments_max)?;
        Ok(if whole { Step::Message } else { Step::Held })
    }

    /// [MS-SMBD] 3.1.5.1: the next Data Transfer message, if there is a reason and a credit for it.
    fn data(&mut self, now: Instant) -> Option<(Header, Option<Token>, Option<MessageId>)> {
        let reason = !self.outbound.is_empty()
            || !self.shutting_down
                && (self.send_immediate
                    || self.keep_alive == KeepAlive::Pending
                    || self.receive_credits.refill_due());
        if !reason {
            self.timers.credits = None;
            return None;
        }
        let last = match self.send_credits.held() {
            0 => {
                // The peer has a credit of ours, or spent its last one without granting one: it is the peer's turn.
                self.timers.credits.get_or_insert(now + self.config.credit_timeout);
                return None;
            }
            held => held == 1,
        };
        let credits_granted = self.receive_credits.grantable(last);
        if last && credits_granted == 0 {
            // It is the upper layer's turn to free a receive buffer.
            return None;
        }
        self.send_credits.spend(credits_granted);
        self.receive_credits.grant(credits_granted);
        let payload_max = payload_max(self.parameters.max_send_size);
        let segments_max = self.config.send_segments_max;
        let fragment = self.outbound.next(payload_max, segments_max, &mut self.transmitted);
        self.send_immediate = false;
        let mut flags = Flags::default();
        if self.keep_alive == KeepAlive::Pending {
            flags = Flags::RESPONSE_REQUESTED;
            self.keep_alive = KeepAlive::Sent;
            self.timers.idle = Some(now + self.config.keepalive_timeout);
        }
        let header = Header::data(&DataTransfer {
            credits_requested: self.config.send_credit_target,
            credits_granted,
            flags,
            remaining_data_length: fragment.map_or(0, |f| f.remaining),
            data_offset: if fragment.is_some() { DataTransfer::DATA_OFFSET as u32 } else { 0 },
            data_length: fragment.map_or(0, |f| f.length),
        });
        Some((header, fragment.and_then(|f| f.invalidate), fragment.and_then(|f| f.completes)))
    }

    /// [MS-SMBD] 3.1.6.2.
    fn idle(&mut self, now: Instant) -> Option<Timeout> {
        if self.keep_alive == KeepAlive::None {
            self.keep_alive = KeepAlive::Pending;
            self.timers.idle = Some(now + self.config.keepalive_timeout);
            return None;
        }
        // The upper layer holds all receive buffers: the peer could not have answered, or we could not send the request.
        let could_not_ask = self.keep_alive == KeepAlive::Pending
            && self.send_credits.held() == 1
            && self.receive_credits.grantable(true) == 0;
        if could_not_ask || !self.receive_credits.any_announced() {
            self.timers.idle = Some(now + self.config.keepalive_interval);
            return None;
        }
        Some(Timeout::KeepAlive)
    }
}

/// Requirements for both messages of the negotiation ([MS-SMBD] 3.1.5.6, 3.1.5.7).
fn check_sizes(
    credits_requested: u16,
    max_receive_size: u32,
    max_fragmented_size: u32,
) -> Result<(), Misbehaviour> {
    if credits_requested == 0 {
        return Err(Misbehaviour::NoCreditsRequested);
    }
    if max_receive_size < limits::RECEIVE_SIZE_MIN_BYTES {
        return Err(Misbehaviour::ReceiveSize(max_receive_size));
    }
    if max_fragmented_size < limits::FRAGMENTED_SIZE_MIN_BYTES {
        return Err(Misbehaviour::FragmentedSize(max_fragmented_size));
    }
    Ok(())
}
