//! The lab's command line.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Parser, Subcommand};
use forebay_e2e::cache::Cache;
use forebay_e2e::foreign::{Options, ServerKind};
use forebay_e2e::images::{Images, clients, prune, suites};
use forebay_e2e::kubernetes::LocalApiServer;
use forebay_e2e::kubernetes::cluster::{self, Cluster};
use forebay_e2e::kubernetes::external_storage;
use forebay_e2e::kubernetes::room::{self, Entered};
use forebay_e2e::kubernetes::stage::Stage;
use forebay_e2e::kubernetes::tools::{self, Tools};
use forebay_e2e::kubernetes::{scenario as kubernetes_scenario, story as story_on_kubernetes};
use forebay_e2e::lab::{NodeSpec, client, storage};
use forebay_e2e::report::Table;
use forebay_e2e::{foreign, native, rundir, sanity, scenario, site, story, supervise, terminal};

/// Boots QEMU guests as nodes of a Forebay cluster and runs scenarios on them.
///
/// Images are built once and cached in $FOREBAY_CACHE (default ~/.cache/forebay). KVM is used if a trial boot works,
/// otherwise emulation; FOREBAY_ACCEL=kvm|tcg overrides this. Forebay's binaries are taken from this program's folder, or
/// from $FOREBAY_BINARIES.
#[derive(Parser)]
#[command(name = "forebay-lab", version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build all images that are not in the cache yet.
    Prepare {
        /// Look for newer packages in the archive first.
        #[arg(long)]
        refresh: bool,
        /// Build the images of nodes with SMB Direct, too: compiles kernel modules.
        #[arg(long)]
        smb_direct: bool,
    },
    /// Boot nodes and leave them running.
    Up {
        /// Their names; the one called `storage` has a disk.
        #[arg(long, default_value = "storage,node1,node2")]
        nodes: String,
        /// Name of the lab.
        #[arg(long, default_value = "default")]
        name: String,
        /// With SMB Direct in the kernel's client and in ksmbd, and with siw.
        #[arg(long)]
        smb_direct: bool,
    },
    /// Run a command on a node of a running lab, with this terminal's input and output.
    Exec {
        /// The lab, if several are up.
        #[arg(long)]
        lab: Option<String>,
        /// The node.
        node: String,
        /// Program and arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Open a shell on a node of a running lab.
    Shell {
        /// The lab, if several are up.
        #[arg(long)]
        lab: Option<String>,
        /// The node.
        node: String,
    },
    /// Show Forebay's main use case, step by step: one volume on two nodes.
    Quickstart {
        /// Leave the nodes and the volume up.
        #[arg(long)]
        keep: bool,
    },
    /// Run the scenarios in a separate lab. Fails if a scenario fails.
    Test {
        /// Only scenarios with a name that contains one of these.
        filters: Vec<String>,
        /// All scenarios, including those on trial.
        #[arg(long, conflicts_with = "filters")]
        on_trial: bool,
        /// Only scenarios of these labs.
        #[arg(long = "lab", value_enum, value_delimiter = ',')]
        places: Vec<scenario::Place>,
        /// The server to test.
        #[arg(long, value_enum, default_value = "forebay")]
        against: site::Kind,
        /// List their names and exit.
        #[arg(long)]
        list: bool,
    },
    /// Compare throughput with ksmbd's, in the same guests, over soft-RoCE and TCP. Exits with 1 if ours is lower.
    BesideKsmbd {
        /// Number of runs of each.
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Show the labs that are up.
    Status,
    /// Stop a running lab.
    Down {
        /// The lab, if several are up.
        #[arg(long)]
        lab: Option<String>,
    },
    /// Show or prune the cache.
    Cache {
        #[command(subcommand)]
        command: CacheCommand,
    },
    /// Build upstream's Kubernetes programs into the cache and show their paths.
    Tools {
        /// Only these.
        names: Vec<String>,
    },
    /// Run a separate API server (and etcd) on loopback: no nodes, no root. Prints the path of a kubeconfig; a signal stops
    /// it.
    ApiServer {
        /// Run the controller manager, too.
        #[arg(long)]
        controllers: bool,
    },
    /// Run csi-sanity against the driver and the server in a guest. Fails unless every applicable spec passes.
    Sanity,
    /// Run a real Kubernetes cluster: control plane on this machine, guests as nodes.
    Kubernetes {
        #[command(subcommand)]
        command: KubernetesCommand,
    },
    /// Run a command natively in the nodes' root file system: smbtorture, smbclient, smbd, python3 with impacket and
    /// smbprotocol. It shares this machine's network; what it writes outside /scratch and /tmp is discarded.
    RootExec {
        /// The folder to mount as /scratch, which is also the working directory.
        #[arg(long, default_value = ".")]
        work: PathBuf,
        /// Program and arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run foreign suites and clients (smbtorture, smbclient, impacket, smbprotocol) against a server on this machine.
    ///
    /// No guest is booted; the suites run natively in the nodes' root file system. Failing tests must be listed with a reason
    /// in e2e/foreign/known-failures.txt. A listed test that passes fails the run, too.
    Foreign {
        /// Only tests with a name that contains this.
        #[arg(default_value = "")]
        filter: String,
        /// The server to test: ours, or Samba's for comparison.
        #[arg(long, value_enum, default_value = "forebay")]
        server: ServerKind,
        /// Keep smbtorture's output in this folder, one file per test, and the servers' logs.
        #[arg(long)]
        logs: Option<PathBuf>,
        /// Number of tests that run in parallel, each against a separate server. They mostly wait.
        #[arg(long, default_value_t = 8)]
        lanes: usize,
    },
    /// Run a lab in this process (started by `up`).
    #[command(hide = true)]
    Supervise {
        #[arg(long)]
        name: String,
        #[arg(long)]
        nodes: String,
        #[arg(long)]
        smb_direct: bool,
    },
}

#[derive(Subcommand)]
enum KubernetesCommand {
    /// Build all images and programs that are not in the cache yet.
    Prepare,
    /// Start a cluster, and keep it until a signal. Prints the path of a kubeconfig.
    Up {
        /// Its nodes.
        #[arg(long, default_value = "storage=1,compute=2")]
        nodes: String,
        /// Archive of an image that every node gets; may be repeated.
        #[arg(long = "image")]
        images: Vec<PathBuf>,
    },
    /// Show a first use of Forebay: install, claim, train, grow, look.
    Quickstart {
        #[command(flatten)]
        on: On,
        /// Use the cluster of $KUBECONFIG instead of the lab's, with the namespace forebay-quickstart. Anything already
        /// installed there is not changed.
        #[arg(long)]
        existing_cluster: bool,
        /// Further argument for helm on an existing cluster, e.g. --helm=--set=image.repository=…; may be repeated.
        #[arg(long = "helm", allow_hyphen_values = true, requires = "existing_cluster")]
        helm_arguments: Vec<String>,
        /// Afterwards, power off a node, and show that another node serves its instance. Not for nodes of an existing
        /// cluster.
        #[arg(long, conflicts_with = "existing_cluster")]
        node_loss: bool,
        /// Keep the cluster, with everything on it, until a signal.
        #[arg(long)]
        keep: bool,
    },
    /// Run the scenarios on a cluster of the lab. Fails if a scenario fails. Takes two images: upgrades install the second.
    Test {
        /// Only scenarios with a name that contains one of these.
        filters: Vec<String>,
        #[command(flatten)]
        on: On,
        /// List their names and exit.
        #[arg(long)]
        list: bool,
    },
    /// Run Kubernetes' own tests for drivers of volumes (External.Storage). Takes hours. Fails if a test fails that is not on
    /// the list.
    ExternalStorage {
        #[command(flatten)]
        choice: external_storage::Choice,
        #[command(flatten)]
        on: On,
    },
}

/// Where a story or scenarios run.
#[derive(Args)]
struct On {
    /// Archive of Forebay's image (scripts/image.sh), for the lab's nodes; may be repeated.
    #[arg(long = "image")]
    images: Vec<PathBuf>,
    /// The lab's nodes.
    #[arg(long, default_value = "storage=1,compute=2")]
    nodes: String,
    /// The chart.
    #[arg(long, default_value = "charts/forebay")]
    chart: PathBuf,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// Show all entries.
    List,
    /// Remove the entries that the current recipes do not use. Entries of scripts/ (binaries, image-base) are kept.
    Prune {
        /// Remove entries in use, too.
        #[arg(long)]
        all: bool,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("forebay-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<u8> {
    match command {
        Command::Prepare { refresh, smb_direct } => {
            rundir::clean_up_on_signals()?;
            let cache = Cache::open()?;
            if smb_direct {
                Images::prepare_with_smb_direct(&cache, refresh)?;
                for suite in suites::ALL {
                    suite.get(&cache)?;
                }
            } else {
                Images::prepare(&cache, refresh)?;
            }
            if let Err(error) = clients::get(&cache) {
                eprintln!("forebay-lab: smbprotocol is not available to root-exec: {error:#}");
            }
            cache.hand_to_sudo_user()?;
        }
        Command::Up { nodes, name, smb_direct } => {
            specs(&nodes, smb_direct)?;
            supervise::up(&name, &nodes, smb_direct)?;
            println!("forebay-lab shell --lab {name} NODE   opens a shell on one of: {nodes}");
            println!("forebay-lab down --lab {name}         ends the lab");
        }
        Command::Foreign { filter, server, logs, lanes } => {
            rundir::clean_up_on_signals()?;
            return Ok(u8::from(!foreign::run(&Options { filter, server, logs, lanes })?));
        }
        Command::Supervise { name, nodes, smb_direct } => {
            rundir::clean_up_on_signals()?;
            supervise::supervise(&name, &specs(&nodes, smb_direct)?)?;
        }
        Command::Exec { lab, node, command } => {
            let channel = supervise::connect(&supervise::find(lab.as_deref())?, &node)?;
            return Ok(terminal::attach(&channel, command, false)? as u8);
        }
        Command::Shell { lab, node } => {
            let channel = supervise::connect(&supervise::find(lab.as_deref())?, &node)?;
            return Ok(terminal::attach(&channel, vec!["bash".into(), "-l".into()], true)? as u8);
        }
        Command::Quickstart { keep } => {
            rundir::clean_up_on_signals()?;
            return Ok(if story::tell(keep)? { 0 } else { 1 });
        }
        Command::Test { list: true, .. } => {
            for scenario in scenario::all() {
                println!("{}", scenario.name);
            }
        }
        Command::Test { filters, on_trial, places, against, .. } => {
            rundir::clean_up_on_signals()?;
            return Ok(if scenario::run(&filters, &places, on_trial, against)? { 0 } else { 1 });
        }
        Command::BesideKsmbd { rounds } => {
            rundir::clean_up_on_signals()?;
            return Ok(u8::from(!scenario::beside_ksmbd::run(rounds)?));
        }
        Command::Status => {
            for (name, folder) in rundir::running()? {
                println!("{name}\t{}", folder.display());
            }
        }
        Command::Down { lab } => supervise::down(lab.as_deref())?,
        Command::Cache { command } => cache(command)?,
        Command::Tools { names } => {
            let tools = if names.is_empty() {
                Tools::prepare(&Cache::open()?, tools::ALL)?
            } else {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                Tools::prepare(&Cache::open()?, &[&names])?
            };
            for (_, path) in tools.paths() {
                println!("{}", path.display());
            }
        }
        Command::ApiServer { controllers } => {
            rundir::clean_up_on_signals()?;
            let mut server = LocalApiServer::start(controllers)?;
            println!("{}", server.kubeconfig().display());
            loop {
                server.check()?;
                std::thread::sleep(Duration::from_millis(500));
            }
        }
        Command::Sanity => {
            rundir::clean_up_on_signals()?;
            return Ok(u8::from(!sanity::run()?));
        }
        Command::Kubernetes { command } => return kubernetes(command),
        Command::RootExec { work, command } => {
            let work = work.canonicalize().with_context(|| format!("--work {}", work.display()))?;
            let status =
                native::command(&Cache::open()?, &work, &command)?.status().context("start unshare")?;
            return Ok(status.code().unwrap_or(1) as u8);
        }
    }
    Ok(0)
}

fn specs(nodes: &str, smb_direct: bool) -> Result<Vec<NodeSpec>> {
    let mut specs: Vec<NodeSpec> = Vec::new();
    for name in nodes.split(',') {
        let valid = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        if name.is_empty() || name.len() > 32 || !name.bytes().all(valid) {
            bail!("a node's name is 1 to 32 lower-case letters, digits and hyphens, not {name:?}");
        }
        if specs.iter().any(|spec| spec.name == name) {
            bail!("{name} is named twice");
        }
        let spec = if name == "storage" { storage() } else { client(name) };
        specs.push(if smb_direct { spec.with_smb_direct() } else { spec });
    }
    Ok(specs)
}

fn kubernetes(command: KubernetesCommand) -> Result<u8> {
    match command {
        KubernetesCommand::Prepare => cluster::prepare()?,
        KubernetesCommand::Up { nodes, images } => {
            let nodes = cluster::plan(&nodes)?;
            let room = match room::enter(cluster::prepare)? {
                Entered::Inside(room) => room,
                Entered::Ended(code) => return Ok(code),
            };
            rundir::clean_up_on_signals()?;
            let mut cluster =
                Cluster::start(&format!("kubernetes-{}", std::process::id()), &room, &nodes, &images)?;
            println!("export KUBECONFIG={}", cluster.outside_kubeconfig().display());
            println!("{} get nodes", cluster.kubectl().program().display());
            loop {
                cluster.check()?;
                std::thread::sleep(Duration::from_millis(500));
            }
        }
        KubernetesCommand::Quickstart { on, existing_cluster, helm_arguments, node_loss, keep } => {
            let started = Instant::now();
            let mut table = Table::default();
            let stage = match if existing_cluster {
                on.existing(&helm_arguments)
            } else {
                on.stage(false, &mut table)
            }? {
                Place::Here(stage) => stage,
                Place::Ended(code) => return Ok(code),
            };
            let good = story_on_kubernetes::tell(&stage, &mut table, started, node_loss);
            if keep && let Some(cluster) = stage.cluster() {
                println!("The cluster stays up until this is interrupted. In another terminal:");
                println!("  export KUBECONFIG={}", cluster.outside_kubeconfig().display());
                println!("  {} get pods -A", stage.kubectl().program().display());
                loop {
                    std::thread::sleep(Duration::from_millis(500));
                    cluster.lab().check()?;
                }
            }
            return Ok(u8::from(!good));
        }
        KubernetesCommand::Test { list: true, .. } => {
            for scenario in kubernetes_scenario::ALL {
                println!("{}", scenario.name);
            }
        }
        KubernetesCommand::Test { filters, on, .. } => {
            ensure!(
                on.images.len() >= 2,
                "two images are needed: --image NOW --image NEXT (scripts/image.sh)"
            );
            let mut table = Table::default();
            let stage = match on.stage(true, &mut table)? {
                Place::Here(stage) => stage,
                Place::Ended(code) => return Ok(code),
            };
            return Ok(u8::from(!kubernetes_scenario::run(&stage, &filters, &mut table)?));
        }
        KubernetesCommand::ExternalStorage { choice, mut on } => {
            on.images.extend(external_storage::prepare()?);
            let mut table = Table::default();
            let stage = match on.stage(false, &mut table)? {
                Place::Here(stage) => stage,
                Place::Ended(code) => return Ok(code),
            };
            return Ok(u8::from(!external_storage::run(&stage, &choice, &mut table)?));
        }
    }
    Ok(0)
}

/// A stage in this process, or the end of the process that had one.
enum Place {
    Here(Box<Stage>),
    Ended(u8),
}

impl On {
    fn existing(&self, helm_arguments: &[String]) -> Result<Place> {
        let tools = Tools::prepare(&Cache::open()?, &[&["kubectl"], tools::CLIENT])?;
        let stage = Stage::existing(tools.path("kubectl"), tools.path("helm"), &self.chart, helm_arguments)?;
        Ok(Place::Here(Box::new(stage)))
    }

    /// `smb_direct`: whether the nodes' kernels have it.
    fn stage(&self, smb_direct: bool, table: &mut Table) -> Result<Place> {
        let mut nodes = cluster::plan(&self.nodes)?;
        nodes.iter_mut().for_each(|node| node.smb_direct = smb_direct);
        let prepare = if smb_direct { cluster::prepare_with_smb_direct } else { cluster::prepare };
        let room = match room::enter(prepare)? {
            Entered::Inside(room) => room,
            Entered::Ended(code) => return Ok(Place::Ended(code)),
        };
        rundir::clean_up_on_signals()?;
        let name = format!("kubernetes-{}", std::process::id());
        let mut cluster = None;
        table.run("a control plane, and guests as nodes", || {
            cluster = Some(Cluster::start(&name, &room, &nodes, &self.images)?);
            Ok(self.nodes.clone())
        });
        let stage = Stage::on(cluster.context("the cluster did not come up")?, &self.chart)?;
        Ok(Place::Here(Box::new(stage)))
    }
}

fn cache(command: CacheCommand) -> Result<()> {
    let cache = Cache::open()?;
    match command {
        CacheCommand::List => {
            println!("{}", cache.root().display());
            for entry in cache.list()? {
                let days = entry.used.elapsed().unwrap_or_default().as_secs() / 86_400;
                println!("{:>8} MiB  used {days:>3} days ago  {}", entry.bytes >> 20, entry.name);
            }
        }
        CacheCommand::Prune { all } => {
            for name in prune::prune(&cache, all)? {
                println!("removed {name}");
            }
        }
    }
    Ok(())
}
