//! The engine's workloads: a connection of the protocol core in memory, a client that communicates with it, and a backend
//! that has every result ready. Nothing is signed or sealed, and no payload is copied or read.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use forebay_smb::auth::{ClientStep, Initiator, InitiatorConfig, NtHash};
use forebay_smb::crypto::{KeyDerivation, PreauthHash, SessionKey, SigningAlgorithm, SigningKey};
use forebay_smb::engine::{
    Account, Connection, ConnectionId, Encryption, Protection, Server, ServerConfig, VolumeConfig,
};
use forebay_smb::fs::{
    FileKey, FileTimes, Frame, FsHandle, FsOpKind, FsReply, FsResult, Opened, Payload, Stat,
};
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use forebay_smb::wire::negotiate_context::{self, HashAlgorithm, NegotiateContext};
use forebay_smb::wire::{
    Capabilities, Command, Dialect, FileAttributes, FileTime, HEADER_LEN, Header, SecurityMode, create,
    negotiate, read, session_setup, tree_connect, write,
};

use crate::load::request::{Identity, Opening, Request};

const USER: &str = "vol-user";
const PASSWORD: &str = "vol-secret";
/// 2026-11-21, FILETIME.
const NOW: u64 = 134_082_432_000_000_000;
/// Credits that each request asks for.
const CREDITS: u16 = 8;
const READ_BYTES: u32 = 64 * 1024;
const WRITE_BYTES: usize = 4096;
/// Both READ and WRITE repeatedly run through a file of this size.
const FILE_BYTES: u64 = 1 << 30;

/// READs of 64 KiB.
pub(super) fn read(count: u64) -> Result<()> {
    let mut client = Client::mount()?;
    let file = client.open()?;
    let mut request = Request::default();
    for number in 0..count {
        request.set_read(file, number * u64::from(READ_BYTES) % FILE_BYTES, READ_BYTES);
        let answer = client.call(&mut request)?;
        ensure!(read::Response::parse(answer)?.data_length == READ_BYTES, "a READ is short");
    }
    Ok(())
}

/// WRITEs of 4 KiB.
pub(super) fn write(count: u64) -> Result<()> {
    let mut client = Client::mount()?;
    let file = client.open()?;
    let payload: Arc<[u8]> = vec![7; WRITE_BYTES].into();
    let mut request = Request::default();
    for number in 0..count {
        request.set_write(file, number * WRITE_BYTES as u64 % FILE_BYTES, &payload);
        let answer = client.call(&mut request)?;
        ensure!(write::Response::parse(answer)?.count as usize == WRITE_BYTES, "a WRITE is short");
    }
    Ok(())
}

/// CREATE of a file that exists, QUERY_INFO and CLOSE, one after the other.
pub(super) fn open_stat_close(count: u64) -> Result<()> {
    let mut client = Client::mount()?;
    let mut request = Request::default();
    for _ in 0..count {
        let file = client.open()?;
        request.set_query_info(file);
        client.call(&mut request)?;
        request.set_close(file);
        client.call(&mut request)?;
    }
    Ok(())
}

/// A frame that has arrived.
struct Received(Vec<u8>);

impl Frame for Received {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The result of a READ: the same bytes each time.
#[derive(Clone)]
struct Data(Arc<[u8]>);

impl Payload for Data {
    fn length(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        Arc::make_mut(&mut self.0)
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

/// Client, connection and backend in one thread, at a fixed time.
struct Client {
    connection: Connection,
    now: Now,
    identity: Identity,
    next_id: u64,
    data: Data,
    /// The last response, without payload.
    answer: Vec<u8>,
}

impl Client {
    /// Negotiates, logs on and connects to the share.
    fn mount() -> Result<Self> {
        let server = Server::new(ServerConfig {
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
            io_bytes_max: 8 << 20,
            caching: false,
            directory_leases: false,
        });
        let account = Account { username: USER.to_owned(), hashes: vec![NtHash::from_password(PASSWORD)] };
        let volume = VolumeConfig {
            id: "vol".to_owned(),
            backend: FsHandle(Arc::new(())),
            accounts: vec![account],
            protection: Protection::Optional,
            read_only: false,
            serial: 0x1234_5678,
            created: NOW,
            extended_attributes: false,
            shared_extents: false,
        };
        server.add_volume(volume).map_err(|error| anyhow::anyhow!("add a volume: {error:?}"))?;
        // Not random: the same bytes in each run.
        let mut next = 0_u8;
        let entropy = Box::new(move |bytes: &mut [u8]| {
            for byte in bytes {
                next = next.wrapping_mul(5).wrapping_add(1);
                *byte = next;
            }
        });
        let mut client = Self {
            connection: Connection::new(server, ConnectionId(1), "client".to_owned(), entropy),
            now: Now { instant: Instant::now(), wall: FileTime(NOW) },
            identity: Identity::default(),
            next_id: 0,
            data: Data(vec![7; READ_BYTES as usize].into()),
            answer: Vec::new(),
        };
        let mut preauth = PreauthHash::new();
        client.negotiate(&mut preauth)?;
        let signing = client.log_on(&mut preauth)?;
        client.connect_tree(&signing)?;
        Ok(client)
    }

    fn negotiate(&mut self, preauth: &mut PreauthHash) -> Result<()> {
        let mut request = Request::default();
        request.set(Command::NEGOTIATE, |body| {
            negotiate::Request {
                security_mode: SecurityMode::SIGNING_ENABLED,
                capabilities: Capabilities::LARGE_MTU,
                client_guid: [3; 16],
                client_start_time: FileTime(0),
                dialects: vec![Dialect::SMB3_1_1],
                contexts: vec![
                    NegotiateContext::PreauthIntegrity {
                        hash_algorithms: vec![HashAlgorithm::SHA_512],
                        salt: &[1; 32],
                    },
                    NegotiateContext::Signing {
                        algorithms: vec![negotiate_context::SigningAlgorithm(SigningAlgorithm::AesGmac.id())],
                    },
                ],
            }
            .encode(body);
        });
        self.call(&mut request)?;
        preauth.update(request.message());
        preauth.update(&self.answer);
        Ok(())
    }

    /// Logs on. Returns the session's signing key.
    fn log_on(&mut self, preauth: &mut PreauthHash) -> Result<SigningKey> {
        let mut initiator = Initiator::new(InitiatorConfig {
            user: USER.to_owned(),
            domain: String::new(),
            workstation: "BENCH".to_owned(),
            nt_hash: NtHash::from_password(PASSWORD),
            spnego: true,
            challenge: [9; 8],
            target_name: None,
            random_session_key: Some(SessionKey::new(&[5; 16])),
        });
        let mut token = initiator.first();
        let mut key = None;
        loop {
            let mut request = Request::default();
            request.set_session_setup(session_setup::Flags::empty(), &token);
            let header = self.exchange(&mut request, |_| {})?;
            preauth.update(request.message());
            self.identity.session_id = header.session_id;
            if header.status == NtStatus::SUCCESS {
                let key = key.context("the server ended the exchange early")?;
                let derivation = KeyDerivation::Smb311(preauth);
                return Ok(SigningKey::derive(SigningAlgorithm::AesGmac, derivation, &key));
            }
            ensure!(header.status == NtStatus::MORE_PROCESSING_REQUIRED, "log on: {:?}", header.status);
            preauth.update(&self.answer);
            let challenge = session_setup::Response::parse(&self.answer)?.security_buffer;
            token = match initiator.step(challenge, NOW)? {
                ClientStep::Continue(token) => token,
                ClientStep::Last(token, session_key) => {
                    key = Some(session_key);
                    token
                }
            };
        }
    }

    /// [MS-SMB2] 3.2.4.2.4: in 3.1.1 this request is always signed.
    fn connect_tree(&mut self, signing: &SigningKey) -> Result<()> {
        let mut request = Request::default();
        request.set(Command::TREE_CONNECT, |body| {
            let path = r"\\server\vol".to_owned();
            tree_connect::Request { flags: tree_connect::Flags::empty(), path }.encode(body);
        });
        let header = self.exchange(&mut request, |message| {
            let (head, rest) = message.split_at_mut(HEADER_LEN);
            signing.sign_in_place(head, &[rest]);
        })?;
        ensure!(header.status == NtStatus::SUCCESS, "TREE_CONNECT: {:?}", header.status);
        self.identity.tree_id = header.tree_id();
        Ok(())
    }

    fn open(&mut self) -> Result<FileId> {
        let mut request = Request::default();
        request.set_create("sample", Opening::WRITE);
        Ok(create::Response::parse(self.call(&mut request)?)?.file_id)
    }

    /// Sends a request that must succeed. Returns its response without payload.
    fn call(&mut self, request: &mut Request) -> Result<&[u8]> {
        let header = self.exchange(request, |_| {})?;
        ensure!(header.status == NtStatus::SUCCESS, "{:?}: {:?}", header.command, header.status);
        Ok(&self.answer)
    }

    fn exchange(&mut self, request: &mut Request, sign: impl FnOnce(&mut Vec<u8>)) -> Result<Header> {
        request.address(self.next_id, CREDITS, self.identity);
        self.next_id += u64::from(request.charge());
        sign(request.message());
        let payload = request.payload().cloned().unwrap_or_default();
        let mut frame = Vec::with_capacity(request.message().len() + payload.len());
        frame.extend_from_slice(request.message());
        frame.extend_from_slice(&payload);
        self.connection.handle(self.now, Arc::new(Received(frame)), None)?;
        while let Some(op) = self.connection.poll_fs() {
            let result = carry_out(op.kind, &self.data);
            self.connection.complete(self.now, op.id, result)?;
        }
        while self.connection.poll_event().is_some() {}
        let transmit = self.connection.poll_transmit().context("the request was not answered")?;
        ensure!(transmit.seal.is_none() && self.connection.poll_transmit().is_none(), "one clear answer");
        let head = transmit.segments.into_iter().next().context("an answer has bytes")?;
        let forebay_smb::engine::Segment::Bytes(head) = head else { bail!("an answer begins with payload") };
        self.answer = head;
        Ok(Header::parse(&self.answer)?)
    }
}

/// The backend: one file with fixed attributes.
fn carry_out(kind: FsOpKind, data: &Data) -> FsResult {
    let stat = Stat {
        key: FileKey { dev: 1, ino: 2, stream: 0 },
        directory: false,
        end_of_file: FILE_BYTES,
        allocation_size: FILE_BYTES,
        links: 1,
        times: FileTimes { creation: NOW, last_access: NOW, last_write: NOW, change: NOW },
        attributes: FileAttributes::NORMAL.0,
        reparse: None,
        mode: 0o644,
        uid: 0,
        gid: 0,
    };
    Ok(match kind {
        FsOpKind::Open { .. } => {
            Opened { handle: FsHandle(Arc::new(())), created: false, stat, file: None, descriptors: None }
                .into()
        }
        FsOpKind::Read { .. } => FsReply::Read(Box::new(data.clone())),
        FsOpKind::Write { range, .. } => FsReply::Written(range.len() as u32),
        FsOpKind::Close { stat: true, .. } | FsOpKind::Stat { .. } => FsReply::Stat(stat),
        FsOpKind::Close { .. } => FsReply::Done,
        _ => return Err(NtStatus::NOT_SUPPORTED),
    })
}
