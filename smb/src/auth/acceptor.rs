//! The server's side of SESSION_SETUP's security exchange: SPNEGO around a mechanism, or NTLMSSP bare.

use std::fmt;

use aws_lc_rs::constant_time;

use super::ntlm::keys::Side;
use super::ntlm::{NtlmAcceptor, message};
use super::spnego::{self, NegState, NegTokenInit, NegTokenResp};
use super::{AuthError, NtHash};
use crate::crypto::SessionKey;
use crate::limits;

/// The names by which the server introduces itself (MsvAv pairs, [MS-NLMP] 2.2.2.1). Each must be shorter than 1 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptorConfig {
    /// NetBIOS name of the domain or workgroup.
    pub nb_domain: String,
    /// NetBIOS name of the server.
    pub nb_computer: String,
    /// DNS name of the domain; may be empty.
    pub dns_domain: String,
    /// DNS name of the server.
    pub dns_computer: String,
    /// Host names by which clients mean this server. Where there are any, the SPN of a client that sends one (MsvAvTargetName) must
    /// be `cifs/` and one of them; where there are none, it is not judged.
    pub target_names: Vec<String>,
}

/// Gives the hashes under which a user may log on, none if there is no such user; several while a password is rotated.
/// Called with the user and domain names exactly as the client sent them.
pub type Lookup<'a> = &'a dyn Fn(&str, &str) -> Vec<NtHash>;

/// What a token led to.
#[derive(Debug)]
pub enum Step {
    /// Send this with STATUS_MORE_PROCESSING_REQUIRED and wait for the next token.
    Continue(Vec<u8>),
    /// The user is authenticated.
    Done(Authenticated),
}

/// A user who has proven to know the password.
#[derive(Debug)]
pub struct Authenticated {
    /// To be sent with STATUS_SUCCESS; may be empty.
    pub token: Vec<u8>,
    /// The user's name as sent.
    pub user: String,
    /// The user's domain as sent; proven to be what the client meant, not to exist.
    pub domain: String,
    /// What the client calls itself. Unproven.
    pub workstation: String,
    /// The key that both sides now share.
    pub session_key: SessionKey,
}

/// What a mechanism says about a token.
pub(super) enum MechanismStep {
    Continue(Vec<u8>),
    Done(Proven),
}

/// What a mechanism has proven.
pub(super) struct Proven {
    pub(super) session_key: SessionKey,
    pub(super) user: String,
    pub(super) domain: String,
    pub(super) workstation: String,
}

/// A mechanism inside of SPNEGO. One variant per mechanism: Kerberos goes here.
enum Mechanism {
    Ntlm(NtlmAcceptor),
}

impl Mechanism {
    fn oid(&self) -> &'static [u8] {
        match self {
            Mechanism::Ntlm(_) => spnego::NTLMSSP,
        }
    }

    fn step(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<MechanismStep, AuthError> {
        match self {
            Mechanism::Ntlm(ntlm) => ntlm.step(token, lookup),
        }
    }

    /// GSS_GetMIC of the first message of one side.
    fn mic(&self, side: Side, message: &[u8]) -> Option<[u8; 16]> {
        match self {
            Mechanism::Ntlm(ntlm) => ntlm.signature(side, message),
        }
    }
}

/// One SESSION_SETUP exchange, server side.
pub struct Acceptor {
    mechanism: Mechanism,
    framing: Framing,
    failed: bool,
}

enum Framing {
    /// Nothing received yet.
    Unknown,
    /// NTLMSSP without SPNEGO: what cifs.ko sends.
    Bare,
    Spnego {
        /// DER of the client's mechanism list, for mechListMIC.
        mech_list: Vec<u8>,
        /// [RFC 4178] 5: a mechanism that the client did not prefer was chosen, so the list needs protection.
        mic_required: bool,
    },
    Done,
}

impl Acceptor {
    /// Begins an exchange. `challenge` must be random and fresh; `now` is the time as a FILETIME.
    pub fn new(config: &AcceptorConfig, challenge: [u8; 8], now: u64) -> Self {
        Acceptor {
            mechanism: Mechanism::Ntlm(NtlmAcceptor::new(config, challenge, now)),
            framing: Framing::Unknown,
            failed: false,
        }
    }

    /// Takes the security buffer of the next SESSION_SETUP request.
    pub fn step(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        if self.failed {
            return Err(AuthError::OutOfOrder("exchange has failed before"));
        }
        let step = self.step_once(token, lookup);
        self.failed = step.is_err();
        step
    }

    fn step_once(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        if token.len() > limits::SECURITY_BLOB_BYTES_MAX {
            return Err(AuthError::Malformed("security token is too long"));
        }
        match std::mem::replace(&mut self.framing, Framing::Done) {
            Framing::Unknown if token.starts_with(message::SIGNATURE) => self.bare(token, lookup),
            Framing::Unknown => self.spnego_init(token, lookup),
            Framing::Bare => self.bare(token, lookup),
            Framing::Spnego { mech_list, mic_required } => {
                self.spnego_next(token, lookup, mech_list, mic_required)
            }
            Framing::Done => Err(AuthError::OutOfOrder("exchange is over")),
        }
    }

    fn bare(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        Ok(match self.mechanism.step(token, lookup)? {
            MechanismStep::Continue(token) => {
                self.framing = Framing::Bare;
                Step::Continue(token)
            }
            MechanismStep::Done(proven) => Step::Done(authenticated(proven, Vec::new())),
        })
    }

    /// [RFC 4178] 3.2, [MS-SPNG] 3.2.5.2
    fn spnego_init(&mut self, token: &[u8], lookup: Lookup<'_>) -> Result<Step, AuthError> {
        let init = NegTokenInit::parse(token)?;
        let chosen = self.mechanism.oid();
        let place = init.mech_types.iter().position(|&oid| oid == chosen);
        let place = place.ok_or(AuthError::Incompatible("client offers no mechanism that we know"))?;
        let preferred = place == 0;
        // The optimistic token belongs to the preferred mechanism; another one's is not ours to read.
        let optimistic = init.mech_token.filter(|_| preferred);
        let response_token = match optimistic {
            Some(token) => match self.mechanism.step(token, lookup)? {
                MechanismStep::Continue(token) => Some(token),
                MechanismStep::Done(_) => return Err(AuthError::OutOfOrder("mechanism is done too early")),
            },
            None => None,
        };
        self.framing = Framing::Spnego { mech_list: init.mech_list.to_vec(), mic_required: !preferred };
        let state = if preferred { NegState::AcceptIncomplete } else { NegState::RequestMic };
        let response = NegTokenResp {
            neg_state: Some(state as u8),
            supported_mech: Some(chosen),
            response_token: response_token.as_deref(),
            mech_list_mic: None,
        };
        Ok(Step::Continue(response.encode()))
    }

    fn spnego_next(
        &mut self,
        token: &[u8],
        lookup: Lookup<'_>,
        mech_list: Vec<u8>,
        mic_required: bool,
    ) -> Result<Step, AuthError> {
        let request = NegTokenResp::parse(token)?;
        if request.neg_state == Some(NegState::Reject as u8) {
            return Err(AuthError::Incompatible("client rejects the mechanism"));
        }
        let mech_token = request.response_token.ok_or(AuthError::Malformed("no mechanism token"))?;
        match self.mechanism.step(mech_token, lookup)? {
            MechanismStep::Continue(token) => {
                self.framing = Framing::Spnego { mech_list, mic_required };
                let response = NegTokenResp {
                    neg_state: Some(NegState::AcceptIncomplete as u8),
                    response_token: Some(&token),
                    ..NegTokenResp::default()
                };
                Ok(Step::Continue(response.encode()))
            }
            MechanismStep::Done(proven) => {
                let mic = match request.mech_list_mic {
                    Some(mic) => Some(self.exchange_mics(mic, &mech_list)?),
                    None if mic_required => return Err(AuthError::LogonFailure),
                    None => None,
                };
                let response = NegTokenResp {
                    neg_state: Some(NegState::AcceptCompleted as u8),
                    mech_list_mic: mic.as_ref().map(<[u8; 16]>::as_slice),
                    ..NegTokenResp::default()
                };
                Ok(Step::Done(authenticated(proven, response.encode())))
            }
        }
    }

    /// Verifies the client's mechListMIC and gives ours. [RFC 4178] 5
    fn exchange_mics(&self, mic: &[u8], mech_list: &[u8]) -> Result<[u8; 16], AuthError> {
        const DONE: &str = "a mechanism that is done has its key";
        let expected = self.mechanism.mic(Side::Client, mech_list).expect(DONE);
        constant_time::verify_slices_are_equal(&expected, mic).map_err(|_| AuthError::LogonFailure)?;
        Ok(self.mechanism.mic(Side::Server, mech_list).expect(DONE))
    }
}

fn authenticated(proven: Proven, token: Vec<u8>) -> Authenticated {
    let Proven { session_key, user, domain, workstation } = proven;
    Authenticated { token, user, domain, workstation, session_key }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Acceptor(..)")
    }
}
