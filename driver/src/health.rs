//! HTTP: `/healthz` says that the process runs, `/readyz` that it can work (CSI Probe).

use std::net::SocketAddr;

use anyhow::Context;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::identity::IdentityService;

/// Serves until the process ends.
pub(crate) async fn serve(address: SocketAddr, identity: IdentityService) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
    tracing::info!(address = %listener.local_addr()?, "health endpoint listens");
    let app = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(identity);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(error = error.to_string(), "the health endpoint ended");
        }
    });
    Ok(())
}

async fn ready(State(identity): State<IdentityService>) -> (StatusCode, &'static str) {
    if identity.is_ready().await {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready; the log says why\n")
    }
}
