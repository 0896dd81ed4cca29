//! Client of a server's admin API.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::admin::{
    CreateSnapshotGroupRequest, CreateSnapshotRequest, CreateVolumeRequest, DeleteSnapshotGroupRequest,
    DeleteSnapshotRequest, DeleteVolumeRequest, ExpandVolumeRequest, GetServerInfoRequest, ListPoolsRequest,
    ListSnapshotsRequest, ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, Pool, Qos,
    SetCredentialsRequest, SetQosRequest, Snapshot, StatVolumeRequest, Volume,
};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, TimeoutExpired};
use tracing::warn;

use crate::address::ServerAddress;
use crate::error::{Error, describe_status};
use crate::limits::{ADMIN_DEADLINE, COPY_DEADLINE, PROBE_DEADLINE};
use crate::names::VolumeId;
use crate::secrets::Credentials;

/// A client that connects on first use, and again after the server has restarted.
#[derive(Clone, Debug)]
pub(crate) struct Admin {
    client: AdminClient<Channel>,
    /// Name of the server, for messages.
    who: Arc<str>,
    has_failed: Arc<AtomicBool>,
}

impl Admin {
    pub(crate) fn over(channel: Channel, who: String) -> Self {
        Self { client: AdminClient::new(channel), who: who.into(), has_failed: Arc::default() }
    }

    /// Set if a call did not reach the server; cleared by the code that reads the certificate again.
    pub(crate) fn has_failed(&self) -> &AtomicBool {
        &self.has_failed
    }

    /// The one server on this machine.
    pub(crate) fn new(socket: &Path) -> anyhow::Result<Self> {
        let socket =
            socket.to_str().ok_or_else(|| anyhow::anyhow!("the admin socket's path is not UTF-8"))?;
        let endpoint = Endpoint::from_shared(format!("unix://{socket}"))?.connect_timeout(PROBE_DEADLINE);
        Ok(Self::over(endpoint.connect_lazy(), "server".to_owned()))
    }

    fn request<T>(message: T, deadline: Duration) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(deadline);
        request
    }

    fn error(&self, status: Status) -> Error {
        // The error comes from a lower layer, not from the server. A server that rejects a client's certificate reports this
        // after the handshake (RFC 8446 4.4.2.4), when the code can be any.
        let below = std::error::Error::source(&status);
        let mut chain = std::iter::successors(below, |error| error.source());
        let is_timeout = chain.any(|error| error.is::<TimeoutExpired>());
        let status = match status.code() {
            Code::Unknown | Code::Internal | Code::Cancelled if below.is_some() && !is_timeout => {
                Status::unavailable(describe_status(&status))
            }
            _ => status,
        };
        if status.code() == Code::Unavailable {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        Error::Admin { who: self.who.clone(), status: Box::new(status) }
    }

    /// A response without its volume means a broken server, not a missing volume.
    fn present(&self, volume: Option<Volume>) -> Result<Volume, Error> {
        volume.ok_or_else(|| self.error(Status::internal("the response holds no volume")))
    }

    /// Whether the server responds.
    pub(crate) async fn probe(&self) -> Result<(), Error> {
        let request = Self::request(GetServerInfoRequest {}, PROBE_DEADLINE);
        self.client.clone().get_server_info(request).await.map(drop).map_err(|status| self.error(status))
    }

    /// The addresses that nodes mount; at least one.
    pub(crate) async fn addresses(&self) -> Result<Vec<ServerAddress>, Error> {
        let request = Self::request(GetServerInfoRequest {}, ADMIN_DEADLINE);
        let info = self
            .client
            .clone()
            .get_server_info(request)
            .await
            .map_err(|status| self.error(status))?
            .into_inner();
        let texts = if info.advertised_addresses.is_empty() {
            info.listen_addresses
        } else {
            info.advertised_addresses
        };
        let mut addresses = Vec::new();
        for text in texts {
            match text.parse::<ServerAddress>() {
                Ok(address) if address.is_unspecified() => {}
                Ok(address) => addresses.push(address),
                Err(error) => warn!(address = text, error, "the server's address is not usable"),
            }
        }
        if addresses.is_empty() { Err(Error::NoAddress) } else { Ok(addresses) }
    }

    /// The volume, or `None` if it does not exist.
    pub(crate) async fn stat(&self, volume_id: &VolumeId) -> Result<Option<Volume>, Error> {
        let request = Self::request(StatVolumeRequest { volume_id: volume_id.to_string() }, ADMIN_DEADLINE);
        match self.client.clone().stat_volume(request).await {
            Ok(response) => self.present(response.into_inner().volume).map(Some),
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(self.error(status)),
        }
    }

    pub(crate) async fn create(&self, request: CreateVolumeRequest) -> Result<Volume, Error> {
        let is_empty = request.source_snapshot_id.is_empty() && request.source_volume_id.is_empty();
        let request = Self::request(request, if is_empty { ADMIN_DEADLINE } else { COPY_DEADLINE });
        self.present(
            self.client
                .clone()
                .create_volume(request)
                .await
                .map_err(|status| self.error(status))?
                .into_inner()
                .volume,
        )
    }

    pub(crate) async fn delete(&self, volume_id: &VolumeId) -> Result<(), Error> {
        let request = DeleteVolumeRequest { volume_id: volume_id.to_string(), force: false };
        let request = Self::request(request, ADMIN_DEADLINE);
        match self.client.clone().delete_volume(request).await {
            Err(status) if status.code() != Code::NotFound => Err(self.error(status)),
            _ => Ok(()),
        }
    }

    pub(crate) async fn expand(&self, volume_id: &VolumeId, capacity_bytes: u64) -> Result<Volume, Error> {
        let request = ExpandVolumeRequest { volume_id: volume_id.to_string(), capacity_bytes };
        let request = Self::request(request, ADMIN_DEADLINE);
        self.present(
            self.client
                .clone()
                .expand_volume(request)
                .await
                .map_err(|status| self.error(status))?
                .into_inner()
                .volume,
        )
    }

    /// Replaces the volume's limits and priority.
    pub(crate) async fn set_qos(&self, volume_id: &VolumeId, qos: Qos) -> Result<(), Error> {
        let request = SetQosRequest { volume_id: volume_id.to_string(), qos: Some(qos) };
        let request = Self::request(request, ADMIN_DEADLINE);
        self.client.clone().set_qos(request).await.map(drop).map_err(|status| self.error(status))
    }

    /// Replaces the volume's credentials; the previous ones remain valid, too.
    pub(crate) async fn add_credentials(
        &self,
        volume_id: &VolumeId,
        credentials: &Credentials,
    ) -> Result<(), Error> {
        let request = SetCredentialsRequest {
            volume_id: volume_id.to_string(),
            credentials: Some(credentials.to_admin()),
            keep_previous: true,
        };
        let request = Self::request(request, ADMIN_DEADLINE);
        self.client.clone().set_credentials(request).await.map(drop).map_err(|status| self.error(status))
    }

    pub(crate) async fn list(
        &self,
        page_size: u32,
        page_token: String,
    ) -> Result<ListVolumesResponse, Error> {
        let request = Self::request(ListVolumesRequest { page_size, page_token }, ADMIN_DEADLINE);
        Ok(self.client.clone().list_volumes(request).await.map_err(|status| self.error(status))?.into_inner())
    }

    pub(crate) async fn create_snapshot(&self, request: CreateSnapshotRequest) -> Result<Snapshot, Error> {
        let request = Self::request(request, COPY_DEADLINE);
        let response =
            self.client.clone().create_snapshot(request).await.map_err(|status| self.error(status))?;
        let snapshot = response.into_inner().snapshot;
        snapshot.ok_or_else(|| self.error(Status::internal("the response holds no snapshot")))
    }

    /// In the order of the request's members.
    pub(crate) async fn create_snapshot_group(
        &self,
        request: CreateSnapshotGroupRequest,
    ) -> Result<Vec<Snapshot>, Error> {
        let request = Self::request(request, COPY_DEADLINE);
        let response = self.client.clone().create_snapshot_group(request).await;
        Ok(response.map_err(|status| self.error(status))?.into_inner().snapshots)
    }

    pub(crate) async fn delete_snapshot_group(&self, id: &VolumeId) -> Result<(), Error> {
        let request = Self::request(DeleteSnapshotGroupRequest { group_id: id.to_string() }, ADMIN_DEADLINE);
        self.client
            .clone()
            .delete_snapshot_group(request)
            .await
            .map(drop)
            .map_err(|status| self.error(status))
    }

    pub(crate) async fn delete_snapshot(&self, id: &VolumeId) -> Result<(), Error> {
        let request = Self::request(DeleteSnapshotRequest { snapshot_id: id.to_string() }, ADMIN_DEADLINE);
        self.client.clone().delete_snapshot(request).await.map(drop).map_err(|status| self.error(status))
    }

    pub(crate) async fn snapshots(
        &self,
        request: ListSnapshotsRequest,
    ) -> Result<ListSnapshotsResponse, Error> {
        let request = Self::request(request, ADMIN_DEADLINE);
        let page = self.client.clone().list_snapshots(request).await;
        Ok(page.map_err(|status| self.error(status))?.into_inner())
    }

    pub(crate) async fn pools(&self, deadline: Duration) -> Result<Vec<Pool>, Error> {
        let request = Self::request(ListPoolsRequest {}, deadline);
        Ok(self
            .client
            .clone()
            .list_pools(request)
            .await
            .map_err(|status| self.error(status))?
            .into_inner()
            .pools)
    }
}
