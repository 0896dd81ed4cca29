//! HTTP for those who watch: /metrics, /healthz, /readyz.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::metrics::Metrics;

#[derive(Clone)]
struct Watched {
    metrics: Arc<Metrics>,
    draining: Arc<AtomicBool>,
}

/// The endpoints. /healthz answers as long as the process does; /readyz answers 503 once the server is ending.
pub fn router(metrics: Arc<Metrics>, draining: Arc<AtomicBool>) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(Watched { metrics, draining })
}

async fn metrics_text(State(watched): State<Watched>) -> impl IntoResponse {
    let text = tokio::task::spawn_blocking(move || watched.metrics.text()).await;
    match text {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(watched): State<Watched>) -> impl IntoResponse {
    if watched.draining.load(Ordering::Relaxed) {
        (StatusCode::SERVICE_UNAVAILABLE, "draining\n")
    } else {
        (StatusCode::OK, "ready\n")
    }
}
