//! Programs that open files, and what they are granted.

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateAction, CreateDisposition, OplockLevel};
use forebay_smb::wire::create_context::{
    Lease, LeaseFlags, LeaseState, LeaseV2, RequestContext, ResponseContext,
};
use forebay_smb::wire::{AccessMask, Command, ShareAccess};

use super::{Ask, READ_WRITE, Waits, Wish, World, of_level};
use crate::calls::{Open, file};
use crate::histories::model::{Cache, CacheId, FileOpen, NONE, R, RH, RW, RWH, W, is_stat_only};
use crate::support::Answer;

impl World {
    pub(super) fn key(&mut self, file: usize) -> u8 {
        1 + file as u8 * 2 + u8::from(self.random.chance(15))
    }

    pub(super) fn wish(&mut self, file: usize) -> Wish {
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
                // A lease keeps its version.
                Ask::Lease {
                    key,
                    state: self.random.pick(&[R, RH, RW, RWH, RWH, RWH]),
                    version_2: key.is_multiple_of(2),
                }
            }
        };
        Wish { access, share, disposition, ask }
    }

    pub(super) fn open(&mut self, host: usize, file: usize) {
        if self.hosts[host].pending.len() >= 3 {
            return;
        }
        let wish = self.wish(file);
        // A kept handle serves again.
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
        // The client writes back its own cached data before this open.
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

    pub(super) fn create_body(&self, file_at: usize, wish: &Wish) -> Vec<u8> {
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

    pub(super) fn opened(&mut self, host: usize, file_at: usize, wish: &Wish, answer: &Answer) {
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
                    // A client knows its own kept handles and closes them first.
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
            // This client's own cached data is discarded; others are notified.
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
    pub(super) fn granted(
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
                // A request without conflicts is granted.
                if wish.ask != Ask::Nothing && file.locks.is_empty() && others().next().is_none() {
                    let stat = matches!(wish.ask, Ask::Oplock(_)) && is_stat_only(wish.access);
                    assert!(stat || state == asked, "granted {state:?} of {asked:?} to a sole opener");
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
}
