//! HTTP: `/healthz` reports whether the driver's socket responds, `/readyz` whether the driver can work (CSI Probe) and is
//! registered with the kubelet if required. Both connect to the socket, as the orchestrator does: a process that runs but
//! cannot be reached is of no use.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use forebay_proto::csi::identity_client::IdentityClient;
use forebay_proto::csi::{GetPluginInfoRequest, ProbeRequest};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tracing::warn;

use crate::error::{describe_status, with_sources};
use crate::limits::{HEALTH_DEADLINE, PROBE_DEADLINE};
use crate::registration::Outcome;

#[derive(Clone)]
struct Watched {
    socket: Arc<PathBuf>,
    /// Set on a node of a Kubernetes cluster.
    registration: Option<watch::Receiver<Outcome>>,
}

/// Listens, and returns the future that serves.
pub(crate) async fn listen_at(
    address: SocketAddr,
    socket: PathBuf,
    registration: Option<watch::Receiver<Outcome>>,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + Send + 'static> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
    tracing::info!(address = %listener.local_addr()?, "health endpoint listens");
    let app = Router::new()
        .route("/healthz", get(alive))
        .route("/readyz", get(ready))
        .with_state(Watched { socket: Arc::new(socket), registration });
    Ok(async move { axum::serve(listener, app).await.context("serve /healthz and /readyz") })
}

impl Watched {
    /// Opens a new connection each time: an old one would not show that the path now belongs to another socket.
    async fn dial(&self) -> Result<IdentityClient<Channel>, Status> {
        let unreachable = |error: tonic::transport::Error| Status::unavailable(with_sources(&error));
        let endpoint =
            Endpoint::from_shared(format!("unix://{}", self.socket.display())).map_err(unreachable)?;
        let endpoint = endpoint.connect_timeout(HEALTH_DEADLINE);
        Ok(IdentityClient::new(endpoint.connect().await.map_err(unreachable)?))
    }

    async fn call<T>(&self, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let result = match timeout(PROBE_DEADLINE, call).await {
            Ok(result) => result,
            Err(_) => Err(Status::deadline_exceeded("it does not answer")),
        };
        if let Err(status) = &result {
            let (socket, error) = (self.socket.display(), describe_status(status));
            warn!(%socket, code = ?status.code(), error, "the driver's own socket");
        }
        result
    }
}

type Answer = (StatusCode, &'static str);

/// Does not use Probe: a restart of this process would not make a server or an API server respond.
async fn alive(State(watched): State<Watched>) -> Answer {
    let asked =
        watched.call(async { watched.dial().await?.get_plugin_info(GetPluginInfoRequest {}).await }).await;
    match asked {
        Ok(_) => (StatusCode::OK, "ok\n"),
        Err(_) => {
            (StatusCode::SERVICE_UNAVAILABLE, "the driver's socket does not answer; the log says why\n")
        }
    }
}

async fn ready(State(watched): State<Watched>) -> Answer {
    if watched.registration.as_ref().is_some_and(|outcome| *outcome.borrow() != Outcome::Registered) {
        return (StatusCode::SERVICE_UNAVAILABLE, "not ready: the kubelet has not registered the driver\n");
    }
    match watched.call(async { watched.dial().await?.probe(ProbeRequest {}).await }).await {
        Ok(probe) if probe.get_ref().ready == Some(true) => (StatusCode::OK, "ready\n"),
        // CSI Probe: a dependency is missing. The driver cannot change that, and a node without the SMB client must not block
        // the rollout of the driver to all other nodes.
        Err(status) if status.code() == Code::FailedPrecondition => {
            (StatusCode::OK, "ready; no volume can be mounted here, the log says why\n")
        }
        _ => (StatusCode::SERVICE_UNAVAILABLE, "not ready; the log says why\n"),
    }
}
