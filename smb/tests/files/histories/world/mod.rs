//! Clients, files and the server, and the events that can happen to them.

mod breaks;
mod fate;
mod opening;
mod using;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forebay_smb::engine::{ConnectionId, Mail};
use forebay_smb::ids::FileId;
use forebay_smb::limits::OPLOCK_BREAK_SECONDS_MAX;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{CreateDisposition, OplockLevel};
use forebay_smb::wire::create_context::LeaseState;
use forebay_smb::wire::oplock_break::Notification;
use forebay_smb::wire::{AccessMask, Command, ShareAccess};

use super::model::{CacheId, FileModel, Lock, NONE, R, RW, RWH, W};
use super::random::Random;
use crate::calls::Lab;
use crate::support::{Answer, Client, start};

const HOSTS: usize = 3;
const FILES: usize = 2;
/// The maximum length of a file.
const LENGTH: usize = 24;
const READ_WRITE: AccessMask = AccessMask::FILE_READ_DATA.union(AccessMask::FILE_WRITE_DATA);

struct Host {
    client: Client,
    pending: Vec<Pending>,
    /// Messages that the client has not processed yet.
    inbox: Vec<Answer>,
}

/// A request that waits.
#[derive(Clone, Debug)]
struct Pending {
    message_id: u64,
    /// The AsyncId of its interim response, if it has one.
    async_id: Option<u64>,
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
    /// Undelivered messages between the server's connections.
    mail: Vec<(ConnectionId, Mail)>,
    story: Story,
}

/// The events so far, printed on failure.
struct Story {
    seed: u64,
    events: Vec<String>,
    counts: Counts,
}

/// How often each event happened, by its name.
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

    /// Runs the history. Returns how often each event happened.
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

    /// Sends a request and returns its first answer. Other messages are processed later.
    fn call(&mut self, host: usize, command: Command, body: &[u8]) -> Answer {
        self.ask(host, command, body).expect("an answer")
    }

    /// Like [`Self::call`]; returns the MessageId if the request waits without an interim response.
    fn ask(&mut self, host: usize, command: Command, body: &[u8]) -> Result<Answer, u64> {
        let Host { client, inbox, .. } = &mut self.hosts[host];
        let header = client.header(command, 1);
        let message_id = header.message_id;
        let message = client.message(header, body);
        client.send(message).unwrap();
        inbox.extend(client.answers.drain(..));
        let at = inbox.iter().position(|a| a.header.message_id == message_id).ok_or(message_id)?;
        Ok(inbox.remove(at))
    }

    /// Delivers all outstanding messages, then checks the invariants at rest.
    fn settle(&mut self) {
        loop {
            while let Some(host) = self.hosts.iter().position(|h| !h.inbox.is_empty()) {
                let answer = self.hosts[host].inbox.remove(0);
                self.arrived(host, &answer);
            }
            self.mail.extend(self.lab.server.take_mail());
            let Some((to, _)) = self.mail.first() else { break };
            // The server notifies a client of a break before it answers later requests. On a network the two can cross: with a
            // lease of version 2 the epoch shows this; with others the client then assumes fewer caching rights than it has.
            let is_break =
                |(receiver, what): &&(ConnectionId, Mail)| receiver == to && matches!(what, Mail::Break(_));
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
        let async_id = Some(answer.header.async_id().expect("an interim response"));
        let message_id = answer.header.message_id;
        self.hosts[host].pending.push(Pending { message_id, async_id, file, what, cancelled: false });
    }

    /// The same without an interim response.
    fn wait_unanswered(&mut self, host: usize, file: usize, message_id: u64, what: Waits) {
        self.note(format!("host {host}: waits, without a word"));
        let pending = Pending { message_id, async_id: None, file, what, cancelled: false };
        self.hosts[host].pending.push(pending);
    }

    /// Checks the invariants when no message is outstanding.
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
            assert!(outdated.is_none(), "may still use data that others changed: {outdated:?}");
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

    /// All clients answer and close: then nothing remains.
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
