//! Runs inside the lab's guests: `init` as PID 1, `agent` for the host, and the bodies of the tests.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use forebay_e2e::guest::{self, calls};

/// The part of the lab that runs inside its guests; not for use elsewhere.
#[derive(Parser)]
#[command(name = "forebay-guest", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run as PID 1.
    Init,
    /// Serve the host over a virtio serial port.
    Agent {
        /// The port's device.
        #[arg(long)]
        port: PathBuf,
    },
    /// Run a function: JSON arguments on standard input, JSON result on standard output.
    Call {
        /// Its name.
        function: String,
    },
    /// Take a lock and hold it until standard input ends.
    HoldLock {
        /// The file.
        path: PathBuf,
        /// `flock` or `fcntl`.
        kind: String,
        /// Wait for the lock.
        #[arg(long)]
        wait: bool,
    },
    /// Verify checksums (JSON) repeatedly until standard input ends, and print the result of each pass.
    VerifyRepeatedly {
        /// The folder and its files.
        sums: String,
    },
    /// Write and fsync one file after another until standard input ends, and print which are synced.
    RecordWrites {
        /// The folder.
        folder: PathBuf,
        /// The seed of the contents.
        seed: u64,
        /// Milliseconds to wait after each file.
        #[arg(default_value_t = 0)]
        pause: u64,
    },
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Command::Init => guest::init::main(),
        Command::Agent { port } => {
            let port =
                std::fs::File::options().read(true).write(true).open(&port).context("open the port")?;
            let node = rustix::system::uname().nodename().to_string_lossy().into_owned();
            guest::agent::serve(port.try_clone()?, port, &node, true)
        }
        Command::Call { function } => {
            let mut arguments = Vec::new();
            std::io::stdin().read_to_end(&mut arguments)?;
            let result = calls::dispatch(&function, &arguments)?;
            Ok(std::io::stdout().write_all(&result)?)
        }
        Command::HoldLock { path, kind, wait } => calls::locks::hold(&path, &kind, wait),
        Command::VerifyRepeatedly { sums } => {
            calls::writer::verify_repeatedly(&serde_json::from_str(&sums).context("the checksums")?)
        }
        Command::RecordWrites { folder, seed, pause } => {
            calls::writer::record(&folder, seed, Duration::from_millis(pause))
        }
    }
}
