//! What a measurement does: the shapes of MLPerf Storage's workloads, scaled to a volume.

use anyhow::{bail, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The load to generate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// Training on large samples: one file of 147 MB each, 7 in a batch, 0.323 s of computation (H100).
    Unet3d,
    /// Training on many small files: 323 kB each, 24 in a batch, 0.0476 s of computation (B200).
    Retinanet,
    /// Each pod writes a large file, syncs and renames it; then each reads the file of another pod.
    Checkpoint,
}

impl Workload {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Unet3d => "unet3d",
            Self::Retinanet => "retinanet",
            Self::Checkpoint => "checkpoint",
        }
    }
}

/// The data and the rhythm of a training workload.
struct Shape {
    sample_bytes: u64,
    batch: u64,
    compute_micros: u64,
    /// Enough for statistics: more small files would mean minutes of preparation.
    samples_max: u64,
}

const UNET3D: Shape =
    Shape { sample_bytes: 146_600_628, batch: 7, compute_micros: 323_000, samples_max: 10_000 };
const RETINANET: Shape =
    Shape { sample_bytes: 322_957, batch: 24, compute_micros: 47_600, samples_max: 20_000 };

/// The share of the volume that the data of one workload uses, in percent. Workloads run one after the other, and each removes
/// its data.
const VOLUME_PERCENT: u64 = 75;
/// Batches of each accelerator in an epoch: with fewer, the same files would be read while they are in all caches.
const BATCHES_MIN: u64 = 3;
/// Checkpoints in one measurement. The median is reported.
const ROUNDS: u32 = 3;
/// Maximum size of one pod's file in a checkpoint.
const RANK_BYTES_MAX: u64 = 16 << 30;
/// Less than this measures only latency.
const RANK_BYTES_MIN: u64 = 1 << 20;

/// One workload, as all pods execute it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum Plan {
    Training {
        workload: Workload,
        /// In each pod.
        accelerators: u32,
        samples: u64,
        sample_bytes: u64,
        batch: u64,
        compute_micros: u64,
        seconds: u64,
    },
    Checkpoint {
        /// Bytes of each pod's file.
        rank_bytes: u64,
        rounds: u32,
    },
}

/// What a plan is made for.
pub(crate) struct Scope {
    pub(crate) pods: u32,
    pub(crate) accelerators: u32,
    pub(crate) seconds: u64,
    pub(crate) volume_bytes: u64,
    /// Of samples, computation and checkpoints: the demand in bytes/s stays the same.
    pub(crate) scale: f64,
}

impl Plan {
    /// Makes the plan of a workload.
    ///
    /// # Errors
    ///
    /// If the volume is too small.
    pub(crate) fn new(workload: Workload, scope: &Scope) -> anyhow::Result<Self> {
        let room = scope.volume_bytes / 100 * VOLUME_PERCENT;
        let shape = match workload {
            Workload::Unet3d => UNET3D,
            Workload::Retinanet => RETINANET,
            Workload::Checkpoint => return checkpoint(room, scope),
        };
        let scaled = |number: u64| ((number as f64 * scope.scale) as u64).max(1);
        let sample_bytes = scaled(shape.sample_bytes);
        let accelerators = u64::from(scope.accelerators) * u64::from(scope.pods);
        let least = accelerators * shape.batch * BATCHES_MIN;
        let samples = (room / sample_bytes).min(shape.samples_max.max(least));
        if samples < least {
            bail!(
                "{} needs {} (accelerators: {accelerators}): raise --size, or lower --scale or the number of accelerators",
                workload.name(),
                crate::quantity::bytes((least * sample_bytes * 100).div_ceil(VOLUME_PERCENT) as i64),
            );
        }
        Ok(Self::Training {
            workload,
            accelerators: scope.accelerators,
            samples,
            sample_bytes,
            batch: shape.batch,
            compute_micros: scaled(shape.compute_micros),
            seconds: scope.seconds,
        })
    }

    pub(crate) fn workload(&self) -> Workload {
        match self {
            Self::Training { workload, .. } => *workload,
            Self::Checkpoint { .. } => Workload::Checkpoint,
        }
    }
}

fn checkpoint(room: u64, scope: &Scope) -> anyhow::Result<Plan> {
    // The previous checkpoint is removed only after the next one is complete.
    let each = room / 2 / u64::from(scope.pods);
    let rank_bytes = each.min((RANK_BYTES_MAX as f64 * scope.scale) as u64);
    ensure!(
        rank_bytes >= RANK_BYTES_MIN,
        "checkpoint: {rank_bytes} bytes for each pod are too few: raise --size"
    );
    Ok(Plan::Checkpoint { rank_bytes, rounds: ROUNDS })
}

/// Parses a size such as `500Mi` or `32Gi`.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u32); 4] = [("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)];
    let parsed = UNITS.iter().find_map(|(unit, shift)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(1 << shift)
    });
    parsed
        .filter(|bytes| *bytes > 0 && i64::try_from(*bytes).is_ok())
        .ok_or_else(|| "a size such as 500Mi or 32Gi".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(volume_bytes: u64, scale: f64) -> Scope {
        Scope { pods: 2, accelerators: 2, seconds: 30, volume_bytes, scale }
    }

    #[test]
    fn accelerator_throughput_demand_is_independent_of_the_scale() {
        let demand = |scale| match Plan::new(Workload::Unet3d, &scope(64 << 30, scale)).expect("a plan") {
            Plan::Training { sample_bytes, batch, compute_micros, .. } => {
                (sample_bytes * batch) as f64 / compute_micros as f64
            }
            Plan::Checkpoint { .. } => panic!("not a checkpoint"),
        };
        // 3.18 GB/s at 100 % utilisation.
        assert!((demand(1.0) - 3177.0).abs() < 1.0, "{}", demand(1.0));
        assert!((demand(0.01) / demand(1.0) - 1.0).abs() < 0.001);
    }

    #[test]
    fn data_set_fits_the_volume_and_small_volumes_are_refused() {
        for workload in [Workload::Unet3d, Workload::Retinanet] {
            let Plan::Training { samples, sample_bytes, batch, .. } =
                Plan::new(workload, &scope(32 << 30, 1.0)).expect("a plan")
            else {
                panic!("no training")
            };
            assert!(samples * sample_bytes <= (32 << 30) / 100 * 75, "{samples}");
            assert!(samples >= 4 * batch * BATCHES_MIN);
        }
        let error = Plan::new(Workload::Unet3d, &scope(1 << 30, 1.0)).expect_err("too small").to_string();
        assert!(error.contains("unet3d needs 15.2Gi (accelerators: 4)"), "{error}");
        assert!(Plan::new(Workload::Unet3d, &scope(1 << 30, 0.01)).is_ok());
        let Plan::Checkpoint { rank_bytes, .. } =
            Plan::new(Workload::Checkpoint, &scope(32 << 30, 1.0)).expect("a plan")
        else {
            panic!("no checkpoint")
        };
        assert!(rank_bytes * 2 * 2 <= (32 << 30) / 100 * 75);
        assert!(Plan::new(Workload::Checkpoint, &scope(1 << 20, 1.0)).is_err());
    }

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(size("512Mi"), Ok(512 << 20));
        assert_eq!(size("1Ti"), Ok(1 << 40));
        for bad in ["", "Gi", "0Gi", "-1Gi", "1.5Gi", "10G", "10", "99999999999999Ti"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
