//! The server's side of Kerberos ([RFC 4120] 3.2.3) as a mechanism of the GSS-API ([RFC 4121]).
//!
//! A client presents a ticket that the KDC has encrypted with a key of the keytab. One message is enough, or two if the
//! client requires the server to prove possession of the key (mutual authentication). The server never asserts a subkey:
//! cifs.ko does not read an AP-REP, so the context's key is the client's ([ADR 28](../../../../docs/adr/0028-kerberos.md)).

mod encryption;
mod keytab;
mod messages;
mod replays;
#[cfg(test)]
mod tests;

use std::sync::{Arc, PoisonError, RwLock};

use aws_lc_rs::constant_time;

use self::encryption::{EncryptionType, Key, Usage};
pub use self::keytab::{Keytab, KeytabError};
use self::messages::{ApReq, Authenticator, TicketPart};
use self::replays::Replays;
use super::AuthError;
use super::acceptor::{Lookup, MechanismStep, Proven};
use super::der::{self, Reader};
use crate::wire::FileTime;

/// 1.2.840.113554.1.2.2, [RFC 4121] 1
pub(super) const KERBEROS: &[u8] = &[0x2A, 0x86, 0x48, 0x86, 0xF7, 0x12, 0x01, 0x02, 0x02];
/// 1.2.840.48018.1.2.2: the same with one bit lost, which Windows offers first ([MS-SPNG] 1.9).
pub(super) const MS_KERBEROS: &[u8] = &[0x2A, 0x86, 0x48, 0x82, 0xF7, 0x12, 0x01, 0x02, 0x02];

/// Token identifiers ([RFC 4121] 4.1).
const AP_REQ_TOKEN: [u8; 2] = [1, 0];
const AP_REP_TOKEN: [u8; 2] = [2, 0];

/// Maximum difference between the clocks of clients, KDC and server: the five minutes of [RFC 4120] 1.6.
const SKEW_SECONDS: i64 = 300;

/// State shared by all exchanges of a server: its keys, and the authenticators already seen.
#[derive(Debug)]
pub struct Kerberos {
    keytab: RwLock<Arc<Keytab>>,
    replays: Replays,
}

impl Kerberos {
    /// Creates it with the keys of a keytab.
    #[must_use]
    pub fn new(keytab: Keytab) -> Self {
        Self { keytab: RwLock::new(Arc::new(keytab)), replays: Replays::default() }
    }

    /// Replaces the keys; sessions stay.
    pub fn replace(&self, keytab: Keytab) {
        *self.keytab.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keytab);
    }

    fn keytab(&self) -> Arc<Keytab> {
        Arc::clone(&self.keytab.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// One exchange.
pub(super) struct KerberosAcceptor {
    shared: Arc<Kerberos>,
    confounder: [u8; 16],
    now: i64,
    /// The key of the context, once it is established.
    key: Option<Key>,
}

/// A client that has proven possession of the ticket's session key.
struct Accepted {
    ticket: TicketPart,
    authenticator: Authenticator,
    mutual: bool,
}

impl KerberosAcceptor {
    /// `confounder` must be random and fresh.
    pub(super) fn new(shared: Arc<Kerberos>, confounder: [u8; 16], now: FileTime) -> Self {
        Self { shared, confounder, now: now.to_unix().0, key: None }
    }

    pub(super) fn step(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<MechanismStep, AuthError> {
        if self.key.is_some() {
            return Err(AuthError::OutOfOrder("Kerberos exchange is over"));
        }
        let Accepted { ticket, authenticator, mutual } = self.accept(token)?;
        let [user] = ticket.client.as_slice() else {
            return refuse("the ticket is not a user's: its name has several components");
        };
        if lookup(user, &ticket.realm).is_empty() {
            return Err(AuthError::LogonFailure);
        }
        // [RFC 4120] 3.2.4: encrypted with the session key of the ticket, even if there is a subkey.
        let token = mutual.then(|| {
            let part = messages::ap_rep_part(authenticator.time, authenticator.microseconds);
            let cipher = ticket.key.encrypt(Usage::ApRepPart, self.confounder, &part);
            frame(AP_REP_TOKEN, &messages::ap_rep(ticket.key.etype(), &cipher))
        });
        let key = authenticator.subkey.unwrap_or(ticket.key);
        let proven = Proven {
            exported_key: key.as_bytes().to_vec().into(),
            user: user.clone(),
            domain: ticket.realm,
            workstation: String::new(),
            expires: Some(FileTime::from_unix(ticket.end, 0)),
        };
        self.key = Some(key);
        Ok(MechanismStep::Done { token, proven })
    }

    /// [RFC 4120] 3.2.3
    fn accept(&self, token: &[u8]) -> Result<Accepted, AuthError> {
        let request = ApReq::parse(unframe(token, AP_REQ_TOKEN)?)?;
        if request.options.has(messages::USE_SESSION_KEY) {
            return refuse("the ticket is one between users");
        }
        let ticket = self.decrypt_ticket(&request.ticket)?;
        if ticket.flags.has(messages::INVALID) || ticket.start - SKEW_SECONDS > self.now {
            return refuse("the ticket is not valid yet: are the clocks right?");
        }
        if ticket.end + SKEW_SECONDS < self.now {
            return refuse("the ticket has expired");
        }
        let sealed = &request.authenticator;
        if sealed.etype != ticket.key.etype() as i32 {
            return Err(AuthError::Malformed("the authenticator is of another encryption type than its key"));
        }
        let plain = ticket
            .key
            .decrypt(Usage::ApReqAuthenticator, sealed.cipher)
            .map_err(|_| AuthError::LogonFailure)?;
        let authenticator = Authenticator::parse(&plain)?;
        if (&authenticator.realm, &authenticator.client) != (&ticket.realm, &ticket.client) {
            return refuse("ticket and authenticator are of different clients");
        }
        if (authenticator.time - self.now).abs() > SKEW_SECONDS {
            return refuse("the clocks of client and server are more than five minutes apart");
        }
        let mutual = match &authenticator.checksum {
            Some((GSS_CHECKSUM, checksum)) => wants_mutual(checksum)?,
            // Without the GSS-API checksum: legacy SMB clients.
            _ => request.options.has(messages::MUTUAL_REQUIRED),
        };
        self.shared.replays.note(sealed.cipher, authenticator.time + SKEW_SECONDS, self.now)?;
        Ok(Accepted { ticket, authenticator, mutual })
    }

    fn decrypt_ticket(&self, ticket: &messages::Ticket<'_>) -> Result<TicketPart, AuthError> {
        let keytab = self.shared.keytab();
        let sealed = &ticket.encrypted;
        let Some(etype) = EncryptionType::from_number(sealed.etype) else {
            return refuse(format!(
                "{ticket} is of encryption type {}, which is not accepted: give this principal AES keys",
                sealed.etype
            ));
        };
        let mut candidates = keytab.candidates(&ticket.realm, etype, sealed.version);
        let opened = candidates.find_map(|entry| {
            entry.key.decrypt(Usage::Ticket, sealed.cipher).ok().map(|plain| (entry, plain))
        });
        let Some((entry, plain)) = opened else {
            return refuse(format!(
                "no key of the keytab opens {ticket}: if that is this server, add its new keys to the keytab, \
                 or renew the client's tickets where the keytab is newer"
            ));
        };
        let part = TicketPart::parse(&plain)?;
        // Users of other realms would be mistaken for those of this realm with the same name.
        if part.realm != entry.realm {
            return refuse("the user is of another realm");
        }
        Ok(part)
    }

    /// GSS_GetMIC of the server's first message ([RFC 4121] 4.2.6.1), once a key is established.
    pub(super) fn mic(&self, message: &[u8]) -> Option<Vec<u8>> {
        let key = self.key.as_ref()?;
        // The AP-REP has no initial sequence number, so it is zero.
        let mut header = [0xFF; 16];
        header[..3].copy_from_slice(&[4, 4, SENT_BY_ACCEPTOR]);
        header[8..].fill(0);
        Some([&header[..], &key.checksum(Usage::AcceptorSign, &[message, &header])].concat())
    }

    /// GSS_VerifyMIC of the client's first message.
    pub(super) fn verify_mic(&self, message: &[u8], mic: &[u8]) -> bool {
        let (Some(key), Some((header, checksum))) = (&self.key, mic.split_at_checked(16)) else {
            return false;
        };
        let expected = key.checksum(Usage::InitiatorSign, &[message, header]);
        header[..8] == [4, 4, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF]
            && constant_time::verify_slices_are_equal(&expected, checksum).is_ok()
    }
}

/// For the log; the peer is only informed that its logon failed.
fn refuse<T>(why: impl Into<String>) -> Result<T, AuthError> {
    Err(AuthError::Refused(why.into()))
}

/// The flag of a token that the acceptor sends ([RFC 4121] 4.2.2).
const SENT_BY_ACCEPTOR: u8 = 1;

/// The checksum type that carries the GSS-API's flags instead of a checksum ([RFC 4121] 4.1.1).
const GSS_CHECKSUM: i32 = 0x8003;

/// GSS_C_MUTUAL_FLAG of the checksum. Channel bindings, which SMB does not use, and delegated credentials are ignored.
fn wants_mutual(checksum: &[u8]) -> Result<bool, AuthError> {
    const MUTUAL: u32 = 2;
    match checksum {
        [16, 0, 0, 0, rest @ ..] if rest.len() >= 20 => {
            let flags = rest[16..20].try_into().map_or(0, u32::from_le_bytes);
            Ok(flags & MUTUAL != 0)
        }
        _ => Err(AuthError::Malformed("a GSS-API checksum of the wrong length")),
    }
}

/// Wraps a message in the GSS-API's frame ([RFC 4121] 4.1).
fn frame(token_id: [u8; 2], message: &[u8]) -> Vec<u8> {
    der::encode(der::APPLICATION_0, &[&der::encode(der::OID, &[KERBEROS]), &token_id, message])
}

fn unframe(token: &[u8], token_id: [u8; 2]) -> Result<&[u8], AuthError> {
    let mut frame = Reader::new(der::only(token, der::APPLICATION_0)?);
    if frame.expect(der::OID)? != KERBEROS {
        return Err(AuthError::Malformed("the token is not one of Kerberos"));
    }
    frame.rest().strip_prefix(&token_id).ok_or(AuthError::Malformed("the token is not an AP-REQ"))
}
