//! The volumes that are mounted on this node, according to the kernel.

use std::collections::HashMap;
use std::fs;

use crate::identity::DRIVER_NAME;
use crate::mountinfo::MountTable;

/// The kernel's report of its SMB client. It is not namespaced: every process sees all sessions.
const DEBUG_DATA: &str = "/proc/fs/cifs/DebugData";

/// A volume that is mounted for pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountedVolume {
    /// Its ID, which is its share's name.
    pub(crate) id: String,
    /// The server's address.
    pub(crate) address: String,
    /// Whether it uses SMB Direct.
    pub(crate) is_rdma: bool,
    /// Channels of its session, if the kernel reports them.
    pub(crate) channels: Option<u32>,
}

/// The volumes that this driver has staged for the kubelet.
pub(crate) fn mounted_volumes(table: &MountTable) -> Vec<MountedVolume> {
    let channels = fs::read_to_string(DEBUG_DATA).map(|text| channels_by_share(&text)).unwrap_or_default();
    staged(table, &channels)
}

/// The kubelet stages at `…/kubernetes.io/csi/DRIVER/HASH/globalmount`.
fn staged(table: &MountTable, channels: &HashMap<String, u32>) -> Vec<MountedVolume> {
    let of_driver = format!("/{DRIVER_NAME}/");
    let mut volumes: Vec<MountedVolume> = table
        .smb()
        .filter(|entry| {
            entry.mount_point.ends_with("globalmount")
                && entry.mount_point.to_str().is_some_and(|path| path.contains(&of_driver))
        })
        .filter_map(|entry| {
            let id = entry.share()?.split('/').next()?.to_owned();
            let address = entry.address().map(|address| address.to_string()).unwrap_or_default();
            let channels = channels.get(&id).copied();
            Some(MountedVolume { id, address, is_rdma: entry.has_super_flag("rdma"), channels })
        })
        .collect();
    volumes.sort_by(|a, b| a.id.cmp(&b.id));
    volumes.dedup_by(|a, b| (&a.id, &a.address) == (&b.id, &b.address));
    volumes
}

/// Channels of each share's session, from DebugData: each session lists its extra channels first, then its shares.
fn channels_by_share(debug_data: &str) -> HashMap<String, u32> {
    let mut by_share = HashMap::new();
    let mut channels = 1;
    for line in debug_data.lines().map(str::trim) {
        if line.contains(") Address: ") {
            channels = 1;
        } else if let Some(further) = line.strip_prefix("Extra Channels:") {
            channels = further.trim().parse::<u32>().map_or(1, |further| 1 + further);
        } else if let Some((_, unc)) = line.split_once(") \\\\")
            && let Some(share) = unc.split_whitespace().next().and_then(|unc| unc.rsplit('\\').next())
        {
            by_share.insert(share.to_owned(), channels);
        }
    }
    by_share
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAGED: &str = "/var/lib/kubelet/plugins/kubernetes.io/csi";

    fn table(lines: &[String]) -> MountTable {
        MountTable::parse(lines.join("\n").as_bytes())
    }

    fn line(mount_point: &str, fs_type: &str, source: &str, options: &str) -> String {
        format!("36 35 0:44 / {mount_point} rw,relatime shared:1 - {fs_type} {source} rw,{options}")
    }

    #[test]
    fn only_volumes_staged_by_this_driver_are_found() {
        let ours = |hash: &str| format!("{STAGED}/csi.forebay.io/{hash}/globalmount");
        let table = table(&[
            line(&ours("1"), "cifs", "//fast-0/vol-b", "username=u,addr=10.0.0.1"),
            line(&ours("2"), "cifs", "//fast-0/vol-a", "username=u,addr=fd00::1,rdma"),
            // A pod's mount of the first volume.
            line("/var/lib/kubelet/pods/1/volumes/x/mount", "cifs", "//fast-0/vol-b", "addr=10.0.0.1"),
            line(&format!("{STAGED}/smb.csi.k8s.io/3/globalmount"), "cifs", "//nas/x", "addr=10.0.0.9"),
            line(&ours("4"), "tmpfs", "//nas/x", "size=1"),
        ]);
        let channels = HashMap::from([("vol-b".to_owned(), 4)]);
        let volume = |id: &str, address: &str, is_rdma, channels| MountedVolume {
            id: id.to_owned(),
            address: address.to_owned(),
            is_rdma,
            channels,
        };
        assert_eq!(
            staged(&table, &channels),
            [volume("vol-a", "fd00::1", true, None), volume("vol-b", "10.0.0.1", false, Some(4))]
        );
    }

    /// Two sessions as shown by Linux 7.2, shortened: one with an extra channel, one without.
    const SHOWN: &str = r"Display Internal CIFS Data Structures for Debugging
CIFS Version 2.60
Servers:
1) ConnectionId: 0x1 Hostname: 10.0.0.1
Number of credits: 8190,1,1 Dialect 0x311 signed
	Sessions:
	1) Address: 10.0.0.1 Uses: 1 Capability: 0x300067	Session Status: 1
	Security type: RawNTLMSSP  SessionId: 0x5eed00000001
	Extra Channels: 1
		Channel: 2 ConnectionId: 0x2
	Shares:
	0) IPC: \\10.0.0.1\IPC$ Mounts: 1 DevInfo: 0x0 Attributes: 0x0
	1) \\10.0.0.1\vol-a Mounts: 1 DevInfo: 0x20 Attributes: 0xc706ff
	Server interfaces: 1	Last updated: 3 seconds ago
2) ConnectionId: 0x3 Hostname: 10.0.0.2
	Sessions:
	1) Address: 10.0.0.2 Uses: 1 Capability: 0x300067	Session Status: 1
	Shares:
	0) IPC: \\10.0.0.2\IPC$ Mounts: 1 DevInfo: 0x0 Attributes: 0x0
	1) \\10.0.0.2\vol-b Mounts: 1 DevInfo: 0x20 Attributes: 0xc706ff
";

    #[test]
    fn channels_are_counted_for_the_session_of_the_share() {
        let channels = channels_by_share(SHOWN);
        assert_eq!((channels.get("vol-a"), channels.get("vol-b")), (Some(&2), Some(&1)));
        assert_eq!(channels_by_share("no such file"), HashMap::new());
    }
}
