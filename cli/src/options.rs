//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::bench::{self, Workload};
use crate::doctor;
use crate::limits::{BUNDLE_LOG_LINES, EPOCH_MAX, VOLUMES_SHOWN};
use crate::top::Sort;

/// Forebay's namespace if no other is given.
pub(crate) const NAMESPACE: &str = "forebay-system";

/// Overrides the default namespace for every call.
pub(crate) const NAMESPACE_VARIABLE: &str = "FOREBAY_NAMESPACE";

/// Shows the state of Forebay in a Kubernetes cluster, and finds problems.
///
/// In your PATH it is available as `kubectl forebay`. It uses your permissions. Only `pause`, `resume`, `adopt`, `bench` and
/// `rehearse` change anything.
#[derive(Debug, Parser)]
#[command(name = "kubectl-forebay", bin_name = "kubectl forebay", version, max_term_width = 100)]
#[command(after_help = "Examples:
  kubectl forebay status                       # clusters, instances, nodes and volumes
  kubectl forebay status -A -o wide            # all namespaces, all columns
  kubectl forebay status -o json | jq .instances
  kubectl forebay doctor                       # problems, evidence and fixes
  kubectl forebay doctor --all                 # passed checks, too
  kubectl forebay top                          # the busiest volumes now
  kubectl forebay who team/data                # the pods that use a claim
  kubectl forebay bench fast --pods 4          # how fast a StorageClass is, from 4 pods
  kubectl forebay rehearse fast                # kill a server under a writer: how long does it stand still?
  kubectl forebay bundle                       # a support bundle, without secrets
  kubectl forebay pause main                   # stop the operator's changes, for maintenance
  kubectl forebay adopt main --dry-run         # which pools, after Kubernetes lost its state

Exit codes: 0 all is well; 1 something is not ready (status) or an error was found (doctor); 2 the state is unknown.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// When to use colours. NO_COLOR is respected.
    #[arg(long, value_enum, default_value = "auto", global = true, value_name = "WHEN")]
    pub(crate) color: Color,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show StorageClusters, instances, nodes and volumes. Exit code 1 if one is not ready.
    Status {
        #[command(flatten)]
        connection: Connection,

        /// Output format.
        #[arg(short, long, value_enum, default_value = "table")]
        output: Format,
    },
    /// Check the cluster and every node for problems that keep Forebay from working, and show how to fix them. Exit code 1 if
    /// an error is found.
    Doctor {
        #[command(flatten)]
        connection: Connection,

        /// Output format.
        #[arg(short, long, value_enum, default_value = "text")]
        output: doctor::Format,

        /// Show passed checks, too.
        #[arg(long)]
        all: bool,
    },
    /// Show the current load on volumes, the busiest first: throughput, operations, latency, clients.
    ///
    /// Reads the metrics of all servers twice, through the API server's proxy. This needs permission to get pods/proxy.
    Top(Top),
    /// Show the pods that use a claim, and its sessions and open files on its server.
    Who(Who),
    /// Measure a StorageClass: training and checkpoints in the shapes of MLPerf Storage, from one or more pods.
    ///
    /// Creates a claim and a Job, waits for the results, and removes both. unet3d at full scale reads batches of 1 GB; one
    /// accelerator that never waits reads 3.18 GB/s. Accelerators are simulated: computation is a sleep. Files are read without
    /// the client's cache and checked. Not an MLPerf score.
    Bench(Bench),
    /// The part of a pod of `bench`.
    #[command(hide = true)]
    Measure(Measure),
    /// Rehearse the failure of a server: kill it under a writer, and show how long the writer stood still.
    ///
    /// Creates a claim and a Job with a pod that writes and syncs a record every tenth of a second, deletes the pod of the server
    /// that serves the volume, shows a timeline, checks every record, and removes claim and Job. All volumes of that server
    /// stand still in the meantime, as in a real failure. Exit code 1 if a write failed or a record is lost.
    Rehearse(Rehearse),
    /// The part of a pod of `rehearse`.
    #[command(hide = true)]
    Beat(Beat),
    /// Write a support bundle: status, objects, metrics and logs of Forebay in one archive, without secrets.
    ///
    /// Secrets are not read. Anything that you have no permission to read is left out and listed in the archive. You need
    /// permission to list the objects and to get pods/log and pods/proxy.
    Bundle(Bundle),
    /// Stop the operator from changing anything in a StorageCluster. Servers continue to run.
    ///
    /// For maintenance: nodes can be restarted without a failover, and objects can be changed by hand. Sets spec.paused.
    Pause(OneCluster),
    /// Let the operator manage a StorageCluster again.
    Resume(OneCluster),
    /// Let instances continue with pools that have a later epoch than Kubernetes has on record, because the record was lost.
    ///
    /// A pool and its reservation keep the epoch in which they were last used. A server with an earlier epoch exits with code
    /// 4. This command reads the epochs that such servers found, and records the next one. An epoch is never lowered.
    Adopt(Adopt),
    /// Print a completion script for a shell.
    ///
    /// For `kubectl forebay`, link this program into your PATH as kubectl_complete-forebay instead: kubectl's own completion
    /// uses it.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Seconds between the two readings of the metrics.
    #[arg(short, long, default_value_t = 5, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=300))]
    pub(crate) interval: u64,

    /// Sort order.
    #[arg(long, value_enum, default_value = "throughput")]
    pub(crate) sort: Sort,

    /// Number of volumes in the table; 0: all. `-o json` always includes all.
    #[arg(long, default_value_t = VOLUMES_SHOWN, value_name = "NUMBER")]
    pub(crate) limit: usize,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Format,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Debug, Args)]
pub(crate) struct Who {
    /// The claim, with its namespace.
    #[arg(value_name = "NAMESPACE/CLAIM")]
    pub(crate) claim: String,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Format,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// The StorageClass. It can be of any driver, for a comparison.
    #[arg(value_name = "STORAGECLASS")]
    pub(crate) class: String,

    /// What to measure, one after the other.
    #[arg(short, long, value_enum, value_delimiter = ',', default_value = "unet3d,checkpoint")]
    pub(crate) workload: Vec<Workload>,

    /// Number of pods, on different nodes if there are as many.
    #[arg(long, default_value_t = 1, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) pods: u32,

    /// Number of simulated accelerators in each pod.
    #[arg(long, default_value_t = 1, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) accelerators: u32,

    /// Seconds of each training, after its samples are written.
    #[arg(long, default_value_t = 60, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) seconds: u64,

    /// Size of the volume. Samples use up to three quarters of it, and only a data set larger than the server's memory is read
    /// from its drives.
    #[arg(long, default_value = "32Gi", value_name = "SIZE", value_parser = bench::size)]
    pub(crate) size: u64,

    /// Factor for the size of samples and checkpoints and for the time of computation, so that small volumes suffice. The
    /// throughput that an accelerator needs stays the same.
    #[arg(long, default_value = "1", value_name = "FACTOR", value_parser = bench::scale)]
    pub(crate) scale: f64,

    #[command(flatten)]
    pub(crate) place: Place,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: BenchFormat,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

/// Where the pods of a Job run, and with what.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// Namespace of the Job and the claim.
    #[arg(long, default_value = "default", value_name = "NAMESPACE")]
    pub(crate) job_namespace: String,

    /// The pods' image, with this program in it. Default: that of Forebay's own pods.
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,

    /// Secret with the credentials of the image's registry, in the Job's namespace.
    #[arg(long, value_name = "SECRET")]
    pub(crate) image_pull_secret: Option<String>,

    /// Only nodes with these labels.
    #[arg(long, value_name = "KEY=VALUE", value_delimiter = ',', value_parser = bench::label)]
    pub(crate) node_selector: Vec<(String, String)>,

    /// Leave Job and claim, for a look at them.
    #[arg(long)]
    pub(crate) keep: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Rehearse {
    /// The StorageClass. The claim's volume decides which instance is disturbed.
    #[arg(value_name = "STORAGECLASS")]
    pub(crate) class: String,

    /// What happens to the instance's server.
    #[arg(long, value_enum, default_value = "kill")]
    pub(crate) how: How,

    /// Seconds for which the pod writes. The server is disturbed after five of them.
    #[arg(long, default_value_t = 120, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(30..=3600))]
    pub(crate) seconds: u64,

    /// Do not ask for confirmation.
    #[arg(short, long)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) place: Place,

    /// Output format.
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: BenchFormat,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum How {
    /// Its pod has one second to end, which is too short for an orderly end.
    Kill,
    /// Its pod ends in an orderly way, as in an update.
    Restart,
}

#[derive(Debug, Args)]
pub(crate) struct Beat {
    /// The mounted volume.
    #[arg(long)]
    pub(crate) folder: PathBuf,

    /// How long to write.
    #[arg(long)]
    pub(crate) seconds: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Measure {
    /// The mounted volume.
    #[arg(long)]
    pub(crate) folder: PathBuf,

    /// Number of pods.
    #[arg(long)]
    pub(crate) pods: u32,

    /// This pod's number.
    #[arg(long, env = "JOB_COMPLETION_INDEX")]
    pub(crate) index: u32,

    /// The workloads, as JSON.
    #[arg(long)]
    pub(crate) plans: String,
}

#[derive(Debug, Args)]
pub(crate) struct Bundle {
    /// The archive to write; the file must not exist yet. Default: forebay-bundle-TIME.tar.gz in the current folder.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,

    /// Number of lines from the end of each container's log.
    #[arg(long, default_value_t = BUNDLE_LOG_LINES, value_name = "NUMBER", value_parser = clap::value_parser!(i64).range(1..))]
    pub(crate) log_lines: i64,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Debug, Args)]
pub(crate) struct OneCluster {
    /// Name of the StorageCluster.
    #[arg(value_name = "STORAGECLUSTER")]
    pub(crate) cluster: String,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Debug, Args)]
pub(crate) struct Adopt {
    /// Name of the StorageCluster.
    #[arg(value_name = "STORAGECLUSTER")]
    pub(crate) cluster: String,

    /// This instance only, such as main-0.
    #[arg(long, value_name = "INSTANCE")]
    pub(crate) instance: Option<String>,

    /// Continue in this epoch, instead of the one after the epoch that the server found. It must not be lower than the epoch
    /// that Kubernetes has on record.
    #[arg(long, value_name = "NUMBER", requires = "instance", value_parser = clap::value_parser!(u64).range(1..=EPOCH_MAX))]
    pub(crate) epoch: Option<u64>,

    /// Show what would be recorded, without recording it.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Do not ask for confirmation.
    #[arg(short, long)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) connection: Connection,
}

#[derive(Debug, Args)]
pub(crate) struct Connection {
    /// The namespace that Forebay runs in. Default: $FOREBAY_NAMESPACE, else the pod's own namespace if run in a pod, else
    /// forebay-system.
    // Not with clap's `env`: a variable would then conflict with -A as the option does.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<String>,

    /// Look in every namespace.
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub(crate) all_namespaces: bool,

    /// The kubeconfig file. Default: the one that kubectl uses, or the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,

    /// The context of the kubeconfig file.
    #[arg(long, value_name = "NAME")]
    pub(crate) context: Option<String>,
}

impl Connection {
    /// Returns the namespace to read, or `None` for all. `variable` is the value of the environment variable, `default`
    /// applies if no namespace is given.
    pub(crate) fn scope(&self, variable: Option<String>, default: impl FnOnce() -> String) -> Option<String> {
        if self.all_namespaces {
            return None;
        }
        let variable = variable.filter(|name| !name.is_empty());
        Some(self.namespace.clone().or(variable).unwrap_or_else(default))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A table for people.
    Table,
    /// A table with all columns.
    Wide,
    /// For programs.
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchFormat {
    /// A table for people.
    Table,
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
    fn command_line_is_consistent_and_every_option_has_help() {
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
    fn namespace_and_all_namespaces_are_mutually_exclusive() {
        let parse = |arguments: &[&str]| Cli::try_parse_from([&["kubectl-forebay"], arguments].concat());
        assert!(parse(&["status", "-n", "x", "-o", "json"]).is_ok());
        assert!(parse(&["doctor", "-A", "--all"]).is_ok());
        assert!(parse(&["status", "-A", "-n", "x"]).is_err());
        assert!(parse(&["status", "-o", "yaml"]).is_err());
        assert!(parse(&[]).is_err());
    }

    #[test]
    fn namespace_option_overrides_the_variable_and_the_default() {
        let scope = |arguments: &[&str], variable: Option<&str>| {
            let arguments = [&["kubectl-forebay", "status"], arguments].concat();
            let cli = Cli::try_parse_from(arguments).expect("the options");
            let Command::Status { connection, .. } = cli.command else { panic!("not the status") };
            connection.scope(variable.map(str::to_owned), || "default".to_owned())
        };
        assert_eq!(scope(&[], None).as_deref(), Some("default"));
        assert_eq!(scope(&[], Some("")).as_deref(), Some("default"));
        assert_eq!(scope(&[], Some("of-variable")).as_deref(), Some("of-variable"));
        assert_eq!(scope(&["-n", "of-option"], Some("of-variable")).as_deref(), Some("of-option"));
        assert_eq!(scope(&["-A"], Some("of-variable")), None);
    }

    #[test]
    fn help_names_the_namespace_variable_that_clap_does_not_read() {
        let command = Cli::command();
        let status = command.find_subcommand("status").expect("a subcommand");
        let namespace = status.get_arguments().find(|a| a.get_id() == "namespace").expect("an option");
        assert!(namespace.get_help().expect("help").to_string().contains(NAMESPACE_VARIABLE));
        assert_eq!(namespace.get_env(), None, "-A would be refused wherever the variable is set");
    }
}
