//! From a connection to a tree: NEGOTIATE 3.1.1, SESSION_SETUP with NTLMv2, TREE_CONNECT.

use std::net::SocketAddr;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use forebay_smb::auth::{ClientStep, Initiator, InitiatorConfig, NtHash};
use forebay_smb::crypto::{
    Cipher, KeyDerivation, NonceSequence, OpeningKey, PreauthHash, SealingKey, SessionKey, SigningAlgorithm,
    SigningKey, client_to_server_key, server_to_client_key,
};
use forebay_smb::status::NtStatus;
use forebay_smb::wire::negotiate_context::{self, HashAlgorithm, NegotiateContext};
use forebay_smb::wire::session_setup::Flags;
use forebay_smb::wire::{
    Capabilities, Command, Dialect, FileTime, SecurityMode, negotiate, session_setup, tree_connect,
};

use super::connection::{Connection, Protection};
use super::credits::Credits;
use super::request::{Identity, Request};

/// From 1601, the epoch of FILETIME, to 1970, in units of 100 ns.
const FILETIME_OF_1970: u64 = 116_444_736_000_000_000;

/// An account and a share on an SMB server.
#[derive(Clone)]
pub(crate) struct Account {
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) share: String,
    pub(crate) security: Security,
}

/// How to protect messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Security {
    Plain,
    Signed,
    Sealed,
}

/// The algorithms that the server chose, and its capabilities.
struct Negotiated {
    signing: SigningAlgorithm,
    cipher: Option<Cipher>,
    has_channels: bool,
}

/// A session with a tree, and the data to bind further channels to it.
pub(crate) struct Session {
    client_guid: [u8; 16],
    identity: Identity,
    signing: SigningKey,
    sealing: Option<(SealingKey, OpeningKey)>,
}

/// Parameters of a connection.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// Address of the server.
    pub(crate) address: SocketAddr,
    /// Number of spare credits.
    pub(crate) credits: u64,
    /// The usual payload.
    pub(crate) io_bytes: usize,
}

/// Connects, logs on and connects to the share, with a separate client GUID: servers would otherwise group connections of one
/// client.
pub(crate) fn connect(terms: Terms, account: &Account) -> Result<(Connection, Session)> {
    let client_guid = random()?;
    let (mut connection, negotiated, mut preauth) = negotiate(terms, client_guid)?;
    let key = log_on(&mut connection, account, &mut preauth, Flags::empty()).context("log on")?;
    let derivation = KeyDerivation::Smb311(&preauth);
    let signing = SigningKey::derive(negotiated.signing, derivation, &key);
    let mut sealing = None;
    if account.security == Security::Sealed {
        let cipher = negotiated.cipher.context("the server does not seal")?;
        sealing = Some((
            SealingKey::new(&client_to_server_key(derivation, key.as_bytes(), cipher)),
            OpeningKey::new(&server_to_client_key(derivation, key.as_bytes(), cipher)),
        ));
    }
    // [MS-SMB2] 3.2.4.2.4: in 3.1.1 a TREE_CONNECT is always signed or sealed.
    connection.protection = protection(sealing.as_ref(), 0, signing.clone());
    let mut request = Request::default();
    let path = format!(r"\\{}\{}", terms.address.ip(), account.share);
    request.set(Command::TREE_CONNECT, |body| {
        tree_connect::Request { flags: tree_connect::Flags::empty(), path }.encode(body);
    });
    let answer = connection.call(&mut request)?;
    answer.check(&format!("TREE_CONNECT to {}", account.share))?;
    let flags = tree_connect::Response::parse(answer.message)?.share_flags;
    connection.identity.tree_id = answer.header.tree_id();
    if account.security == Security::Plain {
        ensure!(!flags.contains(tree_connect::ShareFlags::ENCRYPT_DATA), "the share needs --seal");
        connection.protection = Protection::Plain;
    }
    let identity = connection.identity;
    Ok((connection, Session { client_guid, identity, signing, sealing }))
}

/// Connects, and binds the connection to a session as a channel. `number` is the channel's number; the first channel has
/// number 0.
pub(crate) fn bind(terms: Terms, account: &Account, session: &Session, number: u8) -> Result<Connection> {
    let (mut connection, negotiated, mut preauth) = negotiate(terms, session.client_guid)?;
    ensure!(negotiated.has_channels, "the server has no multichannel");
    // [MS-SMB2] 3.2.4.2.3.1: a binding request is signed with the session's key.
    connection.protection = Protection::Signed(session.signing.clone());
    connection.identity = session.identity;
    let key = log_on(&mut connection, account, &mut preauth, Flags::BINDING).context("bind a channel")?;
    connection.protection = match account.security {
        Security::Plain => Protection::Plain,
        _ => {
            let derivation = KeyDerivation::Smb311(&preauth);
            let signing = SigningKey::derive(negotiated.signing, derivation, &key);
            protection(session.sealing.as_ref(), number, signing)
        }
    };
    Ok(connection)
}

fn protection(sealing: Option<&(SealingKey, OpeningKey)>, channel: u8, signing: SigningKey) -> Protection {
    match sealing.cloned() {
        // The channels of a session share the key, but must not share nonces.
        Some((sealing, opening)) => {
            Protection::Sealed { sealing, opening, nonces: NonceSequence::new([channel, 0, 0], 1) }
        }
        None => Protection::Signed(signing),
    }
}

fn negotiate(terms: Terms, client_guid: [u8; 16]) -> Result<(Connection, Negotiated, PreauthHash)> {
    let mut connection = Connection::open(terms.address, Credits::new(terms.credits), terms.io_bytes)?;
    let mut preauth = PreauthHash::new();
    let salt = random::<32>()?;
    let mut request = Request::default();
    request.set(Command::NEGOTIATE, |body| {
        negotiate::Request {
            security_mode: SecurityMode::SIGNING_ENABLED,
            capabilities: Capabilities::LARGE_MTU | Capabilities::ENCRYPTION | Capabilities::MULTI_CHANNEL,
            client_guid,
            client_start_time: FileTime(0),
            dialects: vec![Dialect::SMB3_1_1],
            contexts: vec![
                NegotiateContext::PreauthIntegrity {
                    hash_algorithms: vec![HashAlgorithm::SHA_512],
                    salt: &salt,
                },
                NegotiateContext::Encryption {
                    ciphers: vec![negotiate_context::Cipher(Cipher::Aes128Gcm.id())],
                },
                NegotiateContext::Signing {
                    algorithms: [SigningAlgorithm::AesGmac, SigningAlgorithm::AesCmac]
                        .map(|algorithm| negotiate_context::SigningAlgorithm(algorithm.id()))
                        .to_vec(),
                },
            ],
        }
        .encode(body);
    });
    let answer = connection.call(&mut request)?;
    answer.check("NEGOTIATE")?;
    preauth.update(request.message());
    preauth.update(answer.message);
    let response = negotiate::Response::parse(answer.message)?;
    ensure!(response.dialect_revision == Dialect::SMB3_1_1, "the server does not speak SMB 3.1.1");
    // [MS-SMB2] 3.2.5.2: the default without the context is AES-CMAC.
    let mut negotiated = Negotiated {
        signing: SigningAlgorithm::AesCmac,
        cipher: None,
        has_channels: response.capabilities.contains(Capabilities::MULTI_CHANNEL),
    };
    let largest_io = response.max_read_size.min(response.max_write_size);
    ensure!(
        terms.io_bytes <= largest_io as usize,
        "the server takes requests of up to {largest_io} B; use a smaller --io-size"
    );
    for context in &response.contexts {
        match context {
            NegotiateContext::Signing { algorithms } => {
                let id = algorithms.first().context("a signing context names an algorithm")?.0;
                negotiated.signing = SigningAlgorithm::from_id(id).context("a known signing algorithm")?;
            }
            NegotiateContext::Encryption { ciphers } => {
                negotiated.cipher = ciphers.first().and_then(|cipher| Cipher::from_id(cipher.0));
            }
            _ => {}
        }
    }
    Ok((connection, negotiated, preauth))
}

/// Exchanges SESSION_SETUPs. Returns the resulting key.
fn log_on(
    connection: &mut Connection,
    account: &Account,
    preauth: &mut PreauthHash,
    flags: Flags,
) -> Result<SessionKey> {
    let mut initiator = Initiator::new(InitiatorConfig {
        user: account.user.clone(),
        domain: String::new(),
        workstation: "BENCH".to_owned(),
        nt_hash: NtHash::from_password(&account.password),
        spnego: true,
        challenge: random()?,
        target_name: None,
        random_session_key: Some(SessionKey::new(&random::<16>()?)),
    });
    let mut token = initiator.first();
    let mut key = None;
    loop {
        let mut request = Request::default();
        request.set_session_setup(flags, &token);
        let answer = connection.call(&mut request)?;
        preauth.update(request.message());
        let session_id = answer.header.session_id;
        if answer.header.status != NtStatus::MORE_PROCESSING_REQUIRED {
            answer.check("SESSION_SETUP")?;
            connection.identity.session_id = session_id;
            return key.context("the server ended the exchange early");
        }
        preauth.update(answer.message);
        let challenge = session_setup::Response::parse(answer.message)?.security_buffer;
        token = match initiator.step(challenge, now()?)? {
            ClientStep::Continue(token) => token,
            ClientStep::Last(token, session_key) => {
                key = Some(session_key);
                token
            }
        };
        connection.identity.session_id = session_id;
    }
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("get random bytes: {error}"))?;
    Ok(bytes)
}

/// The current time as a FILETIME.
fn now() -> Result<u64> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(FILETIME_OF_1970 + u64::try_from(since_1970.as_nanos() / 100)?)
}
