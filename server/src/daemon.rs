//! The daemon's life cycle: start, serve, drain, end.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_proto::admin::admin_server::AdminServer;
use forebay_smb::engine::{Encryption as WireEncryption, Predecessor, Server, ServerConfig};
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::server::Connected;
use tracing::{debug, error, info, warn};

use crate::address::{AddressError, Addresses};
use crate::admin::{self, About, AdminService, SocketError};
use crate::backend::directory::quota;
use crate::buffers::BufferPool;
use crate::catalog::Catalog;
use crate::clock;
use crate::config::{Config, Encryption, IoEngine, Rdma, Signing};
use crate::eventloop::{Arrival, EventLoop, Inbox, Loops, Shared};
use crate::health::Health;
use crate::http;
use crate::interfaces;
use crate::io::Waker;
use crate::io::readiness::Readiness;
use crate::io::uring::{self, Unavailable, Uring};
use crate::keytab::{KeytabFile, KeytabFileError};
use crate::lanes::Lanes;
use crate::life::Life;
use crate::limits::{
    ADMIN_FINISH_TIME_MAX, ADMIN_KEEPALIVE_INTERVAL, ADMIN_REQUEST_BYTES_MAX, ADMIN_STREAMS_MAX,
    LISTEN_BACKLOG, RETURN_PAUSE, RETURN_TIME, RETURNING_MAX,
};
use crate::memory::{self, Memory};
use crate::metrics::{Contents, Metrics};
use crate::namespace::{self, NamespaceError};
use crate::pool::{self, Pool, PoolError};
use crate::rdma::later::Later;
use crate::rdma::listener::{Listeners, Listening, Ports};
use crate::tls::{self, Certificates, TlsError};

/// How often the list of this machine's addresses is refreshed.
const INTERFACES_REFRESH: Duration = Duration::from_secs(5);

/// The exit status of the process. Documented in docs/reference/server.md.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Ended as requested.
    Done = 0,
    /// A failure at run time, or a second request to end.
    Failed = 1,
    /// The command line is invalid (also clap's code).
    Usage = 2,
    /// The configuration is invalid.
    Config = 3,
    /// A pool cannot be used.
    Pool = 4,
    /// An address or socket cannot be listened on.
    Listen = 5,
    /// The I/O engine that the configuration requires is not available.
    Engine = 6,
    /// A pool's namespace is no longer ours, or was unreachable for too long: the server stopped immediately.
    Fenced = 7,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why the server did not start, or ended with an error.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A pool's namespace.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// An address of the instance.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Certificates of the admin API.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The keytab.
    #[error(transparent)]
    Keytab(#[from] KeytabFileError),
    /// The admin socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// An address.
    #[error("{option}: cannot listen on {address}: {error}: {fix}")]
    Listen {
        /// The configuration option.
        option: &'static str,
        /// Which.
        address: SocketAddr,
        /// Why.
        error: std::io::Error,
        /// What to do.
        fix: &'static str,
    },
    /// The engine.
    #[error("server.io_engine = \"io_uring\": {0}; or set server.io_engine = \"auto\"")]
    Engine(#[from] Unavailable),
    /// The operating system.
    #[error("{what}: {error}")]
    System {
        /// The operation.
        what: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// An event loop ended.
    #[error("an event loop ended: {0}")]
    Loop(String),
    /// A second signal came while draining.
    #[error("ended at once by a second signal")]
    Impatient,
}

impl DaemonError {
    /// The exit status of the process.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self {
            Self::Tls(_) | Self::Keytab(_) => Exit::Config,
            Self::Pool(_) | Self::Namespace(_) => Exit::Pool,
            Self::Address(_) | Self::Socket(_) | Self::Listen { .. } => Exit::Listen,
            Self::Engine(_) => Exit::Engine,
            Self::System { .. } | Self::Loop(_) | Self::Impatient => Exit::Failed,
        }
    }
}

fn system(what: &'static str) -> impl Fn(std::io::Error) -> DaemonError {
    move |error| DaemonError::System { what, error }
}

/// Runs the server until it is requested to end.
///
/// # Errors
/// Why the server did not start, or ended with an error.
pub fn run(config: &Config) -> Result<(), DaemonError> {
    raise_file_limit();
    // After raising the limit of open files, which needs the capability, and before any thread is started.
    quota::obey_limits().map_err(|errno| system("giving up CAP_SYS_RESOURCE")(errno.into()))?;
    let use_uring = choose_engine(config.server.io_engine)?;
    let smb =
        config.server.listen.iter().map(|a| bind("server.listen", *a)).collect::<Result<Vec<_>, _>>()?;
    let http = match config.http.listen.parse() {
        Ok(address) => Some(bind("http.listen", address)?),
        Err(_) => None,
    };
    let admin_tls = match config.admin.listen.parse() {
        Ok(address) => {
            let certificates = Arc::new(Certificates::load(&config.admin)?);
            Some((bind("admin.listen", address)?, certificates))
        }
        Err(_) => None,
    };
    let entrances = Entrances { smb, http, admin_tls, keytab: keytab(config)? };
    let addresses = Addresses::prepare(config)?;
    let namespaces = namespace::attach_all(config, &addresses)?;
    // When this returns, nothing on the pools' file systems is open any more.
    let states = namespaces.iter().map(namespace::Attached::state).collect();
    let result = serve(config, use_uring, entrances, states, &addresses);
    if result.is_ok() {
        settle(config);
    }
    // Before the pools: the next server that takes over the pools can then take over the addresses immediately.
    addresses.give_up();
    namespaces.into_iter().for_each(namespace::Attached::detach);
    result
}

/// After an orderly shutdown: clients that present handles of this server to the next one learn that no data was lost.
fn settle(config: &Config) {
    for section in &config.pool {
        if let Err(error) = pool::settle_starts(&section.path) {
            warn!(pool = section.name, %error, "it could not be noted that all is on stable storage");
        }
    }
}

/// The keys for Kerberos, if it is configured.
fn keytab(config: &Config) -> Result<Option<Arc<KeytabFile>>, KeytabFileError> {
    let path = &config.server.keytab;
    if path.as_os_str().is_empty() {
        return Ok(None);
    }
    let file = KeytabFile::load(path)?;
    info!(principals = ?file.principals(), ntlm = config.server.ntlm, "users may log on by Kerberos");
    Ok(Some(Arc::new(file)))
}

/// Certificates and listener of the admin API over TLS.
type AdminTls = (TcpListener, Arc<Certificates>);

/// Listeners and credentials: everything that can fail before anything is mounted.
struct Entrances {
    smb: Vec<TcpListener>,
    http: Option<TcpListener>,
    admin_tls: Option<AdminTls>,
    keytab: Option<Arc<KeytabFile>>,
}

/// Starts everything that uses mounted file systems, from the pools on.
fn serve(
    config: &Config,
    use_uring: bool,
    entrances: Entrances,
    namespaces: Vec<Arc<namespace::State>>,
    addresses: &Arc<Addresses>,
) -> Result<(), DaemonError> {
    let Entrances { smb: listeners, http, admin_tls, keytab } = entrances;
    let pools = config.pool.iter().map(Pool::open).collect::<Result<Vec<_>, _>>()?;
    // A client that connects from now on waits briefly until connections are accepted.
    addresses.take()?;
    let guid = pools.first().map_or_else(|| Ok(uuid::Uuid::new_v4()), |(pool, _)| pool.server_guid())?;
    if config.server.may_be_relayed() {
        warn!(
            "clients of dialects before 3.1.1 are served unsigned: an attacker on the network can use their logons; \
             raise server.min_dialect, or set server.signing or server.encryption to \"required\""
        );
    }
    let started = clock::wall().0;
    let instance = random_instance().map_err(system("asking for randomness"))?;
    let server = Server::new(ServerConfig {
        guid: guid.to_bytes_le(),
        server_name: config.server.name.clone(),
        started,
        min_dialect: config.server.min_dialect.wire(),
        target_names: config.server.target_names.clone(),
        ntlm: config.server.ntlm,
        kerberos: keytab.as_ref().map(|file| file.kerberos()),
        signing_required: config.server.signing == Signing::Required,
        encryption: match config.server.encryption {
            Encryption::Off => WireEncryption::Off,
            Encryption::Offered => WireEncryption::Offered,
            Encryption::Required => WireEncryption::Required,
        },
        instance,
        predecessors: predecessors(&pools, instance)?,
        io_bytes_max: config.server.max_io.0 as u32,
        caching: config.server.caching,
        directory_leases: config.server.directory_leases,
    });
    let inboxes = (0..loop_count(config))
        .map(|_| Waker::new().map(Inbox::new))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|errno| system("eventfd")(errno.into()))?;
    let loops = Loops::new(inboxes.clone());
    let catalog = Arc::new(Catalog::new(pools, Arc::clone(&server), loops.clone()));
    let io_engine = if use_uring { "io_uring" } else { "readiness" };
    let lanes = Arc::new(Lanes::start(config.server.workers).map_err(system("starting threads"))?);
    let queues = lanes.queues().clone();
    let metrics = Metrics::new(io_engine, queues, contents(&catalog), namespaces.clone());
    let memory = Arc::new(Memory::new(memory::bytes_max(config.server.memory.0)));
    metrics.memory_bytes_max(memory.budget().bytes_max());
    info!(bytes = memory.budget().bytes_max(), "memory for payload (server.memory)");
    let shared = Shared {
        server: Arc::clone(&server),
        loops: loops.clone(),
        lanes,
        buffers: BufferPool::of(memory.budget(), None),
        memory,
        stall_time_max: Duration::from_secs(config.server.stall_timeout_s),
        metrics: Arc::clone(&metrics),
        direct_reads: config.server.direct_reads,
    };
    let (ended, has_ended) = mpsc::unbounded_channel();
    let threads = start_loops(&shared, &inboxes, use_uring, &ended)?;
    drop(ended);
    let listening: Vec<SocketAddr> = listeners.iter().filter_map(|l| l.local_addr().ok()).collect();
    let listen = listening.iter().map(ToString::to_string).collect();
    let rdma = Listening::default();
    if config.server.rdma == Rdma::Auto {
        let listeners = Listeners {
            tcp: listening.clone(),
            ports: Ports { rdma: config.server.rdma_port, iwarp: config.server.iwarp_port },
            loops: loops.clone(),
            metrics: Arc::clone(&metrics),
            listening: rdma.clone(),
        };
        listeners.start().map_err(system("starting threads"))?;
    }
    let health = Arc::new(Health {
        catalog: Arc::clone(&catalog),
        certificates: admin_tls.as_ref().map(|(_, certificates)| Arc::clone(certificates)),
        keytab,
        advertise: config.advertised(),
        addresses: Arc::clone(addresses),
        listening,
        rdma,
        later: (config.server.rdma == Rdma::Auto).then(|| Later::begin(Path::new("/"))),
        namespaces,
    });
    let service = AdminService {
        catalog,
        server,
        loops: loops.clone(),
        life: Arc::default(),
        health,
        about: Arc::new(About { guid, started, io_engine, listen, instance: config.instance.clone() }),
    };
    let daemon = Daemon {
        socket: config.admin.socket.clone(),
        drain_time_max: config.server.drain_time_max(),
        admin_tls,
        service,
        metrics,
        listeners,
        http,
        threads,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("admin")
        .enable_all()
        .build()
        .map_err(system("starting the admin runtime"))?;
    let result = runtime.block_on(daemon.serve(has_ended));
    // A pending request to the admin API may delay the end briefly, but not prevent it.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// A random, nonzero value: related requests in a compound would carry zero.
fn random_instance() -> std::io::Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| std::io::Error::other(error.to_string()))?;
    Ok(u64::from_le_bytes(bytes).max(1))
}

/// Earlier starts; one is durable only if what it acknowledged is on stable storage in every pool.
fn predecessors(
    pools: &[(Pool, Vec<pool::Unserved>)],
    instance: u64,
) -> Result<Vec<Predecessor>, DaemonError> {
    let lists = pools.iter().map(|(pool, _)| pool.predecessors(instance)).collect::<Result<Vec<_>, _>>()?;
    let in_all = |start: &Predecessor| lists.iter().all(|list| list.contains(start));
    let mut all: Vec<Predecessor> = lists
        .iter()
        .flatten()
        .map(|start| Predecessor { durable: start.durable && in_all(start), ..*start })
        .collect();
    all.sort_unstable_by_key(|start| (start.instance, start.durable));
    all.dedup_by_key(|start| start.instance);
    Ok(all)
}

/// Raises the limit of open files to the highest that the system allows: every open file takes a descriptor.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(%error, "the limit of open files could not be raised");
    }
}

fn choose_engine(wanted: IoEngine) -> Result<bool, DaemonError> {
    match wanted {
        IoEngine::Readiness => Ok(false),
        IoEngine::IoUring => uring::probe().map(|()| true).map_err(DaemonError::Engine),
        IoEngine::Auto => match uring::probe() {
            Ok(()) => Ok(true),
            Err(reason) => {
                warn!(%reason, "io_uring is not to be had: using epoll and threads, which costs more CPU per byte");
                Ok(false)
            }
        },
    }
}

fn loop_count(config: &Config) -> usize {
    match config.server.event_loops {
        0 => std::thread::available_parallelism().map_or(1, usize::from).min(crate::limits::EVENT_LOOPS_MAX),
        count => count,
    }
}

fn bind(option: &'static str, address: SocketAddr) -> Result<TcpListener, DaemonError> {
    let listen = || {
        let listener = TcpListener::bind(address)?;
        // Sized for a burst of mounts. The standard library uses 128, and a connection beyond the backlog waits for a
        // second.
        rustix::net::listen(&listener, LISTEN_BACKLOG)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    listen().map_err(|error: std::io::Error| {
        let fix = match error.raw_os_error() {
            Some(libc::EADDRINUSE) => "stop the server that has this port, or configure another",
            Some(libc::EACCES) => "run as root or with CAP_NET_BIND_SERVICE, or configure a port above 1023",
            Some(libc::EADDRNOTAVAIL) => "configure an address of this machine",
            Some(libc::EAFNOSUPPORT) => "this machine has no IPv6: configure \"0.0.0.0:port\"",
            _ => "configure another address",
        };
        DaemonError::Listen { option, address, error, fix }
    })
}

/// The thread that listens for RDMA holds the metrics until the process ends. They must not keep anything in the pools open,
/// because the pools are unmounted before that.
fn contents(catalog: &Arc<Catalog>) -> Box<crate::metrics::Look> {
    let catalog = Arc::downgrade(catalog);
    Box::new(move || -> Contents {
        let Some(catalog) = catalog.upgrade() else { return Contents::default() };
        let pools = catalog.pools().unwrap_or_else(|error| {
            warn!(%error, "metrics of the pools");
            Vec::new()
        });
        Contents {
            pools: pools.into_iter().map(|pool| pool.space).collect(),
            volumes: catalog.volume_figures(),
        }
    })
}

type LoopEnd = Result<(), Errno>;

fn start_loops(
    shared: &Shared,
    inboxes: &[Inbox],
    use_uring: bool,
    ended: &mpsc::UnboundedSender<()>,
) -> Result<Vec<JoinHandle<LoopEnd>>, DaemonError> {
    let start = |(index, inbox): (usize, &Inbox)| {
        // Sent on drop, also by a panic.
        struct Ended(mpsc::UnboundedSender<()>);
        impl Drop for Ended {
            fn drop(&mut self) {
                let _ = self.0.send(());
            }
        }
        let mut shared = shared.clone();
        shared.buffers = BufferPool::of(shared.memory.budget(), None);
        let (waker, ended) = (inbox.waker(), Ended(ended.clone()));
        std::thread::Builder::new().name(format!("loop-{index}")).spawn(move || {
            let _ended = ended;
            if use_uring {
                match Uring::new(waker.clone(), shared.lanes.queues().clone()) {
                    Ok(engine) => return EventLoop::new(engine, shared, index).run(),
                    Err(reason) => warn!(%reason, "no ring for this event loop: using epoll and threads"),
                }
            }
            let engine = Readiness::new(waker, shared.lanes.queues().clone())?;
            EventLoop::new(engine, shared, index).run()
        })
    };
    inboxes.iter().enumerate().map(start).collect::<Result<_, _>>().map_err(system("starting threads"))
}

struct Daemon {
    socket: PathBuf,
    drain_time_max: Duration,
    admin_tls: Option<AdminTls>,
    service: AdminService,
    metrics: Arc<Metrics>,
    listeners: Vec<TcpListener>,
    http: Option<TcpListener>,
    threads: Vec<JoinHandle<LoopEnd>>,
}

impl Daemon {
    /// Keeps the protocol's list of interfaces current: addresses change while a server runs.
    fn announce_interfaces(&self) {
        let server = Arc::clone(&self.service.server);
        let health = Arc::clone(&self.service.health);
        tokio::spawn(async move {
            let mut tick = tokio::time::interval(INTERFACES_REFRESH);
            loop {
                tick.tick().await;
                let found = interfaces::current(&health.listening, &health.advertise, &health.rdma);
                server.set_interfaces(found);
            }
        });
    }

    async fn serve(mut self, mut has_ended: mpsc::UnboundedReceiver<()>) -> Result<(), DaemonError> {
        let mut terminate = signal(SignalKind::terminate()).map_err(system("handling SIGTERM"))?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(system("handling SIGINT"))?;
        let admin_listener = admin::listen(&self.socket)?;
        let (close_admin, closed) = tokio::sync::watch::channel(false);
        let mut admin =
            vec![serve_admin(self.service.clone(), UnixListenerStream::new(admin_listener), closed.clone())];
        let mut admin_address = None;
        if let Some((listener, certificates)) = self.admin_tls.take() {
            let listener = tokio::net::TcpListener::from_std(listener).map_err(system("admin.listen"))?;
            admin_address = listener.local_addr().ok();
            let incoming = tls::accept(listener, Arc::clone(&certificates));
            admin.push(serve_admin(self.service.clone(), ReceiverStream::new(incoming), closed));
            tokio::spawn(certificates.keep_fresh());
        }
        self.announce_interfaces();
        if let Some(keytab) = &self.service.health.keytab {
            tokio::spawn(Arc::clone(keytab).keep_fresh());
        }
        let life: Arc<Life> = Arc::clone(&self.service.life);
        let mut http_address = None;
        if let Some(listener) = self.http {
            http_address = listener.local_addr().ok();
            let listener = tokio::net::TcpListener::from_std(listener).map_err(system("http"))?;
            let health = Arc::clone(&self.service.health);
            let router = http::router(Arc::clone(&self.metrics), Arc::clone(&life), health);
            tokio::spawn(async move {
                if let Err(error) = axum::serve(listener, router).await {
                    error!(%error, "the HTTP endpoints ended");
                }
            });
        }
        let mut acceptors = Vec::new();
        let returning = Returning::new(!self.service.catalog.list("", 1).0.is_empty());
        for listener in self.listeners {
            let listener = tokio::net::TcpListener::from_std(listener).map_err(system("server.listen"))?;
            let (loops, metrics) = (self.service.loops.clone(), Arc::clone(&self.metrics));
            acceptors.push(tokio::spawn(accept(listener, returning.clone(), loops, metrics)));
        }
        let about = &self.service.about;
        info!(
            version = env!("CARGO_PKG_VERSION"), listen = ?about.listen, admin = %self.socket.display(),
            admin_tls = ?admin_address, http = ?http_address, io_engine = about.io_engine, guid = %about.guid, "serving"
        );
        let mut signalled = false;
        tokio::select! {
            () = either(&mut terminate, &mut interrupt) => signalled = true,
            _ = has_ended.recv() => life.drain(true),
            () = life.drain_asked() => {}
        }
        life.begin_draining();
        info!(seconds_max = self.drain_time_max.as_secs(), "draining");
        for acceptor in acceptors {
            acceptor.abort();
        }
        self.service.loops.drain(Instant::now() + self.drain_time_max);
        let mut joined = std::pin::pin!(join(self.threads));
        let result = loop {
            tokio::select! {
                result = &mut joined => break result,
                () = either(&mut terminate, &mut interrupt) => {
                    // After an administrator has requested draining, the first signal requests the end and only the second
                    // aborts.
                    if std::mem::replace(&mut signalled, true) {
                        break Err(DaemonError::Impatient);
                    }
                }
            }
        };
        life.set_drained();
        if result.is_ok() && !signalled {
            info!("drained");
            tokio::select! {
                () = life.exit_asked() => {}
                () = either(&mut terminate, &mut interrupt) => {}
            }
        }
        // An admin client that requested the end still gets its answer.
        let _ = close_admin.send(true);
        for task in admin {
            let _ = tokio::time::timeout(ADMIN_FINISH_TIME_MAX, task).await;
        }
        // The socket may be removed already, or belong to another server: both are harmless.
        let _ = std::fs::remove_file(&self.socket);
        info!("ended");
        result
    }
}

/// Serves the admin API until it is closed, and then completes the pending requests.
fn serve_admin<S, I>(
    service: AdminService,
    incoming: S,
    mut closed: tokio::sync::watch::Receiver<bool>,
) -> tokio::task::JoinHandle<()>
where
    S: tokio_stream::Stream<Item = std::io::Result<I>> + Send + 'static,
    I: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let service = AdminServer::new(service).max_decoding_message_size(ADMIN_REQUEST_BYTES_MAX);
    let admin = tonic::transport::Server::builder()
        .max_concurrent_streams(ADMIN_STREAMS_MAX)
        .http2_keepalive_interval(Some(ADMIN_KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(ADMIN_KEEPALIVE_INTERVAL))
        .add_service(service)
        .serve_with_incoming_shutdown(incoming, async move {
            let _ = closed.wait_for(|closed| *closed).await;
        });
    tokio::spawn(async move {
        if let Err(error) = admin.await {
            error!(%error, "the admin API ended");
        }
    })
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn join(threads: Vec<JoinHandle<LoopEnd>>) -> Result<(), DaemonError> {
    for thread in threads {
        let ended = tokio::task::spawn_blocking(move || thread.join()).await;
        match ended {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(errno))) => return Err(DaemonError::Loop(errno.to_string())),
            Ok(Err(_)) | Err(_) => return Err(DaemonError::Loop("it panicked".to_owned())),
        }
    }
    Ok(())
}

/// Clients that had mounted volumes before this start and reconnect immediately.
#[derive(Clone)]
struct Returning {
    until: tokio::time::Instant,
    places: Arc<Semaphore>,
}

impl Returning {
    fn new(any: bool) -> Self {
        let wait = if any { RETURN_TIME } else { Duration::ZERO };
        Self { until: tokio::time::Instant::now() + wait, places: Arc::new(Semaphore::new(RETURNING_MAX)) }
    }

    /// A place for a connection that has to wait.
    fn place(&self) -> Option<OwnedSemaphorePermit> {
        (tokio::time::Instant::now() < self.until)
            .then(|| Arc::clone(&self.places).try_acquire_owned().ok())
            .flatten()
    }
}

async fn accept(
    listener: tokio::net::TcpListener,
    returning: Returning,
    loops: Loops,
    metrics: Arc<Metrics>,
) {
    loop {
        let accepted = match listener.accept().await {
            Ok((stream, peer)) => stream.into_std().map(|stream| (stream, peer)),
            Err(error) => Err(error),
        };
        match accepted {
            Ok((stream, peer)) => {
                let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
                let (loops, metrics) = (loops.clone(), Arc::clone(&metrics));
                let hand_over = move || {
                    if !loops.accept(Arrival::Socket(stream.into()), peer, &metrics) {
                        metrics.connections_refused.inc();
                        debug!(%peer, "connection refused: too many");
                    }
                };
                match returning.place() {
                    None => hand_over(),
                    Some(place) => drop(tokio::spawn(async move {
                        tokio::time::sleep(RETURN_PAUSE).await;
                        drop(place);
                        hand_over();
                    })),
                }
            }
            Err(error) => {
                // Most likely out of descriptors: accepting again immediately would only waste CPU time.
                warn!(%error, "accepting a connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returning_connections_wait_up_to_a_limit_and_only_if_volumes_exist() {
        assert!(Returning::new(false).place().is_none());
        let returning = Returning::new(true);
        let places: Vec<_> = (0..=RETURNING_MAX).map(|_| returning.place()).collect();
        assert_eq!(places.iter().flatten().count(), RETURNING_MAX);
        drop(places);
        assert!(returning.place().is_some());
    }
}
