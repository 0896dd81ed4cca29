//! Complete exchanges with a simulated KDC and client. Those with real ones are in the foreign suites (e2e).

use std::sync::Arc;

use proptest::prelude::*;

use super::encryption::{EncryptionType, Key, Usage};
use super::keytab::tests::{file, record};
use super::messages::{encode_number, encode_time};
use super::*;
use crate::auth::der::{application, context};
use crate::auth::spnego::{self, NegTokenResp};
use crate::auth::{Acceptor, AcceptorConfig, Authenticated, NtHash, Step};

/// 2026-11-26 12:00:00
const NOW: i64 = 1_795_694_400;
const REALM: &str = "EXAMPLE.ORG";

/// A client with a ticket, and each property that can be invalid.
#[derive(Clone)]
struct Client {
    etype: EncryptionType,
    service_key: u8,
    version: Option<i64>,
    ticket_flags: u32,
    user: Vec<&'static str>,
    user_realm: &'static str,
    end: i64,
    start: i64,
    restriction: i64,
    options: u32,
    authenticator_user: &'static str,
    time: i64,
    microseconds: i64,
    gss_flags: Option<u32>,
    subkey: Option<EncryptionType>,
}

impl Client {
    fn new() -> Self {
        Self {
            etype: EncryptionType::Aes256Sha1,
            service_key: 1,
            version: Some(2),
            ticket_flags: 0,
            user: vec!["train"],
            user_realm: REALM,
            end: NOW + 3600,
            start: NOW - 60,
            restriction: 1,
            options: 0,
            authenticator_user: "train",
            time: NOW + 5,
            microseconds: 123_456,
            gss_flags: Some(0),
            subkey: Some(EncryptionType::Aes256Sha1),
        }
    }

    fn session_key(&self) -> Key {
        key(self.etype, 0x33)
    }

    /// The key that the client uses for SMB.
    fn context_key(&self) -> Key {
        self.subkey.map_or_else(|| self.session_key(), |etype| key(etype, 0x44))
    }

    fn ticket_part(&self) -> Vec<u8> {
        let part = sequence(&[
            field(0, &bits(self.ticket_flags)),
            field(1, &encoded_key(&self.session_key())),
            field(2, &text(self.user_realm)),
            field(3, &name(&self.user)),
            field(4, &sequence(&[field(0, &encode_number(1)), field(1, &octets(b""))])),
            field(5, &encode_time(self.start)),
            field(7, &encode_time(self.end)),
            field(
                10,
                &sequence(&[sequence(&[
                    field(0, &encode_number(self.restriction)),
                    field(1, &octets(b"?")),
                ])]),
            ),
        ]);
        der::encode(application(3), &[&part])
    }

    fn ticket(&self) -> Vec<u8> {
        let cipher = key(self.etype, self.service_key).encrypt(Usage::Ticket, [7; 16], &self.ticket_part());
        let fields = sequence(&[
            field(0, &encode_number(5)),
            field(1, &text(REALM)),
            field(2, &name(&["cifs", "server.example.org"])),
            field(3, &encrypted(self.etype, self.version, &cipher)),
        ]);
        der::encode(application(1), &[&fields])
    }

    fn authenticator(&self) -> Vec<u8> {
        let mut fields = vec![
            field(0, &encode_number(5)),
            field(1, &text(self.user_realm)),
            field(2, &name(&[self.authenticator_user])),
        ];
        if let Some(flags) = self.gss_flags {
            let checksum = [&16u32.to_le_bytes()[..], &[0; 16], &flags.to_le_bytes()].concat();
            fields
                .push(field(3, &sequence(&[field(0, &encode_number(0x8003)), field(1, &octets(&checksum))])));
        }
        fields.push(field(4, &encode_number(self.microseconds)));
        fields.push(field(5, &encode_time(self.time)));
        if self.subkey.is_some() {
            fields.push(field(6, &encoded_key(&self.context_key())));
        }
        fields.push(field(7, &encode_number(0)));
        der::encode(application(2), &[&sequence(&fields)])
    }

    /// The AP-REQ in its frame.
    fn token(&self) -> Vec<u8> {
        let cipher = self.session_key().encrypt(Usage::ApReqAuthenticator, [8; 16], &self.authenticator());
        let fields = sequence(&[
            field(0, &encode_number(5)),
            field(1, &encode_number(14)),
            field(2, &bits(self.options)),
            field(3, &self.ticket()),
            field(4, &encrypted(self.etype, None, &cipher)),
        ]);
        frame(AP_REQ_TOKEN, &der::encode(application(14), &[&fields]))
    }

    /// GSS_GetMIC of its first message.
    fn mic(&self, message: &[u8]) -> Vec<u8> {
        let header = [4, 4, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0];
        [&header[..], &self.context_key().checksum(Usage::InitiatorSign, &[message, &header])].concat()
    }
}

fn key(etype: EncryptionType, byte: u8) -> Key {
    [16, 32].into_iter().find_map(|len| Key::new(etype, &vec![byte; len])).expect("one of the lengths")
}

fn sequence(fields: &[Vec<u8>]) -> Vec<u8> {
    der::encode(der::SEQUENCE, &fields.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

fn field(n: u8, value: &[u8]) -> Vec<u8> {
    der::encode(context(n), &[value])
}

fn text(text: &str) -> Vec<u8> {
    der::encode(der::GENERAL_STRING, &[text.as_bytes()])
}

fn octets(bytes: &[u8]) -> Vec<u8> {
    der::encode(der::OCTET_STRING, &[bytes])
}

fn bits(bits: u32) -> Vec<u8> {
    der::encode(der::BIT_STRING, &[&[0], &bits.to_be_bytes()])
}

fn name(components: &[&str]) -> Vec<u8> {
    let components: Vec<_> = components.iter().map(|component| text(component)).collect();
    sequence(&[field(0, &encode_number(1)), field(1, &sequence(&components))])
}

fn encoded_key(key: &Key) -> Vec<u8> {
    sequence(&[field(0, &encode_number(key.etype() as i64)), field(1, &octets(key.as_bytes()))])
}

fn encrypted(etype: EncryptionType, version: Option<i64>, cipher: &[u8]) -> Vec<u8> {
    let mut fields = vec![field(0, &encode_number(etype as i64))];
    fields.extend(version.map(|version| field(1, &encode_number(version))));
    fields.push(field(2, &octets(cipher)));
    sequence(&fields)
}

/// The server's keys: version 2 of each encryption type consists of ones, version 1 of nines.
fn server() -> Arc<Kerberos> {
    let records: Vec<_> = EncryptionType::ALL
        .into_iter()
        .flat_map(|etype| [(2, 1), (1, 9)].map(|(version, byte)| (etype, version, byte)))
        .map(|(etype, version, byte)| {
            record(&["cifs", "server.example.org"], REALM, version, etype as u16, key(etype, byte).as_bytes())
        })
        .collect();
    Arc::new(Kerberos::new(Keytab::parse(&file(&records)).expect("a good keytab")))
}

fn acceptor(kerberos: Option<&Arc<Kerberos>>, ntlm: bool) -> Acceptor {
    let config = AcceptorConfig {
        nb_domain: "FOREBAY".into(),
        nb_computer: "SERVER".into(),
        dns_domain: String::new(),
        dns_computer: "server.example.org".into(),
        target_names: Vec::new(),
        ntlm,
        kerberos: kerberos.cloned(),
    };
    Acceptor::new(&config, [6; 16], FileTime::from_unix(NOW, 0))
}

fn lookup(user: &str, domain: &str) -> Vec<NtHash> {
    if (user, domain) == ("train", REALM) { vec![NtHash::from_password("unused")] } else { Vec::new() }
}

/// A NegTokenInit that prefers Kerberos.
fn init(token: Option<&[u8]>) -> Vec<u8> {
    spnego::encode_init(&mech_list(), token)
}

fn mech_list() -> Vec<u8> {
    spnego::encode_mech_list(&[MS_KERBEROS, KERBEROS, spnego::NTLMSSP])
}

fn log_on(server: &Arc<Kerberos>, client: &Client) -> Result<Authenticated, AuthError> {
    match acceptor(Some(server), true).step(&init(Some(&client.token())), &lookup)? {
        Step::Done(done) => Ok(done),
        Step::Continue(_) => panic!("one message is enough"),
    }
}

fn refusal(client: &Client) -> AuthError {
    log_on(&server(), client).expect_err("refused")
}

#[test]
fn a_ticket_authenticates_in_one_message() {
    for etype in EncryptionType::ALL {
        for subkey in [None, Some(etype), Some(EncryptionType::Aes128Sha256)] {
            let client = Client { etype, subkey, ..Client::new() };
            let done = log_on(&server(), &client).expect("a good ticket");
            assert_eq!((done.user.as_str(), done.domain.as_str()), ("train", REALM));
            assert_eq!(*done.full_session_key, client.context_key().as_bytes());
            assert_eq!(done.session_key.as_bytes()[..], client.context_key().as_bytes()[..16]);
            assert_eq!(done.expires, Some(FileTime::from_unix(NOW + 3600, 0)));
            let answer = NegTokenResp::parse(&done.token).expect("a token");
            assert_eq!(answer.neg_state, Some(spnego::NegState::AcceptCompleted as u8));
            assert_eq!(answer.supported_mech, Some(MS_KERBEROS));
            assert_eq!(answer.response_token, None);
        }
    }
}

#[test]
fn mutual_authentication_is_provided_on_request() {
    let by_gss = Client { gss_flags: Some(2), ..Client::new() };
    let by_option =
        Client { gss_flags: None, options: 1 << (31 - messages::MUTUAL_REQUIRED), ..Client::new() };
    for client in [by_gss, by_option] {
        let done = log_on(&server(), &client).expect("a good ticket");
        let answer = NegTokenResp::parse(&done.token).expect("a token");
        let reply = unframe(answer.response_token.expect("an AP-REP"), AP_REP_TOKEN).expect("its frame");
        let mut fields = Reader::new(
            der::only(der::only(reply, application(15)).expect("AP-REP"), der::SEQUENCE).expect("fields"),
        );
        assert_eq!(fields.expect(context(0)), Ok(&encode_number(5)[..]));
        assert_eq!(fields.expect(context(1)), Ok(&encode_number(15)[..]));
        let mut part = Reader::new(
            der::only(fields.expect(context(2)).expect("enc-part"), der::SEQUENCE).expect("EncryptedData"),
        );
        assert_eq!(part.expect(context(0)), Ok(&encode_number(client.etype as i64)[..]));
        let cipher = der::only(part.expect(context(2)).expect("cipher"), der::OCTET_STRING).expect("octets");
        let plain = client.session_key().decrypt(Usage::ApRepPart, cipher).expect("under the session key");
        assert_eq!(*plain, messages::ap_rep_part(client.time, client.microseconds));
    }
}

#[test]
fn mechanism_list_mic_is_verified_and_answered() {
    let client = Client::new();
    let server = server();
    let finish = |mic: &[u8], microseconds| {
        let mut acceptor = acceptor(Some(&server), true);
        let Ok(Step::Continue(answer)) = acceptor.step(&init(None), &lookup) else { panic!("no token yet") };
        let answer = NegTokenResp::parse(&answer).expect("a token");
        assert_eq!(answer.neg_state, Some(spnego::NegState::AcceptIncomplete as u8));
        let token = Client { microseconds, ..client.clone() }.token();
        let next = NegTokenResp {
            response_token: Some(&token),
            mech_list_mic: Some(mic),
            ..NegTokenResp::default()
        };
        acceptor.step(&next.encode(), &lookup)
    };
    let Ok(Step::Done(done)) = finish(&client.mic(&mech_list()), 1) else { panic!("a good MIC") };
    let answer = NegTokenResp::parse(&done.token).expect("a token");
    let mic = answer.mech_list_mic.expect("a MIC");
    let (header, checksum) = mic.split_at(16);
    assert_eq!(header, [4, 4, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(client.context_key().checksum(Usage::AcceptorSign, &[&mech_list(), header]), checksum);
    let wrong = client.mic(b"another list");
    assert_eq!(finish(&wrong, 2).expect_err("a wrong MIC"), AuthError::LogonFailure);
    assert_eq!(finish(&mic[..9], 3).expect_err("a short MIC"), AuthError::LogonFailure);
}

#[test]
fn refused_tickets_report_the_reason() {
    let refused = |client: Client, reason: &str| {
        let error = refusal(&client);
        assert!(error.to_string().contains(reason), "{error} instead of {reason}");
        assert_eq!(error.status(), crate::status::NtStatus::LOGON_FAILURE);
    };
    refused(Client { end: NOW - 301, ..Client::new() }, "expired");
    refused(Client { start: NOW + 301, ..Client::new() }, "not valid yet");
    refused(Client { ticket_flags: 1 << (31 - messages::INVALID), ..Client::new() }, "not valid yet");
    refused(Client { time: NOW - 301, ..Client::new() }, "five minutes apart");
    refused(Client { time: NOW + 301, ..Client::new() }, "five minutes apart");
    refused(
        Client { service_key: 9, ..Client::new() },
        "no key of the keytab opens the ticket for cifs/server.example.org@EXAMPLE.ORG (key version 2)",
    );
    refused(Client { version: Some(3), ..Client::new() }, "(key version 3)");
    refused(Client { restriction: 4, ..Client::new() }, "restriction of the unknown type 4");
    refused(
        Client { user: vec!["host", "node-1"], authenticator_user: "host", ..Client::new() },
        "different clients",
    );
    refused(Client { authenticator_user: "root", ..Client::new() }, "different clients");
    refused(Client { user_realm: "OTHER.ORG", ..Client::new() }, "another realm");
    refused(Client { options: 1 << (31 - messages::USE_SESSION_KEY), ..Client::new() }, "between users");
    refused(
        Client { user: vec!["unknown"], authenticator_user: "unknown", ..Client::new() },
        "logon failure",
    );
    // With an older version of the key, or with an unspecified version.
    log_on(&server(), &Client { service_key: 9, version: Some(1), ..Client::new() }).expect("an older key");
    log_on(&server(), &Client { service_key: 9, version: None, ..Client::new() }).expect("an older key");
}

#[test]
fn replayed_authenticators_are_refused() {
    let server = server();
    let client = Client::new();
    log_on(&server, &client).expect("the first time");
    let error = log_on(&server, &client).expect_err("the same again");
    assert!(error.to_string().contains("sent before"), "{error}");
    log_on(&server, &Client { microseconds: 1, ..client }).expect("another authenticator");
}

#[test]
fn logons_use_the_keys_of_a_replaced_keytab() {
    let server = server();
    let key = |byte| record(&["cifs", "s"], REALM, 2, 18, &[byte; 32]);
    server.replace(Keytab::parse(&file(&[key(5)])).expect("a keytab"));
    log_on(&server, &Client::new()).expect_err("the old key");
    log_on(&server, &Client { service_key: 5, ..Client::new() }).expect("the new key");
}

#[test]
fn disabled_mechanisms_are_not_used() {
    let client = Client::new();
    let ntlm_only = spnego::encode_init(&spnego::encode_mech_list(&[spnego::NTLMSSP]), None);
    let bare = b"NTLMSSP\0\x01\0\0\0";
    for token in [&ntlm_only[..], bare] {
        let error = acceptor(Some(&server()), false).step(token, &lookup).expect_err("NTLM is off");
        assert!(error.to_string().contains("server.ntlm"), "{error}");
    }
    // Without a keytab the client is asked to use NTLM, although it prefers Kerberos.
    let Ok(Step::Continue(answer)) = acceptor(None, true).step(&init(Some(&client.token())), &lookup) else {
        panic!("NTLM takes more messages");
    };
    let answer = NegTokenResp::parse(&answer).expect("a token");
    assert_eq!(answer.supported_mech, Some(spnego::NTLMSSP));
    assert_eq!(answer.neg_state, Some(spnego::NegState::RequestMic as u8));
}

proptest! {
    /// Authenticated data comes from the KDC or from a client with a ticket, and can still be arbitrary.
    #[test]
    fn parsing_arbitrary_plaintext_never_panics(
        at in 0..400usize,
        byte: u8,
        cut in 0..400usize,
        rubbish: Vec<u8>,
    ) {
        let client = Client::new();
        for plain in [client.ticket_part(), client.authenticator(), rubbish] {
            let mut changed = plain.clone();
            if let Some(there) = changed.get_mut(at) {
                *there = byte;
            }
            for plain in [&changed[..], &plain[..cut.min(plain.len())]] {
                let _ = TicketPart::parse(plain);
                let _ = Authenticator::parse(plain);
                let _ = ApReq::parse(plain);
            }
        }
    }
}

#[test]
fn tampered_tokens_never_authenticate_another_user() {
    let whole = init(Some(&Client { gss_flags: Some(2), ..Client::new() }.token()));
    let server = server();
    let mut accepted = 0;
    for at in 0..whole.len() {
        for changed in [whole[..at].to_vec(), {
            let mut changed = whole.clone();
            changed[at] ^= 0x11;
            changed
        }] {
            // Not everything is under a MAC: the name of the service and the list of mechanisms are not.
            match acceptor(Some(&server), false).step(&changed, &lookup) {
                Ok(Step::Done(done)) => {
                    assert_eq!(done.user, "train");
                    accepted += 1;
                }
                Ok(Step::Continue(_)) | Err(_) => {}
            }
        }
    }
    // The replay of the first accepted message is refused.
    assert!(accepted <= 1, "{accepted}");
}
