//! The lab's command line.

use anyhow::Result;
use clap::{Parser, Subcommand};
use forebay_e2e::cache::Cache;
use forebay_e2e::images::Images;
use forebay_e2e::lab::{Lab, client, storage};
use forebay_e2e::rundir;

/// Boots QEMU guests as nodes of a Forebay cluster and runs scenarios on them.
#[derive(Parser)]
#[command(name = "forebay-lab", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make all cached images.
    Prepare {
        /// Look for newer packages first.
        #[arg(long)]
        refresh: bool,
    },
    /// smoke
    Smoke { script: String },
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    rundir::clean_up_on_signals()?;
    match arguments.command {
        Command::Prepare { refresh } => {
            Images::prepare(&Cache::open()?, refresh)?;
        }
        Command::Smoke { script } => {
            let lab = Lab::start("smoke", &[storage(), client("node1"), client("node2")])?;
            for node in lab.nodes() {
                println!("{}: {}", node.name(), node.run(&script)?);
            }
        }
    }
    Ok(())
}
