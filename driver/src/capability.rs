//! Volume capabilities: mounted file systems, in every access mode.

use forebay_proto::csi::VolumeCapability;
use forebay_proto::csi::volume_capability::access_mode::Mode;
use forebay_proto::csi::volume_capability::{AccessType, MountVolume};

use crate::error::Error;

/// One checked capability.
#[derive(Clone, Debug)]
pub(crate) struct Capability {
    pub(crate) mount: MountVolume,
    pub(crate) mode: Mode,
}

impl Capability {
    pub(crate) fn parse(capability: Option<&VolumeCapability>) -> Result<Self, Error> {
        let capability = capability.ok_or(Error::Missing("volume_capability"))?;
        let mount = match &capability.access_type {
            Some(AccessType::Mount(mount)) => mount.clone(),
            Some(AccessType::Block(_)) => {
                return Err(Error::Capability("block volumes are not supported, only mounted ones".into()));
            }
            None => return Err(Error::Missing("volume_capability.access_type")),
        };
        if !matches!(mount.fs_type.as_str(), "" | "cifs" | "smb3") {
            return Err(Error::Capability(format!(
                "fs_type {:?} is not supported, only cifs",
                mount.fs_type
            )));
        }
        let mode = capability.access_mode.as_ref().ok_or(Error::Missing("volume_capability.access_mode"))?;
        match Mode::try_from(mode.mode) {
            Ok(Mode::Unknown) | Err(_) => {
                Err(Error::Capability(format!("access mode {} is unknown", mode.mode)))
            }
            Ok(mode) => Ok(Self { mount, mode }),
        }
    }

    /// Parses all capabilities of a request; at least one is required.
    pub(crate) fn parse_all(capabilities: &[VolumeCapability]) -> Result<Vec<Self>, Error> {
        if capabilities.is_empty() {
            return Err(Error::Missing("volume_capabilities"));
        }
        capabilities.iter().map(|c| Self::parse(Some(c))).collect()
    }

    /// Whether the mode itself excludes writes.
    pub(crate) fn is_read_only(&self) -> bool {
        matches!(self.mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly)
    }

    /// The group that the volume's files must show.
    pub(crate) fn group(&self) -> Result<Option<u32>, Error> {
        match self.mount.volume_mount_group.as_str() {
            "" => Ok(None),
            group => group.parse().map(Some).map_err(|_| {
                Error::invalid("volume_mount_group", format!("{group:?} is not a numeric group ID"))
            }),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use forebay_proto::csi::volume_capability::{AccessMode, BlockVolume};

    use super::*;

    pub(crate) fn mount_capability(mode: Mode, flags: &[&str]) -> VolumeCapability {
        VolumeCapability {
            access_type: Some(AccessType::Mount(MountVolume {
                mount_flags: flags.iter().map(|f| (*f).to_owned()).collect(),
                ..Default::default()
            })),
            access_mode: Some(AccessMode { mode: mode.into() }),
        }
    }

    #[test]
    fn every_access_mode_is_supported_for_mount_volumes() {
        for (mode, read_only) in [
            (Mode::SingleNodeWriter, false),
            (Mode::SingleNodeReaderOnly, true),
            (Mode::MultiNodeReaderOnly, true),
            (Mode::MultiNodeSingleWriter, false),
            (Mode::MultiNodeMultiWriter, false),
            (Mode::SingleNodeSingleWriter, false),
            (Mode::SingleNodeMultiWriter, false),
        ] {
            let capability = Capability::parse(Some(&mount_capability(mode, &[]))).expect("offered");
            assert_eq!(capability.is_read_only(), read_only, "{mode:?}");
        }
    }

    #[test]
    fn unsupported_capabilities_are_invalid_arguments() {
        let good = mount_capability(Mode::MultiNodeMultiWriter, &[]);
        let mut ext4 = good.clone();
        if let Some(AccessType::Mount(mount)) = &mut ext4.access_type {
            mount.fs_type = "ext4".into();
        }
        for bad in [
            None,
            Some(VolumeCapability { access_type: None, ..good.clone() }),
            Some(VolumeCapability { access_mode: None, ..good.clone() }),
            Some(VolumeCapability { access_type: Some(AccessType::Block(BlockVolume {})), ..good.clone() }),
            Some(VolumeCapability { access_mode: Some(AccessMode { mode: 0 }), ..good.clone() }),
            Some(VolumeCapability { access_mode: Some(AccessMode { mode: 99 }), ..good }),
            Some(ext4),
        ] {
            let error = Capability::parse(bad.as_ref()).expect_err("refused");
            assert_eq!(tonic::Status::from(error).code(), tonic::Code::InvalidArgument, "{bad:?}");
        }
        assert!(Capability::parse_all(&[]).is_err());
    }

    #[test]
    fn volume_mount_group_must_be_numeric() {
        let with = |group: &str| Capability {
            mount: MountVolume { volume_mount_group: group.into(), ..Default::default() },
            mode: Mode::MultiNodeMultiWriter,
        };
        assert_eq!(with("").group().expect("none"), None);
        assert_eq!(with("2000").group().expect("a number"), Some(2000));
        assert!(with("staff").group().is_err());
    }
}
