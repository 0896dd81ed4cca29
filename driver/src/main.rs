//! `forebay-csi`: the CSI driver of Forebay. The controller makes volumes on a Forebay server, the node mounts
//! them with the kernel's SMB client.

mod address;
mod admin;
mod agent;
mod capability;
mod capacity;
mod cluster;
mod config;
mod context;
mod controller;
mod deadline;
mod device_plugin;
mod error;
mod health;
mod identity;
mod in_flight;
mod ledger;
mod limits;
mod mount;
mod mountinfo;
mod names;
mod node;
mod observe;
mod options;
mod parameters;
mod placement;
mod registration;
mod secrets;
mod socket;
mod transport;

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{CommandFactory, Parser};
use forebay_proto::csi::controller_server::ControllerServer;
use forebay_proto::csi::identity_server::IdentityServer;
use forebay_proto::csi::node_server::NodeServer;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use crate::admin::Admin;
use crate::agent::Agent;
use crate::cluster::{Clusters, Kubernetes};
use crate::config::{Cli, Command, Config, LogFormat};
use crate::controller::{ControllerService, Servers};
use crate::device_plugin::Offer;
use crate::identity::IdentityService;
use crate::in_flight::InFlight;
use crate::limits::CONCURRENT_CALLS_MAX;
use crate::node::{Deadlines, NodeService};
use crate::registration::Outcome;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::Completions { shell }) = cli.command {
        clap_complete::generate(shell, &mut Cli::command(), "forebay-csi", &mut io::stdout());
        return ExitCode::SUCCESS;
    }
    match run(cli.config) {
        Ok(()) => ExitCode::SUCCESS,
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
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the runtime")?
        .block_on(serve(config))
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
        IdentityService { servers: servers.clone(), is_node: node.is_some(), probes: InFlight::default() };

    let (registration, _) = watch::channel(Outcome::default());
    let listener = socket::listen_at(&config.endpoint)?;
    if let Some(address) = config.health_address {
        let registration = config.is_kubernetes_node().then(|| registration.subscribe());
        health::serve(address, identity.clone(), registration).await.context("--health-address")?;
    }
    let router = Server::builder()
        .concurrency_limit_per_connection(CONCURRENT_CALLS_MAX)
        .add_service(IdentityServer::new(identity))
        .add_optional_service(servers.map(|servers| ControllerServer::new(ControllerService::new(servers))))
        .add_optional_service(node.map(NodeServer::new));

    let (stop, stopping) = watch::channel(false);
    let stopped = |mut stopping: watch::Receiver<bool>| async move {
        // An error means that the sender is gone, which ends the server as well.
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    let joining = join_cluster(&config, registration, stopping.clone());
    tokio::pin!(joining);
    let shutdown = stopped(stopping.clone());
    let serving = router.serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown);
    tokio::pin!(serving);
    info!(
        version = env!("CARGO_PKG_VERSION"),
        mode = ?config.mode,
        endpoint = %config.endpoint.display(),
        "the CSI driver listens"
    );
    let name = tokio::select! {
        result = &mut serving => {
            result.context("serve CSI")?;
            bail!("the CSI socket was closed");
        }
        result = &mut joining => {
            result?;
            bail!("the registration with the kubelet was closed");
        }
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    info!(signal = name, "ending when the calls under way have ended");
    stop.send_replace(true);
    match timeout(config.drain_deadline, async { tokio::join!(serving, joining) }).await {
        Ok((served, left)) => {
            left?;
            served.context("serve CSI")?;
        }
        Err(_) => {
            warn!(seconds = config.drain_deadline.as_secs(), "calls are still under way, ending anyway")
        }
    }
    // The next one would replace it; a caller learns sooner this way.
    let _ = std::fs::remove_file(&config.endpoint);
    info!("ended");
    Ok(())
}

/// What a node of a Kubernetes cluster does beside serving CSI, until `stop`: it has itself registered by the kubelet and
/// publishes what it has. An error means that no kubelet would call the driver.
async fn join_cluster(
    config: &Config,
    registration: watch::Sender<Outcome>,
    mut stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let (true, Some(node)) = (config.is_kubernetes_node(), &config.node_id) else {
        let _ = stop.wait_for(|stop| *stop).await;
        return Ok(());
    };
    let client = kube::Client::try_default().await.context("find the Kubernetes API server")?;
    let (offer, offers) = watch::channel(Offer::default());
    let agent = Agent::new(client, node, &config.host_root, offer);
    let agent = tokio::spawn(agent.run(stop.clone()));
    let devices = tokio::spawn(device_plugin::run(config.device_plugins.clone(), offers, stop.clone()));
    registration::run(config.plugins_registry.clone(), config.endpoint.clone(), registration, stop).await?;
    devices.await.context("the device plugin")?;
    agent.await.context("the node agent")
}
