//! Named streams.

use forebay_smb::fs::{StreamEntry, StreamName};

use super::*;

fn name(name: &str) -> StreamName {
    StreamName::new(name).expect("a name")
}

impl Fixture {
    fn open_stream(&self, path: &str, stream: &str, mode: OpenMode) -> Result<Opened, NtStatus> {
        self.open(OpenRequest { mode, stream: Some(Box::new(name(stream))), ..request(path) })
    }

    fn stream(&self, path: &str, stream: &str) -> FsHandle {
        self.open_stream(path, stream, OpenMode::Either).expect("opened").handle
    }

    fn streams(&self, handle: &FsHandle) -> Vec<(String, u64)> {
        match self.run(FsOpKind::Streams { handle: handle.clone() }) {
            Ok(FsReply::Streams(streams)) => {
                let entry = |entry: StreamEntry| (entry.name.as_str().to_owned(), entry.size);
                streams.into_iter().map(entry).collect()
            }
            _ => panic!("a query answers Streams"),
        }
    }

    fn set_end(&self, handle: &FsHandle, size: u64) -> Result<(), NtStatus> {
        self.done(FsOpKind::SetEndOfFile { handle: handle.clone(), size })
    }

    fn rename_stream(&self, handle: &FsHandle, to: Option<&str>, replace: bool) -> Result<(), NtStatus> {
        self.done(FsOpKind::RenameStream { handle: handle.clone(), to: to.map(name), replace })
    }

    fn overwrite(&self, handle: &FsHandle, streams: bool) {
        self.done(FsOpKind::Overwrite { handle: handle.clone(), streams }).expect("overwritten");
    }
}

#[test]
fn opening_a_stream_can_create_it_and_its_file() {
    let f = Fixture::new();
    let open = |mode| f.open_stream("a", "s", mode);
    assert_eq!(open(OpenMode::Existing).err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND), "no file");
    let made = open(OpenMode::Either).expect("made");
    assert!(made.created && made.file.as_ref().is_some_and(|file| file.created));
    let of_file = f.stat_path("a").expect("there");
    assert_eq!(made.stat.key.file(), of_file.key);
    assert!(made.stat.key.is_stream() && !of_file.key.is_stream());
    let found = f.open_stream("a", "S", OpenMode::Existing).expect("in whatever case");
    assert!(!found.created && found.file.is_some_and(|file| !file.created));
    assert_eq!(found.stat.key, made.stat.key);
    assert_eq!(open(OpenMode::New).err(), Some(NtStatus::OBJECT_NAME_COLLISION));
    let other = f.open_stream("a", "other", OpenMode::New).expect("made");
    assert!(other.created && other.file.is_some_and(|file| !file.created));
    let missing = f.open_stream("a", "missing", OpenMode::Existing);
    assert_eq!(missing.err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND));
    let long = f.open_stream("b", &"n".repeat(250), OpenMode::New);
    assert_eq!(long.err(), Some(NtStatus::OBJECT_NAME_INVALID));
    assert_eq!(f.existing("b").err(), Some(NtStatus::OBJECT_NAME_NOT_FOUND), "nothing stays");
    f.directory("d");
    let of_directory = f.open_stream("d", "s", OpenMode::New).expect("made");
    assert!(!of_directory.stat.directory && of_directory.stat.attributes & 0x10 == 0);
}

#[test]
fn streams_have_contents_separate_from_the_file() {
    let f = Fixture::new();
    let file = f.file("a");
    f.write(&file, 0, b"the file's").expect("written");
    let (one, two) = (f.stream("a", "one"), f.stream("a", "two"));
    assert_eq!(f.write(&one, 3, b"abc"), Ok(3));
    assert_eq!(f.write(&one, u64::MAX, b"d"), Ok(1), "at the end");
    assert_eq!(f.read(&one, 0, 100).as_deref(), Ok(&b"\0\0\0abcd"[..]));
    assert_eq!(f.read(&one, 4, 2).as_deref(), Ok(&b"bc"[..]));
    assert_eq!(f.read(&one, 7, 1), Err(NtStatus::END_OF_FILE));
    assert_eq!(f.read(&two, 0, 1), Err(NtStatus::END_OF_FILE));
    assert_eq!(f.read(&file, 0, 100).as_deref(), Ok(&b"the file's"[..]));
    assert_eq!(f.stat(&one).end_of_file, 7);
    assert_eq!(f.streams(&file), [("one".to_owned(), 7), ("two".to_owned(), 0)]);
    assert_eq!(f.streams(&two), f.streams(&file));
    f.set_end(&one, 2).expect("shorter");
    f.set_end(&one, 5).expect("longer");
    assert_eq!(f.read(&one, 0, 100).as_deref(), Ok(&[0; 5][..]));
    f.write(&one, 0, b"12345").expect("written");
    f.done(FsOpKind::ZeroRange { handle: one.clone(), offset: 1, length: 2 }).expect("zeros");
    assert_eq!(f.read(&one, 0, 100).as_deref(), Ok(&b"1\x00\x0045"[..]));
    f.done(FsOpKind::Flush { handle: one.clone() }).expect("flushed");
    f.overwrite(&one, true);
    assert_eq!(f.stat(&one).end_of_file, 0);
    assert_eq!(f.streams(&file).len(), 2, "a stream that is overwritten leaves the others");
}

#[test]
fn stream_size_is_limited() {
    let f = Fixture::new();
    let stream = f.stream("a", "s");
    for (offset, bytes) in [(65_535, &b"x"[..]), (u64::MAX - 1, b"x")] {
        assert_eq!(f.write(&stream, offset, bytes), Err(NtStatus::FILE_SYSTEM_LIMITATION), "{offset}");
    }
    assert_eq!(f.set_end(&stream, 65_536), Err(NtStatus::FILE_SYSTEM_LIMITATION));
    assert_eq!(f.stat(&stream).end_of_file, 0);
    // Some file systems have less space.
    match f.write(&stream, 0, &[b'x'; 65_535]) {
        Ok(written) => {
            assert_eq!(written, 65_535);
            assert_eq!(f.read(&stream, 65_530, 100).as_deref(), Ok(&b"xxxxx"[..]));
        }
        Err(status) => {
            assert!([NtStatus::DISK_FULL, NtStatus::FILE_SYSTEM_LIMITATION].contains(&status), "{status:?}");
        }
    }
}

#[test]
fn number_of_streams_is_limited_to_what_can_be_listed() {
    let f = Fixture::new();
    let file = f.file("a");
    let open = |number| f.open_stream("a", &format!("{number:0200}"), OpenMode::New);
    let refused = (0..1000).find_map(|number| open(number).err().map(|status| (number, status)));
    let (count, status) = refused.expect("not without end");
    // Some file systems have less space.
    assert!([NtStatus::FILE_SYSTEM_LIMITATION, NtStatus::DISK_FULL].contains(&status), "{status:?}");
    assert_eq!(f.streams(&file).len(), count);
    f.overwrite(&file, true);
    assert_eq!(f.streams(&file), []);
}

#[test]
fn streams_follow_their_file_and_can_be_removed_alone() {
    let f = Fixture::new();
    let file = f.file("a");
    let (one, two) = (f.stream("a", "one"), f.stream("a", "two"));
    f.write(&one, 0, b"1").expect("written");
    f.rename(&file, "b", false).expect("renamed");
    f.link(&file, "c", false).expect("linked");
    assert_eq!(f.read(&f.stream("c", "one"), 0, 10).as_deref(), Ok(&b"1"[..]), "they belong to the file");
    f.unlink(one.clone()).expect("removed");
    assert_eq!(f.streams(&file), [("two".to_owned(), 0)]);
    // A write through an old handle does not bring a removed stream back.
    assert_eq!(f.write(&one, 0, b"1"), Err(NtStatus::FILE_DELETED));
    assert_eq!(f.read(&one, 0, 1), Err(NtStatus::FILE_DELETED));
    assert_eq!(f.streams(&file).len(), 1);
    f.write(&file, 0, b"data").expect("written");
    f.overwrite(&file, false);
    assert_eq!((f.stat(&file).end_of_file, f.streams(&file).len()), (0, 1));
    f.overwrite(&file, true);
    assert_eq!(f.streams(&file), []);
    assert_eq!(f.write(&two, 0, b"2"), Err(NtStatus::FILE_DELETED));
}

#[test]
fn streams_are_renamed_within_their_file() {
    let f = Fixture::new();
    let file = f.file("a");
    let (one, two) = (f.stream("a", "one"), f.stream("a", "two"));
    f.write(&one, 0, b"1").expect("written");
    f.write(&two, 0, b"2").expect("written");
    assert_eq!(f.rename_stream(&one, Some("TWO"), false), Err(NtStatus::OBJECT_NAME_COLLISION));
    assert_eq!(f.rename_stream(&one, Some("two"), true), Err(NtStatus::INVALID_PARAMETER), "it has contents");
    f.set_end(&two, 0).expect("empty");
    assert_eq!(f.rename_stream(&one, Some("two"), true), Ok(()));
    assert_eq!(f.streams(&file), [("two".to_owned(), 1)]);
    assert_eq!(f.rename_stream(&one, Some("Two"), false), Ok(()), "to another case");
    assert_eq!(f.streams(&file), [("Two".to_owned(), 1)]);
    assert_eq!(f.read(&one, 0, 10).as_deref(), Ok(&b"1"[..]), "the handle follows");
    assert_eq!(f.stat(&one).key, f.stat(&f.stream("a", "two")).key);
    f.write(&file, 0, b"data").expect("written");
    assert_eq!(f.rename_stream(&one, None, false), Err(NtStatus::INVALID_PARAMETER));
    f.overwrite(&file, false);
    assert_eq!(f.rename_stream(&one, None, false), Ok(()));
    assert_eq!(f.streams(&file), []);
    assert_eq!(f.read(&file, 0, 10).as_deref(), Ok(&b"1"[..]));
    assert_eq!(f.read(&one, 0, 10), Err(NtStatus::FILE_DELETED));
    assert_eq!(f.rename_stream(&file, Some("x"), false), Err(NtStatus::INVALID_HANDLE));
}

#[test]
fn stream_attributes_are_those_of_the_file() {
    let f = Fixture::new();
    let file = f.file("a");
    let stream = f.stream("a", "s");
    let info =
        BasicInfo { attributes: Some(0x2), creation: Some(132_000_000_000_000_000), ..BasicInfo::default() };
    f.done(FsOpKind::SetBasic { handle: stream.clone(), info }).expect("set");
    let (of_file, of_stream) = (f.stat(&file), f.stat(&stream));
    assert_eq!(of_file.attributes, 0x2);
    assert_eq!((of_stream.attributes, of_stream.times), (of_file.attributes, of_file.times));
    f.set_eas(&stream, &[("ea", b"value")]).expect("set");
    assert_eq!(f.eas(&file), Ok(vec![("ea".to_owned(), b"value".to_vec())]), "streams are none of them");
    assert_eq!(f.ea_size(&file), f.ea_size(&stream));
    let own = f.set_eas(&file, &[("DosStream.s:$DATA", b"value")]);
    assert_eq!(own, Err(NtStatus::ACCESS_DENIED));
}

#[test]
fn streams_are_stored_in_sambas_xattr_format() {
    let f = Fixture::new();
    let stream = f.stream("a", "Zone.Identifier");
    f.write(&stream, 0, b"[ZoneTransfer]").expect("written");
    let mut value = [0; 64];
    let length = rustix::fs::getxattr(f.root.join("a"), c"user.DosStream.Zone.Identifier:$DATA", &mut value);
    assert_eq!(&value[..length.expect("there")], b"[ZoneTransfer]\0");
}

#[test]
fn copy_range_works_to_and_from_streams() {
    let f = Fixture::new();
    let file = f.file("a");
    f.write(&file, 0, b"0123456789").expect("written");
    let stream = f.stream("a", "s");
    let copy = |source: &FsHandle, from, target: &FsHandle, to, length| {
        let (source, target) = (source.clone(), target.clone());
        let copy = FsOpKind::CopyRange { source, source_offset: from, target, target_offset: to, length };
        match f.run(copy) {
            Ok(FsReply::Copied(n)) => Ok(n),
            Ok(_) => panic!("a copy answers Copied"),
            Err(status) => Err(status),
        }
    };
    assert_eq!(copy(&file, 2, &stream, 0, 4), Ok(4));
    assert_eq!(copy(&stream, 1, &stream, 4, 100), Ok(3));
    assert_eq!(f.read(&stream, 0, 100).as_deref(), Ok(&b"2345345"[..]));
    assert_eq!(copy(&stream, 6, &file, 10, 100), Ok(1));
    assert_eq!(f.read(&file, 8, 100).as_deref(), Ok(&b"895"[..]));
    assert_eq!(copy(&stream, 100, &file, 0, 1), Ok(0));
    let (source, target) = (stream, file);
    let clone = FsOpKind::CloneRange { source, source_offset: 0, target, target_offset: 0, length: 1 };
    assert!(f.done(clone).is_err());
}

#[test]
fn concurrent_writes_to_one_stream_are_not_lost() {
    let f = Fixture::new();
    f.stream("a", "s");
    std::thread::scope(|scope| {
        for at in 0..4_u8 {
            let f = &f;
            scope.spawn(move || {
                let stream = f.stream("a", "s");
                for round in 0..100 {
                    f.write(&stream, u64::from(at) * 100 + round, &[b'a' + at]).expect("written");
                }
            });
        }
    });
    let expected: Vec<u8> = (0..4).flat_map(|at| [b'a' + at; 100]).collect();
    assert_eq!(f.read(&f.stream("a", "s"), 0, 1000), Ok(expected));
}
