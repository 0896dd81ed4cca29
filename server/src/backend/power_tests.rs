//! Tests what survives a loss of power after the reply: the rule of `directory::durability`, on a file system that really loses
//! data.

use std::sync::Arc;

use forebay_smb::fs::{
    BasicInfo, Ea, Frame, FsHandle, FsOpKind, FsReply, ObjectKind, OpenMode, OpenRequest, RelPath, Unlink,
};
use forebay_smb::status::NtStatus;

use super::directory::{Promise, Volume};
use crate::buffers::BufferPool;
use crate::scratch_disk::{Disk, exists};

struct Bytes(Vec<u8>);

impl Frame for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A volume in the root of a disk.
struct Served {
    volume: FsHandle,
    buffers: BufferPool,
}

impl Served {
    fn new(disk: &Disk, promise: Promise) -> Self {
        let volume = Volume::open_with(&disk.path(), promise, None).expect("a volume").handle();
        Self { volume, buffers: BufferPool::default() }
    }

    fn run(&self, operation: FsOpKind) -> Result<FsReply, NtStatus> {
        super::execute(operation, &self.buffers)
    }

    fn open(&self, path: &str, kind: ObjectKind) -> FsHandle {
        let request = OpenRequest {
            path: RelPath::new(path).expect("a path"),
            mode: OpenMode::Either,
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
        match self.run(FsOpKind::Open { volume: self.volume.clone(), request }) {
            Ok(FsReply::Opened(opened)) => opened.handle,
            _ => panic!("{path} is opened"),
        }
    }

    fn file(&self, path: &str, content: &[u8]) -> FsHandle {
        let handle = self.open(path, ObjectKind::File);
        let frame = Arc::new(Bytes(content.to_vec()));
        let (range, offset) = (0..content.len(), 0);
        let write = FsOpKind::Write { handle: handle.clone(), offset, frame, range, write_through: false };
        assert!(matches!(self.run(write), Ok(FsReply::Written(_))));
        handle
    }

    fn done(&self, operation: FsOpKind) {
        assert!(matches!(self.run(operation), Ok(FsReply::Done)));
    }

    fn unlink(&self, handle: FsHandle) {
        self.done(FsOpKind::Close { handle, unlink: Some(Unlink::unregistered()), stat: false });
    }
}

/// Returns a disk with the initial files of both kinds of volumes, all on stable storage.
fn prepared_disk(test: &str) -> Option<Disk> {
    let disk = Disk::new(test)?;
    let path = disk.path();
    std::fs::create_dir(path.join("directory")).expect("made");
    for (name, content) in [("file", vec![1; 9000]), ("source", vec![2; 8192]), ("target", vec![3; 8192])] {
        std::fs::write(path.join(name), content).expect("written");
    }
    rustix::fs::syncfs(std::fs::File::open(&path).expect("the root")).expect("synced");
    Some(disk)
}

#[test]
fn write_through_removals_survive_a_power_loss() {
    let Some(disk) = prepared_disk("write_through_removals_survive_a_power_loss") else { return };
    let served = Served::new(&disk, Promise::AtReply);
    served.unlink(served.open("file", ObjectKind::File));
    served.unlink(served.open("directory", ObjectKind::Directory));
    drop(served);
    disk.lose_power();
    assert!(!exists(disk.path().join("file")), "a deleted file has come back");
    assert!(!exists(disk.path().join("directory")), "a deleted directory has come back");
}

#[test]
fn write_through_clones_survive_a_power_loss() {
    let Some(disk) = prepared_disk("write_through_clones_survive_a_power_loss") else { return };
    let served = Served::new(&disk, Promise::AtReply);
    let (source, target) = (served.open("source", ObjectKind::File), served.open("target", ObjectKind::File));
    let (source_offset, target_offset, length) = (0, 0, 8192);
    served.done(FsOpKind::CloneRange { source, source_offset, target, target_offset, length });
    drop(served);
    disk.lose_power();
    assert!(std::fs::read(disk.path().join("target")).expect("read") == vec![2; 8192], "the clone is lost");
}

#[test]
fn write_through_attributes_and_times_survive_a_power_loss() {
    let test = "write_through_attributes_and_times_survive_a_power_loss";
    let Some(disk) = prepared_disk(test) else { return };
    let time = 133_000_000_000_000_000;
    let served = Served::new(&disk, Promise::AtReply);
    let info = BasicInfo {
        last_write: Some(time),
        creation: Some(time + 10),
        attributes: Some(0x1),
        ..BasicInfo::default()
    };
    served.done(FsOpKind::SetBasic { handle: served.open("file", ObjectKind::File), info });
    drop(served);
    disk.lose_power();
    let served = Served::new(&disk, Promise::AtReply);
    let Ok(FsReply::Stat(stat)) =
        served.run(FsOpKind::Stat { handle: served.open("file", ObjectKind::File) })
    else {
        panic!("stat answers Stat")
    };
    assert_eq!((stat.times.last_write, stat.times.creation, stat.attributes), (time, time + 10, 0x1));
}

#[test]
fn write_through_extended_attributes_survive_a_power_loss() {
    let test = "write_through_extended_attributes_survive_a_power_loss";
    let Some(disk) = prepared_disk(test) else { return };
    let served = Served::new(&disk, Promise::AtReply);
    let file = served.open("file", ObjectKind::File);
    let eas = vec![Ea { name: b"epoch".to_vec(), value: b"12".to_vec() }];
    served.done(FsOpKind::SetEas { handle: file, eas: eas.clone() });
    drop(served);
    disk.lose_power();
    let served = Served::new(&disk, Promise::AtReply);
    match served.run(FsOpKind::GetEas { handle: served.open("file", ObjectKind::File) }) {
        Ok(FsReply::Eas(found)) => assert_eq!(found, eas),
        _ => panic!("a query answers Eas"),
    }
}

#[test]
fn write_through_creates_and_writes_survive_a_power_loss() {
    let Some(disk) = prepared_disk("write_through_creates_and_writes_survive_a_power_loss") else { return };
    let served = Served::new(&disk, Promise::AtReply);
    served.open("made", ObjectKind::Directory);
    let written = served.file("made/file", &[7; 5000]);
    served.done(FsOpKind::SetEndOfFile { handle: written, size: 3000 });
    served.done(FsOpKind::SetEndOfFile { handle: served.open("file", ObjectKind::File), size: 0 });
    drop(served);
    disk.lose_power();
    assert!(std::fs::read(disk.path().join("made/file")).expect("it is there") == vec![7; 3000]);
    assert!(std::fs::read(disk.path().join("file")).expect("it is there").is_empty());
}

/// FLUSH, renames and links are durable in every volume.
#[test]
fn flushed_renamed_and_linked_files_survive_a_power_loss_in_every_volume() {
    let test = "flushed_renamed_and_linked_files_survive_a_power_loss_in_every_volume";
    for promise in [Promise::AtFlush, Promise::AtReply] {
        let Some(disk) = prepared_disk(test) else { return };
        let served = Served::new(&disk, promise);
        let file = served.file("new", &[7; 5000]);
        served.done(FsOpKind::Flush { handle: file.clone() });
        let to = RelPath::new("directory/renamed").expect("a path");
        served.done(FsOpKind::Rename { handle: file.clone(), to, replace: false });
        // Replaces another file; the name must exist at every moment.
        let to = RelPath::new("file").expect("a path");
        served.done(FsOpKind::Link { handle: file.clone(), to, replace: true });
        drop((served, file));
        disk.lose_power();
        let read = |name: &str| std::fs::read(disk.path().join(name)).expect("it is there");
        assert!(read("directory/renamed") == vec![7; 5000] && read("file") == vec![7; 5000], "{promise:?}");
        assert!(!exists(disk.path().join("new")), "{promise:?}");
    }
}
