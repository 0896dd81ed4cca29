//! Conversations about sessions with several channels: binding, and every way to lose a channel.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use forebay_smb::crypto::{Cipher, SigningAlgorithm};
use forebay_smb::engine::{Event, Server, ServerConfig};
use forebay_smb::fs::FsHandle;
use forebay_smb::limits;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::{Capabilities, Command, Dialect, HeaderFlags, negotiate};
use support::{Backend, Client, requests, server, volume};

const ECHO: [u8; 4] = [4, 0, 0, 0];
const USER: &str = "vol-user";
const PASSWORD: &str = "vol-secret";
const DIALECTS_3: [Dialect; 3] = [Dialect::SMB3_0, Dialect::SMB3_0_2, Dialect::SMB3_1_1];
const GMAC: SigningAlgorithm = SigningAlgorithm::AesGmac;
const CMAC: SigningAlgorithm = SigningAlgorithm::AesCmac;
const HMAC: SigningAlgorithm = SigningAlgorithm::HmacSha256;

fn nothing() -> Backend {
    Box::new(|_| Err(NtStatus::NOT_SUPPORTED))
}

fn first(server: &Arc<Server>) -> Client {
    Client::mount(server, 1, Dialect::SMB3_1_1, nothing())
}

/// A connection that has negotiated, after `change`.
fn negotiated(server: &Arc<Server>, id: u64, change: impl FnOnce(&mut Client)) -> Client {
    let mut client = Client::new(server, id, Dialect::SMB3_1_1);
    change(&mut client);
    assert_eq!(client.negotiate().unwrap().status(), NtStatus::SUCCESS);
    client
}

fn assert_works(client: &mut Client) {
    client.sign = true;
    assert_eq!(client.call(Command::ECHO, &ECHO).unwrap().status(), NtStatus::SUCCESS);
    // The session and the tree are the same on every channel.
    assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS);
    client.sign = false;
}

/// Delivers what connections have for each other. Returns the connections that this ended.
fn deliver(server: &Server, clients: &mut [&mut Client]) -> Vec<u64> {
    let mut ended = Vec::new();
    for (to, mail) in server.take_mail() {
        let client = clients.iter_mut().find(|c| c.id == to.0).expect("mail for a known client");
        if client.connection.deliver(client.now, mail).is_err() {
            ended.push(to.0);
        }
        client.run().unwrap();
    }
    ended
}

fn closed(client: &Client) -> usize {
    client.events.iter().filter(|e| matches!(e, Event::SessionClosed { .. })).count()
}

#[test]
fn multichannel_is_offered_to_smb3_clients_with_the_capability() {
    let offered = |dialect, capabilities| {
        let server = server();
        let mut client = Client::new(&server, 1, dialect);
        client.capabilities = capabilities;
        let answer = client.negotiate().unwrap();
        let response = negotiate::Response::parse(&answer.message).unwrap();
        response.capabilities.contains(Capabilities::MULTI_CHANNEL)
    };
    for dialect in DIALECTS_3 {
        assert!(offered(dialect, Capabilities::MULTI_CHANNEL));
        assert!(!offered(dialect, Capabilities::LARGE_MTU));
    }
    assert!(!offered(Dialect::SMB2_1, Capabilities::MULTI_CHANNEL));
    assert!(!offered(Dialect::SMB2_0_2, Capabilities::MULTI_CHANNEL));
}

#[test]
fn a_bound_connection_carries_the_session_under_its_own_channel_key() {
    for dialect in DIALECTS_3 {
        let server = server();
        let mut a = Client::mount(&server, 1, dialect, nothing());
        let mut b = Client::channel(&a, 2, nothing());
        assert!(
            b.events.iter().any(|e| matches!(e, Event::ChannelBound { username, .. } if username == USER))
        );
        assert!(b.connection.is_authenticated());
        assert_works(&mut a);
        assert_works(&mut b);
        let infos = server.session_infos();
        assert_eq!(infos.len(), 1, "{dialect:?}");
        assert_eq!(infos[0].client_addresses, ["peer-1", "peer-2"]);
        // The first channel's key does not sign on the second.
        let mut c = Client::channel(&a, 3, nothing());
        c.sign_as(&a);
        c.sign = true;
        assert_eq!(c.call(Command::ECHO, &ECHO).unwrap().status(), NtStatus::ACCESS_DENIED, "{dialect:?}");
    }
}

#[test]
fn every_cipher_seals_on_all_channels_without_nonce_reuse() {
    for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Aes128Ccm, Cipher::Aes256Ccm] {
        let server = server();
        // All connections get the same randomness, so their counters start at the same value.
        let new = |id| {
            let mut client = Client::seeded(&server, id, 7, Dialect::SMB3_1_1);
            client.ciphers = vec![cipher];
            client.negotiate().unwrap();
            client
        };
        let mut a = new(1);
        assert_eq!(a.logon(USER, PASSWORD, 0).unwrap().status(), NtStatus::SUCCESS);
        let mut channels: Vec<Client> = (2..5).map(new).collect();
        for client in &mut channels {
            assert_eq!(client.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::SUCCESS);
        }
        let mut nonces = Vec::new();
        for client in std::iter::once(&mut a).chain(&mut channels) {
            client.seal = true;
            for _ in 0..5 {
                assert!(client.call(Command::ECHO, &ECHO).unwrap().sealed, "{cipher:?}");
            }
            nonces.append(&mut client.nonces);
        }
        assert_eq!(nonces.len(), 20);
        nonces.sort_unstable();
        nonces.dedup();
        assert_eq!(nonces.len(), 20, "{cipher:?}");
    }
}

#[test]
fn bindings_that_do_not_match_the_session_are_refused() {
    use NtStatus as S;
    type Change = fn(&mut Client);
    let same: Change = |_| {};
    let gmac: Change = |c| c.signing_algorithms = vec![GMAC];
    let cmac: Change = |c| c.signing_algorithms = vec![CMAC];
    let hmac: Change = |c| c.signing_algorithms = vec![HMAC];
    let aes_256: Change = |c| c.ciphers = vec![Cipher::Aes256Gcm];
    let no_cipher: Change = |c| c.ciphers = vec![];
    let other_guid: Change = |c| c.client_guid = [4; 16];
    let smb_3_0: Change = |c| c.dialect = Dialect::SMB3_0;
    let smb_3_0_2: Change = |c| c.dialect = Dialect::SMB3_0_2;
    let smb_2_1: Change = |c| c.dialect = Dialect::SMB2_1;
    let smb_2_0_2: Change = |c| c.dialect = Dialect::SMB2_0_2;
    for (case, session, channel, status) in [
        ("the same", same, same, S::SUCCESS),
        ("another dialect", cmac, smb_3_0_2, S::INVALID_PARAMETER),
        ("an older dialect", smb_3_0_2, smb_3_0, S::INVALID_PARAMETER),
        ("a newer dialect", smb_3_0_2, cmac, S::INVALID_PARAMETER),
        ("a dialect without channels", cmac, smb_2_1, S::REQUEST_NOT_ACCEPTED),
        ("a session without channels", smb_2_1, cmac, S::INVALID_PARAMETER),
        ("neither knows channels", smb_2_1, smb_2_1, S::REQUEST_NOT_ACCEPTED),
        ("the oldest", smb_2_0_2, smb_2_0_2, S::REQUEST_NOT_ACCEPTED),
        ("another client", same, other_guid, S::USER_SESSION_DELETED),
        ("another cipher", same, aes_256, S::INVALID_PARAMETER),
        ("no cipher", same, no_cipher, S::INVALID_PARAMETER),
        ("CMAC to HMAC", cmac, hmac, S::SUCCESS),
        ("HMAC to CMAC", hmac, cmac, S::SUCCESS),
        ("GMAC to CMAC", gmac, cmac, S::REQUEST_OUT_OF_SEQUENCE),
        ("GMAC to HMAC of 2.1", gmac, smb_2_1, S::REQUEST_OUT_OF_SEQUENCE),
        ("CMAC to GMAC", cmac, gmac, S::NOT_SUPPORTED),
        ("CMAC of 3.0.2 to GMAC", smb_3_0_2, gmac, S::NOT_SUPPORTED),
    ] {
        let server = server();
        let mut a = negotiated(&server, 1, session);
        assert_eq!(a.logon(USER, PASSWORD, 0).unwrap().status(), NtStatus::SUCCESS, "{case}");
        let mut b = negotiated(&server, 2, channel);
        let answer = b.bind(&a, USER, PASSWORD).unwrap();
        assert_eq!(answer.status(), status, "{case}");
        assert!(
            answer.header.flags.contains(HeaderFlags::SIGNED),
            "{case}: the answer to a client that has the key is signed"
        );
        assert_eq!(b.connection.is_authenticated(), status == S::SUCCESS, "{case}");
        assert_works(&mut a);
    }
}

#[test]
fn each_leg_of_a_binding_must_be_signed_with_the_session_key() {
    let spoil: fn(&mut Vec<u8>) = |message| message[48] ^= 1;
    let strip: fn(&mut Vec<u8>) = |message| message[16] &= !8;
    for leg in [0, 1] {
        for (change, status) in [(spoil, NtStatus::ACCESS_DENIED), (strip, NtStatus::INVALID_PARAMETER)] {
            let server = server();
            let mut a = first(&server);
            let mut b = negotiated(&server, 2, |_| {});
            let answer = b
                .bind_with(&a, USER, PASSWORD, |at, message| {
                    if at == leg {
                        change(message);
                    }
                })
                .unwrap();
            assert_eq!(answer.status(), status, "leg {leg}");
            assert!(!answer.header.flags.contains(HeaderFlags::SIGNED), "unsigned, as no key is proven");
            assert!(!b.connection.is_authenticated());
            assert_works(&mut a);
            let again = b.bind(&a, USER, PASSWORD).unwrap();
            assert_eq!(again.status(), NtStatus::SUCCESS, "leg {leg}: a refusal leaves nothing behind");
        }
    }
}

#[test]
fn only_the_user_of_a_session_can_bind_a_channel() {
    let server = server();
    server.add_volume(volume("other", FsHandle(Arc::new(())))).unwrap();
    let mut a = first(&server);
    let mut b = negotiated(&server, 2, |_| {});
    for (user, password, status) in [
        ("other-user", "other-secret", NtStatus::NOT_SUPPORTED),
        (USER, "wrong", NtStatus::LOGON_FAILURE),
        ("unknown", PASSWORD, NtStatus::LOGON_FAILURE),
    ] {
        b.events.clear();
        assert_eq!(b.bind(&a, user, password).unwrap().status(), status, "{user}");
        assert!(b.events.iter().any(|e| matches!(e, Event::AuthenticationFailed { .. })), "{user}");
        assert!(!b.connection.is_authenticated());
        assert_works(&mut a);
    }
    assert_eq!(b.bind(&a, "VOL-User", PASSWORD).unwrap().status(), NtStatus::SUCCESS);
}

#[test]
fn a_connection_binds_once_and_only_to_existing_sessions() {
    let server = server();
    let mut a = first(&server);
    let outsider = Client::mount(&support::server(), 9, Dialect::SMB3_1_1, nothing());
    let mut b = negotiated(&server, 2, |_| {});
    assert_eq!(b.bind(&outsider, USER, PASSWORD).unwrap().status(), NtStatus::USER_SESSION_DELETED);
    // Requests other than a binding must not name another connection's session.
    let mut unbound = negotiated(&server, 5, |_| {});
    unbound.adopt(&a);
    unbound.sign = true;
    let answer = unbound.call(Command::TREE_DISCONNECT, &ECHO).unwrap();
    assert_eq!(answer.status(), NtStatus::USER_SESSION_DELETED);
    assert!(answer.header.flags.contains(HeaderFlags::SIGNED), "clients ignore it unsigned");
    // The first connection is a channel from the start.
    let session = a.session_id;
    let keys = Client::channel(&a, 3, nothing());
    assert_eq!(a.bind(&keys, USER, PASSWORD).unwrap().status(), NtStatus::REQUEST_NOT_ACCEPTED);
    assert_eq!(a.session_id, session);
    assert_works(&mut a);
    // Two sessions may share a connection.
    let mut c = Client::mount(&server, 4, Dialect::SMB3_1_1, nothing());
    assert_eq!(c.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::SUCCESS);
    assert_eq!(server.session_infos().len(), 2);
    assert_works(&mut c);
}

#[test]
fn a_second_leg_without_the_binding_flag_creates_no_session() {
    let server = server();
    let mut a = first(&server);
    let mut b = negotiated(&server, 2, |_| {});
    // The second leg without the flag: byte 2 of the body.
    let answer = b
        .bind_with(&a, USER, PASSWORD, |leg, message| {
            if leg == 1 {
                message[64 + 2] = 0;
            }
        })
        .unwrap();
    assert_eq!(answer.status(), NtStatus::USER_SESSION_DELETED);
    assert!(!b.connection.is_authenticated());
    assert_eq!(server.session_infos()[0].client_addresses, ["peer-1"]);
    assert_works(&mut a);
}

#[test]
fn channels_are_limited_per_session() {
    let server = server();
    let a = first(&server);
    let mut channels: Vec<Client> = Vec::new();
    for id in 2..=limits::CHANNELS_PER_SESSION_MAX as u64 {
        channels.push(Client::channel(&a, id, nothing()));
    }
    let mut b = negotiated(&server, 100, |_| {});
    assert_eq!(b.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::INSUFFICIENT_RESOURCES);
    channels.pop().unwrap().disconnect();
    assert_eq!(b.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::SUCCESS);
    assert_works(&mut b);
}

#[test]
fn a_session_lives_until_its_last_channel_is_lost() {
    let server = server();
    let mut a = first(&server);
    let mut b = Client::channel(&a, 2, nothing());
    let mut c = Client::channel(&a, 3, nothing());
    // The connection that created the session is not special.
    a.disconnect();
    assert_eq!((closed(&a), server.take_mail().len()), (0, 0));
    assert_eq!(server.session_infos()[0].client_addresses, ["peer-2", "peer-3"]);
    assert_works(&mut b);
    assert_works(&mut c);
    // Its keys remain usable: other connections can still be bound.
    let mut d = negotiated(&server, 4, |_| {});
    assert_eq!(d.bind(&b, USER, PASSWORD).unwrap().status(), NtStatus::SUCCESS);
    assert_works(&mut d);
    d.disconnect();
    c.disconnect();
    assert_works(&mut b);
    b.disconnect();
    assert!(server.session_infos().is_empty());
    assert_eq!([&a, &b, &c, &d].map(closed), [0, 1, 0, 0], "the last channel reports the end");
}

#[test]
fn logoff_ends_the_session_on_all_channels_but_no_connection() {
    let server = server();
    let mut a = first(&server);
    let mut b = Client::channel(&a, 2, nothing());
    b.sign = true;
    let answer = b.call(Command::LOGOFF, &ECHO).unwrap();
    assert_eq!(answer.status(), NtStatus::SUCCESS);
    assert!(answer.header.flags.contains(HeaderFlags::SIGNED));
    assert!(server.session_infos().is_empty());
    let next_status = |client: &mut Client| client.call(Command::TREE_DISCONNECT, &ECHO).unwrap().status();
    assert_eq!(next_status(&mut a), NtStatus::USER_SESSION_DELETED, "before the mail is delivered");
    assert!(deliver(&server, &mut [&mut a, &mut b]).is_empty());
    assert_eq!(next_status(&mut a), NtStatus::USER_SESSION_DELETED);
    assert_eq!((closed(&a), closed(&b)), (1, 0), "reported once, by the channel that ends last");
    a.session_id = 0;
    assert_eq!(a.logon(USER, PASSWORD, 0).unwrap().status(), NtStatus::SUCCESS, "the connection stays");
}

#[test]
fn close_session_ends_all_channels() {
    let server = server();
    let mut a = first(&server);
    let mut b = Client::channel(&a, 2, nothing());
    assert!(server.close_session(a.session_id));
    assert_eq!(deliver(&server, &mut [&mut a, &mut b]), [1, 2]);
    assert_eq!(closed(&a) + closed(&b), 1);
}

#[test]
fn an_ended_session_cannot_be_bound() {
    let server = server();
    let mut a = first(&server);
    let mut b = negotiated(&server, 2, |_| {});
    // Between the legs.
    let answer = b
        .bind_with(&a, USER, PASSWORD, |leg, _| {
            if leg == 1 {
                assert!(server.close_session(a.session_id));
            }
        })
        .unwrap();
    assert_eq!(answer.status(), NtStatus::USER_SESSION_DELETED);
    assert_eq!(deliver(&server, &mut [&mut a, &mut b]), [1]);
}

#[test]
fn reauthentication_blocks_bindings_and_its_failure_ends_the_session() {
    let server = server();
    let mut a = first(&server);
    let mut b = Client::channel(&a, 2, nothing());
    let mut c = negotiated(&server, 3, |_| {});
    b.begin_reauthentication(USER).unwrap();
    assert_eq!(c.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::REQUEST_NOT_ACCEPTED);
    // A first leg in place of the second.
    assert!(b.logon(USER, PASSWORD, 0).unwrap().status().is_error());
    assert!(deliver(&server, &mut [&mut a, &mut b]).is_empty());
    assert!(server.session_infos().is_empty());

    // A connection that is lost in the middle of a reauthentication does not block others.
    let mut a = Client::mount(&server, 11, Dialect::SMB3_1_1, nothing());
    let mut b = Client::channel(&a, 12, nothing());
    b.begin_reauthentication(USER).unwrap();
    b.disconnect();
    assert_eq!(c.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::SUCCESS);
    assert_works(&mut a);
}

#[test]
fn reauthentication_signed_with_the_key_of_another_channel_is_refused() {
    for (of_session, of_channel) in [(CMAC, HMAC), (HMAC, CMAC)] {
        let server = server();
        let mut a = Client::new(&server, 1, Dialect::SMB3_1_1);
        a.signing_algorithms = vec![of_session];
        a.negotiate().unwrap();
        assert_eq!(a.logon(USER, PASSWORD, 0).unwrap().status(), NtStatus::SUCCESS);
        assert_eq!(a.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS);
        let mut b = negotiated(&server, 2, |b| b.signing_algorithms = vec![of_channel]);
        assert_eq!(b.bind(&a, USER, PASSWORD).unwrap().status(), NtStatus::SUCCESS);
        for body in [requests::session_setup(b"", 0), requests::session_bind(b"")] {
            let header = b.header(Command::SESSION_SETUP, 1);
            let mut message = b.message(header, &body);
            let (head, rest) = message.split_at_mut(64);
            a.signing_key().sign_in_place(head, &[rest]);
            b.send_raw(message).unwrap();
            // The client has verified that the channel's key signed this.
            let answer = b.answers.pop_front().unwrap();
            assert_eq!(answer.status(), NtStatus::ACCESS_DENIED);
            assert!(answer.header.flags.contains(HeaderFlags::SIGNED));
        }
        assert_works(&mut a);
        assert_works(&mut b);
    }
}

#[test]
fn unsigned_reauthentication_is_refused_where_signing_is_required() {
    let server = Server::new(ServerConfig { signing_required: true, ..support::config() });
    server.add_volume(volume("vol", FsHandle(Arc::new(())))).unwrap();
    let mut a = first(&server);
    let mut b = Client::channel(&a, 2, nothing());
    for client in [&mut a, &mut b] {
        let header = client.header(Command::SESSION_SETUP, 1);
        let message = client.message(header, &requests::session_setup(b"", 0));
        client.send_raw(message).unwrap();
        let answer = client.answers.pop_front().unwrap();
        assert_eq!(answer.status(), NtStatus::ACCESS_DENIED);
        assert!(answer.header.flags.contains(HeaderFlags::SIGNED));
        assert_works(client);
    }
}

#[test]
fn a_previous_session_id_ends_all_channels_of_that_session() {
    let server = server();
    let mut a = first(&server);
    let mut b = Client::channel(&a, 2, nothing());
    let mut c = negotiated(&server, 3, |_| {});
    assert_eq!(c.logon(USER, PASSWORD, a.session_id).unwrap().status(), NtStatus::SUCCESS);
    assert_eq!(deliver(&server, &mut [&mut a, &mut b]), [0; 0], "the connections stay usable");
    for client in [&mut a, &mut b] {
        let answer = client.call(Command::TREE_DISCONNECT, &ECHO).unwrap();
        assert_eq!(answer.status(), NtStatus::USER_SESSION_DELETED);
        assert!(!client.connection.is_authenticated());
    }
    assert_eq!(server.session_infos().len(), 1);
}
