//! The parameters of a StorageClass.

use std::collections::{BTreeMap, HashMap};

use forebay_api::names;
use forebay_proto::admin::{Protection, Quota, Root};
use forebay_proto::root;

use crate::address::{self, ServerAddress};
use crate::error::Error;
use crate::limits::MAP_BYTES_MAX;
use crate::transport::Transport;

/// Prefix of the keys that the sidecars add with `--extra-create-metadata`; kept as labels of the volume.
pub(crate) const METADATA_PREFIX: &str = "csi.storage.k8s.io/";

const KNOWN: &str = "pool, quota (hard or none), protection (optional, sign or seal), transport (auto, rdma or tcp), \
                     server, rootOwner (UID or UID:GID), rootMode (octal), csi.storage.k8s.io/*";
const KNOWN_IN_CLUSTER: &str = "cluster, clusterNamespace, backend, quota (hard or none), protection (optional, sign or \
                                seal), transport (auto, rdma or tcp), rootOwner (UID or UID:GID), rootMode (octal), \
                                csi.storage.k8s.io/*";

/// Deployment mode: some parameters are valid in one mode only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    /// One server, accessed through its admin API.
    OneServer,
    /// The instances of StorageClusters.
    Kubernetes,
}

/// Checked parameters; `None` and `Unspecified` leave the choice to the server.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Parameters {
    /// The StorageCluster with the instances that hold the volume.
    pub(crate) cluster: Option<String>,
    pub(crate) cluster_namespace: Option<String>,
    /// In a cluster, the backend: every instance has a pool with its name.
    pub(crate) pool: Option<String>,
    pub(crate) quota: Quota,
    pub(crate) protection: Protection,
    /// The transport of its mounts; `auto` if not specified.
    pub(crate) transport: Option<Transport>,
    /// Owner and mode of the root of a volume that starts empty.
    pub(crate) root: Option<Root>,
    /// Replaces the addresses that the server advertises.
    pub(crate) server: Option<Vec<ServerAddress>>,
    pub(crate) labels: BTreeMap<String, String>,
}

impl Parameters {
    pub(crate) fn parse(map: &HashMap<String, String>, setting: Setting) -> Result<Self, Error> {
        use Setting::{Kubernetes, OneServer};
        check_size("parameters", map)?;
        let mut parameters = Self::default();
        for (key, value) in map {
            let filled = |field| match value.as_str() {
                "" => Err(Error::invalid(field, "is empty")),
                _ => Ok(Some(value.clone())),
            };
            match (key.as_str(), setting) {
                (names::PARAMETER_CLUSTER, Kubernetes) => parameters.cluster = filled("parameter cluster")?,
                (names::PARAMETER_CLUSTER_NAMESPACE, Kubernetes) => {
                    parameters.cluster_namespace = filled("parameter clusterNamespace")?;
                }
                ("backend", Kubernetes) => parameters.pool = filled("parameter backend")?,
                ("pool", OneServer) => parameters.pool = filled("parameter pool")?,
                ("quota", _) => {
                    parameters.quota = match value.as_str() {
                        "hard" => Quota::Hard,
                        "none" => Quota::None,
                        _ => return Err(Error::invalid("parameter quota", "must be hard or none")),
                    }
                }
                ("protection", _) => {
                    parameters.protection = protection_from(value).ok_or_else(|| {
                        Error::invalid("parameter protection", "must be optional, sign or seal")
                    })?;
                }
                (names::PARAMETER_TRANSPORT, _) => {
                    let transport = Transport::from_word(value);
                    parameters.transport =
                        Some(transport.ok_or_else(|| {
                            Error::invalid("parameter transport", "must be auto, rdma or tcp")
                        })?);
                }
                ("rootOwner", _) => {
                    let (uid, gid) = root::owner(value).ok_or_else(|| {
                        Error::invalid("parameter rootOwner", "must be UID or UID:GID, by number")
                    })?;
                    let root = parameters.root.get_or_insert_default();
                    (root.uid, root.gid) = (Some(uid), gid);
                }
                ("rootMode", _) => {
                    let mode = root::mode(value).ok_or_else(|| {
                        Error::invalid(
                            "parameter rootMode",
                            "must be octal, at most 7777: quote it, such as \"0750\"",
                        )
                    })?;
                    parameters.root.get_or_insert_default().mode = Some(mode);
                }
                ("server", OneServer) => {
                    parameters.server = Some(address::parse_list("parameter server", value)?);
                }
                (_, _) if key.starts_with(METADATA_PREFIX) => {
                    parameters.labels.insert(key.clone(), value.clone());
                }
                (_, setting) => {
                    let known = if setting == OneServer { KNOWN } else { KNOWN_IN_CLUSTER };
                    return Err(Error::UnknownParameter { key: key.clone(), known });
                }
            }
        }
        Ok(parameters)
    }
}

/// CSI: the keys and values of a map have a common size limit.
pub(crate) fn check_size(field: &'static str, map: &HashMap<String, String>) -> Result<(), Error> {
    let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MAP_BYTES_MAX {
        return Err(Error::invalid(field, format!("{bytes} bytes are more than {MAP_BYTES_MAX}")));
    }
    Ok(())
}

/// Parses the value used in parameters and volume contexts.
pub(crate) fn protection_from(word: &str) -> Option<Protection> {
    match word {
        "optional" => Some(Protection::Optional),
        "sign" => Some(Protection::Sign),
        "seal" => Some(Protection::Seal),
        _ => None,
    }
}

/// The value used in parameters and volume contexts; unspecified means optional for a client.
pub(crate) fn protection_word(protection: Protection) -> &'static str {
    match protection {
        Protection::Unspecified | Protection::Optional => "optional",
        Protection::Sign => "sign",
        Protection::Seal => "seal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters, Error> {
        parse_in(Setting::OneServer, pairs)
    }

    fn parse_in(setting: Setting, pairs: &[(&str, &str)]) -> Result<Parameters, Error> {
        let map = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Parameters::parse(&map, setting)
    }

    #[test]
    fn cluster_parameters_are_valid_only_in_kubernetes_mode() {
        let pairs =
            [("cluster", "c"), ("clusterNamespace", "ns"), ("backend", "fast"), ("protection", "sign")];
        let parameters = parse_in(Setting::Kubernetes, &pairs).expect("known");
        assert_eq!(parameters.cluster.as_deref(), Some("c"));
        assert_eq!(parameters.cluster_namespace.as_deref(), Some("ns"));
        assert_eq!(parameters.pool.as_deref(), Some("fast"));
        for (setting, pair) in [
            (Setting::Kubernetes, ("pool", "p")),
            (Setting::Kubernetes, ("server", "h")),
            (Setting::Kubernetes, ("cluster", "")),
            (Setting::Kubernetes, ("backend", "")),
            (Setting::OneServer, ("cluster", "c")),
            (Setting::OneServer, ("backend", "fast")),
        ] {
            let status = tonic::Status::from(parse_in(setting, &[pair]).expect_err(pair.0));
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{pair:?}");
        }
    }

    #[test]
    fn known_parameters_are_parsed() {
        let parameters = parse(&[
            ("pool", "fast"),
            ("quota", "none"),
            ("protection", "seal"),
            ("transport", "tcp"),
            ("server", "a:1,b"),
            ("rootOwner", "1000:100"),
            ("rootMode", "01770"),
            ("csi.storage.k8s.io/pvc/name", "data"),
        ])
        .expect("known");
        assert_eq!(parameters.pool.as_deref(), Some("fast"));
        assert_eq!((parameters.quota, parameters.protection), (Quota::None, Protection::Seal));
        assert_eq!(parameters.transport, Some(Transport::Tcp));
        assert_eq!(parameters.server.expect("given").len(), 2);
        assert_eq!(parameters.root, Some(Root { uid: Some(1000), gid: Some(100), mode: Some(0o1770) }));
        let owner = parse(&[("rootOwner", "7")]).expect("known").root;
        assert_eq!(owner, Some(Root { uid: Some(7), gid: None, mode: None }));
        assert_eq!(parameters.labels["csi.storage.k8s.io/pvc/name"], "data");
        assert_eq!(parse(&[]).expect("nothing to refuse"), Parameters::default());
    }

    #[test]
    fn unknown_parameter_error_lists_the_known_ones() {
        let message = parse(&[("Pool", "x")]).expect_err("unknown").to_string();
        assert!(
            message.contains("\"Pool\"") && message.contains("protection (optional, sign or seal)"),
            "{message}"
        );
    }

    #[test]
    fn invalid_parameter_values_are_refused() {
        let long = "x".repeat(5000);
        for pair in [
            ("pool", ""),
            ("quota", "soft"),
            ("protection", "SEAL"),
            ("transport", "RDMA"),
            ("server", "a/b"),
            ("rootOwner", ""),
            ("rootOwner", "root"),
            ("rootOwner", "+1"),
            ("rootOwner", "1:"),
            ("rootOwner", "1:2:3"),
            ("rootOwner", "4294967295"),
            ("rootMode", ""),
            ("rootMode", "0o750"),
            ("rootMode", "10000"),
            ("rootMode", "888"),
            ("csi.storage.k8s.io/pvc/name", &*long),
        ] {
            let status = tonic::Status::from(parse(&[pair]).expect_err(pair.0));
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{pair:?}");
        }
    }

    /// The page documents the parameters; this compares its two tables with the known ones.
    #[test]
    fn every_parameter_is_in_the_reference() {
        let path = forebay_testing::generated::root().join("docs/reference/storageclass.md");
        let page = std::fs::read_to_string(path).expect("the page");
        for (known, heading) in [(KNOWN_IN_CLUSTER, "## Parameters\n"), (KNOWN, "## With one server\n")] {
            // Without the text in parentheses.
            let names = known.split('(').map(|part| part.rsplit(')').next().unwrap_or_default());
            let names = names.collect::<String>();
            let mut names: Vec<&str> = names.split(',').map(str::trim).collect();
            names.sort_unstable();
            let (_, table) = page.split_once(heading).expect(heading);
            let rows = table.lines().skip_while(|line| !line.starts_with("|---"));
            let rows = rows.skip(1).take_while(|line| line.starts_with('|'));
            let mut shown: Vec<&str> = rows.filter_map(|row| row.split('`').nth(1)).collect();
            shown.sort_unstable();
            assert_eq!(shown, names, "{heading}");
        }
    }
}
