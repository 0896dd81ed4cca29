//! Received frames: unsealing, splitting into requests, consuming credits; CANCEL.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Connection;
use super::progress::Parked;
use crate::crypto::{SealedFrame, TRANSFORM_HEADER_LEN};
use crate::engine::commands;
use crate::engine::reports::Disconnect;
use crate::engine::request::chain::{Chain, Related, Requests, Response, Responses};
use crate::engine::request::step::Wake;
use crate::fs::Frame;
use crate::limits;
use crate::time::Now;
use crate::wire::compound;
use crate::wire::{Capabilities, Command, Header, Ids};

/// An opened frame: `range` holds the SMB2 messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsealed {
    /// The session with the key that opened it.
    pub session_id: u64,
    /// The range of the plaintext in the sealed frame.
    pub range: Range<usize>,
}

impl Connection {
    /// Opens a sealed frame in place ([MS-SMB2] 3.3.5.2.1). Returns `None` if it is not sealed.
    ///
    /// # Errors
    /// [`Disconnect`] if it cannot be opened.
    pub fn unseal(&mut self, frame: &mut [u8]) -> Result<Option<Unsealed>, Disconnect> {
        if !SealedFrame::claims(frame) {
            return Ok(None);
        }
        let header = SealedFrame::parse(frame).map_err(|_| Disconnect("malformed transform header"))?;
        let seal = self
            .core
            .channels
            .get(&header.session_id)
            .and_then(|c| c.seal.as_ref())
            .ok_or(Disconnect("sealed for a session that cannot seal here"))?;
        let length =
            seal.opening.open_in_place(frame).map_err(|_| Disconnect("sealed frame does not open"))?.len();
        let start = TRANSFORM_HEADER_LEN;
        Ok(Some(Unsealed { session_id: header.session_id, range: start..start + length }))
    }

    /// Takes a frame of SMB2 messages in plaintext. `unsealed` is the result of [`Self::unseal`], with a range relative to
    /// the sealed frame; `frame.bytes()` must be the plaintext alone.
    ///
    /// # Errors
    /// [`Disconnect`] if the specification requires it; call [`Self::close`] then.
    pub fn handle(
        &mut self,
        now: Now,
        frame: Arc<dyn Frame>,
        unsealed: Option<&Unsealed>,
    ) -> Result<(), Disconnect> {
        if self.core.closed || self.core.leaving {
            return Ok(());
        }
        let sealed_for = unsealed.map(|u| u.session_id);
        if frame.bytes().starts_with(&crate::wire::smb1::PROTOCOL_ID) {
            return self.multi_protocol(now, frame.bytes());
        }
        let mut requests = Requests::new();
        let mut cancels = Vec::new();
        for message in compound::split(frame.bytes()) {
            let range = message.map_err(|_| Disconnect("malformed compound"))?;
            let bytes = frame.bytes().get(range.clone()).unwrap_or_default();
            let header = Header::parse(bytes).map_err(|_| Disconnect("malformed header"))?;
            if header.is_response() {
                return Err(Disconnect("a response sent to a server"));
            }
            if requests.len() >= limits::COMPOUND_MESSAGES_MAX {
                return Err(Disconnect("compound too long"));
            }
            if self.core.negotiated.is_none() && header.command != Command::NEGOTIATE {
                return Err(Disconnect("a request before NEGOTIATE"));
            }
            // [MS-SMB2] 3.3.5.2.3: CANCEL consumes no message id.
            if header.command == Command::CANCEL {
                cancels.push((header, range));
                continue;
            }
            if !self.credits.consume(header.message_id, self.charge(&header)) {
                return Err(Disconnect("message id outside the window"));
            }
            requests.push((header, range));
        }
        for (header, range) in cancels {
            let message = frame.bytes().get(range).unwrap_or_default();
            self.cancel(now, &header, message, sealed_for)?;
        }
        if requests.is_empty() {
            return Ok(());
        }
        let id = self.next_chain;
        self.next_chain += 1;
        let pinned_bytes = pinned_bytes(&*frame, &requests);
        self.pinned_bytes += pinned_bytes;
        let chain = Chain {
            frame,
            requests,
            pinned_bytes,
            next: 0,
            waiting: None,
            related: Related::default(),
            responses: Responses::new(),
            sealed_for,
            async_id: None,
        };
        self.advance(now, id, chain)?;
        self.notify_own();
        Ok(())
    }

    fn charge(&self, header: &Header) -> u16 {
        match &self.core.negotiated {
            Some(n) if n.capabilities.contains(Capabilities::LARGE_MTU) => header.credit_charge,
            _ => 1,
        }
    }

    /// Handles an SMB1 NEGOTIATE ([MS-SMB2] 3.3.5.3).
    fn multi_protocol(&mut self, now: Now, message: &[u8]) -> Result<(), Disconnect> {
        if self.core.negotiated.is_some() || self.core.wildcard || !self.credits.consume(0, 1) {
            return Err(Disconnect("an SMB1 message after NEGOTIATE"));
        }
        let (header, reply) =
            commands::negotiate::multi_protocol(&mut self.core, &self.server, now.wall, message)?;
        self.finish(Response::reply(header, reply));
        Ok(())
    }

    /// Cancels a parked request by AsyncId or by MessageId ([MS-SMB2] 3.3.5.16). CANCEL has no response, and is ignored if
    /// the request is not waiting. A CANCEL that does not prove that it comes from the session of the request is dropped.
    fn cancel(
        &mut self,
        now: Now,
        header: &Header,
        message: &[u8],
        sealed_for: Option<u64>,
    ) -> Result<(), Disconnect> {
        // [MS-SMB2] 3.3.5.2.1.1, as in `admit`.
        if sealed_for.is_some_and(|session_id| session_id != header.session_id) {
            return Err(Disconnect("a sealed request for another session"));
        }
        let Some(channel) = self.core.channels.get(&header.session_id) else { return Ok(()) };
        if channel.session.closed.load(Ordering::Acquire)
            || !channel.verifies(header, message, sealed_for.is_some())
        {
            return Ok(());
        }
        let found = match header.ids {
            Ids::Async { async_id } => self.parked.get_key_value(&async_id),
            Ids::Sync { .. } => self.parked.iter().find(|(_, p)| p.message_id == header.message_id),
        };
        let is_its = |parked: &Parked| {
            parked.session_id == header.session_id && (sealed_for.is_some() || !parked.sealed)
        };
        match found.filter(|(_, parked)| is_its(parked)).map(|(token, _)| *token) {
            Some(token) => self.wake(now, token, Wake::Cancelled),
            None => Ok(()),
        }
    }
}

/// Bytes that a frame's requests keep in memory: the frame, and the answers that the protocol layer allocates. READ data is
/// in the transport's buffers.
fn pinned_bytes(frame: &dyn Frame, requests: &[(Header, Range<usize>)]) -> u64 {
    let answers: u64 = requests
        .iter()
        .filter(|(header, _)| header.command != Command::READ)
        .map(|(header, range)| {
            let message = frame.bytes().get(range.clone()).unwrap_or_default();
            u64::from(commands::answer_bytes(header.command, message))
        })
        .sum();
    frame.held_bytes() as u64 + answers.min(limits::FRAME_BYTES_MAX.into())
}
