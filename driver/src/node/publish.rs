//! NodePublishVolume and NodeUnpublishVolume: the staged mount shown in a pod's directory.

use std::path::Path;

use forebay_proto::csi::volume_capability::access_mode::Mode;
use forebay_proto::csi::{
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeUnpublishVolumeRequest,
    NodeUnpublishVolumeResponse,
};
use rustix::mount::MountAttrFlags;

use super::told::pod_of;
use super::{NodeService, check_path, check_volume_id, io_error, make_target, mounts};
use crate::capability::Capability;
use crate::deadline::run_until;
use crate::error::Error;
use crate::mount;
use crate::mountinfo::resolve;

impl NodeService {
    /// CSI NodePublishVolume.
    pub(super) async fn publish(
        &self,
        request: NodePublishVolumeRequest,
    ) -> Result<NodePublishVolumeResponse, Error> {
        check_volume_id(&request.volume_id)?;
        let target = check_path("target_path", &request.target_path)?;
        let capability = Capability::parse(request.volume_capability.as_ref())?;
        let volume_id = request.volume_id.clone();
        if request.staging_target_path.is_empty() {
            // CSI NodePublishVolume: FAILED_PRECONDITION where STAGE_UNSTAGE_VOLUME is offered.
            return Err(Error::NotStaged { volume_id, path: "an empty staging_target_path".into() });
        }
        let staging = check_path("staging_target_path", &request.staging_target_path)?;
        let read_only = request.readonly || capability.is_read_only();
        let is_exclusive = capability.mode == Mode::SingleNodeSingleWriter;
        let pod = pod_of(&request.volume_context);
        let claim = self.in_flight.claim(&request.volume_id)?;
        run_until("bind", self.deadlines.mount, move || {
            let _claim = claim;
            publish(&volume_id, &staging, &target, read_only, is_exclusive)
        })
        .await??;
        if let Some(pod) = pod {
            self.told.published(&request.volume_id, pod);
        }
        Ok(NodePublishVolumeResponse {})
    }

    /// CSI NodeUnpublishVolume.
    pub(super) async fn unpublish(
        &self,
        request: NodeUnpublishVolumeRequest,
    ) -> Result<NodeUnpublishVolumeResponse, Error> {
        check_volume_id(&request.volume_id)?;
        let target = check_path("target_path", &request.target_path)?;
        self.unmount(&request.volume_id, target, true).await?;
        Ok(NodeUnpublishVolumeResponse {})
    }
}

/// On a thread of its own: everything here may block.
fn publish(
    volume_id: &str,
    staging: &Path,
    target: &Path,
    read_only: bool,
    is_exclusive: bool,
) -> Result<(), Error> {
    let table = mounts()?;
    let not_staged =
        || Error::NotStaged { volume_id: volume_id.to_owned(), path: staging.display().to_string() };
    let staging = resolve(staging).map_err(|e| io_error("resolve", staging, e))?.ok_or_else(not_staged)?;
    let staged = table.at(&staging).ok_or_else(not_staged)?;

    if let Some(resolved) = resolve(target).map_err(|e| io_error("resolve", target, e))?
        && let Some(entry) = table.at(&resolved)
    {
        let taken = |found| Err(Error::PathTaken { path: target.display().to_string(), found });
        if (&entry.device, &entry.root) != (&staged.device, &staged.root) {
            return taken(entry.describe());
        }
        if entry.is_read_only() != (read_only || staged.is_read_only()) {
            return taken("the volume is published with another readonly".into());
        }
        return Ok(());
    }

    // CSI NodePublishVolume: SINGLE_NODE_SINGLE_WRITER is one target path at a time.
    if is_exclusive && let Some(other) = table.others_of(staged).next() {
        return Err(Error::PublishedElsewhere { path: other.display().to_string() });
    }
    let target = make_target(target)?;
    let attributes = if read_only { MountAttrFlags::MOUNT_ATTR_RDONLY } else { MountAttrFlags::empty() };
    mount::bind(&staging, &target, attributes).map_err(Error::from)
}
