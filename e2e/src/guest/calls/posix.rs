//! Behaviour that programs expect of a file system, tested on a mounted folder.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, XattrFlags, fallocate, getxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;

/// Name of a case, and its error if it failed.
pub type Outcome = (String, Option<String>);

/// A named case.
type Case = (&'static str, fn(&Path) -> Result<()>);

const CASES: &[Case] = &[
    ("rename over an open file", rename_over_an_open_file),
    ("rename of an open file", rename_of_an_open_file),
    ("unlink of an open file", unlink_of_an_open_file),
    ("sparse file", sparse_file),
    ("truncate and extend", truncate_and_extend),
    ("punched hole", punched_hole),
    ("append", append),
    ("255-byte names", longest_names),
    ("non-ASCII names", other_alphabets),
    ("names too long", names_too_long),
    ("directories", directories),
    ("times", times),
    ("extended attributes", extended_attributes),
    ("many entries", many_entries),
];

/// Runs all cases, each in a separate folder.
pub fn all(folder: PathBuf) -> Result<Vec<Outcome>> {
    let mut outcomes = Vec::new();
    for (index, (name, case)) in CASES.iter().enumerate() {
        let own = folder.join(format!("case-{index}"));
        fs::create_dir(&own).with_context(|| own.display().to_string())?;
        let result = case(&own).and_then(|()| fs::remove_dir_all(&own).context("remove the case's folder"));
        outcomes.push(((*name).to_owned(), result.err().map(|error| format!("{error:#}"))));
    }
    Ok(outcomes)
}

fn names_in(folder: &Path) -> Result<BTreeSet<OsString>> {
    Ok(fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<std::io::Result<_>>()?)
}

fn rename_over_an_open_file(at: &Path) -> Result<()> {
    let (old, new) = (at.join("target"), at.join("new"));
    fs::write(&old, "the old content")?;
    let mut open = File::open(&old)?;
    fs::write(&new, "the new")?;
    fs::rename(&new, &old).context("rename over it")?;
    ensure!(fs::read_to_string(&old)? == "the new", "the name does not show the new content");
    let mut text = String::new();
    open.read_to_string(&mut text).context("read the replaced file")?;
    ensure!(text == "the old content", "the open file reads {text:?}");
    // Until then the kernel's client may keep the replaced file under a temporary name, as it does over NFS.
    drop(open);
    ensure!(names_in(at)?.len() == 1, "{:?} are left", names_in(at)?);
    Ok(())
}

fn rename_of_an_open_file(at: &Path) -> Result<()> {
    let (old, new) = (at.join("old"), at.join("new"));
    let mut file = File::options().read(true).write(true).create_new(true).open(&old)?;
    file.write_all(b"before ")?;
    fs::rename(&old, &new)?;
    file.write_all(b"after")?;
    file.sync_all()?;
    ensure!(fs::read_to_string(&new)? == "before after", "a write after the rename is lost");
    ensure!(
        matches!(fs::metadata(&old), Err(error) if error.kind() == ErrorKind::NotFound),
        "the old name is there"
    );
    Ok(())
}

fn unlink_of_an_open_file(at: &Path) -> Result<()> {
    let path = at.join("gone");
    let mut file = File::options().read(true).write(true).create_new(true).open(&path)?;
    file.write_all(b"still here")?;
    fs::remove_file(&path).context("unlink")?;
    let error = fs::metadata(&path).err().map(|error| error.kind());
    ensure!(error == Some(ErrorKind::NotFound), "the name is still there: {error:?}");
    file.seek(SeekFrom::Start(0))?;
    let mut text = String::new();
    file.read_to_string(&mut text).context("read the unlinked file")?;
    ensure!(text == "still here", "the unlinked file reads {text:?}");
    file.write_all(b" and writable").context("write the unlinked file")?;
    drop(file);
    fs::write(&path, "another").context("use the name again")?;
    ensure!(names_in(at)?.len() == 1, "{:?} are left", names_in(at)?);
    Ok(())
}

fn sparse_file(at: &Path) -> Result<()> {
    const FAR: u64 = 300 << 20;
    let path = at.join("sparse");
    let file = File::create_new(&path)?;
    file.write_all_at(b"begin", 0)?;
    file.write_all_at(b"end", FAR)?;
    file.sync_all()?;
    drop(file);
    let file = File::open(&path)?;
    ensure!(file.metadata()?.len() == FAR + 3, "size {}", file.metadata()?.len());
    let mut block = vec![1; 1 << 20];
    for offset in [5, 100 << 20, FAR - (1 << 20)] {
        file.read_exact_at(&mut block, offset)?;
        ensure!(block.iter().all(|byte| *byte == 0), "the hole at {offset} does not read as zeros");
    }
    let mut end = [0; 3];
    file.read_exact_at(&mut end, FAR)?;
    ensure!(&end == b"end", "the data behind the hole is lost");
    Ok(())
}

fn truncate_and_extend(at: &Path) -> Result<()> {
    let path = at.join("f");
    fs::write(&path, vec![7; 100_000])?;
    let file = File::options().read(true).write(true).open(&path)?;
    file.set_len(10)?;
    file.set_len(5_000_000)?;
    file.sync_all()?;
    drop(file);
    let content = fs::read(&path)?;
    ensure!(content.len() == 5_000_000, "size {}", content.len());
    ensure!(content[..10] == [7; 10], "the kept part is lost");
    ensure!(content[10..].iter().all(|byte| *byte == 0), "what was cut off is back");
    Ok(())
}

fn punched_hole(at: &Path) -> Result<()> {
    let path = at.join("f");
    fs::write(&path, vec![7; 1 << 20])?;
    let file = File::options().read(true).write(true).open(&path)?;
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 64 << 10, 128 << 10)?;
    drop(file);
    let content = fs::read(&path)?;
    ensure!(content.len() == 1 << 20, "size {}", content.len());
    for (index, byte) in content.iter().enumerate() {
        let expected = if (64 << 10..192 << 10).contains(&index) { 0 } else { 7 };
        ensure!(*byte == expected, "byte {index} is {byte}");
    }
    Ok(())
}

fn append(at: &Path) -> Result<()> {
    let path = at.join("log");
    for line in 0..20 {
        let mut file = File::options().append(true).create(true).open(&path)?;
        writeln!(file, "line {line}")?;
    }
    let text = fs::read_to_string(&path)?;
    let expected: String = (0..20).map(|line| format!("line {line}\n")).collect();
    ensure!(text == expected, "{text:?}");
    Ok(())
}

fn round_trip(at: &Path, names: &[String]) -> Result<()> {
    for name in names {
        fs::write(at.join(name), name).with_context(|| format!("write {name}"))?;
    }
    let expected: BTreeSet<OsString> = names.iter().map(OsString::from).collect();
    let found = names_in(at)?;
    ensure!(found == expected, "listed {found:?}");
    for name in names {
        let text = fs::read_to_string(at.join(name)).with_context(|| format!("read {name}"))?;
        ensure!(text == *name, "{name} holds {text}");
        let moved = at.join("moved");
        fs::rename(at.join(name), &moved)?;
        fs::rename(&moved, at.join(name))?;
    }
    Ok(())
}

fn longest_names(at: &Path) -> Result<()> {
    // 255 bytes as the server's file system counts them: in characters of one, two and three bytes.
    round_trip(at, &["a".repeat(255), format!("{}x", "ü".repeat(127)), "語".repeat(85)])
}

fn other_alphabets(at: &Path) -> Result<()> {
    let names = [
        "Größe",
        "данные",
        "データ",
        "🚀 epoch",
        "a b  c",
        "ünïcode-e\u{301}",
        "CASE",
        "case",
        "%41",
        "~tilde",
    ];
    round_trip(at, &names.map(str::to_owned))
}

fn names_too_long(at: &Path) -> Result<()> {
    let error = fs::write(at.join("a".repeat(256)), "").err().and_then(|error| error.raw_os_error());
    ensure!(error == Some(Errno::NAMETOOLONG.raw_os_error()), "error {error:?}");
    Ok(())
}

fn directories(at: &Path) -> Result<()> {
    let folder = at.join("a/b/c");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("f"), "deep")?;
    let kind = |result: std::io::Result<()>| result.err().map(|error| error.kind());
    ensure!(kind(fs::create_dir(&folder)) == Some(ErrorKind::AlreadyExists), "made twice");
    ensure!(
        kind(fs::remove_dir(&folder)) == Some(ErrorKind::DirectoryNotEmpty),
        "removed although not empty"
    );
    ensure!(
        kind(File::create_new(folder.join("f")).map(drop)) == Some(ErrorKind::AlreadyExists),
        "created twice"
    );
    ensure!(kind(File::open(at.join("a/none/f")).map(drop)) == Some(ErrorKind::NotFound), "a missing parent");
    fs::rename(at.join("a/b"), at.join("moved"))?;
    ensure!(fs::read_to_string(at.join("moved/c/f"))? == "deep", "lost by a rename of its grandparent");
    Ok(())
}

fn times(at: &Path) -> Result<()> {
    let path = at.join("f");
    let file = File::create_new(&path)?;
    let when = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_700);
    file.set_modified(when)?;
    drop(file);
    // SMB has a resolution of 100 ns; the time must survive with that precision.
    let found = fs::metadata(&path)?.modified()?;
    ensure!(found == when, "{found:?} instead of {when:?}");
    Ok(())
}

fn extended_attributes(at: &Path) -> Result<()> {
    let get = |path: &Path, name: &str| {
        let mut value = vec![0; 4096];
        getxattr(path, name, &mut value[..]).map(|length| value[..length].to_vec())
    };
    let list = |path: &Path| -> Result<BTreeSet<String>> {
        let mut names = vec![0; 4096];
        let length = listxattr(path, &mut names[..]).context("list")?;
        let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        // Ignore attributes that a node's own file system adds.
        let users = names.map(String::from_utf8_lossy).filter(|name| name.starts_with("user."));
        Ok(users.map(|name| name.into_owned()).collect())
    };
    let (file, folder) = (at.join("file"), at.join("folder"));
    fs::write(&file, "content")?;
    fs::create_dir(&folder)?;
    for path in [&file, &folder] {
        let set = |name, value| setxattr(path, name, value, XattrFlags::empty());
        ensure!(list(path)?.is_empty(), "a new one has {:?}", list(path)?);
        ensure!(get(path, "user.epoch") == Err(Errno::NODATA), "read {:?}", get(path, "user.epoch"));
        set("user.epoch", b"12").context("set")?;
        set("user.Epoch", &[0, 255]).context("set a name in another case")?;
        set("user.com.example:key=a/b", &[7; 3000]).context("set 3000 bytes")?;
        set("user.epoch", b"thirteen").context("replace")?;
        ensure!(get(path, "user.epoch") == Ok(b"thirteen".to_vec()), "the new value is not there");
        ensure!(get(path, "user.Epoch") == Ok(vec![0, 255]), "the case of names does not count");
        ensure!(get(path, "user.com.example:key=a/b") == Ok(vec![7; 3000]), "the long value is another");
        let names = ["user.epoch", "user.Epoch", "user.com.example:key=a/b"];
        ensure!(list(path)? == names.map(str::to_owned).into(), "listed {:?}", list(path)?);
        removexattr(path, "user.com.example:key=a/b").context("remove")?;
        let again = removexattr(path, "user.com.example:key=a/b");
        ensure!(again == Err(Errno::NODATA), "removed twice: {again:?}");
        ensure!(list(path)?.len() == 2, "listed {:?} after a removal", list(path)?);
    }
    fs::write(&file, "other content")?;
    let moved = at.join("moved");
    fs::rename(&file, &moved)?;
    ensure!(get(&moved, "user.epoch") == Ok(b"thirteen".to_vec()), "lost by O_TRUNC or by a rename");
    Ok(())
}

fn many_entries(at: &Path) -> Result<()> {
    const COUNT: usize = 700;
    let names: BTreeSet<OsString> =
        (0..COUNT).map(|i| format!("entry-with-a-middling-name-{i:05}").into()).collect();
    for name in &names {
        File::create_new(at.join(name))?;
    }
    let found = names_in(at)?;
    ensure!(found == names, "{} of {COUNT} are listed", found.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn posix_cases_pass_on_a_local_file_system() {
        // Not on a tmpfs: it has no 255-byte limit to test against. /var/tmp is on a real file system.
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
        for (name, complaint) in super::all(folder.path().to_owned()).expect("the cases run") {
            assert_eq!(complaint, None, "{name}");
        }
    }
}
