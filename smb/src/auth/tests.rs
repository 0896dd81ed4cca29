//! Complete exchanges between our client and our server, and every way to tamper with one.

use proptest::prelude::*;

use super::*;
use crate::crypto::SessionKey;
use crate::crypto::vectors::hex;
use crate::wire::FileTime;

const NOW: u64 = 133_000_000_000_000_000;

fn acceptor() -> Acceptor {
    acceptor_named(&[])
}

/// An acceptor with these configured target names.
fn acceptor_named(target_names: &[&str]) -> Acceptor {
    let config = AcceptorConfig {
        nb_domain: "FOREBAY".into(),
        nb_computer: "NODE1".into(),
        dns_domain: String::new(),
        dns_computer: "node1.example".into(),
        target_names: target_names.iter().map(|name| (*name).to_owned()).collect(),
        ntlm: true,
        kerberos: None,
    };
    Acceptor::new(&config, *b"\x01\x23\x45\x67\x89\xab\xcd\xef-unused-", FileTime(NOW))
}

fn initiator() -> InitiatorConfig {
    InitiatorConfig {
        user: "Jürgen".into(),
        domain: "Forebay".into(),
        workstation: "client".into(),
        nt_hash: NtHash::from_password("right"),
        spnego: true,
        challenge: [0xAA; 8],
        target_name: None,
        random_session_key: Some(SessionKey::new(&[0x55; 16])),
    }
}

/// Two hashes are valid, as during a rotation; only one user exists.
fn lookup(user: &str, domain: &str) -> Vec<NtHash> {
    if user == "Jürgen" && domain == "Forebay" {
        vec![NtHash::from_password("old"), NtHash::from_password("right")]
    } else {
        Vec::new()
    }
}

/// Runs a complete exchange; `spoil` can modify each token of the client, with its number, before it is sent.
fn converse(
    config: InitiatorConfig,
    mut spoil: impl FnMut(usize, &mut Vec<u8>),
) -> Result<(Authenticated, SessionKey), AuthError> {
    let mut server = acceptor();
    let mut client = Initiator::new(config);
    let mut token = client.first();
    let mut client_key = None;
    for number in 0.. {
        spoil(number, &mut token);
        match server.step(&token, &lookup)? {
            Step::Continue(answer) => match client.step(&answer, 0)? {
                ClientStep::Continue(next) => token = next,
                ClientStep::Last(next, key) => {
                    token = next;
                    client_key = Some(key);
                }
            },
            Step::Done(done) => {
                client.finish(&done.token)?;
                return Ok((done, client_key.expect("the client has finished before the server")));
            }
        }
    }
    unreachable!("the loop has no other end")
}

#[test]
fn wrong_target_name_is_refused_if_target_names_are_configured() {
    let log_on = |names: &[&str], target_name: Option<&str>| {
        let (mut server, mut client) = (
            acceptor_named(names),
            Initiator::new(InitiatorConfig { target_name: target_name.map(str::to_owned), ..bare() }),
        );
        let Ok(Step::Continue(challenge)) = server.step(&client.first(), &lookup) else {
            panic!("negotiate")
        };
        let Ok(ClientStep::Last(last, _)) = client.step(&challenge, 0) else { panic!("challenge") };
        server.step(&last, &lookup).map(drop)
    };
    let names = ["node1.example", "192.168.77.1"];
    for good in
        [None, Some(""), Some("cifs/node1.example"), Some("CIFS/Node1.Example"), Some("cifs/192.168.77.1")]
    {
        assert_eq!(log_on(&names, good), Ok(()), "{good:?}");
    }
    for bad in ["cifs/elsewhere", "http/node1.example", "node1.example", "cifs/", "cifs/node1.example.org"] {
        assert_eq!(log_on(&names, Some(bad)), Err(AuthError::LogonFailure), "{bad}");
        assert_eq!(log_on(&[], Some(bad)), Ok(()), "unchecked without names");
    }
}

#[test]
fn client_and_server_agree_on_user_and_session_key() {
    for spnego in [true, false] {
        for random_session_key in [Some(SessionKey::new(&[0x55; 16])), None] {
            for password in ["old", "right"] {
                let nt_hash = NtHash::from_password(password);
                let config = InitiatorConfig {
                    spnego,
                    random_session_key: random_session_key.clone(),
                    nt_hash,
                    ..initiator()
                };
                let (done, client_key) = converse(config, |_, _| ()).expect("the password is right");
                assert_eq!((&*done.user, &*done.domain, &*done.workstation), ("Jürgen", "Forebay", "client"));
                assert_eq!(done.session_key.as_bytes(), client_key.as_bytes());
                if random_session_key.is_some() {
                    assert_eq!(client_key.as_bytes(), &[0x55; 16]);
                }
            }
        }
    }
}

fn refusal(config: InitiatorConfig, spoil: impl FnMut(usize, &mut Vec<u8>)) -> AuthError {
    converse(config, spoil).expect_err("must be refused")
}

#[test]
fn wrong_password_and_unknown_user_give_the_same_error() {
    for spnego in [true, false] {
        let base = InitiatorConfig { spnego, ..initiator() };
        let wrong = InitiatorConfig { nt_hash: NtHash::from_password("wrong"), ..base.clone() };
        let unknown = InitiatorConfig { user: "guest".into(), ..base.clone() };
        let elsewhere = InitiatorConfig { domain: "Other".into(), ..base.clone() };
        // The placeholder hash for unknown users does not authenticate.
        let unnamed =
            InitiatorConfig { user: "guest".into(), nt_hash: NtHash::from_bytes([0; 16]), ..base.clone() };
        for config in [wrong, unknown, elsewhere, unnamed] {
            assert_eq!(refusal(config, |_, _| ()), AuthError::LogonFailure);
        }
    }
    assert_eq!(AuthError::LogonFailure.status(), NtStatus::LOGON_FAILURE);
}

/// Offsets in AUTHENTICATE, [MS-NLMP] 2.2.1.3.
const LM_FIELD: usize = 12;
const NT_FIELD: usize = 20;
const USER_FIELD: usize = 36;
const SESSION_KEY_FIELD: usize = 52;
const FLAGS: usize = 60;

fn bare() -> InitiatorConfig {
    InitiatorConfig { spnego: false, ..initiator() }
}

fn set_field(message: &mut Vec<u8>, field: usize, value: &[u8]) {
    let (len, offset) = (value.len() as u16, message.len() as u32);
    message[field..field + 2].copy_from_slice(&len.to_le_bytes());
    message[field + 4..field + 8].copy_from_slice(&offset.to_le_bytes());
    message.extend_from_slice(value);
}

#[test]
fn anonymous_logons_and_empty_user_names_are_refused() {
    let anonymous = refusal(bare(), |number, token| {
        if number == 1 {
            set_field(token, LM_FIELD, &[0]);
            set_field(token, NT_FIELD, &[]);
            set_field(token, USER_FIELD, &[]);
        }
    });
    assert_eq!(anonymous, AuthError::Anonymous);
    assert_eq!(anonymous.status(), NtStatus::ACCESS_DENIED);
    let flagged = refusal(bare(), |number, token| {
        if number == 1 {
            token[FLAGS + 1] |= 0x08;
        }
    });
    assert_eq!(flagged, AuthError::Anonymous);
    let nameless = refusal(bare(), |number, token| {
        if number == 1 {
            set_field(token, USER_FIELD, &[]);
        }
    });
    assert_eq!(nameless, AuthError::Incompatible("no user name"));
}

#[test]
fn only_ntlm_v2_responses_are_accepted() {
    for response in [&[][..], &[0; 24], &[7; 16]] {
        let refused = refusal(bare(), |number, token| {
            if number == 1 {
                set_field(token, NT_FIELD, response);
            }
        });
        assert_eq!(refused, AuthError::Incompatible("response is not NTLMv2"), "{} bytes", response.len());
    }
}

#[test]
fn tampered_messages_fail_the_mic() {
    // Byte 12 of NEGOTIATE holds flags without effect here; in AUTHENTICATE, change MIC, version and workstation.
    for (message, at) in [(0, 15), (1, 64), (1, 72), (1, 87)] {
        let refused = refusal(bare(), |number, token| {
            if number == message {
                token[at] ^= 0x02;
            }
        });
        assert_eq!(refused, AuthError::LogonFailure, "message {message} byte {at}");
    }
    // The response states that there is a MIC, protected by NTProofStr: removing the MIC does not bypass the check.
    let refused = refusal(bare(), |number, token| {
        if number == 1 {
            let flag =
                token.windows(8).position(|bytes| bytes == [6, 0, 4, 0, 2, 0, 0, 0]).expect("MsvAvFlags");
            token[flag + 4] = 0;
        }
    });
    assert_eq!(refused, AuthError::LogonFailure);
}

#[test]
fn tampered_session_key_is_refused() {
    let refused = refusal(bare(), |number, token| {
        if number == 1 {
            set_field(token, SESSION_KEY_FIELD, &[1; 16]);
        }
    });
    assert_eq!(refused, AuthError::LogonFailure);
    let refused = refusal(bare(), |number, token| {
        if number == 1 {
            set_field(token, SESSION_KEY_FIELD, &[1; 15]);
        }
    });
    assert_eq!(refused, AuthError::Malformed("exchanged session key is not 16 bytes"));
}

#[test]
fn out_of_order_messages_are_refused() {
    let client = Initiator::new(bare());
    let mut server = acceptor();
    server.step(&client.first(), &lookup).expect("negotiate");
    let error = server.step(&client.first(), &lookup).expect_err("negotiate again");
    assert_eq!(error, AuthError::OutOfOrder("another NTLM message is due"));
    assert_eq!(error.status(), NtStatus::INVALID_PARAMETER);
    let error = server.step(&client.first(), &lookup).expect_err("an exchange that failed stays failed");
    assert_eq!(error, AuthError::OutOfOrder("exchange is over or has failed before"));

    let config = bare();
    let (mut server, mut client) = (acceptor(), Initiator::new(config));
    let Ok(Step::Continue(challenge)) = server.step(&client.first(), &lookup) else { panic!("negotiate") };
    let Ok(ClientStep::Last(last, _)) = client.step(&challenge, 0) else { panic!("challenge") };
    server.step(&last, &lookup).expect("authenticated");
    let error = server.step(&last, &lookup).expect_err("a replay in the same exchange");
    assert_eq!(error, AuthError::OutOfOrder("exchange is over or has failed before"));
}

/// 1.2.840.113554.1.2.2
const KERBEROS: &[u8] = &[0x2A, 0x86, 0x48, 0x86, 0xF7, 0x12, 0x01, 0x02, 0x02];

#[test]
fn mic_is_required_if_the_client_prefers_another_mechanism() {
    let list = spnego::encode_mech_list(&[KERBEROS, spnego::NTLMSSP]);
    for strip_mic in [false, true] {
        let (mut server, mut client) = (acceptor(), Initiator::new(initiator()));
        client.mech_list = list.clone();
        let first = spnego::encode_init(&list, Some(b"a Kerberos ticket, none of our business"));
        let Ok(Step::Continue(answer)) = server.step(&first, &lookup) else { panic!("first") };
        let response = spnego::NegTokenResp::parse(&answer).expect("our own token");
        // [RFC 4178] 4.2.2: request-mic, and the selected mechanism.
        assert_eq!((response.neg_state, response.supported_mech), (Some(3), Some(spnego::NTLMSSP)));
        let Ok(ClientStep::Continue(token)) = client.step(&answer, 0) else { panic!("client restarts") };
        let Ok(Step::Continue(answer)) = server.step(&token, &lookup) else { panic!("challenge") };
        let Ok(ClientStep::Last(mut last, _)) = client.step(&answer, 0) else { panic!("authenticate") };
        if strip_mic {
            let parsed = spnego::NegTokenResp::parse(&last).expect("our own token");
            last = spnego::NegTokenResp { mech_list_mic: None, ..parsed }.encode();
            assert_eq!(server.step(&last, &lookup).expect_err("no MIC"), AuthError::LogonFailure);
        } else {
            let Ok(Step::Done(done)) = server.step(&last, &lookup) else { panic!("done") };
            client.finish(&done.token).expect("the server's MIC covers the same list");
        }
    }
}

#[test]
fn tampered_mechanism_list_fails_the_mic() {
    let (mut server, mut client) = (acceptor(), Initiator::new(initiator()));
    let Ok(Step::Continue(answer)) = server.step(&client.first(), &lookup) else { panic!("first") };
    client.mech_list = spnego::encode_mech_list(&[KERBEROS, spnego::NTLMSSP]);
    let Ok(ClientStep::Last(last, _)) = client.step(&answer, 0) else { panic!("challenge") };
    assert_eq!(server.step(&last, &lookup).expect_err("another list"), AuthError::LogonFailure);
}

#[test]
fn unsupported_mechanisms_are_refused() {
    let list = spnego::encode_mech_list(&[KERBEROS]);
    let error = acceptor().step(&spnego::encode_init(&list, None), &lookup).expect_err("Kerberos only");
    assert_eq!(error, AuthError::Incompatible("client offers no mechanism that we know"));
    assert_eq!(error.status(), NtStatus::LOGON_FAILURE);
}

#[test]
fn negotiate_hint_offers_ntlmssp() {
    let hint = negotiate_hint(true, false);
    let init = spnego::NegTokenInit::parse(&hint).expect("our own token");
    assert_eq!(init.mech_types, [spnego::NTLMSSP]);
    assert!(init.mech_token.is_none());
}

#[test]
fn oversized_tokens_are_refused() {
    let mut token = Initiator::new(bare()).first();
    token.resize(crate::limits::SECURITY_BLOB_BYTES_MAX + 1, 0);
    assert_eq!(
        acceptor().step(&token, &lookup).expect_err("too long"),
        AuthError::Malformed("security token is too long")
    );
}

fn recorded_lookup(_: &str, _: &str) -> Vec<NtHash> {
    vec![NtHash::from_password("Pässword")]
}

/// Recorded from pyspnego 0.12 (used by smbprotocol), SPNEGO with mechListMIC, against this acceptor's fixed
/// challenge; it accepted our answers and computed the same session key.
#[test]
fn recorded_pyspnego_exchange_is_accepted() {
    let mut server = acceptor();
    let first = hex(
        "604806062b0601050502a03e303ca00e300c060a2b06010401823702020aa22a04284e544c4d53535000010000003782\
                     08e200000000280000000000000028000000000c04000000000f",
    );
    let Ok(Step::Continue(challenge)) = server.step(&first, &recorded_lookup) else { panic!("negotiate") };
    assert_eq!(
        challenge,
        hex(
            "a181b03081ada0030a0101a10c060a2b06010401823702020aa281970481944e544c4d53535000020000000a000a003800000035\
             828ae20123456789abcdef000000000000000052005200420000000a0000000000000f4e004f0044004500310002000e0046004f\
             005200450042004100590001000a004e004f004400450031000400000003001a006e006f006400650031002e006500780061006d\
             0070006c006500070008000080209bcb82d80100000000"
        )
    );
    let last = hex(
        "a182016530820161a0030a0101a2820144048201404e544c4d53535000030000001800180058000000a200a2007000000\
                    00e000e00120100000c000c0020010000040004002c010000100010003001000035828ae2000c04000000000fe9e7abbc\
                    739a0d0568332f4e106326ca0000000000000000000000000000000000000000000000008be5ae4dd2d24efa92d00066e\
                    7a26a6001010000000000000080209bcb82d80135e497f6dfaed8ef0000000002000e0046004f00520045004200410059\
                    0001000a004e004f004400450031000400000003001a006e006f006400650031002e006500780061006d0070006c00650\
                    0070008000080209bcb82d8010900140063006900660073002f006e006f00640065003100060004000200000000000000\
                    0000000046004f00520045004200410059006a00fc007200670065006e0056004d000466dd2ec2481cbe1d61accdba8ea\
                    ce1a31204100100000023215fbc10ea61e400000000",
    );
    let Ok(Step::Done(done)) = server.step(&last, &recorded_lookup) else { panic!("authenticate") };
    assert_eq!(done.token, hex("a11b3019a0030a0100a31204100100000049d228a296e5d7e900000000"));
    assert_eq!((&*done.user, &*done.domain, &*done.workstation), ("jürgen", "FOREBAY", "VM"));
    assert_eq!(done.session_key.as_bytes()[..], hex("4620a6496815091ee0d44462a1306c2e"));
}

/// Recorded from impacket 0.13, which sends no MIC, no version, and its payload directly after the flags.
#[test]
fn recorded_impacket_exchange_is_accepted() {
    let mut server = acceptor();
    let first = hex("4e544c4d5353500001000000358288e000000000000000000000000000000000");
    let Ok(Step::Continue(_)) = server.step(&first, &recorded_lookup) else { panic!("negotiate") };
    let last = hex(
        "4e544c4d5353500003000000180018005a000000a600a600720000000e000e0040000000080008004e0000000400040056\
                    0000001000100018010000358288e046004f00520045004200410059007500730065007200570053005ead2c3cd623aaac\
                    2141a13d17fff1bf5775374134515a4eab92e4fdeca59f2eacddf71a7f45269e01010000000000000080209bcb82d80157\
                    75374134515a4e0000000002000e0046004f005200450042004100590001000a004e004f00440045003100040000000300\
                    1a006e006f006400650031002e006500780061006d0070006c006500070008000080209bcb82d801090024006300690066\
                    0073002f006e006f006400650031002e006500780061006d0070006c00650000000000031763cbc4f4d069a0ef2d690da9\
                    b62a",
    );
    let Ok(Step::Done(done)) = server.step(&last, &recorded_lookup) else { panic!("authenticate") };
    assert_eq!((&*done.user, &*done.domain, &*done.workstation), ("user", "FOREBAY", "WS"));
    assert_eq!(done.session_key.as_bytes()[..], hex("4d32317232506367666d536a5a465735"));
}

/// The tokens of a good exchange, for mutation.
fn good_tokens(spnego: bool) -> [Vec<u8>; 2] {
    let (mut server, mut client) = (acceptor(), Initiator::new(InitiatorConfig { spnego, ..initiator() }));
    let Ok(Step::Continue(challenge)) = server.step(&client.first(), &lookup) else { panic!("negotiate") };
    let Ok(ClientStep::Last(last, _)) = client.step(&challenge, 0) else { panic!("challenge") };
    [client.first(), last]
}

#[test]
fn truncated_tokens_are_refused_at_every_length() {
    for spnego in [true, false] {
        let [first, last] = good_tokens(spnego);
        for len in 0..first.len() {
            // NEGOTIATE's names are not read, so only its flags and the bytes before them are required.
            let fine = !spnego && len >= 16;
            assert_eq!(acceptor().step(&first[..len], &lookup).is_ok(), fine, "first cut to {len}");
        }
        for len in 0..last.len() {
            let mut server = acceptor();
            server.step(&first, &lookup).expect("negotiate");
            server.step(&last[..len], &lookup).expect_err("last cut");
        }
    }
}

proptest! {
    /// For any change to AUTHENTICATE or its frame, no other user is authenticated and nothing panics.
    #[test]
    fn mutated_tokens_never_panic_or_authenticate_another_user(
        spnego: bool,
        which in 0usize..2,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        cuts: bool,
    ) {
        let mut tokens = good_tokens(spnego);
        for (at, value) in changes {
            let at = at.index(tokens[which].len());
            tokens[which][at] = value;
        }
        if cuts {
            let len = cut.index(tokens[which].len());
            tokens[which].truncate(len);
        }
        let mut server = acceptor();
        if server.step(&tokens[0], &lookup).is_ok()
            && let Ok(Step::Done(done)) = server.step(&tokens[1], &lookup)
        {
            prop_assert_eq!((&*done.user, &*done.domain), ("Jürgen", "Forebay"));
            prop_assert_eq!(done.session_key.as_bytes(), &[0x55; 16]);
        }
    }

    #[test]
    fn arbitrary_tokens_never_panic_or_authenticate(
        token in prop::collection::vec(any::<u8>(), 0..300),
        ntlm: bool,
        next: bool,
    ) {
        let mut server = acceptor();
        if next {
            server.step(&good_tokens(ntlm)[0], &lookup).expect("negotiate");
        }
        let token = if ntlm { [b"NTLMSSP\0".as_slice(), &token].concat() } else { token };
        prop_assert!(!matches!(server.step(&token, &lookup), Ok(Step::Done(_))));
        let _ = Initiator::new(initiator()).step(&token, 0);
        let _ = Initiator::new(bare()).step(&token, 0);
    }
}
