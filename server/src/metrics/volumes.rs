//! Metrics of each volume, to find a busy one.

use std::fmt;
use std::sync::Arc;

use forebay_smb::engine::{Activity, Done, Work};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// A volume that is served.
#[derive(Clone, Debug)]
pub struct VolumeFigures {
    /// Its id.
    pub id: String,
    /// Its pool.
    pub pool: String,
    /// Name of the PersistentVolumeClaim that it was made for, if any.
    pub claim: String,
    /// That claim's namespace.
    pub claim_namespace: String,
    /// Name of the PersistentVolume.
    pub persistent_volume: String,
    /// Capacity in bytes.
    pub capacity_bytes: u64,
    /// SMB sessions.
    pub sessions: u64,
    /// Open files and directories.
    pub open_files: u64,
    /// Operations that waited for its limits.
    pub throttled: u64,
    /// The operations of its clients.
    pub activity: Arc<Activity>,
}

pub(super) fn encode(volumes: &[VolumeFigures], e: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "1 for each volume that is served; the labels say for which claim it was made";
    let mut family = e.encode_descriptor("forebay_volume_info", help, None, MetricType::Gauge)?;
    for volume in volumes {
        let labels = [
            ("volume", volume.id.as_str()),
            ("pool", &volume.pool),
            ("claim_namespace", &volume.claim_namespace),
            ("claim", &volume.claim),
            ("persistentvolume", &volume.persistent_volume),
        ];
        ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
    }
    type Get = fn(&VolumeFigures) -> u64;
    let gauges: [(&str, &str, Get); 3] = [
        ("forebay_volume_capacity_bytes", "Capacity of the volume", |v| v.capacity_bytes),
        ("forebay_volume_sessions", "SMB sessions of the volume's clients", |v| v.sessions),
        ("forebay_volume_open_files", "Files and directories that the volume's clients have open", |v| {
            v.open_files
        }),
    ];
    for (name, help, get) in gauges {
        let mut family = e.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for volume in volumes {
            ConstGauge::new(get(volume)).encode(family.encode_family(&[("volume", volume.id.as_str())])?)?;
        }
    }
    let counters: [(&str, &str, Get); 3] = [
        ("forebay_volume_read_bytes", "Bytes that clients read from the volume", |v| {
            v.activity.done(Work::Read).bytes
        }),
        ("forebay_volume_written_bytes", "Bytes that clients wrote to the volume", |v| {
            v.activity.done(Work::Write).bytes
        }),
        ("forebay_volume_throttled_operations", "Operations that waited for the limits of the volume", |v| {
            v.throttled
        }),
    ];
    for (name, help, get) in counters {
        let mut family = e.encode_descriptor(name, help, None, MetricType::Counter)?;
        for volume in volumes {
            ConstCounter::new(get(volume))
                .encode(family.encode_family(&[("volume", volume.id.as_str())])?)?;
        }
    }
    let help = "Operations on the volume: read, write, flush, or metadata for all others";
    by_kind(volumes, e, "forebay_volume_operations", help, |done| done.operations as f64)?;
    let help = "Time from the arrival of the volume's requests to their answers, summed";
    by_kind(volumes, e, "forebay_volume_operation_seconds", help, |done| done.duration.as_secs_f64())
}

fn by_kind(
    volumes: &[VolumeFigures],
    e: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    get: fn(&Done) -> f64,
) -> fmt::Result {
    let mut family = e.encode_descriptor(name, help, None, MetricType::Counter)?;
    for volume in volumes {
        for work in Work::ALL {
            let labels = [("volume", volume.id.as_str()), ("kind", work.name())];
            ConstCounter::new(get(&volume.activity.done(work))).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}
