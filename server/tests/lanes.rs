//! Operations that wait for the file system do not delay look-ups. On a frozen XFS, every change of a name waits.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(dead_code, reason = "the disk can do more than is needed here")]

#[path = "../src/scratch_disk.rs"]
mod scratch_disk;
mod support;

use std::path::PathBuf;
use std::process::Command;

use forebay_smb::status::NtStatus;
use forebay_smb::wire::create::CreateDisposition;
use forebay_smb::wire::negotiate::Dialect;
use forebay_smb::wire::{AccessMask, Command as Smb};
use scratch_disk::Disk;
use support::{Client, Place};

/// Thaws the file system when dropped. Until then, a process that changes something cannot be killed.
struct Frozen(PathBuf);

impl Frozen {
    fn new(path: PathBuf) -> Self {
        let status = Command::new("fsfreeze").arg("-f").arg(&path).status().unwrap();
        assert!(status.success());
        Self(path)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.0).status();
    }
}

/// Looks up a name that is not in the kernel's cache, so that a thread has to do it.
fn look_up(client: &mut Client, name: &str) {
    // Read access only: for write access, the kernel waits for the frozen file system before it looks up the name.
    let body = support::create_body(name, CreateDisposition::OPEN, AccessMask::FILE_READ_DATA);
    assert_eq!(client.call(Smb::CREATE, &body).status(), NtStatus::OBJECT_NAME_NOT_FOUND);
}

fn engines() -> impl Iterator<Item = &'static str> {
    let uring = forebay_server::io::uring::probe().is_ok();
    ["readiness", "io_uring"].into_iter().filter(move |engine| *engine == "readiness" || uring)
}

#[test]
fn changes_blocked_on_the_file_system_do_not_delay_lookups() {
    let Some(disk) = Disk::new("changes_blocked_on_the_file_system_do_not_delay_lookups") else { return };
    for engine in engines() {
        let place = Place::new(engine);
        let pool = disk.path().join(engine);
        std::fs::create_dir(&pool).unwrap();
        place.configure("127.0.0.1:0", &pool);
        let mut daemon = place.start();
        daemon.create_volume("v").unwrap();
        let mut flood = daemon.mount("v", Dialect::SMB2_1);
        let mut other = daemon.mount("v", Dialect::SMB2_1);
        let renamed: Vec<_> =
            (0..64).map(|i| flood.open(&format!("r{i}"), CreateDisposition::CREATE).unwrap()).collect();
        let frozen = Frozen::new(disk.path());
        for (i, file) in renamed.iter().enumerate() {
            flood.send_rename(*file, &format!("renamed{i}"));
        }
        let create = |flood: &mut Client, i| {
            let (disposition, access) = (CreateDisposition::CREATE, AccessMask::FILE_ALL_ACCESS);
            flood.send(Smb::CREATE, 1, &support::create_body(&format!("c{i}"), disposition, access));
        };
        (0..64).for_each(|i| create(&mut flood, i));
        look_up(&mut other, "nothing 1");
        // Also on the connection with the waiting requests: this one is answered first there.
        look_up(&mut flood, "nothing 2");
        // More requests than one connection may have in a lane: only this connection is held back.
        (64..400).for_each(|i| create(&mut flood, i));
        for i in 3..20 {
            look_up(&mut other, &format!("nothing {i}"));
        }
        drop(frozen);
        for _ in 0..64 + 400 {
            assert_eq!(flood.answer().status(), NtStatus::SUCCESS, "{engine}");
        }
        daemon.terminate();
        assert_eq!(daemon.wait().code(), Some(0), "{engine}");
    }
}
