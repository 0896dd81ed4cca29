//! SESSION_SETUP ([MS-SMB2] 3.3.5.5).

mod authentication;
mod bind;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::authentication::{
    AuthOutcome, Proof, add_channel, authenticate, begin, begin_pending, derivation, reply, signing_key,
};
use crate::crypto::{OpeningKey, SealingKey, client_to_server_key, server_to_client_key};
use crate::engine::channels::FIRST_NONCE_PART;
use crate::engine::config::Encryption;
use crate::engine::reports::Event;
use crate::engine::request::core::Negotiated;
use crate::engine::request::step::{Ctx, Step};
use crate::engine::session::{NewSession, Session};
use crate::engine::volume::Protection;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::session_setup::{Flags, Request, SessionFlags};
use crate::wire::{Dialect, SecurityMode};

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let frame = Arc::clone(&ctx.request.frame);
    let message = frame.bytes().get(ctx.request.range.clone()).unwrap_or_default();
    let request = match Request::parse(message) {
        Ok(r) => r,
        Err(e) => return e.into(),
    };
    if request.security_buffer.len() > limits::SECURITY_BLOB_BYTES_MAX {
        return Step::Fail(NtStatus::INVALID_PARAMETER);
    }
    let session_id = ctx.request.header.session_id;
    if request.flags.contains(Flags::BINDING) && session_id != 0 {
        return bind::handle(ctx, &request, message);
    }
    let reauth = ctx.core.channels.contains_key(&session_id);
    let id = match (session_id, reauth) {
        (0, _) => {
            let id = new_session_id(ctx);
            if let Err(status) = begin_pending(ctx, id, false) {
                return Step::Fail(status);
            }
            id
        }
        (id, true) => {
            if ctx.core.channels.get(&id).is_some_and(|c| c.reauth.is_none()) {
                let pending = begin(ctx, false);
                let connection = ctx.core.id;
                if let Some(channel) = ctx.core.channels.get_mut(&id) {
                    channel.reauth = Some(pending);
                    channel.session.reauthenticate(connection);
                }
            }
            id
        }
        // An authentication that began as a binding must not end as a session with the same id.
        (id, false) if ctx.core.pending.get(&id).is_some_and(|p| !p.binding) => id,
        _ => return Step::Fail(NtStatus::USER_SESSION_DELETED),
    };
    ctx.request.header.session_id = id;
    match authenticate(ctx, id, reauth, &request, message) {
        Ok(AuthOutcome::Continue(token)) => {
            Step::Reply(reply(NtStatus::MORE_PROCESSING_REQUIRED, SessionFlags::empty(), &token))
        }
        Ok(AuthOutcome::Done(done)) if reauth => finish_reauth(ctx, id, &done),
        Ok(AuthOutcome::Done(done)) => establish(ctx, id, &request, &done),
        Err(status) => Step::Fail(status),
    }
}

fn new_session_id(ctx: &mut Ctx<'_>) -> u64 {
    loop {
        let id = u64::from_le_bytes(ctx.core.random::<8>());
        // 0 means no session; in a compound, all ones means the session of the previous request.
        let taken = ctx.server.sessions().contains_key(&id) || ctx.core.pending.contains_key(&id);
        if id != 0 && id != u64::MAX && !taken {
            return id;
        }
    }
}

fn finish_reauth(ctx: &mut Ctx<'_>, id: u64, done: &Proof) -> Step {
    let Some(channel) = ctx.core.channels.get(&id) else {
        return Step::Fail(NtStatus::USER_SESSION_DELETED);
    };
    // A session never changes its user: a proof of another user ends it.
    if !channel.session.username.eq_ignore_ascii_case(&done.who.user) {
        ctx.core.end_session(ctx.server, ctx.now.instant, id);
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    channel.session.reauthenticated(ctx.core.id);
    channel.session.set_expires(done.who.expires, ctx.now);
    // [MS-SMB2] 3.3.5.5.3: the keys of the session do not change.
    let encrypt = channel.session.encrypt.load(Ordering::Relaxed);
    let flags = if encrypt { SessionFlags::ENCRYPT_DATA } else { SessionFlags::empty() };
    Step::Reply(reply(NtStatus::SUCCESS, flags, &done.who.token))
}

/// Session.EncryptionKey and Session.DecryptionKey ([MS-SMB2] 3.3.5.5.3).
fn sealing_keys(negotiated: &Negotiated, done: &Proof) -> Option<(SealingKey, OpeningKey)> {
    let key = &done.who.full_session_key;
    let (derivation, cipher) = derivation(negotiated, done).zip(negotiated.cipher)?;
    Some((
        SealingKey::new(&server_to_client_key(derivation, key, cipher)),
        OpeningKey::new(&client_to_server_key(derivation, key, cipher)),
    ))
}

/// [MS-SMB2] 3.3.5.5.3
fn establish(ctx: &mut Ctx<'_>, id: u64, request: &Request<'_>, done: &Proof) -> Step {
    let Some(negotiated) = &ctx.core.negotiated else {
        return Step::Fail(NtStatus::USER_SESSION_DELETED);
    };
    let Some(volume) = ctx.server.volume_of(&done.who.user).and_then(|v| ctx.server.volume(&v)) else {
        return Step::Fail(NtStatus::LOGON_FAILURE);
    };
    let (dialect, client_guid, cipher) = (negotiated.dialect, negotiated.client_guid, negotiated.cipher);
    let (signing, sealing) = (signing_key(negotiated, done), sealing_keys(negotiated, done));
    let encrypt = ctx.server.config.encryption == Encryption::Required;
    if encrypt && sealing.is_none() {
        return Step::Fail(NtStatus::ACCESS_DENIED);
    }
    let signing_required = ctx.server.config.signing_required
        || request.security_mode.contains(SecurityMode::SIGNING_REQUIRED)
        || volume.protection == Protection::Sign;
    let Some(counted) = volume.used.sessions.take(1) else {
        return Step::Fail(NtStatus::INSUFFICIENT_RESOURCES);
    };
    if let Err(status) = ctx.core.count_for(&volume) {
        return Step::Fail(status);
    }
    let session = Arc::new(Session::new(NewSession {
        id,
        username: done.who.user.clone(),
        volume_id: volume.id.clone(),
        dialect,
        client_guid,
        cipher,
        signing: signing.clone(),
        sealing,
        established: ctx.now,
        expires: done.who.expires,
        signing_required,
        encrypt,
        connection: ctx.core.id,
        link: ctx.core.link(),
        counted,
    }));
    ctx.server.sessions().insert(id, Arc::clone(&session));
    add_channel(ctx, &session, signing, FIRST_NONCE_PART);
    replace_previous(ctx, request.previous_session_id, &session);
    ctx.core.events.push_back(Event::SessionEstablished { session_id: id, username: done.who.user.clone() });
    let mut flags = SessionFlags::empty();
    if encrypt && dialect != Dialect::SMB2_0_2 && dialect != Dialect::SMB2_1 {
        flags.insert(SessionFlags::ENCRYPT_DATA);
    }
    Step::Reply(reply(NtStatus::SUCCESS, flags, &done.who.token))
}

/// [MS-SMB2] 3.3.5.5.3: a client that reconnects names the session it lost. If it belonged to the same user, it ends.
fn replace_previous(ctx: &mut Ctx<'_>, previous: u64, session: &Session) {
    if previous == 0 || previous == session.id {
        return;
    }
    let same_user = ctx
        .server
        .sessions()
        .get(&previous)
        .is_some_and(|s| s.username.eq_ignore_ascii_case(&session.username));
    if !same_user {
        return;
    }
    ctx.core.lose_session(ctx.server, ctx.now.instant, previous);
}
