//! Metrics and health over HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::routing::get;

use crate::metrics::Metrics;
use crate::progress::Progress;

/// Health of the process.
#[derive(Debug, Default)]
pub struct Health {
    /// Whether the API server has responded, and the process stands for election or works.
    pub ready: AtomicBool,
    /// Whether the process is shutting down.
    pub ending: AtomicBool,
    /// Progress of the reconcile loop.
    pub progress: Arc<Progress>,
}

/// Serves until the process ends.
///
/// # Errors
///
/// If the process cannot listen on the address.
pub async fn serve(address: SocketAddr, metrics: Arc<Metrics>, health: Arc<Health>) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(address).await?;
    axum::serve(listener, router(metrics, health)).await
}

/// Returns the router for /metrics, /healthz and /readyz.
pub fn router(metrics: Arc<Metrics>, health: Arc<Health>) -> Router {
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Router::new()
        .route(
            "/metrics",
            get(move || async move { ([(header::CONTENT_TYPE, openmetrics)], metrics.text()) }),
        )
        .route("/healthz", {
            let progress = Arc::clone(&health.progress);
            get(move || async move {
                match progress.stalled(Instant::now()) {
                    None => (StatusCode::OK, "ok\n".to_owned()),
                    Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
                }
            })
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::LISTS_TIME_MAX;
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt as _;

    async fn healthz(health: &Arc<Health>) -> StatusCode {
        let request = Request::get("/healthz").body(Body::empty()).expect("a request");
        let answer = router(Arc::default(), Arc::clone(health)).oneshot(request).await;
        answer.expect("an answer").status()
    }

    #[tokio::test]
    async fn healthz_fails_while_the_reconcile_loop_is_stalled() {
        let health: Arc<Health> = Arc::default();
        assert_eq!(healthz(&health).await, StatusCode::OK, "standby without the Lease");
        let long_ago = Instant::now().checked_sub(LISTS_TIME_MAX * 2).expect("the machine runs for longer");
        health.progress.begin(&["StorageClusters"], long_ago);
        assert_eq!(healthz(&health).await, StatusCode::SERVICE_UNAVAILABLE);
        health.progress.listed("StorageClusters");
        assert_eq!(healthz(&health).await, StatusCode::OK);
    }
}
