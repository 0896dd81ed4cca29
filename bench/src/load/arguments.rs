//! The command line of `forebay-bench load`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use forebay_smb::limits::IO_BYTES_MAX;

use super::Setup;
use super::floor::Means;
use super::handshake::{Account, Security};
use super::plan::{BURST_WRITE_BYTES, CYCLE_SECONDS_MAX, Mix, Plan, SMALL_READ_BYTES, Workload};
use super::target::Target;
use crate::CommonArguments;

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contender {
    /// forebay-server.
    Forebay,
    /// The same, for `mixed` only: checkpoints are written to a volume with low priority and a limit of 512 MiB/s.
    ForebayLimited,
    /// Samba with default settings.
    Samba,
    /// Samba with `use sendfile = yes`.
    SambaSendfile,
    /// Samba with its io_uring module.
    SambaUring,
    /// READs answered with sendfile and a prepared header.
    FloorSendfile,
    /// READs answered with pread, a prepared header and send.
    FloorRead,
    /// WRITEs answered after recv and pwrite.
    FloorWrite,
}

impl Contender {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forebay => "forebay",
            Self::ForebayLimited => "forebay-limited",
            Self::Samba => "samba",
            Self::SambaSendfile => "samba-sendfile",
            Self::SambaUring => "samba-uring",
            Self::FloorSendfile => "floor-sendfile",
            Self::FloorRead => "floor-read",
            Self::FloorWrite => "floor-write",
        }
    }

    /// Samba's additional configuration, if it is a Samba.
    pub(crate) fn samba_option(self) -> Option<&'static str> {
        match self {
            Self::Samba => Some(""),
            Self::SambaSendfile => Some("use sendfile = yes"),
            Self::SambaUring => Some("vfs objects = io_uring"),
            _ => None,
        }
    }

    /// The purpose of the floor, if it is one.
    pub(crate) fn means(self) -> Option<Means> {
        match self {
            Self::FloorSendfile => Some(Means::Sendfile),
            Self::FloorRead => Some(Means::Read),
            Self::FloorWrite => Some(Means::Write),
            _ => None,
        }
    }

    /// Whether it is measured in a workload.
    pub(crate) fn serves(self, workload: Workload) -> bool {
        if self == Self::ForebayLimited {
            return workload == Workload::Mixed;
        }
        self.means()
            .is_none_or(|means| workload.is_plain_io() && workload.writes() == (means == Means::Write))
    }
}

#[derive(Args)]
pub(crate) struct LoadArguments {
    /// What the client does.
    #[arg(long, value_enum)]
    workload: Workload,
    /// Number of runs of each server; the servers take turns.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) runs: u32,
    /// Bytes per READ or WRITE, up to 8M; K and M are powers of two. 1M unless the workload uses smaller ones.
    #[arg(long, value_parser = parse_size)]
    io_size: Option<u64>,
    /// Connections of the client, each with a thread.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,
    /// Connections per session (multichannel); 1: a session per connection.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    channels: u8,
    /// Operations in flight on each connection.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=512))]
    depth: u32,
    /// Seconds of each run.
    #[arg(long, default_value_t = 5.0, value_parser = parse_seconds)]
    time: f64,
    /// Files on each server; the default depends on the workload.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    files: Option<u32>,
    /// Bytes of each file; the default depends on the workload. K, M and G are powers of two.
    #[arg(long, value_parser = parse_size)]
    file_size: Option<u64>,
    /// mixed: connections that write checkpoints, in addition to --connections.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=1024))]
    burst: u32,
    /// mixed: bytes of the checkpoint of one connection.
    #[arg(long, default_value = "64M", value_parser = parse_size)]
    checkpoint_size: u64,
    /// mixed: replace each connection after this many seconds on average, and verify all data that is read (a soak test).
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    churn: Option<f64>,
    /// mixed: compare all data that is read with the data written. The client then uses several times as much CPU time.
    #[arg(long)]
    verify: bool,
    /// Servers to measure, in this order. Servers that do not support the workload are left out.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "samba,samba-sendfile,samba-uring,forebay,floor-sendfile,floor-read,floor-write"
    )]
    pub(crate) servers: Vec<Contender>,
    /// A second forebay-server binary, measured as forebay-other: for example of an earlier commit, to measure the effect of
    /// a change.
    #[arg(long, value_name = "FILE")]
    pub(crate) other: Option<PathBuf>,
    /// Sign all requests; the client does not verify the signatures of responses.
    #[arg(long, conflicts_with = "seal")]
    sign: bool,
    /// Seal all messages with AES-128-GCM.
    #[arg(long)]
    seal: bool,
    /// Remove the files from the page cache before each run; no effect on tmpfs.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Measure a server that is already running instead.
    #[arg(long, value_name = "HOST:PORT", requires_all = ["user", "password_file"], conflicts_with_all = ["servers", "other", "cold"])]
    pub(crate) against: Option<String>,
    /// The user on that server.
    #[arg(long, requires = "against")]
    user: Option<String>,
    /// A file with the user's password.
    #[arg(long, value_name = "FILE", requires = "against")]
    password_file: Option<PathBuf>,
    /// The share on that server; files named forebay-bench-… are created on it and removed.
    #[arg(long, default_value = crate::place::SHARE)]
    share: String,
    #[command(flatten)]
    pub(crate) common: CommonArguments,
}

impl LoadArguments {
    /// The plan, with defaults filled in.
    pub(crate) fn plan(&self) -> Result<Plan> {
        let workload = self.workload;
        let io_size = self.io_size.unwrap_or_else(|| workload.default_io_bytes());
        ensure!(io_size <= IO_BYTES_MAX.into(), "--io-size is 8M at most");
        let connections = self.connections as usize;
        let files = match (self.files, workload) {
            // `--files` does not apply: checkpoint has one file per connection, and create has none.
            (_, Workload::Checkpoint | Workload::Create) | (None, _) => workload.default_files(connections),
            (Some(files), _) => files as usize,
        };
        let file_bytes = match workload {
            Workload::Create | Workload::List => 0,
            _ => self.file_size.unwrap_or_else(|| workload.default_file_bytes()),
        };
        let needs_whole_blocks = workload.is_plain_io() || workload == Workload::Mixed;
        ensure!(!needs_whole_blocks || file_bytes >= io_size, "--file-size must be at least --io-size");
        let reads_small = matches!(workload, Workload::Sessions | Workload::Idle);
        ensure!(
            !reads_small || file_bytes >= SMALL_READ_BYTES as u64,
            "--file-size must be at least {SMALL_READ_BYTES} B"
        );
        ensure!(
            self.churn.is_none() || self.channels == 1,
            "--churn replaces sessions: it needs --channels 1"
        );
        Ok(Plan {
            workload,
            io_bytes: usize::try_from(io_size)?,
            connections,
            channels: self.channels,
            depth: self.depth as usize,
            seconds: self.time,
            operations: None,
            files,
            file_bytes,
            security: self.security(),
            mix: (workload == Workload::Mixed).then(|| Mix {
                burst_connections: self.burst as usize,
                checkpoint_bytes: self.checkpoint_size,
                write_bytes: BURST_WRITE_BYTES,
                cycle_seconds: self.time / (self.time / CYCLE_SECONDS_MAX).ceil(),
                churn_seconds: self.churn,
                verify: self.verify || self.churn.is_some(),
            }),
        })
    }

    /// How to measure the plan, and on which servers.
    pub(crate) fn setup(&self) -> Setup<'_> {
        Setup {
            runs: self.runs,
            servers: &self.servers,
            binary: &self.common.server,
            other: self.other.as_deref(),
            server_option: &self.common.server_option,
            dir: &self.common.dir,
            cold: self.cold,
        }
    }

    /// How to protect messages.
    pub(crate) fn security(&self) -> Security {
        match (self.sign, self.seal) {
            (_, true) => Security::Sealed,
            (true, _) => Security::Signed,
            _ => Security::Plain,
        }
    }

    /// The server of `--against`.
    pub(crate) fn foreign(&self) -> Result<Option<(String, Target)>> {
        let (Some(against), Some(user), Some(file)) = (&self.against, &self.user, &self.password_file) else {
            return Ok(None);
        };
        let password = std::fs::read_to_string(file)
            .with_context(|| format!("read the password in {}", file.display()))?;
        let account = Account {
            user: user.clone(),
            password: password.trim_end_matches(['\r', '\n']).to_owned(),
            share: self.share.clone(),
            security: self.security(),
        };
        Ok(Some((against.clone(), Target::Smb { address: resolve(against)?, account, burst: None })))
    }
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let mut found = address.to_socket_addrs().with_context(|| format!("resolve {address} (HOST:PORT)"))?;
    found.next().with_context(|| format!("{address} has no address"))
}

fn parse_size(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        Some(b'g' | b'G') => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(unit));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| "a size such as 4096, 64K, 1M or 2G".to_owned())
}

/// Parses the duration of a run.
pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "seconds from 0.01 to 3600".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_are_parsed_and_bounded() {
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("2G"), Ok(2 << 30));
        assert!(["", "0", "G", "-1", "99999999999G"].iter().all(|text| parse_size(text).is_err()));
        assert_eq!(parse_seconds("0.5"), Ok(0.5));
        assert!(["0", "-1", "nan", "inf", "x"].iter().all(|text| parse_seconds(text).is_err()));
    }

    #[test]
    fn floors_serve_only_their_workloads() {
        assert!(Contender::FloorSendfile.serves(Workload::RandRead));
        assert!(!Contender::FloorSendfile.serves(Workload::Write));
        assert!(Contender::FloorWrite.serves(Workload::Write));
        assert!(!Contender::FloorWrite.serves(Workload::Checkpoint));
        assert!(Contender::Samba.serves(Workload::List));
    }
}
