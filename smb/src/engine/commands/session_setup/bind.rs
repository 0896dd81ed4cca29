//! SESSION_SETUP that binds a connection to a session as an additional channel ([MS-SMB2] 3.3.5.5, 3.3.5.5.3).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::authentication::{
    AuthOutcome, Proof, add_channel, authenticate, begin_pending, reply, signing_key,
};
use crate::crypto::SigningAlgorithm;
use crate::engine::reports::Event;
use crate::engine::request::core::Negotiated;
use crate::engine::request::step::{Ctx, Step};
use crate::engine::session::Session;
use crate::status::NtStatus;
use crate::wire::session_setup::{Request, SessionFlags};
use crate::wire::{Dialect, HeaderFlags};

pub(crate) fn handle(ctx: &mut Ctx<'_>, request: &Request<'_>, message: &[u8]) -> Step {
    match leg(ctx, request, message) {
        Ok(step) => step,
        Err(status) => {
            // The next attempt starts with the first round.
            ctx.core.pending.retain(|id, p| *id != ctx.request.header.session_id || !p.binding);
            Step::Fail(status)
        }
    }
}

fn leg(ctx: &mut Ctx<'_>, request: &Request<'_>, message: &[u8]) -> Result<Step, NtStatus> {
    let id = ctx.request.header.session_id;
    let session = ctx.server.sessions().get(&id).cloned().ok_or(NtStatus::USER_SESSION_DELETED)?;
    // [MS-SMB2] 3.3.5.2.4: a binding is signed with the session's key, and so are all answers except the last one
    // (3.3.4.1.1). A client without that key gets unsigned refusals.
    let signed = ctx.request.header.flags.contains(HeaderFlags::SIGNED);
    let verified = signed && session.signing.verify(&[message]);
    if verified && !ctx.core.channels.contains_key(&id) {
        ctx.request.session = Some(Arc::clone(&session));
        ctx.request.signing = Some(session.signing.clone());
    }
    let negotiated = ctx.core.negotiated.as_ref().ok_or(NtStatus::USER_SESSION_DELETED)?;
    suits(negotiated, &session, signed)?;
    if session.is_expired(ctx.now.instant) {
        return Err(NtStatus::NETWORK_SESSION_EXPIRED);
    }
    session.may_join(ctx.core.id)?;
    if !verified {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if !ctx.core.pending.contains_key(&id) {
        begin_pending(ctx, id, true)?;
    }
    match authenticate(ctx, id, false, request, message)? {
        AuthOutcome::Continue(token) => {
            Ok(Step::Reply(reply(NtStatus::MORE_PROCESSING_REQUIRED, SessionFlags::empty(), &token)))
        }
        AuthOutcome::Done(done) => join(ctx, &session, &done),
    }
}

/// Whether the connection can carry the session, checked in the order of [MS-SMB2] 3.3.5.5. This server has no anonymous or
/// guest sessions.
fn suits(negotiated: &Negotiated, session: &Session, signed: bool) -> Result<(), NtStatus> {
    // Not in the specification: Windows answers this if only one side signs with AES-GMAC.
    let is_gmac = |algorithm| algorithm == SigningAlgorithm::AesGmac;
    match (is_gmac(session.signing.algorithm()), is_gmac(negotiated.signing)) {
        (true, false) => return Err(NtStatus::REQUEST_OUT_OF_SEQUENCE),
        (false, true) => return Err(NtStatus::NOT_SUPPORTED),
        _ => {}
    }
    if matches!(negotiated.dialect, Dialect::SMB2_0_2 | Dialect::SMB2_1) {
        return Err(NtStatus::REQUEST_NOT_ACCEPTED);
    }
    if negotiated.dialect != session.dialect || !signed {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    // The sealing keys belong to the session, so the cipher must be the same.
    if negotiated.cipher != session.cipher {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if negotiated.client_guid != session.client_guid {
        return Err(NtStatus::USER_SESSION_DELETED);
    }
    Ok(())
}

fn join(ctx: &mut Ctx<'_>, session: &Arc<Session>, done: &Proof) -> Result<Step, NtStatus> {
    // [MS-SMB2] 3.3.5.5: a session has one user.
    if !session.username.eq_ignore_ascii_case(&done.who.user) {
        let reason = "a session of another user cannot be joined".to_owned();
        ctx.core.events.push_back(Event::AuthenticationFailed { username: done.who.user.clone(), reason });
        return Err(NtStatus::NOT_SUPPORTED);
    }
    let negotiated = ctx.core.negotiated.as_ref().ok_or(NtStatus::USER_SESSION_DELETED)?;
    let signing = signing_key(negotiated, done);
    let volume = ctx.server.volume(&session.volume_id).ok_or(NtStatus::USER_SESSION_DELETED)?;
    ctx.core.count_for(&volume)?;
    let part = session.join(ctx.core.id, ctx.core.link())?;
    add_channel(ctx, session, signing, part);
    ctx.core
        .events
        .push_back(Event::ChannelBound { session_id: session.id, username: done.who.user.clone() });
    let encrypt = session.encrypt.load(Ordering::Relaxed);
    let flags = if encrypt { SessionFlags::ENCRYPT_DATA } else { SessionFlags::empty() };
    Ok(Step::Reply(reply(NtStatus::SUCCESS, flags, &done.who.token)))
}
