//! Clients, files and the server, and what can happen to them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forebay_smb::engine::{ConnectionId, Mail};
use forebay_smb::ids::FileId;
use forebay_smb::limits::OPLOCK_BREAK_SECONDS_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateAction, CreateDisposition, OplockLevel};
use forebay_smb::wire::create_context::{
    Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::fscc::file_info::{FileDispositionInformation, FileEndOfFileInformation};
use forebay_smb::wire::oplock_break::{LeaseBreakAcknowledgment, Notification, OplockBreak, Request};
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{AccessMask, Command, Header, HeaderFlags, Ids, ShareAccess, close, read, set_info};

use super::model::{
    Cache, CacheId, Dirty, FileModel, FileOpen, H, Lock, NONE, R, RH, RW, RWH, W, is_stat_only, write_to,
};
use super::random::Random;
use crate::calls::{
    EXCLUSIVE, Lab, NOW_OR_NEVER, Open, SHARED, UNLOCK, file, lock_body, read_body, write_body,
};
use crate::support::{Answer, Client, start};

const HOSTS: usize = 3;
const FILES: usize = 2;
/// Files are no longer than this.
const LENGTH: usize = 24;
const READ_WRITE: AccessMask = AccessMask::FILE_READ_DATA.union(AccessMask::FILE_WRITE_DATA);

struct Host {
    client: Client,
    pending: Vec<Pending>,
    /// Messages that are still to be looked at.
    inbox: Vec<Answer>,
}

/// A request that waits.
#[derive(Clone, Debug)]
struct Pending {
    message_id: u64,
    async_id: u64,
    file: usize,
    what: Waits,
    cancelled: bool,
}

#[derive(Clone, Debug)]
enum Waits {
    Create(Wish),
    Lock(Lock),
    Delete(FileId),
}

/// How a program opens a file.
#[derive(Clone, Debug)]
struct Wish {
    access: AccessMask,
    share: ShareAccess,
    disposition: CreateDisposition,
    ask: Ask,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ask {
    Nothing,
    Oplock(OplockLevel),
    Lease { key: u8, state: LeaseState, version_2: bool },
}

impl Ask {
    /// The lease that it names.
    fn cache(self, host: usize) -> Option<CacheId> {
        match self {
            Self::Lease { key, .. } => Some(CacheId::Lease { host, key }),
            _ => None,
        }
    }
}

impl Wish {
    fn overwrites(&self) -> bool {
        self.disposition == CreateDisposition::OVERWRITE_IF
    }
}

pub struct World {
    lab: Lab,
    hosts: Vec<Host>,
    files: Vec<FileModel>,
    random: Random,
    now: Instant,
    /// What the server's connections have for each other.
    mail: Vec<(ConnectionId, Mail)>,
    story: Story,
}

/// What has happened, printed if it ends badly.
struct Story {
    seed: u64,
    events: Vec<String>,
    counts: Counts,
}

/// How often something happened, by its name.
pub type Counts = BTreeMap<&'static str, u64>;

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("history {}:\n  {}", self.seed, self.events.join("\n  "));
        }
    }
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut lab = Lab::caching();
        let hosts = (0..HOSTS)
            .map(|host| Host {
                client: lab.client_of(host as u8 + 1),
                pending: Vec::new(),
                inbox: Vec::new(),
            })
            .collect();
        Self {
            lab,
            hosts,
            files: (0..FILES).map(|n| FileModel::new(&format!("file{n}"))).collect(),
            random: Random::new(seed),
            now: start(),
            mail: Vec::new(),
            story: Story { seed, events: Vec::new(), counts: Counts::new() },
        }
    }

    /// What happened in it, how often.
    pub fn run(mut self, steps: usize) -> Counts {
        for _ in 0..steps {
            self.step();
        }
        self.end();
        std::mem::take(&mut self.story.counts)
    }

    fn count(&mut self, what: &'static str) {
        *self.story.counts.entry(what).or_default() += 1;
    }

    fn note(&mut self, event: String) {
        self.story.events.push(event);
    }

    fn step(&mut self) {
        let host = self.random.below(HOSTS);
        let file = usize::from(self.random.chance(20));
        match self.random.below(100) {
            0..16 => self.open(host, file),
            16..38 => self.read(file),
            38..60 => self.write(file),
            60..63 => self.truncate(file),
            63..69 => self.lock(file),
            69..72 => self.unlock(file),
            72..82 => self.close(file),
            82..92 => self.answer_a_break(),
            92..94 => self.delete(file),
            94..96 => self.cancel(host),
            96..99 => {
                let seconds = self.random.pick(&[1, 5, 20, OPLOCK_BREAK_SECONDS_MAX]);
                self.pass(Duration::from_secs(seconds));
            }
            _ => self.lose(host),
        }
        self.settle();
    }

    // Messages

    /// Sends a request; its first answer. Whatever comes with it is looked at later.
    fn call(&mut self, host: usize, command: Command, body: &[u8]) -> Answer {
        let Host { client, inbox, .. } = &mut self.hosts[host];
        let header = client.header(command, 1);
        let message_id = header.message_id;
        let message = client.message(header, body);
        client.send(message).unwrap();
        inbox.extend(client.answers.drain(..));
        let at = inbox.iter().position(|a| a.header.message_id == message_id).expect("an answer");
        inbox.remove(at)
    }

    /// Hands over everything that is under way, then checks what should hold at rest.
    fn settle(&mut self) {
        loop {
            while let Some(host) = self.hosts.iter().position(|h| !h.inbox.is_empty()) {
                let answer = self.hosts[host].inbox.remove(0);
                self.arrived(host, &answer);
            }
            self.mail.extend(self.lab.server.take_mail());
            let Some((to, _)) = self.mail.first() else { break };
            // A client is notified of a break before it is answered what came after. On a network the two can cross: of a
            // lease of version 2 the epoch says so, of others the client then believes that it may cache less than it may.
            let is_break =
                |(to_whom, what): &&(ConnectionId, Mail)| to_whom == to && matches!(what, Mail::Break(_));
            let at = self.mail.iter().position(|mail| is_break(&mail)).unwrap_or(0);
            let (to, what) = self.mail.remove(at);
            let Some(Host { client, inbox, .. }) = self.hosts.iter_mut().find(|h| h.client.id == to.0) else {
                continue;
            };
            client.connection.deliver(client.now, what).unwrap();
            client.run().unwrap();
            inbox.extend(client.answers.drain(..));
        }
        self.check();
    }

    fn arrived(&mut self, host: usize, answer: &Answer) {
        if answer.header.command == Command::OPLOCK_BREAK && answer.header.message_id == u64::MAX {
            match Notification::parse(&answer.message).unwrap() {
                Notification::Lease(notification) => self.lease_broken(host, &notification),
                Notification::Oplock(notification) => self.oplock_broken(host, &notification),
            }
            return;
        }
        let pending = &mut self.hosts[host].pending;
        let at = pending.iter().position(|p| p.message_id == answer.header.message_id);
        let done = pending.remove(at.expect("the answer to a request that waits"));
        self.note(format!("host {host}: after a wait {:?}: {:?}", done.what, answer.status()));
        if answer.status() == NtStatus::CANCELLED {
            assert!(done.cancelled, "no CANCEL was sent");
            self.count("requests cancelled");
            return;
        }
        match done.what {
            Waits::Create(wish) => {
                self.count("CREATEs after a wait");
                self.opened(host, done.file, &wish, answer);
            }
            Waits::Lock(lock) => {
                self.count("LOCKs after a wait");
                self.locked(done.file, lock, answer.status());
            }
            Waits::Delete(open) => {
                self.count("deletions after a wait");
                self.deleted(done.file, open, answer.status());
            }
        }
    }

    fn wait(&mut self, host: usize, file: usize, answer: &Answer, what: Waits) {
        self.note(format!("host {host}: waits"));
        let async_id = answer.header.async_id().expect("an interim response");
        let message_id = answer.header.message_id;
        self.hosts[host].pending.push(Pending { message_id, async_id, file, what, cancelled: false });
    }

    /// What should hold when nothing is under way.
    fn check(&self) {
        for pending in self.hosts.iter().flat_map(|h| &h.pending) {
            let file = &self.files[pending.file];
            let justified = match &pending.what {
                Waits::Create(_) | Waits::Delete(_) => file.is_breaking(),
                Waits::Lock(lock) => !file.may_lock(lock),
            };
            assert!(justified, "waits for nothing: {pending:?}");
        }
        for file in &self.files {
            let outdated = file.caches.iter().find(|c| c.outdated && c.breaking.is_none());
            assert!(outdated.is_none(), "may go on to use what others have changed: {outdated:?}");
            for cache in file.caches.iter().filter(|c| c.state.contains(W)) {
                let mut others = file.opens.iter().filter(|o| o.cache != Some(cache.id));
                let other = others.find(|o| !o.is_stat_only());
                assert!(other.is_none(), "{cache:?} may be written to, beside {other:?}");
            }
            if file.exists {
                let dirty = file.caches.iter().any(|c| !c.dirty.is_empty());
                let stored = self.lab.memory.contents(&file.name);
                assert!(dirty || stored.as_ref() == Some(&file.contents), "{}: {stored:?}", file.name);
            }
        }
    }

    // What programs do

    fn key(&mut self, file: usize) -> u8 {
        1 + file as u8 * 2 + u8::from(self.random.chance(15))
    }

    fn wish(&mut self, file: usize) -> Wish {
        let access = if self.random.chance(60) {
            READ_WRITE
        } else {
            self.random.pick(&[
                READ_WRITE | AccessMask::DELETE,
                AccessMask::FILE_READ_DATA,
                AccessMask::FILE_WRITE_DATA,
                AccessMask::DELETE,
                AccessMask::FILE_READ_ATTRIBUTES,
            ])
        };
        let share = if self.random.chance(85) { 7 } else { self.random.pick(&[3, 1, 0]) };
        let share = ShareAccess(share);
        let mut disposition = if self.random.chance(70) {
            CreateDisposition::OPEN_IF
        } else {
            self.random.pick(&[CreateDisposition::OPEN, CreateDisposition::OVERWRITE_IF])
        };
        if !access.contains(AccessMask::FILE_WRITE_DATA) && disposition == CreateDisposition::OVERWRITE_IF {
            disposition = CreateDisposition::OPEN_IF;
        }
        let ask = match self.random.below(10) {
            0 => Ask::Nothing,
            1..4 => {
                Ask::Oplock(self.random.pick(&[OplockLevel::II, OplockLevel::EXCLUSIVE, OplockLevel::BATCH]))
            }
            _ => {
                let key = self.key(file);
                // A lease has one version.
                Ask::Lease {
                    key,
                    state: self.random.pick(&[R, RH, RW, RWH, RWH, RWH]),
                    version_2: key.is_multiple_of(2),
                }
            }
        };
        Wish { access, share, disposition, ask }
    }

    fn open(&mut self, host: usize, file: usize) {
        if self.hosts[host].pending.len() >= 3 {
            return;
        }
        let wish = self.wish(file);
        // A handle that was kept serves again.
        let serves =
            |o: &&mut FileOpen| o.kept && o.host == host && (o.access, o.share) == (wish.access, wish.share);
        if !wish.overwrites()
            && let Some(kept) = self.files[file].opens.iter_mut().find(serves)
        {
            kept.kept = false;
            let id = kept.id;
            self.note(format!("host {host}: opens {file} again: {id:?}"));
            self.count("opens by a handle that was kept");
            return;
        }
        // What it has written itself comes before what it opens for now.
        for id in self.caches_of(host, file) {
            self.write_back(file, id);
        }
        self.note(format!("host {host}: opens {file}: {wish:?}"));
        let body = self.create_body(file, &wish);
        let answer = self.call(host, Command::CREATE, &body);
        match answer.status() {
            NtStatus::PENDING => self.wait(host, file, &answer, Waits::Create(wish)),
            _ => self.opened(host, file, &wish, &answer),
        }
    }

    fn create_body(&self, file_at: usize, wish: &Wish) -> Vec<u8> {
        let open: Open<'_> = file(&self.files[file_at].name)
            .access(wish.access)
            .share(wish.share)
            .disposition(wish.disposition);
        let (open, level) = match wish.ask {
            Ask::Nothing => (open, OplockLevel::NONE),
            Ask::Oplock(level) => (open, level),
            Ask::Lease { key, state, version_2 } => {
                let lease = Lease {
                    lease_key: [key; 16],
                    lease_state: state,
                    lease_flags: LeaseFlags::empty(),
                    v2: version_2.then_some(LeaseV2 { parent_lease_key: [0; 16], epoch: 100 }),
                };
                (open.context(RequestContext::Lease(lease)), OplockLevel::LEASE)
            }
        };
        let mut body = open.body();
        body[3] = level.0;
        body
    }

    fn opened(&mut self, host: usize, file_at: usize, wish: &Wish, answer: &Answer) {
        let file = &mut self.files[file_at];
        let in_the_way = file.in_the_way(wish.access, wish.share);
        let status = answer.status();
        if status != NtStatus::SUCCESS {
            match status {
                NtStatus::DELETE_PENDING => assert!(file.delete_pending),
                NtStatus::OBJECT_NAME_NOT_FOUND => {
                    assert!(!file.exists && wish.disposition == CreateDisposition::OPEN);
                }
                NtStatus::SHARING_VIOLATION => {
                    assert!(!in_the_way.is_empty(), "nothing is in the way");
                    // A client knows of its own, and closes them first.
                    let own = wish.ask.cache(host);
                    let of_others = in_the_way.iter().filter(|o| o.kept && o.cache != own);
                    let kept = of_others
                        .filter_map(|o| o.cache.and_then(|id| file.cache(id)))
                        .find(|c| c.may_keep_handles());
                    assert!(
                        kept.is_none(),
                        "refused for a handle that is kept for the cache alone: {kept:?}"
                    );
                }
                _ => panic!("{status:?}"),
            }
            self.note(format!("host {host}: {status:?}"));
            self.count("CREATEs refused");
            return;
        }
        assert!(in_the_way.is_empty(), "opened beside {in_the_way:?}");
        assert!(!file.delete_pending, "it is being deleted");
        let response = create::Response::parse(&answer.message).unwrap();
        let action = match (file.exists, wish.disposition) {
            (false, CreateDisposition::OPEN) => panic!("opened where there is nothing"),
            (false, _) => CreateAction::CREATED,
            (true, CreateDisposition::OVERWRITE_IF) => CreateAction::OVERWRITTEN,
            (true, _) => CreateAction::OPENED,
        };
        assert_eq!(response.create_action, action);
        file.exists = true;
        let own = wish.ask.cache(host);
        if wish.overwrites() {
            file.outdate(own);
            file.contents.clear();
            // What this client itself had in its cache is gone; others are notified.
            for cache in file.caches.iter_mut().filter(|c| c.host == host) {
                cache.contents = None;
                cache.dirty.clear();
            }
        }
        if file.caches.iter().all(|c| c.dirty.is_empty()) {
            assert_eq!(response.end_of_file, file.contents.len() as u64, "EndOfFile");
        }
        let id = response.file_id;
        let cache = self.granted(host, file_at, wish, &response);
        self.note(format!("host {host}: has {id:?} of {file_at}, {cache:?}"));
    }

    /// Adds an open and what it may cache.
    fn granted(
        &mut self,
        host: usize,
        file_at: usize,
        wish: &Wish,
        response: &create::Response<'_>,
    ) -> Option<(CacheId, LeaseState)> {
        let file = &mut self.files[file_at];
        let (id, level) = (response.file_id, response.oplock_level);
        let lease = response.contexts.iter().find_map(|context| match context {
            ResponseContext::Lease(lease) => Some(*lease),
            _ => None,
        });
        let (cache, asked, state) = match wish.ask {
            Ask::Nothing => {
                assert_eq!((level, lease), (OplockLevel::NONE, None));
                (None, NONE, NONE)
            }
            Ask::Oplock(asked) => {
                assert_eq!(lease, None);
                let state = of_level(level);
                ((state != NONE).then_some(CacheId::Oplock(id)), of_level(asked), state)
            }
            Ask::Lease { key, state, .. } => {
                assert_eq!(level, OplockLevel::LEASE);
                let lease = lease.expect("a lease");
                assert_eq!(lease.lease_key, [key; 16]);
                (Some(CacheId::Lease { host, key }), state, lease.lease_state)
            }
        };
        let held = cache.and_then(|id| file.cache(id)).map(|c| (c.state, c.breaking));
        match held {
            None => {
                assert!(asked.contains(state), "granted {state:?}, asked for {asked:?}");
                assert!(state == NONE || state.contains(R), "{state:?} is no state");
                let others = || file.opens.iter();
                // A request that conflicts with no other is granted.
                if wish.ask != Ask::Nothing && file.locks.is_empty() && others().next().is_none() {
                    let stat = matches!(wish.ask, Ask::Oplock(_)) && is_stat_only(wish.access);
                    assert!(stat || state == asked, "granted {state:?} of {asked:?} to one that is alone");
                }
                if matches!(wish.ask, Ask::Lease { .. })
                    && file.locks.is_empty()
                    && !file.caches.iter().any(|c| matches!(c.id, CacheId::Oplock(_)) || c.state.contains(W))
                {
                    assert!(state.contains(asked & RH), "granted {state:?} of {asked:?} beside leases");
                }
                if let Some(id) = cache {
                    let epoch = lease.and_then(|l| l.v2).map(|v2| v2.epoch);
                    file.caches.push(Cache::new(id, host, state, epoch));
                }
            }
            Some((before, breaking)) => {
                let lease = lease.expect("of a lease");
                let flagged = lease.lease_flags.contains(LeaseFlags::BREAK_IN_PROGRESS);
                let held = file.caches.iter_mut().find(|c| Some(c.id) == cache).expect("it is held");
                assert_eq!(flagged, breaking.is_some(), "BREAK_IN_PROGRESS");
                if state != before {
                    let upgrade = breaking.is_none() && asked.contains(before) && state == asked;
                    assert!(upgrade, "{before:?} became {state:?}");
                    held.state = state;
                }
                held.epoch = lease.v2.map(|v2| v2.epoch);
            }
        }
        let (access, share) = (wish.access, wish.share);
        file.opens.push(FileOpen { id, host, access, share, cache, kept: false });
        cache.map(|id| (id, state))
    }

    /// One of the opens that programs have and that `suits`.
    fn any_open(&mut self, file: usize, suits: impl Fn(&FileOpen) -> bool) -> Option<FileOpen> {
        let opens: Vec<FileOpen> =
            self.files[file].opens.iter().filter(|o| !o.kept && suits(o)).cloned().collect();
        self.random.any(&opens)
    }

    fn caches_of(&self, host: usize, file: usize) -> Vec<CacheId> {
        self.files[file].caches.iter().filter(|c| c.host == host).map(|c| c.id).collect()
    }

    fn read(&mut self, file: usize) {
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

    fn write(&mut self, file_at: usize) {
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

    /// The server has new contents, and so has the cache that it came from.
    fn changed(&mut self, file: usize, by: Option<CacheId>, change: impl Fn(&mut Vec<u8>)) {
        let file = &mut self.files[file];
        file.outdate(by);
        change(&mut file.contents);
        if let Some(contents) = by.and_then(|id| file.cache_mut(id)).and_then(|c| c.contents.as_mut()) {
            change(contents);
        }
    }

    fn truncate(&mut self, file: usize) {
        let Some(open) = self.any_open(file, FileOpen::writes) else { return };
        let host = open.host;
        if let Some(cache) = open.cache {
            self.write_back(file, cache);
        }
        let size = self.random.below(LENGTH);
        let answer = self.set_info(host, open.id, FileInformationClass::FILE_END_OF_FILE_INFORMATION, |b| {
            FileEndOfFileInformation { end_of_file: size as u64 }.encode(b);
        });
        self.note(format!("host {host}: truncates {file} to {size}: {:?}", answer.status()));
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        self.changed(file, open.cache, |contents| contents.resize(size, 0));
    }

    fn set_info(
        &mut self,
        host: usize,
        file_id: FileId,
        class: FileInformationClass,
        encode: impl FnOnce(&mut Vec<u8>),
    ) -> Answer {
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
        self.call(host, Command::SET_INFO, &body)
    }

    /// Writes to the server what is only in a cache.
    fn write_back(&mut self, file: usize, cache: CacheId) {
        let Some(cache) = self.files[file].cache_mut(cache) else { return };
        let host = cache.host;
        for Dirty { open, offset, bytes } in std::mem::take(&mut cache.dirty) {
            let answer = self.call(host, Command::WRITE, &write_body(open, offset, &bytes));
            self.note(format!("host {host}: writes back {offset}+{bytes:?}: {:?}", answer.status()));
            assert_eq!(answer.status(), NtStatus::SUCCESS);
        }
    }

    fn lock(&mut self, file: usize) {
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

    fn locked(&mut self, file: usize, lock: Lock, status: NtStatus) {
        let file = &mut self.files[file];
        let is_open = file.open(lock.open).is_some();
        assert_eq!(is_open, status == NtStatus::SUCCESS, "{status:?}");
        if is_open {
            assert!(file.may_lock(&lock), "{lock:?} beside {:?}", file.locks);
            file.outdate(file.open(lock.open).and_then(|o| o.cache));
            file.locks.push(lock);
        }
    }

    fn unlock(&mut self, file: usize) {
        let Some(lock) = self.random.any(&self.files[file].locks) else { return };
        let host = self.files[file].open(lock.open).expect("no lock outlives its open").host;
        let body = lock_body(lock.open, &[(lock.offset, lock.length, UNLOCK)]);
        let answer = self.call(host, Command::LOCK, &body);
        self.note(format!("host {host}: gives up {lock:?}: {:?}", answer.status()));
        assert_eq!(answer.status(), NtStatus::SUCCESS);
        let locks = &mut self.files[file].locks;
        // An exclusive one goes before a shared one of the same range.
        let same = |l: &Lock| (l.open, l.offset, l.length) == (lock.open, lock.offset, lock.length);
        let at = locks.iter().position(|l| same(l) && l.exclusive).or_else(|| locks.iter().position(same));
        locks.remove(at.expect("it is held"));
    }

    fn close(&mut self, file: usize) {
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

    fn close_for_good(&mut self, file: usize, id: FileId) {
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

    fn delete(&mut self, file: usize) {
        let may = |o: &FileOpen| o.access.contains(AccessMask::DELETE);
        let Some(open) = self.any_open(file, may) else { return };
        let host = open.host;
        if self.files[file].delete_pending || self.hosts[host].pending.len() >= 3 {
            return;
        }
        let class = FileInformationClass::FILE_DISPOSITION_INFORMATION;
        let answer = self.set_info(host, open.id, class, |b| {
            FileDispositionInformation { delete_pending: true }.encode(b);
        });
        self.note(format!("host {host}: deletes {file} by {:?}: {:?}", open.id, answer.status()));
        match answer.status() {
            NtStatus::PENDING => self.wait(host, file, &answer, Waits::Delete(open.id)),
            status => self.deleted(file, open.id, status),
        }
    }

    fn deleted(&mut self, file: usize, open: FileId, status: NtStatus) {
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

    fn cancel(&mut self, host: usize) {
        let Host { client, pending, .. } = &mut self.hosts[host];
        let Some(waiting) = pending.first_mut() else { return };
        waiting.cancelled = true;
        let header = Header {
            session_id: client.session_id,
            ids: Ids::Async { async_id: waiting.async_id },
            flags: HeaderFlags::ASYNC_COMMAND,
            ..Header::request(Command::CANCEL, 0)
        };
        let what = format!("host {host}: cancels {:?}", waiting.what);
        let message = client.message(header, &[4, 0, 0, 0]);
        client.send(message).unwrap();
        let arrived: Vec<Answer> = client.answers.drain(..).collect();
        self.hosts[host].inbox.extend(arrived);
        self.note(what);
    }

    // What the server asks for

    fn lease_broken(
        &mut self,
        host: usize,
        notification: &forebay_smb::wire::oplock_break::LeaseBreakNotification,
    ) {
        let id = CacheId::Lease { host, key: notification.lease_key[0] };
        let (from, to) = (notification.current_lease_state, notification.new_lease_state);
        self.note(format!("host {host}: {id:?} is broken, {from:?} to {to:?}"));
        let cache = self.files.iter_mut().find_map(|f| f.cache_mut(id)).expect("a lease that is held");
        assert_eq!(cache.state, from, "what it is broken from");
        assert!(cache.breaking.is_none(), "one break at a time");
        assert!(from.contains(to) && from != to, "a break takes something away");
        assert_eq!(notification.flags.0 != 0, from.intersects(W | H), "ACK_REQUIRED");
        match &mut cache.epoch {
            Some(epoch) => {
                assert!(notification.new_epoch >= *epoch, "epochs do not go back");
                *epoch = notification.new_epoch;
            }
            None => assert_eq!(notification.new_epoch, 0),
        }
        if notification.flags.0 == 0 {
            cache.become_state(to);
        } else {
            (cache.breaking, cache.seen) = (Some(to), None);
        }
        if !to.contains(R) {
            assert!(cache.dirty.is_empty() || from.contains(W));
            cache.contents = None;
        }
    }

    fn oplock_broken(&mut self, host: usize, notification: &OplockBreak) {
        let id = CacheId::Oplock(notification.file_id);
        let to = of_level(notification.oplock_level);
        self.note(format!("host {host}: {id:?} is broken to {to:?}"));
        let file = self.files.iter_mut().find(|f| f.cache(id).is_some()).expect("an oplock that is held");
        let cache = file.cache_mut(id).expect("it is held");
        assert_eq!(cache.host, host);
        assert!(cache.breaking.is_none(), "one break at a time");
        assert!(cache.state.contains(to) && cache.state != to, "a break takes something away");
        assert!(!to.contains(W), "{to:?}");
        if cache.state.contains(W) {
            (cache.breaking, cache.seen) = (Some(to), None);
            if !to.contains(R) {
                cache.contents = None;
            }
        } else {
            file.caches.retain(|c| c.id != id);
        }
    }

    fn breaking(&self) -> Vec<(usize, CacheId)> {
        let of = |at: usize| {
            self.files[at].caches.iter().filter(|c| c.breaking.is_some()).map(move |c| (at, c.id))
        };
        (0..FILES).flat_map(of).collect()
    }

    fn answer_a_break(&mut self) {
        if let Some((file, id)) = self.random.any(&self.breaking()) {
            self.answer_break(file, id);
        }
    }

    /// Does what a break asks for, and acknowledges it.
    fn answer_break(&mut self, file: usize, id: CacheId) {
        let cache = self.files[file].cache(id).expect("it is held");
        let (host, to) = (cache.host, cache.breaking.expect("a break"));
        let lower = match id {
            CacheId::Lease { .. } => self.random.pick(&[to, to, to, to & RH, to & R, NONE]),
            CacheId::Oplock(_) => self.random.pick(&[to, to, to, NONE]),
        };
        self.write_back(file, id);
        if !lower.contains(H) {
            let kept = |o: &&FileOpen| o.kept && o.cache == Some(id);
            let kept: Vec<FileId> = self.files[file].opens.iter().filter(kept).map(|o| o.id).collect();
            for open in kept {
                self.close_for_good(file, open);
                self.settle();
            }
        }
        let Some(cache) = self.files[file].cache_mut(id) else { return };
        if cache.breaking != Some(to) {
            return;
        }
        let status = self.acknowledge(host, id, lower);
        self.note(format!("host {host}: acknowledges {id:?} with {lower:?}: {status:?}"));
        self.count("breaks acknowledged");
        assert_eq!(status, NtStatus::SUCCESS);
        let file = &mut self.files[file];
        let cache = file.cache_mut(id).expect("it is held");
        cache.become_state(lower);
        if let (CacheId::Oplock(_), true) = (id, lower == NONE) {
            file.caches.retain(|c| c.id != id);
        }
    }

    fn acknowledge(&mut self, host: usize, id: CacheId, state: LeaseState) -> NtStatus {
        let request = match id {
            CacheId::Lease { key, .. } => {
                Request::Lease(LeaseBreakAcknowledgment { lease_key: [key; 16], lease_state: state })
            }
            CacheId::Oplock(file_id) => {
                let oplock_level = if state.contains(R) { OplockLevel::II } else { OplockLevel::NONE };
                Request::Oplock(OplockBreak { oplock_level, file_id })
            }
        };
        let mut body = Vec::new();
        request.encode(&mut body);
        self.call(host, Command::OPLOCK_BREAK, &body).status()
    }

    // What happens to clients

    /// Time passes. A client that has not answered a break in time loses what it held.
    fn pass(&mut self, time: Duration) {
        self.note(format!("{time:?} pass"));
        // The server's clock ticks before and after.
        for time in [Duration::ZERO, time] {
            self.now += time;
            self.lab.server.tick(self.now);
            for (file, id) in self.breaking() {
                let now = self.now;
                let cache = self.files[file].cache_mut(id).expect("it is held");
                let since = *cache.seen.get_or_insert(now);
                if now - since >= Duration::from_secs(OPLOCK_BREAK_SECONDS_MAX) {
                    self.expire(file, id);
                }
            }
            self.settle();
        }
    }

    fn expire(&mut self, file_at: usize, id: CacheId) {
        self.note(format!("{id:?} expires"));
        self.count("breaks without an answer");
        let file = &mut self.files[file_at];
        let stored = self.lab.memory.contents(&file.name).expect("it is open");
        let cache = file.cache_mut(id).expect("it is held");
        let host = cache.host;
        let lost = !std::mem::take(&mut cache.dirty).is_empty();
        cache.become_state(NONE);
        if lost {
            file.contents = stored;
        }
        let late = match id {
            CacheId::Lease { .. } => NtStatus::UNSUCCESSFUL,
            CacheId::Oplock(_) => NtStatus::INVALID_OPLOCK_PROTOCOL,
        };
        if late == NtStatus::INVALID_OPLOCK_PROTOCOL {
            file.caches.retain(|c| c.id != id);
        }
        assert_eq!(self.acknowledge(host, id, NONE), late, "too late");
    }

    /// A client loses its connection, and all that it had; it comes back at once.
    fn lose(&mut self, host: usize) {
        self.note(format!("host {host}: is gone"));
        self.hosts[host].client.disconnect();
        for file in &mut self.files {
            if file.caches.iter().any(|c| c.host == host && !c.dirty.is_empty()) {
                file.contents = self.lab.memory.contents(&file.name).unwrap_or_default();
            }
            let own: Vec<FileId> = file.opens.iter().filter(|o| o.host == host).map(|o| o.id).collect();
            for open in own {
                file.closed(open);
            }
        }
        let client = self.lab.client_of(host as u8 + 1);
        self.hosts[host] = Host { client, pending: Vec::new(), inbox: Vec::new() };
    }

    /// Everyone answers and closes: then nothing is left.
    fn end(&mut self) {
        self.note("the end".to_owned());
        for _ in 0..100 {
            if let Some((file, id)) = self.breaking().first().copied() {
                self.answer_break(file, id);
            } else if let Some((file, id)) =
                (0..FILES).find_map(|at| self.files[at].opens.first().map(|o| (at, o.id)))
            {
                self.close_for_good(file, id);
            }
            self.settle();
        }
        let waiting: Vec<&Pending> = self.hosts.iter().flat_map(|h| &h.pending).collect();
        assert!(waiting.is_empty(), "still waiting: {waiting:?}");
        assert!(self.files.iter().all(|f| f.opens.is_empty()));
        let open_files: u64 = self.lab.server.volume_uses().iter().map(|v| v.open_files).sum();
        assert_eq!(open_files, 0, "open files of the server");
        for file in 0..FILES {
            for ask in [
                Ask::Oplock(OplockLevel::BATCH),
                Ask::Lease { key: 1 + file as u8 * 2, state: RWH, version_2: false },
            ] {
                let disposition = CreateDisposition::OPEN_IF;
                let wish = Wish { access: READ_WRITE, share: ShareAccess(0), disposition, ask };
                let body = self.create_body(file, &wish);
                let answer = self.call(0, Command::CREATE, &body);
                self.opened(0, file, &wish, &answer);
                let id = self.files[file].opens[0].id;
                self.close_for_good(file, id);
                self.settle();
            }
        }
    }
}

fn of_level(level: OplockLevel) -> LeaseState {
    match level {
        OplockLevel::NONE => NONE,
        OplockLevel::II => R,
        OplockLevel::EXCLUSIVE => RW,
        OplockLevel::BATCH => RWH,
        other => panic!("{other:?}"),
    }
}
