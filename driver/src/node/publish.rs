//! NodePublishVolume and NodeUnpublishVolume: bind-mounts the staged mount in a pod's directory.

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use forebay_proto::admin::Protection;
use forebay_proto::csi::volume_capability::access_mode::Mode;
use forebay_proto::csi::{
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeUnpublishVolumeRequest,
    NodeUnpublishVolumeResponse,
};
use rustix::mount::MountAttrFlags;

use super::claims::{Claim, Sharing};
use super::group::{self, Place};
use super::reported::pod_of;
use super::stage::under;
use super::unmount::Directory;
use super::{NodeService, check_path, check_volume_id, io_error, make_target, mounts};
use crate::capability::Capability;
use crate::context::VolumeContext;
use crate::error::Error;
use crate::mount;
use crate::mountinfo::{MountEntry, MountTable, resolve};
use crate::names::VolumeId;
use crate::options::{DIALECT_DEFAULT, MountOptions};
use crate::secrets::Given;

impl NodeService {
    /// CSI NodePublishVolume.
    pub(super) async fn publish(
        &self,
        mut request: NodePublishVolumeRequest,
    ) -> Result<NodePublishVolumeResponse, Error> {
        let given = Given::take(&mut request.secrets);
        check_volume_id(&request.volume_id)?;
        let target = check_path("target_path", &request.target_path)?;
        let capability = Capability::parse(request.volume_capability.as_ref())?;
        let volume_id = request.volume_id.clone();
        if request.staging_target_path.is_empty() {
            // CSI NodePublishVolume: FAILED_PRECONDITION if STAGE_UNSTAGE_VOLUME is offered.
            return Err(Error::NotStaged { volume_id, path: "an empty staging_target_path".into() });
        }
        let staging = check_path("staging_target_path", &request.staging_target_path)?;
        let read_only = request.readonly || capability.is_read_only();
        let is_exclusive = capability.mode == Mode::SingleNodeSingleWriter;
        let pod = pod_of(&request.volume_context);
        let flags = &capability.mount.mount_flags;
        let gid =
            MountOptions::build(DIALECT_DEFAULT, Protection::Unspecified, capability.group()?, flags)?.gid();
        let sharing = if is_exclusive { Sharing::Alone } else { Sharing::Together };
        let claim = self.claims.publish(&volume_id, &target, sharing)?;
        let (mut claim, place, there) = self.find(claim, &staging, gid, &target).await?;
        let share = VolumeContext::parse(&request.volume_context).ok().map(|context| context.share);
        if there.is_some() && there.as_deref() == share.as_ref().map(VolumeId::as_str) {
            // The kubelet repeats the call for a running pod: the pod has its mount, and a new one would not reach it.
            if let (Ok(given), Place::Mounted { path, entry }) = (given, &place) {
                let context = &request.volume_context;
                claim = self.renew_password(claim, path, entry, &capability, context, given).await?;
            }
            if let Place::Free(_) = place {
                return Ok(NodePublishVolumeResponse {});
            }
            let check = move || publish(&volume_id, &staging, gid, &target, read_only, is_exclusive);
            under(claim, "look", self.deadlines.mount, check).await?;
            return Ok(NodePublishVolumeResponse {});
        }
        // The kubelet stages a volume only while no pod of the node uses it. A pod with another group, or an unusable mount, is
        // detected here, and this call mounts again if it has the Secret.
        if let Some(unstaged) = self.unusable(&place, &staging, gid, &request).await? {
            drop(claim);
            let given = match (given, place) {
                (Ok(given), _) => given,
                (Err(Error::MissingSecret), Place::Free(_)) => return Err(unstaged),
                (Err(Error::MissingSecret), Place::Mounted { path, .. }) => {
                    self.discard(&path, self.claims.volume(&volume_id)?).await?;
                    return Err(unstaged);
                }
                (Err(error), _) => return Err(error),
            };
            let context = &request.volume_context;
            self.mount_for(volume_id.clone(), staging.clone(), &capability, context, given).await?;
            claim = self.claims.publish(&volume_id, &target, sharing)?;
        }
        let of = volume_id.clone();
        under(claim, "bind", self.deadlines.mount, move || {
            publish(&of, &staging, gid, &target, read_only, is_exclusive)
        })
        .await?;
        if let Some(pod) = pod {
            self.reported.published(&volume_id, pod);
        }
        Ok(NodePublishVolumeResponse {})
    }

    /// Finds the volume's mount for this group, and the share that is mounted at the target.
    async fn find(
        &self,
        claim: Claim,
        staging: &Path,
        gid: u32,
        target: &Path,
    ) -> Result<(Claim, Place, Option<String>), Error> {
        let (staging, target) = (staging.to_owned(), target.to_owned());
        let look = move || {
            let table = mounts()?;
            let resolved = resolve(&target).map_err(|e| io_error("resolve", &target, e))?;
            let there = resolved.and_then(|at| table.at(&at)).and_then(MountEntry::share).map(str::to_owned);
            Ok((group::find(&table, &staging, gid)?, there))
        };
        let (claim, (place, there)) = under(claim, "look", self.deadlines.mount, look).await?;
        Ok((claim, place, there))
    }

    /// Why the place cannot be published; `None` if it can.
    async fn unusable(
        &self,
        place: &Place,
        staging: &Path,
        gid: u32,
        request: &NodePublishVolumeRequest,
    ) -> Result<Option<Error>, Error> {
        let volume_id = request.volume_id.clone();
        let (path, entry) = match place {
            Place::Free(path) => {
                let (is_other_group, path) = (path != staging, path.display().to_string());
                return Ok(Some(match is_other_group {
                    true => Error::GroupNotStaged { volume_id, gid, path },
                    false => Error::NotStaged { volume_id, path },
                }));
            }
            Place::Mounted { path, entry } => (path, entry),
        };
        let Some(address) = entry.address().filter(|_| entry.is_smb()) else { return Ok(None) };
        let is_dead = self.is_dead(path, entry.id, address, &request.volume_context).await?;
        Ok(is_dead.then(|| {
            Error::NotNow(format!(
                "the mount at {} did not respond, and its server is no longer at {address}; the call has no Secret to mount it \
                 again: delete the node's other pods that use this volume, and it is staged again",
                path.display()
            ))
        }))
    }

    /// Whether a pod would wait forever on the mount: it does not respond, and its server has another address. A server that is
    /// only unreachable returns at its address.
    async fn is_dead(
        &self,
        path: &Path,
        mount_id: u64,
        address: IpAddr,
        context: &HashMap<String, String>,
    ) -> Result<bool, Error> {
        if self.answers(path, mount_id).await? {
            return Ok(false);
        }
        let Ok(context) = VolumeContext::parse(context) else { return Ok(false) };
        let present = self.present_addresses(&context).await;
        Ok(present.is_some_and(|present| !present.contains(&address)))
    }

    /// CSI NodeUnpublishVolume.
    pub(super) async fn unpublish(
        &self,
        request: NodeUnpublishVolumeRequest,
    ) -> Result<NodeUnpublishVolumeResponse, Error> {
        check_volume_id(&request.volume_id)?;
        let target = check_path("target_path", &request.target_path)?;
        let claim = self.claims.unpublish(&request.volume_id, &target)?;
        self.unmount(&request.volume_id, target, Directory::Remove, claim).await?;
        Ok(NodeUnpublishVolumeResponse {})
    }
}

/// The mount of the volume at the place.
fn staged(place: Place, volume_id: &str) -> Result<(PathBuf, MountEntry), Error> {
    match place {
        Place::Mounted { path, entry } => Ok((path, entry)),
        Place::Free(path) => {
            Err(Error::NotStaged { volume_id: volume_id.to_owned(), path: path.display().to_string() })
        }
    }
}

/// Runs on a dedicated thread, because every step can block.
fn publish(
    volume_id: &str,
    staging: &Path,
    gid: u32,
    target: &Path,
    read_only: bool,
    is_exclusive: bool,
) -> Result<(), Error> {
    let table = mounts()?;
    let (path, staged) = staged(group::find(&table, staging, gid)?, volume_id)?;

    if let Some(resolved) = resolve(target).map_err(|e| io_error("resolve", target, e))?
        && let Some(entry) = table.at(&resolved)
    {
        let taken = |found| Err(Error::PathTaken { path: target.display().to_string(), found });
        // The same volume, published before it was mounted again from another address, also satisfies the request.
        let is_same = (&entry.device, &entry.root) == (&staged.device, &staged.root)
            || entry.is_smb() && (entry.share(), entry.gid()) == (staged.share(), staged.gid());
        if !is_same {
            return taken(entry.describe());
        }
        if entry.is_read_only() != (read_only || staged.is_read_only()) {
            return taken("the volume is published with another readonly".into());
        }
        return Ok(());
    }

    // CSI NodePublishVolume: SINGLE_NODE_SINGLE_WRITER allows one target path at a time.
    if is_exclusive && let Some(path) = published(&table, staging)? {
        return Err(Error::PublishedElsewhere { path: path.display().to_string() });
    }
    let target = make_target(target)?;
    let attributes = if read_only { MountAttrFlags::MOUNT_ATTR_RDONLY } else { MountAttrFlags::empty() };
    mount::bind(&path, &target, attributes).map_err(Error::from)
}

/// A path at which the volume is published, with any group.
fn published(table: &MountTable, staging: &Path) -> Result<Option<PathBuf>, Error> {
    let mut staged = Vec::new();
    for path in group::beside(staging)?.into_iter().chain([staging.to_owned()]) {
        staged.extend(resolve(&path).map_err(|e| io_error("resolve", &path, e))?);
    }
    let mounted = staged.iter().filter_map(|path| table.at(path));
    let mut others = mounted.flat_map(|entry| table.others_of(entry));
    Ok(others.find(|path| !staged.iter().any(|own| own == path)).map(Path::to_owned))
}
