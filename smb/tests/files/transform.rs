//! READ and WRITE with payload that is sealed or signed for RDMA ([MS-SMB2] 2.2.43, 3.3.5.12, 3.3.5.13).

use std::collections::HashSet;

use forebay_smb::crypto::{Cipher, SigningAlgorithm};
use forebay_smb::engine::{Protection, SessionInfo};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::negotiate_context::RdmaTransform as Id;
use forebay_smb::wire::read::{self, Channel, ResponseFlags};
use forebay_smb::wire::{Command, write};
use forebay_smbdirect::wire::{CryptoTransform, RdmaTransform, Token};

use crate::calls::{self, Lab, NEWEST, file, success};
use crate::rdma::{charge, descriptors, write_request};
use crate::support::Client;

const BOTH: [Id; 2] = [Id::ENCRYPTION, Id::SIGNING];
const CIPHERS: [Cipher; 4] = [Cipher::Aes128Gcm, Cipher::Aes256Gcm, Cipher::Aes128Ccm, Cipher::Aes256Ccm];
const SIGNING: [SigningAlgorithm; 3] =
    [SigningAlgorithm::AesGmac, SigningAlgorithm::AesCmac, SigningAlgorithm::HmacSha256];
const TRANSFORM: Channel = Channel::RDMA_TRANSFORM;
const V1: u32 = RdmaTransform::CHANNEL_RDMA_V1;
const INVALIDATE: u32 = RdmaTransform::CHANNEL_RDMA_V1_INVALIDATE;
/// The memory offset and the length that the tests write from.
const FROM: usize = 100_000;
const LENGTH: u32 = 70_001;

fn sealing(lab: &mut Lab) -> (Client, FileId) {
    let mut c = lab.over_rdma(|c| {
        c.transforms = BOTH.to_vec();
        c.seal = true;
    });
    let f = file("f").id(&mut c);
    (c, f)
}

fn signing(lab: &mut Lab, algorithm: SigningAlgorithm) -> (Client, FileId) {
    let mut c = lab.over_rdma(|c| {
        c.transforms = BOTH.to_vec();
        c.signing_algorithms = vec![algorithm];
        c.sign = true;
    });
    let f = file("f").id(&mut c);
    (c, f)
}

/// The transform that a response to a READ describes: its type, signature and nonce.
type Said = (u16, Vec<u8>, Vec<u8>);

/// Reads into these pieces of memory. Returns the byte count and the response's transform.
fn read_into(
    c: &mut Client,
    f: FileId,
    length: u32,
    pieces: &[(usize, u32)],
) -> Result<(u32, Option<Said>), NtStatus> {
    let mut body = Vec::new();
    read::Request {
        padding: 0,
        flags: read::Flags::empty(),
        length,
        offset: 0,
        file_id: f,
        minimum_count: 0,
        channel: Channel::RDMA_V1,
        remaining_bytes: 0,
        channel_info: &descriptors(pieces),
    }
    .encode(&mut body);
    let answer = c.call_charged(Command::READ, &body, charge(length)).expect("no reason to disconnect");
    success(&answer)?;
    let response = read::Response::parse(&answer.message).expect("well formed");
    let data = response.data(&answer.message).expect("well formed");
    let said = response.flags.contains(ResponseFlags::RDMA_TRANSFORM).then(|| {
        let frame = RdmaTransform::parse(data).expect("well formed");
        assert_eq!((frame.channel, frame.transform_count), (RdmaTransform::CHANNEL_NONE, 1));
        let crypto = CryptoTransform::parse(frame.transforms).expect("well formed");
        assert_eq!(crypto.len(), frame.transforms.len(), "one transform and nothing else");
        (crypto.transform_type, crypto.signature.to_vec(), crypto.nonce.to_vec())
    });
    assert_eq!(said.is_none(), data.is_empty());
    Ok((response.data_remaining, said))
}

/// Channel information of a WRITE.
fn info(
    channel: u32,
    transform_type: u16,
    signature: &[u8],
    nonce: &[u8],
    pieces: &[(usize, u32)],
) -> Vec<u8> {
    let mut info = Vec::new();
    let crypto = CryptoTransform { transform_type, signature, nonce };
    RdmaTransform::encode(channel, &crypto, &descriptors(pieces), &mut info);
    info
}

fn write_with(c: &mut Client, f: FileId, channel: Channel, info: &[u8]) -> Result<u32, NtStatus> {
    let body = write_request(f, LENGTH, channel, info);
    let answer = c.call_charged(Command::WRITE, &body, charge(LENGTH)).expect("no reason to disconnect");
    success(&answer)?;
    Ok(write::Response::parse(&answer.message).expect("well formed").count)
}

/// Seals the memory from [`FROM`] on. Returns the clear text and the channel information.
fn seal(c: &mut Client, channel: u32) -> (Vec<u8>, Vec<u8>) {
    let range = FROM..FROM + LENGTH as usize;
    let clear = c.memory[range.clone()].to_vec();
    let mut sealed = clear.clone();
    let (nonce, tag) = c.seal_payload(&mut sealed);
    c.memory[range].copy_from_slice(&sealed);
    (clear, info(channel, CryptoTransform::ENCRYPTION, &tag, &nonce, &[(FROM, LENGTH)]))
}

/// Signs that memory. Returns the channel information.
fn sign(c: &Client) -> Vec<u8> {
    let (key, nonce) = (c.signing_key(), [9; 12]);
    let signature = key.sign_payload(nonce, &c.memory[FROM..FROM + LENGTH as usize]);
    let nonce = if key.takes_nonce() { &nonce[..] } else { &[] };
    info(V1, CryptoTransform::SIGNING, &signature, nonce, &[(FROM, LENGTH)])
}

#[test]
fn rdma_transforms_are_negotiated_over_rdma_only() {
    let mut lab = Lab::new();
    let none = vec![Id::NONE];
    for (offered, ciphers, answered) in [
        (vec![], vec![Cipher::Aes128Gcm], None),
        (BOTH.to_vec(), vec![Cipher::Aes128Gcm], Some(BOTH.to_vec())),
        (vec![Id::SIGNING, Id(7)], vec![Cipher::Aes128Gcm], Some(vec![Id::SIGNING])),
        (vec![Id(7)], vec![Cipher::Aes128Gcm], Some(none.clone())),
        (vec![Id::NONE], vec![Cipher::Aes128Gcm], Some(none.clone())),
        // Without a cipher, nothing can be sealed.
        (vec![Id::ENCRYPTION], vec![], Some(none)),
    ] {
        let c = lab.over_rdma(|c| {
            c.transforms.clone_from(&offered);
            c.ciphers = ciphers;
        });
        assert_eq!(c.transforms_answered, answered, "{offered:?}");
    }
    let mut over_tcp = Client::new(&lab.server, 77, NEWEST);
    over_tcp.transforms = BOTH.to_vec();
    success(&over_tcp.negotiate().unwrap()).unwrap();
    assert_eq!(over_tcp.transforms_answered, None);
}

#[test]
fn sealed_payload_is_ciphertext_in_client_memory_and_clear_in_the_file() {
    for cipher in CIPHERS {
        let mut lab = Lab::new();
        let mut c = lab.over_rdma(|c| {
            c.transforms = BOTH.to_vec();
            c.ciphers = vec![cipher];
            c.seal = true;
        });
        let f = file("f").id(&mut c);
        let (clear, info) = seal(&mut c, V1);
        assert!(c.memory[FROM..FROM + LENGTH as usize] != clear[..], "{cipher:?}");
        assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Ok(LENGTH), "{cipher:?}");
        assert!(calls::read(&mut c, f, 0, LENGTH).expect("the data") == clear, "{cipher:?}");
        // In pieces, the second first, and with more room than there is data.
        c.memory.fill(0);
        let pieces = [(500_000, 50_000), (300_000, 50_000)];
        let (count, said) = read_into(&mut c, f, 100_000, &pieces).expect("the data");
        let (transform_type, tag, nonce) = said.expect("a transform");
        assert_eq!((count, transform_type), (LENGTH, CryptoTransform::ENCRYPTION));
        let mut data = [&c.memory[500_000..550_000], &c.memory[300_000..320_001]].concat();
        assert!(data != clear, "{cipher:?}");
        c.open_payload(&nonce, &tag, &mut data);
        assert!(data == clear, "{cipher:?}");
    }
}

#[test]
fn messages_and_payload_never_reuse_a_nonce() {
    let mut lab = Lab::new();
    let (mut c, f) = sealing(&mut lab);
    assert_eq!(calls::write(&mut c, f, 0, &[1; 4096]), Ok(4096));
    for _ in 0..20 {
        let (_, said) = read_into(&mut c, f, 4096, &[(0, 4096)]).expect("the data");
        let mut nonce = [0; 16];
        nonce[..12].copy_from_slice(&said.expect("a transform").2);
        c.nonces.push(nonce);
    }
    let different: HashSet<_> = c.nonces.iter().collect();
    assert!(c.nonces.len() > 40 && different.len() == c.nonces.len());
}

#[test]
fn signed_payload_is_clear_and_verifiable() {
    for algorithm in SIGNING {
        let mut lab = Lab::with(|volume| volume.protection = Protection::Sign);
        let (mut c, f) = signing(&mut lab, algorithm);
        let clear = c.memory[FROM..FROM + LENGTH as usize].to_vec();
        let info = sign(&c);
        assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Ok(LENGTH), "{algorithm:?}");
        c.memory.fill(0);
        let mut nonces = HashSet::new();
        for _ in 0..3 {
            let (count, said) = read_into(&mut c, f, LENGTH, &[(0, LENGTH)]).expect("the data");
            let (transform_type, signature, nonce) = said.expect("a transform");
            assert_eq!((count, transform_type), (LENGTH, CryptoTransform::SIGNING), "{algorithm:?}");
            assert!(c.memory[..LENGTH as usize] == clear, "{algorithm:?}");
            let key = c.signing_key();
            assert_eq!(nonce.len(), if key.takes_nonce() { 12 } else { 0 }, "{algorithm:?}");
            let used = if nonce.is_empty() { [0; 12] } else { nonce[..].try_into().unwrap() };
            assert!(key.verify_payload(used, &clear, &signature[..].try_into().unwrap()), "{algorithm:?}");
            // Nonces of messages, which use the same key, end in zeros ([MS-SMB2] 3.1.4.1).
            assert!(nonce.is_empty() || (nonce[11] != 0 && nonces.insert(nonce)), "{algorithm:?}");
        }
    }
}

#[test]
fn tampered_payload_is_not_written() {
    let mut lab = Lab::new();
    let (mut c, f) = sealing(&mut lab);
    let (_, info) = seal(&mut c, INVALIDATE);
    c.memory[FROM + 5] ^= 1;
    lab.memory.take_log();
    assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Err(NtStatus::AUTH_TAG_MISMATCH));
    assert_eq!(c.invalidated.pop(), Some(Some(Token(100))), "also after a failure");
    assert!(lab.memory.take_log().is_empty(), "nothing reached the file system");
    c.memory[FROM + 5] ^= 1;
    assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Ok(LENGTH), "the connection stays open");
    for algorithm in SIGNING {
        let mut lab = Lab::new();
        let (mut c, f) = signing(&mut lab, algorithm);
        let info = sign(&c);
        c.memory[FROM + LENGTH as usize - 1] ^= 1;
        lab.memory.take_log();
        assert_eq!(
            write_with(&mut c, f, TRANSFORM, &info),
            Err(NtStatus::INVALID_SIGNATURE),
            "{algorithm:?}"
        );
        assert!(lab.memory.take_log().is_empty(), "{algorithm:?}");
    }
}

#[test]
fn malformed_transforms_are_refused() {
    let mut lab = Lab::new();
    let (mut c, f) = sealing(&mut lab);
    let (_, good) = seal(&mut c, V1);
    let pieces = &[(FROM, LENGTH)][..];
    let changed = |at: usize, value: u8| {
        let mut info = good.clone();
        info[at] = value;
        info
    };
    let sealed = |signature: &[u8], nonce: &[u8], pieces| {
        info(V1, CryptoTransform::ENCRYPTION, signature, nonce, pieces)
    };
    // Descriptors in place of the padding.
    let mut unpadded = good.clone();
    unpadded.drain(52..56);
    unpadded[0] = 52;
    let mut far = good.clone();
    far.splice(56..56, [0; 8]);
    far[0] = 64;
    for (what, info, status) in [
        ("nothing", vec![], NtStatus::INVALID_PARAMETER),
        ("half a frame", good[..15].to_vec(), NtStatus::INVALID_PARAMETER),
        ("no transform", changed(8, 0), NtStatus::INVALID_PARAMETER),
        ("two transforms", changed(8, 2), NtStatus::INVALID_PARAMETER),
        ("no descriptors", changed(4, 0), NtStatus::INVALID_PARAMETER),
        ("a transform within", changed(4, 3), NtStatus::INVALID_PARAMETER),
        ("an unknown transform", changed(16, 3), NtStatus::INVALID_PARAMETER),
        ("a signature that reaches out", changed(19, 1), NtStatus::INVALID_PARAMETER),
        ("no padding", unpadded, NtStatus::INVALID_PARAMETER),
        ("too much padding", far, NtStatus::INVALID_PARAMETER),
        ("too little memory", sealed(&[0; 16], &[0; 12], &[(FROM, LENGTH - 1)]), NtStatus::INVALID_PARAMETER),
        (
            "an empty descriptor",
            sealed(&[0; 16], &[0; 12], &[(FROM, 0), (FROM, LENGTH)]),
            NtStatus::INVALID_PARAMETER,
        ),
        ("a tag too long", sealed(&[0; 17], &[0; 12], pieces), NtStatus::AUTH_TAG_MISMATCH),
        ("a tag cut short", sealed(&[0; 15], &[0; 12], pieces), NtStatus::AUTH_TAG_MISMATCH),
        ("a nonce of the other mode", sealed(&[0; 16], &[0; 11], pieces), NtStatus::AUTH_TAG_MISMATCH),
        ("a signature without signing", changed(16, 2), NtStatus::INVALID_PARAMETER),
    ] {
        lab.memory.take_log();
        assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Err(status), "{what}");
        assert!(lab.memory.take_log().is_empty(), "{what}");
    }
    assert_eq!(write_with(&mut c, f, TRANSFORM, &good), Ok(LENGTH), "the valid transform");
    // Sealed payload in a message that is not sealed.
    let (mut c, f) = signing(&mut lab, SigningAlgorithm::AesGmac);
    assert_eq!(write_with(&mut c, f, TRANSFORM, &good), Err(NtStatus::INVALID_PARAMETER));
    for (signature, nonce) in [(&[0; 15][..], &[0; 12][..]), (&[0; 16], &[0; 11])] {
        let info = info(V1, CryptoTransform::SIGNING, signature, nonce, pieces);
        assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Err(NtStatus::INVALID_SIGNATURE));
    }
}

#[test]
fn unnegotiated_transforms_are_refused_without_clear_text_fallback() {
    let mut lab = Lab::new();
    let there = descriptors(&[(FROM, LENGTH)]);
    for (offered, read, written) in [
        (vec![], Err(NtStatus::ACCESS_DENIED), Err(NtStatus::INVALID_PARAMETER)),
        (vec![Id::SIGNING], Err(NtStatus::ACCESS_DENIED), Err(NtStatus::INVALID_PARAMETER)),
        (vec![Id::ENCRYPTION], Ok(LENGTH), Ok(LENGTH)),
    ] {
        let mut c = lab.over_rdma(|c| {
            c.transforms.clone_from(&offered);
            c.seal = true;
        });
        let f = file("f").id(&mut c);
        assert_eq!(
            calls::write(&mut c, f, 0, &vec![3; LENGTH as usize]),
            Ok(LENGTH),
            "inline payload is allowed"
        );
        let found = read_into(&mut c, f, LENGTH, &[(0, LENGTH)]).map(|(count, _)| count);
        assert_eq!(found, read, "{offered:?}");
        let (_, info) = seal(&mut c, V1);
        assert_eq!(write_with(&mut c, f, TRANSFORM, &info), written, "{offered:?}");
        assert_eq!(
            write_with(&mut c, f, Channel::RDMA_V1, &there),
            Err(NtStatus::ACCESS_DENIED),
            "{offered:?}"
        );
    }
    // If no protection is required, nothing is protected, as before.
    let mut c = lab.over_rdma(|c| c.transforms = BOTH.to_vec());
    let f = file("g").id(&mut c);
    assert_eq!(write_with(&mut c, f, Channel::RDMA_V1, &there), Ok(LENGTH));
    assert_eq!(read_into(&mut c, f, LENGTH, &[(0, LENGTH)]), Ok((LENGTH, None)));
    // With signatures on all messages, but without the signing transform.
    let mut lab = Lab::with(|volume| volume.protection = Protection::Sign);
    let mut c = lab.over_rdma(|c| {
        c.transforms = vec![Id::ENCRYPTION];
        c.sign = true;
    });
    let f = file("f").id(&mut c);
    assert_eq!(write_with(&mut c, f, Channel::RDMA_V1, &there), Err(NtStatus::ACCESS_DENIED));
    let info = sign(&c);
    assert_eq!(write_with(&mut c, f, TRANSFORM, &info), Err(NtStatus::INVALID_PARAMETER));
}

fn info_of(lab: &Lab, client: &Client) -> SessionInfo {
    let infos = lab.server.session_infos();
    infos.into_iter().find(|info| info.id == client.session_id).expect("it is listed")
}

#[test]
fn session_infos_report_transports_and_their_protection() {
    use Protection::{Optional, Seal, Sign};
    for (protection, transforms, over_rdma, over_tcp) in [
        (Optional, &[][..], "rdma", "tcp"),
        (Optional, &BOTH, "rdma", "tcp"),
        (Seal, &BOTH, "rdma-sealed", "tcp-sealed"),
        (Seal, &[Id::SIGNING], "rdma-inline-sealed", "tcp-sealed"),
        (Seal, &[], "rdma-inline-sealed", "tcp-sealed"),
        (Sign, &BOTH, "rdma-signed", "tcp-signed"),
        (Sign, &[], "rdma-inline-signed", "tcp-signed"),
    ] {
        let mut lab = Lab::with(|volume| volume.protection = protection);
        let first = lab.over_rdma(|c| {
            c.transforms = transforms.to_vec();
            c.seal = protection == Seal;
        });
        let _second = lab.channel(&first);
        if protection == Optional {
            // The client can protect more than it must.
            let mut sealing = lab.over_rdma(|c| c.transforms = transforms.to_vec());
            sealing.seal = true;
            file("f").id(&mut sealing);
            let word = if transforms.is_empty() { "rdma-inline-sealed" } else { "rdma-sealed" };
            assert_eq!(info_of(&lab, &sealing).transports, [word]);
        }
        let info = info_of(&lab, &first);
        assert_eq!(info.transports, [over_rdma, over_tcp], "{protection:?} {transforms:?}");
        assert_eq!(info.cipher.is_empty(), protection != Seal);
    }
}
