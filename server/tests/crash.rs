//! kill -9 at seeded moments while an administrator and a client change things: acknowledged changes exist after the next
//! start, changes in progress are either done or not, and nothing is in between.
//!
//! `FOREBAY_CRASH_SEED` and `FOREBAY_CRASH_KILLS` select another run.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_proto::admin as api;
use forebay_smb::ids::FileId;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::{self, CreateDisposition, CreateOptions, ImpersonationLevel, OplockLevel};
use forebay_smb::wire::fscc::FileInformationClass;
use forebay_smb::wire::negotiate::Dialect;
use forebay_smb::wire::query_info::InfoType;
use forebay_smb::wire::{
    AccessMask, Command as Smb, FileAttributes, ShareAccess, close, flush, read, set_info, write,
};
use support::random::Random;
use support::{Client, Daemon, Place, engines, until};

const SEED: u64 = 20_261_122;
const KILLS: u64 = 200;
/// Every `STARTING_EVERY`-th kill hits a server that is starting.
const STARTING_EVERY: u64 = 6;
/// Longest time from the first operation to the kill.
const LIFE_US_MAX: u64 = 60_000;
const VOLUMES: u64 = 5;
const FILES: u64 = 6;
const FILE_BYTES_MAX: u64 = 60_000;
const MIB: u64 = 1 << 20;

/// The contents of a file, derived from one number.
fn content(number: u64) -> Vec<u8> {
    let mut random = Random(number);
    let length = random.below(FILE_BYTES_MAX);
    (0..length).map(|_| random.number() as u8).collect()
}

fn password(number: u64) -> String {
    format!("password {number}")
}

fn id(volume: u64) -> String {
    format!("v{volume}")
}

/// The expected state of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Volume {
    capacity: u64,
    labels: BTreeMap<String, String>,
    /// The valid passwords, newest first.
    passwords: Vec<u64>,
    /// Names and contents.
    files: BTreeMap<u64, u64>,
}

/// The expected state of everything.
type State = BTreeMap<u64, Volume>;

/// One change.
#[derive(Clone, Debug)]
enum Change {
    Create {
        volume: u64,
        capacity: u64,
        password: u64,
        label: u64,
    },
    Delete {
        volume: u64,
    },
    Expand {
        volume: u64,
        capacity: u64,
    },
    Password {
        volume: u64,
        password: u64,
        keep_previous: bool,
    },
    /// The file is created again, written, flushed and closed.
    Write {
        volume: u64,
        file: u64,
        content: u64,
    },
    Rename {
        volume: u64,
        from: u64,
        to: u64,
    },
    Remove {
        volume: u64,
        file: u64,
    },
}

impl Change {
    /// Chooses a change that makes sense. For changes that need a client, it chooses among volumes that have one.
    fn choose(random: &mut Random, state: &State, mounted: &BTreeMap<u64, Client>) -> Self {
        loop {
            let volume = random.below(VOLUMES);
            let number = random.number();
            let Some(found) = state.get(&volume) else {
                let (capacity, label) = ((1 + random.below(64)) * MIB, random.below(9));
                return Self::Create { volume, capacity, password: number, label };
            };
            let file = random.below(FILES);
            let with_client = mounted.contains_key(&volume);
            match random.below(12) {
                0 => return Self::Delete { volume },
                1 => return Self::Expand { volume, capacity: found.capacity + (1 + random.below(64)) * MIB },
                2 | 3 => {
                    let keep_previous = random.below(2) == 0;
                    return Self::Password { volume, password: number, keep_previous };
                }
                4..=7 if with_client => return Self::Write { volume, file, content: number },
                8 | 9 if with_client && found.files.contains_key(&file) => {
                    let to = random.below(FILES);
                    if to != file && !found.files.contains_key(&to) {
                        return Self::Rename { volume, from: file, to };
                    }
                }
                10 | 11 if with_client && found.files.contains_key(&file) => {
                    return Self::Remove { volume, file };
                }
                _ => {}
            }
        }
    }

    /// Applies the change to `state`.
    fn apply(&self, state: &mut State) {
        match *self {
            Self::Create { volume, capacity, password, label } => {
                let labels = [("number".to_owned(), label.to_string())].into();
                let new = Volume { capacity, labels, passwords: vec![password], files: BTreeMap::new() };
                state.insert(volume, new);
            }
            Self::Delete { volume } => {
                state.remove(&volume);
            }
            Self::Expand { volume, capacity } => state.get_mut(&volume).unwrap().capacity = capacity,
            Self::Password { volume, password, keep_previous } => {
                let passwords = &mut state.get_mut(&volume).unwrap().passwords;
                passwords.insert(0, password);
                passwords.truncate(if keep_previous { 2 } else { 1 });
            }
            Self::Write { volume, file, content } => {
                state.get_mut(&volume).unwrap().files.insert(file, content);
            }
            Self::Rename { volume, from, to } => {
                let files = &mut state.get_mut(&volume).unwrap().files;
                let content = files.remove(&from).unwrap();
                files.insert(to, content);
            }
            Self::Remove { volume, file } => {
                state.get_mut(&volume).unwrap().files.remove(&file);
            }
        }
    }

    /// Requests the change. Returns whether it was acknowledged before the server died.
    fn ask(&self, daemon: &mut Daemon, clients: &mut BTreeMap<u64, Client>) -> Asked {
        match *self {
            Self::Create { volume, capacity, password: number, label } => {
                let request = api::CreateVolumeRequest {
                    volume_id: id(volume),
                    capacity_bytes: capacity,
                    credentials: Some(credentials(volume, number)),
                    labels: [("number".to_owned(), label.to_string())].into(),
                    ..Default::default()
                };
                daemon.admin(async |admin| admin.create_volume(request).await).into()
            }
            Self::Delete { volume } => {
                clients.remove(&volume);
                let request = api::DeleteVolumeRequest { volume_id: id(volume), force: true };
                daemon.admin(async |admin| admin.delete_volume(request).await).into()
            }
            Self::Expand { volume, capacity } => {
                let request = api::ExpandVolumeRequest { volume_id: id(volume), capacity_bytes: capacity };
                daemon.admin(async |admin| admin.expand_volume(request).await).into()
            }
            Self::Password { volume, password: number, keep_previous } => {
                let credentials = Some(credentials(volume, number));
                let request =
                    api::SetCredentialsRequest { volume_id: id(volume), credentials, keep_previous };
                daemon.admin(async |admin| admin.set_credentials(request).await).into()
            }
            Self::Write { volume, file, content: number } => {
                write_file(clients.get_mut(&volume).unwrap(), file, &content(number))
            }
            Self::Rename { volume, from, to } => rename(clients.get_mut(&volume).unwrap(), from, to),
            Self::Remove { volume, file } => remove(clients.get_mut(&volume).unwrap(), file),
        }
    }
}

/// The outcome of a change.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Acknowledged,
    /// The server died first or refused it.
    Not(String),
}

impl<T> From<Result<T, tonic::Status>> for Asked {
    fn from(result: Result<T, tonic::Status>) -> Self {
        result.map_or_else(|status| Self::Not(status.to_string()), |_| Self::Acknowledged)
    }
}

fn credentials(volume: u64, number: u64) -> api::Credentials {
    api::Credentials { username: format!("{}-user", id(volume)), password: password(number) }
}

fn name(file: u64) -> String {
    format!("file-{file}")
}

/// Sends one request of a chain that ends if the server dies or refuses it.
fn step(client: &mut Client, command: Smb, charge: u16, body: &[u8]) -> Result<Vec<u8>, String> {
    match client.try_call(command, charge, body) {
        None => Err("the connection is gone".to_owned()),
        Some(answer) if answer.status() == NtStatus::SUCCESS => Ok(answer.message),
        Some(answer) => Err(format!("{command:?}: {:?}", answer.status())),
    }
}

fn open(client: &mut Client, file: u64, disposition: CreateDisposition) -> Result<FileId, String> {
    let mut body = Vec::new();
    create::Request {
        requested_oplock_level: OplockLevel::NONE,
        impersonation_level: ImpersonationLevel::IMPERSONATION,
        smb_create_flags: 0,
        desired_access: AccessMask::FILE_ALL_ACCESS,
        file_attributes: FileAttributes::NORMAL,
        share_access: ShareAccess(7),
        create_disposition: disposition,
        create_options: CreateOptions(0),
        name: name(file),
        contexts: Vec::new(),
    }
    .encode(&mut body);
    let message = step(client, Smb::CREATE, 1, &body)?;
    Ok(create::Response::parse(&message).unwrap().file_id)
}

fn end(client: &mut Client, file_id: FileId) -> Result<(), String> {
    let mut body = Vec::new();
    close::Request { flags: close::Flags(0), file_id }.encode(&mut body);
    step(client, Smb::CLOSE, 1, &body).map(drop)
}

fn asked(result: Result<(), String>) -> Asked {
    result.map_or_else(Asked::Not, |()| Asked::Acknowledged)
}

fn write_file(client: &mut Client, file: u64, bytes: &[u8]) -> Asked {
    let mut chain = || -> Result<(), String> {
        let file_id = open(client, file, CreateDisposition::OVERWRITE_IF)?;
        if !bytes.is_empty() {
            let mut body = Vec::new();
            write::Request {
                data_offset: 112,
                length: bytes.len() as u32,
                offset: 0,
                file_id,
                channel: read::Channel::NONE,
                remaining_bytes: 0,
                flags: write::Flags(0),
                channel_info: &[],
            }
            .encode(&mut body);
            body.truncate(48);
            body.extend_from_slice(bytes);
            step(client, Smb::WRITE, 1, &body)?;
        }
        let mut body = Vec::new();
        flush::Request { file_id }.encode(&mut body);
        step(client, Smb::FLUSH, 1, &body)?;
        end(client, file_id)
    };
    asked(chain())
}

fn set(client: &mut Client, file: u64, class: FileInformationClass, buffer: &[u8]) -> Result<(), String> {
    let file_id = open(client, file, CreateDisposition::OPEN)?;
    let mut body = Vec::new();
    set_info::Request {
        info_type: InfoType::FILE,
        file_info_class: class.0,
        additional_information: 0,
        file_id,
        buffer,
    }
    .encode(&mut body);
    step(client, Smb::SET_INFO, 1, &body)?;
    end(client, file_id)
}

/// [MS-FSCC] 2.4.42.2.
fn rename(client: &mut Client, from: u64, to: u64) -> Asked {
    let to: Vec<u8> = name(to).encode_utf16().flat_map(u16::to_le_bytes).collect();
    let mut buffer = vec![0; 16];
    buffer.extend((to.len() as u32).to_le_bytes());
    buffer.extend(to);
    asked(set(client, from, FileInformationClass::FILE_RENAME_INFORMATION, &buffer))
}

fn remove(client: &mut Client, file: u64) -> Asked {
    asked(set(client, file, FileInformationClass::FILE_DISPOSITION_INFORMATION, &[1]))
}

/// A run: the place, the expected state, and the change that was in progress when the server last died.
struct Run {
    place: Place,
    state: State,
    under_way: Option<Change>,
    guid: Option<String>,
    random: Random,
    changes: usize,
    undone: usize,
}

impl Run {
    /// Kills a server that is still starting.
    fn kill_while_starting(&mut self) {
        let mut child = self.place.command().stderr(std::process::Stdio::null()).spawn().expect("the server");
        let after = Duration::from_micros(self.random.below(LIFE_US_MAX));
        std::thread::park_timeout(after);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Starts the server, compares the state, and makes changes until the kill.
    fn live(&mut self) {
        let mut daemon = self.place.start();
        let mut clients = self.compare(&mut daemon);
        let killed = Arc::new(AtomicBool::new(false));
        let killer = {
            let (killed, pid) = (Arc::clone(&killed), rustix::process::Pid::from_child(&daemon.child));
            let after = Duration::from_micros(self.random.below(LIFE_US_MAX));
            std::thread::spawn(move || {
                std::thread::park_timeout(after);
                killed.store(true, Ordering::SeqCst);
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            })
        };
        loop {
            let change = Change::choose(&mut self.random, &self.state, &clients);
            match change.ask(&mut daemon, &mut clients) {
                Asked::Acknowledged => change.apply(&mut self.state),
                Asked::Not(why) => {
                    assert!(
                        killed.load(Ordering::SeqCst),
                        "{change:?} was refused by a server that lives: {why}"
                    );
                    self.under_way = Some(change);
                    break;
                }
            }
            self.changes += 1;
        }
        killer.join().unwrap();
        daemon.wait();
    }

    /// Compares everything with the expected state and so finds out whether the change in progress was made. Returns a client
    /// of each volume.
    fn compare(&mut self, daemon: &mut Daemon) -> BTreeMap<u64, Client> {
        let info = daemon.admin(async |admin| admin.get_server_info(api::GetServerInfoRequest {}).await);
        let info = info.unwrap().into_inner();
        assert!(info.problems.is_empty(), "{:?}", info.problems);
        assert_eq!(*self.guid.get_or_insert(info.server_guid.clone()), info.server_guid);
        let found = self.observed(daemon);
        let before = self.state.clone();
        let mut after = self.state.clone();
        let under_way = self.under_way.take();
        if let Some(change) = &under_way {
            change.apply(&mut after);
        }
        let reported = |state: &State| -> Vec<_> {
            state.iter().map(|(id, v)| (*id, v.capacity, v.labels.clone())).collect()
        };
        let reported_found: Vec<_> = found.iter().map(|(id, v)| (*id, v.0, v.1.clone())).collect();
        let mut fits: Vec<&State> =
            [&before, &after].into_iter().filter(|s| reported(s) == reported_found).collect();
        assert!(
            !fits.is_empty(),
            "{reported_found:?} is neither {:?} nor {:?}: {under_way:?}",
            reported(&before),
            reported(&after)
        );
        // The valid passwords, and the files.
        let candidates = |volume: &u64| -> BTreeSet<u64> {
            let both = [&before, &after].into_iter().filter_map(|state| state.get(volume));
            both.flat_map(|found| found.passwords.iter().copied()).collect()
        };
        let address = daemon.address();
        // In parallel: clients that reconnect after a start have to wait.
        let mut looks: BTreeMap<u64, Look> = std::thread::scope(|scope| {
            let look = |volume: &u64| {
                let (volume, candidates) = (*volume, candidates(volume));
                (volume, scope.spawn(move || Look::at(address, volume, &candidates)))
            };
            let looks: Vec<_> = found.keys().map(look).collect();
            looks.into_iter().map(|(volume, look)| (volume, look.join().unwrap())).collect()
        });
        for (&volume, Look { good, files, .. }) in &looks {
            fits.retain(|state| {
                let expected = state.get(&volume).map(|v| v.passwords.iter().copied().collect());
                expected.as_ref() == Some(good)
            });
            assert!(!fits.is_empty(), "volume {volume}: passwords {good:?}: {under_way:?}");
            let half_written = match under_way {
                Some(Change::Write { volume: of, file, .. }) if of == volume => Some(file),
                _ => None,
            };
            fits.retain(|state| {
                let names: Vec<u64> =
                    state[&volume].files.keys().copied().filter(|f| Some(*f) != half_written).collect();
                let found: Vec<u64> = files.keys().copied().filter(|f| Some(*f) != half_written).collect();
                names == found && names.iter().all(|file| content(state[&volume].files[file]) == files[file])
            });
            assert!(
                !fits.is_empty(),
                "volume {volume}: files {:?} and not {:?}: {under_way:?}",
                files.keys(),
                before.get(&volume).map(|v| &v.files)
            );
            // The file can be empty, partly written, complete or missing, but holds nothing that was not written.
            if let (Some(file), Some(Change::Write { content: number, .. })) = (half_written, &under_way) {
                let old = before[&volume].files.get(&file).map(|number| content(*number));
                let new = content(*number);
                match files.get(&file) {
                    None => assert!(old.is_none(), "file {file} is gone"),
                    Some(bytes) => assert!(
                        new.starts_with(bytes) || old.as_ref() == Some(bytes),
                        "file {file} of volume {volume} has {} bytes that were not written",
                        bytes.len()
                    ),
                }
            }
        }
        let mut state = fits[0].clone();
        self.undone += usize::from(under_way.is_some() && state == before && before != after);
        let mut clients: BTreeMap<u64, Client> =
            looks.iter_mut().map(|(volume, look)| (*volume, look.client.take().unwrap())).collect();
        // A half-written file is completed, so that its contents are known.
        if let Some(change @ Change::Write { .. }) = &under_way {
            assert_eq!(change.ask(daemon, &mut clients), Asked::Acknowledged);
            state = before;
            change.apply(&mut state);
        }
        self.state = state;
        self.look_at_the_pool();
        clients
    }

    /// The volumes that the server reports, with their capacities. Without quota, only the records have the capacities.
    fn observed(&self, daemon: &mut Daemon) -> BTreeMap<u64, (u64, BTreeMap<String, String>)> {
        let request = api::ListVolumesRequest::default();
        let listed = daemon.admin(async |admin| admin.list_volumes(request).await).unwrap().into_inner();
        let one = |volume: api::Volume| {
            let id = &volume.volume_id;
            let number = id.strip_prefix('v').and_then(|n| n.parse().ok()).expect("one of ours");
            assert_eq!(volume.username, format!("{id}-user"));
            let record =
                std::fs::read(self.place.pool().join(format!(".forebay/volumes/{id}.json"))).unwrap();
            let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
            (number, (record["capacity_bytes"].as_u64().unwrap(), volume.labels.into_iter().collect()))
        };
        listed.volumes.into_iter().map(one).collect()
    }

    /// Checks the pool: complete records, data of volumes that have complete records, and no old trash.
    fn look_at_the_pool(&self) {
        let pool = self.place.pool();
        let names = |path: &str| -> BTreeSet<String> {
            let entries = std::fs::read_dir(pool.join(path)).unwrap();
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        let expected: BTreeSet<String> = self.state.keys().map(|volume| id(*volume)).collect();
        let records = names(".forebay/volumes");
        let whole: BTreeSet<String> =
            records.iter().filter_map(|name| name.strip_suffix(".json").map(str::to_owned)).collect();
        assert_eq!(whole, expected);
        // For each volume that ever existed, at most one record that is being replaced.
        assert!(records.len() <= whole.len() + VOLUMES as usize, "{records:?}");
        for name in names("volumes").difference(&expected) {
            let left = std::fs::read_dir(pool.join("volumes").join(name)).unwrap().count();
            assert_eq!(left, 0, "{name} has data and no record");
        }
        until("the trash to be emptied", || names(".forebay/trash").is_empty().then_some(()));
        let slots = std::fs::read(pool.join(".forebay/starts")).unwrap();
        assert_eq!(slots.len(), 2 * 4096);
        for slot in slots.chunks(4096) {
            // The list follows magic, sequence, length and checksum.
            let length = u32::from_le_bytes(slot[16..20].try_into().unwrap()) as usize;
            let starts = std::str::from_utf8(&slot[36..36 + length]).unwrap();
            for line in starts.strip_prefix("asking\n").unwrap_or(starts).lines() {
                let (number, boot) = line.split_once(' ').expect("two fields");
                assert!(
                    u64::from_str_radix(number, 16).is_ok()
                        && (boot.len() == 36 || ["-", "+"].contains(&boot)),
                    "{line:?}"
                );
            }
            assert!(starts.ends_with('\n') && starts.lines().count() <= 66, "{starts:?}");
        }
    }
}

/// One client's view of its volume.
struct Look {
    /// The valid passwords among the candidates.
    good: BTreeSet<u64>,
    files: BTreeMap<u64, Vec<u8>>,
    client: Option<Client>,
}

impl Look {
    fn at(address: SocketAddr, volume: u64, candidates: &BTreeSet<u64>) -> Self {
        let mut client = Client::connect(address, Dialect::SMB2_1);
        let mut log_on = |number: u64| {
            // A new session for each attempt.
            client.session_id = 0;
            client.log_on(&format!("{}-user", id(volume)), &password(number)) == NtStatus::SUCCESS
        };
        let good: BTreeSet<u64> = candidates.iter().copied().filter(|number| log_on(*number)).collect();
        assert!(log_on(*good.first().expect("a password is good")));
        assert_eq!(client.tree_connect(&id(volume)), NtStatus::SUCCESS);
        let files = (0..FILES).filter_map(|file| Some((file, contents(&mut client, file)?))).collect();
        Self { good, files, client: Some(client) }
    }
}

fn contents(client: &mut Client, file: u64) -> Option<Vec<u8>> {
    let file_id = match client.open(&name(file), CreateDisposition::OPEN) {
        Ok(file_id) => file_id,
        Err(NtStatus::OBJECT_NAME_NOT_FOUND) => return None,
        Err(status) => panic!("file {file}: {status:?}"),
    };
    let bytes = match client.read(file_id, 0, FILE_BYTES_MAX as u32) {
        Err(NtStatus::END_OF_FILE) => Vec::new(),
        bytes => bytes.unwrap(),
    };
    assert_eq!(client.close(file_id), NtStatus::SUCCESS);
    Some(bytes)
}

#[test]
fn no_data_is_torn_or_lost_by_sigkill_at_any_moment() {
    let number = |variable: &str, otherwise: u64| {
        std::env::var(variable).map_or(otherwise, |text| text.parse().expect("a number"))
    };
    let (seed, kills) = (number("FOREBAY_CRASH_SEED", SEED), number("FOREBAY_CRASH_KILLS", KILLS));
    println!("FOREBAY_CRASH_SEED={seed} FOREBAY_CRASH_KILLS={kills}");
    let engines = engines();
    let kills = kills.div_ceil(engines.len() as u64);
    for (seed, engine) in (seed..).zip(engines) {
        killed(engine, seed, kills);
    }
}

fn killed(engine: &'static str, seed: u64, kills: u64) {
    let mut run = Run {
        place: Place::new(engine),
        state: State::new(),
        under_way: None,
        guid: None,
        random: Random(seed),
        changes: 0,
        undone: 0,
    };
    for kill in 1..=kills {
        if kill % STARTING_EVERY == 0 {
            run.kill_while_starting();
        } else {
            run.live();
        }
    }
    let mut daemon = run.place.start();
    run.compare(&mut daemon);
    println!(
        "{engine}: {kills} kills, {} changes acknowledged, {} of those under way not done",
        run.changes, run.undone
    );
}
