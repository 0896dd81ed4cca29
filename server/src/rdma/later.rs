//! RDMA devices that came after the container of this server was made.
//!
//! A container is given its device nodes when it is made. A device that is plugged in later shows in sysfs, but nothing opens
//! it: the server reports it (`later_rdma_devices` of GetServerInfo), and the program that runs the container makes a new one.
//! Where there is no container, udev makes the node, and the device is used without further ado.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Devices of verbs (module ib_uverbs), in sysfs.
const VERBS: &str = "sys/class/infiniband_verbs";
/// Their nodes.
const NODES: &str = "dev/infiniband";

/// Knows which devices there were at the beginning.
pub struct Later {
    root: PathBuf,
    at_start: BTreeSet<String>,
}

impl Later {
    /// To be made when the server starts. `root` is `/`.
    #[must_use]
    pub fn begin(root: &Path) -> Self {
        Self { root: root.to_owned(), at_start: verbs(root).map(|(device, _)| device).collect() }
    }

    /// Names of the devices, such as `mlx5_1`, that have come since and that no node opens.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        let closed = |node: &String| !self.root.join(NODES).join(node).exists();
        let later =
            verbs(&self.root).filter(|(device, node)| !self.at_start.contains(device) && closed(node));
        let names: BTreeSet<String> = later.map(|(device, _)| device).collect();
        names.into_iter().collect()
    }
}

/// Each device and its node.
fn verbs(root: &Path) -> impl Iterator<Item = (String, String)> {
    let entries = fs::read_dir(root.join(VERBS)).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let device = fs::read_to_string(entry.path().join("ibdev")).ok()?;
        Some((device.trim().to_owned(), entry.file_name().into_string().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_came_later_is_reported_until_there_is_a_node_to_open_it() {
        let root = tempfile::tempdir().expect("a directory");
        let appear = |node: &str, device: &str| {
            let folder = root.path().join(VERBS).join(node);
            fs::create_dir_all(&folder).expect("free");
            fs::write(folder.join("ibdev"), format!("{device}\n")).expect("free");
        };
        let open = |node: &str| {
            fs::create_dir_all(root.path().join(NODES)).expect("free");
            fs::write(root.path().join(NODES).join(node), "").expect("free");
        };
        assert!(Later::begin(root.path()).devices().is_empty(), "no RDMA at all");

        // That this one has no node is nothing that a new container would fix.
        appear("uverbs0", "mlx5_0");
        let later = Later::begin(root.path());
        assert!(later.devices().is_empty());
        appear("uverbs1", "mlx5_1");
        assert_eq!(later.devices(), ["mlx5_1"]);
        open("uverbs1");
        assert!(later.devices().is_empty());

        // The same NIC under another number, as after a reset of its bus.
        fs::remove_dir_all(root.path().join(VERBS).join("uverbs0")).expect("there");
        appear("uverbs2", "mlx5_0");
        assert!(later.devices().is_empty(), "it was there");
    }
}
