//! HTTP for monitoring: /metrics, /healthz, /readyz.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::sync::Semaphore;

use crate::health::Health;
use crate::life::Life;
use crate::limits::HTTP_LOOK_TIME_MAX;
use crate::metrics::Metrics;

#[derive(Clone)]
struct Watched {
    metrics: Arc<Metrics>,
    life: Arc<Life>,
    health: Arc<Health>,
    looks: Looks,
    counts: Looks,
}

/// Permits one thread at a time to query file systems. A file system that hangs blocks every thread that queries it, and
/// monitoring repeats the query every few seconds.
#[derive(Clone)]
struct Looks(Arc<Semaphore>);

/// Why there is no result.
#[derive(Debug, PartialEq, Eq)]
enum Blind {
    /// This or an earlier look is still running.
    Hangs,
    Panicked,
}

impl Looks {
    fn new() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }

    /// Runs `look` on a separate thread once the previous one has ended. A caller that stops waiting for its turn gives it
    /// up; a running `look` keeps the turn until it ends.
    async fn next<T: Send + 'static>(
        &self,
        patience: Duration,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Blind> {
        let turn = Arc::clone(&self.0);
        let looked = async move {
            let turn = turn.acquire_owned().await.expect("the semaphore is never closed");
            let looked = tokio::task::spawn_blocking(move || {
                let _turn = turn;
                look()
            });
            looked.await.map_err(|_| Blind::Panicked)
        };
        tokio::time::timeout(patience, looked).await.unwrap_or(Err(Blind::Hangs))
    }
}

/// The endpoints. /healthz answers as long as the process runs. /readyz answers 200 with "ready", or with "degraded" and the
/// problems if the server still serves. It answers 503 with "draining" or "drained", or if a file system does not answer in
/// time.
pub fn router(metrics: Arc<Metrics>, life: Arc<Life>, health: Arc<Health>) -> Router {
    Router::new()
        .route("/metrics", get(metrics_text))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(Watched { metrics, life, health, looks: Looks::new(), counts: Looks::new() })
}

async fn metrics_text(State(watched): State<Watched>) -> impl IntoResponse {
    match watched.counts.next(HTTP_LOOK_TIME_MAX, move || watched.metrics.text()).await {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(Blind::Hangs) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Err(Blind::Panicked) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(watched): State<Watched>) -> impl IntoResponse {
    if watched.life.is_drained() {
        return (StatusCode::SERVICE_UNAVAILABLE, "drained\n".to_owned());
    }
    if watched.life.is_draining() {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    match watched.looks.next(HTTP_LOOK_TIME_MAX, move || watched.health.problems()).await {
        Ok(problems) if problems.is_empty() => (StatusCode::OK, "ready\n".to_owned()),
        Ok(problems) => {
            let lines: String = problems.iter().map(|problem| format!("- {problem}\n")).collect();
            (StatusCode::OK, format!("degraded\n{lines}"))
        }
        Err(Blind::Hangs) => (
            StatusCode::SERVICE_UNAVAILABLE,
            "looking for problems has not ended: does the file system of a pool hang?\n".to_owned(),
        ),
        Err(Blind::Panicked) => {
            (StatusCode::INTERNAL_SERVER_ERROR, "looking for problems panicked\n".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn repeated_requests_during_a_hanging_query_use_one_thread() {
        const AT_ONCE: Duration = Duration::from_millis(10);
        let looks = Looks::new();
        let started = Arc::new(AtomicUsize::new(0));
        let (release, hanging) = mpsc::channel::<()>();
        let count = Arc::clone(&started);
        let first = looks.next(AT_ONCE, move || {
            count.fetch_add(1, Ordering::SeqCst);
            hanging.recv().is_err()
        });
        assert_eq!(first.await, Err(Blind::Hangs));
        for _ in 0..5 {
            let count = Arc::clone(&started);
            let next = looks.next(AT_ONCE, move || count.fetch_add(1, Ordering::SeqCst));
            assert_eq!(next.await, Err(Blind::Hangs));
        }
        drop(release);
        // Once it has ended, the next look runs; no other look ran in between.
        let count = Arc::clone(&started);
        assert_eq!(looks.next(Duration::from_secs(60), move || count.load(Ordering::SeqCst)).await, Ok(1));
        let panics = looks.next(Duration::from_secs(60), || panic!("for the test"));
        assert_eq!(panics.await, Err::<(), _>(Blind::Panicked));
        assert_eq!(looks.next(Duration::from_secs(60), || 1).await, Ok(1));
    }
}
