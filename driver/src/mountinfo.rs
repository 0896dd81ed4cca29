//! Reads mounts from /proc/self/mountinfo, without accessing mounts that may hang.

use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// One line of mountinfo (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountEntry {
    /// The mount's ID, which stays unique while a process uses the mount.
    pub(crate) id: u64,
    /// `major:minor` of the superblock's device: the same for all mounts of one superblock.
    pub(crate) device: String,
    /// The directory of the file system that is mounted.
    pub(crate) root: PathBuf,
    pub(crate) mount_point: PathBuf,
    /// This mount's own options, such as `ro`.
    pub(crate) options: String,
    pub(crate) fs_type: String,
    /// For cifs: `//host/share`.
    pub(crate) source: OsString,
    /// The superblock's options.
    pub(crate) super_options: String,
}

impl MountEntry {
    pub(crate) fn is_read_only(&self) -> bool {
        self.options.split(',').any(|o| o == "ro")
    }

    pub(crate) fn is_smb(&self) -> bool {
        self.fs_type == "cifs" || self.fs_type == "smb3"
    }

    /// The value of a superblock option.
    pub(crate) fn super_option(&self, name: &str) -> Option<&str> {
        self.super_options.split(',').find_map(|o| o.strip_prefix(name)?.strip_prefix('='))
    }

    pub(crate) fn has_super_flag(&self, name: &str) -> bool {
        self.super_options.split(',').any(|o| o == name)
    }

    /// The share of an SMB mount: what follows the host in `//host/share`.
    pub(crate) fn share(&self) -> Option<&str> {
        let source = self.source.to_str().filter(|_| self.is_smb())?;
        source.strip_prefix("//")?.split_once('/').map(|(_, share)| share)
    }

    /// The address that an SMB client is connected to, or tries to connect to.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        let address = self.super_option("addr")?;
        // A link-local IPv6 address has its scope after a percent sign.
        address.split('%').next()?.parse().ok()
    }

    /// The group of all files, if the file system specifies one.
    pub(crate) fn gid(&self) -> Option<u32> {
        self.super_option("gid")?.parse().ok()
    }

    /// Describes the mount for messages, without its options.
    pub(crate) fn describe(&self) -> String {
        format!("{} {} is mounted there", self.fs_type, self.source.to_string_lossy())
    }
}

/// The mounts of this process's namespace, in the order of their creation.
#[derive(Debug)]
pub(crate) struct MountTable(Vec<MountEntry>);

impl MountTable {
    pub(crate) fn read() -> io::Result<Self> {
        let table = fs::read("/proc/self/mountinfo").map(|text| Self::parse(&text))?;
        #[cfg(test)]
        let table = tests::disguised(table);
        Ok(table)
    }

    pub(crate) fn parse(text: &[u8]) -> Self {
        Self(text.split(|&b| b == b'\n').filter_map(parse_line).collect())
    }

    /// The visible mount at `path`: the topmost one.
    pub(crate) fn at(&self, path: &Path) -> Option<&MountEntry> {
        self.0.iter().rev().find(|m| m.mount_point == path)
    }

    /// SMB mounts.
    pub(crate) fn smb(&self) -> impl Iterator<Item = &MountEntry> {
        self.0.iter().filter(|entry| entry.is_smb())
    }

    /// The other mount points of the same directory of the same file system.
    pub(crate) fn others_of(&self, entry: &MountEntry) -> impl Iterator<Item = &Path> {
        let same = |m: &&MountEntry| (&m.device, &m.root) == (&entry.device, &entry.root);
        self.0.iter().filter(same).map(|m| m.mount_point.as_path()).filter(|p| *p != entry.mount_point)
    }
}

/// The path as shown in mountinfo: links are resolved in all but the last component, which may be a mount point that hangs on
/// access. `None` if the parent directory does not exist.
pub(crate) fn resolve(path: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(Some(parent.join(name))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

/// Parses `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`, with any number of optional fields
/// before the hyphen.
fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&b| b == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = fields.nth(1)?;
    let root = fields.next()?;
    let mount_point = fields.next()?;
    let options = fields.next()?;
    fields.find(|f| *f == b"-")?;
    let fs_type = fields.next()?;
    let source = fields.next()?;
    let super_options = fields.next().unwrap_or_default();
    let text = |bytes: &[u8]| String::from_utf8_lossy(&unescape(bytes)).into_owned();
    Some(MountEntry {
        id,
        device: text(device),
        root: PathBuf::from(OsString::from_vec(unescape(root))),
        mount_point: PathBuf::from(OsString::from_vec(unescape(mount_point))),
        options: text(options),
        fs_type: text(fs_type),
        source: OsStr::from_bytes(&unescape(source)).to_owned(),
        super_options: text(super_options),
    })
}

/// The kernel escapes space, tab, newline and backslash as three octal digits.
fn unescape(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&first, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|d| first == b'\\' && d.iter().all(|b| (b'0'..=b'7').contains(b)));
        match digits {
            Some(&[a, b, c]) => {
                out.push(((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0'));
                rest = tail.get(3..).unwrap_or_default();
            }
            _ => {
                out.push(first);
                rest = tail;
            }
        }
    }
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};

    use super::*;

    /// How mounts of a source are disguised: type and options of the file system.
    static DISGUISES: Mutex<Option<HashMap<OsString, (String, String)>>> = Mutex::new(None);

    /// Shows every mount of this source as a mount of the kernel's SMB client with these options. Test machines rarely have
    /// that client; the mount itself, and that it hangs or is busy, is real. Each source belongs to one test.
    pub(crate) fn disguise_as_smb(source: &str, super_options: &str) {
        let mut disguises = DISGUISES.lock().unwrap_or_else(PoisonError::into_inner);
        let look = ("cifs".to_owned(), super_options.to_owned());
        disguises.get_or_insert_default().insert(source.into(), look);
    }

    pub(super) fn disguised(mut table: MountTable) -> MountTable {
        let disguises = DISGUISES.lock().unwrap_or_else(PoisonError::into_inner);
        for entry in &mut table.0 {
            if let Some((fs_type, options)) = disguises.as_ref().and_then(|d| d.get(&entry.source)) {
                entry.fs_type.clone_from(fs_type);
                entry.super_options.clone_from(options);
            }
        }
        table
    }

    /// Lines as kernel 6.18 wrote them; the cifs ones, which this driver mounted, as kernel 7.2 did.
    const CAPTURED: &[u8] = include_bytes!("testdata/mountinfo");

    #[test]
    fn captured_mountinfo_is_parsed() {
        let table = MountTable::parse(CAPTURED);
        let lines = CAPTURED.split(|&b| b == b'\n').filter(|l| !l.is_empty()).count();
        assert_eq!(table.0.len(), lines);
        let root = table.at(Path::new("/")).expect("there is a root");
        assert_eq!((root.fs_type.as_str(), root.is_read_only()), ("ext4", false));
        assert!(table.at(Path::new("/nowhere")).is_none());
    }

    #[test]
    fn cifs_mounts_are_parsed() {
        let table = MountTable::parse(CAPTURED);
        let staged = table.at(Path::new("/var/kub/glob")).expect("staged");
        assert!(staged.is_smb() && !staged.is_read_only());
        assert_eq!(staged.source, "//192.168.77.1/pvc-1");
        assert_eq!(staged.super_option("username"), Some("u1"));
        assert_eq!(staged.super_option("user"), None);
        assert!(!staged.has_super_flag("seal"));
        assert_eq!((staged.share(), staged.gid()), (Some("pvc-1"), Some(0)));
        assert_eq!(staged.address(), "192.168.77.1".parse().ok());
        for (path, is_read_only) in [("/var/kub/pod/m", false), ("/var/kub/pod2/m", true)] {
            let published = table.at(Path::new(path)).expect("published");
            assert_eq!(published.is_read_only(), is_read_only);
            assert_eq!((&published.device, &published.root), (&staged.device, &staged.root));
        }
        let others: Vec<_> = table.others_of(staged).collect();
        assert_eq!(others, [Path::new("/var/kub/pod/m"), Path::new("/var/kub/pod2/m")]);
        let sealed = table.at(Path::new("/var/kub/g2")).expect("staged");
        assert!(sealed.has_super_flag("seal") && sealed.device != staged.device);
    }

    #[test]
    fn escapes_optional_fields_and_stacked_mounts_are_parsed() {
        let table = MountTable::parse(
            b"1 0 0:5 /a\\040b /m\\134n rw shared:3 master:2 propagate_from:1 - tmpfs none rw\n\
              2 0 0:6 / /m\\134n ro - tmpfs top ro\n\
              3 0 0:7 / /x rw - tmpfs  rw\n\
              not a line\n",
        );
        assert_eq!(table.0.len(), 3);
        assert_eq!(table.0[0].root, Path::new("/a b"));
        assert_eq!(table.at(Path::new("/m\\n")).expect("two are").source, "top");
        assert_eq!(table.at(Path::new("/x")).expect("there").share(), None);
    }

    #[test]
    fn mount_addresses_are_parsed_with_and_without_a_scope() {
        for (options, expected) in [
            ("rw,addr=10.0.0.1,x", Some("10.0.0.1")),
            ("rw,addr=fd00::1", Some("fd00::1")),
            ("rw,addr=fe80::1%2", Some("fe80::1")),
            ("rw", None),
        ] {
            let line = format!("1 0 0:5 / /v rw - cifs //h/s {options}\n");
            let table = MountTable::parse(line.as_bytes());
            let address = table.at(Path::new("/v")).expect("a line").address();
            assert_eq!(address, expected.map(|text| text.parse().expect("an address")), "{options}");
        }
    }

    #[test]
    fn live_mountinfo_is_read() {
        let table = MountTable::read().expect("readable");
        let proc = resolve(Path::new("/proc")).expect("readable").expect("there");
        assert_eq!(table.at(&proc).expect("mounted").fs_type, "proc");
        assert_eq!(resolve(Path::new("/nowhere/at/all")).expect("no error"), None);
    }
}
