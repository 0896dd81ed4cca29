//! Changes of a volume's files, the state of the files after each, and the requests that make the changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, CreateOptions};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::fsctl::{DuplicateExtents, FsctlCode};
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{AccessMask, Command as Smb, FileAttributes, ShareAccess, create, ioctl, set_info};

use crate::support::Client;
use crate::support::random::Random;

/// The unit in which extents are shared.
const BLOCK: u64 = 4096;
const BLOCKS_MAX: u64 = 6;
/// The unit that a disk writes atomically.
const SECTOR: usize = 512;
const NAMES: u64 = 6;
/// Directories that exist in the volume from the start; all of them contain names.
pub(crate) const DIRECTORIES: [&str; 2] = ["one", "two"];
/// 1601 to 1970 in units of 100 ns ([MS-DTYP] 2.3.3).
const UNIX_EPOCH: u64 = 116_444_736_000_000_000;
const TICKS_PER_SECOND: u64 = 10_000_000;

/// Contents of a file, derived from one number. Whole blocks, so that they can be cloned.
fn content(number: u64) -> Vec<u8> {
    let mut random = Random(number);
    let length = (1 + random.below(BLOCKS_MAX)) * BLOCK;
    (0..length).map(|_| random.number() as u8).collect()
}

/// A file, independent of its names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct File {
    content: Vec<u8>,
    /// Time of the last write in seconds since 1970, if it was set.
    modified: Option<u64>,
}

impl File {
    fn holding(content: Vec<u8>) -> Self {
        Self { content, modified: None }
    }
}

/// The volume's files (names, and the files that they refer to) and the directories that were created.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files {
    names: BTreeMap<String, u64>,
    files: BTreeMap<u64, File>,
    directories: BTreeSet<String>,
    made: u64,
}

/// One change.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// The file is created or overwritten, written, flushed if requested, and closed.
    Write {
        name: String,
        content: u64,
        flush: bool,
    },
    Rename {
        from: String,
        to: String,
        replace: bool,
    },
    Link {
        from: String,
        to: String,
        replace: bool,
    },
    Unlink {
        name: String,
    },
    /// A new file that shares the extents of another one.
    Clone {
        from: String,
        to: String,
    },
    SetTime {
        name: String,
        seconds: u64,
    },
    /// A different size, smaller or larger; the file is flushed if requested.
    Truncate {
        name: String,
        size: u64,
        flush: bool,
    },
    MakeDirectory {
        name: String,
    },
    RemoveDirectory {
        name: String,
    },
}

/// When a pool guarantees that a change survives a power loss. This determines the changes of a workload and what the test
/// requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Durable {
    /// With the answer to each request: a write-through pool.
    AtReply,
    /// With the answers to FLUSH and renames: every pool.
    AtFlush,
}

/// A name, sometimes in a directory that was created.
fn any_name(random: &mut Random, files: &Files) -> String {
    let made = random.below(4) == 0;
    let directory = match any_directory(random, files) {
        Some(directory) if made => directory,
        _ => DIRECTORIES[random.below(DIRECTORIES.len() as u64) as usize].to_owned(),
    };
    format!("{directory}\\{}", random.below(NAMES))
}

/// One of the directories that were created.
fn any_directory(random: &mut Random, files: &Files) -> Option<String> {
    let nth = random.below((files.directories.len() as u64).max(1));
    files.directories.iter().nth(nth as usize).cloned()
}

impl Change {
    pub(crate) fn choose(random: &mut Random, files: &Files, durable: Durable) -> Self {
        loop {
            let (name, number) = (any_name(random, files), random.number());
            let flush = durable == Durable::AtFlush || random.below(2) == 0;
            let kind = random.below(if durable == Durable::AtReply { 16 } else { 5 });
            match kind {
                0 | 1 => return Self::Write { name, content: number, flush },
                5 => {
                    let directory = DIRECTORIES[(number % DIRECTORIES.len() as u64) as usize];
                    let name = format!("{directory}\\made-{}", number % 5);
                    if !files.directories.contains(&name) {
                        return Self::MakeDirectory { name };
                    }
                    continue;
                }
                6 | 7 => match any_directory(random, files) {
                    Some(name) if files.is_empty(&name) => return Self::RemoveDirectory { name },
                    _ => continue,
                },
                _ => {}
            }
            // All other changes apply to an existing file.
            let nth = number % (files.names.len() as u64).max(1);
            let Some((name, file)) = files.names.iter().nth(nth as usize) else { continue };
            let (name, to) = (name.clone(), any_name(random, files));
            let replace = files.names.contains_key(&to);
            let other = Some(file) != files.names.get(&to);
            let length = files.files[file].content.len() as u64;
            match kind {
                2 | 3 if other => return Self::Rename { from: name, to, replace },
                4 => return Self::Truncate { name, size: random.below(BLOCKS_MAX * BLOCK), flush },
                8 | 9 if other => return Self::Link { from: name, to, replace },
                10 | 11 => return Self::Unlink { name },
                12 | 13 if !replace && length > 0 && length.is_multiple_of(BLOCK) => {
                    return Self::Clone { from: name, to };
                }
                14 => return Self::Truncate { name, size: random.below(length + 1), flush },
                15 => return Self::SetTime { name, seconds: 1_000_000_000 + number % 100_000_000 },
                _ => {}
            }
        }
    }

    /// The kind of the change, for counting.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Write { flush: true, .. } => "flushed write",
            Self::Write { flush: false, .. } => "write",
            Self::Rename { .. } => "rename",
            Self::Link { .. } => "link",
            Self::Unlink { .. } => "unlink",
            Self::Clone { .. } => "clone",
            Self::SetTime { .. } => "time",
            Self::Truncate { .. } => "size",
            Self::MakeDirectory { .. } => "mkdir",
            Self::RemoveDirectory { .. } => "rmdir",
        }
    }

    /// Names that may differ while the change is in progress: the names in the change, and other links of the same files.
    fn touches(&self, files: &Files) -> Vec<String> {
        let named = match self {
            Self::Write { name, .. }
            | Self::Unlink { name }
            | Self::SetTime { name, .. }
            | Self::Truncate { name, .. }
            | Self::MakeDirectory { name }
            | Self::RemoveDirectory { name } => vec![name],
            Self::Rename { from, to, .. } | Self::Link { from, to, .. } => vec![from, to],
            Self::Clone { to, .. } => vec![to],
        };
        let of_files: Vec<_> = named.iter().filter_map(|name| files.names.get(*name)).collect();
        let links = files.names.iter().filter(|(_, file)| of_files.contains(file));
        named.iter().map(|name| (*name).clone()).chain(links.map(|(name, _)| name.clone())).collect()
    }

    /// Whether a file may hold `found` while this change takes it from `before` to `after`, in addition to the contents of
    /// either state.
    fn may_leave(&self, before: Option<&File>, after: &File, found: &[u8], durable: Durable) -> bool {
        let old = before.map_or(&[][..], |file| &file.content);
        let new = &after.content[..];
        match self {
            // The file is overwritten before it is flushed: its contents are undefined.
            Self::Write { .. } if durable == Durable::AtFlush => true,
            // The file is emptied before it is written: every sector is either there or missing, and none holds anything else.
            Self::Write { .. } => {
                let sectors = found.chunks(SECTOR).zip(new.chunks(SECTOR));
                found.len() <= new.len()
                    && sectors
                        .into_iter()
                        .all(|(found, new)| new.starts_with(found) || found.iter().all(|byte| *byte == 0))
            }
            // Extent by extent.
            Self::Clone { .. } => new.starts_with(found) && (found.len() as u64).is_multiple_of(BLOCK),
            // Data beyond the smaller of both sizes can be zero before the size changes.
            Self::Truncate { .. } => {
                let kept = old.len().min(new.len());
                (found.len() == old.len() || found.len() == new.len())
                    && found[..kept] == new[..kept]
                    && found[kept..]
                        .iter()
                        .enumerate()
                        .all(|(at, byte)| *byte == 0 || old.get(kept + at) == Some(byte))
            }
            _ => false,
        }
    }
}

impl Files {
    /// The files after each answer of a change that gives a guarantee, as [`Change::ask`] reports them.
    pub(crate) fn after(&self, change: &Change, durable: Durable) -> Vec<Self> {
        let mut files = self.clone();
        let mut states = Vec::new();
        match change {
            Change::Write { name, content: number, .. } => {
                if durable == Durable::AtReply {
                    files.put(name, Vec::new());
                    states.push(files.clone());
                }
                files.put(name, content(*number));
            }
            Change::Rename { from, to, .. } => {
                let file = files.names.remove(from).expect("it was there");
                files.names.insert(to.clone(), file);
            }
            Change::Link { from, to, .. } => {
                let file = files.names[from];
                files.names.insert(to.clone(), file);
            }
            Change::Unlink { name } => {
                files.names.remove(name);
            }
            Change::Clone { from, to } => {
                let content = files.file(from).content.clone();
                files.put(to, Vec::new());
                states.push(files.clone());
                files.put(to, content);
            }
            Change::SetTime { name, seconds } => files.file_mut(name).modified = Some(*seconds),
            Change::Truncate { name, size, .. } => {
                let file = files.file_mut(name);
                file.content.resize(*size as usize, 0);
                file.modified = None;
            }
            Change::MakeDirectory { name } => {
                files.directories.insert(name.clone());
            }
            Change::RemoveDirectory { name } => {
                files.directories.remove(name);
            }
        }
        states.push(files);
        states
    }

    fn file(&self, name: &str) -> &File {
        &self.files[&self.names[name]]
    }

    fn file_mut(&mut self, name: &str) -> &mut File {
        self.files.get_mut(&self.names[name]).expect("it has a file")
    }

    /// Sets the contents of the file with this name, which is created if it does not exist.
    fn put(&mut self, name: &str, content: Vec<u8>) {
        let number = *self.names.entry(name.to_owned()).or_insert_with(|| {
            self.made += 1;
            self.made
        });
        self.files.insert(number, File::holding(content));
    }

    fn is_empty(&self, directory: &str) -> bool {
        let parent = |name: &str| name.rsplit_once('\\').is_some_and(|(parent, _)| parent == directory);
        !self.names.keys().any(|name| parent(name))
    }

    /// Returns an error if `found` differs from these files, which were acknowledged.
    pub(crate) fn compare(&self, found: &Found) -> Result<(), String> {
        self.all_agree(found, |_| true)
    }

    /// Like [`Self::compare`], while a request of `change` is in progress that results in the files `after`.
    pub(crate) fn compare_under_way(
        &self,
        found: &Found,
        change: &Change,
        after: &Self,
        durable: Durable,
    ) -> Result<(), String> {
        let touched = change.touches(self);
        self.all_agree(found, |name| !touched.contains(name))?;
        let whole = |files: &Self| touched.iter().try_for_each(|name| files.agrees(name, found));
        let partly = || {
            touched.iter().all(|name| match (after.names.get(name), found.names.get(name)) {
                (Some(number), Some(entry)) => {
                    let before = self.names.get(name).map(|number| &self.files[number]);
                    change.may_leave(before, &after.files[number], &entry.content, durable)
                }
                // Not created yet; a file that existed before must not be lost.
                (_, None) => !self.names.contains_key(name),
                (None, Some(_)) => false,
            })
        };
        match whole(self) {
            Ok(()) => Ok(()),
            Err(_) if whole(after).is_ok() || partly() => Ok(()),
            Err(wrong) => Err(format!("{change:?} is half done: {wrong}")),
        }
    }

    fn all_agree(&self, found: &Found, which: impl Fn(&String) -> bool) -> Result<(), String> {
        let names = self.names.keys().chain(&self.directories);
        let mut names = names.chain(found.names.keys()).chain(&found.directories).filter(|name| which(name));
        names.try_for_each(|name| self.agrees(name, found))
    }

    fn agrees(&self, name: &str, found: &Found) -> Result<(), String> {
        match (self.directories.contains(name), found.directories.contains(name)) {
            (false, true) => return Err(format!("directory {name} is there again")),
            (true, false) => return Err(format!("directory {name} is lost")),
            _ => {}
        }
        let expected = self.names.get(name).map(|number| &self.files[number]);
        match (expected, found.names.get(name)) {
            (None, None) => Ok(()),
            (None, Some(_)) => Err(format!("{name} is there again")),
            (Some(_), None) => Err(format!("{name} is lost")),
            (Some(expected), Some(entry)) if entry.content != expected.content => Err(format!(
                "{name} has other contents ({} bytes, not these {})",
                entry.content.len(),
                expected.content.len()
            )),
            (Some(expected), Some(entry)) if expected.modified.is_some_and(|time| time != entry.modified) => {
                Err(format!("{name} was modified at {}, not {:?}", entry.modified, expected.modified))
            }
            _ => Ok(()),
        }
    }
}

struct Entry {
    content: Vec<u8>,
    modified: u64,
}

/// The files and directories that exist.
#[derive(Default)]
pub(crate) struct Found {
    names: BTreeMap<String, Entry>,
    directories: BTreeSet<String>,
}

impl Found {
    /// Reads those of a volume's directory.
    pub(crate) fn read(volume: &Path) -> Self {
        let mut found = Self::default();
        for directory in DIRECTORIES {
            found.add(volume, directory);
        }
        found
    }

    fn add(&mut self, volume: &Path, directory: &str) {
        let path = volume.join(directory.replace('\\', "/"));
        for entry in fs::read_dir(path).expect("a directory that is there") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
            let name = format!("{directory}\\{name}");
            let metadata = path.symlink_metadata().expect("a file");
            if metadata.is_dir() {
                self.add(volume, &name);
                self.directories.insert(name);
            } else {
                let content = fs::read(&path).expect("a file");
                let modified = metadata.mtime().cast_unsigned();
                self.names.insert(name, Entry { content, modified });
            }
        }
    }
}

/// Sends a request that must succeed.
fn done(client: &mut Client, command: Smb, body: &[u8]) {
    let answer = client.call(command, body);
    assert_eq!(answer.status(), NtStatus::SUCCESS, "{command:?}");
}

fn set_open(client: &mut Client, file_id: FileId, class: FileInformationClass, buffer: &[u8]) {
    let mut body = Vec::new();
    set_info::Request {
        info_type: InfoType::FILE,
        file_info_class: class.0,
        additional_information: 0,
        file_id,
        buffer,
    }
    .encode(&mut body);
    done(client, Smb::SET_INFO, &body);
}

/// Sets information that is durable, in one or both kinds of pool, when the request is answered.
fn set(
    client: &mut Client,
    name: &str,
    class: FileInformationClass,
    buffer: &[u8],
    answered: &mut dyn FnMut(),
) {
    let file_id = client.open(name, CreateDisposition::OPEN).expect("it is there");
    set_open(client, file_id, class, buffer);
    answered();
    assert_eq!(client.close(file_id), NtStatus::SUCCESS);
}

/// Removes a file or directory, which happens when its handle is closed.
fn remove(client: &mut Client, name: &str, answered: &mut dyn FnMut()) {
    let file_id = client.open(name, CreateDisposition::OPEN).expect("it is there");
    set_open(client, file_id, FileInformationClass::FILE_DISPOSITION_INFORMATION, &[1]);
    assert_eq!(client.close(file_id), NtStatus::SUCCESS);
    answered();
}

fn make_directory(client: &mut Client, name: &str) -> FileId {
    let mut body = Vec::new();
    create::Request {
        requested_oplock_level: create::OplockLevel::NONE,
        impersonation_level: create::ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: AccessMask::FILE_ALL_ACCESS,
        file_attributes: FileAttributes::DIRECTORY,
        share_access: ShareAccess(7),
        create_disposition: CreateDisposition::CREATE,
        create_options: CreateOptions::DIRECTORY_FILE,
        name: name.to_owned(),
        contexts: Vec::new(),
    }
    .encode(&mut body);
    let answer = client.call(Smb::CREATE, &body);
    assert_eq!(answer.status(), NtStatus::SUCCESS, "{name}");
    create::Response::parse(&answer.message).expect("an answer").file_id
}

/// [MS-FSCC] 2.4.42.2 and 2.4.28.2, which have the same layout.
fn name_information(to: &str, replace: bool) -> Vec<u8> {
    let to: Vec<u8> = to.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let mut buffer = vec![0; 16];
    buffer[0] = replace.into();
    buffer.extend((to.len() as u32).to_le_bytes());
    buffer.extend(to);
    buffer
}

fn clone(client: &mut Client, source: FileId, target: FileId, length: u64) {
    let mut input = Vec::new();
    let extents = DuplicateExtents {
        source_file_id: source,
        source_file_offset: 0,
        target_file_offset: 0,
        byte_count: length,
    };
    extents.encode(&mut input);
    let mut body = Vec::new();
    ioctl::Request {
        ctl_code: FsctlCode::DUPLICATE_EXTENTS_TO_FILE,
        file_id: target,
        input: &input,
        max_input_response: 0,
        output: &[],
        max_output_response: 0,
        flags: ioctl::Flags::IS_FSCTL,
    }
    .encode(&mut body);
    done(client, Smb::IOCTL, &body);
}

impl Change {
    /// Requests the change. Calls `answered` after each answer that gives a guarantee: once for each of [`Files::after`].
    pub(crate) fn ask(
        &self,
        client: &mut Client,
        files: &Files,
        durable: Durable,
        answered: &mut dyn FnMut(),
    ) {
        match self {
            Self::Write { name, content: number, flush } => {
                let file_id = client.open(name, CreateDisposition::OVERWRITE_IF).expect("a file");
                if durable == Durable::AtReply {
                    answered();
                }
                assert_eq!(client.write(file_id, 0, &content(*number)), NtStatus::SUCCESS);
                settled(client, file_id, *flush, durable, answered);
            }
            Self::Rename { from, to, replace } => {
                let buffer = name_information(to, *replace);
                set(client, from, FileInformationClass::FILE_RENAME_INFORMATION, &buffer, answered);
            }
            Self::Link { from, to, replace } => {
                let buffer = name_information(to, *replace);
                set(client, from, FileInformationClass::FILE_LINK_INFORMATION, &buffer, answered);
            }
            Self::Unlink { name } | Self::RemoveDirectory { name } => remove(client, name, answered),
            Self::Clone { from, to } => {
                let length = files.file(from).content.len() as u64;
                let source = client.open(from, CreateDisposition::OPEN).expect("it is there");
                let target = client.open(to, CreateDisposition::CREATE).expect("it is not there");
                answered();
                clone(client, source, target, length);
                answered();
                assert_eq!(client.close(target), NtStatus::SUCCESS);
                assert_eq!(client.close(source), NtStatus::SUCCESS);
            }
            Self::SetTime { name, seconds } => {
                // [MS-FSCC] 2.4.7: only the time of the last write; 0 leaves the others unchanged.
                let mut buffer = vec![0; 40];
                let ticks = seconds * TICKS_PER_SECOND + UNIX_EPOCH;
                buffer[16..24].copy_from_slice(&ticks.to_le_bytes());
                set(client, name, FileInformationClass::FILE_BASIC_INFORMATION, &buffer, answered);
            }
            Self::Truncate { name, size, flush } => {
                let file_id = client.open(name, CreateDisposition::OPEN).expect("it is there");
                // [MS-FSCC] 2.4.14
                let class = FileInformationClass::FILE_END_OF_FILE_INFORMATION;
                set_open(client, file_id, class, &size.to_le_bytes());
                settled(client, file_id, *flush, durable, answered);
            }
            Self::MakeDirectory { name } => {
                let file_id = make_directory(client, name);
                answered();
                assert_eq!(client.close(file_id), NtStatus::SUCCESS);
            }
        }
    }
}

/// Completes a change of contents that was just answered: the FLUSH, if requested, and the CLOSE.
fn settled(client: &mut Client, file_id: FileId, flush: bool, durable: Durable, answered: &mut dyn FnMut()) {
    if durable == Durable::AtReply {
        answered();
    }
    if flush {
        assert_eq!(client.flush(file_id), NtStatus::SUCCESS);
    }
    if durable == Durable::AtFlush {
        answered();
    }
    assert_eq!(client.close(file_id), NtStatus::SUCCESS);
}
