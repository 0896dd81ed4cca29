//! The codec: it reads what it wrote, and refuses what it cannot read without panics. And the fuzz targets, over the committed
//! corpora, truncated at every position and mutated at random.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::{env, fs};

use forebay_smbdirect::limits;
use forebay_smbdirect::wire::{
    BufferDescriptor, CryptoTransform, DataTransfer, Descriptors, Fault, Flags, NegotiateRequest,
    NegotiateResponse, RdmaTransform, Status, Token,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng};

/// The fuzz targets.
#[allow(unreachable_pub, reason = "public in the crate of the fuzz targets")]
#[path = "../../fuzz/src/smbdirect.rs"]
mod targets;

type Target = fn(&[u8]);

const TARGETS: &[(&str, Target)] = &[
    ("smbdirect_messages", targets::smbdirect_messages),
    ("smbdirect_connection", targets::smbdirect_connection),
];

prop_compose! {
    fn request()(min_version: u16, max_version: u16, credits_requested: u16, preferred_send_size: u32,
        max_receive_size: u32, max_fragmented_size: u32) -> NegotiateRequest {
        NegotiateRequest { min_version, max_version, credits_requested, preferred_send_size, max_receive_size,
            max_fragmented_size }
    }
}

prop_compose! {
    fn response()(versions: [u16; 3], credits: [u16; 2], status: u32, sizes: [u32; 4]) -> NegotiateResponse {
        NegotiateResponse {
            min_version: versions[0], max_version: versions[1], negotiated_version: versions[2],
            credits_requested: credits[0], credits_granted: credits[1], status: Status(status),
            max_read_write_size: sizes[0], preferred_send_size: sizes[1], max_receive_size: sizes[2],
            max_fragmented_size: sizes[3],
        }
    }
}

fn descriptor() -> impl Strategy<Value = BufferDescriptor> {
    (0..1_u64 << 63, any::<u32>(), any::<u32>()).prop_map(|(offset, token, length)| BufferDescriptor {
        offset,
        token: Token(token),
        length,
    })
}

fn encode_all(descriptors: &[BufferDescriptor]) -> Vec<u8> {
    descriptors.iter().flat_map(BufferDescriptor::encode).collect()
}

proptest! {
    #[test]
    fn negotiation_messages_round_trip(request in request(), response in response(), cut in 0..20_usize) {
        prop_assert_eq!(NegotiateRequest::parse(&request.encode()), Ok(request));
        prop_assert_eq!(NegotiateResponse::parse(&response.encode()), Ok(response));
        prop_assert_eq!(NegotiateRequest::parse(&request.encode()[..cut]).map_err(|e| e.fault), Err(Fault::Truncated));
        prop_assert_eq!(NegotiateResponse::parse(&response.encode()[..cut + 12]).map_err(|e| e.fault), Err(Fault::Truncated));
    }

    #[test]
    fn data_transfers_round_trip(
        credits in any::<[u16; 2]>(), flags: u16, remaining_data_length: u32, eights in 3..200_u32, data_length in 0..2000_u32,
        behind in 0..10_usize,
    ) {
        let data = DataTransfer {
            credits_requested: credits[0], credits_granted: credits[1], flags: Flags(flags), remaining_data_length,
            data_offset: eights * 8, data_length,
        };
        let mut bytes = data.encode()[..DataTransfer::LEN].to_vec();
        let end = (data.data_offset + data_length) as usize;
        bytes.resize(end + behind, 7);
        prop_assert_eq!(DataTransfer::parse(&bytes), Ok(data));
        prop_assert!(DataTransfer::parse(&bytes[..end - 1]).is_err());
        let misaligned = DataTransfer { data_offset: data.data_offset + 1 + u32::from(flags % 7), ..data };
        bytes.splice(..20, misaligned.encode()[..20].iter().copied());
        prop_assert_eq!(DataTransfer::parse(&bytes).map_err(|e| e.fault), Err(Fault::Offset));
    }

    #[test]
    fn descriptors_round_trip(descriptors in vec(descriptor(), 1..20), cut in 1..16_usize) {
        let bytes = encode_all(&descriptors);
        let parsed = Descriptors::parse(&bytes).expect("well formed");
        prop_assert_eq!(parsed.iter().collect::<Vec<_>>(), descriptors.clone());
        prop_assert_eq!(parsed.first_token(), descriptors[0].token);
        prop_assert_eq!(parsed.len(), descriptors.len());
        prop_assert_eq!(BufferDescriptor::parse(&bytes), Ok(descriptors[0]));
        prop_assert_eq!(Descriptors::parse(&bytes[cut..]).map_err(|e| e.fault), Err(Fault::Truncated));
    }

    /// A slice equals the result of a byte-by-byte walk over the elements.
    #[test]
    fn descriptor_slices_cover_the_requested_range(lengths in vec(0..40_u32, 1..8), offset in 0..200_u64, length in 0..200_u64) {
        let descriptors: Vec<_> = lengths.iter().enumerate()
            .map(|(i, length)| BufferDescriptor { offset: 1000 * i as u64, token: Token(i as u32), length: *length })
            .collect();
        let bytes = encode_all(&descriptors);
        let parsed = Descriptors::parse(&bytes).expect("well formed");
        let addresses = |pieces: &[BufferDescriptor]| -> Vec<(u32, u64)> {
            pieces.iter().flat_map(|p| (0..u64::from(p.length)).map(|b| (p.token.0, p.offset + b))).collect()
        };
        let all = addresses(&descriptors);
        let sliced = parsed.slice(offset, length).map(|pieces| addresses(&pieces.collect::<Vec<_>>()));
        let expected = all.get(offset as usize..(offset + length) as usize).map(<[_]>::to_vec);
        prop_assert_eq!(sliced, expected);
    }
}

#[test]
fn the_examples_of_the_specification_are_parsed_and_encoded() {
    // [MS-SMBD] 4.1.
    let request = [0, 1, 0, 1, 0, 0, 10, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 2, 0];
    let parsed = NegotiateRequest::parse(&request).expect("a request");
    assert_eq!((parsed.min_version, parsed.max_version, parsed.credits_requested), (0x0100, 0x0100, 10));
    assert_eq!((parsed.preferred_send_size, parsed.max_receive_size), (1024, 1024));
    assert_eq!(parsed.max_fragmented_size, 128 * 1024);
    assert_eq!(parsed.encode(), request);
    let response =
        [0, 1, 0, 1, 0, 1, 0, 0, 10, 0, 10, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 0, 2, 0];
    let parsed = NegotiateResponse::parse(&response).expect("a response");
    assert_eq!(
        (parsed.negotiated_version, parsed.credits_granted, parsed.status),
        (0x0100, 10, Status::SUCCESS)
    );
    assert_eq!((parsed.max_read_write_size, parsed.max_fragmented_size), (1 << 20, 128 * 1024));
    assert_eq!(parsed.encode(), response);
    // [MS-SMBD] 4.3, the last fragment; 4.4, the descriptor.
    let header = [10, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 24, 0, 0, 0, 0x18, 2, 0, 0, 0, 0, 0, 0];
    let data = DataTransfer {
        credits_requested: 10,
        credits_granted: 1,
        data_offset: 24,
        data_length: 536,
        ..DataTransfer::default()
    };
    assert_eq!(data.encode(), header);
    let descriptor = [0x12, 0xe0, 0xcd, 0xab, 0, 0, 0, 0, 0x56, 0xbc, 0, 0x1a, 0, 0, 0x10, 0];
    let parsed = BufferDescriptor::parse(&descriptor).expect("a descriptor");
    assert_eq!((parsed.offset, parsed.token, parsed.length), (0xabcd_e012, Token(0x1a00_bc56), 1 << 20));
    assert_eq!(parsed.encode(), descriptor);
}

#[test]
fn invalid_descriptor_arrays_are_refused() {
    let one = BufferDescriptor { offset: u64::MAX - 5, token: Token(1), length: 5 };
    assert_eq!(Descriptors::parse(&[]).map_err(|e| e.fault), Err(Fault::Truncated));
    assert!(Descriptors::parse(&one.encode()).is_ok());
    let around = BufferDescriptor { length: 6, ..one };
    let error = Descriptors::parse(&encode_all(&[one, around])).expect_err("wraps around");
    assert_eq!((error.fault, error.offset), (Fault::Value, 16));
    assert!(Descriptors::parse(&encode_all(&vec![one; limits::DESCRIPTORS_MAX])).is_ok());
    let many = encode_all(&vec![one; limits::DESCRIPTORS_MAX + 1]);
    assert_eq!(Descriptors::parse(&many).map_err(|e| e.fault), Err(Fault::TooMany));
}

/// A transform with a signature, followed by two descriptors.
fn transform(channel: u32) -> Vec<u8> {
    let crypto = [2, 0, 16, 0, 12, 0, 0, 0];
    let mut bytes = RdmaTransform::encode_fixed(channel, 1, 16 + 40, 32).to_vec();
    bytes.extend_from_slice(&crypto);
    bytes.resize(16 + 40, 0x5a);
    for token in [7, 8] {
        bytes.extend_from_slice(
            &BufferDescriptor { offset: 0x1000, token: Token(token), length: 4096 }.encode(),
        );
    }
    bytes
}

#[test]
fn descriptors_after_a_transform_are_parsed() {
    let bytes = transform(RdmaTransform::CHANNEL_RDMA_V1_INVALIDATE);
    let parsed = RdmaTransform::parse(&bytes).expect("well formed");
    assert_eq!((parsed.transform_count, parsed.transforms.len()), (1, 40));
    assert_eq!(parsed.descriptors.map(|d| (d.first_token(), d.total_bytes())), Some((Token(7), 8192)));
    let none = transform(RdmaTransform::CHANNEL_NONE);
    assert_eq!(RdmaTransform::parse(&none).expect("well formed").descriptors, None);

    let fault = |bytes: &[u8]| RdmaTransform::parse(bytes).expect_err("malformed").fault;
    assert_eq!(fault(&bytes[..15]), Fault::Truncated);
    assert_eq!(fault(&bytes[..bytes.len() - 1]), Fault::Truncated);
    assert_eq!(fault(&transform(3)), Fault::Value, "a transform of a transform");
    let mut inside = bytes.clone();
    inside[0] = 8;
    assert_eq!(fault(&inside), Fault::Offset, "descriptors in the fixed part");
    let mut without = bytes.clone();
    without[8] = 0;
    assert_eq!(fault(&without), Fault::Value, "no transform");
}

proptest! {
    #[test]
    fn crypto_transforms_round_trip(kind: u16, signature in vec(any::<u8>(), 0..40), nonce in vec(any::<u8>(), 0..40)) {
        let crypto = CryptoTransform { transform_type: kind, signature: &signature, nonce: &nonce };
        let mut bytes = Vec::new();
        crypto.encode(&mut bytes);
        prop_assert_eq!(crypto.padded_len(), bytes.len().next_multiple_of(8));
        for length in 0..bytes.len() {
            prop_assert_eq!(CryptoTransform::parse(&bytes[..length]).map_err(|e| e.fault), Err(Fault::Truncated));
        }
        bytes.extend_from_slice(b"padding");
        prop_assert_eq!(CryptoTransform::parse(&bytes), Ok(crypto));
    }
}

#[test]
fn a_crypto_transform_has_the_specified_layout() {
    let crypto = CryptoTransform {
        transform_type: CryptoTransform::ENCRYPTION,
        signature: &[0xaa; 16],
        nonce: &[0xbb; 12],
    };
    let mut bytes = Vec::new();
    crypto.encode(&mut bytes);
    assert_eq!(bytes[..8], [1, 0, 16, 0, 12, 0, 0, 0]);
    assert_eq!((&bytes[8..24], &bytes[24..]), (&[0xaa; 16][..], &[0xbb; 12][..]));
    assert_eq!((bytes.len(), crypto.padded_len()), (CryptoTransform::LEN_MAX, 40));
}

#[test]
fn a_transform_and_its_descriptors_round_trip() {
    let descriptors = encode_all(&[BufferDescriptor { offset: 0x1000, token: Token(7), length: 4096 }]);
    for nonce in [&[][..], &[1; 11], &[2; 12]] {
        let crypto = CryptoTransform { transform_type: CryptoTransform::SIGNING, signature: &[9; 16], nonce };
        let mut bytes = Vec::new();
        RdmaTransform::encode(RdmaTransform::CHANNEL_RDMA_V1, &crypto, &descriptors, &mut bytes);
        let parsed = RdmaTransform::parse(&bytes).expect("well formed");
        assert_eq!(CryptoTransform::parse(parsed.transforms), Ok(crypto));
        assert_eq!(parsed.transforms.len(), crypto.padded_len());
        assert_eq!(parsed.descriptors, Some(Descriptors::parse(&descriptors).expect("well formed")));
    }
}

/// Seeds of the fuzz targets: target, name, bytes.
fn samples() -> BTreeSet<(String, String, Vec<u8>)> {
    let request = NegotiateRequest {
        min_version: 0x0100,
        max_version: 0x0100,
        credits_requested: 255,
        preferred_send_size: 32_768,
        max_receive_size: 1364,
        max_fragmented_size: 1 << 20,
    };
    let response = NegotiateResponse {
        min_version: 0x0100,
        max_version: 0x0100,
        negotiated_version: 0x0100,
        credits_requested: 255,
        credits_granted: 255,
        status: Status::SUCCESS,
        max_read_write_size: 8 << 20,
        preferred_send_size: 32_768,
        max_receive_size: 1364,
        max_fragmented_size: 1 << 20,
    };
    let data = |granted, flags, length: u32, remaining| {
        let data = DataTransfer {
            credits_requested: 255,
            credits_granted: granted,
            flags,
            remaining_data_length: remaining,
            data_offset: if length > 0 { 24 } else { 0 },
            data_length: length,
        };
        let mut bytes = data.encode()[..if length > 0 { 24 } else { 20 }].to_vec();
        bytes.resize(bytes.len() + length as usize, b'x');
        bytes
    };
    let none = Flags::default();
    let messages: [(&str, Vec<u8>); 8] = [
        ("request", request.encode().to_vec()),
        ("response", response.encode().to_vec()),
        ("refusal", NegotiateResponse::refusal(Status::NOT_SUPPORTED).encode().to_vec()),
        ("empty", data(3, none, 0, 0)),
        ("keepalive", data(0, Flags::RESPONSE_REQUESTED, 0, 0)),
        ("fragment", data(1, none, 100, 400)),
        (
            "descriptors",
            encode_all(&[
                BufferDescriptor { offset: 0xabcd_e012, token: Token(0x1a00_bc56), length: 1 << 20 },
                BufferDescriptor { offset: 0x1000, token: Token(2), length: 4096 },
            ]),
        ),
        ("transform", transform(RdmaTransform::CHANNEL_RDMA_V1)),
    ];
    // Scripts: each message from the peer starts with a command and its length.
    let say = |bytes: &[u8]| [&[6, bytes.len() as u8 + 1, 0], bytes].concat();
    let script = |role: u8, steps: &[&[u8]]| [&[role], steps.concat().as_slice()].concat();
    let connections: [(&str, Vec<u8>); 5] = [
        (
            "server",
            script(
                0,
                &[
                    &say(&request.encode()),
                    &[0, 1, 10],
                    &say(&data(2, none, 100, 0)),
                    &[251, 1, 26],
                    &say(&data(4, none, 100, 50)),
                    &say(&data(1, none, 50, 0)),
                    &[1, 252, 252],
                ],
            ),
        ),
        (
            "client",
            script(
                1,
                &[
                    &[0, 1, 10],
                    &say(&response.encode()),
                    &[251, 1],
                    &say(&data(3, none, 20, 0)),
                    &[1, 26, 253],
                ],
            ),
        ),
        ("refused", script(0, &[&[0], &say(&[0; 20]), &[1, 10]])),
        (
            "keepalive",
            script(
                0,
                &[
                    &say(&request.encode()),
                    &[0, 1, 252, 252, 1],
                    &say(&data(1, Flags::RESPONSE_REQUESTED, 0, 0)),
                    &[1],
                ],
            ),
        ),
        (
            "crumbs",
            script(
                0,
                &[
                    &say(&request.encode()),
                    &[0, 1],
                    &say(&data(9, none, 1, 99)),
                    &say(&data(0, none, 1, 98)),
                    &[1, 244],
                ],
            ),
        ),
    ];
    let named = |target: &'static str, list: &[(&str, Vec<u8>)]| -> Vec<_> {
        list.iter()
            .map(|(name, bytes)| (target.to_owned(), format!("sample-{name}"), bytes.clone()))
            .collect()
    };
    let mut all: BTreeSet<_> = named("smbdirect_messages", &messages).into_iter().collect();
    all.extend(named("smbdirect_connection", &connections));
    all
}

fn directory(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

fn seeds() -> BTreeSet<(String, String, Vec<u8>)> {
    let mut seeds = BTreeSet::new();
    for (target, _) in TARGETS {
        for seed in fs::read_dir(directory(target)).expect("a directory for each target") {
            let seed = seed.expect("a readable directory").path();
            let name = seed.file_name().expect("a name").to_string_lossy().into_owned();
            seeds.insert(((*target).to_owned(), name, fs::read(&seed).expect("a readable seed")));
        }
    }
    seeds
}

/// `FOREBAY_UPDATE_CORPUS=1 cargo test -p forebay-smbdirect --test codec corpora` writes the seeds again.
#[test]
fn corpora_hold_every_sample() {
    let samples = samples();
    if env::var_os("FOREBAY_UPDATE_CORPUS").is_some() {
        for (target, name, bytes) in &samples {
            fs::create_dir_all(directory(target)).expect("the source tree is writable");
            fs::write(directory(target).join(name), bytes).expect("the source tree is writable");
        }
    }
    // Findings of a fuzzer keep their own names.
    let committed: BTreeSet<_> =
        seeds().into_iter().filter(|(_, name, _)| name.starts_with("sample-")).collect();
    assert!(committed == samples, "out of date");
}

fn check(target: &str, seed: &str, input: &[u8]) {
    let run = TARGETS.iter().find(|(name, _)| *name == target).expect("a target for every seed").1;
    let result = catch_unwind(AssertUnwindSafe(|| run(input)));
    assert!(result.is_ok(), "{target} panicked on a child of {seed}: {input:02x?}");
}

#[test]
fn hostile_input_never_panics() {
    // A fixed seed, so that failures are reproducible.
    let mut rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut random = |below: usize| {
        use proptest::prelude::Rng;
        (rng.next_u64() % below.max(1) as u64) as usize
    };
    const EDGES: [u32; 10] = [0, 1, 2, 7, 8, 24, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff];
    for (target, seed, bytes) in seeds() {
        for len in 0..=bytes.len() {
            check(&target, &seed, &bytes[..len]);
        }
        for _ in 0..2000 {
            let mut input = bytes.clone();
            for _ in 0..=random(4) {
                let at = random(input.len());
                match random(4) {
                    0 => input[at] ^= 1 << random(8),
                    1 => input[at] = random(256) as u8,
                    2 => {
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
            check(&target, &seed, &input);
        }
    }
}
