//! Two connections under random schedules: messages, completions, upper layers and timers happen in any order that a wire and
//! two devices allow. The referee of `support` checks the credit rules on every message: none without a credit, the last credit
//! never without a grant, no more grants than posted receives, and no receiver that is not ready.

mod support;

use std::time::Duration;

use forebay_smbdirect::{Config, Role};
use proptest::prelude::*;
use support::{ACTIVE, PASSIVE, Pair, pattern};

/// Schedules of [`random_schedules_obey_the_credit_rules_and_deliver_everything`].
const SCHEDULES: u32 = 10_000;

/// The next event.
#[derive(Clone, Debug)]
enum Event {
    /// An upper layer sends a message of this fraction of the maximum length, in several pieces.
    Send { side: usize, thousandths: u32, cuts: Vec<u16> },
    /// A connection may send.
    Pump(usize),
    /// Messages of a side arrive.
    Deliver { from: usize, count: u8 },
    /// A device reports its completions.
    Complete(usize),
    /// An upper layer processes messages.
    Release { side: usize, count: u8 },
    /// Time passes.
    Wait { millis: u64 },
}

fn event() -> impl Strategy<Value = Event> {
    let side = 0..2_usize;
    // Mostly short messages, as in SMB; some are long, and few have the maximum length.
    let size = prop_oneof![6 => 0..3_u32, 3 => 0..60_u32, 1 => 0..=1000_u32];
    prop_oneof![
        3 => (side.clone(), size, prop::collection::vec(any::<u16>(), 0..3))
            .prop_map(|(side, thousandths, cuts)| Event::Send { side, thousandths, cuts }),
        3 => side.clone().prop_map(Event::Pump),
        4 => (side.clone(), 1..20_u8).prop_map(|(from, count)| Event::Deliver { from, count }),
        2 => side.clone().prop_map(Event::Complete),
        2 => (side, 1..5_u8).prop_map(|(side, count)| Event::Release { side, count }),
        1 => (0..700_u64).prop_map(|millis| Event::Wait { millis }),
    ]
}

/// Plenty of buffers, few buffers, and the minimum.
fn buffers() -> impl Strategy<Value = (u16, u32)> {
    prop_oneof![
        3 => Just((255, 1364)),
        1 => Just((98, 1364)),
        1 => Just((255, 8192)),
        1 => Just((17, 8192)),
        2 => Just((5, 27_000)),
        2 => Just((3, 44_000)),
        2 => Just((3, 43_715)),
    ]
}

fn configs() -> impl Strategy<Value = (Config, Config)> {
    let target = || prop_oneof![Just(1_u16), Just(2), Just(3), Just(4), 5..12_u16, Just(255)];
    let depth = || prop_oneof![Just(1_u16), 2..6_u16, Just(255)];
    (buffers(), (target(), target()), (depth(), depth()), 1..6_usize).prop_map(
        |((credits, size), targets, depths, segments_max)| {
            // Both sides have the same sizes: otherwise negotiation can fail.
            let base = Config {
                receive_credit_max: credits,
                max_receive_size: size,
                max_send_size: size,
                ..Config::active()
            };
            let few = credits < 100;
            let side = |role, target, depth| Config {
                role,
                send_credit_target: target,
                send_depth: depth,
                // With few buffers, fragments must be full.
                send_segments_max: if few { 4 } else { segments_max },
                ..base
            };
            (side(Role::Active, targets.0, depths.0), side(Role::Passive, targets.1, depths.1))
        },
    )
}

fn play(pair: &mut Pair, events: Vec<Event>) -> [Vec<Vec<u8>>; 2] {
    let mut sent: [Vec<Vec<u8>>; 2] = Default::default();
    for (seed, event) in events.into_iter().enumerate() {
        match event {
            Event::Send { side, thousandths, cuts } => {
                let Some(parameters) = pair.peers[side].connection.parameters() else { continue };
                let max = parameters.max_fragmented_send_size as usize;
                let bytes = pattern(seed as u64, (max * thousandths as usize / 1000).clamp(1, max));
                let cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.into()).collect();
                pair.peers[side].send(&bytes, &cuts, None).expect("queued");
                sent[side].push(bytes);
            }
            Event::Pump(side) => {
                pair.pump(side);
            }
            Event::Deliver { from, count } => {
                for _ in 0..count {
                    pair.deliver(from);
                }
            }
            Event::Complete(side) => {
                pair.peers[side].complete();
            }
            Event::Release { side, count } => {
                for _ in 0..count {
                    pair.peers[side].release();
                }
            }
            Event::Wait { millis } => {
                let now = pair.now + Duration::from_millis(millis);
                pair.now = now;
                for peer in &mut pair.peers {
                    peer.timeout(now);
                }
            }
        }
    }
    sent
}

proptest! {
    #![proptest_config(ProptestConfig { cases: SCHEDULES, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn random_schedules_obey_the_credit_rules_and_deliver_everything(
        (active, passive) in configs(),
        events in prop::collection::vec(event(), 0..120),
    ) {
        let mut pair = Pair::new(active, passive);
        pair.link();
        pair.pump(ACTIVE);
        pair.deliver(ACTIVE);
        pair.pump(PASSIVE);
        pair.deliver(PASSIVE);
        let sent = play(&mut pair, events);
        // Whatever happened: once the upper layers do their part, everything arrives, and then nothing more is sent.
        pair.settle();
        for side in [ACTIVE, PASSIVE] {
            let (peer, other) = (&pair.peers[side], &pair.peers[1 - side]);
            prop_assert_eq!(peer.ended, None);
            prop_assert_eq!(peer.unsent(), 0);
            prop_assert!(other.received == sent[side], "messages arrive as sent, in order");
            let credits = peer.connection.credits();
            prop_assert_eq!(credits.posted, u32::from(peer.config.receive_buffers()));
            prop_assert!(credits.announced > 0 && credits.announced <= credits.posted);
            prop_assert!(credits.send > 0, "each side can send");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any size in fragments of any size, including Linux's 1364 bytes.
    #[test]
    fn reassembled_messages_equal_the_sent_messages(
        size in prop_oneof![Just(1364_u32), 600..1500_u32, 600..65_536_u32],
        lengths in prop::collection::vec(prop_oneof![1..5000_usize, 1..130_000_usize, Just(1340), Just(1341)], 1..6),
        cuts in prop::collection::vec(any::<u16>(), 0..4),
        segments_max in 1..6_usize,
    ) {
        let sizes = Config { max_send_size: size, max_receive_size: size, send_segments_max: segments_max, ..Config::active() };
        let mut pair = Pair::connected(sizes, Config { role: Role::Passive, ..sizes });
        let cuts: Vec<usize> = cuts.into_iter().map(usize::from).collect();
        for side in [ACTIVE, PASSIVE] {
            let messages: Vec<_> = lengths.iter().map(|l| pattern(*l as u64, *l)).collect();
            for message in &messages {
                pair.peers[side].send(message, &cuts, None).expect("queued");
            }
            pair.settle();
            prop_assert!(pair.peers[1 - side].received == messages);
            prop_assert_eq!(pair.peers[side].ended.or(pair.peers[1 - side].ended), None);
        }
    }
}
