//! Admission of requests ([MS-SMB2] 3.3.5.2).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Connection;
use crate::engine::commands;
use crate::engine::request::chain::{Chain, Related, Response};
use crate::engine::request::step::{Request, Step};
use crate::engine::session::Share;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::{Capabilities, Command, Ids};

impl Connection {
    /// Checks session, signature, tree and sizes of a request ([MS-SMB2] 3.3.5.2).
    pub(super) fn admit(
        &mut self,
        now: Instant,
        chain: &mut Chain,
        request: &mut Request,
    ) -> Result<(), Step> {
        let fail = |status| Err(Step::Fail(status));
        inherit(&mut chain.related, request, chain.next == 1)?;
        let header = &request.header;
        let command = header.command;
        // [MS-SMB2] 3.3.5.2.1.1: a message sealed for a session must name that session.
        if chain.sealed_for.is_some_and(|s| header.session_id != s) {
            return Err(Step::Disconnect("a sealed request for another session"));
        }
        if command == Command::NEGOTIATE {
            return Ok(());
        }
        let session_id = header.session_id;
        let tree_id = header.tree_id();
        let optional = matches!(command, Command::SESSION_SETUP | Command::ECHO);
        let Some(channel) = self.core.channels.get_mut(&session_id) else {
            chain.related.broken = !optional;
            return if optional { Ok(()) } else { fail(NtStatus::USER_SESSION_DELETED) };
        };
        let session = Arc::clone(&channel.session);
        if session.closed.load(Ordering::Acquire) {
            return fail(NtStatus::USER_SESSION_DELETED);
        }
        if chain.sealed_for.is_some() && !session.seals.load(Ordering::Relaxed) {
            session.seals.store(true, Ordering::Relaxed);
        }
        // If SESSION_SETUP re-authenticates a channel's session, even a refusal is signed with the channel's key, as on
        // Samba: a client that signs accepts nothing else.
        if command == Command::SESSION_SETUP {
            request.session = Some(Arc::clone(&session));
        }
        if !channel.verifies(&request.header, request.message(), chain.sealed_for.is_some()) {
            return fail(NtStatus::ACCESS_DENIED);
        }
        request.session = Some(Arc::clone(&session));
        // [MS-SMB2] 3.3.5.2.9
        if session.is_expired(now)
            && !optional
            && !matches!(command, Command::LOGOFF | Command::CLOSE | Command::LOCK)
        {
            return fail(NtStatus::NETWORK_SESSION_EXPIRED);
        }
        if !optional && !matches!(command, Command::LOGOFF | Command::TREE_CONNECT) {
            // [MS-SMB2] 3.3.5.2.11
            let Some(tree) = channel.lookup.tree(&session, tree_id) else {
                return fail(NtStatus::NETWORK_NAME_DELETED);
            };
            if tree.encrypt && chain.sealed_for.is_none() {
                return fail(NtStatus::ACCESS_DENIED);
            }
            if let Share::Volume(volume) = &tree.share
                && volume.removed.load(Ordering::Acquire)
                && !matches!(command, Command::TREE_DISCONNECT | Command::CLOSE)
            {
                return fail(NtStatus::NETWORK_NAME_DELETED);
            }
            request.tree = Some(tree);
        }
        self.check_sizes(chain, request)?;
        // Related requests fail if the CREATE of their file failed.
        if request.related
            && command != Command::CREATE
            && let Some(status) = chain.related.create_error
        {
            return fail(status);
        }
        Ok(())
    }

    /// Checks CreditCharge and the length of the frame that carries the answers.
    fn check_sizes(&self, chain: &Chain, request: &Request) -> Result<(), NtStatus> {
        let command = request.header.command;
        // [MS-SMB2] 3.3.5.2.5
        if let Some(bytes) = commands::payload_bytes(command, request.message())
            && let Some(n) = &self.core.negotiated
        {
            let charge = if n.capabilities.contains(Capabilities::LARGE_MTU) {
                u32::from(request.header.credit_charge.max(1))
            } else {
                1
            };
            if bytes > n.io_bytes_max || bytes.div_ceil(limits::CREDIT_BYTES).max(1) > charge {
                return Err(NtStatus::INVALID_PARAMETER);
            }
        }
        // The answers of a compound form one frame, which has a maximum length.
        if chain.requests.len() > 1 {
            let before: u64 = chain.responses.iter().map(Response::length).sum();
            let more = u64::from(commands::answer_bytes(command, request.message()));
            if before + more > u64::from(limits::FRAME_BYTES_MAX) {
                return Err(NtStatus::INSUFFICIENT_RESOURCES);
            }
        }
        Ok(())
    }
}

/// Applies what a related request inherits from the request before it ([MS-SMB2] 3.3.5.2.7.2).
fn inherit(related: &mut Related, request: &mut Request, is_first: bool) -> Result<(), Step> {
    if request.related {
        related.broken |= is_first;
        if related.broken {
            return Err(Step::Fail(NtStatus::INVALID_PARAMETER));
        }
        request.header.session_id = related.session_id;
        if let Ids::Sync { tree_id, .. } = &mut request.header.ids {
            *tree_id = related.tree_id;
        }
    } else {
        related.broken = false;
        related.file = None;
        request.related_file = None;
        related.create_error = None;
    }
    related.session_id = request.header.session_id;
    related.tree_id = request.header.tree_id();
    Ok(())
}
