//! Requests about files, each as one call.

use std::sync::Arc;

use forebay_smb::engine::{Encryption, Mail, Server, ServerConfig};
use forebay_smb::fs::FsHandle;
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::time::Now;
use forebay_smb::wire::create::{
    CreateAction, CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel,
};
use forebay_smb::wire::create_context::{RequestContext, ResponseContext};
use forebay_smb::wire::fscc::directory::{DirEntry, parse_entries};
use forebay_smb::wire::fscc::fsctl::FsctlCode;
use forebay_smb::wire::fscc::{FileInformationClass, FsInformationClass};
use forebay_smb::wire::lock::{LockElement, LockFlags};
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{
    AccessMask, Capabilities, Command, Dialect, FileAttributes, FileTime, Header, HeaderFlags, ShareAccess,
    close, create, flush, ioctl, lock, query_directory, query_info, read, set_info, write,
};

use crate::memory::Memory;
use crate::support::{Answer, Client, config, volume};

pub const ALL: AccessMask = AccessMask::FILE_ALL_ACCESS;
pub const NEWEST: Dialect = Dialect::SMB3_1_1;
pub const SHARE_ALL: ShareAccess = ShareAccess(7);

/// A server with one volume in memory, and its clients.
pub struct Lab {
    pub memory: Memory,
    pub server: Arc<Server>,
    encryption: Encryption,
    clients: u64,
}

impl Lab {
    pub fn new() -> Self {
        Self::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut forebay_smb::engine::VolumeConfig)) -> Self {
        Self::of(config(), change)
    }

    /// A server that grants oplocks and leases. Its volume has a second user.
    pub fn caching() -> Self {
        Self::caching_with(Encryption::Offered)
    }

    pub fn caching_with(encryption: Encryption) -> Self {
        let second = forebay_smb::engine::Account {
            username: "second-user".to_owned(),
            hashes: vec![forebay_smb::auth::NtHash::from_password("second-secret")],
        };
        let config = ServerConfig { caching: true, encryption, ..config() };
        Self::of(config, |volume| volume.accounts.push(second))
    }

    pub fn of(config: ServerConfig, change: impl FnOnce(&mut forebay_smb::engine::VolumeConfig)) -> Self {
        let encryption = config.encryption;
        let server = Server::new(config);
        let mut volume = volume("vol", FsHandle(Arc::new(())));
        change(&mut volume);
        server.add_volume(volume).unwrap();
        Self { memory: Memory::default(), server, encryption, clients: 0 }
    }

    /// A client with its own ClientGuid.
    pub fn client_of(&mut self, guid: u8) -> Client {
        self.client_with(guid, Capabilities::empty())
    }

    /// As [`Self::client_of`], with more capabilities.
    pub fn client_with(&mut self, guid: u8, more: Capabilities) -> Client {
        self.clients += 1;
        let mut client = Client::new(&self.server, self.clients, NEWEST);
        client.backend = self.memory.backend();
        client.client_guid = [guid; 16];
        client.capabilities.insert(more);
        assert_eq!(client.negotiate().unwrap().status(), NtStatus::SUCCESS);
        assert_eq!(client.logon("vol-user", "vol-secret", 0).unwrap().status(), NtStatus::SUCCESS);
        client.seal = self.encryption == Encryption::Required;
        assert_eq!(client.tree_connect("vol").unwrap().status(), NtStatus::SUCCESS);
        client
    }

    pub fn client(&mut self) -> Client {
        self.dialect(NEWEST)
    }

    /// A client with the POSIX extensions.
    pub fn posix(&mut self) -> Client {
        self.clients += 1;
        let mut client = Client::new(&self.server, self.clients, NEWEST);
        client.backend = self.memory.backend();
        client.posix = true;
        success(&client.negotiate().unwrap()).unwrap();
        assert!(client.posix_answered);
        success(&client.logon("vol-user", "vol-secret", 0).unwrap()).unwrap();
        success(&client.tree_connect("vol").unwrap()).unwrap();
        client
    }

    /// A client over RDMA with 1 MiB of memory.
    pub fn over_rdma(&mut self, change: impl FnOnce(&mut Client)) -> Client {
        self.clients += 1;
        let mut client = Client::new(&self.server, self.clients, NEWEST);
        client.backend = self.memory.backend();
        client.connection.set_over_rdma();
        client.memory = (0..1 << 20_u32).map(|i| ((i * 7) >> 3) as u8).collect();
        change(&mut client);
        success(&client.negotiate().unwrap()).unwrap();
        success(&client.logon("vol-user", "vol-secret", 0).unwrap()).unwrap();
        success(&client.tree_connect("vol").unwrap()).unwrap();
        client
    }

    pub fn dialect(&mut self, dialect: Dialect) -> Client {
        self.clients += 1;
        Client::mount(&self.server, self.clients, dialect, self.memory.backend())
    }

    /// A client that lost its connections and reconnects, naming session `previous` or 0.
    pub fn back(&mut self, user: &str, password: &str, previous: u64) -> Client {
        self.clients += 1;
        let mut client = Client::new(&self.server, self.clients, NEWEST);
        client.backend = self.memory.backend();
        client.negotiate().unwrap();
        success(&client.logon(user, password, previous).unwrap()).unwrap();
        success(&client.tree_connect("vol").unwrap()).unwrap();
        client
    }

    /// Another channel of the session of `first`.
    pub fn channel(&mut self, first: &Client) -> Client {
        self.clients += 1;
        Client::channel(first, self.clients, self.memory.backend())
    }

    /// Delivers what connections have for each other. Clients are numbered from 1 in the order of their creation.
    pub fn deliver(&self, clients: &mut [&mut Client]) {
        loop {
            let mail = self.server.take_mail();
            if mail.is_empty() {
                return;
            }
            for (to, what) in mail {
                let client = &mut clients[to.0 as usize - 1];
                let now = client.now;
                deliver(client, now, what);
            }
        }
    }
}

fn deliver(client: &mut Client, now: Now, mail: Mail) {
    client.connection.deliver(now, mail).unwrap();
    client.run().unwrap();
}

/// Parameters of an open.
#[derive(Clone)]
pub struct Open<'a> {
    pub name: &'a str,
    pub access: AccessMask,
    pub share: ShareAccess,
    pub disposition: CreateDisposition,
    pub options: CreateOptions,
    pub attributes: FileAttributes,
    pub impersonation: ImpersonationLevel,
    pub contexts: Vec<RequestContext<'a>>,
}

/// A file with full access, created if it does not exist.
pub fn file(name: &str) -> Open<'_> {
    Open {
        name,
        access: ALL,
        share: SHARE_ALL,
        disposition: CreateDisposition::OPEN_IF,
        options: CreateOptions::NON_DIRECTORY_FILE,
        attributes: FileAttributes::empty(),
        impersonation: ImpersonationLevel::IMPERSONATION,
        contexts: Vec::new(),
    }
}

/// Like [`file`], but a directory.
pub fn directory(name: &str) -> Open<'_> {
    Open { options: CreateOptions::DIRECTORY_FILE, ..file(name) }
}

impl<'a> Open<'a> {
    pub fn access(self, access: AccessMask) -> Self {
        Self { access, ..self }
    }
    pub fn share(self, share: ShareAccess) -> Self {
        Self { share, ..self }
    }
    pub fn disposition(self, disposition: CreateDisposition) -> Self {
        Self { disposition, ..self }
    }
    pub fn option(self, option: CreateOptions) -> Self {
        Self { options: self.options | option, ..self }
    }
    pub fn options(self, options: CreateOptions) -> Self {
        Self { options, ..self }
    }
    pub fn attributes(self, attributes: FileAttributes) -> Self {
        Self { attributes, ..self }
    }
    pub fn context(mut self, context: RequestContext<'a>) -> Self {
        self.contexts.push(context);
        self
    }

    pub fn body(&self) -> Vec<u8> {
        let mut body = Vec::new();
        create::Request {
            requested_oplock_level: OplockLevel::BATCH,
            impersonation_level: self.impersonation,
            smb_create_flags: 0,
            desired_access: self.access,
            file_attributes: self.attributes,
            share_access: self.share,
            create_disposition: self.disposition,
            create_options: self.options,
            name: self.name.to_owned(),
            contexts: self.contexts.clone(),
        }
        .encode(&mut body);
        body
    }

    pub fn send(&self, client: &mut Client) -> Result<Opened, NtStatus> {
        let answer = client.call(Command::CREATE, &self.body()).unwrap();
        success(&answer)?;
        let response = create::Response::parse(&answer.message).unwrap();
        assert_eq!(response.oplock_level, OplockLevel::NONE);
        let mut opened = Opened {
            id: response.file_id,
            action: response.create_action,
            end_of_file: response.end_of_file,
            allocation_size: response.allocation_size,
            attributes: response.file_attributes,
            maximal_access: None,
            disk_id: None,
            posix: None,
            reparse_point: response.flags.contains(create::ResponseFlags::REPARSEPOINT),
        };
        for context in &response.contexts {
            match context {
                ResponseContext::MaximalAccess { maximal_access, .. } => {
                    opened.maximal_access = Some(*maximal_access);
                }
                ResponseContext::OnDiskId { disk_file_id, .. } => opened.disk_id = Some(*disk_file_id),
                ResponseContext::Posix { nlink, reparse_tag, mode, sids } => {
                    opened.posix = Some((*nlink, *reparse_tag, *mode, sids.to_vec()));
                }
                other => panic!("not asked for: {other:?}"),
            }
        }
        Ok(opened)
    }

    pub fn id(&self, client: &mut Client) -> FileId {
        self.send(client).unwrap().id
    }

    /// Opens and closes the file.
    pub fn touch(&self, client: &mut Client) {
        let id = self.id(client);
        close(client, id).unwrap();
    }
}

#[derive(Debug, PartialEq)]
pub struct Opened {
    pub id: FileId,
    pub action: CreateAction,
    pub end_of_file: u64,
    pub allocation_size: u64,
    pub attributes: FileAttributes,
    pub maximal_access: Option<AccessMask>,
    /// Links, reparse tag, mode, and the SIDs of owner and group.
    pub posix: Option<(u32, u32, u32, Vec<u8>)>,
    pub reparse_point: bool,
    pub disk_id: Option<u64>,
}

pub fn success(answer: &Answer) -> Result<(), NtStatus> {
    match answer.status() {
        NtStatus::SUCCESS | NtStatus::BUFFER_OVERFLOW => Ok(()),
        status => Err(status),
    }
}

fn simple(
    client: &mut Client,
    command: Command,
    encode: impl FnOnce(&mut Vec<u8>),
) -> Result<Answer, NtStatus> {
    let mut body = Vec::new();
    encode(&mut body);
    let answer = client.call(command, &body).unwrap();
    success(&answer).map(|()| answer)
}

pub fn close(client: &mut Client, file_id: FileId) -> Result<(), NtStatus> {
    simple(client, Command::CLOSE, |b| close::Request { flags: close::Flags::empty(), file_id }.encode(b))
        .map(drop)
}

pub fn close_stat(client: &mut Client, file_id: FileId) -> Result<close::Response, NtStatus> {
    let flags = close::Flags::POSTQUERY_ATTRIB;
    let answer = simple(client, Command::CLOSE, |b| close::Request { flags, file_id }.encode(b))?;
    Ok(close::Response::parse(&answer.message).unwrap())
}

pub fn flush(client: &mut Client, file_id: FileId) -> Result<(), NtStatus> {
    simple(client, Command::FLUSH, |b| flush::Request { file_id }.encode(b)).map(drop)
}

pub fn read_body(file_id: FileId, offset: u64, length: u32, minimum_count: u32) -> Vec<u8> {
    let mut body = Vec::new();
    read::Request {
        padding: 0x50,
        flags: read::Flags::empty(),
        length,
        offset,
        file_id,
        minimum_count,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        channel_info: &[],
    }
    .encode(&mut body);
    body
}

pub fn read_min(
    client: &mut Client,
    file_id: FileId,
    offset: u64,
    length: u32,
    minimum_count: u32,
) -> Result<Vec<u8>, NtStatus> {
    let body = read_body(file_id, offset, length, minimum_count);
    let charge = length.div_ceil(65536).max(1) as u16;
    let answer = client.call_charged(Command::READ, &body, charge).unwrap();
    success(&answer)?;
    let response = read::Response::parse(&answer.message).unwrap();
    Ok(response.data(&answer.message).unwrap().to_vec())
}

pub fn read(client: &mut Client, file_id: FileId, offset: u64, length: u32) -> Result<Vec<u8>, NtStatus> {
    read_min(client, file_id, offset, length, 0)
}

pub fn write_body(file_id: FileId, offset: u64, data: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    write::Request {
        data_offset: write::REQUEST_DATA_OFFSET,
        length: data.len() as u32,
        offset,
        file_id,
        channel: read::Channel::NONE,
        remaining_bytes: 0,
        flags: write::Flags::empty(),
        channel_info: &[],
    }
    .encode(&mut body);
    body.extend_from_slice(data);
    body
}

pub fn write(client: &mut Client, file_id: FileId, offset: u64, data: &[u8]) -> Result<u32, NtStatus> {
    let charge = data.len().div_ceil(65536).max(1) as u16;
    let answer = client.call_charged(Command::WRITE, &write_body(file_id, offset, data), charge).unwrap();
    success(&answer)?;
    Ok(write::Response::parse(&answer.message).unwrap().count)
}

pub const EXCLUSIVE: LockFlags = LockFlags::EXCLUSIVE_LOCK;
pub const SHARED: LockFlags = LockFlags::SHARED_LOCK;
pub const UNLOCK: LockFlags = LockFlags::UNLOCK;
pub const NOW_OR_NEVER: LockFlags = LockFlags::FAIL_IMMEDIATELY;

pub fn lock_body(file_id: FileId, locks: &[(u64, u64, LockFlags)]) -> Vec<u8> {
    let mut body = Vec::new();
    lock::Request {
        lock_sequence: 0,
        file_id,
        locks: locks.iter().map(|&(offset, length, flags)| LockElement { offset, length, flags }).collect(),
    }
    .encode(&mut body);
    body
}

pub fn lock(client: &mut Client, file_id: FileId, locks: &[(u64, u64, LockFlags)]) -> Result<(), NtStatus> {
    let answer = client.call(Command::LOCK, &lock_body(file_id, locks)).unwrap();
    success(&answer)
}

/// Sends a LOCK that has to wait. Returns its AsyncId.
pub fn lock_waits(client: &mut Client, file_id: FileId, range: (u64, u64, LockFlags)) -> u64 {
    let answer = client.call(Command::LOCK, &lock_body(file_id, &[range])).unwrap();
    assert_eq!(answer.status(), NtStatus::PENDING);
    assert!(answer.header.flags.contains(HeaderFlags::ASYNC_COMMAND));
    match answer.header.ids {
        forebay_smb::wire::Ids::Async { async_id } => async_id,
        other => panic!("{other:?}"),
    }
}

/// Sends one query. Returns the status and the names of the entries.
pub fn list(
    client: &mut Client,
    file_id: FileId,
    pattern: &str,
    flags: query_directory::Flags,
    room: u32,
) -> Result<Vec<String>, NtStatus> {
    let class = FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION;
    let entries = list_class(client, file_id, class, pattern, flags, room)?;
    Ok(entries.into_iter().map(|e| e.name.into_owned()).collect())
}

/// Like [`list`], for entries of a class.
pub fn list_class(
    client: &mut Client,
    file_id: FileId,
    class: FileInformationClass,
    pattern: &str,
    flags: query_directory::Flags,
    room: u32,
) -> Result<Vec<DirEntry<'static>>, NtStatus> {
    let mut body = Vec::new();
    query_directory::Request {
        file_information_class: class,
        flags,
        file_index: 0,
        file_id,
        output_buffer_length: room,
        file_name: pattern.to_owned(),
    }
    .encode(&mut body);
    let answer =
        client.call_charged(Command::QUERY_DIRECTORY, &body, room.div_ceil(65536).max(1) as u16).unwrap();
    success(&answer)?;
    let output = query_directory::Response::parse(&answer.message).unwrap().output_buffer;
    assert!(output.len() <= room as usize);
    Ok(parse_entries(class, output).unwrap())
}

fn query(
    client: &mut Client,
    file_id: FileId,
    info_type: InfoType,
    file_info_class: u8,
    additional_information: u32,
    room: u32,
) -> Result<Vec<u8>, NtStatus> {
    let answer = simple(client, Command::QUERY_INFO, |b| {
        query_info::Request {
            info_type,
            file_info_class,
            output_buffer_length: room,
            additional_information,
            flags: query_info::Flags::empty(),
            file_id,
            input_buffer: &[],
        }
        .encode(b);
    })?;
    Ok(query_info::Response::parse(&answer.message).unwrap().output_buffer.to_vec())
}

pub fn query_file(
    client: &mut Client,
    file_id: FileId,
    class: FileInformationClass,
    room: u32,
) -> Result<Vec<u8>, NtStatus> {
    query(client, file_id, InfoType::FILE, class.0, 0, room)
}

/// A query of extended attributes: those named in `input`, or those that `flags` and `index` select.
pub fn query_eas(
    client: &mut Client,
    file_id: FileId,
    flags: query_info::Flags,
    index: u32,
    input: &[u8],
    room: u32,
) -> Result<(NtStatus, Vec<u8>), NtStatus> {
    let answer = simple(client, Command::QUERY_INFO, |b| {
        query_info::Request {
            info_type: InfoType::FILE,
            file_info_class: FileInformationClass::FILE_FULL_EA_INFORMATION.0,
            output_buffer_length: room,
            additional_information: index,
            flags,
            file_id,
            input_buffer: input,
        }
        .encode(b);
    })?;
    Ok((answer.status(), query_info::Response::parse(&answer.message).unwrap().output_buffer.to_vec()))
}

pub fn query_fs(
    client: &mut Client,
    file_id: FileId,
    class: FsInformationClass,
    room: u32,
) -> Result<Vec<u8>, NtStatus> {
    query(client, file_id, InfoType::FILESYSTEM, class.0, 0, room)
}

pub fn query_security(
    client: &mut Client,
    file_id: FileId,
    parts: u32,
    room: u32,
) -> Result<Vec<u8>, NtStatus> {
    query(client, file_id, InfoType::SECURITY, 0, parts, room)
}

pub fn set_file_body(
    file_id: FileId,
    class: FileInformationClass,
    encode: impl FnOnce(&mut Vec<u8>),
) -> Vec<u8> {
    let (mut buffer, mut body) = (Vec::new(), Vec::new());
    encode(&mut buffer);
    set_info::Request {
        info_type: InfoType::FILE,
        file_info_class: class.0,
        additional_information: 0,
        file_id,
        buffer: &buffer,
    }
    .encode(&mut body);
    body
}

/// `STATUS_PENDING` if it waits.
pub fn set_file(
    client: &mut Client,
    file_id: FileId,
    class: FileInformationClass,
    encode: impl FnOnce(&mut Vec<u8>),
) -> Result<(), NtStatus> {
    let answer = client.ask(Command::SET_INFO, &set_file_body(file_id, class, encode));
    answer.map_or(Err(NtStatus::PENDING), |answer| success(&answer))
}

pub fn set_security(client: &mut Client, file_id: FileId, parts: u32, buffer: &[u8]) -> Result<(), NtStatus> {
    simple(client, Command::SET_INFO, |b| {
        set_info::Request {
            info_type: InfoType::SECURITY,
            file_info_class: 0,
            additional_information: parts,
            file_id,
            buffer,
        }
        .encode(b);
    })
    .map(drop)
}

pub fn delete_pending(client: &mut Client, file_id: FileId, delete_pending: bool) -> Result<(), NtStatus> {
    use forebay_smb::wire::fscc::file_info::FileDispositionInformation;
    set_file(client, file_id, FileInformationClass::FILE_DISPOSITION_INFORMATION, |b| {
        FileDispositionInformation { delete_pending }.encode(b);
    })
}

pub fn rename(
    client: &mut Client,
    file_id: FileId,
    to: &str,
    replace_if_exists: bool,
) -> Result<(), NtStatus> {
    use forebay_smb::wire::fscc::name_info::FileRenameInformation;
    set_file(client, file_id, FileInformationClass::FILE_RENAME_INFORMATION, |b| {
        FileRenameInformation { replace_if_exists, root_directory: 0, file_name: to.to_owned() }.encode(b);
    })
}

pub fn basic(
    times: FileTime,
    attributes: FileAttributes,
) -> forebay_smb::wire::fscc::file_info::FileBasicInformation {
    forebay_smb::wire::fscc::file_info::FileBasicInformation {
        creation_time: times,
        last_access_time: times,
        last_write_time: times,
        change_time: times,
        file_attributes: attributes,
    }
}

/// The status, and the output if the answer has any.
pub fn fsctl(
    client: &mut Client,
    file_id: FileId,
    ctl_code: FsctlCode,
    input: &[u8],
    max_output_response: u32,
) -> (NtStatus, Vec<u8>) {
    let mut body = Vec::new();
    ioctl::Request {
        ctl_code,
        file_id,
        input,
        max_input_response: 0,
        output: &[],
        max_output_response,
        flags: ioctl::Flags::IS_FSCTL,
    }
    .encode(&mut body);
    let answer = client.call(Command::IOCTL, &body).unwrap();
    let output = ioctl::Response::parse(&answer.message).map(|r| r.output.to_vec()).unwrap_or_default();
    (answer.status(), output)
}

/// Sends requests as one frame, all but the first related to the one before.
pub fn compound(client: &mut Client, requests: &[(Command, Vec<u8>)]) -> Vec<Answer> {
    compound_with(client, requests, |index, header| {
        if index > 0 {
            header.flags.insert(HeaderFlags::RELATED_OPERATIONS);
        }
    })
}

/// Sends requests as one frame, with headers modified by `change`.
pub fn compound_with(
    client: &mut Client,
    requests: &[(Command, Vec<u8>)],
    change: impl Fn(usize, &mut Header),
) -> Vec<Answer> {
    let mut frame = Vec::new();
    let last = requests.len() - 1;
    for (index, (command, body)) in requests.iter().enumerate() {
        let mut header = client.header(*command, 1);
        change(index, &mut header);
        let mut message = client.message(header, body);
        if index < last {
            message.resize(message.len().next_multiple_of(8), 0);
            let length = message.len() as u32;
            message[20..24].copy_from_slice(&length.to_le_bytes());
        }
        frame.extend_from_slice(&message);
    }
    client.send_raw(frame).unwrap();
    client.answers.drain(..).collect()
}
