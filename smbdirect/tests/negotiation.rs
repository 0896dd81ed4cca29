//! The negotiation, case by case ([MS-SMBD] 3.1.5.6, 3.1.5.7).

use std::time::Instant;

use forebay_smbdirect::wire::{Fault, Malformed, NegotiateRequest, NegotiateResponse, Status};
use forebay_smbdirect::{
    BufferId, Config, Connection, Disconnect, Incompatibility, InvalidConfig, Misbehaviour, Parameters,
    Received, Role,
};

/// The request of Linux.
const LINUX: NegotiateRequest = NegotiateRequest {
    min_version: 0x0100,
    max_version: 0x0100,
    credits_requested: 255,
    preferred_send_size: 1364,
    max_receive_size: 1364,
    max_fragmented_size: 173_910,
};
/// The request of Windows.
const WINDOWS: NegotiateRequest =
    NegotiateRequest { max_receive_size: 8192, max_fragmented_size: 1 << 20, ..LINUX };
/// The response of Windows.
const ANSWER: NegotiateResponse = NegotiateResponse {
    min_version: 0x0100,
    max_version: 0x0100,
    negotiated_version: 0x0100,
    credits_requested: 255,
    credits_granted: 255,
    status: Status::SUCCESS,
    max_read_write_size: 8 << 20,
    preferred_send_size: 1364,
    max_receive_size: 8192,
    max_fragmented_size: 1 << 20,
};
const BUFFER: BufferId = BufferId(3);

fn connection(config: Config) -> (Connection, Instant) {
    let now = Instant::now();
    let mut connection = Connection::new(config, now).expect("valid");
    connection.receives_posted(config.receive_buffers());
    connection.handle_established();
    if config.role == Role::Active {
        let request = connection.poll_transmit(now).expect("a request").header().to_vec();
        assert_eq!(request.len(), NegotiateRequest::LEN);
        connection.handle_sent(1).expect("sent");
    }
    (connection, now)
}

/// The server's answer, or the reason why there is none; and the reason why it disconnected after that.
fn answer(config: Config, request: &[u8]) -> (Result<NegotiateResponse, Disconnect>, Option<Disconnect>) {
    let (mut server, now) = connection(config);
    if let Err(reason) = server.handle_receive(now, BUFFER, request, None) {
        assert!(server.poll_transmit(now).is_none(), "a disconnected peer gets no answer");
        return (Err(reason), server.closed());
    }
    let transmit = server.poll_transmit(now).expect("an answer");
    assert!(transmit.segments().is_empty());
    let answer = NegotiateResponse::parse(transmit.header()).expect("a response");
    assert_eq!(transmit.header().len(), NegotiateResponse::LEN);
    let end = server.handle_sent(1).err();
    assert_eq!(end, server.closed());
    (Ok(answer), end)
}

fn misbehaved<T>(rule: Misbehaviour) -> (Result<T, Disconnect>, Option<Disconnect>) {
    (Err(rule.into()), Some(rule.into()))
}

#[test]
fn a_server_accepts_valid_requests() {
    let large = Config { max_receive_size: 8192, ..Config::passive() };
    /// Credits granted, preferred send size, receive size, fragmented size.
    type Answer = (u16, u32, u32, u32);
    let cases: &[(&str, Config, NegotiateRequest, Answer)] = &[
        ("linux", Config::passive(), LINUX, (255, 1364, 1364, 170_850)),
        ("windows", Config::passive(), WINDOWS, (255, 8192, 1364, 170_850)),
        ("linux, large buffers", large, LINUX, (255, 1364, 1364, 170_850)),
        (
            "large both ways",
            large,
            NegotiateRequest { preferred_send_size: 65_536, ..WINDOWS },
            (255, 8192, 8192, 1_041_420),
        ),
        (
            "the specification's own example",
            Config::passive(),
            NegotiateRequest {
                credits_requested: 10,
                preferred_send_size: 1024,
                max_receive_size: 1024,
                max_fragmented_size: 131_072,
                ..LINUX
            },
            (10, 1024, 1024, 131_072),
        ),
        (
            "requests more credits than available",
            Config { receive_credit_max: 120, ..Config::passive() },
            NegotiateRequest { credits_requested: u16::MAX, ..LINUX },
            (120, 1364, 1364, 131_072),
        ),
        (
            "the least of everything",
            Config { receive_credit_max: 4096, max_receive_size: 128, ..Config::passive() },
            NegotiateRequest {
                credits_requested: 1,
                preferred_send_size: 0,
                max_receive_size: 128,
                max_fragmented_size: 131_072,
                ..LINUX
            },
            (1, 128, 128, 4096 * 104 / 2),
        ),
        (
            "a range of versions around ours",
            Config::passive(),
            NegotiateRequest { min_version: 0, max_version: u16::MAX, ..LINUX },
            (255, 1364, 1364, 170_850),
        ),
    ];
    for (name, config, request, (granted, preferred, receive, fragmented)) in cases {
        let (response, end) = answer(*config, &request.encode());
        let expected = NegotiateResponse {
            credits_granted: *granted,
            preferred_send_size: *preferred,
            max_receive_size: *receive,
            max_fragmented_size: *fragmented,
            ..ANSWER
        };
        assert_eq!((response, end), (Ok(expected), None), "{name}");
    }
}

#[test]
fn a_server_refuses_invalid_or_incompatible_requests() {
    type Answer = (Result<NegotiateResponse, Disconnect>, Option<Disconnect>);
    let refused = |status, reason: Incompatibility| -> Answer {
        (Ok(NegotiateResponse::refusal(status)), Some(reason.into()))
    };
    let cases: Vec<(&str, NegotiateRequest, Answer)> = vec![
        (
            "an older version",
            NegotiateRequest { min_version: 0, max_version: 0xff, ..LINUX },
            refused(Status::NOT_SUPPORTED, Incompatibility::Version { min: 0, max: 0xff }),
        ),
        (
            "a newer version",
            NegotiateRequest { min_version: 0x101, max_version: 0x200, ..LINUX },
            refused(Status::NOT_SUPPORTED, Incompatibility::Version { min: 0x101, max: 0x200 }),
        ),
        (
            "minimum above maximum version",
            NegotiateRequest { min_version: 0x200, max_version: 0x0, ..LINUX },
            refused(Status::NOT_SUPPORTED, Incompatibility::Version { min: 0x200, max: 0 }),
        ),
        (
            "a wrong version precedes wrong sizes",
            NegotiateRequest { max_version: 0, min_version: 0, credits_requested: 0, ..LINUX },
            refused(Status::NOT_SUPPORTED, Incompatibility::Version { min: 0, max: 0 }),
        ),
        (
            "sends so little that our buffers cannot hold a message",
            NegotiateRequest { preferred_send_size: 500, ..LINUX },
            refused(Status::INSUFFICIENT_RESOURCES, Incompatibility::SendSize(500)),
        ),
        (
            "no credits",
            NegotiateRequest { credits_requested: 0, ..LINUX },
            misbehaved(Misbehaviour::NoCreditsRequested),
        ),
        (
            "receives too little",
            NegotiateRequest { max_receive_size: 127, ..LINUX },
            misbehaved(Misbehaviour::ReceiveSize(127)),
        ),
        (
            "reassembles too little",
            NegotiateRequest { max_fragmented_size: 131_071, ..LINUX },
            misbehaved(Misbehaviour::FragmentedSize(131_071)),
        ),
    ];
    for (name, request, expected) in cases {
        assert_eq!(answer(Config::passive(), &request.encode()), expected, "{name}");
    }
    let short = Malformed { fault: Fault::Truncated, what: "negotiate request", offset: 19 };
    let (response, end) = answer(Config::passive(), &LINUX.encode()[..19]);
    assert_eq!((response, end), (Err(short.into()), Some(short.into())));
}

#[test]
fn messages_of_a_refused_peer_are_ignored_until_the_refusal_is_sent() {
    let (mut server, now) = connection(Config::passive());
    let request = NegotiateRequest { min_version: 9, max_version: 9, ..LINUX };
    assert_eq!(server.handle_receive(now, BUFFER, &request.encode(), None), Ok(Received::Free));
    assert_eq!(server.parameters(), None);
    assert_eq!(server.handle_receive(now, BUFFER, &[1, 2, 3], None), Ok(Received::Free));
    assert!(server.poll_transmit(now).is_some());
    assert!(server.poll_transmit(now).is_none());
    assert_eq!(server.handle_receive(now, BUFFER, &LINUX.encode(), None), Ok(Received::Free));
    let reason = Disconnect::Incompatible(Incompatibility::Version { min: 9, max: 9 });
    assert_eq!(server.handle_sent(1), Err(reason));
    assert_eq!(server.handle_receive(now, BUFFER, &LINUX.encode(), None), Err(reason));
}

#[test]
fn a_client_accepts_valid_responses() {
    let cases: &[(&str, NegotiateResponse, (u32, u32, u32))] = &[
        // send size, receive size, read and write size
        ("windows", ANSWER, (8192, 1364, 8 << 20)),
        ("ksmbd", NegotiateResponse { max_receive_size: 1364, ..ANSWER }, (1364, 1364, 8 << 20)),
        ("large", NegotiateResponse { max_receive_size: u32::MAX, ..ANSWER }, (8192, 1364, 8 << 20)),
        (
            "smaller messages",
            NegotiateResponse { preferred_send_size: 1024, ..ANSWER },
            (8192, 1024, 8 << 20),
        ),
        ("no RDMA", NegotiateResponse { max_read_write_size: 0, ..ANSWER }, (8192, 1364, 0)),
        ("more RDMA", NegotiateResponse { max_read_write_size: u32::MAX, ..ANSWER }, (8192, 1364, 8 << 20)),
        (
            "one credit",
            NegotiateResponse { credits_granted: 1, credits_requested: 1, ..ANSWER },
            (8192, 1364, 8 << 20),
        ),
    ];
    for (name, response, (send, receive, read_write)) in cases {
        let (mut client, now) = connection(Config::active());
        let expected = Parameters {
            max_send_size: *send,
            max_receive_size: *receive,
            max_fragmented_send_size: 1 << 20,
            max_fragmented_receive_size: 170_850,
            max_read_write_size: *read_write,
        };
        let received = client.handle_receive(now, BUFFER, &response.encode(), None);
        assert_eq!(received, Ok(Received::Negotiated(expected)), "{name}");
        assert_eq!(client.credits().send, u32::from(response.credits_granted), "{name}");
    }
}

#[test]
fn a_client_refuses_invalid_or_incompatible_responses() {
    let refused = NegotiateResponse::refusal(Status::NOT_SUPPORTED);
    let version = |v| Incompatibility::Version { min: v, max: v };
    let cases: Vec<(&str, NegotiateResponse, Disconnect)> = vec![
        ("a refusal", refused, Incompatibility::Refused(Status::NOT_SUPPORTED).into()),
        ("another version", NegotiateResponse { negotiated_version: 0x200, ..ANSWER }, version(0x200).into()),
        (
            "no credits requested",
            NegotiateResponse { credits_requested: 0, ..ANSWER },
            Misbehaviour::NoCreditsRequested.into(),
        ),
        (
            "no credits granted",
            NegotiateResponse { credits_granted: 0, ..ANSWER },
            Misbehaviour::NoCreditsGranted.into(),
        ),
        (
            "receives too little",
            NegotiateResponse { max_receive_size: 127, ..ANSWER },
            Misbehaviour::ReceiveSize(127).into(),
        ),
        (
            "reassembles too little",
            NegotiateResponse { max_fragmented_size: 131_071, ..ANSWER },
            Misbehaviour::FragmentedSize(131_071).into(),
        ),
        (
            "would send more than it was offered",
            NegotiateResponse { preferred_send_size: 1365, ..ANSWER },
            Misbehaviour::PreferredSendSize(1365).into(),
        ),
        (
            "sends so little that our buffers cannot hold a message",
            NegotiateResponse { preferred_send_size: 600, ..ANSWER },
            Incompatibility::SendSize(600).into(),
        ),
    ];
    for (name, response, reason) in cases {
        let (mut client, now) = connection(Config::active());
        assert_eq!(client.handle_receive(now, BUFFER, &response.encode(), None), Err(reason), "{name}");
        assert_eq!(client.closed(), Some(reason), "{name}");
    }
    let (mut client, now) = connection(Config::active());
    let short = Malformed { fault: Fault::Truncated, what: "negotiate response", offset: 31 };
    assert_eq!(client.handle_receive(now, BUFFER, &ANSWER.encode()[..31], None), Err(short.into()));
}

#[test]
fn a_client_disconnects_from_a_server_that_sends_first() {
    let now = Instant::now();
    let mut client = Connection::new(Config::active(), now).expect("valid");
    client.receives_posted(5);
    let reason = Disconnect::Misbehaved(Misbehaviour::BeforeRequest);
    assert_eq!(client.handle_receive(now, BUFFER, &ANSWER.encode(), None), Err(reason));
}

#[test]
fn invalid_configurations_are_refused() {
    let with = |change: fn(&mut Config)| {
        let mut config = Config::passive();
        change(&mut config);
        Connection::new(config, Instant::now()).map(drop)
    };
    let bounds = |name, value, min, max| Err(InvalidConfig::OutOfBounds { name, value, min, max });
    assert_eq!(with(|_| {}), Ok(()));
    assert_eq!(with(|c| c.receive_credit_max = 1), bounds("receive_credit_max", 1, 2, 4096));
    assert_eq!(with(|c| c.send_credit_target = 0), bounds("send_credit_target", 0, 1, 65_535));
    assert_eq!(with(|c| c.max_send_size = 127), bounds("max_send_size", 127, 128, 65_536));
    assert_eq!(with(|c| c.max_receive_size = 65_537), bounds("max_receive_size", 65_537, 128, 65_536));
    assert_eq!(with(|c| c.send_segments_max = 0), bounds("send_segments_max", 0, 1, 1024));
    assert_eq!(with(|c| c.send_depth = 0), bounds("send_depth", 0, 1, 65_535));
    assert_eq!(
        with(|c| c.receive_credit_max = 97),
        Err(InvalidConfig::ReceiveBuffers { buffers: 97, size: 1364, needed: 131_072 })
    );
}
