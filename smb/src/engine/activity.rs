//! Operations, bytes and time that the clients of one volume cause.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::wire::Command;

/// Kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// READ.
    Read,
    /// WRITE.
    Write,
    /// FLUSH.
    Flush,
    /// All other operations on files and directories.
    Metadata,
}

impl Work {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Flush, Self::Metadata];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Metadata => "metadata",
        }
    }

    /// `None` for commands that are not about files, and for commands that wait for another client rather than for the
    /// server.
    fn of(command: Command) -> Option<Self> {
        match command {
            Command::READ => Some(Self::Read),
            Command::WRITE => Some(Self::Write),
            Command::FLUSH => Some(Self::Flush),
            Command::CREATE
            | Command::CLOSE
            | Command::IOCTL
            | Command::QUERY_DIRECTORY
            | Command::QUERY_INFO
            | Command::SET_INFO => Some(Self::Metadata),
            _ => None,
        }
    }
}

/// Completed work of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Operations, failed ones included.
    pub operations: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// Time from the arrival of each request to its response, summed.
    pub duration: Duration,
}

/// Counters of one volume since the server started to serve it.
#[derive(Debug, Default)]
pub struct Activity([Counts; Work::ALL.len()]);

#[derive(Debug, Default)]
struct Counts {
    operations: AtomicU64,
    bytes: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Activity {
    /// Counts a request that was answered after `took`.
    pub fn completed(&self, command: Command, bytes: u32, took: Duration) {
        let Some(work) = Work::of(command) else { return };
        let counts = &self.0[work as usize];
        counts.operations.fetch_add(1, Ordering::Relaxed);
        if bytes > 0 && matches!(work, Work::Read | Work::Write) {
            counts.bytes.fetch_add(bytes.into(), Ordering::Relaxed);
        }
        counts.nanoseconds.fetch_add(took.as_nanos().try_into().unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the work completed so far.
    #[must_use]
    pub fn done(&self, work: Work) -> Done {
        let Counts { operations, bytes, nanoseconds } = &self.0[work as usize];
        Done {
            operations: operations.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
            duration: Duration::from_nanos(nanoseconds.load(Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_by_kind_excluding_lock_and_notify() {
        let activity = Activity::default();
        let took = Duration::from_micros(3);
        for (command, bytes) in [
            (Command::READ, 4096),
            (Command::READ, 0),
            (Command::WRITE, 100),
            (Command::FLUSH, 0),
            (Command::CREATE, 0),
            (Command::QUERY_DIRECTORY, 500),
            (Command::CHANGE_NOTIFY, 0),
            (Command::LOCK, 0),
            (Command::ECHO, 0),
        ] {
            activity.completed(command, bytes, took);
        }
        let done = Work::ALL.map(|work| activity.done(work));
        let expected = [(2, 4096), (1, 100), (1, 0), (2, 0)].map(|(operations, bytes)| Done {
            operations,
            bytes,
            duration: took * operations as u32,
        });
        assert_eq!(done, expected);
    }
}
