//! What is measured: the workload and its sizes.

use clap::ValueEnum;
use serde::Serialize;

use super::credits;

/// What the client does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Workload {
    /// READs, each connection from the beginning to the end of its files.
    Read,
    /// WRITEs in the same order, over what the files hold.
    Write,
    /// READs at random places of all files.
    #[value(name = "randread")]
    RandRead,
    /// WRITEs at random places of all files.
    #[value(name = "randwrite")]
    RandWrite,
    /// Open, read whole and close small files in random order.
    Retinanet,
    /// The same with large files: each is read with one READ at a time, `--depth` files at a time.
    Unet3d,
    /// Create and close an empty file, then open and remove it.
    Create,
    /// List a directory.
    List,
    /// Each connection writes a new file, flushes it and renames it over the one before.
    Checkpoint,
}

impl Workload {
    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Whether an operation is one READ or WRITE: what the floors answer.
    pub(crate) fn is_plain_io(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::RandRead | Self::RandWrite)
    }

    /// Whether the timed operations write.
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::RandWrite | Self::Checkpoint)
    }

    /// Files that are measured unless the command line says otherwise.
    pub(crate) fn default_files(self, connections: usize) -> usize {
        match self {
            Self::Read | Self::Write | Self::RandRead | Self::RandWrite => 8,
            Self::Retinanet => 256,
            Self::Unet3d => 4,
            Self::Create => 0,
            Self::List => 10_000,
            Self::Checkpoint => connections,
        }
    }

    /// Their size, likewise.
    pub(crate) fn default_file_bytes(self) -> u64 {
        match self {
            Self::Read | Self::Write | Self::RandRead | Self::RandWrite => 32 << 20,
            // The mean size of the samples of MLPerf Storage's RetinaNet.
            Self::Retinanet => 322_957,
            // The same of its 3D U-Net.
            Self::Unet3d => 146_600_628,
            Self::Create | Self::List => 0,
            Self::Checkpoint => 256 << 20,
        }
    }
}

/// All sizes of a measurement.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Plan {
    pub(crate) workload: Workload,
    pub(crate) io_bytes: usize,
    pub(crate) connections: usize,
    /// Connections of one session.
    pub(crate) channels: u8,
    pub(crate) depth: usize,
    pub(crate) seconds: f64,
    pub(crate) files: usize,
    pub(crate) file_bytes: u64,
    pub(crate) security: super::handshake::Security,
}

impl Plan {
    /// Credits that a connection is to have at hand: for everything in flight, and some to spare.
    pub(crate) fn credits(&self) -> u64 {
        self.depth as u64 * u64::from(credits::charge(self.io_bytes)) + 64
    }

    /// The name of a measured file.
    pub(crate) fn file_name(&self, number: usize) -> String {
        match self.workload {
            Workload::List => format!(r"{DIRECTORY}\entry-{number:06}"),
            Workload::Checkpoint => format!("{PREFIX}checkpoint-{number}"),
            _ => format!("{PREFIX}{number:06}"),
        }
    }

    /// The file number and the offset of block `block` of all files, counted through.
    pub(crate) fn place(&self, block: u64) -> (usize, u64) {
        let blocks = self.blocks();
        ((block / blocks) as usize, block % blocks * self.io_bytes as u64)
    }

    /// Whole blocks of a file.
    pub(crate) fn blocks(&self) -> u64 {
        self.file_bytes / self.io_bytes as u64
    }

    /// The pieces in which a file is read or written as a whole: offset and length.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let (size, io_bytes) = (self.file_bytes, self.io_bytes as u64);
        (0..size.div_ceil(io_bytes)).map(move |piece| {
            let offset = piece * io_bytes;
            (offset, io_bytes.min(size - offset) as usize)
        })
    }
}

/// Before the names of all files that are made.
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
            files: 3,
            file_bytes: 2500,
            security: super::super::handshake::Security::Plain,
        }
    }

    #[test]
    fn the_pieces_of_a_file_cover_it_and_its_blocks_are_whole() {
        let plan = plan(Workload::Read);
        assert_eq!(plan.pieces().collect::<Vec<_>>(), [(0, 1000), (1000, 1000), (2000, 500)]);
        assert_eq!(plan.blocks(), 2);
        assert_eq!(plan.place(3), (1, 1000));
    }

    #[test]
    fn the_credits_cover_the_depth() {
        let plan = Plan { io_bytes: 1 << 20, depth: 8, ..plan(Workload::Read) };
        assert!(plan.credits() >= 8 * 16);
    }
}
