//! A client of the instances' admin API, with mutual TLS and a timeout for every operation.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use forebay_api::names::tls;
use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::admin::{
    DeleteSnapshotGroupRequest, DeleteSnapshotRequest, DeleteVolumeRequest, GetServerInfoRequest,
    ListPoolsRequest, ListSnapshotsRequest, ListVolumesRequest, Pool,
};
use hyper_util::rt::TokioIo;
use k8s_openapi::ByteString;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use forebay_api::fabric::PoolStatus;

use crate::desired::ServerReport;
use crate::limits::{
    ADMIN_CALL_TIME_MAX, ADMIN_CONNECT_TIME_MAX, VOLUMES_DESTROYED_AT_ONCE_MAX, VOLUMES_PAGE,
};

/// Why a request to an instance failed.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The operator's own certificate is missing or invalid.
    #[error("the operator's client certificate cannot be used: {0}")]
    Identity(String),
    /// The connection failed, or the peer is not the instance.
    #[error("{endpoint}: {message}")]
    Connect {
        /// Endpoint of the instance.
        endpoint: SocketAddr,
        /// The error with its chain of causes.
        message: String,
    },
    /// The server refused or failed.
    #[error("{call}: {code}: {message}")]
    Call {
        /// Name of the call.
        call: &'static str,
        /// gRPC status.
        code: tonic::Code,
        /// The server's error message.
        message: String,
    },
    /// The instance did not respond in time.
    #[error("{call} took longer than {limit_s} s", limit_s = ADMIN_CALL_TIME_MAX.as_secs())]
    Time {
        /// Name of the call.
        call: &'static str,
    },
}

/// The certificate that the operator presents, and the authorities that it trusts.
#[derive(Clone)]
pub struct Identity {
    config: Arc<rustls::ClientConfig>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Identity {
    /// Builds the identity from the data of the operator's Secret.
    ///
    /// # Errors
    ///
    /// If the data contains no valid certificates.
    pub fn new(data: &std::collections::BTreeMap<String, ByteString>) -> Result<Self, AdminError> {
        let wrong = |what: &str| AdminError::Identity(what.to_owned());
        let read = |key: &str| data.get(key).map(|b| b.0.as_slice()).ok_or_else(|| wrong(key));
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(read(tls::AUTHORITY)?) {
            roots
                .add(certificate.map_err(|e| wrong(&e.to_string()))?)
                .map_err(|e| AdminError::Identity(e.to_string()))?;
        }
        let chain: Vec<_> = CertificateDer::pem_slice_iter(read(tls::CERTIFICATE)?)
            .collect::<Result<_, _>>()
            .map_err(|e| wrong(&e.to_string()))?;
        let key =
            PrivateKeyDer::from_pem_slice(read(tls::KEY)?).map_err(|_| wrong("the key cannot be parsed"))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|b| b.with_root_certificates(roots).with_client_auth_cert(chain, key))
            .map_err(|e| wrong(&e.to_string()))?;
        config.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { config: Arc::new(config) })
    }
}

/// An instance's admin API.
#[derive(Debug)]
pub struct Admin {
    client: AdminClient<Channel>,
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

async fn call<T>(
    name: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, AdminError> {
    match timeout(ADMIN_CALL_TIME_MAX, answer).await {
        Err(_) => Err(AdminError::Time { call: name }),
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => {
            Err(AdminError::Call { call: name, code: status.code(), message: status.message().to_owned() })
        }
    }
}

impl Admin {
    /// Connects to the instance named `server_name`, at any address.
    ///
    /// # Errors
    ///
    /// If the connection is not established in time, or the peer is not that instance.
    pub async fn connect(
        endpoint: SocketAddr,
        server_name: &str,
        identity: &Identity,
    ) -> Result<Self, AdminError> {
        let failed = |message: String| AdminError::Connect { endpoint, message };
        let name = ServerName::try_from(server_name.to_owned()).map_err(|e| failed(e.to_string()))?;
        let connector = TlsConnector::from(Arc::clone(&identity.config));
        let dial = tower::service_fn(move |_| {
            let (connector, name) = (connector.clone(), name.clone());
            async move {
                let stream = TcpStream::connect(endpoint).await?;
                stream.set_nodelay(true)?;
                Ok::<_, std::io::Error>(TokioIo::new(connector.connect(name, stream).await?))
            }
        });
        let instance = Endpoint::from_static("http://instance")
            .connect_timeout(ADMIN_CONNECT_TIME_MAX)
            .timeout(ADMIN_CALL_TIME_MAX);
        let connecting = instance.connect_with_connector(dial);
        let channel = timeout(ADMIN_CONNECT_TIME_MAX + Duration::from_millis(500), connecting)
            .await
            .map_err(|_| failed(format!("no connection within {} s", ADMIN_CONNECT_TIME_MAX.as_secs())))?
            .map_err(|e| failed(causes(&e)))?;
        Ok(Self { client: AdminClient::new(channel) })
    }

    /// Returns the server's report about itself. `overcommit` returns the percentage of a pool's size that can be
    /// provisioned, by the pool's name.
    ///
    /// # Errors
    ///
    /// If the instance does not respond in time.
    pub async fn report(&mut self, overcommit: impl Fn(&str) -> u32) -> Result<ServerReport, AdminError> {
        let info = call("GetServerInfo", self.client.get_server_info(GetServerInfoRequest {})).await?;
        let pools = call("ListPools", self.client.list_pools(ListPoolsRequest {})).await?.pools;
        let sum = |of: &dyn Fn(&Pool) -> u64| {
            i64::try_from(pools.iter().map(of).fold(0, u64::saturating_add)).unwrap_or(i64::MAX)
        };
        let capacity = sum(&|p| p.total_bytes);
        let free = sum(&|p| p.available_bytes(overcommit(&p.name)));
        Ok(ServerReport {
            version: info.version,
            transports: info.transports.iter().map(|t| t.to_uppercase()).collect(),
            capacity_bytes: capacity,
            free_bytes: rounded(free, capacity),
            // Volumes that cannot be served now hold data, too.
            volumes: info.volumes.saturating_add(info.volumes_unserved),
            unserved: info.volumes_unserved,
            snapshots: info.snapshots,
            pools: pools.iter().map(|p| (p.name.clone(), pool_status(p, overcommit(&p.name)))).collect(),
            sessions: info.sessions,
            draining: info.draining,
            problems: info.problems,
            later_rdma_devices: info.later_rdma_devices,
        })
    }

    /// Returns the ids of at least `most` volumes, if there are that many.
    async fn volumes(&mut self, most: usize) -> Result<Vec<String>, AdminError> {
        let mut ids = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = ListVolumesRequest { page_size: VOLUMES_PAGE, page_token };
            let page = call("ListVolumes", self.client.list_volumes(request)).await?;
            let empty = page.volumes.is_empty();
            ids.extend(page.volumes.into_iter().map(|v| v.volume_id));
            page_token = page.next_page_token;
            if page_token.is_empty() || empty || ids.len() >= most {
                return Ok(ids);
            }
        }
    }

    /// Destroys a limited number of volumes and snapshots, and returns how many.
    ///
    /// # Errors
    ///
    /// On the first volume or snapshot that cannot be destroyed.
    pub async fn destroy_volumes(&mut self) -> Result<usize, AdminError> {
        let mut ids = self.volumes(VOLUMES_DESTROYED_AT_ONCE_MAX).await?;
        ids.truncate(VOLUMES_DESTROYED_AT_ONCE_MAX);
        for volume_id in &ids {
            let request = DeleteVolumeRequest { volume_id: volume_id.clone(), force: true };
            call("DeleteVolume", self.client.delete_volume(request)).await?;
        }
        let request =
            ListSnapshotsRequest { page_size: VOLUMES_DESTROYED_AT_ONCE_MAX as u32, ..Default::default() };
        let snapshots = call("ListSnapshots", self.client.list_snapshots(request)).await?.snapshots;
        for snapshot in &snapshots {
            if snapshot.group_id.is_empty() {
                let request = DeleteSnapshotRequest { snapshot_id: snapshot.snapshot_id.clone() };
                call("DeleteSnapshot", self.client.delete_snapshot(request)).await?;
            } else {
                let request = DeleteSnapshotGroupRequest { group_id: snapshot.group_id.clone() };
                call("DeleteSnapshotGroup", self.client.delete_snapshot_group(request)).await?;
            }
        }
        Ok(ids.len() + snapshots.len())
    }
}

/// Converts a server's report about a pool.
fn pool_status(pool: &Pool, overcommit: u32) -> PoolStatus {
    let number = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let capacity = number(pool.total_bytes);
    let mut status = PoolStatus {
        name: pool.name.clone(),
        capacity_bytes: capacity,
        free_bytes: rounded(number(pool.available_bytes(overcommit)), capacity),
        ..PoolStatus::default()
    };
    if let Some(fabric) = &pool.fabric {
        status.paths = fabric.paths;
        status.paths_up = fabric.paths_up;
        status.ana_state = fabric.ana_states.join(", ");
        if fabric.reserved {
            status.reservation = format!("{}, epoch {}", fabric.holder, fabric.holder_epoch);
        }
        status.health = fabric.problems.join("; ");
    }
    status
}

/// Rounds down to a multiple of 1/256 of the capacity, so that writes do not change the status every few seconds.
fn rounded(free: i64, capacity: i64) -> i64 {
    let step = (capacity / 256).max(1 << 20);
    free - free.rem_euclid(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_space_is_rounded_to_hide_small_changes() {
        let tib = 1_i64 << 40;
        assert_eq!(rounded(tib / 2 + 5, tib), rounded(tib / 2 + (1 << 20), tib));
        assert_eq!(rounded(0, 0), 0);
        assert!(rounded(tib - 1, tib) < tib);
    }
}
