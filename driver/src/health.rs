//! HTTP: `/healthz` says that the process runs, `/readyz` that it can work (CSI Probe) and is registered with the
//! kubelet where it must be.

use std::net::SocketAddr;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::identity::IdentityService;
use crate::registration::Outcome;

#[derive(Clone)]
struct Watched {
    identity: IdentityService,
    /// Where this is a node of a Kubernetes cluster.
    registration: Option<watch::Receiver<Outcome>>,
}

/// Serves until the process ends.
pub(crate) async fn serve(
    address: SocketAddr,
    identity: IdentityService,
    registration: Option<watch::Receiver<Outcome>>,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
    tracing::info!(address = %listener.local_addr()?, "health endpoint listens");
    let app = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(Watched { identity, registration });
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(error = error.to_string(), "the health endpoint ended");
        }
    });
    Ok(())
}

async fn ready(State(watched): State<Watched>) -> (StatusCode, &'static str) {
    if watched.registration.is_some_and(|outcome| *outcome.borrow() != Outcome::Registered) {
        return (StatusCode::SERVICE_UNAVAILABLE, "not ready: the kubelet has not registered the driver\n");
    }
    if watched.identity.is_ready().await {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready; the log says why\n")
    }
}
