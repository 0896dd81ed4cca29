//! A file system in memory that fulfils the contract of `forebay_smb::fs`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, Weak};

use forebay_smb::descriptor::{Descriptors, Kept, Owner};
use forebay_smb::fs::{
    DirEntry, Ea, FileKey, FileTimes, FsHandle, FsOpKind, FsReply, FsResult, ObjectKind, OpenMode,
    OpenRequest, Opened, OpenedFile, Ownership, Payload, RelPath, ReparsePoint, Space, Stat, StreamEntry,
    StreamName,
};
use forebay_smb::limits::EA_BYTES_MAX;
use forebay_smb::short_name;
use forebay_smb::status::NtStatus;

use crate::support::{Backend, NOW};

const ROOT: u64 = 2;
const ARCHIVE: u32 = 0x20;
const DIRECTORY: u32 = 0x10;
const NORMAL: u32 = 0x80;
const REPARSE_POINT: u32 = 0x400;
const UNIT: u64 = 4096;
/// The maximum length of a file.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Clone)]
struct Node {
    directory: bool,
    data: Vec<u8>,
    reserved: u64,
    children: BTreeMap<String, u64>,
    attributes: u32,
    times: FileTimes,
    links: u32,
    reparse: Option<(ReparsePoint, Vec<u8>)>,
    mode: u32,
    uid: u32,
    gid: u32,
    eas: Vec<Ea>,
    streams: Vec<(StreamName, Vec<u8>)>,
    descriptor: Option<Kept>,
}

struct Handle {
    ino: u64,
    stream: Mutex<Option<StreamName>>,
    path: Mutex<RelPath>,
    /// The last name that was listed.
    position: Mutex<Option<String>>,
    checked: bool,
}

struct Data(Vec<u8>);

impl Payload for Data {
    fn length(&self) -> usize {
        self.0.len()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any + Send> {
        self
    }
}

/// The file system; clones share it.
#[derive(Clone)]
pub struct Memory(Arc<Mutex<Inner>>);

struct Inner {
    nodes: HashMap<u64, Node>,
    next: u64,
    /// Open handles, to follow renames.
    handles: Vec<Weak<Handle>>,
    /// Operations carried out, by name.
    log: Vec<&'static str>,
}

/// The existing bytes of a range.
fn part(data: &[u8], offset: u64, length: u64) -> &[u8] {
    let end = (data.len() as u64).min(offset.saturating_add(length));
    if offset >= end { &[] } else { &data[offset as usize..end as usize] }
}

fn ea_bytes(eas: &[Ea]) -> usize {
    eas.iter().map(|ea| Ea::size(ea.name.len(), ea.value.len())).sum()
}

fn limit(offset: u64, length: u64) -> Result<(), NtStatus> {
    if offset.saturating_add(length) > FILE_BYTES_MAX { Err(NtStatus::DISK_FULL) } else { Ok(()) }
}

impl Node {
    fn new(directory: bool) -> Self {
        let times = FileTimes { creation: NOW, last_access: NOW, last_write: NOW, change: NOW };
        let attributes = if directory { 0 } else { ARCHIVE };
        Self {
            directory,
            data: Vec::new(),
            reserved: 0,
            children: BTreeMap::new(),
            attributes,
            times,
            links: 1,
            reparse: None,
            mode: if directory { 0o755 } else { 0o644 },
            uid: 0,
            gid: 0,
            eas: Vec::new(),
            streams: Vec::new(),
            descriptor: None,
        }
    }

    fn owner(&self) -> Owner {
        Owner { uid: self.uid, gid: self.gid }
    }

    fn may_add(&self, directory: bool) -> Result<(), NtStatus> {
        let list = self.descriptor.as_ref();
        list.map_or(Ok(()), |list| list.may_add(self.owner(), directory))
    }
}

impl Node {
    fn own(&mut self, ownership: Ownership) {
        self.mode = ownership.mode.unwrap_or(self.mode);
        self.uid = ownership.uid.unwrap_or(self.uid);
        self.gid = ownership.gid.unwrap_or(self.gid);
    }
}

impl Default for Memory {
    fn default() -> Self {
        let nodes = HashMap::from([(ROOT, Node::new(true))]);
        Self(Arc::new(Mutex::new(Inner { nodes, next: ROOT + 1, handles: Vec::new(), log: Vec::new() })))
    }
}

impl Memory {
    /// The function that carries out the operations of a client's connection.
    pub fn backend(&self) -> Backend {
        let memory = self.clone();
        Box::new(move |op| memory.0.lock().unwrap().execute(op))
    }

    /// Removes everything.
    pub fn clear(&self) {
        let mut inner = self.0.lock().unwrap();
        inner.nodes = HashMap::from([(ROOT, Node::new(true))]);
    }

    /// Contents of the file at `path`.
    pub fn contents(&self, path: &str) -> Option<Vec<u8>> {
        let inner = self.0.lock().unwrap();
        let ino = inner.find(&RelPath::new(path).unwrap()).ok()?;
        Some(inner.nodes[&ino].data.clone())
    }

    /// Operations since the last call.
    pub fn take_log(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap().log)
    }
}

impl Inner {
    fn long(&self, path: &RelPath) -> RelPath {
        let mut long: Vec<String> = Vec::new();
        for part in path.as_str().split('/') {
            let directory = self.find(&RelPath::new(&long.join("/")).unwrap());
            let names: Vec<&String> =
                directory.iter().flat_map(|at| self.nodes[at].children.keys()).collect();
            let mut behind = names.iter().filter(|name| short_name::is_of(part, name));
            let name = match (names.iter().any(|name| *name == part), behind.next(), behind.next()) {
                (false, Some(name), None) => name.as_str(),
                _ => part,
            };
            long.push(name.to_owned());
        }
        RelPath::new(&long.join("/")).unwrap()
    }

    fn find(&self, path: &RelPath) -> Result<u64, NtStatus> {
        let mut at = ROOT;
        let mut parts = path.as_str().split('/').filter(|p| !p.is_empty()).peekable();
        while let Some(part) = parts.next() {
            let missing = if parts.peek().is_some() {
                NtStatus::OBJECT_PATH_NOT_FOUND
            } else {
                NtStatus::OBJECT_NAME_NOT_FOUND
            };
            let node = &self.nodes[&at];
            if !node.directory {
                return Err(NtStatus::OBJECT_PATH_NOT_FOUND);
            }
            at = *node.children.get(part).ok_or(missing)?;
        }
        Ok(at)
    }

    fn parent(&self, path: &RelPath) -> Result<u64, NtStatus> {
        match self.find(&path.parent()) {
            Ok(ino) if self.nodes[&ino].directory => Ok(ino),
            _ => Err(NtStatus::OBJECT_PATH_NOT_FOUND),
        }
    }

    fn stat(&self, ino: u64) -> Stat {
        let node = &self.nodes[&ino];
        let attributes = node.attributes
            | if node.directory { DIRECTORY } else { 0 }
            | if node.reparse.is_some() { REPARSE_POINT } else { 0 };
        Stat {
            key: FileKey { dev: 1, ino, stream: 0 },
            directory: node.directory,
            end_of_file: node.data.len() as u64,
            allocation_size: (node.data.len() as u64)
                .max(node.reserved.min(FILE_BYTES_MAX))
                .next_multiple_of(UNIT),
            links: node.links,
            times: node.times,
            attributes: if attributes == 0 { NORMAL } else { attributes },
            reparse: node.reparse.as_ref().map(|(point, _)| *point),
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
        }
    }

    /// Attributes of the file that a handle denotes.
    fn stat_of(&self, handle: &Handle) -> Result<Stat, NtStatus> {
        let stat = self.stat(handle.ino);
        let Some(name) = handle.stream.lock().unwrap().clone() else { return Ok(stat) };
        let size = self.data(handle)?.len() as u64;
        Ok(Stat {
            key: FileKey { stream: name.number(), ..stat.key },
            directory: false,
            end_of_file: size,
            allocation_size: size.next_multiple_of(8),
            attributes: stat.attributes & !DIRECTORY,
            ..stat
        })
    }

    /// Contents of the file that a handle denotes.
    fn data(&self, handle: &Handle) -> Result<&Vec<u8>, NtStatus> {
        let node = &self.nodes[&handle.ino];
        match &*handle.stream.lock().unwrap() {
            None => Ok(&node.data),
            Some(name) => {
                let stream = node.streams.iter().find(|(known, _)| known == name);
                stream.map(|(_, data)| data).ok_or(NtStatus::FILE_DELETED)
            }
        }
    }

    fn data_mut(&mut self, handle: &Handle) -> Result<&mut Vec<u8>, NtStatus> {
        let node = self.nodes.get_mut(&handle.ino).unwrap();
        match &*handle.stream.lock().unwrap() {
            None => Ok(&mut node.data),
            Some(name) => {
                let stream = node.streams.iter_mut().find(|(known, _)| known == name);
                stream.map(|(_, data)| data).ok_or(NtStatus::FILE_DELETED)
            }
        }
    }

    fn open_stream(&mut self, request: OpenRequest, name: StreamName) -> Result<Opened, NtStatus> {
        let mode = if request.mode == OpenMode::Existing { OpenMode::Existing } else { OpenMode::Either };
        let of_file = OpenRequest { mode, kind: ObjectKind::Any, stream: None, ..request.clone() };
        let Opened { handle, created: made_file, descriptors, .. } = self.open(of_file)?;
        let ino = Arc::clone(&handle.0).downcast::<Handle>().unwrap().ino;
        let streams = &mut self.nodes.get_mut(&ino).unwrap().streams;
        let created = match (streams.iter().any(|(known, _)| *known == name), request.mode) {
            (true, OpenMode::New) => return Err(NtStatus::OBJECT_NAME_COLLISION),
            (false, OpenMode::Existing) => return Err(NtStatus::OBJECT_NAME_NOT_FOUND),
            (there, _) => !there,
        };
        if created {
            streams.push((name.clone(), Vec::new()));
        }
        let stream = Handle {
            ino,
            stream: Mutex::new(Some(name)),
            path: Mutex::new(request.path),
            position: Mutex::default(),
            checked: request.checked,
        };
        let stat = self.stat_of(&stream)?;
        let file = Some(OpenedFile { handle, created: made_file });
        Ok(Opened { handle: FsHandle(Arc::new(stream)), created, stat, file, descriptors })
    }

    fn rename_stream(
        &mut self,
        handle: &Handle,
        to: Option<StreamName>,
        replace: bool,
    ) -> Result<(), NtStatus> {
        let name = handle.stream.lock().unwrap().clone().ok_or(NtStatus::INVALID_HANDLE)?;
        let data = self.data(handle)?.clone();
        let node = self.nodes.get_mut(&handle.ino).unwrap();
        match &to {
            None if !node.data.is_empty() => return Err(NtStatus::INVALID_PARAMETER),
            None => node.data = data,
            Some(to) => {
                let there = node.streams.iter().find(|(known, _)| known == to);
                match there {
                    Some(_) if !replace => return Err(NtStatus::OBJECT_NAME_COLLISION),
                    Some((_, there)) if !there.is_empty() => return Err(NtStatus::INVALID_PARAMETER),
                    _ => {}
                }
                node.streams.retain(|(known, _)| known != to);
                node.streams.push((to.clone(), data));
            }
        }
        node.streams.retain(|(known, _)| *known != name);
        if to.is_some() {
            *handle.stream.lock().unwrap() = to;
        }
        Ok(())
    }

    fn open(&mut self, request: OpenRequest) -> Result<Opened, NtStatus> {
        if let Some(stream) = request.stream.clone() {
            return self.open_stream(request, *stream);
        }
        let (ino, created) = match (self.find(&request.path), request.mode) {
            (Ok(_), OpenMode::New) => return Err(NtStatus::OBJECT_NAME_COLLISION),
            (Ok(ino), _) => (ino, false),
            (Err(NtStatus::OBJECT_NAME_NOT_FOUND), OpenMode::New | OpenMode::Either) => {
                let parent = self.parent(&request.path)?;
                let directory = request.kind == ObjectKind::Directory;
                if request.checked {
                    self.nodes[&parent].may_add(directory)?;
                }
                let mut node = Node::new(directory);
                node.attributes |= request.attributes & !NORMAL;
                node.reserved = request.allocation_size;
                if let Some(ownership) = request.ownership {
                    let Node { uid, gid, .. } = self.nodes[&parent];
                    node.own(Ownership {
                        uid: ownership.uid.or(Some(uid)),
                        gid: ownership.gid.or(Some(gid)),
                        ..ownership
                    });
                }
                let above = self.nodes[&parent].descriptor.as_ref();
                node.descriptor = Kept::of_new(request.descriptor.as_deref(), above, directory, node.owner());
                let ino = self.next;
                self.next += 1;
                self.nodes.insert(ino, node);
                self.nodes.get_mut(&parent).unwrap().children.insert(request.path.name().to_owned(), ino);
                (ino, true)
            }
            (Err(status), _) => return Err(status),
        };
        let stat = self.stat(ino);
        match request.kind {
            ObjectKind::File if stat.directory => return Err(NtStatus::FILE_IS_A_DIRECTORY),
            ObjectKind::Directory if !stat.directory => return Err(NtStatus::NOT_A_DIRECTORY),
            _ => {}
        }
        let descriptors = self.descriptors(ino, &request.path);
        let path = Mutex::new(request.path);
        let checked = request.checked;
        let handle = Handle { ino, stream: Mutex::default(), path, position: Mutex::default(), checked };
        let handle = Arc::new(handle);
        self.handles.retain(|known| known.strong_count() > 0);
        self.handles.push(Arc::downgrade(&handle));
        Ok(Opened { handle: FsHandle(handle), created, stat, file: None, descriptors })
    }

    fn descriptors(&self, ino: u64, path: &RelPath) -> Option<Box<Descriptors>> {
        let own = self.nodes[&ino].descriptor.clone();
        let parent = self.parent(path).ok().filter(|_| !path.is_root()).map(|parent| &self.nodes[&parent]);
        let directory = parent.and_then(|node| Some((node.descriptor.clone()?, node.owner())));
        (own.is_some() || directory.is_some()).then(|| Box::new(Descriptors { own, directory }))
    }

    /// Whether security descriptors let the opener of `handle` give it the name `to`.
    fn may_be_named(&self, handle: &Handle, to: &RelPath) -> Result<(), NtStatus> {
        if !handle.checked {
            return Ok(());
        }
        self.nodes[&self.parent(to)?].may_add(self.nodes[&handle.ino].directory)?;
        let Ok(there) = self.find(to) else { return Ok(()) };
        match self.descriptors(there, to) {
            Some(descriptors) => descriptors.may_remove(self.nodes[&there].owner()),
            None => Ok(()),
        }
    }

    fn unlink(&mut self, path: &RelPath, ino: u64) -> Result<(), NtStatus> {
        if self.find(path) != Ok(ino) {
            return Ok(());
        }
        if !self.nodes[&ino].children.is_empty() {
            return Err(NtStatus::DIRECTORY_NOT_EMPTY);
        }
        let parent = self.parent(path)?;
        self.nodes.get_mut(&parent).unwrap().children.remove(path.name());
        self.nodes.get_mut(&ino).unwrap().links -= 1;
        Ok(())
    }

    fn name(&mut self, ino: u64, to: &RelPath, replace: bool) -> Result<(), NtStatus> {
        let parent = self.parent(to)?;
        match self.find(to) {
            Ok(_) if !replace => return Err(NtStatus::OBJECT_NAME_COLLISION),
            Ok(there) if there == ino => return Ok(()),
            Ok(there) if self.nodes[&there].directory || self.nodes[&ino].directory => {
                return Err(NtStatus::ACCESS_DENIED);
            }
            Ok(there) => self.nodes.get_mut(&there).unwrap().links -= 1,
            Err(_) => {}
        }
        self.nodes.get_mut(&parent).unwrap().children.insert(to.name().to_owned(), ino);
        Ok(())
    }

    fn execute(&mut self, op: FsOpKind) -> FsResult {
        let handle = |h: &FsHandle| Arc::clone(&h.0).downcast::<Handle>().expect("a handle of this backend");
        let ino = |h: &FsHandle| handle(h).ino;
        Ok(match op {
            FsOpKind::Open { request, .. } => {
                self.log.push("open");
                self.open(request)?.into()
            }
            FsOpKind::Close { handle: h, unlink, stat } => {
                self.log.push(if unlink.is_some() { "close+unlink" } else { "close" });
                let h = handle(&h);
                let last = if stat { self.stat_of(&h)? } else { self.stat(h.ino) };
                if let Some(_token) = unlink {
                    match h.stream.lock().unwrap().take() {
                        Some(name) => {
                            self.nodes.get_mut(&h.ino).unwrap().streams.retain(|(known, _)| *known != name);
                        }
                        None => self.unlink(&h.path.lock().unwrap(), h.ino)?,
                    }
                }
                if stat { FsReply::Stat(last) } else { FsReply::Done }
            }
            FsOpKind::Read { handle: h, offset, length, .. } => {
                self.log.push("read");
                let data = self.data(&handle(&h))?;
                let bytes = part(data, offset, length.into());
                let bytes = (!bytes.is_empty()).then_some(bytes);
                FsReply::Read(Box::new(Data(bytes.ok_or(NtStatus::END_OF_FILE)?.to_vec())))
            }
            FsOpKind::WriteRemote { .. } => return Err(NtStatus::NOT_SUPPORTED),
            FsOpKind::Write { handle: h, offset, frame, range, .. } => {
                self.log.push("write");
                let data = self.data_mut(&handle(&h))?;
                limit(offset, 0)?;
                // As on real file systems, the part that fits is written before the rest fails.
                let place = range.len().min((FILE_BYTES_MAX - offset) as usize);
                let end = offset as usize + place;
                if data.len() < end {
                    data.resize(end, 0);
                }
                data[offset as usize..end].copy_from_slice(&frame.bytes()[range.clone()][..place]);
                limit(offset, range.len() as u64)?;
                FsReply::Written(range.len() as u32)
            }
            FsOpKind::Flush { .. } => {
                self.log.push("flush");
                FsReply::Done
            }
            FsOpKind::Stat { handle: h } => FsReply::Stat(self.stat_of(&handle(&h))?),
            FsOpKind::StatPath { path, .. } => FsReply::Stat(self.stat(self.find(&path)?)),
            FsOpKind::LongPath { path, .. } => FsReply::Path(self.long(&path)),
            FsOpKind::Space { .. } => FsReply::Space(Space {
                total: 1 << 30,
                free: 1 << 29,
                file_nodes: 1000,
                free_file_nodes: 900,
            }),
            FsOpKind::ReadDir { handle: h, restart, limit } => {
                self.log.push("readdir");
                let h = handle(&h);
                let mut position = h.position.lock().unwrap();
                if restart {
                    *position = None;
                }
                let entries: Vec<DirEntry> = self.nodes[&h.ino]
                    .children
                    .iter()
                    .filter(|(name, _)| position.as_ref().is_none_or(|p| *name > p))
                    .take(limit)
                    .map(|(name, ino)| DirEntry { name: name.clone(), stat: self.stat(*ino) })
                    .collect();
                if let Some(last) = entries.last() {
                    *position = Some(last.name.clone());
                }
                FsReply::Entries(entries)
            }
            FsOpKind::Lookup { handle: h, name } => {
                self.log.push("lookup");
                let found = self.nodes[&ino(&h)].children.get(&name).copied();
                FsReply::Entries(
                    found.map(|ino| DirEntry { name, stat: self.stat(ino) }).into_iter().collect(),
                )
            }
            FsOpKind::SetBasic { handle: h, info } => {
                let node = self.nodes.get_mut(&ino(&h)).unwrap();
                let times = &mut node.times;
                times.creation = info.creation.unwrap_or(times.creation);
                times.last_access = info.last_access.unwrap_or(times.last_access);
                times.last_write = info.last_write.unwrap_or(times.last_write);
                // As on real file systems, a client cannot choose this time.
                times.change += 1;
                if let Some(attributes) = info.attributes {
                    node.attributes = attributes & !(NORMAL | DIRECTORY | REPARSE_POINT);
                }
                FsReply::Done
            }
            FsOpKind::SetOwnership { handle: h, ownership } => {
                self.nodes.get_mut(&ino(&h)).unwrap().own(ownership);
                FsReply::Done
            }
            FsOpKind::SetReparsePoint { handle: h, point } => {
                self.nodes.get_mut(&ino(&h)).unwrap().reparse = point;
                FsReply::Done
            }
            FsOpKind::GetReparsePoint { handle: h } => {
                let reparse = &self.nodes[&ino(&h)].reparse;
                let (_, data) = reparse.as_ref().ok_or(NtStatus::NOT_A_REPARSE_POINT)?;
                FsReply::ReparseData(data.clone())
            }
            FsOpKind::GetDescriptor { handle: h } => {
                FsReply::Descriptor(self.nodes[&ino(&h)].descriptor.clone().map(Box::new))
            }
            FsOpKind::SetDescriptor { handle: h, descriptor } => {
                self.nodes.get_mut(&ino(&h)).unwrap().descriptor = descriptor.map(|kept| *kept);
                FsReply::Done
            }
            FsOpKind::GetEas { handle: h } => FsReply::Eas(self.nodes[&ino(&h)].eas.clone()),
            FsOpKind::EaSize { handle: h } => FsReply::EaSize(ea_bytes(&self.nodes[&ino(&h)].eas) as u32),
            FsOpKind::SetEas { handle: h, eas } => {
                self.log.push("set eas");
                let node = self.nodes.get_mut(&ino(&h)).unwrap();
                let mut after = node.eas.clone();
                for ea in eas {
                    if ea.name.starts_with(b"own.") {
                        return Err(NtStatus::ACCESS_DENIED);
                    }
                    after.retain(|old| old.name != ea.name);
                    after.extend((!ea.value.is_empty()).then_some(ea));
                }
                if ea_bytes(&after) > EA_BYTES_MAX {
                    return Err(NtStatus::EA_TOO_LARGE);
                }
                node.eas = after;
                node.times.change += 1;
                FsReply::Done
            }
            FsOpKind::Streams { handle: h } => {
                let streams = self.nodes[&ino(&h)].streams.iter();
                let entry = |(name, data): &(StreamName, Vec<u8>)| StreamEntry {
                    name: name.clone(),
                    size: data.len() as u64,
                    allocation_size: (data.len() as u64).next_multiple_of(8),
                };
                FsReply::Streams(streams.map(entry).collect())
            }
            FsOpKind::Overwrite { handle: h, streams } => {
                self.log.push("truncate");
                let h = handle(&h);
                self.data_mut(&h)?.clear();
                let node = self.nodes.get_mut(&h.ino).unwrap();
                if h.stream.lock().unwrap().is_none() {
                    node.reserved = 0;
                    if streams {
                        node.streams.clear();
                    }
                }
                node.times.change += 1;
                FsReply::Done
            }
            FsOpKind::RenameStream { handle: h, to, replace } => {
                self.rename_stream(&handle(&h), to, replace)?;
                FsReply::Done
            }
            FsOpKind::SetEndOfFile { handle: h, size } => {
                self.log.push("truncate");
                limit(size, 0)?;
                self.data_mut(&handle(&h))?.resize(size as usize, 0);
                let node = self.nodes.get_mut(&ino(&h)).unwrap();
                node.times.change += 1;
                node.reserved = 0;
                FsReply::Done
            }
            FsOpKind::SetAllocation { handle: h, size } => {
                limit(size, 0)?;
                let node = self.nodes.get_mut(&ino(&h)).unwrap();
                node.data.truncate(size as usize);
                node.reserved = size;
                FsReply::Done
            }
            FsOpKind::Rename { handle: h, to, replace } => {
                self.log.push("rename");
                let h = handle(&h);
                let from = h.path.lock().unwrap().clone();
                // Among handles of the file's other names, only this one follows the rename.
                let takes_place = self.find(&to) == Ok(h.ino);
                self.may_be_named(&h, &to)?;
                self.name(h.ino, &to, replace)?;
                let parent = self.parent(&from)?;
                self.nodes.get_mut(&parent).unwrap().children.remove(from.name());
                for other in self.handles.iter().filter_map(Weak::upgrade).filter(|_| !takes_place) {
                    let mut path = other.path.lock().unwrap();
                    if other.ino == h.ino && *path == from {
                        path.clone_from(&to);
                    }
                }
                *h.path.lock().unwrap() = to;
                FsReply::Done
            }
            FsOpKind::Link { handle: h, to, replace } => {
                self.may_be_named(&handle(&h), &to)?;
                let ino = ino(&h);
                self.name(ino, &to, replace)?;
                self.nodes.get_mut(&ino).unwrap().links += 1;
                FsReply::Done
            }
            FsOpKind::CheckEmpty { handle: h } => {
                if self.nodes[&ino(&h)].children.is_empty() {
                    FsReply::Done
                } else {
                    return Err(NtStatus::DIRECTORY_NOT_EMPTY);
                }
            }
            FsOpKind::CopyRange { source, source_offset, target, target_offset, length } => {
                limit(target_offset, 0)?;
                let place = length.min(FILE_BYTES_MAX - target_offset);
                let bytes = part(self.data(&handle(&source))?, source_offset, place).to_vec();
                let to = self.data_mut(&handle(&target))?;
                let end = target_offset as usize + bytes.len();
                if to.len() < end {
                    to.resize(end, 0);
                }
                to[target_offset as usize..end].copy_from_slice(&bytes);
                limit(target_offset, length)?;
                FsReply::Copied(bytes.len() as u64)
            }
            FsOpKind::CloneRange { .. } => {
                self.log.push("clone");
                return Err(NtStatus::NOT_SUPPORTED);
            }
            FsOpKind::ZeroRange { handle: h, offset, length } => {
                let data = &mut self.nodes.get_mut(&ino(&h)).unwrap().data;
                let length = part(data, offset, length).len();
                if length > 0 {
                    data[offset as usize..][..length].fill(0);
                }
                FsReply::Done
            }
            FsOpKind::AllocatedRanges { handle: h, offset, length, .. } => {
                let end = (self.nodes[&ino(&h)].data.len() as u64).min(offset + length);
                let range = (offset < end).then(|| (offset, end - offset));
                FsReply::Ranges(range.into_iter().collect(), false)
            }
        })
    }
}
