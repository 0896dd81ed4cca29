//! Runs inside the lab's guests: `init` as PID 1, `agent` for the host.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use forebay_e2e::guest;

/// Part of the lab that runs inside its guests; of no use elsewhere.
#[derive(Parser)]
#[command(name = "forebay-guest", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Be PID 1.
    Init,
    /// Serve the host over a virtio serial port.
    Agent {
        /// The port's device.
        #[arg(long)]
        port: PathBuf,
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
    }
}
