//! The command line.

use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use forebay_proto::admin::admin_client::AdminClient;
use forebay_proto::admin::{self as api};
use forebay_proto::root;
use tonic::transport::{Channel, Endpoint};
use zeroize::Zeroizing;

use crate::advertise::Advertised;
use crate::check;
use crate::config::{self, ADMIN_SOCKET, Bytes, Config, DEFAULT_PATH};
use crate::daemon::{self, DaemonError, Exit};
use crate::log;

#[derive(Debug, Parser)]
#[command(
    name = "forebay-server",
    version,
    about = "The Forebay SMB server: ReadWriteMany volumes for Kubernetes"
)]
#[command(after_long_help = config::help())]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve until SIGTERM. `forebay-server --help` explains every option of the configuration.
    Run {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        advertise: AdvertiseArgs,
    },
    /// Print a configuration with every option explained.
    SampleConfig,
    /// Check a configuration and show its effects on this machine, without starting anything.
    #[command(alias = "check")]
    CheckConfig {
        #[command(flatten)]
        config: ConfigArgs,
        #[command(flatten)]
        advertise: AdvertiseArgs,
    },
    /// Print completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Create, delete and inspect volumes of a running server.
    #[command(subcommand)]
    Volume(VolumeCommand),
    /// Create, delete and inspect snapshots of a running server's volumes.
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// List the pools of a running server.
    Pools(AdminArgs),
    /// List the sessions of a running server.
    Sessions(AdminArgs),
    /// List the open files of a running server.
    OpenFiles {
        /// Only those of this volume.
        volume: Option<String>,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Close a session and all its open files.
    CloseSession {
        /// Its id, as shown by `sessions`.
        id: u64,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Show the version, addresses and state of a running server.
    Info(AdminArgs),
    /// Make a running server refuse new connections and requests, and finish the current ones.
    Drain {
        /// Then stop it, as SIGTERM does.
        #[arg(long)]
        exit: bool,
        #[command(flatten)]
        admin: AdminArgs,
    },
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// The configuration file.
    #[arg(long, value_name = "FILE", env = "FOREBAY_CONFIG", default_value = DEFAULT_PATH)]
    config: PathBuf,
}

#[derive(Debug, Args)]
struct AdvertiseArgs {
    /// Addresses to use instead of server.advertise, separated by commas.
    #[arg(long, value_name = "ADDRESS", env = "FOREBAY_ADVERTISE", value_delimiter = ',')]
    advertise: Option<Vec<Advertised>>,
}

impl AdvertiseArgs {
    fn apply(self, config: &mut Config) {
        if let Some(advertise) = self.advertise {
            config.server.advertise = advertise;
        }
    }
}

#[derive(Debug, Args)]
struct AdminArgs {
    /// The server's admin socket.
    #[arg(long, value_name = "PATH", env = "FOREBAY_ADMIN_SOCKET", default_value = ADMIN_SOCKET)]
    socket: PathBuf,
}

#[derive(Debug, Args)]
struct CredentialArgs {
    /// User name.
    #[arg(long)]
    username: String,
    /// File with the password (one line); `-` for standard input. Default: the value of FOREBAY_PASSWORD. A password is never
    /// an argument, because every user of the machine could read it.
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum QuotaArg {
    /// The pool's setting.
    Default,
    /// A hard limit.
    Hard,
    /// No limit.
    None,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProtectionArg {
    /// The client decides.
    Optional,
    /// Signed or encrypted.
    Sign,
    /// Encrypted.
    Seal,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PriorityArg {
    /// Before other volumes.
    High,
    /// Like other volumes.
    Normal,
    /// After other volumes, but never stopped.
    Low,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    /// Create a volume.
    Create {
        /// Its id, which is the name of its share.
        id: String,
        /// Its capacity in bytes, or with a unit: KiB, MiB, GiB or TiB.
        #[arg(long)]
        size: Bytes,
        /// Its pool. Default: the first pool with enough space.
        #[arg(long, default_value = "")]
        pool: String,
        /// How its capacity is enforced.
        #[arg(long, value_enum, default_value = "default")]
        quota: QuotaArg,
        /// How its traffic must be protected.
        #[arg(long, value_enum, default_value = "optional")]
        protection: ProtectionArg,
        /// Create it with the contents of this snapshot. Default: an empty volume.
        #[arg(long, value_name = "ID", conflicts_with = "from_volume")]
        from_snapshot: Option<String>,
        /// Create it with the current contents of this volume. Default: an empty volume.
        #[arg(long, value_name = "ID")]
        from_volume: Option<String>,
        /// Owner of an empty volume's root, by number. Clients with the POSIX extensions enforce it. Default: the server's user
        /// and group.
        #[arg(long, value_name = "UID[:GID]", value_parser = root_owner, conflicts_with_all = ["from_snapshot", "from_volume"])]
        root_owner: Option<(u32, Option<u32>)>,
        /// Permission bits of an empty volume's root, in octal. Default: 0777.
        #[arg(long, value_name = "MODE", value_parser = root_mode, conflicts_with_all = ["from_snapshot", "from_volume"])]
        root_mode: Option<u32>,
        #[command(flatten)]
        credentials: CredentialArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Delete a volume and all its data.
    Delete {
        /// Its id.
        id: String,
        /// Delete it even if files are open.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Increase a volume's capacity.
    Expand {
        /// Its id.
        id: String,
        /// Its new capacity.
        #[arg(long)]
        size: Bytes,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// List volumes.
    List(AdminArgs),
    /// Show one volume.
    Stat {
        /// Its id.
        id: String,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Replace a volume's limits and priority, immediately and for open files, too. Requests that exceed a limit wait; they
    /// are not refused.
    SetQos {
        /// Its id.
        id: String,
        /// Bytes read, written and copied per second, at least 1MiB. Default: no limit.
        #[arg(long)]
        bytes_per_second: Option<Bytes>,
        /// Operations (open, list, read, write, change) per second, at least 10. Default: no limit.
        #[arg(long)]
        operations_per_second: Option<u64>,
        /// Order relative to other volumes if several have READs and WRITEs to begin.
        #[arg(long, value_enum, default_value = "normal")]
        priority: PriorityArg,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Replace a volume's credentials.
    SetCredentials {
        /// Its id.
        id: String,
        /// Keep the previous ones valid for new sessions.
        #[arg(long)]
        keep_previous: bool,
        #[command(flatten)]
        credentials: CredentialArgs,
        #[command(flatten)]
        admin: AdminArgs,
    },
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Create a snapshot of a volume. Changes by its clients wait until the snapshot is complete, at most 30 s.
    Create {
        /// The snapshot's id.
        id: String,
        /// The volume.
        #[arg(long)]
        volume: String,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Create a snapshot of each of several volumes, all of the same moment: `<ID>-<volume>`. Changes of all these volumes
    /// wait until the last snapshot is complete, at most 30 s.
    CreateGroup {
        /// The group's id.
        id: String,
        /// A volume; repeat the option for each.
        #[arg(long = "volume", required = true)]
        volumes: Vec<String>,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Delete all snapshots of a group. Volumes created from them remain.
    DeleteGroup {
        /// Its id.
        id: String,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// Delete a snapshot. Volumes created from it remain.
    Delete {
        /// Its id.
        id: String,
        #[command(flatten)]
        admin: AdminArgs,
    },
    /// List snapshots.
    List {
        /// Only those of this volume.
        #[arg(long, default_value = "")]
        volume: String,
        #[command(flatten)]
        admin: AdminArgs,
    },
}

/// Parses the command line and runs the command.
#[must_use]
pub fn main() -> Exit {
    let result = match Cli::parse().command {
        Command::Run { config, advertise } => return run(&config.config, advertise),
        Command::SampleConfig => print(&config::sample()),
        Command::CheckConfig { config: args, advertise } => match Config::read(&args.config) {
            Ok(mut config) => {
                advertise.apply(&mut config);
                let report = check::report(&config);
                let verdict = if report.exit == Exit::Done { "valid" } else { "the server would not start" };
                if let Err(error) = print(&format!("{}: {verdict}\n{}", args.config.display(), report.text)) {
                    return fail(Exit::Failed, &error);
                }
                return report.exit;
            }
            Err(error) => return fail(Exit::Config, &error),
        },
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "forebay-server", &mut std::io::stdout());
            Ok(())
        }
        command => ask(command),
    };
    match result {
        Ok(()) => Exit::Done,
        Err(error) => fail(Exit::Failed, &error),
    }
}

fn fail(exit: Exit, error: &dyn std::fmt::Display) -> Exit {
    // If standard error is closed, there is no other place to report this.
    let _ = writeln!(std::io::stderr(), "forebay-server: {error}");
    exit
}

fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader of the pipe has closed it.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn run(path: &Path, advertise: AdvertiseArgs) -> Exit {
    let mut config = match Config::read(path) {
        Ok(config) => config,
        Err(error) => return fail(Exit::Config, &error),
    };
    advertise.apply(&mut config);
    log::start(&config.log);
    match daemon::run(&config) {
        Ok(()) => Exit::Done,
        Err(error) => {
            if let DaemonError::Namespace(refused) = &error
                && let Some(text) = refused.refusal(config.instance.epoch)
            {
                tell_kubelet(Path::new(TERMINATION_LOG), &text);
            }
            fail(error.exit(), &error)
        }
    }
}

/// The file from which the kubelet reads a container's final message (`terminationMessagePath`); the kubelet creates it.
const TERMINATION_LOG: &str = "/dev/termination-log";

fn tell_kubelet(path: &Path, text: &str) {
    let written = std::fs::OpenOptions::new().write(true).truncate(true).open(path);
    if let Err(error) = written.and_then(|mut file| file.write_all(text.as_bytes()))
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(%error, path = %path.display(), "could not report the reason to the kubelet");
    }
}

fn password(args: &CredentialArgs) -> anyhow::Result<Zeroizing<String>> {
    let mut text = Zeroizing::new(String::new());
    match &args.password_file {
        Some(path) if path == Path::new("-") => {
            if std::io::stdin().is_terminal() {
                writeln!(std::io::stderr(), "password (shown while you type), then Enter and Ctrl-D:")?;
            }
            std::io::stdin().read_to_string(&mut text)?;
        }
        Some(path) => {
            let open = std::fs::File::open(path).and_then(|mut file| file.read_to_string(&mut text));
            open.map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
        }
        None => {
            let variable = std::env::var("FOREBAY_PASSWORD");
            *text = variable
                .map_err(|_| anyhow::anyhow!("no password: use --password-file, or set FOREBAY_PASSWORD"))?;
        }
    }
    let length = text.trim_end_matches(['\r', '\n']).len();
    text.truncate(length);
    Ok(text)
}

fn credentials(args: &CredentialArgs) -> anyhow::Result<Option<api::Credentials>> {
    Ok(Some(api::Credentials { username: args.username.clone(), password: password(args)?.to_string() }))
}

fn ask(command: Command) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        match command {
            Command::Volume(command) => volume(command).await,
            Command::Snapshot(command) => snapshot(command).await,
            Command::Pools(admin) => {
                let response = connect(&admin).await?.list_pools(api::ListPoolsRequest {}).await.map_err(plain)?;
                let rows = response.into_inner().pools.into_iter().map(|p| {
                    let bytes = [p.total_bytes, p.free_bytes, p.provisioned_bytes].map(size);
                    let [total, free, provisioned] = bytes;
                    vec![p.name, p.kind, p.path, p.quota, total, free, provisioned]
                });
                table(&["NAME", "KIND", "PATH", "QUOTA", "SIZE", "FREE", "PROVISIONED"], rows)
            }
            Command::Sessions(admin) => {
                let request = api::ListSessionsRequest {};
                let response = connect(&admin).await?.list_sessions(request).await.map_err(plain)?;
                let rows = response.into_inner().sessions.into_iter().map(|s| {
                    let cipher = if s.cipher.is_empty() { "-".to_owned() } else { s.cipher };
                    let signed = if s.signed { "yes" } else { "no" };
                    // An older server reports one transport for the whole session.
                    let transport = if s.transports.is_empty() { s.transport } else { s.transports.join(",") };
                    vec![
                        s.session_id.to_string(), s.username, s.client_addresses.join(","), transport, s.dialect, signed.to_owned(), cipher,
                        s.volume_ids.join(","), s.open_files.to_string(),
                    ]
                });
                table(&["SESSION", "USER", "CLIENT", "TRANSPORT", "DIALECT", "SIGNED", "CIPHER", "VOLUMES", "OPEN"], rows)
            }
            Command::OpenFiles { volume, admin } => {
                let request = api::ListOpenFilesRequest { volume_id: volume.unwrap_or_default() };
                let response = connect(&admin).await?.list_open_files(request).await.map_err(plain)?;
                let rows = response.into_inner().open_files.into_iter().map(|f| {
                    let access = format!("{:#010x}", f.access);
                    let path = if f.directory { format!("{}/", f.path) } else { f.path };
                    vec![f.session_id.to_string(), f.volume_id, access, f.byte_range_locks.to_string(), path]
                });
                table(&["SESSION", "VOLUME", "ACCESS", "LOCKS", "PATH"], rows)
            }
            Command::CloseSession { id, admin } => {
                let request = api::CloseSessionRequest { session_id: id };
                connect(&admin).await?.close_session(request).await.map_err(plain)?;
                Ok(())
            }
            Command::Drain { exit, admin } => {
                connect(&admin).await?.drain(api::DrainRequest { exit }).await.map_err(plain)?;
                Ok(())
            }
            Command::Info(admin) => {
                let request = api::GetServerInfoRequest {};
                let info = connect(&admin).await?.get_server_info(request).await.map_err(plain)?.into_inner();
                print(&format!(
                    "version     {}\nguid        {}\nI/O engine  {}\nlistening   {}\nadvertised  {}\ndraining    {}\n",
                    info.version,
                    info.server_guid,
                    info.io_engine,
                    info.listen_addresses.join(" "),
                    info.advertised_addresses.join(" "),
                    if info.draining { "yes" } else { "no" },
                ))
            }
            Command::Run { .. } | Command::SampleConfig | Command::CheckConfig { .. } | Command::Completions { .. } => Ok(()),
        }
    })
}

fn root_owner(text: &str) -> Result<(u32, Option<u32>), String> {
    root::owner(text).ok_or_else(|| "must be UID or UID:GID, by number".to_owned())
}

fn root_mode(text: &str) -> Result<u32, String> {
    root::mode(text).ok_or_else(|| "must be octal, at most 7777".to_owned())
}

async fn volume(command: VolumeCommand) -> anyhow::Result<()> {
    let shown = match command {
        VolumeCommand::Create {
            id,
            size,
            pool,
            quota,
            protection,
            from_snapshot,
            from_volume,
            root_owner,
            root_mode,
            credentials: who,
            admin,
        } => {
            let request = api::CreateVolumeRequest {
                volume_id: id,
                pool,
                capacity_bytes: size.0,
                quota: match quota {
                    QuotaArg::Default => api::Quota::Unspecified.into(),
                    QuotaArg::Hard => api::Quota::Hard.into(),
                    QuotaArg::None => api::Quota::None.into(),
                },
                protection: match protection {
                    ProtectionArg::Optional => api::Protection::Optional.into(),
                    ProtectionArg::Sign => api::Protection::Sign.into(),
                    ProtectionArg::Seal => api::Protection::Seal.into(),
                },
                credentials: credentials(&who)?,
                labels: Default::default(),
                source_snapshot_id: from_snapshot.unwrap_or_default(),
                source_volume_id: from_volume.unwrap_or_default(),
                root: (root_owner.is_some() || root_mode.is_some()).then(|| api::Root {
                    uid: root_owner.map(|(uid, _)| uid),
                    gid: root_owner.and_then(|(_, gid)| gid),
                    mode: root_mode,
                }),
            };
            connect(&admin).await?.create_volume(request).await.map_err(plain)?.into_inner().volume
        }
        VolumeCommand::Delete { id, force, admin } => {
            let request = api::DeleteVolumeRequest { volume_id: id, force };
            connect(&admin).await?.delete_volume(request).await.map_err(plain)?;
            return Ok(());
        }
        VolumeCommand::Expand { id, size, admin } => {
            let request = api::ExpandVolumeRequest { volume_id: id, capacity_bytes: size.0 };
            connect(&admin).await?.expand_volume(request).await.map_err(plain)?.into_inner().volume
        }
        VolumeCommand::Stat { id, admin } => {
            let request = api::StatVolumeRequest { volume_id: id };
            connect(&admin).await?.stat_volume(request).await.map_err(plain)?.into_inner().volume
        }
        VolumeCommand::SetQos { id, bytes_per_second, operations_per_second, priority, admin } => {
            let qos = api::Qos {
                bytes_per_second: bytes_per_second.map_or(0, |bytes| bytes.0),
                operations_per_second: operations_per_second.unwrap_or(0),
                priority: match priority {
                    PriorityArg::High => api::Priority::High.into(),
                    PriorityArg::Normal => api::Priority::Normal.into(),
                    PriorityArg::Low => api::Priority::Low.into(),
                },
            };
            let request = api::SetQosRequest { volume_id: id, qos: Some(qos) };
            connect(&admin).await?.set_qos(request).await.map_err(plain)?.into_inner().volume
        }
        VolumeCommand::SetCredentials { id, keep_previous, credentials: who, admin } => {
            let request =
                api::SetCredentialsRequest { volume_id: id, credentials: credentials(&who)?, keep_previous };
            connect(&admin).await?.set_credentials(request).await.map_err(plain)?;
            return Ok(());
        }
        VolumeCommand::List(admin) => return list(&admin).await,
    };
    show(shown)
}

async fn snapshot(command: SnapshotCommand) -> anyhow::Result<()> {
    match command {
        SnapshotCommand::Create { id, volume, admin } => {
            let request =
                api::CreateSnapshotRequest { snapshot_id: id, volume_id: volume, labels: Default::default() };
            let made = connect(&admin).await?.create_snapshot(request).await.map_err(plain)?.into_inner();
            show_snapshots(made.snapshot)
        }
        SnapshotCommand::CreateGroup { id, volumes, admin } => {
            let member = |volume_id: String| api::SnapshotGroupMember {
                snapshot_id: format!("{id}-{volume_id}"),
                volume_id,
            };
            let members = volumes.into_iter().map(member).collect();
            let request =
                api::CreateSnapshotGroupRequest { group_id: id.clone(), members, labels: Default::default() };
            let mut client = connect(&admin).await?;
            let made = client.create_snapshot_group(request).await.map_err(plain)?.into_inner();
            show_snapshots(made.snapshots)
        }
        SnapshotCommand::DeleteGroup { id, admin } => {
            let request = api::DeleteSnapshotGroupRequest { group_id: id };
            connect(&admin).await?.delete_snapshot_group(request).await.map_err(plain)?;
            Ok(())
        }
        SnapshotCommand::Delete { id, admin } => {
            let request = api::DeleteSnapshotRequest { snapshot_id: id };
            connect(&admin).await?.delete_snapshot(request).await.map_err(plain)?;
            Ok(())
        }
        SnapshotCommand::List { volume, admin } => {
            let mut client = connect(&admin).await?;
            let (mut page_token, mut snapshots) = (String::new(), Vec::new());
            loop {
                let request =
                    api::ListSnapshotsRequest { page_token, volume_id: volume.clone(), ..Default::default() };
                let page = client.list_snapshots(request).await.map_err(plain)?.into_inner();
                snapshots.extend(page.snapshots);
                page_token = page.next_page_token;
                if page_token.is_empty() {
                    return show_snapshots(snapshots);
                }
            }
        }
    }
}

fn show_snapshots(snapshots: impl IntoIterator<Item = api::Snapshot>) -> anyhow::Result<()> {
    let rows = snapshots.into_iter().map(|s| {
        let created = s.created.map(|created| created.to_string()).unwrap_or_default();
        let (capacity, used) = (size(s.capacity_bytes), size(s.used_bytes));
        vec![s.snapshot_id, s.volume_id, s.pool, capacity, used, created, s.group_id]
    });
    table(&["SNAPSHOT", "VOLUME", "POOL", "CAPACITY", "USED", "CREATED", "GROUP"], rows)
}

async fn list(admin: &AdminArgs) -> anyhow::Result<()> {
    let mut client = connect(admin).await?;
    let mut page_token = String::new();
    let mut volumes = Vec::new();
    loop {
        let request = api::ListVolumesRequest { page_size: 0, page_token };
        let page = client.list_volumes(request).await.map_err(plain)?.into_inner();
        volumes.extend(page.volumes);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return show(volumes);
        }
    }
}

fn show(volumes: impl IntoIterator<Item = api::Volume>) -> anyhow::Result<()> {
    let rows = volumes.into_iter().map(|v| {
        let capacity = if v.capacity_bytes == 0 { "none".to_owned() } else { size(v.capacity_bytes) };
        let protection = match v.protection() {
            api::Protection::Sign => "sign",
            api::Protection::Seal => "seal",
            api::Protection::Optional | api::Protection::Unspecified => "optional",
        };
        vec![
            v.volume_id,
            v.pool,
            capacity,
            size(v.used_bytes),
            v.username,
            protection.to_owned(),
            limits(&v.qos.unwrap_or_default()),
            v.sessions.to_string(),
            v.open_files.to_string(),
        ]
    });
    table(&["VOLUME", "POOL", "CAPACITY", "USED", "USER", "PROTECTION", "QOS", "SESSIONS", "OPEN"], rows)
}

/// "100 MiB/s,500/s,low"; "-" without limits at normal priority.
fn limits(qos: &api::Qos) -> String {
    let bytes = (qos.bytes_per_second > 0).then(|| format!("{}/s", size(qos.bytes_per_second)));
    let operations = (qos.operations_per_second > 0).then(|| format!("{}/s", qos.operations_per_second));
    let priority = match qos.priority() {
        api::Priority::High => Some("high".to_owned()),
        api::Priority::Low => Some("low".to_owned()),
        api::Priority::Normal | api::Priority::Unspecified => None,
    };
    let all: Vec<String> = [bytes, operations, priority].into_iter().flatten().collect();
    if all.is_empty() { "-".to_owned() } else { all.join(",") }
}

async fn connect(admin: &AdminArgs) -> anyhow::Result<AdminClient<Channel>> {
    let path = admin.socket.clone();
    let shown = path.display().to_string();
    // The address is a placeholder: the connector uses the socket.
    let endpoint = Endpoint::from_static("http://forebay-server");
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { tokio::net::UnixStream::connect(path).await.map(hyper_util::rt::TokioIo::new) }
    });
    let channel = endpoint.connect_with_connector(connector).await.map_err(|error| {
        let reason = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        anyhow::anyhow!("{shown}: {reason}: is the server running, and is this its admin.socket?")
    })?;
    Ok(AdminClient::new(channel))
}

fn plain(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{} ({:?})", status.message(), status.code())
}

fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0 && value.fract() > 0.0);
    format!("{value:.digits$} {}", units[unit])
}

fn table(header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> anyhow::Result<()> {
    let header = header.iter().map(ToString::to_string).collect();
    let rows: Vec<Vec<String>> = std::iter::once(header).chain(rows).collect();
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max();
    let widths: Vec<usize> = (0..rows[0].len()).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn termination_message_is_written_only_if_its_file_exists() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("termination-log");
        tell_kubelet(&path, "{}");
        assert!(!path.exists(), "outside of Kubernetes there is none");
        std::fs::write(&path, "of an earlier start, and longer").expect("made");
        tell_kubelet(&path, "{\"reason\":\"Superseded\"}");
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "{\"reason\":\"Superseded\"}");
    }

    #[test]
    fn command_line_is_consistent_and_takes_no_password() {
        Cli::command().debug_assert();
        let attempt = [
            "forebay-server",
            "volume",
            "create",
            "v",
            "--size",
            "1GiB",
            "--username",
            "u",
            "--password",
            "p",
        ];
        assert!(Cli::try_parse_from(attempt).is_err());
        assert!(Cli::try_parse_from(&attempt[..8]).is_ok());
        let help = Cli::command().render_long_help().to_string();
        assert!(config::options().all(|option| help.contains(option.key)));
    }

    #[test]
    fn qos_limits_are_shown_or_a_dash_if_there_are_none() {
        let qos = api::Qos {
            bytes_per_second: 100 << 20,
            operations_per_second: 500,
            priority: api::Priority::Low.into(),
        };
        assert_eq!(limits(&qos), "100 MiB/s,500/s,low");
        assert_eq!(limits(&api::Qos::default()), "-");
    }

    #[test]
    fn sizes_are_shown_in_binary_units() {
        assert_eq!(size(512), "512 B");
        assert_eq!(size(1 << 30), "1 GiB");
        assert_eq!(size(1536 << 20), "1.5 GiB");
    }
}
