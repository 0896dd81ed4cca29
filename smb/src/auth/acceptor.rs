//! The server's side of SESSION_SETUP's security exchange: SPNEGO around a mechanism, or NTLMSSP bare.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::constant_time;
use zeroize::Zeroizing;

use super::kerberos::{self, Kerberos, KerberosAcceptor};
use super::ntlm::keys::Side;
use super::ntlm::{NtlmAcceptor, message};
use super::spnego::{self, NegState, NegTokenInit, NegTokenResp};
use super::{AuthError, NtHash};
use crate::crypto::SessionKey;
use crate::limits;
use crate::wire::FileTime;

/// Accepted mechanisms, and the names that the server announces (MsvAv pairs, [MS-NLMP] 2.2.2.1). Each must be shorter than 1
/// KiB.
#[derive(Clone, Debug)]
pub struct AcceptorConfig {
    /// NetBIOS name of the domain or workgroup.
    pub nb_domain: String,
    /// NetBIOS name of the server.
    pub nb_computer: String,
    /// DNS name of the domain; may be empty.
    pub dns_domain: String,
    /// DNS name of the server.
    pub dns_computer: String,
    /// Host names that clients use for this server. If there are any, a client that sends an SPN (MsvAvTargetName) must send
    /// `cifs/` and one of them; if there are none, the SPN is not checked.
    pub target_names: Vec<String>,
    /// Whether NTLM is accepted.
    pub ntlm: bool,
    /// The Kerberos keys; `None` if Kerberos is not accepted.
    pub kerberos: Option<Arc<Kerberos>>,
}

/// Returns the hashes with which a user can log on, none if the user does not exist; several while a password is rotated.
/// Called with the user and domain names exactly as the client sent them.
pub type Lookup<'a> = &'a dyn Fn(&str, &str) -> Vec<NtHash>;

/// The result of a token.
#[derive(Debug)]
pub enum Step {
    /// Send this with STATUS_MORE_PROCESSING_REQUIRED and wait for the next token.
    Continue(Vec<u8>),
    /// The user is authenticated.
    Done(Authenticated),
}

/// A user who has proven knowledge of the password, or possession of a ticket.
#[derive(Debug)]
pub struct Authenticated {
    /// Sent with STATUS_SUCCESS; may be empty.
    pub token: Vec<u8>,
    /// The user's name as sent.
    pub user: String,
    /// The user's domain as sent: proven to be the domain that the client used, not to exist; with Kerberos the realm.
    pub domain: String,
    /// The client's name for itself. Unproven.
    pub workstation: String,
    /// The key that both sides share: Session.SessionKey.
    pub session_key: SessionKey,
    /// The same key untruncated: Session.FullSessionKey.
    pub full_session_key: Zeroizing<Vec<u8>>,
    /// When the authentication expires: Session.ExpirationTime.
    pub expires: Option<FileTime>,
}

/// A mechanism's result for a token.
pub(super) enum MechanismStep {
    Continue(Vec<u8>),
    /// Includes the token for the client, if it needs one.
    Done {
        token: Option<Vec<u8>>,
        proven: Proven,
    },
}

/// The identity and key that a mechanism has proven.
pub(super) struct Proven {
    pub(super) exported_key: Zeroizing<Vec<u8>>,
    pub(super) user: String,
    pub(super) domain: String,
    pub(super) workstation: String,
    pub(super) expires: Option<FileTime>,
}

/// A mechanism within SPNEGO, one variant each.
enum Mechanism {
    Ntlm(NtlmAcceptor),
    Kerberos(KerberosAcceptor),
}

impl Mechanism {
    fn step(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<MechanismStep, AuthError> {
        match self {
            Mechanism::Ntlm(ntlm) => ntlm.step(token, lookup),
            Mechanism::Kerberos(kerberos) => kerberos.step(token, lookup),
        }
    }

    /// GSS_VerifyMIC of the client's first message.
    fn verify_mic(&self, message: &[u8], mic: &[u8]) -> bool {
        match self {
            Mechanism::Ntlm(ntlm) => ntlm
                .signature(Side::Client, message)
                .is_some_and(|expected| constant_time::verify_slices_are_equal(&expected, mic).is_ok()),
            Mechanism::Kerberos(kerberos) => kerberos.verify_mic(message, mic),
        }
    }

    /// GSS_GetMIC of the server's first message.
    fn mic(&self, message: &[u8]) -> Option<Vec<u8>> {
        match self {
            Mechanism::Ntlm(ntlm) => ntlm.signature(Side::Server, message).map(Vec::from),
            Mechanism::Kerberos(kerberos) => kerberos.mic(message),
        }
    }
}

/// One SESSION_SETUP exchange, server side.
pub struct Acceptor {
    ntlm: Option<NtlmAcceptor>,
    kerberos: Option<KerberosAcceptor>,
    state: State,
}

enum State {
    /// Nothing received yet.
    Start,
    /// NTLMSSP without SPNEGO, as sent by cifs.ko.
    Bare(NtlmAcceptor),
    Spnego {
        mechanism: Mechanism,
        /// DER of the client's mechanism list, for mechListMIC.
        mech_list: Vec<u8>,
        /// [RFC 4178] 5: the chosen mechanism is not the client's preferred one, so the list needs protection.
        mic_required: bool,
    },
    /// Done or failed.
    Over,
}

impl Acceptor {
    /// Begins an exchange. `random` must be random and fresh; `now` is the time as a FILETIME.
    pub fn new(config: &AcceptorConfig, random: [u8; 16], now: FileTime) -> Self {
        let challenge = std::array::from_fn(|at| random[at]);
        Acceptor {
            ntlm: config.ntlm.then(|| NtlmAcceptor::new(config, challenge, now.0)),
            kerberos: config
                .kerberos
                .as_ref()
                .map(|kerberos| KerberosAcceptor::new(Arc::clone(kerberos), random, now)),
            state: State::Start,
        }
    }

    /// Processes the security buffer of the next SESSION_SETUP request. An exchange that has failed stays failed.
    pub fn step(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        if token.len() > limits::SECURITY_BLOB_BYTES_MAX {
            self.state = State::Over;
            return Err(AuthError::Malformed("security token is too long"));
        }
        match std::mem::replace(&mut self.state, State::Over) {
            State::Start if token.starts_with(message::SIGNATURE) => {
                let ntlm = self.ntlm.take().ok_or(NO_NTLM)?;
                self.bare(ntlm, token, lookup)
            }
            State::Start => self.spnego_init(token, lookup),
            State::Bare(ntlm) => self.bare(ntlm, token, lookup),
            State::Spnego { mechanism, mech_list, mic_required } => {
                self.spnego_next(token, lookup, mechanism, mech_list, mic_required)
            }
            State::Over => Err(AuthError::OutOfOrder("exchange is over or has failed before")),
        }
    }

    fn bare(&mut self, mut ntlm: NtlmAcceptor, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        Ok(match ntlm.step(token, lookup)? {
            MechanismStep::Continue(token) => {
                self.state = State::Bare(ntlm);
                Step::Continue(token)
            }
            MechanismStep::Done { proven, .. } => Step::Done(authenticated(proven, Vec::new())),
        })
    }

    /// Returns the mechanism to use, its identifier, and whether the client prefers it. Kerberos is used only if preferred: a
    /// client without a ticket lists it later or not at all.
    fn choose<'a>(&mut self, mech_types: &[&'a [u8]]) -> Result<(Mechanism, &'a [u8], bool), AuthError> {
        let first = *mech_types.first().ok_or(AuthError::Malformed("an empty list of mechanisms"))?;
        if [kerberos::KERBEROS, kerberos::MS_KERBEROS].contains(&first)
            && let Some(kerberos) = self.kerberos.take()
        {
            return Ok((Mechanism::Kerberos(kerberos), first, true));
        }
        let place = mech_types.iter().position(|&oid| oid == spnego::NTLMSSP);
        let place = place.ok_or(AuthError::Incompatible("client offers no mechanism that we know"))?;
        let ntlm = self.ntlm.take().ok_or(NO_NTLM)?;
        Ok((Mechanism::Ntlm(ntlm), mech_types[place], place == 0))
    }

    /// [RFC 4178] 3.2, [MS-SPNG] 3.2.5.2
    fn spnego_init(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        let init = NegTokenInit::parse(token)?;
        let (mut mechanism, chosen, preferred) = self.choose(&init.mech_types)?;
        // The optimistic token belongs to the preferred mechanism; a token for another mechanism is ignored.
        let response_token = match init.mech_token.filter(|_| preferred) {
            Some(token) => match mechanism.step(token, lookup)? {
                MechanismStep::Continue(token) => Some(token),
                // If the first mechanism is used, the client's list has not been modified ([RFC 4178] 5), so no MIC is
                // needed.
                MechanismStep::Done { token, proven } => {
                    let response = NegTokenResp {
                        neg_state: Some(NegState::AcceptCompleted as u8),
                        supported_mech: Some(chosen),
                        response_token: token.as_deref(),
                        mech_list_mic: None,
                    };
                    return Ok(Step::Done(authenticated(proven, response.encode())));
                }
            },
            None => None,
        };
        let state = if preferred { NegState::AcceptIncomplete } else { NegState::RequestMic };
        let response = NegTokenResp {
            neg_state: Some(state as u8),
            supported_mech: Some(chosen),
            response_token: response_token.as_deref(),
            mech_list_mic: None,
        };
        let response = response.encode();
        self.state =
            State::Spnego { mechanism, mech_list: init.mech_list.to_vec(), mic_required: !preferred };
        Ok(Step::Continue(response))
    }

    fn spnego_next(
        &mut self,
        token: &[u8],
        lookup: Lookup<'_>,
        mut mechanism: Mechanism,
        mech_list: Vec<u8>,
        mic_required: bool,
    ) -> Result<Step, AuthError> {
        let request = NegTokenResp::parse(token)?;
        if request.neg_state == Some(NegState::Reject as u8) {
            return Err(AuthError::Incompatible("client rejects the mechanism"));
        }
        let mech_token = request.response_token.ok_or(AuthError::Malformed("no mechanism token"))?;
        match mechanism.step(mech_token, lookup)? {
            MechanismStep::Continue(token) => {
                self.state = State::Spnego { mechanism, mech_list, mic_required };
                let response = NegTokenResp {
                    neg_state: Some(NegState::AcceptIncomplete as u8),
                    response_token: Some(&token),
                    ..NegTokenResp::default()
                };
                Ok(Step::Continue(response.encode()))
            }
            MechanismStep::Done { token, proven } => {
                let mic = match request.mech_list_mic {
                    Some(mic) if mechanism.verify_mic(&mech_list, mic) => mechanism.mic(&mech_list),
                    None if !mic_required => None,
                    _ => return Err(AuthError::LogonFailure),
                };
                let response = NegTokenResp {
                    neg_state: Some(NegState::AcceptCompleted as u8),
                    response_token: token.as_deref(),
                    mech_list_mic: mic.as_deref(),
                    ..NegTokenResp::default()
                };
                Ok(Step::Done(authenticated(proven, response.encode())))
            }
        }
    }
}

const NO_NTLM: AuthError = AuthError::Incompatible("client wants NTLM, which is switched off (server.ntlm)");

fn authenticated(proven: Proven, token: Vec<u8>) -> Authenticated {
    let Proven { exported_key, user, domain, workstation, expires } = proven;
    let session_key = SessionKey::new(&exported_key);
    Authenticated { token, user, domain, workstation, session_key, full_session_key: exported_key, expires }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Acceptor(..)")
    }
}
