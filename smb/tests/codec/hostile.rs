//! Untrusted input: the corpora, truncated at every position and mutated at random.

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::test_runner::{RngAlgorithm, TestRng};

use crate::allocation::peak_of;
use crate::corpus::seeds;
use crate::targets;

/// Maximum number of bytes held for each byte of input: the smallest element of a list (twelve bytes) becomes a value of about
/// 170, in a vector that doubles, and the targets hold it twice to compare.
const HELD_PER_BYTE: usize = 64;
/// Bytes held regardless of the input: the first growth of vectors, and the fixed part of a re-encoded message.
const HELD_ALWAYS: usize = 8 * 1024;

pub(crate) type Target = fn(&[u8]);

pub(crate) const TARGETS: &[(&str, Target)] = &[
    ("frame", targets::frame),
    ("responses", targets::responses),
    ("create_contexts", targets::create_contexts),
    ("negotiate_contexts", targets::negotiate_contexts),
    ("fscc", targets::fscc),
    ("authenticate", targets::authenticate),
    ("keytab", targets::keytab),
    ("initiate", targets::initiate),
    ("rpc", targets::rpc),
];

fn target(name: &str) -> Target {
    TARGETS.iter().find(|(target, _)| *target == name).expect("a corpus for every target").1
}

fn check(target: &str, seed: &str, input: &[u8]) {
    let run = self::target(target);
    let mut held = 0;
    let result = catch_unwind(AssertUnwindSafe(|| held = peak_of(|| run(input))));
    assert!(result.is_ok(), "{target} panicked on a child of {seed}: {input:02x?}");
    let most = HELD_ALWAYS + HELD_PER_BYTE * input.len();
    assert!(
        held <= most,
        "{target} held {held} bytes for {} of a child of {seed}: {input:02x?}",
        input.len()
    );
}

#[test]
fn every_target_has_seeds() {
    let seeds = seeds();
    for (name, _) in TARGETS {
        assert!(seeds.iter().any(|(target, ..)| target == name), "{name} has no seeds");
    }
}

#[test]
fn truncated_messages_never_panic_nor_over_allocate() {
    for (target, seed, bytes) in seeds() {
        for len in 0..=bytes.len() {
            check(&target, &seed, &bytes[..len]);
        }
    }
}

#[test]
fn mutated_messages_never_panic_nor_over_allocate() {
    // A fixed seed, so that failures are reproducible.
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut random = |below: usize| {
        use proptest::prelude::Rng;
        (rng.next_u64() % below.max(1) as u64) as usize
    };
    for (target, seed, bytes) in seeds() {
        for _ in 0..400 {
            let mut input = bytes.clone();
            for _ in 0..=random(4) {
                mutate(&mut input, &mut random);
            }
            check(&target, &seed, &input);
        }
    }
}

/// Boundary values of lengths and offsets.
const EDGES: [u32; 10] = [0, 1, 2, 7, 8, 0x7fff, 0x8000, 0xffff, 0x7fff_ffff, 0xffff_ffff];

fn mutate(input: &mut Vec<u8>, random: &mut impl FnMut(usize) -> usize) {
    if input.is_empty() {
        input.push(random(256) as u8);
        return;
    }
    let at = random(input.len());
    match random(6) {
        0 => input[at] ^= 1 << random(8),
        1 => input[at] = random(256) as u8,
        2 => input.truncate(at),
        3 => input.insert(at, random(256) as u8),
        4 => {
            let edge = EDGES[random(EDGES.len())].to_le_bytes();
            let width = [1, 2, 4][random(3)].min(input.len() - at);
            input[at..at + width].copy_from_slice(&edge[..width]);
        }
        _ => {
            let tail = input[at..].to_vec();
            input.extend_from_slice(&tail);
        }
    }
}
