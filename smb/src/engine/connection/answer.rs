//! Responses: credits, signatures and seals ([MS-SMB2] 3.3.4.1).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::smallvec;

use super::Connection;
use super::transmit::{Sealer, Transmit};
use crate::crypto::SigningKey;
use crate::engine::commands;
use crate::engine::reports::Event;
use crate::engine::request::chain::{Chain, Response, Responses};
use crate::engine::request::step::{Reply, Request};
use crate::status::NtStatus;
use crate::wire::{Command, Dialect, HeaderFlags, Ids};

impl Connection {
    pub(super) fn answer(&mut self, chain: &mut Chain, request: &mut Request, reply: Reply) {
        let status = reply.status;
        chain.related.file = request.related_file;
        // Related requests inherit the ids that TREE_CONNECT and SESSION_SETUP assign.
        chain.related.session_id = request.header.session_id;
        chain.related.tree_id = request.header.tree_id();
        if request.header.command == Command::CREATE {
            // STATUS_STOPPED_ON_SYMLINK is a warning, but there is no file.
            let failed = status.is_error() || status == NtStatus::STOPPED_ON_SYMLINK;
            chain.related.create_error = failed.then_some(status);
        }
        let payload_bytes = reply.payload.as_ref().map_or_else(
            || {
                if request.header.command == Command::WRITE {
                    commands::payload_bytes(Command::WRITE, request.message()).unwrap_or(0)
                } else {
                    0
                }
            },
            |p| p.length() as u32,
        );
        let payload_bytes = match &reply.remote {
            Some(remote) => remote.payload.length() as u32,
            None => payload_bytes,
        };
        self.core.events.push_back(Event::Completed {
            command: request.header.command,
            status,
            began: request.began.instant,
            payload_bytes,
            by_rdma: request.by_rdma,
            activity: request.volume().map(|volume| Arc::clone(&volume.activity)),
        });
        let mut header = request.header.response(status);
        let async_id = chain.async_id.take();
        header.credits = if async_id.is_some() { 0 } else { self.credits.grant(request.header.credits) };
        if let Some(async_id) = async_id {
            header.ids = Ids::Async { async_id };
        }
        let mut response = Response::reply(header, reply);
        response.sign = self.signing_key(chain, request, status);
        response.invalidate = request.invalidate;
        // There is no key to sign with, but a client that signs accepts the response only with the flag, which Windows
        // echoes.
        if status == NtStatus::USER_SESSION_DELETED && request.header.flags.contains(HeaderFlags::SIGNED) {
            response.header.flags.insert(HeaderFlags::SIGNED);
        }
        self.note_preauth(request, &response);
        chain.responses.push(response);
    }

    /// Returns the key to sign with. [MS-SMB2] 3.3.4.1.1: responses to signed requests are signed, and so is the final
    /// SESSION_SETUP response.
    fn signing_key(&self, chain: &Chain, request: &Request, status: NtStatus) -> Option<SigningKey> {
        if chain.sealed_for.is_some() {
            return None;
        }
        let channel = self.core.channels.get(&request.header.session_id);
        // LOGOFF has already removed the channel, but its answer is still signed.
        let (session, key) = match (channel, &request.signing) {
            (Some(c), _) => (Arc::clone(&c.session), c.signing.clone()),
            (None, Some(key)) => (Arc::clone(request.session.as_ref()?), key.clone()),
            (None, None) => return None,
        };
        let asked = request.header.flags.contains(HeaderFlags::SIGNED);
        let setup_done = request.header.command == Command::SESSION_SETUP && status == NtStatus::SUCCESS;
        // A request with a wrong signature gets an unsigned refusal.
        if request.session.is_none() && !setup_done {
            return None;
        }
        (asked || setup_done || session.signing_required.load(Ordering::Relaxed)).then_some(key)
    }

    /// [MS-SMB2] 3.3.5.4, 3.3.5.5: the hash covers requests and responses as sent on the wire, except the final
    /// SESSION_SETUP response.
    fn note_preauth(&mut self, request: &Request, response: &Response) {
        let message = || {
            let mut bytes = Vec::new();
            response.header.encode(&mut bytes);
            bytes.extend_from_slice(&response.body);
            bytes
        };
        match request.header.command {
            Command::NEGOTIATE => {
                if let Some(n) = &mut self.core.negotiated
                    && n.dialect == Dialect::SMB3_1_1
                {
                    n.preauth.update(request.message());
                    n.preauth.update(&message());
                }
            }
            Command::SESSION_SETUP if response.header.status == NtStatus::MORE_PROCESSING_REQUIRED => {
                if let Some(pending) = self.core.pending.get_mut(&response.header.session_id) {
                    let mut message = message();
                    // The intermediate responses of a binding are signed, and are hashed as sent on the wire.
                    if let Some(key) = &response.sign {
                        key.sign_in_place(&mut message, &[]);
                    }
                    pending.preauth.update(&message);
                }
            }
            _ => {}
        }
    }

    pub(super) fn interim(&mut self, chain: &mut Chain, request: &Request, async_id: u64) {
        let mut header = request.header.response(NtStatus::PENDING);
        header.credits = self.credits.grant(request.header.credits);
        header.ids = Ids::Async { async_id };
        let response = Response::error(header);
        // [MS-SMB2] 3.3.4.2: not signed. With AES-GMAC, the final response has the same message id and therefore the same
        // nonce.
        let mut responses = std::mem::take(&mut chain.responses);
        responses.push(response);
        self.push(responses, chain.sealed_for);
    }

    pub(super) fn finish(&mut self, mut response: Response) {
        response.header.credits = self.credits.grant(1);
        self.transmit.push_back(Transmit::new(smallvec![response], None));
    }

    pub(super) fn push(&mut self, responses: Responses, sealed_for: Option<u64>) {
        if self.core.closed || responses.is_empty() {
            return;
        }
        let seal = sealed_for.and_then(|session_id| {
            let keys = match self.core.channels.get_mut(&session_id) {
                Some(channel) => channel.seal.as_mut(),
                None => self.core.last_sealing.as_mut().filter(|(id, _)| *id == session_id).map(|(_, k)| k),
            }?;
            // Without a nonce, nothing is sent: the client detects this, and a new session has new keys.
            let nonce = keys.nonces.next_nonce().ok()?;
            Some(Sealer { key: keys.sealing.clone(), nonce, session_id })
        });
        if sealed_for.is_some() && seal.is_none() {
            // The session ended while a sealed request was in progress: its answer must not be sent in the clear.
            return;
        }
        self.transmit.push_back(Transmit::new(responses, seal));
    }
}
