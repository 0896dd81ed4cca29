//! A peer that breaks a rule is disconnected, with the rule as the reason, regardless of what else it sends.

use std::time::{Duration, Instant};

use forebay_smbdirect::wire::{DataTransfer, Fault, Flags, Malformed, NegotiateRequest, Token};
use forebay_smbdirect::{BufferId, Config, Connection, Disconnect, Misbehaviour, Received, Segment, Timeout};

/// A server with a client that asked for `credits`.
fn server(credits: u16) -> (Connection, Instant) {
    let now = Instant::now();
    let config = Config::passive();
    let mut server = Connection::new(config, now).expect("valid");
    server.receives_posted(config.receive_buffers());
    server.handle_established();
    let request = NegotiateRequest {
        min_version: 0x0100,
        max_version: 0x0100,
        credits_requested: credits,
        preferred_send_size: 1364,
        max_receive_size: 1364,
        max_fragmented_size: 131_072,
    };
    server.handle_receive(now, BufferId(0), &request.encode(), None).expect("accepted");
    assert!(server.poll_transmit(now).is_some());
    server.handle_sent(1).expect("the connection continues");
    (server, now)
}

/// A message with `length` bytes of payload at `offset`.
fn message(data: DataTransfer) -> Vec<u8> {
    let mut bytes = data.encode()[..20].to_vec();
    bytes.resize(bytes.len().max((data.data_offset + data.data_length) as usize), 0xab);
    bytes
}

const fn data(length: u32, remaining: u32) -> DataTransfer {
    DataTransfer {
        credits_requested: 255,
        credits_granted: 1,
        flags: Flags(0),
        remaining_data_length: remaining,
        data_offset: if length > 0 { 24 } else { 0 },
        data_length: length,
    }
}

const fn malformed(fault: Fault, offset: u32) -> Disconnect {
    Disconnect::Malformed(Malformed { fault, what: "data transfer", offset })
}

#[test]
fn each_violation_disconnects_with_its_reason() {
    let remaining =
        |length, remaining, expected| Misbehaviour::Remaining { length, remaining, expected }.into();
    let too_long = |length| Misbehaviour::FragmentedTooLong { length, max: 170_850 }.into();
    let good = |length, remaining| message(data(length, remaining));
    let cases: Vec<(&str, Vec<Vec<u8>>, Disconnect)> = vec![
        ("nothing at all", vec![vec![]], malformed(Fault::Truncated, 0)),
        ("half a header", vec![good(0, 0)[..19].to_vec()], malformed(Fault::Truncated, 19)),
        (
            "a payload that ends behind the message",
            vec![good(100, 0)[..123].to_vec()],
            malformed(Fault::Truncated, 16),
        ),
        (
            "lengths that overflow",
            vec![
                DataTransfer { data_offset: 0xffff_fff8, data_length: 0x20, ..data(0, 0) }.encode().to_vec(),
            ],
            malformed(Fault::Truncated, 16),
        ),
        (
            "an offset beyond all bounds",
            vec![DataTransfer { data_offset: 0xffff_fff8, ..data(0, 0) }.encode()[..20].to_vec()],
            malformed(Fault::Truncated, 16),
        ),
        (
            "a payload that is not aligned",
            vec![message(DataTransfer { data_offset: 28, ..data(10, 0) })],
            malformed(Fault::Offset, 12),
        ),
        (
            "an empty message with an offset that is not aligned",
            vec![message(DataTransfer { data_offset: 20, ..data(0, 0) })],
            malformed(Fault::Offset, 12),
        ),
        (
            "a payload in the header",
            vec![message(DataTransfer { data_offset: 16, ..data(10, 0) })],
            malformed(Fault::Offset, 12),
        ),
        (
            "no credits requested",
            vec![message(DataTransfer { credits_requested: 0, ..data(10, 0) })],
            Misbehaviour::NoCreditsRequested.into(),
        ),
        (
            "longer than negotiated",
            vec![good(1341, 0)],
            Misbehaviour::MessageTooLong { length: 1365, max: 1364 }.into(),
        ),
        ("a message longer than announced", vec![good(1340, 170_850 - 1340 + 1)], too_long(170_851)),
        ("a remainder beyond all bounds", vec![good(1340, u32::MAX)], too_long(1340 + 0xffff_ffff)),
        ("a remainder without a payload", vec![good(0, 5)], Misbehaviour::RemainingWithoutData.into()),
        ("an end before the end", vec![good(100, 300), good(100, 0)], remaining(100, 0, 300)),
        ("a remainder that grows", vec![good(100, 300), good(100, 300)], remaining(100, 300, 300)),
        (
            "a remainder that does not shrink enough",
            vec![good(100, 300), good(100, 201)],
            remaining(100, 201, 300),
        ),
        ("more than was left", vec![good(100, 300), good(301, 0)], remaining(301, 0, 300)),
        (
            "more credits than there can be receives",
            vec![message(DataTransfer { credits_granted: 0xffff, ..data(10, 0) })],
            Misbehaviour::TooManyCredits { held: 255 + 0xffff }.into(),
        ),
    ];
    for (name, messages, reason) in cases {
        let (mut server, now) = server(255);
        // The server has some credits, so that one grant can exceed the maximum.
        let grant = message(DataTransfer { credits_granted: 255, ..data(0, 0) });
        assert_eq!(server.handle_receive(now, BufferId(0), &grant, None), Ok(Received::Free));
        let (last, before) = messages.split_last().expect("something");
        for (index, message) in before.iter().enumerate() {
            let received = server.handle_receive(now, BufferId(index as u32), message, None);
            assert!(received.is_ok(), "{name}: {received:?}");
        }
        assert_eq!(server.handle_receive(now, BufferId(9), last, None), Err(reason), "{name}");
        assert_eq!(server.closed(), Some(reason), "{name}");
        assert_eq!(server.drain_held().count(), before.len(), "{name}");
        assert!(server.poll_transmit(now).is_none() && server.poll_timeout().is_none(), "{name}");
    }
}

#[test]
fn a_message_without_a_credit_disconnects() {
    let (mut server, now) = server(3);
    for _ in 0..3 {
        let received = server.handle_receive(now, BufferId(0), &message(data(10, 0)), None);
        assert!(matches!(received, Ok(Received::Message(_))));
    }
    // Receives are posted, but none of them is announced.
    assert_eq!(server.credits().posted, 252);
    let reason = Disconnect::Misbehaved(Misbehaviour::WithoutCredit);
    assert_eq!(server.handle_receive(now, BufferId(0), &message(data(10, 0)), None), Err(reason));
}

#[test]
fn data_before_the_negotiate_response_disconnects() {
    let now = Instant::now();
    let mut server = Connection::new(Config::passive(), now).expect("valid");
    server.receives_posted(10);
    let request = NegotiateRequest {
        min_version: 0x0100,
        max_version: 0x0100,
        credits_requested: 5,
        preferred_send_size: 1364,
        max_receive_size: 1364,
        max_fragmented_size: 131_072,
    };
    server.handle_receive(now, BufferId(0), &request.encode(), None).expect("accepted");
    let reason = Disconnect::Misbehaved(Misbehaviour::WithoutCredit);
    assert_eq!(server.handle_receive(now, BufferId(0), &message(data(10, 0)), None), Err(reason));
}

#[test]
fn tiny_fragments_cannot_hold_all_receive_buffers() {
    let (mut server, now) = server(255);
    for sent in 1..=255_u32 {
        // Free buffers are posted and announced.
        while server.poll_transmit(now).is_some() {}
        let fragment = message(data(1, 1000 - sent));
        let received = server.handle_receive(now, BufferId(sent), &fragment, None);
        if sent < 255 {
            assert_eq!(received, Ok(Received::Held), "fragment {sent}");
        } else {
            let reason = Disconnect::Misbehaved(Misbehaviour::TooManyFragments { max: 255 });
            assert_eq!(received, Err(reason));
        }
    }
    assert_eq!(server.drain_held().count(), 254);
}

#[test]
fn unusual_but_valid_messages_are_accepted() {
    let (mut server, now) = server(255);
    // At a larger offset, with bytes after it and unknown flags.
    let odd = DataTransfer { data_offset: 40, flags: Flags(0xfffe), ..data(7, 3) };
    let mut bytes = message(odd);
    bytes.extend_from_slice(&[0; 9]);
    assert_eq!(server.handle_receive(now, BufferId(4), &bytes, None), Ok(Received::Held));
    // An empty message between fragments, with an invalidated token.
    let empty = message(DataTransfer { data_offset: 8, ..data(0, 0) });
    assert_eq!(server.handle_receive(now, BufferId(5), &empty, Some(Token(1))), Ok(Received::Free));
    let Ok(Received::Message(whole)) = server.handle_receive(now, BufferId(6), &message(data(3, 0)), None)
    else {
        panic!("the message is whole");
    };
    assert_eq!(
        whole.segments,
        [
            Segment { buffer: BufferId(4), start: 40, length: 7 },
            Segment { buffer: BufferId(6), start: 24, length: 3 }
        ]
    );
    assert_eq!((whole.length, whole.invalidated), (10, Some(Token(1))));
    // The next message starts from the beginning.
    let Ok(Received::Message(next)) = server.handle_receive(now, BufferId(7), &message(data(5, 0)), None)
    else {
        panic!("the message is whole");
    };
    assert_eq!((next.segments.len(), next.length, next.invalidated), (1, 5, None));
}

/// Sends everything that the server has to send.
fn send_all(server: &mut Connection, now: Instant) {
    while server.poll_transmit(now).is_some() {
        server.handle_sent(1).expect("the connection continues");
    }
}

#[test]
fn an_incomplete_message_times_out_despite_other_traffic() {
    let (mut server, begin) = server(255);
    let fragment = |length, remaining| message(data(length, remaining));
    assert_eq!(server.handle_receive(begin, BufferId(1), &fragment(100, 300), None), Ok(Received::Held));
    for second in 1..200 {
        let now = begin + Duration::from_secs(second);
        if let Err(reason) = server.handle_timeout(now) {
            assert_eq!(reason, Disconnect::TimedOut(Timeout::Rest));
            assert_eq!(second, 120);
            return;
        }
        send_all(&mut server, now);
        // Signs of life, credits, and occasionally a fragment of the message.
        let next = if second % 50 == 0 { fragment(1, 300 - second as u32 / 50) } else { fragment(0, 0) };
        match server.handle_receive(now, BufferId(2), &next, None) {
            Ok(Received::Free) => server.receives_posted(1),
            received => assert_eq!(received, Ok(Received::Held)),
        }
    }
    panic!("an incomplete message never times out");
}

#[test]
fn the_reassembly_timeout_pauses_while_the_peer_has_no_credits() {
    let (mut server, begin) = server(3);
    let at = |seconds| begin + Duration::from_secs(seconds);
    let fragment = |length, remaining| message(data(length, remaining));
    assert_eq!(server.handle_receive(at(0), BufferId(1), &fragment(10, 90), None), Ok(Received::Held));
    assert_eq!(server.poll_timeout(), Some(at(120)));
    // After 50 s its credits are used up, and it gets none for a while.
    assert_eq!(server.handle_receive(at(50), BufferId(2), &fragment(10, 80), None), Ok(Received::Held));
    assert_eq!(server.handle_receive(at(50), BufferId(3), &fragment(10, 70), None), Ok(Received::Held));
    assert_eq!(server.credits().announced, 0);
    server.handle_timeout(at(160)).expect("the peer has no credits");
    send_all(&mut server, at(160));
    assert!(server.credits().announced > 0);
    // A sign of life postpones the keepalive request.
    assert_eq!(server.handle_receive(at(161), BufferId(4), &fragment(0, 0), None), Ok(Received::Free));
    assert_eq!(server.poll_timeout(), Some(at(160 + 120 - 50)));
    server.handle_timeout(at(229)).expect("in time");
    let whole = server.handle_receive(at(229), BufferId(5), &fragment(70, 0), None);
    assert!(matches!(whole, Ok(Received::Message(_))), "{whole:?}");
    // The next message has its own timeout.
    assert_eq!(server.handle_receive(at(300), BufferId(6), &fragment(10, 90), None), Ok(Received::Held));
    assert_eq!(server.poll_timeout(), Some(at(420)));
    assert_eq!(server.handle_timeout(at(420)), Err(Disconnect::TimedOut(Timeout::Rest)));
}
