//! The CSI Node service: volumes are mounted with the kernel's SMB client.

mod claims;
mod group;
mod measure;
mod password;
mod publish;
mod reported;
mod stage;
mod stats;
#[cfg(test)]
mod tests;
mod unmount;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forebay_inventory::Host;
use forebay_proto::csi::node_server::Node;
use forebay_proto::csi::node_service_capability::{self as capability, rpc};
use forebay_proto::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetVolumeHealthRequest,
    NodeGetVolumeHealthResponse, NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse,
    NodePublishVolumeRequest, NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest,
    NodeStageVolumeResponse, NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse,
    NodeUnstageVolumeRequest, NodeUnstageVolumeResponse,
};
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};

use crate::cluster::Clusters;
use crate::error::Error;
use crate::in_flight::InFlight;
use crate::limits::{NAME_BYTES_MAX, PATH_BYTES_MAX};
use crate::mountinfo::{MountTable, resolve};
use crate::node::claims::Claims;
use crate::node::measure::Measurements;
use crate::node::password::Passwords;
use crate::node::reported::Reported;
use crate::observe::observe;

/// How long the node's calls wait for the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadlines {
    pub(crate) mount: Duration,
    pub(crate) unmount: Duration,
    pub(crate) stats: Duration,
}

/// Mounts, publishes and measures volumes on this node.
#[derive(Clone, Debug)]
pub(crate) struct NodeService {
    node_id: Arc<str>,
    deadlines: Deadlines,
    /// Used to look up instances, in Kubernetes.
    clusters: Option<Clusters>,
    /// The hardware of this node.
    host: Arc<Host>,
    /// Details of mounts that the mount table does not show.
    reported: Reported,
    /// The last password of each mount.
    passwords: Passwords,
    /// Calls that change mounts.
    claims: Claims,
    /// Calls that only measure; kept separate, so that a hanging statfs does not prevent an unmount of the volume.
    measuring: Measurements,
    /// Serializes reads of the node's hardware, and detects one that hangs.
    turn: Arc<Mutex<()>>,
    looking: InFlight,
}

impl NodeService {
    /// Creates the service on the host with its file trees below `host_root`.
    pub(crate) fn new(
        node_id: &str,
        deadlines: Deadlines,
        host_root: &Path,
        clusters: Option<Clusters>,
    ) -> Self {
        Self {
            node_id: node_id.into(),
            deadlines,
            reported: Reported::new(node_id, clusters.as_ref().map(|c| c.kubernetes().client().clone())),
            clusters,
            host: Arc::new(Host::at(host_root)),
            passwords: Passwords::default(),
            claims: Claims::default(),
            measuring: Measurements::default(),
            turn: Arc::default(),
            looking: InFlight::default(),
        }
    }
}

/// Creates the mount point directory if it does not exist.
fn make_target(path: &Path) -> Result<PathBuf, Error> {
    std::fs::create_dir_all(path).map_err(|e| io_error("create", path, e))?;
    resolve(path)
        .and_then(|resolved| resolved.ok_or_else(|| std::io::ErrorKind::NotFound.into()))
        .map_err(|e| io_error("resolve", path, e))
}

fn mounts() -> Result<MountTable, Error> {
    MountTable::read().map_err(|e| io_error("read", Path::new("/proc/self/mountinfo"), e))
}

fn io_error(what: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Io { what, path: path.display().to_string(), source }
}

fn check_volume_id(volume_id: &str) -> Result<(), Error> {
    match volume_id.len() {
        0 => Err(Error::Missing("volume_id")),
        1..=NAME_BYTES_MAX => Ok(()),
        _ => Err(Error::invalid("volume_id", format!("is longer than {NAME_BYTES_MAX} bytes"))),
    }
}

fn check_path(field: &'static str, path: &str) -> Result<PathBuf, Error> {
    use std::path::Component;
    if path.is_empty() {
        return Err(Error::Missing(field));
    }
    if path.len() >= PATH_BYTES_MAX || path.contains('\0') {
        return Err(Error::invalid(field, "is too long or holds a zero byte"));
    }
    let path = PathBuf::from(path);
    let plain = path.components().all(|c| matches!(c, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || !plain || path.file_name().is_none() {
        return Err(Error::invalid(field, "is not an absolute path without .."));
    }
    Ok(path)
}

#[tonic::async_trait]
impl Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("NodeStageVolume", &volume_id, self.stage(request)).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("NodeUnstageVolume", &volume_id, self.unstage(request)).await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("NodePublishVolume", &volume_id, self.publish(request)).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("NodeUnpublishVolume", &volume_id, self.unpublish(request)).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("NodeGetVolumeStats", &volume_id, self.stats(request)).await
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        let volume_id = request.volume_id.clone();
        observe("NodeGetVolumeHealth", &volume_id, self.health(request)).await
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        // The server's quota is the size; a mounted client sees a change at its next statfs.
        Err(Error::NotOffered("NodeExpandVolume").into())
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let types = [
            rpc::Type::StageUnstageVolume,
            rpc::Type::GetVolumeStats,
            rpc::Type::VolumeCondition,
            rpc::Type::GetVolumeHealth,
            rpc::Type::SingleNodeMultiWriter,
            rpc::Type::VolumeMountGroup,
        ];
        let capabilities = types.into_iter().map(|t| NodeServiceCapability {
            r#type: Some(capability::Type::Rpc(capability::Rpc { r#type: t.into() })),
        });
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities: capabilities.collect() }))
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: self.node_id.to_string(),
            max_volumes_per_node: 0,
            accessible_topology: None,
        }))
    }
}
