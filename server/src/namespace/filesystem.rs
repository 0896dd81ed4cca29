//! Makes and mounts the file system of a pool's namespace, and reads it without replaying its log.

use std::io;
use std::path::Path;
use std::process::Command;

use forebay_nvmeof::Namespace;
use rustix::mount::{MountFlags, UnmountFlags};
use uuid::Uuid;

use super::attach::Found;
use super::content::Content;
use super::reason::{Reason, io};
use super::record::{self, PoolRecord};
use crate::config::{InstanceSection, PoolSection};
use crate::limits::NAMESPACE_BYTES_MIN;

/// Namespace of the file systems' UUIDs.
const POOLS: Uuid = Uuid::from_u128(0x9e4b_30d2_6c1f_4a8e_b7a5_04f2_d86b_19c7);
/// Label of the file systems, as shown by blkid.
const LABEL: &str = "forebay";

/// The UUID of this pool's file system.
pub(super) fn identity(instance: &InstanceSection, pool: &PoolSection) -> Uuid {
    Uuid::new_v5(&POOLS, format!("{}\0{}", instance.name, pool.name).as_bytes())
}

/// Decides what to do with the content.
pub(super) fn decide(content: Content, expected: Uuid, format: bool, namespace: &Namespace) -> Found<Reason> {
    let make = |force| match (format, namespace.size_bytes) {
        (false, _) => Found::NotOurs(Reason::Blank),
        (true, bytes) if bytes < NAMESPACE_BYTES_MIN => Found::NotOurs(Reason::TooSmall(bytes)),
        (true, _) => Found::Blank { force },
    };
    match content {
        Content::Xfs { uuid, unfinished: true, .. } if uuid == expected => make(true),
        Content::Xfs { uuid, .. } if uuid == expected => Found::Ours,
        Content::Xfs { uuid, label, .. } => Found::NotOurs(Reason::Stranger { found: uuid, label, expected }),
        Content::Blank => make(false),
        Content::Foreign => Found::NotOurs(Reason::Foreign),
    }
}

pub(super) fn format(device: &Path, uuid: Uuid, force: bool) -> Result<(), Reason> {
    let mut command = Command::new("mkfs.xfs");
    // Without -f, mkfs.xfs refuses to overwrite content that it recognises.
    command.args(["-q", "-L", LABEL, "-m"]).arg(format!("uuid={uuid}"));
    if force {
        command.arg("-f");
    }
    let output = command.arg(device).output().map_err(io("starting mkfs.xfs"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Reason::Format(said.trim().chars().take(500).collect()))
}

pub(super) fn mount(device: &Path, at: &Path) -> Result<(), Reason> {
    std::fs::create_dir_all(at).map_err(io("making the mount point"))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    rustix::mount::mount(device, at, "xfs", flags, Some(c"prjquota")).map_err(|errno| match errno {
        // XFS: structure needs cleaning, or a checksum is wrong.
        rustix::io::Errno::UCLEAN | rustix::io::Errno::BADMSG => Reason::Damaged,
        errno => io("mounting the file system")(errno.into()),
    })
}

/// By default XFS retries metadata writes indefinitely, even after another host has taken the namespace, and would write
/// stale metadata as soon as nothing refuses it. So it shuts down at the first error instead.
pub(super) fn end_at_the_first_error(xfs: &Path, device: &str) -> io::Result<()> {
    for class in ["default", "EIO", "ENODEV"] {
        std::fs::write(xfs.join(device).join("error/metadata").join(class).join("max_retries"), "0")?;
    }
    Ok(())
}

/// Reads the record in the file system of this device without replaying its log, and so without writing anything. The record
/// is overwritten in place, so reading it does not need the log. Only a record made a moment before its machine died may be
/// invisible until the log is replayed.
pub(super) fn peek(device: &Path, at: &Path) -> Result<Option<PoolRecord>, Reason> {
    std::fs::create_dir_all(at).map_err(io("making the mount point"))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::RDONLY;
    rustix::mount::mount(device, at, "xfs", flags, Some(c"norecovery"))
        .map_err(|errno| io("looking into the file system")(errno.into()))?;
    let recorded = record::read(at);
    rustix::mount::unmount(at, UnmountFlags::empty())
        .map_err(|errno| io("unmounting what was looked into")(errno.into()))?;
    recorded.map_err(io("reading the pool's epoch"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(size_bytes: u64) -> Namespace {
        Namespace {
            name: "nvme0n1".into(),
            device: (259, 0),
            nsid: 1,
            uuid: None,
            nguid: None,
            size_bytes,
            block_bytes: 4096,
            read_only: false,
        }
    }

    #[test]
    fn file_system_is_created_only_on_a_blank_namespace_with_format_set() {
        let expected = Uuid::from_u128(7);
        let large = namespace(1 << 40);
        let xfs = |uuid, unfinished| Content::Xfs { uuid, label: "x".into(), unfinished };
        let decided = |content, format| decide(content, expected, format, &large);
        assert!(matches!(decided(Content::Blank, true), Found::Blank { force: false }));
        assert!(matches!(decided(Content::Blank, false), Found::NotOurs(Reason::Blank)));
        for format in [true, false] {
            assert!(matches!(decided(xfs(expected, false), format), Found::Ours));
            assert!(matches!(decided(Content::Foreign, format), Found::NotOurs(Reason::Foreign)));
            for unfinished in [true, false] {
                let stranger = decided(xfs(Uuid::from_u128(8), unfinished), format);
                assert!(matches!(stranger, Found::NotOurs(Reason::Stranger { .. })));
            }
        }
        assert!(matches!(decided(xfs(expected, true), true), Found::Blank { force: true }));
        assert!(matches!(decided(xfs(expected, true), false), Found::NotOurs(Reason::Blank)));
        let small = decide(Content::Blank, expected, true, &namespace(1 << 20));
        assert!(matches!(small, Found::NotOurs(Reason::TooSmall(_))));
    }
}
