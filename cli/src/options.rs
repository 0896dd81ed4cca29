//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::doctor;

/// Forebay's namespace where nobody says another one.
pub(crate) const NAMESPACE: &str = "forebay-system";

/// What Forebay is doing in a Kubernetes cluster, and what stands in its way.
///
/// In your PATH it is `kubectl forebay`. It reads with your rights and changes nothing.
#[derive(Debug, Parser)]
#[command(name = "kubectl-forebay", bin_name = "kubectl forebay", version, max_term_width = 100)]
#[command(after_help = "Examples:
  kubectl forebay status                       # clusters, instances, nodes and volumes
  kubectl forebay status -A -o wide            # of every namespace, with everything
  kubectl forebay status -o json | jq .instances
  kubectl forebay doctor                       # what is wrong, and how to mend it
  kubectl forebay doctor --all                 # and what was found right

Exit codes: 0 all is well; 1 something is not ready (status) or an error was found (doctor); 2 it cannot be told.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Colours: on a terminal, always, or never. NO_COLOR is respected.
    #[arg(long, value_enum, default_value = "auto", global = true, value_name = "WHEN")]
    pub(crate) color: Color,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show StorageClusters, instances, nodes and volumes. Exit code 1 where one is not ready.
    Status {
        #[command(flatten)]
        connection: Connection,

        /// How to show it.
        #[arg(short, long, value_enum, default_value = "table")]
        output: Format,
    },
    /// Look at the cluster and every node for what keeps Forebay from working, and say how to mend it. Exit code 1
    /// where an error is found.
    Doctor {
        #[command(flatten)]
        connection: Connection,

        /// How to show it.
        #[arg(short, long, value_enum, default_value = "text")]
        output: doctor::Format,

        /// Show what is right, too.
        #[arg(long)]
        all: bool,
    },
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Connection {
    /// The namespace that Forebay runs in. Default: forebay-system, or in a pod the pod's own.
    #[arg(short, long, env = "FOREBAY_NAMESPACE", value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,

    /// Look in every namespace.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,

    /// The kubeconfig file. Default: as kubectl finds it, or the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// The context of the kubeconfig file.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table for people.
    Table,
    /// The table with everything.
    Wide,
    /// For programs.
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl Color {
    pub(crate) fn is_wanted(self, on_terminal: bool) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            // https://no-color.org: present and not empty.
            Self::Auto => on_terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_option_is_explained() {
        let command = Cli::command();
        command.clone().debug_assert();
        for command in command.get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn a_namespace_and_all_namespaces_exclude_each_other() {
        let parse = |arguments: &[&str]| Cli::try_parse_from([&["kubectl-forebay"], arguments].concat());
        assert!(parse(&["status", "-n", "x", "-o", "json"]).is_ok());
        assert!(parse(&["doctor", "-A", "--all"]).is_ok());
        assert!(parse(&["status", "-A", "-n", "x"]).is_err());
        assert!(parse(&["status", "-o", "yaml"]).is_err());
        assert!(parse(&[]).is_err());
    }
}
