//! Metrics and health over HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;

use crate::metrics::Metrics;

/// How the process is.
#[derive(Debug, Default)]
pub struct Health {
    /// The API server has answered, and it stands for election or works.
    pub ready: AtomicBool,
    /// It ends.
    pub ending: AtomicBool,
}

/// Serves until the process ends.
///
/// # Errors
///
/// Where the address cannot be listened on.
pub async fn serve(address: SocketAddr, metrics: Arc<Metrics>, health: Arc<Health>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, router(metrics, health)).await
}

fn router(metrics: Arc<Metrics>, health: Arc<Health>) -> Router {
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Router::new()
        .route(
            "/metrics",
            get(move || async move { ([(header::CONTENT_TYPE, openmetrics)], metrics.text()) }),
        )
        .route("/healthz", get(|| async { "ok\n" }))
        .route(
            "/readyz",
            get(move || async move {
                if health.ending.load(Ordering::Relaxed) {
                    (StatusCode::SERVICE_UNAVAILABLE, "ending\n")
                } else if health.ready.load(Ordering::Relaxed) {
                    (StatusCode::OK, "ok\n")
                } else {
                    (StatusCode::SERVICE_UNAVAILABLE, "the API server has not answered yet\n")
                }
            }),
        )
}
