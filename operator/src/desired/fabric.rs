//! Backends on fabrics: which namespace belongs to which instance, and how its server reaches it. Pure.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use forebay_api::cluster::{Backend, BackendKind};
use forebay_api::fabric::{TargetBackend, TargetNode};
use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use super::{View, internal_ip, ordinal};

/// UUID name space for the namespaces of the bundled target. It never changes: hosts identify namespaces by these UUIDs.
const NAMESPACES: Uuid = Uuid::from_u128(0x2d5c_91b7_4f0e_4a63_9c18_7be0_35ad_f261);
/// Prefix of the bundled target's NQNs.
const NQN: &str = "nqn.2026-01.io.forebay:";
/// Maximum length of an NQN in bytes (NVMe Base 4.7).
const NQN_BYTES_MAX: usize = 223;
const FILE: &str = "file";

/// Location of an instance's namespace on the bundled target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The node.
    pub node: String,
    /// Drive or partition of the node; `None` if the namespace is a file in the node's directory.
    pub device: Option<String>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.node, self.device.as_deref().unwrap_or(FILE))
    }
}

impl FromStr for Place {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (node, device) = text.split_once(' ').ok_or(())?;
        if node.is_empty() || device.is_empty() {
            return Err(());
        }
        Ok(Self { node: node.to_owned(), device: (device != FILE).then(|| device.to_owned()) })
    }
}

/// A pool's namespace, and the paths to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fabric {
    /// Subsystem.
    pub nqn: String,
    /// Namespace, `uuid:…` or `nguid:…`.
    pub namespace: String,
    /// Paths.
    pub paths: Vec<String>,
    /// Whether a file system is made on a blank namespace.
    pub format: bool,
    /// Whether every change is on the namespace before it is acknowledged.
    pub write_through: bool,
    /// See [`forebay_api::fabric::NvmeofBackend::connect_timeout_seconds`].
    pub connect_time_s: u32,
    /// See [`forebay_api::fabric::NvmeofBackend::loss_timeout_seconds`]; always short enough that no other server can be
    /// serving yet.
    pub loss_time_s: u32,
    /// See [`forebay_api::fabric::NvmeofBackend::keep_alive_seconds`].
    pub keep_alive_s: u32,
    /// Secret with the keys, and whether the target authenticates itself, too.
    pub keys: Option<(String, bool)>,
    /// Version of the TLS PSK identity, if there is a TLS key.
    pub tls_identity: Option<u8>,
    /// Location on the bundled target.
    pub place: Option<Place>,
}

/// Returns the namespace of an instance's pool, or why there is none. Not for kind Directory.
///
/// # Errors
///
/// A sentence that names the fix.
pub fn of(view: &View<'_>, instance: &str, backend: &Backend) -> Result<Fabric, String> {
    let name = &backend.name;
    match backend.kind {
        BackendKind::Directory => Err(format!("backend {name} is a directory")),
        BackendKind::NVMeoF => {
            let nvmeof =
                backend.nvmeof.as_ref().ok_or_else(|| format!("backend {name} lacks the field nvmeof"))?;
            let number = ordinal(&view.name, instance);
            let found = nvmeof.namespaces.iter().find(|n| Some(n.instance) == number).ok_or_else(|| {
                format!("backend {name} has no namespace for {instance}: add one to nvmeof.namespaces")
            })?;
            let namespace = match (&found.uuid, &found.nguid) {
                (Some(uuid), _) => format!("uuid:{}", uuid.to_lowercase()),
                (None, Some(nguid)) => format!("nguid:{}", nguid.to_lowercase()),
                (None, None) => {
                    return Err(format!(
                        "backend {name}: the namespace of {instance} has neither uuid nor nguid"
                    ));
                }
            };
            Ok(Fabric {
                nqn: found.nqn.clone(),
                namespace,
                paths: nvmeof.paths.clone(),
                format: nvmeof.format,
                write_through: nvmeof.write_through,
                connect_time_s: nvmeof.connect_timeout_seconds,
                loss_time_s: loss_seconds(view, nvmeof.loss_timeout_seconds),
                keep_alive_s: nvmeof.keep_alive_seconds,
                keys: nvmeof.dhchap_secret.as_ref().map(|s| (s.name.clone(), s.mutual)),
                tls_identity: nvmeof.tls_secret.as_ref().map(|s| s.identity),
                place: None,
            })
        }
        BackendKind::Target => {
            let target =
                backend.target.as_ref().ok_or_else(|| format!("backend {name} lacks the field target"))?;
            let place = place(view, instance, name).ok_or_else(|| {
                format!("backend {name}: target.nodes has no free device for {instance}: add one")
            })?;
            let address = target_address(view, target, &place.node).ok_or_else(|| {
                format!(
                    "backend {name}: target node {} has no known address{}: set one in target.nodes",
                    place.node,
                    target.network.as_ref().map(|n| format!(" in {n}")).unwrap_or_default()
                )
            })?;
            let path = std::net::SocketAddr::new(address, target.port);
            Ok(Fabric {
                nqn: nqn(view, instance, name),
                namespace: format!("uuid:{}", uuid(view, instance, name)),
                paths: vec![format!("{}://{path}", target.transport.as_str())],
                format: target.format,
                write_through: target.write_through,
                connect_time_s: target.connect_timeout_seconds,
                loss_time_s: loss_seconds(view, target.loss_timeout_seconds),
                keep_alive_s: target.keep_alive_seconds,
                keys: None,
                tls_identity: None,
                place: Some(place),
            })
        }
    }
}

fn loss_seconds(view: &View<'_>, configured: u32) -> u32 {
    if view.movable() { view.cluster.spec.takeover.loss_seconds(configured) } else { configured }
}

/// Returns everything that keeps an instance from having its namespaces and its address.
#[must_use]
pub fn missing(view: &View<'_>, instance: &str) -> Vec<String> {
    let spec = &view.cluster.spec;
    let backends = spec.backends.iter().filter(|b| b.is_on_fabric());
    let mut missing: Vec<String> = backends.filter_map(|b| of(view, instance, b).err()).collect();
    if spec.uses_fabric() && spec.network.host_network && own_address(view, instance).is_none() {
        missing.push(format!(
            "{instance} has no address of its own: network.addresses needs an IP address with a prefix length for \
             each instance"
        ));
    }
    missing
}

/// Returns the instance's own address as configured, with its prefix length.
#[must_use]
pub fn own_network(view: &View<'_>, instance: &str) -> Option<String> {
    let number = usize::try_from(ordinal(&view.name, instance)?).ok()?;
    let text = view.cluster.spec.network.addresses.get(number)?;
    network(text).map(|_| text.clone())
}

/// Returns the instance's own address.
#[must_use]
pub fn own_address(view: &View<'_>, instance: &str) -> Option<IpAddr> {
    network(&own_network(view, instance)?).map(|(address, _)| address)
}

/// Parses an address with a prefix length.
#[must_use]
pub fn network(text: &str) -> Option<(IpAddr, u8)> {
    let (address, length) = text.split_once('/')?;
    let (address, length): (IpAddr, u8) = (address.parse().ok()?, length.parse().ok()?);
    (length <= if address.is_ipv4() { 32 } else { 128 }).then_some((address, length))
}

fn is_in(address: IpAddr, (network, length): (IpAddr, u8)) -> bool {
    match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(n)) => {
            let shift = 32 - u32::from(length);
            u32::from(a).checked_shr(shift).unwrap_or(0) == u32::from(n).checked_shr(shift).unwrap_or(0)
        }
        (IpAddr::V6(a), IpAddr::V6(n)) => {
            let shift = 128 - u32::from(length);
            u128::from(a).checked_shr(shift).unwrap_or(0) == u128::from(n).checked_shr(shift).unwrap_or(0)
        }
        _ => false,
    }
}

/// Returns the address at which a target's node is reached.
#[must_use]
pub fn target_address(view: &View<'_>, target: &TargetBackend, node: &str) -> Option<IpAddr> {
    let configured = target.nodes.iter().find(|n| n.name == node).and_then(|n| n.address.as_ref());
    if let Some(address) = configured {
        return address.parse().ok();
    }
    let found = view.observed.nodes.iter().find(|n| n.metadata.name.as_deref() == Some(node));
    let Some(wanted) = &target.network else { return found.and_then(|n| internal_ip(n)?.parse().ok()) };
    let wanted = network(wanted)?;
    let storage = view.observed.storage_nodes.iter().find(|s| s.metadata.name.as_deref() == Some(node));
    let ports =
        storage.iter().filter_map(|s| s.status.as_ref()).flat_map(|s| &s.rdma_devices).flat_map(|d| &d.ports);
    let of_ports = ports.flat_map(|p| p.addresses.iter().copied());
    let reported = found.and_then(|n| n.status.as_ref()?.addresses.as_ref());
    let of_node = reported.into_iter().flatten().filter_map(|a| a.address.parse().ok());
    of_ports.chain(of_node).filter(|a| is_in(*a, wanted)).min()
}

/// Returns the NQN of an instance's namespace on the bundled target. It depends on the names only.
#[must_use]
pub fn nqn(view: &View<'_>, instance: &str, backend: &str) -> String {
    let full = format!("{NQN}{}.{}.{backend}.{instance}", view.name, view.settings.namespace);
    if full.len() <= NQN_BYTES_MAX {
        return full;
    }
    let hash: String = Sha256::digest(full.as_bytes()).iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("{NQN}{hash}.{instance}")
}

/// Returns the UUID of that namespace. It depends on the names only.
#[must_use]
pub fn uuid(view: &View<'_>, instance: &str, backend: &str) -> Uuid {
    // None of these names contains a zero byte, so different names give different texts.
    let names = format!("{}\0{}\0{backend}\0{instance}", view.settings.namespace, view.name);
    Uuid::new_v5(&NAMESPACES, names.as_bytes())
}

/// Returns the location of an instance's namespace, present or future. A recorded location never changes, even if the spec
/// does.
#[must_use]
pub fn place(view: &View<'_>, instance: &str, backend: &str) -> Option<Place> {
    view.places.get(&(instance.to_owned(), backend.to_owned())).cloned()
}

/// Returns the location of every namespace of the bundled target. Recorded ones keep theirs. Instances without one get the
/// node with the fewest namespaces, in order of the instances.
#[must_use]
pub fn places(
    backends: &[Backend],
    instances: &[String],
    recorded: &BTreeMap<(String, String), Place>,
) -> BTreeMap<(String, String), Place> {
    let mut places = recorded.clone();
    for backend in backends {
        let Some(target) = &backend.target else { continue };
        for instance in instances {
            let key = (instance.clone(), backend.name.clone());
            if places.contains_key(&key) {
                continue;
            }
            let taken: Vec<&Place> =
                places.iter().filter(|((_, b), _)| *b == backend.name).map(|(_, place)| place).collect();
            let devices_taken: Vec<&Place> = places.values().filter(|p| p.device.is_some()).collect();
            let load = |node: &TargetNode| taken.iter().filter(|p| p.node == node.name).count();
            let free = |node: &TargetNode| -> Option<Place> {
                let here = |device: Option<String>| Place { node: node.name.clone(), device };
                if node.directory.is_some() {
                    return Some(here(None));
                }
                let places = node.devices.iter().map(|d| here(Some(d.clone())));
                places.into_iter().find(|p| !devices_taken.contains(&p))
            };
            let best = target
                .nodes
                .iter()
                .enumerate()
                .filter_map(|(n, node)| Some((load(node), n, free(node)?)))
                .min_by_key(|(load, n, _)| (*load, *n));
            if let Some((.., place)) = best {
                places.insert(key, place);
            }
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn backend(nodes: serde_json::Value) -> Backend {
        serde_json::from_value(
            json!({ "name": "main", "kind": "Target", "target": { "nodes": nodes, "sizeGib": 1 } }),
        )
        .expect("a backend")
    }

    fn reported(places: &BTreeMap<(String, String), Place>) -> Vec<String> {
        places.iter().map(|((i, b), p)| format!("{i} {b}: {p}")).collect()
    }

    fn instances(count: u32) -> Vec<String> {
        (0..count).map(|n| format!("a-{n}")).collect()
    }

    #[test]
    fn namespaces_are_spread_over_target_nodes_without_sharing_a_device() {
        let two = backend(json!([
            { "name": "n1", "devices": ["/dev/disk/by-id/a", "/dev/disk/by-id/b"] },
            { "name": "n2", "devices": ["/dev/disk/by-id/a"] },
        ]));
        let found = places(std::slice::from_ref(&two), &instances(4), &BTreeMap::new());
        assert_eq!(
            reported(&found),
            [
                "a-0 main: n1 /dev/disk/by-id/a",
                "a-1 main: n2 /dev/disk/by-id/a",
                "a-2 main: n1 /dev/disk/by-id/b"
            ],
            "the fourth has nowhere to go"
        );
        let mut other = two.clone();
        other.name = "other".to_owned();
        let both = places(&[two, other], &instances(2), &BTreeMap::new());
        assert_eq!(
            reported(&both)[1],
            "a-0 other: n1 /dev/disk/by-id/b",
            "another backend takes another device"
        );
        assert_eq!(both.len(), 3);
    }

    #[test]
    fn recorded_places_are_kept_when_the_spec_changes() {
        let recorded: Place = "gone /dev/disk/by-id/x".parse().expect("a place");
        let recorded = BTreeMap::from([(("a-0".to_owned(), "main".to_owned()), recorded)]);
        let files = backend(json!([{ "name": "n1", "directory": "/mnt/f" }]));
        let found = places(&[files], &instances(3), &recorded);
        assert_eq!(
            reported(&found),
            ["a-0 main: gone /dev/disk/by-id/x", "a-1 main: n1 file", "a-2 main: n1 file"]
        );
    }

    #[test]
    fn networks_are_parsed_and_contain_their_addresses() {
        let of = |text: &str| network(text).expect("a network");
        assert!(is_in("192.168.77.9".parse().expect("an address"), of("192.168.77.0/24")));
        assert!(!is_in("192.168.78.9".parse().expect("an address"), of("192.168.77.0/24")));
        assert!(is_in("10.0.0.1".parse().expect("an address"), of("1.2.3.4/0")));
        assert!(is_in("fd00::1".parse().expect("an address"), of("fd00::/64")));
        assert!(!is_in("fd01::1".parse().expect("an address"), of("fd00::/64")));
        assert!(!is_in("fd01::1".parse().expect("an address"), of("0.0.0.0/0")));
        for bad in ["", "1.2.3.4", "1.2.3.4/33", "::/129", "a/8", "1.2.3/8"] {
            assert_eq!(network(bad), None, "{bad}");
        }
    }
}
