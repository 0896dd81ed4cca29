//! Local NVMe drives: `/sys/block` and `/sys/class/nvme`.

use std::collections::BTreeSet;

use crate::tree::Tree;

/// Unit of `size` in sysfs, regardless of the drive's own block size.
const SECTOR_BYTES: u64 = 512;

/// One local NVMe drive: a namespace of a PCIe controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeDrive {
    /// Block device.
    pub name: String,
    /// Model; empty if the controller reports none.
    pub model: String,
    /// Serial number; empty if the controller reports none.
    pub serial: String,
    /// Globally unique name; `None` if there is none.
    pub wwid: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Whether it is in use: by partitions, a holder, a mount or swap.
    pub in_use: bool,
}

pub(crate) fn read(tree: &Tree<'_>) -> Vec<NvmeDrive> {
    let names = tree.names("sys/block").into_iter().filter(|name| is_namespace(name));
    let names: Vec<String> = names.collect();
    if names.is_empty() {
        return Vec::new();
    }
    let used = used_devices(tree);
    names.into_iter().filter_map(|name| one(tree, name, &used)).collect()
}

/// Whether a name is that of a namespace, such as `nvme0n1`. The paths of native multipath are named `nvme0c1n1` and hidden.
fn is_namespace(name: &str) -> bool {
    let parts = name.strip_prefix("nvme").and_then(|rest| rest.split_once('n'));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    parts.is_some_and(|(controller, namespace)| digits(controller) && digits(namespace))
}

fn one(tree: &Tree<'_>, name: String, used: &BTreeSet<String>) -> Option<NvmeDrive> {
    let at = format!("sys/block/{name}");
    let controller = local_controller(tree, &at)?;
    let number = |path: String| tree.natural(&path);
    let numa_node = number(format!("{controller}/numa_node"))
        .or_else(|| number(format!("{controller}/device/numa_node")));
    let text = |attribute: &str| tree.attribute(&format!("{controller}/{attribute}")).unwrap_or_default();
    let sectors: u64 = tree.number(&format!("{at}/size")).unwrap_or(0);
    Some(NvmeDrive {
        model: text("model"),
        serial: text("serial"),
        wwid: tree.attribute(&format!("{at}/wwid")),
        size_bytes: sectors.saturating_mul(SECTOR_BYTES),
        numa_node,
        in_use: is_in_use(tree, &at, &name, used),
        name,
    })
}

/// Returns the directory of the controller, if it is local. With native multipath, `device` is the subsystem, which contains
/// links to its controllers.
fn local_controller(tree: &Tree<'_>, at: &str) -> Option<String> {
    let device = format!("{at}/device");
    let is_local = |controller: &str| {
        let transport = tree.attribute(&format!("{controller}/transport"));
        transport.is_some_and(|t| t == "pcie" || t == "apple-nvme")
    };
    if is_local(&device) {
        return Some(device);
    }
    let is_controller = |n: &String| {
        n.strip_prefix("nvme")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    let controllers = tree.names(&device).into_iter().filter(is_controller);
    controllers.map(|name| format!("{device}/{name}")).find(|controller| is_local(controller))
}

fn is_in_use(tree: &Tree<'_>, at: &str, name: &str, used: &BTreeSet<String>) -> bool {
    let by_number = tree.attribute(&format!("{at}/dev")).is_some_and(|number| used.contains(&number));
    by_number
        || used.contains(&format!("/dev/{name}"))
        || !tree.names(&format!("{at}/holders")).is_empty()
        // A partition's directory is named after the drive.
        || tree.names(at).iter().any(|entry| {
            entry.strip_prefix(name).is_some_and(|rest| rest.starts_with('p'))
                && tree.exists(&format!("{at}/{entry}/partition"))
        })
}

/// Returns devices that are mounted or used as swap, as `major:minor` and as `/dev/name`.
fn used_devices(tree: &Tree<'_>) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    // Process 1 has the host's mount namespace; the process's own namespace may show less.
    let mounts = tree.list("proc/1/mountinfo").or_else(|| tree.list("proc/self/mountinfo"));
    for line in mounts.unwrap_or_default().lines() {
        // proc_pid_mountinfo(5): id, parent, major:minor, root, mount point, options, optional fields, "-", type, source.
        let mut fields = line.split(' ');
        used.extend(fields.nth(2).map(str::to_owned));
        used.extend(fields.skip_while(|f| *f != "-").nth(2).map(str::to_owned));
    }
    for line in tree.list("proc/swaps").unwrap_or_default().lines().skip(1) {
        used.extend(line.split_whitespace().next().map(str::to_owned));
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvme_namespaces_are_recognised_by_name() {
        for (name, is) in [
            ("nvme0n1", true),
            ("nvme12n34", true),
            ("nvme0c0n1", false),
            ("nvme0n1p1", false),
            ("nvme0", false),
            ("nvme", false),
            ("nvmen1", false),
            ("sda", false),
        ] {
            assert_eq!(is_namespace(name), is, "{name}");
        }
    }
}
