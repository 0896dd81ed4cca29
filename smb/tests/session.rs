//! Conversations about which clients get access: NEGOTIATE, SESSION_SETUP, TREE_CONNECT, signatures, seals, credits.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::sync::Arc;

use forebay_smb::crypto::{Cipher, SigningAlgorithm};
use forebay_smb::engine::{Encryption, Event, Mail, Protection, Server, ServerConfig};
use forebay_smb::fs::FsHandle;
use forebay_smb::limits::CONNECTIONS_PER_VOLUME_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::{Command, Dialect, HeaderFlags, Ids, SecurityMode, echo, logoff, negotiate, smb1};
use support::{Bytes, Client, config, server, volume};

const ECHO: [u8; 4] = [4, 0, 0, 0];
const DIALECTS: [Dialect; 5] =
    [Dialect::SMB2_0_2, Dialect::SMB2_1, Dialect::SMB3_0, Dialect::SMB3_0_2, Dialect::SMB3_1_1];

#[test]
fn every_dialect_mounts_plain_and_signed() {
    for dialect in DIALECTS {
        for sign in [false, true] {
            let mut client = Client::mount(&server(), 1, dialect, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
            client.sign = sign;
            let answer = client.call(Command::ECHO, &ECHO).unwrap();
            assert_eq!(answer.status(), NtStatus::SUCCESS, "{dialect:?}");
            assert_eq!(answer.header.flags.contains(HeaderFlags::SIGNED), sign, "{dialect:?}");
            echo::Response::parse(&answer.message).unwrap();
        }
    }
}

#[test]
fn every_cipher_seals_both_ways() {
    for cipher in [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Aes128Ccm, Cipher::Aes256Ccm] {
        let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
        client.ciphers = vec![cipher];
        client.negotiate().unwrap();
        client.logon("vol-user", "vol-secret", 0).unwrap();
        client.seal = true;
        assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS, "{cipher:?}");
        let answer = client.call(Command::ECHO, &ECHO).unwrap();
        assert!(answer.sealed && !answer.header.flags.contains(HeaderFlags::SIGNED));
        let answer = client.call(Command::LOGOFF, &ECHO).unwrap();
        assert!(answer.sealed, "the answer to LOGOFF is sealed with the keys of the session it ends");
        logoff::Response::parse(&answer.message).unwrap();
    }
}

#[test]
fn every_signing_algorithm_is_negotiated() {
    for algorithm in [SigningAlgorithm::HmacSha256, SigningAlgorithm::AesCmac, SigningAlgorithm::AesGmac] {
        let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
        client.signing_algorithms = vec![algorithm];
        client.negotiate().unwrap();
        client.logon("vol-user", "vol-secret", 0).unwrap();
        client.sign = true;
        assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS, "{algorithm:?}");
    }
}

#[test]
fn unknown_users_and_wrong_passwords_are_refused() {
    let refused = |user: &str, password: &str| {
        let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
        client.negotiate().unwrap();
        let answer = client.logon(user, password, 0).unwrap();
        assert!(!client.connection.is_authenticated());
        assert!(client.events.iter().any(|e| matches!(e, Event::AuthenticationFailed { .. })), "{user}");
        answer.status()
    };
    assert_eq!(refused("vol-user", "wrong"), NtStatus::LOGON_FAILURE);
    assert_eq!(refused("unknown", "vol-secret"), NtStatus::LOGON_FAILURE);
    assert_eq!(refused("guest", ""), NtStatus::LOGON_FAILURE);
}

#[test]
fn credentials_of_a_volume_open_only_that_volume() {
    let server = server();
    server.add_volume(volume("other", FsHandle(Arc::new(())))).unwrap();
    let mut client = Client::mount(&server, 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    assert_eq!(client.tree_connect("other").unwrap().status(), NtStatus::ACCESS_DENIED);
    assert_eq!(client.tree_connect("none").unwrap().status(), NtStatus::BAD_NETWORK_NAME);
    assert_eq!(client.tree_connect("VOL").unwrap().status(), NtStatus::SUCCESS);
    assert_eq!(client.tree_connect("IPC$").unwrap().status(), NtStatus::SUCCESS);
}

#[test]
fn signing_and_sealing_policies_are_enforced() {
    let open = |protection| {
        let server = Server::new(config());
        let mut v = volume("vol", FsHandle(Arc::new(())));
        v.protection = protection;
        server.add_volume(v).unwrap();
        let mut client = Client::new(&server, 1, Dialect::SMB3_1_1);
        client.negotiate().unwrap();
        client.logon("vol-user", "vol-secret", 0).unwrap();
        client
    };
    let mut client = open(Protection::Sign);
    assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS);
    let unsigned = client.call(Command::TREE_DISCONNECT, &ECHO).unwrap();
    assert_eq!(unsigned.status(), NtStatus::ACCESS_DENIED);
    client.sign = true;
    assert_eq!(client.call(Command::TREE_DISCONNECT, &ECHO).unwrap().status(), NtStatus::SUCCESS);

    let mut client = open(Protection::Seal);
    assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS);
    client.sign = true;
    assert_eq!(client.call(Command::TREE_DISCONNECT, &ECHO).unwrap().status(), NtStatus::ACCESS_DENIED);
    client.seal = true;
    assert_eq!(client.call(Command::TREE_DISCONNECT, &ECHO).unwrap().status(), NtStatus::SUCCESS);

    let mut c = config();
    c.encryption = Encryption::Required;
    let server = Server::new(c);
    server.add_volume(volume("vol", FsHandle(Arc::new(())))).unwrap();
    let mut client = Client::new(&server, 1, Dialect::SMB2_1);
    client.negotiate().unwrap();
    let answer = client.logon("vol-user", "vol-secret", 0).unwrap();
    assert_eq!(answer.status(), NtStatus::ACCESS_DENIED, "2.1 cannot seal");
}

#[test]
fn a_request_with_a_wrong_signature_is_refused() {
    let mut client =
        Client::mount(&server(), 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    let mut header = client.header(Command::TREE_DISCONNECT, 1);
    header.flags.insert(HeaderFlags::SIGNED);
    header.signature = [1; 16];
    let message = client.message(header, &ECHO);
    client.send_raw(message).unwrap();
    let answer = client.answers.pop_front().unwrap();
    assert_eq!(answer.status(), NtStatus::ACCESS_DENIED);
    assert!(!answer.header.flags.contains(HeaderFlags::SIGNED), "unsigned, as no key is proven");
}

#[test]
fn message_ids_outside_the_window_end_the_connection() {
    let mut client =
        Client::mount(&server(), 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    client.message_id += 100_000;
    assert!(client.call(Command::ECHO, &ECHO).is_err());
    let mut client =
        Client::mount(&server(), 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    client.call(Command::ECHO, &ECHO).unwrap();
    client.message_id -= 1;
    assert!(client.call(Command::ECHO, &ECHO).is_err(), "a used id");
}

#[test]
fn credits_are_granted_up_to_the_limit() {
    let mut client =
        Client::mount(&server(), 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    let mut outstanding = client.credits - client.message_id;
    for _ in 0..300 {
        let mut header = client.header(Command::ECHO, 1);
        header.credits = 8192;
        let message = client.message(header, &ECHO);
        client.send(message).unwrap();
        client.answers.pop_front().unwrap();
        outstanding = client.credits - client.message_id;
        assert!(outstanding <= 8192);
    }
    assert_eq!(outstanding, 8192);
}

/// A server that supports no dialect before `min_dialect`.
fn server_of(min_dialect: Dialect, signing_required: bool) -> Arc<Server> {
    let server = Server::new(ServerConfig { min_dialect, signing_required, ..config() });
    server.add_volume(volume("vol", FsHandle(Arc::new(())))).unwrap();
    server
}

#[test]
fn dialects_before_the_minimum_are_refused() {
    for (at, min_dialect) in DIALECTS.into_iter().enumerate() {
        let server = server_of(min_dialect, false);
        for (place, dialect) in DIALECTS.into_iter().enumerate() {
            let status = Client::new(&server, 1, dialect).negotiate().unwrap().status();
            let expected = if place < at { NtStatus::NOT_SUPPORTED } else { NtStatus::SUCCESS };
            assert_eq!(status, expected, "{dialect:?} where {min_dialect:?} is the oldest");
        }
    }
    let negotiate = |dialect: &[u8]| {
        let mut frame = Vec::new();
        smb1::encode_negotiate(&[dialect], &mut frame);
        frame
    };
    let newest = server_of(Dialect::SMB3_1_1, false);
    let mut client = Client::new(&newest, 1, Dialect::SMB2_0_2);
    assert!(client.send_raw(negotiate(smb1::DIALECT_2_002)).is_err());
    let mut client = Client::new(&newest, 1, Dialect::SMB3_1_1);
    client.send_raw(negotiate(smb1::DIALECT_2_WILDCARD)).unwrap();
    client.answers.clear();
    client.message_id = 1;
    assert_eq!(client.negotiate().unwrap().status(), NtStatus::SUCCESS, "upgraded to SMB 3.1.1");
}

#[test]
fn a_relayed_logon_cannot_connect_a_tree() {
    // An attacker who relays a logon has the session, but not its key, so it cannot sign requests.
    let tree_connect = |client: &mut Client| {
        let header = client.header(Command::TREE_CONNECT, 1);
        let message = client.message(header, &support::requests::tree_connect("vol"));
        client.send_raw(message)
    };
    let mut client = Client::new(&server_of(Dialect::SMB3_1_1, false), 1, Dialect::SMB3_1_1);
    client.negotiate().unwrap();
    assert_eq!(client.logon("vol-user", "vol-secret", 0).unwrap().status(), NtStatus::SUCCESS);
    tree_connect(&mut client).expect_err("a TREE_CONNECT that is not signed ends the connection");
    // With older dialects, this requires signatures on all messages.
    let server = server_of(Dialect::SMB2_0_2, true);
    for dialect in [Dialect::SMB2_0_2, Dialect::SMB2_1, Dialect::SMB3_0, Dialect::SMB3_0_2] {
        let mut client = Client::new(&server, 1, dialect);
        client.negotiate().unwrap();
        assert_eq!(client.logon("vol-user", "vol-secret", 0).unwrap().status(), NtStatus::SUCCESS);
        tree_connect(&mut client).unwrap();
        assert_eq!(client.answers.pop_front().unwrap().status(), NtStatus::ACCESS_DENIED);
    }
}

#[test]
fn smb1_negotiate_is_upgraded_to_smb2_or_refused() {
    let frame = |dialects: &[&[u8]]| {
        let mut frame = Vec::new();
        smb1::encode_negotiate(dialects, &mut frame);
        frame
    };
    let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
    assert!(client.send_raw(frame(&[b"NT LM 0.12"])).is_err());

    let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
    client.send_raw(frame(&[b"NT LM 0.12", smb1::DIALECT_2_WILDCARD])).unwrap();
    let answer = client.answers.pop_front().unwrap();
    let response = negotiate::Response::parse(&answer.message).unwrap();
    assert_eq!(response.dialect_revision, Dialect::SMB2_WILDCARD);
    client.message_id = 1;
    assert_eq!(client.negotiate().unwrap().status(), NtStatus::SUCCESS);
    assert_eq!(client.logon("vol-user", "vol-secret", 0).unwrap().status(), NtStatus::SUCCESS);

    let mut client = Client::new(&server(), 1, Dialect::SMB2_0_2);
    client.send_raw(frame(&[smb1::DIALECT_2_002])).unwrap();
    let answer = client.answers.pop_front().unwrap();
    let response = negotiate::Response::parse(&answer.message).unwrap();
    assert_eq!(response.dialect_revision, Dialect::SMB2_0_2);
}

#[test]
fn a_second_negotiate_or_an_early_request_ends_the_connection() {
    let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
    client.negotiate().unwrap();
    assert!(client.negotiate().is_err());
    let mut client = Client::new(&server(), 1, Dialect::SMB3_1_1);
    assert!(client.call(Command::ECHO, &ECHO).is_err());
}

#[test]
fn logoff_removes_the_session() {
    let server = server();
    let mut client = Client::mount(&server, 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    assert_eq!(server.session_infos().len(), 1);
    client.sign = true;
    assert_eq!(client.call(Command::LOGOFF, &ECHO).unwrap().status(), NtStatus::SUCCESS);
    assert!(server.session_infos().is_empty());
    client.sign = false;
    assert_eq!(
        client.call(Command::TREE_DISCONNECT, &ECHO).unwrap().status(),
        NtStatus::USER_SESSION_DELETED
    );
}

#[test]
fn close_session_and_a_previous_session_id_end_a_session() {
    let server = server();
    let nothing = || -> support::Backend { Box::new(|_| Err(NtStatus::NOT_SUPPORTED)) };
    let mut first = Client::mount(&server, 1, Dialect::SMB3_1_1, nothing());
    let id = first.session_id;
    let mut second = Client::new(&server, 2, Dialect::SMB3_1_1);
    second.negotiate().unwrap();
    second.logon("vol-user", "vol-secret", id).unwrap();
    let mail = server.take_mail();
    assert!(matches!(mail.as_slice(), [(_, Mail::SessionEnded(s))] if *s == id), "{mail:?}");
    for (to, mail) in mail {
        assert_eq!(to.0, 1);
        first.connection.deliver(first.now, mail).unwrap();
    }
    let answer = first.call(Command::TREE_DISCONNECT, &ECHO).unwrap();
    assert_eq!(answer.status(), NtStatus::USER_SESSION_DELETED);
    assert!(server.close_session(second.session_id));
    assert!(!server.close_session(second.session_id));
    for (to, mail) in server.take_mail() {
        assert_eq!(to.0, 2);
        assert!(second.connection.deliver(second.now, mail).is_err(), "its last session has ended");
    }
}

#[test]
fn rotation_accepts_old_and_new_passwords() {
    use forebay_smb::auth::NtHash;
    use forebay_smb::engine::Account;
    let server = server();
    let logon = |password: &str| {
        let mut client = Client::new(&server, 1, Dialect::SMB3_1_1);
        client.negotiate().unwrap();
        client.logon("VOL-USER", password, 0).unwrap().status()
    };
    let account = |passwords: &[&str]| Account {
        username: "vol-user".to_owned(),
        hashes: passwords.iter().map(|p| NtHash::from_password(p)).collect(),
    };
    server.set_accounts("vol", vec![account(&["vol-secret", "new"])]).unwrap();
    assert_eq!(logon("vol-secret"), NtStatus::SUCCESS);
    assert_eq!(logon("new"), NtStatus::SUCCESS);
    server.set_accounts("vol", vec![account(&["new"])]).unwrap();
    assert_eq!(logon("vol-secret"), NtStatus::LOGON_FAILURE);
    assert_eq!(server.add_volume(volume("vol2", FsHandle(Arc::new(())))), Ok(()));
    assert_eq!(server.set_accounts("vol2", vec![account(&["x"])]), Err("vol-user".to_owned()));
}

#[test]
fn the_current_network_interfaces_are_reported() {
    use forebay_smb::engine::NetworkInterface;
    use forebay_smb::ids::FileId;
    use forebay_smb::wire::fscc::fsctl::{FsctlCode, NetworkInterfaceInfo};
    use forebay_smb::wire::ioctl;
    let server = server();
    let mut client = Client::mount(&server, 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
    let mut body = Vec::new();
    ioctl::Request {
        ctl_code: FsctlCode::QUERY_NETWORK_INTERFACE_INFO,
        file_id: FileId::RELATED,
        input: &[],
        max_input_response: 0,
        output: &[],
        max_output_response: 4096,
        flags: ioctl::Flags::IS_FSCTL,
    }
    .encode(&mut body);
    assert_eq!(client.call(Command::IOCTL, &body).unwrap().status(), NtStatus::NOT_SUPPORTED);
    server.set_interfaces(vec![NetworkInterface {
        index: 3,
        address: [192, 0, 2, 1].into(),
        speed_bits_per_second: 100_000_000_000,
        rss_capable: true,
        rdma_capable: false,
    }]);
    let answer = client.call(Command::IOCTL, &body).unwrap();
    assert_eq!(answer.status(), NtStatus::SUCCESS);
    let output = ioctl::Response::parse(&answer.message).unwrap().output.to_vec();
    let interfaces = NetworkInterfaceInfo::parse_list(&output).unwrap();
    assert_eq!(
        (interfaces.len(), interfaces[0].if_index, interfaces[0].link_speed_bps),
        (1, 3, 100_000_000_000)
    );
}

#[test]
fn garbage_ends_the_connection_or_gets_an_error_but_never_panics() {
    let mut state = 0x1234_5678_u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    for _ in 0..2000 {
        let mut client =
            Client::mount(&server(), 1, Dialect::SMB3_1_1, Box::new(|_| Err(NtStatus::NOT_SUPPORTED)));
        let command = Command((random() % 0x14) as u16);
        let header = client.header(command, 1);
        let body: Vec<u8> = (0..random() % 120).map(|_| random() as u8).collect();
        let mut message = client.message(header, &body);
        // With the right structure size, a message gets further.
        if body.len() > 2 && random() % 2 == 0 {
            let size = [36, 25, 4, 9, 4, 57, 24, 24, 49, 49, 48, 57, 4, 4, 33, 32, 41, 33, 24, 4];
            message[64] = size[usize::from(command.0)];
            message[65] = 0;
        }
        if random() % 4 == 0 {
            let at = random() as usize % message.len();
            message[at] ^= random() as u8;
        }
        let _ = client.send(message);
        client.connection.close(client.now);
        let _ = client.run();
        assert!(client.connection.is_finished());
    }
    let _ = (Bytes(Vec::new()), SecurityMode::SIGNING_ENABLED, Ids::Async { async_id: 0 });
}

#[test]
fn connections_are_limited_per_volume() {
    let server = server();
    server.add_volume(volume("other", FsHandle(Arc::new(())))).unwrap();
    let connect = |id, dialect, user: &str, password: &str| {
        let mut client = Client::new(&server, id, dialect);
        client.negotiate().unwrap();
        let status = client.logon(user, password, 0).unwrap().status();
        (client, status)
    };
    let mine = |id, dialect| connect(id, dialect, "vol-user", "vol-secret");
    // Sessions come and go, but their connections stay.
    let mut all: Vec<Client> = (0..CONNECTIONS_PER_VOLUME_MAX - 1)
        .map(|id| {
            let (mut client, status) = mine(id, Dialect::SMB2_1);
            assert_eq!(status, NtStatus::SUCCESS);
            assert_eq!(client.call(Command::LOGOFF, &ECHO).unwrap().status(), NtStatus::SUCCESS);
            client.session_id = 0;
            client
        })
        .collect();
    let (first, status) = mine(20_000, Dialect::SMB3_1_1);
    assert_eq!(status, NtStatus::SUCCESS);
    assert_eq!(mine(20_001, Dialect::SMB2_1).1, NtStatus::INSUFFICIENT_RESOURCES);
    let mut channel = Client::new(&server, 20_002, Dialect::SMB3_1_1);
    channel.negotiate().unwrap();
    let bound = channel.bind(&first, "vol-user", "vol-secret").unwrap();
    assert_eq!(bound.status(), NtStatus::INSUFFICIENT_RESOURCES);
    // Another session on a counted connection adds none to the count, nor does a connection of another volume.
    let again = all[0].logon("vol-user", "vol-secret", 0).unwrap();
    assert_eq!(again.status(), NtStatus::SUCCESS);
    let (mut both, status) = connect(20_003, Dialect::SMB2_1, "other-user", "other-secret");
    assert_eq!(status, NtStatus::SUCCESS);
    both.session_id = 0;
    assert_eq!(both.logon("vol-user", "vol-secret", 0).unwrap().status(), NtStatus::SUCCESS);
    all.pop();
    let mut channel = Client::new(&server, 20_004, Dialect::SMB3_1_1);
    channel.negotiate().unwrap();
    assert_eq!(channel.bind(&first, "vol-user", "vol-secret").unwrap().status(), NtStatus::SUCCESS);
    assert_eq!(mine(20_005, Dialect::SMB2_1).1, NtStatus::INSUFFICIENT_RESOURCES);
}
