//! The operator of Forebay.

use std::io::Write as _;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand};

/// Makes StorageClusters run: servers on the nodes that fit, their certificates, StorageClasses and upgrades.
#[derive(Debug, Parser)]
#[command(name = "forebay-operator", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the CustomResourceDefinitions as YAML.
    Crds {
        /// Write one file per definition into this directory instead.
        #[arg(long, value_name = "DIRECTORY")]
        output: Option<std::path::PathBuf>,
    },
    /// Print the completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Crds { output: None } => {
            std::io::stdout().write_all(forebay_operator::crds::stream()?.as_bytes())?;
        }
        Command::Crds { output: Some(directory) } => {
            for crd in forebay_api::definitions() {
                let path = directory.join(forebay_operator::crds::file_name(&crd));
                std::fs::write(&path, forebay_operator::crds::yaml(&crd)?)
                    .with_context(|| format!("{} cannot be written", path.display()))?;
            }
        }
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "forebay-operator", &mut std::io::stdout());
        }
    }
    Ok(())
}
