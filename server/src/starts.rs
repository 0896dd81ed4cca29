//! Earlier starts of servers, recorded in a pool (`.forebay/starts`): the starts that issued handles which clients may still
//! use, and whether what they acknowledged is on stable storage.

use std::io;
use std::path::{Path, PathBuf};

use forebay_smb::engine::Predecessor;

use crate::backend::directory::Promise;
use crate::limits::{PREDECESSORS_MAX, STARTS_SLOT_BYTES};
use crate::slots::{self, Content};

/// Replaces the boot id of a start: data that this start acknowledged may be lost.
const NOT_DURABLE: &str = "-";
/// Replaces the boot id of a start: data that this start acknowledged is on stable storage.
const SETTLED: &str = "+";
/// First line of a list of starts that must not be relied on: the server that wrote it was about to ask the kernel about
/// them.
const ASKING: &str = "asking";

/// Changes with each boot of the machine.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The id of this boot.
fn boot() -> io::Result<String> {
    Ok(std::fs::read_to_string(BOOT_ID)?.trim().to_owned())
}

/// The list of one pool.
#[derive(Debug)]
pub(crate) struct Starts {
    path: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Start {
    instance: u64,
    /// A boot id, or one of the markers above.
    of: String,
}

fn parse(text: &str) -> Vec<Start> {
    let asking = text.lines().next() == Some(ASKING);
    let start = |line: &str| {
        let (number, of) = line.split_once(' ')?;
        let instance = u64::from_str_radix(number, 16).ok()?;
        Some(Start { instance, of: if asking { NOT_DURABLE } else { of }.to_owned() })
    };
    let mut found: Vec<Start> = text.lines().filter_map(start).collect();
    found.drain(..found.len().saturating_sub(PREDECESSORS_MAX));
    found
}

fn print(starts: &[Start]) -> String {
    starts.iter().map(|start| format!("{:016x} {}\n", start.instance, start.of)).collect()
}

impl Starts {
    pub(crate) fn of(pool: &Path) -> Self {
        Self { path: pool.join(".forebay/starts") }
    }

    fn read(&self) -> io::Result<Vec<Start>> {
        Ok(match slots::read(&self.path, STARTS_SLOT_BYTES)? {
            Content::Record(bytes) | Content::Plain(bytes) => parse(&String::from_utf8_lossy(&bytes)),
            Content::Missing | Content::Damaged => Vec::new(),
        })
    }

    /// A list from a version before slots cannot be overwritten on a full file system. It must not be trusted either, so it
    /// is removed, which takes no space.
    fn write(&self, text: &str) -> io::Result<()> {
        let Err(error) = slots::write(&self.path, STARTS_SLOT_BYTES, text.as_bytes()) else { return Ok(()) };
        tracing::warn!(path = %self.path.display(), %error, "the list of starts could not be written: it is removed");
        std::fs::remove_file(&self.path)
    }

    fn rewrite(&self, now: impl Fn(&str) -> String) -> io::Result<()> {
        let mut starts = self.read()?;
        if starts.is_empty() {
            return Ok(());
        }
        starts.iter_mut().for_each(|start| start.of = now(&start.of));
        self.write(&print(&starts))
    }

    /// Records that what earlier starts acknowledged may be lost although the machine has not rebooted: the pool's file
    /// system was shut down without writing its dirty data, or another machine had it in the meantime.
    pub(crate) fn distrust(&self) -> io::Result<()> {
        self.rewrite(|of| if of == SETTLED { SETTLED } else { NOT_DURABLE }.to_owned())
    }

    /// Records that everything acknowledged by the starts of this boot is on stable storage, regardless of which server
    /// serves the pool next, and on which machine. Called at an orderly shutdown, when nothing is acknowledged any more. The
    /// caller has synced.
    pub(crate) fn settle(&self) -> io::Result<()> {
        let boot = boot()?;
        self.rewrite(|of| if of == boot { SETTLED } else { of }.to_owned())
    }

    /// Puts on stable storage, by `sync`, what earlier starts acknowledged, and returns those starts. Records `instance`,
    /// the current start, for later starts.
    pub(crate) fn begin(
        &self,
        instance: u64,
        promise: Promise,
        sync: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<Vec<Predecessor>> {
        let boot = boot()?;
        let mut starts = self.read()?;
        // The kernel reports a failed write-back once. A server that is killed after the report and before recording it
        // below must not leave a list that the next start would rely on.
        if starts.iter().any(|start| start.of != NOT_DURABLE) {
            self.write(&format!("{ASKING}\n{}", print(&starts)))?;
        }
        let synced = sync();
        if let Err(error) = &synced {
            tracing::error!(%error, path = %self.path.display(), "what earlier servers wrote could not be put on stable storage");
        }
        for start in &mut starts {
            let durable = synced.is_ok() && (start.of == boot || start.of == SETTLED);
            start.of = if durable { SETTLED } else { NOT_DURABLE }.to_owned();
        }
        let found =
            starts.iter().map(|start| Predecessor { instance: start.instance, durable: start.of == SETTLED });
        let found = found.collect();
        // Data that is written through is on stable storage when it is acknowledged, regardless of which server serves the
        // pool next, and on which machine.
        let of = if promise == Promise::AtReply { SETTLED.to_owned() } else { boot };
        starts.push(Start { instance, of });
        if let Err(error) = self.write(&print(&starts)) {
            // The next start then reports the handles of this start as closed to its clients.
            tracing::warn!(path = %self.path.display(), %error, "this start could not be noted");
        }
        Ok(found)
    }
}

const _: () = assert!((PREDECESSORS_MAX + 1) * 54 + 64 <= STARTS_SLOT_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch_disk::Disk;

    fn pool() -> tempfile::TempDir {
        let scratch = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(scratch.path().join(".forebay")).expect("made");
        scratch
    }

    fn lost(instance: u64) -> Predecessor {
        Predecessor { instance, durable: false }
    }

    fn durable(instance: u64) -> Predecessor {
        Predecessor { instance, durable: true }
    }

    fn begin(starts: &Starts, instance: u64) -> Vec<Predecessor> {
        starts.begin(instance, Promise::AtFlush, || Ok(())).expect("noted")
    }

    #[test]
    fn start_trusts_only_earlier_starts_with_durable_writes() {
        let pool = pool();
        let starts = Starts::of(pool.path());
        assert_eq!(begin(&starts, 1), []);
        assert_eq!(begin(&starts, 2), [durable(1)]);
        let failed = starts.begin(3, Promise::AtFlush, || Err(io::ErrorKind::Other.into())).expect("noted");
        // The starts stay in the list.
        assert_eq!(failed, [lost(1), lost(2)]);
        // The kernel reports the failure once: this start's syncfs succeeds again.
        assert_eq!(begin(&starts, 4), [lost(1), lost(2), durable(3)]);
        // Killed after the kernel's report and before recording it.
        let killed = || starts.begin(5, Promise::AtFlush, || panic!("killed"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(killed)).is_err());
        assert_eq!(begin(&starts, 6), [1, 2, 3, 4].map(lost));
        assert_eq!(begin(&starts, 7).last(), Some(&durable(6)));
    }

    #[test]
    fn starts_before_a_shutdown_of_the_file_system_are_not_trusted() {
        let pool = pool();
        let starts = Starts::of(pool.path());
        starts.distrust().expect("there are none");
        begin(&starts, 1);
        starts.distrust().expect("noted");
        assert_eq!(begin(&starts, 2), [lost(1)]);
    }

    #[test]
    fn cleanly_ended_starts_are_trusted_on_another_machine() {
        let pool = pool();
        let starts = Starts::of(pool.path());
        begin(&starts, 1);
        starts.distrust().expect("noted");
        begin(&starts, 2);
        starts.settle().expect("noted");
        // Another machine mounts it.
        starts.distrust().expect("noted");
        assert_eq!(begin(&starts, 3), [lost(1), durable(2)]);
    }

    #[test]
    fn killed_write_through_starts_are_trusted_on_another_machine() {
        let pool = pool();
        let starts = Starts::of(pool.path());
        for instance in 1..=3 {
            let found = starts.begin(instance, Promise::AtReply, || Ok(())).expect("noted");
            assert_eq!(found, (1..instance).map(durable).collect::<Vec<_>>());
            // Killed; another machine mounts it.
            starts.distrust().expect("noted");
        }
    }

    #[test]
    fn lists_of_earlier_versions_are_read_and_earlier_boots_not_trusted() {
        let pool = pool();
        let starts = Starts::of(pool.path());
        let earlier = "00000000000000a1 7f5c2d5e-0000-4000-8000-000000000000\n00000000000000a2 +\n";
        std::fs::write(&starts.path, earlier).expect("written");
        assert_eq!(begin(&starts, 3), [lost(0xa1), durable(0xa2)]);
        assert_eq!(begin(&starts, 4), [lost(0xa1), durable(0xa2), durable(3)]);
    }

    #[test]
    fn list_holds_the_maximum_number_of_predecessors() {
        let pool = pool();
        let starts = Starts::of(pool.path());
        for instance in 1..=2 * PREDECESSORS_MAX as u64 {
            begin(&starts, u64::MAX - instance);
        }
        assert_eq!(begin(&starts, 7).len(), PREDECESSORS_MAX);
    }

    fn full(list: Option<&str>) -> Option<(Disk, Starts)> {
        let disk = Disk::new("starts_are_recorded_on_a_full_file_system")?;
        std::fs::create_dir(disk.path().join(".forebay")).expect("made");
        let starts = Starts::of(&disk.path());
        match list {
            Some(list) => std::fs::write(&starts.path, list).expect("written"),
            None => drop(begin(&starts, 1)),
        }
        disk.fill();
        Some((disk, starts))
    }

    /// Takeover of a pool that its volumes have filled.
    #[test]
    fn starts_are_recorded_on_a_full_file_system() {
        let Some((_disk, starts)) = full(None) else { return };
        starts.distrust().expect("it takes no space");
        assert_eq!(begin(&starts, 2), [lost(1)]);
        assert_eq!(begin(&starts, 3), [lost(1), durable(2)]);
        // A list in the format of an earlier version: it is not trusted in the end, and does not keep the server from
        // starting.
        let Some((disk, starts)) = full(Some("00000000000000a1 7f5c2d5e-0000-4000-8000-000000000000\n"))
        else {
            return;
        };
        starts.distrust().expect("it can be removed");
        begin(&starts, 4);
        disk.lose_power();
        assert!(begin(&starts, 5).iter().all(|start| start.instance != 0xa1 || !start.durable));
    }
}
