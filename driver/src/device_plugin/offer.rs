//! The RDMA device nodes for containers, as found in the host's sysfs.

use std::fs;
use std::path::Path;

use crate::limits::RDMA_NODES_MAX;

/// The connection manager's device (module rdma_ucm), in sysfs.
const CONNECTION_MANAGER: &str = "sys/class/misc/rdma_cm";

/// Devices of verbs (module ib_uverbs), in sysfs.
const VERBS: &str = "sys/class/infiniband_verbs";

/// Directory of both kinds of device nodes, created by udev.
const NODES: &str = "/dev/infiniband";

/// The devices that the node can offer to containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Device nodes that a container requires, with the same paths as on the host; empty if the node has no RDMA device.
    pub(crate) nodes: Vec<String>,
    /// Whether SMB Direct can use them now.
    pub(crate) usable: bool,
}

impl Offer {
    /// Reads the devices of the host below `root`. Does not check the device nodes: this container's /dev is not the host's.
    pub(crate) fn read(root: &Path, has_usable_port: bool) -> Self {
        let mut names: Vec<String> = fs::read_dir(root.join(VERBS))
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.strip_prefix("uverbs").is_some_and(|n| n.parse::<u32>().is_ok()))
            .collect();
        names.sort_unstable();
        names.truncate(RDMA_NODES_MAX);
        if names.is_empty() {
            return Self::default();
        }
        // A container would not start without its device, so devices are unhealthy without the connection manager.
        let managed = root.join(CONNECTION_MANAGER).exists();
        if managed {
            names.insert(0, "rdma_cm".to_owned());
        }
        let nodes = names.iter().map(|name| format!("{NODES}/{name}")).collect();
        Self { nodes, usable: managed && has_usable_port }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offer_contains_rdma_cm_and_uverbs_device_nodes() {
        let root = tempfile::tempdir().expect("a directory");
        assert_eq!(Offer::read(root.path(), true), Offer::default());
        for entry in ["uverbs1", "uverbs0", "abi_version", "uverbs", "uverbs0x"] {
            fs::create_dir_all(root.path().join(VERBS).join(entry)).expect("free");
        }
        let unmanaged = Offer::read(root.path(), true);
        assert_eq!(unmanaged.nodes, ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]);
        assert!(!unmanaged.usable, "rdma_ucm is not loaded");

        fs::create_dir_all(root.path().join(CONNECTION_MANAGER)).expect("free");
        let offer = Offer::read(root.path(), true);
        assert_eq!(
            offer.nodes,
            ["/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"]
        );
        assert!(offer.usable);
        assert_eq!(Offer::read(root.path(), false), Offer { usable: false, ..offer });
    }
}
