//! Changes of a volume's files, how the files are after each, and the requests that ask for them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::fsctl::{DuplicateExtents, FsctlCode};
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{Command as Smb, ioctl, set_info};

use crate::support::Client;
use crate::support::random::Random;

/// What extents are shared in.
const BLOCK: u64 = 4096;
const BLOCKS_MAX: u64 = 6;
const NAMES: u64 = 10;
/// Directories of the volume; names are in all of them.
pub(crate) const DIRECTORIES: [&str; 2] = ["one", "two"];
/// 1601 to 1970 in units of 100 ns ([MS-DTYP] 2.3.3).
const UNIX_EPOCH: u64 = 116_444_736_000_000_000;
const TICKS_PER_SECOND: u64 = 10_000_000;

/// Bytes of a file, made from one number. Whole blocks, so that they can be cloned.
fn content(number: u64) -> Vec<u8> {
    let mut random = Random(number);
    let length = (1 + random.below(BLOCKS_MAX)) * BLOCK;
    (0..length).map(|_| random.number() as u8).collect()
}

/// A file, whichever names it has.
#[derive(Clone, Debug, PartialEq, Eq)]
struct File {
    content: u64,
    /// Time of the last write in seconds since 1970, where it was set.
    modified: Option<u64>,
}

/// The volume's files: names, and the files that they name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Files {
    names: BTreeMap<String, u64>,
    files: BTreeMap<u64, File>,
    made: u64,
}

/// One change.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// Made or overwritten, written, flushed and closed.
    Write {
        name: String,
        content: u64,
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
}

/// What changes a workload may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kinds {
    /// All: a pool that is written through keeps each when it is acknowledged.
    All,
    /// Flushed files and renames, which every pool keeps.
    FlushedAndRenamed,
}

fn any_name(random: &mut Random) -> String {
    let directory = DIRECTORIES[random.below(DIRECTORIES.len() as u64) as usize];
    format!("{directory}\\{}", random.below(NAMES))
}

impl Change {
    pub(crate) fn choose(random: &mut Random, files: &Files, kinds: Kinds) -> Self {
        loop {
            let (name, number) = (any_name(random), random.number());
            let exists = files.names.contains_key(&name);
            let kind = random.below(if kinds == Kinds::All { 10 } else { 4 });
            if kind < 2 {
                return Self::Write { name, content: number };
            }
            if !exists {
                continue;
            }
            let to = any_name(random);
            let replace = files.names.contains_key(&to);
            let other = files.names.get(&name) != files.names.get(&to);
            match kind {
                2 | 3 if other => return Self::Rename { from: name, to, replace },
                4 | 5 if other => return Self::Link { from: name, to, replace },
                6 | 7 => return Self::Unlink { name },
                8 if !replace => return Self::Clone { from: name, to },
                9 => return Self::SetTime { name, seconds: 1_000_000_000 + number % 100_000_000 },
                _ => {}
            }
        }
    }

    /// Names that may look different while the change is under way: those it names, and other links of the same files.
    fn touches(&self, files: &Files) -> Vec<String> {
        let named = match self {
            Self::Write { name, .. } | Self::Unlink { name } | Self::SetTime { name, .. } => vec![name],
            Self::Rename { from, to, .. } | Self::Link { from, to, .. } => vec![from, to],
            Self::Clone { to, .. } => vec![to],
        };
        let of_files: Vec<_> = named.iter().filter_map(|name| files.names.get(*name)).collect();
        let links = files.names.iter().filter(|(_, file)| of_files.contains(file));
        named.iter().map(|name| (*name).clone()).chain(links.map(|(name, _)| name.clone())).collect()
    }
}

impl Files {
    /// The files after a change.
    pub(crate) fn after(&self, change: &Change) -> Self {
        let mut files = self.clone();
        match change {
            Change::Write { name, content } => {
                let file = File { content: *content, modified: None };
                if let Some(number) = files.names.get(name) {
                    files.files.insert(*number, file);
                } else {
                    files.add(name, file);
                }
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
                let content = files.files[&files.names[from]].content;
                files.add(to, File { content, modified: None });
            }
            Change::SetTime { name, seconds } => {
                let number = files.names[name];
                files.files.get_mut(&number).expect("it has a file").modified = Some(*seconds);
            }
        }
        files
    }

    fn add(&mut self, name: &str, file: File) {
        self.made += 1;
        self.files.insert(self.made, file);
        self.names.insert(name.to_owned(), self.made);
    }

    /// What is wrong with `found` where these are the files that were acknowledged and `under_way` was asked for since.
    pub(crate) fn compare(&self, found: &Found, under_way: Option<&Change>) -> Result<(), String> {
        let touched = under_way.map(|change| change.touches(self)).unwrap_or_default();
        let untouched = |name: &String| !touched.contains(name);
        for name in self.names.keys().chain(found.names.keys()).filter(|name| untouched(name)) {
            self.agrees(name, found)?;
        }
        let Some(change) = under_way else { return Ok(()) };
        let whole = |files: &Self| touched.iter().try_for_each(|name| files.agrees(name, found));
        let either = || whole(self).or_else(|before| whole(&self.after(change)).map_err(|_| before));
        let partial = match change {
            // The file's contents are open until the flush is answered; another link is not lost for it.
            Change::Write { name, .. } => {
                touched.iter().all(|link| link == name || found.names.contains_key(link))
            }
            // Made first, then filled.
            Change::Clone { to, .. } => found.names.get(to).is_some_and(|entry| entry.content.is_empty()),
            _ => false,
        };
        if partial { Ok(()) } else { either().map_err(|wrong| format!("{change:?} is half done: {wrong}")) }
    }

    fn agrees(&self, name: &str, found: &Found) -> Result<(), String> {
        let expected = self.names.get(name).map(|number| &self.files[number]);
        match (expected, found.names.get(name)) {
            (None, None) => Ok(()),
            (None, Some(_)) => Err(format!("{name} is there again")),
            (Some(_), None) => Err(format!("{name} is lost")),
            (Some(expected), Some(entry)) if entry.content != content(expected.content) => {
                Err(format!("{name} has other contents ({} bytes)", entry.content.len()))
            }
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

/// The files that are there.
pub(crate) struct Found {
    names: BTreeMap<String, Entry>,
}

impl Found {
    /// Those of a volume's directory.
    pub(crate) fn read(volume: &Path) -> Self {
        let mut names = BTreeMap::new();
        for directory in DIRECTORIES {
            for entry in
                fs::read_dir(volume.join(directory)).expect("a directory that is there from the start")
            {
                let path = entry.expect("an entry").path();
                let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
                let content = fs::read(&path).expect("a file");
                let modified = path.metadata().expect("a file").mtime().cast_unsigned();
                names.insert(format!("{directory}\\{name}"), Entry { content, modified });
            }
        }
        Self { names }
    }
}

/// Sends a request that has to succeed.
fn done(client: &mut Client, command: Smb, body: &[u8]) {
    let answer = client.call(command, body);
    assert_eq!(answer.status(), NtStatus::SUCCESS, "{command:?}");
}

fn set(client: &mut Client, name: &str, class: FileInformationClass, buffer: &[u8]) {
    let file_id = client.open(name, CreateDisposition::OPEN).expect("it is there");
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
    assert_eq!(client.close(file_id), NtStatus::SUCCESS);
}

/// [MS-FSCC] 2.4.42.2 and 2.4.28.2, which are alike.
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
    /// Asks for it; returns when it was acknowledged.
    pub(crate) fn ask(&self, client: &mut Client, files: &Files) {
        match self {
            Self::Write { name, content: number } => {
                let file_id = client.open(name, CreateDisposition::OVERWRITE_IF).expect("a file");
                assert_eq!(client.write(file_id, 0, &content(*number)), NtStatus::SUCCESS);
                assert_eq!(client.flush(file_id), NtStatus::SUCCESS);
                assert_eq!(client.close(file_id), NtStatus::SUCCESS);
            }
            Self::Rename { from, to, replace } => {
                let buffer = name_information(to, *replace);
                set(client, from, FileInformationClass::FILE_RENAME_INFORMATION, &buffer);
            }
            Self::Link { from, to, replace } => {
                let buffer = name_information(to, *replace);
                set(client, from, FileInformationClass::FILE_LINK_INFORMATION, &buffer);
            }
            Self::Unlink { name } => {
                set(client, name, FileInformationClass::FILE_DISPOSITION_INFORMATION, &[1]);
            }
            Self::Clone { from, to } => {
                let length = content(files.files[&files.names[from]].content).len() as u64;
                let source = client.open(from, CreateDisposition::OPEN).expect("it is there");
                let target = client.open(to, CreateDisposition::CREATE).expect("it is not there");
                clone(client, source, target, length);
                assert_eq!(client.close(target), NtStatus::SUCCESS);
                assert_eq!(client.close(source), NtStatus::SUCCESS);
            }
            Self::SetTime { name, seconds } => {
                // [MS-FSCC] 2.4.7: of the times only that of the last write; 0 leaves the others.
                let mut buffer = vec![0; 40];
                let ticks = seconds * TICKS_PER_SECOND + UNIX_EPOCH;
                buffer[16..24].copy_from_slice(&ticks.to_le_bytes());
                set(client, name, FileInformationClass::FILE_BASIC_INFORMATION, &buffer);
            }
        }
    }
}
