//! The start of a test's client: the bodies of its first requests and its side of the logon. Shared with the server's tests.

use forebay_smb::auth::{Initiator, InitiatorConfig, NtHash};
use forebay_smb::crypto::{Cipher, SessionKey, SigningAlgorithm};
use forebay_smb::wire::negotiate::{self, Capabilities, Dialect, SecurityMode};
use forebay_smb::wire::negotiate_context::{self, HashAlgorithm, NegotiateContext, RdmaTransform};
use forebay_smb::wire::{Command, FileTime, Header, Ids, session_setup, tree_connect};

/// The client's default capabilities.
pub const CAPABILITIES: Capabilities = Capabilities::ENCRYPTION.union(Capabilities::LARGE_MTU);
pub const CLIENT_GUID: [u8; 16] = [3; 16];

/// A header for a request within a session and a tree.
pub fn header(
    command: Command,
    message_id: u64,
    charge: u16,
    credits: u16,
    session_id: u64,
    tree_id: u32,
) -> Header {
    let mut header = Header::request(command, message_id);
    header.credit_charge = charge;
    header.credits = credits;
    header.session_id = session_id;
    header.ids = Ids::Sync { process_id: 0xfeff, tree_id };
    header
}

/// NEGOTIATE for one dialect. Without signing algorithms, the context is omitted.
pub fn negotiate(dialect: Dialect, ciphers: &[Cipher], signing: &[SigningAlgorithm]) -> Vec<u8> {
    negotiate_as(dialect, ciphers, signing, CAPABILITIES, CLIENT_GUID)
}

/// Like [`negotiate`], with the client's GUID and capabilities.
pub fn negotiate_as(
    dialect: Dialect,
    ciphers: &[Cipher],
    signing: &[SigningAlgorithm],
    capabilities: Capabilities,
    client_guid: [u8; 16],
) -> Vec<u8> {
    negotiate_with(dialect, ciphers, signing, &[], false, capabilities, client_guid)
}

/// Like [`negotiate_as`], with the transforms for payload over RDMA.
pub fn negotiate_with(
    dialect: Dialect,
    ciphers: &[Cipher],
    signing: &[SigningAlgorithm],
    transforms: &[RdmaTransform],
    posix: bool,
    capabilities: Capabilities,
    client_guid: [u8; 16],
) -> Vec<u8> {
    let mut contexts = Vec::new();
    if dialect == Dialect::SMB3_1_1 {
        contexts.push(NegotiateContext::PreauthIntegrity {
            hash_algorithms: vec![HashAlgorithm::SHA_512],
            salt: &[1; 32],
        });
        if !ciphers.is_empty() {
            contexts.push(NegotiateContext::Encryption {
                ciphers: ciphers.iter().map(|cipher| negotiate_context::Cipher(cipher.id())).collect(),
            });
        }
        if !signing.is_empty() {
            contexts.push(NegotiateContext::Signing {
                algorithms: signing.iter().map(|a| negotiate_context::SigningAlgorithm(a.id())).collect(),
            });
        }
        if !transforms.is_empty() {
            contexts.push(NegotiateContext::RdmaTransform { transforms: transforms.to_vec() });
        }
        if posix {
            contexts.push(NegotiateContext::Posix { data: &negotiate_context::POSIX_CREATE_TAG });
        }
    }
    let mut body = Vec::new();
    negotiate::Request {
        security_mode: SecurityMode::SIGNING_ENABLED,
        capabilities,
        client_guid,
        client_start_time: FileTime(0),
        dialects: vec![dialect],
        contexts,
    }
    .encode(&mut body);
    body
}

/// The client's side of an NTLM logon.
pub fn initiator(user: &str, password: &str) -> Initiator {
    initiator_with(user, password, [5; 16])
}

/// Like [`initiator`], with the session key to export.
pub fn initiator_with(user: &str, password: &str, session_key: [u8; 16]) -> Initiator {
    Initiator::new(InitiatorConfig {
        user: user.to_owned(),
        domain: String::new(),
        workstation: "TEST".to_owned(),
        nt_hash: NtHash::from_password(password),
        spnego: true,
        challenge: [9; 8],
        target_name: None,
        random_session_key: Some(SessionKey::new(&session_key)),
    })
}

/// One leg of a logon.
pub fn session_setup(token: &[u8], previous_session_id: u64) -> Vec<u8> {
    session_setup_with(token, previous_session_id, session_setup::Flags::empty())
}

/// One leg of a channel binding.
pub fn session_bind(token: &[u8]) -> Vec<u8> {
    session_setup_with(token, 0, session_setup::Flags::BINDING)
}

fn session_setup_with(token: &[u8], previous_session_id: u64, flags: session_setup::Flags) -> Vec<u8> {
    let mut body = Vec::new();
    session_setup::Request {
        flags,
        security_mode: SecurityMode::SIGNING_ENABLED,
        capabilities: Capabilities::empty(),
        channel: 0,
        previous_session_id,
        security_buffer: token,
    }
    .encode(&mut body);
    body
}

/// TREE_CONNECT to a share.
pub fn tree_connect(share: &str) -> Vec<u8> {
    let mut body = Vec::new();
    tree_connect::Request { flags: tree_connect::Flags::empty(), path: format!(r"\\server\{share}") }
        .encode(&mut body);
    body
}
