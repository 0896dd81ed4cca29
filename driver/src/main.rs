//! `forebay-csi`: the CSI driver of Forebay. The controller creates volumes on a Forebay server; the node mounts them with the
//! kernel's SMB client.

mod address;
mod admin;
mod agent;
mod attributes;
mod capability;
mod capacity;
mod cluster;
mod config;
mod context;
mod controller;
mod deadline;
mod device_plugin;
mod error;
mod handle;
mod health;
mod identity;
mod in_flight;
mod ledger;
mod limits;
mod metrics;
mod mount;
mod mounted;
mod mountinfo;
mod names;
mod node;
mod observe;
mod options;
mod parameters;
mod placement;
mod registration;
mod rotation;
mod secrets;
mod snapshot_time;
mod socket;
mod supervise;
mod transport;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::{CommandFactory, Parser};
use forebay_proto::csi::controller_server::ControllerServer;
use forebay_proto::csi::group_controller_server::GroupControllerServer;
use forebay_proto::csi::identity_server::IdentityServer;
use forebay_proto::csi::node_server::NodeServer;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;

use crate::admin::Admin;
use crate::agent::Agent;
use crate::cluster::{Clusters, Kubernetes};
use crate::config::{Cli, Command, Config, LogFormat};
use crate::controller::{ControllerService, Servers};
use crate::device_plugin::Offer;
use crate::identity::{IdentityService, Look};
use crate::limits::{CONCURRENT_CALLS_MAX, SOCKET_WATCH_INTERVAL};
use crate::metrics::{Counting, Metrics};
use crate::node::{Deadlines, NodeService};
use crate::registration::Outcome;
use crate::supervise::Tasks;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::Completions { shell }) = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "forebay-csi", &mut io::stdout());
        return ExitCode::SUCCESS;
    }
    let result = match cli.command {
        Some(Command::RotateCredentials(rotate)) => rotation::run(&rotate),
        _ => run(cli.config).map(|()| true),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        // It has already printed the failures.
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("forebay-csi: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(config: Config) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&config.log).with_context(|| format!("--log {:?}", config.log))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    match config.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    runtime()?.block_on(serve(config))
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().context("start the runtime")
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate()).context("handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("handle SIGINT")?;

    let clusters = match config.kubernetes {
        true => Some(Clusters::new(Kubernetes::new(&config.namespace).await.context("--kubernetes")?)),
        false => None,
    };
    let servers = match (config.mode.is_controller(), &clusters) {
        (false, _) => None,
        (true, Some(clusters)) => Some(Servers::Kubernetes(clusters.clone())),
        (true, None) => Some(Servers::One(Admin::new(&config.admin_endpoint).context("--admin-endpoint")?)),
    };
    let node = match (&config.node_id, config.mode.is_node()) {
        (Some(node_id), true) => Some(NodeService::new(
            node_id,
            Deadlines {
                mount: config.mount_deadline,
                unmount: config.unmount_deadline,
                stats: config.stats_deadline,
            },
            &config.host_root,
            clusters,
        )),
        (None, true) => bail!("a node needs --node-id"),
        (_, false) => None,
    };
    let identity =
        IdentityService { servers: servers.clone(), is_node: node.is_some(), look: Look::default() };

    let (registration, _) = watch::channel(Outcome::default());
    let (listener, own) = socket::listen_at(&config.endpoint)?;
    let (stop, stopping) = watch::channel(false);
    let mut tasks = Tasks::default();
    if let Some(address) = config.health_address {
        let registration = config.is_kubernetes_node().then(|| registration.subscribe());
        let serving = health::listen_at(address, config.endpoint.clone(), registration).await;
        let serving = serving.context("--health-address")?;
        tasks.spawn("the health endpoint", until_stopped(serving, stopping.clone()));
    }
    let metrics = Metrics::new(node.is_some());
    if let Some(address) = config.metrics_address {
        let serving = metrics::listen_at(address, metrics.clone()).await.context("--metrics-address")?;
        tasks.spawn("the metrics endpoint", until_stopped(serving, stopping.clone()));
    }
    let controller = servers.map(ControllerService::new);
    let router = Server::builder()
        .layer(Counting(metrics))
        .concurrency_limit_per_connection(CONCURRENT_CALLS_MAX)
        .add_service(IdentityServer::new(identity))
        .add_optional_service(controller.clone().map(ControllerServer::new))
        .add_optional_service(controller.map(GroupControllerServer::new))
        .add_optional_service(node.map(NodeServer::new));
    let serving =
        router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), stopped(stopping.clone()));
    tasks.spawn("serving CSI", async { serving.await.context("serve CSI") });
    join_cluster(&config, registration, &stopping, &mut tasks).await?;
    info!(
        version = env!("CARGO_PKG_VERSION"),
        mode = ?config.mode,
        endpoint = %config.endpoint.display(),
        "the CSI driver listens"
    );
    let cause = tokio::select! {
        error = tasks.failure() => Err(error),
        () = own.vanished(SOCKET_WATCH_INTERVAL) => {
            Err(anyhow!("{} was removed, or is another process's now", config.endpoint.display()))
        }
        _ = terminate.recv() => Ok("SIGTERM"),
        _ = interrupt.recv() => Ok("SIGINT"),
    };
    match &cause {
        Ok(signal) => info!(signal, "stopping when the calls in progress have completed"),
        Err(error) => {
            error!(error = format!("{error:#}"), "stopping when the calls in progress have completed")
        }
    }
    stop.send_replace(true);
    let left = match timeout(config.drain_deadline, tasks.finish()).await {
        Ok(left) => left,
        Err(_) => {
            warn!(seconds = config.drain_deadline.as_secs(), "calls are still in progress, stopping anyway");
            Ok(())
        }
    };
    // The next process would replace the socket; removing it informs callers sooner.
    drop(own);
    cause?;
    left?;
    info!("ended");
    Ok(())
}

/// Serves until the process is asked to stop.
async fn until_stopped(
    serving: impl Future<Output = anyhow::Result<()>>,
    stopping: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    tokio::select! {
        result = serving => result,
        () = stopped(stopping) => Ok(()),
    }
}

async fn stopped(mut stopping: watch::Receiver<bool>) {
    // An error means that the sender was dropped, which also ends the process.
    let _ = stopping.wait_for(|stop| *stop).await;
}

/// Starts the tasks of a Kubernetes node in addition to serving CSI: registration with the kubelet, publishing the node's
/// hardware, and offering its RDMA devices.
async fn join_cluster(
    config: &Config,
    registration: watch::Sender<Outcome>,
    stop: &watch::Receiver<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let (true, Some(node)) = (config.is_kubernetes_node(), &config.node_id) else { return Ok(()) };
    let client = kube::Client::try_default().await.context("find the Kubernetes API server")?;
    let (offer, offers) = watch::channel(Offer::default());
    let agent = Agent::new(client, node, &config.host_root, offer).run(stop.clone());
    tasks.spawn("the node agent", async {
        agent.await;
        Ok(())
    });
    let devices = device_plugin::run(config.device_plugins.clone(), offers, stop.clone());
    tasks.spawn("the device plugin", async {
        devices.await;
        Ok(())
    });
    let (registry, endpoint) = (config.plugins_registry.clone(), config.endpoint.clone());
    let registering = registration::run(registry, endpoint, registration, stop.clone());
    tasks.spawn("the registration with the kubelet", registering);
    Ok(())
}
