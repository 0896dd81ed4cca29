//! The operator of Forebay.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use forebay_operator::desired::Settings;
use forebay_operator::http::{self, Health};
use forebay_operator::leader::{Candidate, Timing};
use forebay_operator::leases::Leases;
use forebay_operator::limits::{ANNOUNCEMENT, LEASE_DURATION_S, LEASE_DURATION_S_RANGE, SHUTDOWN_TIME_MAX};
use forebay_operator::metrics::Metrics;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Reconciles StorageClusters: servers on suitable nodes, their certificates, StorageClasses and upgrades.
#[derive(Debug, Parser)]
#[command(name = "forebay-operator", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Reconcile while holding the Lease of this namespace; otherwise wait for it.
    Run(Run),
    /// Print the CustomResourceDefinitions as YAML.
    Crds {
        /// Write one file per definition into this directory instead.
        #[arg(long, value_name = "DIRECTORY")]
        output: Option<PathBuf>,
    },
    /// Print the completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
struct Run {
    /// Namespace of the StorageClusters to reconcile, and of all objects that are created.
    #[arg(long, env = "POD_NAMESPACE", default_value = "forebay-system")]
    namespace: String,
    /// Name of this process in the Lease; it must be unique.
    #[arg(long, env = "POD_NAME")]
    identity: String,
    /// Seconds for which the Lease is valid without renewal: how long it takes until another process takes over if this one
    /// is killed. A process that exits normally releases the Lease immediately.
    #[arg(long, default_value_t = LEASE_DURATION_S, value_parser = lease_seconds)]
    lease_duration: u64,
    /// Image for servers if their StorageCluster specifies none.
    #[arg(long, env = "FOREBAY_IMAGE", default_value = concat!("docker.io/forebay/forebay:", env!("CARGO_PKG_VERSION")))]
    image: String,
    /// Localhost seccomp profile of the servers: a path relative to the kubelet's folder for seccomp profiles. Default:
    /// RuntimeDefault, which forbids io_uring.
    #[arg(long, env = "FOREBAY_SECCOMP_PROFILE", default_value = "")]
    seccomp_profile: String,
    /// Priority class of the servers; empty for none.
    #[arg(long, env = "FOREBAY_SERVER_PRIORITY_CLASS", default_value = "system-cluster-critical")]
    server_priority_class: String,
    /// Whether to create PodDisruptionBudgets for the servers and targets of every cluster.
    #[arg(long, env = "FOREBAY_DISRUPTION_BUDGETS", default_value_t = true, action = clap::ArgAction::Set)]
    disruption_budgets: bool,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "FOREBAY_HTTP_LISTEN", default_value = "[::]:8080")]
    http_listen: SocketAddr,
    /// What is logged: error, warn, info, debug, trace, or directives as in "info,forebay_operator=debug".
    #[arg(long, env = "FOREBAY_LOG", default_value = "info")]
    log: String,
    /// Format of log lines.
    #[arg(long, env = "FOREBAY_LOG_FORMAT", default_value = "text")]
    log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}

fn lease_seconds(text: &str) -> Result<u64, String> {
    let (least, most) = (LEASE_DURATION_S_RANGE.start(), LEASE_DURATION_S_RANGE.end());
    let seconds = text.parse().ok().filter(|s| LEASE_DURATION_S_RANGE.contains(s));
    seconds.ok_or_else(|| format!("not a number of seconds from {least} to {most}"))
}

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Command::Run(options) => return run(options),
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
    Ok(ExitCode::SUCCESS)
}

/// Returns an identifier of this Kubernetes cluster: the UID of the namespace kube-system, which exists in every cluster for
/// the cluster's whole lifetime.
async fn cluster_uid(client: &kube::Client) -> anyhow::Result<String> {
    let namespaces: kube::Api<k8s_openapi::api::core::v1::Namespace> = kube::Api::all(client.clone());
    let namespace =
        namespaces.get("kube-system").await.context("the namespace kube-system cannot be read")?;
    namespace.metadata.uid.context("the namespace kube-system has no UID")
}

#[tokio::main]
async fn run(options: Run) -> anyhow::Result<ExitCode> {
    let filter = tracing_subscriber::EnvFilter::try_new(&options.log).context("--log is not valid")?;
    let lines =
        tracing_subscriber::fmt().with_ansi(false).with_env_filter(filter).with_writer(std::io::stderr);
    match options.log_format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().init(),
    }
    let metrics = Arc::new(Metrics::default());
    let health = Arc::new(Health::default());
    let listening = tokio::spawn(http::serve(options.http_listen, Arc::clone(&metrics), Arc::clone(&health)));
    let client = kube::Client::try_default().await.context("no Kubernetes cluster is configured")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let ended = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::pin!(ended);
    let version = client.apiserver_version().await.context("the API server does not answer")?;
    tracing::info!(kubernetes = version.git_version, namespace = options.namespace, "started");
    health.ready.store(true, Ordering::Relaxed);
    let leases = Leases::new(client.clone());
    let watching = (leases.clone(), options.namespace.clone());
    tokio::spawn(async move { watching.0.watch(&watching.1).await });
    let timing = Timing::new(Duration::from_secs(options.lease_duration));
    // A separate connection, which stays warm: requests on the shared one may wait behind a dozen watches that restart.
    let own = kube::Client::try_default().await?;
    let candidate =
        Candidate::new(own, &options.namespace, options.identity.clone(), timing).telling(leases.clone());
    let since = tokio::select! {
        since = candidate.acquire() => since,
        () = &mut ended => return Ok(ExitCode::SUCCESS),
        served = listening => {
            served?.with_context(|| format!("{} cannot be listened on", options.http_listen))?;
            anyhow::bail!("the listener has ended");
        }
    };
    tracing::info!(identity = options.identity, "holds the Lease");
    metrics.leader.set(1.0);
    let settings = Settings {
        cluster_uid: cluster_uid(&client).await?,
        namespace: options.namespace,
        image: options.image,
        seccomp_profile: if options.seccomp_profile.is_empty() {
            "RuntimeDefault".to_owned()
        } else {
            format!("localhost/{}", options.seccomp_profile)
        },
        priority_class: options.server_priority_class,
        announcement: ANNOUNCEMENT,
        disruption_budgets: options.disruption_budgets,
    };
    let (end, ending) = watch::channel(false);
    let progress = Arc::clone(&health.progress);
    let work = forebay_operator::run::operate(
        client,
        settings,
        Arc::clone(&metrics),
        leases,
        candidate.tenure(),
        progress,
        ending,
    );
    let mut work = tokio::spawn(work);
    let held = candidate.hold(since);
    tokio::pin!(held);
    tokio::select! {
        () = &mut held => {
            // Another replica may be working by now, so the process exits immediately, regardless of work in progress.
            tracing::error!("lost the Lease");
            return Ok(ExitCode::FAILURE);
        }
        result = &mut work => {
            result.context("the controller failed")?;
            anyhow::bail!("the controller has ended");
        }
        () = &mut ended => {}
    }
    health.ending.store(true, Ordering::Relaxed);
    end.send_replace(true);
    // The Lease is held until all work has ended, so it is renewed until then.
    tokio::select! {
        () = &mut held => {
            tracing::error!("lost the Lease while stopping");
            return Ok(ExitCode::FAILURE);
        }
        result = tokio::time::timeout(SHUTDOWN_TIME_MAX, &mut work) => {
            if result.is_err() {
                tracing::warn!("reconciliations in progress did not end in time");
                work.abort();
                let _ = work.await;
            }
        }
    }
    metrics.leader.set(0.0);
    candidate.release().await;
    tracing::info!("ended");
    Ok(ExitCode::SUCCESS)
}
