//! The rounds of an authentication, and its result.

use std::cell::RefCell;
use std::sync::Arc;

use crate::auth::{Acceptor, AcceptorConfig, Authenticated, Step as AuthStep};
use crate::crypto::{KeyDerivation, NonceSequence, PreauthHash, SigningKey};
use crate::engine::channels::NoncePart;
use crate::engine::lookup::Lookup;
use crate::engine::pending_auth::PendingAuth;
use crate::engine::reports::Event;
use crate::engine::request::channel::{Channel, Sealing};
use crate::engine::request::core::Negotiated;
use crate::engine::request::step::{Ctx, Reply};
use crate::engine::session::Session;
use crate::limits;
use crate::status::NtStatus;
use crate::wire::Dialect;
use crate::wire::session_setup::{Request, Response, SessionFlags};

/// The authenticated user, and the hash over the messages of the authentication.
pub(super) struct Proof {
    pub(super) who: Authenticated,
    pub(super) preauth: PreauthHash,
}

pub(super) fn reply(status: NtStatus, session_flags: SessionFlags, token: &[u8]) -> Reply {
    let mut body = Vec::new();
    Response { session_flags, security_buffer: token }.encode(&mut body);
    Reply { status, ..Reply::ok(body) }
}

/// Begins an authentication that is stored by session id between its rounds.
pub(super) fn begin_pending(ctx: &mut Ctx<'_>, id: u64, binding: bool) -> Result<(), NtStatus> {
    let (pending, total) = (ctx.core.pending.len(), ctx.core.channels.len());
    if pending >= limits::SESSIONS_PENDING_PER_CONNECTION_MAX || total >= limits::SESSIONS_PER_CONNECTION_MAX
    {
        return Err(NtStatus::INSUFFICIENT_RESOURCES);
    }
    let pending = begin(ctx, binding);
    ctx.core.pending.insert(id, pending);
    Ok(())
}

pub(super) fn begin(ctx: &mut Ctx<'_>, binding: bool) -> PendingAuth {
    let random = ctx.core.random::<16>();
    let name = &ctx.server.config.server_name;
    let config = AcceptorConfig {
        nb_domain: name.to_uppercase(),
        nb_computer: name.to_uppercase(),
        dns_domain: String::new(),
        dns_computer: name.to_lowercase(),
        target_names: ctx.server.config.target_names.clone(),
        ntlm: ctx.server.config.ntlm,
        kerberos: ctx.server.config.kerberos.clone(),
    };
    let preauth = ctx.core.negotiated.as_ref().map(|n| n.preauth).unwrap_or_default();
    PendingAuth { acceptor: Acceptor::new(&config, random, ctx.now.wall), preauth, rounds: 0, binding }
}

pub(super) enum AuthOutcome {
    Continue(Vec<u8>),
    Done(Proof),
}

/// Runs one round. On failure the authentication is discarded; a session that was being re-authenticated is ended
/// ([MS-SMB2] 3.3.5.5.2).
pub(super) fn authenticate(
    ctx: &mut Ctx<'_>,
    id: u64,
    reauth: bool,
    request: &Request<'_>,
    message: &[u8],
) -> Result<AuthOutcome, NtStatus> {
    let mut pending = if reauth {
        ctx.core.channels.get_mut(&id).and_then(|c| c.reauth.take())
    } else {
        ctx.core.pending.remove(&id)
    }
    .ok_or(NtStatus::USER_SESSION_DELETED)?;
    pending.preauth.update(message);
    pending.rounds += 1;
    let claimed = RefCell::new(String::new());
    let server = ctx.server;
    let outcome = pending.acceptor.step(request.security_buffer, &|user, _domain| {
        *claimed.borrow_mut() = user.to_owned();
        server.hashes_of(user)
    });
    match outcome {
        Ok(AuthStep::Continue(_)) if pending.rounds >= limits::AUTH_ROUNDS_MAX => {
            Err(NtStatus::LOGON_FAILURE)
        }
        Ok(AuthStep::Continue(token)) => {
            if reauth {
                if let Some(channel) = ctx.core.channels.get_mut(&id) {
                    channel.reauth = Some(pending);
                }
            } else {
                ctx.core.pending.insert(id, pending);
            }
            Ok(AuthOutcome::Continue(token))
        }
        Ok(AuthStep::Done(who)) => Ok(AuthOutcome::Done(Proof { who, preauth: pending.preauth })),
        Err(error) => {
            if reauth {
                // The refusal is still signed with the session's key, as the client expects.
                if let Some(channel) = ctx.core.channels.get(&id) {
                    ctx.request.signing = Some(channel.signing.clone());
                }
                ctx.core.end_session(ctx.server, ctx.now.instant, id);
            }
            let (username, reason) = (claimed.into_inner(), error.to_string());
            ctx.core.events.push_back(Event::AuthenticationFailed { username, reason });
            Err(error.status())
        }
    }
}

/// The key derivation of the dialect; `None` for dialects that sign with the session key itself.
pub(super) fn derivation<'a>(negotiated: &Negotiated, done: &'a Proof) -> Option<KeyDerivation<'a>> {
    match negotiated.dialect {
        Dialect::SMB2_0_2 | Dialect::SMB2_1 => None,
        Dialect::SMB3_1_1 => Some(KeyDerivation::Smb311(&done.preauth)),
        _ => Some(KeyDerivation::Smb30),
    }
}

/// The signing key of a channel ([MS-SMB2] 3.3.5.5.3). The key of the first channel is also the key of the session.
pub(super) fn signing_key(negotiated: &Negotiated, done: &Proof) -> SigningKey {
    let key = &done.who.session_key;
    match derivation(negotiated, done) {
        None => SigningKey::new(negotiated.signing, key),
        Some(derivation) => SigningKey::derive(negotiated.signing, derivation, key),
    }
}

/// Adds the session to this connection. `part` makes its nonces differ from those of all other channels.
pub(super) fn add_channel(ctx: &mut Ctx<'_>, session: &Arc<Session>, signing: SigningKey, part: NoncePart) {
    // A random value in the lower half: unpredictable, and far from exhaustion.
    let nonce_start = u64::from_le_bytes(ctx.core.random::<8>()) >> 1;
    let seal = session.sealing.clone().map(|(sealing, opening)| Sealing {
        sealing,
        opening,
        nonces: NonceSequence::new(part, nonce_start),
    });
    let channel =
        Channel { session: Arc::clone(session), signing, seal, lookup: Lookup::new(), reauth: None };
    ctx.core.channels.insert(session.id, channel);
}
