//! The plan of a measurement: the workload and its sizes.

use std::fmt::Write;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::credits;
use super::handshake::Security;

/// What the client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// READs, each connection from the beginning to the end of its files.
    Read,
    /// WRITEs in the same order, over the existing contents of the files.
    Write,
    /// READs at random places of all files.
    #[value(name = "randread")]
    RandRead,
    /// WRITEs at random places of all files.
    #[value(name = "randwrite")]
    RandWrite,
    /// READs of 4 KiB up to `--io-size`, a few in sequence from a random place of large files: loading of tensors.
    Safetensors,
    /// Open, read whole and close small files in random order.
    Retinanet,
    /// The same with large files: each is read with one READ at a time, `--depth` files at a time.
    Unet3d,
    /// Create and close an empty file, then open and remove it.
    Create,
    /// Open a file for its attributes, query them, close it.
    Stat,
    /// List a directory.
    List,
    /// Each connection writes a new file, flushes it and renames it over the previous one.
    Checkpoint,
    /// READs at random places, while other connections write checkpoints in the middle third of the time.
    Mixed,
    /// Connect, negotiate, log on, connect to the share, read 4 KiB of a file, log off, disconnect.
    Sessions,
    /// Idle connections with a session and an open file: the memory that they use.
    Idle,
}

impl Workload {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether an operation is a single READ or WRITE, which the floors can answer.
    pub(crate) fn is_plain_io(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::RandRead | Self::RandWrite | Self::Safetensors)
    }

    /// Whether the timed operations write.
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::RandWrite | Self::Checkpoint)
    }

    /// The default number of files.
    pub(crate) fn default_files(self, connections: usize) -> usize {
        match self {
            Self::Read | Self::Write | Self::RandRead | Self::RandWrite => 8,
            Self::Safetensors => 4,
            Self::Retinanet => 256,
            Self::Unet3d => 4,
            Self::Create => 0,
            Self::Stat => 1000,
            Self::Mixed => 8,
            Self::Sessions | Self::Idle => 1,
            Self::List => 10_000,
            Self::Checkpoint => connections,
        }
    }

    /// The default size of files.
    pub(crate) fn default_file_bytes(self) -> u64 {
        match self {
            Self::Read | Self::Write | Self::RandRead | Self::RandWrite => 32 << 20,
            // The mean sample size of MLPerf Storage's RetinaNet.
            Self::Retinanet => 322_957,
            // The mean sample size of its 3D U-Net.
            Self::Unet3d => 146_600_628,
            Self::Safetensors => 128 << 20,
            Self::Create | Self::List | Self::Stat => 0,
            Self::Checkpoint => 256 << 20,
            Self::Mixed => 32 << 20,
            Self::Sessions | Self::Idle => SMALL_READ_BYTES as u64,
        }
    }

    /// The default bytes of a READ or WRITE.
    pub(crate) fn default_io_bytes(self) -> u64 {
        match self {
            Self::Safetensors => 128 << 10,
            Self::Mixed => 256 << 10,
            Self::Sessions | Self::Idle => SMALL_READ_BYTES as u64,
            _ => 1 << 20,
        }
    }
}

/// All sizes of a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) workload: Workload,
    pub(crate) io_bytes: usize,
    pub(crate) connections: usize,
    /// Number of connections in one session.
    pub(crate) channels: u8,
    pub(crate) depth: usize,
    pub(crate) seconds: f64,
    /// Number of operations after which a connection ends before the time is over. Not for checkpoints, mixed loads and
    /// sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) operations: Option<u64>,
    pub(crate) files: usize,
    pub(crate) file_bytes: u64,
    pub(crate) security: Security,
    /// Only for a mixed load.
    pub(crate) mix: Option<Mix>,
}

/// Additional parameters of a mixed load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Mix {
    /// Number of connections that write checkpoints.
    pub(crate) burst_connections: usize,
    /// Bytes of a checkpoint of one connection.
    pub(crate) checkpoint_bytes: u64,
    /// Bytes of one WRITE.
    pub(crate) write_bytes: usize,
    /// Seconds from the start of one cycle to the start of the next; the burst is the middle third.
    pub(crate) cycle_seconds: f64,
    /// Average lifetime of a connection in seconds before another replaces it.
    pub(crate) churn_seconds: Option<f64>,
    /// Whether to compare everything that is read.
    pub(crate) verify: bool,
}

impl Plan {
    /// A short description of the measurement.
    pub(crate) fn label(&self) -> String {
        let mut text = self.workload.name();
        if self.workload.is_plain_io() || self.workload == Workload::Mixed {
            let _ = write!(text, " {}", size(self.io_bytes as u64));
        }
        if self.workload == Workload::List {
            let _ = write!(text, " of {} names", self.files);
        }
        let plural = if self.connections == 1 { "" } else { "s" };
        let _ = write!(text, ", {} connection{plural}", self.connections);
        if self.depth > 1 && !matches!(self.workload, Workload::Sessions | Workload::Idle) {
            let _ = write!(text, ", depth {}", self.depth);
        }
        match self.security {
            Security::Plain => {}
            Security::Signed => text.push_str(", signed"),
            Security::Sealed => text.push_str(", sealed"),
        }
        text
    }

    /// Connections of the client: the measured ones and those for bursts.
    pub(crate) fn all_connections(&self) -> usize {
        self.connections + self.mix.as_ref().map_or(0, |mix| mix.burst_connections)
    }

    /// Bytes of the largest READ or WRITE.
    pub(crate) fn largest_io(&self) -> usize {
        self.mix.as_ref().map_or(0, |mix| mix.write_bytes).max(self.io_bytes)
    }

    /// Credits that a connection should have available: for everything in flight, plus some spare.
    pub(crate) fn credits(&self) -> u64 {
        self.depth as u64 * u64::from(credits::charge(self.largest_io())) + 64
    }

    /// The name of a measured file.
    pub(crate) fn file_name(&self, number: usize) -> String {
        match self.workload {
            Workload::List => format!(r"{DIRECTORY}\entry-{number:06}"),
            Workload::Checkpoint => checkpoint_name(number),
            _ => format!("{PREFIX}{number:06}"),
        }
    }

    /// The file number and offset of block `block`, counted across all files.
    pub(crate) fn place(&self, block: u64) -> (usize, u64) {
        let blocks = self.blocks();
        ((block / blocks) as usize, block % blocks * self.io_bytes as u64)
    }

    /// Whole blocks of a file.
    pub(crate) fn blocks(&self) -> u64 {
        self.file_bytes / self.io_bytes as u64
    }

    /// The pieces in which a complete file is read or written: offset and length.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        pieces(self.file_bytes, self.io_bytes)
    }
}

/// A size with the largest unit that yields an integer.
fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

/// The pieces of a file of `size` bytes.
pub(crate) fn pieces(size: u64, io_bytes: usize) -> impl Iterator<Item = (u64, usize)> + use<> {
    let io_bytes = io_bytes as u64;
    (0..size.div_ceil(io_bytes)).map(move |piece| {
        let offset = piece * io_bytes;
        (offset, io_bytes.min(size - offset) as usize)
    })
}

/// Bytes of the single READ of a short session.
pub(crate) const SMALL_READ_BYTES: usize = 4096;

/// Bytes of one WRITE of a burst.
pub(crate) const BURST_WRITE_BYTES: usize = 1 << 20;

/// Maximum number of seconds between two bursts of a mixed load.
pub(crate) const CYCLE_SECONDS_MAX: f64 = 30.0;

/// The name of one connection's checkpoint.
pub(crate) fn checkpoint_name(number: usize) -> String {
    format!("{PREFIX}checkpoint-{number}")
}

/// Prefix of the names of all files that are created.
pub(crate) const PREFIX: &str = "forebay-bench-";

/// The directory that is listed.
pub(crate) const DIRECTORY: &str = "forebay-bench-list";

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A plan with blocks of 1000 bytes in files of 2500.
    pub(crate) fn plan(workload: Workload) -> Plan {
        Plan {
            workload,
            io_bytes: 1000,
            connections: 2,
            channels: 1,
            depth: 4,
            seconds: 1.0,
            operations: None,
            files: 3,
            file_bytes: 2500,
            security: Security::Plain,
            mix: None,
        }
    }

    #[test]
    fn pieces_cover_the_file_and_blocks_are_whole() {
        let plan = plan(Workload::Read);
        assert_eq!(plan.pieces().collect::<Vec<_>>(), [(0, 1000), (1000, 1000), (2000, 500)]);
        assert_eq!(plan.blocks(), 2);
        assert_eq!(plan.place(3), (1, 1000));
    }

    #[test]
    fn label_lists_the_relevant_parameters() {
        let mut plan = Plan { io_bytes: 64 << 10, ..plan(Workload::RandRead) };
        assert_eq!(plan.label(), "randread 64 KiB, 2 connections, depth 4");
        (plan.workload, plan.security, plan.depth, plan.connections) =
            (Workload::Stat, Security::Sealed, 1, 1);
        assert_eq!(plan.label(), "stat, 1 connection, sealed");
    }

    #[test]
    fn credits_cover_the_depth() {
        let plan = Plan { io_bytes: 1 << 20, depth: 8, ..plan(Workload::Read) };
        assert!(plan.credits() >= 8 * 16);
    }
}
