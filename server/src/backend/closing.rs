//! Tests which thread closes a file if an event loop drops its last handle.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use forebay_smb::fs::{FsHandle, FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest, RelPath};

use super::directory::{Volume, file};
use crate::buffers::BufferPool;
use crate::lanes::{ClosesElsewhere, Descriptor, Lane, Lanes, Origin};
use crate::limits::{CLOSE_THREADS, CLOSES_WAITING_MAX};

/// Starts lanes that close nothing until the senders are dropped.
fn held_up() -> (Lanes, Vec<Sender<()>>) {
    let lanes = Lanes::start(1).expect("threads");
    let hold = |_| {
        let (release, held) = channel();
        let job = move || {
            let _ = held.recv();
        };
        lanes.queues().submit(Lane::Close, Origin::Server, job);
        release
    };
    let releases = (0..CLOSE_THREADS).map(hold).collect();
    (lanes, releases)
}

fn open(root: &Path, kind: ObjectKind) -> FsHandle {
    let request = OpenRequest {
        path: RelPath::new("it").expect("a path"),
        mode: OpenMode::New,
        kind,
        read: true,
        write: true,
        write_through: false,
        attributes: 0,
        allocation_size: 0,
        ownership: None,
        stream: None,
        descriptor: None,
        checked: true,
    };
    let volume = Volume::open(root).expect("a volume").handle();
    match super::execute(FsOpKind::Open { volume, request }, &BufferPool::default()) {
        Ok(FsReply::Opened(opened)) => opened.handle,
        _ => panic!("opened"),
    }
}

/// Returns a handle, the `/proc` path of its descriptor, and its inode number.
fn opened(root: &Path, kind: ObjectKind) -> (FsHandle, PathBuf, u64) {
    let handle = open(root, kind);
    let by_fd = {
        let file = file(&handle).expect("a file");
        PathBuf::from(format!("/proc/self/fd/{}", file.as_fd().as_raw_fd()))
    };
    let inode = std::fs::metadata(&by_fd).expect("open").ino();
    (handle, by_fd, inode)
}

/// Compares the inode, because other tests of this process may reuse the descriptor number.
fn is_open(by_fd: &Path, inode: u64) -> bool {
    std::fs::metadata(by_fd).is_ok_and(|found| found.ino() == inode)
}

#[test]
fn file_dropped_on_an_event_loop_is_closed_on_another_thread() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (lanes, releases) = held_up();
    let (handle, by_fd, inode) = opened(scratch.path(), ObjectKind::File);
    std::fs::remove_file(scratch.path().join("it")).expect("removed");
    let elsewhere = ClosesElsewhere::on_this_thread(lanes.queues());
    drop(handle);
    assert!(is_open(&by_fd, inode), "closed on a thread that must not wait");
    drop(elsewhere);
    drop(releases);
    let until = Instant::now() + Duration::from_secs(20);
    while is_open(&by_fd, inode) {
        assert!(Instant::now() < until, "it is never closed");
        std::thread::yield_now();
    }
}

#[test]
fn directories_and_drops_outside_event_loops_are_closed_in_place() {
    let scratch = tempfile::tempdir().expect("a directory");
    let (lanes, releases) = held_up();
    let (handle, by_fd, inode) = opened(scratch.path(), ObjectKind::File);
    drop(handle);
    assert!(!is_open(&by_fd, inode), "no event loop is here");
    std::fs::remove_file(scratch.path().join("it")).expect("removed");
    let _elsewhere = ClosesElsewhere::on_this_thread(lanes.queues());
    let (handle, by_fd, inode) = opened(scratch.path(), ObjectKind::Directory);
    drop(handle);
    assert!(!is_open(&by_fd, inode), "a directory takes no time");
    drop(releases);
}

#[test]
fn file_dropped_after_the_lanes_ended_is_closed() {
    let scratch = tempfile::tempdir().expect("a directory");
    let lanes = Lanes::start(1).expect("threads");
    let _elsewhere = ClosesElsewhere::on_this_thread(lanes.queues());
    drop(lanes);
    let (handle, by_fd, inode) = opened(scratch.path(), ObjectKind::File);
    let kept: Arc<_> = file(&handle).expect("a file");
    drop(handle);
    assert!(is_open(&by_fd, inode), "not the last");
    drop(kept);
    assert!(!is_open(&by_fd, inode));
}

#[test]
fn closes_are_late_at_the_limit_of_waiting_descriptors() {
    let (lanes, releases) = held_up();
    let queues = lanes.queues();
    let elsewhere = ClosesElsewhere::on_this_thread(queues);
    let file = std::fs::File::open("/dev/null").expect("there");
    // The jobs that block the lane may not have started yet.
    for _ in 0..CLOSES_WAITING_MAX - CLOSE_THREADS {
        assert!(!queues.closes_are_late());
        queues.submit(Lane::Close, Origin::Server, || ());
    }
    for _ in 0..CLOSE_THREADS {
        drop(Descriptor::new(file.as_fd().try_clone_to_owned().expect("a descriptor")));
    }
    assert!(queues.closes_are_late());
    drop(elsewhere);
    drop(releases);
    let until = Instant::now() + Duration::from_secs(20);
    while queues.closes_are_late() {
        assert!(Instant::now() < until, "nothing is closed");
        std::thread::yield_now();
    }
}
