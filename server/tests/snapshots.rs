//! Snapshots of volumes, and volumes created from them: on XFS, with clients that keep writing.
#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use forebay_proto::admin as api;
use forebay_smb::status::NtStatus;
use forebay_smb::wire::AccessMask;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::fscc::fsctl::SnapshotArray;
use forebay_smb::wire::negotiate::Dialect;
use forebay_smb::wire::query_directory;
use forebay_testing::Xfs;
use support::{Client, Daemon, Place, engines, request, until};
use tonic::Code;

fn place(engine: &'static str, xfs: &Xfs) -> Place {
    let place = Place::new(engine);
    place.configure("127.0.0.1:0", &xfs.path());
    place
}

fn snapshot(daemon: &mut Daemon, id: &str, volume: &str) -> Result<api::Snapshot, tonic::Status> {
    let request = api::CreateSnapshotRequest {
        snapshot_id: id.to_owned(),
        volume_id: volume.to_owned(),
        labels: Default::default(),
    };
    let made = daemon.admin(async |admin| admin.create_snapshot(request).await)?;
    Ok(made.into_inner().snapshot.unwrap())
}

fn delete_snapshot(daemon: &mut Daemon, id: &str) -> Result<(), tonic::Status> {
    let request = api::DeleteSnapshotRequest { snapshot_id: id.to_owned() };
    daemon.admin(async |admin| admin.delete_snapshot(request).await).map(drop)
}

fn group(daemon: &mut Daemon, id: &str, members: &[(&str, &str)]) -> Result<Vec<String>, tonic::Status> {
    let member = |&(snapshot_id, volume_id): &(&str, &str)| api::SnapshotGroupMember {
        snapshot_id: snapshot_id.to_owned(),
        volume_id: volume_id.to_owned(),
    };
    let request = api::CreateSnapshotGroupRequest {
        group_id: id.to_owned(),
        members: members.iter().map(member).collect(),
        labels: Default::default(),
    };
    let made = daemon.admin(async |admin| admin.create_snapshot_group(request).await)?.into_inner().snapshots;
    assert!(made.iter().all(|snapshot| snapshot.group_id == id && snapshot.created == made[0].created));
    Ok(made.into_iter().map(|snapshot| snapshot.snapshot_id).collect())
}

fn delete_group(daemon: &mut Daemon, id: &str) -> Result<(), tonic::Status> {
    let request = api::DeleteSnapshotGroupRequest { group_id: id.to_owned() };
    daemon.admin(async |admin| admin.delete_snapshot_group(request).await).map(drop)
}

fn delete_volume(daemon: &mut Daemon, id: &str) -> Result<(), tonic::Status> {
    let request = api::DeleteVolumeRequest { volume_id: id.to_owned(), force: true };
    daemon.admin(async |admin| admin.delete_volume(request).await).map(drop)
}

fn listed(daemon: &mut Daemon, id: &str, volume: &str) -> Vec<String> {
    let request = api::ListSnapshotsRequest {
        snapshot_id: id.to_owned(),
        volume_id: volume.to_owned(),
        page_size: 2,
        ..Default::default()
    };
    let page = daemon.admin(async |admin| admin.list_snapshots(request).await).unwrap().into_inner();
    page.snapshots.into_iter().map(|snapshot| snapshot.snapshot_id).collect()
}

fn of_snapshot(id: &str, snapshot: &str) -> api::CreateVolumeRequest {
    api::CreateVolumeRequest { source_snapshot_id: snapshot.to_owned(), ..request(id) }
}

fn of_volume(id: &str, volume: &str) -> api::CreateVolumeRequest {
    api::CreateVolumeRequest { source_volume_id: volume.to_owned(), ..request(id) }
}

fn put(client: &mut Client, name: &str, bytes: &[u8]) {
    let file = client.open(name, CreateDisposition::OVERWRITE_IF).unwrap();
    assert_eq!(client.write(file, 0, bytes), NtStatus::SUCCESS);
    assert_eq!(client.close(file), NtStatus::SUCCESS);
}

fn get(client: &mut Client, name: &str) -> Result<Vec<u8>, NtStatus> {
    let file = client.open(name, CreateDisposition::OPEN)?;
    let bytes = client.read(file, 0, 1 << 16);
    assert_eq!(client.close(file), NtStatus::SUCCESS);
    bytes
}

#[test]
fn snapshot_keeps_its_data_and_volumes_are_created_from_it() {
    let Some(xfs) = Xfs::without_quota() else { return };
    for engine in engines() {
        let place = place(engine, &xfs);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        put(&mut daemon.mount("v", Dialect::SMB3_1_1), "f", b"before");
        let made = snapshot(&mut daemon, "s1", "v").unwrap();
        assert_eq!((made.volume_id.as_str(), made.capacity_bytes), ("v", 1 << 30));
        put(&mut daemon.mount("v", Dialect::SMB3_1_1), "f", b"after");
        // The same request returns the same snapshot, regardless of later changes.
        assert_eq!(snapshot(&mut daemon, "s1", "v").unwrap(), made);
        assert_eq!(snapshot(&mut daemon, "s1", "w").unwrap_err().code(), Code::AlreadyExists);
        assert_eq!(snapshot(&mut daemon, "s2", "w").unwrap_err().code(), Code::NotFound);
        assert_eq!(snapshot(&mut daemon, "S_2", "v").unwrap_err().code(), Code::InvalidArgument);

        let restored = daemon.create(of_snapshot("r", "s1")).unwrap();
        assert_eq!(restored.source_snapshot_id, "s1");
        assert_eq!(get(&mut daemon.mount("r", Dialect::SMB3_1_1), "f").unwrap(), b"before");
        daemon.create(of_volume("c", "v")).unwrap();
        assert_eq!(get(&mut daemon.mount("c", Dialect::SMB3_1_1), "f").unwrap(), b"after");
        // Neither volume sees writes to the other.
        put(&mut daemon.mount("c", Dialect::SMB3_1_1), "f", b"changed");
        assert_eq!(get(&mut daemon.mount("v", Dialect::SMB3_1_1), "f").unwrap(), b"after");

        assert!(daemon.create(of_snapshot("r", "s1")).is_ok());
        assert_eq!(daemon.create(of_snapshot("r", "s9")).unwrap_err().code(), Code::AlreadyExists);
        assert_eq!(daemon.create(of_snapshot("x", "s9")).unwrap_err().code(), Code::NotFound);
        assert_eq!(daemon.create(of_volume("x", "y")).unwrap_err().code(), Code::NotFound);
        let small = api::CreateVolumeRequest { capacity_bytes: 1 << 29, ..of_snapshot("x", "s1") };
        assert_eq!(daemon.create(small).unwrap_err().code(), Code::InvalidArgument);
        let both = api::CreateVolumeRequest { source_volume_id: "v".to_owned(), ..of_snapshot("x", "s1") };
        assert_eq!(daemon.create(both).unwrap_err().code(), Code::InvalidArgument);

        let root = Some(api::Root { mode: Some(0o755), ..api::Root::default() });
        let owned = api::CreateVolumeRequest { root, ..of_snapshot("x", "s1") };
        assert_eq!(
            daemon.create(owned).unwrap_err().code(),
            Code::InvalidArgument,
            "a copy has the root of its source"
        );

        // The snapshot outlives its volume and the server, and is not a volume.
        delete_volume(&mut daemon, "v").unwrap();
        assert_eq!(snapshot(&mut daemon, "s2", "v").unwrap_err().code(), Code::NotFound);
        daemon.kill();
        let mut daemon = place.start();
        snapshot(&mut daemon, "s2", "c").unwrap();
        snapshot(&mut daemon, "s3", "c").unwrap();
        assert_eq!(listed(&mut daemon, "", ""), ["s1", "s2"]);
        assert_eq!(listed(&mut daemon, "", "c"), ["s2", "s3"]);
        assert_eq!(listed(&mut daemon, "s1", ""), ["s1"]);
        assert_eq!(listed(&mut daemon, "s1", "c"), [""; 0]);
        daemon.create(of_snapshot("late", "s1")).unwrap();
        assert_eq!(get(&mut daemon.mount("late", Dialect::SMB3_1_1), "f").unwrap(), b"before");
        for id in ["s1", "s1", "s2", "s3"] {
            delete_snapshot(&mut daemon, id).unwrap();
        }
        assert_eq!(listed(&mut daemon, "", ""), [""; 0]);
        assert_eq!(get(&mut daemon.mount("late", Dialect::SMB3_1_1), "f").unwrap(), b"before");
        for id in ["r", "c", "late"] {
            delete_volume(&mut daemon, id).unwrap();
        }
        daemon.terminate();
        daemon.wait();
        assert!(is_empty(&xfs.path().join("snapshots")) && is_empty(&xfs.path().join("volumes")));
    }
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).unwrap().next().is_none()
}

fn filetime(snapshot: &api::Snapshot) -> u64 {
    let created = snapshot.created.unwrap();
    (created.seconds + 11_644_473_600).cast_unsigned() * 10_000_000
        + created.nanos.unsigned_abs() as u64 / 100
}

#[test]
fn clients_read_only_the_snapshots_of_their_own_volume() {
    const READ: AccessMask = AccessMask::FILE_GENERIC_READ;
    let Some(xfs) = Xfs::without_quota() else { return };
    for engine in engines() {
        let place = place(engine, &xfs);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        daemon.create_volume("w").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB3_1_1);
        let root = client.open("", CreateDisposition::OPEN).unwrap();
        assert_eq!(client.snapshots(root, 16), Ok(SnapshotArray::complete(Vec::new())));
        let mut times = Vec::new();
        for round in ["first", "second"] {
            put(&mut client, "f", round.as_bytes());
            let made = snapshot(&mut daemon, round, "v").unwrap();
            // A client names a snapshot by its second.
            std::thread::sleep(std::time::Duration::from_millis(1100));
            times.push(filetime(&made));
        }
        put(&mut client, "f", b"now");
        put(&mut client, "new", b"x");

        let all = client.snapshots(root, 4096).unwrap();
        assert_eq!((all.number_of_snapshots, all.snapshots.len()), (2, 2));
        assert!(all.snapshots[0] > all.snapshots[1], "the newest first: {all:?}");
        assert!(all.snapshots[0].starts_with("@GMT-20") && all.snapshots[0].len() == 24);
        let counted = client.snapshots(root, 16).unwrap();
        assert_eq!((counted.number_of_snapshots, counted.snapshots.len()), (2, 0));
        assert_eq!(client.snapshots(root, 12 + counted.snapshot_array_size), Ok(all));
        assert_eq!(client.snapshots(root, 15), Err(NtStatus::INVALID_PARAMETER));

        for restarted in [false, true] {
            if restarted {
                daemon.kill();
                daemon = place.start();
                client = daemon.mount("v", Dialect::SMB3_1_1);
            }
            for (time, expected) in times.iter().zip(["first", "second"]) {
                // Without the fraction of a second, as in a token.
                for time in [*time, time / 10_000_000 * 10_000_000] {
                    let file = client.open_of(time, "f", READ).unwrap();
                    assert_eq!(client.read(file, 0, 100).unwrap(), expected.as_bytes());
                    assert_eq!(client.write(file, 0, b"x"), NtStatus::ACCESS_DENIED);
                    assert_eq!(client.close(file), NtStatus::SUCCESS);
                }
                for (access, status) in [
                    (AccessMask::FILE_WRITE_DATA, NtStatus::ACCESS_DENIED),
                    (AccessMask::DELETE, NtStatus::ACCESS_DENIED),
                    (AccessMask::WRITE_DAC, NtStatus::ACCESS_DENIED),
                ] {
                    assert_eq!(client.open_of(*time, "f", access), Err(status));
                }
                let none = client.open_of(*time, "new", READ);
                assert_eq!(none, Err(NtStatus::OBJECT_NAME_NOT_FOUND));
                let most = client.open_of(*time, "f", AccessMask::MAXIMUM_ALLOWED).unwrap();
                assert_eq!(client.write(most, 0, b"x"), NtStatus::ACCESS_DENIED);
                assert_eq!(client.close(most), NtStatus::SUCCESS);
            }
            assert_eq!(
                client.open_of(times[0] - 100_000_000, "f", READ),
                Err(NtStatus::OBJECT_NAME_NOT_FOUND)
            );
            assert_eq!(get(&mut client, "f").unwrap(), b"now");
        }
        // Clients of another volume do not see them.
        let mut other = daemon.mount("w", Dialect::SMB3_1_1);
        assert_eq!(other.open_of(times[0], "", READ), Err(NtStatus::OBJECT_NAME_NOT_FOUND));

        // Open files stay readable. The rest of a directory's listing is not returned, and nothing new can be opened.
        let open = client.open_of(times[0], "f", READ).unwrap();
        let [listed, unlisted] = [(); 2].map(|()| client.open_of(times[0], "", READ).unwrap());
        let all = client.list(listed, query_directory::Flags(0), 4096).unwrap().unwrap();
        assert!(all.contains(&"f".to_owned()), "{all:?}");
        delete_snapshot(&mut daemon, "first").unwrap();
        assert_eq!(client.open_of(times[0], "f", READ), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
        for directory in [listed, unlisted] {
            let left = client.list(directory, query_directory::Flags(0), 4096);
            assert_eq!(left, Err(NtStatus::FILE_INVALID));
            assert_eq!(client.close(directory), NtStatus::SUCCESS);
        }
        assert_eq!(client.read(open, 0, 100).unwrap(), b"first");
        assert_eq!(client.close(open), NtStatus::SUCCESS);
        let second = client.open_of(times[1], "f", READ).unwrap();
        assert_eq!(client.read(second, 0, 100).unwrap(), b"second");
        assert_eq!(client.close(second), NtStatus::SUCCESS);

        // A later volume with the same id does not have these snapshots.
        delete_volume(&mut daemon, "v").unwrap();
        daemon.create_volume("v").unwrap();
        let mut client = daemon.mount("v", Dialect::SMB3_1_1);
        assert_eq!(client.open_of(times[1], "f", READ), Err(NtStatus::OBJECT_NAME_NOT_FOUND));
        delete_snapshot(&mut daemon, "second").unwrap();
        for id in ["v", "w"] {
            delete_volume(&mut daemon, id).unwrap();
        }
        daemon.terminate();
        daemon.wait();
    }
}

/// A chain of changes, each of which starts after the previous one is acknowledged: a number is written to the file `a`, then
/// to `b`; then the file of the next number is created, and the previous number's file is removed.
fn chain(client: &mut Client, prefix: &str, ended: &AtomicBool, turns: &AtomicU64) {
    let a = client.open(&format!("{prefix}-a"), CreateDisposition::CREATE).unwrap();
    let b = client.open(&format!("{prefix}-b"), CreateDisposition::CREATE).unwrap();
    for number in 1_u64.. {
        for file in [a, b] {
            assert_eq!(client.write(file, 0, &number.to_le_bytes()), NtStatus::SUCCESS);
        }
        let next = client.open(&format!("{prefix}-{number}"), CreateDisposition::CREATE).unwrap();
        assert_eq!(client.close(next), NtStatus::SUCCESS);
        if number > 1 {
            let last = client.open(&format!("{prefix}-{}", number - 1), CreateDisposition::OPEN).unwrap();
            assert_eq!(client.remove(last), NtStatus::SUCCESS);
        }
        turns.fetch_add(1, Ordering::Relaxed);
        if ended.load(Ordering::Relaxed) {
            return;
        }
    }
}

fn number(client: &mut Client, name: &str) -> u64 {
    match get(client, name) {
        Ok(bytes) => u64::from_le_bytes(bytes.try_into().unwrap()),
        Err(status) => {
            assert_eq!(status, NtStatus::END_OF_FILE, "{name}");
            0
        }
    }
}

#[test]
fn snapshot_under_load_is_consistent_to_a_point_in_time() {
    const CHAINS: usize = 4;
    const SNAPSHOTS: usize = 12;
    let Some(xfs) = Xfs::without_quota() else { return };
    for engine in engines() {
        let place = place(engine, &xfs);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        // Files between those of the chains, so that a copy takes some time.
        let mut client = daemon.mount("v", Dialect::SMB3_1_1);
        for index in 0..1000 {
            put(&mut client, &format!("between-{index}"), b"x");
        }
        let (ended, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let chains: Vec<_> = (0..CHAINS)
            .map(|index| {
                let mut client = daemon.mount("v", Dialect::SMB3_1_1);
                let (ended, turns) = (Arc::clone(&ended), Arc::clone(&turns));
                std::thread::spawn(move || chain(&mut client, &format!("c{index}"), &ended, &turns))
            })
            .collect();
        for index in 0..SNAPSHOTS {
            let before = turns.load(Ordering::Relaxed);
            until("progress of the chains", || (turns.load(Ordering::Relaxed) > before + 20).then_some(()));
            snapshot(&mut daemon, &format!("s{index}"), "v").unwrap();
        }
        daemon.create(of_volume("clone", "v")).unwrap();
        let before = turns.load(Ordering::Relaxed);
        until("progress of the chains", || (turns.load(Ordering::Relaxed) > before + 20).then_some(()));
        ended.store(true, Ordering::Relaxed);
        chains.into_iter().for_each(|chain| chain.join().unwrap());

        let mut volumes = vec!["clone".to_owned()];
        for index in 0..SNAPSHOTS {
            let id = format!("r{index}");
            daemon.create(of_snapshot(&id, &format!("s{index}"))).unwrap();
            volumes.push(id);
        }
        for id in &volumes {
            let names: Vec<String> = std::fs::read_dir(xfs.path().join("volumes").join(id))
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            let mut client = daemon.mount(id, Dialect::SMB3_1_1);
            for index in 0..CHAINS {
                let (a, b) = (format!("c{index}-a"), format!("c{index}-b"));
                let (a, b) = (number(&mut client, &a), number(&mut client, &b));
                assert!(a == b || a == b + 1, "{id}: {a} and then {b}");
                let prefix = format!("c{index}-");
                let mut numbers: Vec<u64> =
                    names.iter().filter_map(|name| name.strip_prefix(&prefix)?.parse().ok()).collect();
                numbers.sort_unstable();
                // The file of `b` may not exist yet, and the previous one may not be removed yet.
                let possible: &[&[u64]] = &[&[b], &[b - 1, b], &[b - 1]];
                assert!(possible.contains(&&*numbers), "{id}: {numbers:?} where {a} and {b} are written");
            }
            drop(client);
            delete_volume(&mut daemon, id).unwrap();
        }
        for index in 0..SNAPSHOTS {
            delete_snapshot(&mut daemon, &format!("s{index}")).unwrap();
        }
        delete_volume(&mut daemon, "v").unwrap();
        daemon.terminate();
        daemon.wait();
    }
}

#[test]
fn unfinished_copies_of_a_killed_server_are_removed_at_startup() {
    const FILES: u64 = 20_000;
    let Some(xfs) = Xfs::without_quota() else { return };
    let place = place(engines()[0], &xfs);
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    let data = xfs.path().join("volumes/v");
    for index in 0..FILES {
        std::fs::write(data.join(index.to_string()), "x").unwrap();
    }
    for (what, path) in [("snapshot", "snapshots/s"), ("clone", "volumes/c")] {
        let copy = xfs.path().join(path);
        let socket = place.socket();
        let copier = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let uri = format!("unix://{}", socket.display());
                let channel = tonic::transport::Endpoint::from_shared(uri).unwrap().connect().await.unwrap();
                let mut admin = api::admin_client::AdminClient::new(channel);
                match what {
                    "snapshot" => {
                        let request = api::CreateSnapshotRequest {
                            snapshot_id: "s".to_owned(),
                            volume_id: "v".to_owned(),
                            labels: Default::default(),
                        };
                        admin.create_snapshot(request).await.map(drop)
                    }
                    _ => admin.create_volume(of_volume("c", "v")).await.map(drop),
                }
            })
        });
        let begun = || std::fs::read_dir(&copy).is_ok_and(|found| found.count() > 100);
        until("the start of the copy", || begun().then_some(()));
        // In the meantime the copy is not listed and cannot be removed, and its source stays.
        assert_eq!(delete_volume(&mut daemon, "v").unwrap_err().code(), Code::Aborted);
        assert_eq!(listed(&mut daemon, "", ""), [""; 0]);
        match what {
            "snapshot" => {
                assert_eq!(snapshot(&mut daemon, "s", "v").unwrap_err().code(), Code::Aborted);
                assert_eq!(delete_snapshot(&mut daemon, "s").unwrap_err().code(), Code::Aborted);
            }
            _ => {
                assert_eq!(daemon.create(of_volume("c", "v")).unwrap_err().code(), Code::Aborted);
                assert_eq!(delete_volume(&mut daemon, "c").unwrap_err().code(), Code::Aborted);
            }
        }
        daemon.kill();
        copier.join().unwrap().unwrap_err();
        assert!(copy.exists(), "it was killed during the copy");
        daemon = place.start();
        assert!(!copy.exists());
        assert_eq!(listed(&mut daemon, "", ""), [""; 0]);
        until("the removal of the rest", || is_empty(&xfs.path().join(".forebay/trash")).then_some(()));
        // The client retries its request.
        match what {
            "snapshot" => drop(snapshot(&mut daemon, "s", "v").unwrap()),
            _ => drop(daemon.create(of_volume("c", "v")).unwrap()),
        }
        assert_eq!(std::fs::read_dir(&copy).unwrap().count() as u64, FILES);
        delete_snapshot(&mut daemon, "s").unwrap();
    }
}

#[test]
fn group_snapshots_are_consistent_to_a_point_in_time() {
    const GROUPS: usize = 8;
    let Some(xfs) = Xfs::without_quota() else { return };
    let place = place(engines()[0], &xfs);
    let mut daemon = place.start();
    let volumes = ["v0", "v1", "v2"];
    for volume in volumes {
        daemon.create_volume(volume).unwrap();
        let mut client = daemon.mount(volume, Dialect::SMB3_1_1);
        (0..300).for_each(|index| put(&mut client, &format!("between-{index}"), b"x"));
    }
    // One client changes the volumes in turn. Each change starts after the previous one is acknowledged.
    let mut clients: Vec<Client> = volumes.iter().map(|id| daemon.mount(id, Dialect::SMB3_1_1)).collect();
    let (ended, turns) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let writer = {
        let (ended, turns) = (Arc::clone(&ended), Arc::clone(&turns));
        std::thread::spawn(move || {
            let files: Vec<_> =
                clients.iter_mut().map(|c| c.open("n", CreateDisposition::CREATE).unwrap()).collect();
            for number in 1_u64.. {
                for (client, file) in clients.iter_mut().zip(&files) {
                    assert_eq!(client.write(*file, 0, &number.to_le_bytes()), NtStatus::SUCCESS);
                }
                turns.store(number, Ordering::Relaxed);
                if ended.load(Ordering::Relaxed) {
                    return;
                }
            }
        })
    };
    for index in 0..GROUPS {
        let before = turns.load(Ordering::Relaxed);
        until("progress of the writer", || (turns.load(Ordering::Relaxed) > before + 20).then_some(()));
        let ids: Vec<String> = volumes.iter().map(|volume| format!("g{index}-{volume}")).collect();
        let members: Vec<(&str, &str)> = ids.iter().map(|id| &**id).zip(volumes).collect();
        assert_eq!(group(&mut daemon, &format!("g{index}"), &members).unwrap(), ids);
    }
    ended.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    for index in 0..GROUPS {
        let numbers = volumes.map(|volume| {
            let id = format!("g{index}-{volume}");
            daemon.create(of_snapshot("r", &id)).unwrap();
            let found = number(&mut daemon.mount("r", Dialect::SMB3_1_1), "n");
            delete_volume(&mut daemon, "r").unwrap();
            found
        });
        let (first, last) = (numbers[0], numbers[2]);
        assert!(numbers.is_sorted_by(|a, b| a >= b) && first <= last + 1, "g{index}: {numbers:?}");
        delete_group(&mut daemon, &format!("g{index}")).unwrap();
    }
    assert_eq!(listed(&mut daemon, "", ""), [""; 0]);
}

#[test]
fn snapshot_group_is_created_and_deleted_as_a_whole() {
    let Some(xfs) = Xfs::without_quota() else { return };
    let place = place(engines()[0], &xfs);
    let mut daemon = place.start();
    for volume in ["v", "w"] {
        daemon.create_volume(volume).unwrap();
        put(&mut daemon.mount(volume, Dialect::SMB3_1_1), "f", volume.as_bytes());
    }
    let both = [("s-v", "v"), ("s-w", "w")];
    assert_eq!(group(&mut daemon, "g", &both).unwrap(), ["s-v", "s-w"]);
    assert_eq!(group(&mut daemon, "g", &[both[1], both[0]]).unwrap(), ["s-w", "s-v"]);
    snapshot(&mut daemon, "single", "v").unwrap();
    for (id, members, code) in [
        ("g", vec![both[0]], Code::AlreadyExists),
        ("g", vec![both[0], ("s-x", "w")], Code::AlreadyExists),
        ("h", vec![both[0]], Code::AlreadyExists),
        ("h", vec![("h-v", "v"), ("single", "w")], Code::AlreadyExists),
        ("h", vec![("h-v", "v"), ("h-x", "x")], Code::NotFound),
        ("h", vec![("h-v", "v"), ("h-2", "v")], Code::InvalidArgument),
        ("h", vec![("h-v", "v"), ("h-v", "w")], Code::InvalidArgument),
        ("h", vec![], Code::InvalidArgument),
        ("H", vec![("h-v", "v")], Code::InvalidArgument),
    ] {
        assert_eq!(group(&mut daemon, id, &members).unwrap_err().code(), code, "{id} of {members:?}");
    }
    // None of the refused ones has left a snapshot.
    assert_eq!(listed(&mut daemon, "h-v", ""), [""; 0]);
    assert_eq!(snapshot(&mut daemon, "s-v", "v").unwrap_err().code(), Code::AlreadyExists);
    assert_eq!(delete_snapshot(&mut daemon, "s-v").unwrap_err().code(), Code::InvalidArgument);

    // The server is killed after it has begun to delete one of them: the next start removes the other, too.
    daemon.kill();
    let record = xfs.path().join(".forebay/snapshots/s-w.json");
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(text.contains("\"deleting\": false"), "{text}");
    std::fs::write(&record, text.replace("\"deleting\": false", "\"deleting\": true")).unwrap();
    let mut daemon = place.start();
    assert_eq!(listed(&mut daemon, "", ""), ["single"]);
    assert_eq!(group(&mut daemon, "g", &both).unwrap(), ["s-v", "s-w"]);
    daemon.create(of_snapshot("r", "s-w")).unwrap();
    assert_eq!(get(&mut daemon.mount("r", Dialect::SMB3_1_1), "f").unwrap(), b"w");
    for id in ["g", "g", "never-there"] {
        delete_group(&mut daemon, id).unwrap();
    }
    assert_eq!(listed(&mut daemon, "", ""), ["single"]);
}

#[test]
fn file_system_without_reflinks_is_reported_and_left_unchanged() {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let place = Place::new(engines()[0]);
    place.configure("127.0.0.1:0", memory.path());
    let mut daemon = place.start();
    daemon.create_volume("v").unwrap();
    for status in [snapshot(&mut daemon, "s", "v").map(drop), daemon.create(of_volume("c", "v")).map(drop)] {
        let status = status.unwrap_err();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("reflink=1"), "{status}");
    }
    assert!(!memory.path().join("snapshots").exists() && !memory.path().join("volumes/c").exists());
    // Its clients have not been affected.
    put(&mut daemon.mount("v", Dialect::SMB3_1_1), "f", b"x");
}
