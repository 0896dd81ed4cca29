//! The load of one pod, on a mounted volume. The pods of a Job meet through files on that volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};

use super::files::Buffer;
use super::outcome::{Measured, Tail};
use super::plan::Plan;

/// Threads that read the samples of one accelerator, as DLIO's configuration of the workloads has them.
const READERS: usize = 4;
/// Batches that are read ahead.
const BATCHES_AHEAD: u64 = 2;
/// Threads of a pod that write samples.
const WRITERS: u64 = 8;
/// For the slowest pod to start, and for the slowest to write its share of the samples.
const MEETING_DEADLINE: Duration = Duration::from_secs(3600);
/// The last meeting of a workload.
const END: &str = "end";
const MEETING_POLL: Duration = Duration::from_millis(20);

/// The place of a pod among all pods of a Job.
#[derive(Clone, Copy)]
pub(super) struct Pod {
    pub(super) index: u32,
    pub(super) of: u32,
}

/// Executes all plans on the volume at `folder`.
pub(super) fn run(plans: &[Plan], pod: Pod, folder: &Path) -> anyhow::Result<Vec<Measured>> {
    let mut measured = Vec::new();
    for (number, plan) in plans.iter().enumerate() {
        let name = plan.workload().name();
        let at = folder.join(format!("{number}-{name}"));
        fs::create_dir_all(&at).with_context(|| format!("make {}", at.display()))?;
        let meeting = Meeting { folder: at.clone(), pod };
        measured.push(match plan {
            Plan::Training { .. } => training(plan, &meeting)?,
            Plan::Checkpoint { rank_bytes, rounds } => checkpoints(*rank_bytes, *rounds, &meeting)?,
        });
        meeting.attend(END)?;
        if pod.index == 0 {
            fs::remove_dir_all(&at).with_context(|| format!("remove {}", at.display()))?;
        }
    }
    Ok(measured)
}

/// Where all pods wait for each other.
struct Meeting {
    folder: PathBuf,
    pod: Pod,
}

impl Meeting {
    /// Returns when all pods have come.
    fn attend(&self, name: &str) -> anyhow::Result<()> {
        let file = |index: u32| self.folder.join(format!("{name}.{index}"));
        fs::write(file(self.pod.index), "")
            .with_context(|| format!("make {}", file(self.pod.index).display()))?;
        let until = Instant::now() + MEETING_DEADLINE;
        let there = |path: &Path| path.try_exists().with_context(|| format!("look for {}", path.display()));
        for index in 0..self.pod.of {
            while !there(&file(index))? {
                // The first pod removes the folder as soon as it has seen all.
                if name == END && !there(&self.folder)? {
                    return Ok(());
                }
                if Instant::now() > until {
                    bail!("{name}: pod {index} has not come within {} s", MEETING_DEADLINE.as_secs());
                }
                std::thread::sleep(MEETING_POLL);
            }
        }
        Ok(())
    }
}

fn sample(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("sample-{number:07}"))
}

fn training(plan: &Plan, meeting: &Meeting) -> anyhow::Result<Measured> {
    let Plan::Training { workload, accelerators, samples, sample_bytes, batch, compute_micros, seconds } =
        *plan
    else {
        bail!("not a training workload")
    };
    let Pod { index, of } = meeting.pod;
    println!("{}: writing {samples} samples of {sample_bytes} bytes (pods: {of})", workload.name());
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                scope.spawn(move || {
                    let mut buffer = Buffer::new();
                    let first = u64::from(index) + writer * u64::from(of);
                    (first..samples).step_by((WRITERS * u64::from(of)) as usize).try_for_each(|number| {
                        buffer.write(&sample(&meeting.folder, number), number, sample_bytes)
                    })
                })
            })
            .collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("a writer"))
    })?;
    meeting.attend("written")?;
    println!("{}: training for {seconds} s (accelerators in each pod: {accelerators})", workload.name());
    let all = u64::from(accelerators) * u64::from(of);
    let started = Instant::now();
    let until = started + Duration::from_secs(seconds);
    let results: Vec<anyhow::Result<Accelerator>> = std::thread::scope(|scope| {
        let accelerators: Vec<_> = (0..u64::from(accelerators))
            .map(|number| {
                let order =
                    Order { samples, all, number: u64::from(index) * u64::from(accelerators) + number };
                let read = Samples { folder: &meeting.folder, order, sample_bytes };
                scope.spawn(move || train(&read, batch, Duration::from_micros(compute_micros), until))
            })
            .collect();
        accelerators.into_iter().map(|accelerator| accelerator.join().expect("an accelerator")).collect()
    });
    let seconds = started.elapsed().as_secs_f64();
    let results = results.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let batches: u64 = results.iter().map(|one| one.batches).sum();
    Ok(Measured::Training {
        workload,
        seconds,
        bytes: batches * batch * sample_bytes,
        samples: batches * batch,
        utilisation: results.iter().map(|one| one.busy.as_secs_f64() / one.total.as_secs_f64()).collect(),
        batch_wait: Tail::of(results.iter().flat_map(|one| one.waits.iter().copied()).collect()),
        sample_read: Tail::of(results.iter().flat_map(|one| one.reads.iter().copied()).collect()),
    })
}

/// The order of an accelerator's samples: in each epoch, all accelerators together read every sample once (but for a rest that
/// does not suffice for all of them), and each reads others than in the epoch before.
#[derive(Clone, Copy)]
struct Order {
    samples: u64,
    /// The number of accelerators.
    all: u64,
    /// The number of this one.
    number: u64,
}

impl Order {
    fn sample(&self, turn: u64) -> u64 {
        let each = (self.samples / self.all).max(1);
        let (epoch, turn) = (turn / each, turn % each);
        // A stride without a common divisor visits all samples once.
        let mut stride = (self.samples * 618 / 1000).max(1);
        while divisor(stride, self.samples) != 1 {
            stride += 1;
        }
        let place = u128::from(turn * self.all + self.number + epoch * 7919);
        (place * u128::from(stride) % u128::from(self.samples)) as u64
    }
}

fn divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { divisor(b, a % b) }
}

/// The samples of one accelerator.
struct Samples<'a> {
    folder: &'a Path,
    order: Order,
    sample_bytes: u64,
}

impl Samples<'_> {
    /// Reads sample after sample, in turns that `next` hands out, until the receiver is gone.
    fn load(&self, next: &AtomicU64, loaded: &SyncSender<Duration>) -> anyhow::Result<()> {
        let mut buffer = Buffer::new();
        loop {
            let number = self.order.sample(next.fetch_add(1, Ordering::Relaxed));
            let began = Instant::now();
            buffer.read(&sample(self.folder, number), number, self.sample_bytes)?;
            if loaded.send(began.elapsed()).is_err() {
                return Ok(());
            }
        }
    }
}

/// What an accelerator has done.
struct Accelerator {
    batches: u64,
    /// Time of computation.
    busy: Duration,
    /// Time of computation and of waiting for data.
    total: Duration,
    waits: Vec<Duration>,
    reads: Vec<Duration>,
}

/// Waits for a batch, computes (sleeps), and so on.
fn train(
    samples: &Samples<'_>,
    batch: u64,
    compute: Duration,
    until: Instant,
) -> anyhow::Result<Accelerator> {
    let next = AtomicU64::new(0);
    let (sender, receiver) = sync_channel((batch * BATCHES_AHEAD) as usize);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                let (sender, next) = (sender.clone(), &next);
                scope.spawn(move || samples.load(next, &sender))
            })
            .collect();
        drop(sender);
        let done = consume(receiver, batch, compute, until);
        readers.into_iter().try_for_each(|reader| reader.join().expect("a reader"))?;
        ensure!(
            done.batches > 0,
            "not one batch was read in time: measure for longer (--seconds), or lower --scale"
        );
        Ok(done)
    })
}

fn consume(receiver: Receiver<Duration>, batch: u64, compute: Duration, until: Instant) -> Accelerator {
    let began = Instant::now();
    let mut done = Accelerator {
        batches: 0,
        busy: Duration::ZERO,
        total: Duration::ZERO,
        waits: Vec::new(),
        reads: Vec::new(),
    };
    while Instant::now() < until {
        let waiting = Instant::now();
        for _ in 0..batch {
            // The readers end early only because of an error, which they return.
            let Ok(read) = receiver.recv() else { return done };
            done.reads.push(read);
        }
        done.waits.push(waiting.elapsed());
        std::thread::sleep(compute);
        done.busy += compute;
        done.batches += 1;
        done.total = began.elapsed();
    }
    done
}

fn checkpoints(rank_bytes: u64, rounds: u32, meeting: &Meeting) -> anyhow::Result<Measured> {
    let Pod { index, of } = meeting.pod;
    let file = |round: u32, rank: u32| meeting.folder.join(format!("checkpoint-{round}.{rank}"));
    let number = |round: u32, rank: u32| u64::from(round) << 32 | u64::from(rank);
    let mut buffer = Buffer::new();
    let (mut write_seconds, mut read_seconds) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        meeting.attend(&format!("write-{round}"))?;
        println!("checkpoint: round {} of {rounds}, {rank_bytes} bytes in each pod (pods: {of})", round + 1);
        let began = Instant::now();
        let new = meeting.folder.join(format!("new.{index}"));
        buffer.write(&new, number(round, index), rank_bytes)?;
        fs::rename(&new, file(round, index)).context("rename the checkpoint")?;
        write_seconds.push(began.elapsed().as_secs_f64());

        meeting.attend(&format!("read-{round}"))?;
        let other = (index + 1) % of;
        let began = Instant::now();
        buffer.read(&file(round, other), number(round, other), rank_bytes)?;
        read_seconds.push(began.elapsed().as_secs_f64());

        meeting.attend(&format!("done-{round}"))?;
        fs::remove_file(file(round, index)).context("remove the checkpoint")?;
    }
    Ok(Measured::Checkpoint { rank_bytes, write_seconds, read_seconds })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::Workload;

    #[test]
    fn each_epoch_reads_every_sample_once_in_a_different_order() {
        let (samples, all) = (60, 4);
        let epoch = |epoch: u64, number: u64| -> Vec<u64> {
            let order = Order { samples, all, number };
            (epoch * 15..(epoch + 1) * 15).map(|turn| order.sample(turn)).collect()
        };
        for number in 0..3 {
            let mut read: Vec<u64> = (0..all).flat_map(|accelerator| epoch(number, accelerator)).collect();
            read.sort_unstable();
            assert_eq!(read, (0..samples).collect::<Vec<_>>());
        }
        assert_ne!(epoch(0, 1), epoch(1, 1));
        // More accelerators than samples: each reads something.
        assert!(Order { samples: 2, all: 4, number: 3 }.sample(5) < 2);
    }

    #[test]
    fn two_pods_run_training_and_checkpoint_and_remove_their_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let plans = [
            Plan::Training {
                workload: Workload::Retinanet,
                accelerators: 2,
                samples: 40,
                sample_bytes: 3_001,
                batch: 3,
                compute_micros: 2_000,
                seconds: 1,
            },
            Plan::Checkpoint { rank_bytes: 1_500_000, rounds: 2 },
        ];
        let pods: Vec<Vec<Measured>> = std::thread::scope(|scope| {
            let run = |index| run(&plans, Pod { index, of: 2 }, folder.path()).expect("measured");
            let pods: Vec<_> = (0..2).map(|index| scope.spawn(move || run(index))).collect();
            pods.into_iter().map(|pod| pod.join().expect("a pod")).collect()
        });
        for pod in &pods {
            let [
                Measured::Training { bytes, samples, utilisation, .. },
                Measured::Checkpoint { write_seconds, read_seconds, .. },
            ] = &pod[..]
            else {
                panic!("{pod:?}")
            };
            assert_eq!(*bytes, samples * 3_001);
            assert!(*samples >= 6 && samples % 3 == 0);
            assert!(utilisation.len() == 2 && utilisation.iter().all(|share| *share > 0.0 && *share <= 1.0));
            assert!(write_seconds.len() == 2 && read_seconds.len() == 2);
        }
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "everything is removed");
    }

    #[test]
    fn mismatched_data_fails_the_measurement() {
        let folder = tempfile::tempdir().expect("a folder");
        let order = Order { samples: 2, all: 1, number: 0 };
        let mut buffer = Buffer::new();
        for number in 0..2 {
            // The first sample has the second one's contents.
            buffer.write(&sample(folder.path(), number), 1, 100).expect("written");
        }
        let samples = Samples { folder: folder.path(), order, sample_bytes: 100 };
        let until = Instant::now() + Duration::from_secs(60);
        let error = train(&samples, 1, Duration::from_millis(1), until).err().expect("an error").to_string();
        assert!(error.contains("is not what was written"), "{error}");
    }
}
