//! Metrics for Prometheus: CSI calls by RPC, and the volumes that are mounted on this node.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Instant;

use anyhow::Context;
use axum::Router;
use axum::http::{Request, Response, StatusCode, header};
use axum::routing::get;
use futures::FutureExt;
use futures::future::BoxFuture;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tokio::net::TcpListener;
use tokio::task::spawn_blocking;
use tonic::{Code, Status};
use tower::{Layer, Service};
use tracing::warn;

use crate::mounted::{MountedVolume, mounted_volumes};
use crate::mountinfo::MountTable;

/// Labels of calls that have ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    rpc: String,
    code: String,
}

/// Labels of an RPC.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Rpc {
    rpc: String,
}

/// Labels of a mount.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct MountInfo {
    volume: String,
    address: String,
    transport: &'static str,
}

/// Labels of a volume.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OfVolume {
    volume: String,
}

/// All metrics of the driver. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    calls: Family<Call, Counter>,
    durations: Family<Rpc, Histogram, fn() -> Histogram>,
    in_progress: Family<Rpc, Gauge>,
    /// Metrics of a node.
    mounts: Option<Mounts>,
}

/// Gauges of the mounts, updated on each read.
#[derive(Clone, Debug, Default)]
struct Mounts {
    info: Family<MountInfo, Gauge>,
    channels: Family<OfVolume, Gauge>,
    /// One reader at a time.
    reading: Arc<Mutex<()>>,
}

fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.002, 2.0, 17))
}

impl Metrics {
    /// Includes mounts if this `is_node`.
    pub(crate) fn new(is_node: bool) -> Self {
        let mut registry = Registry::with_prefix("forebay_csi");
        let calls = Family::<Call, Counter>::default();
        let durations = Family::<Rpc, Histogram, fn() -> Histogram>::new_with_constructor(histogram);
        let in_progress = Family::<Rpc, Gauge>::default();
        registry.register("calls", "CSI calls that have completed, by RPC and gRPC code", calls.clone());
        registry.register_with_unit(
            "call_duration",
            "Time from the arrival of a CSI call to its response",
            Unit::Seconds,
            durations.clone(),
        );
        registry.register("calls_in_progress", "CSI calls in progress", in_progress.clone());
        let mounts = is_node.then(Mounts::default);
        if let Some(mounts) = &mounts {
            registry.register(
                "mount_info",
                "1 for each volume that is mounted on this node; the labels give its source and transport",
                mounts.info.clone(),
            );
            registry.register(
                "mount_channels",
                "Channels of the SMB session of a volume that is mounted on this node",
                mounts.channels.clone(),
            );
        }
        Self { registry: Arc::new(registry), calls, durations, in_progress, mounts }
    }

    /// The metrics in the format of Prometheus.
    fn text(&self) -> String {
        if let Some(mounts) = &self.mounts {
            match MountTable::read() {
                Ok(table) => return mounts.with(&mounted_volumes(&table), || self.encoded()),
                Err(error) => warn!(error = error.to_string(), "cannot read the table of mounts"),
            }
        }
        self.encoded()
    }

    fn encoded(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string cannot fail");
        text
    }

    /// Starts the metrics of a call.
    fn begins(&self, rpc: String) -> InProgress {
        let labels = Rpc { rpc };
        self.in_progress.get_or_create(&labels).inc();
        InProgress { metrics: self.clone(), labels, since: Instant::now(), code: Code::Cancelled }
    }
}

impl Mounts {
    /// Encodes the metrics with these volumes as the mounted ones.
    fn with(&self, volumes: &[MountedVolume], encoded: impl FnOnce() -> String) -> String {
        // A panic leaves no harmful state: the next read updates them again.
        let _reading = self.reading.lock().unwrap_or_else(PoisonError::into_inner);
        self.info.clear();
        self.channels.clear();
        for volume in volumes {
            let info = MountInfo {
                volume: volume.id.clone(),
                address: volume.address.clone(),
                transport: if volume.is_rdma { "rdma" } else { "tcp" },
            };
            self.info.get_or_create(&info).set(1);
            if let Some(channels) = volume.channels {
                self.channels.get_or_create(&OfVolume { volume: volume.id.clone() }).set(channels.into());
            }
        }
        encoded()
    }
}

/// A call in progress; it is counted on drop, as cancelled if its caller has gone.
struct InProgress {
    metrics: Metrics,
    labels: Rpc,
    since: Instant,
    code: Code,
}

impl InProgress {
    fn ends(mut self, code: Code) {
        self.code = code;
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let Self { metrics, labels, since, code } = self;
        metrics.in_progress.get_or_create(labels).dec();
        metrics.durations.get_or_create(labels).observe(since.elapsed().as_secs_f64());
        metrics.calls.get_or_create(&Call { rpc: labels.rpc.clone(), code: format!("{code:?}") }).inc();
    }
}

/// Counts the calls of a gRPC server.
#[derive(Clone, Debug)]
pub(crate) struct Counting(pub(crate) Metrics);

impl<S> Layer<S> for Counting {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Self::Service {
        Counted { inner, metrics: self.0.clone() }
    }
}

/// A gRPC server that counts its calls.
#[derive(Clone, Debug)]
pub(crate) struct Counted<S> {
    inner: S,
    metrics: Metrics,
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    R: 'static,
    S::Error: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut TaskContext<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // `/csi.v1.Node/NodeStageVolume`
        let path = request.uri().path();
        let rpc = path.rsplit('/').next().unwrap_or(path).to_owned();
        let call = self.metrics.begins(rpc);
        let answer = self.inner.call(request);
        async move {
            let answer = answer.await;
            // A successful response has its status in the trailers.
            call.ends(match &answer {
                Ok(response) => Status::from_header_map(response.headers()).map_or(Code::Ok, |s| s.code()),
                Err(_) => Code::Unknown,
            });
            answer
        }
        .boxed()
    }
}

/// Listens, and returns the future that serves.
pub(crate) async fn listen_at(
    address: SocketAddr,
    metrics: Metrics,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + Send + 'static> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
    tracing::info!(address = %listener.local_addr()?, "metrics endpoint listens");
    let openmetrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let app = Router::new().route(
        "/metrics",
        get(move || async move {
            // Reads the kernel's tables, which can block on a mount that hangs.
            match spawn_blocking(move || metrics.text()).await {
                Ok(text) => (StatusCode::OK, [(header::CONTENT_TYPE, openmetrics)], text),
                Err(error) => {
                    warn!(error = error.to_string(), "cannot collect the metrics");
                    (StatusCode::INTERNAL_SERVER_ERROR, [(header::CONTENT_TYPE, "text/plain")], String::new())
                }
            }
        }),
    );
    Ok(async move { axum::serve(listener, app).await.context("serve /metrics") })
}

#[cfg(test)]
mod tests {
    use forebay_testing::generated;

    use super::*;

    fn mounted(id: &str, channels: Option<u32>) -> MountedVolume {
        MountedVolume { id: id.to_owned(), address: "10.0.0.1".to_owned(), is_rdma: false, channels }
    }

    #[test]
    fn every_metric_is_in_the_reference() {
        let metrics = Metrics::new(true);
        metrics.begins("NodeStageVolume".to_owned()).ends(Code::Ok);
        let mounts = metrics.mounts.clone().expect("of a node");
        let text = mounts.with(&[mounted("a", Some(2))], || metrics.encoded());
        let table = generated::metrics(&text);
        generated::part("docs/reference/metrics.md", "forebay-csi", &table, "forebay-csi reference");
    }

    #[test]
    fn call_dropped_by_its_caller_is_counted_as_cancelled() {
        let metrics = Metrics::new(false);
        let call = metrics.begins("CreateVolume".to_owned());
        assert!(metrics.encoded().contains("forebay_csi_calls_in_progress{rpc=\"CreateVolume\"} 1\n"));
        drop(call);
        let text = metrics.encoded();
        assert!(text.contains("forebay_csi_calls_in_progress{rpc=\"CreateVolume\"} 0\n"), "{text}");
        let counted = "forebay_csi_calls_total{rpc=\"CreateVolume\",code=\"Cancelled\"} 1\n";
        assert!(text.contains(counted), "{text}");
    }

    #[test]
    fn metrics_of_an_unmounted_volume_are_removed() {
        let metrics = Metrics::new(true);
        let mounts = metrics.mounts.clone().expect("of a node");
        let before = mounts.with(&[mounted("a", Some(2)), mounted("b", None)], || metrics.encoded());
        let lines = |text: &str| text.lines().filter(|l| l.starts_with("forebay_csi_mount_")).count();
        assert_eq!(lines(&before), 3, "{before}");
        let after = mounts.with(&[mounted("b", None)], || metrics.encoded());
        assert_eq!(lines(&after), 1, "{after}");
    }
}
