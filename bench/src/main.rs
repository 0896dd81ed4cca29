//! Side-by-side runs of this server and Samba: same machine, same file system, same client, alternating.

mod bare;
mod cpu;
mod forebay;
mod instructions;
mod load;
mod machine;
mod memory;
mod place;
mod plot;
mod read;
mod report;
mod samba;
mod suite;
mod syscalls;
mod torture;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// Compares Forebay's server with Samba, on the same machine, the same file system and with the same client.
///
/// The client is Samba's own smbtorture from the lab's cached root file system (`forebay-lab prepare` makes it), so
/// this needs root, as the lab's root-exec does.
#[derive(Parser)]
#[command(name = "forebay-bench", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Large reads from the page cache: GB/s, and CPU-seconds of the server per GB.
    Read(ReadArguments),
    /// Load from our own client: reads, writes, whole files, metadata; GB/s, operations/s, latency, CPU time, memory.
    Load(load::LoadArguments),
    /// Every workload that has a target, compared with Samba and floors: results, plots, and a table of ratios and targets.
    Suite(suite::SuiteArguments),
    /// Draw results of `load --json` or `suite` as SVG.
    Plot(plot::PlotArguments),
    /// Instructions of the codec and the protocol core per operation, counted by callgrind and compared with recorded counts.
    ///
    /// Needs valgrind, and a release build of the whole workspace, as built by ./test.
    Instructions(instructions::InstructionsArguments),
    /// System calls of the server per operation, by name, and how often it waits for a lock.
    ///
    /// Needs root, and perf (package linux-perf) or strace.
    Syscalls(syscalls::SyscallsArguments),
    /// The program that `instructions` measures.
    #[command(hide = true)]
    CountedWork {
        /// The operation.
        operation: instructions::Operation,
        /// Number of times.
        count: u64,
    },
    /// A floor of the load, in a separate process so that its CPU time is counted separately.
    #[command(hide = true)]
    FloorServer {
        /// Which operation it answers, and how.
        #[arg(long)]
        means: load::Means,
        /// The usual payload.
        #[arg(long)]
        io_bytes: usize,
        /// How many files it serves.
        #[arg(long)]
        files: usize,
        /// The folder of the files.
        #[arg(long)]
        folder: PathBuf,
    },
    /// The server of the bare loops, in a separate process so that its CPU time is counted separately.
    #[command(hide = true)]
    BareServer {
        /// How to send.
        #[arg(long)]
        means: bare::Means,
        /// Bytes per answer.
        #[arg(long)]
        io_bytes: u64,
        /// The file to send from.
        #[arg(long)]
        file: PathBuf,
    },
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contestant {
    /// forebay-server.
    Forebay,
    /// Samba with default settings: asynchronous reads in its thread pool, then a send.
    Samba,
    /// Samba with `use sendfile = yes`.
    SambaSendfile,
    /// Samba with its io_uring module.
    SambaUring,
    /// No SMB at all: sendfile over loopback TCP, the lower bound of the cost of serving these bytes.
    BareSendfile,
    /// No SMB at all: read into one buffer and send, over loopback TCP.
    BareRead,
}

impl Contestant {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forebay => "forebay",
            Self::Samba => "samba",
            Self::SambaSendfile => "samba-sendfile",
            Self::SambaUring => "samba-uring",
            Self::BareSendfile => "bare-sendfile",
            Self::BareRead => "bare-read",
        }
    }

    /// Whether the parity that `--require-parity` asks for is measured against this one.
    pub(crate) fn is_samba(self) -> bool {
        matches!(self, Self::Samba | Self::SambaSendfile | Self::SambaUring)
    }
}

/// What all measurements have in common.
#[derive(Args)]
pub(crate) struct CommonArguments {
    /// The forebay-server binary; a release build.
    #[arg(long, value_name = "FILE", default_value_os_t = forebay::default_binary())]
    server: PathBuf,
    /// TOML lines for the `[server]` section of forebay-server's configuration, to compare settings.
    #[arg(long, value_name = "TOML", default_value = "")]
    server_option: String,
    /// Folder of the files to read; they stay in the page cache.
    #[arg(long, value_name = "FOLDER", default_value = "/var/tmp")]
    dir: PathBuf,
    /// Priority of both servers and client, as in nice(1): below 0, other work on a busy machine does not disturb the
    /// measurement.
    #[arg(long, default_value_t = 0, allow_hyphen_values = true, value_parser = clap::value_parser!(i32).range(-20..=19))]
    nice: i32,
    /// Also write all results here, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct ReadArguments {
    /// Number of runs of each server; the servers take turns.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Bytes per READ; K and M are powers of two.
    #[arg(long, default_value = "1M", value_parser = parse_bytes)]
    io_size: u64,
    /// Connections of the client, each with its own session.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    connections: u32,
    /// READs in flight on each connection.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    depth: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    time: u32,
    /// Servers to measure, in this order.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "samba,samba-sendfile,samba-uring,forebay,bare-sendfile,bare-read"
    )]
    servers: Vec<Contestant>,
    #[command(flatten)]
    common: CommonArguments,
    /// Exit with status 1 if Forebay's median GB/s is below that of any measured Samba, or its CPU time per GB is above.
    #[arg(long)]
    require_parity: bool,
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
    match bytes {
        Some(bytes @ 1..=8_388_608) => Ok(bytes),
        _ => Err("a size of 1 byte to 8M, such as 65536, 64K or 1M".to_owned()),
    }
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Read(arguments) => read::run(&arguments),
        Command::Load(arguments) => load::run(&arguments),
        Command::Suite(arguments) => suite::run(&arguments),
        Command::Plot(arguments) => plot::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Instructions(arguments) => instructions::run(&arguments),
        Command::Syscalls(arguments) => syscalls::run(&arguments),
        Command::CountedWork { operation, count } => {
            instructions::work(operation, count).map(|()| ExitCode::SUCCESS)
        }
        Command::FloorServer { means, io_bytes, files, folder } => {
            load::serve_floor(means, io_bytes, &folder, files).map(|()| ExitCode::SUCCESS)
        }
        Command::BareServer { means, io_bytes, file } => {
            bare::serve(means, io_bytes, &file).map(|()| ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("forebay-bench: {error:#}");
        ExitCode::from(2)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_units_and_bounded() {
        assert_eq!(parse_bytes("1M"), Ok(1 << 20));
        assert_eq!(parse_bytes("64k"), Ok(64 << 10));
        assert_eq!(parse_bytes("512"), Ok(512));
        for wrong in ["", "0", "M", "9M", "-1", "1G", "99999999999999999999M"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}
