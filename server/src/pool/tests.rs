use std::collections::BTreeMap;

use forebay_smb::fs::{FsHandle, FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest, RelPath};

use super::*;
use crate::buffers::BufferPool;
use crate::qos::Qos;
use crate::scratch_disk::Disk;
use crate::volume::{Phase, Protection};

fn section(path: &Path) -> PoolSection {
    PoolSection {
        name: "p".to_owned(),
        path: path.to_owned(),
        create: false,
        existing: false,
        quota: PoolQuota::None,
        overcommit: 1.0,
        write_through: false,
        nvmeof: None,
    }
}

fn record(id: &str, quota: Quota) -> Record {
    Record {
        volume_id: id.to_owned(),
        capacity_bytes: 64 << 20,
        quota,
        project: None,
        protection: Protection::Optional,
        accounts: Vec::new(),
        labels: BTreeMap::new(),
        created: 0,
        serial: 1,
        qos: Qos::default(),
        source: None,
        root: None,
        phase: Phase::Ready,
    }
}

#[test]
fn missing_directory_is_named_in_the_error() {
    let error = Pool::open(&section(Path::new("/nowhere/at/all"))).expect_err("missing").to_string();
    assert!(error.contains("/nowhere/at/all does not exist"), "{error}");
}

#[test]
fn pool_that_must_exist_is_not_created() {
    let scratch = tempfile::tempdir().expect("a directory");
    let expected = PoolSection { create: true, existing: true, ..section(scratch.path()) };
    let error = Pool::open(&expected).expect_err("its disk is away").to_string();
    assert!(error.contains("is its disk mounted?"), "{error}");
    assert_eq!(std::fs::read_dir(scratch.path()).expect("listed").count(), 0, "nothing is written");
    drop(Pool::open(&section(scratch.path())).expect("made"));
    assert!(Pool::open(&expected).is_ok());
}

#[test]
fn two_servers_never_share_a_pool() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (first, _) = Pool::open(&section(scratch.path())).expect("opened");
    assert!(matches!(Pool::open(&section(scratch.path())), Err(PoolError::Locked { .. })));
    drop(first);
    assert!(Pool::open(&section(scratch.path())).is_ok());
}

#[test]
fn volumes_survive_a_restart_despite_one_damaged_record() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
    let guid = pool.server_guid().expect("a guid");
    pool.create(record("a", Quota::None)).expect("made");
    pool.create(record("b", Quota::None)).expect("made");
    drop(pool);
    std::fs::write(scratch.path().join(".forebay/volumes/b.json"), "{").expect("damaged");
    std::fs::write(scratch.path().join(".forebay/volumes/c.tmp"), "{").expect("left behind");
    let (pool, unserved) = Pool::open(&section(scratch.path())).expect("opened");
    assert_eq!(pool.records.keys().collect::<Vec<_>>(), ["a"]);
    assert!(unserved.len() == 1 && unserved[0].name == "b" && unserved[0].reason.contains("damaged"));
    assert!(pool.serve(&pool.records["a"]).is_ok());
    assert_eq!(pool.server_guid().expect("a guid"), guid);
}

#[test]
fn hard_quota_is_refused_on_tmpfs() {
    // tmpfs enforces no project quota.
    let scratch = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
    let error = pool.create(record("a", Quota::Hard)).expect_err("refused").to_string();
    assert!(error.contains("prjquota") && error.contains("quota = \"none\""), "{error}");
    assert!(!pool.data_path("a").exists());
}

#[test]
fn temporary_links_of_a_killed_server_are_removed() {
    let scratch = tempfile::tempdir().expect("a directory");
    drop(Pool::open(&section(scratch.path())).expect("opened"));
    let left = scratch.path().join(".forebay/links/.forebay-link-7-0");
    std::fs::write(&left, "a file's second name").expect("made");
    drop(Pool::open(&section(scratch.path())).expect("opened"));
    assert!(!left.exists());
}

#[test]
fn deletion_resumes_after_a_kill_at_any_point() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
    for id in ["marked", "moved", "whole"] {
        pool.create(record(id, Quota::None)).expect("made");
        std::fs::write(pool.data_path(id).join("file"), "data").expect("written");
    }
    for id in ["marked", "moved"] {
        let mut record = pool.records[id].clone();
        record.phase = Phase::Deleting;
        record.write(&pool.records_path()).expect("marked");
    }
    std::fs::rename(pool.data_path("moved"), pool.trash_path().join("moved.0.x")).expect("moved");
    drop(pool);
    let (mut pool, unserved) = Pool::open(&section(scratch.path())).expect("opened");
    assert!(unserved.is_empty());
    assert_eq!(pool.records.keys().collect::<Vec<_>>(), ["whole"]);
    assert_eq!(pool.trash().len(), 2);
    pool.delete("whole").expect("deleted");
    pool.delete("whole").expect("deleted already");
    for path in pool.trash() {
        empty(&path).expect("removed");
    }
    assert!(pool.trash().is_empty());
    assert_eq!(std::fs::read_dir(scratch.path().join("volumes")).expect("listed").count(), 0);
    assert_eq!(std::fs::read_dir(pool.records_path()).expect("listed").count(), 0);
}

#[test]
fn volume_that_filled_its_pool_can_be_deleted() {
    let Some(disk) = Disk::new("volume_that_filled_its_pool_can_be_deleted") else { return };
    let (mut pool, _) = Pool::open(&section(&disk.path())).expect("opened");
    pool.create(record("full", Quota::None)).expect("made");
    pool.create(record("other", Quota::None)).expect("made");
    drop(pool);
    disk.fill();
    // The pool is full when the server takes it over.
    let (mut pool, unserved) = Pool::open(&section(&disk.path())).expect("opened");
    assert!(unserved.is_empty(), "{unserved:?}");
    pool.predecessors(1).expect("noted, or not");
    pool.delete("full").expect("the reserve has space for it");
    drop(pool);
    let (pool, unserved) = Pool::open(&section(&disk.path())).expect("opened");
    assert!(unserved.is_empty(), "{unserved:?}");
    assert_eq!(pool.records.keys().collect::<Vec<_>>(), ["other"]);
}

#[test]
fn full_pool_without_a_links_directory_is_served() {
    let name = "full_pool_without_a_links_directory_is_served";
    let Some(disk) = Disk::new(name) else { return };
    let (mut pool, _) = Pool::open(&section(&disk.path())).expect("opened");
    pool.create(record("a", Quota::None)).expect("made");
    let [a, b] = ["a", "b"].map(|name| pool.data_path("a").join(name));
    std::fs::write(&a, "a").and_then(|()| std::fs::write(&b, "b")).expect("there is space");
    drop(pool);
    let links = disk.path().join(".forebay/links");
    std::fs::remove_dir(&links).expect("as before it was made");
    disk.fill();
    // Also use up preallocated inodes, and space for a name of that length.
    let names = (0_u32..10_000).map(|nth| disk.path().join(".forebay").join(nth.to_string()));
    let made: Vec<PathBuf> = names.take_while(|path| std::fs::create_dir(path).is_ok()).collect();
    let full = std::fs::create_dir(&links).expect_err("there is no space");
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    let (pool, unserved) = Pool::open(&section(&disk.path())).expect("opened");
    assert!(unserved.is_empty(), "{unserved:?}");
    // A link still replaces a name, through the volume's own directory.
    let volume = pool.serve(&pool.records["a"]).expect("served").handle();
    replace_by_link(&volume, "a", "b");
    assert_eq!(std::fs::read(&b).expect("it is there"), b"a");
    assert_eq!(std::fs::read_dir(pool.data_path("a")).expect("listed").count(), 2);
    drop((volume, pool));
    for path in made {
        std::fs::remove_dir(path).expect("removed");
    }
    std::fs::remove_dir_all(disk.path().join("filler")).expect("removed");
    let (pool, _) = Pool::open(&section(&disk.path())).expect("opened");
    assert!(links.is_dir(), "there is space now");
    let volume = pool.serve(&pool.records["a"]).expect("served").handle();
    replace_by_link(&volume, "a", "b");
}

/// Replaces one name of the volume by a hard link to another file.
fn replace_by_link(volume: &FsHandle, from: &str, to: &str) {
    let request = OpenRequest {
        path: RelPath::new(from).expect("a path"),
        mode: OpenMode::Existing,
        kind: ObjectKind::File,
        read: true,
        write: false,
        write_through: false,
        attributes: 0,
        allocation_size: 0,
        ownership: None,
        stream: None,
        descriptor: None,
        checked: true,
    };
    let run = |operation| crate::backend::execute(operation, &BufferPool::default());
    let opened = run(FsOpKind::Open { volume: volume.clone(), request });
    let Ok(FsReply::Opened(opened)) = opened else { panic!("it is there") };
    let to = RelPath::new(to).expect("a path");
    let linked = run(FsOpKind::Link { handle: opened.handle, to, replace: true });
    assert!(matches!(linked, Ok(FsReply::Done)), "{:?}", linked.err());
}

#[test]
fn data_without_a_record_is_never_adopted() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
    std::fs::create_dir(pool.data_path("a")).expect("made");
    std::fs::write(pool.data_path("a").join("precious"), "data").expect("written");
    assert!(matches!(pool.create(record("a", Quota::None)), Err(PoolError::Orphan { .. })));
    assert!(pool.data_path("a").join("precious").exists());
    std::fs::create_dir(pool.data_path("b")).expect("left by an attempt that was cut off");
    pool.create(record("b", Quota::None)).expect("made");
}

#[test]
fn hard_quota_is_refused_without_project_quota() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (mut pool, _) = Pool::open(&section(scratch.path())).expect("opened");
    assert!(!pool.enforces_quota(), "no temporary folder is mounted with project quota");
    assert!(matches!(pool.create(record("q", Quota::Hard)), Err(PoolError::NoQuota { .. })));
}

#[test]
fn hard_quota_is_enforced_and_can_grow() {
    let Some(xfs) = forebay_testing::Xfs::new() else { return };
    quota::obey_limits().expect("as the daemon does");
    let (mut pool, _) = Pool::open(&section(&xfs.path())).expect("opened");
    assert!(pool.enforces_quota());
    pool.create(record("q", Quota::Hard)).expect("made");
    pool.create(record("r", Quota::Hard)).expect("made");
    assert_ne!(pool.records["q"].project, pool.records["r"].project);
    let volume = pool.serve(&pool.records["q"]).expect("served");
    assert_eq!(volume.space().expect("space").total, 64 << 20);
    let file = pool.data_path("q").join("file");
    let mut written = 0_u64;
    let error = loop {
        use std::io::Write;
        let mut out = std::fs::OpenOptions::new().append(true).create(true).open(&file).expect("opened");
        match out.write(&[1; 1 << 20]).and_then(|n| out.sync_all().map(|()| n)) {
            Ok(n) => written += n as u64,
            Err(error) => break error,
        }
        assert!(written <= 64 << 20, "the limit does not hold");
    };
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    assert!(matches!(errno, Some(Errno::NOSPC | Errno::DQUOT)), "{error}");
    assert!(written >= 60 << 20, "{written} is far below the limit");
    assert!(pool.usage(&pool.records["q"]).bytes >= written);
    let mut larger = pool.records["q"].clone();
    larger.capacity_bytes = 80 << 20;
    pool.update(larger).expect("grown");
    assert_eq!(volume.space().expect("space").total, 80 << 20);
    std::fs::write(pool.data_path("q").join("more"), vec![1; 10 << 20]).expect("fits now");
    pool.delete("q").expect("deleted");
    for path in pool.trash() {
        empty(&path).expect("removed");
    }
}
