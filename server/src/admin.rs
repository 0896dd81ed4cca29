//! The admin API: gRPC on a unix socket that only the server's user may open, and over mutual TLS.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use forebay_proto::admin::admin_server::Admin;
use forebay_proto::admin::{self as api};
use forebay_smb::engine::Server;
use tokio::net::UnixListener;
use tonic::{Request, Response, Status};

use crate::catalog::{Catalog, CatalogError, Found, FoundSnapshot, Member, SnapshotFilter, Wish, credential};
use crate::clock;
use crate::config::{InstanceSection, PoolQuota};
use crate::eventloop::Loops;
use crate::health::Health;
use crate::life::Life;
use crate::limits::{LIST_PAGE_MAX, NAMESPACE_UNCONFIRMED_TOLD};
use crate::qos::{Priority, Qos};
use crate::tls::AdminClientName;
use crate::volume::{Credential, Protection, Quota, Root, Source};

/// The parts of the daemon that the admin API uses.
#[derive(Clone)]
pub struct AdminService {
    /// Volumes.
    pub catalog: Arc<Catalog>,
    /// Sessions and open files.
    pub server: Arc<Server>,
    /// Event loops.
    pub loops: Loops,
    /// Serving, draining, drained.
    pub life: Arc<Life>,
    /// Problems, and the addresses of the server.
    pub health: Arc<Health>,
    /// Properties that do not change.
    pub about: Arc<About>,
}

/// Names of the transports.
const TCP: &str = "tcp";
const RDMA: &str = "rdma";

/// The caller: the client's name by its certificate, or any process that may open the socket.
fn caller<T>(request: &Request<T>) -> Arc<str> {
    let name = request.extensions().get::<AdminClientName>();
    name.map_or_else(|| "the admin socket".into(), |AdminClientName(name)| Arc::clone(name))
}

/// Properties that do not change while the server runs.
#[derive(Debug)]
pub struct About {
    /// The server's GUID.
    pub guid: uuid::Uuid,
    /// FILETIME of its start.
    pub started: u64,
    /// "io_uring" or "readiness".
    pub io_engine: &'static str,
    /// The addresses on which it listens.
    pub listen: Vec<String>,
    /// Name and epoch of the instance.
    pub instance: InstanceSection,
}

impl From<CatalogError> for Status {
    fn from(error: CatalogError) -> Self {
        let message = error.to_string();
        match error {
            CatalogError::Invalid(_) => Self::invalid_argument(message),
            CatalogError::Busy(_) => Self::aborted(message),
            CatalogError::NotFound(_) | CatalogError::NoSnapshot(_) => Self::not_found(message),
            CatalogError::Exists(_) => Self::already_exists(message),
            CatalogError::Exhausted(_) => Self::resource_exhausted(message),
            CatalogError::Precondition(_) => Self::failed_precondition(message),
            CatalogError::Pool(_) => {
                tracing::error!(error = message, "admin request failed");
                Self::internal(message)
            }
        }
    }
}

fn timestamp(filetime: u64) -> prost_types::Timestamp {
    let (seconds, nanos) = clock::to_unix(filetime);
    prost_types::Timestamp { seconds, nanos: nanos.cast_signed() }
}

fn quota_of(value: i32) -> Result<Option<Quota>, Status> {
    match api::Quota::try_from(value) {
        Ok(api::Quota::Unspecified) => Ok(None),
        Ok(api::Quota::Hard) => Ok(Some(Quota::Hard)),
        Ok(api::Quota::None) => Ok(Some(Quota::None)),
        Err(_) => Err(Status::invalid_argument(format!("quota {value} is not known to this server"))),
    }
}

fn protection_of(value: i32) -> Result<Protection, Status> {
    match api::Protection::try_from(value) {
        // The protocol enforces the server's setting for every session.
        Ok(api::Protection::Unspecified | api::Protection::Optional) => Ok(Protection::Optional),
        Ok(api::Protection::Sign) => Ok(Protection::Sign),
        Ok(api::Protection::Seal) => Ok(Protection::Seal),
        Err(_) => Err(Status::invalid_argument(format!("protection {value} is not known to this server"))),
    }
}

fn qos_of(qos: Option<&api::Qos>) -> Result<Qos, Status> {
    let qos = qos.ok_or_else(|| Status::invalid_argument("qos is required"))?;
    let priority = match api::Priority::try_from(qos.priority) {
        Ok(api::Priority::Unspecified | api::Priority::Normal) => Priority::Normal,
        Ok(api::Priority::High) => Priority::High,
        Ok(api::Priority::Low) => Priority::Low,
        Err(_) => {
            return Err(Status::invalid_argument(format!(
                "priority {} is not known to this server",
                qos.priority
            )));
        }
    };
    let api::Qos { bytes_per_second, operations_per_second, .. } = *qos;
    Ok(Qos { bytes_per_second, operations_per_second, priority })
}

fn shown_qos(qos: Qos) -> api::Qos {
    let priority = match qos.priority {
        Priority::High => api::Priority::High,
        Priority::Normal => api::Priority::Normal,
        Priority::Low => api::Priority::Low,
    };
    api::Qos {
        bytes_per_second: qos.bytes_per_second,
        operations_per_second: qos.operations_per_second,
        priority: priority.into(),
    }
}

fn credential_of(credentials: Option<&api::Credentials>) -> Result<Credential, Status> {
    let credentials = credentials.ok_or_else(|| Status::invalid_argument("credentials are required"))?;
    Ok(credential(&credentials.username, &credentials.password)?)
}

fn shown_snapshot(found: FoundSnapshot) -> api::Snapshot {
    let FoundSnapshot { snapshot, pool } = found;
    api::Snapshot {
        snapshot_id: snapshot.snapshot_id,
        volume_id: snapshot.volume_id,
        pool,
        capacity_bytes: snapshot.capacity_bytes,
        used_bytes: snapshot.used_bytes,
        created: Some(timestamp(snapshot.created)),
        labels: snapshot.labels.into_iter().collect(),
        group_id: snapshot.group_id.unwrap_or_default(),
    }
}

fn page_limit(page_size: u32) -> usize {
    match page_size as usize {
        0 => LIST_PAGE_MAX,
        size => size.min(LIST_PAGE_MAX),
    }
}

/// A token is the last id of the previous page, so that it stays valid when entries are added or removed.
fn check_token(token: &str) -> Result<(), Status> {
    if token.is_empty() || crate::config::is_label(token) {
        return Ok(());
    }
    Err(Status::aborted("page_token is none that this server gave out: start again without one"))
}

impl AdminService {
    /// A pool's namespace, if it is on one.
    fn fabric(&self, pool: &str) -> Option<api::PoolFabric> {
        let state = self.health.namespaces.iter().find(|state| state.pool() == pool)?;
        let now = Instant::now();
        let (up, paths) = state.paths();
        let ago = state.confirmed_ago(now);
        let (nqn, namespace) = state.names();
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Some(api::PoolFabric {
            nqn: nqn.to_owned(),
            namespace: namespace.to_owned(),
            paths: number(paths),
            paths_up: number(up),
            ana_states: state.ana_states(),
            reserved: ago <= NAMESPACE_UNCONFIRMED_TOLD,
            holder: self.about.instance.name.clone(),
            holder_epoch: self.about.instance.epoch,
            unconfirmed_seconds: u32::try_from(ago.as_secs()).unwrap_or(u32::MAX),
            problems: state.problems(now),
        })
    }

    /// Runs blocking code on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        act: impl FnOnce(&Self) -> Result<T, Status> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let this = self.clone();
        let result = tokio::task::spawn_blocking(move || act(&this)).await;
        result.map_err(|_| Status::internal("the request's thread panicked"))?.map(Response::new)
    }

    fn volume(&self, found: Found) -> api::Volume {
        let Found { record, pool, used_bytes, used_inodes } = found;
        let infos = self.server.session_infos();
        let sessions = infos.iter().filter(|info| info.volume_ids.contains(&record.volume_id)).count();
        let open_files = self.server.open_infos(Some(&record.volume_id)).len();
        let quota = match record.quota {
            Quota::Hard => api::Quota::Hard,
            Quota::None => api::Quota::None,
        };
        let protection = match record.protection {
            Protection::Optional => api::Protection::Optional,
            Protection::Sign => api::Protection::Sign,
            Protection::Seal => api::Protection::Seal,
        };
        let (source_snapshot_id, source_volume_id) = match record.source {
            Some(Source::Snapshot(id)) => (id, String::new()),
            Some(Source::Volume(id)) => (String::new(), id),
            None => Default::default(),
        };
        api::Volume {
            volume_id: record.volume_id,
            pool,
            capacity_bytes: if record.quota == Quota::Hard { record.capacity_bytes } else { 0 },
            used_bytes,
            quota: quota.into(),
            protection: protection.into(),
            username: record.accounts.into_iter().next().map(|a| a.username).unwrap_or_default(),
            created: Some(timestamp(record.created)),
            labels: record.labels.into_iter().collect(),
            used_inodes,
            sessions: sessions as u32,
            open_files: open_files as u32,
            requested_bytes: record.capacity_bytes,
            qos: Some(shown_qos(record.qos)),
            source_snapshot_id,
            source_volume_id,
            root: record.root.map(|root| api::Root { uid: root.uid, gid: root.gid, mode: root.mode }),
        }
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn get_server_info(
        &self,
        _: Request<api::GetServerInfoRequest>,
    ) -> Result<Response<api::GetServerInfoResponse>, Status> {
        self.blocking(|this| {
            let spaces = this.catalog.pools().unwrap_or_default();
            let volumes = spaces.iter().map(|pool| pool.space.volumes).sum::<usize>();
            let snapshots = spaces.iter().map(|pool| pool.space.snapshots).sum::<usize>();
            Ok(api::GetServerInfoResponse {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                server_guid: this.about.guid.to_string(),
                started: Some(timestamp(this.about.started)),
                io_engine: this.about.io_engine.to_owned(),
                listen_addresses: this.about.listen.clone(),
                draining: this.life.is_draining(),
                advertised_addresses: this.health.advertised(),
                instance_name: this.about.instance.name.clone(),
                instance_epoch: this.about.instance.epoch,
                transports: this.health.transports(),
                connections: this.loops.connections() as u32,
                sessions: this.server.session_infos().len() as u32,
                volumes: volumes as u32,
                snapshots: snapshots as u32,
                volumes_unserved: this.catalog.unserved().len() as u32,
                problems: this.health.problems(),
                drained: this.life.is_drained(),
                later_rdma_devices: this
                    .health
                    .later
                    .as_ref()
                    .map(|later| later.devices())
                    .unwrap_or_default(),
            })
        })
        .await
    }

    async fn create_volume(
        &self,
        request: Request<api::CreateVolumeRequest>,
    ) -> Result<Response<api::CreateVolumeResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        if self.life.is_draining() {
            return Err(Status::unavailable("the server is draining: try again"));
        }
        tracing::debug!(%by, volume = request.volume_id, "asked to make a volume");
        self.blocking(move |this| {
            let source = match (request.source_snapshot_id, request.source_volume_id) {
                (snapshot, volume) if snapshot.is_empty() && volume.is_empty() => None,
                (snapshot, volume) if volume.is_empty() => Some(Source::Snapshot(snapshot)),
                (snapshot, volume) if snapshot.is_empty() => Some(Source::Volume(volume)),
                _ => {
                    return Err(Status::invalid_argument(
                        "a volume is made of a snapshot or of a volume, not of both",
                    ));
                }
            };
            let wish = Wish {
                source,
                credential: credential_of(request.credentials.as_ref())?,
                volume_id: request.volume_id,
                pool: request.pool,
                capacity_bytes: request.capacity_bytes,
                quota: quota_of(request.quota)?,
                protection: protection_of(request.protection)?,
                labels: request.labels.into_iter().collect::<BTreeMap<_, _>>(),
                root: request.root.map(|root| Root { uid: root.uid, gid: root.gid, mode: root.mode }),
            };
            let found = this.catalog.create(&wish)?;
            Ok(api::CreateVolumeResponse { volume: Some(this.volume(found)) })
        })
        .await
    }

    async fn delete_volume(
        &self,
        request: Request<api::DeleteVolumeRequest>,
    ) -> Result<Response<api::DeleteVolumeResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        tracing::debug!(%by, volume = request.volume_id, force = request.force, "asked to delete a volume");
        self.blocking(move |this| {
            this.catalog.delete(&request.volume_id, request.force)?;
            Ok(api::DeleteVolumeResponse {})
        })
        .await
    }

    async fn expand_volume(
        &self,
        request: Request<api::ExpandVolumeRequest>,
    ) -> Result<Response<api::ExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        self.blocking(move |this| {
            let found = this.catalog.expand(&request.volume_id, request.capacity_bytes)?;
            Ok(api::ExpandVolumeResponse { volume: Some(this.volume(found)) })
        })
        .await
    }

    async fn list_volumes(
        &self,
        request: Request<api::ListVolumesRequest>,
    ) -> Result<Response<api::ListVolumesResponse>, Status> {
        let request = request.into_inner();
        self.blocking(move |this| {
            let limit = page_limit(request.page_size);
            check_token(&request.page_token)?;
            let (found, more) = this.catalog.list(&request.page_token, limit);
            let next_page_token =
                found.last().filter(|_| more).map(|last| last.record.volume_id.clone()).unwrap_or_default();
            let volumes = found.into_iter().map(|found| this.volume(found)).collect();
            Ok(api::ListVolumesResponse { volumes, next_page_token })
        })
        .await
    }

    async fn stat_volume(
        &self,
        request: Request<api::StatVolumeRequest>,
    ) -> Result<Response<api::StatVolumeResponse>, Status> {
        let request = request.into_inner();
        self.blocking(move |this| {
            let found = this.catalog.find(&request.volume_id)?;
            Ok(api::StatVolumeResponse { volume: Some(this.volume(found)) })
        })
        .await
    }

    async fn set_credentials(
        &self,
        request: Request<api::SetCredentialsRequest>,
    ) -> Result<Response<api::SetCredentialsResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        tracing::debug!(%by, volume = request.volume_id, "asked to replace credentials");
        self.blocking(move |this| {
            let new = credential_of(request.credentials.as_ref())?;
            this.catalog.set_credentials(&request.volume_id, new, request.keep_previous)?;
            Ok(api::SetCredentialsResponse {})
        })
        .await
    }

    async fn set_qos(
        &self,
        request: Request<api::SetQosRequest>,
    ) -> Result<Response<api::SetQosResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        tracing::debug!(%by, volume = request.volume_id, "asked to replace limits and priority");
        self.blocking(move |this| {
            let found = this.catalog.set_qos(&request.volume_id, qos_of(request.qos.as_ref())?)?;
            Ok(api::SetQosResponse { volume: Some(this.volume(found)) })
        })
        .await
    }

    async fn create_snapshot(
        &self,
        request: Request<api::CreateSnapshotRequest>,
    ) -> Result<Response<api::CreateSnapshotResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        if self.life.is_draining() {
            return Err(Status::unavailable("the server is draining: try again"));
        }
        tracing::debug!(%by, snapshot = request.snapshot_id, volume = request.volume_id, "asked to make a snapshot");
        self.blocking(move |this| {
            let labels = request.labels.into_iter().collect::<BTreeMap<_, _>>();
            let member = Member { snapshot_id: request.snapshot_id, volume_id: request.volume_id };
            let found = this.catalog.create_snapshot(member, &labels)?;
            Ok(api::CreateSnapshotResponse { snapshot: Some(shown_snapshot(found)) })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<api::DeleteSnapshotRequest>,
    ) -> Result<Response<api::DeleteSnapshotResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        tracing::debug!(%by, snapshot = request.snapshot_id, "asked to delete a snapshot");
        self.blocking(move |this| {
            this.catalog.delete_snapshot(&request.snapshot_id)?;
            Ok(api::DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(
        &self,
        request: Request<api::ListSnapshotsRequest>,
    ) -> Result<Response<api::ListSnapshotsResponse>, Status> {
        let request = request.into_inner();
        self.blocking(move |this| {
            let limit = page_limit(request.page_size);
            check_token(&request.page_token)?;
            let filter = SnapshotFilter {
                snapshot_id: request.snapshot_id,
                volume_id: request.volume_id,
                group_id: request.group_id,
            };
            let (found, more) = this.catalog.list_snapshots(&request.page_token, limit, &filter);
            let next_page_token =
                found.last().filter(|_| more).map(|f| f.snapshot.snapshot_id.clone()).unwrap_or_default();
            let snapshots = found.into_iter().map(shown_snapshot).collect();
            Ok(api::ListSnapshotsResponse { snapshots, next_page_token })
        })
        .await
    }

    async fn create_snapshot_group(
        &self,
        request: Request<api::CreateSnapshotGroupRequest>,
    ) -> Result<Response<api::CreateSnapshotGroupResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        if self.life.is_draining() {
            return Err(Status::unavailable("the server is draining: try again"));
        }
        let volumes = request.members.len();
        tracing::debug!(%by, group = request.group_id, volumes, "asked to make a group of snapshots");
        self.blocking(move |this| {
            let labels = request.labels.into_iter().collect::<BTreeMap<_, _>>();
            let member =
                |api::SnapshotGroupMember { snapshot_id, volume_id }| Member { snapshot_id, volume_id };
            let members: Vec<Member> = request.members.into_iter().map(member).collect();
            let found = this.catalog.create_snapshot_group(&request.group_id, &members, &labels)?;
            let snapshots = found.into_iter().map(shown_snapshot).collect();
            Ok(api::CreateSnapshotGroupResponse { snapshots })
        })
        .await
    }

    async fn delete_snapshot_group(
        &self,
        request: Request<api::DeleteSnapshotGroupRequest>,
    ) -> Result<Response<api::DeleteSnapshotGroupResponse>, Status> {
        let by = caller(&request);
        let request = request.into_inner();
        tracing::debug!(%by, group = request.group_id, "asked to delete a group of snapshots");
        self.blocking(move |this| {
            this.catalog.delete_snapshot_group(&request.group_id)?;
            Ok(api::DeleteSnapshotGroupResponse {})
        })
        .await
    }

    async fn list_pools(
        &self,
        _: Request<api::ListPoolsRequest>,
    ) -> Result<Response<api::ListPoolsResponse>, Status> {
        self.blocking(move |this| {
            let pools = this.catalog.pools()?.into_iter().map(|pool| api::Pool {
                kind: if this.fabric(&pool.name).is_some() { "nvmeof" } else { "directory" }.to_owned(),
                fabric: this.fabric(&pool.name),
                name: pool.name,
                path: pool.path,
                total_bytes: pool.space.total_bytes,
                free_bytes: pool.space.free_bytes,
                provisioned_bytes: pool.space.provisioned_bytes,
                quota: match pool.quota {
                    PoolQuota::Project => "project".to_owned(),
                    PoolQuota::None => "none".to_owned(),
                },
            });
            Ok(api::ListPoolsResponse { pools: pools.collect() })
        })
        .await
    }

    async fn list_sessions(
        &self,
        _: Request<api::ListSessionsRequest>,
    ) -> Result<Response<api::ListSessionsResponse>, Status> {
        let sessions = self.server.session_infos().into_iter().map(|info| api::Session {
            session_id: info.id,
            username: info.username,
            client_address: info.client_addresses.first().cloned().unwrap_or_default(),
            client_addresses: info.client_addresses,
            dialect: info.dialect.to_owned(),
            signed: info.signed,
            cipher: info.cipher.to_owned(),
            established: Some(timestamp(info.established)),
            volume_ids: info.volume_ids,
            open_files: info.open_files,
            transport: if info.over_rdma { RDMA } else { TCP }.to_owned(),
            transports: info.transports.into_iter().map(str::to_owned).collect(),
        });
        Ok(Response::new(api::ListSessionsResponse { sessions: sessions.collect() }))
    }

    async fn list_open_files(
        &self,
        request: Request<api::ListOpenFilesRequest>,
    ) -> Result<Response<api::ListOpenFilesResponse>, Status> {
        let volume_id = request.into_inner().volume_id;
        let volume = (!volume_id.is_empty()).then_some(volume_id.as_str());
        let open_files = self.server.open_infos(volume).into_iter().map(|info| api::OpenFile {
            session_id: info.session_id,
            volume_id: info.volume_id,
            path: info.path,
            access: info.access,
            directory: info.directory,
            byte_range_locks: info.byte_range_locks,
        });
        Ok(Response::new(api::ListOpenFilesResponse { open_files: open_files.collect() }))
    }

    async fn close_session(
        &self,
        request: Request<api::CloseSessionRequest>,
    ) -> Result<Response<api::CloseSessionResponse>, Status> {
        let session = request.into_inner().session_id;
        if self.server.close_session(session) {
            tracing::info!(session, "session closed by the administrator");
        }
        self.loops.route(&self.server);
        Ok(Response::new(api::CloseSessionResponse {}))
    }

    async fn drain(
        &self,
        request: Request<api::DrainRequest>,
    ) -> Result<Response<api::DrainResponse>, Status> {
        let by = caller(&request);
        let exit = request.into_inner().exit;
        tracing::info!(%by, exit, "draining is asked for");
        self.life.drain(exit);
        Ok(Response::new(api::DrainResponse {}))
    }
}

/// Why the admin socket is not available.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another server answers there.
    #[error("admin socket {0}: another server listens there: stop it, or change admin.socket")]
    Taken(PathBuf),
    /// The file system returned an error.
    #[error("admin socket {path}: {error}: make its directory, or change admin.socket")]
    Io {
        /// Of the socket.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
}

/// Listens at `path`, replacing a socket that a server left behind.
///
/// # Errors
/// Why it cannot listen.
pub fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
    let io = |error| SocketError::Io { path: path.to_owned(), error };
    if let Some(parent) = path.parent() {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(parent).map_err(io)?;
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => return Err(SocketError::Taken(path.to_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            if !path.symlink_metadata().map_err(io)?.file_type().is_socket() {
                return Err(io(std::io::Error::other("there is a file that is no socket")));
            }
            std::fs::remove_file(path).map_err(io)?;
        }
        Err(error) => return Err(io(error)),
    }
    // Bound under a private name first, so that others can never open it.
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let _ = std::fs::remove_file(&temporary);
    let listener = std::os::unix::net::UnixListener::bind(&temporary).map_err(io)?;
    let placed = std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::rename(&temporary, path))
        .and_then(|()| listener.set_nonblocking(true));
    if let Err(error) = placed {
        let _ = std::fs::remove_file(&temporary);
        return Err(io(error));
    }
    UnixListener::from_std(listener).map_err(io)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn admin_socket_has_mode_0600_and_replaces_only_a_stale_socket() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("run/admin.sock");
        let first = listen(&path).expect("listening");
        assert_eq!(path.metadata().expect("there").permissions().mode() & 0o777, 0o600);
        assert!(matches!(listen(&path), Err(SocketError::Taken(_))));
        drop(first);
        drop(listen(&path).expect("a dead one is replaced"));
        let file = scratch.path().join("file");
        std::fs::write(&file, "precious").expect("written");
        assert!(listen(&file).is_err());
        assert_eq!(std::fs::read_to_string(&file).expect("read"), "precious");
    }
}
