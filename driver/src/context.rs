//! The volume context: what a node must know to mount a volume, made by the controller.

use std::collections::HashMap;

use forebay_proto::admin::Protection;

use crate::address::{self, ServerAddress};
use crate::error::Error;
use crate::names::VolumeId;
use crate::options::DIALECT_DEFAULT;
use crate::parameters::{check_size, protection_from, protection_word};

const SERVER: &str = "server";
const SHARE: &str = "share";
const DIALECT: &str = "dialect";
const PROTECTION: &str = "protection";

/// Where and how to mount a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeContext {
    /// One at least; tried in this order.
    pub(crate) servers: Vec<ServerAddress>,
    pub(crate) share: VolumeId,
    pub(crate) dialect: String,
    pub(crate) protection: Protection,
}

impl VolumeContext {
    pub(crate) fn new(servers: Vec<ServerAddress>, share: VolumeId, protection: Protection) -> Self {
        Self { servers, share, dialect: DIALECT_DEFAULT.to_owned(), protection }
    }

    pub(crate) fn to_map(&self) -> HashMap<String, String> {
        HashMap::from([
            (SERVER.to_owned(), address::format_list(&self.servers)),
            (SHARE.to_owned(), self.share.to_string()),
            (DIALECT.to_owned(), self.dialect.clone()),
            (PROTECTION.to_owned(), protection_word(self.protection).to_owned()),
        ])
    }

    /// Reads it back. Other keys are the orchestrator's (csi.storage.k8s.io/…) and left alone.
    pub(crate) fn parse(map: &HashMap<String, String>) -> Result<Self, Error> {
        check_size("volume_context", map)?;
        let get = |key| map.get(key).map(String::as_str);
        let servers = address::parse_list(
            "volume_context.server",
            get(SERVER).ok_or(Error::Missing("volume_context.server"))?,
        )?;
        let share = get(SHARE).ok_or(Error::Missing("volume_context.share"))?;
        let share = VolumeId::parse(share)
            .ok_or_else(|| Error::invalid("volume_context.share", "is no name of a share"))?;
        let protection = protection_from(get(PROTECTION).unwrap_or("optional"))
            .ok_or_else(|| Error::invalid("volume_context.protection", "none of optional, sign and seal"))?;
        let dialect = get(DIALECT).unwrap_or(DIALECT_DEFAULT).to_owned();
        Ok(Self { servers, share, dialect, protection })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_reads_what_the_controller_wrote() {
        let servers = address::parse_list("server", "10.0.0.1,[fd00::1]:1445").expect("addresses");
        let share = VolumeId::from_name("pvc-1").expect("a name");
        let context = VolumeContext::new(servers, share, Protection::Seal);
        let mut map = context.to_map();
        assert_eq!(map["server"], "10.0.0.1:445,[fd00::1]:1445");
        map.insert("csi.storage.k8s.io/pod.name".into(), "p".into());
        assert_eq!(VolumeContext::parse(&map).expect("its own"), context);
    }

    #[test]
    fn incomplete_or_odd_contexts_are_refused() {
        let context = |pairs: &[(&str, &str)]| {
            VolumeContext::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        let good = [("server", "h"), ("share", "s")];
        assert!(context(&good).is_ok());
        assert!(context(&good[..1]).is_err());
        assert!(context(&good[1..]).is_err());
        assert!(context(&[("server", "h"), ("share", "../s")]).is_err());
        assert!(context(&[("server", "h/x"), ("share", "s")]).is_err());
        assert!(context(&[("server", "h"), ("share", "s"), ("protection", "x")]).is_err());
    }
}
