//! The client's side: SPNEGO and NTLMv2 as an initiator, for tests and tools.

use std::fmt;

use aws_lc_rs::constant_time;
use zeroize::Zeroizing;

use super::ntlm::keys::{self, Key, Side};
use super::ntlm::message::{self, AvPairs, Builder, av, flags};
use super::spnego::{self, NegTokenResp};
use super::{AuthError, NtHash};
use crate::crypto::SessionKey;

/// The client's credentials and options. Challenge and session key must be random and fresh outside of tests.
#[derive(Clone, Debug)]
pub struct InitiatorConfig {
    /// The user's name.
    pub user: String,
    /// The user's domain; may be empty.
    pub domain: String,
    /// The client's name for itself.
    pub workstation: String,
    /// The password's hash.
    pub nt_hash: NtHash,
    /// Wrap NTLMSSP in SPNEGO.
    pub spnego: bool,
    /// ChallengeFromClient.
    pub challenge: [u8; 8],
    /// The SPN of the intended server, like `cifs/server`; `None` sends none.
    pub target_name: Option<String>,
    /// RandomSessionKey; `None` requests no key exchange.
    pub random_session_key: Option<SessionKey>,
}

/// The result of a token.
#[derive(Debug)]
pub enum ClientStep {
    /// Send this and wait for the answer.
    Continue(Vec<u8>),
    /// Send this, if it is not empty; pass the token of a STATUS_SUCCESS answer to [`Initiator::finish`].
    Last(Vec<u8>, SessionKey),
}

/// One exchange, client side: [`Initiator::first`], then [`Initiator::step`] until `Last`, then [`Initiator::finish`].
pub struct Initiator {
    config: InitiatorConfig,
    pub(super) mech_list: Vec<u8>,
    negotiate_message: Vec<u8>,
    done: Option<(Key, u32)>,
}

impl Initiator {
    /// Begins an exchange.
    pub fn new(config: InitiatorConfig) -> Self {
        let mut asked = flags::UNICODE
            | flags::REQUEST_TARGET
            | flags::SIGN
            | flags::NTLM
            | flags::ALWAYS_SIGN
            | flags::EXTENDED_SESSIONSECURITY
            | flags::TARGET_INFO
            | flags::STRENGTH_128;
        if config.random_session_key.is_some() {
            asked |= flags::KEY_EXCH;
        }
        let negotiate_message =
            Builder::new(1, 32).bytes(&asked.to_le_bytes()).bytes(&[0; 8]).bytes(&[0; 8]).build();
        let mech_list = spnego::encode_mech_list(&[spnego::NTLMSSP]);
        Initiator { config, mech_list, negotiate_message, done: None }
    }

    /// The token of the first SESSION_SETUP request.
    pub fn first(&self) -> Vec<u8> {
        if self.config.spnego {
            spnego::encode_init(&self.mech_list, Some(&self.negotiate_message))
        } else {
            self.negotiate_message.clone()
        }
    }

    /// Processes the server's token that arrived with STATUS_MORE_PROCESSING_REQUIRED. `now` is the time as a FILETIME, for
    /// servers that do not send theirs.
    pub fn step(&mut self, token: &[u8], now: u64) -> Result<ClientStep, AuthError> {
        if self.done.is_some() {
            return Err(AuthError::OutOfOrder("exchange is over"));
        }
        if !self.config.spnego {
            let (message, key) = self.authenticate(token, now)?;
            return Ok(ClientStep::Last(message, key));
        }
        let response = NegTokenResp::parse(token)?;
        if response.supported_mech.is_some_and(|oid| oid != spnego::NTLMSSP) {
            return Err(AuthError::Incompatible("server chose another mechanism"));
        }
        let Some(challenge) = response.response_token else {
            let first =
                NegTokenResp { response_token: Some(&self.negotiate_message), ..NegTokenResp::default() };
            return Ok(ClientStep::Continue(first.encode()));
        };
        let (message, key) = self.authenticate(challenge, now)?;
        let mic = self.signature(Side::Client);
        let last = NegTokenResp {
            response_token: Some(&message),
            mech_list_mic: mic.as_ref().map(<[u8; 16]>::as_slice),
            ..NegTokenResp::default()
        };
        Ok(ClientStep::Last(last.encode(), key))
    }

    /// Checks the token that arrived with STATUS_SUCCESS: the server must have received the same list of mechanisms.
    pub fn finish(&self, token: &[u8]) -> Result<(), AuthError> {
        if !self.config.spnego {
            return if token.is_empty() { Ok(()) } else { Err(AuthError::Malformed("unexpected token")) };
        }
        let response = NegTokenResp::parse(token)?;
        if response.neg_state != Some(spnego::NegState::AcceptCompleted as u8) {
            return Err(AuthError::Incompatible("server has not accepted"));
        }
        let expected = self.signature(Side::Server).ok_or(AuthError::OutOfOrder("exchange is not over"))?;
        let mic = response.mech_list_mic.ok_or(AuthError::Malformed("no mechListMIC"))?;
        constant_time::verify_slices_are_equal(&expected, mic).map_err(|_| AuthError::LogonFailure)
    }

    fn signature(&self, side: Side) -> Option<[u8; 16]> {
        let (key, negotiated) = self.done.as_ref()?;
        Some(keys::first_signature(key, *negotiated, side, &self.mech_list))
    }

    /// [MS-NLMP] 3.1.5.1.2
    fn authenticate(&mut self, challenge: &[u8], now: u64) -> Result<(Vec<u8>, SessionKey), AuthError> {
        message::expect_type(challenge, 2)?;
        let negotiated = message::u32_at(challenge, 20)?;
        let server_challenge: &[u8; 8] = challenge
            .get(24..32)
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or(AuthError::Malformed("truncated NTLM message"))?;
        let mut time = now.to_le_bytes();
        let mut target_info = Vec::new();
        for pair in AvPairs(message::field(challenge, 40)?) {
            let (id, value) = pair?;
            if let (av::TIMESTAMP, Ok(value)) = (id, value.try_into()) {
                time = value;
            }
            message::push_av(&mut target_info, id, value);
        }
        message::push_av(&mut target_info, av::FLAGS, &av::FLAG_MIC.to_le_bytes());
        if let Some(name) = &self.config.target_name {
            message::push_av(&mut target_info, av::TARGET_NAME, &message::to_utf16(name));
        }
        message::push_av(&mut target_info, av::EOL, &[]);

        // temp, [MS-NLMP] 3.3.2
        let mut temp = vec![1, 1, 0, 0, 0, 0, 0, 0];
        temp.extend_from_slice(&time);
        temp.extend_from_slice(&self.config.challenge);
        temp.extend_from_slice(&[0; 4]);
        temp.extend_from_slice(&target_info);
        temp.extend_from_slice(&[0; 4]);
        let owf = keys::ntowf_v2(&self.config.nt_hash, &self.config.user, &self.config.domain);
        let proof = keys::nt_proof(&owf, server_challenge, &temp);
        let base_key = keys::session_base_key(&owf, &proof);
        let response = [&proof[..], &temp].concat();

        let mut encrypted = Vec::new();
        let exported = match &self.config.random_session_key {
            Some(random) if negotiated & flags::KEY_EXCH != 0 => {
                encrypted.extend_from_slice(random.as_bytes());
                keys::rc4(&base_key, &mut encrypted);
                Zeroizing::new(*random.as_bytes())
            }
            _ => base_key,
        };
        let mut authenticate = Builder::new(3, 88)
            .field(&[0; 24])
            .field(&response)
            .field(&message::to_utf16(&self.config.domain))
            .field(&message::to_utf16(&self.config.user))
            .field(&message::to_utf16(&self.config.workstation))
            .field(&encrypted)
            .bytes(&negotiated.to_le_bytes())
            .bytes(&[0; 8])
            .bytes(&[0; 16])
            .build();
        let mic = keys::mic(&exported, &[&self.negotiate_message, challenge, &authenticate]);
        authenticate[message::MIC].copy_from_slice(&mic);
        let session_key = SessionKey::new(&*exported);
        self.done = Some((exported, negotiated));
        Ok((authenticate, session_key))
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Initiator(..)")
    }
}
