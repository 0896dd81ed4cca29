//! Guarantees of a table of files, in every order of the threads that share it.

use std::sync::Arc;

use super::*;
use crate::engine::config::{Encryption, ServerConfig};
use crate::engine::file::leases::LeaseId;
use crate::engine::file::links::Disposition;
use crate::engine::file::opener::{Opener, RequestedCaching};
use crate::engine::file::pins::{Move, PathPin};
use crate::engine::mail::{ConnectionId, Waiter};
use crate::engine::open::{NewOpen, Open};
use crate::engine::open_end;
use crate::engine::server::Server;
use crate::engine::volume::{Protection, Volume, VolumeConfig};
use crate::sync::model::{check, spawn};
use crate::wire::create_context::{Lease, LeaseFlags, LeaseState};
use crate::wire::{AccessMask, ShareAccess};

const KEY: FileKey = FileKey { dev: 1, ino: 1, stream: 0 };
const ALL: ShareAccess = ShareAccess(7);
const ALONE: ShareAccess = ShareAccess::empty();
const READ: AccessMask = AccessMask::FILE_READ_DATA;
const WRITE: AccessMask = AccessMask::FILE_WRITE_DATA;
const NO_STATUS: NtStatus = NtStatus::SUCCESS;

fn path(name: &str) -> RelPath {
    RelPath::new(name).expect("a path")
}

fn waiter(connection: u64) -> Waiter {
    Waiter { connection: ConnectionId(connection), token: connection }
}

/// A server with one volume.
#[derive(Clone)]
pub(in crate::engine) struct World {
    pub(in crate::engine) server: Arc<Server>,
    pub(in crate::engine) volume: Arc<Volume>,
}

/// Parameters of an open.
#[derive(Clone)]
pub(in crate::engine) struct How {
    pub(in crate::engine) key: FileKey,
    pub(in crate::engine) name: &'static str,
    pub(in crate::engine) access: AccessMask,
    pub(in crate::engine) share: ShareAccess,
    pub(in crate::engine) ask: RequestedCaching,
    pub(in crate::engine) client: u64,
    pub(in crate::engine) directory: bool,
}

pub(in crate::engine) const PLAIN: How = How {
    key: KEY,
    name: "f",
    access: READ,
    share: ALL,
    ask: RequestedCaching::Nothing,
    client: 1,
    directory: false,
};

fn lease(client: u64, lease_state: LeaseState) -> RequestedCaching {
    let lease =
        Lease { lease_key: [client as u8; 16], lease_state, lease_flags: LeaseFlags::empty(), v2: None };
    RequestedCaching::Lease { client: [client as u8; 16], lease }
}

fn lease_id(client: u64) -> LeaseId {
    LeaseId { client: [client as u8; 16], key: [client as u8; 16] }
}

impl World {
    pub(in crate::engine) fn new() -> Self {
        let server = Server::new(ServerConfig {
            guid: [0; 16],
            server_name: "MODEL".to_owned(),
            started: 0,
            min_dialect: crate::wire::Dialect::SMB3_1_1,
            target_names: Vec::new(),
            ntlm: true,
            kerberos: None,
            signing_required: false,
            encryption: Encryption::Off,
            instance: 0,
            predecessors: Vec::new(),
            io_bytes_max: 65_536,
            caching: true,
            directory_leases: true,
        });
        let config = VolumeConfig {
            id: "vol".to_owned(),
            backend: FsHandle(Arc::new(())),
            accounts: Vec::new(),
            protection: Protection::Optional,
            read_only: false,
            extended_attributes: true,
            shared_extents: false,
            serial: 0,
            created: 0,
        };
        server.add_volume(config).expect("no accounts to contradict");
        let volume = server.volume("vol").expect("just added");
        Self { server, volume }
    }

    fn make(&self, how: &How, entered: Entered) -> Open {
        let new = NewOpen {
            id: self.server.file_ids.next(),
            session_id: how.client,
            tree_id: 1,
            volume: Arc::clone(&self.volume),
            handle: FsHandle(Arc::new(())),
            file_handle: None,
            stream: None,
            directory: how.directory,
            access: how.access.0,
            options: 0,
            posix: false,
            channel_sequence: 0,
            replayable: None,
            parent_lease_key: None,
            path: path(how.name),
        };
        Open::new(new, entered)
    }

    fn entrant<'a>(&'a self, how: &How, pin: &'a PathPin) -> Entrant<'a> {
        let opener = Opener {
            access: how.access,
            overwrites: false,
            deletes: false,
            existed: true,
            first: true,
            ask: how.ask,
        };
        Entrant {
            key: how.key,
            pin: pin.pinned(),
            directory: how.directory,
            end_of_file: u64::MAX,
            made_file: !opener.existed,
            caches: true,
            access: how.access,
            share: how.share,
            opener,
            waiter: waiter(how.client),
            leases: &self.volume.leases,
        }
    }

    fn enter_pinned(&self, how: &How, pin: &PathPin) -> Result<Entry<Open>, NtStatus> {
        let entrant = self.entrant(how, pin);
        self.volume.files().enter(&entrant, &self.server, |entered| self.make(how, entered))
    }

    fn enter(&self, how: &How) -> Result<Entry<Open>, NtStatus> {
        // There are no renames in these models, but removals.
        let pin = PathPin::new(&self.volume.files, &path(how.name), waiter(how.client));
        self.enter_pinned(how, &pin.ok_or(NtStatus::RETRY)?)
    }

    /// Returns the open, or the reason why there is none.
    pub(in crate::engine) fn open(&self, how: &How) -> Result<Arc<Open>, NtStatus> {
        match self.enter(how)? {
            Entry::Open(open) => Ok(open),
            Entry::Wait(_) => Err(NtStatus::PENDING),
            Entry::Displaces(_) => Err(NO_STATUS),
            Entry::NameGone => Err(NtStatus::RETRY),
        }
    }

    fn close(&self, open: &Open) -> LinkFate {
        open_end::begin(open, &self.server.creations, &self.server)
    }

    fn is_woken(&self, client: u64) -> bool {
        let woken = |(to, what): &(ConnectionId, Mail)| {
            *to == ConnectionId(client) && matches!(what, Mail::Wake(token) if *token == client)
        };
        self.server.take_mail().iter().any(woken)
    }

    /// Opens as before [`FileTable::enter`] existed: looks up the state under one lock and enters it under another.
    fn open_in_two_steps(&self, how: &How) -> Result<Arc<Open>, NtStatus> {
        let file = {
            let mut files = self.volume.files();
            let file = files.files.entry(how.key).or_insert_with(|| Arc::new(FileState::new(how.key)));
            Arc::clone(file)
        };
        let pin =
            PathPin::new(&self.volume.files, &path(how.name), waiter(how.client)).expect("no renames here");
        let entrant = self.entrant(how, &pin);
        let _files = self.volume.files();
        match file.admit(&entrant, &self.server, || self.make(how, Entered(Arc::clone(&file))))? {
            Entry::Open(open) => Ok(open),
            _ => Err(NtStatus::PENDING),
        }
    }
}

/// Closes the last open of a file while another client opens it exclusively; then a third client opens it.
fn race_last_close_with_open(open: fn(&World, &How) -> Result<Arc<Open>, NtStatus>) {
    check(move || {
        let world = World::new();
        let stat_only = AccessMask::FILE_READ_ATTRIBUTES;
        let first = world.open(&How { access: stat_only, ..PLAIN }).expect("the first");
        let closer = spawn({
            let world = world.clone();
            move || assert!(matches!(world.close(&first), LinkFate::Stays))
        });
        let opener = spawn({
            let world = world.clone();
            move || open(&world, &How { access: WRITE, share: ALONE, client: 2, ..PLAIN })
        });
        closer.join().expect("closed");
        let second = opener.join().expect("asked").expect("the first tolerates it");
        let third = world.open(&How { client: 3, ..PLAIN });
        assert_eq!(third.err(), Some(NtStatus::SHARING_VIOLATION), "the second has it alone");
        let known = world.volume.files().find(KEY).expect("it is open");
        assert!(Arc::ptr_eq(&known, &second.file));
        assert!(matches!(world.close(&second), LinkFate::Stays));
        assert!(world.volume.files().files.is_empty());
    });
}

#[test]
fn a_file_has_one_state_if_an_open_races_with_the_last_close() {
    race_last_close_with_open(World::open);
}

#[test]
fn the_model_detects_the_race_of_a_two_step_open() {
    let found = std::panic::catch_unwind(|| race_last_close_with_open(World::open_in_two_steps));
    let why = found.expect_err("the checker must find the race");
    let why = why.downcast_ref::<String>().expect("the message of an assertion");
    assert!(why.contains("the second has it alone"), "{why}");
}

#[test]
fn lease_break_waiter_is_woken_by_close_and_by_acknowledgment() {
    for acknowledges in [false, true] {
        check(move || {
            let world = World::new();
            let all = LeaseState::READ_CACHING | LeaseState::WRITE_CACHING | LeaseState::HANDLE_CACHING;
            let held = world.open(&How { ask: lease(1, all), ..PLAIN }).expect("the holder");
            let holder = spawn({
                let (world, held) = (world.clone(), Arc::clone(&held));
                move || {
                    if acknowledges && world.volume.leases.find(lease_id(1)).is_some() {
                        let file = &held.file;
                        // Refused if no break was sent yet.
                        let _ = file.acknowledge_lease(lease_id(1), LeaseState::READ_CACHING, &world.server);
                    }
                    assert!(matches!(world.close(&held), LinkFate::Stays));
                }
            });
            let how = How { access: WRITE, client: 2, ..PLAIN };
            let opener = spawn({
                let (world, how) = (world.clone(), how.clone());
                move || world.open(&how)
            });
            holder.join().expect("closed");
            let opened = match opener.join().expect("asked") {
                Err(NtStatus::PENDING) => {
                    assert!(world.is_woken(2), "nothing else wakes it");
                    world.open(&how)
                }
                answer => answer,
            };
            let opened = opened.expect("the holder has closed");
            assert!(world.volume.leases.find(lease_id(1)).is_none(), "the key is free");
            assert!(!opened.file.is_breaking());
            let other =
                How { key: FileKey { dev: 1, ino: 2, stream: 0 }, name: "g", ask: lease(1, all), ..PLAIN };
            world.open(&other).expect("the key can be used for another file");
        });
    }
}

#[test]
fn a_lease_key_is_bound_to_one_file() {
    check(|| {
        let world = World::new();
        let read = LeaseState::READ_CACHING;
        let open = |ino, name| {
            let world = world.clone();
            let how = How { key: FileKey { dev: 1, ino, stream: 0 }, name, ask: lease(1, read), ..PLAIN };
            spawn(move || world.open(&how))
        };
        let (f, g) = (open(1, "f"), open(2, "g"));
        let (f, g) = (f.join().expect("asked"), g.join().expect("asked"));
        assert!(f.is_ok() != g.is_ok(), "exactly one of them");
        assert_eq!(f.and(g).err(), Some(NtStatus::INVALID_PARAMETER));
        assert_eq!(world.volume.files().files.len(), 1, "the refused open leaves no state");
    });
}

#[test]
fn a_delete_pending_name_cannot_be_opened_until_it_is_unlinked() {
    check(|| {
        let world = World::new();
        let doomed = world.open(&PLAIN).expect("opened");
        doomed.file.set_delete_pending(&*doomed, Disposition::Delete).expect("it is open");
        let closer = spawn({
            let world = world.clone();
            move || match world.close(&doomed) {
                LinkFate::Unlinked { unlink, .. } => drop(unlink),
                _ => panic!("it was the last open"),
            }
        });
        let other = world.open(&How { name: "another link", client: 2, ..PLAIN }).expect("another name");
        let opened = world.open(&How { client: 2, ..PLAIN });
        // Before the last close, the open is refused; during the removal, it has to wait for the removal; afterwards, no
        // backend would have found the name.
        let refused = [NtStatus::DELETE_PENDING, NtStatus::RETRY];
        assert!(opened.as_ref().err().is_none_or(|status| refused.contains(status)));
        closer.join().expect("closed");
        assert!(!other.file.delete_pending(other.id), "the other name stays");
        for open in opened.iter().chain([&other]) {
            assert!(matches!(world.close(open), LinkFate::Stays));
        }
        assert!(world.volume.files().files.is_empty());
    });
}

#[test]
fn no_file_is_opened_below_a_directory_during_its_rename() {
    check(|| {
        let world = World::new();
        let directory = How { key: FileKey { dev: 1, ino: 9, stream: 0 }, name: "d", ..PLAIN };
        let directory = world.open(&directory).expect("opened");
        let mover = spawn({
            let (world, directory) = (world.clone(), Arc::clone(&directory));
            move || {
                let moving = Move::rename(
                    &world.volume.files,
                    || directory.state().path.clone(),
                    &path("e"),
                    waiter(1),
                )
                .expect("the only one");
                let clear = moving.is_clear(waiter(1));
                let empty = !world.volume.files().any_open_below(moving.from());
                (moving, clear, empty)
            }
        });
        let opener = spawn({
            let world = world.clone();
            move || {
                let pin = PathPin::new(&world.volume.files, &path("d/f"), waiter(2))?;
                match world.enter_pinned(&How { name: "d/f", client: 2, ..PLAIN }, &pin) {
                    Ok(Entry::Open(open)) => Some(open),
                    _ => panic!("nothing else blocks it"),
                }
            }
        });
        let (moving, clear, empty) = mover.join().expect("asked");
        let opened = opener.join().expect("asked");
        assert!(opened.is_none() || !(clear && empty), "opened below a directory that moves");
        assert!(opened.is_some() || clear, "a waiting open does not block the rename");
        if opened.is_some() && !clear {
            assert!(world.is_woken(1), "the rename is retried");
            assert!(moving.is_clear(waiter(1)));
        }
        drop(moving);
        if opened.is_none() {
            assert!(world.is_woken(2), "the open is woken");
        }
    });
}

#[test]
fn volume_removal_and_a_concurrent_open_exclude_each_other() {
    check(|| {
        let world = World::new();
        let opener = spawn({
            let world = world.clone();
            move || world.open(&PLAIN)
        });
        let removed = world.server.remove_volume("vol", false);
        let opened = opener.join().expect("asked");
        assert!(removed.is_ok() != opened.is_ok(), "exactly one of them");
        assert!(opened.is_ok() || opened.err() == Some(NtStatus::NETWORK_NAME_DELETED));
    });
}

/// A client leases a directory and reads it, while another one creates a name in it and reports that.
#[test]
fn reader_of_a_leased_directory_sees_a_new_name_or_gets_a_break() {
    for reads_before_it_is_listed in [false, true] {
        let model = move || {
            check(move || {
                let world = World::new();
                // The directory in the file system.
                let made = Arc::new(Mutex::new(false));
                let reader = spawn({
                    let (world, made) = (world.clone(), Arc::clone(&made));
                    move || {
                        let caching = LeaseState::READ_CACHING | LeaseState::HANDLE_CACHING;
                        let how = How { name: "d", directory: true, ask: lease(1, caching), ..PLAIN };
                        let open = world.open(&how).expect("opened");
                        let seen = reads_before_it_is_listed && *made.lock().expect("no panic");
                        world.volume.watches.leased.add(open.id, &path("d"), &open.file);
                        (seen || !reads_before_it_is_listed && *made.lock().expect("no panic"), open)
                    }
                });
                *made.lock().expect("no panic") = true;
                world.volume.watches.leased.changed(&path("d"), None, &world.server);
                let (seen, open) = reader.join().expect("read");
                assert!(seen || open.file.is_breaking(), "an old listing is cached");
            });
        };
        if reads_before_it_is_listed {
            let found = std::panic::catch_unwind(model).expect_err("the checker must find the race");
            let why = found.downcast_ref::<&str>().map(|why| (*why).to_owned());
            let why = why.or_else(|| found.downcast_ref::<String>().cloned()).expect("the message");
            assert!(why.contains("an old listing is cached"), "{why}");
        } else {
            model();
        }
    }
}
