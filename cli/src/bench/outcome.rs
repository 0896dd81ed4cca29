//! What was measured: by one pod, and by all pods together.

use std::time::Duration;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use super::plan::Workload;
use crate::paint::Paint;
use crate::table::Table;

/// Before the result in a pod's log.
const MARK: &str = "forebay-bench-result: ";

/// Percentiles of durations, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tail {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Tail {
    pub(super) fn of(mut durations: Vec<Duration>) -> Self {
        durations.sort_unstable();
        let at = |percent: usize| {
            let rank = (durations.len() * percent).div_ceil(100).saturating_sub(1);
            durations.get(rank).map_or(0.0, |duration| duration.as_secs_f64() * 1e3)
        };
        Self { p50: at(50), p99: at(99), max: at(100) }
    }

    /// The worse one of each.
    fn or_worse(self, other: Self) -> Self {
        Self { p50: self.p50.max(other.p50), p99: self.p99.max(other.p99), max: self.max.max(other.max) }
    }
}

/// What one pod has measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum Measured {
    Training {
        workload: Workload,
        seconds: f64,
        bytes: u64,
        samples: u64,
        /// Of each accelerator, from 0 to 1.
        utilisation: Vec<f64>,
        batch_wait: Tail,
        sample_read: Tail,
    },
    Checkpoint {
        rank_bytes: u64,
        /// Of each round.
        write_seconds: Vec<f64>,
        read_seconds: Vec<f64>,
    },
}

/// Prints the result where the plugin finds it.
pub(super) fn print(measured: &[Measured]) -> anyhow::Result<()> {
    println!("{MARK}{}", serde_json::to_string(measured)?);
    Ok(())
}

/// Finds the result in a pod's log.
pub(super) fn parse(log: &str) -> anyhow::Result<Vec<Measured>> {
    let line = log
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix(MARK))
        .context("there is no result in its log")?;
    serde_json::from_str(line).context("the result in its log")
}

/// What all pods have measured together.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum Result {
    Training {
        workload: Workload,
        accelerators: usize,
        gigabytes_per_second: f64,
        samples_per_second: f64,
        /// The mean of all accelerators, in percent.
        utilisation_percent: f64,
        /// That of the accelerator that has waited most.
        utilisation_percent_min: f64,
        /// Of the worst pod, in milliseconds.
        batch_wait_ms: Tail,
        sample_read_ms: Tail,
    },
    Checkpoint {
        workload: Workload,
        bytes: u64,
        /// Until the slowest pod is done; the median of all rounds.
        write_seconds: f64,
        write_gigabytes_per_second: f64,
        read_seconds: f64,
        read_gigabytes_per_second: f64,
    },
}

/// Combines the results of all pods.
pub(super) fn combine(pods: &[Vec<Measured>]) -> anyhow::Result<Vec<Result>> {
    let first = pods.first().context("no pod has measured anything")?;
    ensure!(pods.iter().all(|pod| pod.len() == first.len()), "the pods have measured different workloads");
    (0..first.len())
        .map(|number| together(&pods.iter().map(|pod| &pod[number]).collect::<Vec<_>>()))
        .collect()
}

fn together(pods: &[&Measured]) -> anyhow::Result<Result> {
    match pods[0] {
        Measured::Training { workload, .. } => {
            let (mut rate, mut samples_rate) = (0.0, 0.0);
            let mut shares = Vec::new();
            let (mut waits, mut reads) = (Tail::default(), Tail::default());
            for pod in pods {
                let Measured::Training {
                    seconds, bytes, samples, utilisation, batch_wait, sample_read, ..
                } = pod
                else {
                    anyhow::bail!("the pods have measured different workloads")
                };
                rate += *bytes as f64 / seconds / 1e9;
                samples_rate += *samples as f64 / seconds;
                shares.extend(utilisation);
                waits = waits.or_worse(*batch_wait);
                reads = reads.or_worse(*sample_read);
            }
            Ok(Result::Training {
                workload: *workload,
                accelerators: shares.len(),
                gigabytes_per_second: rate,
                samples_per_second: samples_rate,
                utilisation_percent: 100.0 * shares.iter().sum::<f64>() / shares.len() as f64,
                utilisation_percent_min: 100.0 * shares.iter().copied().fold(f64::INFINITY, f64::min),
                batch_wait_ms: waits,
                sample_read_ms: reads,
            })
        }
        Measured::Checkpoint { rank_bytes, .. } => {
            let bytes = rank_bytes * pods.len() as u64;
            let (mut writes, mut reads) = (Vec::new(), Vec::new());
            for pod in pods {
                let Measured::Checkpoint { write_seconds, read_seconds, .. } = pod else {
                    anyhow::bail!("the pods have measured different workloads")
                };
                slowest(&mut writes, write_seconds);
                slowest(&mut reads, read_seconds);
            }
            let (write_seconds, read_seconds) = (median(writes), median(reads));
            Ok(Result::Checkpoint {
                workload: Workload::Checkpoint,
                bytes,
                write_seconds,
                write_gigabytes_per_second: bytes as f64 / write_seconds / 1e9,
                read_seconds,
                read_gigabytes_per_second: bytes as f64 / read_seconds / 1e9,
            })
        }
    }
}

/// Keeps the slower one of each round.
fn slowest(all: &mut Vec<f64>, pod: &[f64]) {
    all.resize(all.len().max(pod.len()), 0.0);
    for (kept, seconds) in all.iter_mut().zip(pod) {
        *kept = kept.max(*seconds);
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A table, and what it must not be mistaken for.
pub(super) fn render(results: &[Result], paint: Paint) -> String {
    let mut table = Table::new(&[
        "WORKLOAD",
        "GB/S",
        "UTILISATION",
        "LOWEST",
        "BATCH WAIT P50",
        "P99",
        "READ P50",
        "P99",
    ]);
    let milliseconds = |value: f64| format!("{value:.1} ms");
    for result in results {
        match result {
            Result::Training {
                workload,
                accelerators,
                gigabytes_per_second,
                utilisation_percent,
                utilisation_percent_min,
                batch_wait_ms,
                sample_read_ms,
                ..
            } => table.row(vec![
                format!("{} (accelerators: {accelerators})", workload.name()).into(),
                format!("{gigabytes_per_second:.2}").into(),
                format!("{utilisation_percent:.1} %").into(),
                format!("{utilisation_percent_min:.1} %").into(),
                milliseconds(batch_wait_ms.p50).into(),
                milliseconds(batch_wait_ms.p99).into(),
                milliseconds(sample_read_ms.p50).into(),
                milliseconds(sample_read_ms.p99).into(),
            ]),
            Result::Checkpoint {
                bytes,
                write_seconds,
                write_gigabytes_per_second,
                read_seconds,
                read_gigabytes_per_second,
                ..
            } => {
                let size = crate::quantity::bytes(i64::try_from(*bytes).unwrap_or(i64::MAX));
                for (what, seconds, rate) in [
                    ("written", write_seconds, write_gigabytes_per_second),
                    ("read", read_seconds, read_gigabytes_per_second),
                ] {
                    let name = format!("checkpoint, {size} {what} in {seconds:.2} s");
                    table.row(vec![name.into(), format!("{rate:.2}").into()]);
                }
            }
        }
    }
    format!(
        "{}\nAccelerators are simulated: computation is a sleep. Data that fits into the server's memory is read from there. This is \
         no MLPerf score.\n",
        table.render(paint)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn training(bytes: u64, utilisation: &[f64], p99: f64) -> Measured {
        Measured::Training {
            workload: Workload::Unet3d,
            seconds: 2.0,
            bytes,
            samples: 4,
            utilisation: utilisation.to_vec(),
            batch_wait: Tail { p50: 1.0, p99, max: p99 },
            sample_read: Tail::default(),
        }
    }

    fn checkpoint(write: [f64; 3], read: [f64; 3]) -> Measured {
        Measured::Checkpoint {
            rank_bytes: 1_000_000_000,
            write_seconds: write.into(),
            read_seconds: read.into(),
        }
    }

    #[test]
    fn rates_are_summed_and_the_slowest_pod_determines_checkpoint_time() {
        let pods = [
            vec![training(4_000_000_000, &[0.9, 0.7], 5.0), checkpoint([1.0, 2.0, 9.0], [1.0, 1.0, 1.0])],
            vec![training(2_000_000_000, &[1.0, 1.0], 8.0), checkpoint([3.0, 1.0, 1.0], [0.5, 0.5, 4.0])],
        ];
        let results = combine(&pods).expect("a result");
        let Result::Training {
            accelerators,
            gigabytes_per_second,
            utilisation_percent,
            utilisation_percent_min,
            batch_wait_ms,
            ..
        } = &results[0]
        else {
            panic!("{results:?}")
        };
        assert_eq!((*accelerators, *gigabytes_per_second, batch_wait_ms.p99), (4, 3.0, 8.0));
        assert!((utilisation_percent - 90.0).abs() < 1e-9 && (utilisation_percent_min - 70.0).abs() < 1e-9);
        let Result::Checkpoint { bytes, write_seconds, read_gigabytes_per_second, .. } = &results[1] else {
            panic!("{results:?}")
        };
        // Rounds of 3, 2 and 9 s; reading takes 1, 1 and 4 s.
        assert_eq!((*bytes, *write_seconds, *read_gigabytes_per_second), (2_000_000_000, 3.0, 2.0));
        let text = render(&results, Paint::new(false));
        assert!(
            text.contains("unet3d (accelerators: 4)") && text.contains("90.0 %") && text.contains("70.0 %"),
            "{text}"
        );
        assert!(text.contains("checkpoint, 1.8Gi written in 3.00 s"), "{text}");
    }

    #[test]
    fn mismatched_pod_results_and_logs_without_a_result_are_errors() {
        let (one, other) = (training(1, &[1.0], 1.0), checkpoint([1.0; 3], [1.0; 3]));
        assert!(combine(&[vec![one.clone()], vec![other.clone()]]).is_err());
        assert!(combine(&[vec![one.clone()], vec![one, other]]).is_err());
        assert!(combine(&[]).is_err());
        assert!(parse("unet3d: writing\n").is_err());
        assert!(parse("forebay-bench-result: [").is_err());
    }

    #[test]
    fn result_round_trips_through_the_pod_log() {
        let measured = vec![training(7, &[0.5], 2.0), checkpoint([1.0; 3], [2.0; 3])];
        let log = format!("checkpoint: round 1\n{MARK}{}\n", serde_json::to_string(&measured).expect("JSON"));
        assert_eq!(parse(&log).expect("a result"), measured);
    }

    #[test]
    fn percentiles_are_computed_from_unsorted_durations() {
        let tail = Tail::of((1..=200).rev().map(Duration::from_millis).collect());
        assert_eq!(tail, Tail { p50: 100.0, p99: 198.0, max: 200.0 });
        assert_eq!(Tail::of(vec![Duration::from_millis(3)]).p99, 3.0);
        assert_eq!(Tail::of(Vec::new()), Tail::default());
    }
}
