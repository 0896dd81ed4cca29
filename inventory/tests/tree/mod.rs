//! Trees of sysfs and procfs as text, unpacked into a scratch directory.
//!
//! A line is `path<TAB>content` (with `\n` and `\t` for line ends and tabs), `path<TAB>-> target` for a symbolic link, or
//! `path/` for a directory; `#` begins a remark. The trees are put together from what kernel and drivers are known to
//! show, reduced to what is relevant; only those called captured are from running kernels.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use forebay_inventory::{Host, Inventory};
use tempfile::TempDir;

pub fn unpack(text: &str, root: &Path) {
    for line in text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
        match line.split_once('\t') {
            None => fs::create_dir_all(root.join(line)).unwrap(),
            Some((path, content)) => {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                match content.strip_prefix("-> ") {
                    Some(target) => symlink(target, path).unwrap(),
                    None => {
                        let mut content = content.replace("\\n", "\n").replace("\\t", "\t");
                        if !content.is_empty() && !content.ends_with('\n') {
                            content.push('\n');
                        }
                        fs::write(path, content).unwrap();
                    }
                }
            }
        }
    }
}

/// A scratch directory with these trees in it.
pub fn unpacked(trees: &[&str]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for tree in trees {
        unpack(tree, dir.path());
    }
    dir
}

pub fn read(trees: &[&str]) -> Inventory {
    Host::at(unpacked(trees).path()).read()
}
