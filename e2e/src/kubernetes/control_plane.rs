//! etcd, the API server, the controller manager and the scheduler as plain processes.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::kubectl::Kubectl;
use super::pki::{Identity, Pki};
use super::service::Service;
use super::tools::{self, Tools};
use crate::cache::Cache;
use crate::limits::API_SERVER_DEADLINE;
use crate::progress::step;
use crate::rundir::RunDir;

/// Address range of Services.
pub const SERVICE_CIDR: &str = "10.96.0.0/16";
/// The API server's own Service.
const SERVICE_ADDRESS: &str = "10.96.0.1";

/// Options of a control plane.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address at which nodes reach it. It listens on this address and on loopback.
    pub address: Ipv4Addr,
    /// The API server's port; 0 selects a free one.
    pub port: u16,
    /// Run the controller manager: it empties namespaces, garbage-collects owned objects, and issues tokens for service
    /// accounts.
    pub controllers: bool,
    /// Run the scheduler.
    pub scheduler: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, port: 0, controllers: false, scheduler: false }
    }
}

/// A running control plane. Stopped when dropped.
#[derive(Debug)]
pub struct ControlPlane {
    // Dropped in this order: clients before their servers.
    scheduler: Option<Service>,
    controllers: Option<Service>,
    api: Option<Service>,
    etcd: Service,
    folder: PathBuf,
    pki: Pki,
    tools: Tools,
    options: Options,
    port: u16,
    etcd_port: u16,
}

impl ControlPlane {
    /// Starts it in this existing folder. Returns when the API server reports that it is ready.
    pub fn start(tools: Tools, folder: &Path, options: &Options) -> Result<Self> {
        // Another process can take a free port before its server binds it.
        let mut attempts = 0;
        loop {
            attempts += 1;
            let attempt = folder.join(format!("attempt-{attempts}"));
            fs::create_dir(&attempt).with_context(|| format!("make {}", attempt.display()))?;
            match Self::try_start(tools.clone(), &attempt, options) {
                Ok(plane) => return Ok(plane),
                Err(error) if attempts < 3 && format!("{error:#}").contains("address already in use") => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn try_start(tools: Tools, folder: &Path, options: &Options) -> Result<Self> {
        let pki = Pki::create(&folder.join("pki"))?;
        let own: Vec<String> = [
            "localhost",
            "kubernetes",
            "kubernetes.default",
            "kubernetes.default.svc",
            "127.0.0.1",
            SERVICE_ADDRESS,
        ]
        .map(str::to_owned)
        .into_iter()
        .chain([options.address.to_string()])
        .collect();
        pki.issue_files("api-server", "kube-apiserver", None, &own)?;
        pki.issue_files("kubelet-client", "kube-apiserver-kubelet-client", Some("system:masters"), &[])?;
        pki.issue_files("front-proxy", "front-proxy-client", None, &[])?;
        pki.issue_files("etcd", "etcd", None, &own)?;

        let [etcd_port, peer_port, free_port] = free_ports()?;
        let port = if options.port == 0 { free_port } else { options.port };
        let etcd = Service::start("etcd", &etcd(&tools, &pki, folder, etcd_port, peer_port), folder)?;
        let server = format!("https://127.0.0.1:{port}");
        let masters = Some("system:masters");
        pki.kubeconfig_file("admin.kubeconfig", &server, "admin", masters)?;
        let mut plane = Self {
            scheduler: None,
            controllers: None,
            api: None,
            etcd,
            folder: folder.to_owned(),
            pki,
            tools,
            options: options.clone(),
            port,
            etcd_port,
        };
        plane.start_api_server()?;
        if options.controllers {
            let user = "system:kube-controller-manager";
            plane.pki.kubeconfig_file("controllers.kubeconfig", &server, user, None)?;
            plane.start_controllers()?;
        }
        if options.scheduler {
            plane.pki.kubeconfig_file("scheduler.kubeconfig", &server, "system:kube-scheduler", None)?;
            plane.scheduler = Some(Service::start("kube-scheduler", &plane.scheduler_command(), folder)?);
        }
        Ok(plane)
    }

    /// Starts the API server if it was stopped, and waits until it is ready.
    pub fn start_api_server(&mut self) -> Result<()> {
        self.api = Some(Service::start("kube-apiserver", &self.api_command(), &self.folder)?);
        let until = Instant::now() + API_SERVER_DEADLINE;
        let kubectl = self.kubectl();
        loop {
            self.check()?;
            let last = match kubectl.run(&["get", "--raw", "/readyz"]) {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if Instant::now() > until {
                return Err(last).context("the API server does not become ready");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills the API server: watches break and requests are refused until it is started again.
    pub fn stop_api_server(&mut self) {
        self.api = None;
    }

    fn start_controllers(&mut self) -> Result<()> {
        self.controllers =
            Some(Service::start("kube-controller-manager", &self.controllers_command(), &self.folder)?);
        // Pods and tests depend on the service account that every pod runs as.
        let kubectl = self.kubectl();
        let until = Instant::now() + API_SERVER_DEADLINE;
        while kubectl.run(&["get", "serviceaccount", "default", "-n", "default"]).is_err() {
            self.check()?;
            if Instant::now() > until {
                bail!("the controller manager makes no service accounts");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Fails if one of its processes has ended unexpectedly.
    pub fn check(&mut self) -> Result<()> {
        self.etcd.check()?;
        let others = [&mut self.api, &mut self.controllers, &mut self.scheduler];
        others.into_iter().flatten().try_for_each(Service::check)
    }

    /// A client with all permissions.
    pub fn kubectl(&self) -> Kubectl {
        Kubectl::new(self.tools.path("kubectl"), self.kubeconfig())
    }

    /// The path of a kubeconfig with all permissions.
    pub fn kubeconfig(&self) -> PathBuf {
        self.pki.path("admin.kubeconfig")
    }

    /// Writes a kubeconfig for this user (and group) and returns its path, for tests of the user's permissions.
    pub fn kubeconfig_for(&self, user: &str, group: Option<&str>) -> Result<PathBuf> {
        let file = format!("{}.kubeconfig", user.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        self.pki.kubeconfig_file(&file, &self.server(), user, group)
    }

    /// The text of a kubeconfig for a client that connects to this address (`host:port`).
    pub fn kubeconfig_text(&self, at: &str, identity: &Identity) -> String {
        self.pki.kubeconfig(&format!("https://{at}"), identity)
    }

    /// Its certificate authority.
    pub fn pki(&self) -> &Pki {
        &self.pki
    }

    /// `https://127.0.0.1:<port>`.
    pub fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// The API server's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The folder of logs and data.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn api_command(&self) -> Command {
        let pki = |name: &str| self.pki.path(name).display().to_string();
        let mut api = Command::new(self.tools.path("kube-apiserver"));
        let local = self.options.address == Ipv4Addr::LOCALHOST;
        let mut flag = |name: &str, value: &str| {
            api.arg(format!("--{name}={value}"));
        };
        flag("etcd-servers", &format!("https://127.0.0.1:{}", self.etcd_port));
        flag("etcd-cafile", &pki("ca.crt"));
        flag("etcd-certfile", &pki("etcd.crt"));
        flag("etcd-keyfile", &pki("etcd.key"));
        flag("bind-address", if local { "127.0.0.1" } else { "0.0.0.0" });
        flag("advertise-address", &self.options.address.to_string());
        if local {
            // A Service must not point to loopback. Without nodes nothing uses it.
            flag("endpoint-reconciler-type", "none");
        }
        flag("secure-port", &self.port.to_string());
        flag("tls-cert-file", &pki("api-server.crt"));
        flag("tls-private-key-file", &pki("api-server.key"));
        flag("client-ca-file", &pki("ca.crt"));
        flag("service-account-key-file", &pki("service-accounts.pub"));
        flag("service-account-signing-key-file", &pki("service-accounts.key"));
        flag("service-account-issuer", "https://kubernetes.default.svc");
        flag("kubelet-client-certificate", &pki("kubelet-client.crt"));
        flag("kubelet-client-key", &pki("kubelet-client.key"));
        flag("kubelet-certificate-authority", &pki("ca.crt"));
        flag("kubelet-preferred-address-types", "InternalIP");
        flag("requestheader-client-ca-file", &pki("ca.crt"));
        flag("requestheader-allowed-names", "front-proxy-client");
        flag("requestheader-username-headers", "X-Remote-User");
        flag("requestheader-group-headers", "X-Remote-Group");
        flag("requestheader-extra-headers-prefix", "X-Remote-Extra-");
        flag("proxy-client-cert-file", &pki("front-proxy.crt"));
        flag("proxy-client-key-file", &pki("front-proxy.key"));
        flag("authorization-mode", "Node,RBAC");
        flag("enable-admission-plugins", "NodeRestriction");
        flag("service-cluster-ip-range", SERVICE_CIDR);
        flag("allow-privileged", "true");
        api
    }

    fn controllers_command(&self) -> Command {
        let pki = |name: &str| self.pki.path(name).display().to_string();
        let mut controllers = self.client_command("kube-controller-manager", &pki("controllers.kubeconfig"));
        let mut flag = |name: &str, value: &str| {
            controllers.arg(format!("--{name}={value}"));
        };
        flag("service-account-private-key-file", &pki("service-accounts.key"));
        flag("root-ca-file", &pki("ca.crt"));
        flag("cluster-signing-cert-file", &pki("ca.crt"));
        flag("cluster-signing-key-file", &pki("ca.key"));
        flag("use-service-account-credentials", "true");
        controllers
    }

    fn scheduler_command(&self) -> Command {
        let kubeconfig = self.pki.path("scheduler.kubeconfig").display().to_string();
        self.client_command("kube-scheduler", &kubeconfig)
    }

    fn client_command(&self, name: &str, kubeconfig: &str) -> Command {
        let mut command = Command::new(self.tools.path(name));
        for flag in ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"] {
            command.arg(format!("--{flag}={kubeconfig}"));
        }
        // No port: nothing connects to them, and several labs share this machine's loopback.
        command.args(["--leader-elect=false", "--secure-port=0"]);
        command
    }
}

fn etcd(tools: &Tools, pki: &Pki, folder: &Path, port: u16, peer_port: u16) -> Command {
    let mut etcd = Command::new(tools.path("etcd"));
    let client = format!("https://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{peer_port}");
    etcd.arg("--data-dir").arg(folder.join("etcd"));
    // Its data is only needed while its processes run: nothing has to survive a power loss.
    etcd.arg("--unsafe-no-fsync");
    etcd.arg("--listen-client-urls").arg(&client).arg("--advertise-client-urls").arg(&client);
    etcd.arg("--listen-peer-urls").arg(&peer).arg("--initial-advertise-peer-urls").arg(&peer);
    etcd.arg("--initial-cluster").arg(format!("default={peer}"));
    etcd.arg("--client-cert-auth").arg("--trusted-ca-file").arg(pki.path("ca.crt"));
    etcd.arg("--cert-file").arg(pki.path("etcd.crt")).arg("--key-file").arg(pki.path("etcd.key"));
    etcd.args(["--log-level", "warn"]);
    etcd
}

fn free_ports() -> Result<[u16; 3]> {
    // Held until all are found, so that the ports differ.
    let listeners = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let mut ports = [0; 3];
    for (port, listener) in ports.iter_mut().zip(listeners) {
        *port = listener?.local_addr()?.port();
    }
    Ok(ports)
}

/// A private API server on loopback. It needs no nodes and no root, and ends when this value is dropped or the process ends.
#[derive(Debug)]
pub struct LocalApiServer {
    plane: ControlPlane,
    _rundir: RunDir,
}

impl LocalApiServer {
    /// Builds the missing programs and starts it; `controllers` adds the controller manager.
    pub fn start(controllers: bool) -> Result<Self> {
        let cache = Cache::open()?;
        let groups: &[&[&str]] = if controllers { &[tools::API, tools::CONTROL] } else { &[tools::API] };
        let tools = Tools::prepare(&cache, groups)?;
        // There may be several in one process: each has a number.
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let rundir = RunDir::create(&format!("api-{}-{number}", std::process::id()))?;
        let options = Options { controllers, ..Options::default() };
        let plane =
            step("starting etcd and the API server", || ControlPlane::start(tools, rundir.path(), &options))?;
        Ok(Self { plane, _rundir: rundir })
    }
}

impl std::ops::Deref for LocalApiServer {
    type Target = ControlPlane;

    fn deref(&self) -> &ControlPlane {
        &self.plane
    }
}

impl std::ops::DerefMut for LocalApiServer {
    fn deref_mut(&mut self) -> &mut ControlPlane {
        &mut self.plane
    }
}
