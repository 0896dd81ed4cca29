//! QUERY_DIRECTORY ([MS-SMB2] 3.3.5.18, [MS-FSA] 2.1.5.6.3).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::engine::commands::posix;
use crate::engine::names;
use crate::engine::open::{DirectoryCursor, Open};
use crate::engine::request::step::{Ctx, Reply, Step};
use crate::engine::tally::{Taken, Tally};
use crate::fs::{DirEntry, FileKey, FsOpKind, FsReply, Stat};
use crate::limits;
use crate::short_name;
use crate::status::NtStatus;
use crate::wire::fscc::FileInformationClass;
use crate::wire::fscc::directory::{self, DirEncoder};
use crate::wire::query_directory::{Flags, Request, Response};
use crate::wire::{AccessMask, Fault, FileAttributes, FileTime};

/// The names that every directory has, even if its file system does not list them.
const DOTS: [&str; 2] = [".", ".."];

/// The longest entry: the fixed-length parts, a name of 255 characters, and alignment.
const ENTRY_BYTES_MAX: usize = 1024;

/// A query in progress.
struct Query {
    open: Arc<Open>,
    class: FileInformationClass,
    limit: usize,
    single: bool,
    output: Output,
    /// The share of the volume's limit for the fetch in progress.
    counted: Option<Taken>,
}

/// Encoded entries.
struct Output {
    bytes: Vec<u8>,
    /// The start of the last entry, to link the next one to it.
    last: Option<usize>,
    /// Bytes that it may have: [`limits::DIR_ANSWER_SHORT_BYTES`], plus its share of the volume's limit.
    granted: usize,
    counted: Option<Taken>,
}

pub(crate) fn handle(ctx: &mut Ctx<'_>) -> Step {
    let request = match Request::parse(ctx.request.message()) {
        Ok(r) => r,
        Err(e) if e.fault == Fault::Surrogate => return NtStatus::OBJECT_NAME_INVALID.into(),
        Err(e) => return e.into(),
    };
    match begin(ctx, &request) {
        Ok(query) => fill(query),
        Err(status) => status.into(),
    }
}

/// [MS-SMB2] 3.3.5.18: checks the request, and applies its flags to the cursor.
fn begin(ctx: &mut Ctx<'_>, request: &Request) -> Result<Query, NtStatus> {
    let open = ctx.open(request.file_id)?;
    if !open.directory {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    if !AccessMask(open.access).contains(AccessMask::FILE_LIST_DIRECTORY) {
        return Err(NtStatus::ACCESS_DENIED);
    }
    if open.volume.is_snapshot && open.volume.removed.load(Ordering::Acquire) {
        // Its names are being removed: the remaining ones must not appear as the snapshot's contents.
        return Err(NtStatus::FILE_INVALID);
    }
    let class = request.file_information_class;
    let fixed = DirEncoder::fixed_len(class)
        .filter(|_| ctx.core.has_posix() || class != FileInformationClass::FILE_POSIX_INFORMATION)
        .ok_or(NtStatus::INVALID_INFO_CLASS)?;
    if request.output_buffer_length > ctx.core.io_bytes_max() {
        return Err(NtStatus::INVALID_PARAMETER);
    }
    let limit = request.output_buffer_length as usize;
    if limit < fixed {
        return Err(NtStatus::INFO_LENGTH_MISMATCH);
    }
    let pattern = &request.file_name;
    if pattern.is_empty()
        || pattern.contains('/')
        || pattern.contains('\\') && !open.posix
        || pattern.chars().count() > names::PATTERN_CHARS_MAX
    {
        return Err(NtStatus::OBJECT_NAME_INVALID);
    }
    {
        let cursor = &mut open.state().directory;
        let restart = request.flags.intersects(Flags::RESTART_SCANS | Flags::REOPEN);
        if restart || cursor.pattern.is_none() {
            *cursor = DirectoryCursor {
                pattern: Some(pattern.clone()),
                restart: true,
                ..DirectoryCursor::default()
            };
        }
    }
    let single = request.flags.contains(Flags::RETURN_SINGLE_ENTRY);
    Ok(Query { open, class, limit, single, output: Output::new(), counted: None })
}

/// The next action of a query.
enum Next {
    /// Answer with the entries so far.
    Full,
    /// Answer that there are no entries.
    Nothing(NtStatus),
    Fetch(FsOpKind),
    /// `.` and `..` are due: the directory's own attributes are needed.
    Dots,
}

/// Encodes fetched entries, and fetches more until the client's buffer is full or the directory has no more.
fn fill(mut query: Query) -> Step {
    match query.advance() {
        Next::Full => query.answer_full(),
        Next::Nothing(status) => {
            query.open.state().directory.settle();
            Step::Fail(status)
        }
        Next::Dots => Step::Fs(
            FsOpKind::Stat { handle: query.open.handle.clone() },
            Box::new(move |_, result| match result {
                Ok(FsReply::Stat(stat)) => match query.dots(&stat) {
                    true => fill(query),
                    false => query.answer_full(),
                },
                Ok(_) => Step::Fail(NtStatus::INTERNAL_ERROR),
                Err(status) => Step::Fail(status),
            }),
        ),
        Next::Fetch(op) => Step::Fs(
            op,
            Box::new(move |_, result| {
                match result {
                    Ok(FsReply::Entries(entries)) => query.fetched(entries),
                    // The name was looked up and does not exist.
                    Err(NtStatus::OBJECT_NAME_NOT_FOUND | NtStatus::NO_SUCH_FILE) => {
                        query.fetched(Vec::new())
                    }
                    Ok(_) => return Step::Fail(NtStatus::INTERNAL_ERROR),
                    Err(status) => return Step::Fail(status),
                }
                fill(query)
            }),
        ),
    }
}

impl Query {
    fn advance(&mut self) -> Next {
        let Self { open, class, limit, single, output, counted } = self;
        let cursor = &mut open.state().directory;
        let Some(pattern) = cursor.pattern.clone() else { return Next::Nothing(NtStatus::INTERNAL_ERROR) };
        if cursor.dots_sent < 2 {
            if DOTS.iter().skip(cursor.dots_sent.into()).any(|dot| names::matches(&pattern, dot)) {
                return if output.full(*single) { Next::Full } else { Next::Dots };
            }
            cursor.dots_sent = 2;
        }
        let answers = &open.volume.used.dir_answers;
        let times = &open.volume.change_times;
        while let Some(entry) = cursor.pending.pop() {
            // Only names of the POSIX extensions can contain `\`, the path separator of all other clients.
            let is_nameable = open.posix || !entry.name.contains('\\');
            let is_meant = names::matches(&pattern, &entry.name)
                || !open.posix && short_name::is_of(&pattern, &entry.name);
            if !is_nameable || !is_meant {
                continue;
            }
            let room = output.grow(*limit, answers);
            if output.full(*single) || !output.push(*class, room, &entry.name, &times.apply(entry.stat)) {
                cursor.pending.push(entry);
                return Next::Full;
            }
            cursor.any = true;
        }
        if output.full(*single) || cursor.end && !output.is_empty() {
            return Next::Full;
        }
        if cursor.end {
            return Next::Nothing(if cursor.any { NtStatus::NO_MORE_FILES } else { NtStatus::NO_SUCH_FILE });
        }
        let handle = open.handle.clone();
        // A short name is searched among all names.
        if names::is_plain(&pattern) && (open.posix || !short_name::may_be_made(&pattern)) {
            cursor.end = true;
            return Next::Fetch(FsOpKind::Lookup { handle, name: pattern });
        }
        // Not many more than fit: entries that are kept for the next query become stale.
        let room = output.grow(*limit, answers).saturating_sub(output.bytes.len());
        if !output.is_empty() && room < ENTRY_BYTES_MAX && output.granted < *limit {
            return Next::Full;
        }
        let room = room / (DirEncoder::fixed_len(*class).unwrap_or(1) + 2);
        let limit;
        (limit, *counted) = batch(room, &open.volume.used.listed);
        Next::Fetch(FsOpKind::ReadDir { handle, restart: std::mem::take(&mut cursor.restart), limit })
    }

    /// Adds `.` and `..`. The parent's own attributes are not reported: clients only look at the names. Returns false if
    /// they do not fit.
    fn dots(&mut self, stat: &Stat) -> bool {
        let Self { open, class, limit, single, output, .. } = self;
        let cursor = &mut open.state().directory;
        let Some(pattern) = cursor.pattern.clone() else { return false };
        while let Some(dot) = DOTS.get(usize::from(cursor.dots_sent)) {
            if names::matches(&pattern, dot) {
                let parent = Stat { key: FileKey { dev: stat.key.dev, ino: 0, stream: 0 }, ..*stat };
                let stat = if cursor.dots_sent == 0 { stat } else { &parent };
                if output.full(*single) || !output.push(*class, *limit, dot, stat) {
                    return false;
                }
                cursor.any = true;
            }
            cursor.dots_sent += 1;
        }
        true
    }

    /// [MS-FSA] 2.1.5.6.3 would truncate the first name if even that does not fit; a truncated name is useless to a client.
    fn answer_full(self) -> Step {
        self.open.state().directory.settle();
        let Output { bytes, last, counted, .. } = self.output;
        if last.is_none() {
            return Step::Fail(NtStatus::INFO_LENGTH_MISMATCH);
        }
        let mut body = Vec::with_capacity(8 + bytes.len());
        Response { output_buffer: &bytes }.encode(&mut body);
        Step::Reply(Reply { counted, ..Reply::ok(body) })
    }

    fn fetched(&mut self, entries: Vec<DirEntry>) {
        self.open.state().directory.fetched(entries, self.counted.take());
    }
}

/// The number of entries to fetch if `room` of the shortest fit, and their share of the volume's limit. Entries that are
/// not sent stay in memory until the client queries again, or as long as the directory is open.
fn batch(room: usize, listed: &Tally) -> (usize, Option<Taken>) {
    let limit = room.clamp(1, limits::DIR_BATCH_ENTRIES);
    match listed.take(limit as u64) {
        Some(counted) => (limit, Some(counted)),
        None => (limit.min(limits::DIR_BATCH_SHORT_ENTRIES), None),
    }
}

impl Output {
    fn new() -> Self {
        Self { bytes: Vec::new(), last: None, granted: limits::DIR_ANSWER_SHORT_BYTES, counted: None }
    }

    /// Makes room for one more entry if the volume's limit allows it. Returns the length that the answer may have, at most
    /// `limit`.
    fn grow(&mut self, limit: usize, answers: &Tally) -> usize {
        let is_short = self.granted < limit && self.granted < self.bytes.len() + ENTRY_BYTES_MAX;
        if is_short && let Some(more) = answers.take(limits::DIR_ANSWER_STEP_BYTES as u64) {
            self.granted += limits::DIR_ANSWER_STEP_BYTES;
            match &mut self.counted {
                Some(all) => all.join(more),
                none => *none = Some(more),
            }
            // Do not reserve more than is counted.
            self.bytes.reserve_exact(self.granted - self.bytes.len());
        }
        limit.min(self.granted)
    }

    fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    fn full(&self, single: bool) -> bool {
        single && !self.is_empty()
    }

    /// Returns false if the entry does not fit.
    fn push(&mut self, class: FileInformationClass, limit: usize, name: &str, stat: &Stat) -> bool {
        let end = self.bytes.len();
        let start = end.next_multiple_of(8);
        let Some(room) = limit.checked_sub(start) else { return false };
        self.bytes.resize(start, 0);
        let Some(mut encoder) = DirEncoder::new(class, &mut self.bytes, room) else { return false };
        let tag = posix::reparse_tag(stat);
        let fits = encoder.push(&directory::DirEntry {
            creation_time: FileTime(stat.times.creation),
            last_access_time: FileTime(stat.times.last_access),
            last_write_time: FileTime(stat.times.last_write),
            change_time: FileTime(stat.times.change),
            end_of_file: stat.end_of_file,
            allocation_size: stat.allocation_size,
            file_attributes: FileAttributes(stat.attributes),
            // [MS-FSCC] 2.4.17: EaSize of a reparse point is its tag, if the class has no field for the tag.
            ea_size: if class == FileInformationClass::FILE_ID_EXTD_DIRECTORY_INFORMATION {
                0
            } else {
                tag.0
            },
            reparse_tag: tag,
            file_id: stat.key.ino.into(),
            posix: posix::fields(stat),
            short_name: match class {
                FileInformationClass::FILE_BOTH_DIRECTORY_INFORMATION
                | FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION => short_name::listed(name),
                _ => "".into(),
            },
            name: name.into(),
            ..directory::DirEntry::default()
        });
        if !fits {
            self.bytes.truncate(end);
            return false;
        }
        if let Some(last) = self.last.replace(start) {
            let next = (start - last) as u32;
            self.bytes[last..last + 4].copy_from_slice(&next.to_le_bytes());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::FileTimes;

    fn entry(name: &str) -> DirEntry {
        let times = FileTimes::default();
        let key = FileKey { dev: 1, ino: 1, stream: 0 };
        let stat = Stat {
            key,
            times,
            end_of_file: 0,
            allocation_size: 0,
            attributes: 0,
            links: 1,
            directory: false,
            reparse: None,
            mode: 0,
            uid: 0,
            gid: 0,
        };
        DirEntry { name: name.into(), stat }
    }

    #[test]
    fn buffered_entries_are_counted_and_fetches_shrink_at_the_limit() {
        let listed = Tally::new(600);
        let (limit, counted) = batch(10_000, &listed);
        assert_eq!(limit, limits::DIR_BATCH_ENTRIES);
        let mut cursor = DirectoryCursor::default();
        cursor.fetched((0..512).map(|n| entry(&n.to_string())).collect(), counted);
        let (limit, uncounted) = batch(10_000, &listed);
        assert!(uncounted.is_none());
        assert_eq!(limit, limits::DIR_BATCH_SHORT_ENTRIES);
        assert_eq!(batch(0, &listed).0, 1, "at least one");
        // A response takes 500 of them.
        cursor.pending.truncate(12);
        cursor.settle();
        assert_eq!(batch(512, &listed).0, 512);
        cursor.pending.clear();
        cursor.settle();
        assert!(listed.take(600).is_some(), "all are released");
    }

    /// An output filled with as many entries of long names as fit.
    fn filled(limit: usize, answers: &Tally) -> Output {
        let class = FileInformationClass::FILE_ID_BOTH_DIRECTORY_INFORMATION;
        let long = entry(&"n".repeat(255));
        let mut output = Output::new();
        while {
            let room = output.grow(limit, answers);
            output.push(class, room, &long.name, &long.stat)
        } {}
        assert!(!output.is_empty() && output.bytes.len() > limit.min(output.granted) - ENTRY_BYTES_MAX);
        output
    }

    #[test]
    fn responses_are_counted_as_they_grow_and_shrink_at_the_limit() {
        let answers = Tally::new(3 * limits::DIR_ANSWER_STEP_BYTES as u64);
        let all = |answers: &Tally| answers.take(3 * limits::DIR_ANSWER_STEP_BYTES as u64).is_some();
        assert!(filled(2048, &answers).counted.is_none() && all(&answers));
        let first = filled(100_000, &answers);
        assert_eq!(first.granted, limits::DIR_ANSWER_SHORT_BYTES + 2 * limits::DIR_ANSWER_STEP_BYTES);
        assert!(first.bytes.capacity() <= first.granted, "no more than was counted");
        let second = filled(limits::IO_BYTES_MAX as usize, &answers);
        assert_eq!(second.granted, limits::DIR_ANSWER_SHORT_BYTES + limits::DIR_ANSWER_STEP_BYTES);
        assert_eq!(filled(100_000, &answers).granted, limits::DIR_ANSWER_SHORT_BYTES);
        drop((first, second));
        assert!(all(&answers));
    }

    #[test]
    fn closing_a_directory_releases_its_unread_entries() {
        let listed = Tally::new(512);
        let mut cursor = DirectoryCursor::default();
        cursor.fetched(vec![entry("a")], batch(512, &listed).1);
        assert!(listed.take(1).is_none());
        drop(cursor);
        assert!(listed.take(512).is_some());
    }
}
