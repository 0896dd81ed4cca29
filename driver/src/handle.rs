//! Identifiers of volumes and instances.

use std::fmt;

use crate::limits::INSTANCE_BYTES_MAX;
use crate::names::VolumeId;

/// The name of an instance: `<cluster>-<ordinal>`, a DNS label.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct InstanceName(String);

impl InstanceName {
    /// `None` if no instance can have this name.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        let (cluster, ordinal) = name.rsplit_once('-')?;
        let usable = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        let is_number = !ordinal.is_empty() && ordinal.bytes().all(|b| b.is_ascii_digit());
        let is_name = !cluster.is_empty()
            && !cluster.starts_with('-')
            && !cluster.ends_with('-')
            && cluster.bytes().all(usable);
        (is_number && is_name && name.len() <= INSTANCE_BYTES_MAX && ordinal.parse::<u32>().is_ok())
            .then(|| Self(name.to_owned()))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The StorageCluster that it belongs to.
    pub(crate) fn cluster(&self) -> &str {
        self.0.rsplit_once('-').expect("parse looked for it").0
    }

    pub(crate) fn ordinal(&self) -> u32 {
        let (_, ordinal) = self.0.rsplit_once('-').expect("parse looked for it");
        ordinal.parse().expect("parse looked at it")
    }
}

impl fmt::Display for InstanceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A volume's ID in the orchestrator. A volume never moves to another server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Handle {
    /// `<share>`: on the only server.
    Server { share: VolumeId },
    /// `<instance>/<share>`: on an instance of a StorageCluster.
    Instance { instance: InstanceName, share: VolumeId },
}

impl Handle {
    /// `None` if this driver never assigns such an ID.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        match id.split_once('/') {
            None => Some(Self::Server { share: VolumeId::parse(id)? }),
            Some((instance, share)) => Some(Self::Instance {
                instance: InstanceName::parse(instance)?,
                share: VolumeId::parse(share)?,
            }),
        }
    }

    /// The instance in the ID.
    pub(crate) fn instance(&self) -> Option<&InstanceName> {
        match self {
            Self::Server { .. } => None,
            Self::Instance { instance, .. } => Some(instance),
        }
    }

    /// The share that clients mount.
    pub(crate) fn share(&self) -> &VolumeId {
        match self {
            Self::Server { share } | Self::Instance { share, .. } => share,
        }
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server { share } => share.fmt(f),
            Self::Instance { instance, share } => write!(f, "{instance}/{share}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volume_handles_are_parsed_and_formatted() {
        let handle = Handle::parse("my-cluster-12/pvc-1").expect("a handle");
        let Handle::Instance { instance, share } = &handle else { panic!("{handle:?}") };
        assert_eq!((instance.cluster(), instance.ordinal()), ("my-cluster", 12));
        assert_eq!((share.as_str(), handle.share().as_str()), ("pvc-1", "pvc-1"));
        assert_eq!(handle.to_string(), "my-cluster-12/pvc-1");
        let handle = Handle::parse("pvc-1").expect("a handle");
        assert!(matches!(&handle, Handle::Server { share } if share.as_str() == "pvc-1"));
        assert_eq!(handle.to_string(), "pvc-1");
    }

    #[test]
    fn invalid_volume_handles_are_rejected() {
        let long = format!("{}-0/v", "c".repeat(62));
        for id in [
            "",
            "Pvc-1",
            "-",
            "c-0/",
            "/v",
            "c/v",
            "-0/v",
            "c-/v",
            "c-x/v",
            "c--0/v",
            "C-0/v",
            "c.d-0/v",
            "c-0/v/w",
            "c-0/../v",
            "c-0/-",
            "c-4294967296/v",
            "c-+1/v",
            &long,
        ] {
            assert_eq!(Handle::parse(id), None, "{id}");
        }
    }
}
