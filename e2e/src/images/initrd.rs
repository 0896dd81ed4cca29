//! The initial file system of the boot: busybox, a few modules and a script, as a cpio archive.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::cache::{Artefact, Cache, Recipe};
use crate::progress::step;

/// Mounts the read-only images, overlays the root with a tmpfs and executes the agent as init.
const INIT: &str = r#"#!/bin/busybox sh
B=/bin/busybox
die() { echo "forebay-initrd: $*"; $B poweroff -f; }
$B mount -t devtmpfs dev /dev && $B mount -t proc proc /proc && $B mount -t sysfs sys /sys || die "no /dev, /proc or /sys"
while read m; do $B insmod /m/$m || die "module $m"; done < /m/list
$B mount -t erofs -o ro /dev/vda /root || die "no root image"
$B mount -t tmpfs -o size=60% rw /rw && $B mkdir /rw/upper /rw/work /rw/new || die "no tmpfs"
$B mount -t overlay -o lowerdir=/root,upperdir=/rw/upper,workdir=/rw/work overlay /rw/new || die "no overlay"
$B mount -t erofs -o ro /dev/vdb /rw/new/usr/lib/modules || die "no modules image"
$B mount -t erofs -o ro /dev/vdc /rw/new/opt/forebay || die "no product image"
for d in dev proc sys; do $B mount -o move /$d /rw/new/$d; done
exec $B switch_root /rw/new /opt/forebay/bin/forebay-guest init
"#;

/// The cache entry: `initrd.cpio`.
pub fn get(cache: &Cache, kernel: &Artefact, root: &Artefact) -> Result<Artefact> {
    let recipe = Recipe::default().with("kernel", kernel.key()).with("root", root.key()).with("init", INIT);
    cache.get("initrd", &recipe, |into| {
        step("making the initrd", || make(&kernel.file("boot"), &root.file("tree/usr/bin/busybox"), into))
    })
}

fn make(modules: &Path, busybox: &Path, into: &Path) -> Result<()> {
    let mut cpio = Cpio::default();
    for folder in ["bin", "dev", "m", "proc", "root", "rw", "sys"] {
        cpio.add(folder, 0o040_755, &[]);
    }
    cpio.add("init", 0o100_755, INIT.as_bytes());
    cpio.add("bin/busybox", 0o100_755, &fs::read(busybox)?);
    for entry in fs::read_dir(modules)? {
        let entry = entry?;
        cpio.add(&format!("m/{}", entry.file_name().display()), 0o100_644, &fs::read(entry.path())?);
    }
    fs::write(into.join("initrd.cpio"), cpio.finish())?;
    Ok(())
}

/// A cpio archive in the "newc" format, with only the features that the kernel's initramfs needs.
#[derive(Default)]
struct Cpio {
    bytes: Vec<u8>,
    entries: u32,
}

impl Cpio {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let links = if mode & 0o040_000 != 0 { 2 } else { 1 };
        let size = content.len() as u32;
        let name_size = name.len() as u32 + 1;
        // inode, mode, uid, gid, links, mtime, size, device and rdevice major/minor, name size, checksum
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_has_aligned_headers_and_ends_with_a_trailer() {
        let mut cpio = Cpio::default();
        cpio.add("d", 0o040_755, &[]);
        cpio.add("d/file", 0o100_644, b"12345");
        let bytes = cpio.finish();
        assert_eq!(bytes.len() % 4, 0);
        let magics = bytes.windows(6).enumerate().filter(|(_, window)| window == b"070701").map(|(at, _)| at);
        let magics: Vec<usize> = magics.collect();
        assert_eq!(magics.len(), 3);
        assert!(magics.iter().all(|at| at % 4 == 0));
        let at = magics[1];
        assert_eq!(&bytes[at + 6 + 6 * 8..at + 6 + 7 * 8], b"00000005", "the size field");
        assert!(bytes.windows(10).any(|window| window == b"TRAILER!!!"));
    }
}
