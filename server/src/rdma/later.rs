//! RDMA devices that appeared after the server's container was created.
//!
//! A container receives its device nodes when it is created. A device that is plugged in later is visible in sysfs, but has no
//! node in the container: the server reports it (`later_rdma_devices` of GetServerInfo), and the program that runs the container
//! creates a new one. Without a container, udev creates the node, and the device is used automatically.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Verbs devices (module ib_uverbs) in sysfs.
const VERBS: &str = "sys/class/infiniband_verbs";
/// Their device nodes.
const NODES: &str = "dev/infiniband";

/// Records which devices existed at startup.
pub struct Later {
    root: PathBuf,
    at_start: BTreeSet<String>,
}

impl Later {
    /// Must be created when the server starts. `root` is `/`.
    #[must_use]
    pub fn begin(root: &Path) -> Self {
        Self { root: root.to_owned(), at_start: verbs(root).map(|(device, _)| device).collect() }
    }

    /// Names of the devices, such as `mlx5_1`, that appeared later and have no device node.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        let closed = |node: &String| !self.root.join(NODES).join(node).exists();
        let later =
            verbs(&self.root).filter(|(device, node)| !self.at_start.contains(device) && closed(node));
        let names: BTreeSet<String> = later.map(|(device, _)| device).collect();
        names.into_iter().collect()
    }
}

/// Returns each device and its node.
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
    fn device_added_later_is_reported_until_its_device_node_exists() {
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

        // A new container would not fix the missing node of this device.
        appear("uverbs0", "mlx5_0");
        let later = Later::begin(root.path());
        assert!(later.devices().is_empty());
        appear("uverbs1", "mlx5_1");
        assert_eq!(later.devices(), ["mlx5_1"]);
        open("uverbs1");
        assert!(later.devices().is_empty());

        // The same NIC under another number, as after a bus reset.
        fs::remove_dir_all(root.path().join(VERBS).join("uverbs0")).expect("there");
        appear("uverbs2", "mlx5_0");
        assert!(later.devices().is_empty(), "it was present at the start");
    }
}
