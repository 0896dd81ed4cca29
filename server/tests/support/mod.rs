//! A real daemon in its own directory, and a small SMB client over TCP.
#![allow(dead_code, missing_docs, unreachable_pub, reason = "each test uses a part of it")]
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../../smb/tests/support/requests.rs"]
pub mod requests;

pub mod disk;
pub mod in_process;
pub mod random;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::admin::{self as api};
use forebay_smb::auth::ClientStep;
use forebay_smb::crypto::{
    Cipher, KeyDerivation, NonceSequence, OpeningKey, PreauthHash, SealingKey, client_to_server_key,
    server_to_client_key,
};
use forebay_smb::ids::FileId;
use forebay_smb::limits::CREDITS_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel};
use forebay_smb::wire::create_context::RequestContext;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::fsctl::{FsctlCode, SnapshotArray};
use forebay_smb::wire::negotiate::Dialect;
use forebay_smb::wire::{
    AccessMask, Command as Smb, FileAttributes, FileTime, Header, ShareAccess, close, create, flush, ioctl,
    query_directory, query_info, read, session_setup, set_info, write,
};
use forebay_testing::{Need, skip};
use tempfile::TempDir;
use tonic::transport::Channel;

pub const DEADLINE: Duration = Duration::from_secs(60);
pub const PASSWORD: &str = "correct horse battery";

/// Waits until `look` returns a value.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < DEADLINE, "{what} did not come in time");
        std::thread::yield_now();
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The engines to test: both, unless io_uring is allowed to be missing.
pub fn engines() -> Vec<&'static str> {
    let mut engines = vec!["readiness"];
    match forebay_server::io::uring::probe() {
        Ok(()) => engines.push("io_uring"),
        Err(unavailable) => skip(Need::IoUring, unavailable),
    }
    engines
}

/// A place for a daemon: pool, socket, configuration.
pub struct Place {
    pub scratch: TempDir,
    pub engine: &'static str,
}

impl Place {
    pub fn new(engine: &'static str) -> Self {
        let scratch = TempDir::new().unwrap();
        std::fs::create_dir(scratch.path().join("pool")).unwrap();
        let place = Self { scratch, engine };
        place.configure("127.0.0.1:0", &place.pool());
        place
    }

    pub fn pool(&self) -> PathBuf {
        self.scratch.path().join("pool")
    }

    pub fn socket(&self) -> PathBuf {
        self.scratch.path().join("admin.sock")
    }

    pub fn config(&self) -> PathBuf {
        self.scratch.path().join("server.toml")
    }

    pub fn configure(&self, listen: &str, pool: &Path) {
        let text = format!(
            "[server]\nlisten = [\"{listen}\"]\nmin_dialect = \"2.0.2\"\nio_engine = \"{}\"\nevent_loops = 2\ndrain_timeout_s = 20\n\
             [admin]\nsocket = \"{}\"\n[http]\nlisten = \"127.0.0.1:0\"\n[log]\nformat = \"json\"\n\
             [[pool]]\nname = \"p\"\npath = \"{}\"\nquota = \"none\"\n",
            self.engine,
            self.socket().display(),
            pool.display()
        );
        std::fs::write(self.config(), text).unwrap();
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay-server"));
        command.args(["run", "--config"]).arg(self.config()).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    /// Runs a server that fails to start. Returns its exit code and its output.
    pub fn fails(&self) -> (i32, String) {
        let output = self.command().output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    }

    pub fn start(&self) -> Daemon {
        let log = std::fs::File::create(self.log()).unwrap();
        let child = self.command().stderr(log).spawn().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut daemon = Daemon { child, runtime, admin: None, address: None };
        let socket = self.socket();
        let mut client = until("the admin socket", || {
            assert!(
                daemon.child.try_wait().unwrap().is_none(),
                "{}",
                std::fs::read_to_string(self.log()).unwrap()
            );
            daemon.runtime.block_on(connect(&socket))
        });
        let info = daemon
            .runtime
            .block_on(client.get_server_info(api::GetServerInfoRequest {}))
            .unwrap()
            .into_inner();
        assert!(self.engine == "auto" || info.io_engine == self.engine);
        daemon.address = Some(info.listen_addresses[0].parse().unwrap());
        daemon.admin = Some(client);
        daemon
    }

    pub fn log(&self) -> PathBuf {
        self.scratch.path().join("log")
    }

    /// The running server's answer at /metrics.
    pub fn metrics(&self) -> String {
        let serving = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).ok()?;
            (line["message"] == "serving").then(|| line["http"].as_str().map(str::to_owned))?
        };
        let log = std::fs::read_to_string(self.log()).unwrap();
        let http = log.lines().find_map(serving).unwrap();
        let mut stream = TcpStream::connect(http.trim_start_matches("Some(").trim_end_matches(')')).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }
}

async fn connect(socket: &Path) -> Option<AdminClient<Channel>> {
    let uri = format!("unix://{}", socket.display());
    let channel = tonic::transport::Endpoint::from_shared(uri).unwrap().connect().await.ok()?;
    Some(AdminClient::new(channel))
}

/// A running daemon; killed when dropped.
pub struct Daemon {
    pub child: Child,
    pub runtime: tokio::runtime::Runtime,
    admin: Option<AdminClient<Channel>>,
    address: Option<SocketAddr>,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Daemon {
    pub fn address(&self) -> SocketAddr {
        self.address.unwrap()
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub fn wait(&mut self) -> ExitStatus {
        until("the daemon's end", || self.child.try_wait().unwrap())
    }

    /// Runs one call of the admin API.
    pub fn admin<T>(&mut self, call: impl AsyncFnOnce(&mut AdminClient<Channel>) -> T) -> T {
        self.runtime.block_on(call(self.admin.as_mut().unwrap()))
    }

    pub fn create_volume(&mut self, id: &str) -> Result<api::Volume, tonic::Status> {
        self.create(request(id))
    }

    pub fn create(&mut self, request: api::CreateVolumeRequest) -> Result<api::Volume, tonic::Status> {
        self.admin(async |admin| admin.create_volume(request).await).map(|r| r.into_inner().volume.unwrap())
    }

    pub fn client(&self, dialect: Dialect) -> Client {
        Client::connect(self.address(), dialect)
    }

    /// A client that is logged on to volume `id` and connected to it.
    pub fn mount(&self, id: &str, dialect: Dialect) -> Client {
        let mut client = self.client(dialect);
        assert_eq!(client.log_on(&format!("{id}-user"), PASSWORD), NtStatus::SUCCESS);
        assert_eq!(client.tree_connect(id), NtStatus::SUCCESS);
        client
    }
}

pub fn request(id: &str) -> api::CreateVolumeRequest {
    api::CreateVolumeRequest {
        volume_id: id.to_owned(),
        capacity_bytes: 1 << 30,
        credentials: Some(api::Credentials { username: format!("{id}-user"), password: PASSWORD.to_owned() }),
        ..Default::default()
    }
}

/// An answer: its header, and the whole message.
pub struct Answer {
    pub header: Header,
    pub message: Vec<u8>,
}

impl Answer {
    pub fn status(&self) -> NtStatus {
        self.header.status
    }
}

struct Keys {
    sealing: SealingKey,
    opening: OpeningKey,
    nonces: NonceSequence,
}

/// A client over TCP: 2.1 in the clear, 3.1.1 sealed.
pub struct Client {
    pub stream: TcpStream,
    dialect: Dialect,
    message_id: u64,
    pub session_id: u64,
    tree_id: u32,
    preauth: PreauthHash,
    keys: Option<Keys>,
}

/// Reads the next bytes on `stream` without consuming them. If a process is stopped and continued, as happens to all processes
/// of a machine that is frozen for a moment, its calls with a time limit are interrupted; `peek` does not retry automatically.
pub fn peek(stream: &TcpStream, buffer: &mut [u8]) -> std::io::Result<usize> {
    loop {
        match stream.peek(buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

impl Client {
    pub fn connect(address: SocketAddr, dialect: Dialect) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut client = Self {
            stream,
            dialect,
            message_id: 0,
            session_id: 0,
            tree_id: 0,
            preauth: PreauthHash::default(),
            keys: None,
        };
        client.negotiate();
        client
    }

    /// Sends a request without waiting. Returns its message id.
    pub fn send(&mut self, command: Smb, charge: u16, body: &[u8]) -> u64 {
        self.try_send(command, charge, body).unwrap()
    }

    fn try_send(&mut self, command: Smb, charge: u16, body: &[u8]) -> std::io::Result<u64> {
        let message = self.message(command, charge, body);
        let id = self.message_id - u64::from(charge.max(1));
        self.try_send_message(message)?;
        Ok(id)
    }

    fn message(&mut self, command: Smb, charge: u16, body: &[u8]) -> Vec<u8> {
        let header = requests::header(command, self.message_id, charge, 512, self.session_id, self.tree_id);
        self.message_id += u64::from(charge.max(1));
        let mut message = Vec::new();
        header.encode(&mut message);
        message.extend_from_slice(body);
        message
    }

    fn send_message(&mut self, message: Vec<u8>) {
        self.try_send_message(message).unwrap();
    }

    fn try_send_message(&mut self, mut message: Vec<u8>) -> std::io::Result<()> {
        if let Some(keys) = &mut self.keys {
            let nonce = keys.nonces.next_nonce().unwrap();
            let header = keys.sealing.seal_in_place(nonce, self.session_id, &mut message).unwrap();
            message.splice(0..0, header);
        }
        let mut frame = u32::try_from(message.len()).unwrap().to_be_bytes().to_vec();
        frame.append(&mut message);
        self.stream.write_all(&frame)
    }

    /// The next frame, or `None` if the server has ended the connection.
    pub fn frame(&mut self) -> Option<Vec<u8>> {
        let mut prefix = [0; 4];
        match self.stream.read_exact(&mut prefix) {
            Ok(()) => {}
            Err(error) => {
                let timeout =
                    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut);
                assert!(!timeout, "the server does not answer");
                return None;
            }
        }
        let mut frame = vec![0; u32::from_be_bytes(prefix) as usize];
        self.stream.read_exact(&mut frame).ok()?;
        if let Some(keys) = &self.keys
            && frame.starts_with(b"\xfdSMB")
        {
            let plain = keys.opening.open_in_place(&mut frame).unwrap().to_vec();
            return Some(plain);
        }
        Some(frame)
    }

    /// The next final answer.
    pub fn answer(&mut self) -> Answer {
        loop {
            let message = self.frame().expect("an answer");
            let header = Header::parse(&message).unwrap();
            let answer = Answer { header, message };
            if answer.status() != NtStatus::PENDING {
                return answer;
            }
        }
    }

    /// Like [`Self::call`], or `None` if the server has ended the connection.
    pub fn try_call(&mut self, command: Smb, charge: u16, body: &[u8]) -> Option<Answer> {
        self.try_send(command, charge, body).ok()?;
        loop {
            let message = self.frame()?;
            let header = Header::parse(&message).unwrap();
            let answer = Answer { header, message };
            if answer.status() != NtStatus::PENDING {
                return Some(answer);
            }
        }
    }

    pub fn call(&mut self, command: Smb, body: &[u8]) -> Answer {
        self.send(command, 1, body);
        self.answer()
    }

    fn negotiate(&mut self) {
        let body = requests::negotiate(self.dialect, &[Cipher::Aes128Gcm], &[]);
        let message = self.message(Smb::NEGOTIATE, 1, &body);
        self.preauth.update(&message);
        self.send_message(message);
        let answer = self.answer();
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        self.preauth.update(&answer.message);
    }

    fn session_setup(&mut self, token: &[u8]) -> Vec<u8> {
        let body = requests::session_setup(token, 0);
        self.message(Smb::SESSION_SETUP, 1, &body)
    }

    pub fn log_on(&mut self, user: &str, password: &str) -> NtStatus {
        let mut initiator = requests::initiator(user, password);
        let mut preauth = self.preauth;
        let message = self.session_setup(&initiator.first());
        preauth.update(&message);
        self.send_message(message);
        let answer = self.answer();
        if answer.status() != NtStatus::MORE_PROCESSING_REQUIRED {
            return answer.status();
        }
        preauth.update(&answer.message);
        self.session_id = answer.header.session_id;
        let token = session_setup::Response::parse(&answer.message).unwrap().security_buffer.to_vec();
        let now = forebay_server::clock::wall().0;
        let ClientStep::Last(token, key) = initiator.step(&token, now).expect("a challenge") else {
            panic!("NTLM takes two legs")
        };
        let message = self.session_setup(&token);
        preauth.update(&message);
        self.send_message(message);
        let answer = self.answer();
        if answer.status() == NtStatus::SUCCESS && self.dialect == Dialect::SMB3_1_1 {
            let derivation = KeyDerivation::Smb311(&preauth);
            let cipher = Cipher::Aes128Gcm;
            self.keys = Some(Keys {
                sealing: SealingKey::new(&client_to_server_key(derivation, key.as_bytes(), cipher)),
                opening: OpeningKey::new(&server_to_client_key(derivation, key.as_bytes(), cipher)),
                nonces: NonceSequence::new([0; 3], 1),
            });
        }
        answer.status()
    }

    pub fn tree_connect(&mut self, share: &str) -> NtStatus {
        let body = requests::tree_connect(share);
        let answer = self.call(Smb::TREE_CONNECT, &body);
        if answer.status() == NtStatus::SUCCESS {
            self.tree_id = answer.header.tree_id();
        }
        answer.status()
    }

    pub fn open(&mut self, name: &str, disposition: CreateDisposition) -> Result<FileId, NtStatus> {
        self.open_with(name, disposition, OplockLevel::NONE)
    }

    pub fn open_with(
        &mut self,
        name: &str,
        disposition: CreateDisposition,
        oplock: OplockLevel,
    ) -> Result<FileId, NtStatus> {
        let body = create_body_with(name, disposition, AccessMask::FILE_ALL_ACCESS, oplock);
        let answer = self.call(Smb::CREATE, &body);
        match answer.status() {
            NtStatus::SUCCESS => Ok(create::Response::parse(&answer.message).unwrap().file_id),
            status => Err(status),
        }
    }

    /// Opens the file as it was in the snapshot of this time ([MS-SMB2] 2.2.13.2.7).
    pub fn open_of(&mut self, time: u64, name: &str, access: AccessMask) -> Result<FileId, NtStatus> {
        let mut body = Vec::new();
        create::Request {
            requested_oplock_level: OplockLevel::NONE,
            impersonation_level: ImpersonationLevel::IMPERSONATION,
            smb_create_flags: 0,
            desired_access: access,
            file_attributes: FileAttributes::NORMAL,
            share_access: ShareAccess(7),
            create_disposition: CreateDisposition::OPEN,
            create_options: CreateOptions(0),
            name: name.to_owned(),
            contexts: vec![RequestContext::TimewarpToken(FileTime(time))],
        }
        .encode(&mut body);
        let answer = self.call(Smb::CREATE, &body);
        match answer.status() {
            NtStatus::SUCCESS => Ok(create::Response::parse(&answer.message).unwrap().file_id),
            status => Err(status),
        }
    }

    /// Snapshots as the server lists them, in a buffer of `room` bytes.
    pub fn snapshots(&mut self, file_id: FileId, room: u32) -> Result<SnapshotArray, NtStatus> {
        let mut body = Vec::new();
        ioctl::Request {
            ctl_code: FsctlCode::SRV_ENUMERATE_SNAPSHOTS,
            file_id,
            input: &[],
            max_input_response: 0,
            output: &[],
            max_output_response: room,
            flags: ioctl::Flags(1),
        }
        .encode(&mut body);
        let answer = self.call(Smb::IOCTL, &body);
        match answer.status() {
            NtStatus::SUCCESS => {
                Ok(SnapshotArray::parse(ioctl::Response::parse(&answer.message).unwrap().output).unwrap())
            }
            status => Err(status),
        }
    }

    pub fn send_rename(&mut self, file_id: FileId, to: &str) -> u64 {
        // [MS-FSCC] 2.4.37.2: ReplaceIfExists, Reserved, RootDirectory, FileNameLength, FileName.
        let name: Vec<u8> = to.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let mut information = vec![0; 16];
        information.extend_from_slice(&(name.len() as u32).to_le_bytes());
        information.extend_from_slice(&name);
        let mut body = Vec::new();
        set_info::Request {
            info_type: query_info::InfoType::FILE,
            file_info_class: FileInformationClass::FILE_RENAME_INFORMATION.0,
            additional_information: 0,
            file_id,
            buffer: &information,
        }
        .encode(&mut body);
        self.send(Smb::SET_INFO, 1, &body)
    }

    /// The frame of a WRITE up to its data, in clear. The caller sends the data.
    pub fn write_frame(&mut self, file_id: FileId, offset: u64, length: u32) -> Vec<u8> {
        let message =
            self.message(Smb::WRITE, length.div_ceil(65536) as u16, &write_body(file_id, offset, length));
        framed(message, length)
    }

    /// The frame of a compound of CREATE and a WRITE to the opened file, up to the data. The caller sends the data.
    pub fn create_and_write_frame(&mut self, name: &str, length: u32) -> Vec<u8> {
        let mut message = self.message(
            Smb::CREATE,
            1,
            &create_body(name, CreateDisposition::OPEN, AccessMask::FILE_ALL_ACCESS),
        );
        message.resize(message.len().next_multiple_of(8), 0);
        let next = (message.len() as u32).to_le_bytes();
        // [MS-SMB2] 2.2.1.2: NextCommand, and Flags of the second.
        message[20..24].copy_from_slice(&next);
        let related = FileId { persistent: u64::MAX, volatile: u64::MAX };
        let mut second =
            self.message(Smb::WRITE, length.div_ceil(65536) as u16, &write_body(related, 0, length));
        second[16] |= 4;
        message.append(&mut second);
        framed(message, length)
    }

    pub fn send_read(&mut self, file_id: FileId, offset: u64, length: u32) -> u64 {
        let mut body = Vec::new();
        read::Request {
            padding: 0x50,
            flags: read::Flags(0),
            length,
            offset,
            file_id,
            minimum_count: 0,
            channel: read::Channel::NONE,
            remaining_bytes: 0,
            channel_info: &[],
        }
        .encode(&mut body);
        self.send(Smb::READ, length.div_ceil(65536) as u16, &body)
    }

    pub fn send_write(&mut self, file_id: FileId, offset: u64, data: &[u8]) -> u64 {
        self.try_send_write(file_id, offset, data).unwrap()
    }

    /// Fails if the server has ended the connection.
    pub fn try_send_write(&mut self, file_id: FileId, offset: u64, data: &[u8]) -> std::io::Result<u64> {
        let mut body = write_body(file_id, offset, data.len() as u32);
        body.extend_from_slice(data);
        self.try_send(Smb::WRITE, data.len().div_ceil(65536) as u16, &body)
    }

    pub fn write(&mut self, file_id: FileId, offset: u64, data: &[u8]) -> NtStatus {
        self.send_write(file_id, offset, data);
        self.answer().status()
    }

    pub fn read(&mut self, file_id: FileId, offset: u64, length: u32) -> Result<Vec<u8>, NtStatus> {
        self.send_read(file_id, offset, length);
        data(&self.answer())
    }

    pub fn flush(&mut self, file_id: FileId) -> NtStatus {
        let mut body = Vec::new();
        flush::Request { file_id }.encode(&mut body);
        self.call(Smb::FLUSH, &body).status()
    }

    pub fn attributes(&mut self, file_id: FileId) -> NtStatus {
        let mut body = Vec::new();
        query_info::Request {
            info_type: query_info::InfoType::FILE,
            file_info_class: FileInformationClass::FILE_ALL_INFORMATION.0,
            output_buffer_length: 4096,
            additional_information: 0,
            flags: query_info::Flags::empty(),
            file_id,
            input_buffer: &[],
        }
        .encode(&mut body);
        self.call(Smb::QUERY_INFO, &body).status()
    }

    /// Requests as many names of a directory as fit in `length` bytes.
    pub fn send_list(&mut self, directory: FileId, flags: query_directory::Flags, length: u32) -> u64 {
        let mut body = Vec::new();
        query_directory::Request {
            file_information_class: FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION,
            flags,
            file_index: 0,
            file_id: directory,
            output_buffer_length: length,
            file_name: "*".to_owned(),
        }
        .encode(&mut body);
        self.send(Smb::QUERY_DIRECTORY, length.div_ceil(65536) as u16, &body)
    }

    /// Like [`Self::send_list`]. Returns the names, or `None` after the last.
    pub fn list(
        &mut self,
        directory: FileId,
        flags: query_directory::Flags,
        length: u32,
    ) -> Result<Option<Vec<String>>, NtStatus> {
        self.send_list(directory, flags, length);
        let answer = self.answer();
        match answer.status() {
            NtStatus::SUCCESS => {
                let output = query_directory::Response::parse(&answer.message).unwrap().output_buffer;
                Ok(Some(names(output)))
            }
            NtStatus::NO_MORE_FILES => Ok(None),
            status => Err(status),
        }
    }

    /// Has the server grant the maximum number of credits of a connection. Returns that number.
    pub fn rich(&mut self) -> u64 {
        while self.call(Smb::ECHO, &[4, 0, 0, 0]).header.credits > 1 {}
        CREDITS_MAX.into()
    }

    /// Closes the file and so removes it ([MS-FSCC] 2.4.11).
    pub fn remove(&mut self, file_id: FileId) -> NtStatus {
        let mut body = Vec::new();
        set_info::Request {
            info_type: query_info::InfoType::FILE,
            file_info_class: FileInformationClass::FILE_DISPOSITION_INFORMATION.0,
            additional_information: 0,
            file_id,
            buffer: &[1],
        }
        .encode(&mut body);
        match self.call(Smb::SET_INFO, &body).status() {
            NtStatus::SUCCESS => self.close(file_id),
            status => status,
        }
    }

    pub fn close(&mut self, file_id: FileId) -> NtStatus {
        let mut body = Vec::new();
        close::Request { flags: close::Flags(0), file_id }.encode(&mut body);
        self.call(Smb::CLOSE, &body).status()
    }
}

/// The body of a CREATE.
pub fn create_body(name: &str, disposition: CreateDisposition, access: AccessMask) -> Vec<u8> {
    create_body_with(name, disposition, access, OplockLevel::NONE)
}

fn create_body_with(
    name: &str,
    disposition: CreateDisposition,
    access: AccessMask,
    oplock: OplockLevel,
) -> Vec<u8> {
    let mut body = Vec::new();
    create::Request {
        requested_oplock_level: oplock,
        impersonation_level: ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: access,
        file_attributes: FileAttributes::NORMAL,
        share_access: ShareAccess(7),
        create_disposition: disposition,
        create_options: CreateOptions(0),
        name: name.to_owned(),
        contexts: Vec::new(),
    }
    .encode(&mut body);
    body
}

fn write_body(file_id: FileId, offset: u64, length: u32) -> Vec<u8> {
    let mut body = Vec::new();
    write::Request {
        data_offset: 112,
        length,
        offset,
        file_id,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        flags: write::Flags(0),
        channel_info: &[],
    }
    .encode(&mut body);
    body.truncate(48);
    body
}

/// A message with the transport's prefix, to be followed by `more` bytes.
fn framed(message: Vec<u8>, more: u32) -> Vec<u8> {
    let length = message.len() as u32 + more;
    [&length.to_be_bytes(), &message[..]].concat()
}

/// The names in an answer of FileIdBothDirectoryInformation ([MS-FSCC] 2.4.17).
fn names(output: &[u8]) -> Vec<String> {
    let number = |at: usize| u32::from_le_bytes(output[at..at + 4].try_into().unwrap()) as usize;
    let mut names = Vec::new();
    let mut at = 0;
    loop {
        let name = &output[at + 104..][..number(at + 60)];
        let units: Vec<u16> = name.chunks(2).map(|unit| u16::from_le_bytes([unit[0], unit[1]])).collect();
        names.push(String::from_utf16(&units).unwrap());
        match number(at) {
            0 => return names,
            next => at += next,
        }
    }
}

/// The payload of a READ's answer.
pub fn data(answer: &Answer) -> Result<Vec<u8>, NtStatus> {
    match answer.status() {
        NtStatus::SUCCESS => {
            let response = read::Response::parse(&answer.message).unwrap();
            let start = usize::from(response.data_offset);
            Ok(answer.message[start..start + response.data_length as usize].to_vec())
        }
        status => Err(status),
    }
}
