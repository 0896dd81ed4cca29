//! Calls to the CSI and admin APIs over their unix sockets.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use forebay_proto::{admin as adm, csi as c};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tonic::transport::{Channel, Endpoint};

/// Arguments of [`csi`].
#[derive(Serialize, Deserialize)]
pub struct CsiCall {
    /// The driver's socket.
    pub socket: PathBuf,
    /// The request.
    pub request: CsiRequest,
}

/// The calls that scenarios make.
#[derive(Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names and fields are those of the CSI specification")]
pub enum CsiRequest {
    Probe,
    GetPluginInfo,
    NodeGetInfo,
    CreateVolume {
        name: String,
        bytes: i64,
        parameters: HashMap<String, String>,
        secrets: HashMap<String, String>,
        block: bool,
    },
    DeleteVolume {
        id: String,
    },
    ControllerExpandVolume {
        id: String,
        bytes: i64,
    },
    ListVolumes,
    NodeStageVolume {
        id: String,
        staging: String,
        context: HashMap<String, String>,
        secrets: HashMap<String, String>,
        mount_flags: Vec<String>,
    },
    NodeUnstageVolume {
        id: String,
        staging: String,
    },
    NodePublishVolume {
        id: String,
        staging: String,
        target: String,
        context: HashMap<String, String>,
        /// May be empty.
        secrets: HashMap<String, String>,
        readonly: bool,
    },
    NodeUnpublishVolume {
        id: String,
        target: String,
    },
    NodeGetVolumeStats {
        id: String,
        path: String,
    },
}

/// The response.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub struct Answer {
    /// The gRPC code; 0 is success.
    pub code: i32,
    /// Message of an error.
    pub message: String,
    /// Id of a volume.
    pub id: String,
    /// Capacity, or the total in the usage.
    pub bytes: i64,
    /// Used bytes, if requested.
    pub used_bytes: i64,
    /// volume_context.
    pub context: HashMap<String, String>,
    /// Ids in a list, or a name and version.
    pub names: Vec<String>,
}

impl Answer {
    fn from(result: Result<Self, tonic::Status>) -> Self {
        result.unwrap_or_else(|status| Self {
            code: status.code() as i32,
            message: status.message().to_owned(),
            ..Self::default()
        })
    }

    /// Returns itself, or an error with the gRPC code.
    pub fn ok(self) -> Result<Self> {
        anyhow::ensure!(self.code == 0, "{:?}: {}", tonic::Code::from_i32(self.code), self.message);
        Ok(self)
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work))
}

async fn connect(socket: &Path) -> Result<Channel> {
    let socket = socket.to_owned();
    let shown = socket.display().to_string();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(socket).await?)) }
    });
    // The address is never resolved: the connector uses the socket.
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .with_context(|| format!("connect to {shown}"))
}

fn capability(block: bool, mount_flags: Vec<String>) -> c::VolumeCapability {
    use c::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume, access_mode::Mode};
    let access_type = if block {
        AccessType::Block(BlockVolume {})
    } else {
        AccessType::Mount(MountVolume { mount_flags, ..Default::default() })
    };
    c::VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter as i32 }),
        access_type: Some(access_type),
    }
}

/// Makes one CSI call.
pub fn csi(CsiCall { socket, request }: CsiCall) -> Result<Answer> {
    block_on(async {
        let channel = connect(&socket).await?;
        Ok(Answer::from(csi_call(channel, request).await))
    })?
}

async fn csi_call(channel: Channel, request: CsiRequest) -> Result<Answer, tonic::Status> {
    let mut identity = c::identity_client::IdentityClient::new(channel.clone());
    let mut controller = c::controller_client::ControllerClient::new(channel.clone());
    let mut node = c::node_client::NodeClient::new(channel);
    let mut answer = Answer::default();
    match request {
        CsiRequest::Probe => {
            let ready = identity.probe(c::ProbeRequest {}).await?.into_inner().ready;
            answer.bytes = i64::from(ready.unwrap_or(true));
        }
        CsiRequest::GetPluginInfo => {
            let info = identity.get_plugin_info(c::GetPluginInfoRequest {}).await?.into_inner();
            answer.names = vec![info.name, info.vendor_version];
        }
        CsiRequest::NodeGetInfo => {
            answer.id = node.node_get_info(c::NodeGetInfoRequest {}).await?.into_inner().node_id;
        }
        CsiRequest::CreateVolume { name, bytes, parameters, secrets, block } => {
            let request = c::CreateVolumeRequest {
                name,
                capacity_range: Some(c::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
                volume_capabilities: vec![capability(block, Vec::new())],
                parameters,
                secrets,
                ..Default::default()
            };
            let volume = controller.create_volume(request).await?.into_inner().volume.unwrap_or_default();
            answer.id = volume.volume_id;
            answer.bytes = volume.capacity_bytes;
            answer.context = volume.volume_context;
        }
        CsiRequest::DeleteVolume { id } => {
            controller.delete_volume(c::DeleteVolumeRequest { volume_id: id, ..Default::default() }).await?;
        }
        CsiRequest::ControllerExpandVolume { id, bytes } => {
            let request = c::ControllerExpandVolumeRequest {
                volume_id: id,
                capacity_range: Some(c::CapacityRange { required_bytes: bytes, limit_bytes: 0 }),
                ..Default::default()
            };
            answer.bytes = controller.controller_expand_volume(request).await?.into_inner().capacity_bytes;
        }
        CsiRequest::ListVolumes => {
            let list = controller.list_volumes(c::ListVolumesRequest::default()).await?.into_inner();
            answer.names =
                list.entries.into_iter().filter_map(|entry| Some(entry.volume?.volume_id)).collect();
        }
        CsiRequest::NodeStageVolume { id, staging, context, secrets, mount_flags } => {
            let request = c::NodeStageVolumeRequest {
                volume_id: id,
                staging_target_path: staging,
                volume_capability: Some(capability(false, mount_flags)),
                volume_context: context,
                secrets,
                ..Default::default()
            };
            node.node_stage_volume(request).await?;
        }
        CsiRequest::NodeUnstageVolume { id, staging } => {
            let request = c::NodeUnstageVolumeRequest { volume_id: id, staging_target_path: staging };
            node.node_unstage_volume(request).await?;
        }
        CsiRequest::NodePublishVolume { id, staging, target, context, secrets, readonly } => {
            let request = c::NodePublishVolumeRequest {
                volume_id: id,
                staging_target_path: staging,
                target_path: target,
                volume_capability: Some(capability(false, Vec::new())),
                volume_context: context,
                secrets,
                readonly,
                ..Default::default()
            };
            node.node_publish_volume(request).await?;
        }
        CsiRequest::NodeUnpublishVolume { id, target } => {
            node.node_unpublish_volume(c::NodeUnpublishVolumeRequest { volume_id: id, target_path: target })
                .await?;
        }
        CsiRequest::NodeGetVolumeStats { id, path } => {
            let request =
                c::NodeGetVolumeStatsRequest { volume_id: id, volume_path: path, ..Default::default() };
            for usage in node.node_get_volume_stats(request).await?.into_inner().usage {
                if usage.unit == c::volume_usage::Unit::Bytes as i32 {
                    answer.bytes = usage.total;
                    answer.used_bytes = usage.used;
                }
            }
        }
    }
    Ok(answer)
}

/// Arguments of [`admin`].
#[derive(Serialize, Deserialize)]
pub struct AdminCall {
    /// The server's socket.
    pub socket: PathBuf,
    /// The request.
    pub request: AdminRequest,
}

/// The calls that scenarios make.
#[derive(Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names and fields are those of admin.proto")]
pub enum AdminRequest {
    GetServerInfo,
    CreateVolume {
        id: String,
        pool: String,
        bytes: u64,
        username: String,
        password: String,
        /// Snapshot to create it from; empty for none.
        snapshot: String,
    },
    DeleteVolume {
        id: String,
        force: bool,
    },
    /// `bytes`: size of its files; `names`: its creation time, in SMB's time format.
    CreateSnapshot {
        id: String,
        volume: String,
    },
    DeleteSnapshot {
        id: String,
    },
    ExpandVolume {
        id: String,
        bytes: u64,
    },
    StatVolume {
        id: String,
    },
    /// The previous password stays valid.
    SetCredentials {
        id: String,
        username: String,
        password: String,
    },
    /// `names`: the transport of payload on each channel of each session on this volume.
    ListTransports {
        id: String,
    },
}

const SECONDS_FROM_1601_TO_1970: i64 = 11_644_473_600;

/// Makes one admin call.
pub fn admin(AdminCall { socket, request }: AdminCall) -> Result<Answer> {
    block_on(async {
        let channel = connect(&socket).await?;
        Ok(Answer::from(admin_call(channel, request).await))
    })?
}

async fn admin_call(channel: Channel, request: AdminRequest) -> Result<Answer, tonic::Status> {
    let mut client = adm::admin_client::AdminClient::new(channel);
    let volume = match request {
        AdminRequest::GetServerInfo => {
            let info = client.get_server_info(adm::GetServerInfoRequest {}).await?.into_inner();
            return Ok(Answer { names: vec![info.version, info.io_engine], ..Answer::default() });
        }
        AdminRequest::CreateVolume { id, pool, bytes, username, password, snapshot } => {
            let request = adm::CreateVolumeRequest {
                source_snapshot_id: snapshot,
                volume_id: id,
                pool,
                capacity_bytes: bytes,
                credentials: Some(adm::Credentials { username, password }),
                ..Default::default()
            };
            client.create_volume(request).await?.into_inner().volume
        }
        AdminRequest::DeleteVolume { id, force } => {
            client.delete_volume(adm::DeleteVolumeRequest { volume_id: id, force }).await?;
            None
        }
        AdminRequest::CreateSnapshot { id, volume } => {
            let request =
                adm::CreateSnapshotRequest { snapshot_id: id, volume_id: volume, ..Default::default() };
            let made = client.create_snapshot(request).await?.into_inner().snapshot.unwrap_or_default();
            let bytes = i64::try_from(made.used_bytes).unwrap_or(i64::MAX);
            let taken = made.created.unwrap_or_default();
            let seconds = (taken.seconds + SECONDS_FROM_1601_TO_1970).cast_unsigned();
            let time = seconds * 10_000_000 + u64::from(taken.nanos.unsigned_abs()) / 100;
            return Ok(Answer {
                id: made.snapshot_id,
                bytes,
                names: vec![time.to_string()],
                ..Answer::default()
            });
        }
        AdminRequest::DeleteSnapshot { id } => {
            client.delete_snapshot(adm::DeleteSnapshotRequest { snapshot_id: id }).await?;
            None
        }
        AdminRequest::ExpandVolume { id, bytes } => {
            let request = adm::ExpandVolumeRequest { volume_id: id, capacity_bytes: bytes };
            client.expand_volume(request).await?.into_inner().volume
        }
        AdminRequest::ListTransports { id } => {
            let sessions = client.list_sessions(adm::ListSessionsRequest {}).await?.into_inner().sessions;
            let sessions = sessions.into_iter().filter(|session| session.volume_ids.contains(&id));
            let names = sessions.flat_map(|session| session.transports).collect();
            return Ok(Answer { names, ..Answer::default() });
        }
        AdminRequest::SetCredentials { id, username, password } => {
            let request = adm::SetCredentialsRequest {
                volume_id: id,
                credentials: Some(adm::Credentials { username, password }),
                keep_previous: true,
            };
            client.set_credentials(request).await?;
            None
        }
        AdminRequest::StatVolume { id } => {
            client.stat_volume(adm::StatVolumeRequest { volume_id: id }).await?.into_inner().volume
        }
    };
    let volume = volume.unwrap_or_default();
    Ok(Answer {
        id: volume.volume_id,
        bytes: volume.capacity_bytes as i64,
        used_bytes: volume.used_bytes as i64,
        ..Answer::default()
    })
}
