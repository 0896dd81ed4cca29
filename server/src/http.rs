//! HTTP for those who watch: /metrics, /healthz, /readyz.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;

use crate::health::Health;
use crate::life::Life;
use crate::metrics::Metrics;

#[derive(Clone)]
struct Watched {
    metrics: Arc<Metrics>,
    life: Arc<Life>,
    health: Arc<Health>,
}

/// The endpoints. /healthz answers as long as the process does. /readyz answers 200 with "ready", or with "degraded" and
/// what is wrong: it serves all the same. It answers 503 with "draining" or "drained".
pub fn router(metrics: Arc<Metrics>, life: Arc<Life>, health: Arc<Health>) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(Watched { metrics, life, health })
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
    if watched.life.is_drained() {
        return (StatusCode::SERVICE_UNAVAILABLE, "drained\n".to_owned());
    }
    if watched.life.is_draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    match tokio::task::spawn_blocking(move || watched.health.problems()).await {
        Ok(problems) if problems.is_empty() => (StatusCode::OK, "ready\n".to_owned()),
        Ok(problems) => {
            let lines: String = problems.iter().map(|problem| format!("- {problem}\n")).collect();
            (StatusCode::OK, format!("degraded\n{lines}"))
        }
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "looking for problems panicked\n".to_owned()),
    }
}
