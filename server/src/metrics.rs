//! Metrics, and their export to Prometheus.
//!
//! Counting a request takes a few relaxed atomic additions: no lock and no look-up by label.

mod volumes;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forebay_smb::status::NtStatus;
use forebay_smb::wire::Command;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

pub use self::volumes::VolumeFigures;
use crate::lanes::{Lane, Queues};
use crate::limits::EVENT_LOOPS_MAX;
use crate::namespace;

/// Commands by their code ([MS-SMB2] 2.2.1.2); the last one represents all others.
const COMMANDS: [&str; 20] = [
    "negotiate",
    "session_setup",
    "logoff",
    "tree_connect",
    "tree_disconnect",
    "create",
    "close",
    "flush",
    "read",
    "write",
    "lock",
    "ioctl",
    "cancel",
    "echo",
    "query_directory",
    "change_notify",
    "query_info",
    "set_info",
    "oplock_break",
    "other",
];

/// Classes of a status by its severity ([MS-ERREF] 2.3).
const CLASSES: [&str; 4] = ["success", "informational", "warning", "error"];

/// Upper bounds of the latency histogram's buckets, in 100 ns.
const LATENCY_BOUNDS: [u64; 14] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    5_000_000,
    10_000_000,
    100_000_000,
];

/// A number that increases and decreases.
#[derive(Debug, Default)]
pub struct Level(AtomicI64);

impl Level {
    /// One more.
    pub fn inc(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// One less.
    pub fn dec(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    /// The current value.
    #[must_use]
    pub fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that only increases.
#[derive(Debug, Default)]
pub struct Count(AtomicU64);

impl Count {
    /// One more.
    pub fn inc(&self) {
        self.inc_by(1);
    }

    /// Adds `n`.
    pub fn inc_by(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The current value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct CommandStats {
    by_class: [Count; CLASSES.len()],
    latency: [Count; LATENCY_BOUNDS.len() + 1],
    latency_sum: Count,
}

/// Space of a pool, for its gauges.
#[derive(Clone, Debug)]
pub struct PoolSpace {
    /// The pool's name.
    pub pool: String,
    /// Size in bytes.
    pub total_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Sum of hard capacities in bytes.
    pub provisioned_bytes: u64,
    /// Volumes being served.
    pub volumes: usize,
    /// Snapshots.
    pub snapshots: usize,
    /// Volumes that could not be served.
    pub unserved: usize,
}

/// The contents of a server at one moment.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// Its pools.
    pub pools: Vec<PoolSpace>,
    /// The volumes that it serves.
    pub volumes: Vec<VolumeFigures>,
}

/// Returns the current contents.
pub type Look = dyn Fn() -> Contents + Send + Sync;

/// All metrics.
pub struct Metrics {
    /// Connections.
    pub connections: Level,
    /// Connections without a logon among them.
    pub connections_unauthenticated: Level,
    /// Connections that were closed because there were too many.
    pub connections_refused: Count,
    /// Connections that were closed so that their clients reopen files.
    pub returns: Count,
    /// SMB sessions.
    pub sessions: Level,
    /// Logins that failed.
    pub authentication_failures: Count,
    /// Bytes sent, including headers.
    pub bytes_sent: Count,
    /// Payload that the server copied from one buffer to another on its way to RDMA.
    pub rdma_copied_bytes: Count,
    /// Payload of connections over RDMA that the kernel copied between the page cache and a buffer.
    pub rdma_page_cache_bytes: Count,
    /// Times that a connection had to wait for memory.
    pub memory_waits: Count,
    /// Operations that had to wait because of the limits of their volume.
    pub throttled: Count,
    memory_bytes_max: AtomicUsize,
    read_bytes: Payload,
    written_bytes: Payload,
    read_through_cache: Count,
    read_past_cache: Count,
    commands: [CommandStats; COMMANDS.len()],
    buffers: [AtomicUsize; EVENT_LOOPS_MAX],
    io_engine: &'static str,
    lanes: Queues,
    look: Box<Look>,
    namespaces: Vec<Arc<namespace::State>>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// Payload by its path.
#[derive(Default)]
struct Payload {
    copied: Count,
    rdma_direct: Count,
}

impl Payload {
    fn count(&self, by_rdma: bool, bytes: u32) {
        let path = if by_rdma { &self.rdma_direct } else { &self.copied };
        path.inc_by(bytes.into());
    }
}

impl Metrics {
    /// Metrics with no counts yet.
    #[must_use]
    pub fn new(
        io_engine: &'static str,
        lanes: Queues,
        look: Box<Look>,
        namespaces: Vec<Arc<namespace::State>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            connections: Level::default(),
            connections_unauthenticated: Level::default(),
            connections_refused: Count::default(),
            returns: Count::default(),
            sessions: Level::default(),
            authentication_failures: Count::default(),
            bytes_sent: Count::default(),
            rdma_copied_bytes: Count::default(),
            rdma_page_cache_bytes: Count::default(),
            memory_waits: Count::default(),
            throttled: Count::default(),
            memory_bytes_max: AtomicUsize::new(0),
            read_bytes: Payload::default(),
            written_bytes: Payload::default(),
            read_through_cache: Count::default(),
            read_past_cache: Count::default(),
            commands: Default::default(),
            buffers: [const { AtomicUsize::new(0) }; EVENT_LOOPS_MAX],
            io_engine,
            lanes,
            look,
            namespaces,
        })
    }

    /// Counts an answered request that took `latency`.
    pub fn request(
        &self,
        command: Command,
        status: NtStatus,
        latency: Duration,
        payload_bytes: u32,
        by_rdma: bool,
    ) {
        let latency = u64::try_from(latency.as_nanos() / 100).unwrap_or(u64::MAX);
        let index = usize::from(command.0).min(COMMANDS.len() - 1);
        let stats = &self.commands[index];
        // An intermediate step of a login is not a failure.
        let class = if status == NtStatus::MORE_PROCESSING_REQUIRED { 0 } else { status.0 >> 30 };
        stats.by_class[class as usize].inc();
        stats.latency[LATENCY_BOUNDS.partition_point(|&bound| bound < latency)].inc();
        stats.latency_sum.inc_by(latency);
        match command {
            Command::READ => self.read_bytes.count(by_rdma, payload_bytes),
            Command::WRITE => self.written_bytes.count(by_rdma, payload_bytes),
            _ => {}
        }
    }

    /// Counts `bytes` read from a file, of which `past_cache` bypassed the page cache.
    pub fn file_read(&self, bytes: usize, past_cache: usize) {
        self.read_through_cache.inc_by(bytes.saturating_sub(past_cache) as u64);
        if past_cache > 0 {
            self.read_past_cache.inc_by(past_cache as u64);
        }
    }

    /// Sets the size of the memory for payload.
    pub fn memory_bytes_max(&self, bytes: usize) {
        self.memory_bytes_max.store(bytes, Ordering::Relaxed);
    }

    /// Sets the size of a loop's buffers.
    pub fn buffer_bytes(&self, event_loop: usize, bytes: usize) {
        self.buffers[event_loop].store(bytes, Ordering::Relaxed);
    }

    /// All metrics in the OpenMetrics text format.
    #[must_use]
    pub fn text(self: &Arc<Self>) -> String {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Arc::clone(self)));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)
            .expect("writing to a string does not fail");
        text
    }
}

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        gauge(e, "forebay_connections", "Connections", &[(&[], self.connections.get() as f64)])?;
        let name = "forebay_connections_unauthenticated";
        let value = self.connections_unauthenticated.get() as f64;
        gauge(e, name, "Connections without a logon yet", &[(&[], value)])?;
        let refused = self.connections_refused.get();
        counter(
            e,
            "forebay_connections_refused",
            "Connections closed because there were too many",
            &[(&[], refused)],
        )?;
        let returns = "Connections ended because a client used a handle of before it reconnected";
        counter(e, "forebay_connections_returned", returns, &[(&[], self.returns.get())])?;
        gauge(e, "forebay_sessions", "SMB sessions", &[(&[], self.sessions.get() as f64)])?;
        let failures = self.authentication_failures.get();
        counter(e, "forebay_authentication_failures", "Logins that failed", &[(&[], failures)])?;
        let (copied, direct) = ([("path", "copied")], [("path", "rdma-direct")]);
        for (name, help, payload) in [
            ("forebay_read_bytes", "Bytes read by clients", &self.read_bytes),
            ("forebay_written_bytes", "Bytes written by clients", &self.written_bytes),
        ] {
            counter(e, name, help, &[(&copied, payload.copied.get()), (&direct, payload.rdma_direct.get())])?;
        }
        let ways: [Labelled<'_, u64>; 2] = [
            (&[("path", "page-cache")], self.read_through_cache.get()),
            (&[("path", "direct")], self.read_past_cache.get()),
        ];
        counter(
            e,
            "forebay_file_read_bytes",
            "Bytes read from files, through the page cache and past it",
            &ways,
        )?;
        let help = "Bytes that the server copied between buffers on their way to RDMA: none, if all is well";
        counter(e, "forebay_rdma_copied_bytes", help, &[(&[], self.rdma_copied_bytes.get())])?;
        let help = "Bytes over RDMA that the kernel copied between the page cache and a buffer";
        counter(e, "forebay_rdma_page_cache_bytes", help, &[(&[], self.rdma_page_cache_bytes.get())])?;
        counter(e, "forebay_sent_bytes", "Bytes sent, with headers", &[(&[], self.bytes_sent.get())])?;
        let buffers: usize = self.buffers.iter().map(|b| b.load(Ordering::Relaxed)).sum();
        gauge(e, "forebay_buffer_bytes", "Payload buffers in use", &[(&[], buffers as f64)])?;
        let most = self.memory_bytes_max.load(Ordering::Relaxed) as f64;
        gauge(e, "forebay_buffer_bytes_max", "Memory for payload buffers", &[(&[], most)])?;
        let waits = "Times that a connection waited for payload buffers of which others had all";
        counter(e, "forebay_buffer_waits", waits, &[(&[], self.memory_waits.get())])?;
        let throttled = "Operations that waited because their volume had used up its limits";
        counter(e, "forebay_throttled_operations", throttled, &[(&[], self.throttled.get())])?;
        let engine = [("engine", self.io_engine)];
        gauge(e, "forebay_io_engine", "1 for the I/O engine in use", &[(&engine, 1.0)])?;
        let lanes = Lane::ALL.map(|lane| ([("lane", lane.name())], self.lanes.waiting(lane) as f64));
        let lanes = lanes.each_ref().map(|(labels, waiting)| (labels.as_slice(), *waiting));
        gauge(e, "forebay_lane_waiting", "Operations that wait for a thread of their lane", &lanes)?;
        let contents = (self.look)();
        Self::encode_pools(&contents.pools, e)?;
        volumes::encode(&contents.volumes, e)?;
        self.encode_namespaces(e)?;
        self.encode_commands(e)
    }
}

impl Metrics {
    fn encode_pools(pools: &[PoolSpace], e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type Get = fn(&PoolSpace) -> f64;
        let gauges: [(&str, &str, Get); 6] = [
            ("forebay_pool_size_bytes", "Size of the pool's file system", |p| p.total_bytes as f64),
            ("forebay_pool_free_bytes", "Free space of the pool's file system", |p| p.free_bytes as f64),
            (
                "forebay_pool_provisioned_bytes",
                "Sum of the volumes' hard capacities and of what snapshots have",
                |p| p.provisioned_bytes as f64,
            ),
            ("forebay_pool_volumes", "Volumes being served", |p| p.volumes as f64),
            ("forebay_pool_snapshots", "Snapshots", |p| p.snapshots as f64),
            ("forebay_pool_volumes_unserved", "Volumes that cannot be served; the log says why", |p| {
                p.unserved as f64
            }),
        ];
        for (name, help, get) in gauges {
            let labels: Vec<[(&str, &str); 1]> = pools.iter().map(|p| [("pool", p.pool.as_str())]).collect();
            let values: Vec<(&[(&str, &str)], f64)> =
                labels.iter().zip(pools).map(|(l, p)| (l.as_slice(), get(p))).collect();
            gauge(e, name, help, &values)?;
        }
        Ok(())
    }

    /// Encodes nothing if no pool is on a namespace.
    fn encode_namespaces(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        if self.namespaces.is_empty() {
            return Ok(());
        }
        type Get = fn(&namespace::State) -> f64;
        let gauges: [(&str, &str, Get); 3] = [
            ("forebay_namespace_paths", "Paths to the pool's namespace, as configured", |n| {
                n.paths().1 as f64
            }),
            ("forebay_namespace_paths_up", "Of them, those that take I/O", |n| n.paths().0 as f64),
            (
                "forebay_namespace_unconfirmed_seconds",
                "Time since the reservation of the pool's namespace was last seen to be ours",
                |n| n.confirmed_ago(Instant::now()).as_secs_f64(),
            ),
        ];
        for (name, help, get) in gauges {
            let labels: Vec<[(&str, &str); 1]> =
                self.namespaces.iter().map(|n| [("pool", n.pool())]).collect();
            let values: Vec<(&[(&str, &str)], f64)> =
                labels.iter().zip(&self.namespaces).map(|(l, n)| (l.as_slice(), get(n))).collect();
            gauge(e, name, help, &values)?;
        }
        Ok(())
    }

    fn encode_commands(&self, e: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counter_type = MetricType::Counter;
        let mut family = e.encode_descriptor(
            "forebay_requests",
            "Requests by command and class of status",
            None,
            counter_type,
        )?;
        for (stats, command) in self.commands.iter().zip(COMMANDS) {
            for (count, class) in stats.by_class.iter().zip(CLASSES) {
                if count.get() > 0 {
                    let labels = [("command", command), ("status", class)];
                    ConstCounter::new(count.get()).encode(family.encode_family(&labels)?)?;
                }
            }
        }
        let help = "Time from a request's arrival to its answer";
        let unit = prometheus_client::registry::Unit::Seconds;
        let mut family =
            e.encode_descriptor("forebay_request_duration", help, Some(&unit), MetricType::Histogram)?;
        for (stats, command) in self.commands.iter().zip(COMMANDS) {
            let counts: Vec<u64> = stats.latency.iter().map(Count::get).collect();
            let total: u64 = counts.iter().sum();
            if total > 0 {
                let bounds = LATENCY_BOUNDS.iter().map(|&b| b as f64 / 1e7).chain([f64::INFINITY]);
                let buckets: Vec<(f64, u64)> = bounds.zip(counts).collect();
                let sum = stats.latency_sum.get() as f64 / 1e7;
                let labels = [("command", command)];
                family
                    .encode_family(&labels)?
                    .encode_histogram::<[(&str, &str); 0]>(sum, total, &buckets, None)?;
            }
        }
        Ok(())
    }
}

type Labelled<'a, T> = (&'a [(&'a str, &'a str)], T);

fn gauge(e: &mut DescriptorEncoder<'_>, name: &str, help: &str, values: &[Labelled<'_, f64>]) -> fmt::Result {
    let mut family = e.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        if labels.is_empty() {
            return ConstGauge::new(*value).encode(family);
        }
        ConstGauge::new(*value).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

fn counter(
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: &[Labelled<'_, u64>],
) -> fmt::Result {
    let mut family = e.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (labels, value) in values {
        if labels.is_empty() {
            return ConstCounter::new(*value).encode(family);
        }
        ConstCounter::new(*value).encode(family.encode_family(labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use forebay_smb::engine::Activity;

    use super::*;
    use crate::lanes::Lanes;

    #[test]
    fn metrics_text_contains_the_recorded_activity() {
        let activity = Arc::new(Activity::default());
        let volume = VolumeFigures {
            id: "v".to_owned(),
            pool: "p".to_owned(),
            claim: "data".to_owned(),
            claim_namespace: "team".to_owned(),
            persistent_volume: "pvc-1".to_owned(),
            capacity_bytes: 1000,
            sessions: 2,
            open_files: 3,
            throttled: 4,
            activity: Arc::clone(&activity),
        };
        let contents = Contents {
            pools: vec![PoolSpace {
                pool: "p".to_owned(),
                total_bytes: 100,
                free_bytes: 60,
                provisioned_bytes: 40,
                volumes: 2,
                snapshots: 3,
                unserved: 1,
            }],
            volumes: vec![volume],
        };
        activity.completed(Command::READ, 4096, Duration::from_millis(1500));
        activity.completed(Command::WRITE, 512, Duration::from_millis(250));
        let lanes = Lanes::start(1).expect("threads");
        let metrics =
            Metrics::new("readiness", lanes.queues().clone(), Box::new(move || contents.clone()), Vec::new());
        metrics.connections.inc();
        metrics.request(Command::READ, NtStatus::SUCCESS, Duration::from_micros(200), 4096, false);
        metrics.request(Command::READ, NtStatus::SUCCESS, Duration::from_micros(200), 512, true);
        metrics.file_read(4096, 0);
        metrics.file_read(512, 500);
        metrics.request(Command::READ, NtStatus::END_OF_FILE, Duration::from_secs(20), 0, false);
        metrics.request(
            Command::SESSION_SETUP,
            NtStatus::MORE_PROCESSING_REQUIRED,
            Duration::from_nanos(100),
            0,
            false,
        );
        let text = metrics.text();
        for line in [
            "forebay_connections 1",
            "forebay_read_bytes_total{path=\"copied\"} 4096",
            "forebay_read_bytes_total{path=\"rdma-direct\"} 512",
            "forebay_file_read_bytes_total{path=\"page-cache\"} 4108",
            "forebay_file_read_bytes_total{path=\"direct\"} 500",
            "forebay_requests_total{command=\"read\",status=\"success\"} 2",
            "forebay_requests_total{command=\"read\",status=\"error\"} 1",
            "forebay_requests_total{command=\"session_setup\",status=\"success\"} 1",
            "forebay_request_duration_seconds_bucket{le=\"0.0001\",command=\"read\"} 0",
            "forebay_request_duration_seconds_bucket{le=\"0.00025\",command=\"read\"} 2",
            "forebay_request_duration_seconds_bucket{le=\"+Inf\",command=\"read\"} 3",
            "forebay_io_engine{engine=\"readiness\"} 1",
            "forebay_lane_waiting{lane=\"look-up\"} 0",
            "forebay_lane_waiting{lane=\"sync\"} 0",
            "forebay_pool_free_bytes{pool=\"p\"} 60",
            "forebay_pool_volumes_unserved{pool=\"p\"} 1",
            "forebay_volume_info{volume=\"v\",pool=\"p\",claim_namespace=\"team\",claim=\"data\",persistentvolume=\"pvc-1\"} 1",
            "forebay_volume_capacity_bytes{volume=\"v\"} 1000",
            "forebay_volume_sessions{volume=\"v\"} 2",
            "forebay_volume_open_files{volume=\"v\"} 3",
            "forebay_volume_read_bytes_total{volume=\"v\"} 4096",
            "forebay_volume_written_bytes_total{volume=\"v\"} 512",
            "forebay_volume_throttled_operations_total{volume=\"v\"} 4",
            "forebay_volume_operations_total{volume=\"v\",kind=\"read\"} 1",
            "forebay_volume_operations_total{volume=\"v\",kind=\"metadata\"} 0",
            "forebay_volume_operation_seconds_total{volume=\"v\",kind=\"read\"} 1.5",
            "forebay_volume_operation_seconds_total{volume=\"v\",kind=\"write\"} 0.25",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l.trim_end_matches(".0") == line), "{line} not in\n{text}");
        }
    }
}
