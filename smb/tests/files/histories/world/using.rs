//! Operations of programs on open files.

use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::{FileDispositionInformation, FileEndOfFileInformation};
use forebay_smb::wire::{AccessMask, Command, Header, HeaderFlags, Ids, close, read};

use super::{Host, LENGTH, Waits, World};
use crate::calls::{
    EXCLUSIVE, NOW_OR_NEVER, SHARED, UNLOCK, lock_body, read_body, set_file_body, write_body,
};
use crate::histories::model::{Cache, CacheId, Dirty, FileOpen, H, Lock, write_to};
use crate::support::Answer;

impl World {
    /// One of the opens that programs have and that `suits` accepts.
    pub(super) fn any_open(&mut self, file: usize, suits: impl Fn(&FileOpen) -> bool) -> Option<FileOpen> {
        let opens: Vec<FileOpen> =
            self.files[file].opens.iter().filter(|o| !o.kept && suits(o)).cloned().collect();
        self.random.any(&opens)
    }

    pub(super) fn caches_of(&self, host: usize, file: usize) -> Vec<CacheId> {
        self.files[file].caches.iter().filter(|c| c.host == host).map(|c| c.id).collect()
    }

    pub(super) fn read(&mut self, file: usize) {
        let Some(open) = self.any_open(file, FileOpen::reads) else { return };
        let host = open.host;
        let expected = self.files[file].contents.clone();
        if let Some(cache) = self.files[file].cache_of(open.id)
            && cache.may_read()
            && let Some(contents) = &cache.contents
        {
            assert_eq!(contents, &expected, "host {host} reads {file} from its cache");
            self.note(format!("host {host}: reads {file} from its cache: {expected:?}"));
            self.count("reads from caches");
            return;
        }
        if let Some(cache) = open.cache {
            self.write_back(file, cache);
        }
        let whole = self.random.chance(85);
        let (offset, length) =
            if whole { (0, 2 * LENGTH as u64) } else { (self.random.below(LENGTH) as u64, 4) };
        let answer = self.call(host, Command::READ, &read_body(open.id, offset, length as u32, 0));
        self.note(format!("host {host}: reads {offset}+{length} by {:?}: {:?}", open.id, answer.status()));
        let file = &mut self.files[file];
        if !file.may_read(open.id, offset, length) {
            assert_eq!(answer.status(), NtStatus::FILE_LOCK_CONFLICT);
            self.count("READs refused for locks");
            return;
        }
        let from = expected.len().min(offset as usize);
        let expected = &expected[from..expected.len().min((offset + length) as usize)];
        let data = match answer.status() {
            NtStatus::END_OF_FILE => Vec::new(),
            NtStatus::SUCCESS => {
                let response = read::Response::parse(&answer.message).unwrap();
                response.data(&answer.message).unwrap().to_vec()
            }
            status => panic!("{status:?}"),
        };
        assert_eq!(data, expected, "host {host} reads from the server");
        if whole
            && let Some(cache) = open.cache.and_then(|id| file.cache_mut(id))
            && cache.may_read()
        {
            cache.contents = Some(data);
        }
    }

    pub(super) fn write(&mut self, file_at: usize) {
        let Some(open) = self.any_open(file_at, FileOpen::writes) else { return };
        let host = open.host;
        let offset = self.random.below(LENGTH - 8) as u64;
        let length = 1 + self.random.below(8);
        let bytes: Vec<u8> = (0..length).map(|_| 1 + self.random.below(255) as u8).collect();
        let file = &mut self.files[file_at];
        let allowed = file.may_write(open.id, offset, length as u64);
        if allowed
            && let Some(cache) = open.cache.and_then(|id| file.cache_mut(id))
            && cache.may_write()
            && let Some(contents) = &mut cache.contents
        {
            write_to(contents, offset, &bytes);
            cache.dirty.push(Dirty { open: open.id, offset, bytes: bytes.clone() });
            write_to(&mut file.contents, offset, &bytes);
            self.note(format!("host {host}: writes {offset}+{bytes:?} to its cache of {file_at}"));
            self.count("writes to caches");
            return;
        }
        if let Some(cache) = open.cache {
            self.write_back(file_at, cache);
        }
        let answer = self.call(host, Command::WRITE, &write_body(open.id, offset, &bytes));
        self.note(format!("host {host}: writes {offset}+{bytes:?} by {:?}: {:?}", open.id, answer.status()));
        if !allowed {
            assert_eq!(answer.status(), NtStatus::FILE_LOCK_CONFLICT);
            self.count("WRITEs refused for locks");
            return;
        }
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        self.changed(file_at, open.cache, |contents| write_to(contents, offset, &bytes));
    }

    /// The server has new contents, and so has the cache that they came from.
    pub(super) fn changed(&mut self, file: usize, by: Option<CacheId>, change: impl Fn(&mut Vec<u8>)) {
        let file = &mut self.files[file];
        file.outdate(by);
        change(&mut file.contents);
        if let Some(contents) = by.and_then(|id| file.cache_mut(id)).and_then(|c| c.contents.as_mut()) {
            change(contents);
        }
    }

    pub(super) fn truncate(&mut self, file: usize) {
        let Some(open) = self.any_open(file, FileOpen::writes) else { return };
        let host = open.host;
        if let Some(cache) = open.cache {
            self.write_back(file, cache);
        }
        let size = self.random.below(LENGTH);
        let class = FileInformationClass::FILE_END_OF_FILE_INFORMATION;
        let body = set_file_body(open.id, class, |b| {
            FileEndOfFileInformation { end_of_file: size as u64 }.encode(b);
        });
        let answer = self.call(host, Command::SET_INFO, &body);
        self.note(format!("host {host}: truncates {file} to {size}: {:?}", answer.status()));
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        self.changed(file, open.cache, |contents| contents.resize(size, 0));
    }

    /// Writes data that is only in a cache to the server.
    pub(super) fn write_back(&mut self, file: usize, cache: CacheId) {
        let Some(cache) = self.files[file].cache_mut(cache) else { return };
        let host = cache.host;
        for Dirty { open, offset, bytes } in std::mem::take(&mut cache.dirty) {
            let answer = self.call(host, Command::WRITE, &write_body(open, offset, &bytes));
            self.note(format!("host {host}: writes back {offset}+{bytes:?}: {:?}", answer.status()));
            assert_eq!(answer.status(), NtStatus::SUCCESS);
        }
    }

    pub(super) fn lock(&mut self, file: usize) {
        let Some(open) = self.any_open(file, |o| o.reads() || o.writes()) else { return };
        let host = open.host;
        if self.hosts[host].pending.len() >= 3 {
            return;
        }
        if let Some(cache) = open.cache {
            self.write_back(file, cache);
        }
        let (offset, length) = (self.random.below(LENGTH) as u64, 1 + self.random.below(8) as u64);
        let lock = Lock { open: open.id, offset, length, exclusive: self.random.chance(50) };
        let at_once = self.random.chance(50);
        let mut flags = if lock.exclusive { EXCLUSIVE } else { SHARED };
        if at_once {
            flags.insert(NOW_OR_NEVER);
        }
        let answer = self.call(host, Command::LOCK, &lock_body(open.id, &[(offset, length, flags)]));
        self.note(format!("host {host}: asks for {lock:?}, at once {at_once}: {:?}", answer.status()));
        if answer.status() == NtStatus::PENDING {
            assert!(!at_once);
            self.wait(host, file, &answer, Waits::Lock(lock));
        } else if answer.status() == NtStatus::SUCCESS {
            self.locked(file, lock, NtStatus::SUCCESS);
        } else {
            assert!(at_once && !self.files[file].may_lock(&lock));
            assert_eq!(answer.status(), NtStatus::LOCK_NOT_GRANTED);
        }
    }

    pub(super) fn locked(&mut self, file: usize, lock: Lock, status: NtStatus) {
        let file = &mut self.files[file];
        let is_open = file.open(lock.open).is_some();
        assert_eq!(is_open, status == NtStatus::SUCCESS, "{status:?}");
        if is_open {
            assert!(file.may_lock(&lock), "{lock:?} beside {:?}", file.locks);
            file.outdate(file.open(lock.open).and_then(|o| o.cache));
            file.locks.push(lock);
        }
    }

    pub(super) fn unlock(&mut self, file: usize) {
        let Some(lock) = self.random.any(&self.files[file].locks) else { return };
        let host = self.files[file].open(lock.open).expect("no lock outlives its open").host;
        let body = lock_body(lock.open, &[(lock.offset, lock.length, UNLOCK)]);
        let answer = self.call(host, Command::LOCK, &body);
        self.note(format!("host {host}: gives up {lock:?}: {:?}", answer.status()));
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        let locks = &mut self.files[file].locks;
        // An exclusive lock is removed before a shared lock of the same range.
        let same = |l: &Lock| (l.open, l.offset, l.length) == (lock.open, lock.offset, lock.length);
        let at = locks.iter().position(|l| same(l) && l.exclusive).or_else(|| locks.iter().position(same));
        locks.remove(at.expect("it is held"));
    }

    pub(super) fn close(&mut self, file: usize) {
        let Some(open) = self.any_open(file, |_| true) else { return };
        let host = open.host;
        let locked = self.files[file].locks.iter().any(|l| l.open == open.id);
        let keeps = self.files[file].cache_of(open.id).is_some_and(Cache::may_keep_handles);
        if keeps && !locked && self.random.chance(50) {
            let mut opens = self.files[file].opens.iter_mut();
            opens.find(|o| o.id == open.id).expect("it is open").kept = true;
            self.note(format!("host {host}: keeps {:?}", open.id));
            return;
        }
        self.close_for_good(file, open.id);
    }

    pub(super) fn close_for_good(&mut self, file: usize, id: FileId) {
        let Some(open) = self.files[file].open(id).cloned() else { return };
        if let Some(cache) = open.cache {
            self.write_back(file, cache);
        }
        let mut body = Vec::new();
        close::Request { flags: close::Flags::empty(), file_id: id }.encode(&mut body);
        let answer = self.call(open.host, Command::CLOSE, &body);
        self.note(format!("host {}: closes {id:?}: {:?}", open.host, answer.status()));
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        self.files[file].closed(id);
    }

    pub(super) fn delete(&mut self, file: usize) {
        let may = |o: &FileOpen| o.access.contains(AccessMask::DELETE);
        let Some(open) = self.any_open(file, may) else { return };
        let host = open.host;
        if self.files[file].delete_pending || self.hosts[host].pending.len() >= 3 {
            return;
        }
        let class = FileInformationClass::FILE_DISPOSITION_INFORMATION;
        let body = set_file_body(open.id, class, |b| {
            FileDispositionInformation { delete_pending: true }.encode(b);
        });
        let answer = self.ask(host, Command::SET_INFO, &body).map(|answer| answer.status());
        self.note(format!("host {host}: deletes {file} by {:?}: {answer:?}", open.id));
        match answer {
            Err(message_id) => self.wait_unanswered(host, file, message_id, Waits::Delete(open.id)),
            Ok(status) => self.deleted(file, open.id, status),
        }
    }

    pub(super) fn deleted(&mut self, file: usize, open: FileId, status: NtStatus) {
        let file = &mut self.files[file];
        if file.open(open).is_none() {
            assert_ne!(status, NtStatus::SUCCESS, "deleted by an open that has ended");
            return;
        }
        assert_eq!(status, NtStatus::SUCCESS);
        let own = file.open(open).and_then(|o| o.cache);
        let is_lease = |c: &&Cache| matches!(c.id, CacheId::Lease { .. }) && Some(c.id) != own;
        let keeps = file.caches.iter().filter(is_lease).find(|c| c.state.contains(H));
        assert!(keeps.is_none(), "deleted while a client may keep a handle: {keeps:?}");
        file.delete_pending = true;
    }

    pub(super) fn cancel(&mut self, host: usize) {
        let Host { client, pending, .. } = &mut self.hosts[host];
        let Some(waiting) = pending.first_mut() else { return };
        waiting.cancelled = true;
        let by_message =
            Header { session_id: client.session_id, ..Header::request(Command::CANCEL, waiting.message_id) };
        let header = match waiting.async_id {
            None => by_message,
            Some(async_id) => Header {
                ids: Ids::Async { async_id },
                flags: HeaderFlags::ASYNC_COMMAND,
                message_id: 0,
                ..by_message
            },
        };
        let what = format!("host {host}: cancels {:?}", waiting.what);
        let message = client.message(header, &[4, 0, 0, 0]);
        client.send(message).unwrap();
        let arrived: Vec<Answer> = client.answers.drain(..).collect();
        self.hosts[host].inbox.extend(arrived);
        self.note(what);
    }
}
