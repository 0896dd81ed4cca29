//! A client and a server in one thread with virtual time, for whole conversations.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test uses a part of it")]
#![allow(clippy::unwrap_used, reason = "tests")]

pub mod requests;

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use forebay_smb::auth::{ClientStep, NtHash};
use forebay_smb::crypto::{
    Cipher, KeyDerivation, NonceSequence, OpeningKey, PreauthHash, SealedFrame, SealingKey, SigningAlgorithm,
    SigningKey, client_to_server_key, server_to_client_key,
};
use forebay_smb::engine::{
    Account, Connection, ConnectionId, Disconnect, Encryption, Event, Protection, Server, ServerConfig,
    VolumeConfig,
};
use forebay_smb::fs::{Frame, FsHandle, FsOp, FsOpKind, FsResult};
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use forebay_smb::wire::negotiate::{self, Dialect};
use forebay_smb::wire::negotiate_context::{NegotiateContext, RdmaTransform};
use forebay_smb::wire::{Capabilities, Command, FileTime, HEADER_LEN, Header, HeaderFlags, session_setup};
use forebay_smbdirect::wire::Token;

/// 2026-11-21, FILETIME.
pub const NOW: u64 = 134_082_432_000_000_000;

/// The start of virtual time, by the monotonic clock.
pub fn start() -> Instant {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    *START
}

/// The start of virtual time, by both clocks.
pub fn present() -> Now {
    Now { instant: start(), wall: FileTime(NOW) }
}

/// The address at which a client's memory starts for RDMA.
pub const MEMORY_AT: u64 = 0x7f00_0000_0000;

/// Bytes that a test received or sends.
pub struct Bytes(pub Vec<u8>);

impl Frame for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

pub fn config() -> ServerConfig {
    ServerConfig {
        guid: [7; 16],
        server_name: "FOREBAY".to_owned(),
        started: NOW,
        min_dialect: Dialect::SMB2_0_2,
        target_names: Vec::new(),
        ntlm: true,
        kerberos: None,
        signing_required: false,
        encryption: Encryption::Offered,
        instance: 0x5eed_0000_0000,
        predecessors: Vec::new(),
        io_bytes_max: 8 * 1024 * 1024,
        caching: false,
        directory_leases: true,
    }
}

pub fn volume(id: &str, backend: FsHandle) -> VolumeConfig {
    VolumeConfig {
        id: id.to_owned(),
        backend,
        accounts: vec![Account {
            username: format!("{id}-user"),
            hashes: vec![NtHash::from_password(&format!("{id}-secret"))],
        }],
        protection: Protection::Optional,
        read_only: false,
        extended_attributes: true,
        shared_extents: false,
        serial: 0x1234_5678,
        created: NOW,
    }
}

/// Carries out the operations that a connection requests.
pub type Backend = Box<dyn FnMut(FsOpKind) -> FsResult + Send>;

/// A server with volume `vol` at an arbitrary address.
pub fn server() -> Arc<Server> {
    let server = Server::new(config());
    server.add_volume(volume("vol", FsHandle(Arc::new(())))).unwrap();
    server
}

/// A message from the server.
#[derive(Debug)]
pub struct Answer {
    pub header: Header,
    /// The message from the SMB2 header on.
    pub message: Vec<u8>,
    pub sealed: bool,
}

impl Answer {
    pub fn status(&self) -> NtStatus {
        self.header.status
    }
}

struct Keys {
    /// The channel's key.
    signing: SigningKey,
    /// The session's key, which is the key of its first channel.
    session: SigningKey,
    seal: Option<(SealingKey, OpeningKey, NonceSequence)>,
}

pub struct Client {
    /// The id of its connection.
    pub id: u64,
    pub server: Arc<Server>,
    pub connection: Connection,
    pub dialect: Dialect,
    pub ciphers: Vec<Cipher>,
    pub signing_algorithms: Vec<SigningAlgorithm>,
    /// The transforms offered for payload over RDMA.
    pub transforms: Vec<RdmaTransform>,
    /// The server's answer to that offer.
    pub transforms_answered: Option<Vec<RdmaTransform>>,
    /// Requests the POSIX extensions.
    pub posix: bool,
    /// Whether the server has them.
    pub posix_answered: bool,
    pub capabilities: Capabilities,
    pub client_guid: [u8; 16],
    /// ChannelSequence of the client's requests.
    pub channel_sequence: u16,
    /// Marks requests as replays.
    pub replay: bool,
    pub session_id: u64,
    pub tree_id: u32,
    /// Sign every request.
    pub sign: bool,
    /// Seal every request.
    pub seal: bool,
    pub message_id: u64,
    pub credits: u64,
    pub backend: Backend,
    pub events: Vec<Event>,
    pub now: Now,
    /// Unclaimed answers.
    pub answers: VecDeque<Answer>,
    /// Memory that the server accesses by RDMA: byte 0 has the address [`MEMORY_AT`].
    pub memory: Vec<u8>,
    /// The token that each frame invalidated.
    pub invalidated: Vec<Option<Token>>,
    cipher: Option<Cipher>,
    signing: SigningAlgorithm,
    preauth: PreauthHash,
    keys: Option<Keys>,
    /// The session key that NTLM exports.
    session_key: [u8; 16],
    /// A binding is in progress: all its answers except the last are signed with the session's key.
    binding: bool,
    /// The nonces of the messages that the server sealed, for tests that check them.
    pub nonces: Vec<[u8; 16]>,
}

impl Client {
    pub fn new(server: &Arc<Server>, id: u64, dialect: Dialect) -> Self {
        Self::seeded(server, id, id, dialect)
    }

    /// With randomness from `seed`.
    pub fn seeded(server: &Arc<Server>, id: u64, mut seed: u64, dialect: Dialect) -> Self {
        // SplitMix64: good enough to be different each time, the same in every run.
        let entropy = Box::new(move |bytes: &mut [u8]| {
            for b in bytes {
                seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                *b = (z >> 56) as u8;
            }
        });
        Self {
            id,
            server: Arc::clone(server),
            connection: Connection::new(Arc::clone(server), ConnectionId(id), format!("peer-{id}"), entropy),
            dialect,
            ciphers: vec![Cipher::Aes128Gcm],
            signing_algorithms: vec![SigningAlgorithm::AesGmac],
            transforms: Vec::new(),
            transforms_answered: None,
            posix: false,
            posix_answered: false,
            capabilities: requests::CAPABILITIES | Capabilities::MULTI_CHANNEL,
            client_guid: requests::CLIENT_GUID,
            channel_sequence: 0,
            replay: false,
            session_id: 0,
            tree_id: 0,
            sign: false,
            seal: false,
            message_id: 0,
            credits: 1,
            backend: Box::new(|_| Err(NtStatus::NOT_SUPPORTED)),
            events: Vec::new(),
            now: present(),
            answers: VecDeque::new(),
            memory: Vec::new(),
            invalidated: Vec::new(),
            cipher: None,
            signing: SigningAlgorithm::HmacSha256,
            preauth: PreauthHash::default(),
            keys: None,
            session_key: [id as u8 ^ 5; 16],
            binding: false,
            nonces: Vec::new(),
        }
    }

    /// A header for the next request.
    pub fn header(&mut self, command: Command, charge: u16) -> Header {
        let mut header =
            requests::header(command, self.message_id, charge, 64, self.session_id, self.tree_id);
        header.status = NtStatus(self.channel_sequence.into());
        if self.replay {
            header.flags.insert(HeaderFlags::REPLAY_OPERATION);
        }
        self.message_id += u64::from(charge.max(1));
        header
    }

    pub fn message(&self, header: Header, body: &[u8]) -> Vec<u8> {
        let mut message = Vec::new();
        header.encode(&mut message);
        message.extend_from_slice(body);
        message
    }

    /// Signs (or seals) and sends a frame of one message, carries out what it causes, and keeps the answers.
    pub fn send(&mut self, mut message: Vec<u8>) -> Result<(), Disconnect> {
        if let Some(keys) = &mut self.keys {
            if self.seal {
                let (sealing, _, nonces) = keys.seal.as_mut().expect("negotiated a cipher");
                let nonce = nonces.next_nonce().unwrap();
                let header = sealing.seal_in_place(nonce, self.session_id, &mut message).unwrap();
                let mut frame = header.to_vec();
                frame.extend_from_slice(&message);
                let unsealed = self.connection.unseal(&mut frame)?.expect("a sealed frame");
                let plain = frame[unsealed.range.clone()].to_vec();
                self.connection.handle(self.now, Arc::new(Bytes(plain)), Some(&unsealed))?;
                return self.run();
            }
            if self.sign {
                let (head, rest) = message.split_at_mut(HEADER_LEN);
                keys.signing.sign_in_place(head, &[rest]);
            }
        }
        self.send_raw(message)
    }

    pub fn send_raw(&mut self, frame: Vec<u8>) -> Result<(), Disconnect> {
        self.connection.handle(self.now, Arc::new(Bytes(frame)), None)?;
        self.run()
    }

    /// Sends a request in clear and returns its first operation, which a slow backend has not carried out yet. Use
    /// [`Self::finish`].
    pub fn begin(&mut self, command: Command, body: &[u8]) -> FsOp {
        let header = self.header(command, 1);
        let message = self.message(header, body);
        self.connection.handle(self.now, Arc::new(Bytes(message)), None).unwrap();
        self.connection.poll_fs().expect("an operation")
    }

    /// Carries out the operation from [`Self::begin`] and everything that follows from it.
    pub fn finish(&mut self, op: FsOp) {
        let result = (self.backend)(op.kind);
        self.connection.complete(self.now, op.id, result).unwrap();
        self.run().unwrap();
    }

    /// Carries out everything that is outstanding.
    pub fn run(&mut self) -> Result<(), Disconnect> {
        loop {
            let mut idle = true;
            while let Some(op) = self.connection.poll_fs() {
                idle = false;
                let result = self.fetched(op.kind).and_then(|kind| (self.backend)(kind));
                self.connection.complete(self.now, op.id, result)?;
            }
            while let Some(event) = self.connection.poll_event() {
                self.events.push(event);
            }
            while let Some(transmit) = self.connection.poll_transmit() {
                idle = false;
                self.invalidated.push(transmit.invalidate);
                for write in &transmit.remote_writes {
                    let mut data = write.payload.bytes();
                    for piece in write.target.pieces(data.len() as u32) {
                        let at = (piece.offset - MEMORY_AT) as usize;
                        let (now, rest) = data.split_at(piece.length as usize);
                        self.memory[at..at + now.len()].copy_from_slice(now);
                        data = rest;
                    }
                    assert!(data.is_empty(), "all of it has a place");
                }
                let mut frame: Vec<u8> = transmit.segments.iter().flat_map(|s| s.bytes().to_vec()).collect();
                let sealed = transmit.seal.is_some();
                if let Some(sealer) = transmit.seal {
                    let header = sealer.seal(&mut frame)?;
                    let mut whole = header.to_vec();
                    whole.extend_from_slice(&frame);
                    assert!(SealedFrame::claims(&whole));
                    self.nonces.push(whole[20..36].try_into().unwrap());
                    let keys = self.keys.as_ref().expect("keys");
                    let (_, opening, _) = keys.seal.as_ref().expect("a cipher");
                    frame = opening.open_in_place(&mut whole).expect("opens").to_vec();
                }
                self.receive(&frame, sealed);
            }
            if idle {
                return Ok(());
            }
        }
    }

    /// Turns a WRITE with remote data into one with local data, as a transport does.
    fn fetched(&self, kind: FsOpKind) -> Result<FsOpKind, NtStatus> {
        let FsOpKind::WriteRemote { handle, offset, source, length, proof, write_through } = kind else {
            return Ok(kind);
        };
        let mut data: Vec<u8> = source
            .pieces(length)
            .flat_map(|piece| {
                let at = (piece.offset - MEMORY_AT) as usize;
                self.memory[at..at + piece.length as usize].to_vec()
            })
            .collect();
        if let Some(proof) = proof {
            proof.open(&mut data)?;
        }
        let range = 0..data.len();
        Ok(FsOpKind::Write { handle, offset, frame: Arc::new(Bytes(data)), range, write_through })
    }

    /// Seals payload for the server to fetch. Returns the nonce and the tag.
    pub fn seal_payload(&mut self, data: &mut [u8]) -> (Vec<u8>, [u8; 16]) {
        let keys = self.keys.as_mut().expect("logged on");
        let (sealing, _, nonces) = keys.seal.as_mut().expect("negotiated a cipher");
        let (nonce, tag) = sealing.seal_payload(nonces.next_nonce().unwrap(), data).unwrap();
        (nonce[..sealing.nonce_len()].to_vec(), tag)
    }

    /// Opens payload that the server sealed.
    pub fn open_payload(&self, nonce: &[u8], tag: &[u8], data: &mut [u8]) {
        let keys = self.keys.as_ref().expect("logged on");
        let (_, opening, _) = keys.seal.as_ref().expect("negotiated a cipher");
        opening.open_payload(nonce, tag.try_into().unwrap(), data).expect("opens");
    }

    /// The key that messages and payload are signed with.
    pub fn signing_key(&self) -> SigningKey {
        self.keys.as_ref().expect("logged on").signing.clone()
    }

    fn receive(&mut self, frame: &[u8], sealed: bool) {
        for range in forebay_smb::wire::compound::split(frame) {
            let message = frame[range.expect("well-formed")].to_vec();
            let header = Header::parse(&message).expect("a header");
            assert!(header.is_response());
            // The response for a session that has ended is not signed with its key.
            let without_key = header.status == NtStatus::USER_SESSION_DELETED && header.signature == [0; 16];
            if header.flags.contains(HeaderFlags::SIGNED)
                && !without_key
                && let Some(keys) = &self.keys
            {
                let of_session = self.binding && header.status != NtStatus::SUCCESS;
                let key = if of_session { &keys.session } else { &keys.signing };
                assert!(key.verify(&[&message]), "signature of {:?}", header.command);
            }
            self.credits += u64::from(header.credits);
            self.answers.push_back(Answer { header, message, sealed });
        }
    }

    /// Sends one request and returns its answer.
    pub fn call(&mut self, command: Command, body: &[u8]) -> Result<Answer, Disconnect> {
        self.call_charged(command, body, 1)
    }

    pub fn call_charged(&mut self, command: Command, body: &[u8], charge: u16) -> Result<Answer, Disconnect> {
        let header = self.header(command, charge);
        let message = self.message(header, body);
        self.send(message)?;
        Ok(self.answers.pop_front().expect("an answer"))
    }

    /// Sends a request that can stay unanswered for now: a SET_INFO that waits has no interim response.
    pub fn ask(&mut self, command: Command, body: &[u8]) -> Option<Answer> {
        let header = self.header(command, 1);
        let message = self.message(header, body);
        self.send(message).expect("the connection stays");
        self.answers.pop_front()
    }

    pub fn negotiate(&mut self) -> Result<Answer, Disconnect> {
        let body = requests::negotiate_with(
            self.dialect,
            &self.ciphers,
            &self.signing_algorithms,
            &self.transforms,
            self.posix,
            self.capabilities,
            self.client_guid,
        );
        let header = self.header(Command::NEGOTIATE, 1);
        let message = self.message(header, &body);
        self.preauth.update(&message);
        self.send_raw(message)?;
        let answer = self.answers.pop_front().expect("an answer");
        self.preauth.update(&answer.message);
        if let Ok(response) = negotiate::Response::parse(&answer.message) {
            self.signing = match self.dialect {
                Dialect::SMB2_0_2 | Dialect::SMB2_1 => SigningAlgorithm::HmacSha256,
                _ => SigningAlgorithm::AesCmac,
            };
            if matches!(self.dialect, Dialect::SMB3_0 | Dialect::SMB3_0_2) {
                self.cipher = Some(Cipher::Aes128Ccm);
            }
            for context in &response.contexts {
                match context {
                    NegotiateContext::Encryption { ciphers } => self.cipher = Cipher::from_id(ciphers[0].0),
                    NegotiateContext::Signing { algorithms } => {
                        self.signing = SigningAlgorithm::from_id(algorithms[0].0).unwrap();
                    }
                    NegotiateContext::RdmaTransform { transforms } => {
                        self.transforms_answered = Some(transforms.clone());
                    }
                    NegotiateContext::Posix { .. } => self.posix_answered = true,
                    _ => {}
                }
            }
        }
        Ok(answer)
    }

    fn session_setup_message(&mut self, token: &[u8], previous: u64) -> Vec<u8> {
        let body = requests::session_setup(token, previous);
        let header = self.header(Command::SESSION_SETUP, 1);
        self.message(header, &body)
    }

    /// A leg of a binding to the session of `first`, signed with that session's key.
    fn binding_message(&mut self, first: &Client, token: &[u8]) -> Vec<u8> {
        let body = requests::session_bind(token);
        let mut header = self.header(Command::SESSION_SETUP, 1);
        header.session_id = first.session_id;
        let mut message = self.message(header, &body);
        let (head, rest) = message.split_at_mut(HEADER_LEN);
        first.keys.as_ref().expect("logged on").session.sign_in_place(head, &[rest]);
        message
    }

    /// Becomes a channel of the session of `first`. Returns the last answer.
    pub fn bind(&mut self, first: &Client, user: &str, password: &str) -> Result<Answer, Disconnect> {
        self.bind_with(first, user, password, |_, _| {})
    }

    /// Like [`Self::bind`]; `change` can corrupt each leg (0 and 1) before it is sent.
    pub fn bind_with(
        &mut self,
        first: &Client,
        user: &str,
        password: &str,
        change: impl Fn(usize, &mut Vec<u8>),
    ) -> Result<Answer, Disconnect> {
        let session = first.keys.as_ref().expect("logged on").session.clone();
        let mut initiator = requests::initiator_with(user, password, self.session_key);
        let mut preauth = self.preauth;
        let before =
            self.keys.replace(Keys { signing: session.clone(), session: session.clone(), seal: None });
        self.binding = true;
        let mut message = self.binding_message(first, &initiator.first());
        change(0, &mut message);
        preauth.update(&message);
        self.send_raw(message)?;
        let answer = self.answers.pop_front().expect("an answer");
        if answer.status() != NtStatus::MORE_PROCESSING_REQUIRED {
            (self.keys, self.binding) = (before, false);
            return Ok(answer);
        }
        assert!(answer.header.flags.contains(HeaderFlags::SIGNED), "every leg is signed");
        preauth.update(&answer.message);
        let token = session_setup::Response::parse(&answer.message).unwrap().security_buffer.to_vec();
        let ClientStep::Last(token, key) = initiator.step(&token, self.now.wall.0).expect("a challenge")
        else {
            panic!("NTLM takes two legs")
        };
        let mut message = self.binding_message(first, &token);
        change(1, &mut message);
        preauth.update(&message);
        let derivation = match self.dialect {
            Dialect::SMB3_1_1 => KeyDerivation::Smb311(&preauth),
            _ => KeyDerivation::Smb30,
        };
        let shared = first.keys.as_ref().and_then(|k| k.seal.as_ref());
        self.keys = Some(Keys {
            signing: SigningKey::derive(self.signing, derivation, &key),
            session,
            // A client keeps its own nonces distinct, too.
            seal: shared.map(|(s, o, _)| {
                (s.clone(), o.clone(), NonceSequence::new(self.session_key[..3].try_into().unwrap(), 1))
            }),
        });
        self.send_raw(message)?;
        self.binding = false;
        let answer = self.answers.pop_front().expect("an answer");
        if answer.status() == NtStatus::SUCCESS {
            assert!(answer.header.flags.contains(HeaderFlags::SIGNED), "the last leg is signed");
            (self.session_id, self.tree_id) = (first.session_id, first.tree_id);
        } else {
            self.keys = before;
        }
        Ok(answer)
    }

    /// Another channel of the session of `first`, a client of volume `vol`.
    pub fn channel(first: &Client, id: u64, backend: Backend) -> Self {
        let mut client = Self::new(&first.server, id, first.dialect);
        client.backend = backend;
        client.client_guid = first.client_guid;
        client.ciphers.clone_from(&first.ciphers);
        client.signing_algorithms.clone_from(&first.signing_algorithms);
        assert_eq!(client.negotiate().unwrap().status(), NtStatus::SUCCESS);
        assert_eq!(client.bind(first, "vol-user", "vol-secret").unwrap().status(), NtStatus::SUCCESS);
        client
    }

    /// Sends the first leg of a reauthentication of the session.
    pub fn begin_reauthentication(&mut self, user: &str) -> Result<(), Disconnect> {
        let first = requests::initiator_with(user, "", self.session_key).first();
        let message = self.session_setup_message(&first, 0);
        self.send_raw(message)?;
        let answer = self.answers.pop_front().expect("an answer");
        assert_eq!(answer.status(), NtStatus::MORE_PROCESSING_REQUIRED);
        Ok(())
    }

    /// Uses another client's session without having joined it.
    pub fn adopt(&mut self, other: &Client) {
        let session = &other.keys.as_ref().expect("keys").session;
        self.keys = Some(Keys { signing: session.clone(), session: session.clone(), seal: None });
        (self.session_id, self.tree_id) = (other.session_id, other.tree_id);
    }

    /// From now on, signs with the keys of another channel of the session.
    pub fn sign_as(&mut self, other: &Client) {
        let (keys, others) = (self.keys.as_mut().expect("keys"), other.keys.as_ref().expect("keys"));
        keys.signing = others.signing.clone();
    }

    /// Drops the connection.
    pub fn disconnect(&mut self) {
        self.connection.close(self.now);
        self.run().unwrap();
    }

    /// Logs on. Returns the last answer.
    pub fn logon(&mut self, user: &str, password: &str, previous: u64) -> Result<Answer, Disconnect> {
        let mut initiator = requests::initiator_with(user, password, self.session_key);
        let mut preauth = self.preauth;
        let message = self.session_setup_message(&initiator.first(), previous);
        preauth.update(&message);
        self.send_raw(message)?;
        let answer = self.answers.pop_front().expect("an answer");
        if answer.status() != NtStatus::MORE_PROCESSING_REQUIRED {
            return Ok(answer);
        }
        preauth.update(&answer.message);
        self.session_id = answer.header.session_id;
        let token = session_setup::Response::parse(&answer.message).unwrap().security_buffer.to_vec();
        let ClientStep::Last(token, key) = initiator.step(&token, self.now.wall.0).expect("a challenge")
        else {
            panic!("NTLM takes two legs")
        };
        let message = self.session_setup_message(&token, previous);
        preauth.update(&message);
        let derivation = match self.dialect {
            Dialect::SMB3_1_1 => Some(KeyDerivation::Smb311(&preauth)),
            Dialect::SMB3_0 | Dialect::SMB3_0_2 => Some(KeyDerivation::Smb30),
            _ => None,
        };
        let signing = derivation.map_or_else(
            || SigningKey::new(self.signing, &key),
            |d| SigningKey::derive(self.signing, d, &key),
        );
        let keys = Keys {
            session: signing.clone(),
            signing,
            seal: derivation.zip(self.cipher).map(|(d, cipher)| {
                (
                    SealingKey::new(&client_to_server_key(d, key.as_bytes(), cipher)),
                    OpeningKey::new(&server_to_client_key(d, key.as_bytes(), cipher)),
                    NonceSequence::new([0; 3], 1),
                )
            }),
        };
        self.keys = Some(keys);
        self.send_raw(message)?;
        let answer = self.answers.pop_front().expect("an answer");
        if answer.status() == NtStatus::SUCCESS {
            assert!(answer.header.flags.contains(HeaderFlags::SIGNED), "the last leg is signed");
            let token = session_setup::Response::parse(&answer.message).unwrap().security_buffer.to_vec();
            initiator.finish(&token).expect("the server has seen the same mechanisms");
        }
        Ok(answer)
    }

    pub fn tree_connect(&mut self, share: &str) -> Result<Answer, Disconnect> {
        let body = requests::tree_connect(share);
        let sign = self.sign;
        self.sign |= self.dialect == Dialect::SMB3_1_1;
        let answer = self.call(Command::TREE_CONNECT, &body);
        self.sign = sign;
        let answer = answer?;
        if answer.status() == NtStatus::SUCCESS {
            self.tree_id = answer.header.tree_id();
        }
        Ok(answer)
    }

    /// Negotiates, logs on to volume `vol` and connects its tree.
    pub fn mount(server: &Arc<Server>, id: u64, dialect: Dialect, backend: Backend) -> Self {
        let mut client = Self::new(server, id, dialect);
        client.backend = backend;
        assert_eq!(client.negotiate().unwrap().status(), NtStatus::SUCCESS);
        assert_eq!(client.logon("vol-user", "vol-secret", 0).unwrap().status(), NtStatus::SUCCESS);
        assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS);
        client
    }
}
