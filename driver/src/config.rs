//! The command line. Every option can also be set by the environment variable that `--help` names.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

/// Longest node ID (CSI NodeGetInfoResponse.node_id).
const NODE_ID_BYTES_MAX: usize = 256;

/// The Forebay CSI driver.
///
/// The controller creates, expands and deletes volumes on a Forebay server; only one runs. The node service mounts them with
/// the kernel's SMB client; it runs on every node, as root and in the host's network namespace.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  forebay-csi --mode controller --endpoint unix:///csi/csi.sock --admin-endpoint unix:///run/forebay/admin.sock
  forebay-csi --mode node --endpoint unix:///csi/csi.sock --node-id worker-1
  forebay-csi --mode controller --kubernetes --namespace forebay-system
  forebay-csi --mode node --kubernetes --node-id worker-1 --endpoint /var/lib/kubelet/plugins/csi.forebay.io/csi.sock
  forebay-csi rotate-credentials main-0/pvc-8b2c4f1e-0d0e-4ac3-9f3f-0f6f1f9e5a11
  forebay-csi rotate-credentials --all --older-than 30d
  forebay-csi completions bash > /etc/bash_completion.d/forebay-csi

Signals: SIGTERM and SIGINT stop the driver after the calls in progress have finished.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,

    #[command(flatten)]
    pub(crate) config: Config,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Replace the passwords of volumes, on their servers and in their Kubernetes Secrets.
    ///
    /// Mounts receive the new password within minutes (Linux 6.9 or newer; on other nodes, pods must be recreated). The old
    /// password stays valid until the next rotation. A Secret that was lost is created again. Runs where the controller runs,
    /// with its permissions.
    RotateCredentials(RotateCredentials),
}

#[derive(Debug, Args)]
pub(crate) struct RotateCredentials {
    /// Ids of volumes: spec.csi.volumeHandle of their PersistentVolumes.
    #[arg(required_unless_present = "all", value_name = "VOLUME_ID")]
    pub(crate) volume_ids: Vec<String>,

    /// All volumes that have a PersistentVolume.
    #[arg(long, conflicts_with = "volume_ids")]
    pub(crate) all: bool,

    /// Only those with a password that is at least this old, such as 12h or 30d; at least 1h.
    #[arg(long, requires = "all", value_parser = age, value_name = "AGE")]
    pub(crate) older_than: Option<Duration>,

    /// The namespace that Forebay runs in.
    #[arg(long, env = "POD_NAMESPACE", default_value = "forebay-system")]
    pub(crate) namespace: String,
}

#[derive(Debug, Args)]
pub(crate) struct Config {
    /// Which CSI services to offer in addition to Identity.
    #[arg(long, value_enum, env = "FOREBAY_CSI_MODE", default_value = "all")]
    pub(crate) mode: Mode,

    /// The unix socket to serve CSI on. A stale socket is replaced; only this user can connect.
    #[arg(long, env = "CSI_ENDPOINT", value_parser = unix_socket, default_value = "unix:///run/forebay/csi.sock")]
    pub(crate) endpoint: PathBuf,

    /// The unix socket of the server's admin API. Required for the controller.
    #[arg(
        long,
        env = "FOREBAY_ADMIN_ENDPOINT",
        value_parser = unix_socket,
        default_value = "unix:///run/forebay/admin.sock",
        conflicts_with = "kubernetes"
    )]
    pub(crate) admin_endpoint: PathBuf,

    /// Run in a Kubernetes cluster: the servers are the instances of StorageClusters, the controller places volumes on them
    /// and keeps their credentials in Secrets, and the node service looks up where they run. Without this option there is one
    /// server, at --admin-endpoint. Finds the API server as kubectl does, or with the pod's service account.
    #[arg(long, env = "FOREBAY_KUBERNETES")]
    pub(crate) kubernetes: bool,

    /// The namespace that Forebay runs in, which holds the StorageClusters and the volumes' Secrets.
    #[arg(long, env = "POD_NAMESPACE", default_value = "forebay-system")]
    pub(crate) namespace: String,

    /// The node's name in the orchestrator. Required for the node service.
    #[arg(long, env = "FOREBAY_NODE_ID", value_parser = node_id)]
    pub(crate) node_id: Option<String>,

    /// The kubelet's folder for registration sockets of plugins. With --kubernetes, the node service registers there.
    #[arg(
        long,
        env = "FOREBAY_PLUGINS_REGISTRY",
        default_value = "/var/lib/kubelet/plugins_registry",
        value_name = "FOLDER"
    )]
    pub(crate) plugins_registry: PathBuf,

    /// The kubelet's folder for device plugins. With --kubernetes, the node service uses it to offer RDMA devices to
    /// containers that request storage.forebay.io/rdma. If the folder does not exist, they are not offered.
    #[arg(
        long,
        env = "FOREBAY_DEVICE_PLUGINS",
        default_value = "/var/lib/kubelet/device-plugins",
        value_name = "FOLDER"
    )]
    pub(crate) device_plugins: PathBuf,

    /// The folder with the host's /sys, /proc, /lib/modules and /etc/os-release. With --kubernetes, the node service
    /// publishes the node's capabilities from them. They are only read.
    #[arg(long, env = "FOREBAY_HOST_ROOT", default_value = "/", value_name = "FOLDER")]
    pub(crate) host_root: PathBuf,

    /// Seconds after which a mount that hangs fails with DEADLINE_EXCEEDED. The mount continues, and further calls for the
    /// volume fail with ABORTED until it ends. Keep it below the caller's own limit (kubelet: 120).
    #[arg(long, env = "FOREBAY_MOUNT_DEADLINE", value_parser = seconds, default_value = "60", value_name = "SECONDS")]
    pub(crate) mount_deadline: Duration,

    /// Seconds after which an unmount that hangs becomes a lazy one, so that a pod can be removed while its server is
    /// unreachable.
    #[arg(long, env = "FOREBAY_UNMOUNT_DEADLINE", value_parser = seconds, default_value = "30", value_name = "SECONDS")]
    pub(crate) unmount_deadline: Duration,

    /// Seconds after which a volume is reported as abnormal if its usage cannot be read.
    #[arg(long, env = "FOREBAY_STATS_DEADLINE", value_parser = seconds, default_value = "10", value_name = "SECONDS")]
    pub(crate) stats_deadline: Duration,

    /// Seconds for calls in progress to finish when the driver is stopped.
    #[arg(long, env = "FOREBAY_DRAIN_DEADLINE", value_parser = seconds, default_value = "60", value_name = "SECONDS")]
    pub(crate) drain_deadline: Duration,

    /// Serve /healthz (the process runs) and /readyz (it can work) over HTTP, e.g. 127.0.0.1:9808.
    #[arg(long, env = "FOREBAY_HEALTH_ADDRESS", value_name = "IP:PORT")]
    pub(crate) health_address: Option<SocketAddr>,

    /// Serve /metrics over HTTP, e.g. 0.0.0.0:9448.
    #[arg(long, env = "FOREBAY_METRICS_ADDRESS", value_name = "IP:PORT")]
    pub(crate) metrics_address: Option<SocketAddr>,

    /// Format of the logs, which are written to standard error and never contain secrets.
    #[arg(long, value_enum, env = "FOREBAY_LOG_FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,

    /// What to log: error, warn, info, debug or trace, or a filter such as forebay_csi=debug.
    #[arg(long, env = "FOREBAY_LOG", default_value = "info", value_name = "FILTER")]
    pub(crate) log: String,
}

impl Config {
    /// Whether a kubelet must register this process, and this process must publish its node.
    pub(crate) fn is_kubernetes_node(&self) -> bool {
        self.kubernetes && self.mode.is_node()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// Create, change and delete volumes.
    Controller,
    /// Mount volumes.
    Node,
    /// Both, in one process.
    All,
}

impl Mode {
    pub(crate) fn is_controller(self) -> bool {
        matches!(self, Self::Controller | Self::All)
    }

    pub(crate) fn is_node(self) -> bool {
        matches!(self, Self::Node | Self::All)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// One line of text per event.
    Text,
    /// One JSON object per event.
    Json,
}

/// `unix:///path`, `unix:/path` or `/path`.
fn unix_socket(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")).unwrap_or(text);
    if path.starts_with('/') {
        Ok(PathBuf::from(path))
    } else {
        Err("not of the form unix:///path/to.sock".into())
    }
}

fn node_id(text: &str) -> Result<String, String> {
    match text.len() {
        0 => Err("is empty".into()),
        1..=NODE_ID_BYTES_MAX => Ok(text.to_owned()),
        _ => Err(format!("is longer than {NODE_ID_BYTES_MAX} bytes")),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds @ 1..=86_400) => Ok(Duration::from_secs(seconds)),
        _ => Err("not a number of seconds from 1 to 86400".into()),
    }
}

/// A password's age. Below an hour, nodes could miss an intermediate password.
fn age(text: &str) -> Result<Duration, String> {
    let wrong = || "not an age such as 12h or 30d, from 1h to 3650d".to_owned();
    let unit = text.chars().next_back().ok_or_else(wrong)?;
    let number: u64 = text.strip_suffix(unit).and_then(|number| number.parse().ok()).ok_or_else(wrong)?;
    let hours = match unit {
        'h' => number,
        'd' => number.checked_mul(24).ok_or_else(wrong)?,
        _ => return Err(wrong()),
    };
    if (1..=3650 * 24).contains(&hours) { Ok(Duration::from_secs(hours * 3600)) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn ages_are_given_in_hours_or_days() {
        let hours = |hours: u64| Ok(Duration::from_secs(hours * 3600));
        for (text, expected) in
            [("1h", hours(1)), ("36h", hours(36)), ("30d", hours(720)), ("3650d", hours(87_600))]
        {
            assert_eq!(age(text), expected, "{text}");
        }
        for text in [
            "",
            "h",
            "0h",
            "30",
            "30m",
            "-1d",
            "1.5h",
            "3651d",
            "99999999999999999999d",
            "768614336404564651d",
            "1ä",
        ] {
            assert!(age(text).is_err(), "{text}");
        }
    }

    #[test]
    fn command_line_is_consistent_and_every_option_has_help() {
        let command = Cli::command();
        command.clone().debug_assert();
        for argument in command.get_arguments() {
            assert!(argument.get_help().is_some(), "{}", argument.get_id());
        }
    }

    #[test]
    fn sockets_and_durations_are_validated() {
        for text in ["unix:///run/a.sock", "unix:/run/a.sock", "/run/a.sock"] {
            assert_eq!(unix_socket(text).as_deref(), Ok(std::path::Path::new("/run/a.sock")));
        }
        assert!(unix_socket("tcp://127.0.0.1:1").is_err());
        assert!(unix_socket("unix://a.sock").is_err());
        assert!(seconds("0").is_err() && seconds("1s").is_err() && seconds("60").is_ok());
    }
}
