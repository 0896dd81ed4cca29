//! Whole connections, both roles, with virtual time.

mod support;

use std::time::Duration;

use forebay_smbdirect::wire::{DataTransfer, Flags, NegotiateRequest, NegotiateResponse, Token};
use forebay_smbdirect::{Config, Disconnect, Misbehaviour, SendError, Timeout};
use support::{ACTIVE, PASSIVE, Pair, pattern};

const fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// The Data Transfer messages that one side sent, from their first bytes.
fn sent_by(pair: &Pair, side: usize) -> Vec<DataTransfer> {
    let all = pair.log.iter().filter(|(who, _)| *who == side).skip(1);
    all.map(|(_, head)| {
        // The log does not have the payload.
        let mut whole = head.clone();
        whole.resize(whole.len().max(65_536), 0);
        DataTransfer::parse(&whole).expect("well formed")
    })
    .collect()
}

#[test]
fn a_whole_connection_from_negotiation_to_shutdown() {
    let mut pair = Pair::new(Config::active(), Config::passive());
    assert!(!pair.pump(ACTIVE), "nothing is sent before the connection is up");
    pair.link();
    pair.settle();

    // Linux on both sides: 1364 bytes, 255 credits.
    let request = NegotiateRequest::parse(&pair.log[0].1).expect("a request");
    assert_eq!((request.min_version, request.max_version, request.credits_requested), (0x100, 0x100, 255));
    assert_eq!((request.preferred_send_size, request.max_receive_size), (8192, 1364));
    let response = NegotiateResponse::parse(&pair.log[1].1).expect("a response");
    assert_eq!((response.negotiated_version, response.status.0), (0x100, 0));
    assert_eq!((response.credits_requested, response.credits_granted), (255, 255));
    assert_eq!((response.preferred_send_size, response.max_receive_size), (1364, 1364));
    assert_eq!((response.max_fragmented_size, response.max_read_write_size), (255 * 1340 / 2, 8 << 20));
    assert_eq!(pair.peers[ACTIVE].negotiated.expect("negotiated").max_send_size, 1364);

    // A request that fits into one message, and its answer with the token that the client asked to invalidate.
    pair.peers[ACTIVE].send(&pattern(1, 300), &[64], None).expect("queued");
    pair.settle();
    assert_eq!(pair.peers[PASSIVE].received, [pattern(1, 300)]);
    pair.peers[PASSIVE].send(&pattern(2, 84), &[], Some(Token(0x1a00_bc57))).expect("queued");
    pair.settle();
    assert_eq!(pair.peers[ACTIVE].received, [pattern(2, 84)]);
    assert_eq!(pair.peers[ACTIVE].invalidated, [Some(Token(0x1a00_bc57))]);

    // 100 KB in 1340-byte fragments.
    let begin = pair.log.len();
    pair.peers[PASSIVE].send(&pattern(3, 100_000), &[30, 50_000, 50_001], None).expect("queued");
    pair.settle();
    assert_eq!(pair.peers[ACTIVE].received.last(), Some(&pattern(3, 100_000)));
    let fragments = pair.log[begin..].iter().filter(|(who, _)| *who == PASSIVE).count();
    assert_eq!(fragments, 100_000_usize.div_ceil(1340));

    // Both ends are silent until one requests a sign of life; then the connection continues.
    let begin = pair.log.len();
    pair.advance(seconds(119));
    assert_eq!(pair.log.len(), begin);
    pair.advance(seconds(2));
    let asked = sent_by(&pair, ACTIVE).iter().filter(|d| d.flags == Flags::RESPONSE_REQUESTED).count()
        + sent_by(&pair, PASSIVE).iter().filter(|d| d.flags == Flags::RESPONSE_REQUESTED).count();
    assert!((1..=2).contains(&asked), "requested {asked} times");
    pair.advance(seconds(3600));
    assert_eq!((pair.peers[ACTIVE].ended, pair.peers[PASSIVE].ended), (None, None));

    // Queued messages are sent; then the connection ends.
    pair.peers[ACTIVE].send(&pattern(4, 5000), &[], None).expect("queued");
    let now = pair.now;
    pair.peers[ACTIVE].connection.shutdown(now).expect("something is left to send");
    assert_eq!(pair.peers[ACTIVE].send(&[1], &[], None), Err(SendError::NotConnected));
    pair.settle();
    assert_eq!(pair.peers[PASSIVE].received.last(), Some(&pattern(4, 5000)));
    assert_eq!(pair.peers[ACTIVE].ended, Some(Disconnect::Shutdown));
    assert_eq!(pair.peers[ACTIVE].connection.poll_timeout(), None);
    assert_eq!(pair.peers[PASSIVE].connection.handle_lost(), Disconnect::Lost);
    assert_eq!(pair.peers[PASSIVE].unsent(), 0);
}

#[test]
fn a_request_before_the_established_event_is_answered_after_it() {
    let mut pair = Pair::new(Config::active(), Config::passive());
    pair.peers[ACTIVE].connection.handle_established();
    pair.pump(ACTIVE);
    pair.deliver(ACTIVE);
    assert!(pair.peers[PASSIVE].negotiated.is_some());
    assert!(!pair.pump(PASSIVE), "no send before the connection is up");
    pair.peers[PASSIVE].connection.handle_established();
    assert!(pair.pump(PASSIVE));
    pair.settle();
    assert!(pair.peers[ACTIVE].negotiated.is_some());
}

#[test]
fn credits_are_granted_with_answers_and_rarely_in_empty_messages() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let begin = pair.log.len();
    for round in 0..1000 {
        pair.peers[ACTIVE].send(&pattern(round, 200), &[], None).expect("queued");
        pair.settle();
        pair.peers[PASSIVE].send(&pattern(round, 100), &[], None).expect("queued");
        pair.settle();
    }
    assert_eq!(pair.log.len() - begin, 2000, "one message for each, none for credits");

    // With traffic in one direction only, the other side grants credits when a quarter is left.
    let begin = pair.log.len();
    for round in 0..1000 {
        pair.peers[ACTIVE].send(&pattern(round, 200), &[], None).expect("queued");
        pair.settle();
    }
    let grants = pair.log[begin..].iter().filter(|(who, _)| *who == PASSIVE).count();
    assert!((5..=6).contains(&grants), "{grants} messages that grant credits");
}

#[test]
fn a_peer_without_credits_does_not_time_out() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    // The server's upper layer holds every buffer.
    while pair.peers[PASSIVE].connection.credits().posted > 0 {
        pair.peers[ACTIVE].send(&pattern(1, 10), &[], None).expect("queued");
        pair.pump(ACTIVE);
        if !pair.deliver(ACTIVE) {
            pair.pump(PASSIVE);
            assert!(pair.deliver(PASSIVE), "one side can send");
        }
        pair.peers[ACTIVE].complete();
    }
    // An hour later the server has requested a sign of life and got no answer, because the client could not send one.
    for _ in 0..60 {
        let until = pair.now + seconds(60);
        while let Some(due) = pair.peers[PASSIVE].connection.poll_timeout().filter(|due| *due <= until) {
            pair.peers[PASSIVE].timeout(due);
            pair.pump(PASSIVE);
        }
        pair.now = until;
    }
    assert_eq!(pair.peers[PASSIVE].ended, None);
    // As soon as buffers are free, the connection makes progress again.
    pair.settle();
    assert_eq!(pair.peers[ACTIVE].unsent(), 0);
}

#[test]
fn a_silent_peer_times_out_after_a_keepalive_request() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let begin = pair.now;
    let peer = &mut pair.peers[PASSIVE];
    peer.timeout(begin + seconds(120));
    let packet = peer.poll().expect("a keep-alive");
    assert_eq!(DataTransfer::parse(&packet.bytes).expect("well formed").flags, Flags::RESPONSE_REQUESTED);
    assert_eq!(peer.connection.poll_timeout(), Some(begin + seconds(125)));
    peer.timeout(begin + seconds(124));
    assert_eq!(peer.ended, None);
    peer.timeout(begin + seconds(125));
    assert_eq!(peer.ended, Some(Disconnect::TimedOut(Timeout::KeepAlive)));
    assert!(peer.poll().is_none());
}

#[test]
fn the_keepalive_flag_is_set_on_a_queued_message() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let due = pair.now + seconds(120);
    let peer = &mut pair.peers[PASSIVE];
    peer.now = due;
    peer.connection.handle_timeout(due).expect("in time");
    peer.send(&[7; 50], &[], None).expect("queued");
    let data = DataTransfer::parse(&peer.poll().expect("the message").bytes).expect("well formed");
    assert_eq!((data.flags, data.data_length), (Flags::RESPONSE_REQUESTED, 50));
    assert!(peer.poll().is_none(), "no message for the flag alone");
}

#[test]
fn a_peer_that_does_not_negotiate_times_out() {
    for (side, time) in [(ACTIVE, 120), (PASSIVE, 5)] {
        let mut pair = Pair::new(Config::active(), Config::passive());
        pair.link();
        let begin = pair.now;
        let peer = &mut pair.peers[side];
        while peer.poll().is_some() {}
        assert_eq!(peer.connection.poll_timeout(), Some(begin + seconds(time)));
        peer.timeout(begin + seconds(time));
        assert_eq!(peer.ended, Some(Disconnect::TimedOut(Timeout::Negotiation)));
    }
}

#[test]
fn a_negotiate_response_waits_for_a_credit_to_grant() {
    let now = std::time::Instant::now();
    let mut server = forebay_smbdirect::Connection::new(Config::passive(), now).expect("valid");
    server.handle_established();
    server.receives_posted(1);
    let request = NegotiateRequest {
        min_version: 0x100,
        max_version: 0x100,
        credits_requested: 10,
        preferred_send_size: 1364,
        max_receive_size: 1364,
        max_fragmented_size: 131_072,
    };
    server.handle_receive(now, forebay_smbdirect::BufferId(0), &request.encode(), None).expect("accepted");
    assert!(server.poll_transmit(now).is_none());
    server.receives_posted(3);
    let response = server.poll_transmit(now).expect("a response").header().to_vec();
    assert_eq!(NegotiateResponse::parse(&response).expect("a response").credits_granted, 3);
}

#[test]
fn a_peer_that_grants_no_credits_times_out_even_if_it_sends() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let begin = pair.now;
    let server = &mut pair.peers[PASSIVE];
    // The client never grants any, although it has requested many.
    let mut queued = 0;
    while server.connection.credits().send > 0 {
        server.send(&[1; 100], &[], None).expect("queued");
        queued += 1;
        server.poll().expect("there is a credit");
        server.taken();
        server.complete();
    }
    assert_eq!(queued, 255);
    server.send(&[1; 100], &[], None).expect("queued");
    assert!(server.poll().is_none());
    let chatter = DataTransfer { credits_requested: 255, ..DataTransfer::default() };
    for second in 1..200 {
        server.now = begin + seconds(second);
        server.timeout(server.now);
        if server.ended.is_some() {
            assert_eq!(server.ended, Some(Disconnect::TimedOut(Timeout::Credits)));
            assert_eq!(second, 120);
            return;
        }
        let bytes = chatter.encode()[..20].to_vec();
        server.deliver(&support::Packet { bytes, invalidate: None, granted: 0, data: true });
        while server.poll().is_some() {}
    }
    panic!("a peer that grants nothing keeps its connection");
}

#[test]
fn shutdown_times_out_while_sends_are_outstanding() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let begin = pair.now;
    let client = &mut pair.peers[ACTIVE];
    client.send(&[1; 5000], &[], None).expect("queued");
    client.connection.shutdown(begin).expect("something is left");
    while client.poll().is_some() {}
    assert_eq!(client.connection.poll_timeout(), Some(begin + seconds(5)));
    client.timeout(begin + seconds(5));
    assert_eq!(client.ended, Some(Disconnect::TimedOut(Timeout::Shutdown)));
}

#[test]
fn a_lost_connection_reports_held_buffers_and_unsent_messages() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let unsent = pair.peers[PASSIVE].send(&[1; 10_000], &[], None).expect("queued");
    pair.peers[ACTIVE].send(&pattern(1, 4000), &[], None).expect("queued");
    pair.pump(ACTIVE);
    pair.deliver(ACTIVE);
    pair.deliver(ACTIVE);
    let server = &mut pair.peers[PASSIVE].connection;
    assert_eq!(server.handle_lost(), Disconnect::Lost);
    assert_eq!(server.handle_timeout(pair.now), Err(Disconnect::Lost));
    assert_eq!(server.drain_held().count(), 2);
    assert_eq!(server.drain_unsent().collect::<Vec<_>>(), [unsent]);
}

#[test]
fn messages_that_cannot_be_sent_are_refused() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let max = pair.peers[PASSIVE].negotiated.expect("negotiated").max_fragmented_send_size;
    let client = &mut pair.peers[ACTIVE];
    assert_eq!(client.send(&[], &[], None), Err(SendError::Empty));
    let longer = vec![0; max as usize + 1];
    assert_eq!(client.send(&longer, &[], None), Err(SendError::TooLong { length: u64::from(max) + 1, max }));
    assert_eq!(client.send(&[1; 2000], &[5; 1024], None), Err(SendError::TooManySegments(1025)));
    let mut fresh = Pair::new(Config::active(), Config::passive());
    assert_eq!(fresh.peers[ACTIVE].send(&[1], &[], None), Err(SendError::NotConnected));
}

#[test]
fn the_first_disconnect_reason_is_kept() {
    let mut pair = Pair::connected(Config::active(), Config::passive());
    let server = &mut pair.peers[PASSIVE];
    let bytes = DataTransfer::default().encode()[..20].to_vec();
    server.deliver(&support::Packet { bytes, invalidate: None, granted: 0, data: true });
    let reason = Disconnect::Misbehaved(Misbehaviour::NoCreditsRequested);
    assert_eq!(server.ended, Some(reason));
    assert_eq!(server.connection.handle_lost(), reason);
    assert_eq!(server.connection.handle_sent(1), Err(reason));
    assert_eq!(server.connection.parameters(), None);
}
