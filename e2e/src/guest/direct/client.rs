//! A small SMB 3.1.1 client: one session, one tree, one request at a time, payload over RDMA.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use forebay_rdma::Exposed;
use forebay_smb::auth::{ClientStep, Initiator, InitiatorConfig, NtHash};
use forebay_smb::crypto::{KeyDerivation, PreauthHash, SessionKey, SigningAlgorithm, SigningKey};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel};
use forebay_smb::wire::negotiate_context::{Cipher, HashAlgorithm, RdmaTransform};
use forebay_smb::wire::read::{Channel, ResponseFlags};
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, Dialect, FileAttributes, FileTime, HEADER_LEN, Header, HeaderFlags,
    Ids, NegotiateContext, SecurityMode, ShareAccess, close, echo, negotiate, read, session_setup,
    tree_connect, write,
};
use forebay_smbdirect::wire::{BufferDescriptor, Token};
use serde::{Deserialize, Serialize};

use super::link::{Link, Manners};
use super::seal::{Seal, Tag};

/// A volume and its credentials.
#[derive(Clone, Serialize, Deserialize)]
pub struct Target {
    /// The server's address and port for RDMA.
    pub server: SocketAddr,
    /// Share.
    pub share: String,
    /// SMB user.
    pub username: String,
    /// Its password.
    pub password: String,
}

/// A segment of exposed memory, and the token with which the server accesses it.
#[derive(Clone, Copy, Debug)]
pub struct Lent {
    /// Offset from the start of the memory.
    pub at: usize,
    /// Length in bytes.
    pub length: u32,
    /// The token.
    pub token: u32,
}

/// The channel information of a READ or WRITE ([MS-SMBD] 2.2.3.1).
pub fn descriptors(memory: &Exposed, pieces: &[Lent]) -> Vec<u8> {
    let encode = |piece: &Lent| {
        let offset = memory.address() + piece.at as u64;
        BufferDescriptor { offset, token: Token(piece.token), length: piece.length }.encode()
    };
    pieces.iter().flat_map(encode).collect()
}

/// Direction of the payload: READ is an RDMA WRITE by the server, WRITE an RDMA READ.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub enum Direction {
    Read,
    Write,
}

/// A READ or WRITE with payload over RDMA.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// READ or WRITE.
    pub direction: Direction,
    /// The file.
    pub file_id: FileId,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
    /// The kind of channel information.
    pub channel: Channel,
    /// The channel information: see [`descriptors`].
    pub info: &'a [u8],
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    /// Its header.
    pub header: Header,
    /// The whole message.
    pub message: Vec<u8>,
    /// The token that was remotely invalidated.
    pub invalidated: Option<u32>,
}

impl Answer {
    fn good(self, what: &str) -> Result<Self> {
        let status = self.header.status;
        ensure!(status == NtStatus::SUCCESS, "{what}: {status}");
        Ok(self)
    }
}

/// A client that is logged on and connected to a share.
#[derive(Debug)]
pub struct Client {
    /// The transport.
    pub link: Link,
    message_id: u64,
    session_id: u64,
    tree_id: u32,
    preauth: PreauthHash,
    /// For a session that seals all messages.
    seal: Option<Seal>,
}

/// Must be random in a real client. Here it protects nothing: a lab's passwords are in its scripts.
const CHALLENGE: [u8; 8] = *b"forebay!";

/// siw answers a connection request before it processes data that arrives on the connection. It reads data that arrives in
/// between only when more data arrives, and after the first SMB Direct message none arrives until that message is answered.
const IWARP_ATTEMPTS: u32 = 4;

impl Client {
    /// Connects, logs on, and connects to the share.
    pub fn mount(target: &Target, manners: Manners) -> Result<Self> {
        Self::mount_as(target, manners, false)
    }

    /// Same as [`Client::mount`], with a session that seals all messages and the payload that is transferred over RDMA.
    pub fn mount_sealed(target: &Target, manners: Manners) -> Result<Self> {
        Self::mount_as(target, manners, true)
    }

    fn mount_as(target: &Target, manners: Manners, sealed: bool) -> Result<Self> {
        let mut attempts = IWARP_ATTEMPTS;
        let link = loop {
            let mut link = Link::connect(target.server, manners)?;
            link.establish()?;
            attempts -= 1;
            match link.negotiate() {
                Ok(_) => break link,
                Err(_) if attempts > 0 && link.is_iwarp() => {}
                Err(error) => return Err(error.context("negotiate SMB Direct")),
            }
        };
        let preauth = PreauthHash::default();
        let mut client = Self { link, message_id: 0, session_id: 0, tree_id: 0, preauth, seal: None };
        client.negotiate(sealed)?;
        let key = client.log_on(target, sealed)?;
        client.tree_connect(&target.share, &key)?;
        Ok(client)
    }

    fn message(&mut self, command: Command, charge: u16, body: &[u8]) -> Vec<u8> {
        let mut header = Header::request(command, self.message_id);
        header.credit_charge = charge;
        // Enough for several of the largest requests in a row.
        header.credits = 512;
        header.session_id = self.session_id;
        header.ids = Ids::Sync { process_id: 0xfeff, tree_id: self.tree_id };
        self.message_id += u64::from(charge);
        let mut message = Vec::new();
        header.encode(&mut message);
        message.extend_from_slice(body);
        message
    }

    /// Sends a request without waiting for its response.
    pub fn send(&mut self, command: Command, charge: u16, body: &[u8]) -> Result<()> {
        let message = self.message(command, charge, body);
        self.send_message(message)
    }

    fn send_message(&mut self, mut message: Vec<u8>) -> Result<()> {
        match &mut self.seal {
            None => self.link.send(&message),
            Some(seal) => self.link.send(&seal.seal(self.session_id, &mut message)?),
        }
    }

    /// The next final response.
    pub fn answer(&mut self) -> Result<Answer> {
        loop {
            let mut message = self.link.receive()?;
            if let Some(seal) = &self.seal {
                message.bytes = seal.open(message.bytes)?;
            }
            let header = Header::parse(&message.bytes)?;
            if header.status != NtStatus::PENDING {
                return Ok(Answer { header, message: message.bytes, invalidated: message.invalidated });
            }
        }
    }

    fn exchange(&mut self, message: &[u8]) -> Result<Answer> {
        self.send_message(message.to_vec())?;
        self.answer()
    }

    fn call(&mut self, command: Command, charge: u16, body: &[u8]) -> Result<Answer> {
        let message = self.message(command, charge, body);
        self.exchange(&message)
    }

    fn negotiate(&mut self, sealed: bool) -> Result<()> {
        let mut contexts = vec![NegotiateContext::PreauthIntegrity {
            hash_algorithms: vec![HashAlgorithm::SHA_512],
            salt: &[1; 32],
        }];
        let protection = [
            NegotiateContext::Encryption { ciphers: vec![Cipher::AES_128_GCM] },
            NegotiateContext::RdmaTransform { transforms: vec![RdmaTransform::ENCRYPTION] },
        ];
        if sealed {
            contexts.extend_from_slice(&protection);
        }
        let mut body = Vec::new();
        negotiate::Request {
            security_mode: SecurityMode::SIGNING_ENABLED,
            capabilities: Capabilities::LARGE_MTU,
            client_guid: *b"forebay-e2e-lab!",
            client_start_time: FileTime(0),
            dialects: vec![Dialect::SMB3_1_1],
            contexts,
        }
        .encode(&mut body);
        let message = self.message(Command::NEGOTIATE, 1, &body);
        self.preauth.update(&message);
        let answer = self.exchange(&message)?.good("NEGOTIATE")?;
        self.preauth.update(&answer.message);
        let response = negotiate::Response::parse(&answer.message)?;
        ensure!(response.dialect_revision == Dialect::SMB3_1_1, "{:?}", response.dialect_revision);
        for context in protection.iter().filter(|_| sealed) {
            ensure!(
                response.contexts.contains(context),
                "{context:?} is not answered: {:?}",
                response.contexts
            );
        }
        Ok(())
    }

    fn session_setup(&mut self, token: &[u8]) -> Vec<u8> {
        let mut body = Vec::new();
        session_setup::Request {
            flags: session_setup::Flags::empty(),
            security_mode: SecurityMode::SIGNING_ENABLED,
            capabilities: Capabilities::empty(),
            channel: 0,
            previous_session_id: 0,
            security_buffer: token,
        }
        .encode(&mut body);
        self.message(Command::SESSION_SETUP, 1, &body)
    }

    fn log_on(&mut self, target: &Target, sealed: bool) -> Result<SigningKey> {
        let mut initiator = Initiator::new(InitiatorConfig {
            user: target.username.clone(),
            domain: String::new(),
            workstation: "LAB".to_owned(),
            nt_hash: NtHash::from_password(&target.password),
            spnego: true,
            challenge: CHALLENGE,
            target_name: None,
            random_session_key: Some(SessionKey::new(&[5; 16])),
        });
        let message = self.session_setup(&initiator.first());
        self.preauth.update(&message);
        let answer = self.exchange(&message)?;
        let status = answer.header.status;
        ensure!(status == NtStatus::MORE_PROCESSING_REQUIRED, "SESSION_SETUP: {status}");
        self.preauth.update(&answer.message);
        self.session_id = answer.header.session_id;
        let token = session_setup::Response::parse(&answer.message)?.security_buffer.to_vec();
        // The server supplies the time.
        let ClientStep::Last(token, key) = initiator.step(&token, 0)? else {
            anyhow::bail!("NTLM takes two legs")
        };
        let message = self.session_setup(&token);
        self.preauth.update(&message);
        let derivation = KeyDerivation::Smb311(&self.preauth);
        let signing = SigningKey::derive(SigningAlgorithm::AesCmac, derivation, &key);
        let seal = sealed.then(|| Seal::derive(derivation, &key));
        let answer = self.exchange(&message)?.good("SESSION_SETUP")?;
        verify(&signing, &answer)?;
        let token = session_setup::Response::parse(&answer.message)?.security_buffer;
        initiator.finish(token).context("the server's end of the log-on")?;
        self.seal = seal;
        Ok(signing)
    }

    fn tree_connect(&mut self, share: &str, signing: &SigningKey) -> Result<()> {
        let mut body = Vec::new();
        tree_connect::Request { flags: tree_connect::Flags::empty(), path: format!(r"\\server\{share}") }
            .encode(&mut body);
        let mut message = self.message(Command::TREE_CONNECT, 1, &body);
        // [MS-SMB2] 3.2.4.1.1: a session of 3.1.1 always signs messages that it does not seal.
        if self.seal.is_none() {
            let (head, rest) = message.split_at_mut(HEADER_LEN);
            signing.sign_in_place(head, &[rest]);
        }
        let answer = self.exchange(&message)?.good("TREE_CONNECT")?;
        if self.seal.is_none() {
            verify(signing, &answer)?;
        }
        self.tree_id = answer.header.tree_id();
        Ok(())
    }

    /// Opens a file for reading and writing. Creates it if it is missing.
    pub fn open(&mut self, name: &str) -> Result<FileId> {
        let mut body = Vec::new();
        create::Request {
            requested_oplock_level: OplockLevel::NONE,
            impersonation_level: ImpersonationLevel::IMPERSONATION,
            smb_create_flags: 0,
            desired_access: AccessMask::FILE_ALL_ACCESS,
            file_attributes: FileAttributes::NORMAL,
            share_access: ShareAccess(7),
            create_disposition: CreateDisposition::OPEN_IF,
            create_options: CreateOptions(0),
            name: name.to_owned(),
            contexts: Vec::new(),
        }
        .encode(&mut body);
        let answer = self.call(Command::CREATE, 1, &body)?.good("CREATE")?;
        Ok(create::Response::parse(&answer.message)?.file_id)
    }

    /// Closes it.
    pub fn close(&mut self, file_id: FileId) -> Result<()> {
        let mut body = Vec::new();
        close::Request { flags: close::Flags(0), file_id }.encode(&mut body);
        self.call(Command::CLOSE, 1, &body)?.good("CLOSE").map(drop)
    }

    /// Sends an ECHO without waiting for its response.
    pub fn send_echo(&mut self) -> Result<()> {
        let mut body = Vec::new();
        echo::Request.encode(&mut body);
        self.send(Command::ECHO, 1, &body)
    }

    /// Requests a transfer without waiting for the response.
    pub fn send_transfer(&mut self, transfer: &Transfer<'_>) -> Result<()> {
        let Transfer { direction, file_id, offset, length, channel, info } = *transfer;
        let mut body = Vec::new();
        let command = match direction {
            Direction::Write => {
                write::Request {
                    data_offset: 0,
                    length: 0,
                    offset,
                    file_id,
                    channel,
                    remaining_bytes: length,
                    flags: write::Flags::empty(),
                    channel_info: info,
                }
                .encode(&mut body);
                Command::WRITE
            }
            Direction::Read => {
                read::Request {
                    padding: 0,
                    flags: read::Flags::empty(),
                    length,
                    offset,
                    file_id,
                    minimum_count: 0,
                    channel,
                    remaining_bytes: 0,
                    channel_info: info,
                }
                .encode(&mut body);
                Command::READ
            }
        };
        self.send(command, charge(length), &body)
    }

    /// Same as [`Client::send_transfer`], but waits until the transfer is complete. Returns the token that was invalidated.
    pub fn transfer(&mut self, transfer: &Transfer<'_>) -> Result<Option<u32>> {
        let (invalidated, tag) = self.transfer_as(transfer)?;
        ensure!(tag.is_none(), "payload was sealed without a request");
        Ok(invalidated)
    }

    /// Same, but also returns how the payload was sealed, according to the response.
    pub fn transfer_as(&mut self, transfer: &Transfer<'_>) -> Result<(Option<u32>, Option<Tag>)> {
        self.send_transfer(transfer)?;
        let mut tag = None;
        let what = format!("{:?}", transfer.direction);
        let answer = self.answer()?.good(&what)?;
        let count = match transfer.direction {
            Direction::Write => write::Response::parse(&answer.message)?.count,
            Direction::Read => {
                let response = read::Response::parse(&answer.message)?;
                let data = response.data(&answer.message)?;
                if response.flags.contains(ResponseFlags::RDMA_TRANSFORM) {
                    tag = Some(Tag::parse(data)?);
                } else {
                    ensure!(data.is_empty(), "payload in the message, too");
                }
                response.data_remaining
            }
        };
        ensure!(count == transfer.length, "{what}: {count} bytes of {}", transfer.length);
        Ok((answer.invalidated, tag))
    }

    /// Seals payload for the server to fetch.
    pub fn seal_payload(&mut self, data: &mut [u8]) -> Result<Tag> {
        self.seal.as_mut().context("a session that does not seal")?.seal_payload(data)
    }

    /// Unseals payload that the server sealed.
    pub fn open_payload(&self, tag: &Tag, data: &mut [u8]) -> Result<()> {
        self.seal.as_ref().context("a session that does not seal")?.open_payload(tag, data)
    }
}

fn charge(length: u32) -> u16 {
    length.div_ceil(65536).max(1) as u16
}

fn verify(signing: &SigningKey, answer: &Answer) -> Result<()> {
    let command = answer.header.command;
    ensure!(answer.header.flags.contains(HeaderFlags::SIGNED), "the answer to {command:?} is not signed");
    ensure!(signing.verify(&[&answer.message]), "the signature of the answer to {command:?} is wrong");
    Ok(())
}
