//! The server's side of NTLMv2 ([MS-NLMP] 3.2.5).

use aws_lc_rs::constant_time;

use super::keys::{self, Key, Side};
use super::message::{self, Authenticate, Builder, NtlmV2Response, av, flags};
use crate::auth::acceptor::{Lookup, MechanismStep, Proven};
use crate::auth::{AcceptorConfig, AuthError, NtHash};

/// NEGOTIATE has 32 bytes, a version, and two names; ordinary clients never send more.
const NEGOTIATE_BYTES_MAX: usize = 4096;

/// One exchange.
pub(in crate::auth) struct NtlmAcceptor {
    challenge: [u8; 8],
    target_name: Vec<u8>,
    target_info: Vec<u8>,
    /// `cifs/` and a host name each; if empty, SPNs are not checked.
    spns: Vec<Vec<u8>>,
    state: State,
}

enum State {
    Start,
    Challenged { offered: u32, negotiate_message: Vec<u8>, challenge_message: Vec<u8> },
    Done { exported_session_key: Key, negotiated: u32 },
    Failed,
}

impl NtlmAcceptor {
    /// `challenge` must be random and fresh, `now` is a FILETIME.
    pub(in crate::auth) fn new(config: &AcceptorConfig, challenge: [u8; 8], now: u64) -> Self {
        let mut target_info = Vec::new();
        for (id, name) in [
            (av::NB_DOMAIN_NAME, &config.nb_domain),
            (av::NB_COMPUTER_NAME, &config.nb_computer),
            (av::DNS_DOMAIN_NAME, &config.dns_domain),
            (av::DNS_COMPUTER_NAME, &config.dns_computer),
        ] {
            message::push_av(&mut target_info, id, &message::to_utf16(name));
        }
        message::push_av(&mut target_info, av::TIMESTAMP, &now.to_le_bytes());
        message::push_av(&mut target_info, av::EOL, &[]);
        NtlmAcceptor {
            challenge,
            target_name: message::to_utf16(&config.nb_computer),
            target_info,
            spns: config.target_names.iter().map(|name| spn(name)).collect(),
            state: State::Start,
        }
    }

    pub(in crate::auth) fn step(
        &mut self,
        token: &[u8],
        lookup: Lookup<'_>,
    ) -> Result<MechanismStep, AuthError> {
        match std::mem::replace(&mut self.state, State::Failed) {
            State::Start => self.negotiate(token).map(MechanismStep::Continue),
            State::Challenged { offered, negotiate_message, challenge_message } => self
                .authenticate(offered, &[&negotiate_message, &challenge_message], token, lookup)
                .map(|proven| MechanismStep::Done { token: None, proven }),
            State::Done { .. } | State::Failed => Err(AuthError::OutOfOrder("NTLM exchange is over")),
        }
    }

    /// The first signature of one side under the established key, if any.
    pub(in crate::auth) fn signature(&self, side: Side, message: &[u8]) -> Option<[u8; 16]> {
        match &self.state {
            State::Done { exported_session_key, negotiated } => {
                Some(keys::first_signature(exported_session_key, *negotiated, side, message))
            }
            _ => None,
        }
    }

    /// [MS-NLMP] 3.2.5.1.1
    fn negotiate(&mut self, token: &[u8]) -> Result<Vec<u8>, AuthError> {
        message::expect_type(token, 1)?;
        if token.len() > NEGOTIATE_BYTES_MAX {
            return Err(AuthError::Malformed("NTLM negotiate message is too long"));
        }
        let asked = message::u32_at(token, 12)?;
        if asked & flags::UNICODE == 0 {
            return Err(AuthError::Incompatible("client does not speak Unicode"));
        }
        if asked & flags::EXTENDED_SESSIONSECURITY == 0 {
            return Err(AuthError::Incompatible("client lacks extended session security"));
        }
        const ON_REQUEST: u32 = flags::SIGN
            | flags::SEAL
            | flags::ALWAYS_SIGN
            | flags::VERSION
            | flags::STRENGTH_128
            | flags::STRENGTH_56
            | flags::KEY_EXCH;
        let mut offered = asked & ON_REQUEST
            | flags::UNICODE
            | flags::NTLM
            | flags::EXTENDED_SESSIONSECURITY
            | flags::TARGET_INFO;
        if asked & flags::REQUEST_TARGET != 0 {
            offered |= flags::REQUEST_TARGET | flags::TARGET_TYPE_SERVER;
        }
        // [MS-NLMP] 2.2.1.2; the version is Windows 10 and NTLM revision 15: clients check only the latter.
        const VERSION: [u8; 8] = [10, 0, 0, 0, 0, 0, 0, 15];
        let challenge_message = Builder::new(2, 56)
            .field(&self.target_name)
            .bytes(&offered.to_le_bytes())
            .bytes(&self.challenge)
            .bytes(&[0; 8])
            .field(&self.target_info)
            .bytes(&if offered & flags::VERSION != 0 { VERSION } else { [0; 8] })
            .build();
        self.state = State::Challenged {
            offered,
            negotiate_message: token.to_vec(),
            challenge_message: challenge_message.clone(),
        };
        Ok(challenge_message)
    }

    /// [MS-NLMP] 3.2.5.1.2
    fn authenticate(
        &mut self,
        offered: u32,
        earlier: &[&[u8]; 2],
        token: &[u8],
        lookup: Lookup<'_>,
    ) -> Result<Proven, AuthError> {
        let authenticate = Authenticate::parse(token)?;
        // [MS-NLMP] 3.2.5.1.2: a message without user and response requests an anonymous logon.
        if authenticate.flags & flags::ANONYMOUS != 0
            || authenticate.user.is_empty()
                && authenticate.nt_response.is_empty()
                && authenticate.lm_response.len() <= 1
        {
            return Err(AuthError::Anonymous);
        }
        if authenticate.user.is_empty() {
            return Err(AuthError::Incompatible("no user name"));
        }
        let response = NtlmV2Response::parse(authenticate.nt_response)?;
        let negotiated = authenticate.flags & offered;

        let hashes = lookup(&authenticate.user, &authenticate.domain);
        let base_key = self.prove(&authenticate, &response, &hashes);

        let mut exported_session_key = base_key.clone().unwrap_or_default();
        if negotiated & flags::KEY_EXCH != 0 {
            let mut random_session_key: [u8; 16] = authenticate
                .encrypted_random_session_key
                .try_into()
                .map_err(|_| AuthError::Malformed("exchanged session key is not 16 bytes"))?;
            keys::rc4(&exported_session_key, &mut random_session_key);
            *exported_session_key = random_session_key;
        }
        // Checked only now: an unknown user takes the same code path as a wrong password.
        if base_key.is_none() {
            return Err(AuthError::LogonFailure);
        }
        // [MS-NLMP] 3.2.5.1.2: protected by the proof, so it is the client's intended server. A client that was lured
        // elsewhere and relayed from there names another server.
        if let Some(meant) = response.target_name
            && !self.spns.is_empty()
            && !self.spns.contains(&folded(meant))
        {
            return Err(AuthError::LogonFailure);
        }
        if response.has_mic {
            check_mic(&exported_session_key, earlier, token)?;
        }
        let exported_key = exported_session_key.to_vec().into();
        self.state = State::Done { exported_session_key, negotiated };
        Ok(Proven {
            exported_key,
            user: authenticate.user,
            domain: authenticate.domain,
            workstation: authenticate.workstation,
            expires: None,
        })
    }

    /// SessionBaseKey for the hash that the response proves knowledge of. Tries every hash to the end; if the user does not
    /// exist, tries a placeholder that matches no user.
    fn prove(
        &self,
        authenticate: &Authenticate<'_>,
        response: &NtlmV2Response<'_>,
        hashes: &[NtHash],
    ) -> Option<Key> {
        let no_user = [NtHash::from_bytes([0; 16])];
        let known = !hashes.is_empty();
        let mut proven = None;
        for hash in if known { hashes } else { &no_user } {
            let owf = keys::ntowf_v2(hash, &authenticate.user, &authenticate.domain);
            let expected = keys::nt_proof(&owf, &self.challenge, response.temp);
            let base_key = keys::session_base_key(&owf, &expected);
            let equal = constant_time::verify_slices_are_equal(&expected, response.nt_proof).is_ok();
            if known && equal {
                proven = Some(base_key);
            }
        }
        proven
    }
}

/// The SPN of an SMB server ([MS-SMB2] 3.2.4.2.3: "cifs/" and its name), in the form for comparisons.
fn spn(host: &str) -> Vec<u8> {
    folded(&message::to_utf16(&format!("cifs/{host}")))
}

/// UTF-16 with ASCII letters in lower case: host names have no others.
fn folded(utf16: &[u8]) -> Vec<u8> {
    let fold = |unit: &[u8]| match unit {
        [letter, 0] => [letter.to_ascii_lowercase(), 0],
        [low, high] => [*low, *high],
        _ => [0, 0],
    };
    utf16.chunks(2).flat_map(fold).collect()
}

fn check_mic(exported_session_key: &Key, earlier: &[&[u8]; 2], token: &[u8]) -> Result<(), AuthError> {
    let mic = token.get(message::MIC).ok_or(AuthError::Malformed("NTLM message too short for its MIC"))?;
    let (before, after) = (&token[..message::MIC.start], &token[message::MIC.end..]);
    let expected = keys::mic(exported_session_key, &[earlier[0], earlier[1], before, &[0; 16], after]);
    constant_time::verify_slices_are_equal(&expected, mic).map_err(|_| AuthError::LogonFailure)
}
