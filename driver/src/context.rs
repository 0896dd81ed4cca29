//! The volume context: the information that a node requires to mount a volume, created by the controller.

use std::collections::HashMap;

use forebay_api::names;
use forebay_proto::admin::Protection;

use crate::address::{self, ServerAddress};
use crate::error::Error;
use crate::handle::InstanceName;
use crate::names::VolumeId;
use crate::options::DIALECT_DEFAULT;
use crate::parameters::{check_size, protection_from, protection_word};
use crate::transport::Transport;

const SERVER: &str = "server";
const CLUSTER: &str = names::PARAMETER_CLUSTER;
/// The attribute with the namespace of the volume's cluster.
pub(crate) const CLUSTER_NAMESPACE: &str = names::PARAMETER_CLUSTER_NAMESPACE;
const INSTANCE: &str = "instance";
const SHARE: &str = "share";
const DIALECT: &str = "dialect";
const PROTECTION: &str = "protection";
const TRANSPORT: &str = names::PARAMETER_TRANSPORT;

/// Location of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// At one of these addresses; at least one, tried in this order.
    Servers(Vec<ServerAddress>),
    /// On an instance of a StorageCluster. Its address is looked up at each mount, because it can change.
    Instance { namespace: String, name: InstanceName },
}

/// Where and how to mount a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeContext {
    pub(crate) location: Location,
    pub(crate) share: VolumeId,
    pub(crate) dialect: String,
    pub(crate) protection: Protection,
    pub(crate) transport: Transport,
}

impl VolumeContext {
    pub(crate) fn new(
        location: Location,
        share: VolumeId,
        protection: Protection,
        transport: Transport,
    ) -> Self {
        Self { location, share, dialect: DIALECT_DEFAULT.to_owned(), protection, transport }
    }

    pub(crate) fn to_map(&self) -> HashMap<String, String> {
        let mut map = HashMap::from([
            (SHARE.to_owned(), self.share.to_string()),
            (DIALECT.to_owned(), self.dialect.clone()),
            (PROTECTION.to_owned(), protection_word(self.protection).to_owned()),
            (TRANSPORT.to_owned(), self.transport.word().to_owned()),
        ]);
        match &self.location {
            Location::Servers(servers) => {
                map.insert(SERVER.to_owned(), address::format_list(servers));
            }
            Location::Instance { namespace, name } => {
                map.insert(CLUSTER.to_owned(), name.cluster().to_owned());
                map.insert(CLUSTER_NAMESPACE.to_owned(), namespace.clone());
                map.insert(INSTANCE.to_owned(), name.to_string());
            }
        }
        map
    }

    /// Parses a volume context. Other keys belong to the orchestrator (csi.storage.k8s.io/…) and are ignored.
    pub(crate) fn parse(map: &HashMap<String, String>) -> Result<Self, Error> {
        check_size("volume_context", map)?;
        let get = |key| map.get(key).map(String::as_str);
        let location = match (get(INSTANCE), get(SERVER)) {
            (Some(name), None) => Location::Instance {
                namespace: get(CLUSTER_NAMESPACE)
                    .ok_or(Error::Missing("volume_context.clusterNamespace"))?
                    .to_owned(),
                name: InstanceName::parse(name)
                    .ok_or_else(|| Error::invalid("volume_context.instance", "is not an instance name"))?,
            },
            (None, Some(list)) => Location::Servers(address::parse_list("volume_context.server", list)?),
            (None, None) => return Err(Error::Missing("volume_context.instance or volume_context.server")),
            (Some(_), Some(_)) => {
                return Err(Error::invalid("volume_context", "has both an instance and a server"));
            }
        };
        let share = get(SHARE).ok_or(Error::Missing("volume_context.share"))?;
        let share = VolumeId::parse(share)
            .ok_or_else(|| Error::invalid("volume_context.share", "is not a share name"))?;
        let protection = protection_from(get(PROTECTION).unwrap_or("optional"))
            .ok_or_else(|| Error::invalid("volume_context.protection", "must be optional, sign or seal"))?;
        // Volumes from older versions have no transport.
        let transport = Transport::from_word(get(TRANSPORT).unwrap_or("auto"))
            .ok_or_else(|| Error::invalid("volume_context.transport", "must be auto, rdma or tcp"))?;
        let dialect = get(DIALECT).unwrap_or(DIALECT_DEFAULT).to_owned();
        Ok(Self { location, share, dialect, protection, transport })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_context_round_trips_from_controller_to_node() {
        let servers = address::parse_list("server", "10.0.0.1,[fd00::1]:1445").expect("addresses");
        let share = VolumeId::from_name("pvc-1").expect("a name");
        let context = VolumeContext::new(Location::Servers(servers), share, Protection::Seal, Transport::Tcp);
        let mut map = context.to_map();
        assert_eq!(map["server"], "10.0.0.1:445,[fd00::1]:1445");
        map.insert("csi.storage.k8s.io/pod.name".into(), "p".into());
        assert_eq!(VolumeContext::parse(&map).expect("its own"), context);
    }

    #[test]
    fn context_of_an_instance_volume_has_the_instance_and_no_address() {
        let share = VolumeId::from_name("pvc-1").expect("a name");
        let name = InstanceName::parse("c-1").expect("a name");
        let location = Location::Instance { namespace: "ns".into(), name };
        let context = VolumeContext::new(location, share, Protection::Sign, Transport::Auto);
        let map = context.to_map();
        let get = |key: &str| map.get(key).map(String::as_str);
        assert_eq!(
            [get("cluster"), get("clusterNamespace"), get("instance"), get("share"), get("server")],
            [Some("c"), Some("ns"), Some("c-1"), Some("pvc-1"), None]
        );
        assert_eq!(VolumeContext::parse(&map).expect("its own"), context);
    }

    #[test]
    fn incomplete_or_invalid_contexts_are_refused() {
        let context = |pairs: &[(&str, &str)]| {
            VolumeContext::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        let good = [("server", "h"), ("share", "s")];
        assert!(context(&good).is_ok());
        assert!(context(&good[..1]).is_err());
        assert!(context(&good[1..]).is_err());
        let instance = [("instance", "c-0"), ("share", "s"), ("clusterNamespace", "ns")];
        assert!(context(&instance).is_ok());
        assert!(context(&instance[..2]).is_err());
        assert!(context(&[instance[0], instance[1], instance[2], ("server", "h")]).is_err());
        assert!(context(&[("instance", "c"), instance[1], instance[2]]).is_err());
        assert!(context(&[("server", "h"), ("share", "../s")]).is_err());
        assert!(context(&[("server", "h/x"), ("share", "s")]).is_err());
        assert!(context(&[("server", "h"), ("share", "s"), ("protection", "x")]).is_err());
        assert!(context(&[("server", "h"), ("share", "s"), ("transport", "x")]).is_err());
        assert_eq!(context(&good).expect("without a transport").transport, Transport::Auto);
    }
}
