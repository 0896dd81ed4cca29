//! Compares an existing volume with a request.

use std::collections::HashMap;

use forebay_proto::admin::{Protection, Quota, Volume};
use forebay_proto::csi;

use super::home::Home;
use crate::address;
use crate::capability::Capability;
use crate::capacity::Capacity;
use crate::context::VolumeContext;
use crate::error::Error;
use crate::options::{MountOptions, SNAPSHOT};
use crate::parameters::Parameters;
use crate::secrets::Credentials;
use crate::transport::Transport;

/// Labels that the driver stores with a volume, in addition to the orchestrator's.
pub(super) const LABEL_NAME: &str = "csi.forebay.io/name";
pub(super) const LABEL_SERVER: &str = "csi.forebay.io/server";
/// The size that was requested at creation. Servers that do not report `requested_bytes` have no other record of it without a
/// quota.
pub(super) const LABEL_REQUESTED_BYTES: &str = "csi.forebay.io/requested-bytes";

/// The transport of its mounts, if its StorageClass specified one.
pub(super) const LABEL_TRANSPORT: &str = "csi.forebay.io/transport";

/// The transport of a volume's mounts.
pub(super) fn transport(volume: &Volume) -> Transport {
    let word = volume.labels.get(LABEL_TRANSPORT);
    word.and_then(|word| Transport::from_word(word)).unwrap_or_default()
}

/// The hard limit, or the last requested size if there is none.
pub(super) fn size_bytes(volume: &Volume) -> u64 {
    let labelled = || volume.labels.get(LABEL_REQUESTED_BYTES).and_then(|text| text.parse().ok());
    match (volume.capacity_bytes, volume.requested_bytes) {
        (0, 0) => labelled().unwrap_or(0),
        (0, bytes) | (bytes, _) => bytes,
    }
}

/// CSI CreateVolume: an existing volume of this name that does not match the request is ALREADY_EXISTS.
pub(super) fn check_compatible(
    existing: &Volume,
    name: &str,
    capacity: Capacity,
    parameters: &Parameters,
    credentials: &Credentials,
) -> Result<(), Error> {
    let exists = |what| Err(Error::VolumeExists { volume_id: existing.volume_id.clone(), what });
    if existing.labels.get(LABEL_NAME).is_some_and(|n| n != name) {
        return exists("name");
    }
    if !capacity.admits(size_bytes(existing)) {
        return exists("capacity");
    }
    check_parameters(existing, parameters)?;
    if existing.username != credentials.username {
        return exists("username");
    }
    Ok(())
}

/// Parameters that a StorageClass does not specify match every volume.
pub(super) fn check_parameters(existing: &Volume, parameters: &Parameters) -> Result<(), Error> {
    let exists = |what| Err(Error::VolumeExists { volume_id: existing.volume_id.clone(), what });
    if parameters.pool.as_ref().is_some_and(|p| *p != existing.pool) {
        return exists("pool");
    }
    if parameters.quota != Quota::Unspecified && parameters.quota != existing.quota() {
        return exists("quota");
    }
    if parameters.protection != Protection::Unspecified && parameters.protection != existing.protection() {
        return exists("protection");
    }
    if parameters.transport.is_some_and(|t| t != transport(existing)) {
        return exists("transport");
    }
    let is_copy = !existing.source_snapshot_id.is_empty() || !existing.source_volume_id.is_empty();
    if parameters.root.is_some_and(|root| !is_copy && existing.root != Some(root)) {
        return exists("rootOwner or rootMode");
    }
    let servers = parameters.server.as_deref().map(address::format_list);
    if servers.is_some() && servers.as_ref() != existing.labels.get(LABEL_SERVER) {
        return exists("server");
    }
    Ok(())
}

/// A given context must be this volume's.
pub(super) fn check_context(
    home: &Home,
    existing: &Volume,
    map: &HashMap<String, String>,
) -> Result<(), Error> {
    if map.is_empty() {
        return Ok(());
    }
    let context = VolumeContext::parse(map)?;
    if context.share.as_str() != existing.volume_id {
        return Err(Error::invalid("volume_context.share", "is not this volume's"));
    }
    home.check_location(&context.location)
}

/// Whether a node would accept the mount flags.
pub(super) fn check_mount_flags(
    capabilities: &[csi::VolumeCapability],
    protection: Protection,
    transport: Transport,
) -> Result<(), Error> {
    capabilities.iter().try_for_each(|capability| mount_options(capability, protection, transport).map(drop))
}

/// Whether a node would accept the mount flags of a new volume.
pub(super) fn check_mount_flags_of_new(
    capabilities: &[csi::VolumeCapability],
    protection: Protection,
    transport: Transport,
) -> Result<(), Error> {
    for capability in capabilities {
        if mount_options(capability, protection, transport)?.has(SNAPSHOT) {
            let reason = "a new volume has no snapshot to mount: snapshot= is for a PersistentVolume that you create yourself";
            return Err(Error::invalid("mount_flags", reason));
        }
    }
    Ok(())
}

fn mount_options(
    capability: &csi::VolumeCapability,
    protection: Protection,
    transport: Transport,
) -> Result<MountOptions, Error> {
    let capability = Capability::parse(Some(capability))?;
    let flags = &capability.mount.mount_flags;
    let dialect = crate::options::DIALECT_DEFAULT;
    let options = MountOptions::build(dialect, protection, capability.group()?, flags)?;
    transport.with(&options)?;
    Ok(options)
}
