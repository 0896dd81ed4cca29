//! Copies the tree of a volume or snapshot. Files share their extents with the original (`FICLONE`), so the time depends on
//! the number of files, not on their size.
//!
//! Everything that clients can see is copied: files, directories, hard links between files, owners, modes, times and
//! extended attributes. Symbolic links, devices, sockets and pipes that other programs create below a volume are not served,
//! and are left out.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

use crate::limits::{COPY_DEPTH_MAX, COPY_LINK_BYTES_MAX, XATTR_VALUE_BYTES_MAX};

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Files and directories, each once.
    pub inodes: u64,
    /// Entries of kinds that are not served.
    pub left_out: u64,
}

/// Why a tree was not copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The file system cannot share extents.
    #[error(
        "its file system shares no extents between files: format it as XFS with reflink=1 (mkfs.xfs's default)"
    )]
    NoReflink,
    /// It took too long.
    #[error(
        "it has more files than can be copied in {seconds} s, the longest time that its clients wait: {done} were copied"
    )]
    Late {
        /// The longest time.
        seconds: u64,
        /// Files and directories copied by then.
        done: u64,
    },
    /// Its directories are too deep.
    #[error("its directories are more than {COPY_DEPTH_MAX} deep")]
    Deep,
    /// It has too many hard links.
    #[error("the paths of its files with several names take more than {} MiB", COPY_LINK_BYTES_MAX >> 20)]
    Links,
    /// The file system returned an error.
    #[error("{what} {name:?}: {errno}")]
    Io {
        /// The operation.
        what: &'static str,
        /// Its operand, below its directory.
        name: CString,
        /// Why.
        errno: Errno,
    },
}

impl CopyError {
    /// Whether the file system is full.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Io { errno: Errno::NOSPC | Errno::DQUOT, .. })
    }
}

/// Whether files of the file system of `directory` can share their extents.
///
/// # Errors
/// Those of making two unnamed files.
pub(super) fn shares_extents(directory: BorrowedFd<'_>) -> io::Result<bool> {
    let nameless = || {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        rustix::fs::openat(directory, c".", flags, Mode::from_raw_mode(0o600))
    };
    match nameless().and_then(|first| nameless().and_then(|second| rustix::fs::ioctl_ficlone(second, first)))
    {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::ISDIR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// Copies everything below `source` into the empty directory `target`, and then the attributes of `source` itself.
///
/// # Errors
/// Why the copy failed; `target` may hold part of it. [`CopyError::Late`] if `until` passes first.
pub fn copy_tree(source: &OwnedFd, target: &OwnedFd, until: Option<Instant>) -> Result<Copied, CopyError> {
    let started = Instant::now();
    let mut copy = Copy {
        root: target.as_fd(),
        started,
        until,
        done: Copied::default(),
        links: HashMap::new(),
        link_bytes: 0,
        xattrs: Vec::new(),
    };
    let again = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(io("opening", c"."));
    copy.tree(again(source)?, again(target)?)?;
    Ok(copy.done)
}

/// A file with several names, at least one of which was found.
struct Link {
    /// Below the target's root.
    path: CString,
    /// Names that were not found yet.
    left: usize,
}

/// A directory that is being copied.
struct Level {
    source: OwnedFd,
    target: OwnedFd,
    entries: Dir,
    /// Length of the path of the directory above it.
    path_bytes_above: usize,
}

impl Level {
    fn new(source: OwnedFd, target: OwnedFd, path_bytes_above: usize) -> Result<Self, CopyError> {
        let entries = Dir::read_from(&source).map_err(io("listing", c"."))?;
        Ok(Self { source, target, entries, path_bytes_above })
    }
}

struct Copy<'a> {
    root: BorrowedFd<'a>,
    started: Instant,
    until: Option<Instant>,
    done: Copied,
    /// By inode.
    links: HashMap<u64, Link>,
    /// Bytes that the paths in `links` take.
    link_bytes: usize,
    /// For values of extended attributes.
    xattrs: Vec<u8>,
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const SOURCE: OFlags = OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);
const TARGET: OFlags =
    OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Copy<'_> {
    /// Copies everything below `source`, and its attributes. It is not recursive, because clients choose the depth.
    fn tree(&mut self, source: OwnedFd, target: OwnedFd) -> Result<(), CopyError> {
        // Path of the directory that is being copied, below the root, with a trailing slash.
        let mut path = Vec::new();
        let mut levels = vec![Level::new(source, target, 0)?];
        while let Some(level) = levels.last_mut() {
            let source = level.source.as_fd();
            let Some(entry) = level.entries.next() else {
                let stat = rustix::fs::fstat(source).map_err(io("looking at", c"."))?;
                self.attributes(source, level.target.as_fd(), &stat, Mode::RWXU)
                    .map_err(io("setting the attributes of", c"."))?;
                self.done.inodes += 1;
                path.truncate(level.path_bytes_above);
                levels.pop();
                continue;
            };
            let entry = entry.map_err(io("listing", c"."))?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if let Some(until) = self.until
                && Instant::now() >= until
            {
                let seconds = until.duration_since(self.started).as_secs();
                return Err(CopyError::Late { seconds, done: self.done.inodes });
            }
            let stat = rustix::fs::statat(source, name, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(io("looking at", name))?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => {
                    let from = rustix::fs::openat(source, name, DIRECTORY, Mode::empty())
                        .map_err(io("opening", name))?;
                    rustix::fs::mkdirat(&level.target, name, Mode::RWXU).map_err(io("making", name))?;
                    let to = rustix::fs::openat(&level.target, name, DIRECTORY, Mode::empty())
                        .map_err(io("opening", name))?;
                    let path_bytes_above = path.len();
                    path.extend_from_slice(name.to_bytes());
                    path.push(b'/');
                    if levels.len() > COPY_DEPTH_MAX {
                        return Err(CopyError::Deep);
                    }
                    levels.push(Level::new(from, to, path_bytes_above)?);
                }
                FileType::RegularFile => self.file(source, level.target.as_fd(), &path, name, &stat)?,
                _ => self.done.left_out += 1,
            }
        }
        Ok(())
    }

    fn file(
        &mut self,
        source: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        path: &[u8],
        name: &CStr,
        stat: &Stat,
    ) -> Result<(), CopyError> {
        if stat.st_nlink > 1 {
            if let Some(link) = self.links.get_mut(&stat.st_ino) {
                rustix::fs::linkat(self.root, &link.path, target, name, AtFlags::empty())
                    .map_err(io("linking", name))?;
                link.left -= 1;
                if link.left == 0 {
                    self.link_bytes -= link.path.count_bytes() + size_of::<(u64, Link)>();
                    self.links.remove(&stat.st_ino);
                }
                return Ok(());
            }
            let path = CString::new([path, name.to_bytes()].concat()).expect("names hold no zero");
            self.link_bytes += path.count_bytes() + size_of::<(u64, Link)>();
            if self.link_bytes > COPY_LINK_BYTES_MAX {
                return Err(CopyError::Links);
            }
            self.links.insert(
                stat.st_ino,
                Link { path, left: usize::try_from(stat.st_nlink).unwrap_or(usize::MAX) - 1 },
            );
        }
        let from: OwnedFd =
            rustix::fs::openat(source, name, SOURCE, Mode::empty()).map_err(io("opening", name))?;
        let to =
            rustix::fs::openat(target, name, TARGET, Mode::RUSR | Mode::WUSR).map_err(io("making", name))?;
        // The current state: the file may have been replaced since, and then the replacement is copied.
        let stat = rustix::fs::fstat(&from).map_err(io("looking at", name))?;
        if stat.st_size > 0 {
            rustix::fs::ioctl_ficlone(&to, &from).map_err(|errno| match errno {
                Errno::OPNOTSUPP | Errno::NOTTY | Errno::XDEV => CopyError::NoReflink,
                errno => io("sharing the extents of", name)(errno),
            })?;
        }
        self.attributes(from.as_fd(), to.as_fd(), &stat, Mode::RUSR | Mode::WUSR)
            .map_err(io("setting the attributes of", name))?;
        self.done.inodes += 1;
        Ok(())
    }

    /// Gives `target`, which was made with `mode`, the attributes of `source`.
    fn attributes(
        &mut self,
        source: BorrowedFd<'_>,
        target: BorrowedFd<'_>,
        stat: &Stat,
        mode: Mode,
    ) -> Result<(), Errno> {
        self.extended_attributes(source, target)?;
        let made = rustix::fs::fstat(target)?;
        if (made.st_uid, made.st_gid) != (stat.st_uid, stat.st_gid) {
            rustix::fs::fchown(target, Some(Uid::from_raw(stat.st_uid)), Some(Gid::from_raw(stat.st_gid)))?;
        }
        // After the owner: a change of the owner clears the set-user-id bit.
        let wanted = Mode::from_raw_mode(stat.st_mode & 0o7777);
        if wanted != mode {
            rustix::fs::fchmod(target, wanted)?;
        }
        let time = |seconds, nanoseconds: u64| Timespec { tv_sec: seconds, tv_nsec: nanoseconds as _ };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec),
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec),
        };
        rustix::fs::futimens(target, &times)
    }

    fn extended_attributes(&mut self, source: BorrowedFd<'_>, target: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut names: [MaybeUninit<u8>; 1024] = [MaybeUninit::uninit(); 1024];
        let more: Vec<u8>;
        let names: &[u8] = match rustix::fs::flistxattr(source, &mut names) {
            Ok((names, _)) => names,
            Err(Errno::OPNOTSUPP) => return Ok(()),
            Err(Errno::RANGE) => {
                let mut all = vec![0; XATTR_VALUE_BYTES_MAX];
                let length = rustix::fs::flistxattr(source, all.as_mut_slice())?;
                all.truncate(length);
                more = all;
                &more
            }
            Err(errno) => return Err(errno),
        };
        // Other namespaces belong to the kernel or an administrator.
        let user = names.split_inclusive(|byte| *byte == 0).filter(|name| name.starts_with(b"user."));
        for name in user {
            let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
            self.xattrs.resize(XATTR_VALUE_BYTES_MAX, 0);
            let length = rustix::fs::fgetxattr(source, name, self.xattrs.as_mut_slice())?;
            rustix::fs::fsetxattr(target, name, &self.xattrs[..length], XattrFlags::empty())?;
        }
        Ok(())
    }
}

fn io(what: &'static str, name: &CStr) -> impl Fn(Errno) -> CopyError {
    let name = name.to_owned();
    move |errno| CopyError::Io { what, name: name.clone(), errno }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::scratch_disk::Disk;

    fn open(path: &Path) -> OwnedFd {
        rustix::fs::open(path, DIRECTORY, Mode::empty()).expect("opened")
    }

    /// Kind, mode, owner, size, time, content and attributes of all that is below `root`, by path.
    fn tree(root: &Path, at: &Path, into: &mut Vec<String>) {
        for entry in fs::read_dir(at).expect("listed") {
            let path = entry.expect("an entry").path();
            let meta = path.symlink_metadata().expect("there");
            if meta.is_symlink() {
                continue;
            }
            let mut list = vec![0; 1024];
            let length = rustix::fs::getxattr(&path, c"user.it", list.as_mut_slice()).unwrap_or(0);
            let content = if meta.is_file() { fs::read(&path).expect("read") } else { Vec::new() };
            let sum =
                content.iter().fold(0_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
            into.push(format!(
                "{:?} {:o} {}:{} {} {}.{} {sum:x} {:?} {}",
                path.strip_prefix(root).expect("below"),
                meta.mode(),
                meta.uid(),
                meta.gid(),
                if meta.is_file() { meta.len() } else { 0 },
                meta.mtime(),
                meta.mtime_nsec(),
                &list[..length],
                if meta.is_file() { meta.nlink() } else { 0 },
            ));
            if meta.is_dir() {
                tree(root, &path, into);
            }
        }
    }

    fn sorted(root: &Path) -> Vec<String> {
        let mut all = Vec::new();
        tree(root, root, &mut all);
        all.sort();
        all
    }

    #[test]
    fn copy_has_all_client_visible_contents_and_shares_extents() {
        let Some(disk) = Disk::new("copy_has_all_client_visible_contents_and_shares_extents") else { return };
        let (source, target) = (disk.path().join("source"), disk.path().join("target"));
        fs::create_dir_all(source.join("a/b/c")).expect("made");
        fs::create_dir(&target).expect("made");
        fs::write(source.join("a/large"), vec![7; 40 << 20]).expect("written");
        fs::write(source.join("empty"), "").expect("written");
        fs::write(source.join("a/b/private"), "secret").expect("written");
        fs::set_permissions(source.join("a/b/private"), PermissionsExt::from_mode(0o4600)).expect("set");
        std::os::unix::fs::chown(source.join("a/b/private"), Some(1234), Some(4321)).expect("given away");
        fs::set_permissions(source.join("a/b/private"), PermissionsExt::from_mode(0o4600)).expect("set");
        let sparse = File::create(source.join("sparse")).expect("made");
        sparse.set_len(1 << 40).expect("sparse");
        rustix::fs::setxattr(source.join("a"), c"user.it", b"value", XattrFlags::empty()).expect("set");
        rustix::fs::setxattr(&source, c"user.it", b"of the root", XattrFlags::empty()).expect("set");
        rustix::fs::setxattr(source.join("empty"), c"user.it", &[9; 1000], XattrFlags::empty()).expect("set");
        fs::hard_link(source.join("a/large"), source.join("a/b/c/link")).expect("linked");
        fs::hard_link(source.join("a/large"), source.join("link")).expect("linked");
        symlink("/etc", source.join("out")).expect("linked");
        fs::set_permissions(source.join("a/b"), PermissionsExt::from_mode(0o2500)).expect("set");
        // Reading a sparse terabyte would take too long here: replace the file.
        fs::remove_file(source.join("sparse")).expect("removed");
        let sparse = File::create(source.join("sparse")).expect("made");
        sparse.set_len(64 << 20).expect("sparse");

        let free = || rustix::fs::statvfs(disk.path()).map(|v| v.f_bavail * v.f_frsize).expect("asked");
        rustix::fs::syncfs(open(&source)).expect("synced");
        let before = free();
        let copied = copy_tree(&open(&source), &open(&target), None).expect("copied");
        rustix::fs::syncfs(open(&source)).expect("synced");
        assert_eq!(copied, Copied { inodes: 8, left_out: 1 });
        assert_eq!(sorted(&source), sorted(&target));
        assert_eq!(rustix::fs::getxattr(&target, c"user.it", &mut [0_u8; 16]), Ok(11), "the root, too");
        assert_eq!(target.metadata().expect("there").mode(), source.metadata().expect("there").mode());
        let taken = before.saturating_sub(free());
        assert!(taken < 8 << 20, "{taken} bytes for a copy of 40 MiB");
        // Neither file sees the other's writes, and the copy outlives the original.
        fs::write(source.join("a/large"), "changed").expect("written");
        assert_eq!(fs::read(target.join("link")).expect("read"), vec![7; 40 << 20]);
        fs::remove_dir_all(&source).expect("removed");
        assert_eq!(fs::read(target.join("a/b/c/link")).expect("read"), vec![7; 40 << 20]);
    }

    #[test]
    fn copy_fails_at_its_deadline_and_depth_limit() {
        let Some(disk) = Disk::new("copy_fails_at_its_deadline_and_depth_limit") else { return };
        let (source, target) = (disk.path().join("source"), disk.path().join("target"));
        fs::create_dir(&source).expect("made");
        for number in 0..10 {
            fs::write(source.join(number.to_string()), "x").expect("written");
        }
        fs::create_dir(&target).expect("made");
        let now = Instant::now();
        let late = copy_tree(&open(&source), &open(&target), Some(now)).expect_err("no time");
        assert!(matches!(late, CopyError::Late { .. }), "{late}");
        fs::remove_dir_all(&target).and_then(|()| fs::create_dir(&target)).expect("made");
        let mut deep = open(&source);
        for _ in 0..COPY_DEPTH_MAX + 2 {
            rustix::fs::mkdirat(&deep, "d", Mode::RWXU).expect("made");
            deep = rustix::fs::openat(&deep, "d", DIRECTORY, Mode::empty()).expect("opened");
        }
        let until = Some(now + Duration::from_secs(60));
        let error = copy_tree(&open(&source), &open(&target), until).expect_err("too deep");
        assert!(matches!(error, CopyError::Deep), "{error}");
    }

    #[test]
    fn probe_for_shared_extents_leaves_no_files() {
        let Some(disk) = Disk::new("probe_for_shared_extents_leaves_no_files") else { return };
        assert!(shares_extents(open(&disk.path()).as_fd()).expect("asked"));
        assert_eq!(fs::read_dir(disk.path()).expect("listed").count(), 0);
        let memory = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
        assert!(!shares_extents(open(memory.path()).as_fd()).expect("asked"));
    }
}
