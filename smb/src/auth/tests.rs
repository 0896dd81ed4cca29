//! Whole exchanges between our two ends, and every way to spoil one.

use super::*;
use crate::crypto::SessionKey;

const NOW: u64 = 133_000_000_000_000_000;

fn acceptor() -> Acceptor {
    let config = AcceptorConfig {
        nb_domain: "FOREBAY".into(),
        nb_computer: "NODE1".into(),
        dns_domain: String::new(),
        dns_computer: "node1.example".into(),
    };
    Acceptor::new(&config, *b"\x01\x23\x45\x67\x89\xab\xcd\xef", NOW)
}

fn initiator() -> InitiatorConfig {
    InitiatorConfig {
        user: "Jürgen".into(),
        domain: "Forebay".into(),
        workstation: "client".into(),
        nt_hash: NtHash::from_password("right"),
        spnego: true,
        challenge: [0xAA; 8],
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

/// Runs an exchange to its end; `spoil` sees each token of the client, with its number, before it is sent.
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
fn both_ends_agree_on_user_and_key() {
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
